//! Options of dflockd that mean something else here, or nothing.

use crate::cli::arguments::Origins;

/// The options that have no effect, with the reason.
const WITHOUT_EFFECT: [(&str, &str); 8] = [
    ("--lease-sweep-interval", "leases end on time without it"),
    (
        "--http-session-idle-timeout",
        "a session over HTTP may be idle for 40 seconds",
    ),
    ("--http-max-sessions", "--http-max-waiting limits them"),
    ("--http-max-sessions-per-ip", PER_ADDRESS),
    ("--http-max-connections-per-ip", PER_ADDRESS),
    ("--http-rate-limit-per-ip", NO_RATES),
    ("--http-rate-limit-burst", NO_RATES),
    (
        "--http-cors-allowed-origins",
        "no web page of another host is served",
    ),
];

const PER_ADDRESS: &str = "--max-connections-per-ip limits them";
const NO_RATES: &str = "what waits over HTTP is limited, but no rate is";

/// Refuses the option that makes a server of dflockd a member of its cluster. Alone, the server
/// would grant what other members grant, too.
pub(super) fn check(origins: &Origins) -> Result<(), String> {
    match origins.get("--raft-dir") {
        Some(origin) => Err(format!(
            "{origin}: a cluster of dflockd cannot be joined; see latchd-cluster(7)"
        )),
        None => Ok(()),
    }
}

/// The options and variables that are set and have no effect, with the reason.
pub(super) fn without_effect(origins: &Origins) -> Vec<(String, &'static str)> {
    let origin = |(option, why): &(&str, &'static str)| {
        let origin = origins.get(option)?;
        Some((origin.to_owned(), *why))
    };
    WITHOUT_EFFECT.iter().filter_map(origin).collect()
}
