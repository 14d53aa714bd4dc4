//! Proofs: after a crash, a client proves with its token that it has a grant, and the table
//! restores the grant. The salt of each token is a keyed hash of what was granted, so any later
//! server with the same key can tell. A grant whose client may believe in it although it has ended
//! is *dead*: a state file must have its fence.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::changes::HolderRecord;
use super::events::GrantEnd;
use super::names::{ConnId, Key};
use super::queue::{KeyId, PlaceId};
use super::salts::{Proof, ProofRules, ProvedTerms};
use super::LockTable;
use crate::terms::{Refusal, Weight};
use crate::token::{Fence, Token};

/// The maximum number of restored grants whose fences are remembered once they have ended. An
/// earlier server had far fewer grants, unless a client has collected tokens.
const MAX_OVER: usize = 1 << 20;

/// What the table needs to make and to check proofs.
pub(super) struct Proofs {
    pub(super) rules: ProofRules,
    /// The fences of this server are above this one.
    first_fence: Fence,
    /// The grants of earlier servers that clients have brought back and still have. Empty unless
    /// the table settles.
    came_back: BTreeSet<Fence>,
    /// The grants of earlier servers that have ended at this one. Empty unless the table settles.
    over: BTreeSet<Fence>,
}

impl LockTable {
    /// Makes tokens that prove their grants from now on. Uses up a fence. Without one, no proof of
    /// an earlier server counts.
    pub fn make_proofs(&mut self, rules: ProofRules) {
        let first_fence = Fence(self.fences.next_fence().unwrap_or(0));
        self.proofs = Some(Box::new(Proofs {
            rules,
            first_fence,
            came_back: BTreeSet::new(),
            over: BTreeSet::new(),
        }));
    }

    /// Gives a new holder the salt that proves its grant, if the table makes proofs.
    #[inline]
    pub(super) fn prove(&mut self, id: PlaceId, fence: Fence) {
        if let Some(proofs) = &self.proofs {
            let place = &self.places[id];
            let terms = self.terms_of(place.key, place.weight);
            self.places[id].salt = proofs.rules.salt_key.salt(fence, &terms);
        }
    }

    /// Whether the client of a restored holder cannot prove its grant to a later server that makes
    /// proofs like this one.
    pub(super) fn lacks_proof(&self, id: PlaceId) -> bool {
        let place = &self.places[id];
        let (Some(proofs), Some(fence)) = (&self.proofs, place.fence()) else {
            return false;
        };
        let terms = self.terms_of(place.key, place.weight);
        let salt = proofs.rules.salt_key.salt(fence, &terms);
        !(salt.matches(place.salt) && self.numbers.are_provable(fence))
    }

    fn terms_of(&self, key: KeyId, weight: Weight) -> ProvedTerms<'_> {
        let queue = &self.keys[key];
        ProvedTerms {
            key: queue.key.as_str(),
            kind: queue.kind,
            limit: queue.limit,
            weight,
        }
    }

    /// Restores the grant of an earlier server as an orphan, if the token proves it. Proofs count
    /// only while the table settles, because later the key may have another holder. Refuses with
    /// [`Refusal::NotHeld`] otherwise. The time that this takes does not tell why.
    pub(super) fn restore_proved(
        &mut self,
        proof: &Proof<'_>,
        now: Instant,
    ) -> Result<PlaceId, Refusal> {
        let (Token { fence, salt }, terms) = (proof.token, &proof.terms);
        let Some(proofs) = &self.proofs else {
            return Err(Refusal::NotHeld);
        };
        let is_right = proofs.rules.salt_key.salt(fence, terms).matches(salt);
        let key = self.names.get(terms.key).copied();
        let may_live = self.is_settling(key)
            & (fence < proofs.first_fence)
            & !proofs.rules.dead.contains(&fence)
            & !proofs.over.contains(&fence)
            & (proofs.over.len() < MAX_OVER)
            & !self.holders.contains_key(&fence);
        let record = HolderRecord {
            key: Key::from(terms.key),
            kind: terms.kind,
            limit: terms.limit,
            weight: terms.weight,
            numbers: Arc::clone(&proof.numbers),
            token: proof.token,
            // The adoption begins the lease.
            lease: Duration::from_secs(1),
            is_kept: false,
            tag: None,
        };
        if !(is_right & may_live & record.is_possible()) {
            return Err(Refusal::NotHeld);
        }
        self.make_room_for(&record, now)?;
        self.restore_in_order(&record, now).ok_or(Refusal::NotHeld)
    }

    /// Ends what contradicts a proved grant. Waiters that want another kind or limit are refused.
    /// Of two holders that cannot both be, the one with the lower fence has lost its grant to the
    /// other: lower fences give way, the lowest first, and no more than needed. Refuses if a higher
    /// one is in the way. With all dead grants known, none gives way.
    fn make_room_for(&mut self, record: &HolderRecord, now: Instant) -> Result<(), Refusal> {
        let Some(key) = self.names.get(&record.key).copied() else {
            return Ok(());
        };
        for id in self.in_the_way(key, record).ok_or(Refusal::NotHeld)? {
            self.give_way(id, now);
        }
        let queue = &self.keys[key];
        if (queue.kind, queue.limit) != (record.kind, record.limit) {
            while let Some(waiter) = self.keys[key].waiters.first() {
                self.resolved.push_back(self.places[waiter].conn);
                self.withdraw(waiter);
                self.record_refusal(waiter, Refusal::LimitMismatch, now);
            }
            self.note_if_idle(key, now);
        }
        Ok(())
    }

    /// The holders that must give way to a proved grant; `None` if that is not enough.
    fn in_the_way(&self, key: KeyId, record: &HolderRecord) -> Option<Vec<PlaceId>> {
        let queue = &self.keys[key];
        let agrees = (queue.kind, queue.limit) == (record.kind, record.limit);
        let numbers_of = |id: &PlaceId| {
            self.numbers
                .of(self.places[*id].fence().unwrap_or(Fence(0)))
        };
        let contradicts = |id: &PlaceId| {
            !agrees
                || numbers_of(id)
                    .iter()
                    .any(|number| record.numbers.contains(number))
        };
        let holders = queue.holders.iter(&self.places);
        let (mut losers, others): (Vec<_>, Vec<_>) = holders.partition(contradicts);
        let is_lower = |id: &PlaceId| self.places[*id].fence() < Some(record.token.fence);
        if !losers.iter().all(is_lower) {
            return None;
        }
        let weight = |id: &PlaceId| self.places[*id].weight.get();
        let mut free = queue.free + losers.iter().map(weight).sum::<u32>();
        let mut others = others.into_iter().take_while(is_lower);
        while agrees && free < record.weight.get() {
            let next = others.next()?;
            free += weight(&next);
            losers.push(next);
        }
        Some(losers)
    }

    /// Ends a grant that a newer one contradicts.
    fn give_way(&mut self, id: PlaceId, now: Instant) {
        let conn = self.places[id].conn;
        self.record_dead_token(id);
        if let (Some(proofs), Some(fence)) = (&mut self.proofs, self.places[id].fence()) {
            // It does not prove that the key is free.
            proofs.came_back.remove(&fence);
        }
        self.revoke(id, GrantEnd::Broken(conn), now);
        self.given_way.push(conn);
    }

    /// Takes the connections that lost a grant because a newer grant contradicts it.
    pub fn take_given_way(&mut self) -> Vec<ConnId> {
        std::mem::take(&mut self.given_way)
    }

    /// Restores a holder among those of its key, in the order of their fences.
    fn restore_in_order(&mut self, record: &HolderRecord, now: Instant) -> Option<PlaceId> {
        if !self.restore_last(record, now) {
            return None;
        }
        let restored = self.holders[&record.token.fence];
        let key = self.places[restored].key;
        let holders = self.keys[key].holders.iter(&self.places);
        let is_later = |id: &PlaceId| self.places[*id].fence() > Some(record.token.fence);
        let later: Vec<PlaceId> = holders.filter(is_later).collect();
        for id in later {
            self.keys[key].holders.remove(&mut self.places, id);
            self.keys[key].holders.push(&mut self.places, id);
        }
        Some(restored)
    }

    /// Notes that a client has brought a grant back.
    pub(super) fn note_came_back(&mut self, fence: Fence) {
        if let Some(proofs) = &mut self.proofs {
            if self.settling_until.is_some() && fence < proofs.first_fence {
                proofs.came_back.insert(fence);
            }
        }
    }

    /// Notes that a grant has ended, whose proof then counts no more. If the grant had all slots of
    /// its key, the key is free: while its client had it, no other client can have been granted a
    /// slot, and all that had one before are known to be dead, or know it.
    pub(super) fn note_proof_over(&mut self, id: PlaceId, fence: Fence) {
        let Some(proofs) = &mut self.proofs else {
            return;
        };
        if self.settling_until.is_none() || fence >= proofs.first_fence {
            return;
        }
        proofs.over.insert(fence);
        let place = &self.places[id];
        let queue = &mut self.keys[place.key];
        let had_all = place.weight.get() == queue.kind.slot_count(queue.limit);
        if proofs.came_back.remove(&fence) && had_all && !proofs.rules.are_dead_missing {
            queue.is_proved_free = true;
        }
    }

    /// Forgets what is needed only while the table settles.
    pub(super) fn end_proofs(&mut self) {
        if let Some(proofs) = &mut self.proofs {
            proofs.rules.dead.clear();
            proofs.came_back.clear();
            proofs.over.clear();
        }
    }
}
