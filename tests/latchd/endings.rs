//! What ends a grant before its lease, and what does not: the end of the client's stream is a word
//! of the holder, and everything else is silence.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{eventually, parse_grant, Client, Daemon, Event, PATIENCE};

/// The lease of holders that are lost in these tests: long enough to see that it is not over.
const LEASE: Duration = Duration::from_secs(3);

/// How long the loss of a connection takes at most to be dealt with, and nothing has passed on.
const WHILE: Duration = Duration::from_millis(800);

/// More grants than a socket has room for in its replies.
const KEYS: usize = 6000;

/// The lock `k`, held with [`LEASE`], and a client that waits for it.
fn held_and_waited_for(daemon: &Daemon) -> (Client, Instant, Client) {
    let (mut holder, mut waiter) = (daemon.connect(), daemon.connect());
    let asked = Instant::now();
    holder.acquire_for("k", 0, LEASE.as_secs());
    waiter.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 1);
    (holder, asked, waiter)
}

/// The waiter gets the key when the lease of its lost holder has ended, and not before.
fn expect_at_the_lease_end(waiter: &mut Client, asked: Instant) {
    waiter.nothing_within(WHILE);
    assert!(parse_grant(&waiter.line(), "ok").is_some());
    assert!(asked.elapsed() >= LEASE, "{:?}", asked.elapsed());
}

fn orphan_count(client: &mut Client) -> u64 {
    let counters = client.request("stats", "counters", "_");
    let json = counters.strip_prefix("ok ").expect("an object");
    let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
    json["gauges"]["orphans"].as_u64().expect("a number")
}

/// Waits until nobody has anything to do with the key.
fn expect_free(asking: &mut Client, key: &str) {
    let grant = asking.acquire(key, 5);
    assert_eq!(asking.request("r", key, &grant.token), "ok");
}

#[test]
fn a_claim_that_is_closed_at_once_is_free_at_once() {
    let daemon = Daemon::start(&[]);
    let mut asking = daemon.connect();
    for round in 0..1000 {
        let mut client = daemon.connect();
        client.send("l\nk\n0 600\n");
        // The reply may have come by then, and a socket that is closed with it sends no more.
        client.half_close();
        drop(client);
        if round % 10 == 9 {
            expect_free(&mut asking, "k");
        }
    }
    assert_eq!(orphan_count(&mut asking), 0);
}

#[test]
fn a_claim_that_is_closed_at_its_grant_is_free_at_once() {
    let daemon = Daemon::start(&[]);
    let mut asking = daemon.connect();
    for round in 0..1000 {
        let grant = asking.acquire("k", 5);
        let mut client = daemon.connect();
        client.send("l\nk\n600 600\n");
        if round % 2 == 0 {
            daemon.wait_for_waiters("k", 1);
        }
        asking.send(&format!("r\nk\n{}\n", grant.token));
        client.half_close();
        drop(client);
        asking.expect("ok");
    }
    expect_free(&mut asking, "k");
    assert_eq!(orphan_count(&mut asking), 0);
}

#[test]
fn a_holder_that_closes_while_it_waits_frees_all_at_once() {
    let daemon = Daemon::start(&[]);
    let mut asking = daemon.connect();
    asking.acquire("other", 0);
    for _ in 0..100 {
        let mut client = daemon.connect();
        client.send("l\nk\n0 600\nl\nother\n600 600\n");
        client.line();
        client.half_close();
        drop(client);
        expect_free(&mut asking, "k");
    }
}

#[test]
fn a_lock_outlives_a_reset_of_its_connection() {
    let daemon = Daemon::start(&[]);
    let (mut holder, asked, mut waiter) = held_and_waited_for(&daemon);
    let mut asking = daemon.connect();
    asking.acquire("other", 0);
    holder.send("l\nother\n600\n");
    daemon.wait_for_waiters("other", 1);
    holder.reset();
    daemon.wait_for_waiters("other", 0);
    eventually(PATIENCE, "it is an orphan", || {
        orphan_count(&mut asking) == 1
    });
    expect_at_the_lease_end(&mut waiter, asked);
    assert_eq!(orphan_count(&mut asking), 0);
}

#[test]
fn a_client_that_was_reset_adopts_and_goes_on() {
    let daemon = Daemon::start(&["--max-kept", "0"]);
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 60);
    holder.reset();
    let mut next = daemon.connect();
    next.send("l\nk\n60\n");
    let mut back = daemon.connect();
    eventually(PATIENCE, "it is an orphan", || orphan_count(&mut back) == 1);
    // Over any connection first, and then over its own one.
    assert_eq!(
        back.request("n", "k", &format!("{} 60", grant.token)),
        "ok 60"
    );
    assert_eq!(back.request("adopt", "k", &grant.token), "ok 33");
    assert_eq!(back.request("n", "k", &grant.token), "ok 33");
    assert_eq!(orphan_count(&mut back), 0);
    next.nothing_within(WHILE);
    assert_eq!(back.request("r", "k", &grant.token), "ok");
    assert!(parse_grant(&next.line(), "ok").is_some());
}

/// The client may not hear of it, and hold on.
#[test]
fn a_lock_outlives_what_the_server_decides_alone() {
    let ways: [(&[&str], &str); 4] = [
        (&["--read-timeout", "1"], "l\nhalf a frame"),
        (&[], &"x".repeat(300)),
        (&[], "GET / HTTP/1.1\r\n\r\n"),
        (&["--write-timeout", "1"], &"stats\n_\n_\n".repeat(100_000)),
    ];
    thread::scope(|scope| {
        for (options, ending) in ways {
            scope.spawn(move || {
                let daemon = Daemon::start(options);
                let (holder, asked, mut waiter) = held_and_waited_for(&daemon);
                let mut writer = holder.writer();
                // Of what the server does not read, not all can be sent.
                scope.spawn(move || drop(writer.write_all(&[ending.as_bytes(), b"\n"].concat())));
                eventually(PATIENCE, "the server has hung up", || {
                    daemon.stats()["connections"] == 2
                });
                // Its end comes after that of the server, and is an answer to it.
                drop(holder);
                expect_at_the_lease_end(&mut waiter, asked);
            });
        }
    });
}

#[test]
fn a_client_that_floods_its_wait_leaves_its_lock_and_no_place() {
    let daemon = Daemon::start(&[]);
    let (mut holder, asked, mut waiter) = held_and_waited_for(&daemon);
    daemon.connect().acquire_for("other", 0, 600);
    let mut other = daemon.connect();
    other.acquire("other", 5);
    holder.send("l\nother\n600\n");
    daemon.wait_for_waiters("other", 1);
    holder.send(&"ping\n_\n_\n".repeat(10_000));
    daemon.wait_for_waiters("other", 0);
    expect_at_the_lease_end(&mut waiter, asked);
}

/// One system knows both ends, and that the holder is dead.
#[test]
fn every_end_of_a_unix_socket_frees_what_its_client_held() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let daemon = Daemon::start_unix(&socket, &[]);
    let mut asking = Client::unix(&socket);
    for _ in 0..100 {
        let mut holder = UnixStream::connect(&socket).expect("it listens");
        holder.write_all(b"l\nk\n0 600\n").expect("it reads");
        holder.read_exact(&mut [0]).expect("a reply");
        // It is closed with the rest of the reply.
        drop(holder);
        expect_free(&mut asking, "k");
    }
    drop(daemon);
}

/// The replies to these grants fill the socket. The system has some of them whole, which the client
/// may read at any time, and the others end with the connection.
#[test]
fn only_grants_whose_replies_were_sent_whole_are_left() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let options = ["--write-timeout", "1", "--max-locks", "40000"];
    let _daemon = Daemon::start_unix(&socket, &options);
    let mut holder = Client::unix(&socket);
    let mut writer = holder.writer();
    let sending = thread::spawn(move || {
        for number in 0..KEYS {
            let claim = format!("l\nkey-{number}\n0 600\n");
            if writer.write_all(claim.as_bytes()).is_err() {
                break;
            }
        }
    });
    let mut asking = Client::unix(&socket);
    eventually(PATIENCE, "the server has hung up", || {
        asking.stats()["connections"] == 1
    });
    sending.join().expect("no panic");
    let mut told = 0;
    while let Event::Line(line) = holder.next_event(PATIENCE) {
        let line = String::from_utf8(line).expect("text");
        assert!(parse_grant(&line, "ok").is_some(), "{line}");
        told += 1;
    }
    assert!((1..KEYS).contains(&told), "{told} grants");
    let held = asking.stats()["locks"].as_array().map(Vec::len);
    assert_eq!(held, Some(told));
    assert_eq!(orphan_count(&mut asking), told as u64);
}

/// The replies to `e` have told the tokens already.
#[test]
fn grants_that_were_told_before_outlive_a_second_telling() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let options = ["--write-timeout", "1", "--max-locks", "40000"];
    let daemon = Daemon::start_unix(&socket, &options);
    let mut holder = Client::unix(&socket);
    for number in 0..KEYS {
        let acquired = holder.request("e", &format!("key-{number}"), "600");
        assert!(parse_grant(&acquired, "acquired").is_some());
    }
    let mut writer = holder.writer();
    let sending = thread::spawn(move || {
        for number in 0..KEYS {
            let wait = format!("w\nkey-{number}\n0\n");
            if writer.write_all(wait.as_bytes()).is_err() {
                break;
            }
        }
    });
    let mut asking = Client::unix(&socket);
    eventually(PATIENCE, "the server has hung up", || {
        asking.stats()["connections"] == 1
    });
    sending.join().expect("no panic");
    assert_eq!(orphan_count(&mut asking), KEYS as u64);
    drop(daemon);
}

/// No client knows this grant.
#[test]
fn a_granted_place_that_was_never_collected_ends_with_its_connection() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let mut waiter = daemon.connect();
    assert_eq!(waiter.request("e", "k", "600"), "queued");
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    waiter.reset();
    expect_free(&mut holder, "k");
}
