//! A key passes on: in order, on time, past clients that are dead, stopped, slow or gone, and to
//! no client that can no longer use it.
//!
//! Latencies are asserted with tenfold slack and printed; what is counted is asserted exactly.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::limited::raise_our_own_limit;
use crate::support::stalls::{fair_test, fairly_within, in_time};
use crate::support::{
    come_to_rest, fence, parse_grant, Client, Daemon, Deadline, Event, Scheme, Signal, PATIENCE,
};

const LEASE: Duration = Duration::from_secs(1);

// ---- waiters that are no more ----------------------------------------------------------------

#[test]
fn a_stopped_waiter_keeps_its_place_and_costs_one_lease() {
    fair_test(|| {
        let daemon = Daemon::start(&[]);
        let mut holder = daemon.connect();
        let held = holder.acquire("k", 0);
        let stopped = Puppet::start(&daemon);
        stopped.send(0, "l", "k", "30 1");
        daemon.wait_for_waiters("k", 1);
        let mut next = daemon.connect();
        next.send("l\nk\n30\n");
        daemon.wait_for_waiters("k", 2);
        stopped.signal(Signal::STOP);

        let began = Instant::now();
        assert_eq!(holder.request("r", "k", &held.token), "ok");
        let token = granted(&mut next);

        let cost = began.elapsed();
        assert_eq!(
            fence(&token),
            fence(&held.token) + 2,
            "the stopped one had its turn"
        );
        assert!(cost >= LEASE, "the lease was cut short: {cost:?}");
        in_time!(
            cost < LEASE + Duration::from_secs(1),
            "its lease was not all it cost: {cost:?}"
        );
    });
}

#[test]
fn dead_waiters_cost_no_processor_time() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let doomed = Puppet::start(&daemon);
    for connection in 0..50 {
        doomed.send(connection, "l", "k", "30");
    }
    daemon.wait_for_waiters("k", 50);

    doomed.kill();
    daemon.wait_for_waiters("k", 0);

    come_to_rest(&[daemon.pid()], Duration::from_millis(90));
}

#[test]
fn half_of_a_thousand_waiters_lost_leaves_the_order() {
    const COUNT: usize = 1000;
    // The server inherits it.
    raise_our_own_limit();
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let held = holder.acquire_for("k", 0, 600);
    let puppets: Vec<Puppet> = (0..4).map(|_| Puppet::start(&daemon)).collect();
    let owner = |place: usize| &puppets[place % puppets.len()];

    // The answer to each is awaited before the next asks, in whichever process that is.
    for place in 0..COUNT {
        owner(place).send(place, "e", "k", "");
        assert_eq!(owner(place).line(place), "queued");
    }
    // One in four dies with its process, one in four hangs up by itself.
    puppets[1].kill();
    for place in (3..COUNT).step_by(4) {
        puppets[3].close(place);
    }
    daemon.wait_for_waiters("k", COUNT as u64 / 2);
    let rest: Vec<usize> = (0..COUNT).filter(|place| place % 2 == 0).collect();
    for &place in &rest {
        owner(place).send(place, "w", "k", "600");
    }
    assert_eq!(holder.request("r", "k", &held.token), "ok");

    let mut last = fence(&held.token);
    for &place in &rest {
        let reply = owner(place).line(place);
        let grant = parse_grant(&reply, "ok").unwrap_or_else(|| panic!("place {place}: {reply}"));
        // Not only ascending: the next fence, so that none was spent on one of the lost.
        assert_eq!(fence(&grant.token), last + 1, "place {place} was not next");
        last = fence(&grant.token);
        owner(place).send(place, "r", "k", &grant.token);
        assert_eq!(owner(place).line(place), "ok");
    }
    assert_free(&daemon, "k");
}

// ---- holders that are no more ----------------------------------------------------------------

#[test]
fn an_expired_lease_passes_the_key_on_at_once_and_never_early() {
    let daemon = Daemon::start(&[]);
    let worst = on_time(
        Duration::from_millis(5),
        "hand-over after the end of a lease",
        || {
            thread::scope(|scope| {
                let one = |key: String| {
                    let (mut holder, mut waiter) = (daemon.connect(), daemon.connect());
                    let asked = Instant::now();
                    // The server may not have noticed yet that the last round is over.
                    holder.acquire_for(&key, 30, 1);
                    let told = Instant::now();
                    waiter.acquire(&key, 30);
                    let granted = Instant::now();
                    // The lease began somewhere between the question and the answer.
                    assert!(granted >= asked + LEASE, "{key} passed on early");
                    granted.saturating_duration_since(told + LEASE)
                };
                let keys = (0..20).map(|index| format!("k{index}"));
                let threads: Vec<_> = keys.map(|key| scope.spawn(move || one(key))).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .max()
                    .expect("there are some")
            })
        },
    );
    println!("passed on {worst:?} after the end of the lease at most");
}

/// Its hang-up arrives just before the release, and the server may notice it only later.
#[test]
fn without_auto_release_a_grant_passes_a_dead_waiter_by() {
    const ROUNDS: usize = 60;
    let keeping = ["--no-auto-release-on-disconnect"];
    let daemon = Daemon::start_directly(Scheme::Plain, &keeping);
    let (mut holder, mut next) = (daemon.connect(), daemon.connect());
    for round in 0..ROUNDS {
        let held = holder.acquire_for("k", 10, 600);
        let mut quitter = daemon.connect();
        quitter.send("l\nk\n600 600\n");
        daemon.wait_for_waiters("k", 1);
        match round % 2 {
            // At once, whatever copies of the socket other threads' processes have.
            0 => quitter.half_close(),
            _ => quitter.reset(),
        }
        assert_eq!(holder.request("r", "k", &held.token), "ok");
        let grant = next.acquire_for("k", 10, 600);
        assert_eq!(next.request("r", "k", &grant.token), "ok");
    }
}

// ---- timeouts --------------------------------------------------------------------------------

#[test]
fn tries_and_waits_against_quick_releases_lose_no_wake_up() {
    let daemon = Daemon::start(&[]);
    let (inside, grant_count, stop) = (
        AtomicBool::new(false),
        AtomicU64::new(0),
        AtomicBool::new(false),
    );
    thread::scope(|scope| {
        let _end = AtTheEnd(&stop);
        for number in 0..8 {
            let mut client = daemon.connect();
            let (inside, grant_count, stop) = (&inside, &grant_count, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    // No client keeps the key for long. A waiter whose wake-up was lost would
                    // find its grant, or nothing, at the end of its minute: long after this test
                    // has lost its patience.
                    let reply = client.request("l", "k", if number % 2 == 0 { "0" } else { "60" });
                    let took = began.elapsed();
                    let Some(grant) = parse_grant(&reply, "ok") else {
                        assert_eq!(reply, "timeout");
                        assert!(number % 2 == 0, "a waiter timed out after {took:?}");
                        continue;
                    };
                    assert!(!inside.swap(true, Ordering::SeqCst), "two hold k");
                    grant_count.fetch_add(1, Ordering::Relaxed);
                    inside.store(false, Ordering::SeqCst);
                    assert_eq!(client.request("r", "k", &grant.token), "ok");
                }
            });
        }
        thread::sleep(Duration::from_secs(2));
        let deadline = Deadline::after(6 * PATIENCE);
        while grant_count.load(Ordering::Relaxed) <= 100 && !deadline.is_over() {
            thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{grant_count:?} grants");
    assert!(grant_count.into_inner() > 100);
    assert_free(&daemon, "k");
}

/// Waits of a second begin together, and the key comes free when they end: a grant that
/// meets a timeout must go to somebody, and be told to him, or to the next.
#[test]
fn grants_that_meet_timeouts_are_never_lost() {
    let daemon = Daemon::start(&[]);
    // More waiters are a longer chain of grants, which meets more timeouts.
    let (waiter_count, round_count) = amount((3, 3), (100, 840));
    raise_our_own_limit();
    let granted_count = AtomicU64::new(0);
    thread::scope(|scope| {
        for index in 0_u64..24 {
            let (daemon, granted_count) = (&daemon, &granted_count);
            scope.spawn(move || {
                let key = format!("k{index}");
                let mut holder = daemon.connect();
                let waiters = (0..waiter_count).map(|_| daemon.connect());
                let mut waiters: Vec<Client> = waiters.collect();
                for round in 0..round_count {
                    let held = holder.acquire(&key, 0);
                    waiters
                        .iter_mut()
                        .for_each(|waiter| waiter.send(&format!("l\n{key}\n1\n")));
                    // From 1.5 ms before the second is over to 1.5 ms after it, in small steps.
                    let step = Duration::from_micros((index * 3 + round % 3) * 42);
                    thread::sleep(LEASE - Duration::from_micros(1500) + step);
                    assert_eq!(holder.request("r", &key, &held.token), "ok");
                    for waiter in &mut waiters {
                        // A crowd may have to wait long for a processor, but not for ever.
                        let reply = waiter.try_line(6 * PATIENCE).expect("a reply");
                        if let Some(grant) = parse_grant(&reply, "ok") {
                            granted_count.fetch_add(1, Ordering::Relaxed);
                            assert_eq!(waiter.request("r", &key, &grant.token), "ok");
                        } else {
                            assert_eq!(reply, "timeout");
                        }
                    }
                    // Free at once: nothing was granted to one that has given up.
                }
                assert_free(daemon, &key);
            });
        }
    });
    println!(
        "{granted_count:?} of {} waits were granted",
        24 * waiter_count * round_count
    );
}

// ---- clients in the way ----------------------------------------------------------------------

#[test]
fn a_hundred_stopped_clients_do_not_hold_up_a_hundred_others() {
    let daemon = Daemon::start(&[]);
    let stopped = Puppet::start(&daemon);
    for connection in 0..100 {
        // Half of them hold a key, half of them wait for one that is given to them when stopped.
        let key = if connection % 2 == 0 {
            format!("held{connection}")
        } else {
            "gate".to_owned()
        };
        stopped.send(connection, "l", &key, "30 30");
    }
    daemon.wait_for_waiters("gate", 49);
    stopped.signal(Signal::STOP);

    on_time(
        Duration::from_millis(50),
        "an acquire beside stopped clients",
        || {
            let mut latencies = Vec::new();
            let mut clients: Vec<Client> = (0..100).map(|_| daemon.connect()).collect();
            for _ in 0..10 {
                for (index, client) in clients.iter_mut().enumerate() {
                    let began = Instant::now();
                    let grant = client.acquire(&format!("free{index}"), 1);
                    assert_eq!(
                        client.request("r", &format!("free{index}"), &grant.token),
                        "ok"
                    );
                    latencies.push(began.elapsed());
                }
            }
            latencies.sort_unstable();
            latencies[latencies.len() * 99 / 100]
        },
    );
}

#[test]
fn lines_that_trickle_in_are_cut_off_at_the_read_timeout() {
    fair_test(|| {
        let daemon = Daemon::start(&["--read-timeout", "1"]);
        raise_our_own_limit();
        let mut slow: Vec<Client> = (0..amount(100, 2000)).map(|_| daemon.connect()).collect();
        let began = Instant::now();
        let mut first = daemon.connect();
        let mut cut_off_after = None;
        let mut worst = Duration::ZERO;
        // Each byte is progress, but the deadline is that of the whole line.
        while began.elapsed() < Duration::from_millis(2000) || cut_off_after.is_none() {
            in_time!(
                began.elapsed() < Duration::from_secs(5),
                "the bytes move the deadline"
            );
            for client in &mut slow {
                let _ = client.try_send(b"x"); // the server may have hung up by now
            }
            let asked = Instant::now();
            let mut fresh = daemon.connect();
            fresh.acquire("k", 5);
            worst = worst.max(asked.elapsed());
            drop(fresh);
            let _ = first.try_send(b"x");
            if cut_off_after.is_none() && first.next_event(Duration::ZERO) != Event::Nothing {
                cut_off_after = Some(began.elapsed());
            }
            thread::sleep(Duration::from_millis(100));
        }
        let is_early = |after: &Duration| *after < Duration::from_millis(900);
        assert!(
            !cut_off_after.as_ref().is_some_and(is_early),
            "{cut_off_after:?}: early"
        );
        println!("a new client had its lock within {worst:?}");
        in_time!(
            worst < Duration::from_secs(1),
            "a new client had to wait for {worst:?}"
        );
        for client in &mut slow {
            // A byte sent after the server's close may have turned the end of its stream into a
            // reset, and taken the reply with it.
            match client.next_event(PATIENCE) {
                Event::Line(line) => assert_eq!(line, b"error"),
                Event::Reset => continue,
                other => panic!(
                    "after the read timeout came {}",
                    crate::support::described(&other)
                ),
            }
            let end = client.next_event(PATIENCE);
            assert!(
                matches!(end, Event::Eof | Event::Reset),
                "then came {}",
                crate::support::described(&end)
            );
        }
    });
}

// ---- helpers ---------------------------------------------------------------------------------

/// Reads the grant of an `l` or `w` that was sent before, and gives its token.
fn granted(client: &mut Client) -> String {
    let reply = client.line();
    parse_grant(&reply, "ok")
        .unwrap_or_else(|| panic!("no grant: {reply}"))
        .token
}

fn assert_free(daemon: &Daemon, key: &str) {
    let stats = daemon.stats();
    let listed = |list: &str| {
        stats[list]
            .as_array()
            .is_some_and(|entries| entries.iter().any(|entry| entry["key"] == key))
    };
    assert!(
        !listed("locks") && !listed("semaphores"),
        "{key} is still in use: {stats}"
    );
    let mut client = daemon.connect();
    let grant = client.acquire(key, 0);
    assert_eq!(client.request("r", key, &grant.token), "ok");
}

/// Insists that what `measure` gives is below ten times `promise`. A machine that keeps a thread
/// waiting for longer than the promise itself is too late to judge.
fn on_time(promise: Duration, what: &str, mut measure: impl FnMut() -> Duration) -> Duration {
    let took = fairly_within(promise, || match measure() {
        took if took < promise * 10 => Ok(took),
        took => Err(took),
    });
    println!("{what}: {took:?}");
    took.unwrap_or_else(|took| panic!("{what} took {took:?}; promised are {promise:?}"))
}

// ---- clients in another process --------------------------------------------------------------

/// Another process, with connections of its own that the test moves from here: it can be killed
/// and stopped as no thread can.
///
/// It is this test program, run for [`the_other_process`] alone. That reads one command per line
/// on stdin; its answers are on stderr, where the test harness prints nothing.
struct Puppet {
    child: RefCell<Child>,
    answers: RefCell<Lines<BufReader<ChildStderr>>>,
}

const PUPPET_OF: &str = "PUPPET_OF";

impl Puppet {
    fn start(daemon: &Daemon) -> Puppet {
        let mut child = Command::new(std::env::current_exe().expect("a test knows its own path"))
            .args(["--exact", "handover::the_other_process", "--nocapture"])
            .env(PUPPET_OF, daemon.addr().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a test can run itself");
        let answers = BufReader::new(child.stderr.take().expect("stderr is piped")).lines();
        Puppet {
            child: RefCell::new(child),
            answers: RefCell::new(answers),
        }
    }

    /// Sends a request over connection number `connection`, opening that first if need be.
    fn send(&self, connection: usize, command: &str, key: &str, argument: &str) {
        self.tell(&format!("send {connection} {command}|{key}|{argument}|"));
    }

    /// The next reply to connection number `connection`.
    fn line(&self, connection: usize) -> String {
        self.tell(&format!("line {connection}"));
        let answer = self.answers.borrow_mut().next();
        answer
            .expect("the puppet answers before it ends")
            .expect("its answer is UTF-8")
    }

    fn close(&self, connection: usize) {
        self.tell(&format!("close {connection}"));
    }

    fn kill(&self) {
        let mut child = self.child.borrow_mut();
        child.kill().expect("it is our child");
        child.wait().expect("it is our child");
    }

    fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_child(&self.child.borrow());
        rustix::process::kill_process(pid, signal).expect("it is our child");
    }

    fn tell(&self, command: &str) {
        let mut child = self.child.borrow_mut();
        let stdin = child.stdin.as_mut().expect("stdin is piped");
        writeln!(stdin, "{command}").expect("the puppet listens");
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let child = self.child.get_mut();
        // SIGKILL ends a stopped process too. Both fail only if it is gone, which is as good.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Not a claim: the far side of [`Puppet`]. Does nothing when it is run as a test.
#[test]
fn the_other_process() {
    let Ok(addr) = std::env::var(PUPPET_OF) else {
        return;
    };
    let addr: SocketAddr = addr.parse().expect("the puppeteer gives an address");
    let mut clients: HashMap<String, Client> = HashMap::new();
    for command in std::io::stdin().lines() {
        let command = command.expect("commands are UTF-8");
        let mut words = command.splitn(3, ' ');
        let (verb, connection) = (
            words.next().expect("a verb"),
            words.next().expect("a number"),
        );
        match verb {
            "send" => {
                let frame = words.next().expect("a frame").replace('|', "\n");
                clients
                    .entry(connection.to_owned())
                    .or_insert_with(|| Client::tcp(addr))
                    .send(&frame);
            }
            "line" => eprintln!(
                "{}",
                clients
                    .get_mut(connection)
                    .expect("it was used before")
                    .line()
            ),
            "close" => drop(clients.remove(connection)),
            _ => panic!("unknown command {command:?}"),
        }
    }
}
