//! Changes of the holders, for a journal, and the restoring of holders from a journal or a
//! hand-over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::orphans::ORPHANS;
use super::queue::PlaceId;
use super::types::{Ask, Claimant};
use super::LockTable;
use crate::terms::{Kind, Limit, Weight};
use crate::token::{Fence, Token};

/// A change of the holders, to be reported to the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A claim was granted, or the record of its holder has changed.
    Held(HolderRecord),
    /// The grant with this fence has ended.
    Ended(Fence),
}

impl Change {
    pub fn fence(&self) -> Fence {
        match self {
            Change::Held(record) => record.token.fence,
            Change::Ended(fence) => *fence,
        }
    }
}

/// A holder, as written to a journal or a hand-over file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderRecord {
    pub key: Key,
    pub kind: Kind,
    pub limit: Limit,
    pub weight: Weight,
    /// The numbers of its slots in ascending order, if the holder has asked for them.
    pub numbers: Arc<[u32]>,
    pub token: Token,
    /// The length of its lease once it is restored. A journal gets the longest lease since the
    /// grant was made, kept or adopted; a hand-over file gets what is left of the present lease.
    pub lease: Duration,
    /// Whether this is a kept grant: its client asked to keep it without a connection.
    pub is_kept: bool,
    /// The tag that the client of an orphan gave itself.
    pub tag: Option<Arc<str>>,
}

impl HolderRecord {
    /// Whether the record is consistent in itself.
    pub fn is_possible(&self) -> bool {
        let has_limit = self.kind == Kind::Semaphore || self.limit == Limit::ONE;
        let fits = self.weight.get() <= self.kind.slot_count(self.limit);
        let numbers = &self.numbers;
        let are_of_slots = self.kind == Kind::Semaphore
            && numbers.len() == self.weight.get() as usize
            && numbers.is_sorted_by(|a, b| a < b)
            && numbers.last().is_some_and(|last| *last < self.limit.get());
        has_limit && fits && (numbers.is_empty() || are_of_slots)
    }
}

#[cfg(any(test, fuzzing))]
impl HolderRecord {
    /// An exclusive lock that is not kept, of a client without a tag.
    pub fn of_lock(key: &str, token: Token, lease: Duration) -> HolderRecord {
        HolderRecord {
            key: Key::from(key),
            kind: Kind::Lock,
            limit: Limit::ONE,
            weight: Weight::WHOLE,
            numbers: Arc::default(),
            token,
            lease,
            is_kept: false,
            tag: None,
        }
    }
}

/// The changes that have not been taken yet.
#[derive(Default)]
pub(super) struct PendingChanges {
    changes: Vec<Change>,
    /// The lease to record for each holder, if it is not the lease of its claim because the grant
    /// was renewed for longer, kept or adopted.
    longest: BTreeMap<Fence, Duration>,
}

impl LockTable {
    /// Notes changes from now on. The caller must take them out of [`LockTable::changes`].
    pub fn note_changes(&mut self) {
        self.pending_changes.get_or_insert_default();
    }

    /// The changes that the caller has not taken out yet; `None` if changes are not noted.
    pub fn changes(&mut self) -> Option<&mut Vec<Change>> {
        self.pending_changes
            .as_mut()
            .map(|pending| &mut pending.changes)
    }

    /// Restores a holder as an orphan, whose lease begins now. The caps do not apply, except the
    /// maximum time for which a grant is kept. The caller must restore the holders of a key in the
    /// order of their fences. Returns `false` if the record contradicts the other holders.
    pub fn restore(&mut self, record: &HolderRecord, now: Instant) -> bool {
        let key = self.names.get(&record.key);
        let last = key.and_then(|key| self.keys[*key].holders.last());
        let fence = record.token.fence;
        let is_next = last.is_none_or(|last| self.places[last].fence() < Some(fence));
        is_next && !self.holders.contains_key(&fence) && self.restore_last(record, now)
    }

    /// Restores a holder behind the other holders of its key, whatever their fences. Returns
    /// `false` if the record contradicts them.
    pub(super) fn restore_last(&mut self, record: &HolderRecord, now: Instant) -> bool {
        let Token { fence, salt } = record.token;
        let lease = if record.is_kept {
            record.lease.min(self.caps.max_keep_time)
        } else {
            record.lease
        };
        let ask = Ask {
            key: record.key.as_str(),
            kind: record.kind,
            limit: record.limit,
            lease,
            weight: record.weight,
            max_waiters: None,
        };
        let key = match self.names.get(&record.key) {
            Some(key) => *key,
            None => self.insert_key(&ask, now),
        };
        let queue = &mut self.keys[key];
        if queue.agree(ask.kind, ask.limit).is_err() || !queue.has_room(ask.weight) {
            return false;
        }
        let is_in_use = |number: &u32| self.numbers.is_in_use(key, *number);
        if record.numbers.iter().any(is_in_use) {
            return false;
        }
        self.take_into_use(key);
        let conn = ORPHANS;
        let claimant = Claimant { conn, salt };
        // The journal already has this holder, and the state file gets it as a restored one.
        let proofs = self.proofs.take();
        let noted = (self.pending_changes.take(), self.lasting.take());
        let place = self.add_holder(claimant, key, &ask, fence, now);
        (self.pending_changes, self.lasting) = noted;
        self.proofs = proofs;
        if !record.numbers.is_empty() {
            self.numbers.give(fence, key, &record.numbers);
        }
        self.places[place].is_unprovable = self.lacks_proof(place);
        self.places[place].is_kept = record.is_kept;
        // The work under a kept grant has ended. The earlier server may have known the status.
        self.places[place].is_past = record.is_kept;
        self.kept_count += usize::from(record.is_kept);
        if let Some(tag) = &record.tag {
            self.orphan_tags.insert(fence, Arc::clone(tag));
        }
        self.note_lasting_restored(place);
        true
    }

    /// The next fence, or `None` if there is none, and a record of each holder whose client knows
    /// its token, in order of fences, with its connection. Each record states the remaining lease.
    pub fn hand_over(&mut self, now: Instant) -> (Option<u64>, Vec<(ConnId, HolderRecord)>) {
        let next_fence = self.fences.next_fence();
        let mut records = Vec::with_capacity(self.holders.len());
        for (fence, id) in &self.holders {
            let place = &self.places[*id];
            let left = place
                .lease_end()
                .map(|(end, _)| end.saturating_duration_since(now));
            let Some(left) = left.filter(|left| place.is_told && !left.is_zero()) else {
                continue;
            };
            records.push((place.conn, self.record(*id, *fence, left)));
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
            let pending = self.pending_changes.as_ref().filter(|_| place.is_kept);
            let longest = pending.and_then(|pending| pending.longest.get(fence));
            let anew = now + *longest.unwrap_or(&place.lease);
            if place
                .lease_end()
                .is_some_and(|(ends, _)| now < ends && ends < anew)
            {
                self.set_lease_end(id, anew);
            }
        }
    }

    /// Notes a holder with this lease.
    pub(super) fn note_held(&mut self, id: PlaceId, fence: Fence, lease: Duration) {
        self.note_lasting(id, lease);
        self.journal_held(id, fence, lease);
    }

    /// Notes a holder with this lease for the journal.
    fn journal_held(&mut self, id: PlaceId, fence: Fence, lease: Duration) {
        let Some(mut pending) = self.pending_changes.take() else {
            return;
        };
        let record = self.record(id, fence, lease);
        pending.changes.push(Change::Held(record));
        self.pending_changes = Some(pending);
    }

    /// The record of a holder with this lease. Only an orphan has a tag in the table.
    pub(super) fn record(&self, id: PlaceId, fence: Fence, lease: Duration) -> HolderRecord {
        let place = &self.places[id];
        let (queue, salt) = (&self.keys[place.key], place.salt);
        HolderRecord {
            key: queue.key.clone(),
            kind: queue.kind,
            limit: queue.limit,
            weight: place.weight,
            numbers: self.numbers.of(fence),
            token: Token { fence, salt },
            lease,
            is_kept: place.is_kept,
            tag: self.orphan_tags.get(&fence).cloned(),
        }
    }

    /// Notes that a lease was renewed, if the new lease is longer than every earlier one.
    pub(super) fn note_renewed(&mut self, id: PlaceId, lease: Duration) {
        self.note_lasting(id, lease);
        let (Some(pending), Some(fence)) = (&mut self.pending_changes, self.places[id].fence())
        else {
            return;
        };
        let longest = pending.longest.get(&fence).copied();
        if lease > longest.unwrap_or(self.places[id].lease) {
            pending.longest.insert(fence, lease);
            self.journal_held(id, fence, lease);
        }
    }

    /// Notes a holder again, because it now has slot numbers or is a kept grant.
    pub(super) fn note_again(&mut self, id: PlaceId) {
        self.note_lasting_again(id);
        if let (Some(pending), Some(fence)) = (&self.pending_changes, self.places[id].fence()) {
            let longest = pending.longest.get(&fence).copied();
            self.journal_held(id, fence, longest.unwrap_or(self.places[id].lease));
        }
    }

    /// Notes that a grant with this lease has become a kept grant, or is no longer one.
    pub(super) fn note_kept(&mut self, id: PlaceId, lease: Duration) {
        self.note_lasting(id, lease);
        if let (Some(pending), Some(fence)) = (&mut self.pending_changes, self.places[id].fence()) {
            pending.longest.insert(fence, lease);
            self.journal_held(id, fence, lease);
        }
    }

    /// Notes that a grant has ended.
    pub(super) fn note_ended(&mut self, id: PlaceId, fence: Fence) {
        self.note_lasting_ended(id, fence);
        if let Some(pending) = &mut self.pending_changes {
            pending.longest.remove(&fence);
            pending.changes.push(Change::Ended(fence));
        }
    }
}
