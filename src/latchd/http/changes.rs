//! Carries out requests over HTTP that change something: the requests of the latch protocol, and
//! those for sessions. See latchd-http(7), LOCKS.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::debug;

use super::answer::{HttpAnswer, Sent};
use super::body;
use super::reply::{option_of, HttpReply};
use super::request::{HttpRequest, SESSION_HEADER};
use super::routes::Resource;
use super::sessions::{HttpClient, NoSession, SessionRequest, Sessions, IDLE_TIMEOUT};
use crate::latchd::arbiter::{Arbiter, Seat};
use crate::latchd::auth::rights::Rights;
use crate::latchd::context::SessionRules;
use crate::latchd::line::connection::outbox::Outbox;
use crate::latchd::line::ending::Ending;
use crate::latchd::line::hangups::act_on_hangups;
use crate::latchd::line::requests::{perform, Answered};
use crate::latchd::table::{AtClose, ConnId};
use crate::os::secret::USE;
use crate::os::stream::Stream;
use crate::os::text::reason;
use crate::shared::net::connections::{Admission, Connections};
use crate::shared::net::hangup::HangupWatch;
use crate::shared::net::permits::{Permit, PermitCap, Permits};
use crate::wire::reply::Reply;
use crate::wire::request::{parse, Request};
use crate::wire::terms::Refusal;
use crate::wire::token::Token;

/// The caps on what clients do over HTTP.
#[derive(Clone, Copy, Debug)]
pub(in crate::latchd) struct ChangeCaps {
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
pub(super) struct HttpChanges {
    arbiter: Arc<Arbiter>,
    rules: Arc<SessionRules>,
    watch: HangupWatch,
    /// The connections over HTTP, whose numbers are also those of requests and sessions.
    connections: Arc<Connections>,
    caps: ChangeCaps,
    /// Permits for requests that wait.
    permits: Arc<Permits>,
    pub(super) sessions: Sessions,
}

impl HttpChanges {
    pub(super) fn new(
        arbiter: &Arc<Arbiter>,
        rules: &Arc<SessionRules>,
        connections: &Arc<Connections>,
        caps: ChangeCaps,
    ) -> io::Result<HttpChanges> {
        Ok(HttpChanges {
            arbiter: Arc::clone(arbiter),
            rules: Arc::clone(rules),
            watch: HangupWatch::new()?,
            connections: Arc::clone(connections),
            permits: Permits::new(caps.max_waiting, caps.max_per_address),
            sessions: Sessions::new(caps.max_waiting, caps.max_per_address),
            caps,
        })
    }

    /// Ends the waits of clients that hang up. Never returns.
    pub(super) fn act_on_hangups(&self) -> ! {
        act_on_hangups(&self.watch, &self.arbiter, &self.connections)
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
            return answer.send(&HttpReply::standby());
        }
        let conn = ConnId(admission.id);
        let mut outbox = Outbox::new(stream, &self.rules, &self.watch, conn);
        let outcome = match asked.route.resource {
            Resource::NewSession => self.open_session(stream, rights),
            Resource::Session if self.sessions.end(&asked.parameter) => HttpReply::done(),
            Resource::SessionPing if self.enter(&asked.parameter, admission).is_ok() => {
                HttpReply::done()
            }
            _ => match self.ask(asked, rights, (admission, answer), &mut outbox) {
                Ok(sent) => return sent,
                Err(outcome) => outcome,
            },
        };
        send(&outcome, answer, &mut outbox)
    }

    fn open_session(&self, stream: &Stream, rights: &Rights) -> HttpReply {
        if !rights.may_use_keys() {
            return refuse_right(&self.rules, &Request::Ping, USE, stream);
        }
        if self.arbiter.counters().1.is_draining {
            return HttpReply::refused(Refusal::Draining, None);
        }
        let conn = ConnId(self.connections.numbers().next());
        let (address, peer) = (stream.source(), format!("http {stream}"));
        let opened = self
            .sessions
            .open(&self.arbiter, conn, address, peer, Instant::now());
        match opened {
            Ok(id) => {
                debug!("session-opened conn={conn} peer={stream}");
                let idle_timeout = IDLE_TIMEOUT.as_secs();
                HttpReply::ok(format!(
                    "{{\"session_id\":\"{id}\",\"idle_timeout_s\":{idle_timeout}}}"
                ))
            }
            Err(NoSession::Full(cap)) => {
                self.warn_of_cap(cap, stream);
                self.arbiter.count(|counters| counters.max_sessions += 1);
                HttpReply::too_many_sessions(cap)
            }
            Err(NoSession::NoSecret(error)) => HttpReply::unavailable(reason(&error)),
        }
    }

    fn enter(&self, id: &str, admission: &Admission) -> Result<SessionRequest<'_>, HttpReply> {
        let client = Arc::new(client_of(admission));
        let entered = self.sessions.enter(id, ConnId(admission.id), client);
        entered.ok_or_else(HttpReply::session_gone)
    }

    /// Carries out a request for a key, and answers it. The error is an answer that is not sent
    /// yet.
    fn ask(
        &self,
        asked: &HttpRequest,
        rights: &Rights,
        (admission, to): (&Admission, &HttpAnswer<'_>),
        outbox: &mut Outbox<'_>,
    ) -> Result<Sent, HttpReply> {
        let Resource::Key(command, fields) = asked.route.resource else {
            return Err(HttpReply::session_gone());
        };
        // A client whose session is gone hears of that first.
        let session = asked.session.as_ref();
        let session = session.map(|id| self.enter(id, admission)).transpose()?;
        let key = body::key(&asked.parameter)?;
        let argument = body::argument(fields, &asked.body)?;
        let frame = [command, &key, &argument];
        // Each field is in its range, so nothing else can be wrong.
        let too_long = |_| HttpReply::malformed("lease_ttl_s: longer than latchd --max-hold");
        let request = parse(frame).map_err(too_long)?;
        self.rules.offer.check(&request).map_err(too_long)?;
        let permitted = rights.permit(&request, || false);
        let request =
            permitted.ok_or_else(|| refuse_right(&self.rules, &request, USE, &admission.stream))?;
        let _permit = self.permit(&request, &admission.stream)?;
        let Some(session) = session else {
            let conn = ConnId(admission.id);
            self.check_without_session(&request, conn)?;
            let client = Arc::new(client_of(admission));
            let seat = self.arbiter.connect(conn, Some(client.clone()));
            let kept_as = Some(&*client.peer);
            let answered = perform(&request, &seat, &self.rules, outbox, kept_as);
            let sent = answer(answered, &seat, to, outbox);
            // A grant that is not kept by now is one that no client knows of.
            seat.leave(AtClose::Release);
            return sent;
        };
        match perform(&request, session.seat(), &self.rules, outbox, None) {
            Err(_) if session.is_ending() => Err(HttpReply::session_gone()),
            answered => answer(answered, session.seat(), to, outbox),
        }
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
            self.arbiter.count(|counters| counters.rate_limited += 1);
            HttpReply::rate_limited(cap)
        })
    }

    /// Says in the log that there are too many waiting requests or sessions.
    fn warn_of_cap(&self, cap: PermitCap, stream: &Stream) {
        let (warnings, option) = (&self.rules.cap_warnings, option_of(cap));
        warnings.warn_of(
            format_args!("cap-reached cap={option} peer={stream}"),
            &option,
        );
    }

    /// Refuses what a client without a session cannot have. A session ends with its grants, however
    /// long the lease is that a renewal has promised.
    fn check_without_session(&self, request: &Request<'_>, conn: ConnId) -> Result<(), HttpReply> {
        let without_session = |why| Err(HttpReply::malformed(format!("{SESSION_HEADER} {why}")));
        let is_of_session = |key, token: Token| {
            let held = self.arbiter.holder(key, token.fence, conn);
            let holder = held.as_ref().and_then(|held| held.queue.holders.first());
            holder.is_some_and(|holder| self.sessions.is_one(holder.conn))
        };
        let lease = match request {
            Request::Enqueue(_) | Request::Wait { .. } => {
                return without_session("is needed for this");
            }
            Request::Release { key, token, .. } | Request::Renew { key, token, .. }
                if is_of_session(key, *token) =>
            {
                return without_session("is needed: a session holds the grant");
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
        without_session(why)
    }
}

/// Logs that the client lacks the right that a request needs, and returns the answer.
pub(super) fn refuse_right(
    rules: &SessionRules,
    asked: &Request<'_>,
    right: &str,
    stream: &Stream,
) -> HttpReply {
    rules.log_right_refused(stream, b"http", asked);
    HttpReply::lacks_right(right)
}

/// Answers a request that has been carried out. A client that has left while it waited gets no
/// answer. The error is an answer that is not sent yet.
fn answer(
    answered: Result<Answered, Ending>,
    seat: &Seat,
    to: &HttpAnswer<'_>,
    outbox: &mut Outbox<'_>,
) -> Result<Sent, HttpReply> {
    let answered = match answered {
        Ok(answered) => answered,
        Err(Ending::Unwatched) => {
            let why = "the system does not say when clients hang up";
            return Err(HttpReply::unavailable(why));
        }
        Err(_) => return Ok(Err(())),
    };
    if outbox.end_reply(answered.promise).is_err() {
        return Ok(Err(()));
    }
    let granted = match &answered.reply {
        Reply::Granted(grant) | Reply::Acquired(grant) => Some(grant.token.fence),
        _ => None,
    };
    // What the answer promises may have to be written first, which takes time. A kept grant of a
    // client that has left meanwhile would keep others from the key until its lease ends.
    let sent = if granted.is_some() && outbox.wait_and_find_client_gone() {
        Err(())
    } else {
        send(&HttpReply::of(&answered.reply, answered.cap), to, outbox)
    };
    if let (Err(()), Some(fence)) = (sent, granted) {
        // The client does not know of it.
        seat.abandon_grant(fence);
    }
    Ok(sent)
}

/// Sends an answer as soon as what it promises is certain.
fn send(outcome: &HttpReply, to: &HttpAnswer<'_>, outbox: &mut Outbox<'_>) -> Sent {
    to.write(outcome, &mut outbox.out);
    outbox.flush().map_err(|_| ())
}

fn client_of(admission: &Admission) -> HttpClient {
    let stream = &admission.stream;
    HttpClient {
        peer: format!("http {stream}"),
        stream: Some(Arc::clone(stream)),
    }
}
