//! Tokens for the table: a fence counter, and salt from the kernel.

use std::time::{SystemTime, UNIX_EPOCH};

use log::error;

use crate::table::{Fence, Mint, Salt, Token};

/// The number of random bytes taken from the kernel at a time: one system call for 512 grants.
const SALT_BUFFER_LEN: usize = 4096;

/// Where fences come from: each above all before it.
pub trait FenceSource: Send {
    /// The next fence, or `None` while there is none that is certain to be new.
    fn next_fence(&mut self) -> Option<u64>;
}

/// Makes tokens of fences.
pub struct SaltedMint<F> {
    fences: F,
    salts: Salts,
}

impl<F: FenceSource> SaltedMint<F> {
    /// Tokens with the fences from `fences`.
    pub fn new(fences: F) -> Self {
        SaltedMint {
            fences,
            salts: Salts::new(),
        }
    }
}

impl<F: FenceSource> Mint for SaltedMint<F> {
    /// `None` while there is no fence to be had, or no randomness from the kernel.
    fn mint(&mut self) -> Option<Token> {
        let salt = self.salts.next()?;
        let fence = self.fences.next_fence()?;
        Some(Token {
            fence: Fence(fence),
            salt,
        })
    }
}

/// Fences that count up from where the last server left off, as far as the wall clock can tell.
pub struct ClockFences {
    next: Option<u64>,
}

impl ClockFences {
    /// Starts at `clock`, as [`fence_of_clock`] has it.
    pub fn starting_at(clock: u64) -> Self {
        ClockFences { next: Some(clock) }
    }
}

impl FenceSource for ClockFences {
    /// `None` once the counter has reached its end.
    fn next_fence(&mut self) -> Option<u64> {
        let fence = self.next?;
        self.next = fence.checked_add(1);
        Some(fence)
    }
}

/// The fence that belongs to an instant: nanoseconds since 1970 (latch-protocol(7), TOKENS AND
/// FENCES).
pub fn fence_of_clock(clock: SystemTime) -> u64 {
    let since_epoch = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
}

/// Random salts, fetched in bulk and used once.
struct Salts {
    buffer: Box<[u8; SALT_BUFFER_LEN]>,
    used: usize,
}

impl Salts {
    fn new() -> Self {
        Salts {
            buffer: Box::new([0; SALT_BUFFER_LEN]),
            used: SALT_BUFFER_LEN,
        }
    }

    fn next(&mut self) -> Option<Salt> {
        if self.used == SALT_BUFFER_LEN {
            if let Err(error) = getrandom::fill(&mut self.buffer[..]) {
                error!("no-randomness error=\"{error}\"");
                return None;
            }
            self.used = 0;
        }
        let bytes = &mut self.buffer[self.used..self.used + 8];
        let salt = u64::from_ne_bytes((&*bytes).try_into().expect("eight bytes were taken"));
        bytes.fill(0);
        self.used += 8;
        Some(Salt(salt))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::time::Duration;

    fn fences(mint: &mut impl Mint, count: usize) -> Vec<Option<u64>> {
        let minted = (0..count).map(|_| mint.mint());
        minted
            .map(|token| token.map(|token| token.fence.0))
            .collect()
    }

    #[test]
    fn fences_rise_by_one_from_the_wall_clock() {
        let clock = fence_of_clock(UNIX_EPOCH + Duration::from_nanos(7));
        let mut mint = SaltedMint::new(ClockFences::starting_at(clock));
        assert_eq!(fences(&mut mint, 3), [Some(7), Some(8), Some(9)]);
    }

    #[test]
    fn the_end_of_the_counter_is_the_end_of_grants() {
        let mut mint = SaltedMint::new(ClockFences::starting_at(u64::MAX));
        assert_eq!(fences(&mut mint, 3), [Some(u64::MAX), None, None]);
    }

    #[test]
    fn a_clock_before_1970_is_no_reason_to_fail() {
        assert_eq!(fence_of_clock(UNIX_EPOCH - Duration::from_secs(1)), 0);
    }

    #[test]
    fn no_salt_is_used_twice() {
        let mut mint = SaltedMint::new(ClockFences::starting_at(1));
        let salts: HashSet<u64> = (0..2000)
            .map(|_| mint.mint().expect("plenty").salt.0)
            .collect();
        assert_eq!(salts.len(), 2000);
    }
}
