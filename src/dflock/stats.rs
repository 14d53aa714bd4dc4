//! The JSON of `stats`: latch-protocol(7), STATISTICS.

use std::fmt;
use std::io::Write;
use std::time::Duration;

use crate::table::{HolderSnapshot, KeySnapshot, Kind, Usage};

/// Appends the statistics as one JSON object on one line, each list sorted by key.
pub(super) fn write_json(connection_count: usize, keys: &[KeySnapshot], out: &mut Vec<u8>) {
    let mut sorted: Vec<&KeySnapshot> = keys.iter().collect();
    sorted.sort_unstable_by_key(|snapshot| snapshot.key.as_str());
    let is_idle = |snapshot: &KeySnapshot| matches!(snapshot.usage, Usage::Idle(_));
    let lists = [
        ("locks", Kind::Lock, false),
        ("semaphores", Kind::Semaphore, false),
        ("idle_locks", Kind::Lock, true),
        ("idle_semaphores", Kind::Semaphore, true),
    ];

    put(out, format_args!("{{\"connections\":{connection_count}"));
    for (name, kind, idle) in lists {
        put(out, format_args!(",\"{name}\":["));
        let mut members = sorted
            .iter()
            .filter(|snapshot| snapshot.kind == kind && is_idle(snapshot) == idle)
            .peekable();
        while let Some(snapshot) = members.next() {
            write_key(snapshot, out);
            if members.peek().is_some() {
                out.push(b',');
            }
        }
        out.push(b']');
    }
    out.push(b'}');
}

fn write_key(snapshot: &KeySnapshot, out: &mut Vec<u8>) {
    out.extend(b"{\"key\":");
    write_string(snapshot.key.as_str(), out);
    match (&snapshot.usage, snapshot.kind) {
        (Usage::Idle(idle), _) => put(out, format_args!(",\"idle_s\":{}", Seconds(*idle))),
        (
            Usage::Busy {
                waiter_count,
                first_holder,
                ..
            },
            Kind::Lock,
        ) => {
            // A lock that is waited for has a holder, except while there are no tokens to be had.
            let about = |holder: &HolderSnapshot| (holder.conn.0, Seconds(holder.expires_in));
            let (conn, expires_in) = first_holder
                .as_ref()
                .map_or((0, Seconds(Duration::ZERO)), about);
            put(
                out,
                format_args!(
                    ",\"owner_conn_id\":{conn},\"lease_expires_in_s\":{expires_in},\"waiters\":{waiter_count}"
                ),
            );
        }
        (
            Usage::Busy {
                holder_count,
                waiter_count,
                ..
            },
            Kind::Semaphore,
        ) => put(
            out,
            format_args!(
                ",\"limit\":{},\"holders\":{holder_count},\"waiters\":{waiter_count}",
                snapshot.limit.get()
            ),
        ),
    }
    out.push(b'}');
}

/// Seconds with three decimals. (To print a float would cost a small host ten kilobytes.)
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0.as_secs(), self.0.subsec_millis())
    }
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', byte]),
            0..=0x1f | 0x7f => put(out, format_args!("\\u{byte:04x}")),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

fn put(out: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to memory");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{ConnId, Key, Limit};

    fn json(keys: &[KeySnapshot]) -> String {
        let mut out = Vec::new();
        write_json(14, keys, &mut out);
        String::from_utf8(out).expect("JSON is text")
    }

    fn busy(key: &str, kind: Kind, limit: u32) -> KeySnapshot {
        KeySnapshot {
            key: Key::from(key),
            kind,
            limit: Limit::new(limit).expect("above zero"),
            usage: Usage::Busy {
                holder_count: 1,
                waiter_count: 2,
                first_holder: Some(HolderSnapshot {
                    conn: ConnId(42),
                    expires_in: Duration::from_millis(18_500),
                }),
            },
        }
    }

    #[test]
    fn nothing_is_four_empty_lists() {
        assert_eq!(
            json(&[]),
            r#"{"connections":14,"locks":[],"semaphores":[],"idle_locks":[],"idle_semaphores":[]}"#
        );
    }

    #[test]
    fn each_key_stands_in_its_list_in_order_of_name() {
        let idle = KeySnapshot {
            usage: Usage::Idle(Duration::from_millis(250)),
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
