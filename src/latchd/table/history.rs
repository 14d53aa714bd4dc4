//! The past holders of keys: how the last ones came to hold, and how that ended. Beside them, the
//! claims that were refused.
//!
//! A key has a history once a client has told how its work under the key ended, or a claim was
//! refused, or if the operator expects work under the key. A plain grant begins none: clients with
//! a key for each object would push the histories of jobs out. So most releases cost nothing here:
//! the key itself says that it has no history.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::events::{ClaimEvent, Fate};
use super::leases::earlier;
use super::names::Key;
use super::LockTable;
use crate::wire::token::Fence;

/// The maximum number of keys with a history, without those that the operator expects work under.
pub const MAX_HISTORIES: usize = 256;

/// The maximum number of past holders of a key, and of its refused claims.
pub const MAX_PAST: usize = 10;

/// The maximum memory of a history, in bytes.
pub const PER_HISTORY: u64 = 7680;

/// A holder of a key that has ended its work, or has lost the key; or a claim that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastClaim {
    /// `None` for a refused claim.
    pub fence: Option<Fence>,
    /// The tag that its client gave itself. A refused client without a tag has its address here.
    pub tag: Option<Arc<str>>,
    pub waited: Duration,
    pub held: Duration,
    pub ended_at: Instant,
    /// [`Fate::Ended`] or [`Fate::Kept`]; for a refused claim, [`Fate::Busy`] or [`Fate::GaveUp`].
    pub fate: Fate,
    /// Who held the key when the claim was refused: the tag or the address of the first holder.
    pub holder: Option<Arc<str>>,
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
    pub past: Vec<PastClaim>,
    /// The oldest first.
    pub refused: Vec<PastClaim>,
    /// Whether a client holds the key and works under it.
    pub is_running: bool,
    pub expected: Option<Expectation>,
}

impl KeyHistory {
    /// How long ago the holder's work ended, or the claim was refused.
    pub fn age(&self, claim: &PastClaim) -> Duration {
        self.at.saturating_duration_since(claim.ended_at)
    }

    /// How the work is doing that is `expected` under the key, in a word: it runs and can still
    /// succeed in time; it has succeeded in time or still can; it is overdue although it has run in
    /// time; or it is overdue, and has not run in time. `latch history` and the page show the word
    /// with spaces in place of the hyphens.
    pub fn job_state(&self, expected: &Expectation) -> &'static str {
        let is_recent = |latest: &PastClaim| self.age(latest) <= expected.within;
        match expected.is_overdue(self.at) {
            false if self.is_running => "running",
            false => "on-time",
            true if self.past.last().is_some_and(is_recent) => "did-not-succeed",
            true => "did-not-run",
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
pub struct Histories {
    rings: BTreeMap<Key, Ring>,
    expected_count: usize,
    /// When to look next at what is expected.
    look_at: Option<Instant>,
}

#[derive(Default)]
struct Ring {
    past: VecDeque<PastClaim>,
    refused: VecDeque<PastClaim>,
    expected: Option<Expectation>,
    /// Whether the work was overdue at the last look.
    is_late: bool,
}

impl Ring {
    /// Adds a holder or a refused claim, in place of the oldest one if there are too many.
    fn add(&mut self, claim: PastClaim) {
        if let (Some(expected), Some(0)) = (&mut self.expected, claim.fate.status()) {
            (expected.since, expected.has_succeeded) = (claim.ended_at, true);
        }
        let list = match claim.fence {
            Some(_) => &mut self.past,
            None => &mut self.refused,
        };
        let is_same =
            |it: &PastClaim| (it.fence, &it.tag, it.fate) == (None, &claim.tag, claim.fate);
        if list.back().is_some_and(is_same) {
            list.pop_back(); // a client that asks over and over pushes out no other
        } else if list.len() == MAX_PAST {
            list.pop_front();
        }
        list.reserve_exact(MAX_PAST - list.len());
        list.push_back(claim);
    }
}

impl Histories {
    pub fn include(&self, key: &Key) -> bool {
        !self.rings.is_empty() && self.rings.contains_key(key)
    }

    fn are_full(&self) -> bool {
        self.rings.len() - self.expected_count >= MAX_HISTORIES
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

    /// Begins the time of each expectation anew, and notes from then on what becomes overdue. A
    /// server that becomes active does not know what clients have told the server before it.
    pub fn expect_anew(&mut self, now: Instant) {
        self.histories.look_at = Some(now);
        for ring in self.histories.rings.values_mut() {
            ring.is_late = false;
            if let Some(expected) = &mut ring.expected {
                (expected.since, expected.has_succeeded) = (now, false);
            }
        }
    }

    /// When [`LockTable::note_overdue`] must be called next.
    pub fn next_overdue(&self) -> Option<Instant> {
        self.histories.look_at
    }

    /// Notes which of the expected work has become overdue, and which no longer is.
    pub fn note_overdue(&mut self, now: Instant) {
        if self.histories.look_at.is_none_or(|look_at| look_at > now) {
            return;
        }
        self.histories.look_at = None;
        for (key, ring) in &mut self.histories.rings {
            let Some(expected) = ring.expected else {
                continue;
            };
            let is_late = expected.is_overdue(now);
            if std::mem::replace(&mut ring.is_late, is_late) != is_late {
                self.events.push(ClaimEvent {
                    fate: Fate::Overdue(is_late),
                    key: key.clone(),
                    lasted: expected.age(now),
                    is_alarming: true,
                    ..ClaimEvent::default()
                });
            }
            let due = expected.within.saturating_add(Duration::from_nanos(1));
            let due = expected.since.checked_add(due).filter(|_| !is_late);
            self.histories.look_at = earlier(self.histories.look_at, due);
        }
    }

    /// Remembers the holder or the refused claim of an event, if the event is meant for that. `tag`
    /// and `holder` are those of [`PastClaim`]. If there are too many keys with a history, a holder
    /// takes the place of the one that would be missed least, and a refused claim takes none.
    pub fn remember(
        &mut self,
        event: &ClaimEvent,
        [tag, holder]: [Option<Arc<str>>; 2],
        now: Instant,
    ) {
        if !event.is_past && !event.fate.is_refusal() {
            return;
        }
        if !self.histories.rings.contains_key(&event.key) {
            if !event.is_past && self.histories.are_full() {
                return;
            }
            self.make_room_for_history();
            self.mark_history(&event.key, true);
        }
        let ring = self.histories.rings.entry(event.key.clone()).or_default();
        ring.add(PastClaim {
            fence: event.fence,
            tag,
            waited: event.fence.map_or(event.lasted, |_| event.waited),
            held: event.fence.map_or(Duration::ZERO, |_| event.lasted),
            ended_at: now,
            fate: event.fate,
            holder,
        });
        if ring.is_late && event.fate.status() == Some(0) {
            self.histories.look_at = Some(now);
        }
    }

    /// Restores what an earlier server remembered of a key. What the operator expects now counts,
    /// and from the latest success on.
    pub fn restore_history(&mut self, history: KeyHistory) {
        let known = self.histories.rings.get(&history.key);
        if known.is_none_or(|ring| ring.expected.is_none()) {
            self.make_room_for_history();
        }
        self.mark_history(&history.key, true);
        let ring = self.histories.rings.entry(history.key).or_default();
        let succeeded = history.expected.filter(|it| it.has_succeeded);
        if let (Some(expected), Some(earlier)) = (&mut ring.expected, succeeded) {
            (expected.since, expected.has_succeeded) = (earlier.since, true);
            self.histories.look_at = Some(history.at);
        }
        let claims = history.past.into_iter().chain(history.refused);
        claims.for_each(|claim| ring.add(claim));
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
            refused: ring.refused.iter().cloned().collect(),
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
        if !self.histories.are_full() {
            return;
        }
        let unexpected = self.histories.rings.iter();
        let unexpected = unexpected.filter(|(_, ring)| ring.expected.is_none());
        // The first to go are those without a job, of which no client has told a status.
        let least = unexpected.min_by_key(|(_, ring)| {
            let has_job = ring.past.iter().any(|it| it.fate.status().is_some());
            (has_job, ring.past.back().map(|it| it.ended_at))
        });
        if let Some(least) = least.map(|(key, _)| key.clone()) {
            self.histories.rings.remove(&least);
            self.mark_history(&least, false);
        }
    }

    fn mark_history(&mut self, key: &Key, has_history: bool) {
        if let Some(id) = self.names.get(key) {
            self.keys[*id].has_history = has_history;
        }
    }
}
