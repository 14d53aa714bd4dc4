//! Who holds, who waits and who has enqueued, for every key. Pure: the caller brings the time and
//! the tokens.
//!
//! A lock is a semaphore of one; there is no second path. Every operation first ends the leases
//! that have run out by `now` and matter to it (its [`Scope`]), so an expired lease is dead whether
//! or not the reaper has come by. Leases end in the order in which they run out, however few end at
//! a time. Every operation that takes a holder or a waiter away ends in [`LockTable::promote`], so
//! no slot is free while a client waits for it (except for want of a fence).
//!
//! **Invariant:** nothing in `table/` reads a clock, takes a mutex, touches a socket or writes
//! a log. Instants passed in never go back.

#[cfg_attr(not(feature = "cluster"), allow(dead_code))]
mod changes;
mod connection;
mod counters;
mod expiry;
mod phase_one;
mod place;
mod queue;
mod slab;
mod snapshot;
#[cfg(any(test, fuzzing))]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) mod tests;
mod types;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::token::{Fence, FenceSource, Token};
#[cfg_attr(not(feature = "cluster"), allow(unused_imports))]
pub use changes::{Change, HolderRecord};
use connection::ConnectionEntry;
pub use counters::{Counters, CountersSnapshot, Reason};
use place::{Place, PlaceId, PlaceState, Places};
use queue::{KeyId, KeyList, KeyQueue, Queues};
use slab::Slab;
pub use snapshot::{KeySnapshot, PlaceSnapshot};
pub use types::{
    Answer, Ask, Caps, Claim, Claimant, ConnId, Grant, Holdings, Key, Kind, Limit, Refusal, Scope,
    Ticket,
};

/// All keys, with their holders and waiters.
pub struct LockTable {
    /// Sorted, so that a snapshot can be taken in steps.
    names: BTreeMap<Key, KeyId>,
    keys: Queues,
    places: Places,
    conns: BTreeMap<ConnId, ConnectionEntry>,
    /// The places of all holders.
    holders: BTreeMap<Fence, PlaceId>,
    /// The places of all phase-one entries.
    enqueued: BTreeMap<(ConnId, KeyId), PlaceId>,
    /// The holders by the end of their leases, and then in order of grants.
    leases: BTreeMap<(Instant, Fence), PlaceId>,
    /// The keys that are idle, the one that has been so for longest first.
    idle: KeyList,
    /// For each key with a free slot and waiters, the first waiter: there was no fence for it.
    owed: BTreeMap<u64, PlaceId>,
    waiter_count: usize,
    /// The keys in use as semaphores.
    semaphore_count: usize,
    /// The connections that have disconnected and have places or slots left.
    leaving_count: usize,
    counters: Counters,
    /// The connections whose waits have ended since they were last taken.
    resolved: VecDeque<ConnId>,
    next_arrival: u64,
    draining: bool,
    /// When a holder last lost its slot.
    last_held: Option<Instant>,
    /// Changes for a journal, if there is one.
    noted: Option<Box<changes::Noted>>,
    caps: Caps,
    fences: Box<dyn FenceSource>,
}

impl LockTable {
    /// An empty table.
    pub fn new(caps: Caps, fences: Box<dyn FenceSource>) -> Self {
        LockTable {
            names: BTreeMap::new(),
            keys: Slab::new(),
            places: Slab::new(),
            conns: BTreeMap::new(),
            holders: BTreeMap::new(),
            enqueued: BTreeMap::new(),
            leases: BTreeMap::new(),
            idle: KeyList::new(),
            owed: BTreeMap::new(),
            waiter_count: 0,
            semaphore_count: 0,
            leaving_count: 0,
            counters: Counters::default(),
            resolved: VecDeque::new(),
            next_arrival: 0,
            draining: false,
            last_held: None,
            noted: None,
            caps,
            fences,
        }
    }

    /// Asks for a key: it is granted now, or the claim is queued behind those before it. Refusals,
    /// in this order: [`Refusal::Draining`], [`Refusal::LimitMismatch`], [`Refusal::MaxLocks`] for
    /// what the connection has, [`Refusal::NoToken`] while waiters are owed slots,
    /// [`Refusal::MaxLocks`] for the slots in all and then for a key not known yet,
    /// [`Refusal::NoToken`], [`Refusal::MaxWaiters`] for the key and in all.
    pub fn acquire(
        &mut self,
        claimant: Claimant,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Claim, Refusal> {
        if let Some(grant) = self.try_acquire(claimant, ask, now)? {
            return Ok(Claim::Acquired(grant));
        }
        let key = self.names[ask.key];
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let waiting = PlaceState::Waiting { arrival };
        let place = self.add_place(claimant, key, ask, waiting, now);
        let queue = &mut self.keys[key];
        queue.waiters.push(&mut self.places, place);
        self.waiter_count += 1;
        Ok(Claim::Queued(Ticket { arrival, place }))
    }

    /// Asks for a key without ever taking a place in its queue: `None` if the claim would wait.
    /// Refuses as [`LockTable::acquire`] does.
    pub fn try_acquire(
        &mut self,
        claimant: Claimant,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Option<Grant>, Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        self.settle(Scope::Ask(claimant.conn, ask), now);
        self.tokens_are_back(now);
        let known = self.names.get(ask.key).copied();
        if let Some(key) = known {
            self.keys[key].agree(ask.kind, ask.limit)?;
        }
        if self.connection_count(claimant.conn) >= self.caps.max_per_connection {
            return Err(Refusal::MaxLocks);
        }
        match known.map(|key| &self.keys[key]) {
            Some(queue) if !queue.has_free_slot() => {
                let max = self.caps.max_waiters;
                let is_full = max.is_some_and(|max| queue.waiters.len() >= max);
                if is_full || self.waiter_count >= self.caps.max_waiters_total {
                    return Err(Refusal::MaxWaiters);
                }
                Ok(None)
            }
            _ => self.grant(claimant, known, ask, now).map(Some),
        }
    }

    /// Grants a slot that is free to a newcomer, if no waiter is owed one.
    ///
    /// A slot that comes free passes to the next waiter of its key in the same step, so handing it
    /// on never needs room under the cap. Only for want of a fence does it stay free; while one
    /// does, no newcomer gets a slot of any key. So the slots that are held and those that are owed
    /// never exceed the cap together, and no waiter finds that a newcomer took its slot.
    fn grant(
        &mut self,
        claimant: Claimant,
        known: Option<KeyId>,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Grant, Refusal> {
        if !self.owed.is_empty() {
            return Err(Refusal::NoToken);
        }
        if self.leases.len() >= self.caps.max_slots {
            return Err(Refusal::MaxLocks);
        }
        let key = match known {
            Some(key) => key,
            None => self.add_key(ask, now)?,
        };
        let fence = Fence(self.fences.next_fence().ok_or(Refusal::NoToken)?);
        self.take_into_use(key);
        let expires_at = now + ask.lease;
        let place = self.add_place(
            claimant,
            key,
            ask,
            PlaceState::Held { fence, expires_at },
            now,
        );
        self.hold(place, fence, now);
        let (salt, lease) = (claimant.salt, ask.lease);
        let token = Token { fence, salt };
        Ok(Grant { token, lease })
    }

    /// Looks whether a queued claim has been decided: `None` while it waits. A grant that is alive
    /// is handed over with its lease started anew. Any answer spends the ticket.
    pub fn collect(&mut self, ticket: Ticket, now: Instant) -> Option<Answer> {
        self.settle(Scope::Ticket(ticket), now);
        self.collect_place(ticket.place, now)
    }

    /// As [`LockTable::collect`], but ends no lease: `None` also once the lease has run out.
    pub fn collect_fresh(&mut self, ticket: Ticket, now: Instant) -> Option<Answer> {
        let id = ticket.place;
        if matches!(self.places[id].state, PlaceState::Held { expires_at, .. } if expires_at <= now)
        {
            return None;
        }
        self.collect_place(id, now)
    }

    fn collect_place(&mut self, id: PlaceId, now: Instant) -> Option<Answer> {
        let place = &self.places[id];
        let (lease, salt) = (place.lease, place.salt);
        match place.state {
            PlaceState::Waiting { .. } => None,
            PlaceState::Ended(refusal) => {
                self.remove_place(id, now);
                Some(Answer::Refused(refusal))
            }
            PlaceState::Held { fence, .. } => {
                self.begin_lease(id, now + lease);
                self.tell(id);
                let token = Token { fence, salt };
                Some(Answer::Granted(Grant { token, lease }))
            }
        }
    }

    /// Gives up a place. A grant that has come meanwhile passes to the next waiter; a refusal by
    /// the drain that has come meanwhile is returned.
    pub fn cancel(&mut self, ticket: Ticket, now: Instant) -> Option<Refusal> {
        self.settle(Scope::Ticket(ticket), now);
        let dismissed = PlaceState::Ended(Refusal::Draining);
        let was_dismissed = self.places[ticket.place].state == dismissed;
        if let Some(key) = self.give_up(ticket.place, now) {
            self.promote(key, now);
        }
        was_dismissed.then_some(Refusal::Draining)
    }

    /// Gives back a slot. If `conn` has enqueued for it, that ends the two phases: many clients
    /// never send `w`. [`Refusal::NotHeld`] unless `token` is that of a live holder of `key`, used
    /// as `kind`.
    pub fn release(
        &mut self,
        conn: ConnId,
        key: &str,
        kind: Kind,
        token: Token,
        now: Instant,
    ) -> Result<(), Refusal> {
        let holder = self.find_holder(key, kind, token, now)?;
        let place = &self.places[holder];
        if place.conn == conn && place.is_told {
            self.end_phase(holder);
        }
        self.vacate(holder, now);
        self.counters.releases += 1;
        Ok(())
    }

    /// Ends a grant as if its lease were over, and returns the connection that held it; `None` if
    /// no holder of the key has this fence.
    pub fn break_grant(&mut self, key: &str, fence: Fence, now: Instant) -> Option<ConnId> {
        self.settle(Scope::Key(key), now);
        let holder = self.find_grant(key, fence)?;
        let conn = self.places[holder].conn;
        self.vacate(holder, now);
        self.counters.breaks += 1;
        Some(conn)
    }

    /// Starts a lease anew, with the length `lease`. [`Refusal::NotHeld`] unless `token` is that of
    /// a live holder of `key`, used as `kind`.
    pub fn renew(
        &mut self,
        key: &str,
        kind: Kind,
        token: Token,
        lease: Duration,
        now: Instant,
    ) -> Result<(), Refusal> {
        let holder = self.find_holder(key, kind, token, now)?;
        self.begin_lease(holder, now + lease);
        self.counters.renewals += 1;
        self.note_renewed(holder, token.fence, lease);
        Ok(())
    }

    /// How many slots and places a connection has.
    fn connection_count(&self, conn: ConnId) -> usize {
        self.conns.get(&conn).map_or(0, |entry| entry.count)
    }

    /// Refuses new claims from now on, and dismisses the waiters.
    pub fn begin_drain(&mut self, now: Instant) {
        self.settle(Scope::Everything, now);
        self.draining = true;
        let keys: Vec<KeyId> = self.names.values().copied().collect();
        for key in keys {
            while let Some(id) = self.keys[key].waiters.first() {
                self.resolved.push_back(self.places[id].conn);
                self.withdraw(id);
                self.end_place(id, Refusal::Draining, now);
            }
            self.promote(key, now);
        }
    }

    /// Grants the slots that waiters are owed for want of fences, over all keys in order of
    /// arrival.
    pub fn tokens_are_back(&mut self, now: Instant) {
        while let Some((&arrival, &place)) = self.owed.first_key_value() {
            self.promote(self.places[place].key, now);
            if self.owed.contains_key(&arrival) {
                return; // there is still no fence
            }
        }
    }

    /// When a key was last held: now, if one is; `None` if none ever was.
    pub fn last_held(&mut self, now: Instant) -> Option<Instant> {
        self.settle(Scope::Everything, now);
        if self.has_holders() {
            Some(now)
        } else {
            self.last_held
        }
    }

    /// How many slots are held, and how many claims wait.
    pub fn entry_count(&self) -> usize {
        self.leases.len() + self.waiter_count
    }

    /// Whether any key is held.
    pub fn has_holders(&self) -> bool {
        self.leases.len() > 0
    }

    /// The next connection whose wait has ended since the last calls. It should look again; one
    /// that is named in vain finds that it still waits.
    pub fn pop_resolved(&mut self) -> Option<ConnId> {
        self.resolved.pop_front()
    }

    /// Makes room for a key that is not known yet, and adds it as an idle one.
    fn add_key(&mut self, ask: &Ask<'_>, now: Instant) -> Result<KeyId, Refusal> {
        if self.names.len() >= self.caps.max_locks && !self.drop_an_idle_key() {
            return Err(Refusal::MaxLocks);
        }
        Ok(self.insert_key(ask, now))
    }

    /// Adds a key that is not known yet, as an idle one.
    fn insert_key(&mut self, ask: &Ask<'_>, now: Instant) -> KeyId {
        let key = Key::from(ask.key);
        let queue = KeyQueue::new(key.clone(), ask.kind, ask.limit, now);
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

    /// Takes a key that is about to be held from the idle ones.
    fn take_into_use(&mut self, key: KeyId) {
        if self.keys[key].is_idle() {
            self.idle.remove(&mut self.keys, key);
            let kind = self.keys[key].kind;
            self.semaphore_count += usize::from(kind == Kind::Semaphore);
        }
    }

    fn find_holder(
        &mut self,
        key: &str,
        kind: Kind,
        token: Token,
        now: Instant,
    ) -> Result<PlaceId, Refusal> {
        self.settle(Scope::Key(key), now);
        // The fence is no secret, so it may be looked up; the salt is compared in constant time.
        let holder = self.find_grant(key, token.fence).filter(|holder| {
            let place = &self.places[*holder];
            self.keys[place.key].kind == kind && place.salt.matches(token.salt)
        });
        holder.ok_or(Refusal::NotHeld)
    }

    /// Gives the waiters of `key` the slots that are free, in order of arrival; a key without
    /// holders and waiters becomes idle. Every operation that takes a holder or a waiter away ends
    /// here.
    fn promote(&mut self, key: KeyId, now: Instant) {
        while let Some(id) = self.next_to_serve(key, now) {
            let Some(fence) = self.fences.next_fence() else {
                if let PlaceState::Waiting { arrival } = self.places[id].state {
                    self.owed.insert(arrival, id);
                }
                return;
            };
            let wait = now.saturating_duration_since(self.places[id].since);
            self.counters.waits.add(wait);
            self.withdraw(id);
            self.hold(id, Fence(fence), now);
            self.resolved.push_back(self.places[id].conn);
        }
        if self.keys[key].is_idle() && !self.idle.contains(&self.keys, key) {
            let queue = &mut self.keys[key];
            queue.last_used = now;
            self.semaphore_count -= usize::from(queue.kind == Kind::Semaphore);
            self.idle.push(&mut self.keys, key);
        }
    }

    /// Makes a place, and adds it to its connection. The caller adds it to its key. A client that
    /// is granted a slot now is told so by the answer.
    fn add_place(
        &mut self,
        claimant: Claimant,
        key: KeyId,
        ask: &Ask<'_>,
        state: PlaceState,
        now: Instant,
    ) -> PlaceId {
        let is_told = matches!(state, PlaceState::Held { .. });
        let id = self.places.insert(Place {
            conn: claimant.conn,
            key,
            lease: ask.lease,
            salt: claimant.salt,
            state,
            since: now,
            is_told,
            is_enqueued: false,
        });
        self.give(id, now);
        id
    }

    /// Adds a place to those of its connection.
    fn give(&mut self, id: PlaceId, now: Instant) {
        let place = &self.places[id];
        let (conn, is_told) = (place.conn, place.is_told);
        let entry = self
            .conns
            .entry(conn)
            .or_insert_with(|| ConnectionEntry::new(now));
        entry.list_of(is_told).push(&mut self.places, id);
        entry.count += 1;
    }

    /// Takes note that the client knows its token.
    fn tell(&mut self, id: PlaceId) {
        let place = &mut self.places[id];
        if std::mem::replace(&mut place.is_told, true) {
            return;
        }
        if let Some(entry) = self.conns.get_mut(&place.conn) {
            entry.pending.remove(&mut self.places, id);
            entry.held.push(&mut self.places, id);
        }
    }

    /// Makes a place that is in no list of its key a holder.
    fn hold(&mut self, id: PlaceId, fence: Fence, now: Instant) {
        let place = &mut self.places[id];
        place.since = now;
        let (key, lease) = (place.key, place.lease);
        let expires_at = now + lease;
        place.state = PlaceState::Held { fence, expires_at };
        self.leases.insert((expires_at, fence), id);
        self.holders.insert(fence, id);
        self.counters.grants += 1;
        debug_assert!(self.keys[key].has_free_slot());
        self.keys[key].holders.push(&mut self.places, id);
        self.note_held(id, fence, lease);
    }

    /// Takes a holder's slot away and passes it on.
    fn vacate(&mut self, id: PlaceId, now: Instant) {
        let key = self.places[id].key;
        self.take_slot(id, now);
        self.end_place(id, Refusal::LeaseExpired, now);
        self.promote(key, now);
    }

    /// Takes a holder out of its key. Its place stays.
    fn take_slot(&mut self, id: PlaceId, now: Instant) {
        let place = &self.places[id];
        let (expires_at, fence) = place.lease_end().expect("a holder has a lease");
        self.leases.remove(&(expires_at, fence));
        self.holders.remove(&fence);
        self.keys[place.key].holders.remove(&mut self.places, id);
        self.last_held = Some(now);
        self.note_ended(fence);
    }

    /// Has a holder's lease end at `expires_at`.
    fn begin_lease(&mut self, id: PlaceId, expires_at: Instant) {
        if let PlaceState::Held {
            fence,
            expires_at: ends,
        } = &mut self.places[id].state
        {
            self.leases.remove(&(*ends, *fence));
            self.leases.insert((expires_at, *fence), id);
            *ends = expires_at;
        }
    }

    /// Takes a waiter out of its queue. Its place stays.
    fn withdraw(&mut self, id: PlaceId) {
        let place = &self.places[id];
        if let PlaceState::Waiting { arrival } = place.state {
            self.owed.remove(&arrival);
        }
        self.keys[place.key].waiters.remove(&mut self.places, id);
        self.waiter_count -= 1;
    }

    /// Gives up a place, whatever has become of it. Returns its key if a slot may now be free.
    fn give_up(&mut self, id: PlaceId, now: Instant) -> Option<KeyId> {
        let place = &self.places[id];
        let (key, state) = (place.key, place.state);
        match state {
            PlaceState::Waiting { .. } => self.withdraw(id),
            PlaceState::Held { .. } => {
                self.take_slot(id, now);
                self.counters.abandonments += 1;
            }
            PlaceState::Ended(_) => {}
        }
        self.remove_place(id, now);
        (!matches!(state, PlaceState::Ended(_))).then_some(key)
    }

    /// Ends a place that is in no list of its key. If its client has yet to be told, the refusal is
    /// kept for it.
    fn end_place(&mut self, id: PlaceId, refusal: Refusal, now: Instant) {
        let place = &mut self.places[id];
        if place.is_enqueued {
            let queue = &self.keys[place.key];
            if let Some(entry) = self.conns.get_mut(&place.conn) {
                entry.ended.add(queue.kind, queue.key.clone(), refusal);
            }
        } else if !place.is_told {
            place.state = PlaceState::Ended(refusal);
            if let Some(entry) = self.conns.get_mut(&place.conn) {
                entry.count -= 1;
                entry.last_busy = now;
            }
            return;
        }
        self.remove_place(id, now);
    }

    /// Removes a place that is in no list of its key.
    fn remove_place(&mut self, id: PlaceId, now: Instant) {
        self.end_phase(id);
        let place = &self.places[id];
        let (conn, is_told) = (place.conn, place.is_told);
        let has_ended = matches!(place.state, PlaceState::Ended(_));
        // A connection that is gone may have left slots behind.
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.list_of(is_told).remove(&mut self.places, id);
            entry.count -= usize::from(!has_ended);
            entry.last_busy = now;
        }
        self.places.remove(id);
    }
}
