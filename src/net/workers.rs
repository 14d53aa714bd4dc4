//! Threads for connections: a thread serves one connection, and is then kept for the next.
//!
//! Spawning a thread for every connection would cost a third of the rate at which short
//! connections are served.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender};

use crate::sys::thread::spawn;

use super::connections::Admission;

/// How many idle threads are kept, and for how long. After a crowd they keep memory from going
/// back, so it is not for long; where connections follow each other fast, no thread idles so long.
const MAX_PARKED: usize = 64;
const PARKED_FOR: Duration = Duration::from_millis(500);

/// Serves each connection on a thread of its own.
pub struct Workers {
    /// A channel without room: a connection goes through only if a parked thread takes it at once.
    sender: Sender<Admission>,
    receiver: Receiver<Admission>,
    parked: AtomicUsize,
    work: Box<dyn Fn(Admission) + Send + Sync>,
}

impl Workers {
    /// No threads yet; they hand each connection to `work`.
    pub fn new(work: impl Fn(Admission) + Send + Sync + 'static) -> Arc<Self> {
        let (sender, receiver) = bounded(0);
        Arc::new(Workers {
            sender,
            receiver,
            parked: AtomicUsize::new(0),
            work: Box::new(work),
        })
    }

    /// Serves the connection on a parked thread or a new one, and does not wait for it. If there is
    /// no thread for it, the connection is dropped.
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
