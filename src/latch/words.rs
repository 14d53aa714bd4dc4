//! The words of `latch`'s command line as users type them: joined short options, and the options
//! and commands of other programs.

use std::ffi::OsString;

use crate::cli::rows::Row;
use crate::cli::values::time;
use crate::cli::words::{self, Foreign};

use super::options::COMMANDS;

/// Words that other programs know, with what to write instead. A word behind the name of a command
/// is an option that this command lacks.
pub(super) const FOREIGN: &[Foreign] = &[
    (
        &["--nowait", "--no-wait", "--nb", "--nonblocking", "--try"],
        "use --nonblock",
    ),
    (
        &["-N", "--block", "--blocking"],
        "latch waits unless --nonblock is given; leave the option out",
    ),
    (
        &[
            "--wait",
            "-t",
            "-W",
            "-r",
            "-timeout",
            "-try",
            "--retries",
            "--max-wait",
            "--wait-timeout",
            "--lock-timeout",
        ],
        "use --timeout TIME",
    ),
    (
        &["--conflict-exit-code", "--exit-code", "--lock-exit-code"],
        "use --busy-status STATUS",
    ),
    (
        &["--name", "--key", "--lock", "-l"],
        "write the key right after the command; --tag TEXT describes its holder",
    ),
    (
        &["--lock-file", "--lockfile", "--file", "--path"],
        "a key needs no file; for a lock file, use sema run PATH",
    ),
    (
        &["--prefix", "--namespace"],
        "write the prefix at the beginning of the key",
    ),
    (
        &["--mode"],
        "use --shared for a shared lock; other locks are exclusive",
    ),
    (
        &["--prometheus", "--metrics"],
        "use latch stats --format prometheus",
    ),
    (&["-s"], "use --shared"),
    (
        &["-x", "-e", "--exclusive"],
        "a lock is exclusive unless --shared is given",
    ),
    (
        &["-u", "--unlock"],
        "the lock is released when the command ends; see latch release",
    ),
    (
        &["-o", "--close", "-F", "--no-fork"],
        "the command does not get the lock's descriptor",
    ),
    (&["-c", "--command"], "write -- sh -c COMMAND"),
    (
        &["-n=", "--max", "--count", "--concurrency", "--permits"],
        "use --of COUNT",
    ),
    (
        &["-child-exit-code", "--child-exit-code"],
        "the exit status is that of the command",
    ),
    (&["-monitor-retry", "--monitor-retry"], "use --retry TIME"),
    (
        &["-pass-stdin", "--pass-stdin"],
        "the command reads the standard input; leave the option out",
    ),
    (
        &["--auth-token"],
        "ps would show it: use --auth-token-file FILE, or LATCH_AUTH_TOKEN_FILE",
    ),
    (
        &["-token", "--token", "--password", "--secret", "-a"],
        "use --auth-token-file PATH",
    ),
    (
        &["-shell", "--shell"],
        "the command is run as it is; write sh -c COMMAND for a shell",
    ),
    (&["reserve --lease", "reserve --ttl"], "use --for TIME"),
    (
        &["acquire --for"],
        "use --lease TIME, or latch reserve --for TIME",
    ),
    (
        &["--ttl", "--expire", "--expires", "--expiry", "--expiration"],
        "use --lease TIME",
    ),
    (&["--duration", "--until"], "use latch reserve --for TIME"),
    (
        &[
            "--endpoints",
            "-http-addr",
            "--host",
            "-p",
            "--port",
            "--url",
        ],
        "use --server HOST:PORT",
    ),
    (&["--cacert", "--ca-file", "-ca-file"], "use --tls-ca PATH"),
    (&["--signal"], "use --on-lost SIGNAL"),
    (&["-k"], "use --kill-after TIME"),
    (&["--who", "--why", "-name"], "use --tag TEXT"),
    (&["--list"], "use latch stats"),
    (&["--weight"], "use --slots COUNT with --of COUNT"),
    (&["--min", "--interval"], "use --at-least TIME"),
    (&["--once"], "use --nonblock --busy-ok, and --at-least TIME"),
    (
        &["--force", "-f"],
        "use latch break to end the grant of another client",
    ),
    (
        &["run -j", "-j=", "--jobs"],
        "use --of COUNT for so many at a time",
    ),
    (&["-j"], "use --json"),
    (&["lock"], "use latch run, hold or acquire"),
    (
        &["unlock", "unreserve", "free", "return"],
        "use latch release with the token, or latch break without one",
    ),
    (
        &["kill", "steal", "force-release", "force-unlock"],
        "use latch break",
    ),
    (&["refresh", "extend", "keepalive"], "use latch renew"),
    (&["try"], "use latch run KEY --nonblock"),
    (
        &["show", "get", "info", "check"],
        "use latch status or latch stats KEY",
    ),
    (&["keys", "list", "ls", "who"], "use latch stats"),
    (&["top", "watch"], "use latch stats --watch"),
    (&["with"], "use latch run"),
    (
        &[
            "LATCH_AUTH_TOKEN",
            "LATCH_SECRET",
            "LATCH_PASSWORD",
            "LATCH_TOKEN_FILE",
        ],
        "set LATCH_AUTH_TOKEN_FILE to the path of a file with the token",
    ),
    (
        &[
            "LATCH_HOST",
            "LATCH_PORT",
            "LATCH_ADDR",
            "LATCH_ADDRESS",
            "LATCH_URL",
        ],
        "use LATCH_SERVER=HOST:PORT",
    ),
];

/// What to write instead of a second operand of `run`.
pub(super) fn advice_on_operand(word: &str, ours: &[OsString]) -> String {
    let follows = |option: &str| ours.windows(2).any(|it| it[0] == option && it[1] == word);
    if follows("-n") && word.parse::<u32>().is_ok() {
        format!("-n is --nonblock; use --of {word}")
    } else if ours.iter().any(|it| it == "--pick") {
        "write commas between the names of --pick".into()
    } else {
        "write --and before each further key".into()
    }
}

/// Whether a sub-command has this short option.
fn is_short(short: char) -> bool {
    is_known(&format!("-{short}"))
}

/// The options and operands of all commands.
fn rows() -> impl Iterator<Item = &'static Row> {
    COMMANDS.iter().flat_map(|command| command.rows)
}

fn is_known(option: &str) -> bool {
    rows().any(|row| row.is_named(option))
}

/// The command line in the form that [`arguments::parse`] takes: joined short options are apart.
/// The value of an option stays as it is.
pub(super) fn normal_form(words: Vec<OsString>) -> Vec<OsString> {
    let is_switch = |name: &str| rows().any(|row| row.is_switch() && row.is_named(name));
    let mut normal: Vec<OsString> = Vec::with_capacity(words.len());
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        let Some(text) = word.to_str() else {
            normal.push(word);
            continue;
        };
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        if text.starts_with("--") {
            let is_interval = |next: &OsString| {
                let next = next.to_str();
                name == "--watch" && next.is_some_and(|next| time(next).is_ok())
            };
            match value {
                Some(value) => normal.push(format!("{name}={value}").into()),
                None if is_switch(name) => match words.next_if(is_interval) {
                    Some(interval) => {
                        let interval = interval.to_string_lossy();
                        normal.push(format!("{name}={interval}").into());
                    }
                    None => normal.push(name.into()),
                },
                None => {
                    normal.push(name.into());
                    normal.extend(words.next());
                }
            }
        } else {
            let takes_value = |short| !is_switch(&format!("-{short}"));
            match words::apart(text, is_short, takes_value) {
                Some(parts) => {
                    let last = parts.last().cloned().unwrap_or_default();
                    let takes_next = last.len() == 2 && last.starts_with('-') && !is_switch(&last);
                    normal.extend(parts.into_iter().map(OsString::from));
                    normal.extend(words.next_if(|_| takes_next));
                }
                None => normal.push(word),
            }
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(words: &str) -> String {
        let words = words.split(' ').map(OsString::from).collect();
        let normal = normal_form(words).into_iter();
        let normal: Vec<String> = normal.filter_map(|word| word.into_string().ok()).collect();
        normal.join(" ")
    }

    #[test]
    fn joined_short_options_are_taken_apart() {
        for (given, meant) in [
            ("run k -w5", "run k -w 5"),
            ("run k -nE1 -q", "run k -n -E 1 -q"),
            ("run k -nE 1 -q", "run k -n -E 1 -q"),
            ("run k -w -n", "run k -w -n"),
            ("run k --tag -w5 -w5", "run k --tag -w5 -w 5"),
            ("run k -n=3", "run k -n=3"),
            ("run k -timeout=5s", "run k -timeout=5s"),
            ("run k --of 3 --of=3", "run k --of 3 --of=3"),
            ("stats --watch 5 k", "stats --watch=5 k"),
            ("stats --watch k", "stats --watch k"),
        ] {
            assert_eq!(normal(given), meant, "{given}");
        }
    }
}
