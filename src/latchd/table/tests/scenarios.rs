//! Rules of the table that the comparison with the model does not see, and some that clients build
//! on, on a virtual clock.

use super::*;

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
fn the_cost_of_a_disconnect_is_that_of_its_own_holdings() {
    let World { mut table, now, .. } = World::new();
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
fn a_connection_is_busy_while_it_holds_or_waits() {
    let mut world = World::new();
    let idle_since =
        |world: &World, conn| world.table.connection_idle_since(ConnId(conn), world.now);
    assert_eq!(idle_since(&world, 1), None);
    let token = world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.advance(secs(3));
    assert_eq!(
        [1, 2].map(|conn| idle_since(&world, conn)),
        [Some(world.now); 2]
    );
    assert_eq!(world.release("k", token), Ok(()));
    let released_at = world.now;
    world.advance(secs(3));
    assert_eq!(idle_since(&world, 1), Some(released_at));
    world.cancel(waiter);
    let cancelled_at = world.now;
    world.advance(secs(3));
    assert_eq!(idle_since(&world, 2), Some(cancelled_at));
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
