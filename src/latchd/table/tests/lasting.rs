//! What a state file is told of lasting grants.

use super::histories::Random;
use super::*;

/// Grants with longer leases last.
pub const LONGEST_ORDINARY: u64 = 60;

/// A table, and the lasting grants as a state file has them.
struct Filed {
    world: World,
    grants: BTreeMap<Fence, HeldGrant>,
    dead: BTreeSet<Fence>,
    /// How many changes there were.
    change_count: usize,
}

impl Filed {
    fn new() -> Filed {
        let mut world = World::new();
        world.table.note_changes(Recording::Lasting {
            longest_ordinary: secs(LONGEST_ORDINARY),
        });
        Filed {
            world,
            grants: BTreeMap::new(),
            dead: BTreeSet::new(),
            change_count: 0,
        }
    }

    /// A server that follows a crash of this one.
    fn restarted(&self) -> Filed {
        let mut next = Filed::new();
        next.world.now = self.world.now;
        for grant in self.grants.values() {
            let left = grant.until.map(|until| until - self.world.now);
            let record = HolderRecord {
                lease: left.unwrap_or(grant.record.lease),
                ..grant.record.clone()
            };
            assert!(next.world.table.restore(&record, next.world.now));
            next.world.check();
        }
        next.write();
        next
    }

    fn write(&mut self) {
        let changes = self.world.table.changes();
        for change in std::mem::take(changes.expect("they are noted")) {
            let is_of_grant = !matches!(change.news, News::Dead(_));
            self.change_count += usize::from(is_of_grant);
            match change.news {
                News::Held(grant) => drop(self.grants.insert(change.fence, grant)),
                News::Ended => assert!(self.grants.remove(&change.fence).is_some()),
                News::Dead(_) => assert!(self.dead.insert(change.fence)),
            }
        }
    }

    /// The grants, each with the seconds that are left until its end or, with a `+`, its lease.
    /// Asserts how many changes there were since the last call.
    fn after_changes(&mut self, count: usize) -> Vec<String> {
        self.write();
        assert_eq!(std::mem::take(&mut self.change_count), count);
        let describe = |(fence, grant): (&Fence, &HeldGrant)| match grant.until {
            Some(until) => format!("{fence}: {}", (until - self.world.now).as_secs()),
            None => format!("{fence}: +{}", grant.record.lease.as_secs()),
        };
        self.grants.iter().map(describe).collect()
    }

    fn long(&mut self, conn: u64, key: &str, lease: u64) -> Result<Answer, Refusal> {
        self.world.ask(conn, key, Kind::Lock, 1, lease)
    }
}

#[test]
fn a_long_lease_is_noted_once_and_not_at_each_renewal() {
    let mut filed = Filed::new();
    let token = granted(filed.long(1, "k", 61));
    assert_eq!(filed.after_changes(1), ["1: +61"]);
    filed.world.advance(secs(20));
    filed.world.renew_over(1, "k", token, 61);
    assert_eq!(filed.after_changes(0), ["1: +61"]);
    filed.world.renew_over(1, "k", token, 100);
    assert_eq!(filed.after_changes(1), ["1: +100"]);
    filed.world.renew_over(1, "k", token, 60);
    assert_eq!(filed.after_changes(1), [""; 0]);
    filed.world.renew_over(1, "k", token, 100);
    filed.world.disconnect(1, AtClose::Release);
    assert_eq!(filed.after_changes(2), [""; 0]);
}

#[test]
fn a_long_lease_is_noted_when_its_client_is_told() {
    let mut filed = Filed::new();
    let first = filed.world.held(1, "k");
    let waiter = ticket(filed.long(2, "k", 90));
    let gone = ticket(filed.long(3, "k", 90));
    assert!(filed.world.table.will_be_recorded(waiter));
    let key = filed.world.table.key_of(waiter);
    assert_eq!(key.map(Key::as_str), Some("k"));
    filed.world.release("k", first).expect("it is held");
    assert_eq!(filed.after_changes(0), [""; 0]);
    let token = filed.world.collected(waiter);
    assert_eq!(filed.after_changes(1), ["2: +90"]);
    filed.world.release("k", token).expect("it is held");
    filed.world.cancel(gone);
    assert_eq!(filed.after_changes(1), [""; 0]);
}

#[test]
fn after_a_hand_over_a_lease_goes_on_and_is_noted_as_a_whole() {
    let mut old = Filed::new();
    let token = granted(old.long(1, "k", 100));
    old.world.advance(secs(30));
    let (_, holders) = old.world.table.hand_over(old.world.now);
    let (_, record) = &holders[0];
    assert_eq!((record.lease, record.left), (secs(100), Some(secs(70))));
    let mut next = Filed::new();
    assert!(next.world.table.restore(record, next.world.now));
    assert_eq!(next.after_changes(1), ["1: +100"]);
    next.world.advance(secs(70));
    assert!(!next.world.is_held("k", token));
}

#[test]
fn a_grant_is_as_old_at_the_next_server() {
    let mut old = Filed::new();
    let token = granted(old.long(1, "k", 100));
    old.world.advance(secs(30));
    let (_, holders) = old.world.table.hand_over(old.world.now);
    let (_, record) = &holders[0];
    let claimed = |age: Option<Duration>| Proof {
        age,
        ..proof("k", token)
    };
    let undated = HolderRecord {
        age: None,
        ..record.clone()
    };
    // The record counts, and a client only if there is none.
    for (record, age, expected) in [
        (record, None, 30),
        (record, Some(secs(500)), 30),
        (&undated, None, 0),
        (&undated, Some(secs(500)), 500),
        (&undated, Some(Duration::MAX), 0),
    ] {
        let World { table, now, .. } = &mut Filed::new().world;
        assert!(table.restore(record, *now));
        let adopted = table.adopt(ConnId(1), &claimed(age), secs(100), *now);
        assert!(adopted.is_ok());
        let queue = table.queue("k", 1, *now).expect("it is held");
        assert_eq!(queue.holders[0].age, secs(expected));
    }
}

#[test]
fn no_lease_becomes_longer_than_the_file_can_say() {
    let mut filed = Filed::new();
    let ordinary = filed.world.held(1, "a");
    let long = granted(filed.long(1, "b", 100));
    let kept = filed.world.held(1, "c");
    filed.world.keep("c", kept, 200).expect("it is held");
    filed.write();
    filed.world.table.set_writable(false, filed.world.now);
    assert_eq!(filed.long(1, "d", 61), Err(Refusal::NotWritten));
    assert_eq!(filed.world.keep("a", ordinary, 1), Err(Refusal::NotWritten));
    let held = filed.long(1, "d", 60);
    assert!(matches!(held, Ok(Answer::Granted(_))), "{held:?}");
    let mut renewed = |key, token| filed.world.renewed(key, token, 1000);
    let at_most = |lease| Ok(Answer::Renewed(secs(lease)));
    assert_eq!(renewed("a", ordinary), at_most(60));
    assert_eq!(renewed("b", long), at_most(100));
    assert_eq!(renewed("c", kept), at_most(200));
    filed.change_count = 0;
    assert_eq!(filed.after_changes(0), ["2: +100", "3: 200"]);
    // Ends are carried out nonetheless.
    filed.world.release("b", long).expect("it is held");
    filed.world.table.set_writable(true, filed.world.now);
    filed.world.renew("a", ordinary, 1000).expect("it is held");
    assert_eq!(filed.after_changes(2), ["1: +1000", "3: 200"]);
}

#[test]
fn a_restored_grant_is_kept_no_longer_than_the_server_allows() {
    let mut filed = Filed::new();
    let token = filed.world.held(1, "k");
    filed.world.keep("k", token, 1000).expect("it is held");
    filed.write();
    let mut next = World::with_caps(Caps {
        max_keep_time: secs(50),
        ..NO_CAPS
    });
    let grant = &filed.grants[&token.fence];
    let record = HolderRecord {
        lease: secs(1000),
        ..grant.record.clone()
    };
    assert!(next.table.restore(&record, next.now));
    next.advance(secs(49));
    assert!(next.is_held("k", token));
    next.advance(secs(1));
    assert!(!next.is_held("k", token));
}

/// A grant as its client knows it.
struct Known {
    key: &'static str,
    token: Token,
    /// The lease that the client was told last.
    lease: u64,
}

/// Plays a random history, and checks after each step that the file has the lasting grants, and
/// that the next server would restore them.
fn play(seed: u64) {
    const KEYS: [&str; 4] = ["a", "b", "c", "d"];
    const LEASES: [u64; 4] = [5, 60, 61, 500];
    let mut random = Random::Seed(seed);
    let mut filed = Filed::new();
    let mut known: Vec<Known> = Vec::new();
    for step in 0..80 {
        let conn = 1 + random.below(3);
        let lease = *random.pick(&LEASES).expect("there are some");
        let key = *random.pick(&KEYS).expect("there are some");
        let is_at = random.below(1 + known.len() as u64) as usize;
        let world = &mut filed.world;
        match (random.below(9), known.get_mut(is_at)) {
            (0 | 1, _) => {
                let ask = Ask::plain(key, Kind::Lock, Limit::ONE, secs(lease));
                let tried = world.table.try_acquire(claimant(conn), &ask, world.now);
                if let Ok(Answer::Granted(Grant { token, .. })) = tried {
                    known.push(Known { key, token, lease });
                }
            }
            (2 | 3, Some(it)) => {
                let renewed = (world.table).renew(
                    ConnId(conn),
                    it.key,
                    Kind::Lock,
                    it.token,
                    secs(lease),
                    world.now,
                );
                if renewed.is_ok() {
                    it.lease = lease;
                }
            }
            (4, Some(it)) if world.keep(it.key, it.token, lease).is_ok() => it.lease = lease,
            (5, Some(it)) if world.adopt(conn, it.key, it.token, lease).is_ok() => it.lease = lease,
            (6, Some(it)) => drop(world.release(it.key, it.token)),
            (7, _) => world.advance(secs(random.below(40))),
            (8, _) if random.one_in(4) => world.disconnect(conn, AtClose::Release),
            _ => {}
        }
        filed.world.check();
        filed.world.expire();
        filed.write();
        known.retain(|it| filed.world.table.holders.contains_key(&it.token.fence));
        let mut lasting = 0;
        for it in &known {
            let fence = it.token.fence;
            let place = &filed.world.table.places[filed.world.table.holders[&fence]];
            let (end, _) = place.lease_end().expect("it is held");
            let grant = filed.grants.get(&fence);
            let is_right = match (place.is_kept, grant) {
                (true, Some(grant)) => grant.until == Some(end) && grant.record.is_kept,
                (false, Some(grant)) => {
                    let is_covered = match grant.until {
                        Some(until) => until == end,
                        None => secs(it.lease) <= grant.record.lease,
                    };
                    it.lease > LONGEST_ORDINARY && is_covered
                }
                (is_kept, None) => !is_kept && it.lease <= LONGEST_ORDINARY,
            };
            assert!(is_right, "seed {seed}, step {step}: {grant:?}");
            lasting += usize::from(grant.is_some());
        }
        assert_eq!(lasting, filed.grants.len(), "seed {seed}, step {step}");
        if random.one_in(20) {
            let next = filed.restarted();
            known.retain(|it| filed.grants.contains_key(&it.token.fence));
            // The lease has begun anew, with the longest that the file knew.
            for it in &mut known {
                let place = &next.world.table.places[next.world.table.holders[&it.token.fence]];
                it.lease = place.lease.as_secs();
            }
            let last_fence = filed.grants.keys().map(|fence| fence.0).max();
            filed = next;
            while filed.world.table.fences.next_fence() < last_fence {}
        }
    }
}

#[test]
fn after_any_history_the_file_has_the_lasting_grants() {
    (0..500).for_each(play);
}
