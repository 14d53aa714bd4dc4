//! Room in memory: what clients make the process take is asked for here first.
//!
//! A failed allocation ends the process, and so does a thread without a signal stack. So whatever
//! grows with what clients ask for (a thread, a session's buffers, the table) reserves its bytes
//! before it allocates them, and is refused while there is no room.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

use rustix::param::page_size;
use rustix::process::{getrlimit, Resource};

/// The bytes that a newcomer leaves to those that are served already. Under a small limit it is
/// only this share of the limit, so that a small process can serve at all.
const LEFT_BY_NEWCOMERS: usize = if cfg!(target_pointer_width = "64") {
    33 * 1024 * 1024
} else {
    8 * 1024 * 1024
};
const NEWCOMERS_SHARE: usize = 4;

/// The bytes that always stay free, for what is too small to be reserved.
const ALWAYS_LEFT: usize = 1024 * 1024;

/// The bytes that are reserved now and perhaps not allocated yet.
static RESERVED: AtomicUsize = AtomicUsize::new(0);

/// Bytes that only this caller may allocate, until it is dropped.
#[derive(Debug)]
pub struct Reservation(usize);

/// The purpose of a reservation: it decides what must be left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A new thread or connection, which leaves the reserve to the others.
    Newcomer,
    /// What a client that is served already asks for.
    Service,
}

/// Reserves `len` bytes. `None` if they cannot be had beside what must be left. Costs a few system
/// calls.
pub fn reserve(len: usize, purpose: Purpose) -> Option<Reservation> {
    let reservation = Reservation(len);
    let reserved = RESERVED.fetch_add(len, Ordering::Relaxed) + len;
    has_room_for(reserved, purpose).then_some(reservation)
}

impl Drop for Reservation {
    fn drop(&mut self) {
        RESERVED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Whether `len` bytes can be had beside what must be left.
fn has_room_for(len: usize, purpose: Purpose) -> bool {
    // The limits are read each time, since they may be imposed while the process runs. Each has its
    // field in statm: all that is mapped, and what of that is for data and stacks.
    let limits = [(Resource::As, 0), (Resource::Data, 5)]
        .map(|(resource, field)| (getrlimit(resource).current, field));
    let is_limited = limits.iter().any(|(limit, _)| limit.is_some());
    // Where there is no /proc, what is used is not known: only a try tells.
    let Some(used) = is_limited.then(used_pages).flatten() else {
        return can_allocate(len.saturating_add(left_within(usize::MAX, purpose)));
    };
    limits.iter().all(|(limit, field)| {
        let used = used.get(*field).map_or(0, |pages| pages * page_size());
        limit.is_none_or(|limit| {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let left = left_within(limit, purpose);
            used.saturating_add(len).saturating_add(left) <= limit
        })
    })
}

/// The bytes that must be left within a limit.
fn left_within(limit: usize, purpose: Purpose) -> usize {
    match purpose {
        Purpose::Newcomer => LEFT_BY_NEWCOMERS.min(limit / NEWCOMERS_SHARE),
        Purpose::Service => ALWAYS_LEFT,
    }
}

/// The fields of this process's statm. The file stays open: later, descriptors may be short. If
/// they are short now, the next call opens it.
fn used_pages() -> Option<Vec<usize>> {
    static STATM: OnceLock<File> = OnceLock::new();
    let file = match STATM.get() {
        Some(file) => file,
        None => {
            let file = File::open("/proc/self/statm").ok()?;
            STATM.get_or_init(|| file)
        }
    };
    let mut text = [0; 256];
    let len = file.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..len]).ok()?;
    Some(text.split_whitespace().flat_map(str::parse).collect())
}

/// Tries an allocation. Without resource limits, a commit limit or 32-bit pointers still bound
/// memory. The C library maps a block of this size afresh, whatever it has free.
fn can_allocate(len: usize) -> bool {
    let mut block = Vec::<u8>::new();
    let is_had = block.try_reserve_exact(len).is_ok();
    // The compiler may leave out an allocation that is never looked at.
    black_box(&block);
    is_had
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_counts_until_it_is_dropped() {
        let before = RESERVED.load(Ordering::Relaxed);
        let reservation = reserve(1000, Purpose::Service);
        assert!(RESERVED.load(Ordering::Relaxed) >= 1000);
        drop(reservation);
        assert!(RESERVED.load(Ordering::Relaxed) <= before + 1_000_000);
        // Longer than any allocation may be, with 32 bits, too.
        assert!(reserve(usize::MAX / 2, Purpose::Service).is_none());
    }

    #[test]
    fn the_system_tells_what_is_used() {
        let used = used_pages().expect("/proc is mounted");
        assert!(used.len() > 5 && used[0] > used[5]);
    }
}
