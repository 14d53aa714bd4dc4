//! One connection to a server: a request, its reply, and never two at a time.

use std::fmt;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::address::Address;
use super::error::Error;
use crate::net::stream::{is_timeout, Stream};
use crate::token;

/// The longest time that the protocol knows.
pub(super) const MAX_SECONDS: u64 = 9_223_372_036;

/// The longest reply that is read; only `stats` comes near it.
const MAX_REPLY_LEN: usize = 16 * 1024 * 1024;

/// The longest time for one read, after which the deadline is looked at again.
const LONGEST_READ: Duration = Duration::from_secs(3600);

const MAX_KEY_LEN: usize = 256;

/// The highest limit of a semaphore that the protocol knows.
const MAX_LIMIT: u32 = 1_048_576;

/// The credential of a holder.
///
/// Its `Debug` form shows the fence only; its `Display` form is the whole token, which is a secret.
///
/// ```
/// use latchd::client::Token;
///
/// # fn main() -> Result<(), latchd::client::Error> {
/// let token: Token = "00000000000003e87f3c1f2b3e9a8d6e".parse()?;
/// assert_eq!(token.fence(), 1000);
/// assert_eq!(token.to_string(), "00000000000003e87f3c1f2b3e9a8d6e");
/// assert!(!format!("{token:?}").contains("7f3c1f2b3e9a8d6e"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(token::Token);

impl Token {
    /// The number that rises with every grant: a resource that has seen a higher one must refuse
    /// whoever comes with this.
    pub fn fence(&self) -> u64 {
        self.0.fence.0
    }
}

impl FromStr for Token {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let token = token::Token::parse(text);
        token.map(Token).ok_or(Error::InvalidArgument(
            "a token is 32 lower-case hex digits",
        ))
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a holder is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The credential for renewing and releasing.
    pub token: Token,
    /// The length of the lease, in whole seconds; it began between the request and this answer.
    pub lease: Duration,
}

/// What is asked for: a lock, or a slot of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How many may hold the key at once; `None` for a lock.
    pub limit: Option<u32>,
    /// The length of the lease, in whole seconds (rounded up); `None` for the server's default.
    pub lease: Option<Duration>,
}

/// How long to wait for a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Not at all.
    Try,
    /// So long, in whole seconds (rounded up).
    Within(Duration),
    /// For as long as it takes.
    Forever,
}

/// The answer to enqueueing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// The key is held from now on.
    Acquired(Grant),
    /// Somebody else is first; [`Connection::wait`] waits.
    Queued,
}

/// How a connection is made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long connecting may take, the answer to the token included (5 seconds). All addresses of
    /// a name share it; looking up the name is not in it.
    pub connect_timeout: Duration,
    /// How long a reply may take that does not have to wait for anybody (10 seconds).
    pub reply_timeout: Duration,
    /// The secret that the server wants to hear first, if any: one line, without its end (none).
    pub auth_token: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
            auth_token: None,
        }
    }
}

/// A connection to a server, on which one request is under way at a time.
///
/// After a reply that did not come in time, or was none, the connection is closed, and every further
/// request is answered [`Error::Closed`]: a late reply can never be taken for that to another request.
/// What it holds, the server releases when the connection closes (unless it is told otherwise).
///
/// # Errors
///
/// Besides the server's refusal, each request can fail with [`Error::Unreachable`], [`Error::Closed`],
/// [`Error::NoReply`] or [`Error::BadReply`], after all of which the connection is closed, as after
/// [`Error::AuthFailed`]; and with [`Error::InvalidKey`] or [`Error::InvalidArgument`], when nothing has
/// been sent.
///
/// ```
/// use latchd::client::{Address, Connection, Error, Patience, Settings, Terms};
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let running = Server::in_place_of(server);
/// # let server = running.address();
/// let mut connection = Connection::open(&server, &Settings::default())?;
/// let grant = connection.acquire("ledger", Terms::LOCK, Patience::Try)?.expect("it is free");
/// assert!(connection.stats()?.contains("ledger"));
///
/// // Nobody renews it but we; another connection can, too, with the token.
/// let lease = connection.renew("ledger", Terms::LOCK, grant.token)?;
/// assert_eq!(lease, grant.lease);
/// connection.release("ledger", Terms::LOCK, grant.token)?;
/// let again = connection.release("ledger", Terms::LOCK, grant.token);
/// assert!(matches!(again, Err(Error::Refused)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Connection {
    stream: Option<Stream>,
    /// What has been read of the next reply.
    buffer: Vec<u8>,
    reply_timeout: Duration,
}

impl Connection {
    /// Connects and, if there is a token, presents it. Blocks for at most the settings' connect
    /// timeout, and for as long as looking up a name takes.
    ///
    /// # Errors
    ///
    /// [`Error::Unreachable`], [`Error::AuthFailed`], or what else can go wrong with a reply.
    pub fn open(address: &Address, settings: &Settings) -> Result<Connection, Error> {
        let timeout = settings
            .connect_timeout
            .min(Duration::from_secs(MAX_SECONDS));
        let (stream, deadline) = address.connect(timeout).map_err(Error::Unreachable)?;
        if let Stream::Tcp(tcp) = &stream {
            // A reply may be hours away; a server that has vanished should be noticed before.
            tcp.set_nodelay(true)?;
            let keepalive = sockopt::set_socket_keepalive(tcp, true)
                .and_then(|()| sockopt::set_tcp_keepidle(tcp, Duration::from_secs(15)))
                .and_then(|()| sockopt::set_tcp_keepintvl(tcp, Duration::from_secs(5)))
                .and_then(|()| sockopt::set_tcp_keepcnt(tcp, 3))
                // While a request of ours is not acknowledged, no keepalive is sent.
                .and_then(|()| sockopt::set_tcp_user_timeout(tcp, 30_000));
            keepalive.map_err(io::Error::from)?;
        }
        let mut connection = Connection {
            stream: Some(stream),
            buffer: Vec::new(),
            reply_timeout: settings.reply_timeout,
        };
        if let Some(token) = &settings.auth_token {
            if token.contains(['\r', '\n']) {
                return Err(Error::InvalidArgument(
                    "an auth token has no line end in it",
                ));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            connection.expect_ok("auth", "_", token, left)?;
        }
        Ok(connection)
    }

    /// Asks for a key (`l`, `sl`) and blocks until it is granted or `patience` is over; `None` then.
    ///
    /// # Errors
    ///
    /// The server's refusal, or what can go wrong with a reply.
    pub fn acquire(
        &mut self,
        key: &str,
        terms: Terms,
        patience: Patience,
    ) -> Result<Option<Grant>, Error> {
        let deadline = patience.deadline(Instant::now(), self.reply_timeout);
        self.acquire_by(key, terms, patience, deadline)
    }

    /// Asks as [`Connection::acquire`] does. The answer is due at `deadline`.
    pub(crate) fn acquire_by(
        &mut self,
        key: &str,
        terms: Terms,
        patience: Patience,
        deadline: Option<Instant>,
    ) -> Result<Option<Grant>, Error> {
        terms.check()?;
        let seconds = patience.seconds();
        let (command, argument) = match terms.limit {
            None => ("l", format!("{seconds}{}", terms.lease_argument()?)),
            Some(limit) => (
                "sl",
                format!("{seconds} {limit}{}", terms.lease_argument()?),
            ),
        };
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let reply = self.request(command, key, &argument, left)?;
        self.grant_or_timeout(&reply)
    }

    /// Takes a place in the queue (`e`, `se`) without waiting for anybody; blocks for at most the reply
    /// timeout.
    ///
    /// # Errors
    ///
    /// The server's refusal, or what can go wrong with a reply.
    pub fn enqueue(&mut self, key: &str, terms: Terms) -> Result<Enqueued, Error> {
        terms.check()?;
        let lease = terms.lease_argument()?;
        let (command, argument) = match terms.limit {
            None => ("e", lease.trim_start().to_owned()),
            Some(limit) => ("se", format!("{limit}{lease}")),
        };
        let reply = self.request(command, key, &argument, Some(self.reply_timeout))?;
        if reply == "queued" {
            return Ok(Enqueued::Queued);
        }
        match reply.strip_prefix("acquired ") {
            Some(grant) => self.parse_grant(grant).map(Enqueued::Acquired),
            None => Err(self.refusal(&reply)),
        }
    }

    /// Blocks (`w`, `sw`) in the place that [`Connection::enqueue`] took; `None` if `patience` is over,
    /// and the place is given up then. The lease begins anew with the answer.
    ///
    /// # Errors
    ///
    /// The server's refusal, or what can go wrong with a reply.
    pub fn wait(
        &mut self,
        key: &str,
        terms: Terms,
        patience: Patience,
    ) -> Result<Option<Grant>, Error> {
        let command = if terms.limit.is_none() { "w" } else { "sw" };
        let argument = patience.seconds().to_string();
        let reply = self.request(
            command,
            key,
            &argument,
            patience.reply_within(self.reply_timeout),
        )?;
        self.grant_or_timeout(&reply)
    }

    /// Gives back a slot (`r`, `sr`), whichever connection it was granted to. Blocks for at most the
    /// reply timeout. Of the terms only the kind counts.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the token is not that of a holder, or what can go wrong with a reply.
    pub fn release(&mut self, key: &str, terms: Terms, token: Token) -> Result<(), Error> {
        let command = if terms.limit.is_none() { "r" } else { "sr" };
        self.expect_ok(command, key, &token.to_string(), self.reply_timeout)
    }

    /// Starts a lease anew (`n`, `sn`), whichever connection it was granted to, and returns its length, in
    /// whole seconds. Blocks for at most the reply timeout. Terms without a lease ask for the server's
    /// default, whatever was granted.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the token is not that of a holder, or what can go wrong with a reply.
    pub fn renew(&mut self, key: &str, terms: Terms, token: Token) -> Result<Duration, Error> {
        self.send_renewal(key, terms, token, self.reply_timeout)?;
        let reply = self.receive(Some(self.reply_timeout));
        let reply = self.unless_closed(reply)?;
        self.renewed(&reply)
    }

    /// Sends what [`Connection::renew`] sends, for at most `within`. The reply is still to come.
    pub(super) fn send_renewal(
        &mut self,
        key: &str,
        terms: Terms,
        token: Token,
        within: Duration,
    ) -> Result<(), Error> {
        check_key(key)?;
        let command = if terms.limit.is_none() { "n" } else { "sn" };
        let request = format!("{command}\n{key}\n{token}{}\n", terms.lease_argument()?);
        let sent = self.send(request.as_bytes(), Some(within));
        self.unless_closed(sent)
    }

    /// What the server says to a renewal that was sent, as far as it has come: `None` if not all of
    /// it has. To be asked when the socket is readable.
    pub(super) fn renewal_reply(&mut self) -> Result<Option<Duration>, Error> {
        let read = self.read_within(Duration::ZERO);
        let line = read.and_then(|()| self.take_line(0));
        match self.unless_closed(line)? {
            Some(reply) => self.renewed(&reply).map(Some),
            None => Ok(None),
        }
    }

    fn renewed(&mut self, reply: &str) -> Result<Duration, Error> {
        match reply.strip_prefix("ok ").and_then(parse_lease) {
            Some(lease) => Ok(lease),
            None => Err(self.refusal(reply)),
        }
    }

    /// Asks whether the server is there (`ping`). Blocks for at most the reply timeout.
    ///
    /// # Errors
    ///
    /// What can go wrong with a reply.
    pub fn ping(&mut self) -> Result<(), Error> {
        self.expect_ok("ping", "_", "_", self.reply_timeout)
    }

    /// What the server knows (`stats`), as JSON: see latch-protocol(7). The reply can be long, so the
    /// reply timeout counts from the last part of it that has arrived.
    ///
    /// # Errors
    ///
    /// What can go wrong with a reply.
    pub fn stats(&mut self) -> Result<String, Error> {
        let sent = self.send(b"stats\n_\n_\n", Some(self.reply_timeout));
        let reply = sent.and_then(|()| self.receive_long());
        let reply = self.unless_closed(reply)?;
        match reply.strip_prefix("ok ") {
            Some(json) => Ok(json.to_owned()),
            None => Err(self.refusal(&reply)),
        }
    }

    /// Sends one request and reads its reply, for at most `within`; closes the connection if that
    /// fails.
    fn request(
        &mut self,
        command: &str,
        key: &str,
        argument: &str,
        within: Option<Duration>,
    ) -> Result<String, Error> {
        check_key(key)?;
        let request = format!("{command}\n{key}\n{argument}\n");
        let sent = self.send(request.as_bytes(), within);
        let reply = sent.and_then(|()| self.receive(within));
        self.unless_closed(reply)
    }

    /// Closes the connection if an exchange has failed.
    fn unless_closed<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if result.is_err() {
            self.close();
        }
        result
    }

    fn send(&mut self, request: &[u8], within: Option<Duration>) -> Result<(), Error> {
        let stream = self.stream.as_ref().ok_or(Error::Closed)?;
        if !self.buffer.is_empty() {
            // Nobody asked for that: we are out of step.
            return Err(Error::bad_reply(&String::from_utf8_lossy(&self.buffer)));
        }
        let write_timeout = Some(within.unwrap_or(self.reply_timeout).min(self.reply_timeout));
        match stream.write_within(request, write_timeout) {
            // A server that has refused us and left may have said why before it went.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(Error::NoReply),
            _ => Ok(()),
        }
    }

    fn receive(&mut self, within: Option<Duration>) -> Result<String, Error> {
        let deadline = within.and_then(|within| Instant::now().checked_add(within));
        // What has been looked at is not looked at again: a reply can be long.
        let mut seen = 0;
        loop {
            if let Some(line) = self.take_line(seen)? {
                return Ok(line);
            }
            seen = self.buffer.len();
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(Error::NoReply);
            }
            // Without a deadline the keepalive is what notices that the server has vanished.
            self.read_within(left.unwrap_or(LONGEST_READ))?;
        }
    }

    /// Reads a reply for as long as parts of it arrive within the reply timeout.
    fn receive_long(&mut self) -> Result<String, Error> {
        let mut progressed_at = Instant::now();
        let mut seen = 0;
        loop {
            if let Some(line) = self.take_line(seen)? {
                return Ok(line);
            }
            if self.buffer.len() > seen {
                progressed_at = Instant::now();
            }
            seen = self.buffer.len();
            let left = self.reply_timeout.saturating_sub(progressed_at.elapsed());
            if left.is_zero() {
                return Err(Error::NoReply);
            }
            self.read_within(left.min(LONGEST_READ))?;
        }
    }

    /// Takes the next line out of what was read, if it is complete; its end is not among the first
    /// `seen` bytes.
    fn take_line(&mut self, seen: usize) -> Result<Option<String>, Error> {
        let end = self.buffer[seen..].iter().position(|byte| *byte == b'\n');
        let Some(end) = end.map(|end| seen + end) else {
            if self.buffer.len() > MAX_REPLY_LEN {
                return Err(Error::BadReply("more than a reply can be".into()));
            }
            return Ok(None);
        };
        let rest = self.buffer.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.buffer, rest);
        line.truncate(end);
        let line = String::from_utf8(line);
        line.map(Some)
            .map_err(|error| Error::BadReply(error.to_string()))
    }

    /// Reads what comes next, for at most about `time`.
    fn read_within(&mut self, time: Duration) -> Result<(), Error> {
        let stream = self.stream.as_ref().ok_or(Error::Closed)?;
        stream.set_read_timeout(time)?;
        let mut chunk = [0; 4096];
        match (&mut &*stream).read(&mut chunk) {
            Ok(0) => return Err(Error::Closed),
            Ok(len) => self.buffer.extend(&chunk[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted || is_timeout(&error) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn expect_ok(
        &mut self,
        command: &str,
        key: &str,
        argument: &str,
        within: Duration,
    ) -> Result<(), Error> {
        let reply = self.request(command, key, argument, Some(within))?;
        if reply == "ok" {
            Ok(())
        } else {
            Err(self.refusal(&reply))
        }
    }

    fn grant_or_timeout(&mut self, reply: &str) -> Result<Option<Grant>, Error> {
        if reply == "timeout" {
            return Ok(None);
        }
        match reply.strip_prefix("ok ") {
            Some(grant) => self.parse_grant(grant).map(Some),
            None => Err(self.refusal(reply)),
        }
    }

    fn parse_grant(&mut self, text: &str) -> Result<Grant, Error> {
        let parsed = text.split_once(' ').and_then(|(token, seconds)| {
            Some(Grant {
                token: token.parse().ok()?,
                lease: parse_lease(seconds)?,
            })
        });
        parsed.ok_or_else(|| {
            self.close();
            Error::bad_reply(text)
        })
    }

    /// The error that a reply stands for. One that is no reply at all ends the connection.
    fn refusal(&mut self, reply: &str) -> Error {
        let error = Error::from_reply(reply);
        if matches!(error, Error::BadReply(_) | Error::AuthFailed) {
            self.close();
        }
        error
    }

    /// Closes the connection; whatever it holds, the server releases.
    pub(super) fn close(&mut self) {
        self.stream = None;
        self.buffer.clear();
    }

    /// Closes the connection and waits, for at most the reply timeout, until the server has seen that:
    /// what it releases with the connection is released then.
    pub fn finish(mut self) {
        if let Some(stream) = self.stream.take() {
            stream.shutdown(Shutdown::Write);
            stream.discard_for(self.reply_timeout);
        }
    }

    /// The connection's socket, to be watched for its end; `None` if it is closed.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }
}

impl Terms {
    /// A lock with the server's default lease.
    pub const LOCK: Terms = Terms {
        limit: None,
        lease: None,
    };

    /// Whether these can be sent.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.lease_argument()?;
        match self.limit {
            None | Some(1..=MAX_LIMIT) => Ok(()),
            Some(_) => Err(Error::InvalidArgument("a limit is 1 to 1048576")),
        }
    }

    /// Blank and lease, or nothing.
    fn lease_argument(&self) -> Result<String, Error> {
        match self.lease.map(whole_seconds) {
            None => Ok(String::new()),
            Some(seconds @ 1..=MAX_SECONDS) => Ok(format!(" {seconds}")),
            Some(_) => Err(Error::InvalidArgument("a lease is 1 to 9223372036 seconds")),
        }
    }
}

impl Patience {
    /// What is left of it when so much time has gone by: to the nearest second, so that the server
    /// still has half of one for its answer.
    pub(crate) fn after(self, elapsed: Duration) -> Patience {
        let elapsed = elapsed.saturating_add(Duration::from_millis(500)).as_secs();
        match self {
            Patience::Within(time) => {
                Patience::Within(time.saturating_sub(Duration::from_secs(elapsed)))
            }
            other => other,
        }
    }

    /// When the reply to a request is overdue that began at `began`.
    pub(super) fn deadline(self, began: Instant, reply_timeout: Duration) -> Option<Instant> {
        let within = self.reply_within(reply_timeout)?;
        began.checked_add(within)
    }

    fn seconds(self) -> u64 {
        match self {
            Patience::Try => 0,
            Patience::Within(time) => whole_seconds(time).min(MAX_SECONDS),
            Patience::Forever => MAX_SECONDS,
        }
    }

    /// How long the reply may take, given how long one takes without any waiting.
    fn reply_within(self, reply_timeout: Duration) -> Option<Duration> {
        match self {
            Patience::Forever => None,
            patience => Some(Duration::from_secs(patience.seconds()).saturating_add(reply_timeout)),
        }
    }
}

/// Whole seconds, rounded up.
fn whole_seconds(time: Duration) -> u64 {
    let begun = u64::from(time.subsec_nanos() > 0);
    time.as_secs().saturating_add(begun)
}

/// The length of a lease in a reply; `None` for one that no server gives.
fn parse_lease(seconds: &str) -> Option<Duration> {
    let seconds = seconds.parse().ok()?;
    (1..=MAX_SECONDS)
        .contains(&seconds)
        .then(|| Duration::from_secs(seconds))
}

/// Whether a key can be sent.
pub(crate) fn check_key(key: &str) -> Result<(), Error> {
    let is_good = (1..=MAX_KEY_LEN).contains(&key.len()) && !key.contains([' ', '\t', '\r', '\n']);
    is_good.then_some(()).ok_or(Error::InvalidKey)
}
