//! The JSON of `stats` for the queues of keys: see latch-protocol(7), STATISTICS. Pure.

use super::stats::{put, separate, write_optional, write_string, Seconds};
use crate::latchd::table::{KeySnapshot, PlaceSnapshot};
use crate::wire::terms::{Kind, Weight};

/// The maximum number of holders, and also of waiters, shown for each key in a list of all keys.
pub const PLACES_OF_EACH: usize = 16;

/// The maximum number of holders, and also of waiters, shown for a key that the client names.
pub const PLACES_OF_ONE: usize = 64;

/// Appends one key with its holders and waiters. `clients` gives the peer and the tag of each of
/// them, in the same order. `drain` is called after every holder and every waiter, and may clear
/// `out`.
pub fn write_key<'a, E>(
    queue: &KeySnapshot,
    mut clients: impl Iterator<Item = (Option<&'a str>, Option<&'a str>)>,
    out: &mut Vec<u8>,
    mut drain: impl FnMut(&mut Vec<u8>) -> Result<(), E>,
) -> Result<(), E> {
    let kind = queue.kind.word();
    out.extend(b"{\"key\":");
    write_string(queue.key.as_str(), out);
    // A lock has many slots only while it is shared.
    let slot_count = queue.kind.slot_count(queue.limit);
    let (slots, taken) = match queue.kind {
        Kind::Lock if queue.taken == 0 || queue.taken == slot_count => (1, queue.taken.min(1)),
        _ => (slot_count, queue.taken),
    };
    put!(
        out,
        ",\"kind\":\"{kind}\",\"limit\":{},\"slots\":{slots},\"taken\":{taken},\
         \"holder_count\":{},\"waiter_count\":{}",
        queue.limit.get(),
        queue.holder_count,
        queue.waiter_count
    );
    for (name, places) in [("holders", &queue.holders), ("waiters", &queue.waiters)] {
        put!(out, ",\"{name}\":[");
        for place in places {
            separate(out);
            let client = clients.next().unwrap_or_default();
            write_place(queue.kind, place, client, out);
            drain(out)?;
        }
        out.push(b']');
    }
    out.push(b'}');
    drain(out)
}

fn write_place(
    kind: Kind,
    place: &PlaceSnapshot,
    client: (Option<&str>, Option<&str>),
    out: &mut Vec<u8>,
) {
    let (peer, tag) = client;
    put!(out, "{{\"conn_id\":{}", place.conn);
    for (name, text) in [("peer", peer), ("tag", tag)] {
        put!(out, ",\"{name}\":");
        write_optional(text, out);
    }
    match kind {
        Kind::Lock => {
            let is_shared = place.weight != Weight::WHOLE;
            put!(out, ",\"slots\":1,\"shared\":{is_shared}");
        }
        Kind::Semaphore => put!(out, ",\"slots\":{}", place.weight.get()),
    }
    if place.is_kept {
        out.extend(b",\"kept\":true");
    }
    put!(out, ",\"age_s\":{}", Seconds(place.age));
    if let Some((fence, left)) = place.held {
        // A string, because JSON readers may round a number as large as a fence.
        put!(
            out,
            ",\"fence\":\"{}\",\"lease_expires_in_s\":{},\"lease_s\":{}",
            fence.0,
            Seconds(left),
            place.lease.as_secs()
        );
    }
    match place.numbers[..] {
        [] => {}
        [number] => put!(out, ",\"slot\":{number}"),
        ref numbers => put!(out, ",\"slot_numbers\":{numbers:?}"),
    }
    out.push(b'}');
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use super::*;
    use crate::latchd::table::{ConnId, Key};
    use crate::wire::terms::Limit;
    use crate::wire::token::Fence;

    #[test]
    fn holders_and_waiters_are_listed_with_their_clients() {
        let place = |conn, held| PlaceSnapshot {
            conn: ConnId(conn),
            weight: Weight::WHOLE,
            numbers: [].into(),
            is_kept: false,
            lease: Duration::from_secs(33),
            age: Duration::from_millis(1500),
            held,
        };
        let queue = KeySnapshot {
            key: Key::from("k\"y"),
            kind: Kind::Lock,
            limit: Limit::ONE,
            taken: 1_048_576,
            holder_count: 1,
            waiter_count: 2,
            idle_for: Duration::ZERO,
            holders: vec![place(7, Some((Fence(12), Duration::from_secs(3))))],
            waiters: vec![place(8, None)],
        };
        let clients = [(Some("127.0.0.1:4711"), Some("a\tb")), (None, None)];
        let mut out = Vec::new();
        let go_on = |_: &mut Vec<u8>| Ok::<(), Infallible>(());
        let written = write_key(&queue, clients.into_iter(), &mut out, go_on);
        assert_eq!(written, Ok(()));
        assert_eq!(
            String::from_utf8(out).expect("JSON is text"),
            concat!(
                r#"{"key":"k\"y","kind":"lock","limit":1,"slots":1,"taken":1,"#,
                r#""holder_count":1,"waiter_count":2,"#,
                r#""holders":[{"conn_id":7,"peer":"127.0.0.1:4711","tag":"a\u0009b","#,
                r#""slots":1,"shared":false,"age_s":1.500,"fence":"12","lease_expires_in_s":3.000,"lease_s":33}],"#,
                r#""waiters":[{"conn_id":8,"peer":null,"tag":null,"slots":1,"shared":false,"#,
                r#""age_s":1.500}]}"#
            )
        );
    }

    #[test]
    fn one_slot_has_a_number_and_several_have_a_list() {
        let written = |numbers: &[u32]| {
            let place = PlaceSnapshot {
                conn: ConnId(1),
                weight: Weight::ONE,
                numbers: numbers.into(),
                is_kept: false,
                lease: Duration::from_secs(33),
                age: Duration::ZERO,
                held: None,
            };
            let mut out = Vec::new();
            write_place(Kind::Semaphore, &place, (None, None), &mut out);
            String::from_utf8(out).expect("JSON is text")
        };
        let rest = r#"{"conn_id":1,"peer":null,"tag":null,"slots":1,"age_s":0.000"#;
        assert_eq!(written(&[]), format!("{rest}}}"));
        assert_eq!(written(&[4]), format!(r#"{rest},"slot":4}}"#));
        assert_eq!(
            written(&[0, 9]),
            format!(r#"{rest},"slot_numbers":[0, 9]}}"#)
        );
    }

    #[test]
    fn a_lock_is_one_slot_and_says_whether_it_is_shared_or_kept() {
        let written = |weight, is_kept| {
            let place = PlaceSnapshot {
                conn: ConnId(0),
                weight,
                numbers: [].into(),
                is_kept,
                lease: Duration::ZERO,
                age: Duration::ZERO,
                held: None,
            };
            let mut out = Vec::new();
            write_place(Kind::Lock, &place, (None, None), &mut out);
            String::from_utf8(out).expect("JSON is text")
        };
        let with = |words| {
            format!(r#"{{"conn_id":0,"peer":null,"tag":null,"slots":1{words},"age_s":0.000}}"#)
        };
        assert_eq!(written(Weight::WHOLE, false), with(r#","shared":false"#));
        assert_eq!(
            written(Weight::WHOLE, true),
            with(r#","shared":false,"kept":true"#)
        );
        assert_eq!(written(Weight::ONE, false), with(r#","shared":true"#));
    }
}
