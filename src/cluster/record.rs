//! What is in etcd: the names of the keys, and a holder as text. Pure.

use std::time::Duration;

use crate::table::{HolderRecord, Key, Kind, Limit};
use crate::text::{digits, hex};
use crate::token::{Fence, Salt, Token};

/// The longest lease, in seconds: its nanoseconds fit into 64 bits, as on the wire.
const MAX_SECONDS: u64 = i64::MAX as u64 / 1_000_000_000;

/// The names of the keys in etcd, which begin with this.
pub struct Names(pub String);

impl Names {
    /// The office: who is active.
    pub fn leader(&self) -> Vec<u8> {
        format!("{}/leader", self.0).into_bytes()
    }

    /// No fence above its value has been used.
    pub fn fence(&self) -> Vec<u8> {
        format!("{}/fence", self.0).into_bytes()
    }

    pub fn holder(&self, fence: Fence) -> Vec<u8> {
        format!("{}/h/{:016x}", self.0, fence.0).into_bytes()
    }

    /// The first key that a holder may have, and the first one behind those of all holders.
    pub fn holders(&self) -> (Vec<u8>, Vec<u8>) {
        let name = |last| format!("{}/h{last}", self.0).into_bytes();
        (name('/'), name('0'))
    }

    /// The holder in a key of etcd; `None` if it is none.
    pub fn decode(&self, name: &[u8], value: &[u8]) -> Option<HolderRecord> {
        let (first, _) = self.holders();
        let fence = hex(std::str::from_utf8(name.strip_prefix(&first[..])?).ok()?)?;
        let mut words = std::str::from_utf8(value).ok()?.splitn(5, ' ');
        let kind = match words.next()? {
            "l" => Kind::Lock,
            "s" => Kind::Semaphore,
            _ => return None,
        };
        let limit = Limit::new(digits(words.next()?)?)?;
        let seconds = digits(words.next()?).filter(|seconds| *seconds <= MAX_SECONDS)?;
        let salt = hex(words.next()?)?;
        let key = words.next()?;
        let is_possible = kind == Kind::Semaphore || limit == Limit::ONE;
        (is_possible && !key.is_empty()).then(|| HolderRecord {
            is_kept: false,
            tag: None,
            key: Key::from(key),
            kind,
            limit,
            token: Token {
                fence: Fence(fence),
                salt: Salt(salt),
            },
            lease: Duration::from_secs(seconds),
        })
    }
}

/// The value of a holder's key.
pub fn encode(record: &HolderRecord) -> String {
    let kind = match record.kind {
        Kind::Lock => 'l',
        Kind::Semaphore => 's',
    };
    format!(
        "{kind} {} {} {:016x} {}",
        record.limit.get(),
        record.lease.as_secs(),
        record.token.salt.0,
        record.key.as_str()
    )
}

/// The ceiling in the value of the fence key.
pub fn decode_ceiling(value: &[u8]) -> Option<u64> {
    digits(std::str::from_utf8(value).ok()?.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, kind: Kind, limit: u32) -> HolderRecord {
        HolderRecord {
            is_kept: false,
            tag: None,
            key: Key::from(key),
            kind,
            limit: Limit::new(limit).expect("above zero"),
            token: Token {
                fence: Fence(0x1a),
                salt: Salt(u64::MAX - 1),
            },
            lease: Duration::from_secs(33),
        }
    }

    #[test]
    fn a_holder_survives_its_text() {
        let names = Names("a/b".into());
        for record in [
            record("k", Kind::Lock, 1),
            record("with blanks ü", Kind::Semaphore, u32::MAX),
        ] {
            let name = names.holder(record.token.fence);
            assert_eq!(name, b"a/b/h/000000000000001a");
            let value = encode(&record);
            assert_eq!(names.decode(&name, value.as_bytes()), Some(record));
        }
        let value = encode(&record("with blanks", Kind::Semaphore, 3));
        assert_eq!(value, "s 3 33 fffffffffffffffe with blanks");
    }

    #[test]
    fn what_is_no_holder_is_none() {
        let names = Names("p".into());
        let name = names.holder(Fence(1));
        let good = "l 1 33 00000000000000ff k";
        assert!(names.decode(&name, good.as_bytes()).is_some());
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
        ] {
            assert_eq!(names.decode(&name, value.as_bytes()), None, "{value}");
        }
        assert_eq!(names.decode(&name, b"l 1 33 00000000000000ff \xff"), None);
        for name in [
            "p/h/1",
            "p/h/",
            "p/x",
            "q/h/0000000000000001",
            "p/h/000000000000000x",
        ] {
            assert_eq!(
                names.decode(name.as_bytes(), good.as_bytes()),
                None,
                "{name}"
            );
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
