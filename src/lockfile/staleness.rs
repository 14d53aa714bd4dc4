//! Whether a lock is stale, from its file and from what is known of this host (sema-lockfile(5),
//! STALE LOCKS). Pure.

use std::time::Duration;

use super::record::Record;
use crate::sys::process::Process;

/// The most that clocks differ, in seconds. A later timestamp is from a wrong clock.
const CLOCK_TOLERANCE: u64 = 60;

/// The most, in seconds, by which the start of a process can seem later than its timestamp.
const START_TOLERANCE: u64 = 2;

/// When a lock counts as stale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StaleRule {
    /// The lock is older than the timeout, and its holder is not provably alive.
    #[default]
    AgeAndLiveness,
    /// The lock is older than the timeout, even if its holder is alive, unless a process has the
    /// file locked.
    Age,
}

/// Whether the holder of a lock is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alive {
    /// It is, provably.
    Yes,
    /// It is not, provably.
    No,
    /// This host cannot tell: the holder is of another host or container, or the file does not say.
    #[default]
    Unknown,
}

/// Which host and container a process number belongs to. `None` for what is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HostId {
    pub(super) host: Option<String>,
    pub(super) boot: Option<String>,
    pub(super) pid_namespace: Option<String>,
}

/// What is known of the host that judges.
pub(super) trait Host {
    /// Seconds since 1970, by the clock of the system.
    fn now(&self) -> u64;
    /// Seconds since 1970, by the clock of the file system.
    fn file_system_now(&self) -> Option<u64>;
    /// When this kernel was booted, in seconds since 1970.
    fn booted_at(&self) -> Option<u64>;
    /// The process with this number on this host.
    fn process(&self, pid: u32) -> Option<Process>;
}

/// Whether another process has a lock file locked by flock(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flock {
    /// No other process has it locked; after an attempt to lock it, this process has.
    Ours,
    /// Another process has it locked by flock(2), but not by fcntl(2), as a holder and a taker do.
    /// After an attempt to lock it, this process has it locked by fcntl(2), so that they cannot.
    Bystanders,
    /// Another process has it locked.
    Theirs,
    /// This process has not tried, or the system refuses such locks.
    Unknown,
}

impl Flock {
    /// The same for a file with this record: its holder may have locked it by flock(2) alone.
    pub(super) fn of_record(self, record: &Record) -> Flock {
        match self {
            Flock::Bystanders if record.is_live && !record.has_read_lock => Flock::Theirs,
            other => other,
        }
    }
}

/// The content of a lock file, and the time of its last change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    /// Seconds since 1970, by the clock of the file system.
    pub(super) modified: u64,
}

/// The judgement on a lock file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Judgement {
    pub(super) alive: Alive,
    /// The lock may be taken over now.
    pub(super) is_stale: bool,
    /// In how many seconds the lock is stale if nothing changes; `None` for never.
    pub(super) stale_in: Option<u64>,
}

/// Judges a lock file by the stale timeout and the rule of the process that asks.
pub(super) fn judge(
    content: &Content,
    flock: Flock,
    timeout: Option<Duration>,
    rule: StaleRule,
    own: &HostId,
    host: &impl Host,
) -> Judgement {
    let record = &Record::parse(&content.bytes);
    let alive = liveness(record, flock, own, host);
    let is_dead_for_sure = is_of_an_earlier_boot(record, own, host)
        || (promises_flock(record, own) && matches!(flock, Flock::Ours | Flock::Bystanders));
    let may_be_dead = alive != Alive::Yes && origin(record, own) != Origin::Unknown;
    // A process that has the file locked is in the way of a takeover, however old the lock is.
    let counts_as_dead = flock != Flock::Theirs && (rule == StaleRule::Age || may_be_dead);
    let stale_in = match timeout {
        Some(_) if is_dead_for_sure => Some(0),
        Some(timeout) if counts_as_dead => {
            let stale_at = timeout.as_secs().saturating_add(1);
            Some(stale_at.saturating_sub(age(content, record, host)))
        }
        _ => None,
    };
    Judgement {
        alive,
        is_stale: stale_in == Some(0),
        stale_in,
    }
}

/// For how many seconds the holder has not confirmed that it holds the lock; 0 if unknown.
fn age(content: &Content, record: &Record, host: &impl Host) -> u64 {
    let now = host.now();
    match record.info() {
        Some(info) if info.timestamp <= now.saturating_add(CLOCK_TOLERANCE) => {
            now.saturating_sub(info.timestamp)
        }
        // Unreadable, or written by a wrong clock: the clock of the file system decides.
        _ => host
            .file_system_now()
            .map_or(0, |now| now.saturating_sub(content.modified)),
    }
}

fn liveness(record: &Record, flock: Flock, own: &HostId, host: &impl Host) -> Alive {
    if is_of_an_earlier_boot(record, own, host) {
        return Alive::No;
    }
    if promises_flock(record, own) {
        match flock {
            Flock::Theirs => return Alive::Yes,
            Flock::Ours | Flock::Bystanders => return Alive::No,
            Flock::Unknown => {}
        }
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
        _ => Alive::No,
    }
}

/// Whether the process is the one in the record, and not a later one with the same number.
fn is_the_one(record: &Record, timestamp: u64, process: &Process) -> bool {
    match (record.start, process.start_ticks) {
        (Some(start), Some(ticks)) => start == ticks,
        (Some(_), None) => true,
        (None, _) => process
            .started_at
            .is_none_or(|started| started <= timestamp.saturating_add(START_TOLERANCE)),
    }
}

/// Whether the holder keeps the file locked while it is alive, and this host can tell.
pub(super) fn promises_flock(record: &Record, own: &HostId) -> bool {
    record.is_live && agreement(&record.boot, &own.boot) == Agreement::Same
}

/// Whether the record is of this host, from before its boot. A later record under our name may be
/// of a clone of this host.
fn is_of_an_earlier_boot(record: &Record, own: &HostId, host: &impl Host) -> bool {
    let is_before = |timestamp| host.booted_at().is_some_and(|boot| timestamp < boot);
    agreement(&record.boot, &own.boot) == Agreement::Other
        && agreement(&record.host, &own.host) == Agreement::Same
        && record.timestamp.is_some_and(is_before)
}

/// Where a record was written, as far as process numbers go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Here,
    Elsewhere,
    /// The record says where, but this host does not know its own identity.
    Unknown,
}

/// Whether the record is of the same kernel, and of the same pid namespace.
fn agreements(record: &Record, own: &HostId) -> (Agreement, Agreement) {
    // Hosts can change and share names. The id of a boot belongs to one kernel.
    let kernel = match agreement(&record.boot, &own.boot) {
        Agreement::Unsaid => agreement(&record.host, &own.host),
        of_boot => of_boot,
    };
    let namespace = match (&record.pid_namespace, &own.pid_namespace) {
        // Where neither the writer nor this process has /proc, as in a chroot, all live by the
        // numbers of one namespace.
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

/// What a record says of a pid namespace that its writer cannot read.
pub(super) const UNKNOWN_PID_NAMESPACE: &str = "unknown";

/// How a field of a record compares with the identity of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agreement {
    Same,
    Other,
    /// The record does not say. It counts as of this host.
    Unsaid,
    /// This host does not know.
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
        booted_at: Option<u64>,
        file_system_now: Option<u64>,
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
                booted_at: Some(BOOTED),
                file_system_now: Some(NOW),
            }
        }
    }

    impl Host for VirtualHost {
        fn now(&self) -> u64 {
            NOW
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

    fn judged_in(
        host: &VirtualHost,
        text: &str,
        modified: u64,
        flock: Flock,
        rule: StaleRule,
    ) -> Judgement {
        let content = Content {
            bytes: text.as_bytes().to_vec(),
            modified,
        };
        let timeout = Some(Duration::from_secs(TIMEOUT));
        judge(&content, flock, timeout, rule, &host.own, host)
    }

    fn judged(text: &str) -> Judgement {
        let rule = StaleRule::AgeAndLiveness;
        judged_in(&VirtualHost::new(), text, NOW, Flock::Ours, rule)
    }

    fn lines(pid: u32, timestamp: u64, more: &str) -> String {
        format!("pid={pid}\ntimestamp={timestamp}\n{more}")
    }

    #[test]
    fn the_rule_as_a_table() {
        use Alive::{No, Unknown, Yes};
        let own = "x-host=h\nx-boot=b\nx-pidns=n\n";
        let with_start = |start: u64| format!("{own}x-start={start}\n");
        let live = format!("{own}x-live=flock\n");
        let rows: &[(&str, u32, u64, String, Alive, bool)] = &[
            (
                "foreign, young, alive",
                PID,
                YOUNG,
                String::new(),
                Yes,
                false,
            ),
            (
                "foreign, young, dead",
                DEAD,
                YOUNG,
                String::new(),
                No,
                false,
            ),
            ("foreign, old, alive", PID, OLD, String::new(), Yes, false),
            ("foreign, old, dead", DEAD, OLD, String::new(), No, true),
            ("a zombie, old", ZOMBIE, OLD, String::new(), No, true),
            ("a zombie, young", ZOMBIE, YOUNG, String::new(), No, false),
            ("hidden, old", HIDDEN, OLD, with_start(START), Yes, false),
            ("pid 0, old", 0, OLD, String::new(), No, true),
            ("pid too great, old", u32::MAX, OLD, String::new(), No, true),
            (
                "started just then",
                PID,
                STARTED - 2,
                String::new(),
                Yes,
                false,
            ),
            (
                "started later: reused",
                PID,
                STARTED - 3,
                String::new(),
                No,
                true,
            ),
            ("ours, same start", PID, OLD, with_start(START), Yes, false),
            (
                "ours, other start",
                PID,
                OLD,
                with_start(START + 1),
                No,
                true,
            ),
            (
                "ours, other start, young",
                PID,
                YOUNG,
                with_start(1),
                No,
                false,
            ),
            (
                "same start, clock was wrong",
                PID,
                5,
                with_start(START),
                Yes,
                false,
            ),
            ("live and not locked", PID, NOW, live.clone(), No, true),
            ("live of the dead", DEAD, NOW, live.clone(), No, true),
            (
                "another host, old",
                PID,
                OLD,
                "x-host=g\n".into(),
                Unknown,
                true,
            ),
            (
                "another host, young",
                DEAD,
                YOUNG,
                "x-host=g\n".into(),
                Unknown,
                false,
            ),
            (
                "another host's boot",
                PID,
                YOUNG,
                "x-host=g\nx-boot=a\n".into(),
                Unknown,
                false,
            ),
            (
                "another host, live",
                PID,
                YOUNG,
                "x-host=g\nx-boot=a\nx-live=flock\n".into(),
                Unknown,
                false,
            ),
            (
                "live, and no boot said",
                DEAD,
                YOUNG,
                "x-host=h\nx-live=flock\n".into(),
                No,
                false,
            ),
            (
                "an earlier boot",
                PID,
                BOOTED - 1,
                "x-host=h\nx-boot=a\n".into(),
                No,
                true,
            ),
            (
                "another boot under our name, since ours",
                PID,
                YOUNG,
                "x-host=h\nx-boot=a\n".into(),
                Unknown,
                false,
            ),
            (
                "our boot under another name",
                PID,
                OLD,
                "x-host=g\nx-boot=b\n".into(),
                Yes,
                false,
            ),
            (
                "our boot under another name, dead",
                DEAD,
                OLD,
                "x-host=g\nx-boot=b\n".into(),
                No,
                true,
            ),
            (
                "a boot of nowhere",
                PID,
                YOUNG,
                "x-boot=a\n".into(),
                Unknown,
                false,
            ),
            (
                "another container, old",
                PID,
                OLD,
                "x-host=h\nx-boot=b\nx-pidns=m\n".into(),
                Unknown,
                true,
            ),
            (
                "another container, young",
                DEAD,
                YOUNG,
                "x-pidns=m\n".into(),
                Unknown,
                false,
            ),
            (
                "live, of an unnamed host",
                PID,
                OLD,
                "x-live=flock\n".into(),
                Yes,
                false,
            ),
            (
                "some other way to live",
                DEAD,
                NOW,
                format!("{own}x-live=fcntl\n"),
                No,
                false,
            ),
        ];
        for (what, pid, timestamp, more, alive, is_stale) in rows {
            let judgement = judged(&lines(*pid, *timestamp, more));
            assert_eq!(
                (judgement.alive, judgement.is_stale),
                (*alive, *is_stale),
                "{what}"
            );
        }
    }

    #[test]
    fn a_lock_that_flock_is_alive_whatever_its_process() {
        let text = lines(DEAD, OLD, "x-host=h\nx-boot=b\nx-live=flock\n");
        let host = VirtualHost::new();
        let rule = StaleRule::AgeAndLiveness;
        let judgement = judged_in(&host, &text, NOW, Flock::Theirs, rule);
        assert_eq!((judgement.alive, judgement.is_stale), (Alive::Yes, false));
        assert_eq!(judgement.stale_in, None);
    }

    #[test]
    fn by_age_alone_a_living_holder_is_stale_too() {
        let host = VirtualHost::new();
        let by_age = |timestamp| {
            let text = lines(PID, timestamp, "");
            judged_in(&host, &text, NOW, Flock::Ours, StaleRule::Age).is_stale
        };
        assert!(by_age(OLD));
        assert!(!by_age(YOUNG));
    }

    #[test]
    fn without_a_timeout_nothing_is_stale() {
        for text in [
            lines(DEAD, 0, ""),
            lines(DEAD, 0, "x-host=h\nx-boot=b\nx-live=flock\n"),
            lines(DEAD, 0, "x-host=h\nx-boot=a\n"),
            String::new(),
        ] {
            let content = Content {
                bytes: text.clone().into_bytes(),
                modified: 0,
            };
            for rule in [StaleRule::Age, StaleRule::AgeAndLiveness] {
                let host = VirtualHost::new();
                let judgement = judge(&content, Flock::Ours, None, rule, &host.own, &host);
                assert!(
                    !judgement.is_stale && judgement.stale_in.is_none(),
                    "{text:?}"
                );
            }
        }
    }

    #[test]
    fn an_unreadable_file_is_as_old_as_the_file_system_says() {
        for text in ["", "pid=5\n", "pid=99999999999\ntimestamp=1\n"] {
            let at = |modified, file_system_now| {
                let host = VirtualHost {
                    file_system_now: Some(file_system_now),
                    ..VirtualHost::new()
                };
                let rule = StaleRule::AgeAndLiveness;
                judged_in(&host, text, modified, Flock::Ours, rule).is_stale
            };
            assert!(at(OLD, NOW), "{text:?}");
            assert!(!at(YOUNG, NOW), "{text:?}");
            // The clock of the system does not matter.
            assert!(!at(OLD, OLD + 5), "{text:?}");
            assert!(at(5 * NOW, 6 * NOW), "{text:?}");
        }
    }

    #[test]
    fn a_timestamp_from_the_future_is_as_old_as_the_file() {
        let stale = |timestamp, modified| {
            let text = lines(DEAD, timestamp, "");
            let rule = StaleRule::AgeAndLiveness;
            judged_in(&VirtualHost::new(), &text, modified, Flock::Ours, rule).is_stale
        };
        assert!(stale(NOW + 61, OLD));
        assert!(!stale(NOW + 61, YOUNG));
        // Clocks may differ a little: the lock is young.
        assert!(!stale(NOW + 60, OLD));
        assert!(stale(u64::MAX, OLD));
    }

    #[test]
    fn a_lock_that_cannot_be_judged_is_not_stale() {
        let stale_in = |host: &VirtualHost, text: &str, modified| {
            let rule = StaleRule::AgeAndLiveness;
            let judgement = judged_in(host, text, modified, Flock::Ours, rule);
            assert_eq!(judgement.is_stale, judgement.stale_in == Some(0), "{text}");
            judgement.stale_in
        };
        let known = VirtualHost::new();
        let mut nowhere = VirtualHost::new();
        nowhere.own = HostId::default();
        for line in ["x-host=h", "x-boot=b", "x-host=g\nx-boot=b", "x-pidns=n"] {
            let text = lines(DEAD, OLD, &format!("{line}\n"));
            assert_eq!(stale_in(&known, &text, NOW), Some(0), "{line}");
            assert_eq!(stale_in(&nowhere, &text, NOW), None, "{line}");
        }
        // A record of another implementation names no host.
        assert_eq!(stale_in(&nowhere, &lines(DEAD, OLD, ""), NOW), Some(0));
        // Without the time of boot, a lock of another boot is judged by its age.
        let mut timeless = VirtualHost::new();
        timeless.booted_at = None;
        let rebooted = |timestamp| lines(PID, timestamp, "x-host=h\nx-boot=a\n");
        assert_eq!(stale_in(&timeless, &rebooted(YOUNG), NOW), Some(1));
        assert_eq!(stale_in(&timeless, &rebooted(OLD), NOW), Some(0));
        // Without the time of the file system, no file is old.
        let mut clockless = VirtualHost::new();
        clockless.file_system_now = None;
        assert_eq!(stale_in(&known, "", OLD), Some(0));
        assert_eq!(stale_in(&clockless, "", OLD), Some(TIMEOUT + 1));
    }

    #[test]
    fn a_namespace_nobody_can_read_is_one_and_the_same() {
        let rule = StaleRule::AgeAndLiveness;
        let mut host = VirtualHost::new();
        for (own, alive) in [
            (None, [Alive::Yes, Alive::No]),
            (Some("n"), [Alive::Unknown; 2]),
        ] {
            host.own.pid_namespace = own.map(str::to_owned);
            let judged = [PID, DEAD].map(|pid| {
                let text = lines(pid, YOUNG, "x-host=h\nx-pidns=unknown\n");
                judged_in(&host, &text, NOW, Flock::Ours, rule).alive
            });
            assert_eq!(judged, alive, "{own:?}");
        }
    }

    #[test]
    fn a_lock_becomes_stale_when_it_says_so() {
        let of = |text: &str| judged(text).stale_in;
        assert_eq!(of(&lines(DEAD, NOW, "")), Some(TIMEOUT + 1));
        assert_eq!(of(&lines(DEAD, YOUNG, "")), Some(1));
        assert_eq!(of(&lines(DEAD, OLD, "")), Some(0));
        assert_eq!(of(&lines(PID, OLD, "")), None);
        assert_eq!(of(&lines(DEAD, 0, "x-host=h\nx-boot=a\n")), Some(0));
        assert_eq!(of(""), Some(TIMEOUT + 1));
    }

    #[test]
    fn no_timeout_is_too_long_and_no_number_too_great() {
        for timeout in [Duration::ZERO, Duration::MAX, Duration::from_millis(1)] {
            for timestamp in [0, NOW, u64::MAX] {
                for start in [0, u64::MAX] {
                    let text = lines(PID, timestamp, &format!("x-start={start}\n"));
                    let content = Content {
                        bytes: text.into_bytes(),
                        modified: u64::MAX,
                    };
                    for rule in [StaleRule::Age, StaleRule::AgeAndLiveness] {
                        let host = VirtualHost::new();
                        let judgement = judge(
                            &content,
                            Flock::Unknown,
                            Some(timeout),
                            rule,
                            &host.own,
                            &host,
                        );
                        assert!(timeout != Duration::MAX || !judgement.is_stale);
                    }
                }
            }
        }
    }

    #[test]
    fn a_fraction_of_a_second_counts_from_the_next_full_one() {
        let stale = |timestamp| {
            let content = Content {
                bytes: lines(DEAD, timestamp, "").into_bytes(),
                modified: NOW,
            };
            let timeout = Some(Duration::from_millis(250));
            let host = VirtualHost::new();
            let rule = StaleRule::Age;
            judge(&content, Flock::Ours, timeout, rule, &host.own, &host)
        };
        assert!(!stale(NOW).is_stale);
        assert!(stale(NOW - 1).is_stale);
        assert_eq!(stale(NOW).stale_in, Some(1));
    }
}
