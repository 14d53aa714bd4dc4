//! The journal: every change of holders, in the order in which the table made it. The changes are
//! written to etcd in batches, and each session waits until its changes are certain.
//!
//! A change is certain when etcd has confirmed its batch. One thread writes one batch at a time;
//! the changes that arrive during a write form the next batch. If there is nothing to write, but a
//! session must know whether this server is still active, the thread sends a question: a
//! transaction that makes the same comparisons and changes nothing. It sends questions even while
//! etcd refuses to write.
//!
//! A server that hands over closes its journal. The changes that were recorded by then are still
//! written. But the next server may read etcd before that, so it may not know of them. So, after
//! the close, sessions rely only on the changes that were certain at the close.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, Sender};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::latchd::arbiter::{Certainty, Promised, Recorder};
use crate::latchd::fence::range::{ReservedRange, RANGE};
use crate::latchd::table::{Change, Key, News};
use crate::wire::token::{Fence, FenceSource};

/// The maximum number of holders in a batch. etcd accepts 128 operations in a transaction.
pub const MAX_HOLDERS: usize = 120;

/// The journal, which the writing thread, the arbiter and the sessions share.
#[derive(Default)]
pub struct Journal {
    state: Mutex<JournalState>,
    /// Wakes the thread that writes.
    work: Condvar,
}

#[derive(Default)]
struct JournalState {
    /// The changes that are not in a round yet, with their numbers.
    pending: VecDeque<(u64, Change)>,
    /// When the oldest pending change was recorded, or a little earlier if the previous round had
    /// no room for it. Meaningless if no change is pending.
    pending_since: Option<Instant>,
    /// The number of the latest recorded change. Changes are numbered from 1.
    recorded: u64,
    /// All changes up to this number are certain.
    certain: u64,
    /// Maps each holder to the number of its latest change, until sessions may rely on that
    /// change.
    last_changes: BTreeMap<Fence, u64>,
    /// The grants of which no client has been told yet.
    untold: Untold,
    rounds: Rounds,
    /// The fences that are reserved in etcd.
    fences: ReservedRange,
    /// The next batch must reserve more fences.
    wants_fences: bool,
    /// Dropped when etcd has accepted a batch. The drop closes the channel.
    probe: Option<Sender<()>>,
    waiting: Vec<Waiting>,
    closed: Option<Closed>,
}

/// The state of the journal when it was closed.
struct Closed {
    /// All changes up to this number were certain. Sessions may rely on no later change.
    certain: u64,
    /// The number of the latest round that had succeeded. Sessions may rely on no later round.
    succeeded: u64,
    /// The number of the last change that will still be written.
    last_change: u64,
}

/// What a session waits for.
struct Waiting {
    /// The number of a change that must be certain.
    change: u64,
    /// The number of a round. That round or a later one must have succeeded.
    round: u64,
    wake: Arc<Condvar>,
}

/// One transaction of the journal: a batch, or a question if it changes nothing.
pub struct Round {
    /// The latest change of each holder in this round, with its number.
    changes: Vec<(u64, Change)>,
    /// The end of the fences that this round reserves, if it reserves any.
    pub reserve: Option<u64>,
    began: Instant,
    /// When the first of the changes was recorded, as in `JournalState::pending_since`.
    pub recorded_at: Instant,
    /// The number of the round; 0 if it has not begun.
    number: u64,
    /// When the round has succeeded, all changes up to this number are certain.
    covers_up_to: u64,
}

impl Round {
    /// Whether the round changes anything.
    fn is_batch(&self) -> bool {
        !self.changes.is_empty() || self.reserve.is_some()
    }

    pub fn changes(&self) -> impl Iterator<Item = &Change> + Clone {
        self.changes.iter().map(|(_, change)| change)
    }
}

impl Journal {
    /// Blocks until there is a batch to write or a question to send.
    pub fn next_round(&self) -> Round {
        let mut state = self.state.lock();
        loop {
            let may_write = state.rounds.may_write();
            let has_changes = !state.pending.is_empty() || state.wants_fences;
            if may_write && has_changes || state.rounds.is_asked() {
                let mut round = state.make_round(may_write);
                if state.rounds.take_request() || round.is_batch() {
                    round.number = state.rounds.begin();
                    return round;
                }
                // Each pending grant has ended before it was written, so there is nothing to write.
                state.note_certain(round.covers_up_to);
            } else if let Some(retry_at) = state.rounds.retry_at.filter(|_| has_changes) {
                self.work.wait_until(&mut state, retry_at);
            } else {
                self.work.wait(&mut state);
            }
        }
    }

    /// Records that a round has succeeded, and wakes the sessions that waited for it. Returns
    /// `true` if the journal had run out of fences and has fences again.
    pub fn finish(&self, round: &Round) -> bool {
        let took = round.began.elapsed();
        let mut state = self.state.lock();
        let had_run_out = round.reserve.is_some_and(|end| state.fences.extend(end));
        state
            .untold
            .note_written(round.changes().map(|change| change.fence));
        if round.is_batch() {
            state.rounds.retry_at = None;
            state.probe = None;
        }
        state.rounds.succeed_all(round.number, took);
        state.note_certain(round.covers_up_to);
        had_run_out
    }

    /// Puts back the changes of a round that etcd has definitely refused. The next batch begins
    /// with them, after `pause`. A question is sent at once, because the refusal does not say
    /// whether this server is still active.
    pub fn put_back(&self, mut round: Round, pause: Duration) {
        let mut state = self.state.lock();
        state.wants_fences |= round.reserve.is_some();
        match round.changes.last_mut() {
            // The round may also cover changes that it did not need to write, such as a grant and
            // its end, with higher numbers than the last of `changes`. That one gets the highest
            // number of the round, so that those changes become certain with it.
            Some((number, _)) => *number = round.covers_up_to,
            None => state.note_certain(round.covers_up_to),
        }
        let since = state.pending_since.filter(|_| !state.pending.is_empty());
        state.pending_since = Some(since.map_or(round.recorded_at, |it| it.min(round.recorded_at)));
        for change in round.changes.into_iter().rev() {
            state.pending.push_front(change);
        }
        state.rounds.retry_at = Instant::now().checked_add(pause);
        state.rounds.ask();
    }

    /// Begins a question about a batch whose answer is missing. Returns the number of the question.
    pub fn begin_question(&self) -> u64 {
        let mut state = self.state.lock();
        state.rounds.take_request();
        state.rounds.begin()
    }

    /// Records that the question with this number was answered, and wakes the sessions that waited
    /// for it.
    pub fn finish_question(&self, number: u64) {
        let mut state = self.state.lock();
        state.rounds.succeed(number);
        state.wake_sessions();
    }

    /// Starts a term with reserved fences: those from `next` up to but not including `end`.
    pub fn begin_term(&self, next: u64, end: u64) {
        let mut state = self.state.lock();
        state.fences = ReservedRange::new(next, end, RANGE);
        state.untold.highest_written = next.saturating_sub(1);
    }

    /// Requests a batch, even if nothing has changed. The returned channel closes when etcd has
    /// accepted a batch.
    pub fn probe(&self) -> Receiver<()> {
        let (sender, receiver) = bounded(0);
        let mut state = self.state.lock();
        state.probe = Some(sender);
        // A batch that reserves fences is a write even if no holder has changed.
        state.wants_fences = true;
        self.work.notify_one();
        receiver
    }

    /// Blocks until all changes recorded so far are written, or until `at_most` has passed.
    pub fn wait_until_written(&self, at_most: Duration) {
        let mut state = self.state.lock();
        let closed = state.closed.as_ref();
        let change = closed.map_or(state.recorded, |closed| closed.last_change);
        let is_uncertain = move |state: &mut JournalState| state.certain < change;
        JournalState::wait_while(&mut state, is_uncertain, (change, 0), at_most);
    }

    /// The fences of the grants that are not in a round yet.
    pub fn pending_grants(&self) -> Vec<Fence> {
        fences_of_grants(self.state.lock().pending.iter().map(|(_, change)| change))
    }

    /// The number of sessions that wait.
    pub fn waiting_sessions(&self) -> usize {
        self.state.lock().waiting.len()
    }

    pub fn round_time(&self) -> Duration {
        self.state.lock().rounds.smoothed_time
    }

    /// Blocks until the latest changes of the promised holders are certain. With
    /// `JournaledByActive`, also blocks until etcd has confirmed, by a round that began after the
    /// call, that this server is active. If the journal was closed while any of this was missing,
    /// blocks until the process ends.
    ///
    /// The caller then tells clients of the promised grants.
    pub fn wait_until_certain(&self, promised: &Promised) {
        if promised.certainty == Certainty::None || super::is_fault_planted("reply-before-journal")
        {
            return;
        }
        let mut state = self.state.lock();
        let mut round = 0;
        if promised.certainty == Certainty::JournaledByActive {
            round = state.rounds.ask();
            self.work.notify_one();
        }
        let change = if promised.is_about_all {
            state.recorded
        } else {
            state.last_change_of(&promised.holders)
        };
        // The journal may close while this waits. The close ends each grant that no client knows,
        // even a certain one. So after a close, look up the latest changes of the holders again: a
        // session must never tell of an ended grant.
        let is_uncertain = |state: &mut JournalState| {
            let (certain, succeeded) = state.reliable();
            let is_closed = state.closed.is_some();
            certain < change
                || succeeded < round
                || is_closed && certain < state.last_change_of(&promised.holders)
        };
        JournalState::wait_while(&mut state, is_uncertain, (change, round), Duration::MAX);
        state.untold.tell(&promised.grants);
    }
}

impl JournalState {
    /// Numbers the changes, and makes them pending. After the close, only numbers them: they are
    /// never written and never certain.
    fn add(&mut self, changes: impl Iterator<Item = Change>) {
        if self.pending.is_empty() {
            self.pending_since = Some(Instant::now());
        }
        for change in changes {
            self.recorded += 1;
            self.last_changes.insert(change.fence, self.recorded);
            self.untold.note(&change);
            if self.closed.is_none() {
                self.pending.push_back((self.recorded, change));
            }
        }
    }

    /// Notes what sessions may rely on from now on. Also ends the grants of which no client knows:
    /// nobody would use or release them at the next server, and they would only block their keys.
    fn close(&mut self) {
        if self.closed.is_some() {
            return;
        }
        let (certain, succeeded) = (self.certain, self.rounds.succeeded);
        let untold = self.untold.take().into_iter();
        self.add(untold.map(|(fence, key)| Change {
            key,
            fence,
            news: News::Ended,
        }));
        self.closed = Some(Closed {
            certain,
            succeeded,
            last_change: self.recorded,
        });
    }

    /// Makes the next round. Without `may_write`, the round is a question.
    fn make_round(&mut self, may_write: bool) -> Round {
        let mut changes: Vec<(u64, Change)> = Vec::new();
        let (mut covers_up_to, mut reserve) = (0, None);
        if may_write {
            covers_up_to = self.take_changes(&mut changes);
            if mem::take(&mut self.wants_fences) {
                reserve = Some(self.fences.end().saturating_add(RANGE));
            }
        }
        let began = Instant::now();
        let recorded_at = self.pending_since.filter(|_| !changes.is_empty());
        Round {
            changes,
            reserve,
            began,
            recorded_at: recorded_at.unwrap_or(began),
            number: 0,
            covers_up_to,
        }
    }

    /// Moves the pending changes of a batch into `changes`. Returns the highest number of the
    /// changes that are no longer pending.
    fn take_changes(&mut self, changes: &mut Vec<(u64, Change)>) -> u64 {
        let mut covers_up_to = 0;
        while let Some((number, change)) = self.pending.pop_front() {
            let fence = change.fence;
            // A transaction may write each key of etcd only once. So a holder's latest change
            // replaces its earlier ones.
            match changes.iter().rposition(|(_, it)| it.fence == fence) {
                // The grant has ended before it was written, so neither change is needed.
                Some(at) if change.news == News::Ended && self.untold.is_unwritten(fence) => {
                    changes.remove(at);
                }
                Some(at) => changes[at] = (number, change),
                None if changes.len() == MAX_HOLDERS => {
                    self.pending.push_front((number, change));
                    break;
                }
                None => changes.push((number, change)),
            }
            covers_up_to = covers_up_to.max(number);
        }
        covers_up_to
    }

    /// Records that all changes up to this number are certain.
    fn note_certain(&mut self, change: u64) {
        if change > self.certain {
            self.certain = change;
            // The close ends the grants that no client knows. Keep the numbers of these ends, even
            // once they are written: a session that is about to tell its client of such a grant
            // must still see that it has ended.
            let (reliable, _) = self.reliable();
            self.last_changes.retain(|_, number| *number > reliable);
        }
        self.wake_sessions();
    }

    /// Wakes the sessions that have waited for a change or a round, and need not any longer.
    fn wake_sessions(&mut self) {
        let (certain, succeeded) = (self.certain, self.rounds.succeeded);
        self.waiting.retain(|it| {
            let waits = it.change > certain || it.round > succeeded;
            if !waits {
                it.wake.notify_one();
            }
            waits
        });
    }

    /// The number of the latest change of any of the holders, or 0 if sessions may rely on all of
    /// their changes.
    fn last_change_of(&self, holders: &[Fence]) -> u64 {
        let changes = holders.iter().filter_map(|it| self.last_changes.get(it));
        changes.max().copied().unwrap_or(0)
    }

    /// The number of the latest change, and of the latest round, that sessions may rely on.
    fn reliable(&self) -> (u64, u64) {
        let closed = self.closed.as_ref();
        closed.map_or((self.certain, self.rounds.succeeded), |closed| {
            (closed.certain, closed.succeeded)
        })
    }

    /// Blocks while `is_uncertain` returns true, but no longer than `at_most`. The thread is woken
    /// when `change` is certain and `round` has succeeded.
    fn wait_while(
        state: &mut MutexGuard<'_, JournalState>,
        mut is_uncertain: impl FnMut(&mut JournalState) -> bool,
        (change, round): (u64, u64),
        at_most: Duration,
    ) {
        if is_uncertain(state) {
            let wake = Arc::new(Condvar::new());
            state.waiting.push(Waiting {
                change,
                round,
                wake: Arc::clone(&wake),
            });
            wake.wait_while_for(state, is_uncertain, at_most);
        }
    }
}

pub fn fences_of_grants<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Vec<Fence> {
    let held = changes.into_iter();
    let held = held.filter(|change| matches!(change.news, News::Held(_)));
    held.map(|change| change.fence).collect()
}

impl Recorder for Arc<Journal> {
    fn record(&mut self, changes: Vec<Change>) {
        let mut state = self.state.lock();
        state.add(changes.into_iter());
        drop(state);
        self.work.notify_one();
    }

    /// No session has waited for a grant yet that has just been made.
    fn is_written(&self, _key: &str) -> bool {
        false
    }

    fn stop(&mut self) {
        self.state.lock().close();
        self.work.notify_one();
    }
}

impl FenceSource for Arc<Journal> {
    /// A fence that is reserved in etcd. `None` if no fence is left: then nothing is granted, and
    /// more fences are requested.
    fn next_fence(&mut self) -> Option<u64> {
        let state = &mut *self.state.lock();
        let wants_fences = &mut state.wants_fences;
        state.fences.take(|| {
            *wants_fences = true;
            self.work.notify_one();
        })
    }
}

#[derive(Default)]
pub struct Untold {
    pub grants: BTreeMap<Fence, Key>,
    /// Every holder that was in etcd before the round in progress has this fence or a lower one.
    pub highest_written: u64,
}

impl Untold {
    /// Takes a change into account. A holder that was in etcd before is one that a client knows.
    pub fn note(&mut self, change: &Change) {
        match change.news {
            News::Held(_) if self.is_unwritten(change.fence) => {
                self.grants.insert(change.fence, change.key.clone());
            }
            News::Held(_) => {}
            News::Ended | News::Dead(_) => drop(self.grants.remove(&change.fence)),
        }
    }

    /// Takes note that these holders are in etcd.
    pub fn note_written(&mut self, fences: impl Iterator<Item = Fence>) {
        let highest = fences.max().map_or(0, |fence| fence.0);
        self.highest_written = self.highest_written.max(highest);
    }

    /// Whether the holder has never been in etcd.
    pub fn is_unwritten(&self, fence: Fence) -> bool {
        fence.0 > self.highest_written
    }

    /// Takes note that clients are told of these grants.
    pub fn tell(&mut self, grants: &[Fence]) {
        for grant in grants {
            self.grants.remove(grant);
        }
    }

    /// Takes the grants of which no client has been told.
    pub fn take(&mut self) -> BTreeMap<Fence, Key> {
        mem::take(&mut self.grants)
    }
}

/// Rounds are numbered from 1.
#[derive(Default)]
pub struct Rounds {
    /// The number of the latest round that has begun.
    begun: u64,
    /// The number of the latest round that has succeeded.
    pub succeeded: u64,
    /// A session needs another round, even if there is nothing to write.
    is_asked: bool,
    /// Set when etcd has refused a batch. No other batch may begin before this instant.
    pub retry_at: Option<Instant>,
    /// The smoothed duration of a round.
    pub smoothed_time: Duration,
}

impl Rounds {
    /// Asks for a round that has not begun yet. Returns its number.
    pub fn ask(&mut self) -> u64 {
        self.is_asked = true;
        self.begun + 1
    }

    pub fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// Returns whether a round has been asked for, and takes note that it begins.
    pub fn take_request(&mut self) -> bool {
        mem::take(&mut self.is_asked)
    }

    /// Begins a round, and returns its number.
    pub fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// Whether a batch may begin now.
    pub fn may_write(&self) -> bool {
        self.retry_at.is_none_or(|at| at <= Instant::now())
    }

    /// Records that a round with this number has succeeded. The answer also holds for all rounds
    /// that began before, whatever became of them.
    pub fn succeed(&mut self, number: u64) {
        self.succeeded = self.succeeded.max(number);
    }

    /// Records that the round in progress has succeeded, and that it took this time. Its request
    /// was sent after every question that began during the round and was not answered, so it
    /// answers these, too.
    pub fn succeed_all(&mut self, number: u64, took: Duration) {
        self.succeed(self.begun);
        self.smoothed_time = match number {
            1 => took,
            _ => (15 * self.smoothed_time + took) / 16,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latchd::arbiter::ReplyPromise;
    use crate::latchd::table::{ConnId, HeldGrant, HolderRecord, Key};
    use crate::wire::terms::Terms;
    use crate::wire::token::{Salt, Token};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::LazyLock;
    use std::thread;

    use crate::os::is_soon;

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);

    fn held(fence: u64, seconds: u64) -> Change {
        let token = Token {
            fence: Fence(fence),
            salt: Salt(0),
        };
        let lease = Duration::from_secs(seconds);
        let record = HolderRecord::new("k", Terms::LOCK, token, lease);
        let grant = HeldGrant {
            record,
            conn: ConnId(1),
            since: *START,
            until: None,
        };
        change(fence, News::Held(grant))
    }

    fn ended(fence: u64) -> Change {
        change(fence, News::Ended)
    }

    fn change(fence: u64, news: News) -> Change {
        Change {
            key: Key::from("k"),
            fence: Fence(fence),
            news,
        }
    }

    fn record(journal: &Arc<Journal>, changes: &[Change]) {
        Arc::clone(journal).record(changes.to_vec());
    }

    fn promised(fence: u64, certainty: Certainty) -> Promised {
        Promised {
            certainty,
            holders: vec![Fence(fence)],
            is_about_all: false,
            grants: vec![Fence(fence)],
        }
    }

    /// Tells the client of a grant. The grant must be certain already, so this does not block.
    /// Returns whether the client had not been told before.
    fn tell(journal: &Journal, fence: u64) -> bool {
        let is_untold = journal
            .state
            .lock()
            .untold
            .grants
            .contains_key(&Fence(fence));
        journal.wait_until_certain(&promised(fence, Certainty::Journaled));
        is_untold
    }

    /// Waits for a holder on a thread of its own, which sets the flag when it is done.
    fn waiting(journal: &Arc<Journal>, fence: u64, certainty: Certainty) -> Arc<AtomicBool> {
        let before = journal.waiting_sessions();
        let done = Arc::new(AtomicBool::new(false));
        let (journal_of_thread, done_of_thread) = (Arc::clone(journal), Arc::clone(&done));
        thread::spawn(move || {
            journal_of_thread.wait_until_certain(&promised(fence, certainty));
            done_of_thread.store(true, Ordering::SeqCst);
        });
        assert!(is_soon(|| journal.waiting_sessions() > before));
        done
    }

    fn is_done(flag: &AtomicBool) -> bool {
        flag.load(Ordering::SeqCst)
    }

    fn changes(round: &Round) -> Vec<Change> {
        round.changes().cloned().collect()
    }

    #[test]
    fn of_several_changes_to_a_holder_the_last_is_written() {
        let journal = Arc::new(Journal::default());
        journal.begin_term(3, 9);
        let end = ended(1);
        record(&journal, &[held(1, 5), held(2, 5), held(2, 9), end.clone()]);
        record(&journal, &[held(3, 1)]);
        let round = journal.next_round();
        assert_eq!(changes(&round), [end, held(2, 9), held(3, 1)]);
    }

    #[test]
    fn a_grant_that_ends_before_it_is_written_never_is() {
        let journal = Arc::new(Journal::default());
        journal.begin_term(10, 99);
        let abandoned = [held(10, 5), held(10, 9), ended(10)];
        record(&journal, &[&abandoned[..], &[held(11, 5)]].concat());
        let round = journal.next_round();
        assert_eq!(changes(&round), [held(11, 5)]);
        journal.finish(&round);
        assert!(!tell(&journal, 10));
        // A grant that was written ends in etcd, too.
        record(&journal, &[held(11, 9), ended(11)]);
        assert_eq!(changes(&journal.next_round()), [ended(11)]);
    }

    #[test]
    fn a_batch_ends_before_the_holder_that_is_too_many() {
        let journal = Arc::new(Journal::default());
        let most = MAX_HOLDERS as u64;
        let all: Vec<Change> = (0..most + 3).map(|fence| held(fence, 1)).collect();
        record(&journal, &all);
        record(&journal, &[ended(0)]);
        let first = journal.next_round();
        assert_eq!(first.changes.len(), MAX_HOLDERS);
        assert_eq!(first.changes[0].1, held(0, 1));
        let claim = waiting(&journal, 0, Certainty::Journaled);
        journal.finish(&first);
        assert_eq!(journal.waiting_sessions(), 1);
        let second = journal.next_round();
        assert_eq!(second.changes.len(), 4);
        assert!(second.recorded_at.elapsed() >= first.began.duration_since(first.recorded_at));
        journal.finish(&second);
        assert!(is_soon(|| is_done(&claim)));
    }

    #[test]
    fn a_session_waits_for_its_own_holder_alone() {
        let journal = Arc::new(Journal::default());
        let mut of_all = Promised::default();
        of_all.add(ReplyPromise::All(Certainty::Journaled));
        journal.wait_until_certain(&of_all);
        record(&journal, &[held(1, 1)]);
        assert!(!tell(&journal, 2));
        let round = journal.next_round();
        let early = waiting(&journal, 1, Certainty::Journaled);
        record(&journal, &[held(2, 1)]);
        let late = waiting(&journal, 2, Certainty::Journaled);
        journal.finish(&round);
        assert!(is_soon(|| is_done(&early)));
        assert!(!is_done(&late));
        journal.finish(&journal.next_round());
        assert!(is_soon(|| is_done(&late)));
    }

    #[test]
    fn a_promise_of_time_waits_for_a_round_that_begins_later() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        let round = journal.next_round();
        let renewal = waiting(&journal, 0, Certainty::JournaledByActive);
        journal.finish(&round);
        assert_eq!(journal.waiting_sessions(), 1);
        assert!(!is_done(&renewal));
        let question = journal.next_round();
        assert!(question.changes.is_empty() && question.reserve.is_none());
        journal.finish(&question);
        assert!(is_soon(|| is_done(&renewal)));
    }

    #[test]
    fn questions_go_on_beside_a_batch_that_is_refused() {
        const PAUSE: Duration = Duration::from_secs(60);
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        let claim = waiting(&journal, 1, Certainty::Journaled);
        journal.put_back(journal.next_round(), PAUSE);
        assert_eq!(journal.pending_grants(), [Fence(1)]);
        for _ in 0..2 {
            let renewal = waiting(&journal, 0, Certainty::JournaledByActive);
            let question = journal.next_round();
            assert!(question.changes.is_empty());
            journal.finish(&question);
            assert!(is_soon(|| is_done(&renewal)));
        }
        assert!(!is_done(&claim));
        // After the pause it is written, with what has come since.
        record(&journal, &[held(2, 1)]);
        journal.state.lock().rounds.retry_at = Some(Instant::now());
        let round = journal.next_round();
        assert_eq!(changes(&round), [held(1, 1), held(2, 1)]);
        journal.finish(&round);
        assert!(is_soon(|| is_done(&claim)));
    }

    #[test]
    fn a_refused_claim_whose_client_leaves_is_forgotten() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        journal.put_back(journal.next_round(), Duration::ZERO);
        record(&journal, &[ended(1)]);
        let release = waiting(&journal, 1, Certainty::Journaled);
        let question = journal.next_round();
        assert!(question.changes.is_empty());
        journal.finish(&question);
        assert!(is_soon(|| is_done(&release)));
        assert!(!tell(&journal, 1));
    }

    #[test]
    fn a_question_beside_a_lost_answer_confirms_renewals_alone() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        let round = journal.next_round();
        let claim = waiting(&journal, 1, Certainty::Journaled);
        let renewal = waiting(&journal, 0, Certainty::JournaledByActive);
        let number = journal.begin_question();
        journal.finish_question(number);
        assert!(is_soon(|| is_done(&renewal)));
        assert!(!is_done(&claim));
        // The batch also answers a question that got no answer.
        let renewal = waiting(&journal, 0, Certainty::JournaledByActive);
        journal.begin_question();
        journal.finish(&round);
        assert!(is_soon(|| is_done(&claim) && is_done(&renewal)));
    }

    #[test]
    fn changes_of_a_refused_batch_that_cancel_each_other_out_are_certain_with_it() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1), held(2, 1), ended(2)]);
        let round = journal.next_round();
        let release = waiting(&journal, 2, Certainty::Journaled);
        journal.put_back(round, Duration::ZERO);
        journal.finish(&journal.next_round());
        assert!(is_soon(|| is_done(&release)));
    }

    /// Writes what there is, as the thread of the journal does.
    fn write_all(journal: &Arc<Journal>) -> Vec<Vec<Change>> {
        let mut written = Vec::new();
        while !journal.state.lock().pending.is_empty() {
            let round = journal.next_round();
            written.push(changes(&round));
            journal.finish(&round);
        }
        written
    }

    #[test]
    fn a_close_ends_the_grants_of_which_no_client_was_told() {
        let journal = Arc::new(Journal::default());
        journal.begin_term(1, 99);
        record(&journal, &[held(1, 1), held(2, 1), held(3, 1)]);
        journal.finish(&journal.next_round());
        // The session of the third one is slow.
        assert!(tell(&journal, 1) && tell(&journal, 2) && !tell(&journal, 2));
        record(&journal, &[held(4, 1)]);
        let under_way = journal.next_round();
        record(&journal, &[held(5, 1), ended(1), held(2, 9)]);
        Arc::clone(&journal).stop();
        record(&journal, &[ended(2), held(6, 1)]);
        journal.finish(&under_way);
        let ends = [1, 3, 4].map(ended);
        let [first, third, fourth] = ends;
        assert_eq!(
            write_all(&journal),
            [[first, held(2, 9), third, fourth].to_vec()]
        );
        journal.wait_until_written(Duration::MAX);
        assert!(journal.state.lock().pending.is_empty());
    }

    /// A session can be slow: its grant may be written, and its end as well, before the session
    /// asks what to wait for.
    #[test]
    fn no_session_tells_of_a_grant_that_the_close_has_ended() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        journal.finish(&journal.next_round());
        record(&journal, &[held(2, 1)]);
        Arc::clone(&journal).stop();
        write_all(&journal);
        for fence in [1, 2] {
            assert!(!is_done(&waiting(&journal, fence, Certainty::Journaled)));
        }
    }

    /// The session was woken, but had not run when the journal was closed.
    #[test]
    fn no_session_that_waited_tells_of_a_grant_that_the_close_ended() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        let claim = waiting(&journal, 1, Certainty::Journaled);
        let round = journal.next_round();
        let mut state = journal.state.lock();
        state.untold.highest_written = 1;
        state.rounds.succeed(round.number);
        state.note_certain(round.covers_up_to);
        state.close();
        drop(state);
        // By the wall's clock: a session that goes on waiting leaves no trace.
        thread::sleep(Duration::from_millis(20));
        assert!(!is_done(&claim));
    }

    #[test]
    fn a_client_that_names_a_holder_is_not_told_of_its_grant() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        journal.finish(&journal.next_round());
        let mut named = Promised::default();
        named.add(ReplyPromise::Holder(Certainty::Journaled, Fence(1)));
        journal.wait_until_certain(&named);
        assert!(tell(&journal, 1));
    }

    #[test]
    fn a_closed_journal_lets_out_only_what_was_certain() {
        let journal = Arc::new(Journal::default());
        record(&journal, &[held(1, 1)]);
        journal.finish(&journal.next_round());
        tell(&journal, 1);
        record(&journal, &[held(2, 1)]);
        let under_way = journal.next_round();
        let claim = waiting(&journal, 2, Certainty::Journaled);
        let renewal = waiting(&journal, 1, Certainty::JournaledByActive);
        Arc::clone(&journal).stop();
        // A session that comes late to what was certain may tell its client.
        assert!(!tell(&journal, 1));
        record(&journal, &[held(3, 1)]);
        let late = waiting(&journal, 3, Certainty::Journaled);
        journal.finish(&under_way);
        write_all(&journal);
        journal.wait_until_written(Duration::MAX);
        // Sessions that may go on are on their way, by the wall's clock.
        thread::sleep(Duration::from_millis(20));
        for session in [&claim, &renewal, &late] {
            assert!(!is_done(session));
        }
    }

    #[test]
    fn fences_are_reserved_ahead_and_run_out_otherwise() {
        let journal = Arc::new(Journal::default());
        let mut fences = Arc::clone(&journal);
        assert_eq!(fences.next_fence(), None, "of a standby");
        journal.begin_term(100, 100 + RANGE);
        for fence in 100..100 + RANGE {
            assert_eq!(fences.next_fence(), Some(fence));
        }
        assert_eq!([fences.next_fence(), fences.next_fence()], [None, None]);
        let round = journal.next_round();
        assert_eq!(round.reserve, Some(100 + 2 * RANGE));
        // `true`: the fences had run out, so the caller must now grant what waiters are owed.
        assert!(journal.finish(&round));
        assert_eq!(fences.next_fence(), Some(100 + RANGE));
    }
}
