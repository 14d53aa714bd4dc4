//! The content of etcd: the names of the keys, and holders as text. Pure: no I/O and no clock.

use std::time::Duration;

use crate::latchd::record;
use crate::latchd::table::{HolderRecord, Key};
use crate::os::text::{digits, hex};
use crate::wire::limits::MAX_SECONDS;
use crate::wire::terms::{Kind, Limit, Terms, Weight};
use crate::wire::token::{Fence, Salt, Token};

/// The first word of a record in named fields, which version 1.1 wrote.
const NAMED: &str = "n";

/// The names of the keys in etcd. The string is their prefix.
pub struct Names(pub String);

impl Names {
    /// The leader key, whose value is the address of the active server.
    pub fn leader(&self) -> Vec<u8> {
        format!("{}/leader", self.0).into_bytes()
    }

    /// The fence key. No fence above its value has been used.
    pub fn fence(&self) -> Vec<u8> {
        format!("{}/fence", self.0).into_bytes()
    }

    pub fn holder(&self, fence: Fence) -> Vec<u8> {
        format!("{}/h/{:016x}", self.0, fence.0).into_bytes()
    }

    /// The range of the holders' keys: the first possible key, and the first key beyond the range.
    pub fn holders(&self) -> (Vec<u8>, Vec<u8>) {
        let name = |last| format!("{}/h{last}", self.0).into_bytes();
        (name('/'), name('0'))
    }

    /// The fence in the name of a holder's key; `None` if this is not the key of a holder.
    pub fn fence_in(&self, name: &[u8]) -> Option<Fence> {
        let (first, _) = self.holders();
        let digits = std::str::from_utf8(name.strip_prefix(&first[..])?).ok()?;
        hex(digits).map(Fence)
    }
}

/// Reads the holder with this fence from the value of its key; `None` if this version cannot read
/// the value.
pub fn decode(fence: Fence, value: &[u8]) -> Option<HolderRecord> {
    let value = std::str::from_utf8(value).ok()?;
    if value.starts_with('{') {
        let fields = serde_json::from_str(value).ok()?;
        return record::decode(fields).filter(|record| record.token.fence == fence);
    }
    let (letter, fields) = value.split_once(' ')?;
    let mut record = match letter {
        NAMED => decode_named(fields)?,
        _ => decode_plain(letter, fields)?,
    };
    record.token.fence = fence;
    (record.is_possible() && !record.key.as_str().is_empty()).then_some(record)
}

/// Reads a holder in the form that every version can read and write: the letter of its kind, its
/// limit, lease, salt and key.
fn decode_plain(letter: &str, fields: &str) -> Option<HolderRecord> {
    let mut words = fields.splitn(4, ' ');
    let mut record = blank_record();
    record.terms = Terms::plain(kind(letter)?, Limit::new(digits(words.next()?)?)?);
    record.lease = lease(words.next()?)?;
    record.token.salt = Salt(hex(words.next()?)?);
    record.key = Key::from(words.next()?);
    Some(record)
}

/// Reads a holder in named fields; `None` if a field is unknown, because a newer version wrote it.
fn decode_named(fields: &str) -> Option<HolderRecord> {
    let mut record = blank_record();
    let mut weight = None;
    for field in fields.split(' ') {
        let (name, value) = field.split_once('=')?;
        match name {
            "kind" => record.terms.kind = kind(value)?,
            "limit" => record.terms.limit = Limit::new(digits(value)?)?,
            "lease" => record.lease = lease(value)?,
            "weight" => weight = Some(Weight::new(digits(value)?)?),
            "numbers" => record.numbers = value.split(',').map(digits).collect::<Option<_>>()?,
            "salt" => record.token.salt = Salt(hex(value)?),
            "kept" => record.is_kept = value == "yes",
            "tag" => record.tag = Some(without_escapes(value).into()),
            "key" => record.key = Key::from(without_escapes(value).as_str()),
            _ => return None,
        }
    }
    let plain = Terms::plain(record.terms.kind, record.terms.limit);
    record.terms.weight = weight.unwrap_or(plain.weight);
    (!record.lease.is_zero()).then_some(record)
}

/// A record to be filled in.
fn blank_record() -> HolderRecord {
    let token = Token {
        fence: Fence(0),
        salt: Salt(0),
    };
    HolderRecord::new("", Terms::LOCK, token, Duration::ZERO)
}

fn kind(letter: &str) -> Option<Kind> {
    match letter {
        "l" => Some(Kind::Lock),
        "s" => Some(Kind::Semaphore),
        _ => None,
    }
}

fn lease(seconds: &str) -> Option<Duration> {
    let seconds = digits(seconds).filter(|seconds| *seconds <= MAX_SECONDS)?;
    Some(Duration::from_secs(seconds))
}

/// The value of a holder's key. Every version can read the plain form, so a holder is written in
/// that form if it can express the holder.
pub fn encode(record: &HolderRecord) -> String {
    let Terms { kind, limit, .. } = record.terms;
    let is_plain = record.terms == Terms::plain(kind, limit) && record.numbers.is_empty();
    if !is_plain || record.is_kept || record.tag.is_some() {
        return record::encode(record).to_string();
    }
    let kind = match kind {
        Kind::Lock => 'l',
        Kind::Semaphore => 's',
    };
    let (limit, lease) = (limit.get(), record.lease.as_secs());
    let (salt, key) = (record.token.salt.0, record.key.as_str());
    format!("{kind} {limit} {lease} {salt:016x} {key}")
}

fn without_escapes(text: &str) -> String {
    text.replace("%20", " ").replace("%25", "%")
}

/// Reads the value of the fence key, which is the highest fence that may have been used.
pub fn decode_ceiling(value: &[u8]) -> Option<u64> {
    digits(std::str::from_utf8(value).ok()?.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, kind: Kind, limit: u32) -> HolderRecord {
        let terms = Terms::plain(kind, Limit::new(limit).expect("above zero"));
        let token = Token {
            fence: Fence(0x1a),
            salt: Salt(u64::MAX - 1),
        };
        HolderRecord::new(key, terms, token, Duration::from_secs(33))
    }

    #[test]
    fn a_holder_survives_its_text() {
        let names = Names("a/b".into());
        for (record, is_plain) in [
            (record("k", Kind::Lock, 1), true),
            (record("with blanks ü", Kind::Semaphore, u32::MAX), true),
            (
                HolderRecord {
                    terms: Terms {
                        weight: Weight::ONE,
                        ..Terms::LOCK
                    },
                    ..record("shared", Kind::Lock, 1)
                },
                false,
            ),
            (
                HolderRecord {
                    is_kept: true,
                    ..record("k", Kind::Semaphore, 3)
                },
                false,
            ),
        ] {
            let name = names.holder(record.token.fence);
            assert_eq!(name, b"a/b/h/000000000000001a");
            let value = encode(&record);
            assert_eq!(value.starts_with('{'), !is_plain, "{value}");
            assert_eq!(names.fence_in(&name), Some(record.token.fence));
            assert_eq!(decode(Fence(0x1b), value.as_bytes()).is_some(), is_plain);
            assert_eq!(decode(Fence(0x1a), value.as_bytes()), Some(record));
        }
        let value = encode(&record("with blanks", Kind::Semaphore, 3));
        assert_eq!(value, "s 3 33 fffffffffffffffe with blanks");
    }

    #[test]
    fn a_record_of_version_1_1_can_be_read() {
        let value = "n kind=s limit=3 lease=33 salt=fffffffffffffffe weight=2 numbers=0,2 \
                     kept=yes tag=100%25%20of%20it key=a%20b";
        let expected = HolderRecord {
            terms: Terms {
                weight: Weight::new(2).expect("above zero"),
                ..record("", Kind::Semaphore, 3).terms
            },
            numbers: [0, 2].into(),
            is_kept: true,
            tag: Some("100% of it".into()),
            ..record("a b", Kind::Semaphore, 3)
        };
        assert_eq!(decode(Fence(0x1a), value.as_bytes()), Some(expected));
    }

    #[test]
    fn a_record_of_another_form_cannot_be_read() {
        let decode = |value: &[u8]| decode(Fence(1), value);
        let good = "l 1 33 00000000000000ff k";
        assert!(decode(good.as_bytes()).is_some());
        for value in [
            "",
            "l 1 33 00000000000000ff",
            "l 1 33 00000000000000ff ",
            "l 2 33 00000000000000ff k",
            "s 0 33 00000000000000ff k",
            "s 4294967296 33 00000000000000ff k",
            "x 1 33 00000000000000ff k",
            "l 1 33 ff k",
            "l 1 33 +0000000000000ff k",
            "l 1 -3 00000000000000ff k",
            "l 1 9223372037 00000000000000ff k",
            "l 1 18446744073709551615 00000000000000ff k",
            "l  1 33 00000000000000ff k",
            "n kind=l limit=1 lease=33 salt=00000000000000ff",
            "n kind=l limit=1 salt=00000000000000ff key=k",
            "n kind=l limit=1 lease=33 salt=00000000000000ff key=k colour=2",
            "n kind=l limit=1 lease=33 salt=00000000000000ff key=k weight=0",
            "n kind=l limit=1 lease=33 salt=00000000000000ff key=k weight=1048577",
            "n kind=l limit=1 lease=33 salt=00000000000000ff key=k weight=1 numbers=0",
            "n kind=s limit=3 lease=33 salt=00000000000000ff key=k weight=4",
            "n kind=s limit=3 lease=33 salt=00000000000000ff key=k numbers=3",
            "n kind=s limit=3 lease=33 salt=00000000000000ff key=k weight=2 numbers=0",
            "n kind=s limit=3 lease=33 salt=00000000000000ff key=k weight=2 numbers=1,1",
            "n kind=s limit=3 lease=33 salt=00000000000000ff key=k numbers=",
            "n kind=l limit=2 lease=33 salt=00000000000000ff key=k",
            "n kind=l limit=1 lease=33 salt=00000000000000ff key",
        ] {
            assert_eq!(decode(value.as_bytes()), None, "{value}");
        }
        assert_eq!(decode(b"l 1 33 00000000000000ff \xff"), None);
    }

    #[test]
    fn other_names_are_not_of_holders() {
        let names = Names("p".into());
        for name in [
            "p/h/1",
            "p/h/",
            "p/x",
            "q/h/0000000000000001",
            "p/h/000000000000000x",
            "p/h/h/0000000000000001",
            "p/h/leader",
        ] {
            assert_eq!(names.fence_in(name.as_bytes()), None, "{name}");
        }
    }

    #[test]
    fn all_holders_lie_between_the_two_ends() {
        let names = Names("p".into());
        let (first, end) = names.holders();
        for fence in [0, 1, u64::MAX] {
            let name = names.holder(Fence(fence));
            assert!(first < name && name < end);
        }
        for other in [names.leader(), names.fence()] {
            assert!(other < first || end <= other);
        }
    }

    #[test]
    fn a_ceiling_is_a_decimal_number() {
        assert_eq!(decode_ceiling(b"1048575"), Some(1_048_575));
        assert_eq!(decode_ceiling(b"12\n"), Some(12)); // as `etcdctl put` may leave it
        for value in [&b""[..], b"x", b"-1", b"18446744073709551616", b"\xff"] {
            assert_eq!(decode_ceiling(value), None);
        }
    }
}
