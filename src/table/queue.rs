//! One key: who holds it, who waits for it, and the rule by which a waiter becomes a holder.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::snapshot::{HolderSnapshot, KeySnapshot, Usage};
use super::types::{ConnId, Key, Kind, Limit, Refusal, Ticket};
use crate::token::{Fence, Salt, Token};

/// Has a slot of the key.
pub(super) struct Holder {
    pub(super) conn: ConnId,
    pub(super) salt: Salt,
    pub(super) expires_at: Instant,
}

/// The holders and the waiters of one key.
///
/// **Invariants:** never more holders than the limit; waiters are served in the order of their
/// tickets, which is the order of arrival; holders are kept in the order of their fences, which is
/// the order of grants.
pub(super) struct KeyQueue {
    key: Key,
    kind: Kind,
    limit: Limit,
    holders: BTreeMap<Fence, Holder>,
    waiters: BTreeSet<Ticket>,
    /// When the key was last held or waited for; it is idle since, unless it is in use.
    pub(super) last_used: Instant,
}

impl KeyQueue {
    pub(super) fn new(key: Key, kind: Kind, limit: Limit, now: Instant) -> Self {
        KeyQueue {
            key,
            kind,
            limit,
            holders: BTreeMap::new(),
            waiters: BTreeSet::new(),
            last_used: now,
        }
    }

    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.waiters.is_empty()
    }

    pub(super) fn waiter_count(&self) -> usize {
        self.waiters.len()
    }

    #[cfg(test)]
    pub(super) fn limit(&self) -> Limit {
        self.limit
    }

    #[cfg(test)]
    pub(super) fn waiters(&self) -> impl Iterator<Item = &Ticket> {
        self.waiters.iter()
    }

    #[cfg(test)]
    pub(super) fn holders(&self) -> &BTreeMap<Fence, Holder> {
        &self.holders
    }

    /// Makes sure that the key is used as `kind` with `limit`. An idle key takes them over.
    pub(super) fn agree(&mut self, kind: Kind, limit: Limit) -> Result<(), Refusal> {
        if self.is_idle() {
            self.kind = kind;
            self.limit = limit;
        }
        if (self.kind, self.limit) == (kind, limit) {
            Ok(())
        } else {
            Err(Refusal::LimitMismatch)
        }
    }

    /// The waiter whose turn it is: the first in line, if a slot is free.
    pub(super) fn next_in_line(&self) -> Option<Ticket> {
        if self.has_free_slot() {
            self.waiters.first().copied()
        } else {
            None
        }
    }

    pub(super) fn has_free_slot(&self) -> bool {
        self.holders.len() < self.limit.get() as usize
    }

    /// Whether the lease of a holder has run out by `now`.
    pub(super) fn has_due(&self, now: Instant) -> bool {
        self.holders.values().any(|holder| holder.expires_at <= now)
    }

    pub(super) fn join(&mut self, ticket: Ticket) {
        self.waiters.insert(ticket);
    }

    pub(super) fn leave(&mut self, ticket: Ticket) {
        self.waiters.remove(&ticket);
    }

    pub(super) fn leave_all(&mut self) {
        self.waiters.clear();
    }

    pub(super) fn hold(&mut self, token: Token, conn: ConnId, expires_at: Instant) {
        debug_assert!(self.has_free_slot());
        self.holders.insert(
            token.fence,
            Holder {
                conn,
                salt: token.salt,
                expires_at,
            },
        );
    }

    /// Whether `token` is exactly that of a holder, and the key is used as `kind`.
    pub(super) fn is_held_by(&self, kind: Kind, token: Token) -> bool {
        // The fence is no secret, so it may be looked up; the salt is compared in constant time.
        self.kind == kind
            && self
                .holders
                .get(&token.fence)
                .is_some_and(|holder| holder.salt.matches(token.salt))
    }

    pub(super) fn holder_mut(&mut self, fence: Fence) -> Option<&mut Holder> {
        self.holders.get_mut(&fence)
    }

    pub(super) fn remove_holder(&mut self, fence: Fence) -> Option<Holder> {
        self.holders.remove(&fence)
    }

    pub(super) fn snapshot(&self, now: Instant) -> KeySnapshot {
        let first_holder = self.holders.values().next().map(|holder| HolderSnapshot {
            conn: holder.conn,
            expires_in: holder.expires_at.saturating_duration_since(now),
        });
        let usage = if self.is_idle() {
            Usage::Idle(now.saturating_duration_since(self.last_used))
        } else {
            Usage::Busy {
                holder_count: self.holders.len(),
                waiter_count: self.waiters.len(),
                first_holder,
            }
        };
        KeySnapshot {
            key: self.key.clone(),
            kind: self.kind,
            limit: self.limit,
            usage,
        }
    }
}
