//! The two phases: a connection enqueues for a key, and waits for its grant later.

use std::time::Instant;

use super::connection::PhaseOne;
use super::types::{Answer, Ask, Claim, Claimant, ConnId, Kind, Refusal, Scope, Ticket};
use super::LockTable;

impl LockTable {
    /// Asks for a key, and remembers it for [`LockTable::try_wait`] unless it is refused. An entry
    /// that is dead makes way for the new one, or for the refusal.
    pub fn enqueue(&mut self, claimant: Claimant, ask: &Ask<'_>, now: Instant) -> Answer {
        self.settle(Scope::Ask(claimant.conn, ask), now);
        match self.phase_one(claimant.conn, ask.key, ask.kind) {
            None => {}
            Some(PhaseOne::Dead) => self.end_phase(claimant.conn, ask.key, ask.kind),
            Some(_) if self.draining => return Answer::Refused(Refusal::Draining),
            Some(_) => return Answer::AlreadyEnqueued,
        }
        let (entry, answer) = match self.acquire(claimant, ask, now) {
            Ok(Claim::Acquired(grant)) => (PhaseOne::Granted(grant), Answer::Granted(grant)),
            Ok(Claim::Queued(ticket)) => (PhaseOne::Queued(ticket), Answer::Queued),
            Err(refusal) => return Answer::Refused(refusal),
        };
        let key = self.keys[ask.key].key().clone();
        let enqueued = &mut self.entry(claimant.conn, now).enqueued;
        enqueued.insert(ask.kind, key, entry);
        answer
    }

    /// Ends the two phases of a key that the connection has enqueued for: a grant that is alive is
    /// handed over with its lease started anew. `None` if its turn has not come; the entry stays.
    /// It stays as well if only a fence is wanting, since that may take any time.
    pub fn try_wait(
        &mut self,
        conn: ConnId,
        key: &str,
        kind: Kind,
        now: Instant,
    ) -> Option<Answer> {
        self.settle(Scope::Key(key), now);
        let answer = match self.phase_one(conn, key, kind) {
            None => return Some(Answer::NotEnqueued),
            Some(PhaseOne::Dead) => Answer::Refused(Refusal::LeaseExpired),
            Some(PhaseOne::Granted(grant)) => {
                let key = self.keys[key].key().clone();
                self.extend(&key, grant.token.fence, grant.lease, now)
                    .expect("an entry dies with its holder");
                Answer::Granted(grant)
            }
            Some(PhaseOne::Queued(ticket)) => match self.collect(ticket, now) {
                Some(answer) => answer,
                None if self.is_owed(ticket) => return Some(Answer::Refused(Refusal::NoToken)),
                None => return None,
            },
        };
        self.end_phase(conn, key, kind);
        Some(answer)
    }

    /// Takes the ticket of a queued claim out of its phase-one entry, to wait with it; `None` if
    /// there is no such entry.
    pub fn take_ticket(&mut self, conn: ConnId, key: &str, kind: Kind) -> Option<Ticket> {
        match self.phase_one(conn, key, kind) {
            Some(PhaseOne::Queued(ticket)) => {
                self.end_phase(conn, key, kind);
                Some(ticket)
            }
            _ => None,
        }
    }

    /// Whether it is a waiter's turn, and only a fence is wanting.
    pub(super) fn is_owed(&self, ticket: Ticket) -> bool {
        self.keys[&self.tickets[&ticket].key].next_in_line() == Some(ticket)
    }

    pub(super) fn phase_one(&self, conn: ConnId, key: &str, kind: Kind) -> Option<PhaseOne> {
        self.conns.get(&conn)?.enqueued.get(kind, key)
    }

    pub(super) fn end_phase(&mut self, conn: ConnId, key: &str, kind: Kind) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.enqueued.remove(kind, key);
        }
    }
}
