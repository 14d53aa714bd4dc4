//! Which grants of a journal no client has been told of, and which were never in etcd.

use std::collections::BTreeSet;
use std::mem;

use crate::table::Change;
use crate::token::Fence;

#[derive(Default)]
pub(super) struct Untold {
    grants: BTreeSet<Fence>,
    /// Every holder that was in etcd before the round in progress has this fence or a lower one.
    pub(super) highest_written: u64,
}

impl Untold {
    /// Takes a change into account. A holder that was in etcd before is one that a client knows.
    pub(super) fn note(&mut self, change: &Change) {
        match change {
            Change::Held(_) if self.is_unwritten(change.fence()) => {
                self.grants.insert(change.fence());
            }
            Change::Held(_) => {}
            Change::Ended(fence) => drop(self.grants.remove(fence)),
        }
    }

    /// Takes note that these holders are in etcd.
    pub(super) fn note_written(&mut self, fences: impl Iterator<Item = Fence>) {
        let highest = fences.max().map_or(0, |fence| fence.0);
        self.highest_written = self.highest_written.max(highest);
    }

    /// Whether the holder has never been in etcd.
    pub(super) fn is_unwritten(&self, fence: Fence) -> bool {
        fence.0 > self.highest_written
    }

    /// Takes note that clients are told of these grants. Returns those of which no client was told
    /// before.
    pub(super) fn tell(&mut self, grants: &[Fence]) -> Vec<Fence> {
        let grants = grants.iter().copied();
        grants.filter(|it| self.grants.remove(it)).collect()
    }

    /// Takes the grants of which no client has been told.
    pub(super) fn take(&mut self) -> BTreeSet<Fence> {
        mem::take(&mut self.grants)
    }
}
