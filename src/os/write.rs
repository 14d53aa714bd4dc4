//! Writing within a time limit.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::{write, Errno};
use rustix::net::{send, SendFlags};

use crate::os::event::wait_for;

/// Writes all of `bytes` to a socket, pipe or terminal within `timeout` (`None`: no limit). Needs
/// one system call if the peer keeps up. A peer that reads only a little at a time does not extend
/// the timeout. Stops waiting once `stop` is readable. Afterwards, `bytes` are those that have not
/// been sent.
///
/// Fails with [`io::ErrorKind::TimedOut`] if the peer does not read in time, or `stop` is readable.
#[inline(always)] // into the session's loop, which says why
pub fn write_within(
    output: BorrowedFd<'_>,
    bytes: &mut &[u8],
    timeout: Option<Duration>,
    stop: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    // Most writes do not wait, so the clock is read only when a write must wait.
    let mut deadline = None;
    let mut is_socket = true;
    loop {
        let written = if is_socket {
            send(output, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        } else {
            write(output, bytes)
        };
        match written {
            Ok(len) if len == bytes.len() => {
                *bytes = &[];
                return Ok(());
            }
            Ok(len) => *bytes = &bytes[len..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            // This is a pipe or a terminal. A write to it may block unless poll has reported room.
            Err(Errno::NOTSOCK) => is_socket = false,
            Err(error) => return Err(error.into()),
        }
        let deadline = *deadline
            .get_or_insert_with(|| timeout.and_then(|timeout| Instant::now().checked_add(timeout)));
        wait_for_room(output, deadline, stop)?;
    }
}

/// Blocks until `output` has room. Fails with [`io::ErrorKind::TimedOut`] at the deadline, or once
/// `stop` is readable.
fn wait_for_room(
    output: BorrowedFd<'_>,
    deadline: Option<Instant>,
    stop: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let is_over = deadline.is_some_and(|deadline| deadline <= Instant::now());
    let mut polled = [
        PollFd::from_borrowed_fd(output, PollFlags::OUT),
        PollFd::from_borrowed_fd(stop.unwrap_or(output), PollFlags::IN),
    ];
    let count = 1 + usize::from(stop.is_some());
    wait_for(&mut polled[..count], deadline)?;
    // The kernel may have a little room long before poll reports any. A write into that room would
    // look like progress, though the peer does not read.
    if is_over || polled[0].revents().is_empty() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}
