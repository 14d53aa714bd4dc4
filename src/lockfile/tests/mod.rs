//! Tests from the inside: file systems that lack features, and every order of the steps of several
//! processes, which may die between any two.

mod fallbacks;
mod model;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use super::files::{LockFileOptions, MissingFeatures};
use super::host::{self, find_host_id};
use super::staleness::HostId;
use super::takeover::HeldLocks;
use super::wait::rest;
use super::*;

/// The number of no process.
const DEAD: u32 = 999_999_999;

/// The record of a grant to this process number, without a tag and a token, as of now.
fn stamped(pid: u32) -> Record {
    let info = LockInfo {
        pid,
        ..LockInfo::new()
    };
    let locks = HeldLocks {
        has_flock: true,
        has_read_lock: true,
        file_system: None,
    };
    host::stamped(own_id(), &info, None, HolderKind::Detached, locks)
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
