//! One key: who holds it, who waits for it, and the rule by which a waiter becomes a holder.

use std::time::Instant;

use super::place::{KeyPlaces, PlaceId};
use super::slab::{Id, List, Slab};
use super::types::{Key, Kind, Limit, Refusal};

pub(super) type Queues = Slab<KeyQueue, 1>;
pub(super) type KeyId = Id<KeyQueue>;
/// Idle keys.
pub(super) type KeyList = List<KeyQueue, 0>;

/// The holders and the waiters of one key.
///
/// **Invariants:** never more holders than the limit; waiters are in order of arrival; holders are
/// in order of grants, which is the order of their fences.
pub(super) struct KeyQueue {
    pub(super) key: Key,
    pub(super) kind: Kind,
    pub(super) limit: Limit,
    pub(super) holders: KeyPlaces,
    pub(super) waiters: KeyPlaces,
    /// When the key was last held or waited for; it is idle since, unless it is in use.
    pub(super) last_used: Instant,
}

impl KeyQueue {
    pub(super) fn new(key: Key, kind: Kind, limit: Limit, now: Instant) -> Self {
        KeyQueue {
            key,
            kind,
            limit,
            holders: List::new(),
            waiters: List::new(),
            last_used: now,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.waiters.is_empty()
    }

    /// Makes sure that the key is used as `kind` with `limit`. An idle key takes them over.
    pub(super) fn agree(&mut self, kind: Kind, limit: Limit) -> Result<(), Refusal> {
        if self.is_idle() {
            self.kind = kind;
            self.limit = limit;
        }
        if (self.kind, self.limit) == (kind, limit) {
            Ok(())
        } else {
            Err(Refusal::LimitMismatch)
        }
    }

    /// The waiter whose turn it is: the first in line, if a slot is free.
    pub(super) fn next_in_line(&self) -> Option<PlaceId> {
        self.waiters.first().filter(|_| self.has_free_slot())
    }

    pub(super) fn has_free_slot(&self) -> bool {
        self.holders.len() < self.limit.get() as usize
    }
}
