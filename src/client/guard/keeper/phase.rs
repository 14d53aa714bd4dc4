//! What a keeper is doing about its server.
//!
//! ```text
//!              sent               answered
//!   Resting ---------> Renewing ------------> Resting
//!      |                  |
//!      |      ended, or silent for too long
//!      |                  v         sent                answered
//!      +--------------> Away ------------> Adopting ------------> Resting (provisional)
//!          ended          ^                   |
//!                         +-------------------+
//!                       ended, or silent for too long
//! ```

use crate::client::connection::{Connection, Renewal};
use crate::os::moment::Moment;

#[derive(Debug)]
pub(super) enum Phase {
    /// The last renewal was answered, and the next one is not sent yet.
    Resting {
        /// Whether the lock was adopted but has not been renewed since. The next renewal is due at
        /// once: until then, the server would not release the lock when the connection ends.
        is_provisional: bool,
    },
    /// A renewal was sent at this moment, and has no answer yet.
    Renewing(Moment),
    /// The lock has no connection over which it can be renewed.
    Away(Outage),
    /// Over a new connection, an adoption was sent at this moment. It has no answer yet.
    Adopting(Moment, Outage),
}

/// The period from the end or the silence of a connection to the answer over another one.
#[derive(Debug)]
pub(super) struct Outage {
    /// When the connection ended, or when the renewal was sent that has no answer.
    pub(super) began: Moment,
    /// The connection to the server that has not answered the renewal. The server may be slow, the
    /// network may have failed, or another server may have taken over. The connection stays open
    /// until the lock has moved to another one, because a slow server would release the lock when
    /// the connection ends.
    pub(super) silent: Option<Box<Connection>>,
}

/// What happens to the connections of a lock.
pub(super) enum ConnectionEvent {
    /// A renewal was sent at this moment, or an adoption over a new connection.
    Sent(Moment),
    /// The server has answered it.
    Answered,
    /// The connection has ended at this moment, or the attempt to connect has failed.
    Ended(Moment),
    /// The server has not answered the renewal for too long, and its connection is set aside.
    SetAside(Box<Connection>),
    /// The silent server has answered after all, and its connection is the lock's again. All later
    /// renewals are of this kind.
    AnsweredLate(Renewal),
    /// The connection to the silent server has ended.
    SilentGone,
}

impl Phase {
    /// The phase after an event. An event that cannot happen in this phase changes nothing.
    pub(super) fn after(self, event: ConnectionEvent) -> Phase {
        match (event, self) {
            (ConnectionEvent::Sent(at), Phase::Resting { .. }) => Phase::Renewing(at),
            (ConnectionEvent::Sent(at), Phase::Away(outage)) => Phase::Adopting(at, outage),
            (ConnectionEvent::Answered, Phase::Renewing(_)) => Phase::Resting {
                is_provisional: false,
            },
            (ConnectionEvent::Answered, Phase::Adopting(..)) => Phase::Resting {
                is_provisional: true,
            },
            (ConnectionEvent::Ended(at), Phase::Resting { .. } | Phase::Renewing(_)) => {
                let (began, silent) = (at, None);
                Phase::Away(Outage { began, silent })
            }
            (ConnectionEvent::Ended(_), Phase::Away(outage) | Phase::Adopting(_, outage)) => {
                Phase::Away(outage)
            }
            (ConnectionEvent::SetAside(connection), Phase::Renewing(sent_at)) => {
                let (began, silent) = (sent_at, Some(connection));
                Phase::Away(Outage { began, silent })
            }
            // The lock may have been adopted over a connection that is now given up.
            (ConnectionEvent::AnsweredLate(renewal), Phase::Away(_) | Phase::Adopting(..)) => {
                let is_provisional = renewal == Renewal::Adopt;
                Phase::Resting { is_provisional }
            }
            (ConnectionEvent::SilentGone, Phase::Away(outage)) => {
                Phase::Away(outage.without_silent())
            }
            (ConnectionEvent::SilentGone, Phase::Adopting(sent_at, outage)) => {
                Phase::Adopting(sent_at, outage.without_silent())
            }
            (_, unchanged) => unchanged,
        }
    }

    /// When the unanswered request was sent; `None` if there is none.
    pub(super) fn sent_at(&self) -> Option<Moment> {
        match self {
            Phase::Renewing(at) | Phase::Adopting(at, _) => Some(*at),
            Phase::Resting { .. } | Phase::Away(_) => None,
        }
    }

    pub(super) fn outage(&self) -> Option<&Outage> {
        match self {
            Phase::Away(outage) | Phase::Adopting(_, outage) => Some(outage),
            Phase::Resting { .. } | Phase::Renewing(_) => None,
        }
    }

    /// Since when the server has not answered; `None` if no answer is due.
    pub(super) fn unanswered_since(&self) -> Option<Moment> {
        let outage = self.outage().map(|outage| outage.began);
        outage.or(self.sent_at())
    }

    /// The connection to a server that does not answer.
    pub(super) fn silent(&self) -> Option<&Connection> {
        self.outage()?.silent.as_deref()
    }

    pub(super) fn outage_mut(&mut self) -> Option<&mut Outage> {
        match self {
            Phase::Away(outage) | Phase::Adopting(_, outage) => Some(outage),
            Phase::Resting { .. } | Phase::Renewing(_) => None,
        }
    }

    pub(super) fn is_provisional(&self) -> bool {
        matches!(
            self,
            Phase::Resting {
                is_provisional: true
            }
        )
    }

    /// Whether the server may have released the lock: its connection has ended, and no server has
    /// answered since.
    pub(super) fn is_cut(&self) -> bool {
        self.outage().is_some_and(|outage| outage.silent.is_none())
    }
}

impl Outage {
    fn without_silent(self) -> Outage {
        Outage {
            silent: None,
            ..self
        }
    }
}

/// The phase after a grant.
impl Default for Phase {
    fn default() -> Phase {
        Phase::Resting {
            is_provisional: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Settings;

    fn connection() -> Box<Connection> {
        let server = "alone".parse().expect("an address");
        Box::new(Connection::unconnected(&server, &Settings::default()))
    }

    fn phase(name: &str) -> Phase {
        let (now, is_silent) = (Moment::now(), name.ends_with("-silent"));
        let outage = Outage {
            began: now,
            silent: is_silent.then(connection),
        };
        match name.trim_end_matches("-silent") {
            "resting" => Phase::default(),
            "provisional" => Phase::Resting {
                is_provisional: true,
            },
            "renewing" => Phase::Renewing(now),
            "away" => Phase::Away(outage),
            "adopting" => Phase::Adopting(now, outage),
            other => panic!("{other}"),
        }
    }

    fn name(phase: &Phase) -> String {
        let name = match phase {
            Phase::Resting { .. } if phase.is_provisional() => "provisional",
            Phase::Resting { .. } => "resting",
            Phase::Renewing(_) => "renewing",
            Phase::Away(_) => "away",
            Phase::Adopting(..) => "adopting",
        };
        let silent = phase.silent().map_or("", |_| "-silent");
        format!("{name}{silent}")
    }

    fn event(name: &str) -> ConnectionEvent {
        match name {
            "sent" => ConnectionEvent::Sent(Moment::now()),
            "answered" => ConnectionEvent::Answered,
            "ended" => ConnectionEvent::Ended(Moment::now()),
            "set-aside" => ConnectionEvent::SetAside(connection()),
            "late" => ConnectionEvent::AnsweredLate(Renewal::Renew),
            "late-adopt" => ConnectionEvent::AnsweredLate(Renewal::Adopt),
            "gone" => ConnectionEvent::SilentGone,
            other => panic!("{other}"),
        }
    }

    /// One row for each phase and one column for each event; `.` for an event that changes nothing.
    const TABLE: &str = "
phase           sent            answered    ended       set-aside   late    late-adopt  gone
resting         renewing        .           away        .           .       .           .
provisional     renewing        .           away        .           .       .           .
renewing        .               resting     away        away-silent .       .           .
away            adopting        .           .           .           resting provisional .
away-silent     adopting-silent .           .           .           resting provisional away
adopting        .               provisional away        .           resting provisional .
adopting-silent .               provisional away-silent .           resting provisional adopting
";

    #[test]
    fn each_event_leads_from_each_phase_to_the_one_in_the_table() {
        let rows = TABLE.trim().lines();
        let mut rows = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
        let events = rows.next().expect("a row of events");
        for row in rows {
            for (happened, expected) in events.iter().zip(&row).skip(1) {
                let after = name(&phase(row[0]).after(event(happened)));
                let expected = if *expected == "." { row[0] } else { expected };
                assert_eq!(after, expected, "{} {happened}", row[0]);
            }
        }
    }

    #[test]
    fn a_lock_is_cut_until_a_server_answers_or_while_none_is_silent() {
        let is_cut = |name| phase(name).is_cut();
        assert!(["away", "adopting"].into_iter().all(is_cut));
        let held = ["resting", "provisional", "renewing"];
        let silent = ["away-silent", "adopting-silent"];
        assert!(!held.into_iter().chain(silent).any(is_cut));
    }
}
