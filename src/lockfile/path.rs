//! Which paths can be those of lock files, and where they lead (sema-lockfile(5), PATHS).

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{self, Component, Path, PathBuf};

use rustix::fs::{fstat, openat, readlinkat, FileType, Mode, OFlags, CWD};

use crate::sys::directory::parent_of;

use super::error::SemaphoreError;

/// The most links in a row, as in the kernel.
const MAX_LINKS: usize = 40;

/// The absolute directory and the name of a lock file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LockPath {
    pub(super) directory: PathBuf,
    pub(super) name: OsString,
}

/// Checks whether a lock file can have this path, without a look at the file system.
pub(crate) fn check(path: &Path) -> Result<(), SemaphoreError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(SemaphoreError::InvalidPath("it is empty".into()));
    }
    if bytes.contains(&0) {
        return Err(SemaphoreError::InvalidPath("it contains a NUL byte".into()));
    }
    let mut components = path.components();
    if components.any(|component| component == Component::ParentDir) {
        return Err(invalid("it contains `..`", path));
    }
    let names_directory = bytes.ends_with(b"/") || bytes.ends_with(b"/.") || bytes == b".";
    if names_directory || path.file_name().is_none() {
        return Err(invalid("it names a directory", path));
    }
    Ok(())
}

/// Finds the directory and the name of the lock file for `path`. Fails if there is none, or if
/// another user could have chosen it.
pub(super) fn resolve(path: &Path) -> Result<LockPath, SemaphoreError> {
    check(path)?;
    let parent = parent_of(path);
    let is_missing = match fs::metadata(parent) {
        Ok(found) => !found.is_dir(),
        // Any other error comes up again when the directory is used.
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    if is_missing {
        return Err(invalid("parent directory does not exist", parent));
    }
    // An absolute path works without a working directory.
    follow(path::absolute(path)?)
}

/// Follows links in the last component, but no link that another user may have planted. This holds
/// for root, too, who would otherwise touch files of that user's choice.
fn follow(mut path: PathBuf) -> Result<LockPath, SemaphoreError> {
    for _ in 0..MAX_LINKS {
        let Some(name) = path.file_name().map(ToOwned::to_owned) else {
            break;
        };
        let directory = parent_of(&path).to_owned();
        let Ok(Some((target, owner))) = read_link(&path) else {
            return Ok(LockPath { directory, name });
        };
        let is_owner = |directory: Metadata| directory.uid() == owner;
        let is_ours = owner == rustix::process::geteuid().as_raw();
        if !is_ours && !fs::metadata(&directory).is_ok_and(is_owner) {
            return Err(invalid("it is a symbolic link of another user", &path));
        }
        path = directory.join(target);
    }
    Err(invalid("its links lead nowhere", &path))
}

/// The error for a path, with the reason.
pub(super) fn invalid(reason: &str, path: &Path) -> SemaphoreError {
    SemaphoreError::InvalidPath(format!("{reason}: {}", path.display()))
}

/// The target and the owner of a link; `None` if it is no link. Both are of the same link, even if
/// another process replaces it meanwhile.
fn read_link(path: &Path) -> io::Result<Option<(PathBuf, u32)>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = openat(CWD, path, flags, Mode::empty())?;
    let stat = fstat(&link)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        return Ok(None);
    }
    let target = readlinkat(&link, "", Vec::new())?;
    let target = OsString::from_vec(target.into_bytes());
    Ok(Some((target.into(), stat.st_uid)))
}
