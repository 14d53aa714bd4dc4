//! The output of `sema`: text for people, and JSON.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::cli::failure::Failure;
use crate::cli::output;
use crate::lockfile::{Alive, Busy, LockDetails, Obstacle, Record, Semaphore, Status};
use crate::text::{rough_time, without_hidden, Plain};

/// What a file is that names neither a process nor a time, and what to do about it.
const NAMES_NO_HOLDER: &str =
    "the file names no holder, like one that flock(1) leaves; remove it if no program uses it";

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
        .with("since", details.timestamp.unwrap_or(0))
        .with_any("error", unreadable(details))
        .with_any("note", note(busy))
}

/// The note for a file that does not name a process and a time.
fn unreadable(details: &LockDetails) -> Option<&'static str> {
    (!details.is_readable()).then_some("contents unreadable")
}

/// Describes a status as JSON. `path` is given only if the lock has slots.
pub(super) fn status_object(path: Option<&Path>, status: &Status) -> Object {
    let object = Object::new()
        .with_any("path", path.map(shown_path))
        .with("locked", status.is_locked());
    let Some(details) = status.details() else {
        return object;
    };
    object
        .with_any("error", unreadable(details))
        .with("pid", details.pid)
        .with("timestamp", details.timestamp)
        .with("tag", details.tag.clone())
        .with("age", details.age)
        .with("alive", alive(details.alive))
        .with("stale", details.is_stale)
        .with("token", details.token.clone())
}

/// Describes a status as lines of `key: value`. `path` is given only if the lock has slots.
pub(super) fn status_text(path: Option<&Path>, status: &Status) -> String {
    let object = Object::new()
        .with_any("path", path.map(shown_path))
        .with("locked", status.is_locked());
    let object = match status.details() {
        None => object,
        Some(details) => object
            .with_any("error", unreadable(details))
            .with_any("pid", details.pid)
            .with_any("timestamp", details.timestamp)
            .with_any("tag", details.tag.clone())
            .with_any("age", details.age.map(|age| format!("{age}s")))
            .with("alive", alive(details.alive))
            .with("stale", if details.is_stale { "yes" } else { "no" }),
    };
    object.lines()
}

/// Describes the holder of a lock in indented lines.
pub(super) fn holder_text(path: &Path, busy: &Busy) -> String {
    let details = &busy.details;
    let is_unknown = details.alive == Alive::Unknown;
    let is_unnamed = (details.pid, details.timestamp) == (None, None);
    let note = note(busy)
        .or(is_unnamed.then_some(NAMES_NO_HOLDER))
        .or(unreadable(details))
        .or(is_unknown.then_some("it cannot be told from here whether the holder is alive"));
    Object::new()
        .with_any("  Holder PID", details.pid)
        .with("  Path", shown_path(path))
        .with_any("  Tag", details.tag.clone())
        .with_any("  Age", details.age.map(|age| format!("{age}s")))
        .with_any("  Note", note)
        .lines()
}

/// Describes in one line the holder that the lock's file names, or says that it names none.
pub(super) fn holder_line(record: &Record) -> String {
    let Some(pid) = record.pid else {
        return NAMES_NO_HOLDER.to_owned();
    };
    let mut text = format!("held by pid {pid}");
    if let Some(host) = record.host.as_deref() {
        text += &format!(" on {}", shown(host));
    }
    if let Some(tag) = record.tag.as_deref().filter(|tag| !tag.is_empty()) {
        text += &format!(" ({})", shown(tag));
    }
    if let Some(seconds) = record.age() {
        text += &format!(" for {}", rough_time(Duration::from_secs(seconds)));
    }
    text
}

/// What prevents a grant besides a holder.
fn note(busy: &Busy) -> Option<&'static str> {
    let runs = |pid| Semaphore::is_process_running(pid);
    match busy.obstacle {
        Obstacle::NotStale => None,
        // Presumably the holder has the file locked.
        Obstacle::Locked if busy.details.pid.is_some_and(runs) => None,
        Obstacle::Locked => Some("another process keeps the file locked"),
        Obstacle::Unreadable => Some("this user may not read the file"),
        Obstacle::Contended => Some("another process changed it at the same time"),
        other => other.hopeless_reason(),
    }
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
