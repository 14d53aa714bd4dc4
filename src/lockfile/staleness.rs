//! Decides whether a lock is stale, from its file and from what is known of this host
//! (sema-lockfile(5), STALE LOCKS). Pure: no I/O.

use std::time::Duration;

use super::file_system::FileSystem;
use super::record::{is_of_lock_file, Record};
use crate::os::directory::FileId;
use crate::os::moment;
use crate::os::process::Process;

/// The maximum time, in seconds, by which a holder can seem to have started after the timestamp of
/// its lock.
const START_TOLERANCE: u64 = 2;

/// The time between two heartbeats is a third of the stale timeout, but within these bounds.
const SHORTEST_BEAT: Duration = Duration::from_secs(1);
const LONGEST_BEAT: Duration = Duration::from_secs(20 * 60);

/// The time between two heartbeats of a guard, for a stale timeout.
pub(super) fn beat_for(stale_timeout: Option<Duration>) -> Duration {
    stale_timeout.map_or(LONGEST_BEAT, |timeout| {
        (timeout / 3).clamp(SHORTEST_BEAT, LONGEST_BEAT)
    })
}

/// The rule by which a lock counts as stale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StaleRule {
    /// The lock is older than the timeout, and its holder is not provably alive.
    #[default]
    AgeAndLiveness,
    /// The lock is older than the timeout, and no process has the file locked. The holder may be
    /// alive.
    Age,
}

/// Whether the holder of a lock is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alive {
    /// The holder is provably alive.
    Yes,
    /// The holder is provably dead.
    No,
    /// This host cannot tell, because the holder is on another host or in another container, or
    /// because the file does not say enough.
    #[default]
    Unknown,
}

/// The host and the container that a process number belongs to. An unknown part is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HostId {
    pub(super) host: Option<String>,
    pub(super) boot: Option<String>,
    pub(super) pid_namespace: Option<String>,
}

/// What the process that judges a lock knows about its host.
pub(super) trait Host {
    fn id(&self) -> &HostId;
    /// Seconds since 1970, by the clock of the system.
    fn now(&self) -> u64;
    /// Seconds since 1970, by the clock of the file system.
    fn file_system_now(&self) -> Option<u64>;
    /// When this kernel was booted, in seconds since 1970.
    fn booted_at(&self) -> Option<u64>;
    /// Seconds since this kernel was booted.
    fn uptime(&self) -> Option<u64>;
    /// For how many seconds the file has had this content, as far as this process has seen. Does
    /// not rely on a clock that can be set.
    fn unchanged_for(&self, content: &Content) -> u64;
    /// The process with this number on this host.
    fn process(&self, pid: u32) -> Option<Process>;
}

/// Whether another process has a lock file locked by flock(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flock {
    /// No other process has the file locked. If this process has tried to lock the file, it has
    /// succeeded.
    Acquired,
    /// Another process has the file locked, and so holds the lock or is taking it over.
    HeldByOther,
    /// This process has not tried to lock the file, or the system refuses such locks.
    Unknown,
}

/// The content of a lock file, the record in it, and where and when it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    pub(super) record: Box<Record>,
    /// Whether the file is a lock file, and not another program's file.
    pub(super) is_lock_file: bool,
    /// Seconds since 1970, by the clock of the file system.
    pub(super) modified: u64,
    pub(super) file: FileId,
    pub(super) file_system: Option<FileSystem>,
}

impl Content {
    /// Makes the content of a file whose modification time is `modified`.
    pub(super) fn new(
        bytes: Vec<u8>,
        modified: u64,
        file: FileId,
        file_system: Option<FileSystem>,
    ) -> Content {
        let record = Box::new(Record::parse(&bytes));
        Content {
            is_lock_file: is_of_lock_file(&bytes),
            bytes,
            record,
            modified,
            file,
            file_system,
        }
    }
}

/// The judgement on a lock file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Judgement {
    pub(super) alive: Alive,
    /// Whether the recorded process has certainly ended. A child that has inherited its lock on the
    /// file may still keep the holder alive.
    pub(super) has_ended: bool,
    /// Whether the lock may be taken over now.
    pub(super) is_stale: bool,
    /// The number of seconds until the lock becomes stale if nothing changes; `None` if it never
    /// does.
    pub(super) stale_in: Option<u64>,
}

/// Judges a lock file by the stale timeout and the rule of the process that asks.
pub(super) fn judge(
    content: &Content,
    flock: Flock,
    timeout: Option<Duration>,
    rule: StaleRule,
    host: &impl Host,
) -> Judgement {
    let of_process = liveness_of_process(content, timeout, host);
    // A guard has promised to keep the file locked. If the lock would certainly be seen and is not,
    // the guard is dead.
    let alive = match (promise(content, host.id()), flock) {
        (Promise::Decides | Promise::Supports, Flock::HeldByOther) => Alive::Yes,
        (Promise::Decides, Flock::Acquired) => Alive::No,
        _ => of_process,
    };
    let is_dead_for_sure = alive == Alive::No && is_death_certain(content, flock, host);
    let may_be_dead = alive != Alive::Yes && origin(&content.record, host.id()) != Origin::Unknown;
    let stale_in = match timeout {
        // The lock cannot be taken over, however old it is.
        _ if flock == Flock::HeldByOther => None,
        Some(_) if is_dead_for_sure => Some(0),
        Some(timeout) if rule == StaleRule::Age || may_be_dead => {
            let stale_at = timeout.as_secs().saturating_add(1);
            let by_age = stale_at.saturating_sub(age(content, host));
            let waits_for_proof = alive == Alive::Unknown
                && origin(&content.record, host.id()) == Origin::Here
                && proves_by_process(content, flock, host);
            Some(if waits_for_proof {
                by_age.min(seconds_until_proof(content, Some(timeout), host))
            } else {
                by_age
            })
        }
        _ => None,
    };
    Judgement {
        alive,
        has_ended: [alive, of_process].contains(&Alive::No),
        is_stale: stale_in == Some(0),
        stale_in,
    }
}

/// How many seconds ago the holder last confirmed the lock; 0 if that is unknown.
fn age(content: &Content, host: &impl Host) -> u64 {
    let age = age_by_clocks(content, host);
    // A reboot of a machine without a clock battery sets the clock back. A lock from before the
    // reboot is at least as old as this boot.
    match host.uptime() {
        Some(uptime) if predates_boot_that_reset_clock(content, host) => age.max(uptime),
        _ => age,
    }
}

fn age_by_clocks(content: &Content, host: &impl Host) -> u64 {
    let (record, now) = (&content.record, host.now());
    if let Some(info) = record.info() {
        if info.timestamp <= now.saturating_add(moment::TOLERANCE.as_secs()) {
            return now.saturating_sub(info.timestamp);
        }
    }
    // If the timestamp is unreadable or from a wrong clock, the clock of the file system decides.
    match host.file_system_now() {
        None => 0,
        Some(now) if content.modified <= now.saturating_add(moment::TOLERANCE.as_secs()) => {
            now.saturating_sub(content.modified)
        }
        Some(_) => host.unchanged_for(content),
    }
}

/// Whether a host with this host's name wrote the record before this host's latest boot, although
/// the clock does not show it: the clock is behind the record, or has never been set since.
fn predates_boot_that_reset_clock(content: &Content, host: &impl Host) -> bool {
    let survives = content.file_system.is_some_and(FileSystem::survives_reboot);
    let (record, own) = (&content.record, host.id());
    survives
        && agreement(&record.boot, &own.boot) == Agreement::Other
        && agreement(&record.host, &own.host) == Agreement::Same
        && (record.timestamp.is_some_and(|time| time > host.now())
            || host
                .booted_at()
                .is_some_and(|time| time < moment::EARLIEST.as_secs()))
}

/// In how many seconds it will be certain that a guard has ended whose process does not exist; 0 if
/// it is certain now. For guards whose lock on the file may be invisible to this process.
///
/// A missing process alone proves nothing. A virtual machine that was restored from a snapshot has
/// the boot id and the process numbers of another one that is still running: the guard may run
/// there, and then only its heartbeat shows it. The heartbeat also sets the file's time, which does
/// not depend on the clock of the guard's machine.
fn seconds_until_proof(content: &Content, timeout: Option<Duration>, host: &impl Host) -> u64 {
    let beats = 2 * beat_for(timeout);
    let proves_at = beats.as_secs() + 1;
    let now = host.file_system_now();
    let age_of_file = now.map_or(0, |now| now.saturating_sub(content.modified));
    proves_at.saturating_sub(age(content, host).min(age_of_file))
}

/// Whether the recorded process is alive. It is dead if this host was booted after the record.
/// Otherwise, it must be one of this host whose number means the same here. If there is no such
/// process, or another one, it is dead. But the heartbeat of a guard can still say that it may be a
/// process of another machine with our identity.
fn liveness_of_process(content: &Content, timeout: Option<Duration>, host: &impl Host) -> Alive {
    let (record, own) = (&content.record, host.id());
    if is_of_an_earlier_boot(record, host) {
        return Alive::No;
    }
    let Some(info) = record
        .info()
        .filter(|_| origin(record, own) == Origin::Here)
    else {
        return Alive::Unknown;
    };
    match host.process(info.pid) {
        Some(process) if !process.is_zombie && is_the_one(record, info.timestamp, &process) => {
            Alive::Yes
        }
        _ if promise(content, own) == Promise::Supports
            && seconds_until_proof(content, timeout, host) > 0 =>
        {
            Alive::Unknown
        }
        _ => Alive::No,
    }
}

/// Whether a holder that seems dead is certainly dead, so that the lock is stale at any age.
fn is_death_certain(content: &Content, flock: Flock, host: &impl Host) -> bool {
    match promise(content, host.id()) {
        Promise::Decides if flock == Flock::Acquired => true,
        _ if proves_by_process(content, flock, host) => true,
        _ => is_of_an_earlier_boot(&content.record, host),
    }
}

/// Whether the end of the guard's process, which [`judge`] looks up, makes the lock stale at any
/// age: the guard's lock on the file may be invisible to this process.
fn proves_by_process(content: &Content, flock: Flock, host: &impl Host) -> bool {
    let (record, own) = (&content.record, host.id());
    let is_of_same_namespace = record.boot.is_some()
        && record.boot == own.boot
        && record.pid_namespace == own.pid_namespace;
    promise(content, own) == Promise::Supports && flock == Flock::Acquired && is_of_same_namespace
}

/// Whether the process is the one in the record, and not a later process with the same number.
fn is_the_one(record: &Record, timestamp: u64, process: &Process) -> bool {
    match (record.start, process.start_ticks) {
        (Some(start), Some(ticks)) => start == ticks,
        (Some(_), None) => true,
        (None, _) => process
            .started_at
            .is_none_or(|started| started <= timestamp.saturating_add(START_TOLERANCE)),
    }
}

/// What the lock on a file says about the guard that wrote its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Promise {
    /// Nothing: the process that wrote the record did not promise to keep the file locked, or runs
    /// under another kernel.
    None,
    /// If the file is locked, the guard is alive. If the file seems to be unlocked, the guard may
    /// still be alive: this process may reach the file through another file system, which does not
    /// show the guard's lock.
    Supports,
    /// The guard is alive for as long as the file is locked, and no longer.
    Decides,
}

/// What the lock on this file says about its guard.
pub(super) fn promise(content: &Content, own: &HostId) -> Promise {
    let Content {
        record,
        file_system,
        ..
    } = content;
    let is_of_our_boot = agreement(&record.boot, &own.boot) == Agreement::Same;
    let here = file_system.filter(|here| here.has_single_kernel());
    let is_same_way = match (&record.file_system, here) {
        (Some(theirs), Some(here)) => *theirs == here.to_string(),
        // An older release of this library does not name the file system.
        (None, Some(_)) => is_of_our_boot,
        (_, None) => false,
    };
    if record.is_live && is_same_way {
        Promise::Decides
    } else if record.is_live && is_of_our_boot {
        Promise::Supports
    } else {
        Promise::None
    }
}

/// Whether this host wrote the record before its current boot. A record with our host name that is
/// newer than that boot may come from a cloned machine.
fn is_of_an_earlier_boot(record: &Record, host: &impl Host) -> bool {
    let is_before = |timestamp| host.booted_at().is_some_and(|boot| timestamp < boot);
    let own = host.id();
    agreement(&record.boot, &own.boot) == Agreement::Other
        && agreement(&record.host, &own.host) == Agreement::Same
        && record.timestamp.is_some_and(is_before)
}

/// Where a record was written, which decides what its process number means here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Here,
    Elsewhere,
    /// The record names a place, but this host does not know its own identity.
    Unknown,
}

/// How the kernel and the pid namespace of the record compare with those of this process.
fn agreements(record: &Record, own: &HostId) -> (Agreement, Agreement) {
    // A host can change its name, and two hosts can have the same name. A boot id belongs to one
    // kernel.
    let kernel = match agreement(&record.boot, &own.boot) {
        Agreement::Unsaid => agreement(&record.host, &own.host),
        of_boot => of_boot,
    };
    let namespace = match (&record.pid_namespace, &own.pid_namespace) {
        // If neither the writer nor this process has /proc, as in a chroot, they count as members
        // of the same pid namespace.
        (Some(theirs), None) if theirs == UNKNOWN_PID_NAMESPACE => Agreement::Unsaid,
        (theirs, ours) => agreement(theirs, ours),
    };
    (kernel, namespace)
}

/// Whether a process of another host or another pid namespace wrote the record.
pub(super) fn is_of_elsewhere(record: &Record, own: &HostId) -> bool {
    let (kernel, namespace) = agreements(record, own);
    kernel == Agreement::Other || namespace == Agreement::Other
}

fn origin(record: &Record, own: &HostId) -> Origin {
    match agreements(record, own) {
        (Agreement::Unknown, _) => Origin::Unknown,
        (Agreement::Other, _) | (_, Agreement::Other) => Origin::Elsewhere,
        (_, Agreement::Unknown) => Origin::Unknown,
        _ => Origin::Here,
    }
}

/// The value of a record's pid namespace if the writer could not read its own.
pub(super) const UNKNOWN_PID_NAMESPACE: &str = "unknown";

/// How a field of a record compares with the identity of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agreement {
    Same,
    Other,
    /// The record does not have the field, so it counts as written on this host.
    Unsaid,
    /// This host does not know its own value.
    Unknown,
}

fn agreement(theirs: &Option<String>, ours: &Option<String>) -> Agreement {
    match (theirs, ours) {
        (None, _) => Agreement::Unsaid,
        (Some(_), None) => Agreement::Unknown,
        (Some(theirs), Some(ours)) if theirs == ours => Agreement::Same,
        (Some(_), Some(_)) => Agreement::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 2_000_000_000;
    const TIMEOUT: u64 = 3600;
    const OLD: u64 = NOW - TIMEOUT - 1;
    const YOUNG: u64 = NOW - TIMEOUT;
    const PID: u32 = 100;
    const ZOMBIE: u32 = 101;
    /// A process of another user, whose /proc is hidden.
    const HIDDEN: u32 = 102;
    const DEAD: u32 = 103;
    /// The start of the processes, in ticks of 1/100 s; boot was at `NOW - 10_000`.
    const START: u64 = 100 * 1000;
    const STARTED: u64 = NOW - 9000;
    const BOOTED: u64 = NOW - 10_000;

    struct VirtualHost {
        own: HostId,
        now: u64,
        booted_at: Option<u64>,
        file_system_now: Option<u64>,
        uptime: Option<u64>,
        unchanged_for: u64,
        // How it judges a file, and where that is.
        timeout: Option<Duration>,
        rule: StaleRule,
        flock: Flock,
        file_system: Option<FileSystem>,
        modified: u64,
    }

    impl VirtualHost {
        fn new() -> VirtualHost {
            let text = |text: &str| Some(text.to_owned());
            VirtualHost {
                own: HostId {
                    host: text("h"),
                    boot: text("b"),
                    pid_namespace: text("n"),
                },
                now: NOW,
                booted_at: Some(BOOTED),
                file_system_now: Some(NOW),
                uptime: Some(NOW - BOOTED),
                unchanged_for: 0,
                timeout: Some(Duration::from_secs(TIMEOUT)),
                rule: StaleRule::AgeAndLiveness,
                flock: Flock::Acquired,
                file_system: Some(FileSystem::of_type("ext4", 7)),
                modified: NOW,
            }
        }

        /// Sets what a word of a row says.
        fn set(&mut self, word: &str) {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            match name {
                "locked" => self.flock = Flock::HeldByOther,
                "untried" => self.flock = Flock::Unknown,
                "by-age" => self.rule = StaleRule::Age,
                "timeout-ms" => self.timeout = Some(Duration::from_millis(number(value))),
                "on" => self.file_system = Some(FileSystem::of_type(value, 7)),
                "file" => self.modified = number(value),
                "seen" => self.unchanged_for = number(value),
                "fs-now" => self.file_system_now = optional(value),
                "booted" => self.booted_at = optional(value),
                "uptime" => self.uptime = optional(value),
                // The clocks began at 1970 with the boot, which was 100 seconds ago.
                "reset" => {
                    (self.now, self.file_system_now) = (100, Some(100));
                    (self.booted_at, self.uptime) = (Some(0), Some(100));
                }
                "nowhere" => self.own = HostId::default(),
                "no-pidns" => self.own.pid_namespace = None,
                other => panic!("{other}"),
            }
        }

        fn judged(&self, text: &str) -> Judgement {
            let bytes = text.as_bytes().to_vec();
            let file = FileId::of_model(0, 0);
            let content = Content::new(bytes, self.modified, file, self.file_system);
            judge(&content, self.flock, self.timeout, self.rule, self)
        }
    }

    impl Host for VirtualHost {
        fn id(&self) -> &HostId {
            &self.own
        }

        fn uptime(&self) -> Option<u64> {
            self.uptime
        }

        fn unchanged_for(&self, _: &Content) -> u64 {
            self.unchanged_for
        }

        fn now(&self) -> u64 {
            self.now
        }

        fn file_system_now(&self) -> Option<u64> {
            self.file_system_now
        }

        fn booted_at(&self) -> Option<u64> {
            self.booted_at
        }

        fn process(&self, pid: u32) -> Option<Process> {
            let start_ticks = (pid != HIDDEN).then_some(START);
            [PID, ZOMBIE, HIDDEN].contains(&pid).then_some(Process {
                is_zombie: pid == ZOMBIE,
                start_ticks,
                started_at: start_ticks.map(|ticks| BOOTED + ticks / 100),
            })
        }
    }

    fn lines(pid: u32, timestamp: u64, more: &str) -> String {
        format!("pid={pid}\ntimestamp={timestamp}\n{more}")
    }

    /// A row: the process, the time of the grant, the rest of the record, the judgement, and what
    /// differs. Otherwise the file was just written on this host, and no process has locked it.
    /// `own` is this host, this boot and this PID namespace; `here` and `there` are a process of
    /// these and of others. `in` is the number of seconds until the lock is stale. What stands
    /// behind `with` differs in all rows up to the next `with`.
    const RULE: &str = "
        foreign, young, alive           | PID    | YOUNG  |               | alive
        foreign, young, dead            | DEAD   | YOUNG  |               | dead
        foreign, old, alive             | PID    | OLD    |               | alive
        foreign, old, dead              | DEAD   | OLD    |               | dead, stale
        a zombie, old                   | ZOMBIE | OLD    |               | dead, stale
        a zombie, young                 | ZOMBIE | YOUNG  |               | dead
        hidden, old                     | HIDDEN | OLD    | own start=100000 | alive
        pid 0, old                      | 0      | OLD    |               | dead, stale
        pid too great, old              | MAX    | OLD    |               | dead, stale
        started just then               | PID    | BEFORE |               | alive
        started later: reused           | PID    | REUSED |               | dead, stale
        ours, same start                | PID    | OLD    | own start=100000 | alive
        ours, other start               | PID    | OLD    | own start=100001 | dead, stale
        ours, other start, young        | PID    | YOUNG  | own start=1   | dead
        same start, clock was wrong     | PID    | 5      | own start=100000 | alive
        live and not locked             | PID    | NOW    | own live=flock | dead, stale
        live of the dead                | DEAD   | NOW    | own live=flock | dead, stale
        some other way to live          | DEAD   | NOW    | own live=fcntl | dead
        live, and no boot said          | DEAD   | YOUNG  | host=h live=flock | dead
        live, of an unnamed host        | PID    | OLD    | live=flock    | alive
        another host, old               | PID    | OLD    | host=g        | unknown, stale
        another host, young             | DEAD   | YOUNG  | host=g        | unknown
        another host's boot             | PID    | YOUNG  | host=g boot=a | unknown
        another host, live              | PID    | YOUNG  | host=g boot=a live=flock | unknown
        an earlier boot                 | PID    | EARLIER  | host=h boot=a | dead, stale
        another boot as ours began      | PID    | BOOTED | host=h boot=a | unknown, stale
        another boot after ours began   | PID    | YOUNG  | host=h boot=a | unknown
        our boot under another name     | PID    | OLD    | host=g boot=b | alive
        the same, dead                  | DEAD   | OLD    | host=g boot=b | dead, stale
        a boot of nowhere               | PID    | YOUNG  | boot=a        | unknown
        another container, old          | PID    | OLD    | host=h boot=b pidns=m | unknown, stale
        another container, young        | DEAD   | YOUNG  | pidns=m       | unknown
        with on=ext4
        the same way        | PID  | NOW | here fs=ext4:7 live          | dead, stale
        container           | PID  | NOW | there fs=ext4:7 live         | dead, stale
        older release       | PID  | NOW | here live                    | dead, stale
        older, other boot   | PID  | NOW | there live                   | unknown
        other id            | PID  | NOW | here fs=ext4:8 live          | alive
        other type          | PID  | NOW | here fs=overlay:7 live       | alive
        other, dead         | DEAD | NOW | here fs=overlay:7 live       | unknown
        other, boot         | DEAD | NOW | there fs=xfs:7 live          | unknown
        other, namespace    | DEAD | NOW | boot=b pidns=m fs=xfs:7 live | unknown
        other, no namespace | DEAD | NOW | boot=b fs=xfs:7 live         | unknown
        FUSE, alive         | PID  | NOW | here fuse live               | alive       | on=fuse
        FUSE, dead          | DEAD | NOW | here fuse live               | unknown     | on=fuse
        FUSE, older release | PID  | NOW | here live                    | alive       | on=fuse
        FUSE, older, dead   | DEAD | NOW | here live                    | unknown     | on=fuse
        young, for a second    | DEAD | YOUNG |                       | dead, in 1
        just granted           | DEAD | NOW   |                       | dead, in 3601
        of the living          | PID  | OLD   |                       | alive, never
        no time said           | PID  | 0     | boot=a fs=ext4:7 live | dead, stale
        time ahead             | PID  | AHEAD | boot=a fs=ext4:7 live | dead, stale
        namespace it could see | DEAD | YOUNG | host=h pidns=unknown  | unknown
        with no-pidns
        none can see one, alive | PID  | YOUNG | host=h pidns=unknown | alive
        none can see one, dead  | DEAD | YOUNG | host=h pidns=unknown | dead
        with locked
        no time said | PID  | 0     | boot=a fs=ext4:7 live | alive, never
        time ahead   | PID  | AHEAD | boot=a fs=ext4:7 live | alive, never
        old          | DEAD | OLD   |                       | dead, never
        old, by age  | DEAD | OLD   |                       | dead, never  | by-age
        with file=NOW-3000
        its lock was not tried | DEAD | NOW-3000 | own fs=xfs:7 live | dead, in 601 | untried
        its lock was tried     | DEAD | NOW-3000 | own fs=xfs:7 live | dead, stale
        with booted=
        another boot, not dated | PID | YOUNG | host=h boot=a | unknown, in 1
        the same, old           | PID | OLD   | host=h boot=a | unknown, stale
        with by-age
        old                       | PID  | OLD   |  | alive, stale
        young                     | PID  | YOUNG |  | alive, in 1
        a part of a second, soon  | DEAD | NOW   |  | dead, in 1   | timeout-ms=250
        a part of a second, later | DEAD | NOW-1 |  | dead, stale  | timeout-ms=250
        with on=fuse
        fresh               | DEAD | NOW      | here fuse live | unknown, in 2401
        at two heartbeats   | DEAD | NOW-2400 | here fuse live | unknown, in 1    | file=NOW-2400
        after them          | DEAD | NOW-2401 | here fuse live | dead, stale      | file=NOW-2401
        its clock is behind | DEAD | NOW-2401 | here fuse live | unknown, in 1200 | file=NOW-1
        its file is behind  | DEAD | NOW-1    | here fuse live | unknown, in 2400 | file=NOW-2401
        with untried file=AHEAD
        other boot, by uptime | DEAD | AHEAD | rebooted      | unknown, in 3596 | uptime=5
        other boot, long ago  | DEAD | AHEAD | rebooted      | unknown, stale   | uptime=3601
        an old file           | DEAD | AHEAD | rebooted      | unknown, stale   | uptime=5 file=OLD
        other boot, in memory | DEAD | AHEAD | rebooted      | unknown, in 3601 | on=tmpfs
        other boot, over FUSE | DEAD | AHEAD | rebooted      | unknown, in 3601 | on=fuse
        other host            | DEAD | AHEAD | host=g boot=a | unknown, in 3601
        this boot             | DEAD | AHEAD | host=h boot=b | dead, in 3601
        no boot said          | DEAD | AHEAD | host=h        | dead, in 3601
        with untried reset
        later in its boot   | DEAD | 1100 | rebooted              | unknown, in 3501 | file=1100
        earlier in its boot | DEAD | 95   | rebooted              | unknown, in 3501 | file=95
        this boot           | DEAD | 95   | host=h boot=b pidns=m | unknown, in 3596 | file=95
        this boot, ahead    | DEAD | 105  | host=h boot=b pidns=m | unknown, in 3601 | file=105
        with file=AHEAD
        empty                     | -     | -     |  | unknown, in 3601
        empty, seen for long      | -     | -     |  | unknown, in 1    | seen=3600
        zeros, seen for longer    | ZEROS | -     |  | unknown, stale   | seen=3601
        a record, seen for long   | DEAD  | AHEAD |  | dead, in 1       | seen=3600
        a record, seen for longer | DEAD  | AHEAD |  | dead, stale      | seen=3601
        with file=OLD
        empty                   | -       | -      |  | unknown, stale
        empty, young there      | -       | -      |  | unknown, in 3596 | fs-now=NOW-3596
        empty, no clock         | -       | -      |  | unknown, in 3601 | fs-now=
        empty, both ahead       | -       | -      |  | unknown, stale   | file=AHEAD fs-now=MAX
        only a pid              | PID     | -      |  | unknown, stale
        not a pid               | TOO BIG | 1      |  | unknown, stale
        not a pid, young        | TOO BIG | 1      |  | unknown, in 1    | file=YOUNG
        a minute ahead          | DEAD    | NOW+60 |  | dead, in 3601
        more than that          | DEAD    | NOW+61 |  | dead, stale
        more, a young file      | DEAD    | NOW+61 |  | dead, in 1       | file=YOUNG
        at the end of all times | DEAD    | MAX    |  | dead, stale
        with nowhere
        a host            | DEAD | OLD | host=h        | unknown, never
        a boot            | DEAD | OLD | boot=b        | unknown, never
        a host and a boot | DEAD | OLD | host=g boot=b | unknown, never
        a namespace       | DEAD | OLD | pidns=n       | unknown, never
        no place          | DEAD | OLD |               | dead, stale
    ";

    /// A time or a number of seconds.
    fn number(text: &str) -> u64 {
        match text {
            "NOW" => NOW,
            "MAX" => u64::MAX,
            "YOUNG" => YOUNG,
            "OLD" => OLD,
            "AHEAD" => NOW + 1_000_000,
            "BEFORE" => STARTED - 2,
            "REUSED" => STARTED - 3,
            "BOOTED" => BOOTED,
            "EARLIER" => BOOTED - 1,
            _ => match text.strip_prefix("NOW") {
                Some(signed) => NOW.saturating_add_signed(signed.parse().expect("a number")),
                None => text.parse().expect("a number"),
            },
        }
    }

    fn optional(text: &str) -> Option<u64> {
        (!text.is_empty()).then(|| number(text))
    }

    /// The content of a file, from the first cells of its row.
    fn file(pid: &str, timestamp: &str, more: &str) -> String {
        let pid = match pid {
            "-" => return String::new(),
            "ZEROS" => return "\0".repeat(100),
            "PID" => PID.to_string(),
            "ZOMBIE" => ZOMBIE.to_string(),
            "HIDDEN" => HIDDEN.to_string(),
            "DEAD" => DEAD.to_string(),
            "MAX" => u32::MAX.to_string(),
            "TOO BIG" => "99999999999".to_owned(),
            number => number.to_owned(),
        };
        let timestamp = match timestamp {
            "-" => String::new(),
            time => format!("timestamp={}\n", number(time)),
        };
        let more = more.split_whitespace().map(|word| match word {
            "own" => "x-host=h\nx-boot=b\nx-pidns=n\n".to_owned(),
            "here" => "x-host=h\nx-boot=b\nx-pidns=n\nx-start=100000\n".to_owned(),
            "there" => "x-host=g\nx-boot=a\nx-pidns=m\nx-start=1\n".to_owned(),
            "fuse" => "x-fs=65735546:7\n".to_owned(),
            "live" => "x-live=flock\n".to_owned(),
            "rebooted" => "x-host=h\nx-boot=a\nx-pidns=m\n".to_owned(),
            pair => format!("x-{pair}\n"),
        });
        format!("pid={pid}\n{timestamp}{}", more.collect::<String>())
    }

    #[test]
    fn the_rule_as_a_table() {
        let mut common = "";
        for row in RULE.trim().lines() {
            if let Some(words) = row.trim().strip_prefix("with ") {
                common = words;
                continue;
            }
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [_, pid, timestamp, more, expected, differs @ ..] = &cells[..] else {
                panic!("five cells: {row}");
            };
            let text = file(pid, timestamp, more);
            let mut host = VirtualHost::new();
            let words = [&[common], differs].concat();
            let words = words.iter().flat_map(|cell| cell.split_whitespace());
            words.for_each(|word| host.set(word));
            let judged = host.judged(&text);
            let alive = match judged.alive {
                Alive::Yes => "alive",
                Alive::No => "dead",
                Alive::Unknown => "unknown",
            };
            let (expected_alive, when) = expected.split_once(", ").unwrap_or((expected, ""));
            assert_eq!(alive, expected_alive, "{row}");
            assert_eq!(judged.is_stale, when == "stale", "{row}");
            assert_eq!(judged.is_stale, judged.stale_in == Some(0), "{row}");
            match when.strip_prefix("in ") {
                Some(seconds) => assert_eq!(judged.stale_in, optional(seconds), "{row}"),
                None => assert!(when != "never" || judged.stale_in.is_none(), "{row}"),
            }
            // Neither the locked file of a guard is stale, nor any file without a timeout.
            host.flock = Flock::HeldByOther;
            let is_of_guard = more.contains("live");
            assert!(!is_of_guard || !host.judged(&text).is_stale, "{row}");
            (host.flock, host.timeout) = (Flock::Acquired, None);
            assert_eq!(host.judged(&text).stale_in, None, "{row}");
        }
    }

    #[test]
    fn an_empty_identity_is_unknown() {
        let record = Record::parse(b"x-host=\nx-boot= \nx-pidns=\nx-fs=\n");
        assert_eq!(record, Record::default());
    }

    #[test]
    fn no_timeout_is_too_long_and_no_number_too_great() {
        for timeout in [Duration::ZERO, Duration::MAX, Duration::from_millis(1)] {
            for timestamp in [0, NOW, u64::MAX] {
                for start in [0, u64::MAX] {
                    let text = lines(PID, timestamp, &format!("x-start={start}\n"));
                    for rule in [StaleRule::Age, StaleRule::AgeAndLiveness] {
                        let host = VirtualHost {
                            timeout: Some(timeout),
                            rule,
                            flock: Flock::Unknown,
                            modified: u64::MAX,
                            ..VirtualHost::new()
                        };
                        let judgement = host.judged(&text);
                        assert!(timeout != Duration::MAX || !judgement.is_stale);
                    }
                }
            }
        }
    }
}
