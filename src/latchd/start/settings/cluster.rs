//! What the options of a server in a cluster mean: see latchd-cluster(7).

use std::net::{IpAddr, SocketAddr};

use crate::latchd::cluster::ClusterSettings;
use crate::os::text::{host_and_port, invalid_value};
use crate::os::tls::need;
use crate::shared::cli::arguments::Origins;

use crate::latchd::start::listen_host::ListenHost;
use crate::latchd::start::options::Options;

/// The settings that the options describe, before any file is read; `None` for a single server.
/// `inherits` says whether LISTEN_FDS names sockets for this process.
pub fn resolve(
    options: &Options,
    origins: &Origins,
    inherits: bool,
) -> Result<Option<ClusterSettings>, String> {
    let (Some(list), Some(etcd)) = (&options.etcd, origins.get("--etcd")) else {
        return Ok(None);
    };
    let mut settings = ClusterSettings::wanted_by(etcd)?;
    if inherits {
        return Err(format!("{etcd}: cannot be given together with LISTEN_FDS"));
    }
    check_sockets(options, origins)?;
    let files = ["--etcd-cacert", "--etcd-cert", "--etcd-key"];
    let file = files.iter().find_map(|option| origins.get(option));
    file.map_or(Ok(()), need)?;
    let members = members(list, etcd)?;
    let speaks_tls = members.iter().any(|(_, speaks_tls)| *speaks_tls);
    if let Some(stray) = file.filter(|_| !speaks_tls) {
        return Err(format!(
            "{stray}: no address of --etcd begins with https://"
        ));
    }
    let user = options.etcd_user.clone();
    settings.set_user(user.zip(options.etcd_password_file.clone()));
    let certificate = options.etcd_cert.clone().zip(options.etcd_key.clone());
    settings.set_tls(options.etcd_cacert.clone(), certificate);
    for (address, speaks_tls) in members {
        settings.add_member(address, speaks_tls);
    }
    let advertise = advertise(options, origins)?;
    settings.set_service(advertise, options.etcd_prefix.clone(), options.etcd_ttl);
    Ok(Some(settings))
}

/// Refuses sockets that make no sense in a cluster: the other servers must be able to find this
/// one, and to pass clients on.
fn check_sockets(options: &Options, origins: &Origins) -> Result<(), String> {
    if options.speaks_tls() && options.unix.is_some() {
        let unix = origins.get("--unix").unwrap_or("--unix");
        return Err(format!(
            "{unix}: with --etcd and TLS there is no Unix socket: what its clients send in clear \
             cannot be passed on"
        ));
    }
    match options.port {
        Some(1..) => Ok(()),
        _ => {
            let port = origins.get("--port").unwrap_or("--port");
            Err(format!(
                "{port}: a server with --etcd needs a port of its own"
            ))
        }
    }
}

/// Reads the members of etcd from a comma-separated list. Returns the `HOST:PORT` of each member,
/// and whether it had the prefix `https://`.
fn members(list: &str, origin: &str) -> Result<Vec<(String, bool)>, String> {
    let member = |text: &str| {
        let secured = text.strip_prefix("https://");
        if secured.is_some() {
            need(&format!("{origin}: {text}"))?;
        }
        let wrong = || invalid_value(text, origin, "expected HOST:PORT or https://HOST:PORT");
        let place = host_and_port(secured.unwrap_or(text));
        let (host, port) = place.ok_or_else(wrong)?;
        Ok((format!("{host}:{port}"), secured.is_some()))
    };
    list.split(',').map(|text| member(text.trim())).collect()
}

/// The address at which the other servers reach this one.
fn advertise(options: &Options, origins: &Origins) -> Result<String, String> {
    let Some(text) = &options.advertise else {
        let port = options.port.unwrap_or_default();
        return match &options.host {
            ListenHost::Address(ip) if !ip.is_loopback() && !ip.is_unspecified() => {
                Ok(SocketAddr::new(*ip, port).to_string())
            }
            host => Err(format!(
                "--advertise: expected with --etcd where --host is {host}: the other servers may \
                 not reach that"
            )),
        };
    };
    let origin = origins.get("--advertise").unwrap_or("--advertise");
    let is_somewhere = |host: &str| {
        let ip = host.trim_start_matches('[').trim_end_matches(']').parse();
        !ip.as_ref().is_ok_and(IpAddr::is_unspecified)
    };
    match host_and_port(text) {
        Some((host, port)) if is_somewhere(host) => Ok(format!("{host}:{port}")),
        _ => Err(invalid_value(
            text,
            origin,
            "expected HOST:PORT, where the other servers reach this one",
        )),
    }
}
