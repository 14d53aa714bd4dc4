//! Whether a file system treats two names of a file as one file.
//!
//! libfuse gives each path a separate inode. So a lock on a file under a private name does not hold
//! for processes that open the file under the lock's name. The test runs before the lock's
//! name is used: a later test could mistake another process's lock for ours.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::time::Duration;

use crate::os::directory::{lock_within, Directory, Entry, FileId, PrivateNames, StagedFile};

use super::takeover::Creation;

/// The private names of files that will become lock files (sema-lockfile(5), FILES).
pub(super) const STAGED_NAMES: PrivateNames = PrivateNames {
    prefix: ".sema-",
    suffix: "~",
};

/// The permissions of the test files.
const MODE: u32 = 0o600;

/// Finds out how to create a lock file in this directory. Each call tests the directory with
/// private names again, because another file system may have been mounted there, even with the same
/// device number.
///
/// # Errors
///
/// Fails if a lock on a file does not keep other processes out here, or with a system error.
pub(super) fn creation_in(directory: &Directory) -> io::Result<Creation> {
    let holds_through_link = StagedFile::make(directory, &STAGED_NAMES, MODE, |staged| {
        let is_locked = try_lock(staged.file())?;
        let second = staged.link_privately(&STAGED_NAMES)?;
        is_same_file(directory, second.name(), staged.file(), is_locked)
    });
    creation_if(holds_through_link, || {
        let in_place = StagedFile::private(directory, &STAGED_NAMES, MODE)?;
        let is_locked = try_lock(in_place.file())?;
        let name = in_place.private_name().unwrap_or_default();
        is_same_file(directory, name, in_place.file(), is_locked)
    })
}

/// Chooses by the results of the two tests: whether a lock holds through a link, and, if not or if
/// there are no links, whether it holds at all.
fn creation_if(
    holds_through_link: io::Result<bool>,
    holds_in_place: impl FnOnce() -> io::Result<bool>,
) -> io::Result<Creation> {
    match holds_through_link {
        Ok(true) => return Ok(Creation::ByLink),
        Ok(false) => {}
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
        Err(error) => return Err(error),
    }
    if holds_in_place()? {
        Ok(Creation::InPlace)
    } else {
        Err(io::Error::other(
            "the file system does not keep a lock on a file for other processes",
        ))
    }
}

/// Tries to lock a file. Returns false if the file is locked already, or if the system refuses such
/// locks. In the second case, no process relies on such locks.
fn try_lock(file: &File) -> io::Result<bool> {
    match lock_within(file, Duration::ZERO) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(false),
        locked => locked,
    }
}

/// Whether the file under this name is `ours`, and whether a lock on `ours` also locks it.
fn is_same_file(
    directory: &Directory,
    name: &OsStr,
    ours: &File,
    is_locked: bool,
) -> io::Result<bool> {
    let Entry::File(found) = directory.open_file(name)? else {
        return Ok(false);
    };
    let is_same = directory.identity(name)? == Some(FileId::of(ours)?)
        && FileId::of(&found)? == FileId::of(ours)?;
    Ok(is_same && (!is_locked || !try_lock(&found)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lockfile::file_system::FileSystem;

    #[test]
    fn a_file_is_made_in_place_where_no_link_keeps_its_lock() {
        let unsupported = || io::ErrorKind::Unsupported.into();
        let refused = || io::ErrorKind::PermissionDenied.into();
        let chosen =
            |linked, in_place| creation_if(linked, || in_place).map_err(|error| error.kind());
        assert_eq!(chosen(Ok(true), Err(refused())), Ok(Creation::ByLink));
        assert_eq!(chosen(Ok(false), Ok(true)), Ok(Creation::InPlace));
        assert_eq!(chosen(Err(unsupported()), Ok(true)), Ok(Creation::InPlace));
        assert_eq!(chosen(Ok(false), Ok(false)), Err(io::ErrorKind::Other));
        for (linked, in_place) in [(Err(refused()), Ok(true)), (Ok(false), Err(refused()))] {
            let error = chosen(linked, in_place).expect_err("no choice");
            assert_eq!(error, io::ErrorKind::PermissionDenied);
        }
    }

    #[test]
    fn only_a_name_of_the_same_file_with_its_lock_will_do() {
        let scratch = tempfile::tempdir().expect("a directory");
        if FileSystem::of(File::open(scratch.path()).expect("it is there"))
            .is_none_or(|here| !here.has_single_kernel())
        {
            println!("skipped: temporary files are on an unknown file system");
            return;
        }
        let directory = Directory::open(scratch.path()).expect("it is there");
        let ours = File::create(scratch.path().join("ours")).expect("a file");
        File::create(scratch.path().join("other")).expect("a file");
        std::fs::hard_link(scratch.path().join("ours"), scratch.path().join("second"))
            .expect("a link");
        let is_same = |name: &str, is_locked| {
            is_same_file(&directory, OsStr::new(name), &ours, is_locked).expect("a result")
        };
        // Another process could lock it although it is said to be locked.
        assert!(!is_same("second", true));
        assert!(try_lock(&ours).expect("a lock"));
        assert!(is_same("second", true));
        assert!(!is_same("other", true));
        // Where the system refuses locks, the inode decides alone.
        assert!(is_same("second", false));
        assert!(!is_same("other", false));
        assert!(!is_same("missing", false));
    }
}
