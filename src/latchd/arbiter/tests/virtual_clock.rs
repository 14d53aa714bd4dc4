//! The arbiter's clock in tests: time passes only when a test advances it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sync::{Condvar, Mutex, MutexGuard};
use super::Arbiter;

pub struct Clock(Mutex<Agenda>);

struct Agenda {
    now: Instant,
    /// The sleeps that have an end, each with that end. A sleep that was woken earlier stays here
    /// until its end.
    sleeps: Vec<(Instant, Arc<Condvar>)>,
}

impl Clock {
    pub fn new() -> Self {
        Clock(Mutex::new(Agenda {
            now: Instant::now(),
            sleeps: Vec::new(),
        }))
    }

    pub fn now(&self) -> Instant {
        self.0.lock().now
    }

    /// Releases the mutex and sleeps until `wake` is notified or the time is advanced to `at`.
    pub fn wait<T>(&self, wake: &Arc<Condvar>, guard: &mut MutexGuard<'_, T>, at: Option<Instant>) {
        let mut agenda = self.0.lock();
        if at.is_some_and(|at| at <= agenda.now) {
            return;
        }
        let due = at.map(|at| (at, Arc::clone(wake)));
        agenda.sleeps.extend(due);
        drop(agenda);
        sleep(wake, guard);
    }

    /// Lets time pass, and wakes the sleeps that are due. The caller must hold the mutex that the
    /// sleeps release, so that no new sleep begins at the same time.
    #[cfg(not(shuttle))]
    pub fn advance(&self, time: Duration) {
        self.wake(time);
        self.wake_due();
    }

    fn wake(&self, time: Duration) {
        self.0.lock().now += time;
    }

    fn wake_due(&self) {
        let mut agenda = self.0.lock();
        let now = agenda.now;
        agenda.sleeps.retain(|(at, wake)| {
            let is_due = *at <= now;
            if is_due {
                wake.notify_one();
            }
            !is_due
        });
    }
}

/// The name of the reaper's thread. That thread may sleep for as long as nothing is due.
#[cfg(not(shuttle))]
pub const REAPER: &str = "reaper";

/// How long a test waits for what another thread must do, in real time.
#[cfg(not(shuttle))]
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Sleeps until `wake` is notified. If that does not happen, fails the test instead of hanging.
#[cfg(not(shuttle))]
fn sleep<T>(wake: &Condvar, guard: &mut MutexGuard<'_, T>) {
    if std::thread::current().name() == Some(REAPER) {
        wake.wait(guard);
        return;
    }
    let is_late = wake.wait_for(guard, PATIENCE).timed_out();
    assert!(!is_late, "no thread has ended this wait in {PATIENCE:?}");
}

/// Shuttle itself notices that no thread can run.
#[cfg(shuttle)]
fn sleep<T>(wake: &Condvar, guard: &mut MutexGuard<'_, T>) {
    wake.wait(guard);
}

impl Arbiter {
    /// Lets virtual time pass, perhaps in the middle of a visit.
    pub fn advance(&self, time: Duration) {
        self.clock.wake(time);
        let state = self.state.lock();
        self.clock.wake_due();
        drop(state);
    }
}
