//! A lock with several slots, each of which is a lock file. A holder takes any one of them.

use std::path::Path;
use std::time::Duration;

use super::config::{SemaphoreConfig, SemaphoreOptions};
use super::error::{SemaphoreError, SemaphoreResult};
use super::guard::SemaphoreGuard;
use super::path;
use super::record::LockInfo;
use super::slot_count::path_of;
use super::wait::{acquire_any, WaitLimit};
use super::{Attempt, Semaphore};

/// A lock with several slots, so that several processes can hold it at once. Each slot is a
/// separate lock file, `PATH.0.lock` and so on, as with `sema --slots`.
///
/// ```
/// use latchd::lockfile::{SemaphoreConfig, SemaphoreOptions, Slots};
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("convert");
/// let slots = Slots::new(&path, 2, SemaphoreConfig::default(), SemaphoreOptions::new())?;
/// let first = slots.try_acquire()?;
/// let second = slots.acquire()?;
/// assert!(slots.try_acquire().is_err());
/// drop(first);
/// assert!(slots.try_acquire().is_ok());
/// # drop(second);
/// # Ok::<(), latchd::lockfile::SemaphoreError>(())
/// ```
#[derive(Debug)]
pub struct Slots {
    /// Never empty.
    slots: Vec<Semaphore>,
    acquire_timeout: Option<Duration>,
}

impl Slots {
    /// Returns the lock at `path` with `count` slots. All processes must give the same count: a
    /// slot is refused while a process that gives another count holds one. A slot is left out if
    /// its own path cannot be that of a lock file, for instance because another user has made a
    /// symbolic link there.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::InvalidPath`] if `path` cannot be that of a lock file, or if no slot can
    /// be used.
    pub fn new(
        path: impl AsRef<Path>,
        count: u32,
        config: SemaphoreConfig,
        options: SemaphoreOptions,
    ) -> SemaphoreResult<Slots> {
        let path = path.as_ref();
        // With a slot's suffix, an invalid path could become a valid one.
        path::check(path)?;
        let acquire_timeout = config.acquire_timeout;
        let (mut slots, mut failure) = (Vec::new(), None);
        for slot in 0..count {
            let slot = path_of(path, slot);
            let mut options = options.clone();
            options.slot_count = Some(count);
            match Semaphore::with_options(slot, config.clone(), options) {
                Ok(semaphore) => slots.push(semaphore),
                Err(error @ SemaphoreError::InvalidPath(_)) => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        if slots.is_empty() {
            Err(failure.unwrap_or_else(|| path::invalid("it has no slots", path)))
        } else {
            Ok(Slots {
                slots,
                acquire_timeout,
            })
        }
    }

    /// The locks of all slots that can be used.
    pub fn iter(&self) -> std::slice::Iter<'_, Semaphore> {
        self.slots.iter()
    }

    /// Takes a slot that is free or stale.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::AlreadyLocked`] if all slots are held, or another error of
    /// [`Semaphore::try_acquire`].
    pub fn try_acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        let limit = WaitLimit::new(Some(Duration::ZERO), None, None);
        match acquire_any(&self.slots, &LockInfo::new(), &limit)? {
            (_, Attempt::Granted(guard)) => Ok(guard),
            (slot, Attempt::Busy(busy)) => Err(busy.to_error(slot.path())),
        }
    }

    /// Waits for a slot, for as long as the configuration allows.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if the time is up, or another error of [`Semaphore::acquire`].
    pub fn acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_with_info(LockInfo::new())
    }

    /// Like [`Slots::acquire`], but records the pid and the tag of `info`.
    pub fn acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        let limit = WaitLimit::new(self.acquire_timeout, None, None);
        match acquire_any(&self.slots, &info, &limit)? {
            (_, Attempt::Granted(guard)) => Ok(guard),
            (slot, Attempt::Busy(busy)) => Err(busy.after_wait(slot.path())),
        }
    }

    pub(crate) fn into_locks(self) -> Vec<Semaphore> {
        self.slots
    }
}

impl<'a> IntoIterator for &'a Slots {
    type Item = &'a Semaphore;
    type IntoIter = std::slice::Iter<'a, Semaphore>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
