//! Ending a wait from another thread.

use std::io;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::error::Error;
use crate::net::stream::Stream;
use crate::sys::event::Event;

/// Ends blocking acquires from another thread: those of a [`Lock`](super::Lock) that was given the
/// handle with [`Lock::cancelled_by`](super::Lock::cancelled_by).
///
/// An acquire that is cancelled closes its connection, so that the server gives up its place in the
/// queue, and returns [`Error::Cancelled`]. A grant that has arrived by then wins. Cancelling is
/// for good: every later acquire with the same handle is cancelled as well. It does not touch
/// guards.
///
/// Its clones share one state. All its methods can be called from several threads; none blocks.
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
    /// A handle that nothing has cancelled. It takes one descriptor.
    ///
    /// # Errors
    ///
    /// The system has no descriptor left.
    pub fn new() -> io::Result<CancelHandle> {
        Event::new().map(CancelHandle)
    }

    /// Ends the acquires that wait with this handle, and all that come. To do so twice is to do so
    /// once.
    pub fn cancel(&self) {
        self.0.set();
    }

    /// Whether [`CancelHandle::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_set()
    }

    /// Waits for at most `time` until the stream is readable, and tells whether it is. Fails if the
    /// handle was cancelled and the stream is not readable.
    pub(super) fn wait_for(&self, stream: &Stream, time: Duration) -> Result<bool, Error> {
        let mut watched = [
            PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP),
            PollFd::new(&self.0, PollFlags::IN),
        ];
        // An interrupted poll reports nothing; the caller comes again.
        let _ = poll(&mut watched, Timespec::try_from(time).ok().as_ref());
        let [stream, cancelled] = watched.map(|watched| !watched.revents().is_empty());
        if cancelled && !stream {
            return Err(Error::Cancelled);
        }
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_reply_that_has_arrived_wins_over_a_cancellation() {
        let (mut server, ours) = UnixStream::pair().expect("two descriptors");
        let (handle, ours) = (CancelHandle::new().expect("one more"), Stream::Unix(ours));
        let moment = Duration::from_millis(10);
        assert!(matches!(handle.wait_for(&ours, moment), Ok(false)));
        handle.cancel();
        let hour = Duration::from_secs(3600);
        let waited = handle.wait_for(&ours, hour);
        assert!(matches!(waited, Err(Error::Cancelled)), "{waited:?}");
        server.write_all(b"ok\n").expect("a reader");
        assert!(matches!(handle.wait_for(&ours, hour), Ok(true)));
    }
}
