//! Listening sockets: binding them, and accepting from them through all that may go wrong.

use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use log::{debug, warn};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::fs::{chown, Gid, Mode};
use rustix::io::Errno;
use rustix::net::{
    bind, connect, ipproto, listen, socket_with, sockopt, AddressFamily, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::log::Throttle;
use crate::sys::directory::{lock_within, Directory};
use crate::text::Escaped;

use super::connections::{Admission, Connections};
use super::stream::Stream;
use super::workers::{spawn, Workers};

/// Connections that the kernel completes ahead of us.
const BACKLOG: i32 = 4096;

/// A peer that has vanished is noticed after idle + probes x interval = 30 s of silence.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// What we have sent must be acknowledged within this many milliseconds.
const USER_TIMEOUT_MS: u32 = 30_000;

/// A client that never reads pins no more than this in the kernel.
const SEND_BUFFER_LEN: usize = 16 * 1024;

/// How long others may have the directory of a Unix socket locked.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// Pauses after a failed accept: doubled from the first to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A socket that listens.
#[derive(Debug)]
pub enum Listener {
    /// On an address of the network.
    Tcp(TcpListener),
    /// On a path of this host; with the path and its inode if we have made it.
    Unix(UnixListener, Option<Made>),
}

/// A socket in the file system that we have made.
#[derive(Debug)]
pub struct Made {
    path: PathBuf,
    /// Device and inode: another server may have put its own in our place since.
    identity: (u64, u64),
}

impl Listener {
    /// Listens on `addr`; port 0 picks one. The unspecified IPv6 address takes IPv4, too.
    pub fn bind_tcp(addr: SocketAddr) -> io::Result<Listener> {
        let family = if addr.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let socket = socket_with(
            family,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            Some(ipproto::TCP),
        )?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if addr.is_ipv6() {
            sockopt::set_ipv6_v6only(&socket, false)?;
        }
        bind(&socket, &addr)?;
        listen(&socket, BACKLOG)?;
        Listener::adopt_tcp(socket.into())
    }

    /// Takes over a TCP socket that listens already, and sets its options.
    pub fn adopt_tcp(listener: TcpListener) -> io::Result<Listener> {
        listener.set_nonblocking(true)?;
        // Linux hands all of these on to the accepted sockets, which saves each of them the calls.
        sockopt::set_tcp_nodelay(&listener, true)?;
        sockopt::set_socket_keepalive(&listener, true)?;
        sockopt::set_tcp_keepidle(&listener, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&listener, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&listener, KEEPALIVE_PROBES)?;
        sockopt::set_tcp_user_timeout(&listener, USER_TIMEOUT_MS)?;
        sockopt::set_socket_send_buffer_size(&listener, SEND_BUFFER_LEN)?;
        Ok(Listener::Tcp(listener))
    }

    /// Takes over a Unix socket that listens already.
    pub fn adopt_unix(listener: UnixListener) -> io::Result<Listener> {
        listener.set_nonblocking(true)?;
        Ok(Listener::Unix(listener, None))
    }

    /// Listens on `path`, for whoever `mode` and `group` let in. A socket that a dead server has
    /// left there is replaced. It changes the umask for a moment, so no other thread may be making files.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::AddrInUse`] if a server listens there, [`io::ErrorKind::AlreadyExists`] if
    /// something that is no socket stands there, or whatever the system says.
    pub fn bind_unix(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Listener> {
        // Two servers that both find a dead one's socket must not remove each other's: whoever has the
        // directory looks, removes and listens before the other looks.
        let directory = Directory::of(path)?;
        if !lock_within(&directory, LOCK_PATIENCE)? {
            return Err(io::Error::other("somebody has locked its directory"));
        }
        clear_the_way(path)?;
        // Nobody can connect before the owner and the mode are right.
        let umask = rustix::process::umask(Mode::RWXU | Mode::RWXG | Mode::RWXO);
        let bound = UnixListener::bind(path);
        rustix::process::umask(umask);
        let listener = bound?;
        let made = Made::at(path)?;
        let opened = open_to(path, mode, group).and_then(|()| {
            // std listens with a shorter backlog; listening again only changes that.
            listen(&listener, BACKLOG)?;
            listener.set_nonblocking(true)
        });
        match opened {
            Ok(()) => Ok(Listener::Unix(listener, Some(made))),
            Err(error) => {
                made.remove();
                Err(error)
            }
        }
    }

    /// Removes the socket that we have made, if it still is ours.
    pub fn clean_up(&self) {
        if let Listener::Unix(_, Some(made)) = self {
            made.remove();
        }
    }

    /// The port, if there is one.
    pub fn port(&self) -> Option<u16> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().ok().map(|addr| addr.port()),
            Listener::Unix(..) => None,
        }
    }

    /// Hands every connection that is let in to `serve`, for ever. Where the process or the system has
    /// run out of descriptors or memory it pauses, longer each time, rather than spin.
    pub fn accept_all(
        &self,
        connections: &Arc<Connections>,
        mut serve: impl FnMut(Admission),
    ) -> ! {
        let mut pause = FIRST_PAUSE;
        let (failures, refusals) = (Throttle::default(), Throttle::default());
        loop {
            match connections.admit(|| self.accept()) {
                Ok(Some(admission)) => {
                    pause = FIRST_PAUSE;
                    serve(admission);
                }
                Ok(None) => {
                    if let Some(held_back) = refusals.admit() {
                        warn!("turned-away reason=max-connections held_back={held_back}");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_a_peer(),
                Err(error) if is_the_peers_doing(&error) => {
                    debug!("accept-failed error=\"{error}\"")
                }
                Err(error) => {
                    if let Some(held_back) = failures.admit() {
                        warn!(
                            "cannot-accept listener={self} error=\"{error}\" held_back={held_back}"
                        );
                    }
                    thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    fn wait_for_a_peer(&self) {
        let socket = match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener, _) => listener.as_fd(),
        };
        // Should this fail, the next accept says why.
        let _ = poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::IN)], None);
    }

    fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Listener::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
            Listener::Unix(listener, _) => {
                let stream = listener.accept()?.0;
                sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_LEN)?;
                Stream::Unix(stream)
            }
        })
    }
}

/// Where it listens, for the log.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listener::Tcp(listener) => match listener.local_addr() {
                Ok(addr) => addr.fmt(f),
                Err(error) => error.fmt(f),
            },
            Listener::Unix(listener, _) => match listener.local_addr() {
                Ok(addr) => {
                    let path = addr.as_pathname().map(|path| path.as_os_str().as_bytes());
                    Escaped(path.unwrap_or(b"unnamed")).fmt(f)
                }
                Err(error) => error.fmt(f),
            },
        }
    }
}

impl Made {
    fn at(path: &Path) -> io::Result<Made> {
        Ok(Made {
            path: path.to_owned(),
            identity: identity_of(path)?,
        })
    }

    fn remove(&self) {
        if identity_of(&self.path).is_ok_and(|identity| identity == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity_of(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

fn open_to(path: &Path, mode: u32, group: Option<u32>) -> io::Result<()> {
    if let Some(group) = group {
        chown(path, None, Some(Gid::from_raw(group)))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Accepts from each listener on a thread of its own, and has the workers serve whoever is let in. Does
/// not wait.
///
/// # Errors
///
/// If no thread can be had.
pub fn accept_from_all(
    listeners: &Arc<[Listener]>,
    connections: &Arc<Connections>,
    workers: &Arc<Workers<Admission>>,
) -> io::Result<()> {
    for at in 0..listeners.len() {
        let (listeners, connections) = (Arc::clone(listeners), Arc::clone(connections));
        let workers = Arc::clone(workers);
        spawn("accept", move || {
            let no_thread = Throttle::default();
            listeners[at].accept_all(&connections, |admission| {
                if let Err(error) = workers.run(admission) {
                    if let Some(held_back) = no_thread.admit() {
                        warn!(
                            "turned-away reason=no-thread error=\"{error}\" held_back={held_back}"
                        );
                    }
                }
            })
        })?;
    }
    Ok(())
}

/// Whether accept failed for the one connection only, so that the next may be tried at once.
fn is_the_peers_doing(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(
            Errno::CONNABORTED
                | Errno::INTR
                | Errno::PROTO
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::HOSTDOWN
                | Errno::HOSTUNREACH
                | Errno::NOPROTOOPT
        )
    )
}

/// Removes the socket of a dead server, and nothing else.
fn clear_the_way(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "something that is not a socket is in the way",
        ));
    }
    // Without blocking, since the backlog of a server that lives may be full.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        // A server that accepts, or one whose backlog is full, or one that we may not ask.
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn accepted_sockets_have_the_options_of_the_listening_one() {
        let listener =
            Listener::bind_tcp("127.0.0.1:0".parse().expect("an address")).expect("bind");
        let port = listener.port().expect("a TCP listener");
        let _peer = TcpStream::connect(("127.0.0.1", port)).expect("connect");
        listener.wait_for_a_peer();
        let stream = listener.accept().expect("accept");
        assert!(sockopt::tcp_nodelay(&stream).expect("nodelay"));
        assert!(sockopt::socket_keepalive(&stream).expect("keepalive"));
        assert_eq!(
            sockopt::tcp_keepidle(&stream).expect("keepidle"),
            KEEPALIVE_IDLE
        );
        assert_eq!(
            sockopt::tcp_keepintvl(&stream).expect("keepintvl"),
            KEEPALIVE_INTERVAL
        );
        assert_eq!(
            sockopt::tcp_keepcnt(&stream).expect("keepcnt"),
            KEEPALIVE_PROBES
        );
        assert_eq!(
            sockopt::tcp_user_timeout(&stream).expect("timeout"),
            USER_TIMEOUT_MS
        );
        // The kernel doubles what it is asked for.
        let send_buffer = sockopt::socket_send_buffer_size(&stream).expect("send buffer");
        assert!(send_buffer <= 2 * SEND_BUFFER_LEN, "{send_buffer}");
    }
}
