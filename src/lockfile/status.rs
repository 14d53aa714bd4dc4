//! Looking at a lock without changing it, and removing stale locks.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{flock, FlockOperation};

use crate::os::directory::{lock_within, Directory, Entry, FileId};
use crate::os::process;
use crate::os::text::{digits, hex};

use super::error::{SemaphoreError, SemaphoreResult};
use super::files::read;
use super::host::{file_system_now, LocalHost};
use super::path::invalid;
use super::record::{LockInfo, Record};
use super::second_names::STAGED_NAMES;
use super::staleness::{promise, Alive, Content, Flock, Promise};
use super::takeover::{self, Found, Obstacle, Outcome};
use super::Semaphore;

/// The minimum age at which a temporary file of another implementation is removed.
const FOREIGN_TEMPORARY_AGE: Duration = Duration::from_secs(60);

/// Longer than another process has a file locked that it only looks at.
const LOOK_PATIENCE: Duration = Duration::from_millis(10);

/// The state of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The lock is free: there is no file.
    Free,
    /// The lock is held, but its file names no process and time, or this user may not read it.
    Unreadable(LockDetails),
    /// The lock is held.
    Held(LockDetails),
}

impl Status {
    /// Whether anything is at the path, even a stale lock.
    pub fn is_locked(&self) -> bool {
        self.details().is_some()
    }

    /// Returns what is known of the lock; `None` if the lock is free.
    pub fn details(&self) -> Option<&LockDetails> {
        match self {
            Status::Free => None,
            Status::Unreadable(details) | Status::Held(details) => Some(details),
        }
    }
}

/// What a lock file says, and what this process concludes from it at this time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockDetails {
    /// The process that holds the lock, according to the file.
    pub pid: Option<u32>,
    /// The name of the host of that process, if the file says so.
    pub host: Option<String>,
    /// When the lock was granted, in seconds since 1970.
    pub since: Option<u64>,
    /// When the holder last confirmed the lock, in seconds since 1970: at the grant, or at the
    /// latest heartbeat.
    pub timestamp: Option<u64>,
    /// The purpose of the lock.
    pub tag: Option<String>,
    /// The token that the holder chose.
    pub token: Option<String>,
    /// How many slots the holder's pool has, if the lock is a slot and the file says so.
    pub slot_count: Option<u32>,
    /// How long ago the lock was granted, in seconds.
    pub age: Option<u64>,
    /// Whether the holder is alive.
    pub alive: Alive,
    /// Whether the process has certainly ended. The holder can be alive all the same, if a child of
    /// the process keeps the file locked.
    pub has_ended: bool,
    /// Whether the lock may be taken over now.
    pub is_stale: bool,
    /// The time until the lock becomes stale if neither its file nor its holder changes; `None` if
    /// it never does.
    pub stale_in: Option<Duration>,
    pub(crate) file: Option<FileId>,
}

impl LockDetails {
    /// Whether the file names a process and a time.
    pub(crate) fn is_readable(&self) -> bool {
        self.pid.is_some() && self.timestamp.is_some()
    }

    /// The fields that all implementations share; `None` if the pid or the timestamp is missing.
    pub fn info(&self) -> Option<LockInfo> {
        Some(LockInfo {
            pid: self.pid?,
            timestamp: self.timestamp?,
            tag: self.tag.clone(),
        })
    }

    /// A descriptor that becomes readable when the holder ends, if the holder is a living process
    /// of this host.
    pub(super) fn end_of_holder(&self) -> Option<OwnedFd> {
        let pid = self.pid.filter(|_| self.alive == Alive::Yes)?;
        // A lock can count as that of a living holder although the process has ended: a child may
        // keep the file locked.
        process::look_up(pid).filter(|process| !process.is_zombie)?;
        process::pidfd(pid).ok()
    }
}

/// Why a lock was not granted or not released, and who holds it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Busy {
    /// The reason why the lock was not granted or not released.
    pub obstacle: Obstacle,
    /// What is known of the lock.
    pub details: LockDetails,
}

impl Busy {
    /// Returns the error for a caller that does not wait for the lock at `path`.
    pub(super) fn to_error(&self, path: &Path) -> SemaphoreError {
        match self.obstacle.hopeless_reason() {
            // The older library says of a directory that the lock is held.
            Some(reason) if self.obstacle != Obstacle::NotAFile => invalid(reason, path),
            _ => SemaphoreError::AlreadyLocked {
                holder_pid: self.details.pid,
                locked_since: self.details.since,
            },
        }
    }

    /// Describes a lock of which only the obstacle is known.
    pub(super) fn unknown(obstacle: Obstacle) -> Busy {
        Busy {
            obstacle,
            details: LockDetails::default(),
        }
    }

    /// Whether waiting for the lock cannot help.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.obstacle.hopeless_reason().is_some()
    }

    /// Returns the error for a caller that has waited for the lock at `path` in vain.
    pub(super) fn after_wait(&self, path: &Path) -> SemaphoreError {
        match self.obstacle.hopeless_reason() {
            Some(reason) => invalid(reason, path),
            None => SemaphoreError::Timeout,
        }
    }
}

/// What [`Semaphore::clean`] has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleaned {
    /// Whether it removed a stale lock.
    pub lock: bool,
    /// The number of temporary files that it removed.
    pub temporaries: u32,
}

/// Whether to remove a lock that would be stale if no process had its file locked, although another
/// process has it locked, or the file system has no file locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unlockable {
    Keep,
    /// Remove it unless its holder may be alive, by what is known of the holder's process. Another
    /// process may be about to take the lock over, or to update its timestamp.
    Remove,
}

impl Semaphore {
    /// Looks at the lock. Does not wait, and changes nothing.
    ///
    /// ```
    /// use latchd::lockfile::{Alive, Semaphore, Status};
    ///
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("backup.lock");
    /// let semaphore = Semaphore::with_defaults(&path)?;
    /// assert_eq!(semaphore.status()?, Status::Free);
    /// let guard = semaphore.try_acquire()?;
    /// match semaphore.status()? {
    ///     Status::Held(details) => assert!(details.alive == Alive::Yes && !details.is_stale),
    ///     other => panic!("{other:?}"),
    /// }
    /// drop(guard);
    /// # Ok::<(), latchd::lockfile::SemaphoreError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program, or a system error.
    /// A missing or unreadable file is not an error.
    pub fn status(&self) -> SemaphoreResult<Status> {
        Ok(match self.look()?.map(|busy| busy.details) {
            None => Status::Free,
            Some(details) if details.is_readable() => Status::Held(details),
            Some(details) => Status::Unreadable(details),
        })
    }

    /// Returns what the file says of the holder; `None` if there is no file that can be read. Does
    /// not lock the file, so it cannot hinder other processes. Does not check whether the process
    /// is alive.
    pub(crate) fn written_record(&self) -> Option<Record> {
        let opened = self.directory().ok()?.open_file(&self.lock_path.name);
        let Ok(Entry::File(file)) = opened else {
            return None;
        };
        Some(*read(&file).ok()?.record)
    }

    /// Describes the lock; `None` if the lock is free. The details say whether the lock is stale;
    /// the obstacle does not depend on it.
    pub(crate) fn look(&self) -> SemaphoreResult<Option<Busy>> {
        let directory = self.directory()?;
        let file = match takeover::find(&self.files(&directory))? {
            Found::Nothing => return Ok(None),
            Found::Unusable(obstacle) => return Ok(Some(Busy::unknown(obstacle))),
            Found::File(file) => file,
        };
        let host = self.host(&directory)?;
        let content = read(&file)?;
        if !content.is_lock_file {
            return Err(self.not_a_lock_file());
        }
        // This process tries to lock the file only if the result matters, because its lock briefly
        // blocks takers and flock(1).
        let may_be_stale = || self.judge(&content, Flock::Acquired, &host).is_stale;
        let flock = if promise(&content, &host.id) != Promise::None || may_be_stale() {
            look_at_flock(&file)
        } else {
            Flock::Unknown
        };
        let obstacle = match flock {
            Flock::HeldByOther => Obstacle::Locked,
            _ => Obstacle::NotStale,
        };
        Ok(Some(self.busy_with(obstacle, &content, flock, &host)))
    }

    /// Describes a lock whose file has this content.
    pub(super) fn busy_with(
        &self,
        obstacle: Obstacle,
        content: &Content,
        flock: Flock,
        host: &LocalHost<'_>,
    ) -> Busy {
        let record = Record::clone(&content.record);
        let judgement = self.judge(content, flock, host);
        let details = LockDetails {
            pid: record.pid,
            since: record.granted_at(),
            timestamp: record.timestamp,
            age: record.age(),
            alive: judgement.alive,
            has_ended: judgement.has_ended,
            is_stale: judgement.is_stale,
            stale_in: judgement.stale_in.map(Duration::from_secs),
            file: Some(content.file),
            host: record.host,
            tag: record.tag,
            token: record.token,
            slot_count: record.slot_count,
        };
        Busy { obstacle, details }
    }

    /// Why this process cannot take over the lock, which is stale; `None` if it can, or if the lock
    /// is free.
    pub(super) fn obstacle_to_takeover(&self) -> SemaphoreResult<Option<Obstacle>> {
        let directory = self.directory()?;
        if let Some(obstacle) = takeover::obstacle_in(&directory) {
            return Ok(Some(obstacle));
        }
        let host = self.host(&directory)?;
        let may_take = |content: &Content| self.may_take(content, Flock::Acquired, &host);
        Ok(
            match takeover::could_acquire(&self.files(&directory), &may_take)? {
                Outcome::Done(()) => None,
                Outcome::Blocked(obstacle, _) => Some(obstacle),
            },
        )
    }

    /// Removes the lock if it is stale. Also removes temporary files that crashes have left in the
    /// lock's directory: all those of this library, and those that other implementations have made
    /// for this lock. If this user may not list the directory, only the lock is removed.
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
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program, or a system error.
    /// A system error also comes if the lock's age cannot be determined: the lock names no holder,
    /// and the file system has no room for a new file.
    pub fn clean(&self) -> SemaphoreResult<Cleaned> {
        self.clean_with(Unlockable::Keep)
            .map(|(cleaned, _)| cleaned)
    }

    /// Like [`Semaphore::clean`], but also returns the obstacle if the lock was not removed.
    /// `unlockable` decides about a file that this process cannot lock, whose removal is not safe.
    pub(crate) fn clean_with(
        &self,
        unlockable: Unlockable,
    ) -> SemaphoreResult<(Cleaned, Option<Obstacle>)> {
        let directory = self.directory()?;
        let host = self.host(&directory)?;
        // The directory is opened before the lock is removed, because an error afterwards would
        // hide the removal.
        let entries = match fs::read_dir(&self.lock_path.directory) {
            // The lock can be removed without a list of the directory.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => None,
            entries => Some(entries?),
        };
        let mut cleaned = Cleaned::default();
        let mut obstacle = None;
        if self.config.stale_timeout.is_some() {
            let files = self.files(&directory);
            let allows = |content: &Content, flock: Flock| {
                let assumed = match flock {
                    Flock::HeldByOther => Flock::Acquired,
                    other => other,
                };
                self.may_take(content, assumed, &host)?;
                let by_process = self.judge(content, Flock::Unknown, &host);
                let is_gone = by_process.is_stale || by_process.alive == Alive::No;
                match (flock, unlockable) {
                    (Flock::Acquired, _) => Ok(()),
                    _ if !is_gone => Err(Obstacle::NotStale),
                    (Flock::Unknown, Unlockable::Keep) => Err(Obstacle::NoLocks),
                    (Flock::HeldByOther, Unlockable::Keep) => Err(Obstacle::Locked),
                    (_, Unlockable::Remove) => Ok(()),
                }
            };
            match takeover::remove(&files, &allows)? {
                Outcome::Done(was_there) => cleaned.lock = was_there,
                Outcome::Blocked(Obstacle::NotALockFile, _) => return Err(self.not_a_lock_file()),
                Outcome::Blocked(why, content) => {
                    let names_no_holder = |content: Content| content.record.info().is_none();
                    // Only the clock of the file system shows the age of a lock that names no
                    // holder. If that clock cannot be read, an old lock would seem to be young, so
                    // this fails instead.
                    if why == Obstacle::NotStale && content.is_some_and(names_no_holder) {
                        file_system_now(&directory)?;
                    }
                    obstacle = Some(why);
                }
            }
        }
        for entry in entries.into_iter().flatten() {
            let name = entry?.file_name();
            if self.is_orphan(&directory, &name) && directory.remove(&name).is_ok() {
                cleaned.temporaries += 1;
            }
        }
        Ok((cleaned, obstacle))
    }

    /// Whether this is an old temporary file that a crash has left behind. A file of this library
    /// must not be locked by any process. A file of another implementation, which creates lock
    /// files by renaming, is named `NAME.PID.16 hex digits.tmp`, and its process must be gone.
    fn is_orphan(&self, directory: &Directory, name: &OsStr) -> bool {
        let is_ours = STAGED_NAMES.contains(name);
        let is_gone = |pid: &u32| !process::exists(*pid);
        let min_age = if is_ours {
            self.config.stale_timeout
        } else {
            self.writer_of(name.as_bytes())
                .filter(is_gone)
                .map(|_| FOREIGN_TEMPORARY_AGE)
        };
        let Some(min_age) = min_age else {
            return false;
        };
        let Ok(Entry::File(file)) = directory.open_file(name) else {
            return false;
        };
        (!is_ours || flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
            && age_of(directory, &file) > Some(min_age)
    }

    /// The process in the name of a temporary file that another implementation has made for this
    /// lock.
    fn writer_of(&self, name: &[u8]) -> Option<u32> {
        let rest = name
            .strip_prefix(self.lock_path.name.as_bytes())?
            .strip_prefix(b".")?;
        let rest = std::str::from_utf8(rest).ok()?.strip_suffix(".tmp")?;
        let (pid, random) = rest.split_once('.')?;
        let is_lower = !random.bytes().any(|byte| byte.is_ascii_uppercase());
        hex(random).filter(|_| is_lower).and(digits(pid))
    }
}

/// Whether another process has the file locked. Other processes that look at it at the same time do
/// not count.
fn look_at_flock(file: &fs::File) -> Flock {
    let seen = match flock(file, FlockOperation::NonBlockingLockShared) {
        // The other process may share the lock, as with `flock -s`.
        Ok(()) => match lock_within(file, LOOK_PATIENCE) {
            Ok(false) => Flock::HeldByOther,
            // Some network file systems lock a file exclusively only if it is open for writing.
            Ok(true) | Err(_) => Flock::Acquired,
        },
        Err(rustix::io::Errno::WOULDBLOCK) => return Flock::HeldByOther,
        Err(_) => return Flock::Unknown,
    };
    // To close the file is not enough: a child that another thread has just forked has a copy of
    // the descriptor, and keeps the lock until it executes its program.
    let _ = flock(file, FlockOperation::Unlock);
    seen
}

/// How long ago a file was last written, by the clock of its file system.
fn age_of(directory: &Directory, file: &fs::File) -> Option<Duration> {
    let modified = read(file).ok()?.modified;
    let now = file_system_now(directory).ok()?;
    Some(Duration::from_secs(now.saturating_sub(modified)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_ends_although_a_child_has_a_copy_of_the_descriptor() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let looking = file.reopen().expect("it is there");
        let _copy = looking.try_clone().expect("a descriptor");
        assert_eq!(look_at_flock(&looking), Flock::Acquired);
        drop(looking);
        assert!(lock_within(file.as_file(), Duration::ZERO).expect("a lock"));
    }
}
