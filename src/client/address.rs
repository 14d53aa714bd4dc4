//! Where a server is, and which of several servers a key belongs to.

use std::fmt;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::net::stream::Stream;

/// Where a server listens: `HOST:PORT`, or the path of a Unix socket, which has a `/` in it.
///
/// Nothing is looked up before something connects.
///
/// ```
/// use latchd::client::Address;
///
/// assert_eq!("/run/latchd.sock".parse(), Ok(Address::Unix("/run/latchd.sock".into())));
/// assert_eq!("[::1]:6388".parse(), Ok(Address::Tcp("[::1]:6388".into())));
/// assert!("localhost".parse::<Address>().is_err(), "a port is missing");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A name or an IP address, and a port; IPv6 addresses stand in brackets.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl Address {
    /// Connects, within `timeout` for each address that a name stands for.
    pub(super) fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        match self {
            Address::Unix(path) => UnixStream::connect(path).map(Stream::Unix),
            Address::Tcp(host) => {
                let mut last = io::Error::from(io::ErrorKind::NotFound);
                for addr in host.to_socket_addrs()? {
                    match TcpStream::connect_timeout(&addr, timeout) {
                        Ok(stream) => return Ok(Stream::Tcp(stream)),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains('/') {
            return Ok(Address::Unix(text.into()));
        }
        let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && is_port(port) => {
                Ok(Address::Tcp(text.into()))
            }
            _ => Err("a server is HOST:PORT or the path of a Unix socket".into()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(host) => f.write_str(host),
            Address::Unix(path) => path.display().fmt(f),
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
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            if sum & 1 == 1 {
                sum >> 1 ^ POLYNOMIAL
            } else {
                sum >> 1
            }
        })
    });
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for text in [
            "",
            "localhost",
            "localhost:",
            ":6388",
            "localhost:0",
            "localhost:70000",
            "localhost:x",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }
}
