//! An event that one thread sets and other threads poll for, and functions that wait for
//! descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// An event that one thread sets and other threads poll for. Its descriptor is readable while the
/// event is set. Clones share one event.
#[derive(Clone, Debug)]
pub struct Event(Arc<OwnedFd>);

impl Event {
    /// Creates an event that is not set.
    pub fn new() -> io::Result<Event> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Event(Arc::new(eventfd(0, flags)?)))
    }

    /// Sets the event. It stays set until [`Event::take`].
    pub fn set(&self) {
        // This fails only if the counter is at its maximum, and then the event is set already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Whether the event is set.
    pub fn is_set(&self) -> bool {
        self.wait_until(Instant::now())
    }

    /// Blocks until the event is set or `deadline` has passed; returns whether it is set.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        wait_until_readable(self, deadline)
    }

    /// Clears the event; returns whether it was set.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

/// The time left until `deadline`; zero if it has passed.
pub fn time_left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Blocks until a descriptor is readable or `deadline` has passed; returns whether it is readable.
pub fn wait_until_readable(descriptor: &impl AsFd, deadline: Instant) -> bool {
    wait_for(
        &mut [PollFd::new(descriptor, PollFlags::IN)],
        Some(deadline),
    )
    .unwrap_or(false)
}

/// Blocks until a descriptor is ready or `deadline` (`None`: no deadline) has passed. Signals do
/// not end the wait. Returns whether any descriptor is ready.
pub fn wait_for(polled: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(time_left);
        // A timeout too large for the system call means no timeout.
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
