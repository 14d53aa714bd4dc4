//! Whether a file system shows one file under two names as one file.
//!
//! FUSE's common library has an inode for each path: a lock on a file under a private name is not
//! on the file that other processes find under the lock's name. That is asked before the lock's
//! name is touched, since a look afterwards could take another process's lock for ours.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::time::Duration;

use crate::sys::directory::{lock_within, Directory, Entry, FileId, StagedFile};

use super::files::STAGED_NAMES;
use super::takeover::Creation;

/// The permissions of the files to ask with.
const MODE: u32 = 0o600;

/// How to create a lock's file in this directory. Asks with private names each time: another file
/// system may be mounted there since, even with the same device number.
///
/// # Errors
///
/// If no lock on a file holds here, or an error of the system.
pub(super) fn creation_in(directory: &Directory) -> io::Result<Creation> {
    let holds_through_link = StagedFile::make(directory, &STAGED_NAMES, MODE, |staged| {
        let is_locked = try_lock(staged.file())?;
        let second = staged.link_privately(&STAGED_NAMES)?;
        is_same_file(directory, second.name(), staged.file(), is_locked)
    });
    match holds_through_link {
        Ok(true) => return Ok(Creation::ByLink),
        Ok(false) => {}
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
        Err(error) => return Err(error),
    }
    let in_place = StagedFile::private(directory, &STAGED_NAMES, MODE)?;
    let is_locked = try_lock(in_place.file())?;
    let name = in_place.private_name().unwrap_or_default();
    match is_same_file(directory, name, in_place.file(), is_locked)? {
        true => Ok(Creation::InPlace),
        false => Err(io::Error::other(
            "the file system does not keep a lock on a file for other processes",
        )),
    }
}

/// Whether a new file could be locked. Where the system refuses such locks, no process relies on
/// them.
fn try_lock(file: &File) -> io::Result<bool> {
    match lock_within(file, Duration::ZERO) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(false),
        locked => locked,
    }
}

/// Whether the file under this name is the open one, also for its lock.
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
