//! Ending a wait from another thread.

use std::io;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::error::Error;
use crate::os::event::Event;
use crate::os::stream::Stream;

/// Ends blocking acquires from another thread. A handle applies to each [`Lock`](super::Lock) to
/// which it was given with [`Lock::cancelled_by`](super::Lock::cancelled_by).
///
/// A cancelled acquire closes its connection, so that the server removes its place in the queue,
/// and returns [`Error::Cancelled`]. If the grant has already arrived, the acquire succeeds.
/// Cancelling is permanent: every later acquire with the same handle is cancelled, too. Locks that
/// are already held are not affected.
///
/// The clones of a handle share one state. All methods can be called from several threads, and do
/// not block.
///
/// ```
/// use latchd::client::{Address, CancelHandle, Client, Error};
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let (_running, server) = Server::in_place_of(server);
/// let client = Client::new([server]);
/// let guard = client.lock("deploy").acquire()?;
///
/// let handle = CancelHandle::new()?;
/// std::thread::scope(|scope| {
///     let waiting = scope.spawn(|| client.lock("deploy").cancelled_by(&handle).acquire());
///     handle.cancel();
///     let waited = waiting.join().expect("the thread does not panic");
///     assert!(matches!(waited, Err(Error::Cancelled)));
/// });
/// assert!(guard.is_held());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CancelHandle(Event);

impl CancelHandle {
    /// Makes a handle that is not cancelled. A handle takes one file descriptor.
    ///
    /// # Errors
    ///
    /// Fails if the system has no file descriptor left.
    pub fn new() -> io::Result<CancelHandle> {
        Event::new().map(CancelHandle)
    }

    /// Cancels all acquires with this handle, both those that wait now and later ones. Calling it
    /// twice is harmless.
    pub fn cancel(&self) {
        self.0.set();
    }

    /// Whether [`CancelHandle::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_set()
    }

    pub(super) fn event(&self) -> &Event {
        &self.0
    }
}

/// Waits for at most `time` until the stream is readable, and returns whether it is. Fails with
/// [`Error::Cancelled`] if one of the events is set and the stream is not readable.
pub(super) fn wait_for(stream: &Stream, time: Duration, events: &[Event]) -> Result<bool, Error> {
    let mut watched = vec![PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
    watched.extend(events.iter().map(|it| PollFd::new(it, PollFlags::IN)));
    // An interrupted poll reports nothing; the caller polls again.
    let _ = poll(&mut watched, Timespec::try_from(time).ok().as_ref());
    let mut is_ready = watched.iter().map(|it| !it.revents().is_empty());
    let is_readable = is_ready.next() == Some(true);
    if !is_readable && is_ready.any(|ready| ready) {
        Err(Error::Cancelled)
    } else {
        Ok(is_readable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::stream::Socket;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::slice;

    #[test]
    fn a_reply_that_has_arrived_wins_over_a_cancellation() {
        let (mut server, ours) = UnixStream::pair().expect("two descriptors");
        let (handle, ours) = (
            CancelHandle::new().expect("one more"),
            Stream::new(Socket::Unix(ours)),
        );
        let moment = Duration::from_millis(10);
        let wait_for = |time| wait_for(&ours, time, slice::from_ref(&handle.0));
        assert!(matches!(wait_for(moment), Ok(false)));
        handle.cancel();
        let hour = Duration::from_secs(3600);
        let waited = wait_for(hour);
        assert!(matches!(waited, Err(Error::Cancelled)), "{waited:?}");
        server.write_all(b"ok\n").expect("a reader");
        assert!(matches!(wait_for(hour), Ok(true)));
    }
}
