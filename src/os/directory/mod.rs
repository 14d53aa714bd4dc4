//! An open directory, and operations on its names, which lock files are made with. Every name is
//! looked up from the descriptor, so no process can replace the directory between two operations.

#[cfg(feature = "programs")]
pub mod replaced;
mod staged;

#[cfg(test)]
pub use staged::{in_directory, names_in};
pub use staged::{PrivateNames, StagedFile};

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    accessat, flock, fstat, fstatfs, fsync, linkat, makedev, openat, statat, statx, unlinkat,
    Access, AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, StatxAttributes, StatxFlags,
    CWD,
};
use rustix::io::{retry_on_intr, Errno};
use rustix::process::geteuid;

use super::process::is_own;
use crate::os::text::Escaped;

/// The error for `file`. If its directory is missing, the error names the directory.
pub fn naming_directory(file: &Path, error: io::Error) -> io::Error {
    let directory = parent_of(file);
    if error.kind() != io::ErrorKind::NotFound || directory.exists() {
        return error;
    }
    let directory = Escaped::path(directory);
    io::Error::new(error.kind(), format!("no such directory: {directory}"))
}

/// Identifies a file by device and inode, whatever its names. Valid while the file has a name or is
/// open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(u64, u64);

impl FileId {
    pub fn of(file: &File) -> io::Result<FileId> {
        Ok(FileId::from(&fstat(file)?))
    }

    /// Reads an id as /proc/locks has it: the numbers of the device in hexadecimal, and the inode.
    pub fn parse(text: &str) -> Option<FileId> {
        let mut parts = text.split(':');
        let mut number = || u32::from_str_radix(parts.next()?, 16).ok();
        let device = makedev(number()?, number()?);
        Some(FileId(device, parts.next()?.parse().ok()?))
    }
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> FileId {
        FileId(stat.st_dev, stat.st_ino)
    }
}

/// The result of [`Directory::remove_if`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetAside {
    /// The name belonged to the intended file, and has been removed.
    Removed,
    /// There was no file under the name.
    Missing,
    /// The name belonged to another file, and has been given back to that file.
    PutBack,
    /// The name belonged to another file. That file has lost the name, because a third file has
    /// taken it.
    Displaced,
}

/// What a name in a directory refers to.
#[derive(Debug)]
pub enum Entry<F = File> {
    Nothing,
    /// A regular file, opened for reading.
    File(F),
    /// A regular file that this process may not read, or that cannot be read at present.
    Unreadable,
    /// A symbolic link, a directory, a device, a pipe or a socket.
    Other,
}

/// A directory, held open.
#[derive(Debug)]
pub struct Directory(OwnedFd);

impl Directory {
    pub fn open(path: &Path) -> io::Result<Directory> {
        let open = |access| {
            let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | access;
            openat(CWD, path, flags, Mode::empty()).map(Directory)
        };
        match open(OFlags::RDONLY) {
            // A process that may not list a directory may still create and remove names in it.
            Err(Errno::ACCESS) => Ok(open(OFlags::PATH)?),
            other => Ok(other?),
        }
    }

    /// The directory that `file` is in.
    pub fn of(file: &Path) -> io::Result<Directory> {
        Directory::open(parent_of(file))
    }

    pub fn id(&self) -> io::Result<FileId> {
        Ok(FileId::from(&fstat(&self.0)?))
    }

    /// Identifies the file under `name`, if there is one. Does not follow a link.
    pub fn identity(&self, name: impl AsRef<Path>) -> io::Result<Option<FileId>> {
        Ok(self.stat(name.as_ref())?.map(|stat| FileId::from(&stat)))
    }

    /// Whether `file`, which was opened under `name`, is a mount point; `false` if the kernel
    /// cannot tell.
    pub fn is_mount_point(&self, name: impl AsRef<Path>, file: &File) -> bool {
        let of_name = mount_of(self, name.as_ref(), AtFlags::SYMLINK_NOFOLLOW);
        let of_directory = mount_of(self, Path::new(""), AtFlags::EMPTY_PATH);
        match (of_name, of_directory) {
            (Some(name), Some(directory)) => name != directory,
            _ => match (mount_in_proc(file), mount_in_proc(self)) {
                (Some(file), Some(directory)) => file != directory,
                _ => false,
            },
        }
    }

    /// Whether the directory is on a file system that is empty after each boot; `None` if the
    /// system cannot tell.
    pub fn is_in_memory(&self) -> Option<bool> {
        const TMPFS_MAGIC: u32 = 0x0102_1994;
        const RAMFS_MAGIC: u32 = 0x8584_58f6;
        // The type of the number differs between architectures.
        let kind = fstatfs(&self.0).ok()?.f_type as u32;
        Some([TMPFS_MAGIC, RAMFS_MAGIC].contains(&kind))
    }

    /// Whether this process may create and remove names; `true` if the system cannot tell.
    pub fn may_change_names(&self) -> bool {
        let access = Access::WRITE_OK | Access::EXEC_OK;
        let asked = accessat(&self.0, ".", access, AtFlags::EACCESS);
        !matches!(asked, Err(Errno::ACCESS | Errno::PERM | Errno::ROFS))
    }

    /// Whether the file system is read-only; `false` if the system cannot tell.
    pub fn is_read_only(&self) -> bool {
        let asked = accessat(&self.0, ".", Access::WRITE_OK, AtFlags::EACCESS);
        matches!(asked, Err(Errno::ROFS))
    }

    /// Whether this process may remove the file under `name`, as far as permissions and attributes
    /// show; `true` if there is no such file.
    pub fn may_remove(&self, name: impl AsRef<Path>) -> io::Result<bool> {
        const STICKY: u32 = 0o1000;
        let Some(file) = self.stat(&name)? else {
            return Ok(true);
        };
        let directory = fstat(&self.0)?;
        let is_root = geteuid().is_root();
        let is_kept = directory.st_mode & STICKY != 0
            && ![file.st_uid, directory.st_uid].into_iter().any(is_own)
            && !is_root;
        let fixed = StatxAttributes::IMMUTABLE | StatxAttributes::APPEND;
        let is_fixed = |name: &Path, flags| {
            let found = statx(&self.0, name, flags, StatxFlags::empty());
            found.is_ok_and(|found| found.stx_attributes.intersects(fixed))
        };
        Ok(self.may_change_names()
            && !is_kept
            && !is_fixed(name.as_ref(), AtFlags::SYMLINK_NOFOLLOW)
            && !is_fixed(Path::new(""), AtFlags::EMPTY_PATH))
    }

    /// Opens the regular file under `name`. Does not follow a link, and does not open a device,
    /// because opening a device may have side effects. Fails with
    /// [`io::ErrorKind::PermissionDenied`] if the directory may not be searched, or with any other
    /// error of the system.
    pub fn open_file(&self, name: impl AsRef<Path>) -> io::Result<Entry> {
        match self.stat(name.as_ref())? {
            None => return Ok(Entry::Nothing),
            Some(stat) if !is_file(&stat) => return Ok(Entry::Other),
            Some(_) => {}
        }
        // Another process may have replaced the file after the first check, so the open file is
        // checked again.
        match self.open_at_once(name.as_ref(), OFlags::RDONLY) {
            Ok(file) if is_file(&fstat(&file)?) => Ok(Entry::File(file.into())),
            Ok(_) | Err(Errno::LOOP | Errno::NXIO) => Ok(Entry::Other),
            Err(Errno::NOENT) => Ok(Entry::Nothing),
            // AGAIN means that another process has a lease on the file (fcntl, F_SETLEASE) that
            // must first be broken.
            Err(Errno::ACCESS | Errno::PERM | Errno::AGAIN) => Ok(Entry::Unreadable),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the regular file under `name` for reading and writing; `None` if there is no regular
    /// file, or if this process cannot write to it, for example for lack of permission.
    pub fn open_to_write(&self, name: impl AsRef<Path>) -> io::Result<Option<File>> {
        match self.open_at_once(name.as_ref(), OFlags::RDWR) {
            Ok(file) => Ok(is_file(&fstat(&file)?).then(|| file.into())),
            Err(Errno::NOENT | Errno::ISDIR | Errno::LOOP | Errno::NXIO) => Ok(None),
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Ok(None),
            Err(Errno::AGAIN | Errno::TXTBSY) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a file without following a link, and without waiting for the other end of a FIFO.
    fn open_at_once(&self, name: &Path, access: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        openat(&self.0, name, flags | access, Mode::empty())
    }

    /// Creates a file under `name`, open for reading and writing. The umask applies to `mode`.
    /// Fails with [`io::ErrorKind::AlreadyExists`] if the name is taken.
    pub fn create(&self, name: impl AsRef<Path>, mode: u32) -> io::Result<File> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.0, name.as_ref(), flags, Mode::from_raw_mode(mode))?.into())
    }

    /// Gives the file under `from` the additional name `to`.
    fn link(&self, from: &OsStr, to: &OsStr) -> io::Result<()> {
        without_links(linkat(&self.0, from, &self.0, to, AtFlags::empty()))
    }

    pub fn remove(&self, name: impl AsRef<Path>) -> io::Result<()> {
        Ok(unlinkat(&self.0, name.as_ref(), AtFlags::empty())?)
    }

    /// The status of the file under `name`, if there is one. Does not follow a link.
    pub fn stat(&self, name: impl AsRef<Path>) -> io::Result<Option<Stat>> {
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

/// Opens the regular file at `path` for reading and writing, and locks it until it is closed. Waits
/// for the lock for at most `patience`; returns `None` if another process still has it. Creates an
/// empty file if there is none; the umask applies to `mode`. Refuses a symbolic link.
pub fn open_exclusive(path: &Path, mode: u32, patience: Duration) -> io::Result<Option<File>> {
    let at_once = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let flags = OFlags::RDWR | OFlags::CREATE | at_once;
    // On a network file system, a signal may interrupt the call.
    let opened = retry_on_intr(|| openat(CWD, path, flags, Mode::from_raw_mode(mode)));
    let file = File::from(opened.map_err(|error| match error {
        Errno::LOOP => io::Error::other("it is a symbolic link"),
        Errno::ISDIR => not_a_file(),
        _ => naming_directory(path, error.into()),
    })?);
    if !file.metadata()?.is_file() {
        return Err(not_a_file());
    }
    match lock_within(&file, patience) {
        Ok(is_locked) => Ok(is_locked.then_some(file)),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            Err(io::Error::other("its file system has no locks"))
        }
        Err(error) => Err(error),
    }
}

/// The error for a file that is not a regular file.
pub fn not_a_file() -> io::Error {
    io::Error::other("it is not a regular file")
}

/// Syncs the directory of the file at `path`, so that the file's name survives a power cut. If
/// `path` is a symbolic link, syncs the directory of the file that it leads to.
pub fn sync_name(path: &Path) -> io::Result<()> {
    match fsync(Directory::of(&fs::canonicalize(path)?)?) {
        // The directory may be searched but not read, so it was opened with O_PATH and cannot be
        // synced.
        Err(Errno::BADF) => Err(Errno::ACCESS.into()),
        synced => Ok(synced?),
    }
}

/// Locks an open file or directory with flock(2), until its descriptor is closed. Waits for at most
/// `patience` while another descriptor has the lock. Returns whether this descriptor has the lock
/// now. Fails with [`io::ErrorKind::Unsupported`] if the file system has no such locks, or with any
/// other error of the system.
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
            // On NFS, BADF means that the descriptor is not open for writing, which a lock needs
            // there. It cannot mean that the descriptor is closed, because `AsFd` rules that out.
            Err(Errno::BADF) => return Err(unsupported()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The number of the mount through which a file is reached, from statx(2).
fn mount_of(directory: &Directory, name: &Path, flags: AtFlags) -> Option<u64> {
    let flags = flags | AtFlags::NO_AUTOMOUNT;
    let found = statx(&directory.0, name, flags, StatxFlags::MNT_ID).ok()?;
    let is_known = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    is_known.then_some(found.stx_mnt_id)
}

/// The number of the mount through which a file is reached, from /proc, for Linux before 5.8.
fn mount_in_proc(file: &impl AsFd) -> Option<String> {
    let path = format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd());
    let info = fs::read_to_string(path).ok()?;
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    Some(mount.trim().to_owned())
}

fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

fn without_links(result: rustix::io::Result<()>) -> io::Result<()> {
    match result {
        // These errors mean that there are no hard links. FAT, for example, returns EPERM; some
        // file systems in user space return IO, XDEV or INVAL.
        Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => Err(unsupported()),
        Err(Errno::IO | Errno::XDEV | Errno::INVAL) => Err(unsupported()),
        other => Ok(other?),
    }
}

fn unsupported() -> io::Error {
    io::ErrorKind::Unsupported.into()
}
