//! One key: who holds it, who waits for it, and the rule by which a waiter becomes a holder.

use std::time::Instant;

use super::place::{KeyPlaces, PlaceId, Places};
use super::slab::{Id, List, Slab};
use super::types::Key;
use crate::terms::{Kind, Limit, Refusal, Weight};

pub(super) type Queues = Slab<KeyQueue, 1>;
pub(super) type KeyId = Id<KeyQueue>;
pub(super) type KeyList = List<KeyQueue, 0>;

/// The holders and the waiters of one key.
///
/// **Invariants:** the holders' weights never add up to more than the key's slots; waiters are in
/// order of arrival; holders are in order of their grants, which is the order of their fences.
pub(super) struct KeyQueue {
    pub(super) key: Key,
    pub(super) kind: Kind,
    pub(super) limit: Limit,
    /// The slots that no holder has.
    pub(super) free: u32,
    pub(super) holders: KeyPlaces,
    pub(super) waiters: KeyPlaces,
    /// The key's number in order of creation.
    pub(super) made: u64,
    /// When the key last became idle. Not valid while the key is in use.
    pub(super) last_used: Instant,
}

impl KeyQueue {
    pub(super) fn new(key: Key, kind: Kind, limit: Limit, made: u64, now: Instant) -> Self {
        KeyQueue {
            key,
            kind,
            limit,
            free: kind.slot_count(limit),
            holders: List::new(),
            waiters: List::new(),
            made,
            last_used: now,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.waiters.is_empty()
    }

    /// Checks that the key is used as `kind` with `limit`. An idle key adopts both.
    pub(super) fn agree(&mut self, kind: Kind, limit: Limit) -> Result<(), Refusal> {
        if self.is_idle() {
            self.kind = kind;
            self.limit = limit;
            self.free = kind.slot_count(limit);
        }
        if (self.kind, self.limit) == (kind, limit) {
            Ok(())
        } else {
            Err(Refusal::LimitMismatch)
        }
    }

    /// The waiter whose turn it is: the first one, if enough slots are free for its weight.
    pub(super) fn next_in_line(&self, places: &Places) -> Option<PlaceId> {
        let first = self.waiters.first();
        first.filter(|first| self.has_room(places[*first].weight))
    }

    /// Whether a new claim must queue. Behind a waiter whose turn it is, a new claim does not
    /// queue: it is refused instead, because that waiter is owed its slots first.
    pub(super) fn must_wait(&self, weight: Weight, places: &Places) -> bool {
        let is_behind_waiter = || !self.waiters.is_empty() && self.next_in_line(places).is_none();
        !self.has_room(weight) || is_behind_waiter()
    }

    pub(super) fn has_room(&self, weight: Weight) -> bool {
        weight.get() <= self.free
    }
}
