//! `latch` with real processes: what a shell sees of it.

mod support;

use std::fs;
use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{kill_process, test_kill_process, Pid, Signal};
use support::{eventually, Daemon, PATIENCE};

fn latch(daemon: &Daemon, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
    command
        .args(arguments)
        .env("LATCH_SERVER", daemon.addr().to_string())
        .env_remove("LATCH_AUTH_TOKEN_FILE")
        .stdin(Stdio::null());
    command
}

fn run(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut child = latch(daemon, arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("latch starts");
    let status = wait(&mut child);
    let output = child.wait_with_output().expect("its output");
    assert_eq!(output.status.code(), status);
    output
}

/// The exit status of a child, in bounded time.
fn wait(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status.code();
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("latch does not end");
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn status(daemon: &Daemon, arguments: &[&str]) -> i32 {
    run(daemon, arguments)
        .status
        .code()
        .expect("an exit status")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it runs");
}

fn is_held(daemon: &Daemon, key: &str) -> bool {
    let stats = daemon.stats();
    let locks = stats["locks"].as_array().expect("a list");
    locks.iter().any(|lock| lock["key"] == key)
}

/// Starts a command under a lock and waits until it holds it and its process runs; returns its
/// process number, which it writes to `file`.
fn started(
    daemon: &Daemon,
    key: &str,
    directory: &tempfile::TempDir,
    script: &str,
) -> (Child, Pid) {
    let file = directory.path().join("pid");
    let script = format!("echo $$ > {}.new; mv {0}.new {0}; {script}", file.display());
    let child = latch(
        daemon,
        &["run", key, "--kill-after", "1", "--", "sh", "-c", &script],
    )
    .spawn()
    .expect("latch starts");
    let mut pid = None;
    eventually(PATIENCE, "the command runs", || {
        pid = fs::read_to_string(&file)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        pid.is_some()
    });
    (
        child,
        Pid::from_raw(pid.expect("just read")).expect("a process number"),
    )
}

fn is_gone(pid: Pid) -> bool {
    test_kill_process(pid).is_err()
}

#[test]
fn the_commands_exit_status_and_streams_pass_through() {
    let daemon = Daemon::start(&[]);
    let mut child = latch(
        &daemon,
        &[
            "run",
            "k",
            "--",
            "sh",
            "-c",
            "cat; echo $LATCH_KEY >&2; exit 7",
        ],
    )
    .stdin(Stdio::piped())
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .expect("latch starts");
    child
        .stdin
        .take()
        .expect("piped")
        .write_all(b"in and out")
        .expect("it reads");
    let output = child.wait_with_output().expect("its output");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(
        (text(&output.stdout).as_str(), text(&output.stderr).as_str()),
        ("in and out", "k\n")
    );
    assert_eq!(
        status(&daemon, &["run", "k", "--", "sh", "-c", "kill -KILL $$"]),
        137
    );
    assert_eq!(status(&daemon, &["run", "k", "--", "/nowhere/at/all"]), 127);
    assert_eq!(status(&daemon, &["run", "k", "--", "/etc/passwd"]), 126);
    assert!(!is_held(&daemon, "k"));
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
    assert_eq!(support::fence(token).to_string(), fence);
}

#[test]
fn a_lock_that_somebody_has_is_busy_in_the_way_that_was_asked_for() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    assert_eq!(
        status(&daemon, &["run", "k", "--timeout", "0", "--", "true"]),
        75
    );
    assert_eq!(
        status(&daemon, &["run", "k", "--timeout", "1", "--", "true"]),
        75
    );
    assert_eq!(
        status(
            &daemon,
            &["run", "k", "--timeout", "0", "-E", "9", "--", "true"]
        ),
        9
    );
    assert_eq!(
        status(
            &daemon,
            &["run", "k", "--timeout", "0", "--busy-ok", "--", "false"]
        ),
        0
    );
    assert_eq!(
        status(
            &daemon,
            &["run", "k", "--timeout", "0", "--limit", "3", "--", "true"]
        ),
        76
    );
    assert_eq!(status(&daemon, &["wait", "k", "--timeout", "0"]), 75);
}

#[test]
fn bad_usage_and_unreachable_servers_have_their_own_status() {
    let daemon = Daemon::start(&[]);
    for arguments in [
        &["run", "k"][..],
        &["run", "--", "true"],
        &["nonsense"],
        &[],
        &["ping", "--", "true"],
        &["run", "k", "--lease", "x", "--", "true"],
        &["run", "a key", "--", "true"],
        &["renew", "k", "no-token"],
        &["ping", "--server", "nowhere"],
    ] {
        let output = run(&daemon, arguments);
        assert_eq!(
            output.status.code(),
            Some(64),
            "{arguments:?}: {}",
            text(&output.stderr)
        );
        assert_eq!(text(&output.stderr).lines().count(), 1, "{arguments:?}");
    }
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("its address");
    assert_eq!(
        status(&daemon, &["ping", "--server", &closed.to_string()]),
        69
    );
    assert_eq!(
        status(&daemon, &["ping", "--auth-token-file", "/nowhere/at/all"]),
        74
    );
    assert_eq!(status(&daemon, &["ping"]), 0);
}

#[test]
fn a_wrong_auth_token_is_77_and_the_right_one_lets_in() {
    let directory = tempfile::tempdir().expect("a directory");
    let (right, wrong) = (
        directory.path().join("right"),
        directory.path().join("wrong"),
    );
    fs::write(&right, "secret\n").expect("write");
    fs::write(&wrong, "guess\n").expect("write");
    let daemon = Daemon::start(&["--auth-token-file", right.to_str().expect("text")]);
    assert_eq!(
        status(
            &daemon,
            &["ping", "--auth-token-file", right.to_str().expect("text")]
        ),
        0
    );
    assert_eq!(
        status(
            &daemon,
            &["ping", "--auth-token-file", wrong.to_str().expect("text")]
        ),
        77
    );
}

#[test]
fn signals_reach_the_command_and_end_it() {
    for (sent, expected) in [
        (Signal::TERM, 143),
        (Signal::INT, 130),
        (Signal::HUP, 129),
        (Signal::USR1, 138),
    ] {
        let daemon = Daemon::start(&[]);
        let directory = tempfile::tempdir().expect("a directory");
        let (mut child, command) = started(&daemon, "k", &directory, "exec sleep 60");
        signal(&child, sent);
        assert_eq!(wait(&mut child), Some(expected), "{sent:?}");
        assert!(is_gone(command));
        eventually(PATIENCE, "the lock is free", || !is_held(&daemon, "k"));
    }
}

#[test]
fn signals_end_a_wait_and_leave_the_queue() {
    for (sent, expected) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::QUIT, 131)] {
        let daemon = Daemon::start(&[]);
        let mut holder = daemon.connect();
        holder.acquire("k", 0);
        let mut child = latch(&daemon, &["run", "k", "--", "true"])
            .spawn()
            .expect("latch starts");
        daemon.wait_for_waiters("k", 1);
        signal(&child, sent);
        assert_eq!(wait(&mut child), Some(expected), "{sent:?}");
        daemon.wait_for_waiters("k", 0);
    }
}

#[test]
fn a_lost_lock_ends_the_command_also_one_that_ignores_the_polite_way() {
    for script in ["exec sleep 60", "trap '' TERM; while :; do sleep 1; done"] {
        let daemon = Daemon::start(&[]);
        let directory = tempfile::tempdir().expect("a directory");
        let (mut child, command) = started(&daemon, "k", &directory, script);
        drop(daemon);
        assert_eq!(wait(&mut child), Some(70), "{script}");
        assert!(is_gone(command), "{script}");
    }
}

#[test]
fn a_server_that_stands_still_for_longer_than_the_lease_is_a_lost_lock() {
    let daemon = Daemon::start(&["--default-lease-ttl", "1"]);
    let directory = tempfile::tempdir().expect("a directory");
    let (mut child, command) = started(&daemon, "k", &directory, "exec sleep 60");
    daemon.signal(Signal::STOP);
    let status = wait(&mut child);
    daemon.signal(Signal::CONT);
    assert_eq!(status, Some(70));
    assert!(is_gone(command));
}

#[test]
fn the_lease_is_renewed_for_as_long_as_the_command_runs() {
    let daemon = Daemon::start(&["--default-lease-ttl", "1"]);
    let mut child = latch(&daemon, &["run", "k", "--", "sleep", "3"])
        .spawn()
        .expect("latch starts");
    eventually(PATIENCE, "it is held", || is_held(&daemon, "k"));
    while child.try_wait().expect("a child").is_none() {
        assert!(is_held(&daemon, "k") || child.try_wait().expect("a child").is_some());
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(wait(&mut child), Some(0));
}

#[test]
fn what_the_command_leaves_behind_in_its_group_ends_with_it() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let left = directory.path().join("left");
    let script = format!("sleep 60 & echo $! > {}; exit 3", left.display());
    assert_eq!(status(&daemon, &["run", "k", "--", "sh", "-c", &script]), 3);
    let left: i32 = fs::read_to_string(&left)
        .expect("written")
        .trim()
        .parse()
        .expect("a number");
    assert!(is_gone(Pid::from_raw(left).expect("a process number")));
}

#[test]
fn kill_9_of_latch_ends_its_command_and_frees_the_lock() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let (mut child, command) = started(&daemon, "k", &directory, "exec sleep 60");
    signal(&child, Signal::KILL);
    wait(&mut child);
    eventually(PATIENCE, "the lock is free", || !is_held(&daemon, "k"));
    eventually(PATIENCE, "the command has ended", || {
        let state = fs::read_to_string(format!("/proc/{}/stat", command.as_raw_nonzero()));
        state.map_or(true, |stat| stat.contains(") Z"))
    });
}

#[test]
fn a_stopped_command_stops_latch_and_goes_on_only_with_the_lock() {
    for (pause, expected) in [
        (Duration::from_millis(100), 0),
        (Duration::from_millis(2500), 70),
    ] {
        let daemon = Daemon::start(&["--default-lease-ttl", "2"]);
        let directory = tempfile::tempdir().expect("a directory");
        let (mut child, command) = started(&daemon, "k", &directory, "kill -STOP $$; exit 0");
        let stat = format!("/proc/{}/stat", child.id());
        eventually(PATIENCE, "latch has stopped, too", || {
            fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T"))
        });
        thread::sleep(pause);
        signal(&child, Signal::CONT);
        assert_eq!(wait(&mut child), Some(expected), "after {pause:?}");
        assert!(is_gone(command));
    }
}

#[test]
fn fifty_at_once_never_overlap() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let log = directory.path().join("log");
    let script = format!("echo in >> {0}; sleep 0.01; echo out >> {0}", log.display());
    let mut children: Vec<Child> = (0..50)
        .map(|_| {
            latch(&daemon, &["run", "k", "--", "sh", "-c", &script])
                .spawn()
                .expect("latch starts")
        })
        .collect();
    for child in &mut children {
        let deadline = Instant::now() + 3 * PATIENCE;
        while child.try_wait().expect("a child").is_none() {
            assert!(Instant::now() < deadline, "somebody does not get his turn");
            thread::sleep(Duration::from_millis(2));
        }
    }
    let log = fs::read_to_string(log).expect("the log");
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 100);
    assert!(lines.chunks(2).all(|pair| pair == ["in", "out"]), "{log}");
}

#[test]
fn a_lock_can_be_taken_for_a_script_where_the_server_keeps_it() {
    let daemon = Daemon::start(&["--no-auto-release-on-disconnect"]);
    let output = run(&daemon, &["acquire", "k", "--lease", "20"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let token = text(&output.stdout).trim().to_owned();
    assert!(is_held(&daemon, "k"));
    assert_eq!(
        text(&run(&daemon, &["renew", "k", &token, "--lease", "9"]).stdout),
        "9\n"
    );
    assert_eq!(status(&daemon, &["release", "k", &token]), 0);
    assert_eq!(status(&daemon, &["release", "k", &token]), 70);
    assert_eq!(status(&daemon, &["wait", "k"]), 0);
}

#[test]
fn where_the_server_does_not_keep_it_acquire_says_so() {
    let daemon = Daemon::start(&[]);
    let output = run(&daemon, &["acquire", "k"]);
    assert_eq!(output.status.code(), Some(70));
    assert!(text(&output.stderr).contains("--no-auto-release-on-disconnect"));
    assert!(output.stdout.is_empty());
}

#[test]
fn stats_are_a_table_or_the_servers_json() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("a\u{1b}[2Jb", 0);
    let table = text(&run(&daemon, &["stats"]).stdout);
    assert!(
        table.contains("a\\x1b[2Jb") && table.contains("1 in use"),
        "{table}"
    );
    let json = text(&run(&daemon, &["stats", "--json"]).stdout);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["locks"][0]["key"], "a\u{1b}[2Jb");
}

#[test]
fn an_older_token_is_told_from_the_newest() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("fence");
    let file = file.to_str().expect("text");
    let mut holder = daemon.connect();
    let older = holder.acquire("a", 0).token;
    let newer = holder.acquire("b", 0).token;
    for (token, expected) in [(&older, 0), (&newer, 0), (&newer, 0), (&older, 1)] {
        assert_eq!(status(&daemon, &["fence-check", file, token]), expected);
    }
    assert_eq!(
        status(&daemon, &["fence-check", "/nowhere/at/all", &newer]),
        74
    );
    assert_eq!(status(&daemon, &["fence-check", file, "x"]), 64);
}
