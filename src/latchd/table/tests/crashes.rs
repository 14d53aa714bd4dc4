//! Servers that crash one after the other, with clients that bring back their grants in any order,
//! clients that cannot, and requests that come late.

use super::histories::Random;
use super::lasting::LONGEST_ORDINARY;
use super::*;

/// A grant as its client knows it.
#[derive(Debug)]
struct Known {
    key: &'static str,
    terms: Terms,
    token: Token,
    numbers: Arc<[u32]>,
    conn: u64,
    /// When the lease ends.
    until: Instant,
    /// Whether the grant has not ended. The client may not know.
    is_live: bool,
    /// Whether no server has noted that the grant has ended. Its token may be believed.
    is_unnoted: bool,
    /// Whether the present server knows the grant, or has refused it.
    is_settled: bool,
}

/// The servers at one state file.
struct Servers {
    world: World,
    random: Random,
    grants: BTreeMap<Fence, HeldGrant>,
    dead: BTreeMap<Fence, Instant>,
    /// The grants of clients that can adopt.
    proofs: BTreeSet<Fence>,
    known: Vec<Known>,
    waiting: Vec<(Ticket, (&'static str, Terms), u64)>,
    last_conn: u64,
    last_fence: BTreeMap<&'static str, Fence>,
    /// How many grants were brought back, how many after their end, and how many proofs of ended
    /// grants were refused.
    seen: [usize; 3],
}

const LEASES: [u64; 4] = [10, 30, LONGEST_ORDINARY, 200];

impl Servers {
    fn new(seed: u64) -> Servers {
        Servers {
            world: World::proving(1, &[]),
            random: Random::Seed(seed),
            grants: BTreeMap::new(),
            dead: BTreeMap::new(),
            proofs: BTreeSet::new(),
            known: Vec::new(),
            waiting: Vec::new(),
            last_conn: 0,
            last_fence: BTreeMap::new(),
            seen: [0; 3],
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
        let conn = self.last_conn + if self.random.one_in(4) { RAW } else { 0 };
        let weight = 1 + u32::try_from(self.random.below(3)).expect("a small number");
        let (key, kind, limit, weight) = match self.random.below(3) {
            0 => ("lock", Kind::Lock, 1, Weight::WHOLE.get()),
            1 => ("lock", Kind::Lock, 1, 1),
            _ => ("slots", Kind::Semaphore, 3, weight),
        };
        let limit = Limit::new(limit).expect("above zero");
        let ask = Ask::plain(key, kind, limit, secs(lease)).with_weight(weight);
        match self.world.claim(conn, &ask) {
            Ok(Answer::Granted(grant)) => self.granted(grant, (key, ask.terms), conn),
            Ok(Answer::Queued(ticket)) => self.waiting.push((ticket, (key, ask.terms), conn)),
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
    fn granted(&mut self, grant: Grant, (key, terms): (&'static str, Terms), conn: u64) {
        let Grant { token, lease } = grant;
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
        assert_eq!(self.world.table.settling_until(), None);
        self.world
            .table
            .number_slots(ConnId(conn), key, token.fence);
        let numbers = self.world.table.numbers.of(token.fence);
        let until = now + lease;
        if conn < RAW {
            self.proofs.insert(token.fence);
        }
        let (is_live, is_unnoted, is_settled) = (true, false, true);
        self.known.push(Known {
            key,
            terms,
            token,
            numbers,
            conn,
            until,
            is_live,
            is_unnoted,
            is_settled,
        });
    }

    fn renew(&mut self, at: usize, lease: u64) {
        let it = &mut self.known[at];
        let (conn, kind) = (ConnId(it.conn), it.terms.kind);
        let (table, now) = self.world.visit(Scope::Key(it.key));
        let renewed = table.renew(conn, it.key, kind, it.token, secs(lease), now);
        if let Ok(Answer::Renewed(lease)) = renewed {
            assert!(it.is_live || it.is_unnoted);
            it.until = if it.is_live { now + lease } else { it.until };
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
        let (table, now) = self.world.visit(Scope::Key(it.key));
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
        let kind = it.terms.kind;
        if table
            .release(conn, it.key, kind, it.token, None, now)
            .is_ok()
        {
            it.is_live = false;
            it.is_unnoted = !is_foreign || is_nobodys;
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
        self.world.disconnect(conn, AtClose::Release);
        let holders = &self.world.table.holders;
        for it in self.known.iter_mut().filter(|it| it.conn == conn) {
            it.is_live &= !it.is_settled || holders.contains_key(&it.token.fence);
        }
    }

    /// Sends the adoption of a grant that its client holds, or has held: such a request may come
    /// late.
    fn adopt(&mut self, at: usize, lease: u64) {
        let it = &self.known[at];
        let now = self.world.now;
        self.last_conn += 1;
        let numbers = Arc::clone(&it.numbers);
        let proof = Proof {
            key: it.key,
            terms: it.terms,
            token: it.token,
            numbers,
            age: None,
        };
        let was_known = self.world.table.holders.contains_key(&it.token.fence);
        let is_raw = !self.proofs.contains(&it.token.fence);
        let adopted = (self.world.table).adopt(ConnId(self.last_conn), &proof, secs(lease), now);
        self.world.table.take_given_way();
        let it = &mut self.known[at];
        let is_right = match it.is_live {
            is_live if is_raw && (is_live || it.is_unnoted) => adopted.is_ok() == was_known,
            false if it.is_unnoted => true,
            is_live => adopted.is_ok() == is_live,
        };
        assert!(is_right, "{it:?} {adopted:?}");
        self.seen[0] += usize::from(adopted.is_ok() && !was_known && it.is_live);
        self.seen[1] += usize::from(adopted.is_ok() && !it.is_live);
        self.seen[2] += usize::from(adopted.is_err());
        match adopted {
            Ok(Answer::Renewed(lease)) if it.is_live => {
                (it.until, it.conn, it.is_settled) = (now + lease, self.last_conn, true);
            }
            Err(_) if it.is_live => {}
            _ => drop(self.known.remove(at)),
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
        let mut next = World::proving(first + 1, &dead);
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
        let changes = self.world.table.changes().expect("they are noted");
        for change in std::mem::take(changes) {
            match change.news {
                News::Held(grant) => drop(self.grants.insert(change.fence, grant)),
                News::Ended => drop(self.grants.remove(&change.fence)),
                News::Dead(until) => drop(self.dead.insert(change.fence, until)),
            }
        }
    }

    /// Asserts that the server has all live grants that it knows, and no number twice.
    fn check(&mut self) {
        let now = self.world.now;
        let settle = secs(LONGEST_ORDINARY);
        self.known.retain(|it| it.until + settle > now);
        let holders = &self.world.table.holders;
        for it in self
            .known
            .iter_mut()
            .filter(|it| it.until <= now && it.is_live)
        {
            // A kept grant goes on behind the back of a client that has adopted it for less.
            let is_over = it.is_settled && !holders.contains_key(&it.token.fence);
            (it.is_live, it.is_unnoted) = (false, !is_over);
        }
        // Of slots, another holder cannot always be told from one that has ended.
        let is_lock = |it: &Known| it.terms.kind == Kind::Lock;
        self.known.retain(|it| !it.is_unnoted || is_lock(it));
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

#[test]
fn after_any_crashes_no_living_client_loses_its_grant() {
    let seen = (0..200).map(|seed| {
        let mut servers = Servers::new(seed);
        let steps = std::panic::AssertUnwindSafe(|| (0..150).for_each(|_| servers.step()));
        let played = std::panic::catch_unwind(steps);
        assert!(played.is_ok(), "the history of seed {seed} failed");
        servers.seen
    });
    let seen = seen.reduce(|a, b| [a[0] + b[0], a[1] + b[1], a[2] + b[2]]);
    let seen = seen.expect("some histories");
    assert!(seen.iter().all(|count| *count > 50), "{seen:?}");
}
