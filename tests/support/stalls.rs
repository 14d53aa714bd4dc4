//! What is timed on a machine that others use as well.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A thread that sleeps this long is late by less than a thousandth of a second, if nobody is in
/// its way.
const NAP: Duration = Duration::from_millis(5);

/// Who is late by so much was kept waiting.
const STALL: Duration = Duration::from_millis(50);

/// How often a fair chance may be lost.
const CHANCES: u32 = 5;

/// The verdict of `timed`. A bad one counts only if a thread that did nothing but sleep meanwhile
/// was woken in time: if not, the machine was late, whatever else was, and `timed` has another
/// chance.
pub fn fairly<T, E>(mut timed: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    for _ in 1..CHANCES {
        let sleeper = Sleeper::start();
        let verdict = timed();
        if verdict.is_ok() || sleeper.was_late_by() < STALL {
            return verdict;
        }
    }
    timed()
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
