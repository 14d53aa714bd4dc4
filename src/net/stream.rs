//! One accepted connection, over TCP or a Unix socket.

use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::{ioctl_fionread, Errno};
use rustix::net::{recv, send, RecvFlags, SendFlags};

/// A connected stream socket. Read and written through a shared reference, so that one descriptor
/// per connection is enough.
#[derive(Debug)]
pub enum Stream {
    /// Over the network.
    Tcp(TcpStream),
    /// On this host.
    Unix(UnixStream),
}

impl Stream {
    /// Sets for how long a read may block.
    pub fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        // To the system, zero means "for ever".
        let timeout = Some(timeout.max(Duration::from_millis(1)));
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(timeout),
            Stream::Unix(stream) => stream.set_read_timeout(timeout),
        }
    }

    /// Ends one or both directions. A peer that has gone is no error.
    pub fn shutdown(&self, how: Shutdown) {
        let _ = match self {
            Stream::Tcp(stream) => stream.shutdown(how),
            Stream::Unix(stream) => stream.shutdown(how),
        };
    }

    /// The peer's address without the port, for IPv6 its network; `None` for a Unix socket, or if
    /// the peer has gone.
    pub fn source(&self) -> Option<IpAddr> {
        let Stream::Tcp(stream) = self else {
            return None;
        };
        Some(match stream.peer_addr().ok()?.ip().to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
            ip => ip,
        })
    }

    /// How many bytes have arrived and have not been read.
    pub fn unread_len(&self) -> u64 {
        ioctl_fionread(self).unwrap_or(0)
    }

    /// Reads what has arrived without blocking; `None` if nothing has.
    pub fn read_ready(&self, buffer: &mut [u8]) -> Option<usize> {
        match recv(self, buffer, RecvFlags::DONTWAIT) {
            Ok((len, _)) => Some(len),
            Err(_) => None,
        }
    }

    /// Writes all of `bytes` within `timeout` (`None`: for ever), in one system call if the peer
    /// keeps up. A peer that takes a little now and then does not extend the time.
    ///
    /// # Errors
    ///
    /// Those of `write`; [`io::ErrorKind::TimedOut`] if the peer does not take it in time. Some of
    /// the bytes may have been sent then.
    pub fn write_within(&self, mut bytes: &[u8], timeout: Option<Duration>) -> io::Result<()> {
        let mut deadline = None;
        while !bytes.is_empty() {
            match send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(len) => bytes = &bytes[len..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let deadline = *deadline.get_or_insert_with(|| {
                        timeout.and_then(|timeout| Instant::now().checked_add(timeout))
                    });
                    self.wait_for_room(deadline)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends what the socket takes of `bytes` at once, and returns how many these are.
    pub fn send_once(&self, bytes: &[u8]) -> usize {
        if bytes.is_empty() {
            return 0;
        }
        send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).unwrap_or(0)
    }

    /// Blocks until the socket takes more, or until the deadline.
    fn wait_for_room(&self, deadline: Option<Instant>) -> io::Result<()> {
        let timeout = match deadline {
            None => None,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Timespec::try_from(left).ok()
            }
        };
        match poll(&mut [PollFd::new(self, PollFlags::OUT)], timeout.as_ref()) {
            // The kernel may have a little room long before poll reports it. A write into that room
            // would look like progress of a peer that does not read.
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Lingering close: discards what the peer still sends, until it closes or `limit` is over. To
    /// close a socket with unread bytes makes the kernel send a reset, and a reset destroys a reply
    /// on its way.
    pub fn discard_for(&self, limit: Duration) {
        let deadline = Instant::now().checked_add(limit);
        let mut scrap = [0; 512];
        loop {
            let left = deadline.map_or(limit, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() || self.set_read_timeout(left).is_err() {
                return;
            }
            match (&mut &*self).read(&mut scrap) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(buffer),
            Stream::Unix(stream) => (&mut &*stream).read(buffer),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

/// The peer, for the log.
impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stream::Tcp(stream) => match stream.peer_addr() {
                Ok(addr) => addr.fmt(f),
                Err(_) => f.write_str("gone"),
            },
            Stream::Unix(_) => f.write_str("unix"),
        }
    }
}

/// Whether a read failed because its timeout was over.
pub fn is_timeout(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::AGAIN.raw_os_error())
}
