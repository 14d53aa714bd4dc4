//! Begins, renews and ends leases, decides which expired leases must be ended before an operation,
//! and removes idle keys.

use std::time::{Duration, Instant};

use super::events::{Fate, GrantEnd};
use super::names::ConnId;
use super::queue::{as_len, PlaceId, PlaceState};
use super::types::{Answer, Ask, Scope};
use super::LockTable;
use crate::wire::terms::{Kind, Refusal};
use crate::wire::token::{Fence, Token};

/// What a holder gets that asks for a lease.
#[derive(Clone, Copy, Debug)]
pub struct AllowedLease {
    /// As its client is told.
    pub length: Duration,
    /// At least `length` from now on.
    pub until: Instant,
}

impl LockTable {
    /// Turns a place that is in neither list of its key into a holder, whose lease begins now.
    pub fn begin_hold(&mut self, id: PlaceId, fence: Fence, now: Instant) {
        let place = &mut self.places[id];
        place.since = now;
        let (key, lease, weight) = (place.key, place.lease, place.weight);
        let expires_at = now + lease;
        place.state = PlaceState::Held { fence, expires_at };
        self.leases.insert((expires_at, fence), id);
        self.holders.insert(fence, id);
        self.counters.grants += 1;
        let queue = &mut self.keys[key];
        debug_assert!(queue.has_room(weight));
        queue.free -= weight.get();
        queue.holders.push(&mut self.places, id);
        self.give_provable_salt(id, fence);
        self.note(id, lease);
    }

    /// Ends a grant and passes its slots on.
    pub fn revoke(&mut self, id: PlaceId, end: GrantEnd, now: Instant) {
        let (key, grants_before) = (self.places[id].key, self.leases.len());
        self.end_hold(id, end, now);
        self.record_refusal(id, Refusal::LeaseExpired, now);
        self.promote(key, grants_before, now);
    }

    /// Takes a holder out of its key's holders. The place itself stays.
    pub fn end_hold(&mut self, id: PlaceId, end: GrantEnd, now: Instant) {
        let lease_end = self.places[id].lease_end();
        let (expires_at, fence) = lease_end.expect("a holder has a lease");
        self.counters.count_end(match end {
            // The client of a kept grant asked for it to end at this time.
            GrantEnd::Expired if self.places[id].is_kept => GrantEnd::Released(None),
            end => end,
        });
        self.note_event(id, Some(fence), Fate::Ended(end), now);
        self.forget_orphan(id);
        self.leases.remove(&(expires_at, fence));
        self.holders.remove(&fence);
        let place = &self.places[id];
        let queue = &mut self.keys[place.key];
        queue.free += place.weight.get();
        queue.holders.remove(&mut self.places, id);
        self.last_hold_ended = Some(now);
        self.numbers.free_all_of(fence, self.places[id].key);
        if !matches!(end, GrantEnd::Released(_)) {
            self.note_dead(id);
        }
        self.note_ended(id, fence);
        self.end_proof(fence);
    }

    /// Sets when a holder's lease ends.
    pub fn set_lease_end(&mut self, id: PlaceId, expires_at: Instant) {
        if let PlaceState::Held {
            fence,
            expires_at: ends,
        } = &mut self.places[id].state
        {
            self.leases.remove(&(*ends, *fence));
            self.leases.insert((expires_at, *fence), id);
            *ends = expires_at;
        }
    }

    /// Restarts a lease with the length `lease`, or with what is left of the maximum hold time. If
    /// `conn` has adopted the grant, the adoption is no longer provisional. Refuses with
    /// [`Refusal::NotHeld`] if `token` does not belong to a live holder of `key`, if the key is not
    /// used as `kind`, if less than a second is left, or if a kept grant would be kept for longer
    /// than the caps allow.
    pub fn renew(
        &mut self,
        conn: ConnId,
        key: &str,
        kind: Kind,
        token: Token,
        lease: Duration,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        let holder = self.find_holder(key, kind, token)?;
        let renewed = self.allowed_lease(holder, self.places[holder].is_kept, lease, now)?;
        self.renew_holder(holder, conn, renewed);
        Ok(Answer::Renewed(renewed.length))
    }

    /// The lease that a holder may have from now on if it asks for `lease`: at most what is left of
    /// the maximum hold time, and no longer than the state file can say. Refuses if less than a
    /// second is left, and if a kept grant would be kept for longer than the caps allow.
    pub fn allowed_lease(
        &self,
        id: PlaceId,
        is_kept: bool,
        lease: Duration,
        now: Instant,
    ) -> Result<AllowedLease, Refusal> {
        let (since, max_hold) = (self.places[id].since, self.caps.max_hold);
        let left = max_hold.saturating_sub(now.saturating_duration_since(since));
        let left = left.min(self.longest_renewal(id, now));
        let length = lease.min(Duration::from_secs(left.as_secs()));
        let is_too_long = is_kept && lease > self.caps.max_keep_time;
        if length.is_zero() || is_too_long {
            return Err(Refusal::NotHeld);
        }
        // A reply has whole seconds only, but the holder gets the rest of the last second, too.
        // Otherwise, a renewal could end the lease sooner than without it.
        let until = now + lease.min(left);
        Ok(AllowedLease { length, until })
    }

    /// Restarts a holder's lease at the request of `conn`, but never shortens the lease of a kept
    /// grant. The client may have sent this renewal before it asked to keep the grant over another
    /// connection, and a lease of seconds must not replace one of days.
    pub fn renew_holder(&mut self, id: PlaceId, conn: ConnId, lease: AllowedLease) {
        let AllowedLease { length, until } = lease;
        let place = &self.places[id];
        if place.is_provisional && place.conn == conn {
            self.confirm_adoption(id, length);
        }
        match self.kept_until(id).filter(|kept| *kept > until) {
            Some(kept) => self.set_lease_end(id, kept),
            None => {
                self.places[id].lease_len = as_len(length);
                self.set_lease_end(id, until);
            }
        }
        self.counters.renewals += 1;
        self.note(id, length);
    }

    /// Begins to grant if the table has settled, and ends up to `at_most` leases that have run out.
    /// Returns `true` once nothing of this is left within `scope`. The rest can wait.
    pub fn catch_up(&mut self, scope: Scope<'_>, at_most: usize, now: Instant) -> bool {
        let has_due = self.next_deadline().is_some_and(|over_at| over_at <= now);
        if !has_due && !self.must_go_on_granting {
            return true;
        }
        self.expire_some(at_most, now);
        !self.has_due(scope, now)
    }

    /// Begins to grant if the table has settled by `now`. Then ends up to `at_most` of the leases
    /// that have run out by `now`, in the order in which they ran out, and passes the slots on.
    /// Ends fewer if the slots must be granted to many waiters.
    /// Calling it early, late or twice is harmless.
    pub fn expire_some(&mut self, at_most: usize, now: Instant) {
        if self.must_go_on_granting {
            return self.grant_owed_slots(now);
        }
        self.end_settling(now);
        for _ in 0..at_most {
            if self.must_go_on_granting {
                return;
            }
            match self.leases.first_key_value() {
                Some((&(expires_at, _), &holder)) if expires_at <= now => {
                    self.revoke(holder, GrantEnd::Expired, now);
                }
                _ => return,
            }
        }
    }

    /// Whether the table has settled by `now` but does not grant yet, or a lease within `scope` has
    /// run out by `now` but has not been ended.
    pub fn has_due(&self, scope: Scope<'_>, now: Instant) -> bool {
        if self.must_go_on_granting {
            return true;
        }
        if self.next_deadline().is_none_or(|over_at| over_at > now) {
            return false;
        }
        let is_due = |key: &str| {
            let queue = self.names.get(key).map(|key| &self.keys[*key]);
            let holders = queue.map(|queue| queue.holders.iter(&self.places));
            let mut leases = holders
                .into_iter()
                .flatten()
                .filter_map(|id| self.places[id].lease_end());
            leases.any(|(expires_at, _)| expires_at <= now)
        };
        match scope {
            _ if self.has_settled(now) => true,
            Scope::Nothing => false,
            Scope::Key(key) => is_due(key),
            // An expired lease must not count against a cap.
            Scope::Ask(conn, ask) => is_due(ask.key) || self.needs_room(conn, ask),
            Scope::Everything => true,
        }
    }

    /// Whether the claim reaches a cap that spans several keys. Then the expired leases of all keys
    /// must be ended first, to make room for it.
    fn needs_room(&self, conn: ConnId, ask: &Ask<'_>) -> bool {
        self.names.len() >= self.caps.max_locks && !self.names.contains_key(ask.key)
            || self.leases.len() >= self.caps.max_grants
            || self.connection_count(conn) >= self.caps.max_per_connection
            || self.waiter_count >= self.caps.max_waiters_total
    }

    /// When the next lease ends or the table has settled, whichever is earlier.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = self.leases.first_key_value();
        let first = first.map(|((expires_at, _), _)| *expires_at);
        earlier(first, self.settling_until)
    }

    /// Drops up to `at_most` keys that have been idle for `max_idle` by `now`; `true` when no such
    /// key is left.
    pub fn prune(&mut self, max_idle: Duration, at_most: usize, now: Instant) -> bool {
        let is_due = |since: Instant| now.saturating_duration_since(since) >= max_idle;
        for _ in 0..at_most {
            if !self.idle_since().is_some_and(is_due) {
                return true;
            }
            self.drop_an_idle_key();
        }
        false
    }

    /// When the key that has been idle longest became idle.
    pub fn idle_since(&self) -> Option<Instant> {
        self.idle.first().map(|key| self.keys[key].last_used)
    }
}

/// The earlier of two times, if there is any.
pub fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
