//! The guard, and the end of the wrapper by SIGKILL.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use rustix::process::{kill_process, kill_process_group, test_kill_process, Signal};

use crate::fixture::{has_ended, has_stopped, Lock, Stray, Wrapper, LONG, SHORT, WAIT};
use crate::support::group::is_empty;
use crate::support::needs::{has_pidfds, needs, skipped};
use crate::support::{eventually, PATIENCE};
use crate::wrapper::WRAPPER;

crate::tests![
    kill_9_of_the_wrapper_ends_the_whole_group,
    kill_9_of_the_wrappers_group_ends_the_whole_group,
    without_a_guard_the_kernel_ends_the_command,
    the_kernel_spares_a_command_that_inherits_the_lock,
    the_guard_ends_a_command_that_left_its_group,
    the_guard_kills_what_ignores_sigterm,
    the_guard_has_nothing_of_the_job,
    a_guard_that_was_killed_is_replaced,
    no_guard_is_left_over,
];

/// Kills a wrapper whose command has a child, and waits for the end of both.
fn kill_and_wait(kill: impl Fn(&Wrapper)) {
    let mut wrapper = Wrapper::script("end", LONG, "$READY; sleep 60 & sleep 60");
    let guard = wrapper.guard();
    kill(&wrapper);
    assert_eq!(wrapper.status(), 137);
    eventually(PATIENCE, "the group is empty", || {
        is_empty(wrapper.command())
    });
    eventually(PATIENCE, "the guard has ended", || has_ended(guard));
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
    let lock = Lock::new();
    let mut command = lock.command(WRAPPER);
    command.arg(python).args(["-c", script]);
    let mut wrapper = Wrapper::start(lock, &mut command);
    let command = Stray(wrapper.number("ready"));
    wrapper.guard();
    wrapper.signal(Signal::KILL);
    assert_eq!(wrapper.status(), 137);
    eventually(PATIENCE, "the command has ended", || has_ended(command.0));
}

fn the_guard_kills_what_ignores_sigterm() {
    let script = "trap '' TERM; $READY; while :; do sleep 0.1; done";
    let mut wrapper = Wrapper::script("end", SHORT, script);
    wrapper.guard();
    wrapper.signal(Signal::KILL);
    assert_eq!(wrapper.status(), 137);
    eventually(PATIENCE, "the group is empty", || {
        is_empty(wrapper.command())
    });
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
        eventually(PATIENCE, "the guard has ended", || {
            test_kill_process(guard).is_err()
        });
    }
    eventually(PATIENCE, "it says so", || {
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
        eventually(PATIENCE, "the guard has stopped", || has_stopped(guard));
        wrapper.touch("go");
        assert_eq!(wrapper.status(), 3);
        // Fails if it has ended.
        let is_left = kill_process(guard, Signal::KILL).is_ok();
        assert!(!is_left, "{leftovers}");
        assert_eq!(is_empty(wrapper.command()), leftovers == "end");
    }
}

fn without_a_guard_the_kernel_ends_the_command() {
    let script = format!("exec under sh -c '{TELLS}; while :; do sleep 0.02; done'");
    let told = told_without_a_guard(&script, |_| {});
    assert_eq!(told, ["TERM"]);
}

/// The command keeps the lock.
fn the_kernel_spares_a_command_that_inherits_the_lock() {
    let script = format!("INHERIT=1 exec under sh -c '{TELLS}; {WAIT}'");
    let told = told_without_a_guard(&script, |wrapper| wrapper.touch("go"));
    assert_eq!(told, [""; 0]);
}

/// Says that it got SIGTERM, and ends.
const TELLS: &str = "trap \"echo TERM >$DIR/told; exit 0\" TERM; $READY";

/// What the command tells that [`TELLS`], whose wrapper is killed while its guard is stopped.
fn told_without_a_guard(script: &str, end: impl FnOnce(&Wrapper)) -> Vec<String> {
    let mut wrapper = Wrapper::shell(Lock::new(), script);
    let guard = Stray(wrapper.guard());
    kill_process(guard.0, Signal::STOP).expect("it runs");
    eventually(PATIENCE, "the guard has stopped", || has_stopped(guard.0));
    wrapper.signal(Signal::KILL);
    // The kernel sends its signal before the end of the wrapper can be seen.
    assert_eq!(wrapper.status(), 137);
    end(&wrapper);
    wrapper.wait_for_the_end_of_the_command();
    wrapper.lines("told")
}
