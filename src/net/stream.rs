//! A connection of a server or a client, over TCP, a Unix socket or TLS.

use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::{ioctl_fionread, Errno};
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use rustix::net::{recv, send, sockopt, RecvFlags, SendFlags, UCred};

use super::tls::TlsStream;
use super::write::write_within;
use crate::sys::deadline::time_left;
use crate::sys::process;

const HANG_UPS: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);

/// A connected stream socket. Reads and writes take a shared reference, so one descriptor per
/// connection is enough.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(TlsStream),
}

impl From<TlsStream> for Stream {
    fn from(stream: TlsStream) -> Stream {
        Stream::Tls(stream)
    }
}

impl Stream {
    pub fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        // The system takes a timeout of zero for no timeout.
        let timeout = timeout.max(Duration::from_millis(1));
        if let Stream::Tls(stream) = self {
            stream.set_read_timeout(timeout);
        }
        Ok(set_socket_timeout(self, Timeout::Recv, Some(timeout))?)
    }

    /// The TCP socket, which a TLS stream has, too; `None` for a Unix socket.
    fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Stream::Tcp(stream) => Some(stream),
            Stream::Unix(_) => None,
            Stream::Tls(stream) => Some(stream.socket()),
        }
    }

    /// Whether the peer must speak TLS.
    #[cfg(feature = "cluster")]
    pub fn speaks_tls(&self) -> bool {
        matches!(self, Stream::Tls(_))
    }

    /// Shuts down one or both directions. Ignores the error if the peer is gone.
    pub fn shutdown(&self, how: Shutdown) {
        let _ = match self {
            Stream::Tcp(stream) => stream.shutdown(how),
            Stream::Unix(stream) => stream.shutdown(how),
            Stream::Tls(stream) => stream.shutdown(how),
        };
    }

    /// Describes the peer to operators: its address, or the process and the user at the other end
    /// of a Unix socket.
    pub fn identity(&self) -> String {
        let Some(credentials) = self.credentials() else {
            return self.to_string();
        };
        let (pid, uid) = (credentials.pid.as_raw_nonzero(), credentials.uid.as_raw());
        let name = u32::try_from(pid.get()).ok().and_then(process::name);
        let and_name = name.map_or_else(String::new, |name| format!(" {name}"));
        format!("unix pid {pid} uid {uid}{and_name}")
    }

    /// Describes this end in the form that the peer's [`Stream::identity`] uses, but without the
    /// program's name; `None` if the socket no longer has a local address.
    pub fn own_identity(&self) -> Option<String> {
        Some(match self.tcp() {
            Some(stream) => stream.local_addr().ok()?.to_string(),
            None => {
                let (pid, uid) = (rustix::process::getpid(), rustix::process::geteuid());
                format!("unix pid {} uid {}", pid.as_raw_nonzero(), uid.as_raw())
            }
        })
    }

    /// The user at the other end of a Unix socket; `None` for other sockets, and for a user without
    /// a number in this user namespace.
    pub fn peer_uid(&self) -> Option<u32> {
        process::known_user(self.credentials()?.uid.as_raw())
    }

    /// The process and the user at the other end of a Unix socket; `None` for other sockets.
    fn credentials(&self) -> Option<UCred> {
        match self {
            Stream::Unix(_) => sockopt::socket_peercred(self).ok(),
            _ => None,
        }
    }

    /// The peer's IPv4 address or IPv6 /64 network; `None` for a Unix socket, or after the peer has
    /// gone.
    pub fn source(&self) -> Option<IpAddr> {
        Some(match self.tcp()?.peer_addr().ok()?.ip().to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
            ip => ip,
        })
    }

    /// The number of unread bytes that have arrived. A TLS stream counts encrypted bytes.
    pub fn unread_len(&self) -> u64 {
        ioctl_fionread(self).unwrap_or(0)
    }

    /// Whether a read would not block: there is input, or the peer has hung up.
    pub fn is_readable(&self) -> bool {
        self.has_event(PollFlags::IN | HANG_UPS)
    }

    /// Whether the peer has closed or half-closed its side, or is gone.
    pub fn has_hung_up(&self) -> bool {
        self.has_event(HANG_UPS)
    }

    /// Whether both directions have ended without a close on this side: by a reset, or because the
    /// other host has vanished.
    pub fn was_reset(&self) -> bool {
        self.has_event(PollFlags::HUP)
    }

    fn has_event(&self, events: PollFlags) -> bool {
        let mut polled = [PollFd::new(self, events)];
        matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
    }

    /// Reads bytes that have arrived, without blocking; `None` if no bytes have arrived, or on an
    /// error.
    pub fn read_ready(&self, buffer: &mut [u8]) -> Option<usize> {
        if let Stream::Tls(stream) = self {
            return stream.read_ready(buffer);
        }
        let (len, _) = recv(self, buffer, RecvFlags::DONTWAIT).ok()?;
        Some(len)
    }

    /// Writes all of `bytes` within `timeout` (`None`: no limit), like [`write_within`].
    ///
    /// Inlined into the session's loop, which says why.
    #[inline(always)]
    pub fn write_within(&self, bytes: &mut &[u8], timeout: Option<Duration>) -> io::Result<()> {
        if let Stream::Tls(stream) = self {
            return stream.write_within(bytes, timeout);
        }
        write_within(self.as_fd(), bytes, timeout, None)
    }

    /// Sends as many of `bytes` as the socket takes without blocking, and returns their number.
    /// Sends nothing over TLS, so any thread may call this.
    pub fn send_once(&self, bytes: &[u8]) -> usize {
        if matches!(self, Stream::Tls(_)) {
            return 0;
        }
        if bytes.is_empty() {
            return 0;
        }
        send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).unwrap_or(0)
    }

    /// Sends a line whole or not at all, and returns whether it was sent. Does not block. Sends
    /// nothing while there is input, after the peer has hung up, or over TLS, so any thread may
    /// call this.
    pub fn send_line(&self, line: &[u8]) -> bool {
        if matches!(self, Stream::Tls(_)) {
            return false;
        }
        // The system reports room only if a good part of the buffer is free, so a line fits.
        let mut polled = [PollFd::new(self, PollFlags::IN | PollFlags::OUT | HANG_UPS)];
        let is_polled = poll(&mut polled, Some(&Timespec::default())).is_ok();
        if !is_polled || polled[0].revents() != PollFlags::OUT {
            return false;
        }
        let sent_len = self.send_once(line);
        if (1..line.len()).contains(&sent_len) {
            // This does not happen. If it did, the peer would take the next line for the rest of
            // this one.
            self.shutdown(Shutdown::Both);
        }
        sent_len == line.len()
    }

    /// Discards input until the peer closes or `limit` has passed: the second half of a lingering
    /// close.
    pub fn discard_for(&self, limit: Duration) {
        discard(limit, |scrap, left| {
            self.set_read_timeout(left)?;
            (&mut &*self).read(scrap)
        });
    }
}

/// The keepalive times. Together they end a connection after 30 s of silence: idle + probes x
/// interval.
pub(super) const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
pub(super) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
pub(super) const KEEPALIVE_PROBES: u32 = 3;
/// How long the peer may leave data unacknowledged, in milliseconds. Keepalive probes cannot notice
/// this case, because the kernel sends none while data is unacknowledged.
pub(super) const USER_TIMEOUT_MS: u32 = 30_000;

/// Makes the kernel end a TCP connection within a minute if the other host has vanished, and send
/// small writes at once. Accepted sockets inherit these options from the listener.
pub fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
    where_known(sockopt::set_tcp_user_timeout(socket, USER_TIMEOUT_MS))
}

/// Ignores the error of setting an option that multipath TCP sockets do not have.
pub(super) fn where_known(set: rustix::io::Result<()>) -> io::Result<()> {
    match set {
        Err(Errno::NOPROTOOPT | Errno::OPNOTSUPP) => Ok(()),
        set => Ok(set?),
    }
}

/// Discards input before a close: calls `read` with the time left until it fails, reaches the end
/// of the stream, or `limit` has passed. If a socket is closed with unread bytes, the kernel sends
/// a reset, which can destroy a reply in flight.
pub fn discard(limit: Duration, mut read: impl FnMut(&mut [u8], Duration) -> io::Result<usize>) {
    let deadline = Instant::now().checked_add(limit);
    let mut scrap = [0; 512];
    loop {
        let left = deadline.map_or(limit, time_left);
        if left.is_zero() {
            return;
        }
        match read(&mut scrap, left) {
            Ok(1..) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

impl Read for &Stream {
    #[inline(always)] // into the session's loop, which says why
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Stream::Tls(stream) = self {
            return stream.read(buffer);
        }
        let (len, _) = recv(self, buffer, RecvFlags::empty())?;
        Ok(len)
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tls(stream) => stream.socket().as_fd(),
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tcp().map(TcpStream::peer_addr) {
            Some(Ok(addr)) => addr.fmt(f),
            Some(Err(_)) => f.write_str("gone"),
            None => f.write_str("unix"),
        }
    }
}

/// Whether a read failed because of its timeout.
pub fn is_timeout(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::AGAIN.raw_os_error())
}
