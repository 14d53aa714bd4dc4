//! Runs a command under a lock: its process group, the terminal, signals, the exit status, and what
//! happens when the lock is lost.
//!
//! The command runs in a process group of its own. If this program has the terminal, it gives the
//! terminal to the command's group: at once or, in a pipeline, when the command needs it. The
//! command starts as a second instance of this program, the [`exec_shim`]. Before the shim becomes
//! the command, it does what a parent cannot do without unsafe code: it asks the kernel for a
//! SIGTERM when the parent ends, and gives the terminal to its group.

mod group;
mod shim;
mod signals;
mod stdin;
mod terminal;

use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::process::{getpid, set_child_subreaper, Pid, Signal};

pub use crate::sys::event::Event;
use crate::sys::process;

use group::Group;
pub use shim::{become_command, check_proc, exec_shim};
pub use signals::{Killed, SignalWatch};
pub use stdin::StdinWatch;
use terminal::Terminal;

/// A command, and the lock that it runs under.
pub struct Job<'a> {
    /// The command and its arguments: at least one word.
    pub command: &'a [OsString],
    /// Variables to set for the command, in addition to this program's environment. A variable with
    /// `None` is removed.
    pub environment: &'a [(&'a str, Option<OsString>)],
    /// The signal that the command gets when the lock is lost.
    pub loss_signal: Signal,
    /// How long the command may run after that signal before it is killed.
    pub kill_after: Duration,
    /// A descriptor that the command inherits, and that keeps the lock file locked. If this program
    /// is killed, the command then runs on under the lock. Without the descriptor, the lock ends
    /// with this program, and the command gets SIGTERM.
    pub inherited: Option<BorrowedFd<'a>>,
    /// Set when the lock is lost.
    pub lost: &'a Event,
    /// Set when a check has found the lock still held.
    pub confirmed: &'a Event,
    /// Starts a check of the lock without blocking. The check sets `lost` or `confirmed`, at once
    /// or later.
    pub look: &'a dyn Fn(),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Exited(u8),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// The command ended without a loss of the lock.
    Finished(Finish),
    /// The lock was lost, so the command was ended or was not started.
    LockLost,
}

/// Runs the job until the last process of its group has ended. Call it on the main thread. Fails if
/// the job cannot be started.
pub fn run(job: &Job<'_>, signals: &mut SignalWatch) -> io::Result<JobEnd> {
    if job.lost.is_set() {
        return Ok(JobEnd::LockLost);
    }
    // Orphans of the command become our children, so that we learn when they end.
    let _ = set_child_subreaper(Some(getpid()));
    let terminal = Terminal::open();
    let leader = shim::spawn(job, terminal.at_start())?;
    let mut group = Group::new(leader, terminal, job);
    loop {
        group.reap();
        if let Some(finish) = group.end() {
            return Ok(match group.is_lost {
                true => JobEnd::LockLost,
                false => JobEnd::Finished(finish),
            });
        }
        for signal in signals.next(&[job.lost, job.confirmed], group.next_look()) {
            group.handle(signal);
        }
        if job.lost.take() {
            group.lose();
        }
        if job.confirmed.take() {
            group.resume();
        }
        group.kill_if_due();
    }
}

/// Whether the group has a process that runs, or a zombie that is our child. Also `true` if /proc
/// shows no process of the group, because /proc may hide other users' processes.
fn has_living(group: Pid) -> bool {
    let Some(processes) = process::all() else {
        return true;
    };
    let mut members = processes
        .filter_map(process::stat)
        .filter(|stat| stat.group == group.as_raw_nonzero().get())
        .peekable();
    members.peek().is_none()
        || members.any(|stat| {
            let is_dead = matches!(stat.state, 'Z' | 'X');
            !is_dead || stat.parent == getpid().as_raw_nonzero().get()
        })
}
