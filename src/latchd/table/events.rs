//! Events in the life of claims, noted for the log and for the histories of keys.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::queue::{KeyId, PlaceId};
use super::LockTable;
use crate::wire::token::Fence;

/// An event of a claim: it was granted, it was refused, or its grant ended. Or an event of the work
/// that the operator expects under a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimEvent {
    pub fate: Fate,
    pub key: Key,
    /// The fence of the grant; `None` if the claim has only waited.
    pub fence: Option<Fence>,
    /// The connection that has the claim; 0 for orphans, and for expected work.
    pub conn: ConnId,
    /// The tag that the client of an orphan gave itself.
    pub orphan_tag: Option<Arc<str>>,
    /// The connection of the key's first holder, and the tag of that holder if it is an orphan.
    pub holder: Option<(ConnId, Option<Arc<str>>)>,
    /// How long the claim had waited or held before this event. For expected work, the time since
    /// its last success.
    pub lasted: Duration,
    /// How long a holder had waited before it held.
    pub waited: Duration,
    /// Whether this is the end of a holder that is to be [remembered](LockTable::remember).
    pub is_past: bool,
    /// Whether an operator must see this event even if not all events are noted.
    pub is_alarming: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fate {
    /// The claim holds now.
    #[default]
    Granted,
    /// The claim stopped waiting: its wait timeout was over, or its connection has closed.
    GaveUp,
    /// The claim would have had to wait. But its wait timeout was zero, or as many claims waited
    /// already as it allows.
    Busy,
    /// The work under the grant has ended with this exit status, and the server keeps the grant.
    Kept(u8),
    Ended(GrantEnd),
    /// Whether the work that the operator expects is overdue from now on.
    Overdue(bool),
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

    /// Whether the claim was not granted.
    pub fn is_refusal(self) -> bool {
        matches!(self, Fate::Busy | Fate::GaveUp)
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
    /// A client has proved a newer grant of the slots, so this one was over before the restart.
    GaveWay,
    /// The connection closed, or the client no longer waited.
    Abandoned,
}

impl LockTable {
    /// Notes every event from now on. Without this call, the table notes only the
    /// [alarming](ClaimEvent::is_alarming) events, and those that may be
    /// [remembered](LockTable::remember).
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
    #[inline(always)] // each call knows the fate
    pub fn note_event(&mut self, id: PlaceId, fence: Option<Fence>, fate: Fate, now: Instant) {
        let is_alarming = match fate {
            Fate::Ended(GrantEnd::Expired) => !self.places[id].is_kept,
            Fate::Ended(GrantEnd::Broken(_) | GrantEnd::GaveWay) => true,
            _ => false,
        };
        let is_past = self.is_past(id, fate);
        if is_alarming || is_past || fate.is_refusal() || self.notes_all_events {
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
            _ => false,
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
            holder: self.first_holder(place.key),
            lasted: now.saturating_duration_since(place.since),
            waited: Duration::from_millis(place.waited_ms.into()),
            is_past,
            is_alarming,
        });
    }

    /// Notes that a claim of `conn` for `key` was refused, because it would have had to wait.
    pub fn note_busy(&mut self, conn: ConnId, key: &str) {
        let key_id = self.names.get(key);
        self.events.push(ClaimEvent {
            fate: Fate::Busy,
            key: key.into(),
            conn,
            holder: key_id.and_then(|id| self.first_holder(*id)),
            ..ClaimEvent::default()
        });
    }

    /// The connection of the key's first holder, and the holder's tag if it is an orphan.
    fn first_holder(&self, key: KeyId) -> Option<(ConnId, Option<Arc<str>>)> {
        let first = &self.places[self.keys[key].holders.first()?];
        let orphan_tag = first.fence().and_then(|fence| self.orphan_tags.get(&fence));
        Some((first.conn, orphan_tag.cloned()))
    }
}
