//! A server with a state file is killed at random moments under load, and started at once: no key
//! gets two clients, and none of them loses its lock.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use latchd::client::{Address, Client, Guard};

use crate::http_session::HttpSession;
use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::latch::{signal, Latch};
use crate::support::random::{self, Random};
use crate::support::silent::free_addr;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{
    eventually, fence, parse_grant, program, Client as Raw, Daemon, Event, Signal, PATIENCE,
};

/// For how long a server settles, in seconds.
const SETTLE: &str = "5";

/// The keys, with their slots.
const KEYS: [(&str, u32); 3] = [("a", 1), ("b", 1), ("c", 2)];

/// The leases that clients ask for, in seconds. The state file must have those of the last key.
const LEASES: [u64; 3] = [5, 5, 8];

/// How many clients take turns at the keys.
const CLIENTS: u64 = 8;

/// How many clients speak the protocol themselves, and lose their connections. Half of the time
/// they do not say that they can adopt.
const CUT_CLIENTS: u64 = 4;

/// How many clients use sessions over HTTP.
const HTTP_CLIENTS: u64 = 2;

/// How many commands run under `latch run` all the time.
const JOBS: usize = 4;

/// When a server is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Start,
    Settling,
    Settled,
    /// While it writes that a grant is kept.
    Writing,
    /// While another client releases or breaks a grant.
    OthersEnd,
    /// While a client that can come back loses its connection.
    Cut,
    /// While it drains, or writes the file for the next server.
    End,
    /// It is not: it ends in order before it has settled.
    OrderlyEnd,
}

const MOMENTS: [Moment; 8] = [
    Moment::Start,
    Moment::OthersEnd,
    Moment::End,
    Moment::Settling,
    Moment::Writing,
    Moment::OrderlyEnd,
    Moment::Cut,
    Moment::Settled,
];

/// A time in which a client surely held a slot of a key.
struct Hold {
    index: usize,
    fence: u64,
    begin: Instant,
    end: Instant,
}

#[test]
fn kills_under_load_cost_no_client_its_lock() {
    fair_test(|| rage(amount(MOMENTS.len(), 60)));
}

#[test]
#[ignore = "long: ten minutes"]
fn two_hundred_kills_under_load_cost_no_client_its_lock() {
    fair_test(|| rage(200));
}

fn rage(kill_count: usize) {
    let directory = tempfile::tempdir().expect("there is room");
    let (port, door) = (free_addr().port(), free_addr());
    let seed = random::seed();
    let mut random = Random::new(seed);
    let mut server = start(directory.path(), port, door);
    let house = House::new(directory.path(), port, door);
    eventually(PATIENCE, "the server is ready", || house.raw().is_some());
    let mut jobs: Vec<Latch> = (0..JOBS).map(|number| house.start_job(number)).collect();
    eventually(PATIENCE, "the jobs hold their locks", || {
        let stats = house.raw().expect("it runs").stats();
        stats["locks"].as_array().map(Vec::len) >= Some(JOBS)
    });
    thread::scope(|scope| {
        let _end = AtTheEnd(&house.is_over);
        for client in 0..CLIENTS + CUT_CLIENTS + HTTP_CLIENTS {
            let (house, random) = (&house, Random::new(seed ^ (client + 1)));
            scope.spawn(move || match client {
                0..CLIENTS => house.take_turns(random),
                client if client < CLIENTS + CUT_CLIENTS => {
                    house.take_turns_and_lose_connections(random);
                }
                _ => house.take_turns_over_http(random),
            });
        }
        scope.spawn(|| house.keep_grants());
        scope.spawn(|| house.hold_long());
        for (kill, moment) in MOMENTS.iter().cycle().take(kill_count).enumerate() {
            house.end(&server, *moment, &mut random);
            let log = server.log();
            server = start(directory.path(), port, door);
            for job in &mut jobs {
                if let Some(status) = job.try_wait().expect("a child") {
                    house.note_loss(format!(
                        "kill {kill}, {moment:?}: a job ended with {status}: {log}"
                    ));
                }
            }
        }
        let before = house.turn_count();
        eventually(4 * PATIENCE, "clients go on", || {
            house.turn_count() > before + 20
        });
    });
    house.check();
    let (turns, seen) = (house.turn_count(), house.seen.lock().expect("no panic"));
    println!("{turns} turns, {kill_count} kills: {seen:?}");
    drop(seen);
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
fn start(directory: &Path, port: u16, door: SocketAddr) -> Daemon {
    let mut command = Daemon::command();
    command
        .args(["--port", &port.to_string(), "--settle", SETTLE])
        .args(["--default-lease-ttl", "5", "--shutdown-timeout", "2"])
        .args(["--http", &door.to_string(), "--http-grants"])
        .arg("--state-file")
        .arg(directory.join("state"))
        .arg("--unix")
        .arg(directory.join("socket"));
    Daemon::from_command(command)
}

/// The clients, and what they saw.
struct House {
    port: u16,
    /// Where clients over HTTP ask.
    door: SocketAddr,
    /// Where they note their sessions.
    notes: PathBuf,
    /// Where operators ask.
    socket: PathBuf,
    client: Client,
    holds: Mutex<Vec<Hold>>,
    /// The keys and tokens of kept grants, which nobody ends.
    kept: Mutex<Vec<(String, String)>>,
    /// What was lost. On a machine that is late by more than a lease, that is no fault.
    lost: Mutex<Vec<String>>,
    /// What a client is to do just before a kill, and where it tells that it begins.
    strike: Mutex<Option<(Moment, SyncSender<()>)>>,
    /// How often what was seen.
    seen: Mutex<BTreeMap<&'static str, usize>>,
    is_over: AtomicBool,
}

impl House {
    fn new(directory: &Path, port: u16, door: SocketAddr) -> House {
        let address: Address = format!("127.0.0.1:{port}").parse().expect("an address");
        House {
            port,
            door,
            notes: directory.join("sessions"),
            socket: directory.join("socket"),
            client: Client::new([address]),
            holds: Mutex::default(),
            kept: Mutex::default(),
            lost: Mutex::default(),
            strike: Mutex::default(),
            seen: Mutex::default(),
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

    fn note_seen(&self, what: &'static str) {
        *self.seen.lock().expect("no panic").entry(what).or_default() += 1;
    }

    /// Ends a server at such a moment.
    fn end(&self, server: &Daemon, moment: Moment, random: &mut Random) {
        let pause = |milliseconds| thread::sleep(Duration::from_millis(milliseconds));
        match moment {
            Moment::Start => pause(random.below(40)),
            Moment::Settling => pause(random.below(2000)),
            Moment::Settled => pause(6000 + random.below(1000)),
            Moment::Writing | Moment::OthersEnd | Moment::Cut => {
                pause(random.below(2000));
                let (sender, begins) = sync_channel(1);
                *self.strike.lock().expect("no panic") = Some((moment, sender));
                let struck = begins.recv_timeout(PATIENCE);
                struck.unwrap_or_else(|_| panic!("no client came to {moment:?}"));
                pause(random.below(5));
            }
            Moment::End => {
                pause(random.below(2000));
                server.signal(Signal::TERM);
                // Waiters get a tenth of a second for their replies. Then comes the writing.
                pause(80 + random.below(60));
            }
            Moment::OrderlyEnd => {
                pause(random.below(1000));
                server.signal(Signal::TERM);
                server.wait_exit(PATIENCE).expect("it ends in order");
            }
        }
        server.signal(Signal::KILL);
        server.wait_exit(PATIENCE).expect("it ends");
        let log = server.log();
        for (line, what) in [
            ("reason=not-over", "the rest of a settling"),
            ("reason=crash", "settling"),
            ("handed-over", "orderly ends"),
        ] {
            if log.contains(line) {
                self.note_seen(what);
            }
        }
    }

    /// Where to tell that the client is about to do this just before a kill, if it is to.
    fn take_strike(&self, moment: Moment) -> Option<SyncSender<()>> {
        let mut strike = self.strike.lock().expect("no panic");
        let taken = strike.take_if(|(wanted, _)| *wanted == moment);
        taken.map(|(_, sender)| sender)
    }

    /// A connection, if the server runs.
    fn raw(&self) -> Option<Raw> {
        Raw::try_tcp(([127, 0, 0, 1], self.port).into())
    }

    /// The reply of the server; `None` if it ends before.
    fn asked(&self, command: &str, key: &str, argument: &str) -> Option<String> {
        ask(&mut self.raw()?, command, key, argument)
    }

    /// What the server says to an operator that breaks a grant; `None` if it ends before.
    fn broken(&self, key: &str, fence: u64) -> Option<String> {
        let mut operator = Raw::try_unix(&self.socket)?;
        let reply = ask(&mut operator, "break", key, &fence.to_string());
        assert_ne!(reply.as_deref(), Some("error_auth"));
        reply
    }

    fn start_job(&self, number: usize) -> Latch {
        let mut command = Command::new(program("latch"));
        let key = format!("job-{number}");
        // The last one runs others under its own lock, and ends if one of them waits for it.
        let job = if number + 1 == JOBS {
            r#"while :; do "$0" run "$1" --nested --timeout 10 -- sleep .1 || exit; done"#
        } else {
            "exec sleep 3600"
        };
        command
            .args(["run", &key, "--lease", "5"])
            .args(["--", "sh", "-c", job])
            .arg(program("latch"))
            .arg(&key)
            .env("LATCH_SERVER", format!("127.0.0.1:{}", self.port))
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
        let mut strike = None;
        while strike.is_none() && Instant::now() < until {
            if let Some(loss) = guard.loss() {
                return self.note_loss(format!("{key}: {loss}"));
            }
            thread::sleep(Duration::from_millis(5));
            strike = self.take_strike(Moment::OthersEnd);
        }
        self.note_hold(index, guard.fence(), begin);
        if strike.is_none() && !random.one_in(6) {
            if let Err(error) = guard.release() {
                self.note_loss(format!("{key}: {error}"));
            }
            return;
        }
        tell(strike);
        let (by, ended) = if random.one_in(2) {
            (
                "grants that operators broke",
                self.broken(key, guard.fence()),
            )
        } else {
            let command = if KEYS[index].1 == 1 { "r" } else { "sr" };
            let token = guard.token().to_string();
            (
                "grants that others released",
                self.asked(command, key, &token),
            )
        };
        if ended.as_deref() == Some("ok") {
            self.note_seen(by);
            // However often the server is killed, it does not take the dead token again.
            eventually(4 * PATIENCE, "the client loses its lock", || {
                guard.loss().is_some()
            });
        }
    }

    /// Notes that a client has surely held a slot since `begin`.
    fn note_hold(&self, index: usize, fence: u64, begin: Instant) {
        let end = Instant::now();
        self.holds.lock().expect("no panic").push(Hold {
            index,
            fence,
            begin,
            end,
        });
    }

    fn take_turns_and_lose_connections(&self, mut random: Random) {
        while !self.is_over() {
            if self.hold_and_lose_connection(&mut random).is_none() {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Holds a slot for a while over one connection, and if that is cut, over another one. Returns
    /// early if the server ends.
    fn hold_and_lose_connection(&self, random: &mut Random) -> Option<()> {
        let index = usize::try_from(random.below(KEYS.len() as u64)).expect("a few");
        let ((key, limit), lease) = (KEYS[index], LEASES[index]);
        let (acquire, release, terms) = match limit {
            1 => ("l", "r", String::new()),
            limit => ("sl", "sr", format!(" {limit}")),
        };
        let mut raw = self.raw()?;
        let can_adopt = random.one_in(2);
        if can_adopt {
            ask(&mut raw, "hello", "_", "adopt")?;
        }
        let asked_at = Instant::now();
        let reply = ask(&mut raw, acquire, key, &format!("2{terms} {lease}"))?;
        let Some(grant) = parse_grant(&reply, "ok") else {
            return Some(());
        };
        let (begin, fence) = (Instant::now(), fence(&grant.token));
        let until = begin + Duration::from_millis(random.below(400));
        let mut strike = None;
        while strike.is_none() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
            strike = self.take_strike(Moment::Cut);
        }
        self.note_hold(index, fence, begin);
        if strike.is_none() && !random.one_in(6) {
            ask(&mut raw, release, key, &grant.token)?;
            return Some(());
        }
        tell(strike);
        drop(raw);
        // What the server had not noticed, or not told another client, is there again.
        let words = match limit {
            1 => String::new(),
            limit => format!(" sem={limit}"),
        };
        while asked_at.elapsed() < Duration::from_secs(lease) && !self.is_over() {
            let Some(mut raw) = self.raw() else {
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            let adopted = ask(
                &mut raw,
                "adopt",
                key,
                &format!("{} {lease}{words}", grant.token),
            );
            match adopted.as_deref() {
                Some("error") => {
                    self.note_seen("cut grants that were lost");
                    break;
                }
                Some(_) => {
                    let begin = Instant::now();
                    self.note_seen(if can_adopt {
                        "cut grants that were adopted"
                    } else {
                        "cut grants that were adopted without a hello"
                    });
                    thread::sleep(Duration::from_millis(random.below(200)));
                    self.note_hold(index, fence, begin);
                    ask(&mut raw, release, key, &grant.token)?;
                    break;
                }
                None => {}
            }
        }
        Some(())
    }

    /// Takes turns at the locks in sessions over HTTP, which end with their server.
    fn take_turns_over_http(&self, mut random: Random) {
        while !self.is_over() {
            let opened = HttpSession::open(self.door, &self.notes);
            let Ok(session) = opened else {
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            while !self.is_over() && self.hold_over_http(&session, &mut random).is_some() {}
        }
    }

    /// Holds a lock for a while in a session. Returns early if the server ends.
    fn hold_over_http(&self, session: &HttpSession, random: &mut Random) -> Option<()> {
        let index = usize::try_from(random.below(2)).expect("a few");
        let (path, wait) = (
            format!("/v1/locks/{}", KEYS[index].0),
            Duration::from_secs(2),
        );
        let claim = format!(
            "{{\"acquire_timeout_s\":2,\"lease_ttl_s\":{}}}",
            LEASES[index]
        );
        let (status, answer) = session.post(&path, &claim, wait, None).ok()?;
        let Some(token) = answer["token"].as_str().filter(|_| status == 200) else {
            return (status == 200).then_some(());
        };
        let begin = Instant::now();
        thread::sleep(Duration::from_millis(random.below(200)));
        self.note_hold(index, fence(token), begin);
        self.note_seen("turns over HTTP");
        let release = format!("{{\"token\":\"{token}\"}}");
        let released = session.post(&(path + "/release"), &release, Duration::ZERO, None);
        released.ok().filter(|(status, _)| *status < 300).map(drop)
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
                tell(self.take_strike(Moment::Writing));
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
            // A client that came back has its old one.
            let is_rising = of_key.is_sorted_by(|a, b| a.fence <= b.fence);
            assert!(*limit > 1 || is_rising, "the fences of {key} do not rise");
        }
        for (key, token) in &*self.kept.lock().expect("no panic") {
            let renewed = self.asked("n", key, token).expect("the server runs");
            assert!(renewed.starts_with("ok "), "{key}: {renewed}");
        }
    }
}

/// Tells that the client begins now with what it is to do before a kill, if it is to.
fn tell(strike: Option<SyncSender<()>>) {
    if let Some(sender) = strike {
        sender.send(()).expect("the end of the server waits for it");
    }
}

/// The reply of the server; `None` if the connection ends before.
fn ask(raw: &mut Raw, command: &str, key: &str, argument: &str) -> Option<String> {
    let request = format!("{command}\n{key}\n{argument}\n");
    raw.try_send(request.as_bytes()).ok()?;
    match raw.next_event(PATIENCE) {
        Event::Line(line) => Some(String::from_utf8(line).expect("UTF-8")),
        Event::Nothing => panic!("no reply to {command}"),
        _ => None,
    }
}
