//! One serial lock file: looking at it, making it and taking it away, each safe against other
//! programs that make, replace or remove any of the files at any time.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use log::{debug, warn};
use rustix::fs::{fstat, Dir};
use rustix::io::Errno;

use crate::sys::directory::{Directory, Entry, FileId, PrivateNames, SetAside, StagedFile};
use crate::text::Escaped;

use super::device::Device;
use super::mark::{LockedFor, MODE};
use super::names::{content, holder_in, MAX_CONTENT_LEN};

/// What our files are called before they are locks, and before they are removed.
const PRIVATE_NAMES: PrivateNames = PrivateNames {
    prefix: ".lfpd-",
    suffix: "",
};

/// A device that we have locked: one file, under each of the device's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLock {
    pub(super) file: LockFile,
    pub(super) names: Vec<OsString>,
}

impl DeviceLock {
    pub fn id(&self) -> FileId {
        self.file.id
    }
}

/// For the log.
impl fmt::Display for DeviceLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.names.first().map_or(OsStr::new(""), |name| name);
        write!(f, "file={} pid={}", shown(name), self.file.pid)
    }
}

/// What has a name in a lock directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NameState {
    Free,
    /// A lock of a process that is there, or was.
    Locked(LockFile),
    /// Something that names no process, or that we may not read.
    Unreadable,
}

/// A lock file as it was when we read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockFile {
    pub(super) id: FileId,
    pub(super) pid: u32,
    pub(super) locked_for: LockedFor,
    link_count: usize,
}

impl LockFile {
    /// Whether its holder has ended.
    pub(super) fn is_stale(self) -> bool {
        !self.locked_for.is_held_by(self.pid)
    }
}

/// The same lock: the same file with the same number.
impl PartialEq for LockFile {
    fn eq(&self, other: &LockFile) -> bool {
        (self.id, self.pid) == (other.id, other.pid)
    }
}

impl Eq for LockFile {}

/// What has `name`. If the system cannot tell, a process may hold the device.
pub(super) fn inspect(directory: &Directory, name: &OsStr) -> NameState {
    look(directory, name).unwrap_or(NameState::Unreadable)
}

/// What has `name`, or why the system cannot tell.
pub(super) fn look(directory: &Directory, name: &OsStr) -> io::Result<NameState> {
    match directory.open_file(name) {
        Ok(Entry::Nothing) => Ok(NameState::Free),
        Ok(Entry::File(file)) => Ok(read(&file).map_or(NameState::Unreadable, NameState::Locked)),
        Ok(Entry::Unreadable | Entry::Other) => Ok(NameState::Unreadable),
        // No program can have made a file with too long a name.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NAMETOOLONG) => {
            Ok(NameState::Free)
        }
        Err(error) => Err(error),
    }
}

fn read(file: &File) -> Option<LockFile> {
    let mut content = Vec::new();
    file.take(MAX_CONTENT_LEN).read_to_end(&mut content).ok()?;
    let stat = fstat(file).ok()?;
    Some(LockFile {
        id: FileId::from(&stat),
        pid: holder_in(&content)?,
        locked_for: LockedFor::marked(&stat),
        link_count: usize::try_from(stat.st_nlink).unwrap_or(usize::MAX),
    })
}

/// Whether a process holds, or may hold, the lock with this name.
pub(super) fn is_held(directory: &Directory, name: &OsStr) -> bool {
    match inspect(directory, name) {
        NameState::Free => false,
        NameState::Locked(file) if file.is_stale() => {
            debug!("ignored-stale file={} pid={}", shown(name), file.pid);
            false
        }
        NameState::Locked(_) | NameState::Unreadable => true,
    }
}

/// The locks that have one of `names`, each once.
pub(super) fn locks_in(directory: &Directory, names: &[OsString]) -> Vec<LockFile> {
    let mut locks = Vec::new();
    for name in names {
        if let NameState::Locked(file) = inspect(directory, name) {
            if !locks.contains(&file) {
                locks.push(file);
            }
        }
    }
    locks
}

/// The lock that the process `pid` holds and has taken by the device's path.
pub(super) fn lock_of_path(directory: &Directory, device: &Device, pid: u32) -> Option<LockFile> {
    let locks = locks_in(directory, device.full.get(..1)?);
    locks
        .into_iter()
        .find(|file| file.pid == pid && !file.is_stale())
}

/// All names of a lock: those of the device, and others, since the device may have been unplugged,
/// and its links with it. Those by which [`is_of`] knows the lock come last: if they are removed in
/// this order and the server is killed, the lock can still be unlocked.
pub(super) fn names_of(
    directory: &Directory,
    device: &Device,
    lock: LockFile,
) -> io::Result<Vec<OsString>> {
    let is_its = |name: &OsStr| inspect(directory, name) == NameState::Locked(lock);
    let written = device.written.iter().filter(|name| is_its(name));
    let mut names: Vec<OsString> = written.cloned().collect();
    if names.len() < lock.link_count {
        for entry in Dir::read_from(directory.as_fd())? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            // A server that was killed may have left a private name, which does not count.
            let is_other = name.as_bytes().starts_with(b"LCK..")
                && !names.iter().any(|known| known == name)
                && directory.identity(name)? == Some(lock.id);
            if is_other && is_its(name) {
                names.push(name.to_owned());
            }
        }
    }
    let full = || device.full.iter().rev();
    names.sort_by_key(|name| full().position(|full| full == name).map(|at| at + 1));
    Ok(names)
}

/// Whether a lock with these `names`, one of which is the device's, is a lock of this device. If it
/// has several names, we made it, and it has all parts of the device's path in one of them:
/// otherwise it is the lock of another device with the same last name. A file with one name, as
/// other programs make it, tells no more than that.
pub(super) fn is_of(device: &Device, names: &[OsString]) -> bool {
    names.len() == 1 || names.iter().any(|name| device.full.contains(name))
}

/// Makes one lock file and gives it all names of the device; `None` if another program has taken
/// one of them since we looked.
pub(super) fn make(
    directory: &Directory,
    device: &Device,
    pid: u32,
    locked_for: LockedFor,
) -> io::Result<Option<DeviceLock>> {
    let made = StagedFile::make(directory, &PRIVATE_NAMES, MODE, |staged| {
        fill(staged.file(), pid, locked_for)?;
        name(directory, &staged, device, pid)
    });
    match made {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

fn fill(mut file: &File, pid: u32, locked_for: LockedFor) -> io::Result<()> {
    // The umask must not hide who holds the device.
    file.set_permissions(Permissions::from_mode(MODE))?;
    file.write_all(content(pid).as_bytes())?;
    locked_for.mark(file)
}

/// Gives a complete file all names of the device, or none.
fn name(
    directory: &Directory,
    staged: &StagedFile<'_>,
    device: &Device,
    pid: u32,
) -> io::Result<DeviceLock> {
    let file = LockFile {
        id: FileId::of(staged.file())?,
        pid,
        locked_for: LockedFor::AnyProcess,
        link_count: device.written.len(),
    };
    let names = device.written.clone();
    let lock = DeviceLock { file, names };
    for (at, name) in lock.names.iter().enumerate() {
        if let Err(error) = staged.link(name) {
            for name in &lock.names[..at] {
                // If the process has ended, another program may have replaced the file already.
                let _ = take_away(directory, name, lock.file);
            }
            return Err(match error.kind() {
                // A file that has got its first name needs no fallback for the next one.
                io::ErrorKind::Unsupported if at > 0 => io::Error::other("no further hard link"),
                _ => error,
            });
        }
    }
    Ok(lock)
}

/// Removes the lock file `name` if it still is the one that was read as `meant`; returns whether it
/// was. If another program has replaced it since, that program's file keeps the name.
pub(super) fn take_away(directory: &Directory, name: &OsStr, meant: LockFile) -> io::Result<bool> {
    let is_meant = |aside: &OsStr| inspect(directory, aside) == NameState::Locked(meant);
    let outcome = directory.remove_if(name, &PRIVATE_NAMES, is_meant)?;
    if outcome == SetAside::Displaced {
        warn!("lock-lost file={}", shown(name));
    }
    Ok(outcome == SetAside::Removed)
}

/// A name for a message: in one line, whatever is in it.
pub(super) fn shown(name: &OsStr) -> Escaped<'_> {
    Escaped(name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lfpd::uucp::names::DevicePath;
    use crate::sys::directory::{in_directory, names_in};
    use std::fs;

    const NAME: &str = "LCK..ttyS1";

    #[test]
    fn a_file_that_was_replaced_since_is_given_back() {
        in_directory(|scratch, directory| {
            let path = scratch.join(NAME);
            fs::write(&path, content(1)).expect("written");
            let NameState::Locked(meant) = inspect(directory, OsStr::new(NAME)) else {
                panic!("no lock");
            };
            let is_taken = || take_away(directory, OsStr::new(NAME), meant).expect("usable");
            fs::write(&path, content(2)).expect("overwritten");
            assert!(!is_taken());
            assert_eq!(fs::read_to_string(&path).expect("back"), content(2));
            fs::remove_file(&path).expect("removed");
            assert!(!is_taken());
            fs::create_dir(&path).expect("a directory");
            assert!(!is_taken());
            assert_eq!(names_in(scratch), [NAME]);
        });
    }

    #[test]
    fn the_names_that_tell_the_device_of_a_lock_come_last() {
        in_directory(|scratch, directory| {
            let names = ["LCK..a", "LCK..a_b", "LCK..b", "LCK..z", "LCK..old"];
            let device = Device {
                written: names[..4].iter().map(OsString::from).collect(),
                full: vec!["LCK..a_b".into(), "LCK..a".into()],
                known: Vec::new(),
            };
            fs::write(scratch.join(names[0]), content(1)).expect("written");
            for name in &names[1..] {
                fs::hard_link(scratch.join(names[0]), scratch.join(name)).expect("linked");
            }
            let [lock] = locks_in(directory, &device.written)[..] else {
                panic!("not one lock");
            };
            let mut ordered = names_of(directory, &device, lock).expect("readable");
            assert_eq!(ordered.split_off(3), ["LCK..a", "LCK..a_b"]);
            assert_eq!(ordered, ["LCK..b", "LCK..z", "LCK..old"]);
        });
    }

    #[test]
    fn without_unnamed_files_a_lock_is_made_all_the_same() {
        in_directory(|scratch, directory| {
            let device = Device::look_up_to_unlock(
                &DevicePath::parse(b"/dev/ttyS1").expect("below /dev"),
                scratch,
            );
            let make = || {
                let staged = StagedFile::private(directory, &PRIVATE_NAMES, MODE)?;
                fill(staged.file(), 1234, LockedFor::AnyProcess)?;
                name(directory, &staged, &device, 1234)
            };
            make().expect("a free name");
            let error = make().expect_err("a taken name");
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(names_in(scratch), [NAME]);
            let content = fs::read(scratch.join(NAME)).expect("readable");
            assert_eq!(content, b"      1234\n");
        });
    }
}
