//! What the table counts.

use super::*;

fn counters(world: &World) -> Counters {
    world.table.counters(world.now).counters
}

#[test]
fn each_end_of_a_grant_is_counted_as_what_it_is() {
    let mut world = World::new();
    let released = world.held(1, "released");
    world.release("released", released).expect("it is held");
    world.held(1, "expired");
    world.advance(secs(10));
    world.expire();
    // The end of a kept grant is no expiry.
    let kept = world.held(1, "kept");
    world.keep("kept", kept, 60).expect("it is held");
    world.advance(secs(60));
    world.expire();
    let broken = world.held(1, "broken");
    for conn in [Some(ConnId(1)), None] {
        let found = world
            .table
            .break_grant("broken", broken.fence, ELSEWHERE, world.now);
        assert_eq!(found, conn);
    }
    let renewed = world.held(1, "abandoned");
    world.renew("abandoned", renewed, 20).expect("it is held");
    world.disconnect(1, AtClose::Release);
    let counted = counters(&world);
    let ends = [
        counted.releases,
        counted.expiries,
        counted.breaks,
        counted.abandonments,
    ];
    assert_eq!(ends, [2, 1, 1, 1]);
    assert_eq!(counted.grants, 5);
    assert_eq!((counted.renewals, counted.disconnects), (2, 1));
}

#[test]
fn a_wait_is_counted_from_the_place_to_the_grant() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.advance(secs(2));
    let ticket = world.queued(2, "k");
    let given_up = world.queued(3, "k");
    world.advance(secs(5));
    world.cancel(given_up);
    world.release("k", token).expect("it is held");
    world.advance(secs(1));
    world.collected(ticket);
    let waits = counters(&world).waits;
    assert_eq!((waits.count(), waits.sum), (1, secs(5)));
    let within = |bound| waits.cumulative().find(|it| it.0 == secs(bound));
    assert_eq!(within(3), Some((secs(3), 0)));
    assert_eq!(within(10), Some((secs(10), 1)));
}

#[test]
fn the_gauges_tell_keys_by_kind() {
    let mut world = World::new();
    let token = world.held(1, "l");
    world.queued(2, "l");
    for conn in 1..=2 {
        granted(world.slot(conn, "s", 3));
    }
    let seen = world.table.counters(world.now);
    assert_eq!((seen.lock_count, seen.semaphore_count), (1, 1));
    assert_eq!((seen.holder_count, seen.waiter_count), (3, 1));
    world.disconnect(2, AtClose::Release);
    world.disconnect(1, AtClose::Release);
    assert!(world.release("l", token).is_err());
    let seen = world.table.counters(world.now);
    assert_eq!((seen.lock_count, seen.semaphore_count), (0, 0));
    assert_eq!((seen.holder_count, seen.waiter_count), (0, 0));
    assert_eq!(seen.idle_key_count, 2);
    // An idle key may be used as the other kind.
    granted(world.slot(1, "l", 3));
    assert_eq!(world.table.counters(world.now).semaphore_count, 1);
}
