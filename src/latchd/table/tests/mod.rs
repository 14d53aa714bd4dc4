//! The table on a virtual clock: scenarios, random histories against a naive model, and the
//! invariants that hold after every step of either.

#[cfg(feature = "cluster")]
mod changes;
mod counters;
mod crashes;
mod events;
pub(crate) mod histories;
mod lasting;
mod model;
mod orphans;
#[cfg(test)]
mod past_holders;
mod proofs;
mod scenarios;
mod settling;
mod weights;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::MAX_ENDED;
use super::orphans::ORPHANS;
use super::queue::Place;
use super::*;
use crate::wire::terms::{Limit, Terms, Weight};
use crate::wire::token::Salt;

/// Gives the fences 1, 2, 3 ... unless it is out of them.
struct CountingFences {
    last_fence: u64,
    is_out: Arc<AtomicBool>,
}

impl FenceSource for CountingFences {
    fn next_fence(&mut self) -> Option<u64> {
        if self.is_out.load(Ordering::Relaxed) {
            return None;
        }
        self.last_fence += 1;
        Some(self.last_fence)
    }
}

/// The salt that connections bring along where it does not matter.
const SALT: Salt = Salt(0x5a5a);

fn token(fence: u64) -> Token {
    Token {
        fence: Fence(fence),
        salt: SALT,
    }
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const NO_CAPS: Caps = Caps {
    max_locks: usize::MAX,
    max_grants: usize::MAX,
    max_per_connection: usize::MAX,
    max_waiters: None,
    max_waiters_total: usize::MAX,
    max_kept: usize::MAX,
    max_keep_time: Duration::MAX,
    max_hold: Duration::MAX,
};

/// A connection that has enqueued for nothing.
const ELSEWHERE: ConnId = ConnId(99);

const LEASE_EXPIRED: Result<Answer, Refusal> = Err(Refusal::LeaseExpired);

/// A table, its clock, and a switch for its mint.
struct World {
    table: LockTable,
    now: Instant,
    out_of_tokens: Arc<AtomicBool>,
    /// Once the mint has failed, a slot may be free while a client waits.
    has_lacked_tokens: bool,
}

impl World {
    fn new() -> World {
        World::with_caps(NO_CAPS)
    }

    fn with_caps(caps: Caps) -> World {
        let out_of_tokens = Arc::new(AtomicBool::new(false));
        let fences = CountingFences {
            last_fence: 0,
            is_out: Arc::clone(&out_of_tokens),
        };
        World {
            table: LockTable::new(caps, Box::new(fences)),
            now: Instant::now(),
            out_of_tokens,
            has_lacked_tokens: false,
        }
    }

    /// The table as a visit finds it, and the time.
    fn visit(&mut self, scope: Scope<'_>) -> (&mut LockTable, Instant) {
        while self.table.has_due(scope, self.now) {
            self.table.expire_some(1, self.now);
        }
        (&mut self.table, self.now)
    }

    fn advance(&mut self, time: Duration) {
        self.now += time;
    }

    fn mint_is_out(&mut self, is_out: bool) {
        self.has_lacked_tokens |= is_out;
        self.out_of_tokens.store(is_out, Ordering::Relaxed);
    }

    /// Asks for a lock with a lease of ten seconds.
    fn lock(&mut self, conn: u64, key: &str) -> Result<Answer, Refusal> {
        self.ask(conn, key, Kind::Lock, 1, 10)
    }

    /// Asks for a slot of a semaphore with a lease of ten seconds.
    fn slot(&mut self, conn: u64, key: &str, limit: u32) -> Result<Answer, Refusal> {
        self.ask(conn, key, Kind::Semaphore, limit, 10)
    }

    fn ask(
        &mut self,
        conn: u64,
        key: &str,
        kind: Kind,
        limit: u32,
        lease: u64,
    ) -> Result<Answer, Refusal> {
        let limit = Limit::new(limit).expect("a limit above zero");
        self.claim(conn, &Ask::plain(key, kind, limit, secs(lease)))
    }

    fn claim(&mut self, conn: u64, ask: &Ask<'_>) -> Result<Answer, Refusal> {
        let (table, now) = self.visit(Scope::Ask(ConnId(conn), ask));
        let claim = table.acquire(claimant(conn), ask, now);
        self.check();
        claim
    }

    /// Enqueues for a lock with a lease of ten seconds.
    fn enqueue(&mut self, conn: u64, key: &str) -> Result<Answer, Refusal> {
        let ask = lock_of(key);
        let (table, now) = self.visit(Scope::Ask(ConnId(conn), &ask));
        let answer = table.enqueue(claimant(conn), &ask, now);
        self.check();
        answer
    }

    fn try_wait(&mut self, conn: u64, key: &str) -> Result<Answer, Refusal> {
        let (table, now) = self.visit(Scope::Key(key));
        let answer = table.try_collect_enqueued(ConnId(conn), key, Kind::Lock, now);
        self.check();
        answer
    }

    /// Whether `token` is that of a live holder of a lock.
    fn is_held(&mut self, key: &str, token: Token) -> bool {
        let (table, _) = self.visit(Scope::Key(key));
        let is_held = table.find_holder(key, Kind::Lock, token).is_ok();
        self.check();
        is_held
    }

    /// Asks for a lock that must be free.
    fn held(&mut self, conn: u64, key: &str) -> Token {
        granted(self.lock(conn, key))
    }

    /// Asks for a lock that must be taken.
    fn queued(&mut self, conn: u64, key: &str) -> Ticket {
        ticket(self.lock(conn, key))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Answer, Refusal> {
        self.catch_up_for(ticket);
        let answer = self.table.collect(ticket, self.now);
        self.check();
        answer
    }

    /// Ends the leases that are due of the key that a ticket is for.
    fn catch_up_for(&mut self, ticket: Ticket) {
        let place = &self.table.places[ticket.place];
        if !matches!(place.state, PlaceState::Ended(_)) {
            let key = self.table.keys[place.key].key.clone();
            self.visit(Scope::Key(key.as_str()));
        }
    }

    /// Collects a grant that must be there.
    fn collected(&mut self, ticket: Ticket) -> Token {
        match self.collect(ticket) {
            Ok(Answer::Granted(grant)) => grant.token,
            other => panic!("not granted but {other:?}"),
        }
    }

    fn cancel(&mut self, ticket: Ticket) {
        self.catch_up_for(ticket);
        // The drain may have dismissed it.
        let _ = self.table.cancel(ticket, self.now);
        self.check();
    }

    /// Releases a lock over another connection.
    fn release(&mut self, key: &str, token: Token) -> Result<(), Refusal> {
        let (table, now) = self.visit(Scope::Key(key));
        let released = table.release(ELSEWHERE, key, Kind::Lock, token, None, now);
        self.check();
        released.map(|_| ())
    }

    fn renew(&mut self, key: &str, token: Token, lease: u64) -> Result<(), Refusal> {
        self.renewed(key, token, lease).map(|_| ())
    }

    fn renewed(&mut self, key: &str, token: Token, lease: u64) -> Result<Answer, Refusal> {
        let (table, now) = self.visit(Scope::Key(key));
        let renewed = table.renew(ELSEWHERE, key, Kind::Lock, token, secs(lease), now);
        self.check();
        renewed
    }

    fn disconnect(&mut self, conn: u64, holdings: AtClose) {
        let tag = histories::tag_of(conn).map(Arc::from);
        self.table.disconnect(ConnId(conn), holdings, tag);
        self.check();
        while !self.table.release_some(ConnId(conn), 1, self.now) {
            self.check();
        }
        self.check();
    }

    fn drain(&mut self) {
        let (table, now) = self.visit(Scope::Everything);
        table.begin_drain(now);
    }

    fn listed(
        &mut self,
        listing: Option<Listing>,
        at_most: usize,
    ) -> (Vec<KeySnapshot>, Option<Listing>) {
        let (table, now) = self.visit(Scope::Everything);
        table.snapshot(listing, at_most, now)
    }

    fn expire(&mut self) {
        self.table.expire_some(usize::MAX, self.now);
        self.check();
    }

    fn resolved(&mut self) -> Vec<u64> {
        std::iter::from_fn(|| self.table.pop_resolved().map(|conn| conn.0)).collect()
    }

    fn check(&self) {
        check_invariants(&self.table, self.has_lacked_tokens);
    }
}

/// Asking for a lock with a lease of ten seconds.
fn lock_of(key: &str) -> Ask<'_> {
    Ask::plain(key, Kind::Lock, Limit::ONE, secs(10))
}

/// The clients of connections from this number on cannot adopt.
const RAW: u64 = 1 << 20;

fn claimant(conn: u64) -> Claimant {
    Claimant {
        conn: ConnId(conn),
        salt: SALT,
        can_adopt: conn < RAW,
    }
}

fn granted(claim: Result<Answer, Refusal>) -> Token {
    match claim {
        Ok(Answer::Granted(grant)) => grant.token,
        other => panic!("not granted but {other:?}"),
    }
}

fn ticket(claim: Result<Answer, Refusal>) -> Ticket {
    match claim {
        Ok(Answer::Queued(ticket)) => ticket,
        other => panic!("not queued but {other:?}"),
    }
}

impl<'a> Ask<'a> {
    /// A claim of a whole lock or of one slot, which may join a queue of any length.
    pub fn plain(key: &'a str, kind: Kind, limit: Limit, lease: Duration) -> Ask<'a> {
        Ask {
            key,
            terms: Terms::plain(kind, limit),
            lease,
            max_waiters: None,
        }
    }

    fn with_weight(mut self, count: u32) -> Self {
        self.terms.weight = Weight::new(count).expect("above zero");
        self
    }
}

/// What a client says that adopts an exclusive lock.
fn proof(key: &str, token: Token) -> Proof<'_> {
    Proof {
        key,
        terms: Terms::LOCK,
        token,
        numbers: [].into(),
        age: None,
    }
}

/// What holds after every operation.
fn check_invariants(table: &LockTable, has_lacked_tokens: bool) {
    let mut seen = Seen::default();
    let may_wait = table.must_go_on_granting || table.leases.len() >= table.caps.max_grants;
    for (name, id) in &table.names {
        let queue = &table.keys[*id];
        assert_eq!(name, &queue.key);
        assert!(
            has_lacked_tokens || may_wait || table.next_in_line(*id).is_none(),
            "{name:?}: it is a client's turn, and it waits"
        );
        seen.key(table, *id);
    }
    assert_eq!(table.keys.iter().count(), table.names.len());
    seen.check(table);
    for (conn, entry) in &table.conns {
        check_connection(table, *conn, entry);
    }
}

/// What the keys say about everything else.
#[derive(Default)]
struct Seen {
    holder_count: usize,
    waiter_count: usize,
    idle_count: usize,
    semaphore_count: usize,
    /// The waiters whose turn it is.
    owed: BTreeSet<u64>,
    enqueued_count: usize,
    numbers: BTreeSet<(KeyId, u32)>,
    kept_count: usize,
}

impl Seen {
    fn key(&mut self, table: &LockTable, id: KeyId) {
        let queue = &table.keys[id];
        let holders: Vec<PlaceId> = queue.holders.iter(&table.places).collect();
        let waiters: Vec<PlaceId> = queue.waiters.iter(&table.places).collect();
        assert_eq!(holders.len(), queue.holders.len());
        assert_eq!(waiters.len(), queue.waiters.len());
        let fences = holders.iter().map(|id| table.places[*id].fence());
        assert!(fences.is_sorted(), "holders are not in order of grants");
        let arrivals = waiters.iter().map(|id| arrival(table, *id));
        assert!(arrivals.is_sorted(), "waiters are not in order of arrival");
        for holder in &holders {
            let fence = table.places[*holder].fence().expect("a holder");
            assert_eq!(table.holders.get(&fence), Some(holder));
            let end = table.places[*holder].lease_end().expect("a holder");
            assert_eq!(table.leases.get(&end), Some(holder));
        }
        for place in holders.iter().chain(&waiters) {
            self.place(table, id, *place);
        }
        let weights = holders.iter().map(|id| table.places[*id].weight.get());
        let slot_count = queue.kind.slot_count(queue.limit);
        assert_eq!(queue.free + weights.sum::<u32>(), slot_count, "miscounted");
        let next = table.next_in_line(id);
        self.owed.extend(next.map(|id| arrival(table, id)));
        if queue.is_idle() {
            self.idle_count += 1;
            assert!(table.idle.iter(&table.keys).any(|idle| idle == id));
        } else {
            self.semaphore_count += usize::from(queue.kind == Kind::Semaphore);
        }
        if let Some(max) = table.caps.max_waiters {
            assert!(waiters.len() <= max, "more waiters than the cap");
        }
        self.holder_count += holders.len();
        self.waiter_count += waiters.len();
    }

    fn place(&mut self, table: &LockTable, key: KeyId, id: PlaceId) {
        let place = &table.places[id];
        assert_eq!(place.key, key);
        let enqueued = table.enqueued.get(&(place.conn, key)) == Some(&id);
        assert_eq!(enqueued, place.is_enqueued, "phase-one entries disagree");
        self.enqueued_count += usize::from(enqueued);
        if let Some(entry) = table.conns.get(&place.conn) {
            let list = if place.is_told {
                &entry.told
            } else {
                &entry.untold
            };
            assert!(
                list.iter(&table.places).any(|own| own == id),
                "a place its connection forgot"
            );
        } else {
            panic!("a place without a connection");
        }
        self.kept_count += usize::from(place.is_kept);
        let numbers = place.fence().map(|fence| table.numbers.of(fence));
        for number in &*numbers.unwrap_or_default() {
            assert!(*number < table.keys[key].limit.get());
            assert!(self.numbers.insert((key, *number)), "a number twice");
        }
        if place.is_provisional {
            assert!(place.is_told && place.conn != ORPHANS);
        } else {
            let is_orphan = place.conn == ORPHANS;
            let has_tag = place.fence().and_then(|fence| table.orphan_tag(fence));
            assert!(is_orphan || !place.is_kept && has_tag.is_none());
        }
    }

    fn check(&self, table: &LockTable) {
        assert!(
            table.names.len() <= table.caps.max_locks,
            "more keys than the cap"
        );
        assert_eq!(self.holder_count, table.leases.len());
        assert_eq!(self.holder_count, table.holders.len());
        assert_eq!(self.waiter_count, table.waiter_count);
        assert_eq!(self.enqueued_count, table.enqueued.len());
        let mut numbers = BTreeSet::new();
        for (key, run) in table.numbers.runs() {
            assert!(!self.numbers.contains(&(key, run.end)), "a run in parts");
            numbers.extend(run.map(|number| (key, number)));
        }
        assert_eq!(self.numbers, numbers);
        assert_eq!(self.numbers.len(), table.numbers.count());
        let Counters {
            grants,
            releases,
            expiries,
            breaks,
            abandonments,
            ..
        } = table.counters;
        let ended_count = releases + expiries + breaks + abandonments;
        assert_eq!(grants, ended_count + self.holder_count as u64);
        assert_eq!(self.kept_count, table.kept_count);
        assert!(self.kept_count <= table.caps.max_kept);
        let mut tagged = table.orphan_tags.keys();
        assert!(tagged.all(|fence| table.holders.contains_key(fence)));
        assert_eq!(self.semaphore_count, table.semaphore_count);
        let leaving = table.conns.values().filter(|entry| entry.leaving.is_some());
        assert_eq!(leaving.count(), table.leaving_count);
        let owed = table.owed.keys().copied().collect();
        assert_eq!(self.owed, owed, "the slots owed to waiters are wrong");
        let idle = table.idle.iter(&table.keys);
        let since: Vec<Instant> = idle.map(|key| table.keys[key].last_used).collect();
        assert_eq!(self.idle_count, since.len());
        assert!(since.is_sorted(), "idle keys are not in order");
        let has_ended = |place: &Place| matches!(place.state, PlaceState::Ended(_));
        let places = table.places.iter().filter(|(_, place)| !has_ended(place));
        assert_eq!(self.holder_count + self.waiter_count, places.count());
        assert!(
            self.holder_count <= table.caps.max_grants,
            "more slots than the cap"
        );
        assert!(
            self.waiter_count <= table.caps.max_waiters_total,
            "more waiters than the cap"
        );
    }
}

fn arrival(table: &LockTable, id: PlaceId) -> u64 {
    match table.places[id].state {
        PlaceState::Waiting { arrival } => arrival,
        other => panic!("not waiting but {other:?}"),
    }
}

fn check_connection(table: &LockTable, conn: ConnId, entry: &ConnectionEntry) {
    let mut count = 0;
    for (list, is_told) in [(&entry.told, true), (&entry.untold, false)] {
        for id in list.iter(&table.places) {
            let place = &table.places[id];
            assert_eq!((place.conn, place.is_told), (conn, is_told));
            let has_ended = matches!(place.state, PlaceState::Ended(_));
            assert!(!(has_ended && place.is_enqueued));
            count += usize::from(!has_ended);
        }
    }
    assert_eq!(count, entry.count, "{conn}: miscounted");
    assert!(
        conn == ORPHANS || count <= table.caps.max_per_connection,
        "{conn}: more slots and places than the cap"
    );
    let expired = entry.ended.iter();
    let expired = expired.filter(|(_, _, refusal)| *refusal == Refusal::LeaseExpired);
    assert!(expired.count() <= MAX_ENDED);
}
