//! Lock files that need no server, and that are safe to take over once they are stale.
//!
//! A lock is a file: while the file exists, the lock is held. The file names the holder, so another
//! process can take over the lock once the holder has ended. Two processes never hold the lock at
//! the same time. sema-lockfile(5) describes the format and the protocol for shell scripts and
//! other programs.
//!
//! ```
//! use latchd::lockfile::{Semaphore, SemaphoreError};
//!
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("backup.lock");
//! let semaphore = Semaphore::with_defaults(&path)?;
//! match semaphore.try_acquire() {
//!     Ok(_guard) => { /* the lock is ours until the guard is dropped */ }
//!     Err(SemaphoreError::AlreadyLocked { holder_pid, .. }) => println!("held by {holder_pid:?}"),
//!     Err(error) => return Err(error),
//! }
//! # Ok::<(), SemaphoreError>(())
//! ```
//!
//! If the lock is held, this library returns the error `AlreadyLocked`, which names the holder,
//! while [`client`](crate::client) returns `Ok(None)`. They differ because this library keeps the
//! types of an older library that programs still use. Use [`Semaphore::acquire_timeout`] to wait,
//! and [`Slots`] for a lock with several holders.

mod config;
mod error;
mod file_system;
mod files;
mod guard;
mod host;
mod path;
mod record;
mod release;
mod second_names;
mod slot_count;
mod slots;
mod staleness;
mod status;
mod takeover;
#[cfg(test)]
mod tests;
mod wait;
mod watch;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::os::directory::Directory;
use crate::os::process;

pub use config::{SemaphoreConfig, SemaphoreOptions};
pub use error::{SemaphoreError, SemaphoreResult};
pub use files::Settle;
pub use guard::SemaphoreGuard;
pub use record::LockInfo;
pub use release::{ReleaseOutcome, ReleaseTerms};
pub(crate) use slot_count::{slot_count_in_use, MAX_SLOT_COUNT};
pub use slots::Slots;
pub use staleness::{Alive, StaleRule};
pub(crate) use status::Unlockable;
pub use status::{Busy, Cleaned, LockDetails, Status};
pub use takeover::Obstacle;
pub(crate) use wait::{acquire_any, acquire_any_detached, wait_any, WaitLimit, Waited};

use files::LockFiles;
use host::{find_host_id, stamped, LastSeen, LocalHost};
use path::LockPath;
#[cfg(any(test, fuzzing))]
pub(crate) use record::is_of_lock_file;
pub(crate) use record::Record;
use staleness::{judge, Content, Flock, Judgement};
use takeover::{Outcome, Taker, Verdict};

/// A lock that is held while its lock file exists.
#[derive(Debug)]
pub struct Semaphore {
    path: PathBuf,
    lock_path: LockPath,
    config: SemaphoreConfig,
    options: SemaphoreOptions,
    last_seen: LastSeen,
}

/// The result of an attempt to take a lock.
#[derive(Clone, Debug)]
#[must_use]
pub enum Attempt<T> {
    /// The lock was granted.
    Granted(T),
    /// The lock cannot be taken now, for this reason.
    Busy(Busy),
}

/// What keeps a lock held after the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HolderKind {
    /// A guard keeps the lock held, and the file open.
    Guard,
    /// Only the file keeps the lock held, until any process releases the lock.
    Detached,
}

impl Semaphore {
    /// Returns the lock at `path`. Creates and changes no file. Resolves a relative path now, so
    /// that the path still means the same file after the working directory changes.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::InvalidPath`] if `path` cannot be that of a lock file (sema-lockfile(5),
    /// PATHS).
    pub fn new(path: impl AsRef<Path>, config: SemaphoreConfig) -> SemaphoreResult<Semaphore> {
        Semaphore::with_options(path, config, SemaphoreOptions::new())
    }

    /// Like [`Semaphore::new`], with the default configuration.
    pub fn with_defaults(path: impl AsRef<Path>) -> SemaphoreResult<Semaphore> {
        Semaphore::new(path, SemaphoreConfig::default())
    }

    /// Like [`Semaphore::new`], with further options.
    pub fn with_options(
        path: impl AsRef<Path>,
        config: SemaphoreConfig,
        options: SemaphoreOptions,
    ) -> SemaphoreResult<Semaphore> {
        let path = path.as_ref().to_owned();
        let lock_path = path::resolve(&path)?;
        Ok(Semaphore {
            path,
            lock_path,
            config,
            options,
            last_seen: LastSeen::default(),
        })
    }

    /// The path that was passed to the constructor.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether anything exists at the path: a lock, even a stale one, or something that is not a
    /// lock file. Does not wait.
    pub fn is_locked(&self) -> bool {
        let name = &self.lock_path.name;
        let is_there = |directory: Directory| matches!(directory.identity(name), Ok(Some(_)));
        self.directory().is_ok_and(is_there)
    }

    /// Returns what the lock file says; `None` if there is no readable lock file. Does not wait.
    pub fn lock_info(&self) -> Option<LockInfo> {
        self.status().ok()?.details()?.info()
    }

    /// Takes the lock if it is free or stale. Does not wait for the holder. Blocks while the record
    /// is synced to the disk and, by default, for 20 ms after taking over a stale lock.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::AlreadyLocked`] if another process holds the lock, or if something other
    /// than a regular file is at the path. In the second case waiting cannot help, so
    /// [`Semaphore::acquire`] returns [`SemaphoreError::InvalidPath`] instead.
    /// [`SemaphoreError::InvalidPath`] for the other reasons for which [`Semaphore::acquire`]
    /// returns it. [`SemaphoreError::NotALockFile`] if the file belongs to another program, or a
    /// system error.
    pub fn try_acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.try_acquire_with_info(LockInfo::new())
    }

    /// Like [`Semaphore::try_acquire`], but records the pid and the tag of `info`. The timestamp is
    /// always the time of the grant.
    pub fn try_acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        match self.attempt_guard(&info)? {
            Attempt::Granted(guard) => Ok(guard),
            Attempt::Busy(busy) => Err(busy.to_error(&self.path)),
        }
    }

    /// Waits for the lock, for as long as the configuration allows.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if the time is up. The other errors come without waiting:
    /// [`SemaphoreError::InvalidPath`] if the lock can never be taken;
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program; or a system error.
    ///
    /// A lock can never be taken if a mount point or something other than a regular file is at the
    /// path. The same is true if this user may not create files in the directory or replace a stale
    /// lock; and if the lock is stale and the file system has no locks on files.
    pub fn acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_with_info(LockInfo::new())
    }

    /// Like [`Semaphore::acquire`], but records the pid and the tag of `info`.
    pub fn acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_in(self.config.acquire_timeout, &info)
    }

    /// Like [`Semaphore::acquire`], but waits for at most `timeout`.
    pub fn acquire_timeout(&self, timeout: Duration) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_in(Some(timeout), &LockInfo::new())
    }

    fn acquire_in(
        &self,
        timeout: Option<Duration>,
        info: &LockInfo,
    ) -> SemaphoreResult<SemaphoreGuard<'_>> {
        let limit = WaitLimit::new(timeout, None, None);
        match acquire_any(std::slice::from_ref(self), info, &limit)? {
            (_, Attempt::Granted(guard)) => Ok(guard),
            (_, Attempt::Busy(busy)) => Err(busy.after_wait(&self.path)),
        }
    }

    /// Takes the lock on behalf of the process `info.pid` if the lock is free or stale. The lock
    /// stays held until [`Semaphore::release`] is called, or until the lock is stale.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program, or a system error.
    pub fn try_acquire_detached(&self, info: &LockInfo) -> SemaphoreResult<Attempt<()>> {
        self.attempt(info, HolderKind::Detached, |_, _| Ok(()))
    }

    /// Removes the lock file if there is one, even if its holder is alive.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program,
    /// [`SemaphoreError::InvalidPath`] if something other than a regular file is at the path, or a
    /// system error: [`PermissionDenied`](io::ErrorKind::PermissionDenied) if this user may not
    /// read or remove the file.
    pub fn force_release(&self) -> SemaphoreResult<()> {
        let terms = ReleaseTerms {
            force: true,
            ..ReleaseTerms::default()
        };
        match self.release(&terms) {
            Ok(ReleaseOutcome::Released) | Err(SemaphoreError::NotLocked) => Ok(()),
            Ok(ReleaseOutcome::Kept(busy)) => Err(match busy.obstacle {
                Obstacle::Unreadable | Obstacle::NotRemovable => {
                    SemaphoreError::IoError(io::ErrorKind::PermissionDenied.into())
                }
                obstacle => match obstacle.hopeless_reason() {
                    Some(reason) => path::invalid(reason, &self.path),
                    None => busy.to_error(&self.path),
                },
            }),
            Err(error) => Err(error),
        }
    }

    /// Whether a process with this number exists, even as a zombie.
    pub fn is_process_running(pid: u32) -> bool {
        process::exists(pid)
    }

    fn directory(&self) -> SemaphoreResult<Directory> {
        Ok(Directory::open(&self.lock_path.directory)?)
    }

    fn files<'a>(&'a self, directory: &'a Directory) -> LockFiles<'a> {
        LockFiles::new(directory, &self.lock_path.name, self.options.files)
    }

    fn attempt_guard(&self, info: &LockInfo) -> SemaphoreResult<Attempt<SemaphoreGuard<'_>>> {
        self.attempt(info, HolderKind::Guard, |directory, file| {
            SemaphoreGuard::new(self, directory, file)
        })
    }

    /// Tries once to take the lock. If the lock is granted, passes the lock file to `hold` and
    /// returns its result.
    fn attempt<T>(
        &self,
        info: &LockInfo,
        holder: HolderKind,
        hold: impl FnOnce(Directory, File) -> io::Result<T>,
    ) -> SemaphoreResult<Attempt<T>> {
        let directory = self.directory()?;
        let host = self.host(&directory)?;
        let files = self.files(&directory);
        let token = self.options.token.as_deref();
        let taker = Taker {
            record: &|lock| {
                let record = Record {
                    slot_count: self.options.slot_count,
                    ..stamped(host.id.clone(), info, token, holder, lock)
                };
                record.print().into_bytes()
            },
            may_take: &|content| self.may_take(content, Flock::Acquired, &host),
        };
        match takeover::acquire(&files, &taker)? {
            Outcome::Done(file) => Ok(Attempt::Granted(hold(directory, file)?)),
            Outcome::Blocked(obstacle, content) => {
                let busy = self.busy(obstacle, content, &host)?;
                // If this process may not create a file in this directory, waiting for the lock
                // cannot help.
                let obstacle = if busy.is_hopeless() {
                    busy.obstacle
                } else {
                    takeover::obstacle_in(&directory).unwrap_or(busy.obstacle)
                };
                Ok(Attempt::Busy(Busy { obstacle, ..busy }))
            }
        }
    }

    /// Describes this host and the lock's directory. Fails if this process currently has no file
    /// descriptor or memory left.
    fn host<'a>(&'a self, directory: &'a Directory) -> io::Result<LocalHost<'a>> {
        Ok(LocalHost {
            directory,
            id: find_host_id()?,
            last_seen: &self.last_seen,
        })
    }

    /// Checks that a file with this content and this flock may be taken over.
    fn may_take(&self, content: &Content, flock: Flock, host: &LocalHost<'_>) -> Verdict {
        if !content.is_lock_file {
            return Err(Obstacle::NotALockFile);
        }
        let judgement = self.judge(content, flock, host);
        judgement.is_stale.then_some(()).ok_or(Obstacle::NotStale)
    }

    fn judge(&self, content: &Content, flock: Flock, host: &LocalHost<'_>) -> Judgement {
        let (timeout, rule) = (self.config.stale_timeout, self.options.stale_rule);
        judge(content, flock, timeout, rule, host)
    }

    fn not_a_lock_file(&self) -> SemaphoreError {
        SemaphoreError::NotALockFile(self.path.clone())
    }

    /// Describes a lock that cannot be taken or released because of `obstacle`. Fails if the file
    /// belongs to another program.
    fn busy(
        &self,
        obstacle: Obstacle,
        content: Option<Content>,
        host: &LocalHost<'_>,
    ) -> SemaphoreResult<Busy> {
        let flock = match obstacle {
            Obstacle::NotALockFile => return Err(self.not_a_lock_file()),
            Obstacle::Locked => Flock::HeldByOther,
            _ => Flock::Unknown,
        };
        let Some(content) = content else {
            return Ok(Busy::unknown(obstacle));
        };
        let mut busy = self.busy_with(obstacle, &content, flock, host);
        // If the file system has no file locks, nothing shows whether the holder has the file
        // locked. So only what is known of the holder's process decides whether the lock is stale.
        if obstacle == Obstacle::NoLocks && !busy.details.is_stale {
            busy.obstacle = Obstacle::NotStale;
        }
        Ok(busy)
    }

    /// Waits until the lock is free or stale, without taking it.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if the lock is still held after `timeout`;
    /// [`SemaphoreError::InvalidPath`], without waiting, if something other than a regular file is
    /// at the path, or if the lock is stale and this process can never take it over; or a system
    /// error.
    pub fn wait(&self, timeout: Option<Duration>) -> SemaphoreResult<()> {
        let limit = WaitLimit::new(timeout, None, None);
        match wait_any(std::slice::from_ref(self), &limit)? {
            (_, Attempt::Granted(())) => Ok(()),
            (_, Attempt::Busy(busy)) => Err(busy.after_wait(&self.path)),
        }
    }
}
