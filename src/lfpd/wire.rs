//! The two descriptors of a conversation: one to read and one to write, usually the same socket.

use std::cell::Cell;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{shutdown, Shutdown};

use crate::os::event::wait_for;
use crate::os::stream::discard;
use crate::os::write::write_within;

/// How long a peer may take to read a reply.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a server that is stopping continues to read commands that have already arrived.
const LAST_READS: Duration = Duration::from_secs(3);

/// Two descriptors on which every call has a time limit. Unlike the socket of a
/// [`Stream`](crate::os::stream::Stream), they may be pipes. A server that is stopping interrupts
/// the calls.
#[derive(Debug)]
pub struct Wire<'a> {
    input: BorrowedFd<'a>,
    output: BorrowedFd<'a>,
    /// Readable once the server stops.
    stop: BorrowedFd<'a>,
    stopped_at: Cell<Option<Instant>>,
}

/// Reads from a wire until a deadline. After the deadline, a read fails with the same error as on a
/// socket with a read timeout.
#[derive(Debug)]
pub struct Until<'w, 'a>(pub &'w Wire<'a>, pub Instant);

impl<'a> Wire<'a> {
    /// Makes a wire that reads from `input` and writes to `output`. Once `stop` is readable, the
    /// wire reads only what has already arrived.
    pub fn new(input: BorrowedFd<'a>, output: BorrowedFd<'a>, stop: BorrowedFd<'a>) -> Wire<'a> {
        Wire {
            input,
            output,
            stop,
            stopped_at: Cell::new(None),
        }
    }

    /// Writes all of `bytes`, in one system call if the peer reads fast enough. Fails with
    /// [`io::ErrorKind::TimedOut`] if the peer does not read them within five seconds, or if the
    /// server is stopping and the peer does not read them at once.
    pub fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        write_within(
            self.output,
            &mut bytes,
            Some(WRITE_TIMEOUT),
            Some(self.stop),
        )
    }

    /// Lingering close: ends our side, then discards what the peer sends until the peer closes its
    /// side, but for at most `limit`.
    pub fn close_lingering(&self, limit: Duration) {
        if shutdown(self.output, Shutdown::Write).is_ok() {
            discard(limit, |scrap, left| {
                self.read_by(scrap, Instant::now() + left)
            });
        }
    }

    fn read_by(&self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            let stopped_at = self.stopped_at.get();
            if stopped_at.is_some_and(|at| at.elapsed() >= LAST_READS) {
                return Ok(0);
            }
            let until = stopped_at.unwrap_or(deadline);
            let mut polled = [self.input, self.stop]
                .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN));
            wait_for(&mut polled, Some(until))?;
            let [has_input, is_stopped] = polled.map(|polled| !polled.revents().is_empty());
            if has_input {
                match rustix::io::read(self.input, &mut *buffer) {
                    Ok(len) => return Ok(len),
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Err(error) => return Err(error.into()),
                }
            } else if stopped_at.is_some() {
                return Ok(0);
            } else if is_stopped {
                // The next rounds read only what has already arrived.
                self.stopped_at.set(Some(Instant::now()));
            }
            if stopped_at.is_none() && Instant::now() >= deadline {
                return Err(Errno::AGAIN.into());
            }
        }
    }
}

impl Read for Until<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read_by(buffer, self.1)
    }
}
