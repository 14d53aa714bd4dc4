//! What `latch` says and does while a server that has just restarted cannot know all holders yet.

use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::restarts::Service;
use crate::support::latch::{ended, latch, output, ready, run, signal, text, Latch};
use crate::support::silent::free_addr;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, waiter_count, Daemon, Signal, PATIENCE};

/// Kills the server, and starts it again.
fn crash(service: &Service, daemon: &Daemon, settle: &str) -> Daemon {
    daemon.signal(Signal::KILL);
    daemon.wait_exit(PATIENCE).expect("it ends");
    service.start_with(&["--settle", settle])
}

/// A server that settles for ten minutes after a crash.
fn settling(service: &Service) -> Daemon {
    let first = service.start_with(&["--settle", "600"]);
    crash(service, &first, "600")
}

/// A job whose script runs `latch` again under the lock, in the environment that it has.
fn job(daemon: &Daemon, directory: &tempfile::TempDir, script: &str) -> Latch {
    let script = format!(
        "eval \"$READY\"; cd {}; {script}",
        directory.path().display()
    );
    let mut command = latch(daemon, &["run", "k", "--", "sh", "-c", &script]);
    command.stderr(Stdio::piped());
    ready(command, directory).0
}

#[test]
fn nested_runs_go_on_over_a_crash_of_the_server() {
    let service = Service::new();
    let mut daemon = service.start_with(&["--settle", "60"]);
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name| directory.path().join(name);
    let script = "until [ -e over ]; do latch run k --nested -- sh -c 'echo >>log' || exit 9; done";
    let mut job = job(&daemon, &directory, script);
    let lines = || fs::read(path("log")).map_or(0, |log| log.len());
    for _ in 0..3 {
        eventually(PATIENCE, "nested runs", || lines() > 2);
        daemon = crash(&service, &daemon, "60");
        let before = lines();
        eventually(PATIENCE, "nested runs go on", || lines() > before + 2);
        assert_eq!(waiter_count(&daemon.stats(), "k"), 0);
    }
    fs::write(path("over"), "").expect("there is room");
    assert_eq!(ended(&mut job), (Some(0), String::new()));
}

#[test]
fn no_command_waits_for_its_own_lock_after_a_crash() {
    let service = Service::new();
    let first = service.start_with(&["--settle", "60"]);
    let directory = tempfile::tempdir().expect("a directory");
    let script = "until [ -e down ]; do sleep 0.02; done; latch wait k; exec latch run k -- true";
    let mut job = job(&first, &directory, script);
    // The lock comes back only after the question.
    signal(&job, Signal::STOP);
    let second = crash(&service, &first, "60");
    fs::write(directory.path().join("down"), "").expect("there is room");
    thread::sleep(Duration::from_secs(1));
    signal(&job, Signal::CONT);
    let (status, said) = ended(&mut job);
    assert_eq!(status, Some(75), "{said}");
    assert_eq!(said.matches("would wait for itself").count(), 2, "{said}");
    drop(second);
}

/// A token that holds nothing, as in a worker that has outlived its job.
fn with_a_token(daemon: &Daemon, arguments: &[&str]) -> std::process::Command {
    let mut command = latch(daemon, arguments);
    command
        .env("LATCH_KEY", "k")
        .env("LATCH_TOKEN", "0".repeat(32));
    command
}

#[test]
fn a_grant_that_may_come_back_is_neither_held_nor_over() {
    let service = Service::new();
    let daemon = settling(&service);
    let options: [&[&str]; 4] = [
        &["--nested", "-n"],
        &["--nested", "-n", "--busy-ok"],
        &["--nested", "--timeout", "1"],
        &["--timeout", "1"],
    ];
    for options in options {
        let arguments = [&["run", "k"], options, &["--", "echo", "ran"]].concat();
        let refused = output(&mut with_a_token(&daemon, &arguments));
        assert_eq!(refused.status.code(), Some(75), "{options:?}");
        assert_eq!(text(&refused.stdout), "", "{options:?}");
        let said = text(&refused.stderr);
        let why = ": the server has just restarted, grants begin in ";
        assert!(
            said.contains("not granted ") && said.contains(why),
            "{said}"
        );
    }
}

#[test]
fn a_server_that_does_not_answer_says_nothing_about_a_lock() {
    fair_test(|| {
        let addr = free_addr().to_string();
        let elsewhere = Daemon::start(&[]);
        let ask = |options: &[&str]| {
            let server = ["--server", &addr];
            let arguments = [
                &["run", "k", "--nested"],
                &server[..],
                options,
                &["--", "true"],
            ];
            Latch::start(with_a_token(&elsewhere, &arguments.concat()).stderr(Stdio::piped()))
        };
        let began = std::time::Instant::now();
        let (status, said) = ended(&mut ask(&[]));
        assert_eq!(status, Some(69), "{said}");
        assert!(began.elapsed() > Duration::from_millis(1500));
        in_time!(began.elapsed() < Duration::from_secs(10));
        // With the server back, the answer is that the lock is over.
        let mut asking = [ask(&[]), ask(&["--retry"])];
        thread::sleep(Duration::from_millis(500));
        let port = addr.rsplit(':').next().expect("a port");
        let mut command = Daemon::command();
        command.args(["--port", port, "--print-port"]);
        let _daemon = Daemon::from_command(command);
        for asking in &mut asking {
            assert_eq!(ended(asking), (Some(0), String::new()));
        }
    });
}

#[test]
fn status_and_stats_say_that_they_do_not_know_yet() {
    let service = Service::new();
    let daemon = settling(&service);
    let status = |arguments: &[&str]| {
        let output = run(&daemon, &[&["status", "k"], arguments].concat());
        (
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    let (code, said, why) = status(&[]);
    let unknown = format!("key: k\nheld: unknown\nserver: {}\n", daemon.addr());
    assert_eq!((code, said), (Some(75), unknown));
    let expected = format!("latch: k at {}: not known for ", daemon.addr());
    assert!(why.starts_with(&expected), "{why}");
    assert!(
        why.ends_with(" m: the server has just restarted\n"),
        "{why}"
    );
    let (code, json, _) = status(&["--json"]);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((code, &json["held"]), (Some(75), &Value::Null));
    let stats = |arguments: &[&str]| text(&run(&daemon, arguments).stdout);
    let line = "the server has just restarted, grants begin in ";
    assert!(stats(&["stats"]).contains(&format!("0 in use\n{line}")));
    assert!(stats(&["stats", "k"]).starts_with(&format!("k: {line}")));
    // A claim that waits says nothing about a holder.
    let mut waiting = Latch::start(&mut latch(&daemon, &["run", "k", "--", "true"]));
    daemon.wait_for_waiters("k", 1);
    assert_eq!(status(&[]).0, Some(75));
    assert_eq!(waiting.try_wait().expect("a child"), None);
}

#[test]
fn status_knows_a_holder_that_has_come_back() {
    let service = Service::new();
    let first = service.start_with(&["--settle", "60"]);
    let directory = tempfile::tempdir().expect("a directory");
    let _job = job(&first, &directory, "exec sleep 60");
    let second = crash(&service, &first, "60");
    eventually(PATIENCE, "the holder comes back", || {
        run(&second, &["status", "k"]).status.code() == Some(1)
    });
    let said = text(&run(&second, &["stats", "k"]).stdout);
    assert!(
        said.starts_with("k: lock, 1 of 1 held, 0 waiting\n"),
        "{said}"
    );
    assert!(said.contains("grants begin in "), "{said}");
    assert_eq!(run(&second, &["status", "other"]).status.code(), Some(75));
}
