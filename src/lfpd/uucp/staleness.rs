//! Decides which lock files are stale.

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use log::debug;
use rustix::fs::{fstat, statat, AtFlags, Dir, Stat};
use rustix::process::geteuid;

use super::lock_file::{inspect, modified_at, shown, LockFile, NameState, MODE, PRIVATE_NAMES};
use super::mark::{has_begun_after, since_epoch};
use super::names::Named;
use crate::os::directory::{lock_within, Directory, Entry, FileId, StagedFile};
use crate::os::moment;
use crate::os::process::{self, booted_at};

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
            || predates_boot(file.modified_at, directory)
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
                since > WRITE_TIME || file.modified_at > now + moment::TOLERANCE
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
        || file.modified_at > since_epoch(SystemTime::now()) + moment::TOLERANCE
}

/// Whether a file in `directory` with this modification time was written before this boot. False
/// if the clock may have been wrong at any time since the boot, and if the system cannot tell.
pub(super) fn predates_boot(file_modified_at: Duration, directory: &Directory) -> bool {
    booted_at().is_some_and(|booted_at| {
        let booted_at = Duration::from_secs(booted_at);
        // A file in memory cannot be older than the boot.
        is_of_an_earlier_boot(file_modified_at, booted_at, || {
            let is_on_disk = directory.is_in_memory() == Some(false);
            is_on_disk.then(oldest_node).flatten()
        })
    })
}

/// Whether a file is from an earlier boot. All times are durations since the epoch; `booted_at` is
/// by the present clock, and `oldest_node` returns the time of the first nodes in /dev, by the
/// clock of that moment.
///
/// The present clock alone is not enough. A host without a battery for its clock may lock a device
/// before the network corrects the clock, and the file then seems to be older than the boot. So the
/// file must also be older than the first nodes in /dev. If these are later than the boot, /dev was
/// made later, as in a container, and shows nothing.
fn is_of_an_earlier_boot(
    modified_at: Duration,
    booted_at: Duration,
    oldest_node: impl FnOnce() -> Option<Duration>,
) -> bool {
    let is_before = |time: Duration| modified_at + moment::TOLERANCE < time;
    modified_at >= moment::EARLIEST
        && is_before(booted_at)
        && oldest_node()
            .is_some_and(|oldest| is_before(oldest) && oldest <= booted_at + moment::TOLERANCE)
}

/// The earliest modification time of a file in /dev; `None` if /dev is not in memory, because its
/// files are older than the boot then.
fn oldest_node() -> Option<Duration> {
    let directory = Directory::open(Path::new("/dev")).ok()?;
    if directory.is_in_memory() != Some(true) {
        return None;
    }
    let mut oldest = None;
    for entry in Dir::read_from(directory.as_fd()).ok()? {
        let entry = entry.ok()?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        // A device that has just been unplugged is not there any more.
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        if let Ok(stat) = statat(directory.as_fd(), entry.file_name(), flags) {
            let time = modified_at(&stat);
            oldest = Some(oldest.map_or(time, |oldest: Duration| oldest.min(time)));
        }
    }
    oldest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_before_both_the_boot_and_dev_is_older() {
        const MINUTE: u64 = 60;
        const DAY: u64 = 24 * 60 * MINUTE;
        let boot = moment::EARLIEST.as_secs() + 300 * DAY;
        for (what, file, oldest_node, is_older) in [
            ("a power cut", boot - DAY, Some(boot), true),
            ("just before", boot - MINUTE - 1, Some(boot), true),
            ("in the tolerance", boot - MINUTE, Some(boot), false),
            ("this boot", boot + DAY, Some(boot), false),
            ("the clock was at 1970, then set", 100, Some(3), false),
            ("so it was, file before", boot - DAY, Some(3), false),
            ("a file without a time", 0, Some(boot), false),
            (
                "unset then",
                moment::EARLIEST.as_secs() - 1,
                Some(boot),
                false,
            ),
            (
                "a clock 2 days behind, then set",
                boot - DAY,
                Some(boot - 2 * DAY),
                false,
            ),
            ("before that", boot - 3 * DAY, Some(boot - 2 * DAY), true),
            (
                "a clock ahead, then set back",
                boot - DAY,
                Some(boot + DAY),
                false,
            ),
            ("/dev of a container", boot - DAY, Some(boot + DAY), false),
            ("no /dev in memory", boot - DAY, None, false),
        ] {
            let [file, boot] = [file, boot].map(Duration::from_secs);
            let oldest_node = || oldest_node.map(Duration::from_secs);
            let found = is_of_an_earlier_boot(file, boot, oldest_node);
            assert_eq!(found, is_older, "{what}");
        }
    }
}
