//! Carries out requests over HTTP that change something: the requests of the latch protocol, and
//! those for sessions. See latchd-operations(7), Locks over HTTP.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::debug;

use super::answer::{HttpAnswer, Sent};
use super::body;
use super::reply::{option_of, HttpReply};
use super::request::HttpRequest;
use super::routes::{Resource, Verb};
use super::sessions::{NoSession, SessionRequest, Sessions};
use crate::arbiter::{Arbiter, ClientSocket, Seat};
use crate::latchd::connection::outbox::Outbox;
use crate::latchd::ending::Ending;
use crate::latchd::hangups::report_hangups;
use crate::latchd::requests::carry_out;
use crate::latchd::rights::{Permitted, Rights};
use crate::latchd::rules::SessionRules;
use crate::log::SourceThrottle;
use crate::net::connections::{Admission, Connections};
use crate::net::hangup::HangupWatch;
use crate::net::permits::{Permit, PermitCap, Permits};
use crate::net::stream::Stream;
use crate::protocol::reply::Reply;
use crate::protocol::request::Request;
use crate::table::ConnId;
use crate::terms::{Kind, Refusal};
use crate::text::reason;
use crate::token::Grant;

const SECOND: Duration = Duration::from_secs(1);

/// The caps on what clients do over HTTP.
#[derive(Clone, Copy, Debug)]
pub(in crate::latchd) struct GrantCaps {
    /// The maximum number of requests at once that wait, and of sessions.
    pub(in crate::latchd) max_waiting: usize,
    /// The maximum number of each from one address.
    pub(in crate::latchd) max_per_address: Option<usize>,
    /// The maximum number of kept grants.
    pub(in crate::latchd) max_kept: usize,
    /// The maximum lease of a kept grant.
    pub(in crate::latchd) max_keep_time: Duration,
}

/// Carries out the requests that change something.
pub(super) struct Grants {
    arbiter: Arc<Arbiter>,
    rules: Arc<SessionRules>,
    watch: HangupWatch,
    /// The connections over HTTP, whose numbers are also those of requests and sessions.
    connections: Arc<Connections>,
    caps: GrantCaps,
    /// Permits for requests that wait.
    permits: Arc<Permits>,
    /// Keeps refusals because of each cap from flooding the log.
    cap_warnings: SourceThrottle<&'static str>,
    pub(super) sessions: Sessions,
}

impl Grants {
    pub(super) fn new(
        arbiter: &Arc<Arbiter>,
        rules: &Arc<SessionRules>,
        connections: &Arc<Connections>,
        caps: GrantCaps,
    ) -> io::Result<Grants> {
        Ok(Grants {
            arbiter: Arc::clone(arbiter),
            rules: Arc::clone(rules),
            watch: HangupWatch::new()?,
            connections: Arc::clone(connections),
            permits: Permits::new(caps.max_waiting, caps.max_per_address),
            cap_warnings: SourceThrottle::default(),
            sessions: Sessions::new(caps.max_waiting, caps.max_per_address),
            caps,
        })
    }

    /// Ends the waits of clients that hang up. Never returns.
    pub(super) fn report_hangups(&self) -> ! {
        report_hangups(&self.watch, &self.arbiter, &self.connections)
    }

    /// Carries out and answers a request that changes something.
    pub(super) fn serve(
        &self,
        asked: &HttpRequest,
        rights: &Rights,
        admission: &Admission,
        answer: &HttpAnswer<'_>,
    ) -> Sent {
        let stream = &*admission.stream;
        let node = self.rules.node.as_deref();
        if node.is_some_and(|node| !node.is_active()) {
            let why = "this server is a standby; the active server has the locks";
            return answer.error("503 Service Unavailable", "not_leader", why, "");
        }
        let conn = ConnId(admission.id);
        let mut outbox = Outbox::new(stream, &self.rules, &self.watch, conn);
        let outcome = match asked.resource {
            Resource::NewSession => self.open_session(stream, rights),
            Resource::Session if self.sessions.end(&asked.parameter, rights) => HttpReply::done(),
            Resource::SessionPing if self.enter(&asked.parameter, rights, admission).is_some() => {
                HttpReply::done()
            }
            Resource::Key(verb, kind) => {
                match self.ask(asked, (verb, kind), rights, admission, &mut outbox) {
                    Ok(sent) => return sent,
                    Err(outcome) => outcome,
                }
            }
            _ => HttpReply::session_gone(),
        };
        send(&outcome, &mut outbox)
    }

    fn open_session(&self, stream: &Stream, rights: &Rights) -> HttpReply {
        if !rights.may_use_keys() {
            return self.refuse_right(&Request::Ping, stream);
        }
        if self.arbiter.counters().1.is_draining {
            return HttpReply::of(&Reply::Refused(Refusal::Draining));
        }
        let conn = ConnId(self.connections.numbers().next());
        let (address, peer) = (stream.source(), format!("http {stream}"));
        let opened = self
            .sessions
            .open(&self.arbiter, rights, conn, address, peer, Instant::now());
        match opened {
            Ok(id) => {
                debug!("session-opened conn={conn} peer={stream}");
                HttpReply::session(&id.to_string())
            }
            Err(NoSession::Full(cap)) => {
                self.warn_of_cap(cap, stream);
                HttpReply::too_many_sessions(cap)
            }
            Err(NoSession::NoSecret(error)) => HttpReply::unavailable(&reason(&error)),
        }
    }

    fn enter(
        &self,
        id: &str,
        rights: &Rights,
        admission: &Admission,
    ) -> Option<SessionRequest<'_>> {
        let conn = ConnId(admission.id);
        let requester = Requester::of(admission);
        self.sessions.enter(id, rights, conn, requester)
    }

    /// Carries out a request for a key, and answers it. The error is an answer that is not sent
    /// yet.
    fn ask(
        &self,
        asked: &HttpRequest,
        (verb, kind): (Verb, Kind),
        rights: &Rights,
        admission: &Admission,
        outbox: &mut Outbox<'_>,
    ) -> Result<Sent, HttpReply> {
        let key = body::key(&asked.parameter)?;
        let request = body::request(verb, kind, &key, &asked.body)?;
        let too_long = |_| HttpReply::malformed("lease_ttl_s: longer than latchd --max-hold");
        let request = self.rules.offer.check(request).map_err(too_long)?;
        let request = self.permitted(request, rights, &admission.stream)?;
        let _permit = self.permit(&request, &admission.stream)?;
        let Some(id) = &asked.session else {
            self.check_without_session(&request)?;
            let conn = ConnId(admission.id);
            let seat = self.arbiter.connect(conn, Some(Requester::of(admission)));
            let reply = self.carry_out_and_keep(&request, rights, &seat, admission, outbox);
            return answer(reply, &seat, outbox);
        };
        let session = self.enter(id, rights, admission);
        let session = session.ok_or_else(HttpReply::session_gone)?;
        match self.carry_out(&request, session.seat(), outbox) {
            Err(_) if session.is_ending() => Err(HttpReply::session_gone()),
            reply => answer(reply, session.seat(), outbox),
        }
    }

    /// Refuses, and logs, a request that the client has no right to make.
    fn permitted<'r>(
        &self,
        request: Request<'r>,
        rights: &Rights,
        stream: &Stream,
    ) -> Result<Permitted<'r>, HttpReply> {
        let permitted = rights.permit(request, || false);
        permitted.map_err(|asked| self.refuse_right(&asked, stream))
    }

    /// Logs that the client lacks the right to make a request, and returns the answer.
    fn refuse_right(&self, asked: &Request<'_>, stream: &Stream) -> HttpReply {
        self.rules.log_right_refused(stream, b"http", asked);
        HttpReply::of(&Reply::AuthFailed)
    }

    /// A permit to wait, if the request may wait. The others are not refused because of those that
    /// do: among them are the releases that these wait for.
    fn permit(&self, request: &Request<'_>, stream: &Stream) -> Result<Option<Permit>, HttpReply> {
        let wait_timeout = match *request {
            Request::Acquire(_, wait_timeout) | Request::Wait { wait_timeout, .. } => wait_timeout,
            _ => Duration::ZERO,
        };
        if wait_timeout.is_zero() {
            return Ok(None);
        }
        let permit = self.permits.take(stream.source());
        permit.map(Some).map_err(|cap| {
            self.warn_of_cap(cap, stream);
            HttpReply::rate_limited(cap)
        })
    }

    /// Says in the log that there are too many waiting requests or sessions.
    fn warn_of_cap(&self, cap: PermitCap, stream: &Stream) {
        let (warnings, option) = (&self.cap_warnings, option_of(cap));
        warnings.warn(
            format_args!("cap-reached cap={option} peer={stream}"),
            option,
        );
    }

    /// Refuses what a client without a session cannot have.
    fn check_without_session(&self, request: &Request<'_>) -> Result<(), HttpReply> {
        let lease = match request {
            Request::Enqueue(_) | Request::Wait { .. } => {
                return Err(HttpReply::without_session("is needed for this"));
            }
            Request::Acquire(wanted, _) => wanted.lease.unwrap_or(self.rules.offer.default_lease),
            _ => return Ok(()),
        };
        let why = if self.caps.max_kept == 0 {
            "is needed with latchd --max-kept 0"
        } else if lease > self.caps.max_keep_time {
            "is needed for a lease above latchd --max-keep-time"
        } else {
            return Ok(());
        };
        Err(HttpReply::without_session(why))
    }

    /// Carries out a request. Its answer will wait until what it promises is certain.
    fn carry_out(
        &self,
        request: &Permitted<'_>,
        seat: &Seat,
        outbox: &mut Outbox<'_>,
    ) -> Result<Reply, Ending> {
        let mut answered = carry_out(request, seat, self.rules.offer, outbox)?;
        outbox.await_changes(request, seat, &mut answered.reply);
        outbox.end_reply(answered.promise)?;
        self.rules.warn_of_cap(&answered.reply, &self.arbiter);
        Ok(answered.reply)
    }

    /// Carries out a request of a client without a session. A grant then belongs to its token
    /// alone.
    fn carry_out_and_keep(
        &self,
        request: &Permitted<'_>,
        rights: &Rights,
        seat: &Seat,
        admission: &Admission,
        outbox: &mut Outbox<'_>,
    ) -> Result<Reply, Ending> {
        let reply = self.carry_out(request, seat, outbox)?;
        let (Reply::Granted(grant), Some(key)) = (&reply, request.changed_key()) else {
            return Ok(reply);
        };
        // All that operators will see of the client.
        seat.set_tag(&format!("http {}", admission.stream));
        // A part of the second in which the grant began is over.
        let longest = self
            .rules
            .offer
            .max_lease
            .saturating_sub(SECOND)
            .max(SECOND);
        let keep = Request::Keep {
            key,
            token: grant.token,
            lease: Some(grant.lease.min(longest)),
            status: None,
        };
        let permitted = rights.permit(keep, || false);
        let permitted = permitted.unwrap_or_else(|it| panic!("no right to {it:?} after the claim"));
        Ok(match self.carry_out(&permitted, seat, outbox)? {
            Reply::Renewed(lease) => Reply::Granted(Grant { lease, ..*grant }),
            refusal => {
                seat.abandon_grant(grant.token.fence);
                refusal
            }
        })
    }
}

/// Answers a request that has been carried out. A client that has left while it waited gets no
/// answer. The error is an answer that is not sent yet.
fn answer(
    reply: Result<Reply, Ending>,
    seat: &Seat,
    outbox: &mut Outbox<'_>,
) -> Result<Sent, HttpReply> {
    let reply = match reply {
        Ok(reply) => reply,
        Err(Ending::Unwatched) => {
            let why = "the system does not say when clients hang up";
            return Err(HttpReply::unavailable(why));
        }
        Err(_) => return Ok(Err(())),
    };
    let granted = match &reply {
        Reply::Granted(grant) | Reply::Acquired(grant) => Some(grant.token.fence),
        _ => None,
    };
    // What the answer promises may have to be written first, which takes time. A kept grant of a
    // client that has left meanwhile would keep others from the key until its lease ends.
    let sent = if granted.is_some() && outbox.wait_and_find_client_gone() {
        Err(())
    } else {
        send(&HttpReply::of(&reply), outbox)
    };
    if let (Err(()), Some(fence)) = (sent, granted) {
        // The client does not know of it.
        seat.abandon_grant(fence);
    }
    Ok(sent)
}

/// Sends an answer as soon as what it promises is certain.
fn send(outcome: &HttpReply, outbox: &mut Outbox<'_>) -> Sent {
    outbox.out.extend(outcome.head().as_bytes());
    outbox.out.extend(&outcome.body);
    outbox.flush().map_err(|_| ())
}

/// The client of a request, as seen by the threads of other clients.
struct Requester(Arc<Stream>);

impl Requester {
    fn of(admission: &Admission) -> Arc<dyn ClientSocket> {
        Arc::new(Requester(Arc::clone(&admission.stream)))
    }
}

impl ClientSocket for Requester {
    fn peer(&self) -> String {
        format!("http {}", self.0)
    }

    /// An answer is not a line, so the request's own thread sends it.
    fn send_grant(&self, _: Grant) -> bool {
        false
    }

    fn has_hung_up(&self) -> bool {
        self.0.has_hung_up()
    }

    fn shut_down(&self) {
        self.0.shutdown(Shutdown::Both);
    }
}
