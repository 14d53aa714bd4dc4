//! Slot numbers. When a holder of semaphore slots asks for their numbers, it gets the lowest
//! numbers that no other holder of the key has, and keeps them.
//!
//! Numbers are given when a holder first asks, not with the grant: most semaphores need no numbers,
//! and without them the journal's records can be read by older servers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::names::ConnId;
use super::queue::KeyId;
use super::LockTable;
use crate::wire::terms::{Kind, Weight};
use crate::wire::token::Fence;

/// The maximum number of slots of a grant that gets numbers. It keeps the description of a holder
/// short.
pub const MAX_NUMBERS: u32 = 128;

/// The maximum number of slots whose numbers a client can bring back: so many numbers of seven
/// digits fit into a request.
const MAX_PROVABLE_NUMBERS: u32 = 20;

#[derive(Default)]
pub struct Numbers {
    /// The numbers in use, as maximal runs of consecutive numbers. Maps the first number of each
    /// run to the number after its last, so that the lowest free number is found quickly.
    runs: BTreeMap<(KeyId, u32), u32>,
    /// The numbers of each grant, in ascending order.
    of_grants: BTreeMap<Fence, Arc<[u32]>>,
    /// How many numbers are in use, over all keys.
    count: usize,
}

impl Numbers {
    /// The numbers of a grant; empty unless its holder has asked for them.
    pub fn of(&self, fence: Fence) -> Arc<[u32]> {
        self.of_grants.get(&fence).cloned().unwrap_or_default()
    }

    /// Whether a client has room for the numbers of this grant in a request.
    pub fn are_provable(&self, fence: Fence) -> bool {
        let numbers = self.of_grants.get(&fence);
        numbers.is_none_or(|numbers| numbers.len() <= MAX_PROVABLE_NUMBERS as usize)
    }

    /// Gives a grant these numbers, which must be free.
    pub fn give(&mut self, fence: Fence, key: KeyId, numbers: &Arc<[u32]>) {
        numbers.iter().for_each(|number| self.take(key, *number));
        self.count += numbers.len();
        self.of_grants.insert(fence, Arc::clone(numbers));
    }

    /// Frees the numbers of a grant.
    pub fn free_all_of(&mut self, fence: Fence, key: KeyId) {
        if let Some(numbers) = self.of_grants.remove(&fence) {
            numbers.iter().for_each(|number| self.free(key, *number));
            self.count -= numbers.len();
        }
    }

    /// The `count` lowest free numbers, in ascending order.
    fn lowest(&self, key: KeyId, count: u32) -> Arc<[u32]> {
        let runs = self.runs.range((key, 0)..=(key, u32::MAX));
        let runs = runs.map(|((_, start), end)| (*start, *end));
        let mut free_from = 0;
        let gaps = runs
            .chain([(u32::MAX, u32::MAX)])
            .flat_map(|(start, end)| std::mem::replace(&mut free_from, end)..start);
        gaps.take(count as usize).collect()
    }

    /// Marks a free number as in use.
    fn take(&mut self, key: KeyId, number: u32) {
        let below = self.run_at(key, number);
        let below = below.filter(|(_, end)| *end == number);
        let start = below.map_or(number, |(start, _)| start);
        let end = self.runs.remove(&(key, number + 1)).unwrap_or(number + 1);
        self.runs.insert((key, start), end);
    }

    /// Frees a number that is in use.
    fn free(&mut self, key: KeyId, number: u32) {
        let (start, end) = self.run_at(key, number).expect("it is in use");
        self.runs.remove(&(key, start));
        for (start, end) in [(start, number), (number + 1, end)] {
            if start < end {
                self.runs.insert((key, start), end);
            }
        }
    }

    pub fn is_in_use(&self, key: KeyId, number: u32) -> bool {
        self.run_at(key, number)
            .is_some_and(|(_, end)| number < end)
    }

    /// The run that contains `number`, or else the nearest run below it.
    fn run_at(&self, key: KeyId, number: u32) -> Option<(u32, u32)> {
        let (&(of, start), &end) = self.runs.range(..=(key, number)).next_back()?;
        (of == key).then_some((start, end))
    }

    #[cfg(any(test, fuzzing))]
    pub fn count(&self) -> usize {
        self.count
    }

    #[cfg(any(test, fuzzing))]
    pub fn runs(&self) -> impl Iterator<Item = (KeyId, std::ops::Range<u32>)> + '_ {
        let runs = self.runs.iter();
        runs.map(|((key, start), end)| (*key, *start..*end))
    }
}

impl LockTable {
    /// Numbers the slots of the grant with this fence, if `conn` holds it and the key is a
    /// semaphore. A query by another connection changes nothing. A grant of several slots gets no
    /// numbers if it has more than [`MAX_NUMBERS`] slots, or if there would then be more numbers in
    /// use than the cap on grants: that cap bounds the memory, whatever the weights. Nor does a
    /// grant get numbers while the table settles, because a holder that comes back may have them;
    /// nor, while the state file cannot be written, a grant of so many that the file must have
    /// them.
    pub fn number_slots(&mut self, conn: ConnId, key: &str, fence: Fence) {
        let found = self.find_grant(key, fence);
        let Some(id) = found.filter(|id| self.places[*id].conn == conn) else {
            return;
        };
        let (key, weight) = (self.places[id].key, self.places[id].weight);
        let is_unprovable = self.places[id].is_proof && weight.get() > MAX_PROVABLE_NUMBERS;
        if self.is_settling() || is_unprovable && self.check_writable(Duration::MAX).is_err() {
            return;
        }
        let numbered_after = self.numbers.count + weight.get() as usize;
        let has_room = weight == Weight::ONE
            || weight.get() <= MAX_NUMBERS && numbered_after <= self.caps.max_grants;
        let is_semaphore = self.keys[key].kind == Kind::Semaphore;
        if is_semaphore && has_room && self.numbers.of(fence).is_empty() {
            // The holders never have more slots than the limit, so the lowest free numbers are
            // below it.
            let numbers = self.numbers.lowest(key, weight.get());
            self.numbers.give(fence, key, &numbers);
            self.places[id].is_unprovable |= is_unprovable;
            let lease_len = Duration::from_secs(self.places[id].lease_len.into());
            self.note_anew(id, self.recorded_lease(fence).unwrap_or(lease_len));
        }
    }
}
