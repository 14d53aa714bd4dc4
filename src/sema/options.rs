//! The command line of `sema`: see sema(1). argh does not read it: a path may be any bytes, options
//! may come before it and after it, and the messages are those of an older program of this name.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::arguments::Parsed;
use crate::cli::values::digits;
use crate::lockfile::{check_path, SemaphoreConfig, Settle, StaleRule};
use crate::text::Plain;

/// The name that an older program of this name prints with its version.
const VERSION: &str = concat!("file-semaphore ", env!("CARGO_PKG_VERSION"), "\n");

/// The longest token, in bytes.
const MAX_TOKEN_LEN: usize = 256;

/// The most slots that one path may have.
const MAX_SLOT_COUNT: u32 = 1024;

/// The permissions that a lock file can have.
const MAX_MODE: u32 = 0o777;

/// How long a grant waits for other implementations, if it waits.
const SETTLE: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubCommand {
    Try,
    Acquire,
    Release,
    Status,
    Wait,
    Clean,
    Run,
}

use SubCommand::{Acquire, Clean, Release, Run, Status, Try, Wait};

/// Every command with its name and its line of the help.
const COMMANDS: [(SubCommand, &str, &str); 7] = [
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
        "remove a stale lock and the left-overs of crashes",
    ),
    (Run, "run", "run a command while holding the lock"),
];

const ALL: &[SubCommand] = &[Try, Acquire, Release, Status, Wait, Clean, Run];
const TAKING: &[SubCommand] = &[Try, Acquire, Run];

/// An option: one row of the grammar and of the help.
struct OptionRow {
    name: &'static str,
    short: Option<&'static str>,
    /// The name of its value in the help, or `None` if it takes no value.
    value: Option<&'static str>,
    help: &'static str,
    commands: &'static [SubCommand],
    /// Takes the value. `None` if the value is invalid.
    set: fn(&mut SemaOptions, &str) -> Option<()>,
}

impl OptionRow {
    fn has_name(&self, name: &[u8]) -> bool {
        let short = self.short.map(str::as_bytes);
        name == self.name.as_bytes() || short == Some(name)
    }
}

/// Every option, in the order of the help.
const OPTIONS: [OptionRow; 19] = [
    OptionRow {
        name: "--timeout",
        short: Some("-w"),
        value: Some("time"),
        help: "how long to wait; 0 tries once (for ever)",
        commands: &[Acquire, Wait, Run],
        set: |options, value| duration(value).map(|time| options.timeout = Some(time)),
    },
    OptionRow {
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
    OptionRow {
        name: "--stale",
        short: None,
        value: Some("time"),
        help: "the age at which a lock may be stale; 0 for never (3600)",
        commands: ALL,
        set: |options, value| {
            duration(value).map(|time| options.stale = (!time.is_zero()).then_some(time))
        },
    },
    OptionRow {
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
    OptionRow {
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
    OptionRow {
        name: "--json",
        short: None,
        value: None,
        help: "print the result, or the holder, as JSON on stdout",
        commands: ALL,
        set: |options, _| {
            options.json = true;
            Some(())
        },
    },
    OptionRow {
        name: "--quiet",
        short: Some("-q"),
        value: None,
        help: "print only errors, status and JSON",
        commands: ALL,
        set: |options, _| {
            options.quiet = true;
            Some(())
        },
    },
    OptionRow {
        name: "--slots",
        short: None,
        value: Some("count"),
        help: "use one of this many locks, PATH.0.lock and so on",
        commands: &[Try, Acquire, Release, Status, Wait, Run],
        set: |options, value| {
            let count = digits(value).filter(|count| (1..=MAX_SLOT_COUNT).contains(count));
            count.map(|count| options.slots = Some(count))
        },
    },
    OptionRow {
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
    OptionRow {
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
    OptionRow {
        name: "--force",
        short: None,
        value: None,
        help: "release another holder's lock; clean without locks on files",
        commands: &[Release, Clean],
        set: |options, _| {
            options.force = true;
            Some(())
        },
    },
    OptionRow {
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
    OptionRow {
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
    OptionRow {
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
    OptionRow {
        name: "--busy-status",
        short: Some("-E"),
        value: Some("status"),
        help: "exit status of run if the lock is not granted in time (1)",
        commands: &[Run],
        set: |options, value| digits(value).map(|status| options.busy_status = status),
    },
    OptionRow {
        name: "--on-lost",
        short: None,
        value: Some("what"),
        help: "if the lock is lost, end the command: term or ignore (term)",
        commands: &[Run],
        set: |options, value| {
            options.on_lost = match value {
                "term" => LossPolicy::Term,
                "ignore" => LossPolicy::Ignore,
                _ => return None,
            };
            Some(())
        },
    },
    OptionRow {
        name: "--kill-after",
        short: None,
        value: Some("time"),
        help: "how long the command may take to end once the lock is lost (10)",
        commands: &[Run],
        set: |options, value| duration(value).map(|time| options.kill_after = time),
    },
    OptionRow {
        name: "--help",
        short: Some("-h"),
        value: None,
        help: "print this and exit",
        commands: ALL,
        set: |_, _| None,
    },
    OptionRow {
        name: "--version",
        short: Some("-V"),
        value: None,
        help: "print the version and exit",
        commands: ALL,
        set: |_, _| None,
    },
];

/// What `run` does with the command if the lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossPolicy {
    /// Ends the command.
    Term,
    /// Lets the command go on.
    Ignore,
}

/// The values of the options, with defaults for the missing ones.
#[derive(Debug)]
pub(super) struct SemaOptions {
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
    pub(super) on_lost: LossPolicy,
    pub(super) kill_after: Duration,
}

impl Default for SemaOptions {
    fn default() -> SemaOptions {
        SemaOptions {
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
            on_lost: LossPolicy::Term,
            kill_after: Duration::from_secs(10),
        }
    }
}

/// A command line as typed values.
#[derive(Debug)]
pub(super) struct SemaRequest {
    pub(super) command: SubCommand,
    pub(super) path: PathBuf,
    pub(super) options: SemaOptions,
    /// The command of `run` and its arguments.
    pub(super) words: Vec<OsString>,
}

/// Reads the command line.
pub(super) fn parse(arguments: impl Iterator<Item = OsString>) -> Parsed<SemaRequest> {
    let mut arguments = arguments;
    let ours: Vec<OsString> = arguments
        .by_ref()
        .take_while(|argument| argument != "--")
        .collect();
    // These two count anywhere, even as the value of an option.
    for argument in &ours {
        match argument.as_bytes() {
            b"-h" | b"--help" => return Parsed::Print(help()),
            b"-V" | b"--version" => return Parsed::Print(VERSION.to_owned()),
            _ => {}
        }
    }
    match understand(ours, arguments.collect()) {
        Ok(request) => Parsed::Run(request),
        Err(reason) => Parsed::Usage(reason),
    }
}

fn understand(ours: Vec<OsString>, words: Vec<OsString>) -> Result<SemaRequest, String> {
    let mut options = SemaOptions::default();
    let mut given: Vec<&OptionRow> = Vec::new();
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
    // `run` takes the words after `--` as its command. Other commands take them as operands that
    // may begin with a dash.
    let (words, operands) = match command {
        Run => (words, Vec::new()),
        _ => (Vec::new(), words),
    };
    let mut operands = others.chain(operands);
    let path = PathBuf::from(operands.next().ok_or("missing lock path")?);
    if let Some(more) = operands.next() {
        return Err(format!("unexpected argument: {}", shown(&more)));
    }
    if let Some(row) = given.iter().find(|row| !row.commands.contains(&command)) {
        let name = name.to_string_lossy();
        return Err(format!("{} is no option of {name}", row.name));
    }
    if command == Run && words.is_empty() {
        return Err("missing command to run, after --".to_owned());
    }
    check_path(&path).map_err(|error| Plain(error.to_string().as_bytes()).to_string())?;
    Ok(SemaRequest {
        command,
        path,
        options,
        words,
    })
}

/// Sets one option. Its value may be the next argument.
fn set(
    options: &mut SemaOptions,
    argument: &OsStr,
    rest: &mut impl Iterator<Item = OsString>,
) -> Result<&'static OptionRow, String> {
    let (name, attached) = split_value(argument);
    let Some(row) = OPTIONS.iter().find(|row| row.has_name(name)) else {
        return Err(format!("unknown option: {}", Plain(name)));
    };
    let value = match (row.value, attached) {
        (None, None) => OsString::new(),
        (None, Some(_)) => return Err(format!("{} takes no value", row.name)),
        (Some(_), attached) => attached
            .or_else(|| rest.next())
            .ok_or_else(|| format!("{} requires a value", row.name))?,
    };
    let what = match row.name {
        "--stale" => "stale timeout",
        name => name.trim_start_matches('-'),
    };
    value
        .to_str()
        .and_then(|value| (row.set)(options, value))
        .ok_or_else(|| format!("invalid {what} value"))?;
    Ok(row)
}

/// Splits `--name=value`. A short option has no attached value.
pub(super) fn split_value(argument: &OsStr) -> (&[u8], Option<OsString>) {
    let bytes = argument.as_bytes();
    match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) if bytes.starts_with(b"--") => {
            let value = OsStr::from_bytes(&bytes[at + 1..]);
            (&bytes[..at], Some(value.to_owned()))
        }
        _ => (bytes, None),
    }
}

/// Reads seconds, or a number with a unit: `90`, `1.5s`, `250ms`, `2m`, `1h`.
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
    // Digits below a nanosecond make no difference.
    let fraction = &fraction[..fraction.len().min(9)];
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let total = whole + fraction.parse::<u128>().ok()? * nanoseconds / scale;
    let seconds = u64::try_from(total / 1_000_000_000).ok()?;
    let rest = u32::try_from(total % 1_000_000_000).ok()?;
    Some(Duration::new(seconds, rest))
}

/// The usage that follows a message about the command line.
pub(super) const SHORT_USAGE: &str = "\
Usage: sema COMMAND PATH [OPTIONS]
       sema run PATH [OPTIONS] -- PROGRAM [ARGUMENTS]
Commands: try, acquire, release, status, wait, clean, run; see sema --help
";

fn help() -> String {
    let mut text = String::from(
        "Usage: sema COMMAND PATH [OPTIONS]\n       \
         sema run PATH [OPTIONS] -- PROGRAM [ARGUMENTS]\n\n\
         Lock files that are safe even when they are stale.\n\nCommands:\n",
    );
    // Writing to a string cannot fail.
    for (_, name, line) in COMMANDS {
        let _ = writeln!(text, "  {name:<9}{line}");
    }
    text.push_str("\nOptions:\n");
    for row in &OPTIONS {
        let short = row.short.map(|short| format!("{short}, "));
        let value = row.value.map(|value| format!(" {value}"));
        let head = [short.as_deref(), Some(row.name), value.as_deref()];
        let head: String = head.into_iter().flatten().collect();
        let _ = writeln!(text, "  {head:<28}{}", row.help);
        if row.commands.len() < ALL.len() {
            let names = COMMANDS
                .iter()
                .filter(|(command, ..)| row.commands.contains(command));
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
    fn a_time_without_a_unit_is_seconds() {
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
    fn malformed_times_are_refused() {
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
        for known in &OPTIONS {
            assert!(help.contains(known.name), "{}", known.name);
        }
        assert!(help.lines().all(|line| line.len() <= 120), "{help}");
    }
}
