//! Escapes untrusted text for messages and logs, words messages about values and files, and reads
//! simple values. Pure: no I/O and no clock.

mod utc;

use core::net::Ipv6Addr;
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

pub use utc::Utc;

/// Shows untrusted bytes: printable ASCII as it is, other bytes as `\xNN`. A value is in double
/// quotes, with its quotes and backslashes escaped, if it is empty or contains a space, a quote, a
/// backslash or `=`: it could be misread next to other values.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(pub &'a [u8]);

impl<'a> Escaped<'a> {
    /// Shows a path on one line.
    pub fn path(path: &'a Path) -> Escaped<'a> {
        Escaped(path.as_os_str().as_bytes())
    }
}

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = if is_ambiguous(self.0) { "\"" } else { "" };
        f.write_str(quote)?;
        for byte in self.0 {
            match byte {
                b'"' | b'\\' => write!(f, "\\{}", char::from(*byte))?,
                b' '..=b'~' => write!(f, "{}", char::from(*byte))?,
                _ => write!(f, "\\x{byte:02x}")?,
            }
        }
        f.write_str(quote)
    }
}

/// Shows untrusted bytes at the end of a line: UTF-8 as it is, except for [invisible
/// characters](is_unseen). These, and bytes that are not UTF-8, are shown as `\xNN`.
#[derive(Clone, Copy, Debug)]
pub struct Plain<'a>(pub &'a [u8]);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                if is_unseen(c) {
                    escape(c.encode_utf8(&mut [0; 4]).as_bytes(), f)?;
                } else {
                    write!(f, "{c}")?;
                }
            }
            escape(chunk.invalid(), f)?;
        }
        Ok(())
    }
}

/// Shows untrusted text to people, next to other text: as [`Plain`] does, but in double quotes
/// where [`Escaped`] would use them.
#[derive(Clone, Copy, Debug)]
pub struct Readable<'a>(pub &'a str);

impl fmt::Display for Readable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !is_ambiguous(self.0.as_bytes()) {
            return Plain(self.0.as_bytes()).fmt(f);
        }
        f.write_str("\"")?;
        for part in self.0.split_inclusive(['"', '\\']) {
            let plain = part.strip_suffix(['"', '\\']).unwrap_or(part);
            Plain(plain.as_bytes()).fmt(f)?;
            if let Some(special) = part[plain.len()..].chars().next() {
                write!(f, "\\{special}")?;
            }
        }
        f.write_str("\"")
    }
}

/// Whether a value could be misread next to other values.
fn is_ambiguous(value: &[u8]) -> bool {
    let is_special = |byte: &u8| matches!(*byte, b' ' | b'"' | b'\'' | b'\\' | b'=');
    value.is_empty() || value.iter().any(is_special)
}

/// The number of columns that a text takes on a terminal, or a little more.
pub fn columns(text: &str) -> usize {
    text.chars().map(columns_of).sum()
}

/// The number of columns that a character takes on a terminal: two for the wide characters of East
/// Asia and for pictures, none for marks that go on the character before.
fn columns_of(c: char) -> usize {
    const WIDE: [RangeInclusive<char>; 9] = [
        '\u{1100}'..='\u{115f}',
        '\u{2e80}'..='\u{a4cf}',
        '\u{ac00}'..='\u{d7a3}',
        '\u{f900}'..='\u{faff}',
        '\u{fe30}'..='\u{fe6f}',
        '\u{ff00}'..='\u{ff60}',
        '\u{ffe0}'..='\u{ffe6}',
        '\u{1f300}'..='\u{1faff}',
        '\u{20000}'..='\u{3fffd}',
    ];
    match c {
        '\u{300}'..='\u{36f}' => 0,
        _ if WIDE.iter().any(|range| range.contains(&c)) => 2,
        _ => 1,
    }
}

/// As much of the beginning of a text as fits into this many columns.
pub fn beginning(text: &str, width: usize) -> &str {
    let mut taken = 0;
    let fits = |(_, c): &(usize, char)| {
        taken += columns_of(*c);
        taken <= width
    };
    let last = text.char_indices().take_while(fits).last();
    &text[..last.map_or(0, |(at, c)| at + c.len_utf8())]
}

/// The text of a file or a variable without the white space around it, and without the byte order
/// mark that an editor may have put before it.
pub fn bare(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text).trim()
}

/// Whether a character is invisible, ends a line, or changes the direction of writing. Such
/// characters are control characters, characters that Unicode declares ignorable by default, line
/// and paragraph separators, and annotation marks.
pub fn is_unseen(c: char) -> bool {
    const UNSEEN: [RangeInclusive<char>; 17] = [
        '\u{ad}'..='\u{ad}',
        '\u{34f}'..='\u{34f}',
        '\u{61c}'..='\u{61c}',
        '\u{115f}'..='\u{1160}',
        '\u{17b4}'..='\u{17b5}',
        '\u{180b}'..='\u{180f}',
        '\u{200b}'..='\u{200f}',
        '\u{2028}'..='\u{202e}',
        '\u{2060}'..='\u{206f}',
        '\u{3164}'..='\u{3164}',
        '\u{fe00}'..='\u{fe0f}',
        '\u{feff}'..='\u{feff}',
        '\u{ffa0}'..='\u{ffa0}',
        '\u{fff0}'..='\u{fffb}',
        '\u{1bca0}'..='\u{1bca3}',
        '\u{1d173}'..='\u{1d17a}',
        '\u{e0000}'..='\u{e0fff}',
    ];
    c.is_control() || !c.is_ascii() && UNSEEN.iter().any(|range| range.contains(&c))
}

fn escape(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))
}

/// A character as an ASCII escape in JSON: `\uNNNN`, or a pair of such escapes.
#[derive(Clone, Copy, Debug)]
pub struct JsonEscape(pub char);

impl fmt::Display for JsonEscape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for unit in self.0.encode_utf16(&mut [0; 2]) {
            write!(f, "\\u{unit:04x}")?;
        }
        Ok(())
    }
}

/// The same JSON, with an escape in place of each character that [`Plain`] escapes. `json` must be
/// on one line: then such characters can occur only in its strings.
pub fn without_hidden(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if is_unseen(c) {
            escaped += &JsonEscape(c).to_string()
        } else {
            escaped.push(c)
        }
    }
    escaped
}

/// The message for a `value` that is invalid for the option or variable `name`. `reason` says what
/// is valid.
pub fn invalid_value(value: &str, name: &str, reason: &str) -> String {
    format!(
        "invalid value '{}' for {name}: {reason}",
        value.escape_default()
    )
}

/// The message for a file that cannot be used. `what` is the purpose of the file.
pub fn unusable_file(what: &str, file: &Path, why: impl fmt::Display) -> String {
    format!("cannot use the {what} file {}: {why}", Escaped::path(file))
}

/// Reads `HOST:PORT`. The host is a name, an IPv4 address, or an IPv6 address in brackets. The port
/// must not be 0.
pub fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = split_port(text)?;
    let is_v6 = |bare: &str| bare.parse::<Ipv6Addr>().is_ok();
    let is_host = in_brackets(host).map_or_else(|| is_host_name(host), is_v6);
    (is_host && port > 0).then_some((host, port))
}

/// Splits `HOST:PORT`. A host with a colon must be in brackets.
pub fn split_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let is_clear = !host.contains(':') || in_brackets(host).is_some();
    is_clear.then(|| digits(port))?.map(|port| (host, port))
}

/// Whether the text can be the name of a host, or its IPv4 address.
pub fn is_host_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=253).contains(&text.len()) && text.chars().all(is_part)
}

/// Whether the text is an IPv6 address, with or without a zone.
pub fn is_ipv6(text: &str) -> bool {
    let (ip, zone) = text.split_once('%').unwrap_or((text, "lo"));
    let is_zone = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '[' | ']' | '%');
    ip.parse::<Ipv6Addr>().is_ok() && !zone.is_empty() && zone.chars().all(is_zone)
}

/// The text in square brackets, such as an IPv6 address; `None` if there are no brackets.
pub fn in_brackets(text: &str) -> Option<&str> {
    text.strip_prefix('[')?.strip_suffix(']')
}

/// Reads a number in decimal digits without a sign; `None` if it does not fit the type.
pub fn digits<N: FromStr>(text: &str) -> Option<N> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}

/// Reads a number of exactly 16 hexadecimal digits.
pub fn hex(text: &str) -> Option<u64> {
    let is_number = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_number.then(|| u64::from_str_radix(text, 16).ok())?
}

/// Reads a switch: `yes`, `true`, `1`, `no`, `false` or `0`, in upper or lower case.
pub fn yes_or_no(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "yes" | "true" => Ok(true),
        "0" | "no" | "false" => Ok(false),
        _ => Err("expected yes or no".into()),
    }
}

/// The units of the times in messages, the largest first, each with its seconds.
const TIME_UNITS: [(u64, &str); 3] = [(86_400, "d"), (3_600, "h"), (60, "m")];

/// Formats an age or the rest of a lease, in the largest unit of which there are at least two.
pub fn rough_time(time: Duration) -> String {
    in_largest_unit(rounded_seconds(time), |_| true)
}

/// Formats as [`rough_time`] does what is left of a time, with a begun second as a whole one, and
/// rounded to the nearest unit: of 4 h, a second later, 4 h are left.
pub fn rough_time_left(left: Duration) -> String {
    let begun = u64::from(left.subsec_nanos() > 0);
    let seconds = left.as_secs().saturating_add(begun);
    let unit = TIME_UNITS.iter().find(|(unit, _)| seconds >= 2 * unit);
    let half = unit.map_or(0, |(unit, _)| unit / 2);
    in_largest_unit(seconds.saturating_add(half), |_| true)
}

/// An age or the rest of a lease, rounded to the nearest second.
pub fn rounded_seconds(time: Duration) -> u64 {
    time.saturating_add(Duration::from_millis(500)).as_secs()
}

/// Formats a time limit of whole seconds as [`rough_time`] does, but only in units that divide it.
pub fn exact_time(limit: Duration) -> String {
    let seconds = limit.as_secs();
    in_largest_unit(seconds, |unit| seconds % unit == 0)
}

/// Formats a time in the largest unit that fits, and of which there are at least two.
fn in_largest_unit(seconds: u64, fits: impl Fn(u64) -> bool) -> String {
    let mut units = TIME_UNITS.iter();
    match units.find(|(unit, _)| seconds >= 2 * unit && fits(*unit)) {
        Some((unit, name)) => format!("{} {name}", seconds / unit),
        None => format!("{seconds} s"),
    }
}

/// The system's reason for a failure, as the end of a sentence: `permission denied`.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error ").next().unwrap_or_default();
    let mut text = text.to_owned();
    if let Some(first) = text.get_mut(..1) {
        first.make_ascii_lowercase();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_shows_a_bad_value_in_printable_ascii() {
        assert_eq!(
            invalid_value("ж\n", "--port", "expected 1-9"),
            "invalid value '\\u{436}\\n' for --port: expected 1-9"
        );
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
    fn an_age_is_in_the_largest_unit_of_which_there_are_two() {
        for (millis, text) in [
            (499, "0 s"),
            (119_499, "119 s"),
            (119_500, "2 m"),
            (7_199_000, "119 m"),
            (7_199_900, "2 h"),
            (172_799_000, "47 h"),
            (172_800_000, "2 d"),
        ] {
            assert_eq!(rough_time(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn what_is_left_is_not_rounded_down() {
        for (seconds, text) in [
            (14_399, "4 h"),
            (12_599, "3 h"),
            (7_199, "2 h"),
            (7_169, "119 m"),
            (149, "2 m"),
            (119, "119 s"),
            (172_799, "2 d"),
        ] {
            assert_eq!(rough_time_left(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_time_limit_is_exact() {
        for (seconds, text) in [
            (1, "1 s"),
            (60, "60 s"),
            (90, "90 s"),
            (120, "2 m"),
            (150, "150 s"),
            (5400, "90 m"),
            (7200, "2 h"),
            (172_800, "2 d"),
        ] {
            assert_eq!(exact_time(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn json_hides_nothing_and_means_the_same() {
        let json = "\"a\u{9b}\u{7f}ü\u{202e}\u{1f512}\u{85}\u{e0061}\"";
        assert_eq!(without_hidden("\u{1b}[2J"), "\\u001b[2J");
        let shown = without_hidden(json);
        let expected = "\"a\\u009b\\u007fü\\u202e\u{1f512}\\u0085\\udb40\\udc61\"";
        assert_eq!(shown, expected);
        let read = |text: &str| serde_json::from_str::<String>(text).expect("JSON");
        assert_eq!(read(&shown), read(json));
    }

    #[test]
    fn nothing_but_printable_ascii_comes_out() {
        for (bytes, shown) in [
            (&b"job-1"[..], "job-1"),
            (b"", "\"\""),
            (b"a b", "\"a b\""),
            (b"a=b", "\"a=b\""),
            (b"\x1b[31m\0", "\\x1b[31m\\x00"),
            (b"say \"hi\\\"", "\"say \\\"hi\\\\\\\"\""),
            ("ж".as_bytes(), "\\xd0\\xb6"),
        ] {
            assert_eq!(Escaped(bytes).to_string(), shown);
        }
        let every: Vec<u8> = (0..=255).collect();
        assert!(Escaped(&every)
            .to_string()
            .bytes()
            .all(|byte| (b' '..=b'~').contains(&byte)));
    }

    #[test]
    fn what_people_read_stays_and_is_quoted_where_it_is_ambiguous() {
        for (text, shown) in [
            ("ключ-1", "ключ-1"),
            ("", "\"\""),
            ("рабочий 7", "\"рабочий 7\""),
            ("say \"hi\\\"", "\"say \\\"hi\\\\\\\"\""),
            ("x\u{202e}gnp", "x\\xe2\\x80\\xaegnp"),
            ("\u{1b}[2J a", "\"\\x1b[2J a\""),
        ] {
            assert_eq!(Readable(text).to_string(), shown);
        }
    }

    #[test]
    fn a_text_is_as_wide_as_on_a_terminal() {
        for (text, width) in [
            ("abc", 3),
            ("ключ", 4),
            ("e\u{301}", 1),
            ("鍵1", 3),
            ("\u{1f512}", 2),
        ] {
            assert_eq!(columns(text), width, "{text}");
        }
        assert_eq!(beginning("鍵鍵", 3), "鍵");
        assert_eq!(beginning("e\u{301}a", 1), "e\u{301}");
        assert_eq!(beginning("ab", 0), "");
        assert_eq!(beginning("ab", 9), "ab");
    }

    #[test]
    fn plain_text_stays_and_controls_do_not() {
        for (bytes, shown) in [
            ("x\u{202e}gnp".as_bytes(), "x\\xe2\\x80\\xaegnp"),
            (&b"build 7 = \"x\""[..], "build 7 = \"x\""),
            ("ж".as_bytes(), "ж"),
            (b"\x1b[31m\0\n\x7f", "\\x1b[31m\\x00\\x0a\\x7f"),
            ("\u{9b}31m".as_bytes(), "\\xc2\\x9b31m"),
            (b"a\xff\xc3", "a\\xff\\xc3"),
        ] {
            assert_eq!(Plain(bytes).to_string(), shown);
        }
    }

    #[test]
    fn a_character_that_is_not_seen_is_escaped() {
        for c in "\u{ad}\u{34f}\u{115f}\u{180e}\u{200d}\u{3164}\u{fe0f}\u{ffa0}\u{e007f}".chars() {
            let bytes = c.to_string().into_bytes();
            let shown = Plain(&bytes).to_string();
            assert!(
                shown.starts_with("\\x") && shown.is_ascii(),
                "{c:?}: {shown}"
            );
        }
        // Blanks of other widths are seen.
        assert_eq!(
            Plain("\u{a0}\u{3000}é".as_bytes()).to_string(),
            "\u{a0}\u{3000}é"
        );
    }

    #[test]
    fn a_reason_ends_a_sentence() {
        assert_eq!(
            reason(&io::Error::from_raw_os_error(13)),
            "permission denied"
        );
        assert_eq!(reason(&io::Error::other("no such luck")), "no such luck");
    }
}
