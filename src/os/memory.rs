//! Memory reservations, which keep clients from exhausting the memory of the process.
//!
//! A failed allocation ends the process. So does a new thread that cannot get a signal stack. So
//! code that allocates memory for a client (a thread, a session's buffers, an entry of the table)
//! first reserves the bytes, and refuses the request if memory is short.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

use rustix::param::page_size;
use rustix::process::{getrlimit, Resource};

/// The bytes that new threads and connections must leave free for clients that are already served.
/// Under a small memory limit, they must leave only `limit / NEWCOMERS_SHARE`, so that a small
/// process can still serve.
const LEFT_BY_NEWCOMERS: usize = if cfg!(target_pointer_width = "64") {
    33 * 1024 * 1024
} else {
    8 * 1024 * 1024
};
const NEWCOMERS_SHARE: usize = 4;

/// The bytes that always stay free, for small allocations, which are not reserved.
const ALWAYS_LEFT: usize = 1024 * 1024;

/// The total bytes of all reservations. Some of them may not have been allocated yet.
static RESERVED: AtomicUsize = AtomicUsize::new(0);

/// Bytes that are set aside for the caller until this is dropped.
#[derive(Debug)]
pub struct Reservation(usize);

/// The purpose of a reservation, which decides how much memory must stay free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A new thread or connection. It must leave memory for clients that are already served.
    Newcomer,
    /// A request of a client that is already served.
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

/// Whether enough memory stays free if `len` more bytes are allocated.
fn has_room_for(len: usize, purpose: Purpose) -> bool {
    // The limits are read each time, because they can change while the process runs. Each limit is
    // paired with the field of statm that it limits: the total size, or data and stacks.
    let limits = [(Resource::As, 0), (Resource::Data, 5)]
        .map(|(resource, field)| (getrlimit(resource).current, field));
    let is_limited = limits.iter().any(|(limit, _)| limit.is_some());
    // If there is no limit, or if /proc does not tell the usage, only an attempt can tell.
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

/// The fields of this process's statm file. The file stays open, because later there may be no free
/// descriptor. If opening the file fails, the next call tries again.
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

/// Tries to allocate `len` bytes. Even without resource limits, a commit limit or 32-bit pointers
/// may bound the memory. Memory that the C library has cached does not affect the result, because
/// the library always maps a block of this size anew.
fn can_allocate(len: usize) -> bool {
    let mut block = Vec::<u8>::new();
    let is_had = block.try_reserve_exact(len).is_ok();
    // Without this, the compiler might remove the unused allocation.
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
