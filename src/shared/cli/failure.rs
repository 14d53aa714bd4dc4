//! Failures of commands, each with an exit status and a reason. Each program has its own table of
//! exit statuses: that of `latch` and of `sema` is at the top of its module, and that of the
//! servers is in `server`.

use std::fmt::Display;
use std::io;

use crate::os::output;
use crate::os::text::reason;

/// The exit statuses of `latch` and `sema` for a failure of the system, and for a file or an output
/// that cannot be used.
pub const SYSTEM_ERROR: u8 = 71;
pub const FILE_ERROR: u8 = 74;

/// The result of a command: an exit status, or a failure.
pub type CommandResult = Result<u8, Failure>;

#[derive(Debug)]
pub struct Failure {
    pub status: u8,
    /// The reason as a single line, or `None` if the status says enough.
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

    pub fn unprintable(error: io::Error) -> Failure {
        Failure::new(FILE_ERROR, output::unprintable(&error))
    }

    pub fn silent(status: u8) -> Failure {
        Failure {
            status,
            message: None,
        }
    }
}
