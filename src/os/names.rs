//! Host name lookup with a deadline.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Instant;

use crate::os::lookups::Lookups;
use crate::os::text::in_brackets;

/// Resolves `HOST:PORT`. An IPv6 address must be in brackets, and may have a zone (its number or
/// its name). Fails with [`io::ErrorKind::TimedOut`] at the deadline.
pub fn look_up(host_and_port: &str, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    static ALL: Lookups<String, Vec<SocketAddr>> = Lookups::new(|place| resolve(place));
    match host_and_port.parse() {
        Ok(addr) => Ok(vec![addr]),
        Err(_) => ALL.look_up(&host_and_port.to_owned(), deadline),
    }
}

fn resolve(host_and_port: &str) -> io::Result<Vec<SocketAddr>> {
    let (host, port) = host_and_port
        .rsplit_once(':')
        .ok_or(io::ErrorKind::InvalidInput)?;
    let port: u16 = port.parse().map_err(io::Error::other)?;
    // The system resolver knows zone names, but not brackets.
    let host = in_brackets(host).unwrap_or(host);
    let found = (host, port).to_socket_addrs();
    let found = found.or_else(|error| {
        // The system resolver calls a name unknown if this process has no descriptor left.
        File::open("/dev/null")?;
        let why = "cannot find the address of this host";
        Err(io::Error::new(error.kind(), why))
    });
    Ok(found?.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_unknown_name_is_said_in_plain_words() {
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = look_up("no-such-host.invalid:6388", deadline).expect_err("no such name");
        assert_eq!(error.to_string(), "cannot find the address of this host");
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn an_address_with_a_zone_needs_no_name_server() {
        let index = std::fs::read_to_string("/sys/class/net/lo/ifindex").expect("a loopback");
        let index: u32 = index.trim().parse().expect("a number");
        for zone in ["lo".to_owned(), index.to_string()] {
            let addrs = look_up(&format!("[fe80::1%{zone}]:7"), Instant::now() + PATIENCE);
            let addrs = addrs.expect("a zone");
            let [SocketAddr::V6(addr)] = addrs[..] else {
                panic!("{addrs:?}");
            };
            assert_eq!((addr.scope_id(), addr.port()), (index, 7), "{zone}");
        }
    }
}
