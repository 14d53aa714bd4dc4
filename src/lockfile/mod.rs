//! Lock files that are safe even when they are stale, without any server.
//!
//! A lock is a file: while the file exists, the lock is held. The file names the holder, so that
//! another process can take over the lock of a holder that is gone, and never two processes at
//! once. sema-lockfile(5) has the format and the protocol for shell scripts and other programs.
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
//! A lock that is held is the error `AlreadyLocked` here, with its holder, and `Ok(None)` in
//! [`client`](crate::client): this library keeps the types of an older one, because programs use
//! them. Use [`Semaphore::acquire_timeout`] to wait, and [`Slots`] for a lock with several
//! holders.

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

use crate::sys::directory::Directory;
use crate::sys::process;

pub use config::{SemaphoreConfig, SemaphoreOptions};
pub use error::{SemaphoreError, SemaphoreResult};
pub use files::Settle;
pub use guard::SemaphoreGuard;
pub use record::LockInfo;
pub use release::{ReleaseOutcome, ReleaseTerms};
pub use slots::Slots;
pub use staleness::{Alive, StaleRule};
pub(crate) use status::WithoutFlock;
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

/// A lock whose state is a file.
#[derive(Debug)]
pub struct Semaphore {
    path: PathBuf,
    lock_path: LockPath,
    config: SemaphoreConfig,
    options: SemaphoreOptions,
    last_seen: LastSeen,
}

/// What an attempt to take a lock gives.
#[derive(Clone, Debug)]
#[must_use]
pub enum Attempt<T> {
    /// The lock.
    Granted(T),
    /// Why the lock cannot be had now.
    Busy(Busy),
}

/// What keeps a lock after the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HolderKind {
    /// A guard, which has the file open for as long as it holds the lock.
    Guard,
    /// Only the file. The lock is held until a release, perhaps by another process.
    Detached,
}

impl Semaphore {
    /// The lock at `path`. This call touches no file. It resolves a relative path now, so that the
    /// path means the same file when the working directory changes.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::InvalidPath`] if no lock file can be there (sema-lockfile(5), PATHS).
    pub fn new(path: impl AsRef<Path>, config: SemaphoreConfig) -> SemaphoreResult<Semaphore> {
        Semaphore::with_options(path, config, SemaphoreOptions::new())
    }

    /// As [`Semaphore::new`], with a stale timeout of one hour.
    pub fn with_defaults(path: impl AsRef<Path>) -> SemaphoreResult<Semaphore> {
        Semaphore::new(path, SemaphoreConfig::default())
    }

    /// As [`Semaphore::new`], with all options.
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

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether anything is at the path, even a stale lock or no lock file at all. Does not wait.
    pub fn is_locked(&self) -> bool {
        let name = &self.lock_path.name;
        let is_there = |directory: Directory| matches!(directory.identity(name), Ok(Some(_)));
        self.directory().is_ok_and(is_there)
    }

    /// What the lock file says; `None` if there is no lock file, or if it is unreadable. Does not
    /// wait.
    pub fn lock_info(&self) -> Option<LockInfo> {
        self.status().ok()?.details()?.info()
    }

    /// Takes the lock if it is free or stale. Waits for the disk at most, and 20 ms if it takes
    /// over a stale lock.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::AlreadyLocked`] if another process holds it, or something other than a
    /// regular file is there; [`Semaphore::acquire`] has an error of its own for the second, which
    /// no later trial can change. [`SemaphoreError::NotALockFile`] if the file belongs to another
    /// program, or an error of the system.
    pub fn try_acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.try_acquire_with_info(LockInfo::new())
    }

    /// As [`Semaphore::try_acquire`], with the pid and the tag of `info`. The timestamp is that of
    /// the grant.
    pub fn try_acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        match self.attempt_guard(&info)? {
            Attempt::Granted(guard) => Ok(guard),
            Attempt::Busy(busy) => Err(busy.to_error()),
        }
    }

    /// Waits for the lock, for as long as the configuration allows.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if time is up. Without waiting, [`SemaphoreError::InvalidPath`]
    /// if the lock can never be taken: a mount point or something other than a regular file is
    /// there, or this user may not create files in the directory or replace a stale lock; and
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program. Or an error of the
    /// system.
    pub fn acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_with_info(LockInfo::new())
    }

    /// As [`Semaphore::acquire`], with the pid and the tag of `info`.
    pub fn acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_in(self.config.acquire_timeout, &info)
    }

    /// As [`Semaphore::acquire`], for `timeout` at most.
    pub fn acquire_timeout(&self, timeout: Duration) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_in(Some(timeout), &LockInfo::new())
    }

    fn acquire_in(
        &self,
        timeout: Option<Duration>,
        info: &LockInfo,
    ) -> SemaphoreResult<SemaphoreGuard<'_>> {
        let limit = WaitLimit::new(timeout, None);
        match acquire_any(std::slice::from_ref(self), info, &limit)? {
            (_, Attempt::Granted(guard)) => Ok(guard),
            (_, Attempt::Busy(busy)) => Err(busy.after_wait(&self.path)),
        }
    }

    /// Takes the lock for the process `info.pid` if it is free or stale. The lock is held until
    /// [`Semaphore::release`], or until it is stale.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program, or an error of the
    /// system.
    pub fn try_acquire_detached(&self, info: &LockInfo) -> SemaphoreResult<Attempt<()>> {
        self.attempt(info, HolderKind::Detached, |_, _| Ok(()))
    }

    /// Removes the lock file if there is one, even of a living holder.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program,
    /// [`SemaphoreError::InvalidPath`] if something other than a regular file is there, or an error
    /// of the system: [`PermissionDenied`](io::ErrorKind::PermissionDenied) if this user may not
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
                    None => busy.to_error(),
                },
            }),
            Err(error) => Err(error),
        }
    }

    /// Whether a process has this number. A zombie counts.
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

    /// Tries once. If the lock is granted, gives what `hold` makes of its file.
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
            record: &|locks| {
                let record = stamped(host.id.clone(), info, token, holder, locks);
                record.print().into_bytes()
            },
            may_take: &|content| self.may_take(content, Flock::Acquired, &host),
        };
        match takeover::acquire(&files, &taker)? {
            Outcome::Done(file) => Ok(Attempt::Granted(hold(directory, file)?)),
            Outcome::Blocked(obstacle, content) => {
                let is_final = obstacle.hopeless_reason().is_some();
                // This process cannot create a lock file there, whatever happens to this one.
                let obstacle = match is_final || directory.may_change_names() {
                    true => obstacle,
                    false => Obstacle::UnwritableDirectory,
                };
                Ok(Attempt::Busy(self.busy(obstacle, content, &host)?))
            }
        }
    }

    /// This host, with the file system of the directory. Fails if this process lacks a file
    /// descriptor or memory for the moment.
    fn host<'a>(&'a self, directory: &'a Directory) -> io::Result<LocalHost<'a>> {
        Ok(LocalHost {
            directory,
            id: find_host_id()?,
            last_seen: &self.last_seen,
        })
    }

    /// As [`Semaphore::host`], to look only. What cannot be read is unknown.
    fn host_to_look<'a>(&'a self, directory: &'a Directory) -> LocalHost<'a> {
        LocalHost {
            directory,
            id: find_host_id().unwrap_or_default(),
            last_seen: &self.last_seen,
        }
    }

    /// Whether a file with this content and this flock may be taken over.
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

    /// The lock with its obstacle. Fails if the file belongs to another program.
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
        // Without locks of the file system, it is unknown whether the holder has the file locked.
        // So it is stale only by what is known of the holder's process.
        if obstacle == Obstacle::NoLocks && !busy.details.is_stale {
            busy.obstacle = Obstacle::NotStale;
        }
        Ok(busy)
    }

    /// Waits until the lock is free or stale, without taking it.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if the lock is held for longer than `timeout`, at once
    /// [`SemaphoreError::InvalidPath`] if something other than a regular file is there, or an error
    /// of the system.
    pub fn wait(&self, timeout: Option<Duration>) -> SemaphoreResult<()> {
        let limit = WaitLimit::new(timeout, None);
        match wait_any(std::slice::from_ref(self), &limit)? {
            (_, Attempt::Granted(())) => Ok(()),
            (_, Attempt::Busy(busy)) => Err(busy.after_wait(&self.path)),
        }
    }
}
