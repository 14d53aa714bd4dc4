//! What a server does at its start with what the previous one left. Pure: no I/O and no clock.

use std::time::Duration;

use super::format::{Condition, ServerState};

/// What is at the path of the state file.
#[derive(Debug)]
pub enum Left {
    Nothing,
    /// A file that lost its content in a crash of the host.
    Blank,
    State(ServerState),
}

/// What a start depends on beside the file.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances<'a> {
    /// For how long this server settles after a crash.
    pub settle: Duration,
    /// Whether a server has used this path before.
    pub was_used: bool,
    /// The present boot; `None` if the system does not tell.
    pub boot_id: Option<&'a str>,
    /// Whether all clients run on this host.
    pub are_clients_local: bool,
}

/// Why a server settles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettlingReason {
    /// The previous server did not end in order.
    Crash,
    /// The file has disappeared.
    NoFile,
    /// The file has lost its content.
    BlankFile,
    /// The previous server ended in order while it settled.
    NotOver,
}

/// For how long a server settles, and for how long the next one must if this one crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settling {
    pub now: Duration,
    pub why: Option<SettlingReason>,
    /// Valid until this server has settled.
    pub after_crash: Duration,
}

impl Left {
    /// A fence that is above all fences that have been used, as far as the file knows.
    pub fn next_fence(&self) -> u64 {
        match self {
            Left::State(state) => state.next_fence,
            Left::Nothing | Left::Blank => 0,
        }
    }

    /// Whether and for how long the server settles.
    pub fn settling(&self, circumstances: &Circumstances<'_>) -> Settling {
        let own = circumstances.settle;
        let settling = |now, why, after_crash| Settling {
            now,
            why: Some(why),
            after_crash,
        };
        let none = Settling {
            now: Duration::ZERO,
            why: None,
            after_crash: own,
        };
        match self {
            Left::Nothing if !circumstances.was_used => none,
            Left::Nothing => settling(own, SettlingReason::NoFile, own),
            Left::Blank => settling(own, SettlingReason::BlankFile, own),
            Left::State(state) if circumstances.has_ended_clients_of(state) => none,
            Left::State(state) => {
                let longer = own.max(state.settle);
                match state.condition {
                    Condition::Open => settling(longer, SettlingReason::Crash, longer),
                    Condition::Closed if state.settling_left.is_zero() => none,
                    Condition::Closed => {
                        settling(state.settling_left, SettlingReason::NotOver, longer)
                    }
                }
            }
        }
    }
}

impl Circumstances<'_> {
    /// Whether no client that knew the previous server can still run, because the host has booted.
    fn has_ended_clients_of(&self, state: &ServerState) -> bool {
        let boots = state.boot_id.as_deref().zip(self.boot_id);
        self.are_clients_local && boots.is_some_and(|(then, now)| then != now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Duration = Duration::from_secs(20);

    const HERE: Circumstances<'_> = Circumstances {
        settle: OWN,
        was_used: true,
        boot_id: Some("now"),
        are_clients_local: false,
    };

    fn state(condition: Condition, settle: u64, left: u64) -> ServerState {
        ServerState {
            condition,
            next_fence: 7,
            settle: Duration::from_secs(settle),
            settling_left: Duration::from_secs(left),
            boot_id: Some("then".into()),
            holders: Vec::new(),
        }
    }

    /// For how long it settles, and for how long the next server would.
    fn seconds(left: &Left, circumstances: &Circumstances<'_>) -> (u64, u64) {
        let settling = left.settling(circumstances);
        assert_eq!(settling.now.is_zero(), settling.why.is_none());
        (settling.now.as_secs(), settling.after_crash.as_secs())
    }

    #[test]
    fn a_server_settles_unless_the_previous_one_ended_in_order() {
        let new = Circumstances {
            was_used: false,
            ..HERE
        };
        assert_eq!(seconds(&Left::Nothing, &new), (0, 20));
        assert_eq!(seconds(&Left::Nothing, &HERE), (20, 20));
        assert_eq!(seconds(&Left::Blank, &HERE), (20, 20));
        for (condition, settle, left, expected) in [
            (Condition::Open, 10, 0, (20, 20)),
            (Condition::Open, 60, 0, (60, 60)),
            (Condition::Closed, 60, 0, (0, 20)),
            (Condition::Closed, 60, 5, (5, 60)),
            (Condition::Closed, 10, 5, (5, 20)),
        ] {
            let left = Left::State(state(condition, settle, left));
            assert_eq!(seconds(&left, &HERE), expected, "{left:?}");
        }
    }

    #[test]
    fn after_a_boot_no_local_client_is_left() {
        let local = Circumstances {
            are_clients_local: true,
            ..HERE
        };
        let of_no_boot = |state: ServerState| ServerState {
            boot_id: None,
            ..state
        };
        for (condition, left) in [(Condition::Open, 0), (Condition::Closed, 5)] {
            let state = state(condition, 60, left);
            let seconds = |circumstances: &Circumstances<'_>| {
                seconds(&Left::State(state.clone()), circumstances).0
            };
            assert_eq!(seconds(&local), 0);
            for other in [
                HERE,
                Circumstances {
                    boot_id: Some("then"),
                    ..local
                },
                Circumstances {
                    boot_id: None,
                    ..local
                },
            ] {
                assert!(seconds(&other) > 0, "{other:?}");
            }
            let unknown = Left::State(of_no_boot(state));
            assert!(!unknown.settling(&local).now.is_zero());
        }
        assert_eq!(seconds(&Left::Nothing, &local), (20, 20));
        assert_eq!(seconds(&Left::Blank, &local), (20, 20));
    }
}
