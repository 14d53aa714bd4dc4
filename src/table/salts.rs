//! The salt of a token proves what was granted: it is a keyed hash of that.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;

use siphasher::sip::SipHasher24;

use crate::terms::{Kind, Limit, Weight};
use crate::token::{Fence, Salt, Token};

/// The key of the salts. A server keeps it in its state file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SaltKey(pub [u8; 16]);

impl fmt::Debug for SaltKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SaltKey")
    }
}

impl SaltKey {
    /// The salt of a grant. SipHash-2-4 is a pseudo-random function: without the key, nobody can
    /// tell the salt of another grant.
    pub(super) fn salt(&self, fence: Fence, terms: &ProvedTerms<'_>) -> Salt {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(&fence.0.to_be_bytes());
        hasher.write(&[terms.kind as u8]);
        hasher.write(&terms.limit.get().to_be_bytes());
        hasher.write(&terms.weight.get().to_be_bytes());
        hasher.write(terms.key.as_bytes());
        Salt(hasher.finish())
    }
}

/// What was granted, as far as the salt of the token proves it.
#[derive(Clone, Copy, Debug)]
pub struct ProvedTerms<'a> {
    pub key: &'a str,
    pub kind: Kind,
    pub limit: Limit,
    pub weight: Weight,
}

/// What a client that brings back a grant says about it.
#[derive(Clone, Debug)]
pub struct Proof<'a> {
    pub terms: ProvedTerms<'a>,
    pub token: Token,
    /// The numbers of its slots in ascending order, if it knows them.
    pub numbers: Arc<[u32]>,
}

/// What a table must know to make and to check proofs.
pub struct ProofRules {
    pub salt_key: SaltKey,
    /// The fences of the dead grants of earlier servers, as far as they are known.
    pub dead: BTreeSet<Fence>,
    /// Whether there are dead grants whose fences are not known.
    pub are_dead_missing: bool,
}
