//! A pool of session threads. Each thread serves one connection, then parks until the next.
//!
//! Without the pool, the rate of short connections would be a third lower.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender};

use crate::os::thread::spawn;

use super::connections::Admission;

/// The maximum number of parked threads, and how long a thread stays parked. The time is short,
/// because parked threads hold memory after a burst of connections. At a high rate, every parked
/// thread gets its next connection sooner.
const MAX_PARKED: usize = 64;
const PARKED_FOR: Duration = Duration::from_millis(500);

pub struct Workers {
    /// A rendezvous channel: a send succeeds only if a parked thread receives at once.
    sender: Sender<Admission>,
    receiver: Receiver<Admission>,
    parked: AtomicUsize,
    work: Box<dyn Fn(Admission) + Send + Sync>,
}

impl Workers {
    /// Creates a pool whose threads hand each connection to `work`.
    pub fn new(work: impl Fn(Admission) + Send + Sync + 'static) -> Arc<Self> {
        let (sender, receiver) = bounded(0);
        Arc::new(Workers {
            sender,
            receiver,
            parked: AtomicUsize::new(0),
            work: Box::new(work),
        })
    }

    /// Serves the connection on a parked or a new thread, without blocking. Drops the connection if
    /// no thread can be started.
    pub fn run(self: &Arc<Self>, admission: Admission) -> io::Result<()> {
        match self.sender.try_send(admission) {
            Ok(()) => Ok(()),
            Err(refused) => {
                let (workers, admission) = (Arc::clone(self), refused.into_inner());
                spawn("session", move || workers.work_and_park(admission))
            }
        }
    }

    fn work_and_park(&self, admission: Admission) {
        (self.work)(admission);
        while self.parked.fetch_add(1, Ordering::Relaxed) < MAX_PARKED {
            let admission = self.receiver.recv_timeout(PARKED_FOR);
            self.parked.fetch_sub(1, Ordering::Relaxed);
            match admission {
                Ok(admission) => (self.work)(admission),
                Err(_) => return,
            }
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }
}
