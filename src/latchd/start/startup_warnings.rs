//! What a server warns of at its start: what other users of this host, or other hosts, can read or
//! do although the operator may not know it; and variables with our prefixes that belong to no
//! option.

use std::env;
use std::ffi::OsString;

use log::{debug, warn};

use super::options::{Options, SELF};
use super::settings::AuthTokenSource;
use crate::latchd::http::HttpServer;
use crate::os::text::Escaped;
use crate::os::trusted;
use crate::shared::cli::arguments;
use crate::shared::cli::environment::is_service_link;
use crate::shared::net::listener::Listener;

/// Warns of what others can read or do.
pub fn warn(
    options: &Options,
    auth: Option<&AuthTokenSource>,
    listeners: &[Listener],
    door: Option<&HttpServer>,
) {
    if matches!(auth, Some(AuthTokenSource::Argument(_))) {
        warn!("token-in-arguments hint=\"ps shows it; use --auth-token-file\"");
    }
    for (path, is_secret) in options.guarded_files() {
        if let Ok(Some(reason)) = trusted::exposure(path, is_secret) {
            warn!(
                "exposed-file path={} reason=\"{reason}\"",
                Escaped::path(path)
            );
        }
    }
    let is_guarded = auth.is_some() || options.speaks_tls();
    let mut addrs = listeners.iter().filter_map(Listener::tcp_addr);
    let exposed = addrs.find(|addr| !addr.ip().to_canonical().is_loopback());
    if let (false, Some(addr)) = (is_guarded, exposed) {
        warn!(
            "open-to-the-network addr={addr} hint=\"every host that reaches it can take locks; \
             use --auth-token-file, or listen on 127.0.0.1\""
        );
    }
    if let (false, Some(addr)) = (auth.is_some(), door.and_then(HttpServer::exposed)) {
        let what = if options.http_grants {
            "take locks"
        } else {
            "see who holds what"
        };
        warn!(
            "open-to-the-network http={addr} hint=\"every host that reaches it can {what}; \
             use --auth-token-file, or listen on 127.0.0.1\""
        );
    }
}

/// Warns of variables that belong to no option.
pub fn warn_of_unknown_variables() {
    // A variable whose name is not UTF-8 belongs to no option.
    let set = env::vars_os().filter(|(_, value)| !value.is_empty());
    let set = set.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let ours = set.filter(|(name, _)| {
        let prefix = name.split_once('_').map(|(prefix, _)| prefix);
        prefix.is_some_and(|prefix| SELF.prefixes.contains(&prefix))
    });
    let is_link =
        |(name, value): &(String, OsString)| is_service_link(name, &value.to_string_lossy());
    let (links, others): (Vec<_>, Vec<_>) = ours.partition(is_link);
    for name in unknown(others.into_iter().map(|(name, _)| name)) {
        let shown = Escaped(name.as_bytes());
        match advice(&name) {
            Some(advice) => warn!("unknown-variable name={shown} hint=\"{advice}\""),
            None => warn!("unknown-variable name={shown}"),
        }
    }
    if !links.is_empty() {
        let mut names: Vec<_> = links.into_iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        debug!(
            "service-variables names={}",
            Escaped(names.join(",").as_bytes())
        );
    }
}

/// What to use instead of an unknown variable, if it is named like an option of another server.
fn advice(name: &str) -> Option<&'static str> {
    let (_, rest) = name.split_once('_')?;
    let option = format!("--{}", rest.to_ascii_lowercase().replace('_', "-"));
    arguments::advice(&SELF, "", &option)
}

/// The variables in `names`, which all have one of our prefixes, that belong to no option.
fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    /// The variable that a server of a cluster sets for itself when it executes itself again.
    const ITS_OWN: &str = "STARTED_OVER";
    let known = SELF.own.rows.iter().flat_map(|row| row.variables);
    let known_or_own: Vec<&str> = known.chain(&[ITS_OWN]).copied().collect();
    let is_unknown = |name: &String| {
        let (_, rest) = name.split_once('_').unwrap_or_default();
        !known_or_own.contains(&rest)
    };
    let mut unknown: Vec<String> = names.filter(is_unknown).collect();
    unknown.sort_unstable();
    unknown
}
