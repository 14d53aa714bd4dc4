//! The counters and gauges of a server: as JSON (latch-protocol(7), STATISTICS), and in the text
//! format of Prometheus (latchd-operations(7), MONITORING). Pure.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::stats::{put, separate, write_optional, write_string, Seconds};
use crate::latchd::table::{Counters, CountersSnapshot, Expectation, Key, KeySnapshot};
use crate::wire::terms::{Kind, Refusal};

/// The name of the histogram of waits in the text.
const WAIT: &str = "latchd_grant_wait_seconds";

/// The numbers of a server.
pub struct Figures {
    pub connection_count: usize,
    pub unadoptable_holder_count: usize,
    pub turned_away_count: u64,
    pub dropped_line_count: usize,
    pub worst_case_bytes: u64,
    pub snapshot: CountersSnapshot,
    /// Must have taken all keys into account.
    pub oldest: Oldest,
    /// The keys under which work is expected to succeed.
    pub expected: Vec<(Key, Expectation)>,
    /// The time of this look.
    pub now: Instant,
}

/// A metric: its name in the JSON; the label that tells several numbers apart in the text, or "";
/// its help there; and its numbers.
type Metric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Figures) -> Series,
);

/// Numbers, each with its name, which is empty without a label. Without any, a single number is
/// null in the JSON, and the text leaves it out.
type Series = Vec<(String, String)>;

/// What only the text has.
const SERVER: [Metric; 2] = [
    ("up", "", "Whether the server gave its counters.", |_| {
        one(1)
    }),
    (
        "build_info",
        "version",
        "The version of the server, as a label.",
        |_| vec![(env!("CARGO_PKG_VERSION").to_owned(), "1".to_owned())],
    ),
];

const COUNTERS: [Metric; 11] = [
    (
        "grants",
        "",
        "Slots granted, at once or after a wait.",
        |it| one(it.counters().grants),
    ),
    (
        "releases",
        "",
        "Slots released by their holders, and kept ones whose time was over.",
        |it| one(it.counters().releases),
    ),
    ("renewals", "", "Leases renewed by their holders.", |it| {
        one(it.counters().renewals)
    }),
    (
        "expiries",
        "",
        "Slots that passed on because the lease of a holder ran out.",
        |it| one(it.counters().expiries),
    ),
    ("breaks", "", "Slots that an operator took away.", |it| {
        one(it.counters().breaks)
    }),
    (
        "abandonments",
        "",
        "Slots that passed on because the connection closed or the client no longer waited.",
        |it| one(it.counters().abandonments),
    ),
    (
        "wait_timeouts",
        "",
        "Claims that waited until their timeout without a grant.",
        |it| one(it.counters().wait_timeouts),
    ),
    ("refusals", "reason", "Requests refused, by reason.", |it| {
        it.refusals()
    }),
    ("disconnects", "", "Connections closed.", |it| {
        one(it.counters().disconnects)
    }),
    (
        "turned_away",
        "",
        "Connections closed, or refused over HTTP, because of a cap on connections.",
        |it| one(it.turned_away_count),
    ),
    (
        "dropped_log_lines",
        "",
        "Log lines dropped because their receiver did not keep up.",
        |it| one(it.dropped_line_count),
    ),
];

const GAUGES: [Metric; 17] = [
    (
        "connections",
        "",
        "Connections of clients, including any that asks for this.",
        |it| one(it.connection_count),
    ),
    ("keys", "kind", "Keys held or waited for, by kind.", |it| {
        by_kind([it.snapshot.lock_count, it.snapshot.semaphore_count])
    }),
    (
        "idle_keys",
        "",
        "Keys known and neither held nor waited for.",
        |it| one(it.snapshot.idle_key_count),
    ),
    ("holders", "", "Slots held.", |it| {
        one(it.snapshot.holder_count)
    }),
    (
        "bound_holders",
        "",
        "Connections that hold slots and cannot come back for them after a restart.",
        |it| one(it.unadoptable_holder_count),
    ),
    (
        "kept_holders",
        "",
        "Grants kept without a connection, up to --max-kept.",
        |it| one(it.snapshot.kept_count),
    ),
    (
        "orphans",
        "",
        "Grants without a connection, kept or not.",
        |it| one(it.snapshot.orphan_count),
    ),
    ("waiters", "", "Claims waiting.", |it| {
        one(it.snapshot.waiter_count)
    }),
    (
        "fences_left",
        "",
        "Fences reserved in the fence file and not used.",
        |it| it.snapshot.fences_left.map_or(Vec::new(), one),
    ),
    (
        "draining",
        "",
        "Whether the server is about to stop and refuses new claims.",
        |it| one(u8::from(it.snapshot.is_draining)),
    ),
    (
        "settling_s",
        "",
        "How long the server will grant nothing, because of a crash before its start.",
        |it| one(Seconds(it.snapshot.settling_left)),
    ),
    (
        "state_unwritten_s",
        "",
        "For how long the state file could not be written.",
        |it| one(Seconds(it.snapshot.unwritten_for)),
    ),
    (
        "oldest_wait_s",
        "kind",
        "How long the client has waited that has waited for longest.",
        |it| by_kind(ages(&it.oldest.waits)),
    ),
    (
        "oldest_hold_s",
        "kind",
        "How long the slot held for longest has been held, without reserved and kept ones.",
        |it| by_kind(ages(&it.oldest.holds)),
    ),
    (
        "worst_case_bytes",
        "",
        "The memory in bytes that the server takes if all its caps are reached at once.",
        |it| one(it.worst_case_bytes),
    ),
    (
        "success_age_s",
        "key",
        "How long ago work under a key of --expect last succeeded, or else the server started.",
        |it| it.by_key(|expectation| expectation.age(it.now)),
    ),
    (
        "expected_s",
        "key",
        "How long the time from one success to the next may be, from --expect.",
        |it| it.by_key(|expectation| expectation.within),
    ),
];

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
    fn counters(&self) -> &Counters {
        &self.snapshot.counters
    }

    fn refusals(&self) -> Series {
        let counters = self.counters();
        let refusals = Refusal::ALL.map(|(refusal, name)| (name, counters.refusals(refusal)));
        let others = [
            ("busy", counters.busy),
            ("rate_limited", counters.rate_limited),
            ("max_sessions", counters.max_sessions),
        ];
        let refusals = others
            .into_iter()
            .chain(refusals)
            .map(|(name, count)| (name.to_owned(), count.to_string()));
        refusals.collect()
    }

    fn by_key(&self, time: impl Fn(&Expectation) -> Duration) -> Series {
        let numbers = self.expected.iter().map(|(key, expectation)| {
            let time = Seconds(time(expectation)).to_string();
            (key.as_str().to_owned(), time)
        });
        numbers.collect()
    }

    /// Appends the numbers as one JSON object on one line, with the keys of the oldest waits and
    /// holds.
    pub fn write_json(&self, out: &mut Vec<u8>) {
        // The refusals are the last counter.
        let is_single = |metric: &&Metric| metric.1.is_empty();
        let (singles, groups): (Vec<_>, Vec<_>) = COUNTERS.iter().partition(is_single);
        put!(out, "{{\"counters\":");
        self.write_group(singles.into_iter().chain(groups), out);
        let waits = &self.counters().waits;
        let (count, sum) = (waits.count(), Seconds(waits.sum));
        put!(
            out,
            ",\"grant_waits\":{{\"count\":{count},\"sum_s\":{sum},\"buckets\":["
        );
        for (bound, count) in waits.cumulative() {
            separate(out);
            let bound = Seconds(bound);
            put!(out, "{{\"le_s\":{bound},\"count\":{count}}}");
        }
        put!(out, "]}},\"gauges\":");
        self.write_group(GAUGES.iter(), out);
        for (name, list) in [("wait", &self.oldest.waits), ("hold", &self.oldest.holds)] {
            put!(out, ",\"oldest_{name}\":{{");
            for ((_, kind), oldest) in Kind::ALL.iter().zip(list) {
                separate(out);
                put!(out, "\"{kind}\":");
                write_optional(oldest.as_ref().map(|(key, _)| key.as_str()), out);
            }
            out.push(b'}');
        }
        put!(out, ",\"version\":\"{}\"}}", env!("CARGO_PKG_VERSION"));
    }

    fn write_group<'a>(&self, metrics: impl Iterator<Item = &'a Metric>, out: &mut Vec<u8>) {
        out.push(b'{');
        for (name, label, _, numbers) in metrics {
            separate(out);
            put!(out, "\"{name}\":");
            let numbers = numbers(self);
            if label.is_empty() {
                let number = numbers.first().map_or("null", |(_, number)| number);
                put!(out, "{number}");
                continue;
            }
            out.push(b'{');
            for (name, number) in &numbers {
                separate(out);
                write_string(name, out);
                put!(out, ":{number}");
            }
            out.push(b'}');
        }
        out.push(b'}');
    }

    /// The numbers in the text format of Prometheus: each metric with its help and its type.
    pub fn exposition(&self) -> String {
        let mut text = String::new();
        let counters = COUNTERS.iter().map(|metric| (metric, "counter", "_total"));
        let gauges = |metrics: &'static [Metric]| metrics.iter().map(|it| (it, "gauge", ""));
        let metrics = gauges(&SERVER).chain(counters).chain(gauges(&GAUGES));
        // Writing to a string cannot fail.
        for ((name, label, help, numbers), kind, suffix) in metrics {
            let name = match name.strip_suffix("_s") {
                Some(name) => format!("latchd_{name}_seconds"),
                None => format!("latchd_{name}{suffix}"),
            };
            let numbers = numbers(self);
            if !numbers.is_empty() {
                let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            }
            for (value, number) in numbers {
                let _ = match *label {
                    "" => writeln!(text, "{name} {number}"),
                    label => writeln!(text, "{name}{{{label}=\"{}\"}} {number}", quoted(&value)),
                };
            }
        }
        let waits = &self.counters().waits;
        let (count, sum) = (waits.count(), Seconds(waits.sum));
        let help = "How long the claims that were queued waited for their grants.";
        let _ = writeln!(text, "# HELP {WAIT} {help}\n# TYPE {WAIT} histogram");
        let buckets = waits.cumulative();
        let buckets = buckets.map(|(bound, count)| (Seconds(bound).to_string(), count));
        for (bound, count) in buckets.chain([("+Inf".to_owned(), count)]) {
            let _ = writeln!(text, "{WAIT}_bucket{{le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(text, "{WAIT}_sum {sum}\n{WAIT}_count {count}");
        text
    }
}

fn one(number: impl ToString) -> Series {
    vec![(String::new(), number.to_string())]
}

fn by_kind(numbers: [impl ToString; Kind::ALL.len()]) -> Series {
    let named = Kind::ALL.iter().zip(numbers);
    let named = named.map(|((_, kind), number)| ((*kind).to_owned(), number.to_string()));
    named.collect()
}

fn ages(oldest: &[Option<(Key, Duration)>; Kind::ALL.len()]) -> [Seconds; Kind::ALL.len()] {
    let age = |oldest: &Option<(Key, Duration)>| oldest.as_ref().map_or(Duration::ZERO, |it| it.1);
    oldest.each_ref().map(|oldest| Seconds(age(oldest)))
}

/// Escapes the value of a label as the text format requires.
fn quoted(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latchd::table::{ConnId, PlaceSnapshot};
    use crate::wire::terms::{Limit, Weight};

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
            orphan_count: 3,
            waiter_count: 5,
            fences_left: None,
            is_draining: true,
            settling_left: Duration::from_millis(1500),
            unwritten_for: Duration::from_secs(3),
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
        let figures = Figures {
            connection_count: 6,
            unadoptable_holder_count: 3,
            turned_away_count: 0,
            dropped_line_count: 7,
            worst_case_bytes: 20,
            snapshot: snapshot(),
            oldest,
            expected,
            now: began + Duration::from_millis(1500),
        };
        figures.write_json(&mut out);
        let text = String::from_utf8(out).expect("JSON is text");
        assert!(!text.contains('\n'));
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json["counters"]["grants"], u64::MAX);
        assert_eq!(json["counters"]["dropped_log_lines"], 7);
        assert_eq!(json["counters"]["refusals"]["busy"], 0);
        let gauges = serde_json::json!({
            "connections": 6, "keys": {"lock": 1, "semaphore": 2}, "idle_keys": 3,
            "holders": 4, "bound_holders": 3, "kept_holders": 2, "orphans": 3, "waiters": 5,
            "fences_left": null, "draining": 1, "settling_s": 1.5, "state_unwritten_s": 3.0,
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
