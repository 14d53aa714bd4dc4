//! What the servers have in common at their start: what they say, and to whom. Started by inetd, a server
//! may find a client at its stderr, who must not read what is none of the protocol.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::log::{Log, LogRules};
use crate::net::inherited;
use crate::text::reason;

/// Exit status: the server cannot start.
pub const CANNOT_START: u8 = 1;
/// Exit status: the command line or a variable asks for what cannot be done.
pub const USAGE: u8 = 2;

/// Prints what was asked for instead of serving, and gives the exit status for it.
pub fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(CANNOT_START),
    }
}

/// Says in one line why `program` does not serve, unless a client would read it, and gives its exit status.
pub fn refuse(program: &str, status: u8, reason: impl Display) -> ExitCode {
    if !inherited::stderr_is_a_peers() {
        let _ = writeln!(io::stderr(), "{program}: {reason}");
    }
    ExitCode::from(status)
}

/// Starts the log; a silent one where a client would read it, or a panic's message.
///
/// # Errors
///
/// If it cannot be started, in one line.
pub fn start_log(rules: LogRules) -> Result<Log, String> {
    if inherited::stderr_is_a_peers() {
        std::panic::set_hook(Box::new(|_| {}));
        return Ok(Log::silent());
    }
    Log::start(rules).map_err(|error| format!("cannot start the log: {}", reason(&error)))
}
