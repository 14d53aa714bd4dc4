//! Parsers for the values of options. Each kind of value is parsed in one way, and all messages
//! about bad values have the same form.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

// These are in `text`, because the client library also uses them, to read environment variables.
pub use crate::os::text::{digits, yes_or_no};

pub fn number<N>(text: &str, range: RangeInclusive<N>) -> Result<N, String>
where
    N: FromStr + PartialOrd + Display,
{
    digits(text)
        .filter(|number| range.contains(number))
        .ok_or_else(|| format!("expected {}-{}", range.start(), range.end()))
}

/// The units of times, the shortest first, each with its nanoseconds.
const UNITS: [(&str, u128); 6] = [
    ("ms", 1_000_000),
    ("s", SECOND),
    ("m", 60 * SECOND),
    ("h", 3600 * SECOND),
    ("d", 24 * 3600 * SECOND),
    ("w", 7 * 24 * 3600 * SECOND),
];

const SECOND: u128 = 1_000_000_000;

/// Parses a time in seconds, or numbers with units from the longest to the shortest: `90`, `1.5s`,
/// `250ms`, `1m30s`, `2w`.
pub fn duration(text: &str) -> Option<Duration> {
    let (mut rest, mut total, mut larger) = (text, 0_u128, u128::MAX);
    loop {
        let (number, after) = split_before(rest, |c| c.is_ascii_alphabetic());
        let (unit, after) = split_before(after, |c| !c.is_ascii_alphabetic());
        let nanoseconds = match UNITS.iter().find(|(name, _)| *name == unit) {
            Some((_, nanoseconds)) => *nanoseconds,
            // A number without a unit must be alone, because in `1m30` the unit of 30 is not clear.
            None if unit.is_empty() && number == text => SECOND,
            None => return None,
        };
        if nanoseconds >= larger {
            return None;
        }
        total += multiple(number, nanoseconds)?;
        if after.is_empty() {
            break;
        }
        (rest, larger) = (after, nanoseconds);
    }
    let seconds = u64::try_from(total / SECOND).ok()?;
    let rest = u32::try_from(total % SECOND).ok()?;
    Some(Duration::new(seconds, rest))
}

fn split_before(text: &str, is_end: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(is_end).unwrap_or(text.len()))
}

/// Multiplies a number, which may have a fraction, by the nanoseconds of its unit.
fn multiple(number: &str, nanoseconds: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let whole = u128::from(digits::<u64>(whole)?) * nanoseconds;
    // Further digits are below a nanosecond.
    let fraction = &fraction[..fraction.len().min(9)];
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    Some(whole + digits::<u128>(fraction)? * nanoseconds / scale)
}

pub fn time(text: &str) -> Result<Duration, String> {
    let expected = || format!("expected a time, such as 90, 1m30s or 500ms ({})", units());
    duration(text).ok_or_else(expected)
}

/// The units as a message names them.
fn units() -> String {
    let names = UNITS.map(|(name, _)| name);
    format!("units: {}", names.join(", "))
}

/// Parses a time in whole seconds. The error states the expected range.
pub fn seconds(text: &str, range: RangeInclusive<u64>) -> Result<Duration, String> {
    let (least, most) = (range.start(), range.end());
    duration(text)
        .filter(|time| time.subsec_nanos() == 0 && range.contains(&time.as_secs()))
        .ok_or_else(|| {
            let units = units();
            format!("expected {least}-{most} in whole seconds, such as 90 or 1m30s ({units})")
        })
}

/// Whether it is no failure that another holder has the lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BusyOk {
    #[default]
    Never,
    Always,
    /// Only while the other has held it for less than this.
    Below(Duration),
}

impl BusyOk {
    /// Parses what follows `--busy-ok=`.
    pub fn parse(text: &str) -> Result<BusyOk, String> {
        // A number is a time, although it could also mean yes or no.
        let below = time(text).map(BusyOk::Below);
        below.or_else(|error| match yes_or_no(text) {
            Ok(true) => Ok(BusyOk::Always),
            Ok(false) => Ok(BusyOk::Never),
            Err(_) => Err(error),
        })
    }

    /// Whether it is no failure that the lock has been held for this long. A holder whose age is
    /// unknown may have held the lock for any time.
    pub fn allows(self, age: Option<Duration>) -> bool {
        match self {
            BusyOk::Never => false,
            BusyOk::Always => true,
            BusyOk::Below(limit) => age.is_some_and(|age| age < limit),
        }
    }
}

/// Parses the permissions of a file, in octal.
pub fn mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777 && !text.starts_with('+'))
        .ok_or_else(|| "expected an octal mode, 0-0777".into())
}

/// Parses one of several words. The error lists them.
pub fn choice<T, const N: usize>(text: &str, all: [(&str, T); N]) -> Result<T, String> {
    let words: Vec<&str> = all.iter().map(|(word, _)| *word).collect();
    let chosen = all.into_iter().find(|(word, _)| *word == text);
    chosen.map(|(_, value)| value).ok_or_else(|| {
        let (last, others) = words.split_last().expect("there are words to choose from");
        format!("expected {} or {last}", others.join(", "))
    })
}

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
    fn a_time_without_a_unit_is_seconds() {
        for (text, milliseconds) in [
            ("0", 0),
            ("90", 90_000),
            ("1.5", 1500),
            ("1.5s", 1500),
            ("250ms", 250),
            ("0.25s", 250),
            ("2m", 120_000),
            ("1.5h", 5_400_000),
            ("1m30s", 90_000),
            ("1h0m1.5s250ms", 3_601_750),
            ("1d", 86_400_000),
            ("2w", 1_209_600_000),
            ("1w2d3h", 788_400_000),
            ("0.0009999999999999s", 0),
        ] {
            let time = duration(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(time.as_millis(), milliseconds, "{text}");
        }
        let longest = Duration::from_secs(u64::MAX);
        assert_eq!(duration("18446744073709551615"), Some(longest));
    }

    #[test]
    fn malformed_times_are_refused() {
        for text in [
            "",
            " ",
            "-1",
            "+1",
            "1 s",
            "s",
            ".5",
            "1.",
            "1.s",
            "1..2",
            "1.2.3",
            "1y",
            "1d1w",
            "1m30",
            "30s1m",
            "1s1s",
            "1ms1s",
            "1m 30s",
            "1S",
            "1e3",
            "0x1",
            "abc",
            "inf",
            "18446744073709551616",
            "18446744073709551615m",
            "١",
        ] {
            assert_eq!(duration(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_fraction_of_a_second_is_no_whole_number() {
        for (text, count) in [("1m30s", 90), ("0.5m", 30), ("2000ms", 2), ("2m", 120)] {
            assert_eq!(seconds(text, 1..=120), Ok(Duration::from_secs(count)));
        }
        let expected = "expected 1-120 in whole seconds, such as 90 or 1m30s \
                        (units: ms, s, m, h, d, w)";
        for text in ["1.5", "500ms", "x", "", "0", "2m1s"] {
            assert_eq!(seconds(text, 1..=120), Err(expected.into()), "{text:?}");
        }
    }
}
