//! A store of values identified by small numbers, and linked lists of these values.
//!
//! All values of a slab are in one block of memory, which shrinks when most of it is unused: after
//! a hundred thousand waiters have left, their memory is free again.
//!
//! A list needs two links in each value. A `BTreeMap` instead would take 160 bytes for its first
//! entry, and 340 instructions to insert and remove that entry (callgrind). Each holder is in two
//! lists, one of its key and one of its connection. With these lists, a held lock takes 300 bytes,
//! and an acquire and its release take 6 900 instructions.

use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::ops::{Index, IndexMut};

/// A block with room for at most this many values never shrinks.
const MIN_CAPACITY: usize = 64;

/// The number of a value. Once the value has been removed, the number is reused.
pub struct Id<T>(NonZeroU32, PhantomData<fn() -> T>);

impl<T> Id<T> {
    fn of(index: usize) -> Self {
        let number = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        Id(number.expect("fewer than 2^32 values"), PhantomData)
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

impl<T> Clone for Id<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Id<T> {}

impl<T> PartialEq for Id<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for Id<T> {}

impl<T> PartialOrd for Id<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Id<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.cmp(&other.0)
    }
}

impl<T> fmt::Debug for Id<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A store of values. Each value can be in up to `LISTS` lists at once.
pub struct Slab<T, const LISTS: usize> {
    slots: Vec<SlabEntry<T, LISTS>>,
    vacant: List<T, 0>,
}

struct SlabEntry<T, const LISTS: usize> {
    value: Option<T>,
    links: [Links<T>; LISTS],
}

struct Links<T> {
    previous: Option<Id<T>>,
    next: Option<Id<T>>,
}

impl<T> Links<T> {
    const NONE: Self = Links {
        previous: None,
        next: None,
    };
}

impl<T, const LISTS: usize> Slab<T, LISTS> {
    pub fn new() -> Self {
        Slab {
            slots: Vec::new(),
            vacant: List::new(),
        }
    }

    pub fn insert(&mut self, value: T) -> Id<T> {
        let mut vacant = std::mem::replace(&mut self.vacant, List::new());
        let id = vacant.pop_first(self);
        self.vacant = vacant;
        if let Some(id) = id {
            self.slots[id.index()].value = Some(value);
            return id;
        }
        self.slots.push(SlabEntry {
            value: Some(value),
            links: [const { Links::NONE }; LISTS],
        });
        Id::of(self.slots.len() - 1)
    }

    /// Removes a value, which must be in no list.
    pub fn remove(&mut self, id: Id<T>) -> T {
        let value = self.slots[id.index()].value.take();
        let mut vacant = std::mem::replace(&mut self.vacant, List::new());
        vacant.push(self, id);
        while self.slots.last().is_some_and(|slot| slot.value.is_none()) {
            vacant.remove(self, Id::of(self.slots.len() - 1));
            self.slots.pop();
        }
        self.vacant = vacant;
        if let Some(capacity) = sparse(self.slots.len(), self.slots.capacity()) {
            self.slots.shrink_to(capacity);
        }
        value.expect(GONE)
    }

    #[cfg(any(test, fuzzing))]
    pub fn iter(&self) -> impl Iterator<Item = (Id<T>, &T)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(index, slot)| Some((Id::of(index), slot.value.as_ref()?)))
    }
}

/// The capacity to shrink to, if most of a collection's memory is unused.
pub fn sparse(len: usize, capacity: usize) -> Option<usize> {
    (capacity > MIN_CAPACITY && len < capacity / 8).then_some((len * 2).max(MIN_CAPACITY / 2))
}

const GONE: &str = "a number is used only while its value is there";

impl<T, const LISTS: usize> Index<Id<T>> for Slab<T, LISTS> {
    type Output = T;

    // Inlined, because the code is shorter than a call and every step of the table uses it.
    #[inline(always)]
    fn index(&self, id: Id<T>) -> &T {
        self.slots[id.index()].value.as_ref().expect(GONE)
    }
}

impl<T, const LISTS: usize> IndexMut<Id<T>> for Slab<T, LISTS> {
    #[inline(always)]
    fn index_mut(&mut self, id: Id<T>) -> &mut T {
        self.slots[id.index()].value.as_mut().expect(GONE)
    }
}

/// A linked list of a slab's values. A value may be in one list of each `ROLE` at a time.
pub struct List<T, const ROLE: usize> {
    first: Option<Id<T>>,
    last: Option<Id<T>>,
    len: u32,
}

impl<T, const ROLE: usize> List<T, ROLE> {
    pub fn new() -> Self {
        List {
            first: None,
            last: None,
            len: 0,
        }
    }

    pub fn first(&self) -> Option<Id<T>> {
        self.first
    }

    pub fn last(&self) -> Option<Id<T>> {
        self.last
    }

    pub fn len(&self) -> usize {
        self.len as usize
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a value at the end.
    pub fn push<const LISTS: usize>(&mut self, slab: &mut Slab<T, LISTS>, id: Id<T>) {
        slab.slots[id.index()].links[ROLE] = Links {
            previous: self.last,
            next: None,
        };
        match self.last {
            Some(last) => slab.slots[last.index()].links[ROLE].next = Some(id),
            None => self.first = Some(id),
        }
        self.last = Some(id);
        self.len += 1;
    }

    /// Removes a value from this list. The value must be in the list.
    pub fn remove<const LISTS: usize>(&mut self, slab: &mut Slab<T, LISTS>, id: Id<T>) {
        let links = &mut slab.slots[id.index()].links[ROLE];
        let Links { previous, next } = std::mem::replace(links, Links::NONE);
        match previous {
            Some(previous) => slab.slots[previous.index()].links[ROLE].next = next,
            None => self.first = next,
        }
        match next {
            Some(next) => slab.slots[next.index()].links[ROLE].previous = previous,
            None => self.last = previous,
        }
        self.len -= 1;
    }

    pub fn pop_first<const LISTS: usize>(&mut self, slab: &mut Slab<T, LISTS>) -> Option<Id<T>> {
        let first = self.first?;
        self.remove(slab, first);
        Some(first)
    }

    /// Whether a value is in this list. The value must be in no other list of this role.
    pub fn contains<const LISTS: usize>(&self, slab: &Slab<T, LISTS>, id: Id<T>) -> bool {
        self.first == Some(id) || slab.slots[id.index()].links[ROLE].previous.is_some()
    }

    pub fn iter<'a, const LISTS: usize>(
        &self,
        slab: &'a Slab<T, LISTS>,
    ) -> impl Iterator<Item = Id<T>> + 'a {
        std::iter::successors(self.first, |id| slab.slots[id.index()].links[ROLE].next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(count: usize) -> (Slab<usize, 2>, Vec<Id<usize>>) {
        let mut slab = Slab::new();
        let ids = (0..count).map(|value| slab.insert(value)).collect();
        (slab, ids)
    }

    #[test]
    fn a_number_keeps_its_value_while_others_come_and_go() {
        let (mut slab, ids) = filled(5);
        assert_eq!(slab.remove(ids[1]), 1);
        assert_eq!(slab.remove(ids[3]), 3);
        let new = [slab.insert(10), slab.insert(11), slab.insert(12)];
        assert_eq!([slab[ids[0]], slab[ids[2]], slab[ids[4]]], [0, 2, 4]);
        assert_eq!(new.map(|id| slab[id]), [10, 11, 12]);
        assert_eq!(slab.slots.len(), 6);
    }

    #[test]
    fn memory_shrinks_with_the_values() {
        let (mut slab, ids) = filled(10_000);
        let capacity = slab.slots.capacity();
        let (first, rest) = ids[1..].split_at(5_000);
        rest.iter().for_each(|id| assert!(slab.remove(*id) > 0));
        assert_eq!(slab.slots.capacity(), capacity, "half of it is in use");
        first.iter().for_each(|id| assert!(slab.remove(*id) > 0));
        assert_eq!(slab.slots.len(), 1);
        assert!(slab.slots.capacity() <= MIN_CAPACITY);
        assert_eq!(slab[ids[0]], 0);
        for value in 0..5 {
            slab.insert(value);
        }
        assert_eq!(slab.slots.len(), 6);
    }

    #[test]
    fn a_list_keeps_the_order_in_which_values_came() {
        let (mut slab, ids) = filled(4);
        let mut list = List::<usize, 1>::new();
        for at in [2, 0, 3, 1] {
            list.push(&mut slab, ids[at]);
        }
        list.remove(&mut slab, ids[3]);
        assert!(list.contains(&slab, ids[1]) && !list.contains(&slab, ids[3]));
        fn values(list: &List<usize, 1>, slab: &Slab<usize, 2>) -> Vec<usize> {
            list.iter(slab).map(|id| slab[id]).collect()
        }
        assert_eq!(values(&list, &slab), [2, 0, 1]);
        list.remove(&mut slab, ids[2]);
        list.remove(&mut slab, ids[1]);
        assert_eq!(values(&list, &slab), [0]);
        assert_eq!(list.pop_first(&mut slab), Some(ids[0]));
        assert_eq!((list.len(), list.pop_first(&mut slab)), (0, None));
    }
}
