//! The values of the options for the HTTP door.

use super::listen_host::{host, is_name, ListenHost};
use crate::cli::values;
use crate::text::in_brackets;

/// One value of `--http`.
pub(super) type HttpPlaces = Vec<(ListenHost, u16)>;

/// One value of `--http-name`.
pub(super) type HttpNames = Vec<String>;

/// Reads `HOST:PORT`, with brackets around an IPv6 address, or several with commas. With port 0,
/// the system picks a port.
pub(super) fn http_places(text: &str) -> Result<HttpPlaces, String> {
    let place = |text: &str| {
        let (place, port) = text.trim().rsplit_once(':')?;
        let is_bare = place.contains(':') && in_brackets(place).is_none();
        let place = host(place).ok().filter(|_| !is_bare)?;
        Some((place, values::digits(port)?))
    };
    let places: Option<HttpPlaces> = text.split(',').map(place).collect();
    places.ok_or_else(|| "expected HOST:PORT, such as 127.0.0.1:6389 or [::1]:6389".into())
}

/// Reads the name of a host, or several with commas.
pub(super) fn http_names(text: &str) -> Result<HttpNames, String> {
    let name = |text: &str| {
        let name = text.trim();
        is_name(without_last_dot(name)).then(|| name.to_owned())
    };
    let names: Option<HttpNames> = text.split(',').map(name).collect();
    names.ok_or_else(|| "expected the name of a host, such as db1.example.com".into())
}

/// A name with a dot at its end means the same without it, and so it is compared.
pub(super) fn without_last_dot(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

/// Reads a port; 0 means no port.
pub(super) fn http_port(text: &str) -> Result<Option<u16>, String> {
    let port = values::digits(text).ok_or("expected 0-65535")?;
    Ok(Some(port).filter(|port| *port > 0))
}
