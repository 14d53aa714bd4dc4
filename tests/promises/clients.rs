//! A process full of clients that take keys, and write down what they asked and heard.
//!
//! It is this test program, run for [`the_process_of_the_clients`] alone, so that all its clients
//! can be killed or stopped at once.

use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_linger;
use serde_json::json;

use crate::http_session::{self, HttpSession};
use crate::journal::Journal;
use crate::place::{Place, Stream};
use crate::support::at_the_end::AtTheEnd;
use crate::support::history::{Reply, Request};
use crate::support::random::Random;
use crate::support::{fence, parse_grant};

/// How many clients a process has.
const CLIENTS: u64 = 8;

/// How many slots a lock has: a shared one takes one, any other all of them.
const LOCK: usize = 1 << 20;

/// How many slots each key has.
pub const LIMITS: [usize; 24] = [
    LOCK, LOCK, LOCK, LOCK, 2, LOCK, 3, LOCK, LOCK, LOCK, LOCK, 5, LOCK, LOCK, LOCK, 2, LOCK, LOCK,
    LOCK, LOCK, LOCK, 8, LOCK, LOCK,
];

/// How long leases are.
pub const LEASES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];

/// What a client shows that ends a grant of another one.
pub const ADMIN_TOKEN: &str = "the-admin-token-of-the-chaos";

/// Requests that change nothing for others, and how their replies begin.
const ASIDES: [(&str, &str); 5] = [
    ("ping\n_\n_\n", "ok"),
    ("tag\n_\na client of the chaos\n", "ok"),
    ("stats\n_\n_\n", "ok {"),
    ("stats\ncounters\n_\n", "ok {"),
    ("stats\nholders\n_\n", "ok {"),
];

/// A reply that takes longer than its wait by this much will not come any more.
const PATIENCE: Duration = Duration::from_secs(40);

const SETTINGS: &str = "CLIENTS_OF";

/// Starts process number `number` on the server that is announced in the directory. It ends when
/// its stdin does.
pub fn start(directory: &Path, number: u64, seed: u64) -> Child {
    Command::new(std::env::current_exe().expect("a test knows its own path"))
        .args(["--exact", "clients::the_process_of_the_clients"])
        .env(SETTINGS, format!("{number} {seed} {}", directory.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a test can run itself")
}

/// The file of process number `number`.
pub fn journal(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("journal-{number}"))
}

/// Not a claim: a process of [`start`]. Does nothing when it is run as a test.
#[test]
fn the_process_of_the_clients() {
    let Ok(settings) = std::env::var(SETTINGS) else {
        return;
    };
    let mut words = settings.splitn(3, ' ');
    let mut number = || -> u64 { words.next().expect("a word").parse().expect("a number") };
    let (process, seed) = (number(), number());
    let directory = Path::new(words.next().expect("a path"));
    let journal = Journal::create(&self::journal(directory, process));
    let (is_over, connections) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let _end = AtTheEnd(&is_over);
        for client in 0..CLIENTS {
            let mut client = Client {
                process,
                connections: &connections,
                directory,
                journal: &journal,
                random: Random::new(seed ^ client),
                is_over: &is_over,
            };
            scope.spawn(move || {
                while !client.is_over() {
                    client.session();
                }
            });
        }
        // The end of stdin says that it is time.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
    });
}

struct Client<'a> {
    process: u64,
    connections: &'a AtomicU32,
    directory: &'a Path,
    journal: &'a Journal,
    random: Random,
    is_over: &'a AtomicBool,
}

impl Client<'_> {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Connects, takes and gives back some keys, and hangs up.
    fn session(&mut self) {
        let mut connection = match self.connect() {
            Ok(connection) => connection,
            Err(error) => {
                // It is no fault of the server to be gone or full; to speak bad TLS is one.
                if error.kind() == ErrorKind::InvalidData {
                    self.journal.complain(&format!("cannot connect: {error}"));
                }
                thread::sleep(Duration::from_millis(20));
                return;
            }
        };
        for _ in 0..1 + self.random.below(60) {
            let is_operator = matches!(connection.way, Way::Lines(_)) && self.random.one_in(60);
            let round = if is_operator {
                self.break_a_grant(&mut connection)
            } else {
                self.round(&mut connection)
            };
            // An end of the stream, or a client that has heard or done enough.
            if round.is_err() || self.is_over() {
                break;
            }
        }
        self.hang_up(connection);
    }

    fn connect(&mut self) -> io::Result<Connection> {
        let place = Place::any(self.directory, &mut self.random);
        let is_local = self.random.one_in(3);
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        let door = place.http.filter(|_| self.random.one_in(2));
        let way = match door {
            Some(door) => {
                let notes = http_session::notes(self.directory, self.process);
                Way::Http(HttpSession::open(door, &notes)?)
            }
            None if is_local => Way::Lines(place.unix()?),
            None => Way::Lines(place.network()?),
        };
        let mut connection = Connection {
            way,
            number: self.process << 32 | u64::from(number),
            term: 0,
            // One of several servers may pass the connection on over the network.
            is_trusted: is_local && place.term.is_some(),
            received: Vec::new(),
            token: String::new(),
        };
        if door.is_none() && self.random.one_in(20) {
            self.type_words(&mut connection)?;
        }
        connection.term = match place.term {
            Some(term) => term,
            None => self.epoch(&mut connection)?,
        };
        Ok(connection)
    }

    /// Does what a person does first: asks for help, and perhaps leaves again.
    fn type_words(&mut self, on: &mut Connection) -> io::Result<()> {
        on.lines().write_all(b"help\n")?;
        self.expect(on, "ok commands")?;
        while !on.line(PATIENCE)?.starts_with("quit ") {}
        if self.random.one_in(2) {
            return Ok(());
        }
        on.lines().write_all(b"quit\n")?;
        match on.line(PATIENCE) {
            Ok(line) => self.journal.complain(&format!("quit got {line:?}")),
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                self.journal.complain("quit did not end the connection");
            }
            Err(_) => {}
        }
        Err(ErrorKind::Other.into())
    }

    /// The term of the server that a connection has been passed on to.
    fn epoch(&mut self, on: &mut Connection) -> io::Result<u32> {
        // The first request makes sure that it is.
        on.lines().write_all(b"ping\n_\n_\ncluster\n_\n_\n")?;
        self.expect(on, "ok")?;
        let line = self.expect(on, "ok active ")?;
        let epoch = line.split(' ').nth(2).and_then(|word| word.parse().ok());
        epoch.ok_or(ErrorKind::InvalidData.into())
    }

    /// A line that begins so.
    fn expect(&mut self, on: &mut Connection, begin: &str) -> io::Result<String> {
        let line = on.line(PATIENCE)?;
        let is_expected = match begin {
            // A server that is short of memory has none for statistics.
            "ok {" if line == "error" => true,
            "ok {" => line.get(3..).is_some_and(is_json),
            _ => line.starts_with(begin),
        };
        if !is_expected {
            self.journal
                .complain(&format!("not {begin:?} but {line:?}"));
        }
        Ok(line)
    }

    /// Looks who holds a key, and ends the first grant, as an operator does.
    fn break_a_grant(&mut self, on: &mut Connection) -> io::Result<()> {
        let key = self.key();
        let asked = format!("stats\nholders\nkey-{key}\n");
        on.lines().write_all(asked.as_bytes())?;
        let line = self.expect(on, "ok {")?;
        let stats: serde_json::Value =
            serde_json::from_str(line.get(3..).unwrap_or_default()).unwrap_or_default();
        let holders = &stats["keys"][0]["holders"];
        let held = holders.as_array().into_iter().flatten();
        let taken: u64 = held.filter_map(|holder| holder["slots"].as_u64()).sum();
        if taken > limit_of(key) as u64 {
            self.journal.complain(&format!("too many holders: {line}"));
        }
        let Some(fence) = holders[0]["fence"].as_str() else {
            return Ok(());
        };
        let argument = if on.is_trusted {
            fence.to_owned()
        } else {
            format!("{fence} {ADMIN_TOKEN}")
        };
        let fence = fence.parse().expect("a number");
        self.exchange(on, key, Request::Break { fence }, &argument)?;
        Ok(())
    }

    fn key(&mut self) -> u32 {
        let count = LIMITS.len() as u64;
        // The first keys are in demand.
        let key = self.random.below(count).min(self.random.below(count));
        u32::try_from(key).expect("a few")
    }

    fn lease(&mut self) -> Duration {
        LEASES[self.below(LEASES.len() as u64)]
    }

    /// Mostly a whole lock, or one slot; over HTTP, always.
    fn weight(&mut self, on: &Connection, key: u32) -> usize {
        let is_odd = self.random.one_in(4) && matches!(on.way, Way::Lines(_));
        match (limit_of(key), is_odd) {
            (LOCK, false) => LOCK,
            (LOCK, true) | (_, false) => 1,
            (limit, true) => 1 + self.below(limit as u64),
        }
    }

    /// Mostly none: who waits for a key of a stopped client does nothing else.
    fn wait(&mut self) -> Duration {
        Duration::from_secs([0, 0, 0, 0, 0, 1, 2, 5][self.below(8)])
    }

    fn hang_up(&mut self, connection: Connection) {
        let number = connection.number;
        self.journal.hang_up(number);
        match &connection.way {
            // An RST instead of a FIN; nothing to a Unix socket.
            Way::Lines(stream) if self.random.one_in(3) => {
                let _ = set_socket_linger(stream, Some(Duration::ZERO));
            }
            Way::Lines(_) => {}
            Way::Http(session) => session.end(),
        }
        drop(connection);
        self.journal.hung_up(number);
    }

    /// Asks for a key, holds it for a while and gives it back.
    fn round(&mut self, connection: &mut Connection) -> io::Result<()> {
        let (key, lease) = (self.key(), self.lease());
        let reply = if self.random.one_in(2) {
            self.acquire(connection, key, lease)?
        } else {
            self.enqueue(connection, key, lease)?
        };
        match reply {
            Reply::Granted { .. } => self.hold(connection, key, lease),
            Reply::Refused => {
                // The server drains, or the lease is over.
                thread::sleep(Duration::from_millis(100));
                Err(ErrorKind::Other.into())
            }
            _ => Ok(()),
        }
    }

    fn acquire(&mut self, on: &mut Connection, key: u32, lease: Duration) -> io::Result<Reply> {
        let request = Request::Acquire {
            wait: self.wait(),
            lease,
            weight: self.weight(on, key),
        };
        self.ask(on, key, request)
    }

    fn enqueue(&mut self, on: &mut Connection, key: u32, lease: Duration) -> io::Result<Reply> {
        let weight = self.weight(on, key);
        let reply = self.ask(on, key, Request::Enqueue { lease, weight })?;
        let is_granted = matches!(reply, Reply::Granted { .. });
        // Clients need not collect what they have been granted.
        if reply == Reply::Refused || is_granted && self.random.one_in(2) {
            return Ok(reply);
        }
        let pause = if self.random.one_in(1500) {
            lease + Duration::from_millis(100)
        } else {
            Duration::from_millis(self.random.below(2))
        };
        thread::sleep(pause);
        let wait = self.wait();
        self.ask(on, key, Request::Wait { wait, lease })
    }

    fn hold(&mut self, on: &mut Connection, key: u32, lease: Duration) -> io::Result<()> {
        let token = on.token.clone();
        let fence = fence(&token);
        let pause = if self.random.one_in(2500) {
            lease + Duration::from_millis(self.random.below(300))
        } else {
            Duration::from_micros(self.random.below(2000))
        };
        thread::sleep(pause);
        if self.random.one_in(8) {
            let lease = self.lease();
            self.use_token(on, key, &token, Request::Renew { fence, lease })?;
        }
        if self.random.one_in(20) {
            return Err(ErrorKind::Other.into()); // hangs up with the key in hand
        }
        let release = Request::Release { fence };
        if self.random.one_in(20) {
            let Ok(mut other) = self.connect() else {
                return Err(ErrorKind::Other.into());
            };
            let is_released = self.use_token(&mut other, key, &token, release);
            self.hang_up(other);
            return is_released.map(drop);
        }
        self.use_token(on, key, &token, release)?;
        if self.random.one_in(20) {
            // A token is good once.
            self.use_token(on, key, &token, release)?;
        }
        Ok(())
    }

    fn use_token(
        &mut self,
        on: &mut Connection,
        key: u32,
        token: &str,
        request: Request,
    ) -> io::Result<Reply> {
        let argument = match request {
            Request::Renew { lease, .. } => format!("{token} {}", lease.as_secs()),
            _ => token.to_owned(),
        };
        self.exchange(on, key, request, &argument)
    }

    fn ask(&mut self, on: &mut Connection, key: u32, request: Request) -> io::Result<Reply> {
        let limit = match limit_of(key) {
            LOCK => String::new(),
            limit => format!("{limit} "),
        };
        let slots = |weight| match (limit_of(key), weight) {
            (LOCK, LOCK) => String::new(),
            (LOCK, _) => " shared".to_owned(),
            (_, 1) => String::new(),
            (_, weight) => format!(" slots={weight}"),
        };
        let argument = match request {
            Request::Acquire {
                wait,
                lease,
                weight,
            } => {
                let (wait, lease) = (wait.as_secs(), lease.as_secs());
                format!("{wait} {limit}{lease}{}", slots(weight))
            }
            Request::Enqueue { lease, weight } => {
                format!("{limit}{}{}", lease.as_secs(), slots(weight))
            }
            Request::Wait { wait, .. } => wait.as_secs().to_string(),
            _ => unreachable!("a use of a token"),
        };
        self.exchange(on, key, request, &argument)
    }

    /// Sends a request and waits for its reply, if nothing else comes to its mind.
    fn exchange(
        &mut self,
        on: &mut Connection,
        key: u32,
        request: Request,
        argument: &str,
    ) -> io::Result<Reply> {
        let frame = format!("{}\nkey-{key}\n{argument}\n", command(key, request));
        let number = self.journal.begin(on.term, on.number, key, request);
        if let Way::Http(session) = &on.way {
            let patience = wait_of(request) > Duration::ZERO && self.random.one_in(25);
            let patience = patience.then(|| Duration::from_millis(self.random.below(20)));
            let token = argument.split(' ').next().unwrap_or_default();
            let heard = self.ask_over_http(session, key, request, token, patience);
            let (heard, token) = heard.unwrap_or((Reply::Lost, String::new()));
            if !token.is_empty() {
                on.token = token;
            }
            self.journal.end(number, heard);
            return match heard {
                Reply::Lost => Err(ErrorKind::Other.into()),
                heard => Ok(heard),
            };
        }
        let reply = self.talk(on, frame.as_bytes(), wait_of(request));
        let heard = match &reply {
            Ok(line) => self.understood(on, line, request),
            Err(_) => Reply::Lost,
        };
        self.journal.end(number, heard);
        reply.map(|_| heard)
    }

    /// Sends a request in a session. Returns what it heard, and the token of a grant.
    fn ask_over_http(
        &self,
        session: &HttpSession,
        key: u32,
        request: Request,
        token: &str,
        patience: Option<Duration>,
    ) -> io::Result<(Reply, String)> {
        let (verb, mut body) = match request {
            Request::Acquire { wait, lease, .. } => {
                let (wait, lease) = (wait.as_secs(), lease.as_secs());
                (
                    "",
                    json!({ "acquire_timeout_s": wait, "lease_ttl_s": lease }),
                )
            }
            Request::Enqueue { lease, .. } => {
                ("/enqueue", json!({ "lease_ttl_s": lease.as_secs() }))
            }
            Request::Wait { wait, .. } => ("/wait", json!({ "timeout_s": wait.as_secs() })),
            Request::Renew { lease, .. } => {
                let lease = lease.as_secs();
                ("/renew", json!({ "token": token, "lease_ttl_s": lease }))
            }
            Request::Release { .. } => ("/release", json!({ "token": token })),
            Request::Break { .. } => unreachable!("an operator speaks in lines"),
        };
        let limit = limit_of(key);
        let is_claim = matches!(request, Request::Acquire { .. } | Request::Enqueue { .. });
        if limit != LOCK && is_claim {
            body["limit"] = json!(limit);
        }
        let kind = if limit == LOCK { "locks" } else { "semaphores" };
        let path = format!("/v1/{kind}/key-{key}{verb}");
        let wait = wait_of(request);
        let (status, answer) = session.post(&path, &body.to_string(), wait, patience)?;
        let uses_token = matches!(request, Request::Renew { .. } | Request::Release { .. });
        let token = answer["token"].as_str().unwrap_or_default().to_owned();
        let heard = match (status, answer["status"].as_str()) {
            (200, Some("ok" | "acquired")) => Reply::Granted {
                fence: fence(&token),
            },
            (200, Some("timeout")) => Reply::TimedOut,
            (200, Some("queued")) => Reply::Queued,
            (200 | 204, None) if uses_token => Reply::Done,
            (404, _) if uses_token => Reply::Refused,
            (409 | 429 | 503, _) if !uses_token => Reply::Refused,
            // Nothing is said of the grant.
            (410 | 429 | 503, _) => Reply::Lost,
            _ => {
                let what = format!("{request:?} got {status} {answer}");
                self.journal.complain(&what);
                Reply::Lost
            }
        };
        Ok((heard, token))
    }

    fn talk(&mut self, on: &mut Connection, frame: &[u8], wait: Duration) -> io::Result<String> {
        if self.random.one_in(10) {
            let (aside, begin) = ASIDES[self.below(ASIDES.len() as u64)];
            on.lines().write_all(&[aside.as_bytes(), frame].concat())?;
            self.expect(on, begin)?;
        } else if self.random.one_in(20) {
            for byte in frame {
                on.lines().write_all(&[*byte])?;
                thread::sleep(Duration::from_micros(100));
            }
        } else {
            on.lines().write_all(frame)?;
        }
        if wait > Duration::ZERO && self.random.one_in(25) {
            self.lose_patience(on)?;
        }
        let line = on.line(wait + PATIENCE);
        if matches!(&line, Err(error) if error.kind() == ErrorKind::TimedOut) {
            self.journal.complain("a request got no reply");
        }
        line
    }

    /// Hangs up within a wait: for good, or in one direction.
    fn lose_patience(&mut self, on: &mut Connection) -> io::Result<()> {
        thread::sleep(Duration::from_millis(self.random.below(20)));
        if self.random.one_in(2) {
            return Err(ErrorKind::Other.into());
        }
        self.journal.hang_up(on.number);
        let _ = on.lines().half_close();
        self.journal.hung_up(on.number);
        Ok(())
    }

    fn understood(&self, on: &mut Connection, line: &str, request: Request) -> Reply {
        let is_claim = matches!(
            request,
            Request::Acquire { .. } | Request::Enqueue { .. } | Request::Wait { .. }
        );
        let is_break = matches!(request, Request::Break { .. });
        let grant = parse_grant(line, "ok").or_else(|| parse_grant(line, "acquired"));
        match (line, grant) {
            (_, Some(grant)) => {
                let fence = fence(&grant.token);
                on.token = grant.token;
                Reply::Granted { fence }
            }
            ("queued", _) => Reply::Queued,
            ("timeout", _) => Reply::TimedOut,
            ("error", _) => Reply::Refused,
            (line, _) if line.starts_with("error_") && !is_break => Reply::Refused,
            (line, _) if line.starts_with("ok") && !is_claim => Reply::Done,
            _ => {
                self.journal.complain(&format!("{request:?} got {line:?}"));
                Reply::Refused
            }
        }
    }

    fn below(&mut self, bound: u64) -> usize {
        usize::try_from(self.random.below(bound)).expect("an index")
    }
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde_json::Value>(text).is_ok()
}

fn limit_of(key: u32) -> usize {
    LIMITS[usize::try_from(key).expect("an index")]
}

fn wait_of(request: Request) -> Duration {
    match request {
        Request::Acquire { wait, .. } | Request::Wait { wait, .. } => wait,
        _ => Duration::ZERO,
    }
}

/// A key with a limit is a semaphore.
fn command(key: u32, request: Request) -> String {
    let kind = if limit_of(key) == LOCK { "" } else { "s" };
    let verb = match request {
        Request::Acquire { .. } => "l",
        Request::Enqueue { .. } => "e",
        Request::Wait { .. } => "w",
        Request::Renew { .. } => "n",
        Request::Release { .. } => "r",
        Request::Break { .. } => return "break".to_owned(),
    };
    format!("{kind}{verb}")
}

/// How a client speaks to its server.
enum Way {
    Lines(Stream),
    Http(HttpSession),
}

struct Connection {
    way: Way,
    number: u64,
    term: u32,
    /// Whether the server takes the client for an operator.
    is_trusted: bool,
    received: Vec<u8>,
    /// That of the last grant.
    token: String,
}

impl Connection {
    fn lines(&mut self) -> &mut Stream {
        match &mut self.way {
            Way::Lines(stream) => stream,
            Way::Http(_) => unreachable!("HTTP has no lines"),
        }
    }

    /// The next line. An error if it does not come in time, or the stream ends.
    fn line(&mut self, patience: Duration) -> io::Result<String> {
        let deadline = Instant::now() + patience;
        let mut chunk = [0; 1024];
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.lines().set_read_timeout(left)?;
            match self.lines().read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
