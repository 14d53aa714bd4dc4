//! The output of `sema`: text for people, and JSON.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::lockfile::{Alive, Busy, LockDetails, Obstacle};
use crate::os::file_locks::locker_of;
use crate::os::output;
use crate::os::text::{rough_time, rough_time_left, without_hidden, Plain};
use crate::shared::cli::failure::Failure;

/// What a file is that does not name a process.
const NAMES_NO_HOLDER: &str = "the file names no holder, like one that flock(1) leaves";

/// A JSON object that keeps the order of its keys.
#[derive(Debug, Default)]
pub(super) struct Object(Vec<(&'static str, Field)>);

#[derive(Debug)]
enum Field {
    Value(Value),
    Object(Object),
}

impl Object {
    pub(super) fn new() -> Object {
        Object::default()
    }

    /// Adds a key.
    #[must_use]
    pub(super) fn with(mut self, key: &'static str, value: impl Into<Value>) -> Object {
        self.0.push((key, Field::Value(value.into())));
        self
    }

    /// Adds a key if there is a value.
    #[must_use]
    pub(super) fn with_any(self, key: &'static str, value: Option<impl Into<Value>>) -> Object {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    /// Adds a key with an object or null.
    #[must_use]
    pub(super) fn with_object(mut self, key: &'static str, object: Option<Object>) -> Object {
        let member = object.map_or(Field::Value(Value::Null), Field::Object);
        self.0.push((key, member));
        self
    }

    /// Formats the object as JSON on one line, without a line feed at the end.
    pub(super) fn compact(&self) -> String {
        self.json(":", "", "")
    }

    /// Formats the object as JSON with one key per line, indented by two spaces per level, without
    /// a line feed at the end.
    pub(super) fn pretty(&self) -> String {
        self.json(": ", "\n", "  ")
    }

    fn json(&self, colon: &str, line_break: &str, indent: &str) -> String {
        let inside = format!("{line_break}{indent}");
        let members = self.0.iter().map(|(key, member)| {
            let value = match member {
                Field::Value(value) => without_hidden(&value.to_string()),
                Field::Object(object) => object.json(colon, &inside, indent),
            };
            format!("{}{colon}{value}", Value::from(*key))
        });
        let members: Vec<String> = members.collect();
        let separator = format!(",{inside}");
        format!("{{{inside}{}{line_break}}}", members.join(&separator))
    }

    /// Formats the object as lines of `key: value` for people. Strings are escaped, without quotes.
    pub(super) fn lines(&self) -> String {
        let lines = self.0.iter().map(|(key, member)| match member {
            Field::Value(Value::String(text)) => format!("{key}: {}\n", shown(text)),
            Field::Value(value) => format!("{key}: {value}\n"),
            Field::Object(object) => format!("{key}: {}\n", shown(&object.compact())),
        });
        lines.collect()
    }
}

/// Describes a held lock as `{"locked":true,"pid":N,"since":T}`. If the file does not name the
/// process and the time, the object has an `error`, and a missing number is 0. If something besides
/// a holder prevents the grant, the object has a `note`.
pub(super) fn held(busy: &Busy) -> Object {
    let details = &busy.details;
    Object::new()
        .with("locked", true)
        .with("pid", details.pid.unwrap_or(0))
        .with("since", details.since.unwrap_or(0))
        .with_any("error", unreadable(details))
        .with_any("note", note(busy))
}

/// The note for a file that does not name a process and a time.
fn unreadable(details: &LockDetails) -> Option<&'static str> {
    (!details.is_readable()).then_some("contents unreadable")
}

/// Describes a status as JSON. `path` is given only if the lock has slots.
pub(super) fn status_object(path: Option<&Path>, status: Option<&Busy>) -> Object {
    let object = Object::new()
        .with_any("path", path.map(shown_path))
        .with("locked", status.is_some());
    let Some(busy) = status else {
        return object;
    };
    let details = &busy.details;
    object
        .with_any("error", unreadable(details))
        .with("pid", details.pid)
        .with("timestamp", details.timestamp)
        .with("tag", details.tag.clone())
        .with("age", details.age)
        .with("alive", alive(details.alive))
        .with("stale", details.is_stale)
        .with("token", details.token.clone())
        .with_any("note", note(busy))
}

/// Describes a status as lines of `key: value`. `path` is given only if the lock has slots.
pub(super) fn status_text(path: Option<&Path>, status: Option<&Busy>) -> String {
    let object = Object::new()
        .with_any("path", path.map(shown_path))
        .with("locked", status.is_some());
    let object = match status.map(|busy| (busy, &busy.details)) {
        None => object,
        Some((busy, details)) => object
            .with_any("error", unreadable(details))
            .with_any("pid", details.pid)
            .with_any("timestamp", details.timestamp)
            .with_any("tag", details.tag.clone())
            .with_any("age", details.age.map(|age| format!("{age}s")))
            .with("alive", alive(details.alive))
            .with("stale", if details.is_stale { "yes" } else { "no" })
            .with_any("note", note(busy)),
    };
    object.lines()
}

/// Describes the holder of a lock in indented lines.
pub(super) fn holder_text(path: &Path, busy: &Busy) -> String {
    let details = &busy.details;
    let is_unknown = details.alive == Alive::Unknown;
    let unknown = "it cannot be told from here whether the holder is alive";
    Object::new()
        .with_any("  Holder PID", details.pid)
        .with("  Path", shown_path(path))
        .with_any("  Tag", details.tag.clone())
        .with_any("  Age", details.age.map(|age| format!("{age}s")))
        .with_any("  Note", note(busy).or(is_unknown.then(|| unknown.into())))
        .lines()
}

/// Describes in one line who holds a lock, or why it is not free.
pub(super) fn holder_line(busy: &Busy) -> String {
    let details = &busy.details;
    let (None, Some(pid)) = (note(busy), details.pid) else {
        return note(busy).unwrap_or_default();
    };
    let mut text = format!("held by pid {pid}");
    if let Some(host) = details.host.as_deref() {
        text += &format!(" on {}", shown(host));
    }
    if let Some(tag) = details.tag.as_deref().filter(|tag| !tag.is_empty()) {
        text += &format!(" ({})", shown(tag));
    }
    if let Some(seconds) = details.age {
        text += &format!(" for {}", rough_time(Duration::from_secs(seconds)));
    }
    text
}

/// What is known besides the record of a holder that may be alive: that the process has ended, who
/// has the file locked, and when the lock is free.
fn note(busy: &Busy) -> Option<String> {
    let details = &busy.details;
    let why = match busy.obstacle {
        Obstacle::NotStale | Obstacle::Locked => None,
        Obstacle::Unreadable => Some("this user may not read the file"),
        Obstacle::Contended => Some("another process changed it at the same time"),
        other => other.hopeless_reason(),
    };
    if why.is_some() || (details.alive == Alive::Yes && !details.has_ended) {
        return why.map(str::to_owned);
    }
    let unseen = (busy.obstacle == Obstacle::Locked).then(|| "another process".into());
    let locker = details.file.and_then(locker_of).or(unseen);
    let left = details.stale_in.filter(|left| !left.is_zero());
    let free = left.map_or_else(String::new, |left| {
        format!("; free in {}", rough_time_left(left))
    });
    Some(match (details.pid, locker) {
        (Some(pid), None) if details.has_ended => format!("pid {pid} has ended{free}"),
        (Some(pid), Some(locker)) if details.has_ended => {
            format!("pid {pid} has ended, but {locker} has the file locked")
        }
        (_, Some(locker)) => format!("{locker} has the file locked"),
        (Some(_), None) => unreadable(details).map(|why| format!("{why}{free}"))?,
        (None, None) => format!("{NAMES_NO_HOLDER}{free}; remove it if no program uses it"),
    })
}

pub(super) fn shown_path(path: &Path) -> String {
    Plain(path.as_os_str().as_bytes()).to_string()
}

fn shown(text: &str) -> String {
    Plain(text.as_bytes()).to_string()
}

fn alive(alive: Alive) -> &'static str {
    match alive {
        Alive::Yes => "yes",
        Alive::No => "no",
        Alive::Unknown => "unknown",
    }
}

/// Prints on stdout.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    output::print_if_read(text).map_err(Failure::unprintable)
}

/// Prints on stderr. If that fails, the exit status still reports the failure.
pub(super) fn complain(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_json_and_keeps_the_order_of_its_keys() {
        let object = Object::new()
            .with("z", 1)
            .with("a", "say \"hi\"\n\u{1b}")
            .with("b", "\u{9b}ü\u{202e}")
            .with("n", Option::<u32>::None)
            .with_any("left", Option::<u32>::None);
        let text = object.compact();
        assert_eq!(
            text,
            r#"{"z":1,"a":"say \"hi\"\n\u001b","b":"\u009bü\u202e","n":null}"#
        );
        let back: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(back["a"], "say \"hi\"\n\u{1b}");
    }

    #[test]
    fn the_pretty_form_is_indented_by_two_spaces() {
        let inner = Object::new().with("b", true).with("a", "x");
        let object = Object::new()
            .with("z", 1)
            .with_object("inner", Some(inner))
            .with_object("none", None);
        let text = object.pretty();
        assert_eq!(
            text,
            concat!(
                "{\n  \"z\": 1,\n  \"inner\": {\n    \"b\": true,\n    \"a\": \"x\"\n  },\n",
                "  \"none\": null\n}"
            )
        );
        let back: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(back["inner"]["b"], true);
    }
}
