//! Whether a lock is stale: what its file says, held against what is known here and now
//! (sema-lockfile(5), STALE LOCKS). Pure.

use std::time::Duration;

use super::process::Process;
use super::record::Record;

/// A timestamp further ahead than this, in seconds, was not made by our clock.
const CLOCK_TOLERANCE: u64 = 60;

/// A process that was started so many seconds after the timestamp did not write it.
const START_TOLERANCE: u64 = 2;

/// When a lock counts as stale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StaleRule {
    /// It is older than the timeout, and its holder is not provably alive.
    #[default]
    AgeAndLiveness,
    /// It is older than the timeout, whoever holds it.
    Age,
}

/// Whether a lock's holder lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alive {
    /// It does, provably.
    Yes,
    /// It does not, provably.
    No,
    /// It cannot be told from here: another host, another container, or a file that does not say.
    Unknown,
}

/// Where a process is: what its number means depends on that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) host: Option<String>,
    pub(super) boot: Option<String>,
    pub(super) pid_namespace: Option<String>,
}

/// What is known of the world.
pub(super) trait World {
    /// Where we are.
    fn here(&self) -> &Place;
    /// Seconds since 1970, by the system's clock.
    fn now(&self) -> u64;
    /// Seconds since 1970, by the clock that the file's `mtime` comes from.
    fn file_system_now(&self) -> u64;
    /// The process with this number, here.
    fn process(&self, pid: u32) -> Option<Process>;
    /// When something happened that was so many clock ticks after boot, in seconds since 1970.
    fn instant_of(&self, ticks: u64) -> Option<u64>;
}

/// A lock file's content, and when it was last written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    /// Seconds since 1970, by the file system's clock.
    pub(super) modified: u64,
}

/// What a lock file amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Judgement {
    pub(super) alive: Alive,
    /// It may be taken over now, supposing that nobody has it locked by flock(2).
    pub(super) is_stale: bool,
    /// In how many seconds it will be stale if nothing happens to it; `None` for never.
    pub(super) stale_in: Option<u64>,
}

/// Judges a lock file. `is_locked` says whether somebody has it locked by flock(2), if that is known.
pub(super) fn judge(
    content: &Content,
    record: &Record,
    is_locked: Option<bool>,
    timeout: Option<Duration>,
    rule: StaleRule,
    world: &impl World,
) -> Judgement {
    let alive = liveness(record, is_locked, world);
    let Some(timeout) = timeout else {
        return Judgement {
            alive,
            is_stale: false,
            stale_in: None,
        };
    };
    let is_dead_for_sure = is_of_an_earlier_boot(record, world.here())
        || (says_flock(record, world.here()) && is_locked != Some(true));
    let age = age(content, record, world);
    let is_old = Duration::from_secs(age) > timeout;
    // Whoever has it locked is in the way of a takeover, however old it is.
    let counts_as_dead = is_locked != Some(true) && (rule == StaleRule::Age || alive != Alive::Yes);
    let old_in = timeout.as_secs().saturating_add(1).saturating_sub(age);
    Judgement {
        alive,
        is_stale: is_dead_for_sure || (is_old && counts_as_dead),
        stale_in: if is_dead_for_sure {
            Some(0)
        } else {
            counts_as_dead.then_some(old_in)
        },
    }
}

/// For how many seconds nobody has said that the lock is held.
fn age(content: &Content, record: &Record, world: &impl World) -> u64 {
    let now = world.now();
    match record.info() {
        Some(info) if info.timestamp <= now.saturating_add(CLOCK_TOLERANCE) => {
            now.saturating_sub(info.timestamp)
        }
        // Unreadable, or of another clock: then by the file system's.
        _ => world.file_system_now().saturating_sub(content.modified),
    }
}

fn liveness(record: &Record, is_locked: Option<bool>, world: &impl World) -> Alive {
    let here = world.here();
    if is_of_an_earlier_boot(record, here) {
        return Alive::No;
    }
    if says_flock(record, here) {
        match is_locked {
            Some(true) => return Alive::Yes,
            Some(false) => return Alive::No,
            None => {}
        }
    }
    let Some(info) = record.info().filter(|_| is_of_this_place(record, here)) else {
        return Alive::Unknown;
    };
    match world.process(info.pid) {
        Some(process)
            if !process.is_zombie && is_the_one(record, &info.timestamp, &process, world) =>
        {
            Alive::Yes
        }
        _ => Alive::No,
    }
}

/// Whether the process is the one that the record means, and not a later one with its number.
fn is_the_one(record: &Record, timestamp: &u64, process: &Process, world: &impl World) -> bool {
    let Some(ticks) = process.start_ticks else {
        return true;
    };
    match record.start {
        Some(start) => start == ticks,
        None => world
            .instant_of(ticks)
            .is_none_or(|started| started <= timestamp.saturating_add(START_TOLERANCE)),
    }
}

/// Whether the holder promises to have the file locked while it lives, and we can tell.
pub(super) fn says_flock(record: &Record, here: &Place) -> bool {
    record.is_live && record.host.is_some() && record.host == here.host && record.boot == here.boot
}

fn is_of_an_earlier_boot(record: &Record, here: &Place) -> bool {
    match (&record.boot, &here.boot) {
        (Some(then), Some(now)) => then != now && record.host.is_some() && record.host == here.host,
        _ => false,
    }
}

/// Whether the record's process numbers mean to us what they mean to its writer. Whoever says nothing
/// is taken to be here.
fn is_of_this_place(record: &Record, here: &Place) -> bool {
    let agrees =
        |theirs: &Option<String>, ours: &Option<String>| theirs.is_none() || theirs == ours;
    agrees(&record.host, &here.host)
        && agrees(&record.boot, &here.boot)
        && agrees(&record.pid_namespace, &here.pid_namespace)
}
