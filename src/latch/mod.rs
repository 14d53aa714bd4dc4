//! The program `latch`: locks and semaphores of a `latchd` server, for the shell. See latch(1).

mod fence_check;
mod options;
mod stats;

use std::env;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use rustix::io::Errno;

use crate::cli::arguments::{self, Parsed};
use crate::cli::{output, secret, values};
use crate::client::{
    check_key, Client, Connection, Error, Guard, Lock, Loss, Patience, Settings, Terms, Token,
};
use crate::supervise::{self, Ended, Event, HeldLock, Job, Orphan, SignalWatch};
use crate::text::{escaped_json, reason, Escaped};
use fence_check::Verdict;
use options::{Command, Flags, Reach};

const PROGRAM: &str = "latch";
const DEFAULT_SERVER: &str = "127.0.0.1:6388";

/// How often `stats --watch` looks.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// How long the server may take to hear that a command under a lock has ended.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

// Exit status, as latch(1) has it; the numbers are those of sysexits(3).
const OUTDATED: u8 = 1;
const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
const LOST: u8 = 70;
const SYSTEM_ERROR: u8 = 71;
const FILE_ERROR: u8 = 74;
const BUSY: u8 = 75;
const PROTOCOL: u8 = 76;
const NO_PERMISSION: u8 = 77;

/// Why we do not do what was asked, and the exit status for it.
struct Failure {
    status: u8,
    /// `None` where the status says it all.
    message: Option<String>,
}

impl Failure {
    fn new(status: u8, message: impl Display) -> Failure {
        Failure {
            status,
            message: Some(message.to_string()),
        }
    }

    fn usage(message: impl Display) -> Failure {
        Failure::new(USAGE, message)
    }

    fn say(&self) {
        if let Some(message) = &self.message {
            complain(message);
        }
    }
}

/// What a command may end with: an exit status, or a failure.
type Outcome = Result<u8, Failure>;

/// Runs one command and returns its exit status (latch(1), EXIT STATUS).
pub fn main() -> ExitCode {
    supervise::stage(PROGRAM);
    let mut arguments = env::args_os().skip(1);
    let ours: Vec<OsString> = arguments
        .by_ref()
        .take_while(|argument| argument != "--")
        .collect();
    let command: Vec<OsString> = arguments.collect();
    let flags: Flags = match arguments::parse(PROGRAM, &options::BOOLEANS, ours.into_iter()) {
        Parsed::Run(flags) => flags,
        Parsed::Print(text) => return print(&text).map_or_else(fail, ExitCode::from),
        Parsed::Usage(reason) => return fail(Failure::usage(reason)),
    };
    match carry_out(&flags.command, &command) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => fail(failure),
    }
}

fn fail(failure: Failure) -> ExitCode {
    failure.say();
    ExitCode::from(failure.status)
}

fn complain(message: impl Display) {
    output::complain(PROGRAM, message);
}

/// Prints. A reader that has left, as `head` does, is no failure.
fn print(text: &str) -> Outcome {
    match output::print_if_read(text) {
        Err(error) => Err(unprintable(&error)),
        Ok(()) => Ok(0),
    }
}

fn unprintable(error: &io::Error) -> Failure {
    Failure::new(
        FILE_ERROR,
        format_args!("standard output: {}", reason(error)),
    )
}

fn carry_out(command: &Command, words: &[OsString]) -> Outcome {
    if !words.is_empty() && !matches!(command, Command::Run(_)) {
        return Err(Failure::usage("only latch run takes a command after --"));
    }
    match command {
        Command::Run(options) => run_command(options, words),
        Command::Wait(options) => wait(options),
        Command::Acquire(options) => acquire(options),
        Command::Renew(options) => renew(options),
        Command::Release(options) => release(options),
        Command::Stats(options) => stats(options),
        Command::Ping(options) => ping(options),
        Command::FenceCheck(options) => check_fence(options),
    }
}

fn run_command(options: &options::Run, command: &[OsString]) -> Outcome {
    if command.is_empty() {
        return Err(Failure::usage("a command to run is wanted after --"));
    }
    let busy_ok = boolean("--busy-ok", options.busy_ok.as_deref())?;
    let client = client(options.reach())?;
    supervise::check_proc().map_err(no_process)?;
    let mut signals = SignalWatch::new().map_err(|error| no_signals(&error))?;

    let server = client.server_of(&options.key).to_string();
    let place = place_of(&client, &options.key);
    // On a thread of its own, so that a signal is heard while we wait. To leave the queue is to exit.
    let granted = Event::new().map_err(|error| no_signals(&error))?;
    let (key, timeout, lease, limit, done) = (
        options.key.clone(),
        options.timeout,
        options.lease,
        options.limit,
        granted.clone(),
    );
    let waiting = thread::Builder::new()
        .name("waiting".into())
        .spawn(move || {
            let lock = lock_of(&client, &key, lease, limit);
            let guard = match timeout {
                None => lock.acquire().map(Some),
                Some(0) => lock.try_acquire(),
                Some(seconds) => lock.acquire_within(Duration::from_secs(seconds)),
            };
            done.set();
            guard
        });
    let waiting = waiting.map_err(|error| {
        Failure::new(
            SYSTEM_ERROR,
            format_args!("cannot start a thread: {}", reason(&error)),
        )
    })?;
    if let Err(killed) = signals.wait_for(&granted) {
        return Ok(killed.follow());
    }
    let guard = match waiting.join().expect("the thread does not panic") {
        Err(error @ (Error::Unreachable(_) | Error::AuthFailed)) => {
            return Err(failure(shown(&server), &error));
        }
        Err(error @ (Error::InvalidKey | Error::InvalidArgument(_))) => {
            return Err(failure(shown(&options.key), &error));
        }
        Err(error) => return Err(failure(place, &error)),
        Ok(None) if busy_ok => return Ok(0),
        Ok(None) => {
            return Err(Failure::new(options.busy_status, busy(&place)));
        }
        Ok(Some(guard)) => guard,
    };
    run_under(guard, options, command, &mut signals)
}

fn no_signals(error: &io::Error) -> Failure {
    Failure::new(
        SYSTEM_ERROR,
        format_args!("cannot catch signals: {}", reason(error)),
    )
}

fn no_process(why: impl Display) -> Failure {
    Failure::new(SYSTEM_ERROR, format_args!("cannot start a process: {why}"))
}

/// Runs the command while the guard holds the lock, and gives it back.
fn run_under(
    guard: Guard,
    options: &options::Run,
    command: &[OsString],
    signals: &mut SignalWatch,
) -> Outcome {
    let lost = Event::new().map_err(|error| no_signals(&error))?;
    let confirmed = Event::new().map_err(|error| no_signals(&error))?;
    let told = lost.clone();
    guard.on_lost(move |_| told.set());
    let kill_after = Duration::from_secs(options.kill_after);
    let told = lost.clone();
    // A command that ignores SIGTERM is killed before the lock can be another's.
    if !guard.on_silence(kill_after, move || told.set()) {
        complain(format_args!(
            "{}: the lease of {} s is less than twice --kill-after, {} s: a command that ignores \
             SIGTERM may outlast it",
            shown(&options.key),
            guard.lease().as_secs(),
            options.kill_after
        ));
    }
    let look = || {
        let confirmed = confirmed.clone();
        guard.renew_and(move |is_held| {
            if is_held {
                confirmed.set();
            }
        });
    };
    let held = HeldLock {
        lost: &lost,
        confirmed: &confirmed,
        look: &look,
    };
    let job = Job {
        command,
        environment: &[
            ("LATCH_KEY", options.key.clone().into()),
            ("LATCH_TOKEN", guard.token().to_string().into()),
            ("LATCH_FENCE", guard.token().fence().to_string().into()),
        ],
        kill_after,
        inherited: None,
        orphan: Orphan::Ends,
    };
    let ended = supervise::run(&job, signals, &held).map_err(|error| no_process(reason(&error)))?;
    if ended == Ended::Lost {
        // A server that is silent is told of before the lock counts as lost.
        let why = guard.loss().unwrap_or(Loss::Deadline).to_string();
        let _ = give_back(guard);
        return Err(lost_lock(&options.key, &why));
    }
    give_back(guard).map_err(|why| lost_lock(&options.key, &why))?;
    Ok(match ended {
        Ended::Exited(status) => u8::try_from(status).unwrap_or(u8::MAX),
        Ended::Killed(killed) => killed.follow(),
        Ended::Lost => LOST,
    })
}

/// Releases, and says how the lock was lost if it was not ours any more. Does not wait long for a
/// server that does not answer while the lease runs: to exit is to release as well.
fn give_back(guard: Guard) -> Result<(), String> {
    if let Some(loss) = guard.loss() {
        return Err(loss.to_string());
    }
    let was_held = guard.is_held();
    let (sender, released) = bounded(1);
    let releasing = thread::Builder::new()
        .name("releasing".into())
        .spawn(move || {
            let _ = sender.send(guard.release());
        });
    let released = match releasing {
        Ok(_) => released.recv_timeout(RELEASE_PATIENCE),
        Err(_) => return Ok(()),
    };
    match released {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error @ (Error::Refused | Error::Closed))) => Err(error.to_string()),
        _ if was_held => Ok(()),
        _ => Err(Loss::Deadline.to_string()),
    }
}

fn lost_lock(key: &str, why: &str) -> Failure {
    Failure::new(
        LOST,
        format_args!("{}: the lock was lost: {why}", shown(key)),
    )
}

fn wait(options: &options::Wait) -> Outcome {
    let client = client(options.reach())?;
    let (key, place) = (&options.key, place_of(&client, &options.key));
    let began = Instant::now();
    let (mut connection, terms) = connect(&client, key, None, options.limit)?;
    let patience = patience(options.timeout).after(began.elapsed());
    let granted = connection.acquire(key, terms, patience);
    match granted.map_err(|error| failure(&place, &error))? {
        None => Err(Failure::new(BUSY, busy(&place))),
        Some(grant) => {
            let released = connection.release(key, terms, grant.token);
            released.map_err(|error| failure(&place, &error))?;
            Ok(0)
        }
    }
}

fn acquire(options: &options::Acquire) -> Outcome {
    let client = client(options.reach())?;
    let (key, place) = (&options.key, place_of(&client, &options.key));
    let began = Instant::now();
    let (mut connection, terms) = connect(&client, key, options.lease, options.limit)?;
    let patience = patience(options.timeout).after(began.elapsed());
    let granted = connection.acquire(key, terms, patience);
    let Some(grant) = granted.map_err(|error| failure(&place, &error))? else {
        return Err(Failure::new(BUSY, busy(&place)));
    };
    // A server that releases at the end of the connection would leave a token that is good for nothing.
    connection.finish();
    let terms = Terms {
        lease: Some(grant.lease),
        ..terms
    };
    let (mut connection, _) = connect(&client, key, options.lease, options.limit)?;
    match connection.renew(key, terms, grant.token) {
        Ok(_) => match output::print(&format!("{}\n", grant.token)) {
            Ok(()) => Ok(0),
            Err(error) => {
                // Nobody could give it back but we.
                let _ = connection.release(key, terms, grant.token);
                Err(unprintable(&error))
            }
        },
        Err(Error::Refused) => Err(Failure::new(
            LOST,
            format_args!(
                "{place}: the server released it when the connection closed; it keeps locks only \
                 if it runs with --no-auto-release-on-disconnect"
            ),
        )),
        Err(error) => Err(failure(place, &error)),
    }
}

fn renew(options: &options::Renew) -> Outcome {
    let token = token(&options.token)?;
    let client = client(options.reach())?;
    let place = place_of(&client, &options.key);
    let (mut connection, terms) = connect(&client, &options.key, options.lease, options.limit)?;
    match connection.renew(&options.key, terms, token) {
        Ok(lease) => print(&format!("{}\n", lease.as_secs())),
        Err(Error::Refused) => Err(not_held(&place)),
        Err(error) => Err(failure(place, &error)),
    }
}

fn release(options: &options::Release) -> Outcome {
    let token = token(&options.token)?;
    let client = client(options.reach())?;
    let place = place_of(&client, &options.key);
    let (mut connection, terms) = connect(&client, &options.key, None, options.limit)?;
    match connection.release(&options.key, terms, token) {
        Ok(()) => Ok(0),
        Err(Error::Refused) => Err(not_held(&place)),
        Err(error) => Err(failure(place, &error)),
    }
}

/// How statistics are shown.
#[derive(Clone, Copy)]
enum Form {
    /// As the server answers it.
    Json,
    /// The same, for a terminal.
    EscapedJson,
    Table,
}

fn stats(options: &options::Stats) -> Outcome {
    let as_json = boolean("--json", options.json.as_deref())?;
    let watch = boolean("--watch", options.watch.as_deref())?;
    let client = client(options.reach())?;
    let on_terminal = io::stdout().is_terminal();
    let form = match (as_json, on_terminal) {
        (false, _) => Form::Table,
        (true, false) => Form::Json,
        (true, true) => Form::EscapedJson,
    };
    loop {
        let (mut text, failures) = statistics(&client, form);
        if watch && !as_json && on_terminal {
            text.insert_str(0, "\u{1b}[H\u{1b}[2J");
        }
        let printed = output::print(&text);
        let is_over = !watch || failures.len() == client.servers().len();
        let status = report(failures);
        match printed {
            // Whoever watched may have left; there is nobody to look for then.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(status),
            Err(error) => return Err(unprintable(&error)),
            Ok(()) if is_over => return Ok(status),
            Ok(()) => thread::sleep(WATCH_INTERVAL),
        }
    }
}

/// The statistics of all servers as text, and the failures of those that gave none.
fn statistics(client: &Client, form: Form) -> (String, Vec<Failure>) {
    let (mut text, mut failures) = (String::new(), Vec::new());
    let has_names = client.servers().len() > 1;
    for server in client.servers() {
        let shown_as = |json: String| match form {
            Form::Json => Ok(json + "\n"),
            Form::EscapedJson => Ok(escaped_json(&json) + "\n"),
            Form::Table => stats::render(&json).ok_or_else(|| Error::bad_reply(&json)),
        };
        let answer = client
            .connect(server)
            .and_then(|mut connection| connection.stats())
            .and_then(shown_as);
        if matches!(form, Form::Table) && has_names {
            text += &format!("{server}\n");
        }
        match answer {
            Ok(answer) => text += &answer,
            Err(error) => {
                failures.push(failure(shown(&server.to_string()), &error));
                match form {
                    Form::Table if has_names => text += "no statistics\n",
                    Form::Table => {}
                    // There is a line for each server, so that they can be told apart.
                    Form::Json | Form::EscapedJson => text += "null\n",
                }
            }
        }
    }
    (text, failures)
}

fn ping(options: &options::Ping) -> Outcome {
    let client = client(options.reach())?;
    let failures = client.servers().iter().filter_map(|server| {
        let answered = client
            .connect(server)
            .and_then(|mut connection| connection.ping());
        let error = answered.err()?;
        Some(failure(shown(&server.to_string()), &error))
    });
    Ok(report(failures.collect()))
}

/// Says what has failed, and returns the exit status for all of it: that of a server which is not
/// there, if there is one, or else of the first.
fn report(failures: Vec<Failure>) -> u8 {
    let mut statuses = failures.iter().map(|failure| failure.status);
    let status = match statuses.clone().find(|status| *status == UNAVAILABLE) {
        Some(unavailable) => unavailable,
        None => statuses.next().unwrap_or(0),
    };
    for failure in failures {
        failure.say();
    }
    status
}

fn check_fence(options: &options::FenceCheck) -> Outcome {
    let token = token(&options.token)?;
    match fence_check::check(Path::new(&options.file), token.fence()) {
        Ok(Verdict::Current) => Ok(0),
        Ok(Verdict::Outdated) => Err(Failure {
            status: OUTDATED,
            message: None,
        }),
        Err(error) => Err(Failure::new(
            FILE_ERROR,
            format_args!("{}: {}", shown(&options.file), reason(&error)),
        )),
    }
}

/// A client of the servers that the command line, the environment or nobody names.
fn client(reach: Reach<'_>) -> Result<Client, Failure> {
    let named: Vec<String> = if reach.servers.is_empty() {
        let listed = variable("LATCH_SERVER")?.unwrap_or_else(|| DEFAULT_SERVER.into());
        listed
            .split([',', ' '])
            .filter(|server| !server.is_empty())
            .map(str::to_owned)
            .collect()
    } else {
        reach.servers.to_vec()
    };
    let mut servers = Vec::new();
    for server in named {
        let parsed = server.parse();
        servers
            .push(parsed.map_err(|why| Failure::usage(format_args!("{}: {why}", shown(&server))))?);
    }
    if servers.is_empty() {
        return Err(Failure::usage("LATCH_SERVER: it names no server"));
    }
    let file = match reach.auth_token_file {
        Some(file) => Some(file.to_owned()),
        None => variable("LATCH_AUTH_TOKEN_FILE")?,
    };
    let auth_token = file.map(|file| read_token(&file)).transpose()?;
    if reach.connect_timeout == 0 {
        let message = values::invalid("0", "--connect-timeout", "expected at least 1");
        return Err(Failure::usage(message));
    }
    let timeout = Duration::from_secs(reach.connect_timeout);
    let settings = Settings {
        connect_timeout: timeout,
        reply_timeout: timeout,
        auth_token,
    };
    Ok(Client::with_settings(servers, settings))
}

/// A variable that is set and not empty. One that cannot be read is not as good as none: the lock of
/// another server is another lock.
fn variable(name: &str) -> Result<Option<String>, Failure> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => {
            Err(Failure::usage(format_args!("{name}: it is not UTF-8")))
        }
    }
}

fn read_token(file: &str) -> Result<String, Failure> {
    secret::read(Path::new(file))
        .map_err(|why| Failure::new(FILE_ERROR, format_args!("{}: {why}", shown(file))))
}

fn lock_of<'a>(
    client: &'a Client,
    key: &'a str,
    lease: Option<u64>,
    limit: Option<u32>,
) -> Lock<'a> {
    let lock = match limit {
        None => client.lock(key),
        Some(limit) => client.semaphore(key, limit),
    };
    match lease {
        None => lock,
        Some(seconds) => lock.lease(Duration::from_secs(seconds)),
    }
}

fn connect(
    client: &Client,
    key: &str,
    lease: Option<u64>,
    limit: Option<u32>,
) -> Result<(Connection, Terms), Failure> {
    let terms = Terms {
        limit,
        lease: lease.map(Duration::from_secs),
    };
    check_key(key)
        .and_then(|()| terms.check())
        .map_err(|error| failure(shown(key), &error))?;
    let server = client.server_of(key);
    let connection = client
        .connect(server)
        .map_err(|error| failure(shown(&server.to_string()), &error))?;
    Ok((connection, terms))
}

fn patience(timeout: Option<u64>) -> Patience {
    match timeout {
        None => Patience::Forever,
        Some(0) => Patience::Try,
        Some(seconds) => Patience::Within(Duration::from_secs(seconds)),
    }
}

fn token(text: &str) -> Result<Token, Failure> {
    text.parse().map_err(|error: Error| Failure::usage(error))
}

fn boolean(option: &str, given: Option<&str>) -> Result<bool, Failure> {
    let Some(given) = given else { return Ok(false) };
    values::yes_or_no(given)
        .map_err(|reason| Failure::usage(values::invalid(given, option, &reason)))
}

/// The key and its server, for a message about both.
fn place_of(client: &Client, key: &str) -> String {
    let server = client.server_of(key).to_string();
    format!("{} at {}", shown(key), shown(&server))
}

fn busy(place: &str) -> String {
    format!("{place}: somebody else has it")
}

fn not_held(place: &str) -> Failure {
    Failure::new(
        LOST,
        format_args!("{place}: it is not held with this token"),
    )
}

/// What an error means for the exit status; `about` is the key, the server, or both.
fn failure(about: impl Display, error: &Error) -> Failure {
    let status = match error {
        Error::Unreachable(error) if is_shortage(error) => SYSTEM_ERROR,
        Error::Unreachable(_) | Error::Closed | Error::NoReply => UNAVAILABLE,
        Error::AuthFailed => NO_PERMISSION,
        Error::MaxLocks | Error::MaxWaiters | Error::Draining => BUSY,
        Error::LeaseExpired => LOST,
        Error::InvalidKey | Error::InvalidArgument(_) => USAGE,
        _ => PROTOCOL,
    };
    Failure::new(status, format_args!("{about}: {error}"))
}

/// Whether it is not the server that could not be reached, but this host that has nothing left for it.
fn is_shortage(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::AGAIN)
    )
}

fn shown(text: &str) -> Escaped<'_> {
    Escaped(text.as_bytes())
}
