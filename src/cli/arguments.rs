//! What the command lines of all programs have in common, and argh does not know: `--name=value`,
//! `-h`, `-V`, boolean options with an optional value, and options from variables.

use std::ffi::OsString;

use argh::FromArgs;
use strsim::osa_distance;

pub use super::help::Program;
use crate::text::invalid_value;

/// What a command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    Run(T),
    /// Print this text on stdout and do nothing else.
    Print(String),
    /// An error, in one line.
    Usage(String),
}

/// How a long option begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dashes {
    Two,
    /// With one or two, as options of programs written in Go do.
    OneOrTwo,
}

/// One option, as [`options!`] writes it down.
#[derive(Debug)]
pub struct Row {
    /// The name of the field: that of the option, with underscores for dashes.
    pub field: &'static str,
    /// Its short name, if it has one.
    pub short: Option<char>,
    /// The type of the field, and what an `Option` may have in it. A `bool` and an [`IfGiven`] need
    /// no value.
    pub value_type: &'static str,
    pub inner_type: &'static str,
    /// Its variables, without their prefix.
    pub variables: &'static [&'static str],
}

/// Options that [`options!`] has made.
pub trait Rows: FromArgs {
    /// The options in the order of the help.
    const ROWS: &'static [Row];
}

/// The value of an option that also goes without, and takes one only after an equals sign.
pub type IfGiven<T> = T;

/// Makes a struct of options for argh: one row an option, with its help, behind a slash its short
/// name, its type, its default and, in brackets, its variables.
macro_rules! options {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $(
                $(#[$attribute:meta])*
                $field:ident $(/ $short:tt)?: $type:ident $(<$inner:ident>)?
                    $(= [$($variable:literal),*])?,
            )*
        }
    ) => {
        #[derive(argh::FromArgs, Debug)]
        $(#[$meta])*
        $vis struct $name {
            $($(#[$attribute])* $(#[argh(short = $short)])? $vis $field: $type $(<$inner>)?,)*
        }

        impl $crate::cli::arguments::Rows for $name {
            const ROWS: &'static [$crate::cli::arguments::Row] = &[
                $($crate::cli::arguments::Row {
                    field: stringify!($field),
                    short: $crate::cli::arguments::last(&[None, $(Some($short))?]),
                    value_type: stringify!($type),
                    inner_type: concat!("", $(stringify!($inner))?),
                    variables: &[$($($variable),*)?],
                },)*
            ];
        }
    };
}
pub(crate) use options;

/// Its last argument, for the macro.
pub const fn last(all: &[Option<char>]) -> Option<char> {
    all[all.len() - 1]
}

impl Row {
    fn option(&self) -> String {
        format!("--{}", self.field.replace('_', "-"))
    }

    fn is_switch(&self) -> bool {
        self.value_type == "bool" || self.inner_type == "bool" || self.value_type == "IfGiven"
    }
}

/// The options that need no value, by all their names.
pub fn switches<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Vec<String> {
    let switches = rows.into_iter().filter(|row| row.is_switch());
    let names = |row: &Row| {
        let short = row.short.map(|short| format!("-{short}"));
        [Some(row.option()), short].into_iter().flatten()
    };
    switches.flat_map(names).collect()
}

/// The variables that options may come from.
pub struct Variables<'a> {
    /// What the variables' names begin with, without the underscore. The first prefix with a value
    /// for an option wins; the command line wins over all of them.
    pub prefixes: &'a [&'a str],
    /// Pairs of options: if one is given on the command line, the variable of the other has no
    /// effect.
    pub rivals: &'a [[&'a str; 2]],
    /// The value of a variable. An empty one counts as unset.
    pub lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    pub const NONE: Variables<'static> = Variables {
        prefixes: &[],
        rivals: &[],
        lookup: &|_| None,
    };
}

/// Where the options that are set come from: the option itself, or the name of a variable.
#[derive(Debug, Default)]
pub struct Origins(Vec<(String, String)>);

impl Origins {
    /// Where `option` comes from, if it is set.
    pub fn get(&self, option: &str) -> Option<&str> {
        let mut all = self.0.iter();
        all.find_map(|(set, origin)| (set == option).then_some(origin.as_str()))
    }

    fn overrule(&self, option: &str, rivals: &[[&str; 2]]) -> bool {
        let pairs = rivals.iter().filter(|pair| pair.contains(&option));
        let mut options = pairs.flatten().chain([&option]);
        options.any(|option| self.get(option).is_some())
    }
}

/// An option with its value, or a word.
type Argument = (String, Option<String>);

/// Reads the command line of `program`. The options named in `booleans` (with their dashes) need no
/// value and take one only after `=`.
pub fn parse<T: FromArgs>(
    program: &Program,
    booleans: &[&str],
    mut arguments: impl Iterator<Item = OsString>,
) -> Parsed<T> {
    match read(program, booleans, &mut arguments, Dashes::Two, &[]) {
        Ok(arguments) => finish(program.name, &arguments, &Origins::default()),
        Err(instead) => instead,
    }
}

/// Reads the command line of `program` and the variables; says where the options come from.
pub fn parse_rows<T: Rows>(
    program: &Program,
    dashes: Dashes,
    mut arguments: impl Iterator<Item = OsString>,
    variables: &Variables<'_>,
) -> (Parsed<T>, Origins) {
    let booleans = switches(T::ROWS);
    let booleans: Vec<&str> = booleans.iter().map(String::as_str).collect();
    let prefix = variables.prefixes.first().copied();
    let names = T::ROWS.iter().filter_map(|row| row.variables.first());
    let listed: Vec<String> = prefix
        .iter()
        .flat_map(|prefix| names.clone().map(move |name| format!("{prefix}_{name}")))
        .collect();
    match read(program, &booleans, &mut arguments, dashes, &listed) {
        Ok(mut arguments) => {
            let origins = variables.add_to(&mut arguments, T::ROWS);
            (finish(program.name, &arguments, &origins), origins)
        }
        Err(instead) => (instead, Origins::default()),
    }
}

impl Variables<'_> {
    fn add_to(&self, arguments: &mut Vec<Argument>, rows: &[Row]) -> Origins {
        let names = arguments.iter().map(|(name, _)| name.clone());
        let mut origins = Origins(names.map(|name| (name.clone(), name)).collect());
        for prefix in self.prefixes {
            let find = |row: &Row| {
                let mut variables = row.variables.iter().map(|it| format!("{prefix}_{it}"));
                variables.find_map(|variable| {
                    let value = (self.lookup)(&variable).filter(|value| !value.is_empty())?;
                    Some((row.option(), variable, value))
                })
            };
            let is_open = |row: &&Row| !origins.overrule(&row.option(), self.rivals);
            let found: Vec<_> = rows.iter().filter(is_open).filter_map(find).collect();
            for (option, variable, value) in found {
                origins.0.push((option.clone(), variable));
                // In front, because at the end it would be taken for the value of a last option
                // that lacks one.
                arguments.insert(0, (option, Some(value)));
            }
        }
        origins
    }
}

/// Splits the command line into options and words, or says what to do instead of running.
fn read<T: FromArgs>(
    program: &Program,
    booleans: &[&str],
    arguments: &mut dyn Iterator<Item = OsString>,
    dashes: Dashes,
    variables: &[String],
) -> Result<Vec<Argument>, Parsed<T>> {
    let mut read: Vec<Argument> = Vec::new();
    let mut arguments = arguments.map(OsString::into_string);
    while let Some(argument) = arguments.next() {
        let Ok(mut argument) = argument else {
            return Err(Parsed::Usage("an argument is not UTF-8".into()));
        };
        if dashes == Dashes::OneOrTwo && is_long_with_one_dash(&argument) {
            argument.insert(0, '-');
        }
        match argument.as_str() {
            "-h" | "--help" => {
                // A word without dashes is a command, which has its own help.
                let first = read.first().map(|(name, _)| name.as_str());
                let command = first.filter(|word| !word.starts_with('-'));
                let wanted: Vec<&str> = command.into_iter().chain(["--help"]).collect();
                return Err(match T::from_args(&[program.name], &wanted) {
                    Err(exit) if exit.status.is_ok() => {
                        Parsed::Print(program.help(&exit.output, booleans, variables))
                    }
                    Err(exit) => Parsed::Usage(in_our_words(&exit.output)),
                    Ok(_) => unreachable!("it is asked for help"),
                });
            }
            "-V" | "--version" => {
                return Err(Parsed::Print(program.version()));
            }
            // argh would read `help` as --help, and skip `--`.
            "help" | "--" => return Err(Parsed::Usage(format!("unexpected argument: {argument}"))),
            _ => {}
        }
        let parts = argument.split_once('=');
        let argument = match parts.filter(|(name, _)| name.starts_with("--")) {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None if booleans.contains(&argument.as_str()) => (argument, Some("true".to_owned())),
            None if argument.starts_with("--") => {
                // The next argument is the value, whatever it looks like.
                let value = arguments.next().transpose();
                let error = |_| Parsed::Usage(format!("{argument}: the value is not UTF-8"));
                let value = value.map_err(error)?;
                (argument, value)
            }
            None => (argument, None),
        };
        read.push(argument);
    }
    Ok(read)
}

fn finish<T: FromArgs>(program: &str, arguments: &[Argument], origins: &Origins) -> Parsed<T> {
    let words = arguments
        .iter()
        .flat_map(|(name, value)| [Some(name.as_str()), value.as_deref()]);
    let words: Vec<&str> = words.flatten().collect();
    match T::from_args(&[program], &words) {
        Ok(options) => Parsed::Run(options),
        Err(exit) if exit.status.is_ok() => Parsed::Print(exit.output),
        Err(exit) => {
            let refusal = bad_value(&exit.output, &words, origins);
            let refusal = refusal.unwrap_or_else(|| in_our_words(&exit.output));
            Parsed::Usage(match refusal.strip_prefix("unknown option: ") {
                Some(option) => {
                    let command = words.first().filter(|word| !word.starts_with('-'));
                    let known = options_of::<T>(program, command.copied());
                    format!(
                        "{refusal}{}",
                        hint(option, known.iter().map(String::as_str))
                    )
                }
                None => refusal,
            })
        }
    }
}

/// The long options of a command, or of a program without commands, from its help.
fn options_of<T: FromArgs>(program: &str, command: Option<&str>) -> Vec<String> {
    let wanted: Vec<&str> = command.into_iter().chain(["--help"]).collect();
    let help = match T::from_args(&[program], &wanted) {
        Err(exit) if exit.status.is_ok() => exit.output,
        _ => String::new(),
    };
    let lines = help.lines().filter(|line| line.starts_with("  -"));
    let names = lines.flat_map(|line| line.split([' ', ',']));
    let names = names.filter(|word| word.starts_with("--"));
    names.map(str::to_owned).collect()
}

/// Suggests the known name that a mistyped one may be meant to be; empty if none is similar.
pub fn hint<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let with_distance = known.map(|known| (osa_distance(name, known), known));
    let len = name.trim_start_matches('-').chars().count();
    // At most two typing errors, and half of the name.
    let alike = with_distance.filter(|(distance, _)| *distance <= 2 && 2 * distance <= len);
    match alike.min() {
        Some((_, meant)) => format!("; did you mean {meant}?"),
        None => String::new(),
    }
}

/// argh's message about a value, in our form; `None` if it is about something else.
fn bad_value(message: &str, words: &[&str], origins: &Origins) -> Option<String> {
    words.windows(2).find_map(|pair| {
        let (name, value) = (pair[0], pair[1]);
        let about = format!("Error parsing option '{name}' with value '{value}': ");
        let reason = message.strip_prefix(&about)?.trim_end();
        Some(match reason {
            // The value is not the error, and may be secret.
            "duplicate values provided" => format!("{name}: it is given more than once"),
            _ => invalid_value(value, origins.get(name).unwrap_or(name), reason),
        })
    })
}

/// The first variable with one of these prefixes whose value is not UTF-8.
pub fn unreadable_variable(prefixes: &[&str]) -> Option<String> {
    std::env::vars_os().find_map(|(name, value)| {
        let name = name.into_string().ok()?;
        let is_ours = prefixes.iter().any(|prefix| name.starts_with(prefix));
        (is_ours && value.to_str().is_none()).then_some(name)
    })
}

/// Whether this is `-name`, and not `-n`, which is a short option.
fn is_long_with_one_dash(argument: &str) -> bool {
    let name = argument.strip_prefix('-').unwrap_or_default();
    name.chars().count() > 1 && !name.starts_with('-')
}

/// argh's message in one line and in the words of all programs. Its first line says what is wrong,
/// and a list may follow it.
fn in_our_words(message: &str) -> String {
    let mut lines = message.lines().map(str::trim);
    let first = lines.next().unwrap_or_default();
    // argh adds a command of its own, `help`, to the list.
    let list: Vec<&str> = lines.filter(|line| !["", "help"].contains(line)).collect();
    let list = list.join(", ");
    let line = match first.split_once(['\'', ':']) {
        Some(("Unrecognized argument", _)) => {
            // The quoted value may contain a line end.
            let word = message.split_once(": ").map_or("", |(_, word)| word);
            let word = word.strip_suffix('\n').unwrap_or(word);
            match word.len() > 1 && word.starts_with('-') {
                true => format!("unknown option: {word}"),
                false => format!("unexpected argument: {word}"),
            }
        }
        Some(("No value provided for option ", option)) => {
            format!("{} requires a value", option.trim_end_matches("'."))
        }
        Some((
            "Required positional arguments not provided" | "Required options not provided",
            _,
        )) => {
            format!("missing {list}")
        }
        Some(("One of the following subcommands must be present", _)) => {
            format!("missing command: one of {list}")
        }
        _ => message.to_owned(),
    };
    let shown = line.chars().map(|c| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program.
    #[derive(FromArgs, Debug, PartialEq, Eq)]
    struct Options {
        /// a text
        #[argh(option)]
        text: Option<String>,
        /// a switch
        #[argh(option)]
        debug: Option<String>,
    }

    const PROGRAM: Program = Program {
        name: "prog",
        features: &[],
        variables: "",
        manual: "prog(1)",
    };

    fn read(arguments: &[&str]) -> Parsed<Options> {
        parse(&PROGRAM, &["--debug"], arguments.iter().map(OsString::from))
    }

    fn run(text: Option<&str>, debug: Option<&str>) -> Parsed<Options> {
        Parsed::Run(Options {
            text: text.map(str::to_owned),
            debug: debug.map(str::to_owned),
        })
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
        let lenient = |arguments: &[&str]| {
            let mut arguments = arguments.iter().map(OsString::from);
            match super::read(
                &PROGRAM,
                &["--debug"],
                &mut arguments,
                Dashes::OneOrTwo,
                &[],
            ) {
                Ok(arguments) => finish("prog", &arguments, &Origins::default()),
                Err(instead) => instead,
            }
        };
        for text in [&["-text", "a"], &["--text", "a"]] {
            assert_eq!(lenient(text), run(Some("a"), None));
        }
        assert_eq!(
            lenient(&["-text=a", "-debug"]),
            run(Some("a"), Some("true"))
        );
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
        assert_eq!(read(&["--debug"]), run(None, Some("true")));
        assert_eq!(read(&["--debug=no"]), run(None, Some("no")));
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
            (&["word"], "unexpected argument: word"),
            (&["-"], "unexpected argument: -"),
            (&["help"], "unexpected argument: help"),
            (&["-x"], "unknown option: -x"),
            (
                &["--text=a", "--text=b"],
                "--text: it is given more than once",
            ),
            (&["--x\ny", "a"], "unknown option: --x\\ny"),
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
