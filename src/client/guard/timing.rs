//! When a lease is renewed and given up, and when its server counts as silent.

use std::time::Duration;

use crate::os::moment::Moment;
use crate::wire::token::Token;

/// Leases of up to this length are renewed after a third of it, longer ones after half.
const SHORT_LEASE: Duration = Duration::from_secs(6);

/// The maximum time between two renewals. It keeps proxies from closing the connection as idle.
const MAX_INTERVAL: Duration = Duration::from_secs(15);

/// The maximum time by which a client gives up a lease before its end on the server.
const MAX_MARGIN: Duration = Duration::from_secs(2);

/// The minimum time that a server has to answer before it counts as silent. For a very short lease,
/// this time is shorter.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// The moment until which a lease that was asked for at `sent_at` is certainly held.
pub(super) fn deadline_of(sent_at: Moment, lease: Duration) -> Moment {
    sent_at + (lease - margin_of(lease))
}

/// How long before the end of a lease on the server the client gives it up.
fn margin_of(lease: Duration) -> Duration {
    MAX_MARGIN.min(lease / 4)
}

/// The last moment at which it makes sense to renew the last lease that the server allows. The
/// server refuses a renewal if less than a second is left.
pub(super) fn last_renewal_of(asked_at: Moment, lease: Duration) -> Moment {
    asked_at + lease.saturating_sub(Duration::from_secs(1))
}

/// Whether a lease leaves the server enough time to answer if the callback for silence is due
/// `lead` before the deadline.
pub(super) fn fits(lead: Duration, lease: Duration) -> bool {
    lead <= lease / 2
}

/// The time from one renewal to the next. Jitter from the token keeps many clients that started
/// together from renewing together. If there is a callback for silence, half of the time until the
/// callback is left for the answer.
pub(super) fn renewal_interval(token: Token, lease: Duration, lead: Duration) -> Duration {
    let mut base = if lease <= SHORT_LEASE {
        lease / 3
    } else {
        (lease / 2).min(MAX_INTERVAL)
    };
    if !lead.is_zero() {
        base = base.min(half_until_silence(lease, lead));
    }
    let jitter = u32::try_from(token.fence() % 100).expect("below a hundred");
    base - base / 1000 * jitter
}

/// When to call `on_silence` for a server that has not answered since `began`. The lease was asked
/// for at `asked_at`.
pub(super) fn silent_at(
    began: Moment,
    asked_at: Moment,
    lease: Duration,
    lead: Duration,
) -> Moment {
    let told_at = deadline_of(asked_at, lease) - lead;
    // If this process was stopped, that moment is too early: the server has had no time to answer
    // yet.
    told_at.max(began + ANSWER_TIME.min(half_until_silence(lease, lead)))
}

/// Half of the time from a renewal to the callback for silence.
fn half_until_silence(lease: Duration, lead: Duration) -> Duration {
    (lease - margin_of(lease) - lead) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_told_early_enough_for_the_lead_and_not_at_once() {
        let (token, asked_at) = (token(0), Moment::now());
        // All leases up to 20 seconds, with leads of up to half of them.
        let leases_and_leads = (1..=20).flat_map(|lease| {
            let leads = (0..=lease * 50).map(|steps| Duration::from_millis(steps * 10));
            leads.map(move |lead| (Duration::from_secs(lease), lead))
        });
        for (lease, lead) in leases_and_leads {
            assert!(fits(lead, lease));
            let deadline = deadline_of(asked_at, lease);
            let sent_at = asked_at + renewal_interval(token, lease, lead);
            let told_at = silent_at(sent_at, asked_at, lease, lead);
            assert!(told_at + lead <= deadline, "{lease:?} {lead:?}");
            // Even for a connection that ends that late, the callback comes before the lease ends.
            let told_at = silent_at(deadline - lead, asked_at, lease, lead);
            let ends_at = told_at.min(deadline) + lead;
            assert!(ends_at <= asked_at + lease, "{lease:?} {lead:?}");
            // After a stop of this process, a server has time to answer.
            assert!(told_at > deadline - lead, "{lease:?} {lead:?}");
        }
    }

    #[test]
    fn a_lead_of_more_than_half_a_lease_does_not_fit() {
        let half = Duration::from_secs(5);
        assert!(!fits(half + Duration::from_millis(1), 2 * half));
    }

    fn token(fence: u64) -> Token {
        let token = format!("{fence:016x}0123456789abcdef");
        token.parse().expect("a token")
    }

    #[test]
    fn renewals_are_due_at_half_or_a_third_of_a_lease_with_jitter() {
        for (lease, latest) in [(1, 1.0 / 3.0), (6, 2.0), (7, 3.5), (30, 15.0), (600, 15.0)] {
            let mut intervals: Vec<Duration> = (0..100)
                .map(|fence| {
                    renewal_interval(token(fence), Duration::from_secs(lease), Duration::ZERO)
                })
                .collect();
            let latest = Duration::from_secs_f64(latest);
            assert!(intervals
                .iter()
                .all(|interval| (latest * 9 / 10..=latest).contains(interval)));
            intervals.sort_unstable();
            intervals.dedup();
            assert_eq!(intervals.len(), 100, "they come together");
        }
    }
}
