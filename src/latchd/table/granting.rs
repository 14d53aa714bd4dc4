//! Grants slots: to new claims, and to the waiters whose turn it is.

use std::time::Instant;

use super::events::Fate;
use super::queue::{KeyId, PlaceId, PlaceState};
use super::types::{Ask, Cap, Claimant, Grant};
use super::{LockTable, STEP};
use crate::wire::terms::Refusal;
use crate::wire::token::{Fence, Token};

impl LockTable {
    /// Grants free slots to a new claim, if no waiter is owed any.
    ///
    /// A released slot passes to the next waiters of its key in the same step, and the first of
    /// them needs no room under the cap on grants, because it replaces the previous holder. If no
    /// fence or no room is left for a waiter, the slot stays free and is owed to that waiter. While
    /// any slot is owed, no new claim is granted slots of any key, so that it cannot take the slot,
    /// the fence or the room of a waiter.
    pub fn grant(
        &mut self,
        claimant: Claimant,
        known: Option<KeyId>,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Grant, Refusal> {
        if self.leases.len() >= self.caps.max_grants {
            return Err(self.refuse_at(Cap::Grants));
        }
        if !self.owed.is_empty() {
            return Err(Refusal::NoToken);
        }
        let key = match known {
            Some(key) => key,
            None => self.add_key(ask, now)?,
        };
        let fence = Fence(self.fences.next_fence().ok_or(Refusal::NoToken)?);
        self.take_into_use(key);
        let place = self.add_holder(claimant, key, ask, fence, now);
        self.note_event(place, Some(fence), Fate::Granted, now);
        let (salt, lease) = (self.places[place].salt, ask.lease);
        let token = Token { fence, salt };
        Ok(Grant { token, lease })
    }

    /// Grants free slots to the waiters of `key`, and then owed slots to the waiters of other keys;
    /// a key without holders and waiters becomes idle. Every operation that removes a holder or a
    /// waiter calls this at its end, except a drain, which leaves no waiters. `grants_before` is
    /// the number of grants before that operation: a waiter that replaces a holder needs no room
    /// under the cap.
    pub fn promote(&mut self, key: KeyId, grants_before: usize, now: Instant) {
        let mut at_most = STEP;
        let max_held = grants_before.max(self.caps.max_grants);
        self.serve_waiters(key, max_held, &mut at_most, now);
        if !self.owed.is_empty() {
            self.grant_some(at_most, now);
        }
    }

    /// Grants free slots to the waiters of `key` in order of arrival, while the table has fewer
    /// than `max_held` grants. Each grant decrements `at_most`.
    pub fn serve_waiters(
        &mut self,
        key: KeyId,
        max_held: usize,
        at_most: &mut usize,
        now: Instant,
    ) {
        while let Some(id) = self.next_to_serve(key, now) {
            let has_room = *at_most > 0 && self.leases.len() < max_held;
            let Some(fence) = has_room.then(|| self.fences.next_fence()).flatten() else {
                return self.owe(id);
            };
            let fence = Fence(fence);
            self.note_event(id, Some(fence), Fate::Granted, now);
            let wait = now.saturating_duration_since(self.places[id].since);
            self.counters.waits.add(wait);
            self.places[id].waited_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
            *at_most -= 1;
            self.withdraw(id);
            self.begin_hold(id, fence, now);
            self.resolved.push_back(self.places[id].conn);
        }
        self.note_if_idle(key, now);
    }

    /// Records that a waiter is owed slots. It must be the waiter's turn.
    pub fn owe(&mut self, id: PlaceId) {
        if let PlaceState::Waiting { arrival } = self.places[id].state {
            self.owed.insert(arrival, id);
        }
    }

    /// Grants owed slots in order of the waiters' arrival over all keys, up to [`STEP`].
    pub fn grant_owed_slots(&mut self, now: Instant) {
        self.grant_some(STEP, now);
    }

    /// Grants up to `at_most` of the slots that waiters are owed.
    pub fn grant_some(&mut self, mut at_most: usize, now: Instant) {
        while let Some((&arrival, &place)) = self.owed.first_key_value() {
            let key = self.places[place].key;
            match self.next_to_serve(key, now) {
                Some(next) if next == place => {
                    self.serve_waiters(key, self.caps.max_grants, &mut at_most, now);
                }
                // The owed waiter's connection has closed, so the slot is owed to the next waiter.
                Some(next) => self.owe(next),
                None => self.note_if_idle(key, now),
            }
            if at_most == 0 || self.owed.contains_key(&arrival) {
                break; // the step is over, or there is still no fence or no room
            }
        }
        self.must_go_on_granting = at_most == 0 && !self.owed.is_empty();
    }

    /// Whether another step is needed to grant owed slots. The next operation begins with it.
    pub fn must_go_on_granting(&self) -> bool {
        self.must_go_on_granting
    }

    /// The waiter whose turn it is. Removes waiters of closed connections from the front of the
    /// queue, because they are granted nothing and must not hold up other waiters.
    pub fn next_to_serve(&mut self, key: KeyId, now: Instant) -> Option<PlaceId> {
        if self.leaving_count > 0 {
            while let Some(first) = self.keys[key].waiters.first() {
                let entry = self.conns.get(&self.places[first].conn);
                if entry.is_none_or(|entry| entry.leaving.is_none()) {
                    break;
                }
                self.leave_queue(first, now);
                self.remove_place(first, now);
            }
        }
        self.next_in_line(key)
    }
}
