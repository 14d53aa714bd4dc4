//! When a guard without a connection tries to connect, and for how long.

use std::time::Duration;

use super::error::Error;
use crate::os::backoff::Backoff;
use crate::os::moment::Moment;

/// The pause after the first attempt, and the maximum pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The maximum time for one attempt to connect.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(1);

/// How long a single server may refuse connections. A server that restarts is back within this
/// time. The grants of a server that does not come back have ended.
const REFUSED_FOR: Duration = Duration::from_secs(2);

/// The attempts to connect during one outage after another.
#[derive(Debug)]
pub(super) struct Attempts {
    /// When the next attempt is due.
    pub(super) next_at: Moment,
    backoff: Backoff,
    pub(super) refused_since: Option<Moment>,
}

impl Attempts {
    /// The first attempt is due at once.
    pub(super) fn new(now: Moment) -> Attempts {
        Attempts {
            next_at: now,
            backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
            refused_since: None,
        }
    }

    /// No attempt yet, nor just before: the first outage begins at once.
    pub(super) fn none() -> Attempts {
        Attempts::new(Moment::now() - LONGEST_PAUSE)
    }

    /// Begins an outage. The first attempt is due at once or, if the previous outage has only just
    /// ended, after the next pause of that outage: a server could adopt the lock and hang up
    /// repeatedly.
    pub(super) fn begin(&mut self, now: Moment) {
        self.refused_since = None;
        let is_recent = now.saturating_since(self.next_at) < LONGEST_PAUSE;
        if is_recent {
            self.pause();
        } else {
            *self = Attempts::new(now);
        }
    }

    /// The maximum time for an attempt that must end before `until`.
    pub(super) fn time_for_one(until: Moment) -> Duration {
        until.saturating_since(Moment::now()).min(LONGEST_ATTEMPT)
    }

    /// Notes a failed attempt, and returns whether the server is absent: it has refused connections
    /// for two seconds.
    pub(super) fn failed(&mut self, error: &Error) -> bool {
        if !error.is_refused_connection() {
            return false;
        }
        let now = Moment::now();
        let since = *self.refused_since.get_or_insert(now);
        now.saturating_since(since) >= REFUSED_FOR
    }

    /// Schedules the next attempt after a pause.
    pub(super) fn pause(&mut self) {
        self.next_at = Moment::now() + self.backoff.pause();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn an_outage_right_after_another_goes_on_with_its_pauses() {
        let mut attempts = Attempts::none();
        let now = Moment::now();
        attempts.begin(now);
        assert_eq!(attempts.next_at, now);
        for millis in [50, 100, 200] {
            let pause = Duration::from_millis(millis);
            let before = Moment::now();
            attempts.begin(before);
            let after = Moment::now();
            // The pause begins between the two.
            assert!(attempts.next_at.saturating_since(before) >= pause);
            assert!(attempts.next_at.saturating_since(after) <= pause);
        }
        let later = attempts.next_at + LONGEST_PAUSE;
        attempts.begin(later);
        assert_eq!(attempts.next_at, later);
    }

    #[test]
    fn only_a_refused_connection_tells_that_a_server_is_gone() {
        let tells = |server: &str, error: Errno| {
            let server = server.parse().expect("an address");
            let error = Error::unreachable(&server, error.into());
            let mut attempts = Attempts::none();
            attempts.refused_since = Some(Moment::now() - REFUSED_FOR);
            attempts.failed(&error)
        };
        for (error, [by_tcp, by_path]) in [
            (Errno::CONNREFUSED, [true, true]),
            (Errno::NOENT, [false, true]),
            (Errno::NETUNREACH, [false, false]),
            (Errno::HOSTUNREACH, [false, false]),
            (Errno::NETDOWN, [false, false]),
            (Errno::ADDRNOTAVAIL, [false, false]),
            (Errno::TIMEDOUT, [false, false]),
            (Errno::CONNRESET, [false, false]),
            (Errno::MFILE, [false, false]),
        ] {
            assert_eq!(tells("alone", error), by_tcp, "{error}");
            assert_eq!(tells("/run/socket", error), by_path, "{error}");
        }
    }
}
