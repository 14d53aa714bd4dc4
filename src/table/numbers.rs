//! Slot numbers: a holder of one slot of a semaphore that asks for its number gets the lowest one
//! that no other holder of the key has, and keeps it.
//!
//! A number is given when it is first asked for, not with the grant: most semaphores need none, and
//! a journal knows their holders in a form that older servers can read.

use super::place::PlaceId;
use super::types::{ConnId, Kind, Weight};
use super::LockTable;
use crate::token::Fence;

impl LockTable {
    /// Gives a number to the grant with this fence, if `conn` holds it and it is one slot of a
    /// semaphore. A query by another connection changes nothing.
    pub fn number_slot(&mut self, conn: ConnId, key: &str, fence: Fence) {
        let found = self.find_grant(key, fence);
        let Some(id) = found.filter(|id| self.places[*id].conn == conn) else {
            return;
        };
        let place = &self.places[id];
        let is_one_slot =
            self.keys[place.key].kind == Kind::Semaphore && place.weight == Weight::ONE;
        if is_one_slot && place.number.is_none() {
            let in_use = self.numbers.range((place.key, 0)..=(place.key, u32::MAX));
            let in_order = in_use.zip(0..);
            let lowest = in_order
                .take_while(|((_, number), at)| number == at)
                .count();
            // There are never more holders than slots, so it is below the limit.
            self.set_number(id, lowest as u32);
            self.note_numbered(id, fence);
        }
    }

    /// Gives a holder this number; `false` if another holder of the key has it.
    pub(super) fn set_number(&mut self, id: PlaceId, number: u32) -> bool {
        let place = &mut self.places[id];
        let is_new = self.numbers.insert((place.key, number));
        if is_new {
            place.number = Some(number);
        }
        is_new
    }

    /// Frees the number of a holder.
    pub(super) fn free_number(&mut self, id: PlaceId) {
        let place = &mut self.places[id];
        if let Some(number) = place.number.take() {
            self.numbers.remove(&(place.key, number));
        }
    }
}
