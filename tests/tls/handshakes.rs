//! Handshakes, and what a client may do wrong before, in and after one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::tls::{common, trusting, TlsClient, Version};
use crate::support::{parse_grant, Client, Daemon, Event, Scheme, PATIENCE};

/// The beginning of a handshake: a record with 512 bytes, of which the first six come.
const BEGINNING: [u8; 11] = [22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];

fn daemon(args: &[&str]) -> Daemon {
    Daemon::start_over(Scheme::Tls, args)
}

fn socket(daemon: &Daemon) -> TcpStream {
    let socket = TcpStream::connect(daemon.addr()).expect("it listens");
    socket
        .set_read_timeout(Some(PATIENCE))
        .expect("the timeout is not zero");
    socket
}

/// What the server sends until it closes; `None` if it does not within ten seconds.
fn sent_by(mut socket: TcpStream) -> Option<Vec<u8>> {
    let mut sent = Vec::new();
    socket.read_to_end(&mut sent).ok().map(|_| sent)
}

#[test]
fn a_plain_client_is_closed_without_a_byte() {
    let daemon = daemon(&["--debug"]);
    // The last ones are shorter than the head of a record.
    for words in [
        "l\nk\n10\n",
        "GET / HTTP/1.1\r\nHost: k\r\n\r\n",
        "l\n",
        "\n",
    ] {
        let mut plain = Client::tcp(daemon.addr());
        plain.send(words);
        let event = plain.next_event(PATIENCE);
        assert_eq!(event, Event::Eof, "{words:?}");
    }
    let text = "reason=broken error=\"the peer does not speak TLS\"";
    daemon.wait_for_log(&format!("closed conn=4 {text}"), PATIENCE);
    let log = daemon.log();
    assert_eq!(log.matches(text).count(), 4, "{log}");
    assert!(!log.contains("WARN"), "{log}");
    assert_eq!(daemon.connect().request("ping", "_", "_"), "ok");
}

#[test]
fn a_client_that_never_shakes_hands_is_closed_in_silence() {
    let daemon = daemon(&["--read-timeout", "1"]);
    let mut begun = socket(&daemon);
    begun.write_all(&BEGINNING).expect("it is connected");
    for socket in [socket(&daemon), begun] {
        assert_eq!(sent_by(socket), Some(Vec::new()));
    }
}

#[test]
fn a_handshake_that_trickles_in_ends_at_the_read_timeout() {
    let daemon = daemon(&["--read-timeout", "1"]);
    let began = Instant::now();
    let mut slow = socket(&daemon);
    slow.write_all(&BEGINNING).expect("it is connected");
    // Each byte is progress, and does not move the deadline.
    while slow.write_all(&[0]).is_ok() {
        thread::sleep(Duration::from_millis(50));
        assert!(began.elapsed() < PATIENCE, "it is never cut off");
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(900), "cut off after {took:?}");
}

#[test]
fn unfinished_handshakes_hold_up_no_other_client() {
    let daemon = daemon(&[]);
    let unfinished: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut socket = socket(&daemon);
            socket.write_all(&BEGINNING).expect("it is connected");
            socket
        })
        .collect();
    let mut client = daemon.connect();
    let grant = client.acquire("k", 0);
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    drop(unfinished);
}

#[test]
fn clients_of_both_versions_of_tls_are_served() {
    let daemon = daemon(&[]);
    for version in [Version::Tls12, Version::Tls13] {
        let config = trusting(&common().ca(), version);
        // The second handshake goes on from the first.
        for _ in 0..2 {
            let mut client =
                TlsClient::with(socket(&daemon), config.clone()).expect("it trusts it");
            client.write_all(b"l\nk\n5\n").expect("it is connected");
            let mut reply = [0; 256];
            let len = client.read(&mut reply).expect("there is a reply");
            let reply = String::from_utf8_lossy(&reply[..len]);
            let grant = parse_grant(reply.trim_end(), "ok");
            assert!(grant.is_some(), "{version:?}: {reply:?}");
        }
    }
}

#[test]
fn a_reply_longer_than_a_record_arrives_whole() {
    const KEYS: usize = 2000;
    let daemon = daemon(&["--max-locks=3000", "--max-per-connection=3000"]);
    let mut client = daemon.connect();
    for at in 0..KEYS {
        client.acquire(&format!("{at:0>100}"), 0);
    }
    let stats = client.stats();
    assert_eq!(stats["locks"].as_array().map(Vec::len), Some(KEYS));
}

/// Behind its wait the client sends encrypted pings, until its window is full.
#[test]
fn a_flood_behind_a_wait_over_tls_is_cut_off() {
    let daemon = daemon(&["--debug"]);
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 600);
    let mut flooding = daemon.connect();
    flooding.send("l\nk\n600\n");
    daemon.wait_for_waiters("k", 1);
    let mut writer = flooding.writer();
    let flood = thread::spawn(move || {
        let pings = "ping\n_\n_\n".repeat(1000);
        while writer.write_all(pings.as_bytes()).is_ok() {}
    });
    daemon.wait_for_waiters("k", 0);
    daemon.wait_for_log("cut-off conn=2 reason=flood-behind-wait", PATIENCE);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    drop(flooding);
    drop(daemon);
    flood.join().expect("it does not panic");
}

#[test]
fn a_broken_record_ends_its_connection_and_frees_its_lock() {
    let daemon = daemon(&[]);
    let config = trusting(&common().ca(), Version::Tls13);
    let socket = socket(&daemon);
    let mut raw = socket.try_clone().expect("descriptors are left");
    let mut client = TlsClient::with(socket, config).expect("it trusts it");
    client.write_all(b"l\nk\n5\n").expect("it is connected");
    let mut reply = [0; 256];
    let len = client.read(&mut reply).expect("there is a reply");
    assert!(reply[..len].starts_with(b"ok "));
    // A record that no key has encrypted.
    raw.write_all(&[&[23, 3, 3, 0, 32][..], &[7; 32]].concat())
        .expect("it is connected");
    daemon.connect().acquire("k", 5);
}

/// Each client leaves a record unfinished, so that the server keeps what has arrived of it.
#[test]
fn unfinished_records_take_no_more_memory_than_is_counted() {
    const CLIENTS: u64 = 100;
    let daemon = daemon(&[]);
    let config = trusting(&common().ca(), Version::Tls13);
    drop(TlsClient::with(socket(&daemon), config.clone()));
    let before = resident(daemon.pid());
    let clients: Vec<TlsClient> = (0..CLIENTS)
        .map(|_| {
            let socket = socket(&daemon);
            let mut raw = socket.try_clone().expect("descriptors are left");
            let client = TlsClient::with(socket, config.clone()).expect("it trusts it");
            raw.write_all(&[&[23, 3, 3, 64, 0][..], &[7; 16_000]].concat())
                .expect("it is connected");
            client
        })
        .collect();
    thread::sleep(Duration::from_millis(300));
    let taken = resident(daemon.pid()).saturating_sub(before) / CLIENTS;
    println!("{taken} kilobytes for each");
    // 64 for the connection and 96 for TLS, with the stack of an unoptimised build.
    assert!(taken < 160, "{taken} kilobytes for each");
    drop(clients);
}

/// The memory that the process has in use, in kilobytes.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    number.and_then(|it| it.parse().ok()).expect("a number")
}
