//! Locks that a user who may only read a file can have on it.

use std::fs::File;
use std::path::Path;

use rustix::fs::{flock, FlockOperation};

/// A file that is locked until this is dropped, also while a process that another thread starts has
/// a copy of the descriptor.
pub struct LockedFile(File);

impl Drop for LockedFile {
    fn drop(&mut self) {
        flock(&self.0, FlockOperation::Unlock).expect("it is open");
    }
}

/// Locks the file by flock(2), until the result is dropped.
pub fn flocked(path: &Path, operation: FlockOperation) -> LockedFile {
    let file = File::open(path).expect("a file");
    flock(&file, operation).expect("a lock");
    LockedFile(file)
}
