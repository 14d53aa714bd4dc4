//! Checks and resolves the paths of lock files (sema-lockfile(5), PATHS).

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{self, Component, Path, PathBuf};

use nix::libc;

use crate::os::directory::parent_of;
use crate::os::trusted;

use super::error::SemaphoreError;

/// The directory and the name of a lock file. The directory is absolute, so that a program may
/// change its own, unless the path is then too long for the system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LockPath {
    pub(super) directory: PathBuf,
    pub(super) name: OsString,
}

/// Checks whether a lock file can have this path, without reading the file system.
pub(super) fn check(path: &Path) -> Result<(), SemaphoreError> {
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

/// Finds the directory and the name of the lock file for `path`. Fails if the path cannot be that
/// of a lock file, or if another user could have chosen where the path leads.
pub(super) fn resolve(path: &Path) -> Result<LockPath, SemaphoreError> {
    check(path)?;
    let parent = parent_of(path);
    if is_missing(parent) {
        return Err(invalid("parent directory does not exist", parent));
    }
    // For an absolute path, this works even if the working directory is gone.
    let mut absolute = path::absolute(path)?;
    if absolute.as_os_str().len() >= libc::PATH_MAX as usize {
        absolute = path.to_owned();
    }
    let followed = follow(absolute.clone())?;
    let is_link = followed.directory != parent_of(&absolute);
    if is_link && is_missing(&followed.directory) {
        let target = followed.directory.display();
        let reason = format!("the link leads into a directory that does not exist, {target}");
        return Err(invalid(&reason, path));
    }
    Ok(followed)
}

/// Whether there is no directory at this path.
fn is_missing(directory: &Path) -> bool {
    match fs::metadata(directory) {
        Ok(found) => !found.is_dir(),
        // Any other error comes up again when the directory is used.
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Follows links in the last component, but no link that another user may have planted.
fn follow(path: PathBuf) -> Result<LockPath, SemaphoreError> {
    let path = trusted::follow(&path).map_err(|error| invalid(&error.to_string(), &path))?;
    let Some(name) = path.file_name().map(ToOwned::to_owned) else {
        return Err(invalid("it names a directory", &path));
    };
    let directory = parent_of(&path).to_owned();
    Ok(LockPath { directory, name })
}

/// The error for a path, with the reason.
pub(super) fn invalid(reason: &str, path: &Path) -> SemaphoreError {
    SemaphoreError::InvalidPath(format!("{reason}: {}", path.display()))
}
