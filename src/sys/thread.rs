//! Starting threads without starving those that run.

use std::fs;
use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::param::page_size;
use rustix::process::{getrlimit, Resource};

/// The stack of a thread, in bytes. A session needs little; unoptimised code needs more.
pub const STACK_LEN: usize = if cfg!(debug_assertions) {
    512 * 1024
} else {
    128 * 1024
};

/// What a running thread needs beside its stack, in bytes: its signal stack and first allocations.
const THREAD_EXTRA: u64 = 64 * 1024;

/// The memory in bytes that a new thread must leave to the others, for a full table and for
/// replies. Under a small limit it is only this share of the limit, so that a small process can
/// serve at all.
const RESERVE: u64 = 32 * 1024 * 1024;
const RESERVE_SHARE: u64 = 4;

/// The length of a block that the C library always maps afresh: a little more than the reserve, or
/// on 32-bit machines what they can be expected to have.
const PROBE_LEN: usize = if cfg!(target_pointer_width = "64") {
    33 * 1024 * 1024
} else {
    8 * 1024 * 1024
};

/// Threads that have been requested and have not begun yet.
static STARTING: AtomicUsize = AtomicUsize::new(0);

/// Starts a detached thread with a stack of [`STACK_LEN`].
///
/// # Errors
///
/// If the system has no thread, or if this one would leave too little memory to the others: a
/// thread without a signal stack ends the process, and so does a failed allocation.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let starting = Starting::new();
    if !has_room_for(starting.count) {
        return Err(io::Error::other("too little memory is left"));
    }
    let thread = thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_LEN);
    let begin = move || {
        drop(starting);
        body();
    };
    thread.spawn(begin).map(drop)
}

/// Counts one thread in [`STARTING`] until it is dropped.
struct Starting {
    /// The threads that are starting, with this one.
    count: usize,
}

impl Starting {
    fn new() -> Self {
        let count = STARTING.fetch_add(1, Ordering::Relaxed) + 1;
        Starting { count }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        STARTING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether there is memory for `count` threads and the reserve.
fn has_room_for(count: usize) -> bool {
    // The limits are read each time, since they may be imposed while the process runs. Each has its
    // field in statm: all that is mapped, and what of that is for data and stacks.
    let limits = [
        (getrlimit(Resource::As).current, 0),
        (getrlimit(Resource::Data).current, 5),
    ];
    if limits.iter().all(|(limit, _)| limit.is_none()) {
        return has_room_for_probe();
    }
    let used = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let used: Vec<u64> = used.split(' ').flat_map(str::parse).collect();
    let threads = count as u64 * (STACK_LEN as u64 + THREAD_EXTRA);
    limits.iter().all(|(limit, field)| {
        let used = used
            .get(*field)
            .map_or(0, |pages| pages * page_size() as u64);
        limit.is_none_or(|limit| used + threads + RESERVE.min(limit / RESERVE_SHARE) <= limit)
    })
}

/// Tries an allocation. Without resource limits, a commit limit or 32-bit pointers still bound
/// memory.
fn has_room_for_probe() -> bool {
    let mut probe = Vec::<u8>::new();
    let has_room = probe.try_reserve_exact(PROBE_LEN).is_ok();
    // The compiler may leave out an allocation that is never looked at.
    black_box(&probe);
    has_room
}
