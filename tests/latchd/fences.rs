//! Fences rise over every restart, crash and clock step, and whatever the disk refuses, nobody is
//! granted anything without a fence that is certain to be new.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::ops::Deref;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::clock::{clear_up_after, with_a_clock_of_its_own};
use crate::support::limited::{copy_program, limit_to, with_surroundings_of};
use crate::support::needs::{needs, programs, skipped, Program};
use crate::support::stalls::lateness_during;
use crate::support::{
    come_to_rest, eventually, fence, parse_grant, program, wait_for_exit, Client, Daemon, Event,
    Signal, PATIENCE,
};
use rustix::process::{Pid, Resource};

/// The fences that a server reserves at a time.
const RANGE: u64 = 1 << 20;

const DAY: u64 = 24 * 60 * 60 * 1_000_000_000;

// ---- restarts --------------------------------------------------------------------------------

#[test]
fn fences_rise_over_twenty_kills_and_a_clock_set_back() {
    fences_rise_over_kills(&needs!("libfaketimeMT.so.1"), 20);
}

/// Half a minute long.
#[test]
#[ignore = "long: cargo test --test latchd fences -- --ignored"]
fn fences_rise_over_three_hundred_kills_at_full_speed() {
    fences_rise_over_kills(&needs!("libfaketimeMT.so.1"), 300);
}

// ---- the file --------------------------------------------------------------------------------

#[test]
fn fences_go_on_after_the_clock_and_after_what_a_file_has_reserved() {
    let began = now();
    let (_directory, path) = file_of(5);
    let start = || Daemon::from_command(latchd(Some(&path)));
    let fence = first_fence(&start());
    assert!(began <= fence && fence <= now());

    let ahead = now() + 365 * DAY; // so that the clock has no say
    let (_directory, path) = file_of(ahead);
    let start = || Daemon::from_command(latchd(Some(&path)));
    let kill = |daemon: Daemon| {
        daemon.signal(Signal::KILL);
        daemon.wait_exit(PATIENCE);
    };
    let ranges = [1, 2].map(|number| ahead + number + (number - 1) * RANGE);
    for first in ranges {
        let daemon = start();
        assert_eq!(first_fence(&daemon), first);
        assert!(!daemon.log().contains("fence-file-torn"));
        kill(daemon);
    }
    // The record of the last range is in the second slot. Without it, the range counts as unused.
    let mut content = fs::read(&path).expect("it was made");
    content[41] ^= 0x10;
    fs::write(&path, content).expect("it is ours");
    let daemon = start();
    assert_eq!(first_fence(&daemon), ranges[1]);
    daemon.wait_for_log("WARN fence-file-torn path=", PATIENCE);
    assert_eq!(daemon.log().matches("fence-file-torn").count(), 1);
    kill(daemon);
    let daemon = start();
    assert_eq!(first_fence(&daemon), ranges[1] + RANGE + 1);
    assert!(!daemon.log().contains("fence-file-torn"));
}

#[test]
fn a_fence_file_that_cannot_be_used_is_named_in_one_line_and_left_as_it_is() {
    let directory = tempfile::tempdir().expect("there is room");
    let at = |name: &str| directory.path().join(name);
    let user = Daemon::from_command(latchd(Some(&at("used"))));
    for (name, content) in [
        ("foreign", &b"a list of what to buy, longer than a slot"[..]),
        ("magic", b"dflfnc1\n"),
        ("torn", b"dflfnc1\n, and what follows is no record of it"),
        ("end", &[0xff; 8]),
    ] {
        fs::write(at(name), content).expect("there is room");
    }
    fs::create_dir(at("directory")).expect("there is room");
    symlink(at("end"), at("link")).expect("there is room");
    symlink("nowhere", at("dangling")).expect("there is room");
    fs::hard_link(at("used"), at("used-too")).expect("there is room");
    mkfifo(&at("fifo"));

    let missing = format!("no such directory: {}", at("missing").display());
    for (name, why) in [
        ("directory", "it is not a regular file"),
        ("fifo", "it is not a regular file"),
        ("/dev/null", "it is not a regular file"),
        ("link", "it is a symbolic link"),
        ("dangling", "it is a symbolic link"),
        ("missing/fences", missing.as_str()),
        ("end/fences", "not a directory"),
        ("used", "another server is using it"),
        ("used-too", "another server is using it"),
        ("foreign", "its content is not that of a fence file"),
        ("magic", "it is cut short"),
        ("torn", "no record in it is whole"),
        ("end", "its fences have come to their end"),
    ] {
        let content = || at(name).is_file().then(|| fs::read(at(name)).ok());
        let before = content();
        refuses(latchd(Some(&at(name))), &at(name), why);
        assert_eq!(content(), before, "{name}");
    }
    assert!(!at("nowhere").exists(), "a link was followed");
    first_fence(&user);
}

#[test]
fn what_permissions_forbid_is_refused_in_one_line() {
    let directory = tempfile::tempdir().expect("there is room");
    open_to_all(directory.path(), 0o755);
    let copy = directory.path().join("latchd");
    copy_program(program("latchd"), &copy);
    let file = directory.path().join("fences");
    fs::write(&file, [0; 8]).expect("there is room");

    for mode in [0o000, 0o400, 0o200] {
        open_to_all(&file, mode);
        refuses(as_nobody(&copy, &file), &file, "permission denied");
    }
    // A new file in a directory where nothing may be made.
    let locked = directory.path().join("locked");
    fs::create_dir(&locked).expect("there is room");
    open_to_all(&locked, 0o555);
    let missing = locked.join("fences");
    refuses(as_nobody(&copy, &missing), &missing, "permission denied");
    // A directory that may be searched, but not synced.
    if rustix::process::geteuid().is_root() {
        let unlisted = directory.path().join("unlisted");
        fs::create_dir(&unlisted).expect("there is room");
        let there = unlisted.join("fences");
        fs::write(&there, "").expect("there is room");
        open_to_all(&there, 0o666);
        open_to_all(&unlisted, 0o711);
        refuses(as_nobody(&copy, &there), &there, "permission denied");
    }
}

/// Nothing is made there and nothing is renamed, so the file is all that a server needs.
#[test]
fn a_file_of_ours_in_a_directory_that_is_not_ours_will_do() {
    let directory = tempfile::tempdir().expect("there is room");
    open_to_all(directory.path(), 0o755);
    let copy = directory.path().join("latchd");
    copy_program(program("latchd"), &copy);
    let ahead = now() + DAY;
    let file = directory.path().join("fences");
    fs::write(&file, ahead.to_be_bytes()).expect("there is room");
    open_to_all(&file, 0o666);
    open_to_all(directory.path(), 0o555);
    let daemon = Daemon::from_command(as_nobody(&copy, &file));
    assert_eq!(first_fence(&daemon), ahead + 1);
    open_to_all(directory.path(), 0o755); // so that it can be removed
}

// ---- a disk that refuses ---------------------------------------------------------------------

#[test]
fn a_disk_that_refuses_at_the_start_is_named_in_one_line() {
    let strace = needs!("strace");
    for (calls, injected, why) in [
        ("fsync,fdatasync", "error=EIO:when=1", "input/output error"),
        // One call for the directory, and two for the file.
        ("fsync,fdatasync", "error=EIO:when=3", "input/output error"),
        ("fsync,fdatasync", "error=ENOSPC", "no space left on device"),
        ("pwrite64", "error=ENOSPC", "no space left on device"),
        ("pwrite64", "error=EIO", "input/output error"),
        ("pwrite64", "error=EROFS", "read-only file system"),
        ("flock", "error=ENOLCK", "its file system has no locks"),
    ] {
        let (directory, path) = file_of(7);
        refuses(
            under_strace(
                &strace,
                directory.path(),
                calls,
                injected,
                &latchd(Some(&path)),
            ),
            &path,
            why,
        );
        // And nothing keeps the next one from starting once the disk is well.
        assert!(first_fence(&Daemon::from_command(latchd(Some(&path)))) > 7 + RANGE);
    }
}

/// The kernel refuses to write beyond a file size of nothing, and does so no longer when the limit
/// is lifted. A million grants use up the fences, which takes too long for the usual run. That has
/// the two halves alone: the table without fences, and the allocator on a disk that refuses.
#[test]
#[ignore = "long: cargo test --test latchd out_of_fences -- --ignored"]
fn out_of_fences_waiters_stay_and_are_served_later() {
    let libfaketime = needs!("libfaketimeMT.so.1");
    refusing_disk(&libfaketime, |daemon| {
        let pid = daemon.pid();
        limit_to(pid, Resource::Fsize, Some(0));
        Box::new(move || limit_to(pid, Resource::Fsize, None))
    });
}

#[test]
#[ignore = "long: cargo test --test latchd out_of_fences -- --ignored"]
fn out_of_fences_on_a_failing_disk_nobody_is_lost() {
    let libfaketime = needs!("libfaketimeMT.so.1");
    if let Some(strace) = tracer() {
        refusing_disk(&libfaketime, |daemon| {
            inject(&strace, daemon, "fsync,fdatasync:error=EIO")
        });
    }
}

// ---- the salt -------------------------------------------------------------------------------

#[test]
fn slow_kernel_randomness_delays_only_those_who_ask_for_a_grant() {
    let Some(strace) = tracer() else { return };
    const DELAY: Duration = Duration::from_secs(30);
    let daemon = Daemon::from_command(latchd(None));
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("held", 0, 60);
    let mut asking: Vec<Client> = (0..4).map(|_| daemon.connect()).collect();
    for client in &mut asking {
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
    let stop = inject(
        &strace,
        &daemon,
        &format!("getrandom:delay_enter={}", DELAY.as_micros()),
    );
    // Together they ask for more salts than are fetched at a time.
    for client in &mut asking {
        client.send(&"sl\nk\n0 1048576\n".repeat(250));
    }
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        let asked = Instant::now();
        let renewed = holder.request("n", "held", &format!("{} 60", grant.token));
        assert_eq!(renewed, "ok 60");
        assert!(
            asked.elapsed() < DELAY / 10,
            "a renewal took {:?}",
            asked.elapsed()
        );
        thread::sleep(Duration::from_millis(10));
    }
    let stats = holder.stats();
    let granted = stats["semaphores"][0]["holders"].as_u64();
    assert!(granted < Some(1000), "the randomness was never short");
    stop();
    for client in &mut asking {
        for _ in 0..250 {
            assert!(parse_grant(&client.line(), "ok").is_some());
        }
    }
}

#[test]
fn without_kernel_randomness_waiters_are_served_all_the_same() {
    let Some(strace) = tracer() else { return };
    let daemon = Daemon::from_command(latchd(None));
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 60);
    let mut waiter = daemon.connect();
    waiter.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 1);
    let mut greedy: Vec<Client> = (0..4).map(|_| daemon.connect()).collect();
    for client in &mut greedy {
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
    let began = Instant::now();
    let recover = inject(&strace, &daemon, "getrandom:error=EIO");
    let mut replies: Vec<String> = Vec::new();
    for client in &mut greedy {
        client.send(&"sl\nmany\n0 1048576\n".repeat(250));
        replies.extend((0..250).map(|_| client.line()));
    }
    assert_eq!(replies.last().map(String::as_str), Some("error"));
    daemon.wait_for_log("ERROR no-randomness error=", PATIENCE);
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert!(parse_grant(&waiter.line(), "ok").is_some());
    recover();
    assert!(parse_grant(&holder.request("l", "k2", "0"), "ok").is_some());
    let line_count = daemon.log().matches("no-randomness").count() as u64;
    let most = began.elapsed().as_secs() + 1;
    assert!(line_count <= most, "{line_count} lines");
}

// ---- how ------------------------------------------------------------------------------------

fn fences_rise_over_kills(libfaketime: &Program, count: u32) {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("fences");
    let mut last = 0;
    let mut total = 0;
    for restart in 0..count {
        // Forward too: only then is the way back a real one.
        let clock = ["+0", "-1d", "+2h", "-1d", "+0"][restart as usize % 5];
        let command = latchd(Some(&path));
        if restart % 4 == 3 {
            kill_while_starting(&command, Duration::from_millis(u64::from(restart % 13)));
        }
        let daemon = OtherClock::start(libfaketime, clock, &command);
        let clients: Vec<Client> = (0..4).map(|_| daemon.connect()).collect();
        let granted = AtomicU64::new(0);
        let fences = thread::scope(|scope| {
            let granted = &granted;
            let clients: Vec<_> = clients
                .into_iter()
                .zip(0..)
                .map(|(client, number)| {
                    scope.spawn(move || lock_until_the_end(client, number, granted))
                })
                .collect();
            thread::sleep(Duration::from_millis(30 + u64::from(restart * 37 % 70)));
            eventually(PATIENCE, "something is granted", || {
                granted.load(Ordering::Relaxed) > 0
            });
            daemon.signal(Signal::KILL);
            let join = |client: thread::ScopedJoinHandle<'_, Vec<u64>>| client.join().unwrap();
            clients.into_iter().map(join).collect::<Vec<_>>()
        });
        daemon.wait_exit(PATIENCE);
        for fences in &fences {
            assert!(fences.windows(2).all(|pair| pair[0] < pair[1]));
        }
        let mut fences: Vec<u64> = fences.concat();
        fences.sort_unstable();
        assert!(
            fences.windows(2).all(|pair| pair[0] < pair[1]),
            "a fence was granted twice"
        );
        assert!(
            last < fences[0],
            "restart {restart}, clock {clock}: {:x} after {last:x}",
            fences[0]
        );
        last = fences[fences.len() - 1];
        total += fences.len();
    }
    println!("{total} fences over {count} restarts");
    // This is how we know that the clock is really another one.
    let without_file = OtherClock::start(libfaketime, "-1d", &latchd(None));
    assert!(first_fence(&without_file) < last);
}

/// Locks and unlocks until the server is gone; gives the fences.
fn lock_until_the_end(mut client: Client, number: usize, granted: &AtomicU64) -> Vec<u64> {
    let mut fences = Vec::new();
    let mut token: Option<String> = None;
    loop {
        let request = match &token {
            Some(token) => format!("r\nk{number}\n{token}\n"),
            None => format!("l\nk{number}\n0\n"),
        };
        if client.try_send(request.as_bytes()).is_err() {
            return fences;
        }
        match client.next_event(PATIENCE) {
            Event::Line(line) => {
                let line = String::from_utf8(line).expect("replies are ASCII");
                token = match token {
                    Some(_) => {
                        assert_eq!(line, "ok");
                        None
                    }
                    None => {
                        let grant = parse_grant(&line, "ok").expect("the key is free");
                        fences.push(fence(&grant.token));
                        granted.fetch_add(1, Ordering::Relaxed);
                        Some(grant.token)
                    }
                };
            }
            Event::Eof | Event::Torn(_) | Event::Reset => return fences,
            Event::Nothing => panic!("the server neither answers nor ends"),
        }
    }
}

fn kill_while_starting(command: &Command, after: Duration) {
    let mut child = copy_of(command).spawn().expect("it was built");
    thread::sleep(after);
    child.kill().expect("it is our child");
    child.wait().expect("it is our child");
}

/// Uses up all the fences of a server whose disk `refuse` makes refuse. What that gives back lets
/// the disk recover.
fn refusing_disk(libfaketime: &Program, refuse: impl FnOnce(&Daemon) -> Box<dyn FnOnce()>) {
    const SECONDS: &str = "3600";
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("fences");
    let mut command = latchd(Some(&path));
    command.args(["--read-timeout", SECONDS, "--default-lease-ttl", SECONDS]);
    command.args(["--max-slots", "1000000", "--max-per-connection", "20000"]);
    let daemon = Daemon::from_command(command);

    // Somebody holds a lock, a semaphore's two slots, a key with a phase-one place behind it, and
    // one that will only be renewed; others wait.
    let mut holder = daemon.connect();
    let lock = holder.acquire("lock", 0).token;
    let slots = [(); 2].map(|()| {
        let reply = holder.request("sl", "slots", "0 2");
        parse_grant(&reply, "ok").expect("a free slot").token
    });
    let place = holder.acquire("place", 0).token;
    let renewed = holder.acquire("renewed", 0).token;
    let queue_up = |request: &str, key: &str, count| {
        let waiting = (1..=count).map(|at| {
            let mut client = daemon.connect();
            client.send(request);
            daemon.wait_for_waiters(key, at);
            client
        });
        waiting.collect::<Vec<Client>>()
    };
    let mut for_lock = queue_up("l\nlock\n3600\n", "lock", 3);
    let mut for_slots = queue_up("sl\nslots\n3600 2\n", "slots", 4);
    let mut enqueued = daemon.connect();
    assert_eq!(enqueued.request("e", "place", ""), "queued");

    let recover = refuse(&daemon);
    let began = Instant::now();
    let (granted, highest) = use_up_the_fences(&daemon);
    println!(
        "{granted} grants in {:?} until the fences were used up",
        began.elapsed()
    );
    assert!(granted < RANGE, "more than were reserved");
    daemon.wait_for_log("ERROR cannot-reserve-fences error=", PATIENCE);

    // Nothing new is granted, and nothing is left behind by the attempt.
    let mut client = daemon.connect();
    for request in [
        ("l", "0"),
        ("l", "5"),
        ("sl", "5 3"),
        ("e", ""),
        ("se", "3"),
    ] {
        assert_eq!(
            client.request(request.0, "new", request.1),
            "error",
            "{request:?}"
        );
    }
    assert_eq!(client.request("w", "new", "0"), "error_not_enqueued");
    let stats = client.stats();
    for list in ["locks", "semaphores"] {
        let is_listed = stats[list].to_string().contains("\"new\"");
        assert!(!is_listed, "held or waited for: {stats}");
    }

    // Holders go on; what they release is granted to no waiter yet, and no waiter loses its place.
    assert_eq!(holder.request("n", "renewed", &renewed), "ok 3600");
    assert_eq!(holder.request("r", "lock", &lock), "ok");
    for slot in &slots {
        assert_eq!(holder.request("sr", "slots", slot), "ok");
    }
    assert_eq!(holder.request("r", "place", &place), "ok");
    assert_eq!(enqueued.request("w", "place", "100"), "error");
    let reply = client.request("l", "lock", "0");
    assert!(matches!(reply.as_str(), "error" | "timeout"), "{reply}");
    for waiter in for_lock.iter_mut().chain(&mut for_slots) {
        waiter.nothing_within(Duration::from_millis(100));
    }
    daemon.wait_for_waiters("lock", 3);
    daemon.wait_for_waiters("slots", 4);
    daemon.wait_for_waiters("place", 1);
    // One of them leaves, and is not missed.
    drop(for_lock.remove(1));
    daemon.wait_for_waiters("lock", 2);
    // The disk is tried four times a second, which costs nothing, and is complained about once.
    come_to_rest(&[daemon.pid()], Duration::from_millis(190));
    assert_eq!(daemon.log().matches("cannot-reserve-fences").count(), 1);

    recover();
    let mut fences = vec![highest];
    // Every 250 ms, with tenfold slack for a machine that is shared.
    let soon = Duration::from_millis(2500);
    let mut grant_of = |client: &mut Client| {
        let began = Instant::now();
        let (reply, lateness) = lateness_during(|| client.line());
        let took = began.elapsed();
        assert!(took < soon + 10 * lateness, "granted after {took:?}");
        let token = parse_grant(&reply, "ok").expect("a grant").token;
        fences.push(fence(&token));
        token
    };
    let first = grant_of(&mut for_lock[0]);
    grant_of(&mut for_slots[0]);
    grant_of(&mut for_slots[1]);
    for waiter in for_lock[1..].iter_mut().chain(&mut for_slots[2..]) {
        waiter.nothing_within(Duration::from_millis(50));
    }
    assert_eq!(for_lock[0].request("r", "lock", &first), "ok");
    grant_of(&mut for_lock[1]);
    // They pass on what they hold by leaving.
    for_slots.remove(0);
    grant_of(&mut for_slots[1]);
    enqueued.send("w\nplace\n100\n");
    grant_of(&mut enqueued);
    daemon.wait_for_log("INFO reserved-fences-again", PATIENCE);
    assert!(fences[1..].iter().all(|fence| *fence > highest));

    // And the next server is above all that, whatever its clock says.
    let highest = *fences.iter().max().expect("there are some");
    daemon.signal(Signal::KILL);
    daemon.wait_exit(PATIENCE);
    let next = OtherClock::start(libfaketime, "-1d", &latchd(Some(&path)));
    assert!(first_fence(&next) > highest);
}

/// Takes semaphore slots at full speed until there are no fences left. Gives how many were granted
/// and the highest fence.
fn use_up_the_fences(daemon: &Daemon) -> (u64, u64) {
    const BATCH: usize = 256;
    const BATCHES: usize = 64;
    let deadline = Instant::now() + 20 * PATIENCE;
    let (granted, highest) = (AtomicU64::new(0), AtomicU64::new(0));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for number in 0..4 {
            let (granted, highest, is_over) = (&granted, &highest, &is_over);
            let requests = format!("sl\nuse-up-{number}\n0 1048576\n").repeat(BATCH);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    // The slots are released by leaving.
                    let mut client = TcpStream::connect(daemon.addr()).expect("it listens");
                    let reader = client.try_clone().expect("descriptors are left");
                    let patience = Some(PATIENCE);
                    reader.set_read_timeout(patience).expect("it is not zero");
                    let mut replies = BufReader::new(reader).lines();
                    for _ in 0..BATCHES {
                        client.write_all(requests.as_bytes()).expect("it is read");
                        for _ in 0..BATCH {
                            let reply = replies.next().expect("it answers").expect("in time");
                            if reply == "error" {
                                is_over.store(true, Ordering::Relaxed);
                                continue;
                            }
                            let grant = parse_grant(&reply, "ok").expect("a free slot");
                            granted.fetch_add(1, Ordering::Relaxed);
                            highest.fetch_max(fence(&grant.token), Ordering::Relaxed);
                        }
                        assert!(Instant::now() < deadline, "there is no end of the fences");
                    }
                }
            });
        }
    });
    (granted.into_inner(), highest.into_inner())
}

/// Makes system calls of a running server fail, until what is given back is called.
pub fn inject(strace: &Program, daemon: &Daemon, what: &str) -> Box<dyn FnOnce()> {
    let calls = what.split(':').next().expect("the first part");
    let mut strace = strace.command();
    strace
        .args(["-f", "-o", "/dev/null", "-e"])
        .arg(format!("trace={calls}"))
        .arg(format!("--inject={what}"))
        .arg("-p")
        .arg(daemon.pid().to_string());
    let mut strace = strace.stderr(Stdio::piped()).spawn().expect("strace");
    // It says so when all threads are on their way to stop, and stays silent from then on.
    let mut said = BufReader::new(strace.stderr.take().expect("it is a pipe"));
    let mut attached = String::new();
    said.read_line(&mut attached).expect("it is text");
    assert!(attached.contains(" attached"), "{attached}");
    thread::spawn(move || io::copy(&mut said, &mut io::sink()));
    let tracers = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("it runs");
        tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok())
            .map(|status| !status.contains("TracerPid:\t0\n"))
            .collect::<Vec<bool>>()
    };
    eventually(PATIENCE, "strace may attach to our child", || {
        tracers().iter().all(|traced| *traced)
    });
    Box::new(move || end(strace))
}

/// strace, if it may attach to a process that it has not started: a matter of the user, of
/// ptrace_scope, and of the capabilities in a container.
pub fn tracer() -> Option<Program> {
    let [tracer] = programs(["strace"])?;
    let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
    let mut strace = tracer.command();
    strace.args(["-o", "/dev/null", "-p", &sleeper.id().to_string()]);
    let mut strace = strace.stderr(Stdio::piped()).spawn().expect("strace");
    let mut said = BufReader::new(strace.stderr.take().expect("it is a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("it is text");
    for child in [&mut strace, &mut sleeper] {
        // It fails only for one that has ended.
        let _ = child.kill();
        child.wait().expect("it is our child");
    }
    if !line.contains(" attached") {
        skipped(&["right to trace another process"]);
        return None;
    }
    Some(tracer)
}

/// Ends a strace so that it lets go of the process it is attached to.
fn end(mut child: Child) {
    let pid = Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::TERM).expect("it is our child");
    child.wait().expect("it is our child");
}

#[test]
fn a_limit_on_file_sizes_is_named_by_a_server_that_cannot_start() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("fences");
    let mut shell = Daemon::command_of("sh");
    shell.args(["-c", "ulimit -f 0; exec \"$@\"", "sh"]);
    let plain = latchd(Some(&path));
    shell.arg(plain.get_program()).args(plain.get_args());
    refuses(shell, &path, "file too large");
}

/// A server on a free port with this fence file.
fn latchd(fence_file: Option<&Path>) -> Command {
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]);
    if let Some(path) = fence_file {
        command.arg("--fence-state-file").arg(path);
    }
    command
}

/// The fence of the next grant.
fn first_fence(daemon: &Daemon) -> u64 {
    fence(&daemon.connect().acquire("first", 0).token)
}

/// Runs a server that must refuse to start because of its fence file, and say so in one line.
fn refuses(mut command: Command, path: &Path, why: &str) {
    let mut child = command.spawn().expect("it was built");
    wait_for_exit(&mut child, PATIENCE);
    let output = child.wait_with_output().expect("it is our child");
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        format!(
            "latchd: cannot use the fence file {}: {why}\n",
            path.display()
        )
    );
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(output.stdout, b"", "it said that it listens");
}

/// A server with this fence file, as a user who is not root.
fn as_nobody(program: &Path, fence_file: &Path) -> Command {
    let plain = latchd(Some(fence_file));
    if !rustix::process::geteuid().is_root() {
        return plain;
    }
    let mut wrapper = Command::new("setpriv");
    wrapper.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    wrapped(wrapper, program, &plain)
}

/// A server whose wall clock shows another time (`-1d`) while time itself runs on as ever.
struct OtherClock {
    daemon: Daemon,
}

impl OtherClock {
    fn start(libfaketime: &Program, clock: &str, plain: &Command) -> OtherClock {
        let daemon = Daemon::from_command(OtherClock::set(libfaketime, clock, plain));
        OtherClock { daemon }
    }

    fn set(libfaketime: &Program, clock: &str, plain: &Command) -> Command {
        let mut command = copy_of(plain);
        with_a_clock_of_its_own(&mut command, libfaketime).env("FAKETIME", clock);
        command
    }
}

impl Deref for OtherClock {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl Drop for OtherClock {
    fn drop(&mut self) {
        self.daemon.signal(Signal::KILL);
        self.daemon.wait_exit(PATIENCE);
        clear_up_after(self.daemon.pid());
    }
}

/// The same, with system calls of it failing as `injected` says.
fn under_strace(
    strace: &Program,
    directory: &Path,
    calls: &str,
    injected: &str,
    plain: &Command,
) -> Command {
    let mut wrapper = strace.command();
    wrapper
        .args(["-f", "-q", "-o"])
        .arg(directory.join("trace"))
        .arg("-e")
        .arg(format!("trace={calls}"))
        .arg(format!("--inject={calls}:{injected}"));
    wrapped(wrapper, Path::new(plain.get_program()), plain)
}

/// `wrapper` with `program` and the arguments, the environment and the pipes of `plain`.
fn wrapped(mut wrapper: Command, program: &Path, plain: &Command) -> Command {
    wrapper.arg(program).args(plain.get_args());
    with_surroundings_of(plain, wrapper)
}

fn copy_of(plain: &Command) -> Command {
    let mut command = Command::new(plain.get_program());
    command.args(plain.get_args());
    with_surroundings_of(plain, command)
}

fn mkfifo(path: &Path) {
    use rustix::fs::{mknodat, FileType, Mode, CWD};
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("there is room");
}

fn open_to_all(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
}

/// A file in which all fences up to `ceiling` are used, in the format of older versions of dflockd,
/// and the directory that goes with it.
fn file_of(ceiling: u64) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("fences");
    fs::write(&path, ceiling.to_be_bytes()).expect("there is room");
    (directory, path)
}

/// The fence that belongs to this moment.
fn now() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since_epoch.expect("after 1970").as_nanos()).expect("before 2554")
}
