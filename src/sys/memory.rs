//! Memory reservations, so that clients cannot exhaust the process's memory.
//!
//! A failed allocation ends the process, and so does a thread without a signal stack. So whatever
//! grows with client requests (a thread, a session's buffers, the table) reserves its bytes before
//! it allocates them, and is refused while memory is short.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

use rustix::param::page_size;
use rustix::process::{getrlimit, Resource};

/// The bytes that newcomers leave for clients already served. Under a small limit it is only this
/// share of the limit, so that a small process can serve at all.
const LEFT_BY_NEWCOMERS: usize = if cfg!(target_pointer_width = "64") {
    33 * 1024 * 1024
} else {
    8 * 1024 * 1024
};
const NEWCOMERS_SHARE: usize = 4;

/// The bytes that always stay free, for allocations too small to reserve.
const ALWAYS_LEFT: usize = 1024 * 1024;

/// The bytes that are reserved but may not be allocated yet.
static RESERVED: AtomicUsize = AtomicUsize::new(0);

/// Bytes that only this caller may allocate, until it is dropped.
#[derive(Debug)]
pub struct Reservation(usize);

/// What a reservation is for; decides how much must stay free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A new thread or connection. It leaves the reserve to clients already served.
    Newcomer,
    /// A request of a client already served.
    Service,
}

/// Reserves `len` bytes; `None` if too little would stay free. Costs a few system calls.
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

/// Whether enough memory stays free after `len` more bytes.
fn has_room_for(len: usize, purpose: Purpose) -> bool {
    // The limits are read each time, because they can be changed while the process runs. Each comes
    // with its field in statm: the total size, or data and stacks.
    let limits = [(Resource::As, 0), (Resource::Data, 5)]
        .map(|(resource, field)| (getrlimit(resource).current, field));
    let is_limited = limits.iter().any(|(limit, _)| limit.is_some());
    // Without /proc the usage is unknown, so only an attempt can tell.
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

/// The bytes that must stay free under a limit.
fn left_within(limit: usize, purpose: Purpose) -> usize {
    match purpose {
        Purpose::Newcomer => LEFT_BY_NEWCOMERS.min(limit / NEWCOMERS_SHARE),
        Purpose::Service => ALWAYS_LEFT,
    }
}

/// The fields of this process's statm. The file stays open, because descriptors may be short later;
/// if they are short now, the next call opens it.
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

/// Tries the allocation. Without resource limits, a commit limit or 32-bit pointers still bound
/// memory. The C library maps a block of this size anew, whatever it has cached.
fn can_allocate(len: usize) -> bool {
    let mut block = Vec::<u8>::new();
    let is_had = block.try_reserve_exact(len).is_ok();
    // Otherwise the compiler may remove an unused allocation.
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
