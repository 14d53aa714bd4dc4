//! The journal: every change of holders in the order of the table, written in groups, and what
//! sessions wait for.
//!
//! One thread writes, a batch at a time. What changes meanwhile is the next batch. If there is
//! nothing to write, and a session wants to know whether this server is still active, the batch is
//! a question: the same comparisons and no change.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::arbiter::{Certainty, Recorder};
use crate::table::Change;
use crate::token::{Fence, FenceSource};

/// The most holders in a batch. etcd takes 128 operations in a transaction.
pub const MAX_HOLDERS: usize = 120;

/// How many fences are reserved at a time.
pub const FENCE_RANGE: u64 = 1 << 20;

/// What the journal, the arbiter and the sessions share.
#[derive(Default)]
pub struct Journal {
    state: Mutex<State>,
    /// Wakes the thread that writes.
    work: Condvar,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Change>,
    /// When the first of them was recorded, at the latest; meaningless while there is none.
    pending_since: Option<Instant>,
    /// How many changes have been recorded, and how many of them are certain.
    recorded: u64,
    certain: u64,
    /// The number of the last round that has begun, and of the last one that has succeeded.
    begun: u64,
    succeeded: u64,
    /// A session wants a round that has yet to begin.
    is_asked: bool,
    /// The fences that may be used: those from `next_fence` on, below `fence_end`.
    next_fence: u64,
    fence_end: u64,
    wants_fences: bool,
    ran_out_of_fences: bool,
    waiting: Vec<Waiting>,
    /// What a round takes, smoothed.
    round_time: Duration,
}

struct Waiting {
    recorded: u64,
    round: u64,
    wake: Arc<Condvar>,
}

/// A batch, or a question if it changes nothing.
pub struct Round {
    /// Of each holder, the last change.
    pub changes: Vec<Change>,
    /// The fences below this will be reserved.
    pub reserve: Option<u64>,
    began: Instant,
    /// When the first of its changes was recorded, at the latest.
    pub recorded_at: Instant,
    number: u64,
    /// How many of the recorded changes it and those before it have written.
    recorded: u64,
}

impl Journal {
    /// Blocks until there is something to write or to ask.
    pub fn next_round(&self) -> Round {
        let mut state = self.state.lock();
        while state.pending.is_empty() && !state.is_asked && !state.wants_fences {
            self.work.wait(&mut state);
        }
        let mut changes: Vec<Change> = Vec::new();
        let mut written = state.recorded - state.pending.len() as u64;
        while let Some(change) = state.pending.pop_front() {
            let fence = change.fence();
            // A transaction may name a key once: the last change counts.
            match changes.iter().rposition(|known| known.fence() == fence) {
                Some(at) => changes[at] = change,
                None if changes.len() == MAX_HOLDERS => {
                    state.pending.push_front(change);
                    break;
                }
                None => changes.push(change),
            }
            written += 1;
        }
        let wants_fences = std::mem::take(&mut state.wants_fences);
        state.is_asked = false;
        state.begun += 1;
        let began = Instant::now();
        let recorded_at = state.pending_since.filter(|_| !changes.is_empty());
        Round {
            changes,
            reserve: wants_fences.then(|| state.fence_end.saturating_add(FENCE_RANGE)),
            began,
            recorded_at: recorded_at.unwrap_or(began),
            number: state.begun,
            recorded: written,
        }
    }

    /// Takes note that a round is certain, and wakes the sessions that waited for it. `true` if
    /// there are fences again after they had run out.
    pub fn finish(&self, round: &Round) -> bool {
        let took = round.began.elapsed();
        let mut state = self.state.lock();
        let has_fences = round.reserve.is_some_and(|end| {
            state.fence_end = end;
            std::mem::take(&mut state.ran_out_of_fences)
        });
        state.succeeded = round.number;
        state.certain = round.recorded;
        state.round_time = match round.number {
            1 => took,
            _ => (15 * state.round_time + took) / 16,
        };
        let waiting = std::mem::take(&mut state.waiting).into_iter();
        let waits = |it: &Waiting| it.recorded > round.recorded || it.round > round.number;
        let (waiting, done): (_, Vec<Waiting>) = waiting.partition(waits);
        state.waiting = waiting;
        drop(state);
        for session in done {
            session.wake.notify_one();
        }
        has_fences
    }

    /// Begins with fences that have been reserved: those from `next` on, below `end`.
    pub fn begin(&self, next: u64, end: u64) {
        let mut state = self.state.lock();
        state.next_fence = next;
        state.fence_end = end;
        state.ran_out_of_fences = false;
    }

    /// Blocks until everything is written that has been recorded, or until `at_most` is over.
    pub fn wait_until_written(&self, at_most: Duration) {
        wait(self.state.lock(), 0, at_most);
    }

    /// The fences of the grants that no round has taken yet.
    pub fn pending_grants(&self) -> Vec<Fence> {
        granted(&self.state.lock().pending)
    }

    /// How many sessions wait.
    pub fn held_back(&self) -> usize {
        self.state.lock().waiting.len()
    }

    pub fn round_time(&self) -> Duration {
        self.state.lock().round_time
    }

    /// Blocks until the answers are certain that this thread has had from the arbiter.
    pub fn attest(&self, certainty: Certainty) {
        if certainty == Certainty::None || super::is_planted("reply-before-journal") {
            return;
        }
        let mut state = self.state.lock();
        let mut round = 0;
        if certainty == Certainty::Anew {
            round = state.begun + 1;
            state.is_asked = true;
            self.work.notify_one();
        }
        wait(state, round, Duration::MAX);
    }
}

/// Blocks until everything is certain that has been recorded, and the round has succeeded, or until
/// `at_most` is over.
fn wait(mut state: MutexGuard<'_, State>, round: u64, at_most: Duration) {
    let recorded = state.recorded;
    let is_uncertain = move |state: &mut State| state.certain < recorded || state.succeeded < round;
    if is_uncertain(&mut state) {
        let wake = Arc::new(Condvar::new());
        state.waiting.push(Waiting {
            recorded,
            round,
            wake: Arc::clone(&wake),
        });
        wake.wait_while_for(&mut state, is_uncertain, at_most);
    }
}

pub fn granted<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Vec<Fence> {
    let held = changes.into_iter();
    let held = held.filter(|change| matches!(change, Change::Held(_)));
    held.map(Change::fence).collect()
}

impl Recorder for Arc<Journal> {
    fn record(&mut self, changes: &mut Vec<Change>) {
        let mut state = self.state.lock();
        state.recorded += changes.len() as u64;
        if state.pending.is_empty() {
            state.pending_since = Some(Instant::now());
        }
        state.pending.extend(changes.drain(..));
        drop(state);
        self.work.notify_one();
    }
}

impl FenceSource for Arc<Journal> {
    /// A fence that etcd has reserved. `None` while none is: then nothing is granted, and more are
    /// asked for.
    fn next_fence(&mut self) -> Option<u64> {
        let mut state = self.state.lock();
        let left = state.fence_end - state.next_fence;
        let fence = (left > 0).then_some(state.next_fence);
        state.next_fence += u64::from(left > 0);
        let has_run_out = left == 0 && !state.ran_out_of_fences;
        state.ran_out_of_fences |= has_run_out;
        // Once for each range, so that the journal is not woken with every grant.
        if left == FENCE_RANGE / 2 || has_run_out {
            state.wants_fences = true;
            self.work.notify_one();
        }
        fence
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{HolderRecord, Key, Kind, Limit};
    use crate::token::{Salt, Token};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    fn held(fence: u64, seconds: u64) -> Change {
        Change::Held(HolderRecord {
            is_kept: false,
            tag: None,
            key: Key::from("k"),
            kind: Kind::Lock,
            limit: Limit::ONE,
            token: Token {
                fence: Fence(fence),
                salt: Salt(0),
            },
            lease: Duration::from_secs(seconds),
        })
    }

    fn record(journal: &Arc<Journal>, changes: &[Change]) {
        Arc::clone(journal).record(&mut changes.to_vec());
    }

    /// Attests on a thread of its own, which sets the flag when it is done.
    fn attesting(journal: &Arc<Journal>, certainty: Certainty) -> Arc<AtomicBool> {
        let before = journal.held_back();
        let done = Arc::new(AtomicBool::new(false));
        let (journal_of_thread, done_of_thread) = (Arc::clone(journal), Arc::clone(&done));
        thread::spawn(move || {
            journal_of_thread.attest(certainty);
            done_of_thread.store(true, Ordering::SeqCst);
        });
        wait_until(|| journal.held_back() > before);
        done
    }

    fn wait_until(mut holds: impl FnMut() -> bool) {
        let began = Instant::now();
        while !holds() {
            assert!(began.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_done(flag: &AtomicBool) -> bool {
        flag.load(Ordering::SeqCst)
    }

    #[test]
    fn of_several_changes_to_a_holder_the_last_is_written() {
        let journal = Arc::new(Journal::default());
        let ended = Change::Ended(Fence(1));
        record(
            &journal,
            &[held(1, 5), held(2, 5), held(2, 9), ended.clone()],
        );
        record(&journal, &[held(3, 1)]);
        let round = journal.next_round();
        assert_eq!(round.changes, [ended, held(2, 9), held(3, 1)]);
    }

    #[test]
    fn a_batch_ends_before_the_holder_that_is_too_many() {
        let journal = Arc::new(Journal::default());
        let most = MAX_HOLDERS as u64;
        let changes: Vec<Change> = (0..most + 3).map(|fence| held(fence, 1)).collect();
        record(&journal, &changes);
        record(&journal, &[Change::Ended(Fence(0))]);
        let first = journal.next_round();
        assert_eq!(first.changes.len(), MAX_HOLDERS);
        assert_eq!(first.changes[0], held(0, 1));
        let claim = attesting(&journal, Certainty::Recorded);
        journal.finish(&first);
        assert_eq!(journal.held_back(), 1);
        let second = journal.next_round();
        assert_eq!(second.changes.len(), 4);
        assert!(second.recorded_at.elapsed() >= first.began.duration_since(first.recorded_at));
        journal.finish(&second);
        wait_until(|| is_done(&claim));
    }

    #[test]
    fn what_is_recorded_already_waits_for_nothing_more() {
        let journal = Arc::new(Journal::default());
        journal.attest(Certainty::Recorded);
        record(&journal, &[held(1, 1)]);
        journal.attest(Certainty::None);
        let round = journal.next_round();
        let early = attesting(&journal, Certainty::Recorded);
        record(&journal, &[held(2, 1)]);
        let late = attesting(&journal, Certainty::Recorded);
        journal.finish(&round);
        wait_until(|| is_done(&early));
        assert!(!is_done(&late));
        journal.finish(&journal.next_round());
        wait_until(|| is_done(&late));
    }

    #[test]
    fn a_promise_of_time_waits_for_a_round_that_begins_later() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        let round = journal.next_round();
        let renewal = attesting(&journal, Certainty::Anew);
        journal.finish(&round);
        assert_eq!(journal.held_back(), 1);
        assert!(!is_done(&renewal));
        let question = journal.next_round();
        assert!(question.changes.is_empty() && question.reserve.is_none());
        journal.finish(&question);
        wait_until(|| is_done(&renewal));
    }

    #[test]
    fn fences_are_reserved_ahead_and_run_out_otherwise() {
        let journal = Arc::new(Journal::default());
        let mut fences = Arc::clone(&journal);
        journal.begin(100, 100 + FENCE_RANGE);
        for fence in 100..100 + FENCE_RANGE {
            assert_eq!(fences.next_fence(), Some(fence));
        }
        assert_eq!([fences.next_fence(), fences.next_fence()], [None, None]);
        let round = journal.next_round();
        assert_eq!(round.reserve, Some(100 + 2 * FENCE_RANGE));
        // Waiters are owed slots.
        assert!(journal.finish(&round));
        assert_eq!(fences.next_fence(), Some(100 + FENCE_RANGE));
    }

    #[test]
    fn without_an_office_there_is_no_fence() {
        let mut fences = Arc::<Journal>::default();
        assert_eq!(fences.next_fence(), None);
    }
}
