//! What has happened in a table, and how much is in it now.

use std::time::Duration;

use super::events::GrantEnd;
use super::types::{Answer, Refusal};
use super::LockTable;

/// The upper bounds of the buckets of [`WaitHistogram`] in milliseconds, each about three times the
/// one before, up to an hour.
const WAIT_BOUNDS: [u64; 14] = [
    1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_600_000,
];

/// Events since the table was made.
///
/// **Invariant:** a grant ends in one way, so `grants` is `releases + expiries + breaks +
/// abandonments` and the number of holders.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Slots given to newcomers and waiters, and holders that were brought back.
    pub grants: u64,
    /// Slots given back by clients with their tokens, and kept grants that have ended in time.
    pub releases: u64,
    /// Leases that began anew by a renewal.
    pub renewals: u64,
    /// Slots whose leases have run out, except kept grants.
    pub expiries: u64,
    /// Slots taken away by an operator.
    pub breaks: u64,
    /// Slots that passed on because the connection closed or the client no longer waited.
    pub abandonments: u64,
    /// Claims that had a place in a queue and gave it up at the end of their wait timeout.
    pub wait_timeouts: u64,
    pub disconnects: u64,
    /// How long the claims that were queued waited for their grants.
    pub waits: WaitHistogram,
    /// Claims that found their key held and were not to wait.
    pub busy: u64,
    refusals: [u64; Refusal::ALL.len()],
}

/// How many waits were how long.
#[derive(Clone, Debug, Default)]
pub struct WaitHistogram {
    pub sum: Duration,
    /// How many waits each bucket has; in the last one are those beyond the bounds.
    buckets: [u64; WAIT_BOUNDS.len() + 1],
}

/// The counters, and how much is in the table at the same time.
#[derive(Clone, Debug)]
pub struct CountersSnapshot {
    pub counters: Counters,
    /// Locks that are held or waited for.
    pub lock_count: usize,
    /// Semaphores that are held or waited for.
    pub semaphore_count: usize,
    /// Keys that are known and not in use.
    pub idle_key_count: usize,
    pub holder_count: usize,
    pub waiter_count: usize,
    /// Fences that are reserved and not used; `None` if fences need no reservation.
    pub fences_left: Option<u64>,
    /// Whether new claims are refused because of a drain.
    pub is_draining: bool,
}

impl Counters {
    /// How many requests were refused for this reason.
    pub fn refusals(&self, reason: Refusal) -> u64 {
        self.refusals[reason as usize]
    }

    /// Counts the end of a grant.
    pub(super) fn end(&mut self, end: GrantEnd) {
        *match end {
            GrantEnd::Released => &mut self.releases,
            GrantEnd::Expired => &mut self.expiries,
            GrantEnd::Broken(_) => &mut self.breaks,
            GrantEnd::Abandoned => &mut self.abandonments,
        } += 1;
    }
}

impl WaitHistogram {
    pub(super) fn add(&mut self, wait: Duration) {
        let at = WAIT_BOUNDS.partition_point(|bound| Duration::from_millis(*bound) < wait);
        self.buckets[at] += 1;
        self.sum = self.sum.saturating_add(wait);
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Each bound, with the number of waits that were not longer.
    pub fn cumulative(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let sums = self.buckets.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        WAIT_BOUNDS.map(Duration::from_millis).into_iter().zip(sums)
    }
}

impl LockTable {
    /// The same answer to a request, counted if the client does not get what it asked for.
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

    /// What has happened, and how much there is. Ends no lease.
    pub fn counters(&self) -> CountersSnapshot {
        let idle_key_count = self.idle.len();
        CountersSnapshot {
            counters: self.counters.clone(),
            lock_count: self.names.len() - idle_key_count - self.semaphore_count,
            semaphore_count: self.semaphore_count,
            idle_key_count,
            holder_count: self.leases.len(),
            waiter_count: self.waiter_count,
            fences_left: self.fences.reserved_left(),
            is_draining: self.draining,
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
