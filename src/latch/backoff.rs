//! When to ask a server again that could not grant a claim.

use std::time::{Duration, Instant};

use crate::sys::random;

/// The first and the maximum pause before the server is asked again.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A period in which no claim can succeed: the server is unavailable, or the key is in use with
/// another limit.
pub(super) struct Backoff {
    began: Instant,
    next_pause: Duration,
}

impl Backoff {
    pub(super) fn new() -> Backoff {
        Backoff {
            began: Instant::now(),
            next_pause: FIRST_PAUSE,
        }
    }

    /// How long to wait before the next attempt; `None` if no time is left for one. Pauses double
    /// up to a limit. Each is shortened at random by up to half, so that waiters do not all connect
    /// at once when the server is back.
    pub(super) fn pause(
        &mut self,
        longest: Duration,
        ends_at: Option<Instant>,
    ) -> Option<Duration> {
        let gives_up_at = self.began.checked_add(longest);
        let until = [gives_up_at, ends_at].into_iter().flatten().min();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return None;
        }
        let kept = 1024 - random::number().unwrap_or(0) as u32 % 512;
        let pause = self.next_pause * kept / 1024;
        self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
        Some(left.map_or(pause, |left| pause.min(left)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_jitter_and_end_with_the_outage() {
        let mut outage = Backoff::new();
        let mut longest = FIRST_PAUSE;
        for _ in 0..10 {
            let pause = outage.pause(Duration::MAX, None).expect("no end");
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
            longest = (longest * 2).min(LONGEST_PAUSE);
        }
        assert_eq!(outage.pause(Duration::ZERO, None), None);
        assert_eq!(outage.pause(Duration::MAX, Some(outage.began)), None);
    }
}
