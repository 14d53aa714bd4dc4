//! A lock that a `sema run` holds around this process.

use std::env;
use std::fs;
use std::path::Path;

use crate::lockfile::{Alive, Busy, Semaphore};
use crate::sys::process::ancestors;

/// Finds the lock of the `sema run` under which this process runs, if a wait for one of `slots`
/// could never end: each of them is held by an ancestor of this process, and the innermost `sema
/// run` holds one of them.
pub(super) fn own_lock(slots: &[Semaphore]) -> Option<(&Semaphore, Busy)> {
    let named = env::var_os("SEMA_PATH")?;
    let ancestors: Vec<u32> = ancestors().collect();
    let mut own = None;
    for slot in slots {
        let busy = slot.look().ok()??;
        let is_alive = busy.details.alive == Alive::Yes;
        let holder = busy.details.pid.filter(|_| is_alive)?;
        if !ancestors.contains(&holder) {
            return None;
        }
        if is_named(slot.path(), named.as_ref(), holder) {
            own = Some((slot, busy));
        }
    }
    own
}

/// Whether both paths name the same file. The holder has named it relative to its own directory.
fn is_named(path: &Path, named: &Path, holder: u32) -> bool {
    let named = Path::new(&format!("/proc/{holder}/cwd")).join(named);
    let files = (fs::canonicalize(path), fs::canonicalize(named));
    matches!(files, (Ok(path), Ok(named)) if path == named)
}
