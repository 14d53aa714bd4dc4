//! After a crash nothing is granted for a while, so that no key has two clients: `--state-file`.

use std::fs;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::restart::{obstruct, unobstruct, Service};
use crate::support::at_the_end::AtTheEnd;
use crate::support::clock::{clear_up_after, with_a_clock_of_its_own};
use crate::support::mounts::Mount;
use crate::support::needs::needs;
use crate::support::silent::free_port;
use crate::support::{eventually, fence, parse_grant, Client, Daemon, Event, Signal, PATIENCE};

pub fn kill(daemon: &Daemon) {
    daemon.signal(Signal::KILL);
    daemon.wait_exit(PATIENCE).expect("it ends");
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
fn after_a_boot_only_local_clients_are_not_waited_for() {
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
    // ssh and socat forward a Unix socket to other hosts.
    of_previous_boot();
    let unix_only = service.start();
    assert_eq!(service.connect().request("l", "k", "0"), "timeout");
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

/// Nobody is left who could release them.
#[test]
fn without_a_file_a_stop_does_not_wait_for_grants_without_a_client() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let server = Daemon::start_unix(&socket, &["--shutdown-timeout", "600"]);
    let mut client = Client::unix(&socket);
    let kept = client.acquire("kept", 0);
    client.request("keep", "kept", &format!("{} 3600", kept.token));
    let held = client.acquire("held", 0);
    server.signal(Signal::TERM);
    server.wait_for_log("draining", PATIENCE);
    assert_eq!(
        client.request("ping", "_", "_"),
        "ok",
        "it waits for this one"
    );
    assert_eq!(client.request("r", "held", &held.token), "ok");
    assert!(server.wait_exit(PATIENCE).is_some(), "{}", server.log());
}

#[test]
fn without_a_file_a_stop_waits_for_clients_that_were_cut_off() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let server = Daemon::start_unix(&socket, &["--shutdown-timeout", "600"]);
    let mut client = Client::unix(&socket);
    let grant = client.acquire("k", 0);
    let mut cut_off = Client::unix(&socket);
    assert_eq!(cut_off.request("adopt", "k", &grant.token), "ok 33");
    drop(cut_off);
    eventually(PATIENCE, "the grant has no connection", || {
        client.stats()["locks"][0]["owner_conn_id"] == 0
    });
    server.signal(Signal::TERM);
    server.wait_for_log("draining holders=1 awaited=1", PATIENCE);
    assert_eq!(client.request("adopt", "k", &grant.token), "ok 33");
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    assert!(server.wait_exit(PATIENCE).is_some(), "{}", server.log());
}
