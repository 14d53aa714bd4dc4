//! The arbiter's clock, which is monotonic. Tests replace this module with a virtual clock.

use std::sync::Arc;
use std::time::Instant;

use super::sync::{Condvar, MutexGuard};

pub struct Clock;

impl Clock {
    pub fn new() -> Self {
        Clock
    }

    pub fn now(&self) -> Instant {
        Instant::now()
    }

    /// Releases the mutex and sleeps until `wake` is notified or the time is `at`. Spurious
    /// wake-ups are possible.
    pub fn wait<T>(&self, wake: &Arc<Condvar>, guard: &mut MutexGuard<'_, T>, at: Option<Instant>) {
        match at {
            Some(at) => drop(wake.wait_until(guard, at)),
            None => wake.wait(guard),
        }
    }
}
