//! `latch run`: the lock around a command, from the wait for it to its release or its loss.
//! tests/supervise proves what becomes of the command itself.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::reconnecting::{listener, Peer};
use crate::support::latch::{
    ended, fed, fill, is_gone, is_held, latch, number_in, output, process_1, ready, run, signal,
    started, state, status, text, wait_as_shell, Latch,
};
use crate::support::needs::{needs, skipped};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, program, wait_for_exit, Daemon, Signal, PATIENCE};
use rustix::process::{kill_process, Pid};

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

fn has_stopped(pid: Pid) -> bool {
    state(pid) == Some('T')
}

#[test]
fn a_line_says_that_a_process_goes_on_without_the_lock() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let pid = directory.path().join("pid");
    let script = format!("sleep 60 >/dev/null 2>&1 & echo $! >{}", pid.display());
    for (option, said) in [
        (
            "-v",
            "latch: 1 process goes on without the lock; see --leftovers\n",
        ),
        ("-q", ""),
    ] {
        let output = run(&daemon, &["run", "k", option, "--", "sh", "-c", &script]);
        let pid = number_in(&pid).expect("it runs");
        kill_process(pid, Signal::KILL).expect("it goes on");
        assert_eq!(output.status.code(), Some(0), "{option}");
        assert_eq!(text(&output.stderr), said);
        assert!(!is_held(&daemon, "k"));
    }
}

#[test]
fn the_commands_exit_status_and_streams_pass_through() {
    let daemon = Daemon::start(&[]);
    let script = "cat; echo $LATCH_KEY >&2; exit 7";
    let arguments = ["run", "k", "--", "sh", "-c", script];
    let output = fed(&mut latch(&daemon, &arguments), b"in and out");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(
        (&*output.stdout, &*output.stderr),
        (&b"in and out"[..], &b"k\n"[..])
    );
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn the_words_of_the_command_are_passed_on_unchanged() {
    let daemon = Daemon::start(&[]);
    let words: [&[u8]; 6] = [b"--", b"--help", b"", b"a b", b"\xff\n", b"$HOME"];
    let mut command = latch(&daemon, &["run", "k", "--", "printf", "<%s>"]);
    command.args(words.map(OsStr::from_bytes));
    let expected: Vec<u8> = words
        .iter()
        .flat_map(|word| [b"<", *word, b">"].concat())
        .collect();
    assert_eq!(output(&mut command).stdout, expected);
}

#[test]
fn the_command_finds_key_token_and_fence_in_its_environment() {
    let daemon = Daemon::start(&[]);
    let output = run(
        &daemon,
        &[
            "run",
            "k",
            "--",
            "sh",
            "-c",
            "echo $LATCH_KEY $LATCH_TOKEN $LATCH_FENCE",
        ],
    );
    let output = text(&output.stdout);
    let words: Vec<&str> = output.split_whitespace().collect();
    let [key, token, fence] = words[..] else {
        panic!("{output}")
    };
    assert_eq!(key, "k");
    assert_eq!(crate::support::fence(token).to_string(), fence);
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
fn a_signal_ends_a_wait_which_leaves_the_queue() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let directory = directory();
    let started = directory.path().join("started");
    let command = ["run", "k", "--", "touch", started.to_str().expect("text")];
    let mut child = Latch::start(&mut latch(&daemon, &command));
    daemon.wait_for_waiters("k", 1);
    signal(&child, Signal::TERM);
    let status = wait_for_exit(&mut child, PATIENCE);
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()));
    daemon.wait_for_waiters("k", 0);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert!(!started.exists(), "the command was started after all");
    assert!(!is_held(&daemon, "k"));
}

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

fn a_lost_lock_ends(script: &str, kill_after: &str) {
    let daemon = Daemon::start_alone(&[]);
    let directory = directory();
    let options = ["--kill-after", kill_after];
    let (mut child, command) = started(&daemon, "k", &directory, &options, script);
    drop(daemon);
    assert_eq!(wait_as_shell(&mut child), Some(70), "{script}");
    assert!(is_gone(command), "{script}");
}

#[test]
fn the_shortest_and_the_longest_kill_after_work() {
    thread::scope(|scope| {
        for (kill_after, script) in [
            (
                "0",
                "trap '' TERM; eval \"$READY\"; while :; do sleep 1; done",
            ),
            ("18446744073709551615", "eval \"$READY\"; exec sleep 60"),
        ] {
            scope.spawn(|| a_lost_lock_ends(script, kill_after));
        }
    });
}

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
fn after_a_stop_latch_checks_the_lock_at_once() {
    fair_test(after_a_stop_latch_checks_the_lock_at_once_once);
}

fn after_a_stop_latch_checks_the_lock_at_once_once() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let token = directory.path().join("token");
    let script = format!(
        "echo $LATCH_TOKEN > {}; eval \"$READY\"; exec sleep 60",
        token.display()
    );
    let (mut child, command) = started(&daemon, "k", &directory, &["--lease", "600"], &script);
    signal(&child, Signal::STOP);
    let token = &lines_of(&token)[0];
    assert_eq!(daemon.connect().request("r", "k", token), "ok");
    signal(&child, Signal::CONT);
    // The next renewal is due only in some minutes.
    assert_eq!(wait_as_shell(&mut child), Some(70));
    assert!(is_gone(command));
}

#[test]
fn a_lock_lost_before_the_end_of_the_command_is_reported() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let go_on = directory.path().join("go-on");
    let script = format!(
        "eval \"$READY\"; until [ -e {} ]; do sleep 0.02; done",
        go_on.display()
    );
    let options = ["--lease", "2", "--kill-after", "1"];
    let arguments = [&["run", "k"][..], &options, &["--", "sh", "-c", &script]].concat();
    let mut command = latch(&daemon, &arguments);
    command.stderr(Stdio::piped());
    let (mut child, command) = ready(command, &directory);
    signal(&child, Signal::STOP);
    eventually(PATIENCE, "latch has stopped", || {
        has_stopped(Pid::from_child(&child))
    });
    fs::write(&go_on, "").expect("written");
    eventually(PATIENCE, "the command has ended", || {
        matches!(state(command), None | Some('Z'))
    });
    let mut other = daemon.connect();
    let grant = other.acquire("k", 10);
    assert_eq!(other.request("r", "k", &grant.token), "ok");
    signal(&child, Signal::CONT);
    let (status, said) = ended(&mut child);
    assert_eq!(status, Some(70), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let expected = format!("latch: k at {}: the lock was lost: ", daemon.addr());
    assert!(said.starts_with(&expected), "{said}");
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

#[test]
fn a_refused_release_is_reported() {
    let daemon = Daemon::start(&[]);
    let script = "latch release k $LATCH_TOKEN; exit 4";
    let output = run(&daemon, &["run", "k", "--", "sh", "-c", script]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(70), "{said}");
    let expected = format!(
        "latch: k at {}: the lock was lost: the server refused the request\n",
        daemon.addr()
    );
    assert_eq!(said, expected);
}

#[test]
fn a_lease_too_short_for_kill_after_gives_a_warning() {
    let daemon = Daemon::start(&[]);
    for (options, expected) in [
        (
            ["--lease", "19"],
            "latch: k: the lease of 19 s is less than twice --kill-after: \
                             a command that ignores SIGTERM may outlast it\n",
        ),
        (["--lease", "20"], ""),
        (["--kill-after", "16"], ""),
        (
            ["--kill-after", "17"],
            "latch: k: the lease of 33 s is less than twice --kill-after: \
                                  a command that ignores SIGTERM may outlast it\n",
        ),
    ] {
        let arguments = [&["run", "k"][..], &options, &["--", "echo", "done"]].concat();
        let output = run(&daemon, &arguments);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(text(&output.stderr), expected, "{options:?}");
    }
}

#[test]
fn a_command_that_cannot_start_keeps_no_lock_at_least() {
    let daemon = Daemon::start(&["--max-kept", "10"]);
    let missing = ["run", "k", "--at-least", "60", "--", "/nowhere/it"];
    assert_eq!(status(&daemon, &missing), 127);
    assert!(!is_held(&daemon, "k"));
    let ran = ["run", "k", "--at-least", "60", "--", "sh", "-c", "nosuch"];
    assert_eq!(status(&daemon, &ran), 127);
    assert!(is_held(&daemon, "k"));
}

// ---------------------------------------------------------------------------------------------
// Turns

#[test]
fn fifty_waiters_run_in_the_order_of_their_arrival() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let log = directory.path().join("log");
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let mut children: Vec<Latch> = (0..50)
        .map(|number| {
            let script = format!(
                "echo in {number} >> {0}; sleep 0.01; echo out {number} >> {0}",
                log.display()
            );
            let child = Latch::start(&mut latch(
                &daemon,
                &["run", "k", "--", "sh", "-c", &script],
            ));
            daemon.wait_for_waiters("k", number + 1);
            child
        })
        .collect();
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    for child in &mut children {
        assert_eq!(wait_as_shell(child), Some(0));
    }
    let expected: Vec<String> = (0..50)
        .flat_map(|number| [format!("in {number}"), format!("out {number}")])
        .collect();
    assert_eq!(lines_of(&log), expected);
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

/// What becomes of a command whose lock is released by its token, and what it says.
fn after_a_loss(on_lost: &str) -> (Option<i32>, String) {
    let daemon = Daemon::start_alone(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let said = directory.path().join("said");
    let script = format!(
        "trap 'echo usr1 >{0}; exit 7' USR1; eval \"$READY\"; \
         for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; done; echo end >{0}",
        said.display()
    );
    let options = ["--lease", "4", "--kill-after", "1", "--on-lost", on_lost];
    let (mut child, command) = started(&daemon, "k", &directory, &options, &script);
    let token = token_of(command);
    let mut client = daemon.connect();
    assert_eq!(client.request("r", "k", &token), "ok");
    let status = wait_as_shell(&mut child);
    (status, fs::read_to_string(&said).unwrap_or_default())
}

/// The token of the lock, from the environment of the command under it.
fn token_of(command: Pid) -> String {
    let command = command.as_raw_nonzero();
    let environment = fs::read(format!("/proc/{command}/environ")).expect("it runs");
    let environment = String::from_utf8_lossy(&environment).into_owned();
    let mut variables = environment.split('\0');
    let token = variables.find_map(|variable| variable.strip_prefix("LATCH_TOKEN="));
    token.expect("it is set").to_owned()
}

#[test]
fn the_command_gets_the_signal_of_its_choice_at_a_loss() {
    assert_eq!(after_a_loss("usr1"), (Some(70), "usr1\n".into()));
}

#[test]
fn a_command_may_go_on_after_a_loss() {
    assert_eq!(after_a_loss("ignore"), (Some(0), "end\n".into()));
}

#[test]
fn a_command_under_its_own_lock_is_told_so_or_runs_nested() {
    let daemon = Daemon::start(&[]);
    let nested = |options: &str| {
        let script = format!("latch run k {options} -- echo inside");
        run(&daemon, &["run", "k", "--", "sh", "-c", &script])
    };
    let waiting = nested("");
    assert_eq!(waiting.status.code(), Some(75));
    assert!(text(&waiting.stderr).contains("would wait for itself; see --nested"));
    let inside = nested("--nested");
    assert_eq!(inside.status.code(), Some(0));
    assert_eq!(text(&inside.stdout), "inside\n");
    // A token that holds no more does not count.
    let mut command = latch(
        &daemon,
        &["run", "k", "--nested", "--", "printenv", "LATCH_FENCE"],
    );
    command
        .env("LATCH_KEY", "k")
        .env("LATCH_TOKEN", "0".repeat(32));
    let alone = output(&mut command);
    assert_eq!(alone.status.code(), Some(0));
    assert_ne!(text(&alone.stdout).trim(), "0");
    // Nor does the lock of another key.
    let script = "latch run other -- echo inside";
    let other = run(&daemon, &["run", "k", "--", "sh", "-c", script]);
    assert_eq!(text(&other.stdout), "inside\n");
}

/// The output of `latch INNER` below `latch run k OUTER`.
fn under(daemon: &Daemon, outer: &str, inner: &str) -> std::process::Output {
    let script = format!("latch {inner}");
    let mut arguments = vec!["run", "k"];
    arguments.extend(outer.split_whitespace());
    arguments.extend(["--", "sh", "-c", &script]);
    run(daemon, &arguments)
}

#[test]
fn nested_runs_only_under_a_lock_that_covers_it() {
    let daemon = Daemon::start(&[]);
    let cases = [
        ("", "", 0),
        ("", "--shared", 0),
        ("--shared", "--shared", 0),
        ("--shared", "", 75),
        ("--limit 3 --slots 2", "--limit 3 --slots 2", 0),
        ("--limit 3 --slots 2", "--limit 3", 0),
        ("--limit 3", "--limit 3 --slots 3", 75),
        ("--limit 3", "--limit 5", 76),
        ("--limit 3", "", 76),
        ("", "--limit 3", 76),
    ];
    for (outer, inner, expected) in cases {
        let command = format!("run k {inner} --nested -- echo inside");
        let ended = under(&daemon, outer, &command);
        let seen = (ended.status.code(), text(&ended.stdout) == "inside\n");
        assert_eq!(seen, (Some(expected), expected == 0), "{outer:?} {inner:?}");
    }
}

#[test]
fn nested_does_not_drop_the_time_of_at_least() {
    let daemon = Daemon::start(&[]);
    let ended = under(&daemon, "", "run k --nested --at-least 60 -- echo inside");
    assert_eq!((ended.status.code(), &*text(&ended.stdout)), (Some(64), ""));
    let said = text(&ended.stderr);
    assert!(
        said.contains("--at-least is not for a command that runs"),
        "{said}"
    );
}

#[test]
fn no_command_waits_for_the_lock_under_which_it_runs() {
    let daemon = Daemon::start(&[]);
    let cases = [
        ("", "wait k"),
        ("", "acquire k"),
        ("", "reserve k --for 60"),
        ("", "hold k </dev/null"),
        ("--shared", "wait k"),
        ("--limit 2 --slots 2", "wait k --limit 2"),
        ("--limit 2", "run k --limit 2 --slots 2 -- echo inside"),
    ];
    for (outer, inner) in cases {
        let ended = under(&daemon, outer, inner);
        assert_eq!(ended.status.code(), Some(75), "{outer:?} {inner:?}");
        let said = text(&ended.stderr);
        assert!(said.contains("would wait for itself"), "{said}");
    }
    let free = under(&daemon, "--limit 2", "run k --limit 2 -- echo inside");
    assert_eq!(text(&free.stdout), "inside\n");
}

/// The output of `latch INNER` below `latch run k OUTER` and, between them, `latch run other`.
fn far_under(daemon: &Daemon, outer: &str, inner: &str) -> std::process::Output {
    let inner = format!("run other -- sh -c 'exec latch {inner}'");
    under(daemon, outer, &inner)
}

#[test]
fn no_command_waits_for_a_lock_further_out() {
    let daemon = Daemon::start(&[]);
    let cases = [
        ("", "run k -- echo inside"),
        ("", "run others --and k -- echo inside"),
        ("", "wait k"),
        ("", "acquire k"),
        ("", "reserve k --for 60"),
        ("", "hold k </dev/null"),
        (
            "--limit 3 --slots 2",
            "run k --limit 3 --slots 2 -- echo inside",
        ),
        // One slot further out, and one around the claim.
        (
            "--limit 3",
            "run k --limit 3 -- latch run k --limit 3 --slots 2 -- echo inside",
        ),
    ];
    for (outer, inner) in cases {
        let ended = far_under(&daemon, outer, inner);
        assert_eq!(ended.status.code(), Some(75), "{outer:?} {inner:?}");
        assert_eq!(text(&ended.stdout), "", "{outer:?} {inner:?}");
        let said = text(&ended.stderr);
        assert!(said.contains("would wait for itself"), "{said}");
    }
    let claim = "run k --limit 3 -- echo inside";
    assert_eq!(
        text(&far_under(&daemon, "--limit 3 --slots 2", claim).stdout),
        "inside\n"
    );
}

#[test]
fn nested_runs_under_a_lock_further_out() {
    let daemon = Daemon::start(&[]);
    for (outer, inner, expected) in [
        ("", "", 0),
        ("--shared", "--shared", 0),
        ("--shared", "", 75),
        ("--limit 3 --slots 2", "--limit 3 --slots 2", 0),
        ("--limit 3", "--limit 3 --slots 3", 75),
        ("--limit 3", "--limit 5", 76),
    ] {
        let command = format!("run k {inner} --nested -- echo inside");
        let ended = far_under(&daemon, outer, &command);
        let seen = (ended.status.code(), text(&ended.stdout) == "inside\n");
        assert_eq!(seen, (Some(expected), expected == 0), "{outer:?} {inner:?}");
    }
}
