//! What a small machine refuses is no disaster: whoever is served stays served, the rest is
//! refused, and afterwards all is as it was. And no lease cares for what is done to the wall clock.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::amount::amount;
use crate::support::clock::{clear_up_after, with_a_clock_of_its_own};
use crate::support::footprint::{status_kib, worst_case_mb, Footprint};
use crate::support::limited::{is_served, limit_to, limited, raise_our_own_limit, with_processes};
use crate::support::needs::{needs, skipped, Program};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{
    come_to_rest, eventually, parse_grant, Client, Daemon, Event, Signal, PATIENCE,
};
use rustix::process::Resource;

// ---- storms ----------------------------------------------------------------------------------

#[test]
fn after_five_thousand_connects_a_capped_server_recovers() {
    fair_test(|| {
        let daemon = Daemon::start(&["--max-connections", "100"]);
        let storm = weather(&daemon, 5000);
        assert!(storm.served >= 95, "places were free: {storm:?}");
        assert!(storm.refused > 0, "the cap was never reached: {storm:?}");
    });
}

#[test]
fn after_a_storm_a_server_with_few_descriptors_or_little_memory_is_as_it_was() {
    fair_test(|| {
        // The memory has room for a hundred stacks or so.
        for limit in ["--nofile=64", "--as=67108864"] {
            let daemon = Daemon::from_command(limited(&["prlimit", limit]));
            let storm = weather(&daemon, 2000);
            assert!(storm.served > 0 && storm.refused > 0, "{limit}: {storm:?}");
        }
    });
}

#[test]
fn after_a_storm_a_server_with_few_threads_is_as_it_was() {
    fair_test(|| {
        let Some((_program, daemon)) = with_processes(20) else {
            return;
        };
        let storm = weather(&daemon, 2000);
        assert!(storm.served > 0 && storm.refused > 0, "{storm:?}");
    });
}

#[test]
fn without_proc_a_limited_server_serves() {
    let hide = "mount -t tmpfs none /proc && exec \"$@\"";
    let wrapper = [
        "unshare",
        "-m",
        "sh",
        "-c",
        hide,
        "sh",
        "prlimit",
        "--as=4000000000",
    ];
    needs!(admin);
    let daemon = Daemon::from_command(limited(&wrapper));
    assert!(is_served(&mut daemon.connect()));
}

/// Those who are served may need more memory than they did so far, when there is none left. Without
/// the setting that the manual gives for a limited address space, the C library takes it in pieces
/// of 64 MB where it can, so more is not simply better.
#[test]
fn out_of_memory_the_server_serves_the_clients_it_has() {
    raise_our_own_limit();
    let mut reached_count = 0;
    for megabytes in [40, 64, 100, 200, 300, 400] {
        let limit = format!("--as={}", megabytes << 20);
        let mut command = limited(&["prlimit", &limit]);
        command.env("MALLOC_ARENA_MAX", "1");
        let daemon = Daemon::from_command(command);
        let mut crowd: Vec<Client> = (0..450).map(|_| daemon.connect()).collect();
        crowd.retain_mut(is_served);
        println!("{} served within {megabytes} MB", crowd.len());
        assert!(crowd.len() >= 16, "{}", crowd.len());
        reached_count += u32::from(crowd.len() < 450);
        for round in 0..3 {
            for (number, client) in crowd.iter_mut().enumerate() {
                let key = format!("{round}-{number:0200}");
                client.send(&format!("l\n{key}\n0\n"));
                let Event::Line(reply) = client.next_event(PATIENCE) else {
                    panic!("{megabytes} MB were too little: {}", daemon.log());
                };
                // More keys than there may be are refused; that is another limit.
                let reply = String::from_utf8(reply).expect("replies are ASCII");
                let is_grant = parse_grant(&reply, "ok").is_some();
                assert!(is_grant || reply == "error_max_locks", "{reply}");
            }
        }
        assert!(crowd.iter_mut().all(is_served));
        assert!(daemon.wait_exit(Duration::ZERO).is_none());
    }
    // How much a thread takes depends on the C library.
    assert!(reached_count >= 3, "most limits were never reached");
}

/// The room that is left is too little for any thread, for some of them, for all but their signal
/// stacks, and so on.
#[test]
fn a_limit_imposed_late_lets_no_client_end_the_server() {
    raise_our_own_limit();
    for resource in [Resource::As, Resource::Data] {
        let mut reached_count = 0;
        for left in [4, 7, 20, 33, 36, 40, 60] {
            let daemon = Daemon::start(&["--read-timeout", "3600"]);
            let mut early: Vec<Client> = (0..8).map(|_| daemon.connect()).collect();
            assert!(early.iter_mut().all(is_served));
            let name = match resource {
                Resource::As => "VmSize:",
                _ => "VmData:",
            };
            let limit = (status_kib(daemon.pid(), name) << 10) + (left << 20);
            limit_to(daemon.pid(), resource, Some(limit));

            let mut crowd: Vec<Client> = (0..200).map(|_| daemon.connect()).collect();
            crowd.retain_mut(is_served);
            println!("{} more within {left} MB of {name}", crowd.len());
            let ended = daemon.wait_exit(Duration::ZERO);
            assert!(ended.is_none(), "{left} MB: {}", daemon.log());
            if crowd.len() < 200 {
                reached_count += 1;
                daemon.wait_for_log("turned-away reason=no-thread", PATIENCE);
            }
            for (number, client) in crowd.iter_mut().chain(&mut early).enumerate() {
                client.acquire(&format!("{number:0>250}"), 0);
                // Refused where there is too little for a page of them.
                let listed = client.request("stats", "_", "_");
                assert!(listed.starts_with("ok {") || listed == "error", "{listed}");
            }
            drop(crowd);
            limit_to(daemon.pid(), resource, None);
            eventually(PATIENCE, "new clients are served again", || {
                is_served(&mut daemon.connect())
            });
        }
        // How much a thread takes depends on the C library.
        assert!(reached_count >= 4, "most limits were never reached");
    }
}

#[test]
fn unread_lists_under_a_late_limit_end_no_server() {
    const KEYS: usize = 1000;
    raise_our_own_limit();
    let options = "--max-per-connection 1000 --write-timeout 60";
    let daemon = Daemon::start(&options.split(' ').collect::<Vec<_>>());
    let mut holder = daemon.connect();
    assert_eq!(holder.request("tag", "_", &"t".repeat(128)), "ok");
    for number in 0..KEYS {
        holder.acquire_for(&format!("key-{number}"), 0, 3600);
    }
    let mut crowd: Vec<Client> = (0..400).map(|_| daemon.connect()).collect();
    eventually(PATIENCE, "they are all there", || {
        holder.stats()["connections"] == 401
    });
    let limit = (status_kib(daemon.pid(), "VmData:") << 10) + (20 << 20);
    limit_to(daemon.pid(), Resource::Data, Some(limit));
    for client in &mut crowd {
        client.send(&"stats\nholders\n_\n".repeat(100));
    }
    let ended = daemon.wait_exit(Duration::from_secs(2));
    assert!(ended.is_none(), "{}", daemon.log());
    assert_eq!(holder.request("ping", "_", "_"), "ok");
}

/// The table at its default caps takes more than these limits leave.
#[test]
fn clients_that_fill_the_table_under_a_limit_end_no_server() {
    const CLAIMS: usize = 8000;
    let data = [24, 32, 40].map(|limit| (Resource::Data, limit));
    // The least of memory, and the other kind of limit, are what the usual run tries.
    let usual = [data[0], (Resource::As, 450)];
    let full = [&usual[..], &data[1..]].concat();
    for (resource, limit) in amount(usual.to_vec(), full) {
        // On a slow machine, some clients are idle for long before it is their turn.
        let options = "--max-per-connection 8000 --read-timeout 3600";
        let daemon = Daemon::start(&options.split(' ').collect::<Vec<_>>());
        limit_to(daemon.pid(), resource, Some(limit << 20));
        let mut crowd: Vec<Client> = (0..32).map(|_| daemon.connect()).collect();
        crowd.retain_mut(is_served);
        println!("{} clients within {limit} MB of {resource:?}", crowd.len());
        let mut refused_count = 0;
        for (number, client) in crowd.iter_mut().enumerate() {
            let slot = |_| "sl\nslots\n0 1048576 9223372036\n".to_owned();
            let place = |key| format!("se\np{}\n1 10000\n", key % 1000);
            let requests: Vec<String> = match number % 2 {
                0 => (0..CLAIMS).map(slot).collect(),
                _ => (0..CLAIMS).map(place).collect(),
            };
            for some in requests.chunks(100) {
                client.send(&some.concat());
                refused_count += some
                    .iter()
                    .filter(|_| client.line() == "error_max_locks")
                    .count();
            }
        }
        println!("{refused_count} claims were refused");
        let ended = daemon.wait_exit(Duration::ZERO);
        assert!(ended.is_none(), "{limit} MB: {}", daemon.log());
        drop(crowd);
        limit_to(daemon.pid(), resource, None);
        eventually(PATIENCE, "new clients are served again", || {
            is_served(&mut daemon.connect())
        });
    }
}

#[test]
fn connections_may_take_a_quarter_of_the_cgroups_memory() {
    let Some(group) = MemoryGroup::of_bytes(64 << 20) else {
        skipped(&["memory cgroup"]);
        return;
    };
    let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", group.inner());
    let wrapper = ["sh", "-c", &enter, "sh"];
    let daemon = Daemon::from_command(limited(&wrapper));
    daemon.wait_for_log("max_connections=256\n", PATIENCE);
    let mut crowd: Vec<Client> = (0..256).map(|_| daemon.connect()).collect();
    assert!(crowd.iter_mut().all(is_served));
    assert!(!is_served(&mut daemon.connect()));
    daemon.wait_for_log("turned-away reason=max-connections", PATIENCE);
    drop(daemon);

    // An operator who names a number gets it.
    let mut command = limited(&wrapper);
    command.args(["--max-connections", "400"]);
    let daemon = Daemon::from_command(command);
    daemon.wait_for_log("max_connections=400\n", PATIENCE);
    let worst = worst_case_mb(&daemon);
    assert!((25..100).contains(&worst), "{worst} MB");
}

// ---- clocks ----------------------------------------------------------------------------------

#[test]
fn a_clock_that_is_set_to_and_fro_changes_no_lease() {
    fair_test(|| {
        let libfaketime = needs!("libfaketimeMT.so.1");
        leases_last_while_the_clock_goes(&libfaketime, &["+1h", "-1h", "+1h", "+0"]);
    });
}

// ---- how: storms -----------------------------------------------------------------------------

#[derive(Debug)]
struct Storm {
    served: usize,
    refused: usize,
}

/// Lets `count` clients connect, hundreds of them at a time, and looks whether all is as it was
/// when they have left.
fn weather(daemon: &Daemon, count: usize) -> Storm {
    raise_our_own_limit();
    let mut early: Vec<Client> = (0..4).map(|_| daemon.connect()).collect();
    assert!(early.iter_mut().all(is_served));
    let mut waiting = daemon.connect();
    let held = early[0].acquire("held", 0).token;
    waiting.send("l\nheld\n60\n");
    daemon.wait_for_waiters("held", 1);
    eventually(PATIENCE, "only those are there", || {
        early[0].stats()["connections"] == 5
    });
    let calm = Footprint::of(daemon.pid());

    let storm = thread::scope(|scope| {
        let storm = scope.spawn(|| storm(daemon, count));
        while !storm.is_finished() {
            for client in &mut early {
                let asked = Instant::now();
                assert!(is_served(client), "one who was there before was dropped");
                in_time!(asked.elapsed() < Duration::from_secs(1), "and had to wait");
            }
            thread::sleep(Duration::from_millis(20));
        }
        storm.join().unwrap()
    });
    println!("{storm:?} of {count}");

    // A waiter has not lost its place, nor is it left behind.
    assert_eq!(early[0].request("r", "held", &held), "ok");
    let passed_on = parse_grant(&waiting.line(), "ok").expect("its turn").token;
    assert_eq!(waiting.request("r", "held", &passed_on), "ok");
    eventually(PATIENCE, "newcomers are served", || {
        is_served(&mut daemon.connect())
    });
    // Threads are kept for the next client for ten seconds; everything else goes at once.
    eventually(PATIENCE, "the descriptors are closed", || {
        Footprint::of(daemon.pid()).descriptors <= calm.descriptors
    });
    eventually(2 * PATIENCE, "the threads have ended", || {
        Footprint::of(daemon.pid()).threads <= calm.threads
    });
    come_to_rest(&[daemon.pid()], Duration::from_millis(190));
    assert!(early.iter_mut().all(is_served));
    assert!(daemon.wait_exit(Duration::ZERO).is_none(), "it died");
    storm
}

/// From four threads, each of which keeps its last sixty connections open.
fn storm(daemon: &Daemon, count: usize) -> Storm {
    const THREADS: usize = 4;
    const KEPT: usize = 60;
    let (served, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..count / THREADS / KEPT + 1 {
                    let mut batch: Vec<Client> = (0..KEPT).map(|_| daemon.connect()).collect();
                    for client in &mut batch {
                        let counter = if is_served(client) { &served } else { &refused };
                        counter.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    Storm {
        served: served.into_inner(),
        refused: refused.into_inner(),
    }
}

/// A memory cgroup (version 1) with a limit, and one in it without, both of which go when dropped.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    fn of_bytes(limit: u64) -> Option<MemoryGroup> {
        let name = format!("latchd-test-{}", std::process::id());
        let group = MemoryGroup(Path::new("/sys/fs/cgroup/memory").join(name));
        fs::create_dir_all(group.0.join("inner")).ok()?;
        let file = group.0.join("memory.limit_in_bytes");
        fs::write(file, limit.to_string()).ok()?;
        Some(group)
    }

    fn inner(&self) -> String {
        self.0.join("inner").display().to_string()
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        for group in [self.0.join("inner"), self.0.clone()] {
            // A process that was just killed leaves its group only a moment later.
            eventually(PATIENCE, "the group is empty", || {
                fs::remove_dir(&group).is_ok() || !group.exists()
            });
        }
    }
}

// ---- how: clocks -----------------------------------------------------------------------------

/// Half a second for a machine that is shared; the steps are two thousand times as long.
const SLACK: Duration = Duration::from_millis(500);

fn leases_last_while_the_clock_goes(libfaketime: &Program, steps: &[&str]) {
    let clock = WallClock::new(libfaketime);
    let daemon = &clock.daemon;
    let lease = Duration::from_secs(2);
    let began = Instant::now();

    // One lease that ends, with somebody who waits for it; one that is renewed; one that is long; a
    // wait that comes to nothing; and a granted place that was not collected yet.
    let mut clients: Vec<Client> = (0..6).map(|_| daemon.connect()).collect();
    let [ending, successor, renewed, long, hopeless, placed] = &mut clients[..] else {
        unreachable!("there are six");
    };
    let dead = ending.acquire_for("ending", 0, 2).token;
    let renewed_token = renewed.acquire_for("renewed", 0, 2).token;
    let long_token = long.acquire_for("long", 0, 3600).token;
    let reply = placed.request("e", "placed", "60");
    let placed_token = parse_grant(&reply, "acquired").expect("a free key").token;
    let asked = Instant::now();
    successor.send("l\nending\n30 60\n");
    hopeless.send("l\nlong\n2\n");
    daemon.wait_for_waiters("ending", 1);

    for step in steps {
        clock.set(step);
        let list = daemon.stats();
        let left = list["locks"]
            .as_array()
            .and_then(|locks| locks.iter().find(|lock| lock["key"] == "long"))
            .and_then(|lock| lock["lease_expires_in_s"].as_f64())
            .expect("it is held");
        let passed = began.elapsed().as_secs_f64();
        assert!((3599.0 - passed..=3600.0).contains(&left), "{step}: {left}");
        thread::sleep(Duration::from_millis(100));
    }
    successor.nothing_within(Duration::from_secs(1).saturating_sub(began.elapsed()));
    assert_eq!(renewed.request("n", "renewed", &renewed_token), "ok 33");

    assert!(parse_grant(&successor.line(), "ok").is_some());
    is_about(began.elapsed(), lease, "the lease");
    hopeless.expect("timeout");
    is_about(asked.elapsed(), lease, "the wait");
    assert_eq!(ending.request("r", "ending", &dead), "error");
    assert_eq!(
        renewed.request("n", "renewed", &format!("{renewed_token} 1")),
        "ok 1"
    );
    assert_eq!(long.request("n", "long", &long_token), "ok 33");
    let collected = placed.request("w", "placed", "0");
    assert_eq!(
        parse_grant(&collected, "ok").expect("it was granted").token,
        placed_token
    );
    // Renewed for a second just now: once more the end comes in time.
    let renewed_at = Instant::now();
    let mut heir = daemon.connect();
    heir.acquire("renewed", 10);
    is_about(renewed_at.elapsed(), Duration::from_secs(1), "the renewal");
    assert_eq!(renewed.request("n", "renewed", &renewed_token), "error");
}

fn is_about(took: Duration, expected: Duration, what: &str) {
    let early = Duration::from_millis(100); // some requests lie between the clocks
    in_time!(
        expected - early <= took && took <= expected + SLACK,
        "{what} took {took:?} instead of {expected:?}"
    );
}

/// A server with a wall clock that can be set.
struct WallClock {
    daemon: Daemon,
    directory: tempfile::TempDir,
}

impl WallClock {
    fn new(libfaketime: &Program) -> WallClock {
        let directory = tempfile::tempdir().expect("there is room");
        fs::write(directory.path().join("clock"), "+0\n").expect("there is room");
        let mut command = Daemon::command();
        command
            .args(["--port", "0", "--print-port", "--debug"])
            .args(["--log-timestamps", "always"])
            .env("FAKETIME_TIMESTAMP_FILE", directory.path().join("clock"))
            .env("FAKETIME_NO_CACHE", "1");
        with_a_clock_of_its_own(&mut command, libfaketime);
        WallClock {
            daemon: Daemon::from_command(command),
            directory,
        }
    }

    /// Sets the clock, in one step, and looks whether the server's log says so.
    fn set(&self, offset: &str) {
        let file = self.directory.path().join("clock");
        let new = self.directory.path().join("new");
        fs::write(&new, format!("{offset}\n")).expect("there is room");
        fs::rename(&new, &file).expect("it is ours");
        let stream = TcpStream::connect(self.daemon.addr()).expect("it listens");
        let peer = stream.local_addr().expect("it is connected");
        let opened = format!("peer={peer}\n");
        self.daemon.wait_for_log(&opened, PATIENCE);
        let log = self.daemon.log();
        let line = log.lines().find(|line| line.ends_with(opened.trim()));
        let line = line.expect("just seen");
        let hours = offset.trim_end_matches('h').parse::<i64>().expect("hours");
        let off =
            (seconds_of_day(line) - now_in_seconds_of_day() - hours * 3600).rem_euclid(86_400);
        assert!(
            !(30..=86_370).contains(&off),
            "the clock is not set: {line}"
        );
    }
}

impl Drop for WallClock {
    fn drop(&mut self) {
        self.daemon.signal(Signal::KILL);
        self.daemon.wait_exit(PATIENCE);
        clear_up_after(self.daemon.pid());
    }
}

/// The time in a log line that begins like `2026-01-31T23:59:59Z`.
fn seconds_of_day(line: &str) -> i64 {
    let time = line.get(11..19).expect("a timestamp");
    let parts = time
        .split(':')
        .map(|part| part.parse::<i64>().expect("digits"));
    parts.fold(0, |sum, part| sum * 60 + part)
}

fn now_in_seconds_of_day() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    i64::try_from(since_epoch.expect("after 1970").as_secs() % 86_400).expect("a day is short")
}
