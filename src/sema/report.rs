//! What `sema` says, to people and in JSON.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde_json::Value;

pub(super) use crate::cli::output::print_if_read as print;
use crate::lockfile::{Alive, Busy, Obstacle, Status};
use crate::text::Plain;

/// A JSON object whose keys stand in the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct Object(Vec<(&'static str, Member)>);

#[derive(Debug)]
enum Member {
    Value(Value),
    Object(Object),
}

impl Object {
    pub(super) fn new() -> Object {
        Object::default()
    }

    /// The same with one key more.
    #[must_use]
    pub(super) fn with(mut self, key: &'static str, value: impl Into<Value>) -> Object {
        self.0.push((key, Member::Value(value.into())));
        self
    }

    /// The same with one key more if there is a value.
    #[must_use]
    pub(super) fn with_any(self, key: &'static str, value: Option<impl Into<Value>>) -> Object {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    /// The same with one key more: an object, or null.
    #[must_use]
    pub(super) fn with_object(mut self, key: &'static str, object: Option<Object>) -> Object {
        let member = object.map_or(Member::Value(Value::Null), Member::Object);
        self.0.push((key, member));
        self
    }

    /// In one line, without an end of line.
    pub(super) fn compact(&self) -> String {
        let members: Vec<String> = self
            .0
            .iter()
            .map(|(key, member)| match member {
                Member::Value(value) => format!("{}:{value}", Value::from(*key)),
                Member::Object(object) => format!("{}:{}", Value::from(*key), object.compact()),
            })
            .collect();
        format!("{{{}}}", members.join(","))
    }

    /// A key to a line, indented by two blanks for each level, without an end of line.
    pub(super) fn pretty(&self) -> String {
        self.pretty_at("\n")
    }

    fn pretty_at(&self, line_break: &str) -> String {
        let inside = format!("{line_break}  ");
        let members: Vec<String> = self
            .0
            .iter()
            .map(|(key, member)| match member {
                Member::Value(value) => format!("{}: {value}", Value::from(*key)),
                Member::Object(object) => {
                    format!("{}: {}", Value::from(*key), object.pretty_at(&inside))
                }
            })
            .collect();
        let separator = format!(",{inside}");
        format!("{{{inside}{}{line_break}}}", members.join(&separator))
    }

    /// `key: value` lines for people: texts without quotes, what is in them escaped.
    pub(super) fn lines(&self) -> String {
        let lines = self.0.iter().map(|(key, member)| match member {
            Member::Value(Value::String(text)) => format!("{key}: {}\n", shown(text)),
            Member::Value(value) => format!("{key}: {value}\n"),
            Member::Object(object) => format!("{key}: {}\n", shown(&object.compact())),
        });
        lines.collect()
    }
}

/// `{"locked":true,"pid":N,"since":T}`: zeros, and why, where the file does not say; and what else is in the
/// way.
pub(super) fn held(busy: &Busy) -> Object {
    let status = &busy.status;
    Object::new()
        .with("locked", true)
        .with("pid", status.pid.unwrap_or(0))
        .with("since", status.timestamp.unwrap_or(0))
        .with_any("error", (!status.is_readable).then_some(UNREADABLE))
        .with_any("note", note(busy.obstacle))
}

/// What a file says that is no lock file, or none that we may read.
const UNREADABLE: &str = "contents unreadable";

/// All of a status; with its path if it is one of several.
pub(super) fn status_object(path: Option<&Path>, status: &Status) -> Object {
    let object = Object::new()
        .with_any("path", path.map(shown_path))
        .with("locked", status.is_locked);
    if !status.is_locked {
        return object;
    }
    object
        .with_any("error", (!status.is_readable).then_some(UNREADABLE))
        .with("pid", status.pid)
        .with("timestamp", status.timestamp)
        .with("tag", status.tag.clone())
        .with("age", status.age)
        .with("alive", alive(status.alive))
        .with("stale", status.is_stale)
        .with("token", status.token.clone())
}

/// All of a status, one `key: value` a line; with its path if it is one of several.
pub(super) fn status_text(path: Option<&Path>, status: &Status) -> String {
    let mut text = path.map_or_else(String::new, |path| format!("path: {}\n", shown_path(path)));
    text.push_str(&format!("locked: {}\n", status.is_locked));
    if !status.is_locked {
        return text;
    }
    let mut line = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            text.push_str(&format!("{key}: {value}\n"));
        }
    };
    line(
        "error",
        (!status.is_readable).then(|| UNREADABLE.to_owned()),
    );
    line("pid", status.pid.map(|pid| pid.to_string()));
    line("timestamp", status.timestamp.map(|time| time.to_string()));
    line("tag", status.tag.as_deref().map(shown));
    line("age", status.age.map(|age| format!("{age}s")));
    line("alive", Some(alive(status.alive).to_owned()));
    let stale = if status.is_stale { "yes" } else { "no" };
    line("stale", Some(stale.to_owned()));
    text
}

/// Who is in the way, in lines that are indented, below one that says of what.
pub(super) fn holder_text(path: &Path, busy: &Busy) -> String {
    let status = &busy.status;
    let mut text = String::new();
    let mut line = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            text.push_str(&format!("  {key}: {value}\n"));
        }
    };
    line("Holder PID", status.pid.map(|pid| pid.to_string()));
    line("Path", Some(shown_path(path)));
    line("Tag", status.tag.as_deref().map(shown));
    line("Age", status.age.map(|age| format!("{age}s")));
    let is_unknown = status.alive == Alive::Unknown;
    let note = note(busy.obstacle)
        .or((!status.is_readable).then_some(UNREADABLE))
        .or(is_unknown.then_some("it cannot be told from here whether the holder is alive"));
    line("Note", note.map(str::to_owned));
    text
}

/// What is in the way if it is not just that somebody holds the lock.
fn note(obstacle: Obstacle) -> Option<&'static str> {
    match obstacle {
        Obstacle::NotStale | Obstacle::Locked => None,
        Obstacle::NotAFile => Some("not a regular file"),
        Obstacle::NotALockFile => Some("not a lock file"),
        Obstacle::Unreadable => Some("this user may not read the file"),
        Obstacle::NotRemovable => Some("stale, but this user may not remove the file"),
        Obstacle::NoLocks => Some("stale, but the file system knows no locks on files"),
        Obstacle::Contended => Some("somebody else reached for it at the same time"),
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

/// Prints on stderr. Should that fail, there is nobody left to tell.
pub(super) fn complain(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_keeps_its_order_and_is_json() {
        let object = Object::new()
            .with("z", 1)
            .with("a", "say \"hi\"\n\u{1b}")
            .with("n", Option::<u32>::None)
            .with_any("left", Option::<u32>::None);
        let text = object.compact();
        assert_eq!(text, r#"{"z":1,"a":"say \"hi\"\n\u001b","n":null}"#);
        let back: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(back["a"], "say \"hi\"\n\u{1b}");
    }

    #[test]
    fn the_pretty_form_is_that_of_two_blanks() {
        let inner = Object::new().with("b", true).with("a", "x");
        let object = Object::new()
            .with("z", 1)
            .with_object("inner", Some(inner))
            .with_object("none", None);
        let text = object.pretty();
        assert_eq!(
            text,
            "{\n  \"z\": 1,\n  \"inner\": {\n    \"b\": true,\n    \"a\": \"x\"\n  },\n  \"none\": null\n}"
        );
        let back: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(back["inner"]["b"], true);
    }
}
