//! What one connection holds and waits for, and which of its phase-one entries have ended.

use std::collections::VecDeque;
use std::time::Instant;

use super::place::ConnPlaces;
use super::slab::List;
use super::types::{Key, Kind, Refusal};

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
        if refusal == Refusal::LeaseExpired && self.0.len() > MAX_ENDED {
            self.0.pop_front();
        }
    }

    pub(super) fn remove(&mut self, kind: Kind, key: &str) {
        self.0.retain(|ended| !is_for(ended, kind, key));
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &(Kind, Key, Refusal)> {
        self.0.iter()
    }
}

fn is_for(ended: &(Kind, Key, Refusal), kind: Kind, key: &str) -> bool {
    ended.0 == kind && ended.1.as_str() == key
}
