//! What the options of all programs have in common, and argh does not know: `--name=value`, `-h`,
//! `-V`, boolean options with an optional value, and exit status 2.

use std::ffi::OsString;

use argh::FromArgs;

/// The last line of argh's help, and what stands there instead.
const ARGH_HELP: &str = "  --help, help      display usage information";
const OUR_HELP: &str =
    "  -h, --help        print this and exit\n  -V, --version     print the version and exit";

/// What argh's usage has before the operands. It means nothing here, and [`parse`] refuses it.
const ARGH_DASHES: &str = " [--] ";

/// What a command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    /// To run with these options.
    Run(T),
    /// To print this text on stdout and do nothing else.
    Print(String),
    /// Something that cannot be done, for the reason given in one line.
    Usage(String),
}

/// How a long option begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dashes {
    Two,
    OneOrTwo,
}

/// Reads the command line of `program`. The options named in `booleans` (with their dashes) need no
/// value and take one only after `=`.
pub fn parse<T: FromArgs>(
    program: &str,
    booleans: &[&str],
    arguments: impl Iterator<Item = OsString>,
) -> Parsed<T> {
    parse_dashed(program, booleans, arguments, Dashes::Two)
}

/// The same, and takes `-name` for `--name`, as programs written in Go do.
pub fn parse_single_dashes<T: FromArgs>(
    program: &str,
    booleans: &[&str],
    arguments: impl Iterator<Item = OsString>,
) -> Parsed<T> {
    parse_dashed(program, booleans, arguments, Dashes::OneOrTwo)
}

fn parse_dashed<T: FromArgs>(
    program: &str,
    booleans: &[&str],
    arguments: impl Iterator<Item = OsString>,
    dashes: Dashes,
) -> Parsed<T> {
    let mut normal = Vec::new();
    let mut arguments = arguments.map(OsString::into_string);
    while let Some(argument) = arguments.next() {
        let Ok(mut argument) = argument else {
            return Parsed::Usage("an argument is not UTF-8".into());
        };
        if dashes == Dashes::OneOrTwo && is_long_with_one_dash(&argument) {
            argument.insert(0, '-');
        }
        match argument.as_str() {
            "-h" | "--help" => return help::<T>(program, booleans, normal.first()),
            "-V" | "--version" => {
                return Parsed::Print(format!("{program} {}\n", env!("CARGO_PKG_VERSION")));
            }
            // argh would take this for --help.
            "help" => return Parsed::Usage("Unrecognized argument: help".into()),
            _ => {}
        }
        if let Some((name, value)) = split_value(&argument) {
            normal.extend([name.to_owned(), value.to_owned()]);
        } else if booleans.contains(&argument.as_str()) {
            normal.extend([argument, "true".to_owned()]);
        } else if argument == "--" {
            return Parsed::Usage("Unrecognized argument: --".into());
        } else if argument.starts_with("--") {
            // Its value, whatever that looks like.
            match arguments.next() {
                Some(Ok(value)) => normal.extend([argument, value]),
                Some(Err(_)) => {
                    return Parsed::Usage(format!("{argument}: the value is not UTF-8"))
                }
                None => normal.push(argument),
            }
        } else {
            normal.push(argument);
        }
    }
    let normal: Vec<&str> = normal.iter().map(String::as_str).collect();
    match T::from_args(&[program], &normal) {
        Ok(options) => Parsed::Run(options),
        Err(exit) if exit.status.is_ok() => Parsed::Print(exit.output),
        Err(exit) => Parsed::Usage(one_line(&exit.output)),
    }
}

/// The first variable with one of these prefixes whose value is not UTF-8.
pub fn unreadable_variable(prefixes: &[&str]) -> Option<String> {
    std::env::vars_os().find_map(|(name, value)| {
        let name = name.into_string().ok()?;
        let is_ours = prefixes.iter().any(|prefix| name.starts_with(prefix));
        (is_ours && value.to_str().is_none()).then_some(name)
    })
}

/// argh's own text, with what [`parse`] adds to argh.
fn help<T: FromArgs>(program: &str, booleans: &[&str], first: Option<&String>) -> Parsed<T> {
    // A word without dashes is a command of its own, which has its own help.
    let command = first
        .map(String::as_str)
        .filter(|word| !word.starts_with('-'));
    let arguments: Vec<&str> = command.into_iter().chain(["--help"]).collect();
    let text = match T::from_args(&[program], &arguments) {
        Err(exit) => exit.output,
        Ok(_) => String::new(),
    };
    let mut text = text.replace(ARGH_HELP, OUR_HELP).replace(ARGH_DASHES, " ");
    for boolean in booleans {
        text = text.replace(
            &format!("[{boolean} <bool>]"),
            &format!("[{boolean}[=<bool>]]"),
        );
    }
    Parsed::Print(text)
}

/// Whether this is `-name`, and not `-n`, which is a short option.
fn is_long_with_one_dash(argument: &str) -> bool {
    let name = argument.strip_prefix('-').unwrap_or_default();
    name.chars().count() > 1 && !name.starts_with('-')
}

/// Splits `--name=value`.
fn split_value(argument: &str) -> Option<(&str, &str)> {
    argument.strip_prefix("--")?;
    argument.split_once('=')
}

/// argh's messages run over several lines; the first says what is wrong, and may have a list after it.
fn one_line(message: &str) -> String {
    let mut lines = message
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    let mut line = lines.next().unwrap_or("bad usage").to_owned();
    if line.ends_with(':') {
        // argh's own command is none of ours.
        for word in lines.filter(|word| *word != "help") {
            line += " ";
            line += word;
        }
    }
    line.chars()
        .flat_map(|c| {
            if c.is_control() {
                c.escape_default().collect()
            } else {
                vec![c]
            }
        })
        .collect()
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

    fn read(arguments: &[&str]) -> Parsed<Options> {
        parse("prog", &["--debug"], arguments.iter().map(OsString::from))
    }

    fn run(text: Option<&str>, debug: Option<&str>) -> Parsed<Options> {
        Parsed::Run(Options {
            text: text.map(str::to_owned),
            debug: debug.map(str::to_owned),
        })
    }

    #[test]
    fn a_value_stands_in_the_next_argument_or_behind_an_equals_sign() {
        assert_eq!(read(&["--text", "a"]), run(Some("a"), None));
        assert_eq!(read(&["--text=a=b"]), run(Some("a=b"), None));
        assert_eq!(read(&["--text="]), run(Some(""), None));
        assert_eq!(read(&["--text", "--debug"]), run(Some("--debug"), None));
        assert_eq!(read(&["--text", "-h"]), run(Some("-h"), None));
    }

    #[test]
    fn a_single_dash_will_do_where_it_is_allowed() {
        let lenient = |arguments: &[&str]| {
            parse_single_dashes("prog", &["--debug"], arguments.iter().map(OsString::from))
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
    fn bad_usage_is_said_in_one_line() {
        for arguments in [
            &["--nonsense"][..],
            &["--text"],
            &["word"],
            &["-x"],
            &["--text=a", "--text=b"],
            &["--x\ny"],
        ] {
            let Parsed::Usage(message) = read(arguments) else {
                panic!("{arguments:?} was accepted");
            };
            assert!(
                !message.is_empty() && !message.contains('\n'),
                "{message:?}"
            );
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
