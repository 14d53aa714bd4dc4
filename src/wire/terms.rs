//! The terms of a claim, and why a claim is refused: values that the lock table and the protocol
//! share. Pure: no I/O and no clock.

use std::num::NonZeroU32;

/// What a claim takes of a key, and what the key is used as: the terms of the later grant, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub kind: Kind,
    pub limit: Limit,
    /// How many of the key's slots are taken at once.
    pub weight: Weight,
}

impl Terms {
    /// An exclusive lock.
    pub const LOCK: Terms = Terms {
        kind: Kind::Lock,
        limit: Limit::ONE,
        weight: Weight::WHOLE,
    };

    /// A whole lock, or one slot of a semaphore.
    pub fn plain(kind: Kind, limit: Limit) -> Terms {
        let weight = match kind {
            Kind::Lock => Weight::WHOLE,
            Kind::Semaphore => Weight::ONE,
        };
        Terms {
            kind,
            limit,
            weight,
        }
    }
}

/// What a key is used as while it is held or waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// One exclusive holder, or several shared holders.
    Lock,
    /// A fixed number of interchangeable slots, given by the limit.
    Semaphore,
}

impl Kind {
    /// Both kinds, each with its word in JSON and in messages.
    pub(crate) const ALL: [(Kind, &str); 2] =
        [(Kind::Lock, "lock"), (Kind::Semaphore, "semaphore")];

    /// The word for this kind.
    #[cfg(feature = "programs")]
    pub(crate) fn word(self) -> &'static str {
        Kind::ALL[self as usize].1
    }

    /// The kind with this word.
    pub(crate) fn from_word(word: &str) -> Option<Kind> {
        let found = Kind::ALL.iter().find(|(_, own)| *own == word);
        found.map(|(kind, _)| *kind)
    }

    /// How many slots a key of this kind has.
    pub fn slot_count(self, limit: Limit) -> u32 {
        match self {
            Kind::Lock => Weight::WHOLE.get(),
            Kind::Semaphore => limit.get(),
        }
    }
}

/// The number of slots of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit(NonZeroU32);

impl Limit {
    /// The limit of every lock.
    pub const ONE: Limit = Limit(NonZeroU32::MIN);

    /// A limit of `count` slots, or `None` for zero.
    pub fn new(count: u32) -> Option<Limit> {
        NonZeroU32::new(count).map(Limit)
    }

    pub fn get(self) -> u32 {
        self.0.get()
    }
}

/// How many slots of a key a claim takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight(NonZeroU32);

impl Weight {
    /// One slot of a semaphore, or a shared lock.
    pub const ONE: Weight = Weight(NonZeroU32::MIN);

    /// All slots of a lock: an exclusive claim. At most this many shared claims can hold one lock.
    pub const WHOLE: Weight = Weight(NonZeroU32::new(1_048_576).unwrap());

    /// A weight of `count` slots, or `None` for zero.
    pub fn new(count: u32) -> Option<Weight> {
        NonZeroU32::new(count).map(Weight)
    }

    pub fn get(self) -> u32 {
        self.0.get()
    }
}

/// Why the table refuses a request: an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
// A client cannot tell a refusal whose reply is `error` from others, so it makes none.
#[cfg_attr(not(feature = "programs"), allow(dead_code))]
pub enum Refusal {
    /// The key is in use as the other kind, or with another limit.
    LimitMismatch,
    /// A cap has been reached: on keys, on grants, on this connection's grants and queue places, or
    /// on kept grants.
    MaxLocks,
    /// The queue of the key has its maximum length, or the maximum length that the claim accepts,
    /// or the total number of waiting claims, over all keys, is at its maximum.
    MaxWaiters,
    /// The lease of the grant ran out before the client collected the grant.
    LeaseExpired,
    /// No live holder of the key has the given token.
    NotHeld,
    /// The server is draining and accepts no new claims.
    Draining,
    /// No token can be made: there is no fence, or no random salt.
    NoToken,
    /// The state file cannot be written, and must have the grant.
    NotWritten,
    /// The connection already has a phase-one entry for this key.
    AlreadyEnqueued,
    /// The connection has no phase-one entry for this key.
    NotEnqueued,
}

impl Refusal {
    /// All refusals in the order of their declaration, with their names in the statistics.
    #[cfg(feature = "programs")]
    pub const ALL: [(Refusal, &str); 10] = [
        (Refusal::LimitMismatch, "limit_mismatch"),
        (Refusal::MaxLocks, "max_locks"),
        (Refusal::MaxWaiters, "max_waiters"),
        (Refusal::LeaseExpired, "lease_expired"),
        (Refusal::NotHeld, "not_held"),
        (Refusal::Draining, "draining"),
        (Refusal::NoToken, "no_token"),
        (Refusal::NotWritten, "not_written"),
        (Refusal::AlreadyEnqueued, "already_enqueued"),
        (Refusal::NotEnqueued, "not_enqueued"),
    ];
}
