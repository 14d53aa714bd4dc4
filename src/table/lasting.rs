//! Lasting grants: those that no client can bring back after a crash of the server, and that a
//! state file must therefore have. These are the kept grants, the grants whose leases are longer
//! than the time for which the next server settles, and the grants that their clients cannot prove:
//! those of older servers, and those with more slot numbers than a request has room for.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::changes::HolderRecord;
use super::names::{ConnId, Key};
use super::queue::{PlaceId, Ticket};
use super::LockTable;
use crate::terms::Refusal;
use crate::token::Fence;

/// A change of what a state file must say about a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastingChange {
    pub key: Key,
    pub fence: Fence,
    pub news: LastingNews,
}

/// What a state file must say about a grant from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LastingNews {
    /// The grant lasts.
    Lasts(LastingGrant),
    /// It has ended, or does not last any more.
    Over,
    /// It has ended before this time, when its lease would have ended, and its client may not know.
    Dead(Instant),
}

/// A grant as a state file must describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastingGrant {
    /// Its lease is the lease that the client was told, unless there is an end.
    pub record: HolderRecord,
    /// The connection that has the grant.
    pub conn: ConnId,
    /// When the lease ends. Without it, the lease begins anew at the next server, because renewals
    /// with the same lease are not noted.
    pub until: Option<Instant>,
}

/// What a state file says about the lease of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordedLease {
    Until(Instant),
    Anew(Duration),
}

/// The lasting grants, and the changes of them that have not been taken yet.
pub(super) struct Lasting {
    /// A grant lasts if its lease is longer than this.
    longest_ordinary: Duration,
    recorded: BTreeMap<Fence, RecordedLease>,
    changes: Vec<LastingChange>,
    /// Whether the state file can be written.
    is_writable: bool,
}

impl LockTable {
    /// Notes the changes of lasting grants from now on. A grant lasts if it is a kept one, if its
    /// lease is longer than the longest ordinary one, or if its client cannot prove it.
    pub fn note_lasting_grants(&mut self, longest_ordinary: Duration) {
        self.lasting = Some(Box::new(Lasting {
            longest_ordinary,
            recorded: BTreeMap::new(),
            changes: Vec::new(),
            is_writable: true,
        }));
    }

    /// The changes of lasting grants that the caller has not taken out yet; `None` if they are not
    /// noted.
    pub fn lasting_changes(&mut self) -> Option<&mut Vec<LastingChange>> {
        self.lasting.as_mut().map(|lasting| &mut lasting.changes)
    }

    /// Sets whether the state file can be written. While it cannot, no grant becomes a lasting one,
    /// and no lasting one gets a longer lease.
    pub fn set_lasting_writable(&mut self, is_writable: bool) {
        if let Some(lasting) = &mut self.lasting {
            lasting.is_writable = is_writable;
        }
    }

    /// Whether the grant of a waiting claim will last as soon as its client is told.
    pub fn will_last(&self, ticket: Ticket) -> bool {
        let place = &self.places[ticket.place];
        let lasting = self.lasting.as_ref();
        lasting.is_some_and(|lasting| place.lease > lasting.longest_ordinary)
    }

    /// The key of a claim that has not ended; `None` if it has.
    pub fn key_of(&self, ticket: Ticket) -> Option<&Key> {
        use super::queue::PlaceState::Ended;
        let place = &self.places[ticket.place];
        (!matches!(place.state, Ended(_))).then(|| &self.keys[place.key].key)
    }

    /// Refuses a claim whose grant would last while the state file cannot be written.
    pub(super) fn check_writable(&self, lease: Duration) -> Result<(), Refusal> {
        match &self.lasting {
            Some(lasting) if !lasting.is_writable && lease > lasting.longest_ordinary => {
                Err(Refusal::NoToken)
            }
            _ => Ok(()),
        }
    }

    /// Refuses to keep a grant while the state file cannot be written.
    pub(super) fn refuse_unwritable_keep(&self) -> Result<(), Refusal> {
        self.check_writable(Duration::MAX)
    }

    /// The longest lease that a holder can get by a renewal: while the state file cannot be
    /// written, the lease that needs no writing.
    pub(super) fn longest_renewal(&self, id: PlaceId, now: Instant) -> Duration {
        let Some(lasting) = self.lasting.as_ref().filter(|it| !it.is_writable) else {
            return Duration::MAX;
        };
        let fence = self.places[id].fence();
        let recorded = fence.and_then(|fence| lasting.recorded.get(&fence));
        let recorded = match recorded {
            Some(RecordedLease::Until(end)) => end.saturating_duration_since(now),
            Some(RecordedLease::Anew(lease)) => *lease,
            None => Duration::ZERO,
        };
        recorded.max(lasting.longest_ordinary)
    }

    /// Notes what the state file must say about a holder that has this lease now.
    pub(super) fn note_lasting(&mut self, id: PlaceId, lease: Duration) {
        let Some(lasting) = &mut self.lasting else {
            return;
        };
        let place = &self.places[id];
        let Some((end, fence)) = place.lease_end() else {
            return;
        };
        // A client that does not know its token cannot come back with it.
        let recorded = if !place.is_told {
            None
        } else if place.is_kept {
            Some(RecordedLease::Until(end))
        } else if lease > lasting.longest_ordinary || place.is_unprovable {
            Some(RecordedLease::Anew(lease))
        } else {
            None
        };
        self.record_lasting(id, fence, recorded);
    }

    /// Notes a holder that was restored. If a server crashes again and again before the client has
    /// come back, the lease must not begin anew each time.
    pub(super) fn note_lasting_restored(&mut self, id: PlaceId) {
        let Some(lasting) = &self.lasting else {
            return;
        };
        let place = &self.places[id];
        if let Some((end, fence)) = place.lease_end() {
            let is_long = place.lease > lasting.longest_ordinary;
            let lasts = place.is_kept || place.is_unprovable || is_long;
            let recorded = lasts.then_some(RecordedLease::Until(end));
            self.record_lasting(id, fence, recorded);
        }
    }

    /// Notes a lasting holder again, because its slots have numbers now, or because it is kept now.
    pub(super) fn note_lasting_again(&mut self, id: PlaceId) {
        let place = &self.places[id];
        let (Some(lasting), Some((end, fence))) = (&mut self.lasting, place.lease_end()) else {
            return;
        };
        let kept = place.is_kept.then_some(RecordedLease::Until(end));
        let recorded = lasting.recorded.remove(&fence);
        if kept.is_none() && recorded.is_none() && place.is_unprovable {
            let lease = Duration::from_secs(place.lease_len.into());
            return self.note_lasting(id, lease);
        }
        self.record_lasting(id, fence, kept.or(recorded));
    }

    /// Whether a grant may last that its client cannot prove.
    pub(super) fn may_be_unprovable(&self) -> bool {
        self.lasting.as_ref().is_none_or(|it| it.is_writable)
    }

    /// Notes that a grant has ended.
    pub(super) fn note_lasting_ended(&mut self, id: PlaceId, fence: Fence) {
        if self.lasting.is_some() {
            self.record_lasting(id, fence, None);
        }
    }

    fn record_lasting(&mut self, id: PlaceId, fence: Fence, recorded: Option<RecordedLease>) {
        let Some(mut lasting) = self.lasting.take() else {
            return;
        };
        let previous = match recorded {
            Some(recorded) => lasting.recorded.insert(fence, recorded),
            None => lasting.recorded.remove(&fence),
        };
        if previous != recorded {
            let key = self.keys[self.places[id].key].key.clone();
            let lasts = |lease, until| {
                LastingNews::Lasts(LastingGrant {
                    record: self.record(id, fence, lease),
                    conn: self.places[id].conn,
                    until,
                })
            };
            let news = match recorded {
                Some(RecordedLease::Until(end)) => lasts(Duration::ZERO, Some(end)),
                Some(RecordedLease::Anew(lease)) => lasts(lease, None),
                None => LastingNews::Over,
            };
            lasting.changes.push(LastingChange { key, fence, news });
        }
        self.lasting = Some(lasting);
    }

    /// Records that a grant is about to end. Its client may still believe in it, and come back with
    /// its token after a restart.
    pub(super) fn record_dead_token(&mut self, id: PlaceId) {
        let (place, lasting) = (&self.places[id], &mut self.lasting);
        if let (Some(lasting), Some((expires_at, fence))) = (lasting, place.lease_end()) {
            // A client that does not know its token cannot come back with it.
            if self.proofs.is_some() && place.is_told {
                let key = self.keys[place.key].key.clone();
                let news = LastingNews::Dead(expires_at);
                lasting.changes.push(LastingChange { key, fence, news });
            }
        }
    }
}
