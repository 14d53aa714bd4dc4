//! A map that grows and shrinks in small steps: a hundred thousand entries that move at once would
//! delay every client.

use std::hash::{BuildHasher, Hash};

use super::numbers::NumberMap;
use super::slab::shrink;

/// The parts of a map. A part moves its entries by itself as it grows or shrinks, and never more
/// than this share of all.
const PART_COUNT: usize = 64;

/// A map from numbers that the server counts up itself, in parts by their hash.
pub(super) struct PartedMap<K, V>(Box<[NumberMap<K, V>; PART_COUNT]>);

impl<K: Eq + Hash, V> PartedMap<K, V> {
    pub(super) fn new() -> Self {
        PartedMap(Box::new(std::array::from_fn(|_| NumberMap::default())))
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.0[self.part_of(key)].get(key)
    }

    pub(super) fn insert(&mut self, key: K, value: V) {
        let part = self.part_of(&key);
        self.0[part].insert(key, value);
    }

    pub(super) fn remove(&mut self, key: &K) {
        let part = self.part_of(key);
        self.0[part].remove(key);
        shrink(&mut self.0[part]);
    }

    fn part_of(&self, key: &K) -> usize {
        // A part takes the lowest bits of the hash and the highest ones for itself.
        let hash = self.0[0].hasher().hash_one(key);
        (hash >> 40) as usize % PART_COUNT
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(NumberMap::len).sum()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().flat_map(NumberMap::iter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_a_row_spread_over_the_parts() {
        let mut map = PartedMap::new();
        for connection in 0..4_u64 {
            for key in 0..16_000_u32 {
                map.insert((connection, key), key);
            }
        }
        assert_eq!((map.len(), map.iter().count()), (64_000, 64_000));
        let lens: Vec<usize> = map.0.iter().map(NumberMap::len).collect();
        assert!(lens.iter().all(|len| (500..2000).contains(len)), "{lens:?}");
        for key in 0..15_999 {
            map.remove(&(3, key));
        }
        assert_eq!(map.get(&(2, 15_000)), Some(&15_000));
        assert_eq!(map.get(&(3, 0)), None);
        assert_eq!(map.get(&(3, 15_999)), Some(&15_999));
        assert_eq!(map.len(), 48_001);
    }

    #[test]
    fn no_entry_moves_together_with_many_others() {
        let mut map = PartedMap::new();
        let mut longest_move = 0;
        let capacities = |map: &PartedMap<u64, ()>| map.0.each_ref().map(NumberMap::capacity);
        let mut step = |map: &mut PartedMap<u64, ()>, change: &dyn Fn(&mut PartedMap<u64, ()>)| {
            let (before, lens) = (capacities(map), map.0.each_ref().map(NumberMap::len));
            change(map);
            for (part, capacity) in capacities(map).into_iter().enumerate() {
                if capacity != before[part] {
                    longest_move = lens[part].max(longest_move);
                }
            }
        };
        for key in 0..20_000 {
            step(&mut map, &|map| map.insert(key, ()));
        }
        for key in 0..20_000 {
            step(&mut map, &|map| map.remove(&key));
        }
        assert_eq!(map.len(), 0);
        assert!((100..500).contains(&longest_move), "{longest_move}");
    }
}
