//! Printing to stdout and stderr.

use std::fmt::Display;
use std::io::{self, Write};

use super::text::reason;

pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Writes `text` to stdout. A reader that leaves early, such as `head`, is not an error.
pub fn print_if_read(text: &str) -> io::Result<()> {
    match print(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}

pub fn unprintable(error: &io::Error) -> String {
    format!("standard output: {}", reason(error))
}

/// Writes one line to stderr. If that fails, the exit status still reports the error.
pub fn complain(program: &str, message: impl Display) {
    // The line is written with one call, because other processes may write to the same pipe.
    let line = format!("{program}: {message}\n");
    let _ = io::stderr().write_all(line.as_bytes());
}
