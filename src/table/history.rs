//! The past holders of keys: how the last ones came to hold, and how that ended.
//!
//! A key has a history once a client has told how its work under the key ended, or if the operator
//! expects work under it. So most releases cost nothing here: the key itself says that it has no
//! history.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::events::{ClaimEvent, Fate};
use super::names::Key;
use super::LockTable;
use crate::token::Fence;

/// The maximum number of keys with a history, without those that the operator expects work under.
pub const MAX_HISTORIES: usize = 256;

/// The maximum number of past holders of a key.
pub(super) const MAX_PAST: usize = 10;

/// The maximum memory of a history, in bytes.
pub const PER_HISTORY: u64 = 3072;

/// A holder of a key that has ended its work, or has lost the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastHolder {
    pub fence: Fence,
    /// The tag that its client gave itself.
    pub tag: Option<Arc<str>>,
    pub waited: Duration,
    pub held: Duration,
    pub ended_at: Instant,
    /// [`Fate::Ended`] or [`Fate::Kept`].
    pub fate: Fate,
}

impl PastHolder {
    /// The exit status of the work, if the client told it.
    pub fn status(&self) -> Option<u8> {
        self.fate.status()
    }
}

/// That the operator expects work under a key to succeed now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expectation {
    /// The maximum time from one success to the next.
    pub within: Duration,
    /// When the work last ended with the status 0, or else when the expectation began.
    pub since: Instant,
    /// Whether the work has ever ended with the status 0.
    pub has_succeeded: bool,
}

/// What is remembered of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyHistory {
    pub key: Key,
    /// When this was looked at.
    pub at: Instant,
    /// The oldest first.
    pub past: Vec<PastHolder>,
    /// Whether a client holds the key and works under it.
    pub is_running: bool,
    pub expected: Option<Expectation>,
}

/// How work that the operator expects is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It runs now, in time or not.
    Running,
    /// It does not run, and has succeeded in time or still can.
    OnTime,
    /// It is overdue although it has run in time.
    DidNotSucceed,
    /// It is overdue, and has not run in time.
    DidNotRun,
}

impl KeyHistory {
    /// How long ago the holder's work ended.
    pub fn age(&self, holder: &PastHolder) -> Duration {
        self.at.saturating_duration_since(holder.ended_at)
    }

    /// How the work is doing that is `expected` under the key.
    pub fn job_state(&self, expected: &Expectation) -> JobState {
        let latest = self.past.last();
        match latest.map(|latest| self.age(latest)) {
            _ if self.is_running => JobState::Running,
            _ if !expected.is_overdue(self.at) => JobState::OnTime,
            Some(age) if age <= expected.within => JobState::DidNotSucceed,
            _ => JobState::DidNotRun,
        }
    }
}

impl Expectation {
    /// How long ago the last success was, or else the beginning.
    pub fn age(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.since)
    }

    pub fn is_overdue(&self, at: Instant) -> bool {
        self.age(at) > self.within
    }
}

#[derive(Default)]
pub(super) struct Histories {
    rings: BTreeMap<Key, Ring>,
    expected_count: usize,
}

#[derive(Default)]
struct Ring {
    past: VecDeque<PastHolder>,
    expected: Option<Expectation>,
}

impl Ring {
    fn add(&mut self, holder: PastHolder) {
        if let (Some(expected), Some(0)) = (&mut self.expected, holder.status()) {
            (expected.since, expected.has_succeeded) = (holder.ended_at, true);
        }
        if self.past.len() == MAX_PAST {
            self.past.pop_front();
        }
        let missing = MAX_PAST - self.past.len();
        self.past.reserve_exact(missing);
        self.past.push_back(holder);
    }
}

impl Histories {
    pub(super) fn include(&self, key: &Key) -> bool {
        !self.rings.is_empty() && self.rings.contains_key(key)
    }
}

impl LockTable {
    /// Remembers the holders of `key` from now on, and when work under it was last a success.
    pub fn expect(&mut self, key: &str, within: Duration, now: Instant) {
        let expected = Expectation {
            within,
            since: now,
            has_succeeded: false,
        };
        let key = Key::from(key);
        self.mark_history(&key, true);
        let ring = self.histories.rings.entry(key).or_default();
        let before = ring.expected.replace(expected);
        self.histories.expected_count += usize::from(before.is_none());
    }

    /// Begins the time of each expectation anew. A server that becomes active does not know what
    /// clients have told the server before it.
    #[cfg(feature = "cluster")]
    pub fn expect_anew(&mut self, now: Instant) {
        let rings = self.histories.rings.values_mut();
        for expected in rings.filter_map(|ring| ring.expected.as_mut()) {
            (expected.since, expected.has_succeeded) = (now, false);
        }
    }

    /// Remembers the holder of an event, if the event is [meant for that](ClaimEvent::is_past).
    /// `tag` is the tag that its client gave itself. If there are too many keys with a history, the
    /// one that has not been used for longest loses it.
    pub fn remember(&mut self, event: &ClaimEvent, tag: Option<&Arc<str>>, now: Instant) {
        let (true, Some(fence)) = (event.is_past, event.fence) else {
            return;
        };
        if !self.histories.rings.contains_key(&event.key) {
            self.make_room_for_history();
            self.mark_history(&event.key, true);
        }
        let ring = self.histories.rings.entry(event.key.clone()).or_default();
        ring.add(PastHolder {
            fence,
            tag: tag.cloned(),
            waited: event.waited,
            held: event.lasted,
            ended_at: now,
            fate: event.fate,
        });
    }

    /// The history of a key; `None` if it has none.
    pub fn history(&self, key: &str, now: Instant) -> Option<KeyHistory> {
        let (key, ring) = self.histories.rings.get_key_value(key)?;
        Some(self.describe_history(key, ring, now))
    }

    /// Up to `at_most` histories in the order of their keys, from the one behind `last` on.
    pub fn histories(&self, last: Option<&Key>, at_most: usize, now: Instant) -> Vec<KeyHistory> {
        let behind = last.map_or(Bound::Unbounded, Bound::Excluded);
        let rings = &self.histories.rings;
        let rings = rings.range::<Key, _>((behind, Bound::Unbounded));
        let described = rings.map(|(key, ring)| self.describe_history(key, ring, now));
        described.take(at_most).collect()
    }

    /// The keys that the operator expects work under, in order.
    pub fn expected(&self) -> Vec<(Key, Expectation)> {
        let rings = self.histories.rings.iter();
        let expected = rings.filter_map(|(key, ring)| Some((key.clone(), ring.expected?)));
        expected.collect()
    }

    fn describe_history(&self, key: &Key, ring: &Ring, at: Instant) -> KeyHistory {
        KeyHistory {
            key: key.clone(),
            at,
            past: ring.past.iter().cloned().collect(),
            is_running: self.has_work(key),
            expected: ring.expected,
        }
    }

    /// Whether a client holds the key and has not ended its work. Looks at no more holders than
    /// there may be kept grants.
    fn has_work(&self, key: &Key) -> bool {
        let Some(id) = self.names.get(key) else {
            return false;
        };
        let mut holders = self.keys[*id].holders.iter(&self.places);
        holders.any(|id| !self.places[id].is_past)
    }

    /// Drops a history if there are as many as there may be. Looks at all of them, at most twice
    /// [`MAX_HISTORIES`], but only for a key that has no history yet: a holder of any other key is
    /// remembered without a search.
    fn make_room_for_history(&mut self) {
        let histories = &mut self.histories;
        if histories.rings.len() - histories.expected_count < MAX_HISTORIES {
            return;
        }
        let unexpected = histories.rings.iter();
        let unexpected = unexpected.filter(|(_, ring)| ring.expected.is_none());
        let last_used = |ring: &Ring| ring.past.back().map(|holder| holder.ended_at);
        let oldest = unexpected.min_by_key(|(_, ring)| last_used(ring));
        if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
            histories.rings.remove(&oldest);
            self.mark_history(&oldest, false);
        }
    }

    fn mark_history(&mut self, key: &Key, has_history: bool) {
        if let Some(id) = self.names.get(key) {
            self.keys[*id].has_history = has_history;
        }
    }
}
