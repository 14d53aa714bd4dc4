//! The user at the other end of a connection, and the processes for which that user may lock.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{getpeername, getsockname, sockopt, AddressFamily, SocketAddrAny};

use crate::os::process;

/// The maximum number of times that the kernel's lists are searched for a connection. A list may
/// skip a line while other connections come and go. If a connection is in a list without an owner,
/// the search ends.
const MAX_LOOKS: usize = 3;

/// What happens if a peer names a process of another user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRule {
    /// The request is refused.
    Enforce,
    /// The request is served, with a line in the log.
    Log,
    /// The request is served.
    Off,
}

/// The number of the user at the other end; `None` if the kernel no longer knows that user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer(pub Option<u32>);

/// A process that exists and that a peer has named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedProcess {
    pub user: Option<u32>,
    /// Whether the peer may lock for this process: root may lock for every process, and any other
    /// user only for its own.
    pub belongs_to_peer: bool,
}

impl Peer {
    /// Determines the user at the other end of a connected socket; `None` if the other end is on
    /// another host, or if no descriptor is left to determine the user. Call this before the peer
    /// has a reason to close the connection: after that, the kernel no longer knows the user.
    pub fn of(socket: &impl AsFd) -> Option<Peer> {
        match getpeername(socket) {
            Ok(address) => Peer::at(socket, address),
            // The peer has already hung up. The kernel has forgotten the peer's address, but not
            // ours.
            Err(Errno::NOTCONN | Errno::INVAL) => {
                let own = getsockname(socket).ok()?;
                (is_unix(&own) || loopback(&own).is_some()).then_some(Peer(None))
            }
            Err(_) => None,
        }
    }

    fn at(socket: &impl AsFd, address: Option<SocketAddrAny>) -> Option<Peer> {
        // A peer without an address is on a Unix socket.
        if address.as_ref().is_none_or(is_unix) {
            let credentials = sockopt::socket_peercred(socket).ok()?;
            return Some(Peer(process::known_user(credentials.uid.as_raw())));
        }
        let theirs = address.as_ref().and_then(loopback)?;
        let ours = getsockname(socket).ok().as_ref().and_then(loopback);
        let Peer(user) = match ours {
            Some(ours) => owner_of(theirs, ours).ok()?,
            None => Peer(None),
        };
        // If the peer has hung up, another program may have its port, and `user` may be the user of
        // that program.
        let is_still_there = getpeername(socket).is_ok();
        let user = user.filter(|_| is_still_there);
        Some(Peer(user.and_then(process::known_user)))
    }

    /// Returns the user of the process `pid`, and whether this peer may lock for the process;
    /// `None` if there is no such process.
    pub fn named_process(self, pid: u32) -> Option<NamedProcess> {
        if !process::is_process(pid) {
            return None;
        }
        let users = process::users(pid);
        let user = users.map(|users| users.real);
        let belongs_to_peer = match self.0 {
            None => false,
            Some(0) => true,
            Some(peer) => users.is_some_and(|of| peer == of.real || peer == of.effective),
        };
        // If the process has just ended, its users are unknown. So this checks again that the
        // process exists.
        (belongs_to_peer || process::is_process(pid)).then_some(NamedProcess {
            user,
            belongs_to_peer,
        })
    }
}

fn is_unix(address: &SocketAddrAny) -> bool {
    address.address_family() == AddressFamily::UNIX
}

/// Returns the address if it is one of the loopback interface.
fn loopback(address: &SocketAddrAny) -> Option<SocketAddr> {
    let address = canonical(SocketAddr::try_from(address.clone()).ok()?);
    address.ip().is_loopback().then_some(address)
}

/// Returns the address as IPv4 if it is an IPv4 address mapped to IPv6.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Returns the owner of the socket that is at `local` and connected to `remote`, from the kernel's
/// lists of connections. To produce a list, the kernel walks through its whole table of
/// connections. That takes about 20 ns for each entry of the table, or 6 ms on a host with 24 GB of
/// memory. Each connection in the list, even one in TIME_WAIT, takes another 2 us.
fn owner_of(local: SocketAddr, remote: SocketAddr) -> io::Result<Peer> {
    let lists = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];
    for list in [lists; MAX_LOOKS].into_iter().flatten() {
        let list = match File::open(list) {
            // The list does not exist without IPv6 or without /proc.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            list => list?,
        };
        let mut lines = BufReader::new(list).lines().map_while(Result::ok);
        if let Some(owner) = lines.find_map(|line| owner_in(&line, local, remote)) {
            return Ok(owner);
        }
    }
    Ok(Peer(None))
}

/// Returns the owner in a line of the list, if the line describes this connection.
fn owner_in(line: &str, local: SocketAddr, remote: SocketAddr) -> Option<Peer> {
    const FIELD_BEHIND_REMOTE: usize = 4;
    let mut fields = line.split_ascii_whitespace().skip(1);
    let is_it = address_in(fields.next()?)? == local && address_in(fields.next()?)? == remote;
    let user = fields.nth(FIELD_BEHIND_REMOTE)?.parse().ok()?;
    let inode = fields.nth(1)?;
    // For a closed socket, the list shows inode 0, and root as its user.
    is_it.then_some(Peer((inode != "0").then_some(user)))
}

/// Parses an address such as `0100007F:C351`: hexadecimal words in the byte order of the host, then
/// the port.
fn address_in(field: &str) -> Option<SocketAddr> {
    let (ip, port) = field.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let starts = (0..ip.len()).step_by(8);
    let words = starts.map(|at| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok());
    let words = words.collect::<Option<Vec<u32>>>()?;
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    let ip = match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(ip) => IpAddr::from(ip),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(&bytes[..]).ok()?),
    };
    Some(canonical(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use crate::os::is_soon;

    fn own_user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn connection(listen_on: &str) -> Option<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind(listen_on).ok()?;
        let theirs = TcpStream::connect(listener.local_addr().ok()?).ok()?;
        let (ours, _) = listener.accept().ok()?;
        Some((theirs, ours))
    }

    #[test]
    fn the_peer_is_the_user_who_has_the_other_end() {
        let (theirs, ours) = connection("127.0.0.1:0").expect("a loopback interface");
        theirs
            .shutdown(std::net::Shutdown::Write)
            .expect("half a close");
        assert_eq!(Peer::of(&ours), Some(Peer(Some(own_user()))));
        let (_theirs, ours) = UnixStream::pair().expect("a socket pair");
        assert_eq!(Peer::of(&ours), Some(Peer(Some(own_user()))));
    }

    #[test]
    fn only_the_loopback_interfaces_own_addresses_are_local() {
        for (text, is_local) in [
            ("127.0.0.1:1", true),
            ("127.255.0.9:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("192.0.2.1:1", false),
            ("0.0.0.0:1", false),
            ("[::]:1", false),
            ("[fe80::1]:1", false),
            ("[::ffff:192.0.2.1]:1", false),
            ("[::127.0.0.1]:1", false),
        ] {
            let address: SocketAddr = text.parse().expect("an address");
            let found = loopback(&SocketAddrAny::from(address));
            assert_eq!(found.is_some(), is_local, "{text}");
        }
    }

    #[test]
    fn a_peer_is_known_whatever_families_the_sockets_have() {
        for (listen_on, hosts) in [
            ("127.0.0.1:0", &["127.0.0.1", "::ffff:127.0.0.1"][..]),
            ("[::ffff:127.0.0.1]:0", &["127.0.0.1", "::ffff:127.0.0.1"]),
            ("[::1]:0", &["::1"]),
            ("[::]:0", &["127.0.0.1", "::ffff:127.0.0.1", "::1"]),
        ] {
            let Ok(listener) = TcpListener::bind(listen_on) else {
                continue;
            };
            let port = listener.local_addr().expect("an address").port();
            for host in hosts {
                let Ok(_theirs) = TcpStream::connect((*host, port)) else {
                    continue;
                };
                let (ours, _) = listener.accept().expect("accept");
                let found = Peer::of(&ours);
                assert_eq!(found, Some(Peer(Some(own_user()))), "{host} at {listen_on}");
            }
        }
    }

    #[test]
    fn a_peer_that_has_hung_up_has_no_user() {
        let (theirs, ours) = connection("127.0.0.1:0").expect("a loopback interface");
        drop(theirs);
        assert!(becomes_unknown(|| Peer::of(&ours)));
        let (theirs, ours) = connection("127.0.0.1:0").expect("a loopback interface");
        rustix::net::sockopt::set_socket_linger(&theirs, Some(Duration::ZERO)).expect("linger");
        drop(theirs);
        assert!(becomes_unknown(|| Peer::of(&ours)));
    }

    /// A program that another test is starting has a copy of our descriptors until it executes.
    fn becomes_unknown(look: impl Fn() -> Option<Peer>) -> bool {
        is_soon(|| look() == Some(Peer(None)))
    }

    #[test]
    fn a_closed_connection_has_no_owner() {
        let (theirs, ours) = connection("127.0.0.1:0").expect("a loopback interface");
        let local = theirs.local_addr().expect("an address");
        let remote = ours.local_addr().expect("an address");
        drop(theirs);
        assert!(becomes_unknown(|| owner_of(local, remote).ok()));
    }

    #[test]
    fn only_the_line_of_an_open_socket_tells_the_user() {
        let local: SocketAddr = "127.0.0.1:50000".parse().expect("an address");
        let remote: SocketAddr = "127.0.0.1:50001".parse().expect("an address");
        if cfg!(target_endian = "big") {
            return;
        }
        let line = |addresses: &str, state: &str, user: u32, inode: u32| {
            format!(
                "   3: {addresses} {state} 00000000:00000000 00:00000000 00000000 {user:5} 0 \
                 {inode} 1 0 20"
            )
        };
        let ours = "0100007F:C350 0100007F:C351";
        let reversed = "0100007F:C351 0100007F:C350";
        let mapped = "0000000000000000FFFF00000100007F:C350 0000000000000000FFFF00000100007F:C351";
        for (line, owner) in [
            (line(ours, "01", 1000, 77), Some(Peer(Some(1000)))),
            (line(ours, "05", 1000, 77), Some(Peer(Some(1000)))),
            (line(ours, "06", 0, 0), Some(Peer(None))),
            (line(reversed, "01", 1000, 77), None),
            (line(mapped, "01", 1000, 77), Some(Peer(Some(1000)))),
        ] {
            assert_eq!(owner_in(&line, local, remote), owner, "{line}");
        }
        for broken in ["", "sl local_address", "0: x y", "0: 0100007F:C350"] {
            assert_eq!(owner_in(broken, local, remote), None);
        }
    }

    #[test]
    fn unknown_and_other_users_may_ask_for_no_process() {
        let pid = std::process::id();
        let may_ask = |peer: Peer, pid| {
            peer.named_process(pid)
                .map(|process| process.belongs_to_peer)
        };
        assert_eq!(may_ask(Peer(None), pid), Some(false));
        let stranger = Peer(Some(own_user() + 12_345));
        assert_eq!(may_ask(stranger, pid), Some(false));
        assert_eq!(may_ask(Peer(Some(own_user())), pid), Some(true));
        assert_eq!(may_ask(Peer(Some(0)), 1), Some(true));
        assert_eq!(may_ask(Peer(None), i32::MAX as u32), None);
    }
}
