//! A command under a lock: what to run, and how it ends.

use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::sys::event::Event;

use super::Killed;

#[derive(Debug)]
pub struct Job<'a> {
    /// The command and its arguments: at least one word.
    pub command: &'a [OsString],
    /// Variables that the command gets besides those of this program.
    pub environment: &'a [(&'a str, OsString)],
    /// How long the command may run on after SIGTERM.
    pub kill_after: Duration,
    /// A lock that the command holds together with this program: a descriptor that it inherits
    /// besides the standard streams. If this program is killed, the command goes on. Without one it
    /// then gets SIGTERM, because the lock ends with its parent.
    pub inherited: Option<BorrowedFd<'a>>,
}

/// How a command finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It exited with this status.
    Exited(u8),
    /// A signal ended it.
    Killed(Killed),
}

impl Finish {
    /// Returns the exit status of the command, or ends this process by the signal that ended the
    /// command ([`Killed::follow`]). Call it last.
    pub fn follow(self) -> u8 {
        match self {
            Finish::Exited(status) => status,
            Finish::Killed(killed) => killed.follow(),
        }
    }
}

/// The lock that a command runs under, as the supervisor sees it.
pub struct HeldLock<'a> {
    /// Set when the lock is lost.
    pub lost: &'a Event,
    /// Set when a look has found the lock still held.
    pub confirmed: &'a Event,
    /// Starts a look at the lock, without blocking. It sets one of the two events, now or later.
    pub look: &'a dyn Fn(),
}
