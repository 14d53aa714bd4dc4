//! A connection of a server or a client, over TCP, a Unix socket or TLS.

use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::{ioctl_fionread, Errno};
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use rustix::net::{recv, send, sockopt, RecvFlags, SendFlags, UCred};

use super::tls::TlsStream;
use super::write::write_within;
use crate::os::event::time_left;
use crate::os::process;

const HANG_UPS: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);

/// A connected stream socket. Reads and writes take a shared reference, so one descriptor per
/// connection is enough.
#[derive(Debug)]
pub struct Stream {
    pub socket: Socket,
    /// What ended the connection first: an error number, [`THIS_SIDE`], or 0 if nothing has. The
    /// kernel reports an error once, to the next call of any thread, and then the end of stream.
    ended_by: AtomicI32,
}

#[derive(Debug)]
pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(TlsStream),
}

/// Not an error number: this side has shut the connection down.
const THIS_SIDE: i32 = -1;

impl From<TlsStream> for Stream {
    fn from(stream: TlsStream) -> Stream {
        Stream::new(Socket::Tls(stream))
    }
}

impl Stream {
    pub fn new(socket: Socket) -> Stream {
        let ended_by = AtomicI32::new(0);
        Stream { socket, ended_by }
    }

    /// Whether it was the peer that ended the stream, once a read has returned 0 or the peer has
    /// [hung up](Stream::has_hung_up). A TCP connection also ends without a word of the peer: the
    /// kernel gives up on a silent network, or a router resets the connection. Only a reset that
    /// follows the peer's FIN (EPIPE) does not count, because it is the answer to what this side
    /// has sent since. The two ends of a Unix socket have one kernel, so every end is the peer's.
    pub fn was_ended_by_peer(&self) -> bool {
        if let Ok(pending) = sockopt::socket_error(self) {
            let _ = self.noting(pending);
        }
        match (self.ended_by.load(Ordering::SeqCst), &self.socket) {
            (THIS_SIDE, _) => false,
            (_, Socket::Unix(_)) => true,
            (error, _) => error == 0 || error == Errno::PIPE.raw_os_error(),
        }
    }

    /// Notes the error of a system call on the socket, if it is the first one. The methods here do
    /// so themselves.
    #[inline(always)] // into the session's loop, which says why
    pub fn noting<T, E: Into<io::Error>>(&self, result: Result<T, E>) -> io::Result<T> {
        result.map_err(|error| {
            let error = error.into();
            match error.raw_os_error().map(Errno::from_raw_os_error) {
                None | Some(Errno::AGAIN | Errno::INTR) => {}
                Some(by) => self.note_end(by.raw_os_error()),
            }
            error
        })
    }

    #[cold]
    fn note_end(&self, by: i32) {
        let _ = (self.ended_by).compare_exchange(0, by, Ordering::SeqCst, Ordering::SeqCst);
    }

    pub fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        // The system takes a timeout of zero for no timeout.
        let timeout = timeout.max(Duration::from_millis(1));
        if let Socket::Tls(stream) = &self.socket {
            stream.set_read_timeout(timeout);
        }
        Ok(set_socket_timeout(self, Timeout::Recv, Some(timeout))?)
    }

    /// The TCP socket, which a TLS stream has, too; `None` for a Unix socket.
    fn tcp(&self) -> Option<&TcpStream> {
        match &self.socket {
            Socket::Tcp(stream) => Some(stream),
            Socket::Unix(_) => None,
            Socket::Tls(stream) => Some(stream.socket()),
        }
    }

    /// Whether the peer must speak TLS.
    pub fn is_tls(&self) -> bool {
        matches!(self.socket, Socket::Tls(_))
    }

    /// Shuts down one or both directions. Ignores the error if the peer is gone. What the peer then
    /// does is its answer, so the peer does not count as the one that has ended the stream.
    pub fn shutdown(&self, how: Shutdown) {
        self.note_end(THIS_SIDE);
        let _ = match &self.socket {
            Socket::Tcp(stream) => stream.shutdown(how),
            Socket::Unix(stream) => stream.shutdown(how),
            Socket::Tls(stream) => stream.shutdown(how),
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
        match self.socket {
            Socket::Unix(_) => sockopt::socket_peercred(self).ok(),
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

    /// Whether the peer is on this host. A proxy here may have passed on a peer of another host.
    pub fn is_local(&self) -> bool {
        self.tcp().is_none_or(|socket| {
            let (peer, own) = (socket.peer_addr(), socket.local_addr());
            let is_own = |peer| own.is_ok_and(|own| own.ip() == peer);
            peer.is_ok_and(|it| it.ip().to_canonical().is_loopback() || is_own(it.ip()))
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

    fn has_event(&self, events: PollFlags) -> bool {
        let mut polled = [PollFd::new(self, events)];
        matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
    }

    /// Reads bytes that have arrived, without blocking; `None` if no bytes have arrived, or on an
    /// error.
    pub fn read_ready(&self, buffer: &mut [u8]) -> Option<usize> {
        let read = match &self.socket {
            Socket::Tls(stream) => self.noting(stream.read_ready(buffer)),
            _ => self.noting(recv(self, buffer, RecvFlags::DONTWAIT).map(|(len, _)| len)),
        };
        read.ok()
    }

    /// Writes all of `bytes` within `timeout` (`None`: no limit), like [`write_within`].
    ///
    /// Inlined into the session's loop, which says why.
    #[inline(always)]
    pub fn write_within(&self, bytes: &mut &[u8], timeout: Option<Duration>) -> io::Result<()> {
        let written = match &self.socket {
            Socket::Tls(stream) => stream.write_within(bytes, timeout),
            _ => write_within(self.as_fd(), bytes, timeout, None),
        };
        self.noting(written)
    }

    /// Sends as many of `bytes` as the socket takes without blocking, and returns their number.
    /// Sends nothing over TLS, so any thread may call this.
    pub fn send_once(&self, bytes: &[u8]) -> usize {
        if self.is_tls() || bytes.is_empty() {
            return 0;
        }
        let sent = send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.noting(sent).unwrap_or(0)
    }

    /// Sends a line whole or not at all, and returns whether it was sent. Does not block. Sends
    /// nothing while there is input, after the peer has hung up, or over TLS, so any thread may
    /// call this.
    pub fn send_line(&self, line: &[u8]) -> bool {
        if self.is_tls() {
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
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
pub const KEEPALIVE_PROBES: u32 = 3;
/// How long the peer may leave data unacknowledged, in milliseconds. Keepalive probes cannot notice
/// this case, because the kernel sends none while data is unacknowledged.
pub const USER_TIMEOUT_MS: u32 = 30_000;

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
pub fn where_known(set: rustix::io::Result<()>) -> io::Result<()> {
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
        self.noting(match &self.socket {
            Socket::Tls(stream) => stream.read(buffer),
            _ => match recv(self, buffer, RecvFlags::empty()) {
                Ok((len, _)) => Ok(len),
                Err(error) => Err(error.into()),
            },
        })
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
            Socket::Tls(stream) => stream.socket().as_fd(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    /// A peer, and the stream to it.
    fn over_tcp() -> (TcpStream, Stream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let peer = TcpStream::connect(listener.local_addr().expect("its address"));
        let (ours, _) = listener.accept().expect("a connection");
        (peer.expect("it listens"), Stream::new(Socket::Tcp(ours)))
    }

    fn reset(peer: TcpStream) {
        sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).expect("an option");
        drop(peer);
    }

    /// Waits until both directions have ended.
    fn until_over(stream: &Stream) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !stream.has_event(PollFlags::HUP) {
            assert!(Instant::now() < deadline, "it is not over");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_close_is_a_word_of_the_peer_before_and_after_our_reply() {
        for sends_reply in [false, true] {
            let (peer, mut ours) = over_tcp();
            drop(peer);
            if sends_reply {
                assert_eq!(ours.send_once(b"ok\n"), 3);
                // The system of the peer answers with a reset: nobody reads the reply.
                until_over(&ours);
            }
            assert_eq!(ours.read(&mut [0]).expect("the end"), 0);
            assert!(ours.was_ended_by_peer(), "{sends_reply}");
        }
    }

    /// Whoever meets the error, the next read returns 0 all the same.
    #[test]
    fn a_reset_is_no_word_whichever_call_has_met_it() {
        let calls: [fn(&Stream); 4] = [
            |_| {},
            |stream| assert_eq!(stream.send_once(b"ok\n"), 0),
            |stream| assert_eq!(stream.read_ready(&mut [0]), None),
            |stream| {
                let written = stream.write_within(&mut &b"ok\n"[..], None);
                assert!(written.is_err());
            },
        ];
        for (at, call) in calls.into_iter().enumerate() {
            let (peer, mut ours) = over_tcp();
            reset(peer);
            until_over(&ours);
            call(&ours);
            if at > 0 {
                assert_eq!(ours.read(&mut [0]).expect("the end"), 0);
            }
            assert!(!ours.was_ended_by_peer(), "call {at}");
        }
    }

    #[test]
    fn the_answer_to_a_shutdown_on_this_side_is_no_word() {
        for how in [Shutdown::Read, Shutdown::Write, Shutdown::Both] {
            let (peer, mut ours) = over_tcp();
            ours.shutdown(how);
            drop(peer);
            assert_eq!(ours.read(&mut [0]).expect("the end"), 0);
            assert!(!ours.was_ended_by_peer(), "{how:?}");
        }
    }

    #[test]
    fn every_end_of_a_unix_socket_is_a_word() {
        let (peer, ours) = UnixStream::pair().expect("a socket pair");
        let mut ours = Stream::new(Socket::Unix(ours));
        assert_eq!(ours.send_once(b"unread"), 6);
        drop(peer);
        let error = ours.read(&mut [0]).expect_err("a reset");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert!(ours.was_ended_by_peer());
    }
}
