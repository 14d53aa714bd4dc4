//! What is timed on a machine that others use as well.

use std::any::Any;
use std::fmt;
use std::fs;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe, Location};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::needs::note;

/// A thread that sleeps this long is late by less than a thousandth of a second, if nobody is in
/// its way.
const NAP: Duration = Duration::from_millis(5);

/// Who is late by so much was kept waiting.
const STALL: Duration = Duration::from_millis(20);

/// On a machine where more threads than this want each core, work takes a multiple of its time,
/// although a thread that only sleeps is woken at once.
const CROWD: f64 = 2.0;

/// The least number of chances on a machine that is late each time.
const CHANCES: u32 = 5;

/// There is another chance at least for so long.
const PERSISTENCE: Duration = Duration::from_secs(120);

/// Panics unless something happened in time. In [`fair_test`], only this gets another chance.
#[allow(unused_macros)]
macro_rules! in_time {
    ($condition:expr $(,)?) => {
        $crate::support::stalls::in_time!($condition, "{}", stringify!($condition))
    };
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            $crate::support::stalls::late(format_args!($($message)+));
        }
    };
}
// Not every test target has a test that asserts times.
#[allow(unused_imports)]
pub(crate) use in_time;

/// What the panics of [`in_time`] begin with.
const LATE: &str = "not in time: ";

#[track_caller]
pub fn late(message: fmt::Arguments<'_>) -> ! {
    panic!("{LATE}{message}")
}

/// The verdict of `timed` on times. A bad one counts only if a thread that did nothing but sleep
/// beside it was woken in time and saw no crowd at the cores: if not, the machine was late, and
/// `timed` has another chance, which is noted. What is no matter of time must not be in the
/// verdict.
#[track_caller]
pub fn fairly<T, E>(timed: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    fairly_within(STALL, timed)
}

/// The same, where a machine that is late by `stall` is too late to judge.
#[track_caller]
pub fn fairly_within<T, E>(
    stall: Duration,
    mut timed: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let began = Instant::now();
    for chance in 1.. {
        let sleeper = Sleeper::start();
        let verdict = timed();
        let seen = sleeper.wake();
        let is_fair = seen.lateness < stall && seen.crowd() <= CROWD;
        let is_last = chance >= CHANCES && began.elapsed() > PERSISTENCE;
        if verdict.is_ok() || is_fair || is_last {
            return verdict;
        }
        // A thread of a scope has no name.
        let place = Location::caller().to_string();
        let test = thread::current().name().map_or(place, str::to_owned);
        println!(
            "once more: the machine was late by {:?}, with {:.1} threads for a core",
            seen.lateness,
            seen.crowd()
        );
        note("retried", &[&test]);
    }
    unreachable!("one chance is the last")
}

/// Runs a test that asserts times with [`in_time`]. A failure of these counts as it does to
/// [`fairly`]; any other fails the test.
#[track_caller]
pub fn fair_test(mut test: impl FnMut()) {
    let verdict = fairly(|| {
        catch_unwind(AssertUnwindSafe(&mut test)).or_else(|failure| {
            if is_late(&*failure) {
                Err(failure)
            } else {
                resume_unwind(failure)
            }
        })
    });
    verdict.unwrap_or_else(|failure| resume_unwind(failure));
}

fn is_late(failure: &(dyn Any + Send)) -> bool {
    let message = failure.downcast_ref::<String>();
    message.is_some_and(|message| message.starts_with(LATE))
}

/// What `timed` gives, and by how much the machine was late meanwhile.
pub fn lateness_during<T>(timed: impl FnOnce() -> T) -> (T, Duration) {
    let sleeper = Sleeper::start();
    let result = timed();
    (result, sleeper.wake().lateness)
}

struct Sleeper {
    end: Sender<()>,
    thread: JoinHandle<Seen>,
}

/// What a sleeper saw each time it was woken.
#[derive(Default)]
struct Seen {
    lateness: Duration,
    runnable: usize,
    samples: usize,
}

impl Seen {
    /// How many threads wanted each core, on average.
    fn crowd(&self) -> f64 {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        self.runnable as f64 / (self.samples.max(1) * cores) as f64
    }
}

impl Sleeper {
    fn start() -> Sleeper {
        let (end, ended) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut seen = Seen::default();
            loop {
                let asleep = Instant::now();
                let woken = ended.recv_timeout(NAP);
                seen.lateness = seen.lateness.max(asleep.elapsed().saturating_sub(NAP));
                if woken == Err(RecvTimeoutError::Disconnected) {
                    return seen;
                }
                if let Some(runnable) = runnable_threads() {
                    seen.runnable += runnable;
                    seen.samples += 1;
                }
            }
        });
        Sleeper { end, thread }
    }

    fn wake(self) -> Seen {
        drop(self.end);
        self.thread.join().expect("it only slept")
    }
}

/// How many other threads of this machine run or wait for a core, if the kernel says so.
fn runnable_threads() -> Option<usize> {
    let load = fs::read_to_string("/proc/loadavg").ok()?;
    let (runnable, _) = load.split(' ').nth(3)?.split_once('/')?;
    runnable.parse::<usize>().ok()?.checked_sub(1)
}
