//! Snapshots of a table, for operators.

use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::names::{ConnId, Key};
use super::queue::{KeyId, KeyPlaces, PlaceId};
use super::LockTable;
use crate::wire::terms::{Kind, Limit, Weight};
use crate::wire::token::Fence;

/// The maximum number of keys that one visit to the table lists. More keys need several visits, so
/// that neither the time in the table's mutex nor the memory grows with the number of keys.
pub const KEYS_AT_ONCE: usize = 48;

/// The number of holders of a key among which the first that is not a kept grant is looked for.
const KEPT_AT_ONCE: usize = 64;

/// The number of holders and waiters after which [`LockTable::queues`] stops. The descriptions of
/// so many keys and places, including those of the clients, take less than 40 KB.
const PLACES_AT_ONCE: usize = 64;

/// One key at the time of the snapshot, with the first of its holders and of its waiters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySnapshot {
    pub key: Key,
    /// The kind of its present use, or of its previous use if the key is idle.
    pub kind: Kind,
    /// The limit of its present use, or of its previous use if the key is idle.
    pub limit: Limit,
    /// How many of its slots are held.
    pub taken: u32,
    pub holder_count: usize,
    pub waiter_count: usize,
    /// How long the key has been idle; zero while it is in use.
    pub idle_for: Duration,
    /// The first of its holders, in order of grants.
    pub holders: Vec<PlaceSnapshot>,
    /// The first of its waiters, in order of arrival.
    pub waiters: Vec<PlaceSnapshot>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceSnapshot {
    pub conn: ConnId,
    /// How long the claim has held or waited.
    pub age: Duration,
    /// How many slots the claim holds or wants.
    pub weight: Weight,
    /// The numbers of its slots, if the holder has asked for them.
    pub numbers: Arc<[u32]>,
    /// Whether this is a kept grant: its client asked to keep it without a connection.
    pub is_kept: bool,
    /// How long the lease is that runs now, for a holder, or that is asked for.
    pub lease: Duration,
    /// A holder's fence, and what is left of its lease.
    pub held: Option<(Fence, Duration)>,
}

/// The position of a listing of all keys, in sorted order. The listing leaves out keys that were
/// made after it began: otherwise a client that makes keys faster than they are listed would keep
/// it from ending.
#[derive(Clone, Debug)]
pub struct Listing {
    last: Key,
    made_before: u64,
}

impl LockTable {
    /// Describes up to `at_most` keys in sorted order, including idle keys, each with its first
    /// holder and its first waiter. If the first holder is a kept grant, the first one that is not
    /// follows it. Returns the position to continue from if there may be more keys.
    pub fn snapshot(
        &mut self,
        listing: Option<Listing>,
        at_most: usize,
        now: Instant,
    ) -> (Vec<KeySnapshot>, Option<Listing>) {
        let mut page = Vec::new();
        let next = self.list(listing, at_most, |key| {
            let mut queue = self.describe_queue(key, 1, now);
            if queue.holders.first().is_some_and(|first| first.is_kept) {
                let others = self.keys[key].holders.iter(&self.places);
                let mut others = others.take(KEPT_AT_ONCE);
                let other = others.find(|id| !self.places[*id].is_kept);
                queue
                    .holders
                    .extend(other.map(|id| self.describe_place(id, now)));
            }
            page.push(queue);
            true
        });
        (page, next)
    }

    /// Describes keys in use in sorted order, each with up to `places` holders and up to `places`
    /// waiters. Looks at a bounded number of keys. Returns the position to continue from if there
    /// may be more keys.
    pub fn queues(
        &mut self,
        listing: Option<Listing>,
        places: usize,
        now: Instant,
    ) -> (Vec<KeySnapshot>, Option<Listing>) {
        let (mut queues, mut place_count) = (Vec::new(), 0);
        let next = self.list(listing, KEYS_AT_ONCE, |key| {
            if !self.keys[key].is_idle() {
                let queue = self.describe_queue(key, places, now);
                place_count += queue.holders.len() + queue.waiters.len();
                queues.push(queue);
            }
            place_count < PLACES_AT_ONCE
        });
        (queues, next)
    }

    /// Passes up to `at_most` keys of the listing to `look`, until `look` returns `false` because
    /// it has no room for more.
    fn list(
        &self,
        listing: Option<Listing>,
        at_most: usize,
        mut look: impl FnMut(KeyId) -> bool,
    ) -> Option<Listing> {
        let (behind, made_before) = match &listing {
            Some(listing) => (Bound::Excluded(&listing.last), listing.made_before),
            None => (Bound::Unbounded, self.keys_made),
        };
        let keys = self.names.range::<Key, _>((behind, Bound::Unbounded));
        for (index, (name, key)) in keys.enumerate() {
            let is_in_it = self.keys[*key].made < made_before;
            let has_room = !is_in_it || look(*key);
            if !has_room || index + 1 >= at_most {
                let last = name.clone();
                return Some(Listing { last, made_before });
            }
        }
        None
    }

    /// Describes a key with up to `places` holders and up to `places` waiters; `None` if the key is
    /// not in use.
    pub fn queue(&mut self, key: &str, places: usize, now: Instant) -> Option<KeySnapshot> {
        let key = *self.names.get(key)?;
        (!self.keys[key].is_idle()).then(|| self.describe_queue(key, places, now))
    }

    /// Describes a key with only the holder that has this fence, and without waiters; `None` if
    /// there is no such grant.
    pub fn holder(&mut self, key: &str, fence: Fence, now: Instant) -> Option<KeySnapshot> {
        let holder = self.find_grant(key, fence)?;
        Some(self.describe_holder(holder, now))
    }

    /// The number of holders that satisfy `is_meant` by their connections and by whether they are
    /// kept, and the first `at_most` of these, each described as by [`LockTable::holder`].
    pub fn holders_of(
        &self,
        is_meant: impl Fn(ConnId, bool) -> bool,
        at_most: usize,
        now: Instant,
    ) -> (usize, Vec<KeySnapshot>) {
        let is_of_these = |(_, id): &(&Fence, &PlaceId)| {
            let place = &self.places[**id];
            is_meant(place.conn, place.is_kept)
        };
        let mut holders: Vec<_> = self.holders.iter().filter(is_of_these).collect();
        holders.sort_unstable_by_key(|(fence, _)| **fence);
        let first = holders.iter().take(at_most);
        let first = first.map(|(_, id)| self.describe_holder(**id, now));
        (holders.len(), first.collect())
    }

    /// The fences of a key's oldest and newest grants; `None` if the key is not held.
    pub fn fences(&self, key: &str) -> Option<(Fence, Fence)> {
        let holders = &self.keys[*self.names.get(key)?].holders;
        let fence = |id: PlaceId| self.places[id].fence();
        Some((fence(holders.first()?)?, fence(holders.last()?)?))
    }

    /// The grant of `key` with this fence, if there is one.
    pub fn find_grant(&self, key: &str, fence: Fence) -> Option<PlaceId> {
        let found = self.holders.get(&fence).copied();
        found.filter(|id| self.keys[self.places[*id].key].key.as_str() == key)
    }

    /// Describes a key with one holder, and without waiters.
    fn describe_holder(&self, holder: PlaceId, now: Instant) -> KeySnapshot {
        let mut queue = self.describe_queue(self.places[holder].key, 0, now);
        queue.holders.push(self.describe_place(holder, now));
        queue
    }

    fn describe_queue(&self, key: KeyId, places: usize, now: Instant) -> KeySnapshot {
        let queue = &self.keys[key];
        let first = |list: &KeyPlaces| {
            let mut first = Vec::with_capacity(list.len().min(places));
            let ids = list.iter(&self.places).take(places);
            first.extend(ids.map(|id| self.describe_place(id, now)));
            first
        };
        KeySnapshot {
            key: queue.key.clone(),
            kind: queue.kind,
            limit: queue.limit,
            taken: queue.kind.slot_count(queue.limit) - queue.free,
            holder_count: queue.holders.len(),
            waiter_count: queue.waiters.len(),
            idle_for: if queue.is_idle() {
                now.saturating_duration_since(queue.last_used)
            } else {
                Duration::ZERO
            },
            holders: first(&queue.holders),
            waiters: first(&queue.waiters),
        }
    }

    fn describe_place(&self, id: PlaceId, now: Instant) -> PlaceSnapshot {
        PlaceSnapshot {
            conn: self.places[id].conn,
            weight: self.places[id].weight,
            numbers: self.places[id]
                .fence()
                .map_or_else(Arc::default, |fence| self.numbers.of(fence)),
            is_kept: self.places[id].is_kept,
            age: now.saturating_duration_since(self.places[id].since),
            lease: Duration::from_secs(self.places[id].lease_len.into()),
            held: self.places[id]
                .lease_end()
                .map(|(expires_at, fence)| (fence, expires_at.saturating_duration_since(now))),
        }
    }
}
