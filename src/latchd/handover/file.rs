//! The hand-over file, in which one server leaves its holders for the next one. Pure: no I/O and no
//! clock.
//!
//! The first line names the format, its version and a checksum of the rest. Then comes one JSON
//! object per line: first the next fence, then each holder in fence order.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{json, Value};

use crate::fence::file::checksum;
use crate::protocol::limits;
use crate::table::{HolderRecord, Key, Kind, Weight};

const MAGIC: &str = "latchd-handover";
/// The version that is written. Version 1, which can still be read, has neither weights nor slot
/// numbers.
const VERSION: u64 = 2;

/// What a server hands over.
#[derive(Debug, PartialEq, Eq)]
pub struct Handover {
    /// The first unused fence: neither this one nor any above it has been used.
    pub next_fence: u64,
    /// The holders in fence order, each with the time that is left of its lease.
    pub holders: Vec<HolderRecord>,
}

/// Why a file is not a hand-over that this server can read.
#[derive(Debug, PartialEq, Eq)]
pub enum Unreadable {
    Foreign,
    Newer(u64),
    Broken,
}

/// Encodes a hand-over as the content of the file.
pub fn encode(handover: &Handover) -> String {
    let mut body = format!("{}\n", json!({"next_fence": handover.next_fence}));
    for record in &handover.holders {
        // Rounded up, so that a lease with half a second left is not written as 0.
        let left = record.lease.as_nanos().div_ceil(1_000_000_000);
        let holder = json!({
            "key": record.key.as_str(),
            "kind": match record.kind {
                Kind::Lock => "lock",
                Kind::Semaphore => "semaphore",
            },
            "limit": record.limit.get(),
            "weight": record.weight.get(),
            "numbers": record.numbers[..],
            "token": record.token.to_string(),
            "tag": record.tag.as_deref(),
            "kept": record.is_kept,
            "left_s": u64::try_from(left).unwrap_or(u64::MAX),
        });
        writeln!(body, "{holder}").expect("writing to memory");
    }
    let checksum = checksum(body.as_bytes());
    format!("{MAGIC} {VERSION} {checksum:016x}\n{body}")
}

/// Decodes the content of the file.
pub fn decode(content: &[u8]) -> Result<Handover, Unreadable> {
    if !content.starts_with(MAGIC.as_bytes()) {
        return Err(Unreadable::Foreign);
    }
    let content = std::str::from_utf8(content).map_err(|_| Unreadable::Broken)?;
    let (first, body) = content.split_once('\n').ok_or(Unreadable::Broken)?;
    let [_, version, sum] = *first.split(' ').collect::<Vec<_>>() else {
        return Err(Unreadable::Broken);
    };
    match version.parse() {
        Ok(1..=VERSION) => {}
        Ok(newer) if newer > VERSION => return Err(Unreadable::Newer(newer)),
        _ => return Err(Unreadable::Broken),
    }
    if sum != format!("{:016x}", checksum(body.as_bytes())) {
        return Err(Unreadable::Broken);
    }
    decode_body(body).ok_or(Unreadable::Broken)
}

fn decode_body(body: &str) -> Option<Handover> {
    let mut lines = body.lines().map(serde_json::from_str::<Value>);
    let first = lines.next()?.ok()?;
    let next_fence = first.get("next_fence")?.as_u64()?;
    let holders: Option<Vec<HolderRecord>> = lines.map(|line| decode_holder(&line.ok()?)).collect();
    Some(Handover {
        next_fence,
        holders: holders?,
    })
}

fn decode_holder(line: &Value) -> Option<HolderRecord> {
    let text = |name| line.get(name)?.as_str();
    let number = |name| line.get(name)?.as_u64();
    let kind = match text("kind")? {
        "lock" => Kind::Lock,
        "semaphore" => Kind::Semaphore,
        _ => return None,
    };
    let weight = match line.get("weight") {
        Some(weight) => Weight::new(u32::try_from(weight.as_u64()?).ok()?)?,
        None => Weight::plain(kind),
    };
    let numbers = match line.get("numbers") {
        Some(numbers) => numbers.as_array()?.iter().map(slot_number).collect(),
        None => Some(Arc::default()),
    };
    let key = text("key").filter(|key| limits::is_key(key))?;
    let record = HolderRecord {
        key: Key::from(key),
        kind,
        limit: limits::limit(number("limit")?)?,
        weight,
        numbers: numbers?,
        token: text("token")?.parse().ok()?,
        lease: Duration::from_secs(number("left_s")?.min(limits::MAX_SECONDS)),
        is_kept: line.get("kept")?.as_bool()?,
        tag: text("tag").map(Arc::from),
    };
    record.is_possible().then_some(record)
}

fn slot_number(number: &Value) -> Option<u32> {
    number.as_u64()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Limit;
    use crate::token::{Fence, Salt, Token};

    fn handover() -> Handover {
        let holder = |fence, kind, limit: u32, tag: Option<&str>| HolderRecord {
            key: Key::from("a\u{a0}\"key\""),
            kind,
            limit: Limit::new(limit).expect("above zero"),
            weight: Weight::plain(kind),
            numbers: Arc::default(),
            token: Token {
                fence: Fence(fence),
                salt: Salt(u64::MAX - fence),
            },
            lease: Duration::from_secs(fence),
            is_kept: tag.is_some(),
            tag: tag.map(Arc::from),
        };
        Handover {
            next_fence: u64::MAX,
            holders: vec![
                holder(7, Kind::Lock, 1, Some("night\nly \u{1f511}")),
                holder(8, Kind::Semaphore, 1_048_576, None),
                HolderRecord {
                    weight: Weight::ONE,
                    ..holder(9, Kind::Lock, 1, None)
                },
                HolderRecord {
                    weight: Weight::new(3).expect("above zero"),
                    numbers: [0, 2, 6].into(),
                    ..holder(10, Kind::Semaphore, 8, None)
                },
                HolderRecord {
                    numbers: [7].into(),
                    ..holder(11, Kind::Semaphore, 8, None)
                },
            ],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let nothing = Handover {
            next_fence: 1,
            holders: Vec::new(),
        };
        for written in [handover(), nothing] {
            assert_eq!(decode(encode(&written).as_bytes()), Ok(written));
        }
    }

    #[test]
    fn the_first_version_had_neither_weights_nor_numbers() {
        let mut plain = handover();
        plain.holders.truncate(2);
        let written = encode(&plain);
        let (_, body) = written.split_once('\n').expect("a first line");
        let holders = body.lines().map(|line| {
            let mut line: Value = serde_json::from_str(line).expect("JSON");
            let fields = line.as_object_mut().expect("an object");
            fields.remove("weight");
            fields.remove("numbers");
            format!("{line}\n")
        });
        let body: String = holders.collect();
        let first = format!("{MAGIC} 1 {:016x}\n{body}", checksum(body.as_bytes()));
        assert_ne!(first, written);
        assert_eq!(decode(first.as_bytes()), Ok(plain));
    }

    #[test]
    fn a_fraction_of_a_second_is_rounded_up() {
        let mut some = handover();
        some.holders.truncate(1);
        some.holders[0].lease = Duration::from_millis(1);
        let read = decode(encode(&some).as_bytes()).expect("it is whole");
        assert_eq!(read.holders[0].lease, Duration::from_secs(1));
    }

    #[test]
    fn no_part_of_a_file_is_taken_for_the_whole() {
        let content = encode(&handover());
        let content = content.as_bytes();
        for len in 0..content.len() {
            assert!(decode(&content[..len]).is_err(), "{len}");
        }
        for at in 0..content.len() {
            let mut flipped = content.to_vec();
            flipped[at] ^= 1;
            assert!(decode(&flipped).is_err(), "{at}");
        }
    }

    #[test]
    fn files_of_others_and_of_newer_servers_are_told_apart() {
        assert_eq!(decode(b""), Err(Unreadable::Foreign));
        assert_eq!(decode(b"dflfnc1\n"), Err(Unreadable::Foreign));
        let newer = b"latchd-handover 3 0000000000000000\n{}\n";
        assert_eq!(decode(newer), Err(Unreadable::Newer(3)));
        assert_eq!(decode(b"latchd-handover x 0\n"), Err(Unreadable::Broken));
    }
}
