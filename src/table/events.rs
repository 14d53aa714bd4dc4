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
    /// How long a holder had waited before it held.
    pub waited: Duration,
    /// Whether this is the end of a holder that is to be [remembered](LockTable::remember).
    pub is_past: bool,
    /// Whether an operator must see this event even if not all events are noted.
    pub is_alarming: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The claim holds now.
    Granted,
    /// The claim stopped waiting: its wait timeout was over, or its connection has closed.
    GaveUp,
    /// The work under the grant has ended with this exit status, and the server keeps the grant.
    Kept(u8),
    Ended(GrantEnd),
}

impl Fate {
    /// The exit status of the work under a grant, if its client has told it.
    pub fn status(self) -> Option<u8> {
        match self {
            Fate::Kept(status) => Some(status),
            Fate::Ended(GrantEnd::Released(status)) => status,
            _ => None,
        }
    }
}

/// How a grant ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantEnd {
    /// A client released the grant with its token, and may have told the exit status of the work
    /// under it.
    Released(Option<u8>),
    /// The lease ran out, or the time of a kept grant.
    Expired,
    /// The operator on this connection took the slot away.
    Broken(ConnId),
    /// The connection closed, or the client no longer waited.
    Abandoned,
}

impl LockTable {
    /// Notes every event from now on. Without this call, the table notes only the two kinds of
    /// events that an operator must see, a break and the expiry of a lease whose grant was not a
    /// kept one, and the ends of grants that are remembered.
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
        let is_alarming = match fate {
            Fate::Ended(GrantEnd::Expired) => !self.places[id].is_kept,
            Fate::Ended(GrantEnd::Broken(_)) => true,
            _ => false,
        };
        let is_past = self.is_past(id, fate);
        if is_alarming || is_past || self.notes_all_events {
            self.add_event(id, fence, (fate, is_alarming, is_past), now);
        }
    }

    /// Whether this event makes the holder a past one that is remembered. A client that has never
    /// learned of its grant has done nothing under it.
    #[inline]
    fn is_past(&self, id: PlaceId, fate: Fate) -> bool {
        let place = &self.places[id];
        let is_meant = match fate {
            Fate::Kept(_) | Fate::Ended(GrantEnd::Released(Some(_))) => true,
            Fate::Ended(_) => self.keys[place.key].has_history,
            Fate::Granted | Fate::GaveUp => false,
        };
        is_meant && place.is_told && !place.is_past
    }

    #[cold]
    fn add_event(
        &mut self,
        id: PlaceId,
        fence: Option<Fence>,
        (fate, is_alarming, is_past): (Fate, bool, bool),
        now: Instant,
    ) {
        self.places[id].is_past |= is_past;
        let place = &self.places[id];
        let orphan_tag = fence.and_then(|fence| self.orphan_tags.get(&fence));
        self.events.push(ClaimEvent {
            fate,
            key: self.keys[place.key].key.clone(),
            fence,
            conn: place.conn,
            orphan_tag: orphan_tag.cloned(),
            lasted: now.saturating_duration_since(place.since),
            waited: Duration::from_millis(place.waited_ms.into()),
            is_past,
            is_alarming,
        });
    }
}
