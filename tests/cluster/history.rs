//! Clients that believe in their locks to the last moment, while servers are told to stop, and
//! servers and members of etcd die, stand still and are cut off. What they believed is checked
//! afterwards.
//!
//! `LATCHD_HISTORY_S` says for how many seconds (40), `LATCHD_HISTORY_SEED` with which seed. With
//! `LATCHD_HISTORY_FAULT`, the servers have a planted fault, which is to be found.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::house::{Etcd, Server, TAKE_OVER, TTL};
use crate::proxy::{Fate, Proxy};
use crate::support::at_the_end::AtTheEnd;
use crate::support::needs::{needs, Program};
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

/// One belief of a client, to hold a key from one instant to another.
#[derive(Clone, Debug)]
struct Belief {
    key: usize,
    weight: usize,
    fence: u64,
    asked: Instant,
    from: Instant,
    until: Instant,
}

/// What all clients have seen.
#[derive(Default)]
struct History {
    beliefs: Mutex<Vec<Belief>>,
    /// Renewals that were refused although the lease was not over.
    refused: Mutex<Vec<String>>,
    is_over: AtomicBool,
}

/// Numbers that a seed determines.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

fn setting(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

/// Acquires, renews and releases, until the history is over.
fn live(history: &History, ports: &[u16], seed: u64) {
    let mut random = Random(seed);
    while !history.is_over.load(Ordering::Relaxed) {
        let port = ports[random.below(ports.len() as u64) as usize];
        let Some(mut client) = Client::try_tcp(([127, 0, 0, 1], port).into()) else {
            thread::sleep(Duration::from_millis(50));
            continue;
        };
        // A server that is told to stop hands over to the next one at once.
        if ask(&mut client, "hello\n_\nadopt\n", PATIENCE).is_none() {
            continue;
        }
        while !history.is_over.load(Ordering::Relaxed) {
            if hold(history, &mut client, &mut random, ports).is_none() {
                break;
            }
        }
    }
}

/// Sends a request, and returns the reply; `None` if there is none.
fn ask(client: &mut Client, request: &str, patience: Duration) -> Option<String> {
    client.try_send(request.as_bytes()).ok()?;
    match client.next_event(patience) {
        Event::Line(line) => Some(String::from_utf8_lossy(&line).into_owned()),
        _ => None,
    }
}

/// Holds a key for a while, perhaps. `None` if the connection is of no use any more.
fn hold(history: &History, client: &mut Client, random: &mut Random, ports: &[u16]) -> Option<()> {
    let claim = Claim::any(random);
    let (key, limit) = KEYS[claim.key];
    let semaphore = if limit == 1 { "" } else { "s" };
    let argument = claim.argument();
    let patience = Duration::from_secs(3);
    let asked = Instant::now();
    let reply = match random.below(3) {
        0 => {
            let phase_one = format!("{semaphore}e\n{key}\n{argument}\n");
            let queued = ask(client, &phase_one, patience)?;
            if queued.starts_with("error") {
                return None;
            }
            // The lease begins with the second phase.
            let sent = Instant::now();
            let waited = ask(client, &format!("{semaphore}w\n{key}\n1\n"), patience)?;
            return believe(history, client, random, ports, claim, (asked, sent), waited);
        }
        _ => ask(
            client,
            &format!("{semaphore}l\n{key}\n1 {argument}\n"),
            patience,
        )?,
    };
    believe(history, client, random, ports, claim, (asked, asked), reply)
}

/// Believes in a grant, if the reply is one: renews it or not, and releases it or not.
fn believe(
    history: &History,
    client: &mut Client,
    random: &mut Random,
    ports: &[u16],
    claim: Claim,
    (asked, sent): (Instant, Instant),
    reply: String,
) -> Option<()> {
    let Some(token) = reply.strip_prefix("ok ").and_then(|rest| rest.get(..32)) else {
        return (!reply.starts_with("error")).then_some(());
    };
    let (key, limit) = KEYS[claim.key];
    let semaphore = if limit == 1 { "" } else { "s" };
    let from = Instant::now();
    let lease = claim.lease;
    let mut until = sent + lease;
    let mut is_alive = true;
    // Renewals that are not answered yet. The client goes on asking over a silent connection.
    let mut open: VecDeque<Instant> = VecDeque::new();
    let renewal = format!("{semaphore}n\n{key}\n{token} {}\n", lease.as_secs());
    while Instant::now() < until && (random.below(3) > 0 || !open.is_empty()) {
        let pause = Duration::from_millis(random.below(500));
        thread::sleep(pause.min(until.saturating_duration_since(Instant::now())));
        let mut other = None;
        if !is_alive {
            // Its token is good over any other connection.
            let port = ports[random.below(ports.len() as u64) as usize];
            other = Client::try_tcp(([127, 0, 0, 1], port).into());
            open.clear();
        }
        let speaker = other.as_mut().unwrap_or(&mut *client);
        open.push_back(Instant::now());
        is_alive = speaker.try_send(renewal.as_bytes()).is_ok();
        while let (true, Some(sent)) = (is_alive, open.front().copied()) {
            match speaker.next_event(Duration::from_millis(400)) {
                Event::Line(line) if line.starts_with(b"ok") => until = until.max(sent + lease),
                Event::Line(line) if Instant::now() < until => {
                    let reply = String::from_utf8_lossy(&line);
                    let refused = format!("{key} {token:.16}: {reply}");
                    history.refused.lock().unwrap().push(refused);
                }
                Event::Line(_) => {}
                Event::Nothing => break,
                _ => is_alive = false,
            }
            open.pop_front();
        }
        is_alive &= other.is_none();
    }
    is_alive &= open.is_empty();
    // Some release, others leave it to the lease.
    let released = Instant::now();
    let is_released = is_alive && released < until && random.below(4) > 0;
    history.beliefs.lock().unwrap().push(Belief {
        key: claim.key,
        weight: claim.weight,
        fence: fence(token),
        asked,
        from,
        until: if is_released { released } else { until },
    });
    if is_released {
        ask(
            client,
            &format!("{semaphore}r\n{key}\n{token}\n"),
            Duration::from_secs(3),
        )?;
    }
    is_alive.then_some(())
}

/// What contradicts the promises.
fn violations(beliefs: &[Belief]) -> Vec<String> {
    let mut found = Vec::new();
    for (key, (name, _)) in KEYS.iter().enumerate() {
        let mut own: Vec<&Belief> = beliefs.iter().filter(|one| one.key == key).collect();
        own.sort_by_key(|one| one.from);
        for (at, one) in own.iter().enumerate() {
            let earlier = &own[..at];
            let others = earlier.iter().filter(|other| other.until > one.from);
            let taken: usize = others.map(|other| other.weight).sum();
            if taken + one.weight > slot_count(key) {
                found.push(format!("{taken} slots of {name} are taken: {one:?}"));
            }
            let is_late = |other: &&&Belief| other.from < one.asked && other.fence >= one.fence;
            if let Some(other) = earlier.iter().find(is_late) {
                found.push(format!("fences of {name} fall: {other:?} {one:?}"));
            }
        }
    }
    found
}

#[test]
fn the_check_of_the_history_sees_violations() {
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    let belief = |fence, asked, from, until| Belief {
        key: 0,
        weight: WHOLE,
        fence,
        asked: at(asked),
        from: at(from),
        until: at(until),
    };
    let good = [belief(1, 0, 1, 5), belief(2, 2, 5, 6)];
    assert_eq!(violations(&good), Vec::<String>::new());
    assert_eq!(
        violations(&[belief(1, 0, 1, 5), belief(2, 2, 4, 6)]).len(),
        1
    );
    assert_eq!(
        violations(&[belief(2, 0, 1, 5), belief(1, 2, 6, 7)]).len(),
        1
    );
    let weighing = |weight, belief| Belief { weight, ..belief };
    let shared = [belief(1, 0, 1, 5), belief(2, 2, 4, 6)].map(|one| weighing(1, one));
    assert_eq!(violations(&shared), Vec::<String>::new());
    let beside = [shared[0].clone(), belief(2, 2, 4, 6)];
    assert_eq!(violations(&beside).len(), 1);
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
                let told = Instant::now();
                let status = daemon.wait_exit(TAKE_OVER).expect("it ends");
                let took = told.elapsed();
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
                for (at, proxy) in self.proxies[server].iter().enumerate() {
                    let mut random = Random(random.below(u64::MAX - 1) + 1 + at as u64);
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
    let seconds = setting("LATCHD_HISTORY_S", 40);
    let seed = setting("LATCHD_HISTORY_SEED", u64::from(std::process::id()) + 1);
    println!("LATCHD_HISTORY_SEED={seed}");
    let mut house = House::new(&programs);
    let ports: Vec<u16> = house.servers.iter().map(|server| server.port).collect();
    let history = History::default();
    let mut random = Random(seed);
    thread::scope(|scope| {
        let _end = AtTheEnd(&history.is_over);
        for client in 0..CLIENTS {
            let (history, ports) = (&history, &ports);
            let seed = seed.wrapping_mul(client as u64 + 3) | 1;
            scope.spawn(move || live(history, ports, seed));
        }
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(seconds) {
            thread::sleep(Duration::from_millis(random.below(3000)));
            println!("{:?}: {}", began.elapsed(), house.harm(&mut random));
        }
    });
    let beliefs = history.beliefs.into_inner().unwrap();
    println!("{} grants", beliefs.len());
    assert_eq!(violations(&beliefs), Vec::<String>::new());
    let refused = history.refused.into_inner().unwrap();
    assert_eq!(
        refused,
        Vec::<String>::new(),
        "tokens were refused that were valid"
    );
    assert!(
        beliefs.len() as u64 > seconds,
        "hardly anything was granted"
    );
    // No ghost is left in the journal once all leases are over.
    eventually(2 * TAKE_OVER, "the journal is empty", || {
        house.etcd.holders("latchd").is_empty()
    });
}

/// Renews a lock every now and then at the first port, as long as the history lasts and the holder
/// believes in it. A holder whose connection ends goes to the second port with its token.
fn keep(history: &History, ports: [u16; 2], key: usize, token: &str, lease: Duration) {
    let (name, _) = KEYS[key];
    let renewal = format!("n\n{name}\n{token} {}\n", lease.as_secs());
    let from = Instant::now();
    let mut until = from + lease;
    let mut ports = ports.into_iter().cycle();
    let mut client = None;
    while Instant::now() < until && !history.is_over.load(Ordering::Relaxed) {
        let mut port = || ports.next().expect("there are two");
        let speaker = client.get_or_insert_with(|| Client::tcp(([127, 0, 0, 1], port()).into()));
        let sent = Instant::now();
        match ask(speaker, &renewal, until - sent) {
            Some(reply) if reply.starts_with("ok") => until = sent + lease,
            _ => client = None,
        }
        thread::sleep(Duration::from_millis(200));
    }
    history.beliefs.lock().unwrap().push(Belief {
        key,
        weight: WHOLE,
        fence: fence(token),
        asked: from,
        from,
        until,
    });
}

/// Claims a lock until it is granted, as long as the history lasts.
fn take(history: &History, port: u16, key: usize, lease: Duration) {
    let claim = format!("l\n{}\n0 {}\n", KEYS[key].0, lease.as_secs());
    let mut client = Client::tcp(([127, 0, 0, 1], port).into());
    while !history.is_over.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let reply = ask(&mut client, &claim, PATIENCE).expect("it answers");
        if let Some(token) = reply.strip_prefix("ok ").and_then(|rest| rest.get(..32)) {
            let (from, fence) = (Instant::now(), fence(token));
            let until = asked + lease;
            history.beliefs.lock().unwrap().push(Belief {
                key,
                weight: WHOLE,
                fence,
                asked,
                from,
                until,
            });
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
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
    let mut client = before.connect();
    let seconds = lease.as_secs();
    let grant = |(name, _): &(&str, usize)| client.acquire_for(name, 0, seconds).token;
    let tokens: Vec<String> = KEYS[..COUNT].iter().map(grant).collect();
    before.kill();
    let first = start(before.port);
    first.wait_until_active(1);
    let second = start(free_port());
    let history = History::default();
    thread::scope(|scope| {
        let _end = AtTheEnd(&history.is_over);
        for (key, token) in tokens.iter().enumerate() {
            let (history, ports) = (&history, [first.port, second.port]);
            scope.spawn(move || keep(history, ports, key, token, lease));
        }
        // Each holder has renewed its lock when the server stops.
        thread::sleep(Duration::from_secs(1));
        first.daemon.signal(Signal::STOP);
        second.wait_until_active(1);
        first.daemon.signal(Signal::CONT);
        for key in 0..COUNT {
            let (history, port) = (&history, second.port);
            scope.spawn(move || take(history, port, key, lease));
        }
        // The leases that the second server began anew are over.
        thread::sleep(lease + TTL / 2);
    });
    violations(&history.beliefs.into_inner().unwrap())
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
