//! The errors of operations on lock files.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a lock was not taken or not released.
#[derive(Debug)]
#[non_exhaustive]
pub enum SemaphoreError {
    /// Another process holds the lock.
    AlreadyLocked {
        /// The process that holds the lock, if the file says so.
        holder_pid: Option<u32>,
        /// When the lock was granted, in seconds since 1970, if the file says so.
        locked_since: Option<u64>,
    },
    /// The path cannot be that of a lock file; the string says why.
    InvalidPath(String),
    /// The system reports an error.
    IoError(io::Error),
    /// There is no lock to release.
    NotLocked,
    /// The lock was not granted in time.
    Timeout,
    /// The process on whose behalf the lock was requested has ended.
    HolderEnded(u32),
    /// A text is not a valid record; the string says why.
    ParseError(String),
    /// The file at this path is neither empty nor a record, nor the beginning of a record. The
    /// library does not touch it.
    NotALockFile(PathBuf),
    /// This process held the lock, but another process has taken it away.
    Lost,
    /// The caller has cancelled the wait.
    Cancelled,
    /// Another process holds a slot of the same lock, and has given this number of slots.
    SlotCountMismatch(u32),
}

/// The result of an operation on a lock file.
pub type SemaphoreResult<T> = Result<T, SemaphoreError>;

impl fmt::Display for SemaphoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SemaphoreError::AlreadyLocked {
                holder_pid,
                locked_since,
            } => {
                f.write_str("Lock already held")?;
                if let Some(pid) = holder_pid {
                    write!(f, " by PID {pid}")?;
                }
                if let Some(since) = locked_since {
                    write!(f, " since {since}")?;
                }
                Ok(())
            }
            SemaphoreError::InvalidPath(reason) => write!(f, "Invalid path: {reason}"),
            SemaphoreError::IoError(error) => write!(f, "IO error: {error}"),
            SemaphoreError::NotLocked => f.write_str("Lock not held"),
            SemaphoreError::Timeout => f.write_str("Timeout waiting for lock"),
            SemaphoreError::HolderEnded(pid) => {
                write!(f, "process {pid}, which was to hold the lock, has ended")
            }
            SemaphoreError::ParseError(reason) => write!(f, "Parse error: {reason}"),
            SemaphoreError::NotALockFile(path) => {
                write!(f, "{} is not a lock file", path.display())
            }
            SemaphoreError::Lost => f.write_str("Lock lost"),
            SemaphoreError::Cancelled => f.write_str("Wait cancelled"),
            SemaphoreError::SlotCountMismatch(theirs) => {
                write!(f, "the lock is in use with {theirs} slots")
            }
        }
    }
}

impl Error for SemaphoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            SemaphoreError::IoError(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for SemaphoreError {
    fn from(error: io::Error) -> SemaphoreError {
        SemaphoreError::IoError(error)
    }
}
