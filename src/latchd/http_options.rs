//! The options of the HTTP door.

use super::http::DoorPlace;
use super::options::{host, ListenHost, Options, Unless};
use crate::cli::arguments::Origins;
use crate::cli::values;
use crate::text::{host_and_port, in_brackets};

/// The value of `--http`.
pub(super) type HttpPlace = (ListenHost, u16);

/// Where the door will listen, if the options ask for a door.
pub(super) fn resolve(options: &Options, origins: &Origins) -> Result<Option<DoorPlace>, String> {
    let (option, (host, port)) = match (&options.http, options.http_port) {
        (Some(place), _) => ("--http", place.clone()),
        (None, Some(port)) => ("--http-port", (options.host.clone(), port)),
        (None, None) => return Ok(None),
    };
    let origin = origins.get(option).unwrap_or(option);
    let advertised = options.advertise.as_deref().and_then(host_and_port);
    let advertised = advertised.map(|(host, _)| host.to_owned());
    let names = [host.to_string(), options.host.to_string()];
    let names = names.into_iter().chain(advertised).collect();
    DoorPlace::wanted_by(origin, host, port, names).map(Some)
}

/// Reads `HOST:PORT`, with brackets around an IPv6 address. With port 0, the system picks a port.
pub(super) fn http_place(text: &str) -> Result<HttpPlace, String> {
    let place = text.rsplit_once(':').and_then(|(place, port)| {
        let is_bare = place.contains(':') && in_brackets(place).is_none();
        let place = host(place).ok().filter(|_| !is_bare)?;
        Some((place, values::digits(port)?))
    });
    place.ok_or_else(|| "expected HOST:PORT, such as 127.0.0.1:6389 or [::1]:6389".into())
}

/// Reads a port; 0 means no port.
pub(super) fn http_port(text: &str) -> Result<Unless<u16>, String> {
    let port = values::digits(text).ok_or("expected 0-65535")?;
    Ok(Some(port).filter(|port| *port > 0))
}
