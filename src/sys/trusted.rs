//! Files at paths where another user may have put something: how they are opened, and whether
//! others have access to them.

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
use rustix::process::geteuid;

use super::directory::parent_of;

/// The most links in a row, as in the kernel.
const MAX_LINKS: usize = 40;

/// Bits of a mode. That a group may read a secret is usually meant.
#[cfg(feature = "programs")]
const READABLE_BY_OTHERS: u32 = 0o004;
#[cfg(feature = "programs")]
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Follows links in the last component of a path, but no link that another user may have planted:
/// it must belong to this user, or to the owner of its directory. This holds for root, too, who
/// would otherwise touch files of that user's choice. What is missing is no error.
pub fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Some(link) = Link::read(&path) else {
            return Ok(path);
        };
        let directory = parent_of(&path);
        let is_owner = |directory: Metadata| directory.uid() == link.owner;
        if link.owner != geteuid().as_raw() && !fs::metadata(directory).is_ok_and(is_owner) {
            return Err(io::Error::other("it is a symbolic link of another user"));
        }
        path = directory.join(link.target);
    }
    Err(io::Error::other("its links lead nowhere"))
}

/// Opens a file as [`follow`] finds it; the umask applies to the `mode` of a new one. Does not wait
/// for the other end of a FIFO.
pub fn open(path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
    let path = follow(path)?;
    let mut flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // A link of /proc/self/fd leads to a file that is open already.
    flags.set(OFlags::NOFOLLOW, !is_in_proc(&path));
    match openat(CWD, &path, flags, Mode::from_raw_mode(mode)) {
        Ok(file) => Ok(file.into()),
        Err(Errno::LOOP) => Err(io::Error::other("it is a symbolic link")),
        Err(error) => Err(error.into()),
    }
}

/// How other users have access to a file that they must not change, or read if it is a secret;
/// `None` if they have none. Root and this user are no others.
#[cfg(feature = "programs")]
pub fn exposure(path: &Path, is_secret: bool) -> io::Result<Option<&'static str>> {
    let trusted = [0, geteuid().as_raw()];
    let path = follow(path)?;
    let (file, directory) = (fs::metadata(&path)?, fs::metadata(parent_of(&path))?);
    Ok(if !trusted.contains(&file.uid()) {
        Some("it belongs to another user")
    } else if !trusted.contains(&directory.uid()) {
        Some("its directory belongs to another user")
    } else if file.mode() & WRITABLE_BY_OTHERS != 0 {
        Some("other users may write it")
    } else if is_secret && file.mode() & READABLE_BY_OTHERS != 0 {
        Some("other users may read it")
    } else {
        None
    })
}

/// A symbolic link.
struct Link {
    target: PathBuf,
    owner: u32,
}

impl Link {
    /// The link at `path`, if it is one, and none of /proc. Target and owner are of the same link,
    /// even if another process replaces it meanwhile.
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
