//! When each holder's lease is over: a heap, with one entry for each holder. What a lease is good
//! for is not decided here: the table begins and renews leases, and `expiry` ends them.
//!
//! An entry goes when its holder goes, so that a hundred thousand grants a second with a long lease
//! leave nothing behind. For this, each place knows where in the heap its entry is.

use std::cmp::Ordering;
use std::time::Instant;

use super::place::{PlaceId, PlaceState, Places};
use super::slab::sparse;

/// The leases of all holders. Leases that are over at the same time end in order of grants.
#[derive(Default)]
pub(super) struct Leases(Vec<(Instant, PlaceId)>);

impl Leases {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The lease that is over first.
    pub(super) fn first(&self) -> Option<(Instant, PlaceId)> {
        self.0.first().copied()
    }

    /// When the lease of a holder is over.
    pub(super) fn expires_at(&self, places: &Places, id: PlaceId) -> Instant {
        self.0[position(places, id)].0
    }

    pub(super) fn insert(&mut self, places: &mut Places, id: PlaceId, expires_at: Instant) {
        self.0.push((expires_at, id));
        self.settle(places, self.0.len() - 1);
    }

    /// Starts a lease anew.
    pub(super) fn extend(&mut self, places: &mut Places, id: PlaceId, expires_at: Instant) {
        let at = position(places, id);
        self.0[at].0 = expires_at;
        self.settle(places, at);
    }

    pub(super) fn remove(&mut self, places: &mut Places, id: PlaceId) {
        let at = position(places, id);
        self.0.swap_remove(at);
        if at < self.0.len() {
            self.settle(places, at);
        }
        if let Some(capacity) = sparse(self.0.len(), self.0.capacity()) {
            self.0.shrink_to(capacity);
        }
    }

    /// Moves the entry at `at` to where it belongs, upwards or downwards.
    fn settle(&mut self, places: &mut Places, mut at: usize) {
        while at > 0 && self.compare(places, at, (at - 1) / 2).is_lt() {
            self.0.swap(at, (at - 1) / 2);
            set_position(places, self.0[at].1, at);
            at = (at - 1) / 2;
        }
        loop {
            let children = (2 * at + 1..self.0.len()).take(2);
            match children.min_by(|left, right| self.compare(places, *left, *right)) {
                Some(child) if self.compare(places, child, at).is_lt() => {
                    self.0.swap(at, child);
                    set_position(places, self.0[at].1, at);
                    at = child;
                }
                _ => break,
            }
        }
        set_position(places, self.0[at].1, at);
    }

    fn compare(&self, places: &Places, a: usize, b: usize) -> Ordering {
        let ((a_at, a), (b_at, b)) = (self.0[a], self.0[b]);
        let by_grant = || places[a].fence().cmp(&places[b].fence());
        a_at.cmp(&b_at).then_with(by_grant)
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn iter(&self) -> impl Iterator<Item = &(Instant, PlaceId)> {
        self.0.iter()
    }
}

fn position(places: &Places, id: PlaceId) -> usize {
    match places[id].state {
        PlaceState::Held { lease_at, .. } => lease_at as usize,
        other => unreachable!("only holders have leases, not {other:?}"),
    }
}

fn set_position(places: &mut Places, id: PlaceId, at: usize) {
    match &mut places[id].state {
        PlaceState::Held { lease_at, .. } => {
            *lease_at = u32::try_from(at).expect("fewer than 2^32 holders");
        }
        other => unreachable!("only holders have leases, not {other:?}"),
    }
}
