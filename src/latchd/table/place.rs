//! The life of a place: how it comes into the lists of its key and of its connection, and how it
//! leaves them.

use std::collections::BTreeMap;
use std::time::Instant;

use super::connection::ConnectionEntry;
use super::events::{Fate, GrantEnd};
use super::names::ConnId;
use super::queue::{as_len, KeyId, Place, PlaceId, PlaceState};
use super::types::{Ask, Claimant};
use super::LockTable;
use crate::wire::terms::Refusal;
use crate::wire::token::Fence;

impl LockTable {
    /// Makes a place and adds it to its connection; the caller adds it to its key. The client of a
    /// new holder counts as knowing the token, because the answer contains it.
    pub fn add_place(
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
            lease_len: as_len(ask.lease),
            waited_ms: 0,
            weight: ask.terms.weight,
            salt: claimant.salt,
            state,
            since: now,
            has_age: true,
            is_told,
            is_enqueued: false,
            is_provisional: false,
            is_kept: false,
            is_proof: claimant.can_adopt && self.proofs.is_some(),
            is_unprovable: false,
            is_past: false,
        });
        self.link_to_connection(id, now);
        id
    }

    /// Adds the place of a claim that is granted at once.
    pub fn add_holder(
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
        self.begin_hold(id, fence, now);
        id
    }

    /// Adds a place to the lists of its connection.
    pub fn link_to_connection(&mut self, id: PlaceId, now: Instant) {
        let place = &self.places[id];
        let (conn, is_told) = (place.conn, place.is_told);
        let entry = match self.conns.get_mut(&conn) {
            Some(entry) => entry,
            None => add_connection(&mut self.conns, conn, now),
        };
        entry.list_of(is_told).push(&mut self.places, id);
        entry.count += 1;
    }

    /// Records that the client knows the token of this place.
    pub fn mark_token_known(&mut self, id: PlaceId) {
        let place = &mut self.places[id];
        if std::mem::replace(&mut place.is_told, true) {
            return;
        }
        let (conn, lease) = (place.conn, place.lease);
        self.note(id, lease);
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.untold.remove(&mut self.places, id);
            entry.told.push(&mut self.places, id);
        }
    }

    /// Removes a waiter from its queue, but keeps its place.
    pub fn withdraw(&mut self, id: PlaceId) {
        let place = &self.places[id];
        if let PlaceState::Waiting { arrival } = place.state {
            self.owed.remove(&arrival);
        }
        self.keys[place.key].waiters.remove(&mut self.places, id);
        self.waiter_count -= 1;
    }

    /// Like [`LockTable::withdraw`], for a waiter that gives up: also notes that event.
    pub fn leave_queue(&mut self, id: PlaceId, now: Instant) {
        self.note_event(id, None, Fate::GaveUp, now);
        self.withdraw(id);
    }

    /// Removes a place in any state, and grants the slots that this frees to waiters.
    pub fn abandon_place(&mut self, id: PlaceId, now: Instant) {
        let (key, grants_before) = (self.places[id].key, self.leases.len());
        match self.places[id].state {
            PlaceState::Waiting { .. } => self.leave_queue(id, now),
            PlaceState::Held { .. } => self.end_hold(id, GrantEnd::Abandoned, now),
            PlaceState::Ended(_) => return self.remove_place(id, now),
        }
        self.remove_place(id, now);
        self.promote(key, grants_before, now);
    }

    /// Ends a place that is in neither list of its key. Stores the refusal if the client has yet to
    /// collect the result of its claim.
    pub fn record_refusal(&mut self, id: PlaceId, refusal: Refusal, now: Instant) {
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

    /// Removes a place that is in neither list of its key.
    pub fn remove_place(&mut self, id: PlaceId, now: Instant) {
        self.end_phase(id);
        let place = &self.places[id];
        let (conn, is_told) = (place.conn, place.is_told);
        let has_ended = matches!(place.state, PlaceState::Ended(_));
        // The connection may have been removed before this place.
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.list_of(is_told).remove(&mut self.places, id);
            entry.count -= usize::from(!has_ended);
            entry.last_busy = now;
        }
        self.places.remove(id);
    }
}

/// Adds a connection at its first claim.
#[inline(never)] // later claims need none of its stack, which is large
fn add_connection(
    conns: &mut BTreeMap<ConnId, ConnectionEntry>,
    conn: ConnId,
    now: Instant,
) -> &mut ConnectionEntry {
    conns
        .entry(conn)
        .or_insert_with(|| ConnectionEntry::new(now))
}
