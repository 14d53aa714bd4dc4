//! Locks that a user who may only read a file can have on it.

use std::fs::File;
use std::path::Path;

use nix::fcntl::{fcntl, FcntlArg};
use nix::libc;
use rustix::fs::{flock, FlockOperation};

/// Locks the file by flock(2), until the result is dropped.
pub fn flocked(path: &Path, operation: FlockOperation) -> File {
    let file = File::open(path).expect("a file");
    flock(&file, operation).expect("a lock");
    file
}

/// Locks the file in every way that a reader can, until the result is dropped.
pub fn locked_in_every_way(path: &Path) -> File {
    let file = flocked(path, FlockOperation::LockExclusive);
    let whole = libc::flock {
        l_type: libc::F_RDLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_SETLK(&whole)).expect("a lock");
    file
}
