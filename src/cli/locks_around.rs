//! The locks of the `run`s around a process. Each `run` names them to its command in a variable,
//! so that a command further in does not wait for a lock that can only be released after it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// The maximum number of locks in the variable. Without it, a command that starts itself again and
/// again, each time under a new lock, would at last have too large an environment to start.
const MAX_COUNT: usize = 64;

/// Returns the locks that the variable of this process names, the innermost first.
pub fn locks_around(variable: &str) -> Vec<OsString> {
    let list = env::var_os(variable).unwrap_or_default().into_vec();
    let locks = list.split(|byte| *byte == b'\n');
    let locks = locks.filter(|lock| !lock.is_empty());
    locks
        .map(|lock| OsStr::from_bytes(lock).to_owned())
        .collect()
}

/// Returns the value of the variable for a command that runs under `own` locks, too: one lock in a
/// line.
pub fn with_locks_around(variable: &str, own: Vec<OsString>) -> OsString {
    let mut locks = own;
    locks.extend(locks_around(variable));
    locks.truncate(MAX_COUNT);
    locks.join(OsStr::new("\n"))
}
