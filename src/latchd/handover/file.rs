//! The hand-over file, in which one server leaves its holders for the next one. Pure: no I/O and no
//! clock.
//!
//! The first line names the format, its version and a checksum of the rest. Then comes one JSON
//! object per line: first the next fence, then each holder in fence order.

use std::fmt::Write;

use serde_json::{json, Value};

use crate::fence::file::checksum;
use crate::protocol::record;
use crate::table::HolderRecord;

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
    for holder in &handover.holders {
        writeln!(body, "{}", record::encode(holder)).expect("writing to memory");
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
    let (first, holders) = body.split_once('\n')?;
    let first: Value = serde_json::from_str(first).ok()?;
    let holders: Option<Vec<HolderRecord>> = holders.lines().map(record::decode).collect();
    Some(Handover {
        next_fence: first.get("next_fence")?.as_u64()?,
        holders: holders?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use crate::table::{Key, Kind, Limit, Weight};
    use crate::token::{Fence, Salt, Token};

    fn handover() -> Handover {
        let holder = |fence, kind, limit: u32| HolderRecord {
            key: Key::from("a\u{a0}\"key\""),
            kind,
            limit: Limit::new(limit).expect("above zero"),
            weight: Weight::plain(kind),
            numbers: [].into(),
            token: Token {
                fence: Fence(fence),
                salt: Salt(u64::MAX - fence),
            },
            lease: Duration::from_secs(fence),
            is_kept: false,
            tag: None,
        };
        Handover {
            next_fence: u64::MAX,
            holders: vec![
                holder(7, Kind::Lock, 1),
                holder(8, Kind::Semaphore, 1_048_576),
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
    fn the_first_version_can_be_read() {
        let written = encode(&handover());
        let first = written.replacen(&format!("{MAGIC} {VERSION} "), &format!("{MAGIC} 1 "), 1);
        assert_ne!(first, written);
        assert_eq!(decode(first.as_bytes()), Ok(handover()));
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
