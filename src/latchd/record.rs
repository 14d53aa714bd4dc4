//! A holder as a JSON object on one line, for files and for the journal of a cluster. Pure.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{json, Map, Value};

use crate::latchd::table::{HolderRecord, Key};
use crate::wire::limits;
use crate::wire::terms::{Kind, Terms, Weight};

/// Encodes a holder. A fraction of a second of its lease is rounded up, so that no lease is written
/// as 0.
pub fn encode(record: &HolderRecord) -> Value {
    let seconds = |time: Duration| {
        let seconds = time.as_nanos().div_ceil(1_000_000_000);
        u64::try_from(seconds).unwrap_or(u64::MAX)
    };
    let mut fields = json!({
        "key": record.key.as_str(),
        "kind": record.terms.kind.word(),
        "limit": record.terms.limit.get(),
        "weight": record.terms.weight.get(),
        "numbers": record.numbers[..],
        "token": record.token.to_string(),
        "tag": record.tag.as_deref(),
        "kept": record.is_kept,
        "left_s": seconds(record.left.unwrap_or(record.lease)),
    });
    if record.left.is_some() {
        fields["lease_s"] = seconds(record.lease).into();
    }
    if let Some(age) = record.age {
        fields["age_ms"] = u64::try_from(age.as_millis()).unwrap_or(u64::MAX).into();
    }
    fields
}

/// Decodes a holder; `None` if the object is not a holder, contradicts itself, or has a field that
/// this version does not know. Such a field is from a newer version, and may mean that the holder
/// must be treated in another way. The first records had neither weights nor slot numbers. Only
/// those of a lease that goes on have its whole length, and only those of state files an age.
pub fn decode(mut fields: Map<String, Value>) -> Option<HolderRecord> {
    let mut take = |name| fields.remove(name);
    let (key, token) = (take("key")?, take("token")?);
    let kind = Kind::from_word(take("kind")?.as_str()?)?;
    let mut terms = Terms::plain(kind, limits::limit(take("limit")?.as_u64()?)?);
    if let Some(weight) = take("weight") {
        terms.weight = Weight::new(weight.as_u64()?.try_into().ok()?)?;
    }
    let numbers = match take("numbers") {
        Some(numbers) => numbers
            .as_array()?
            .iter()
            .map(|number| number.as_u64()?.try_into().ok())
            .collect(),
        None => Some(Arc::default()),
    };
    let tag = match take("tag") {
        Some(Value::String(tag)) => Some(tag.into()),
        Some(Value::Null) | None => None,
        Some(_) => return None,
    };
    let mut number = |name| match take(name) {
        Some(number) => Some(Some(number.as_u64()?)),
        None => Some(None),
    };
    let (left, lease, age) = (number("left_s")??, number("lease_s")?, number("age_ms")?);
    let seconds = |seconds: u64| Duration::from_secs(seconds.min(limits::MAX_SECONDS));
    let record = HolderRecord {
        key: Key::from(key.as_str().filter(|key| limits::is_key(key))?),
        terms,
        numbers: numbers?,
        token: token.as_str()?.parse().ok()?,
        lease: seconds(lease.unwrap_or(left)),
        left: lease.map(|_| seconds(left)),
        age: age.map(Duration::from_millis),
        is_kept: take("kept")?.as_bool()?,
        tag,
    };
    (record.is_possible() && fields.is_empty()).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::terms::Limit;
    use crate::wire::token::{Fence, Salt, Token};

    fn encode(record: &HolderRecord) -> String {
        super::encode(record).to_string()
    }

    fn decode(line: &str) -> Option<HolderRecord> {
        super::decode(serde_json::from_str(line).ok()?)
    }

    fn holder(kind: Kind, limit: u32) -> HolderRecord {
        let terms = Terms::plain(kind, Limit::new(limit).expect("above zero"));
        let token = Token {
            fence: Fence(7),
            salt: Salt(u64::MAX - 7),
        };
        HolderRecord::new("a\u{a0}\"key\"", terms, token, Duration::from_secs(33))
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
                terms: Terms {
                    weight: Weight::ONE,
                    ..Terms::LOCK
                },
                tag: Some("".into()),
                ..holder(Kind::Lock, 1)
            },
            HolderRecord {
                terms: Terms {
                    weight: Weight::new(3).expect("above zero"),
                    ..holder(Kind::Semaphore, 8).terms
                },
                numbers: [0, 2, 6].into(),
                ..holder(Kind::Semaphore, 8)
            },
            HolderRecord {
                left: Some(Duration::from_secs(3)),
                age: Some(Duration::from_secs(7)),
                ..holder(Kind::Lock, 1)
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
