//! What can go wrong with a lock file.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a lock was not taken, or not given back.
#[derive(Debug)]
pub enum SemaphoreError {
    /// Somebody else holds it; who and since when (in seconds since 1970), as far as the file says.
    AlreadyLocked {
        /// The process that holds it.
        holder_pid: Option<u32>,
        /// Since when.
        locked_since: Option<u64>,
    },
    /// The path cannot be that of a lock file, for this reason.
    InvalidPath(String),
    /// The system says no.
    IoError(io::Error),
    /// There is no lock to give back.
    NotLocked,
    /// It could not be had in time.
    Timeout,
    /// The process that was to hold it has ended.
    HolderEnded(u32),
    /// A text is not that of a lock file, for this reason.
    ParseError(String),
    /// The file at this path is neither empty nor a record, nor the beginning of one. It is not
    /// touched.
    NotALockFile(PathBuf),
    /// It was held, and somebody has taken it away since.
    Lost,
    /// The wait was given up, since the caller asked for that.
    Cancelled,
}

/// What comes of an operation on a lock file.
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
