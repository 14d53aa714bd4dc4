//! The command line of `sema`: see sema(1). It is not read by argh, because a path may contain any
//! bytes, options may come before and after the path, and the messages are those of an older
//! program of this name.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::arguments::{self, Parsed};
use crate::cli::help::TIMES;
use crate::cli::rows::{CommandRow, Form, Program, Row, Times, FLAG, OF_ALL};
use crate::cli::values::{choice, mode, number, time, BusyOk};
use crate::cli::words::{apart, with_run};
use crate::lockfile::{SemaphoreConfig, SemaphoreOptions, Settle, StaleRule, MAX_SLOT_COUNT};
use crate::supervise::Leftovers;
use crate::text::{invalid_value, Plain};

use super::words::FOREIGN;

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
const ALL: [SemaCommand; 8] = [Try, Acquire, Release, Status, Wait, Clean, Run, Hold];

const COMMANDS: &[CommandRow] = &[
    command("try", "take the lock if it is free or stale"),
    command("acquire", "wait for the lock and take it"),
    command("release", "give the lock back"),
    command("status", "show who holds the lock"),
    command("wait", "wait until the lock is free, without taking it"),
    command("clean", "remove a stale lock and the left-overs of crashes"),
    CommandRow {
        tail: "PROGRAM [ARGUMENTS]",
        ..command("run", "run a program while holding the lock")
    },
    command(
        "hold",
        "hold the lock until standard input is closed, and print its path",
    ),
];

const fn command(name: &'static str, about: &'static str) -> CommandRow {
    CommandRow {
        name,
        about,
        rows: &[],
        tail: "",
    }
}

/// The error if there is no `--` before the command that `run` starts.
const BEFORE_THE_COMMAND: &str = "put -- before the command";

const TAKING: &[&str] = &["try", "acquire", "run", "hold"];
const WAITING: &[&str] = &["acquire", "run", "hold"];

/// What the program takes on its command line.
pub const SELF: Program = Program {
    commands: COMMANDS,
    foreign: FOREIGN,
    ..Program::plain("sema", OWN, "sema(1)")
};

const OWN: CommandRow = CommandRow {
    rows: OPTIONS,
    ..command("", "Lock files that are safe even when they are stale.")
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
        "slots",
        Valued("count"),
        "use one of this many locks, PATH.0.lock and so on",
    )
    .or("--of")
    .only_of(&["try", "acquire", "release", "status", "wait", "run", "hold"]),
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
        "end what the program leaves in its group (after a second), wait for it, or leave it (end)",
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
            "slots" => self.slots = Some(number(value, 1..=MAX_SLOT_COUNT)?),
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
            "busy-ok" => {
                self.busy_ok = match value {
                    "" => BusyOk::Always,
                    value => BusyOk::parse(value)?,
                };
            }
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
        Some(b"help") => return Parsed::Print(help()),
        Some(b"version") => return Parsed::Print(VERSION.to_owned()),
        _ => {}
    }
    let words: Vec<OsString> = arguments.collect();
    let is_wrong = ours.first().is_some_and(|word| is_wrong_command(word));
    // These two options take effect anywhere, even as the value of another option. But the help for
    // an unknown command is an error, so that a script can learn from it whether a command exists.
    for argument in &ours {
        match argument.as_bytes() {
            b"-h" | b"--help" => {
                return if is_wrong {
                    Parsed::Usage(unknown_command(&ours, &words))
                } else {
                    Parsed::Print(help())
                };
            }
            b"-V" | b"--version" => return Parsed::Print(VERSION.to_owned()),
            _ => {}
        }
    }
    if is_wrong {
        return Parsed::Usage(unknown_command(&ours, &words));
    }
    match understand(ours, words) {
        Ok(request) => Parsed::Run(request),
        Err(reason) => Parsed::Usage(reason),
    }
}

fn understand(ours: Vec<OsString>, words: Vec<OsString>) -> Result<SemaRequest, String> {
    let mut options = SemaOptions::default();
    let mut given: Vec<&Row> = Vec::new();
    let mut others = Vec::new();
    let mut arguments = ours.into_iter();
    while let Some(argument) = arguments.next() {
        if argument.as_bytes().first() != Some(&b'-') || argument == "-" {
            others.push(argument);
            continue;
        }
        let row = set(&mut options, &argument, &mut arguments);
        given.push(row.map_err(|reason| match &others[..] {
            // The argument may be an option of the command that `run` starts.
            [name, _, _, ..] if name == "run" && words.is_empty() => BEFORE_THE_COMMAND.to_owned(),
            _ => reason,
        })?);
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
    Ok(SemaRequest {
        command,
        path,
        options,
        words,
    })
}

/// The command that a command line names, even if the rest of the line is wrong.
pub(super) fn command_in(arguments: &[OsString]) -> Option<SemaCommand> {
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument.as_bytes().first() != Some(&b'-') {
            return command_named(argument);
        }
        if wants_value(argument) {
            arguments.next();
        }
    }
    None
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

/// Whether the first word of a command line is neither an option nor a command.
fn is_wrong_command(word: &OsStr) -> bool {
    word.as_bytes().first() != Some(&b'-') && command_named(word).is_none()
}

fn command_named(name: &OsStr) -> Option<SemaCommand> {
    let mut commands = COMMANDS.iter().zip(ALL);
    let (_, command) = commands.find(|(row, _)| name == row.name)?;
    Some(command)
}

/// Sets one option. Its value may be the next argument.
fn set(
    options: &mut SemaOptions,
    argument: &OsStr,
    rest: &mut impl Iterator<Item = OsString>,
) -> Result<&'static Row, String> {
    let (name, attached) = split_value(argument);
    let Some(row) = row_of(name) else {
        let name = String::from_utf8_lossy(name);
        return Err(arguments::unknown_option(&SELF, None, &name));
    };
    let name = row.long();
    let value = match (row.form, attached) {
        (Valued(_), attached) => attached.or_else(|| rest.next()),
        (_, None) => Some(OsString::new()),
        (Switch(_), Some(value)) => Some(value).filter(|value| !value.is_empty()),
        (_, Some(_)) => return Err(format!("{name} takes no value")),
    };
    let value = value.ok_or_else(|| format!("{name} requires a value"))?;
    let taken = match value.to_str() {
        Some(text) => options.set(row.name, text),
        None => Err("expected UTF-8".to_owned()),
    };
    taken.map_err(|expected| match row.name {
        // These two messages are those of the older program.
        "timeout" => "invalid timeout value".to_owned(),
        "stale" => "invalid stale timeout value".to_owned(),
        _ => invalid_value(&value.to_string_lossy(), &name, &expected),
    })?;
    Ok(row)
}

/// The command line with joined short options apart. The value of an option stays as it is, and so
/// does what follows `--`.
pub(super) fn with_options_apart(words: Vec<OsString>) -> Vec<OsString> {
    let mut normal: Vec<OsString> = Vec::with_capacity(words.len());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        if word == "--" {
            normal.push(word);
            break;
        }
        let text = word.to_str().unwrap_or_default();
        match apart(text, is_short, |short| {
            takes_value(format!("-{short}").as_bytes())
        }) {
            Some(parts) => normal.extend(parts.into_iter().map(OsString::from)),
            None => normal.push(word),
        }
        if normal.last().is_some_and(|last| wants_value(last)) {
            normal.extend(words.next());
        }
    }
    normal.extend(words);
    normal
}

/// Whether the value of this option is the next word.
fn wants_value(word: &OsStr) -> bool {
    let (name, attached) = split_value(word);
    attached.is_none() && takes_value(name)
}

fn is_short(short: char) -> bool {
    row_of(format!("-{short}").as_bytes()).is_some()
}

fn takes_value(name: &[u8]) -> bool {
    row_of(name).is_some_and(|row| matches!(row.form, Valued(_)))
}

/// What all commands take, in the order of the help.
fn rows() -> impl Iterator<Item = &'static Row> {
    OPTIONS.iter().chain(OF_ALL)
}

fn row_of(name: &[u8]) -> Option<&'static Row> {
    let name = std::str::from_utf8(name).ok()?;
    rows().find(|row| row.is_named(name))
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
    for CommandRow { name, about, .. } in COMMANDS {
        let _ = writeln!(text, "  {name:<9}{about}");
    }
    text.push_str("\nOptions:\n");
    for row in rows().filter(|row| row.is_option()) {
        let _ = writeln!(text, "  {:<28}{}", head(row), row.about);
        if !row.commands.is_empty() {
            let commands = COMMANDS.iter().filter(|it| row.is_of(it.name));
            let names: Vec<&str> = commands.map(|it| it.name).collect();
            let _ = writeln!(text, "{:30}({})", "", names.join(", "));
        }
    }
    let _ = writeln!(text, "\n{TIMES}");
    text
}

/// The names and the value of an option.
fn head(row: &Row) -> String {
    let names: Vec<String> = row.names().collect();
    let value = match row.form {
        Valued(value) => format!(" {value}"),
        Switch(value) => format!("[={value}]"),
        _ => String::new(),
    };
    names.join(", ") + &value
}

fn shown(text: &OsStr) -> Plain<'_> {
    Plain(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_fits_a_terminal_of_120_columns() {
        let help = help();
        assert!(help.lines().all(|line| line.len() <= 120), "{help}");
    }

    #[test]
    fn every_option_can_be_set() {
        for Row { name, .. } in OPTIONS.iter().filter(|row| row.is_option()) {
            let mut options = SemaOptions::default();
            let is_set = |value: &&str| options.set(name, value).is_ok();
            let values = ["1", "age", "never", "term", "0644", "wait"];
            assert!(values.iter().any(is_set), "{name}");
        }
    }

    #[test]
    fn joined_short_options_are_taken_apart() {
        for (given, meant) in [
            ("run k -w5", "run k -w 5"),
            ("run k -nqE1 -v", "run k -n -q -E 1 -v"),
            ("-qw 5 run k", "-q -w 5 run k"),
            ("run k -w -n", "run k -w -n"),
            ("run k --tag -w5 -w5", "run k --tag -w5 -w 5"),
            ("run k -w5 -- sh -nq", "run k -w 5 -- sh -nq"),
            ("run k --tag", "run k --tag"),
            ("run k -", "run k -"),
            ("run k -xn", "run k -xn"),
        ] {
            let words = given.split(' ').map(OsString::from).collect();
            let meant: Vec<OsString> = meant.split(' ').map(OsString::from).collect();
            assert_eq!(with_options_apart(words), meant, "{given}");
        }
    }
}
