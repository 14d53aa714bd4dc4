//! System calls that fail: who notices, and what goes on. Other files have more of them: the fence
//! file's writes and `fsync`, and randomness (`fences`), threads and descriptors that run out
//! (`limits`, `machine`), a full disk and a dead reader under the log (`log`).

use std::thread;
use std::time::{Duration, Instant};

use crate::fences::{inject, tracer};
use crate::support::limited::{is_served, limited};
use crate::support::needs::needs;
use crate::support::{eventually, parse_grant, processor_time, Client, Daemon, PATIENCE};

/// The system is out of something: clients keep what they have, new ones wait in the backlog.
#[test]
fn while_accept_fails_the_clients_that_are_there_are_served() {
    let Some(strace) = tracer() else { return };
    for error in ["EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"] {
        let daemon = Daemon::start(&[]);
        let mut early = daemon.connect();
        early.acquire("k", 0);
        let recover = inject(&strace, &daemon, &format!("accept4:error={error}"));
        let mut late = daemon.connect();
        daemon.wait_for_log("WARN cannot-accept", PATIENCE);
        let before = processor_time(daemon.pid());
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(500) {
            assert!(is_served(&mut early), "{error}");
            thread::sleep(Duration::from_millis(20));
        }
        let spent = processor_time(daemon.pid()) - before;
        assert!(spent < Duration::from_millis(200), "{error}: {spent:?}");
        late.send("ping\n_\n_\n");
        late.nothing_within(Duration::from_millis(100));
        recover();
        late.expect("ok");
        assert_eq!(early.request("l", "k", "0"), "timeout");
    }
}

/// What concerns one peer stops no other.
#[test]
fn an_aborted_connection_delays_no_other() {
    let Some(strace) = tracer() else { return };
    for error in ["ECONNABORTED", "EPROTO", "EHOSTUNREACH"] {
        let daemon = Daemon::start(&["--debug"]);
        let recover = inject(
            &strace,
            &daemon,
            &format!("accept4:error={error}:when=1..5"),
        );
        assert!(is_served(&mut daemon.connect()), "{error}");
        daemon.wait_for_log("DEBUG accept-failed error=", PATIENCE);
        recover();
        assert!(!daemon.log().contains("cannot-accept"), "{error}");
    }
}

/// Without a watch the server would not notice that a waiter has gone: it lets no such client wait.
#[test]
fn a_client_that_cannot_be_watched_does_not_wait() {
    let Some(strace) = tracer() else { return };
    // In seconds: neither the wait nor the lease ends during the test, however slow strace is.
    const LONG: u64 = 3600;
    let daemon = Daemon::start(&[]);
    let mut early = daemon.connect();
    let grant = early.acquire_for("k", 0, LONG);
    let mut waiter = daemon.connect();
    waiter.send(&format!("l\nk\n{LONG}\n"));
    daemon.wait_for_waiters("k", 1);
    let began = Instant::now();
    let recover = inject(&strace, &daemon, "epoll_ctl:error=ENOMEM");
    for _ in 0..50 {
        let mut newcomer = daemon.connect();
        // What is behind the claim must not make the system reset the connection.
        newcomer.send(&["ping\n_\n_\nl\nk\n60\n", &"ping\n_\n_\n".repeat(500)].concat());
        assert_eq!(newcomer.line(), "ok");
        newcomer.expect_eof();
    }
    daemon.wait_for_log("WARN turned-away reason=no-watch", PATIENCE);
    daemon.wait_for_waiters("k", 1);
    assert!(is_served(&mut daemon.connect()) && is_served(&mut early));
    // By now the wait is long, and its socket is to be watched for input, too.
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(early.request("r", "k", &grant.token), "ok");
    assert!(parse_grant(&waiter.line(), "ok").is_some());
    recover();
    let mut next = daemon.connect();
    next.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 1);
    drop(next);
    daemon.wait_for_waiters("k", 0);
    let line_count = daemon.log().matches("turned-away reason=no-watch").count() as u64;
    let most = began.elapsed().as_secs() + 1;
    assert!(line_count <= most, "{line_count} lines");
}

#[test]
fn a_lock_outlives_a_reply_that_cannot_be_sent() {
    let Some(strace) = tracer() else { return };
    for error in ["EPIPE", "ECONNRESET", "EIO", "ENOBUFS", "ENOMEM"] {
        let daemon = Daemon::start(&[]);
        let mut holder = daemon.connect();
        holder.acquire_for("k", 0, 3);
        let granted = Instant::now();
        let mut waiter = daemon.connect();
        waiter.send("l\nk\n60\n");
        daemon.wait_for_waiters("k", 1);
        let recover = inject(&strace, &daemon, &format!("sendto:error={error}:when=1"));
        holder.send("ping\n_\n_\n");
        holder.expect_eof();
        recover();
        assert!(parse_grant(&waiter.line(), "ok").is_some(), "{error}");
        assert!(granted.elapsed() > Duration::from_millis(2900), "{error}");
        assert!(is_served(&mut waiter), "{error}");
    }
}

#[test]
fn a_log_file_that_cannot_be_written_holds_up_no_command() {
    let Some(strace) = tracer() else { return };
    let directory = tempfile::tempdir().expect("there is room");
    for error in ["EIO", "ENOSPC", "EPIPE"] {
        let path = directory.path().join(error);
        let mut command = Daemon::command();
        command.args(["--port", "0", "--print-port", "--log-file"]);
        command.arg(&path).env("RUST_LOG", "trace");
        let daemon = Daemon::from_command(command);
        let mut client = daemon.connect();
        let logs = |key: &str| std::fs::read_to_string(&path).is_ok_and(|log| log.contains(key));
        let recover = inject(&strace, &daemon, &format!("write:error={error}"));
        for number in 0..200 {
            client.acquire(&format!("lost-{number}"), 0);
        }
        // The writer may lag behind. When it has lost so many lines, it has lost the first of them.
        eventually(PATIENCE, "lines are lost", || {
            let counters = client.request("stats", "counters", "_");
            let json = counters.strip_prefix("ok ").expect("an object");
            let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
            json["counters"]["dropped_log_lines"].as_u64() >= Some(200)
        });
        recover();
        client.acquire("written", 0);
        eventually(PATIENCE, "the log goes on", || logs("key=written"));
        assert!(logs("WARN log-lines-lost dropped="), "{error}");
        // The last lines may be written after the recovery.
        assert!(!logs("key=lost-0 "), "{error}: the fault was never there");
        assert!(is_served(&mut client), "{error}");
    }
}

/// A kernel before 3.17, or a sandbox that refuses the call: there is a file with randomness, too.
#[test]
fn without_getrandom_tokens_are_random_all_the_same() {
    let strace = needs!("strace");
    for error in ["ENOSYS", "EPERM"] {
        let inject = format!("inject=getrandom:error={error}");
        let strace = strace.path().to_string_lossy();
        let wrapper = [&strace, "-D", "-f", "-qq", "-o", "/dev/null", "-e", &inject];
        let daemon = Daemon::from_command(limited(&wrapper));
        let mut client: Client = daemon.connect();
        let tokens = ["a", "b"].map(|key| client.acquire(key, 0).token);
        assert_ne!(tokens[0][16..], tokens[1][16..], "{error}");
    }
}
