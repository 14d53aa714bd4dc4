//! The tests, and what runs them.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{mkfifoat, open, Mode, OFlags, CWD};
use rustix::process::{kill_process, kill_process_group, test_kill_process, Pid, Signal};

use crate::support::group::is_empty;
use crate::support::needs::{has_pidfds, needs, skipped};
use crate::wrapper::{LOCK, LOSS, LOST, NOT_STARTED, WRAPPER};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(30);

macro_rules! tests {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name as fn())),*] };
}

const TESTS: &[(&str, fn())] = tests![
    a_stopped_command_does_not_stop_the_wrapper,
    sigcont_to_the_wrapper_continues_its_command,
    a_command_continued_alone_goes_on,
    a_loss_ends_a_stopped_command,
    a_loss_kills_a_command_that_ignores_sigterm,
    a_daemon_has_time_to_leave_the_group,
    what_leaves_the_group_frees_the_lock_soon,
    leftovers_end_after_a_second_and_are_counted,
    leftovers_that_ignore_sigterm_are_killed,
    a_loss_ends_leftovers_at_once,
    wait_holds_the_lock_until_the_group_is_empty,
    wait_passes_signals_on_to_the_leftovers,
    leave_releases_the_lock_at_once,
    a_command_that_was_never_started_is_told_apart,
    kill_9_of_the_wrapper_ends_the_whole_group,
    kill_9_of_the_wrappers_group_ends_the_whole_group,
    the_guard_ends_a_command_that_left_its_group,
    the_guard_kills_what_ignores_sigterm,
    the_guard_has_nothing_of_the_job,
    a_guard_that_was_killed_is_replaced,
    no_guard_is_left_over,
];

/// Runs the tests that the arguments name, all without arguments. Prints the lines of libtest.
pub fn run(words: &[String]) -> ExitCode {
    let filters: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let is_list = words.iter().any(|word| word == "--list");
    let is_only_ignored = words.iter().any(|word| word == "--ignored");
    let is_wanted =
        |name: &str| filters.is_empty() || filters.iter().any(|part| name.contains(part.as_str()));
    let wanted = TESTS
        .iter()
        .filter(|(name, _)| is_wanted(name) && !is_only_ignored);
    let wanted: Vec<_> = wanted.collect();
    if is_list {
        wanted.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", wanted.len());
    let (next, failed_count) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((name, test)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let is_ok = catch_unwind(AssertUnwindSafe(test)).is_ok();
                    failed_count.fetch_add(usize::from(!is_ok), Ordering::Relaxed);
                    println!("test {name} ... {}", if is_ok { "ok" } else { "FAILED" });
                }
            });
        }
    });
    let failed = failed_count.into_inner();
    let result = if failed == 0 { "ok" } else { "FAILED" };
    let passed = wanted.len() - failed;
    println!("\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored\n");
    ExitCode::from(u8::from(failed > 0))
}

/// A folder with the named pipes of one wrapper, which is killed when dropped, and its group, too.
struct Wrapper {
    folder: tempfile::TempDir,
    lock: OwnedFd,
    child: Child,
    /// Whether `child` starts the wrapper and is not the wrapper.
    command: Option<Pid>,
}

impl Wrapper {
    /// Starts the wrapper in a group of its own: the test is its shell with job control.
    fn start(leftovers: &str, kill_after: Duration, command: &[&str]) -> Wrapper {
        let folder = tempfile::tempdir().expect("a folder");
        for name in [LOCK, LOSS] {
            mkfifoat(CWD, folder.path().join(name), Mode::RWXU).expect("a pipe");
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let lock = open(folder.path().join(LOCK), flags, Mode::empty()).expect("a pipe");
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args([WRAPPER, folder.path().to_str().expect("text"), leftovers])
            .arg(kill_after.as_millis().to_string())
            .args(command)
            .env("DIR", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join("stderr")).expect("a file"))
            .process_group(0)
            .spawn()
            .expect("the wrapper");
        Wrapper {
            folder,
            lock,
            child,
            command: None,
        }
    }

    /// Starts a script, and waits until it has written its number with `$READY`.
    fn script(leftovers: &str, kill_after: Duration, script: &str) -> Wrapper {
        let script = script.replace("$READY", "echo $$ >$DIR/new; mv $DIR/new $DIR/ready");
        let mut wrapper = Wrapper::start(leftovers, kill_after, &["sh", "-c", &script]);
        wrapper.command = Some(wrapper.number("ready"));
        wrapper
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn command(&self) -> Pid {
        self.command.expect("a script")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn touch(&self, name: &str) {
        fs::write(self.file(name), "").expect("a file");
    }

    /// Waits for a process number in a file.
    fn number(&self, name: &str) -> Pid {
        let read = || {
            let text = fs::read_to_string(self.file(name)).ok()?;
            Pid::from_raw(text.trim().parse().ok()?)
        };
        eventually("a process number", || read().is_some());
        read().expect("just read")
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it runs");
    }

    fn lose_the_lock(&self) {
        File::options()
            .write(true)
            .open(self.file(LOSS))
            .expect("a pipe");
    }

    fn is_locked(&self) -> bool {
        let now = Timespec::default();
        let mut polled = [PollFd::new(&self.lock, PollFlags::IN)];
        poll(&mut polled, Some(&now)).expect("a pipe") == 0
    }

    /// The status as a shell has it, once the wrapper has ended.
    fn status(&mut self) -> i32 {
        let mut status = None;
        eventually("the wrapper ends", || {
            status = self.child.try_wait().expect("a child");
            status.is_some()
        });
        let status = status.expect("just set");
        status
            .code()
            .or(status.signal().map(|it| 128 + it))
            .expect("one")
    }

    fn said(&self) -> String {
        fs::read_to_string(self.file("stderr")).expect("a file")
    }

    /// The guard, once the wrapper has started it and it waits.
    fn guard(&self) -> Pid {
        let find = || {
            let number = self.child.id();
            let children = fs::read_to_string(format!("/proc/{number}/task/{number}/children"));
            let children = children.unwrap_or_default();
            let mut numbers = children
                .split_whitespace()
                .map(|it| it.parse().expect("one"));
            numbers.find(|pid: &i32| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm"));
                name.is_ok_and(|name| name == "latch-guard\n")
            })
        };
        eventually("a guard", || find().is_some());
        let guard = Pid::from_raw(find().expect("just found")).expect("a number");
        // It opens its pidfd at its start, and reads then.
        let least = 3 + usize::from(has_pidfds());
        eventually("the guard waits", || {
            state(guard) == Some('S') && target_of(guard) >= least
        });
        guard
    }
}

/// The number of descriptors of a guard: the streams, and the command.
fn target_of(guard: Pid) -> usize {
    let fds = fs::read_dir(format!("/proc/{}/fd", guard.as_raw_nonzero()));
    fds.map_or(0, Iterator::count)
}

impl Drop for Wrapper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(command) = self.command {
            let _ = kill_process_group(command, Signal::KILL);
        }
    }
}

/// A process outside the group, killed when dropped.
struct Stray(Pid);

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "never: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The letter of the state of a process; `None` if it is gone.
fn state(pid: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn has_stopped(pid: Pid) -> bool {
    state(pid) == Some('T')
}

fn is_gone(pid: Pid) -> bool {
    test_kill_process(pid).is_err() || state(pid) == Some('Z')
}

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// Waits in a script until the file `go` is there.
const WAIT: &str = "until [ -e $DIR/go ]; do sleep 0.02; done";

fn a_stopped_command_does_not_stop_the_wrapper() {
    let mut wrapper = Wrapper::script("end", LONG, &format!("$READY; {WAIT}"));
    kill_process(wrapper.command(), Signal::STOP).expect("it runs");
    eventually("it has stopped", || has_stopped(wrapper.command()));
    // The wrapper passes the signal on, and continues the command for it.
    wrapper.signal(Signal::TERM);
    assert_eq!(wrapper.status(), 143);
    assert!(!wrapper.is_locked());
}

fn sigcont_to_the_wrapper_continues_its_command() {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; kill -STOP $$; exit 6");
    eventually("it has stopped", || has_stopped(wrapper.command()));
    assert!(wrapper.is_locked());
    wrapper.signal(Signal::CONT);
    assert_eq!(wrapper.status(), 6);
}

fn a_command_continued_alone_goes_on() {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; kill -STOP $$; exit 6");
    eventually("it has stopped", || has_stopped(wrapper.command()));
    assert!(!has_stopped(wrapper.pid()));
    kill_process(wrapper.command(), Signal::CONT).expect("it is there");
    assert_eq!(wrapper.status(), 6);
}

fn a_loss_ends_a_stopped_command() {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; kill -STOP $$; exit 6");
    eventually("it has stopped", || has_stopped(wrapper.command()));
    wrapper.lose_the_lock();
    assert_eq!(wrapper.status(), i32::from(LOST));
}

fn a_loss_kills_a_command_that_ignores_sigterm() {
    let script = "trap '' TERM; $READY; while :; do sleep 0.1; done";
    let mut wrapper = Wrapper::script("end", SHORT, script);
    wrapper.lose_the_lock();
    assert_eq!(wrapper.status(), i32::from(LOST));
    assert!(is_empty(wrapper.command()));
}

fn a_daemon_has_time_to_leave_the_group() {
    let daemon =
        "sleep 0.05; exec setsid sh -c 'echo $$ >$DIR/new; mv $DIR/new $DIR/daemon; exec sleep 60'";
    let mut wrapper = Wrapper::script("end", LONG, &format!("$READY; ({daemon}) & exit 3"));
    assert_eq!(wrapper.status(), 3);
    let daemon = Stray(wrapper.number("daemon"));
    assert!(!is_gone(daemon.0));
    assert_eq!(wrapper.said(), "");
}

fn what_leaves_the_group_frees_the_lock_soon() {
    let daemon = format!(
        "{WAIT}; exec setsid sh -c 'echo $$ >$DIR/new; mv $DIR/new $DIR/daemon; exec sleep 60'"
    );
    let mut wrapper = Wrapper::script("wait", LONG, &format!("$READY; ({daemon}) & exit 3"));
    eventually("the command has ended", || is_gone(wrapper.command()));
    assert!(wrapper.is_locked());
    wrapper.touch("go");
    assert_eq!(wrapper.status(), 3);
    let daemon = Stray(wrapper.number("daemon"));
    assert!(!is_gone(daemon.0));
}

fn leftovers_end_after_a_second_and_are_counted() {
    let began = Instant::now();
    let mut wrapper = Wrapper::script("end", LONG, "$READY; sleep 60 & sleep 60 & exit 3");
    assert_eq!(wrapper.status(), 3);
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert!(is_empty(wrapper.command()));
    let expected =
        "latch: the command left 2 processes in its group: ending them; see --leftovers\n";
    assert_eq!(wrapper.said(), expected);
}

fn leftovers_that_ignore_sigterm_are_killed() {
    let script = "(trap '' TERM; echo $$ >$DIR/left; exec sleep 60) & until [ -s $DIR/left ]; do sleep 0.02; done; $READY; exit 3";
    let mut wrapper = Wrapper::script("end", SHORT, script);
    assert_eq!(wrapper.status(), 3);
    assert!(is_empty(wrapper.command()));
}

fn a_loss_ends_leftovers_at_once() {
    let mut wrapper = Wrapper::script("wait", LONG, "$READY; sleep 60 & exit 3");
    eventually("the command has ended", || is_gone(wrapper.command()));
    wrapper.lose_the_lock();
    assert_eq!(wrapper.status(), i32::from(LOST));
    assert!(is_empty(wrapper.command()));
}

fn wait_holds_the_lock_until_the_group_is_empty() {
    let script = format!("$READY; ({WAIT}) & exit 3");
    let mut wrapper = Wrapper::script("wait", LONG, &script);
    eventually("the command has ended", || is_gone(wrapper.command()));
    // By default, the leftovers of a command that ended later are at an end by now.
    let mut default = Wrapper::script("end", LONG, &script);
    assert_eq!(default.status(), 3);
    assert!(is_empty(default.command()));
    assert!(wrapper.is_locked());
    assert!(!is_empty(wrapper.command()));
    wrapper.touch("go");
    assert_eq!(wrapper.status(), 3);
    assert_eq!(wrapper.said(), "");
}

fn wait_passes_signals_on_to_the_leftovers() {
    let mut wrapper = Wrapper::script("wait", LONG, "$READY; sleep 60 & exit 3");
    eventually("the command has ended", || is_gone(wrapper.command()));
    wrapper.signal(Signal::TERM);
    assert_eq!(wrapper.status(), 3);
    assert!(is_empty(wrapper.command()));
}

fn leave_releases_the_lock_at_once() {
    let mut wrapper = Wrapper::script("leave", LONG, &format!("$READY; ({WAIT}) & exit 3"));
    assert_eq!(wrapper.status(), 3);
    assert!(!wrapper.is_locked());
    assert!(!is_empty(wrapper.command()), "it goes on");
}

fn a_command_that_was_never_started_is_told_apart() {
    let mut missing = Wrapper::start("end", LONG, &["/nowhere/it"]);
    assert_eq!(missing.status(), i32::from(NOT_STARTED));
    let mut forbidden = Wrapper::start("end", LONG, &["/etc/passwd"]);
    assert_eq!(forbidden.status(), i32::from(NOT_STARTED));
    let mut ran = Wrapper::start("end", LONG, &["sh", "-c", "nosuch"]);
    assert_eq!(ran.status(), 127);
}

/// Kills a wrapper whose command has a child, and waits for the end of both.
fn kill_and_wait(kill: impl Fn(&Wrapper)) {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; sleep 60 & sleep 60");
    let guard = wrapper.guard();
    kill(&wrapper);
    assert_eq!(wrapper.status(), 137);
    eventually("the group is empty", || is_empty(wrapper.command()));
    eventually("the guard has ended", || is_gone(guard));
}

fn kill_9_of_the_wrapper_ends_the_whole_group() {
    kill_and_wait(|wrapper| wrapper.signal(Signal::KILL));
}

fn kill_9_of_the_wrappers_group_ends_the_whole_group() {
    kill_and_wait(|wrapper| kill_process_group(wrapper.pid(), Signal::KILL).expect("it runs"));
}

fn the_guard_ends_a_command_that_left_its_group() {
    // A leader cannot leave its group by setsid, but by a move into the group of another process.
    let script = "import ctypes, os, time
group = os.fork()
if group == 0:
    os.setpgid(0, 0)
    time.sleep(60)
while os.getpgid(group) != group: time.sleep(0.01)
os.setpgid(0, group)
os.kill(group, 9)
ctypes.CDLL(None).prctl(1, 0) # no SIGTERM from the kernel
open(os.environ['DIR'] + '/new', 'w').write(str(os.getpid()))
os.rename(os.environ['DIR'] + '/new', os.environ['DIR'] + '/ready')
time.sleep(60)";
    let python = needs!("python3");
    if !has_pidfds() {
        return skipped(&["pidfds"]);
    }
    let python = python.path().to_str().expect("text");
    let mut wrapper = Wrapper::start("end", LONG, &[python, "-c", script]);
    let command = Stray(wrapper.number("ready"));
    wrapper.guard();
    wrapper.signal(Signal::KILL);
    assert_eq!(wrapper.status(), 137);
    eventually("the command has ended", || is_gone(command.0));
}

fn the_guard_kills_what_ignores_sigterm() {
    let script = "trap '' TERM; $READY; while :; do sleep 0.1; done";
    let mut wrapper = Wrapper::script("end", SHORT, script);
    wrapper.guard();
    wrapper.signal(Signal::KILL);
    assert_eq!(wrapper.status(), 137);
    eventually("the group is empty", || is_empty(wrapper.command()));
}

fn the_guard_has_nothing_of_the_job() {
    let wrapper = Wrapper::script("end", LONG, "$READY; sleep 60");
    let guard = wrapper.guard().as_raw_nonzero();
    let read = |name: &str| {
        let mut text = Vec::new();
        let file = File::open(format!("/proc/{guard}/{name}"));
        file.expect("it runs").read_to_end(&mut text).expect("text");
        String::from_utf8_lossy(&text).into_owned()
    };
    assert_eq!(read("environ"), "");
    assert!(
        read("cmdline").starts_with("latch-guard\0"),
        "{}",
        read("cmdline")
    );
    let at = |name: &str| fs::read_link(format!("/proc/{guard}/{name}")).expect("a link");
    assert_eq!(at("cwd"), Path::new("/"));
    for fd in fs::read_dir(format!("/proc/{guard}/fd")).expect("it runs") {
        let fd = fd.expect("an entry").file_name();
        let to = at(&format!("fd/{}", fd.to_str().expect("a number")));
        let to = to.to_str().expect("text");
        assert!(
            to.starts_with("pipe:") || to.starts_with("anon_inode:[pidfd"),
            "{to}"
        );
    }
    let status = read("status");
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let blocked = line("SigBlk:").expect("a mask").trim();
    // All but SIGKILL and SIGSTOP, and the two signals that the C library keeps to itself.
    let blocked = u64::from_str_radix(blocked, 16).expect("hexadecimal");
    assert_eq!(blocked & 0x7ffb_feff, 0x7ffb_feff, "{blocked:x}");
    assert_eq!(line("NSsid:").map(str::trim), Some(&*guard.to_string()));
}

fn a_guard_that_was_killed_is_replaced() {
    let mut wrapper = Wrapper::script("end", LONG, &format!("$READY; {WAIT}"));
    for _ in 0..3 {
        let guard = wrapper.guard();
        kill_process(guard, Signal::KILL).expect("it runs");
        eventually("the guard has ended", || test_kill_process(guard).is_err());
    }
    eventually("it says so", || {
        wrapper.said().contains("no guard process stays alive")
    });
    wrapper.touch("go");
    assert_eq!(wrapper.status(), 0);
}

fn no_guard_is_left_over() {
    for leftovers in ["end", "leave"] {
        let script = format!("$READY; {WAIT}; sleep 60 & exit 3");
        let mut wrapper = Wrapper::script(leftovers, LONG, &script);
        let guard = wrapper.guard();
        // It cannot end by itself, so it ends only if the wrapper ends it.
        kill_process(guard, Signal::STOP).expect("it runs");
        eventually("the guard has stopped", || has_stopped(guard));
        wrapper.touch("go");
        assert_eq!(wrapper.status(), 3);
        // Fails if it has ended.
        let is_left = kill_process(guard, Signal::KILL).is_ok();
        assert!(!is_left, "{leftovers}");
        assert_eq!(is_empty(wrapper.command()), leftovers == "end");
    }
}
