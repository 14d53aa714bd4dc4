//! The record of a holder, and the restoring of holders from a journal or a state file.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::orphans::ORPHANS;
use super::queue::PlaceId;
use super::types::{Ask, Claimant};
use super::LockTable;
use crate::wire::terms::{Kind, Limit, Terms};
use crate::wire::token::{Fence, Token};

/// A holder, as written to a journal or a hand-over file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderRecord {
    pub key: Key,
    pub terms: Terms,
    /// The numbers of its slots in ascending order, if the holder has asked for them.
    pub numbers: Arc<[u32]>,
    pub token: Token,
    /// The length of its lease. A journal gets the longest lease since the grant was made, kept or
    /// adopted.
    pub lease: Duration,
    /// What is left of the lease; `None` if it begins anew once the holder is restored.
    pub left: Option<Duration>,
    /// How long ago the grant was made; `None` if that is not recorded.
    pub age: Option<Duration>,
    /// Whether this is a kept grant: its client asked to keep it without a connection.
    pub is_kept: bool,
    /// The tag that the client of an orphan gave itself.
    pub tag: Option<Arc<str>>,
}

impl HolderRecord {
    /// A grant without numbers that is not kept, of a client without a tag.
    pub fn new(key: &str, terms: Terms, token: Token, lease: Duration) -> HolderRecord {
        HolderRecord {
            key: Key::from(key),
            terms,
            numbers: Arc::default(),
            token,
            lease,
            left: None,
            age: None,
            is_kept: false,
            tag: None,
        }
    }

    /// Whether the record is consistent in itself.
    pub fn is_possible(&self) -> bool {
        let Terms {
            kind,
            limit,
            weight,
        } = self.terms;
        let has_limit = kind == Kind::Semaphore || limit == Limit::ONE;
        let fits = weight.get() <= kind.slot_count(limit);
        let numbers = &self.numbers;
        let are_of_slots = kind == Kind::Semaphore
            && numbers.len() == weight.get() as usize
            && numbers.is_sorted_by(|a, b| a < b)
            && numbers.last().is_some_and(|last| *last < limit.get());
        has_limit && fits && (numbers.is_empty() || are_of_slots)
    }
}

impl LockTable {
    /// Restores a holder as an orphan, whose lease begins or goes on now. The caps do not apply,
    /// except the maximum time for which a grant is kept. Returns `false` if the record contradicts
    /// the other holders.
    pub fn restore(&mut self, record: &HolderRecord, now: Instant) -> bool {
        let Token { fence, salt } = record.token;
        let lease = if record.is_kept {
            record.lease.min(self.caps.max_keep_time)
        } else {
            record.lease
        };
        let since = record.age.and_then(|age| now.checked_sub(age));
        let ask = Ask {
            key: record.key.as_str(),
            terms: record.terms,
            lease,
            max_waiters: None,
        };
        let key = match self.names.get(&record.key) {
            Some(key) => *key,
            None => self.insert_key(&ask, now),
        };
        let queue = &mut self.keys[key];
        let is_possible = queue.agree(ask.terms).is_ok() && queue.has_room(ask.terms.weight);
        if !is_possible || self.holders.contains_key(&fence) {
            return false;
        }
        let is_in_use = |number: &u32| self.numbers.is_in_use(key, *number);
        if record.numbers.iter().any(is_in_use) {
            return false;
        }
        let last = queue.holders.last();
        let last = last.and_then(|last| self.places[last].fence());
        self.take_into_use(key);
        let claimant = Claimant {
            conn: ORPHANS,
            salt,
            can_adopt: false,
        };
        // The change is noted below, when the place says all of the record.
        let changes = self.changes.take();
        let place = self.add_holder(claimant, key, &ask, fence, now);
        self.changes = changes;
        if !record.numbers.is_empty() {
            self.numbers.give(fence, key, &record.numbers);
        }
        if let Some(left) = record.left {
            self.set_lease_end(place, now + left);
        }
        self.mark_if_proof(place, fence);
        self.places[place].since = since.unwrap_or(now);
        self.places[place].has_age = since.is_some();
        self.places[place].is_kept = record.is_kept;
        // The work under a kept grant has ended. The earlier server may have known the status.
        self.places[place].is_past = record.is_kept;
        self.kept_count += usize::from(record.is_kept);
        if let Some(tag) = &record.tag {
            self.orphan_tags.insert(fence, Arc::clone(tag));
        }
        if last > Some(fence) {
            self.sort_last_holder(place, fence);
        }
        self.note_restored(place, lease);
        true
    }

    /// Moves the last holder of a key to its place in the order of fences.
    fn sort_last_holder(&mut self, last: PlaceId, fence: Fence) {
        let key = self.places[last].key;
        let holders = self.keys[key].holders.iter(&self.places);
        let is_later = |id: &PlaceId| self.places[*id].fence() > Some(fence);
        let later: Vec<PlaceId> = holders.filter(is_later).collect();
        for id in later {
            self.keys[key].holders.remove(&mut self.places, id);
            self.keys[key].holders.push(&mut self.places, id);
        }
    }

    /// The next fence, or `None` if there is none, and a record of each holder whose client knows
    /// its token, in order of fences, with its connection.
    pub fn hand_over(&mut self, now: Instant) -> (Option<u64>, Vec<(ConnId, HolderRecord)>) {
        let next_fence = self.fences.next_fence();
        let mut records = Vec::with_capacity(self.holders.len());
        let mut holders: Vec<_> = self.holders.iter().collect();
        holders.sort_unstable_by_key(|(fence, _)| **fence);
        for (fence, id) in holders {
            let place = &self.places[*id];
            let left = place
                .lease_end()
                .map(|(end, _)| end.saturating_duration_since(now));
            let Some(left) = left.filter(|left| place.is_told && !left.is_zero()) else {
                continue;
            };
            // The end of a kept grant stays as it is.
            let lease = Duration::from_secs(place.lease_len.into()).max(left);
            let (lease, left) = if place.is_kept {
                (left, None)
            } else {
                (lease, Some(left))
            };
            let record = HolderRecord {
                left,
                age: Some(now.saturating_duration_since(place.since)),
                ..self.record(*id, *fence, lease)
            };
            records.push((place.conn, record));
        }
        (next_fence, records)
    }

    /// Restarts the leases of these holders, except leases that have run out or would get shorter.
    /// The lease of a kept grant restarts with the length for which its client asked to keep it,
    /// which may be shorter than the lease of its claim.
    pub fn begin_anew(&mut self, fences: &[Fence], now: Instant) {
        for fence in fences {
            let Some(id) = self.holders.get(fence).copied() else {
                continue;
            };
            let place = &self.places[id];
            let recorded = self.recorded_lease(*fence).filter(|_| place.is_kept);
            let anew = now + recorded.unwrap_or(place.lease);
            if place
                .lease_end()
                .is_some_and(|(ends, _)| now < ends && ends < anew)
            {
                self.set_lease_end(id, anew);
            }
        }
    }

    /// The record of a holder with this lease. Only an orphan has a tag in the table.
    pub fn record(&self, id: PlaceId, fence: Fence, lease: Duration) -> HolderRecord {
        let place = &self.places[id];
        let (queue, salt) = (&self.keys[place.key], place.salt);
        HolderRecord {
            key: queue.key.clone(),
            terms: queue.terms(place.weight),
            numbers: self.numbers.of(fence),
            token: Token { fence, salt },
            lease,
            left: None,
            age: None,
            is_kept: place.is_kept,
            tag: self.orphan_tags.get(&fence).cloned(),
        }
    }
}
