//! What the kernel tells about processes: whether one is there, since when, and whose it is. No
//! other module reads the stat and status files in /proc.

use std::fmt::Display;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::process;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use rustix::param::clock_ticks_per_second;
use rustix::process::{pidfd_open, test_kill_process, Pid, PidfdFlags};
use rustix::time::{clock_gettime, ClockId};

/// What is known of a process that is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// All its threads have ended, and its parent has not asked how: it does nothing any more.
    pub is_zombie: bool,
    /// When it was started, in clock ticks since boot, if /proc tells that, and tells every process
    /// the same.
    pub start_ticks: Option<u64>,
    /// The same in seconds since 1970.
    pub started_at: Option<u64>,
}

/// Whether a process with this number is there; a zombie is, and so is another user's process. 0
/// and numbers above `i32::MAX` are the numbers of no process.
pub fn exists(pid: u32) -> bool {
    // If this process may not signal it, it is there.
    to_pid(pid).is_some_and(|pid| !matches!(test_kill_process(pid), Err(Errno::SRCH)))
}

/// Whether a process has this number; a zombie has one. The number of a thread other than the first
/// is the number of no process, unless neither pidfds nor /proc can tell.
pub fn is_process(pid: u32) -> bool {
    match end_of(pid) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(_) => exists(pid) && !read(pid, "status").is_some_and(|status| is_thread(pid, &status)),
    }
}

fn is_thread(pid: u32, status: &str) -> bool {
    field(status, "Tgid:").is_some_and(|group| group.parse() != Ok(pid))
}

/// What is known of the process with this number; `None` if there is none. The number of a thread
/// other than the first is the number of no process.
pub fn look_up(pid: u32) -> Option<Process> {
    if !exists(pid) {
        return None;
    }
    // If /proc is not mounted, hides other users' processes, or is that of another pid namespace,
    // nothing more is known of it.
    let Some(status) = read(pid, "status") else {
        return Some(Process::default());
    };
    // The state is that of the first thread. If others run on, they are counted with it.
    let has_ended = field(&status, "State:").is_some_and(|state| state.starts_with(['Z', 'X']));
    let has_threads = field(&status, "Threads:").is_some_and(|count| !matches!(count, "0" | "1"));
    let start_ticks = comparable_start(pid);
    (!is_thread(pid, &status)).then(|| Process {
        is_zombie: has_ended && !has_threads,
        start_ticks,
        started_at: start_ticks.and_then(instant_of),
    })
}

/// Reads a file of a process in /proc; bytes that are not UTF-8 are replaced.
fn read(pid: u32, file: &str) -> Option<String> {
    let content = is_proc_ours().then(|| fs::read(format!("/proc/{pid}/{file}")));
    Some(String::from_utf8_lossy(&content?.ok()?).into_owned())
}

/// Whether /proc numbers the processes as the system calls of this process do. That of another pid
/// namespace tells about other processes.
pub fn is_proc_ours() -> bool {
    fs::read_link("/proc/self")
        .is_ok_and(|own| own.as_os_str() == process::id().to_string().as_str())
}

/// When a process was started, in clock ticks since boot; `None` if the kernel may tell another
/// process another number: in a time namespace, boot is at another time.
pub fn comparable_start(pid: u32) -> Option<u64> {
    let is_comparable = !is_shifted() && (pid == process::id() || !has_shifted_boot(pid)?);
    is_comparable.then(|| start_ticks(pid)).flatten()
}

/// Whether boot may be at another time for this process than for others.
fn is_shifted() -> bool {
    static IS_SHIFTED: OwnFact<bool> = OwnFact(OnceLock::new());
    IS_SHIFTED
        .get_or(|| has_shifted_boot("self"))
        .unwrap_or(true)
}

/// What this process has found out about itself, and need not ask for each grant. A fork has
/// another number, and asks anew.
struct OwnFact<T>(OnceLock<(u32, T)>);

impl<T: Copy> OwnFact<T> {
    /// Without a descriptor to spare, `find` finds nothing, and the next call asks again.
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

/// Whether boot is at another time for the process; `None` if /proc cannot tell for the moment.
fn has_shifted_boot(process: impl Display) -> Option<bool> {
    let offsets = match fs::read_to_string(format!("/proc/{process}/timens_offsets")) {
        Ok(offsets) => offsets,
        // A kernel without time namespaces (before 5.6), or a process that has ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Some(false),
        Err(_) => return None,
    };
    let mut lines = offsets.lines();
    let boot = lines.find_map(|line| line.strip_prefix("boottime"))?;
    let mut offsets = boot.split_ascii_whitespace();
    Some(offsets.any(|offset| offset != "0"))
}

/// The users of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsers {
    pub real: u32,
    pub effective: u32,
    pub saved: u32,
}

/// The users of a process; `None` if it is gone, or /proc cannot tell. The owner of /proc/PID does
/// not tell: it is root for a process that may not be dumped.
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

/// A descriptor that becomes readable when the process has ended. Fails with
/// [`io::ErrorKind::NotFound`] if there is no such process, [`io::ErrorKind::Unsupported`] if the
/// kernel (before 5.3) has no such descriptors, or with any other error of the system.
pub fn end_of(pid: u32) -> io::Result<OwnedFd> {
    let pid = to_pid(pid).ok_or(io::ErrorKind::NotFound)?;
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(descriptor) => Ok(descriptor),
        // A thread's number is INVAL, or NOENT since 6.9.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Err(io::ErrorKind::NotFound.into()),
        Err(Errno::NOSYS | Errno::PERM) => Err(io::ErrorKind::Unsupported.into()),
        Err(error) => Err(error.into()),
    }
}

/// When a process was started, in clock ticks since boot.
pub fn start_ticks(pid: u32) -> Option<u64> {
    static OWN: OwnFact<u64> = OwnFact(OnceLock::new());
    let found = || Some(stat(pid)?.start_ticks);
    match pid == process::id() {
        true => OWN.get_or(found),
        false => found(),
    }
}

/// Fields of /proc/PID/stat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// As proc(5) has it: `Z` is a zombie.
    pub state: char,
    pub parent: i32,
    pub group: i32,
    /// When it was started, in clock ticks since boot.
    pub start_ticks: u64,
}

/// What /proc/PID/stat says of a process; `None` if it is gone, or /proc cannot tell.
pub fn stat(pid: u32) -> Option<ProcessStat> {
    parse_stat(&read(pid, "stat")?)
}

/// The name of a process's program; `None` if it is gone, or /proc cannot tell.
pub fn name(pid: u32) -> Option<String> {
    Some(read(pid, "comm")?.trim_ascii_end().to_owned())
}

fn parse_stat(stat: &str) -> Option<ProcessStat> {
    // The name, in parentheses, may hold anything; the third field comes after its end.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    Some(ProcessStat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
        // The 22nd of all fields; five have been taken.
        start_ticks: fields.nth(22 - 6)?.parse().ok()?,
    })
}

/// Every process that /proc shows; `None` if it is not mounted, or not ours.
pub fn all() -> Option<impl Iterator<Item = u32>> {
    if !is_proc_ours() {
        return None;
    }
    let entries = fs::read_dir("/proc").ok()?;
    Some(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// The number that the kernel gives to every user without a number in this user namespace.
pub fn overflow_user() -> u32 {
    let number = fs::read_to_string("/proc/sys/kernel/overflowuid");
    let number = number.ok().and_then(|text| text.trim().parse().ok());
    number.unwrap_or(65534)
}

/// The user with this number, unless it is the one that the kernel gives to every user without a
/// number in this user namespace.
pub fn known_user(uid: u32) -> Option<u32> {
    if uid != overflow_user() {
        return Some(uid);
    }
    // Where all users have numbers, this one is a user, too.
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    let has_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    has_all.then_some(uid)
}

/// The signals that this process ignores: bit N - 1 stands for signal N. 0 if /proc cannot tell.
pub fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = field(&status, "SigIgn:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    mask.unwrap_or(0)
}

/// When a process was started at the earliest, since the epoch, as this process's clock has it now.
/// It may have started 10 ms later: the kernel cuts its start down to clock ticks.
pub fn earliest_start(pid: u32) -> Option<Duration> {
    let ticks = start_ticks(pid)?;
    let hertz = clock_ticks_per_second().max(1);
    Some(boot()? + Duration::from_millis(ticks.checked_mul(1000)? / hertz))
}

/// The instant `ticks` clock ticks after boot, in seconds since 1970.
fn instant_of(ticks: u64) -> Option<u64> {
    booted_at()?.checked_add(ticks / clock_ticks_per_second().max(1))
}

/// When the system was booted, in seconds since 1970; `None` in a time namespace with another boot.
pub fn booted_at() -> Option<u64> {
    let boot = if is_shifted() { None } else { boot() };
    Some(boot?.as_secs())
}

/// For how many seconds the system has been up; `None` in a time namespace with another boot.
pub fn uptime() -> Option<u64> {
    let since_boot = if is_shifted() {
        None
    } else {
        time_since_boot()
    };
    Some(since_boot?.as_secs())
}

/// The clock that counts from boot, also while the system is suspended.
pub fn time_since_boot() -> Option<Duration> {
    Duration::try_from(clock_gettime(ClockId::Boottime)).ok()
}

/// When the system was booted, since the epoch, as the clocks of this process have it now.
fn boot() -> Option<Duration> {
    // Read first: a delay between the two clocks makes the boot earlier, never later.
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
        let end = end_of(child.id()).expect("a pidfd");
        rustix::event::poll(
            &mut [rustix::event::PollFd::new(
                &end,
                rustix::event::PollFlags::IN,
            )],
            None,
        )
        .expect("the end");
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
                start_ticks: 22,
            };
            assert_eq!(stat, Some(expected), "{name}");
        }
        assert_eq!(parse_stat("7 (cat) S 4 5"), None);
        assert_eq!(parse_stat(""), None);
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
