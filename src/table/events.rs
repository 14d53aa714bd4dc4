//! Events in the life of claims, noted for the log.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::queue::PlaceId;
use super::LockTable;
use crate::token::Fence;

/// An event of a claim: it was granted, it stopped waiting, or its grant ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimEvent {
    pub fate: Fate,
    pub key: Key,
    /// The fence of the grant; `None` if the claim has only waited.
    pub fence: Option<Fence>,
    /// The connection that has the claim; 0 for orphans.
    pub conn: ConnId,
    /// The tag that the client of an orphan gave itself.
    pub orphan_tag: Option<Arc<str>>,
    /// How long the claim had waited or held before this event.
    pub lasted: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The claim holds now.
    Granted,
    /// The claim stopped waiting: its wait timeout was over, or its connection has closed.
    GaveUp,
    Ended(GrantEnd),
}

/// How a grant ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantEnd {
    /// A client released the grant with its token.
    Released,
    /// The lease ran out.
    Expired,
    /// The operator on this connection took the slot away.
    Broken(ConnId),
    /// The connection closed, or the client no longer waited.
    Abandoned,
}

impl LockTable {
    /// Notes every event from now on. Without this call, the table notes only the two kinds of
    /// events that an operator must see: a break, and the expiry of a lease whose grant was not a
    /// kept one.
    pub fn note_all_events(&mut self) {
        self.notes_all_events = true;
    }

    /// Whether [`LockTable::take_events`] has events to take.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Takes all noted events, the oldest first.
    pub fn take_events(&mut self) -> impl Iterator<Item = ClaimEvent> + '_ {
        self.events.drain(..)
    }

    /// Notes an event of a claim. `fence` is the fence of its grant, if it has been granted. Most
    /// events are not noted, and cost next to nothing.
    #[inline]
    pub(super) fn note_event(
        &mut self,
        id: PlaceId,
        fence: Option<Fence>,
        fate: Fate,
        now: Instant,
    ) {
        let is_noted = match fate {
            _ if self.notes_all_events => true,
            Fate::Ended(GrantEnd::Expired) => !self.places[id].is_kept,
            Fate::Ended(GrantEnd::Broken(_)) => true,
            _ => false,
        };
        if is_noted {
            self.add_event(id, fence, fate, now);
        }
    }

    #[cold]
    fn add_event(&mut self, id: PlaceId, fence: Option<Fence>, fate: Fate, now: Instant) {
        let place = &self.places[id];
        let orphan_tag = fence.and_then(|fence| self.orphan_tags.get(&fence));
        self.events.push(ClaimEvent {
            fate,
            key: self.keys[place.key].key.clone(),
            fence,
            conn: place.conn,
            orphan_tag: orphan_tag.cloned(),
            lasted: now.saturating_duration_since(place.since),
        });
    }
}
