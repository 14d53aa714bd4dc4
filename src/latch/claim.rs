//! Waiting for locks: of the commands that hold several locks while they run (`latch run`, `latch
//! hold`), and of those that claim a single one and keep no process.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::cli::failure::Failure;
use crate::cli::values::BusyOk;
use crate::cli::waiting::{wait_on_thread, Interrupts, Verbosity, WaitingLine};
use crate::client::{Claimed, Connection, Error, Granted, Guards};
use crate::supervise::{Event, SignalWatch};
use crate::sys::backoff::Backoff;
use crate::sys::deadline::time_left;

use super::nesting::waits_for_itself;
use super::releasing::release_all;
use super::servers::{wait_of, Target, ROUND_TRIP};
use super::{BUSY, PROGRAM};

/// The first and the longest pause before a server is asked again.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// An outage is over once a connection has lasted for this long after the server's first answer.
const STEADY: Duration = Duration::from_secs(1);

/// Waits for the locks, and fails if one is not granted in time. A signal ends the wait, and so
/// does `abandoned`, which is set after the end of standard input. This process then ends, and with
/// it its connections and its places in the queues.
pub(super) fn wait(
    asking: Asking,
    abandoned: Option<&Event>,
    signals: &mut SignalWatch,
) -> Result<Guards, Failure> {
    let asking = Arc::new(asking);
    let waiter = Arc::clone(&asking);
    let (place, talk) = (asking.targets[0].place(), asking.talk);
    let ending = Interrupts {
        signals,
        abandoned,
        busy_status: asking.busy_status,
        cancel: None,
    };
    let line = WaitingLine::start(PROGRAM, talk, move || asking.describe());
    wait_on_thread(place, line, ending, move || waiter.ask())?
}

/// What a command asks for, and how it waits.
pub(super) struct Asking {
    /// The locks to acquire, sorted by key, so that no two processes wait for each other.
    pub(super) targets: Vec<Target>,
    /// The value of `--timeout`, in whole seconds; `None` for no limit.
    pub(super) timeout: Option<Duration>,
    /// When the wait began; the timeout counts from then.
    pub(super) began: Instant,
    /// How long to try again while a server is unavailable; zero for no retry.
    pub(super) retry: Duration,
    pub(super) talk: Verbosity,
    /// The exit status if a lock is not granted in time.
    pub(super) busy_status: u8,
    /// When to exit with 0, and print nothing, if a lock is not granted in time.
    pub(super) busy_ok: BusyOk,
    /// The index of the target that is being asked for, and the name of its connection at the
    /// server.
    pub(super) current: Mutex<(usize, Option<String>)>,
}

/// A claim that was not granted.
struct Refused<'a> {
    target: &'a Target,
    why: Why,
    asked_at: Instant,
    /// When the server answered the introduction; `None` if it did not.
    answered_at: Option<Instant>,
}

enum Why {
    /// The key was not granted in time.
    Busy(Failure),
    Failed(Error),
}

impl Asking {
    fn ends_at(&self) -> Option<Instant> {
        self.began.checked_add(self.timeout?)
    }

    /// The deadline for the answer of a server.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.ends_at()?.checked_add(ROUND_TRIP)
    }

    /// Fails if one of the claims would wait for a lock under which this process runs. `hint` ends
    /// the message.
    pub(super) fn refuse_own_locks(&self, hint: &str) -> Result<(), Failure> {
        let (timeout, deadline) = (self.timeout, self.deadline());
        let mut targets = self.targets.iter();
        let refused = targets.find_map(|target| {
            waits_for_itself(target, timeout, deadline).map(|why| (target, why))
        });
        match refused {
            Some((target, why)) => Err(self.busy(target, || why + hint)),
            None => Ok(()),
        }
    }

    /// Asks for all keys. With `--retry`, asks again after a failure that may be temporary.
    fn ask(&self) -> Result<Guards, Failure> {
        let mut retries = Retries::new();
        let ends_at = self.ends_at();
        loop {
            let guards = Guards::none();
            let mut guards = guards.map_err(|error| self.targets[0].failure(&error))?;
            let mut all = 0..self.targets.len();
            let Err(refused) = all.try_for_each(|at| self.take(at, &mut guards)) else {
                return Ok(guards);
            };
            release_all(guards, None);
            let Refused {
                target,
                why,
                asked_at,
                answered_at,
            } = refused;
            let error = match why {
                Why::Busy(failure) => return Err(failure),
                Why::Failed(error) => error,
            };
            // A server that did not answer counts as unavailable, however long its connection
            // lasted.
            let was_silent = matches!(error, Error::NoReply { .. });
            // A connection that has lasted ends the outage. An old server closes the first
            // connection, because it does not know introductions, and the client makes a second
            // one. If the second one has not lasted longer than the first, the outage goes on.
            let steady = |at: Instant| at.elapsed() >= STEADY + at.duration_since(asked_at);
            if answered_at.is_some_and(steady) && !was_silent {
                retries = Retries::new();
            }
            // Also ask for all locks again if one was lost during the wait for another.
            let may_pass = error.is_transient() || matches!(error, Error::Lost(..));
            let longest = match &error {
                // The users of the old limit finish one after the other: this is worth the wait.
                Error::LimitMismatch(_) if self.timeout.is_some() => Some(Duration::MAX),
                Error::LimitMismatch(_) => Some(self.retry),
                _ => may_pass.then_some(self.retry),
            };
            match longest.and_then(|longest| retries.pause(longest, ends_at)) {
                Some(pause) => thread::sleep(pause),
                None if matches!(error, Error::LimitMismatch(_)) && self.is_fine(target) => {
                    return Err(Failure::silent(0));
                }
                None => return Err(target.failure(&error)),
            }
        }
    }

    /// Whether it is no failure that the target was not granted in time. A server that has just
    /// restarted grants nothing, although perhaps nobody does the work.
    fn is_fine(&self, target: &Target) -> bool {
        if self.busy_ok == BusyOk::Never {
            return false;
        }
        let Ok((queue, settling)) = target.prospects() else {
            return self.busy_ok.allows(|| None);
        };
        match queue.as_ref().and_then(|queue| queue.holders.first()) {
            Some(first) => self.busy_ok.allows(|| Some(first.party.age)),
            None => settling.is_zero() && self.busy_ok.allows(|| Some(Duration::ZERO)),
        }
    }

    /// The failure of a claim that was not granted in time.
    fn busy(&self, target: &Target, message: impl FnOnce() -> String) -> Failure {
        if self.is_fine(target) {
            Failure::silent(0)
        } else {
            Failure::new(self.busy_status, message())
        }
    }

    /// Asks for one key, and adds it to the locks that are already held.
    fn take(&self, at: usize, guards: &mut Guards) -> Result<(), Refused<'_>> {
        let target = &self.targets[at];
        let asked_at = Instant::now();
        let mut answered_at = None;
        *self.current.lock() = (at, None);
        let (began, whole_wait) = (self.began, wait_of(self.timeout));
        let wait = whole_wait.after(began.elapsed());
        let taken = guards.add(
            target.lock(),
            began,
            whole_wait,
            target.keep_time,
            |connection| {
                answered_at = Some(Instant::now());
                self.current.lock().1 = connection.name_at_server();
            },
        );
        let why = match taken {
            Ok(None) => return Ok(()),
            Ok(Some(connection)) => {
                Why::Busy(self.busy(target, || target.busy(connection, self.timeout, wait)))
            }
            Err(Error::MaxWaiters(_)) if target.slot.max_waiters.is_some() => {
                Why::Busy(self.busy(target, || target.crowded()))
            }
            Err(error) => Why::Failed(error),
        };
        Err(Refused {
            target,
            why,
            asked_at,
            answered_at,
        })
    }

    /// Describes the wait for the target that is being asked for.
    fn describe(&self) -> String {
        let (at, name) = self.current.lock().clone();
        self.targets[at].describe_wait(name.as_deref())
    }
}

/// The repeated attempts in a period in which no claim can succeed: the server is unavailable, or
/// the key is in use with another limit.
struct Retries {
    began: Instant,
    backoff: Backoff,
}

impl Retries {
    fn new() -> Retries {
        Retries {
            began: Instant::now(),
            backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
        }
    }

    /// How long to wait before the next attempt; `None` if no time is left for one: the period may
    /// last for `longest`, and the wait ends at `ends_at`.
    fn pause(&mut self, longest: Duration, ends_at: Option<Instant>) -> Option<Duration> {
        let gives_up_at = self.began.checked_add(longest);
        let Some(until) = [gives_up_at, ends_at].into_iter().flatten().min() else {
            return Some(self.backoff.jittered_pause());
        };
        let left = time_left(until);
        (!left.is_zero()).then(|| self.backoff.jittered_pause().min(left))
    }
}

impl Target {
    /// Claims the key, and fails if it is not granted in time. While it waits, says what it waits
    /// for, as `talk` allows.
    pub(super) fn claim(
        &self,
        timeout: Option<Duration>,
        talk: Verbosity,
    ) -> Result<Granted, Failure> {
        let (began, wait) = (Instant::now(), wait_of(timeout));
        let ends_at = timeout.and_then(|timeout| began.checked_add(timeout));
        let deadline = ends_at.and_then(|end| end.checked_add(ROUND_TRIP));
        if let Some(why) = waits_for_itself(self, timeout, deadline) {
            return Err(Failure::new(BUSY, why));
        }
        let name = Arc::<Mutex<Option<String>>>::default();
        let describe = {
            let (target, name) = (self.clone(), Arc::clone(&name));
            move || target.describe_wait(name.lock().as_deref())
        };
        let _line = WaitingLine::start(PROGRAM, talk, describe);
        let mut retries = Retries::new();
        loop {
            let learn_name = |connection: &Connection| *name.lock() = connection.name_at_server();
            let error = match self.lock().claim(began, wait, learn_name) {
                Ok(Claimed::Granted(granted)) => return Ok(granted),
                Ok(Claimed::InVain(connection)) => {
                    return Err(Failure::new(BUSY, self.busy(connection, timeout, wait)));
                }
                Err(error) => error,
            };
            // Within a timeout, the users of another limit may finish.
            let may_pass = ends_at.is_some() && matches!(error, Error::LimitMismatch(_));
            let pause = may_pass.then(|| retries.pause(Duration::MAX, ends_at));
            match pause.flatten() {
                Some(pause) => thread::sleep(pause),
                None => return Err(self.failure(&error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_end_with_their_time_or_with_the_wait() {
        let mut retries = Retries::new();
        assert!(retries.pause(Duration::MAX, None).is_some());
        assert_eq!(retries.pause(Duration::ZERO, None), None);
        assert_eq!(retries.pause(Duration::MAX, Some(retries.began)), None);
    }
}
