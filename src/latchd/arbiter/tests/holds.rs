//! For how long one visit keeps the mutex when much happens at once. Measured by the processor time
//! of this thread, which other programs do not disturb; a build for tests is several times slower
//! than one for users.

use std::collections::HashMap;
use std::ops::ControlFlow;

use rustix::time::{clock_gettime, ClockId};

use super::*;
use crate::latchd::table::Claimant;
use crate::wire::token::Salt;

/// Ten times what is expected of a visit, where [`work`] takes as long as [`WORK`].
const LONGEST_VISIT: Duration = Duration::from_millis(50);

/// The processor time of [`work`] where the expected length of a visit was measured.
const WORK: Duration = Duration::from_millis(14);

/// How many leases end, or slots come free, in one instant.
const MANY: usize = 100_000;

/// A page of statistics, in keys.
const PAGE_LEN: usize = 128;

const HOLDER: ConnId = ConnId(1);
const WAITER: ConnId = ConnId(2);

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("time has passed")
}

/// Something that has nothing to do with the table, and shows how fast this machine is.
fn work() -> Duration {
    let began = processor_time();
    let numbers = (0..20_000).map(|number: u32| (number.to_string(), number));
    let mut map: HashMap<String, u32> = numbers.collect();
    for number in 0..20_000 {
        assert_eq!(map.remove(&number.to_string()), Some(number));
    }
    processor_time() - began
}

/// The longest of the visits until one says that all is done.
fn longest_visit(what: &str, mut visit: impl FnMut() -> ControlFlow<()>) {
    let (mut longest, mut is_over) = (Duration::ZERO, false);
    while !is_over {
        let began = processor_time();
        is_over = visit().is_break();
        longest = longest.max(processor_time() - began);
    }
    let slowness = (work().as_secs_f64() / WORK.as_secs_f64()).max(1.0);
    println!("{what}: {longest:?}, on a machine slower by {slowness:.1}");
    assert!(
        longest <= LONGEST_VISIT.mul_f64(slowness),
        "{what}: {longest:?}"
    );
}

fn until_done(is_done: bool) -> ControlFlow<()> {
    if is_done {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

fn table() -> LockTable {
    let caps = Caps {
        max_locks: usize::MAX,
        max_waiters_total: usize::MAX,
        ..CAPS
    };
    LockTable::new(caps, Box::new(ClockFences::starting_at(1)))
}

/// Enqueues for so many locks: the first connection holds them, the next ones wait.
fn enqueue(table: &mut LockTable, conn: ConnId, count: usize, now: Instant) {
    (0..count).for_each(|number| enqueue_for(table, conn, number, now));
}

fn enqueue_for(table: &mut LockTable, conn: ConnId, number: usize, now: Instant) {
    let key = number.to_string();
    let ask = Ask {
        key: &key,
        ..lock(FOREVER)
    };
    let claimant = Claimant {
        conn,
        salt: Salt(0),
        can_adopt: false,
    };
    let enqueued = table.enqueue(claimant, &ask, now);
    assert!(enqueued.is_ok());
}

fn disconnect(what: &str, table: &mut LockTable, conn: ConnId, now: Instant) {
    table.disconnect(conn, AtClose::Release, None);
    longest_visit(what, || until_done(table.release_some(conn, STEP, now)));
}

#[test]
fn statistics_of_many_keys_are_taken_in_short_visits() {
    let (mut table, now) = (table(), Instant::now());
    enqueue(&mut table, HOLDER, 10_000, now);
    enqueue(&mut table, WAITER, 10_000, now);
    let mut listing = None;
    longest_visit("a page of statistics", || {
        listing = table.snapshot(listing.take(), PAGE_LEN, now).1;
        until_done(listing.is_none())
    });
    longest_visit("a page of holders", || {
        listing = table.queues(listing.take(), 16, now).1;
        until_done(listing.is_none())
    });
}

#[test]
fn keys_that_come_one_by_one_come_in_short_visits() {
    let (mut table, now) = (table(), Instant::now());
    for conn in [HOLDER, WAITER] {
        let mut number = 0;
        longest_visit("a claim", || {
            enqueue_for(&mut table, conn, number, now);
            number += 1;
            until_done(number == MANY)
        });
    }
}

#[test]
fn leases_that_end_together_end_in_short_visits() {
    let (mut table, now) = (table(), Instant::now());
    enqueue(&mut table, HOLDER, MANY, now);
    enqueue(&mut table, WAITER, MANY, now);
    let later = now + FOREVER;
    longest_visit("the end of leases", || {
        until_done(table.catch_up(Scope::Everything, STEP, later))
    });
}

#[test]
fn a_disconnect_frees_many_slots_in_short_visits() {
    let (mut table, now) = (table(), Instant::now());
    enqueue(&mut table, HOLDER, MANY, now);
    enqueue(&mut table, WAITER, MANY, now);
    disconnect("slots", &mut table, HOLDER, now);
    disconnect("grants not collected", &mut table, WAITER, now);
    assert!(!table.has_holders());
}

#[test]
fn a_disconnect_gives_up_many_places_in_short_visits() {
    let (mut table, now) = (table(), Instant::now());
    enqueue(&mut table, HOLDER, MANY, now);
    enqueue(&mut table, WAITER, MANY, now);
    disconnect("places", &mut table, WAITER, now);
    assert_eq!(table.entry_count(), MANY);
}

#[test]
fn the_reaper_drops_more_idle_keys_than_one_visit_may() {
    let arbiter = arbiter();
    let seat = arbiter.connect(ConnId(1), None);
    for number in 0..2 * STEP {
        let key = number.to_string();
        let ask = Ask {
            key: &key,
            ..lock(FOREVER)
        };
        assert!(matches!(seat.try_acquire(&ask), Ok(Answer::Granted(_))));
    }
    seat.leave(AtClose::Release);
    arbiter.advance(Duration::from_secs(2));
    until("keys are left", || arbiter.snapshot(None, 1).0.is_empty());
}

#[test]
fn keys_that_became_idle_together_go_in_short_visits() {
    let (mut table, now) = (table(), Instant::now());
    enqueue(&mut table, HOLDER, MANY, now);
    disconnect("slots", &mut table, HOLDER, now);
    assert!(table.idle_since().is_some());
    longest_visit("idle keys", || {
        until_done(table.prune(Duration::ZERO, STEP, now))
    });
}
