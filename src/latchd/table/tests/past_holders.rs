//! Which past holders and refused claims of keys are remembered, and for how long; and when
//! expected work is overdue.

use super::*;
use crate::latchd::table::history::MAX_PAST;

impl World {
    fn release_with(&mut self, key: &str, token: Token, status: Option<u8>) {
        let table = &mut self.table;
        let released = table.release(ELSEWHERE, key, Kind::Lock, token, status, self.now);
        assert_eq!(released, Ok(Answer::Released));
        self.remember();
    }

    /// Keeps a grant of `k` for a minute.
    fn keep_with(&mut self, token: Token, status: Option<u8>) {
        let table = &mut self.table;
        let kept = table.keep("k", token, secs(60), status, |_| None, self.now);
        assert!(kept.is_ok());
        self.remember();
    }

    /// Remembers the events that were noted, as of a client with the tag "t".
    fn remember(&mut self) {
        let events: Vec<ClaimEvent> = self.table.take_events().collect();
        for event in &events {
            let holder = event.holder.as_ref();
            let holder = holder.map(|(conn, tag)| tag.clone().unwrap_or_else(|| named(conn.0)));
            let client = if event.fate.is_refusal() {
                named(event.conn.0)
            } else {
                "t".into()
            };
            self.table.remember(event, [Some(client), holder], self.now);
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

    /// A client does not get the lock, and does not wait for it.
    fn busy(&mut self, conn: u64, key: &str) {
        self.table.note_busy(ConnId(conn), key);
        self.remember();
    }

    /// The refused claims of a key: who, why, for how long it had waited, how long ago that was,
    /// and who held the key.
    fn refused(&self, key: &str) -> Vec<String> {
        let history = self.table.history(key, self.now).expect("it has one");
        let shown = history.refused.iter().map(|claim| {
            let client = claim.tag.as_deref().expect("it has a name");
            let (waited, age) = (claim.waited.as_secs(), history.age(claim).as_secs());
            let holder = claim.holder.as_deref().unwrap_or("nobody");
            assert_eq!((claim.fence, claim.held), (None, Duration::ZERO));
            format!("{client} {:?} {waited} {age} {holder}", claim.fate)
        });
        shown.collect()
    }

    /// What has become overdue, or no longer is.
    fn overdue(&mut self) -> Vec<String> {
        self.table.note_overdue(self.now);
        self.events()
    }
}

/// How a client without a tag is called.
fn named(conn: u64) -> Arc<str> {
    format!("c{conn}").into()
}

#[test]
fn a_claim_in_vain_is_remembered_with_who_held_the_key() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.advance(secs(1));
    let second = world.queued(2, "k");
    world.advance(secs(3));
    world.cancel(second);
    world.remember();
    world.busy(3, "k");
    // As many wait as the claim allows.
    let mut ask = lock_of("k");
    ask.max_waiters = Some(0);
    assert_eq!(world.claim(4, &ask), Err(Refusal::MaxWaiters));
    // It is the claim's own wish: no option of the server is to be named for it.
    assert_eq!(world.table.take_cap_reached(), None);
    world.remember();
    world
        .table
        .keep(
            "k",
            token,
            secs(60),
            None,
            |_| Some("kept".into()),
            world.now,
        )
        .expect("room");
    world.busy(5, "k");
    world.advance(secs(2));
    let refused = [
        "c2 GaveUp 3 2 c1",
        "c3 Busy 0 2 c1",
        "c4 Busy 0 2 c1",
        "c5 Busy 0 2 kept",
    ];
    assert_eq!(world.refused("k"), refused);
    // From now on the holders are remembered, too.
    assert!(world.past("k").is_empty());
    world.release_with("k", token, None);
    assert_eq!(world.past("k"), ["Ended(Released(None)) 0 6"]);
    world.run("k", None);
    assert_eq!(world.past("k").len(), 2);
    // A server that settles refuses claims that nobody else has made.
    world.busy(6, "free");
    assert_eq!(world.refused("free"), ["c6 Busy 0 0 nobody"]);
}

#[test]
fn a_client_that_asks_over_and_over_pushes_out_no_other() {
    let mut world = World::new();
    world.held(1, "k");
    for conn in 2..12 {
        world.busy(conn, "k");
    }
    for _ in 0..50 {
        world.advance(Duration::from_millis(100));
        world.busy(11, "k");
    }
    let refused = world.refused("k");
    assert_eq!(refused.len(), MAX_PAST);
    assert_eq!(refused[0], "c2 Busy 0 5 c1");
    assert_eq!(refused[MAX_PAST - 1], "c11 Busy 0 0 c1");
    // Another client, or another reason, is an entry of its own.
    let ticket = world.queued(11, "k");
    world.cancel(ticket);
    world.remember();
    world.busy(11, "k");
    let ends = ["c11 Busy 0 0 c1", "c11 GaveUp 0 0 c1", "c11 Busy 0 0 c1"];
    assert_eq!(world.refused("k")[MAX_PAST - 3..], ends);
    assert_eq!(world.refused("k").len(), MAX_PAST);
}

#[test]
fn refused_claims_push_out_no_history_and_are_pushed_out_first() {
    let mut world = World::new();
    world.run("job", Some(0));
    // The holders of these keys tell no status, and are newer than the job.
    for number in 2..MAX_HISTORIES {
        let key = format!("object{number}");
        world.busy(9, &key);
        world.run(&key, None);
    }
    world.busy(9, "refused");
    world.busy(9, "one more");
    assert!(!world.has_history("one more"));
    // Of a key with refused claims alone, no holder is missed.
    world.run("second job", Some(1));
    assert!(!world.has_history("refused"));
    world.run("object2", None);
    world.run("third job", Some(1));
    assert!(!world.has_history("object3"));
    assert!(
        ["job", "second job", "object2", "object4"].map(|key| world.has_history(key)) == [true; 4]
    );
}

#[test]
fn what_becomes_overdue_is_told_once_and_so_is_its_end() {
    let mut world = World::new();
    world.table.expect("k", secs(60), world.now);
    world.table.expect("l", secs(90), world.now);
    // A standby server, to which no client talks, tells nothing. Once it is active, it expects all
    // anew.
    world.advance(secs(91));
    assert_eq!(world.table.next_overdue(), None);
    world.table.expect_anew(world.now);
    assert!(world.overdue().is_empty());
    let nanosecond = Duration::from_nanos(1);
    let due = world.now + secs(60) + nanosecond;
    assert_eq!(world.table.next_overdue(), Some(due));
    world.advance(secs(60));
    assert!(world.overdue().is_empty());
    world.advance(nanosecond);
    assert_eq!(world.overdue(), ["overdue k of 0 after 60"]);
    world.advance(secs(10));
    assert!(world.overdue().is_empty());
    assert_eq!(world.table.next_overdue(), Some(due + secs(30)));
    // Neither a failure nor a refused claim ends it.
    world.run("k", Some(1));
    world.busy(2, "k");
    assert!(world.overdue().is_empty());
    world.run("k", Some(0));
    assert_eq!(world.table.next_overdue(), Some(world.now));
    assert_eq!(world.overdue(), ["on time k of 0 after 0"]);
    world.run("k", Some(0));
    assert!(world.overdue().is_empty());
    world.advance(secs(61));
    let both = ["overdue k of 0 after 61", "overdue l of 0 after 134"];
    assert_eq!(world.overdue(), both);
    assert_eq!(world.table.next_overdue(), None);
}

#[test]
fn restored_work_is_overdue_if_its_last_success_is_too_old() {
    let mut world = World::new();
    world.table.expect("k", secs(60), world.now);
    world.table.expect("l", secs(60), world.now);
    world.run("k", Some(0));
    world.held(1, "k");
    world.busy(2, "k");
    world.run("l", Some(1));
    world.advance(secs(61));
    let remembered = world.table.histories(None, 9, world.now);
    let mut next = World::new();
    next.now = world.now;
    for key in ["k", "l"] {
        next.table.expect(key, secs(60), next.now);
    }
    next.table.expect_anew(next.now);
    assert!(next.overdue().is_empty());
    // A newer server may remember more.
    let mut longer = remembered[0].clone();
    for number in 0..=MAX_PAST as u64 {
        let mut claim = longer.refused[0].clone();
        claim.tag = Some(named(number));
        longer.refused.push(claim);
    }
    next.table.restore_history(longer);
    next.table.restore_history(remembered[1].clone());
    assert_eq!(next.refused("k").len(), MAX_PAST);
    assert_eq!(next.refused("k")[0], "c1 Busy 0 62 c1");
    assert_eq!(next.past("k").len(), 1);
    // The work that has never succeeded has its whole time.
    assert_eq!(next.overdue(), ["overdue k of 0 after 62"]);
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
    world.disconnect(3, AtClose::Release);
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
fn a_kept_grant_is_past_once_its_status_is_told_and_only_once() {
    let mut world = World::new();
    let token = world.held(1, "k");
    world.advance(secs(2));
    world.keep_with(token, Some(0));
    assert_eq!(world.past("k"), ["Kept(0) 0 2"]);
    // A client without an answer repeats it.
    world.keep_with(token, Some(0));
    world.advance(secs(60));
    world.expire();
    world.remember();
    assert_eq!(world.past("k"), ["Kept(0) 0 2"]);

    // Without a status, it is a reservation: it is over when its time is.
    let token = world.held(1, "k");
    world.keep_with(token, None);
    world.advance(secs(60));
    world.expire();
    world.remember();
    assert_eq!(world.past("k"), ["Kept(0) 0 2", "Ended(Expired) 0 60"]);

    // A client that adopts it has work of its own under it.
    let token = world.held(1, "k");
    world.keep_with(token, Some(1));
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
fn an_overdue_job_is_not_said_to_run_or_to_be_on_time() {
    let mut world = World::new();
    world.table.expect("k", secs(60), world.now);
    let state = |world: &World| {
        let history = world.table.history("k", world.now).expect("it is expected");
        let page = world.table.histories(None, 9, world.now);
        assert_eq!(page, std::slice::from_ref(&history));
        history.job_state(&history.expected.expect("it is expected"))
    };
    assert_eq!(state(&world), "on-time");
    let token = world.held(1, "k");
    assert_eq!(state(&world), "running");
    world.advance(secs(9));
    world.release_with("k", token, None);
    assert_eq!(state(&world), "on-time");
    world.advance(secs(51));
    assert_eq!(state(&world), "on-time");
    world.advance(secs(1));
    assert_eq!(state(&world), "did-not-succeed");
    world.advance(secs(10));
    assert_eq!(state(&world), "did-not-run");
    // It is overdue all the same: a reservation holds the key, too.
    let token = world.held(1, "k");
    assert_eq!(state(&world), "did-not-run");
    world.keep_with(token, None);
    assert_eq!(state(&world), "did-not-run");
    // The work has ended, whoever keeps the key from others.
    world.keep_with(token, Some(1));
    assert_eq!(state(&world), "did-not-succeed");
    world.release_with("k", token, None);
    assert_eq!(state(&world), "did-not-succeed");
    world.advance(secs(61));
    assert_eq!(state(&world), "did-not-run");
    world.run("k", Some(0));
    assert_eq!(state(&world), "on-time");
}

#[test]
fn a_history_needs_no_more_memory_than_is_counted() {
    // The two counts of an `Arc`, and what an allocator adds.
    const OVERHEAD: usize = 32;
    let tag = 128 + OVERHEAD;
    let holders = MAX_PAST * (size_of::<PastClaim>() + tag) + OVERHEAD;
    let refused = MAX_PAST * (size_of::<PastClaim>() + 2 * tag) + OVERHEAD;
    // A node of the map may be half empty.
    let entry = 2 * (size_of::<Key>() + size_of::<Histories>());
    let len = holders + refused + entry + 256 + OVERHEAD;
    assert!(len as u64 <= PER_HISTORY, "{len}");
}
