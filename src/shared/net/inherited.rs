//! Inherited sockets. inetd and s6 pass one socket as descriptor 0. systemd passes any number of
//! sockets, and states that number in LISTEN_FDS.

use std::env;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use listenfd::ListenFd;
use rustix::fs::{fstat, FileType};
use rustix::io::Errno;
use rustix::net::{sockopt, AddressFamily, SocketType};

use super::listener::Listener;
use crate::os::directory::FileId;
use crate::os::text::reason;

/// A socket that this process inherited.
#[derive(Debug)]
pub enum Inherited {
    Listening(Listener),
    Connected(OwnedFd),
}

impl Inherited {
    /// Returns the listener, or an error if the socket is connected.
    pub fn listening(self) -> io::Result<Listener> {
        match self {
            Inherited::Listening(listener) => Ok(listener),
            Inherited::Connected(_) => Err(io::Error::other(
                "it is a connected socket, but all connections must reach one process: \
                 use wait, not nowait",
            )),
        }
    }
}

/// The socket on descriptor 0, passed by inetd or s6: a listening socket (inetd `wait`) or a
/// connection (inetd `nowait`).
pub fn from_stdin() -> io::Result<Inherited> {
    let stdin = io::stdin();
    // Descriptor 0 itself stays open, so that no other file gets its number.
    classify(stdin.as_fd().try_clone_to_owned()?)
}

/// Returns the sockets passed by systemd, in order, each converted by `adopt`. Returns none if
/// LISTEN_FDS is not set, or if LISTEN_PID names another process.
pub fn from_environment<T>(adopt: impl Fn(Inherited) -> io::Result<T>) -> Result<Vec<T>, String> {
    /// The first descriptor passed by systemd.
    const FIRST_DESCRIPTOR: usize = 3;
    const MAX_DESCRIPTORS: usize = 1024;
    let is_for_us = env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string());
    let (Ok(count), true) = (env::var("LISTEN_FDS"), is_for_us) else {
        return Ok(Vec::new());
    };
    let count = count.parse().ok().filter(|count| *count <= MAX_DESCRIPTORS);
    let count = count.ok_or("LISTEN_FDS: it is not a number of descriptors")?;
    let mut inherited = ListenFd::from_env();
    let take = |at: usize| {
        let tcp = inherited.take_tcp_listener(at).ok().flatten();
        let mut unix = || inherited.take_unix_listener(at).ok().flatten();
        let socket = tcp
            .map(OwnedFd::from)
            .or_else(|| unix().map(OwnedFd::from))
            .ok_or_else(not_listening);
        socket.and_then(classify).and_then(&adopt).map_err(|error| {
            let (descriptor, why) = (FIRST_DESCRIPTOR + at, reason(&error));
            format!("LISTEN_FDS: cannot listen on descriptor {descriptor}: {why}")
        })
    };
    (0..count).map(take).collect()
}

/// Whether `output` is the socket on descriptor 0. If so, a client may read whatever is written to
/// it.
pub fn is_client_socket(output: impl AsFd) -> bool {
    let (Ok(stdin), Ok(output)) = (fstat(io::stdin()), fstat(output)) else {
        return false;
    };
    FileType::from_raw_mode(stdin.st_mode) == FileType::Socket
        && FileId::from(&stdin) == FileId::from(&output)
}

/// Whether inetd or a similar program started this process, and may restart it at once. The sign is
/// that descriptor 0 is a listening socket, or that stderr is the socket on descriptor 0. stderr
/// alone is not enough, because some inetds do not redirect it.
pub fn started_by_inetd() -> bool {
    is_client_socket(io::stderr()) || matches!(sockopt::socket_acceptconn(io::stdin()), Ok(true))
}

fn classify(socket: OwnedFd) -> io::Result<Inherited> {
    match sockopt::socket_type(&socket) {
        Ok(SocketType::STREAM) => {}
        Ok(_) | Err(Errno::NOTSOCK) => return Err(not_listening()),
        Err(error) => return Err(error.into()),
    }
    if !sockopt::socket_acceptconn(&socket)? {
        let is_connected = rustix::net::getpeername(&socket).is_ok();
        // A broken connection no longer has a peer address, but the bytes that the peer sent can
        // still be read.
        let is_broken = || matches!(sockopt::socket_error(&socket), Ok(Err(_)));
        return if is_connected || is_broken() {
            Ok(Inherited::Connected(socket))
        } else {
            Err(not_listening())
        };
    }
    let listener = match sockopt::socket_domain(&socket)? {
        AddressFamily::INET | AddressFamily::INET6 => {
            Listener::adopt_tcp(TcpListener::from(socket))
        }
        AddressFamily::UNIX => Listener::adopt_unix(UnixListener::from(socket)),
        _ => return Err(not_listening()),
    };
    listener.map(Inherited::Listening)
}

fn not_listening() -> io::Error {
    io::Error::other("it is not a listening stream socket")
}
