//! What one connection holds and waits for, and which of its phase-one entries have ended.

use std::collections::VecDeque;
use std::time::Instant;

use super::place::{ConnPlaces, PlaceId};
use super::queue::KeyId;
use super::slab::List;
use super::types::{ConnId, Holdings, Key, Kind, Refusal};
use super::{shrink, LockTable};

/// Ended phase-one entries kept for one connection: each waits for a `w` that may never come.
pub(super) const MAX_ENDED: usize = 64;

/// Everything that belongs to one connection, so that a disconnect costs what the connection has
/// and no more.
pub(super) struct ConnectionEntry {
    /// The slots whose tokens the client knows.
    pub(super) held: ConnPlaces,
    /// The other places: the client waits for them, or has enqueued for them.
    pub(super) pending: ConnPlaces,
    /// How many slots and places in queues it has. A place that becomes a slot counts as one
    /// throughout.
    pub(super) count: usize,
    pub(super) ended: EndedEntries,
    /// When it last held or waited for anything.
    pub(super) last_busy: Instant,
}

impl ConnectionEntry {
    pub(super) fn new(now: Instant) -> Self {
        ConnectionEntry {
            held: List::new(),
            pending: List::new(),
            count: 0,
            ended: EndedEntries::default(),
            last_busy: now,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.pending.is_empty() && self.ended.0.is_empty()
    }
}

/// The phase-one entries of one connection that have ended before its `w` came: their leases have
/// run out, their tokens were released elsewhere, or the drain has dismissed them. The entry that
/// ended first is the first.
#[derive(Default)]
pub(super) struct EndedEntries(VecDeque<(Kind, Key, Refusal)>);

impl EndedEntries {
    pub(super) fn get(&self, kind: Kind, key: &str) -> Option<Refusal> {
        let found = self.0.iter().find(|ended| is_for(ended, kind, key));
        found.map(|(_, _, refusal)| *refusal)
    }

    /// Adds an entry. Of those whose leases are over, the one that ended first is forgotten at the
    /// cap; the caps of the table bound how many the drain dismisses.
    pub(super) fn add(&mut self, kind: Kind, key: Key, refusal: Refusal) {
        self.0.push_back((kind, key, refusal));
        let is_expired = |ended: &(Kind, Key, Refusal)| ended.2 == Refusal::LeaseExpired;
        if self.0.iter().filter(|ended| is_expired(ended)).count() > MAX_ENDED {
            let first = self.0.iter().position(is_expired);
            first.map(|first| self.0.remove(first));
        }
    }

    pub(super) fn remove(&mut self, kind: Kind, key: &str) {
        self.0.retain(|ended| !is_for(ended, kind, key));
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn iter(&self) -> impl Iterator<Item = &(Kind, Key, Refusal)> {
        self.0.iter()
    }
}

fn is_for(ended: &(Kind, Key, Refusal), kind: Kind, key: &str) -> bool {
    ended.0 == kind && ended.1.as_str() == key
}

impl LockTable {
    /// Forgets a connection: its places go, and its slots do what `holdings` says. A grant that it
    /// has not collected goes too, since the client does not know the token.
    ///
    /// The slots are released by [`LockTable::release_some`], which the caller must call until it
    /// is done.
    pub fn disconnect(&mut self, conn: ConnId, holdings: Holdings, now: Instant) {
        let Some(entry) = self.conns.get(&conn) else {
            return;
        };
        let pending: Vec<PlaceId> = entry.pending.iter(&self.places).collect();
        // The places go before the slots: otherwise a slot could pass from the connection to
        // itself.
        let is_waiting = |id: &PlaceId| self.places[*id].fence().is_none();
        let (waiting, uncollected): (Vec<_>, Vec<_>) = pending.into_iter().partition(is_waiting);
        let left: Vec<KeyId> = waiting
            .into_iter()
            .filter_map(|id| self.give_up(id, now))
            .collect();
        for key in left {
            self.promote(key, now);
        }
        for id in uncollected {
            if let Some(key) = self.give_up(id, now) {
                self.promote(key, now);
            }
        }
        if holdings == Holdings::Keep {
            self.conns.remove(&conn);
        }
    }

    /// Releases up to `at_most` slots of a connection that has disconnected; `true` when none is
    /// left. In steps, because a million slots would delay every other client for too long.
    pub fn release_some(&mut self, conn: ConnId, at_most: usize, now: Instant) -> bool {
        for _ in 0..at_most {
            let entry = self.conns.get(&conn);
            let Some(held) = entry.and_then(|entry| entry.held.first()) else {
                self.conns.remove(&conn);
                shrink(&mut self.conns);
                return true;
            };
            self.vacate(held, now);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_expired_entries_forget_no_dismissed_one() {
        let mut ended = EndedEntries::default();
        let key = |number: usize| Key::from(number.to_string().as_str());
        for number in 0..100 {
            ended.add(Kind::Lock, key(number), Refusal::Draining);
        }
        for number in 100..200 {
            ended.add(Kind::Lock, key(number), Refusal::LeaseExpired);
        }
        assert_eq!(ended.get(Kind::Lock, "0"), Some(Refusal::Draining));
        assert_eq!(ended.get(Kind::Lock, "100"), None);
        assert_eq!(ended.get(Kind::Lock, "199"), Some(Refusal::LeaseExpired));
        assert_eq!(ended.iter().count(), 100 + MAX_ENDED);
    }
}
