//! A flag that one thread sets and others poll for; waiting for descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// A flag that one thread sets and others poll for: its descriptor is readable while it is set.
/// Clones share it.
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

    /// Says whether the event is set.
    pub fn is_set(&self) -> bool {
        self.is_set_by(Instant::now())
    }

    /// Blocks until the event is set, or until `deadline`; says whether it is set.
    pub fn is_set_by(&self, deadline: Instant) -> bool {
        is_readable_by(self, deadline)
    }

    /// Clears the event, and says whether it was set.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

/// Blocks until a descriptor is readable, or until `deadline`; says whether it is readable.
pub fn is_readable_by(descriptor: &impl AsFd, deadline: Instant) -> bool {
    wait_for(
        &mut [PollFd::new(descriptor, PollFlags::IN)],
        Some(deadline),
    )
    .unwrap_or(false)
}

/// Blocks until a descriptor is ready, or until `deadline` (`None`: for ever), whatever signals
/// come; says whether one is ready.
pub fn wait_for(polled: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // A time that is too long for the system is as good as none.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(polled, left.as_ref()) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
