//! The command line of `sema`: see sema(1). It is not read by argh, because a path may contain any
//! bytes, options may come before and after the path, and the messages are those of an older
//! program of this name.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::lockfile::{SemaphoreConfig, SemaphoreOptions, Settle, StaleRule, MAX_SLOT_COUNT};
use crate::os::text::{invalid_value, Plain};
use crate::shared::cli::arguments::{self, Arguments, Parsed, Word};
use crate::shared::cli::rows::{CommandRow, Form, Program, Row, Times, FLAG};
use crate::shared::cli::values::{choice, mode, number, time, BusyOk};
use crate::shared::cli::words::with_run;
use crate::shared::supervise::Leftovers;

/// The line for `--version`, with the name that the older program prints.
const VERSION: &str = concat!("file-semaphore ", env!("CARGO_PKG_VERSION"), "\n");

/// The maximum length of a token in bytes.
const MAX_TOKEN_LEN: usize = 256;

const MAX_PID: u32 = i32::MAX as u32;

/// How long `--settle always` pauses after a grant.
const SETTLE: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SemaCommand {
    Try,
    Acquire,
    Release,
    Status,
    Wait,
    Clean,
    Run,
    Hold,
}

use Form::{Flag, Switch, Valued};
use SemaCommand::{Acquire, Clean, Hold, Release, Run, Status, Try, Wait};

/// Every command, in the order of [`COMMANDS`].
const ALL: [SemaCommand; 8] = [Run, Hold, Try, Acquire, Release, Status, Wait, Clean];

const COMMANDS: &[CommandRow] = &[
    CommandRow {
        tail: "PROGRAM [ARGUMENTS]",
        ..CommandRow::new("run", "Run a program while holding the lock")
    },
    CommandRow::new(
        "hold",
        "Hold the lock until standard input is closed, and print its path",
    ),
    CommandRow::new("try", "Take the lock if it is free or stale"),
    CommandRow::new("acquire", "Wait for the lock and take it"),
    CommandRow::new("release", "Give the lock back"),
    CommandRow::new("status", "Show who holds the lock"),
    CommandRow::new("wait", "Wait until the lock is free, without taking it"),
    CommandRow::new("clean", "Remove a stale lock and the left-overs of crashes"),
];

/// The error if there is no `--` before the command that `run` starts.
const BEFORE_THE_COMMAND: &str = "put -- before the command";

const TAKING: &[&str] = &["try", "acquire", "run", "hold"];
const WAITING: &[&str] = &["acquire", "run", "hold"];

/// What the program takes on its command line.
pub const SELF: Program = Program {
    commands: COMMANDS,
    examples: &[
        "sema run nightly.lock -- backup.sh",
        "sema run pool --of 3 --timeout 10m -- work",
        "sema status nightly.lock",
    ],
    ..Program::plain("sema", OWN, "sema(1)")
};

const OWN: CommandRow = CommandRow {
    rows: OPTIONS,
    ..CommandRow::new("", "Lock files that are safe even when they are stale.")
};

/// Every option, in the order of the help.
const OPTIONS: &[Row] = &[
    Row {
        name: "file",
        form: Form::Operand,
        times: Times::Once,
        about: "the path of the lock",
        ..FLAG
    },
    option(
        "timeout",
        Valued("time"),
        "wait at most this long; 0 tries once (no limit)",
    )
    .or("-w"),
    option("nonblock", Flag, "do not wait, as with --timeout 0")
        .or("-n")
        .only_of(WAITING),
    option(
        "stale",
        Valued("time"),
        "let a lock be stale from this age on; 0: never (3600)",
    ),
    option(
        "stale-rule",
        Valued("rule"),
        "judge by age alone, or by age-and-liveness: old and not provably alive (age-and-liveness)",
    ),
    option("tag", Valued("text"), "say what the lock is held for"),
    option(
        "json",
        Flag,
        "print the result, or the holder, as JSON on stdout",
    ),
    option("quiet", Flag, "print only errors, status and JSON").or("-q"),
    option(
        "verbose",
        Flag,
        "say who holds the lock while it waits, even if stderr is not a terminal",
    )
    .or("-v")
    .only_of(WAITING),
    option(
        "of",
        Valued("count"),
        "use one of this many locks, FILE.0.lock and so on",
    )
    .only_of(&["try", "acquire", "release", "status", "wait", "run", "hold"]),
    // In latch, this is how many one client takes.
    Row {
        is_hidden: true,
        ..option("slots", Valued("count"), "older name of --of")
            .only_of(&["try", "acquire", "release", "status", "wait", "run", "hold"])
    },
    option(
        "pid",
        Valued("pid"),
        "name the process that holds the lock (the parent of sema)",
    )
    .only_of(&["try", "acquire", "release"]),
    option(
        "token",
        Valued("word"),
        "keep this word in the lock file; release must give the same",
    )
    .only_of(&["try", "acquire", "run", "hold", "release"]),
    option(
        "force",
        Flag,
        "release another holder's lock; clean even without locks on files",
    )
    .only_of(&["release", "clean"]),
    option(
        "mode",
        Valued("mode"),
        "set the permissions of the lock file, in octal, before the umask (0644)",
    )
    .only_of(TAKING),
    option("no-sync", Flag, "do not wait for the disk").only_of(TAKING),
    option(
        "settle",
        Valued("when"),
        "wait 20 ms for programs without locks on files: never, at a takeover or always (takeover)",
    )
    .only_of(TAKING),
    option(
        "busy-status",
        Valued("status"),
        "exit with this status if the lock is not granted in time (75)",
    )
    .or("-E")
    .only_of(&["run", "hold"]),
    option(
        "busy-ok",
        Switch("time"),
        "exit with 0 if the lock is not granted in time, and has been held for less than this time",
    )
    .only_of(&["run"]),
    option(
        "on-lost",
        Valued("what"),
        "end the program if the lock is lost (term), or ignore the loss (term)",
    )
    .only_of(&["run"]),
    option(
        "kill-after",
        Valued("time"),
        "kill the program if it has not ended this long after the lock was lost (10)",
    )
    .only_of(&["run"]),
    option(
        "leftovers",
        Valued("what"),
        "let the rest of the program's group go on without the lock, end it, or wait for it (leave)",
    )
    .only_of(&["run"]),
];

const fn option(name: &'static str, form: Form, about: &'static str) -> Row {
    Row {
        name,
        form,
        about,
        ..FLAG
    }
}

/// The values of the options; `None` stands for the default.
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
    pub(super) busy_ok: BusyOk,
    /// Whether the command that `run` starts goes on if the lock is lost.
    pub(super) ignores_loss: bool,
    pub(super) kill_after: Option<Duration>,
    pub(super) leftovers: Leftovers,
}

impl SemaOptions {
    /// Sets the option with this name. The error says what value is expected.
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let lock = self.lock.clone();
        match name {
            "timeout" => self.timeout = Some(time(value)?),
            "nonblock" => self.timeout = Some(Duration::ZERO),
            "stale" => {
                self.config.stale_timeout = Some(time(value)?).filter(|time| !time.is_zero());
            }
            "stale-rule" => {
                let all = [
                    ("age", StaleRule::Age),
                    ("age-and-liveness", StaleRule::AgeAndLiveness),
                ];
                self.lock = lock.stale_rule(choice(value, all)?);
            }
            "tag" => self.tag = Some(value.to_owned()),
            "json" => self.json = true,
            "quiet" => self.quiet = true,
            "verbose" => self.verbose = true,
            "of" | "slots" => self.slots = Some(number(value, 1..=MAX_SLOT_COUNT)?),
            "pid" => self.pid = Some(number(value, 1..=MAX_PID)?),
            "token" => {
                let is_word = !value.is_empty()
                    && value.len() <= MAX_TOKEN_LEN
                    && !value.contains(|c: char| c.is_whitespace() || c.is_control());
                if !is_word {
                    return Err("expected a word of 1-256 bytes without blanks".into());
                }
                self.token = Some(value.to_owned());
                self.lock = lock.token(value);
            }
            "force" => self.force = true,
            "mode" => self.lock = lock.mode(mode(value)?),
            "no-sync" => self.lock = lock.sync(false),
            "settle" => {
                let all = [
                    ("never", Settle::Never),
                    ("takeover", Settle::default()),
                    ("always", Settle::Always(SETTLE)),
                ];
                self.lock = lock.settle(choice(value, all)?);
            }
            "busy-status" => self.busy_status = Some(number(value, 0..=u8::MAX)?),
            "busy-ok" => self.busy_ok = BusyOk::parse(value)?,
            "on-lost" => self.ignores_loss = choice(value, [("term", false), ("ignore", true)])?,
            "kill-after" => self.kill_after = Some(time(value)?),
            "leftovers" => self.leftovers = choice(value, Leftovers::NAMES)?,
            other => unreachable!("--{other} is in no row"),
        }
        Ok(())
    }
}

/// A command line as typed values.
#[derive(Debug)]
pub(super) struct SemaRequest {
    pub(super) command: SemaCommand,
    pub(super) path: PathBuf,
    pub(super) options: SemaOptions,
    /// The command that `run` starts, and its arguments.
    pub(super) words: Vec<OsString>,
}

/// Reads the command line.
pub(super) fn parse(mut arguments: impl Iterator<Item = OsString>) -> Parsed<SemaRequest> {
    let ours: Vec<OsString> = arguments
        .by_ref()
        .take_while(|argument| argument != "--")
        .collect();
    match ours.first().map(|word| word.as_bytes()) {
        Some(b"help") => return Parsed::Print(help(&ours)),
        Some(b"version") => return Parsed::Print(VERSION.to_owned()),
        _ => {}
    }
    let words: Vec<OsString> = arguments.collect();
    let is_option = |word: &OsString| word.as_bytes().first() == Some(&b'-');
    let mut first = ours.iter().take(1);
    let is_wrong = first.any(|word| !is_option(word) && command_named(word).is_none());
    // These two options take effect anywhere, even as the value of another option. But the help for
    // an unknown command is an error, so that a script can learn from it whether a command exists.
    for argument in &ours {
        match argument.as_bytes() {
            b"-h" | b"--help" => {
                return if is_wrong {
                    Parsed::Usage(unknown_command(&ours, &words))
                } else {
                    Parsed::Print(help(&ours))
                };
            }
            b"-V" | b"--version" => return Parsed::Print(VERSION.to_owned()),
            _ => {}
        }
    }
    if is_wrong {
        return Parsed::Usage(unknown_command(&ours, &words));
    }
    understand(ours, words).unwrap_or_else(Parsed::Usage)
}

fn understand(ours: Vec<OsString>, words: Vec<OsString>) -> Result<Parsed<SemaRequest>, String> {
    let mut options = SemaOptions::default();
    let mut given: Vec<&Row> = Vec::new();
    let mut others = Vec::new();
    for word in Arguments::new(&SELF, ours.into_iter()) {
        let set = match word {
            Word::Operand(word) => {
                others.push(word);
                continue;
            }
            Word::Unknown(name) => {
                let name = name.to_string_lossy();
                Err(arguments::unknown_option(&SELF, None, &name))
            }
            Word::Option(found) => match found.row.name {
                "help" => return Ok(Parsed::Print(help(&others))),
                "version" => return Ok(Parsed::Print(VERSION.to_owned())),
                _ => {
                    let (row, name) = (found.row, found.row.long());
                    given.push(row);
                    let value = found.value(&name);
                    value.and_then(|value| set(&mut options, row, &name, &value))
                }
            },
        };
        set.map_err(|reason| match &others[..] {
            // The argument may be an option of the command that `run` starts.
            [name, _, _, ..] if name == "run" && words.is_empty() => BEFORE_THE_COMMAND.to_owned(),
            _ => reason,
        })?;
    }
    let name = others.first().ok_or("missing command")?;
    let command = command_named(name).ok_or_else(|| unknown_command(&others, &words))?;
    let name = name.to_string_lossy().into_owned();
    let others = others.into_iter().skip(1);
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
    if let Some(row) = given.iter().find(|row| !row.is_of(&name)) {
        return Err(format!("{} is not an option of {name}", row.long()));
    }
    if command == Run && words.is_empty() {
        return Err("missing command to run, after --".to_owned());
    }
    Ok(Parsed::Run(SemaRequest {
        command,
        path,
        options,
        words,
    }))
}

/// The command that a command line names, even if the rest of the line is wrong.
pub(super) fn command_in(arguments: &[OsString]) -> Option<SemaCommand> {
    let mut words = Arguments::new(&SELF, arguments.iter().cloned());
    words.find_map(|word| match word {
        Word::Operand(word) if !word.as_bytes().starts_with(b"-") => Some(command_named(&word)),
        _ => None,
    })?
}

/// The message about a command line whose first word is no command.
fn unknown_command(ours: &[OsString], words: &[OsString]) -> String {
    let name = ours[0].to_string_lossy();
    let reason = arguments::unknown_command(&SELF, &name);
    let is_unheard_of = !reason.contains("; ");
    match with_run(SELF.name, ours, words).filter(|_| is_unheard_of) {
        Some(meant) => format!("{reason}; write {meant}"),
        None => reason,
    }
}

fn command_named(name: &OsStr) -> Option<SemaCommand> {
    let mut commands = COMMANDS.iter().zip(ALL);
    let (_, command) = commands.find(|(row, _)| name == row.name)?;
    Some(command)
}

/// Sets one option, whose name is `name` in messages.
fn set(options: &mut SemaOptions, row: &Row, name: &str, value: &OsStr) -> Result<(), String> {
    if value.is_empty() && matches!(row.form, Switch(_)) {
        return Err(format!("{name} requires a value"));
    }
    let taken = match value.to_str() {
        Some(text) => options.set(row.name, text),
        None => Err("expected UTF-8".to_owned()),
    };
    taken.map_err(|expected| match row.name {
        // These two messages are those of the older program.
        "timeout" => "invalid timeout value".to_owned(),
        "stale" => "invalid stale timeout value".to_owned(),
        _ => invalid_value(&value.to_string_lossy(), name, &expected),
    })
}

/// The usage that follows a message about the command line.
pub(super) const SHORT_USAGE: &str = "\
Usage: sema COMMAND PATH [OPTIONS]
       sema run PATH [OPTIONS] -- PROGRAM [ARGUMENTS]
Commands: try, acquire, release, status, wait, clean, run, hold; see sema --help
";

/// The help of the command that a command line names, or of all.
fn help(ours: &[OsString]) -> String {
    let named = ours.iter().find_map(|word| SELF.command(word.to_str()?));
    SELF.help(named)
}

fn shown(text: &OsStr) -> Plain<'_> {
    Plain(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_can_be_set() {
        for Row { name, .. } in OPTIONS.iter().filter(|row| row.is_option()) {
            let mut options = SemaOptions::default();
            let is_set = |value: &&str| options.set(name, value).is_ok();
            let values = ["1", "age", "never", "term", "0644", "wait"];
            assert!(values.iter().any(is_set), "{name}");
        }
    }
}
