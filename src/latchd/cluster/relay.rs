//! The work of a standby: it relays connections to the active server, byte for byte, and cuts them
//! when another server becomes active.
//!
//! A client that knows all servers could connect to the active one itself. But many clients have
//! only one address, mostly that of the server on their own host, and cannot be sent elsewhere: the
//! client may be unable to resolve or reach the addresses that the servers have for each other. A
//! client with TLS expects the name of this server, and a client on a Unix socket cannot reach
//! another host.
//!
//! A standby that stops cuts off the clients that can adopt their grants over a new connection,
//! because they lose nothing by it. It lets the others go on. The `hello` of a client tells which
//! kind it is.

use std::collections::HashMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use log::{debug, warn};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{recv, send, shutdown, sockopt, RecvFlags, SendFlags};

use super::first_bytes::{FirstBytes, Meaning};
use super::{first_of, ClusterNode, PATIENCE};
use crate::os::event::{time_left, wait_for};
use crate::os::notify::notify;
use crate::os::stream::{keep_alive, Socket, Stream};
use crate::os::text::reason;
use crate::shared::log::Throttle;
use crate::shared::net::listener::SEND_BUFFER_LEN;
use crate::wire::abilities::Abilities;
use crate::wire::request::{parse, Request, RELAY};

/// The pause before the next attempt to reach the active server.
const PAUSE: Duration = Duration::from_millis(100);

/// The pause of a relay that was woken but could move nothing.
const SHORT_PAUSE: Duration = Duration::from_millis(10);

/// While no server is active, a standby checks at this interval whether the client is still there.
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// The maximum time for resolving the active server's address, and for one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a client may take to read the last replies, and to close its side, after the active
/// server has closed the connection.
const CLOSING_TIME: Duration = Duration::from_secs(5);

/// The maximum number of bytes to read from one end before the other end has accepted them.
const BUFFER_LEN: usize = 8 * 1024;

/// The maximum number of pieces that are passed on to a client after its relay was cut. Without a
/// maximum, the cut could take for ever, because the server may still be answering requests.
const LAST_PIECES: u32 = 64;

/// A connection that is passed on to the active server.
struct Relay {
    /// The number of the term in which that server is active.
    epoch: u64,
    client: Arc<Stream>,
    server: Arc<Stream>,
    /// Whether the client can adopt its grants over another connection.
    can_adopt: AtomicBool,
    /// Set when the relaying thread must reset both connections.
    is_cut: AtomicBool,
}

impl Relay {
    /// Tells the relaying thread to reset both connections. Replies that have arrived from the
    /// server are still passed on. Without a reset, the active server would see the end of the
    /// stream, and take it for a word of the client.
    fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        self.client.shutdown(Shutdown::Read);
        self.server.shutdown(Shutdown::Read);
    }
}

/// The connections that this server passes on.
#[derive(Default)]
pub struct Relays {
    /// The open relays. The key is the file descriptor of the connection to the active server.
    open: Mutex<HashMap<RawFd, Arc<Relay>>>,
    throttle: Throttle,
}

/// What is to be done with a connection, or was done with it.
#[derive(Debug, PartialEq, Eq)]
pub enum Disposition {
    /// This server must serve the connection itself. The client has begun with these bytes, which
    /// have been read.
    ServeHere(Vec<u8>),
    /// The connection is over. It was relayed to its end, answered or turned away.
    Over,
    /// The client has sent nothing in time.
    Silent,
}

impl ClusterNode {
    /// Ends relays when another server becomes active, and reports each change of the role to the
    /// supervisor. Never returns.
    pub fn watch_role(&self) -> ! {
        let mut role = self.role();
        loop {
            if let Err(error) = notify(&format!("STATUS={}", role.status())) {
                warn!("cannot-notify error=\"{}\"", reason(&error));
            }
            role = self.wait_for_change(&role, Duration::from_secs(3600));
            self.end_old_relays();
        }
    }

    /// Ends the relays to servers that are no longer active. Ends none while no active server is
    /// known, because the previous one may still be active.
    fn end_old_relays(&self) {
        let open = self.relays.open.lock();
        let Some(active) = self.role().active else {
            return;
        };
        let old = open.values().filter(|relay| relay.epoch != active.epoch);
        old.for_each(|relay| relay.cut());
    }

    /// Cuts the connections of clients that can adopt their grants over a new connection. Call this
    /// when the standby stops.
    pub fn cut_adopters(&self) {
        let open = self.relays.open.lock();
        let adopting = open
            .values()
            .filter(|it| it.can_adopt.load(Ordering::SeqCst));
        adopting.for_each(|relay| relay.cut());
    }

    /// If this server is active, returns the connection, which the caller must serve. If it is a
    /// standby, relays the connection until it ends, or answers a request for the role.
    ///
    /// Blocks for at most `read_timeout` until the client's first bytes arrive, then for at most
    /// three times the TTL until there is an active server, and then as long as the connection
    /// lasts. The client must accept each piece that is passed on to it within `write_timeout`
    /// (`None`: no limit).
    pub fn relay_or_serve(
        &self,
        client: &Arc<Stream>,
        read_timeout: Duration,
        write_timeout: Option<Duration>,
    ) -> Disposition {
        let mut first = FirstBytes::default();
        loop {
            let deadline = Instant::now() + read_timeout;
            if self.is_active() {
                return self.take_in(client, first, deadline);
            }
            // An arm with `{}` starts the loop again: it checks the role, and then looks at the
            // next frame.
            match first.meaning_within(client, deadline) {
                Some(Meaning::Other) => return self.pass_on(client, first, write_timeout),
                Some(Meaning::Cluster) if self.tell_role(client, &mut first, deadline) => {}
                // Another server believes that this one is active. It may be right: this server may
                // have won a new term, and still be restoring the holders of the previous term. So
                // wait until this server is active.
                Some(Meaning::Relay) if self.wait_until_active() => {}
                Some(Meaning::Relay) => {
                    debug!("turned-away peer={client} reason=relay-to-standby");
                    return Disposition::Over;
                }
                Some(_) => return Disposition::Over,
                None if self.is_active() => {}
                None => return Disposition::Silent,
            }
        }
    }

    /// Prepares a connection that this server serves itself. A connection that a standby relays
    /// begins with a frame in clear text, which has the epoch that the standby knows. If clients
    /// must speak TLS, that frame has to be removed here, before the TLS handshake. The connection
    /// is refused if the frame has another epoch.
    fn take_in(&self, client: &Stream, mut first: FirstBytes, deadline: Instant) -> Disposition {
        if !client.is_tls() {
            return Disposition::ServeHere(first.into_bytes());
        }
        match first.meaning_within(client, deadline) {
            Some(Meaning::Relay) => {}
            Some(Meaning::End) => return Disposition::Over,
            Some(_) => return Disposition::ServeHere(first.into_bytes()),
            None => return Disposition::Silent,
        }
        let frame = first.take_frame(client, deadline).unwrap_or_default();
        let epoch = frame.split(|byte| *byte == b'\n').nth(1);
        if epoch.is_some_and(|epoch| self.is_current_epoch(epoch)) {
            return Disposition::ServeHere(first.into_bytes());
        }
        debug!("turned-away peer={client} reason=relay-of-another-epoch");
        Disposition::Over
    }

    /// Answers a request for the role; `false` if the request is incomplete or the client is gone.
    fn tell_role(&self, client: &Stream, first: &mut FirstBytes, deadline: Instant) -> bool {
        let answer = format!("{}\n", self.role_line());
        first.take_frame(client, deadline).is_some()
            && client.send_once(answer.as_bytes()) == answer.len()
    }

    /// Relays a connection to the active server as soon as there is one.
    fn pass_on(
        &self,
        client: &Arc<Stream>,
        first: FirstBytes,
        write_timeout: Option<Duration>,
    ) -> Disposition {
        let deadline = Instant::now() + self.settings.ttl * PATIENCE;
        let mut is_waiting = false;
        loop {
            let role = self.role();
            if role.is_own {
                return Disposition::ServeHere(first.into_bytes());
            }
            let left = time_left(deadline);
            // A client that has left must not use up a connection until the deadline.
            if left.is_zero() || is_waiting && client.has_hung_up() {
                return Disposition::Over;
            }
            let active = role.active.as_ref();
            let target = active.and_then(|active| Some((active.epoch, active.address.as_ref()?)));
            let pause = match target.map(|(epoch, it)| (epoch, it, connect_to_active(epoch, it))) {
                None => LONG_PAUSE,
                Some((epoch, _, Ok(server))) => {
                    self.relay(client, first, server, epoch, write_timeout);
                    return Disposition::Over;
                }
                Some((_, active, Err(error))) => {
                    let error = reason(&error);
                    self.relays.throttle.warn(format_args!(
                        "cannot-relay active={active} error=\"{error}\""
                    ));
                    PAUSE
                }
            };
            self.wait_for_change(&role, left.min(pause));
            is_waiting = true;
        }
    }

    /// Relays both directions until both have ended, or until another server becomes active.
    fn relay(
        &self,
        client: &Arc<Stream>,
        first: FirstBytes,
        server: Stream,
        epoch: u64,
        write_timeout: Option<Duration>,
    ) {
        let relay = Arc::new(Relay {
            epoch,
            client: Arc::clone(client),
            server: Arc::new(server),
            can_adopt: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
        });
        // Like the other end, until an end of the stream is passed on.
        let _ = sockopt::set_socket_linger(client, Some(Duration::ZERO));
        let (fd, server) = (relay.server.as_fd().as_raw_fd(), Arc::clone(&relay.server));
        self.relays.open.lock().insert(fd, Arc::clone(&relay));
        // The role may have changed before the relay was registered.
        self.end_old_relays();
        let pumped = pump(
            client,
            first.into_bytes(),
            &server,
            write_timeout,
            &relay.is_cut,
            || {
                relay.can_adopt.store(true, Ordering::SeqCst);
                if self.is_leaving() {
                    relay.cut();
                }
            },
        );
        self.relays.open.lock().remove(&fd);
        if let Err(error) = pumped {
            let error = reason(&error);
            debug!("relay-broken peer={client} error=\"{error}\"");
            if client.has_hung_up() && client.was_ended_by_peer() {
                pass_on_end(&server);
            }
        }
    }
}

/// Connects to the active server, and sends the frame that announces a relayed client. The frame
/// has the epoch.
fn connect_to_active(epoch: u64, address: &str) -> io::Result<Stream> {
    let connect = |addr: &SocketAddr| TcpStream::connect_timeout(addr, CONNECT_TIMEOUT);
    let server = first_of(address, Instant::now() + CONNECT_TIMEOUT, connect)?;
    // If the servers can reach etcd but not each other, there is no new epoch to cut the
    // connection. Then only the kernel's keep-alive notices.
    keep_alive(&server)?;
    // However this process ends, the active server sees a reset, which is no word of the client.
    sockopt::set_socket_linger(&server, Some(Duration::ZERO))?;
    // With the default size, the kernel would buffer megabytes that a client sends during a long
    // wait.
    sockopt::set_socket_send_buffer_size(&server, SEND_BUFFER_LEN)?;
    let greeting = [RELAY, b"\n", epoch.to_string().as_bytes(), b"\n_\n"].concat();
    // This cannot block, because the socket's buffer is empty and larger than the frame.
    send(&server, &greeting, SendFlags::NOSIGNAL)?;
    Ok(Stream::new(Socket::Tcp(server)))
}

/// Passes the end of a stream on. From here on, the kernel delivers it, even if this process ends.
fn pass_on_end(to: &Stream) {
    // These fail if the other end has gone, and then the events of that end show it.
    let _ = sockopt::set_socket_linger(to, None);
    let _ = shutdown(to, rustix::net::Shutdown::Write);
}

/// One direction of a relayed connection.
struct Direction<'a> {
    from: &'a Stream,
    to: &'a Stream,
    /// Set here if the stream ends, but not by its peer.
    is_cut: &'a AtomicBool,
    /// The bytes that have been read but not sent.
    unsent: Vec<u8>,
    /// Since when there have been unsent bytes.
    unsent_since: Option<Instant>,
    /// The end of the stream has been passed on.
    is_over: bool,
}

impl Direction<'_> {
    /// Moves at most one buffer of bytes without blocking, and passes on the end of the stream.
    /// Returns whether anything has moved. `from_events` and `to_events` are the poll events of the
    /// two ends. Calls `look_at` with the bytes that were read.
    fn advance(
        &mut self,
        from_events: PollFlags,
        to_events: PollFlags,
        look_at: impl FnOnce(&[u8]),
    ) -> io::Result<bool> {
        let len = self.unsent.len();
        // Send only if `to_events` reports the socket as writable or broken. Otherwise, the kernel
        // may still take a few bytes now and then, even if the client reads nothing. The client
        // would then look slow instead of stuck, and could escape the write timeout.
        if to_events.intersects(!PollFlags::IN) {
            self.send()?;
        }
        let is_readable = from_events.intersects(!PollFlags::OUT);
        let has_sent = self.unsent.len() != len;
        if self.is_over || !is_readable || !self.unsent.is_empty() {
            return Ok(has_sent);
        }
        let mut piece = [0; BUFFER_LEN];
        match recv(self.from, &mut piece, RecvFlags::DONTWAIT) {
            Ok((0, _)) if !self.from.was_ended_by_peer() => {
                self.is_cut.store(true, Ordering::SeqCst);
            }
            Ok((0, _)) => {
                self.is_over = true;
                pass_on_end(self.to);
            }
            Ok((len, _)) => {
                look_at(&piece[..len]);
                self.unsent.extend(&piece[..len]);
                self.send()?;
            }
            Err(Errno::AGAIN | Errno::INTR) => return Ok(has_sent),
            Err(error) => return self.from.noting(Err(error)),
        }
        Ok(true)
    }

    fn send(&mut self) -> io::Result<()> {
        if self.unsent.is_empty() {
            return Ok(());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match send(self.to, &self.unsent, flags) {
            Ok(len) => drop(self.unsent.drain(..len)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return self.to.noting(Err(error)),
        }
        let since = self.unsent_since;
        self.unsent_since = (!self.unsent.is_empty()).then(|| since.unwrap_or_else(Instant::now));
        Ok(())
    }
}

/// Relays bytes and the end of the stream in both directions. `first` is what has been read from
/// the client already. Calls `note_can_adopt` if the client says that it can adopt its grants.
///
/// Returns when both directions have ended. When only the server's has ended, waits for the
/// client's for at most [`CLOSING_TIME`].
///
/// Fails with [`io::ErrorKind::TimedOut`] if the client does not read for `write_timeout` (`None`:
/// no limit). Without this limit, such a relay could last for ever: if the active server closed the
/// connection, this function would not see it, because it reads nothing from the server until the
/// client has taken the earlier bytes.
///
/// To cut the relay, set `is_cut` and shut down the ends for reading. This function then passes on
/// the replies that have arrived from the server, as far as the client takes them at once, and then
/// fails. It does the same if a stream has ended without a word of its peer.
fn pump(
    client: &Stream,
    first: Vec<u8>,
    server: &Stream,
    write_timeout: Option<Duration>,
    is_cut: &AtomicBool,
    note_can_adopt: impl Fn(),
) -> io::Result<()> {
    let direction = |from, to| Direction {
        from,
        to,
        is_cut,
        unsent: Vec::new(),
        unsent_since: None,
        is_over: false,
    };
    let (mut up, mut down) = (direction(client, server), direction(server, client));
    let (mut closes_at, mut hello_watch) = (None, HelloWatch::default());
    let mut look_at = |bytes: &[u8]| {
        if hello_watch.look_at(bytes) {
            note_can_adopt();
        }
    };
    look_at(&first);
    up.unsent = first;
    up.send()?;
    let mut was_woken = false;
    let (mut client_events, mut server_events) = (PollFlags::IN, PollFlags::IN);
    loop {
        if is_cut.load(Ordering::SeqCst) {
            // A reply that has arrived may tell the client of a grant, so pass it on.
            for _ in 0..LAST_PIECES {
                if !down.advance(PollFlags::IN, PollFlags::OUT, |_| {})? {
                    break;
                }
            }
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        // Replies come first: if sending to the server fails, they have been passed on.
        let moved = [
            down.advance(server_events, client_events, |_| {})?,
            up.advance(client_events, server_events, &mut look_at)?,
        ];
        if down.is_over && up.is_over {
            return Ok(());
        }
        let deadline = match (down.is_over, down.unsent_since) {
            (true, _) => Some(*closes_at.get_or_insert_with(|| Instant::now() + CLOSING_TIME)),
            (false, Some(since)) => write_timeout.and_then(|timeout| since.checked_add(timeout)),
            (false, None) => None,
        };
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return if down.is_over {
                Ok(())
            } else {
                Err(io::ErrorKind::TimedOut.into())
            };
        }
        if moved == [false; 2] && was_woken {
            // After a hang-up, `poll` returns at once even if there is nothing to do yet.
            thread::sleep(SHORT_PAUSE);
        }
        let mut polled = [
            PollFd::new(client, interest(&up, &down)),
            PollFd::new(server, interest(&down, &up)),
        ];
        was_woken = wait_for(&mut polled, deadline)?;
        [client_events, server_events] = polled.map(|polled| polled.revents());
    }
}

/// The events to wait for at one end. `from_here` reads from this end, and `to_here` sends to it.
fn interest(from_here: &Direction<'_>, to_here: &Direction<'_>) -> PollFlags {
    let mut flags = PollFlags::empty();
    let takes_more = !from_here.is_over && from_here.unsent.is_empty();
    flags.set(PollFlags::IN, takes_more);
    flags.set(PollFlags::OUT, !to_here.unsent.is_empty());
    flags
}

/// The maximum number of bytes of a line that are stored. Every `hello` line is shorter.
const MAX_LINE_LEN: usize = 1024;

/// Looks at the first frames to find out whether the client can adopt its grants. A `hello` says
/// so, and only an `auth` may precede it. An encrypted connection shows no `hello`.
#[derive(Default)]
pub struct HelloWatch {
    /// The current line, without its LF.
    line: Vec<u8>,
    /// The number of complete lines so far.
    line_count: usize,
    /// The first line of the current frame.
    command: Vec<u8>,
    /// Set when no further byte can change the result.
    is_known: bool,
}

impl HelloWatch {
    /// The maximum number of lines to look at: two frames.
    const LINES: usize = 6;

    /// Looks at more bytes. Returns whether they complete the `hello` of a client that can adopt
    /// its grants.
    pub fn look_at(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            match byte {
                _ if self.is_known => return false,
                b'\n' if self.end_line() => return true,
                b'\n' => {}
                // A line of an `auth` may be longer, but its rest is not needed.
                _ if self.line.len() < MAX_LINE_LEN => self.line.push(*byte),
                _ => {}
            }
        }
        false
    }

    fn end_line(&mut self) -> bool {
        let line = std::mem::take(&mut self.line);
        let line = line.strip_suffix(b"\r").unwrap_or(&line);
        self.line_count += 1;
        match self.line_count % 3 {
            1 => {
                self.is_known = line != b"hello" && (line != b"auth" || self.line_count > 1);
                self.command = line.to_vec();
            }
            0 if self.command == b"hello" => {
                self.is_known = true;
                let words = std::str::from_utf8(line).unwrap_or_default();
                let hello = parse(["hello", "_", words]);
                return matches!(hello, Ok(Request::Hello(it)) if it.has(Abilities::ADOPT));
            }
            _ => self.is_known |= self.line_count == Self::LINES,
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{self, Receiver};

    use super::*;

    /// A peer, and the stream to it.
    fn pair() -> (UnixStream, Stream) {
        let (peer, ours) = UnixStream::pair().expect("two descriptors");
        (peer, Stream::new(Socket::Unix(ours)))
    }

    fn pump_plainly(
        client: Stream,
        server: Stream,
        write_timeout: Option<Duration>,
    ) -> io::Result<()> {
        let is_cut = AtomicBool::new(false);
        pump(&client, Vec::new(), &server, write_timeout, &is_cut, || {})
    }

    #[test]
    fn a_cut_passes_no_end_on() {
        let (client, one) = pair();
        let (mut server, other) = pair();
        let is_cut = AtomicBool::new(false);
        let pumped = thread::scope(|scope| {
            let pumping = scope.spawn(|| pump(&one, Vec::new(), &other, None, &is_cut, || {}));
            is_cut.store(true, Ordering::SeqCst);
            one.shutdown(Shutdown::Read);
            pumping.join().expect("no panic")
        });
        assert!(pumped.is_err());
        server.set_nonblocking(true).expect("an option");
        let read = server.read(&mut [0]);
        assert!(read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
        drop(client);
    }

    #[test]
    fn a_cut_leaves_no_reply_behind() {
        let (mut client, one) = pair();
        let (mut server, other) = pair();
        let much = vec![b'x'; 3 * BUFFER_LEN];
        server.write_all(&much).expect("there is room");
        other.shutdown(Shutdown::Read);
        one.shutdown(Shutdown::Read);
        let is_cut = AtomicBool::new(true);
        assert!(pump(&one, Vec::new(), &other, None, &is_cut, || {}).is_err());
        drop(one);
        let mut read = Vec::new();
        client.read_to_end(&mut read).expect("the end");
        assert_eq!(read.len(), much.len());
    }

    #[test]
    fn a_pump_passes_on_both_ways_and_both_ends() {
        let (mut client, one) = pair();
        let (mut server, other) = pair();
        let pumping = thread::spawn(move || pump_plainly(one, other, None));
        // More than the sockets and the buffers take, so that the other end must read.
        let much = vec![b'x'; 1 << 20];
        let len = much.len();
        let mut writer = client.try_clone().expect("a descriptor");
        let writing = thread::spawn(move || {
            writer.write_all(&much).expect("a reader");
            writer.shutdown(Shutdown::Write).expect("it is open");
        });
        let mut read = Vec::new();
        server.read_to_end(&mut read).expect("the end");
        assert_eq!(read.len(), len);
        writing.join().expect("no panic");
        // The other way is still open.
        server.write_all(b"reply").expect("a reader");
        drop(server);
        let mut reply = String::new();
        client.read_to_string(&mut reply).expect("the end");
        assert_eq!(reply, "reply");
        assert!(pumping.join().expect("no panic").is_ok());
    }

    #[test]
    fn a_client_that_stays_is_cut_after_the_server_has_closed() {
        let (mut client, one) = pair();
        let (mut server, other) = pair();
        let pumping = thread::spawn(move || pump_plainly(one, other, None));
        server.write_all(b"error_auth\n").expect("a reader");
        drop(server);
        assert!(pumping.join().expect("no panic").is_ok());
        let mut reply = String::new();
        client.read_to_string(&mut reply).expect("the end");
        assert_eq!(reply, "error_auth\n");
    }

    /// Pumps between two ends that are returned, the client's first; the result comes over the
    /// channel.
    fn pump_for(timeout: Duration) -> (UnixStream, UnixStream, Receiver<io::Result<()>>) {
        let (client, one) = pair();
        let (server, other) = pair();
        sockopt::set_socket_send_buffer_size(&one, SEND_BUFFER_LEN).expect("an option");
        let (sender, pumped) = mpsc::channel();
        thread::spawn(move || sender.send(pump_plainly(one, other, Some(timeout))));
        (client, server, pumped)
    }

    #[test]
    fn a_client_that_takes_nothing_is_cut_after_the_write_timeout() {
        const TIMEOUT: Duration = Duration::from_millis(300);
        for hangs_up in [false, true] {
            let began = Instant::now();
            let (client, mut server, pumped) = pump_for(TIMEOUT);
            // More than can be on the way: the end of the stream waits behind it.
            let patience = Some(Duration::from_millis(50));
            server.set_write_timeout(patience).expect("an option");
            assert!(server.write_all(&vec![b'x'; 1 << 20]).is_err());
            let server = (!hangs_up).then_some(server);
            let result = pumped.recv_timeout(Duration::from_secs(10));
            let error = result.expect("it is cut").expect_err("it is too slow");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(began.elapsed() >= TIMEOUT);
            drop((client, server));
        }
    }

    #[test]
    fn a_slow_client_is_not_cut() {
        const TIMEOUT: Duration = Duration::from_secs(3);
        const LEN: usize = 256 * 1024;
        let began = Instant::now();
        let (mut client, mut server, pumped) = pump_for(TIMEOUT);
        // The server is done long before the client.
        let writing = thread::spawn(move || server.write_all(&vec![b'x'; LEN]));
        let mut piece = [0; LEN / 16];
        for _ in 0..16 {
            thread::sleep(Duration::from_millis(200));
            client.read_exact(&mut piece).expect("it is not cut");
        }
        assert!(began.elapsed() > TIMEOUT);
        assert_eq!(client.read(&mut piece).expect("the end"), 0);
        drop(client);
        assert!(writing.join().expect("no panic").is_ok());
        let result = pumped.recv_timeout(Duration::from_secs(10));
        assert!(result.expect("it has ended").is_ok());
    }

    #[test]
    fn a_client_that_waits_long_is_not_cut() {
        let (mut client, mut server, _pumped) = pump_for(Duration::from_millis(20));
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(200));
            server.write_all(b"reply").expect("a reader");
            let mut reply = [0; 5];
            client.read_exact(&mut reply).expect("it is not cut");
        }
    }

    #[test]
    fn the_way_to_the_active_server_is_watched_for_life() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let server = connect_to_active(7, &address).expect("connected");
        assert!(sockopt::socket_keepalive(&server).expect("an option"));
        assert_eq!(
            sockopt::tcp_user_timeout(&server).expect("an option"),
            30_000
        );
    }

    #[test]
    fn a_hello_that_can_adopt_is_seen_however_it_arrives() {
        let long = "x".repeat(60_000);
        for (text, expected) in [
            ("hello\n_\nadopt\n", true),
            ("hello\r\n_\r\nslots adopt\r\nl\nk\n0\n", true),
            (&format!("auth\n_\n{long}\nhello\n_\nadopt\n"), true),
            ("hello\n_\n_\n", false),
            ("l\nk\n0\nhello\n_\nadopt\n", false),
            ("auth\n_\nx\nauth\n_\nx\nhello\n_\nadopt\n", false),
            ("auth\n_\nx\nl\nk\n0\nhello\n_\nadopt\n", false),
            ("hello\n_\nadopt", false),
        ] {
            for at_once in [1, 2, 7, text.len()] {
                let mut watch = HelloWatch::default();
                let found = text
                    .as_bytes()
                    .chunks(at_once)
                    .filter(|bytes| watch.look_at(bytes));
                assert_eq!(found.count(), usize::from(expected), "{text:.40}");
            }
        }
    }
}
