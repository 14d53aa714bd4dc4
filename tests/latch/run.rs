//! `latch run` with real processes: signals, loss, streams, and what a command may do to it.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::reconnecting::{listener, Peer};
use crate::support::amount::amount;
use crate::support::latch::{
    ended, fed, fill, is_gone, is_held, latch, number_in, output, ready, run, signal, started,
    state, status, text, wait_as_shell, Latch,
};
use crate::support::limited::{copy_program, program_for_all};
use crate::support::needs::{needs, skipped};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{children_of, eventually, program, Daemon, Signal, PATIENCE};
use rustix::process::{kill_process, Pid};
use rustix_libc_wrappers::process::SignalExt;

/// The signals that end a wait and are passed on, with their names in the shell.
const SIGNALS: [(Signal, &str); 7] = [
    (Signal::TERM, "TERM"),
    (Signal::INT, "INT"),
    (Signal::HUP, "HUP"),
    (Signal::QUIT, "QUIT"),
    (Signal::USR1, "USR1"),
    (Signal::USR2, "USR2"),
    (Signal::ALARM, "ALRM"),
];

#[test]
fn rare_signals_are_passed_on_and_end_a_wait() {
    needs!("python3");
    let daemon = Daemon::start(&[]);
    for sent in [Signal::POWER, Signal::rt(2).expect("a real-time signal")] {
        let directory = directory();
        let script = format!(
            "exec python3 -c 'import os, signal
signal.signal({}, lambda *_: os._exit(7))
os.system(os.environ[\"READY\"])
while True: signal.pause()'",
            sent.as_raw()
        );
        let (mut child, _) = started(&daemon, "k", &directory, &[], &script);
        let mut waiting = Latch::start(&mut latch(&daemon, &["run", "k", "--", "true"]));
        daemon.wait_for_waiters("k", 1);
        signal(&waiting, sent);
        assert_eq!(wait_as_shell(&mut waiting), Some(128 + sent.as_raw()));
        signal(&child, sent);
        assert_eq!(wait_as_shell(&mut child), Some(7), "{sent:?}");
    }
}

#[test]
fn sigwinch_is_passed_on_and_ends_no_wait() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let script = "trap 'exit 7' WINCH; eval \"$READY\"; while :; do sleep 0.02; done";
    let (mut child, _) = started(&daemon, "k", &directory, &[], script);
    let mut waiting = Latch::start(&mut latch(&daemon, &["run", "k", "--", "true"]));
    daemon.wait_for_waiters("k", 1);
    signal(&waiting, Signal::WINCH);
    signal(&child, Signal::WINCH);
    assert_eq!(wait_as_shell(&mut child), Some(7));
    assert_eq!(wait_as_shell(&mut waiting), Some(0));
}

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

/// A process outside the group, which the test ends.
struct Stray(Pid);

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn lines_of(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// What a child with its output in a pipe says first.
fn first_line(child: &mut Latch) -> String {
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("text");
    line
}

fn has_stopped(pid: Pid) -> bool {
    state(pid) == Some('T')
}

#[test]
fn the_commands_exit_status_and_streams_pass_through() {
    let daemon = Daemon::start(&[]);
    let script = "cat; echo $LATCH_KEY >&2; exit 7";
    let arguments = ["run", "k", "--", "sh", "-c", script];
    let output = fed(&mut latch(&daemon, &arguments), b"in and out");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(
        (text(&output.stdout).as_str(), text(&output.stderr).as_str()),
        ("in and out", "k\n")
    );
    assert_eq!(
        status(&daemon, &["run", "k", "--", "sh", "-c", "kill -KILL $$"]),
        137
    );
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn a_command_that_cannot_run_gives_one_line_and_a_status() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let plain = directory.path().join("plain");
    fs::write(&plain, "no program\n").expect("write");
    let within = |name: &str| directory.path().join(name).display().to_string();
    for (command, expected) in [
        (within("nowhere"), 127),
        ("no-such-command-at-all".into(), 127),
        (within("plain"), 126),
        (within(""), 126),
        (within("plain/x"), 126),
        (String::new(), 127),
    ] {
        let command = command.as_str();
        let output = run(&daemon, &["run", "k", "--", command]);
        assert_eq!(output.status.code(), Some(expected), "{command:?}");
        assert_eq!(text(&output.stderr).lines().count(), 1, "{command:?}");
        let full = fs::File::options().write(true).open("/dev/full");
        let mut unheard = latch(&daemon, &["run", "k", "--", command]);
        unheard.stderr(full.expect("every Linux has it"));
        assert_eq!(
            wait_as_shell(&mut Latch::start(&mut unheard)),
            Some(expected)
        );
    }
    assert!(!is_held(&daemon, "k"));
}

/// The situation of a user whose PATH is that of root.
#[test]
fn an_unreadable_directory_in_path_hides_no_error() {
    let daemon = Daemon::start(&[]);
    let (directory, program) = program_for_all(program("latch"));
    let closed = directory.path().join("closed");
    fs::create_dir(&closed).expect("there is room");
    fs::write(directory.path().join("plain"), "no program\n").expect("there is room");
    let path = format!(
        "{}:{}:/usr/bin:/bin",
        closed.display(),
        directory.path().display()
    );
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o0)).expect("it is ours");
    for (command, expected) in [("no-such-command-at-all", 127), ("plain", 126), ("true", 0)] {
        let mut latch = Command::new(&program);
        if rustix::process::geteuid().is_root() {
            latch = Command::new("setpriv");
            latch.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
            latch.arg(&program);
        }
        latch
            .args(["run", "k", "--server", &daemon.addr().to_string(), "--"])
            .arg(command)
            .env("PATH", &path);
        let output = output(&mut latch);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(expected), "{command}: {said}");
        assert_eq!(said.contains("no such file"), expected == 127, "{said}");
    }
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).expect("it is ours");
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
fn every_signal_ends_a_wait_and_leaves_the_queue() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let directory = directory();
    let started = directory.path().join("started");
    for (sent, name) in SIGNALS {
        let mut child = Latch::start(&mut latch(
            &daemon,
            &["run", "k", "--", "touch", started.to_str().expect("text")],
        ));
        daemon.wait_for_waiters("k", 1);
        let mut behind = daemon.connect();
        behind.send("l\nk\n10\n");
        daemon.wait_for_waiters("k", 2);
        signal(&child, sent);
        assert_eq!(
            wait_as_shell(&mut child),
            Some(128 + sent.as_raw()),
            "{name} while it waits"
        );
        daemon.wait_for_waiters("k", 1);
        drop(behind);
        daemon.wait_for_waiters("k", 0);
    }
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert!(!started.exists(), "the command was started after all");
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn every_signal_reaches_the_command_and_ends_it() {
    let daemon = Daemon::start(&[]);
    for (sent, name) in SIGNALS {
        let directory = directory();
        let script = "eval \"$READY\"; exec sleep 60";
        let (mut child, command) = started(&daemon, "k", &directory, &[], script);
        signal(&child, sent);
        assert_eq!(
            wait_as_shell(&mut child),
            Some(128 + sent.as_raw()),
            "{name}"
        );
        assert!(is_gone(command));
        eventually(PATIENCE, "the lock is free", || !is_held(&daemon, "k"));
    }
}

#[test]
fn every_signal_reaches_each_process_of_the_group_once() {
    let daemon = Daemon::start(&[]);
    for (sent, name) in SIGNALS {
        let directory = directory();
        let log = directory.path().join("log");
        let log_path = log.display();
        let inner = format!(
            "trap \"echo inner >> {log_path}; exit 0\" {name}; eval \"$READY\"; \
             while :; do sleep 0.02; done"
        );
        let script =
            format!("trap 'echo outer >> {log_path}' {name}; sh -c '{inner}'; sleep 0.1; exit 5");
        let (mut child, _) = started(&daemon, "k", &directory, &[], &script);
        signal(&child, sent);
        assert_eq!(wait_as_shell(&mut child), Some(5), "{name}");
        let mut lines = lines_of(&log);
        lines.sort();
        assert_eq!(lines, ["inner", "outer"], "{name}");
    }
}

#[test]
fn a_command_that_has_left_its_group_gets_the_signals() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    let leave = "import os, time
os.setpgid(0, os.getpgid(os.getppid()))
print('left', flush=True)
time.sleep(60)";
    let mut command = latch(&daemon, &["run", "k", "--"]);
    command.arg(&python).args(["-c", leave]);
    let mut child = Latch::start(command.stdout(Stdio::piped()));
    assert_eq!(first_line(&mut child), "left\n");
    signal(&child, Signal::TERM);
    assert_eq!(wait_as_shell(&mut child), Some(128 + 15));
}

#[test]
fn every_signal_is_passed_on_after_the_lock_is_lost() {
    thread::scope(|scope| {
        for (sent, name) in SIGNALS {
            scope.spawn(move || a_signal_is_passed_on_after_the_lock_is_lost(sent, name));
        }
    });
}

fn a_signal_is_passed_on_after_the_lock_is_lost(sent: Signal, name: &str) {
    let daemon = Daemon::start_alone(&[]);
    let directory = directory();
    let log = directory.path().join("log");
    let log_path = log.display();
    // The first TERM is for the loss of the lock, the second is the test's.
    let script = format!(
        "for s in INT HUP QUIT USR1 USR2 ALRM; do trap \"echo $s >> {log_path}; exit 0\" $s; done; \
         trap 'echo TERM >> {log_path}; n=x$n; [ $n = xx ] && exit 0' TERM; \
         eval \"$READY\"; while :; do sleep 0.02; done"
    );
    let (mut child, command) = started(&daemon, "k", &directory, &["--kill-after", "60"], &script);
    drop(daemon);
    eventually(PATIENCE, "the command was told to end", || {
        lines_of(&log) == ["TERM"]
    });
    signal(&child, sent);
    assert_eq!(wait_as_shell(&mut child), Some(70), "{name}");
    assert_eq!(lines_of(&log), ["TERM", name]);
    assert!(is_gone(command));
}

#[test]
fn latch_dies_of_the_signal_that_ended_its_command() {
    let daemon = Daemon::start(&[]);
    for (sent, name) in SIGNALS {
        let directory = directory();
        let script = "eval \"$READY\"; exec sleep 60";
        let latch = format!("ulimit -c unlimited; exec latch run k -- sh -c '{script}'");
        let mut command = Command::new("sh");
        command
            .args(["-c", &latch])
            .env("LATCH_SERVER", daemon.addr().to_string())
            .current_dir(directory.path());
        let (mut child, _) = ready(command, &directory);
        signal(&child, sent);
        wait_as_shell(&mut child);
        let status = child.wait().expect("it has ended");
        assert_eq!(status.signal(), Some(sent.as_raw()), "{name}");
        assert!(!status.core_dumped(), "{name}");
        assert!(!is_held(&daemon, "k"), "{name}");
    }
}

#[test]
fn latch_dies_at_once_of_a_signal_while_it_waits() {
    fair_test(latch_dies_at_once_of_a_signal_while_it_waits_once);
}

fn latch_dies_at_once_of_a_signal_while_it_waits_once() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let mut slowest = Duration::ZERO;
    for (sent, name) in SIGNALS {
        let mut child = Latch::start(&mut latch(&daemon, &["run", "k", "--", "true"]));
        daemon.wait_for_waiters("k", 1);
        let sent_at = Instant::now();
        signal(&child, sent);
        wait_as_shell(&mut child);
        slowest = slowest.max(sent_at.elapsed());
        let status = child.wait().expect("it has ended");
        assert_eq!(status.signal(), Some(sent.as_raw()), "{name}");
        daemon.wait_for_waiters("k", 0);
    }
    println!("the slowest of them died after {slowest:?}");
    in_time!(slowest < Duration::from_secs(1), "{slowest:?}");
}

#[test]
fn a_signal_that_latch_ignores_is_ignored_by_the_command() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let inner = "eval \"$READY\"; exec sleep 60";
    let script = format!("trap '' HUP INT; exec latch run k -- sh -c '{inner}'");
    let mut command = Command::new("sh");
    command
        .args(["-c", &script])
        .env("LATCH_SERVER", daemon.addr().to_string());
    let (mut child, command) = ready(command, &directory);
    for sent in [Signal::HUP, Signal::INT] {
        signal(&child, sent);
        kill_process(command, sent).expect("it runs");
    }
    thread::sleep(Duration::from_millis(200));
    assert_eq!(child.try_wait().expect("a child"), None);
    signal(&child, Signal::TERM);
    assert_eq!(wait_as_shell(&mut child), Some(143));
}

#[test]
fn signals_that_were_blocked_at_the_start_are_handled() {
    let daemon = Daemon::start(&[]);
    let blocked = |arguments: &[&str]| {
        let mut command = Command::new("env");
        command.args(["--block-signal", program("latch"), "run", "k", "--"]);
        command.args(arguments);
        command.env("LATCH_SERVER", daemon.addr().to_string());
        command
    };
    let mut ends = Latch::start(&mut blocked(&["true"]));
    assert_eq!(
        wait_as_shell(&mut ends),
        Some(0),
        "the end of a command is a signal, too"
    );
    let directory = directory();
    let told_to_end = ["sh", "-c", "eval \"$READY\"; exec sleep 60"];
    let (mut child, _) = ready(blocked(&told_to_end), &directory);
    signal(&child, Signal::TERM);
    assert_eq!(wait_as_shell(&mut child), Some(143));
}

#[test]
fn a_wait_can_be_stopped_and_continued() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let mut command = latch(&daemon, &["run", "k", "--", "true"]);
    let mut child = Latch::start(command.process_group(0));
    daemon.wait_for_waiters("k", 1);
    let pid = Pid::from_child(&child);
    signal(&child, Signal::TSTP);
    eventually(PATIENCE, "latch has stopped", || has_stopped(pid));
    signal(&child, Signal::CONT);
    eventually(PATIENCE, "latch goes on", || !has_stopped(pid));
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert_eq!(wait_as_shell(&mut child), Some(0));
}

#[test]
fn kill_9_of_latch_ends_the_command_and_frees_the_lock() {
    fair_test(kill_9_of_latch_ends_the_command_and_frees_the_lock_once);
}

fn kill_9_of_latch_ends_the_command_and_frees_the_lock_once() {
    let daemon = Daemon::start(&[]);
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let directory = directory();
        let told = directory.path().join("told");
        let script = format!(
            "trap 'echo TERM > {}; exit 0' TERM; eval \"$READY\"; while :; do sleep 0.02; done",
            told.display()
        );
        let (mut child, command) = started(&daemon, "k", &directory, &[], &script);
        let _stray = Stray(command);
        let mut next = daemon.connect();
        next.send("l\nk\n10\n");
        daemon.wait_for_waiters("k", 1);
        let killed_at = Instant::now();
        signal(&child, Signal::KILL);
        assert!(next.line().starts_with("ok "));
        slowest = slowest.max(killed_at.elapsed());
        wait_as_shell(&mut child);
        eventually(PATIENCE, "the command was told", || {
            lines_of(&told) == ["TERM"]
        });
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
fn a_lost_lock_ends_the_command() {
    a_lost_lock_ends("eval \"$READY\"; exec sleep 60", "60");
}

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
fn a_stopped_command_that_must_end_is_continued() {
    let daemon = Daemon::start_alone(&[]);
    let directory = directory();
    let script = "trap 'kill -STOP $$; exit 3' TERM; eval \"$READY\"; while :; do sleep 0.02; done";
    let mut arguments = vec!["run", "k", "--kill-after", "60", "--"];
    arguments.extend(["sh", "-c", script]);
    let mut command = latch(&daemon, &arguments);
    // In a group of its own, latch has a shell with job control, which does not continue it.
    command.process_group(0);
    let (mut child, command) = ready(command, &directory);
    drop(daemon);
    assert_eq!(wait_as_shell(&mut child), Some(70));
    assert!(is_gone(command));
}

#[test]
fn a_command_does_not_start_after_latch_was_killed() {
    let directory = directory();
    let file = directory.path().join("file");
    let mut orphan = Command::new(program("latch"));
    // The exec shim of a latch that was killed at once finds another parent.
    orphan
        .args(["--exec-shim", "0", "-", "-", "touch"])
        .arg(&file);
    assert_eq!(output(&mut orphan).status.code(), Some(143));
    assert!(!file.exists());
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
fn a_stopped_server_does_not_delay_the_end_of_latch() {
    fair_test(a_stopped_server_does_not_delay_the_end_of_latch_once);
}

fn a_stopped_server_does_not_delay_the_end_of_latch_once() {
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
    // A reply may take ten seconds. This one never comes.
    in_time!(ended_at.elapsed() < Duration::from_secs(9));
}

#[test]
fn a_stopped_server_is_a_loss_before_the_lease_ends() {
    fair_test(a_stopped_server_is_a_loss_before_the_lease_ends_once);
}

fn a_stopped_server_is_a_loss_before_the_lease_ends_once() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let script = "eval \"$READY\"; exec sleep 60";
    let (mut child, command) = started(&daemon, "k", &directory, &["--lease", "4"], script);
    // Stop just after a renewal, so that none comes between the look and the stop.
    let mut client = daemon.connect();
    let mut ends_at = Instant::now();
    eventually(PATIENCE, "it has just been renewed", || {
        let asked_at = Instant::now();
        let left = client.stats()["locks"][0]["lease_expires_in_s"].as_f64();
        let left = left.expect("a number");
        ends_at = asked_at + Duration::from_secs_f64(left);
        left > 3.8
    });
    let standstill = StoppedDaemon::of(&daemon);
    let status = wait_as_shell(&mut child);
    let over = Instant::now();
    assert_eq!(status, Some(70));
    assert!(is_gone(command));
    println!("over {:?} before the lease", ends_at - over);
    in_time!(over < ends_at, "{:?} too late", over - ends_at);
    thread::sleep(ends_at - over);
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
    thread::sleep(Duration::from_millis(100));
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
fn a_silent_server_has_the_command_killed_before_the_lease_ends() {
    fair_test(a_silent_server_has_the_command_killed_before_the_lease_ends_once);
}

fn a_silent_server_has_the_command_killed_before_the_lease_ends_once() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let log = directory.path().join("log");
    let script = format!(
        "trap 'echo TERM >> {}' TERM; eval \"$READY\"; while :; do sleep 0.02; done",
        log.display()
    );
    let options = ["--lease", "8", "--kill-after", "3"];
    let (mut child, command) = started(&daemon, "k", &directory, &options, &script);
    let mut client = daemon.connect();
    let mut ends_at = Instant::now();
    eventually(PATIENCE, "it has just been renewed", || {
        let asked_at = Instant::now();
        let left = client.stats()["locks"][0]["lease_expires_in_s"].as_f64();
        let left = left.expect("a number");
        ends_at = asked_at + Duration::from_secs_f64(left);
        left > 7.8
    });
    let standstill = StoppedDaemon::of(&daemon);
    let status = wait_as_shell(&mut child);
    let over = Instant::now();
    assert_eq!(status, Some(70));
    assert!(is_gone(command));
    assert_eq!(lines_of(&log), ["TERM"]);
    assert!(over < ends_at, "{:?} too late", over - ends_at);
    drop(standstill);
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
fn sigtstp_of_the_command_stops_latch_and_it_needs_the_lock() {
    fair_test(sigtstp_of_the_command_stops_latch_and_it_needs_the_lock_once);
}

fn sigtstp_of_the_command_stops_latch_and_it_needs_the_lock_once() {
    thread::scope(|scope| {
        for (lease, pause, expected, said) in [("60", 100, 0, "on"), ("4", 4500, 70, "TERM")] {
            let pause = Duration::from_millis(pause);
            scope.spawn(move || stop_and_continue("TSTP", pause, lease, expected, said));
        }
    });
}

#[test]
fn a_paused_command_keeps_its_lock_beyond_the_lease() {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let script = "eval \"$READY\"; kill -STOP $$; exit 5";
    let (mut child, command) = started(&daemon, "k", &directory, &["--lease", "3"], script);
    eventually(PATIENCE, "the command has stopped", || has_stopped(command));
    let mut next = Latch::start(&mut latch(&daemon, &["run", "k", "--", "true"]));
    daemon.wait_for_waiters("k", 1);
    thread::sleep(Duration::from_millis(3500));
    assert!(next.try_wait().expect("a child").is_none(), "two jobs ran");
    // As cpulimit does it: the command alone.
    kill_process(command, Signal::CONT).expect("it is there");
    assert_eq!(wait_as_shell(&mut child), Some(5));
    assert_eq!(wait_as_shell(&mut next), Some(0));
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

/// The command stops itself. `latch` is continued after `pause` and exits with `expected`, and the
/// command has written `said`.
fn stop_and_continue(stop: &str, pause: Duration, lease: &str, expected: i32, said: &str) {
    let daemon = Daemon::start(&["--default-lease-ttl", lease]);
    let directory = directory();
    let log = directory.path().join("log");
    let script = format!(
        "trap 'echo TERM >> {0}; exit 0' TERM; eval \"$READY\"; kill -{stop} $$; \
         echo on >> {0}; sleep 0.1; exit 0",
        log.display()
    );
    let mut command = latch(&daemon, &["run", "k", "--", "sh", "-c", &script]);
    // A shell with job control does this. Without it, nothing continues a job.
    command.process_group(0);
    let (mut child, command) = ready(command, &directory);
    let pid = Pid::from_child(&child);
    eventually(PATIENCE, "latch has stopped, too", || has_stopped(pid));
    thread::sleep(pause);
    assert!(has_stopped(command));
    signal(&child, Signal::CONT);
    assert_eq!(
        wait_as_shell(&mut child),
        Some(expected),
        "{stop} for {pause:?}"
    );
    assert!(is_gone(command));
    assert_eq!(lines_of(&log), [said], "{stop} for {pause:?}");
}

#[test]
fn without_job_control_the_command_is_not_stopped() {
    let daemon = Daemon::start(&[]);
    let mut command = Command::new("setsid");
    command
        .args(["-w", program("latch"), "run", "k", "--"])
        .args(["sh", "-c", "kill -TSTP $$; exit 3"])
        .env("LATCH_SERVER", daemon.addr().to_string());
    assert_eq!(output(&mut command).status.code(), Some(3));
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

#[test]
fn an_upgrade_does_not_disturb_a_running_wait() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let directory = directory();
    let copy = directory.path().join("latch");
    copy_program(program("latch"), &copy);
    let mut child = Latch::start(
        Command::new(&copy)
            .args(["run", "k", "--", "sh", "-c", "exit 4"])
            .env("LATCH_SERVER", daemon.addr().to_string()),
    );
    daemon.wait_for_waiters("k", 1);
    fs::remove_file(&copy).expect("the old version");
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert_eq!(wait_as_shell(&mut child), Some(4));
}

// ---------------------------------------------------------------------------------------------
// What the command leaves behind

#[test]
fn of_many_runs_none_leaves_a_process_in_the_group() {
    let next = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    number if number < amount(20, 1000) => leave_nothing(number),
                    _ => break,
                }
            });
        }
    });
}

/// The command starts a process that ignores SIGTERM. Of ten commands, one loses its server, and
/// the `latch` of one is stopped for longer than the lease; the others end by themselves.
fn leave_nothing(number: u32) {
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let left = directory.path().join("left");
    let (lease, end, expected) = match number % 10 {
        0 | 1 => ("4", "exec sleep 60", 70),
        _ => ("60", "exit 3", 3),
    };
    let script = format!(
        "(trap '' TERM; exec sleep 60) & echo $! > {}; eval \"$READY\"; {end}",
        left.display()
    );
    let options = ["--lease", lease, "--kill-after", "1"];
    let (mut child, command) = started(&daemon, "k", &directory, &options, &script);
    match number % 10 {
        0 => daemon.signal(Signal::KILL),
        1 => {
            signal(&child, Signal::STOP);
            thread::sleep(Duration::from_secs(5));
            signal(&child, Signal::CONT);
        }
        _ => {}
    }
    assert_eq!(wait_as_shell(&mut child), Some(expected), "run {number}");
    assert!(is_gone(command), "run {number}");
    assert!(is_gone(number_in(&left).expect("written")), "run {number}");
}

#[test]
fn a_process_of_another_user_in_the_group_keeps_the_lock() {
    needs!(root);
    let daemon = Daemon::start(&[]);
    let (_directory, program) = program_for_all(program("latch"));
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(program)
        .args(["run", "k", "--server", &daemon.addr().to_string()])
        .args(["--kill-after", "0.1", "--", "sh", "-c", "echo $$; read end"]);
    let mut child = Latch::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    let group = first_line(&mut child).trim().parse();
    let group: i32 = group.expect("a number");
    let mut sleep = Command::new("sleep");
    sleep.arg("60").process_group(group);
    let mut others = sleep.spawn().expect("sleep");
    drop(child.stdin.take());
    let command = Pid::from_raw(group).expect("a process");
    eventually(PATIENCE, "the command has ended", || {
        matches!(state(command), None | Some('Z'))
    });
    // Longer than --kill-after: there is nothing left to wait for but the other user's process.
    thread::sleep(Duration::from_millis(500));
    let was_kept = is_held(&daemon, "k");
    let _ = others.kill();
    let _ = others.wait();
    assert!(was_kept, "the lock was released before its end");
    assert_eq!(wait_as_shell(&mut child), Some(1));
}

#[test]
fn an_unreaped_zombie_does_not_hold_the_lock() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    let directory = directory();
    let file = directory.path().join("stray");
    // The parent of the zombie leaves the group and never reaps it.
    let stray = "import os, sys, time
dead = os.fork()
if dead == 0: os._exit(0)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
os.setsid()
with open(sys.argv[1] + '.new', 'w') as file: file.write(str(os.getpid()))
os.rename(sys.argv[1] + '.new', sys.argv[1])
time.sleep(60)";
    let path = file.to_str().expect("text");
    let script = "\"$0\" -c \"$1\" \"$2\" & while ! test -e \"$2\"; do sleep 0.02; done; exit 4";
    let arguments = ["run", "k", "--kill-after", "1", "--", "sh", "-c", script];
    let mut child = Latch::start(latch(&daemon, &arguments).arg(&python).args([stray, path]));
    let ended = wait_as_shell(&mut child);
    let _stray = Stray(number_in(&file).expect("written"));
    assert_eq!(ended, Some(4));
}

// ---------------------------------------------------------------------------------------------
// Streams

#[test]
fn streams_pass_through_unchanged_however_big() {
    let daemon = Daemon::start(&[]);
    let mut seed = 0x9e37_79b9_u32;
    let data: Vec<u8> = (0..4_000_000)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 17;
            seed ^= seed << 5;
            seed.to_le_bytes()[3]
        })
        .collect();
    let through = fed(&mut latch(&daemon, &["run", "k", "--", "cat"]), &data);
    assert_eq!(through.status.code(), Some(0));
    assert!(through.stdout == data && through.stderr.is_empty());
    let script = ["run", "k", "--", "sh", "-c", "cat >&2"];
    let through = fed(&mut latch(&daemon, &script), &data);
    assert!(through.stderr == data && through.stdout.is_empty());

    let directory = directory();
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    fs::write(&from, &data).expect("write");
    let pipe = "cat \"$2\" | \"$1\" run k -- cat | cat > \"$3\"";
    let mut command = Command::new("sh");
    command
        .args(["-c", pipe, "sh", program("latch")])
        .args([&from, &to])
        .env("LATCH_SERVER", daemon.addr().to_string());
    assert_eq!(output(&mut command).status.code(), Some(0));
    assert!(fs::read(&to).expect("written") == data);
}

#[test]
fn a_closed_pipe_ends_the_command_as_without_latch() {
    let daemon = Daemon::start(&[]);
    let pipe = "\"$1\" run k -- yes | head -n 1; echo \"${PIPESTATUS[@]}\"";
    let mut command = Command::new("bash");
    command
        .args(["-c", pipe, "bash", program("latch")])
        .env("LATCH_SERVER", daemon.addr().to_string());
    let output = output(&mut command);
    assert_eq!(text(&output.stdout), "y\n141 0\n");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn closed_streams_do_no_harm() {
    let daemon = Daemon::start(&[]);
    for closed in ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"] {
        let script = format!("\"$1\" run k -- sh -c 'cat; exit 7' {closed}");
        let mut command = Command::new("sh");
        command
            .args(["-c", &script, "sh", program("latch")])
            .stdin(Stdio::null())
            .env("LATCH_SERVER", daemon.addr().to_string());
        assert_eq!(output(&mut command).status.code(), Some(7), "{closed}");
    }
}

#[test]
fn the_command_has_the_same_descriptors_as_without_latch() {
    let daemon = Daemon::start(&[]);
    let descriptors = |prefix: &str| {
        let script = format!("exec {prefix} ls /proc/self/fd 7</dev/null");
        let mut command = Command::new("sh");
        command
            .args(["-c", &script])
            .env("LATCH_SERVER", daemon.addr().to_string());
        text(&output(&mut command).stdout)
    };
    let without = descriptors("");
    assert!(without.contains('7'), "{without}");
    assert_eq!(descriptors("latch run k --"), without);
}

// ---------------------------------------------------------------------------------------------
// Environments

#[test]
fn it_works_as_cron_would_start_it() {
    let daemon = Daemon::start(&[]);
    for home in [&["HOME="][..], &[]] {
        let mut command = Command::new("setsid");
        let script = "cat; (: < /dev/tty) 2> /dev/null || echo no terminal; exit 6";
        command
            .args(["-w", "env", "-i", "PATH=/usr/bin:/bin"])
            .args(home)
            .arg(format!("LATCH_SERVER={}", daemon.addr()))
            .args([
                program("latch"),
                "run",
                "nightly",
                "--timeout",
                "0",
                "--busy-ok",
            ])
            .args(["--", "sh", "-c", script])
            .current_dir("/")
            .stdin(Stdio::null());
        let output = output(&mut command);
        assert_eq!(
            (
                output.status.code(),
                text(&output.stdout).as_str(),
                text(&output.stderr).as_str()
            ),
            (Some(6), "no terminal\n", "")
        );
    }
}

/// `latch` as process 1 of a pid namespace. `None` if the system allows no namespace.
fn as_process_1(daemon: &Daemon, options: &[&str], script: &str) -> Option<Command> {
    let mut command = process_1(daemon, &[])?;
    command
        .args([program("latch"), "run", "k"])
        .args(options)
        .args(["--", "sh", "-c", script]);
    Some(command)
}

/// The beginning of a command line that runs in new namespaces, with `more` flags. `None` if the
/// system allows no namespace.
pub fn process_1(daemon: &Daemon, more: &[&str]) -> Option<Command> {
    let unshare = "unshare";
    let mut flags = vec!["--pid", "--fork", "--mount-proc", "--kill-child"];
    flags.extend(more);
    if !rustix::process::geteuid().is_root() {
        flags.extend(["--user", "--map-root-user"]);
    }
    let probe = output(Command::new(unshare).args(&flags).arg("true"));
    if !probe.status.success() {
        skipped(&["PID namespace"]);
        return None;
    }
    let mut command = Command::new(unshare);
    command
        .args(flags)
        .env("LATCH_SERVER", daemon.addr().to_string())
        .stdin(Stdio::null());
    Some(command)
}

/// The process that `unshare` started.
pub fn init_of(unshare: &Latch) -> Pid {
    let number = unshare.id();
    let children = format!("/proc/{number}/task/{number}/children");
    number_in(Path::new(&children)).expect("its only child")
}

#[test]
fn as_process_1_it_reaps_while_it_waits_for_the_lock() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let directory = directory();
    let go_on = directory.path().join("go-on");
    // The shell starts a child, and then becomes latch.
    let orphan = format!("until [ -e {} ]; do sleep 0.02; done", go_on.display());
    let script = format!("{orphan} & exec latch run k -- sh -c 'exit 7'");
    let Some(mut command) = process_1(&daemon, &[]) else {
        return;
    };
    let mut unshare = Latch::start(command.args(["sh", "-c", &script]));
    daemon.wait_for_waiters("k", 1);
    let init = init_of(&unshare).as_raw_nonzero().get().unsigned_abs();
    assert_eq!(children_of(init).len(), 1, "the orphan");
    fs::write(&go_on, "").expect("written");
    eventually(PATIENCE, "the orphan is reaped", || {
        children_of(init).is_empty()
    });
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert_eq!(wait_as_shell(&mut unshare), Some(7));
}

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
        let Some(mut command) = process_1(&daemon, &["--mount"]) else {
            return;
        };
        let output = output(command.args(["bash", "-c", &script]));
        assert_eq!(output.status.code(), Some(5), "{output:?}");
    }
}

#[test]
fn as_process_1_it_passes_the_status_on_and_reaps_orphans() {
    let daemon = Daemon::start(&[]);
    // Each orphan prints its new parent. Then all of them must be reaped.
    let directory = directory();
    let script = "for i in 1 2 3 4 5 6 7 8; do
  (setsid sh -c 'for try in $(seq 200); do
    parent=$(cut -d \" \" -f 4 /proc/$$/stat)
    test $parent = 1 && break
    sleep 0.02
  done
  echo orphan of $parent
  : > $0/$1' $ENDED $i &)
done
until test $(ls $ENDED | wc -l) = 8; do sleep 0.02; done
for try in $(seq 400); do
  set -- /proc/[0-9]*
  test $# -le 3 && ! grep -q '^State:.Z' /proc/[0-9]*/status 2> /dev/null && echo clean && exit 9
  sleep 0.02
done
grep . /proc/[0-9]*/status; exit 8";
    let Some(mut command) = as_process_1(&daemon, &[], script) else {
        return;
    };
    let output = output(command.env("ENDED", directory.path()));
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(9), "{said}");
    assert_eq!(said, "orphan of 1\n".repeat(8) + "clean\n");
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn as_process_1_it_handles_signals_and_does_not_stop() {
    let daemon = Daemon::start(&[]);
    for (sent, name) in SIGNALS {
        let directory = directory();
        // Process numbers differ inside: the file says that the command runs, but not its number.
        let script = "eval \"$READY\"; exec sleep 60";
        let Some(command) = as_process_1(&daemon, &[], script) else {
            return;
        };
        let (mut unshare, _) = ready(command, &directory);
        kill_process(init_of(&unshare), sent).expect("it runs");
        assert_eq!(
            wait_as_shell(&mut unshare),
            Some(128 + sent.as_raw()),
            "{name}"
        );
    }
    let script = "kill -TSTP $$; exit 6";
    let mut command = as_process_1(&daemon, &[], script).expect("possible just before");
    assert_eq!(output(&mut command).status.code(), Some(6));
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
