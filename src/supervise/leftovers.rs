//! Processes that are still in the command's process group after the command has ended.

use std::io::{self, Write};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{getpid, test_kill_process_group, Pid};

use crate::sys::backoff::Backoff;
use crate::sys::moment::Moment;
use crate::sys::process;

/// What to do with processes that the command leaves behind in its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leftovers {
    /// Hold the lock for up to a second while they end or leave the group, as a daemon does at its
    /// start. End the others after that.
    #[default]
    End,
    /// Hold the lock until they have ended or left the group.
    Wait,
    /// Release the lock at once, and let them run on.
    Leave,
}

impl Leftovers {
    /// The words of the option `--leftovers`.
    pub const NAMES: [(&'static str, Leftovers); 3] = [
        ("end", Leftovers::End),
        ("wait", Leftovers::Wait),
        ("leave", Leftovers::Leave),
    ];
}

/// How long the processes may take to end or to leave the group before they are told to end.
const GRACE: Duration = Duration::from_secs(1);

/// The first and the longest pauses between two checks of the group. SIGCHLD reports only the end
/// of our own children, and nothing reports that a process has left the group.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_WAIT_PAUSE: Duration = Duration::from_secs(1);

/// The pause before /proc is read again. With 5000 processes, that takes 0.16 s.
const READ_PAUSE: Duration = Duration::from_secs(1);
const READ_WAIT_PAUSE: Duration = Duration::from_secs(10);

/// When to check the rest of the group.
#[derive(Debug)]
pub(super) struct Rest {
    leftovers: Leftovers,
    backoff: Backoff,
    pub(super) next_look: Moment,
    /// When to find out from /proc whether the group has only zombies.
    pub(super) read_at: Moment,
    /// When the rest is told to end.
    pub(super) ends_at: Moment,
    /// The number of processes that were alive when /proc was read, if it showed them.
    pub(super) living: Option<usize>,
}

impl Rest {
    pub(super) fn new(leftovers: Leftovers, now: Moment) -> Rest {
        let (longest_pause, read_at, ends_at) = match leftovers {
            Leftovers::Wait => (LONGEST_WAIT_PAUSE, now + READ_WAIT_PAUSE, Moment::NEVER),
            _ => (LONGEST_PAUSE, now + GRACE, now + GRACE),
        };
        Rest {
            leftovers,
            backoff: Backoff::new(FIRST_PAUSE, longest_pause),
            next_look: now,
            read_at,
            ends_at,
            living: None,
        }
    }

    /// Sets the time of the next check.
    pub(super) fn plan_look(&mut self, now: Moment) {
        self.next_look = now + self.backoff.pause();
    }

    /// Sets the time when /proc is read again.
    pub(super) fn plan_reading(&mut self, is_asked_to_end: bool) {
        let pause = match self.leftovers {
            Leftovers::Wait if !is_asked_to_end => READ_WAIT_PAUSE,
            _ => READ_PAUSE,
        };
        self.read_at = Moment::now() + pause;
    }
}

/// Whether the group has a process, which may be a zombie or belong to another user.
pub(super) fn exists(group: Pid) -> bool {
    test_kill_process_group(group) != Err(Errno::SRCH)
}

/// How many processes of the group run, or are zombies that are our children. `None` if /proc shows
/// no process of the group, because /proc may hide other users' processes.
pub(super) fn living_count(group: Pid) -> Option<usize> {
    let stats = process::all()?.filter_map(process::stat);
    let members: Vec<process::ProcessStat> = stats
        .filter(|stat| stat.group == group.as_raw_nonzero().get())
        .collect();
    let is_living = |stat: &&process::ProcessStat| {
        let is_dead = matches!(stat.state, 'Z' | 'X');
        !is_dead || stat.parent == getpid().as_raw_nonzero().get()
    };
    let count = members.iter().filter(is_living).count();
    (!members.is_empty()).then_some(count)
}

/// Says that processes were told to end, because their work may not be complete.
pub(super) fn tell_of_leftovers(program: &str, living: Option<usize>) {
    let what = match living {
        Some(1) => "1 process".to_owned(),
        Some(count) => format!("{count} processes"),
        None => "processes".to_owned(),
    };
    let line =
        format!("{program}: the command left {what} in its group: ending them; see --leftovers\n");
    // If stderr is closed, nobody can be told.
    let _ = io::stderr().write_all(line.as_bytes());
}
