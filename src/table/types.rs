//! The types of the table's interface: requests, answers, refusals and caps.

use std::borrow::Borrow;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::place::PlaceId;
pub use crate::token::Grant;
use crate::token::Salt;

/// A name that can be held. Cloning shares the text.
///
/// Any string is a key to the table; the protocol decides which strings a client may use.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Key(text.into())
    }
}

impl Borrow<str> for Key {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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

    /// The weight of a claim that does not state one.
    pub fn plain(kind: Kind) -> Weight {
        match kind {
            Kind::Lock => Weight::WHOLE,
            Kind::Semaphore => Weight::ONE,
        }
    }
}

/// A connection, numbered from 1 in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

impl fmt::Display for ConnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identifies a place in a queue. Collecting the grant spends the ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// The claim's number in order of arrival, over all keys.
    pub(super) arrival: u64,
    pub(super) place: PlaceId,
}

/// The parameters of a claim.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    pub key: &'a str,
    pub kind: Kind,
    pub limit: Limit,
    pub lease: Duration,
    /// How many of the key's slots the claim takes at once.
    pub weight: Weight,
    /// The claim is refused if it would make the queue longer than this.
    pub max_waiters: Option<u32>,
}

impl<'a> Ask<'a> {
    /// A claim of a whole lock or of one slot, which may join a queue of any length.
    pub fn plain(key: &'a str, kind: Kind, limit: Limit, lease: Duration) -> Ask<'a> {
        Ask {
            key,
            kind,
            limit,
            lease,
            weight: Weight::plain(kind),
            max_waiters: None,
        }
    }
}

/// The connection that asks.
#[derive(Clone, Copy)]
pub struct Claimant {
    pub conn: ConnId,
    /// The secret half of the future token. The claimant supplies it, so that granting a slot to a
    /// waiter needs no random numbers from the kernel.
    pub salt: Salt,
}

/// The part of the table that an operation looks at. Expired leases outside it need not be ended
/// until after the operation.
#[derive(Clone, Copy)]
pub enum Scope<'a> {
    Nothing,
    Key(&'a str),
    /// The key that a connection claims, and all keys if a cap is reached.
    Ask(ConnId, &'a Ask<'a>),
    Everything,
}

/// The result of a request that is not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The claim is granted, and its lease begins now.
    Granted(Grant),
    /// The claim is queued, and the ticket identifies its place.
    Queued(Ticket),
    /// The claim cannot be granted now, and the operation does not wait.
    WouldWait,
    /// The claim waited, and was not granted in time.
    TimedOut,
    /// The peer has hung up. If the claim was queued, it has lost its place.
    Gone,
    /// The grant has been released.
    Released,
    /// The lease begins again now, with this length.
    Renewed(Duration),
}

/// The caps at which a claim is refused, each named after the option that sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cap {
    /// `--max-locks`
    Locks,
    /// `--max-slots`
    Grants,
    /// `--max-per-connection`
    PerConnection,
    /// `--max-waiters`
    Waiters,
    /// `--max-waiters-total`
    WaitersTotal,
    /// `--max-kept`
    Kept,
}

impl fmt::Display for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cap::Locks => "max-locks",
            Cap::Grants => "max-slots",
            Cap::PerConnection => "max-per-connection",
            Cap::Waiters => "max-waiters",
            Cap::WaitersTotal => "max-waiters-total",
            Cap::Kept => "max-kept",
        })
    }
}

/// Why the table refuses a request: an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// The connection already has a phase-one entry for this key.
    AlreadyEnqueued,
    /// The connection has no phase-one entry for this key.
    NotEnqueued,
}

impl Refusal {
    /// All refusals in the order of their declaration, with their names in the statistics.
    pub const ALL: [(Refusal, &str); 9] = [
        (Refusal::LimitMismatch, "limit_mismatch"),
        (Refusal::MaxLocks, "max_locks"),
        (Refusal::MaxWaiters, "max_waiters"),
        (Refusal::LeaseExpired, "lease_expired"),
        (Refusal::NotHeld, "not_held"),
        (Refusal::Draining, "draining"),
        (Refusal::NoToken, "no_token"),
        (Refusal::AlreadyEnqueued, "already_enqueued"),
        (Refusal::NotEnqueued, "not_enqueued"),
    ];
}

/// What happens to a connection's slots when the connection closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holdings {
    /// The slots pass to waiters at once.
    Release,
    /// The grants become orphans, which live until their leases end.
    Orphan,
}

/// The maximum sizes and times that a table allows.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Keys known to the table, including idle keys.
    pub max_locks: usize,
    pub max_grants: usize,
    /// Grants and queue places of one connection.
    pub max_per_connection: usize,
    /// Waiters for one key; `None` for no cap.
    pub max_waiters: Option<usize>,
    pub max_waiters_total: usize,
    /// Kept grants, which belong to no connection.
    pub max_kept: usize,
    /// The maximum lease of a kept grant.
    pub max_keep_time: Duration,
    /// The maximum time for which a grant can be held, including renewals.
    pub max_hold: Duration,
}
