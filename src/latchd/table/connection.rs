//! The grants of one connection, its places in queues, and its phase-one entries that have ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::events::GrantEnd;
use super::names::{ConnId, Key};
use super::queue::ConnPlaces;
use super::slab::List;
use super::types::AtClose;
use super::LockTable;
use crate::wire::terms::{Kind, Refusal};
use crate::wire::token::Fence;

/// The maximum number of expired phase-one entries of one connection. It is limited because the `w`
/// that takes such an entry may never arrive.
pub const MAX_ENDED: usize = 16;

/// Everything that belongs to one connection. The time to clean up after a disconnect depends only
/// on the number of places that are listed here.
pub struct ConnectionEntry {
    /// The grants whose tokens the client knows.
    pub told: ConnPlaces,
    /// The connection's other places: waiting claims, and grants whose tokens the client does not
    /// know yet.
    pub untold: ConnPlaces,
    /// The number of the connection's grants and places in queues.
    pub count: usize,
    pub ended: EndedEntries,
    /// When the connection last held or waited for anything.
    pub last_busy: Instant,
    /// Set once the connection has closed.
    pub leaving: Option<Leaving>,
}

/// What is left to do for a connection that has closed.
pub struct Leaving {
    at_close: AtClose,
    /// The tag that the client gave itself, for grants that become orphans.
    tag: Option<Arc<str>>,
    /// How many untold places have not been looked at.
    unseen_count: usize,
}

impl ConnectionEntry {
    pub fn new(now: Instant) -> Self {
        ConnectionEntry {
            told: List::new(),
            untold: List::new(),
            count: 0,
            ended: EndedEntries::default(),
            last_busy: now,
            leaving: None,
        }
    }

    /// The list of places whose tokens the client knows, or the list of the others.
    pub fn list_of(&mut self, is_told: bool) -> &mut ConnPlaces {
        if is_told {
            &mut self.told
        } else {
            &mut self.untold
        }
    }
}

/// The phase-one entries of one connection that ended before the client's `w` arrived: the lease
/// ran out, another connection released the token, or the drain dismissed the claim. The entries
/// are in the order in which they ended.
#[derive(Default)]
pub struct EndedEntries(VecDeque<(Kind, Key, Refusal)>);

impl EndedEntries {
    pub fn get(&self, kind: Kind, key: &str) -> Option<Refusal> {
        let found = self.0.iter().find(|ended| is_for(ended, kind, key));
        found.map(|(_, _, refusal)| *refusal)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an entry. If more than [`MAX_ENDED`] entries have expired, forgets the oldest expired
    /// one. Dismissed entries need no limit here, because the caps of the table limit their number.
    pub fn add(&mut self, kind: Kind, key: Key, refusal: Refusal) {
        self.0.push_back((kind, key, refusal));
        let is_expired = |ended: &(Kind, Key, Refusal)| ended.2 == Refusal::LeaseExpired;
        if self.0.iter().filter(|ended| is_expired(ended)).count() > MAX_ENDED {
            let first = self.0.iter().position(is_expired);
            first.map(|first| self.0.remove(first));
        }
    }

    pub fn remove(&mut self, kind: Kind, key: &str) {
        self.0.retain(|ended| !is_for(ended, kind, key));
    }

    #[cfg(any(test, fuzzing))]
    pub fn iter(&self) -> impl Iterator<Item = &(Kind, Key, Refusal)> {
        self.0.iter()
    }
}

fn is_for(ended: &(Kind, Key, Refusal), kind: Kind, key: &str) -> bool {
    ended.0 == kind && ended.1.as_str() == key
}

impl LockTable {
    /// Begins to remove a closed connection, whose client has this `tag`. Its places in queues are
    /// removed first. Then its grants end or become orphans, depending on `at_close`. A grant that
    /// was not collected ends in any case, because the client does not know its token. A grant that
    /// was adopted provisionally becomes an orphan in any case. Otherwise an `adopt` that is
    /// processed only after its client has given up the connection would cost the client its lock.
    /// From now on the connection is granted nothing.
    ///
    /// Takes constant time. The caller must then call [`LockTable::release_some`] until it returns
    /// `true`.
    pub fn disconnect(&mut self, conn: ConnId, at_close: AtClose, tag: Option<Arc<str>>) {
        self.counters.disconnects += 1;
        if let Some(entry) = self.conns.get_mut(&conn) {
            let unseen_count = entry.untold.len();
            entry.leaving = Some(Leaving {
                at_close,
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
        if let Some(id) = entry.untold.first() {
            let is_unseen = leaving.unseen_count > 0;
            leaving.unseen_count = leaving.unseen_count.saturating_sub(1);
            if is_unseen && self.places[id].fence().is_some() {
                // This grant was not collected. It moves to the end of the list, so that the
                // waiting places are removed first.
                entry.untold.remove(&mut self.places, id);
                entry.untold.push(&mut self.places, id);
            } else {
                self.abandon_place(id, now);
            }
            return true;
        }
        let Some(told) = entry.told.first() else {
            return false;
        };
        let (tag, at_close) = (leaving.tag.clone(), leaving.at_close);
        if at_close == AtClose::Orphan || self.places[told].is_provisional {
            self.make_orphan(told, tag, now);
        } else {
            let end = if at_close == AtClose::ReleaseAsAsked {
                GrantEnd::Released(None)
            } else {
                GrantEnd::Abandoned
            };
            self.revoke(told, end, now);
        }
        true
    }

    /// Ends a grant whose client left before the grant was sent, and passes its slots on. Does
    /// nothing if the grant has ended already.
    pub fn abandon_grant(&mut self, fence: Fence, now: Instant) {
        if let Some(holder) = self.holders.get(&fence).copied() {
            self.places[holder].is_proof = false; // nobody knows the token
            self.revoke(holder, GrantEnd::Abandoned, now);
        }
    }

    /// Whether a connection holds nothing, waits for nothing and has no phase-one entry.
    pub fn has_nothing(&self, conn: ConnId) -> bool {
        self.conns.get(&conn).is_none_or(|entry| {
            entry.told.is_empty() && entry.untold.is_empty() && entry.ended.is_empty()
        })
    }

    /// When `conn` last held or waited for anything: `now` if it still does, `None` if it never
    /// did. A connection counts as holding until its lease is ended, which may be a little after
    /// the lease has run out.
    pub fn connection_idle_since(&self, conn: ConnId, now: Instant) -> Option<Instant> {
        let entry = self.conns.get(&conn)?;
        // Ended phase-one entries do not count, because the `w` for such an entry may never come.
        let is_idle = entry.told.is_empty() && entry.untold.is_empty();
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
