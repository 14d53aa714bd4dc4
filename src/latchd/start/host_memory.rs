//! The memory of the machine, and the part of it that the lock table gets unless the options say
//! otherwise.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use rustix::system::sysinfo;

/// By default, grants and waiters each get 1/`TABLE_SHARE` of the memory.
const TABLE_SHARE: u64 = 32;
/// The maximum default for the number of grants, and for the number of waiters.
const MOST_IN_TABLE: usize = 65_536;

/// The maximum memory of a grant in the table, in bytes.
pub const PER_GRANT: u64 = 256;
/// The maximum memory of a waiter in the table, in bytes.
pub const PER_WAITER: u64 = 256;

/// The memory controllers of cgroups: the name in the second field of a line of /proc/self/cgroup
/// (empty in version 2), the directory where the controller is mounted, and the file with the
/// limit.
const CONTROLLERS: [(&str, &str, &str); 3] = [
    ("memory", "memory", "memory.limit_in_bytes"),
    ("", "", "memory.max"),
    ("", "unified", "memory.max"),
];

/// The default of the cap on grants and of the cap on waiters.
pub fn table_cap() -> usize {
    const { assert!(PER_GRANT == PER_WAITER) };
    as_count(memory() / TABLE_SHARE / PER_GRANT).min(MOST_IN_TABLE)
}

/// The memory in bytes of the machine or the cgroup, whichever is less, at the first call.
pub fn memory() -> u64 {
    static MEMORY: OnceLock<u64> = OnceLock::new();
    *MEMORY.get_or_init(|| {
        let of_process = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of_cgroups = cgroup_limit(Path::new("/sys/fs/cgroup"), &of_process);
        let machine = sysinfo();
        let of_machine = (machine.totalram as u64).saturating_mul(u64::from(machine.mem_unit));
        of_machine.min(of_cgroups.unwrap_or(u64::MAX))
    })
}

/// Converts a count, and returns at least 1: a server without connections would be useless.
pub fn as_count(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX).max(1)
}

/// The lowest memory limit in bytes of a process's cgroups and their ancestors. `of_process` is the
/// content of the process's /proc/self/cgroup. In a container, the path in that file may not exist;
/// then the root directory is the container's own cgroup.
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
                // "max" means no limit.
                limits.extend(limit.trim().parse::<u64>());
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
}
