//! A command under a lock: what to run, and how it ends.

use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::{Event, Killed};

/// What to run, and how.
#[derive(Debug)]
pub struct Job<'a> {
    /// The command and its arguments; at least one word.
    pub command: &'a [OsString],
    /// What it finds in its environment besides ours.
    pub environment: &'a [(&'a str, OsString)],
    /// For how long it may go on after it was told to end.
    pub kill_after: Duration,
    /// What it inherits besides the standard streams: a lock that it holds together with us.
    pub inherited: Option<BorrowedFd<'a>>,
    /// What becomes of it if we die without a word.
    pub orphan: Orphan,
}

/// What becomes of a command whose parent was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orphan {
    /// It gets SIGTERM: the lock goes with us.
    Ends,
    /// It goes on, since it holds the lock itself.
    GoesOn,
}

/// How a command under a lock has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this exit status.
    Exited(i32),
    /// By a signal.
    Killed(Killed),
    /// By us, since the lock was lost.
    Lost,
}

/// The lock that a command runs under, as far as the loop that waits for the command has to know.
pub struct HeldLock<'a> {
    /// Set when it is lost.
    pub lost: &'a Event,
    /// Set when it was found to be held after a look.
    pub confirmed: &'a Event,
    /// Looks whether it is still held, without blocking. One of the events is set then, or later.
    pub look: &'a dyn Fn(),
}
