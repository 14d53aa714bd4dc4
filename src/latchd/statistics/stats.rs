//! The JSON of `stats`: see latch-protocol(7), STATISTICS. Pure.

use std::fmt;
use std::io::Write;
use std::time::Duration;

use crate::latchd::table::KeySnapshot;
use crate::os::text::{is_unseen, JsonEscape};
use crate::wire::terms::Kind;

/// Writes the statistics as one JSON object on one line, each list sorted by key. `page_of` returns
/// a page of keys, and where the next page begins or `None` if it was the last one. `drain` is
/// called after every key, and may clear `out`.
pub fn write_json<E, L>(
    connection_count: usize,
    mut page_of: impl FnMut(Option<L>) -> (Vec<KeySnapshot>, Option<L>),
    out: &mut Vec<u8>,
    mut drain: impl FnMut(&mut Vec<u8>) -> Result<(), E>,
) -> Result<(), E> {
    let lists = [
        ("locks", Kind::Lock, false),
        ("semaphores", Kind::Semaphore, false),
        ("idle_locks", Kind::Lock, true),
        ("idle_semaphores", Kind::Semaphore, true),
    ];

    put!(out, "{{\"connections\":{connection_count}");
    let (mut page, mut next) = page_of(None);
    let is_whole = next.is_none();
    for (name, kind, idle) in lists {
        put!(out, ",\"{name}\":[");
        if !is_whole {
            (page, next) = page_of(None);
        }
        loop {
            let is_member = |key: &&KeySnapshot| key.kind == kind && is_idle(key) == idle;
            for snapshot in page.iter().filter(is_member) {
                separate(out);
                write_key(snapshot, out);
                drain(out)?;
            }
            if next.is_none() {
                break;
            }
            (page, next) = page_of(next);
        }
        out.push(b']');
    }
    out.push(b'}');
    Ok(())
}

/// Appends the figures of a server of a cluster to the object that [`write_json`] has written.
/// `orphans` is the number of grants that no connection holds. `journal` is the smoothed duration
/// of a batch of the journal.
pub fn append_cluster(epoch: u64, orphans: usize, journal: Duration, out: &mut Vec<u8>) {
    let microseconds = journal.as_micros();
    let (whole, rest) = (microseconds / 1000, microseconds % 1000);
    reopen(out);
    put!(
        out,
        ",\"cluster\":{{\"role\":\"active\",\"epoch\":{epoch},\"orphans\":{orphans},\
         \"journal_ms\":{whole}.{rest:03}}}}}"
    );
}

/// Appends for how long the server will grant nothing, to an object that has been written; nothing
/// if it grants.
pub fn append_settling(left: Duration, out: &mut Vec<u8>) {
    if !left.is_zero() {
        reopen(out);
        put!(out, ",\"settling_s\":{}}}", Seconds(left));
    }
}

/// Tells how many connections were closed because of a cap.
pub fn append_turned_away(count: u64, out: &mut Vec<u8>) {
    if count > 0 {
        reopen(out);
        put!(out, ",\"turned_away\":{count}}}");
    }
}

fn is_idle(snapshot: &KeySnapshot) -> bool {
    (snapshot.holder_count, snapshot.waiter_count) == (0, 0)
}

fn write_key(snapshot: &KeySnapshot, out: &mut Vec<u8>) {
    out.extend(b"{\"key\":");
    write_string(snapshot.key.as_str(), out);
    let (holders, waiters) = (snapshot.holder_count, snapshot.waiter_count);
    match snapshot.kind {
        _ if is_idle(snapshot) => {
            let idle = Seconds(snapshot.idle_for);
            put!(out, ",\"idle_s\":{idle}");
        }
        Kind::Lock => {
            // A lock with waiters has a holder, except while the server settles or has no fence for
            // a grant.
            let first = snapshot.holders.first();
            let conn = first.map_or(0, |holder| holder.conn.0);
            let held = first.and_then(|holder| holder.held);
            let left = Seconds(held.map_or(Duration::ZERO, |(_, left)| left));
            put!(
                out,
                ",\"owner_conn_id\":{conn},\"lease_expires_in_s\":{left},\"waiters\":{waiters}"
            );
        }
        Kind::Semaphore => {
            let limit = snapshot.limit.get();
            put!(
                out,
                ",\"limit\":{limit},\"holders\":{holders},\"waiters\":{waiters}"
            );
        }
    }
    out.push(b'}');
}

/// Writes the comma in front of each entry of a list or an object, except in front of the first.
pub(crate) fn separate(out: &mut Vec<u8>) {
    if !matches!(out.last(), Some(b'[' | b'{')) {
        out.push(b',');
    }
}

/// Removes the end of an object, so that more can be appended to it.
pub(crate) fn reopen(out: &mut Vec<u8>) {
    let brace = out.pop();
    debug_assert_eq!(brace, Some(b'}'));
}

/// Seconds with three decimals. The code that prints a float would add ten kilobytes.
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0.as_secs(), self.0.subsec_millis())
    }
}

/// Writes a string, or null.
pub(crate) fn write_optional(text: Option<&str>, out: &mut Vec<u8>) {
    match text {
        Some(text) => write_string(text, out),
        None => out.extend(b"null"),
    }
}

pub(crate) fn write_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend([b'\\', c as u8]),
            // A terminal could act on these characters. For JSON readers, the escapes mean the
            // same.
            _ if is_unseen(c) => put!(out, "{}", JsonEscape(c)),
            _ => out.extend(c.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    out.push(b'"');
}

/// Appends formatted text to a vector of bytes.
macro_rules! put {
    ($out:expr, $($text:tt)*) => {
        $crate::latchd::statistics::stats::append($out, format_args!($($text)*))
    };
}
pub(crate) use put;

pub(crate) fn append(out: &mut Vec<u8>, text: fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to memory");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latchd::table::{ConnId, Key, PlaceSnapshot, KEYS_AT_ONCE};
    use crate::wire::terms::{Limit, Weight};
    use crate::wire::token::Fence;
    use std::convert::Infallible;

    /// The JSON for a table with these keys, and the most bytes that were held back at a time.
    fn json_and_most_held(keys: &[KeySnapshot]) -> (String, usize) {
        let mut sorted = keys.to_vec();
        sorted.sort_by(|a, b| a.key.cmp(&b.key));
        let page_of = |from: Option<usize>| {
            let mut left = sorted.iter().skip(from.unwrap_or(0));
            let page: Vec<KeySnapshot> = left.by_ref().take(KEYS_AT_ONCE).cloned().collect();
            (page, (left.len() > 0).then(|| sorted.len() - left.len()))
        };
        let (mut json, mut out, mut most_held) = (Vec::new(), Vec::new(), 0);
        let written = write_json(14, page_of, &mut out, |out| {
            most_held = most_held.max(out.len());
            json.append(out);
            Ok::<(), Infallible>(())
        });
        assert_eq!(written, Ok(()));
        json.append(&mut out);
        (String::from_utf8(json).expect("JSON is text"), most_held)
    }

    fn json(keys: &[KeySnapshot]) -> String {
        json_and_most_held(keys).0
    }

    fn busy(key: &str, kind: Kind, limit: u32) -> KeySnapshot {
        KeySnapshot {
            key: Key::from(key),
            kind,
            limit: Limit::new(limit).expect("above zero"),
            taken: 1,
            holder_count: 1,
            waiter_count: 2,
            idle_for: Duration::ZERO,
            holders: vec![PlaceSnapshot {
                conn: ConnId(42),
                weight: Weight::ONE,
                numbers: [].into(),
                is_kept: false,
                lease: Duration::ZERO,
                age: Duration::ZERO,
                held: Some((Fence(1), Duration::from_millis(18_500))),
            }],
            waiters: Vec::new(),
        }
    }

    #[test]
    fn what_a_terminal_would_act_on_is_escaped() {
        let written = |text: &str| {
            let mut out = Vec::new();
            write_string(text, &mut out);
            String::from_utf8(out).expect("JSON is text")
        };
        for c in ('\0'..='\u{10ffff}').filter(|c| is_unseen(*c)) {
            let text = format!("a{c}b");
            let json = written(&text);
            assert!(json.is_ascii() && !json.contains(c), "{json}");
            assert_eq!(serde_json::from_str(&json).ok(), Some(text));
        }
        assert!(written("\u{9b}\u{202e}").contains("\\u009b\\u202e"));
        assert_eq!(written("ключ \u{a0}🔑"), "\"ключ \u{a0}🔑\"");
    }

    #[test]
    fn nothing_is_four_empty_lists() {
        assert_eq!(
            json(&[]),
            r#"{"connections":14,"locks":[],"semaphores":[],"idle_locks":[],"idle_semaphores":[]}"#
        );
    }

    #[test]
    fn a_server_of_several_says_so_at_the_end() {
        let mut out = json(&[]).into_bytes();
        append_cluster(42, 3, Duration::from_micros(1234), &mut out);
        assert_eq!(
            String::from_utf8(out).expect("JSON is text"),
            concat!(
                r#"{"connections":14,"locks":[],"semaphores":[],"idle_locks":[],"#,
                r#""idle_semaphores":[],"cluster":{"role":"active","epoch":42,"orphans":3,"#,
                r#""journal_ms":1.234}}"#
            )
        );
    }

    #[test]
    fn each_list_has_its_keys_in_order_of_name() {
        let idle = KeySnapshot {
            holder_count: 0,
            waiter_count: 0,
            idle_for: Duration::from_millis(250),
            ..busy("z", Kind::Semaphore, 3)
        };
        let keys = [
            busy("b", Kind::Lock, 1),
            idle,
            busy("s", Kind::Semaphore, 1),
            busy("a", Kind::Lock, 1),
        ];
        assert_eq!(
            json(&keys),
            concat!(
                r#"{"connections":14,"locks":["#,
                r#"{"key":"a","owner_conn_id":42,"lease_expires_in_s":18.500,"waiters":2},"#,
                r#"{"key":"b","owner_conn_id":42,"lease_expires_in_s":18.500,"waiters":2}],"#,
                r#""semaphores":[{"key":"s","limit":1,"holders":1,"waiters":2}],"#,
                r#""idle_locks":[],"idle_semaphores":[{"key":"z","idle_s":0.250}]}"#
            )
        );
    }

    #[test]
    fn any_number_of_keys_is_listed_once_each_in_pieces() {
        for count in [
            KEYS_AT_ONCE - 1,
            KEYS_AT_ONCE,
            KEYS_AT_ONCE + 1,
            5 * KEYS_AT_ONCE,
        ] {
            let keys: Vec<KeySnapshot> = (0..count)
                .flat_map(|number| {
                    let lock = busy(&format!("{number:04}a"), Kind::Lock, 1);
                    let semaphore = busy(&format!("{number:04}b"), Kind::Semaphore, 2);
                    [lock, semaphore]
                })
                .collect();
            let (text, most_held) = json_and_most_held(&keys);
            assert!(most_held < 500, "{most_held} bytes at a time");
            let parsed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            for (list, suffix) in [("locks", "a"), ("semaphores", "b")] {
                let listed = parsed[list].as_array().expect("a list");
                assert_eq!(listed.len(), count);
                for (number, entry) in listed.iter().enumerate() {
                    assert_eq!(entry["key"], format!("{number:04}{suffix}"));
                }
            }
            assert_eq!(parsed["idle_locks"].as_array().map(Vec::len), Some(0));
        }
    }

    #[test]
    fn any_key_is_valid_json() {
        for key in [
            "\"",
            "\\",
            "\0",
            "\u{1b}[31m",
            "\u{7f}",
            "\u{85}",
            "ключ\u{2028}",
            "a=b",
        ] {
            let text = json(&[busy(key, Kind::Lock, 1)]);
            let parsed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!(parsed["locks"][0]["key"], key);
        }
    }
}
