//! A server that restarts: in order, again and again, under the jobs of many clients; and after a
//! crash.

use std::fs;
use std::io::Read;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::at_the_end::AtTheEnd;
use crate::support::latch::{
    ended, is_gone, is_held, latch, ready, run, signal, text, wait, Latch,
};
use crate::support::silent::free_addr;
use crate::support::{
    eventually, is_soon, parse_grant, waiter_count, Client, Daemon, Event, Scheme, Signal, PATIENCE,
};

/// How many clients of an older kind come and go, two for each key.
const OLD_CLIENTS: usize = 4;

/// A place for one server after the other.
pub(crate) struct Service {
    port: String,
    state: String,
    _directory: tempfile::TempDir,
}

impl Service {
    pub(crate) fn new() -> Service {
        let directory = tempfile::tempdir().expect("a directory");
        Service {
            port: free_addr().port().to_string(),
            state: directory.path().join("state").display().to_string(),
            _directory: directory,
        }
    }

    /// An old client is waited for, but not for long.
    fn start(&self) -> Daemon {
        self.start_with(&[])
    }

    pub(crate) fn start_with(&self, more: &[&str]) -> Daemon {
        let mut command = Daemon::command();
        command
            .args(more)
            .args(["--port", &self.port, "--print-port"])
            .args(["--state-file", &self.state])
            .args(["--shutdown-timeout", "5"]);
        Daemon::from_command(command)
    }
}

/// How often the server restarts, and how many commands run under `latch run`.
const RESTARTS: usize = 20;
const JOBS: usize = 100;

/// Each job has a key of its own, beside clients that cannot adopt. A witness asks for each key
/// after each restart.
#[test]
fn twenty_restarts_under_a_hundred_jobs_end_none() {
    let service = Service::new();
    let mut daemon = service.start();
    let addr = daemon.addr();
    let keys: Vec<String> = (0..JOBS).map(|number| format!("job-{number}")).collect();
    let mut children: Vec<Latch> = keys
        .iter()
        .map(|key| Latch::start(&mut latch(&daemon, &["run", key, "--", "sleep", "3600"])))
        .collect();
    let stats = || Client::tcp(addr).stats();
    eventually(PATIENCE, "all jobs hold their locks", || {
        let stats = stats();
        let locks = stats["locks"].as_array().expect("a list");
        keys.iter()
            .all(|key| locks.iter().any(|lock| lock["key"] == **key))
    });
    let is_over = AtomicBool::new(false);
    let held = [const { AtomicBool::new(false) }; OLD_CLIENTS / 2];
    let grants = AtomicUsize::new(0);
    thread::scope(|scope| {
        let _end = AtTheEnd(&is_over);
        for number in 0..OLD_CLIENTS {
            let (held, is_over, grants) = (&held[number / 2], &is_over, &grants);
            let key = format!("old-{}", number / 2);
            scope.spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    let had =
                        Client::try_tcp(addr).and_then(|client| hold_once(client, &key, held));
                    grants.fetch_add(usize::from(had.is_some()), Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(5));
                }
            });
        }
        for restart in 0..RESTARTS {
            let before = grants.load(Ordering::SeqCst);
            eventually(PATIENCE, "old clients are served", || {
                grants.load(Ordering::SeqCst) > before
            });
            daemon.signal(Signal::TERM);
            let ended = daemon.wait_exit(PATIENCE).expect("it ends");
            assert_eq!(ended.code(), Some(0), "{}", daemon.log());
            daemon = service.start();
            let mut witness = daemon.connect();
            for (key, child) in keys.iter().zip(&mut children) {
                assert_eq!(
                    witness.request("l", key, "0"),
                    "timeout",
                    "{restart}: {key}"
                );
                let ended = child.try_wait().expect("a child");
                assert_eq!(ended, None, "{restart}: the job of {key}");
            }
        }
    });
    // Those who have come back are no orphans.
    eventually(PATIENCE, "all have come back", || {
        let stats = stats();
        let locks = stats["locks"].as_array().expect("a list");
        let is_back = |lock: &serde_json::Value| lock["owner_conn_id"] != 0;
        keys.iter().all(|key| {
            locks
                .iter()
                .any(|lock| lock["key"] == **key && is_back(lock))
        })
    });
    for child in &mut children {
        assert_eq!(child.try_wait().expect("a child"), None);
        signal(child, Signal::TERM);
    }
    eventually(PATIENCE, "all keys are free", || {
        stats()["locks"].as_array().map(Vec::len) == Some(0)
    });
}

/// Takes a lock as clients did before there was `hello`, renews and releases it; `None` if the
/// connection ends, which ends the hold as well. Nobody else may hold it meanwhile.
fn hold_once(mut client: Client, key: &str, held: &AtomicBool) -> Option<()> {
    let grant = parse_grant(&asked(&mut client, "l", key, "10 30")?, "ok")?;
    assert!(!held.swap(true, Ordering::SeqCst), "{key} was given twice");
    thread::sleep(Duration::from_millis(10));
    let renewed = asked(&mut client, "n", key, &format!("{} 30", grant.token));
    assert!(renewed.iter().all(|reply| reply == "ok 30"), "{renewed:?}");
    held.store(false, Ordering::SeqCst);
    let released = asked(&mut client, "r", key, &grant.token)?;
    assert_eq!(released, "ok");
    Some(())
}

/// The reply; `None` if the connection ends without one.
fn asked(client: &mut Client, command: &str, key: &str, argument: &str) -> Option<String> {
    let request = format!("{command}\n{key}\n{argument}\n");
    client.try_send(request.as_bytes()).ok()?;
    match client.next_event(PATIENCE) {
        Event::Line(line) => Some(String::from_utf8(line).expect("UTF-8")),
        Event::Nothing => panic!("no reply to {command}"),
        _ => None,
    }
}

/// How many workers there are for a server that serves eight, and how many jobs they have together.
const CROWD: usize = 20;
const CROWD_JOBS: usize = 240;

/// A server at its cap closes a connection without a word. That says nothing about its age.
#[test]
fn a_crowd_at_the_cap_of_connections_loses_no_job() {
    let daemon = Daemon::start_directly(Scheme::Plain, &["--max-connections", "8"]);
    let arguments = ["run", "k", "--shared", "--retry", "--", "true"];
    thread::scope(|scope| {
        for _ in 0..CROWD {
            scope.spawn(|| {
                for _ in 0..CROWD_JOBS / CROWD {
                    let ended = run(&daemon, &arguments);
                    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
                }
            });
        }
    });
}

/// How many jobs wait while the server restarts, and how often it does.
const WAITING_JOBS: usize = 24;
const RESTARTS_UNDER_WAITERS: usize = 52;

/// The jobs share a key, with a lock that `hello` must allow, and wait behind a job that is handed
/// over. A server that ends at any moment of an introduction is not taken for an old one.
#[test]
fn fifty_two_restarts_lose_no_waiting_job() {
    let service = Service::new();
    let mut daemon = service.start();
    let start = |options: &[&str]| {
        let arguments = [&["run", "k"], options].concat();
        let mut command = latch(&daemon, &arguments);
        Latch::start(command.stderr(Stdio::piped()))
    };
    let addr = daemon.addr();
    let stats = || Client::tcp(addr).stats();
    let mut holder = start(&["--", "sleep", "3600"]);
    eventually(PATIENCE, "the holder holds", || is_held(&daemon, "k"));
    let options = ["--shared", "--retry", "--", "true"];
    let mut waiting = [(); WAITING_JOBS].map(|()| start(&options));
    daemon.wait_for_waiters("k", WAITING_JOBS as u64);
    for restart in 1..=RESTARTS_UNDER_WAITERS {
        daemon.signal(Signal::TERM);
        let ended = daemon.wait_exit(PATIENCE).expect("it ends");
        assert_eq!(ended.code(), Some(0), "{}", daemon.log());
        daemon = service.start();
        // Each server ends while some of the clients are still introducing themselves.
        eventually(PATIENCE, "a job waits again", || {
            waiter_count(&stats(), "k") > 0
        });
        assert_eq!(holder.try_wait().expect("a child"), None, "{restart}");
    }
    signal(&holder, Signal::TERM);
    for job in &mut waiting {
        let status = wait(job);
        let mut said = String::new();
        let stderr = job.stderr.as_mut().expect("piped");
        stderr.read_to_string(&mut said).expect("text");
        assert_eq!(status, Some(0), "{said}");
    }
}

/// A `latch run` whose server, one of a cluster, has handed its lock over and is gone, and whose
/// command has ended since.
fn left_alone(service: &Service, lease: &str) -> Latch {
    let daemon = service.start();
    let directory = tempfile::tempdir().expect("a directory");
    let go_on = directory.path().join("go-on");
    let script = format!(
        "eval \"$READY\"; until [ -e {} ]; do sleep 0.02; done",
        go_on.display()
    );
    let cluster = format!("{0}|{0}", daemon.addr());
    let options = ["--server", &cluster, "--lease", lease];
    let arguments = [&["run", "k"][..], &options, &["--", "sh", "-c", &script]].concat();
    let mut command = latch(&daemon, &arguments);
    command.stderr(Stdio::piped());
    let (child, command) = ready(command, &directory);
    daemon.signal(Signal::TERM);
    daemon.wait_exit(PATIENCE).expect("it ends");
    fs::write(&go_on, "").expect("written");
    eventually(PATIENCE, "the command has ended", || is_gone(command));
    child
}

#[test]
fn a_release_in_a_cluster_outlasts_a_take_over() {
    let service = Service::new();
    let mut child = left_alone(&service, "600");
    thread::sleep(Duration::from_secs(13));
    let daemon = service.start();
    assert_eq!(ended(&mut child), (Some(0), String::new()));
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn ctrl_c_ends_the_wait_for_a_release() {
    let service = Service::new();
    let mut child = left_alone(&service, "3600");
    // The first one may still be taken for one that is meant for the command.
    eventually(PATIENCE, "latch has ended", || {
        signal(&child, Signal::INT);
        thread::sleep(Duration::from_millis(50));
        child.try_wait().expect("a child").is_some()
    });
    let (status, said) = ended(&mut child);
    assert_eq!(status, Some(130), "{said}");
    let expected = "no server answers the release: the key is free in ";
    assert!(said.contains(expected), "{said}");
}

/// How often a server crashes under jobs, each of which has a kind of lock of its own.
const CRASHES: u64 = 6;

#[test]
fn crashes_under_jobs_end_none_and_share_no_key() {
    const SETTLE: [&str; 2] = ["--settle", "60"];
    let service = Service::new();
    let mut daemon = service.start_with(&SETTLE);
    let claims: [&[&str]; 5] = [
        &["lock"],
        &["shared", "--shared"],
        &["slot", "--limit", "3"],
        &["slots", "--limit", "3", "--slots", "2"],
        &["long", "--lease", "600"],
    ];
    let directory = tempfile::tempdir().expect("a directory");
    let running = |claim: &[&str]| directory.path().join(claim[0]);
    let start = |claim: &&[&str]| {
        let script = format!("touch {}; exec sleep 3600", running(claim).display());
        let arguments = [&["run"], *claim, &["--", "sh", "-c", &script]].concat();
        Latch::start(latch(&daemon, &arguments).stderr(Stdio::piped()))
    };
    let mut children: Vec<Latch> = claims.iter().map(start).collect();
    let are_back = |daemon: &Daemon| {
        let stats = daemon.stats();
        let of = |name: &str| stats[name].as_array().expect("a list").clone();
        let holders = [of("locks"), of("semaphores")].concat();
        claims.iter().all(|claim| {
            let is_held =
                |entry: &serde_json::Value| entry["key"] == claim[0] && entry["owner_conn_id"] != 0;
            holders.iter().any(is_held)
        })
    };
    eventually(PATIENCE, "all run", || {
        claims.iter().all(|claim| running(claim).exists())
    });
    for crash in 1..=CRASHES {
        thread::sleep(Duration::from_millis(37 * crash));
        daemon.signal(Signal::KILL);
        daemon.wait_exit(PATIENCE).expect("it ends");
        daemon = service.start_with(&SETTLE);
        let is_complete = is_soon(PATIENCE, || are_back(&daemon));
        assert!(is_complete, "{}\n{}", daemon.stats(), daemon.log());
        let mut witness = daemon.connect();
        assert_eq!(witness.request("l", "lock", "0"), "timeout");
        for child in &mut children {
            assert_eq!(child.try_wait().expect("a child"), None, "crash {crash}");
        }
    }
    for child in &mut children {
        signal(child, Signal::TERM);
        let (_, said) = ended(child);
        assert!(!said.contains("lost"), "{said}");
    }
}

/// The job ends while no server runs, so the next one must learn of the lock before its end.
#[test]
fn a_job_that_ends_during_a_crash_is_not_called_lost() {
    let service = Service::new();
    for (options, is_kept) in [(&[][..], false), (&["--at-least", "60"], true)] {
        let first = service.start_with(&["--settle", "5"]);
        let directory = tempfile::tempdir().expect("a directory");
        let go_on = directory.path().join("go-on");
        let script = format!(
            "eval \"$READY\"; until [ -e {} ]; do sleep 0.02; done",
            go_on.display()
        );
        let arguments = [&["run", "k"][..], options, &["--", "sh", "-c", &script]].concat();
        let mut command = latch(&first, &arguments);
        command.stderr(Stdio::piped());
        let (mut child, command) = ready(command, &directory);
        first.signal(Signal::KILL);
        first.wait_exit(PATIENCE).expect("it ends");
        fs::write(&go_on, "").expect("written");
        eventually(PATIENCE, "the command has ended", || is_gone(command));
        let second = service.start_with(&["--settle", "5"]);
        assert_eq!(ended(&mut child), (Some(0), String::new()), "{options:?}");
        assert_eq!(is_held(&second, "k"), is_kept, "{options:?}");
        second.signal(Signal::TERM);
        second.wait_exit(PATIENCE).expect("it ends");
    }
}
