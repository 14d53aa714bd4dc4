//! What the arbiter has the table count: the answers to requests.

use super::*;
use crate::latchd::table::{Cap, CountersSnapshot};

fn counted(arbiter: &Arbiter) -> CountersSnapshot {
    arbiter.counters().1
}

#[test]
fn a_try_in_vain_is_busy_and_a_wait_in_either_form_is_one_timeout() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    granted(&holder, FOREVER);
    assert_eq!(waiter.try_acquire(&lock(FOREVER)), Ok(Answer::WouldWait));
    assert_eq!(counted(&arbiter).counters.wait_timeouts, 0);
    let second = Duration::from_secs(1);
    let blocked = Blocked::start(&arbiter, waiter, move |seat| acquire(seat, second));
    assert_eq!(counted(&arbiter).waiter_count, 1);
    arbiter.advance(second);
    let (waiter, answer) = blocked.end();
    assert_eq!(answer, Ok(Answer::TimedOut));
    assert_eq!(counted(&arbiter).counters.wait_timeouts, 1);
    enqueue(&waiter);
    assert_eq!(wait(&waiter, Duration::ZERO), Ok(Answer::TimedOut));
    assert_eq!(counted(&arbiter).counters.wait_timeouts, 2);
    assert_eq!(counted(&arbiter).counters.busy, 1);
    assert_eq!(counted(&arbiter).counters.waits.count(), 0);
}

#[test]
fn each_refusal_is_counted_under_its_reason() {
    let (arbiter, holder, other) = arbiter_and_two();
    let grant = granted(&holder, FOREVER);
    let semaphore = slot_of(1);
    assert!(other.try_acquire(&semaphore).is_err());
    assert!(other.enqueue(&semaphore).is_err());
    assert_eq!(wait(&other, FOREVER), Err(Refusal::NotEnqueued));
    enqueue(&other);
    assert_eq!(other.enqueue(&lock(FOREVER)), Err(Refusal::AlreadyEnqueued));
    let (key, kind, token) = ("other", Kind::Lock, grant.token);
    assert!(other.release(key, kind, token, None).is_err());
    assert!(other.renew(key, kind, token, FOREVER).is_err());
    let _drained = arbiter.begin_drain(DrainUntil::NoHolder);
    assert_eq!(acquire(&other, FOREVER), DRAINING);
    assert_eq!(other.collect("k", Kind::Lock), DRAINING);
    let counters = counted(&arbiter).counters;
    let counts = Refusal::ALL.map(|(refusal, _)| (refusal, counters.refusals(refusal)));
    let counts: Vec<_> = counts.into_iter().filter(|(_, count)| *count > 0).collect();
    let expected = [
        (Refusal::LimitMismatch, 2),
        (Refusal::NotHeld, 2),
        (Refusal::Draining, 2),
        (Refusal::AlreadyEnqueued, 1),
        (Refusal::NotEnqueued, 1),
    ];
    assert_eq!(counts, expected);
}

#[test]
fn a_closed_connection_is_a_disconnect_with_what_it_held() {
    let (arbiter, holder, other) = arbiter_and_two();
    granted(&holder, FOREVER);
    assert_eq!((arbiter.counters().0, arbiter.seat_count()), (2, 2));
    holder.leave(AtClose::Release);
    assert_eq!(arbiter.seat_count(), 1);
    drop(other);
    let (connection_count, seen) = arbiter.counters();
    assert_eq!((connection_count, seen.counters.disconnects), (0, 2));
    assert_eq!((seen.counters.abandonments, seen.holder_count), (1, 0));
}

#[test]
fn a_holder_is_bound_until_it_says_that_it_can_adopt() {
    let (arbiter, holder, _other) = arbiter_and_two();
    assert_eq!(arbiter.unadoptable_holder_count(), 0);
    granted(&holder, FOREVER);
    assert_eq!(arbiter.unadoptable_holder_count(), 1);
    holder.set_abilities(ADOPTS);
    assert_eq!(arbiter.unadoptable_holder_count(), 0);
}

#[test]
fn every_bound_holder_is_counted_however_many_connections_there_are() {
    let arbiter = arbiter();
    for count in [1000, 1001, 2500] {
        let seats = (1..=count).map(|conn| arbiter.connect(ConnId(conn), None));
        let seats: Vec<Seat> = seats.collect();
        for seat in &seats {
            let slot = seat.try_acquire(&slot_of(5000));
            assert!(matches!(slot, Ok(Answer::Granted(_))), "{slot:?}");
        }
        assert_eq!(arbiter.unadoptable_holder_count(), seats.len());
    }
}

#[test]
fn each_seat_names_the_cap_that_it_reached() {
    let arbiter = unreaped_with(Caps {
        max_per_connection: 1,
        max_waiters: Some(0),
        ..CAPS
    });
    let [holder, other] = [1, 2].map(|conn| arbiter.connect(ConnId(conn), None));
    granted(&holder, FOREVER);
    let second = Ask::plain("l", Kind::Lock, Limit::ONE, FOREVER);
    assert_eq!(holder.acquire(&second), Err(Refusal::MaxLocks));
    assert_eq!(acquire(&other, FOREVER), Err(Refusal::MaxWaiters));
    let caps = [&holder, &other].map(|seat| seat.cap_reached.take());
    assert_eq!(caps, [Some(Cap::PerConnection), Some(Cap::Waiters)]);
}
