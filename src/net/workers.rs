//! Threads for connections: one each while it lasts, kept for the next one for a while after.
//!
//! Spawning a thread for every connection would cost a third of the rate at which short
//! connections are served.

use std::fs;
use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender, TrySendError};
use rustix::param::page_size;
use rustix::process::{getrlimit, Resource};

/// How many idle threads are kept, and for how long.
const MAX_PARKED: usize = 16;
const PARKED_FOR: Duration = Duration::from_secs(10);

/// The stack of a thread, in bytes. A session needs little; unoptimised code needs more of it.
pub const STACK_LEN: usize = if cfg!(debug_assertions) {
    512 * 1024
} else {
    128 * 1024
};

/// What a thread that has begun needs beside its stack: its signal stack, and its first allocations.
const THREAD_EXTRA: u64 = 64 * 1024;

/// The memory in bytes that new threads leave to those that run, for a table at its caps and for
/// replies; no more than this part of a limit, so that a small process serves anybody at all.
const RESERVE: u64 = 32 * 1024 * 1024;
const RESERVE_SHARE: u64 = 4;

/// A block that the C library always maps, whatever blocks it has had before: a little more than the
/// reserve, or on small machines what they can be expected to have.
const PROBE_LEN: usize = if cfg!(target_pointer_width = "64") {
    33 * 1024 * 1024
} else {
    8 * 1024 * 1024
};

/// Threads that have been asked for, and have not begun yet.
static STARTING: AtomicUsize = AtomicUsize::new(0);

/// Starts a thread with a stack of [`STACK_LEN`].
///
/// # Errors
///
/// If none can be had, or if it would leave too little memory to the others: a thread for which there
/// is no signal stack ends the process, and so does an allocation that fails.
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

/// Counted among those that have not begun, until dropped.
struct Starting {
    /// How many there are with this one.
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

/// Whether `count` threads can be had and the reserve still be left.
fn has_room_for(count: usize) -> bool {
    // Read each time, since limits may be imposed while we run. With each goes the field of what is
    // used: all that is mapped, and what of that is for data and stacks.
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

/// What bounds memory where no limit does: a commit limit, or pointers of 32 bits.
fn has_room_for_probe() -> bool {
    let mut probe = Vec::<u8>::new();
    let has_room = probe.try_reserve_exact(PROBE_LEN).is_ok();
    // Otherwise the compiler may leave out the allocation.
    black_box(&probe);
    has_room
}

/// Runs each job on a thread of its own.
pub struct Workers<J> {
    /// Has no room: a job goes through only if a parked thread takes it at once.
    jobs: Sender<J>,
    shared: Arc<Shared<J>>,
}

struct Shared<J> {
    jobs: Receiver<J>,
    parked: AtomicUsize,
    work: Box<dyn Fn(J) + Send + Sync>,
}

impl<J: Send + 'static> Workers<J> {
    /// No thread yet; each job will be handed to `work`.
    pub fn new(work: impl Fn(J) + Send + Sync + 'static) -> Self {
        let (sender, receiver) = bounded(0);
        Workers {
            jobs: sender,
            shared: Arc::new(Shared {
                jobs: receiver,
                parked: AtomicUsize::new(0),
                work: Box::new(work),
            }),
        }
    }

    /// Has the job done, on a parked thread or a new one. Does not wait for it.
    ///
    /// # Errors
    ///
    /// If no thread can be had; the job is dropped then.
    pub fn run(&self, job: J) -> io::Result<()> {
        match self.jobs.try_send(job) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => self.spawn(job),
        }
    }

    fn spawn(&self, job: J) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        spawn("session", move || shared.work_and_park(job))
    }
}

impl<J> Shared<J> {
    fn work_and_park(&self, job: J) {
        (self.work)(job);
        while self.parked.fetch_add(1, Ordering::Relaxed) < MAX_PARKED {
            let job = self.jobs.recv_timeout(PARKED_FOR);
            self.parked.fetch_sub(1, Ordering::Relaxed);
            match job {
                Ok(job) => (self.work)(job),
                Err(_) => return,
            }
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }
}
