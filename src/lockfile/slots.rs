//! Several locks of one name, of which a holder takes any.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::config::{SemaphoreConfig, SemaphoreOptions};
use super::error::{SemaphoreError, SemaphoreResult};
use super::guard::SemaphoreGuard;
use super::path;
use super::record::LockInfo;
use super::wait::{acquire_any, WaitLimit};
use super::{Attempt, Semaphore};

/// A lock that as many processes can hold at once as it has slots. Each slot is a lock file of its
/// own, `PATH.0.lock` and so on, as with `sema --slots`.
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
    /// At least one.
    slots: Vec<Semaphore>,
    acquire_timeout: Option<Duration>,
}

impl Slots {
    /// `count` slots at `path`. All processes must give the same number. A slot whose own path
    /// cannot be that of a lock file, for instance because another user has made a symbolic link
    /// there, is passed over while others are left.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::InvalidPath`] if no lock file can be at the path, or if there is no slot.
    pub fn new(
        path: impl AsRef<Path>,
        count: u32,
        config: SemaphoreConfig,
        options: SemaphoreOptions,
    ) -> SemaphoreResult<Slots> {
        let path = path.as_ref();
        // A slot's path may be one of a lock file where this is not.
        path::check(path)?;
        let acquire_timeout = config.acquire_timeout;
        let (mut slots, mut failure) = (Vec::new(), None);
        for slot in 0..count {
            let slot = path_of(path, slot);
            match Semaphore::with_options(slot, config.clone(), options.clone()) {
                Ok(semaphore) => slots.push(semaphore),
                Err(error @ SemaphoreError::InvalidPath(_)) => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        match slots.is_empty() {
            true => Err(failure.unwrap_or_else(|| path::invalid("it has no slots", path))),
            false => Ok(Slots {
                slots,
                acquire_timeout,
            }),
        }
    }

    /// The lock of each slot that can be taken.
    pub fn iter(&self) -> std::slice::Iter<'_, Semaphore> {
        self.slots.iter()
    }

    /// Takes a slot that is free or stale.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::AlreadyLocked`] if all slots are held; otherwise as
    /// [`Semaphore::try_acquire`].
    pub fn try_acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        let limit = WaitLimit::new(Some(Duration::ZERO), None);
        match acquire_any(&self.slots, &LockInfo::new(), &limit)? {
            (_, Attempt::Granted(guard)) => Ok(guard),
            (_, Attempt::Busy(busy)) => Err(busy.to_error()),
        }
    }

    /// Waits for a slot, for as long as the configuration allows.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if time is up; otherwise as [`Semaphore::acquire`].
    pub fn acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_with_info(LockInfo::new())
    }

    /// As [`Slots::acquire`], with the pid and the tag of `info`.
    pub fn acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        let limit = WaitLimit::new(self.acquire_timeout, None);
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

fn path_of(path: &Path, slot: u32) -> PathBuf {
    let mut path = path.to_owned().into_os_string();
    path.push(format!(".{slot}.lock"));
    path.into()
}
