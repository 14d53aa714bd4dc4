//! After a crash nothing is granted for a while, so that no key has two clients: `--state-file`.

use std::fs;
use std::net::TcpListener;

use crate::restart::{obstruct, unobstruct, Service};
use crate::support::clock::{clear_up_after, with_a_clock_of_its_own};
use crate::support::mounts::Mount;
use crate::support::needs::needs;
use crate::support::{fence, Client, Daemon, Signal, PATIENCE};

pub fn kill(daemon: &Daemon) {
    daemon.signal(Signal::KILL);
    daemon.wait_exit(PATIENCE).expect("it ends");
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
    let of_previous_boot = || {
        kill(&service.start());
        let text = fs::read_to_string(service.file()).expect("it is written");
        assert!(text.contains(boot.trim()), "{text}");
        write_with_checksum(&service, &text.replace(boot.trim(), "an earlier boot"));
    };
    // ssh and socat forward a Unix socket to other hosts.
    of_previous_boot();
    let unix_only = service.start();
    assert_eq!(service.connect().request("l", "k", "0"), "timeout");
    kill(&unix_only);
    of_previous_boot();
    let local = service.start_with(&["--local-clients"]);
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
    assert!(text().contains(r#""settle_s":2"#), "{}", text());
    obstruct(&service);
    daemon.wait_for_log("state-not-written", PATIENCE);
    // It serves nonetheless.
    service.connect().acquire_for("k", 60, 1);
    unobstruct(&service);
    daemon.wait_for_log("state-written-again", PATIENCE);
    // Once it has settled, it goes back to its own time.
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
