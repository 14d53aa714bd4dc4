//! Why a command fails, with the exit status that says so. Each program has its own table of
//! statuses: `latch` and `sema` at the top of their module, the servers in `server`.

use std::fmt::Display;
use std::io;

use crate::text::reason;

/// Exit status of `latch` and `sema`: the system failed.
pub const SYSTEM_ERROR: u8 = 71;

/// How a command ends: with an exit status, or with a failure.
pub type CommandResult = Result<u8, Failure>;

#[derive(Debug)]
pub struct Failure {
    pub status: u8,
    /// The reason in one line, or `None` if the status says enough.
    pub message: Option<String>,
}

impl Failure {
    pub fn new(status: u8, message: impl Display) -> Failure {
        Failure {
            status,
            message: Some(message.to_string()),
        }
    }

    fn system(what: &str, why: impl Display) -> Failure {
        Failure::new(SYSTEM_ERROR, format_args!("cannot {what}: {why}"))
    }

    pub fn cannot_start_process(why: impl Display) -> Failure {
        Failure::system("start a process", why)
    }

    pub fn cannot_start_thread(error: io::Error) -> Failure {
        Failure::system("start a thread", reason(&error))
    }

    pub fn cannot_catch_signals(error: io::Error) -> Failure {
        Failure::system("catch signals", reason(&error))
    }

    pub fn silent(status: u8) -> Failure {
        Failure {
            status,
            message: None,
        }
    }
}
