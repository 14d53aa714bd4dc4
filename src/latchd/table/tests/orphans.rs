//! Grants that change their connection, and grants without one.

use super::*;

impl World {
    pub fn adopt(&mut self, conn: u64, key: &str, token: Token, lease: u64) -> Result<(), Refusal> {
        let proof = proof(key, token);
        let (table, now) = self.visit(Scope::Everything);
        let adopted = table.adopt(ConnId(conn), &proof, secs(lease), now);
        self.check();
        adopted.map(|_| ())
    }

    pub fn keep(&mut self, key: &str, token: Token, lease: u64) -> Result<(), Refusal> {
        let tag_of = |conn: ConnId| histories::tag_of(conn.0).map(Arc::from);
        let (table, now) = self.visit(Scope::Everything);
        let kept = table.keep(key, token, secs(lease), None, tag_of, now);
        self.check();
        kept.map(|_| ())
    }

    pub fn renew_over(&mut self, conn: u64, key: &str, token: Token, lease: u64) {
        let renewed =
            (self.table).renew(ConnId(conn), key, Kind::Lock, token, secs(lease), self.now);
        self.check();
        assert_eq!(renewed, Ok(Answer::Renewed(secs(lease))));
    }

    fn owner(&self, token: Token) -> u64 {
        self.table.places[self.table.holders[&token.fence]].conn.0
    }
}

const ADOPTED: Result<(), Refusal> = Ok(());
const KEPT: Result<(), Refusal> = Ok(());

#[test]
fn an_adopted_grant_ends_with_its_new_connection() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.adopt(2, "k", token, 10), ADOPTED);
    world.disconnect(1, AtClose::Release);
    assert!(world.is_held("k", token));
    world.renew_over(2, "k", token, 10);
    world.disconnect(2, AtClose::Release);
    assert!(!world.is_held("k", token));
}

#[test]
fn a_late_adopt_costs_no_lock() {
    // The client gave up connection 2 before its `adopt` arrived, and came back over connection 3.
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.adopt(3, "k", token, 10), ADOPTED);
    world.renew_over(3, "k", token, 10);
    assert_eq!(world.adopt(2, "k", token, 10), ADOPTED);
    world.disconnect(2, AtClose::Release);
    assert!(world.is_held("k", token));
    assert_eq!(world.owner(token), 0);
    assert_eq!(world.adopt(3, "k", token, 10), ADOPTED);
    assert_eq!(world.owner(token), 3);
}

#[test]
fn a_late_adopt_shortens_no_grant_that_is_kept() {
    let mut world = World::new();
    let token = world.held(2, "k");
    assert_eq!(world.keep("k", token, 3600), KEPT);
    assert_eq!(world.adopt(3, "k", token, 10), ADOPTED);
    world.disconnect(3, AtClose::Release);
    world.advance(secs(3599));
    assert!(world.is_held("k", token));
    assert_eq!(world.table.kept_count, 1);
    let tag = world.table.orphan_tag(token.fence);
    assert_eq!(tag.map(|tag| &**tag), Some("client 2"));
}

#[test]
fn a_late_renewal_shortens_no_grant_that_is_kept() {
    let mut world = World::new();
    let token = world.held(2, "k");
    assert_eq!(world.keep("k", token, 3600), KEPT);
    world.renew_over(2, "k", token, 10);
    world.advance(secs(3599));
    assert!(world.is_held("k", token));
    world.renew_over(2, "k", token, 10);
    world.advance(secs(9));
    assert!(world.is_held("k", token));
    // The client itself may shorten it.
    assert_eq!(world.keep("k", token, 60), KEPT);
    assert_eq!(world.keep("k", token, 5), KEPT);
    world.advance(secs(5));
    assert!(!world.is_held("k", token));
}

#[test]
fn a_late_adopt_leaves_an_orphan_whatever_may_be_kept() {
    let mut world = World::with_caps(Caps {
        max_kept: 0,
        ..NO_CAPS
    });
    let token = world.held(1, "k");
    for conn in [2, 3] {
        assert_eq!(world.adopt(conn, "k", token, 10), ADOPTED);
    }
    world.disconnect(2, AtClose::Release);
    world.disconnect(3, AtClose::Release);
    assert_eq!(world.owner(token), 0);
    assert_eq!(world.table.kept_count, 0);
}

#[test]
fn an_adoption_is_confirmed_by_its_own_connection_alone() {
    for confirms in [false, true] {
        let mut world = World::new();
        let token = world.held(1, "k");
        assert_eq!(world.adopt(2, "k", token, 10), ADOPTED);
        world.renew_over(if confirms { 2 } else { 1 }, "k", token, 10);
        world.disconnect(2, AtClose::Release);
        assert_eq!(world.is_held("k", token), !confirms);
    }
}

#[test]
fn a_second_adopt_confirms_the_first() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.adopt(2, "k", token, 10), ADOPTED);
    assert_eq!(world.adopt(2, "k", token, 10), ADOPTED);
    world.disconnect(2, AtClose::Release);
    assert!(!world.is_held("k", token));
}

#[test]
fn of_two_connections_with_one_token_the_last_has_the_grant() {
    let mut world = World::new();
    let token = world.held(1, "k");
    for conn in [2, 3, 2, 3] {
        assert_eq!(world.adopt(conn, "k", token, 10), ADOPTED);
        assert_eq!(world.owner(token), conn);
    }
    world.disconnect(2, AtClose::Release);
    assert_eq!(world.owner(token), 3);
}

#[test]
fn a_connection_at_its_cap_adopts_only_what_it_has() {
    let mut world = World::with_caps(Caps {
        max_per_connection: 1,
        ..NO_CAPS
    });
    let [one, other] = [(1, "a"), (2, "b")].map(|(conn, key)| world.held(conn, key));
    assert_eq!(world.adopt(1, "b", other, 10), Err(Refusal::MaxLocks));
    assert_eq!(world.owner(other), 2);
    assert_eq!(world.adopt(1, "a", one, 20), ADOPTED);
    // What has run out does not count against the cap.
    world.renew_over(2, "b", other, 60);
    world.advance(secs(20));
    assert_eq!(world.adopt(1, "b", other, 10), ADOPTED);
}

#[test]
fn a_token_that_holds_nothing_adopts_and_keeps_nothing() {
    let mut world = World::new();
    let token = world.held(1, "k");
    let mut forged = token;
    forged.salt.0 ^= 1;
    for (key, token) in [("k", forged), ("other", token)] {
        assert_eq!(world.adopt(2, key, token, 10), Err(Refusal::NotHeld));
        assert_eq!(world.keep(key, token, 10), Err(Refusal::NotHeld));
    }
    world.advance(secs(10));
    assert_eq!(world.adopt(2, "k", token, 10), Err(Refusal::NotHeld));
    assert_eq!(world.keep("k", token, 10), Err(Refusal::NotHeld));
}

#[test]
fn the_phase_one_entry_of_the_old_connection_goes_with_the_slot() {
    let mut world = World::new();
    let token = granted(world.enqueue(1, "k"));
    assert_eq!(world.adopt(2, "k", token, 10), ADOPTED);
    assert_eq!(world.try_wait(1, "k"), Err(Refusal::NotEnqueued));
    assert!(matches!(world.enqueue(1, "k"), Ok(Answer::Queued(_))));
}

#[test]
fn a_kept_grant_lives_until_its_lease_ends() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.keep("k", token, 60), KEPT);
    world.disconnect(1, AtClose::Release);
    let waiter = world.queued(2, "k");
    world.advance(secs(59));
    assert_eq!(world.collect(waiter), Ok(Answer::WouldWait));
    world.advance(secs(1));
    world.collected(waiter);
}

#[test]
fn a_kept_grant_is_released_by_its_token() {
    let mut world = World::new();
    let token = world.held(1, "k");
    assert_eq!(world.keep("k", token, 60), KEPT);
    assert_eq!(world.release("k", token), Ok(()));
    assert_eq!(world.table.orphan_count(), 0);
}

#[test]
fn only_so_many_grants_are_kept_for_so_long() {
    let mut world = World::with_caps(Caps {
        max_kept: 1,
        max_keep_time: secs(60),
        ..NO_CAPS
    });
    let [one, other] = ["a", "b"].map(|key| world.held(1, key));
    assert_eq!(world.keep("a", one, 61), Err(Refusal::NotHeld));
    assert_eq!(world.keep("a", one, 5), KEPT);
    assert_eq!(world.keep("a", one, 5), KEPT);
    assert_eq!(world.keep("b", other, 60), Err(Refusal::MaxLocks));
    assert_eq!(world.owner(other), 1);
    // However it is asked for.
    assert_eq!(world.renew("a", one, 61), Err(Refusal::NotHeld));
    assert_eq!(world.adopt(2, "a", one, 61), Err(Refusal::NotHeld));
    // One that was kept has ended.
    world.advance(secs(5));
    assert_eq!(world.keep("b", other, 60), KEPT);
    // One that is adopted counts until it is certain that its client is back.
    let third = world.held(1, "c");
    assert_eq!(world.adopt(1, "b", other, 10), ADOPTED);
    assert_eq!(world.keep("c", third, 5), Err(Refusal::MaxLocks));
    world.renew_over(1, "b", other, 10);
    assert_eq!(world.keep("c", third, 5), KEPT);
}

#[test]
fn a_server_that_keeps_nothing_says_so() {
    let mut world = World::with_caps(Caps {
        max_kept: 0,
        ..NO_CAPS
    });
    let token = world.held(1, "k");
    assert_eq!(world.keep("k", token, 10), Err(Refusal::NotHeld));
    assert_eq!(world.owner(token), 1);
}

#[test]
fn without_auto_release_a_connection_leaves_orphans() {
    let mut world = World::new();
    let token = world.held(2, "k");
    world.disconnect(2, AtClose::Orphan);
    assert_eq!((world.owner(token), world.table.orphan_count()), (0, 1));
    let tag = world.table.orphan_tag(token.fence);
    assert_eq!(tag.map(|tag| &**tag), Some("client 2"));
    assert_eq!(world.adopt(4, "k", token, 10), ADOPTED);
    world.renew_over(4, "k", token, 10);
    assert_eq!(world.table.orphan_tag(token.fence), None);
}

#[test]
fn a_renewal_leaves_a_restored_holder_an_orphan() {
    let mut world = World::new();
    let record = HolderRecord {
        is_kept: true,
        tag: Some(Arc::from("backup")),
        ..HolderRecord::new("k", Terms::LOCK, token(7), secs(10))
    };
    assert!(world.table.restore(&record, world.now));
    world.renew_over(1, "k", token(7), 20);
    assert_eq!(world.owner(token(7)), 0);
    assert_eq!(world.adopt(1, "k", token(7), 10), ADOPTED);
    assert_eq!(world.owner(token(7)), 1);
}

#[test]
fn a_journal_is_told_what_is_kept_and_for_how_long() {
    let mut world = World::new();
    world.table.note_changes(Recording::All);
    let token = world.held(2, "k");
    world.renew_over(2, "k", token, 600);
    assert_eq!(world.keep("k", token, 60), KEPT);
    assert_eq!(world.adopt(1, "k", token, 10), ADOPTED);
    world.renew_over(1, "k", token, 20);
    let changes = world.table.changes().map(std::mem::take);
    let noted = changes.iter().flatten().map(|change| match &change.news {
        News::Held(grant) => (grant.record.lease.as_secs(), grant.record.is_kept),
        _ => panic!("it is held"),
    });
    let noted: Vec<(u64, bool)> = noted.collect();
    assert_eq!(noted, [(10, false), (600, false), (60, true), (20, false)]);
}
