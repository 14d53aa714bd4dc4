//! The salt of a token proves what was granted: it is a keyed hash of that.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;
use std::time::Duration;

use siphasher::sip::SipHasher24;

use crate::wire::terms::Terms;
use crate::wire::token::{Fence, Salt, Token};

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
    pub fn salt(&self, fence: Fence, key: &str, terms: Terms) -> Salt {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(&fence.0.to_be_bytes());
        hasher.write(&[terms.kind as u8]);
        hasher.write(&terms.limit.get().to_be_bytes());
        hasher.write(&terms.weight.get().to_be_bytes());
        hasher.write(key.as_bytes());
        Salt(hasher.finish())
    }
}

/// What a client that brings back a grant says about it. The salt of the token proves the key and
/// the terms.
#[derive(Clone, Debug)]
pub struct Proof<'a> {
    pub key: &'a str,
    pub terms: Terms,
    pub token: Token,
    /// The numbers of its slots in ascending order, if it knows them.
    pub numbers: Arc<[u32]>,
    /// How long ago the grant was made, if the client says so.
    pub age: Option<Duration>,
}

/// What a table must know to make and to check proofs.
pub struct ProofRules {
    pub salt_key: SaltKey,
    /// The fences that prove nothing: those of dead grants of earlier servers, and of grants that
    /// have ended while this table settles.
    pub dead: BTreeSet<Fence>,
}
