//! What stands in a lock file: lines of `key=value` (sema-lockfile(5), FORMAT). Pure.

use std::fmt::Write;
use std::process;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::error::SemaphoreError;

/// No more than this is read of a file, in bytes. What is longer is no record.
pub(super) const MAX_LEN: usize = 64 * 1024;

/// The longest tag that is written, in characters.
pub(super) const MAX_TAG_LEN: usize = 10_000;

/// What stands before the timestamp's digits, after the line of the pid.
pub(super) const TIMESTAMP: &str = "timestamp=";

/// The line that says: whoever has this file locked by flock(2) holds the lock, and nobody else does.
pub(super) const LIVE_LINE: &str = "x-live=flock\n";

/// Who holds a lock: the part of a record that all implementations share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockInfo {
    /// The process that holds it.
    pub pid: u32,
    /// Since when, in seconds since 1970; a heartbeat moves it on.
    pub timestamp: u64,
    /// What it is held for, if the holder says.
    pub tag: Option<String>,
}

impl LockInfo {
    /// This process, now, without a tag.
    pub fn new() -> LockInfo {
        LockInfo {
            pid: process::id(),
            timestamp: seconds_since_1970(SystemTime::now()),
            tag: None,
        }
    }

    /// The same with a tag. Control characters become blanks when it is written, and it is cut to
    /// 10,000 characters.
    #[must_use]
    pub fn with_tag(mut self, tag: impl Into<String>) -> LockInfo {
        self.tag = Some(tag.into());
        self
    }

    /// The record as it stands in a file: `pid=`, `timestamp=` and, if there is a tag, `tag=`.
    pub fn serialize(&self) -> String {
        let record = Record {
            pid: Some(self.pid),
            timestamp: Some(self.timestamp),
            tag: self.tag.clone(),
            ..Record::default()
        };
        record.print_with(&self.timestamp.to_string())
    }

    /// Reads a record. Lines that it does not know are passed over; of a key that stands there twice
    /// the last counts.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::ParseError`] if the pid or the timestamp is missing or is not a number.
    pub fn parse(text: &str) -> Result<LockInfo, SemaphoreError> {
        let record = Record::parse(text.as_bytes());
        let missing = |what: &str| SemaphoreError::ParseError(format!("missing {what}"));
        Ok(LockInfo {
            pid: record.pid.ok_or_else(|| missing("pid"))?,
            timestamp: record.timestamp.ok_or_else(|| missing("timestamp"))?,
            tag: record.tag,
        })
    }

    /// Whether it is older than `timeout`. Whether its holder still runs is another question.
    pub fn is_stale(&self, timeout: Duration) -> bool {
        let now = seconds_since_1970(SystemTime::now());
        Duration::from_secs(now.saturating_sub(self.timestamp)) > timeout
    }
}

impl Default for LockInfo {
    fn default() -> LockInfo {
        LockInfo::new()
    }
}

/// All that a lock file can say. What is not there, or cannot be read, is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) pid: Option<u32>,
    pub(super) timestamp: Option<u64>,
    pub(super) tag: Option<String>,
    /// When the lock was granted, in seconds since 1970; no heartbeat moves that.
    pub(super) since: Option<u64>,
    pub(super) host: Option<String>,
    pub(super) boot: Option<String>,
    pub(super) pid_namespace: Option<String>,
    /// When the process was started, in clock ticks since boot.
    pub(super) start: Option<u64>,
    pub(super) token: Option<String>,
    /// The holder has the file locked for as long as it lives.
    pub(super) is_live: bool,
}

impl Record {
    /// Reads whatever can be read of a file's content.
    pub(super) fn parse(content: &[u8]) -> Record {
        let mut record = Record::default();
        if content.len() > MAX_LEN {
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
            match key.trim() {
                "pid" => record.pid = number(value),
                "timestamp" => record.timestamp = number(value),
                "tag" => record.tag = owned(),
                "x-since" => record.since = number(value),
                "x-host" => record.host = owned(),
                "x-boot" => record.boot = owned(),
                "x-pidns" => record.pid_namespace = owned(),
                "x-start" => record.start = number(value),
                "x-token" => record.token = owned(),
                "x-live" => record.is_live = value == "flock",
                _ => {}
            }
        }
        record
    }

    /// The record as it stands in a file of ours. The timestamp has at least ten digits, so that a
    /// heartbeat can write another in its place even if the clock was at 1970 at first.
    pub(super) fn print(&self) -> String {
        self.print_with(&format!("{:010}", self.timestamp.unwrap_or(0)))
    }

    fn print_with(&self, timestamp: &str) -> String {
        let mut text = format!("pid={}\n{TIMESTAMP}{timestamp}\n", self.pid.unwrap_or(0));
        let mut line = |key: &str, value: Option<String>| {
            if let Some(value) = value {
                let value: String = value
                    .chars()
                    .take(MAX_TAG_LEN)
                    .map(blank_if_control)
                    .collect();
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
        if self.is_live {
            text.push_str(LIVE_LINE);
        }
        text
    }

    /// The part that all implementations share, if it is all there.
    pub(super) fn info(&self) -> Option<LockInfo> {
        Some(LockInfo {
            pid: self.pid?,
            timestamp: self.timestamp?,
            tag: self.tag.clone(),
        })
    }
}

/// Seconds since 1970; 0 before that.
pub(super) fn seconds_since_1970(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Decimal digits and nothing else; no sign, which Rust's own parser would take.
fn number<N: std::str::FromStr>(text: &str) -> Option<N> {
    let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_digits)
}

/// A line break would begin another line, an escape sequence would reach somebody's terminal.
fn blank_if_control(c: char) -> char {
    if c.is_control() {
        ' '
    } else {
        c
    }
}
