//! The wire protocol, to the byte: plays the transcripts in `tests/latchd/wire/`.
//!
//! A transcript is a text file of sections. Each section is one claim and has a daemon of its own:
//!
//! ```text
//! == a lock is granted, renewed and released
//! options: --max-locks 2          options of the daemon, if any
//! # why this matters              a comment
//! A> l\nk\n10\n                   A writes exactly these bytes in one write
//! A>> l\nk\n10\n                  A writes them one by one, with a pause after each
//! A>? ping\n_\n_\n                A writes to a server which may have closed
//! A>* ping\n_\n_\n                A writes them again and again, until the server hangs up
//! A< ok <token:t1> 33             A reads exactly this line
//! A< [after 900ms, within 1500ms] timeout
//! A< [after 990ms of t1] ok <token:t2> 33     990 ms after the request for t1
//! A< nothing 200ms                A reads nothing, and the connection stays open
//! A< EOF                          the stream ends, without a reply or a reset before
//! A< GONE                         it ends, by a reset if need be
//! A< END                          it ends, whatever is said before
//! A< raw \xff\xfc\x06             A reads these bytes, which are no line
//! A< HELP                         A reads the lines that answer help
//! A> FIN                          half-closes; also CLOSE, RST, OPEN (connects, writes nothing)
//! sleep 300ms
//! waiting k 2                     goes on when two wait for k
//! connections 1                   goes on when so many others are connected
//! served B                        B connects until it is served; may have [within …] before it
//! true t2 > t1                    compares fences; also `t2 != t1`
//! signal TERM
//! exit 0                          the daemon ends with this status; may have [within …] before it
//! log granted key=k               goes on when this is in the daemon's log
//! ```
//!
//! A connection opens when its letter first occurs. Times are counted from the last line which did
//! something: a write, a close, a signal, the end of a sleep. The least time is counted from the
//! beginning of that, before which nothing in the server can have begun, and the greatest from its
//! end: so a slow machine cannot make a reply look early.
//!
//! In what is written: `\n \r \t \0 \xNN \\ \{ \} \<`, `{256*a}` for repetition, `<t1>` for a token
//! seen before. In what is read: `<token:t1>` binds a token, `<t1>` is one that is bound, `<int>`,
//! `<int:1..33>`, `<number>` (JSON), `<version>`, `{256*a}`; everything else stands for itself.
//!
//! The connections speak the `SCHEME` of the test crate: plain text, or the same over TLS.
//!
//! With `LATCHD_WIRE_SERVER=host:port` the transcripts are played against that server instead;
//! sections which need options, signals, the log or an empty table are then skipped.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::cluster::{is_member, journal_time};
use crate::support::stalls::fairly;
use crate::support::{
    described, fence, shown, waiter_count, Client, Daemon, Event, Signal, PATIENCE,
};
use crate::SCHEME;

/// Sections wait much more than they compute.
const PARALLEL_SECTIONS: usize = 12;

/// Long enough for the server to have read one byte before the next is written, as a rule.
const PAUSE_BETWEEN_BYTES: Duration = Duration::from_millis(1);

/// The answer to `help`.
const HELP: &str = "\
ok commands, each with a line for its key and one for its arguments; see latch-protocol(7):
l WAIT [LEASE]          take a lock, or wait for it
sl WAIT LIMIT [LEASE]   take a slot of a semaphore, or wait for it
e [LEASE]               take a lock, or a place in its queue
se LIMIT [LEASE]        take a slot, or a place in its queue
w WAIT                  after e: wait for the lock
sw WAIT                 after se: wait for the slot
r TOKEN                 release a lock
sr TOKEN                release a slot
n TOKEN [LEASE]         renew the lease of a lock
sn TOKEN [LEASE]        renew the lease of a slot
adopt TOKEN [LEASE]     renew it, and move it to this connection
keep TOKEN [LEASE]      renew it, and keep it without a connection
hello                   ask what the server can do
ping                    ask whether the server answers
stats                   ask which keys are in use
tag TEXT                say who this client is
break FENCE             take a lock or a slot away from its holder
auth SECRET             give the secret of the server, before all else
quit                    end the connection; this one is a line alone";

/// Declares a test for each transcript file, and the list of their names.
macro_rules! transcripts {
    ($($name:ident)*) => {
        $(#[test] fn $name() { play(stringify!($name)); })*
        const NAMED: &[&str] = &[$(stringify!($name)),*];
    };
}

transcripts! {
    adopt
    auth
    clients
    closing
    disconnect
    documented
    draining
    expiry
    first_words
    framing
    integers
    limits
    locks
    numbers_of_arguments
    operators
    order
    pipelining
    read_timeout
    semaphores
    stats
    status
    telnet
    two_phases
    weights
}

#[test]
fn every_transcript_is_played_by_a_test() {
    let files = std::fs::read_dir(transcript_directory()).expect("it is part of the source");
    for file in files {
        let path = file.expect("it is readable").path();
        let name = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or_default();
        assert!(
            NAMED.contains(&name),
            "no test is named after {}",
            path.display()
        );
    }
}

#[test]
fn where_the_stream_is_split_changes_no_reply() {
    let Some(server) = own_server(&["--max-locks", "2000"]) else {
        return;
    };
    // Six digits for the number of the run, so that no run meets the keys of another.
    let frames = [
        "l\nkeyNNNNNN\n0\nr\nkeyNNNNNN\nbogus\nping\n_\n_\n",
        "e\r\nkeyNNNNNN\r\n 7 \r\ne\r\nkeyNNNNNN\r\n\r\nw\r\nkeyNNNNNN\r\n0\r\nw\r\nkeyNNNNNN\r\n0\r\n",
        "se\nkeyNNNNNN\n2 9\nl\nkeyNNNNNN\n0\nsl\nkeyNNNNNN\n0 2\nsw\nkeyNNNNNN\n0\n",
        "bogus\nk\n\nl\n\n1\nl\nk k\n1\nl\nk\n1x\nl\nkeyNNNNNN\u{e9}\u{20ac}\n0 7\nping\n\n\n",
    ];
    let mut run = 0;
    let mut replies = |frames: &str, split_at: usize| {
        run += 1;
        let bytes = frames.replace("NNNNNN", &format!("{run:06}")).into_bytes();
        split_replies(&server, &bytes, split_at)
    };
    for frames in frames {
        let whole = replies(frames, 0);
        for split_at in 1..frames.len() {
            let split = replies(frames, split_at);
            assert_eq!(
                split,
                whole,
                "split after byte {split_at} of {}",
                shown(frames.as_bytes())
            );
        }
    }
}

/// What the server answers to `bytes` in two writes, with tokens blotted out.
fn split_replies(server: &Daemon, bytes: &[u8], split_at: usize) -> Vec<String> {
    let mut client = server.connect();
    let (head, tail) = bytes.split_at(split_at);
    if !head.is_empty() {
        client.send_bytes(head);
        thread::sleep(PAUSE_BETWEEN_BYTES);
    }
    client.send_bytes(tail);
    client.half_close();
    let mut replies = Vec::new();
    loop {
        match client.next_event(PATIENCE) {
            Event::Line(line) => replies.push(without_token(&shown(&line))),
            Event::Eof => return replies,
            other => panic!("after {replies:?} came {}", described(&other)),
        }
    }
}

fn without_token(reply: &str) -> String {
    reply
        .split(' ')
        .map(|word| if word.len() == 32 { "<token>" } else { word })
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn ten_thousand_pings_in_one_stream_get_ten_thousand_replies() {
    const PINGS: usize = 10_000;
    let Some(server) = own_server(&[]) else {
        return;
    };
    let mut client = server.connect();
    let mut writer = client.writer();
    // Neither side may wait for the other to read: the replies do not fit into the buffers.
    let writing = thread::spawn(move || writer.write_all("ping\n_\n_\n".repeat(PINGS).as_bytes()));
    for _ in 0..PINGS {
        client.expect("ok");
    }
    writing
        .join()
        .expect("it cannot panic")
        .expect("the server reads on");
    client.half_close();
    client.expect_eof();
}

/// A daemon of this build; none if the transcripts are played against another server, or if the
/// machine lacks what the connections take.
fn own_server(args: &[&str]) -> Option<Daemon> {
    let is_wanted = other_server().is_none() && SCHEME.is_available();
    is_wanted.then(|| Daemon::start_over(SCHEME, args))
}

// ---------------------------------------------------------------------------------------------
// Playing

/// Plays all sections of `tests/latchd/wire/<name>.txt` and reports all which fail.
fn play(name: &str) {
    if !SCHEME.is_available() {
        return;
    }
    let path = transcript_directory().join(format!("{name}.txt"));
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let sections = parse(&text).unwrap_or_else(|problem| panic!("{}:{problem}", path.display()));
    let other = other_server();
    // Another server is one for all sections: there they must not meet.
    let threads = if other.is_some() {
        1
    } else {
        PARALLEL_SECTIONS.min(sections.len())
    };
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(BTreeMap::new());
    // A retry is noted under the name of its thread.
    let test = thread::current().name().unwrap_or(name).to_owned();
    thread::scope(|scope| {
        for _ in 0..threads {
            let thread = thread::Builder::new().name(test.clone());
            let started = thread.spawn_scoped(scope, || {
                while let Some(section) = sections.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let played = fairly(|| match play_section(section, other) {
                        Err(failure) if failure.contains(NOT_IN_TIME) => Err(failure),
                        played => Ok(played),
                    });
                    if let Err(failure) = played.and_then(|played| played) {
                        failures.lock().unwrap().insert(section.line, failure);
                    }
                }
            });
            started.expect("a thread can start");
        }
    });
    let failures = failures.into_inner().unwrap();
    let mut report = String::new();
    for failure in failures.values() {
        let _ = writeln!(report, "\ntests/latchd/wire/{name}.txt:{failure}");
    }
    assert!(
        failures.is_empty(),
        "{} of {} sections failed\n{report}",
        failures.len(),
        sections.len()
    );
}

/// Begins the one complaint that a late machine can cause.
const NOT_IN_TIME: &str = "that came too late";

fn play_section(section: &Section, other: Option<SocketAddr>) -> Result<(), String> {
    // A server of a cluster does not drain: it hands over.
    let is_drained = |line: &Line| matches!(line.step, Step::Signal(Signal::TERM));
    if is_member() && section.lines.iter().any(is_drained) {
        return Ok(());
    }
    let daemon = match other {
        Some(_) if section.needs_own_daemon() => {
            eprintln!(
                "skipped, for it needs a daemon of its own: {}",
                section.claim
            );
            return Ok(());
        }
        Some(_) => None,
        None => {
            let options: Vec<&str> = section.options.iter().map(String::as_str).collect();
            Some(Daemon::start_over(SCHEME, &options))
        }
    };
    let addr = other.unwrap_or_else(|| daemon.as_ref().expect("one of the two").addr());
    let mut stage = Stage {
        addr,
        daemon,
        auth_token: section.auth_token(),
        connections: HashMap::new(),
        tokens: HashMap::new(),
        asked_at: HashMap::new(),
        requested_at: HashMap::new(),
        action: Action::now(),
    };
    for (index, line) in section.lines.iter().enumerate() {
        if let Err(problem) = stage.perform(&line.step) {
            return Err(failure_report(section, index, &problem, &stage));
        }
    }
    if other.is_some() {
        drop(stage);
        // The connections have just been closed; what they held must not be met by the next
        // section.
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn failure_report(section: &Section, failed: usize, problem: &str, stage: &Stage) -> String {
    let mut report = format!(
        "{}: {}\n{problem}\n",
        section.lines[failed].number, section.claim
    );
    for (index, line) in section.lines.iter().enumerate().take(failed + 1) {
        let mark = if index == failed { "=>" } else { "  " };
        let _ = writeln!(report, "  {mark} {:>4}  {}", line.number, line.text);
    }
    for (name, token) in &stage.tokens {
        let _ = writeln!(report, "     <{name}> is {token}");
    }
    if let Some(daemon) = &stage.daemon {
        let log = daemon.log();
        let tail: Vec<&str> = log.lines().rev().take(12).collect();
        for line in tail.iter().rev() {
            let _ = writeln!(report, "     log: {line}");
        }
    }
    report
}

/// What a section has brought about so far.
struct Stage {
    addr: SocketAddr,
    daemon: Option<Daemon>,
    auth_token: Option<String>,
    connections: HashMap<char, Client>,
    tokens: HashMap<String, String>,
    /// When each connection began its last write.
    asked_at: HashMap<char, Instant>,
    /// The same for the request that each token answers.
    requested_at: HashMap<String, Instant>,
    action: Action,
}

/// The last line which did something.
struct Action {
    began: Instant,
    ended: Instant,
}

impl Action {
    fn now() -> Action {
        let now = Instant::now();
        Action {
            began: now,
            ended: now,
        }
    }
}

impl Stage {
    fn perform(&mut self, step: &Step) -> Result<(), String> {
        let mut began = Instant::now();
        match step {
            Step::Write { who, bytes, how } => self.write(*who, bytes, *how)?,
            Step::Open(who) => {
                // The server counts from here; a handshake of TLS comes after it.
                self.action = Action::now();
                self.connection(*who);
                return Ok(());
            }
            Step::Fin(who) => self.connection(*who).half_close(),
            Step::Close(who) => drop(self.connections.remove(who)),
            Step::Reset(who) => {
                self.connections
                    .remove(who)
                    .ok_or("it was never opened")?
                    .reset();
            }
            Step::Sleep(time) => {
                thread::sleep(*time);
                began = Instant::now();
            }
            Step::Signal(signal) => self.daemon()?.signal(*signal),
            Step::Read {
                who,
                expected,
                when,
            } => return self.read(*who, expected, when),
            Step::Waiting { key, count } => {
                let counted = |stats: &serde_json::Value| waiter_count(stats, key);
                return self.poll_stats(*count, counted);
            }
            Step::Connections(count) => {
                let beside_the_asking = |stats: &serde_json::Value| {
                    stats["connections"]
                        .as_u64()
                        .unwrap_or_default()
                        .saturating_sub(1)
                };
                return self.poll_stats(*count, beside_the_asking);
            }
            Step::Served { who, when } => return self.wait_to_be_served(*who, when),
            Step::Compare {
                left,
                relation,
                right,
            } => return self.compare(left, *relation, right),
            Step::Exit { status, when } => return self.exit(*status, when),
            Step::Log(text) => return self.wait_for_log(text),
        }
        self.action = Action {
            began,
            ended: Instant::now(),
        };
        Ok(())
    }

    fn write(&mut self, who: char, bytes: &Template, how: How) -> Result<(), String> {
        let bytes = bytes.filled_in(&self.tokens)?;
        self.connection(who);
        self.asked_at.insert(who, Instant::now());
        let connection = self.connection(who);
        let written = match how {
            How::Endless => return write_until_gone(connection, &bytes),
            How::Whole | How::MayFail => connection.try_send(&bytes),
            How::ByteByByte => bytes.iter().try_for_each(|&byte| {
                thread::sleep(PAUSE_BETWEEN_BYTES);
                connection.try_send(&[byte])
            }),
        };
        match written {
            Err(error) if how != How::MayFail => Err(format!("cannot write: {error}")),
            _ => Ok(()),
        }
    }

    fn read(&mut self, who: char, expected: &Expected, when: &When) -> Result<(), String> {
        let patience = match expected {
            Expected::Nothing(time) => *time,
            _ => PATIENCE,
        };
        if let Expected::Raw(bytes) = expected {
            let got = self.connection(who).next_bytes(bytes.len(), patience);
            self.check(when)?;
            return if got == *bytes {
                Ok(())
            } else {
                Err(difference(&shown(bytes), &shown(&got)))
            };
        }
        let event = self.connection(who).next_event(patience);
        let in_time = self.check(when);
        match (expected, &event) {
            (Expected::Line(template), Event::Line(line)) => {
                let line = String::from_utf8(line.clone())
                    .map_err(|_| format!("the reply is not UTF-8: {}", described(&event)))?;
                template.matches(&line, &mut self.tokens)?;
                self.note_request(who, template);
            }
            (Expected::Eof, Event::Eof) => {}
            (Expected::Gone, Event::Eof | Event::Reset) => {}
            (Expected::End, Event::Eof | Event::Reset | Event::Torn(_)) => {}
            (Expected::End, Event::Line(_)) => return self.read(who, expected, when),
            (Expected::Nothing(_), Event::Nothing) => return Ok(()),
            _ => return Err(difference(&expected.described(), &described(&event))),
        }
        in_time
    }

    /// Remembers when the request was begun that the tokens of this reply answer.
    fn note_request(&mut self, who: char, reply: &Template) {
        let asked_at = self.asked_at.get(&who).copied();
        let asked_at = asked_at.unwrap_or(self.action.began);
        for part in &reply.parts {
            if let Part::Binds(name) = part {
                self.requested_at.insert(name.clone(), asked_at);
            }
        }
    }

    /// Whether now is the time.
    fn check(&self, when: &When) -> Result<(), String> {
        let now = Instant::now();
        if let Some(After { time, of }) = &when.after {
            let from = match of {
                None => self.action.began,
                Some(name) => *self
                    .requested_at
                    .get(name)
                    .ok_or(format!("<{name}> is not bound"))?,
            };
            let elapsed = now - from;
            if elapsed < *time {
                return Err(format!("that came too early, after {elapsed:?}"));
            }
        }
        let elapsed = now - self.action.ended;
        let within = when.within.map(|within| within + journal_time());
        if within.is_some_and(|within| elapsed > within) {
            return Err(format!("{NOT_IN_TIME}, after {elapsed:?}"));
        }
        Ok(())
    }

    fn wait_to_be_served(&mut self, who: char, when: &When) -> Result<(), String> {
        self.connections.remove(&who);
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            let mut client = Client::open(SCHEME, self.addr);
            // A client that is refused may hear so while it writes.
            let _ = client.try_send(b"ping\n_\n_\n");
            if client.next_event(PATIENCE) == Event::Line(b"ok".to_vec()) {
                self.connections.insert(who, client);
                return self.check(when);
            }
            thread::sleep(Duration::from_millis(3));
        }
        Err("it is never served".to_owned())
    }

    fn poll_stats(
        &self,
        count: u64,
        counted: impl Fn(&serde_json::Value) -> u64,
    ) -> Result<(), String> {
        let mut client = Client::open(SCHEME, self.addr);
        if let Some(token) = &self.auth_token {
            client.request("auth", "_", token);
        }
        let started = Instant::now();
        loop {
            let found = counted(&client.stats());
            if found == count {
                return Ok(());
            }
            if started.elapsed() > PATIENCE {
                return Err(difference(&count.to_string(), &found.to_string()));
            }
            thread::sleep(Duration::from_millis(3));
        }
    }

    fn compare(&self, left: &str, relation: Relation, right: &str) -> Result<(), String> {
        let token = |name: &str| {
            self.tokens
                .get(name)
                .ok_or(format!("<{name}> is not bound"))
        };
        let (left, right) = (token(left)?, token(right)?);
        let holds = match relation {
            Relation::After => fence(left) > fence(right),
            Relation::Differs => left != right,
        };
        if holds {
            Ok(())
        } else {
            Err(format!("it is not true of {left} and {right}"))
        }
    }

    fn exit(&self, status: i32, when: &When) -> Result<(), String> {
        let ended = self
            .daemon()?
            .wait_exit(PATIENCE)
            .ok_or("the daemon does not end")?;
        self.check(when)?;
        if ended.code() == Some(status) {
            Ok(())
        } else {
            Err(difference(
                &format!("exit status: {status}"),
                &ended.to_string(),
            ))
        }
    }

    fn wait_for_log(&self, text: &str) -> Result<(), String> {
        let daemon = self.daemon()?;
        let started = Instant::now();
        while !daemon.log().contains(text) {
            if started.elapsed() > PATIENCE {
                return Err(format!("this never stood in the log: {text}"));
            }
            thread::sleep(Duration::from_millis(3));
        }
        Ok(())
    }

    fn connection(&mut self, who: char) -> &mut Client {
        let addr = self.addr;
        self.connections
            .entry(who)
            .or_insert_with(|| Client::open(SCHEME, addr))
    }

    fn daemon(&self) -> Result<&Daemon, &'static str> {
        self.daemon.as_ref().ok_or("this needs a daemon of our own")
    }
}

/// Ends when the server has gone. Until then it may take all that comes, or nothing more.
fn write_until_gone(connection: &mut Client, bytes: &[u8]) -> Result<(), String> {
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if let Err(error) = connection.try_send(bytes) {
            return match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                    Err("the server neither reads nor hangs up".to_owned())
                }
                _ => Ok(()),
            };
        }
    }
    Err("the server reads on".to_owned())
}

fn difference(expected: &str, got: &str) -> String {
    format!("  expected: {}\n  got:      {}", cut(expected), cut(got))
}

/// At most the first 600 characters of `text`: some replies have a hundred thousand.
fn cut(text: &str) -> String {
    let mut chars = text.chars();
    let mut cut: String = chars.by_ref().take(600).collect();
    if chars.next().is_some() {
        cut.push_str(" …");
    }
    cut
}

fn other_server() -> Option<SocketAddr> {
    let name = std::env::var("LATCHD_WIRE_SERVER").ok()?;
    let mut addrs = name
        .to_socket_addrs()
        .unwrap_or_else(|error| panic!("LATCHD_WIRE_SERVER={name}: {error}"));
    addrs.next()
}

fn transcript_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/latchd/wire")
}

// ---------------------------------------------------------------------------------------------
// Reading a transcript

struct Section {
    claim: String,
    line: usize,
    options: Vec<String>,
    lines: Vec<Line>,
}

struct Line {
    number: usize,
    text: String,
    step: Step,
}

enum Step {
    Write {
        who: char,
        bytes: Template,
        how: How,
    },
    Read {
        who: char,
        expected: Expected,
        when: When,
    },
    Open(char),
    Fin(char),
    Close(char),
    Reset(char),
    Sleep(Duration),
    Waiting {
        key: String,
        count: u64,
    },
    Connections(u64),
    Served {
        who: char,
        when: When,
    },
    Compare {
        left: String,
        relation: Relation,
        right: String,
    },
    Signal(Signal),
    Exit {
        status: i32,
        when: When,
    },
    Log(String),
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Whole,
    ByteByByte,
    MayFail,
    Endless,
}

#[derive(Clone, Copy)]
enum Relation {
    After,
    Differs,
}

enum Expected {
    Line(Template),
    Raw(Vec<u8>),
    Eof,
    Gone,
    End,
    Nothing(Duration),
}

/// The times between which something has to happen.
#[derive(Default)]
struct When {
    after: Option<After>,
    within: Option<Duration>,
}

struct After {
    time: Duration,
    /// The token whose request the time is counted from.
    of: Option<String>,
}

impl Section {
    fn needs_own_daemon(&self) -> bool {
        // Statistics show what other sections have left behind.
        let needs = |line: &Line| match &line.step {
            Step::Signal(_) | Step::Exit { .. } | Step::Log(_) => true,
            _ => line.text.contains("\"connections\":"),
        };
        !self.options.is_empty() || self.lines.iter().any(needs)
    }

    fn auth_token(&self) -> Option<String> {
        let place = self
            .options
            .iter()
            .position(|option| option == "--auth-token")?;
        self.options.get(place + 1).cloned()
    }
}

impl Expected {
    fn described(&self) -> String {
        match self {
            Expected::Line(template) => format!("the line \"{}\"", template.source),
            Expected::Raw(bytes) => format!("the bytes \"{}\"", shown(bytes)),
            Expected::Eof => "the end of the stream".to_owned(),
            Expected::Gone => "the end of the stream, or a reset".to_owned(),
            Expected::End => "the end of the stream in the end".to_owned(),
            Expected::Nothing(time) => format!("nothing for {time:?}"),
        }
    }
}

/// Reads a whole file; an error begins with the number of its line.
fn parse(text: &str) -> Result<Vec<Section>, String> {
    let mut sections: Vec<Section> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let at = |problem: String| format!("{number}: {problem}: {line}");
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(claim) = line.strip_prefix("== ") {
            sections.push(Section {
                claim: claim.to_owned(),
                line: number,
                options: Vec::new(),
                lines: Vec::new(),
            });
            continue;
        }
        let section = sections
            .last_mut()
            .ok_or_else(|| at("no section yet".to_owned()))?;
        if let Some(options) = line.strip_prefix("options:") {
            let options = options.split_whitespace().map(parse_option);
            section.options = options.collect::<Result<_, _>>().map_err(at)?;
            continue;
        }
        for line in expanded(line) {
            let step = parse_step(&line).map_err(at)?;
            section.lines.push(Line {
                number,
                text: line,
                step,
            });
        }
    }
    Ok(sections)
}

/// The lines that this one stands for: those of the answer to `help`, or itself.
fn expanded(line: &str) -> Vec<String> {
    match line.split_once("< HELP") {
        Some((who, "")) => HELP.lines().map(|it| format!("{who}< {it}")).collect(),
        _ => vec![line.to_owned()],
    }
}

fn parse_option(word: &str) -> Result<String, String> {
    let bytes = Template::parse(word)?.filled_in(&HashMap::new())?;
    String::from_utf8(bytes).map_err(|_| "options are UTF-8".to_owned())
}

fn parse_step(line: &str) -> Result<Step, String> {
    let mut chars = line.chars();
    if let (Some(who @ 'A'..='Z'), Some(direction @ ('<' | '>'))) = (chars.next(), chars.next()) {
        return match direction {
            '>' => parse_write(who, &line[2..]),
            _ => parse_read(who, line[2..].trim_start()),
        };
    }
    let (when, line) = parse_when(line)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    Ok(match words[..] {
        ["sleep", time] => Step::Sleep(parse_time(time)?),
        ["waiting", key, count] => Step::Waiting {
            key: key.to_owned(),
            count: parse_number(count)?,
        },
        ["connections", count] => Step::Connections(parse_number(count)?),
        ["served", who] => Step::Served {
            who: who.chars().next().ok_or("nobody is to be served")?,
            when,
        },
        ["true", left, relation, right] => {
            let relation = match relation {
                ">" => Relation::After,
                "!=" => Relation::Differs,
                _ => return Err("no such relation".to_owned()),
            };
            Step::Compare {
                left: left.to_owned(),
                relation,
                right: right.to_owned(),
            }
        }
        ["signal", "TERM"] => Step::Signal(Signal::TERM),
        ["signal", "INT"] => Step::Signal(Signal::INT),
        ["signal", "HUP"] => Step::Signal(Signal::HUP),
        ["signal", "USR1"] => Step::Signal(Signal::USR1),
        ["signal", "USR2"] => Step::Signal(Signal::USR2),
        ["signal", "PIPE"] => Step::Signal(Signal::PIPE),
        ["signal", "XFSZ"] => Step::Signal(Signal::XFSZ),
        ["exit", status] => Step::Exit {
            status: parse_number(status)? as i32,
            when,
        },
        ["log", ..] => Step::Log(line["log".len()..].trim().to_owned()),
        _ => return Err("not understood".to_owned()),
    })
}

fn parse_write(who: char, rest: &str) -> Result<Step, String> {
    let (how, bytes) = match rest.as_bytes().first() {
        Some(b'>') => (How::ByteByByte, &rest[1..]),
        Some(b'?') => (How::MayFail, &rest[1..]),
        Some(b'*') => (How::Endless, &rest[1..]),
        _ => (How::Whole, rest),
    };
    let bytes = bytes
        .strip_prefix(' ')
        .ok_or("a blank is missing after the arrow")?;
    Ok(match bytes {
        "OPEN" => Step::Open(who),
        "FIN" => Step::Fin(who),
        "CLOSE" => Step::Close(who),
        "RST" => Step::Reset(who),
        _ => Step::Write {
            who,
            bytes: Template::parse(bytes)?,
            how,
        },
    })
}

fn parse_read(who: char, rest: &str) -> Result<Step, String> {
    let (when, rest) = parse_when(rest)?;
    let expected = match rest.split_once(' ') {
        _ if rest == "EOF" => Expected::Eof,
        _ if rest == "GONE" => Expected::Gone,
        _ if rest == "END" => Expected::End,
        Some(("nothing", time)) => Expected::Nothing(parse_time(time)?),
        Some(("raw", bytes)) => Expected::Raw(Template::parse(bytes)?.filled_in(&HashMap::new())?),
        _ => Expected::Line(Template::parse(&of_member(rest))?),
    };
    Ok(Step::Read {
        who,
        expected,
        when,
    })
}

/// The line as one of several servers sends it, if the daemon is one: statistics have one more
/// member.
fn of_member(line: &str) -> String {
    const FIGURES: &str =
        r#","cluster":{"role":"active","epoch":<int>,"orphans":0,"journal_ms":<number>}}"#;
    match line.strip_suffix('}') {
        Some(rest) if is_member() && line.starts_with("ok {\"connections\"") => {
            format!("{rest}{FIGURES}")
        }
        _ => line.to_owned(),
    }
}

/// Reads `[after 900ms, within 2s]`, if it is there.
fn parse_when(text: &str) -> Result<(When, &str), String> {
    let mut when = When::default();
    let Some((times, rest)) = text
        .strip_prefix('[')
        .and_then(|text| text.split_once("] "))
    else {
        return Ok((when, text));
    };
    for time in times.split(", ") {
        match time.split_once(' ') {
            Some(("after", time)) => when.after = Some(parse_after(time)?),
            Some(("within", time)) => when.within = Some(parse_time(time)?),
            _ => return Err(format!("no time: {time}")),
        }
    }
    Ok((when, rest))
}

/// Reads `900ms` or `900ms of t1`.
fn parse_after(text: &str) -> Result<After, String> {
    let (time, of) = match text.split_once(" of ") {
        Some((time, token)) => (time, Some(token.to_owned())),
        None => (text, None),
    };
    let time = parse_time(time)?;
    Ok(After { time, of })
}

fn parse_time(text: &str) -> Result<Duration, String> {
    if let Some(milliseconds) = text.strip_suffix("ms") {
        return parse_number(milliseconds).map(Duration::from_millis);
    }
    let seconds = text
        .strip_suffix('s')
        .ok_or_else(|| format!("a time without unit: {text}"))?;
    parse_number(seconds).map(Duration::from_secs)
}

fn parse_number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("no number: {text}"))
}

// ---------------------------------------------------------------------------------------------
// Templates: bytes with holes

struct Template {
    source: String,
    parts: Vec<Part>,
}

enum Part {
    Bytes(Vec<u8>),
    /// A new token, to be known by this name.
    Binds(String),
    /// A token which is known.
    Bound(String),
    Integer(Option<(u64, u64)>),
    Number,
}

impl Template {
    fn parse(source: &str) -> Result<Template, String> {
        let mut parts = Vec::new();
        let mut rest = source.as_bytes();
        let mut bytes = Vec::new();
        while let Some(&byte) = rest.first() {
            if byte == b'<' {
                let end = rest
                    .iter()
                    .position(|&byte| byte == b'>')
                    .ok_or("`<` without `>`")?;
                parts.push(Part::Bytes(std::mem::take(&mut bytes)));
                parts.push(parse_hole(&String::from_utf8_lossy(&rest[1..end]))?);
                rest = &rest[end + 1..];
            } else {
                rest = parse_byte(rest, &mut bytes)?;
            }
        }
        parts.push(Part::Bytes(bytes));
        Ok(Template {
            source: source.to_owned(),
            parts,
        })
    }

    /// The bytes to write.
    fn filled_in(&self, tokens: &HashMap<String, String>) -> Result<Vec<u8>, String> {
        let mut filled = Vec::new();
        for part in &self.parts {
            match part {
                Part::Bytes(bytes) => filled.extend_from_slice(bytes),
                Part::Bound(name) => {
                    let token = tokens.get(name).ok_or(format!("<{name}> is not bound"))?;
                    filled.extend_from_slice(token.as_bytes());
                }
                _ => return Err("this can only be read, not written".to_owned()),
            }
        }
        Ok(filled)
    }

    /// Compares a reply with this template and binds the tokens in it.
    fn matches(&self, reply: &str, tokens: &mut HashMap<String, String>) -> Result<(), String> {
        let mismatch = || {
            difference(
                &format!("the line \"{}\"", self.source),
                &format!("the line \"{}\"", shown(reply.as_bytes())),
            )
        };
        let mut rest = reply.as_bytes();
        for part in &self.parts {
            let length = match part {
                Part::Bytes(bytes) if rest.starts_with(bytes) => bytes.len(),
                Part::Bytes(_) => return Err(mismatch()),
                Part::Binds(name) => {
                    let token = rest
                        .get(..32)
                        .filter(|token| is_token(token))
                        .ok_or_else(mismatch)?;
                    tokens.insert(name.clone(), String::from_utf8_lossy(token).into_owned());
                    32
                }
                Part::Bound(name) => {
                    let token = tokens.get(name).ok_or(format!("<{name}> is not bound"))?;
                    if !rest.starts_with(token.as_bytes()) {
                        return Err(mismatch());
                    }
                    token.len()
                }
                Part::Integer(range) => {
                    let length = leading(rest, |byte| byte.is_ascii_digit());
                    let digits = String::from_utf8_lossy(&rest[..length]);
                    let value: u64 = digits.parse().map_err(|_| mismatch())?;
                    if range.is_some_and(|(least, most)| value < least || value > most) {
                        return Err(mismatch());
                    }
                    length
                }
                Part::Number => {
                    let length = leading(rest, |byte| byte.is_ascii_digit() || byte == b'.');
                    String::from_utf8_lossy(&rest[..length])
                        .parse::<f64>()
                        .map_err(|_| mismatch())?;
                    length
                }
            };
            rest = &rest[length..];
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(mismatch())
        }
    }
}

/// Reads one byte, escape or repetition from the front of `source`; gives what is left.
fn parse_byte<'a>(source: &'a [u8], bytes: &mut Vec<u8>) -> Result<&'a [u8], String> {
    match source {
        [b'\\', b'x', digits @ ..] if digits.len() >= 2 => {
            let (digits, rest) = digits.split_at(2);
            let digits = String::from_utf8_lossy(digits);
            bytes.push(
                u8::from_str_radix(&digits, 16).map_err(|_| format!("no byte: \\x{digits}"))?,
            );
            Ok(rest)
        }
        [b'\\', letter, rest @ ..] => {
            bytes.push(match letter {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'0' => 0,
                b'\\' | b'{' | b'}' | b'<' => *letter,
                _ => return Err(format!("no such escape: \\{}", char::from(*letter))),
            });
            Ok(rest)
        }
        // Braces of JSON are not followed by a digit.
        [b'{', digit, ..] if digit.is_ascii_digit() => {
            let end = source
                .iter()
                .position(|&byte| byte == b'}')
                .ok_or("`{` without `}`")?;
            let inside = String::from_utf8_lossy(&source[1..end]).into_owned();
            let (times, mut repeated) = inside
                .split_once('*')
                .map(|(n, r)| (n, r.as_bytes()))
                .ok_or("no `*`")?;
            let mut once = Vec::new();
            while !repeated.is_empty() {
                repeated = parse_byte(repeated, &mut once)?;
            }
            bytes.extend(once.repeat(parse_number(times)? as usize));
            Ok(&source[end + 1..])
        }
        [byte, rest @ ..] => {
            bytes.push(*byte);
            Ok(rest)
        }
        [] => Ok(source),
    }
}

fn parse_hole(hole: &str) -> Result<Part, String> {
    Ok(match hole.split_once(':') {
        None if hole == "int" => Part::Integer(None),
        None if hole == "number" => Part::Number,
        None if hole == "version" => Part::Bytes(env!("CARGO_PKG_VERSION").into()),
        None => Part::Bound(hole.to_owned()),
        Some(("token", name)) => Part::Binds(name.to_owned()),
        Some(("int", range)) => {
            let (least, most) = range.split_once("..").ok_or("no range")?;
            Part::Integer(Some((parse_number(least)?, parse_number(most)?)))
        }
        Some(_) => return Err(format!("no such hole: <{hole}>")),
    })
}

fn is_token(bytes: &[u8]) -> bool {
    bytes
        .iter()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn leading(bytes: &[u8], belongs: impl Fn(u8) -> bool) -> usize {
    bytes
        .iter()
        .position(|&byte| !belongs(byte))
        .unwrap_or(bytes.len())
}
