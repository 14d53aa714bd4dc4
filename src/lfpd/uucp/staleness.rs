//! Decides which lock files are stale.

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::io;
use std::time::{Duration, SystemTime};

use log::debug;
use rustix::fs::{fstat, Stat};
use rustix::process::geteuid;

use crate::sys::clock;
use crate::sys::directory::{lock_within, Directory, Entry, FileId, StagedFile};
use crate::sys::process;

use super::boot;
use super::lock_file::{inspect, modified_at, shown, LockFile, NameState, MODE, PRIVATE_NAMES};
use super::mark::{has_begun_after, since_epoch};
use super::names::Named;

/// The maximum time between the creation of a lock file and the writing of its content.
const WRITE_TIME: Duration = Duration::from_secs(5 * 60);

/// Judges the lock files that a request meets.
pub(super) struct Judge<'a> {
    /// The directory in which we make lock files, and remove stale ones.
    own: &'a Directory,
    /// The number of the process for which the client requests the lock; `None` if the client may
    /// not lock for that process.
    asker: Option<u32>,
    /// The attributes of a test file in `own`. They show the time by the file system's clock, and
    /// whether our files there belong to our user.
    sample: OnceCell<Option<Stat>>,
}

impl<'a> Judge<'a> {
    pub(super) fn new(own: &'a Directory, asker: Option<u32>) -> Judge<'a> {
        Judge {
            own,
            asker,
            sample: OnceCell::new(),
        }
    }

    /// Whether a process holds, or may hold, the lock with this name in `directory`.
    pub(super) fn is_held(&self, directory: &Directory, name: &OsStr) -> bool {
        match inspect(directory, name) {
            NameState::Free => false,
            NameState::Blocked => true,
            NameState::File(file) => {
                let is_stale = if std::ptr::eq(directory, self.own) {
                    self.is_stale(name, &file)
                } else {
                    self.is_without_holder(directory, &file)
                };
                if is_stale {
                    debug!("ignored-stale file={}", shown(name));
                }
                !is_stale
            }
        }
    }

    /// Whether the file, which is in our own directory, locks nothing and may be removed.
    pub(super) fn is_stale(&self, name: &OsStr, file: &LockFile) -> bool {
        self.is_without_holder(self.own, file)
            || self.is_planted(file)
            || self.is_abandoned(name, file)
    }

    /// Whether the process that the file names has ended, or is not the process that took the lock.
    fn is_without_holder(&self, directory: &Directory, file: &LockFile) -> bool {
        let Named::Process(pid) = file.named else {
            return false;
        };
        !file.locked_for.is_held_by(pid, file.modified_at)
            || (self.asker == Some(pid) && is_older_than(file, pid))
            || boot::is_older(file.modified_at, directory)
    }

    /// Whether the file names a process that does not belong to the file's owner. Such a process
    /// would never release the lock. Only root can rely on the owners of files, and only on a file
    /// system on which root's own files belong to root.
    fn is_planted(&self, file: &LockFile) -> bool {
        let Named::Process(pid) = file.named else {
            return false;
        };
        let is_anothers = || {
            let users = process::users(pid);
            users.is_some_and(|of| ![of.real, of.effective, of.saved].contains(&file.owner))
        };
        file.owner != 0
            && geteuid().is_root()
            && file.owner != process::overflow_user()
            && is_anothers()
            && self.sample().is_some_and(|sample| sample.st_uid == 0)
    }

    /// Whether the file names no process because a power cut has emptied it. A file counts as
    /// emptied after [`WRITE_TIME`], unless a program has the file locked and so may be about to
    /// write to it.
    fn is_abandoned(&self, name: &OsStr, file: &LockFile) -> bool {
        file.named == Named::Nothing
            && self.sample().map(modified_at).is_some_and(|now| {
                let since = now.saturating_sub(file.modified_at);
                since > WRITE_TIME || file.modified_at > now + clock::TOLERANCE
            })
            && self.is_unlocked(name, file)
    }

    fn is_unlocked(&self, name: &OsStr, file: &LockFile) -> bool {
        let Ok(Entry::File(opened)) = self.own.open_file(name) else {
            return false;
        };
        FileId::of(&opened).is_ok_and(|id| id == file.id)
            && match lock_within(&opened, Duration::ZERO) {
                Ok(is_ours) => is_ours,
                Err(error) => error.kind() == io::ErrorKind::Unsupported,
            }
    }

    fn sample(&self) -> Option<&Stat> {
        let make = || {
            StagedFile::make(self.own, &PRIVATE_NAMES, MODE, |staged| {
                Ok(fstat(staged.file())?)
            })
        };
        self.sample.get_or_init(|| make().ok()).as_ref()
    }
}

/// Whether the process that requests the lock began after the file was written. If so, the file is
/// from an earlier process with the same number. Containers use the same numbers after each start.
/// Also true if the time of the file shows that a clock is wrong: the process gets the lock then.
fn is_older_than(file: &LockFile, pid: u32) -> bool {
    has_begun_after(pid, file.modified_at)
        || file.modified_at > since_epoch(SystemTime::now()) + clock::TOLERANCE
}
