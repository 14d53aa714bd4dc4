//! The command line of `latch`: see latch(1).

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use super::claim::Asking;
use super::servers::{self, Target, ROUND_TRIP};
use super::{usage, BUSY, OWN};
use crate::client::environment::{self, Overrides};
use crate::client::limits::{MAX_LIMIT, MAX_SECONDS};
use crate::client::Client;
use crate::os::text::{bare, is_unseen, reason, Escaped, Readable};
use crate::shared::cli::arguments::{CommandLine, FromRows};
use crate::shared::cli::failure::Failure;
use crate::shared::cli::options::{options, IfGiven, Unless};
use crate::shared::cli::rows::CommandRow;
use crate::shared::cli::values::{choice, number, path, seconds, time, yes_or_no, BusyOk};
use crate::shared::cli::waiting::Verbosity;
use crate::shared::supervise::Leftovers;

macro_rules! commands {
    ($($name:ident),*) => {
        #[derive(Debug)]
        pub(super) enum SubCommand {
            $($name($name),)*
        }

        pub(super) const COMMANDS: &[CommandRow] = &[$($name::COMMAND),*];

        impl FromRows for SubCommand {
            const COMMAND: CommandRow = OWN;

            fn from_line(line: &mut CommandLine) -> Option<SubCommand> {
                $(if line.is_of(&$name::COMMAND) {
                    return $name::from_line(line).map(SubCommand::$name);
                })*
                None
            }
        }
    };
}

commands!(
    Run, Hold, Wait, Acquire, Reserve, Renew, Release, Stats, Status, History, Break, Ping,
    FenceCheck
);

/// Declares a command that asks a server, with its own options and those of all such commands.
macro_rules! command {
    (
        $(#[doc = $about:tt])+ $command:literal $name:ident $(-- $tail:literal)? { $($rows:tt)* }
    ) => {
        options! {
            $(#[doc = $about])+
            #[command = $command]
            pub(super) struct $name $(-- $tail)? {
                $($rows)*
                then server: ServerOptions,
            }
        }
    };
}

options! {
    /// How a command reaches the server.
    pub(super) struct ServerOptions {
        #[group = "Server"]
        /// use this server: HOST, HOST:PORT or the path of a Unix socket; the servers of a
        /// cluster have | between them (127.0.0.1:6388)
        server: Vec<String> ("address"),
        /// use these servers, which divide the keys and do not take over for each other; the
        /// list has commas, and the same order everywhere
        shards: Vec<String> ("addresses"),
        /// read the server's auth token from this file
        auth_token_file: Option<PathBuf> ("path", path),
        /// limit the time for connecting, and for each reply (5)
        connect_timeout: Duration ("time", positive_time) else (Duration::from_secs(5)),
        /// speak TLS with servers that are reached over TCP
        tls: Option<bool> in TLS,
        /// trust the CAs, and servers' self-signed certificates, in this file; speaks TLS (the
        /// CAs that this host trusts)
        tls_ca: Option<PathBuf> ("path", path) in TLS,
        /// expect this name in the server's certificate; speaks TLS (the host of the server)
        tls_name: Option<String> ("name") in TLS,
    }
}

options! {
    /// For how long a command waits for a lock.
    pub(super) struct TimeoutOptions {
        /// wait at most this long for the lock; 0 tries once (no limit)
        timeout / 'w': Option<Duration> ("time", wait_time),
        /// do not wait, as with --timeout 0
        nonblock / 'n': bool,
    }
}

options! {
    /// What a command says while it waits.
    pub(super) struct TalkOptions {
        /// do not say who holds the lock while it waits
        quiet / 'q': bool,
        /// say who holds the lock while it waits, even if stderr is not a terminal
        verbose / 'v': bool,
    }
}

options! {
    /// What `run` and `hold` ask for.
    pub(super) struct LockOptions {
        /// the key to hold
        key: String,
        #[group = "Lock"]
        /// set the lease (the server's default)
        lease: Option<Duration> ("time", lease),
        /// take one slot of a semaphore of this many slots
        limit or "of": Option<u32> ("count", limit),
        /// share the lock with other clients that use --shared
        shared: bool,
        /// take this many slots of the semaphore at once; --of says how many it has (1)
        slots: Option<u32> ("count", slot_count),
    }
}

options! {
    /// For how long `run` and `hold` wait.
    pub(super) struct WaitOptions {
        with patience: TimeoutOptions under "Waiting",
        /// try again if the server restarts or is not there yet, for at most this long (as
        /// long as --timeout allows)
        retry: IfGiven<Duration> ("time", retry) else (Duration::ZERO),
    }
}

options! {
    /// What `run` and `hold` do if they do not get the lock, and what they say.
    pub(super) struct BusyOptions {
        /// do not wait if this many requests are waiting, as if the timeout were over
        max_waiters: Option<u32> ("count", |text| number(text, 0..=MAX_LIMIT)),
        /// exit with this status if the lock is not granted in time (75)
        busy_status / 'E': Option<u8> ("status", |text| number(text, 0..=u8::MAX)),
        then talk: TalkOptions,
    }
}

command! {
    /// Run a command while holding a lock
    "run" Run -- "COMMAND [ARGS]" {
        with waiting: WaitOptions,
        /// exit with 0 if the lock is not granted in time, and has been held for less than this
        /// time
        busy_ok: IfGiven<BusyOk> ("time", BusyOk::parse) else (BusyOk::Never),
        /// keep the lock for at least this long after the grant, even if the command ends sooner,
        /// so that it runs at most once in that time
        at_least: Option<Duration> ("time", lease),
        with busy: BusyOptions,
        with lock: LockOptions,
        /// hold the lock of another key, too; may be given several times
        and: Vec<String> ("key"),
        /// take a name from this list, separated by commas, that no other holder has
        pick: Option<PickList> ("names", names),
        /// take a name from the lines of this file
        pick_from: Option<PickList> ("path", names_in),
        /// describe this holder to operators (COMMAND@HOST pid N)
        tag: Option<String> ("text"),
        #[group = "Command"]
        /// kill the command if it has not ended this long after the lock was lost (10)
        kill_after: Duration ("time", time) else (Duration::from_secs(10)),
        /// let the rest of the command's process group go on without the lock, end it, or wait for
        /// it (leave)
        leftovers: Leftovers ("what", |text| choice(text, Leftovers::NAMES)) else (Leftovers::Leave),
        /// send this signal to the command if the lock is lost: hup, int, quit, term, usr1 or usr2;
        /// ignore sends none (term)
        on_lost: Unless<Signal> ("signal", on_lost) else (Some(Signal::TERM)),
        /// run the command without a second lock if this runs under the lock already
        nested: bool,
    }
}

command! {
    /// Hold a lock until standard input is closed, and print its token and fence
    "hold" Hold {
        with waiting: WaitOptions,
        with busy: BusyOptions,
        with lock: LockOptions,
        /// describe this holder to operators (latch@HOST pid N)
        tag: Option<String> ("text"),
    }
}

command! {
    /// Wait until the lock is granted, and release it at once
    "wait" Wait {
        /// the key to wait for
        key: String,
        with patience: TimeoutOptions,
        with talk: TalkOptions,
        /// wait for one of this many slots of a semaphore
        limit or "of": Option<u32> ("count", limit),
    }
}

options! {
    /// Which slot `acquire` and `reserve` take, and how they print it.
    pub(super) struct SlotOptions {
        /// take one of this many slots of a semaphore
        limit or "of": Option<u32> ("count", limit),
        /// share the lock with other clients that use --shared
        shared: bool,
        /// print a JSON object in one line
        json: bool,
    }
}

command! {
    /// Take a lock that outlives this process, until release or its lease ends; print its token
    "acquire" Acquire {
        /// the key to hold
        key: String,
        with patience: TimeoutOptions,
        with talk: TalkOptions,
        /// set the lease (the server's default)
        lease: Option<Duration> ("time", lease),
        with slot: SlotOptions,
        /// describe this holder to operators (latch@HOST pid N)
        tag: Option<String> ("text"),
    }
}

command! {
    /// Reserve a lock for a person, without a process that holds it; print how to release it
    "reserve" Reserve {
        /// the key to hold
        key: String,
        /// reserve the lock for this long
        duration named "for": Duration ("time", lease),
        /// tell operators who reserves it and what for (latch@HOST pid N)
        tag: Option<String> ("text"),
        then patience: TimeoutOptions,
        then talk: TalkOptions,
        then slot: SlotOptions,
    }
}

command! {
    /// Renew the lease of a lock of acquire or reserve, and print its length
    "renew" Renew {
        /// the key that is held
        key: String,
        /// the token of the grant; - reads it from standard input (LATCH_TOKEN)
        token: Option<String>,
        /// set the lease (the server's default)
        lease: Option<Duration> ("time", lease),
        /// name the number of slots, if the key is a semaphore
        limit or "of": Option<u32> ("count", limit),
    }
}

command! {
    /// Release a lock of acquire or reserve
    "release" Release {
        /// the key that is held
        key: String,
        /// the token of the grant; - reads it from standard input (LATCH_TOKEN)
        token: Option<String>,
        /// name the number of slots, if the key is a semaphore
        limit or "of": Option<u32> ("count", limit),
        /// exit with 0 if the lock is not held with this token
        missing_ok: bool,
    }
}

command! {
    /// Show the holders and the waiters
    "stats" Stats {
        /// only this key, with all its holders and waiters
        key: Option<String>,
        /// print the holders and waiters as table or as json (table)
        format: Option<StatsForm> ("form", stats_form),
        /// print json, as with --format json
        json: bool,
        /// print again every two seconds, or after this time
        watch: IfGiven<WatchTime> ("time", watch) else (WatchTime(None)) alone ("true", |text| time(text).is_ok()),
    }
}

command! {
    /// Tell whether a key is free (0) or held (1), and who holds it, without taking it; 69 if no
    /// server answers
    "status" Status {
        /// the key to look at
        key: String,
        /// print a JSON object in one line
        json: bool,
    }
}

command! {
    /// Show who held a key lately and who was refused; or all keys with a history, which begins
    /// when latch run ends a command, or a claim is refused
    "history" History {
        /// only this key
        key: Option<String>,
        /// show only keys whose work is overdue or has failed, and exit with 1 if there are any
        check: bool,
        /// print a JSON object in one line
        json: bool,
    }
}

command! {
    /// End the grant of another client
    "break" Break {
        /// the key that is held
        key: String,
        /// end only the grant with this fence, a decimal number (all grants of the key)
        fence: Option<u64> ("number", |text| number(text, 0..=u64::MAX)),
        /// read the server's admin token from this file
        admin_token_file: Option<PathBuf> ("path"),
    }
}

command! {
    /// Check that every server answers
    "ping" Ping {}
}

impl ServerOptions {
    fn overrides(&self) -> Overrides<'_> {
        Overrides {
            auth_token_file: self.auth_token_file.as_deref(),
            tls: self.tls,
            tls_ca: self.tls_ca.as_deref(),
            tls_name: self.tls_name.as_deref(),
        }
    }

    /// Makes a client of the servers that the options or the environment name. `wait` is the
    /// timeout of a command that waits.
    pub(super) fn client(&self, wait: Option<Duration>) -> Result<Client, Failure> {
        let named = [&self.server, &self.shards];
        let named = named.map(|it| (!it.is_empty()).then(|| it.join(",")));
        let servers = environment::servers(named).map_err(servers::unusable)?;
        let settings = environment::settings(&self.overrides());
        let mut settings = settings.map_err(servers::unusable)?;
        settings.connect_timeout = self.connect_timeout;
        settings.reply_timeout = wait.map_or(self.connect_timeout, |_| ROUND_TRIP);
        Ok(Client::with_settings(servers, settings))
    }

    /// The options that reach the same server from elsewhere.
    pub(super) fn restated(&self) -> Result<Vec<(&'static str, String)>, Failure> {
        environment::restated(&self.overrides()).map_err(servers::unusable)
    }
}

impl TimeoutOptions {
    pub(super) fn timeout(&self) -> Option<Duration> {
        let at_once = self.nonblock.then_some(Duration::ZERO);
        at_once.or(self.timeout)
    }
}

impl TalkOptions {
    pub(super) fn verbosity(&self) -> Verbosity {
        Verbosity::of(self.quiet, self.verbose)
    }
}

/// What `run` or `hold` asks for, of a semaphore of `limit` slots if there is one. Without a tag,
/// the tag contains the name of `command`.
fn asking(
    (claim, limit, tag): (&LockOptions, Option<u32>, Option<&str>),
    waiting: &WaitOptions,
    busy: &BusyOptions,
    server: &ServerOptions,
    command: impl AsRef<OsStr>,
) -> Result<Asking, Failure> {
    if claim.slots.is_some() && limit.is_none() {
        return Err(usage(
            "--slots takes several slots of a semaphore; say with --of how many it has",
        ));
    }
    let timeout = waiting.patience.timeout();
    let mut target = Target::new(server.client(timeout)?, &claim.key, claim.lease, limit);
    target.claim.is_shared = claim.shared;
    target.claim.slots = claim.slots;
    target.claim.max_waiters = busy.max_waiters;
    let target = target.tagged(tag, command);
    let mut asking = Asking::of(target, timeout, busy.talk.verbosity());
    asking.retry = waiting.retry;
    asking.busy_status = busy.busy_status.unwrap_or(BUSY);
    Ok(asking)
}

impl Hold {
    pub(super) fn asking(&self, command: impl AsRef<OsStr>) -> Result<Asking, Failure> {
        let claim = (&self.lock, self.lock.limit, self.tag.as_deref());
        asking(claim, &self.waiting, &self.busy, &self.server, command)
    }
}

impl Run {
    pub(super) fn asking(&self, command: impl AsRef<OsStr>) -> Result<Asking, Failure> {
        let claim = (&self.lock, self.slot_limit(), self.tag.as_deref());
        asking(claim, &self.waiting, &self.busy, &self.server, command)
    }

    /// The keys to hold, sorted. The error says which keys or options cannot be combined.
    pub(super) fn keys(&self) -> Result<Vec<&str>, String> {
        let mut keys: Vec<&str> = self.and.iter().map(String::as_str).collect();
        keys.push(&self.lock.key);
        keys.sort_unstable();
        if let Some(twice) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!(
                "{}: the key is given twice",
                Escaped(twice[0].as_bytes())
            ));
        }
        let is_refined = self.slot_limit().is_some() || self.lock.shared || self.nested;
        if keys.len() > 1 && is_refined {
            return Err("--and takes plain locks, and no --limit, --shared or --nested".into());
        }
        Ok(keys)
    }

    /// The names of which the command gets one for each of its slots, if there are any.
    pub(super) fn names(&self) -> Option<&[String]> {
        let names = self.pick.as_ref().or(self.pick_from.as_ref());
        names.map(|names| names.0.as_slice())
    }

    /// Fails if the options about the names contradict others.
    pub(super) fn check_names(&self) -> Result<(), String> {
        let Some(names) = self.names() else {
            return Ok(());
        };
        if self.pick.is_some() && self.pick_from.is_some() {
            return Err("--pick and --pick-from exclude each other".into());
        }
        let count = names.len();
        match self.lock.limit {
            Some(limit) if limit as usize != count => Err(format!(
                "there are {count} names to pick from, but --of {limit}"
            )),
            _ => Ok(()),
        }
    }

    fn slot_limit(&self) -> Option<u32> {
        let count = self.names().and_then(|names| names.len().try_into().ok());
        count.or(self.lock.limit)
    }
}

/// Parses the signal that the command of `run` gets when the lock is lost.
fn on_lost(text: &str) -> Result<Option<Signal>, String> {
    let all = [
        ("term", Some(Signal::TERM)),
        ("ignore", None),
        ("hup", Some(Signal::HUP)),
        ("int", Some(Signal::INT)),
        ("quit", Some(Signal::QUIT)),
        ("usr1", Some(Signal::USR1)),
        ("usr2", Some(Signal::USR2)),
    ];
    choice(&text.to_ascii_lowercase(), all)
}

/// The time after which `stats --watch` prints again, if it does.
#[derive(Clone, Copy, Debug)]
pub(super) struct WatchTime(pub(super) Option<Duration>);

/// Parses what follows `--watch=`: a time, or yes or no.
fn watch(text: &str) -> Result<WatchTime, String> {
    const USUAL: Duration = Duration::from_secs(2);
    // A number is a time, although it could also mean yes or no.
    match (positive_time(text), yes_or_no(text)) {
        (Ok(time), _) => Ok(WatchTime(Some(time))),
        (Err(_), Ok(is_on)) => Ok(WatchTime(is_on.then_some(USUAL))),
        (Err(error), Err(_)) => Err(error),
    }
}

/// The form in which statistics are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatsForm {
    Table,
    Json,
}

fn stats_form(text: &str) -> Result<StatsForm, String> {
    choice(
        text,
        [("table", StatsForm::Table), ("json", StatsForm::Json)],
    )
}

impl Stats {
    /// The form that the options ask for. An error says which options contradict each other.
    pub(super) fn form(&self) -> Result<StatsForm, &'static str> {
        match (self.json, self.format) {
            (true, Some(StatsForm::Table)) => {
                Err("--json is --format json, and contradicts another --format")
            }
            (true, _) => Ok(StatsForm::Json),
            (false, format) => Ok(format.unwrap_or(StatsForm::Table)),
        }
    }
}

options! {
    /// Check that a token is not older than the newest that a resource has seen
    #[command = "fence-check"]
    pub(super) struct FenceCheck {
        /// the file with the highest fence; created if it does not exist
        file: PathBuf,
        /// the token to check; - reads it from standard input (LATCH_TOKEN)
        token: Option<String>,
    }
}

/// Parses how long to wait. The protocol has whole seconds, so a fraction is rounded up.
fn wait_time(text: &str) -> Result<Duration, String> {
    let rounded = time(text).ok().and_then(|time| {
        let more = u64::from(time.subsec_nanos() > 0);
        time.as_secs().checked_add(more)
    });
    match rounded {
        Some(rounded) if rounded <= MAX_SECONDS => Ok(Duration::from_secs(rounded)),
        _ => seconds(text, 0..=MAX_SECONDS),
    }
}

fn lease(text: &str) -> Result<Duration, String> {
    seconds(text, 1..=MAX_SECONDS)
}

fn limit(text: &str) -> Result<u32, String> {
    number(text, 1..=MAX_LIMIT)
}

fn slot_count(text: &str) -> Result<u32, String> {
    limit(text)
}

fn positive_time(text: &str) -> Result<Duration, String> {
    match time(text)? {
        Duration::ZERO => Err("expected more than 0".into()),
        time => Ok(time),
    }
}

/// How long to try again while a server is unavailable; without a value, there is no limit.
fn retry(text: &str) -> Result<Duration, String> {
    match text {
        "true" => Ok(Duration::MAX),
        text => time(text),
    }
}

/// The names of the slots of a semaphore, in the order of their numbers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PickList(pub(super) Vec<String>);

/// Parses names that are separated by commas.
pub(super) fn names(text: &str) -> Result<PickList, String> {
    distinct(text.split(',').map(str::trim))
}

/// Reads the names from a file, one in each line. A line may be empty or begin with `#`.
pub(super) fn names_in(path: &str) -> Result<PickList, String> {
    let text = std::fs::read_to_string(path).map_err(|error| reason(&error))?;
    let lines = bare(&text).lines().map(str::trim);
    distinct(lines.filter(|line| !line.is_empty() && !line.starts_with('#')))
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Result<PickList, String> {
    let names: Vec<String> = names.map(str::to_owned).collect();
    let is_word = |name: &String| {
        !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || is_unseen(c))
    };
    if names.is_empty() || !names.iter().all(is_word) {
        return Err("expected names without blanks".into());
    }
    let mut sorted: Vec<&String> = names.iter().collect();
    sorted.sort_unstable();
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("the name {} is given twice", Readable(twice[0])));
    }
    Ok(PickList(names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_to_pick_from_are_distinct_words() {
        let list = |names: &[&str]| Ok(PickList(names.iter().map(|it| (*it).to_owned()).collect()));
        assert_eq!(names("a, b,c"), list(&["a", "b", "c"]));
        for text in ["", "a,,b", "a,b,a", "a b,c"] {
            assert!(names(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_in_no_name_of_a_file() {
        let file = tempfile::NamedTempFile::new().expect("there is room");
        std::fs::write(&file, "\u{feff}a\r\nb\r\n").expect("there is room");
        let path = file.path().to_str().expect("a temporary path is UTF-8");
        assert_eq!(names_in(path), names("a,b"));
    }
}
