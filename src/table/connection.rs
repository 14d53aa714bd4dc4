//! The holdings of one connection, its places in queues, and its phase-one entries that have ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::events::GrantEnd;
use super::names::{ConnId, Key};
use super::queue::{ConnPlaces, KeyId, PlaceId};
use super::slab::List;
use super::types::Holdings;
use super::LockTable;
use crate::terms::{Kind, Refusal};
use crate::token::Fence;

/// The maximum number of expired phase-one entries of one connection. It is limited because the `w`
/// that takes such an entry may never arrive.
pub(super) const MAX_ENDED: usize = 16;

/// Everything that belongs to one connection. The time to clean up after a disconnect depends only
/// on the number of places that are listed here.
pub(super) struct ConnectionEntry {
    /// The grants whose tokens the client knows.
    pub(super) held: ConnPlaces,
    /// The connection's other places: waiting claims, and grants whose tokens the client does not
    /// know yet.
    pub(super) pending: ConnPlaces,
    /// The number of the connection's grants and places in queues.
    pub(super) count: usize,
    pub(super) ended: EndedEntries,
    /// When the connection last held or waited for anything.
    pub(super) last_busy: Instant,
    /// Set once the connection has closed.
    pub(super) leaving: Option<Leaving>,
}

/// What is left to do for a connection that has closed.
pub(super) struct Leaving {
    holdings: Holdings,
    /// The tag that the client gave itself, for grants that become orphans.
    tag: Option<Arc<str>>,
    /// How many pending places have not been looked at.
    unseen_count: usize,
}

impl ConnectionEntry {
    pub(super) fn new(now: Instant) -> Self {
        ConnectionEntry {
            held: List::new(),
            pending: List::new(),
            count: 0,
            ended: EndedEntries::default(),
            last_busy: now,
            leaving: None,
        }
    }

    /// The list of places whose tokens the client knows, or the list of the others.
    pub(super) fn list_of(&mut self, is_told: bool) -> &mut ConnPlaces {
        if is_told {
            &mut self.held
        } else {
            &mut self.pending
        }
    }
}

/// The phase-one entries of one connection that ended before the client's `w` arrived: the lease
/// ran out, another connection released the token, or the drain dismissed the claim. The entries
/// are in the order in which they ended.
#[derive(Default)]
pub(super) struct EndedEntries(VecDeque<(Kind, Key, Refusal)>);

impl EndedEntries {
    pub(super) fn get(&self, kind: Kind, key: &str) -> Option<Refusal> {
        let found = self.0.iter().find(|ended| is_for(ended, kind, key));
        found.map(|(_, _, refusal)| *refusal)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an entry. If more than [`MAX_ENDED`] entries have expired, forgets the oldest expired
    /// one. Dismissed entries need no limit here, because the caps of the table limit their number.
    pub(super) fn add(&mut self, kind: Kind, key: Key, refusal: Refusal) {
        self.0.push_back((kind, key, refusal));
        let is_expired = |ended: &(Kind, Key, Refusal)| ended.2 == Refusal::LeaseExpired;
        if self.0.iter().filter(|ended| is_expired(ended)).count() > MAX_ENDED {
            let first = self.0.iter().position(is_expired);
            first.map(|first| self.0.remove(first));
        }
    }

    pub(super) fn remove(&mut self, kind: Kind, key: &str) {
        self.0.retain(|ended| !is_for(ended, kind, key));
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn iter(&self) -> impl Iterator<Item = &(Kind, Key, Refusal)> {
        self.0.iter()
    }
}

fn is_for(ended: &(Kind, Key, Refusal), kind: Kind, key: &str) -> bool {
    ended.0 == kind && ended.1.as_str() == key
}

impl LockTable {
    /// Begins to remove a closed connection, whose client has this `tag`. Its places in queues are
    /// removed first. Then its grants end or become orphans, depending on `holdings`. A grant that
    /// was not collected ends in any case, because the client does not know its token. A grant that
    /// was adopted provisionally becomes an orphan if the caps allow it. Otherwise an `adopt` that
    /// is processed only after its client has given up the connection would cost the client its
    /// lock. From now on the connection is granted nothing.
    ///
    /// Takes constant time. The caller must then call [`LockTable::release_some`] until it returns
    /// `true`.
    pub fn disconnect(&mut self, conn: ConnId, holdings: Holdings, tag: Option<Arc<str>>) {
        self.counters.disconnects += 1;
        if let Some(entry) = self.conns.get_mut(&conn) {
            let unseen_count = entry.pending.len();
            entry.leaving = Some(Leaving {
                holdings,
                tag,
                unseen_count,
            });
            self.leaving_count += 1;
        }
    }

    /// Removes up to `at_most` places and grants of a closed connection; `true` when none is left.
    /// This is done in steps, because removing a million at once would delay every other client for
    /// too long.
    pub fn release_some(&mut self, conn: ConnId, at_most: usize, now: Instant) -> bool {
        if self.must_go_on_granting {
            self.grant_owed_slots(now);
        }
        for _ in 0..at_most {
            if self.must_go_on_granting {
                return false;
            }
            if !self.release_next(conn, now) {
                let was_known = self.conns.remove(&conn).is_some();
                self.leaving_count -= usize::from(was_known);
                return true;
            }
        }
        false
    }

    /// Removes one place or grant; `false` if none is left. Removes places in queues first, then
    /// grants. Their keys become idle in this order, in which a full table forgets them.
    fn release_next(&mut self, conn: ConnId, now: Instant) -> bool {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return false;
        };
        let leaving = entry.leaving.as_mut().expect("it has disconnected");
        if let Some(id) = entry.pending.first() {
            let is_unseen = leaving.unseen_count > 0;
            leaving.unseen_count = leaving.unseen_count.saturating_sub(1);
            if is_unseen && self.places[id].fence().is_some() {
                // This grant was not collected. It moves to the end of the list, so that the
                // waiting places are removed first.
                entry.pending.remove(&mut self.places, id);
                entry.pending.push(&mut self.places, id);
            } else {
                self.abandon_place(id, now);
            }
            return true;
        }
        let Some(held) = entry.held.first() else {
            return false;
        };
        let (tag, holdings) = (leaving.tag.clone(), leaving.holdings);
        if holdings == Holdings::Orphan {
            self.make_orphan(held, tag, now);
        } else if !self.leave_adopted(held, tag, now) {
            if holdings == Holdings::ReleaseAdoptable {
                self.record_dead_token(held);
            }
            let end = if holdings == Holdings::ReleaseAsAsked {
                GrantEnd::Released(None)
            } else {
                GrantEnd::Abandoned
            };
            self.revoke(held, end, now);
        }
        true
    }

    /// Ends a grant whose client left before the grant was sent, and passes its slots on. Does
    /// nothing if the grant has ended already.
    pub fn abandon_grant(&mut self, fence: Fence, now: Instant) {
        if let Some(holder) = self.holders.get(&fence).copied() {
            self.revoke(holder, GrantEnd::Abandoned, now);
        }
    }

    /// The waiter whose turn it is. Removes waiters of closed connections from the front of the
    /// queue, because they are granted nothing and must not hold up other waiters.
    pub(super) fn next_to_serve(&mut self, key: KeyId, now: Instant) -> Option<PlaceId> {
        if self.leaving_count > 0 {
            while let Some(first) = self.keys[key].waiters.first() {
                let entry = self.conns.get(&self.places[first].conn);
                if entry.is_none_or(|entry| entry.leaving.is_none()) {
                    break;
                }
                self.leave_queue(first, now);
                self.remove_place(first, now);
            }
        }
        self.next_in_line(key)
    }

    /// Whether a connection holds nothing, waits for nothing and has no phase-one entry.
    pub fn has_nothing(&self, conn: ConnId) -> bool {
        self.conns.get(&conn).is_none_or(|entry| {
            entry.held.is_empty() && entry.pending.is_empty() && entry.ended.is_empty()
        })
    }

    /// When `conn` last held or waited for anything: `now` if it still does, `None` if it never
    /// did. A connection counts as holding until its lease is ended, which may be a little after
    /// the lease has run out.
    pub fn connection_idle_since(&self, conn: ConnId, now: Instant) -> Option<Instant> {
        let entry = self.conns.get(&conn)?;
        // Ended phase-one entries do not count, because the `w` for such an entry may never come.
        let is_idle = entry.held.is_empty() && entry.pending.is_empty();
        Some(if is_idle { entry.last_busy } else { now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_expired_entries_forget_no_dismissed_one() {
        let mut ended = EndedEntries::default();
        let key = |number: usize| Key::from(number.to_string().as_str());
        for number in 0..100 {
            ended.add(Kind::Lock, key(number), Refusal::Draining);
        }
        for number in 100..200 {
            ended.add(Kind::Lock, key(number), Refusal::LeaseExpired);
        }
        assert_eq!(ended.get(Kind::Lock, "0"), Some(Refusal::Draining));
        assert_eq!(ended.get(Kind::Lock, "100"), None);
        assert_eq!(ended.get(Kind::Lock, "199"), Some(Refusal::LeaseExpired));
        assert_eq!(ended.iter().count(), 100 + MAX_ENDED);
    }
}
