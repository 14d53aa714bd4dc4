//! The process that a lock was made for. The file's content is a number, which another user's
//! process may get later, so the file's mode, group and time tell the processes apart. Only root
//! and this server's user can change these.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{fchown, Gid, Stat};
use rustix::process::geteuid;

use crate::sys::process;

/// The mode of a lock file: every user may read who holds the device, and none may write.
pub(super) const MODE: u32 = 0o444;

/// The same with the sticky bit, which has no other effect on a file: not every process with the
/// number holds the lock.
const MARKED_MODE: u32 = 0o1444;
const STICKY: u32 = 0o1000;

/// The group of a file that is marked for no process.
const NO_USER: u32 = 0;

/// Which of the processes that have the file's number holds the lock.
#[derive(Clone, Copy, Debug)]
pub enum LockedFor {
    AnyProcess,
    /// No process had the number when the lock was made, and none that gets it later holds the
    /// lock.
    NoProcess,
    /// The process was this user's at that time. A later process of another user does not hold the
    /// lock.
    ProcessOf {
        /// Not root.
        user: u32,
        /// Since the epoch.
        seen_at: Duration,
    },
}

impl LockedFor {
    /// For the process of `user` that existed at `seen_at`. Root's needs no mark: root may lock for
    /// every process.
    pub fn process_of(user: Option<u32>, seen_at: SystemTime) -> LockedFor {
        match (user, seen_at.duration_since(UNIX_EPOCH)) {
            (Some(user), Ok(seen_at)) if user != NO_USER => LockedFor::ProcessOf { user, seen_at },
            _ => LockedFor::AnyProcess,
        }
    }

    /// Marks a new file of ours. A server that is not root cannot mark it for another user's
    /// process.
    pub(super) fn mark(self, file: &File) -> io::Result<()> {
        match self {
            LockedFor::AnyProcess => return Ok(()),
            LockedFor::NoProcess => {
                // Without the right to do so the file is not root's, or is marked for its group.
                let _ = fchown(file, None, Some(Gid::from_raw(NO_USER)));
            }
            LockedFor::ProcessOf { user, seen_at } => {
                let group = Some(Gid::from_raw(user));
                if !geteuid().is_root() || fchown(file, None, group).is_err() {
                    return Ok(());
                }
                file.set_modified(UNIX_EPOCH + seen_at)?;
            }
        }
        file.set_permissions(Permissions::from_mode(MARKED_MODE))
    }

    /// What the mark of a lock file says.
    pub(super) fn marked(stat: &Stat) -> LockedFor {
        let is_trusted = stat.st_uid == 0 || stat.st_uid == geteuid().as_raw();
        if !is_trusted || stat.st_mode & STICKY == 0 {
            return LockedFor::AnyProcess;
        }
        if stat.st_uid != 0 || stat.st_gid == NO_USER {
            return LockedFor::NoProcess;
        }
        let seconds = u64::try_from(stat.st_mtime).unwrap_or_default();
        let nanoseconds = u32::try_from(stat.st_mtime_nsec).unwrap_or_default();
        LockedFor::ProcessOf {
            user: stat.st_gid,
            seen_at: Duration::new(seconds, nanoseconds),
        }
    }

    /// Whether the process `pid` exists and holds the lock. It does if the kernel cannot tell.
    pub(super) fn is_held_by(self, pid: u32) -> bool {
        process::exists(pid)
            && match self {
                LockedFor::AnyProcess => true,
                LockedFor::NoProcess => false,
                LockedFor::ProcessOf { user, seen_at } => !is_successor(pid, user, seen_at),
            }
    }
}

/// Whether `pid` is another user's process that began after `seen_at`. The clock alone is not
/// enough: if it is set forward, every holder seems to have begun too late. Nor is the user: the
/// holder may have become root. A process that began up to 10 ms after `seen_at` counts as the
/// holder: the kernel does not tell it from one that began before.
fn is_successor(pid: u32, user: u32, seen_at: Duration) -> bool {
    let is_anothers = process::users(pid).is_some_and(|(real, own)| user != real && user != own);
    is_anothers && process::earliest_start(pid).is_some_and(|start| start > seen_at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_locked_for_just_after_its_start_is_the_holder() {
        let another = Some(geteuid().as_raw() + 12_345);
        for _ in 0..20 {
            let mut child = Command::new("cat")
                .stdin(Stdio::piped())
                .spawn()
                .expect("cat");
            let seen_at = SystemTime::now();
            let is_holder =
                |seen_at| LockedFor::process_of(another, seen_at).is_held_by(child.id());
            let held = [0, 10].map(|secs| is_holder(seen_at - Duration::from_secs(secs)));
            drop(child.stdin.take());
            child.wait().expect("its end");
            assert_eq!(held, [true, false]);
        }
    }
}
