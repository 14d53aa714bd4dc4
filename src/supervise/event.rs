//! A flag that one thread sets and another polls for.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{eventfd, EventfdFlags};

/// Something that one thread tells another, which polls for it.
#[derive(Clone, Debug)]
pub struct Event(pub(super) Arc<OwnedFd>);

impl Event {
    /// Not set yet.
    pub fn new() -> io::Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Event(Arc::new(eventfd(0, flags)?)))
    }

    /// Sets it, until it is taken.
    pub fn set(&self) {
        // Fails only where the counter is full, and then it is set.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Whether it was set since it was last asked.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}
