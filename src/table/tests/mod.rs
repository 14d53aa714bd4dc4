//! The table on a virtual clock: scenarios, random histories against a naive model, and the
//! invariants that hold after every step of either.

mod histories;
mod model;
mod scenarios;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::MAX_DEAD;
use super::*;
use crate::token::Salt;

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
    max_slots: usize::MAX,
    max_per_connection: usize::MAX,
    max_waiters: None,
    max_waiters_total: usize::MAX,
};

/// A connection that has enqueued for nothing.
const ELSEWHERE: ConnId = ConnId(99);

const LEASE_EXPIRED: Option<Answer> = Some(Answer::Refused(Refusal::LeaseExpired));

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

    fn advance(&mut self, time: Duration) {
        self.now += time;
    }

    fn mint_is_out(&mut self, is_out: bool) {
        self.has_lacked_tokens |= is_out;
        self.out_of_tokens.store(is_out, Ordering::Relaxed);
    }

    /// Asks for a lock with a lease of ten seconds.
    fn lock(&mut self, conn: u64, key: &str) -> Result<Claim, Refusal> {
        self.ask(conn, key, Kind::Lock, 1, 10)
    }

    /// Asks for a slot of a semaphore with a lease of ten seconds.
    fn slot(&mut self, conn: u64, key: &str, limit: u32) -> Result<Claim, Refusal> {
        self.ask(conn, key, Kind::Semaphore, limit, 10)
    }

    fn ask(
        &mut self,
        conn: u64,
        key: &str,
        kind: Kind,
        limit: u32,
        lease: u64,
    ) -> Result<Claim, Refusal> {
        let limit = Limit::new(limit).expect("a limit above zero");
        let ask = Ask {
            key,
            kind,
            limit,
            lease: secs(lease),
        };
        let claim = self.table.acquire(claimant(conn), &ask, self.now);
        self.check();
        claim
    }

    /// Enqueues for a lock with a lease of ten seconds.
    fn enqueue(&mut self, conn: u64, key: &str) -> Answer {
        let answer = self.table.enqueue(claimant(conn), &lock_of(key), self.now);
        self.check();
        answer
    }

    fn try_wait(&mut self, conn: u64, key: &str) -> Option<Answer> {
        let answer = self.table.try_wait(ConnId(conn), key, Kind::Lock, self.now);
        self.check();
        answer
    }

    /// Whether `token` is that of a live holder of a lock.
    fn is_held(&mut self, key: &str, token: Token) -> bool {
        let found = self.table.find_holder(key, Kind::Lock, token, self.now);
        self.check();
        found.is_ok()
    }

    /// Tries to get a lock with a lease of ten seconds.
    fn try_lock(&mut self, conn: u64, key: &str) -> Result<Option<Grant>, Refusal> {
        let tried = self
            .table
            .try_acquire(claimant(conn), &lock_of(key), self.now);
        self.check();
        tried
    }

    /// Asks for a lock that must be free.
    fn held(&mut self, conn: u64, key: &str) -> Token {
        granted(self.lock(conn, key))
    }

    /// Asks for a lock that must be taken.
    fn queued(&mut self, conn: u64, key: &str) -> Ticket {
        ticket(self.lock(conn, key))
    }

    fn collect(&mut self, ticket: Ticket) -> Option<Answer> {
        let answer = self.table.collect(ticket, self.now);
        self.check();
        answer
    }

    /// Collects a grant that must be there.
    fn collected(&mut self, ticket: Ticket) -> Token {
        match self.collect(ticket) {
            Some(Answer::Granted(grant)) => grant.token,
            other => panic!("not granted but {other:?}"),
        }
    }

    fn cancel(&mut self, ticket: Ticket) {
        self.table.cancel(ticket, self.now);
        self.check();
    }

    /// Releases a lock over another connection.
    fn release(&mut self, key: &str, token: Token) -> Result<(), Refusal> {
        let released = self
            .table
            .release(ELSEWHERE, key, Kind::Lock, token, self.now);
        self.check();
        released
    }

    fn renew(&mut self, key: &str, token: Token, lease: u64) -> Result<(), Refusal> {
        let renewed = self
            .table
            .renew(key, Kind::Lock, token, secs(lease), self.now);
        self.check();
        renewed
    }

    fn disconnect(&mut self, conn: u64, holdings: Holdings) {
        self.table.disconnect(ConnId(conn), holdings, self.now);
        self.check();
        while !self.table.release_some(ConnId(conn), 1, self.now) {
            self.check();
        }
        self.check();
    }

    fn expire(&mut self) {
        self.table.expire_some(usize::MAX, self.now);
        self.check();
    }

    fn resolved(&mut self) -> Vec<u64> {
        self.table.take_resolved().map(|conn| conn.0).collect()
    }

    fn check(&self) {
        check_invariants(&self.table, self.has_lacked_tokens);
    }
}

/// Asking for a lock with a lease of ten seconds.
fn lock_of(key: &str) -> Ask<'_> {
    Ask {
        key,
        kind: Kind::Lock,
        limit: Limit::ONE,
        lease: secs(10),
    }
}

fn claimant(conn: u64) -> Claimant {
    Claimant {
        conn: ConnId(conn),
        salt: SALT,
    }
}

fn acquired(answer: Answer) -> Token {
    match answer {
        Answer::Granted(grant) => grant.token,
        other => panic!("not acquired but {other:?}"),
    }
}

fn granted(claim: Result<Claim, Refusal>) -> Token {
    match claim {
        Ok(Claim::Acquired(grant)) => grant.token,
        other => panic!("not acquired but {other:?}"),
    }
}

fn ticket(claim: Result<Claim, Refusal>) -> Ticket {
    match claim {
        Ok(Claim::Queued(ticket)) => ticket,
        other => panic!("not queued but {other:?}"),
    }
}

/// What holds after every operation.
fn check_invariants(table: &LockTable, has_lacked_tokens: bool) {
    assert!(
        table.keys.len() <= table.caps.max_locks,
        "more keys than the cap"
    );
    let mut leases = BTreeSet::new();
    let mut idle = BTreeSet::new();
    let mut waiting = BTreeSet::new();
    let mut owed = BTreeSet::new();
    for (key, queue) in &table.keys {
        assert_eq!(key, queue.key());
        assert!(
            has_lacked_tokens || queue.next_in_line().is_none(),
            "{key:?}: a slot is free while a client waits"
        );
        owed.extend(queue.next_in_line().map(|ticket| (ticket, key.clone())));
        if queue.is_idle() {
            idle.insert((queue.last_used, key.clone()));
        }
        for (fence, holder) in queue.holders() {
            leases.insert((holder.expires_at, (*fence, key.clone())));
            if let Some(entry) = table.conns.get(&holder.conn) {
                assert_eq!(
                    entry.held.get(fence),
                    Some(key),
                    "a holding its connection forgot"
                );
            }
        }
        waiting.extend(queue.waiters().map(|ticket| (*ticket, key.clone())));
        if let Some(max) = table.caps.max_waiters {
            assert!(
                queue.waiter_count() <= max,
                "{key:?}: more waiters than the cap"
            );
        }
    }
    assert_eq!(
        leases,
        table.leases.iter().cloned().collect(),
        "leases and holders disagree"
    );
    assert_eq!(
        idle,
        table.idle.iter().cloned().collect(),
        "the list of idle keys is wrong"
    );

    assert_eq!(owed, table.owed, "the slots owed to waiters are wrong");
    assert_eq!(waiting.len(), table.waiter_count, "waiters are miscounted");

    let places = table.tickets.iter();
    let waiting_places = places
        .filter(|(_, place)| matches!(place.state, PlaceState::Waiting))
        .map(|(ticket, place)| (*ticket, place.key.clone()));
    assert_eq!(
        waiting,
        waiting_places.collect(),
        "queues and tickets disagree"
    );
    for (ticket, place) in &table.tickets {
        assert!(
            table.conns[&place.conn].tickets.contains(ticket),
            "a ticket its connection forgot"
        );
    }
    let ticket_count: usize = table.conns.values().map(|entry| entry.tickets.len()).sum();
    assert_eq!(
        ticket_count,
        table.tickets.len(),
        "a connection remembers a spent ticket"
    );
    let held_count: usize = table.conns.values().map(|entry| entry.held.len()).sum();
    assert!(
        held_count <= leases.len(),
        "a connection remembers a slot it has lost"
    );

    // A slot that is owed to a waiter is taken, so that no newcomer can leave it without one.
    let owed_count: usize = table.keys.values().map(owed_count).sum();
    assert!(
        leases.len() + owed_count <= table.caps.max_slots,
        "more slots than the cap"
    );
    assert!(
        waiting.len() <= table.caps.max_waiters_total,
        "more waiters than the cap"
    );
    for (conn, entry) in &table.conns {
        let waits = |ticket: &&Ticket| matches!(table.tickets[ticket].state, PlaceState::Waiting);
        let place_count = entry.tickets.iter().filter(waits).count();
        assert_eq!(place_count, entry.waiting_count, "{conn}: miscounted");
        assert!(
            entry.held.len() + place_count <= table.caps.max_per_connection,
            "{conn}: more slots and places than the cap"
        );
        check_phase_one(entry);
    }
}

/// An entry that is not dead has a ticket or a slot, and few are dead.
fn check_phase_one(entry: &ConnectionEntry) {
    let mut dead_count = 0;
    for (_, key, phase_one) in entry.enqueued.iter() {
        match phase_one {
            PhaseOne::Queued(ticket) => assert!(entry.tickets.contains(&ticket), "{key:?}"),
            PhaseOne::Granted(grant) => {
                assert_eq!(entry.held.get(&grant.token.fence), Some(key));
            }
            PhaseOne::Dead => dead_count += 1,
        }
    }
    assert_eq!(dead_count, entry.enqueued.dead_count());
    assert!(dead_count <= MAX_DEAD);
}

/// How many free slots of the key are owed to waiters.
fn owed_count(queue: &KeyQueue) -> usize {
    let limit = usize::try_from(queue.limit().get()).expect("a small limit");
    (limit - queue.holders().len()).min(queue.waiter_count())
}
