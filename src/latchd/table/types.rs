//! The types of the table's interface: requests, answers and caps.

use std::fmt;
use std::time::Duration;

use super::names::ConnId;
use super::queue::Ticket;
use crate::wire::terms::Terms;
pub use crate::wire::token::Grant;
use crate::wire::token::Salt;

/// The parameters of a claim.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    pub key: &'a str,
    pub terms: Terms,
    pub lease: Duration,
    /// The claim is refused if it would make the queue longer than this.
    pub max_waiters: Option<u32>,
}

/// The connection that asks.
#[derive(Clone, Copy)]
pub struct Claimant {
    pub conn: ConnId,
    /// The secret half of the future token. The claimant supplies it, so that granting a slot to a
    /// waiter needs no random numbers from the kernel.
    pub salt: Salt,
    /// Whether the client can adopt its grants over another connection.
    pub can_adopt: bool,
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
    /// The claim was granted when it was enqueued, so its client has the token. The lease begins
    /// again now.
    GrantedBefore(Grant),
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

/// What happens to a connection's grants when the connection closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtClose {
    /// They end, and their slots pass to waiters at once.
    Release,
    /// The same, because the client has asked for it: its grants end as released ones.
    ReleaseAsAsked,
    /// They become orphans, which live until their leases end: their client may still hold on.
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
