//! Tokens for the table: a fence counter, and salt from the kernel.

use std::time::{SystemTime, UNIX_EPOCH};

use log::error;

use crate::table::{Fence, Mint, Salt, Token};

/// The number of random bytes taken from the kernel at a time: one system call for 512 grants.
const SALT_BUFFER_LEN: usize = 4096;

/// Mints tokens whose fences count up from where the last server left off, as far as the wall
/// clock can tell.
pub struct ClockMint {
    next_fence: Option<u64>,
    salts: Salts,
}

impl ClockMint {
    /// Starts at the wall clock, in nanoseconds since 1970 (latch-protocol(7), TOKENS AND FENCES).
    pub fn new(clock: SystemTime) -> Self {
        let since_epoch = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
        ClockMint::starting_at(u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX))
    }

    fn starting_at(fence: u64) -> Self {
        ClockMint {
            next_fence: Some(fence),
            salts: Salts::new(),
        }
    }
}

impl Mint for ClockMint {
    /// `None` once the counter has reached its end, or while the kernel has no randomness to give.
    fn mint(&mut self) -> Option<Token> {
        let fence = self.next_fence?;
        let salt = self.salts.next()?;
        self.next_fence = fence.checked_add(1);
        Some(Token {
            fence: Fence(fence),
            salt,
        })
    }
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

    #[test]
    fn fences_rise_by_one_from_the_wall_clock() {
        let mut mint = ClockMint::new(UNIX_EPOCH + Duration::from_nanos(7));
        let fences: Vec<u64> = (0..3)
            .map(|_| mint.mint().expect("plenty").fence.0)
            .collect();
        assert_eq!(fences, [7, 8, 9]);
    }

    #[test]
    fn the_end_of_the_counter_is_the_end_of_grants() {
        let mut mint = ClockMint::starting_at(u64::MAX);
        assert_eq!(mint.mint().map(|token| token.fence), Some(Fence(u64::MAX)));
        assert_eq!(mint.mint(), None);
        assert_eq!(mint.mint(), None);
    }

    #[test]
    fn a_clock_before_1970_is_no_reason_to_fail() {
        let mut mint = ClockMint::new(UNIX_EPOCH - Duration::from_secs(1));
        assert_eq!(mint.mint().map(|token| token.fence), Some(Fence(0)));
    }

    #[test]
    fn no_salt_is_used_twice() {
        let mut mint = ClockMint::starting_at(1);
        let salts: HashSet<u64> = (0..2000)
            .map(|_| mint.mint().expect("plenty").salt.0)
            .collect();
        assert_eq!(salts.len(), 2000);
    }
}
