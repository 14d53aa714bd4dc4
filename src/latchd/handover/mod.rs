//! An orderly restart that keeps every lock: one server writes its holders to a file, and the next
//! one restores them from it. See latchd(8), UPGRADES.

pub(crate) mod file;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use log::info;

use crate::arbiter::Arbiter;
use crate::sys::directory::{open_exclusive, parent_of, sync_name, Directory, Entry};
use crate::sys::trusted::is_own_or_root;
use crate::text::{reason, unusable_file, Escaped};
pub use file::Handover;
use file::{decode, encode, Unreadable};

/// How long this server waits for the previous one, which is ending, to unlock the lock file.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// The path of the hand-over file. While this value exists, no other server uses that path.
pub struct HandoverFile {
    path: PathBuf,
    /// Locked for the life of the process. This is a separate file, because the hand-over file is
    /// replaced.
    _lock: File,
}

impl HandoverFile {
    /// Locks the path of the hand-over file, if the options name one. Blocks for at most a second.
    pub fn lock(path: Option<&Path>) -> Result<Option<HandoverFile>, String> {
        let Some(path) = path else {
            return Ok(None);
        };
        let lock_path = beside(path, ".lock");
        let unusable = |why: String| unusable_file("hand-over", &lock_path, why);
        let locked = lock_file(&lock_path).map_err(|error| unusable(reason(&error)))?;
        let lock = locked.ok_or_else(|| {
            let why = "another server is using it".to_owned();
            unusable_file("hand-over", path, why)
        })?;
        Ok(Some(HandoverFile {
            path: path.to_owned(),
            _lock: lock,
        }))
    }

    /// Reads the hand-over of the previous server, if there is one.
    pub fn read(&self) -> Result<Option<Handover>, String> {
        let unusable = |why: String| unusable_file("hand-over", &self.path, why);
        let content = self.content().map_err(|error| unusable(reason(&error)))?;
        let Some(content) = content else {
            return Ok(None);
        };
        let handover = decode(&content).map_err(|why| {
            unusable(match why {
                Unreadable::Foreign => format!("latchd has not written it; {START_WITHOUT}"),
                Unreadable::Newer(version) => format!(
                    "it has version {version}, of a newer latchd: start that one, or {START_WITHOUT}"
                ),
                Unreadable::Broken => format!("it is damaged; {START_WITHOUT}"),
            })
        });
        handover.map(Some)
    }

    fn content(&self) -> io::Result<Option<Vec<u8>>> {
        let name = self.path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut file = match Directory::of(&self.path)?.open_file(name)? {
            Entry::Nothing => return Ok(None),
            Entry::File(file) => file,
            Entry::Unreadable => return Err(io::ErrorKind::PermissionDenied.into()),
            Entry::Other => return Err(io::Error::other("it is not a regular file")),
        };
        refuse_owner(file.metadata()?.uid())?;
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        Ok(Some(content))
    }

    /// Restores the holders of the previous server, and removes the file, which is out of date from
    /// now on.
    pub fn restore(&self, handover: &Handover, arbiter: &Arbiter) -> Result<(), String> {
        let unusable = |why: String| unusable_file("hand-over", &self.path, why);
        if !arbiter.restore(&handover.holders).is_empty() {
            return Err(unusable(format!(
                "its holders contradict each other; {START_WITHOUT}"
            )));
        }
        let removed = fs::remove_file(&self.path).and_then(|()| sync_directory(&self.path));
        removed.map_err(|error| unusable(reason(&error)))?;
        info!(
            "took-over path={} holders={}",
            Escaped::path(&self.path),
            handover.holders.len()
        );
        Ok(())
    }

    /// Writes the file so that it survives a power cut. After an error no file is left, because
    /// this server continues and the file would soon be out of date.
    pub fn write(&self, handover: &Handover) -> io::Result<()> {
        let staged = beside(&self.path, ".new");
        if let Err(error) = stage(&staged, encode(handover).as_bytes())
            .and_then(|()| fs::rename(&staged, &self.path))
        {
            let _ = fs::remove_file(&staged);
            return Err(error);
        }
        if let Err(error) = sync_name(&self.path) {
            let _ = fs::remove_file(&self.path);
            return Err(error);
        }
        info!(
            "handed-over path={} holders={}",
            Escaped::path(&self.path),
            handover.holders.len()
        );
        Ok(())
    }
}

/// Opens and locks a file; `None` if another process has locked it.
fn lock_file(path: &Path) -> io::Result<Option<File>> {
    // The owner is checked first: another user who owns the file may have locked it, and this
    // server would then wait for that lock.
    match fs::symlink_metadata(path) {
        Ok(metadata) => refuse_owner(metadata.uid())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let lock = open_exclusive(path, 0o600, LOCK_PATIENCE)?;
    if let Some(lock) = &lock {
        refuse_owner(lock.metadata()?.uid())?;
    }
    Ok(lock)
}

/// Refuses a file of another user, because that user could change, remove or lock it.
fn refuse_owner(owner: u32) -> io::Result<()> {
    match is_own_or_root(owner) {
        true => Ok(()),
        false => Err(io::Error::other("it belongs to another user")),
    }
}

const START_WITHOUT: &str = "move it away to start without the locks in it";

/// The path with a suffix added to its file name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Creates a file, and returns when its content is on the disk.
fn stage(path: &Path, content: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The file contains tags and tokens, which other users must not read.
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(parent_of(path))?.sync_all()
}
