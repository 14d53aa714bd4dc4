//! The changes that a journal is told, and the holders that it brings back.

use super::*;

impl World {
    fn journalled() -> World {
        let mut world = World::new();
        world.table.note_changes(Recording::All);
        world
    }

    /// The changes since the last call, in short: `+fence lease` and `-fence`.
    fn changes(&mut self) -> Vec<String> {
        let changes = self.table.changes().map(std::mem::take);
        let describe = |Change { fence, news, .. }: &Change| match news {
            News::Held(grant) => format!("+{fence} {}", grant.record.lease.as_secs()),
            News::Ended => format!("-{fence}"),
            News::Dead(_) => panic!("a journal has no dead grants"),
        };
        changes.iter().flatten().map(describe).collect()
    }

    fn restore(&mut self, key: &str, kind: Kind, limit: u32, fence: u64) -> bool {
        let terms = Terms::plain(kind, Limit::new(limit).expect("a limit above zero"));
        let record = HolderRecord::new(key, terms, token(fence), secs(10));
        let is_restored = self.table.restore(&record, self.now);
        self.check();
        is_restored
    }
}

#[test]
fn every_change_of_holders_is_noted_in_order() {
    let mut world = World::journalled();
    let first = world.held(1, "k");
    assert_eq!(world.changes(), ["+1 10"]);
    let waiter = world.queued(2, "k");
    let given_up = world.queued(3, "k");
    world.cancel(given_up);
    assert_eq!(world.changes(), [""; 0]);
    world.release("k", first).expect("it is held");
    assert_eq!(world.changes(), ["-1", "+2 10"]);
    world.collected(waiter);
    world.advance(secs(10));
    world.expire();
    assert_eq!(world.changes(), ["-2"]);
    world.held(4, "k");
    assert!(world.enqueue(4, "other").is_ok());
    world.disconnect(4, AtClose::Release);
    assert_eq!(world.changes(), ["+3 10", "+4 10", "-3", "-4"]);
    world.held(5, "k");
    let broken = world.table.break_grant("k", Fence(5), ELSEWHERE, world.now);
    assert_eq!(broken, Some(ConnId(5)));
    assert_eq!(world.changes(), ["+5 10", "-5"]);
}

#[test]
fn the_end_of_a_restored_holder_is_noted_and_its_begin_is_not() {
    let mut world = World::journalled();
    assert!(world.restore("k", Kind::Lock, 1, 7));
    assert_eq!(world.changes(), [""; 0]);
    world.advance(secs(10));
    world.expire();
    assert_eq!(world.changes(), ["-7"]);
}

#[test]
fn a_holder_that_contradicts_others_is_not_restored() {
    let mut world = World::new();
    assert!(world.restore("lock", Kind::Lock, 1, 2));
    assert!(!world.restore("lock", Kind::Lock, 1, 3));
    assert!(!world.restore("lock", Kind::Semaphore, 2, 4));
    assert!(world.restore("slots", Kind::Semaphore, 3, 5));
    assert!(!world.restore("slots", Kind::Semaphore, 2, 6));
    assert!(!world.restore("slots", Kind::Semaphore, 3, 5));
    assert!(world.restore("slots", Kind::Semaphore, 3, 7));
    assert_eq!(world.table.orphan_count(), 3);
}

#[test]
fn a_lease_begins_anew_unless_it_is_over_or_longer() {
    let mut world = World::new();
    let [late, over] = ["late", "over"].map(|key| world.held(1, key));
    let long = world.held(1, "long");
    world.renew("long", long, 60).expect("it is held");
    world.renew("over", over, 1).expect("it is held");
    world.advance(secs(5));
    let fences = [late.fence, over.fence, long.fence, Fence(99)];
    world.table.begin_anew(&fences, world.now);
    world.check();
    assert!(!world.is_held("over", over));
    world.advance(secs(9));
    assert!(world.is_held("late", late));
    world.advance(secs(1));
    assert!(!world.is_held("late", late));
    world.advance(secs(44));
    assert!(world.is_held("long", long));
}

#[test]
fn the_lease_of_a_kept_grant_begins_anew_with_its_own_length() {
    let mut world = World::journalled();
    let kept = world.held(1, "k");
    let keep = world
        .table
        .keep("k", kept, secs(2), None, |_| None, world.now);
    keep.expect("it is held");
    world.advance(secs(1));
    world.table.begin_anew(&[kept.fence], world.now);
    world.check();
    world.advance(secs(1));
    assert!(world.is_held("k", kept));
    world.advance(secs(1));
    assert!(!world.is_held("k", kept));
}
