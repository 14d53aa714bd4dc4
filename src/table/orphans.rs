//! Orphans: holders without a connection. A grant becomes an orphan if its client asks to keep it,
//! if its connection closes without releasing it, or if a journal or a hand-over restores it. It
//! stays an orphan until its lease ends, a client releases it with its token, or a connection
//! adopts it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::events::Fate;
use super::names::ConnId;
use super::queue::{as_len, PlaceId};
use super::salts::Proof;
use super::types::{Answer, Cap, Scope};
use super::LockTable;
use crate::terms::Refusal;
use crate::token::{Fence, Token};

/// The pseudo connection to which all orphans belong.
pub(super) const ORPHANS: ConnId = ConnId(0);

impl LockTable {
    /// Renews a grant of a lock or of a semaphore, and moves it to `conn` from any other
    /// connection. While the table settles, first restores a grant of an earlier server that the
    /// token proves. The move is provisional until `conn` renews or adopts the grant once more. If
    /// `conn` closes before that, a grant that was an orphan becomes an orphan again. Any other
    /// grant becomes a kept grant if the caps allow it.
    ///
    /// Refuses with [`Refusal::MaxLocks`] if `conn` has reached its cap and does not have the grant
    /// already; [`Refusal::NotHeld`] if the token neither belongs to a live holder of the key nor
    /// proves a grant, or the lease cannot be [renewed](Self::renew).
    pub fn adopt(
        &mut self,
        conn: ConnId,
        proof: &Proof<'_>,
        lease: Duration,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        let (key, token) = (proof.terms.key, proof.token);
        // An expired lease must not count against the connection's cap.
        self.end_due(Scope::Everything, now);
        let holder = self.find_told(key, token);
        let is_own = holder.is_ok_and(|holder| self.places[holder].conn == conn);
        if !is_own && self.connection_count(conn) >= self.caps.max_per_connection {
            return Err(self.refuse_at(Cap::PerConnection));
        }
        let holder = holder.or_else(|_| self.restore_proved(proof, now))?;
        let renewed = self.allowed_lease(holder, self.places[holder].is_kept, lease, now)?;
        self.renew_holder(holder, conn, renewed);
        if !is_own {
            let place = &self.places[holder];
            let was_orphan = place.conn == ORPHANS || place.is_provisional && place.was_orphan;
            self.move_grant(holder, conn, now);
            let place = &mut self.places[holder];
            (place.is_provisional, place.was_orphan) = (true, was_orphan);
        }
        self.note_came_back(token.fence);
        Ok(Answer::Renewed(renewed.length))
    }

    /// Renews a grant of a lock or of a semaphore, and makes it a kept grant: an orphan that counts
    /// against the cap on kept grants. `status` is the exit status of the work under the grant, if
    /// the work has ended and the client tells its status. `tag_of` returns the tag that the client
    /// of a connection gave itself.
    ///
    /// Refuses with [`Refusal::NotHeld`] if `token` does not belong to a live holder of `key`, if
    /// the lease would exceed the maximum keep time or hold time, or if the server allows no kept
    /// grants; [`Refusal::NoToken`] while the state file cannot be written; [`Refusal::MaxLocks`]
    /// if there would be more kept grants than the cap allows.
    pub fn keep(
        &mut self,
        key: &str,
        token: Token,
        lease: Duration,
        status: Option<u8>,
        tag_of: impl FnOnce(ConnId) -> Option<Arc<str>>,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        self.end_due(Scope::Everything, now);
        let holder = self.find_told(key, token)?;
        self.refuse_unwritable_keep()?;
        let kept = self.allowed_lease(holder, true, lease, now)?;
        // A client that asks to keep a grant relies on the whole time.
        if self.caps.max_kept == 0 || kept.length < lease {
            return Err(Refusal::NotHeld);
        }
        let (conn, is_kept) = (self.places[holder].conn, self.places[holder].is_kept);
        if !is_kept && self.kept_count >= self.caps.max_kept {
            return Err(self.refuse_at(Cap::Kept));
        }
        self.renew_holder(holder, conn, kept);
        self.set_lease_end(holder, kept.until);
        self.places[holder].lease_len = as_len(kept.length);
        if let Some(status) = status {
            self.note_event(holder, Some(token.fence), Fate::Kept(status), now);
        }
        if conn != ORPHANS {
            self.make_orphan(holder, tag_of(conn), now);
        }
        let was_kept = std::mem::replace(&mut self.places[holder].is_kept, true);
        self.kept_count += usize::from(!was_kept);
        self.note_kept(holder, lease);
        Ok(Answer::Renewed(lease))
    }

    /// The number of orphans.
    pub fn orphan_count(&self) -> usize {
        self.connection_count(ORPHANS)
    }

    /// The tag that the client of an orphan gave itself.
    pub fn orphan_tag(&self, fence: Fence) -> Option<&Arc<str>> {
        self.orphan_tags.get(&fence)
    }

    /// Makes a holder an orphan. `tag` is the tag that its client gave itself.
    pub(super) fn make_orphan(&mut self, id: PlaceId, tag: Option<Arc<str>>, now: Instant) {
        self.move_grant(id, ORPHANS, now);
        if let (Some(fence), Some(tag)) = (self.places[id].fence(), tag) {
            // The tag of an orphan whose adoption stayed provisional is still there.
            self.orphan_tags.entry(fence).or_insert(tag);
        }
    }

    /// Called when the connection of a grant has closed. If the adoption is still provisional and
    /// the caps allow it, makes the grant an orphan; otherwise returns `false`. If the grant was
    /// not an orphan before its adoption, it counts as kept from now on: otherwise a client that
    /// adopts and leaves could exceed the cap on kept grants.
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

    /// Makes a provisional adoption permanent, because the connection has now renewed the grant.
    pub(super) fn confirm_adoption(&mut self, id: PlaceId, lease: Duration) {
        self.places[id].is_provisional = false;
        if self.forget_orphan(id) {
            self.note_kept(id, lease);
        }
    }

    /// Clears what marks a holder as an orphan or a kept grant. Returns whether it was a kept
    /// grant.
    pub(super) fn forget_orphan(&mut self, id: PlaceId) -> bool {
        let place = &mut self.places[id];
        place.is_past = false;
        let was_kept = std::mem::take(&mut place.is_kept);
        self.kept_count -= usize::from(was_kept);
        place.fence().map(|fence| self.orphan_tags.remove(&fence));
        was_kept
    }

    /// When the lease of a kept grant ends; `None` for any other grant.
    pub(super) fn kept_until(&self, id: PlaceId) -> Option<Instant> {
        let place = &self.places[id];
        let lease_end = place.lease_end().filter(|_| place.is_kept);
        lease_end.map(|(until, _)| until)
    }

    /// Moves a holder to another connection. The client must know the token.
    fn move_grant(&mut self, id: PlaceId, conn: ConnId, now: Instant) {
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

    /// The holder of `key` with this token, if its client has been told the token.
    fn find_told(&self, key: &str, token: Token) -> Result<PlaceId, Refusal> {
        let holder = self.find_token(key, token);
        let is_told = |id: &PlaceId| self.places[*id].is_told;
        holder.filter(is_told).ok_or(Refusal::NotHeld)
    }
}
