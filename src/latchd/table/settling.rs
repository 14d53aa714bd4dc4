//! Settling: after a start, the table grants nothing until the leases of the clients that it does
//! not know have ended. Until then claims wait in order of arrival, and everything else works. No
//! key is excepted, not even one that a client has brought back and released: an earlier client may
//! have been believed while a living one had yet to come back.

use std::time::{Duration, Instant};

use super::queue::{KeyId, PlaceId};
use super::LockTable;

impl LockTable {
    /// Grants nothing until `until`. A claim waits even if its key is free, and a claim that does
    /// not wait gets [`Answer::WouldWait`](super::Answer::WouldWait). There must be no waiters yet.
    pub fn settle_until(&mut self, until: Instant) {
        debug_assert_eq!(self.waiter_count, 0);
        self.settling_until = Some(until);
    }

    /// When the table will grant again; `None` if it does already.
    pub fn settling_until(&self) -> Option<Instant> {
        self.settling_until
    }

    /// How long the table will grant nothing; zero if it grants.
    pub fn settling_left(&self, now: Instant) -> Duration {
        let until = self.settling_until;
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }

    /// The waiter of `key` whose turn it is. While the table settles, it is no waiter's turn.
    pub fn next_in_line(&self, key: KeyId) -> Option<PlaceId> {
        if self.is_settling() {
            None
        } else {
            self.keys[key].first_if_it_fits(&self.places)
        }
    }

    /// Whether nothing may be granted, because the table settles.
    pub fn is_settling(&self) -> bool {
        self.settling_until.is_some()
    }

    /// Whether the table has settled by `now`, but has granted nothing yet.
    pub fn has_settled(&self, now: Instant) -> bool {
        self.settling_until.is_some_and(|until| until <= now)
    }

    /// If the table has settled by `now`, begins to grant: each key's first waiters are owed their
    /// slots, and get them in order of arrival, in steps.
    pub fn end_settling(&mut self, now: Instant) {
        if !self.has_settled(now) {
            return;
        }
        self.settling_until = None;
        self.end_proofs();
        let keys: Vec<KeyId> = self.names.values().copied().collect();
        for key in keys {
            match self.next_to_serve(key, now) {
                Some(next) => self.owe(next),
                None => self.note_if_idle(key, now),
            }
        }
        self.grant_owed_slots(now);
    }
}
