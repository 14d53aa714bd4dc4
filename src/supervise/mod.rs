//! Runs a command under a lock: process group, terminal, signals, exit status, and what happens when
//! the lock is lost.
//!
//! The command is a process group of its own, and has the terminal if we had it: at once, or in a
//! pipeline when it asks for it. It is started through a second instance of this program
//! ([`exec_shim`]), which arranges for what a parent cannot arrange without unsafe code: that the
//! command gets SIGTERM should we die without a word, where that is wanted, and that it has the
//! terminal before it runs.

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
pub use job::{Ended, HeldLock, Job, Orphan};
pub use shim::{check_proc, exec_shim};
use signals::Keyboard;
pub use signals::{Killed, SignalWatch};
use terminal::{Lending, Terminal};

/// Runs the job to its end, and sees to it that no process of its group outlives that. To be called on
/// the main thread.
///
/// # Errors
///
/// If the job could not be started.
pub fn run(job: &Job<'_>, signals: &mut SignalWatch, lock: &HeldLock<'_>) -> io::Result<Ended> {
    // What the command leaves behind in its group becomes our child, so that we learn of its end.
    let _ = set_child_subreaper(Some(getpid()));
    let terminal = Terminal::open();
    let lending = Lending::by_the_streams();
    let has_terminal =
        lending == Lending::Unasked && terminal.as_ref().is_some_and(Terminal::is_ours);
    let leader = shim::start(job, has_terminal)?;
    let mut group = Group {
        leader,
        terminal,
        lending,
        lock,
        kill_after: job.kill_after,
        status: None,
        keyboard: Keyboard::Ours,
        passed_on: None,
        is_resuming: false,
        is_lost: false,
        kill_at: None,
        is_killed: false,
    };
    loop {
        group.reap();
        if let Some(ended) = group.ended() {
            return Ok(ended);
        }
        for signal in signals.next(&[lock.lost, lock.confirmed], group.next_look()) {
            group.hear(signal);
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

/// What /proc says of a process.
struct Stat {
    state: char,
    parent: i32,
    group: i32,
}

fn stat_of(pid: i32) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name stands in parentheses and may have any of these, too.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some(Stat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
    })
}

/// Whether a process of the group is more than a zombie, or one that is ours to wait for. If /proc cannot
/// tell, one is.
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
