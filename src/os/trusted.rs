//! Opening files in directories where another user may have planted a file or a link, and checking
//! whether other users have access to a file.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    fstat, openat, readlinkat, statfs, FileType, Mode, OFlags, CWD, PROC_SUPER_MAGIC,
};
use rustix::io::Errno;

use super::directory::parent_of;
use super::process::is_same_user;
pub use super::process::{is_own, is_own_or_root};

/// The maximum number of symbolic links to follow. The kernel has the same maximum.
const MAX_LINKS: usize = 40;

/// Mode bits. They do not include read access for a group, because it is usually intended.
const READABLE_BY_OTHERS: u32 = 0o004;
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Follows symbolic links in the last component of a path, except links that another user may have
/// planted: a link must belong to root, to this user or to the owner of its directory. Otherwise
/// another user could choose the files that root opens. A missing file is not an error.
pub fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Some(link) = Link::read(&path) else {
            return Ok(path);
        };
        if !may_decide(link.owner, &path) {
            return Err(io::Error::other("it is a symbolic link of another user"));
        }
        path = parent_of(&path).join(link.target);
    }
    Err(io::Error::other("its links lead nowhere"))
}

/// Whether a user may decide which file is at `path`. Root, the user of this process and the owner
/// of the directory may.
pub fn may_decide(user: u32, path: &Path) -> bool {
    let is_owner = |directory: Metadata| is_same_user(directory.uid(), user);
    is_own_or_root(user) || fs::metadata(parent_of(path)).is_ok_and(is_owner)
}

/// Opens the file that [`follow`] finds. The umask applies to the `mode` of a new file. Does not
/// wait for the other end of a FIFO.
pub fn open(path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
    open_followed(&follow(path)?, flags, mode)
}

/// Opens a path that [`follow`] has returned, in the same way as [`open`].
pub fn open_followed(path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
    let mut flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // A link in /proc/self/fd may be followed, because it leads to a file that is already open.
    flags.set(OFlags::NOFOLLOW, !is_in_proc(path));
    match openat(CWD, path, flags, Mode::from_raw_mode(mode)) {
        Ok(file) => Ok(file.into()),
        Err(Errno::LOOP) => Err(io::Error::other("it is a symbolic link")),
        Err(error) => Err(error.into()),
    }
}

/// Whether another user may have planted the open `file` at `path`. This is so if its directory has
/// the sticky bit, so that all users may create files there, and the file's owner is not root, this
/// user or the owner of the directory. A shared directory without the sticky bit is not checked,
/// because any user can replace every file in it anyway.
pub fn is_planted(file: &File, path: &Path) -> io::Result<bool> {
    let is_sticky = fs::metadata(parent_of(path))?.mode() & STICKY != 0;
    Ok(is_sticky && !may_decide(file.metadata()?.uid(), path))
}

/// Describes the access that users other than root and this one have to a file; `None` if they can
/// neither change the file nor, if it is a secret, read it.
pub fn exposure(path: &Path, is_secret: bool) -> io::Result<Option<&'static str>> {
    let path = follow(path)?;
    let directory = fs::metadata(parent_of(&path))?;
    // Only a regular file is checked. A file that does not exist yet will be ours, and the owner
    // and mode of a device do not show who controls it.
    let file = fs::metadata(&path).ok().filter(Metadata::is_file);
    let (owner, mode) = file.map_or((0, 0), |file| (file.uid(), file.mode()));
    Ok(if !is_own_or_root(owner) {
        Some("it belongs to another user")
    } else if !is_own_or_root(directory.uid()) {
        Some("its directory belongs to another user")
    } else if mode & WRITABLE_BY_OTHERS != 0 {
        Some("other users may write it")
    } else if is_secret && mode & READABLE_BY_OTHERS != 0 {
        Some("other users may read it")
    } else {
        None
    })
}

struct Link {
    target: PathBuf,
    owner: u32,
}

impl Link {
    /// The symbolic link at `path`; `None` if there is no such link, or if it is a link in /proc.
    /// Target and owner belong to the same link, even if another process replaces the link at the
    /// same time.
    fn read(path: &Path) -> Option<Link> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = openat(CWD, path, flags, Mode::empty()).ok()?;
        let stat = fstat(&link).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink || is_in_proc(path) {
            return None;
        }
        let target = readlinkat(&link, "", Vec::new()).ok()?;
        let target = OsString::from_vec(target.into_bytes());
        Some(Link {
            target: target.into(),
            owner: stat.st_uid,
        })
    }
}

fn is_in_proc(path: &Path) -> bool {
    statfs(parent_of(path)).is_ok_and(|found| found.f_type == PROC_SUPER_MAGIC)
}
