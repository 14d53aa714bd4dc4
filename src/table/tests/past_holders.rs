//! Which past holders of keys are remembered, and for how long.

use super::*;
use crate::table::history::MAX_PAST;

impl World {
    fn release_with(&mut self, key: &str, token: Token, status: Option<u8>) {
        let table = &mut self.table;
        let released = table.release(ELSEWHERE, key, Kind::Lock, token, status, self.now);
        assert_eq!(released, Ok(Answer::Released));
        self.remember();
    }

    /// Remembers the events that were noted, as of a client with the tag "t".
    fn remember(&mut self) {
        let events: Vec<ClaimEvent> = self.table.take_events().collect();
        let tag = Arc::from("t");
        for event in &events {
            self.table.remember(event, Some(&tag), self.now);
        }
        self.check();
    }

    /// A lock is taken, and released after a second.
    fn run(&mut self, key: &str, status: Option<u8>) {
        let token = self.held(1, key);
        self.advance(secs(1));
        self.release_with(key, token, status);
    }

    /// The past holders of a key, each with how it ended, its status, and for how long it waited
    /// and held.
    fn past(&self, key: &str) -> Vec<String> {
        let history = self.table.history(key, self.now);
        let past = history.map_or_else(Vec::new, |history| history.past);
        let shown = past.iter().map(|holder| {
            let (waited, held) = (holder.waited.as_secs(), holder.held.as_secs());
            format!("{:?} {waited} {held}", holder.fate)
        });
        shown.collect()
    }

    fn has_history(&self, key: &str) -> bool {
        self.table.history(key, self.now).is_some()
    }
}

#[test]
fn a_history_begins_with_the_first_status() {
    let mut world = World::new();
    world.run("k", None);
    assert!(!world.has_history("k"));
    world.run("k", Some(3));
    world.run("k", None);
    assert!(world.table.prune(Duration::ZERO, 9, world.now));
    world.held(1, "k");
    let waiter = world.queued(2, "k");
    world.advance(secs(10));
    world.expire();
    world.remember();
    let token = world.collected(waiter);
    world.advance(secs(2));
    let broken = world
        .table
        .break_grant("k", token.fence, ELSEWHERE, world.now);
    assert!(broken.is_some());
    world.held(3, "k");
    world.disconnect(3, Holdings::Release);
    world.remember();
    let past = [
        "Ended(Released(Some(3))) 0 1",
        "Ended(Released(None)) 0 1",
        "Ended(Expired) 0 10",
        "Ended(Broken(ConnId(99))) 10 2",
        "Ended(Abandoned) 0 0",
    ];
    assert_eq!(world.past("k"), past);
    world.run("other", None);
    assert!(!world.has_history("other"));
}

#[test]
fn ten_past_holders_of_a_key_are_remembered() {
    let mut world = World::new();
    for status in 0..=MAX_PAST as u8 {
        world.run("k", Some(status));
    }
    let past = world.past("k");
    assert_eq!(past.len(), MAX_PAST);
    assert_eq!(past[0], "Ended(Released(Some(1))) 0 1");
    let history = world.table.history("k", world.now).expect("there is one");
    let ages: Vec<u64> = history
        .past
        .iter()
        .map(|it| history.age(it).as_secs())
        .collect();
    assert_eq!(ages, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
    assert_eq!(history.past[0].tag.as_deref(), Some("t"));
}

#[test]
fn a_grant_that_its_client_never_learned_of_is_not_remembered() {
    let mut world = World::new();
    world.run("k", Some(0));
    let token = world.held(1, "k");
    world.queued(2, "k");
    world.release_with("k", token, None);
    world.disconnect(2, Holdings::Release);
    world.remember();
    assert_eq!(world.past("k").len(), 2);
}

#[test]
fn a_kept_grant_is_past_once_its_status_is_told_and_only_once() {
    let mut world = World::new();
    let keep = |world: &mut World, token, status| {
        let table = &mut world.table;
        let kept = table.keep("k", token, secs(60), status, |_| None, world.now);
        assert!(kept.is_ok());
        world.remember();
    };
    let token = world.held(1, "k");
    world.advance(secs(2));
    keep(&mut world, token, Some(0));
    assert_eq!(world.past("k"), ["Kept(0) 0 2"]);
    // A client without an answer repeats it.
    keep(&mut world, token, Some(0));
    world.advance(secs(60));
    world.expire();
    world.remember();
    assert_eq!(world.past("k"), ["Kept(0) 0 2"]);

    // Without a status, it is a reservation: it is over when its time is.
    let token = world.held(1, "k");
    keep(&mut world, token, None);
    world.advance(secs(60));
    world.expire();
    world.remember();
    assert_eq!(world.past("k"), ["Kept(0) 0 2", "Ended(Expired) 0 60"]);

    // A client that adopts it has work of its own under it.
    let token = world.held(1, "k");
    keep(&mut world, token, Some(1));
    for _ in 0..2 {
        assert_eq!(world.adopt(3, "k", token, 10), Ok(()));
    }
    world.release_with("k", token, Some(2));
    assert_eq!(
        world.past("k")[2..],
        ["Kept(1) 0 0", "Ended(Released(Some(2))) 0 0"]
    );
}

#[test]
fn the_key_unused_for_longest_loses_its_history() {
    let mut world = World::new();
    world.table.expect("expected", secs(60), world.now);
    let key = |number: usize| format!("k{number}");
    for number in 0..MAX_HISTORIES {
        world.run(&key(number), Some(0));
    }
    world.run(&key(0), None);
    world.run("one more", Some(0));
    assert!(world.has_history("expected"));
    assert!(world.has_history(&key(0)));
    assert!(!world.has_history(&key(1)));
    // It is no longer noted either.
    world.run(&key(1), None);
    assert!(!world.has_history(&key(1)));
    for number in 0..3 * MAX_HISTORIES {
        world.run(&format!("other{number}"), Some(0));
    }
    let count = world.table.histories(None, usize::MAX, world.now).len();
    assert_eq!(count, MAX_HISTORIES + 1);
    let pages = world.table.histories(None, 1, world.now);
    let next = world.table.histories(Some(&pages[0].key), 1, world.now);
    assert_eq!(
        [&pages[0], &next[0]].map(|it| it.key.as_str()),
        ["expected", "other512"]
    );
}

#[test]
fn what_is_expected_is_overdue_unless_it_succeeds_in_time() {
    let mut world = World::new();
    world.table.expect("k", secs(60), world.now);
    let seen = |world: &World| {
        let expected = world.table.expected();
        let [(key, expected)] = &expected[..] else {
            panic!("one is expected: {expected:?}");
        };
        assert_eq!(key.as_str(), "k");
        let is_overdue = expected.is_overdue(world.now);
        (
            expected.age(world.now).as_secs(),
            expected.has_succeeded,
            is_overdue,
        )
    };
    world.advance(secs(60));
    assert_eq!(seen(&world), (60, false, false));
    world.advance(secs(1));
    world.run("k", Some(1));
    world.run("k", None);
    assert_eq!(seen(&world), (63, false, true));
    world.run("k", Some(0));
    assert_eq!(seen(&world), (0, true, false));
    world.advance(secs(61));
    assert_eq!(seen(&world), (61, true, true));
    assert_eq!(world.past("k").len(), 3);
}

#[test]
fn an_overdue_job_that_runs_is_not_said_not_to_run() {
    let mut world = World::new();
    world.table.expect("k", secs(60), world.now);
    let state = |world: &World| {
        let history = world.table.history("k", world.now).expect("it is expected");
        let page = world.table.histories(None, 9, world.now);
        assert_eq!(page, std::slice::from_ref(&history));
        history.job_state(&history.expected.expect("it is expected"))
    };
    assert_eq!(state(&world), JobState::OnTime);
    world.advance(secs(61));
    assert_eq!(state(&world), JobState::DidNotRun);
    let token = world.held(1, "k");
    assert_eq!(state(&world), JobState::Running);
    let kept = |world: &mut World, status| {
        let table = &mut world.table;
        let kept = table.keep("k", token, secs(60), status, |_| None, world.now);
        assert!(kept.is_ok());
        world.remember();
        state(world)
    };
    assert_eq!(kept(&mut world, None), JobState::Running);
    // The work has ended, whoever keeps the key from others.
    assert_eq!(kept(&mut world, Some(1)), JobState::DidNotSucceed);
    world.release_with("k", token, None);
    assert_eq!(state(&world), JobState::DidNotSucceed);
    world.advance(secs(61));
    assert_eq!(state(&world), JobState::DidNotRun);
    world.run("k", Some(0));
    assert_eq!(state(&world), JobState::OnTime);
}

#[test]
fn a_history_needs_no_more_memory_than_is_counted() {
    // The two counts of an `Arc`, and what an allocator adds.
    const OVERHEAD: usize = 32;
    let tag = 128 + OVERHEAD;
    let holders = MAX_PAST * (size_of::<PastHolder>() + tag) + OVERHEAD;
    // A node of the map may be half empty.
    let entry = 2 * (size_of::<Key>() + size_of::<Histories>());
    let len = holders + entry + 256 + OVERHEAD;
    assert!(len as u64 <= PER_HISTORY, "{len}");
}

#[cfg(feature = "cluster")]
#[test]
fn a_server_that_becomes_active_expects_a_success_anew() {
    let mut world = World::new();
    world.table.expect("k", secs(60), world.now);
    world.advance(secs(61));
    let is_overdue = |world: &World| world.table.expected()[0].1.is_overdue(world.now);
    assert!(is_overdue(&world));
    world.table.expect_anew(world.now);
    assert!(!is_overdue(&world));
    world.advance(secs(61));
    assert!(is_overdue(&world));
}
