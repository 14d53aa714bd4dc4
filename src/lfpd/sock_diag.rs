//! The user of the socket at the other end of a connection within this host. TCP does not tell, but
//! the kernel does: directly where it answers questions about single sockets (sock_diag), otherwise
//! in its lists.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::{
    netlink, recv, send, socket_with, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
};

/// How often the lists are read if the connection is not in them: they may skip a line while other
/// connections come and go.
const MAX_LOOKS: usize = 3;

/// The user whose socket is at `local` and connected to `remote`, if a program still has it open.
/// Both addresses are [`plain`].
pub(super) fn user_of(local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    ask(local, remote).unwrap_or_else(|_| (0..MAX_LOOKS).find_map(|_| look_up(local, remote)))
}

/// The address, as IPv4 if it is an IPv4 address mapped to IPv6.
pub(super) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

// Sizes and places in the messages of netlink(7) and sock_diag(7).
const HEADER_LEN: usize = 16;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IPPROTO_TCP: u8 = 6;
const ANSWER_FAMILY_AT: usize = HEADER_LEN;
const ANSWER_PORTS_AT: usize = HEADER_LEN + 4;
const ANSWER_LOCAL_IP_AT: usize = HEADER_LEN + 8;
const ANSWER_REMOTE_IP_AT: usize = HEADER_LEN + 24;
const ANSWER_USER_AT: usize = HEADER_LEN + 64;
const ANSWER_INODE_AT: usize = HEADER_LEN + 68;

/// Asks the kernel for this one connection. Fails if the kernel does not answer such questions.
fn ask(local: SocketAddr, remote: SocketAddr) -> Result<Option<u32>, Errno> {
    let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
    let socket = socket_with(family, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))?;
    send(&socket, &question(local, remote), SendFlags::empty())?;
    let mut answer = [0; 512];
    // The kernel answers before `send` returns.
    let (len, _) = recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    user_in_answer(&answer[..len], local, remote)
}

fn question(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    const ANY_INTERFACE: [u8; 4] = [0; 4];
    const ANY_COOKIE: [u8; 8] = [0xFF; 8];
    const ANY_STATE: [u8; 4] = [0xFF; 4];
    const LEN: u32 = 72;
    let family = family_byte(match local {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    });
    let mut question = Vec::new();
    question.extend(LEN.to_ne_bytes());
    question.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    question.extend(NLM_F_REQUEST.to_ne_bytes());
    question.extend([0; 8]);
    question.extend([family, IPPROTO_TCP, 0, 0]);
    question.extend(ANY_STATE);
    question.extend(local.port().to_be_bytes());
    question.extend(remote.port().to_be_bytes());
    for ip in [local.ip(), remote.ip()] {
        let end = question.len() + 16;
        match ip {
            IpAddr::V4(ip) => question.extend(ip.octets()),
            IpAddr::V6(ip) => question.extend(ip.octets()),
        }
        question.resize(end, 0);
    }
    question.extend(ANY_INTERFACE);
    question.extend(ANY_COOKIE);
    question
}

fn user_in_answer(
    answer: &[u8],
    local: SocketAddr,
    remote: SocketAddr,
) -> Result<Option<u32>, Errno> {
    let bytes = |at: usize| answer.get(at..at + 4)?.try_into().ok();
    let word = |at: usize| bytes(at).map(u32::from_ne_bytes).ok_or(Errno::BADMSG);
    let kind = answer.get(4..6).ok_or(Errno::BADMSG)?;
    if kind == NLMSG_ERROR.to_ne_bytes() {
        let code = bytes(HEADER_LEN).map_or(0, i32::from_ne_bytes);
        return match Errno::from_raw_os_error(code.wrapping_neg()) {
            Errno::NOENT => Ok(None),
            error => Err(error),
        };
    }
    if kind != SOCK_DIAG_BY_FAMILY.to_ne_bytes() {
        return Err(Errno::BADMSG);
    }
    // If there is no such connection, the kernel names a socket that listens at the address.
    let is_it = ends_in(answer) == Some((local, remote));
    let (user, inode) = (word(ANSWER_USER_AT)?, word(ANSWER_INODE_AT)?);
    Ok((is_it && inode != 0).then_some(user))
}

/// The socket's own address and its peer's, both [`plain`]. An IPv6 socket has mapped addresses,
/// even if the question was about IPv4.
fn ends_in(answer: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let is_ipv4 = *answer.get(ANSWER_FAMILY_AT)? == family_byte(AddressFamily::INET);
    let ip_len = if is_ipv4 { 4 } else { 16 };
    let end = |port_at: usize, ip_at: usize| {
        let port = answer.get(port_at..port_at + 2)?.try_into().ok()?;
        address(answer.get(ip_at..ip_at + ip_len)?, u16::from_be_bytes(port))
    };
    Some((
        end(ANSWER_PORTS_AT, ANSWER_LOCAL_IP_AT)?,
        end(ANSWER_PORTS_AT + 2, ANSWER_REMOTE_IP_AT)?,
    ))
}

fn family_byte(family: AddressFamily) -> u8 {
    family.as_raw().to_le_bytes()[0]
}

/// Looks for the connection in the kernel's lists, which takes milliseconds.
fn look_up(local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    let mut lists = ["/proc/self/net/tcp", "/proc/self/net/tcp6"].into_iter();
    lists.find_map(|list| {
        let lines = BufReader::new(File::open(list).ok()?).lines();
        let mut lines = lines.map_while(Result::ok);
        lines.find_map(|line| user_in(&line, local, remote))
    })
}

/// The user in a line of the list, if the line is this connection's and a program still has it
/// open.
fn user_in(line: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    const FIELD_BEHIND_REMOTE: usize = 4;
    let mut fields = line.split_ascii_whitespace().skip(1);
    let is_it = address_in(fields.next()?)? == local && address_in(fields.next()?)? == remote;
    let user = fields.nth(FIELD_BEHIND_REMOTE)?.parse().ok()?;
    let inode = fields.nth(1)?;
    // The list says root for a socket that has been closed.
    (is_it && inode != "0").then_some(user)
}

/// Reads `0100007F:C351`: words of the address in the host's order of bytes, then the port.
fn address_in(field: &str) -> Option<SocketAddr> {
    let (ip, port) = field.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let starts = (0..ip.len()).step_by(8);
    let words = starts.map(|at| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok());
    let words = words.collect::<Option<Vec<u32>>>()?;
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    address(&bytes, port)
}

/// The address of 4 or 16 bytes, as [`plain`] has it.
fn address(ip: &[u8], port: u16) -> Option<SocketAddr> {
    let ip = match <[u8; 4]>::try_from(ip) {
        Ok(ip) => IpAddr::from(ip),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
    };
    Some(plain(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn both_ways_find_the_user_of_a_connection_until_it_is_closed() {
        let user = rustix::process::geteuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let remote = listener.local_addr().expect("an address");
            let theirs = TcpStream::connect(remote).expect("connect");
            let local = theirs.local_addr().expect("an address");
            let (_ours, _) = listener.accept().expect("accept");
            assert_eq!(look_up(local, remote), Some(user));
            // A kernel need not answer.
            let answers = ask(local, remote).is_ok();
            if answers {
                assert_eq!(ask(local, remote), Ok(Some(user)));
                let elsewhere = SocketAddr::new(remote.ip(), 1);
                assert_eq!(ask(remote, elsewhere), Ok(None), "a listener");
                assert_eq!(ask(elsewhere, elsewhere), Ok(None));
            }
            drop(theirs);
            // A program that another test is starting has a copy of it until it executes.
            let over = Instant::now() + Duration::from_secs(10);
            while look_up(local, remote).is_some() && Instant::now() < over {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(look_up(local, remote), None);
            if answers {
                assert_eq!(ask(local, remote), Ok(None));
            }
        }
    }

    #[test]
    fn nonsense_from_the_kernel_is_no_user() {
        let address: SocketAddr = "127.0.0.1:1799".parse().expect("an address");
        for len in 0..200 {
            for byte in [0, 2, 20, 255] {
                assert_eq!(
                    user_in_answer(&vec![byte; len], address, address).unwrap_or(None),
                    None
                );
            }
        }
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
