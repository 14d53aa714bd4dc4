//! One connection's conversation: read a request, ask the manager, write the reply, in order.
//!
//! The session's thread is the only one that writes to its socket. It may block in three places: in
//! a read, in a write, and in [`Connection::wait`]; each is bounded, and no other client notices.

use std::io;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use log::{debug, trace, warn};
use subtle::ConstantTimeEq;

use crate::escape::Escaped;
use crate::manager::{Connection, Outcome};
use crate::net::connections::Connections;
use crate::net::lines::{Buffered, LineReader, ReadEnd};
use crate::net::stream::Stream;
use crate::table::{Claim, Grant, Kind, Progress, Refusal, Ticket, Token};

use super::phases::{Phase, Phases};
use super::reply::Reply;
use super::request::{line_limit, parse, Frame, Request};

/// How long a peer that has not given the right token is kept waiting for the close.
const AUTH_COOLDOWN: Duration = Duration::from_millis(100);

/// For how long we listen to what a peer still sends before we close on it.
const CLOSING_TIME: Duration = Duration::from_millis(250);

/// Replies are written when no request is left in the buffer, or when there are this many bytes.
const FULL_OUT_LEN: usize = 16 * 1024;

/// What all sessions are told.
#[derive(Debug)]
pub struct SessionRules {
    /// The lease of a claim or a renewal that names none.
    pub default_lease: Duration,
    /// For how long a line may take, and how long a connection may idle that has nothing to lose.
    pub read_timeout: Duration,
    /// For how long a reply may take; `None` is for ever.
    pub write_timeout: Option<Duration>,
    /// What `auth` must present before anything else.
    pub auth_token: Option<Box<[u8]>>,
    /// How many keys can be in use at once, and so how many phase-one entries can be alive.
    pub max_locks: usize,
}

/// Why a conversation is over.
enum Ending {
    /// The peer has closed its side between two requests, or within one.
    PeerClosed,
    /// The connection is broken, or the peer does not read.
    Broken(io::Error),
    /// The peer closed its side while it waited.
    HungUpWaiting,
    ReadTimeout,
    LineTooLong,
    AuthFailed,
}

/// Serves a connection until it ends. What it holds then does what the manager's rules say.
pub fn serve(
    stream: &Stream,
    connection: Connection,
    rules: &SessionRules,
    connections: &Connections,
) {
    let conn = connection.id();
    debug!("opened conn={conn} peer={stream}");
    let mut session = Session {
        stream,
        rules,
        reader: LineReader::new(line_limit),
        out: Vec::new(),
        authenticated: rules.auth_token.is_none(),
        claims: Claims {
            connection,
            rules,
            connections,
            phases: Phases::default(),
        },
        socket_timeout: Duration::ZERO,
        line: None,
    };
    let ending = session.converse();
    let Session { claims, out, .. } = session;
    // Whatever there is to say to this peer, the next waiter shall not wait for it.
    drop(claims);
    part(stream, &ending, out, rules);
    debug!("closed conn={conn} reason={}", ending.reason());
}

struct Session<'a> {
    stream: &'a Stream,
    rules: &'a SessionRules,
    reader: LineReader<3>,
    out: Vec<u8>,
    authenticated: bool,
    claims: Claims<'a>,
    /// The read timeout that the socket is set to.
    socket_timeout: Duration,
    /// The line that is being received, and when it must be there.
    line: Option<(u32, Instant)>,
}

impl Session<'_> {
    fn converse(&mut self) -> Ending {
        loop {
            let went_on = match self.reader.look() {
                Buffered::Frame => self.serve_frame(),
                Buffered::TooLong => Err(Ending::LineTooLong),
                Buffered::Incomplete => self.flush().and_then(|()| self.read()),
            };
            if let Err(ending) = went_on {
                return self.veil(ending);
            }
        }
    }

    fn serve_frame(&mut self) -> Result<(), Ending> {
        let frame = self.reader.frame();
        if !self.authenticated {
            self.authenticated = self.rules.accepts(frame);
            if !self.authenticated {
                return Err(Ending::AuthFailed);
            }
            self.reader.advance();
            return self.reply(&Reply::Ok);
        }
        let step = self.claims.execute(frame);
        self.reader.advance();
        match step {
            Step::Reply(reply) => self.reply(&reply),
            Step::Wait(ticket, wait_timeout) => self.wait(ticket, wait_timeout),
        }
    }

    fn wait(&mut self, ticket: Ticket, wait_timeout: Duration) -> Result<(), Ending> {
        // Whoever blocks must not sit on the replies to earlier requests.
        self.flush()?;
        let outcome = self.claims.connection.wait(ticket, wait_timeout);
        // A Ctrl-C in telnet while we waited: it discards our reply unless it is answered first.
        self.reader.read_ready(self.stream).map_err(Ending::from)?;
        self.reader.take_answers(&mut self.out);
        match outcome {
            Outcome::Granted(grant) => self.reply(&Reply::Granted(grant)),
            Outcome::Refused(refusal) => self.reply(&Reply::Refused(refusal)),
            Outcome::TimedOut => self.reply(&Reply::Timeout),
            Outcome::Gone => Err(Ending::HungUpWaiting),
        }
    }

    fn reply(&mut self, reply: &Reply) -> Result<(), Ending> {
        reply.write(&mut self.out);
        if self.out.len() >= FULL_OUT_LEN {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Ending> {
        if self.out.is_empty() {
            return Ok(());
        }
        let written = self
            .stream
            .write_within(&self.out, self.rules.write_timeout);
        self.out.clear();
        self.out.shrink_to(FULL_OUT_LEN);
        written.map_err(Ending::Broken)
    }

    /// Blocks until there is more to look at.
    fn read(&mut self) -> Result<(), Ending> {
        let read = match self.reader.line_in_progress() {
            Some(line) => self.read_on(line),
            None => self.read_next(),
        };
        self.reader.take_answers(&mut self.out);
        read
    }

    /// Reads more of a line that has begun. Each line has one deadline, however its bytes drip in.
    fn read_on(&mut self, line: u32) -> Result<(), Ending> {
        let now = Instant::now();
        let deadline = match self.line {
            Some((known, deadline)) if known == line => deadline,
            _ => now + self.rules.read_timeout,
        };
        self.line = Some((line, deadline));
        let left = deadline.saturating_duration_since(now);
        if left.is_zero() {
            return Err(Ending::ReadTimeout);
        }
        match self.read_for(left) {
            Err(ReadEnd::Timeout) => Ok(()), // and found out of time when it comes back here
            read => read.map_err(Ending::from),
        }
    }

    /// Reads the beginning of the next frame, for as long as the connection may idle.
    fn read_next(&mut self) -> Result<(), Ending> {
        self.line = None;
        let mut patience = self.rules.read_timeout;
        loop {
            match self.read_for(patience) {
                Err(ReadEnd::Timeout) => {
                    patience = self.claims.idle_time_left().ok_or(Ending::ReadTimeout)?
                }
                read => return read.map_err(Ending::from),
            }
        }
    }

    fn read_for(&mut self, timeout: Duration) -> Result<(), ReadEnd> {
        if timeout != self.socket_timeout {
            self.stream
                .set_read_timeout(timeout)
                .map_err(ReadEnd::Broken)?;
            self.socket_timeout = timeout;
        }
        self.reader.read(self.stream)
    }

    /// Whoever has not said who he is learns nothing else about what he did wrong.
    fn veil(&self, ending: Ending) -> Ending {
        match ending {
            Ending::ReadTimeout | Ending::LineTooLong if !self.authenticated => Ending::AuthFailed,
            ending => ending,
        }
    }
}

/// Says what there is to say, and sees to it that the peer can read it.
fn part(stream: &Stream, ending: &Ending, mut out: Vec<u8>, rules: &SessionRules) {
    let (last_words, cooldown) = match ending {
        Ending::PeerClosed | Ending::Broken(_) => return,
        Ending::HungUpWaiting | Ending::ReadTimeout | Ending::LineTooLong => {
            (Reply::Error, Duration::ZERO)
        }
        Ending::AuthFailed => {
            warn!("auth-refused peer={stream}");
            (Reply::AuthFailed, AUTH_COOLDOWN)
        }
    };
    last_words.write(&mut out);
    let closes_at = Instant::now() + cooldown;
    if stream.write_within(&out, rules.write_timeout).is_ok() {
        stream.discard_for(cooldown);
        std::thread::sleep(closes_at.saturating_duration_since(Instant::now()));
        stream.shutdown(Shutdown::Write);
        stream.discard_for(CLOSING_TIME);
    }
}

impl Ending {
    /// A word for the log, and the number that the protocol has for it, if any.
    fn reason(&self) -> String {
        match self {
            Ending::PeerClosed => "peer-closed code=11".into(),
            Ending::Broken(error) => format!("broken error=\"{error}\""),
            Ending::HungUpWaiting => "hung-up-waiting code=11".into(),
            Ending::ReadTimeout => "read-timeout code=10".into(),
            Ending::LineTooLong => "line-too-long code=12".into(),
            Ending::AuthFailed => "auth-refused".into(),
        }
    }
}

impl From<ReadEnd> for Ending {
    fn from(end: ReadEnd) -> Self {
        match end {
            ReadEnd::Eof => Ending::PeerClosed,
            ReadEnd::Timeout => Ending::ReadTimeout,
            ReadEnd::Telnet => Ending::LineTooLong,
            ReadEnd::Broken(error) => Ending::Broken(error),
        }
    }
}

impl SessionRules {
    /// Whether the frame is `auth` with the right token. The comparison takes the same time wherever
    /// a wrong token differs, and whatever else is wrong with the frame.
    fn accepts(&self, frame: Frame<'_>) -> bool {
        let [command, _, given] = frame;
        let token = self.auth_token.as_deref().unwrap_or_default();
        let is_right = bool::from(token.ct_eq(given.trim_ascii()));
        is_right && command == b"auth"
    }
}

/// What to do about a request.
enum Step {
    Reply(Reply),
    Wait(Ticket, Duration),
}

/// The requests of one connection, carried out.
struct Claims<'a> {
    connection: Connection,
    rules: &'a SessionRules,
    connections: &'a Connections,
    phases: Phases,
}

impl Claims<'_> {
    /// Carries out a request as far as that is possible without blocking.
    fn execute(&mut self, frame: Frame<'_>) -> Step {
        let request = match parse(frame) {
            Ok(request) => request,
            Err(error) => {
                let (reason, code) = error.describe();
                let command = Escaped(frame[0]);
                debug!(
                    "refused conn={} reason={reason} code={code} command={command}",
                    self.connection.id()
                );
                return Step::Reply(Reply::Error);
            }
        };
        match request {
            Request::Acquire {
                key,
                kind,
                limit,
                lease,
                wait_timeout,
            } => {
                let lease = lease.unwrap_or(self.rules.default_lease);
                match self.connection.enqueue(key, kind, limit, lease) {
                    Ok(Claim::Acquired(grant)) => {
                        self.trace_grant(key, grant);
                        Step::Reply(Reply::Granted(grant))
                    }
                    Ok(Claim::Queued(ticket)) => Step::Wait(ticket, wait_timeout),
                    Err(refusal) => Step::Reply(Reply::Refused(refusal)),
                }
            }
            Request::Enqueue {
                key,
                kind,
                limit,
                lease,
            } => {
                let lease = lease.unwrap_or(self.rules.default_lease);
                if !self.make_way(key, kind) {
                    return Step::Reply(Reply::AlreadyEnqueued);
                }
                Step::Reply(match self.connection.enqueue(key, kind, limit, lease) {
                    Ok(Claim::Acquired(grant)) => {
                        self.trace_grant(key, grant);
                        self.phases.insert(kind, key, Phase::Acquired(grant));
                        Reply::Acquired(grant)
                    }
                    Ok(Claim::Queued(ticket)) => {
                        self.phases.insert(kind, key, Phase::Queued(ticket));
                        Reply::Queued
                    }
                    Err(refusal) => Reply::Refused(refusal),
                })
            }
            Request::Wait {
                key,
                kind,
                wait_timeout,
            } => match self.phases.remove(kind, key) {
                None => Step::Reply(Reply::NotEnqueued),
                Some(Phase::Acquired(grant)) => {
                    let renewed = self.connection.renew(key, kind, grant.token, grant.lease);
                    Step::Reply(match renewed {
                        Ok(()) => Reply::Granted(grant),
                        Err(_) => Reply::Refused(Refusal::LeaseExpired),
                    })
                }
                Some(Phase::Queued(ticket)) => match self.connection.collect(ticket) {
                    Progress::Granted(grant) => Step::Reply(Reply::Granted(grant)),
                    Progress::Refused(refusal) => Step::Reply(Reply::Refused(refusal)),
                    Progress::Waiting => Step::Wait(ticket, wait_timeout),
                },
            },
            Request::Release { key, kind, token } => {
                Step::Reply(match self.connection.release(key, kind, token) {
                    Ok(()) => {
                        self.end_phase(key, kind, token);
                        Reply::Ok
                    }
                    Err(refusal) => Reply::Refused(refusal),
                })
            }
            Request::Renew {
                key,
                kind,
                token,
                lease,
            } => {
                let lease = lease.unwrap_or(self.rules.default_lease);
                Step::Reply(match self.connection.renew(key, kind, token, lease) {
                    Ok(()) => Reply::Renewed(lease),
                    Err(refusal) => Reply::Refused(refusal),
                })
            }
            Request::Ping => Step::Reply(Reply::Ok),
            Request::Stats => Step::Reply(Reply::Stats {
                connection_count: self.connections.count(),
                keys: self.connection.manager().snapshot(),
            }),
            // Either none is due here, or it has been given.
            Request::Auth => Step::Reply(Reply::Error),
        }
    }

    /// Makes sure that a key has no phase-one entry, by dropping one whose token is dead; `false` if
    /// there is one that is alive.
    fn make_way(&mut self, key: &str, kind: Kind) -> bool {
        if let Some(phase) = self.phases.get(kind, key) {
            if !is_dead(&self.connection, key, kind, phase) {
                return false;
            }
            self.phases.remove(kind, key);
            bury(&self.connection, phase);
        }
        self.forget_the_dead();
        true
    }

    /// Entries that are alive are as many as there can be keys; dead ones wait for a `w` that may
    /// never come. Sweeping when there are as many of them keeps both the memory and the cost low.
    fn forget_the_dead(&mut self) {
        if self.phases.len() < self.rules.max_locks.saturating_mul(2) {
            return;
        }
        let connection = &self.connection;
        self.phases.retain(|kind, key, phase| {
            let is_alive = !is_dead(connection, key, kind, phase);
            if !is_alive {
                bury(connection, phase);
            }
            is_alive
        });
    }

    /// A release over the connection that enqueued ends the phase, too: many clients never send `w`.
    fn end_phase(&mut self, key: &str, kind: Kind, token: Token) {
        if let Some(Phase::Acquired(grant)) = self.phases.get(kind, key) {
            if grant.token == token {
                self.phases.remove(kind, key);
            }
        }
    }

    /// For how long the connection may still idle; `None` if its time is over. Whoever holds, waits
    /// or has enqueued may idle for as long as it likes: an `error` out of the blue would be taken
    /// for the answer to its next request.
    fn idle_time_left(&self) -> Option<Duration> {
        if self.phases.len() > 0 {
            return Some(self.rules.read_timeout);
        }
        let closes_at = self.connection.last_busy()? + self.rules.read_timeout;
        let left = closes_at.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    fn trace_grant(&self, key: &str, grant: Grant) {
        trace!(
            "granted key={} conn={} fence={}",
            Escaped(key.as_bytes()),
            self.connection.id(),
            grant.token.fence
        );
    }
}

/// Whether an entry's token has died: its lease is over, or it was released elsewhere.
fn is_dead(connection: &Connection, key: &str, kind: Kind, phase: Phase) -> bool {
    match phase {
        Phase::Acquired(grant) => !connection.is_held(key, kind, grant.token),
        Phase::Queued(ticket) => connection.has_lapsed(ticket),
    }
}

/// Spends the ticket of an entry that is dropped.
fn bury(connection: &Connection, phase: Phase) {
    if let Phase::Queued(ticket) = phase {
        connection.cancel(ticket);
    }
}
