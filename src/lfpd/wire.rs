//! The two descriptors of a conversation: one to read and one to write, usually the same socket.

use std::cell::Cell;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{self, sockopt, SendFlags, Shutdown};

/// How long a peer may take to read a reply.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a server that stops goes on reading commands that have arrived.
const LAST_READS: Duration = Duration::from_secs(3);

/// Two descriptors that can be polled, with a bound on the time of every call. Unlike a
/// [`Stream`](crate::net::stream::Stream) they may be pipes, and a server that stops interrupts
/// them.
#[derive(Debug)]
pub struct Wire<'a> {
    input: BorrowedFd<'a>,
    output: BorrowedFd<'a>,
    /// Readable once the server stops.
    stop: BorrowedFd<'a>,
    stopped_at: Cell<Option<Instant>>,
    is_socket: bool,
}

/// Reads from a wire until a deadline, then fails like a socket whose read timeout is over.
#[derive(Debug)]
pub struct Until<'w, 'a>(pub &'w Wire<'a>, pub Instant);

impl<'a> Wire<'a> {
    /// A wire that reads from `input` and writes to `output`. Once `stop` is readable, it reads
    /// only what has arrived already.
    pub fn new(input: BorrowedFd<'a>, output: BorrowedFd<'a>, stop: BorrowedFd<'a>) -> Wire<'a> {
        Wire {
            input,
            output,
            stop,
            stopped_at: Cell::new(None),
            is_socket: sockopt::socket_type(output).is_ok(),
        }
    }

    /// Writes all of `bytes`, in one system call where the peer keeps up.
    ///
    /// # Errors
    ///
    /// As `write`; [`io::ErrorKind::TimedOut`] if the peer does not read it within five seconds, or
    /// not at once when the server stops.
    pub fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        let deadline = Instant::now() + WRITE_TIMEOUT;
        while !bytes.is_empty() {
            let (has_room, is_stopped) = self.poll(self.output, PollFlags::OUT, deadline)?;
            if !has_room {
                if is_stopped || Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                continue;
            }
            match self.write_some(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Closes our side, then reads and drops what the peer sends until it closes its own, for
    /// `limit` at most. If a socket is closed with unread bytes, the kernel sends a reset, which
    /// can destroy the reply on its way.
    pub fn close_lingering(&self, limit: Duration) {
        if net::shutdown(self.output, Shutdown::Write).is_err() {
            return;
        }
        let deadline = Instant::now() + limit;
        let mut scrap = [0; 512];
        while matches!(self.read_by(&mut scrap, deadline), Ok(1..)) && Instant::now() < deadline {}
    }

    fn write_some(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        if self.is_socket {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            net::send(self.output, bytes, flags)
        } else {
            rustix::io::write(self.output, bytes)
        }
    }

    fn read_by(&self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            let stopped_at = self.stopped_at.get();
            let is_enough = stopped_at.is_some_and(|at| at.elapsed() >= LAST_READS);
            if is_enough {
                return Ok(0);
            }
            let until = stopped_at.unwrap_or(deadline);
            let (is_ready, is_stopped) = self.poll(self.input, PollFlags::IN, until)?;
            if is_ready {
                match rustix::io::read(self.input, &mut *buffer) {
                    Ok(len) => return Ok(len),
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Err(error) => return Err(error.into()),
                }
            } else if stopped_at.is_some() {
                return Ok(0);
            } else if is_stopped {
                // The next rounds read what has arrived up to now.
                self.stopped_at.set(Some(Instant::now()));
            }
            if stopped_at.is_none() && Instant::now() >= deadline {
                return Err(Errno::AGAIN.into());
            }
        }
    }

    /// Blocks until the descriptor is ready, the deadline is over, or the server stops. Returns
    /// whether it is ready, and whether the server stops.
    fn poll(
        &self,
        descriptor: BorrowedFd<'_>,
        flags: PollFlags,
        deadline: Instant,
    ) -> io::Result<(bool, bool)> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut fds = [
            PollFd::from_borrowed_fd(descriptor, flags),
            PollFd::from_borrowed_fd(self.stop, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty())),
            Err(Errno::INTR) => Ok((false, false)),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for Until<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read_by(buffer, self.1)
    }
}

impl AsFd for Wire<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.input
    }
}
