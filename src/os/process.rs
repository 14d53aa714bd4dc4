//! Facts about processes: whether a process exists, when it started, and to which user it belongs.
//! No other module reads the stat and status files in /proc.

use std::fmt::Display;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::process;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use rustix::param::clock_ticks_per_second;
use rustix::process::{geteuid, getppid, pidfd_open, test_kill_process, Pid, PidfdFlags};
use rustix::time::{clock_gettime, ClockId};

/// Facts about an existing process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// A zombie whose threads have all exited.
    pub is_zombie: bool,
    /// When the process started, in clock ticks since boot; `None` if /proc does not tell, or if
    /// other processes may see a different value.
    pub start_ticks: Option<u64>,
    /// When the process started, in seconds since 1970; `None` if that is not known.
    pub started_at: Option<u64>,
}

/// Whether a process with this number exists; zombies and other users' processes count. No process
/// has the number 0, or a number above `i32::MAX`.
pub fn exists(pid: u32) -> bool {
    // Any error but ESRCH means that the process exists.
    to_pid(pid).is_some_and(|pid| !matches!(test_kill_process(pid), Err(Errno::SRCH)))
}

/// Whether the number is that of a process, which may be a zombie. `false` for a thread other than
/// the first of its process, unless neither pidfds nor /proc can tell the difference.
pub fn is_process(pid: u32) -> bool {
    match pidfd(pid) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(_) => exists(pid) && !read(pid, "status").is_some_and(|status| is_thread(pid, &status)),
    }
}

/// The kernel's identifier of this boot.
pub fn boot_id() -> io::Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(id.trim().to_owned())
}

fn is_thread(pid: u32, status: &str) -> bool {
    field(status, "Tgid:").is_some_and(|group| group.parse() != Ok(pid))
}

/// Looks up a process; `None` if no process has this number. A thread other than the first of its
/// process is not a process.
pub fn look_up(pid: u32) -> Option<Process> {
    if !exists(pid) {
        return None;
    }
    // The facts are unknown if /proc is not mounted, hides other users' processes, or belongs to
    // another pid namespace.
    let Some(status) = read(pid, "status") else {
        return Some(Process::default());
    };
    // The file shows the state of the first thread. Other threads may still run.
    let has_ended = field(&status, "State:").is_some_and(|state| state.starts_with(['Z', 'X']));
    let has_threads = field(&status, "Threads:").is_some_and(|count| !matches!(count, "0" | "1"));
    let start_ticks = comparable_start(pid);
    (!is_thread(pid, &status)).then(|| Process {
        is_zombie: has_ended && !has_threads,
        start_ticks,
        started_at: start_ticks
            .and_then(|ticks| booted_at()?.checked_add(ticks / clock_ticks_per_second().max(1))),
    })
}

/// Reads a file in /proc/PID, and replaces bytes that are not UTF-8. `None` if /proc belongs to
/// another pid namespace.
fn read(pid: u32, file: &str) -> Option<String> {
    let content = is_proc_ours().then(|| fs::read(format!("/proc/{pid}/{file}")));
    Some(String::from_utf8_lossy(&content?.ok()?).into_owned())
}

/// Whether /proc belongs to our own pid namespace. In another namespace, the same processes have
/// other numbers.
pub fn is_proc_ours() -> bool {
    fs::read_link("/proc/self")
        .is_ok_and(|own| own.as_os_str() == process::id().to_string().as_str())
}

/// When a process started, in clock ticks since boot; `None` if other processes may see a different
/// value, because this process or that one is in a time namespace.
pub fn comparable_start(pid: u32) -> Option<u64> {
    let is_comparable = !is_boot_shifted() && (pid == process::id() || !has_shifted_boot(pid)?);
    is_comparable.then(|| start_ticks(pid)).flatten()
}

/// Whether this process is in a time namespace with a different boot time. Also `true` if /proc
/// cannot tell.
fn is_boot_shifted() -> bool {
    static IS_BOOT_SHIFTED: ProcessFact<bool> = ProcessFact(OnceLock::new());
    IS_BOOT_SHIFTED
        .get_or(|| has_shifted_boot("self"))
        .unwrap_or(true)
}

/// A fact about this process, which is found out only once. A forked process has another process
/// number, so it finds out the fact again.
struct ProcessFact<T>(OnceLock<(u32, T)>);

impl<T: Copy> ProcessFact<T> {
    /// Returns the fact. Calls `find` if the fact is not known yet. If `find` fails, for example
    /// because no descriptor is free, the next call tries again.
    fn get_or(&self, find: impl FnOnce() -> Option<T>) -> Option<T> {
        let own = process::id();
        match self.0.get() {
            Some((of, fact)) if *of == own => Some(*fact),
            _ => {
                let fact = find()?;
                let _ = self.0.set((own, fact));
                Some(fact)
            }
        }
    }
}

/// Whether the process sees a boot time other than the host's; `None` if /proc cannot tell at
/// present.
fn has_shifted_boot(process: impl Display) -> Option<bool> {
    let offsets = match fs::read_to_string(format!("/proc/{process}/timens_offsets")) {
        Ok(offsets) => offsets,
        // The kernel has no time namespaces (before 5.6), or the process has ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Some(false),
        Err(_) => return None,
    };
    let mut lines = offsets.lines();
    let boot = lines.find_map(|line| line.strip_prefix("boottime"))?;
    let mut offsets = boot.split_ascii_whitespace();
    Some(offsets.any(|offset| offset != "0"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsers {
    pub real: u32,
    pub effective: u32,
    pub saved: u32,
}

/// The users of a process; `None` if the process is gone, or if /proc cannot tell. The owner of the
/// directory /proc/PID cannot be used instead, because it is root if the process is not dumpable.
pub fn users(pid: u32) -> Option<ProcessUsers> {
    let status = read(pid, "status")?;
    let mut users = field(&status, "Uid:")?
        .split_ascii_whitespace()
        .map(|user| user.parse().ok());
    Some(ProcessUsers {
        real: users.next()??,
        effective: users.next()??,
        saved: users.next()??,
    })
}

/// Opens a pidfd, which becomes readable when the process ends. Fails with
/// [`io::ErrorKind::NotFound`] if there is no such process, with [`io::ErrorKind::Unsupported`] if
/// pidfds are missing (before Linux 5.3) or forbidden, or with any other error of the system.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = to_pid(pid).ok_or(io::ErrorKind::NotFound)?;
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(descriptor) => Ok(descriptor),
        // The number of a thread gives INVAL, or NOENT since Linux 6.9.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Err(io::ErrorKind::NotFound.into()),
        Err(Errno::NOSYS | Errno::PERM) => Err(io::ErrorKind::Unsupported.into()),
        Err(error) => Err(error.into()),
    }
}

/// When a process started, in clock ticks since boot.
pub fn start_ticks(pid: u32) -> Option<u64> {
    static OWN: ProcessFact<u64> = ProcessFact(OnceLock::new());
    let found = || Some(stat(pid)?.start_ticks);
    if pid == process::id() {
        OWN.get_or(found)
    } else {
        found()
    }
}

/// Fields of /proc/PID/stat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// The letter of the state, as in proc(5): `Z` is a zombie.
    pub state: char,
    pub parent: i32,
    pub group: i32,
    /// A thread of the kernel, which runs no program and has no files open.
    pub is_kernel_thread: bool,
    /// When the process started, in clock ticks since boot.
    pub start_ticks: u64,
}

/// The process numbers of the parent of this process, of its parent, and so on. They end at process
/// 1, at the first process of another pid namespace, or where /proc tells no more.
pub fn ancestors() -> impl Iterator<Item = u32> {
    let number = |parent: Pid| parent.as_raw_nonzero().get().unsigned_abs();
    let parent = getppid().map(number);
    std::iter::successors(parent, |pid| {
        let parent = stat(*pid)?.parent;
        u32::try_from(parent).ok().filter(|parent| *parent > 0)
    })
}

/// Whether the number is that of a kernel thread; `false` if /proc cannot tell.
pub fn is_kernel_thread(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| stat.is_kernel_thread)
}

/// Reads /proc/PID/stat; `None` if the process is gone, or if /proc cannot tell.
pub fn stat(pid: u32) -> Option<ProcessStat> {
    parse_stat(&read(pid, "stat")?)
}

/// The name of the program that the process runs; `None` if the process is gone, or if /proc cannot
/// tell.
pub fn name(pid: u32) -> Option<String> {
    Some(read(pid, "comm")?.trim_ascii_end().to_owned())
}

/// The bit in the flags of /proc/PID/stat that marks a kernel thread.
const PF_KTHREAD: u32 = 0x0020_0000;

fn parse_stat(stat: &str) -> Option<ProcessStat> {
    // The name in parentheses may contain any characters, so the third field comes after the last
    // parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    Some(ProcessStat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
        // The ninth field. The first five have been consumed.
        is_kernel_thread: fields.nth(9 - 6)?.parse::<u32>().ok()? & PF_KTHREAD != 0,
        // The 22nd field. The first nine have been consumed.
        start_ticks: fields.nth(22 - 10)?.parse().ok()?,
    })
}

/// The numbers of all processes in /proc; `None` if /proc is not mounted or belongs to another pid
/// namespace.
pub fn all() -> Option<impl Iterator<Item = u32>> {
    if !is_proc_ours() {
        return None;
    }
    let entries = fs::read_dir("/proc").ok()?;
    Some(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// The kernel's overflow uid, which stands for every user without a number in this user namespace.
pub fn overflow_user() -> u32 {
    let text = fs::read_to_string("/proc/sys/kernel/overflowuid");
    let number = text.ok().and_then(|text| text.trim().parse().ok());
    number.unwrap_or(65534)
}

/// Returns `uid` if it identifies one user; `None` for an overflow uid that stands for all unknown
/// users.
pub fn known_user(uid: u32) -> Option<u32> {
    if uid != overflow_user() {
        return Some(uid);
    }
    // In a user namespace that maps all users, the overflow uid is an ordinary user.
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    let has_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    has_all.then_some(uid)
}

/// Whether two numbers certainly mean the same user. Equal numbers are not enough, because a user
/// namespace shows all unknown users under one number.
pub fn is_same_user(one: u32, other: u32) -> bool {
    one == other && known_user(one).is_some()
}

/// Whether `user` is certainly the user of this process.
pub fn is_own(user: u32) -> bool {
    is_same_user(user, geteuid().as_raw())
}

/// Whether `user` is root, or certainly the user of this process.
pub fn is_own_or_root(user: u32) -> bool {
    user == 0 || is_own(user)
}

/// A mask of the signals that this process ignores: bit N - 1 stands for signal N. The mask is 0 if
/// /proc cannot tell.
pub fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = field(&status, "SigIgn:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    mask.unwrap_or(0)
}

/// Whether a signal is in such a mask.
pub fn is_in(mask: u64, signal: i32) -> bool {
    mask & (1 << (signal - 1)) != 0
}

/// The earliest time, since the epoch, at which a process can have started. The system clock's
/// present setting counts. The process may have started one clock tick later (usually 10 ms),
/// because the kernel rounds down.
pub fn earliest_start(pid: u32) -> Option<Duration> {
    let ticks = start_ticks(pid)?;
    let hertz = clock_ticks_per_second().max(1);
    Some(boot()? + Duration::from_millis(ticks.checked_mul(1000)? / hertz))
}

/// The boot time in seconds since 1970; `None` in a time namespace with a different boot time.
pub fn booted_at() -> Option<u64> {
    let boot = if is_boot_shifted() { None } else { boot() };
    Some(boot?.as_secs())
}

/// The uptime in seconds; `None` in a time namespace with a different boot time.
pub fn uptime() -> Option<u64> {
    let since_boot = if is_boot_shifted() {
        None
    } else {
        time_since_boot()
    };
    Some(since_boot?.as_secs())
}

/// The time since boot, including suspension (CLOCK_BOOTTIME).
pub fn time_since_boot() -> Option<Duration> {
    Duration::try_from(clock_gettime(ClockId::Boottime)).ok()
}

/// The boot time since the epoch, according to the system clock's present setting.
fn boot() -> Option<Duration> {
    // The system clock is read first, so that a delay between the two readings can only make the
    // boot time too early, never too late.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    now.checked_sub(time_since_boot()?)
}

fn to_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{waitid, WaitId, WaitIdOptions};
    use std::process::{Command, Stdio};

    #[test]
    fn what_is_no_process_does_not_exist() {
        for pid in [0, i32::MAX as u32, i32::MAX as u32 + 1, u32::MAX] {
            assert!(!exists(pid), "{pid}");
            assert_eq!(look_up(pid), None, "{pid}");
        }
    }

    #[test]
    fn process_one_exists_for_every_user() {
        assert!(exists(1));
    }

    #[test]
    fn a_zombie_is_there_and_is_known_for_one() {
        let mut child = Command::new("true").spawn().expect("true");
        let id = WaitId::Pid(Pid::from_child(&child));
        waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("the end");
        assert!(exists(child.id()));
        assert!(look_up(child.id()).expect("a process").is_zombie);
        child.wait().expect("its status");
        assert!(!exists(child.id()));
    }

    #[test]
    fn a_process_has_started_before_now_and_after_boot() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .spawn()
            .expect("cat");
        let process = look_up(child.id()).expect("a process");
        let started = process.started_at.expect("an instant");
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .expect("a clock");
        assert!(booted_at().expect("a boot") <= started && started <= now.as_secs() + 2);
        drop(child.stdin.take());
        child.wait().expect("its status");
    }

    #[test]
    fn fields_are_counted_from_the_end_of_the_name() {
        let numbers: Vec<String> = (4..=30).map(|field| field.to_string()).collect();
        for name in ["cat", "a) Z 1 2", "(", "x y"] {
            let stat = parse_stat(&format!("7 ({name}) S {}", numbers.join(" ")));
            let expected = ProcessStat {
                state: 'S',
                parent: 4,
                group: 5,
                is_kernel_thread: false,
                start_ticks: 22,
            };
            assert_eq!(stat, Some(expected), "{name}");
        }
        assert_eq!(parse_stat("7 (cat) S 4 5"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_kernel_thread_is_known_by_its_flags() {
        let stat = |flags: u32| {
            let behind: Vec<String> = (10..=30).map(|field| field.to_string()).collect();
            parse_stat(&format!("2 (x) S 0 0 0 0 -1 {flags} {}", behind.join(" ")))
        };
        for (flags, expected) in [(2_129_984, true), (4_194_560, false)] {
            let stat = stat(flags).expect("a line of /proc/PID/stat");
            assert_eq!((stat.is_kernel_thread, stat.start_ticks), (expected, 22));
        }
        assert!(!is_kernel_thread(std::process::id()));
    }

    #[test]
    fn a_thread_is_no_process() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            sender
                .send(u32::try_from(id).expect("a number"))
                .expect("a listener");
            let _ = stopped.recv();
        });
        let id = receiver.recv().expect("a number");
        assert_eq!(look_up(id), None);
        assert!(exists(id) && !is_process(id));
        assert!(is_process(std::process::id()));
        drop(stop);
        thread.join().expect("the thread");
    }

    #[test]
    fn ones_own_users_are_known() {
        let own = (
            rustix::process::getuid().as_raw(),
            rustix::process::geteuid().as_raw(),
        );
        let users = users(std::process::id()).expect("/proc");
        assert_eq!((users.real, users.effective), own);
    }
}
