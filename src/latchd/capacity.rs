//! What the machine allows: connections within descriptors, memory maps and memory, and the memory
//! that all caps together can take.

use std::env;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use log::warn;
use rustix::process::{getrlimit, Resource};
use rustix::system::sysinfo;
use rustix::thread::{self, set_name};

use crate::log::MAX_QUEUED_LINES;
use crate::server::raise_descriptor_limit;
use crate::sys::exec::exec;
use crate::sys::thread::STACK_LEN;

use super::http;
use super::options::Options;

/// Descriptors that are not for connections.
const RESERVED_DESCRIPTORS: u64 = 64;

/// Memory maps that are not for connections, and how many the thread of a connection takes.
const RESERVED_MAPS: u64 = 2000;
const MAPS_PER_THREAD: u64 = 4;

/// Stacks get 1/`STACK_SHARE` of a limited address space.
const STACK_SHARE: u64 = 2;

/// The address space in bytes that a connection takes beside its stack.
const HEAP_PER_CONNECTION: u64 = 32 * 1024;

/// Connections get 1/`CONNECTION_SHARE` of the memory of the machine or the cgroup.
const CONNECTION_SHARE: u64 = 4;

/// By default, slots and waiters each get 1/`TABLE_SHARE` of the memory, and are at most this many.
const TABLE_SHARE: u64 = 32;
const MOST_IN_TABLE: usize = 65_536;

/// The most memory in bytes that a connection takes: the used part of its stack, its buffers, and a
/// page of statistics that its peer does not read.
const PER_CONNECTION: u64 = 64 * 1024;

/// What TLS adds to that: what has arrived of a message of the handshake, or a record each of what
/// has arrived, is decrypted, is to be sent and is encrypted; and the state of the protocol.
const PER_TLS: u64 = 96 * 1024;

/// The most memory in bytes that a key, a slot and a waiter take in the table.
const PER_KEY: u64 = 1024;
const PER_SLOT: u64 = 256;
const PER_WAITER: u64 = 256;

/// What the tag of its client adds to a slot that no connection has.
const PER_TAG: u64 = 192;

/// The most memory in bytes that a line about a grant takes in the log's queue: all of a key and of
/// a tag can be escaped.
const PER_LOG_LINE: u64 = 2048;

/// What the numbers of slots add: for each slot that may be held there is one, and another one of
/// the grants of several.
const PER_NUMBER: u64 = 128;

/// The memory in bytes that the program takes without any of these.
const AT_REST: u64 = 4 * 1024 * 1024;

/// The memory controllers: the name in the second field of a line of /proc/self/cgroup (empty in
/// version 2), the directory where the controller is mounted, and the file with the limit.
const CONTROLLERS: [(&str, &str, &str); 3] = [
    ("memory", "memory", "memory.limit_in_bytes"),
    ("", "", "memory.max"),
    ("", "unified", "memory.max"),
];

/// The cap on connections: what is wanted, or what the machine allows, and in any case what the
/// address space allows. Raises the limit of descriptors. A secret makes the lines longer that
/// clients send. A server that may pass connections on needs two descriptors for each.
pub(super) fn max_connections(options: &Options, secret_len: usize) -> usize {
    let heap = HEAP_PER_CONNECTION + for_tls(options);
    let descriptors_each = 1 + u64::from(options.etcd.is_some());
    let allowed = connection_capacity(heap, descriptors_each);
    let Some(wanted) = options.max_connections else {
        return allowed.min(memory_capacity(per_connection(options, secret_len)));
    };
    let max_connections = wanted.min(address_space_capacity(heap));
    if wanted > allowed {
        warn!("few-descriptors max_connections={max_connections} allowed={allowed}");
    }
    max_connections
}

/// The most memory in bytes that the server takes when all caps are reached.
pub(super) fn worst_case(options: &Options, max_connections: usize, secret_len: usize) -> u64 {
    let door = match options.http.is_some() || options.http_port.is_some() {
        true => http::MAX_CONNECTIONS,
        false => 0,
    };
    let lines = match options.log_grants {
        true => MAX_QUEUED_LINES,
        false => 0,
    };
    let parts = [
        (lines, PER_LOG_LINE),
        (door, per_connection(options, secret_len)),
        (max_connections, per_connection(options, secret_len)),
        (options.max_locks, PER_KEY),
        (options.max_slots, PER_SLOT + PER_TAG + PER_NUMBER),
        (options.max_waiters_total, PER_WAITER),
    ];
    parts.iter().fold(AT_REST, |sum, (count, each)| {
        sum.saturating_add((*count as u64).saturating_mul(*each))
    })
}

fn per_connection(options: &Options, secret_len: usize) -> u64 {
    PER_CONNECTION + for_tls(options) + secret_len as u64
}

fn for_tls(options: &Options) -> u64 {
    match options.speaks_tls() {
        true => PER_TLS,
        false => 0,
    }
}

/// How many connections descriptors, memory maps and address space allow, if each takes `heap`
/// bytes and `descriptors_each` descriptors.
fn connection_capacity(heap: u64, descriptors_each: u64) -> usize {
    let descriptors = raise_descriptor_limit(u64::MAX);
    let for_connections = descriptors
        .saturating_sub(RESERVED_DESCRIPTORS)
        .max(descriptors / 2)
        / descriptors_each;

    let maps = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let maps: Option<u64> = maps.and_then(|maps| maps.trim().parse().ok());
    let for_threads = maps.unwrap_or(65_530).saturating_sub(RESERVED_MAPS) / MAPS_PER_THREAD;

    as_count(for_connections.min(for_threads)).min(address_space_capacity(heap))
}

/// How many connections a limited address space or data segment allows. If stacks took all of it,
/// the next allocation would end the process.
fn address_space_capacity(heap: u64) -> usize {
    let limits = [Resource::As, Resource::Data].map(|resource| getrlimit(resource).current);
    let address_space = limits.into_iter().flatten().min().unwrap_or(u64::MAX);
    as_count(address_space / STACK_SHARE / (STACK_LEN as u64 + heap))
}

/// How many connections a quarter of the memory allows, if each takes `per_connection`.
fn memory_capacity(per_connection: u64) -> usize {
    as_count(memory() / CONNECTION_SHARE / per_connection)
}

/// The cap on slots, and that on waiters, where nobody sets it.
pub(super) fn table_cap() -> usize {
    const { assert!(PER_SLOT == PER_WAITER) };
    as_count(memory() / TABLE_SHARE / PER_SLOT).min(MOST_IN_TABLE)
}

/// The memory in bytes of the machine or the cgroup, whichever is less.
pub(super) fn memory() -> u64 {
    let of_process = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_cgroups = cgroup_limit(Path::new("/sys/fs/cgroup"), &of_process);
    let machine = sysinfo();
    let of_machine = (machine.totalram as u64).saturating_mul(u64::from(machine.mem_unit));
    of_machine.min(of_cgroups.unwrap_or(u64::MAX))
}

/// A server without connections would be useless, so at least one.
fn as_count(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX).max(1)
}

/// Starts the program again with settings for the C library's allocator. Returns if they are there
/// already, or if it fails.
///
/// A large block is to go back to the system when it is freed. By default it does not after the
/// first one, so the memory of a burst of clients would stay. Where the address space is limited,
/// all threads share an arena: each would get one of 64 MB.
pub(super) fn reexec_with_malloc_settings() {
    const THRESHOLD: &str = "MALLOC_MMAP_THRESHOLD_";
    const TUNABLES: &str = "GLIBC_TUNABLES";
    // The C library removes its variables from the environment of a setuid program.
    const DONE: &str = "LATCHD_MALLOC";
    // The kernel has named the process after the file of the program. Behind a link, that is not
    // the name by which it was started.
    const NAMED: &str = "named ";
    if let Ok(done) = env::var(DONE) {
        if let Some(Ok(name)) = done.strip_prefix(NAMED).map(CString::new) {
            let _ = set_name(&name);
        }
        return;
    }
    if cfg!(not(target_env = "gnu")) || env::var_os(THRESHOLD).is_some() {
        return;
    }
    let Ok(program) = env::current_exe() else {
        return;
    };
    // Started as `ld.so latchd`, the process is that of ld.so.
    let name = program.file_name().map_or(&[][..], OsStrExt::as_bytes);
    if name.starts_with(b"ld-") || name.starts_with(b"ld.") {
        return;
    }
    let started_as = thread::name().unwrap_or_default();
    let done = format!("{NAMED}{}", started_as.to_string_lossy());
    let mut settings = vec![(THRESHOLD, "65536"), (DONE, done.as_str())];
    if env::var_os(TUNABLES).is_none() {
        // Small blocks are joined with their neighbours at once, so that whole pages get free. The
        // stack of a thread goes back at its end: 300 kept stacks would be 2.5 MB, and as much
        // again in what the C library knows of them, scattered over the pages of the crowd.
        let tunables = "glibc.malloc.mxfast=0:glibc.pthread.stack_cache_size=0";
        settings.push((TUNABLES, tunables));
    }
    if getrlimit(Resource::As).current.is_some() {
        settings.push(("MALLOC_ARENA_MAX", "1"));
    }
    let _ = exec(&program, env::args_os(), &settings);
}

/// The least memory limit in bytes of the cgroups of a process and of those above them.
/// `of_process` is its /proc/self/cgroup. In a container, the path that it names may be missing;
/// the container's own group is then the root.
fn cgroup_limit(root: &Path, of_process: &str) -> Option<u64> {
    let mut limits = Vec::new();
    for line in of_process.lines() {
        let fields: Vec<&str> = line.splitn(3, ':').collect();
        let [_, names, path] = fields[..] else {
            continue;
        };
        for (name, mount, file) in CONTROLLERS {
            if names.split(',').all(|controller| controller != name) {
                continue;
            }
            for group in Path::new(path).ancestors() {
                let group = group.strip_prefix("/").unwrap_or(group);
                let limit = fs::read_to_string(root.join(mount).join(group).join(file));
                let limit = limit.unwrap_or_default();
                // "max" is no limit.
                limits.extend(limit.trim().parse::<u64>());
            }
        }
    }
    limits.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    use crate::cli::arguments::Parsed;
    use crate::latchd::options;

    /// A directory with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("there is room");
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("there is room");
            fs::write(path, content).expect("there is room");
        }
        root
    }

    #[test]
    fn the_least_limit_of_a_cgroup_or_its_parents_counts() {
        let root = tree(&[
            ("memory/a/b/memory.limit_in_bytes", "3000\n"),
            ("memory/a/memory.limit_in_bytes", "2000\n"),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("x/y/memory.max", "max\n"),
            ("x/memory.max", "700\n"),
            ("unified/z/memory.max", "600\n"),
            ("z/memory.max", "max\n"),
        ]);
        let limit = |of_process: &str| cgroup_limit(root.path(), of_process);
        assert_eq!(limit("5:cpu,cpuacct:/\n4:memory:/a/b\n0::/\n"), Some(2000));
        assert_eq!(limit("4:hugetlb,memory:/a/b\n"), Some(2000));
        assert_eq!(limit("0::/x/y\n"), Some(700));
        assert_eq!(limit("0::/z\n"), Some(600));
        // The path of a container as the host names it.
        assert_eq!(
            limit("4:memory:/docker/c0ffee\n"),
            Some(9223372036854771712)
        );
        assert_eq!(limit("0::/elsewhere\n"), None);
        for nothing in ["", "4:cpu:/a/b\n", "nonsense"] {
            assert_eq!(limit(nothing), None, "{nothing}");
        }
    }

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
        let table = 3 * PER_KEY + 2 * (PER_SLOT + PER_TAG + PER_NUMBER) + PER_WAITER;
        assert_eq!(worst_case(&caps, 0, 0), AT_REST + table);
        let connections = 10 * (PER_CONNECTION + 1000);
        assert_eq!(worst_case(&caps, 10, 1000), AT_REST + connections + table);
        let tls = [&caps[..], &["--tls-cert=here", "--tls-key=here"]].concat();
        let with_tls = worst_case(&tls, 10, 1000);
        assert_eq!(with_tls, AT_REST + connections + table + 10 * PER_TLS);
        let logged = [&caps[..], &["--log-grants"]].concat();
        let lines = MAX_QUEUED_LINES as u64 * PER_LOG_LINE;
        assert_eq!(worst_case(&logged, 0, 0), AT_REST + table + lines);
        let endless = worst_case(&["--max-slots=4294967295"], 10, 1000);
        assert!(endless > 1 << 40);
        assert!(usize::BITS == 32 || worst_case(&caps, usize::MAX, 0) == u64::MAX);
    }
}
