//! Orphans: holders that no connection has. A client had its grant kept, its connection ended
//! without releasing it, or a journal or a hand-over has brought it back. An orphan lives until its
//! lease ends, its token releases it, or a connection adopts it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::place::PlaceId;
use super::types::{Answer, Cap, ConnId, Refusal, Scope};
use super::LockTable;
use crate::token::{Fence, Token};

/// The connection of all orphans.
pub(super) const ORPHANS: ConnId = ConnId(0);

impl LockTable {
    /// Renews a grant of either kind, and makes it one of `conn`, whichever connection had it. The
    /// move is provisional until `conn` renews or adopts it once more: if the connection ends
    /// before, an orphan is one again, and another grant is kept if it may be.
    ///
    /// [`Refusal::MaxLocks`] if `conn` has as much as it may, unless it has the grant already;
    /// [`Refusal::NotHeld`] unless `token` is that of a live holder of `key`, or if the lease would
    /// end later than a grant may be held.
    pub fn adopt(
        &mut self,
        conn: ConnId,
        key: &str,
        token: Token,
        lease: Duration,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        // What has run out must not count against the connection's cap.
        self.settle(Scope::Everything, now);
        let holder = self.find_told(key, token);
        let is_own = holder.is_ok_and(|holder| self.places[holder].conn == conn);
        if !is_own && self.connection_count(conn) >= self.caps.max_per_connection {
            return Err(self.refuse_at(Cap::PerConnection));
        }
        let holder = holder?;
        self.check_hold(holder, self.places[holder].is_kept, lease, now)?;
        self.renew_holder(holder, conn, lease, now);
        if !is_own {
            let place = &self.places[holder];
            let was_orphan = place.conn == ORPHANS || place.is_provisional && place.was_orphan;
            self.move_slot(holder, conn, now);
            let place = &mut self.places[holder];
            (place.is_provisional, place.was_orphan) = (true, was_orphan);
        }
        Ok(Answer::Renewed(lease))
    }

    /// Renews a grant of either kind, and makes it a kept one: an orphan. It is distinguished from
    /// other orphans because kept grants have a cap of their own. `tag_of` gives what the client of
    /// a connection says of itself.
    ///
    /// [`Refusal::NotHeld`] if the lease is longer than grants may be kept or held, or unless
    /// `token` is that of a live holder of `key`; [`Refusal::MaxLocks`] if as many grants are kept
    /// as may be.
    pub fn keep(
        &mut self,
        key: &str,
        token: Token,
        lease: Duration,
        tag_of: impl FnOnce(ConnId) -> Option<Arc<str>>,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        self.settle(Scope::Everything, now);
        let holder = self.find_told(key, token)?;
        self.check_hold(holder, true, lease, now)?;
        if self.caps.max_kept == 0 {
            return Err(Refusal::NotHeld);
        }
        let (conn, is_kept) = (self.places[holder].conn, self.places[holder].is_kept);
        if !is_kept && self.kept_count >= self.caps.max_kept {
            return Err(self.refuse_at(Cap::Kept));
        }
        self.renew_holder(holder, conn, lease, now);
        self.begin_lease(holder, now + lease);
        if conn != ORPHANS {
            self.make_orphan(holder, tag_of(conn), now);
        }
        let was_kept = std::mem::replace(&mut self.places[holder].is_kept, true);
        self.kept_count += usize::from(!was_kept);
        self.note_kept(holder, lease);
        Ok(Answer::Renewed(lease))
    }

    /// How many holders no connection has.
    pub fn orphan_count(&self) -> usize {
        self.connection_count(ORPHANS)
    }

    /// What the client of an orphan said of itself.
    pub fn orphan_tag(&self, fence: Fence) -> Option<&Arc<str>> {
        self.orphan_tags.get(&fence)
    }

    /// Takes a holder from its connection, whose client says `tag` of itself.
    pub(super) fn make_orphan(&mut self, id: PlaceId, tag: Option<Arc<str>>, now: Instant) {
        self.move_slot(id, ORPHANS, now);
        if let (Some(fence), Some(tag)) = (self.places[id].fence(), tag) {
            // The tag of an orphan whose adoption stayed provisional is still there.
            self.orphan_tags.entry(fence).or_insert(tag);
        }
    }

    /// Makes an orphan of a grant whose connection ends while the adoption is provisional; `false`
    /// if it may not be one. A grant that was no orphan before counts as kept from then on:
    /// otherwise a client that adopts and leaves would have more kept than may be.
    pub(super) fn leave_adopted(
        &mut self,
        id: PlaceId,
        tag: Option<Arc<str>>,
        now: Instant,
    ) -> bool {
        let place = &self.places[id];
        let ends = place.lease_end().map_or(now, |(ends, _)| ends);
        let may_keep = self.kept_count < self.caps.max_kept
            && ends.saturating_duration_since(now) <= self.caps.max_keep_time;
        let was_orphan = place.was_orphan;
        if !place.is_provisional || !(was_orphan || may_keep) {
            return false;
        }
        self.make_orphan(id, tag, now);
        if !was_orphan {
            self.places[id].is_kept = true;
            self.kept_count += 1;
            self.note_again(id);
        }
        true
    }

    /// Makes the adoption of a grant by its connection a lasting one, at the second renewal.
    pub(super) fn confirm_adoption(&mut self, id: PlaceId, lease: Duration) {
        self.places[id].is_provisional = false;
        if self.forget_orphan(id) {
            self.note_kept(id, lease);
        }
    }

    /// Forgets what is known of a holder as an orphan. Returns whether it was kept.
    pub(super) fn forget_orphan(&mut self, id: PlaceId) -> bool {
        let place = &mut self.places[id];
        let was_kept = std::mem::take(&mut place.is_kept);
        self.kept_count -= usize::from(was_kept);
        place.fence().map(|fence| self.orphan_tags.remove(&fence));
        was_kept
    }

    /// When the lease of a grant that is kept is over.
    pub(super) fn kept_until(&self, id: PlaceId) -> Option<Instant> {
        let place = &self.places[id];
        let lease_end = place.lease_end().filter(|_| place.is_kept);
        lease_end.map(|(until, _)| until)
    }

    /// Moves a holder, whose client knows its token, to another connection.
    fn move_slot(&mut self, id: PlaceId, conn: ConnId, now: Instant) {
        self.end_phase(id);
        let place = &mut self.places[id];
        place.is_provisional = false;
        let old = std::mem::replace(&mut place.conn, conn);
        if let Some(entry) = self.conns.get_mut(&old) {
            entry.held.remove(&mut self.places, id);
            entry.count -= 1;
            entry.last_busy = now;
        }
        self.link_to_connection(id, now);
    }

    /// The holder with this token, which its client knows.
    fn find_told(&self, key: &str, token: Token) -> Result<PlaceId, Refusal> {
        let holder = self.find_token(key, token);
        let is_told = |id: &PlaceId| self.places[*id].is_told;
        holder.filter(is_told).ok_or(Refusal::NotHeld)
    }
}
