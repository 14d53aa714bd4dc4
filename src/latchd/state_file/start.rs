//! What a server does at its start with what the previous one left. Pure: no I/O and no clock.

use std::time::Duration;

use super::format::{ClockTimes, Condition, ServerState};
use crate::table::{HolderRecord, SaltKey};
use crate::token::Fence;

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
    /// The present time.
    pub now: ClockTimes,
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

    /// The grants to restore, each with a lease that begins now.
    pub fn grants(&self, circumstances: &Circumstances<'_>) -> Vec<HolderRecord> {
        let Left::State(state) = self else {
            return Vec::new();
        };
        let is_kept_alone =
            state.condition == Condition::Open && circumstances.has_ended_clients_of(state);
        let grants = state.grants.iter();
        let grants = grants.filter(|grant| grant.record.is_kept || !is_kept_alone);
        let restored = grants.filter_map(|grant| {
            let lease = match grant.end {
                Some(end) => circumstances.time_left(end, grant.record.lease, state),
                None => grant.record.lease,
            };
            (!lease.is_zero()).then(|| HolderRecord {
                lease,
                ..grant.record.clone()
            })
        });
        restored.collect()
    }

    /// The dead grants whose leases would not be over yet, each with what is left of its lease.
    /// `None` stands for those that are missing in the file.
    pub fn dead(&self, circumstances: &Circumstances<'_>) -> Vec<(Option<Fence>, Duration)> {
        let Left::State(state) = self else {
            return Vec::new();
        };
        let dead = state.dead.iter().map(|dead| {
            let left = circumstances.time_left(dead.end, dead.left, state);
            (dead.fence, left)
        });
        dead.filter(|(_, left)| !left.is_zero()).collect()
    }

    /// The key of the salts that the server goes on with; `None` if it needs a new one. The key
    /// changes when no client has a token.
    pub fn salt_key(&self) -> Option<SaltKey> {
        let Left::State(state) = self else {
            return None;
        };
        let is_unused = state.condition == Condition::Closed
            && state.settling_left.is_zero()
            && state.grants.is_empty();
        state.salt_key.filter(|_| !is_unused)
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
    /// How much time is left until `end`, which is at most what was left when the file was written.
    /// The boot clock counts in the same boot. In a later one the wall clock does, unless it has
    /// been set back.
    fn time_left(&self, end: ClockTimes, at_most: Duration, state: &ServerState) -> Duration {
        let boots = state.boot_id.as_deref().zip(self.boot_id);
        let left = if boots.is_some_and(|(then, now)| then == now) {
            end.boot.saturating_sub(self.now.boot)
        } else if self.now.wall >= state.written_at {
            end.wall.saturating_sub(self.now.wall)
        } else {
            at_most
        };
        left.min(at_most)
    }

    /// Whether no client that knew the previous server can still run, because the host has booted.
    fn has_ended_clients_of(&self, state: &ServerState) -> bool {
        let boots = state.boot_id.as_deref().zip(self.boot_id);
        self.are_clients_local && boots.is_some_and(|(then, now)| then != now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::latchd::state_file::format::SavedGrant;
    use crate::token::{Salt, Token};

    const OWN: Duration = Duration::from_secs(20);

    const HERE: Circumstances<'_> = Circumstances {
        settle: OWN,
        was_used: true,
        boot_id: Some("now"),
        are_clients_local: false,
        now: at(1000),
    };

    /// A time by the wall clock, whose host booted at 900.
    const fn at(seconds: u64) -> ClockTimes {
        ClockTimes {
            wall: Duration::from_secs(seconds),
            boot: Duration::from_secs(seconds - 900),
        }
    }

    fn state(condition: Condition, settle: u64, left: u64) -> ServerState {
        ServerState {
            condition,
            next_fence: 7,
            settle: Duration::from_secs(settle),
            settling_left: Duration::from_secs(left),
            boot_id: Some("then".into()),
            written_at: Duration::from_secs(950),
            salt_key: Some(SaltKey([7; 16])),
            grants: Vec::new(),
            dead: Vec::new(),
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
    /// A grant of which 100 seconds are left.
    fn grant(fence: u64, is_kept: bool, end: Option<ClockTimes>) -> SavedGrant {
        let token = Token {
            fence: Fence(fence),
            salt: Salt(0),
        };
        let record = HolderRecord {
            is_kept,
            ..HolderRecord::of_lock("k", token, Duration::from_secs(100))
        };
        SavedGrant { record, end }
    }

    /// The fences of the restored grants, with what is left of their leases in seconds.
    fn restored(state: ServerState, circumstances: &Circumstances<'_>) -> Vec<(u64, u64)> {
        let grants = Left::State(state).grants(circumstances);
        let restored = grants.iter();
        restored
            .map(|it| (it.token.fence.0, it.lease.as_secs()))
            .collect()
    }

    fn with_grants(condition: Condition, boot_id: Option<&str>) -> ServerState {
        ServerState {
            boot_id: boot_id.map(str::to_owned),
            grants: vec![
                grant(1, true, Some(at(1050))),
                grant(2, true, Some(at(999))),
                grant(3, false, None),
            ],
            ..state(condition, 60, 0)
        }
    }

    #[test]
    fn a_kept_grant_ends_by_a_clock_that_can_be_trusted() {
        let circumstances = |wall, boot| Circumstances {
            now: ClockTimes {
                wall: at(wall).wall,
                boot: at(boot).boot,
            },
            ..HERE
        };
        for condition in [Condition::Open, Condition::Closed] {
            let restored = |boot_id, wall, boot| {
                restored(with_grants(condition, boot_id), &circumstances(wall, boot))
            };
            // The same boot: the boot clock counts.
            assert_eq!(restored(Some("now"), 900, 1000), [(1, 50), (3, 100)]);
            // It has been set back with the whole machine.
            let most = [(1, 100), (2, 99), (3, 100)];
            assert_eq!(restored(Some("now"), 5000, 900), most);
            // Another boot: the wall clock does.
            for boot_id in [Some("then"), None] {
                assert_eq!(restored(boot_id, 1000, 900), [(1, 50), (3, 100)]);
                assert_eq!(restored(boot_id, 1050, 900), [(3, 100)]);
                // It has been set back.
                let all = [(1, 100), (2, 100), (3, 100)];
                assert_eq!(restored(boot_id, 949, 900), all);
            }
        }
    }

    #[test]
    fn after_a_boot_only_kept_grants_of_local_clients_are_left() {
        let local = Circumstances {
            are_clients_local: true,
            ..HERE
        };
        let open = with_grants(Condition::Open, Some("then"));
        assert_eq!(restored(open.clone(), &HERE), [(1, 50), (3, 100)]);
        assert_eq!(restored(open, &local), [(1, 50)]);
        let same = with_grants(Condition::Open, Some("now"));
        assert_eq!(restored(same, &local), [(1, 50), (3, 100)]);
        assert!(Left::Nothing.grants(&HERE).is_empty());
        assert!(Left::Blank.grants(&HERE).is_empty());
    }
}
