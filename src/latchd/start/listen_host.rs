//! Where a server listens: an address, or a name that is resolved when the server starts. Also the
//! values of the options for the HTTP server.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::os::names;
use crate::os::text::{in_brackets, is_host_name, is_ipv6, reason, split_port};
use crate::shared::cli::values;

pub const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// How long the resolver may take to resolve a name of this host.
const RESOLVER_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenHost {
    Address(IpAddr),
    /// A name, or an IPv6 address with a zone. The system's resolver resolves both.
    Name(String),
}

impl ListenHost {
    /// All addresses with this port, without duplicates. Resolves a name.
    pub fn addresses(&self, port: u16) -> Result<Vec<SocketAddr>, String> {
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
pub fn host(text: &str) -> Result<ListenHost, String> {
    if text == "localhost" {
        return Ok(ListenHost::Address(LOCALHOST));
    }
    let bare = in_brackets(text).unwrap_or(text);
    let is_bracketed = bare.len() < text.len();
    match bare.parse() {
        Ok(address) if !is_bracketed || IpAddr::is_ipv6(&address) => {
            Ok(ListenHost::Address(address))
        }
        Err(_) if is_ipv6(bare) || (!is_bracketed && is_host_name(bare)) => {
            Ok(ListenHost::Name(bare.to_owned()))
        }
        _ => Err("expected an IP address or a name of this host".into()),
    }
}

/// One value of `--http`.
pub type HttpPlaces = Vec<(ListenHost, u16)>;

/// One value of `--http-name`.
pub type HttpNames = Vec<String>;

/// Reads `HOST:PORT`, with brackets around an IPv6 address, or several with commas. With port 0,
/// the system picks a port.
pub fn http_places(text: &str) -> Result<HttpPlaces, String> {
    let place = |text: &str| {
        let (place, port) = split_port(text.trim())?;
        Some((host(place).ok()?, port))
    };
    let places: Option<HttpPlaces> = text.split(',').map(place).collect();
    places.ok_or_else(|| "expected HOST:PORT, such as 127.0.0.1:6389 or [::1]:6389".into())
}

/// Reads the name of a host, or several with commas.
pub fn http_names(text: &str) -> Result<HttpNames, String> {
    let name = |text: &str| {
        let name = text.trim();
        is_host_name(without_last_dot(name)).then(|| name.to_owned())
    };
    let names: Option<HttpNames> = text.split(',').map(name).collect();
    names.ok_or_else(|| "expected the name of a host, such as db1.example.com".into())
}

/// A name with a dot at its end means the same without it, and so it is compared.
pub fn without_last_dot(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

/// Reads a port; 0 means no port.
pub fn http_port(text: &str) -> Result<Option<u16>, String> {
    let port = values::digits(text).ok_or("expected 0-65535")?;
    Ok(Some(port).filter(|port| *port > 0))
}
