//! Slot numbers: a holder of one slot of a semaphore that asks for its number gets the lowest one
//! that no other holder of the key has, and keeps it.
//!
//! A number is given when it is first asked for, not with the grant: most semaphores need none, and
//! a journal knows their holders in a form that older servers can read.

use std::collections::BTreeMap;

use super::place::PlaceId;
use super::queue::KeyId;
use super::types::{ConnId, Kind, Weight};
use super::LockTable;
use crate::token::Fence;

/// The numbers in use, as runs of consecutive ones that are as long as possible: the first number
/// of each, and the one behind its last. So the lowest free number of a key is found at once.
#[derive(Default)]
pub(super) struct Numbers(BTreeMap<(KeyId, u32), u32>);

impl Numbers {
    /// Takes the lowest number that is free.
    fn take_lowest(&mut self, key: KeyId) -> u32 {
        let lowest = self.0.get(&(key, 0)).copied().unwrap_or(0);
        self.take(key, lowest);
        lowest
    }

    /// Takes a number that is free.
    fn take(&mut self, key: KeyId, number: u32) {
        let below = self.run_at(key, number);
        let below = below.filter(|(_, end)| *end == number);
        let start = below.map_or(number, |(start, _)| start);
        let end = self.0.remove(&(key, number + 1)).unwrap_or(number + 1);
        self.0.insert((key, start), end);
    }

    /// Frees a number that is in use.
    fn free(&mut self, key: KeyId, number: u32) {
        let (start, end) = self.run_at(key, number).expect("it is in use");
        self.0.remove(&(key, start));
        for (start, end) in [(start, number), (number + 1, end)] {
            if start < end {
                self.0.insert((key, start), end);
            }
        }
    }

    pub(super) fn is_in_use(&self, key: KeyId, number: u32) -> bool {
        self.run_at(key, number)
            .is_some_and(|(_, end)| number < end)
    }

    /// The run that a number is in, or else the last one below it.
    fn run_at(&self, key: KeyId, number: u32) -> Option<(u32, u32)> {
        let (&(of, start), &end) = self.0.range(..=(key, number)).next_back()?;
        (of == key).then_some((start, end))
    }

    /// All runs.
    #[cfg(any(test, fuzzing))]
    pub(super) fn iter(&self) -> impl Iterator<Item = (KeyId, std::ops::Range<u32>)> + '_ {
        let runs = self.0.iter();
        runs.map(|((key, start), end)| (*key, *start..*end))
    }
}

impl LockTable {
    /// Gives a number to the grant with this fence, if `conn` holds it and it is one slot of a
    /// semaphore. A query by another connection changes nothing.
    pub fn number_slot(&mut self, conn: ConnId, key: &str, fence: Fence) {
        let found = self.find_grant(key, fence);
        let Some(id) = found.filter(|id| self.places[*id].conn == conn) else {
            return;
        };
        let place = &mut self.places[id];
        let is_one_slot =
            self.keys[place.key].kind == Kind::Semaphore && place.weight == Weight::ONE;
        if is_one_slot && place.number.is_none() {
            // There are never more holders than slots, so it is below the limit.
            place.number = Some(self.numbers.take_lowest(place.key));
            self.note_again(id);
        }
    }

    /// Gives a holder this number, which is free.
    pub(super) fn set_number(&mut self, id: PlaceId, number: u32) {
        let place = &mut self.places[id];
        self.numbers.take(place.key, number);
        place.number = Some(number);
    }

    /// Frees the number of a holder.
    pub(super) fn free_number(&mut self, id: PlaceId) {
        let place = &mut self.places[id];
        if let Some(number) = place.number.take() {
            self.numbers.free(place.key, number);
        }
    }
}
