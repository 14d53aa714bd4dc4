//! A server with a state file is killed at random moments under load, and started at once: no key
//! gets two clients, and none of them loses its lock.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use latchd::client::{Address, Client, Guard};

use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::latch::{signal, Latch};
use crate::support::random::{self, Random};
use crate::support::silent::free_addr;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, program, Client as Raw, Daemon, Event, Signal, PATIENCE};

/// For how long a server settles, in seconds.
const SETTLE: &str = "5";

/// The keys, with their slots.
const KEYS: [(&str, u32); 3] = [("a", 1), ("b", 1), ("c", 2)];

/// The leases that clients ask for, in seconds. The state file must have those of the last key.
const LEASES: [u64; 3] = [5, 5, 8];

/// How many clients take turns at the keys.
const CLIENTS: u64 = 8;

/// How many commands run under `latch run` all the time.
const JOBS: usize = 3;

/// A time in which a client surely held a slot of a key.
struct Hold {
    index: usize,
    fence: u64,
    begin: Instant,
    end: Instant,
}

#[test]
fn kills_under_load_cost_no_client_its_lock() {
    fair_test(|| rage(amount(5, 50)));
}

#[test]
#[ignore = "long: ten minutes"]
fn two_hundred_kills_under_load_cost_no_client_its_lock() {
    fair_test(|| rage(200));
}

fn rage(kill_count: usize) {
    let directory = tempfile::tempdir().expect("there is room");
    let port = free_addr().port();
    let seed = random::seed();
    let mut random = Random::new(seed);
    let mut server = start(directory.path(), port);
    let house = House::new(port);
    eventually(PATIENCE, "the server is ready", || house.raw().is_some());
    let mut jobs: Vec<Latch> = (0..JOBS).map(|number| house.start_job(number)).collect();
    eventually(PATIENCE, "the jobs hold their locks", || {
        let stats = house.raw().expect("it runs").stats();
        stats["locks"].as_array().map(Vec::len) >= Some(JOBS)
    });
    thread::scope(|scope| {
        let _end = AtTheEnd(&house.is_over);
        for client in 0..CLIENTS {
            let (house, random) = (&house, Random::new(seed ^ (client + 1)));
            scope.spawn(move || house.take_turns(random));
        }
        scope.spawn(|| house.keep_grants());
        scope.spawn(|| house.hold_long());
        for kill in 0..kill_count {
            // In the start, while it settles, or after that.
            let pause = match random.below(8) {
                0 | 1 => random.below(40),
                2..=5 => random.below(2000),
                _ => 6000 + random.below(1000),
            };
            thread::sleep(Duration::from_millis(pause));
            if random.one_in(4) {
                // It is writing its file, or has just ended.
                server.signal(Signal::TERM);
                thread::sleep(Duration::from_millis(random.below(30)));
            }
            server.signal(Signal::KILL);
            server.wait_exit(PATIENCE).expect("it ends");
            let log = server.log();
            server = start(directory.path(), port);
            for job in &mut jobs {
                if let Some(status) = job.try_wait().expect("a child") {
                    house.note_loss(format!("kill {kill}: a job ended with {status}: {log}"));
                }
            }
        }
        let before = house.turn_count();
        eventually(4 * PATIENCE, "clients go on", || {
            house.turn_count() > before + 20
        });
    });
    house.check();
    println!("{} turns, {kill_count} kills", house.turn_count());
    for job in &mut jobs {
        match job.try_wait().expect("a child") {
            Some(status) => house.note_loss(format!("a job ended with {status}")),
            None => signal(job, Signal::TERM),
        }
    }
    let lost = house.lost.into_inner().expect("no panic");
    in_time!(lost.is_empty(), "{}", lost.join("\n"));
}

/// Starts a server, which may not be ready yet.
fn start(directory: &Path, port: u16) -> Daemon {
    let mut command = Daemon::command();
    command
        .args(["--port", &port.to_string(), "--settle", SETTLE])
        .args(["--default-lease-ttl", "5", "--shutdown-timeout", "2"])
        .arg("--state-file")
        .arg(directory.join("state"));
    Daemon::from_command(command)
}

/// The clients, and what they saw.
struct House {
    port: u16,
    client: Client,
    holds: Mutex<Vec<Hold>>,
    /// The keys and tokens of kept grants, which nobody ends.
    kept: Mutex<Vec<(String, String)>>,
    /// What was lost. On a machine that is late by more than a lease, that is no fault.
    lost: Mutex<Vec<String>>,
    is_over: AtomicBool,
}

impl House {
    fn new(port: u16) -> House {
        let address: Address = format!("127.0.0.1:{port}").parse().expect("an address");
        House {
            port,
            client: Client::new([address]),
            holds: Mutex::default(),
            kept: Mutex::default(),
            lost: Mutex::default(),
            is_over: AtomicBool::new(false),
        }
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn note_loss(&self, what: String) {
        self.lost.lock().expect("no panic").push(what);
    }

    fn turn_count(&self) -> usize {
        self.holds.lock().expect("no panic").len()
    }

    /// A connection, if the server runs.
    fn raw(&self) -> Option<Raw> {
        Raw::try_tcp(([127, 0, 0, 1], self.port).into())
    }

    /// The reply of the server; `None` if it ends before.
    fn asked(&self, command: &str, key: &str, argument: &str) -> Option<String> {
        let mut raw = self.raw()?;
        let request = format!("{command}\n{key}\n{argument}\n");
        raw.try_send(request.as_bytes()).ok()?;
        match raw.next_event(PATIENCE) {
            Event::Line(line) => Some(String::from_utf8(line).expect("UTF-8")),
            Event::Nothing => panic!("no reply to {command}"),
            _ => None,
        }
    }

    fn start_job(&self, number: usize) -> Latch {
        let mut command = Command::new(program("latch"));
        command
            .args(["run", &format!("job-{number}"), "--lease", "5"])
            .args(["--server", &format!("127.0.0.1:{}", self.port)])
            .args(["--", "sleep", "3600"])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        Latch::start(&mut command)
    }

    fn take_turns(&self, mut random: Random) {
        while !self.is_over() {
            let index = usize::try_from(random.below(KEYS.len() as u64)).expect("a few");
            let (key, limit) = KEYS[index];
            let lease = Duration::from_secs(LEASES[index]);
            let lock = match limit {
                1 => self.client.lock(key),
                limit => self.client.semaphore(key, limit),
            };
            // No wait is so long that it outlasts the test.
            match lock.lease(lease).acquire_within(Duration::from_secs(2)) {
                Ok(Some(guard)) => self.hold(index, guard, &mut random),
                Ok(None) => {}
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Holds a slot for a while, and ends that in one of several ways.
    fn hold(&self, index: usize, guard: Guard, random: &mut Random) {
        let (key, begin) = (KEYS[index].0, Instant::now());
        let until = begin + Duration::from_millis(random.below(400));
        while Instant::now() < until {
            if let Some(loss) = guard.loss() {
                return self.note_loss(format!("{key}: {loss}"));
            }
            thread::sleep(Duration::from_millis(5));
        }
        let end = Instant::now();
        self.holds.lock().expect("no panic").push(Hold {
            index,
            fence: guard.fence(),
            begin,
            end,
        });
        let command = match KEYS[index].1 {
            1 => "r",
            _ => "sr",
        };
        let ended = match random.below(12) {
            0 => self.asked(command, key, &guard.token().to_string()),
            1 => self.asked("break", key, &guard.fence().to_string()),
            _ => {
                if let Err(error) = guard.release() {
                    self.note_loss(format!("{key}: {error}"));
                }
                return;
            }
        };
        if ended.as_deref() == Some("ok") {
            // However often the server is killed, it does not take the dead token again.
            eventually(4 * PATIENCE, "the client loses its lock", || {
                guard.loss().is_some()
            });
        }
    }

    /// Has the server keep grants without a connection.
    fn keep_grants(&self) {
        for number in 0.. {
            if self.is_over() {
                break;
            }
            let key = format!("kept-{number}");
            let lock = self.client.lock(&key).lease(Duration::from_secs(5));
            let guard = lock.keepable().acquire_within(Duration::from_secs(2));
            if let Ok(Some(guard)) = guard {
                let kept = (key.clone(), guard.token().to_string());
                if guard.keep_for(Duration::from_secs(3600)).is_ok() {
                    self.kept.lock().expect("no panic").push(kept);
                }
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Holds a lock whose lease is far longer than a server settles.
    fn hold_long(&self) {
        let lock = self.client.lock("long").lease(Duration::from_secs(600));
        while !self.is_over() {
            let Ok(Some(guard)) = lock.acquire_within(Duration::from_secs(2)) else {
                continue;
            };
            while !self.is_over() {
                assert_eq!(guard.loss(), None, "the long one");
                thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Asserts that no key had more holders than slots, that fences rise, and that the last server
    /// has all kept grants.
    fn check(&self) {
        let mut holds = self.holds.lock().expect("no panic");
        holds.sort_by_key(|hold| hold.begin);
        for (index, (key, limit)) in KEYS.iter().enumerate() {
            let of_key: Vec<&Hold> = holds.iter().filter(|hold| hold.index == index).collect();
            for (at, hold) in of_key.iter().enumerate() {
                let others = of_key[..at].iter().filter(|it| it.end > hold.begin);
                assert!(
                    others.count() < *limit as usize,
                    "{key} has too many holders"
                );
            }
            let is_rising = of_key.is_sorted_by(|a, b| a.fence < b.fence);
            assert!(*limit > 1 || is_rising, "the fences of {key} do not rise");
        }
        for (key, token) in &*self.kept.lock().expect("no panic") {
            let renewed = self.asked("n", key, token).expect("the server runs");
            assert!(renewed.starts_with("ok "), "{key}: {renewed}");
        }
    }
}
