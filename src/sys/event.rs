//! A flag that one thread sets and another polls for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{eventfd, EventfdFlags};

/// A flag that one thread sets and another polls for. Clones share it.
#[derive(Clone, Debug)]
pub struct Event(Arc<OwnedFd>);

impl Event {
    /// Makes an event that is not set.
    pub fn new() -> io::Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Event(Arc::new(eventfd(0, flags)?)))
    }

    /// Sets the event. It stays set until it is taken.
    pub fn set(&self) {
        // This fails only if the counter is full, and then the event is set.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Clears the event, and says whether it was set.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Event {
    /// Readable while the event is set.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
