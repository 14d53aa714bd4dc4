//! Claims of several slots, shared locks and the numbers of slots, on a virtual clock.

use super::*;

fn shared(key: &str) -> Ask<'_> {
    lock_of(key).with_weight(1)
}

/// A claim of so many slots of the semaphore `k`, with a lease of ten seconds.
fn heavy(count: u32, limit: u32) -> Ask<'static> {
    let limit = Limit::new(limit).expect("above zero");
    Ask::plain("k", Kind::Semaphore, limit, secs(10)).with_weight(count)
}

impl World {
    fn release_slots(&mut self, token: Token) {
        let kind = Kind::Semaphore;
        let released = self
            .table
            .release(ELSEWHERE, "k", kind, token, None, self.now);
        assert_eq!(released, Ok(Answer::Released));
        self.check();
    }

    /// The numbers that the slots of `conn` have once it has asked for them.
    fn numbers(&mut self, conn: u64, token: Token) -> Vec<u32> {
        self.table.number_slots(ConnId(conn), "k", token.fence);
        self.check();
        let queue = self.table.holder("k", token.fence, self.now);
        queue.expect("it is held").holders[0].numbers.to_vec()
    }
}

#[test]
fn nobody_overtakes_a_heavy_claim_that_does_not_fit_yet() {
    let mut world = World::new();
    let first = granted(world.claim(1, &heavy(6, 8)));
    let second = granted(world.claim(2, &heavy(1, 8)));
    let big = ticket(world.claim(3, &heavy(8, 8)));
    let small = ticket(world.claim(4, &heavy(1, 8)));
    let tried = world
        .table
        .try_acquire(claimant(5), &heavy(1, 8), world.now);
    assert_eq!(tried, Ok(Answer::WouldWait));
    world.release_slots(first);
    assert_eq!(world.collect(big), Ok(Answer::WouldWait));
    assert_eq!(world.collect(small), Ok(Answer::WouldWait));
    world.release_slots(second);
    let big = world.collected(big);
    assert_eq!(world.collect(small), Ok(Answer::WouldWait));
    world.release_slots(big);
    world.collected(small);
}

#[test]
fn grants_count_once_against_the_caps_whatever_their_weight() {
    let mut world = World::with_caps(Caps {
        max_grants: 2,
        max_per_connection: 2,
        ..NO_CAPS
    });
    granted(world.claim(1, &heavy(500, 1000)));
    granted(world.claim(1, &heavy(500, 1000)));
    assert_eq!(world.table.connection_count(ConnId(1)), 2);
    assert_eq!(world.table.entry_count(), 2);
    assert_eq!(world.lock(1, "other"), Err(Refusal::MaxLocks));
}

#[test]
fn a_waiter_takes_its_holders_room_above_a_lowered_cap() {
    let mut world = World::with_caps(Caps {
        max_grants: 1,
        ..NO_CAPS
    });
    let record = |key, fence| HolderRecord::new(key, Terms::LOCK, token(fence), secs(10));
    assert!(world.table.restore(&record("a", 1), world.now));
    assert!(world.table.restore(&record("b", 2), world.now));
    let claim = world.table.acquire(claimant(1), &lock_of("a"), world.now);
    let waiter = ticket(claim);
    let released = world
        .table
        .release(ELSEWHERE, "a", Kind::Lock, token(1), None, world.now);
    assert_eq!(released, Ok(Answer::Released));
    let answer = world.table.collect(waiter, world.now);
    assert!(matches!(answer, Ok(Answer::Granted(_))), "{answer:?}");
}

/// A whole lock with twice as many shared ones behind it as are granted in a step, and one more.
fn crowded() -> (World, usize) {
    let mut world = World::new();
    let writer = world.held(1, "k");
    let count = 2 * STEP + 1;
    for conn in 2..2 + count as u64 {
        let claim = world.table.acquire(claimant(conn), &shared("k"), world.now);
        ticket(claim);
    }
    let released = world
        .table
        .release(ELSEWHERE, "k", Kind::Lock, writer, None, world.now);
    assert_eq!(released, Ok(Answer::Released));
    (world, count)
}

#[test]
fn the_turn_of_many_waiters_comes_in_steps() {
    let (mut world, count) = crowded();
    assert_eq!(world.resolved().len(), STEP);
    assert!(world.table.has_due(Scope::Nothing, world.now));
    world.table.expire_some(1, world.now);
    assert_eq!(world.resolved().len(), STEP);
    world.table.expire_some(1, world.now);
    assert_eq!(world.resolved(), [1 + count as u64]);
    assert!(!world.table.must_go_on_granting());
    world.check();
}

#[test]
fn no_operation_comes_before_the_waiters_whose_turn_it_is() {
    let (mut world, count) = crowded();
    let (table, now) = world.visit(Scope::Nothing);
    let free = table.try_acquire(claimant(9999), &lock_of("free"), now);
    assert!(matches!(free, Ok(Answer::Granted(_))), "{free:?}");
    assert_eq!(world.resolved().len(), count);
    let (mut world, count) = crowded();
    world.disconnect(9999, AtClose::Release);
    world.disconnect(2, AtClose::Release);
    assert_eq!(world.resolved().len(), count);
}

#[test]
fn the_numbers_of_heavy_grants_are_bounded() {
    use crate::latchd::table::numbers::MAX_NUMBERS;
    let mut world = World::with_caps(Caps {
        max_grants: 200,
        ..NO_CAPS
    });
    let too_heavy = granted(world.claim(1, &heavy(MAX_NUMBERS + 1, 1000)));
    assert!(world.numbers(1, too_heavy).is_empty());
    let heavy_enough = granted(world.claim(2, &heavy(MAX_NUMBERS, 1000)));
    assert_eq!(world.numbers(2, heavy_enough).len(), MAX_NUMBERS as usize);
    let next = granted(world.claim(3, &heavy(100, 1000)));
    assert!(world.numbers(3, next).is_empty());
    // A grant of one slot always has one.
    let one = granted(world.claim(4, &heavy(1, 1000)));
    assert_eq!(world.numbers(4, one), [MAX_NUMBERS]);
    world.release_slots(heavy_enough);
    assert_eq!(world.numbers(3, next).len(), 100);
}

#[test]
fn weight_and_numbers_are_handed_over() {
    let mut world = World::new();
    let one = granted(world.claim(1, &heavy(1, 8)));
    let three = granted(world.claim(2, &heavy(3, 8)));
    granted(world.claim(3, &shared("lock")));
    assert_eq!(world.numbers(1, one), [0]);
    assert_eq!(world.numbers(2, three), [1, 2, 3]);
    let handed_over = |world: &mut World| -> Vec<HolderRecord> {
        let (_, holders) = world.table.hand_over(world.now);
        holders.into_iter().map(|(_, record)| record).collect()
    };
    let records = handed_over(&mut world);
    let mut next = World::new();
    for record in &records {
        assert!(record.is_possible() && next.table.restore(record, next.now));
        next.check();
    }
    assert_eq!(handed_over(&mut next), records);
    let mut taken = |key| next.table.queue(key, 0, next.now).map(|queue| queue.taken);
    assert_eq!((taken("k"), taken("lock")), (Some(4), Some(1)));
}

#[test]
fn two_records_with_one_number_contradict_each_other() {
    let mut world = World::new();
    let record = |fence, numbers: &[u32]| HolderRecord {
        terms: heavy(numbers.len() as u32, 6).terms,
        numbers: numbers.into(),
        ..HolderRecord::new("k", Terms::LOCK, token(fence), secs(10))
    };
    assert!(world.table.restore(&record(1, &[2]), world.now));
    assert!(!world.table.restore(&record(2, &[0, 2]), world.now));
    assert!(world.table.restore(&record(3, &[0, 3]), world.now));
    world.check();
}
