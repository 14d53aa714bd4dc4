//! The words of a command line as users type them: joined short options, quotes, and the options
//! and commands of other programs.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;

use strsim::osa_distance;

use crate::os::text::is_unseen;

/// Words that other programs know, and what to write instead. A line names our programs, or a
/// command that lacks what other commands of its program have. A word that ends in `=` stands for
/// all words that begin with it.
const FOREIGN: &str = include_str!("foreign.txt");

/// The lines of foreign words for one of our programs, or for a command of it, such as `latch run`.
/// Each line has its words and the advice.
pub fn foreign(ours: &str) -> impl Iterator<Item = (&'static str, &'static str)> + '_ {
    FOREIGN.lines().filter_map(move |line| {
        let (programs, rest) = line.split_once(": ")?;
        let is_ours = programs.split(", ").any(|program| program == ours);
        rest.split_once(" | ").filter(|_| is_ours)
    })
}

/// What to write instead of an option or a command of another program. `command` is the command
/// that the word follows, or "". `is_short` tells our short options from others: in joined ones,
/// such as `-nx`, the first that is not ours is looked up.
pub fn advice(
    program: &str,
    is_short: impl Fn(char) -> bool,
    command: &str,
    word: &str,
) -> Option<&'static str> {
    let exact = |ours: &str, word: &str| {
        let name = word.split('=').next().unwrap_or_default();
        let is_it = |known: &str| known == name || known.ends_with('=') && word.starts_with(known);
        let found = foreign(ours).find(|(words, _)| words.split(' ').any(is_it));
        found.map(|(_, advice)| advice)
    };
    let of_command = format!("{program} {command}");
    let best = |word: &str| exact(&of_command, word).or_else(|| exact(program, word));
    let joined = || {
        // A number at the end is the value of the last one.
        let shorts = word
            .strip_prefix('-')?
            .trim_end_matches(|c: char| c.is_ascii_digit());
        let others = shorts.chars().filter(|short| !is_short(*short));
        let advices: Option<Vec<_>> = others.map(|short| best(&format!("-{short}"))).collect();
        advices?.first().copied()
    };
    best(word).or_else(joined)
}

/// How to write a command line that begins with a lock instead of a command, as those of flock(1)
/// do: `latch run my-job -- echo hi`. `None` if no command follows the lock. `ours` are the words
/// before `--`, and `rest` those after it.
pub fn with_run(program: &str, ours: &[OsString], rest: &[OsString]) -> Option<String> {
    /// A longer command is not repeated.
    const MAX_LEN: usize = 80;
    let (lock, more) = ours.split_first()?;
    let dashes = OsString::from("--");
    let dashes = (!more.is_empty() && !rest.is_empty()).then_some(&dashes);
    let words = more.iter().chain(dashes).chain(rest);
    let words: Vec<String> = words.map(|word| quoted(&word.to_string_lossy())).collect();
    if words.iter().all(|word| word.starts_with('-')) {
        return None;
    }
    let lock = quoted(&lock.to_string_lossy());
    let command = words.join(" ");
    Some(if words[0].starts_with('-') {
        // These may be options of the program or of the command.
        format!("{program} run {lock} [OPTIONS] -- COMMAND")
    } else if command.len() > MAX_LEN {
        format!("{program} run {lock} -- COMMAND")
    } else {
        format!("{program} run {lock} -- {command}")
    })
}

/// Splits `--name=value`. A short option has no attached value.
pub fn split_value(argument: &OsStr) -> (&[u8], Option<&OsStr>) {
    let bytes = argument.as_bytes();
    match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) if bytes.starts_with(b"--") => {
            (&bytes[..at], Some(OsStr::from_bytes(&bytes[at + 1..])))
        }
        _ => (bytes, None),
    }
}

/// A suggestion of the known name that is most similar to a mistyped name; empty if none is similar
/// enough.
pub fn hint<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let name = name.to_ascii_lowercase();
    let with_distance = known.map(|known| (osa_distance(&name, known), known));
    let len = name.trim_start_matches('-').chars().count();
    // A similar name differs by at most two typing errors, and by at most half of the mistyped
    // name.
    let alike = with_distance.filter(|(distance, _)| *distance <= 2 && 2 * distance <= len);
    match alike.min() {
        Some((_, meant)) => format!("; did you mean {meant}?"),
        None => String::new(),
    }
}

/// Quotes a word for the shell, if necessary. Invisible characters become escapes in `$'...'`,
/// which bash, zsh and the shells of POSIX.1-2024 know.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@%+=,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    if !word.contains(is_unseen) {
        return format!("'{}'", word.replace('\'', "'\\''"));
    }
    let mut text = "$'".to_owned();
    for c in word.chars() {
        if is_unseen(c) {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Three octal digits, which no digit after them can continue.
                let _ = write!(text, "\\{byte:03o}");
            }
        } else {
            let is_special = matches!(c, '\'' | '\\');
            text.extend(is_special.then_some('\\'));
            text.push(c);
        }
    }
    text + "'"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_with_a_command_is_what_run_takes() {
        let with_run = |ours: &str, rest: &str| {
            let words = |text: &str| -> Vec<OsString> {
                text.split(' ')
                    .filter(|it| !it.is_empty())
                    .map(OsString::from)
                    .collect()
            };
            with_run("latch", &words(ours), &words(rest))
        };
        for (ours, rest, expected) in [
            ("job echo hi", "", Some("latch run job -- echo hi")),
            ("job", "echo hi", Some("latch run job -- echo hi")),
            ("job echo", "hi", Some("latch run job -- echo -- hi")),
            (
                "job -w 5 echo",
                "",
                Some("latch run job [OPTIONS] -- COMMAND"),
            ),
            ("it's ls", "", Some("latch run 'it'\\''s' -- ls")),
            ("job --help", "", None),
            ("job", "", None),
            ("", "", None),
        ] {
            assert_eq!(
                with_run(ours, rest).as_deref(),
                expected,
                "{ours} -- {rest}"
            );
        }
        let long = format!("job echo {}", "x".repeat(80));
        assert_eq!(
            with_run(&long, "").as_deref(),
            Some("latch run job -- COMMAND")
        );
    }

    #[test]
    fn a_word_is_quoted_for_the_shell() {
        for (word, quoted_word) in [
            ("a-b.c", "a-b.c"),
            ("", "''"),
            ("two words", "'two words'"),
            ("it's", "'it'\\''s'"),
            ("a\u{1b}[2J'\\1", "$'a\\033[2J\\'\\\\1'"),
            ("\u{202e}x", "$'\\342\\200\\256x'"),
        ] {
            assert_eq!(quoted(word), quoted_word);
        }
    }

    #[test]
    fn the_first_foreign_option_of_joined_ones_is_answered() {
        const EXCLUSIVE: Option<&str> = Some("a lock is exclusive unless --shared is given");
        const JSON: Option<&str> = Some("use --json");
        let latch = |command, word| advice("latch", |short| short == 'n', command, word);
        for (word, expected) in [
            ("-x", EXCLUSIVE),
            ("-nx", EXCLUSIVE),
            ("-xn", EXCLUSIVE),
            ("--exclusive=1", EXCLUSIVE),
            ("-n=3", Some("use --of COUNT")),
            ("-timeout=5s", Some("use --timeout TIME")),
            // Not all of its letters are known.
            ("-xyz", None),
            ("-n", None),
            ("word", None),
            ("-j", JSON),
            ("-j4", JSON),
        ] {
            assert_eq!(latch("stats", word), expected, "{word}");
        }
        for word in ["-j", "-j4", "-nj"] {
            let jobs = Some("use --of COUNT for so many at a time");
            assert_eq!(latch("run", word), jobs, "{word}");
        }
    }
}
