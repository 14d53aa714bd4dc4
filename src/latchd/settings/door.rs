//! What the options for the HTTP door mean.

use crate::cli::arguments::Origins;
use crate::latchd::http::DoorPlaces;
use crate::latchd::http_options::{without_last_dot, HttpPlaces};
use crate::latchd::listen_host::ListenHost;
use crate::latchd::options::Options;
use crate::text::host_and_port;

/// Where the door will listen, if the options ask for a door. Refuses options for a door without
/// one.
pub(super) fn resolve(options: &Options, origins: &Origins) -> Result<Option<DoorPlaces>, String> {
    let host = options.http_host.as_ref().unwrap_or(&options.host);
    let beside = options.http_port.map(|port| (host.clone(), port));
    let places = options.http.iter().flatten().cloned().chain(beside);
    let places: HttpPlaces = places.collect();
    if let (false, Some(origin)) = (options.http_grants, origins.get("--http-max-waiting")) {
        return Err(format!("{origin}: needs --http-grants"));
    }
    if places.is_empty() {
        let grants = origins.get("--http-grants").filter(|_| options.http_grants);
        return match origins.get("--http-name").or(grants) {
            Some(origin) => Err(format!("{origin}: needs --http or --http-port")),
            None => Ok(None),
        };
    }
    let advertised = options.advertise.as_deref().and_then(host_and_port);
    let advertised = advertised.map(|(host, _)| host.to_owned());
    let hosts = places.iter().map(|(host, _)| host).chain([&options.host]);
    let names = hosts.map(ListenHost::to_string).chain(advertised);
    let names = names.chain(options.http_name.iter().flatten().cloned());
    let names = names.map(|name| without_last_dot(&name).to_owned());
    Ok(Some(DoorPlaces {
        names: names.collect(),
        places,
    }))
}
