//! The nouns of the table: what a caller hands in and what it is told.

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
/// Any string is a key to the table; which strings a client may use is the protocol's affair.
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
    /// One holder at a time, or shared ones.
    Lock,
    /// As many slots as the limit says.
    Semaphore,
}

impl Kind {
    /// How many slots a key of this kind has.
    pub fn slot_count(self, limit: Limit) -> u32 {
        match self {
            Kind::Lock => Weight::WHOLE.get(),
            Kind::Semaphore => limit.get(),
        }
    }
}

/// How many slots of a semaphore there are.
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

    /// A whole lock, which has as many slots as shared claims can divide it into.
    pub const WHOLE: Weight = Weight(NonZeroU32::new(1_048_576).unwrap());

    /// A weight of `count` slots, or `None` for zero.
    pub fn new(count: u32) -> Option<Weight> {
        NonZeroU32::new(count).map(Weight)
    }

    pub fn get(self) -> u32 {
        self.0.get()
    }

    /// What a claim takes that names no weight.
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

/// A place in a queue; spent when its grant is collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Its number in order of arrival, over all keys.
    pub(super) arrival: u64,
    pub(super) place: PlaceId,
}

/// What a client asks for.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    pub key: &'a str,
    pub kind: Kind,
    pub limit: Limit,
    pub lease: Duration,
    /// How many of the key's slots it takes at once.
    pub weight: Weight,
    /// The most claims that may already wait for the key if this one must wait, too.
    pub max_waiters: Option<u32>,
}

impl<'a> Ask<'a> {
    /// A claim of a whole lock, or of one slot, that joins any queue.
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
    /// The secret half of the token to come. The claimant brings it along, so that a waiter's turn
    /// never depends on the kernel's randomness.
    pub salt: Salt,
}

/// What an operation looks at. Leases of other keys that have run out may be ended after it.
#[derive(Clone, Copy)]
pub enum Scope<'a> {
    Nothing,
    Key(&'a str),
    /// The key that a connection asks for, and every lease if a cap is reached.
    Ask(ConnId, &'a Ask<'a>),
    Everything,
}

/// The result of a request that is not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The key is held, and the lease runs from now.
    Granted(Grant),
    /// The claim is queued; the ticket keeps its place.
    Queued(Ticket),
    /// The key is held by others, and the claim is not to wait, or not yet.
    WouldWait,
    /// The claim has waited, and the key has not come free in time.
    TimedOut,
    /// The peer has hung up. A claim that waited has given up its place.
    Gone,
    /// The slot is free for others.
    Released,
    /// The lease runs from now, for this time.
    Renewed(Duration),
}

/// The caps for which a claim can be refused, by the options that set them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cap {
    /// `--max-locks`
    Locks,
    /// `--max-slots`
    Slots,
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
            Cap::Slots => "max-slots",
            Cap::PerConnection => "max-per-connection",
            Cap::Waiters => "max-waiters",
            Cap::WaitersTotal => "max-waiters-total",
            Cap::Kept => "max-kept",
        })
    }
}

/// Why the table says no: an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The key is in use as the other kind, or with another limit.
    LimitMismatch,
    /// As many keys as allowed are in use, as many slots as allowed are held, or the connection
    /// has as many slots and places as it may.
    MaxLocks,
    /// As many waiters as allowed are queued, for the key or in all, or as many as the claim
    /// tolerates.
    MaxWaiters,
    /// The lease of the grant was over before the grant was collected.
    LeaseExpired,
    /// No live holder of that key has that token.
    NotHeld,
    /// Nothing new is granted any more.
    Draining,
    /// There is no fence or no randomness to make a token of.
    NoToken,
    /// There is a phase-one entry for this key already.
    AlreadyEnqueued,
    /// There is no phase-one entry for this key.
    NotEnqueued,
}

impl Refusal {
    /// All refusals with their names in the statistics, in the order of their declaration.
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

/// What becomes of the slots that a connection holds when it closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holdings {
    /// They pass on at once.
    Release,
    /// They become orphans, which live until their leases end.
    Keep,
}

/// The most that a table takes on.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Keys known to the table, idle ones included.
    pub max_locks: usize,
    pub max_slots: usize,
    /// Slots held by one connection, together with its places in queues.
    pub max_per_connection: usize,
    /// Waiters for one key; `None` for no cap.
    pub max_waiters: Option<usize>,
    pub max_waiters_total: usize,
    /// Grants that are kept for clients without a connection.
    pub max_kept: usize,
    /// The longest lease of a grant that is kept.
    pub max_keep_time: Duration,
    /// How long a grant may be held, renewals included.
    pub max_hold: Duration,
}
