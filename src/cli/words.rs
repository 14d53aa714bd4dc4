//! The words of a command line as users type them: joined short options, and the options and
//! commands of other programs.

/// Words that other programs know, and what to write instead. A word that ends in `=` stands for
/// all words that begin with it.
pub type Foreign = (&'static [&'static str], &'static str);

/// What to write instead of an option or a command of another program. `is_short` tells our short
/// options from others: in joined ones, such as `-nx`, the first that is not ours is looked up.
pub fn advice(
    table: &[Foreign],
    is_short: impl Fn(char) -> bool,
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
    let joined = || {
        let shorts = word.strip_prefix('-')?.chars();
        let others = shorts.filter(|short| !is_short(*short));
        let advices: Option<Vec<_>> = others.map(|short| exact(&format!("-{short}"))).collect();
        advices?.first().copied()
    };
    exact(word).or_else(joined)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_foreign_option_of_joined_ones_is_answered() {
        let table: [Foreign; 3] = [
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
        ] {
            assert_eq!(advice(&table, |short| short == 'n', word), expected);
        }
    }
}
