//! Addresses at which no server answers: no process listens there, or its backlog is full.
//!
//! A listener that a test opens and drops may listen a little longer: a program that another thread
//! is starting holds a copy of every descriptor until it executes. None of the first kind has ever
//! listened.

use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener};
use std::path::Path;
use std::sync::Mutex;

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
/// out higher ports by itself, so that no other process gets one meanwhile. Nor does another test,
/// of this process or of another one.
pub fn free_ports(count: u16) -> u16 {
    static OURS: Mutex<Ports> = Mutex::new(Ports {
        blocks: Vec::new(),
        left: 0..0,
    });
    let mut ours = OURS.lock().expect("no test panics with it");
    loop {
        let first = ours.take(count);
        let is_free = |port: u16| bound(loopback(port)).is_ok();
        if (first..first + count).all(is_free) {
            return first;
        }
    }
}

/// The ports of this process. It has them in blocks, so that it needs few descriptors for them.
struct Ports {
    /// Names that the kernel lets one socket have at a time. They are free again when the process
    /// ends, however it ends.
    blocks: Vec<UnixListener>,
    left: Range<u16>,
}

impl Ports {
    /// The first of so many ports in a row that no test has had.
    fn take(&mut self, count: u16) -> u16 {
        if self.left.len() < usize::from(count) {
            let (name, ports) = block_of_ports();
            self.blocks.push(name);
            self.left = ports;
        }
        let first = self.left.start;
        self.left.start += count;
        first
    }
}

/// Ports that no other process takes while the socket is open. They begin elsewhere in each
/// process: a client of a test that has just ended may still ask for its server.
pub fn block_of_ports() -> (UnixListener, Range<u16>) {
    const FIRST: u16 = 15_000;
    const BLOCKS: u16 = 150;
    const SIZE: u16 = 100;
    let own = u16::try_from(std::process::id() % u32::from(BLOCKS)).expect("below 150");
    (own..own + BLOCKS)
        .find_map(|number| {
            let first = FIRST + number % BLOCKS * SIZE;
            let name = format!("ports of a test of latchd, {first}");
            let name = unix::SocketAddr::from_abstract_name(name).expect("a short name");
            let socket = UnixListener::bind_addr(&name).ok()?;
            Some((socket, first..first + SIZE))
        })
        .expect("a block of ports is free")
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
