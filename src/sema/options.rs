//! The command line of `sema`: see sema(1). argh does not read it: a path may be any bytes, options
//! may come before it and after it, and the messages are those of an older program of this name.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::arguments::Parsed;
use crate::cli::values::{choice, mode, number, time};
use crate::lockfile::{SemaphoreConfig, SemaphoreOptions, Settle, StaleRule};
use crate::text::{invalid_value, Plain};

/// The name that an older program of this name prints with its version.
const VERSION: &str = concat!("file-semaphore ", env!("CARGO_PKG_VERSION"), "\n");

/// The longest token, in bytes.
const MAX_TOKEN_LEN: usize = 256;

/// The most slots that one path may have.
const MAX_SLOT_COUNT: u32 = 1024;

/// The highest process number.
const MAX_PID: u32 = i32::MAX as u32;

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
    Hold,
}

use SubCommand::{Acquire, Clean, Hold, Release, Run, Status, Try, Wait};

/// Every command with its name and its line of the help.
const COMMANDS: [(SubCommand, &str, &str); 8] = [
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
    (Run, "run", "run a program while holding the lock"),
    (
        Hold,
        "hold",
        "hold the lock until standard input is closed, and print its path",
    ),
];

const ALL: &[SubCommand] = &[Try, Acquire, Release, Status, Wait, Clean, Run, Hold];
const TAKING: &[SubCommand] = &[Try, Acquire, Run, Hold];

/// For a command line that has the command of `run` among the words of sema.
const BEFORE_THE_COMMAND: &str = "put -- before the command";

/// An option: one row of the grammar and of the help.
struct OptionRow {
    name: &'static str,
    short: Option<&'static str>,
    help: &'static str,
    commands: &'static [SubCommand],
    set: Set,
}

/// What an option sets.
enum Set {
    Flag(fn(&mut SemaOptions)),
    /// The name of the value in the help, and what takes it or says what is expected.
    Value(
        &'static str,
        fn(&mut SemaOptions, &str) -> Result<(), String>,
    ),
}

use Set::{Flag, Value};

/// The most frequent values of a row.
const ROW: OptionRow = OptionRow {
    name: "",
    short: None,
    help: "",
    commands: ALL,
    set: Flag(|_| {}),
};

impl OptionRow {
    fn has_name(&self, name: &[u8]) -> bool {
        let short = self.short.map(str::as_bytes);
        name == self.name.as_bytes() || short == Some(name)
    }
}

/// Every option, in the order of the help.
const OPTIONS: [OptionRow; 20] = [
    OptionRow {
        name: "--timeout",
        short: Some("-w"),
        help: "how long to wait; 0 tries once (for ever)",
        set: Value("time", |options, value| {
            time(value).map(|time| options.timeout = Some(time))
        }),
        ..ROW
    },
    OptionRow {
        name: "--nonblock",
        short: Some("-n"),
        help: "do not wait, as with --timeout 0",
        commands: &[Acquire, Run, Hold],
        set: Flag(|options| options.timeout = Some(Duration::ZERO)),
    },
    OptionRow {
        name: "--stale",
        help: "the age at which a lock may be stale; 0 for never (3600)",
        set: Value("time", |options, value| {
            let timeout = |time: Duration| (!time.is_zero()).then_some(time);
            time(value).map(|time| options.config.stale_timeout = timeout(time))
        }),
        ..ROW
    },
    OptionRow {
        name: "--stale-rule",
        help:
            "age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)",
        set: Value("rule", |options, value| {
            let all = [
                ("age", StaleRule::Age),
                ("age-and-liveness", StaleRule::AgeAndLiveness),
            ];
            choice(value, all).map(|rule| options.set_lock(|lock| lock.stale_rule(rule)))
        }),
        ..ROW
    },
    OptionRow {
        name: "--tag",
        help: "what the lock is held for",
        set: Value("text", |options, value| {
            options.tag = Some(value.to_owned());
            Ok(())
        }),
        ..ROW
    },
    OptionRow {
        name: "--json",
        help: "print the result, or the holder, as JSON on stdout",
        set: Flag(|options| options.json = true),
        ..ROW
    },
    OptionRow {
        name: "--quiet",
        short: Some("-q"),
        help: "print only errors, status and JSON",
        set: Flag(|options| options.quiet = true),
        ..ROW
    },
    OptionRow {
        name: "--verbose",
        short: Some("-v"),
        help: "say who holds the lock while it waits, also where stderr is no terminal",
        commands: &[Acquire, Run, Hold],
        set: Flag(|options| options.verbose = true),
    },
    OptionRow {
        name: "--slots",
        help: "use one of this many locks, PATH.0.lock and so on",
        commands: &[Try, Acquire, Release, Status, Wait, Run, Hold],
        set: Value("count", |options, value| {
            number(value, 1..=MAX_SLOT_COUNT).map(|count| options.slots = Some(count))
        }),
        ..ROW
    },
    OptionRow {
        name: "--pid",
        help: "the process that holds the lock (the parent of sema)",
        commands: &[Try, Acquire, Release],
        set: Value("pid", |options, value| {
            number(value, 1..=MAX_PID).map(|pid| options.pid = Some(pid))
        }),
        ..ROW
    },
    OptionRow {
        name: "--token",
        help: "a word to keep in the lock file; release wants the same",
        commands: &[Try, Acquire, Run, Hold, Release],
        set: Value("word", |options, value| {
            let is_word = !value.is_empty()
                && value.len() <= MAX_TOKEN_LEN
                && !value.contains(|c: char| c.is_whitespace() || c.is_control());
            if !is_word {
                return Err("expected a word of 1-256 bytes without blanks".into());
            }
            options.token = Some(value.to_owned());
            options.set_lock(|lock| lock.token(value));
            Ok(())
        }),
        ..ROW
    },
    OptionRow {
        name: "--force",
        help: "release another holder's lock; clean without locks on files",
        commands: &[Release, Clean],
        set: Flag(|options| options.force = true),
        ..ROW
    },
    OptionRow {
        name: "--mode",
        help: "octal permissions of the lock file, before the umask (0644)",
        commands: TAKING,
        set: Value("mode", |options, value| {
            mode(value).map(|mode| options.set_lock(|lock| lock.mode(mode)))
        }),
        ..ROW
    },
    OptionRow {
        name: "--no-sync",
        help: "do not wait for the disk",
        commands: TAKING,
        set: Flag(|options| options.set_lock(|lock| lock.sync(false))),
        ..ROW
    },
    OptionRow {
        name: "--settle",
        help: "never, takeover or always: wait 20 ms for careless others (takeover)",
        commands: TAKING,
        set: Value("when", |options, value| {
            let all = [
                ("never", Settle::Never),
                ("takeover", Settle::default()),
                ("always", Settle::Always(SETTLE)),
            ];
            choice(value, all).map(|when| options.set_lock(|lock| lock.settle(when)))
        }),
        ..ROW
    },
    OptionRow {
        name: "--busy-status",
        short: Some("-E"),
        help: "exit status if the lock is not granted in time (1 for run, 75 for hold)",
        commands: &[Run, Hold],
        set: Value("status", |options, value| {
            number(value, 0..=u8::MAX).map(|status| options.busy_status = Some(status))
        }),
    },
    OptionRow {
        name: "--on-lost",
        help: "if the lock is lost, end the program: term or ignore (term)",
        commands: &[Run],
        set: Value("what", |options, value| {
            let all = [("term", false), ("ignore", true)];
            choice(value, all).map(|is_ignored| options.ignores_loss = is_ignored)
        }),
        ..ROW
    },
    OptionRow {
        name: "--kill-after",
        help: "how long the program may take to end once the lock is lost (10)",
        commands: &[Run],
        set: Value("time", |options, value| {
            time(value).map(|time| options.kill_after = Some(time))
        }),
        ..ROW
    },
    OptionRow {
        name: "--help",
        short: Some("-h"),
        help: "print this and exit",
        ..ROW
    },
    OptionRow {
        name: "--version",
        short: Some("-V"),
        help: "print the version and exit",
        ..ROW
    },
];

/// The values of the options; `None` for the default.
#[derive(Debug, Default)]
pub(super) struct SemaOptions {
    pub(super) timeout: Option<Duration>,
    pub(super) tag: Option<String>,
    pub(super) json: bool,
    pub(super) quiet: bool,
    pub(super) verbose: bool,
    pub(super) slots: Option<u32>,
    pub(super) pid: Option<u32>,
    pub(super) token: Option<String>,
    pub(super) force: bool,
    pub(super) config: SemaphoreConfig,
    pub(super) lock: SemaphoreOptions,
    pub(super) busy_status: Option<u8>,
    /// Whether the command of `run` goes on if the lock is lost.
    pub(super) ignores_loss: bool,
    pub(super) kill_after: Option<Duration>,
}

impl SemaOptions {
    fn set_lock(&mut self, change: impl FnOnce(SemaphoreOptions) -> SemaphoreOptions) {
        self.lock = change(self.lock.clone());
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
        let row = set(&mut options, &argument, &mut arguments);
        given.push(row.map_err(|reason| match &others[..] {
            // It may be an option of the command.
            [name, _, _, ..] if name == "run" && words.is_empty() => BEFORE_THE_COMMAND.to_owned(),
            _ => reason,
        })?);
    }
    let mut others = others.into_iter();
    let name = others.next().ok_or("missing command")?;
    let Some((command, ..)) = COMMANDS.iter().find(|(_, known, _)| name == *known) else {
        return Err(format!("unknown command: {}", shown(&name)));
    };
    let command = *command;
    // `run` takes the words after `--` as its command. Other commands take them as operands that
    // may begin with a dash.
    let (words, operands) = match command {
        Run => (words, Vec::new()),
        _ => (Vec::new(), words),
    };
    let mut operands = others.chain(operands);
    let path = PathBuf::from(operands.next().ok_or("missing lock path")?);
    if let Some(more) = operands.next() {
        if command == Run && words.is_empty() {
            return Err(BEFORE_THE_COMMAND.to_owned());
        }
        return Err(format!("unexpected argument: {}", shown(&more)));
    }
    if let Some(row) = given.iter().find(|row| !row.commands.contains(&command)) {
        let name = name.to_string_lossy();
        return Err(format!("{} is no option of {name}", row.name));
    }
    if command == Run && words.is_empty() {
        return Err("missing command to run, after --".to_owned());
    }
    Ok(SemaRequest {
        command,
        path,
        options,
        words,
    })
}

/// The command that a command line names, right or wrong as the rest may be.
pub(super) fn command_in(arguments: &[OsString]) -> Option<SubCommand> {
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument.as_bytes().first() != Some(&b'-') {
            let mut commands = COMMANDS.iter();
            return commands
                .find(|(_, name, _)| argument == name)
                .map(|(command, ..)| *command);
        }
        let (name, attached) = split_value(argument);
        let row = OPTIONS.iter().find(|row| row.has_name(name));
        if attached.is_none() && row.is_some_and(|row| matches!(row.set, Value(..))) {
            arguments.next();
        }
    }
    None
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
    let (value, set) = match (&row.set, attached) {
        (Flag(set), None) => {
            set(options);
            return Ok(row);
        }
        (Flag(_), Some(_)) => return Err(format!("{} takes no value", row.name)),
        (Value(_, set), attached) => (attached.or_else(|| rest.next()), set),
    };
    let value = value.ok_or_else(|| format!("{} requires a value", row.name))?;
    let taken = match value.to_str() {
        Some(text) => set(options, text),
        None => Err("expected UTF-8".to_owned()),
    };
    taken.map_err(|expected| match row.name {
        // Their messages are those of the older program.
        "--timeout" => "invalid timeout value".to_owned(),
        "--stale" => "invalid stale timeout value".to_owned(),
        name => invalid_value(&value.to_string_lossy(), name, &expected),
    })?;
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

/// The usage that follows a message about the command line.
pub(super) const SHORT_USAGE: &str = "\
Usage: sema COMMAND PATH [OPTIONS]
       sema run PATH [OPTIONS] -- PROGRAM [ARGUMENTS]
Commands: try, acquire, release, status, wait, clean, run, hold; see sema --help
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
        let value = match row.set {
            Value(value, _) => Some(format!(" {value}")),
            Flag(_) => None,
        };
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
    text.push_str("\nA time is in seconds, or has units: 250ms, 1.5s, 2m, 1m30s, 1h.\n");
    text
}

fn shown(text: &OsStr) -> Plain<'_> {
    Plain(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_in_the_help() {
        let help = help();
        for known in &OPTIONS {
            assert!(help.contains(known.name), "{}", known.name);
        }
        assert!(help.lines().all(|line| line.len() <= 120), "{help}");
    }
}
