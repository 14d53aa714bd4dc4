//! The locks that `sema run`s hold around this process.

use std::ffi::OsString;
use std::fs;
use std::path::{self, Path, PathBuf};

use crate::cli::locks_around::{locks_around, with_locks_around};
use crate::lockfile::{Alive, Busy, Semaphore};
use crate::sys::process::ancestors;

/// The variable with the paths of the locks of all `sema run`s around a command.
pub(super) const ALL_PATHS: &str = "SEMA_ALL_PATHS";

/// Returns the value of [`ALL_PATHS`] for a command under the lock at `path`, too.
pub(super) fn paths_with(path: &Path) -> OsString {
    // The command may have another directory.
    let absolute = path::absolute(path).unwrap_or_else(|_| path.into());
    with_locks_around(ALL_PATHS, vec![absolute.into()])
}

/// Returns one of `slots` if a wait for one of them could never end, because `sema run`s around
/// this process hold them all.
pub(super) fn own_lock(slots: &[Semaphore]) -> Option<(&Semaphore, Busy)> {
    let mut paths: Vec<PathBuf> = locks_around(ALL_PATHS)
        .into_iter()
        .map(Into::into)
        .collect();
    // A look at another lock would hang if its file server does not answer.
    paths.retain(|path| (slots.iter()).any(|slot| slot.path().file_name() == path.file_name()));
    let paths: Vec<PathBuf> = paths.iter().flat_map(fs::canonicalize).collect();
    if paths.is_empty() {
        return None;
    }
    let ancestors: Vec<u32> = ancestors().collect();
    let mut own = None;
    for slot in slots {
        let path = fs::canonicalize(slot.path()).ok()?;
        if !paths.contains(&path) {
            return None;
        }
        // The list may be of a `sema run` that has ended, or that this process has left.
        let busy = slot.look().ok()??;
        let is_alive = busy.details.alive == Alive::Yes;
        let holder = busy.details.pid.filter(|_| is_alive)?;
        if !ancestors.contains(&holder) {
            return None;
        }
        own = own.or(Some((slot, busy)));
    }
    own
}
