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
        self.numbers_of(conn, "k", token)
    }

    fn numbers_of(&mut self, conn: u64, key: &str, token: Token) -> Vec<u32> {
        self.table.number_slots(ConnId(conn), key, token.fence);
        self.check();
        let queue = self.table.holder(key, token.fence, self.now);
        queue.expect("it is held").holders[0].numbers.to_vec()
    }
}

#[test]
fn shared_locks_hold_together_and_exclude_whole_ones() {
    let mut world = World::new();
    let readers = [1, 2, 3].map(|conn| granted(world.claim(conn, &shared("k"))));
    let writer = world.queued(4, "k");
    for reader in readers {
        assert_eq!(world.collect(writer), Ok(Answer::WouldWait));
        assert_eq!(world.release("k", reader), Ok(()));
    }
    let writer = world.collected(writer);
    let reader = ticket(world.claim(5, &shared("k")));
    assert_eq!(world.release("k", writer), Ok(()));
    world.collected(reader);
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
fn a_heavy_claim_that_leaves_makes_way_for_all_that_fit() {
    for leave in [World::cancel, |world: &mut World, _| {
        world.disconnect(3, AtClose::Release);
    }] {
        let mut world = World::new();
        granted(world.claim(1, &heavy(5, 8)));
        let big = ticket(world.claim(3, &heavy(4, 8)));
        let others = [4, 5, 6, 7].map(|conn| ticket(world.claim(conn, &heavy(1, 8))));
        leave(&mut world, big);
        assert_eq!(world.resolved(), [4, 5, 6]);
        assert_eq!(world.collect(others[3]), Ok(Answer::WouldWait));
    }
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
fn at_the_cap_on_slots_the_waiters_that_fit_take_turns() {
    let mut world = World::with_caps(Caps {
        max_grants: 2,
        ..NO_CAPS
    });
    let elsewhere = world.held(8, "elsewhere");
    let writer = world.held(1, "k");
    let readers = [2, 3, 4].map(|conn| ticket(world.claim(conn, &shared("k"))));
    assert_eq!(world.release("k", writer), Ok(()));
    // One reader takes the writer's room. The others fit, and there is no room for them.
    let first = world.collected(readers[0]);
    assert_eq!(world.collect(readers[1]), Ok(Answer::WouldWait));
    assert!(!world.table.lacks_fence(readers[1].place));
    assert_eq!(world.lock(9, "free"), Err(Refusal::MaxLocks));
    assert_eq!(world.release("elsewhere", elsewhere), Ok(()));
    world.collected(readers[1]);
    assert_eq!(world.collect(readers[2]), Ok(Answer::WouldWait));
    assert_eq!(world.release("k", first), Ok(()));
    world.collected(readers[2]);
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
fn a_claim_joins_only_a_queue_that_is_short_enough() {
    let mut world = World::new();
    world.held(1, "k");
    let ask = |max| Ask {
        max_waiters: Some(max),
        ..lock_of("k")
    };
    assert_eq!(world.claim(2, &ask(0)), Err(Refusal::MaxWaiters));
    ticket(world.claim(2, &ask(1)));
    assert_eq!(world.claim(3, &ask(1)), Err(Refusal::MaxWaiters));
    ticket(world.claim(3, &ask(2)));
    // It is the claim's own wish: no option of the server is to be named for it.
    assert_eq!(world.table.take_cap_reached(), None);
}

#[test]
fn a_slot_has_the_lowest_number_that_is_free() {
    let mut world = World::new();
    let next = |world: &mut World, conn| {
        let slot = granted(world.claim(conn, &heavy(1, 7)));
        (slot, world.numbers(conn, slot)[0])
    };
    let slots = [1, 2, 3, 4, 5, 6, 7].map(|conn| next(&mut world, conn));
    assert_eq!(slots.map(|(_, number)| number), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(world.numbers(2, slots[1].0), [1]);
    for number in [3, 1, 5, 2] {
        world.release_slots(slots[number].0);
    }
    let numbers = [8, 9, 10, 11].map(|conn| next(&mut world, conn).1);
    assert_eq!(numbers, [1, 2, 3, 5]);
}

#[test]
fn several_slots_have_the_lowest_numbers_that_are_free() {
    let mut world = World::new();
    let slots = [1, 2, 3, 4].map(|conn| {
        let slot = granted(world.claim(conn, &heavy(1, 8)));
        world.numbers(conn, slot);
        slot
    });
    world.release_slots(slots[0]);
    world.release_slots(slots[2]);
    let three = granted(world.claim(5, &heavy(3, 8)));
    assert_eq!(world.numbers(5, three), [0, 2, 4]);
    let rest = granted(world.claim(6, &heavy(3, 8)));
    assert_eq!(world.numbers(6, rest), [5, 6, 7]);
    world.release_slots(three);
    let next = granted(world.claim(7, &heavy(2, 8)));
    assert_eq!(world.numbers(7, next), [0, 2]);
}

#[test]
fn only_the_holder_of_a_semaphore_gets_numbers() {
    let mut world = World::new();
    let slot = granted(world.claim(1, &heavy(1, 3)));
    assert!(world.numbers(9, slot).is_empty());
    let lock = world.held(1, "lock");
    assert!(world.numbers_of(1, "lock", lock).is_empty());
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

#[test]
fn no_lease_ends_later_than_a_grant_may_be_held() {
    let mut world = World::with_caps(Caps {
        max_hold: secs(15),
        ..NO_CAPS
    });
    let token = world.held(1, "k");
    world.advance(secs(5));
    let renewed = |lease| Ok(Answer::Renewed(secs(lease)));
    assert_eq!(world.renewed("k", token, 9), renewed(9));
    assert_eq!(world.renewed("k", token, 11), renewed(10));
    // Each renewal gets the whole seconds that are left, and none ends the lease sooner.
    world.advance(Duration::from_millis(2_500));
    assert_eq!(world.renewed("k", token, 10), renewed(7));
    world.advance(Duration::from_millis(6_700));
    assert_eq!(world.renewed("k", token, 10), Err(Refusal::NotHeld));
    world.advance(Duration::from_millis(799));
    assert!(world.is_held("k", token));
    world.advance(Duration::from_millis(1));
    assert!(!world.is_held("k", token));
}

#[test]
fn a_grant_is_kept_for_the_whole_time_or_not_at_all() {
    let mut world = World::with_caps(Caps {
        max_hold: secs(15),
        ..NO_CAPS
    });
    let token = world.held(1, "k");
    world.advance(secs(5));
    let mut keep = |lease| {
        let kept = (world.table).keep("k", token, secs(lease), None, |_| None, world.now);
        kept.map(|_| ())
    };
    assert_eq!(keep(11), Err(Refusal::NotHeld));
    assert_eq!(keep(10), Ok(()));
}
