//! What an operator may see of the queues and do about a holder.

use std::sync::Arc;
use std::time::Instant;

use super::{Arbiter, Outlet, RELEASED_AT_ONCE};
use crate::table::{ConnId, Key, KeyQueueSnapshot, LockTable, NumberMap, Scope};
use crate::token::Fence;

/// The queue of one key, with the clients in it.
pub struct KeyRoll {
    /// Holders and waiters, by their connections.
    pub queue: KeyQueueSnapshot,
    clients: NumberMap<ConnId, SeatedClient>,
}

/// The outlet and the tag of a seat.
type SeatedClient = (Option<Arc<dyn Outlet>>, Option<Arc<str>>);

impl KeyRoll {
    /// Who the client of a connection is; `None` if the connection has closed. Costs system calls.
    pub fn peer(&self, conn: ConnId) -> Option<String> {
        let (outlet, _) = self.clients.get(&conn)?;
        Some(outlet.as_ref()?.peer())
    }

    /// What the client of a connection says of itself.
    pub fn tag(&self, conn: ConnId) -> Option<&str> {
        let (_, tag) = self.clients.get(&conn)?;
        tag.as_deref()
    }
}

impl Arbiter {
    /// Who holds and waits for up to `at_most` keys in use, sorted: those after `after`, or the
    /// first ones. Of each key, up to `places` holders and as many waiters.
    pub fn queues(&self, after: Option<&Key>, at_most: usize, places: usize) -> Vec<KeyRoll> {
        self.rolls(Scope::Everything, |table, now| {
            table.queues(after, at_most, places, now)
        })
    }

    /// Who holds and waits for a key: up to `places` holders and as many waiters. `None` if it is
    /// not in use.
    pub fn queue(&self, key: &str, places: usize) -> Option<KeyRoll> {
        let rolls = self.rolls(Scope::Key(key), |table, now| {
            table.queue(key, places, now).into_iter().collect()
        });
        rolls.into_iter().next()
    }

    fn rolls(
        &self,
        scope: Scope<'_>,
        look: impl FnOnce(&mut LockTable, Instant) -> Vec<KeyQueueSnapshot>,
    ) -> Vec<KeyRoll> {
        let mut state = self.state.lock();
        let now = self.catch_up(&mut state, scope);
        let queues = look(&mut state.table, now);
        let mut rolls: Vec<KeyRoll> = Vec::with_capacity(queues.len());
        for queue in queues {
            let places = queue.holders.iter().chain(&queue.waiters);
            let seats = places.filter_map(|place| {
                let seat = state.seats.get(&place.conn)?;
                Some((place.conn, (seat.outlet.clone(), seat.tag.clone())))
            });
            let clients = seats.collect();
            rolls.push(KeyRoll { queue, clients });
        }
        self.leave(state);
        rolls
    }

    /// Ends grants of a key as if their leases were over: that with this fence, or all that there
    /// are. Returns their fences.
    pub fn break_grants(&self, key: &str, fence: Option<Fence>) -> Vec<Fence> {
        if let Some(fence) = fence {
            let is_broken = self.visit(Scope::Key(key), |table, now| {
                table.break_grant(key, fence, now)
            });
            return is_broken.then_some(fence).into_iter().collect();
        }
        // Waiters are granted the slots meanwhile: what is newer than this is not broken.
        let fences = self.visit(Scope::Key(key), |table, _| table.fences(key));
        let Some((_, newest)) = fences else {
            return Vec::new();
        };
        let mut broken = Vec::new();
        let mut break_some = |table: &mut LockTable, now| {
            for _ in 0..RELEASED_AT_ONCE {
                match table.fences(key) {
                    Some((oldest, _)) if oldest <= newest => {
                        table.break_grant(key, oldest, now);
                        broken.push(oldest);
                    }
                    _ => return true,
                }
            }
            false
        };
        while !self.visit(Scope::Nothing, &mut break_some) {}
        broken
    }
}
