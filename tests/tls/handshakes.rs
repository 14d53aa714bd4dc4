//! Handshakes, and what a client may do wrong before, in and after one.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Resource;
use rustls::crypto::cipher::{OutboundChunks, OutboundPlainMessage};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ConnectionTrafficSecrets, ContentType, ProtocolVersion};

use crate::support::footprint::{status_kib, worst_case_mb};
use crate::support::limited::{limit_to, raise_our_own_limit};
use crate::support::needs::needs;
use crate::support::silent::free_addr;
use crate::support::tls::{common, trusting, TlsClient, Version};
use crate::support::{
    come_to_rest, eventually, parse_grant, Client, Daemon, Event, Scheme, PATIENCE,
};

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
    needs!("openssl");
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
    needs!("openssl");
    let daemon = daemon(&["--read-timeout", "1"]);
    let mut begun = socket(&daemon);
    begun.write_all(&BEGINNING).expect("it is connected");
    for socket in [socket(&daemon), begun] {
        assert_eq!(sent_by(socket), Some(Vec::new()));
    }
}

#[test]
fn a_handshake_that_trickles_in_ends_at_the_read_timeout() {
    needs!("openssl");
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
    needs!("openssl");
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
fn the_http_door_speaks_tls_too() {
    needs!("openssl");
    let door = free_addr();
    let daemon = daemon(&["--http", &door.to_string()]);
    daemon.wait_for_log("listening http=", PATIENCE);
    let request = "GET /health HTTP/1.0\r\n\r\n";
    let mut client = Client::open(Scheme::Tls, door);
    client.send(request);
    assert_eq!(client.line(), "HTTP/1.1 200 OK\r");
    let mut plain = Client::tcp(door);
    plain.send(request);
    assert_eq!(plain.next_event(PATIENCE), Event::Eof);
}

#[test]
fn a_wait_over_http_and_tls_ends_with_its_client() {
    needs!("openssl");
    let door = free_addr();
    let daemon = daemon(&["--http", &door.to_string(), "--http-grants"]);
    daemon.wait_for_log("listening http=", PATIENCE);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let request = "POST /v1/locks/k HTTP/1.0\r\nContent-Length: 25\r\n\r\n\
                   {\"acquire_timeout_s\": 60}";
    let ask = || {
        let mut client = Client::open(Scheme::Tls, door);
        client.send(request);
        client
    };
    let leaving = ask();
    daemon.wait_for_waiters("k", 1);
    let mut staying = ask();
    daemon.wait_for_waiters("k", 2);
    drop(leaving);
    daemon.wait_for_waiters("k", 1);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert_eq!(staying.line(), "HTTP/1.1 200 OK\r");
}

#[test]
fn clients_of_both_versions_of_tls_are_served() {
    needs!("openssl");
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
    needs!("openssl");
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
    needs!("openssl");
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

/// Takes a lock with this lease over TLS. Also returns the socket.
fn holder(daemon: &Daemon, lease: u64) -> (TlsClient, TcpStream) {
    let config = trusting(&common().ca(), Version::Tls13);
    let socket = socket(daemon);
    let raw = socket.try_clone().expect("descriptors are left");
    let mut client = TlsClient::with(socket, config).expect("it trusts it");
    let claim = format!("l\nk\n5 {lease}\n");
    client.write_all(claim.as_bytes()).expect("it is connected");
    let mut reply = [0; 256];
    let len = client.read(&mut reply).expect("there is a reply");
    assert!(reply[..len].starts_with(b"ok "));
    (client, raw)
}

/// Anybody between client and server can send such a record, and none of them can free the lock.
#[test]
fn a_broken_record_ends_its_connection_but_no_grant() {
    needs!("openssl");
    let daemon = daemon(&[]);
    let asked = Instant::now();
    let (_client, mut raw) = holder(&daemon, 3);
    // A record that no key has encrypted.
    raw.write_all(&[&[23, 3, 3, 0, 32][..], &[7; 32]].concat())
        .expect("it is connected");
    let mut next = daemon.connect();
    eventually(PATIENCE, "the connection has ended", || {
        next.stats()["connections"] == 1
    });
    next.acquire("k", 5);
    assert!(asked.elapsed() >= Duration::from_secs(3));
}

#[test]
fn every_end_of_the_stream_frees_the_lock_of_a_tls_client() {
    needs!("openssl");
    let daemon = daemon(&[]);
    let mut next = daemon.connect();
    for is_announced in [false, true] {
        let (client, raw) = holder(&daemon, 600);
        if is_announced {
            client.half_close().expect("it is connected");
        } else {
            raw.shutdown(Shutdown::Write).expect("it is connected");
        }
        let grant = next.acquire("k", 5);
        assert_eq!(next.request("r", "k", &grant.token), "ok");
    }
}

/// Each client leaves a record unfinished, so that the server keeps what has arrived of it.
#[test]
fn unfinished_records_take_no_more_memory_than_is_counted() {
    needs!("openssl");
    const CLIENTS: u64 = 100;
    let daemon = daemon(&[]);
    let config = trusting(&common().ca(), Version::Tls13);
    drop(TlsClient::with(socket(&daemon), config.clone()));
    let before = status_kib(daemon.pid(), "VmRSS:");
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
    come_to_rest(&[daemon.pid()], Duration::from_millis(50));
    let taken = status_kib(daemon.pid(), "VmRSS:").saturating_sub(before) / CLIENTS;
    println!("{taken} kilobytes for each");
    // 64 for the connection and 96 for TLS, with the stack of an unoptimised build.
    assert!(taken < 160, "{taken} kilobytes for each");
    drop(clients);
}

#[test]
fn a_handshake_of_more_than_20_kilobytes_is_refused() {
    needs!("openssl");
    let daemon = daemon(&["--debug"]);
    let mut long = socket(&daemon);
    // The server may close before it has read all.
    let _ = long.write_all(&hello(12_000)[..21_000]);
    assert!(sent_by(long).is_none_or(|sent| sent.is_empty()));
    let text = "closed conn=1 reason=broken error=\"the handshake is too long\"";
    daemon.wait_for_log(text, PATIENCE);
}

/// A renegotiation, in encrypted records: what a message takes is bounded at any time.
#[test]
fn a_long_hello_behind_the_handshake_is_refused_too() {
    needs!("openssl");
    let daemon = daemon(&["--debug"]);
    let mut socket = socket(&daemon);
    let mut config = Arc::unwrap_or_clone(trusting(&common().ca(), Version::Tls13));
    config.enable_secret_extraction = true;
    let name = ServerName::try_from("localhost").expect("it is a name");
    let mut session = ClientConnection::new(config.into(), name).expect("the settings are valid");
    while session.is_handshaking() {
        session.complete_io(&mut socket).expect("it trusts it");
    }
    let suite = session
        .negotiated_cipher_suite()
        .and_then(|suite| suite.tls13());
    let cipher = suite.expect("it is of TLS 1.3").aead_alg;
    let secrets = session.dangerous_extract_secrets();
    let (first, secrets) = secrets.expect("the settings allow it").tx;
    let ConnectionTrafficSecrets::Aes256Gcm { key, iv } = secrets else {
        panic!("both sides prefer another cipher");
    };
    let mut encrypter = cipher.encrypter(key, iv);
    // The first record may arrive together with the end of the handshake. It does not count then.
    for (number, record) in (first..).zip(hello(30_000)[..3 * 16_005].chunks(16_005)) {
        let plain = OutboundPlainMessage {
            typ: ContentType::Handshake,
            version: ProtocolVersion::TLSv1_2,
            payload: OutboundChunks::Single(&record[5..]),
        };
        let sealed = encrypter
            .encrypt(plain, number)
            .expect("it is short enough");
        // The server may close before it has read all.
        let _ = socket.write_all(&sealed.encode());
    }
    let text = "closed conn=1 reason=broken error=\"the handshake is too long\"";
    daemon.wait_for_log(text, PATIENCE);
}

/// Each name in a hello is a block of memory for the server.
#[test]
fn hellos_of_many_names_stay_below_the_worst_case() {
    needs!("openssl");
    let daemon = daemon(&["--max-connections", "200", "--max-locks", "1"]);
    for name_count in [31_000, 7900, 1900] {
        let hello = hello(name_count);
        let (end, beginning) = hello.split_last().expect("it is long");
        let mut crowd: Vec<TcpStream> = (0..200).map(|_| socket(&daemon)).collect();
        for client in &mut crowd {
            let _ = client.write_all(beginning);
        }
        for client in &mut crowd {
            let _ = client.write_all(&[*end]);
        }
        drop(crowd);
        eventually(PATIENCE, "they have gone", || {
            status_kib(daemon.pid(), "Threads:") < 100
        });
    }
    // Of the last ones, some may not have been accepted yet.
    eventually(PATIENCE, "it has room for one", || {
        let mut client = daemon.connect();
        client.send("ping\n_\n_\n");
        matches!(client.next_event(PATIENCE), Event::Line(_))
    });
    let worst = worst_case_mb(&daemon);
    let most = status_kib(daemon.pid(), "VmHWM:") >> 10;
    println!("{most} MB, {worst} MB at worst");
    assert!(most <= worst, "{most} MB, and the server says {worst} MB");
}

#[test]
fn unfinished_handshakes_under_a_limit_end_no_server() {
    needs!("openssl");
    raise_our_own_limit();
    let daemon = daemon(&["--max-connections", "900"]);
    let mut crowd: Vec<TcpStream> = (0..900).map(|_| socket(&daemon)).collect();
    eventually(PATIENCE, "each has a thread", || {
        status_kib(daemon.pid(), "Threads:") > 900
    });
    let used = status_kib(daemon.pid(), "VmData:") << 10;
    limit_to(daemon.pid(), Resource::Data, Some(used + (36 << 20)));
    let beginning = &hello(31_000)[..60_000];
    for client in &mut crowd {
        let _ = client.write_all(beginning);
    }
    for client in crowd {
        // Its handshake is too long, or there is no memory for it.
        let _ = sent_by(client);
    }
    limit_to(daemon.pid(), Resource::Data, None);
    assert_eq!(daemon.connect().request("ping", "_", "_"), "ok");
}

/// A hello of TLS 1.3 that offers so many protocols, in records.
fn hello(name_count: usize) -> Vec<u8> {
    let with_len = |bytes: &[u8]| {
        let len = u16::try_from(bytes.len()).expect("below 64 KB");
        [&len.to_be_bytes(), bytes].concat()
    };
    let extension = |number: u8, body: &[u8]| [&[0, number][..], &with_len(body)].concat();
    let extensions = [
        extension(10, &[0, 2, 0, 0x1d]),
        extension(13, &[0, 2, 4, 3]),
        extension(43, &[2, 3, 4]),
        extension(51, &[0, 0]),
        extension(16, &with_len(&b"\x01a".repeat(name_count))),
    ];
    let fixed = [&[3, 3][..], &[0; 32], &[0, 0, 2, 0x13, 1, 1, 0]].concat();
    let body = [fixed, with_len(&extensions.concat())].concat();
    let len = u32::try_from(body.len()).expect("below 64 KB");
    let message = [&[1], &len.to_be_bytes()[1..], &body].concat();
    let records = message.chunks(16_000);
    records
        .flat_map(|part| [&[22, 3, 1][..], &with_len(part)].concat())
        .collect()
}
