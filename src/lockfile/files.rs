//! The steps of [`takeover`](super::takeover) on a real file system, each with a fallback where
//! the file system or the kernel cannot do it.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::thread;
use std::time::{Duration, Instant};

use crate::sys::directory::{
    lock_range, lock_within, unlock_range, Directory, Entry, FileId, PrivateNames, RangeLock,
    StagedFile,
};

use super::record::{LIVE_LINE, MAX_LEN, READ_LOCK_LINE};
use super::staleness::{Content, Flock};
use super::takeover::{After, Files, LOCK_PATIENCE};

/// What files are called that are to become locks (sema-lockfile(5), FILES).
pub(super) const STAGED_NAMES: PrivateNames = PrivateNames {
    prefix: ".sema-",
    suffix: "~",
};

/// Whether to wait after a grant for implementations that judge, remove and create in separate
/// steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settle {
    /// Never.
    Never,
    /// After a takeover, for so long.
    AfterTakeover(Duration),
    /// After every grant, for so long: where implementations that create by renaming take part.
    Always(Duration),
}

impl Default for Settle {
    /// 20 ms after a takeover.
    fn default() -> Settle {
        Settle::AfterTakeover(Duration::from_millis(20))
    }
}

/// What a file system may lack. The tests lack it on purpose.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MissingFeatures {
    pub(super) unnamed_files: bool,
    pub(super) links: bool,
    /// Or what this process may not do with the file that it finds.
    pub(super) rewriting: bool,
    pub(super) locks: bool,
}

/// How lock files are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockFileOptions {
    /// Permissions, before the umask.
    pub(super) mode: u32,
    /// Whether a file is on the disk before it has a name.
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

/// The names of one lock, in its directory.
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

    /// Locks the file and writes the record. Where files cannot be locked, the record does not say
    /// that the file is locked.
    ///
    /// If the file has a name already, another process may lock it for a moment to look at it. This
    /// process waits for that: a record that says that its file is locked, when it is not, would
    /// give the lock away. Fails with [`io::ErrorKind::WouldBlock`] if that takes too long.
    fn fill(&self, file: &File, record: &[u8]) -> io::Result<()> {
        let missing = self.options.missing.locks;
        let reading = !missing && lock_range(file, RangeLock::Read).unwrap_or(false);
        let locked = match missing {
            true => None,
            false => supported(lock_within(file, LOCK_PATIENCE))?,
        };
        let record = match locked {
            Some(false) => return Err(io::ErrorKind::WouldBlock.into()),
            Some(true) if reading => record.to_vec(),
            Some(true) => without(record, READ_LOCK_LINE),
            None => without(&without(record, READ_LOCK_LINE), LIVE_LINE),
        };
        self.write(file, &record)
    }

    fn write(&self, mut file: &File, record: &[u8]) -> io::Result<()> {
        file.write_all(record)?;
        if self.options.is_synced {
            file.sync_all()?;
        }
        Ok(())
    }

    /// A file that is complete when its name appears.
    fn create_staged(&self, record: &[u8]) -> io::Result<File> {
        let complete = |staged: StagedFile<'_>| {
            self.fill(staged.file(), record)?;
            if self.options.missing.links {
                return Err(io::ErrorKind::Unsupported.into());
            }
            staged.link(self.name)?;
            Ok(staged.into_file())
        };
        let mode = self.options.mode;
        if self.options.missing.unnamed_files {
            return StagedFile::private(self.directory, &STAGED_NAMES, mode).and_then(complete);
        }
        StagedFile::make(self.directory, &STAGED_NAMES, mode, complete)
    }

    /// A file that is not complete yet when its name appears: no process takes an empty file for a
    /// stale one before the timeout is over.
    fn create_in_place(&self, record: &[u8]) -> io::Result<Option<File>> {
        let file = self.directory.create(self.name, self.options.mode)?;
        let filled = self.fill(&file, record);
        // If this process was asleep for very long, another one may have taken the empty file for a
        // stale one.
        let is_there = self.directory.identity(self.name)? == Some(FileId::of(&file)?);
        match filled {
            Ok(()) => Ok(is_there.then_some(file)),
            // That process has the file locked, and decides what becomes of the name.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => {
                // Half a lock file must not stay.
                if is_there {
                    let _ = self.directory.remove(self.name);
                }
                Err(error)
            }
        }
    }
}

impl Files for LockFiles<'_> {
    type File = File;

    fn create(&self, record: &[u8]) -> io::Result<Option<File>> {
        let made = match self.create_staged(record) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                self.create_in_place(record)
            }
            made => made.map(Some),
        };
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            other => other,
        }
    }

    fn open(&self) -> io::Result<Entry> {
        self.directory.open_file(self.name)
    }

    fn open_to_write(&self, file: &File) -> io::Result<Option<File>> {
        let writable = self.directory.open_to_write(self.name)?;
        let id = FileId::of(file)?;
        // If the name is another file's by now, the file that was found is judged as it is, and
        // found to have lost its name.
        Ok(writable.filter(|writable| FileId::of(writable).is_ok_and(|other| other == id)))
    }

    fn may_rewrite(&self, file: &File) -> io::Result<bool> {
        let found = file.metadata()?;
        let is_ours = found.uid() == rustix::process::geteuid().as_raw() && found.nlink() == 1;
        // Other users may have opened the file, and would read a record that is not for them.
        let is_open_to_more = found.mode() & !self.options.mode & 0o077 != 0;
        Ok(is_ours && !is_open_to_more && !self.options.missing.rewriting)
    }

    fn lock(&self, file: &File, patience: Duration) -> io::Result<Flock> {
        const POLL: Duration = Duration::from_millis(5);
        let deadline = Instant::now() + patience;
        loop {
            let flock = self.lock_once(file)?;
            if flock != Flock::Theirs || Instant::now() >= deadline {
                return Ok(flock);
            }
            thread::sleep(POLL);
        }
    }

    fn read(&self, file: &File) -> io::Result<Content> {
        read(file)
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
        if file.metadata()?.mode() != mode {
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        let rewritten = file.set_len(0).and_then(|()| self.write(file, record));
        if rewritten.is_err() && self.identity()? == Some(FileId::of(file)?) {
            // Half a lock file must not stay.
            let _ = self.directory.remove(self.name);
        }
        rewritten
    }

    fn remove(&self) -> io::Result<()> {
        self.directory.remove(self.name)
    }

    fn settle(&self, after: After) -> bool {
        let pause = match (self.options.settle, after) {
            (Settle::Always(pause), _) | (Settle::AfterTakeover(pause), After::Takeover) => pause,
            (Settle::Never | Settle::AfterTakeover(_), _) => return false,
        };
        thread::sleep(pause);
        true
    }
}

impl LockFiles<'_> {
    /// Locks the file by fcntl(2), and only then by flock(2). If a write lock is granted, no holder
    /// and no taker has it locked by flock(2).
    fn lock_once(&self, file: &File) -> io::Result<Flock> {
        if self.options.missing.locks {
            return Ok(Flock::Unknown);
        }
        let reading = supported(lock_range(file, RangeLock::Read))?;
        if reading == Some(false) {
            return Ok(Flock::Theirs);
        }
        match supported(lock_within(file, Duration::ZERO))? {
            Some(true) => return Ok(Flock::Ours),
            None => return Ok(Flock::Unknown),
            Some(false) => {}
        }
        if reading.is_some() && supported(lock_range(file, RangeLock::Write))? == Some(true) {
            return Ok(Flock::Bystanders);
        }
        unlock_range(file);
        Ok(Flock::Theirs)
    }
}

/// `None` if the file system has no such locks.
fn supported(locked: io::Result<bool>) -> io::Result<Option<bool>> {
    match locked {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
        other => other.map(Some),
    }
}

/// A record without one of its lines.
fn without(record: &[u8], line: &str) -> Vec<u8> {
    let text = String::from_utf8_lossy(record);
    text.replacen(&format!("\n{line}"), "\n", 1).into_bytes()
}

/// Reads a lock file: one byte more than the longest record at most.
pub(super) fn read(file: &File) -> io::Result<Content> {
    // Most records are short.
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
    Ok(Content {
        bytes,
        modified: u64::try_from(file.metadata()?.mtime()).unwrap_or(0),
    })
}

/// A file for this process alone; the umask applies to `mode`.
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

    use rustix::fs::{flock, FlockOperation};

    use super::*;

    const RECORD: &[u8] = b"pid=1\ntimestamp=0000000001\nx-live=flock\n";

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
    fn a_record_is_not_written_before_the_file_is_locked() {
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
                while let Err(error) = files.fill(&ours, RECORD) {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    assert!(asked.elapsed() >= LOCK_PATIENCE, "it did not wait");
                    assert_eq!(fs::read(path).expect("a file"), b"");
                    asked = Instant::now();
                }
            });
            assert_eq!(fs::read(path).expect("a record"), RECORD);
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
            let error = files.fill(&ours, RECORD).expect_err("locked");
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            assert_eq!(fs::read(path).expect("a file"), b"");
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
