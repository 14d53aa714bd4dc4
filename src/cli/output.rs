//! Printing to stdout and stderr, and times in a form for people.

use std::fmt::Display;
use std::io::{self, Write};
use std::time::Duration;

use crate::text::reason;

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

/// Formats an age or the rest of a lease, in the largest unit of which there are at least two.
pub fn rough_time(time: Duration) -> String {
    let seconds = time.saturating_add(Duration::from_millis(500)).as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} m", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Formats a time limit of whole seconds, in the largest unit that divides it.
pub fn exact_time(limit: Duration) -> String {
    match limit.as_secs() {
        seconds if seconds % 3_600 == 0 => format!("{} h", seconds / 3_600),
        seconds if seconds % 60 == 0 => format!("{} m", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_in_the_largest_unit_of_which_there_are_two() {
        for (millis, text) in [
            (499, "0 s"),
            (119_499, "119 s"),
            (119_500, "2 m"),
            (7_199_000, "119 m"),
            (7_199_900, "2 h"),
            (172_799_000, "47 h"),
            (172_800_000, "2 d"),
        ] {
            assert_eq!(rough_time(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn a_time_limit_is_exact() {
        for (seconds, text) in [(1, "1 s"), (90, "90 s"), (120, "2 m"), (7200, "2 h")] {
            assert_eq!(exact_time(Duration::from_secs(seconds)), text);
        }
    }
}
