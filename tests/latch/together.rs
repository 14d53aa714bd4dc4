//! Several locks that are held together: `latch run --and`, and `Client::lock_all`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use crate::reconnecting::{listener, Peer};
use crate::support::latch::{is_held, latch, output, started, status, wait, Latch};
use crate::support::silent::free_port;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{program, Daemon, Signal, PATIENCE};
use latchd::client::{Address, CancelHandle, Client, Error, Guard};

const ADMIN_TOKEN: &str = "secret";

fn client(daemon: &Daemon) -> Client {
    Client::new([Address::Tcp(daemon.addr().to_string())])
}

/// A server that lets this test break grants.
fn breakable() -> (Daemon, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("admin");
    fs::write(&file, ADMIN_TOKEN).expect("there is room");
    let file = file.display().to_string();
    (Daemon::start(&["--admin-token-file", &file]), directory)
}

fn break_lock(client: &Client, key: &str) {
    let connected = client.connect(client.server_of(key));
    let broken = connected.and_then(|mut it| it.break_grants(key, None, Some(ADMIN_TOKEN)));
    broken.expect("it is held");
}

#[test]
fn opposite_orders_never_wait_for_each_other() {
    let daemon = Daemon::start(&[]);
    thread::scope(|scope| {
        for keys in [["a", "b"], ["b", "a"]] {
            let daemon = &daemon;
            scope.spawn(move || {
                let command = ["run", keys[0], "--and", keys[1], "-w", "60", "--", "true"];
                for round in 0..50 {
                    assert_eq!(status(daemon, &command), 0, "{keys:?}, round {round}");
                }
            });
        }
    });
}

#[test]
fn a_lock_that_is_busy_gives_the_others_back() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let busy = client.lock("b").acquire().expect("it is free");
    let tried = client.lock_all(&["b", "a"]).try_acquire();
    assert!(tried.expect("it answers").is_none());
    assert!(!is_held(&daemon, "a"));
    drop(busy);
    let guards = client
        .lock_all(&["b", "a"])
        .acquire()
        .expect("all are free");
    assert!(guards.is_held());
    let keys: Vec<&str> = guards.iter().map(Guard::key).collect();
    assert_eq!(keys, ["a", "b"]);
    guards.release().expect("they are held");
    assert!(!is_held(&daemon, "a") && !is_held(&daemon, "b"));
}

#[test]
fn one_timeout_is_over_all_waits() {
    const TOKEN: &str = "0123456789abcdef0123456789abcdef";
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        let mut waits = Vec::new();
        let mut peers = Vec::new();
        for key in ["a", "b"] {
            let mut peer = Peer::accept(&listener);
            assert!(peer.request().starts_with("tag _ "));
            peer.answer("ok");
            let request = peer.request();
            let wait = request.strip_prefix(&format!("l {key} ")).expect(&request);
            waits.push(wait.parse::<u64>().expect(&request));
            if key == "a" {
                thread::sleep(Duration::from_secs(2));
                peer.answer(&format!("ok {TOKEN} 60"));
            } else {
                peer.answer("timeout");
            }
            peers.push(peer);
        }
        assert_eq!(peers[0].request(), format!("r a {TOKEN}"));
        peers[0].answer("ok");
        waits
    });
    let mut command = Command::new(program("latch"));
    let address = addr.to_string();
    command.args(["run", "b", "--and", "a", "--timeout", "20"]);
    let busy = output(command.args(["--server", &address, "--", "true"]));
    assert_eq!(busy.status.code(), Some(75), "{busy:?}");
    let waits = server.join().expect("it was asked");
    assert!(waits[0] <= 20 && waits[1] <= 18, "{waits:?}");
}

/// The address of a server that grants each lock after `pause`, and then answers no more over that
/// connection.
fn slow_server(pause: Duration) -> String {
    let (listener, addr) = listener();
    thread::spawn(move || {
        let mut connections = Vec::new();
        for stream in listener.incoming() {
            let stream = stream.expect("a client");
            let mut answers = stream.try_clone().expect("a descriptor");
            let mut requests = BufReader::new(stream).lines();
            while let Some(Ok(request)) = requests.next() {
                requests.nth(1);
                if request == "l" {
                    thread::sleep(pause);
                    let _ = answers.write_all(b"ok 0123456789abcdef0123456789abcdef 60\n");
                    break;
                }
                let _ = answers.write_all(b"ok\n");
            }
            connections.push(requests);
        }
    });
    addr.to_string()
}

fn run_under_six(server: &str, timeout: &str) -> Output {
    let mut command = Command::new(program("latch"));
    command.args(["run", "a", "--timeout", timeout, "--server", server]);
    for key in ["b", "c", "d", "e", "f"] {
        command.args(["--and", key]);
    }
    output(command.args(["--", "true"]))
}

#[test]
fn one_deadline_is_over_all_answers() {
    let late = run_under_six(&slow_server(Duration::from_millis(900)), "2");
    assert_eq!(late.status.code(), Some(69), "{late:?}");
}

#[test]
fn a_silent_server_holds_up_the_releases_once() {
    fair_test(|| {
        let server = slow_server(Duration::ZERO);
        let began = Instant::now();
        let done = run_under_six(&server, "60");
        assert_eq!(done.status.code(), Some(0), "{done:?}");
        in_time!(began.elapsed() < Duration::from_secs(6));
    });
}

#[test]
fn the_question_for_the_outer_lock_counts_as_waiting() {
    fair_test(|| {
        let silent = [0; 8].map(|_| listener());
        let addrs = silent.each_ref().map(|(_, addr)| addr.to_string());
        let mut command = Command::new(program("latch"));
        command.args(["run", "k", "--timeout", "2", "--server", &addrs.join("|")]);
        command
            .env("LATCH_KEY", "k")
            .env("LATCH_TOKEN", "0".repeat(32));
        let began = Instant::now();
        let failed = output(command.args(["--", "true"]));
        assert_eq!(failed.status.code(), Some(69), "{failed:?}");
        in_time!(began.elapsed() < Duration::from_secs(6));
    });
}

#[test]
fn the_loss_of_any_lock_ends_the_command() {
    let (daemon, _admin) = breakable();
    let directory = tempfile::tempdir().expect("a directory");
    let options = ["--and", "b", "--kill-after", "1"];
    let script = "eval \"$READY\"; exec sleep 60";
    let (mut child, _) = started(&daemon, "a", &directory, &options, script);
    break_lock(&client(&daemon), "b");
    assert_eq!(wait(&mut child), Some(70));
    assert!(!is_held(&daemon, "a"));
}

#[test]
fn a_loss_ends_the_wait_for_the_next_lock() {
    let (daemon, _admin) = breakable();
    let client = client(&daemon);
    let busy = client.lock("b").acquire().expect("it is free");
    let mut waiting = Latch::start(&mut latch(
        &daemon,
        &["run", "a", "--and", "b", "--", "true"],
    ));
    daemon.wait_for_waiters("b", 1);
    break_lock(&client, "a");
    assert_eq!(wait(&mut waiting), Some(70));
    // The server may notice later that its other connection has closed.
    daemon.wait_for_waiters("b", 0);
    thread::scope(|scope| {
        let locks = client.lock_all(&["a", "b"]);
        let waiting = scope.spawn(move || locks.acquire_within(PATIENCE));
        daemon.wait_for_waiters("b", 1);
        break_lock(&client, "a");
        let lost = waiting.join().expect("it does not panic");
        assert!(matches!(lost, Err(Error::Lost(..))), "{lost:?}");
    });
    assert!(busy.is_held());
}

#[test]
fn a_handle_ends_the_wait_for_several_locks() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let _busy = client.lock("b").acquire().expect("it is free");
    let handle = CancelHandle::new().expect("a descriptor");
    thread::scope(|scope| {
        let locks = client.lock_all(&["a", "b"]);
        let locks = locks.each(|lock| lock.cancelled_by(&handle));
        let waiting = scope.spawn(move || locks.acquire_within(PATIENCE));
        daemon.wait_for_waiters("b", 1);
        handle.cancel();
        let cancelled = waiting.join().expect("it does not panic");
        assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
    });
    assert!(!is_held(&daemon, "a"));
}

#[test]
fn a_wait_for_several_locks_survives_a_restart() {
    let port = free_port().to_string();
    let start = || {
        let mut command = Daemon::command();
        command.args(["--port", &port, "--print-port"]);
        Daemon::from_command(command)
    };
    let mut daemon = start();
    let busy = client(&daemon).lock("b").acquire().expect("it is free");
    let command = ["run", "a", "--and", "b", "--retry", "--", "true"];
    let mut waiting = Latch::start(&mut latch(&daemon, &command));
    daemon.wait_for_waiters("b", 1);
    daemon.signal(Signal::KILL);
    daemon.wait_exit(PATIENCE).expect("it ends");
    drop(busy);
    daemon = start();
    assert_eq!(wait(&mut waiting), Some(0), "{}", daemon.log());
}

#[test]
fn what_cannot_be_held_together_is_not_asked_for() {
    let twice = Client::new(["127.0.0.1:1".parse().expect("an address")]);
    let refused = twice.lock_all(&["a", "b", "a"]).try_acquire();
    assert!(
        matches!(refused, Err(Error::InvalidArgument(_))),
        "{refused:?}"
    );
}
