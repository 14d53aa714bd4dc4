//! What an operator may see of the queues and do about a holder.

use std::sync::Arc;

use super::{Arbiter, ClientSocket, State, Visit};
use crate::table::{Cap, ConnId, CountersSnapshot, KeySnapshot, Listing, PlaceSnapshot, Scope};
use crate::token::Fence;

/// Grants that are broken before other threads get their turn. The log asks for the peer of each,
/// which takes a hundredth of a millisecond over a Unix socket.
const BROKEN_AT_ONCE: usize = 20;

/// Seats looked at before other threads get their turn: about a tenth of a millisecond.
const SEATS_AT_ONCE: usize = 1000;

/// The queue of one key, with the clients in it.
pub struct KeyStatus {
    pub queue: KeySnapshot,
    /// Of each holder, then of each waiter.
    clients: Vec<SeatedClient>,
}

/// What is known of the client in a seat.
struct SeatedClient {
    /// Dropped before the caller gets the status: it would keep the connection open.
    socket: Option<Arc<dyn ClientSocket>>,
    peer: Option<Box<str>>,
    tag: Option<Arc<str>>,
}

impl KeyStatus {
    /// Of each holder, then of each waiter: who its client is, and what the client says of itself;
    /// `None` if the connection has closed.
    pub fn clients(&self) -> impl Iterator<Item = (Option<&str>, Option<&str>)> {
        let clients = self.clients.iter();
        clients.map(|client| (client.peer.as_deref(), client.tag.as_deref()))
    }
}

impl State {
    /// What the client of a holder or a waiter says of itself, or said before its connection ended.
    fn tag_of(&self, place: &PlaceSnapshot) -> Option<Arc<str>> {
        match (self.seats.get(&place.conn), place.held) {
            (Some(seat), _) => seat.tag.clone(),
            (None, Some((fence, _))) => self.table.orphan_tag(fence).cloned(),
            (None, None) => None,
        }
    }
}

impl Arbiter {
    /// Who holds and waits for the keys in use, sorted, some at once. Of each key, up to `places`
    /// holders and as many waiters. Returns how to go on, unless there are no more. Costs system
    /// calls, outside the mutex.
    pub fn queues(
        &self,
        listing: Option<Listing>,
        places: usize,
    ) -> (Vec<KeyStatus>, Option<Listing>) {
        let (mut visit, now) = self.visit(Scope::Everything);
        let (queues, next) = visit.table.queues(listing, places, now);
        (statuses(visit, queues), next)
    }

    /// Who holds and waits for a key: up to `places` holders and as many waiters. `None` if it is
    /// not in use. Costs system calls, outside the mutex.
    pub fn queue(&self, key: &str, places: usize) -> Option<KeyStatus> {
        let (mut visit, now) = self.visit(Scope::Key(key));
        let queue = visit.table.queue(key, places, now);
        statuses(visit, queue.into_iter().collect()).pop()
    }

    /// A key with the one holder that has this fence, and without its waiters; `None` if there is
    /// no such grant. If it is the holder that asks, `asker`, its slots have numbers from now on.
    /// Costs system calls, outside the mutex.
    pub fn holder(&self, key: &str, fence: Fence, asker: ConnId) -> Option<KeyStatus> {
        let (mut visit, now) = self.visit(Scope::Key(key));
        visit.table.number_slots(asker, key, fence);
        let queue = visit.table.holder(key, fence, now);
        statuses(visit, queue.into_iter().collect()).pop()
    }

    /// How many connections have a seat, and what the table has counted.
    pub fn counters(&self) -> (usize, CountersSnapshot) {
        let (visit, _) = self.visit(Scope::Everything);
        (visit.seats.len(), visit.table.counters())
    }

    /// How many connections hold a slot and cannot adopt it over another connection. Looks at them
    /// in steps, between which some may come and go.
    pub fn bound_holder_count(&self) -> usize {
        let (mut bound_count, mut next) = (0, ConnId(0));
        self.visit_in_steps(Scope::Everything, |state, _| {
            let mut seats = state.seats.range(next..);
            for (conn, seat) in seats.by_ref().take(SEATS_AT_ONCE) {
                bound_count += usize::from(seat.is_bound(*conn, &state.table));
            }
            match seats.next() {
                Some((conn, _)) => next = *conn,
                None => return true,
            }
            false
        });
        bound_count
    }

    /// The cap for which a claim was refused last, by whichever connection; `None` if the log has
    /// been told already.
    pub fn take_cap_reached(&self) -> Option<Cap> {
        self.state.lock().table.take_cap_reached()
    }

    /// Ends grants of a key as if their leases were over: that with this fence, or all that there
    /// are; tells whether there were any. A holder that has nothing else at the server loses its
    /// connection, so that it finds out at once; `operator`, the connection that asks for this,
    /// never does.
    pub fn break_grants(&self, key: &str, fence: Option<Fence>, operator: ConnId) -> bool {
        let fences = match fence {
            Some(fence) => Some((fence, fence)),
            None => self.visit(Scope::Key(key)).0.table.fences(key),
        };
        let Some((oldest, newest)) = fences else {
            return false;
        };
        let (mut has_broken, mut losers) = (false, Vec::new());
        self.visit_in_steps(Scope::Key(key), |state, now| {
            for _ in 0..BROKEN_AT_ONCE {
                // Waiters are granted the freed slots. Their grants are newer, and are not broken.
                let next = fence.or_else(|| state.table.fences(key).map(|(oldest, _)| oldest));
                let next = next.filter(|next| (oldest..=newest).contains(next));
                let break_it = |fence| state.table.break_grant(key, fence, operator, now);
                let Some(conn) = next.and_then(break_it) else {
                    return true;
                };
                has_broken = true;
                // Decided in this step: a claim that the client makes later must not be lost.
                if conn != operator && state.table.has_nothing(conn) {
                    losers.extend(state.seats.get(&conn).and_then(|seat| seat.socket.clone()));
                }
            }
            false
        });
        losers.iter().for_each(|socket| socket.end());
        has_broken
    }
}

pub(super) fn statuses(visit: Visit<'_>, queues: Vec<KeySnapshot>) -> Vec<KeyStatus> {
    let client = |place: &PlaceSnapshot| {
        let seat = visit.seats.get(&place.conn);
        SeatedClient {
            socket: seat.and_then(|seat| seat.socket.clone()),
            peer: None,
            tag: visit.tag_of(place),
        }
    };
    let status = |queue: KeySnapshot| {
        let places = queue.holders.iter().chain(&queue.waiters);
        let clients = places.map(client).collect();
        KeyStatus { queue, clients }
    };
    let mut statuses: Vec<KeyStatus> = queues.into_iter().map(status).collect();
    drop(visit);
    for client in statuses.iter_mut().flat_map(|status| &mut status.clients) {
        client.peer = client.socket.take().map(|socket| socket.peer().into());
    }
    statuses
}
