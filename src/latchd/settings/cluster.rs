//! What the options of a server in a cluster mean: see latchd-cluster(7).

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use crate::cli::arguments::Origins;
use crate::cli::rows::CLUSTER;
use crate::cluster::ClusterSettings;
use crate::net::tls::need;
use crate::text::{host_and_port, invalid_value};

use super::{both_or_none, exclusive};
use crate::latchd::listen_host::ListenHost;
use crate::latchd::options::Options;

/// The settings that the options describe, before any file is read; `None` for a single server.
/// `inherits` says whether LISTEN_FDS names sockets for this process.
pub(super) fn resolve(
    options: &Options,
    origins: &Origins,
    inherits: bool,
) -> Result<Option<ClusterSettings>, String> {
    let mut rows = Options::COMMAND
        .rows
        .iter()
        .filter(|row| row.needs(CLUSTER));
    let Some(given) = rows.find_map(|row| origins.get(&row.long())) else {
        return Ok(None);
    };
    let mut settings = ClusterSettings::wanted_by(given)?;
    let Some(list) = &options.etcd else {
        return Err(format!("{given}: needs --etcd"));
    };
    let etcd = origins.get("--etcd").unwrap_or("--etcd");
    refuse_rivals(options, origins, inherits, etcd)?;
    check_tls(origins)?;
    let members = members(list, etcd)?;
    let speaks_tls = members.iter().any(|(_, speaks_tls)| *speaks_tls);
    settings.set_user(user(options, origins)?);
    settings.set_tls(
        options.etcd_cacert.clone(),
        tls_files(options, origins, speaks_tls)?,
    );
    for (address, speaks_tls) in members {
        settings.add_member(address, speaks_tls);
    }
    let advertise = advertise(options, origins)?;
    settings.set_service(advertise, options.etcd_prefix.clone(), options.etcd_ttl);
    Ok(Some(settings))
}

/// Refuses options that make no sense in a cluster: etcd keeps the fences, the server runs all the
/// time, and the other servers must be able to find it.
fn refuse_rivals(
    options: &Options,
    origins: &Origins,
    inherits: bool,
    etcd: &str,
) -> Result<(), String> {
    let rivals = [
        ("--fence-state-file", options.fence_state_file.is_some()),
        ("--inetd", options.inetd),
        ("--idle-exit", options.idle_exit.is_some()),
    ];
    if let Some((rival, _)) = rivals.iter().find(|(_, is_given)| *is_given) {
        return Err(exclusive(origins.get(rival).unwrap_or(rival), etcd));
    }
    if inherits {
        return Err(exclusive(etcd, "LISTEN_FDS"));
    }
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

/// Refuses the options for TLS with etcd in a build without TLS. Any build refuses a certificate
/// without its key, and a key without its certificate; this is checked first.
fn check_tls(origins: &Origins) -> Result<(), String> {
    both_or_none(origins, ["--etcd-cert", "--etcd-key"])?;
    let mut tls = ["--etcd-cacert", "--etcd-cert"].into_iter();
    let origin = tls.find_map(|option| origins.get(option));
    origin.map_or(Ok(()), need)
}

/// The certificate file and the key file for TLS with etcd. Refuses any file for TLS with etcd if
/// no member speaks TLS.
fn tls_files(
    options: &Options,
    origins: &Origins,
    speaks_tls: bool,
) -> Result<Option<(PathBuf, PathBuf)>, String> {
    let files = ["--etcd-cacert", "--etcd-cert", "--etcd-key"];
    match files.iter().find_map(|option| origins.get(option)) {
        Some(stray) if !speaks_tls => {
            let why = "no address of --etcd begins with https://";
            Err(format!("{stray}: {why}"))
        }
        _ => Ok(options.etcd_cert.clone().zip(options.etcd_key.clone())),
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
    match host_and_port(text.trim()) {
        Some((host, port)) if is_somewhere(host) => Ok(format!("{host}:{port}")),
        _ => Err(invalid_value(
            text,
            origin,
            "expected HOST:PORT, where the other servers reach this one",
        )),
    }
}

fn user(options: &Options, origins: &Origins) -> Result<Option<(String, PathBuf)>, String> {
    both_or_none(origins, ["--etcd-user", "--etcd-password-file"])?;
    let (user, file) = (&options.etcd_user, &options.etcd_password_file);
    Ok(user.clone().zip(file.clone()))
}
