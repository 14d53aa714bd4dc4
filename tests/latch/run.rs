//! `latch run`: the lock around a command, from the wait for it to its release or its loss.
//! tests/supervise proves what becomes of the command itself.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::reconnecting::{listener, Peer};
use crate::support::latch::{
    fill, is_gone, is_held, latch, output, process_1, signal, started, state, text, wait_as_shell,
    Latch,
};
use crate::support::needs::{needs, skipped};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, program, Daemon, Signal, PATIENCE};
use rustix::process::Pid;

/// Stops a daemon until the value is dropped.
struct StoppedDaemon<'a>(&'a Daemon);

impl StoppedDaemon<'_> {
    fn of(daemon: &Daemon) -> StoppedDaemon<'_> {
        daemon.signal(Signal::STOP);
        StoppedDaemon(daemon)
    }
}

impl Drop for StoppedDaemon<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn lines_of(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn the_lease_is_renewed_for_as_long_as_the_command_runs() {
    fair_test(the_lease_is_renewed_for_as_long_as_the_command_runs_once);
}

fn the_lease_is_renewed_for_as_long_as_the_command_runs_once() {
    let daemon = Daemon::start(&["--default-lease-ttl", "2"]);
    let began = Instant::now();
    let mut child = Latch::start(&mut latch(&daemon, &["run", "k", "--", "sleep", "5"]));
    eventually(PATIENCE, "it is held", || is_held(&daemon, "k"));
    // If the lock were lost, the command would end and the status would be 70.
    eventually(PATIENCE, "the lock is released", || !is_held(&daemon, "k"));
    assert!(began.elapsed() >= Duration::from_secs(5));
    assert_eq!(wait_as_shell(&mut child), Some(0));
}

// ---------------------------------------------------------------------------------------------
// Signals

#[test]
fn kill_9_of_latch_ends_the_command_and_frees_the_lock() {
    fair_test(kill_9_of_latch_ends_the_command_and_frees_the_lock_once);
}

fn kill_9_of_latch_ends_the_command_and_frees_the_lock_once() {
    let daemon = Daemon::start(&[]);
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let script = "eval \"$READY\"; exec sleep 60";
        let (child, command) = started(&daemon, "k", &directory(), &[], script);
        let mut next = daemon.connect();
        next.send("l\nk\n10\n");
        daemon.wait_for_waiters("k", 1);
        let killed_at = Instant::now();
        signal(&child, Signal::KILL);
        assert!(next.line().starts_with("ok "));
        slowest = slowest.max(killed_at.elapsed());
        eventually(PATIENCE, "the command has ended", || {
            matches!(state(command), None | Some('Z'))
        });
    }
    println!("the lock was free {slowest:?} after the kill at the latest");
    in_time!(slowest < Duration::from_millis(500), "{slowest:?}");
}

// ---------------------------------------------------------------------------------------------
// Loss

#[test]
fn a_stopped_server_delays_the_end_by_the_tries_to_release() {
    fair_test(a_stopped_server_delays_the_end_by_the_tries_to_release_once);
}

fn a_stopped_server_delays_the_end_by_the_tries_to_release_once() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let go_on = directory.path().join("go-on");
    let script = format!(
        "eval \"$READY\"; until [ -e {} ]; do sleep 0.02; done; exit 4",
        go_on.display()
    );
    let (mut child, _) = started(&daemon, "k", &directory, &["--lease", "3600"], &script);
    let _standstill = StoppedDaemon::of(&daemon);
    fs::write(&go_on, "").expect("written");
    let ended_at = Instant::now();
    assert_eq!(wait_as_shell(&mut child), Some(4));
    assert!(ended_at.elapsed() > Duration::from_secs(10));
    in_time!(ended_at.elapsed() < Duration::from_secs(28));
}

#[test]
fn a_silent_server_is_a_loss_before_the_lease_ends() {
    fair_test(|| silent_server(4, "10", "exit 3"));
}

/// Of a lease that is long enough, so much is left that even SIGKILL comes in time.
#[test]
fn a_silent_server_has_the_command_killed_before_the_lease_ends() {
    fair_test(|| silent_server(8, "3", ":"));
}

fn silent_server(lease: u32, kill_after: &str, on_term: &str) {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let log = directory.path().join("log");
    let script = format!(
        "trap 'echo TERM >> {}; {on_term}' TERM; eval \"$READY\"; while :; do sleep 0.02; done",
        log.display()
    );
    let options = ["--lease", &lease.to_string(), "--kill-after", kill_after];
    let (mut child, command) = started(&daemon, "k", &directory, &options, &script);
    // Stop just after a renewal, so that none comes between the look and the stop.
    let mut client = daemon.connect();
    let mut ends_at = Instant::now();
    eventually(PATIENCE, "it has just been renewed", || {
        let asked_at = Instant::now();
        let left = client.stats()["locks"][0]["lease_expires_in_s"].as_f64();
        let left = left.expect("a number");
        ends_at = asked_at + Duration::from_secs_f64(left);
        left > f64::from(lease) - 0.2
    });
    let standstill = StoppedDaemon::of(&daemon);
    assert_eq!(wait_as_shell(&mut child), Some(70));
    let over = Instant::now();
    assert!(is_gone(command));
    assert_eq!(lines_of(&log), ["TERM"]);
    println!("over {:?} before the lease", ends_at - over);
    in_time!(over < ends_at, "{:?} too late", over - ends_at);
    drop(standstill);
    eventually(PATIENCE, "the lock is free", || !is_held(&daemon, "k"));
}

/// A frozen group of cgroups with one process. Dropping it thaws and removes the group.
struct Freezer {
    group: PathBuf,
    /// What writes to which file thaw it.
    thaw: (&'static str, &'static str),
}

/// Where such a group can be, and what freezes and thaws it: version 1 of cgroups, both versions at
/// once, and version 2.
const FREEZERS: [(&str, &str, [&str; 2]); 3] = [
    ("freezer", "freezer.state", ["FROZEN", "THAWED"]),
    ("unified", "cgroup.freeze", ["1", "0"]),
    ("", "cgroup.freeze", ["1", "0"]),
];

impl Freezer {
    /// `None` if the system does not allow such a group.
    fn with(pid: Pid) -> Option<Freezer> {
        let freezer = FREEZERS.iter().find_map(|kind| Freezer::of(kind, pid));
        if freezer.is_none() {
            skipped(&["freezer cgroup"]);
        }
        freezer
    }

    fn of(
        &(hierarchy, file, [freeze, thaw]): &(&str, &'static str, [&'static str; 2]),
        pid: Pid,
    ) -> Option<Freezer> {
        let name = format!("latchd-test-{}", std::process::id());
        let group = Path::new("/sys/fs/cgroup").join(hierarchy).join(name);
        fs::create_dir(&group).ok()?;
        let freezer = Freezer {
            group,
            thaw: (file, thaw),
        };
        let number = pid.as_raw_nonzero().to_string();
        let frozen = tell(&freezer.group.join("cgroup.procs"), &number)
            .and_then(|()| tell(&freezer.group.join(file), freeze));
        frozen.ok().map(|()| freezer)
    }
}

/// Writes to a file of the kernel. Where there is none, it makes none.
fn tell(file: &Path, text: &str) -> std::io::Result<()> {
    let mut file = fs::File::options().write(true).open(file)?;
    file.write_all(text.as_bytes())
}

impl Drop for Freezer {
    fn drop(&mut self) {
        // A group with a process cannot be removed: the process moves to the root group.
        let (file, thaw) = self.thaw;
        let _ = tell(&self.group.join(file), thaw);
        let parent = self.group.with_file_name("cgroup.procs");
        for number in lines_of(&self.group.join("cgroup.procs")) {
            let _ = tell(&parent, &number);
        }
        let _ = fs::remove_dir(&self.group);
    }
}

#[test]
fn a_stop_beyond_the_lease_ends_the_command_within_a_second() {
    fair_test(a_stop_beyond_the_lease_ends_the_command_within_a_second_once);
}

fn a_stop_beyond_the_lease_ends_the_command_within_a_second_once() {
    stop_beyond_the_lease(|child| {
        signal(child, Signal::STOP);
        Some(Box::new(move || signal(child, Signal::CONT)))
    });
}

#[test]
fn a_freeze_beyond_the_lease_ends_the_command_within_a_second() {
    fair_test(a_freeze_beyond_the_lease_ends_the_command_within_a_second_once);
}

fn a_freeze_beyond_the_lease_ends_the_command_within_a_second_once() {
    stop_beyond_the_lease(|child| {
        let freezer = Freezer::with(Pid::from_child(child))?;
        Some(Box::new(move || drop(freezer)))
    });
}

/// `stop` stops latch, but not its command, and returns the function that continues it, or `None`
/// if the system does not allow it.
fn stop_beyond_the_lease(stop: impl for<'a> Fn(&'a Latch) -> Option<Box<dyn FnOnce() + 'a>>) {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let log = directory.path().join("log");
    let script = format!(
        "trap 'echo TERM > {}; exit 0' TERM; eval \"$READY\"; while :; do sleep 0.02; done",
        log.display()
    );
    let options = ["--lease", "7", "--kill-after", "1"];
    let (mut child, command) = started(&daemon, "k", &directory, &options, &script);
    let Some(go_on) = stop(&child) else { return };
    daemon.connect().acquire("k", 20);
    assert!(!log.exists());
    let went_on_at = Instant::now();
    go_on();
    let was_told = || lines_of(&log) == ["TERM"];
    eventually(PATIENCE, "the command was told", || {
        was_told() || is_gone(command)
    });
    let told_after = went_on_at.elapsed();
    // On a late machine, SIGKILL follows before the shell has run its trap.
    in_time!(was_told(), "the command was killed before it was told");
    assert_eq!(wait_as_shell(&mut child), Some(70));
    assert!(is_gone(command));
    println!("told after {told_after:?}");
    in_time!(told_after < Duration::from_secs(1), "{told_after:?}");
}

#[test]
fn a_lock_lost_before_the_command_starts_starts_none() {
    let (listener, addr) = listener();
    let directory = directory();
    let ran = directory.path().join("ran").display().to_string();
    // The command inherits that SIGTERM is ignored: it would run, if it were started.
    let script = "trap '' TERM; exec \"$0\" run k --tag '' -- touch \"$1\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, program("latch"), &ran]);
    command.env("LATCH_SERVER", addr.to_string());
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = Latch::start(&mut command);
    let mut stderr = child.stderr.take().expect("piped");
    fill(&stderr);
    let mut server = Peer::accept(&listener);
    server.grant(2);
    // The lease is short for a command that must end before it. To say so takes room on stderr.
    // Until there is, the command does not start; the server renews nothing.
    thread::sleep(Duration::from_millis(2500));
    thread::spawn(move || io::copy(&mut stderr, &mut io::sink()));
    assert_eq!(wait_as_shell(&mut child), Some(70));
    assert!(!Path::new(&ran).exists());
}

// ---------------------------------------------------------------------------------------------
// Environments

#[test]
fn through_the_dynamic_loader_it_fails_before_the_wait() {
    // No loader starts a static program.
    needs!(own_programs);
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let places = ["/lib64", "/lib"].into_iter().flat_map(fs::read_dir);
    let mut files = places.flatten().flatten().map(|entry| entry.path());
    let is_loader = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("ld-linux")
    };
    let Some(loader) = files.find(|path| is_loader(path)) else {
        return skipped(&["ld-linux"]);
    };
    let mut command = Command::new(loader);
    command
        .args([program("latch"), "run", "k", "--", "true"])
        .env("LATCH_SERVER", daemon.addr().to_string());
    let output = output(&mut command);
    assert_eq!(output.status.code(), Some(71));
    assert!(
        text(&output.stderr).contains("start it without the dynamic loader"),
        "{output:?}"
    );
}

#[test]
fn without_proc_it_runs_the_command_all_the_same() {
    let daemon = Daemon::start(&[]);
    // The name that a program is called by says nothing about its file.
    for called in ["exec", "exec -a nothing"] {
        let script = format!("mount -t tmpfs none /proc && {called} latch run k -- sh -c 'exit 5'");
        let Some(mut command) = process_1(&["--mount"]) else {
            return;
        };
        command.env("LATCH_SERVER", daemon.addr().to_string());
        let output = output(command.args(["bash", "-c", &script]));
        assert_eq!(output.status.code(), Some(5), "{output:?}");
    }
}
