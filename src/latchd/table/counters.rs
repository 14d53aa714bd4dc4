//! Counters of the events in a table, and of its present contents.

use std::time::{Duration, Instant};

use super::events::GrantEnd;
use super::types::Answer;
use super::LockTable;
use crate::wire::terms::Refusal;

/// The upper bounds of the buckets of [`WaitHistogram`] in milliseconds, each about three times the
/// previous bound, up to one hour.
const WAIT_BOUNDS: [u64; 14] = [
    1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_600_000,
];

/// Events since the table was made.
///
/// **Invariant:** each grant ends in exactly one way, so `grants` equals `releases + expiries +
/// breaks + abandonments` plus the current number of holders.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Grants to new claims or to waiters; also holders restored after a hand-over or a takeover.
    pub grants: u64,
    /// Grants that clients released with their tokens, and kept grants whose leases ran out.
    pub releases: u64,
    /// Leases restarted by a renewal.
    pub renewals: u64,
    /// Grants whose leases ran out, except kept grants.
    pub expiries: u64,
    /// Grants ended by an operator.
    pub breaks: u64,
    /// Grants that ended because the connection closed, the client stopped waiting, or a newer
    /// grant was proved.
    pub abandonments: u64,
    /// Claims that left their queue because their wait timeout was over.
    pub wait_timeouts: u64,
    pub disconnects: u64,
    /// How long queued claims waited until they were granted.
    pub waits: WaitHistogram,
    /// Claims that found their key held and did not want to wait.
    pub busy: u64,
    /// Requests over HTTP that would have waited, refused because of a cap on such requests.
    pub rate_limited: u64,
    /// Sessions over HTTP that were refused because of a cap on sessions.
    pub max_sessions: u64,
    refusals: [u64; Refusal::ALL.len()],
}

/// The distribution of wait times.
#[derive(Clone, Debug, Default)]
pub struct WaitHistogram {
    pub sum: Duration,
    /// The number of waits in each bucket; the last bucket holds waits longer than every bound.
    buckets: [u64; WAIT_BOUNDS.len() + 1],
}

/// The counters, and the contents of the table at the same moment.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(Default))]
pub struct CountersSnapshot {
    pub counters: Counters,
    /// Locks that are held or waited for.
    pub lock_count: usize,
    /// Semaphores that are held or waited for.
    pub semaphore_count: usize,
    /// Known keys that are neither held nor waited for.
    pub idle_key_count: usize,
    pub holder_count: usize,
    /// Holders without a connection that count against the cap on kept grants.
    pub kept_count: usize,
    /// Holders without a connection, including kept ones.
    pub orphan_count: usize,
    pub waiter_count: usize,
    /// Reserved fences that are still unused; `None` if fences need no reservation.
    pub fences_left: Option<u64>,
    /// Whether new claims are refused because of a drain.
    pub is_draining: bool,
    /// How long the table will grant nothing, because it settles.
    pub settling_left: Duration,
    /// For how long the state file could not be written; zero if it can.
    pub unwritten_for: Duration,
}

impl Counters {
    /// The number of requests refused for this reason.
    pub fn refusals(&self, reason: Refusal) -> u64 {
        self.refusals[reason as usize]
    }

    /// Counts the end of a grant.
    pub fn count_end(&mut self, end: GrantEnd) {
        *match end {
            GrantEnd::Released(_) => &mut self.releases,
            GrantEnd::Expired => &mut self.expiries,
            GrantEnd::Broken(_) => &mut self.breaks,
            GrantEnd::Abandoned | GrantEnd::GaveWay => &mut self.abandonments,
        } += 1;
    }
}

impl WaitHistogram {
    pub fn add(&mut self, wait: Duration) {
        let at = WAIT_BOUNDS.partition_point(|bound| Duration::from_millis(*bound) < wait);
        self.buckets[at] += 1;
        self.sum = self.sum.saturating_add(wait);
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Each bound, with the number of waits that were at most that long.
    pub fn cumulative(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let sums = self.buckets.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        WAIT_BOUNDS.map(Duration::from_millis).into_iter().zip(sums)
    }
}

impl LockTable {
    /// Counts `answer` if the client did not get what it asked for, and returns it unchanged.
    pub fn counted(&mut self, answer: Result<Answer, Refusal>) -> Result<Answer, Refusal> {
        let counters = &mut self.counters;
        match answer {
            Err(refusal) => counters.refusals[refusal as usize] += 1,
            Ok(Answer::WouldWait) => counters.busy += 1,
            Ok(Answer::TimedOut) => counters.wait_timeouts += 1,
            Ok(_) => {}
        }
        answer
    }

    /// The counters, with the present numbers of keys, holders and waiters.
    pub fn counters(&self, now: Instant) -> CountersSnapshot {
        let idle_key_count = self.idle.len();
        CountersSnapshot {
            counters: self.counters.clone(),
            lock_count: self.names.len() - idle_key_count - self.semaphore_count,
            semaphore_count: self.semaphore_count,
            idle_key_count,
            holder_count: self.leases.len(),
            kept_count: self.kept_count,
            orphan_count: self.orphan_count(),
            waiter_count: self.waiter_count,
            fences_left: self.fences.reserved_left(),
            is_draining: self.is_draining,
            settling_left: self.settling_left(now),
            unwritten_for: self.unwritten_for(now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_in_the_first_bucket_that_is_not_below_it() {
        let mut waits = WaitHistogram::default();
        for nanos in [0, 1_000_000, 1_000_001, 3_000_000, 3_600_000_000_000] {
            waits.add(Duration::from_nanos(nanos));
        }
        waits.add(Duration::MAX);
        assert_eq!(waits.count(), 6);
        assert_eq!(waits.sum, Duration::MAX);
        let counts: Vec<u64> = waits.cumulative().map(|(_, count)| count).collect();
        assert_eq!(counts, [2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5]);
    }

    #[test]
    fn the_bounds_of_waits_rise() {
        assert!(WAIT_BOUNDS.is_sorted_by(|a, b| a < b));
        assert_eq!(WAIT_BOUNDS.last(), Some(&(60 * 60 * 1000)));
    }

    #[test]
    fn each_refusal_has_a_counter_of_its_own() {
        for (at, (refusal, name)) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, at, "{name}");
        }
    }
}
