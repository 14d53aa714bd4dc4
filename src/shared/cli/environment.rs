//! Variables in the environment of the programs.
//!
//! Those with the locks of the `run`s around a process: each `run` names them to its command, so
//! that a command further in does not wait for a lock that can only be released after it. And those
//! that Kubernetes sets for each service of a namespace: a service called `latchd` sets
//! `LATCHD_PORT=tcp://10.96.0.10:6388` in every pod, and other variables with the same prefix. They
//! are not meant for a program that has the service's name.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// The maximum number of locks in the variable, and its maximum length in bytes. Without them, a
/// command that starts itself again and again, each time under a new lock, would at last have too
/// large an environment to start: the kernel takes 128 KiB in a variable.
const MAX_COUNT: usize = 64;
const MAX_LEN: usize = 64 * 1024;

/// Returns the locks that the variable of this process names, the innermost first, but at most
/// [`MAX_COUNT`].
pub fn locks_around(variable: &str) -> Vec<OsString> {
    let list = env::var_os(variable).unwrap_or_default().into_vec();
    let locks = list.split(|byte| *byte == b'\n');
    let locks = locks.filter(|lock| !lock.is_empty()).take(MAX_COUNT);
    locks
        .map(|lock| OsStr::from_bytes(lock).to_owned())
        .collect()
}

/// Returns the value of the variable for a command that runs under `own` locks, too: one lock in a
/// line.
pub fn with_locks_around(variable: &str, own: Vec<OsString>) -> OsString {
    let locks = own.into_iter().chain(locks_around(variable));
    let mut len = 0;
    let locks = locks.take(MAX_COUNT).take_while(|lock| {
        len += lock.len() + 1;
        len <= MAX_LEN
    });
    locks.collect::<Vec<_>>().join(OsStr::new("\n"))
}

/// The protocols of a service's ports, as they begin a URL and as they are in a variable's name.
const PROTOCOLS: [(&str, &str); 3] = [("tcp://", "TCP"), ("udp://", "UDP"), ("sctp://", "SCTP")];

/// What may follow `_PORT_6388_TCP` in a name.
const PARTS: [&str; 4] = ["", "_PROTO", "_PORT", "_ADDR"];

/// Whether Kubernetes has set this variable to tell a pod where a service is.
pub fn is_service_link(name: &str, value: &str) -> bool {
    let is_url = PROTOCOLS.iter().any(|(url, _)| value.starts_with(url));
    (name.ends_with("_PORT") && is_url)
        || name.ends_with("_SERVICE_HOST")
        || follows(name, "_SERVICE_PORT", |rest| {
            rest.is_empty() || rest.starts_with('_')
        })
        || follows(name, "_PORT_", |rest| {
            let (number, rest) = rest.split_once('_').unwrap_or_default();
            let is_number = !number.is_empty() && number.bytes().all(|it| it.is_ascii_digit());
            is_number
                && PROTOCOLS.iter().any(|(_, word)| {
                    let part = rest.strip_prefix(word);
                    part.is_some_and(|part| PARTS.contains(&part))
                })
        })
}

/// Whether `is_meant` accepts what follows `word` at any of its places in `name`.
fn follows(name: &str, word: &str, is_meant: impl Fn(&str) -> bool) -> bool {
    let mut places = name.match_indices(word);
    places.any(|(at, _)| is_meant(&name[at + word.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_of_a_service_are_told_from_others() {
        for (name, value) in [
            ("LATCHD_PORT", "tcp://10.96.0.10:6388"),
            ("LATCHD_PORT", "udp://[fd00::1]:6388"),
            ("LATCHD_HTTP_PORT", "sctp://10.96.0.10:80"),
            ("LATCHD_SERVICE_HOST", "10.96.0.10"),
            ("LATCHD_SERVICE_PORT", "6388"),
            ("LATCHD_SERVICE_PORT_HTTP_METRICS", "80"),
            ("LATCHD_PORT_6388_TCP", "tcp://10.96.0.10:6388"),
            ("LATCHD_PORT_6388_TCP_PROTO", "tcp"),
            ("LATCHD_PORT_6388_UDP_PORT", "6388"),
            ("LATCHD_PORT_6388_SCTP_ADDR", "10.96.0.10"),
            ("LATCH_OLD_PORT_1_PORT_6388_TCP", "tcp://10.96.0.10:6388"),
        ] {
            assert!(is_service_link(name, value), "{name}={value}");
        }
        for (name, value) in [
            ("LATCHD_PORT", "6388"),
            ("LATCHD_PORT", "63x8"),
            ("LATCHD_PORT", "tcp:6388"),
            ("LATCHD_HOST", "tcp://10.96.0.10:6388"),
            ("LATCHD_SERVICE_PORTS", "1"),
            ("LATCHD_PORT_6388", "1"),
            ("LATCHD_PORT_X_TCP", "1"),
            ("LATCHD_PORT__TCP", "1"),
            ("LATCHD_PORT_6388_TCPS", "1"),
            ("LATCHD_PORT_6388_TCP_ADDRESS", "1"),
        ] {
            assert!(!is_service_link(name, value), "{name}={value}");
        }
    }
}
