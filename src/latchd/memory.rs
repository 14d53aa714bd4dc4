//! How much memory connections may take, and how much all caps together can come to.

use std::fs;
use std::path::Path;

use rustix::system::sysinfo;

/// The part of the machine's or the cgroup's memory that is for connections.
const CONNECTION_SHARE: u64 = 4;

/// The most in bytes that a connection takes: what is in use of its stack, its buffers, and a page of
/// statistics that its peer does not read.
const PER_CONNECTION: u64 = 64 * 1024;

/// The most in bytes that each of these takes in the table.
const PER_KEY: u64 = 1024;
const PER_SLOT: u64 = 256;
const PER_WAITER: u64 = 256;

/// What the program takes in bytes without any of these.
const AT_REST: u64 = 4 * 1024 * 1024;

/// Where the controllers are, and how the line of each in /proc/self/cgroup begins to be told: by a name
/// in its second field (version 1), or by an empty one (version 2).
const CONTROLLERS: [(&str, &str, &str); 3] = [
    ("memory", "memory", "memory.limit_in_bytes"),
    ("", "", "memory.max"),
    ("", "unified", "memory.max"),
];

/// The numbers of what takes memory.
pub(super) struct Amounts {
    pub(super) connections: usize,
    /// The longest line that each may send, beyond the usual ones.
    pub(super) secret_len: usize,
    pub(super) keys: usize,
    pub(super) slots: usize,
    pub(super) waiters: usize,
}

impl Amounts {
    /// The most bytes that all of these together take.
    pub(super) fn worst_case(&self) -> u64 {
        let parts = [
            (self.connections, PER_CONNECTION + self.secret_len as u64),
            (self.keys, PER_KEY),
            (self.slots, PER_SLOT),
            (self.waiters, PER_WAITER),
        ];
        parts.iter().fold(AT_REST, |sum, (count, each)| {
            sum.saturating_add((*count as u64).saturating_mul(*each))
        })
    }
}

/// How many connections a quarter of the memory is enough for.
pub(super) fn allowed_connections(secret_len: usize) -> usize {
    let of_process = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_cgroups = cgroup_limit(Path::new("/sys/fs/cgroup"), &of_process);
    let machine = sysinfo();
    let of_machine = (machine.totalram as u64).saturating_mul(u64::from(machine.mem_unit));
    let share = of_machine.min(of_cgroups.unwrap_or(u64::MAX)) / CONNECTION_SHARE;
    let count = share / (PER_CONNECTION + secret_len as u64);
    usize::try_from(count).unwrap_or(usize::MAX).max(1)
}

/// The least limit in bytes of the memory cgroups of a process and of those above them; `None` if there
/// is none. `of_process` is its /proc/self/cgroup. In a container, the path that it names may not be
/// there; the container's own group is then the root.
fn cgroup_limit(root: &Path, of_process: &str) -> Option<u64> {
    let mut limits = Vec::new();
    for line in of_process.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(names), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        for (name, mount, file) in CONTROLLERS {
            if names.split(',').all(|controller| controller != name) {
                continue;
            }
            for group in Path::new(path).ancestors() {
                let group = group.strip_prefix("/").unwrap_or(group);
                let limit = fs::read_to_string(root.join(mount).join(group).join(file));
                // "max" is no limit.
                limits.extend(
                    limit
                        .ok()
                        .and_then(|limit| limit.trim().parse::<u64>().ok()),
                );
            }
        }
    }
    limits.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_least_limit_of_a_group_and_those_above_counts() {
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
        let none = Amounts {
            connections: 0,
            secret_len: 0,
            keys: 0,
            slots: 0,
            waiters: 0,
        };
        assert_eq!(none.worst_case(), AT_REST);
        let some = Amounts {
            connections: 10,
            secret_len: 1000,
            keys: 3,
            slots: 2,
            waiters: 1,
        };
        let connections = 10 * (PER_CONNECTION + 1000);
        let table = 3 * PER_KEY + 2 * PER_SLOT + PER_WAITER;
        assert_eq!(some.worst_case(), AT_REST + connections + table);
        let endless = Amounts {
            slots: usize::MAX,
            ..some
        };
        assert!(endless.worst_case() > 1 << 40 || usize::BITS == 32);
    }
}
