//! The parts of a token: a fence, counted up from the clock, and a random salt.

use std::io;
use std::ops::RangeInclusive;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::os::random;
use crate::os::text::reason;
use crate::shared::log::Throttle;
use crate::wire::token::{FenceSource, Salt};

/// The number of random bytes that one system call fetches: enough for 512 claims.
const SALT_BUFFER_LEN: usize = 4096;

/// Fences that count up from the clock. They are above the previous server's fences unless the
/// clock was set back.
pub struct ClockFences(RangeInclusive<u64>);

impl ClockFences {
    /// Starts at `clock`, a value of [`fence_of_clock`].
    pub fn starting_at(clock: u64) -> Self {
        ClockFences(clock..=u64::MAX)
    }
}

impl FenceSource for ClockFences {
    /// Returns the next fence; `None` once the counter has reached its end.
    fn next_fence(&mut self) -> Option<u64> {
        self.0.next()
    }
}

/// The fence for a time: nanoseconds since 1970 (latch-protocol(7), TOKENS AND FENCES).
pub fn fence_of_clock(clock: SystemTime) -> u64 {
    let since_epoch = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
}

/// Random salts. They are fetched in bulk, and each is used once.
pub struct Salts {
    buffer: Mutex<SaltBuffer>,
    failures: Throttle,
}

impl Salts {
    /// Fetches the first salts. Blocks until the kernel's random number generator is ready.
    pub fn new() -> io::Result<Self> {
        Ok(Salts {
            buffer: Mutex::new(SaltBuffer::fetch()?),
            failures: Throttle::default(),
        })
    }

    /// Returns the next salt, or `None` if the kernel fails to provide random bytes. One call in
    /// 512 fetches more salts, and may block. It does not hold the mutex while it fetches, so a
    /// slow kernel delays only this connection.
    pub fn next(&self) -> Option<Salt> {
        if let Some(salt) = self.buffer.lock().take() {
            return Some(salt);
        }
        match SaltBuffer::fetch() {
            Ok(mut fresh) => {
                let salt = fresh.take();
                // Another thread may have fetched a buffer at the same time. Only one buffer is
                // kept.
                *self.buffer.lock() = fresh;
                salt
            }
            Err(error) => {
                let why = reason(&error);
                self.failures
                    .error(format_args!("no-randomness error=\"{why}\""));
                None
            }
        }
    }
}

struct SaltBuffer {
    bytes: Box<[u8; SALT_BUFFER_LEN]>,
    used: usize,
}

impl SaltBuffer {
    fn fetch() -> io::Result<Self> {
        let mut bytes = Box::new([0; SALT_BUFFER_LEN]);
        random::fill(&mut bytes[..])?;
        Ok(SaltBuffer { bytes, used: 0 })
    }

    fn take(&mut self) -> Option<Salt> {
        let bytes = self.bytes.get_mut(self.used..self.used + 8)?;
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
    use std::thread;
    use std::time::Duration;

    fn fences(source: &mut impl FenceSource, count: usize) -> Vec<Option<u64>> {
        (0..count).map(|_| source.next_fence()).collect()
    }

    #[test]
    fn fences_rise_by_one_from_the_wall_clock() {
        let clock = fence_of_clock(UNIX_EPOCH + Duration::from_nanos(7));
        let mut source = ClockFences::starting_at(clock);
        assert_eq!(fences(&mut source, 3), [Some(7), Some(8), Some(9)]);
    }

    #[test]
    fn the_end_of_the_counter_is_the_end_of_grants() {
        let mut source = ClockFences::starting_at(u64::MAX);
        assert_eq!(fences(&mut source, 3), [Some(u64::MAX), None, None]);
    }

    #[test]
    fn a_clock_before_1970_counts_as_1970() {
        assert_eq!(fence_of_clock(UNIX_EPOCH - Duration::from_secs(1)), 0);
    }

    #[test]
    fn no_salt_is_used_twice() {
        let salts = Salts::new().expect("the kernel has randomness");
        let seen: HashSet<u64> = (0..2000).map(|_| salts.next().expect("plenty").0).collect();
        assert_eq!(seen.len(), 2000);
    }

    #[test]
    fn no_salt_is_used_twice_by_threads_that_ask_together() {
        let salts = Salts::new().expect("the kernel has randomness");
        let ask = || (0..5000).map(|_| salts.next().expect("plenty").0);
        let all: Vec<u64> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| ask().collect::<Vec<_>>()))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("no panic");
            threads.into_iter().flat_map(join).collect()
        });
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), 20_000);
    }
}
