//! Waiting for one of several locks.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant, SystemTime};

use super::error::{SemaphoreError, SemaphoreResult};
use super::guard::SemaphoreGuard;
use super::record::LockInfo;
use super::release::Terms;
use super::status::{Busy, Status};
use super::watch::{Flag, Lifetime, Watch, Woken};
use super::{Hold, Obstacle, Semaphore};

/// We look no more often than this, whatever the retry interval.
const SHORTEST_RETRY: Duration = Duration::from_millis(1);

/// Those who look at the same time look at slightly different times after that.
const JITTER_NANOSECONDS: u64 = 5_000_000;

/// Without anything to wait for, we look again after so long.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How long to wait.
pub(crate) struct Patience<'a> {
    deadline: Option<Instant>,
    cancel: Option<&'a Flag>,
}

impl<'a> Patience<'a> {
    /// From now on for `timeout`, and until `cancel` is set.
    pub(crate) fn new(timeout: Option<Duration>, cancel: Option<&'a Flag>) -> Patience<'a> {
        // A deadline beyond what the clock can tell is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Patience { deadline, cancel }
    }

    pub(super) fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline <= Instant::now())
    }
}

/// What comes of waiting for one of several locks: which it is, and what it gave; or which is in
/// the way, and why.
pub(crate) type Waited<T> = Result<(usize, T), (usize, Busy)>;

/// Waits for one of several locks, which stand in one directory, and says which it is.
pub(crate) fn acquire_any<'a>(
    slots: &'a [Semaphore],
    info: &LockInfo,
    patience: &Patience<'_>,
) -> SemaphoreResult<Waited<SemaphoreGuard<'a>>> {
    let waited = until_any(slots, None, patience, |slot| {
        slot.attempt(info, Hold::Guarded)
    })?;
    Ok(match waited {
        Ok((at, (directory, file))) => Ok((at, slots[at].guard(directory, file)?)),
        Err(busy) => Err(busy),
    })
}

/// As [`acquire_any`], and leaves it to the process `info.pid`. Gives up when that ends.
pub(crate) fn acquire_any_detached(
    slots: &[Semaphore],
    info: &LockInfo,
    patience: &Patience<'_>,
) -> SemaphoreResult<Waited<()>> {
    let has_ended = || SemaphoreError::HolderEnded(info.pid);
    let holder = Lifetime::of(info.pid).ok_or_else(has_ended)?;
    let waited = until_any(slots, Some(&holder), patience, |slot| {
        slot.try_acquire_detached(info)
    })?;
    match &waited {
        // It has ended just before the grant, which its end may have made room for.
        Ok((at, ())) if holder.is_over() => {
            let terms = Terms {
                pid: Some(info.pid),
                ..Terms::default()
            };
            let _ = slots[*at].release(&terms);
            Err(has_ended())
        }
        _ => Ok(waited),
    }
}

/// Waits until one of several locks is free or stale, without taking it.
pub(crate) fn wait_any(
    slots: &[Semaphore],
    patience: &Patience<'_>,
) -> SemaphoreResult<Waited<()>> {
    until_any(slots, None, patience, |slot| {
        Ok(match slot.look()? {
            Some(busy) if !busy.status.is_stale => Err(busy),
            Some(busy) if slot.is_kept_locked()? => Err(Busy {
                obstacle: Obstacle::Locked,
                ..busy
            }),
            _ => Ok(()),
        })
    })
}

/// Looks at all slots until one of them gives what is wanted, until none can ever, until time is
/// up, or until the process that is to be the holder has ended.
fn until_any<T>(
    slots: &[Semaphore],
    holder: Option<&Lifetime>,
    patience: &Patience<'_>,
    look: impl Fn(&Semaphore) -> SemaphoreResult<Result<T, Busy>>,
) -> SemaphoreResult<Waited<T>> {
    let Some(first) = slots.first() else {
        return Err(SemaphoreError::Timeout);
    };
    let mut watch = None;
    loop {
        let mut held = Vec::with_capacity(slots.len());
        for (at, slot) in slots.iter().enumerate() {
            match look(slot) {
                Ok(Ok(wanted)) => return Ok(Ok((at, wanted))),
                Ok(Err(busy)) => held.push(busy),
                // Another program's file spoils its own slot only.
                Err(SemaphoreError::NotALockFile(_)) => held.push(Busy::not_a_lock_file()),
                Err(error) => return Err(error),
            }
        }
        let hopeful = held.iter().position(|busy| !busy.is_hopeless());
        if hopeful.is_none() || patience.is_over() {
            let at = hopeful.unwrap_or(0);
            if held[at].obstacle == Obstacle::NotALockFile {
                return Err(slots[at].not_a_lock_file());
            }
            return Ok(Err((at, held.swap_remove(at))));
        }
        match &watch {
            Some(watch) => rest(slots, &held, holder, watch, patience)?,
            // Most find the lock free, and need none. Then one more look, so that nothing is
            // missed.
            None => watch = Some(Watch::on(&first.directory()?)),
        }
        if let Some(ended) = holder.filter(|holder| holder.is_over()) {
            return Err(SemaphoreError::HolderEnded(ended.pid()));
        }
    }
}

/// Waits until something may have changed.
pub(super) fn rest(
    slots: &[Semaphore],
    held: &[Busy],
    holder: Option<&Lifetime>,
    watch: &Watch,
    patience: &Patience<'_>,
) -> SemaphoreResult<()> {
    let now = Instant::now();
    let held = held.iter().map(|busy| &busy.status);
    let ends: Vec<OwnedFd> = held.clone().filter_map(Status::end_of_holder).collect();
    let ends: Vec<_> = ends.iter().map(AsFd::as_fd).collect();
    // Where there is no such descriptor, its end is seen at the next look.
    let ends = [&ends[..], holder.and_then(Lifetime::end).as_slice()].concat();
    let retry = slots
        .iter()
        .map(|slot| slot.config.retry_interval)
        .min()
        .unwrap_or(FOREVER);
    let stale_in = held
        // What is stale and yet was not to be had will not be had a moment later for being stale.
        .filter(|status| !status.is_stale)
        .filter_map(|status| status.stale_in)
        .min()
        .unwrap_or(FOREVER);
    let pause = retry.min(stale_in).max(SHORTEST_RETRY).min(FOREVER) + jitter();
    let until = patience
        .deadline
        .map_or(now + pause, |deadline| deadline.min(now + pause));
    let concerns = |name: &[u8]| slots.iter().any(|slot| slot.place.name.as_bytes() == name);
    match watch.wait(concerns, &ends, patience.cancel, until)? {
        Woken::Look => Ok(()),
        Woken::Cancelled => Err(SemaphoreError::Cancelled),
    }
}

fn jitter() -> Duration {
    let nanoseconds = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.subsec_nanos());
    Duration::from_nanos(u64::from(nanoseconds) % JITTER_NANOSECONDS)
}
