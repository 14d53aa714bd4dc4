//! Waiting for the last holders before the server ends.

use crossbeam_channel::{bounded, Receiver, Sender};

use super::operators::{statuses, KeyStatus};
use super::{Arbiter, SeatState, State};
use crate::latchd::table::{ConnId, Scope};

/// How long the server waits for holders before it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainUntil {
    /// Until no key is held.
    NoHolder,
    /// Until only kept grants are held. The client of any other orphan may have been cut off.
    NoClient,
    /// Until every grant that belongs to a connection can be adopted over another connection.
    AllCanAdopt,
}

/// What to do when the wait for holders is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Nothing,
    CloseRecord,
}

pub struct AwaitedHolders {
    until: DrainUntil,
    then: Then,
    /// A connection that was still waited for at the previous look.
    last_seen: Option<ConnId>,
    /// Dropped when the wait is over, which closes the receiver's channel.
    _over: Sender<()>,
}

impl Arbiter {
    /// The number of holders that the server waits for, and the first `at_most` of them, each
    /// described by its key with only that holder. Costs system calls, which are made without the
    /// mutex.
    pub fn awaited_holders(&self, at_most: usize) -> (usize, Vec<KeyStatus>) {
        let (visit, now) = self.visit(Scope::Everything);
        let Some(awaited) = &visit.awaited else {
            return (0, Vec::new());
        };
        let is_awaited = |conn: ConnId, is_kept: bool| match awaited.until {
            DrainUntil::NoHolder => true,
            DrainUntil::NoClient => !is_kept,
            DrainUntil::AllCanAdopt => visit
                .seats
                .get(&conn)
                .is_some_and(|seat| !seat.client.can_adopt),
        };
        let (count, first) = visit.table.holders_of(is_awaited, at_most, now);
        (count, statuses(visit, first))
    }
}

impl State {
    /// Begins to wait for holders. The returned channel closes when the wait is over.
    pub fn await_holders(&mut self, until: DrainUntil, then: Then) -> Receiver<()> {
        let (sender, receiver) = bounded(0);
        self.awaited = Some(AwaitedHolders {
            until,
            then,
            last_seen: None,
            _over: sender,
        });
        receiver
    }

    /// Ends the wait for holders if its condition is met.
    pub fn end_wait_for_holders(&mut self) {
        let Some(awaited) = &mut self.awaited else {
            return;
        };
        let (table, seats) = (&self.table, &self.seats);
        let is_over = match awaited.until {
            DrainUntil::NoHolder => !table.has_holders(),
            DrainUntil::NoClient => !table.has_clients(),
            // Closed connections must first lose their slots.
            DrainUntil::AllCanAdopt if table.is_releasing() => false,
            DrainUntil::AllCanAdopt => {
                let is_waited_for =
                    |conn: &ConnId, seat: &SeatState| seat.has_unadoptable(*conn, table);
                // Usually the connection of the previous look is still waited for. It is checked
                // first, so that most visits do not look at all connections.
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

    pub fn close_record(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.stop();
        }
    }
}
