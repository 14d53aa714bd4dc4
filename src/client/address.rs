//! The addresses of servers, and which of several servers a key belongs to.

use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connecting::{connect_tcp, connect_unix, try_each};
use crate::os::names;
use crate::os::stream::{keep_alive, Socket, Stream};
use crate::os::text::{in_brackets, is_ipv6};
use crate::wire::limits;

/// The port of an address that does not name one.
const DEFAULT_PORT: u16 = 6388;

/// The maximum timeout. With a longer one, a deadline might overflow.
pub(super) const LONGEST_ATTEMPT: Duration = Duration::from_secs(limits::MAX_SECONDS);

/// Where a server listens: `HOST`, `HOST:PORT`, or the path of a Unix socket. A path contains a `/`
/// or has the prefix `unix:`. A host may have the prefix `tcp://`. The default port is 6388. An
/// IPv6 address with a port must be in brackets. An IPv6 address can have a zone: `fe80::1%eth0`,
/// `[fe80::1%2]:6388`.
///
/// The addresses of the servers of one cluster are separated by `|`. The client connects to any one
/// of them.
///
/// A host name is looked up only when the client connects.
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
#[non_exhaustive]
pub enum Address {
    /// A host name or an IP address, with a port. An IPv6 address is in brackets.
    Tcp(String),
    /// The path of a Unix socket.
    Unix(PathBuf),
    /// The servers of one cluster.
    Cluster(Alternatives),
}

/// The addresses of the servers of one cluster. To connect, a client tries one after the other,
/// beginning with the server of the previous connection. If that server closed the connection or
/// did not answer in time, the client tries it last. Clones share this order.
#[derive(Clone, Debug)]
pub struct Alternatives {
    servers: Vec<Address>,
    /// The index of the server to try first.
    first: Arc<AtomicUsize>,
}

impl PartialEq for Alternatives {
    fn eq(&self, other: &Alternatives) -> bool {
        self.servers == other.servers
    }
}

impl Eq for Alternatives {}

impl Address {
    /// Connects until `deadline`, which includes looking up a name. Also returns the address of the
    /// server that was reached.
    pub(super) fn connect(&self, deadline: Instant) -> io::Result<(Stream, &Address)> {
        match self {
            Address::Unix(path) => {
                let stream = connect_unix(path, deadline)?;
                Ok((Stream::new(Socket::Unix(stream)), self))
            }
            Address::Tcp(host) => {
                let addrs = names::look_up(host, deadline)?;
                let stream = connect_tcp(&addrs, deadline)?;
                keep_alive(&stream)?;
                Ok((Stream::new(Socket::Tcp(stream)), self))
            }
            Address::Cluster(Alternatives { servers, first }) => {
                let start = first.load(Ordering::Relaxed);
                let numbers = (0..servers.len()).map(|tried| (start + tried) % servers.len());
                try_each(numbers, deadline, |number, deadline| {
                    let connected = servers[number].connect(deadline)?;
                    first.store(number, Ordering::Relaxed);
                    Ok(connected)
                })
            }
        }
    }

    /// Makes the next attempt start with the server after `failed`, unless another thread has
    /// already made it start with a different server.
    pub(super) fn try_another_than(&self, failed: &Address) {
        if let Address::Cluster(Alternatives { servers, first }) = self {
            let Some(number) = servers.iter().position(|server| server == failed) else {
                return;
            };
            let next = (number + 1) % servers.len();
            let _ = first.compare_exchange(number, next, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// How many other servers the cluster has; 0 for a single server.
    pub(super) fn other_count(&self) -> usize {
        match self {
            Address::Cluster(Alternatives { servers, .. }) => servers.len() - 1,
            Address::Tcp(_) | Address::Unix(_) => 0,
        }
    }
}

/// The error for text that is not the address of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidAddress;

impl fmt::Display for InvalidAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "expected HOST, HOST:PORT, tcp://HOST:PORT, unix:PATH, or a path with a / in it",
        )
    }
}

impl std::error::Error for InvalidAddress {}

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let servers: Option<Vec<Address>> = text.split('|').map(one).collect();
        let servers = servers.ok_or(InvalidAddress)?;
        let server = <[Address; 1]>::try_from(servers).map(|[server]| server);
        Ok(server.unwrap_or_else(|servers| {
            let first = Arc::default();
            Address::Cluster(Alternatives { servers, first })
        }))
    }
}

/// Parses the address of one server; `None` if it is malformed.
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

/// Parses a TCP address, and adds the default port if it has none; `None` if it is malformed.
fn tcp(text: &str) -> Option<Address> {
    // In an IPv6 address without brackets, the last colon does not introduce a port.
    if is_ipv6(text) {
        return Some(Address::Tcp(format!("[{text}]:{DEFAULT_PORT}")));
    }
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_part = |c: char| !matches!(c, ':' | '/' | '[' | ']' | '%') && !c.is_whitespace();
    let is_host = |host: &str| match in_brackets(host) {
        Some(inner) => is_ipv6(inner),
        None => !host.is_empty() && host.chars().all(is_part),
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
                // Without a slash, the path would be parsed as a host name.
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

/// The index of the server, out of `count`, that a key belongs to: CRC-32 (IEEE) of the key modulo
/// `count`, as the clients of dflockd compute it.
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
    use crate::client::connecting::tests::silent_server;
    use std::net::{SocketAddr, TcpListener};

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
        let peer =
            |address: &Address| match address.connect(Instant::now() + Duration::from_secs(5)) {
                Ok((stream, ..)) => stream
                    .to_string()
                    .parse::<SocketAddr>()
                    .expect("an address"),
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
        let connected = cluster.connect(Instant::now() + Duration::from_secs(1));
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
            ("fe80::1%eth0", "[fe80::1%eth0]:6388"),
            ("[fe80::1%2]", "[fe80::1%2]:6388"),
            ("tcp://[fe80::1%wlan-0.5]:7000", "[fe80::1%wlan-0.5]:7000"),
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
            "localhost%lo",
            "[localhost]",
            "[::1%]:6388",
            "[::1%a%b]:6388",
            "[]:6388",
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
