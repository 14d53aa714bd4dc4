//! The reader of the programs' command lines. It knows options and operands from the rows of a
//! program, and the variables that set options. argh converts the values.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::rows::{Bond, CommandRow, Dashes, Form, Program, Row, Times, OF_ALL};
use super::words::{self, hint, split_value};
use crate::os::text::{bare, invalid_value, Plain};

/// The result of parsing a command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    Run(T),
    /// Print the text on stdout and do nothing else.
    Print(String),
    /// Print the error, a single line.
    Usage(String),
}

/// The origin of each option that is set: the option itself, or the name of a variable; and whether
/// the option is switched off.
#[derive(Debug, Default)]
pub struct Origins(Vec<(String, String, bool)>);

impl Origins {
    /// The origin of `option`, if it is set.
    pub fn get(&self, option: &str) -> Option<&str> {
        self.find(|set, _| set == option)
    }

    fn find(&self, is_it: impl Fn(&str, bool) -> bool) -> Option<&str> {
        let mut all = self.0.iter();
        all.find_map(|(set, origin, is_off)| is_it(set, *is_off).then_some(origin.as_str()))
    }

    /// Checks the rules between the options of `program`.
    fn check(&self, program: &Program) -> Result<(), String> {
        let rivals = program
            .rivals
            .iter()
            .map(|[one, other]| (self.get(other), self.get(one)));
        if let Some((Some(one), Some(other))) = rivals.clone().find(|it| it.0.and(it.1).is_some()) {
            return Err(together(one, other));
        }
        let first = |options: &[&str]| {
            let given = |option: &&str| match option.strip_suffix('=') {
                Some(option) => self.get(option),
                None => self.find(|set, is_off| set == *option && !is_off),
            };
            options.iter().find_map(given)
        };
        let mut broken = program.rules.iter().filter_map(|(options, bond, others)| {
            Some(match (first(options), bond, first(others)) {
                (Some(origin), Bond::Needs(why), None) => format!("{origin}: {why}"),
                (Some(origin), Bond::Excludes, Some(other)) => together(origin, other),
                (Some(origin), Bond::Both, None) | (None, Bond::Both, Some(origin)) => {
                    let (one, other) = (options[0], others[0]);
                    format!("{origin}: both {one} and {other} must be provided")
                }
                (_, Bond::Usable, _) => program.own.rows.iter().find_map(|row| {
                    let origin = self.get(&row.long())?;
                    row.refusal().map(|why| format!("{origin}: {why}"))
                })?,
                _ => return None,
            })
        });
        broken.next().map_or(Ok(()), Err)
    }
}

/// Options and operands as values, as [`options`] generates them.
pub trait FromRows: Sized {
    /// What can be given, in the order of the help.
    const COMMAND: CommandRow;

    /// Converts what is given. Returns `None` if something is missing, or if a value is refused,
    /// which the command line notes.
    fn from_line(line: &mut CommandLine) -> Option<Self>;
}

/// The words of a command line, one after the other. An option comes with its value, and joined
/// short options come one by one.
pub struct Arguments<'a> {
    program: &'a Program,
    /// The command whose options are known; those of the program itself if there is none.
    pub command: Option<&'static CommandRow>,
    /// The words that are left, the next one last.
    rest: Vec<OsString>,
}

pub enum Word {
    Operand(OsString),
    Option(FoundOption),
    /// The name of an option that is not known.
    Unknown(OsString),
}

pub struct FoundOption {
    pub row: &'static Row,
    /// The option as it is written.
    name: String,
    value: Option<OsString>,
    is_attached: bool,
}

impl FoundOption {
    /// The value, which is empty for a flag. An error calls the option `name`.
    pub fn value(self, name: &str) -> Result<OsString, String> {
        match (self.row.form, self.value) {
            (Form::Flag, Some(_)) => Err(format!("{name} takes no value")),
            (Form::Flag, None) => Ok(OsString::new()),
            (_, Some(value)) => Ok(value),
            (_, None) => Err(format!("{name} requires a value")),
        }
    }
}

impl<'a> Arguments<'a> {
    pub fn new(program: &'a Program, arguments: impl Iterator<Item = OsString>) -> Arguments<'a> {
        let mut rest: Vec<OsString> = arguments.collect();
        rest.reverse();
        Arguments {
            program,
            command: None,
            rest,
        }
    }

    /// The joined short options that come next, and perhaps the value of the last one: `-nE1` is
    /// `-n`, `-E` and `1`.
    fn joined(&self) -> Option<Vec<String>> {
        let program = self.program;
        let of_commands = program.commands.iter().flat_map(|command| command.rows);
        // Where a command must come first, -h and -V stand alone.
        let of_all = OF_ALL.iter().filter(|_| !program.own.rows.is_empty());
        let rows: Vec<&Row> = of_commands.chain(program.own.rows).chain(of_all).collect();
        let mut rest = self.rest.last()?.to_str()?.strip_prefix('-')?;
        let mut parts = Vec::new();
        while let Some(short) = rest.chars().next() {
            let name = format!("-{short}");
            let row = rows.iter().find(|row| row.is_named(&name))?;
            rest = &rest[short.len_utf8()..];
            parts.push(name);
            if matches!(row.form, Form::Valued(_)) && !rest.is_empty() {
                parts.push(rest.to_owned());
                break;
            }
        }
        Some(parts).filter(|parts| !parts.is_empty())
    }

    /// Takes the value of an option that has none after an equals sign.
    fn value_of(&mut self, row: &Row) -> Option<OsString> {
        match (row.form, row.alone) {
            (_, Some((alone, takes))) => {
                let next = self.rest.last();
                let is_value = next.is_some_and(|next| takes(&next.to_string_lossy()));
                let next = is_value.then(|| self.rest.pop()).flatten();
                Some(next.unwrap_or_else(|| alone.into()))
            }
            (Form::Switch(_), None) => Some("true".into()),
            // The next argument is the value, even if it looks like an option.
            (Form::Valued(_), None) => self.rest.pop(),
            (Form::Flag | Form::Operand, None) => None,
        }
    }
}

impl Iterator for Arguments<'_> {
    type Item = Word;

    fn next(&mut self) -> Option<Word> {
        let can_have_one_dash = self.program.dashes == Dashes::OneOrTwo;
        if let Some(parts) = self.joined().filter(|_| !can_have_one_dash) {
            self.rest.pop();
            self.rest
                .extend(parts.into_iter().rev().map(OsString::from));
        }
        let mut argument = self.rest.pop()?;
        if !argument.as_bytes().starts_with(b"-") || argument == "-" || argument == "--" {
            return Some(Word::Operand(argument));
        }
        // `-name` is a long option, but `-n` is a short one.
        let text = argument.to_string_lossy();
        if can_have_one_dash && text.chars().count() > 2 && !text.starts_with("--") {
            let mut with_two = OsString::from("-");
            with_two.push(argument);
            argument = with_two;
        }
        let (name, attached) = split_value(&argument);
        let command = self.command.unwrap_or(&self.program.own);
        let known = std::str::from_utf8(name).ok();
        let known = known.and_then(|name| {
            let mut rows = self.program.all_rows(command);
            Some((rows.find(|row| row.is_named(name))?, name))
        });
        let Some((row, name)) = known else {
            return Some(Word::Unknown(OsStr::from_bytes(name).to_owned()));
        };
        let value = attached.map(OsStr::to_owned);
        Some(Word::Option(FoundOption {
            row,
            name: name.to_owned(),
            is_attached: attached.is_some(),
            value: value.or_else(|| self.value_of(row)),
        }))
    }
}

/// The function that converts a value.
type Parse<T> = fn(&str) -> Result<T, String>;

/// What a command line gives, as text.
#[derive(Default)]
pub struct CommandLine {
    command: Option<&'static CommandRow>,
    given: Vec<Given>,
    /// Why the first wrong value is refused, and its place.
    refusal: Option<(usize, String)>,
}

/// An option or an operand that is given.
struct Given {
    row: &'static Row,
    /// The option as it is written, or the name of a variable.
    origin: String,
    /// The value, until it is converted.
    value: Option<String>,
    is_off: bool,
}

impl Given {
    fn new(row: &'static Row, origin: String, value: String) -> Given {
        Given {
            row,
            origin,
            value: Some(value),
            is_off: false,
        }
    }
}

/// Parses the command line of `program`.
pub fn parse<T: FromRows>(
    program: &Program,
    arguments: impl Iterator<Item = OsString>,
) -> Parsed<T> {
    parse_with_variables(program, arguments, &|_| None).0
}

/// Parses the command line of `program`, and the variables whose values `lookup` returns. An empty
/// value counts as unset. Also returns the origins of the options.
pub fn parse_with_variables<T: FromRows>(
    program: &Program,
    arguments: impl Iterator<Item = OsString>,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> (Parsed<T>, Origins) {
    match CommandLine::read(program, Arguments::new(program, arguments)) {
        Ok(Parsed::Run(mut line)) => {
            line.add_variables(program, lookup);
            let options = match (T::from_line(&mut line), line.refusal.take()) {
                (_, Some((_, reason))) => Err(reason),
                (None, None) => Err(format!("missing {}", line.missing(program))),
                (Some(options), None) => Ok(options),
            };
            let origins = line.given.into_iter();
            let origins = origins.map(|it| (it.row.long(), it.origin, it.is_off));
            let origins = Origins(origins.collect());
            let options = options.and_then(|options| origins.check(program).map(|()| options));
            (options.map_or_else(Parsed::Usage, Parsed::Run), origins)
        }
        Ok(Parsed::Print(text)) => (Parsed::Print(text), Origins::default()),
        Ok(Parsed::Usage(reason)) | Err(reason) => (Parsed::Usage(reason), Origins::default()),
    }
}

impl CommandLine {
    fn read(program: &Program, mut words: Arguments<'_>) -> Result<Parsed<CommandLine>, String> {
        let readable = |word: OsString| word.into_string().map_err(|_| "an argument is not UTF-8");
        let mut line = CommandLine::default();
        while let Some(word) = words.next() {
            let found = match word {
                Word::Operand(word) => {
                    line.add_word(program, readable(word)?)?;
                    words.command = line.command;
                    continue;
                }
                Word::Unknown(name) => {
                    return Err(unknown_option(program, line.command, &readable(name)?));
                }
                Word::Option(found) => found,
            };
            let (row, origin, is_attached) = (found.row, found.name.clone(), found.is_attached);
            let value = found.value(&origin)?;
            match (row.form, row.name) {
                (Form::Flag, "help") => return Ok(Parsed::Print(program.help(line.command))),
                (Form::Flag, _) => return Ok(Parsed::Print(program.version())),
                _ => {}
            }
            let value = match value.into_string() {
                Ok(value) => value,
                Err(value) if is_attached => readable(value)?,
                Err(_) => return Err(format!("{origin}: the value is not UTF-8")),
            };
            if row.times != Times::Any && line.has(row) {
                // The value is left out: it is not wrong, and it may be secret.
                return Err(format!("{origin}: it is given more than once"));
            }
            line.given.push(Given::new(row, origin, value));
        }
        Ok(Parsed::Run(line))
    }

    /// Whether this is the command that is given.
    pub fn is_of(&self, command: &CommandRow) -> bool {
        self.command.is_some_and(|given| given.name == command.name)
    }

    fn has(&self, row: &Row) -> bool {
        self.given.iter().any(|given| given.row.name == row.name)
    }

    /// What the command takes, or the program itself if there is none yet.
    fn rows(&self, program: &Program) -> impl Iterator<Item = &'static Row> {
        program.rows(self.command.unwrap_or(&program.own))
    }

    /// Adds a word that is no option.
    fn add_word(&mut self, program: &Program, word: String) -> Result<(), String> {
        let operands = || self.rows(program).filter(|row| !row.is_option());
        let (mut open, takes_none) = (operands().filter(|row| !self.has(row)), operands().next());
        if self.command.is_none() && !program.commands.is_empty() {
            let command = program.command(&word);
            self.command = Some(command.ok_or_else(|| unknown_command(program, &word))?);
        } else if let Some(row) = open.next() {
            self.given.push(Given::new(row, row.name.to_owned(), word));
        } else {
            let takes_none = program.commands.is_empty() && takes_none.is_none();
            let hint = takes_none.then(|| format!("; {} takes options only", program.name));
            let (word, hint) = (Plain(word.as_bytes()), hint.unwrap_or_default());
            return Err(format!("unexpected argument: {word}{hint}"));
        }
        Ok(())
    }

    /// What must be given, and is not.
    fn missing(&self, program: &Program) -> String {
        if self.command.is_none() && !program.commands.is_empty() {
            let names: Vec<&str> = program.commands.iter().map(|it| it.name).collect();
            return format!("command: one of {}", names.join(", "));
        }
        let missing = self
            .rows(program)
            .filter(|row| row.times == Times::Once && !self.has(row));
        let names = missing.map(|row| match row.form {
            Form::Operand => row.name.to_owned(),
            _ => row.long(),
        });
        names.collect::<Vec<String>>().join(", ")
    }

    /// Adds the options that variables set.
    fn add_variables(&mut self, program: &Program, lookup: &dyn Fn(&str) -> Option<String>) {
        for prefix in program.prefixes {
            let find = |row: &'static Row| {
                let mut variables = row.variables.iter().map(|it| format!("{prefix}_{it}"));
                variables.find_map(|origin| {
                    let value = lookup(&origin).filter(|value| !value.is_empty())?;
                    Some(Given::new(row, origin, bare(&value).to_owned()))
                })
            };
            let is_given = |option: &&str| self.given.iter().any(|it| it.row.long() == **option);
            let is_open = |row: &&Row| {
                let long = row.long();
                let option = long.as_str();
                let rivals = program.rivals.iter().filter(|pair| pair.contains(&option));
                let mut options = rivals.flatten().chain([&option]);
                !options.any(is_given)
            };
            let rows = program.own.rows.iter();
            let found: Vec<Given> = rows.filter(is_open).filter_map(find).collect();
            self.given.extend(found);
        }
    }

    /// The values of an option that may be given several times.
    pub fn values<T>(&mut self, name: &str, parse: Parse<T>, is_off: fn(&T) -> bool) -> Vec<T> {
        let mut values = Vec::new();
        while let Some(value) = self.value(name, parse, is_off) {
            values.push(value);
        }
        values
    }

    /// The next value of the option or operand with this name. `is_off` tells whether a value
    /// switches the option off.
    pub fn value<T>(&mut self, name: &str, parse: Parse<T>, is_off: fn(&T) -> bool) -> Option<T> {
        let (at, text) = self.take(name)?;
        match parse(&text) {
            Ok(value) => {
                self.given[at].is_off = is_off(&value);
                Some(value)
            }
            Err(reason) => {
                self.refuse(at, &text, &reason);
                None
            }
        }
    }

    // These two are apart from `value` because that is compiled once for each type.

    /// Takes the next value of the option or operand with this name, and tells its place.
    fn take(&mut self, name: &str) -> Option<(usize, String)> {
        let mut all = self.given.iter_mut().enumerate();
        all.find_map(|(at, given)| {
            let value = given.value.take_if(|_| given.row.name == name)?;
            Some((at, value))
        })
    }

    /// Notes why a value is refused, if it is the first one on the line.
    fn refuse(&mut self, at: usize, text: &str, reason: &str) {
        let reason = invalid_value(text, &self.given[at].origin, reason);
        let refusals = self.refusal.take().into_iter().chain([(at, reason)]);
        self.refusal = refusals.min_by_key(|(at, _)| *at);
    }
}

fn together(one: &str, other: &str) -> String {
    format!("{one}: cannot be given together with {other}")
}

/// The message about an option that the command, or the program itself, does not have.
pub fn unknown_option(program: &Program, command: Option<&CommandRow>, name: &str) -> String {
    let advice = advice(program, command.map_or("", |it| it.name), name);
    let has_it = |it: &&CommandRow| program.rows(it).any(|row| row.is_named(name));
    let owners = program.commands.iter().filter(has_it);
    let owners: Vec<&str> = owners.map(|it| it.name).collect();
    let hint = match advice {
        Some(advice) => format!("; {advice}"),
        None if !owners.is_empty() && command.is_none() => {
            return format!("options come after the command: {name}");
        }
        None if !owners.is_empty() => {
            format!("; it is an option of {} {}", program.name, listed(&owners))
        }
        None => {
            let known = program.rows(command.unwrap_or(&program.own));
            let known = known.filter(|row| row.is_option()).map(Row::long);
            let known: Vec<String> = known.collect();
            hint(name, known.iter().map(String::as_str))
        }
    };
    format!("unknown option: {}{hint}", Plain(name.as_bytes()))
}

/// The message about a word that is no command. It has a hint after `; ` if there is one.
pub fn unknown_command(program: &Program, word: &str) -> String {
    let hint = match advice(program, "", word) {
        Some(advice) => format!("; {advice}"),
        None => hint(word, program.commands.iter().map(|it| it.name)),
    };
    format!("unknown command: {}{hint}", Plain(word.as_bytes()))
}

/// What to write instead of a word of another program after this command, or instead of a command
/// if this is "".
pub fn advice(program: &Program, command: &str, word: &str) -> Option<&'static str> {
    let all = program.commands.iter().chain([&program.own]);
    let all: Vec<&Row> = all.flat_map(|it| program.all_rows(it)).collect();
    let is_short = |short| all.iter().any(|row| row.is_named(&format!("-{short}")));
    words::advice(program.name, is_short, command, word)
}

/// Names in a sentence: `run, hold and wait`.
fn listed(names: &[&str]) -> String {
    match names {
        [rest @ .., last] if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.concat(),
    }
}

/// An environment variable with one of these prefixes whose value is not UTF-8, if there is one.
pub fn unreadable_variable(prefixes: &[&str]) -> Option<String> {
    std::env::vars_os().find_map(|(name, value)| {
        let name = name.into_string().ok()?;
        let is_ours = prefixes.iter().any(|prefix| name.starts_with(prefix));
        (is_ours && value.to_str().is_none()).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::cli::options::options;
    use crate::shared::cli::rows::FLAG;

    options! {
        /// A program.
        struct Options {
            /// a text
            text: Option<String> ("text"),
            /// a switch
            debug: Option<bool>,
        }
    }

    const PROGRAM: Program = Program::plain("prog", Options::COMMAND, "prog(1)");

    type Values = (Option<String>, Option<bool>);

    fn read_by(program: &Program, arguments: &[&str]) -> Parsed<Values> {
        match parse(program, arguments.iter().map(OsString::from)) {
            Parsed::Run(Options { text, debug }) => Parsed::Run((text, debug)),
            Parsed::Print(text) => Parsed::Print(text),
            Parsed::Usage(reason) => Parsed::Usage(reason),
        }
    }

    fn read(arguments: &[&str]) -> Parsed<Values> {
        read_by(&PROGRAM, arguments)
    }

    fn run(text: Option<&str>, debug: Option<bool>) -> Parsed<Values> {
        Parsed::Run((text.map(str::to_owned), debug))
    }

    #[test]
    fn a_value_is_the_next_argument_or_follows_an_equals_sign() {
        assert_eq!(read(&["--text", "a"]), run(Some("a"), None));
        assert_eq!(read(&["--text=a=b"]), run(Some("a=b"), None));
        assert_eq!(read(&["--text="]), run(Some(""), None));
        assert_eq!(read(&["--text", "--debug"]), run(Some("--debug"), None));
        assert_eq!(read(&["--text", "-h"]), run(Some("-h"), None));
    }

    #[test]
    fn a_single_dash_will_do_where_it_is_allowed() {
        let program = Program {
            dashes: Dashes::OneOrTwo,
            ..PROGRAM
        };
        let lenient = |arguments: &[&str]| read_by(&program, arguments);
        for text in [&["-text", "a"], &["--text", "a"]] {
            assert_eq!(lenient(text), run(Some("a"), None));
        }
        assert_eq!(lenient(&["-text=a", "-debug"]), run(Some("a"), Some(true)));
        assert_eq!(lenient(&["-text", "-debug"]), run(Some("-debug"), None));
        assert!(matches!(lenient(&["-help"]), Parsed::Print(_)));
        for arguments in [&["-"][..], &["-t", "a"], &["---text", "a"]] {
            assert!(
                matches!(lenient(arguments), Parsed::Usage(_)),
                "{arguments:?}"
            );
        }
        assert!(matches!(read(&["-text", "a"]), Parsed::Usage(_)));
    }

    #[test]
    fn joined_short_options_are_taken_apart() {
        const fn row(name: &'static str, other: &'static str, form: Form) -> Row {
            Row {
                name,
                form,
                ..FLAG.or(other)
            }
        }
        const ROWS: &[Row] = &[
            row("wait", "-w", Form::Valued("time")),
            row("now", "-n", Form::Switch("bool")),
            Row {
                alone: Some(("true", |next| next == "5")),
                ..row("every", "-e", Form::Switch("time"))
            },
        ];
        let own = CommandRow {
            rows: ROWS,
            ..Options::COMMAND
        };
        let program = Program::plain("prog", own, "prog(1)");
        for (given, meant) in [
            ("k -w5", "k -w=5"),
            ("k -nw5 -n", "k -n=true -w=5 -n=true"),
            ("-nw 5 k", "-n=true -w=5 k"),
            ("k -w -n", "k -w=-n"),
            ("k --wait -w5 -w5", "k --wait=-w5 -w=5"),
            ("k -w", "k -w"),
            ("k - -x", "k - -x?"),
            ("k -xn -n=3", "k -xn? -n=3?"),
            ("-e 5 k", "-e=5 k"),
            ("-e k", "-e=true k"),
            ("--every=1 5", "--every=1 5"),
            ("-nh", "-n=true -h"),
        ] {
            let words = Arguments::new(&program, given.split(' ').map(OsString::from));
            let text = |word: OsString| word.into_string().expect("UTF-8");
            let words = words.map(|word| match word {
                Word::Operand(word) => text(word),
                Word::Unknown(name) => text(name) + "?",
                Word::Option(found) => {
                    let value = found.value.map(|value| format!("={}", text(value)));
                    found.name + &value.unwrap_or_default()
                }
            });
            let words: Vec<String> = words.collect();
            assert_eq!(words.join(" "), meant, "{given}");
        }
    }

    #[test]
    fn a_boolean_takes_a_value_only_behind_an_equals_sign() {
        assert_eq!(read(&["--debug"]), run(None, Some(true)));
        assert_eq!(read(&["--debug=no"]), run(None, Some(false)));
        assert!(matches!(read(&["--debug", "no"]), Parsed::Usage(_)));
    }

    #[test]
    fn bad_usage_is_said_in_one_line_and_in_our_words() {
        for (arguments, message) in [
            (&["--nonsense"][..], "unknown option: --nonsense"),
            (
                &["--tetx=1"],
                "unknown option: --tetx; did you mean --text?",
            ),
            (&["--no-debug"], "unknown option: --no-debug"),
            (&["--text"], "--text requires a value"),
            (
                &["word"],
                "unexpected argument: word; prog takes options only",
            ),
            (&["-"], "unexpected argument: -; prog takes options only"),
            (
                &["help"],
                "unexpected argument: help; prog takes options only",
            ),
            (&["-x"], "unknown option: -x"),
            (
                &["--text=a", "--text=b"],
                "--text: it is given more than once",
            ),
            (&["--x\ny", "a"], "unknown option: --x\\x0ay"),
        ] {
            assert_eq!(read(arguments), Parsed::Usage(message.into()));
        }
    }

    #[test]
    fn help_and_version_are_printed() {
        for help in ["-h", "--help"] {
            assert!(
                matches!(read(&["--text=a", help]), Parsed::Print(text) if text.contains("--text"))
            );
        }
        for version in ["-V", "--version"] {
            let expected = format!("prog {}\n", env!("CARGO_PKG_VERSION"));
            assert_eq!(read(&[version, "--nonsense"]), Parsed::Print(expected));
        }
    }
}
