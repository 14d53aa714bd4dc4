//! A place: what one claim has, in the queue of its key and among the holders, or there at once.

use std::time::{Duration, Instant};

use super::queue::KeyQueue;
use super::slab::{Id, List, Slab};
use super::types::{ConnId, Refusal};
use crate::token::{Fence, Salt};

pub(super) type Places = Slab<Place, 2>;
pub(super) type PlaceId = Id<Place>;

/// Places at one key: its holders, or its waiters.
pub(super) type KeyPlaces = List<Place, 0>;
/// Places of one connection.
pub(super) type ConnPlaces = List<Place, 1>;

/// The place of a holder, or of a waiter, which may become one.
pub(super) struct Place {
    pub(super) conn: ConnId,
    /// Valid unless the place has ended.
    pub(super) key: Id<KeyQueue>,
    pub(super) lease: Duration,
    pub(super) salt: Salt,
    pub(super) state: PlaceState,
    /// When it was queued, or granted.
    pub(super) since: Instant,
    /// Whether the client knows its token.
    pub(super) is_told: bool,
    /// Whether this is the phase-one entry of its connection for its key.
    pub(super) is_enqueued: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaceState {
    /// In the queue, in order of arrival over all keys.
    Waiting { arrival: u64 },
    /// Has a slot.
    Held {
        fence: Fence,
        /// When its lease is over.
        expires_at: Instant,
    },
    /// Neither any more, before the client was told of a grant.
    Ended(Refusal),
}

impl Place {
    pub(super) fn fence(&self) -> Option<Fence> {
        match self.state {
            PlaceState::Held { fence, .. } => Some(fence),
            PlaceState::Waiting { .. } | PlaceState::Ended(_) => None,
        }
    }

    /// When a holder's lease is over, and its fence.
    pub(super) fn lease_end(&self) -> Option<(Instant, Fence)> {
        match self.state {
            PlaceState::Held { fence, expires_at } => Some((expires_at, fence)),
            PlaceState::Waiting { .. } | PlaceState::Ended(_) => None,
        }
    }
}
