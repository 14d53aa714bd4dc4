//! Runs a command under a lock: process group, terminal, signals, exit status, and what happens
//! when the lock is lost.
//!
//! The command runs in a process group of its own. It gets the terminal if this program has it: at
//! once, or, in a pipeline, when it needs it. A second instance of this program, the [`exec_shim`],
//! starts it and does what a parent cannot do without unsafe code: it asks the kernel to send the
//! command SIGTERM if the parent is killed, and gives it the terminal before it runs.

mod group;

mod job;
mod shim;
mod signals;
mod stdin;
mod terminal;

use std::io;

use rustix::process::{getpid, set_child_subreaper, Pid};

use crate::sys::process;

pub use crate::sys::event::Event;
use group::Group;

pub use job::{Finish, HeldLock, Job};
pub use shim::{check_proc, exec_shim};
pub use signals::{Killed, SignalWatch};
pub use stdin::StdinWatch;
use terminal::Terminal;

/// Runs the job until the last process of its group has ended. `None` if this ended the command
/// because the lock was lost, or started none because it was lost already. Call it on the main
/// thread. Fails if the job cannot be started.
pub fn run(
    job: &Job<'_>,
    signals: &mut SignalWatch,
    lock: &HeldLock<'_>,
) -> io::Result<Option<Finish>> {
    if lock.lost.is_set() {
        return Ok(None);
    }
    // Orphans of the command become our children, so that we learn of their end.
    let _ = set_child_subreaper(Some(getpid()));
    let terminal = Terminal::open();
    let leader = shim::spawn(job, terminal.at_start())?;
    let mut group = Group::new(leader, terminal, lock, job.kill_after);
    loop {
        group.reap();
        if let Some(finish) = group.end() {
            return Ok(Some(finish).filter(|_| !group.is_lost));
        }
        for signal in signals.next(&[lock.lost, lock.confirmed], group.next_look()) {
            group.handle(signal);
        }
        if lock.lost.take() {
            group.lose();
        }
        if lock.confirmed.take() {
            group.resume();
        }
        group.kill_if_due();
    }
}

/// Whether the group has a process that runs, or a zombie that is our child. True if /proc shows
/// none of its processes: it may hide those of other users.
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
