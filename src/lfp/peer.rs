//! Who is at the other end, and for whom that user may ask.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{getpeername, getsockname, sockopt, AddressFamily, SocketAddrAny};

use crate::lockfile::process;

/// How often the kernel's list is read anew where our connection was not in it: the list may skip a line
/// while others come and go.
const MAX_LOOKS: usize = 3;

/// What is done about those who ask for somebody else's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRule {
    /// They are refused.
    Enforce,
    /// They are served, and logged.
    Log,
    /// They are served.
    Off,
}

/// The user at the other end, by number; `None` if that cannot be told any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub Option<u32>);

/// What the peer may do about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The process is there, and the peer may speak for it: it is one of this user.
    Own { user: Option<u32> },
    /// The process is there, and somebody else's.
    Foreign { user: Option<u32> },
    /// There is no such process.
    Dead,
}

/// The peer is on another host, or it is not to be told where.
#[derive(Debug, PartialEq, Eq)]
pub struct NotLocal;

impl Peer {
    /// Finds out who is at the other end of a connected socket. To be called before the peer has a reason
    /// to close it: afterwards nobody knows.
    ///
    /// # Errors
    ///
    /// If the peer does not come by the loopback interface.
    pub fn of(socket: &impl AsFd) -> Result<Peer, NotLocal> {
        match getpeername(socket) {
            Ok(address) => Peer::at(socket, address),
            // It has hung up already. Its address is forgotten, but to which of ours it came is not.
            Err(Errno::NOTCONN | Errno::INVAL) => match getsockname(socket) {
                Ok(own) if own.address_family() == AddressFamily::UNIX => Ok(Peer(None)),
                Ok(own) if loopback(&own).is_some() => Ok(Peer(None)),
                _ => Err(NotLocal),
            },
            Err(_) => Err(NotLocal),
        }
    }

    fn at(socket: &impl AsFd, address: Option<SocketAddrAny>) -> Result<Peer, NotLocal> {
        let is_unix = |address: &SocketAddrAny| address.address_family() == AddressFamily::UNIX;
        // An unnamed peer is one on a Unix socket.
        if address.as_ref().map_or(true, is_unix) {
            let credentials = sockopt::socket_peercred(socket);
            return credentials
                .map(|credentials| Peer(Some(credentials.uid.as_raw())))
                .map_err(|_| NotLocal);
        }
        let theirs = address.as_ref().and_then(loopback).ok_or(NotLocal)?;
        let ours = getsockname(socket).ok().as_ref().and_then(loopback);
        let user = ours.and_then(|ours| (0..MAX_LOOKS).find_map(|_| user_of(theirs, ours)));
        // Had it hung up, another program might have its port by now: then the list spoke of that one.
        let is_still_there = getpeername(socket).is_ok();
        Ok(Peer(user.filter(|_| is_still_there)))
    }

    /// How the peer stands to the process `pid`: root and those who run it may speak for it.
    pub fn standing(self, pid: u32) -> Standing {
        if !process::exists(pid) {
            return Standing::Dead;
        }
        let users = process::users(pid);
        let user = users.map(|(real, _)| real);
        let is_own = match self.0 {
            None => false,
            Some(0) => true,
            Some(peer) => users.is_some_and(|(real, effective)| peer == real || peer == effective),
        };
        match is_own {
            true => Standing::Own { user },
            // It may have ended just now, which is why its users are not known.
            false if !process::exists(pid) => Standing::Dead,
            false => Standing::Foreign { user },
        }
    }
}

/// The address, if it is one of the loopback interface's own: not another one of this host.
fn loopback(address: &SocketAddrAny) -> Option<SocketAddr> {
    let address = plain(SocketAddr::try_from(address.clone()).ok()?);
    address.ip().is_loopback().then_some(address)
}

/// An IPv4 address in IPv6's clothes is an IPv4 address.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The user whose socket is at `local` and connected to `remote`, by the kernel's lists.
fn user_of(local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    ["/proc/self/net/tcp", "/proc/self/net/tcp6"]
        .iter()
        .find_map(|list| {
            let lines = BufReader::new(File::open(list).ok()?).lines();
            lines
                .map_while(Result::ok)
                .find_map(|line| user_in(&line, local, remote))
        })
}

/// The user in a line of the list, if it is the line of this connection and a program still has it open.
fn user_in(line: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    const FIELD_BEHIND_REMOTE: usize = 4;
    let mut fields = line.split_ascii_whitespace().skip(1);
    let is_it = address_in(fields.next()?)? == local && address_in(fields.next()?)? == remote;
    if !is_it {
        return None;
    }
    let user = fields.nth(FIELD_BEHIND_REMOTE)?.parse().ok()?;
    let inode = fields.nth(1)?;
    // One that has been closed belongs to nobody, and is said to be root's.
    (inode != "0").then_some(user)
}

/// Reads `0100007F:C351`: words of the address in the host's order of bytes, then the port.
fn address_in(field: &str) -> Option<SocketAddr> {
    let (address, port) = field.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let digits = address.get(8 * at..8 * at + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip = match address.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let mut bytes = [0; 16];
            for (into, word) in bytes.chunks_exact_mut(4).zip(words) {
                into.copy_from_slice(&word);
            }
            IpAddr::from(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some(plain(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

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
        assert_eq!(Peer::of(&ours), Ok(Peer(Some(own_user()))));
        theirs
            .shutdown(std::net::Shutdown::Write)
            .expect("half a close");
        assert_eq!(Peer::of(&ours), Ok(Peer(Some(own_user()))));
        if let Some((_theirs, ours)) = connection("[::1]:0") {
            assert_eq!(Peer::of(&ours), Ok(Peer(Some(own_user()))));
        }
        let (_theirs, ours) = UnixStream::pair().expect("a socket pair");
        assert_eq!(Peer::of(&ours), Ok(Peer(Some(own_user()))));
    }

    #[test]
    fn an_ipv4_peer_of_an_ipv6_socket_is_known_too() {
        use std::os::fd::OwnedFd;
        let Ok(listener) = TcpListener::bind("[::]:0") else {
            return;
        };
        let port = listener.local_addr().expect("an address").port();
        let Ok(_theirs) = TcpStream::connect(("127.0.0.1", port)) else {
            return;
        };
        let (ours, _) = listener.accept().expect("accept");
        assert_eq!(Peer::of(&OwnedFd::from(ours)), Ok(Peer(Some(own_user()))));
    }

    #[test]
    fn a_peer_that_has_hung_up_is_nobody() {
        let (theirs, ours) = connection("127.0.0.1:0").expect("a loopback interface");
        drop(theirs);
        assert_eq!(Peer::of(&ours), Ok(Peer(None)));
        let (theirs, ours) = connection("127.0.0.1:0").expect("a loopback interface");
        rustix::net::sockopt::set_socket_linger(&theirs, Some(std::time::Duration::ZERO))
            .expect("linger");
        drop(theirs);
        assert_eq!(Peer::of(&ours), Ok(Peer(None)));
    }

    #[test]
    fn nobody_and_strangers_speak_for_no_process() {
        let pid = std::process::id();
        assert!(matches!(Peer(None).standing(pid), Standing::Foreign { .. }));
        let stranger = Peer(Some(own_user() + 12_345));
        assert!(matches!(stranger.standing(pid), Standing::Foreign { .. }));
        assert!(matches!(
            Peer(Some(own_user())).standing(pid),
            Standing::Own { .. }
        ));
        assert!(matches!(Peer(Some(0)).standing(1), Standing::Own { .. }));
        assert_eq!(Peer(None).standing(i32::MAX as u32), Standing::Dead);
    }

    #[test]
    fn only_the_line_of_an_open_socket_tells_the_user() {
        let local: SocketAddr = "127.0.0.1:50000".parse().expect("an address");
        let remote: SocketAddr = "127.0.0.1:50001".parse().expect("an address");
        if cfg!(target_endian = "big") {
            return;
        }
        let line = |addresses: &str, state: &str, user: u32, inode: u32| {
            format!("   3: {addresses} {state} 00000000:00000000 00:00000000 00000000 {user:5} 0 {inode} 1 0 20")
        };
        let ours = "0100007F:C350 0100007F:C351";
        assert_eq!(
            user_in(&line(ours, "01", 1000, 77), local, remote),
            Some(1000)
        );
        assert_eq!(
            user_in(&line(ours, "05", 1000, 77), local, remote),
            Some(1000)
        );
        assert_eq!(user_in(&line(ours, "06", 0, 0), local, remote), None);
        let reversed = "0100007F:C351 0100007F:C350";
        assert_eq!(
            user_in(&line(reversed, "01", 1000, 77), local, remote),
            None
        );
        let mapped = "0000000000000000FFFF00000100007F:C350 0000000000000000FFFF00000100007F:C351";
        assert_eq!(
            user_in(&line(mapped, "01", 1000, 77), local, remote),
            Some(1000)
        );
        for broken in ["", "sl local_address", "0: x y", "0: 0100007F:C350"] {
            assert_eq!(user_in(broken, local, remote), None);
        }
    }
}
