//! Processes that are still in the command's process group after the command has ended.

use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{getpid, test_kill_process_group, Pid};

use crate::os::backoff::Backoff;
use crate::os::moment::Moment;
use crate::os::process;

/// What to do with processes that the command leaves behind in its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leftovers {
    /// Hold the lock for up to a second while they end or leave the group, as a daemon does at its
    /// start. Let the others go on without it, but end them if the command was told to end.
    #[default]
    Leave,
    /// Hold the lock in the same way, and end the others.
    End,
    /// Hold the lock until they have ended or left the group.
    Wait,
}

impl Leftovers {
    /// The words of the option `--leftovers`.
    pub const NAMES: [(&'static str, Leftovers); 3] = [
        ("leave", Leftovers::Leave),
        ("end", Leftovers::End),
        ("wait", Leftovers::Wait),
    ];
}

/// How long the processes may take to end or to leave the group before they are told to end, or are
/// left alone.
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
pub struct Rest {
    leftovers: Leftovers,
    backoff: Backoff,
    pub next_look: Moment,
    /// When to read from /proc who is left: perhaps only zombies.
    pub read_at: Moment,
}

/// What a check of the group has found.
pub enum Look {
    Empty,
    /// Processes that still have time, or have been asked to end.
    Wait,
    /// Processes whose time is over, in words.
    Overdue(String),
}

impl Rest {
    pub fn new(leftovers: Leftovers) -> Rest {
        let (longest_pause, first_reading) = match leftovers {
            Leftovers::Wait => (LONGEST_WAIT_PAUSE, READ_WAIT_PAUSE),
            _ => (LONGEST_PAUSE, GRACE),
        };
        let now = Moment::now();
        Rest {
            leftovers,
            backoff: Backoff::new(FIRST_PAUSE, longest_pause),
            next_look: now,
            read_at: now + first_reading,
        }
    }

    /// Looks for a process of the group that counts, and sets the time of the next look.
    pub fn look(&mut self, group: Pid, is_asked_to_end: bool) -> Look {
        // A zombie counts, and so does a process of another user.
        if test_kill_process_group(group) == Err(Errno::SRCH) {
            return Look::Empty;
        }
        let now = Moment::now();
        self.next_look = now + self.backoff.pause();
        if self.read_at > now {
            return Look::Wait;
        }
        let living = match living_count(group) {
            Some(0) => return Look::Empty,
            Some(1) => "1 process".to_owned(),
            Some(count) => format!("{count} processes"),
            None => "processes".to_owned(),
        };
        let is_waiting = self.leftovers == Leftovers::Wait && !is_asked_to_end;
        self.read_at = Moment::now()
            + if is_waiting {
                READ_WAIT_PAUSE
            } else {
                READ_PAUSE
            };
        if is_waiting || is_asked_to_end {
            Look::Wait
        } else {
            Look::Overdue(living)
        }
    }
}

/// What to say of processes that go on, once the lock is released.
pub fn going_on(living: &str) -> String {
    let go = if living.starts_with("1 ") {
        "goes"
    } else {
        "go"
    };
    format!("{living} {go} on without the lock; see --leftovers")
}

/// How many processes of the group run, or are zombies that are our children. `None` if /proc shows
/// no process of the group, because /proc may hide other users' processes.
fn living_count(group: Pid) -> Option<usize> {
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
