//! One key: who holds it, who waits for it, and the rule by which a waiter becomes a holder. Each
//! holder and each waiter has a place, which is in a list of its key and in one of its connection.

use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::slab::{Id, List, Slab};
use crate::terms::{Kind, Limit, Refusal, Weight};
use crate::token::{Fence, Salt};

pub(super) type Places = Slab<Place, 2>;
pub(super) type PlaceId = Id<Place>;

/// The holders of one key, or its waiters.
pub(super) type KeyPlaces = List<Place, 0>;
pub(super) type ConnPlaces = List<Place, 1>;

pub(super) type Queues = Slab<KeyQueue, 1>;
pub(super) type KeyId = Id<KeyQueue>;
pub(super) type KeyList = List<KeyQueue, 0>;

/// The holders and the waiters of one key.
///
/// **Invariants:** the holders' weights never add up to more than the key's slots; waiters are in
/// order of arrival; holders are in order of their grants, which is the order of their fences.
pub(super) struct KeyQueue {
    pub(super) key: Key,
    pub(super) kind: Kind,
    pub(super) limit: Limit,
    /// The slots that no holder has.
    pub(super) free: u32,
    pub(super) holders: KeyPlaces,
    pub(super) waiters: KeyPlaces,
    /// The key's number in order of creation.
    pub(super) made: u64,
    /// When the key last became idle. Not valid while the key is in use.
    pub(super) last_used: Instant,
    /// Whether no client of an earlier server can hold it. Not valid once the table has settled.
    pub(super) is_proved_free: bool,
    /// Whether its past holders are remembered.
    pub(super) has_history: bool,
}

impl KeyQueue {
    pub(super) fn new(key: Key, kind: Kind, limit: Limit, made: u64, now: Instant) -> Self {
        KeyQueue {
            key,
            kind,
            limit,
            free: kind.slot_count(limit),
            holders: List::new(),
            waiters: List::new(),
            made,
            last_used: now,
            is_proved_free: false,
            has_history: false,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.waiters.is_empty()
    }

    /// Checks that the key is used as `kind` with `limit`. An idle key adopts both.
    pub(super) fn agree(&mut self, kind: Kind, limit: Limit) -> Result<(), Refusal> {
        if self.is_idle() {
            self.kind = kind;
            self.limit = limit;
            self.free = kind.slot_count(limit);
        }
        if (self.kind, self.limit) == (kind, limit) {
            Ok(())
        } else {
            Err(Refusal::LimitMismatch)
        }
    }

    /// The waiter whose turn it is: the first one, if enough slots are free for its weight.
    pub(super) fn next_in_line(&self, places: &Places) -> Option<PlaceId> {
        let first = self.waiters.first();
        first.filter(|first| self.has_room(places[*first].weight))
    }

    /// Whether a new claim must queue. Behind a waiter whose turn it is, a new claim does not
    /// queue: it is refused instead, because that waiter is owed its slots first.
    pub(super) fn must_wait(&self, weight: Weight, places: &Places) -> bool {
        let is_behind_waiter = || !self.waiters.is_empty() && self.next_in_line(places).is_none();
        !self.has_room(weight) || is_behind_waiter()
    }

    pub(super) fn has_room(&self, weight: Weight) -> bool {
        weight.get() <= self.free
    }
}

/// The length of a lease in whole seconds.
pub(super) fn as_len(lease: Duration) -> u32 {
    u32::try_from(lease.as_secs()).unwrap_or(u32::MAX)
}

/// The place of a waiter or of a holder. A waiter that becomes a holder keeps its place.
pub(super) struct Place {
    pub(super) conn: ConnId,
    /// Valid unless the place has ended.
    pub(super) key: KeyId,
    /// The lease that was asked for in the claim.
    pub(super) lease: Duration,
    /// The length of the lease that runs now, in seconds. It is for operators only, and so small
    /// that it fits between the other fields.
    pub(super) lease_len: u32,
    /// For how long the holder had waited in the queue, in milliseconds; for operators only.
    pub(super) waited_ms: u32,
    pub(super) weight: Weight,
    pub(super) salt: Salt,
    pub(super) state: PlaceState,
    /// When the claim was queued or, if it holds, when it was granted.
    pub(super) since: Instant,
    /// Whether the client knows the token of the grant.
    pub(super) is_told: bool,
    /// Whether this is the phase-one entry of its connection for its key.
    pub(super) is_enqueued: bool,
    /// Whether the adoption by its connection is still provisional: the connection has neither
    /// renewed the grant nor adopted it again.
    pub(super) is_provisional: bool,
    /// Whether the grant was an orphan before that adoption.
    pub(super) was_orphan: bool,
    /// Whether this is a kept grant: one that counts against the cap on kept grants.
    pub(super) is_kept: bool,
    /// Whether its client cannot prove the grant to a later server: the salt is of an older server,
    /// or there are too many slot numbers. Not valid without a state file.
    pub(super) is_unprovable: bool,
    /// Whether this is a kept grant that is among the past holders already, because its client has
    /// told how the work ended.
    pub(super) is_past: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaceState {
    /// The place is in the queue. `arrival` is its number in order of arrival, over all keys.
    Waiting {
        arrival: u64,
    },
    Held {
        fence: Fence,
        expires_at: Instant,
    },
    /// The claim neither waits nor holds any more. The refusal stays here until the client asks for
    /// it.
    Ended(Refusal),
}

impl Place {
    pub(super) fn fence(&self) -> Option<Fence> {
        match self.state {
            PlaceState::Held { fence, .. } => Some(fence),
            PlaceState::Waiting { .. } | PlaceState::Ended(_) => None,
        }
    }

    /// When a holder's lease ends, and the holder's fence.
    pub(super) fn lease_end(&self) -> Option<(Instant, Fence)> {
        match self.state {
            PlaceState::Held { fence, expires_at } => Some((expires_at, fence)),
            PlaceState::Waiting { .. } | PlaceState::Ended(_) => None,
        }
    }
}

/// Identifies a place in a queue. Collecting the grant spends the ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The claim's number in order of arrival, over all keys.
    pub(super) arrival: u64,
    pub(super) place: PlaceId,
}
