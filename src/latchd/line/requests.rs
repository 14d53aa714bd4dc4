//! Carries out the requests of one connection through its seat at the arbiter.

use std::time::Duration;

use log::trace;

use super::connection::outbox::Outbox;
use super::ending::Ending;
use crate::latchd::arbiter::{Certainty, ClientAbilities, ReplyPromise, Seat};
use crate::latchd::auth::rights::Permitted;
use crate::latchd::context::{Offer, ServerContext};
use crate::latchd::table::{Answer, Ask, Cap, Proof, Ticket};
use crate::os::text::Escaped;
use crate::shared::net::hangup::InputReports;
use crate::wire::abilities::Abilities;
use crate::wire::reply::Reply;
use crate::wire::request::{Held, Request, Wanted};
use crate::wire::terms::{Kind, Refusal};
use crate::wire::token::{Fence, Grant, Token};

const SECOND: Duration = Duration::from_secs(1);

/// The reply to a request.
#[derive(Debug)]
pub struct Answered {
    pub reply: Reply,
    /// What must be certain before the reply may be sent.
    pub promise: ReplyPromise,
    pub delivery: Delivery,
    /// The cap because of which the request is refused.
    pub cap: Option<Cap>,
}

/// Who sends a reply, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The session must send it.
    Due,
    /// The session must send it, after a wait in which input may have arrived.
    DueAfterWait,
    /// The thread that ended the wait has sent it.
    Sent,
}

/// Carries out a request, and has the reply wait for what it promises. If the request is refused
/// because of a cap, names the cap in the log. With `kept_as`, a new grant is kept from the start:
/// it belongs to its token alone, and operators see it under this name.
pub fn perform(
    request: &Permitted<'_>,
    seat: &Seat,
    context: &ServerContext,
    outbox: &mut Outbox<'_>,
    kept_as: Option<&str>,
) -> Result<Answered, Ending> {
    let mut answered = carry_out(request, seat, context.offer, outbox)?;
    let kept = kept_as.and_then(|tag| keep_new(request, seat, context.offer, tag, &mut answered));
    let request = kept.as_ref().unwrap_or(request);
    outbox.await_changes(request, seat, &mut answered.reply);
    answered.cap = context.warn_of_cap(seat);
    Ok(answered)
}

/// Keeps the grant of a claim, if there is one. Returns the request that a client would have kept
/// it with.
#[cold]
fn keep_new<'a>(
    claim: &Request<'a>,
    seat: &Seat,
    offer: Offer,
    tag: &str,
    answered: &mut Answered,
) -> Option<Request<'a>> {
    let (Reply::Granted(grant), Some(key)) = (&mut answered.reply, claim.changed_key()) else {
        return None;
    };
    seat.set_tag(tag);
    // A part of the second in which the grant began is over.
    let longest = offer.max_lease.saturating_sub(SECOND).max(SECOND);
    let (token, lease) = (grant.token, grant.lease.min(longest));
    match seat.keep(key, token, lease, None) {
        Ok(_) => grant.lease = lease,
        Err(refusal) => {
            seat.abandon_grant(token.fence);
            answered.reply = Reply::Refused(refusal);
        }
    }
    answered.promise = ReplyPromise::Grant(Certainty::JournaledByActive, token.fence);
    Some(Request::Keep {
        key,
        token,
        lease: Some(lease),
        status: None,
    })
}

/// Carries out a request. This is the only place where a session waits for another client.
fn carry_out(
    request: &Permitted<'_>,
    seat: &Seat,
    offer: Offer,
    outbox: &mut Outbox<'_>,
) -> Result<Answered, Ending> {
    let default_lease = offer.default_lease;
    let lease_or_default = |lease: Option<Duration>| lease.unwrap_or(default_lease);
    let renewed = |token: Token| ReplyPromise::Holder(Certainty::JournaledByActive, token.fence);
    let (answer, promise) = match **request {
        Request::Acquire(wanted, wait_timeout) => {
            let ask = ask(seat, wanted, default_lease);
            return acquire(seat, outbox, &ask, wait_timeout);
        }
        Request::Enqueue(wanted) => return enqueue(seat, &ask(seat, wanted, default_lease)),
        Request::Wait {
            key,
            kind,
            wait_timeout,
        } => return collect(seat, outbox, (key, kind), wait_timeout),
        Request::Release {
            key,
            kind,
            token,
            status,
        } => {
            let promise = ReplyPromise::Holder(Certainty::Journaled, token.fence);
            (seat.release(key, kind, token, status), promise)
        }
        Request::Renew {
            key,
            kind,
            token,
            lease,
        } => {
            let answer = seat.renew(key, kind, token, lease_or_default(lease));
            (answer, renewed(token))
        }
        Request::Adopt {
            key,
            token,
            lease,
            held,
        } => match seat.adopt(&proof(key, token, held), lease_or_default(lease)) {
            Ok(Answer::Gone) => return Err(Ending::HungUpAdopting),
            answer => (answer, renewed(token)),
        },
        Request::Keep {
            key,
            token,
            lease,
            status,
        } => {
            let answer = seat.keep(key, token, lease_or_default(lease), status);
            (answer, renewed(token))
        }
        Request::Break { key, fence, .. } => {
            return Ok(break_grants(seat, key, fence.map(Fence)));
        }
        Request::Hello(client) => return Ok(greet(seat, client, offer, outbox)),
        Request::Tag(text) => {
            seat.set_tag(text);
            return Ok(Answered::free(Reply::Ok));
        }
        Request::Ping => return Ok(Answered::free(Reply::Ok)),
        // The session answers these requests before they get here, except `auth`, which is an error
        // after the opening.
        Request::Auth(_)
        | Request::StableRef
        | Request::Stats
        | Request::Queues(_)
        | Request::Holder { .. }
        | Request::Histories
        | Request::Counters => return Ok(Answered::free(Reply::Error)),
    };
    if answer == Err(Refusal::NotHeld) {
        return Ok(Answered::due(not_held(seat, request), promise));
    }
    Ok(Answered::due(reply_to(answer)?, promise))
}

fn greet(seat: &Seat, client: Abilities, offer: Offer, outbox: &mut Outbox<'_>) -> Answered {
    outbox.hears_not_written = client.has(Abilities::HEARS_NOT_WRITTEN);
    seat.set_abilities(ClientAbilities {
        can_adopt: client.has(Abilities::ADOPT),
        hears_breaks: client.has(Abilities::HEARS_BREAKS),
    });
    let socket = outbox.context.operator_socket.clone();
    let socket = socket.filter(|_| outbox.stream.is_local());
    Answered::free(Reply::Hello(offer.abilities, socket))
}

/// The reply to a request about a grant that has ended.
#[cold]
fn not_held(seat: &Seat, request: &Request<'_>) -> Reply {
    match request {
        Request::Renew { token, .. } | Request::Adopt { token, .. }
            if seat.hears_of_break(token.fence) =>
        {
            Reply::Broken
        }
        _ => Reply::Refused(Refusal::NotHeld),
    }
}

impl Answered {
    fn due(reply: Reply, promise: ReplyPromise) -> Answered {
        Answered {
            reply,
            promise,
            delivery: Delivery::Due,
            cap: None,
        }
    }

    /// A reply that promises nothing about holders.
    fn free(reply: Reply) -> Answered {
        Answered::due(reply, ReplyPromise::Nothing)
    }
}

fn acquire(
    seat: &Seat,
    outbox: &mut Outbox<'_>,
    ask: &Ask<'_>,
    wait_timeout: Duration,
) -> Result<Answered, Ending> {
    let answer = if wait_timeout.is_zero() {
        seat.try_acquire(ask)
    } else {
        seat.acquire(ask)
    };
    let certainty = Certainty::Journaled;
    if let Ok(Answer::Queued(ticket)) = answer {
        return wait(seat, outbox, (ask.key, ticket), wait_timeout, certainty);
    }
    Ok(Answered::due(reply_to(answer)?, granted(answer, certainty)))
}

fn enqueue(seat: &Seat, ask: &Ask<'_>) -> Result<Answered, Ending> {
    let answer = seat.enqueue(ask);
    let reply = match answer {
        Ok(Answer::Granted(grant)) => Reply::Acquired(grant),
        answer => reply_to(answer)?,
    };
    Ok(Answered::due(reply, granted(answer, Certainty::Journaled)))
}

fn collect(
    seat: &Seat,
    outbox: &mut Outbox<'_>,
    (key, kind): (&str, Kind),
    wait_timeout: Duration,
) -> Result<Answered, Ending> {
    let answer = seat.collect(key, kind);
    // The lease of a grant begins anew, which is no change for the journal.
    let certainty = Certainty::JournaledByActive;
    if let Ok(Answer::Queued(ticket)) = answer {
        return wait(seat, outbox, (key, ticket), wait_timeout, certainty);
    }
    Ok(Answered::due(reply_to(answer)?, granted(answer, certainty)))
}

/// Waits for a queued claim. The replies to earlier requests are sent first, and the client is
/// watched for a hang-up from then on. A client that never waits is never watched.
fn wait(
    seat: &Seat,
    outbox: &mut Outbox<'_>,
    (key, ticket): (&str, Ticket),
    wait_timeout: Duration,
    certainty: Certainty,
) -> Result<Answered, Ending> {
    if !wait_timeout.is_zero() {
        outbox.prepare_to_wait()?;
    }
    let mut is_long = false;
    let waited = seat.wait(key, ticket, wait_timeout, &mut || {
        is_long = true;
        outbox.report_input(InputReports::Reported);
    });
    if is_long {
        outbox.report_input(InputReports::Ignored);
    }
    Ok(Answered {
        reply: reply_to(waited.answer)?,
        promise: granted(waited.answer, certainty),
        delivery: if waited.is_sent {
            Delivery::Sent
        } else {
            Delivery::DueAfterWait
        },
        cap: None,
    })
}

/// What the reply to a claim promises: nothing, unless the claim was granted.
fn granted(answer: Result<Answer, Refusal>, certainty: Certainty) -> ReplyPromise {
    match answer {
        Ok(Answer::Granted(Grant { token, .. })) => ReplyPromise::Grant(certainty, token.fence),
        Ok(Answer::GrantedBefore(grant)) => ReplyPromise::Holder(certainty, grant.token.fence),
        _ => ReplyPromise::Nothing,
    }
}

fn ask<'a>(seat: &Seat, wanted: Wanted<'a>, default_lease: Duration) -> Ask<'a> {
    let key = wanted.key;
    trace!("asked key={} conn={}", Escaped(key.as_bytes()), seat.id());
    Ask {
        key,
        terms: wanted.terms(),
        lease: wanted.lease.unwrap_or(default_lease),
        max_waiters: wanted.max_waiters,
    }
}

fn proof<'a>(key: &'a str, token: Token, held: Held<'_>) -> Proof<'a> {
    let numbers = held.numbers.map(|numbers| numbers.split(','));
    // A number that is too large for the type belongs to no slot.
    let number = |number: &str| number.parse().unwrap_or(u32::MAX);
    Proof {
        key,
        terms: held.terms,
        token,
        numbers: numbers.into_iter().flatten().map(number).collect(),
        age: held.age,
    }
}

fn break_grants(seat: &Seat, key: &str, fence: Option<Fence>) -> Answered {
    let reply = if seat.arbiter().break_grants(key, fence, seat.id()) {
        Reply::Ok
    } else {
        Reply::Refused(Refusal::NotHeld)
    };
    Answered::due(reply, ReplyPromise::All(Certainty::Journaled))
}

fn reply_to(answer: Result<Answer, Refusal>) -> Result<Reply, Ending> {
    Ok(match answer {
        Ok(Answer::Granted(grant) | Answer::GrantedBefore(grant)) => Reply::Granted(grant),
        Ok(Answer::Queued(_)) => Reply::Queued,
        Ok(Answer::WouldWait | Answer::TimedOut) => Reply::Timeout,
        Ok(Answer::Gone) => return Err(Ending::HungUpWaiting),
        Ok(Answer::Released) => Reply::Ok,
        Ok(Answer::Renewed(lease)) => Reply::Renewed(lease),
        Err(refusal) => Reply::Refused(refusal),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::latchd::arbiter::{Arbiter, Rules};
    use crate::latchd::auth::rights::Rights;
    use crate::latchd::fence::source::{ClockFences, Salts};
    use crate::latchd::line::connection::pieces;
    use crate::latchd::table::{Caps, ConnId};
    use crate::os::stream::{Socket, Stream};
    use crate::shared::net::hangup::HangupWatch;
    use crate::wire::request::parse;

    const DEFAULT_LEASE: Duration = Duration::from_secs(33);

    const OFFER: Offer = Offer {
        default_lease: DEFAULT_LEASE,
        max_lease: Duration::MAX,
        abilities: Abilities::ADOPT,
    };

    /// An arbiter on virtual time, and two connections.
    struct House {
        arbiter: Arc<Arbiter>,
        other: Client,
        client: Client,
    }

    impl House {
        fn new() -> House {
            let rules = Rules {
                caps: Caps {
                    max_locks: 16,
                    max_grants: 16,
                    max_per_connection: 16,
                    max_waiters: None,
                    max_waiters_total: 16,
                    max_kept: 16,
                    max_keep_time: DEFAULT_LEASE,
                    max_hold: Duration::MAX,
                },
                gc_interval: DEFAULT_LEASE,
                gc_max_idle: DEFAULT_LEASE,
            };
            let fences = Box::new(ClockFences::starting_at(1));
            let salts = Salts::new().expect("the kernel has randomness");
            let arbiter = Arc::new(Arbiter::new(&rules, fences, salts));
            let connect = |conn| {
                let (peer, ours) = UnixStream::pair().expect("a socket pair");
                Client {
                    seat: arbiter.connect(ConnId(conn), None),
                    context: pieces::context(None),
                    watch: HangupWatch::new().expect("an epoll instance"),
                    stream: Stream::new(Socket::Unix(ours)),
                    peer,
                }
            };
            House {
                other: connect(1),
                client: connect(2),
                arbiter,
            }
        }

        fn waiter_count(&self) -> usize {
            let (keys, _) = self.arbiter.snapshot(None, usize::MAX);
            keys.iter().map(|key| key.waiter_count).sum()
        }

        /// Has the other connection take the lock `k`.
        fn held(&self) -> Grant {
            match self.other.ask_for("l k 0") {
                Reply::Granted(grant) => grant,
                other => panic!("the lock should be free: {other:?}"),
            }
        }

        fn release(&self, grant: Grant) {
            let release = format!("r k {}", grant.token);
            assert_eq!(self.other.ask_for(&release), Reply::Ok);
        }
    }

    struct Client {
        seat: Seat,
        context: ServerContext,
        watch: HangupWatch,
        stream: Stream,
        peer: UnixStream,
    }

    impl Client {
        fn outbox(&self) -> Outbox<'_> {
            Outbox::new(&self.stream, &self.context, &self.watch, self.seat.id())
        }

        /// An outbox with a reply that has not been sent.
        fn outbox_with_reply(&self) -> Outbox<'_> {
            let mut outbox = self.outbox();
            let added = outbox.add(&Reply::Queued, ReplyPromise::Nothing);
            added.expect("there is room");
            outbox
        }

        /// Carries out a request of three words, with no reply unsent.
        fn ask_for(&self, request: &str) -> Reply {
            let answered = self.try_ask_for(request, &mut self.outbox());
            answered.expect("it is answered").reply
        }

        fn try_ask_for(&self, request: &str, outbox: &mut Outbox<'_>) -> Result<Answered, Ending> {
            let mut words = request.splitn(3, ' ');
            let mut word = || words.next().unwrap_or_default();
            let request = parse([word(), word(), word()]).expect("a request");
            let permitted = Rights::UNLIMITED.permit(&request, || false);
            let permitted = permitted.expect("it needs no operator");
            carry_out(&permitted, &self.seat, OFFER, outbox)
        }
    }

    #[test]
    fn a_request_that_need_not_block_sends_no_replies() {
        let house = House::new();
        let mut outbox = house.client.outbox_with_reply();
        let grant = house.held();
        let answers = [
            ("l k 0", Reply::Timeout),
            ("e k", Reply::Queued),
            ("e k", Reply::Refused(Refusal::AlreadyEnqueued)),
            ("w k 0", Reply::Timeout),
            ("w k 10", Reply::Refused(Refusal::NotEnqueued)),
            ("sl k 10 1", Reply::Refused(Refusal::LimitMismatch)),
            ("ping _", Reply::Ok),
        ];
        for (request, reply) in answers {
            let answered = house.client.try_ask_for(request, &mut outbox);
            assert_eq!(answered.expect("it is answered").reply, reply, "{request}");
        }
        house.release(grant);
        let answered = house.client.try_ask_for("l k 10", &mut outbox);
        let answered = answered.expect("it is answered");
        assert!(matches!(answered.reply, Reply::Granted(_)));
        assert_eq!(answered.delivery, Delivery::Due);
        assert_eq!(outbox.out, b"queued\n");
    }

    #[test]
    fn a_waiting_request_has_its_place_while_replies_are_sent() {
        for (first, request) in [(None, "l k 10"), (Some("e k"), "w k 10")] {
            let house = House::new();
            let grant = house.held();
            if let Some(first) = first {
                assert_eq!(house.client.ask_for(first), Reply::Queued);
            }
            let House {
                arbiter,
                other,
                client,
            } = house;
            let (mut outbox, mut peer) = (client.outbox_with_reply(), &client.peer);
            thread::scope(|scope| {
                scope.spawn(move || {
                    let mut reply = [0; 7];
                    peer.read_exact(&mut reply).expect("the reply is sent");
                    let (keys, _) = arbiter.snapshot(None, 1);
                    assert_eq!((&reply, keys[0].waiter_count), (b"queued\n", 1));
                    let release = format!("r k {}", grant.token);
                    assert_eq!(other.ask_for(&release), Reply::Ok);
                });
                let answered = client.try_ask_for(request, &mut outbox);
                let answered = answered.expect("it is answered");
                assert!(matches!(answered.reply, Reply::Granted(_)), "{request}");
                assert_eq!(answered.delivery, Delivery::DueAfterWait);
            });
        }
    }

    #[test]
    fn a_request_does_not_wait_if_replies_cannot_be_sent() {
        let House {
            arbiter,
            other,
            client,
        } = House::new();
        assert!(matches!(other.ask_for("l k 0"), Reply::Granted(_)));
        client
            .peer
            .shutdown(std::net::Shutdown::Both)
            .expect("a socket");
        let mut outbox = client.outbox_with_reply();
        let answered = client.try_ask_for("l k 10", &mut outbox);
        assert!(matches!(answered, Err(Ending::Broken(_))));
        drop(client);
        let (keys, _) = arbiter.snapshot(None, 1);
        assert_eq!(keys[0].waiter_count, 0);
    }

    #[test]
    fn a_peer_that_has_hung_up_gets_grants_but_no_wait() {
        let house = House::new();
        house.arbiter.hang_up(ConnId(2));
        assert!(matches!(
            house.client.ask_for("l free 10"),
            Reply::Granted(_)
        ));
        house.held();
        let answered = house
            .client
            .try_ask_for("l k 10", &mut house.client.outbox());
        assert!(matches!(answered, Err(Ending::HungUpWaiting)));
        assert_eq!(house.waiter_count(), 0);
    }

    #[test]
    fn a_lease_that_is_not_named_is_the_default() {
        let house = House::new();
        let grant = house.held();
        assert_eq!(grant.lease, DEFAULT_LEASE);
        let renew = format!("n k {}", grant.token);
        assert_eq!(house.client.ask_for(&renew), Reply::Renewed(DEFAULT_LEASE));
    }

    #[test]
    fn the_two_phases_answer_in_their_own_words() {
        let house = House::new();
        let Reply::Acquired(grant) = house.client.ask_for("e k") else {
            panic!("the lock should be free");
        };
        assert_eq!(house.client.ask_for("w k 10"), Reply::Granted(grant));
        assert_eq!(
            house.client.ask_for("w k 10"),
            Reply::Refused(Refusal::NotEnqueued)
        );
        house.arbiter.advance(DEFAULT_LEASE);
        assert!(matches!(house.client.ask_for("e k"), Reply::Acquired(_)));
        house.arbiter.advance(DEFAULT_LEASE);
        let expired = Reply::Refused(Refusal::LeaseExpired);
        assert_eq!(house.client.ask_for("w k 10"), expired);
        assert_eq!(
            house.client.ask_for("w k 10"),
            Reply::Refused(Refusal::NotEnqueued)
        );
    }
}
