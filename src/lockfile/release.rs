//! Releasing a lock without its guard, if it meets given conditions.

use super::error::{SemaphoreError, SemaphoreResult};
use super::host::LocalHost;
use super::record::token_as_read;
use super::staleness::{is_of_elsewhere, Alive, Content, Flock};
use super::status::Busy;
use super::takeover::{self, may_pass, Obstacle, Outcome, Verdict};
use super::Semaphore;

/// The conditions of a release.
#[derive(Clone, Debug, Default)]
pub struct ReleaseTerms {
    /// Whether to remove the lock unconditionally, even if its holder is alive.
    pub force: bool,
    /// If set, the lock must have been taken for this process.
    pub pid: Option<u32>,
    /// If set, the lock must have been taken with this token.
    pub token: Option<String>,
    /// The process that asks for the release. It may release a lock that it holds itself.
    pub asking: u32,
}

/// The result of a release.
#[derive(Clone, Debug)]
#[must_use]
pub enum ReleaseOutcome {
    /// The lock file was removed.
    Released,
    /// The lock does not meet the terms, or this user may not remove its file.
    Kept(Busy),
}

impl Semaphore {
    /// Releases the lock if it meets the terms. Waits for at most 200 ms for a process that has the
    /// file locked.
    ///
    /// Without [`ReleaseTerms::force`], the lock of a holder that is provably alive is released
    /// only if that holder asks, or if [`ReleaseTerms::pid`] or [`ReleaseTerms::token`] matches. A
    /// lock that names no holder is released only if it is stale. A lock of another host or
    /// container is released only if it is stale or has the given token.
    ///
    /// ```
    /// use latchd::lockfile::{Attempt, LockInfo, ReleaseOutcome, ReleaseTerms, Semaphore};
    ///
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("backup.lock");
    /// let semaphore = Semaphore::with_defaults(&path)?;
    /// // The lock is taken for this process, but no guard keeps the file open.
    /// let attempt = semaphore.try_acquire_detached(&LockInfo::new())?;
    /// assert!(matches!(attempt, Attempt::Granted(())));
    ///
    /// match semaphore.release(&ReleaseTerms::default())? {
    ///     ReleaseOutcome::Kept(busy) => assert_eq!(busy.details.pid, Some(std::process::id())),
    ///     ReleaseOutcome::Released => panic!("this process is alive"),
    /// }
    /// let terms = ReleaseTerms { asking: std::process::id(), ..ReleaseTerms::default() };
    /// assert!(matches!(semaphore.release(&terms)?, ReleaseOutcome::Released));
    /// # Ok::<(), latchd::lockfile::SemaphoreError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotLocked`] if there is no lock, [`SemaphoreError::NotALockFile`] if the
    /// file belongs to another program, or a system error.
    pub fn release(&self, terms: &ReleaseTerms) -> SemaphoreResult<ReleaseOutcome> {
        let directory = self.directory()?;
        let host = self.host(&directory)?;
        let files = self.files(&directory);
        let allows = |content: &Content, flock| self.allows(terms, content, flock, &host);
        Ok(match takeover::remove(&files, &allows)? {
            Outcome::Done(true) => ReleaseOutcome::Released,
            Outcome::Done(false) => return Err(SemaphoreError::NotLocked),
            Outcome::Blocked(obstacle, content) => {
                ReleaseOutcome::Kept(self.busy(obstacle, content, &host)?)
            }
        })
    }

    /// Undoes a grant that the process `pid` cannot use.
    pub(crate) fn give_back(&self, pid: u32) {
        let terms = ReleaseTerms {
            pid: Some(pid),
            ..ReleaseTerms::default()
        };
        // If the release fails, the lock is left to become stale.
        let _ = self.release(&terms);
    }

    fn allows(
        &self,
        terms: &ReleaseTerms,
        content: &Content,
        flock: Flock,
        host: &LocalHost<'_>,
    ) -> Verdict {
        if !content.is_lock_file {
            return Err(Obstacle::NotALockFile);
        }
        if terms.force {
            return Ok(());
        }
        let record = &content.record;
        let token = terms.token.as_deref().map(token_as_read);
        let is_another = |pid| record.pid != Some(pid);
        if terms.pid.is_some_and(is_another) || (token.is_some() && record.token != token) {
            return Err(Obstacle::NotStale);
        }
        let is_stale = || record.is_live || self.may_take(content, Flock::Acquired, host).is_ok();
        // The process that has the file locked may be a guard, a taker of a stale lock, or a job of
        // flock(1). It prevents any release but that by the holder of a lock that is not stale.
        let is_locked = flock == Flock::HeldByOther;
        may_pass(flock, is_locked && is_stale())?;
        let judgement = self.judge(content, flock, host);
        // A process of another host may have the same number, so the number counts only for a lock
        // of this host.
        let is_own = record.pid == Some(terms.asking);
        let is_named = terms.pid.is_some_and(|pid| pid != terms.asking)
            && (!is_locked || judgement.alive == Alive::Yes);
        let is_of_here = !is_of_elsewhere(record, &host.id);
        if terms.token.is_some() || (is_of_here && (is_own || is_named)) {
            return Ok(());
        }
        if is_locked {
            return Err(Obstacle::Locked);
        }
        let is_released = match judgement.alive {
            Alive::Yes => false,
            Alive::No => judgement.is_stale || record.info().is_some(),
            Alive::Unknown => judgement.is_stale,
        };
        is_released.then_some(()).ok_or(Obstacle::NotStale)
    }
}
