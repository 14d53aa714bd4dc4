//! Two-phase claims: a connection enqueues for a key with `e`, and waits for the grant with `w`.
//! Phase one is the time between the two. The claim may be granted in it.

use std::time::Instant;

use super::names::ConnId;
use super::queue::{PlaceId, PlaceState, Ticket};
use super::types::{Answer, Ask, Claimant};
use super::LockTable;
use crate::wire::terms::{Kind, Refusal};

impl LockTable {
    /// Claims a key and, unless the claim is refused, adds a phase-one entry for
    /// [`LockTable::collect_enqueued`]. If the connection already has an entry whose lease has run
    /// out, that entry is dropped first, even if the new claim is refused.
    pub fn enqueue(
        &mut self,
        claimant: Claimant,
        ask: &Ask<'_>,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        match self.phase_one(claimant.conn, ask.key, ask.terms.kind) {
            Err(Refusal::NotEnqueued) => {}
            Err(Refusal::LeaseExpired) => {
                self.forget_ended(claimant.conn, ask.key, ask.terms.kind);
            }
            _ if self.is_draining => return Err(Refusal::Draining),
            _ => return Err(Refusal::AlreadyEnqueued),
        }
        let answer = self.acquire(claimant, ask, now)?;
        let place = match answer {
            Answer::Granted(grant) => self.holders.get(&grant.token.fence).copied(),
            Answer::Queued(ticket) => Some(ticket.place),
            _ => None,
        };
        let place = place.expect("a claim that is not refused has a place");
        self.places[place].is_enqueued = true;
        let key = self.places[place].key;
        self.enqueued.insert((claimant.conn, key), place);
        Ok(answer)
    }

    /// Ends the phase-one entry of a key that the connection has enqueued for. If the grant is
    /// alive, its lease restarts now. A claim that still waits keeps its place, and the caller gets
    /// its ticket. Refuses for the same reasons as [`LockTable::try_collect_enqueued`].
    pub fn collect_enqueued(
        &mut self,
        conn: ConnId,
        key: &str,
        kind: Kind,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        let place = self.phase_one(conn, key, kind);
        let was_told = place.is_ok_and(|id| self.places[id].is_told);
        Ok(match self.try_collect_enqueued(conn, key, kind, now)? {
            Answer::WouldWait => {
                let ticket = self.take_ticket(conn, key, kind);
                ticket.map_or(Answer::WouldWait, Answer::Queued)
            }
            Answer::Granted(grant) if was_told => Answer::GrantedBefore(grant),
            answer => answer,
        })
    }

    /// Like [`LockTable::collect_enqueued`], but if the claim still waits, the answer is
    /// [`Answer::WouldWait`] and the entry stays. The entry also stays if only a fence is missing,
    /// because a fence may take any time to arrive; the answer is then [`Refusal::NoToken`].
    pub fn try_collect_enqueued(
        &mut self,
        conn: ConnId,
        key: &str,
        kind: Kind,
        now: Instant,
    ) -> Result<Answer, Refusal> {
        let place = match self.phase_one(conn, key, kind) {
            Ok(place) => place,
            Err(refusal) => {
                self.forget_ended(conn, key, kind);
                return Err(refusal);
            }
        };
        match self.collect_place(place, now)? {
            Answer::WouldWait if self.lacks_fence(place) => Err(Refusal::NoToken),
            Answer::WouldWait => Ok(Answer::WouldWait),
            granted => {
                self.end_phase(place);
                Ok(granted)
            }
        }
    }

    /// Ends the phase-one entry of a queued claim and returns its ticket; `None` if there is no
    /// such entry or its claim is not waiting.
    pub fn take_ticket(&mut self, conn: ConnId, key: &str, kind: Kind) -> Option<Ticket> {
        let place = self.phase_one(conn, key, kind).ok()?;
        let PlaceState::Waiting { arrival } = self.places[place].state else {
            return None;
        };
        self.end_phase(place);
        Some(Ticket { arrival, place })
    }

    /// Whether it is the waiter's turn, and only a fence is missing.
    pub fn lacks_fence(&self, place: PlaceId) -> bool {
        let key = self.places[place].key;
        self.next_in_line(key) == Some(place) && self.leases.len() < self.caps.max_grants
    }

    /// Turns a phase-one entry into an ordinary place. Does nothing to any other place.
    pub fn end_phase(&mut self, id: PlaceId) {
        let place = &mut self.places[id];
        if std::mem::take(&mut place.is_enqueued) {
            self.enqueued.remove(&(place.conn, place.key));
        }
    }

    /// The place of a claim that a connection has enqueued but not yet waited for, if the claim
    /// waits or holds. Otherwise why it has none any more.
    fn phase_one(&self, conn: ConnId, key: &str, kind: Kind) -> Result<PlaceId, Refusal> {
        let id = self.names.get(key).copied();
        let id = id.filter(|id| self.keys[*id].kind == kind);
        if let Some(place) = id.and_then(|id| self.enqueued.get(&(conn, id))) {
            return Ok(*place);
        }
        let entry = self.conns.get(&conn);
        let ended = entry.and_then(|entry| entry.ended.get(kind, key));
        Err(ended.unwrap_or(Refusal::NotEnqueued))
    }

    fn forget_ended(&mut self, conn: ConnId, key: &str, kind: Kind) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.ended.remove(kind, key);
        }
    }
}
