//! One connection's conversation: read a request, ask the arbiter, write the reply, in order.
//!
//! The session's thread is the only one that writes to its socket. It may block in three places: in
//! a read, in a write, and in [`Seat::wait`]; each is bounded, and no other client notices.

use std::io;
use std::net::{IpAddr, Shutdown};
use std::time::{Duration, Instant};

use log::{debug, trace, warn};
use subtle::ConstantTimeEq;

use crate::arbiter::{Outcome, Seat};
use crate::log::SourceThrottle;
use crate::net::connections::Connections;
use crate::net::hangup::{HangupWatch, Input};
use crate::net::lines::{Buffered, LineReader, ReadEnd};
use crate::net::stream::Stream;
use crate::table::{Claim, Kind, Progress, Refusal, Ticket};
use crate::text::Escaped;
use crate::token::Token;

use super::phases::{Phase, Phases};
use crate::protocol::reply::Reply;
use crate::protocol::request::{line_limit, parse, Frame, ProtocolError, Request};
use crate::protocol::stats;

/// How long a peer that has not given the right token is kept waiting for the close.
const AUTH_COOLDOWN: Duration = Duration::from_millis(100);

/// For how long we listen to what a peer still sends before we close on it.
const CLOSING_TIME: Duration = Duration::from_millis(250);

/// Replies are written when no request is left in the buffer, or when there are this many bytes, each
/// time with a whole write timeout.
const FULL_OUT_LEN: usize = 16 * 1024;

/// Longer than any deadline.
const FAR_AWAY: Duration = Duration::from_secs(u32::MAX as u64 * 100);

/// Dead phase-one entries that are kept beside those that are alive.
const MAX_DEAD: usize = 64;

/// What all sessions are told.
#[derive(Debug)]
pub struct SessionRules {
    /// The lease of a claim or a renewal that names none.
    pub default_lease: Duration,
    /// For how long a line may take, and how long a connection may idle that has nothing to lose.
    pub read_timeout: Duration,
    /// For how long a reply may take, or each piece of a long one; `None` is for ever.
    pub write_timeout: Option<Duration>,
    /// What `auth` must present before anything else.
    pub auth_token: Option<Box<[u8]>>,
    /// Keeps guessers from flooding the log.
    pub auth_refusals: SourceThrottle<Option<IpAddr>>,
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

/// Serves a connection until it ends. What it holds then does what the arbiter's rules say.
pub fn serve(
    stream: &Stream,
    seat: Seat,
    rules: &SessionRules,
    connections: &Connections,
    watch: &HangupWatch,
) {
    let conn = seat.id();
    debug!("opened conn={conn} peer={stream}");
    let secret_len = rules.auth_token.as_deref().map_or(0, <[u8]>::len);
    let mut session = Session {
        stream,
        watch,
        rules,
        reader: LineReader::new(move |index, command| line_limit(secret_len, index, command)),
        out: Vec::new(),
        authenticated: rules.auth_token.is_none(),
        claims: Claims {
            seat,
            rules,
            connections,
            phases: Phases::default(),
            sweep_at: MAX_DEAD,
            refused_count: 0,
        },
        socket_timeout: Duration::ZERO,
        awaited: None,
        started: Instant::now(),
    };
    let ending = session.converse();
    let Session { claims, out, .. } = session;
    let refused_count = claims.refused_count;
    // Whatever there is to say to this peer, the next waiter shall not wait for it.
    drop(claims);
    part(stream, &ending, out, rules);
    debug!(
        "closed conn={conn} reason={} refused={refused_count}",
        ending.reason()
    );
}

struct Session<'a> {
    stream: &'a Stream,
    watch: &'a HangupWatch,
    rules: &'a SessionRules,
    reader: LineReader<3>,
    out: Vec<u8>,
    authenticated: bool,
    claims: Claims<'a>,
    /// The read timeout that the socket is set to.
    socket_timeout: Duration,
    /// What is being received, if anything, and when it must be there: a line by its number, or the
    /// beginning of a frame. Telnet commands are neither, and so move no deadline.
    awaited: Option<(Option<u32>, Instant)>,
    started: Instant,
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
        let mut step = self.claims.execute(frame, self.out.is_empty());
        if matches!(step, Step::FlushFirst) {
            // A peer that does not read its replies must not hold a place in a queue meanwhile.
            self.flush()?;
            step = self.claims.execute(self.reader.frame(), true);
        }
        self.reader.advance();
        self.awaited = None;
        match step {
            Step::Reply(reply) => self.reply(&reply),
            Step::Wait(ticket, wait_timeout) => self.wait(ticket, wait_timeout),
            Step::Stats => self.show_stats(),
            Step::FlushFirst => unreachable!("there was nothing left to flush"),
        }
    }

    fn wait(&mut self, ticket: Ticket, wait_timeout: Duration) -> Result<(), Ending> {
        // Whoever blocks must not sit on the replies to earlier requests.
        self.flush()?;
        let outcome = self.wait_and_watch(ticket, wait_timeout);
        // A Ctrl-C in telnet while we waited: it discards our reply unless it is answered first.
        let received = self.reader.read_ready(self.stream);
        self.reader.take_answers(&mut self.out);
        match outcome {
            Outcome::Gone => return Err(Ending::HungUpWaiting),
            outcome => self.reply(&reply_to(outcome))?,
        }
        received.map_err(Ending::from)
    }

    /// A peer that fills its window behind the wait counts as gone; that it sends anything is looked at
    /// only when the wait is long.
    fn wait_and_watch(&self, ticket: Ticket, wait_timeout: Duration) -> Outcome {
        let seat = &self.claims.seat;
        let heed = |input| {
            // Should this fail, a peer that floods us is seen to leave only later.
            let _ = self.watch.set_input(self.stream, seat.id().0, input);
        };
        let mut is_long = false;
        let outcome = seat.wait_and_tell(ticket, wait_timeout, || {
            is_long = true;
            heed(Input::Heeded);
        });
        if is_long {
            heed(Input::Ignored);
        }
        outcome
    }

    /// Statistics can be large, and a peer need not read them: they are written as they are made, so
    /// that they take no more memory than any other reply.
    fn show_stats(&mut self) -> Result<(), Ending> {
        let arbiter = self.claims.seat.arbiter();
        self.out.extend(b"ok ");
        stats::write_json(
            self.claims.connections.count(),
            |after| arbiter.snapshot(after, stats::PAGE_LEN),
            &mut self.out,
            |out| flush_if_full(out, self.stream, self.rules),
        )?;
        self.out.push(b'\n');
        Ok(())
    }

    fn reply(&mut self, reply: &Reply) -> Result<(), Ending> {
        if let Reply::Granted(grant) | Reply::Acquired(grant) = reply {
            let conn = self.claims.seat.id();
            trace!("granted conn={conn} fence={}", grant.token.fence);
        }
        reply.write(&mut self.out);
        flush_if_full(&mut self.out, self.stream, self.rules)
    }

    fn flush(&mut self) -> Result<(), Ending> {
        flush(&mut self.out, self.stream, self.rules)
    }

    /// Blocks until there is more to look at, or until it is time to look at the clock again.
    fn read(&mut self) -> Result<(), Ending> {
        let awaited = self.reader.line_in_progress();
        let now = Instant::now();
        let deadline = match self.awaited {
            Some((known, deadline)) if known == awaited => deadline,
            _ => now + self.rules.read_timeout,
        };
        self.awaited = Some((awaited, deadline));
        let left = deadline
            .min(self.latest_auth())
            .saturating_duration_since(now);
        if left.is_zero() {
            return self.stay_idle(awaited);
        }
        let read = match self.read_for(left) {
            Err(ReadEnd::Timeout) => Ok(()), // and found out of time when it comes back here
            read => read.map_err(Ending::from),
        };
        self.reader.take_answers(&mut self.out);
        read
    }

    /// Time is over: a connection between two requests may stay if it has something to lose.
    fn stay_idle(&mut self, awaited: Option<u32>) -> Result<(), Ending> {
        if awaited.is_some() || !self.authenticated {
            return Err(Ending::ReadTimeout);
        }
        let more = self.claims.idle_time_left().ok_or(Ending::ReadTimeout)?;
        self.awaited = Some((None, Instant::now() + more));
        Ok(())
    }

    /// When `auth` must have come: three lines, each with its own deadline, cannot take longer.
    fn latest_auth(&self) -> Instant {
        let patience = if self.authenticated {
            FAR_AWAY
        } else {
            3 * self.rules.read_timeout
        };
        self.started + patience
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

fn flush_if_full(out: &mut Vec<u8>, stream: &Stream, rules: &SessionRules) -> Result<(), Ending> {
    if out.len() < FULL_OUT_LEN {
        return Ok(());
    }
    flush(out, stream, rules)
}

fn flush(out: &mut Vec<u8>, stream: &Stream, rules: &SessionRules) -> Result<(), Ending> {
    if out.is_empty() {
        return Ok(());
    }
    let written = stream.write_within(out, rules.write_timeout);
    out.clear();
    out.shrink_to(FULL_OUT_LEN);
    written.map_err(Ending::Broken)
}

/// Says what there is to say, and sees to it that the peer can read it.
fn part(stream: &Stream, ending: &Ending, mut out: Vec<u8>, rules: &SessionRules) {
    let (last_words, cooldown) = match ending {
        Ending::PeerClosed | Ending::Broken(_) => return,
        Ending::HungUpWaiting | Ending::ReadTimeout | Ending::LineTooLong => {
            (Reply::Error, Duration::ZERO)
        }
        Ending::AuthFailed => {
            if let Some(held_back) = rules.auth_refusals.admit(stream.source()) {
                warn!("auth-refused peer={stream} held_back={held_back}");
            }
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
        let [command, key, given] = frame;
        let token = self.auth_token.as_deref().unwrap_or_default();
        let (given, is_text) = match std::str::from_utf8(given) {
            Ok(given) => (given.trim().as_bytes(), true),
            Err(_) => (given, false),
        };
        let is_right = bool::from(token.ct_eq(given));
        is_right && is_text && command == b"auth" && std::str::from_utf8(key).is_ok()
    }
}

fn reply_to(outcome: Outcome) -> Reply {
    match outcome {
        Outcome::Granted(grant) => Reply::Granted(grant),
        Outcome::Refused(refusal) => Reply::Refused(refusal),
        Outcome::TimedOut => Reply::Timeout,
        Outcome::Gone => Reply::Error,
    }
}

/// What to do about a request.
enum Step {
    Reply(Reply),
    Wait(Ticket, Duration),
    Stats,
    /// To write what is due first, and then to carry out the request again.
    FlushFirst,
}

/// The requests of one connection, carried out.
struct Claims<'a> {
    seat: Seat,
    rules: &'a SessionRules,
    connections: &'a Connections,
    phases: Phases,
    /// With so many phase-one entries, the dead ones are swept.
    sweep_at: usize,
    /// How many requests were none.
    refused_count: u32,
}

impl Claims<'_> {
    /// Carries out a request as far as that is possible without blocking. Takes a place in a queue
    /// only if it `may_wait`.
    fn execute(&mut self, frame: Frame<'_>, may_wait: bool) -> Step {
        let request = match parse(frame) {
            Ok(request) => request,
            Err(error) => {
                self.note_refusal(error, frame[0]);
                return Step::Reply(Reply::Error);
            }
        };
        if let Request::Acquire { key, .. } | Request::Enqueue { key, .. } = request {
            let conn = self.seat.id();
            trace!("asked key={} conn={conn}", Escaped(key.as_bytes()));
        }
        match request {
            Request::Acquire {
                key,
                kind,
                limit,
                lease,
                wait_timeout,
            } => {
                let lease = lease.unwrap_or(self.rules.default_lease);
                if wait_timeout.is_zero() || !may_wait {
                    let tried = self.seat.try_acquire(key, kind, limit, lease);
                    return match tried {
                        Ok(Some(grant)) => Step::Reply(Reply::Granted(grant)),
                        Ok(None) if wait_timeout.is_zero() => Step::Reply(Reply::Timeout),
                        Ok(None) => Step::FlushFirst,
                        Err(refusal) => Step::Reply(Reply::Refused(refusal)),
                    };
                }
                match self.seat.enqueue(key, kind, limit, lease) {
                    Ok(Claim::Acquired(grant)) => Step::Reply(Reply::Granted(grant)),
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
                    return Step::Reply(if self.seat.arbiter().is_draining() {
                        Reply::Refused(Refusal::Draining)
                    } else {
                        Reply::AlreadyEnqueued
                    });
                }
                Step::Reply(match self.seat.enqueue(key, kind, limit, lease) {
                    Ok(Claim::Acquired(grant)) => {
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
                    let renewed = self.seat.renew(key, kind, grant.token, grant.lease);
                    Step::Reply(match renewed {
                        Ok(()) => Reply::Granted(grant),
                        Err(_) => Reply::Refused(Refusal::LeaseExpired),
                    })
                }
                Some(Phase::Queued(ticket)) => match self.seat.collect(ticket) {
                    Progress::Granted(grant) => Step::Reply(Reply::Granted(grant)),
                    Progress::Refused(refusal) => Step::Reply(Reply::Refused(refusal)),
                    // Its turn has come, and it keeps its place; but who knows for how long the mint
                    // has no token.
                    Progress::Waiting if self.seat.is_owed(ticket) => {
                        self.phases.insert(kind, key, Phase::Queued(ticket));
                        Step::Reply(Reply::Refused(Refusal::NoToken))
                    }
                    Progress::Waiting if wait_timeout.is_zero() => {
                        Step::Reply(reply_to(self.seat.wait(ticket, wait_timeout)))
                    }
                    Progress::Waiting => Step::Wait(ticket, wait_timeout),
                },
            },
            Request::Release { key, kind, token } => {
                Step::Reply(match self.seat.release(key, kind, token) {
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
                Step::Reply(match self.seat.renew(key, kind, token, lease) {
                    Ok(()) => Reply::Renewed(lease),
                    Err(refusal) => Reply::Refused(refusal),
                })
            }
            Request::Ping => Step::Reply(Reply::Ok),
            Request::Stats => Step::Stats,
            // Either none is due here, or it has been given.
            Request::Auth => Step::Reply(Reply::Error),
        }
    }

    /// Makes sure that a key has no phase-one entry, by dropping one whose token is dead; `false` if
    /// there is one that is alive.
    fn make_way(&mut self, key: &str, kind: Kind) -> bool {
        if let Some(phase) = self.phases.get(kind, key) {
            if !is_dead(&self.seat, key, kind, phase) {
                return false;
            }
            self.phases.remove(kind, key);
            bury(&self.seat, phase);
        }
        self.forget_the_dead();
        true
    }

    /// Dead entries wait for a `w` that may never come. Those that are alive are in the table, which
    /// has its caps; sweeping when there may be as many dead ones keeps both memory and cost low.
    fn forget_the_dead(&mut self) {
        if self.phases.len() < self.sweep_at {
            return;
        }
        let seat = &self.seat;
        self.phases.retain(|kind, key, phase| {
            let is_alive = !is_dead(seat, key, kind, phase);
            if !is_alive {
                bury(seat, phase);
            }
            is_alive
        });
        self.sweep_at = 2 * self.phases.len() + MAX_DEAD;
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
        let closes_at = self.seat.last_busy()? + self.rules.read_timeout;
        let left = closes_at.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// The first bad request of a connection is logged, the others are counted.
    fn note_refusal(&mut self, error: ProtocolError, command: &[u8]) {
        if self.refused_count == 0 {
            let (reason, code) = error.describe();
            debug!(
                "refused conn={} reason={reason} code={code} command={}",
                self.seat.id(),
                Escaped(command)
            );
        }
        self.refused_count = self.refused_count.saturating_add(1);
    }
}

/// Whether an entry's token has died: its lease is over, or it was released elsewhere.
fn is_dead(seat: &Seat, key: &str, kind: Kind, phase: Phase) -> bool {
    match phase {
        Phase::Acquired(grant) => !seat.is_held(key, kind, grant.token),
        Phase::Queued(ticket) => seat.has_lapsed(ticket),
    }
}

/// Spends the ticket of an entry that is dropped.
fn bury(seat: &Seat, phase: Phase) {
    if let Phase::Queued(ticket) = phase {
        seat.cancel(ticket);
    }
}
