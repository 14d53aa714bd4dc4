//! Who the user of this process is.

use rustix::process::geteuid;

use super::process;

/// Whether two numbers certainly mean the same user. Equal numbers are not enough, because a user
/// namespace shows all unknown users under one number.
pub fn is_same_user(one: u32, other: u32) -> bool {
    one == other && process::known_user(one).is_some()
}

/// Whether `user` is certainly the user of this process.
pub fn is_own(user: u32) -> bool {
    is_same_user(user, geteuid().as_raw())
}

/// Whether `user` is root, or certainly the user of this process.
pub fn is_own_or_root(user: u32) -> bool {
    user == 0 || is_own(user)
}
