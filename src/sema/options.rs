//! The command line of `sema`: see sema(1). It is not read by argh, because a path may contain any
//! bytes, options may come before and after the path, and the messages are those of an older
//! program of this name.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::arguments::{hint, Parsed, TIMES};
use crate::cli::values::{choice, mode, number, time, BusyOk};
use crate::cli::words::{advice, apart};
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

use SemaCommand::{Acquire, Clean, Hold, Release, Run, Status, Try, Wait};

/// Every command with its name and its line of the help.
const COMMANDS: [(SemaCommand, &str, &str); 8] = [
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

const ALL: &[SemaCommand] = &[Try, Acquire, Release, Status, Wait, Clean, Run, Hold];
const TAKING: &[SemaCommand] = &[Try, Acquire, Run, Hold];
const WAITING: &[SemaCommand] = &[Acquire, Run, Hold];

/// The error if there is no `--` before the command that `run` starts.
const BEFORE_THE_COMMAND: &str = "put -- before the command";

struct OptionRow {
    /// The names and the value of the option, as the help shows them.
    head: &'static str,
    /// The commands that take the option.
    commands: &'static [SemaCommand],
    help: &'static str,
}

const fn row(
    head: &'static str,
    commands: &'static [SemaCommand],
    help: &'static str,
) -> OptionRow {
    OptionRow {
        head,
        commands,
        help,
    }
}

impl OptionRow {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let words = self.head.split([',', ' ', '[']);
        words.filter(|word| word.starts_with('-'))
    }

    fn of(name: &[u8]) -> Option<&'static OptionRow> {
        let is_name = |known: &str| known.as_bytes() == name;
        OPTIONS.iter().find(|row| row.names().any(is_name))
    }

    /// The long name of the option.
    fn name(&self) -> &'static str {
        self.names().last().unwrap_or_default()
    }

    fn has_value(&self) -> bool {
        !self.has_optional_value() && !self.head.ends_with(self.name())
    }

    /// Whether the option may have a value, after an equals sign.
    fn has_optional_value(&self) -> bool {
        self.head.contains("[=")
    }
}

/// Every option, in the order of the help.
const OPTIONS: [OptionRow; 22] = [
    row(
        "-w, --timeout time",
        ALL,
        "how long to wait; 0 tries once (no limit)",
    ),
    row(
        "-n, --nonblock",
        WAITING,
        "do not wait, as with --timeout 0",
    ),
    row(
        "--stale time",
        ALL,
        "the age from which a lock can be stale; 0: never (3600)",
    ),
    row(
        "--stale-rule rule",
        ALL,
        "age: stale by age alone; age-and-liveness: and not provably alive (age-and-liveness)",
    ),
    row("--tag text", ALL, "what the lock is held for"),
    row(
        "--json",
        ALL,
        "print the result, or the holder, as JSON on stdout",
    ),
    row("-q, --quiet", ALL, "print only errors, status and JSON"),
    row(
        "-v, --verbose",
        WAITING,
        "say who holds the lock while it waits, even if stderr is not a terminal",
    ),
    row(
        "--of, --slots count",
        &[Try, Acquire, Release, Status, Wait, Run, Hold],
        "use one of this many locks, PATH.0.lock and so on",
    ),
    row(
        "--pid pid",
        &[Try, Acquire, Release],
        "the process that holds the lock (the parent of sema)",
    ),
    row(
        "--token word",
        &[Try, Acquire, Run, Hold, Release],
        "a word to keep in the lock file; release must give the same",
    ),
    row(
        "--force",
        &[Release, Clean],
        "release another holder's lock; clean even without locks on files",
    ),
    row(
        "--mode mode",
        TAKING,
        "octal permissions of the lock file, before the umask (0644)",
    ),
    row("--no-sync", TAKING, "do not wait for the disk"),
    row(
        "--settle when",
        TAKING,
        "never, takeover or always: wait 20 ms for programs that do not lock the file (takeover)",
    ),
    row(
        "-E, --busy-status status",
        &[Run, Hold],
        "exit status if the lock is not granted in time (75)",
    ),
    row(
        "--busy-ok[=time]",
        &[Run],
        "exit with 0 if the lock is not granted in time, and has been held for less than this time",
    ),
    row(
        "--on-lost what",
        &[Run],
        "if the lock is lost, end the program: term or ignore (term)",
    ),
    row(
        "--kill-after time",
        &[Run],
        "how long the program may take to end once the lock is lost (10)",
    ),
    row(
        "--leftovers what",
        &[Run],
        "processes left in the program's group: end (after a second), wait for them, leave (end)",
    ),
    row("-h, --help", ALL, "print this and exit"),
    row("-V, --version", ALL, "print the version and exit"),
];

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
    /// Sets the option with this long name. The error says what value is expected.
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let lock = self.lock.clone();
        match name {
            "--timeout" => self.timeout = Some(time(value)?),
            "--nonblock" => self.timeout = Some(Duration::ZERO),
            "--stale" => {
                self.config.stale_timeout = Some(time(value)?).filter(|time| !time.is_zero());
            }
            "--stale-rule" => {
                let all = [
                    ("age", StaleRule::Age),
                    ("age-and-liveness", StaleRule::AgeAndLiveness),
                ];
                self.lock = lock.stale_rule(choice(value, all)?);
            }
            "--tag" => self.tag = Some(value.to_owned()),
            "--json" => self.json = true,
            "--quiet" => self.quiet = true,
            "--verbose" => self.verbose = true,
            "--slots" => self.slots = Some(number(value, 1..=MAX_SLOT_COUNT)?),
            "--pid" => self.pid = Some(number(value, 1..=MAX_PID)?),
            "--token" => {
                let is_word = !value.is_empty()
                    && value.len() <= MAX_TOKEN_LEN
                    && !value.contains(|c: char| c.is_whitespace() || c.is_control());
                if !is_word {
                    return Err("expected a word of 1-256 bytes without blanks".into());
                }
                self.token = Some(value.to_owned());
                self.lock = lock.token(value);
            }
            "--force" => self.force = true,
            "--mode" => self.lock = lock.mode(mode(value)?),
            "--no-sync" => self.lock = lock.sync(false),
            "--settle" => {
                let all = [
                    ("never", Settle::Never),
                    ("takeover", Settle::default()),
                    ("always", Settle::Always(SETTLE)),
                ];
                self.lock = lock.settle(choice(value, all)?);
            }
            "--busy-status" => self.busy_status = Some(number(value, 0..=u8::MAX)?),
            "--busy-ok" => {
                self.busy_ok = match value {
                    "" => BusyOk::Always,
                    value => BusyOk::parse(value)?,
                };
            }
            "--on-lost" => self.ignores_loss = choice(value, [("term", false), ("ignore", true)])?,
            "--kill-after" => self.kill_after = Some(time(value)?),
            "--leftovers" => self.leftovers = choice(value, Leftovers::NAMES)?,
            other => unreachable!("{other} is read before"),
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
    // These two options take effect anywhere, even as the value of another option. But the help for
    // an unknown command is an error, so that a script can learn from it whether a command exists.
    for argument in &ours {
        match argument.as_bytes() {
            b"-h" | b"--help" => {
                let wrong = ours.first().filter(|word| is_wrong_command(word));
                return match wrong {
                    Some(word) => Parsed::Usage(unknown_command(word)),
                    None => Parsed::Print(help()),
                };
            }
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
            // The argument may be an option of the command that `run` starts.
            [name, _, _, ..] if name == "run" && words.is_empty() => BEFORE_THE_COMMAND.to_owned(),
            _ => reason,
        })?);
    }
    let mut others = others.into_iter();
    let name = others.next().ok_or("missing command")?;
    let command = command_named(&name).ok_or_else(|| unknown_command(&name))?;
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
        return Err(format!("{} is not an option of {name}", row.name()));
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
        let (name, attached) = split_value(argument);
        if attached.is_none() && OptionRow::of(name).is_some_and(OptionRow::has_value) {
            arguments.next();
        }
    }
    None
}

fn unknown_command(name: &OsStr) -> String {
    let commands = COMMANDS.iter().map(|(_, name, _)| *name);
    let hint = hint_or_advice(&name.to_string_lossy(), commands);
    format!("unknown command: {}{hint}", shown(name))
}

/// What to write instead of an unknown word, if it is one of another program or is mistyped.
fn hint_or_advice(name: &str, known: impl Iterator<Item = &'static str>) -> String {
    match advice(&FOREIGN, is_short, name) {
        Some(advice) => format!("; {advice}"),
        None => hint(name, known),
    }
}

/// Whether the first word of a command line is neither an option nor a command.
fn is_wrong_command(word: &OsStr) -> bool {
    word.as_bytes().first() != Some(&b'-') && command_named(word).is_none()
}

fn command_named(name: &OsStr) -> Option<SemaCommand> {
    let mut commands = COMMANDS.iter();
    let (command, ..) = commands.find(|(_, known, _)| name == *known)?;
    Some(*command)
}

/// Sets one option. Its value may be the next argument.
fn set(
    options: &mut SemaOptions,
    argument: &OsStr,
    rest: &mut impl Iterator<Item = OsString>,
) -> Result<&'static OptionRow, String> {
    let (name, attached) = split_value(argument);
    let Some(row) = OptionRow::of(name) else {
        let known = OPTIONS.iter().map(OptionRow::name);
        let hint = hint_or_advice(&String::from_utf8_lossy(name), known);
        return Err(format!("unknown option: {}{hint}", Plain(name)));
    };
    let name = row.name();
    let value = match (row.has_value(), attached) {
        (true, attached) => attached.or_else(|| rest.next()),
        (false, None) => Some(OsString::new()),
        (false, Some(value)) if row.has_optional_value() && !value.is_empty() => Some(value),
        (false, Some(_)) if row.has_optional_value() => None,
        (false, Some(_)) => return Err(format!("{name} takes no value")),
    };
    let value = value.ok_or_else(|| format!("{name} requires a value"))?;
    let taken = match value.to_str() {
        Some(text) => options.set(name, text),
        None => Err("expected UTF-8".to_owned()),
    };
    taken.map_err(|expected| match name {
        // These two messages are those of the older program.
        "--timeout" => "invalid timeout value".to_owned(),
        "--stale" => "invalid stale timeout value".to_owned(),
        _ => invalid_value(&value.to_string_lossy(), name, &expected),
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
        match apart(text, is_short, takes_value) {
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
    attached.is_none() && OptionRow::of(name).is_some_and(OptionRow::has_value)
}

fn is_short(short: char) -> bool {
    OptionRow::of(format!("-{short}").as_bytes()).is_some()
}

fn takes_value(short: char) -> bool {
    OptionRow::of(format!("-{short}").as_bytes()).is_some_and(OptionRow::has_value)
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
    for OptionRow {
        head,
        commands,
        help,
    } in &OPTIONS
    {
        let _ = writeln!(text, "  {head:<28}{help}");
        if commands.len() < ALL.len() {
            let names = COMMANDS
                .iter()
                .filter(|(command, ..)| commands.contains(command));
            let names: Vec<&str> = names.map(|(_, name, _)| *name).collect();
            let _ = writeln!(text, "{:30}({})", "", names.join(", "));
        }
    }
    let _ = writeln!(text, "\n{TIMES}");
    text
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
        let read_before = ["--help", "--version"];
        let names = OPTIONS.iter().map(OptionRow::name);
        for name in names.filter(|name| !read_before.contains(name)) {
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

    #[test]
    fn advice_is_about_words_that_are_not_ours() {
        for (words, instead) in FOREIGN {
            for word in words {
                assert!(OptionRow::of(word.as_bytes()).is_none(), "{word} is ours");
            }
            let named = instead.split([' ', ';']).filter(|it| it.starts_with("--"));
            for option in named.filter(|option| *option != "--") {
                let is_ours = OptionRow::of(option.as_bytes()).is_some();
                assert!(is_ours || instead.contains("latch run"), "{option}");
            }
        }
        let foreign = |word| advice(&FOREIGN, is_short, word);
        assert_eq!(foreign("--wait=5"), Some("use --timeout TIME"));
        assert_eq!(foreign("-xn"), foreign("-x"));
        assert_eq!(foreign("--nonblock"), None);
    }
}
