//! Carries out the requests of one connection through its seat at the arbiter.

use std::time::Duration;

use log::trace;

use super::connection::Ending;
use crate::arbiter::{Certainty, Seat, WaitEvent};
use crate::protocol::abilities::Abilities;
use crate::protocol::reply::Reply;
use crate::protocol::request::{ProtocolError, Request, Wanted};
use crate::table::{Answer, Ask, Refusal};
use crate::text::Escaped;
use crate::token::Fence;

/// The client's end of the connection, for requests that may block.
pub(super) trait ClientEnd {
    /// Whether a request may block: all replies to earlier requests have been sent, and the client
    /// is watched for a hang-up.
    fn is_ready_to_wait(&self) -> bool;

    /// Sends the unsent replies, and starts to watch the client for a hang-up.
    fn prepare_to_wait(&mut self) -> Result<(), Ending>;

    /// Whether the client may act as an operator, with this admin token or without one.
    fn is_operator(&self, admin_token: Option<&str>) -> bool;

    /// Notes an event during the wait of a request. Must not block.
    fn note(&mut self, event: WaitEvent);
}

/// The leases and abilities that a server offers its clients.
#[derive(Clone, Copy)]
pub struct Offer {
    /// The lease of a claim or a renewal that does not name a lease.
    pub default_lease: Duration,
    /// The maximum lease of a claim. No grant may be held for longer.
    pub max_lease: Duration,
    /// What the server can do, for the answer to `hello`.
    pub abilities: Abilities,
}

impl Offer {
    /// Refuses a claim whose lease is longer than a grant may be held.
    pub(super) fn check<'a>(&self, request: Request<'a>) -> Result<Request<'a>, ProtocolError> {
        let lease = match request {
            Request::Acquire(wanted, _) | Request::Enqueue(wanted) => wanted.lease,
            _ => None,
        };
        match lease.is_some_and(|lease| lease > self.max_lease) {
            true => Err(ProtocolError::BadLease),
            false => Ok(request),
        }
    }
}

/// Carries out a request. This is the only place where a session waits for another client.
pub(super) fn carry_out(
    request: &Request<'_>,
    seat: &Seat,
    offer: Offer,
    peer: &mut impl ClientEnd,
) -> Result<Reply, Ending> {
    let default_lease = offer.default_lease;
    let lease_or_default = |lease: Option<Duration>| lease.unwrap_or(default_lease);
    let answer = match *request {
        Request::Acquire(wanted, wait_timeout) => {
            let ask = ask(seat, wanted, default_lease);
            if must_prepare(wait_timeout, peer) {
                match seat.try_acquire(&ask) {
                    Ok(Answer::WouldWait) => peer.prepare_to_wait()?,
                    answer => return reply_to(answer),
                }
            }
            seat.acquire(&ask, wait_timeout, &mut |event| peer.note(event))
        }
        Request::Enqueue(wanted) => match seat.enqueue(&ask(seat, wanted, default_lease)) {
            Ok(Answer::Granted(grant)) => return Ok(Reply::Acquired(grant)),
            answer => answer,
        },
        Request::Wait {
            key,
            kind,
            wait_timeout,
        } => {
            if must_prepare(wait_timeout, peer) {
                match seat.try_wait(key, kind) {
                    Ok(Answer::WouldWait) => peer.prepare_to_wait()?,
                    answer => return reply_to(answer),
                }
            }
            seat.wait(key, kind, wait_timeout, &mut |event| peer.note(event))
        }
        Request::Release { key, kind, token } => seat.release(key, kind, token),
        Request::Renew {
            key,
            kind,
            token,
            lease,
        } => seat.renew(key, kind, token, lease_or_default(lease)),
        Request::Adopt { key, token, lease } => {
            match seat.adopt(key, token, lease_or_default(lease)) {
                Ok(Answer::Gone) => return Err(Ending::HungUpAdopting),
                answer => answer,
            }
        }
        Request::Keep { key, token, lease } => seat.keep(key, token, lease_or_default(lease)),
        Request::Break {
            key,
            fence,
            admin_token,
        } => return break_grants(seat, peer, key, fence.map(Fence), admin_token),
        Request::Hello(client) => {
            seat.set_can_adopt(client.adopt);
            return Ok(Reply::Hello(offer.abilities));
        }
        Request::Tag(text) => {
            seat.set_tag(text);
            return Ok(Reply::Ok);
        }
        Request::Ping => return Ok(Reply::Ok),
        // The session answers these requests before they get here, except `auth`, which is an error
        // after the opening.
        Request::Auth(_)
        | Request::StableRef
        | Request::Stats
        | Request::Queues(_)
        | Request::Holder { .. }
        | Request::Counters => return Ok(Reply::Error),
    };
    reply_to(answer)
}

/// How certain the reply to a request must be, and the fence of the holder that the reply is about;
/// `None` means all holders.
pub(super) fn certainty_of(request: &Request<'_>, reply: &Reply) -> (Certainty, Option<Fence>) {
    match (request, reply) {
        (
            Request::Renew { token, .. }
            | Request::Adopt { token, .. }
            | Request::Keep { token, .. },
            _,
        ) => (Certainty::JournaledByActive, Some(token.fence)),
        (Request::Wait { .. }, Reply::Granted(grant)) => {
            (Certainty::JournaledByActive, Some(grant.token.fence))
        }
        (_, Reply::Granted(grant) | Reply::Acquired(grant)) => {
            (Certainty::Journaled, Some(grant.token.fence))
        }
        (Request::Release { token, .. }, _) => (Certainty::Journaled, Some(token.fence)),
        (Request::Break { .. }, _) => (Certainty::Journaled, None),
        // Other replies promise nothing. For statistics, the session itself notes what they
        // promise.
        _ => (Certainty::None, None),
    }
}

fn ask<'a>(seat: &Seat, wanted: Wanted<'a>, default_lease: Duration) -> Ask<'a> {
    let key = wanted.key;
    trace!("asked key={} conn={}", Escaped(key.as_bytes()), seat.id());
    let lease = wanted.lease.unwrap_or(default_lease);
    let plain = Ask::plain(key, wanted.kind, wanted.limit, lease);
    Ask {
        weight: wanted.weight.unwrap_or(plain.weight),
        max_waiters: wanted.max_waiters,
        ..plain
    }
}

fn break_grants(
    seat: &Seat,
    peer: &impl ClientEnd,
    key: &str,
    fence: Option<Fence>,
    admin_token: Option<&str>,
) -> Result<Reply, Ending> {
    if !peer.is_operator(admin_token) {
        return match admin_token {
            None => Ok(Reply::AuthFailed),
            // The connection ends, so that a client cannot guess the token over and over.
            Some(_) => Err(Ending::AuthFailed),
        };
    }
    Ok(match seat.arbiter().break_grants(key, fence, seat.id()) {
        true => Reply::Ok,
        false => Reply::Refused(Refusal::NotHeld),
    })
}

/// Whether a request that may block must first be tried without blocking. A request may block only
/// after the replies to earlier requests have been sent: a client that does not read its replies
/// must not hold a place in a queue, and a client that reads them needs them now. This also means
/// that a client that never waits is never watched.
fn must_prepare(wait_timeout: Duration, peer: &impl ClientEnd) -> bool {
    !wait_timeout.is_zero() && !peer.is_ready_to_wait()
}

fn reply_to(answer: Result<Answer, Refusal>) -> Result<Reply, Ending> {
    Ok(match answer {
        Ok(Answer::Granted(grant)) => Reply::Granted(grant),
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
    use std::io;
    use std::sync::Arc;

    use super::*;
    use crate::arbiter::{Arbiter, Rules};
    use crate::fence::source::{ClockFences, Salts};
    use crate::protocol::request::parse;
    use crate::table::{Caps, ConnId, Grant, Holdings};

    const DEFAULT_LEASE: Duration = Duration::from_secs(33);

    const OFFER: Offer = Offer {
        default_lease: DEFAULT_LEASE,
        max_lease: Duration::MAX,
        abilities: Abilities {
            adopt: true,
            slots: false,
            keeps: false,
            lingers: false,
        },
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
                    max_slots: 16,
                    max_per_connection: 16,
                    max_waiters: None,
                    max_waiters_total: 16,
                    max_kept: 16,
                    max_keep_time: DEFAULT_LEASE,
                    max_hold: Duration::MAX,
                },
                holdings: Holdings::Release,
                gc_interval: DEFAULT_LEASE,
                gc_max_idle: DEFAULT_LEASE,
            };
            let fences = Box::new(ClockFences::starting_at(1));
            let salts = Salts::new().expect("the kernel has randomness");
            let arbiter = Arc::new(Arbiter::new(&rules, fences, salts));
            let connect = |conn| Client(arbiter.connect(ConnId(conn), None));
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

    struct Client(Seat);

    impl Client {
        /// Carries out a request of three words, with no reply unsent.
        fn ask_for(&self, request: &str) -> Reply {
            self.try_ask_for(request, &mut quiet())
                .expect("it is answered")
        }

        fn try_ask_for(&self, request: &str, peer: &mut impl ClientEnd) -> Result<Reply, Ending> {
            let mut words = request.splitn(3, ' ').map(str::as_bytes);
            let mut word = || words.next().unwrap_or_default();
            let request = parse([word(), word(), word()]).expect("a request");
            carry_out(&request, &self.0, OFFER, peer)
        }
    }

    /// A peer with or without unsent replies, and what happens while they are sent.
    struct Script<F> {
        has_unsent: bool,
        on_flush: F,
        flush_count: u32,
        events: Vec<WaitEvent>,
    }

    fn script<F: FnMut() -> Result<(), Ending>>(has_unsent: bool, on_flush: F) -> Script<F> {
        Script {
            has_unsent,
            on_flush,
            flush_count: 0,
            events: Vec::new(),
        }
    }

    fn quiet() -> Script<fn() -> Result<(), Ending>> {
        script(false, || Ok(()))
    }

    fn behind_replies() -> Script<fn() -> Result<(), Ending>> {
        script(true, || Ok(()))
    }

    impl<F: FnMut() -> Result<(), Ending>> ClientEnd for Script<F> {
        fn is_ready_to_wait(&self) -> bool {
            !self.has_unsent
        }

        fn prepare_to_wait(&mut self) -> Result<(), Ending> {
            self.flush_count += 1;
            self.has_unsent = false;
            (self.on_flush)()
        }

        fn is_operator(&self, admin_token: Option<&str>) -> bool {
            admin_token == Some("admin")
        }

        fn note(&mut self, event: WaitEvent) {
            self.events.push(event);
        }
    }

    #[test]
    fn a_request_that_need_not_block_sends_no_replies() {
        let house = House::new();
        let mut peer = behind_replies();
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
            let answer = house.client.try_ask_for(request, &mut peer);
            assert_eq!(answer.expect("it is answered"), reply, "{request}");
        }
        house.release(grant);
        let answer = house.client.try_ask_for("l k 10", &mut peer);
        assert!(matches!(answer, Ok(Reply::Granted(_))));
        assert_eq!((peer.flush_count, peer.events.len()), (0, 0));
    }

    #[test]
    fn a_request_holds_no_place_while_replies_are_sent() {
        let house = House::new();
        let grant = house.held();
        let mut peer = script(true, || {
            assert_eq!(house.waiter_count(), 0);
            house.release(grant);
            Ok(())
        });
        let answer = house.client.try_ask_for("l k 10", &mut peer);
        assert!(matches!(answer, Ok(Reply::Granted(_))), "{answer:?}");
        assert_eq!((peer.flush_count, peer.events.len()), (1, 0));
    }

    #[test]
    fn an_enqueued_key_keeps_its_place_while_replies_are_sent() {
        let house = House::new();
        let grant = house.held();
        assert_eq!(house.client.ask_for("e k"), Reply::Queued);
        let mut peer = script(true, || {
            assert_eq!(house.waiter_count(), 1);
            house.release(grant);
            Ok(())
        });
        let answer = house.client.try_ask_for("w k 10", &mut peer);
        assert!(matches!(answer, Ok(Reply::Granted(_))), "{answer:?}");
        assert_eq!(peer.flush_count, 1);
    }

    #[test]
    fn a_request_does_not_wait_if_replies_cannot_be_sent() {
        let house = House::new();
        house.held();
        let broken = || Err(Ending::Broken(io::ErrorKind::TimedOut.into()));
        let mut peer = script(true, broken);
        let answer = house.client.try_ask_for("l k 10", &mut peer);
        assert!(matches!(answer, Err(Ending::Broken(_))));
        assert_eq!(house.waiter_count(), 0);
        assert!(peer.events.is_empty());
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
        let mut peer = quiet();
        let answer = house.client.try_ask_for("l k 10", &mut peer);
        assert!(matches!(answer, Err(Ending::HungUpWaiting)));
        assert_eq!(peer.events, [WaitEvent::Queued]);
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
