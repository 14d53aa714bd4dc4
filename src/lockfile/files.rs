//! The steps of [`takeover`](super::takeover) on a real file system, each with its fallback.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::sys::directory::{lock_within, Directory, Entry, FileId};

use super::record::{LIVE_LINE, MAX_LEN};
use super::staleness::{Content, Flock};
use super::takeover::{After, Files, Found};

/// How long a removal waits for a file that another process has locked.
const LOCK_PATIENCE: Duration = Duration::from_millis(200);

/// What the names of temporary files begin and end with, around 16 hex digits.
pub(super) const TEMPORARY_PREFIX: &str = ".sema-";
pub(super) const TEMPORARY_SUFFIX: &str = "~";

/// Whether to wait after a grant for implementations that judge, remove and create in separate
/// steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settle {
    /// Never.
    Never,
    /// After a takeover, for this long.
    AfterTakeover(Duration),
    /// After every grant, for this long: where implementations that create by renaming take part.
    Always(Duration),
}

impl Default for Settle {
    /// 20 ms after a takeover.
    fn default() -> Settle {
        Settle::AfterTakeover(Duration::from_millis(20))
    }
}

/// Features that a file system, or a process on it, can lack.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MissingFeatures {
    pub(super) unnamed_files: bool,
    pub(super) links: bool,
    /// Includes the right of this process to rewrite the file that it finds.
    pub(super) rewriting: bool,
    pub(super) locks: bool,
}

/// How lock files are created and rewritten.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockFileOptions {
    /// Permissions, before the umask.
    pub(super) mode: u32,
    /// Whether a file is synced to the disk before it has a name.
    pub(super) is_synced: bool,
    pub(super) settle: Settle,
    pub(super) missing: MissingFeatures,
}

/// One lock in its directory.
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

    /// Locks the file and writes the record. Where files cannot be locked, it leaves out the line
    /// that says so.
    ///
    /// A process that looks at a file with a name can have it locked for a moment. This call waits
    /// for that: a record that claims a lock on the file without having one would give the lock
    /// away.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::WouldBlock`] if another process keeps the file locked, or an error of the
    /// system.
    fn fill(&self, file: &File, record: &[u8]) -> io::Result<()> {
        let record = match self.lock_patiently(file)? {
            Flock::Ours => record,
            Flock::Theirs => return Err(io::ErrorKind::WouldBlock.into()),
            Flock::Unknown => record.strip_suffix(LIVE_LINE.as_bytes()).unwrap_or(record),
        };
        self.write(file, record)
    }

    fn write(&self, mut file: &File, record: &[u8]) -> io::Result<()> {
        file.write_all(record)?;
        if self.options.is_synced {
            file.sync_all()?;
        }
        Ok(())
    }

    /// Completes a file without a name, then links it.
    fn create_unnamed(&self, record: &[u8]) -> io::Result<Option<File>> {
        if self.options.missing.unnamed_files || self.options.missing.links {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let file = self.directory.create_unnamed(self.options.mode)?;
        self.fill(&file, record)?;
        named(self.directory.link_file(&file, self.name), file)
    }

    /// Completes a file under a temporary name, then links it.
    fn create_elsewhere(&self, record: &[u8]) -> io::Result<Option<File>> {
        let elsewhere = temporary_name()?;
        let file = self.directory.create(&elsewhere, self.options.mode)?;
        let filled = self.fill(&file, record);
        let linked = filled
            .and_then(|()| self.link_file(&file, Path::new(&elsewhere), Path::new(self.name)));
        let _ = self.directory.remove(&elsewhere);
        named(linked, file)
    }

    /// Gives the open file, which has the name `from`, one more name.
    fn link_file(&self, file: &File, from: &Path, to: &Path) -> io::Result<()> {
        let linked = self.link(from, to);
        // On NFS the link can exist although the reply reports an error.
        if linked.is_err() && self.directory.identity(to)? == Some(FileId::of(file)?) {
            return Ok(());
        }
        linked
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.options.missing.links {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.directory.link(from, to)
    }

    /// Creates a file that gets its record after its name. Until the timeout, no process takes the
    /// empty file for a stale lock.
    fn create_in_place(&self, record: &[u8]) -> io::Result<Option<File>> {
        let file = match self.directory.create(self.name, self.options.mode) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(error),
        };
        let filled = self.fill(&file, record);
        // If this process was paused for long, another may have taken the empty file for a stale
        // lock.
        let is_there = self.directory.identity(self.name)? == Some(FileId::of(&file)?);
        match filled {
            Ok(()) => Ok(is_there.then_some(file)),
            // That process has the file locked, and decides over the name.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => {
                // Leave nothing that looks like a lock.
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
        let mut made = self.create_unnamed(record);
        if is_unsupported(&made) {
            made = self.create_elsewhere(record);
        }
        if is_unsupported(&made) {
            made = self.create_in_place(record);
        }
        made
    }

    fn open(&self) -> io::Result<Found<File>> {
        Ok(match self.directory.open_file(self.name)? {
            Entry::Nothing => Found::Nothing,
            Entry::File(file) => Found::File(file),
            Entry::Unreadable => Found::Unreadable,
            Entry::Other => Found::NotAFile,
        })
    }

    fn open_to_rewrite(&self, file: &File) -> io::Result<Option<File>> {
        let found = file.metadata()?;
        let is_ours = found.uid() == rustix::process::geteuid().as_raw() && found.nlink() == 1;
        if self.options.missing.rewriting || !is_ours {
            return Ok(None);
        }
        let writable = self.directory.open_to_write(self.name)?;
        let id = FileId::of(file)?;
        // If it is another file by now, the taker judges the one that it found, and sees that it
        // has lost its name.
        Ok(writable.filter(|writable| FileId::of(writable).is_ok_and(|other| other == id)))
    }

    fn lock(&self, file: &File) -> io::Result<Flock> {
        self.lock_for(file, Duration::ZERO)
    }

    fn lock_patiently(&self, file: &File) -> io::Result<Flock> {
        self.lock_for(file, LOCK_PATIENCE)
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
            // Leave nothing that looks like a lock.
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
    fn lock_for(&self, file: &File, patience: Duration) -> io::Result<Flock> {
        if self.options.missing.locks {
            return Ok(Flock::Unknown);
        }
        match lock_within(file, patience) {
            Ok(true) => Ok(Flock::Ours),
            Ok(false) => Ok(Flock::Theirs),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(Flock::Unknown),
            Err(error) => Err(error),
        }
    }
}

/// Reads a lock file, up to one byte more than a record can have.
pub(super) fn read(file: &File) -> io::Result<Content> {
    const CHUNK: usize = 1024;
    let mut bytes = Vec::new();
    while bytes.len() <= MAX_LEN {
        let start = bytes.len();
        bytes.resize((start + CHUNK).min(MAX_LEN + 1), 0);
        let read = match file.read_at(&mut bytes[start..], start as u64) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                bytes.truncate(start);
                continue;
            }
            Err(error) => return Err(error),
        };
        bytes.truncate(start + read);
        if read == 0 {
            break;
        }
    }
    Ok(Content {
        bytes,
        modified: u64::try_from(file.metadata()?.mtime()).unwrap_or(0),
    })
}

/// A file without a name, or with one for a moment only; the umask applies to `mode`.
pub(super) fn new_file(directory: &Directory, mode: u32) -> io::Result<File> {
    match directory.create_unnamed(mode) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            let name = temporary_name()?;
            let file = directory.create(&name, mode)?;
            let _ = directory.remove(&name);
            Ok(file)
        }
        other => other,
    }
}

/// Whether this is a name of a temporary file of ours.
pub(super) fn is_temporary_name(name: &OsStr) -> bool {
    let digits = name
        .as_bytes()
        .strip_prefix(TEMPORARY_PREFIX.as_bytes())
        .and_then(|rest| rest.strip_suffix(TEMPORARY_SUFFIX.as_bytes()));
    digits.is_some_and(|digits| digits.len() == 16 && digits.iter().all(u8::is_ascii_hexdigit))
}

/// A random name.
pub(super) fn temporary_name() -> io::Result<String> {
    let random = getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?;
    Ok(format!("{TEMPORARY_PREFIX}{random:016x}{TEMPORARY_SUFFIX}"))
}

fn named(linked: io::Result<()>, file: File) -> io::Result<Option<File>> {
    match linked {
        Ok(()) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_unsupported<T>(result: &io::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == io::ErrorKind::Unsupported)
}

#[cfg(test)]
mod tests {
    use std::fs;
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

    /// The file, locked by a process that looks at it.
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
                files.fill(&ours, RECORD).expect("a record");
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
    fn a_link_that_was_made_counts_whatever_the_reply() {
        with_files(|path, files| {
            let elsewhere = Path::new("elsewhere");
            let ours = files.directory.create(elsewhere, 0o644).expect("a file");
            // As by a request whose reply was lost and that the client has sent again.
            fs::hard_link(path.with_file_name(elsewhere), path).expect("a link");
            files.link_file(&ours, elsewhere, path).expect("our link");
            fs::remove_file(path).expect("our link");
            fs::write(path, "").expect("another file");
            let error = files.link_file(&ours, elsewhere, path).expect_err("taken");
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
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

    #[test]
    fn names_aside_are_known_and_others_are_not() {
        assert!(is_temporary_name(OsStr::new(
            &temporary_name().expect("a name")
        )));
        for name in [
            ".sema-0123456789abcdef",
            ".sema-0123456789abcde~",
            ".sema-0123456789abcdef0~",
            ".sema-0123456789abcdeg~",
            "sema-0123456789abcdef~",
            ".sema-~",
            "",
        ] {
            assert!(!is_temporary_name(OsStr::new(name)), "{name}");
        }
    }
}
