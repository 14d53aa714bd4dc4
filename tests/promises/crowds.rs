//! Many clients at once: dead, deaf, greedy, talking rubbish, or simply many.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::process::{getrlimit, Resource};

use crate::support::amount::amount;
use crate::support::footprint::{status_kib, worst_case_mb, Footprint};
use crate::support::limited::{is_served, limit_to, raise_our_own_limit};
use crate::support::random::{self, Random};
use crate::support::stalls::fairly;
use crate::support::{
    come_to_rest, eventually, fence, parse_grant, shown, waiter_count, Client, Daemon, PATIENCE,
};

/// What a client may have to wait for beside a crowd, ten times over.
const MAX_DELAY: Duration = Duration::from_millis(500);

// ---- waiters ---------------------------------------------------------------------------------

#[test]
fn five_hundred_dead_waiters_leave_at_once() {
    raise_our_own_limit();
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire_for("k", 0, 600);
    (0..amount(1, 20)).for_each(|_| five_hundred_die(&daemon));
    come_to_rest(&[daemon.pid()], Duration::from_millis(90));
}

fn five_hundred_die(daemon: &Daemon) {
    fairly(|| {
        let began = Instant::now();
        let mut waiters: Vec<Client> = (0..500).map(|_| daemon.connect()).collect();
        waiters
            .iter_mut()
            .for_each(|waiter| waiter.send("l\nk\n600\n"));
        daemon.wait_for_waiters("k", 500);
        let came_in = began.elapsed();
        let died = Instant::now();
        drop(waiters);
        daemon.wait_for_waiters("k", 0);
        let took = died.elapsed();
        println!("all came in {came_in:?}, and had left after {took:?}");
        // Beside the crowds of other tests, both take long.
        if took < Duration::from_secs(1).max(5 * came_in) {
            Ok(())
        } else {
            Err(took)
        }
    })
    .expect("dead waiters keep their places");
}

#[test]
fn waiters_are_served_in_order_past_those_that_leave() {
    keep_the_order(200, 3);
}

#[test]
#[ignore = "long: cargo test --test promises crowds -- --ignored"]
fn a_hundred_thousand_waiters_are_served_in_order() {
    keep_the_order(1000, 100);
}

/// Rounds in which one waiter in ten leaves; the others are served as they came, without a gap.
fn keep_the_order(count: usize, rounds: u64) {
    raise_our_own_limit();
    // On a slow machine, some clients are idle for long.
    let daemon = Daemon::start(&["--read-timeout", "3600"]);
    let mut holder = daemon.connect();
    let mut waiters: Vec<Client> = (0..count).map(|_| daemon.connect()).collect();
    for round in 0..rounds {
        let mut random = Random::new(round);
        let held = holder.acquire_for("k", 0, 600);
        for waiter in &mut waiters {
            assert_eq!(waiter.request("e", "k", "600"), "queued");
        }
        for waiter in &mut waiters {
            if random.one_in(10) {
                *waiter = daemon.connect();
                waiter.send("ping\n_\n_\n");
            } else {
                waiter.send("w\nk\n600\n");
            }
        }
        let stayed = waiters.len() as u64;
        let mut random = Random::new(round);
        let left = (0..count).filter(|_| random.one_in(10)).count() as u64;
        daemon.wait_for_waiters("k", stayed - left);
        assert_eq!(holder.request("r", "k", &held.token), "ok");
        let mut last = fence(&held.token);
        for waiter in &mut waiters {
            let line = waiter.line();
            let Some(grant) = parse_grant(&line, "ok") else {
                assert_eq!(line, "ok"); // the ping of a newcomer
                continue;
            };
            last += 1;
            assert_eq!(fence(&grant.token), last, "in round {round}");
            assert_eq!(waiter.request("r", "k", &grant.token), "ok");
        }
    }
}

// ---- peers in the way ------------------------------------------------------------------------

#[test]
fn fifty_clients_that_never_read_are_gone_in_time() {
    raise_our_own_limit();
    let daemon = Daemon::start(&["--write-timeout", "1"]);
    let flood = "stats\n_\n_\n".repeat(1_000_000);
    let before = Footprint::of(daemon.pid()).resident;
    let deaf: Vec<TcpStream> = (0..amount(50, 500))
        .map(|number| {
            let mut stream = TcpStream::connect(daemon.addr()).expect("it listens");
            set_socket_send_buffer_size(&stream, 64 * 1024).expect("every socket has one");
            let claim = format!("l\nkey-{number}\n0 3\nl\nheld\n0 600\ne\nheld\n600\n");
            stream.write_all(claim.as_bytes()).expect("it is read");
            let short = Some(Duration::from_millis(20));
            stream.set_write_timeout(short).expect("it is not zero");
            // Until the window is full, or the server hangs up.
            while stream.write_all(flood.as_bytes()).is_ok() {}
            stream
        })
        .collect();
    fairly(|| within(MAX_DELAY, p99(times_of(&daemon, 200)))).expect("others are held up");
    let mut asking = daemon.connect();
    eventually(PATIENCE, "deaf clients and their places are gone", || {
        let stats = asking.stats();
        stats["connections"] == 1 && waiter_count(&stats, "held") == 0
    });
    eventually(PATIENCE, "their locks have ended with their leases", || {
        let locks = asking.stats()["locks"].as_array().map(Vec::len);
        // The one with the longest lease is left.
        locks == Some(1)
    });
    // At the most: much of it is given back with the locks.
    let grown = status_kib(daemon.pid(), "VmHWM:").saturating_sub(before);
    println!("{grown} KiB for {} deaf clients", deaf.len());
    assert!(grown < 200 * deaf.len() as u64, "{grown} KiB");
}

#[test]
fn a_client_with_a_hundred_thousand_requests_delays_no_other() {
    let daemon = Daemon::start(&[]);
    let mut greedy = TcpStream::connect(daemon.addr()).expect("it listens");
    let mut reader = greedy.try_clone().expect("descriptors are left");
    let patience = Some(PATIENCE);
    reader.set_read_timeout(patience).expect("it is not zero");
    greedy.set_write_timeout(patience).expect("it is not zero");
    fairly(|| {
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..100 {
                    let requests = "l\ngreedy\n0 1\n".repeat(1000);
                    greedy.write_all(requests.as_bytes()).expect("it is read");
                }
            });
            let reading = scope.spawn(|| {
                let (mut chunk, mut lines) = ([0; 16 * 1024], 0);
                while lines < 100_000 {
                    let count = reader.read(&mut chunk).expect("replies");
                    assert!(count > 0, "the end of the stream after {lines} replies");
                    lines += chunk[..count].iter().filter(|byte| **byte == b'\n').count();
                }
            });
            let mut times = Vec::new();
            while !reading.is_finished() {
                times.extend(times_of(&daemon, 20));
            }
            within(MAX_DELAY, p99(times))
        })
    })
    .expect("others are held up");
}

#[test]
fn rubbish_ends_no_server_and_takes_no_memory() {
    talk_rubbish(20_000);
}

#[test]
#[ignore = "long: cargo test --test promises crowds -- --ignored"]
fn two_million_lines_of_rubbish_end_no_server() {
    talk_rubbish(2_000_000);
}

fn talk_rubbish(lines: u64) {
    const PEERS: u64 = 8;
    // A client that leaves with unread replies leaves its locks to their leases.
    let daemon = Daemon::start(&["--default-lease-ttl", "1", "--max-hold", "2"]);
    assert_eq!(daemon.connect().request("ping", "_", "_"), "ok");
    let seed = random::seed();
    let mut before = 0;
    for part in 0..4 {
        thread::scope(|scope| {
            for peer in 0..PEERS {
                let mut random = Random::new(seed ^ (part * PEERS + peer));
                let daemon = &daemon;
                scope.spawn(move || {
                    for _ in 0..lines / PEERS / 4 / 100 {
                        send_rubbish(daemon, &mut random);
                    }
                });
            }
        });
        if part == 0 {
            before = Footprint::of(daemon.pid()).resident;
        }
    }
    let grown = Footprint::of(daemon.pid()).resident.saturating_sub(before);
    println!("{grown} KiB more than after a quarter of it");
    assert!(grown < 4000, "{grown} KiB");
    eventually(PATIENCE, "all is free", || {
        let stats = daemon.stats();
        let is_free = |list: &str| stats[list].as_array().is_some_and(Vec::is_empty);
        is_free("locks") && is_free("semaphores") && stats["connections"] == 1
    });
    assert!(
        daemon.wait_exit(Duration::ZERO).is_none(),
        "{}",
        daemon.log()
    );
}

/// A hundred lines that are nearly right, over one connection.
fn send_rubbish(daemon: &Daemon, random: &mut Random) {
    const WORDS: [&[u8]; 16] = [
        b"l",
        b"sl",
        b"e",
        b"w",
        b"r",
        b"n",
        b"stats",
        b"auth",
        b"0",
        b"1 1",
        b"-1",
        b"\xff\xfd\x06",
        b"9223372036854775808",
        b"\xc3\x28",
        b"\r\0",
        b"k",
    ];
    let mut stream = TcpStream::connect(daemon.addr()).expect("it listens");
    let patience = Some(Duration::from_millis(100));
    stream.set_read_timeout(patience).expect("it is not zero");
    for _ in 0..100 {
        let mut line = Vec::new();
        for _ in 0..random.below(3) {
            line.extend(WORDS[usize::try_from(random.below(16)).expect("an index")]);
        }
        if random.one_in(8) {
            let length = usize::try_from(random.below(400)).expect("a short line");
            line.resize(length, b'x');
        }
        if random.one_in(8) {
            line.push(u8::try_from(random.below(256)).expect("a byte"));
        }
        line.push(b'\n');
        // The server hangs up after a line that is too long.
        if stream.write_all(&line).is_err() {
            return;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut replies = Vec::new();
    if stream.read_to_end(&mut replies).is_err() {
        // The rest of the last line has not come in time.
        let whole = replies.iter().rposition(|byte| *byte == b'\n');
        replies.truncate(whole.map_or(0, |at| at + 1));
    }
    for line in without_telnet(&replies).split_inclusive(|byte| *byte == b'\n') {
        let is_reply = |word: &&str| line.starts_with(word.as_bytes());
        let words = ["ok", "error", "acquired", "queued", "timeout"];
        assert!(words.iter().any(is_reply), "{}", shown(line));
    }
}

/// Leaves out the answers to options, each of three bytes.
fn without_telnet(mut bytes: &[u8]) -> Vec<u8> {
    let mut rest = Vec::new();
    while let Some((&first, behind)) = bytes.split_first() {
        if first == 0xff {
            bytes = behind.get(2..).unwrap_or_default();
        } else {
            rest.push(first);
            bytes = behind;
        }
    }
    rest
}

// ---- simply many -----------------------------------------------------------------------------

#[test]
#[ignore = "long: cargo test --release --test promises crowds -- --ignored"]
fn ten_thousand_connections_each_have_their_lock() {
    const COUNT: usize = 9900;
    raise_our_own_limit();
    let count = COUNT.to_string();
    let daemon = Daemon::start(&[
        "--max-connections",
        "9950",
        "--max-locks",
        &count,
        // A busy machine takes a while to connect them all.
        "--read-timeout",
        "600",
    ]);
    let began = Instant::now();
    let mut crowd: Vec<Client> = (0..COUNT).map(|_| daemon.connect()).collect();
    let connected = began.elapsed();
    for (number, client) in crowd.iter_mut().enumerate() {
        client.acquire_for(&format!("key-{number}"), 0, 600);
    }
    let granted = began.elapsed() - connected;
    let megabytes = Footprint::of(daemon.pid()).resident >> 10;
    let before = Instant::now();
    drop(crowd);
    eventually(3 * PATIENCE, "all is free", || {
        daemon.stats()["locks"]
            .as_array()
            .is_some_and(Vec::is_empty)
    });
    println!(
        "connected in {connected:?}, granted in {granted:?}, {megabytes} MB, free after {:?}",
        before.elapsed()
    );
    assert!(megabytes < 320, "{megabytes} MB");
}

/// All caps are reached at once: keys and tags are as long as may be.
#[test]
fn at_all_caps_memory_is_below_the_worst_case_it_states() {
    raise_our_own_limit();
    let daemon = Daemon::start(&[
        "--max-connections",
        "300",
        "--max-locks",
        "3000",
        "--max-slots",
        "20000",
        "--max-waiters-total",
        "20000",
        "--max-per-connection",
        "200",
        // On a slow machine, the last client is idle for long before it is its turn.
        "--read-timeout",
        "3600",
    ]);
    let worst = worst_case_mb(&daemon);
    let mut crowd: Vec<Client> = (0..300).map(|_| daemon.connect()).collect();
    for (number, client) in crowd.iter_mut().enumerate() {
        // Some take slots of their own keys, the others places in the queues of those.
        let requests: Vec<String> = (0..200)
            .map(|place| match number % 3 {
                0 => format!("se\n{:0>250}\n1 3600\n", number * 200 + place),
                1 => format!("sl\nslots-{:0>240}\n0 1048576 3600\n", place % 10),
                _ => format!("se\n{:0>250}\n1 3600\n", number % 10 * 600 + place),
            })
            .collect();
        client.send(&requests.concat());
        requests.iter().for_each(|_| drop(client.line()));
    }
    // Each of them reads no more than the beginning of who holds what.
    for client in &mut crowd {
        client.send("stats\nholders\n_\n");
    }
    for client in &mut crowd {
        assert_eq!(client.next_bytes(1, 4 * PATIENCE), b"o");
    }
    let most = status_kib(daemon.pid(), "VmHWM:") >> 10;
    println!("{most} MB at all caps, {worst} MB at worst");
    assert!(most <= worst, "{most} MB, and the server says {worst} MB");
    assert!(most > 5, "the caps were not reached");
}

// ---- helpers ---------------------------------------------------------------------------------

/// How long each of so many clients takes to connect and to have a lock of its own.
fn times_of(daemon: &Daemon, count: usize) -> Vec<Duration> {
    (0..count)
        .map(|number| {
            let asked = Instant::now();
            daemon.connect().acquire(&format!("own-{number}"), 5);
            asked.elapsed()
        })
        .collect()
}

fn p99(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let p99 = times[times.len() * 99 / 100];
    println!("p99 of {} is {p99:?}", times.len());
    p99
}

fn within(limit: Duration, time: Duration) -> Result<(), Duration> {
    if time < limit {
        Ok(())
    } else {
        Err(time)
    }
}

// ---- limits that come together ---------------------------------------------------------------

/// To count its memory, the server needs a descriptor for the first time when there is none.
#[test]
fn a_memory_limit_without_a_free_descriptor_is_outlived() {
    let daemon = Daemon::start(&[]);
    let mut early = daemon.connect();
    assert!(is_served(&mut early));
    let pid = daemon.pid();
    let usual = getrlimit(Resource::Nofile).current;
    limit_to(pid, Resource::As, Some(1 << 40));
    limit_to(pid, Resource::Nofile, Some(0));
    early.request("stats", "_", "_");
    limit_to(pid, Resource::Nofile, usual);
    eventually(PATIENCE, "new clients are served", || {
        is_served(&mut daemon.connect())
    });
}
