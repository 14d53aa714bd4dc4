//! Threads for connections: one each while it lasts, kept for the next one for a while after.
//!
//! Spawning a thread for every connection would cost a third of the rate at which short
//! connections are served.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender, TrySendError};

/// How many idle threads are kept, and for how long.
const MAX_PARKED: usize = 16;
const PARKED_FOR: Duration = Duration::from_secs(10);

/// The stack of a thread, in bytes. A session needs little; unoptimised code needs more of it.
pub const STACK_LEN: usize = if cfg!(debug_assertions) {
    512 * 1024
} else {
    128 * 1024
};

/// Starts a thread with a stack of [`STACK_LEN`].
///
/// # Errors
///
/// If none can be had.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_LEN);
    thread.spawn(body).map(drop)
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
