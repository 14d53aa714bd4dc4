//! The words of a command line as users type them: joined short options, quotes, and the options
//! and commands of other programs.

use std::ffi::OsString;
use std::fmt::Write as _;

use strsim::osa_distance;

use crate::text::is_unseen;

/// Words that other programs know, and what to write instead. A word that ends in `=` stands for
/// all words that begin with it. `acquire --for` is an option of another command that `acquire`
/// lacks.
pub type Foreign = (&'static [&'static str], &'static str);

// Words of servers for what both of ours do in the same way.
pub const DETACH: &[&str] = &["--daemon", "--daemonize", "--detach", "--background", "-d"];
pub const FOREGROUND: &[&str] = &[
    "--foreground",
    "--nodaemon",
    "--no-daemon",
    "-f",
    "-F",
    "-n",
];
pub const PID_FILE: &[&str] = &["--pidfile", "--pid-file"];
pub const CONFIG_FILE: &[&str] = &["--config", "--config-file", "--conf", "-c"];
pub const VERBOSE: Foreign = (
    &["--verbose", "--log-level", "--loglevel", "-v"],
    "use --debug, or set RUST_LOG",
);
pub const QUIET: Foreign = (&["--quiet", "-q"], "set RUST_LOG=warn");
pub const SYSLOG: Foreign = (&["--syslog"], "use --log syslog");

/// What to write instead of an option or a command of another program. `command` is the command
/// that the word follows, or "". `is_short` tells our short options from others: in joined ones,
/// such as `-nx`, the first that is not ours is looked up.
pub fn advice(
    table: &[Foreign],
    is_short: impl Fn(char) -> bool,
    command: &str,
    word: &str,
) -> Option<&'static str> {
    let exact = |word: &str| {
        let name = word.split('=').next().unwrap_or_default();
        let is_it =
            |known: &&str| *known == name || known.ends_with('=') && word.starts_with(*known);
        let mut all = table.iter();
        let found = all.find(|(words, _)| words.iter().any(is_it));
        found.map(|(_, advice)| *advice)
    };
    let best = |word: &str| exact(&format!("{command} {word}")).or_else(|| exact(word));
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

/// The short options that are joined in a word, and perhaps the value of the last one: `-nE1` is
/// `-n`, `-E` and `1`. `None` if the word is something else. `takes_value` is asked about our short
/// options, without their dash.
pub fn apart(
    word: &str,
    is_short: impl Fn(char) -> bool,
    takes_value: impl Fn(char) -> bool,
) -> Option<Vec<String>> {
    let mut rest = word.strip_prefix('-')?;
    let mut parts = Vec::new();
    while let Some(short) = rest.chars().next() {
        if !is_short(short) {
            return None;
        }
        parts.push(format!("-{short}"));
        rest = &rest[short.len_utf8()..];
        if takes_value(short) && !rest.is_empty() {
            parts.push(rest.to_owned());
            break;
        }
    }
    (!parts.is_empty()).then_some(parts)
}

/// A suggestion of the known name that is most similar to a mistyped name; empty if none is similar
/// enough.
pub fn hint<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let name = name.to_lowercase();
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
        let table: [Foreign; 5] = [
            (&["run -j"], "jobs"),
            (&["-j"], "json"),
            (&["-x", "--exclusive"], "x"),
            (&["-n="], "count"),
            (&["-timeout"], "time"),
        ];
        for (word, expected) in [
            ("-x", Some("x")),
            ("-nx", Some("x")),
            ("-xn", Some("x")),
            ("--exclusive=1", Some("x")),
            ("-n=3", Some("count")),
            ("-timeout=5s", Some("time")),
            // Not all of its letters are known.
            ("-xyz", None),
            ("-n", None),
            ("word", None),
            ("-j", Some("json")),
            ("-j4", Some("json")),
        ] {
            assert_eq!(
                advice(&table, |short| short == 'n', "stats", word),
                expected
            );
        }
        for word in ["-j", "-j4", "-nj"] {
            assert_eq!(
                advice(&table, |short| short == 'n', "run", word),
                Some("jobs")
            );
        }
    }
}
