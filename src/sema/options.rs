//! The command line of `sema`: see sema(1). Not by argh: a path may be any bytes, options may stand before it
//! and after it, and the words of a refusal are those of an older program of this name.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::values::digits;
use crate::lockfile::{check_path, SemaphoreConfig, Settle, StaleRule};
use crate::text::Plain;

/// What a program of this name has always called itself.
const VERSION: &str = concat!("file-semaphore ", env!("CARGO_PKG_VERSION"), "\n");

/// The longest token, in bytes.
const MAX_TOKEN_LEN: usize = 256;

/// The most slots that one path may have.
const MAX_SLOT_COUNT: u32 = 1024;

/// The permissions that a lock file can have.
const MAX_MODE: u32 = 0o777;

/// How long a grant waits for other implementations, where it does.
const SETTLE: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Try,
    Acquire,
    Release,
    Status,
    Wait,
    Clean,
    Run,
}

use Command::{Acquire, Clean, Release, Run, Status, Try, Wait};

/// Every command with its name and its line of the help.
const COMMANDS: [(Command, &str, &str); 7] = [
    (Try, "try", "take the lock if it is free or stale"),
    (Acquire, "acquire", "wait for the lock and take it"),
    (Release, "release", "give the lock back"),
    (Status, "status", "show who holds the lock"),
    (
        Wait,
        "wait",
        "wait until the lock is free, without taking it",
    ),
    (
        Clean,
        "clean",
        "remove a stale lock and what crashes have left",
    ),
    (Run, "run", "run a command while holding the lock"),
];

const ALL: &[Command] = &[Try, Acquire, Release, Status, Wait, Clean, Run];
const TAKING: &[Command] = &[Try, Acquire, Run];

/// An option that is known.
struct Known {
    name: &'static str,
    short: Option<&'static str>,
    /// What its value is called; `None` if it takes none.
    value: Option<&'static str>,
    help: &'static str,
    commands: &'static [Command],
    set: fn(&mut Options, &str) -> Option<()>,
}

/// Every option, in the order of the help. Where a setter says `None`, the value is invalid.
const KNOWN: [Known; 19] = [
    Known {
        name: "--timeout",
        short: Some("-w"),
        value: Some("time"),
        help: "for how long to wait; 0 tries once (for ever)",
        commands: &[Acquire, Wait, Run],
        set: |options, value| duration(value).map(|time| options.timeout = Some(time)),
    },
    Known {
        name: "--nonblock",
        short: Some("-n"),
        value: None,
        help: "do not wait, as with --timeout 0",
        commands: &[Acquire, Run],
        set: |options, _| {
            options.timeout = Some(Duration::ZERO);
            Some(())
        },
    },
    Known {
        name: "--stale",
        short: None,
        value: Some("time"),
        help: "a lock may be stale once it is so old; 0 for never (3600)",
        commands: ALL,
        set: |options, value| {
            duration(value).map(|time| options.stale = (!time.is_zero()).then_some(time))
        },
    },
    Known {
        name: "--stale-rule",
        short: None,
        value: Some("rule"),
        help:
            "age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)",
        commands: ALL,
        set: |options, value| {
            options.stale_rule = match value {
                "age" => StaleRule::Age,
                "age-and-liveness" => StaleRule::AgeAndLiveness,
                _ => return None,
            };
            Some(())
        },
    },
    Known {
        name: "--tag",
        short: None,
        value: Some("text"),
        help: "what the lock is held for",
        commands: ALL,
        set: |options, value| {
            options.tag = Some(value.to_owned());
            Some(())
        },
    },
    Known {
        name: "--json",
        short: None,
        value: None,
        help: "say in JSON on stdout what was done, or who holds the lock",
        commands: ALL,
        set: |options, _| {
            options.json = true;
            Some(())
        },
    },
    Known {
        name: "--quiet",
        short: Some("-q"),
        value: None,
        help: "say nothing but errors, and what was asked for",
        commands: ALL,
        set: |options, _| {
            options.quiet = true;
            Some(())
        },
    },
    Known {
        name: "--slots",
        short: None,
        value: Some("count"),
        help: "one of so many locks, PATH.0.lock and so on",
        commands: &[Try, Acquire, Release, Status, Wait, Run],
        set: |options, value| {
            let count = digits(value).filter(|count| (1..=MAX_SLOT_COUNT).contains(count));
            count.map(|count| options.slots = Some(count))
        },
    },
    Known {
        name: "--pid",
        short: None,
        value: Some("pid"),
        help: "the process that holds the lock (the parent of sema)",
        commands: &[Try, Acquire, Release],
        set: |options, value| {
            let pid = digits(value).filter(|pid| *pid != 0 && i32::try_from(*pid).is_ok());
            pid.map(|pid| options.pid = Some(pid))
        },
    },
    Known {
        name: "--token",
        short: None,
        value: Some("word"),
        help: "a word to keep in the lock file; release wants the same",
        commands: &[Try, Acquire, Run, Release],
        set: |options, value| {
            let is_word = !value.is_empty()
                && value.len() <= MAX_TOKEN_LEN
                && !value.contains(|c: char| c.is_whitespace() || c.is_control());
            is_word.then(|| options.token = Some(value.to_owned()))
        },
    },
    Known {
        name: "--force",
        short: None,
        value: None,
        help: "release whoever holds it; clean without locks on files",
        commands: &[Release, Clean],
        set: |options, _| {
            options.force = true;
            Some(())
        },
    },
    Known {
        name: "--mode",
        short: None,
        value: Some("mode"),
        help: "octal permissions of the lock file, before the umask (0644)",
        commands: TAKING,
        set: |options, value| {
            let is_octal = !value.is_empty() && value.bytes().all(|digit| digit.is_ascii_digit());
            let mode = u32::from_str_radix(value, 8).ok().filter(|_| is_octal);
            mode.filter(|mode| *mode <= MAX_MODE)
                .map(|mode| options.mode = mode)
        },
    },
    Known {
        name: "--no-sync",
        short: None,
        value: None,
        help: "do not wait for the disk",
        commands: TAKING,
        set: |options, _| {
            options.is_synced = false;
            Some(())
        },
    },
    Known {
        name: "--settle",
        short: None,
        value: Some("when"),
        help: "never, takeover or always: wait 20 ms for careless others (takeover)",
        commands: TAKING,
        set: |options, value| {
            options.settle = match value {
                "never" => Settle::Never,
                "takeover" => Settle::AfterTakeover(SETTLE),
                "always" => Settle::Always(SETTLE),
                _ => return None,
            };
            Some(())
        },
    },
    Known {
        name: "--busy-status",
        short: Some("-E"),
        value: Some("status"),
        help: "exit status of run if the lock cannot be had (1)",
        commands: &[Run],
        set: |options, value| digits(value).map(|status| options.busy_status = status),
    },
    Known {
        name: "--on-lost",
        short: None,
        value: Some("what"),
        help: "term or ignore: what becomes of the command if the lock is lost (term)",
        commands: &[Run],
        set: |options, value| {
            options.on_lost = match value {
                "term" => OnLost::Term,
                "ignore" => OnLost::Ignore,
                _ => return None,
            };
            Some(())
        },
    },
    Known {
        name: "--kill-after",
        short: None,
        value: Some("time"),
        help: "how long the command may take to end once the lock is lost (10)",
        commands: &[Run],
        set: |options, value| duration(value).map(|time| options.kill_after = time),
    },
    Known {
        name: "--help",
        short: Some("-h"),
        value: None,
        help: "print this and exit",
        commands: ALL,
        set: |_, _| None,
    },
    Known {
        name: "--version",
        short: Some("-V"),
        value: None,
        help: "print the version and exit",
        commands: ALL,
        set: |_, _| None,
    },
];

/// What becomes of a command whose lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLost {
    Term,
    Ignore,
}

/// What the options say, with the defaults of those that are not there.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) timeout: Option<Duration>,
    pub(super) stale: Option<Duration>,
    pub(super) stale_rule: StaleRule,
    pub(super) tag: Option<String>,
    pub(super) json: bool,
    pub(super) quiet: bool,
    pub(super) slots: Option<u32>,
    pub(super) pid: Option<u32>,
    pub(super) token: Option<String>,
    pub(super) force: bool,
    pub(super) mode: u32,
    pub(super) is_synced: bool,
    pub(super) settle: Settle,
    pub(super) busy_status: u8,
    pub(super) on_lost: OnLost,
    pub(super) kill_after: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: None,
            stale: SemaphoreConfig::default().stale_timeout,
            stale_rule: StaleRule::default(),
            tag: None,
            json: false,
            quiet: false,
            slots: None,
            pid: None,
            token: None,
            force: false,
            mode: 0o644,
            is_synced: true,
            settle: Settle::AfterTakeover(SETTLE),
            busy_status: 1,
            on_lost: OnLost::Term,
            kill_after: Duration::from_secs(10),
        }
    }
}

/// A command line, understood.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) command: Command,
    pub(super) path: PathBuf,
    pub(super) options: Options,
    /// What to run.
    pub(super) words: Vec<OsString>,
}

/// What a command line asks for.
#[derive(Debug)]
pub(super) enum Parsed {
    Do(Box<Request>),
    /// To print this text on stdout and do nothing else.
    Print(String),
    /// Something that cannot be done, for the reason given in one line.
    Usage(String),
}

/// Reads the command line.
pub(super) fn parse(arguments: impl Iterator<Item = OsString>) -> Parsed {
    let mut arguments = arguments;
    let ours: Vec<OsString> = arguments
        .by_ref()
        .take_while(|argument| argument != "--")
        .collect();
    // Wherever they stand, even as the value of an option.
    for argument in &ours {
        match argument.as_bytes() {
            b"-h" | b"--help" => return Parsed::Print(help()),
            b"-V" | b"--version" => return Parsed::Print(VERSION.to_owned()),
            _ => {}
        }
    }
    match understand(ours, arguments.collect()) {
        Ok(request) => Parsed::Do(Box::new(request)),
        Err(reason) => Parsed::Usage(reason),
    }
}

fn understand(ours: Vec<OsString>, mut words: Vec<OsString>) -> Result<Request, String> {
    let mut options = Options::default();
    let mut given: Vec<&Known> = Vec::new();
    let mut others = Vec::new();
    let mut arguments = ours.into_iter();
    while let Some(argument) = arguments.next() {
        if argument.as_bytes().first() != Some(&b'-') || argument == "-" {
            others.push(argument);
            continue;
        }
        given.push(set(&mut options, &argument, &mut arguments)?);
    }
    let mut others = others.into_iter();
    let name = others.next().ok_or("missing command")?;
    let command = COMMANDS
        .iter()
        .find(|(_, known, _)| name == *known)
        .map(|(command, ..)| *command)
        .ok_or_else(|| format!("unknown command: {}", shown(&name)))?;
    // After `--` stands the command of run; for the others, what begins with a dash and is no option.
    let words = match command {
        Run => words,
        _ => {
            others = others
                .chain(words.drain(..))
                .collect::<Vec<_>>()
                .into_iter();
            Vec::new()
        }
    };
    let path = PathBuf::from(others.next().ok_or("missing lock path")?);
    if let Some(more) = others.next() {
        return Err(format!("unexpected argument: {}", shown(&more)));
    }
    if let Some(known) = given
        .iter()
        .find(|known| !known.commands.contains(&command))
    {
        let name = name.to_string_lossy();
        return Err(format!("{} is no option of {name}", known.name));
    }
    if command == Run && words.is_empty() {
        return Err("missing command to run, after --".to_owned());
    }
    check_path(&path).map_err(|error| Plain(error.to_string().as_bytes()).to_string())?;
    Ok(Request {
        command,
        path,
        options,
        words,
    })
}

/// Takes one option, with its value, which may be the next argument.
fn set(
    options: &mut Options,
    argument: &OsStr,
    rest: &mut impl Iterator<Item = OsString>,
) -> Result<&'static Known, String> {
    let bytes = argument.as_bytes();
    let equals = bytes.iter().position(|byte| *byte == b'=');
    let (name, mut value) = match equals {
        Some(at) if bytes.starts_with(b"--") => (
            &bytes[..at],
            Some(OsStr::from_bytes(&bytes[at + 1..]).to_owned()),
        ),
        _ => (bytes, None),
    };
    let is_it = |known: &&Known| {
        name == known.name.as_bytes() || known.short.is_some_and(|short| name == short.as_bytes())
    };
    let Some(known) = KNOWN.iter().find(is_it) else {
        return Err(format!("unknown option: {}", Plain(name)));
    };
    match known.value {
        None if value.is_some() => return Err(format!("{} takes no value", known.name)),
        None => {}
        Some(_) => value = value.or_else(|| rest.next()),
    }
    if known.value.is_some() && value.is_none() {
        return Err(format!("{} requires a value", known.name));
    }
    let what = match known.name {
        "--stale" => "stale timeout",
        name => name.trim_start_matches('-'),
    };
    value
        .unwrap_or_default()
        .to_str()
        .and_then(|value| (known.set)(options, value))
        .ok_or_else(|| format!("invalid {what} value"))?;
    Ok(known)
}

/// Seconds, with a fraction or a unit if need be: `90`, `1.5s`, `250ms`, `2m`, `1h`.
fn duration(text: &str) -> Option<Duration> {
    let unit_at = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let nanoseconds: u128 = match unit {
        "ms" => 1_000_000,
        "" | "s" => 1_000_000_000,
        "m" => 60 * 1_000_000_000,
        "h" => 3600 * 1_000_000_000,
        _ => return None,
    };
    let is_digits =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    let whole = u128::from(whole.parse::<u64>().ok()?) * nanoseconds;
    // More digits than these make no difference.
    let fraction = &fraction[..fraction.len().min(9)];
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let total = whole + fraction.parse::<u128>().ok()? * nanoseconds / scale;
    let seconds = u64::try_from(total / 1_000_000_000).ok()?;
    let rest = u32::try_from(total % 1_000_000_000).ok()?;
    Some(Duration::new(seconds, rest))
}

/// What stands below the reason for a refusal.
pub(super) const SHORT_USAGE: &str = "\
Usage: sema COMMAND PATH [OPTIONS]
       sema run PATH [OPTIONS] -- PROGRAM [ARGUMENTS]
Commands: try, acquire, release, status, wait, clean, run; see sema --help
";

fn help() -> String {
    let mut text = String::from(
        "Usage: sema COMMAND PATH [OPTIONS]\n       sema run PATH [OPTIONS] -- PROGRAM [ARGUMENTS]\n\n\
         Lock files that are safe even when they are stale.\n\nCommands:\n",
    );
    // Writing to a string cannot fail.
    for (_, name, line) in COMMANDS {
        let _ = writeln!(text, "  {name:<9}{line}");
    }
    text.push_str("\nOptions:\n");
    for known in &KNOWN {
        let short = known
            .short
            .map_or_else(String::new, |short| format!("{short}, "));
        let value = known
            .value
            .map_or_else(String::new, |value| format!(" {value}"));
        let head = format!("{short}{}{value}", known.name);
        let _ = writeln!(text, "  {head:<28}{}", known.help);
        if known.commands.len() < ALL.len() {
            let names = COMMANDS
                .iter()
                .filter(|(command, ..)| known.commands.contains(command));
            let names: Vec<&str> = names.map(|(_, name, _)| *name).collect();
            let _ = writeln!(text, "{:30}({})", "", names.join(", "));
        }
    }
    text.push_str("\nA time is in seconds, or has a unit: 250ms, 1.5s, 2m, 1h.\n");
    text
}

fn shown(text: &OsStr) -> Plain<'_> {
    Plain(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_seconds_unless_it_says_otherwise() {
        for (text, milliseconds) in [
            ("0", 0),
            ("90", 90_000),
            ("1.5", 1500),
            ("1.5s", 1500),
            ("250ms", 250),
            ("0.25s", 250),
            ("2m", 120_000),
            ("1.5h", 5_400_000),
            ("0.0009999999999999s", 0),
        ] {
            let time = duration(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(time.as_millis(), milliseconds, "{text}");
        }
        let longest = Duration::from_secs(u64::MAX);
        assert_eq!(duration("18446744073709551615"), Some(longest));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            " ",
            "-1",
            "+1",
            "1 s",
            "s",
            ".5",
            "1.",
            "1.s",
            "1..2",
            "1.2.3",
            "1d",
            "1S",
            "1e3",
            "0x1",
            "abc",
            "inf",
            "18446744073709551616",
            "18446744073709551615m",
            "١",
        ] {
            assert_eq!(duration(text), None, "{text:?}");
        }
    }

    #[test]
    fn every_option_is_in_the_help() {
        let help = help();
        for known in &KNOWN {
            assert!(help.contains(known.name), "{}", known.name);
        }
        assert!(help.lines().all(|line| line.len() <= 120), "{help}");
    }
}
