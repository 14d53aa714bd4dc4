//! The format of the state file, in which a server leaves for the next one what that one must know.
//! Pure: no I/O and no clock.
//!
//! The first line names the format, its version and a checksum of the rest. Then comes one JSON
//! object per line: first the server, then each holder in fence order.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{json, Map, Value};

use crate::fence::file::checksum;
use crate::protocol::limits::MAX_SECONDS;
use crate::protocol::record;
use crate::table::{HolderRecord, SaltKey};
use crate::token::Fence;

/// The name of the file when it was for hand-overs alone. It stays, so that an older server says
/// that the file is of a newer one.
const MAGIC: &str = "latchd-handover";
/// The version that is written. Versions 1 and 2, which can still be read, were written only at an
/// orderly end. The holders of version 1 have neither weights nor slot numbers.
const VERSION: u64 = 3;

/// Whether a server has ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The server runs, or has ended without writing the file again.
    Open,
    /// The server has ended, and the file has all its holders.
    Closed,
}

/// What a server leaves for the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerState {
    pub condition: Condition,
    /// The first unused fence: neither this one nor any above it has been used.
    pub next_fence: u64,
    /// For how long at least the next server must settle if this one has not ended in order. Whole
    /// seconds.
    pub settle: Duration,
    /// For how much longer this server had to settle when it ended. Whole milliseconds.
    pub settling_left: Duration,
    /// The boot in which the file was written; `None` if the system does not tell.
    pub boot_id: Option<String>,
    /// When the file was written: the time since 1970 by the wall clock. Whole milliseconds.
    pub written_at: Duration,
    /// The key of the salts in the tokens; `None` if an older server has written the file.
    pub salt_key: Option<SaltKey>,
    /// The grants in fence order.
    pub grants: Vec<SavedGrant>,
    /// The dead grants in fence order. First those whose fences are not known.
    pub dead: Vec<SavedDead>,
}

/// A grant that has ended, although its client may believe in it and come back with its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedDead {
    /// `None` stands for dead grants that are missing in the file, because there were too many.
    pub fence: Option<Fence>,
    /// What was left of its lease when the file was written. Whole milliseconds.
    pub left: Duration,
    /// When its lease would have ended.
    pub end: ClockTimes,
}

/// A grant in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedGrant {
    /// Its lease is what was left of it if there is an end or the file is closed, and its whole
    /// length otherwise.
    pub record: HolderRecord,
    /// When its lease ends, if it goes on while no server runs.
    pub end: Option<ClockTimes>,
}

/// A point in time by two clocks. Whole milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockTimes {
    /// The time since 1970 by the wall clock.
    pub wall: Duration,
    /// The time since the boot, including the time for which the host was suspended.
    pub boot: Duration,
}

/// Why the content of a file is not a state that this server can read.
#[derive(Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// There is nothing but zeros: the file system lost the content in a crash of the host.
    Blank,
    Foreign,
    Newer(u64),
    Broken,
}

/// Encodes a state as the content of the file.
pub fn encode(state: &ServerState) -> String {
    let server = json!({
        "state": match state.condition {
            Condition::Open => "open",
            Condition::Closed => "closed",
        },
        "next_fence": state.next_fence,
        "settle_s": state.settle.as_secs(),
        // Rounded up to seconds, a server that is restarted every second would settle for ever.
        "settling_ms": milliseconds(state.settling_left),
        "boot_id": state.boot_id,
        "written_ms": milliseconds(state.written_at),
        "secret": state.salt_key.map(|key| format!("{:032x}", u128::from_be_bytes(key.0))),
    });
    let mut body = format!("{server}\n");
    for grant in &state.grants {
        let mut line = record::encode(&grant.record);
        if let Some(ClockTimes { wall, boot }) = grant.end {
            line["end_ms"] = milliseconds(wall).into();
            line["end_boot_ms"] = milliseconds(boot).into();
        }
        writeln!(body, "{line}").expect("writing to memory");
    }
    for dead in &state.dead {
        let line = json!({
            "dead": dead.fence.map(|fence| fence.0),
            "left_ms": milliseconds(dead.left),
            "end_ms": milliseconds(dead.end.wall),
            "end_boot_ms": milliseconds(dead.end.boot),
        });
        writeln!(body, "{line}").expect("writing to memory");
    }
    let checksum = checksum(body.as_bytes());
    format!("{MAGIC} {VERSION} {checksum:016x}\n{body}")
}

/// Rounded up.
fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

/// Decodes the content of the file.
pub fn decode(content: &[u8]) -> Result<ServerState, Unreadable> {
    if content.iter().all(|byte| *byte == 0) {
        return Err(Unreadable::Blank);
    }
    if !content.starts_with(MAGIC.as_bytes()) {
        return Err(Unreadable::Foreign);
    }
    let content = std::str::from_utf8(content).map_err(|_| Unreadable::Broken)?;
    let (first, body) = content.split_once('\n').ok_or(Unreadable::Broken)?;
    let [_, version, sum] = *first.split(' ').collect::<Vec<_>>() else {
        return Err(Unreadable::Broken);
    };
    let version = match version.parse() {
        Ok(version @ 1..=VERSION) => version,
        Ok(newer) if newer > VERSION => return Err(Unreadable::Newer(newer)),
        _ => return Err(Unreadable::Broken),
    };
    if sum != format!("{:016x}", checksum(body.as_bytes())) {
        return Err(Unreadable::Broken);
    }
    decode_body(version, body).ok_or(Unreadable::Broken)
}

/// Decodes all but the first line. Leaves out what it does not know of the server.
fn decode_body(version: u64, body: &str) -> Option<ServerState> {
    let (server, lines) = body.split_once('\n')?;
    let server: Value = serde_json::from_str(server).ok()?;
    let (mut grants, mut dead) = (Vec::new(), Vec::new());
    for line in lines.lines() {
        let fields: Map<String, Value> = serde_json::from_str(line).ok()?;
        if fields.contains_key("dead") {
            dead.push(decode_dead(&fields)?);
        } else {
            grants.push(decode_grant(fields)?);
        }
    }
    let number = |name| server.get(name)?.as_u64();
    let closed = ServerState {
        condition: Condition::Closed,
        next_fence: number("next_fence")?,
        settle: Duration::ZERO,
        settling_left: Duration::ZERO,
        boot_id: None,
        written_at: Duration::ZERO,
        salt_key: None,
        grants,
        dead,
    };
    if version < 3 {
        // The checksum does not cover the version, and a state must not become a hand-over.
        return server.get("state").is_none().then_some(closed);
    }
    let settling_ms = number("settling_ms")?.min(1000 * MAX_SECONDS);
    Some(ServerState {
        condition: match server.get("state")?.as_str()? {
            "open" => Condition::Open,
            "closed" => Condition::Closed,
            _ => return None,
        },
        settle: Duration::from_secs(number("settle_s")?.min(MAX_SECONDS)),
        settling_left: Duration::from_millis(settling_ms),
        boot_id: server.get("boot_id")?.as_str().map(str::to_owned),
        written_at: Duration::from_millis(number("written_ms")?),
        salt_key: match server.get("secret") {
            None | Some(Value::Null) => None,
            Some(secret) => Some(decode_salt_key(secret.as_str()?)?),
        },
        ..closed
    })
}

fn decode_salt_key(digits: &str) -> Option<SaltKey> {
    let key = u128::from_str_radix(digits, 16).ok()?;
    (digits.len() == 32).then_some(SaltKey(key.to_be_bytes()))
}

fn decode_dead(fields: &Map<String, Value>) -> Option<SavedDead> {
    let number = |name| fields.get(name)?.as_u64();
    let time = |name| number(name).map(Duration::from_millis);
    Some(SavedDead {
        fence: match fields.get("dead")? {
            Value::Null => None,
            fence => Some(Fence(fence.as_u64()?)),
        },
        left: time("left_ms")?,
        end: ClockTimes {
            wall: time("end_ms")?,
            boot: time("end_boot_ms")?,
        },
    })
}

fn decode_grant(mut fields: Map<String, Value>) -> Option<SavedGrant> {
    let mut take = |name| match fields.remove(name) {
        Some(time) => Some(Some(Duration::from_millis(time.as_u64()?))),
        None => Some(None),
    };
    let (wall, boot) = (take("end_ms")?, take("end_boot_ms")?);
    if wall.is_some() != boot.is_some() {
        return None;
    }
    let end = wall.zip(boot).map(|(wall, boot)| ClockTimes { wall, boot });
    let record = record::decode(fields)?;
    Some(SavedGrant { record, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::table::Key;
    use crate::terms::{Kind, Limit, Weight};
    use crate::token::{Fence, Salt, Token};

    fn state() -> ServerState {
        let holder = |fence, kind, limit: u32, end| SavedGrant {
            end,
            record: HolderRecord {
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
            },
        };
        let end = ClockTimes {
            wall: Duration::from_millis(1_800_000_000_001),
            boot: Duration::from_millis(7),
        };
        ServerState {
            condition: Condition::Closed,
            next_fence: u64::MAX,
            settle: Duration::from_secs(33),
            settling_left: Duration::from_millis(1),
            boot_id: Some("71c1ea2e-3d0b-4d8c-9a4f-0c3a0c7a3f6e".into()),
            written_at: Duration::from_millis(1_799_999_999_999),
            salt_key: Some(SaltKey(*b"0123456789abcdef")),
            dead: [None, Some(Fence(3))]
                .map(|fence| SavedDead {
                    fence,
                    left: Duration::from_millis(5),
                    end,
                })
                .into(),
            grants: vec![
                holder(7, Kind::Lock, 1, Some(end)),
                holder(8, Kind::Semaphore, 1_048_576, None),
            ],
        }
    }

    /// A file of this version, with this body.
    fn file(version: u64, body: &str) -> String {
        format!(
            "{MAGIC} {version} {:016x}\n{body}",
            checksum(body.as_bytes())
        )
    }

    fn body() -> String {
        let written = encode(&state());
        let (_, body) = written.split_once('\n').expect("a first line");
        body.to_owned()
    }

    #[test]
    fn what_is_written_is_read() {
        let nothing = ServerState {
            condition: Condition::Open,
            next_fence: 1,
            boot_id: None,
            salt_key: None,
            grants: Vec::new(),
            dead: Vec::new(),
            ..state()
        };
        for written in [state(), nothing] {
            assert_eq!(decode(encode(&written).as_bytes()), Ok(written));
        }
    }

    #[test]
    fn the_first_versions_were_written_at_an_orderly_end() {
        let mut expected = state();
        expected.grants.iter_mut().for_each(|it| it.end = None);
        (expected.dead, expected.salt_key) = (Vec::new(), None);
        let written = encode(&expected);
        let (_, holders) = written
            .split_once('\n')
            .expect("a first line")
            .1
            .split_once('\n')
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .expect("two lines");
        let body = format!("{{\"next_fence\":7}}\n{holders}");
        for version in [1, 2] {
            let expected = ServerState {
                next_fence: 7,
                settle: Duration::ZERO,
                settling_left: Duration::ZERO,
                boot_id: None,
                written_at: Duration::ZERO,
                ..expected.clone()
            };
            assert_eq!(decode(file(version, &body).as_bytes()), Ok(expected));
        }
        assert_eq!(decode(file(3, &body).as_bytes()), Err(Unreadable::Broken));
    }

    #[test]
    fn what_is_not_known_of_the_server_is_left_out() {
        let more = body().replacen('{', r#"{"colour":"red","#, 1);
        assert_eq!(decode(file(3, &more).as_bytes()), Ok(state()));
        let other = body().replacen("closed", "ajar", 1);
        assert_eq!(decode(file(3, &other).as_bytes()), Err(Unreadable::Broken));
    }

    #[test]
    fn a_fraction_of_a_millisecond_is_rounded_up() {
        let short = ServerState {
            settling_left: Duration::from_micros(1),
            ..state()
        };
        let read = decode(encode(&short).as_bytes()).expect("it is whole");
        assert_eq!(read.settling_left, Duration::from_millis(1));
    }

    #[test]
    fn no_part_of_a_file_is_taken_for_the_whole() {
        let content = encode(&state());
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
        assert_eq!(decode(b""), Err(Unreadable::Blank));
        assert_eq!(decode(&[0; 512]), Err(Unreadable::Blank));
        assert_eq!(decode(b"\0latchd-handover"), Err(Unreadable::Foreign));
        assert_eq!(decode(b"dflfnc1\n"), Err(Unreadable::Foreign));
        let newer = b"latchd-handover 4 0000000000000000\n{}\n";
        assert_eq!(decode(newer), Err(Unreadable::Newer(4)));
        assert_eq!(decode(b"latchd-handover x 0\n"), Err(Unreadable::Broken));
    }
}
