//! What an operator may see of a table.

use std::time::{Duration, Instant};

use super::queue::KeyId;
use super::types::{ConnId, Key, Kind, Limit};
use super::LockTable;

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

impl LockTable {
    pub(super) fn describe(&self, key: KeyId, now: Instant) -> KeySnapshot {
        let queue = &self.keys[key];
        let first_holder = queue.holders.first().map(|id| HolderSnapshot {
            conn: self.places[id].conn,
            expires_in: self
                .leases
                .expires_at(&self.places, id)
                .saturating_duration_since(now),
        });
        let usage = if queue.is_idle() {
            Usage::Idle(now.saturating_duration_since(queue.last_used))
        } else {
            Usage::Busy {
                holder_count: queue.holders.len(),
                waiter_count: queue.waiters.len(),
                first_holder,
            }
        };
        KeySnapshot {
            key: queue.key.clone(),
            kind: queue.kind,
            limit: queue.limit,
            usage,
        }
    }
}
