//! One key: who holds it, who waits for it, and the rule by which a waiter becomes a holder. Each
//! holder and each waiter has a place, which is in a list of its key and in one of its connection.

use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::slab::{Id, List, Slab};
use crate::wire::terms::{Kind, Limit, Refusal, Terms, Weight};
use crate::wire::token::{Fence, Salt};

pub type Places = Slab<Place, 2>;
pub type PlaceId = Id<Place>;

/// The holders of one key, or its waiters.
pub type KeyPlaces = List<Place, 0>;
pub type ConnPlaces = List<Place, 1>;

pub type Queues = Slab<KeyQueue, 1>;
pub type KeyId = Id<KeyQueue>;
pub type KeyList = List<KeyQueue, 0>;

/// The holders and the waiters of one key.
///
/// **Invariants:** the holders' weights never add up to more than the key's slots; waiters are in
/// order of arrival; holders are in order of their grants, which is the order of their fences.
pub struct KeyQueue {
    pub key: Key,
    pub kind: Kind,
    pub limit: Limit,
    /// The slots that no holder has.
    pub free: u32,
    pub holders: KeyPlaces,
    pub waiters: KeyPlaces,
    /// The key's number in order of creation.
    pub made: u64,
    /// When the key last became idle. Not valid while the key is in use.
    pub last_used: Instant,
    /// Whether its past holders are remembered.
    pub has_history: bool,
}

impl KeyQueue {
    pub fn new(key: Key, terms: Terms, made: u64, now: Instant) -> Self {
        let Terms { kind, limit, .. } = terms;
        KeyQueue {
            key,
            kind,
            limit,
            free: kind.slot_count(limit),
            holders: List::new(),
            waiters: List::new(),
            made,
            last_used: now,
            has_history: false,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.waiters.is_empty()
    }

    /// Checks that the key is used as these terms say. An idle key adopts their kind and limit.
    pub fn agree(&mut self, terms: Terms) -> Result<(), Refusal> {
        if self.is_idle() {
            (self.kind, self.limit) = (terms.kind, terms.limit);
            self.free = terms.kind.slot_count(terms.limit);
        }
        let agrees = self.terms(terms.weight) == terms;
        agrees.then_some(()).ok_or(Refusal::LimitMismatch)
    }

    /// The terms of a claim with this weight.
    pub fn terms(&self, weight: Weight) -> Terms {
        Terms {
            kind: self.kind,
            limit: self.limit,
            weight,
        }
    }

    /// The waiter whose turn it is: the first one, if enough slots are free for its weight.
    pub fn first_if_it_fits(&self, places: &Places) -> Option<PlaceId> {
        let first = self.waiters.first();
        first.filter(|first| self.has_room(places[*first].weight))
    }

    /// Whether a new claim must queue. Behind a waiter whose turn it is, a new claim does not
    /// queue: it is refused instead, because that waiter is owed its slots first.
    pub fn must_wait(&self, weight: Weight, places: &Places) -> bool {
        let is_behind_waiter =
            || !self.waiters.is_empty() && self.first_if_it_fits(places).is_none();
        !self.has_room(weight) || is_behind_waiter()
    }

    pub fn has_room(&self, weight: Weight) -> bool {
        weight.get() <= self.free
    }
}

/// The length of a lease in whole seconds.
pub fn as_len(lease: Duration) -> u32 {
    u32::try_from(lease.as_secs()).unwrap_or(u32::MAX)
}

/// The place of a waiter or of a holder. A waiter that becomes a holder keeps its place.
pub struct Place {
    pub conn: ConnId,
    /// Valid unless the place has ended.
    pub key: KeyId,
    /// The lease that was asked for in the claim.
    pub lease: Duration,
    /// The length of the lease that runs now, in seconds. It is for operators only, and so small
    /// that it fits between the other fields.
    pub lease_len: u32,
    /// For how long the holder had waited in the queue, in milliseconds; for operators only.
    pub waited_ms: u32,
    pub weight: Weight,
    pub salt: Salt,
    pub state: PlaceState,
    /// When the claim was queued or, if it holds, when it was granted.
    pub since: Instant,
    /// Whether `since` is that time, and not when a record without an age was restored.
    pub has_age: bool,
    /// Whether the client knows the token of the grant.
    pub is_told: bool,
    /// Whether this is the phase-one entry of its connection for its key.
    pub is_enqueued: bool,
    /// Whether the adoption by its connection is still provisional: the connection has neither
    /// renewed the grant nor adopted it again.
    pub is_provisional: bool,
    /// Whether this is a kept grant: one that counts against the cap on kept grants.
    pub is_kept: bool,
    /// Whether the token proves the grant to a later server. Only that of a client that can adopt
    /// its grants does, and only with a state file.
    pub is_proof: bool,
    /// Whether the state file must have the grant because the token is not enough: the grant is of
    /// a server without proofs, or has too many slot numbers for a request.
    pub is_unprovable: bool,
    /// Whether this is a kept grant that is among the past holders already, because its client has
    /// told how the work ended.
    pub is_past: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaceState {
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
    pub fn fence(&self) -> Option<Fence> {
        match self.state {
            PlaceState::Held { fence, .. } => Some(fence),
            PlaceState::Waiting { .. } | PlaceState::Ended(_) => None,
        }
    }

    /// When a holder's lease ends, and the holder's fence.
    pub fn lease_end(&self) -> Option<(Instant, Fence)> {
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
    pub arrival: u64,
    pub place: PlaceId,
}
