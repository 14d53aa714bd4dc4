//! Waiting for locks: of the commands that hold several locks while they run (`latch run`, `latch
//! hold`), and of those that claim a single one and keep no process.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{shutdown, Shutdown};

use super::releasing::release_all;
use super::servers::{wait_of, Target, ROUND_TRIP};
use super::variables::tokens_for;
use super::{complain, queue, BUSY, PROGRAM};
use crate::client::{
    Auth, Claimed, Connection, Error, Granted, Guards, Kind, Lock, Progress, Queue, Wait,
};
use crate::os::backoff::Backoff;
use crate::os::event::time_left;
use crate::shared::cli::failure::Failure;
use crate::shared::cli::values::BusyOk;
use crate::shared::cli::waiting::{wait_on_thread, Verbosity, WaitingLine};
use crate::shared::supervise::{Event, SignalWatch};

/// The first and the longest pause before a server is asked again.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How long a server may leave the question unanswered under which locks this process runs.
const UNANSWERED_FOR: Duration = Duration::from_secs(2);

/// An outage is over once a connection has lasted for this long after the server's first answer.
const STEADY: Duration = Duration::from_secs(1);

/// Waits for the locks, and fails if one is not granted in time. A signal ends the wait, and so
/// does `abandoned`, which is set after the end of standard input. This process then ends, and with
/// it its connections and its places in the queues. It leaves the waiting thread behind.
pub(super) fn wait(
    asking: Asking,
    abandoned: Option<&Event>,
    signals: &mut SignalWatch,
) -> Result<Guards, Failure> {
    let asking = Arc::new(asking);
    let [waiter, described] = [(); 2].map(|()| Arc::clone(&asking));
    let (place, talk) = (asking.targets[0].place(), asking.talk);
    let ending = (abandoned, asking.busy_status);
    let line = WaitingLine::start(PROGRAM, talk, move || described.describe());
    let work = move || waiter.ask();
    // A grant may have arrived that nobody has read. The end of this process alone would then be a
    // reset, after which the server would leave the key held until the end of the lease.
    let end_stream = |_| {
        let socket = asking.socket.lock();
        let _ = socket.as_ref().map(|it| shutdown(it, Shutdown::Write));
    };
    let guards = wait_on_thread(place, line, signals, ending, work, end_stream)??;
    let target = &asking.targets[0];
    // A job of cron would send this line by mail each time.
    let is_said = target.keep_time.is_some() && talk.is_heard();
    if is_said && asking.is_forgetful.load(Ordering::Relaxed) {
        tell_of_forgetful(target, talk);
    }
    Ok(guards)
}

/// Tells a user who wants a lock kept that the server has no state file.
pub(super) fn tell_of_forgetful(target: &Target, talk: Verbosity) {
    if talk != Verbosity::Never {
        let place = target.place();
        complain(format_args!(
            "{place}: the lock is kept until the server stops at the latest: it has no state file"
        ));
    }
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
    /// The socket of that connection, until the claim is granted or has failed.
    socket: Mutex<Option<OwnedFd>>,
    /// Whether the server has no state file.
    is_forgetful: AtomicBool,
}

/// A claim that was not granted.
struct Refused<'a> {
    /// How long an outage may last in which the claim is made again; zero for no outage.
    retry: Duration,
    /// Whether the connection has lasted, so that any outage before it is over.
    has_lasted: bool,
    /// Called if the claim is not made again.
    failure: Box<dyn FnOnce() -> Failure + 'a>,
}

impl Asking {
    /// Asks for one lock, without `--retry`.
    pub(super) fn of(target: Target, timeout: Option<Duration>, talk: Verbosity) -> Asking {
        Asking {
            targets: vec![target],
            timeout,
            began: Instant::now(),
            retry: Duration::ZERO,
            talk,
            busy_status: BUSY,
            busy_ok: BusyOk::Never,
            current: Mutex::default(),
            socket: Mutex::default(),
            is_forgetful: AtomicBool::default(),
        }
    }

    fn ends_at(&self) -> Option<Instant> {
        self.began.checked_add(self.timeout?)
    }

    /// The deadline for the answer of a server.
    fn deadline(&self) -> Option<Instant> {
        self.ends_at()?.checked_add(ROUND_TRIP)
    }

    /// The grants of the key of `target` under which this process runs: those that are in the
    /// environment, and that the server knows. As long as the server cannot know all of them yet,
    /// because it has just restarted, or does not answer, asks again. Otherwise a grant that is
    /// still to come back would count as over, and the claim would wait for it.
    pub(super) fn outer_grants(&self, target: &Target) -> Result<OuterGrants, Failure> {
        let tokens = tokens_for(&target.key);
        if tokens.is_empty() {
            return Ok(OuterGrants::default());
        }
        let described = target.clone();
        let describe = move || described.describe_wait(None);
        let _line = WaitingLine::start(PROGRAM, self.talk, describe);
        let mut retries = Retries::new();
        loop {
            let (longest, failure) = match target.holdings(&tokens, self.deadline()) {
                Ok((held, settling)) if settling.is_zero() || held.len() == tokens.len() => {
                    return Ok(OuterGrants(held));
                }
                // An older server does not know the question.
                Err(Error::Unsupported(_)) => return Ok(OuterGrants::default()),
                Ok((_, settling)) => {
                    retries.began = Instant::now();
                    let why = queue::while_settling(settling);
                    let busy = self.busy(target, || target.not_granted(self.timeout, why));
                    (settling, busy)
                }
                Err(error) if error.is_transient() => {
                    (self.retry.max(UNANSWERED_FOR), target.failure(&error))
                }
                Err(error) => return Err(target.failure(&error)),
            };
            match retries.pause(longest, self.ends_at()) {
                Some(pause) => thread::sleep(pause),
                None => return Err(failure),
            }
        }
    }

    /// Fails if one of the claims would wait for a lock under which this process runs. `hint` ends
    /// the message.
    pub(super) fn refuse_own_locks(&self, hint: &str) -> Result<(), Failure> {
        if self.timeout == Some(Duration::ZERO) {
            return Ok(());
        }
        for target in &self.targets {
            if self.outer_grants(target)?.block(target) {
                let why = "this runs under the lock already, and would wait for itself";
                let place = target.place();
                return Err(self.busy(target, || format!("{place}: {why}{hint}")));
            }
        }
        Ok(())
    }

    /// Acquires the locks of all targets.
    fn ask(&self) -> Result<Guards, Failure> {
        self.until_granted(|| {
            let first = &self.targets[0];
            let mut guards = Guards::none().map_err(|error| self.refused(first, error, false))?;
            for at in 0..self.targets.len() {
                let keep_time = self.targets[at].keep_time;
                let taken = self.take(at, |lock, wait, watch| {
                    guards.add(lock, self.began, wait, keep_time, watch)
                });
                if let Err(refused) = taken {
                    release_all(guards, None);
                    return Err(refused);
                }
            }
            Ok(guards)
        })
    }

    /// Calls `take`, and calls it again after a failure that may be temporary.
    fn until_granted<'a, T>(
        &self,
        mut take: impl FnMut() -> Result<T, Refused<'a>>,
    ) -> Result<T, Failure> {
        let mut retries = Retries::new();
        loop {
            let refused = match take() {
                Ok(taken) => return Ok(taken),
                Err(refused) => refused,
            };
            if refused.has_lasted {
                retries = Retries::new();
            }
            match retries.pause(refused.retry, self.ends_at()) {
                Some(pause) => thread::sleep(pause),
                None => return Err((refused.failure)()),
            }
        }
    }

    /// Makes one claim, by way of `claim`.
    fn take<T>(
        &self,
        at: usize,
        claim: impl FnOnce(
            Lock<'_>,
            Wait,
            &mut dyn FnMut(Progress, &Connection),
        ) -> Result<Claimed<T>, Error>,
    ) -> Result<T, Refused<'_>> {
        let target = &self.targets[at];
        let asked_at = Instant::now();
        let mut answered_at = None;
        *self.current.lock() = (at, None);
        let whole_wait = wait_of(self.timeout);
        let wait = whole_wait.after(self.began.elapsed());
        let claimed = claim(target.lock(), whole_wait, &mut |progress, connection| {
            if progress == Progress::Connected {
                let socket = connection.socket();
                *self.socket.lock() = socket.and_then(|it| it.try_clone_to_owned().ok());
                return;
            }
            answered_at = Some(Instant::now());
            self.current.lock().1 = connection.own_peer_name();
            let is_forgetful = !connection.grants_survive_restart();
            self.is_forgetful.fetch_or(is_forgetful, Ordering::Relaxed);
        });
        self.socket.lock().take();
        let busy = match claimed {
            Ok(Claimed::Granted(granted)) => return Ok(granted),
            Ok(Claimed::InVain(connection)) => {
                self.busy(target, || target.busy(*connection, self.timeout, wait))
            }
            Err(Error::MaxWaiters(_)) if target.claim.max_waiters.is_some() => {
                self.busy(target, || target.crowded())
            }
            Err(error) => {
                // A connection that has lasted ends the outage. An old server closes the first
                // connection, because it does not know introductions, and the client makes a second
                // one. If the second one has not lasted longer than the first, the outage goes on.
                let steady = |at: Instant| at.elapsed() >= STEADY + at.duration_since(asked_at);
                return Err(self.refused(target, error, answered_at.is_some_and(steady)));
            }
        };
        Err(Refused {
            retry: Duration::ZERO,
            has_lasted: false,
            failure: Box::new(|| busy),
        })
    }

    fn refused<'a>(&'a self, target: &'a Target, error: Error, has_lasted: bool) -> Refused<'a> {
        let is_mismatch = matches!(error, Error::LimitMismatch(_));
        Refused {
            retry: match error {
                // The users of the old limit finish one after the other: this is worth the wait.
                Error::LimitMismatch(_) if self.timeout.is_some() => Duration::MAX,
                // A lock was lost during the wait for another.
                Error::LimitMismatch(_) | Error::Lost(..) => self.retry,
                // The next connection reads the token again: its file may be about to change.
                Error::AuthFailed {
                    auth: Auth::Token, ..
                } => self.retry,
                _ if error.is_transient() => self.retry,
                _ => Duration::ZERO,
            },
            // A server that did not answer counts as unavailable, however long its connection
            // lasted.
            has_lasted: has_lasted && !matches!(error, Error::NoReply { .. }),
            failure: Box::new(move || {
                if is_mismatch && self.is_fine(target) {
                    Failure::silent(0)
                } else {
                    target.failure(&error)
                }
            }),
        }
    }

    /// Whether it is no failure that the target was not granted in time. A server that has just
    /// restarted grants nothing, although perhaps nobody does the work.
    fn is_fine(&self, target: &Target) -> bool {
        if self.busy_ok == BusyOk::Never {
            return false;
        }
        let age = match target.prospects() {
            Ok((queue, settling)) => {
                let first = queue.as_ref().and_then(|queue| queue.holders.first());
                match first {
                    None if !settling.is_zero() => return false,
                    first => Some(first.map_or(Duration::ZERO, |first| first.party.age)),
                }
            }
            Err(_) => None,
        };
        self.busy_ok.allows(age)
    }

    /// The failure of a claim that was not granted in time.
    fn busy(&self, target: &Target, message: impl FnOnce() -> String) -> Failure {
        if self.is_fine(target) {
            Failure::silent(0)
        } else {
            Failure::new(self.busy_status, message())
        }
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
        let asking = Arc::new(Asking::of(self.clone(), timeout, talk));
        asking.refuse_own_locks("")?;
        let described = Arc::clone(&asking);
        let _line = WaitingLine::start(PROGRAM, talk, move || described.describe());
        asking.until_granted(|| {
            asking.take(0, |lock, wait, watch| lock.claim(asking.began, wait, watch))
        })
    }
}

/// The grants of one key under which this process runs: the key, once for each grant, with that
/// grant as the only holder.
#[derive(Default)]
pub(super) struct OuterGrants(pub(super) Vec<Queue>);

impl OuterGrants {
    /// Whether one of the grants includes all that `target` asks for.
    pub(super) fn cover(&self, target: &Target) -> bool {
        let asked = &target.claim;
        self.of_kind(target).any(|queue| match asked.limit {
            None => asked.is_shared || !queue.is_shared,
            Some(_) => slots_of(queue) >= slot_count(target),
        })
    }

    /// Whether `target` can only be granted after the grants have ended. A shared lock under a
    /// shared lock counts, too: another client that waits for the whole lock would be between
    /// them. False if the server refuses the claim at once, because the kind or the limit differs.
    pub(super) fn block(&self, target: &Target) -> bool {
        let slots: u64 = self.of_kind(target).map(slots_of).sum();
        match target.claim.limit {
            _ if slots == 0 => false,
            None => true,
            Some(limit) => u64::from(limit).saturating_sub(slots) < slot_count(target),
        }
    }

    /// The grants of the kind and the limit that `target` asks for.
    fn of_kind(&self, target: &Target) -> impl Iterator<Item = &Queue> {
        let limit = target.claim.limit;
        self.0.iter().filter(move |queue| match limit {
            None => queue.kind == Kind::Lock,
            Some(limit) => queue.kind == Kind::Semaphore && queue.limit == u64::from(limit),
        })
    }
}

/// How many slots the only holder has.
fn slots_of(queue: &Queue) -> u64 {
    queue.holders.iter().map(|holder| holder.party.slots).sum()
}

fn slot_count(target: &Target) -> u64 {
    target.claim.slots.unwrap_or(1).into()
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
