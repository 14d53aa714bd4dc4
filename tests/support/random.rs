//! Random numbers that a seed repeats (splitmix64).

use std::time::{SystemTime, UNIX_EPOCH};

/// The number that a variable is set to.
pub fn setting(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().expect("a number"))
}

/// A seed, which is printed; `CHAOS_SEED` repeats it.
pub fn seed() -> u64 {
    let seed = setting("CHAOS_SEED").unwrap_or_else(|| {
        let age = SystemTime::now().duration_since(UNIX_EPOCH);
        age.map_or(1, |age| age.as_secs())
    });
    println!("CHAOS_SEED={seed}");
    seed
}

/// A small generator: the same numbers from the same seed, on any machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True once in `bound` times.
    pub fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }
}
