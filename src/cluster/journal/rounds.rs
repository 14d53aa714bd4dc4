//! The rounds of a journal: which round begins next, and when, and which have succeeded.

use std::mem;
use std::time::{Duration, Instant};

/// Rounds are numbered from 1.
#[derive(Default)]
pub(super) struct Rounds {
    /// The number of the latest round that has begun.
    begun: u64,
    /// The number of the latest round that has succeeded.
    pub(super) succeeded: u64,
    /// A session needs another round, even if there is nothing to write.
    is_asked: bool,
    /// Set when etcd has refused a batch. No other batch may begin before this instant.
    pub(super) retry_at: Option<Instant>,
    /// The smoothed duration of a round.
    pub(super) smoothed_time: Duration,
}

impl Rounds {
    /// Asks for a round that has not begun yet. Returns its number.
    pub(super) fn ask(&mut self) -> u64 {
        self.is_asked = true;
        self.begun + 1
    }

    pub(super) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// Returns whether a round has been asked for, and takes note that it begins.
    pub(super) fn take_request(&mut self) -> bool {
        mem::take(&mut self.is_asked)
    }

    /// Begins a round, and returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// Whether a batch may begin now.
    pub(super) fn may_write(&self) -> bool {
        self.retry_at.is_none_or(|at| at <= Instant::now())
    }

    /// Records that a round with this number has succeeded. The answer also holds for all rounds
    /// that began before, whatever became of them.
    pub(super) fn succeed(&mut self, number: u64) {
        self.succeeded = self.succeeded.max(number);
    }

    /// Records that the round in progress has succeeded, and that it took this time. Its request
    /// was sent after every question that began during the round and was not answered, so it
    /// answers these, too.
    pub(super) fn succeed_all(&mut self, number: u64, took: Duration) {
        self.succeed(self.begun);
        self.smoothed_time = match number {
            1 => took,
            _ => (15 * self.smoothed_time + took) / 16,
        };
    }
}
