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
use super::takeover::HeldLock;
use super::wait::rest;
use super::*;
use crate::os::directory::names_in as names;

/// The number of no process.
const DEAD: u32 = 999_999_999;

/// The record of a grant to this process number, without a tag and a token, as of now.
fn stamped(pid: u32) -> Record {
    let info = LockInfo {
        pid,
        ..LockInfo::new()
    };
    let lock = HeldLock {
        has_flock: true,
        file_system: None,
    };
    host::stamped(own_id(), &info, None, HolderKind::Detached, lock)
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
