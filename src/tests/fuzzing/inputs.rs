//! Random inputs with structure: words of a target's language, and modified earlier inputs.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::panic::{catch_unwind, RefUnwindSafe};

/// The maximum number of pieces in a new input.
const MAX_PIECES: usize = 24;

/// The number of earlier inputs that are stored and can be modified.
const KEPT: usize = 64;

/// Calls `target` with `count` random inputs, or with the number in LATCHD_TEST_INPUTS. Prints the
/// seed. If LATCHD_TEST_SEED is set, generates the inputs from that seed.
pub fn call(target: impl Fn(&[u8]) + RefUnwindSafe, words: &[&[u8]], count: u64) {
    let number = |name: &str| Some(std::env::var(name).ok()?.parse().expect("a number"));
    let seed = number("LATCHD_TEST_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    let count = number("LATCHD_TEST_INPUTS").unwrap_or(count);
    println!("{count} inputs; replay them with LATCHD_TEST_SEED={seed}");
    let mut inputs = Inputs {
        random: seed,
        words,
        kept: vec![Vec::new(); KEPT],
    };
    for _ in 0..count {
        let input = inputs.next();
        let called = catch_unwind(|| target(&input));
        assert!(
            called.is_ok(),
            "seed {seed}, input {:?}",
            input.escape_ascii().to_string()
        );
    }
}

struct Inputs<'a> {
    random: u64,
    words: &'a [&'a [u8]],
    kept: Vec<Vec<u8>>,
}

impl Inputs<'_> {
    fn next(&mut self) -> Vec<u8> {
        let at = self.below(KEPT);
        let mut input = std::mem::take(&mut self.kept[at]);
        if self.below(4) == 0 || input.len() > 4096 {
            let count = self.below(MAX_PIECES);
            input = (0..count).flat_map(|_| self.piece()).collect();
        }
        for _ in 0..1 + self.below(4) {
            self.change(&mut input);
        }
        self.kept[at].clone_from(&input);
        input
    }

    fn piece(&mut self) -> Vec<u8> {
        match self.below(8) {
            0 => vec![self.byte()],
            1 => self.random().to_string().into_bytes(),
            2 => vec![self.byte(); self.below(300)],
            3 => self.random().to_be_bytes()[..self.below(9)].to_vec(),
            _ => {
                let word = self.below(self.words.len());
                self.words[word].to_vec()
            }
        }
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let from = self.below(input.len() + 1);
        let to = (from + self.below(16)).min(input.len());
        match self.below(6) {
            0 => input.truncate(from),
            1 => drop(input.drain(from..to)),
            2 => input.extend_from_within(from..to),
            3 if from < input.len() => input[from] ^= 1 << self.below(8),
            4 if from < input.len() => input[from] = self.byte(),
            _ => drop(input.splice(from..from, self.piece())),
        }
    }

    fn byte(&mut self) -> u8 {
        self.random().to_be_bytes()[0]
    }

    fn below(&mut self, bound: usize) -> usize {
        let random = usize::try_from(self.random() >> 33).expect("31 bits");
        random % bound
    }

    /// splitmix64: reproducible from its seed on any machine.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
