//! What a journal and a state file are told, and when.

use super::*;
use crate::latchd::table::{Change, HolderRecord, News, Proof, ProofRules, Recording, SaltKey};
use crate::wire::terms::Terms;
use crate::wire::token::{Fence, Salt, Token};

/// Keeps the changes, in short: `+fence`, `-fence`, and `dead fence` if the client may come back
/// with the token.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Recorder for Notes {
    fn record(&mut self, changes: Vec<Change>) {
        let describe = |change: Change| match change.news {
            News::Held(_) => format!("+{}", change.fence),
            News::Ended => format!("-{}", change.fence),
            News::Dead(_) => format!("dead {}", change.fence),
        };
        self.0.lock().extend(changes.into_iter().map(describe));
    }

    fn is_written(&self, _: &str) -> bool {
        false
    }

    fn stop(&mut self) {
        self.0.lock().push("closed".into());
    }
}

impl Notes {
    fn of(arbiter: &Arbiter) -> Notes {
        let notes = Notes::default();
        arbiter.record_with(Recording::All, Box::new(notes.clone()));
        notes
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().clone()
    }
}

#[test]
fn a_change_is_recorded_when_the_visit_is_over() {
    let (arbiter, holder, waiter) = arbiter_and_two();
    let notes = Notes::of(&arbiter);
    let grant = granted(&holder, FOREVER);
    assert_eq!(notes.all(), ["+1"]);
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    holder
        .release("k", Kind::Lock, grant.token, None)
        .expect("it is held");
    assert_eq!(notes.all(), ["+1", "-1", "+2"]);
    let (waiter, answer) = blocked.end();
    assert!(matches!(answer, Ok(Answer::Granted(_))));
    waiter.leave(AtClose::Release);
    assert_eq!(notes.all(), ["+1", "-1", "+2", "-2"]);
}

#[test]
fn the_reaper_records_the_end_of_leases() {
    let (arbiter, holder, _waiter) = arbiter_and_two();
    let notes = Notes::of(&arbiter);
    granted(&holder, Duration::from_secs(10));
    arbiter.advance(Duration::from_secs(10));
    until("the lease is not over", || notes.all() == ["+1", "-1"]);
}

#[test]
fn with_a_journal_each_thread_sends_its_own_grant() {
    let arbiter = arbiter();
    Notes::of(&arbiter);
    let holder = arbiter.connect(ConnId(1), None);
    let unused = Socket {
        send_grant: Box::new(|_| panic!("the journal does not have the grant yet")),
        ..Socket::default()
    };
    let waiter = arbiter.connect(ConnId(2), Some(Arc::new(unused)));
    let grant = granted(&holder, FOREVER);
    let blocked = Blocked::start(&arbiter, waiter, |seat| acquire(seat, FOREVER));
    holder
        .release("k", Kind::Lock, grant.token, None)
        .expect("it is held");
    assert!(matches!(blocked.end().1, Ok(Answer::Granted(_))));
}

#[test]
fn a_restored_holder_is_adopted_and_then_ends_with_its_seat() {
    let (arbiter, one, other) = arbiter_and_two();
    let token = Token {
        fence: Fence(0),
        salt: Salt(7),
    };
    let record = HolderRecord::new("k", Terms::LOCK, token, FOREVER);
    let notes = Notes::of(&arbiter);
    let again = HolderRecord::new("k", Terms::LOCK, token, FOREVER * 2);
    assert_eq!(arbiter.restore(&[record, again.clone()]), [&again]);
    assert_eq!(arbiter.counters().1.orphan_count, 1);
    let renew = |seat: &Seat| seat.renew("k", Kind::Lock, token, FOREVER);
    renew(&one).expect("it is held");
    assert_eq!(arbiter.counters().1.orphan_count, 1);
    let proof = Proof {
        key: "k",
        terms: Terms::LOCK,
        token,
        numbers: [].into(),
        age: None,
    };
    assert_eq!(one.adopt(&proof, FOREVER), Ok(Answer::Renewed(FOREVER)));
    renew(&one).expect("it is held");
    renew(&other).expect("it is held");
    assert_eq!(arbiter.counters().1.orphan_count, 0);
    other.leave(AtClose::Release);
    assert_eq!(notes.all(), [""; 0]);
    one.leave(AtClose::Release);
    assert_eq!(notes.all(), ["-0"]);
}

#[test]
fn the_record_closes_in_the_visit_that_leaves_adopters_alone() {
    let (arbiter, other, adopter) = arbiter_and_two();
    let notes = Notes::of(&arbiter);
    adopter.set_abilities(ADOPTS);
    let grant = granted(&other, FOREVER);
    let blocked = Blocked::start(&arbiter, adopter, |seat| acquire(seat, FOREVER));
    let waiting = arbiter.connect(ConnId(3), None);
    enqueue(&waiting);
    let closed = arbiter.close_record_once_all_can_adopt();
    assert!(closed.try_recv().is_err_and(|error| error.is_empty()));
    // The grant that follows is in the record.
    release(&other, grant);
    assert!(is_over(&closed));
    assert_eq!(notes.all(), ["+1", "-1", "+2", "closed"]);
    // The server goes on as before: no claim is refused.
    let (_adopter, answer) = blocked.end();
    assert!(matches!(answer, Ok(Answer::Granted(_))));
}

#[test]
fn the_record_closes_at_once_if_it_must() {
    let (arbiter, holder, _other) = arbiter_and_two();
    let notes = Notes::of(&arbiter);
    granted(&holder, FOREVER);
    arbiter.close_record();
    assert_eq!(notes.all(), ["+1", "closed"]);
}

#[test]
fn a_phase_one_grant_of_another_client_is_waited_for() {
    let (arbiter, holder, other) = arbiter_and_two();
    holder.set_abilities(ADOPTS);
    let grant = granted(&holder, FOREVER);
    enqueue(&other);
    release(&holder, grant);
    let closed = arbiter.close_record_once_all_can_adopt();
    assert!(closed.try_recv().is_err_and(|error| error.is_empty()));
    other.leave(AtClose::Release);
    assert!(is_over(&closed));
}

#[test]
fn an_adopter_that_leaves_is_waited_for_between_two_steps() {
    let (arbiter, adopter, _other) = arbiter_and_two();
    let notes = Notes::of(&arbiter);
    adopter.set_abilities(ADOPTS);
    granted(&adopter, FOREVER);
    let conn = adopter.id();
    let holdings = AtClose::Release;
    arbiter.state.lock().table.disconnect(conn, holdings, None);
    let closed = arbiter.close_record_once_all_can_adopt();
    assert!(closed.try_recv().is_err_and(|error| error.is_empty()));
    arbiter.visit_in_steps(Scope::Nothing, |state, now| {
        state.table.release_some(conn, STEP, now)
    });
    assert!(is_over(&closed));
    assert_eq!(notes.all(), ["+1", "-1", "closed"]);
}

#[test]
fn a_client_that_leaves_is_waited_for_until_its_slots_are_free() {
    const KEYS: usize = 2 * STEP;
    let (arbiter, other, _) = arbiter_and_two();
    let notes = Notes::of(&arbiter);
    for key in 0..KEYS {
        let key = key.to_string();
        let ask = Ask {
            key: &key,
            ..lock(FOREVER)
        };
        assert!(matches!(other.try_acquire(&ask), Ok(Answer::Granted(_))));
    }
    let closed = arbiter.close_record_once_all_can_adopt();
    other.leave(AtClose::Release);
    assert!(is_over(&closed));
    let notes = notes.all();
    assert_eq!(notes.len(), 2 * KEYS + 1);
    assert_eq!(notes.last().map(String::as_str), Some("closed"));
}

#[test]
fn only_a_client_that_may_come_back_leaves_a_dead_grant() {
    let (arbiter, adopter, other) = arbiter_and_two();
    let notes = Notes::default();
    let rules = ProofRules {
        salt_key: SaltKey([7; 16]),
        dead: [].into(),
    };
    let lasting = Recording::Lasting {
        longest_ordinary: FOREVER,
    };
    arbiter.record_with(lasting, Box::new(notes.clone()));
    arbiter.make_proofs(rules);
    granted(&other, FOREVER);
    other.leave(AtClose::Release);
    assert_eq!(notes.all(), [""; 0]);
    adopter.set_abilities(ADOPTS);
    let grant = granted(&adopter, FOREVER);
    adopter.leave(AtClose::Release);
    assert_eq!(notes.all(), [format!("dead {}", grant.token.fence)]);
}
