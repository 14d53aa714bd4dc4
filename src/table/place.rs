//! A claim's entry: first in the queue of its key, then among its holders.

use std::time::{Duration, Instant};

use super::connection::ConnectionEntry;
use super::events::{Fate, GrantEnd};
use super::queue::{KeyId, KeyQueue};
use super::slab::{Id, List, Slab};
use super::types::{Ask, Claimant, ConnId, Refusal, Weight};
use super::LockTable;
use crate::token::{Fence, Salt};

pub(super) type Places = Slab<Place, 2>;
pub(super) type PlaceId = Id<Place>;

/// Places at one key: its holders, or its waiters.
pub(super) type KeyPlaces = List<Place, 0>;
pub(super) type ConnPlaces = List<Place, 1>;

/// The place of a holder, or of a waiter, which may become one.
pub(super) struct Place {
    pub(super) conn: ConnId,
    /// Valid unless the place has ended.
    pub(super) key: Id<KeyQueue>,
    pub(super) lease: Duration,
    pub(super) weight: Weight,
    pub(super) salt: Salt,
    pub(super) state: PlaceState,
    /// When it was queued, or granted.
    pub(super) since: Instant,
    /// Whether the client knows its token.
    pub(super) is_told: bool,
    /// Whether this is the phase-one entry of its connection for its key.
    pub(super) is_enqueued: bool,
    /// Whether its connection has adopted it and not yet renewed it.
    pub(super) is_provisional: bool,
    /// Whether it was an orphan before that.
    pub(super) was_orphan: bool,
    /// Whether it is an orphan because its client asked for that.
    pub(super) is_kept: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaceState {
    /// In the queue, in order of arrival over all keys.
    Waiting {
        arrival: u64,
    },
    Held {
        fence: Fence,
        expires_at: Instant,
    },
    /// Neither any more. Kept until the client asks for the result.
    Ended(Refusal),
}

impl Place {
    pub(super) fn fence(&self) -> Option<Fence> {
        match self.state {
            PlaceState::Held { fence, .. } => Some(fence),
            PlaceState::Waiting { .. } | PlaceState::Ended(_) => None,
        }
    }

    /// When a holder's lease is over, and its fence.
    pub(super) fn lease_end(&self) -> Option<(Instant, Fence)> {
        match self.state {
            PlaceState::Held { fence, expires_at } => Some((expires_at, fence)),
            PlaceState::Waiting { .. } | PlaceState::Ended(_) => None,
        }
    }
}

impl LockTable {
    /// Makes a place, and adds it to its connection. The caller adds it to its key. The client of a
    /// new holder learns its token from the answer.
    pub(super) fn add_place(
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
            weight: ask.weight,
            salt: claimant.salt,
            state,
            since: now,
            is_told,
            is_enqueued: false,
            is_provisional: false,
            was_orphan: false,
            is_kept: false,
        });
        self.link_to_connection(id, now);
        id
    }

    /// Adds a place that holds its key at once.
    pub(super) fn add_holder(
        &mut self,
        claimant: Claimant,
        key: KeyId,
        ask: &Ask<'_>,
        fence: Fence,
        now: Instant,
    ) -> PlaceId {
        // `hold` begins the lease.
        let expires_at = now;
        let state = PlaceState::Held { fence, expires_at };
        let id = self.add_place(claimant, key, ask, state, now);
        self.hold(id, fence, now);
        id
    }

    /// Adds a place to those of its connection.
    pub(super) fn link_to_connection(&mut self, id: PlaceId, now: Instant) {
        let place = &self.places[id];
        let (conn, is_told) = (place.conn, place.is_told);
        let entry = self
            .conns
            .entry(conn)
            .or_insert_with(|| ConnectionEntry::new(now));
        entry.list_of(is_told).push(&mut self.places, id);
        entry.count += 1;
    }

    /// Records that the client knows its token.
    pub(super) fn mark_token_known(&mut self, id: PlaceId) {
        let place = &mut self.places[id];
        if std::mem::replace(&mut place.is_told, true) {
            return;
        }
        if let Some(entry) = self.conns.get_mut(&place.conn) {
            entry.pending.remove(&mut self.places, id);
            entry.held.push(&mut self.places, id);
        }
    }

    /// Takes a waiter out of its queue. Its place stays.
    pub(super) fn withdraw(&mut self, id: PlaceId) {
        let place = &self.places[id];
        if let PlaceState::Waiting { arrival } = place.state {
            self.owed.remove(&arrival);
        }
        self.keys[place.key].waiters.remove(&mut self.places, id);
        self.waiter_count -= 1;
    }

    /// Takes a waiter that gives up out of its queue. Its place stays.
    pub(super) fn leave_queue(&mut self, id: PlaceId, now: Instant) {
        self.note_event(id, None, Fate::GaveUp, now);
        self.withdraw(id);
    }

    /// Removes a place in any state, and grants the slots that this frees.
    pub(super) fn abandon_place(&mut self, id: PlaceId, now: Instant) {
        let (key, held_count) = (self.places[id].key, self.leases.len());
        match self.places[id].state {
            PlaceState::Waiting { .. } => self.leave_queue(id, now),
            PlaceState::Held { .. } => self.end_hold(id, GrantEnd::Abandoned, now),
            PlaceState::Ended(_) => return self.remove_place(id, now),
        }
        self.remove_place(id, now);
        self.promote(key, held_count, now);
    }

    /// Ends a place that is in no list of its key. If its client has yet to be told, the refusal is
    /// kept for it.
    pub(super) fn record_refusal(&mut self, id: PlaceId, refusal: Refusal, now: Instant) {
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
    pub(super) fn remove_place(&mut self, id: PlaceId, now: Instant) {
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
