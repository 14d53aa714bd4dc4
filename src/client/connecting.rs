//! Connecting to a server whose addresses are known, and how several attempts share the time.

use std::fs::File;
use std::io;
use std::io::ErrorKind::{ConnectionRefused, HostUnreachable, TimedOut};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::os::event::time_left;
use crate::os::trusted;

/// The minimum time for one attempt to connect. A timeout of zero would be refused, or would mean
/// no limit.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(1);

/// The end of one attempt's share of the time until `deadline`. Each of `others` more attempts gets
/// an equal share, so that a server that does not answer leaves time for the next one.
pub(super) fn end_of_share(deadline: Instant, others: usize) -> Instant {
    let now = Instant::now();
    let count = u32::try_from(others + 1).unwrap_or(u32::MAX);
    now + deadline.saturating_duration_since(now) / count
}

/// Calls `connect` for one address after another until a call succeeds, with the end of its share
/// of the time. If all calls fail, returns the error that says most about the server. It is a
/// refusal only if each address refuses: the server may be behind one that does not answer.
pub(super) fn try_each<A, T>(
    all: impl ExactSizeIterator<Item = A>,
    deadline: Instant,
    mut connect: impl FnMut(A, Instant) -> io::Result<T>,
) -> io::Result<T> {
    let mut failures = Vec::new();
    for (others, one) in (0..all.len()).rev().zip(all) {
        match connect(one, end_of_share(deadline, others)) {
            Ok(connected) => return Ok(connected),
            Err(error) => failures.push(error),
        }
    }
    // An error such as "network unreachable" is about this host, and says nothing about the server.
    let rank = |error: &io::Error| match error.kind() {
        ConnectionRefused => 2,
        TimedOut | HostUnreachable => 1,
        _ => 0,
    };
    let is_refused = failures.iter().all(|error| rank(error) == 2);
    Err(match failures.into_iter().max_by_key(rank) {
        Some(refusal) if rank(&refusal) == 2 && !is_refused => io::Error::other(refusal),
        Some(failure) => failure,
        None => io::ErrorKind::NotFound.into(),
    })
}

pub(super) fn connect_tcp(addrs: &[SocketAddr], deadline: Instant) -> io::Result<TcpStream> {
    try_each(addrs.iter(), deadline, |addr, deadline| {
        let left = time_left(deadline).max(SHORTEST_ATTEMPT);
        refuse_own(TcpStream::connect_timeout(addr, left)?)
    })
}

/// Refuses a socket that is connected to itself. If no server listens on a local port, the kernel
/// may choose the same port for the client's end of the connection.
fn refuse_own(stream: TcpStream) -> io::Result<TcpStream> {
    if stream.local_addr()? == stream.peer_addr()? {
        Err(ConnectionRefused.into())
    } else {
        Ok(stream)
    }
}

/// Connects to a Unix socket, and fails if the server may be an impostor. The server must run as
/// root, as this user, or as the owner of the socket's directory, who decides who listens there.
pub(super) fn connect_unix(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let path = trusted::follow(path)?;
    let socket = trusted::open_followed(&path, OFlags::PATH, 0)?;
    let stream = connect_to(&socket, &path, deadline)?;
    let server = sockopt::socket_peercred(&stream)?.uid.as_raw();
    if trusted::may_decide(server, &path) {
        return Ok(stream);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("its server runs as user {server}, who does not own the directory of the socket"),
    ))
}

/// Connects to a socket that was opened with O_PATH. It connects by descriptor, through /proc,
/// because another user may have replaced the socket at `path` by a link to the socket of another
/// server. Without /proc, it has to connect by `path`.
fn connect_to(socket: &File, path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let by_descriptor = format!("/proc/self/fd/{}", socket.as_raw_fd());
    match connect_within(by_descriptor.as_ref(), deadline) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => connect_within(path, deadline),
        connected => connected,
    }
}

/// Connects, and waits until `deadline` for room in the server's backlog. The kernel limits that
/// wait by the send timeout of the socket.
fn connect_within(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let addr = SocketAddrUnix::new(path)?;
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    loop {
        let left = time_left(deadline);
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(left.max(SHORTEST_ATTEMPT)))?;
        match connect(&socket, &addr) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {}
            Err(Errno::AGAIN | Errno::INTR) => return Err(Errno::TIMEDOUT.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::os::short_directory;
    use rustix::fs::Mode;
    use std::fs;
    use std::net::TcpListener;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    /// A server whose backlog is full, so that a connection to it is never made, and its address.
    pub(in crate::client) fn silent_server() -> ((TcpListener, Vec<TcpStream>), SocketAddr) {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        rustix::net::listen(&silent, 0).expect("it listens already");
        let full = silent.local_addr().expect("its address");
        let attempt = Duration::from_millis(300);
        let pending: Vec<TcpStream> = (0..100)
            .map_while(|_| TcpStream::connect_timeout(&full, attempt).ok())
            .collect();
        assert!(pending.len() < 100, "the backlog never fills");
        ((silent, pending), full)
    }

    #[test]
    fn many_silent_addresses_take_no_longer_than_one() {
        let (_silent, full) = silent_server();
        let alive = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut addrs = vec![full; 40];
        let (began, limit) = (Instant::now(), Duration::from_secs(1));
        let error = connect_tcp(&addrs, began + limit).expect_err("no server accepts");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < limit * 10, "{:?}", began.elapsed());
        // The last one still has its share.
        addrs.push(alive.local_addr().expect("its address"));
        // On a busy machine, even a connection to this host may take longer than that.
        let mut attempts = (0..10).map(|_| connect_tcp(&addrs, Instant::now() + limit));
        assert!(attempts.any(|connected| connected.is_ok()));
    }

    #[test]
    fn a_link_that_replaces_the_socket_is_not_followed() {
        let directory = short_directory();
        let [path, other] = ["ours", "other"].map(|name| directory.path().join(name));
        let [ours, _theirs] = [&path, &other].map(|path| UnixListener::bind(path).expect("a path"));
        let socket = trusted::open_followed(&path, OFlags::PATH, 0).expect("it is there");
        fs::remove_file(&path).expect("it is there");
        symlink(&other, &path).expect("there is room");
        let deadline = Instant::now() + Duration::from_secs(10);
        let stream = connect_to(&socket, &path, deadline).expect("it listens");
        ours.set_nonblocking(true).expect("a setting");
        assert!(ours.accept().is_ok(), "{stream:?}");
        // Also if the link is there before the socket is opened, and after the look at it.
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let link = rustix::fs::open(&path, flags, Mode::empty()).expect("it is there");
        let refused = connect_to(&link.into(), &path, deadline).expect_err("it is a link");
        assert_eq!(refused.kind(), ConnectionRefused);
    }

    #[test]
    fn a_socket_that_is_connected_to_itself_is_refused() {
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a descriptor");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        rustix::net::bind(&socket, &any).expect("a port");
        let stream = TcpStream::from(socket);
        connect(&stream, &stream.local_addr().expect("bound")).expect("it is there itself");
        let refused = refuse_own(stream).expect_err("no server is there");
        assert_eq!(refused.kind(), ConnectionRefused);
    }

    #[test]
    fn the_reason_is_that_of_an_answer() {
        let tried = |kinds: &[io::ErrorKind]| {
            let tried = try_each(kinds.iter(), Instant::now(), |kind, _| {
                Err::<(), _>(io::Error::from(*kind))
            });
            tried.expect_err("none succeeds")
        };
        let local = io::ErrorKind::NetworkUnreachable;
        for silent in [local, TimedOut] {
            let some_refused = tried(&[ConnectionRefused, silent]);
            assert_eq!(some_refused.to_string(), ConnectionRefused.to_string());
            // The server may be at the other address.
            assert_ne!(some_refused.kind(), ConnectionRefused);
        }
        assert_eq!(tried(&[ConnectionRefused; 2]).kind(), ConnectionRefused);
        assert_eq!(tried(&[local, TimedOut, local]).kind(), TimedOut);
        assert_eq!(tried(&[local]).kind(), local);
    }
}
