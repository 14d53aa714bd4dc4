//! What a server does at its start with what the previous one left. Pure: no I/O and no clock.

use std::time::{Duration, Instant};

use super::format::{ClockTimes, Condition, ServerState};
use crate::latchd::statistics::histories::read_history;
use crate::latchd::table::{HolderRecord, KeyHistory, SaltKey};
use crate::wire::token::Fence;

/// What is at the path of the state file.
#[derive(Debug)]
pub enum Previous {
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
    /// Whether all clients run on this host, as the user says: a Unix socket can be forwarded.
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

impl Previous {
    /// A fence that is above all fences that have been used, as far as the file knows.
    pub fn next_fence(&self) -> u64 {
        match self {
            Previous::State(state) => state.next_fence,
            Previous::Nothing | Previous::Blank => 0,
        }
    }

    /// The grants to restore, each as it is now.
    pub fn grants(&self, circumstances: &Circumstances<'_>) -> Vec<HolderRecord> {
        let Previous::State(state) = self else {
            return Vec::new();
        };
        let is_kept_alone =
            state.condition == Condition::Open && circumstances.has_ended_clients_of(state);
        let grants = state.grants.values();
        let grants = grants.filter(|grant| grant.record.is_kept || !is_kept_alone);
        let restored = grants.filter_map(|grant| {
            let lease = match grant.end {
                Some(end) => circumstances.time_left(end, grant.record.lease),
                None => grant.record.lease,
            };
            // After a boot the wall clock may be off by decades, but a client knows the age.
            let is_known = grant.record.is_kept || circumstances.has_booted(state) == Some(false);
            let age = grant.record.age.filter(|_| is_known);
            (!lease.is_zero()).then(|| HolderRecord {
                lease,
                age: age.map(|age| age + circumstances.since(grant.written_at, state)),
                ..grant.record.clone()
            })
        });
        restored.collect()
    }

    /// The dead grants whose clients may still come back, each with how long.
    pub fn dead(&self, circumstances: &Circumstances<'_>) -> Vec<(Fence, Duration)> {
        let Previous::State(state) = self else {
            return Vec::new();
        };
        let dead = state.dead.iter();
        let dead = dead.map(|it| (it.fence, circumstances.time_left(it.end, it.left)));
        dead.filter(|(_, left)| !left.is_zero()).collect()
    }

    /// What the previous server remembered of keys.
    pub fn histories(&self, circumstances: &Circumstances<'_>, now: Instant) -> Vec<KeyHistory> {
        let Previous::State(state) = self else {
            return Vec::new();
        };
        let age = circumstances.since(state.written_at, state);
        let histories = state.histories.iter();
        let histories = histories.filter_map(|it| read_history(it, age, now));
        histories.collect()
    }

    /// The key of the salts that the server goes on with; `None` if it needs a new one. The key
    /// changes when no client has a token.
    pub fn salt_key(&self) -> Option<SaltKey> {
        let Previous::State(state) = self else {
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
            why,
            after_crash,
        };
        let none = settling(Duration::ZERO, None, own);
        match self {
            Previous::Nothing if !circumstances.was_used => none,
            Previous::Nothing => settling(own, Some(SettlingReason::NoFile), own),
            Previous::Blank => settling(own, Some(SettlingReason::BlankFile), own),
            Previous::State(state) if circumstances.has_ended_clients_of(state) => none,
            Previous::State(state) => {
                let longer = own.max(state.settle);
                match state.condition {
                    Condition::Open => settling(longer, Some(SettlingReason::Crash), longer),
                    Condition::Closed if state.settling_left.is_zero() => none,
                    Condition::Closed => {
                        settling(state.settling_left, Some(SettlingReason::NotOver), longer)
                    }
                }
            }
        }
    }
}

impl Circumstances<'_> {
    /// How much time is left until `end`: the longest that any clock leaves, because any may be
    /// ahead, but no more than what was left when the file was written. A boot sets the boot clock
    /// back.
    fn time_left(&self, end: ClockTimes, at_most: Duration) -> Duration {
        let by_boot = end.boot.saturating_sub(self.now.boot);
        let by_wall = end.wall.saturating_sub(self.now.wall);
        by_boot.max(by_wall).min(at_most)
    }

    /// How long ago something was written to the file, by the clock that nobody sets unless the
    /// host has booted.
    fn since(&self, written_at: ClockTimes, state: &ServerState) -> Duration {
        if self.has_booted(state) == Some(false) {
            self.now.boot.saturating_sub(written_at.boot)
        } else {
            self.now.wall.saturating_sub(written_at.wall)
        }
    }

    /// Whether no client that knew the previous server can still run, because the host has booted.
    fn has_ended_clients_of(&self, state: &ServerState) -> bool {
        self.are_clients_local && self.has_booted(state) == Some(true)
    }

    /// Whether the host has booted since the file was written; `None` if the system does not tell.
    fn has_booted(&self, state: &ServerState) -> Option<bool> {
        Some(state.boot_id.as_deref()? != self.boot_id?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeMap;

    use crate::latchd::state_file::format::SavedGrant;
    use crate::wire::terms::Terms;
    use crate::wire::token::{Salt, Token};

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
            written_at: at(950),
            salt_key: Some(SaltKey([7; 16])),
            histories: Vec::new(),
            grants: BTreeMap::new(),
            dead: Vec::new(),
        }
    }

    /// For how long it settles, and for how long the next server would.
    fn seconds(previous: &Previous, circumstances: &Circumstances<'_>) -> (u64, u64) {
        let settling = previous.settling(circumstances);
        assert_eq!(settling.now.is_zero(), settling.why.is_none());
        (settling.now.as_secs(), settling.after_crash.as_secs())
    }

    #[test]
    fn a_server_settles_unless_the_previous_one_ended_in_order() {
        let new = Circumstances {
            was_used: false,
            ..HERE
        };
        assert_eq!(seconds(&Previous::Nothing, &new), (0, 20));
        assert_eq!(seconds(&Previous::Nothing, &HERE), (20, 20));
        assert_eq!(seconds(&Previous::Blank, &HERE), (20, 20));
        for (condition, settle, left, expected) in [
            (Condition::Open, 10, 0, (20, 20)),
            (Condition::Open, 60, 0, (60, 60)),
            (Condition::Closed, 60, 0, (0, 20)),
            (Condition::Closed, 60, 5, (5, 60)),
            (Condition::Closed, 10, 5, (5, 20)),
        ] {
            let previous = Previous::State(state(condition, settle, left));
            assert_eq!(seconds(&previous, &HERE), expected, "{previous:?}");
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
                seconds(&Previous::State(state.clone()), circumstances).0
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
            let unknown = Previous::State(of_no_boot(state));
            assert!(!unknown.settling(&local).now.is_zero());
        }
        assert_eq!(seconds(&Previous::Nothing, &local), (20, 20));
        assert_eq!(seconds(&Previous::Blank, &local), (20, 20));
    }
    /// A grant of which 100 seconds are left.
    fn grant(fence: u64, is_kept: bool, end: Option<ClockTimes>) -> SavedGrant {
        let token = Token {
            fence: Fence(fence),
            salt: Salt(0),
        };
        let record = HolderRecord {
            is_kept,
            ..HolderRecord::new("k", Terms::LOCK, token, Duration::from_secs(100))
        };
        SavedGrant {
            record,
            end,
            written_at: at(950),
        }
    }

    /// The fences of the restored grants, with what is left of their leases in seconds.
    fn restored(state: ServerState, circumstances: &Circumstances<'_>) -> Vec<(u64, u64)> {
        let grants = Previous::State(state).grants(circumstances);
        let restored = grants.iter();
        restored
            .map(|it| (it.token.fence.0, it.lease.as_secs()))
            .collect()
    }

    fn third(state: &mut ServerState) -> &mut SavedGrant {
        state.grants.get_mut(&Fence(3)).expect("there are three")
    }

    fn with_grants(condition: Condition, boot_id: Option<&str>) -> ServerState {
        ServerState {
            boot_id: boot_id.map(str::to_owned),
            grants: BTreeMap::from([
                (Fence(1), grant(1, true, Some(at(1050)))),
                (Fence(2), grant(2, true, Some(at(999)))),
                (Fence(3), grant(3, false, None)),
            ]),
            ..state(condition, 60, 0)
        }
    }

    #[test]
    fn a_kept_grant_ends_when_no_clock_leaves_any_time() {
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
            for boot_id in [Some("now"), Some("then"), None] {
                let restored = |wall, boot| restored(boot_id, wall, boot);
                assert_eq!(restored(1000, 1000), [(1, 50), (3, 100)]);
                // One of the clocks is ahead.
                assert_eq!(restored(5000, 1000), [(1, 50), (3, 100)]);
                assert_eq!(restored(1000, 5000), [(1, 50), (3, 100)]);
                assert_eq!(restored(1050, 1050), [(3, 100)]);
                // One of them has been set back. No more is left than at the writing.
                assert_eq!(restored(970, 1000), [(1, 80), (2, 29), (3, 100)]);
                assert_eq!(restored(1000, 900), [(1, 100), (2, 99), (3, 100)]);
            }
        }
    }

    /// Otherwise the maximum hold time could end a grant whose lease has not ended.
    #[test]
    fn a_clock_that_is_set_makes_no_grant_older() {
        for (boot_id, written_at, wall, age) in [
            ("now", 950, 1000, Some(57)),
            ("now", 950, 900_000, Some(57)),
            // In a later batch.
            ("now", 990, 1000, Some(17)),
            // After a boot, no clock is known to have gone on all the time.
            ("then", 950, 1000, None),
        ] {
            let mut state = with_grants(Condition::Open, Some(boot_id));
            let grant = third(&mut state);
            grant.record.age = Some(Duration::from_secs(7));
            grant.written_at = at(written_at);
            let mut here = HERE;
            here.now.wall = at(wall).wall;
            let grants = Previous::State(state).grants(&here);
            let found = grants.last().and_then(|it| it.age);
            assert_eq!(
                found.map(|it| it.as_secs()),
                age,
                "{boot_id} {written_at} {wall}"
            );
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
        assert!(Previous::Nothing.grants(&HERE).is_empty());
        assert!(Previous::Blank.grants(&HERE).is_empty());
    }
}
