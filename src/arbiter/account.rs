//! What becomes of claims, told to the log in the order of the table.

use std::collections::BTreeMap;

use super::{Arbiter, SeatState, State};
use crate::table::{ClaimEvent, ConnId};

/// Is told each event. Called under the arbiter's mutex: it must not block, nor call the arbiter.
pub type Account = Box<dyn Fn(&Told<'_>) + Send>;

/// An event, and who the clients are.
pub struct Told<'a> {
    pub event: &'a ClaimEvent,
    seats: &'a BTreeMap<ConnId, SeatState>,
}

impl Arbiter {
    /// Tells `account` what becomes of claims from now on: all events, or those that an operator
    /// must hear of.
    pub fn account_to(&self, account: Account, tells_all: bool) {
        let mut state = self.state.lock();
        if tells_all {
            state.table.note_all_events();
        }
        state.account = Some(account);
    }
}

impl Told<'_> {
    /// Who is on a connection; `None` if it has closed. Costs a few system calls the first time.
    pub fn peer(&self, conn: ConnId) -> Option<&str> {
        self.seats.get(&conn)?.peer()
    }

    /// What the client says of itself, or said before its connection closed.
    pub fn tag(&self) -> Option<&str> {
        match self.seats.get(&self.event.conn) {
            Some(seat) => seat.tag.as_deref(),
            None => self.event.orphan_tag.as_deref(),
        }
    }
}

impl SeatState {
    /// Remembered: a peer that has gone cannot be asked for any more.
    fn peer(&self) -> Option<&str> {
        let socket = self.socket.as_ref()?;
        Some(self.peer.get_or_init(|| socket.peer().into()))
    }
}

impl State {
    /// Reports the events since the last call.
    #[inline]
    pub(super) fn tell_events(&mut self) {
        if self.table.has_events() {
            self.tell_some_events();
        }
    }

    #[cold]
    fn tell_some_events(&mut self) {
        let (seats, account) = (&self.seats, &self.account);
        for event in self.table.take_events() {
            if let Some(account) = account {
                account(&Told {
                    event: &event,
                    seats,
                });
            }
        }
    }
}
