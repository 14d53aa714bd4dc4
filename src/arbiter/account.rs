//! Reports the events of claims to the log, in the order in which they happened, and remembers the
//! past holders among them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Arbiter, SeatState, State};
use crate::table::{ClaimEvent, ConnId};

/// A function that receives each event. It runs under the arbiter's mutex, so it must neither block
/// nor call the arbiter.
pub type Account = Box<dyn Fn(&Told<'_>) + Send>;

/// An event, with access to descriptions of the clients.
pub struct Told<'a> {
    pub event: &'a ClaimEvent,
    seats: &'a BTreeMap<ConnId, SeatState>,
}

impl Arbiter {
    /// Reports events to `account` from now on. If `tells_all` is `false`, reports only the events
    /// that an operator must see, and those of holders that are remembered.
    pub fn account_to(&self, account: Account, tells_all: bool) {
        let mut state = self.state.lock();
        if tells_all {
            state.table.note_all_events();
        }
        state.account = Some(account);
    }
}

impl Told<'_> {
    /// Describes the peer of a connection; `None` if the connection has closed. Costs a few system
    /// calls the first time.
    pub fn peer(&self, conn: ConnId) -> Option<&str> {
        self.seats.get(&conn)?.peer()
    }

    /// The tag that the client, or the former client of an orphan, gave itself.
    pub fn tag(&self) -> Option<&str> {
        self.tag_of_client().map(|tag| &**tag)
    }

    fn tag_of_client(&self) -> Option<&Arc<str>> {
        match self.seats.get(&self.event.conn) {
            Some(seat) => seat.tag.as_ref(),
            None => self.event.orphan_tag.as_ref(),
        }
    }
}

impl SeatState {
    /// The description of the peer. It is remembered, because the system cannot describe a peer
    /// that has gone.
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
        let events: Vec<ClaimEvent> = self.table.take_events().collect();
        for event in &events {
            let told = Told {
                event,
                seats: &self.seats,
            };
            if let Some(account) = &self.account {
                account(&told);
            }
            self.table.remember(event, told.tag_of_client(), self.now);
        }
    }
}
