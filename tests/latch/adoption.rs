//! Locks that outlive a bad network, with a real server behind a proxy that cuts.

use std::fs;
use std::io::Read;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::at_the_end::AtTheEnd;
use crate::support::latch::{is_gone, is_held, latch, ready, signal, wait, Latch};
use crate::support::silent::free_port;
use crate::support::stalls::fairly_within;
use crate::support::wire_cutter::{Wire, WireCutter};
use crate::support::{eventually, Daemon, Scheme, Signal, PATIENCE};
use latchd::client::{Address, Client, Guard, Loss};
use rustix::process::Pid;

/// The servers: with a release on disconnect, and without.
const BOTH: [&[&str]; 2] = [&[], &["--no-auto-release-on-disconnect"]];

const LEASE: Duration = Duration::from_secs(8);

fn guard_through(proxy: &WireCutter) -> Guard {
    let client = Client::new([Address::Tcp(proxy.addr().to_string())]);
    let guard = client.lock("k").lease(LEASE).tag("the holder").acquire();
    guard.expect("it is free")
}

/// Does something to the connection of a guard, and tells how the guard fares. A lease ends on a
/// machine that runs none of the processes for a quarter of it.
fn after(options: &[&str], act: impl Fn(&WireCutter, &Wire)) -> Option<Loss> {
    let fares = fairly_within(LEASE / 4, || match after_once(options, &act) {
        Some(Loss::Deadline) => Err(Loss::Deadline),
        other => Ok(other),
    });
    fares.unwrap_or_else(Some)
}

fn after_once(options: &[&str], act: impl Fn(&WireCutter, &Wire)) -> Option<Loss> {
    let daemon = Daemon::start_directly(Scheme::Plain, options);
    let proxy = WireCutter::before(daemon.addr());
    let guard = guard_through(&proxy);
    let count = proxy.count();
    act(&proxy, &proxy.wire());
    // A renewal is due within four seconds, and answered a second later over another connection.
    eventually(PATIENCE, "another connection, or a loss", || {
        guard.loss().is_some() || proxy.count() > count && guard.is_held() && guard.renew()
    });
    if guard.loss().is_none() {
        // Beyond the lease that was there before.
        thread::sleep(LEASE / 4);
        assert!(is_held(&daemon, "k") && guard.is_held());
        let mut other = daemon.connect();
        assert_eq!(other.request("l", "k", "0"), "timeout");
        let holders = other.request("stats", "holders", "k");
        assert!(holders.contains(r#""tag":"the holder""#), "{holders}");
        guard.release().expect("still held");
        assert!(!is_held(&daemon, "k"));
        return None;
    }
    guard.loss()
}

#[test]
fn a_cut_that_the_server_does_not_see_loses_nothing() {
    thread::scope(|scope| {
        for options in BOTH {
            scope.spawn(|| assert_eq!(after(options, |_, wire| wire.cut_client()), None));
            scope.spawn(|| assert_eq!(after(options, |_, wire| wire.half_close_client()), None));
        }
    });
}

#[test]
fn a_connection_that_stalls_or_swallows_loses_nothing() {
    thread::scope(|scope| {
        for options in BOTH {
            scope.spawn(|| assert_eq!(after(options, |_, wire| wire.stall()), None));
            scope.spawn(|| assert_eq!(after(options, |_, wire| wire.swallow()), None));
        }
    });
}

#[test]
fn a_cut_that_the_server_sees_loses_what_it_releases() {
    let both = |_: &WireCutter, wire: &Wire| wire.cut();
    // The server has released the lock by the time at which the client comes back.
    let server_first = |_: &WireCutter, wire: &Wire| wire.cut_server();
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(after(BOTH[0], server_first), Some(Loss::Closed)));
        scope.spawn(|| assert_eq!(after(BOTH[1], server_first), None));
        scope.spawn(|| assert_eq!(after(BOTH[1], both), None));
    });
}

#[test]
fn a_cut_during_the_adoption_loses_nothing() {
    thread::scope(|scope| {
        for options in BOTH {
            scope.spawn(|| {
                let again = |proxy: &WireCutter, wire: &Wire| {
                    proxy.swallow_next();
                    let count = proxy.count();
                    wire.cut_client();
                    proxy.wait_for(count + 1);
                    let wire = proxy.wire();
                    eventually(PATIENCE, "the adoption is answered", || {
                        wire.replies().lines().count() >= 2
                    });
                    wire.cut();
                };
                assert_eq!(after(options, again), None);
            });
        }
    });
}

/// As behind a proxy that passes on the end of the client's direction before that of the other: the
/// server has seen the end by the time of the `adopt`, and its reply still arrives.
#[test]
fn an_adopt_whose_end_the_server_has_seen_loses_nothing() {
    thread::scope(|scope| {
        for options in BOTH {
            scope.spawn(|| {
                let half_closed = |proxy: &WireCutter, wire: &Wire| {
                    let count = proxy.count();
                    proxy.half_close_servers(true);
                    wire.cut_client();
                    // The server may be faster than the end of one of them.
                    proxy.wait_for(count + 5);
                    proxy.half_close_servers(false);
                };
                assert_eq!(after(options, half_closed), None);
            });
        }
    });
}

#[test]
fn a_cut_at_the_release_leaves_the_key_free_and_no_failure() {
    for options in BOTH {
        let daemon = Daemon::start(options);
        let proxy = WireCutter::before(daemon.addr());
        let guard = guard_through(&proxy);
        proxy.wire().swallow();
        let began = Instant::now();
        guard.release().expect("it was held");
        assert!(began.elapsed() < PATIENCE);
        assert!(!is_held(&daemon, "k"));
    }
}

/// A command under the lock of a server behind the proxy. It runs: a cut before would end the wait.
fn run_through(proxy: &WireCutter, daemon: &Daemon, lease: &str, script: &str) -> (Latch, Pid) {
    let directory = tempfile::tempdir().expect("a directory");
    let script = format!("eval \"$READY\"; {script}");
    let arguments = ["run", "k", "--lease", lease, "--", "sh", "-c", &script];
    let mut command = latch(daemon, &arguments);
    command
        .env("LATCH_SERVER", proxy.addr().to_string())
        .stderr(Stdio::piped());
    ready(command, &directory)
}

#[test]
fn a_command_that_ends_without_a_connection_releases_later() {
    let daemon = Daemon::start(BOTH[1]);
    let proxy = WireCutter::before(daemon.addr());
    let directory = tempfile::tempdir().expect("a directory");
    let go_on = directory.path().join("go-on");
    let script = format!("until [ -e {} ]; do sleep 0.02; done", go_on.display());
    let (mut child, command) = run_through(&proxy, &daemon, "60", &script);
    proxy.hang_up(true);
    proxy.wire().cut();
    fs::write(&go_on, "").expect("there is room");
    eventually(PATIENCE, "the command has ended", || is_gone(command));
    proxy.wait_for_hang_ups(2);
    assert_eq!(child.try_wait().expect("a child"), None);
    proxy.hang_up(false);
    assert_eq!(wait(&mut child), Some(0));
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn a_release_that_no_server_hears_is_told_with_its_time() {
    let daemon = Daemon::start(BOTH[1]);
    let proxy = WireCutter::before(daemon.addr());
    let directory = tempfile::tempdir().expect("a directory");
    let go_on = directory.path().join("go-on");
    let script = format!("until [ -e {} ]; do sleep 0.02; done", go_on.display());
    let (mut child, _) = run_through(&proxy, &daemon, "6", &script);
    proxy.hang_up(true);
    proxy.wire().cut();
    fs::write(&go_on, "").expect("there is room");
    assert_eq!(wait(&mut child), Some(0));
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("piped");
    stderr.read_to_string(&mut said).expect("text");
    assert!(said.contains("the key is free in "), "{said}");
}

#[test]
fn a_command_outlives_restarts_of_its_server() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state").display().to_string();
    let port = free_port().to_string();
    let start = || {
        let mut command = Daemon::command();
        command.args(["--port", &port, "--print-port", "--state-file", &state]);
        Daemon::from_command(command)
    };
    let mut daemon = start();
    let ready_file = tempfile::tempdir().expect("a directory");
    let go_on = directory.path().join("go-on");
    let script = format!(
        "eval \"$READY\"; until [ -e {} ]; do sleep 0.02; done",
        go_on.display()
    );
    let arguments = ["run", "k", "--", "sh", "-c", &script];
    let (mut child, _) = ready(latch(&daemon, &arguments), &ready_file);
    for _ in 0..3 {
        daemon.signal(Signal::TERM);
        let ended = daemon.wait_exit(PATIENCE).expect("it ends");
        assert_eq!(ended.code(), Some(0), "{}", daemon.log());
        daemon = start();
        assert_eq!(daemon.connect().request("l", "k", "0"), "timeout");
        eventually(PATIENCE, "the client comes back", || {
            let holders = daemon.connect().request("stats", "holders", "k");
            holders.contains(r#""peer":"127.0.0.1:"#)
        });
        assert_eq!(child.try_wait().expect("a child"), None);
    }
    fs::write(&go_on, "").expect("there is room");
    assert_eq!(wait(&mut child), Some(0));
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn random_cuts_end_no_job_and_share_no_lock() {
    survive_cuts(20);
}

#[test]
#[ignore = "takes minutes"]
fn two_hundred_random_cuts_end_no_job_and_share_no_lock() {
    survive_cuts(200);
}

/// One `latch run` behind a proxy that cuts in every way, beside a witness who tries to get the
/// lock all the time.
fn survive_cuts(count: usize) {
    let options = [BOTH[1], &["--debug"]].concat();
    let daemon = Daemon::start_directly(Scheme::Plain, &options);
    let proxy = WireCutter::before(daemon.addr());
    // Half a minute without an answer would end the job. A machine is not late for so long.
    let (mut child, _) = run_through(&proxy, &daemon, "60", "exec sleep 3600");
    let is_over = AtomicBool::new(false);
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut random = seed;
    let mut below = |limit: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) % limit
    };
    let other_grant = thread::scope(|scope| {
        let end = AtTheEnd(&is_over);
        let witness = scope.spawn(|| {
            let mut other = daemon.connect();
            while !is_over.load(Ordering::SeqCst) {
                let reply = other.request("l", "k", "0");
                if reply != "timeout" {
                    return Some(reply);
                }
                thread::sleep(Duration::from_millis(1));
            }
            None
        });
        for _ in 0..count {
            let connections = proxy.count();
            let wire = proxy.wire();
            if below(4) == 0 {
                proxy.swallow_next();
            }
            match below(5) {
                0 => wire.cut(),
                1 => wire.cut_client(),
                2 => wire.cut_server(),
                3 => wire.half_close_client(),
                _ => {
                    proxy.hang_up(true);
                    wire.cut();
                    thread::sleep(Duration::from_millis(below(500)));
                    proxy.hang_up(false);
                }
            }
            let mut has_ended = false;
            eventually(PATIENCE, "another connection", || {
                has_ended = child.try_wait().expect("a child").is_some();
                has_ended || proxy.count() > connections
            });
            if has_ended {
                break;
            }
            thread::sleep(Duration::from_millis(below(300)));
        }
        // The last connection may be one that swallows.
        eventually(PATIENCE, "the client has an answer again", || {
            let has_ended = child.try_wait().expect("a child").is_some();
            has_ended || proxy.wire().has_passed_replies()
        });
        drop(end);
        witness.join().expect("it only asks")
    });
    let ended = child.try_wait().expect("a child");
    if ended.is_some() || other_grant.is_some() {
        let _ = child.kill();
        let mut said = String::new();
        let mut stderr = child.stderr.take().expect("piped");
        stderr.read_to_string(&mut said).expect("text");
        let log = daemon.log();
        panic!("seed {seed}: {ended:?}, {other_grant:?}\n{said}\n{log}");
    }
    signal(&child, Signal::TERM);
    assert_eq!(wait(&mut child), None);
    eventually(PATIENCE, "the lock is free", || !is_held(&daemon, "k"));
}
