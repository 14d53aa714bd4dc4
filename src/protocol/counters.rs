//! The JSON of `stats` for the counters: latch-protocol(7), STATISTICS.

use super::stats::{put, Seconds};
use crate::table::{CountersSnapshot, Reason};

/// Appends the counters as one JSON object on one line.
pub fn write_json(
    connection_count: usize,
    dropped_line_count: usize,
    snapshot: &CountersSnapshot,
    out: &mut Vec<u8>,
) {
    let counters = &snapshot.counters;
    put!(out, "{{\"counters\":{{");
    for (name, count) in [
        ("grants", counters.grants),
        ("releases", counters.releases),
        ("renewals", counters.renewals),
        ("expiries", counters.expiries),
        ("breaks", counters.breaks),
        ("abandonments", counters.abandonments),
        ("wait_timeouts", counters.wait_timeouts),
        ("disconnects", counters.disconnects),
    ] {
        put!(out, "\"{name}\":{count},");
    }
    put!(out, "\"dropped_log_lines\":{dropped_line_count},");
    put!(out, "\"refusals\":{{");
    let mut separator = "";
    for (reason, name) in Reason::ALL {
        let count = counters.refusals(reason);
        put!(out, "{separator}\"{name}\":{count}");
        separator = ",";
    }
    put!(out, "}}}},");
    write_waits(snapshot, out);
    write_gauges(connection_count, snapshot, out);
}

fn write_waits(snapshot: &CountersSnapshot, out: &mut Vec<u8>) {
    let waits = &snapshot.counters.waits;
    put!(
        out,
        "\"grant_waits\":{{\"count\":{},\"sum_s\":{},\"buckets\":[",
        waits.count(),
        Seconds(waits.sum)
    );
    let mut separator = "";
    for (bound, count) in waits.cumulative() {
        let bound = Seconds(bound);
        put!(out, "{separator}{{\"le_s\":{bound},\"count\":{count}}}");
        separator = ",";
    }
    put!(out, "]}},");
}

fn write_gauges(connection_count: usize, snapshot: &CountersSnapshot, out: &mut Vec<u8>) {
    let left = snapshot.fences_left.map(|left| left.to_string());
    put!(
        out,
        "\"gauges\":{{\"connections\":{connection_count},\
         \"keys\":{{\"lock\":{},\"semaphore\":{}}},\"idle_keys\":{},\
         \"holders\":{},\"waiters\":{},\"fences_left\":{}}}}}",
        snapshot.lock_count,
        snapshot.semaphore_count,
        snapshot.idle_key_count,
        snapshot.holder_count,
        snapshot.waiter_count,
        left.as_deref().unwrap_or("null")
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Counters;

    #[test]
    fn the_counters_are_one_object_on_one_line() {
        let mut counters = Counters::default();
        counters.grants = u64::MAX;
        let snapshot = CountersSnapshot {
            counters,
            lock_count: 1,
            semaphore_count: 2,
            idle_key_count: 3,
            holder_count: 4,
            waiter_count: 5,
            fences_left: None,
        };
        let mut out = Vec::new();
        write_json(6, 7, &snapshot, &mut out);
        let text = String::from_utf8(out).expect("JSON is text");
        assert!(!text.contains('\n'));
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json["counters"]["grants"], u64::MAX);
        assert_eq!(json["counters"]["dropped_log_lines"], 7);
        assert_eq!(json["counters"]["refusals"]["busy"], 0);
        let gauges = serde_json::json!({
            "connections": 6, "keys": {"lock": 1, "semaphore": 2}, "idle_keys": 3,
            "holders": 4, "waiters": 5, "fences_left": null
        });
        assert_eq!(json["gauges"], gauges);
        let last = json["grant_waits"]["buckets"]
            .as_array()
            .and_then(|it| it.last());
        assert_eq!(last, Some(&serde_json::json!({"le_s": 3600.0, "count": 0})));
    }
}
