//! The open connections: caps on their number, and a way to shut all of them down.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::permits::{PerSource, Source};
use crate::os::stream::Stream;

#[derive(Debug)]
pub struct Connections {
    max_connections: usize,
    /// The cap for each address or IPv6 network.
    max_per_source: Option<usize>,
    farewell: &'static [u8],
    /// The maximum number of connections over a cap that are admitted to be refused.
    max_refused: usize,
    /// Whether clients must authenticate.
    requires_auth: bool,
    numbers: Arc<ConnectionNumbers>,
    open: Mutex<OpenStreams>,
    one_closed: Condvar,
}

/// Gives each connection a number, counted from 1 and never reused.
#[derive(Debug, Default)]
pub struct ConnectionNumbers {
    last: Mutex<u64>,
    /// The number of connections that were closed or refused because of a cap.
    turned_away_count: Mutex<u64>,
}

impl ConnectionNumbers {
    pub fn next(&self) -> u64 {
        let mut last = self.last.lock();
        *last += 1;
        *last
    }
}

#[derive(Debug)]
struct OpenStreams {
    streams: HashMap<u64, Arc<Stream>>,
    /// The number of open connections that were admitted to be refused.
    refused_count: usize,
    /// The open connections whose clients must still authenticate, the oldest first.
    unauthenticated: BTreeSet<u64>,
    /// The number of connections from each source; empty without a cap per source.
    per_source: PerSource,
    /// When the most recent connection closed. Not meaningful while a connection is open.
    empty_since: Instant,
    /// Whether accepting has stopped for good.
    closed: bool,
}

/// An open connection, which counts against the caps until this is dropped.
#[derive(Debug)]
pub struct Admission {
    connections: Arc<Connections>,
    /// The connection's number, counted from 1 and never reused.
    pub id: u64,
    pub stream: Arc<Stream>,
    /// The cap that the connection exceeds. It is admitted only to be refused.
    pub exceeds: Option<CapReached>,
    /// The cap for which another connection was closed to make room for this one.
    pub displaced_for: Option<CapReached>,
    /// The source that the connection is counted for, if there is a cap per source.
    source: Option<Source>,
}

/// The cap that a rejected connection would exceed. The log shows its display form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapReached {
    Total,
    PerSource(Source),
    /// The total, within which a client that has not authenticated made room.
    Unauthenticated,
}

impl fmt::Display for CapReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CapReached::Total => f.write_str("max-connections"),
            CapReached::PerSource(Source::Address(source)) => {
                write!(f, "max-connections-per-ip source={source}")
            }
            CapReached::PerSource(Source::User(Some(user))) => {
                write!(f, "max-connections-per-user peer_uid={user}")
            }
            CapReached::PerSource(Source::User(None)) => {
                f.write_str("max-connections-per-user peer_uid=unknown")
            }
            CapReached::Unauthenticated => f.write_str("max-connections-without-token"),
        }
    }
}

impl Connections {
    /// Allows at most `max_connections` at a time, and at most `max_per_source` from one address or
    /// one IPv6 /64 network; connections over Unix sockets are not counted for an address. A
    /// connection that would exceed a cap is sent `farewell` and closed.
    pub fn new(
        max_connections: usize,
        max_per_source: Option<usize>,
        farewell: &'static [u8],
    ) -> Self {
        Connections {
            max_connections,
            max_per_source,
            farewell,
            max_refused: 0,
            requires_auth: false,
            numbers: Arc::default(),
            open: Mutex::new(OpenStreams {
                streams: HashMap::new(),
                refused_count: 0,
                unauthenticated: BTreeSet::new(),
                per_source: PerSource::default(),
                empty_since: Instant::now(),
                closed: false,
            }),
            one_closed: Condvar::new(),
        }
    }

    /// Also admits up to `max_refused` connections over a cap, which are marked as such. A close at
    /// once would reset a connection whose client still sends its request, and the client could not
    /// read why it is refused.
    pub fn admitting_refused(self, max_refused: usize) -> Self {
        Connections {
            max_refused,
            ..self
        }
    }

    /// If clients must authenticate, a connection for which there is no room displaces the oldest
    /// one whose client has not: a client sends its token at once, and a stranger only waits.
    pub fn requiring_auth(self, requires_auth: bool) -> Self {
        Connections {
            requires_auth,
            ..self
        }
    }

    /// Takes the numbers of connections from those of `other`, so that no number belongs to a
    /// connection of each. A connection that is turned away also counts at `other`.
    pub fn numbered_with(self, other: &Connections) -> Self {
        Connections {
            numbers: Arc::clone(&other.numbers),
            ..self
        }
    }

    /// The maximum number of connections.
    pub fn max(&self) -> usize {
        self.max_connections
    }

    /// The number of connections that were closed or refused because of a cap.
    pub fn turned_away_count(&self) -> u64 {
        *self.numbers.turned_away_count.lock()
    }

    /// The source of the numbers of these connections.
    pub fn numbers(&self) -> &ConnectionNumbers {
        &self.numbers
    }

    /// Accepts a connection and gives it a number. If the connection would exceed a cap, closes it
    /// and returns that cap. `accept` must not block: it runs under the mutex, so that
    /// [`Connections::close_if_empty`] overlooks no connection. Once accepting has stopped, this
    /// call blocks forever.
    pub fn admit(
        self: &Arc<Self>,
        accept: impl FnOnce() -> io::Result<Stream>,
    ) -> io::Result<Result<Admission, CapReached>> {
        let mut open = self.open.lock();
        while open.closed {
            self.one_closed.wait(&mut open);
        }
        let stream = Arc::new(accept()?);
        let is_full = open.streams.len() >= self.max_connections;
        let max_and_address = self.max_per_source.zip(stream.source());
        let counted = match max_and_address {
            _ if is_full && open.unauthenticated.is_empty() => Err(CapReached::Total),
            Some((max, address)) => open.count(Source::Address(address), max).map(Some),
            None => Ok(None),
        };
        let (source, exceeds) = match counted {
            Ok(source) => (source, None),
            Err(cap) if open.refused_count < self.max_refused => (None, Some(cap)),
            Err(cap) => {
                drop(open);
                *self.numbers.turned_away_count.lock() += 1;
                stream.send_once(self.farewell);
                return Ok(Err(cap));
            }
        };
        let id = self.numbers.next();
        let mut displaced_for = None;
        if exceeds.is_some() {
            open.refused_count += 1;
        } else {
            if is_full {
                open.displace_oldest();
                displaced_for = Some(CapReached::Unauthenticated);
            }
            open.streams.insert(id, Arc::clone(&stream));
            if self.requires_auth {
                open.unauthenticated.insert(id);
            }
        }
        if exceeds.or(displaced_for).is_some() {
            *self.numbers.turned_away_count.lock() += 1;
        }
        Ok(Ok(Admission {
            connections: Arc::clone(self),
            id,
            stream,
            exceeds,
            displaced_for,
            source,
        }))
    }

    /// Stops accepting if no connection is open and `is_quiet` returns `true`. Returns whether
    /// accepting has stopped. Connections in the backlog are left to the next server on the socket.
    pub fn close_if_empty(&self, is_quiet: impl FnOnce() -> bool) -> bool {
        let mut open = self.open.lock();
        open.closed |= open.streams.is_empty() && is_quiet();
        open.closed
    }

    pub fn close(&self) {
        self.open.lock().closed = true;
    }

    /// When the most recent connection closed; `None` while a connection is open.
    pub fn empty_since(&self) -> Option<Instant> {
        let open = self.open.lock();
        open.streams.is_empty().then_some(open.empty_since)
    }

    /// The number of unread bytes that have arrived on connection `id`.
    pub fn unread_len(&self, id: u64) -> u64 {
        let open = self.open.lock();
        let stream = open.streams.get(&id);
        stream.map_or(0, |stream| stream.unread_len())
    }

    /// Shuts down one or both directions of every connection.
    pub fn shut_down_all(&self, how: Shutdown) {
        for stream in self.open.lock().streams.values() {
            stream.shutdown(how);
        }
    }

    /// Blocks until no connection is open. Gives up after `limit`, or when no connection has closed
    /// for `patience`.
    pub fn wait_until_none(&self, patience: Duration, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut open = self.open.lock();
        while !open.streams.is_empty() {
            let look_at = deadline.min(Instant::now() + patience);
            if self.one_closed.wait_until(&mut open, look_at).timed_out() {
                return;
            }
        }
    }
}

impl Admission {
    /// Lets the client stay, because it has authenticated or must do so at another server.
    pub fn let_in(&self) {
        let mut open = self.connections.open.lock();
        open.unauthenticated.remove(&self.id);
    }

    /// Counts the connection for its user, who may have at most `max` connections. Call this only
    /// for a connection that is not counted for an address.
    pub fn count_for_user(&mut self, user: Option<u32>, max: usize) -> Result<(), CapReached> {
        debug_assert_eq!(self.source, None);
        let mut open = self.connections.open.lock();
        self.source = Some(open.count(Source::User(user), max)?);
        Ok(())
    }
}

impl OpenStreams {
    /// Ends the oldest connection whose client has not authenticated.
    fn displace_oldest(&mut self) {
        // Its place is free at once, although its thread has yet to notice.
        let oldest = self.unauthenticated.pop_first();
        let oldest = oldest.and_then(|oldest| self.streams.remove(&oldest));
        oldest.inspect(|stream| stream.shutdown(Shutdown::Both));
    }

    /// Counts one more connection from `source`, which may have at most `max` connections.
    fn count(&mut self, source: Source, max: usize) -> Result<Source, CapReached> {
        if self.per_source.add(source, max) {
            Ok(source)
        } else {
            Err(CapReached::PerSource(source))
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        if self.exceeds.is_some() {
            open.refused_count -= 1;
            return;
        }
        open.streams.remove(&self.id);
        open.unauthenticated.remove(&self.id);
        if let Some(source) = self.source {
            open.per_source.remove(source);
        }
        open.empty_since = Instant::now();
        drop(open);
        self.connections.one_closed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::stream::Socket;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_source_whose_connections_have_closed_is_forgotten() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback interface");
        let addr = listener.local_addr().expect("an address");
        let connections = Arc::new(Connections::new(9, Some(2), b""));
        let mut peers = Vec::new();
        let mut admit = || {
            peers.push(TcpStream::connect(addr).expect("a connection"));
            let (stream, _) = listener.accept().expect("a connection");
            connections
                .admit(|| Ok(Stream::new(Socket::Tcp(stream))))
                .expect("open")
        };
        let (first, second) = (admit().expect("room"), admit().expect("room"));
        let source = Source::Address(addr.ip());
        assert_eq!(admit().err(), Some(CapReached::PerSource(source)));
        drop(first);
        let third = admit().expect("room again");
        assert!(admit().is_err());
        drop((second, third));
        assert!(connections.open.lock().per_source.is_empty());
    }

    #[test]
    fn each_user_has_a_cap_and_unknown_ones_have_one_together() {
        let connections = Arc::new(Connections::new(9, None, b""));
        let mut peers = Vec::new();
        let mut of_user = |user| {
            let (ours, theirs) = UnixStream::pair().expect("a socket pair");
            peers.push(theirs);
            let admitted = connections.admit(|| Ok(Stream::new(Socket::Unix(ours))));
            let mut admission = admitted.expect("open").expect("room");
            admission.count_for_user(user, 2).map(|()| admission)
        };
        for user in [Some(0), Some(1), None] {
            let counted = [of_user(user), of_user(user), of_user(user)];
            assert_eq!(counted.map(|counted| counted.is_ok()), [true, true, false]);
        }
        assert!(connections.open.lock().per_source.is_empty());
    }
}
