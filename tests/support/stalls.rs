//! What is timed on a machine that others use as well.

use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A thread that sleeps this long is late by less than a thousandth of a second, if nobody is in
/// its way.
const NAP: Duration = Duration::from_millis(5);

/// Who is late by so much was kept waiting.
const STALL: Duration = Duration::from_millis(20);

/// The least number of chances on a machine that is late each time.
const CHANCES: u32 = 5;

/// There is another chance at least for so long.
const PERSISTENCE: Duration = Duration::from_secs(120);

/// The verdict of `timed`. A bad one counts only if a thread that did nothing but sleep meanwhile
/// was woken in time: if not, the machine was late, whatever else was, and `timed` has another
/// chance.
pub fn fairly<T, E>(timed: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    fairly_within(STALL, timed)
}

/// The same, where a machine that is late by `stall` is too late to judge.
pub fn fairly_within<T, E>(
    stall: Duration,
    mut timed: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let began = Instant::now();
    for chance in 1.. {
        let sleeper = Sleeper::start();
        let verdict = timed();
        let was_fair = sleeper.was_late_by() < stall;
        let is_last = chance >= CHANCES && began.elapsed() > PERSISTENCE;
        if verdict.is_ok() || was_fair || is_last {
            return verdict;
        }
    }
    unreachable!("one chance is the last")
}

/// Runs a test that asserts times. A failure counts as it does to [`fairly`].
pub fn fair_test(mut test: impl FnMut()) {
    let verdict = fairly(|| catch_unwind(AssertUnwindSafe(&mut test)));
    verdict.unwrap_or_else(|failure| resume_unwind(failure));
}

/// What `timed` gives, and by how much the machine was late meanwhile.
pub fn lateness_during<T>(timed: impl FnOnce() -> T) -> (T, Duration) {
    let sleeper = Sleeper::start();
    let result = timed();
    (result, sleeper.was_late_by())
}

struct Sleeper {
    end: Sender<()>,
    thread: JoinHandle<Duration>,
}

impl Sleeper {
    fn start() -> Sleeper {
        let (end, ended) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut latest = Duration::ZERO;
            loop {
                let asleep = Instant::now();
                let woken = ended.recv_timeout(NAP);
                latest = latest.max(asleep.elapsed().saturating_sub(NAP));
                if woken == Err(RecvTimeoutError::Disconnected) {
                    return latest;
                }
            }
        });
        Sleeper { end, thread }
    }

    fn was_late_by(self) -> Duration {
        drop(self.end);
        self.thread.join().expect("it only slept")
    }
}
