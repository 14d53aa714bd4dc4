//! The format of the state file, in which a server leaves for the next one what that one must know.
//! Pure: no I/O and no clock.
//!
//! The first line names the format, its version and a checksum of the rest of the snapshot: one
//! JSON object per line, first the server, then each holder in fence order, and an empty line. Then
//! comes a *batch* for each later write: a checksum and such objects in a line, and an empty line.
//!
//! A crash can cut a write short, or mix it with zeros. So the last batch may be broken. A batch is
//! one line, so that a broken one is not taken for several.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{json, Deserializer, Map, Value};

use crate::latchd::fence::format::checksum;
use crate::latchd::record;
use crate::latchd::table::{HolderRecord, SaltKey};
use crate::wire::limits::MAX_SECONDS;
use crate::wire::token::Fence;

/// The name of the file when it was for hand-overs alone. It stays, so that an older server says
/// that the file is of a newer one.
const MAGIC: &str = "latchd-handover";
/// The version that is written. The others, which can still be read, have no batches. Versions 1
/// and 2 were written only at an orderly end. The holders of version 1 have neither weights nor
/// slot numbers.
const VERSION: u64 = 4;

/// Whether a server has ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The server runs, or has ended without writing the file again.
    Open,
    /// The server has ended, and the file has all its holders.
    Closed,
}

/// What a server leaves for the next one; or a batch, which has only what has changed of it.
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
    /// When the snapshot or the batch was written.
    pub written_at: ClockTimes,
    /// The key of the salts in the tokens; `None` if an older server has written the file.
    pub salt_key: Option<SaltKey>,
    pub grants: BTreeMap<Fence, SavedGrant>,
    /// What the server remembered of keys, as `stats` shows it.
    pub histories: Vec<Value>,
    /// The dead grants. A batch also has those that have just ended, with no time left.
    pub dead: Vec<SavedDead>,
}

/// A grant that has ended, although its client may believe in it and come back with its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedDead {
    pub fence: Fence,
    /// For how much longer its client could come back when the file was written. Whole
    /// milliseconds.
    pub left: Duration,
    /// Until when its client can come back.
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
    /// When the snapshot or the batch that has it was written.
    pub written_at: ClockTimes,
}

/// A point in time by two clocks. Whole milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockTimes {
    /// The time since 1970 by the wall clock.
    pub wall: Duration,
    /// The time since the boot, including the time for which the host was suspended.
    pub boot: Duration,
}

impl ClockTimes {
    /// The time after this one.
    pub fn after(self, time: Duration) -> ClockTimes {
        ClockTimes {
            wall: self.wall.saturating_add(time),
            boot: self.boot.saturating_add(time),
        }
    }
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

/// Encodes a state as a snapshot: the content of a new file.
pub fn encode(state: &ServerState) -> String {
    let body = encode_objects(state, '\n') + "\n";
    let checksum = checksum(body.as_bytes());
    format!("{MAGIC} {VERSION} {checksum:016x}\n{body}")
}

/// Encodes a batch, to be appended to the file.
pub fn encode_batch(batch: &ServerState) -> String {
    let objects = encode_objects(batch, ' ');
    format!("{:016x} {objects}\n\n", checksum(objects.as_bytes()))
}

/// Encodes what is in a state, with this character behind each object.
fn encode_objects(state: &ServerState, end: char) -> String {
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
        "written_ms": milliseconds(state.written_at.wall),
        "written_boot_ms": milliseconds(state.written_at.boot),
        "secret": state.salt_key.map(|key| format!("{:032x}", u128::from_be_bytes(key.0))),
    });
    let mut objects = String::new();
    let mut add = |object: &Value| write!(objects, "{object}{end}").expect("writing to memory");
    add(&server);
    for grant in state.grants.values() {
        let mut object = record::encode(&grant.record);
        if let Some(ClockTimes { wall, boot }) = grant.end {
            object["end_ms"] = milliseconds(wall).into();
            object["end_boot_ms"] = milliseconds(boot).into();
        }
        add(&object);
    }
    for dead in &state.dead {
        add(&json!({
            "dead": dead.fence.0,
            "left_ms": milliseconds(dead.left),
            "end_ms": milliseconds(dead.end.wall),
            "end_boot_ms": milliseconds(dead.end.boot),
        }));
    }
    state.histories.iter().for_each(add);
    objects
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
    let end = content.windows(2).position(|it| it == b"\n\n");
    let (snapshot, batches) = content.split_at(end.map_or(content.len(), |end| end + 2));
    let snapshot = std::str::from_utf8(snapshot).map_err(|_| Unreadable::Broken)?;
    let (first, body) = snapshot.split_once('\n').ok_or(Unreadable::Broken)?;
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
    let mut state = decode_objects(version, body.as_bytes()).ok_or(Unreadable::Broken)?;
    let lines = batches.split_inclusive(|byte| *byte == b'\n');
    let mut batches = lines.filter(|line| *line != b"\n");
    while let Some(line) = batches.next() {
        let Some(objects) = objects_of(line) else {
            // The last write was not completed, so no reply has told of it.
            let next = batches.next();
            return next.map_or(Ok(state), |_| Err(Unreadable::Broken));
        };
        // The histories stay those of the snapshot.
        let batch = decode_objects(version, objects).ok_or(Unreadable::Broken)?;
        (state.next_fence, state.settle) = (batch.next_fence, batch.settle);
        let ended = batch.dead.iter().map(|dead| dead.fence);
        ended.for_each(|fence| drop(state.grants.remove(&fence)));
        state.grants.extend(batch.grants);
        state.dead.extend(batch.dead);
    }
    Ok(state)
}

/// The objects of a batch; `None` if its line is not whole.
fn objects_of(line: &[u8]) -> Option<&[u8]> {
    let (sum, objects) = line.strip_suffix(b"\n")?.split_at_checked(17)?;
    (sum == format!("{:016x} ", checksum(objects)).as_bytes()).then_some(objects)
}

/// Decodes a snapshot without its first line, or the objects of a batch. Leaves out what it does
/// not know of the server.
fn decode_objects(version: u64, objects: &[u8]) -> Option<ServerState> {
    let mut objects = Deserializer::from_slice(objects).into_iter::<Map<String, Value>>();
    let server = objects.next()?.ok()?;
    let written_at = decode_times(&server, ["written_ms", "written_boot_ms"]).unwrap_or_default();
    let (mut grants, mut dead, mut histories) = (BTreeMap::new(), Vec::new(), Vec::new());
    for fields in objects {
        let fields = fields.ok()?;
        if fields.contains_key("dead") {
            dead.push(decode_dead(&fields)?);
        } else if fields.contains_key("history") {
            histories.push(Value::Object(fields));
        } else {
            let grant = decode_grant(fields, written_at)?;
            grants.insert(grant.record.token.fence, grant);
        }
    }
    let number = |name| server.get(name).and_then(Value::as_u64).unwrap_or(0);
    let text = |name| server.get(name).and_then(Value::as_str);
    Some(ServerState {
        // The checksum does not cover the version, and a state must not become a hand-over.
        condition: match (version, text("state")) {
            (1 | 2, None) | (3.., Some("closed")) => Condition::Closed,
            (3.., Some("open")) => Condition::Open,
            _ => return None,
        },
        next_fence: server.get("next_fence")?.as_u64()?,
        settle: Duration::from_secs(number("settle_s").min(MAX_SECONDS)),
        settling_left: Duration::from_millis(number("settling_ms").min(1000 * MAX_SECONDS)),
        boot_id: text("boot_id").map(str::to_owned),
        written_at,
        salt_key: text("secret").and_then(decode_salt_key),
        histories,
        grants,
        dead,
    })
}

fn decode_salt_key(digits: &str) -> Option<SaltKey> {
    let key = u128::from_str_radix(digits, 16).ok()?;
    (digits.len() == 32).then_some(SaltKey(key.to_be_bytes()))
}

fn decode_dead(fields: &Map<String, Value>) -> Option<SavedDead> {
    Some(SavedDead {
        fence: Fence(fields.get("dead")?.as_u64()?),
        left: Duration::from_millis(fields.get("left_ms")?.as_u64()?),
        end: decode_times(fields, END)?,
    })
}

fn decode_grant(mut fields: Map<String, Value>, written_at: ClockTimes) -> Option<SavedGrant> {
    let end = decode_times(&fields, END);
    if END.map(|name| fields.remove(name).is_some()) != [end.is_some(); 2] {
        return None;
    }
    let record = record::decode(fields)?;
    Some(SavedGrant {
        record,
        end,
        written_at,
    })
}

/// The fields with the end of a grant.
const END: [&str; 2] = ["end_ms", "end_boot_ms"];

fn decode_times(fields: &Map<String, Value>, names: [&str; 2]) -> Option<ClockTimes> {
    let [wall, boot] = names.map(|name| fields.get(name)?.as_u64());
    Some(ClockTimes {
        wall: Duration::from_millis(wall?),
        boot: Duration::from_millis(boot?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::wire::terms::{Kind, Limit, Terms};
    use crate::wire::token::{Fence, Salt, Token};

    fn state() -> ServerState {
        let written_at = ClockTimes {
            wall: Duration::from_millis(1_799_999_999_999),
            boot: Duration::from_millis(3),
        };
        let holder = |fence, kind, limit: u32, end| SavedGrant {
            end,
            written_at,
            record: HolderRecord {
                left: (fence == 8).then_some(Duration::from_secs(5)),
                age: Some(Duration::from_millis(4321)),
                ..HolderRecord::new(
                    "a\u{a0}\"key\"",
                    Terms::plain(kind, Limit::new(limit).expect("above zero")),
                    Token {
                        fence: Fence(fence),
                        salt: Salt(u64::MAX - fence),
                    },
                    Duration::from_secs(fence),
                )
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
            written_at,
            salt_key: Some(SaltKey(*b"0123456789abcdef")),
            histories: vec![json!({"key": "k", "history": []})],
            dead: vec![SavedDead {
                fence: Fence(3),
                left: Duration::from_millis(5),
                end,
            }],
            grants: BTreeMap::from([
                (Fence(7), holder(7, Kind::Lock, 1, Some(end))),
                (Fence(8), holder(8, Kind::Semaphore, 1_048_576, None)),
            ]),
        }
    }

    /// A snapshot and four batches, with what the file says after each of them. The last batch has
    /// two changes.
    fn with_batches() -> (Vec<String>, Vec<ServerState>) {
        let mut states = vec![ServerState {
            condition: Condition::Open,
            ..state()
        }];
        let mut pieces = vec![encode(&states[0])];
        for (at, ended, granted) in [(1, 7, 0..0), (2, 31, 8..10), (3, 32, 0..0), (4, 8, 20..21)] {
            let written_at = ClockTimes::default().after(Duration::from_millis(at));
            let grant = |fence| {
                let mut grant = state().grants[&Fence(8)].clone();
                grant.record.token.fence = Fence(fence);
                grant.record.lease = Duration::from_secs(100 + at);
                grant.written_at = written_at;
                (Fence(fence), grant)
            };
            let dead = |fence, milliseconds| SavedDead {
                fence: Fence(fence),
                left: Duration::from_millis(milliseconds),
                end: written_at,
            };
            let last = states.last().expect("there is one").clone();
            let batch = ServerState {
                next_fence: 1000 + at,
                settle: Duration::from_secs(at),
                written_at,
                grants: granted.map(grant).collect(),
                dead: vec![dead(ended, 0), dead(40 + at, 9)],
                histories: Vec::new(),
                ..last.clone()
            };
            pieces.push(encode_batch(&batch));
            let mut grants = last.grants;
            grants.remove(&Fence(ended));
            grants.extend(batch.grants);
            states.push(ServerState {
                next_fence: batch.next_fence,
                settle: batch.settle,
                dead: [last.dead, batch.dead].concat(),
                grants,
                ..states[0].clone()
            });
        }
        (pieces, states)
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
            grants: BTreeMap::new(),
            histories: Vec::new(),
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
        for grant in expected.grants.values_mut() {
            (grant.end, grant.written_at) = (None, ClockTimes::default());
        }
        (expected.dead, expected.salt_key) = (Vec::new(), None);
        expected.histories.clear();
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
                written_at: ClockTimes::default(),
                ..expected.clone()
            };
            assert_eq!(decode(file(version, &body).as_bytes()), Ok(expected));
        }
        for version in [3, 4] {
            let read = decode(file(version, &body).as_bytes());
            assert_eq!(read, Err(Unreadable::Broken));
        }
    }

    #[test]
    fn the_third_version_had_no_batches() {
        assert_eq!(decode(file(3, &body()).as_bytes()), Ok(state()));
    }

    #[test]
    fn what_is_not_known_of_the_server_is_left_out() {
        let more = body().replacen('{', r#"{"colour":"red","#, 1);
        assert_eq!(decode(file(4, &more).as_bytes()), Ok(state()));
        let other = body().replacen("closed", "ajar", 1);
        assert_eq!(decode(file(4, &other).as_bytes()), Err(Unreadable::Broken));
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
    fn a_batch_that_is_cut_short_changes_nothing() {
        let (pieces, states) = with_batches();
        let mut earlier = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            let expected = match index.checked_sub(1) {
                Some(before) => Ok(states[before].clone()),
                None => Err(Unreadable::Broken),
            };
            // Nothing at all is blank, and a part of the name is foreign.
            let least = if index == 0 { MAGIC.len() } else { 0 };
            // The empty line may be missing behind a batch.
            let most = piece.len() - usize::from(index > 0);
            for len in least..most {
                let mut cut = [&earlier, &piece.as_bytes()[..len]].concat();
                assert_eq!(decode(&cut), expected, "{len} bytes of {index}");
                // The file has its length already, but not its last bytes.
                cut.resize(earlier.len() + piece.len(), 0);
                assert_eq!(decode(&cut), expected, "{len} bytes of {index} and zeros");
            }
            let len = piece.len();
            for from in 1..len {
                // The file has later bytes, but not the earlier ones.
                let mut late = [&earlier, piece.as_bytes()].concat();
                late[earlier.len()..][..from].fill(0);
                if index > 0 {
                    assert_eq!(decode(&late), expected, "{from} zeros in {index}");
                }
            }
            earlier.extend(piece.as_bytes());
            assert_eq!(decode(&earlier), Ok(states[index].clone()), "{index}");
        }
    }

    #[test]
    fn a_changed_bit_is_damage_or_the_end_of_a_torn_file() {
        let (pieces, states) = with_batches();
        let content = pieces.concat().into_bytes();
        // The last batch, with the line feed before it.
        let last = content.len() - pieces[4].len() - 1;
        for (at, bit) in (0..content.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut changed = content.clone();
            changed[at] ^= 1 << bit;
            match decode(&changed) {
                // The last empty line has nothing to say.
                Ok(state) if at + 1 == content.len() => assert_eq!(state, states[4]),
                Ok(state) if at >= last => assert_eq!(state, states[3], "bit {bit} of {at}"),
                read => assert!(read.is_err() && at < last, "bit {bit} of {at}"),
            }
        }
    }

    #[test]
    fn a_whole_batch_of_a_newer_server_is_not_left_out() {
        let (pieces, _) = with_batches();
        let objects = pieces[1][18..].replacen('{', r#"{"colour":"red"} {"#, 2);
        let batch = format!(
            "\n{:016x} {objects}",
            checksum(objects.trim_end_matches('\n').as_bytes())
        );
        let content = format!("{}{batch}", pieces[0]);
        assert_eq!(decode(content.as_bytes()), Err(Unreadable::Broken));
    }

    #[test]
    fn files_of_others_and_of_newer_servers_are_told_apart() {
        assert_eq!(decode(b""), Err(Unreadable::Blank));
        assert_eq!(decode(&[0; 512]), Err(Unreadable::Blank));
        assert_eq!(decode(b"\0latchd-handover"), Err(Unreadable::Foreign));
        assert_eq!(decode(b"dflfnc1\n"), Err(Unreadable::Foreign));
        let newer = b"latchd-handover 5 0000000000000000\n{}\n";
        assert_eq!(decode(newer), Err(Unreadable::Newer(5)));
        assert_eq!(decode(b"latchd-handover x 0\n"), Err(Unreadable::Broken));
    }
}
