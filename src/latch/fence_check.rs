//! `latch fence-check`: compares the fence of a token with the highest fence that a resource has
//! seen.
//!
//! A file contains the highest fence as 16 hex digits and a line feed. Each caller writes them in
//! one call at offset 0, so a caller that is killed has written all of them or nothing. A lock on
//! the file (flock) lets one caller in at a time.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use crate::os::directory::{open_exclusive, sync_name};
use crate::os::text::{hex, reason, unusable_file};
use crate::os::trusted;
use crate::shared::cli::failure::{CommandResult, Failure};

use super::{options, token, FILE_ERROR, OUTDATED};

const RECORD_LEN: usize = 17;

/// How long to wait while other callers have the file locked. Each of them needs one write to disk.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn run(options: &options::FenceCheck) -> CommandResult {
    let token = token(options.token.as_deref())?;
    match remember_if_current(&options.file, token.fence()) {
        Ok(true) => Ok(0),
        Ok(false) => Err(Failure::silent(OUTDATED)),
        Err(error) => {
            let message = unusable_file("fence", &options.file, reason(&error));
            Err(Failure::new(FILE_ERROR, message))
        }
    }
}

/// Returns whether `fence` is at least as high as the highest fence in `file`, and if so, records
/// it durably. If `fence` is lower, a later holder has had the lock. Blocks for at most five
/// seconds while other callers have the file locked. After an error, the fence may or may not be
/// recorded.
fn remember_if_current(file: &Path, fence: u64) -> io::Result<bool> {
    // A device would forget the fence, and a pipe would block, so both are refused.
    let file = &trusted::follow(file)?;
    let opened = open_exclusive(file, 0o666, LOCK_PATIENCE)?
        .ok_or_else(|| io::Error::other("another process keeps it locked"))?;
    if trusted::is_planted(&opened, file)? {
        return Err(io::Error::other("it belongs to another user"));
    }
    let highest = read(&opened)?;
    if highest.is_some_and(|highest| fence < highest) {
        return Ok(false);
    }
    if highest != Some(fence) {
        opened.write_all_at(format!("{fence:016x}\n").as_bytes(), 0)?;
    }
    // Sync even a fence that is already in the file: the caller that wrote it may have been killed
    // before its sync.
    opened.sync_all()?;
    if highest.is_none() {
        sync_name(file)?;
    }
    Ok(true)
}

/// The fence in the file; `None` if the file is empty.
fn read(mut file: &File) -> io::Result<Option<u64>> {
    let mut content = Vec::new();
    (&mut file)
        .take(RECORD_LEN as u64 + 1)
        .read_to_end(&mut content)?;
    if content.is_empty() {
        return Ok(None);
    }
    let text = std::str::from_utf8(&content).unwrap_or_default();
    let fence = text.strip_suffix('\n').and_then(hex);
    let foreign = || io::Error::new(io::ErrorKind::InvalidData, "its content is not a fence");
    fence.map(Some).ok_or_else(foreign)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{mknodat, FileType, Mode, CWD};
    use std::fs;
    use std::thread;

    #[test]
    fn only_a_fence_below_the_highest_is_outdated() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("fence");
        for (fence, is_current) in [
            (7, true),
            (7, true),
            (6, false),
            (u64::MAX, true),
            (8, false),
        ] {
            let found = remember_if_current(&file, fence).expect("a usable file");
            assert_eq!(found, is_current, "{fence}");
        }
        assert_eq!(
            fs::read_to_string(&file).expect("text"),
            "ffffffffffffffff\n"
        );
    }

    #[test]
    fn a_file_with_anything_else_in_it_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("fence");
        for content in [
            "x",
            "0000000000000007",
            "0000000000000007\n\n",
            "+000000000000007\n",
            "000000000000000g\n",
        ] {
            fs::write(&file, content).expect("write");
            assert!(remember_if_current(&file, 9).is_err(), "{content:?}");
            assert_eq!(fs::read_to_string(&file).expect("text"), content);
        }
        assert!(remember_if_current(directory.path(), 9).is_err());
        let pipe = directory.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("there is room");
        assert!(remember_if_current(&pipe, 9).is_err());
    }

    #[test]
    fn callers_at_the_same_time_agree_on_the_highest() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("fence");
        thread::scope(|scope| {
            for first in 0..8 {
                let file = &file;
                scope.spawn(move || {
                    for fence in (first..400).step_by(8) {
                        remember_if_current(file, fence).expect("a usable file");
                    }
                });
            }
        });
        assert!(remember_if_current(&file, 399).expect("a usable file"));
        assert!(!remember_if_current(&file, 398).expect("a usable file"));
    }
}
