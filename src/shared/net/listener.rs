//! Listening sockets: binding them, and accepting connections in spite of failures.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use log::{debug, info};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    bind, ipproto, listen, socket_with, sockopt, AddressFamily, SocketFlags, SocketType,
};

use crate::os::backoff::Backoff;
use crate::os::text::{reason, Escaped};
use crate::os::thread::spawn;
use crate::shared::log::Throttle;

use super::connections::Connections;
use super::unix_path::{self, BoundPath};
use super::workers::Workers;
use super::BACKLOG;
use crate::os::stream::{keep_alive, where_known, Socket, Stream};
use crate::os::tls::Certificate;

/// The length of the send buffer in bytes. A client that does not read can tie up this much kernel
/// memory.
pub const SEND_BUFFER_LEN: usize = 16 * 1024;

/// The first and the maximum pause after a failed accept. The pause doubles with each failure.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub enum Listener {
    /// A TCP socket. It has a certificate if it speaks TLS.
    Tcp(TcpListener, Option<Arc<Certificate>>),
    /// A Unix socket. It has a path if this process bound it.
    Unix(UnixListener, Option<BoundPath>),
}

impl Listener {
    /// Listens on `addr`; port 0 picks a free port. The unspecified IPv6 address accepts IPv4
    /// connections as well.
    pub fn bind_tcp(addr: SocketAddr) -> io::Result<Listener> {
        let family = match addr {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let socket = socket_with(family, kind, flags, Some(ipproto::TCP))?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if addr.is_ipv6() {
            sockopt::set_ipv6_v6only(&socket, false)?;
        }
        bind(&socket, &addr)?;
        listen(&socket, BACKLOG)?;
        Listener::adopt_tcp(socket.into())
    }

    /// Adopts a listening TCP socket and sets its options.
    pub fn adopt_tcp(listener: TcpListener) -> io::Result<Listener> {
        listener.set_nonblocking(true)?;
        // Accepted sockets inherit all of these options, which saves a system call for each option.
        keep_alive(&listener)?;
        // Urgent bytes stay in the stream, as telnet expects. Otherwise they would be lost, and the
        // kernel would not count the bytes after them as unread.
        where_known(sockopt::set_socket_oobinline(&listener, true))?;
        sockopt::set_socket_send_buffer_size(&listener, SEND_BUFFER_LEN)?;
        Ok(Listener::Tcp(listener, None))
    }

    /// Makes a TCP listener speak TLS with this certificate. A Unix listener stays as it is.
    pub fn with_tls(self, certificate: Arc<Certificate>) -> Listener {
        match self {
            Listener::Tcp(listener, _) => Listener::Tcp(listener, Some(certificate)),
            unix => unix,
        }
    }

    /// Listens on a path: see [`unix_path::bind`].
    pub fn bind_unix(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Listener> {
        let (listener, made) = unix_path::bind(path, mode, group)?;
        listener.set_nonblocking(true)?;
        Ok(Listener::Unix(listener, Some(made)))
    }

    /// Adopts a listening Unix socket of another process.
    pub fn adopt_unix(listener: UnixListener) -> io::Result<Listener> {
        listener.set_nonblocking(true)?;
        Ok(Listener::Unix(listener, None))
    }

    /// Removes the path of the Unix socket that this process bound, unless another socket has
    /// replaced it.
    pub fn clean_up(&self) {
        if let Listener::Unix(_, Some(path)) = self {
            path.remove();
        }
    }

    /// Refuses new connections, and resets those that have not been accepted.
    pub fn refuse(&self) {
        // This fails only if the socket has already been shut down.
        let _ = rustix::net::shutdown(self.socket(), rustix::net::Shutdown::Both);
        self.clean_up();
    }

    pub fn port(&self) -> Option<u16> {
        self.tcp_addr().map(|addr| addr.port())
    }

    /// The address of a TCP listener; `None` for a Unix socket.
    pub fn tcp_addr(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(listener, ..) => listener.local_addr().ok(),
            Listener::Unix(..) => None,
        }
    }

    /// The absolute path of the Unix socket beside a port, if it is one word.
    pub fn path_beside_port(listeners: &[Listener]) -> Option<String> {
        listeners.iter().find_map(Listener::port)?;
        let address = listeners.iter().rev().find_map(|it| match it {
            Listener::Unix(listener, _) => listener.local_addr().ok(),
            Listener::Tcp(..) => None,
        })?;
        let path = address.as_pathname()?.to_str()?;
        let is_word = !path.contains(|it: char| it.is_whitespace() || it.is_control());
        (is_word && path.starts_with('/')).then(|| path.to_owned())
    }

    /// Accepts forever and hands each admitted connection to the workers. Backs off when the
    /// process or the system has run out of descriptors or memory.
    fn accept_all(&self, connections: &Arc<Connections>, workers: &Arc<Workers>) -> ! {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let (failures, refusals) = (Throttle::default(), Throttle::default());
        let no_thread = Throttle::default();
        loop {
            // Polling first costs less than an accept that finds no connection. If the poll fails,
            // so does the accept, and its error is reported.
            let mut polled = [PollFd::from_borrowed_fd(self.socket(), PollFlags::IN)];
            let _ = poll(&mut polled, None);
            match connections.admit(|| self.accept()) {
                Ok(Ok(admission)) => {
                    backoff.reset();
                    if let Some(cap) = admission.exceeds.or(admission.displaced_for) {
                        refusals.warn(format_args!("turned-away reason={cap} listener={self}"));
                    }
                    if let Err(error) = workers.run(admission) {
                        no_thread.warn(format_args!(
                            "turned-away reason=no-thread error=\"{}\"",
                            reason(&error)
                        ));
                    }
                }
                Ok(Err(cap)) => {
                    refusals.warn(format_args!("turned-away reason={cap} listener={self}"))
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if concerns_one_peer(&error) => {
                    debug!("accept-failed error=\"{}\"", reason(&error))
                }
                Err(error) => {
                    failures.warn(format_args!(
                        "cannot-accept listener={self} error=\"{}\"",
                        reason(&error)
                    ));
                    thread::sleep(backoff.pause());
                }
            }
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener, ..) => listener.as_fd(),
            Listener::Unix(listener, _) => listener.as_fd(),
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Listener::Tcp(listener, certificate) => match (listener.accept()?.0, certificate) {
                (socket, Some(certificate)) => certificate.server_stream(socket),
                (socket, None) => Stream::new(Socket::Tcp(socket)),
            },
            Listener::Unix(listener, _) => {
                let stream = listener.accept()?.0;
                sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_LEN)?;
                Stream::new(Socket::Unix(stream))
            }
        })
    }
}

/// The address or path, as logged.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self {
            Listener::Tcp(listener, ..) => listener.local_addr().map(|addr| addr.to_string()),
            Listener::Unix(listener, _) => listener.local_addr().map(|addr| {
                let path = addr.as_pathname();
                path.map_or(Escaped(b"unnamed"), Escaped::path).to_string()
            }),
        };
        f.write_str(&place.unwrap_or_else(|error| error.to_string()))
    }
}

/// Starts a thread for each listener, which accepts connections and hands them to the workers. Logs
/// the addresses of TCP listeners under the name `addr`, and the paths of Unix sockets. Does not
/// block.
pub fn accept_from_all(
    addr: &str,
    listeners: &Arc<[Listener]>,
    connections: &Arc<Connections>,
    workers: &Arc<Workers>,
) -> io::Result<()> {
    for listener in listeners.iter() {
        let kind = listener.port().map_or("path", |_| addr);
        info!("listening {kind}={listener}");
    }
    for at in 0..listeners.len() {
        let (listeners, connections) = (Arc::clone(listeners), Arc::clone(connections));
        let workers = Arc::clone(workers);
        spawn("accept", move || {
            listeners[at].accept_all(&connections, &workers)
        })?;
    }
    Ok(())
}

/// Whether accept failed for one connection only, so that it can be called again at once.
fn concerns_one_peer(error: &io::Error) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::stream::{
        KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES, USER_TIMEOUT_MS,
    };
    use std::net::TcpStream;

    #[test]
    fn accepted_sockets_have_the_options_of_the_listening_one() {
        let listener =
            Listener::bind_tcp("127.0.0.1:0".parse().expect("an address")).expect("bind");
        let port = listener.port().expect("a TCP listener");
        let _peer = TcpStream::connect(("127.0.0.1", port)).expect("connect");
        let mut polled = [PollFd::from_borrowed_fd(listener.socket(), PollFlags::IN)];
        poll(&mut polled, None).expect("a socket");
        let stream = listener.accept().expect("accept");
        assert!(sockopt::tcp_nodelay(&stream).expect("nodelay"));
        assert!(sockopt::socket_oobinline(&stream).expect("oobinline"));
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
