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
use crate::sys::trusted::is_own_or_root;

/// The sticky bit, which has no other effect on a file: not every process with the number holds the
/// lock.
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
    /// The process was this user's, who is not root, when the lock was made. A later process of
    /// another user does not hold the lock.
    ProcessOf(u32),
}

impl LockedFor {
    /// For a process of `user`. Root's needs no mark: root may lock for every process.
    pub fn process_of(user: Option<u32>) -> LockedFor {
        match user {
            Some(user) if user != NO_USER => LockedFor::ProcessOf(user),
            _ => LockedFor::AnyProcess,
        }
    }

    /// Marks a new file of ours, whose time of modification is when the process was seen. A server
    /// that is not root cannot mark it for another user's process, and some file systems have no
    /// such modes.
    pub(super) fn mark(self, file: &File, mode: u32) -> io::Result<()> {
        match self {
            LockedFor::AnyProcess => return Ok(()),
            LockedFor::NoProcess => {
                // Without the right to do so the file is not root's, or is marked for its group.
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

    /// What the mark of a lock file says.
    pub(super) fn marked(stat: &Stat) -> LockedFor {
        if !is_own_or_root(stat.st_uid) || stat.st_mode & STICKY == 0 {
            return LockedFor::AnyProcess;
        }
        match stat.st_gid {
            group if stat.st_uid != 0 || group == NO_USER => LockedFor::NoProcess,
            user => LockedFor::ProcessOf(user),
        }
    }

    /// Whether the process `pid` exists and holds the lock, which was made at `made_at`. It does if
    /// the kernel cannot tell.
    pub(super) fn is_held_by(self, pid: u32, made_at: Duration) -> bool {
        process::is_process(pid)
            && match self {
                LockedFor::AnyProcess => true,
                LockedFor::NoProcess => false,
                LockedFor::ProcessOf(user) => !is_successor(pid, user, made_at),
            }
    }
}

/// Whether `pid` is another user's process that began after `made_at`. The clock alone is not
/// enough: if it is set forward, every holder seems to have begun too late. Nor is the user: the
/// holder may have become root. A process that began up to 10 ms after `made_at` counts as the
/// holder: the kernel does not tell it from one that began before.
fn is_successor(pid: u32, user: u32, made_at: Duration) -> bool {
    let users = process::users(pid);
    let is_anothers = users.is_some_and(|of| user != of.real && user != of.effective);
    is_anothers && has_begun_after(pid, made_at)
}

/// Whether the process began after an instant since the epoch, by the present clock.
pub(super) fn has_begun_after(pid: u32, instant: Duration) -> bool {
    process::earliest_start(pid).is_some_and(|start| start > instant)
}

/// A time as the span since the epoch.
pub(super) fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The result of a step that some file systems refuse, and that a lock can do without.
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
