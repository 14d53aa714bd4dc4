//! A file that is replaced as a whole, and appended to in between, by one process at a time: the
//! one that has the file beside it locked.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{not_a_file, open_exclusive, Directory, Entry};
use crate::os::process::is_own_or_root;

/// The path of a file. While this value exists, no other process uses that path.
pub struct ReplacedFile {
    path: PathBuf,
    /// A separate file, because the file itself is replaced.
    lock: File,
    /// The file, if it can be appended to.
    pub replaced: Option<Replaced>,
}

/// A file that this process has written.
pub struct Replaced {
    file: File,
    /// From this length on, the file is not appended to: twice its first one, or 64 KiB.
    max_len: u64,
    at: Instant,
}

impl ReplacedFile {
    /// Takes a path; `None` if another process has it. Also returns whether a process has used it
    /// before. Waits for the other process for at most `patience`.
    pub fn lock(path: &Path, patience: Duration) -> io::Result<Option<(ReplacedFile, bool)>> {
        let lock_path = lock_path(path);
        // The owner is checked first: another user who owns the file may have locked it, and this
        // process would then wait for that lock.
        loop {
            let found = find(&lock_path)?;
            let was_there = found.is_some();
            found.map_or(Ok(()), |found| refuse_owner(found.uid()))?;
            let Some(lock) = open_exclusive(&lock_path, 0o600, patience)? else {
                return Ok(None);
            };
            refuse_owner(lock.metadata()?.uid())?;
            let path = path.to_owned();
            let locked = ReplacedFile {
                path,
                lock,
                replaced: None,
            };
            // A process that could not go on may have removed the lock file while this one waited
            // for it. The next process would lock another file then.
            if locked.is_locked()? {
                return Ok(Some((locked, was_there)));
            }
        }
    }

    /// Whether the lock file is still the one that this process has locked.
    pub fn is_locked(&self) -> io::Result<bool> {
        is_at(&lock_path(&self.path), &self.lock)
    }

    /// Replaces the file, whose content is then on the disk, though perhaps without its name. Locks
    /// the lock file again if someone has removed it: otherwise another process could take the
    /// path, too. Fails if one has.
    pub fn replace(&mut self, content: &[u8]) -> io::Result<Replaced> {
        self.replaced = None;
        if !self.is_locked()? {
            let again = ReplacedFile::lock(&self.path, Duration::ZERO)?;
            (*self, _) = again.ok_or_else(|| io::Error::other(IN_USE))?;
        }
        let staged = beside(&self.path, ".new");
        let file = stage(&staged, content)
            .and_then(|file| fs::rename(&staged, &self.path).map(|()| file))
            .inspect_err(|_| drop(fs::remove_file(&staged)))?;
        Ok(Replaced {
            file,
            max_len: 65_536.max(2 * content.len() as u64),
            at: Instant::now(),
        })
    }

    /// Whether the file can be appended to: `false` if it has grown too much or is a minute old, or
    /// if it or the lock file is not as this process has left it.
    pub fn is_appendable(&self) -> io::Result<bool> {
        let Some(Replaced { file, max_len, at }) = &self.replaced else {
            return Ok(false);
        };
        let mut file: &File = file;
        let len = file.stream_position()?;
        let has_room = len < *max_len && at.elapsed() < Duration::from_secs(60);
        let is_same = is_at(&self.path, file)? && file.metadata()?.len() == len;
        Ok(has_room && is_same && self.is_locked()?)
    }

    /// Appends to the file. The content is then on the disk. After an error, the file may have a
    /// part of it, and can only be replaced.
    pub fn append(&mut self, content: &[u8]) -> io::Result<()> {
        let mut replaced = self.replaced.take().ok_or(io::ErrorKind::NotFound)?;
        replaced.file.write_all(content)?;
        replaced.file.sync_data()?;
        self.replaced = Some(replaced);
        Ok(())
    }

    /// Removes the lock file, unless the file itself is there.
    pub fn forget_use(&self) {
        if matches!(find(&self.path), Ok(None)) {
            let _ = fs::remove_file(lock_path(&self.path));
        }
    }
}

/// The content of the file at a path; `None` if there is none.
pub fn content(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut file = match Directory::of(path)?.open_file(name)? {
        Entry::Nothing => return Ok(None),
        Entry::File(file) => file,
        Entry::Unreadable => return Err(io::ErrorKind::PermissionDenied.into()),
        Entry::Other => return Err(not_a_file()),
    };
    refuse_owner(file.metadata()?.uid())?;
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(Some(content))
}

/// Why a path cannot be used that another process has.
pub const IN_USE: &str = "another server is using it";

/// The path of the file that is locked while this one is used.
pub fn lock_path(path: &Path) -> PathBuf {
    beside(path, ".lock")
}

/// The path with a suffix added to its file name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// What is at the path, if anything is. Does not follow a link.
fn find(path: &Path) -> io::Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

/// Whether this file is the one at the path.
fn is_at(path: &Path, file: &File) -> io::Result<bool> {
    let (found, own) = (find(path)?, file.metadata()?);
    Ok(found.is_some_and(|found| (found.dev(), found.ino()) == (own.dev(), own.ino())))
}

/// Refuses a file of another user, because that user could change, remove or lock it.
fn refuse_owner(owner: u32) -> io::Result<()> {
    if is_own_or_root(owner) {
        Ok(())
    } else {
        Err(io::Error::other("it belongs to another user"))
    }
}

/// Creates a file that other users cannot read, and returns it when its content is on the disk.
fn stage(path: &Path, content: &[u8]) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_appended_to_until_it_has_grown_or_is_old() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let locked = ReplacedFile::lock(&path, Duration::ZERO).expect("it can be locked");
        let (mut file, _) = locked.expect("it is free");
        let is_appendable = |file: &ReplacedFile| file.is_appendable().expect("it can be seen");
        assert!(!is_appendable(&file) && file.append(b"x").is_err());
        for (len, most) in [(10, 65_536), (50_000, 100_000)] {
            file.replaced = file.replace(&vec![b'x'; len]).ok();
            file.append(&vec![b'y'; most - len - 1]).expect("room");
            assert!(is_appendable(&file));
            file.append(b"z").expect("there is room");
            assert!(!is_appendable(&file));
            let content = content(&path).expect("it is ours").expect("it is there");
            assert_eq!((content.len(), content.last()), (most, Some(&b'z')));
        }
        file.replaced = file.replace(b"x").ok();
        let minute = Duration::from_secs(60);
        for (age, expected) in [(minute / 2, true), (minute, false)] {
            let replaced = file.replaced.as_mut().expect("it is");
            replaced.at = Instant::now().checked_sub(age).expect("the host is up");
            assert_eq!(is_appendable(&file), expected);
        }
    }
}
