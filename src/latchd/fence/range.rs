//! A range of fences that have been reserved, wherever that is recorded. Pure: no I/O and no clock.

use std::mem;

/// The number of fences that are reserved at a time.
pub const RANGE: u64 = 1 << 20;

/// Reserved fences, which are used in ascending order. By default there are none.
#[derive(Debug, Default)]
pub struct ReservedRange {
    next: u64,
    /// The fences from `next` up to but not including `end` may be used.
    end: u64,
    /// Once this many fences are left, more must be reserved.
    low_water: u64,
    /// More fences have been requested since the latest ones were added.
    is_requested: bool,
    /// A request for a fence has failed since the latest ones were added.
    has_run_out: bool,
}

impl ReservedRange {
    /// The fences from `next` up to but not including `end`. More are requested when half of `size`
    /// is left.
    pub fn new(next: u64, end: u64, size: u64) -> ReservedRange {
        ReservedRange {
            next,
            end,
            low_water: size / 2,
            ..ReservedRange::default()
        }
    }

    /// Takes the next fence; `None` if none is left. Calls `request` if more fences must be
    /// reserved, once until they are added.
    pub fn take(&mut self, request: impl FnOnce()) -> Option<u64> {
        let left = self.left();
        if left <= self.low_water && !mem::replace(&mut self.is_requested, true) {
            request();
        }
        if left == 0 {
            self.has_run_out = true;
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }

    /// Adds the fences up to but not including `end`. Returns whether the fences had run out.
    pub fn extend(&mut self, end: u64) -> bool {
        self.end = end;
        self.is_requested = false;
        mem::take(&mut self.has_run_out)
    }

    /// How many fences are left.
    pub fn left(&self) -> u64 {
        self.end - self.next
    }

    pub fn end(&self) -> u64 {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_fences_are_requested_once_at_half_of_a_range() {
        let mut range = ReservedRange::new(100, 110, 10);
        let mut requested_at = Vec::new();
        let mut take = |range: &mut ReservedRange| {
            let next = range.next;
            range.take(|| requested_at.push(next))
        };
        for fence in 100..110 {
            assert_eq!(take(&mut range), Some(fence));
        }
        assert_eq!([take(&mut range), take(&mut range)], [None; 2]);
        assert!(range.extend(120));
        assert_eq!(take(&mut range), Some(110));
        assert!(!range.extend(130));
        for fence in 111..130 {
            assert_eq!(take(&mut range), Some(fence));
        }
        assert_eq!(take(&mut range), None);
        assert_eq!(requested_at, [105, 125]);
    }

    #[test]
    fn without_a_range_there_is_no_fence() {
        let (mut range, mut is_requested) = (ReservedRange::default(), false);
        assert_eq!(range.take(|| is_requested = true), None);
        assert!(is_requested);
    }
}
