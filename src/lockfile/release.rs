//! The release of a lock by its terms, without its guard.

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
    /// The lock is removed unconditionally, even that of a living holder.
    pub force: bool,
    /// The lock was taken for this process.
    pub pid: Option<u32>,
    /// The lock was taken with this token.
    pub token: Option<String>,
    /// The process that asks. Its own lock is released although it is alive.
    pub asking: u32,
}

/// The result of a release.
#[derive(Clone, Debug)]
#[must_use]
pub enum ReleaseOutcome {
    /// The lock file is removed.
    Released,
    /// The lock does not meet the terms, or this user may not remove its file.
    Kept(Busy),
}

impl Semaphore {
    /// Releases the lock if it meets the terms. Waits for at most 200 ms for a process that has the
    /// file locked.
    ///
    /// Without [`ReleaseTerms::force`], the lock of a provably living holder is released only if
    /// that holder asks, or [`ReleaseTerms::pid`] or [`ReleaseTerms::token`] names it. An
    /// unreadable lock is released only when it is stale, and a lock of another host or container
    /// also if the token names it.
    ///
    /// ```
    /// use latchd::lockfile::{Attempt, LockInfo, ReleaseOutcome, ReleaseTerms, Semaphore};
    ///
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("backup.lock");
    /// let semaphore = Semaphore::with_defaults(&path)?;
    /// // For this process, which need not keep the file open.
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
    /// file belongs to another program, or an error of the system.
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

    /// Undoes a grant to a process that has ended.
    pub(crate) fn give_back(&self, pid: u32) {
        let terms = ReleaseTerms {
            pid: Some(pid),
            ..ReleaseTerms::default()
        };
        // Otherwise it becomes stale.
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
        // A guard keeps its file locked, and a taker a stale one. Any other file can be locked by a
        // process that may only read it.
        may_pass(flock, flock == Flock::HeldByOther && is_stale())?;
        // A process of another host may have the same number, but not the same token.
        let is_own = record.pid == Some(terms.asking);
        let is_named = terms.pid.is_some_and(|pid| pid != terms.asking);
        let is_of_here = !is_of_elsewhere(record, &host.id);
        if terms.token.is_some() || (is_of_here && (is_own || is_named)) {
            return Ok(());
        }
        if flock == Flock::HeldByOther {
            return Err(Obstacle::Locked);
        }
        let judgement = self.judge(content, flock, host);
        let is_released = match judgement.alive {
            Alive::Yes => false,
            Alive::No => judgement.is_stale || record.info().is_some(),
            Alive::Unknown => judgement.is_stale,
        };
        is_released.then_some(()).ok_or(Obstacle::NotStale)
    }
}
