//! One claim of the protocol each, on a virtual clock.

use super::*;

fn one_key() -> Caps {
    Caps {
        max_locks: 1,
        ..NO_CAPS
    }
}

// Order of arrival.

#[test]
fn a_free_lock_is_granted_and_a_held_one_queues() {
    let mut world = World::new();
    world.held(1, "k");
    let waiter = world.queued(2, "k");
    assert_eq!(world.collect(waiter), Ok(Answer::WouldWait));
}

#[test]
fn a_lock_is_not_reentrant() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let again = world.queued(1, "k");
    assert_eq!(world.collect(again), Ok(Answer::WouldWait));
    assert_eq!(world.release("k", token), Ok(()));
    world.collected(again);
}

#[test]
fn waiters_are_served_in_order_of_arrival() {
    let mut world = World::new();
    let mut token = world.held(1, "k");
    let waiters: Vec<Ticket> = (2..50).map(|conn| world.queued(conn, "k")).collect();
    for (at, waiter) in waiters.iter().enumerate() {
        assert_eq!(world.release("k", token), Ok(()));
        assert!(waiters[at + 1..]
            .iter()
            .all(|later| world.collect(*later) == Ok(Answer::WouldWait)));
        let next = world.collected(*waiter);
        assert!(next.fence > token.fence);
        token = next;
    }
}

#[test]
fn a_newcomer_never_overtakes_a_waiter_even_past_a_free_slot() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let first = world.queued(2, "k");
    world.mint_is_out(true);
    assert_eq!(world.release("k", token), Ok(()));
    world.mint_is_out(false);
    // A slot is free, but there was no token for the waiter; it is still first.
    assert_eq!(world.try_lock(3, "k"), Ok(Answer::WouldWait));
    world.collected(first);
}

#[test]
fn newcomers_get_no_token_while_waiters_are_owed_one() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let first = world.queued(2, "k");
    world.mint_is_out(true);
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.lock(3, "k"), Err(Refusal::NoToken));
    assert_eq!(world.try_lock(3, "k"), Err(Refusal::NoToken));
    assert!(world.table.lacks_fence(first.place));
    world.mint_is_out(false);
    world.table.grant_owed_slots(world.now);
    assert_eq!(world.resolved(), [2]);
    world.collected(first);
}

#[test]
fn when_tokens_are_back_all_keys_are_served_in_order_of_arrival() {
    let mut world = World::new();
    let tokens: Vec<(String, Token)> = ["c", "a", "b"]
        .map(|key| (key.to_owned(), world.held(1, key)))
        .into();
    let waiters: Vec<Ticket> = tokens.iter().map(|(key, _)| world.queued(2, key)).collect();
    world.mint_is_out(true);
    for (key, token) in &tokens {
        assert_eq!(world.release(key, *token), Ok(()));
    }
    world.mint_is_out(false);
    world.table.grant_owed_slots(world.now);
    let fences: Vec<Fence> = waiters
        .iter()
        .map(|waiter| world.collected(*waiter).fence)
        .collect();
    assert!(fences.is_sorted());
}

#[test]
fn when_tokens_are_back_every_free_slot_finds_its_waiter() {
    let mut world = World::new();
    let tokens: Vec<Token> = (1..=3)
        .map(|conn| granted(world.slot(conn, "k", 3)))
        .collect();
    let waiters: Vec<Ticket> = (4..=7)
        .map(|conn| ticket(world.slot(conn, "k", 3)))
        .collect();
    world.mint_is_out(true);
    for token in tokens {
        let released = world
            .table
            .release(ELSEWHERE, "k", Kind::Semaphore, token, None, world.now);
        assert_eq!(released, Ok(Answer::Released));
    }
    assert!(world.resolved().is_empty());
    world.mint_is_out(false);
    world.table.grant_owed_slots(world.now);
    assert_eq!(world.resolved(), [4, 5, 6]);
    assert_eq!(world.collect(waiters[3]), Ok(Answer::WouldWait));
}

#[test]
fn a_try_never_takes_a_place_in_the_queue() {
    let mut world = World::with_caps(Caps {
        max_locks: 8,
        max_waiters: Some(1),
        ..NO_CAPS
    });
    let token = world.held(1, "k");
    for _ in 0..3 {
        assert_eq!(world.try_lock(2, "k"), Ok(Answer::WouldWait));
    }
    let waiter = world.queued(3, "k");
    assert_eq!(world.try_lock(2, "k"), Err(Refusal::MaxWaiters));
    assert_eq!(world.release("k", token), Ok(()));
    let token = world.collected(waiter);
    assert_eq!(world.release("k", token), Ok(()));
    assert!(matches!(world.try_lock(2, "k"), Ok(Answer::Granted(_))));
}

#[test]
fn a_semaphore_grants_as_many_as_its_limit() {
    let mut world = World::new();
    let tokens: Vec<Token> = (1..=3)
        .map(|conn| granted(world.slot(conn, "s", 3)))
        .collect();
    let waiter = ticket(world.slot(4, "s", 3));
    let released = world
        .table
        .release(ELSEWHERE, "s", Kind::Semaphore, tokens[1], None, world.now);
    assert_eq!(released, Ok(Answer::Released));
    world.collected(waiter);
    ticket(world.slot(5, "s", 3));
}

// Kind and limit.

#[test]
fn a_key_in_use_keeps_its_kind_and_limit() {
    let mut world = World::new();
    world.held(1, "k");
    assert_eq!(world.slot(2, "k", 1), Err(Refusal::LimitMismatch));
    granted(world.slot(1, "s", 2));
    assert_eq!(world.slot(2, "s", 3), Err(Refusal::LimitMismatch));
    assert_eq!(world.lock(2, "s"), Err(Refusal::LimitMismatch));
}

#[test]
fn an_idle_key_takes_over_the_next_kind_and_limit() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.release("k", token), Ok(()));
    granted(world.slot(2, "k", 5));
    world.advance(secs(10));
    world.held(3, "k");
}

#[test]
fn a_token_is_good_for_its_own_kind_and_key_only() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let other = world.held(1, "other");
    let now = world.now;
    assert_eq!(
        world
            .table
            .release(ELSEWHERE, "k", Kind::Semaphore, token, None, now),
        Err(Refusal::NotHeld)
    );
    assert_eq!(
        world
            .table
            .renew(ELSEWHERE, "k", Kind::Semaphore, token, secs(1), now),
        Err(Refusal::NotHeld)
    );
    assert_eq!(world.release("k", other), Err(Refusal::NotHeld));
    let mut forged = token;
    forged.salt.0 ^= 1;
    assert_eq!(world.release("k", forged), Err(Refusal::NotHeld));
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.release("k", token), Err(Refusal::NotHeld));
}

// Caps.

#[test]
fn the_cap_on_keys_counts_locks_and_semaphores_together() {
    let mut world = World::with_caps(Caps {
        max_locks: 2,
        ..NO_CAPS
    });
    world.held(1, "a");
    granted(world.slot(1, "b", 2));
    assert_eq!(world.lock(1, "c"), Err(Refusal::MaxLocks));
    // A key that is known already is no new one.
    world.queued(2, "a");
}

#[test]
fn at_the_cap_the_key_idle_longest_makes_room() {
    let mut world = World::with_caps(Caps {
        max_locks: 2,
        ..NO_CAPS
    });
    for key in ["a", "b"] {
        let token = world.held(1, key);
        assert_eq!(world.release(key, token), Ok(()));
        world.advance(secs(1));
    }
    world.held(1, "c");
    let names: Vec<String> = world
        .table
        .names
        .keys()
        .map(|key| key.as_str().to_owned())
        .collect();
    assert!(
        names.contains(&"b".to_owned()) && !names.contains(&"a".to_owned()),
        "{names:?}"
    );
}

#[test]
fn at_the_cap_a_lease_that_is_over_makes_room() {
    let mut world = World::with_caps(one_key());
    world.held(1, "a");
    world.advance(secs(10));
    world.held(2, "b");
}

#[test]
fn the_cap_on_waiters_is_exact_and_per_key() {
    let mut world = World::with_caps(Caps {
        max_locks: 8,
        max_waiters: Some(2),
        ..NO_CAPS
    });
    world.held(1, "k");
    let first = world.queued(2, "k");
    world.queued(3, "k");
    assert_eq!(world.lock(4, "k"), Err(Refusal::MaxWaiters));
    world.cancel(first);
    world.queued(4, "k");
    world.held(1, "other");
    world.queued(2, "other");
}

#[test]
fn the_cap_on_slots_counts_every_key_and_makes_no_new_one() {
    let mut world = World::with_caps(Caps {
        max_grants: 3,
        ..NO_CAPS
    });
    granted(world.slot(1, "s", 8));
    granted(world.slot(2, "s", 8));
    let token = world.held(3, "k");
    assert_eq!(world.slot(4, "s", 8), Err(Refusal::MaxLocks));
    assert_eq!(world.try_lock(4, "new"), Err(Refusal::MaxLocks));
    assert!(!world.table.names.contains_key("new"));
    // A waiter takes no slot, so it may wait; then it gets the one that its key frees.
    let waiter = world.queued(4, "k");
    assert_eq!(world.release("k", token), Ok(()));
    let token = world.collected(waiter);
    assert_eq!(world.lock(5, "new"), Err(Refusal::MaxLocks));
    assert_eq!(world.release("k", token), Ok(()));
    world.held(5, "new");
}

#[test]
fn at_the_cap_on_slots_a_lease_that_is_over_makes_room() {
    let mut world = World::with_caps(Caps {
        max_grants: 1,
        ..NO_CAPS
    });
    world.held(1, "a");
    world.advance(secs(10));
    world.held(2, "b");
}

#[test]
fn a_waiter_owed_a_token_is_not_robbed_of_its_slot_at_the_cap() {
    let mut world = World::with_caps(Caps {
        max_grants: 1,
        ..NO_CAPS
    });
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.mint_is_out(true);
    assert_eq!(world.release("k", token), Ok(()));
    world.mint_is_out(false);
    assert_eq!(world.lock(3, "other"), Err(Refusal::MaxLocks));
    world.collected(waiter);
}

#[test]
fn the_cap_on_one_connection_counts_slots_and_places() {
    let mut world = World::with_caps(Caps {
        max_per_connection: 3,
        ..NO_CAPS
    });
    let token = world.held(9, "k");
    world.held(1, "a");
    granted(world.slot(1, "s", 8));
    let waiter = world.queued(1, "k");
    assert_eq!(world.lock(1, "new"), Err(Refusal::MaxLocks));
    assert_eq!(world.slot(1, "s", 8), Err(Refusal::MaxLocks));
    assert_eq!(world.lock(1, "k"), Err(Refusal::MaxLocks));
    assert_eq!(world.try_lock(1, "k"), Err(Refusal::MaxLocks));
    granted(world.slot(2, "s", 8));
    // A place that becomes a slot counts once, collected or not.
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.lock(1, "new"), Err(Refusal::MaxLocks));
    let token = world.collected(waiter);
    assert_eq!(world.lock(1, "new"), Err(Refusal::MaxLocks));
    assert_eq!(world.release("k", token), Ok(()));
    world.held(1, "new");
}

#[test]
fn a_place_given_up_counts_for_its_connection_no_more() {
    let mut world = World::with_caps(Caps {
        max_per_connection: 1,
        ..NO_CAPS
    });
    world.held(9, "k");
    let waiter = world.queued(1, "k");
    assert_eq!(world.lock(1, "a"), Err(Refusal::MaxLocks));
    world.cancel(waiter);
    world.held(1, "a");
}

#[test]
fn the_cap_on_waiters_in_all_counts_every_key() {
    let mut world = World::with_caps(Caps {
        max_waiters_total: 2,
        ..NO_CAPS
    });
    let token = world.held(1, "a");
    world.held(1, "b");
    let first = world.queued(2, "a");
    world.queued(2, "b");
    assert_eq!(world.lock(3, "a"), Err(Refusal::MaxWaiters));
    assert_eq!(world.try_lock(3, "b"), Err(Refusal::MaxWaiters));
    assert_eq!(world.release("a", token), Ok(()));
    world.queued(3, "b");
    assert_eq!(world.lock(4, "a"), Err(Refusal::MaxWaiters));
    world.disconnect(3, AtClose::Release);
    world.collected(first);
    world.queued(4, "a");
}

#[test]
fn the_checks_come_in_their_order() {
    let mut world = World::with_caps(Caps {
        max_locks: 1,
        max_waiters: Some(1),
        ..NO_CAPS
    });
    world.held(1, "k");
    world.queued(2, "k");
    // A mismatch is said before a full queue, a full table before a grant.
    assert_eq!(world.slot(3, "k", 2), Err(Refusal::LimitMismatch));
    assert_eq!(world.lock(3, "k"), Err(Refusal::MaxWaiters));
    assert_eq!(world.lock(3, "new"), Err(Refusal::MaxLocks));
    world.drain();
    assert_eq!(world.slot(3, "k", 2), Err(Refusal::Draining));
}

#[test]
fn the_caps_in_all_come_between_mismatch_and_full_queue() {
    let mut world = World::with_caps(Caps {
        max_waiters: Some(1),
        max_per_connection: 1,
        ..NO_CAPS
    });
    world.held(1, "k");
    world.queued(2, "k");
    assert_eq!(world.slot(1, "k", 2), Err(Refusal::LimitMismatch));
    assert_eq!(world.lock(1, "k"), Err(Refusal::MaxLocks));
    assert_eq!(world.lock(3, "k"), Err(Refusal::MaxWaiters));
}

// Leases.

#[test]
fn a_lease_ends_exactly_on_time() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.table.next_deadline(), Some(world.now + secs(10)));
    world.advance(secs(10) - Duration::from_nanos(1));
    assert!(world.is_held("k", token));
    world.advance(Duration::from_nanos(1));
    assert!(!world.is_held("k", token));
}

#[test]
fn an_expired_token_is_dead_even_if_the_reaper_is_late() {
    type Act = fn(&mut World, Token) -> Result<(), Refusal>;
    let acts: [Act; 2] = [
        |world, token| world.release("k", token),
        |world, token| world.renew("k", token, 10),
    ];
    for act in acts {
        let mut world = World::new();
        let token = world.held(1, "k");
        world.advance(secs(10)); // no expire() here: that is the point
        assert_eq!(act(&mut world, token), Err(Refusal::NotHeld));
    }
}

#[test]
fn leases_end_in_steps_and_those_left_are_dead_all_the_same() {
    let mut world = World::new();
    let keys: Vec<String> = (0..10).map(|number| format!("k{number}")).collect();
    let tokens: Vec<Token> = keys.iter().map(|key| world.held(1, key)).collect();
    let waiter = world.queued(2, "k8");
    let held = |world: &World| world.table.leases.len();
    world.advance(secs(10));
    world.table.expire_some(3, world.now);
    assert_eq!(held(&world), 7);
    assert!(world.table.has_due(Scope::Key("k3"), world.now));
    assert!(!world.table.has_due(Scope::Key("k2"), world.now));
    // An operation ends what ran out before, in order, up to its own key.
    assert_eq!(world.release("k4", tokens[4]), Err(Refusal::NotHeld));
    assert_eq!(held(&world), 5);
    assert_eq!(world.renew("k5", tokens[5], 10), Err(Refusal::NotHeld));
    world.held(3, "k6");
    assert!(!world.is_held("k7", tokens[7]));
    world.collected(waiter);
    assert_eq!(world.listed(None, 20).0.len(), 10);
    assert_eq!(held(&world), 2);
}

#[test]
fn an_operation_leaves_the_leases_of_other_keys_to_the_sweep() {
    let mut world = World::new();
    (1..=100).for_each(|conn| {
        world.held(conn, &format!("k{conn}"));
    });
    let token = world.held(101, "mine");
    assert_eq!(world.renew("mine", token, 60), Ok(()));
    world.advance(secs(10));
    assert_eq!(world.renew("mine", token, 60), Ok(()));
    world.queued(102, "mine");
    assert_eq!(world.release("mine", token), Ok(()));
    assert_eq!(world.table.leases.len(), 101);
    assert!(world.table.has_due(Scope::Everything, world.now));
    world.expire();
    assert_eq!(world.table.leases.len(), 1);
}

#[test]
fn the_slot_of_an_expired_lease_passes_to_the_next_in_line() {
    let mut world = World::new();
    let first = world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.advance(secs(10));
    world.expire();
    assert_eq!(world.resolved(), [2]);
    let second = world.collected(waiter);
    assert!(second.fence > first.fence);
}

#[test]
fn a_renewal_starts_the_lease_anew_longer_or_shorter() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.advance(secs(9));
    assert_eq!(world.renew("k", token, 20), Ok(()));
    assert_eq!(world.table.next_deadline(), Some(world.now + secs(20)));
    assert_eq!(world.renew("k", token, 1), Ok(()));
    assert_eq!(world.table.next_deadline(), Some(world.now + secs(1)));
    world.advance(secs(1));
    assert_eq!(world.renew("k", token, 20), Err(Refusal::NotHeld));
}

#[test]
fn an_early_late_or_second_sweep_is_harmless() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.expire();
    world.expire();
    assert_eq!(world.renew("k", token, 1), Ok(()));
    world.advance(secs(500));
    world.expire();
    world.expire();
    assert!(!world.table.has_holders());
}

// Two phases.

#[test]
fn a_queued_lease_starts_at_the_grant_and_anew_when_collected() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    assert_eq!(world.release("k", token), Ok(()));
    world.advance(secs(9));
    world.collected(waiter);
    assert_eq!(world.table.next_deadline(), Some(world.now + secs(10)));
}

#[test]
fn a_grant_that_died_uncollected_is_said_to_have_expired() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    assert_eq!(world.release("k", token), Ok(()));
    world.advance(secs(10_000));
    world.expire();
    world.table.prune(Duration::ZERO, usize::MAX, world.now);
    assert_eq!(world.collect(waiter), Err(Refusal::LeaseExpired));
}

#[test]
fn an_uncollected_grant_passes_on_when_its_lease_ends() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let idler = world.queued(2, "k");
    let next = world.queued(3, "k");
    assert_eq!(world.release("k", token), Ok(()));
    world.advance(secs(10));
    world.collected(next);
    assert_eq!(world.collect(idler), Err(Refusal::LeaseExpired));
}

#[test]
fn a_wait_is_answered_even_if_its_key_is_forgotten() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert!(matches!(world.enqueue(2, "k"), Ok(Answer::Queued(_))));
    assert_eq!(world.release("k", token), Ok(()));
    world.advance(secs(10));
    world.expire();
    world.table.prune(Duration::ZERO, usize::MAX, world.now);
    assert_eq!(world.try_wait(2, "k"), LEASE_EXPIRED);

    let token = world.held(1, "other");
    assert!(matches!(world.enqueue(2, "other"), Ok(Answer::Queued(_))));
    world.drain();
    assert_eq!(world.release("other", token), Ok(()));
    world.table.prune(Duration::ZERO, usize::MAX, world.now);
    let draining = Err(Refusal::Draining);
    assert_eq!(world.try_wait(2, "other"), draining);
    assert_eq!(world.try_wait(2, "other"), Err(Refusal::NotEnqueued));
}

#[test]
fn an_entry_dies_with_its_token_and_says_so_once() {
    let mut world = World::new();
    let deaths: [fn(&mut World, Token); 2] = [
        |world, token| assert_eq!(world.release("k", token), Ok(())),
        |world, _| world.advance(secs(10)),
    ];
    for die in deaths {
        let token = granted(world.enqueue(1, "k"));
        die(&mut world, token);
        assert_eq!(world.try_wait(1, "k"), LEASE_EXPIRED);
        assert_eq!(world.try_wait(1, "k"), Err(Refusal::NotEnqueued));
    }
}

#[test]
fn a_release_by_its_own_connection_ends_the_phase() {
    let mut world = World::new();
    let token = granted(world.enqueue(1, "k"));
    let now = world.now;
    let released = world
        .table
        .release(ConnId(1), "k", Kind::Lock, token, None, now);
    assert_eq!(released, Ok(Answer::Released));
    assert_eq!(world.try_wait(1, "k"), Err(Refusal::NotEnqueued));
}

#[test]
fn only_a_live_entry_keeps_a_connection_from_enqueueing() {
    let mut world = World::new();
    let token = granted(world.enqueue(1, "k"));
    assert_eq!(world.enqueue(1, "k"), Err(Refusal::AlreadyEnqueued));
    assert_eq!(world.release("k", token), Ok(()));
    granted(world.enqueue(1, "k"));
    world.drain();
    let draining = Err(Refusal::Draining);
    assert_eq!(world.enqueue(1, "k"), draining);
    world.advance(secs(10));
    // The refusal takes the place of the dead entry.
    assert_eq!(world.enqueue(1, "k"), draining);
    assert_eq!(world.try_wait(1, "k"), Err(Refusal::NotEnqueued));
}

#[test]
fn an_entry_that_is_owed_a_token_keeps_its_place() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert!(matches!(world.enqueue(2, "k"), Ok(Answer::Queued(_))));
    assert_eq!(world.try_wait(2, "k"), Ok(Answer::WouldWait));
    world.mint_is_out(true);
    assert_eq!(world.release("k", token), Ok(()));
    let no_token = Err(Refusal::NoToken);
    assert_eq!(world.try_wait(2, "k"), no_token);
    world.mint_is_out(false);
    world.table.grant_owed_slots(world.now);
    assert!(matches!(world.try_wait(2, "k"), Ok(Answer::Granted(_))));
}

#[test]
fn the_entries_that_died_first_are_forgotten_first() {
    let mut world = World::new();
    let keys: Vec<String> = (0..MAX_ENDED + 2)
        .map(|number| format!("k{number}"))
        .collect();
    for key in &keys {
        let token = granted(world.enqueue(1, key));
        assert_eq!(world.release(key, token), Ok(()));
    }
    granted(world.enqueue(1, "alive"));
    for key in &keys[..2] {
        assert_eq!(world.try_wait(1, key), Err(Refusal::NotEnqueued));
    }
    for key in &keys[2..] {
        assert_eq!(world.try_wait(1, key), LEASE_EXPIRED);
    }
    assert_eq!(world.enqueue(1, "alive"), Err(Refusal::AlreadyEnqueued));
}

#[test]
fn an_entry_goes_with_its_connection() {
    for holdings in [AtClose::Release, AtClose::Orphan] {
        let mut world = World::new();
        let token = world.held(1, "k");
        granted(world.enqueue(2, "kept"));
        assert!(matches!(world.enqueue(2, "k"), Ok(Answer::Queued(_))));
        let last = world.queued(3, "k");
        assert_eq!(world.release("k", token), Ok(())); // granted to 2, which was never told
        world.disconnect(2, holdings);
        world.collected(last);
        let is_kept = world.try_lock(3, "kept") == Ok(Answer::WouldWait);
        assert_eq!(is_kept, holdings == AtClose::Orphan);
        assert!(!world.table.conns.contains_key(&ConnId(2)));
    }
}

#[test]
fn a_cancelled_waiter_leaves_no_gap() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let first = world.queued(2, "k");
    let second = world.queued(3, "k");
    world.cancel(first);
    assert_eq!(world.release("k", token), Ok(()));
    world.collected(second);
}

#[test]
fn a_grant_that_meets_a_cancel_passes_to_the_next_waiter() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let first = world.queued(2, "k");
    let second = world.queued(3, "k");
    assert_eq!(world.release("k", token), Ok(()));
    world.cancel(first);
    world.collected(second);
}

// Disconnects.

#[test]
fn a_disconnect_releases_slots_and_forgets_places() {
    let mut world = World::new();
    let kept = world.held(1, "other");
    world.held(2, "k");
    world.queued(2, "other");
    let waiter = world.queued(3, "k");
    let last = world.queued(3, "other");
    world.disconnect(2, AtClose::Release);
    world.collected(waiter);
    assert_eq!(world.release("other", kept), Ok(()));
    world.collected(last);
}

#[test]
fn without_auto_release_a_slot_lives_until_its_lease_ends() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.disconnect(1, AtClose::Orphan);
    assert_eq!(world.collect(waiter), Ok(Answer::WouldWait));
    // The token is the credential, whatever became of the connection.
    assert_eq!(world.renew("k", token, 5), Ok(()));
    world.advance(secs(5));
    world.collected(waiter);
}

#[test]
fn without_auto_release_places_and_uncollected_grants_go() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.queued(2, "k");
    world.queued(2, "k");
    let last = world.queued(3, "k");
    assert_eq!(world.release("k", token), Ok(())); // granted to 2, which was never told
    world.disconnect(2, AtClose::Orphan);
    world.collected(last);
}

#[test]
fn a_disconnect_hands_nothing_to_the_connection_that_leaves() {
    let mut world = World::new();
    world.held(1, "k");
    world.queued(1, "k");
    let other = world.queued(2, "k");
    world.resolved();
    world.disconnect(1, AtClose::Release);
    assert_eq!(world.resolved(), [2]);
    world.collected(other);
    assert_eq!(world.table.conns.len(), 1);
}

#[test]
fn a_connection_that_has_gone_is_not_granted_what_the_mint_owed() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.queued(2, "k");
    world.queued(2, "k");
    let other = world.queued(3, "k");
    world.mint_is_out(true);
    assert_eq!(world.release("k", token), Ok(()));
    world.mint_is_out(false);
    world.disconnect(2, AtClose::Release);
    assert_eq!(world.resolved(), [3]);
    world.collected(other);
    assert!(!world.table.conns.contains_key(&ConnId(2)));
}

#[test]
fn the_cost_of_a_disconnect_is_that_of_its_own_holdings() {
    let caps = Caps {
        max_locks: 100_000,
        ..NO_CAPS
    };
    let mut table = LockTable::new(
        caps,
        Box::new(CountingFences {
            last_fence: 0,
            is_out: Arc::default(),
        }),
    );
    let now = Instant::now();
    for conn in 1..=50_000 {
        let key = format!("k{conn}");
        granted(table.acquire(claimant(conn), &lock_of(&key), now));
    }
    // Of this thread: the machine may have other work.
    let thread_time = rustix::time::ClockId::ThreadCPUTime;
    let processor_time = || rustix::time::clock_gettime(thread_time).tv_sec;
    let started = processor_time();
    for conn in 1..=50_000 {
        table.disconnect(ConnId(conn), AtClose::Release, None);
        assert!(table.release_some(ConnId(conn), 2, now));
    }
    // Were it the table's size, this would be 2,500,000,000 steps.
    assert!(processor_time() - started < 20);
    assert!(!table.has_holders());
}

#[test]
fn a_connection_that_is_leaving_is_granted_nothing() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.queued(2, "k");
    let next = world.queued(3, "k");
    world.table.disconnect(ConnId(2), AtClose::Release, None);
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.resolved(), [3]);
    world.collected(next);
    assert!(world.table.release_some(ConnId(2), 1, world.now));
    world.check();
}

// Idle keys.

#[test]
fn idle_keys_are_pruned_when_their_time_has_come() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.table.prune(Duration::ZERO, usize::MAX, world.now);
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.table.idle_since(), Some(world.now));
    world.advance(secs(59));
    world.table.prune(secs(60), usize::MAX, world.now);
    assert_eq!(world.table.names.len(), 1);
    world.advance(secs(1));
    world.table.prune(secs(60), usize::MAX, world.now);
    assert_eq!(world.table.names.len(), 0);
}

#[test]
fn a_bogus_release_or_renewal_is_no_use_of_a_key() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.release("k", token), Ok(()));
    let idle_since = world.table.idle_since();
    world.advance(secs(1));
    assert_eq!(world.release("k", token), Err(Refusal::NotHeld));
    assert_eq!(world.renew("k", token, 1), Err(Refusal::NotHeld));
    assert_eq!(world.table.idle_since(), idle_since);
    assert_eq!(world.release("never-seen", token), Err(Refusal::NotHeld));
    assert_eq!(world.table.names.len(), 1);
}

// Drain.

#[test]
fn a_drain_dismisses_waiters_and_lets_holders_finish() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.drain();
    assert_eq!(world.resolved(), [2]);
    assert_eq!(world.collect(waiter), Err(Refusal::Draining));
    assert_eq!(world.lock(3, "new"), Err(Refusal::Draining));
    assert_eq!(world.renew("k", token, 10), Ok(()));
    assert!(world.table.has_holders());
    assert_eq!(world.release("k", token), Ok(()));
    assert!(!world.table.has_holders());
}

#[test]
fn a_grant_from_before_the_drain_can_still_be_collected() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    assert_eq!(world.release("k", token), Ok(()));
    world.drain();
    world.collected(waiter);
}

// Tokens.

#[test]
fn the_order_of_fences_is_the_order_of_grants() {
    let mut world = World::new();
    let mut last = world.held(1, "k");
    for conn in 2..20 {
        let waiter = world.queued(conn, "k");
        let elsewhere = world.held(conn, &format!("k{conn}"));
        assert_eq!(world.release("k", last), Ok(()));
        let next = world.collected(waiter);
        assert!(last.fence < elsewhere.fence && elsewhere.fence < next.fence);
        last = next;
    }
}

#[test]
fn a_token_has_the_salt_that_its_own_claim_brought_along() {
    let mut world = World::new();
    let mut ask = |conn, salt| {
        let claimant = Claimant {
            conn: ConnId(conn),
            salt: Salt(salt),
            can_adopt: true,
        };
        let now = world.now;
        world.table.acquire(claimant, &lock_of("k"), now)
    };
    let token = granted(ask(1, 11));
    let (second, third) = (ticket(ask(2, 22)), ticket(ask(3, 33)));
    assert!(token.salt.matches(Salt(11)));
    assert_eq!(world.release("k", token), Ok(()));
    let token = world.collected(second);
    assert!(token.salt.matches(Salt(22)));
    assert_eq!(world.release("k", token), Ok(()));
    assert!(world.collected(third).salt.matches(Salt(33)));
}

#[test]
fn without_tokens_nothing_is_granted_and_places_are_kept() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.mint_is_out(true);
    assert_eq!(world.lock(3, "free"), Err(Refusal::NoToken));
    assert_eq!(world.renew("k", token, 10), Ok(()));
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.collect(waiter), Ok(Answer::WouldWait));
    assert!(!world.table.has_holders());
}

// Connections.

#[test]
fn a_connection_is_busy_while_it_holds_or_waits() {
    let mut world = World::new();
    let start = world.now;
    assert_eq!(world.table.connection_idle_since(ConnId(1), start), None);
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.advance(secs(3));
    assert_eq!(
        world.table.connection_idle_since(ConnId(1), world.now),
        Some(world.now)
    );
    assert_eq!(
        world.table.connection_idle_since(ConnId(2), world.now),
        Some(world.now)
    );
    assert_eq!(world.release("k", token), Ok(()));
    let released_at = world.now;
    world.advance(secs(3));
    assert_eq!(
        world.table.connection_idle_since(ConnId(1), world.now),
        Some(released_at)
    );
    world.cancel(waiter);
    let cancelled_at = world.now;
    world.advance(secs(3));
    assert_eq!(
        world.table.connection_idle_since(ConnId(2), world.now),
        Some(cancelled_at)
    );
}

#[test]
fn a_connection_whose_entries_have_ended_is_idle() {
    let mut world = World::new();
    let holder = world.held(1, "k");
    assert!(matches!(world.enqueue(2, "k"), Ok(Answer::Queued(_))));
    assert!(matches!(world.enqueue(2, "free"), Ok(Answer::Granted(_))));
    let idle_since = |world: &World| world.table.connection_idle_since(ConnId(2), world.now);
    assert_eq!(world.release("k", holder), Ok(()));
    assert_eq!(idle_since(&world), Some(world.now));
    world.advance(secs(10));
    world.expire();
    let expired_at = world.now;
    world.advance(secs(3));
    assert_eq!(idle_since(&world), Some(expired_at));
    // They are remembered all the same.
    assert_eq!(world.try_wait(2, "k"), LEASE_EXPIRED);
    assert_eq!(world.try_wait(2, "free"), LEASE_EXPIRED);
    assert_eq!(idle_since(&world), Some(expired_at));
}

#[test]
fn to_collect_a_fresh_grant_ends_no_lease() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let ticket = world.queued(2, "k");
    let other = world.held(3, "other");
    assert_eq!(world.release("k", token), Ok(()));
    world.advance(secs(10));
    // The leases of both are over, and neither has been ended.
    let now = world.now;
    assert_eq!(world.table.collect(ticket, now), Ok(Answer::WouldWait));
    assert_eq!(world.table.leases.len(), 2);
    assert!(!world.is_held("other", other));
    assert_eq!(world.collect(ticket), LEASE_EXPIRED);
}

#[test]
fn a_listing_ends_however_many_keys_are_made_meanwhile() {
    let mut world = World::new();
    for number in 0..10 {
        world.held(1, &format!("old-{number}"));
    }
    let (mut listing, mut listed) = (None, Vec::new());
    for page in 0..20 {
        let (keys, next) = world.listed(listing, 3);
        listed.extend(keys.iter().map(|key| key.key.as_str().to_owned()));
        // Before and behind the place where the listing is.
        for number in 0..3 {
            world.held(2, &format!("new-{page}-{number}"));
            world.held(2, &format!("old-{}-{number}", page * 3 + 2));
        }
        listing = next;
        if listing.is_none() {
            break;
        }
    }
    let old: Vec<String> = (0..10).map(|number| format!("old-{number}")).collect();
    assert_eq!(listed, old);
}

#[test]
fn a_listing_also_names_the_holder_behind_a_kept_grant() {
    let mut world = World::new();
    let [kept, next, _] = [1, 2, 3].map(|conn| granted(world.slot(conn, "k", 3)));
    let now = world.now;
    let answer = world.table.keep("k", kept, secs(10), None, |_| None, now);
    answer.expect("it is held");
    let (keys, _) = world.listed(None, 1);
    let listed = keys[0].holders.iter().filter_map(|holder| holder.held);
    let fences: Vec<Fence> = listed.map(|(fence, _)| fence).collect();
    assert_eq!(fences, [kept.fence, next.fence]);
}
