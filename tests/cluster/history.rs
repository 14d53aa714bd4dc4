//! Clients that believe in their locks to the last moment, while servers are told to stop, and
//! servers and members of etcd die, stand still and are cut off. What they believed is checked
//! afterwards.
//!
//! `LATCHD_HISTORY_S` says for how many seconds (40), `LATCHD_HISTORY_SEED` with which seed. With
//! `LATCHD_HISTORY_FAULT`, the servers have a planted fault, which is to be found.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use crate::house::{Etcd, Server, TAKE_OVER, TTL};
use crate::proxy::{Fate, Proxy};
use crate::support::at_the_end::AtTheEnd;
use crate::support::history::{now, History, Instant, Record, Reply, Request, Rule};
use crate::support::needs::{needs, Program};
use crate::support::random::{setting, Random};
use crate::support::silent::free_port;
use crate::support::{eventually, fence, Client, Event, Signal, PATIENCE};

/// How many slots a lock has.
const WHOLE: usize = 1 << 20;

/// The keys, with their limits, and the clients.
const KEYS: [(&str, usize); 10] = [
    ("a", 1),
    ("b", 1),
    ("c", 1),
    ("d", 1),
    ("e", 1),
    ("f", 1),
    ("g", 2),
    ("h", 2),
    ("i", 3),
    ("j", 3),
];
const CLIENTS: usize = 24;

/// Leases in seconds: shorter than a take-over, and longer.
const LEASES: [u64; 3] = [2, 4, 9];

/// What a client asks for.
#[derive(Clone, Copy, Debug)]
struct Claim {
    key: usize,
    /// How many slots of the key it takes.
    weight: usize,
    lease: Duration,
}

impl Claim {
    fn any(random: &mut Random) -> Claim {
        let key = random.below(KEYS.len() as u64) as usize;
        let lease = LEASES[random.below(LEASES.len() as u64) as usize];
        let weight = match KEYS[key].1 {
            1 if random.below(2) == 0 => 1,
            1 => WHOLE,
            limit => 1 + random.below(limit as u64) as usize,
        };
        Claim {
            key,
            weight,
            lease: Duration::from_secs(lease),
        }
    }

    /// What comes behind the timeout of a request.
    fn argument(&self) -> String {
        let lease = self.lease.as_secs();
        match (KEYS[self.key].1, self.weight) {
            (1, 1) => format!("{lease} shared"),
            (1, _) => format!("{lease}"),
            (limit, 1) => format!("{limit} {lease}"),
            (limit, weight) => format!("{limit} {lease} slots={weight}"),
        }
    }
}

/// How many slots a key has.
fn slot_count(key: usize) -> usize {
    match KEYS[key].1 {
        1 => WHOLE,
        limit => limit,
    }
}

/// What several servers promise as one. A server that is not the active one any more still answers
/// what grants nothing, and a take-over begins leases anew: the order of waiters and the end of a
/// lease are promises of one server.
const PROMISED: [Rule; 3] = [Rule::Exclusion, Rule::Fence, Rule::EarlyExpiry];

/// Writes down what all clients ask and hear.
#[derive(Default)]
struct Recorder {
    records: Mutex<Vec<Record>>,
    connection_count: AtomicU64,
    is_over: AtomicBool,
}

impl Recorder {
    fn note(&self, connection: u64, key: usize, begin: Instant, request: Request, reply: Reply) {
        self.records.lock().unwrap().push(Record {
            term: 0,
            connection,
            key: u32::try_from(key).expect("an index"),
            begin,
            end: now(),
            request,
            reply,
        });
    }

    /// The number of another connection.
    fn connection(&self) -> u64 {
        self.connection_count.fetch_add(1, Ordering::Relaxed)
    }

    fn history(self) -> History {
        let keys = (0..).zip(0..KEYS.len());
        History {
            records: self.records.into_inner().unwrap(),
            limits: keys.map(|(key, index)| (key, slot_count(index))).collect(),
            ..History::default()
        }
    }
}

/// What contradicts the promises of several servers.
fn violations(history: &History) -> Vec<String> {
    let found = history.violations().into_iter();
    let found = found.filter(|violation| PROMISED.contains(&violation.rule));
    found
        .map(|it| format!("{:?}: {}", it.rule, it.story))
        .collect()
}

/// Acquires, renews and releases, until the history is over.
fn live(recorder: &Recorder, ports: &[u16], seed: u64) {
    let mut random = Random::new(seed);
    while !recorder.is_over.load(Ordering::Relaxed) {
        let Some(client) = Client::try_tcp(any_server(ports, &mut random)) else {
            thread::sleep(Duration::from_millis(50));
            continue;
        };
        let mut believer = Believer {
            recorder,
            ports,
            random: &mut random,
            client,
            connection: recorder.connection(),
        };
        // A server that is told to stop hands over to the next one at once.
        if ask(&mut believer.client, "hello\n_\nadopt\n", PATIENCE).is_none() {
            continue;
        }
        while !recorder.is_over.load(Ordering::Relaxed) {
            if believer.hold().is_none() {
                break;
            }
        }
    }
}

fn any_server(ports: &[u16], random: &mut Random) -> SocketAddr {
    let port = ports[random.below(ports.len() as u64) as usize];
    ([127, 0, 0, 1], port).into()
}

/// Sends a request, and returns the reply; `None` if there is none.
fn ask(client: &mut Client, request: &str, patience: Duration) -> Option<String> {
    client.try_send(request.as_bytes()).ok()?;
    match client.next_event(patience) {
        Event::Line(line) => Some(String::from_utf8_lossy(&line).into_owned()),
        _ => None,
    }
}

fn token_in(reply: &str) -> Option<&str> {
    reply.strip_prefix("ok ").and_then(|rest| rest.get(..32))
}

/// What the reply to a claim says.
fn outcome(reply: &str) -> Reply {
    match token_in(reply) {
        Some(token) => Reply::Granted {
            fence: fence(token),
        },
        None if reply == "timeout" => Reply::TimedOut,
        None => Reply::Refused,
    }
}

/// A client with one connection, which believes in its locks beyond the end of that.
struct Believer<'a> {
    recorder: &'a Recorder,
    ports: &'a [u16],
    random: &'a mut Random,
    client: Client,
    connection: u64,
}

impl Believer<'_> {
    fn note(&self, key: usize, begin: Instant, request: Request, reply: Reply) {
        self.recorder
            .note(self.connection, key, begin, request, reply);
    }

    /// Holds a key for a while, perhaps. `None` if the connection is of no use any more.
    fn hold(&mut self) -> Option<()> {
        const WAIT: Duration = Duration::from_secs(1);
        let claim = Claim::any(self.random);
        let Claim { key, weight, lease } = claim;
        let (name, limit) = KEYS[key];
        let semaphore = if limit == 1 { "" } else { "s" };
        let argument = claim.argument();
        let patience = Duration::from_secs(3);
        let mut asked = now();
        let request = if self.random.one_in(3) {
            let phase_one = format!("{semaphore}e\n{name}\n{argument}\n");
            let queued = ask(&mut self.client, &phase_one, patience)?;
            if queued.starts_with("error") {
                return None;
            }
            self.note(
                key,
                asked,
                Request::Enqueue { lease, weight },
                Reply::Queued,
            );
            // The lease begins with the second phase.
            asked = now();
            Request::Wait { wait: WAIT, lease }
        } else {
            let wait = WAIT;
            Request::Acquire {
                wait,
                lease,
                weight,
            }
        };
        let frame = match request {
            Request::Wait { .. } => format!("{semaphore}w\n{name}\n1\n"),
            _ => format!("{semaphore}l\n{name}\n1 {argument}\n"),
        };
        let reply = ask(&mut self.client, &frame, patience)?;
        self.note(key, asked, request, outcome(&reply));
        match token_in(&reply) {
            Some(token) => self.believe(claim, asked, token),
            None => (!reply.starts_with("error")).then_some(()),
        }
    }

    /// Believes in a grant: renews it or not, and releases it or not.
    fn believe(&mut self, claim: Claim, asked: Instant, token: &str) -> Option<()> {
        let Claim { key, lease, .. } = claim;
        let (name, limit) = KEYS[key];
        let semaphore = if limit == 1 { "" } else { "s" };
        let fence = fence(token);
        let mut until = asked + lease;
        let mut is_alive = true;
        // Renewals that are not answered yet. The client goes on asking over a silent connection.
        let mut open: VecDeque<Instant> = VecDeque::new();
        let renewal = format!("{semaphore}n\n{name}\n{token} {}\n", lease.as_secs());
        while now() < until && (!self.random.one_in(3) || !open.is_empty()) {
            let pause = Duration::from_millis(self.random.below(500));
            thread::sleep(pause.min(until.saturating_sub(now())));
            let mut other = None;
            if !is_alive {
                // Its token is good over any other connection.
                other = Client::try_tcp(any_server(self.ports, self.random));
                open.clear();
            }
            let speaker = other.as_mut().unwrap_or(&mut self.client);
            open.push_back(now());
            is_alive = speaker.try_send(renewal.as_bytes()).is_ok();
            while let (true, Some(sent)) = (is_alive, open.front().copied()) {
                let reply = match speaker.next_event(Duration::from_millis(400)) {
                    Event::Line(line) if line.starts_with(b"ok") => Reply::Done,
                    Event::Line(_) => Reply::Refused,
                    Event::Nothing => break,
                    _ => Reply::Lost,
                };
                match reply {
                    Reply::Done => until = until.max(sent + lease),
                    Reply::Lost => is_alive = false,
                    _ => {}
                }
                let renewed = Request::Renew { fence, lease };
                self.recorder
                    .note(self.connection, key, sent, renewed, reply);
                open.pop_front();
            }
            is_alive &= other.is_none();
        }
        is_alive &= open.is_empty();
        // Some release, others leave it to the lease.
        let released = now();
        if is_alive && released < until && !self.random.one_in(4) {
            let release = format!("{semaphore}r\n{name}\n{token}\n");
            let reply = ask(&mut self.client, &release, Duration::from_secs(3));
            let is_done = reply.as_deref() == Some("ok");
            let heard = if is_done { Reply::Done } else { Reply::Lost };
            self.note(key, released, Request::Release { fence }, heard);
            reply?;
        }
        is_alive.then_some(())
    }
}

/// The house of a history: two servers, each with a way of its own to each member of etcd.
struct House {
    etcd: Etcd,
    proxies: Vec<Vec<Proxy>>,
    servers: Vec<Server>,
}

impl House {
    fn new(programs: &[Program; 2]) -> House {
        let etcd = Etcd::start(programs, 3);
        let members = || etcd.members.iter();
        let way = || {
            members()
                .map(|member| Proxy::start(member.client_port))
                .collect()
        };
        let proxies: Vec<Vec<Proxy>> = (0..2).map(|_| way()).collect();
        let start = |way: &Vec<Proxy>| House::start(free_port(), way);
        let servers: Vec<Server> = proxies.iter().map(start).collect();
        House {
            etcd,
            proxies,
            servers,
        }
    }

    fn start(port: u16, way: &[Proxy]) -> Server {
        let endpoints: Vec<String> = way.iter().map(Proxy::endpoint).collect();
        // The clients believe beyond the end of their connections.
        let arguments = ["--no-auto-release-on-disconnect"];
        let fault = std::env::var("LATCHD_HISTORY_FAULT").ok();
        Server::start_at(port, &endpoints.join(","), &arguments, fault.as_deref())
    }

    /// Decides about the requests of a server.
    fn decide(&self, server: usize, policy: fn(&str) -> Fate) {
        self.proxies[server]
            .iter()
            .for_each(|proxy| proxy.decide(policy));
    }

    /// Does harm, and returns when it is over. The effects last.
    fn harm(&mut self, random: &mut Random) -> String {
        let server = random.below(2) as usize;
        let member = random.below(3) as usize;
        match random.below(9) {
            7 | 8 => {
                let daemon = &self.servers[server].daemon;
                daemon.signal(Signal::TERM);
                let told = now();
                let status = daemon.wait_exit(TAKE_OVER).expect("it ends");
                let took = now() - told;
                assert_eq!(status.code(), Some(0), "{}", daemon.log());
                thread::sleep(Duration::from_millis(random.below(1000)));
                let port = self.servers[server].port;
                self.servers[server] = House::start(port, &self.proxies[server]);
                format!("told server {server} to stop, which took {took:?}")
            }
            kind @ (0 | 6) => {
                // What is answered during a cut must not be lost.
                let is_cut = kind == 6;
                if is_cut {
                    self.decide(server, |_| Fate::Drop);
                    thread::sleep(Duration::from_millis(1500));
                }
                self.servers[server].kill();
                self.decide(server, |_| Fate::Pass);
                thread::sleep(Duration::from_millis(random.below(3000)));
                let port = self.servers[server].port;
                self.servers[server] = House::start(port, &self.proxies[server]);
                format!("killed server {server}, cut {is_cut}")
            }
            1 | 2 => {
                let time = Duration::from_millis(random.below(2 * TTL.as_millis() as u64));
                let daemon = &self.servers[server].daemon;
                daemon.signal(Signal::STOP);
                thread::sleep(time);
                daemon.signal(Signal::CONT);
                format!("stopped server {server} for {time:?}")
            }
            3 => {
                let time = Duration::from_millis(random.below(4000));
                let member = &mut self.etcd.members[member];
                let is_killed = random.below(2) == 0;
                if is_killed {
                    member.kill()
                } else {
                    member.signal(Signal::STOP)
                }
                thread::sleep(time);
                if is_killed {
                    member.restart()
                } else {
                    member.signal(Signal::CONT)
                }
                format!(
                    "killed {is_killed} member {} for {time:?}",
                    member.client_port
                )
            }
            _ => {
                let time = Duration::from_millis(random.below(7000));
                let is_cut = random.below(3) == 0;
                for proxy in &self.proxies[server] {
                    let mut random = Random::new(random.next());
                    proxy.decide(move |request| match random.below(20) {
                        _ if is_cut => Fate::Drop,
                        _ if request.starts_with("POST /v3/watch") => Fate::Pass,
                        0 => Fate::Late(Duration::from_millis(1000 + random.below(3000))),
                        1 | 2 => Fate::LoseAnswer,
                        3 => Fate::Double,
                        4 => Fate::Drop,
                        _ => Fate::Pass,
                    });
                }
                thread::sleep(time);
                self.decide(server, |_| Fate::Pass);
                format!("cut {is_cut} server {server} for {time:?}")
            }
        }
    }
}

#[test]
fn no_two_clients_believe_in_one_slot() {
    let programs = needs!("etcd", "etcdctl");
    let seconds = setting("LATCHD_HISTORY_S").unwrap_or(40);
    let seed = setting("LATCHD_HISTORY_SEED").unwrap_or(u64::from(std::process::id()) + 1);
    println!("LATCHD_HISTORY_SEED={seed}");
    let mut house = House::new(&programs);
    let ports: Vec<u16> = house.servers.iter().map(|server| server.port).collect();
    let recorder = Recorder::default();
    let mut random = Random::new(seed);
    thread::scope(|scope| {
        let _end = AtTheEnd(&recorder.is_over);
        for client in 0..CLIENTS {
            let (recorder, ports) = (&recorder, &ports);
            let seed = seed.wrapping_mul(client as u64 + 3);
            scope.spawn(move || live(recorder, ports, seed));
        }
        let began = now();
        while now() < began + Duration::from_secs(seconds) {
            thread::sleep(Duration::from_millis(random.below(3000)));
            println!("{:?}: {}", now() - began, house.harm(&mut random));
        }
    });
    let history = recorder.history();
    let grants = history.grant_count();
    println!("{grants} grants");
    assert_eq!(violations(&history), Vec::<String>::new());
    assert!(grants as u64 > seconds, "hardly anything was granted");
    // No ghost is left in the journal once all leases are over.
    eventually(2 * TAKE_OVER, "the journal is empty", || {
        house.etcd.holders("latchd").is_empty()
    });
}

/// Renews a lock every now and then at the first port, as long as the history lasts and the holder
/// believes in it. A holder whose connection ends goes to the second port with its token.
fn keep(
    recorder: &Recorder,
    ports: [u16; 2],
    key: usize,
    token: &str,
    lease: Duration,
    has_renewed: &AtomicBool,
) {
    let (name, _) = KEYS[key];
    let renewal = format!("n\n{name}\n{token} {}\n", lease.as_secs());
    let (connection, fence) = (recorder.connection(), fence(token));
    let mut until = now() + lease;
    let mut ports = ports.into_iter().cycle();
    let mut client = None;
    while now() < until && !recorder.is_over.load(Ordering::Relaxed) {
        let mut port = || ports.next().expect("there are two");
        let speaker = client.get_or_insert_with(|| Client::tcp(([127, 0, 0, 1], port()).into()));
        let sent = now();
        match ask(speaker, &renewal, until - sent) {
            Some(reply) if reply.starts_with("ok") => {
                until = sent + lease;
                let renewed = Request::Renew { fence, lease };
                recorder.note(connection, key, sent, renewed, Reply::Done);
                has_renewed.store(true, Ordering::Relaxed);
            }
            _ => client = None,
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// Claims a lock until it is granted, as long as the history lasts, and gives the token.
fn take(recorder: &Recorder, port: u16, key: usize, lease: Duration) -> Option<String> {
    let (wait, weight) = (Duration::ZERO, WHOLE);
    let claim = format!("l\n{}\n0 {}\n", KEYS[key].0, lease.as_secs());
    let mut client = Client::tcp(([127, 0, 0, 1], port).into());
    let connection = recorder.connection();
    while !recorder.is_over.load(Ordering::Relaxed) {
        let asked = now();
        let reply = ask(&mut client, &claim, PATIENCE).expect("it answers");
        let request = Request::Acquire {
            wait,
            lease,
            weight,
        };
        recorder.note(connection, key, asked, request, outcome(&reply));
        if let Some(token) = token_in(&reply) {
            return Some(token.to_owned());
        }
        thread::sleep(Duration::from_millis(50));
    }
    None
}

/// The violations of a history in which two servers believe that they are active, and have written
/// the same number of batches.
///
/// In any other history, the batch number tells the two apart before the epoch does. Here no batch
/// is written while there are two: renewals of the same length only ask questions, and each server
/// has written the one batch of its take-over.
fn violations_of_two_believers(programs: &[Program; 2], fault: Option<&str>) -> Vec<String> {
    const COUNT: usize = 4;
    let lease = 3 * TTL;
    let etcd = Etcd::start(programs, 1);
    let arguments = ["--no-auto-release-on-disconnect"];
    let start = |port| Server::start_at(port, &etcd.endpoints(), &arguments, fault);
    let before = start(free_port());
    before.wait_until_active(1);
    let recorder = Recorder::default();
    let grant = |key| take(&recorder, before.port, key, lease).expect("it is free");
    let tokens: Vec<String> = (0..COUNT).map(grant).collect();
    before.kill();
    let first = start(before.port);
    first.wait_until_active(1);
    let second = start(free_port());
    let have_renewed = [const { AtomicBool::new(false) }; COUNT];
    thread::scope(|scope| {
        let _end = AtTheEnd(&recorder.is_over);
        for (key, token) in tokens.iter().enumerate() {
            let (recorder, ports) = (&recorder, [first.port, second.port]);
            let has_renewed = &have_renewed[key];
            scope.spawn(move || keep(recorder, ports, key, token, lease, has_renewed));
        }
        eventually(PATIENCE, "each holder has renewed its lock", || {
            have_renewed.iter().all(|it| it.load(Ordering::Relaxed))
        });
        first.daemon.signal(Signal::STOP);
        second.wait_until_active(1);
        first.daemon.signal(Signal::CONT);
        for key in 0..COUNT {
            let (recorder, port) = (&recorder, second.port);
            scope.spawn(move || take(recorder, port, key, lease));
        }
        // The leases that the second server began anew are over.
        thread::sleep(lease + TTL / 2);
    });
    violations(&recorder.history())
}

#[test]
fn of_two_servers_that_believe_only_one_confirms() {
    let programs = needs!("etcd", "etcdctl");
    assert_eq!(
        violations_of_two_believers(&programs, None),
        Vec::<String>::new()
    );
}

#[test]
fn the_history_finds_the_missing_check_of_the_epoch() {
    let programs = needs!("etcd", "etcdctl");
    // Faults are planted only in builds for tests.
    if cfg!(debug_assertions) {
        // A server that was stopped amid a question to etcd starts over, as one without the fault.
        let is_found = || !violations_of_two_believers(&programs, Some("no-epoch")).is_empty();
        assert!(
            (0..3).any(|_| is_found()),
            "two believed in one lock, unseen"
        );
    }
}
