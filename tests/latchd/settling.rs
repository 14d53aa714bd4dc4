//! After a crash nothing is granted for a while, so that no key has two clients: `--state-file`.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::restart::{held, obstruct, stop, unobstruct, Service};
use crate::support::at_the_end::AtTheEnd;
use crate::support::clock::{clear_up_after, with_a_clock_of_its_own};
use crate::support::mounts::Mount;
use crate::support::needs::needs;
use crate::support::silent::free_port;
use crate::support::{
    eventually, fence, parse_grant, waiter_count, Client, Daemon, Event, Signal, PATIENCE,
};

pub fn kill(daemon: &Daemon) {
    daemon.signal(Signal::KILL);
    daemon.wait_exit(PATIENCE).expect("it ends");
}

/// For how much longer a server settles, in seconds.
pub fn settling_left(client: &mut Client) -> f64 {
    let reply = client.request("stats", "counters", "_");
    let json = reply
        .strip_prefix("ok ")
        .unwrap_or_else(|| panic!("{reply}"));
    let counters: serde_json::Value = serde_json::from_str(json).expect("JSON");
    counters["gauges"]["settling_s"].as_f64().expect("a number")
}

#[test]
fn a_crash_gives_no_key_to_a_second_client() {
    const LEASE: Duration = Duration::from_secs(3);
    let service = Service::new(&["--settle", "3"]);
    let first = service.start();
    let mut holder = service.connect();
    let asked_at = Instant::now();
    holder.acquire_for("k", 0, LEASE.as_secs());
    kill(&first);

    let second = service.start();
    let mut other = service.connect();
    assert_eq!(other.request("l", "k", "0"), "timeout");
    assert_eq!(other.request("l", "free", "0"), "timeout");
    let stats = other.stats();
    let left = stats["settling_s"].as_f64();
    assert!(
        left.is_some_and(|left| (0.0..=3.0).contains(&left)),
        "{stats}"
    );
    other.acquire("k", 60);
    let lease_left = LEASE.checked_sub(asked_at.elapsed());
    assert_eq!(lease_left, None, "the first client still holds the key");
    second.wait_for_log("settled", PATIENCE);
    other.acquire("free", 0);
    assert_eq!(other.stats()["settling_s"], serde_json::Value::Null);
}

/// Acquires a key, holds it for a moment and releases it. `free_at` is when the last client that
/// was certain of its lease no longer is. Returns early if the server ends; the client is then
/// still certain of its lease.
fn hold_once(client: &mut Client, lease: Duration, free_at: &Mutex<Instant>) -> Option<()> {
    let ask = |client: &mut Client, frame: String| {
        client.try_send(frame.as_bytes()).ok()?;
        match client.next_event(PATIENCE) {
            Event::Line(line) => Some(String::from_utf8(line).expect("UTF-8")),
            _ => None,
        }
    };
    let asked_at = Instant::now();
    let reply = ask(client, format!("l\nk\n600 {}\n", lease.as_secs()))?;
    let grant = parse_grant(&reply, "ok")?;
    let granted_at = Instant::now();
    {
        // A lease begins at the grant, but a client can only be certain of what it has seen.
        let mut free_at = free_at.lock().expect("no panic");
        let overlap = free_at.saturating_duration_since(granted_at);
        assert_eq!(overlap, Duration::ZERO, "two clients have the key");
        *free_at = granted_at.max(asked_at + lease);
    }
    if client.next_event(Duration::from_millis(10)) != Event::Nothing {
        return None;
    }
    *free_at.lock().expect("no panic") = Instant::now();
    ask(client, format!("r\nk\n{}\n", grant.token))?;
    Some(())
}

#[test]
fn crashes_at_any_moment_give_no_key_to_a_second_client() {
    const LEASE: Duration = Duration::from_secs(1);
    let service = Service::new(&["--settle", "1"]);
    let mut daemon = service.start();
    let (free_at, is_over) = (Mutex::new(Instant::now()), AtomicBool::new(false));
    let hold_count = AtomicUsize::new(0);
    thread::scope(|scope| {
        let _end = AtTheEnd(&is_over);
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let Some(mut client) = Client::try_unix(&service.socket()) else {
                        thread::sleep(Duration::from_millis(1));
                        continue;
                    };
                    while !is_over.load(Ordering::Relaxed)
                        && hold_once(&mut client, LEASE, &free_at).is_some()
                    {
                        hold_count.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for round in 0..6 {
            let before = hold_count.load(Ordering::Relaxed);
            eventually(PATIENCE, "the key goes round", || {
                hold_count.load(Ordering::Relaxed) > before + 3
            });
            thread::sleep(Duration::from_millis(3 * round));
            kill(&daemon);
            daemon = service.start();
        }
        // The clients wait for longer than the test does.
        is_over.store(true, Ordering::Relaxed);
        kill(&daemon);
    });
    assert!(hold_count.into_inner() >= 24);
}

#[test]
fn after_a_crash_claims_are_granted_in_order_of_arrival() {
    let service = Service::new(&["--settle", "2"]);
    let first = service.start();
    held(&service, "k", 2);
    kill(&first);
    let second = service.start();
    let mut waiters: Vec<Client> = (0..5).map(|_| service.connect()).collect();
    for (count, waiter) in (1..).zip(&mut waiters) {
        waiter.send("l\nk\n60\n");
        let mut observer = service.connect();
        eventually(PATIENCE, "it waits", || {
            waiter_count(&observer.stats(), "k") == count
        });
    }
    let mut impatient = service.connect();
    assert_eq!(impatient.request("e", "k", ""), "queued");
    assert_eq!(impatient.request("w", "k", "0"), "timeout");
    let mut last = 0;
    for mut waiter in waiters {
        let reply = waiter.line();
        let grant = parse_grant(&reply, "ok").unwrap_or_else(|| panic!("{reply}"));
        assert!(fence(&grant.token) > last, "out of order");
        last = fence(&grant.token);
    }
    second.wait_for_log("settling seconds=2 reason=crash", PATIENCE);
    second.wait_for_log("settled", PATIENCE);
    assert_eq!(settling_left(&mut impatient), 0.0);
}

#[test]
fn a_first_start_and_one_after_an_orderly_end_grant_at_once() {
    let service = Service::new(&["--settle", "600"]);
    for _ in 0..2 {
        let daemon = service.start();
        let mut client = service.connect();
        let grant = client.acquire("k", 0);
        assert_eq!(client.request("r", "k", &grant.token), "ok");
        assert_eq!(settling_left(&mut client), 0.0);
        stop(&daemon);
        assert!(!daemon.log().contains("settl"), "{}", daemon.log());
    }
}

#[test]
fn an_orderly_end_while_settling_leaves_the_rest_of_it() {
    let service = Service::new(&["--settle", "600", "--idle-exit", "1"]);
    kill(&service.start());
    let settling = service.start();
    assert!(settling_left(&mut service.connect()) > 590.0);
    stop(&settling);
    assert!(!service.is_open());
    let next = service.start();
    next.wait_for_log("reason=not-over", PATIENCE);
    assert!(settling_left(&mut service.connect()) > 500.0);
    let status = next.wait_exit(PATIENCE).expect("it is idle");
    assert_eq!(status.code(), Some(0), "{}", next.log());
    let last = service.start();
    last.wait_for_log("reason=not-over", PATIENCE);
    assert_eq!(service.connect().request("l", "k", "0"), "timeout");
}

/// The clients of the previous server may have longer leases than this one gives.
#[test]
fn a_server_settles_for_as_long_as_the_previous_one_would() {
    let service = Service::new(&[]);
    kill(&service.start_with(&["--settle", "600"]));
    for _ in 0..2 {
        let daemon = service.start_with(&["--settle", "1"]);
        assert!(settling_left(&mut service.connect()) > 590.0);
        kill(&daemon);
    }
}

#[test]
fn once_settled_a_server_goes_back_to_its_own_time() {
    let service = Service::new(&["--settle", "1"]);
    kill(&service.start_with(&[]));
    let text = || fs::read_to_string(service.file()).expect("it is written");
    let longer = text().replace(r#""settle_s":1"#, r#""settle_s":2"#);
    write_with_checksum(&service, &longer);
    let daemon = service.start();
    assert!(text().contains(r#""settle_s":2"#), "{}", text());
    daemon.wait_for_log("settled", PATIENCE);
    eventually(PATIENCE, "it is in the file", || {
        text().contains(r#""settle_s":1"#)
    });
}

/// Writes a file as a server would that had this to say.
fn write_with_checksum(service: &Service, text: &str) {
    let (first, body) = text.split_once('\n').expect("a first line");
    let (version, _) = first.rsplit_once(' ').expect("a checksum");
    let sum = !body.bytes().fold(u64::MAX, |sum, byte| {
        (0..8).fold(sum ^ u64::from(byte), |sum, _| match sum & 1 {
            1 => sum >> 1 ^ 0xd800_0000_0000_0000,
            _ => sum >> 1,
        })
    });
    let text = format!("{version} {sum:016x}\n{body}");
    fs::write(service.file(), text).expect("there is room");
}

#[test]
fn after_a_boot_only_clients_of_other_hosts_are_waited_for() {
    let service = Service::new(&["--settle", "600"]);
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("every kernel has it");
    let port = free_port().to_string();
    let of_previous_boot = || {
        kill(&service.start());
        let text = fs::read_to_string(service.file()).expect("it is written");
        assert!(text.contains(boot.trim()), "{text}");
        write_with_checksum(&service, &text.replace(boot.trim(), "an earlier boot"));
    };
    let start_on_port = |more: &[&str]| {
        let mut command = service.command(&port, &service.socket());
        command.args(["--settle", "600"]).args(more);
        let daemon = Daemon::from_command(command);
        daemon.wait_for_log("listening", PATIENCE);
        eventually(PATIENCE, "it serves", || {
            Client::try_unix(&service.socket()).is_some()
        });
        daemon
    };
    of_previous_boot();
    let unix_only = service.start();
    service.connect().acquire("k", 0);
    kill(&unix_only);
    of_previous_boot();
    let on_port = start_on_port(&[]);
    assert_eq!(service.connect().request("l", "k", "0"), "timeout");
    kill(&on_port);
    of_previous_boot();
    let local = start_on_port(&["--local-clients"]);
    service.connect().acquire("k", 0);
    kill(&local);
}

#[test]
fn a_file_that_is_lost_or_empty_counts_as_a_crash() {
    let service = Service::new(&["--settle", "600"]);
    let first = service.start();
    let (_client, _) = held(&service, "k", 600);
    stop(&first);
    for (content, why) in [
        (Some(Vec::new()), "empty-file"),
        (Some(vec![0; 400]), "empty-file"),
        (None, "no-file"),
    ] {
        match &content {
            Some(content) => fs::write(service.file(), content).expect("there is room"),
            None => fs::remove_file(service.file()).expect("it is there"),
        }
        let daemon = service.start();
        daemon.wait_for_log(&format!("settling seconds=600 reason={why}"), PATIENCE);
        assert_eq!(daemon.log().contains("ERROR state-lost"), content.is_some());
        assert_eq!(service.connect().request("l", "k", "0"), "timeout");
        kill(&daemon);
    }
}

#[test]
fn a_first_server_that_cannot_start_leaves_no_trace() {
    let service = Service::new(&["--settle", "600"]);
    let lock = service.directory.path().join("state.lock");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("it is bound").port();
    let mut command = service.command(&port.to_string(), &service.socket());
    assert_eq!(command.output().expect("it runs").status.code(), Some(1));
    assert!(!lock.exists());
    obstruct(&service);
    service.refusal();
    assert!(!lock.exists());
    unobstruct(&service);
    let _daemon = service.start();
    service.connect().acquire("k", 0);
}

/// A disk that loses what was written last has an older file.
#[test]
fn an_older_file_gives_no_key_to_a_second_client() {
    let service = Service::new(&["--settle", "600"]);
    let first = service.start();
    let older = fs::read(service.file()).expect("it is written");
    let (_client, grant) = held(&service, "k", 600);
    stop(&first);
    fs::write(service.file(), older).expect("there is room");
    let _second = service.start();
    let mut client = service.connect();
    assert_eq!(client.request("l", "k", "0"), "timeout");
    assert_eq!(client.request("n", "k", &grant.token), "error");
    assert!(settling_left(&mut client) > 590.0);
}

#[test]
fn fences_rise_over_crashes_even_if_the_clock_is_set_back() {
    let libfaketime = needs!("libfaketimeMT.so.1");
    let service = Service::new(&["--settle", "1"]);
    let first = service.start();
    let mut last = fence(&service.connect().acquire_for("k", 0, 1).token);
    kill(&first);
    for _ in 0..2 {
        let mut command = service.command("off", &service.socket());
        command.args(["--settle", "1"]);
        with_a_clock_of_its_own(&mut command, &libfaketime).env("FAKETIME", "-3d");
        let daemon = Daemon::from_command(command);
        daemon.wait_for_log("listening", PATIENCE);
        let next = fence(&service.connect().acquire_for("k", 60, 1).token);
        assert!(next > last);
        last = next;
        let pid = daemon.pid();
        kill(&daemon);
        clear_up_after(pid);
    }
}

#[test]
fn ordinary_requests_write_nothing() {
    let service = Service::new(&[]);
    let daemon = service.start();
    let file = || {
        let metadata = fs::metadata(service.file()).expect("it is written");
        (
            metadata.ino(),
            fs::read(service.file()).expect("it is written"),
        )
    };
    let (mut holder, long) = held(&service, "long", 600);
    let before = file();
    let (mut client, _) = held(&service, "held", 30);
    let renewal = format!("{} 600", long.token);
    for _ in 0..100 {
        assert_eq!(holder.request("n", "long", &renewal), "ok 600");
        let grant = client.acquire("k", 0);
        assert_eq!(client.request("n", "k", &grant.token), "ok 33");
        assert_eq!(client.request("r", "k", &grant.token), "ok");
    }
    // Nothing is written later, either: an end writes what there is then.
    assert_eq!(file(), before);
    kill(&daemon);
    assert_eq!(file(), before);
}

#[test]
fn a_file_that_cannot_be_written_is_written_later() {
    let service = Service::new(&["--settle", "1"]);
    kill(&service.start());
    let text = || fs::read_to_string(service.file()).expect("it is written");
    write_with_checksum(
        &service,
        &text().replace(r#""settle_s":1"#, r#""settle_s":2"#),
    );
    let daemon = service.start();
    obstruct(&service);
    daemon.wait_for_log("state-not-written", PATIENCE);
    // It serves nonetheless.
    service.connect().acquire_for("k", 60, 1);
    unobstruct(&service);
    daemon.wait_for_log("state-written-again", PATIENCE);
    assert!(text().contains(r#""settle_s":1"#), "{}", text());
}

#[test]
fn a_server_that_cannot_open_its_file_does_not_start() {
    let service = Service::new(&[]);
    obstruct(&service);
    let refusal = service.refusal();
    assert!(refusal.contains("cannot use the state file"), "{refusal}");
    assert!(!service.file().exists());
}

#[test]
fn locks_outlive_a_disk_that_is_full_at_the_end() {
    let admin = needs!(admin);
    let disk = Mount::tmpfs(admin, "64k");
    let (file, socket) = (disk.path.join("state"), disk.path.join("socket"));
    let start = || {
        let file = file.to_str().expect("UTF-8");
        Daemon::start_unix(&socket, &["--state-file", file, "--shutdown-timeout", "60"])
    };
    let first = start();
    first.wait_for_log("state-in-memory", PATIENCE);
    let mut client = Client::unix(&socket);
    client.request("hello", "_", "adopt");
    let grant = client.acquire_for("k", 0, 600);
    let filler = disk.path.join("filler");
    let filled = fs::write(&filler, vec![1; 128 * 1024]);
    assert!(filled.is_err(), "the disk is not full");
    first.signal(Signal::TERM);
    first.wait_for_log("cannot-hand-over", PATIENCE);
    assert_eq!(client.request("n", "k", &grant.token), "ok 33");
    fs::remove_file(filler).expect("it is there");
    let status = first.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", first.log());
    let _second = start();
    let mut client = Client::unix(&socket);
    assert_eq!(client.request("adopt", "k", &grant.token), "ok 33");
}
