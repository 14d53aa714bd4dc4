//! What operators can do: look at queues and counters, and break grants.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Arbiter, ClientSocket, State, Visit};
use crate::latchd::table::{
    ConnId, Counters, CountersSnapshot, Expectation, Key, KeyHistory, KeySnapshot, Listing,
    PlaceSnapshot, Scope, STEP,
};
use crate::wire::token::Fence;

/// How many grants one step breaks. Each takes ten times as long as another piece of work, because
/// the log asks who the peer is, which takes a hundredth of a millisecond over a Unix socket.
const BROKEN_AT_ONCE: usize = STEP / 10;

/// How many broken grants the server remembers, so that their clients learn why they have lost
/// them.
const BROKEN_KNOWN: usize = 256;

/// The queue of one key, with the clients in it.
pub struct KeyStatus {
    pub queue: KeySnapshot,
    /// The client of each holder, then of each waiter.
    clients: Vec<SeatedClient>,
}

/// What the arbiter knows of a client.
struct SeatedClient {
    /// Dropped before the caller gets the status, because a socket that is not dropped keeps the
    /// connection open.
    socket: Option<Arc<dyn ClientSocket>>,
    peer: Option<Box<str>>,
    tag: Option<Arc<str>>,
}

impl KeyStatus {
    /// For each holder, then for each waiter: a description of the client, which is `None` if the
    /// connection has closed, and the client's tag, if it has one.
    pub fn clients(&self) -> impl Iterator<Item = (Option<&str>, Option<&str>)> {
        let clients = self.clients.iter();
        clients.map(|client| (client.peer.as_deref(), client.tag.as_deref()))
    }
}

impl State {
    /// The tag that the client of a holder or a waiter gave itself. An orphan has the tag of its
    /// former client.
    fn tag_of(&self, place: &PlaceSnapshot) -> Option<Arc<str>> {
        match (self.seats.get(&place.conn), place.held) {
            (Some(seat), _) => seat.tag.clone(),
            (None, Some((fence, _))) => self.table.orphan_tag(fence).cloned(),
            (None, None) => None,
        }
    }
}

impl Arbiter {
    /// Describes a page of the keys in use in sorted order, each with up to `places` holders and up
    /// to `places` waiters. Returns the position to continue from if there may be more keys. Costs
    /// system calls, which are made without the mutex.
    pub fn queues(
        &self,
        listing: Option<Listing>,
        places: usize,
    ) -> (Vec<KeyStatus>, Option<Listing>) {
        let (mut visit, now) = self.visit(Scope::Everything);
        let (queues, next) = visit.table.queues(listing, places, now);
        (statuses(visit, queues), next)
    }

    /// Describes a key with up to `places` holders and up to `places` waiters; `None` if the key is
    /// not in use. Costs system calls, which are made without the mutex.
    pub fn queue(&self, key: &str, places: usize) -> Option<KeyStatus> {
        let (mut visit, now) = self.visit(Scope::Key(key));
        let queue = visit.table.queue(key, places, now);
        statuses(visit, queue.into_iter().collect()).pop()
    }

    /// Describes a key with only the holder that has this fence, and without waiters; `None` if
    /// there is no such grant. If the holder is `asker`, the connection that asks, its slots get
    /// numbers. Costs system calls, which are made without the mutex.
    pub fn holder(&self, key: &str, fence: Fence, asker: ConnId) -> Option<KeyStatus> {
        let (mut visit, now) = self.visit(Scope::Key(key));
        visit.table.number_slots(asker, key, fence);
        let queue = visit.table.holder(key, fence, now);
        statuses(visit, queue.into_iter().collect()).pop()
    }

    /// Expects work under these keys to succeed, each at least once in its time from now on, and
    /// remembers their holders.
    pub fn expect<'a>(&self, keys: impl IntoIterator<Item = (&'a str, Duration)>) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        for (key, within) in keys {
            visit.table.expect(key, within, now);
        }
    }

    /// Begins the time of each expectation anew, and tells from then on what is overdue.
    pub fn expect_anew(&self) {
        let (mut visit, now) = self.visit(Scope::Nothing);
        visit.table.expect_anew(now);
    }

    /// The past holders of a key; `None` if none are remembered.
    pub fn history(&self, key: &str) -> Option<KeyHistory> {
        let (visit, now) = self.visit(Scope::Key(key));
        visit.table.history(key, now)
    }

    /// A page of the past holders of keys, in the order of the keys, from the one behind `last` on.
    pub fn histories(&self, last: Option<&Key>, at_most: usize) -> Vec<KeyHistory> {
        let (visit, now) = self.visit(Scope::Everything);
        visit.table.histories(last, at_most, now)
    }

    /// The keys under which work is expected to succeed, and the present time.
    pub fn expected(&self) -> (Vec<(Key, Expectation)>, Instant) {
        let (visit, now) = self.visit(Scope::Nothing);
        (visit.table.expected(), now)
    }

    /// The number of connections with a seat, and the counters of the table.
    pub fn counters(&self) -> (usize, CountersSnapshot) {
        let (visit, now) = self.visit(Scope::Everything);
        (visit.seats.len(), visit.table.counters(now))
    }

    /// Counts what the table does not see.
    pub fn count(&self, count: impl FnOnce(&mut Counters)) {
        count(&mut self.state.lock().table.counters);
    }

    /// How many connections have a grant that their client cannot adopt over another connection.
    /// Counts in steps, between which connections may come and go.
    pub fn unadoptable_holder_count(&self) -> usize {
        let (mut count, mut next) = (0, ConnId(0));
        self.visit_in_steps(Scope::Everything, |state, _| {
            let mut seats = state.seats.range(next..);
            for (conn, seat) in seats.by_ref().take(STEP) {
                count += usize::from(seat.has_unadoptable(*conn, &state.table));
            }
            match seats.next() {
                Some((conn, _)) => next = *conn,
                None => return true,
            }
            false
        });
        count
    }

    /// Ends the grant of `key` with this fence, or all present grants of the key if `fence` is
    /// `None`. Returns whether any grant has ended. If a client then has nothing else at the
    /// server, its connection is closed, so that it notices the loss at once; the connection of
    /// `operator` stays open.
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
                // Waiters are granted the freed slots. Their grants are newer than `newest`, so
                // they are not broken.
                let next = fence.or_else(|| state.table.fences(key).map(|(oldest, _)| oldest));
                let next = next.filter(|next| (oldest..=newest).contains(next));
                let break_it = |fence| {
                    let conn = state.table.break_grant(key, fence, operator, now)?;
                    Some((fence, conn))
                };
                let Some((fence, conn)) = next.and_then(break_it) else {
                    return true;
                };
                has_broken = true;
                if state.broken.len() == BROKEN_KNOWN {
                    state.broken.pop_front();
                }
                state.broken.push_back(fence);
                // This is decided now, because a claim that the client makes after this step must
                // not be lost.
                if conn != operator && state.table.has_nothing(conn) {
                    losers.extend(state.seats.get(&conn).and_then(|seat| seat.socket.clone()));
                }
            }
            false
        });
        losers.iter().for_each(|socket| socket.shut_down());
        has_broken
    }
}

pub fn statuses(visit: Visit<'_>, queues: Vec<KeySnapshot>) -> Vec<KeyStatus> {
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
