//! Servers that crash one after the other, with clients that bring back their grants in any order.

use super::histories::Random;
use super::lasting::LONGEST_ORDINARY;
use super::*;

/// A grant as its client knows it.
#[derive(Debug)]
struct Known {
    key: &'static str,
    terms: ProvedTerms<'static>,
    token: Token,
    numbers: Arc<[u32]>,
    conn: u64,
    /// When the lease ends.
    until: Instant,
    /// Whether the grant has not ended. The client may not know.
    is_live: bool,
    /// Whether the present server knows the grant, or has refused it.
    is_settled: bool,
}

/// The servers at one state file.
struct Servers {
    world: World,
    random: Random,
    are_dead_lost: bool,
    grants: BTreeMap<Fence, LastingGrant>,
    dead: BTreeMap<Fence, Instant>,
    known: Vec<Known>,
    waiting: Vec<(Ticket, ProvedTerms<'static>, u64)>,
    last_conn: u64,
    last_fence: BTreeMap<&'static str, Fence>,
    /// How many grants were brought back, and how many were made while a server settled.
    seen: (usize, usize),
}

const LEASES: [u64; 4] = [10, 30, LONGEST_ORDINARY, 200];

impl Servers {
    fn new(seed: u64, are_dead_lost: bool) -> Servers {
        Servers {
            world: World::proving(1, &[]),
            random: Random::Seed(seed),
            are_dead_lost,
            grants: BTreeMap::new(),
            dead: BTreeMap::new(),
            known: Vec::new(),
            waiting: Vec::new(),
            last_conn: 0,
            last_fence: BTreeMap::new(),
            seen: (0, 0),
        }
    }

    fn step(&mut self) {
        let lease = *self.random.pick(&LEASES).expect("there are some");
        let at = self.random.below(1 + self.known.len() as u64) as usize;
        match (self.random.below(14), at < self.known.len()) {
            (0..=3, _) => self.claim(lease),
            (4, true) => self.renew(at, lease),
            (5, true) => self.keep(at, lease),
            (6, true) => self.release(at, false),
            (7, true) => self.release(at, true),
            (8, true) => self.break_it(at),
            (9, true) => self.cut(at),
            (10 | 11, true) => {
                let at = self.lost().unwrap_or(at);
                self.adopt(at, lease);
            }
            (12, _) => self.world.advance(secs(self.random.below(30))),
            (13, _) if self.random.one_in(2) => self.crash(),
            _ => {}
        }
        self.world.expire();
        self.collect();
        self.write();
        self.check();
    }

    /// A grant that the present server does not know.
    fn lost(&mut self) -> Option<usize> {
        let is_lost = |at: &usize| !self.known[*at].is_settled;
        let lost: Vec<usize> = (0..self.known.len()).filter(is_lost).collect();
        self.random.pick(&lost).copied()
    }

    fn claim(&mut self, lease: u64) {
        self.last_conn += 1;
        let weight = 1 + u32::try_from(self.random.below(3)).expect("a small number");
        let (key, kind, limit, weight) = match self.random.below(3) {
            0 => ("lock", Kind::Lock, 1, Weight::WHOLE),
            1 => ("lock", Kind::Lock, 1, Weight::ONE),
            _ => (
                "slots",
                Kind::Semaphore,
                3,
                Weight::new(weight).expect("above zero"),
            ),
        };
        let limit = Limit::new(limit).expect("above zero");
        let terms = ProvedTerms {
            key,
            kind,
            limit,
            weight,
        };
        let ask = Ask {
            weight,
            ..Ask::plain(key, kind, limit, secs(lease))
        };
        match self.world.claim(self.last_conn, &ask) {
            Ok(Answer::Granted(grant)) => self.granted(grant, terms, self.last_conn),
            Ok(Answer::Queued(ticket)) => self.waiting.push((ticket, terms, self.last_conn)),
            other => panic!("{other:?}"),
        }
    }

    fn collect(&mut self) {
        for (ticket, terms, conn) in std::mem::take(&mut self.waiting) {
            match self.world.collect(ticket) {
                Ok(Answer::Granted(grant)) => self.granted(grant, terms, conn),
                Ok(Answer::WouldWait) => self.waiting.push((ticket, terms, conn)),
                Err(Refusal::LeaseExpired) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Asserts that a new grant shares no slot with a live one, and has a higher fence.
    fn granted(&mut self, grant: Grant, terms: ProvedTerms<'static>, conn: u64) {
        let Grant { token, lease } = grant;
        let key = terms.key;
        let slot_count = terms.kind.slot_count(terms.limit);
        let now = self.world.now;
        let live = self
            .known
            .iter()
            .filter(|it| it.key == key && it.is_live && it.until > now);
        let taken: u32 = live.map(|it| it.terms.weight.get()).sum();
        let known = &self.known;
        assert!(
            taken + terms.weight.get() <= slot_count,
            "{key} has too many: {known:#?}"
        );
        let last = self.last_fence.insert(key, token.fence);
        assert!(last < Some(token.fence));
        let is_settling = self.world.table.settling_until().is_some();
        self.seen.1 += usize::from(is_settling);
        self.world
            .table
            .number_slots(ConnId(conn), key, token.fence);
        let numbers = self.world.table.numbers.of(token.fence);
        let until = now + lease;
        let (is_live, is_settled) = (true, true);
        self.known.push(Known {
            key,
            terms,
            token,
            numbers,
            conn,
            until,
            is_live,
            is_settled,
        });
    }

    fn renew(&mut self, at: usize, lease: u64) {
        let it = &mut self.known[at];
        let (conn, kind, now) = (ConnId(it.conn), it.terms.kind, self.world.now);
        let renewed = self
            .world
            .table
            .renew(conn, it.key, kind, it.token, secs(lease), now);
        if let Ok(Answer::Renewed(lease)) = renewed {
            assert!(it.is_live || self.are_dead_lost);
            it.until = now + lease;
        }
    }

    fn keep(&mut self, at: usize, lease: u64) {
        let it = &mut self.known[at];
        if self.world.keep(it.key, it.token, lease).is_ok() {
            (it.until, it.conn) = (self.world.now + secs(lease), ORPHANS.0);
        }
    }

    /// Releases a grant over the connection of its client, or over another one. Whoever releases a
    /// kept grant is its client.
    fn release(&mut self, at: usize, is_foreign: bool) {
        let it = &mut self.known[at];
        let table = &mut self.world.table;
        let place = table
            .holders
            .get(&it.token.fence)
            .map(|id| &table.places[*id]);
        let is_nobodys = place.is_some_and(|place| place.is_kept && place.conn == ORPHANS);
        let conn = if is_foreign || is_nobodys {
            ELSEWHERE
        } else {
            ConnId(it.conn)
        };
        let (kind, now) = (it.terms.kind, self.world.now);
        if table
            .release(conn, it.key, kind, it.token, None, now)
            .is_ok()
        {
            it.is_live = false;
            if !is_foreign || is_nobodys {
                self.known.remove(at);
            }
        }
    }

    fn break_it(&mut self, at: usize) {
        let it = &mut self.known[at];
        let now = self.world.now;
        if (self.world.table)
            .break_grant(it.key, it.token.fence, ELSEWHERE, now)
            .is_some()
        {
            it.is_live = false;
        }
    }

    /// The server notices the end of a connection, whose client can adopt.
    fn cut(&mut self, at: usize) {
        let conn = self.known[at].conn;
        if conn == ORPHANS.0 {
            return;
        }
        self.world.disconnect(conn, Holdings::ReleaseAdoptable);
        let holders = &self.world.table.holders;
        for it in self.known.iter_mut().filter(|it| it.conn == conn) {
            it.is_live &= !it.is_settled || holders.contains_key(&it.token.fence);
        }
    }

    fn adopt(&mut self, at: usize, lease: u64) {
        let it = &self.known[at];
        let now = self.world.now;
        if it.until <= now {
            return;
        }
        self.last_conn += 1;
        let numbers = Arc::clone(&it.numbers);
        let proof = Proof {
            terms: it.terms,
            token: it.token,
            numbers,
        };
        let was_known = self.world.table.holders.contains_key(&it.token.fence);
        let adopted = (self.world.table).adopt(ConnId(self.last_conn), &proof, secs(lease), now);
        let given_way = self.world.table.take_given_way();
        assert!(given_way.is_empty() || self.are_dead_lost, "{given_way:?}");
        self.seen.0 += usize::from(adopted.is_ok() && !was_known);
        let it = &mut self.known[at];
        if it.is_live || !self.are_dead_lost {
            assert_eq!(adopted.is_ok(), it.is_live, "{it:?} {adopted:?}");
        }
        if let Ok(Answer::Renewed(lease)) = adopted {
            (it.until, it.conn, it.is_settled) = (now + lease, self.last_conn, true);
        } else {
            self.known.remove(at);
        }
        let holders = &self.world.table.holders;
        for it in self.known.iter_mut().filter(|it| it.is_settled) {
            it.is_live &= it.until <= now || holders.contains_key(&it.token.fence);
        }
        self.world.check();
    }

    /// The next server has what the file says.
    fn crash(&mut self) {
        self.write();
        self.waiting.clear();
        let now = self.world.now;
        self.dead.retain(|_, until| *until > now);
        let first = self.world.table.fences.next_fence().expect("there is one");
        let dead: Vec<Fence> = self.dead.keys().copied().collect();
        let mut next = World::proving(first + 1, if self.are_dead_lost { &[] } else { &dead });
        if self.are_dead_lost {
            self.dead.clear();
            next.lose_dead();
        }
        next.now = now;
        for grant in std::mem::take(&mut self.grants).into_values() {
            let lease = grant
                .until
                .map(|until| until - now)
                .unwrap_or(grant.record.lease);
            assert!(next.table.restore(
                &HolderRecord {
                    lease,
                    ..grant.record
                },
                now
            ));
        }
        next.table.settle_until(now + secs(LONGEST_ORDINARY));
        self.world = next;
        let holders = &self.world.table.holders;
        for it in &mut self.known {
            it.is_settled = holders.contains_key(&it.token.fence);
        }
    }

    fn write(&mut self) {
        let changes = self.world.table.lasting_changes().expect("they are noted");
        for change in std::mem::take(changes) {
            match change.news {
                LastingNews::Lasts(grant) => drop(self.grants.insert(change.fence, grant)),
                LastingNews::Over => drop(self.grants.remove(&change.fence)),
                LastingNews::Dead(until) => drop(self.dead.insert(change.fence, until)),
            }
        }
    }

    /// Asserts that the server has all live grants that it knows, and no number twice.
    fn check(&mut self) {
        let now = self.world.now;
        self.known.retain(|it| it.until > now);
        let holders = &self.world.table.holders;
        for it in self.known.iter().filter(|it| it.is_live) {
            assert!(
                !it.is_settled || holders.contains_key(&it.token.fence),
                "{it:?}"
            );
        }
        let live = self.known.iter().filter(|it| it.is_live);
        let mut numbers: Vec<u32> = live.flat_map(|it| it.numbers.to_vec()).collect();
        numbers.sort_unstable();
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    }
}

/// Plays random histories; returns what was seen in all of them.
fn play(are_dead_lost: bool) -> (usize, usize) {
    let seeds = 0..100;
    let seen = seeds.map(|seed| {
        let mut servers = Servers::new(seed, are_dead_lost);
        let steps = std::panic::AssertUnwindSafe(|| (0..150).for_each(|_| servers.step()));
        let played = std::panic::catch_unwind(steps);
        assert!(played.is_ok(), "the history of seed {seed} failed");
        servers.seen
    });
    seen.reduce(|(a, b), (c, d)| (a + c, b + d)).expect("some")
}

#[test]
fn after_any_crashes_all_live_grants_come_back_and_no_dead_one() {
    let (brought_back, granted_early) = play(false);
    assert!(
        brought_back > 100 && granted_early > 50,
        "{brought_back} {granted_early}"
    );
}

/// A dead client may come back, and gives way if its slots are proved to have another holder.
#[test]
fn if_dead_grants_are_missing_nothing_is_granted_early() {
    let (brought_back, granted_early) = play(true);
    assert!(
        brought_back > 100 && granted_early == 0,
        "{brought_back} {granted_early}"
    );
}
