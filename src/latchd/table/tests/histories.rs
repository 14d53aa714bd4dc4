//! Random histories: the same events to the table and to the model, compared after each.
//!
//! A failure prints the seed of its history; `LATCHD_TEST_SEED=<seed>` plays that one first.

use super::model::{Began, Model, ModelHolder, ModelKey};
use super::*;

/// How many histories each run tries, and how many a long one.
const HISTORIES: u64 = 5_000;
const MANY_HISTORIES: u64 = 100_000;
const STEPS: usize = 60;

/// What decides a history.
pub enum Random {
    /// A small generator (splitmix64): reproducible from its seed on any machine.
    Seed(u64),
    /// The bytes that a fuzzer has made up, one a choice, the last one first.
    Choices(Vec<u8>),
}

impl Random {
    fn next(&mut self) -> u64 {
        let state = match self {
            Random::Seed(state) => state,
            Random::Choices(bytes) => return bytes.pop().unwrap_or_default().into(),
        };
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    pub fn pick<'a, T>(&mut self, things: &'a [T]) -> Option<&'a T> {
        let count = u64::try_from(things.len()).expect("a short list");
        (count > 0).then(|| &things[usize::try_from(self.below(count)).expect("an index")])
    }
}

#[test]
fn random_histories_agree_with_the_naive_model() {
    agree_with_the_naive_model(HISTORIES);
}

#[test]
#[ignore = "long: cargo test --lib histories -- --ignored"]
fn many_random_histories_agree_with_the_naive_model() {
    agree_with_the_naive_model(MANY_HISTORIES);
}

fn agree_with_the_naive_model(count: u64) {
    let first = match std::env::var("LATCHD_TEST_SEED") {
        Ok(seed) => seed.parse().expect("LATCHD_TEST_SEED is a number"),
        Err(_) => {
            let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since_epoch.map_or(1, |age| age.as_secs() << 20)
        }
    };
    println!("seeds from {first}; replay one with LATCHD_TEST_SEED=<seed>");
    for seed in first..first + count {
        let played = std::panic::catch_unwind(|| play(seed, |_| {}));
        assert!(
            played.is_ok(),
            "history failed; replay it with LATCHD_TEST_SEED={seed}"
        );
    }
}

#[test]
fn the_comparison_notices_a_table_that_forgets_its_order() {
    // A checker that has never failed proves nothing: tamper with the queues now and then.
    let noticed = (0..500).filter(|seed| {
        let hook = |history: &mut History| {
            let table = &mut history.world.table;
            let keys: Vec<KeyId> = table.names.values().copied().collect();
            for key in keys {
                let waiters = &mut table.keys[key].waiters;
                if waiters.len() > 1 {
                    let first = waiters.pop_first(&mut table.places);
                    waiters.push(&mut table.places, first.expect("not empty"));
                }
            }
        };
        let quiet = std::panic::catch_unwind(|| play(*seed, hook));
        quiet.is_err()
    });
    assert!(noticed.count() > 5);
}

/// Requests to the table in an order that the bytes decide, compared with the naive model after
/// each. Returns how many there were.
pub fn play_choices(bytes: &[u8]) -> usize {
    let bytes = bytes.iter().rev().copied().collect();
    let mut history = History::new(Random::Choices(bytes));
    let mut steps = 0;
    while matches!(&history.random, Random::Choices(bytes) if !bytes.is_empty()) {
        history.step();
        history.compare();
        steps += 1;
    }
    steps
}

/// Plays one history; `meddle` is called before each step.
fn play(seed: u64, meddle: impl Fn(&mut History)) {
    let mut history = History::new(Random::Seed(seed));
    for _ in 0..STEPS {
        meddle(&mut history);
        history.step();
        history.compare();
    }
}

struct History {
    world: World,
    model: Model,
    random: Random,
    /// Tickets not spent yet.
    tickets: Vec<KnownTicket>,
    /// Every token ever granted, with its key and kind.
    tokens: Vec<(String, Kind, Token)>,
    /// Connections that have disconnected and never come back.
    gone: BTreeSet<u64>,
    /// The holders by all changes so far, if the table notes changes.
    journal: BTreeMap<Fence, HolderRecord>,
}

#[derive(Clone)]
struct KnownTicket {
    ticket: Ticket,
    conn: u64,
    key: String,
    kind: Kind,
}

impl History {
    fn new(mut random: Random) -> History {
        let mut cap = |most: u64| (!random.one_in(2)).then(|| 1 + random.below(most) as usize);
        let caps = Caps {
            max_grants: cap(5).unwrap_or(usize::MAX),
            max_per_connection: cap(3).unwrap_or(usize::MAX),
            max_waiters: cap(3),
            max_waiters_total: cap(5).unwrap_or(usize::MAX),
            max_kept: cap(3).map_or(0, |cap| cap - 1),
            max_keep_time: secs(cap(8).unwrap_or(60) as u64),
            max_hold: cap(9).map_or(Duration::MAX, |cap| secs(cap as u64 + 6)),
            max_locks: 1 + random.below(4) as usize,
        };
        let mut world = World::with_caps(caps);
        let mut model = Model::new(caps, world.now);
        if random.one_in(4) {
            let until = world.now + Duration::from_millis(250 * random.below(60));
            world.table.settle_until(until);
            model.settling_until = Some(until);
        }
        if random.one_in(2) {
            world.table.note_changes(Recording::All);
        }
        History {
            world,
            model,
            random,
            tickets: Vec::new(),
            tokens: Vec::new(),
            gone: BTreeSet::new(),
            journal: BTreeMap::new(),
        }
    }

    fn step(&mut self) {
        match self.random.below(26) {
            0..=3 => self.acquire(),
            4 | 5 => self.collect(),
            6 => self.cancel(),
            7..=9 => self.enqueue(),
            10..=12 => self.wait(),
            13 | 14 => self.release(),
            15 => self.renew(),
            16 => self.ask_about(),
            17 => self.disconnect(),
            18 => self.sweep(),
            19..=21 => self.adopt(),
            22 | 23 => self.keep_grant(),
            24 => self.break_grant(),
            _ => self.change_the_world(),
        }
        self.pass_time();
    }

    fn conn(&mut self) -> u64 {
        let base = 1 + self.random.below(5);
        // A connection that has gone is followed by a new one.
        (base..)
            .step_by(5)
            .find(|conn| !self.gone.contains(conn))
            .expect("endless")
    }

    fn name(&mut self) -> &'static str {
        ["a", "b", "c", "d", "e"][self.random.below(5) as usize]
    }

    fn kind(&mut self) -> Kind {
        match self.random.below(3) {
            0 => Kind::Semaphore,
            _ => Kind::Lock,
        }
    }

    fn ask(&mut self) -> Ask<'static> {
        let (key, kind) = (self.name(), self.kind());
        let limit = match kind {
            Kind::Lock => 1,
            Kind::Semaphore => 1 + self.random.below(3) as u32,
        };
        let weight = match kind {
            Kind::Lock if self.random.one_in(2) => Weight::WHOLE,
            Kind::Semaphore if self.random.one_in(2) => Weight::ONE,
            Kind::Lock => Weight::ONE,
            Kind::Semaphore => {
                Weight::new(1 + self.random.below(limit.into()) as u32).expect("above zero")
            }
        };
        let max_waiters = self.random.one_in(4).then(|| self.random.below(3) as u32);
        Ask {
            key,
            terms: Terms {
                kind,
                limit: Limit::new(limit).expect("above zero"),
                weight,
            },
            lease: secs(1 + self.random.below(6)),
            max_waiters,
        }
    }

    fn acquire(&mut self) {
        let (conn, ask) = (self.conn(), self.ask());
        let is_a_try = self.random.one_in(4);
        let ideal = self.model.acquire(conn, &ask, is_a_try);
        let (table, now) = self.world.visit(Scope::Ask(ConnId(conn), &ask));
        let real = if is_a_try {
            table.try_acquire(claimant(conn), &ask, now)
        } else {
            table.acquire(claimant(conn), &ask, now)
        };
        assert_eq!(real.map(Began::of), ideal);
        match real {
            Ok(Answer::Granted(grant)) => self.learn(ask.key, ask.terms.kind, grant),
            Ok(Answer::Queued(ticket)) => self.keep(ticket, conn, ask.key, ask.terms.kind),
            _ => {}
        }
    }

    fn enqueue(&mut self) {
        let (conn, ask) = (self.conn(), self.ask());
        let (table, now) = self.world.visit(Scope::Ask(ConnId(conn), &ask));
        let real = table.enqueue(claimant(conn), &ask, now);
        assert_eq!(
            real.map(Began::of),
            self.model.enqueue(conn, &ask).map(Some)
        );
        if let Ok(Answer::Granted(grant)) = real {
            self.learn(ask.key, ask.terms.kind, grant);
        }
    }

    /// The second phase, mostly of an entry; one that would wait may do so with its ticket.
    fn wait(&mut self) {
        let entry = self.random.pick(&self.model.entries).cloned();
        let (conn, key, kind) = match entry {
            Some(entry) if !self.random.one_in(8) => (entry.conn, entry.name, entry.kind),
            _ => (self.conn(), self.name().to_owned(), self.kind()),
        };
        let (table, now) = self.world.visit(Scope::Key(&key));
        let real = table.try_collect_enqueued(ConnId(conn), &key, kind, now);
        assert_eq!(real, self.model.try_wait(conn, &key, kind));
        match real {
            Ok(Answer::Granted(grant)) => self.learn(&key, kind, grant),
            Ok(Answer::WouldWait) if self.random.one_in(2) => {
                let ticket = self.world.table.take_ticket(ConnId(conn), &key, kind);
                let number = self.model.take_ticket(conn, &key, kind);
                assert_eq!(ticket.map(|ticket| ticket.arrival), number);
                let ticket = ticket.expect("a claim that waits has a ticket");
                self.keep(ticket, conn, &key, kind);
            }
            _ => {}
        }
    }

    fn keep(&mut self, ticket: Ticket, conn: u64, key: &str, kind: Kind) {
        self.tickets.push(KnownTicket {
            ticket,
            conn,
            key: key.to_owned(),
            kind,
        });
    }

    /// Keeps a token for releases and renewals to come.
    fn learn(&mut self, key: &str, kind: Kind, grant: Grant) {
        self.tokens.push((key.to_owned(), kind, grant.token));
    }

    fn collect(&mut self) {
        let Some(known) = self.random.pick(&self.tickets).cloned() else {
            return;
        };
        let real = self.world.collect(known.ticket);
        assert_eq!(real, self.model.collect(known.ticket.arrival));
        match real {
            Ok(Answer::WouldWait) => return,
            Ok(Answer::Granted(grant)) => self.learn(&known.key, known.kind, grant),
            _ => {}
        }
        self.tickets.retain(|kept| kept.ticket != known.ticket);
    }

    fn cancel(&mut self) {
        let Some(KnownTicket { ticket, .. }) = self.random.pick(&self.tickets).cloned() else {
            return;
        };
        self.world.cancel(ticket);
        self.model.cancel(ticket.arrival);
        self.tickets.retain(|kept| kept.ticket != ticket);
    }

    /// A token that was granted once, for the right key or another, genuine or forged.
    fn any_token(&mut self) -> Option<(String, Kind, Token)> {
        let mut found = self.random.pick(&self.tokens)?.clone();
        match self.random.below(8) {
            0 => found.0 = "a".to_owned(),
            1 => found.1 = Kind::Semaphore,
            2 => found.2.salt.0 ^= 1,
            _ => {}
        }
        Some(found)
    }

    fn release(&mut self) {
        let Some((key, kind, token)) = self.any_token() else {
            return;
        };
        let conn = self.conn();
        let (table, now) = self.world.visit(Scope::Key(&key));
        let real = table.release(ConnId(conn), &key, kind, token, None, now);
        assert_eq!(
            real.map(|_| ()),
            self.model.release(conn, &key, kind, token)
        );
    }

    fn renew(&mut self) {
        let Some((key, kind, token)) = self.any_token() else {
            return;
        };
        let (conn, lease) = (self.conn(), secs(1 + self.random.below(6)));
        let (table, now) = self.world.visit(Scope::Key(&key));
        let real = table.renew(ConnId(conn), &key, kind, token, lease, now);
        assert_eq!(real, self.model.renew(conn, &key, kind, token, lease));
    }

    fn adopt(&mut self) {
        let Some((key, _, token)) = self.any_token() else {
            return;
        };
        let (conn, lease) = (self.conn(), secs(1 + self.random.below(6)));
        let (table, now) = self.world.visit(Scope::Everything);
        let real = table.adopt(ConnId(conn), &proof(&key, token), lease, now);
        assert_eq!(real, self.model.adopt(conn, &key, token, lease));
    }

    fn keep_grant(&mut self) {
        let Some((key, _, token)) = self.any_token() else {
            return;
        };
        let lease = secs(1 + self.random.below(12));
        let shared = |conn: ConnId| tag_of(conn.0).map(Arc::from);
        let (table, now) = self.world.visit(Scope::Everything);
        let real = table.keep(&key, token, lease, None, shared, now);
        assert_eq!(
            real.map(|_| ()),
            self.model.keep(&key, token, lease, tag_of)
        );
    }

    fn break_grant(&mut self) {
        let Some((key, _, Token { fence, .. })) = self.any_token() else {
            return;
        };
        let (table, now) = self.world.visit(Scope::Key(&key));
        let real = table.break_grant(&key, fence, ELSEWHERE, now);
        let ideal = self.model.break_grant(&key, fence.0);
        assert_eq!(real.map(|conn| conn.0), ideal);
    }

    fn ask_about(&mut self) {
        let conn = self.conn();
        let now = self.world.now;
        if let Some((key, _, token)) = self.any_token() {
            let table = &mut self.world.table;
            table.number_slots(ConnId(conn), &key, token.fence);
            self.model.number_slots(conn, &key, token.fence.0);
        }
        // Later than any place has ended.
        let later = now + secs(1);
        let idle_since = self.world.table.connection_idle_since(ConnId(conn), later);
        assert_eq!(idle_since == Some(later), self.model.is_busy(conn));
        assert_eq!(
            self.world.table.has_due(Scope::Everything, now),
            self.model.is_behind()
        );
    }

    /// The client ends its stream or its session, or the connection ends in any other way: by a
    /// reset, or because the server ends it. Some replies with grants may not have been sent.
    fn disconnect(&mut self) {
        let conn = self.conn();
        for fence in self.model.told_to(conn) {
            if self.random.one_in(4) {
                self.world.table.abandon_grant(Fence(fence), self.world.now);
                self.model.abandon_grant(fence);
            }
        }
        let holdings = match self.random.below(4) {
            0 => AtClose::Release,
            1 => AtClose::ReleaseAsAsked,
            _ => AtClose::Orphan,
        };
        self.world.disconnect(conn, holdings);
        self.model.disconnect(conn, holdings, tag_of(conn));
        self.tickets.retain(|kept| kept.conn != conn);
        self.gone.insert(conn);
    }

    fn sweep(&mut self) {
        let at_most = self.random.below(4) as usize;
        self.world.table.expire_some(at_most, self.world.now);
        self.model.end_settling();
        (0..at_most).for_each(|_| {
            self.model.end_first();
        });
        let max_idle = secs(self.random.below(4));
        self.world.table.prune(max_idle, usize::MAX, self.world.now);
        self.model.prune(max_idle);
    }

    fn change_the_world(&mut self) {
        if self.random.one_in(12) {
            self.world.drain();
            self.model.begin_drain();
        } else if self.random.one_in(3) {
            let is_out = self.random.one_in(2);
            self.world.mint_is_out(is_out);
            self.model.out_of_tokens = is_out;
        } else {
            self.world.table.grant_owed_slots(self.world.now);
            self.model.grant_owed_slots();
        }
    }

    /// Mostly a little, sometimes exactly to the end of a lease.
    fn pass_time(&mut self) {
        let next = self.world.table.next_deadline();
        match (self.random.below(6), next) {
            (0..=2, _) => {}
            (3, Some(deadline)) if deadline > self.world.now => self.world.now = deadline,
            _ => self
                .world
                .advance(Duration::from_millis(250 * self.random.below(9))),
        }
        self.model.now = self.world.now;
    }

    /// Both must look alike, down to each place in each queue and each phase-one entry.
    fn compare(&mut self) {
        let table = &self.world.table;
        let keys = table.names.values();
        let mut real: Vec<ModelKey> = keys.map(|key| describe(table, *key)).collect();
        real.sort_by(|a, b| a.name.cmp(&b.name));
        let mut ideal = self.model.keys.clone();
        ideal.sort_by(|a, b| a.name.cmp(&b.name));
        for key in real.iter_mut().chain(&mut ideal) {
            if !(key.holders.is_empty() && key.waiters.is_empty()) {
                // Only an idle key's last use is looked at.
                key.last_used = self.world.now;
            }
        }
        assert_eq!(real, ideal);
        assert_eq!(self.real_entries(), self.ideal_entries());
        assert_eq!(table.counters.grants, self.model.last_fence);
        assert_eq!(table.orphan_count(), self.model.told_to(0).len());
        self.world.check();
        self.check_journal();
    }

    /// The changes lead to the holders, each with a lease that does not end before its own.
    fn check_journal(&mut self) {
        let Some(changes) = self.world.table.changes().map(std::mem::take) else {
            return;
        };
        for change in changes {
            match change.news {
                News::Held(grant) => drop(self.journal.insert(change.fence, grant.record)),
                _ => drop(self.journal.remove(&change.fence).expect("it was held")),
            }
        }
        let table = &self.world.table;
        assert_eq!(self.journal.len(), table.holders.len());
        for (fence, record) in &self.journal {
            let id = &table.holders[fence];
            let known = HolderRecord {
                // A holder that becomes an orphan is not noted again for its tag.
                tag: record.tag.clone(),
                ..table.record(*id, *fence, record.lease)
            };
            assert_eq!(*record, known);
            let (end, _) = table.places[*id].lease_end().expect("a holder");
            // A lease can end within a second after what its holder was told.
            assert!(end < self.world.now + record.lease + secs(1), "{record:?}");
        }
    }

    fn real_entries(&self) -> BTreeSet<String> {
        let table = &self.world.table;
        let mut entries = BTreeSet::new();
        // A connection that is gone may leave a holder behind, with its mark.
        let is_there = |((conn, _), _): &(&(ConnId, KeyId), _)| table.conns.contains_key(conn);
        for ((conn, key), id) in table.enqueued.iter().filter(is_there) {
            let (queue, place) = (&table.keys[*key], &table.places[*id]);
            let began = match place.state {
                PlaceState::Waiting { arrival } => Began::Queued(arrival),
                PlaceState::Held { fence, .. } if !place.is_told => Began::Queued(fence.0),
                _ => Began::Acquired(Grant {
                    token: Token {
                        fence: place.fence().expect("a holder"),
                        salt: place.salt,
                    },
                    lease: place.lease,
                }),
            };
            let state: Result<Began, Refusal> = Ok(began);
            entries.insert(format!(
                "{conn} {:?} {} {state:?}",
                queue.kind,
                queue.key.as_str()
            ));
        }
        for (conn, entry) in &table.conns {
            for (kind, key, refusal) in entry.ended.iter() {
                let state: Result<Began, Refusal> = Err(*refusal);
                entries.insert(format!("{conn} {kind:?} {} {state:?}", key.as_str()));
            }
        }
        entries
    }

    fn ideal_entries(&self) -> BTreeSet<String> {
        let entries = self.model.entries.iter();
        let described = entries.map(|entry| {
            let state = self.model.state_of(entry);
            format!("{} {:?} {} {state:?}", entry.conn, entry.kind, entry.name)
        });
        described.collect()
    }
}

/// What the client of a connection says of itself, if it does.
pub fn tag_of(conn: u64) -> Option<String> {
    (conn % 2 == 0).then(|| format!("client {conn}"))
}

fn describe(table: &LockTable, id: KeyId) -> ModelKey {
    let queue = &table.keys[id];
    let holders = queue.holders.iter(&table.places).map(|id| ModelHolder {
        conn: table.places[id].conn.0,
        fence: table.places[id].fence().expect("a holder").0,
        weight: table.places[id].weight.get(),
        numbers: {
            let fence = table.places[id].fence().expect("a holder");
            table.numbers.of(fence).to_vec()
        },
        since: table.places[id].since,
        expires_at: table.places[id].lease_end().expect("a holder").0,
        is_kept: table.places[id].is_kept,
        is_provisional: table.places[id].is_provisional,
        tag: table.places[id]
            .fence()
            .and_then(|fence| table.orphan_tag(fence))
            .map(|tag| tag.to_string()),
    });
    let waiters = queue.waiters.iter(&table.places);
    ModelKey {
        name: queue.key.as_str().to_owned(),
        kind: queue.kind,
        limit: queue.limit.get(),
        holders: holders.collect(),
        waiters: waiters.map(|id| arrival(table, id)).collect(),
        last_used: queue.last_used,
    }
}
