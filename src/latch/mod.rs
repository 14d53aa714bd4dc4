//! The program `latch`: locks and semaphores of a `latchd` server, for the shell. See latch(1).

mod commands;
mod fence_check;
mod options;
mod run;
mod servers;
mod stats;

use std::env;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use rustix::io::Errno;

use crate::cli::arguments::{self, Parsed};
use crate::client::{Error, Token};
use crate::supervise;
use crate::text::{reason, Escaped};
use options::{Command, Flags};

const PROGRAM: &str = "latch";

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
    supervise::exec_shim(PROGRAM);
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

/// Where nobody can hear that, the exit status still says it.
fn complain(message: impl Display) {
    let _ = writeln!(io::stderr(), "{PROGRAM}: {message}");
}

/// Prints, and says nothing if nobody reads it any more.
fn print(text: &str) -> Outcome {
    match try_print(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(unprintable(&error)),
        _ => Ok(0),
    }
}

fn unprintable(error: &io::Error) -> Failure {
    Failure::new(
        FILE_ERROR,
        format_args!("standard output: {}", reason(error)),
    )
}

fn try_print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn carry_out(command: &Command, words: &[OsString]) -> Outcome {
    if !words.is_empty() && !matches!(command, Command::Run(_)) {
        return Err(Failure::usage("only latch run takes a command after --"));
    }
    match command {
        Command::Run(options) => run::run(options, words),
        Command::Wait(options) => commands::wait(options),
        Command::Acquire(options) => commands::acquire(options),
        Command::Renew(options) => commands::renew(options),
        Command::Release(options) => commands::release(options),
        Command::Stats(options) => stats::show(options),
        Command::Ping(options) => commands::ping(options),
        Command::FenceCheck(options) => fence_check::run(options),
    }
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

fn token(text: &str) -> Result<Token, Failure> {
    text.parse().map_err(|error: Error| Failure::usage(error))
}

fn boolean(option: &str, given: Option<&str>) -> Result<bool, Failure> {
    match given.map(str::to_ascii_lowercase).as_deref() {
        None | Some("0" | "no" | "false") => Ok(false),
        Some("1" | "yes" | "true") => Ok(true),
        Some(other) => Err(Failure::usage(format_args!(
            "{option}: yes or no is wanted, not {}",
            shown(other)
        ))),
    }
}

fn busy(place: &str) -> String {
    format!("{place}: somebody else has it")
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
