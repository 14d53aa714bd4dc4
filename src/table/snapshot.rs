//! What an operator may see of a table.

use std::time::Duration;

use super::types::{ConnId, Key, Kind, Limit};

/// One key as it stood when the snapshot was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySnapshot {
    /// The name.
    pub key: Key,
    /// Used as this, now or last.
    pub kind: Kind,
    /// Used with this limit, now or last.
    pub limit: Limit,
    /// What it is doing.
    pub usage: Usage,
}

/// What a key is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Held or waited for.
    Busy {
        /// How many hold it.
        holder_count: usize,
        /// How many wait for it.
        waiter_count: usize,
        /// Its most senior holder.
        first_holder: Option<HolderSnapshot>,
    },
    /// Neither held nor waited for, since so long ago.
    Idle(Duration),
}

/// One holder as it stood when the snapshot was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderSnapshot {
    /// The connection that the slot was granted to.
    pub conn: ConnId,
    /// What is left of the lease.
    pub expires_in: Duration,
}
