//! Reports the events of claims to the log, in the order in which they happened, and remembers the
//! past holders and the refused claims among them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Arbiter, SeatState, State};
use crate::latchd::table::{ClaimEvent, ConnId};

/// A function that receives each event. It runs under the arbiter's mutex, so it must neither block
/// nor call the arbiter.
pub type EventSink = Box<dyn Fn(&DescribedEvent<'_>) + Send>;

/// An event, with access to descriptions of the clients.
pub struct DescribedEvent<'a> {
    pub event: &'a ClaimEvent,
    seats: &'a BTreeMap<ConnId, SeatState>,
}

impl Arbiter {
    /// Reports events to `sink` from now on. If `reports_all` is `false`, reports only the events
    /// that an operator must see, and those that may be remembered.
    pub fn report_events(&self, sink: EventSink, reports_all: bool) {
        let mut state = self.state.lock();
        if reports_all {
            state.table.note_all_events();
        }
        state.event_sink = Some(sink);
    }
}

impl DescribedEvent<'_> {
    /// Describes the peer of a connection; `None` if the connection has closed. Costs a few system
    /// calls the first time.
    pub fn peer(&self, conn: ConnId) -> Option<&str> {
        self.seats.get(&conn)?.peer()
    }

    /// The tag that the client, or the former client of an orphan, gave itself.
    pub fn tag(&self) -> Option<&Arc<str>> {
        match self.seats.get(&self.event.conn) {
            Some(seat) => seat.tag.as_ref(),
            None => self.event.orphan_tag.as_ref(),
        }
    }

    /// The first holder of the key: the tag of the client, or else its address.
    pub fn holder(&self) -> Option<Arc<str>> {
        let (conn, orphan_tag) = self.event.holder.as_ref()?;
        orphan_tag.clone().or_else(|| self.name_of(*conn))
    }

    /// The names under which the event is remembered.
    fn names(&self) -> [Option<Arc<str>>; 2] {
        match self.tag().cloned() {
            tag if !self.event.fate.is_refusal() => [tag, None],
            tag => [tag.or_else(|| self.name_of(self.event.conn)), self.holder()],
        }
    }

    /// The tag of the client on a connection, or else its address, without the port.
    fn name_of(&self, conn: ConnId) -> Option<Arc<str>> {
        let seat = self.seats.get(&conn)?;
        seat.tag.clone().or_else(|| {
            let peer = seat.peer()?;
            Some(peer.rsplit_once(':').map_or(peer, |(host, _)| host).into())
        })
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
    pub fn tell_events(&mut self) {
        if self.table.has_events() {
            self.tell_some_events();
        }
    }

    #[cold]
    fn tell_some_events(&mut self) {
        let events: Vec<ClaimEvent> = self.table.take_events().collect();
        for event in &events {
            let described = DescribedEvent {
                event,
                seats: &self.seats,
            };
            if let Some(report) = &self.event_sink {
                report(&described);
            }
            self.table.remember(event, described.names(), self.now);
        }
    }
}
