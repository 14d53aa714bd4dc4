//! The locks of the `run`s around a process. Each `run` names them to its command in a variable,
//! so that a command further in does not wait for a lock that can only be released after it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// The maximum number of locks in the variable, and its maximum length in bytes. Without them, a
/// command that starts itself again and again, each time under a new lock, would at last have too
/// large an environment to start: the kernel takes 128 KiB in a variable.
const MAX_COUNT: usize = 64;
const MAX_LEN: usize = 64 * 1024;

/// Returns the locks that the variable of this process names, the innermost first, but at most
/// [`MAX_COUNT`].
pub fn locks_around(variable: &str) -> Vec<OsString> {
    let list = env::var_os(variable).unwrap_or_default().into_vec();
    let locks = list.split(|byte| *byte == b'\n');
    let locks = locks.filter(|lock| !lock.is_empty());
    locks
        .take(MAX_COUNT)
        .map(|lock| OsStr::from_bytes(lock).to_owned())
        .collect()
}

/// Returns the value of the variable for a command that runs under `own` locks, too: one lock in a
/// line.
pub fn with_locks_around(variable: &str, own: Vec<OsString>) -> OsString {
    let mut locks = own;
    locks.extend(locks_around(variable));
    locks.truncate(MAX_COUNT);
    let mut len = 0;
    let too_much = locks.iter().position(|lock| {
        len += lock.len() + 1;
        len > MAX_LEN
    });
    locks.truncate(too_much.unwrap_or(MAX_COUNT));
    locks.join(OsStr::new("\n"))
}
