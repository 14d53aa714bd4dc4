//! The wait for the last holders, before the server ends.

use crossbeam_channel::{bounded, Receiver, Sender};

use super::operators::{statuses, KeyStatus};
use super::{Arbiter, SeatState, State};
use crate::table::{ConnId, Scope};

/// Which holders are waited for, before the server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainUntil {
    /// Until no key is held.
    NoHolder,
    /// Until every holder can come back over another connection, or has none.
    AllCanAdopt,
}

/// What follows when no holder is waited for any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    Nothing,
    CloseRecord,
}

pub(super) struct AwaitedHolders {
    until: DrainUntil,
    then: Then,
    /// The connection that was waited for when this was last looked at.
    last_seen: Option<ConnId>,
    /// Dropped when the wait is over.
    _over: Sender<()>,
}

impl Arbiter {
    /// How many holders are waited for, and the first of them, each as its key without others.
    /// Costs system calls, outside the mutex.
    pub fn awaited_holders(&self, at_most: usize) -> (usize, Vec<KeyStatus>) {
        let (visit, now) = self.visit(Scope::Everything);
        let Some(awaited) = &visit.awaited else {
            return (0, Vec::new());
        };
        let is_awaited = |conn: ConnId| match awaited.until {
            DrainUntil::NoHolder => true,
            DrainUntil::AllCanAdopt => visit.seats.get(&conn).is_some_and(|seat| !seat.can_adopt),
        };
        let (count, first) = visit.table.holders_of(is_awaited, at_most, now);
        (count, statuses(visit, first))
    }
}

impl State {
    /// Begins to wait for holders. The receiver's channel closes as soon as none is waited for.
    pub(super) fn await_holders(&mut self, until: DrainUntil, then: Then) -> Receiver<()> {
        let (sender, receiver) = bounded(0);
        self.awaited = Some(AwaitedHolders {
            until,
            then,
            last_seen: None,
            _over: sender,
        });
        receiver
    }

    /// Ends the wait for holders if none is waited for any more.
    pub(super) fn end_wait_for_holders(&mut self) {
        let Some(awaited) = &mut self.awaited else {
            return;
        };
        let (table, seats) = (&self.table, &self.seats);
        let is_over = match awaited.until {
            DrainUntil::NoHolder => !table.has_holders(),
            // The slots of a connection that ends pass on first.
            DrainUntil::AllCanAdopt if table.is_releasing() => false,
            DrainUntil::AllCanAdopt => {
                let is_waited_for = |conn: &ConnId, seat: &SeatState| seat.is_bound(*conn, table);
                // Mostly it is still the same one: not all connections are looked at in each visit.
                let last_seen = awaited
                    .last_seen
                    .and_then(|conn| seats.get_key_value(&conn));
                let mut candidates = last_seen.into_iter().chain(seats);
                let found = candidates.find(|(conn, seat)| is_waited_for(conn, seat));
                awaited.last_seen = found.map(|(conn, _)| *conn);
                found.is_none()
            }
        };
        if is_over {
            if awaited.then == Then::CloseRecord {
                self.close_record();
            }
            self.awaited = None;
        }
    }

    pub(super) fn close_record(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.close(self.table.untold());
        }
    }
}
