//! Who holds, who waits and who has enqueued, for every key. Pure: the caller brings the time and
//! the tokens.
//!
//! A lock is a semaphore of one; there is no second path. Every operation first ends the leases
//! that have run out by `now` and matter to it (its [`Scope`]), so an expired lease is dead whether
//! or not the reaper has come by. Leases end in the order in which they run out, however few end at
//! a time. Every operation that takes a holder or a waiter away ends in [`LockTable::promote`], so
//! no slot is free while a client waits for it (except for want of a fence).
//!
//! **Invariant:** nothing below `table/` reads a clock, takes a mutex, touches a socket or writes
//! a log. Instants passed in never go back.

mod connection;
mod deadlines;
mod expiry;
mod phase_one;
mod queue;
mod snapshot;
#[cfg(test)]
mod tests;
mod types;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::time::{Duration, Instant};

use crate::token::{Fence, FenceSource, Salt, Token};
pub use connection::PhaseOneEntries;
use connection::{ConnectionEntry, PhaseOne};
use deadlines::Deadlines;
use queue::KeyQueue;
pub use snapshot::{HolderSnapshot, KeySnapshot, Usage};
pub use types::{
    Answer, Ask, Caps, Claim, Claimant, ConnId, Grant, Holdings, Key, Kind, Limit, Refusal, Scope,
    Ticket,
};

/// All keys, with their holders and waiters.
pub struct LockTable {
    /// Sorted, so that a snapshot can be taken in steps.
    keys: BTreeMap<Key, KeyQueue>,
    tickets: HashMap<Ticket, Place>,
    conns: HashMap<ConnId, ConnectionEntry>,
    /// When each holder's lease is over.
    leases: Deadlines<(Fence, Key)>,
    /// Since when each idle key has been idle.
    idle: Deadlines<Key>,
    /// For each key with a free slot and waiters, the first waiter: there was no fence for it.
    owed: BTreeSet<(Ticket, Key)>,
    waiter_count: usize,
    /// The connections whose waits have ended since they were last taken.
    resolved: Vec<ConnId>,
    next_ticket: u64,
    draining: bool,
    /// When a holder last lost its slot.
    last_held: Option<Instant>,
    caps: Caps,
    fences: Box<dyn FenceSource>,
}

/// A place in a queue, under its ticket.
struct Place {
    conn: ConnId,
    key: Key,
    lease: Duration,
    salt: Salt,
    state: PlaceState,
}

#[derive(Clone, Copy)]
enum PlaceState {
    Waiting,
    /// Granted, but not collected yet. The token may be dead by now.
    Granted(Token),
    /// Dismissed by the drain.
    Dismissed,
}

impl LockTable {
    /// An empty table.
    pub fn new(caps: Caps, fences: Box<dyn FenceSource>) -> Self {
        LockTable {
            keys: BTreeMap::new(),
            tickets: HashMap::new(),
            conns: HashMap::new(),
            leases: Deadlines::new(),
            idle: Deadlines::new(),
            owed: BTreeSet::new(),
            waiter_count: 0,
            resolved: Vec::new(),
            next_ticket: 0,
            draining: false,
            last_held: None,
            caps,
            fences,
        }
    }

    /// Asks for a key: it is granted now, or the claim is queued behind those before it.
    ///
    /// # Errors
    ///
    /// In this order: [`Refusal::Draining`], [`Refusal::LimitMismatch`], [`Refusal::MaxLocks`] for
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
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let queue = self
            .keys
            .get_mut(ask.key)
            .expect("a key that is taken is known");
        queue.join(ticket);
        let place = Place {
            conn: claimant.conn,
            key: queue.key().clone(),
            lease: ask.lease,
            salt: claimant.salt,
            state: PlaceState::Waiting,
        };
        self.tickets.insert(ticket, place);
        self.waiter_count += 1;
        let entry = self.entry(claimant.conn, now);
        entry.tickets.insert(ticket);
        entry.waiting_count += 1;
        Ok(Claim::Queued(ticket))
    }

    /// Asks for a key without ever taking a place in its queue: `None` if the claim would wait.
    ///
    /// # Errors
    ///
    /// As [`LockTable::acquire`].
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
        let is_free = match self.keys.get_mut(ask.key) {
            Some(queue) => {
                queue.agree(ask.kind, ask.limit)?;
                queue.has_free_slot()
            }
            None => true,
        };
        if self.connection_count(claimant.conn) >= self.caps.max_per_connection {
            return Err(Refusal::MaxLocks);
        }
        if is_free {
            return self.grant(claimant, ask, now).map(Some);
        }
        let queue_len = self.keys[ask.key].waiter_count();
        let is_full = self.caps.max_waiters.is_some_and(|max| queue_len >= max);
        if is_full || self.waiter_count >= self.caps.max_waiters_total {
            return Err(Refusal::MaxWaiters);
        }
        Ok(None)
    }

    /// Grants a slot that is free to a newcomer, if no waiter is owed one.
    ///
    /// A slot that comes free passes to the next waiter of its key in the same step, so handing it
    /// on never needs room under the cap. Only for want of a fence does it stay free; while one
    /// does, no newcomer gets a slot of any key. So the slots that are held and those that are owed
    /// never exceed the cap together, and no waiter finds that a newcomer took its slot.
    fn grant(&mut self, claimant: Claimant, ask: &Ask<'_>, now: Instant) -> Result<Grant, Refusal> {
        if !self.owed.is_empty() {
            return Err(Refusal::NoToken);
        }
        if self.leases.len() >= self.caps.max_slots {
            return Err(Refusal::MaxLocks);
        }
        if !self.keys.contains_key(ask.key) {
            self.add_key(ask, now)?;
        }
        let fence = self.fences.next_fence().ok_or(Refusal::NoToken)?;
        let token = Token {
            fence: Fence(fence),
            salt: claimant.salt,
        };
        let queue = &self.keys[ask.key];
        let key = queue.key().clone();
        if queue.is_idle() {
            self.idle.strike(queue.last_used, key.clone());
        }
        self.hold(&key, claimant.conn, token, ask.lease, now);
        Ok(Grant {
            token,
            lease: ask.lease,
        })
    }

    /// Looks whether a queued claim has been decided: `None` while it waits. A grant that is alive
    /// is handed over with its lease started anew. Any answer spends the ticket.
    pub fn collect(&mut self, ticket: Ticket, now: Instant) -> Option<Answer> {
        self.settle(Scope::Ticket(ticket), now);
        let place = self
            .tickets
            .get(&ticket)
            .expect("a ticket is collected only once");
        let answer = match place.state {
            PlaceState::Waiting => return None,
            PlaceState::Dismissed => Answer::Refused(Refusal::Draining),
            PlaceState::Granted(token) => {
                let (key, lease) = (place.key.clone(), place.lease);
                match self.extend(&key, token.fence, lease, now) {
                    Some(()) => Answer::Granted(Grant { token, lease }),
                    None => Answer::Refused(Refusal::LeaseExpired),
                }
            }
        };
        self.spend(ticket, now);
        Some(answer)
    }

    /// Gives up a place. A grant that has come meanwhile passes to the next waiter; a refusal that
    /// has come meanwhile is returned.
    pub fn cancel(&mut self, ticket: Ticket, now: Instant) -> Option<Refusal> {
        self.settle(Scope::Ticket(ticket), now);
        let place = self.spend(ticket, now);
        match place.state {
            PlaceState::Waiting => {
                self.withdraw(ticket, place.conn, &place.key);
                self.promote(&place.key, now);
            }
            PlaceState::Granted(token) => self.vacate(&place.key, token.fence, now),
            PlaceState::Dismissed => return Some(Refusal::Draining),
        }
        None
    }

    /// Gives back a slot. If `conn` has enqueued for it, that ends the two phases: many clients
    /// never send `w`.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotHeld`] unless `token` is that of a live holder of `key`, used as `kind`.
    pub fn release(
        &mut self,
        conn: ConnId,
        key: &str,
        kind: Kind,
        token: Token,
        now: Instant,
    ) -> Result<(), Refusal> {
        let key = self.find_holder(key, kind, token, now)?;
        match self.phase_one(conn, key.as_str(), kind) {
            Some(PhaseOne::Granted(grant)) if grant.token.fence == token.fence => {
                self.end_phase(conn, key.as_str(), kind);
            }
            _ => {}
        }
        self.vacate(&key, token.fence, now);
        Ok(())
    }

    /// Starts a lease anew, with the length `lease`.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotHeld`] unless `token` is that of a live holder of `key`, used as `kind`.
    pub fn renew(
        &mut self,
        key: &str,
        kind: Kind,
        token: Token,
        lease: Duration,
        now: Instant,
    ) -> Result<(), Refusal> {
        let key = self.find_holder(key, kind, token, now)?;
        self.extend(&key, token.fence, lease, now)
            .ok_or(Refusal::NotHeld)
    }

    /// Forgets a connection: its places go, and its slots do what `holdings` says. A grant that it
    /// has not collected goes too, since the client does not know the token.
    ///
    /// The slots are released by [`LockTable::release_some`], which the caller must call until it
    /// is done. What is returned may be large: the caller drops it after it releases the mutex.
    pub fn disconnect(
        &mut self,
        conn: ConnId,
        holdings: Holdings,
        now: Instant,
    ) -> PhaseOneEntries {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return PhaseOneEntries::default();
        };
        let enqueued = std::mem::take(&mut entry.enqueued);
        let tickets = std::mem::take(&mut entry.tickets);
        if holdings == Holdings::Keep {
            self.conns.remove(&conn);
        }
        // The places go before the slots: otherwise a slot could pass from the connection to
        // itself.
        let mut left = BTreeSet::new();
        let mut uncollected = Vec::new();
        for ticket in tickets {
            let place = self
                .tickets
                .remove(&ticket)
                .expect("a connection has tickets in use");
            match place.state {
                PlaceState::Waiting => {
                    self.withdraw(ticket, conn, &place.key);
                    left.insert(place.key);
                }
                PlaceState::Granted(token) => uncollected.push((token.fence, place.key)),
                PlaceState::Dismissed => {}
            }
        }
        for key in left {
            self.promote(&key, now);
        }
        for (fence, key) in uncollected {
            self.vacate(&key, fence, now);
        }
        enqueued
    }

    /// Releases up to `at_most` slots of a connection that has disconnected; `true` when none is
    /// left. In steps, because a million slots would delay every other client for too long.
    pub fn release_some(&mut self, conn: ConnId, at_most: usize, now: Instant) -> bool {
        for _ in 0..at_most {
            let held = self
                .conns
                .get_mut(&conn)
                .and_then(|entry| entry.held.pop_first());
            let Some((fence, key)) = held else {
                self.conns.remove(&conn);
                return true;
            };
            self.vacate(&key, fence, now);
        }
        false
    }

    /// How many slots and places a connection has.
    fn connection_count(&self, conn: ConnId) -> usize {
        self.conns.get(&conn).map_or(0, ConnectionEntry::count)
    }

    /// Refuses new claims from now on, and dismisses the waiters.
    pub fn begin_drain(&mut self, now: Instant) {
        self.settle(Scope::Everything, now);
        self.draining = true;
        let mut left = BTreeSet::new();
        for place in self.tickets.values_mut() {
            if matches!(place.state, PlaceState::Waiting) {
                place.state = PlaceState::Dismissed;
                self.resolved.push(place.conn);
                left.insert(place.key.clone());
            }
        }
        self.owed.clear();
        self.waiter_count = 0;
        for entry in self.conns.values_mut() {
            entry.waiting_count = 0;
        }
        for key in left {
            let queue = self.keys.get_mut(&key).expect("a key waited for is known");
            queue.leave_all();
            self.promote(&key, now);
        }
    }

    /// Grants the slots that waiters are owed for want of fences, over all keys in order of
    /// arrival.
    pub fn tokens_are_back(&mut self, now: Instant) {
        while let Some(first) = self.owed.first().cloned() {
            self.promote(&first.1, now);
            if self.owed.contains(&first) {
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
        self.leases.next().is_some()
    }

    /// The connections whose waits have ended since the last call. Each should look again; one that
    /// is named in vain finds that it still waits.
    pub fn take_resolved(&mut self) -> impl Iterator<Item = ConnId> + '_ {
        self.resolved.drain(..)
    }

    /// When `conn` last held or waited for anything: `now` if it does or has a phase-one entry,
    /// `None` if it never did. It holds a slot until the lease is ended, which may be a little
    /// after it runs out.
    pub fn connection_idle_since(&self, conn: ConnId, now: Instant) -> Option<Instant> {
        let entry = self.conns.get(&conn)?;
        Some(if entry.is_empty() {
            entry.last_busy
        } else {
            now
        })
    }

    /// What an operator may see of up to `at_most` keys, sorted: those after `after`, or the first
    /// ones.
    pub fn snapshot(
        &mut self,
        after: Option<&Key>,
        at_most: usize,
        now: Instant,
    ) -> Vec<KeySnapshot> {
        self.settle(Scope::Everything, now);
        let behind = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.keys
            .range::<Key, _>((behind, Bound::Unbounded))
            .take(at_most)
            .map(|(_, queue)| queue.snapshot(now))
            .collect()
    }

    /// Makes room for a key that is not known yet, and adds it as an idle one.
    fn add_key(&mut self, ask: &Ask<'_>, now: Instant) -> Result<(), Refusal> {
        if self.keys.len() >= self.caps.max_locks && !self.drop_an_idle_key() {
            return Err(Refusal::MaxLocks);
        }
        let key = Key::from(ask.key);
        self.idle.file(now, key.clone());
        self.keys
            .insert(key.clone(), KeyQueue::new(key, ask.kind, ask.limit, now));
        Ok(())
    }

    /// Drops the key that has been idle longest; `false` if none is idle.
    fn drop_an_idle_key(&mut self) -> bool {
        self.idle
            .pop_first()
            .is_some_and(|key| self.keys.remove(&key).is_some())
    }

    fn find_holder(
        &mut self,
        key: &str,
        kind: Kind,
        token: Token,
        now: Instant,
    ) -> Result<Key, Refusal> {
        self.settle(Scope::Key(key), now);
        let queue = self.keys.get(key).ok_or(Refusal::NotHeld)?;
        if queue.is_held_by(kind, token) {
            Ok(queue.key().clone())
        } else {
            Err(Refusal::NotHeld)
        }
    }

    /// Gives the waiters of `key` the slots that are free, in order of arrival; a key without
    /// holders and waiters becomes idle. Every operation that takes a holder or a waiter away ends
    /// here.
    fn promote(&mut self, key: &Key, now: Instant) {
        while let Some(ticket) = self.keys[key].next_in_line() {
            let Some(fence) = self.fences.next_fence() else {
                self.owed.insert((ticket, key.clone()));
                return;
            };
            let place = self
                .tickets
                .get_mut(&ticket)
                .expect("queues name tickets in use");
            let token = Token {
                fence: Fence(fence),
                salt: place.salt,
            };
            place.state = PlaceState::Granted(token);
            let (conn, lease) = (place.conn, place.lease);
            self.withdraw(ticket, conn, key);
            self.resolved.push(conn);
            self.hold(key, conn, token, lease, now);
        }
        let queue = self.keys.get_mut(key).expect("indexed above");
        if queue.is_idle() {
            queue.last_used = now;
            self.idle.file(now, key.clone());
        }
    }

    fn hold(&mut self, key: &Key, conn: ConnId, token: Token, lease: Duration, now: Instant) {
        let expires_at = now + lease;
        let queue = self.keys.get_mut(key).expect("only a known key is granted");
        queue.hold(token, conn, expires_at);
        self.leases.file(expires_at, (token.fence, key.clone()));
        self.entry(conn, now).held.insert(token.fence, key.clone());
    }

    /// Takes a holder's slot away, if it still has one, and passes it on.
    fn vacate(&mut self, key: &Key, fence: Fence, now: Instant) {
        let Some(queue) = self.keys.get_mut(key) else {
            return;
        };
        let kind = queue.kind();
        if let Some(holder) = queue.remove_holder(fence) {
            self.leases.strike(holder.expires_at, (fence, key.clone()));
            self.forget_held(holder.conn, (kind, key), fence, now);
            self.promote(key, now);
        }
    }

    /// Starts the lease of a holder anew; `None` if there is no such holder.
    fn extend(&mut self, key: &Key, fence: Fence, lease: Duration, now: Instant) -> Option<()> {
        let holder = self.keys.get_mut(key)?.holder_mut(fence)?;
        let expires_at = now + lease;
        if holder.expires_at != expires_at {
            self.leases.strike(holder.expires_at, (fence, key.clone()));
            self.leases.file(expires_at, (fence, key.clone()));
            holder.expires_at = expires_at;
        }
        Some(())
    }

    /// Takes a waiter out of its queue.
    fn withdraw(&mut self, ticket: Ticket, conn: ConnId, key: &Key) {
        let queue = self.keys.get_mut(key).expect("a key waited for is known");
        queue.leave(ticket);
        self.waiter_count -= 1;
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.waiting_count -= 1;
        }
        if !self.owed.is_empty() {
            self.owed.remove(&(ticket, key.clone()));
        }
    }

    fn spend(&mut self, ticket: Ticket, now: Instant) -> Place {
        let place = self
            .tickets
            .remove(&ticket)
            .expect("a ticket is spent only once");
        if let Some(entry) = self.conns.get_mut(&place.conn) {
            entry.tickets.remove(&ticket);
            entry.last_busy = now;
        }
        place
    }

    /// Takes a slot off the connection that held it; a phase-one entry dies with its token.
    fn forget_held(&mut self, conn: ConnId, (kind, key): (Kind, &Key), fence: Fence, now: Instant) {
        self.last_held = Some(now);
        // A connection that is gone may have left slots behind.
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        entry.held.remove(&fence);
        entry.last_busy = now;
        match entry.enqueued.get(kind, key.as_str()) {
            Some(PhaseOne::Granted(grant)) if grant.token.fence == fence => {}
            Some(PhaseOne::Queued(ticket)) => match self.tickets[&ticket].state {
                PlaceState::Granted(token) if token.fence == fence => {
                    self.tickets.remove(&ticket);
                    entry.tickets.remove(&ticket);
                }
                _ => return,
            },
            _ => return,
        }
        entry.enqueued.mark_dead(kind, key);
    }

    fn entry(&mut self, conn: ConnId, now: Instant) -> &mut ConnectionEntry {
        self.conns
            .entry(conn)
            .or_insert_with(|| ConnectionEntry::new(now))
    }
}
