//! Clients that do what they can to be a nuisance: no other client waits for them, and nothing of
//! what they leave behind stays.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{flock, FlockOperation};
use rustix::net::{send, SendFlags};

use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::barrier::Barrier;
use crate::support::footprint::status_kib;
use crate::support::limited::{limited, raise_our_own_limit};
use crate::support::needs::needs;
use crate::support::silent::{leave_socket, FullBacklog};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{
    come_to_rest, eventually, parse_grant, processor_time, program, waiter_count, Client, Daemon,
    Deadline, Signal, PATIENCE,
};

/// What a server takes of a second in which it has nothing to do, at most.
const AT_REST: Duration = Duration::from_millis(90);

// ---- those that do not read ------------------------------------------------------------------

#[test]
fn a_try_whose_client_does_not_read_keeps_no_place_in_the_queue() {
    fair_test(|| {
        let daemon = Daemon::start(&["--write-timeout", "5"]);
        let (mut holder, mut monitor) = (daemon.connect(), daemon.connect());
        let grant = holder.acquire_for("k", 0, 60);
        let deaf = daemon.connect();
        let mut writer = deaf.writer();
        let tries = thread::spawn(move || {
            // Ends when the daemon has had enough of it.
            let request = "l\nk\n0\n".repeat(1000);
            while writer.write_all(request.as_bytes()).is_ok() {}
        });
        for _ in 0..100 {
            assert_eq!(waiter_count(&monitor.stats(), "k"), 0, "a try is no waiter");
            thread::sleep(Duration::from_millis(5));
        }
        let mut next = daemon.connect();
        next.send("l\nk\n20\n");
        daemon.wait_for_waiters("k", 1);
        let released = Instant::now();
        assert_eq!(holder.request("r", "k", &grant.token), "ok");
        assert!(parse_grant(&next.line(), "ok").is_some());
        let waited = released.elapsed();
        in_time!(
            waited < Duration::from_secs(2),
            "{waited:?} until the grant"
        );
        deaf.reset();
        drop(daemon);
        let _ = tries.join();
    });
}

/// The clients send ever more pings before they ask, so that for one of them there is just no room
/// for the last replies when its turn to wait comes.
#[test]
fn a_client_with_unsent_replies_takes_no_place() {
    const CLIENTS: usize = 30;
    const PINGS_IN_A_READ: usize = 455;
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("socket");
    let daemon = Daemon::start_unix(&path, &["--write-timeout", "2"]);
    let mut holder = Client::unix(&path);
    let requests: Vec<String> = (0..CLIENTS)
        .map(|number| {
            holder.acquire_for(&format!("k{number}"), 0, 600);
            let pings = "ping\n_\n_\n".repeat(number * PINGS_IN_A_READ + 200);
            format!("{pings}l\nk{number}\n60\n")
        })
        .collect();
    let mut waiting = || -> BTreeSet<usize> {
        let stats = holder.stats();
        let waits = |number: &usize| waiter_count(&stats, &format!("k{number}")) > 0;
        (0..CLIENTS).filter(waits).collect()
    };
    thread::scope(|scope| {
        let send = |text: String| {
            let path = &path;
            scope.spawn(move || {
                let mut stream = UnixStream::connect(path).expect("it listens");
                let patience = Some(PATIENCE);
                stream.set_write_timeout(patience).expect("it is not zero");
                // A client whose socket stays full is dropped before it has sent all.
                let has_sent = stream.write_all(text.as_bytes()).is_ok();
                (stream, has_sent)
            })
        };
        let senders: Vec<_> = requests.into_iter().map(send).collect();
        let mut had_a_place = BTreeSet::new();
        let mut look = || {
            let waiting = waiting();
            had_a_place.extend(&waiting);
            assert_eq!(
                had_a_place, waiting,
                "one with a place was dropped for not reading"
            );
        };
        while !senders.iter().all(|sender| sender.is_finished()) {
            look();
            thread::sleep(Duration::from_millis(20));
        }
        let sent = senders.into_iter().map(|sender| sender.join().unwrap());
        let deaf: Vec<(UnixStream, bool)> = sent.collect();
        // Longer than the write timeout of the last of them.
        let deadline = Deadline::after(Duration::from_millis(2800));
        while !deadline.is_over() {
            look();
            thread::sleep(Duration::from_millis(100));
        }
        println!("{had_a_place:?} have a place");
        assert!(
            !had_a_place.is_empty() && had_a_place.len() < CLIENTS,
            "the sockets were never full, or always"
        );
        drop(deaf);
    });
    drop(daemon);
}

#[test]
fn reading_a_little_does_not_stretch_the_write_timeout() {
    fair_test(|| {
        let directory = tempfile::tempdir().expect("there is room");
        let path = directory.path().join("socket");
        let path_text = path.to_str().expect("a temporary path is UTF-8");
        let daemon = Daemon::start(&[
            "--write-timeout",
            "1",
            "--unix",
            path_text,
            "--max-per-connection",
            "1024",
        ]);
        let mut holder = daemon.connect();
        let request: String = (0..1024)
            .map(|number| format!("l\n{number:0>250}\n0 60\n"))
            .collect();
        holder.send(&request);
        for _ in 0..1024 {
            assert!(parse_grant(&holder.line(), "ok").is_some());
        }
        let mut slow = [daemon.connect(), Client::unix(&path)];
        for client in &mut slow {
            assert_eq!(client.request("ping", "_", "_"), "ok"); // they count as connected
        }
        let began = Instant::now();
        let asking = slow.each_ref().map(|client| {
            let mut writer = client.writer();
            // More than all buffers on the way hold, however big they are.
            thread::spawn(move || while writer.write_all(b"stats\n_\n_\n").is_ok() {})
        });
        loop {
            for client in &mut slow {
                client.next_bytes(1024, Duration::from_millis(1));
            }
            if holder.stats()["connections"] == 1 {
                break;
            }
            in_time!(
                began.elapsed() < Duration::from_secs(3),
                "a slow reader is still connected"
            );
            thread::sleep(Duration::from_millis(100));
        }
        assert!(
            began.elapsed() > Duration::from_millis(900),
            "it had its time"
        );
        asking.into_iter().for_each(|asking| asking.join().unwrap());
    });
}

#[test]
fn unread_statistics_keep_nobody_from_theirs_and_no_lock() {
    fair_test(|| {
        // Those that do not read stay in the way for ever, and the keys are not forgotten.
        let daemon = Daemon::start(&[
            "--max-locks",
            "5000",
            "--write-timeout",
            "0",
            "--gc-max-idle",
            "600",
        ]);
        remember_keys(&daemon, 4000);
        let mut deaf: Vec<Client> = (0..64).map(|_| daemon.connect()).collect();
        deaf.iter_mut()
            .for_each(|client| client.send(&"stats\n_\n_\n".repeat(8)));
        let mut holder = daemon.connect();
        holder.acquire_for("held", 0, 600);
        let mut waiter = daemon.connect();
        waiter.send("l\nheld\n60\n");
        daemon.wait_for_waiters("held", 1);

        holder.send("stats\n_\n_\n");
        thread::sleep(Duration::from_millis(300));
        let left = Instant::now();
        // What it has not read makes the close a reset, which is no word without the end before it.
        holder.half_close();
        drop(holder);
        assert!(parse_grant(&waiter.line(), "ok").is_some());
        let waited = left.elapsed();
        in_time!(waited < Duration::from_secs(1), "{waited:?} for the lock");
        let asked = Instant::now();
        let idle = daemon.stats()["idle_locks"].as_array().map(Vec::len);
        assert_eq!(idle, Some(4000));
        let waited = asked.elapsed();
        in_time!(waited < PATIENCE, "{waited:?} for statistics");
        drop(deaf);
    });
}

/// A page that is not read keeps the keys in it alive when the table has long forgotten them.
///
/// Each reader stops in a page whose keys only it keeps: there are ten pages of keys, more than the
/// sockets take, and none of them is left when the next reader asks. The heap is measured alone,
/// and in one arena: the stacks differ from build to build, and what several arenas take depends on
/// how busy the machine is.
#[test]
fn unread_statistics_of_forgotten_keys_take_no_more() {
    const READERS: usize = 40;
    const KEYS: usize = 480;
    let mut command = Daemon::command();
    command.env("MALLOC_ARENA_MAX", "1");
    command.args(["--port", "0", "--print-port", "--write-timeout", "0"]);
    // Nearly every new key takes the room of one that is not in use.
    command.args(["--max-locks", "482", "--max-per-connection", "482"]);
    let daemon = Daemon::from_command(command);
    let mut holder = daemon.connect();
    let mut tokens: Vec<(String, String)> = Vec::new();
    let mut take_others = |round: usize| {
        for (key, token) in tokens.drain(..) {
            assert_eq!(holder.request("r", &key, &token), "ok");
        }
        tokens.extend((0..KEYS).map(|number| {
            // Long in the reply, too.
            let key = format!("{}{round:0>4}{number:0>4}", "\x01".repeat(240));
            let token = holder.acquire_for(&key, 0, 600).token;
            (key, token)
        }));
    };
    take_others(0);
    take_others(1);
    let before = heap_kib(daemon.pid());
    let mut deaf = Vec::new();
    for round in 0..READERS {
        take_others(round + 2);
        let mut client = daemon.connect();
        client.send("stats\n_\n_\n");
        let has_begun = !client.next_bytes(1, PATIENCE).is_empty();
        assert!(has_begun, "round {round}: {}", daemon.log());
        eventually(PATIENCE, "its sockets are full", || {
            threads(daemon.pid()).all(|task| is_asleep(&task))
        });
        deaf.push(client);
    }
    let each = heap_kib(daemon.pid()).saturating_sub(before) / READERS as u64;
    println!("{each} KiB each");
    assert!(each < 60, "{each} KiB each");
}

#[test]
fn a_slow_reader_of_long_statistics_is_not_cut_off() {
    fair_test(|| {
        let options = "--max-locks 12000 --write-timeout 1 --gc-max-idle 600 --read-timeout 3600";
        let daemon = Daemon::start(&options.split(' ').collect::<Vec<_>>());
        remember_keys(&daemon, 12_000);
        let mut slow = daemon.connect();
        slow.send("stats\n_\n_\n");
        let began = Instant::now();
        let mut reply = Vec::new();
        while reply.last() != Some(&b'\n') {
            let mut piece = slow.next_bytes(1, PATIENCE);
            // The last piece is shorter.
            piece.extend(slow.next_bytes(99_999, Duration::from_millis(100)));
            assert!(
                !piece.is_empty(),
                "cut off after {} bytes and {:?}",
                reply.len(),
                began.elapsed()
            );
            reply.extend(piece);
            // Thirty pieces and more: this alone takes three seconds.
            thread::sleep(Duration::from_millis(100));
        }
        println!("{} bytes in {:?}", reply.len(), began.elapsed());
        assert!(
            began.elapsed() > Duration::from_secs(2),
            "that was not slow"
        );
        let json = reply.strip_prefix(b"ok ").expect("statistics");
        let stats: serde_json::Value = serde_json::from_slice(json).expect("JSON");
        let keys = stats["idle_locks"].as_array().expect("a list");
        assert_eq!(keys.len(), 12_000);
        assert!(keys.is_sorted_by_key(|entry| entry["key"].as_str()));
    });
}

/// What the kernel accepts after the time is over must not begin it anew.
#[test]
fn a_client_that_never_reads_is_dropped_after_the_write_timeout() {
    fair_test(|| {
        for round in 0..amount(1, 3) {
            let daemon = Daemon::start(&["--write-timeout", "2"]);
            let mut holder = daemon.connect();
            (0..100).for_each(|number| {
                holder.acquire_for(&format!("{number}{}", "k".repeat(200)), 0, 60);
            });
            let mut deaf = daemon.connect();
            let began = Instant::now();
            // Ends when the server has closed the connection, or has dropped it.
            while deaf
                .try_send(&"stats\n_\n_\n".repeat(1000).into_bytes())
                .is_ok()
            {
                in_time!(began.elapsed() < PATIENCE, "it is still connected");
            }
            let took = began.elapsed();
            println!("round {round}: dropped after {took:?}");
            assert!(took > Duration::from_millis(1900), "{took:?}: too early");
            in_time!(took < Duration::from_millis(3500), "{took:?}: too late");
        }
    });
}

#[test]
fn a_second_signal_ends_the_farewell_to_a_silent_peer() {
    fair_test(|| {
        let daemon = Daemon::start_alone(&["--write-timeout", "60"]);
        let deaf = daemon.connect();
        let mut writer = deaf.writer();
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let pings = thread::spawn(move || {
            let request = "ping\n_\n_\n".repeat(1000);
            while writer.write_all(request.as_bytes()).is_ok() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        eventually(PATIENCE, "the socket is full", || {
            let before = (sent.load(Ordering::Relaxed), processor_time(daemon.pid()));
            // A busy machine lets a process wait for half a second that has something to do.
            thread::sleep(Duration::from_secs(2));
            before == (sent.load(Ordering::Relaxed), processor_time(daemon.pid()))
        });
        let began = Instant::now();
        daemon.signal(Signal::TERM);
        // Before that, the second signal would be one with the first.
        daemon.wait_for_log("draining", PATIENCE);
        daemon.signal(Signal::TERM);
        let signalled = began.elapsed();
        let status = daemon.wait_exit(PATIENCE).expect("it ends");
        // The farewell takes most of a second; on a busy machine it may be over first.
        let was_in_time = signalled < Duration::from_millis(500);
        assert!(
            status.code() == Some(1) || (!was_in_time && status.code() == Some(0)),
            "{status} after {signalled:?}"
        );
        drop(deaf);
        let _ = pings.join();
    });
}

// ---- those that ask and ask ------------------------------------------------------------------

#[test]
fn tries_never_take_the_last_place_of_a_queue() {
    let daemon = Daemon::start(&["--max-waiters", "1"]);
    let mut holder = daemon.connect();
    holder.acquire_for("k", 0, 60);
    let stop = AtomicBool::new(false);
    let replies: Vec<String> = thread::scope(|scope| {
        let _end = AtTheEnd(&stop);
        for _ in 0..3 {
            let (stop, mut client) = (&stop, daemon.connect());
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let reply = client.request("l", "k", "0");
                    assert!(
                        matches!(reply.as_str(), "timeout" | "error_max_waiters"),
                        "{reply}"
                    );
                }
            });
        }
        let mut client = daemon.connect();
        let ask = |_| {
            let reply = client.request("e", "k", "");
            client.request("w", "k", "0"); // gives up the place
            reply
        };
        let replies = (0..3000).map(ask).collect();
        stop.store(true, Ordering::Relaxed);
        replies
    });
    for (round, reply) in replies.iter().enumerate() {
        assert_eq!(reply, "queued", "in round {round}");
    }
}

#[test]
fn dead_phase_one_entries_are_forgotten() {
    const KEYS: usize = 3000;
    let daemon = Daemon::start(&["--gc-max-idle", "0", "--gc-interval", "1"]);
    let mut other = daemon.connect();
    let mut cycle = |client: &mut Client, keys: &[String]| {
        let claim = |key| format!("e\n{key}\n\n");
        client.send(&keys.iter().map(claim).collect::<String>());
        let release = |key| {
            let reply = client.line();
            let grant = parse_grant(&reply, "acquired").unwrap_or_else(|| panic!("{key}: {reply}"));
            format!("r\n{key}\n{}\n", grant.token)
        };
        other.send(&keys.iter().map(release).collect::<String>());
        keys.iter().for_each(|_| other.expect("ok"));
    };
    let key = |number: usize| format!("{number:0>250}");
    let keys: Vec<String> = (0..KEYS).map(key).collect();
    // What each connection and the table need anyway.
    let warming = |number: usize| format!("warm{number:0>240}");
    let warming: Vec<String> = (0..1500).map(warming).collect();
    let mut warm = daemon.connect();
    warming.chunks(100).for_each(|some| cycle(&mut warm, some));
    // It would idle for too long where a journal is slow.
    let mut client = daemon.connect();
    let before = resident_kib(daemon.pid());
    keys.chunks(100).for_each(|some| cycle(&mut client, some));
    let grown = resident_kib(daemon.pid()).saturating_sub(before);
    println!("grew by {grown} KiB");
    assert!(grown < 3 * 1024, "grew by {grown} KiB");
    assert_eq!(client.request("w", &key(0), "0"), "error_not_enqueued");
    let last = key(KEYS - 1);
    assert_eq!(client.request("w", &last, "0"), "error_lease_expired");
}

/// The settings of the C library in the service file, for which glibc returns free memory.
fn allocator_settings() -> Vec<(&'static str, &'static str)> {
    let unit = include_str!("../../examples/latchd.service");
    let settings = unit.lines().filter_map(|line| {
        let (name, value) = line.strip_prefix("Environment=")?.split_once('=')?;
        (name.starts_with("MALLOC_") || name == "GLIBC_TUNABLES").then_some((name, value))
    });
    settings.collect()
}

#[test]
fn the_memory_of_a_crowd_goes_back_when_it_leaves() {
    const CLIENTS: usize = 256;
    const PLACES: usize = 250;
    raise_our_own_limit();
    let settings = allocator_settings();
    assert_eq!(settings.len(), 2, "{settings:?}");
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]).envs(settings);
    let daemon = Daemon::from_command(command);
    let before = resident_kib(daemon.pid());
    let mut holder = daemon.connect();
    for key in 0..PLACES {
        holder.acquire_for(&format!("k{key}"), 0, 600);
    }
    let places: String = (0..PLACES).map(|key| format!("e\nk{key}\n\n")).collect();
    for round in 0..2 {
        let mut crowd: Vec<Client> = (0..CLIENTS).map(|_| daemon.connect()).collect();
        crowd.iter_mut().for_each(|client| client.send(&places));
        for client in &mut crowd {
            (0..PLACES).for_each(|_| client.expect("queued"));
        }
        println!("round {round}: {} KiB", resident_kib(daemon.pid()));
        drop(crowd);
        // The places of two crowds would be more than --max-waiters-total.
        daemon.wait_for_waiters("k0", 0);
    }
    let is_back = || resident_kib(daemon.pid()) < before + 10 * 1024;
    eventually(PATIENCE, "the memory went back", is_back);
}

#[test]
fn a_token_line_takes_no_more_memory_than_the_secret_needs() {
    const CLIENTS: usize = 100;
    for secret in [None, Some("s3cret")] {
        let mut command = Daemon::command();
        command.args(["--port", "0", "--print-port"]);
        if let Some(secret) = secret {
            command.env("LATCHD_AUTH_TOKEN", secret);
        }
        let daemon = Daemon::from_command(command);
        let before = resident_kib(daemon.pid());
        let mut crowd: Vec<Client> = (0..CLIENTS).map(|_| daemon.connect()).collect();
        let half = format!("auth\n_\n{}", "x".repeat(65_000));
        crowd.iter_mut().for_each(|client| client.send(&half));
        // Then all of it has been read.
        come_to_rest(&[daemon.pid()], AT_REST);
        let each = resident_kib(daemon.pid()).saturating_sub(before) / CLIENTS as u64;
        println!("{each} KiB each, secret {secret:?}");
        assert!(each < 40, "{each} KiB each, secret {secret:?}");
        crowd.iter_mut().for_each(|client| client.send("\n"));
        for mut client in crowd {
            client.expect(secret.map_or("error", |_| "error_auth"));
            client.expect_eof();
        }
    }
}

/// With a full window, the end of the stream cannot reach the server.
#[test]
fn a_client_that_floods_behind_its_wait_loses_its_place() {
    const CLIENTS: usize = 10;
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 600);
    let flooding: Vec<TcpStream> = (0..CLIENTS)
        .map(|_| {
            let mut stream = TcpStream::connect(daemon.addr()).expect("it listens");
            stream.write_all(b"l\nk\n600\n").expect("it is connected");
            flood(&mut stream);
            stream
        })
        .collect();
    let left = Instant::now();
    drop(flooding);
    daemon.wait_for_waiters("k", 0);
    println!("noticed after {:?}", left.elapsed());

    // One that sends its flood only later.
    let mut late = TcpStream::connect(daemon.addr()).expect("it listens");
    late.write_all(b"l\nk\n600\n").expect("it is connected");
    daemon.wait_for_waiters("k", 1);
    thread::sleep(Duration::from_secs(2));
    assert_eq!(waiter_count(&holder.stats(), "k"), 1);
    flood(&mut late);
    daemon.wait_for_waiters("k", 0);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
}

/// Unless it is read in its place, the kernel reports no bytes behind one that is urgent.
#[test]
fn an_urgent_byte_hides_no_flood() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 600);
    let mut waiter = TcpStream::connect(daemon.addr()).expect("it listens");
    waiter.write_all(b"l\nk\n600\n").expect("it is connected");
    daemon.wait_for_waiters("k", 1);
    send_urgently(&waiter, b"x");
    flood(&mut waiter);
    daemon.wait_for_waiters("k", 0);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
}

/// A telnet sends this after a Ctrl-C, for example: IAC DM, and the DM is urgent.
#[test]
fn a_telnet_synch_damages_no_request() {
    let daemon = Daemon::start(&[]);
    let mut client = daemon.connect();
    for _ in 0..3 {
        client.send_bytes(b"\xff");
        send_urgently(&client, b"\xf2");
        assert_eq!(client.request("ping", "_", "_"), "ok");
        send_urgently(&client, b"\xff\xf2");
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
}

#[test]
fn requests_behind_a_long_wait_are_answered() {
    const PINGS: usize = 2000;
    let daemon = Daemon::start(&[]);
    let (mut holder, mut waiter) = (daemon.connect(), daemon.connect());
    let grant = holder.acquire_for("k", 0, 600);
    waiter.send("l\nk\n600\n");
    waiter.send(&"ping\n_\n_\n".repeat(PINGS));
    daemon.wait_for_waiters("k", 1);
    thread::sleep(Duration::from_secs(2));
    waiter.send("ping\n_\n_\n");
    thread::sleep(Duration::from_millis(200));
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    let granted = parse_grant(&waiter.line(), "ok").expect("its turn");
    for _ in 0..PINGS + 1 {
        waiter.expect("ok");
    }
    // Once it waits no more, it may send as much as it likes.
    let mut writer = waiter.writer();
    let pings = "ping\n_\n_\n".repeat(20_000);
    let sending = thread::spawn(move || writer.write_all(pings.as_bytes()));
    for _ in 0..20_000 {
        waiter.expect("ok");
    }
    sending.join().unwrap().expect("all of it is read");
    assert_eq!(waiter.request("r", "k", &granted.token), "ok");
}

#[test]
fn a_close_that_frees_very_many_slots_holds_up_nobody() {
    fair_test(|| {
        const SLOTS: usize = 100_000;
        let daemon = Daemon::start(&["--max-slots", "100000", "--max-per-connection", "100000"]);
        let mut greedy = daemon.connect();
        let mut writer = greedy.writer();
        let asking = thread::spawn(move || {
            // The first lease must last until the last slot is held.
            let request = "sl\nk\n0 1048576 600\n".repeat(1000);
            for _ in 0..SLOTS / 1000 {
                writer
                    .write_all(request.as_bytes())
                    .expect("it is being read");
            }
        });
        let reply_len = "ok 0123456789abcdef0123456789abcdef 600\n".len();
        for _ in 0..SLOTS / 1000 {
            let replies = greedy.next_bytes(1000 * reply_len, PATIENCE);
            assert_eq!(replies.len(), 1000 * reply_len);
        }
        asking.join().expect("everything was asked");

        let (mut witness, mut monitor) = (daemon.connect(), daemon.connect());
        let holders = |stats: &serde_json::Value| stats["semaphores"][0]["holders"].as_u64();
        assert_eq!(holders(&monitor.stats()), Some(SLOTS as u64));
        drop(greedy);
        let mut longest = Duration::ZERO;
        eventually(6 * PATIENCE, "all slots are free", || {
            let asked = Instant::now();
            assert_eq!(witness.request("ping", "_", "_"), "ok");
            longest = longest.max(asked.elapsed());
            holders(&monitor.stats()).is_none()
        });
        println!("the longest ping took {longest:?}");
        in_time!(
            longest < Duration::from_millis(500),
            "a ping took {longest:?}"
        );
    });
}

// ---- those that come in crowds, and those that say nothing -----------------------------------

#[test]
fn max_connections_raises_the_limit_of_descriptors() {
    raise_our_own_limit();
    let mut command = limited(&["prlimit", "--nofile=100:4000"]);
    command.args(["--max-connections", "500"]);
    let daemon = Daemon::from_command(command);
    let mut crowd: Vec<Client> = (0..300).map(|_| daemon.connect()).collect();
    for client in &mut crowd {
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
}

#[test]
fn after_a_crowd_has_left_few_threads_remain() {
    fair_test(|| {
        raise_our_own_limit();
        let daemon = Daemon::start(&["--max-connections", "500", "--read-timeout", "3600"]);
        let mut crowd: Vec<Client> = (0..200).map(|_| daemon.connect()).collect();
        for client in &mut crowd {
            assert_eq!(client.request("ping", "_", "_"), "ok");
        }
        assert!(session_threads(daemon.pid()) >= 200);
        drop(crowd);
        let left_at = Instant::now();
        eventually(PATIENCE, "at most 16 threads remain", || {
            session_threads(daemon.pid()) <= 16
        });
        // The others wait for ten seconds for another client.
        in_time!(left_at.elapsed() < Duration::from_secs(5));
        let mut client = daemon.connect();
        assert_eq!(client.request("ping", "_", "_"), "ok");
    });
}

// ---- those that want the same socket ---------------------------------------------------------

#[test]
fn a_server_that_ends_leaves_the_socket_of_its_successor_alone() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("socket");
    let first = Daemon::start_unix(&path, &[]);
    fs::remove_file(&path).expect("it is there");
    let _second = Daemon::start_unix(&path, &[]);
    first.signal(Signal::TERM);
    let status = first.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0));
    assert_eq!(Client::unix(&path).request("ping", "_", "_"), "ok");
}

#[test]
fn a_live_server_with_a_full_backlog_is_not_replaced() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("socket");
    let busy = FullBacklog::at(&path);
    let late = start_on(&path);
    let status = late.wait_exit(PATIENCE);
    let status = status.expect("it does not wait for room in the backlog");
    assert_eq!(status.code(), Some(1), "{}", late.log());
    assert!(late.log().contains("in use"), "{}", late.log());
    busy.listener
        .accept()
        .expect("the path still leads to the first server");
    UnixStream::connect(&path).expect("the path still leads to the first server");
}

#[test]
fn a_server_starts_on_a_socket_whose_directory_is_locked() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("socket");
    let handle = fs::File::open(directory.path()).expect("it is there");
    flock(&handle, FlockOperation::LockExclusive).expect("nobody else has it");
    leave_socket(&path);
    let daemon = Daemon::start_unix(&path, &[]);
    let line = format!("cannot-lock-directory socket={}\n", path.display());
    daemon.wait_for_log(&line, PATIENCE);
}

#[test]
fn a_server_starts_on_a_socket_in_an_unreadable_directory() {
    needs!(root);
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("socket");
    let unreadable = fs::Permissions::from_mode(0o333);
    fs::set_permissions(directory.path(), unreadable).expect("it is ours");
    leave_socket(&path);
    let mut command = Daemon::command_of("setpriv");
    // Without these, root reads no more than other users do.
    command.arg("--bounding-set=-dac_override,-dac_read_search");
    command.args([program("latchd"), "--port=off", "--unix"]);
    command.arg(&path);
    let _daemon = Daemon::from_command(command);
    eventually(PATIENCE, "the socket answers", || {
        UnixStream::connect(&path).is_ok()
    });
}

#[test]
fn of_many_that_start_on_a_dead_servers_socket_one_listens() {
    // Too few for a race that is rarely lost: CI has the hundred.
    for round in 0..amount(20, 100) {
        let directory = tempfile::tempdir().expect("there is room");
        let path = directory.path().join("socket");
        leave_socket(&path);
        let start = Barrier::new(4);
        let servers: Vec<Daemon> = thread::scope(|scope| {
            let one = |_| {
                scope.spawn(|| {
                    start.wait();
                    start_on(&path)
                })
            };
            let threads: Vec<_> = (0..4).map(one).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("it starts"))
                .collect()
        });
        let ended = |server: &&Daemon| server.wait_exit(Duration::ZERO).is_some();
        eventually(PATIENCE, "all but one have given up", || {
            servers.iter().filter(ended).count() >= 3
        });
        eventually(PATIENCE, "one listens", || {
            UnixStream::connect(&path).is_ok()
        });
        assert_eq!(Client::unix(&path).request("ping", "_", "_"), "ok");
        let statuses: Vec<_> = servers
            .iter()
            .filter_map(|server| server.wait_exit(Duration::ZERO))
            .collect();
        assert_eq!(statuses.len(), 3, "in round {round}");
        for status in statuses {
            assert_eq!(status.code(), Some(1), "in round {round}");
        }
    }
}

// ---- helpers ---------------------------------------------------------------------------------

/// Sends bytes, of which the last one is urgent.
fn send_urgently(socket: &impl AsFd, bytes: &[u8]) {
    let sent = send(socket, bytes, SendFlags::OOB);
    assert_eq!(sent, Ok(bytes.len()));
}

/// Sends pings until the window is full, or the server hangs up.
fn flood(stream: &mut TcpStream) {
    let pings = "ping\n_\n_\n".repeat(1000);
    let patience = Some(Duration::from_millis(50));
    stream.set_write_timeout(patience).expect("it is not zero");
    while stream.write_all(pings.as_bytes()).is_ok() {}
}

/// A daemon that may find that it cannot have `path`.
fn start_on(path: &Path) -> Daemon {
    let mut command = Daemon::command();
    command.args(["--port", "off", "--unix"]).arg(path);
    Daemon::from_command(command)
}

/// Has the server know `count` keys of 250 bytes, all of them idle.
fn remember_keys(daemon: &Daemon, count: usize) {
    const AT_A_TIME: usize = 200;
    for first in (0..count).step_by(AT_A_TIME) {
        let mut client = daemon.connect();
        let asked = first..count.min(first + AT_A_TIME);
        let request = |number| format!("l\n{number:0>250}\n0 600\n");
        client.send(&asked.clone().map(request).collect::<String>());
        for _ in asked {
            assert!(parse_grant(&client.line(), "ok").is_some());
        }
    }
    eventually(PATIENCE, "all keys are idle", || {
        let counters = daemon.connect().request("stats", "counters", "_");
        counters.contains("\"holders\":0,")
    });
}

/// How many threads of the process serve connections or wait for one.
fn session_threads(pid: u32) -> usize {
    threads(pid)
        .filter(|task| {
            // One that ends while we look is none.
            fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "session")
        })
        .count()
}

/// The directories of the threads of the process.
fn threads(pid: u32) -> impl Iterator<Item = PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there");
    tasks.flatten().map(|task| task.path())
}

/// Whether a thread waits for something, and not for the processor. The field behind its name.
fn is_asleep(task: &Path) -> bool {
    let stat = fs::read_to_string(task.join("stat"));
    stat.is_ok_and(|stat| stat.contains(") S "))
}

/// What the first arena of the process has in memory.
fn heap_kib(pid: u32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process is there");
    let (_, heap) = maps.split_once("[heap]").expect("it has allocated");
    let resident = heap.lines().find_map(|line| line.strip_prefix("Rss:"));
    let resident = resident.and_then(|it| it.trim().strip_suffix(" kB"));
    resident.and_then(|it| it.parse().ok()).expect("a number")
}

/// What the process has in memory.
fn resident_kib(pid: u32) -> u64 {
    status_kib(pid, "VmRSS:")
}
