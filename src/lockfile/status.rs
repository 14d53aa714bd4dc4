//! Looking at a lock without touching it, and clearing away what is stale.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime};

use rustix::fs::{flock, FlockOperation};

use crate::sys::directory::{Directory, Entry};

use super::error::SemaphoreResult;
use super::files::{read, STAGED_NAMES};
use super::host::{find_here, here, Surroundings};
use super::record::{is_of_lock_file, seconds_since_1970, LockInfo, Record};
use super::staleness::{judge, says_flock, Alive, Content, World};
use super::takeover::{self, Locking, Obstacle, Removal};
use super::{Busy, Semaphore};
use crate::sys::process;

/// A temporary file of another implementation is left alone while it is younger than this.
const FOREIGN_TEMPORARY_AGE: Duration = Duration::from_secs(60);

/// What a lock file says, and what that amounts to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Something stands at the path.
    pub is_locked: bool,
    /// The file is a lock file: it names a process and a time.
    pub is_readable: bool,
    /// The process that holds the lock.
    pub pid: Option<u32>,
    /// When it last said so, in seconds since 1970.
    pub timestamp: Option<u64>,
    /// What it holds the lock for.
    pub tag: Option<String>,
    /// The word that it gave at the grant.
    pub token: Option<String>,
    /// How long ago the lock was granted, in seconds.
    pub age: Option<u64>,
    /// Whether the holder lives.
    pub alive: Alive,
    /// The lock may be taken over now.
    pub is_stale: bool,
    /// After how long it may be taken over, if nothing happens to it or to its holder.
    pub stale_in: Option<Duration>,
}

impl Status {
    /// Of a name where nothing stands.
    fn free() -> Status {
        Status {
            is_locked: false,
            is_readable: false,
            pid: None,
            timestamp: None,
            tag: None,
            token: None,
            age: None,
            alive: Alive::Unknown,
            is_stale: false,
            stale_in: None,
        }
    }

    /// Of something that is no file, or none that we may read.
    pub(super) fn unreadable() -> Status {
        Status {
            is_locked: true,
            ..Status::free()
        }
    }

    /// Of a lock file.
    pub(super) fn of(
        content: &Content,
        is_locked: Option<bool>,
        semaphore: &Semaphore,
        directory: &Directory,
    ) -> Status {
        let record = Record::parse(&content.bytes);
        let (timeout, rule) = (semaphore.config.stale_timeout, semaphore.options.stale_rule);
        let judgement = judge(
            content,
            &record,
            is_locked,
            timeout,
            rule,
            &Surroundings { directory },
        );
        let now = seconds_since_1970(SystemTime::now());
        let since = record.since.or(record.timestamp);
        Status {
            is_locked: true,
            is_readable: record.info().is_some(),
            pid: record.pid,
            timestamp: record.timestamp,
            age: since.map(|since| now.saturating_sub(since)),
            alive: judgement.alive,
            is_stale: judgement.is_stale,
            stale_in: judgement.stale_in.map(Duration::from_secs),
            tag: record.tag,
            token: record.token,
        }
    }

    /// The part that all implementations share, if it is all there.
    pub fn info(&self) -> Option<LockInfo> {
        Some(LockInfo {
            pid: self.pid?,
            timestamp: self.timestamp?,
            tag: self.tag.clone(),
        })
    }

    /// A descriptor that tells of the end of the holder, if that is a living process of this host.
    pub(super) fn end_of_holder(&self) -> Option<OwnedFd> {
        let pid = self.pid.filter(|_| self.alive == Alive::Yes)?;
        // A child may hold the lock of a process that is gone.
        process::look_up(pid).filter(|process| !process.is_zombie)?;
        process::end_of(pid).ok()
    }
}

/// What [`Semaphore::clean`] has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// A stale lock.
    pub lock: bool,
    /// The number of files left by creations that came to no end.
    pub temporaries: u32,
}

/// What to do about a stale lock on a file system that knows no locks on files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unlockable {
    Keep,
    /// Somebody may be about to take it over, or to beat its heart.
    Remove,
}

impl Semaphore {
    /// Looks at the lock. Does not wait, and changes nothing.
    ///
    /// ```
    /// use latchd::lockfile::{Alive, Semaphore};
    ///
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("backup.lock");
    /// let semaphore = Semaphore::with_defaults(&path)?;
    /// assert!(!semaphore.status()?.is_locked);
    /// let guard = semaphore.try_acquire()?;
    /// let status = semaphore.status()?;
    /// assert!(status.is_locked && status.alive == Alive::Yes && !status.is_stale);
    /// # Ok::<(), latchd::lockfile::SemaphoreError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program, or what the system says. That
    /// there is no file is no error, nor that it cannot be read.
    ///
    /// [`SemaphoreError::NotALockFile`]: super::SemaphoreError::NotALockFile
    pub fn status(&self) -> SemaphoreResult<Status> {
        let found = self.look()?;
        Ok(found.map_or_else(Status::free, |busy| busy.status))
    }

    /// What is at the path, and why the lock is held, supposing that it is not stale; `None` if nothing is.
    pub(super) fn look(&self) -> SemaphoreResult<Option<Busy>> {
        let without_content = |obstacle| {
            Ok(Some(Busy {
                obstacle,
                status: Status::unreadable(),
            }))
        };
        let directory = self.directory()?;
        let file = match directory.open_file(&self.place.name)? {
            Entry::Nothing => return Ok(None),
            Entry::File(file) => file,
            Entry::Unreadable => return without_content(Obstacle::Unreadable),
            Entry::Other => return without_content(Obstacle::NotAFile),
        };
        let content = read(&file)?;
        if !is_of_lock_file(&content.bytes) {
            return Err(self.not_a_lock_file());
        }
        let record = Record::parse(&content.bytes);
        // Only where it matters, since it is in the way of a takeover for the moment.
        let is_locked = says_flock(&record, here()).then(|| {
            let locked = flock(&file, FlockOperation::NonBlockingLockShared);
            locked == Err(rustix::io::Errno::WOULDBLOCK)
        });
        let obstacle = match is_locked {
            Some(true) => Obstacle::Locked,
            _ => Obstacle::NotStale,
        };
        let status = Status::of(&content, is_locked, self, &directory);
        Ok(Some(Busy { obstacle, status }))
    }

    /// Removes the lock if it is stale, and files that crashes have left beside it: files in this directory
    /// that were to become locks, and temporary files that other implementations have made for this lock.
    ///
    /// ```
    /// use latchd::lockfile::Semaphore;
    ///
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("backup.lock");
    /// std::fs::write(&path, "pid=999999999\ntimestamp=1\n")?;
    /// assert!(Semaphore::with_defaults(&path)?.clean()?.lock);
    /// assert!(!path.exists());
    /// # Ok::<(), latchd::lockfile::SemaphoreError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program, or what the system says.
    ///
    /// [`SemaphoreError::NotALockFile`]: super::SemaphoreError::NotALockFile
    pub fn clean(&self) -> SemaphoreResult<Cleaned> {
        self.clean_with(Unlockable::Keep)
            .map(|(cleaned, _)| cleaned)
    }

    /// As [`Semaphore::clean`], with a word on where that is not safe; and why the lock was not removed.
    pub(crate) fn clean_with(
        &self,
        unlockable: Unlockable,
    ) -> SemaphoreResult<(Cleaned, Option<Obstacle>)> {
        find_here()?;
        let directory = self.directory()?;
        let mut cleaned = Cleaned::default();
        let mut obstacle = None;
        if self.config.stale_timeout.is_some() {
            let files = self.files(&directory);
            let allows = |content: &Content, locking: Locking| {
                let verdict = self.may_take(content, &directory);
                Ok(verdict.and_then(|()| match locking {
                    Locking::Theirs => Err(Obstacle::Locked),
                    Locking::Unknown if unlockable == Unlockable::Keep => Err(Obstacle::NoLocks),
                    Locking::Ours | Locking::Unknown => Ok(()),
                }))
            };
            match takeover::remove(&files, &allows)? {
                Removal::Removed => cleaned.lock = true,
                Removal::Kept(Obstacle::NotALockFile, _) => return Err(self.not_a_lock_file()),
                Removal::Kept(why, _) => obstacle = Some(why),
                Removal::Nothing => {}
            }
        }
        for entry in fs::read_dir(&self.place.directory)? {
            let name = entry?.file_name();
            let is_orphan = if STAGED_NAMES.contains(&name) {
                self.is_orphan_of_ours(&directory, &name)
            } else {
                self.is_orphan_of_others(&directory, &name)
            };
            if is_orphan && directory.remove(&name).is_ok() {
                cleaned.temporaries += 1;
            }
        }
        Ok((cleaned, obstacle))
    }

    /// A file that was to become a lock, that no process has locked any more, and that is old.
    fn is_orphan_of_ours(&self, directory: &Directory, name: &OsStr) -> bool {
        let Some(timeout) = self.config.stale_timeout else {
            return false;
        };
        let Ok(Entry::File(file)) = directory.open_file(name) else {
            return false;
        };
        flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
            && age_of(directory, &file) > Some(timeout)
    }

    /// `NAME.PID.16 hex digits.tmp` of a process that is gone: what a creation by rename leaves.
    fn is_orphan_of_others(&self, directory: &Directory, name: &OsStr) -> bool {
        let pid = self.writer_of(name.as_bytes());
        if pid.is_none_or(process::exists) {
            return false;
        }
        let Ok(Entry::File(file)) = directory.open_file(name) else {
            return false;
        };
        age_of(directory, &file) > Some(FOREIGN_TEMPORARY_AGE)
    }

    /// The process whose temporary file for this lock has such a name.
    fn writer_of(&self, name: &[u8]) -> Option<u32> {
        let rest = name
            .strip_prefix(self.place.name.as_bytes())?
            .strip_prefix(b".")?;
        let rest = std::str::from_utf8(rest).ok()?.strip_suffix(".tmp")?;
        let (pid, random) = rest.split_once('.')?;
        let is_random = random.len() == 16
            && random
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let is_pid = !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit());
        (is_random && is_pid).then(|| pid.parse().ok()).flatten()
    }
}

/// How long ago a file was last written, by the clock of its file system.
fn age_of(directory: &Directory, file: &fs::File) -> Option<Duration> {
    let modified = read(file).ok()?.modified;
    let now = Surroundings { directory }.file_system_now()?;
    Some(Duration::from_secs(now.saturating_sub(modified)))
}
