//! The mark that tells for which process a lock was made. The file contains a process number, which
//! a process of another user may get later. The file's mode, group and time tell these processes
//! apart. Only root and this server's user can change them.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{fchown, Gid, Stat};
use rustix::process::geteuid;

use crate::os::process;
use crate::os::trusted::is_own_or_root;

/// The sticky bit, which has no other effect on a file. A file with this bit is marked: not every
/// process with the number in it holds the lock.
const STICKY: u32 = 0o1000;

/// The group of a file that is marked for no process.
const NO_USER: u32 = 0;

/// Which process with the number in the file holds the lock.
#[derive(Clone, Copy, Debug)]
pub enum LockedFor {
    AnyProcess,
    /// No process: the number was free when the lock was made, and a process that gets the number
    /// later does not hold the lock.
    NoProcess,
    /// The process that belonged to this user when the lock was made. The user is not root. A later
    /// process of another user does not hold the lock.
    ProcessOf(u32),
}

impl LockedFor {
    /// The mark for a process of `user`. A process of root needs no mark, because root may lock for
    /// every process.
    pub fn process_of(user: Option<u32>) -> LockedFor {
        match user {
            Some(user) if user != NO_USER => LockedFor::ProcessOf(user),
            _ => LockedFor::AnyProcess,
        }
    }

    /// Marks a new file of ours. Its modification time is the time at which the process was seen.
    /// The file stays unmarked if it is for a process of another user and this server is not root,
    /// or if the file system has no such modes.
    pub(super) fn mark(self, file: &File, mode: u32) -> io::Result<()> {
        match self {
            LockedFor::AnyProcess => return Ok(()),
            LockedFor::NoProcess => {
                // The group matters only if the file is root's. If root cannot change the group,
                // the file is marked for the user with the number of that group.
                let _ = fchown(file, None, Some(Gid::from_raw(NO_USER)));
            }
            LockedFor::ProcessOf(user) => {
                let group = Some(Gid::from_raw(user));
                if !geteuid().is_root() || fchown(file, None, group).is_err() {
                    return Ok(());
                }
            }
        }
        where_possible(file.set_permissions(Permissions::from_mode(mode | STICKY)))
    }

    /// Reads the mark of a lock file.
    pub(super) fn marked(stat: &Stat) -> LockedFor {
        if !is_own_or_root(stat.st_uid) || stat.st_mode & STICKY == 0 {
            return LockedFor::AnyProcess;
        }
        match stat.st_gid {
            group if stat.st_uid != 0 || group == NO_USER => LockedFor::NoProcess,
            user => LockedFor::ProcessOf(user),
        }
    }

    /// Whether the process `pid` exists and holds the lock, which was made at `made_at`. If the
    /// kernel cannot tell, the process counts as the holder. A kernel thread never does: it has the
    /// number of a process of an earlier boot.
    pub(super) fn is_held_by(self, pid: u32, made_at: Duration) -> bool {
        process::is_process(pid)
            && !process::is_kernel_thread(pid)
            && match self {
                LockedFor::AnyProcess => true,
                LockedFor::NoProcess => false,
                LockedFor::ProcessOf(user) => !is_successor(pid, user, made_at),
            }
    }
}

/// Whether `pid` is another user's process that began after `made_at`. The time alone is not
/// enough: if the clock is set forward, every holder seems to have begun too late. The user alone
/// is not enough either, because the holder may have become root. A process that began up to 10 ms
/// after `made_at` counts as the holder, because the kernel cannot tell it from a process that
/// began before.
fn is_successor(pid: u32, user: u32, made_at: Duration) -> bool {
    let users = process::users(pid);
    let is_anothers = users.is_some_and(|of| user != of.real && user != of.effective);
    is_anothers && has_begun_after(pid, made_at)
}

/// Whether the process began after `instant`, a duration since the epoch, by the clock as it is set
/// now.
pub(super) fn has_begun_after(pid: u32, instant: Duration) -> bool {
    process::earliest_start(pid).is_some_and(|start| start > instant)
}

/// Returns a time as the duration since the epoch.
pub(super) fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Ignores the error if the file system refuses the step. The lock works without that step.
pub(super) fn where_possible(result: io::Result<()>) -> io::Result<()> {
    use rustix::io::Errno;
    match result {
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
            _ => Err(error),
        },
        done => done,
    }
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
            let seen_at = since_epoch(SystemTime::now());
            let locked_for = LockedFor::process_of(another);
            let is_holder = |seen_at| locked_for.is_held_by(child.id(), seen_at);
            let held = [0, 10].map(|secs| is_holder(seen_at - Duration::from_secs(secs)));
            drop(child.stdin.take());
            child.wait().expect("its end");
            assert_eq!(held, [true, false]);
        }
    }
}
