//! What other users of this host, or other hosts, can read or do although the operator may not know
//! it.

use log::warn;

use super::http::Door;
use super::options::Options;
use super::settings::AuthTokenSource;
use crate::net::listener::Listener;
use crate::sys::trusted;
use crate::text::Escaped;

/// Warns of each such thing.
pub(super) fn warn(
    options: &Options,
    auth: Option<&AuthTokenSource>,
    listeners: &[Listener],
    door: Option<&Door>,
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
    if let (false, Some(addr)) = (auth.is_some(), door.and_then(Door::exposed)) {
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
