//! The command line of `latch`: see latch(1).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use argh::FromArgs;
use parking_lot::Mutex;
use rustix::process::Signal;

use crate::cli::failure::Failure;
use crate::cli::rows::{options, CommandRow, IfGiven};
use crate::cli::values::{choice, number, path, seconds, time, yes_or_no, BusyOk};
use crate::cli::waiting::Verbosity;
use crate::client::environment::{self, Overrides, Servers};
use crate::client::limits::{MAX_LIMIT, MAX_SECONDS};
use crate::client::Client;
use crate::supervise::Leftovers;
use crate::text::Escaped;

use super::claim::Asking;
use super::picking::{names, names_in, PickList};
use super::servers::{self, Target};
use super::{usage, BUSY};

/// Locks and semaphores of a latchd server, for the shell.
#[derive(FromArgs, Debug)]
pub(super) struct Flags {
    #[argh(subcommand)]
    pub(super) command: SubCommand,
}

macro_rules! commands {
    ($($name:ident),*) => {
        #[derive(FromArgs, Debug)]
        #[argh(subcommand)]
        pub(super) enum SubCommand {
            $($name($name),)*
        }

        pub(super) const COMMANDS: &[CommandRow] = &[$($name::COMMAND),*];
    };
}

commands!(
    Run, Hold, Wait, Acquire, Reserve, Renew, Release, Stats, Status, History, Break, Ping,
    FenceCheck
);

/// Declares a sub-command that asks a server, with its own options and those that all such commands
/// have.
macro_rules! command {
    ($(#[$($meta:tt)*])* $name:ident $(-- $tail:literal)? { $($fields:tt)* }) => {
        options! {
        $(#[$($meta)*])*
        pub(super) struct $name $(-- $tail)? {
            $($fields)*
            #[group = "Server"]
            /// use this server: HOST, HOST:PORT or the path of a Unix socket; the servers of a
            /// cluster have | between them, and several without failover have commas
            /// (127.0.0.1:6388)
            #[argh(option, arg_name = "address")]
            server: Vec<Servers>,
            /// read the server's auth token from this file
            #[argh(option, arg_name = "path", from_str_fn(path))]
            auth_token_file: Option<PathBuf>,
            /// limit the time for connecting, and for each reply (5)
            #[argh(
                option,
                arg_name = "time",
                default = "Duration::from_secs(5)",
                from_str_fn(positive_time)
            )]
            connect_timeout: Duration,
            /// speak TLS with servers that are reached over TCP
            #[argh(option, arg_name = "bool", from_str_fn(yes_or_no))]
            tls: Option<bool> in TLS,
            /// trust the CAs, and servers' self-signed certificates, in this file; speaks TLS (the
            /// CAs that this host trusts)
            #[argh(option, arg_name = "path", from_str_fn(path))]
            tls_ca: Option<PathBuf> in TLS,
            /// expect this name in the server's certificate; speaks TLS (the host of the server)
            #[argh(option, arg_name = "name")]
            tls_name: Option<String> in TLS,
        }
        }

        impl $name {
            fn overrides(&self) -> Overrides<'_> {
                Overrides {
                    auth_token_file: self.auth_token_file.as_deref(),
                    tls: self.tls,
                    tls_ca: self.tls_ca.as_deref(),
                    tls_name: self.tls_name.as_deref(),
                }
            }

            /// Makes a client of the servers. `wait` is the timeout of a command that waits.
            pub(super) fn client(&self, wait: Option<Duration>) -> Result<Client, Failure> {
                let servers = self.server.iter().flat_map(|listed| &listed.0);
                let (servers, options) = (servers.cloned().collect(), self.overrides());
                servers::client(servers, &options, self.connect_timeout, wait)
                    .map_err(servers::unusable)
            }
        }
    };
}

/// Declares a sub-command that waits for a lock and keeps it. It has its own options, and the
/// common ones that say what to ask for and how to wait.
macro_rules! holding_command {
    (
        $(#[$($meta:tt)*])* $name:ident $(-- $tail:literal)?
        { $($fields:tt)* }
        { $($waiting:tt)* }
    ) => {
        command! {
            $(#[$($meta)*])*
            $name $(-- $tail)? {
                /// the key to hold
                #[argh(positional)]
                key: String,
                #[group = "Lock"]
                /// set the lease (the server's default)
                #[argh(option, arg_name = "time", from_str_fn(lease))]
                lease: Option<Duration>,
                /// take one slot of a semaphore of this many slots
                #[argh(option, arg_name = "count", from_str_fn(limit))]
                limit or "of": Option<u32>,
                /// share the lock with other clients that use --shared
                #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
                shared: bool,
                /// take this many slots of the semaphore at once; --of says how many it has (1)
                #[argh(option, arg_name = "count", from_str_fn(slot_count))]
                slots: Option<u32>,
                $($fields)*
                #[group = "Waiting"]
                /// wait at most this long for the lock; 0 tries once (no limit)
                #[argh(option, arg_name = "time", from_str_fn(wait_time))]
                timeout / 'w': Option<Duration>,
                /// do not wait, as with --timeout 0
                #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
                nonblock / 'n': bool,
                /// do not wait if this many requests are waiting, as if the timeout were over
                #[argh(option, arg_name = "count", from_str_fn(waiters))]
                max_waiters: Option<u32>,
                /// exit with this status if the lock is not granted in time (75)
                #[argh(option, arg_name = "status", from_str_fn(exit_status))]
                busy_status / 'E': Option<u8>,
                $($waiting)*
                /// try again if the server restarts or is not there yet, for at most this long (as
                /// long as --timeout allows)
                #[argh(option, arg_name = "time", default = "Duration::ZERO", from_str_fn(retry))]
                retry: IfGiven<Duration>,
                /// do not say who holds the lock while it waits
                #[argh(option, arg_name = "bool", from_str_fn(yes_or_no))]
                quiet / 'q': Option<bool>,
                /// say who holds the lock while it waits, even if stderr is not a terminal
                #[argh(option, arg_name = "bool", from_str_fn(yes_or_no))]
                verbose / 'v': Option<bool>,
            }
        }

        impl $name {
            /// What the command asks for. Without `--tag`, the tag contains the name of `command`.
            pub(super) fn asking(&self, command: impl AsRef<Path>) -> Result<Asking, Failure> {
                let timeout = timeout(self.timeout, self.nonblock);
                let limit = self.slot_limit();
                if self.slots.is_some() && limit.is_none() {
                    return Err(usage(
                        "--slots takes several slots of a semaphore; say with --of how many it has",
                    ));
                }
                let client = self.client(timeout)?;
                let mut target = Target::new(client, &self.key, self.lease, limit);
                target.slot.is_shared = self.shared;
                target.slot.slots = self.slots;
                target.slot.max_waiters = self.max_waiters;
                Ok(Asking {
                    targets: vec![target.tagged(self.tag.as_deref(), command)],
                    timeout,
                    began: Instant::now(),
                    retry: self.retry,
                    busy_status: self.busy_status.unwrap_or(BUSY),
                    busy_ok: BusyOk::Never,
                    talk: Verbosity::of(self.quiet == Some(true), self.verbose == Some(true)),
                    current: Mutex::default(),
                })
            }
        }
    };
}

holding_command! {
    /// Run a command while holding a lock
    #[argh(subcommand, name = "run")]
    Run -- "COMMAND [ARGS]"
    {
        /// hold the lock of another key, too; may be given several times
        #[argh(option, arg_name = "key")]
        and: Vec<String>,
        /// take a name from this list, separated by commas, that no other holder has
        #[argh(option, arg_name = "names", from_str_fn(names))]
        pick: Option<PickList>,
        /// take a name from the lines of this file
        #[argh(option, arg_name = "path", from_str_fn(names_in))]
        pick_from: Option<PickList>,
        /// keep the lock for at least this long after the grant, even if the command ends sooner,
        /// so that it runs at most once in that time
        #[argh(option, arg_name = "time", from_str_fn(lease))]
        at_least: Option<Duration>,
        /// describe this holder to operators (COMMAND@HOST pid N)
        #[argh(option, arg_name = "text")]
        tag: Option<String>,
        #[group = "Command"]
        /// kill the command if it has not ended this long after the lock was lost (10)
        #[argh(
            option,
            arg_name = "time",
            default = "Duration::from_secs(10)",
            from_str_fn(time)
        )]
        kill_after: Duration,
        /// end the processes that the command leaves in its group (after a second), wait for them
        /// with the lock held, or leave them (end)
        #[argh(option, arg_name = "what", default = "Leftovers::End", from_str_fn(leftovers))]
        leftovers: Leftovers,
        /// send this signal to the command if the lock is lost: hup, int, quit, term, usr1 or usr2;
        /// ignore sends none (term)
        #[argh(option, arg_name = "signal", default = "OnLost::Send(Signal::TERM)", from_str_fn(on_lost))]
        on_lost: OnLost,
        /// run the command without a second lock if this runs under the lock already
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        nested: bool,
    }
    {
        /// exit with 0 if the lock is not granted in time, and has been held for less than this
        /// time
        #[argh(option, arg_name = "time", default = "BusyOk::Never", from_str_fn(BusyOk::parse))]
        busy_ok: IfGiven<BusyOk>,
    }
}

holding_command! {
    /// Hold a lock until standard input is closed, and print its token and fence
    #[argh(subcommand, name = "hold")]
    Hold
    {
        /// describe this holder to operators (latch@HOST pid N)
        #[argh(option, arg_name = "text")]
        tag: Option<String>,
    }
    {}
}

command! {
    /// Wait until the lock is granted, and release it at once
    #[argh(subcommand, name = "wait")]
    Wait {
        /// the key to wait for
        #[argh(positional)]
        key: String,
        /// wait at most this long; 0 tries once (no limit)
        #[argh(option, arg_name = "time", from_str_fn(wait_time))]
        timeout / 'w': Option<Duration>,
        /// do not wait, as with --timeout 0
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        nonblock / 'n': bool,
        /// do not say who holds the lock while it waits
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        quiet / 'q': bool,
        /// say who holds the lock while it waits, even if stderr is not a terminal
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        verbose / 'v': bool,
        /// wait for one of this many slots of a semaphore
        #[argh(option, arg_name = "count", from_str_fn(limit))]
        limit or "of": Option<u32>,
    }
}

command! {
    /// Take a lock that outlives this process, until release or its lease ends; print its token
    #[argh(subcommand, name = "acquire")]
    Acquire {
        /// the key to hold
        #[argh(positional)]
        key: String,
        /// wait at most this long for the lock; 0 tries once (no limit)
        #[argh(option, arg_name = "time", from_str_fn(wait_time))]
        timeout / 'w': Option<Duration>,
        /// do not wait, as with --timeout 0
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        nonblock / 'n': bool,
        /// do not say who holds the lock while it waits
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        quiet / 'q': bool,
        /// say who holds the lock while it waits, even if stderr is not a terminal
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        verbose / 'v': bool,
        /// set the lease (the server's default)
        #[argh(option, arg_name = "time", from_str_fn(lease))]
        lease: Option<Duration>,
        /// take one of this many slots of a semaphore
        #[argh(option, arg_name = "count", from_str_fn(limit))]
        limit or "of": Option<u32>,
        /// share the lock with other clients that use --shared
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        shared: bool,
        /// print a json object in one line
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        json: bool,
        /// describe this holder to operators (latch@HOST pid N)
        #[argh(option, arg_name = "text")]
        tag: Option<String>,
    }
}

command! {
    /// Reserve a lock for a person, without a process that holds it; print how to release it
    #[argh(subcommand, name = "reserve")]
    Reserve {
        /// the key to hold
        #[argh(positional)]
        key: String,
        /// reserve the lock for this long
        #[argh(option, long = "for", arg_name = "time", from_str_fn(lease))]
        duration: Duration,
        /// tell operators who reserves it and what for (latch@HOST pid N)
        #[argh(option, arg_name = "text")]
        tag: Option<String>,
        /// wait at most this long for the lock; 0 tries once (no limit)
        #[argh(option, arg_name = "time", from_str_fn(wait_time))]
        timeout / 'w': Option<Duration>,
        /// do not wait, as with --timeout 0
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        nonblock / 'n': bool,
        /// do not say who holds the lock while it waits
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        quiet / 'q': bool,
        /// say who holds the lock while it waits, even if stderr is not a terminal
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        verbose / 'v': bool,
        /// take one of this many slots of a semaphore
        #[argh(option, arg_name = "count", from_str_fn(limit))]
        limit or "of": Option<u32>,
        /// share the lock with other clients that use --shared
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        shared: bool,
        /// print a json object in one line
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        json: bool,
    }
}

command! {
    /// Renew the lease of a lock of acquire or reserve, and print its length
    #[argh(subcommand, name = "renew")]
    Renew {
        /// the key that is held
        #[argh(positional)]
        key: String,
        /// the token of the grant; - reads it from standard input (LATCH_TOKEN)
        #[argh(positional)]
        token: Option<String>,
        /// set the lease (the server's default)
        #[argh(option, arg_name = "time", from_str_fn(lease))]
        lease: Option<Duration>,
        /// name the number of slots, if the key is a semaphore
        #[argh(option, arg_name = "count", from_str_fn(limit))]
        limit or "of": Option<u32>,
    }
}

command! {
    /// Release a lock of acquire or reserve
    #[argh(subcommand, name = "release")]
    Release {
        /// the key that is held
        #[argh(positional)]
        key: String,
        /// the token of the grant; - reads it from standard input (LATCH_TOKEN)
        #[argh(positional)]
        token: Option<String>,
        /// name the number of slots, if the key is a semaphore
        #[argh(option, arg_name = "count", from_str_fn(limit))]
        limit or "of": Option<u32>,
        /// exit with 0 if the lock is not held with this token
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        missing_ok: bool,
    }
}

command! {
    /// Show the holders and the waiters
    #[argh(subcommand, name = "stats")]
    Stats {
        /// only this key, with all its holders and waiters
        #[argh(positional)]
        key: Option<String>,
        /// print the holders and waiters as table, or as json, or the server's counters for
        /// prometheus (table)
        #[argh(option, arg_name = "form", from_str_fn(stats_form))]
        format: Option<StatsForm>,
        /// print json, as with --format json
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        json: bool,
        /// print again every two seconds, or after this time
        #[argh(option, arg_name = "time", default = "WatchTime(None)", from_str_fn(watch))]
        watch: IfGiven<WatchTime>,
    }
}

command! {
    /// Tell whether a key is free (0) or held (1), and who holds it, without taking it; 69 if no
    /// server answers
    #[argh(subcommand, name = "status")]
    Status {
        /// the key to look at
        #[argh(positional)]
        key: String,
        /// print a json object in one line
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        json: bool,
    }
}

command! {
    /// Show who held a key lately, for how long, and how that ended
    #[argh(subcommand, name = "history")]
    History {
        /// the key to look at
        #[argh(positional)]
        key: String,
        /// print a json object in one line
        #[argh(option, arg_name = "bool", default = "false", from_str_fn(yes_or_no))]
        json: bool,
    }
}

command! {
    /// End the grant of another client
    #[argh(subcommand, name = "break")]
    Break {
        /// the key that is held
        #[argh(positional)]
        key: String,
        /// end only the grant with this fence, a decimal number (all grants of the key)
        #[argh(option, arg_name = "number", from_str_fn(fence))]
        fence: Option<u64>,
        /// read the server's admin token from this file
        #[argh(option, arg_name = "path")]
        admin_token_file: Option<PathBuf>,
    }
}

command! {
    /// Check that every server answers
    #[argh(subcommand, name = "ping")]
    Ping {}
}

impl Reserve {
    /// The options that reach the same server from elsewhere.
    pub(super) fn restated(&self) -> Result<Vec<(&'static str, String)>, Failure> {
        environment::restated(&self.overrides()).map_err(servers::unusable)
    }
}

impl Run {
    /// The keys to hold, sorted. The error says which keys or options cannot be combined.
    pub(super) fn keys(&self) -> Result<Vec<&str>, String> {
        let mut keys: Vec<&str> = self.and.iter().map(String::as_str).collect();
        keys.push(&self.key);
        keys.sort_unstable();
        if let Some(twice) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!(
                "{}: the key is given twice",
                Escaped(twice[0].as_bytes())
            ));
        }
        let is_refined = self.slot_limit().is_some() || self.shared || self.nested;
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
        match self.limit {
            Some(limit) if limit as usize != count => Err(format!(
                "there are {count} names to pick from, but --of {limit}"
            )),
            _ => Ok(()),
        }
    }

    fn slot_limit(&self) -> Option<u32> {
        let count = self.names().and_then(|names| names.len().try_into().ok());
        count.or(self.limit)
    }
}

impl Hold {
    fn slot_limit(&self) -> Option<u32> {
        self.limit
    }
}

/// The signal that the command of `run` gets when the lock is lost, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLost {
    Send(Signal),
    Ignore,
}

fn on_lost(text: &str) -> Result<OnLost, String> {
    let all = [
        ("term", OnLost::Send(Signal::TERM)),
        ("ignore", OnLost::Ignore),
        ("hup", OnLost::Send(Signal::HUP)),
        ("int", OnLost::Send(Signal::INT)),
        ("quit", OnLost::Send(Signal::QUIT)),
        ("usr1", OnLost::Send(Signal::USR1)),
        ("usr2", OnLost::Send(Signal::USR2)),
    ];
    choice(&text.to_ascii_lowercase(), all)
}

fn leftovers(text: &str) -> Result<Leftovers, String> {
    choice(text, Leftovers::NAMES)
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
    Prometheus,
}

fn stats_form(text: &str) -> Result<StatsForm, String> {
    let all = [
        ("table", StatsForm::Table),
        ("json", StatsForm::Json),
        ("prometheus", StatsForm::Prometheus),
    ];
    choice(text, all)
}

impl Stats {
    /// The form that the options ask for. An error says which options contradict each other.
    pub(super) fn form(&self) -> Result<StatsForm, &'static str> {
        match (self.json, self.format) {
            (true, Some(StatsForm::Table | StatsForm::Prometheus)) => {
                Err("--json is --format json, and contradicts another --format")
            }
            (true, _) => Ok(StatsForm::Json),
            (false, Some(StatsForm::Prometheus)) if self.key.is_some() => {
                Err("--format prometheus is about whole servers, and takes no key")
            }
            (false, Some(StatsForm::Prometheus)) if self.watch.0.is_some() => {
                Err("--format prometheus prints once, and takes no --watch")
            }
            (false, format) => Ok(format.unwrap_or(StatsForm::Table)),
        }
    }
}

options! {
    /// Check that a token is not older than the newest that a resource has seen
    #[argh(subcommand, name = "fence-check")]
    pub(super) struct FenceCheck {
        /// the file with the highest fence; created if it does not exist
        #[argh(positional)]
        file: PathBuf,
        /// the token to check; - reads it from standard input (LATCH_TOKEN)
        #[argh(positional)]
        token: Option<String>,
    }
}

pub(super) fn timeout(timeout: Option<Duration>, nonblock: bool) -> Option<Duration> {
    if nonblock {
        Some(Duration::ZERO)
    } else {
        timeout
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

fn waiters(text: &str) -> Result<u32, String> {
    number(text, 0..=MAX_LIMIT)
}

fn exit_status(text: &str) -> Result<u8, String> {
    number(text, 0..=u8::MAX)
}

fn fence(text: &str) -> Result<u64, String> {
    number(text, 0..=u64::MAX)
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
