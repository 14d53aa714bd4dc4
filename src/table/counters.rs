//! What has happened in a table since it was made, and how much is in it now.

use std::time::Duration;

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
    /// Slots given back by clients with their tokens.
    pub releases: u64,
    /// Leases that began anew by a renewal.
    pub renewals: u64,
    /// Slots whose leases have run out.
    pub expiries: u64,
    /// Slots taken away by an operator.
    pub breaks: u64,
    /// Slots that passed on since the connection closed, or the client no longer waited.
    pub abandonments: u64,
    /// Claims that had a place in a queue and gave it up at the end of their wait timeout.
    pub wait_timeouts: u64,
    /// Connections that have closed.
    pub disconnects: u64,
    /// How long the claims that were queued waited for their grants.
    pub waits: WaitHistogram,
    refusals: [u64; Reason::ALL.len()],
}

/// How many waits were how long.
#[derive(Clone, Debug, Default)]
pub struct WaitHistogram {
    /// The sum of all waits.
    pub sum: Duration,
    /// How many waits each bucket has; in the last one are those beyond the bounds.
    buckets: [u64; WAIT_BOUNDS.len() + 1],
}

/// Why a request was refused, as it is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The key was held, and the claim was not to wait.
    Busy,
    LimitMismatch,
    MaxLocks,
    MaxWaiters,
    LeaseExpired,
    NotHeld,
    Draining,
    NoToken,
    AlreadyEnqueued,
    NotEnqueued,
}

/// The counters, and how much is in the table at the same time.
#[derive(Clone, Debug)]
pub struct CountersSnapshot {
    /// The events until now.
    pub counters: Counters,
    /// Locks that are held or waited for.
    pub lock_count: usize,
    /// Semaphores that are held or waited for.
    pub semaphore_count: usize,
    /// Keys that are known and not in use.
    pub idle_key_count: usize,
    /// Slots that are held.
    pub holder_count: usize,
    /// Claims that wait.
    pub waiter_count: usize,
    /// Fences that are reserved and not used; `None` if fences need no reservation.
    pub fences_left: Option<u64>,
    /// Whether new claims are refused because of a drain.
    pub is_draining: bool,
}

impl Reason {
    /// All reasons with their names, in the order of their declaration.
    pub const ALL: [(Reason, &str); 10] = [
        (Reason::Busy, "busy"),
        (Reason::LimitMismatch, "limit_mismatch"),
        (Reason::MaxLocks, "max_locks"),
        (Reason::MaxWaiters, "max_waiters"),
        (Reason::LeaseExpired, "lease_expired"),
        (Reason::NotHeld, "not_held"),
        (Reason::Draining, "draining"),
        (Reason::NoToken, "no_token"),
        (Reason::AlreadyEnqueued, "already_enqueued"),
        (Reason::NotEnqueued, "not_enqueued"),
    ];

    fn of(answer: &Answer) -> Option<Reason> {
        Some(match answer {
            Answer::Refused(Refusal::LimitMismatch) => Reason::LimitMismatch,
            Answer::Refused(Refusal::MaxLocks) => Reason::MaxLocks,
            Answer::Refused(Refusal::MaxWaiters) => Reason::MaxWaiters,
            Answer::Refused(Refusal::LeaseExpired) => Reason::LeaseExpired,
            Answer::Refused(Refusal::NotHeld) => Reason::NotHeld,
            Answer::Refused(Refusal::Draining) => Reason::Draining,
            Answer::Refused(Refusal::NoToken) => Reason::NoToken,
            Answer::AlreadyEnqueued => Reason::AlreadyEnqueued,
            Answer::NotEnqueued => Reason::NotEnqueued,
            Answer::WouldWait => Reason::Busy,
            Answer::Granted(_) | Answer::Queued | Answer::TimedOut | Answer::Gone => return None,
        })
    }
}

impl Counters {
    /// How many requests were refused for this reason.
    pub fn refusals(&self, reason: Reason) -> u64 {
        self.refusals[reason as usize]
    }

    fn refuse(&mut self, reason: Reason) {
        self.refusals[reason as usize] += 1;
    }
}

impl WaitHistogram {
    pub(super) fn add(&mut self, wait: Duration) {
        let at = WAIT_BOUNDS.partition_point(|bound| Duration::from_millis(*bound) < wait);
        self.buckets[at] += 1;
        self.sum = self.sum.saturating_add(wait);
    }

    /// How many waits there were.
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
    /// Counts the answer to a request, if it refuses it.
    pub fn note_answer(&mut self, answer: &Answer) {
        self.counters.wait_timeouts += u64::from(*answer == Answer::TimedOut);
        if let Some(reason) = Reason::of(answer) {
            self.counters.refuse(reason);
        }
    }

    /// The same answer, counted if it refuses the request.
    pub fn counted(&mut self, answer: Answer) -> Answer {
        self.note_answer(&answer);
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
    fn each_reason_has_a_counter_of_its_own() {
        let mut counters = Counters::default();
        for (at, (reason, _)) in Reason::ALL.into_iter().enumerate() {
            (0..=at).for_each(|_| counters.refuse(reason));
        }
        let counted = Reason::ALL.map(|(reason, _)| counters.refusals(reason));
        assert_eq!(counted, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    }
}
