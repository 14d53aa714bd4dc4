//! The features of all programs' command lines that argh lacks: `--name=value`, options whose value
//! is optional, options from environment variables, and a message that says what is wrong. argh
//! converts the values, and is given only what is in the rows.

use std::ffi::OsString;

use argh::FromArgs;

use super::rows::{CommandRow, Dashes, Form, Program, Row, Times};
use super::words::{self, hint};
use crate::text::{invalid_value, Plain};

/// The result of parsing a command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    Run(T),
    /// Print the text on stdout and do nothing else.
    Print(String),
    /// Print the error, a single line.
    Usage(String),
}

/// The origin of each option that is set: the option itself, or the name of a variable.
#[derive(Debug, Default)]
pub struct Origins(Vec<(String, String)>);

impl Origins {
    /// The origin of `option`, if it is set.
    pub fn get(&self, option: &str) -> Option<&str> {
        let mut all = self.0.iter();
        all.find_map(|(set, origin)| (set == option).then_some(origin.as_str()))
    }

    fn is_overruled(&self, option: &str, rivals: &[[&str; 2]]) -> bool {
        let pairs = rivals.iter().filter(|pair| pair.contains(&option));
        let mut options = pairs.flatten().chain([&option]);
        options.any(|option| self.get(option).is_some())
    }
}

/// The words of a command line.
struct CommandLine {
    command: Option<&'static CommandRow>,
    given: Vec<GivenOption>,
    operands: Vec<String>,
}

struct GivenOption {
    row: &'static Row,
    /// The option as it is written, or the name of a variable.
    origin: String,
    value: String,
}

/// Parses the command line of `program`.
pub fn parse<T: FromArgs>(
    program: &Program,
    arguments: impl Iterator<Item = OsString>,
) -> Parsed<T> {
    parse_with_variables(program, arguments, &|_| None).0
}

/// Parses the command line of `program`, and the variables whose values `lookup` returns. An empty
/// value counts as unset. Also returns the origins of the options.
pub fn parse_with_variables<T: FromArgs>(
    program: &Program,
    mut arguments: impl Iterator<Item = OsString>,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> (Parsed<T>, Origins) {
    match read(program, &mut arguments) {
        Ok(Parsed::Run(mut line)) => {
            let origins = line.add_variables(program, lookup);
            let options = line.convert(program);
            (options.map_or_else(Parsed::Usage, Parsed::Run), origins)
        }
        Ok(Parsed::Print(text)) => (Parsed::Print(text), Origins::default()),
        Ok(Parsed::Usage(reason)) | Err(reason) => (Parsed::Usage(reason), Origins::default()),
    }
}

/// Splits the command line into the words that the rows of `program` know.
fn read(
    program: &Program,
    arguments: &mut dyn Iterator<Item = OsString>,
) -> Result<Parsed<CommandLine>, String> {
    let mut line = CommandLine {
        command: None,
        given: Vec::new(),
        operands: Vec::new(),
    };
    let mut arguments = arguments.map(OsString::into_string);
    while let Some(argument) = arguments.next() {
        let mut argument = argument.map_err(|_| "an argument is not UTF-8")?;
        if program.dashes == Dashes::OneOrTwo && is_long_with_one_dash(&argument) {
            argument.insert(0, '-');
        }
        if !argument.starts_with('-') || ["-", "--"].contains(&argument.as_str()) {
            line.add_word(program, argument)?;
            continue;
        }
        let (name, attached) = match argument.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
            _ => (argument.as_str(), None),
        };
        let mut rows = program.all_rows(line.row(program));
        let row = rows.find(|row| row.is_named(name));
        let row = row.ok_or_else(|| unknown_option(program, line.command, name))?;
        let value = match (row.form, attached) {
            (Form::Flag, Some(_)) => return Err(format!("{name} takes no value")),
            (Form::Flag, None) if row.name == "help" => {
                return Ok(Parsed::Print(program.help(line.command)));
            }
            (Form::Flag, None) => return Ok(Parsed::Print(program.version())),
            (_, Some(value)) => value,
            (Form::Switch(_), None) => "true".to_owned(),
            // The next argument is the value, even if it looks like an option.
            (_, None) => match arguments.next() {
                Some(value) => value.map_err(|_| format!("{name}: the value is not UTF-8"))?,
                None => return Err(format!("{name} requires a value")),
            },
        };
        if row.times != Times::Any && line.has(row) {
            // The value is left out: it is not wrong, and it may be secret.
            return Err(format!("{name}: it is given more than once"));
        }
        line.given.push(GivenOption {
            row,
            origin: name.to_owned(),
            value,
        });
    }
    Ok(Parsed::Run(line))
}

impl CommandLine {
    /// The command, or the program itself if there is none yet.
    fn row<'a>(&self, program: &'a Program) -> &'a CommandRow {
        self.command.unwrap_or(&program.own)
    }

    fn has(&self, row: &Row) -> bool {
        self.given.iter().any(|given| given.row.name == row.name)
    }

    fn operand_rows(&self, program: &Program) -> impl Iterator<Item = &'static Row> {
        let rows = program.rows(self.row(program));
        rows.filter(|row| !row.is_option())
    }

    /// Adds a word that is no option.
    fn add_word(&mut self, program: &Program, word: String) -> Result<(), String> {
        let has_room = self.operands.len() < self.operand_rows(program).count();
        if self.command.is_none() && !program.commands.is_empty() {
            let command = program.command(&word);
            self.command = Some(command.ok_or_else(|| unknown_command(program, &word))?);
        } else if has_room {
            self.operands.push(word);
        } else {
            let word = Plain(word.as_bytes());
            let takes_none =
                program.commands.is_empty() && self.operand_rows(program).next().is_none();
            let hint = takes_none.then(|| format!("; {} takes options only", program.name));
            return Err(format!(
                "unexpected argument: {word}{}",
                hint.unwrap_or_default()
            ));
        }
        Ok(())
    }

    /// What must be given, and is not.
    fn missing(&self, program: &Program) -> String {
        if self.command.is_none() && !program.commands.is_empty() {
            let names: Vec<&str> = program.commands.iter().map(|it| it.name).collect();
            return format!("command: one of {}", names.join(", "));
        }
        let operands = self.operand_rows(program).skip(self.operands.len());
        let options = program.rows(self.row(program));
        let options = options.filter(|row| row.is_option() && !self.has(row));
        let not_given = operands.map(|row| (row, row.name.to_owned()));
        let not_given = not_given.chain(options.map(|row| (row, row.long())));
        let missing = not_given.filter(|(row, _)| row.times == Times::Once);
        let names: Vec<String> = missing.map(|(_, name)| name).collect();
        names.join(", ")
    }

    /// Adds the options that variables set. Returns the origins of all options.
    fn add_variables(
        &mut self,
        program: &Program,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Origins {
        let given = self.given.iter();
        let given = given.map(|given| (given.row.long(), given.origin.clone()));
        let mut origins = Origins(given.collect());
        for prefix in program.prefixes {
            let find = |row: &'static Row| {
                let mut variables = row.variables.iter().map(|it| format!("{prefix}_{it}"));
                variables.find_map(|origin| {
                    let value = lookup(&origin).filter(|value| !value.is_empty())?;
                    Some(GivenOption { row, origin, value })
                })
            };
            let is_open = |row: &&Row| !origins.is_overruled(&row.long(), program.rivals);
            let rows = program.own.rows.iter();
            let found: Vec<GivenOption> = rows.filter(is_open).filter_map(find).collect();
            let set = found.iter().map(|it| (it.row.long(), it.origin.clone()));
            origins.0.extend(set);
            self.given.extend(found);
        }
        origins
    }

    /// Has argh convert the values. Argh refuses a value, or a line on which something is missing.
    fn convert<T: FromArgs>(&self, program: &Program) -> Result<T, String> {
        let names: Vec<String> = self.given.iter().map(|given| given.row.long()).collect();
        let pairs = names.iter().zip(&self.given);
        let options = pairs.clone().flat_map(|(name, given)| [name, &given.value]);
        let mut words: Vec<&str> = self.command.iter().map(|command| command.name).collect();
        words.extend(options.map(String::as_str));
        words.push("--");
        words.extend(self.operands.iter().map(String::as_str));
        T::from_args(&[program.name], &words).map_err(|exit| {
            let mut refusals = pairs.filter_map(|(name, given)| {
                let value = &given.value;
                let about = format!("Error parsing option '{name}' with value '{value}': ");
                let reason = exit.output.strip_prefix(&about)?.trim_end();
                Some(invalid_value(value, &given.origin, reason))
            });
            let refusal = refusals.next();
            refusal.unwrap_or_else(|| format!("missing {}", self.missing(program)))
        })
    }
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
    words::advice(program.foreign, is_short, command, word)
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

/// Whether this is a long option with one dash, such as `-name`; `-n` is a short option.
fn is_long_with_one_dash(argument: &str) -> bool {
    let name = argument.strip_prefix('-').unwrap_or_default();
    name.chars().count() > 1 && !name.starts_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::rows::options;
    use crate::cli::values::yes_or_no;

    options! {
        /// A program.
        struct Options {
            /// a text
            #[argh(option, arg_name = "text")]
            text: Option<String>,
            /// a switch
            #[argh(option, arg_name = "bool", from_str_fn(yes_or_no))]
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
