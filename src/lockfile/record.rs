//! The content of a lock file: lines of `key=value` (sema-lockfile(5), FORMAT). Pure: no I/O.

use std::fmt::Write;

use super::error::SemaphoreError;
use crate::os::text::digits;

/// The maximum length of a record in bytes. A longer file is not a lock file.
pub(super) const MAX_LEN: usize = 64 * 1024;

/// The maximum length of a tag in a record, in characters.
pub(super) const MAX_TAG_LEN: usize = 10_000;

/// The maximum length of any other text in a record, in characters. Even if all texts have their
/// maximum length, a record is shorter than [`MAX_LEN`].
pub(super) const MAX_TEXT_LEN: usize = 1000;

/// The beginning of the line with the timestamp, which follows the line with the pid.
pub(super) const TIMESTAMP: &str = "timestamp=";

/// The line with which a holder states that it keeps this file locked by flock(2).
pub(super) const LIVE_LINE: &str = "x-live=flock\n";

/// Who holds a lock: the part of a record that all implementations share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockInfo {
    /// The process that holds the lock.
    pub pid: u32,
    /// When the holder last confirmed the lock, in seconds since 1970: at the grant, or at the
    /// latest heartbeat.
    pub timestamp: u64,
    /// The purpose of the lock, if the holder gives one.
    pub tag: Option<String>,
}

impl LockInfo {
    /// Returns the text for a lock file: the lines `pid=`, `timestamp=` and, if there is a tag,
    /// `tag=`.
    pub fn serialize(&self) -> String {
        let tag = self.tag.as_deref().map(|tag| as_written(tag, MAX_TAG_LEN));
        let tag_line = tag.map(|tag| format!("tag={tag}\n")).unwrap_or_default();
        format!(
            "pid={}\n{TIMESTAMP}{}\n{tag_line}",
            self.pid, self.timestamp
        )
    }

    /// Reads a record. Ignores lines with unknown keys. If a key occurs twice, the last line
    /// counts.
    ///
    /// ```
    /// use latchd::lockfile::LockInfo;
    ///
    /// let info = LockInfo::parse("pid=4711\ntimestamp=1700000000\ntag=backup\n")?;
    /// assert_eq!((info.pid, info.tag.as_deref()), (4711, Some("backup")));
    /// assert!(LockInfo::parse("pid=4711\n").is_err());
    /// # Ok::<(), latchd::lockfile::SemaphoreError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::ParseError`] if the pid or the timestamp is missing or is not a number.
    pub fn parse(text: &str) -> Result<LockInfo, SemaphoreError> {
        let record = Record::parse(text.as_bytes());
        let missing = record.pid.map_or("pid", |_| "timestamp");
        let info = record.info();
        info.ok_or_else(|| SemaphoreError::ParseError(format!("missing {missing}")))
    }
}

/// All fields of a lock file. A field that is missing or unreadable is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) pid: Option<u32>,
    pub(super) timestamp: Option<u64>,
    pub(super) tag: Option<String>,
    /// When the lock was granted, in seconds since 1970; a heartbeat does not change it.
    pub(super) since: Option<u64>,
    pub(super) host: Option<String>,
    pub(super) boot: Option<String>,
    pub(super) pid_namespace: Option<String>,
    /// When the process was started, in clock ticks since boot.
    pub(super) start: Option<u64>,
    pub(super) token: Option<String>,
    /// How many slots the pool has, if the file is that of a slot.
    pub(super) slot_count: Option<u32>,
    /// The type and the id of the file system that the file is on, as the holder sees it. Only a
    /// holder that keeps the file locked writes this.
    pub(super) file_system: Option<String>,
    /// Whether the holder keeps the file locked by flock(2) while it is alive.
    pub(super) is_live: bool,
}

impl Record {
    /// Parses all fields. An unreadable field becomes `None`.
    pub(crate) fn parse(content: &[u8]) -> Record {
        let mut record = Record::default();
        // NUL bytes at the end come from a power cut, which may have damaged the rest, too.
        if content.len() > MAX_LEN || content.ends_with(b"\0") {
            return record;
        }
        let text = String::from_utf8_lossy(content);
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        for line in text.lines() {
            let Some((key, value)) = line.split_once('=') else {
                continue;
            };
            let value = value.trim();
            let owned = || Some(value.to_owned());
            // An empty identity counts as unknown.
            let identity = || owned().filter(|value| !value.is_empty());
            match key.trim() {
                "pid" => record.pid = digits(value),
                "timestamp" => record.timestamp = digits(value),
                "tag" => record.tag = owned(),
                "x-since" => record.since = digits(value),
                "x-host" => record.host = identity(),
                "x-boot" => record.boot = identity(),
                "x-pidns" => record.pid_namespace = identity(),
                "x-start" => record.start = digits(value),
                "x-token" => record.token = owned(),
                "x-slots" => record.slot_count = digits(value),
                "x-fs" => record.file_system = identity(),
                "x-live" => record.is_live = value == "flock",
                _ => {}
            }
        }
        record
    }

    /// The text of the record, as this library writes it. The timestamp has at least ten digits, so
    /// that a heartbeat can overwrite it in place even if the clock was near 1970 at the grant.
    pub(crate) fn print(&self) -> String {
        let (pid, timestamp) = (self.pid.unwrap_or(0), self.timestamp.unwrap_or(0));
        let mut text = format!("pid={pid}\n{TIMESTAMP}{timestamp:010}\n");
        let mut line = |key: &str, value: Option<String>| {
            if let Some(value) = value {
                let max_len = match key {
                    "tag" => MAX_TAG_LEN,
                    _ => MAX_TEXT_LEN,
                };
                let value = as_written(&value, max_len);
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{key}={value}");
            }
        };
        line("tag", self.tag.clone());
        line("x-since", self.since.map(|since| since.to_string()));
        line("x-host", self.host.clone());
        line("x-boot", self.boot.clone());
        line("x-pidns", self.pid_namespace.clone());
        line("x-start", self.start.map(|start| start.to_string()));
        line("x-token", self.token.clone());
        line("x-slots", self.slot_count.map(|count| count.to_string()));
        line("x-fs", self.file_system.clone());
        if self.is_live {
            text.push_str(LIVE_LINE);
        }
        text
    }

    /// The fields that all implementations share; `None` if the pid or the timestamp is missing.
    pub(crate) fn info(&self) -> Option<LockInfo> {
        Some(LockInfo {
            pid: self.pid?,
            timestamp: self.timestamp?,
            tag: self.tag.clone(),
        })
    }
}

/// Whether a file with this content is a lock file: empty, a record, or the beginning of a record
/// that has at least the first key. A power cut can leave NUL bytes at the end, which are allowed.
/// Any other file belongs to another program and must not be touched.
pub(crate) fn is_of_lock_file(content: &[u8]) -> bool {
    if content.len() > MAX_LEN {
        return false;
    }
    let len = content.iter().rposition(|byte| *byte != 0);
    let content = &content[..len.map_or(0, |last| last + 1)];
    let text = String::from_utf8_lossy(content);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let mut lines = text
        .split_inclusive('\n')
        .filter(|line| !line.trim().is_empty())
        .peekable();
    let Some(first) = lines.peek() else {
        return content.is_empty();
    };
    if Record::parse(content).info().is_some() {
        return ["pid", "timestamp"].contains(&key_of(first));
    }
    key_of(first) == "pid" && lines.all(is_line_of_record)
}

fn key_of(line: &str) -> &str {
    line.split_once('=').map_or("", |(key, _)| key.trim())
}

/// Whether the line has this key, or is the beginning of a line with this key.
fn is_cut_off_at(line: &str, key: &str) -> bool {
    match line.split_once('=') {
        Some((found, _)) => found.trim() == key,
        None => !line.ends_with('\n') && key.starts_with(line.trim_start()),
    }
}

/// Whether this is a line of a record, or the beginning of such a line.
fn is_line_of_record(line: &str) -> bool {
    let is_number = |line: &str| {
        let value = line.split_once('=').map_or("", |(_, value)| value);
        let digits = value.trim();
        let may_be_empty = !line.ends_with('\n');
        digits.bytes().all(|byte| byte.is_ascii_digit()) && (may_be_empty || !digits.is_empty())
    };
    let is_one_of = |keys: &[&str]| keys.iter().any(|key| is_cut_off_at(line, key));
    is_one_of(&["tag"])
        || key_of(line).starts_with("x-")
        || (!line.ends_with('\n') && line.starts_with("x-"))
        || line == "x"
        || (is_one_of(&["pid", "timestamp"]) && is_number(line))
}

/// Returns `text` as it is written to a file: at most `max_len` characters, with spaces in place of
/// control characters. A line break would begin another line, and an escape sequence could reach a
/// terminal.
fn as_written(text: &str, max_len: usize) -> String {
    let blank = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(max_len).map(blank).collect()
}

/// Returns a token as it will be read back from a file.
pub(super) fn token_as_read(token: &str) -> String {
    as_written(token, MAX_TEXT_LEN).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random numbers that depend on the seed alone.
    struct Dice(u64);

    impl Dice {
        fn throw(&mut self, sides: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from((self.0 >> 16) % sides as u64).expect("fewer than sides")
        }

        fn word(&mut self) -> String {
            const ALPHABET: &str = "aZ0=-\"\\ü\u{1f512}\u{feff}\u{2028}.";
            let alphabet: Vec<char> = ALPHABET.chars().collect();
            let word: String = (0..=self.throw(40))
                .map(|_| alphabet[self.throw(alphabet.len())])
                .collect();
            // Blanks at the ends are not kept.
            word.trim().to_owned()
        }

        fn maybe<T>(&mut self, make: impl FnOnce(&mut Dice) -> T) -> Option<T> {
            (self.throw(3) > 0).then(|| make(self))
        }

        fn number(&mut self) -> u64 {
            match self.throw(4) {
                0 => 0,
                1 => u64::MAX,
                2 => 1_700_000_000 + self.throw(1_000_000) as u64,
                _ => self.throw(1000) as u64,
            }
        }

        fn record(&mut self) -> Record {
            Record {
                pid: Some([0, 1, 4711, u32::MAX][self.throw(4)]),
                timestamp: Some(self.number()),
                tag: self.maybe(Dice::word),
                since: self.maybe(Dice::number),
                host: self.maybe(Dice::word).filter(|text| !text.is_empty()),
                boot: self.maybe(Dice::word).filter(|text| !text.is_empty()),
                pid_namespace: self.maybe(Dice::word).filter(|text| !text.is_empty()),
                start: self.maybe(Dice::number),
                token: self.maybe(Dice::word),
                slot_count: self.maybe(|dice| dice.throw(100) as u32),
                file_system: self.maybe(Dice::word).filter(|text| !text.is_empty()),
                is_live: self.throw(2) == 1,
            }
        }
    }

    fn seeds() -> impl Iterator<Item = u64> {
        1..=3000
    }

    #[test]
    fn a_printed_record_is_read_back_unchanged() {
        for seed in seeds() {
            let record = Dice(seed).record();
            let read = Record::parse(record.print().as_bytes());
            assert_eq!(read, record, "seed {seed}");
            let info = record.info().expect("a pid and a time");
            let read = LockInfo::parse(&info.serialize()).expect("a record");
            assert_eq!(read, info, "seed {seed}");
        }
    }

    #[test]
    fn the_parser_reads_any_bytes() {
        const PIECES: [&[u8]; 16] = [
            b"pid=",
            b"timestamp=",
            b"tag=",
            b"x-live=flock",
            b"x-start=",
            b"=",
            b"\n",
            b"\r\n",
            b"\r",
            b"\0",
            b"\xff\xfe",
            b"\xef\xbb\xbf",
            b"18446744073709551616",
            b"-1",
            b" ",
            b"7",
        ];
        for seed in seeds() {
            let mut dice = Dice(seed);
            let mut bytes = Vec::new();
            for _ in 0..dice.throw(60) {
                bytes.extend_from_slice(PIECES[dice.throw(PIECES.len())]);
            }
            let record = Record::parse(&bytes);
            // Whatever it reads can be written, and says the same to other implementations.
            if let Some(info) = record.info() {
                let again = LockInfo::parse(&info.serialize()).expect("a record");
                assert_eq!(
                    (again.pid, again.timestamp),
                    (info.pid, info.timestamp),
                    "seed {seed}"
                );
            }
        }
    }

    #[test]
    fn the_first_lines_are_those_of_every_implementation() {
        let first = "pid=4711\ntimestamp=1700000000\n";
        for (tag, line) in [(None, ""), (Some("job"), "tag=job\n"), (Some(""), "tag=\n")] {
            let info = LockInfo {
                pid: 4711,
                timestamp: 1_700_000_000,
                tag: tag.map(str::to_owned),
            };
            assert_eq!(info.serialize(), format!("{first}{line}"));
            let record = Record {
                pid: Some(info.pid),
                timestamp: Some(info.timestamp),
                tag: info.tag,
                host: Some("h".into()),
                is_live: true,
                ..Record::default()
            };
            let ours = format!("{first}{line}x-host=h\nx-live=flock\n");
            assert_eq!(record.print(), ours);
        }
    }

    #[test]
    fn all_the_ways_to_write_a_record_are_read() {
        for (text, pid, tag) in [
            ("pid=7\ntimestamp=9\n", 7, None),
            ("pid=7\ntimestamp=9", 7, None),
            ("timestamp=9\npid=7\n", 7, None),
            ("pid=7\r\ntimestamp=9\r\n", 7, None),
            ("\n\n  \npid=7\n\n\t\ntimestamp=9\n\n", 7, None),
            ("  pid=7  \n\ttimestamp=9\t\n", 7, None),
            ("pid = 7\ntimestamp = 9\n", 7, None),
            ("\u{feff}pid=7\ntimestamp=9\n", 7, None),
            ("pid=1\npid=7\ntimestamp=1\ntimestamp=9\n", 7, None),
            ("pid=abc\npid=7\ntimestamp=9\n", 7, None),
            ("pid=0007\ntimestamp=0000000009\n", 7, None),
            (
                "colour=green\npid=7\nnothing\n=\ntimestamp=9\nx-new=1\n",
                7,
                None,
            ),
            ("pid=7\ntag=a\ntimestamp=9\ntag=b\n", 7, Some("b")),
            ("pid=7\ntimestamp=9\ntag=a=b==\n", 7, Some("a=b==")),
            ("pid=7\ntimestamp=9\ntag=\n", 7, Some("")),
            // No process has these.
            ("pid=0\ntimestamp=9\n", 0, None),
            ("pid=2147483648\ntimestamp=9\n", 1 << 31, None),
            ("pid=4294967295\ntimestamp=9\n", u32::MAX, None),
        ] {
            let read = LockInfo::parse(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            let found = (read.pid, read.timestamp, read.tag.as_deref());
            assert_eq!(found, (pid, 9, tag), "{text:?}");
        }
        // The last of several counts, and a lone carriage return ends no line.
        assert!(LockInfo::parse("pid=7\npid=abc\ntimestamp=9\n").is_err());
        assert!(LockInfo::parse("pid=7\rtimestamp=9\r").is_err());
    }

    #[test]
    fn a_field_that_is_no_number_is_missing() {
        for number in [
            "",
            "12x",
            "-1",
            "+5",
            "1.5",
            "0x10",
            "1 2",
            "abc",
            "99999999999",
            "٣",
            "4294967296",
            "1\rtimestamp=5",
        ] {
            let text = format!("pid={number}\ntimestamp=9\n");
            let error = LockInfo::parse(&text).expect_err(&text).to_string();
            assert_eq!(error, "Parse error: missing pid", "{text:?}");
        }
        for number in ["", "12x", "-1", "+5", "1.5", "18446744073709551616"] {
            let text = format!("pid=9\ntimestamp={number}\n");
            let error = LockInfo::parse(&text).expect_err(&text).to_string();
            assert_eq!(error, "Parse error: missing timestamp", "{text:?}");
        }
        assert!(LockInfo::parse("").is_err());
    }

    #[test]
    fn each_beginning_of_a_record_is_that_of_a_lock_file() {
        for seed in seeds().take(300) {
            let text = Dice(seed).record().print();
            for end in [0].into_iter().chain("pid=".len()..=text.len()) {
                let bytes = &text.as_bytes()[..end];
                assert!(is_of_lock_file(bytes), "seed {seed}: {:?}", &text[..end]);
            }
        }
        for text in [
            "\u{feff}pid=7",
            " pid = 7 \r\n\n timestamp = 9\r\n",
            "timestamp=9\npid=7\ncolour=green\nnothing\n",
            "pid=99999999999\n",
            "pid=7\nx-new=1\nx-",
        ] {
            assert!(is_of_lock_file(text.as_bytes()), "{text:?}");
        }
    }

    #[test]
    fn what_a_power_cut_leaves_is_an_unreadable_lock() {
        for len in [1, 2, 100, MAX_LEN] {
            let zeros = vec![0; len];
            assert!(is_of_lock_file(&zeros), "{len}");
            assert_eq!(Record::parse(&zeros), Record::default(), "{len}");
        }
        assert!(!is_of_lock_file(&vec![0; MAX_LEN + 1]));
        for seed in seeds().take(100) {
            let text = Dice(seed).record().print();
            for end in "pid=".len()..=text.len() {
                let bytes = [&text.as_bytes()[..end], &[0; 7]].concat();
                assert!(is_of_lock_file(&bytes), "seed {seed}: {:?}", &text[..end]);
                assert_eq!(Record::parse(&bytes), Record::default(), "seed {seed}");
            }
        }
    }

    #[test]
    fn files_of_other_programs_are_no_lock_files() {
        let long = format!("pid=7\ntimestamp=9\n{}", "x".repeat(MAX_LEN));
        for text in [
            "#!/bin/sh\npid=7\ntimestamp=9\n",
            "# a comment\n",
            "7\n",
            "pidfile=/run/x\n",
            "pid\n",
            "pid=\n",
            "pid=abc",
            "pid=-1\ntimestamp=1\n",
            "pid=/run/x.pid\n",
            "pid=7\nuser=root\n",
            "pid=7\ntime\n",
            "pid=7\ntimestamp=now\n",
            "timestamp=1\n",
            "tag=x\n",
            "colour=green\npid=7\ntimestamp=9\n",
            "p",
            "pid",
            " ",
            "\n",
            "\n \r\n",
            "\u{feff}",
            "\0\n",
            "\0pid=7\n",
            "pid=7\n\0\0user=root\n",
            "pid\0\0",
            "#!/bin/sh\n\0",
            "x",
            &long,
        ] {
            assert!(!is_of_lock_file(text.as_bytes()), "{text:?}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_spoil_their_own_line_only() {
        let record = Record::parse(b"pid=7\ntimestamp=9\ntag=a\xff\xfeb\n\xc3(=\n");
        assert_eq!(record.info().map(|info| info.pid), Some(7));
        assert_eq!(record.tag.as_deref(), Some("a\u{fffd}\u{fffd}b"));
    }

    #[test]
    fn a_record_is_read_up_to_64_kib_and_not_beyond() {
        let head = "pid=7\ntimestamp=9\n";
        let longest = format!("{head}{}", "x".repeat(MAX_LEN - head.len()));
        assert!(LockInfo::parse(&longest).is_ok());
        assert!(LockInfo::parse(&format!("{longest}x")).is_err());
    }

    #[test]
    fn no_tag_adds_a_line_or_reaches_the_terminal() {
        let tag = "a\nx-live=flock\rb\x1b[31m\0\x7f\u{9b}c\td";
        let info = LockInfo {
            pid: 7,
            timestamp: 9,
            tag: Some(tag.into()),
        };
        let text = info.serialize();
        assert_eq!(
            text,
            "pid=7\ntimestamp=9\ntag=a x-live=flock b [31m   c d\n"
        );
        assert!(!Record::parse(text.as_bytes()).is_live);
    }

    #[test]
    fn a_tag_of_ten_thousand_characters_survives_and_no_longer_one() {
        for c in ['x', 'ü', '\u{1f512}'] {
            let longest: String = std::iter::repeat_n(c, MAX_TAG_LEN).collect();
            for tag in [longest.clone(), format!("{longest}{c}")] {
                let text = LockInfo::with_tag(tag).serialize();
                let read = LockInfo::parse(&text).expect("a record");
                assert_eq!(read.tag.as_deref(), Some(longest.as_str()));
            }
        }
    }

    #[test]
    fn the_longest_record_of_ours_can_be_read() {
        let longest = || Some("\u{1f512}".repeat(2 * MAX_TAG_LEN));
        let record = Record {
            pid: Some(u32::MAX),
            timestamp: Some(u64::MAX),
            tag: longest(),
            since: Some(u64::MAX),
            host: Some("h".repeat(64)),
            boot: Some("b".repeat(36)),
            pid_namespace: Some("4026531836".into()),
            start: Some(u64::MAX),
            token: longest(),
            slot_count: Some(u32::MAX),
            file_system: longest(),
            is_live: true,
        };
        let text = record.print();
        let read = Record::parse(text.as_bytes());
        assert!(read.is_live, "{} bytes", text.len());
        let tag_len = read.tag.map(|tag| tag.chars().count());
        assert_eq!(tag_len, Some(MAX_TAG_LEN));
    }
}
