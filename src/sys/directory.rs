//! An opened directory, and the steps on its names that lock files are made of. Every name is looked up
//! from the descriptor: nobody can put another directory in our way between two steps.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    flock, fstat, fsync, linkat, openat, renameat, renameat_with, statat, unlinkat, AtFlags,
    FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, CWD,
};
use rustix::io::Errno;

/// Which file it is, whatever its name: good for as long as the file has a name or is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Of a file that is only thought of.
    #[cfg(test)]
    pub fn of_model(device: u64, inode: u64) -> FileId {
        FileId { device, inode }
    }

    /// Of an open file.
    pub fn of(file: &File) -> io::Result<FileId> {
        Ok(FileId::from(&fstat(file)?))
    }
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> FileId {
        FileId {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

/// What stands under a name.
#[derive(Debug)]
pub enum Entry {
    /// Nothing at all.
    Nothing,
    /// A regular file, opened for reading.
    File(File),
    /// A regular file that we may not read, or not for the moment.
    Unreadable,
    /// A symbolic link, a directory, a device, a pipe or a socket. It was not opened.
    Other,
}

/// A directory, held open.
#[derive(Debug)]
pub struct Directory(OwnedFd);

impl Directory {
    /// The directory `path` itself.
    pub fn open(path: &Path) -> io::Result<Directory> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat(CWD, path, flags | OFlags::RDONLY, Mode::empty()) {
            // Where we may not see what there is, we may still make and remove what we know of.
            Err(Errno::ACCESS) => Ok(Directory(openat(
                CWD,
                path,
                flags | OFlags::PATH,
                Mode::empty(),
            )?)),
            other => Ok(Directory(other?)),
        }
    }

    /// The directory that `file` stands in.
    pub fn of(file: &Path) -> io::Result<Directory> {
        Directory::open(parent_of(file))
    }

    /// Which file stands under `name`, if any. A link is not followed.
    pub fn identity(&self, name: impl AsRef<Path>) -> io::Result<Option<FileId>> {
        Ok(self.stat(name.as_ref())?.map(|stat| FileId::from(&stat)))
    }

    /// Opens what stands under `name`, if it is a regular file: a link is not followed, and nothing
    /// else is touched, since opening a device may do something.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::PermissionDenied`] if the directory may not be searched, or what else the system says.
    pub fn open_file(&self, name: impl AsRef<Path>) -> io::Result<Entry> {
        match self.stat(name.as_ref())? {
            None => return Ok(Entry::Nothing),
            Some(stat) if !is_file(&stat) => return Ok(Entry::Other),
            Some(_) => {}
        }
        // It may have been replaced since: hence the second look.
        match self.open_at_once(name.as_ref(), OFlags::RDONLY) {
            Ok(file) if is_file(&fstat(&file)?) => Ok(Entry::File(file.into())),
            Ok(_) | Err(Errno::LOOP | Errno::NXIO) => Ok(Entry::Other),
            Err(Errno::NOENT) => Ok(Entry::Nothing),
            // The last: somebody else's lease on it has yet to be broken.
            Err(Errno::ACCESS | Errno::PERM | Errno::AGAIN) => Ok(Entry::Unreadable),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the regular file under `name` for reading and writing; `None` if there is none, or if this process
    /// may not write it.
    pub fn open_to_write(&self, name: impl AsRef<Path>) -> io::Result<Option<File>> {
        match self.open_at_once(name.as_ref(), OFlags::RDWR) {
            Ok(file) => Ok(is_file(&fstat(&file)?).then(|| file.into())),
            Err(Errno::NOENT | Errno::ISDIR | Errno::LOOP | Errno::NXIO) => Ok(None),
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Ok(None),
            Err(Errno::AGAIN | Errno::TXTBSY) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Follows no link, and does not wait for a pipe's other end.
    fn open_at_once(&self, name: &Path, access: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        openat(&self.0, name, flags | access, Mode::empty())
    }

    /// A new file under `name`, opened for reading and writing; the umask applies to `mode`.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::AlreadyExists`] if anything stands there.
    pub fn create(&self, name: impl AsRef<Path>, mode: u32) -> io::Result<File> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.0, name.as_ref(), flags, Mode::from_raw_mode(mode))?.into())
    }

    /// A new file without a name, opened for reading and writing; the umask applies to `mode`.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::Unsupported`] if the kernel or the file system does not know such files.
    pub fn create_unnamed(&self, mode: u32) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        match openat(&self.0, ".", flags, Mode::from_raw_mode(mode)) {
            Ok(file) => Ok(file.into()),
            // A kernel before 3.11 opens the directory, and finds that it cannot be written.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => {
                Err(unsupported())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Gives the open `file` a name, or one more.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::AlreadyExists`] if anything stands there, [`io::ErrorKind::Unsupported`] if there
    /// are no hard links here, or no /proc to find the file by.
    pub fn link_file(&self, file: &File, name: impl AsRef<Path>) -> io::Result<()> {
        let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
        match linkat(
            CWD,
            &*by_descriptor,
            &self.0,
            name.as_ref(),
            AtFlags::SYMLINK_FOLLOW,
        ) {
            Err(Errno::NOENT) => Err(unsupported()),
            other => without_links(other),
        }
    }

    /// Gives what stands under `from` another name.
    ///
    /// # Errors
    ///
    /// As for [`Directory::link_file`].
    pub fn link(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        without_links(linkat(
            &self.0,
            from.as_ref(),
            &self.0,
            to.as_ref(),
            AtFlags::empty(),
        ))
    }

    /// Moves what stands under `from` to `to`, and replaces what stood there.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        Ok(renameat(&self.0, from.as_ref(), &self.0, to.as_ref())?)
    }

    /// Moves what stands under `from` to `to`, if nothing stands there.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::AlreadyExists`] if anything stands there, [`io::ErrorKind::Unsupported`] if the
    /// kernel or the file system cannot do it.
    pub fn rename_to_free(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        let (from, to) = (from.as_ref(), to.as_ref());
        match renameat_with(&self.0, from, &self.0, to, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Err(unsupported()),
            other => Ok(other?),
        }
    }

    /// Takes away a name.
    pub fn remove(&self, name: impl AsRef<Path>) -> io::Result<()> {
        Ok(unlinkat(&self.0, name.as_ref(), AtFlags::empty())?)
    }

    /// Returns when the names as they are now would survive a power cut.
    pub fn sync(&self) -> io::Result<()> {
        Ok(fsync(&self.0)?)
    }

    fn stat(&self, name: impl AsRef<Path>) -> io::Result<Option<Stat>> {
        match statat(&self.0, name.as_ref(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The directory part of a path; `.` if it has none.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Locks an open file or directory against all others, for as long as its descriptor is open; waits for
/// them if need be, but no longer than `patience`. Returns whether it has the lock.
///
/// # Errors
///
/// [`io::ErrorKind::Unsupported`] if the file system does not know such locks, or what the system says.
pub fn lock_within(file: &impl AsFd, patience: Duration) -> io::Result<bool> {
    const POLL: Duration = Duration::from_millis(5);
    let deadline = Instant::now() + patience;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(POLL),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                return Err(unsupported())
            }
            // NFS locks a file only for those who have opened it for writing. A descriptor that is not
            // open at all cannot get here.
            Err(Errno::BADF) => return Err(unsupported()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

fn without_links(result: rustix::io::Result<()>) -> io::Result<()> {
    match result {
        // FAT and the like say EPERM.
        Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => Err(unsupported()),
        other => Ok(other?),
    }
}

fn unsupported() -> io::Error {
    io::ErrorKind::Unsupported.into()
}
