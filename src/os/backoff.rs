//! The pauses between attempts that fail.

use std::time::Duration;

use super::random;

/// Pauses that double from the first one to a maximum.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff {
            first,
            longest,
            next: first,
        }
    }

    /// The next pause.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }

    /// The next pause, shortened at random by up to half, so that many processes that began to
    /// pause together do not all try again at once.
    pub fn jittered_pause(&mut self) -> Duration {
        let left = 1024 - random::number().unwrap_or(0) as u32 % 512;
        self.pause() * left / 1024
    }

    /// Begins again with the first pause.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backoff() -> Backoff {
        Backoff::new(Duration::from_millis(50), Duration::from_secs(1))
    }

    #[test]
    fn pauses_double_up_to_the_longest_until_a_reset() {
        let mut backoff = backoff();
        for _ in 0..2 {
            for millis in [50, 100, 200, 400, 800, 1000, 1000] {
                assert_eq!(backoff.pause(), Duration::from_millis(millis));
            }
            backoff.reset();
        }
    }

    #[test]
    fn jitter_shortens_a_pause_by_up_to_half() {
        let (mut exact, mut jittered) = (backoff(), backoff());
        for _ in 0..100 {
            let (longest, pause) = (exact.pause(), jittered.jittered_pause());
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
        }
    }
}
