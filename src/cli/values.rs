//! The values of options: one way to read each kind, and one form of the message about a bad one.

use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Says that `value` does not fit the option or variable `name`; `reason` says what does.
pub fn invalid(value: &str, name: &str, reason: &str) -> String {
    format!(
        "invalid value '{}' for {name}: {reason}",
        value.escape_default()
    )
}

/// A number in decimal digits, or the range that is expected.
pub fn number(text: &str, range: RangeInclusive<u64>) -> Result<u64, String> {
    digits(text)
        .filter(|number| range.contains(number))
        .ok_or_else(|| format!("expected {}-{}", range.start(), range.end()))
}

/// A number of things in memory, or the range that is expected.
pub fn count(text: &str, range: RangeInclusive<u64>) -> Result<usize, String> {
    number(text, range).map(|count| usize::try_from(count).unwrap_or(usize::MAX))
}

/// A number in decimal digits and without a sign, if it fits.
pub fn digits<N: std::str::FromStr>(text: &str) -> Option<N> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}

/// A switch: `yes`, `true` or `1`, or their contraries, in any case.
pub fn yes_or_no(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "yes" | "true" => Ok(true),
        "0" | "no" | "false" => Ok(false),
        _ => Err("expected yes or no".into()),
    }
}

/// A path that is not empty.
pub fn path(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("expected a path".into()),
        text => Ok(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_digits_within_its_range() {
        assert_eq!(number("007", 1..=9), Ok(7));
        for text in [
            "",
            " ",
            "0",
            "10",
            "-1",
            "+1",
            "1.5",
            "0x1",
            "99999999999999999999",
        ] {
            assert_eq!(number(text, 1..=9), Err("expected 1-9".into()), "{text}");
        }
    }

    #[test]
    fn a_switch_is_yes_or_no_in_any_case() {
        for (text, value) in [("YES", true), ("true", true), ("1", true)] {
            assert_eq!(yes_or_no(text), Ok(value));
        }
        for (text, value) in [("no", false), ("False", false), ("0", false)] {
            assert_eq!(yes_or_no(text), Ok(value));
        }
        assert!(yes_or_no("").is_err() && yes_or_no("2").is_err());
    }

    #[test]
    fn a_message_shows_a_bad_value_in_printable_ascii() {
        assert_eq!(
            invalid("ж\n", "--port", "expected 1-9"),
            "invalid value '\\u{436}\\n' for --port: expected 1-9"
        );
    }
}
