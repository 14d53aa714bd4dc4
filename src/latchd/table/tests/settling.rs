//! A table that settles grants nothing, and then everything in order.

use super::*;

/// A table that settles for ten seconds.
fn settling() -> World {
    let mut world = World::new();
    world.table.settle_until(world.now + secs(10));
    world
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
