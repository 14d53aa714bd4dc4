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
