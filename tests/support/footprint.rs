//! What a server takes of its machine.

use std::fs;

use super::Daemon;

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
            resident: status_kib(pid, "VmRSS:"),
        }
    }
}

/// A value of a process that runs, such as `VmRSS:`, in KiB.
pub fn status_kib(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let count = line.expect("every process has it").trim();
    count.trim_end_matches(" kB").parse().expect("a number")
}

/// What the server says that it takes at the most, in MiB. A connection must be free.
pub fn worst_case_mb(daemon: &Daemon) -> u64 {
    let reply = daemon.connect().request("stats", "counters", "_");
    let json = reply.strip_prefix("ok ").expect("counters");
    let counters: serde_json::Value = serde_json::from_str(json).expect("JSON");
    let worst = counters["gauges"]["worst_case_bytes"].as_u64();
    worst.expect("a number") >> 20
}
