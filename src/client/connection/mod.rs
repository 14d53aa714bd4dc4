//! One connection to a server, which carries one request at a time.

mod introduction;
mod renewal;

use std::collections::VecDeque;
use std::io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, TimedOut};
use std::io::Read;
use std::mem;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::address::{Address, LONGEST_ATTEMPT};
use super::cancel;
use super::claim::{check_admin_token, check_key, Claim, Wait};
use super::connecting::end_of_share;
use super::error::{Asked, Auth, Error, Loss};
use super::settings::Settings;
use crate::os::event::{time_left, Event};
use crate::os::stream::{is_timeout, Stream};
use crate::wire::abilities::Abilities;
use crate::wire::reply::{self, Grant, Reply};
use crate::wire::request::Request;
use crate::wire::terms::Refusal;
use crate::wire::token::Token;
use introduction::{Introduction, Opening};
pub(crate) use renewal::Known;
pub(in crate::client) use renewal::Renewal;

/// The maximum length of a reply in bytes. Replies are a few words long, so a peer that sends more
/// is not a lock server. Replies to `stats` have their own limits below.
const MAX_REPLY_LEN: usize = 4096;

/// The maximum length of a reply about all keys in use, in bytes.
const MAX_STATS_LEN: usize = 64 * 1024 * 1024;

/// The maximum time for a reply about all keys, as a multiple of the reply timeout.
const STATS_TIMEOUTS: u32 = 10;

/// The maximum length of a reply about one key or about the counters, in bytes. Parsed JSON takes
/// many times as much memory.
const MAX_QUEUE_LEN: usize = 1024 * 1024;

/// The maximum time of one read, after which the deadline is checked again.
const LONGEST_READ: Duration = Duration::from_secs(3600);

/// The answer to [`Connection::enqueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Enqueued {
    /// The key is held from now on.
    Acquired(Grant),
    /// Other claims are ahead; [`Connection::wait`] waits for the grant.
    Queued,
}

/// A connection to a server, which carries one request at a time.
///
/// If a reply is late or malformed, the client closes the connection, and every further request
/// fails with [`Error::Closed`]. So a late reply is never mistaken for the reply to another
/// request. When the connection closes, the server releases the locks that were granted over it,
/// unless it runs with `--no-auto-release-on-disconnect`.
///
/// # Errors
///
/// The server can refuse a request. Any request can also fail with [`Error::Unreachable`],
/// [`Error::Closed`], [`Error::NoReply`] or [`Error::BadReply`]. These errors and
/// [`Error::AuthFailed`] close the connection. [`Error::InvalidKey`] and [`Error::InvalidArgument`]
/// are returned before anything is sent.
///
/// ```
/// use latchd::client::{Address, Connection, Error, Settings, Claim, Wait};
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let (_running, server) = Server::in_place_of(server);
/// let mut connection = Connection::open(&server, &Settings::default())?;
/// let grant = connection.acquire("ledger", Claim::LOCK, Wait::No)?.expect("it is free");
/// assert!(connection.stats()?.contains("ledger"));
///
/// // Nothing renews the grant in the background. Any connection can renew it with the token.
/// let lease = connection.renew("ledger", Claim::LOCK, grant.token)?;
/// assert_eq!(lease, grant.lease);
/// connection.release("ledger", Claim::LOCK, grant.token)?;
/// let again = connection.release("ledger", Claim::LOCK, grant.token);
/// assert!(matches!(again, Err(Error::Refused(_))));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Connection {
    pub(super) server: Address,
    /// How many servers of the cluster are left to ask if this one fails.
    pub(super) servers_left: usize,
    /// The server of the cluster that was reached.
    pub(crate) member: Address,
    settings: Settings,
    link: ServerLink,
    /// What both sides have said of themselves. A stream opens with this and the auth token.
    pub(super) introduction: Introduction,
    /// The abilities that the claims over this connection need.
    pub(super) needs: Abilities,
    /// The key of the latest request.
    key: Option<String>,
    /// The maximum length of the reply to the latest request, in bytes.
    max_reply_len: usize,
    /// Whether a secret was sent. Any later reply may repeat it, so none of them may be shown.
    has_sent_secret: bool,
    /// Each of these cancels a request that waits for its reply.
    pub(super) cancelled_by: Vec<Event>,
}

/// The stream to the server, and what has been sent and received over it. A new stream begins
/// without any of this.
#[derive(Debug, Default)]
struct ServerLink {
    /// `None` if the connection is closed.
    stream: Option<Stream>,
    /// Bytes to send before the next request.
    opening: Vec<u8>,
    /// The opening requests whose replies are still to come, in order.
    awaited: VecDeque<Opening>,
    /// The bytes read so far of the next reply.
    buffer: Vec<u8>,
    /// Whether the server has answered.
    has_answered: bool,
    /// Whether the server has accepted the auth token.
    is_let_in: bool,
}

impl Connection {
    /// Connects, with a TLS handshake if the settings ask for it, and presents the auth token if
    /// there is one. Blocks for at most the settings' connect timeout.
    ///
    /// # Errors
    ///
    /// [`Error::Unreachable`], [`Error::AuthFailed`], or [the errors of any request](#errors).
    pub fn open(server: &Address, settings: &Settings) -> Result<Connection, Error> {
        Connection::dial(server, settings, None, 0)
    }

    /// Connects in the same way as [`Connection::open`], and before `until`. Each of `servers_left`
    /// more servers gets an equal share of the time that is left after connecting.
    pub(super) fn dial(
        server: &Address,
        settings: &Settings,
        until: Option<Instant>,
        servers_left: usize,
    ) -> Result<Connection, Error> {
        let mut connection = Connection::unconnected(server, settings);
        connection.servers_left = servers_left;
        let (due, auth_token) = connection.connect(until)?;
        if let Some(token) = auth_token {
            match connection.expect_ok(&Request::Auth(&token), Some(due)) {
                // A server without a secret answers `error` to `auth`.
                Err(Error::Refused(_)) => return Err(connection.error_for(&Reply::AuthFailed)),
                answered => answered?,
            }
            connection.link.is_let_in = true;
        }
        Ok(connection)
    }

    /// Returns a connection to `server` that is not open yet.
    pub(super) fn unconnected(server: &Address, settings: &Settings) -> Connection {
        Connection {
            server: server.clone(),
            servers_left: 0,
            member: server.clone(),
            settings: settings.clone(),
            link: ServerLink::default(),
            introduction: Introduction::default(),
            needs: Abilities::NONE,
            key: None,
            max_reply_len: 0,
            has_sent_secret: false,
            cancelled_by: Vec::new(),
        }
    }

    /// Returns another connection to the same servers, not open yet, with the same introduction.
    pub(super) fn another(&self) -> Connection {
        Connection {
            member: self.member.clone(),
            introduction: self.introduction.unanswered(),
            ..Connection::unconnected(&self.server, &self.settings)
        }
    }

    /// Connects again to the same server, or to another server of its cluster, within `within`. The
    /// auth token and the introduction are sent with the next request.
    pub(super) fn redial(&mut self, within: Duration) -> Result<(), Error> {
        self.servers_left = 0;
        let (_, auth_token) = self.connect(Instant::now().checked_add(within))?;
        self.write_opening(auth_token.as_deref());
        Ok(())
    }

    /// Connects within the connect timeout and before `until`, with a TLS handshake if the settings
    /// ask for it. Returns the end of this server's share of the time, and the secret to present.
    fn connect(&mut self, until: Option<Instant>) -> Result<(Instant, Option<String>), Error> {
        let (server, settings) = (&self.server, &self.settings);
        let longest = Instant::now() + settings.connect_timeout.min(LONGEST_ATTEMPT);
        let until = until.map_or(longest, |until| until.min(longest));
        // The second half of the time is left for the connection.
        let auth_token = settings.auth_token(end_of_share(until, 1))?;
        let connected = server.connect(until);
        let (stream, member) = connected.map_err(|error| Error::unreachable(server, error))?;
        let due = end_of_share(until, self.servers_left);
        let stream = match &settings.tls {
            Some(tls) => {
                let shaken = tls.speak(stream, member, due);
                shaken.inspect_err(|_| server.try_another_than(member))?
            }
            None => stream,
        };
        self.member = member.clone();
        self.close();
        self.link.stream = Some(stream);
        Ok((due, auth_token))
    }

    /// Claims a key (`l`, `sl`). Blocks until the grant. Returns `None` if the wait ends first.
    pub fn acquire(&mut self, key: &str, claim: Claim, wait: Wait) -> Result<Option<Grant>, Error> {
        let deadline = wait.deadline(Instant::now(), self.settings.reply_timeout);
        self.acquire_by(key, claim, wait, deadline, |_| ())
    }

    /// Claims in the same way as [`Connection::acquire`]. The reply must arrive by `deadline`.
    /// Calls `on_introduced` once the server has answered the introduction.
    pub(super) fn acquire_by(
        &mut self,
        key: &str,
        claim: Claim,
        wait: Wait,
        deadline: Option<Instant>,
        on_introduced: impl FnOnce(&Connection),
    ) -> Result<Option<Grant>, Error> {
        let request = Request::Acquire(claim.wanted(key)?, wait.timeout());
        let reply = self.claim(&request, deadline, on_introduced)?;
        self.granted(&reply)
    }

    /// Takes a place in the queue (`e`, `se`) without waiting for the grant. Blocks for at most the
    /// reply timeout.
    pub fn enqueue(&mut self, key: &str, claim: Claim) -> Result<Enqueued, Error> {
        let request = Request::Enqueue(claim.wanted(key)?);
        match self.claim(&request, self.reply_due(), |_| ())? {
            Reply::Queued => Ok(Enqueued::Queued),
            Reply::Acquired(grant) => Ok(Enqueued::Acquired(grant)),
            other => Err(self.error_for(&other)),
        }
    }

    /// Waits (`w`, `sw`) for the grant in the place that [`Connection::enqueue`] took. If the wait
    /// ends first, gives up the place and returns `None`. The reply restarts the lease.
    pub fn wait(&mut self, key: &str, claim: Claim, wait: Wait) -> Result<Option<Grant>, Error> {
        check_key(key)?;
        let request = Request::Wait {
            key,
            kind: claim.kind(),
            wait_timeout: wait.timeout(),
        };
        let deadline = wait.deadline(Instant::now(), self.settings.reply_timeout);
        let reply = self.exchange(&request, deadline)?;
        self.granted(&reply)
    }

    /// Releases a slot (`r`, `sr`), even if another connection has the grant. Blocks for at most
    /// the reply timeout. `claim` only tells whether the key is a lock or a semaphore.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no holder has this token, or [the errors of any request](#errors).
    pub fn release(&mut self, key: &str, claim: Claim, token: Token) -> Result<(), Error> {
        self.release_within(key, claim, token, None, self.settings.reply_timeout)
    }

    /// Releases a slot in the same way as [`Connection::release`], and tells the exit status of the
    /// work under it to a server that knows that.
    pub(crate) fn release_within(
        &mut self,
        key: &str,
        claim: Claim,
        token: Token,
        status: Option<u8>,
        within: Duration,
    ) -> Result<(), Error> {
        check_key(key)?;
        let request = Request::Release {
            key,
            kind: claim.kind(),
            token,
            status: self.known_status(status),
        };
        self.expect_ok(&request, Instant::now().checked_add(within))
    }

    /// The exit status to tell the server. An older server would refuse the whole request.
    fn known_status(&self, status: Option<u8>) -> Option<u8> {
        status.filter(|_| self.introduction.abilities.has(Abilities::STATUS))
    }

    /// Reads what has arrived. Call this if the socket is readable although no reply is due.
    /// Returns `true` if the connection is open and there was no data, only a TLS record such as a
    /// session ticket.
    pub(super) fn is_open_and_quiet(&mut self) -> bool {
        self.read_within(Duration::ZERO).is_ok() && self.link.buffer.is_empty()
    }

    /// Checks that the server answers (`ping`). Blocks for at most the reply timeout.
    pub fn ping(&mut self) -> Result<(), Error> {
        self.expect_ok(&Request::Ping, self.reply_due())
    }

    /// Returns the server's statistics (`stats`) as JSON: see latch-protocol(7). The reply can be
    /// long, so the reply timeout starts again with each part that arrives. Blocks for at most ten
    /// times the reply timeout.
    pub fn stats(&mut self) -> Result<String, Error> {
        self.json(&Request::Stats)
    }

    /// Returns the holders and waiters of a key, or of all keys in use (`stats` with the key line
    /// `holders`), as JSON: see latch-protocol(7). Blocks for as long as [`Connection::stats`], or
    /// for at most the reply timeout if a key is given. An older server, or another implementation,
    /// may send the reply to [`Connection::stats`] instead.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the server does not know the request, or [the errors of any
    /// request](#errors).
    pub fn holders(&mut self, key: Option<&str>) -> Result<String, Error> {
        key.map(check_key).transpose()?;
        self.json(&Request::Queues(key))
    }

    /// Returns the server's counters since its start and its current figures (`stats` with the key
    /// line `counters`), as JSON: see latch-protocol(7). Blocks for at most the reply timeout. An
    /// older server, or another implementation, may send the reply to [`Connection::stats`]
    /// instead.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the server does not know the request, or [the errors of any
    /// request](#errors).
    pub fn counters(&mut self) -> Result<String, Error> {
        self.json(&Request::Counters)
    }

    pub(super) fn json(&mut self, request: &Request<'_>) -> Result<String, Error> {
        match self.exchange(request, self.reply_due())? {
            Reply::Stats(json) => Ok(json),
            other => Err(self.error_for(&other)),
        }
    }

    /// Ends the grant with this fence, or all grants of the key, as if their leases were over
    /// (`break`). The server allows this to root and its own user over a Unix socket, and to any
    /// client with its admin token. The holder notices when its connection ends or a renewal is
    /// refused. Blocks for at most the reply timeout.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such grant, [`Error::NotAllowed`] if this client may not
    /// end it, [`Error::InvalidArgument`] if the admin token cannot be sent, or [the errors of any
    /// request](#errors).
    pub fn break_grants(
        &mut self,
        key: &str,
        fence: Option<u64>,
        admin_token: Option<&str>,
    ) -> Result<(), Error> {
        check_key(key)?;
        admin_token.map(check_admin_token).transpose()?;
        let request = Request::Break {
            key,
            fence,
            admin_token,
        };
        match self.exchange(&request, self.reply_due())? {
            Reply::Ok => Ok(()),
            Reply::AuthFailed => Err(Error::NotAllowed(self.asked())),
            other => Err(self.error_for(&other)),
        }
    }

    /// Whether grants may still exist when connections are refused. There are three cases: the
    /// server is restarting and hands its grants over; another server of the cluster takes over; or
    /// a proxy refuses the connections, and the server behind it keeps the grants.
    pub(super) fn grants_may_survive_outage(&self) -> bool {
        let abilities = self.introduction.abilities;
        abilities.has(Abilities::SURVIVES_RESTART)
            || abilities.has(Abilities::LINGERS)
            || self.server.other_count() > 0
    }

    /// The name under which the server shows this connection, without the program's name; `None` if
    /// the connection is closed.
    pub(crate) fn own_peer_name(&self) -> Option<String> {
        self.link.stream.as_ref()?.own_identity()
    }

    /// Whether the server's grants survive its end.
    pub(crate) fn grants_survive_restart(&self) -> bool {
        self.introduction.abilities.has(Abilities::SURVIVES_RESTART)
    }

    fn expect_ok(&mut self, request: &Request<'_>, due: Option<Instant>) -> Result<(), Error> {
        match self.exchange(request, due)? {
            Reply::Ok => Ok(()),
            other => Err(self.error_for(&other)),
        }
    }

    fn granted(&mut self, reply: &Reply) -> Result<Option<Grant>, Error> {
        match reply {
            Reply::Granted(grant) => Ok(Some(*grant)),
            Reply::Timeout => Ok(None),
            other => Err(self.error_for(other)),
        }
    }

    /// The deadline for the reply to a request that does not wait.
    fn reply_due(&self) -> Option<Instant> {
        Instant::now().checked_add(self.settings.reply_timeout)
    }

    /// Shortens the reply timeout to the time left until `deadline`.
    pub(super) fn shorten_reply_timeout(&mut self, deadline: Option<Instant>) {
        let left = deadline.map_or(Duration::MAX, time_left);
        self.settings.reply_timeout = self.settings.reply_timeout.min(left);
    }

    /// Sends one request and reads its reply, which must arrive by `due`. Closes the connection if
    /// that fails.
    fn exchange(&mut self, request: &Request<'_>, due: Option<Instant>) -> Result<Reply, Error> {
        let sent = self.send(request, self.time_to_send(due));
        let reply = sent.and_then(|()| self.receive(request, due));
        self.close_on_error(reply)
    }

    /// The maximum time for sending a request whose reply must arrive by `due`.
    fn time_to_send(&self, due: Option<Instant>) -> Duration {
        let within = due.map_or(self.settings.reply_timeout, time_left);
        within.min(self.settings.reply_timeout)
    }

    fn close_on_error<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result {
            if error.asked().is_none() && error.server().is_some() {
                self.try_another();
            }
            self.close();
        }
        result
    }

    /// Makes the next attempt to connect start with another server of the cluster, if any.
    pub(super) fn try_another(&self) {
        self.server.try_another_than(&self.member);
    }

    fn send(&mut self, request: &Request<'_>, within: Duration) -> Result<(), Error> {
        // Before the first reply, what has arrived may be a refusal of the connection. That counts
        // as the reply. Later, a server may send a message before it closes the connection; the
        // message must not pass for the next reply.
        if self.link.has_answered {
            if self.open_stream()?.is_readable() {
                self.read_within(Duration::ZERO)?;
            }
            if !self.link.buffer.is_empty() {
                return Err(self.closed());
            }
        }
        let mut text = mem::take(&mut self.link.opening);
        let key = match request {
            Request::Queues(key) => *key,
            _ => request.changed_key(),
        };
        self.key = key.map(str::to_owned);
        self.has_sent_secret |= request.has_secret();
        self.max_reply_len = match request {
            _ if lists_all_keys(request) => MAX_STATS_LEN,
            Request::Queues(_) | Request::Counters => MAX_QUEUE_LEN,
            _ => MAX_REPLY_LEN,
        };
        request.write(&mut text);
        match self.open_stream()?.write_within(&mut &*text, Some(within)) {
            Err(error) if error.kind() == TimedOut => Err(Error::no_reply(&self.server)),
            // After other errors, still read the reply: the server may have said why it closed.
            _ => Ok(()),
        }
    }

    fn receive(&mut self, request: &Request<'_>, due: Option<Instant>) -> Result<Reply, Error> {
        let mut due = due;
        let longest = self.settings.reply_timeout.saturating_mul(STATS_TIMEOUTS);
        let last_due = Instant::now().checked_add(longest);
        // The number of bytes already searched for a line end, so that none is searched twice.
        let mut seen = 0;
        loop {
            if let Some(reply) = self.take_reply(seen)? {
                return Ok(reply);
            }
            if lists_all_keys(request) && self.link.buffer.len() > seen {
                due = self.reply_due().min(last_due);
            }
            seen = self.link.buffer.len();
            self.read_by(due)?;
        }
    }

    /// Reads part of a reply that must be complete by `due`.
    fn read_by(&mut self, due: Option<Instant>) -> Result<(), Error> {
        // If there is no deadline, TCP keepalive detects a server that has vanished.
        let left = due.map_or(LONGEST_READ, time_left);
        if left.is_zero() {
            return Err(Error::no_reply(&self.server));
        }
        self.read_within(left.min(LONGEST_READ))
    }

    /// Takes the next reply out of the buffer; `None` if its line is incomplete. The first `seen`
    /// bytes are known to contain no line end.
    fn take_reply(&mut self, seen: usize) -> Result<Option<Reply>, Error> {
        let seen = if self.link.awaited.is_empty() {
            seen
        } else {
            0
        };
        if self.take_opening()? {
            self.take_next_reply(seen)
        } else {
            Ok(None)
        }
    }

    fn take_next_reply(&mut self, seen: usize) -> Result<Option<Reply>, Error> {
        let end = self.link.buffer[seen..]
            .iter()
            .position(|byte| *byte == b'\n');
        let Some(end) = end.map(|end| seen + end) else {
            if self.link.buffer.len() > self.max_reply_len {
                return Err(Error::bad_reply(&self.server, b"more than a reply can be"));
            }
            return Ok(None);
        };
        let line = &self.link.buffer[..end];
        let reply = std::str::from_utf8(line).ok().and_then(reply::parse);
        let reply = reply.ok_or_else(|| self.bad_reply(line))?;
        self.link.buffer.drain(..=end);
        self.link.has_answered = true;
        Ok(Some(reply))
    }

    fn read_within(&mut self, time: Duration) -> Result<(), Error> {
        let stream = self.open_stream()?;
        let mut patience = time;
        if !self.cancelled_by.is_empty() {
            // Cancellable requests have one-line replies, so rustls holds no buffered plaintext
            // here.
            if !cancel::wait_for(stream, time, &self.cancelled_by)? {
                return Ok(());
            }
            // Do not block: only part of a TLS record may have arrived, or a record without data.
            patience = Duration::ZERO;
        }
        let mut chunk = [0; 4096];
        let read = stream
            .set_read_timeout(patience)
            .and_then(|()| (&mut &*stream).read(&mut chunk));
        match read {
            Ok(0) => return Err(self.closed()),
            Ok(len) => self.link.buffer.extend(&chunk[..len]),
            Err(error) if is_timeout(&error) => {}
            Err(error) => match error.kind() {
                Interrupted => {}
                BrokenPipe | ConnectionReset => return Err(self.closed()),
                _ => return Err(Error::unreachable(&self.server, error)),
            },
        }
        Ok(())
    }

    fn open_stream(&self) -> Result<&Stream, Error> {
        self.link
            .stream
            .as_ref()
            .ok_or_else(|| Error::closed(&self.server, true))
    }

    fn closed(&self) -> Error {
        Error::closed(&self.server, self.link.has_answered)
    }

    /// Turns a refusal into an error. A reply that does not fit its request closes the connection.
    fn error_for(&mut self, reply: &Reply) -> Error {
        let asked = self.asked();
        let error = match reply {
            Reply::Error | Reply::Refused(Refusal::NotHeld | Refusal::NoToken) => {
                Error::Refused(asked)
            }
            Reply::Broken => Error::Lost(asked, Loss::Broken),
            Reply::Refused(Refusal::NotWritten) => Error::NotWritten(asked),
            Reply::Refused(Refusal::AlreadyEnqueued) => Error::AlreadyEnqueued(asked),
            Reply::Refused(Refusal::NotEnqueued) => Error::NotEnqueued(asked),
            Reply::Refused(Refusal::LimitMismatch) => Error::LimitMismatch(asked),
            Reply::Refused(Refusal::MaxLocks) => Error::MaxLocks(asked),
            Reply::Refused(Refusal::MaxWaiters) => Error::MaxWaiters(asked),
            Reply::Refused(Refusal::LeaseExpired) => Error::LeaseExpired(asked),
            Reply::Refused(Refusal::Draining) => Error::Draining(asked),
            Reply::AuthFailed if self.link.is_let_in => Error::NotAllowed(asked),
            Reply::AuthFailed => {
                let auth = match &self.settings {
                    Settings {
                        auth_token: None,
                        auth_token_file: None,
                        ..
                    } => Auth::NoToken,
                    _ => Auth::Token,
                };
                let server = self.server.clone();
                Error::AuthFailed { server, auth }
            }
            misfit => {
                let mut line = Vec::new();
                misfit.write(&mut line);
                self.bad_reply(line.trim_ascii_end())
            }
        };
        if matches!(error, Error::BadReply { .. } | Error::AuthFailed { .. }) {
            self.close();
        }
        error
    }

    /// The key of the latest request, and the server.
    pub(super) fn asked(&self) -> Asked {
        Asked {
            key: self.key.clone(),
            server: self.server.clone(),
        }
    }

    /// Closes the connection. The server then releases the locks that were granted over it.
    pub(super) fn close(&mut self) {
        if let Some(stream) = &self.link.stream {
            // If a reply has arrived that nobody has read, closing alone is a reset, after which
            // the server would leave a key that it has granted held until the end of the lease.
            stream.shutdown(Shutdown::Write);
        }
        self.link = ServerLink::default();
    }

    /// Closes the connection, and waits for at most the reply timeout until the server has closed
    /// it, too. By then, the server has released the locks that were granted over it.
    pub fn finish(mut self) {
        if let Some(stream) = self.link.stream.take() {
            stream.shutdown(Shutdown::Write);
            stream.discard_for(self.settings.reply_timeout);
        }
    }

    /// The socket, for polling; `None` if the connection is closed.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.link.stream.as_ref().map(AsFd::as_fd)
    }
}

/// Whether the reply grows with the number of keys in use.
fn lists_all_keys(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::Stats | Request::Queues(None) | Request::Histories
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::stream::Socket;
    use std::io::Write;
    use std::net::TcpListener;

    #[test]
    fn a_cancelled_claim_whose_grant_is_unread_ends_the_stream() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = Address::Tcp(listener.local_addr().expect("its address").to_string());
        let mut connection = Connection::open(&server, &Settings::default()).expect("it listens");
        let (mut peer, _) = listener.accept().expect("a connection");
        // The grant arrives after the last look at the stream.
        peer.write_all(b"ok 0123456789abcdef0123456789abcdef 33\n")
            .expect("a reader");
        let stream = connection.link.stream.as_ref().expect("it is open");
        while !stream.is_readable() {}
        let cancelled: Result<(), Error> = Err(Error::Cancelled);
        let _ = connection.close_on_error(cancelled);
        let peer = Stream::new(Socket::Tcp(peer));
        let read = peer.noting((&mut &peer).read(&mut [0]));
        assert!(matches!(read, Ok(0)), "{read:?}");
        assert!(peer.was_ended_by_peer(), "the server would keep the grant");
    }
}
