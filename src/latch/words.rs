//! The words of the command line as users type them: joined short options, other spellings, and the
//! options and commands of other programs.

use std::ffi::OsString;

use crate::cli::values::time;

use super::options::{switches, ALL_ROWS};

/// Other spellings of options.
const ALIASES: [(&str, &str); 1] = [("--of", "--limit")];

/// Words that other programs know, with what to write instead.
const FOREIGN: [(&[&str], &str); 26] = [
    (&["--nowait", "--nb", "--nonblocking"], "use --nonblock"),
    (&["--wait", "-timeout"], "use --timeout TIME"),
    (&["--conflict-exit-code"], "use --busy-status STATUS"),
    (&["-s"], "use --shared"),
    (
        &["-x", "-e", "--exclusive"],
        "a lock is exclusive unless --shared is given",
    ),
    (
        &["-u", "--unlock"],
        "the lock is released when the command ends; see latch release",
    ),
    (
        &["-o", "--close", "-F", "--no-fork"],
        "the command does not get the lock's descriptor",
    ),
    (&["-c", "--command"], "write -- sh -c COMMAND"),
    (&["-n="], "use --of COUNT"),
    (
        &["-child-exit-code"],
        "the exit status is that of the command",
    ),
    (&["--ttl"], "use --lease TIME"),
    (
        &["--endpoints", "--host", "-p", "--port"],
        "use --server HOST:PORT",
    ),
    (&["--signal"], "use --on-lost SIGNAL"),
    (&["-k"], "use --kill-after TIME"),
    (&["--who", "--why"], "use --tag TEXT"),
    (&["--list"], "use latch stats"),
    (&["--weight"], "use --slots COUNT with --of COUNT"),
    (&["--min", "--interval"], "use --at-least TIME"),
    (&["--once"], "use --nonblock --busy-ok, and --at-least TIME"),
    (&["lock"], "use latch run, hold or acquire"),
    (&["unlock"], "use latch release"),
    (&["try"], "use latch run KEY --nonblock"),
    (&["show"], "use latch status or latch stats KEY"),
    (&["keys", "list", "ls", "who"], "use latch stats"),
    (&["top"], "use latch stats --watch"),
    (&["with"], "use latch run"),
];

/// What to write instead of an option or a command of another program.
pub(super) fn advice(word: &str) -> Option<&'static str> {
    let name = word.split('=').next().unwrap_or_default();
    let is_it = |known: &&str| *known == name || known.ends_with('=') && word.starts_with(*known);
    let mut all = FOREIGN.iter();
    let found = all.find(|(words, _)| words.iter().any(is_it));
    found.map(|(_, advice)| *advice)
}

/// The command line in the form that [`arguments::parse`] takes: joined short options are apart,
/// and other spellings are replaced. The value of an option stays as it is.
pub(super) fn normal_form(words: Vec<OsString>) -> Vec<OsString> {
    let switches = switches();
    let shorts = || ALL_ROWS.into_iter().flatten().filter_map(|row| row.short);
    let is_switch = |name: &str| switches.iter().any(|switch| switch == name);
    let mut normal: Vec<OsString> = Vec::with_capacity(words.len());
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        let Some(text) = word.to_str() else {
            normal.push(word);
            continue;
        };
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        if text.starts_with("--") {
            let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
            let name = alias.map_or(name, |(_, own)| own);
            let is_interval = |next: &OsString| {
                let next = next.to_str();
                name == "--watch" && next.is_some_and(|next| time(next).is_ok())
            };
            match value {
                Some(value) => normal.push(format!("{name}={value}").into()),
                None if is_switch(name) => match words.next_if(is_interval) {
                    Some(interval) => {
                        let interval = interval.to_string_lossy();
                        normal.push(format!("{name}={interval}").into());
                    }
                    None => normal.push(name.into()),
                },
                None => {
                    normal.push(name.into());
                    normal.extend(words.next());
                }
            }
        } else {
            match apart(
                text,
                |short| shorts().any(|known| known == short),
                is_switch,
            ) {
                Some(parts) => {
                    let last = parts.last().cloned().unwrap_or_default();
                    let takes_next = last.len() == 2 && last.starts_with('-') && !is_switch(&last);
                    normal.extend(parts.into_iter().map(OsString::from));
                    normal.extend(words.next_if(|_| takes_next));
                }
                None => normal.push(word),
            }
        }
    }
    normal
}

/// The short options that are joined in a word, and perhaps the value of the last one: `-nE1` is
/// `-n`, `-E` and `1`. `None` if the word is something else.
fn apart(
    word: &str,
    is_short: impl Fn(char) -> bool,
    is_switch: impl Fn(&str) -> bool,
) -> Option<Vec<String>> {
    let mut rest = word.strip_prefix('-')?;
    let mut parts = Vec::new();
    while let Some(short) = rest.chars().next() {
        if !is_short(short) {
            return None;
        }
        let option = format!("-{short}");
        rest = &rest[short.len_utf8()..];
        let takes_rest = !is_switch(&option);
        parts.push(option);
        if takes_rest && !rest.is_empty() {
            parts.push(rest.to_owned());
            break;
        }
    }
    (!parts.is_empty()).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::arguments;

    fn normal(words: &str) -> String {
        let words = words.split(' ').map(OsString::from).collect();
        let normal = normal_form(words).into_iter();
        let normal: Vec<String> = normal.filter_map(|word| word.into_string().ok()).collect();
        normal.join(" ")
    }

    #[test]
    fn joined_short_options_are_taken_apart() {
        for (given, meant) in [
            ("run k -w5", "run k -w 5"),
            ("run k -nE1 -q", "run k -n -E 1 -q"),
            ("run k -nE 1 -q", "run k -n -E 1 -q"),
            ("run k -w -n", "run k -w -n"),
            ("run k --tag -w5 -w5", "run k --tag -w5 -w 5"),
            ("run k -n=3", "run k -n=3"),
            ("run k -timeout=5s", "run k -timeout=5s"),
            ("run k --of 3 --of=3", "run k --limit 3 --limit=3"),
            ("stats --watch 5 k", "stats --watch=5 k"),
            ("stats --watch k", "stats --watch k"),
        ] {
            assert_eq!(normal(given), meant, "{given}");
        }
    }

    #[test]
    fn advice_is_about_words_that_are_not_ours() {
        let own = arguments::names(ALL_ROWS.into_iter().flatten());
        for (words, advice) in FOREIGN {
            for word in words {
                assert!(!own.iter().any(|known| known == word), "{word} is ours");
            }
            // Each option that it names is ours.
            for option in advice.split([' ', ',']).filter(|it| it.starts_with("--")) {
                let is_ours = option == "--" || option == "--of";
                assert!(
                    is_ours || own.iter().any(|known| known == option),
                    "{option}"
                );
            }
        }
        assert_eq!(advice("--ttl=5"), Some("use --lease TIME"));
        assert_eq!(advice("-n=3"), Some("use --of COUNT"));
        assert_eq!(advice("--nonblock"), None);
    }
}
