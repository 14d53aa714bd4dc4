//! What a lock costs that survives its server: latchd on three members of etcd, beside etcd's own
//! lock on the same members, and beside one bare transaction of etcd for each lock.
//!
//! etcd's own lock is the recipe of `etcdctl lock`: each client has a lease, puts a key of its own
//! below the lock's name, and holds the lock when no older key is there; otherwise it watches the
//! next older one. All ask etcd by the same gateway, JSON over HTTP, as latchd does.
//!
//! They take turns in short rounds. The *ratios* are the medians of the rounds.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{kill_process, Pid, Signal};
use serde_json::{json, Value};

use crate::load::{connect, PATIENCE};
use crate::report::{median, quantile, spread, spread_heading};
use crate::{built, Plan};

/// How long the active server may be silent.
const TTL: Duration = Duration::from_secs(5);

/// How a lock is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Bare,
    Recipe,
    Latchd(SocketAddr),
}

pub fn measure(plan: &Plan) -> io::Result<()> {
    let etcd = Etcd::start()?;
    let (active, standby) = (
        etcd.latchd("active epoch=")?,
        etcd.latchd("standby active=")?,
    );
    let ways = [
        ("bare transaction", Way::Bare),
        ("etcd's own lock", Way::Recipe),
        ("latchd", Way::Latchd(active.addr)),
        ("latchd, by standby", Way::Latchd(standby.addr)),
    ];
    for count in plan.connections_or(&[1, 8, 64]) {
        compare(plan, &etcd, &ways, count, Keys::Own)?;
    }
    for count in plan.connections_or(&[8, 64]) {
        compare(plan, &etcd, &ways[1..], count, Keys::One)?;
    }
    spread_heading("without a grant");
    let gap = longest_gap(standby.addr, &active.process.0, Signal::KILL, TTL * 2)?;
    spread("active server killed (TTL 5 s)", &[gap.as_secs_f64()]);
    let next = etcd.latchd("standby active=")?;
    let gap = longest_gap(next.addr, &standby.process.0, Signal::TERM, TTL)?;
    spread("active server told to stop", &[gap.as_secs_f64()]);
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    Own,
    One,
}

/// Prints the rates of all ways, and how long a grant or a hand-off takes.
fn compare(
    plan: &Plan,
    etcd: &Etcd,
    ways: &[(&str, Way)],
    count: usize,
    keys: Keys,
) -> io::Result<()> {
    let mut rates = vec![Vec::new(); ways.len()];
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..plan.rounds {
        for turn in 0..ways.len() {
            let at = (round + turn) % ways.len();
            let prefix = format!("bench-{count}-{at}-{round}");
            let (rate, waited) = run(plan, etcd, ways[at].1, count, keys, &prefix)?;
            rates[at].push(rate);
            times[at].extend(waited);
        }
    }
    let what = match keys {
        Keys::Own => "own keys: from claim to grant",
        Keys::One => "one key: from release to the next grant",
    };
    spread_heading(&format!("{count} connections, {what}"));
    for ((name, _), times) in ways.iter().zip(&times) {
        spread(name, times);
    }
    let first = &rates[0];
    for ((name, _), rates) in ways.iter().zip(&rates) {
        let ratios: Vec<f64> = rates
            .iter()
            .zip(first)
            .map(|(ours, it)| ours / it)
            .collect();
        let (rate, ratio, to) = (median(rates), median(&ratios), ways[0].0);
        println!("  {name:<42} {rate:>10.0} pairs/s, ratio to {to} {ratio:.2}");
    }
    let (theirs, ours) = (ways.len() - 3, ways.len() - 2);
    println!(
        "ratio of latchd to etcd's own lock: rate {:.2}, p50 {:.2}",
        median(&rates[ours]) / median(&rates[theirs]),
        quantile(&times[ours], 0.5) / quantile(&times[theirs], 0.5)
    );
    Ok(())
}

/// The pairs a second of so many clients, and how long each grant took in seconds.
fn run(
    plan: &Plan,
    etcd: &Etcd,
    way: Way,
    count: usize,
    keys: Keys,
    prefix: &str,
) -> io::Result<(f64, Vec<f64>)> {
    let (ready, released) = (Barrier::new(count), Mutex::new(Instant::now()));
    let work = |number: usize| -> io::Result<(Vec<f64>, Duration)> {
        let key = match keys {
            Keys::Own => format!("{prefix}-{number}"),
            Keys::One => prefix.to_owned(),
        };
        let client = Client::new(way, etcd.members[number % etcd.members.len()].addr, &key);
        ready.wait();
        let (mut client, mut times, began) = (client?, Vec::new(), Instant::now());
        while began.elapsed() < plan.time {
            let asked = Instant::now();
            client.acquire()?;
            let granted = Instant::now();
            let since = match keys {
                Keys::Own => asked,
                Keys::One => asked.max(*released.lock().expect("no panic")),
            };
            times.push(granted.saturating_duration_since(since).as_secs_f64());
            *released.lock().expect("no panic") = Instant::now();
            client.release()?;
        }
        Ok((times, began.elapsed()))
    };
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..count)
            .map(|number| scope.spawn(move || work(number)))
            .collect();
        let (mut all, mut longest) = (Vec::new(), Duration::ZERO);
        for thread in threads {
            let (times, elapsed) = thread.join().expect("no panic")?;
            all.extend(times);
            longest = longest.max(elapsed);
        }
        Ok((all.len() as f64 / longest.as_secs_f64(), all))
    })
}

/// One client with its key.
enum Client {
    Bare(Gateway, String),
    Recipe(Recipe),
    Latchd(BufReader<TcpStream>, String, String),
}

impl Client {
    fn new(way: Way, member: SocketAddr, key: &str) -> io::Result<Client> {
        let key = key.to_owned();
        Ok(match way {
            Way::Bare => Client::Bare(Gateway::connect(member)?, key),
            Way::Recipe => Client::Recipe(Recipe::new(member, &key)?),
            Way::Latchd(addr) => Client::Latchd(BufReader::new(connect(addr)?), key, String::new()),
        })
    }

    fn acquire(&mut self) -> io::Result<()> {
        match self {
            Client::Bare(gateway, key) => {
                let put = json!({"request_put": {"key": base64(key), "value": ""}});
                gateway.post("kv/txn", &json!({"success": [put]})).map(drop)
            }
            Client::Recipe(recipe) => recipe.acquire(),
            Client::Latchd(stream, key, token) => {
                let reply = ask(stream, &format!("l\n{key}\n600\n"))?;
                let granted = reply
                    .strip_prefix("ok ")
                    .and_then(|it| it.split(' ').next());
                *token = granted.ok_or_else(|| unexpected(&reply))?.to_owned();
                Ok(())
            }
        }
    }

    fn release(&mut self) -> io::Result<()> {
        match self {
            Client::Bare(..) => Ok(()),
            Client::Recipe(recipe) => recipe.release(),
            Client::Latchd(stream, key, token) => {
                match &*ask(stream, &format!("r\n{key}\n{token}\n"))? {
                    "ok" => Ok(()),
                    other => Err(unexpected(other)),
                }
            }
        }
    }
}

fn unexpected(reply: &str) -> io::Error {
    crate::peers::unexpected(reply.as_bytes())
}

/// Sends a request to latchd, and reads its line.
fn ask(stream: &mut BufReader<TcpStream>, request: &str) -> io::Result<String> {
    stream.get_mut().write_all(request.as_bytes())?;
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}

/// etcd's own lock.
struct Recipe {
    gateway: Gateway,
    member: SocketAddr,
    /// The lock's name, with a slash, and the key of this client below it.
    name: String,
    own: String,
    lease: String,
}

impl Recipe {
    fn new(member: SocketAddr, key: &str) -> io::Result<Recipe> {
        let mut gateway = Gateway::connect(member)?;
        let lease = gateway.post("lease/grant", &json!({"TTL": 600}))?;
        let lease = text(&lease["ID"]);
        Ok(Recipe {
            name: format!("{key}/"),
            own: format!("{key}/{lease}"),
            gateway,
            member,
            lease,
        })
    }

    /// All keys of the lock, the oldest or the youngest first, of which one is asked for.
    fn one_of(&self, order: &str) -> Value {
        let end = format!("{}0", &self.name[..self.name.len() - 1]);
        let (key, end) = (base64(&self.name), base64(&end));
        json!({"key": key, "range_end": end, "sort_target": "CREATE", "sort_order": order,
               "limit": 1})
    }

    fn acquire(&mut self) -> io::Result<()> {
        let own = base64(&self.own);
        let answer = self.gateway.post(
            "kv/txn",
            &json!({
                "compare": [{"target": "CREATE", "key": own, "create_revision": 0}],
                "success": [
                    {"request_put": {"key": own, "value": "", "lease": self.lease}},
                    {"request_range": self.one_of("ASCEND")},
                ],
            }),
        )?;
        let revision = text(&answer["header"]["revision"]);
        if answer["responses"][1]["response_range"]["kvs"][0]["key"] == own {
            return Ok(());
        }
        let revision: u64 = revision.parse().map_err(io::Error::other)?;
        loop {
            let mut range = self.one_of("DESCEND");
            range["max_create_revision"] = json!(revision - 1);
            let answer = self.gateway.post("kv/range", &range)?;
            let ahead = &answer["kvs"][0]["key"];
            if ahead.is_null() {
                return Ok(());
            }
            let from: u64 = text(&answer["header"]["revision"])
                .parse()
                .map_err(io::Error::other)?;
            Gateway::connect(self.member)?.wait_for_end(ahead, from + 1)?;
        }
    }

    fn release(&mut self) -> io::Result<()> {
        let own = json!({"key": base64(&self.own)});
        self.gateway.post("kv/deleterange", &own).map(drop)
    }
}

/// A connection to etcd, for JSON over HTTP.
struct Gateway(BufReader<TcpStream>);

impl Gateway {
    fn connect(member: SocketAddr) -> io::Result<Gateway> {
        connect(member).map(|stream| Gateway(BufReader::new(stream)))
    }

    /// Sends a request, and reads the head of the answer: the length of the body, if it says it.
    fn send(&mut self, path: &str, body: &Value) -> io::Result<Option<usize>> {
        let body = body.to_string();
        let len = body.len();
        let request = format!(
            "POST /v3/{path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {len}\r\n\r\n{body}"
        );
        self.0.get_mut().write_all(request.as_bytes())?;
        let mut len = None;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if line.is_empty() {
                return Ok(len);
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                len = value.trim().parse().ok();
            }
        }
    }

    fn post(&mut self, path: &str, body: &Value) -> io::Result<Value> {
        let len = self.send(path, body)?;
        let len = len.ok_or_else(|| io::Error::other("etcd refuses"))?;
        let mut body = vec![0; len];
        self.0.read_exact(&mut body)?;
        let answer: Value = serde_json::from_slice(&body).map_err(io::Error::other)?;
        match answer.get("error") {
            Some(error) => Err(io::Error::other(error.to_string())),
            None => Ok(answer),
        }
    }

    /// Watches a key until it is deleted.
    fn wait_for_end(&mut self, key: &Value, from: u64) -> io::Result<()> {
        let watch = json!({"create_request": {"key": key, "start_revision": from}});
        self.send("watch", &watch)?;
        // One object a line, in chunks; other lines are the lengths of the chunks.
        while !self.line()?.contains("\"DELETE\"") {}
        Ok(())
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
}

/// A number that etcd sends as a string.
fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let bits = chunk
            .iter()
            .fold(0, |bits, byte| bits << 8 | usize::from(*byte));
        let bits = bits << (8 * (3 - chunk.len()));
        for place in 0..4 {
            out.push(if place <= chunk.len() {
                char::from(DIGITS[bits >> (18 - 6 * place) & 63])
            } else {
                '='
            });
        }
    }
    out
}

/// The longest time without a grant at `addr`, when a signal is sent to `process`, of all the time
/// that is looked at.
fn longest_gap(
    addr: SocketAddr,
    process: &Child,
    signal: Signal,
    time: Duration,
) -> io::Result<Duration> {
    let (began, mut last, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
    let (mut number, mut is_sent) = (0, false);
    while began.elapsed() < time {
        if !is_sent && began.elapsed() > Duration::from_secs(1) {
            kill_process(Pid::from_child(process), signal)?;
            is_sent = true;
        }
        // A new connection each time: the old one may have ended.
        number += 1;
        let attempt = connect(addr).and_then(|stream| {
            stream.set_read_timeout(Some(PATIENCE))?;
            let key = format!("gap-{signal:?}-{number}");
            ask(&mut BufReader::new(stream), &format!("l\n{key}\n0 1\n"))
        });
        if attempt.is_ok_and(|reply| reply.starts_with("ok ")) {
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(longest.max(last.elapsed()))
}

/// Three members of etcd, with their data in a temporary directory.
struct Etcd {
    members: Vec<Member>,
    directory: Directory,
}

struct Member {
    addr: SocketAddr,
    _process: Running,
}

/// A server on these members.
struct Latchd {
    addr: SocketAddr,
    process: Running,
}

/// A process that ends when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn free_addr() -> io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}

impl Etcd {
    fn start() -> io::Result<Etcd> {
        let place = std::env::temp_dir().join(format!("bench-cluster.{}", std::process::id()));
        fs::create_dir_all(&place)?;
        let mut etcd = Etcd {
            members: Vec::new(),
            directory: Directory(place),
        };
        let mut addrs = Vec::new();
        for _ in 0..3 {
            addrs.push((free_addr()?, free_addr()?));
        }
        let peers: Vec<String> = (0..3)
            .map(|at| format!("m{at}=http://{}", addrs[at].1))
            .collect();
        for (at, (client, peer)) in addrs.iter().enumerate() {
            let (client_url, peer_url) = (format!("http://{client}"), format!("http://{peer}"));
            let process = Command::new("etcd")
                .args(["--name", &format!("m{at}"), "--data-dir"])
                .arg(etcd.directory.0.join(at.to_string()))
                .args(["--listen-client-urls", &client_url])
                .args(["--advertise-client-urls", &client_url])
                .args(["--listen-peer-urls", &peer_url])
                .args(["--initial-advertise-peer-urls", &peer_url])
                .args(["--initial-cluster", &peers.join(",")])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .map_err(|error| io::Error::other(format!("cannot start etcd: {error}")))?;
            let (addr, _process) = (*client, Running(process));
            etcd.members.push(Member { addr, _process });
        }
        let deadline = Instant::now() + PATIENCE;
        let put = json!({"key": base64("health"), "value": ""});
        let answers = |member: &Member| {
            Gateway::connect(member.addr).and_then(|mut gateway| gateway.post("kv/put", &put))
        };
        while etcd.members.iter().any(|member| answers(member).is_err()) {
            if Instant::now() > deadline {
                return Err(io::Error::other("etcd does not answer"));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(etcd)
    }

    /// Starts a server, and waits until its log has this text.
    fn latchd(&self, role: &str) -> io::Result<Latchd> {
        let addr = free_addr()?;
        let log = self.directory.0.join(format!("{addr}.log"));
        let members: Vec<String> = self.members.iter().map(|it| it.addr.to_string()).collect();
        let process = Command::new(built("latchd")?)
            .args(["--port", &addr.port().to_string()])
            .args([
                "--advertise",
                &addr.to_string(),
                "--etcd",
                &members.join(","),
            ])
            .args([
                "--etcd-ttl",
                &TTL.as_secs().to_string(),
                "--max-locks",
                "2000000",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        let process = Running(process);
        let deadline = Instant::now() + PATIENCE;
        while !says(&log, role)? {
            if Instant::now() > deadline {
                let said = fs::read_to_string(&log)?;
                return Err(io::Error::other(format!("latchd does not start: {said}")));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(Latchd { addr, process })
    }
}

fn says(log: &Path, text: &str) -> io::Result<bool> {
    fs::read_to_string(log).map(|said| said.contains(text))
}
