//! The machine: which core runs what, and what a process has used.

use std::fmt;
use std::fs;
use std::io;
use std::time::Duration;

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

/// Which cores the server and the generator run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cores {
    /// Both on one core: what a request costs in all.
    One,
    /// The server on one core, the generator on another: what a client waits for.
    Two,
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Cores::One => "one core",
            Cores::Two => "two cores",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Server,
    Generator,
}

/// Pins this thread, and all that it starts from now on.
pub fn pin(cores: Cores, side: Side) -> io::Result<()> {
    let allowed = allowed_cores()?;
    let at = match (cores, side) {
        (Cores::Two, Side::Generator) => 1,
        _ => 0,
    };
    let core = allowed.get(at).ok_or_else(|| {
        io::Error::other("--cores two: this process may use only one core; try --cores one")
    })?;
    let mut set = CpuSet::new();
    set.set(*core);
    Ok(sched_setaffinity(None, &set)?)
}

/// The cores that this process might use when it began.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    static ALLOWED: std::sync::OnceLock<Vec<usize>> = std::sync::OnceLock::new();
    if let Some(allowed) = ALLOWED.get() {
        return Ok(allowed.clone());
    }
    let set = sched_getaffinity(None)?;
    let cores = (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core));
    Ok(ALLOWED.get_or_init(|| cores.collect()).clone())
}

/// Lets this process and those that it starts open as many descriptors as root allows.
pub fn raise_descriptor_limit() -> io::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}

/// What a process has used since it began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub cpu: Duration,
    /// Voluntary and involuntary, of the threads that still run.
    pub switch_count: u64,
    /// The memory that is resident now, in bytes.
    pub resident: u64,
}

impl Usage {
    pub fn of(process: u32) -> io::Result<Usage> {
        let mut switch_count = 0;
        for task in fs::read_dir(format!("/proc/{process}/task"))? {
            // A thread may end while we look.
            let status = fs::read_to_string(task?.path().join("status")).unwrap_or_default();
            switch_count += field(&status, "voluntary_ctxt_switches:")
                + field(&status, "nonvoluntary_ctxt_switches:");
        }
        Ok(Usage {
            cpu: cpu_time(process)?,
            switch_count,
            resident: resident(process)?,
        })
    }

    /// What was used since then; the memory is that of now.
    pub fn since(self, earlier: Usage) -> Usage {
        Usage {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            switch_count: self.switch_count.saturating_sub(earlier.switch_count),
            ..self
        }
    }
}

/// User and system time of a process, in the kernel's ticks of 10 milliseconds.
pub fn cpu_time(process: u32) -> io::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name of the program may have blanks; it ends with the last parenthesis.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |at| -> u64 {
        let word = after.split_whitespace().nth(at);
        word.and_then(|word| word.parse().ok()).unwrap_or(0)
    };
    Ok(Duration::from_millis(10 * (ticks(11) + ticks(12))))
}

/// The resident memory of a process, in bytes.
pub fn resident(process: u32) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    Ok(1024 * field(&status, "VmRSS:"))
}

/// A number in a file of /proc/PID/status; 0 if it is not there.
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
