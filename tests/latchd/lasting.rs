//! Kept grants, and grants with long leases, outlive every end of the server: `--state-file`.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{prlimit, Pid, Resource, Rlimit};

use crate::fences::{inject, tracer};
use crate::restart::{displace, held, obstruct, stop, unobstruct, Service};
use crate::settling::kill;
use crate::support::{
    eventually, fence, parse_grant, program, waiter_count, Client, Daemon, Event, Grant, Signal,
    PATIENCE,
};

/// Whether the file has the grant: its end may be in a later line.
fn is_in_file(service: &Service, grant: &Grant) -> bool {
    let text = fs::read_to_string(service.file()).expect("it is written");
    let end = format!("\"dead\":{},", fence(&grant.token));
    text.rfind(&grant.token) > text.rfind(&end)
}

#[test]
fn replies_wait_for_the_disk_only_if_they_concern_the_file() {
    let Some(strace) = tracer() else { return };
    for is_replaced in [true, false] {
        let service = Service::new(&["--settle", "60"]);
        let daemon = service.start();
        let (mut keeper, mut other, mut next) =
            (service.connect(), service.connect(), service.connect());
        let grant = keeper.acquire("kept", 0);
        let recover = inject(&strace, &daemon, "fsync,fdatasync:delay_enter=1000000");
        if is_replaced {
            displace(&service);
        }
        keeper.send(&format!("keep\nkept\n{} 3600\n", grant.token));
        for _ in 0..3 {
            let ordinary = other.acquire("ordinary", 0);
            assert_eq!(other.request("r", "ordinary", &ordinary.token), "ok");
        }
        let is_early = is_replaced && is_in_file(&service, &grant);
        assert!(!is_early, "it is written already");
        keeper.nothing_within(Duration::ZERO);
        keeper.expect("ok 3600");
        assert!(is_in_file(&service, &grant));

        next.send("l\nkept\n60\n");
        eventually(PATIENCE, "it waits", || {
            waiter_count(&other.stats(), "kept") == 1
        });
        keeper.send(&format!("r\nkept\n{}\n", grant.token));
        let reply = next.line();
        assert!(parse_grant(&reply, "ok").is_some(), "{reply}");
        let is_left = is_in_file(&service, &grant);
        assert!(!is_left, "the key may have two holders");
        keeper.expect("ok");
        recover();
    }
}

/// The longest file that a process may write; `None` for no limit.
fn limit_files(daemon: &Daemon, len: Option<u64>) {
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).expect("a small number"));
    let limit = Rlimit {
        current: len,
        maximum: None,
    };
    prlimit(pid, Resource::Fsize, limit).expect("it is our child");
}

/// The server finds out in the middle of a write, at any byte of it.
#[test]
fn a_disk_that_is_full_within_a_batch_loses_nothing_that_was_told() {
    for room in [0, 1, 2, 18, 100, 300, 400] {
        for recovers in [true, false] {
            let service = Service::new(&["--settle", "60"]);
            let server = service.start();
            let mut client = service.connect();
            client.request("hello", "_", "adopt");
            let kept = client.acquire("kept", 0);
            let keep = format!("{} 3600", kept.token);
            assert_eq!(client.request("keep", "kept", &keep), "ok 3600");
            let long = client.acquire_for("long", 0, 600);
            let ended = client.acquire_for("ended", 0, 600);
            assert_eq!(client.request("r", "ended", &ended.token), "ok");
            let len = fs::metadata(service.file()).expect("it is written").len();
            limit_files(&server, Some(len + room));
            assert_eq!(client.request("l", "late", "0 600"), "error", "{room}");
            server.wait_for_log("state-not-written", PATIENCE);
            let torn = fs::metadata(service.file()).expect("it is there").len();
            assert_eq!(torn, len + room);
            if recovers {
                limit_files(&server, None);
                server.wait_for_log("state-written-again", PATIENCE);
                client.acquire_for("late", 0, 600);
            }
            kill(&server);
            let _second = service.start();
            let mut client = service.connect();
            assert_eq!(client.request("n", "kept", &keep), "ok 3600", "{room}");
            assert_eq!(client.request("n", "long", &long.token), "ok 33", "{room}");
            assert_eq!(
                client.request("n", "ended", &ended.token),
                "error",
                "{room}"
            );
            let holders = client.request("stats", "holders", "late");
            assert_eq!(
                holders.contains("\"holder_count\":1"),
                recovers,
                "{holders}"
            );
        }
    }
}

/// A client that does not hear of its grant cannot come back for it.
#[test]
fn a_server_that_ends_first_tells_of_what_it_has_granted() {
    let Some(strace) = tracer() else { return };
    let service = Service::new(&[]);
    let daemon = service.start();
    let (mut holder, mut other) = (service.connect(), service.connect());
    holder.request("hello", "_", "adopt");
    let recover = inject(&strace, &daemon, "fsync,fdatasync:delay_enter=1000000");
    holder.send("l\nk\n0 3600\n");
    eventually(PATIENCE, "it is granted", || {
        let stats = other.stats();
        stats["locks"].as_array().map(Vec::len) == Some(1)
    });
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("draining", PATIENCE);
    let reply = loop {
        match holder.next_event(Duration::from_millis(50)) {
            Event::Line(reply) => break String::from_utf8(reply).expect("UTF-8"),
            Event::Nothing => assert_eq!(other.request("ping", "_", "_"), "ok"),
            _ => panic!("it has ended"),
        }
    };
    recover();
    let grant = parse_grant(&reply, "ok").expect(&reply);
    daemon.wait_exit(PATIENCE).expect("it ends");
    let _next = service.start();
    let adopted = service
        .connect()
        .request("adopt", "k", &format!("{} 9", grant.token));
    assert_eq!(adopted, "ok 9");
}

/// The adoption changes nothing that the file must have.
#[test]
fn a_long_lock_is_adopted_although_the_disk_is_full() {
    for end in [kill, stop] {
        let service = Service::new(&["--settle", "60"]);
        let first = service.start();
        let (_client, grant) = held(&service, "k", 6000);
        // Less than the whole lease is left.
        thread::sleep(Duration::from_millis(1100));
        end(&first);
        let _second = service.start();
        obstruct(&service);
        let mut client = service.connect();
        let adoption = format!("{} 6000", grant.token);
        for command in ["adopt", "adopt", "n"] {
            assert_eq!(client.request(command, "k", &adoption), "ok 6000");
        }
        unobstruct(&service);
    }
}

/// The first number of this name in what `stats` shows.
fn shown(client: &mut Client, what: &str, of: &str, name: &str) -> f64 {
    let shown = client.request("stats", what, of);
    let (_, number) = shown.split_once(&format!("\"{name}\":")).expect(&shown);
    let number: String = number
        .chars()
        .take_while(|it| !",}".contains(*it))
        .collect();
    number.parse().expect(&shown)
}

#[test]
fn a_grant_is_as_old_after_every_end_of_the_server() {
    let service = Service::new(&["--settle", "60"]);
    let mut server = service.start();
    let (_client, long) = held(&service, "long", 6000);
    let (mut client, short) = held(&service, "short", 60);
    let kept = client.acquire("kept", 0);
    client.request("keep", "kept", &format!("{} 6000", kept.token));
    thread::sleep(Duration::from_millis(1100));
    for end in [kill, stop, kill] {
        end(&server);
        server = service.start();
        let mut client = service.connect();
        for (key, token, age) in [("long", &long.token, 50_000), ("short", &short.token, 5000)] {
            let adoption = format!("{token} 6000 age={age}");
            assert_eq!(client.request("adopt", key, &adoption), "ok 6000", "{key}");
        }
        for (key, least, most) in [
            ("long", 1.0, 1000.0),
            ("kept", 1.0, 1000.0),
            ("short", 5000.0, 6000.0),
        ] {
            let age = shown(&mut client, "holders", key, "age_s");
            assert!((least..most).contains(&age), "{key} is {age} s old");
        }
    }
}

#[test]
fn latch_says_that_a_disk_is_full_and_tries_again() {
    let service = Service::new(&["--settle", "60"]);
    let _server = service.start();
    let latch = |arguments: &[&str]| {
        let mut command = Command::new(program("latch"));
        let server = service.socket();
        let ended = command.args(arguments).env("LATCH_SERVER", server).output();
        let ended = ended.expect("it runs");
        let said = String::from_utf8(ended.stderr).expect("UTF-8");
        (ended.status.code(), said)
    };
    obstruct(&service);
    for claim in [
        &["run", "k", "--lease", "600", "--", "true"][..],
        &["reserve", "k", "--for", "1h"],
    ] {
        let (status, said) = latch(claim);
        assert_eq!(status, Some(69), "{said}");
        assert!(said.contains("cannot write its state file"), "{said}");
        assert!(!said.contains("max-kept"), "{said}");
    }
    thread::scope(|scope| {
        let run = ["run", "k", "--lease", "600", "--retry=60s", "--", "true"];
        let run = scope.spawn(move || latch(&run));
        thread::sleep(Duration::from_millis(200));
        unobstruct(&service);
        let (status, said) = run.join().expect("no panic");
        assert_eq!(status, Some(0), "{said}");
    });
}

/// The system calls by which the file is appended to: strace injects the signal at the entry of
/// each.
const APPEND: [&str; 2] = ["write:signal=KILL", "fdatasync:signal=KILL"];

/// The system calls by which it is replaced, in order.
const REPLACE: [&str; 6] = [
    "unlink,unlinkat:signal=KILL",
    "openat:signal=KILL",
    "write:signal=KILL",
    "fsync:signal=KILL",
    "rename,renameat,renameat2:signal=KILL",
    "fsync:signal=KILL:when=2",
];

#[test]
fn a_kill_at_any_call_of_a_write_loses_nothing_that_was_told() {
    let Some(strace) = tracer() else { return };
    let replaced = REPLACE.map(|call| (call, true));
    for (call, is_replaced) in replaced.into_iter().chain(APPEND.map(|call| (call, false))) {
        let service = Service::new(&["--settle", "60"]);
        let server = service.start();
        let (mut keeper, kept) = held(&service, "kept", 60);
        let keep = format!("{} 3600", kept.token);
        assert_eq!(keeper.request("keep", "kept", &keep), "ok 3600");
        let (_holder, ended) = held(&service, "k", 60);
        let mut waiter = service.connect();
        waiter.request("hello", "_", "adopt");
        waiter.send("l\nk\n60 60\n");
        eventually(PATIENCE, "it waits", || {
            waiter_count(&keeper.stats(), "k") == 1
        });
        if is_replaced {
            displace(&service);
        }
        let stop = inject(&strace, &server, call);
        keeper.send(&format!("r\nk\n{}\n", ended.token));
        assert!(server.wait_exit(PATIENCE).is_some(), "{call}");
        stop();
        let next = match waiter.next_event(PATIENCE) {
            Event::Line(line) => parse_grant(&String::from_utf8(line).expect("UTF-8"), "ok"),
            _ => None,
        };
        let _second = service.start();
        let mut client = service.connect();
        assert_eq!(client.request("n", "kept", &keep), "ok 3600", "{call}");
        let mut adopt = |grant: &Grant| {
            let adoption = format!("{} 60", grant.token);
            client.request("adopt", "k", &adoption)
        };
        // The next holder was told only of a grant whose predecessor is known to be dead.
        if let Some(next) = next {
            assert_eq!(adopt(&ended), "error", "{call}");
            assert_eq!(adopt(&next), "ok 60", "{call}");
        } else {
            adopt(&ended);
        }
        client.request("r", "k", &ended.token);
    }
}
