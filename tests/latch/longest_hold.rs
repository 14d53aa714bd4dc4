//! Servers with `--max-hold`: what clients do when a lock has been held for long enough.

use std::process::Stdio;
use std::time::{Duration, Instant};

use latchd::client::{Address, Client, Loss};

use crate::support::latch::{ended, is_gone, latch, ready, run, text};
use crate::support::silent::free_addr;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, Daemon, Signal, PATIENCE};

#[test]
fn a_command_gets_most_of_the_time_of_max_hold() {
    fair_test(|| {
        let daemon = Daemon::start(&["--max-hold", "6"]);
        let output = run(
            &daemon,
            &["run", "k", "--kill-after", "1", "--", "sleep", "3"],
        );
        let said = text(&output.stderr);
        in_time!(output.status.success(), "{:?} {said}", output.status);
        assert_eq!(said, "");
    });
}

#[test]
fn a_command_is_killed_before_max_hold_is_over() {
    fair_test(|| {
        let daemon = Daemon::start(&["--max-hold", "8"]);
        let directory = tempfile::tempdir().expect("a directory");
        let script = "trap '' TERM; eval \"$READY\"; while :; do sleep 0.02; done";
        let options = ["--lease", "7", "--kill-after", "2"];
        let arguments = [&["run", "k"][..], &options, &["--", "sh", "-c", script]].concat();
        let mut command = latch(&daemon, &arguments);
        command.stderr(Stdio::piped());
        let before = Instant::now();
        let (mut child, command) = ready(command, &directory);
        let (status, said) = ended(&mut child);
        let over = before.elapsed();
        let expected = format!(
            "latch: k at {}: the lock was lost: it was held for as long as the server allows \
             (--max-hold)\n",
            daemon.addr()
        );
        assert_eq!((status, said), (Some(70), expected));
        assert!(is_gone(command));
        in_time!(over < Duration::from_secs(8), "{over:?}");
    });
}

#[test]
fn a_guard_says_that_the_server_allows_no_longer_hold() {
    let daemon = Daemon::start(&["--max-hold", "2"]);
    let server: Address = daemon.addr().to_string().parse().expect("an address");
    let client = Client::new([server]);
    let guard = client.lock("k").acquire().expect("it is free");
    assert_eq!(guard.lease(), Duration::from_secs(2));
    // The program is warned before the end although the server answers.
    let (warn, warned) = std::sync::mpsc::channel();
    assert!(guard.on_silence(Duration::from_millis(200), move || {
        let _ = warn.send(());
    }));
    warned.recv_timeout(PATIENCE).expect("a warning");
    eventually(PATIENCE, "it is lost", || guard.loss().is_some());
    assert_eq!(guard.loss(), Some(Loss::MaxHold));
    assert!(!guard.is_held());
}

#[test]
fn a_lock_broken_by_another_is_not_blamed_on_max_hold() {
    let daemon = Daemon::start(&["--max-hold", "5"]);
    let server: Address = daemon.addr().to_string().parse().expect("an address");
    let client = Client::new([server]);
    let guard = client.lock("k").acquire().expect("it is free");
    // The renewal gets less than the lease, so it is the last lease that the server allows.
    assert!(guard.renew());
    let token = guard.token();
    let mut other = daemon.connect();
    assert_eq!(other.request("r", "k", &token.to_string()), "ok");
    guard.renew();
    eventually(PATIENCE, "it is lost", || guard.loss().is_some());
    assert_eq!(guard.loss(), Some(Loss::Refused));
}

/// After a restart that hands over, the longest hold may be shorter.
#[test]
fn a_guard_does_not_outlast_a_server_that_allows_less_than_the_last_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let handover = directory.path().join("handover").display().to_string();
    let port = free_addr().port().to_string();
    let start = |max_hold| {
        let mut command = Daemon::command();
        command
            .args(["--port", &port, "--print-port", "--max-hold", max_hold])
            .args(["--handover-file", &handover]);
        Daemon::from_command(command)
    };
    let mut daemon = start("20");
    let server: Address = daemon.addr().to_string().parse().expect("an address");
    let guard = Client::new([server]).lock("k").acquire();
    let guard = guard.expect("it is free");
    // From now on, this is the last lease that the server allows.
    assert!(guard.renew());
    daemon.signal(Signal::TERM);
    let ended = daemon.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(ended.code(), Some(0), "{}", daemon.log());
    daemon = start("2");
    let granted = daemon.connect().request("l", "k", "30");
    assert!(granted.starts_with("ok "), "{granted}");
    assert!(!guard.is_held(), "two hold it");
}
