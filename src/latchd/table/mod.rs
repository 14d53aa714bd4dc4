//! Who holds and who waits, for every key, and which claims were enqueued in two phases. Pure: the
//! caller brings the time, random salts and a source of fences.
//!
//! A claim takes a number of slots of a key: its weight. An exclusive lock takes all slots of its
//! key, and a shared lock takes one, so locks and semaphores use the same code. The first waiter is
//! granted its slots as soon as enough of them are free, and no later claim overtakes it. A grant
//! of any weight is one holder with one token and one lease, and counts once against the caps.
//!
//! The caller first ends the expired leases within the [`Scope`] of an operation, by
//! [`LockTable::catch_up`], so an expired lease has no effect even if the reaper has not yet run.
//! Expired leases are always ended in the order in which they ran out.
//!
//! When a holder or a waiter is removed, [`LockTable::promote`] grants the free slots to waiters.
//! If enough slots are free for the first waiter, there are only three reasons not to grant them:
//!
//! - the table still settles: until `settling_until`, clients of the server before it may hold any
//!   key;
//! - there is no fence, or the cap on grants is reached;
//! - this step has granted [`STEP`] claims already, and the next step goes on.
//!
//! **Invariant:** nothing in `table/` reads a clock, takes a mutex, touches a socket or writes a
//! log. No instant passed to the table is earlier than the previous one.

mod changes;
mod connection;
mod counters;
mod events;
mod granting;
mod history;
mod leases;
mod names;
mod numbers;
mod orphans;
mod phase_one;
mod place;
mod proofs;
mod queue;
mod restoring;
mod salts;
mod settling;
mod slab;
mod snapshot;
#[cfg(any(test, fuzzing))]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) mod tests;
mod types;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::time::Instant;

use crate::wire::terms::{Kind, Refusal};
use crate::wire::token::{Fence, FenceSource, Token};
use changes::Changes;
pub use changes::{Change, HeldGrant, News, Recording};
use connection::ConnectionEntry;
pub use counters::{Counters, CountersSnapshot};
pub use events::{ClaimEvent, Fate, GrantEnd};
use history::Histories;
pub use history::{Expectation, KeyHistory, PastClaim, MAX_HISTORIES, PER_HISTORY};
pub use leases::earlier;
pub use names::{ConnId, Key};
use numbers::Numbers;
use orphans::ORPHANS;
use proofs::Proofs;
pub use queue::Ticket;
use queue::{KeyId, KeyList, KeyQueue, PlaceId, PlaceState, Places, Queues};
pub use restoring::HolderRecord;
pub use salts::{Proof, ProofRules, SaltKey};
use slab::Slab;
pub use snapshot::{KeySnapshot, Listing, PlaceSnapshot, KEYS_AT_ONCE};
pub use types::{Answer, Ask, AtClose, Cap, Caps, Claimant, Grant, Scope};

/// How many grants, leases, places, keys or connections one step of a long operation may deal with:
/// about a fifth of a millisecond of work. A disconnect, the end of many leases or the release of
/// one lock may concern a million of them. If that were one step, it would delay every other client
/// for too long.
pub const STEP: usize = 200;

/// All keys, with their holders and waiters.
pub struct LockTable {
    /// Sorted, so that a snapshot can be taken in steps.
    names: BTreeMap<Key, KeyId>,
    keys: Queues,
    places: Places,
    conns: BTreeMap<ConnId, ConnectionEntry>,
    holders: HashMap<Fence, PlaceId, BuildHasherDefault<FenceHasher>>,
    /// The places of all phase-one entries: the claims that a connection has enqueued with `e`, but
    /// for which it has not yet waited with `w`.
    enqueued: BTreeMap<(ConnId, KeyId), PlaceId>,
    /// The holders, sorted by the end of their leases, and then by fence.
    leases: BTreeMap<(Instant, Fence), PlaceId>,
    /// The idle keys. The first one has been idle longest.
    idle: KeyList,
    /// The waiters whose turn it is, but who must wait for a fence, for room under the cap on
    /// grants, or for the next step. Sorted by arrival; each key has at most one.
    owed: BTreeMap<u64, PlaceId>,
    /// Whether the previous step granted as much as one step may, and waiters are still owed slots.
    must_go_on_granting: bool,
    /// Until then, nothing is granted. `None` once the table has settled.
    settling_until: Option<Instant>,
    /// The tag of each orphan, which is a grant without a connection: the name that its client gave
    /// itself.
    orphan_tags: BTreeMap<Fence, Arc<str>>,
    /// The slot numbers in use, for semaphores.
    numbers: Numbers,
    waiter_count: usize,
    /// How many orphans are kept grants. Only these count against the cap on kept grants.
    kept_count: usize,
    /// How many keys are in use as semaphores.
    semaphore_count: usize,
    /// How many closed connections still have places or slots.
    leaving_count: usize,
    pub counters: Counters,
    /// The connections of claims that were queued, and have been granted or dismissed since.
    /// [`LockTable::pop_resolved`] takes them.
    resolved: VecDeque<ConnId>,
    next_arrival: u64,
    /// How many keys have been made since the start.
    keys_made: u64,
    is_draining: bool,
    /// When a hold last ended; `None` if none has ended yet.
    last_hold_ended: Option<Instant>,
    events: Vec<ClaimEvent>,
    notes_all_events: bool,
    histories: Histories,
    /// The changes for a journal or a state file, if there is one.
    changes: Option<Box<Changes>>,
    /// Makes tokens that prove their grants, if there is a state file.
    proofs: Option<Box<Proofs>>,
    /// The connections that lost a grant because a client has proved a newer grant of its slots.
    given_way: Vec<ConnId>,
    caps: Caps,
    /// The cap that caused the latest refusal, until [`LockTable::take_cap_reached`] takes it.
    cap_reached: Option<Cap>,
    fences: Box<dyn FenceSource>,
}

/// Hashes fences. The server gives them one after the other, so no client can choose many that
/// collide, and a multiplication is enough.
#[derive(Default)]
struct FenceHasher(u64);

impl Hasher for FenceHasher {
    fn write_u64(&mut self, fence: u64) {
        self.0 = fence.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("a fence is one number");
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl LockTable {
    pub fn new(caps: Caps, fences: Box<dyn FenceSource>) -> Self {
        LockTable {
            names: BTreeMap::new(),
            keys: Slab::new(),
            places: Slab::new(),
            conns: BTreeMap::new(),
            holders: HashMap::default(),
            enqueued: BTreeMap::new(),
            leases: BTreeMap::new(),
            idle: KeyList::new(),
            owed: BTreeMap::new(),
            must_go_on_granting: false,
            settling_until: None,
            orphan_tags: BTreeMap::new(),
            numbers: Numbers::default(),
            waiter_count: 0,
            kept_count: 0,
            semaphore_count: 0,
            leaving_count: 0,
            counters: Counters::default(),
            resolved: VecDeque::new(),
            keys_made: 0,
            next_arrival: 0,
            is_draining: false,
            last_hold_ended: None,
            events: Vec::new(),
            notes_all_events: false,
            histories: Histories::default(),
            changes: None,
            proofs: None,
            given_way: Vec::new(),
            caps,
            cap_reached: None,
            fences,
        }
    }

    /// Claims a key: the claim is granted now, or queued behind the earlier claims. It is refused
    /// for the first of these reasons that applies:
    ///
    /// - [`Refusal::Draining`]; [`Refusal::NotWritten`] if the grant would be a lasting one, and
    ///   the state file cannot be written; [`Refusal::LimitMismatch`]; [`Refusal::MaxLocks`] if the
    ///   connection has reached its cap;
    /// - if the claim would be granted now: [`Refusal::MaxLocks`] at the cap on grants,
    ///   [`Refusal::NoToken`] while any waiter is owed slots, [`Refusal::MaxLocks`] at the cap on
    ///   keys, [`Refusal::NoToken`] if there is no fence;
    /// - if the claim would wait: [`Refusal::MaxWaiters`] at the claim's own maximum, the cap for
    ///   one key, or the cap for all keys; [`Refusal::MaxLocks`] at the cap on keys. (A claim
    ///   can wait for a key that is not in the table yet only while the table settles.)
    pub fn acquire(
        &mut self,
        claimant: Claimant,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        let answer = self.try_acquire(claimant, ask, now)?;
        if answer != Answer::WouldWait {
            return Ok(answer);
        }
        let key = match self.names.get(ask.key) {
            Some(key) => *key,
            None => self.add_key(ask, now)?,
        };
        self.take_into_use(key);
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let waiting = PlaceState::Waiting { arrival };
        let place = self.add_place(claimant, key, ask, waiting, now);
        let queue = &mut self.keys[key];
        queue.waiters.push(&mut self.places, place);
        self.waiter_count += 1;
        Ok(Answer::Queued(Ticket { arrival, place }))
    }

    /// Claims a key, but never queues. The answer is [`Answer::WouldWait`] if the claim cannot be
    /// granted now. Refuses for the same reasons as [`LockTable::acquire`].
    pub fn try_acquire(
        &mut self,
        claimant: Claimant,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        if self.is_draining {
            return Err(Refusal::Draining);
        }
        self.check_writable(ask.lease)?;
        self.grant_owed_slots(now);
        let known = self.names.get(ask.key).copied();
        if let Some(key) = known {
            self.keys[key].agree(ask.terms)?;
        }
        if self.connection_count(claimant.conn) >= self.caps.max_per_connection {
            return Err(self.refuse_at(Cap::PerConnection));
        }
        let queue = known.map(|key| &self.keys[key]);
        let must_wait = queue.is_some_and(|queue| queue.must_wait(ask.terms.weight, &self.places));
        if !must_wait && !self.is_settling() {
            return self.grant(claimant, known, ask, now).map(Answer::Granted);
        }
        let waiter_count = queue.map_or(0, |queue| queue.waiters.len());
        if ask
            .max_waiters
            .is_some_and(|max| waiter_count >= max as usize)
        {
            self.note_busy(claimant.conn, ask.key);
            return Err(Refusal::MaxWaiters);
        }
        if self.caps.max_waiters.is_some_and(|max| waiter_count >= max) {
            return Err(self.refuse_at(Cap::Waiters));
        }
        if self.waiter_count >= self.caps.max_waiters_total {
            return Err(self.refuse_at(Cap::WaitersTotal));
        }
        Ok(Answer::WouldWait)
    }

    /// Records the cap that a request has reached, and returns the matching refusal.
    fn refuse_at(&mut self, cap: Cap) -> Refusal {
        self.cap_reached = Some(cap);
        match cap {
            Cap::Waiters | Cap::WaitersTotal => Refusal::MaxWaiters,
            Cap::Locks | Cap::Grants | Cap::PerConnection | Cap::Kept => Refusal::MaxLocks,
        }
    }

    /// Takes the cap that caused the latest refusal; `None` if it has been taken already.
    pub fn take_cap_reached(&mut self) -> Option<Cap> {
        self.cap_reached.take()
    }

    /// Returns the result of a queued claim, or [`Answer::WouldWait`] while it waits. If the grant
    /// is still alive, its lease restarts now. Any answer but `WouldWait` spends the ticket.
    ///
    /// A grant whose lease has run out gives `WouldWait` until that lease has been ended, and then
    /// a refusal.
    pub fn collect(&mut self, ticket: Ticket, now: Instant) -> Result<Answer, Refusal> {
        self.collect_place(ticket.place, now)
    }

    fn collect_place(&mut self, id: PlaceId, now: Instant) -> Result<Answer, Refusal> {
        let place = &self.places[id];
        let (lease, salt) = (place.lease, place.salt);
        match place.state {
            PlaceState::Held { fence, expires_at } if expires_at > now => {
                self.set_lease_end(id, now + lease);
                self.mark_token_known(id);
                let token = Token { fence, salt };
                Ok(Answer::Granted(Grant { token, lease }))
            }
            PlaceState::Held { .. } | PlaceState::Waiting { .. } => Ok(Answer::WouldWait),
            PlaceState::Ended(refusal) => {
                self.remove_place(id, now);
                Err(refusal)
            }
        }
    }

    /// Gives up a place. If the claim has been granted already, its slots pass to the next waiters.
    /// Returns [`Refusal::Draining`] if the drain has dismissed the claim.
    pub fn cancel(&mut self, ticket: Ticket, now: Instant) -> Result<(), Refusal> {
        let dismissed = PlaceState::Ended(Refusal::Draining);
        let was_dismissed = self.places[ticket.place].state == dismissed;
        self.abandon_place(ticket.place, now);
        if was_dismissed {
            Err(Refusal::Draining)
        } else {
            Ok(())
        }
    }

    /// Releases a grant. If `conn` enqueued for the grant with `e`, and its client knows the token,
    /// this also ends the phase-one entry. Many clients never send the `w` that would end it,
    /// because the reply to `e` was the grant already.
    ///
    /// `status` is the exit status of the work under the grant, if the client tells it. Refuses
    /// with [`Refusal::NotHeld`] unless `token` belongs to a live holder of `key` and the key is
    /// used as `kind`.
    pub fn release(
        &mut self,
        conn: ConnId,
        key: &str,
        kind: Kind,
        token: Token,
        status: Option<u8>,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        let holder = self.find_holder(key, kind, token)?;
        let place = &self.places[holder];
        if place.conn == conn && place.is_told {
            self.end_phase(holder);
        } else if place.conn != conn && !(place.is_kept && place.conn == ORPHANS) {
            // The grant's own client does not know of this.
            self.note_dead(holder);
        }
        self.revoke(holder, GrantEnd::Released(status), now);
        Ok(Answer::Released)
    }

    /// Ends a grant at the request of `operator`, and returns the connection that held it; `None`
    /// if no holder of the key has this fence.
    pub fn break_grant(
        &mut self,
        key: &str,
        fence: Fence,
        operator: ConnId,
        now: Instant,
    ) -> Option<ConnId> {
        let holder = self.find_grant(key, fence)?;
        let conn = self.places[holder].conn;
        self.revoke(holder, GrantEnd::Broken(operator), now);
        Some(conn)
    }

    /// How many grants and places in queues a connection has.
    pub fn connection_count(&self, conn: ConnId) -> usize {
        self.conns.get(&conn).map_or(0, |entry| entry.count)
    }

    /// Whether a connection has a grant, even one that its client does not know of yet.
    pub fn has_grant(&self, conn: ConnId) -> bool {
        self.conns.get(&conn).is_some_and(|entry| {
            let mut pending = entry.untold.iter(&self.places);
            !entry.told.is_empty() || pending.any(|id| self.places[id].fence().is_some())
        })
    }

    /// Whether any closed connection still has places or slots.
    pub fn is_releasing(&self) -> bool {
        self.leaving_count > 0
    }

    /// Refuses new claims from now on, and dismisses the waiters.
    pub fn begin_drain(&mut self, now: Instant) {
        self.is_draining = true;
        let keys: Vec<KeyId> = self.names.values().copied().collect();
        for key in &keys {
            while let Some(id) = self.keys[*key].waiters.first() {
                self.resolved.push_back(self.places[id].conn);
                self.withdraw(id);
                self.record_refusal(id, Refusal::Draining, now);
            }
        }
        for key in keys {
            self.note_if_idle(key, now);
        }
    }

    /// When any key was last held: now, if one is held; `None` if none ever was. An expired lease
    /// counts until it has been ended.
    pub fn last_held(&self, now: Instant) -> Option<Instant> {
        if self.has_holders() {
            Some(now)
        } else {
            self.last_hold_ended
        }
    }

    /// How many grants there are, and how many claims wait, in all.
    pub fn entry_count(&self) -> usize {
        self.leases.len() + self.waiter_count
    }

    pub fn has_holders(&self) -> bool {
        !self.leases.is_empty()
    }

    /// Whether any grant is held that is not a kept one.
    pub fn has_clients(&self) -> bool {
        self.leases.len() > self.kept_count
    }

    /// Takes the next connection that has a claim which was queued, and has been granted or
    /// dismissed since. If its thread waits for that claim, the thread should look at the table
    /// again.
    pub fn pop_resolved(&mut self) -> Option<ConnId> {
        self.resolved.pop_front()
    }

    /// Adds an unknown key as an idle one, and drops another idle key if the cap is reached.
    fn add_key(&mut self, ask: &Ask<'_>, now: Instant) -> Result<KeyId, Refusal> {
        if self.names.len() >= self.caps.max_locks && !self.drop_an_idle_key() {
            return Err(self.refuse_at(Cap::Locks));
        }
        Ok(self.insert_key(ask, now))
    }

    /// Adds an unknown key as an idle one.
    fn insert_key(&mut self, ask: &Ask<'_>, now: Instant) -> KeyId {
        let key = Key::from(ask.key);
        let mut queue = KeyQueue::new(key.clone(), ask.terms, self.keys_made, now);
        queue.has_history = self.histories.include(&key);
        self.keys_made += 1;
        let id = self.keys.insert(queue);
        self.idle.push(&mut self.keys, id);
        self.names.insert(key, id);
        id
    }

    /// Drops the key that has been idle longest; `false` if none is idle.
    fn drop_an_idle_key(&mut self) -> bool {
        let Some(id) = self.idle.pop_first(&mut self.keys) else {
            return false;
        };
        let queue = self.keys.remove(id);
        self.names.remove(&queue.key).is_some()
    }

    /// Removes a key from the idle keys, because it is about to be held or waited for.
    fn take_into_use(&mut self, key: KeyId) {
        if self.keys[key].is_idle() {
            self.idle.remove(&mut self.keys, key);
            let kind = self.keys[key].kind;
            self.semaphore_count += usize::from(kind == Kind::Semaphore);
        }
    }

    fn find_holder(&self, key: &str, kind: Kind, token: Token) -> Result<PlaceId, Refusal> {
        let holder = self.find_token(key, token);
        let is_of_kind = |id: &PlaceId| self.keys[self.places[*id].key].kind == kind;
        holder.filter(is_of_kind).ok_or(Refusal::NotHeld)
    }

    fn find_token(&self, key: &str, token: Token) -> Option<PlaceId> {
        // The fence is not a secret, so a plain look-up is safe. The salt is compared in constant
        // time.
        let holder = self.find_grant(key, token.fence);
        holder.filter(|id| self.places[*id].salt.matches(token.salt))
    }

    fn note_if_idle(&mut self, key: KeyId, now: Instant) {
        if self.keys[key].is_idle() && !self.idle.contains(&self.keys, key) {
            let queue = &mut self.keys[key];
            queue.last_used = now;
            self.semaphore_count -= usize::from(queue.kind == Kind::Semaphore);
            self.idle.push(&mut self.keys, key);
        }
    }
}
