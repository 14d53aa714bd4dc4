//! The counters and gauges of a server. latch-protocol(7), STATISTICS, describes their JSON.

use std::time::{Duration, Instant};

use super::stats::{put, write_string, Seconds};
use crate::table::{CountersSnapshot, Expectation, Key, KeySnapshot};
use crate::terms::{Kind, Refusal};

/// The numbers of one server, for its JSON and for Prometheus. They are stored as text, so that a
/// reader needs no numeric type for each of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Figures {
    pub version: Option<String>,
    pub counters: Vec<Figure>,
    pub gauges: Vec<Figure>,
    /// How long the claims that were queued waited for their grants.
    pub waits: Option<Histogram>,
}

/// A name with one number, or with several numbers.
pub type Figure = (&'static str, Amount);

#[derive(Debug, PartialEq, Eq)]
pub enum Amount {
    /// `None` if the server does not have this number.
    One(Option<String>),
    /// Several numbers, each with a name of its own.
    ByName(Vec<(String, String)>),
}

#[derive(Debug, PartialEq, Eq)]
pub struct Histogram {
    pub count: String,
    pub sum: String,
    /// The buckets: an upper bound in seconds, and the number of waits up to that bound.
    pub buckets: Vec<(String, String)>,
}

/// The oldest wait and the oldest hold, both of locks and of semaphores.
#[derive(Default)]
pub struct Oldest {
    waits: [Option<(Key, Duration)>; Kind::ALL.len()],
    holds: [Option<(Key, Duration)>; Kind::ALL.len()],
}

impl Oldest {
    /// Takes a key into account. A key's first waiter is its oldest waiter, and its first holder is
    /// its oldest holder.
    pub fn add(&mut self, key: &KeySnapshot) {
        let at = key.kind as usize;
        for (oldest, places) in [
            (&mut self.waits[at], &key.waiters),
            (&mut self.holds[at], &key.holders),
        ] {
            // A grant that its client has asked to keep is held for as long as it was meant to be.
            let Some(first) = places.iter().find(|place| !place.is_kept) else {
                continue;
            };
            if oldest.as_ref().is_none_or(|(_, age)| first.age > *age) {
                *oldest = Some((key.key.clone(), first.age));
            }
        }
    }
}

impl Figures {
    /// Collects the numbers of a server. `oldest` must have taken all keys into account. `expected`
    /// has the keys under which work is expected to succeed, and the present time.
    pub fn new(
        connection_count: usize,
        bound_holder_count: usize,
        dropped_line_count: usize,
        worst_case_bytes: u64,
        snapshot: &CountersSnapshot,
        oldest: &Oldest,
        (expected, now): &(Vec<(Key, Expectation)>, Instant),
    ) -> Figures {
        let counters = &snapshot.counters;
        let refusals = Refusal::ALL.map(|(refusal, name)| (name, counters.refusals(refusal)));
        let refusals = [("busy", counters.busy)].into_iter().chain(refusals);
        let refusals = refusals.map(|(name, count)| (name.to_owned(), count.to_string()));
        let keys = [snapshot.lock_count, snapshot.semaphore_count].map(|count| count.to_string());
        let age = |oldest: &Option<(Key, Duration)>| {
            let age = oldest.as_ref().map_or(Duration::ZERO, |(_, age)| *age);
            Seconds(age).to_string()
        };
        let waits = &counters.waits;
        let buckets = waits.cumulative();
        let buckets = buckets.map(|(bound, count)| (Seconds(bound).to_string(), count.to_string()));
        Figures {
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            counters: vec![
                one("grants", counters.grants),
                one("releases", counters.releases),
                one("renewals", counters.renewals),
                one("expiries", counters.expiries),
                one("breaks", counters.breaks),
                one("abandonments", counters.abandonments),
                one("wait_timeouts", counters.wait_timeouts),
                one("disconnects", counters.disconnects),
                one("dropped_log_lines", dropped_line_count),
                ("refusals", Amount::ByName(refusals.collect())),
            ],
            gauges: vec![
                one("connections", connection_count),
                ("keys", by_kind(keys)),
                one("idle_keys", snapshot.idle_key_count),
                one("holders", snapshot.holder_count),
                one("bound_holders", bound_holder_count),
                one("kept_holders", snapshot.kept_count),
                one("waiters", snapshot.waiter_count),
                (
                    "fences_left",
                    Amount::One(snapshot.fences_left.map(|left| left.to_string())),
                ),
                one("draining", u8::from(snapshot.is_draining)),
                one("settling_s", Seconds(snapshot.settling_left)),
                ("oldest_wait_s", by_kind(oldest.waits.each_ref().map(age))),
                ("oldest_hold_s", by_kind(oldest.holds.each_ref().map(age))),
                one("worst_case_bytes", worst_case_bytes),
                ("success_age_s", by_key(expected, |it| it.age(*now))),
                ("expected_s", by_key(expected, |it| it.within)),
            ],
            waits: Some(Histogram {
                count: waits.count().to_string(),
                sum: Seconds(waits.sum).to_string(),
                buckets: buckets.collect(),
            }),
        }
    }

    /// Appends the numbers as one JSON object on one line, with the keys of the oldest waits and
    /// holds.
    pub fn write_json(&self, oldest: &Oldest, out: &mut Vec<u8>) {
        out.push(b'{');
        write_group("counters", &self.counters, out);
        if let Some(waits) = &self.waits {
            write_waits(waits, out);
        }
        write_group("gauges", &self.gauges, out);
        for (name, list) in [("wait", &oldest.waits), ("hold", &oldest.holds)] {
            put!(out, "\"oldest_{name}\":{{");
            for (at, ((_, kind), oldest)) in Kind::ALL.iter().zip(list).enumerate() {
                separate(at, out);
                put!(out, "\"{kind}\":");
                match oldest {
                    Some((key, _)) => write_string(key.as_str(), out),
                    None => out.extend(b"null"),
                }
            }
            out.extend(b"},");
        }
        put!(
            out,
            "\"version\":\"{}\"}}",
            self.version.as_deref().unwrap_or_default()
        );
    }
}

fn one(name: &'static str, number: impl ToString) -> Figure {
    (name, Amount::One(Some(number.to_string())))
}

fn by_kind(numbers: [String; Kind::ALL.len()]) -> Amount {
    let named = Kind::ALL.iter().zip(numbers);
    Amount::ByName(
        named
            .map(|((_, kind), number)| ((*kind).to_owned(), number))
            .collect(),
    )
}

fn by_key(expected: &[(Key, Expectation)], time: impl Fn(&Expectation) -> Duration) -> Amount {
    let named = expected.iter().map(|(key, expectation)| {
        let time = Seconds(time(expectation)).to_string();
        (key.as_str().to_owned(), time)
    });
    Amount::ByName(named.collect())
}

fn write_group(name: &str, figures: &[Figure], out: &mut Vec<u8>) {
    put!(out, "\"{name}\":{{");
    for (at, (name, amount)) in figures.iter().enumerate() {
        separate(at, out);
        put!(out, "\"{name}\":");
        match amount {
            Amount::One(number) => put!(out, "{}", number.as_deref().unwrap_or("null")),
            Amount::ByName(numbers) => {
                out.push(b'{');
                for (at, (name, number)) in numbers.iter().enumerate() {
                    separate(at, out);
                    write_string(name, out);
                    put!(out, ":{number}");
                }
                out.push(b'}');
            }
        }
    }
    out.extend(b"},");
}

fn write_waits(waits: &Histogram, out: &mut Vec<u8>) {
    let Histogram {
        count,
        sum,
        buckets,
    } = waits;
    put!(
        out,
        "\"grant_waits\":{{\"count\":{count},\"sum_s\":{sum},\"buckets\":["
    );
    for (at, (bound, count)) in buckets.iter().enumerate() {
        separate(at, out);
        put!(out, "{{\"le_s\":{bound},\"count\":{count}}}");
    }
    out.extend(b"]},");
}

/// Writes the comma in front of each entry except the first.
fn separate(at: usize, out: &mut Vec<u8>) {
    if at > 0 {
        out.push(b',');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{ConnId, Counters, PlaceSnapshot};
    use crate::terms::{Limit, Weight};

    fn snapshot() -> CountersSnapshot {
        let mut counters = Counters::default();
        counters.grants = u64::MAX;
        CountersSnapshot {
            counters,
            lock_count: 1,
            semaphore_count: 2,
            idle_key_count: 3,
            holder_count: 4,
            kept_count: 2,
            waiter_count: 5,
            fences_left: None,
            is_draining: true,
            settling_left: Duration::from_millis(1500),
        }
    }

    fn key(name: &str, kind: Kind, held_for: u64, waited_for: Option<u64>) -> KeySnapshot {
        let place = |age| PlaceSnapshot {
            conn: ConnId(1),
            age: Duration::from_secs(age),
            weight: Weight::ONE,
            numbers: [].into(),
            is_kept: false,
            lease: Duration::ZERO,
            held: None,
        };
        KeySnapshot {
            key: Key::from(name),
            kind,
            limit: Limit::ONE,
            taken: 1,
            holder_count: 1,
            waiter_count: usize::from(waited_for.is_some()),
            idle_for: Duration::ZERO,
            holders: vec![place(held_for)],
            waiters: waited_for.map(place).into_iter().collect(),
        }
    }

    #[test]
    fn a_kept_grant_is_no_long_hold() {
        let mut oldest = Oldest::default();
        let mut kept = key("kept", Kind::Lock, 9, None);
        kept.holders[0].is_kept = true;
        oldest.add(&kept);
        oldest.add(&key("other", Kind::Lock, 3, None));
        let held = oldest.holds[0].as_ref().map(|(key, _)| key.as_str());
        assert_eq!(held, Some("other"));
    }

    #[test]
    fn the_figures_are_one_object_on_one_line() {
        let mut oldest = Oldest::default();
        for key in [
            key("a", Kind::Lock, 3, None),
            key("\"b\"", Kind::Lock, 9, Some(2)),
            key("c", Kind::Lock, 7, Some(1)),
        ] {
            oldest.add(&key);
        }
        let mut out = Vec::new();
        let began = Instant::now();
        let expectation = Expectation {
            within: Duration::from_secs(60),
            since: began,
            has_succeeded: false,
        };
        let expected = vec![(Key::from("c\"d"), expectation)];
        let expected = (expected, began + Duration::from_millis(1500));
        let figures = Figures::new(6, 3, 7, 20, &snapshot(), &oldest, &expected);
        figures.write_json(&oldest, &mut out);
        let text = String::from_utf8(out).expect("JSON is text");
        assert!(!text.contains('\n'));
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json["counters"]["grants"], u64::MAX);
        assert_eq!(json["counters"]["dropped_log_lines"], 7);
        assert_eq!(json["counters"]["refusals"]["busy"], 0);
        let gauges = serde_json::json!({
            "connections": 6, "keys": {"lock": 1, "semaphore": 2}, "idle_keys": 3,
            "holders": 4, "bound_holders": 3, "kept_holders": 2, "waiters": 5,
            "fences_left": null, "draining": 1, "settling_s": 1.5,
            "oldest_wait_s": {"lock": 2.0, "semaphore": 0.0},
            "oldest_hold_s": {"lock": 9.0, "semaphore": 0.0},
            "worst_case_bytes": 20,
            "success_age_s": {"c\"d": 1.5}, "expected_s": {"c\"d": 60.0},
        });
        assert_eq!(json["gauges"], gauges);
        for name in ["oldest_wait", "oldest_hold"] {
            let expected = serde_json::json!({"lock": "\"b\"", "semaphore": null});
            assert_eq!(json[name], expected);
        }
        assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
        let last = json["grant_waits"]["buckets"]
            .as_array()
            .and_then(|it| it.last());
        assert_eq!(last, Some(&serde_json::json!({"le_s": 3600.0, "count": 0})));
    }
}
