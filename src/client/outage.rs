//! A period in which a guard has no connection. Decides when to try again, and for how long.

use std::io;
use std::time::Duration;

use super::error::Error;
use crate::sys::moment::Moment;

/// The pause after the first attempt, and the maximum pause. Each pause is twice as long as the
/// previous one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The maximum time for one attempt to connect.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(1);

/// How long a single server may refuse connections. A server that restarts is back within this
/// time. The grants of a server that does not come back have ended.
const REFUSED_FOR: Duration = Duration::from_secs(2);

/// The period from the end of a connection to the renewal over another one.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) began: Moment,
    pub(super) next_attempt: Moment,
    next_pause: Duration,
    refused_since: Option<Moment>,
}

impl Outage {
    /// An outage whose first attempt is due at once.
    pub(super) fn new(now: Moment) -> Outage {
        Outage {
            began: now,
            next_attempt: now,
            next_pause: FIRST_PAUSE,
            refused_since: None,
        }
    }

    /// An outage that begins now. The first attempt is due at once or, if the `last` outage has
    /// only just ended, after the next pause of that outage: a server could adopt the lock and hang
    /// up repeatedly.
    pub(super) fn after(last: Option<Outage>, now: Moment) -> Outage {
        let mut outage = Outage::new(now);
        let is_recent = |last: &Outage| now.saturating_since(last.next_attempt) < LONGEST_PAUSE;
        if let Some(last) = last.filter(is_recent) {
            outage.next_pause = last.next_pause;
            outage.pause();
        }
        outage
    }

    /// The maximum time for an attempt to connect that must end before `until`.
    pub(super) fn time_for_attempt(until: Moment) -> Duration {
        until.saturating_since(Moment::now()).min(LONGEST_ATTEMPT)
    }

    /// Notes that a server has accepted the connection.
    pub(super) fn connected(&mut self) {
        self.refused_since = None;
    }

    /// Notes a failed attempt. Returns true once the server has refused connections for two
    /// seconds.
    pub(super) fn refused(&mut self, error: &Error) -> bool {
        match error {
            Error::NoReply { .. } => return false,
            Error::Unreachable { error, .. } if error.kind() == io::ErrorKind::TimedOut => {
                return false;
            }
            _ => {}
        }
        let now = Moment::now();
        let since = *self.refused_since.get_or_insert(now);
        now.saturating_since(since) >= REFUSED_FOR
    }

    /// Schedules the next attempt after a pause.
    pub(super) fn pause(&mut self) {
        self.next_attempt = Moment::now() + self.next_pause;
        self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_second() {
        let mut outage = Outage::new(Moment::now());
        for millis in [50, 100, 200, 400, 800, 1000, 1000] {
            let pause = Duration::from_millis(millis);
            let before = Moment::now();
            outage.pause();
            let after = Moment::now();
            // It begins between the two.
            assert!(outage.next_attempt.saturating_since(before) >= pause);
            assert!(outage.next_attempt.saturating_since(after) <= pause);
        }
    }

    #[test]
    fn only_a_refusal_tells_that_a_server_is_gone() {
        let server = "alone".parse().expect("an address");
        let error = |kind: io::ErrorKind| Error::unreachable(&server, kind.into());
        let (now, refused) = (Moment::now(), error(io::ErrorKind::ConnectionRefused));
        let mut outage = Outage::new(now);
        assert!(!outage.refused(&refused));
        outage.refused_since = Some(now - REFUSED_FOR);
        assert!(!outage.refused(&error(io::ErrorKind::TimedOut)));
        assert!(outage.refused(&refused));
        outage.connected();
        assert!(!outage.refused(&refused));
    }
}
