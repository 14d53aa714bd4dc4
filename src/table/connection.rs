//! What one connection holds, waits for and has enqueued.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use super::types::{Grant, Key, Kind, Ticket};
use crate::token::Fence;

/// Dead phase-one entries kept for one connection: each waits for a `w` that may never come.
pub(super) const MAX_DEAD: usize = 64;

/// Everything that belongs to one connection, so that a disconnect costs what the connection has
/// and no more.
pub(super) struct ConnectionEntry {
    pub(super) held: BTreeMap<Fence, Key>,
    pub(super) tickets: BTreeSet<Ticket>,
    /// How many of the tickets wait.
    pub(super) waiting_count: usize,
    pub(super) enqueued: PhaseOneEntries,
    /// When it last held or waited for anything.
    pub(super) last_busy: Instant,
}

impl ConnectionEntry {
    pub(super) fn new(now: Instant) -> Self {
        ConnectionEntry {
            held: BTreeMap::new(),
            tickets: BTreeSet::new(),
            waiting_count: 0,
            enqueued: PhaseOneEntries::default(),
            last_busy: now,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.tickets.is_empty() && self.enqueued.is_empty()
    }

    /// How many slots and places it has. A place that becomes a slot counts as one throughout.
    pub(super) fn count(&self) -> usize {
        self.held.len() + self.waiting_count
    }
}

/// A key that a connection has enqueued for and not yet waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PhaseOne {
    /// `e` was answered `queued`: the claim waits, or its grant has not been collected.
    Queued(Ticket),
    /// `e` was answered `acquired`: the client knows its token.
    Granted(Grant),
    /// The lease of its token is over, or the token was released elsewhere.
    Dead,
}

/// The phase-one entries of one connection.
///
/// **Invariants:** an entry that is not dead is a waiter or a holder, so the table's caps bound
/// their number; no more than [`MAX_DEAD`] are dead.
#[derive(Default)]
pub struct PhaseOneEntries {
    locks: BTreeMap<Key, PhaseOne>,
    semaphores: BTreeMap<Key, PhaseOne>,
    /// The dead entries, the first that died first.
    dead: VecDeque<(Kind, Key)>,
}

impl PhaseOneEntries {
    pub(super) fn is_empty(&self) -> bool {
        self.locks.is_empty() && self.semaphores.is_empty()
    }

    pub(super) fn get(&self, kind: Kind, key: &str) -> Option<PhaseOne> {
        let entries = match kind {
            Kind::Lock => &self.locks,
            Kind::Semaphore => &self.semaphores,
        };
        entries.get(key).copied()
    }

    pub(super) fn insert(&mut self, kind: Kind, key: Key, entry: PhaseOne) {
        self.entries(kind).insert(key, entry);
    }

    pub(super) fn remove(&mut self, kind: Kind, key: &str) {
        if self.entries(kind).remove(key) == Some(PhaseOne::Dead) {
            self.dead
                .retain(|(dead_kind, dead_key)| (*dead_kind, dead_key.as_str()) != (kind, key));
        }
    }

    /// Marks an entry as dead. At the cap, the one that died first is forgotten.
    pub(super) fn mark_dead(&mut self, kind: Kind, key: &Key) {
        self.insert(kind, key.clone(), PhaseOne::Dead);
        self.dead.push_back((kind, key.clone()));
        if self.dead.len() > MAX_DEAD {
            let (kind, key) = self.dead.pop_front().expect("longer than the cap");
            self.entries(kind).remove(&key);
        }
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (Kind, &Key, PhaseOne)> {
        let locks = self.locks.iter().map(|entry| (Kind::Lock, entry));
        let semaphores = self.semaphores.iter().map(|entry| (Kind::Semaphore, entry));
        let all = locks.chain(semaphores);
        all.map(|(kind, (key, entry))| (kind, key, *entry))
    }

    #[cfg(test)]
    pub(super) fn dead_count(&self) -> usize {
        self.dead.len()
    }

    fn entries(&mut self, kind: Kind) -> &mut BTreeMap<Key, PhaseOne> {
        match kind {
            Kind::Lock => &mut self.locks,
            Kind::Semaphore => &mut self.semaphores,
        }
    }
}
