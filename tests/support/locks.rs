//! Locks that a user who may only read a file can have on it.

use std::fs::File;
use std::path::Path;

use nix::fcntl::{fcntl, FcntlArg};
use nix::libc;
use rustix::fs::{flock, FlockOperation};

/// A file that is locked until this is dropped, also while a process that another thread starts has
/// a copy of the descriptor.
pub struct LockedFile(File);

impl Drop for LockedFile {
    fn drop(&mut self) {
        flock(&self.0, FlockOperation::Unlock).expect("it is open");
        self.range_lock(libc::F_UNLCK);
    }
}

impl LockedFile {
    fn range_lock(&self, kind: libc::c_int) {
        let whole = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        fcntl(&self.0, FcntlArg::F_OFD_SETLK(&whole)).expect("a lock");
    }
}

/// Locks the file by flock(2), until the result is dropped.
pub fn flocked(path: &Path, operation: FlockOperation) -> LockedFile {
    let file = File::open(path).expect("a file");
    flock(&file, operation).expect("a lock");
    LockedFile(file)
}

/// Locks the file in every way that a reader can, until the result is dropped.
pub fn locked_in_every_way(path: &Path) -> LockedFile {
    let file = flocked(path, FlockOperation::LockExclusive);
    file.range_lock(libc::F_RDLCK);
    file
}
