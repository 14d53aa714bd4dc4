//! What is due when: an exact agenda, with one entry for each thing that has a deadline.
//!
//! An entry goes when its thing goes, so that a hundred thousand grants a second with a long lease
//! leave nothing behind.

use std::collections::BTreeSet;
use std::time::Instant;

/// Things of type `T`, each filed under the instant at which it is due.
#[derive(Debug)]
pub(super) struct Deadlines<T>(BTreeSet<(Instant, T)>);

impl<T: Ord> Deadlines<T> {
    pub(super) fn new() -> Self {
        Deadlines(BTreeSet::new())
    }

    pub(super) fn file(&mut self, at: Instant, thing: T) {
        let new = self.0.insert((at, thing));
        debug_assert!(new, "filed twice");
    }

    pub(super) fn strike(&mut self, at: Instant, thing: T) {
        let filed = self.0.remove(&(at, thing));
        debug_assert!(filed, "struck without having been filed");
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The earliest instant that anything is filed under.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Takes out the earliest entry if it is due by `now`.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<T> {
        if self.next()? <= now {
            self.pop_first()
        } else {
            None
        }
    }

    /// Takes out the earliest entry.
    pub(super) fn pop_first(&mut self) -> Option<T> {
        self.0.pop_first().map(|(_, thing)| thing)
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &(Instant, T)> {
        self.0.iter()
    }
}
