//! Runs a command under a lock: process group, terminal, signals, exit status, and what happens
//! when the lock is lost.
//!
//! The command runs in a process group of its own. It gets the terminal if this program has it: at
//! once, or, in a pipeline, when it needs it. A second instance of this program, the [`exec_shim`],
//! starts it and does what a parent cannot do without unsafe code: it asks the kernel to send the
//! command SIGTERM if the parent is killed, and gives it the terminal before it runs.

mod event;
mod group;
mod job;
mod shim;
mod signals;
mod terminal;

use std::fs;
use std::io;

use rustix::process::{getpid, set_child_subreaper, Pid};

pub use event::Event;
use group::Group;
pub use job::{Finish, HeldLock, Job, JobEnd, Orphan};
pub use shim::{check_proc, exec_shim};
pub use signals::{Killed, SignalWatch};
use terminal::Terminal;

/// Runs the job until the last process of its group has ended. Call it on the main thread.
///
/// # Errors
///
/// If the job cannot be started.
pub fn run(job: &Job<'_>, signals: &mut SignalWatch, lock: &HeldLock<'_>) -> io::Result<JobEnd> {
    // Orphans of the command become our children, so that we learn of their end.
    let _ = set_child_subreaper(Some(getpid()));
    let terminal = Terminal::open();
    let leader = shim::spawn(job, terminal.at_start())?;
    let mut group = Group::new(leader, terminal, lock, job.kill_after);
    loop {
        group.reap();
        if let Some(end) = group.end() {
            return Ok(end);
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

/// A process, as /proc shows it.
struct Stat {
    state: char,
    parent: i32,
    group: i32,
}

fn stat_of(pid: i32) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses, and can itself contain blanks and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some(Stat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
    })
}

/// Whether the group has a process that is not a zombie, or a zombie that is our child. True
/// without /proc.
fn has_living(group: Pid) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else {
        return true;
    };
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(stat_of)
        .filter(|stat| stat.group == group.as_raw_nonzero().get())
        .any(|stat| {
            let is_dead = matches!(stat.state, 'Z' | 'X');
            !is_dead || stat.parent == getpid().as_raw_nonzero().get()
        })
}
