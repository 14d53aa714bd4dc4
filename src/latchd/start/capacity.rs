//! How many connections the descriptors, memory maps and memory of the machine allow, and how much
//! memory the server takes when all caps are reached.

use std::fs;

use log::warn;
use rustix::process::{getrlimit, Resource};

use crate::latchd::table::{MAX_HISTORIES, PER_HISTORY};
use crate::os::thread::STACK_LEN;
use crate::shared::daemon::raise_descriptor_limit;
use crate::shared::log::MAX_QUEUED_LINES;

use super::host_memory::{as_count, memory, PER_GRANT, PER_WAITER};
use super::options::Options;
use crate::latchd::http;

/// The number of descriptors kept free for purposes other than connections.
const RESERVED_DESCRIPTORS: u64 = 64;

/// The number of memory maps kept free for purposes other than connections.
const RESERVED_MAPS: u64 = 2000;
/// The number of memory maps that the thread of a connection takes.
const MAPS_PER_THREAD: u64 = 4;

/// Connections get 1/`STACK_SHARE` of a limited address space.
const STACK_SHARE: u64 = 2;

/// The address space that a connection takes in addition to its stack, in bytes.
const HEAP_PER_CONNECTION: u64 = 32 * 1024;

/// Connections get 1/`CONNECTION_SHARE` of the memory of the machine or the cgroup.
const CONNECTION_SHARE: u64 = 4;

/// The maximum memory of a connection in bytes: the used part of its stack, its buffers, and a page
/// of statistics that its peer has not read.
const PER_CONNECTION: u64 = 64 * 1024;

/// The maximum memory that TLS adds to a connection, in bytes. It holds the state of the protocol,
/// and either an incomplete handshake message or four records: one received, one decrypted, one to
/// be sent and one encrypted.
const PER_TLS: u64 = 96 * 1024;

/// The maximum memory of a session over HTTP, in bytes.
const PER_SESSION: u64 = 1024;

/// By default, requests that wait over HTTP get a place for every `WAITING_SHARE` connections.
const WAITING_SHARE: usize = 4;

/// The maximum memory of a key in the table, in bytes.
const PER_KEY: u64 = 1024;
/// The maximum memory, in bytes, of the client tag stored for a grant without a connection.
const PER_TAG: u64 = 192;

/// The maximum memory of a queued log line about a grant, in bytes. Every byte of the key and of
/// the tag may need an escape.
const PER_LOG_LINE: u64 = 2048;

/// The maximum memory of slot numbers in bytes, for each grant that the cap allows. There may be
/// twice as many numbers as grants: each grant of one slot may have a number, and all grants of
/// several slots together may have as many numbers as the cap allows grants.
const PER_NUMBER: u64 = 128;

/// The memory that the program takes without connections, claims and log lines, in bytes.
const AT_REST: u64 = 4 * 1024 * 1024;

/// The cap on connections: the configured number, or else the number that the machine allows.
/// Neither exceeds what the address space allows. Raises the limit of descriptors. With a secret,
/// each connection needs more memory, because its line buffer must hold the secret. In a cluster,
/// each connection needs two descriptors, because the server may pass it on.
pub fn max_connections(options: &Options, secret_len: usize) -> usize {
    let heap = HEAP_PER_CONNECTION + for_tls(options);
    let descriptors_each = 1 + u64::from(options.etcd.is_some());
    let allowed = connection_capacity(heap, descriptors_each);
    let Some(wanted) = options.max_connections else {
        let each = per_connection(options, secret_len);
        let of_memory = as_count(memory() / CONNECTION_SHARE / each);
        return beside_http(options, allowed.min(of_memory));
    };
    let max_connections = wanted.min(address_space_capacity(heap));
    let allowed = beside_http(options, allowed);
    if wanted > allowed {
        warn!("few-descriptors max_connections={max_connections} allowed={allowed}");
    }
    max_connections
}

/// How many of the connections that the machine allows are left beside requests that wait over
/// HTTP.
fn beside_http(options: &Options, allowed: usize) -> usize {
    match options.http_max_waiting {
        Some(waiting) => allowed.saturating_sub(waiting).max(1),
        None if options.http_grants => allowed - allowed / (WAITING_SHARE + 1),
        None => allowed,
    }
}

/// The maximum number of requests that wait over HTTP, and of sessions.
pub fn max_waiting(options: &Options, max_connections: usize) -> usize {
    if !options.http_grants {
        return 0;
    }
    let default = (max_connections / WAITING_SHARE).max(1);
    options.http_max_waiting.unwrap_or(default)
}

/// The memory in bytes that the server takes when all caps are reached.
pub fn worst_case(options: &Options, max_connections: usize, secret_len: usize) -> u64 {
    let door = if !options.http.is_empty() || options.http_port.is_some() {
        http::MAX_THREADS
    } else {
        0
    };
    let lines = if options.log_grants {
        MAX_QUEUED_LINES
    } else {
        0
    };
    let waiting = max_waiting(options, max_connections);
    let parts = [
        (lines, PER_LOG_LINE),
        (door, per_connection(options, secret_len)),
        (waiting, per_connection(options, secret_len)),
        (waiting, PER_SESSION),
        (max_connections, per_connection(options, secret_len)),
        (options.max_locks, PER_KEY),
        (options.max_slots, PER_GRANT + PER_TAG + PER_NUMBER),
        (options.max_waiters_total, PER_WAITER),
        (MAX_HISTORIES + options.expected().count(), PER_HISTORY),
    ];
    parts.iter().fold(AT_REST, |sum, (count, each)| {
        sum.saturating_add((*count as u64).saturating_mul(*each))
    })
}

fn per_connection(options: &Options, secret_len: usize) -> u64 {
    PER_CONNECTION + for_tls(options) + secret_len as u64
}

fn for_tls(options: &Options) -> u64 {
    if options.speaks_tls() {
        PER_TLS
    } else {
        0
    }
}

/// The number of connections that descriptors, memory maps and address space allow, if each
/// connection takes `heap` bytes and `descriptors_each` descriptors.
fn connection_capacity(heap: u64, descriptors_each: u64) -> usize {
    let descriptors = raise_descriptor_limit(u64::MAX);
    let for_connections = descriptors
        .saturating_sub(RESERVED_DESCRIPTORS)
        .max(descriptors / 2)
        / descriptors_each;

    let text = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let maps: Option<u64> = text.and_then(|text| text.trim().parse().ok());
    let for_threads = maps.unwrap_or(65_530).saturating_sub(RESERVED_MAPS) / MAPS_PER_THREAD;

    as_count(for_connections.min(for_threads)).min(address_space_capacity(heap))
}

/// The number of connections that a limited address space or data segment allows. If connections
/// took all of it, the next allocation would end the process.
fn address_space_capacity(heap: u64) -> usize {
    let limits = [Resource::As, Resource::Data].map(|resource| getrlimit(resource).current);
    let address_space = limits.into_iter().flatten().min().unwrap_or(u64::MAX);
    as_count(address_space / STACK_SHARE / (STACK_LEN as u64 + heap))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    use crate::latchd::start::options;
    use crate::shared::cli::arguments::Parsed;
    use crate::shared::cli::rows::TLS;

    #[test]
    fn the_worst_case_is_the_sum_of_all_caps() {
        let worst_case = |arguments: &[&str], connections, secret_len| {
            let arguments = arguments.iter().map(OsString::from);
            match options::read(arguments, &|_| None).0 {
                Parsed::Run(options) => worst_case(&options, connections, secret_len),
                other => panic!("{other:?}"),
            }
        };
        let caps = ["--max-locks=3", "--max-slots=2", "--max-waiters-total=1"];
        let histories = MAX_HISTORIES as u64 * PER_HISTORY;
        let table = 3 * PER_KEY + 2 * (PER_GRANT + PER_TAG + PER_NUMBER) + PER_WAITER + histories;
        assert_eq!(worst_case(&caps, 0, 0), AT_REST + table);
        let connections = 10 * (PER_CONNECTION + 1000);
        assert_eq!(worst_case(&caps, 10, 1000), AT_REST + connections + table);
        if TLS.is_built {
            let tls = [&caps[..], &["--tls-cert=here", "--tls-key=here"]].concat();
            let with_tls = worst_case(&tls, 10, 1000);
            assert_eq!(with_tls, AT_REST + connections + table + 10 * PER_TLS);
        }
        let logged = [&caps[..], &["--log-grants"]].concat();
        let lines = MAX_QUEUED_LINES as u64 * PER_LOG_LINE;
        assert_eq!(worst_case(&logged, 0, 0), AT_REST + table + lines);
        let expect = [&caps[..], &["--expect=a=1h,b=1h"]].concat();
        let two = 2 * PER_HISTORY;
        assert_eq!(worst_case(&expect, 0, 0), AT_REST + table + two);
        let http = [&caps[..], &["--http-port=1"]].concat();
        let door = http::MAX_THREADS as u64 * PER_CONNECTION;
        assert_eq!(
            worst_case(&http, 40, 0),
            AT_REST + table + door + 40 * PER_CONNECTION
        );
        for (option, waiting) in [("--debug", 10), ("--http-max-waiting=3", 3)] {
            let grants = [&http[..], &["--http-grants", option]].concat();
            let requests = waiting * (PER_CONNECTION + PER_SESSION);
            let without = worst_case(&http, 40, 0);
            assert_eq!(worst_case(&grants, 40, 0), without + requests, "{option}");
        }
        let endless = worst_case(&["--max-slots=4294967295"], 10, 1000);
        assert!(endless > 1 << 40);
        assert!(usize::BITS == 32 || worst_case(&caps, usize::MAX, 0) == u64::MAX);
    }
}
