//! A table that settles grants nothing, and then everything in order.

use super::*;

/// A table that settles for ten seconds.
fn settling() -> World {
    let mut world = World::new();
    world.table.settle_until(world.now + secs(10));
    world
}

fn restored(world: &mut World, key: &str, lease: u64) -> Token {
    let token = token(0);
    let record = HolderRecord::new(key, Terms::LOCK, token, secs(lease));
    assert!(world.table.restore(&record, world.now));
    token
}

#[test]
fn while_it_settles_claims_of_free_keys_wait() {
    let mut world = settling();
    let [first, second] = [1, 2].map(|conn| world.queued(conn, "k"));
    let other = ticket(world.slot(3, "s", 2));
    world.advance(secs(9));
    world.expire();
    for ticket in [first, second, other] {
        assert_eq!(world.collect(ticket), Ok(Answer::WouldWait));
    }
    assert_eq!(world.table.counters(world.now).waiter_count, 3);
    assert_eq!(world.table.counters(world.now).settling_left, secs(1));
    assert!(world.resolved().is_empty());
}

#[test]
fn once_it_has_settled_claims_are_granted_in_order() {
    let mut world = settling();
    let claims = ["c", "a", "b", "a"];
    let waiters: Vec<Ticket> = (1..)
        .zip(claims)
        .map(|(conn, key)| world.queued(conn, key))
        .collect();
    assert_eq!(
        world.table.next_deadline(),
        world.table.settling_until(),
        "the reaper would sleep on"
    );
    world.advance(secs(10));
    world.expire();
    assert_eq!(world.resolved(), [1, 2, 3]);
    let tokens = [0, 1, 2].map(|at| world.collected(waiters[at]));
    assert!(tokens.is_sorted_by_key(|token| token.fence));
    assert_eq!(world.collect(waiters[3]), Ok(Answer::WouldWait));
    assert_eq!(world.release("a", tokens[1]), Ok(()));
    world.collected(waiters[3]);
    assert_eq!(world.table.settling_until(), None);
}

#[test]
fn an_operation_after_the_end_comes_after_those_that_waited() {
    let mut world = settling();
    let waiter = world.queued(1, "k");
    world.advance(secs(10));
    // No expire() here: the reaper is late.
    let newcomer = world.queued(2, "k");
    world.collected(waiter);
    assert_eq!(world.collect(newcomer), Ok(Answer::WouldWait));
    world.held(3, "other");
}

#[test]
fn while_it_settles_a_try_gets_nothing_and_leaves_nothing() {
    let mut world = settling();
    assert_eq!(world.try_lock(1, "k"), Ok(Answer::WouldWait));
    assert_eq!(world.table.counters(world.now).lock_count, 0);
    world.advance(secs(10));
    granted(world.try_lock(1, "k"));
}

#[test]
fn a_claim_that_gives_up_while_it_settles_leaves_an_idle_key() {
    let mut world = settling();
    let [quitter, next] = [1, 2].map(|conn| world.queued(conn, "k"));
    let lone = world.queued(3, "lone");
    world.cancel(quitter);
    world.cancel(lone);
    world.disconnect(4, AtClose::Release);
    assert_eq!(world.table.counters(world.now).idle_key_count, 1);
    world.advance(secs(10));
    world.expire();
    world.collected(next);
}

#[test]
fn the_connection_of_a_waiter_may_close_while_it_settles() {
    let mut world = settling();
    world.queued(1, "k");
    let next = world.queued(2, "k");
    world.table.disconnect(ConnId(1), AtClose::Release, None);
    world.advance(secs(10));
    world.expire();
    world.collected(next);
    assert!(world.table.release_some(ConnId(1), 1, world.now));
}

#[test]
fn enqueued_claims_wait_while_it_settles() {
    let mut world = settling();
    ticket(world.enqueue(1, "k"));
    world.mint_is_out(true);
    assert_eq!(world.try_wait(1, "k"), Ok(Answer::WouldWait));
    world.mint_is_out(false);
    world.advance(secs(10));
    granted(world.try_wait(1, "k"));
}

#[test]
fn caps_are_kept_while_it_settles() {
    let caps = Caps {
        max_locks: 2,
        max_per_connection: 2,
        max_waiters: Some(2),
        max_waiters_total: 3,
        ..NO_CAPS
    };
    let mut world = World::with_caps(caps);
    world.table.settle_until(world.now + secs(10));
    world.queued(1, "k");
    world.queued(1, "k");
    assert_eq!(world.lock(1, "other"), Err(Refusal::MaxLocks));
    assert_eq!(world.lock(2, "k"), Err(Refusal::MaxWaiters));
    world.queued(2, "other");
    assert_eq!(world.lock(2, "k"), Err(Refusal::MaxWaiters));
    assert_eq!(world.lock(3, "third"), Err(Refusal::MaxWaiters));
    assert_eq!(world.slot(3, "other", 2), Err(Refusal::LimitMismatch));
    let mut world = World::with_caps(Caps {
        max_locks: 1,
        ..NO_CAPS
    });
    world.table.settle_until(world.now + secs(10));
    world.queued(1, "k");
    assert_eq!(world.lock(2, "other"), Err(Refusal::MaxLocks));
}

#[test]
fn restored_holders_are_served_while_it_settles() {
    let mut world = settling();
    let token = restored(&mut world, "k", 30);
    let waiter = world.queued(1, "k");
    assert_eq!(world.renew("k", token, 40), Ok(()));
    let table = &mut world.table;
    let adopted = table.adopt(ConnId(2), &proof("k", token), secs(50), world.now);
    assert_eq!(adopted, Ok(Answer::Renewed(secs(50))));
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.collect(waiter), Ok(Answer::WouldWait));
    world.advance(secs(10));
    world.expire();
    world.collected(waiter);
}

#[test]
fn a_restored_holder_keeps_its_key_after_the_end() {
    let mut world = settling();
    let token = restored(&mut world, "k", 30);
    let waiter = world.queued(1, "k");
    world.advance(secs(10));
    world.expire();
    assert_eq!(world.collect(waiter), Ok(Answer::WouldWait));
    let broken = world
        .table
        .break_grant("k", token.fence, ConnId(2), world.now);
    assert!(broken.is_some());
    world.collected(waiter);
}

#[test]
fn a_lease_that_ends_while_it_settles_frees_its_key_later() {
    let mut world = settling();
    restored(&mut world, "k", 5);
    let waiter = world.queued(1, "k");
    world.advance(secs(5));
    world.expire();
    assert_eq!(world.collect(waiter), Ok(Answer::WouldWait));
    assert_eq!(world.table.next_deadline(), world.table.settling_until());
    world.advance(secs(5));
    world.collected(waiter);
}

#[test]
fn a_drain_dismisses_those_that_wait_for_the_table_to_settle() {
    let mut world = settling();
    let waiter = world.queued(1, "k");
    world.drain();
    world.check();
    assert_eq!(world.collect(waiter), Err(Refusal::Draining));
    world.advance(secs(4));
    assert_eq!(world.table.settling_left(world.now), secs(6));
}

#[test]
fn a_crowd_that_waited_for_the_table_is_served_in_steps() {
    const COUNT: u64 = 3 * STEP as u64;
    let mut world = settling();
    let tickets: Vec<Ticket> = (1..=COUNT)
        .map(|conn| {
            let key = format!("k{conn}");
            ticket(
                world
                    .table
                    .acquire(claimant(conn), &lock_of(&key), world.now),
            )
        })
        .collect();
    world.advance(secs(10));
    world.table.expire_some(usize::MAX, world.now);
    let holder_count = |world: &World| world.table.counters(world.now).holder_count;
    assert_eq!(holder_count(&world), STEP);
    assert!(world.table.must_go_on_granting());
    // A newcomer comes after all of them.
    let newcomer = world.held(COUNT + 1, "new");
    assert_eq!(holder_count(&world), tickets.len() + 1);
    let last = world.collected(tickets[tickets.len() - 1]);
    assert!(last.fence < newcomer.fence);
}
