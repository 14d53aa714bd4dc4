//! A holder as a JSON object on one line, for files and for the journal of a cluster.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{json, Map, Value};

use super::limits;
use crate::table::{HolderRecord, Key};
use crate::terms::{Kind, Weight};

/// Encodes a holder. A fraction of a second of its lease is rounded up, so that no lease is written
/// as 0.
pub fn encode(record: &HolderRecord) -> Value {
    let lease = record.lease.as_nanos().div_ceil(1_000_000_000);
    json!({
        "key": record.key.as_str(),
        "kind": record.kind.word(),
        "limit": record.limit.get(),
        "weight": record.weight.get(),
        "numbers": record.numbers[..],
        "token": record.token.to_string(),
        "tag": record.tag.as_deref(),
        "kept": record.is_kept,
        "left_s": u64::try_from(lease).unwrap_or(u64::MAX),
    })
}

/// Decodes a holder; `None` if the object is not a holder, contradicts itself, or has a field that
/// this version does not know. Such a field is from a newer version, and may mean that the holder
/// must be treated in another way. The first records had neither weights nor slot numbers.
pub fn decode(mut fields: Map<String, Value>) -> Option<HolderRecord> {
    let mut take = |name| fields.remove(name);
    let (key, token) = (take("key")?, take("token")?);
    let kind = Kind::from_word(take("kind")?.as_str()?)?;
    let weight = match take("weight") {
        Some(weight) => Weight::new(weight.as_u64()?.try_into().ok()?)?,
        None => Weight::plain(kind),
    };
    let numbers = match take("numbers") {
        Some(numbers) => numbers.as_array()?.iter().map(slot_number).collect(),
        None => Some(Arc::default()),
    };
    let tag = match take("tag") {
        Some(Value::String(tag)) => Some(tag.into()),
        Some(Value::Null) | None => None,
        Some(_) => return None,
    };
    let record = HolderRecord {
        key: Key::from(key.as_str().filter(|key| limits::is_key(key))?),
        kind,
        limit: limits::limit(take("limit")?.as_u64()?)?,
        weight,
        numbers: numbers?,
        token: token.as_str()?.parse().ok()?,
        lease: Duration::from_secs(take("left_s")?.as_u64()?.min(limits::MAX_SECONDS)),
        is_kept: take("kept")?.as_bool()?,
        tag,
    };
    (record.is_possible() && fields.is_empty()).then_some(record)
}

fn slot_number(number: &Value) -> Option<u32> {
    number.as_u64()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terms::Limit;
    use crate::token::{Fence, Salt, Token};

    fn encode(record: &HolderRecord) -> String {
        super::encode(record).to_string()
    }

    fn decode(line: &str) -> Option<HolderRecord> {
        super::decode(serde_json::from_str(line).ok()?)
    }

    fn holder(kind: Kind, limit: u32) -> HolderRecord {
        HolderRecord {
            key: Key::from("a\u{a0}\"key\""),
            kind,
            limit: Limit::new(limit).expect("above zero"),
            weight: Weight::plain(kind),
            numbers: Arc::default(),
            token: Token {
                fence: Fence(7),
                salt: Salt(u64::MAX - 7),
            },
            lease: Duration::from_secs(33),
            is_kept: false,
            tag: None,
        }
    }

    #[test]
    fn a_holder_survives_its_text() {
        for record in [
            holder(Kind::Lock, 1),
            holder(Kind::Semaphore, 1_048_576),
            HolderRecord {
                is_kept: true,
                tag: Some("night\nly \u{1f511}".into()),
                ..holder(Kind::Lock, 1)
            },
            HolderRecord {
                weight: Weight::ONE,
                tag: Some("".into()),
                ..holder(Kind::Lock, 1)
            },
            HolderRecord {
                weight: Weight::new(3).expect("above zero"),
                numbers: [0, 2, 6].into(),
                ..holder(Kind::Semaphore, 8)
            },
            HolderRecord {
                lease: Duration::from_secs(limits::MAX_SECONDS),
                numbers: [7].into(),
                ..holder(Kind::Semaphore, 8)
            },
        ] {
            let line = encode(&record);
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(decode(&line), Some(record), "{line}");
        }
    }

    #[test]
    fn a_fraction_of_a_second_is_rounded_up() {
        let line = encode(&HolderRecord {
            lease: Duration::from_millis(1),
            ..holder(Kind::Lock, 1)
        });
        let read = decode(&line).expect("a holder");
        assert_eq!(read.lease, Duration::from_secs(1));
    }

    /// The record of a lock, with one field replaced or added, or left out for `None`.
    fn with(name: &str, value: Option<Value>) -> Option<HolderRecord> {
        let mut line: Value = serde_json::from_str(&encode(&holder(Kind::Lock, 1))).expect("JSON");
        let fields = line.as_object_mut().expect("an object");
        match value {
            Some(value) => fields.insert(name.to_owned(), value),
            None => fields.remove(name),
        };
        decode(&line.to_string())
    }

    #[test]
    fn the_first_records_had_neither_weights_nor_numbers() {
        let plain = Some(holder(Kind::Lock, 1));
        assert_eq!(with("weight", None), plain);
        assert_eq!(with("numbers", None), plain);
        assert_eq!(with("tag", None), plain);
    }

    #[test]
    fn what_is_no_holder_of_this_version_is_refused() {
        for (name, value) in [
            ("key", json!("")),
            ("key", json!("a b")),
            ("kind", json!("mutex")),
            ("limit", json!(0)),
            ("limit", json!(2)),
            ("limit", json!(4_294_967_297_u64)),
            ("weight", json!(0)),
            ("weight", json!(1_048_577)),
            ("numbers", json!([0])),
            ("token", json!("ff")),
            ("tag", json!(7)),
            ("kept", json!("yes")),
            ("left_s", json!(-1)),
            ("colour", json!("red")),
        ] {
            assert_eq!(with(name, Some(value.clone())), None, "{name}: {value}");
        }
        for name in ["key", "kind", "limit", "token", "kept", "left_s"] {
            assert_eq!(with(name, None), None, "{name}");
        }
        for line in ["", "{}", "[]", "7", "{\"key\":\"a\""] {
            assert_eq!(decode(line), None, "{line}");
        }
    }
}
