//! The last five minutes of the server, for the plots of the page: a browser that opens the page,
//! or that was in the background, has not seen them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::latchd::statistics::stats::{put, Seconds};
use crate::latchd::table::CountersSnapshot;

/// The time between two samples.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);

/// The number of samples that are kept: those of five minutes.
const SAMPLE_COUNT: usize = 60;

/// A ring of samples. It needs less than four kilobytes.
#[derive(Default)]
pub(super) struct RecentSamples(Mutex<VecDeque<Sample>>);

struct Sample {
    at: Instant,
    grants: u64,
    /// How many of the grants were waited for in a queue, and for how long in all.
    waits: u64,
    waited: Duration,
    waiters: usize,
}

impl RecentSamples {
    /// Adds a sample, in the place of the oldest one if there are enough.
    pub(super) fn note(&self, snapshot: &CountersSnapshot, now: Instant) {
        let counters = &snapshot.counters;
        let mut samples = self.0.lock();
        if samples.len() == SAMPLE_COUNT {
            samples.pop_front();
        }
        let missing = SAMPLE_COUNT - samples.len();
        samples.reserve_exact(missing);
        samples.push_back(Sample {
            at: now,
            grants: counters.grants,
            waits: counters.waits.count(),
            waited: counters.waits.sum,
            waiters: snapshot.waiter_count,
        });
    }

    /// Writes the samples as JSON, the oldest first.
    pub(super) fn write_json(&self, now: Instant, out: &mut Vec<u8>) {
        put!(out, "{{\"interval_s\":{},\"samples\":[", INTERVAL.as_secs());
        for (at, sample) in self.0.lock().iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            put!(
                out,
                "{{\"age_s\":{},\"grants\":{},\"wait_count\":{},\"wait_sum_s\":{},\"waiters\":{}}}",
                Seconds(now.saturating_duration_since(sample.at)),
                sample.grants,
                sample.waits,
                Seconds(sample.waited),
                sample.waiters
            );
        }
        out.extend(b"]}\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_samples_give_way() {
        let history = RecentSamples::default();
        let began = Instant::now();
        let mut snapshot = CountersSnapshot {
            waiter_count: 3,
            ..CountersSnapshot::default()
        };
        for number in 0..100 {
            snapshot.counters.grants = number;
            history.note(&snapshot, began + INTERVAL * number as u32);
        }
        let mut out = Vec::new();
        history.write_json(began + INTERVAL * 100, &mut out);
        let json: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
        let samples = json["samples"].as_array().expect("a list");
        assert_eq!(samples.len(), SAMPLE_COUNT);
        assert_eq!(samples[0]["grants"], 40);
        assert_eq!(samples[0]["age_s"], 300.0);
        assert_eq!(samples[59]["age_s"], 5.0);
        assert_eq!(samples[59]["waiters"], 3);
    }
}
