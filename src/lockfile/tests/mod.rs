//! Tests from the inside: file systems that lack features, steps that are late, and processes that
//! die between two steps.

mod contention;
mod crash;
mod fallbacks;
mod fault_injection;
mod model;
mod stress;

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use super::files::{LockFileOptions, MissingFeatures};
use super::host::{self, find_host_id, LastSeen, LocalHost};
use super::staleness::{judge, Host, HostId};
use super::takeover::{HeldLocks, RecordFor};
use super::wait::rest;
use super::*;
use crate::sys::process::Process;

/// The number of no process.
const DEAD: u32 = 999_999_999;

/// The record of a grant to this process number, without a tag and a token, as of now.
fn stamped(pid: u32) -> Record {
    held(pid, HolderKind::Detached)
}

fn held(pid: u32, holder: HolderKind) -> Record {
    let info = LockInfo {
        pid,
        ..LockInfo::new()
    };
    let locks = HeldLocks {
        has_flock: true,
        has_read_lock: true,
        file_system: None,
    };
    host::stamped(own_id(), &info, None, holder, locks)
}

fn own_id() -> HostId {
    find_host_id().expect("an identity")
}

/// All combinations of missing features.
fn every_file_system() -> impl Iterator<Item = MissingFeatures> {
    (0..16).map(|bits| MissingFeatures {
        unnamed_files: bits & 1 != 0,
        links: bits & 2 != 0,
        rewriting: bits & 4 != 0,
        locks: bits & 8 != 0,
    })
}

/// A lock on a file system that lacks these features.
fn lock_without(path: &Path, missing: MissingFeatures, stale_timeout: Duration) -> Semaphore {
    let config = SemaphoreConfig {
        stale_timeout: Some(stale_timeout),
        ..SemaphoreConfig::default()
    };
    let options = SemaphoreOptions {
        files: quick(missing),
        ..SemaphoreOptions::new()
    };
    Semaphore::with_options(path, config, options).expect("a lock path")
}

fn quick(missing: MissingFeatures) -> LockFileOptions {
    LockFileOptions {
        mode: 0o644,
        is_synced: false,
        settle: Settle::Never,
        missing,
    }
}

/// The names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

/// This host at a later time.
struct LaterHost<'a> {
    now: LocalHost<'a>,
    seconds: u64,
}

impl Host for LaterHost<'_> {
    fn id(&self) -> &HostId {
        self.now.id()
    }

    fn uptime(&self) -> Option<u64> {
        self.now.uptime()
    }

    fn unchanged_for(&self, content: &Content) -> u64 {
        self.now.unchanged_for(content)
    }

    fn now(&self) -> u64 {
        self.now.now() + self.seconds
    }

    fn file_system_now(&self) -> Option<u64> {
        Some(self.now.file_system_now()? + self.seconds)
    }

    fn booted_at(&self) -> Option<u64> {
        self.now.booted_at()
    }

    fn process(&self, pid: u32) -> Option<Process> {
        self.now.process(pid)
    }
}

/// Whether a file may be taken over in this many seconds, with a timeout of one hour.
fn may_take_in(seconds: u64, content: &Content, directory: &Directory) -> Verdict {
    let host = LaterHost {
        now: LocalHost {
            directory,
            id: own_id(),
            last_seen: &LastSeen::default(),
        },
        seconds,
    };
    let timeout = Some(Duration::from_secs(3600));
    let rule = StaleRule::AgeAndLiveness;
    let judgement = judge(content, Flock::Acquired, timeout, rule, &host);
    judgement.is_stale.then_some(()).ok_or(Obstacle::NotStale)
}

/// A command that runs one test of this program as another process. That test reads its part from
/// the environment.
fn again(test: &str, part: &[(&str, String)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([
        "--exact",
        test,
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command.envs(
        part.iter()
            .map(|(name, value)| (format!("LATCHD_TEST_{name}"), value)),
    );
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn part(name: &str) -> Option<String> {
    std::env::var(format!("LATCHD_TEST_{name}")).ok()
}

fn number(name: &str) -> Option<u64> {
    part(name)?.parse().ok()
}

/// Kills a child process at the end of the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A small generator (splitmix64) that is reproducible from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit.max(1)
    }
}
