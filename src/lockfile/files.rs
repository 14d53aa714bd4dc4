//! The steps of [`takeover`](super::takeover) on a real file system, each with a fallback if the
//! file system or the kernel does not support it.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::thread;
use std::time::Duration;

use crate::os::directory::{lock_within, Directory, Entry, FileId, StagedFile};
use crate::os::trusted::is_own;

use super::file_system::FileSystem;
use super::record::MAX_LEN;
use super::second_names::{self, STAGED_NAMES};
use super::staleness::{Content, Flock};
use super::takeover::{After, Creation, Files, HeldLock, RecordFor, LOCK_PATIENCE};

/// Longer than a process needs to overwrite a record.
const WRITE_TIME: Duration = Duration::from_millis(5);

/// Whether to pause after a grant. Some other implementations judge a lock file, remove it and
/// create a new one in separate steps, so they may still remove the file of the new holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settle {
    /// Do not pause.
    Never,
    /// Pause for this long after a takeover.
    AfterTakeover(Duration),
    /// Pause for this long after every grant. This is needed if some programs create lock files by
    /// renaming.
    Always(Duration),
}

impl Default for Settle {
    /// 20 ms after a takeover.
    fn default() -> Settle {
        Settle::AfterTakeover(Duration::from_millis(20))
    }
}

/// Features of the file system that the code treats as missing. Only tests set them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MissingFeatures {
    pub(super) unnamed_files: bool,
    pub(super) links: bool,
    /// Rewriting a file in place. A process can also lack the right to do so.
    pub(super) rewriting: bool,
    pub(super) locks: bool,
}

/// How lock files are created.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockFileOptions {
    /// Permissions, before the umask.
    pub(super) mode: u32,
    /// Whether a file is synced to the disk before it gets its name.
    pub(super) is_synced: bool,
    pub(super) settle: Settle,
    pub(super) missing: MissingFeatures,
}

impl Default for LockFileOptions {
    fn default() -> LockFileOptions {
        LockFileOptions {
            mode: 0o644,
            is_synced: true,
            settle: Settle::default(),
            missing: MissingFeatures::default(),
        }
    }
}

/// The lock file of one lock, in its directory.
#[derive(Debug)]
pub(super) struct LockFiles<'a> {
    directory: &'a Directory,
    name: &'a OsStr,
    options: LockFileOptions,
}

impl<'a> LockFiles<'a> {
    pub(super) fn new(
        directory: &'a Directory,
        name: &'a OsStr,
        options: LockFileOptions,
    ) -> LockFiles<'a> {
        LockFiles {
            directory,
            name,
            options,
        }
    }

    fn file_system(&self) -> Option<FileSystem> {
        FileSystem::of(self.directory)
    }

    /// Writes `bytes` at the start of the file.
    fn write_at_start(&self, file: &File, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, 0)?;
        if self.options.is_synced {
            file.sync_all().map_err(without_sync)?;
        }
        Ok(())
    }

    /// Removes the name after a failed write, so that no half-written lock file remains. The caller
    /// has the file locked.
    fn remove_if_ours(&self, file: &File) -> io::Result<()> {
        if self.identity()? == Some(FileId::of(file)?) {
            let _ = self.directory.remove(self.name);
        }
        Ok(())
    }
}

impl Files for LockFiles<'_> {
    type File = File;

    fn creation(&self) -> io::Result<Creation> {
        match self.file_system() {
            Some(here) if here.has_single_kernel() => Ok(Creation::ByLink),
            _ => second_names::creation_in(self.directory),
        }
    }

    fn create_linked(&self, record: &RecordFor<'_>) -> io::Result<Option<File>> {
        let complete = |staged: StagedFile<'_>| {
            let Some(lock) = self.lock_new(staged.file())? else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            self.write_at_start(staged.file(), &record(lock))?;
            if self.options.missing.links {
                return Err(io::ErrorKind::Unsupported.into());
            }
            staged.link(self.name)?;
            Ok(staged.into_file())
        };
        let mode = self.options.mode;
        let made = if self.options.missing.unnamed_files {
            StagedFile::private(self.directory, &STAGED_NAMES, mode).and_then(complete)
        } else {
            StagedFile::make(self.directory, &STAGED_NAMES, mode, complete)
        };
        unless_taken(made)
    }

    fn create_empty(&self) -> io::Result<Option<File>> {
        unless_taken(self.directory.create(self.name, self.options.mode))
    }

    /// If the file already has a name, another process may lock it for a moment to look at it. This
    /// process waits until that is over: a record that claims a lock on a file that is not locked
    /// would let another process take the lock over.
    fn lock_new(&self, file: &File) -> io::Result<Option<HeldLock>> {
        let flock = self.lock(file, LOCK_PATIENCE)?;
        Ok((flock != Flock::HeldByOther).then(|| HeldLock {
            has_flock: flock == Flock::Acquired,
            file_system: self.file_system(),
        }))
    }

    fn write(&self, file: &File, record: &[u8]) -> io::Result<()> {
        let written = self.write_at_start(file, record);
        if written.is_err() {
            self.remove_if_ours(file)?;
        }
        written
    }

    fn open(&self) -> io::Result<Entry> {
        self.directory.open_file(self.name)
    }

    fn is_mount_point(&self, file: &File) -> bool {
        self.directory.is_mount_point(self.name, file)
    }

    fn open_to_write(&self, file: &File) -> io::Result<Option<File>> {
        let writable = self.directory.open_to_write(self.name)?;
        let id = FileId::of(file)?;
        // If the name now belongs to another file, the caller goes on with the file that it has
        // found. It then sees that this file has lost its name.
        Ok(writable.filter(|writable| FileId::of(writable).is_ok_and(|other| other == id)))
    }

    fn may_rewrite(&self, file: &File) -> io::Result<bool> {
        let found = file.metadata()?;
        let is_ours = found.nlink() == 1 && is_own(found.uid());
        // If the file is open to more users than a new one would be, another user may have opened
        // it and could read a record that is not meant for that user.
        let is_open_to_more = found.mode() & !self.options.mode & 0o077 != 0;
        Ok(is_ours && !is_open_to_more && !self.options.missing.rewriting)
    }

    fn lock(&self, file: &File, patience: Duration) -> io::Result<Flock> {
        if self.options.missing.locks {
            return Ok(Flock::Unknown);
        }
        match lock_within(file, patience) {
            Ok(true) => Ok(Flock::Acquired),
            Ok(false) => Ok(Flock::HeldByOther),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(Flock::Unknown),
            Err(error) => Err(error),
        }
    }

    fn read(&self, file: &File) -> io::Result<Content> {
        read(file)
    }

    fn pause(&self) {
        thread::sleep(WRITE_TIME);
    }

    fn id(&self, file: &File) -> io::Result<FileId> {
        FileId::of(file)
    }

    fn identity(&self) -> io::Result<Option<FileId>> {
        self.directory.identity(self.name)
    }

    fn prepare(&self, record: &[u8]) -> io::Result<u32> {
        let mut sample = new_file(self.directory, self.options.mode)?;
        sample.write_all(record)?;
        Ok(sample.metadata()?.mode())
    }

    fn rewrite(&self, file: &File, record: &[u8], mode: u32) -> io::Result<()> {
        let found = file.metadata()?;
        if found.mode() != mode {
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        // The padding stays if this process dies before the truncation: a reader then finds the
        // record and empty lines.
        let old_len = usize::try_from(found.len()).unwrap_or(MAX_LEN).min(MAX_LEN);
        let mut padded = record.to_vec();
        padded.resize(record.len().max(old_len), b'\n');
        let rewritten = self
            .write_at_start(file, &padded)
            .and_then(|()| file.set_len(record.len() as u64));
        if rewritten.is_err() {
            self.remove_if_ours(file)?;
        }
        rewritten
    }

    fn may_remove(&self) -> io::Result<bool> {
        self.directory.may_remove(self.name)
    }

    fn remove(&self) -> io::Result<()> {
        self.directory.remove(self.name)
    }

    fn wait_for_earlier_judges(&self, after: After) -> bool {
        let pause = match (self.options.settle, after) {
            (Settle::Always(pause), _) | (Settle::AfterTakeover(pause), After::Takeover) => pause,
            (Settle::Never | Settle::AfterTakeover(_), _) => return false,
        };
        thread::sleep(pause);
        true
    }
}

/// Says what to do if the file system cannot sync a file at all. Passes on any other error.
fn without_sync(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => io::Error::other(
            "the file system cannot sync a file (Invalid argument); see --no-sync in sema(1)",
        ),
        _ => error,
    }
}

/// Returns `None` if the name is taken.
fn unless_taken(made: io::Result<File>) -> io::Result<Option<File>> {
    match made {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        made => made.map(Some),
    }
}

/// Reads a lock file up to one byte beyond the maximum length of a record. If the file looks like
/// another program's, reads it a second time, because a taker may have been overwriting the record.
pub(super) fn read(file: &File) -> io::Result<Content> {
    let content = read_once(file)?;
    if content.is_lock_file {
        return Ok(content);
    }
    thread::sleep(WRITE_TIME);
    read_once(file)
}

fn read_once(file: &File) -> io::Result<Content> {
    // Most records fit into this buffer.
    let mut bytes = vec![0; 1024];
    let mut len = 0;
    loop {
        match file.read_at(&mut bytes[len..], len as u64) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if len == bytes.len() {
            bytes.resize(MAX_LEN + 1, 0);
        }
    }
    bytes.truncate(len);
    let modified = u64::try_from(file.metadata()?.mtime()).unwrap_or(0);
    let (id, file_system) = (FileId::of(file)?, FileSystem::of(file));
    Ok(Content::new(bytes, modified, id, file_system))
}

/// Makes a temporary file that only this process uses. The umask applies to `mode`.
pub(super) fn new_file(directory: &Directory, mode: u32) -> io::Result<File> {
    StagedFile::make(directory, &STAGED_NAMES, mode, |staged| {
        Ok(staged.into_file())
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::sync::mpsc;
    use std::time::Instant;

    use rustix::fs::{flock, FlockOperation};

    use super::*;

    fn with_files(check: impl FnOnce(&Path, &LockFiles<'_>)) {
        let scratch = tempfile::tempdir().expect("a directory");
        let directory = Directory::open(scratch.path()).expect("a directory");
        let options = LockFileOptions {
            mode: 0o644,
            is_synced: false,
            settle: Settle::Never,
            missing: MissingFeatures::default(),
        };
        let name = OsStr::new("files.lock");
        check(
            &scratch.path().join(name),
            &LockFiles::new(&directory, name, options),
        );
    }

    /// Another process's lock on the file while it looks at it.
    fn locked(path: &Path) -> File {
        let file = File::open(path).expect("a file");
        flock(&file, FlockOperation::NonBlockingLockExclusive).expect("a lock");
        file
    }

    #[test]
    fn a_new_file_waits_for_a_process_that_looks_at_it() {
        with_files(|path, files| {
            let ours = files.directory.create(path, 0o644).expect("a file");
            let theirs = locked(path);
            let (sender, receiver) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(move || {
                    receiver.recv().expect("the start");
                    thread::sleep(Duration::from_millis(20));
                    drop(theirs);
                });
                sender.send(()).expect("a thread");
                let mut asked = Instant::now();
                // On a busy machine, the other process has it for longer than the patience.
                let lock = loop {
                    if let Some(lock) = files.lock_new(&ours).expect("an attempt") {
                        break lock;
                    }
                    assert!(asked.elapsed() >= LOCK_PATIENCE, "it did not wait");
                    asked = Instant::now();
                };
                assert!(lock.has_flock);
            });
            let third = File::open(path).expect("a file");
            let refused = flock(&third, FlockOperation::NonBlockingLockExclusive);
            assert!(refused.is_err(), "the record says that we have it locked");
        });
    }

    #[test]
    fn a_file_that_others_keep_locked_gets_no_record() {
        with_files(|path, files| {
            let ours = files.directory.create(path, 0o644).expect("a file");
            let _theirs = locked(path);
            assert_eq!(files.lock_new(&ours).expect("an attempt"), None);
        });
    }

    #[test]
    fn a_write_that_fails_removes_the_name_of_its_own_file_alone() {
        with_files(|path, files| {
            for (is_rewrite, is_replaced) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                fs::write(path, "old").expect("a file");
                // It is open for reading alone.
                let ours = File::open(path).expect("a file");
                if is_replaced {
                    fs::remove_file(path).expect("our file");
                    fs::write(path, "theirs").expect("another file");
                }
                let written = if is_rewrite {
                    files.rewrite(&ours, b"new", 0o100_644)
                } else {
                    files.write(&ours, b"new")
                };
                assert!(written.is_err());
                assert_eq!(path.exists(), is_replaced, "{is_rewrite}");
            }
        });
    }

    #[test]
    fn no_more_than_a_record_is_read() {
        with_files(|path, _| {
            for len in [
                0,
                1,
                1023,
                1024,
                1025,
                MAX_LEN - 1,
                MAX_LEN,
                MAX_LEN + 1,
                1 << 20,
            ] {
                let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
                fs::write(path, &bytes).expect("a file");
                let read = read(&File::open(path).expect("a file")).expect("its content");
                assert!(read.bytes == bytes[..len.min(MAX_LEN + 1)], "{len}");
            }
        });
    }
}
