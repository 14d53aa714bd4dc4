//! What a server takes of its machine.

use std::fs;

#[derive(Debug, Clone, Copy)]
pub struct Footprint {
    pub descriptors: usize,
    pub threads: usize,
    /// The memory in use, in KiB.
    pub resident: u64,
}

impl Footprint {
    /// That of a process that runs.
    pub fn of(pid: u32) -> Footprint {
        let count = |what: &str| {
            let entries = fs::read_dir(format!("/proc/{pid}/{what}"));
            entries.expect("it runs").count()
        };
        Footprint {
            descriptors: count("fd"),
            threads: count("task"),
            resident: kib(pid, "VmRSS:"),
        }
    }
}

/// The size of the address space, in bytes.
pub fn address_space(pid: u32) -> u64 {
    kib(pid, "VmSize:") << 10
}

/// What proc(5) says about memory.
fn kib(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let mut words = line.expect("every process has some").split_whitespace();
    words.next().expect("a number").parse().expect("a number")
}
