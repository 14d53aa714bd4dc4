//! The changes of lasting grants that the state file does not have yet, and the sessions that wait
//! for them.
//!
//! Changes are numbered from 1, in the order in which the table makes them. A session whose reply
//! concerns a key with an unwritten change waits for it. So does a session that tells of a later
//! grant of the key: otherwise the key could have two holders after a crash.

use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::latchd::table::{earlier, Change, Key};
use crate::wire::token::Fence;

/// The changes that are not in the file. The arbiter adds them, a writing thread takes them, and
/// sessions wait for them.
#[derive(Default)]
pub struct Unwritten {
    state: Mutex<UnwrittenState>,
    /// Whether any change is unwritten. Not in `state`, because every reply asks for it.
    is_any: AtomicBool,
    /// Wakes the thread that writes.
    work: Condvar,
    /// Wakes the sessions that wait.
    written: Condvar,
}

#[derive(Default)]
struct UnwrittenState {
    /// The changes that no writing thread has taken.
    pending: Vec<Change>,
    /// The number of each key's latest change, if the file does not have that change.
    latest: BTreeMap<Key, u64>,
    /// The same for each grant.
    of_grants: BTreeMap<Fence, u64>,
    /// The number of the latest change.
    recorded: u64,
    /// The file has all changes up to this number.
    written: u64,
    /// When to write again after a failure; `None` if the latest attempt has not failed.
    retry_at: Option<Instant>,
}

/// The changes that must be written before the replies to one client are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AwaitedWrites {
    /// The number of a change that the client relies on.
    relied_on: u64,
    /// The number of a change that the client does not rely on, such as a release. If the file
    /// cannot be written, its reply need not wait: the next server would only believe in a grant
    /// that has ended.
    other: u64,
}

impl AwaitedWrites {
    pub fn is_nothing(self) -> bool {
        self == AwaitedWrites::default()
    }

    /// Whether the client relies on a change.
    pub fn is_relied_on(self) -> bool {
        self.relied_on > 0
    }

    /// Adds what another reply must wait for.
    pub fn add(&mut self, other: AwaitedWrites) {
        self.relied_on = self.relied_on.max(other.relied_on);
        self.other = self.other.max(other.other);
    }
}

impl Unwritten {
    pub fn record(&self, changes: Vec<Change>) {
        let mut state = self.state.lock();
        for change in changes {
            state.recorded += 1;
            let number = state.recorded;
            state.latest.insert(change.key.clone(), number);
            state.of_grants.insert(change.fence, number);
            state.pending.push(change);
        }
        self.is_any.store(true, Ordering::Release);
        drop(state);
        self.work.notify_one();
    }

    /// Whether the file has every change that concerns the key.
    pub fn is_written(&self, key: &str) -> bool {
        !self.is_any() || !self.state.lock().latest.contains_key(key)
    }

    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    /// What a reply that concerns the key must wait for. The client relies on the changes of the
    /// grant `relied_on`.
    pub fn awaited(&self, key: &str, relied_on: Option<Fence>) -> AwaitedWrites {
        let state = self.state.lock();
        let of_grant = relied_on.and_then(|fence| state.of_grants.get(&fence));
        AwaitedWrites {
            relied_on: of_grant.copied().unwrap_or(0),
            other: state.latest.get(key).copied().unwrap_or(0),
        }
    }

    /// Blocks until the changes are written. While the file cannot be written, waits only for those
    /// that the client relies on.
    pub fn wait(&self, awaited: AwaitedWrites) {
        let mut state = self.state.lock();
        while state.written < awaited.relied_on
            || state.written < awaited.other && state.retry_at.is_none()
        {
            self.written.wait(&mut state);
        }
    }

    /// Blocks until the changes are written, and returns whether they are. While the file cannot be
    /// written, they are not.
    pub fn try_wait(&self, awaited: AwaitedWrites) -> bool {
        let mut state = self.state.lock();
        while state.written < awaited.other && state.retry_at.is_none() {
            self.written.wait(&mut state);
        }
        state.written >= awaited.other
    }

    /// Blocks until there is something to write, until `deadline`, or until
    /// [`Unwritten::has_failed`] is not `has_failed` any more.
    pub fn wait_for_work(&self, has_failed: bool, deadline: Option<Instant>) {
        let mut state = self.state.lock();
        while state.retry_at.is_some() == has_failed {
            match earlier(deadline, state.write_at()) {
                Some(next) if next <= Instant::now() => return,
                Some(next) => drop(self.work.wait_until(&mut state, next)),
                None => self.work.wait(&mut state),
            }
        }
    }

    /// Whether it is time to write.
    pub fn is_due(&self) -> bool {
        let write_at = self.state.lock().write_at();
        write_at.is_some_and(|at| at <= Instant::now())
    }

    /// Whether the latest attempt to write has failed.
    pub fn has_failed(&self) -> bool {
        self.state.lock().retry_at.is_some()
    }

    /// Takes the changes for the next attempt to write, with the number of the last one.
    pub fn take(&self) -> (Vec<Change>, u64) {
        let mut state = self.state.lock();
        (mem::take(&mut state.pending), state.recorded)
    }

    /// Notes that the file has all changes up to this number, and wakes the sessions that waited.
    pub fn note_written(&self, number: u64) {
        let mut state = self.state.lock();
        state.written = number;
        state.retry_at = None;
        state.latest.retain(|_, latest| *latest > number);
        state.of_grants.retain(|_, latest| *latest > number);
        self.is_any
            .store(!state.latest.is_empty(), Ordering::Release);
        self.written.notify_all();
        self.work.notify_one();
    }

    /// Notes that an attempt to write has failed. The next one is due after `pause`.
    pub fn failed(&self, pause: Duration) {
        self.state.lock().retry_at = Some(Instant::now() + pause);
        self.written.notify_all();
        self.work.notify_one();
    }
}

impl UnwrittenState {
    /// When to write next; `None` if there is nothing to write.
    fn write_at(&self) -> Option<Instant> {
        let has_changes = !self.pending.is_empty();
        self.retry_at.or(has_changes.then(Instant::now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::thread;

    use crossbeam_channel::bounded;

    use crate::latchd::table::News;

    const HOUR: Duration = Duration::from_secs(3600);

    fn change(unwritten: &Unwritten, key: &str) {
        unwritten.record(vec![Change {
            key: Key::from(key),
            fence: Fence(1),
            news: News::Ended,
        }]);
    }

    /// Waits on another thread, and calls `act`, after which the wait must end. Asserts that it
    /// does not end before.
    fn waits_until(unwritten: &Unwritten, awaited: AwaitedWrites, act: impl FnOnce()) {
        let has_acted = AtomicBool::new(false);
        let (sender, begins) = bounded(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                sender.send(()).expect("it is awaited");
                unwritten.wait(awaited);
                assert!(has_acted.load(Ordering::SeqCst), "it did not wait");
            });
            begins.recv().expect("the thread runs");
            thread::yield_now();
            has_acted.store(true, Ordering::SeqCst);
            act();
        });
    }

    #[test]
    fn a_reply_waits_for_the_changes_of_its_own_key_alone() {
        let unwritten = Unwritten::default();
        assert!(unwritten.is_written("a"));
        change(&unwritten, "a");
        let (changes, number) = unwritten.take();
        assert_eq!((changes.len(), number), (1, 1));
        change(&unwritten, "b");
        assert!(unwritten.awaited("c", None).is_nothing());
        let mut both = unwritten.awaited("b", None);
        both.add(unwritten.awaited("a", None));
        let first = unwritten.awaited("a", None);
        waits_until(&unwritten, first, || unwritten.note_written(number));
        assert!(unwritten.is_written("a") && !unwritten.is_written("b"));
        waits_until(&unwritten, both, || {
            unwritten.note_written(unwritten.take().1)
        });
        assert!(!unwritten.is_any());
    }

    #[test]
    fn while_nothing_can_be_written_a_release_does_not_wait() {
        let unwritten = Unwritten::default();
        change(&unwritten, "k");
        let awaited = |relied_on: Option<u64>| unwritten.awaited("k", relied_on.map(Fence));
        let (released, kept) = (awaited(None), awaited(Some(1)));
        // The client of another grant of the key relies on its own.
        assert_eq!(awaited(Some(2)), released);
        unwritten.take();
        waits_until(&unwritten, released, || unwritten.failed(HOUR));
        unwritten.wait(released);
        assert!(!unwritten.try_wait(kept));
        waits_until(&unwritten, kept, || unwritten.note_written(1));
        assert!(!unwritten.has_failed() && unwritten.try_wait(kept));
    }

    #[test]
    fn a_change_and_a_failure_are_work() {
        let unwritten = Unwritten::default();
        unwritten.wait_for_work(false, Some(Instant::now()));
        assert!(!unwritten.is_due());
        change(&unwritten, "k");
        unwritten.wait_for_work(false, None);
        assert!(unwritten.is_due());
        unwritten.take();
        unwritten.failed(HOUR);
        unwritten.wait_for_work(false, None);
        assert!(!unwritten.is_due());
        change(&unwritten, "k");
        assert!(!unwritten.is_due(), "the pause is not over");
        unwritten.failed(Duration::ZERO);
        unwritten.wait_for_work(true, None);
        assert!(unwritten.is_due());
    }
}
