//! Waiting for one of several locks.

use std::cmp::Reverse;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant, SystemTime};

use crate::os::event::Event;

use super::error::{SemaphoreError, SemaphoreResult};
use super::guard::SemaphoreGuard;
use super::record::LockInfo;
use super::slot_count::agree;
use super::status::{Busy, LockDetails};
use super::watch::{HolderProcess, Watch};
use super::{Attempt, Obstacle, Semaphore};

/// The minimum time between two attempts, whatever the retry interval.
const SHORTEST_RETRY: Duration = Duration::from_millis(1);

/// The maximum random delay, in nanoseconds. It keeps waiting processes from trying at the same
/// moments.
const JITTER_NANOSECONDS: u64 = 5_000_000;

/// The maximum time between two attempts.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// When a wait ends without a lock.
pub(crate) struct WaitLimit<'a> {
    deadline: Option<Instant>,
    cancel: Option<&'a Event>,
    /// Called before each pause, with the lock that is held the longest.
    tell: Option<&'a Tell>,
}

/// A function that learns what a wait has found.
pub(crate) type Tell = dyn Fn(&Semaphore, &Busy);

impl<'a> WaitLimit<'a> {
    /// The wait ends `timeout` from now, or once `cancel` is set.
    pub(crate) fn new(
        timeout: Option<Duration>,
        cancel: Option<&'a Event>,
        tell: Option<&'a Tell>,
    ) -> WaitLimit<'a> {
        // If the clock cannot represent the deadline, the wait has none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        WaitLimit {
            deadline,
            cancel,
            tell,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline <= Instant::now())
    }
}

/// The lock that was granted; or one of the locks that were not, if the time is up or waiting
/// cannot help.
pub(crate) type Waited<'a, T> = (&'a Semaphore, Attempt<T>);

/// Waits for one of several locks in one directory.
pub(crate) fn acquire_any<'a>(
    slots: &'a [Semaphore],
    info: &LockInfo,
    limit: &WaitLimit<'_>,
) -> SemaphoreResult<Waited<'a, SemaphoreGuard<'a>>> {
    let waited = until_any(slots, None, limit, &|slot| slot.attempt_guard(info))?;
    if matches!(waited, (_, Attempt::Granted(_))) {
        // A process with another number of slots may have got one at the same time. At least one of
        // both sees the other here.
        agree(slots)?;
    }
    Ok(waited)
}

/// Like [`acquire_any`], but for the process `info.pid`. Gives up when that process ends.
pub(crate) fn acquire_any_detached<'a>(
    slots: &'a [Semaphore],
    info: &LockInfo,
    limit: &WaitLimit<'_>,
) -> SemaphoreResult<Waited<'a, ()>> {
    let has_ended = || SemaphoreError::HolderEnded(info.pid);
    let holder = HolderProcess::of(info.pid).ok_or_else(has_ended)?;
    let waited = until_any(slots, Some(&holder), limit, &|slot| {
        slot.try_acquire_detached(info)
    })?;
    match &waited {
        // The process ended just before the grant. Perhaps the lock became free only for that
        // reason.
        (slot, Attempt::Granted(())) if holder.is_over() => {
            slot.give_back(info.pid);
            Err(has_ended())
        }
        (slot, Attempt::Granted(())) => {
            // As in `acquire_any`.
            agree(slots).inspect_err(|_| slot.give_back(info.pid))?;
            Ok(waited)
        }
        _ => Ok(waited),
    }
}

/// Waits until one of several locks is free or stale, without taking it.
pub(crate) fn wait_any<'a>(
    slots: &'a [Semaphore],
    limit: &WaitLimit<'_>,
) -> SemaphoreResult<Waited<'a, ()>> {
    until_any(slots, None, limit, &|slot| {
        Ok(match slot.look()? {
            Some(busy) if !busy.details.is_stale => Attempt::Busy(busy),
            // A stale lock that this process cannot take over is not free: a loop that waits for
            // the lock and then tries to take it would never pause.
            Some(busy) => match slot.obstacle_to_takeover()? {
                Some(obstacle) => Attempt::Busy(Busy { obstacle, ..busy }),
                None => Attempt::Granted(()),
            },
            None => Attempt::Granted(()),
        })
    })
}

/// Tries all locks again and again. Returns when one is granted, when waiting is useless for all of
/// them, when the time is up, or when the process that is to hold the lock ends.
fn until_any<'a, T>(
    slots: &'a [Semaphore],
    holder: Option<&HolderProcess>,
    limit: &WaitLimit<'_>,
    attempt: &dyn Fn(&'a Semaphore) -> SemaphoreResult<Attempt<T>>,
) -> SemaphoreResult<Waited<'a, T>> {
    let Some(first) = slots.first() else {
        return Err(SemaphoreError::Timeout);
    };
    let mut watch = None;
    loop {
        agree(slots)?;
        let mut held = Vec::with_capacity(slots.len());
        for slot in slots {
            match attempt(slot) {
                Ok(Attempt::Busy(busy)) => held.push(busy),
                Ok(granted) => return Ok((slot, granted)),
                // Another program's file makes only its own slot unusable.
                Err(SemaphoreError::NotALockFile(_)) => {
                    held.push(Busy::unknown(Obstacle::NotALockFile))
                }
                Err(error) => return Err(error),
            }
        }
        let hopeful = (0..held.len()).filter(|at| !held[*at].is_hopeless());
        // The slot that is held the longest tells best whether a holder hangs.
        let age = |at: &usize| held[*at].details.age.unwrap_or(u64::MAX);
        let longest = hopeful.min_by_key(|at| Reverse(age(at)));
        let at = longest.unwrap_or(0);
        if longest.is_none() || limit.is_over() {
            if held[at].obstacle == Obstacle::NotALockFile {
                return Err(slots[at].not_a_lock_file());
            }
            return Ok((&slots[at], Attempt::Busy(held.swap_remove(at))));
        }
        match &watch {
            Some(watch) => {
                limit.tell.inspect(|tell| tell(&slots[at], &held[at]));
                rest(slots, &held, holder, watch, limit)?;
            }
            // Most callers find the lock free and need no watch. The first watch begins after a
            // failed attempt, and another attempt follows at once, so no change is missed.
            None => watch = Some(Watch::on(&first.directory()?)),
        }
        if let Some(ended) = holder.filter(|holder| holder.is_over()) {
            return Err(SemaphoreError::HolderEnded(ended.pid));
        }
    }
}

/// Waits until a lock may have changed.
pub(super) fn rest(
    slots: &[Semaphore],
    held: &[Busy],
    holder: Option<&HolderProcess>,
    watch: &Watch,
    limit: &WaitLimit<'_>,
) -> SemaphoreResult<()> {
    let now = Instant::now();
    let held = held.iter().map(|busy| &busy.details);
    let ends: Vec<OwnedFd> = held
        .clone()
        .filter_map(LockDetails::end_of_holder)
        .collect();
    // Without a pidfd, the next attempt notices that the process has ended.
    let end = holder.and_then(|holder| holder.end.as_ref());
    let ends: Vec<_> = ends.iter().chain(end).map(AsFd::as_fd).collect();
    let retries = slots.iter().map(|slot| slot.config.retry_interval);
    // A stale lock has a `stale_in` of 0, but has just been refused, so trying again at once would
    // not help.
    let unstale = held.filter(|lock| !lock.is_stale);
    let pauses = retries.chain(unstale.filter_map(|lock| lock.stale_in));
    let pause = pauses.min().unwrap_or(FOREVER);
    let look_at = now + pause.clamp(SHORTEST_RETRY, FOREVER) + jitter();
    let until = limit.deadline.unwrap_or(look_at).min(look_at);
    let concerns = |name: &[u8]| {
        slots
            .iter()
            .any(|slot| slot.lock_path.name.as_bytes() == name)
    };
    watch.wait(&concerns, &ends, limit.cancel, until)
}

fn jitter() -> Duration {
    let nanoseconds = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.subsec_nanos());
    Duration::from_nanos(u64::from(nanoseconds) % JITTER_NANOSECONDS)
}
