//! The arbiter's time: the monotonic clock. Its tests have a virtual one in place of this.

use std::sync::Arc;
use std::time::Instant;

use super::sync::{Condvar, MutexGuard};

pub(super) struct Clock;

impl Clock {
    pub(super) fn new() -> Self {
        Clock
    }

    pub(super) fn now(&self) -> Instant {
        Instant::now()
    }

    /// Releases the mutex and sleeps until `wake` is notified or `at` has come, or without cause
    /// for a shorter time.
    pub(super) fn wait<T>(
        &self,
        wake: &Arc<Condvar>,
        guard: &mut MutexGuard<'_, T>,
        at: Option<Instant>,
    ) {
        match at {
            Some(at) => drop(wake.wait_until(guard, at)),
            None => wake.wait(guard),
        }
    }
}
