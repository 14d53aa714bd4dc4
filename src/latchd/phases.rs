//! What a connection has enqueued for and not yet waited for: the connection is what binds the two
//! phases.

use std::collections::HashMap;

use crate::table::{Grant, Key, Kind, Ticket};

/// How an entry began.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// `e` was answered `acquired`: the client knows its token.
    Acquired(Grant),
    /// `e` was answered `queued`.
    Queued(Ticket),
}

/// The phase-one entries of one connection, by kind and key.
#[derive(Debug, Default)]
pub(super) struct Phases {
    locks: HashMap<Key, Phase>,
    semaphores: HashMap<Key, Phase>,
}

impl Phases {
    pub(super) fn get(&self, kind: Kind, key: &str) -> Option<Phase> {
        let entries = match kind {
            Kind::Lock => &self.locks,
            Kind::Semaphore => &self.semaphores,
        };
        entries.get(key).copied()
    }

    pub(super) fn insert(&mut self, kind: Kind, key: &str, phase: Phase) {
        self.entries(kind).insert(Key::from(key), phase);
    }

    pub(super) fn remove(&mut self, kind: Kind, key: &str) -> Option<Phase> {
        self.entries(kind).remove(key)
    }

    pub(super) fn len(&self) -> usize {
        self.locks.len() + self.semaphores.len()
    }

    /// Drops the entries that `is_alive` does not vouch for.
    pub(super) fn retain(&mut self, mut is_alive: impl FnMut(Kind, &str, Phase) -> bool) {
        for kind in [Kind::Lock, Kind::Semaphore] {
            self.entries(kind)
                .retain(|key, phase| is_alive(kind, key.as_str(), *phase));
        }
    }

    fn entries(&mut self, kind: Kind) -> &mut HashMap<Key, Phase> {
        match kind {
            Kind::Lock => &mut self.locks,
            Kind::Semaphore => &mut self.semaphores,
        }
    }
}
