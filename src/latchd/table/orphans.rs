//! Orphans: holders without a connection. A grant becomes an orphan if its client asks to keep it,
//! if its connection closes without releasing it, or if a server restores it from a journal, from a
//! state file or by a proof. It stays an orphan until its lease ends, a client releases it with its
//! token, or a connection adopts it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::events::Fate;
use super::names::ConnId;
use super::queue::{as_len, PlaceId};
use super::salts::Proof;
use super::types::{Answer, Cap};
use super::LockTable;
use crate::wire::terms::Refusal;
use crate::wire::token::{Fence, Token};

/// The pseudo connection to which all orphans belong.
pub const ORPHANS: ConnId = ConnId(0);

impl LockTable {
    /// Renews a grant of a lock or of a semaphore, and moves it to `conn` from any other
    /// connection. While the table settles, first restores a grant of an earlier server that the
    /// token proves. The move is provisional until `conn` renews or adopts the grant once more. If
    /// `conn` closes before that, the grant becomes an orphan.
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
        let (key, token) = (proof.key, proof.token);
        let holder = self.find_told(key, token);
        let is_own = holder.is_ok_and(|holder| self.places[holder].conn == conn);
        if !is_own && self.connection_count(conn) >= self.caps.max_per_connection {
            return Err(self.refuse_at(Cap::PerConnection));
        }
        let holder = holder.or_else(|_| self.restore_proved(proof, now))?;
        let place = &mut self.places[holder];
        let since = proof.age.filter(|_| !place.has_age);
        if let Some(since) = since.and_then(|age| now.checked_sub(age)) {
            (place.since, place.has_age) = (since, true);
        }
        let renewed = self.allowed_lease(holder, self.places[holder].is_kept, lease, now)?;
        self.renew_holder(holder, conn, renewed);
        if !is_own {
            self.move_grant(holder, conn, now);
            self.places[holder].is_provisional = true;
        }
        Ok(Answer::Renewed(renewed.length))
    }

    /// Renews a grant of a lock or of a semaphore, and makes it a kept grant: an orphan that counts
    /// against the cap on kept grants. `status` is the exit status of the work under the grant, if
    /// the work has ended and the client tells its status. `tag_of` returns the tag that the client
    /// of a connection gave itself.
    ///
    /// Refuses with [`Refusal::NotHeld`] if `token` does not belong to a live holder of `key`, if
    /// the lease would exceed the maximum keep time or hold time, or if the server allows no kept
    /// grants; [`Refusal::NotWritten`] while the state file cannot be written;
    /// [`Refusal::MaxLocks`] if there would be more kept grants than the cap allows.
    pub fn keep(
        &mut self,
        key: &str,
        token: Token,
        lease: Duration,
        status: Option<u8>,
        tag_of: impl FnOnce(ConnId) -> Option<Arc<str>>,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        let holder = self.find_told(key, token)?;
        self.check_writable(Duration::MAX)?;
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
        self.note_anew(holder, lease);
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
    pub fn make_orphan(&mut self, id: PlaceId, tag: Option<Arc<str>>, now: Instant) {
        self.move_grant(id, ORPHANS, now);
        if let (Some(fence), Some(tag)) = (self.places[id].fence(), tag) {
            // The tag of an orphan whose adoption stayed provisional is still there.
            self.orphan_tags.entry(fence).or_insert(tag);
        }
    }

    /// Makes a provisional adoption permanent, because the connection has now renewed the grant.
    pub fn confirm_adoption(&mut self, id: PlaceId, lease: Duration) {
        self.places[id].is_provisional = false;
        if self.forget_orphan(id) {
            self.note_anew(id, lease);
        }
    }

    /// Clears what marks a holder as an orphan or a kept grant. Returns whether it was a kept
    /// grant.
    pub fn forget_orphan(&mut self, id: PlaceId) -> bool {
        let place = &mut self.places[id];
        place.is_past = false;
        let was_kept = std::mem::take(&mut place.is_kept);
        self.kept_count -= usize::from(was_kept);
        place.fence().map(|fence| self.orphan_tags.remove(&fence));
        was_kept
    }

    /// When the lease of a kept grant ends; `None` for any other grant.
    pub fn kept_until(&self, id: PlaceId) -> Option<Instant> {
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
            entry.told.remove(&mut self.places, id);
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
