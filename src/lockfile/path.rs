//! Which paths may be those of lock files, and where they lead (sema-lockfile(5), PATHS).

use std::env;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::directory::parent_of;

use super::error::SemaphoreError;

/// The kernel follows no more links than this, either.
const MAX_LINKS: usize = 40;

const STICKY: u32 = 0o1000;
const WRITABLE_BY_ALL: u32 = 0o002;

/// Where a lock file stands, wherever the process may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LockPath {
    pub(super) directory: PathBuf,
    pub(super) name: OsString,
}

/// Whether a path can be that of a lock file at all, whatever the file system says.
///
/// # Errors
///
/// [`SemaphoreError::InvalidPath`] if it cannot.
pub(crate) fn check(path: &Path) -> Result<(), SemaphoreError> {
    let invalid = |reason: String| Err(SemaphoreError::InvalidPath(reason));
    let bytes = path.as_os_str().as_bytes();
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return invalid("it is empty".into());
    }
    if bytes.contains(&0) {
        return invalid("it contains a NUL byte".into());
    }
    if path
        .components()
        .any(|component| component == Component::ParentDir)
    {
        return invalid(format!("it contains `..`: {}", path.display()));
    }
    let names_directory = bytes.ends_with(b"/") || bytes.ends_with(b"/.") || bytes == b".";
    if names_directory || path.file_name().is_none() {
        return invalid(format!("it names a directory: {}", path.display()));
    }
    Ok(())
}

/// Finds out where the lock file of `path` stands.
///
/// # Errors
///
/// [`SemaphoreError::InvalidPath`] if that is nowhere, or would be somebody else's choice.
pub(super) fn resolve(path: &Path) -> Result<LockPath, SemaphoreError> {
    check(path)?;
    let parent = parent_of(path);
    if !parent.is_dir() {
        // Why not, will be said when it is used.
        if let Ok(_) | Err(io::ErrorKind::NotFound) =
            fs::metadata(parent).map_err(|error| error.kind())
        {
            return Err(SemaphoreError::InvalidPath(format!(
                "parent directory does not exist: {}",
                parent.display()
            )));
        }
    }
    if path.is_absolute() {
        // The working directory may be gone.
        return follow(path.to_owned());
    }
    follow(env::current_dir()?.join(path))
}

/// Follows links in the last component, where the kernel would do so under `fs.protected_symlinks`: a
/// link in a directory where everybody may plant one counts only if it is ours, or the directory's owner's.
fn follow(mut path: PathBuf) -> Result<LockPath, SemaphoreError> {
    for _ in 0..MAX_LINKS {
        let Some(name) = path.file_name().map(ToOwned::to_owned) else {
            break;
        };
        let directory = parent_of(&path).to_owned();
        match fs::symlink_metadata(&path) {
            Ok(link) if link.is_symlink() => {
                if !may_follow(&link, &directory) {
                    return Err(SemaphoreError::InvalidPath(format!(
                        "it is a symbolic link of somebody else in a directory that all may write to: {}",
                        path.display()
                    )));
                }
                path = directory.join(fs::read_link(&path)?);
            }
            _ => return Ok(LockPath { directory, name }),
        }
    }
    Err(SemaphoreError::InvalidPath(format!(
        "its links lead nowhere: {}",
        path.display()
    )))
}

fn may_follow(link: &Metadata, directory: &Path) -> bool {
    let Ok(directory) = fs::metadata(directory) else {
        return false;
    };
    let all_may_plant = STICKY | WRITABLE_BY_ALL;
    directory.mode() & all_may_plant != all_may_plant
        || link.uid() == rustix::process::geteuid().as_raw()
        || link.uid() == directory.uid()
}
