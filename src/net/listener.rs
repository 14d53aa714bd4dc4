//! Listening sockets: binding them, and accepting from them through all that may go wrong.

use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use log::{debug, info, warn};
use rustix::fs::{chown, Gid, Mode};
use rustix::io::Errno;
use rustix::net::{
    bind, ipproto, listen, socket_with, sockopt, AddressFamily, SocketFlags, SocketType,
};

use super::stream::Stream;

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

/// Pauses after a failed accept: doubled from the first to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A socket that listens.
#[derive(Debug)]
pub enum Listener {
    /// On an address of the network.
    Tcp(TcpListener),
    /// On a path of this host.
    Unix(UnixListener),
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
        // Linux hands all of these on to the accepted sockets, which saves each of them the calls.
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_PROBES)?;
        sockopt::set_tcp_user_timeout(&socket, USER_TIMEOUT_MS)?;
        sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_LEN)?;
        bind(&socket, &addr)?;
        listen(&socket, BACKLOG)?;
        Ok(Listener::Tcp(socket.into()))
    }

    /// Listens on `path`, for whoever `mode` and `group` let in. A socket that a dead server has
    /// left there is replaced. Call it before there are other threads: it changes the umask.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::AddrInUse`] if a server listens there, [`io::ErrorKind::AlreadyExists`] if
    /// something that is no socket stands there, or whatever the system says.
    pub fn bind_unix(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Listener> {
        clear_the_way(path)?;
        // Nobody can connect before the owner and the mode are right.
        let umask = rustix::process::umask(Mode::RWXU | Mode::RWXG | Mode::RWXO);
        let bound = UnixListener::bind(path);
        rustix::process::umask(umask);
        let listener = bound?;
        if let Some(group) = group {
            chown(path, None, Some(Gid::from_raw(group)))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        // std listens with a shorter backlog; listening again only changes that.
        listen(&listener, BACKLOG)?;
        Ok(Listener::Unix(listener))
    }

    /// The port, if there is one.
    pub fn port(&self) -> Option<u16> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().ok().map(|addr| addr.port()),
            Listener::Unix(_) => None,
        }
    }

    /// Hands every connection to `serve`, for ever. Where the process or the system has run out of
    /// descriptors or memory it pauses, longer each time, rather than spin.
    pub fn accept_all(&self, mut serve: impl FnMut(Stream)) -> ! {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.accept() {
                Ok(stream) => {
                    if pause > FIRST_PAUSE {
                        info!("accepting-again listener={self}");
                        pause = FIRST_PAUSE;
                    }
                    serve(stream);
                }
                Err(error) if is_the_peers_doing(&error) => {
                    debug!("accept-failed error=\"{error}\"")
                }
                Err(error) => {
                    if pause == FIRST_PAUSE {
                        warn!("cannot-accept listener={self} error=\"{error}\"");
                    }
                    thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Listener::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
            Listener::Unix(listener) => {
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
            Listener::Unix(_) => f.write_str("unix"),
        }
    }
}

/// Whether accept failed for the one connection only, so that the next may be tried at once.
fn is_the_peers_doing(error: &io::Error) -> bool {
    !matches!(
        Errno::from_io_error(error),
        Some(
            Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::BADF | Errno::INVAL
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
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
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
