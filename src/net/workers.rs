//! Threads for connections: a thread serves one connection, and is then kept for the next.
//!
//! Spawning a thread for every connection would cost a third of the rate at which short
//! connections are served.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender, TrySendError};

use crate::sys::thread::spawn;

/// How many idle threads are kept, and for how long.
const MAX_PARKED: usize = 16;
const PARKED_FOR: Duration = Duration::from_secs(10);

/// Runs each job on a thread of its own.
pub struct Workers<J> {
    /// A channel without room: a job goes through only if a parked thread takes it at once.
    jobs: Sender<J>,
    pool: Arc<Pool<J>>,
}

/// What the threads share.
struct Pool<J> {
    jobs: Receiver<J>,
    parked: AtomicUsize,
    work: Box<dyn Fn(J) + Send + Sync>,
}

impl<J: Send + 'static> Workers<J> {
    /// A pool without threads, which hands each job to `work`.
    pub fn new(work: impl Fn(J) + Send + Sync + 'static) -> Self {
        let (sender, receiver) = bounded(0);
        Workers {
            jobs: sender,
            pool: Arc::new(Pool {
                jobs: receiver,
                parked: AtomicUsize::new(0),
                work: Box::new(work),
            }),
        }
    }

    /// Starts the job on a parked thread or a new one, and does not wait for it. If there is no
    /// thread for it, the job is dropped.
    pub fn run(&self, job: J) -> io::Result<()> {
        match self.jobs.try_send(job) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => self.spawn(job),
        }
    }

    fn spawn(&self, job: J) -> io::Result<()> {
        let pool = Arc::clone(&self.pool);
        spawn("session", move || pool.work_and_park(job))
    }
}

impl<J> Pool<J> {
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
