//! Proofs: after a crash, a client proves with its token that it has a grant, and the table
//! restores the grant. The salt of each token is a keyed hash of what was granted, so any later
//! server with the same key can tell. Only the token of a client that can adopt its grants is a
//! proof: any other client would not come back, and its token could only bring back what has ended.
//! A grant whose client may believe in it although it has ended is *dead*: a state file must have
//! its fence.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::events::GrantEnd;
use super::names::ConnId;
use super::queue::{KeyId, PlaceId};
use super::restoring::HolderRecord;
use super::salts::{Proof, ProofRules};
use super::LockTable;
use crate::wire::terms::Refusal;
use crate::wire::token::{Fence, Salt, Token};

/// What the table needs to make and to check proofs.
pub struct Proofs {
    pub rules: ProofRules,
    /// The fences of this server are above this one.
    first_fence: Fence,
}

impl LockTable {
    /// Makes tokens that prove their grants from now on. Uses up a fence. Without one, no proof of
    /// an earlier server counts.
    pub fn make_proofs(&mut self, rules: ProofRules) {
        let first_fence = Fence(self.fences.next_fence().unwrap_or(0));
        self.proofs = Some(Box::new(Proofs { rules, first_fence }));
    }

    /// Gives a new holder the salt that proves its grant, if its client can adopt it.
    #[inline]
    pub fn give_provable_salt(&mut self, id: PlaceId, fence: Fence) {
        if self.places[id].is_proof {
            let salt = self.proof_of(id, fence);
            self.places[id].salt = salt.unwrap_or(self.places[id].salt);
        }
    }

    /// Finds out whether the token of a restored holder proves its grant.
    pub fn mark_if_proof(&mut self, id: PlaceId, fence: Fence) {
        let Some(salt) = self.proof_of(id, fence) else {
            return;
        };
        let is_provable = self.numbers.are_provable(fence);
        let place = &mut self.places[id];
        place.is_proof = salt.matches(place.salt);
        place.is_unprovable = !(place.is_proof && is_provable);
    }

    /// The salt that proves a grant, if the table makes proofs.
    fn proof_of(&self, id: PlaceId, fence: Fence) -> Option<Salt> {
        let place = &self.places[id];
        let (queue, proofs) = (&self.keys[place.key], self.proofs.as_ref()?);
        let (key, terms) = (queue.key.as_str(), queue.terms(place.weight));
        Some(proofs.rules.salt_key.salt(fence, key, terms))
    }

    /// Restores the grant of an earlier server as an orphan, if the token proves it. Proofs count
    /// only while the table settles, because later the key may have another holder. Refuses with
    /// [`Refusal::NotHeld`] otherwise. The time that this takes does not tell why.
    pub fn restore_proved(&mut self, proof: &Proof<'_>, now: Instant) -> Result<PlaceId, Refusal> {
        let (Token { fence, salt }, terms) = (proof.token, proof.terms);
        let Some(proofs) = &self.proofs else {
            return Err(Refusal::NotHeld);
        };
        let own_salt = proofs.rules.salt_key.salt(fence, proof.key, terms);
        let is_right = own_salt.matches(salt);
        let may_live = self.is_settling()
            & (fence < proofs.first_fence)
            & !proofs.rules.dead.contains(&fence)
            & !self.holders.contains_key(&fence);
        let record = HolderRecord {
            numbers: Arc::clone(&proof.numbers),
            // The adoption begins the lease.
            ..HolderRecord::new(proof.key, terms, proof.token, Duration::from_secs(1))
        };
        if !(is_right & may_live & record.is_possible()) {
            return Err(Refusal::NotHeld);
        }
        self.make_room_for(&record, now)?;
        let is_restored = self.restore(&record, now);
        is_restored
            .then(|| self.holders[&fence])
            .ok_or(Refusal::NotHeld)
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
            self.given_way.push(self.places[id].conn);
            self.revoke(id, GrantEnd::GaveWay, now);
        }
        if self.keys[key].terms(record.terms.weight) != record.terms {
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
        let agrees = queue.terms(record.terms.weight) == record.terms;
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
        while agrees && free < record.terms.weight.get() {
            let next = others.next()?;
            free += weight(&next);
            losers.push(next);
        }
        Some(losers)
    }

    /// Takes the connections that lost a grant because a newer grant contradicts it.
    pub fn take_given_way(&mut self) -> Vec<ConnId> {
        std::mem::take(&mut self.given_way)
    }

    /// Lets the token of a grant that has ended prove nothing, however late it comes. Once the
    /// table has settled, no token does.
    pub fn end_proof(&mut self, fence: Fence) {
        if let (Some(proofs), Some(_)) = (&mut self.proofs, self.settling_until) {
            proofs.rules.dead.insert(fence);
        }
    }

    /// Forgets what is needed only while the table settles.
    pub fn end_proofs(&mut self) {
        if let Some(proofs) = &mut self.proofs {
            proofs.rules.dead.clear();
        }
    }
}
