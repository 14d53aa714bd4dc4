//! Runs a command under a lock: its process group, the terminal, signals, the exit status, and what
//! happens when the lock is lost.
//!
//! The command runs in a process group of its own. If this program has the terminal, it gives it to
//! the command's group, at once or on need: see `terminal`. The command starts as a second instance
//! of this program, the [exec shim](second_instance), which does first what a parent cannot do
//! without unsafe code: it asks the kernel for a SIGTERM when the parent ends, and gives the
//! terminal to its group. If the command runs for longer, a third instance guards it: see `guard`.

mod ending;
mod group;
mod guard;
mod leftovers;
mod shim;
mod signals;
mod stdin;
mod terminal;

use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::process::{getpid, set_child_subreaper, Signal};

pub use crate::os::event::Event;

pub use ending::{EndBySignal, Undo};
use group::Group;
pub use leftovers::Leftovers;
pub use shim::{become_command, second_instance, ProgramFile};
pub use signals::{Killed, SignalWatch};
pub use stdin::StdinWatch;
use terminal::Terminal;

/// A command, and the lock that it runs under.
pub struct Job<'a> {
    /// The name of this program, for its messages.
    pub program: &'a str,
    pub program_file: &'a ProgramFile,
    /// The command and its arguments: at least one word.
    pub command: &'a [OsString],
    /// Variables to set for the command, in addition to this program's environment. A variable with
    /// `None` is removed.
    pub environment: &'a [(&'a str, Option<OsString>)],
    /// The signal that the command gets when the lock is lost.
    pub loss_signal: Signal,
    /// How long the command may run after that signal before it is killed.
    pub kill_after: Duration,
    pub leftovers: Leftovers,
    /// A descriptor that the command inherits, and that keeps the lock file locked until the last
    /// process that has inherited it ends. Without the descriptor, the lock ends with this program,
    /// and the kernel sends SIGTERM to the command at once.
    pub inherited: Option<BorrowedFd<'a>>,
    /// Set when the lock is lost.
    pub lost: &'a Event,
    /// Set when a check has found the lock still held.
    pub confirmed: &'a Event,
    /// Starts a check of the lock without blocking. The check sets `lost` or `confirmed`, at once
    /// or later.
    pub look: &'a dyn Fn(),
}

/// The end of a command whose lock was not lost.
#[derive(Debug)]
pub struct Finish {
    /// The exit status of the command, or the one that a shell gives for its signal.
    pub status: u8,
    /// The signal that has ended the command.
    pub killed: Option<Killed>,
    /// Whether the command was executed. If not, the status is that of a shell.
    pub has_run: bool,
    /// Says that processes go on that the command has left behind.
    pub left: Option<String>,
}

impl Finish {
    /// Returns the exit status of the command, or ends this process by the signal that ended the
    /// command ([`Killed::follow`]). Call it last.
    pub fn follow(self) -> u8 {
        self.killed.map_or(self.status, Killed::follow)
    }
}

/// Runs the job until its command has ended, and the rest of its group as [`Leftovers`] says. Call
/// it on the main thread. Returns `None` if the lock was lost, so that the command was ended or not
/// started. Fails if the job cannot be started.
pub fn run(job: &Job<'_>, signals: &mut SignalWatch) -> io::Result<Option<Finish>> {
    if job.lost.is_set() {
        return Ok(None);
    }
    // Orphans of the command become our children, so that we learn when they end.
    let _ = set_child_subreaper(Some(getpid()));
    let terminal = Terminal::open();
    let started = shim::spawn(job, terminal.at_start())?;
    let mut group = Group::new(started.leader, terminal, job);
    loop {
        let arrived = signals.next(&[job.lost, job.confirmed], group.next_look());
        // Stops come first: SIGCONT may have been sent to continue the command after one of them.
        group.reap();
        for signal in arrived {
            group.handle(signal);
        }
        if job.lost.take() {
            group.lose();
        }
        if job.confirmed.take() {
            group.resume();
        }
        group.act_if_due();
        if let Some(mut finish) = group.conclude() {
            finish.has_run = !started.has_failed();
            return Ok(Some(finish).filter(|_| !group.is_lost));
        }
    }
}
