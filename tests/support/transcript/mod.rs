//! Conversations with a server as text, to be read by anybody who has used telnet.
//!
//! A transcript is a text file of sections. Each section is one claim and has a server and an empty
//! directory of its own:
//!
//! ```text
//! == a lock is granted, renewed and released
//! options: --max-locks 2          options of the server, if any
//! needs: strace root              what else it needs, or it is skipped; also admin, and alone for
//!                                 a server that is none of several
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
//! A> OPEN unix                    connects to <dir>/socket; also to http, or from 127.0.0.2
//! A> HTTP POST /v1/locks/k [Origin: null] {}  A asks the HTTP door, over a new connection
//! A< HTTP 405 [Allow: POST] <*>   A reads a status, a part of the head, and the whole body
//! sleep 300ms
//! waiting k 2                     goes on when two wait for k
//! connections 1                   goes on when so many others are connected
//! served B                        B connects until it is served; may have [within …] before it
//! true t2 > t1                    compares fences; also `t2 != t1`
//! signal TERM
//! exit 0                          the server ends with this status; may have [within …] before it
//! kill                            the server ends without a word
//! start --settle 1                the next one starts, with these options beside its own
//! log granted key=k               goes on when this is in the log, behind the last such line
//! nolog granted                   this is not in the log
//! $ ls                            a command of the shell succeeds in <dir>, and says just this:
//! | socket
//! until $ ls                      a command is repeated until it succeeds and says just this
//!   done                          a further line of the command above
//! ```
//!
//! A connection opens when its letter first occurs. Times are counted from the last line which did
//! something: a write, a close, a signal, the end of a sleep. The least time is counted from the
//! beginning of that, before which nothing in the server can have begun, and the greatest from its
//! end: so a slow machine cannot make a reply look early. The server starts before the first line
//! that is no command of the shell, or one that runs `latch`, whose server it is.
//!
//! In what is written: `\n \r \t \0 \xNN \\ \{ \} \<`, `{256*a}` for repetition, `<t1>` for a token
//! seen before, `<fence t1>` for its fence, `<dir>` for the directory, `<server>` for the address
//! of the server, `<pid>` for a process that is there. In what is read: `<token:t1>` binds a token
//! and `<word:w1>` any word, `<t1>` is what was bound, `<int>`, `<int:1..33>`, `<number>` (JSON),
//! `<number:0..9.5>`, `<version>`, `{256*a}`, `<*>` for anything up to what comes next; everything
//! else stands for itself.

mod script;
mod template;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::cluster::{is_member, journal_time};
use super::stalls::fairly;
use super::{
    described, fence, is_soon, needs, shown, waiter_count, Client, Daemon, Event, Scheme, Signal,
    PATIENCE,
};
use script::{
    in_brackets, parse, After, Expected, How, Line, Relation, Route, Section, Step, When,
};
use template::{Known, Template};

/// Sections wait much more than they compute.
const PARALLEL_SECTIONS: usize = 12;

/// Long enough for the server to have read one byte before the next is written, as a rule.
pub const PAUSE_BETWEEN_BYTES: Duration = Duration::from_millis(1);

/// The transcripts in one folder, and the server that they are played against.
pub struct Folder {
    /// Below the root of the package.
    pub path: &'static str,
    /// What the connections speak.
    pub scheme: Scheme,
    /// Starts a server with these options, which may keep its files in this directory.
    pub start: fn(&[&str], &Path) -> Daemon,
    /// The server to use in place of these, if there is one.
    pub other: fn() -> Option<SocketAddr>,
}

/// Declares a test for each transcript in a folder, and one that none is missing.
#[allow(unused_macros)]
macro_rules! transcripts {
    ($folder:expr; $($name:ident)*) => {
        $(#[test] fn $name() { $folder.play(stringify!($name)); })*

        #[test]
        fn every_transcript_is_played_by_a_test() {
            assert_eq!($folder.names(), [$(stringify!($name)),*]);
        }
    };
}
// Not every test target has transcripts.
#[allow(unused_imports)]
pub(crate) use transcripts;

impl Folder {
    fn directory(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(self.path)
    }

    /// The names of the transcripts, sorted.
    pub fn names(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.directory()).expect("it is part of the source");
        let stem = |file: std::io::Result<std::fs::DirEntry>| {
            let path = file.expect("it is readable").path();
            path.file_stem()?.to_str().map(str::to_owned)
        };
        let mut names: Vec<String> = files.filter_map(stem).collect();
        names.sort_unstable();
        names
    }

    /// Plays all sections of a transcript and reports all which fail.
    pub fn play(&self, name: &str) {
        if !self.scheme.is_available() {
            return;
        }
        let path = self.directory().join(format!("{name}.txt"));
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let sections =
            parse(&text).unwrap_or_else(|problem| panic!("{}:{problem}", path.display()));
        let other = (self.other)();
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
                        let played = fairly(|| match play_section(self, section, other) {
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
            let _ = writeln!(report, "\n{}/{name}.txt:{failure}", self.path);
        }
        assert!(
            failures.is_empty(),
            "{} of {} sections failed\n{report}",
            failures.len(),
            sections.len()
        );
    }
}

/// Begins the one complaint that a late machine can cause.
const NOT_IN_TIME: &str = "that came too late";

fn play_section(
    folder: &Folder,
    section: &Section,
    other: Option<SocketAddr>,
) -> Result<(), String> {
    // A server of a cluster does not drain: it hands over.
    let is_drained = |line: &Line| matches!(line.step, Step::Signal(Signal::TERM));
    if is_member() && section.lines.iter().any(is_drained) {
        return Ok(());
    }
    if other.is_some() && section.needs_own_daemon() {
        eprintln!(
            "skipped, for it needs a daemon of its own: {}",
            section.claim
        );
        return Ok(());
    }
    let has = |name: &String| match name.as_str() {
        "root" => needs::root().is_some(),
        "admin" => needs::admin().is_some(),
        "alone" => !is_member(),
        name => {
            assert!(needs::is_listed(name), "{name} is not in packages.txt");
            needs::programs([name]).is_some()
        }
    };
    if !section.needs.iter().all(has) {
        return Ok(());
    }
    let mut stage = Stage::new(folder, section, other);
    for (index, line) in section.lines.iter().enumerate() {
        if let Err(mut problem) = stage.perform(&line.step) {
            if stage.first_end.is_some_and(|end| end <= Instant::now()) {
                problem += &format!("\n  a lease has ended; if it was still needed, {NOT_IN_TIME}");
            }
            return Err(failure_report(section, index, &problem, &stage));
        }
    }
    if other.is_some() {
        // What the connections held must not be met by the next section.
        stage.connections.clear();
        return stage.poll_stats(0, beside_the_asking);
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
    for (name, known) in &stage.known {
        let _ = writeln!(report, "     <{name}> is {known}");
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
struct Stage<'a> {
    folder: &'a Folder,
    options: &'a [Template],
    other: Option<SocketAddr>,
    daemon: Option<Daemon>,
    /// How much of the log is behind the line that was found last.
    log_read: usize,
    directory: TempDir,
    auth_token: Option<String>,
    connections: HashMap<char, Client>,
    known: Known,
    /// When each connection began its last write.
    asked_at: HashMap<char, Instant>,
    /// The same for the request that each token answers.
    requested_at: HashMap<String, Instant>,
    /// When the first lease may end. A section that reaches its next line after that may fail only
    /// because the machine is late.
    first_end: Option<Instant>,
    action: Action,
    /// Whether a command of the shell has run `latch`, which waits for a server, but not for long.
    has_run_latch: bool,
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

impl<'a> Stage<'a> {
    fn new(folder: &'a Folder, section: &'a Section, other: Option<SocketAddr>) -> Stage<'a> {
        let directory = tempfile::tempdir().expect("there is room");
        let known = HashMap::from([
            ("dir".to_owned(), directory.path().display().to_string()),
            ("pid".to_owned(), std::process::id().to_string()),
        ]);
        Stage {
            folder,
            options: &section.options,
            other,
            daemon: None,
            log_read: 0,
            directory,
            auth_token: section.auth_token(),
            connections: HashMap::new(),
            known,
            asked_at: HashMap::new(),
            requested_at: HashMap::new(),
            first_end: None,
            action: Action::now(),
            has_run_latch: false,
        }
    }

    /// Starts a server, with these options beside those of the section.
    fn start(&mut self, more: &[Template]) -> Result<(), String> {
        let options = self.options.iter().chain(more);
        let options = options.map(|option| option.text(&self.known));
        let options: Vec<String> = options.collect::<Result<_, _>>()?;
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let daemon = (self.folder.start)(&options, self.directory.path());
        let server = match daemon.port {
            Some(_) => daemon.addr().to_string(),
            None => self.directory.path().join("socket").display().to_string(),
        };
        self.known.insert("server".to_owned(), server);
        self.daemon = Some(daemon);
        self.log_read = 0;
        Ok(())
    }

    fn perform(&mut self, step: &Step) -> Result<(), String> {
        let needs_server = match step {
            Step::Shell { command, .. } => runs_latch(&command.source),
            Step::Start(_) => false,
            _ => true,
        };
        if needs_server && self.daemon.is_none() && self.other.is_none() {
            self.start(&[])?;
        }
        let mut began = Instant::now();
        match step {
            Step::Write { who, bytes, how } => self.write(*who, bytes, *how)?,
            Step::Open(who, route) => {
                // The server counts from here; a handshake of TLS comes after it.
                self.action = Action::now();
                self.asked_at.insert(*who, self.action.began);
                let client = self.open(*route)?;
                self.connections.insert(*who, client);
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
            Step::Kill => {
                self.daemon()?.signal(Signal::KILL);
                self.daemon()?
                    .wait_exit(PATIENCE)
                    .ok_or("it does not end")?;
            }
            Step::Start(options) => self.start(options)?,
            Step::Read {
                who,
                expected,
                when,
            } => return self.read(*who, expected, when),
            Step::Waiting { key, count } => {
                let counted = |stats: &serde_json::Value| waiter_count(stats, key);
                return self.poll_stats(*count, counted);
            }
            Step::Connections(count) => return self.poll_stats(*count, beside_the_asking),
            Step::Served { who, when } => return self.wait_to_be_served(*who, when),
            Step::Compare {
                left,
                relation,
                right,
            } => return self.compare(left, *relation, right),
            Step::Exit { status, when } => return self.exit(*status, when),
            Step::Log(line) => return self.wait_for_log(line),
            Step::NoLog(line) => {
                let log = self.daemon()?.log();
                let found = log
                    .lines()
                    .find(|it| line.matches(it, &mut self.known).is_ok());
                return found.map_or(Ok(()), |found| Err(format!("  in the log: {found}")));
            }
            Step::Shell {
                command,
                output,
                is_awaited,
            } => {
                // It gives a server a second, and says what it has learnt by then.
                self.has_run_latch |= runs_latch(&command.source);
                let mut ended = self.run(&command.text(&self.known)?, output, *is_awaited);
                if let (Err(problem), true) = (&mut ended, self.has_run_latch) {
                    *problem += &format!("\n  if latch has given up, {NOT_IN_TIME}");
                }
                return ended;
            }
        }
        self.action = Action {
            began,
            ended: Instant::now(),
        };
        Ok(())
    }

    fn write(&mut self, who: char, bytes: &Template, how: How) -> Result<(), String> {
        let mut bytes = bytes.filled_in(&self.known)?;
        if how == How::Http {
            bytes = http_request(&bytes)?;
            let client = self.open(Route::Http)?;
            self.connections.insert(who, client);
        }
        self.connection(who);
        self.asked_at.insert(who, Instant::now());
        let connection = self.connection(who);
        let written = match how {
            How::Endless => return write_until_gone(connection, &bytes),
            How::Whole | How::MayFail | How::Http => connection.try_send(&bytes),
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
        if let Expected::Http { answer, header } = expected {
            let got = self.connection(who).next_bytes(usize::MAX, patience);
            self.check(when)?;
            let (head, got) = http_answer(&got)?;
            answer.matches(&got, &mut self.known)?;
            self.note_request(who, answer);
            let has_header = head.contains(header);
            return has_header
                .then_some(())
                .ok_or_else(|| difference(header, &head));
        }
        let event = self.connection(who).next_event(patience);
        let in_time = self.check(when);
        match (expected, &event) {
            (Expected::Line(template), Event::Line(line)) => {
                let line = String::from_utf8(line.clone())
                    .map_err(|_| format!("the reply is not UTF-8: {}", described(&event)))?;
                template.matches(&line, &mut self.known)?;
                self.note_request(who, template);
                self.note_lease(who, template, &line);
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
        for name in reply.tokens() {
            self.requested_at.insert(name.clone(), asked_at);
        }
    }

    /// Remembers when the lease of a reply with a token may end.
    fn note_lease(&mut self, who: char, reply: &Template, line: &str) {
        let lease = line.rsplit(' ').next().and_then(|word| word.parse().ok());
        let Some(lease) = lease.filter(|_| reply.tokens().next().is_some()) else {
            return;
        };
        let asked_at = self.asked_at.get(&who).copied();
        let end = asked_at.and_then(|asked_at| asked_at.checked_add(Duration::from_secs(lease)));
        self.first_end = self.first_end.into_iter().chain(end).min();
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
        let mut served = None;
        let is_served = is_soon(PATIENCE, || {
            let mut client = self.open(Route::Usual).expect("it listens");
            // A client that is refused may hear so while it writes.
            let _ = client.try_send(b"ping\n_\n_\n");
            let is_served = client.next_event(PATIENCE) == Event::Line(b"ok".to_vec());
            served = is_served.then_some(client);
            is_served
        });
        let client = served.filter(|_| is_served).ok_or("it is never served")?;
        self.connections.insert(who, client);
        self.check(when)
    }

    fn poll_stats(
        &self,
        count: u64,
        counted: impl Fn(&serde_json::Value) -> u64,
    ) -> Result<(), String> {
        let mut client = self.open(Route::Usual)?;
        if let Some(token) = &self.auth_token {
            client.request("auth", "_", token);
        }
        let mut found = 0;
        let is_so = is_soon(PATIENCE, || {
            found = counted(&client.stats());
            found == count
        });
        is_so
            .then_some(())
            .ok_or_else(|| difference(&count.to_string(), &found.to_string()))
    }

    fn compare(&self, left: &str, relation: Relation, right: &str) -> Result<(), String> {
        let token = |name: &str| self.known.get(name).ok_or(format!("<{name}> is not bound"));
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

    fn wait_for_log(&mut self, line: &Template) -> Result<(), String> {
        let daemon = self.daemon.as_ref().ok_or(NO_DAEMON)?;
        let (known, log_read) = (&mut self.known, &mut self.log_read);
        let is_there = is_soon(PATIENCE, || {
            let log = daemon.log();
            let mut at = *log_read;
            for whole in log[at..].split_inclusive('\n') {
                at += whole.len();
                if line.matches(whole.trim_end(), known).is_ok() {
                    *log_read = at;
                    return true;
                }
            }
            false
        });
        is_there
            .then_some(())
            .ok_or_else(|| format!("this never came in the log: {}", line.source))
    }

    /// Runs a command of the shell, until it succeeds and says what is expected if it `is_awaited`.
    fn run(&mut self, command: &str, output: &[Template], is_awaited: bool) -> Result<(), String> {
        let mut outcome = Ok(());
        let limit = if is_awaited { PATIENCE } else { Duration::ZERO };
        is_soon(limit, || {
            outcome = self.run_once(command, output);
            outcome.is_ok()
        });
        outcome
    }

    fn run_once(&mut self, command: &str, output: &[Template]) -> Result<(), String> {
        let mut shell = Daemon::command_of("timeout");
        shell
            .args(["-k", "5", "60", "sh", "-c", command])
            .current_dir(self.directory.path())
            .envs(self.known.get("server").map(|it| ("LATCH_SERVER", it)));
        let ended = shell.output().map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&ended.stdout);
        if !ended.status.success() {
            let complaint = String::from_utf8_lossy(&ended.stderr);
            return Err(format!("{}: {said}{complaint}", ended.status));
        }
        let lines: Vec<&str> = said.split_terminator('\n').collect();
        if lines.len() != output.len() {
            let expected = format!("{} lines", output.len());
            return Err(difference(&expected, &said));
        }
        let mut lines = lines.iter().zip(output);
        lines.try_for_each(|(line, expected)| expected.matches(line, &mut self.known))
    }

    fn open(&self, route: Route) -> Result<Client, String> {
        if let (Some(addr), Route::Usual) = (self.other, route) {
            return Ok(Client::open(self.folder.scheme, addr));
        }
        let daemon = self.daemon()?;
        Ok(match route {
            Route::Usual if daemon.port.is_some() => {
                Client::open(self.folder.scheme, daemon.addr())
            }
            Route::From(last) => Client::tcp_from([127, 0, 0, last], daemon.addr()),
            Route::Usual | Route::Unix => Client::unix(&self.directory.path().join("socket")),
            Route::Http => Client::tcp(door_of(daemon)),
        })
    }

    fn connection(&mut self, who: char) -> &mut Client {
        if !self.connections.contains_key(&who) {
            let client = self.open(Route::Usual).expect("a server has started");
            self.connections.insert(who, client);
        }
        self.connections.get_mut(&who).expect("just opened")
    }

    fn daemon(&self) -> Result<&Daemon, &'static str> {
        self.daemon.as_ref().ok_or(NO_DAEMON)
    }
}

/// Whether a command of the shell runs `latch`, or a script that does.
fn runs_latch(command: &str) -> bool {
    let mut words = command.split(|it: char| !it.is_alphanumeric());
    words.any(|word| ["latch", "latches"].contains(&word))
}

const NO_DAEMON: &str = "this needs a daemon of our own";

fn beside_the_asking(stats: &serde_json::Value) -> u64 {
    let all = stats["connections"].as_u64().unwrap_or_default();
    all.saturating_sub(1)
}

/// Where the HTTP door of a daemon is.
pub fn door_of(daemon: &Daemon) -> SocketAddr {
    daemon.wait_for_log("listening http=", PATIENCE);
    let log = daemon.log();
    let (_, rest) = log.split_once("listening http=").expect("it is there");
    let addr = rest.lines().next().expect("a line").parse();
    addr.expect("an address")
}

/// The bytes of a request that is given as `POST /path [Name: value] body`.
fn http_request(request: &[u8]) -> Result<Vec<u8>, String> {
    let request = std::str::from_utf8(request).map_err(|error| error.to_string())?;
    let (line, header, body) = in_brackets(request);
    let (line, body) = match body {
        // Without a header, the body begins behind the path.
        "" => line
            .match_indices(' ')
            .nth(1)
            .map_or((line, ""), |(at, _)| line.split_at(at)),
        body => (line, body),
    };
    let (body, end) = (
        body.trim_start(),
        if header.is_empty() { "" } else { "\r\n" },
    );
    Ok(format!(
        "{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\
         Content-Type: application/json\r\n{header}{end}\r\n{body}",
        body.len()
    )
    .into_bytes())
}

/// The head of an answer, and its status and body as they are in a transcript.
fn http_answer(answer: &[u8]) -> Result<(String, String), String> {
    let answer = String::from_utf8_lossy(answer);
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .ok_or_else(|| format!("no answer of HTTP: {answer}"))?;
    let status = head.split(' ').nth(1).unwrap_or_default();
    let text = format!("{status} {body}").trim_end().to_owned();
    Ok((head.to_owned(), text))
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
