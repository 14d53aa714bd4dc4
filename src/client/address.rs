//! Where a server is, and which of several servers a key belongs to.

use std::fmt;
use std::io;
use std::net::{Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::net::stream::{keep_alive, Stream};
use crate::protocol::limits;

/// The port of a server that is named without one.
const DEFAULT_PORT: u16 = 6388;

/// The shortest time for one attempt to connect. The system refuses none at all, or takes it for
/// no limit.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(1);

/// The longest time, so that no clock overflows.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(limits::MAX_SECONDS);

/// Where a server listens: `HOST`, `HOST:PORT`, or the path of a Unix socket, which has a `/` in
/// it. The port is 6388 if none is given. `tcp://` and `unix:` may be in front.
///
/// The servers of one cluster have `|` between them: any of them will do.
///
/// Nothing is looked up before something connects.
///
/// ```
/// use latchd::client::Address;
///
/// assert_eq!("/run/latchd.sock".parse(), Ok(Address::Unix("/run/latchd.sock".into())));
/// assert_eq!("[::1]:6388".parse(), Ok(Address::Tcp("[::1]:6388".into())));
/// assert_eq!("localhost".parse(), Ok(Address::Tcp("localhost:6388".into())));
/// assert_eq!("unix:/run/latchd.sock".parse::<Address>(), "/run/latchd.sock".parse());
///
/// let cluster: Address = "alpha|beta:7000".parse().unwrap();
/// assert_eq!(cluster.to_string(), "alpha:6388|beta:7000");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A name or an IP address, and a port; IPv6 addresses are in brackets.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
    /// The servers of one cluster.
    Cluster(Alternatives),
}

/// The addresses of the servers of one cluster. To connect is to try one after the other, first the
/// one that answered last. One that closes the connection or does not answer in time is tried last.
/// Clones share what they know of that.
#[derive(Clone, Debug)]
pub struct Alternatives {
    servers: Vec<Address>,
    /// The number of the server to try first.
    first: Arc<AtomicUsize>,
}

impl PartialEq for Alternatives {
    fn eq(&self, other: &Alternatives) -> bool {
        self.servers == other.servers
    }
}

impl Eq for Alternatives {}

impl Address {
    /// Connects within `timeout`, and also returns the instant at which that is over, and the
    /// address of the one server that was reached. Looking up a name comes before, and is not
    /// limited.
    pub(super) fn connect(&self, timeout: Duration) -> io::Result<(Stream, Instant, &Address)> {
        let timeout = timeout.min(LONGEST_ATTEMPT);
        match self {
            Address::Unix(path) => {
                let deadline = Instant::now() + timeout;
                let stream = connect_unix(path, deadline)?;
                Ok((Stream::Unix(stream), deadline, self))
            }
            Address::Tcp(host) => {
                let addrs: Vec<SocketAddr> = host.to_socket_addrs()?.collect();
                let deadline = Instant::now() + timeout;
                let stream = connect_tcp(&addrs, deadline)?;
                keep_alive(&stream)?;
                Ok((Stream::Tcp(stream), deadline, self))
            }
            Address::Cluster(Alternatives { servers, first }) => {
                let (start, deadline) = (first.load(Ordering::Relaxed), Instant::now() + timeout);
                let numbers = (0..servers.len()).map(|tried| (start + tried) % servers.len());
                try_each(numbers, deadline, |number, share| {
                    let (stream, _, server) = servers[number].connect(share)?;
                    first.store(number, Ordering::Relaxed);
                    Ok((stream, deadline, server))
                })
            }
        }
    }

    /// Has the next attempt begin with another server than `useless`, if there are several. Another
    /// thread may have done so already.
    pub(super) fn try_another_than(&self, useless: &Address) {
        if let Address::Cluster(Alternatives { servers, first }) = self {
            let Some(number) = servers.iter().position(|server| server == useless) else {
                return;
            };
            let next = (number + 1) % servers.len();
            let _ = first.compare_exchange(number, next, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// How many servers there are to try beside one.
    pub(super) fn other_count(&self) -> u32 {
        match self {
            Address::Cluster(Alternatives { servers, .. }) => {
                u32::try_from(servers.len() - 1).unwrap_or(u32::MAX)
            }
            Address::Tcp(_) | Address::Unix(_) => 0,
        }
    }
}

/// Tries one after the other until one succeeds. Each may take an equal share of the time that is
/// left, so that one that does not answer leaves some for the next.
fn try_each<A, T>(
    all: impl ExactSizeIterator<Item = A>,
    deadline: Instant,
    mut connect: impl FnMut(A, Duration) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for (remaining, one) in (1..=all.len()).rev().zip(all) {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(remaining).unwrap_or(u32::MAX);
        match connect(one, share) {
            Ok(connected) => return Ok(connected),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect_tcp(addrs: &[SocketAddr], deadline: Instant) -> io::Result<TcpStream> {
    try_each(addrs.iter(), deadline, |addr, share| {
        TcpStream::connect_timeout(addr, share.max(SHORTEST_ATTEMPT))
    })
}

/// Waits for room in the backlog, which the kernel limits by the time for sending.
fn connect_unix(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let addr = SocketAddrUnix::new(path)?;
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(left.max(SHORTEST_ATTEMPT)))?;
        match connect(&socket, &addr) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {}
            Err(Errno::AGAIN | Errno::INTR) => return Err(Errno::TIMEDOUT.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let servers: Option<Vec<Address>> = text.split('|').map(one).collect();
        let servers = servers.ok_or(
            "expected HOST, HOST:PORT, tcp://HOST:PORT, unix:PATH, or a path with a / in it",
        )?;
        let server = <[Address; 1]>::try_from(servers).map(|[server]| server);
        Ok(server.unwrap_or_else(|servers| {
            let first = Arc::default();
            Address::Cluster(Alternatives { servers, first })
        }))
    }
}

/// The address of one server; `None` if the text is none.
fn one(text: &str) -> Option<Address> {
    match (text.strip_prefix("unix:"), text.strip_prefix("tcp://")) {
        (Some(""), _) => None,
        (Some(path), _) => Some(Address::Unix(path.into())),
        (None, Some(host)) => tcp(host),
        (None, None) if text.contains("://") => None,
        (None, None) if text.contains('/') => Some(Address::Unix(text.into())),
        (None, None) => tcp(text),
    }
}

/// An address with a port; `None` if the text is none, or has another scheme.
fn tcp(text: &str) -> Option<Address> {
    // The colons of an IPv6 address are not in front of a port.
    if let Ok(ip) = text.parse::<Ipv6Addr>() {
        return Some(Address::Tcp(format!("[{ip}]:{DEFAULT_PORT}")));
    }
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_host = |host: &str| {
        let is_bracketed = host.starts_with('[') && host.ends_with(']');
        let is_part = |c: char| !matches!(c, ':' | '/' | '[' | ']') && !c.is_whitespace();
        is_bracketed || !host.is_empty() && host.chars().all(is_part)
    };
    match text.rsplit_once(':') {
        Some((host, port)) if is_host(host) && is_port(port) => Some(Address::Tcp(text.into())),
        _ if is_host(text) => Some(Address::Tcp(format!("{text}:{DEFAULT_PORT}"))),
        _ => None,
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(host) => f.write_str(host),
            Address::Unix(path) => {
                // Without a slash it would read as the name of a host.
                let has_slash = path.as_os_str().as_bytes().contains(&b'/');
                let prefix = if has_slash { "" } else { "unix:" };
                write!(f, "{prefix}{}", path.display())
            }
            Address::Cluster(Alternatives { servers, .. }) => {
                let servers: Vec<String> = servers.iter().map(Address::to_string).collect();
                f.write_str(&servers.join("|"))
            }
        }
    }
}

/// Which of `count` servers a key belongs to: CRC-32 (IEEE) of the key modulo their number, as the
/// clients of dflockd have it.
pub(super) fn shard_of(key: &str, count: usize) -> usize {
    crc32(key.as_bytes()) as usize % count
}

fn crc32(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0xedb8_8320;
    let sum = bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| match sum & 1 {
            1 => sum >> 1 ^ POLYNOMIAL,
            _ => sum >> 1,
        })
    });
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn the_checksum_is_crc_32_ieee() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn keys_go_to_the_servers_that_other_clients_send_them_to() {
        // crc32 of the key modulo the number of servers, by an independent implementation (zlib).
        for (key, shards) in [
            ("a", [1, 0, 2]),
            ("my-job", [0, 1, 0]),
            ("foo", [1, 2, 4]),
            ("deploy", [0, 1, 1]),
            ("ключ", [0, 0, 3]),
            ("user:42", [0, 1, 3]),
            ("_", [0, 2, 0]),
            ("backup-db", [1, 1, 2]),
        ] {
            assert_eq!([2, 3, 5].map(|count| shard_of(key, count)), shards, "{key}");
        }
    }

    /// A server whose backlog is full, so that a connection to it is never made, and its address.
    fn silent_server() -> ((TcpListener, Vec<TcpStream>), SocketAddr) {
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
    fn alternatives_are_one_address() {
        let text = "a:6388|/run/latchd.sock|[::1]:7000";
        let cluster: Address = text.parse().expect("three addresses");
        assert!(matches!(cluster, Address::Cluster(_)));
        assert_eq!(cluster.to_string(), text);
        assert_eq!("a|unix:/run/latchd.sock|[::1]:7000".parse(), Ok(cluster));
        for text in ["a|", "|a", "|", "a||b", "a|b:0", "a|b c"] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_server_that_answered_last_is_tried_first() {
        let listener = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let (one, other) = (listener(), listener());
        let addr = |listener: &TcpListener| listener.local_addr().expect("its address");
        let text = format!("/nowhere/socket|{}|{}", addr(&one), addr(&other));
        let cluster: Address = text.parse().expect("three addresses");
        let peer = |address: &Address| match address.connect(Duration::from_secs(5)) {
            Ok((Stream::Tcp(stream), ..)) => stream.peer_addr().expect("connected"),
            other => panic!("{other:?}"),
        };
        let give_up = |listener: &TcpListener| {
            let server = Address::Tcp(addr(listener).to_string());
            cluster.clone().try_another_than(&server);
        };
        assert_eq!(peer(&cluster), addr(&one));
        assert_eq!(peer(&cluster), addr(&one));
        // Two connections that end together go on to the same server.
        give_up(&one);
        give_up(&one);
        assert_eq!(peer(&cluster), addr(&other));
        assert_eq!(peer(&cluster), addr(&other));
        // From the last one it goes on to the beginning, which is a path where no server is.
        give_up(&other);
        assert_eq!(peer(&cluster), addr(&one));
    }

    #[test]
    fn a_silent_alternative_leaves_time_for_the_next() {
        let (_silent, full) = silent_server();
        let alive = TcpListener::bind("127.0.0.1:0").expect("a port");
        let text = format!("{full}|{}", alive.local_addr().expect("its address"));
        let cluster: Address = text.parse().expect("two addresses");
        let connected = cluster.connect(Duration::from_secs(1));
        assert!(connected.is_ok(), "{connected:?}");
    }

    #[test]
    fn an_address_with_a_slash_is_a_path() {
        for (text, address) in [
            ("localhost:6388", Address::Tcp("localhost:6388".into())),
            ("[::1]:6388", Address::Tcp("[::1]:6388".into())),
            ("/run/latchd.sock", Address::Unix("/run/latchd.sock".into())),
            ("./sock", Address::Unix("./sock".into())),
        ] {
            assert_eq!(text.parse(), Ok(address.clone()));
            assert_eq!(address.to_string(), text);
        }
        for (text, address) in [
            ("localhost", "localhost:6388"),
            ("10.0.0.1", "10.0.0.1:6388"),
            ("::1", "[::1]:6388"),
            ("[::1]", "[::1]:6388"),
            ("tcp://host:7000", "host:7000"),
            ("tcp://host", "host:6388"),
            ("unix:/run/latchd.sock", "/run/latchd.sock"),
            ("unix:sock", "unix:sock"),
        ] {
            let parsed: Address = text.parse().expect(text);
            assert_eq!(parsed.to_string(), address);
            assert_eq!(address.parse::<Address>().expect(address), parsed);
        }
        for text in [
            "",
            "localhost:",
            ":6388",
            "localhost:0",
            "localhost:70000",
            "localhost:x",
            "unix:",
            "tcp://",
            "tcp://localhost/",
            "tcp:localhost",
            "http://localhost:6388",
            "a host",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }
}
