//! Where a server listens: an address, or a name that is resolved when the server starts.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::net::names;
use crate::text::{in_brackets, reason};

pub(super) const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// How long the resolver may take to resolve a name of this host.
const RESOLVER_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ListenHost {
    Address(IpAddr),
    /// A name, or an IPv6 address with a zone. The system's resolver resolves both.
    Name(String),
}

impl ListenHost {
    /// All addresses with this port, without duplicates. Resolves a name.
    pub(super) fn addresses(&self, port: u16) -> Result<Vec<SocketAddr>, String> {
        let name = match self {
            ListenHost::Address(ip) => return Ok(vec![SocketAddr::new(*ip, port)]),
            ListenHost::Name(name) => name,
        };
        let place = if name.contains(':') {
            format!("[{name}]:{port}")
        } else {
            format!("{name}:{port}")
        };
        let resolved = names::look_up(&place, Instant::now() + RESOLVER_PATIENCE);
        let resolved =
            resolved.map_err(|error| format!("cannot resolve {name}: {}", reason(&error)))?;
        let mut addresses = Vec::new();
        for address in resolved {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Ok(addresses)
    }
}

impl fmt::Display for ListenHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenHost::Address(ip) => ip.fmt(f),
            ListenHost::Name(name) => name.fmt(f),
        }
    }
}

/// Reads an address or a name. An IPv6 address may be in brackets.
pub(super) fn host(text: &str) -> Result<ListenHost, String> {
    if text == "localhost" {
        return Ok(ListenHost::Address(LOCALHOST));
    }
    let bare = in_brackets(text).unwrap_or(text);
    let address: Option<IpAddr> = bare.parse().ok();
    let is_v6 = |bare: &str| bare.parse::<Ipv6Addr>().is_ok();
    let is_zoned = bare.split_once('%').is_some_and(|(ip, zone)| {
        let is_zone = |c: char| c.is_ascii_graphic() && c != '%';
        is_v6(ip) && !zone.is_empty() && zone.chars().all(is_zone)
    });
    let is_bracketed = bare.len() < text.len();
    match address {
        Some(address) if !is_bracketed || address.is_ipv6() => Ok(ListenHost::Address(address)),
        None if is_zoned || (!is_bracketed && is_name(bare)) => {
            Ok(ListenHost::Name(bare.to_owned()))
        }
        _ => Err("expected an IP address or a name of this host".into()),
    }
}

pub(super) fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=253).contains(&text.len()) && text.chars().all(is_part)
}
