//! How a server ends, and what clients see of it: drains, kills, and signals that end nothing.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::limited::raise_our_own_limit;
use crate::support::silent::free_addr;
use crate::support::stalls::{fair_test, late};
use crate::support::{described, parse_grant, Client, Daemon, Event, Signal, PATIENCE};

/// How long a server waits for its holders in these tests.
const GRACE: Duration = Duration::from_secs(1);

// ---- drains ----------------------------------------------------------------------------------

#[test]
fn a_drain_answers_every_waiter_and_tears_no_line() {
    (0..5).for_each(|_| drain(300, 150, 50));
}

#[test]
#[ignore = "long: cargo test --test promises ends -- --ignored"]
fn fifty_drains_of_a_big_crowd_tear_no_line() {
    (0..50).for_each(|_| drain(1000, 500, 100));
}

/// A drain with so many clients that are idle, wait and hold. Half of the holders never release, so
/// the grace period ends it.
fn drain(idle: usize, waiting: usize, holding: usize) {
    raise_our_own_limit();
    let grace = GRACE.as_secs().to_string();
    // On a slow machine, some clients are idle for long.
    let daemon = Daemon::start(&["--shutdown-timeout", &grace, "--read-timeout", "3600"]);
    let crowd = |count: usize| {
        (0..count)
            .map(|_| daemon.connect())
            .collect::<Vec<Client>>()
    };
    let (mut idle, mut waiting, mut holding) = (crowd(idle), crowd(waiting), crowd(holding));
    let mut tokens = Vec::new();
    for (number, holder) in holding.iter_mut().enumerate() {
        tokens.push(holder.acquire_for(&format!("key-{number}"), 0, 600).token);
    }
    for waiter in &mut waiting {
        waiter.send("l\nkey-0\n600\n");
    }
    daemon.wait_for_waiters("key-0", waiting.len() as u64);
    let told = Instant::now();
    daemon.signal(Signal::TERM);
    // On a machine that is late the grace period may be over first.
    let hears = |client: &mut Client, reply: &str| match client.next_event(PATIENCE) {
        Event::Line(line) => assert_eq!(line, reply.as_bytes()),
        end => {
            let is_late = told.elapsed() > GRACE && matches!(end, Event::Eof | Event::Reset);
            assert!(is_late, "{}", described(&end));
        }
    };
    for waiter in &mut waiting {
        hears(waiter, "error_draining");
    }
    for (number, holder) in holding.iter_mut().enumerate().skip(1).step_by(2) {
        // An error is the end of the stream, too.
        let _ = holder.try_send(format!("r\nkey-{number}\n{}\n", tokens[number]).as_bytes());
        hears(holder, "ok");
    }
    for client in idle.iter_mut().chain(&mut waiting).chain(&mut holding) {
        let end = client.next_event(PATIENCE);
        assert!(
            matches!(end, Event::Eof | Event::Reset),
            "{}",
            described(&end)
        );
    }
    let status = daemon.wait_exit(PATIENCE).expect("the drain ends");
    println!("drained in {:?}", told.elapsed());
    assert_eq!(status.code(), Some(0));
}

/// How many long keys fill a reply that is a little more than the kernel has room for, so that the
/// server still writes it. Over TCP the kernel might have room for megabytes.
const KEYS: usize = 600;

/// Takes so many keys at a server with a Unix socket.
fn holder_of_long_keys(socket: &Path) -> Client {
    let mut holder = Client::unix(socket);
    for number in 0..KEYS {
        holder.acquire_for(&format!("{number:0>250}"), 0, 600);
    }
    holder
}

/// A client that has read the first byte of the statistics.
fn reader_of_statistics(socket: &Path) -> Client {
    let mut reader = Client::unix(socket);
    reader.send("stats\n_\n_\n");
    assert_eq!(reader.next_bytes(1, PATIENCE), b"o");
    reader
}

#[test]
fn a_reply_on_its_way_when_a_drain_ends_arrives_whole() {
    fair_test(a_reply_on_its_way_when_a_drain_ends_arrives_whole_once);
}

fn a_reply_on_its_way_when_a_drain_ends_arrives_whole_once() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let grace = GRACE.as_secs().to_string();
    let daemon = Daemon::start_unix(
        &socket,
        &["--shutdown-timeout", &grace, "--max-per-connection", "1024"],
    );
    let _holder = holder_of_long_keys(&socket);
    let mut reader = reader_of_statistics(&socket);
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("stopping reason=shutdown-timeout", PATIENCE);
    expect_statistics(&mut reader);
    let status = daemon.wait_exit(PATIENCE).expect("the drain ends");
    assert_eq!(status.code(), Some(0));
}

/// Reads what follows the first byte of a reply to `stats`. A server that says farewell leaves once
/// no session has ended for 600 ms, and on a late machine none may have.
fn expect_statistics(reader: &mut Client) {
    match reader.next_event(PATIENCE) {
        Event::Line(line) => assert!(line.starts_with(b"k {") && line.ends_with(b"}")),
        end => late(format_args!("a reply is not whole: {}", described(&end))),
    }
}

/// Each reader takes its turn, as if the sessions of a big crowd ended one after the other.
#[test]
fn the_exit_waits_while_sessions_go_on_ending() {
    fair_test(the_exit_waits_while_sessions_go_on_ending_once);
}

fn the_exit_waits_while_sessions_go_on_ending_once() {
    const READERS: usize = 16;
    const TURN: Duration = Duration::from_millis(50);
    /// A little longer than a farewell in which no session ends.
    const FAREWELL: Duration = Duration::from_millis(700);
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let daemon = Daemon::start_unix(
        &socket,
        &["--write-timeout", "60", "--max-per-connection", "1024"],
    );
    let holder = holder_of_long_keys(&socket);
    let readers = [(); READERS].map(|()| reader_of_statistics(&socket));
    drop(holder);
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("stopping reason=drained", PATIENCE);
    let stopped = Instant::now();
    for mut reader in readers {
        // Where reading takes its time, that is pause enough.
        if stopped.elapsed() < FAREWELL {
            thread::sleep(TURN);
        }
        expect_statistics(&mut reader);
    }
    assert!(stopped.elapsed() > FAREWELL);
    let status = daemon.wait_exit(PATIENCE).expect("the drain ends");
    assert_eq!(status.code(), Some(0));
}

// ---- kills -----------------------------------------------------------------------------------

/// The connections of the killed server are still known to the kernel when the next one starts.
#[test]
fn after_a_kill_clients_know_and_the_address_is_free() {
    let (addr, directory) = (free_addr(), tempfile::tempdir().expect("there is room"));
    let fences = directory.path().join("fences").display().to_string();
    let port = addr.port().to_string();
    let start = || {
        let mut command = Daemon::command();
        command.args([
            "--port",
            &port,
            "--print-port",
            "--fence-state-file",
            &fences,
        ]);
        Daemon::from_command(command)
    };
    let mut daemon = start();
    for round in 0..amount(10, 100) {
        let is_over = AtomicBool::new(false);
        daemon = thread::scope(|scope| {
            let _end = AtTheEnd(&is_over);
            let (killed, is_over) = (&daemon, &is_over);
            let clients: Vec<_> = (0..30)
                .map(|number| {
                    let mut client = killed.connect();
                    let key = format!("key-{}", number % 7);
                    scope.spawn(move || while is_served(&mut client, &key, is_over) {})
                })
                .collect();
            thread::sleep(Duration::from_millis(50 + round % 10 * 10));
            is_over.store(true, Ordering::SeqCst);
            killed.signal(Signal::KILL);
            let died = Instant::now();
            for client in clients {
                client.join().expect("it saw the end of a whole line");
            }
            println!("all clients knew after {:?}", died.elapsed());
            killed.wait_exit(PATIENCE).expect("it was killed");
            let began = Instant::now();
            let next = start();
            println!("the next server listened after {:?}", began.elapsed());
            next
        });
        daemon.connect().acquire("key-0", 0);
    }
}

/// Takes and gives back the key; false after the end of a server that may be killed.
fn is_served(client: &mut Client, key: &str, may_end: &AtomicBool) -> bool {
    let Some(reply) = reply_to(client, &format!("l\n{key}\n5\n"), may_end) else {
        return false;
    };
    let grant = parse_grant(&reply, "ok").unwrap_or_else(|| panic!("no grant: {reply}"));
    let release = format!("r\n{key}\n{}\n", grant.token);
    match reply_to(client, &release, may_end) {
        Some(reply) => reply == "ok",
        None => false,
    }
}

fn reply_to(client: &mut Client, frame: &str, may_end: &AtomicBool) -> Option<String> {
    let sent = client.try_send(frame.as_bytes());
    match client.next_event(PATIENCE) {
        Event::Line(line) => Some(String::from_utf8(line).expect("replies are ASCII")),
        end => {
            let is_end = matches!(end, Event::Eof | Event::Reset);
            assert!(
                is_end && may_end.load(Ordering::SeqCst),
                "{}",
                described(&end)
            );
            assert!(sent.is_ok() || is_end);
            None
        }
    }
}

// ---- signals ---------------------------------------------------------------------------------

#[test]
fn a_thousand_signals_during_ten_thousand_requests_harm_none() {
    let daemon = Daemon::start(&[]);
    let harmless = [
        Signal::HUP,
        Signal::USR1,
        Signal::USR2,
        Signal::PIPE,
        Signal::CHILD,
    ];
    thread::scope(|scope| {
        let requests = scope.spawn(|| {
            let mut client = daemon.connect();
            for _ in 0..5000 {
                let grant = client.acquire("k", 1);
                assert_eq!(client.request("r", "k", &grant.token), "ok");
            }
        });
        let mut count = 0;
        while !requests.is_finished() || count < 1000 {
            daemon.signal(harmless[count % harmless.len()]);
            count += 1;
        }
        println!("{count} signals");
    });
    assert!(
        daemon.wait_exit(Duration::ZERO).is_none(),
        "{}",
        daemon.log()
    );
}
