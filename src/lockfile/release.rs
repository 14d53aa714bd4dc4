//! Giving back a lock that no guard keeps.

use crate::sys::directory::Directory;

use super::error::{SemaphoreError, SemaphoreResult};
use super::host::{find_here, here, Surroundings};
use super::record::{is_of_lock_file, token_as_read, Record};
use super::staleness::{judge, Alive, Content, Place};
use super::status::Busy;
use super::takeover::{self, may_pass, Locking, Obstacle, Removal, Verdict};
use super::Semaphore;

/// What a lock must be for a release to go through.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// It is removed whatever it says, and whoever holds it.
    pub force: bool,
    /// It was taken for this process.
    pub pid: Option<u32>,
    /// It was taken with this token.
    pub token: Option<String>,
    /// Who asks: a lock that was taken for this process is released although the process is alive.
    pub asking: u32,
}

impl Semaphore {
    /// Releases the lock, whoever has taken it, if the terms allow that. Waits for at most 200 ms
    /// for somebody who has the file locked.
    ///
    /// Without [`Terms::force`], a lock whose holder is provably alive is released only if it is
    /// the holder who asks; an unreadable one, and one of another host or container, only when it
    /// is stale.
    ///
    /// ```
    /// use latchd::lockfile::{LockInfo, Semaphore, Terms};
    ///
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("backup.lock");
    /// let semaphore = Semaphore::with_defaults(&path)?;
    /// // For this process, which need not keep the file open.
    /// assert!(semaphore.try_acquire_detached(&LockInfo::new())?.is_ok());
    ///
    /// let refused = semaphore.release(&Terms::default())?;
    /// assert_eq!(refused.unwrap_err().status.pid, Some(std::process::id()));
    /// let terms = Terms { asking: std::process::id(), ..Terms::default() };
    /// assert!(semaphore.release(&terms)?.is_ok());
    /// # Ok::<(), latchd::lockfile::SemaphoreError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotLocked`] if there is no lock, or what the system says.
    pub fn release(&self, terms: &Terms) -> SemaphoreResult<Result<(), Busy>> {
        find_here()?;
        let directory = self.directory()?;
        let files = self.files(&directory);
        let allows =
            |content: &Content, locking| Ok(self.allows(terms, content, locking, &directory));
        let kept = match takeover::remove(&files, &allows)? {
            Removal::Removed => return Ok(Ok(())),
            Removal::Nothing => return Err(SemaphoreError::NotLocked),
            Removal::Kept(Obstacle::NotALockFile, _) => return Err(self.not_a_lock_file()),
            Removal::Kept(obstacle, content) => (obstacle, content),
        };
        Ok(Err(self.busy(kept.0, kept.1, &directory)))
    }

    fn allows(
        &self,
        terms: &Terms,
        content: &Content,
        locking: Locking,
        directory: &Directory,
    ) -> Verdict {
        if !is_of_lock_file(&content.bytes) {
            return Err(Obstacle::NotALockFile);
        }
        if terms.force {
            return Ok(());
        }
        let record = Record::parse(&content.bytes);
        if let Some(pid) = terms.pid {
            if record.pid != Some(pid) {
                return Err(Obstacle::NotStale);
            }
        }
        if let Some(token) = &terms.token {
            if record.token != Some(token_as_read(token)) {
                return Err(Obstacle::NotStale);
            }
        }
        let is_stale = || record.is_live || self.may_take(content, directory).is_ok();
        // A guard keeps its file locked, a taker a stale one. Any other lock can be that of a
        // process that may only read the file.
        may_pass(locking, locking == Locking::Theirs && is_stale())?;
        // A process of another host may have the number of the one that asks.
        let is_own = record.pid == Some(terms.asking) && !is_of_elsewhere(&record, here());
        let is_named = terms.pid.is_some_and(|pid| pid != terms.asking) || terms.token.is_some();
        if is_own || is_named {
            return Ok(());
        }
        if locking == Locking::Theirs {
            return Err(Obstacle::Locked);
        }
        let is_locked = (locking == Locking::Ours).then_some(false);
        let judgement = judge(
            content,
            &record,
            is_locked,
            self.config.stale_timeout,
            self.options.stale_rule,
            &Surroundings { directory },
        );
        let is_released = match judgement.alive {
            Alive::Yes => false,
            Alive::No => judgement.is_stale || record.info().is_some(),
            Alive::Unknown => judgement.is_stale,
        };
        match is_released {
            true => Ok(()),
            false => Err(Obstacle::NotStale),
        }
    }
}

/// Whether the record was written by a process of another host or another pid namespace.
fn is_of_elsewhere(record: &Record, here: &Place) -> bool {
    let differs = |theirs: &Option<String>, ours: &Option<String>| matches!((theirs, ours), (Some(theirs), Some(ours)) if theirs != ours);
    differs(&record.boot, &here.boot)
        || differs(&record.pid_namespace, &here.pid_namespace)
        || (record.boot.is_none() && differs(&record.host, &here.host))
}
