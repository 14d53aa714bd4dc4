//! The program `latch`: locks and semaphores of a `latchd` server, for the shell. See latch(1).

mod breaking;
mod claim;
mod commands;
mod fence_check;
mod history;
mod kept_locks;
mod options;
mod queue;
mod releasing;
mod run;
mod servers;
mod stats;
mod stats_table;
mod status;
mod text_table;
mod variables;

use std::env;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, BufRead, Read};
use std::process::ExitCode;

use crate::client::environment::VARIABLES;
use crate::client::{Auth, Error, InvalidToken, Token};
use crate::os::output;
use crate::os::text::{reason, Plain, Readable};
use crate::shared::cli::arguments::{self, Parsed};
use crate::shared::cli::environment::is_service_link;
use crate::shared::cli::failure::{CommandResult, Failure, FILE_ERROR, SYSTEM_ERROR};
use crate::shared::cli::rows::{CommandRow, Program, TLS};
use crate::shared::cli::values::duration;
use crate::shared::cli::waiting::Verbosity;
use crate::shared::cli::words::with_run;
use crate::shared::supervise::{self, EndBySignal};
use options::SubCommand;

const PROGRAM: &str = "latch";

/// The variable with the token of the grant under which a command runs.
const TOKEN_VARIABLE: &str = "LATCH_TOKEN";

/// The maximum number of bytes to read for a token. A line with a token is shorter.
const MAX_TOKEN_LINE: u64 = 256;

/// What the program takes on its command line.
pub const SELF: Program = Program {
    commands: options::COMMANDS,
    features: &[TLS],
    variables: "Variables: LATCH_SERVER, LATCH_SHARDS, LATCH_AUTH_TOKEN_FILE, LATCH_TLS, \
                LATCH_TLS_CA, LATCH_TLS_NAME.",
    examples: &[
        "latch run backup -- rsync -a /srv/ store:/srv/",
        "latch run report --nonblock --busy-ok -- ./report",
        "latch stats",
    ],
    ..Program::plain(PROGRAM, OWN, "latch(1)")
};

const OWN: CommandRow = CommandRow::new(
    "",
    "Locks and semaphores of a latchd server, for the shell.",
);

// The exit statuses of latch(1). The numbers from 64 on are those of sysexits(3).
const OUTDATED: u8 = 1;
const HELD: u8 = 1;
const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
const LOST: u8 = 70;
const BUSY: u8 = 75;
const PROTOCOL: u8 = 76;
const NO_PERMISSION: u8 = 77;

/// Runs one command and returns its exit status (latch(1), EXIT STATUS).
pub fn main() -> ExitCode {
    supervise::second_instance(PROGRAM);
    let mut arguments = env::args_os().skip(1);
    let ours = arguments.by_ref().take_while(|argument| argument != "--");
    let ours = with_options_for_words(ours.collect());
    let command: Vec<OsString> = arguments.collect();
    let parsed: Parsed<SubCommand> = arguments::parse(&SELF, ours.iter().cloned());
    let ended = match parsed {
        Parsed::Run(ours) => {
            warn_of_unknown_variables();
            dispatch(&ours, &command)
        }
        Parsed::Print(text) if text.starts_with("Usage") && means_host(&ours, &command) => Err(
            usage("-h is --help, and nothing was run; use --server HOST:PORT"),
        ),
        Parsed::Print(text) => print(&text),
        Parsed::Usage(reason) => Err(usage(with_hint(reason, &ours, &command))),
    };
    ExitCode::from(ended.unwrap_or_else(explain))
}

/// Whether `-h` was meant for a host, so that the user expects more than the help: the next word is
/// not a command, or there is a command to run.
fn means_host(ours: &[OsString], command: &[OsString]) -> bool {
    let Some(at) = ours.iter().position(|word| word == "-h") else {
        return false;
    };
    let is_host = |next: &OsString| {
        let next = next.to_string_lossy();
        let is_help_wanted = at == 0 && command_names().any(|name| name == next);
        !next.starts_with('-') && !is_help_wanted
    };
    ours.get(at + 1).is_some_and(is_host) || !command.is_empty()
}

/// Replaces the words `help`, `help COMMAND` and `version` by the options that they stand for.
fn with_options_for_words(mut ours: Vec<OsString>) -> Vec<OsString> {
    match ours.first().and_then(|word| word.to_str()) {
        Some("help") => {
            ours.push("--help".into());
            ours.remove(0);
        }
        Some("version") => ours[0] = "--version".into(),
        _ => {}
    }
    ours
}

/// Warns of unknown variables. If the name of a variable is mistyped, this host may ask a different
/// server than the other hosts, and get a different lock.
fn warn_of_unknown_variables() {
    let set = env::vars_os();
    let set = set.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let is_known = |name: &str| VARIABLES.contains(&name) || variables::NAMES.contains(&name);
    let unknown = set.filter(|(name, _)| name.starts_with("LATCH_") && !is_known(name));
    let is_link = |name: &str, value: &OsString| is_service_link(name, &value.to_string_lossy());
    for (name, _) in unknown.filter(|(name, value)| !is_link(name, value)) {
        let advice = arguments::advice(&SELF, "", &name);
        let advice = advice.unwrap_or("see latch(1), ENVIRONMENT");
        complain(format_args!("{}: unknown variable; {advice}", shown(&name)));
    }
}

/// Returns why the command line is wrong, with a hint if an operand is one too many, or if the user
/// has left out `run` or `--`.
fn with_hint(reason: String, ours: &[OsString], command: &[OsString]) -> String {
    let first = ours.first().and_then(|word| word.to_str());
    let first = first.unwrap_or_default();
    let Some(word) = reason.strip_prefix("unexpected argument: ") else {
        let is_unheard_of = reason == format!("unknown command: {}", Plain(first.as_bytes()));
        return match with_run(PROGRAM, ours, command).filter(|_| is_unheard_of) {
            Some(meant) => format!("{reason}; write {meant}"),
            None => reason,
        };
    };
    if first == "run" && command.is_empty() {
        "put -- before the command".into()
    } else if first == "run" {
        format!("{reason}; {}", advice_on_operand(word, ours))
    } else if first == "reserve" && duration(word).is_some() {
        format!("{reason}; write --for {word}")
    } else {
        reason
    }
}

/// What to write instead of a second operand of `run`.
fn advice_on_operand(word: &str, ours: &[OsString]) -> String {
    let follows_n = ours.windows(2).any(|pair| {
        let short = pair[0].to_string_lossy();
        short.starts_with('-')
            && short.ends_with('n')
            && !short.starts_with("--")
            && pair[1] == word
    });
    if follows_n && word.parse::<u32>().is_ok() {
        format!("-n is --nonblock; use --of {word}")
    } else if ours.iter().any(|it| it == "--pick") {
        "write commas between the names of --pick".into()
    } else {
        "write --and before each further key".into()
    }
}

/// Prints the reason, and returns the exit status.
fn explain(failure: Failure) -> u8 {
    if let Some(message) = failure.message {
        complain(message);
    }
    failure.status
}

/// Prints a line on stderr. If that fails, the exit status still reports the failure.
fn complain(message: impl Display) {
    output::complain(PROGRAM, message);
}

/// Prints on stdout. A closed pipe does not count as a failure.
fn print(text: &str) -> CommandResult {
    output::print_if_read(text)
        .map(|()| 0)
        .map_err(Failure::unprintable)
}

/// Tells a person that a key with commas is a single key. A script is not told, because such keys
/// are fine.
fn note_commas(key: &str, talk: Verbosity) {
    let is_name = |part: &str| !part.is_empty() && !part.contains('=');
    let is_list = key.contains(',') && key.split(',').all(is_name);
    if is_list && talk.is_heard() {
        complain(format_args!(
            "{} is one key; latch run takes others with --and",
            shown(key)
        ));
    }
}

/// The failure for a wrong command line, which points to the help.
fn usage(message: impl Display) -> Failure {
    let first = env::args_os().nth(1).unwrap_or_default();
    let help = match command_names().find(|name| first == *name) {
        Some(command) => format!("{PROGRAM} {command} --help"),
        None => format!("{PROGRAM} --help"),
    };
    Failure::new(USAGE, format_args!("{message}\n{PROGRAM}: see {help}"))
}

fn command_names() -> impl Iterator<Item = &'static str> {
    options::COMMANDS.iter().map(|command| command.name)
}

fn dispatch(command: &SubCommand, words: &[OsString]) -> CommandResult {
    if !words.is_empty() && !matches!(command, SubCommand::Run(_)) {
        return Err(usage("only latch run takes a command after --"));
    }
    let leaves_a_lock = matches!(command, SubCommand::Acquire(_) | SubCommand::Reserve(_));
    let ending = match command {
        // These two also handle the other signals.
        SubCommand::Run(_) | SubCommand::Hold(_) => Ok(EndBySignal::default()),
        _ => EndBySignal::watch(leaves_a_lock),
    };
    let ending = ending.map_err(Failure::cannot_catch_signals)?;
    match command {
        SubCommand::Run(options) => run::run(options, words),
        SubCommand::Hold(options) => run::hold(options),
        SubCommand::Wait(options) => commands::wait(options),
        SubCommand::Acquire(options) => kept_locks::acquire(options, &ending),
        SubCommand::Reserve(options) => kept_locks::reserve(options, &ending),
        SubCommand::Renew(options) => commands::renew(options),
        SubCommand::Release(options) => commands::release(options),
        SubCommand::Stats(options) => stats::show(options),
        SubCommand::Status(options) => status::run(options),
        SubCommand::History(options) => history::show(options),
        SubCommand::Break(options) => breaking::run(options),
        SubCommand::Ping(options) => commands::ping(options),
        SubCommand::FenceCheck(options) => fence_check::run(options),
    }
}

/// Prints the reason of every failure, and returns one exit status for all: UNAVAILABLE if a server
/// cannot be reached, or else the status of the first failure.
fn report(failures: Vec<Failure>) -> u8 {
    let statuses: Vec<u8> = failures.into_iter().map(explain).collect();
    if statuses.contains(&UNAVAILABLE) {
        UNAVAILABLE
    } else {
        statuses.first().copied().unwrap_or(0)
    }
}

/// Reads the token from the command line, from standard input if the argument is `-`, or from the
/// environment if there is no argument. Standard input and the environment hide the token from
/// `ps`, which shows command lines to all users of the host.
fn token(given: Option<&str>) -> Result<Token, Failure> {
    let text = match given {
        None => env::var(TOKEN_VARIABLE).unwrap_or_default(),
        Some("-") => {
            let mut line = String::new();
            let read = io::stdin().lock().take(MAX_TOKEN_LINE).read_line(&mut line);
            read.map_err(|error| {
                let why = format!(
                    "cannot read the token from standard input: {}",
                    reason(&error)
                );
                Failure::new(FILE_ERROR, why)
            })?;
            line
        }
        Some(text) => text.to_owned(),
    };
    if given.is_none() && text.is_empty() {
        return Err(usage(
            "expected a token, - to read it from standard input, or LATCH_TOKEN",
        ));
    }
    text.trim()
        .parse()
        .map_err(|error: InvalidToken| usage(error))
}

fn failure(about: impl Display, error: &Error) -> Failure {
    let status = match error {
        error if error.is_shortage() => SYSTEM_ERROR,
        Error::Unreachable { .. }
        | Error::Closed { .. }
        | Error::NoReply { .. }
        | Error::Unsupported(_)
        | Error::NotWritten(_)
        | Error::NotKept(..) => UNAVAILABLE,
        Error::AuthFailed { .. } | Error::NotAllowed(_) => NO_PERMISSION,
        Error::MaxLocks(_) | Error::MaxWaiters(_) | Error::Draining(_) => BUSY,
        Error::LeaseExpired(_) | Error::Lost(..) => LOST,
        Error::InvalidKey | Error::InvalidArgument(_) => USAGE,
        _ => PROTOCOL,
    };
    let hint = match error {
        Error::AuthFailed { auth, .. } if *auth == Auth::NoToken => "; see --auth-token-file",
        Error::Closed {
            has_answered: false,
            ..
        } => "; it may require TLS, or have as many connections as it allows",
        Error::NotKept(..) => "; see --max-kept and --max-keep-time in latchd(8)",
        Error::Untrusted { error, .. } => hint_on_tls(&error.to_string()),
        error if error.is_refused_connection() => "; is latchd running there?",
        _ => "",
    };
    let message = format!("{about}: {}{hint}", error.reason());
    match status {
        USAGE => usage(message),
        _ => Failure::new(status, message),
    }
}

/// What to do about a failure of TLS. Its text is that of the TLS library.
fn hint_on_tls(text: &str) -> &'static str {
    let hints = [
        ("UnknownIssuer", "; see --tls-ca"),
        ("not valid for name", "; see --tls-name"),
        (
            "CaUsedAsEndEntity",
            "; a server needs a certificate with CA:FALSE, see TLS in latchd-security(7)",
        ),
    ];
    let hint = hints.iter().find(|(sign, _)| text.contains(sign));
    hint.map_or("", |(_, hint)| hint)
}

fn shown(text: &str) -> Readable<'_> {
    Readable(text)
}
