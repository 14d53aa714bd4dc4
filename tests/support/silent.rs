//! Addresses at which no server answers: no process listens there, or its backlog is full.
//!
//! A listener that a test opens and drops may listen a little longer: a program that another thread
//! is starting holds a copy of every descriptor until it executes. None of the first kind has ever
//! listened.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{bind, connect, getsockname, listen, socket_with};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// An address of 127.0.0.1 that refuses connections, and is nobody else's while the socket is open.
pub fn refusing_addr() -> (OwnedFd, SocketAddr) {
    let socket = bound(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port is free");
    let addr = getsockname(&socket).expect("it is bound");
    (socket, addr.try_into().expect("it is a socket of TCP"))
}

/// An address of 127.0.0.1 for a server to come.
pub fn free_addr() -> SocketAddr {
    loopback(free_port())
}

/// A port of 127.0.0.1 for a server to come.
pub fn free_port() -> u16 {
    free_ports(1)
}

/// The first of so many ports of 127.0.0.1 in a row, each for a server to come. The kernel hands
/// out higher ports by itself, so that no other process gets one meanwhile. Nor does another test.
pub fn free_ports(count: u16) -> u16 {
    const FIRST: u16 = 15_000;
    const COUNT: u16 = 15_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = u16::try_from(std::process::id() % 150 * 100).expect("below 15 000");
    let is_free = |port: u16| bound(loopback(port)).is_ok();
    (0..COUNT)
        .map(|_| FIRST + (own + NEXT.fetch_add(count, Ordering::Relaxed) % COUNT) % COUNT)
        .find(|first| (*first..first + count).all(is_free))
        .expect("a port is free")
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Leaves a socket at `path` as a killed server does.
pub fn leave_socket(path: &Path) {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("descriptors are left");
    let addr = SocketAddrUnix::new(path).expect("a short path");
    bind(&socket, &addr).expect("nothing is there");
}

/// A server at `path` that accepts nothing, and whose backlog is full.
pub struct FullBacklog {
    /// Makes room when it accepts.
    pub listener: UnixListener,
    /// The connections that fill it, which send nothing.
    pub pending: Vec<OwnedFd>,
}

impl FullBacklog {
    pub fn at(path: &Path) -> FullBacklog {
        let listener = UnixListener::bind(path).expect("nobody is there");
        listen(&listener, 0).expect("it listens already");
        let addr = SocketAddrUnix::new(path).expect("a short path");
        let mut pending = Vec::new();
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .expect("descriptors are left");
            match connect(&socket, &addr) {
                Ok(()) => pending.push(socket),
                Err(Errno::AGAIN) => break,
                Err(error) => panic!("cannot fill the backlog: {error}"),
            }
            assert!(pending.len() < 100, "the backlog never fills");
        }
        FullBacklog { listener, pending }
    }
}

/// A socket that is bound and does not listen; it is in nobody's way who does, and sets the same
/// option.
fn bound(addr: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = AddressFamily::INET;
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &addr)?;
    Ok(socket)
}
