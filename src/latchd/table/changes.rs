//! The changes of holders, as a journal or a state file must have them, in the order in which the
//! table makes them.
//!
//! A journal has all holders. A state file has only the *lasting* grants: those that no client can
//! bring back after a crash of the server. These are the kept grants, the grants whose leases are
//! longer than the time for which the next server settles, and the grants that their clients cannot
//! prove: those of older servers, and those with more slot numbers than a request has room for.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::queue::{Place, PlaceId, PlaceState, Ticket};
use super::restoring::HolderRecord;
use super::LockTable;
use crate::wire::terms::Refusal;
use crate::wire::token::Fence;

/// Which holders are recorded.
#[derive(Clone, Copy, Debug)]
pub enum Recording {
    /// All of them, in a journal.
    All,
    /// The lasting ones, in a state file. A grant lasts, among others, if its lease is longer than
    /// this.
    Lasting { longest_ordinary: Duration },
}

/// A change of what the record must say about a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: Key,
    pub fence: Fence,
    pub news: News,
}

/// What the record must say about a grant from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    Held(HeldGrant),
    /// It has ended, or does not last any more.
    Ended,
    /// It has ended, and its client may come back with its token until this time. A journal has no
    /// such grant.
    Dead(Instant),
}

/// A grant as the record must describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldGrant {
    /// Its lease is the lease that the client was told, unless there is an end. A journal gets the
    /// longest lease since the grant was made, kept or adopted.
    pub record: HolderRecord,
    /// The connection that has the grant.
    pub conn: ConnId,
    /// When the grant was made.
    pub since: Instant,
    /// When the lease ends. Without it, the lease begins anew at the next server, because renewals
    /// with the same lease are not noted.
    pub until: Option<Instant>,
}

/// What the record says about the lease of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordedLease {
    Until(Instant),
    Anew(Duration),
    /// What it says is not true any more.
    Outdated,
}

/// What the record says, and the changes of it that have not been taken yet.
pub struct Changes {
    recording: Recording,
    recorded: BTreeMap<Fence, RecordedLease>,
    pending: Vec<Change>,
    /// Since when the state file cannot be written; `None` if it can.
    unwritable_since: Option<Instant>,
}

impl Changes {
    /// What the record must say about the lease of a holder that has this lease now; `None` if it
    /// has nothing of the holder.
    fn wanted(&self, place: &Place, fence: Fence, lease: Duration) -> Option<RecordedLease> {
        match self.recording {
            Recording::All => Some(RecordedLease::Anew(match self.recorded.get(&fence) {
                Some(RecordedLease::Anew(longest)) => lease.max(*longest),
                _ => lease,
            })),
            // A client that does not know its token cannot come back with it.
            Recording::Lasting { .. } if !place.is_told => None,
            Recording::Lasting { .. } if place.is_kept => {
                place.lease_end().map(|(end, _)| RecordedLease::Until(end))
            }
            Recording::Lasting { longest_ordinary } => {
                let lasts = lease > longest_ordinary || place.is_unprovable;
                lasts.then_some(RecordedLease::Anew(lease))
            }
        }
    }

    /// The longest lease of a grant that is not recorded, while the state file cannot be written.
    fn longest_unwritten(&self) -> Option<Duration> {
        match self.recording {
            Recording::Lasting { longest_ordinary } => {
                self.unwritable_since.map(|_| longest_ordinary)
            }
            Recording::All => None,
        }
    }
}

impl LockTable {
    /// Notes the changes of these holders from now on. The caller must take them out of
    /// [`LockTable::changes`].
    pub fn note_changes(&mut self, recording: Recording) {
        self.changes = Some(Box::new(Changes {
            recording,
            recorded: BTreeMap::new(),
            pending: Vec::new(),
            unwritable_since: None,
        }));
    }

    /// The changes that the caller has not taken out yet; `None` if changes are not noted.
    pub fn changes(&mut self) -> Option<&mut Vec<Change>> {
        self.changes.as_mut().map(|changes| &mut changes.pending)
    }

    /// Whether all holders are recorded.
    pub fn records_all(&self) -> bool {
        let recording = self.changes.as_ref().map(|it| it.recording);
        matches!(recording, Some(Recording::All))
    }

    /// Sets whether the state file can be written. While it cannot, no grant becomes a lasting one,
    /// and no lasting one gets a longer lease.
    pub fn set_writable(&mut self, is_writable: bool, now: Instant) {
        if let Some(changes) = &mut self.changes {
            changes.unwritable_since = (!is_writable).then_some(now);
        }
    }

    /// For how long the state file could not be written; zero if it can.
    pub fn unwritten_for(&self, now: Instant) -> Duration {
        let since = self.changes.as_ref().and_then(|it| it.unwritable_since);
        since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Whether the grant of a waiting claim will be recorded as soon as its client is told.
    pub fn will_be_recorded(&self, ticket: Ticket) -> bool {
        let recording = self.changes.as_ref().map(|it| it.recording);
        recording.is_some_and(|recording| match recording {
            Recording::All => true,
            Recording::Lasting { longest_ordinary } => {
                self.places[ticket.place].lease > longest_ordinary
            }
        })
    }

    /// The key of a claim that has not ended; `None` if it has.
    pub fn key_of(&self, ticket: Ticket) -> Option<&Key> {
        let place = &self.places[ticket.place];
        (!matches!(place.state, PlaceState::Ended(_))).then(|| &self.keys[place.key].key)
    }

    /// Refuses a lease that would make a grant a lasting one, while the state file cannot be
    /// written.
    pub fn check_writable(&self, lease: Duration) -> Result<(), Refusal> {
        let longest = self.changes.as_ref().and_then(|it| it.longest_unwritten());
        match longest {
            Some(longest) if lease > longest => Err(Refusal::NotWritten),
            _ => Ok(()),
        }
    }

    /// The longest lease that a holder can get by a renewal: while the state file cannot be
    /// written, the lease that needs no writing.
    pub fn longest_renewal(&self, id: PlaceId, now: Instant) -> Duration {
        let Some(changes) = &self.changes else {
            return Duration::MAX;
        };
        let Some(longest_unwritten) = changes.longest_unwritten() else {
            return Duration::MAX;
        };
        let fence = self.places[id].fence();
        let recorded = fence.and_then(|fence| changes.recorded.get(&fence));
        let recorded = match recorded {
            Some(RecordedLease::Until(end)) => end.saturating_duration_since(now),
            Some(RecordedLease::Anew(lease)) => *lease,
            Some(RecordedLease::Outdated) | None => Duration::ZERO,
        };
        recorded.max(longest_unwritten)
    }

    /// The lease with which a holder is recorded, if it begins anew.
    pub fn recorded_lease(&self, fence: Fence) -> Option<Duration> {
        match self.changes.as_ref()?.recorded.get(&fence)? {
            RecordedLease::Anew(lease) => Some(*lease),
            RecordedLease::Until(_) | RecordedLease::Outdated => None,
        }
    }

    /// Notes that a holder has this lease now, if the record must say anything else than before.
    pub fn note(&mut self, id: PlaceId, lease: Duration) {
        let (place, changes) = (&self.places[id], &mut self.changes);
        let (Some(changes), Some(fence)) = (changes, place.fence()) else {
            return;
        };
        let wanted = changes.wanted(place, fence, lease);
        let previous = match wanted {
            Some(wanted) => changes.recorded.insert(fence, wanted),
            None => changes.recorded.remove(&fence),
        };
        if previous == wanted {
            return;
        }
        let held = |lease, until| {
            News::Held(HeldGrant {
                record: self.record(id, fence, lease),
                conn: place.conn,
                since: place.since,
                until,
            })
        };
        let news = match wanted {
            Some(RecordedLease::Until(end)) => held(Duration::ZERO, Some(end)),
            Some(RecordedLease::Anew(lease)) => held(lease, None),
            Some(RecordedLease::Outdated) | None => News::Ended,
        };
        self.add_change(id, fence, news);
    }

    /// Notes that a holder has this lease now, and that the record does not describe it any more:
    /// it has numbers, or has become a kept grant, or is no longer one.
    pub fn note_anew(&mut self, id: PlaceId, lease: Duration) {
        if let (Some(changes), Some(fence)) = (&mut self.changes, self.places[id].fence()) {
            if let Some(recorded) = changes.recorded.get_mut(&fence) {
                *recorded = RecordedLease::Outdated;
            }
        }
        self.note(id, lease);
    }

    /// Notes a restored holder. A journal has it already. In a state file its lease begins anew at
    /// once: so its adoption changes nothing there, and need not wait for a disk that may be full
    /// by then.
    pub fn note_restored(&mut self, id: PlaceId, lease: Duration) {
        match (&mut self.changes, self.places[id].fence()) {
            (Some(changes), Some(fence)) if matches!(changes.recording, Recording::All) => {
                changes.recorded.insert(fence, RecordedLease::Anew(lease));
            }
            _ => self.note(id, lease),
        }
    }

    /// Notes that a grant has ended.
    pub fn note_ended(&mut self, id: PlaceId, fence: Fence) {
        let changes = self.changes.as_mut();
        if changes.is_some_and(|it| it.recorded.remove(&fence).is_some()) {
            self.add_change(id, fence, News::Ended);
        }
    }

    /// Notes that a grant has ended although its client may still believe in it, and come back with
    /// its token after a restart: until its lease would have ended, and for as long as the next
    /// server settles after that, because a stopped host or a proxy may send a request late.
    pub fn note_dead(&mut self, id: PlaceId) {
        let place = &self.places[id];
        let recording = self.changes.as_ref().map(|it| it.recording);
        let (Some(Recording::Lasting { longest_ordinary }), Some((expires_at, fence))) =
            (recording, place.lease_end())
        else {
            return;
        };
        // A client that does not know its token cannot come back with it.
        if place.is_proof && place.is_told {
            self.add_change(id, fence, News::Dead(expires_at + longest_ordinary));
        }
    }

    fn add_change(&mut self, id: PlaceId, fence: Fence, news: News) {
        let key = self.keys[self.places[id].key].key.clone();
        if let Some(changes) = &mut self.changes {
            changes.pending.push(Change { key, fence, news });
        }
    }
}
