//! Inspects, makes and removes one serial lock file. Other programs may make, replace or remove any
//! of the files at any time, and each operation is safe against that.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime};

use log::warn;
use rustix::fs::{fstat, Dir, Stat};
use rustix::io::Errno;

use crate::os::directory::{Directory, Entry, FileId, PrivateNames, SetAside, StagedFile};
use crate::os::text::Escaped;

use super::device::Device;
use super::mark::{where_possible, LockedFor};
use super::names::{content, named_in, Named, MAX_CONTENT_LEN};

/// The private names that our files have before they become locks, and shortly before they are
/// removed.
pub(super) const PRIVATE_NAMES: PrivateNames = PrivateNames {
    prefix: ".lfpd-",
    suffix: "",
};

/// The maximum number of names that a file of ours can have. A file with more names is not ours.
const MAX_NAMES: usize = 8;

/// The maximum number of directory entries that are searched for the names of a file.
const MAX_LISTED: usize = 4096;

/// The mode of a lock file: every user may read who holds the device, and no user may write.
pub(super) const MODE: u32 = 0o444;

/// The process for which a device is to be locked.
#[derive(Clone, Copy, Debug)]
pub struct NewHolder {
    pub pid: u32,
    pub locked_for: LockedFor,
    /// When the process was looked at. This becomes the lock file's modification time.
    pub seen_at: SystemTime,
    /// Whether the process belongs to the client's user, or that user is root.
    pub belongs_to_peer: bool,
}

/// A lock that we have made on a device: its names, each with its file. All names have the same
/// file unless the file system has no hard links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLock {
    pub(super) pid: u32,
    pub names: Vec<(OsString, FileId)>,
}

impl DeviceLock {
    /// Forgets the files that have been removed. Returns whether any file is left.
    pub fn forget(&mut self, removed: &[FileId]) -> bool {
        self.names.retain(|(_, id)| !removed.contains(id));
        !self.names.is_empty()
    }
}

impl fmt::Display for DeviceLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.names.first().map_or(OsStr::new(""), |(name, _)| name);
        write!(f, "file={} pid={}", shown(name), self.pid)
    }
}

/// The state of a name in a lock directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NameState {
    Free,
    File(LockFile),
    /// Something that is not a regular file, or that we may not read.
    Blocked,
}

/// A lock file as it was when we read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockFile {
    pub(super) id: FileId,
    pub(super) named: Named,
    pub(super) locked_for: LockedFor,
    pub(super) owner: u32,
    /// As a duration since the epoch.
    pub(super) modified_at: Duration,
    link_count: usize,
}

impl LockFile {
    /// Whether both files belong to the same lock. If the file system has no hard links, a lock has
    /// a separate file for each name, and all of them have the same process and the same time.
    pub(super) fn is_of_same_lock(&self, other: &LockFile) -> bool {
        let traits = |file: &LockFile| (file.named, file.modified_at, file.link_count);
        self == other || (self.link_count == 1 && traits(self) == traits(other))
    }
}

/// Two values are equal if they are the same file and name the same process.
impl PartialEq for LockFile {
    fn eq(&self, other: &LockFile) -> bool {
        (self.id, self.named) == (other.id, other.named)
    }
}

impl Eq for LockFile {}

/// Looks at `name`. If the system cannot tell what it is, the name is blocked, because a process
/// may hold the device.
pub(super) fn inspect(directory: &Directory, name: &OsStr) -> NameState {
    look(directory, name).unwrap_or(NameState::Blocked)
}

/// Looks at `name`. Fails if the system cannot tell what it is.
pub(super) fn look(directory: &Directory, name: &OsStr) -> io::Result<NameState> {
    match directory.open_file(name) {
        Ok(Entry::Nothing) => Ok(NameState::Free),
        Ok(Entry::File(file)) => Ok(read(&file).map_or(NameState::Blocked, NameState::File)),
        Ok(Entry::Unreadable | Entry::Other) => Ok(NameState::Blocked),
        // No program can have made a file whose name is too long.
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
        named: named_in(&content),
        locked_for: LockedFor::marked(&stat),
        owner: stat.st_uid,
        modified_at: modified_at(&stat),
        link_count: usize::try_from(stat.st_nlink).unwrap_or(usize::MAX),
    })
}

/// When the file was last modified, as a duration since the epoch.
pub(super) fn modified_at(stat: &Stat) -> Duration {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or_default();
    let nanoseconds = u32::try_from(stat.st_mtime_nsec).unwrap_or_default();
    Duration::new(seconds, nanoseconds)
}

/// Returns every file that has any of `names`. A file with several of them is returned only once,
/// under the first.
pub(super) fn files_named<'a>(
    directory: &Directory,
    names: &'a [OsString],
) -> Vec<(&'a OsStr, LockFile)> {
    let mut files: Vec<(&OsStr, LockFile)> = Vec::new();
    for name in names {
        if let NameState::File(file) = inspect(directory, name) {
            if !files.iter().any(|(_, known)| *known == file) {
                files.push((name, file));
            }
        }
    }
    files
}

/// Returns all names of a lock file. Some of them may no longer be names of the device: if it has
/// been unplugged, its links are gone. The names by which [`is_of`] recognises the lock come last:
/// if the names are removed in this order and the server is killed, the lock can still be unlocked.
///
/// Every user may fill the directory with files and links. So if a file has more names than a file
/// of ours can have, only names of the device are returned. Only [`MAX_LISTED`] entries are
/// searched, so names in a larger directory can be missed.
pub(super) fn names_of(
    directory: &Directory,
    device: &Device,
    lock: LockFile,
) -> io::Result<Vec<OsString>> {
    let is_its = |name: &OsStr| inspect(directory, name) == NameState::File(lock);
    let written = device.written.iter().filter(|name| is_its(name));
    let mut names: Vec<OsString> = written.cloned().collect();
    if lock.link_count <= MAX_NAMES && names.len() < lock.link_count {
        for entry in Dir::read_from(directory.as_fd())?.take(MAX_LISTED) {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            // A private name, which a killed server may have left, does not count.
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

/// Whether a lock with these `names`, one of which is a name of the device, is a lock on this
/// device. A lock with several names is one of ours, and one of those names spells out the full
/// path of the device it locks. If none spells out this device's path, the lock is on another
/// device whose path ends in the same part. Other programs make files with one name, which need not
/// contain the full path. Such a file counts as a lock on this device.
pub(super) fn is_of(device: &Device, names: &[OsString]) -> bool {
    names.len() == 1 || names.iter().any(|name| device.full.contains(name))
}

/// Locks the device under all of its names. Returns `None` if another program has just taken one of
/// them.
pub(super) fn make(
    directory: &Directory,
    device: &Device,
    holder: &NewHolder,
) -> io::Result<Option<DeviceLock>> {
    let made = StagedFile::make(directory, &PRIVATE_NAMES, MODE, |staged| {
        fill(staged.file(), holder)?;
        let id = FileId::of(staged.file())?;
        name_all(directory, device, holder, |name| {
            staged.link(name).map(|()| id)
        })
    });
    let may_lack_hard_links = |error: &io::Error| {
        let code = Errno::from_io_error(error);
        error.kind() == io::ErrorKind::Unsupported
            || matches!(code, Some(Errno::IO | Errno::XDEV | Errno::INVAL))
    };
    let made = match made {
        Err(error) if may_lack_hard_links(&error) => make_in_place(directory, device, holder),
        made => made,
    };
    match made {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes the content of a lock file, and returns once it would survive a power cut.
fn fill(mut file: &File, holder: &NewHolder) -> io::Result<()> {
    // The umask must not hide who holds the device.
    where_possible(file.set_permissions(Permissions::from_mode(MODE)))?;
    file.write_all(content(holder.pid).as_bytes())?;
    where_possible(file.set_modified(holder.seen_at))?;
    holder.locked_for.mark(file, MODE)?;
    // Without this, a power cut could leave an empty file, which blocks the device.
    where_possible(file.sync_data())
}

/// For file systems without hard links: makes a separate file for each name of the device. If any
/// fails, none is left. The files are empty for a moment.
fn make_in_place(
    directory: &Directory,
    device: &Device,
    holder: &NewHolder,
) -> io::Result<DeviceLock> {
    name_all(directory, device, holder, |name| {
        let file = directory.create(name, MODE)?;
        let id = FileId::of(&file)?;
        let is_its = |name: &OsStr| {
            directory
                .identity(name)
                .is_ok_and(|found| found == Some(id))
        };
        if let Err(error) = fill(&file, holder) {
            let _ = directory.remove_if(name, &PRIVATE_NAMES, is_its);
            return Err(error);
        }
        // Some programs take an empty file for a stale one and remove it, so this checks that the
        // file still has the name.
        if is_its(name) {
            Ok(id)
        } else {
            Err(io::ErrorKind::AlreadyExists.into())
        }
    })
}

/// Calls `make` for each name of the device. If a call fails, removes the names that were made
/// before.
fn name_all(
    directory: &Directory,
    device: &Device,
    holder: &NewHolder,
    make: impl Fn(&OsStr) -> io::Result<FileId>,
) -> io::Result<DeviceLock> {
    let mut lock = DeviceLock {
        pid: holder.pid,
        names: Vec::new(),
    };
    for name in &device.written {
        match make(name) {
            Ok(id) => lock.names.push((name.clone(), id)),
            Err(error) => {
                // If the process has ended, another program may already have replaced one of our
                // files. The replacement stays.
                let _ = withdraw(directory, &lock);
                return Err(error);
            }
        }
    }
    Ok(lock)
}

/// Removes a lock of ours, except for names that have passed to other files. Returns whether any
/// name was removed.
pub(super) fn withdraw(directory: &Directory, lock: &DeviceLock) -> io::Result<bool> {
    let mut was_there = false;
    for (name, id) in &lock.names {
        if let NameState::File(file) = look(directory, name)? {
            if (file.id, file.named) == (*id, Named::Process(lock.pid)) {
                was_there |= take_away(directory, name, file)?;
            }
        }
    }
    Ok(was_there)
}

/// Removes the lock file `name` if it is still the file that `meant` describes. Returns whether it
/// was removed. If another program has replaced the file since then, the new file keeps the name.
pub(super) fn take_away(directory: &Directory, name: &OsStr, meant: LockFile) -> io::Result<bool> {
    let is_meant = |aside: &OsStr| inspect(directory, aside) == NameState::File(meant);
    let outcome = directory.remove_if(name, &PRIVATE_NAMES, is_meant)?;
    if outcome == SetAside::Displaced {
        warn!("lock-lost file={}", shown(name));
    }
    Ok(outcome == SetAside::Removed)
}

/// Formats a name for a message, always on one line.
pub(super) fn shown(name: &OsStr) -> Escaped<'_> {
    Escaped(name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lfpd::uucp::names::DevicePath;
    use crate::os::directory::{in_directory, names_in};
    use std::fs;

    const NAME: &str = "LCK..ttyS1";

    #[test]
    fn a_file_that_was_replaced_since_is_given_back() {
        in_directory(|scratch, directory| {
            let path = scratch.join(NAME);
            fs::write(&path, content(1)).expect("written");
            let NameState::File(meant) = inspect(directory, OsStr::new(NAME)) else {
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
                nodes: Vec::new(),
            };
            fs::write(scratch.join(names[0]), content(1)).expect("written");
            for name in &names[1..] {
                fs::hard_link(scratch.join(names[0]), scratch.join(name)).expect("linked");
            }
            let [(_, lock)] = files_named(directory, &device.written)[..] else {
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
            let holder = NewHolder {
                pid: 1234,
                locked_for: LockedFor::AnyProcess,
                seen_at: SystemTime::now(),
                belongs_to_peer: false,
            };
            let make = || {
                let staged = StagedFile::private(directory, &PRIVATE_NAMES, MODE)?;
                fill(staged.file(), &holder)?;
                let id = FileId::of(staged.file())?;
                name_all(directory, &device, &holder, |name| {
                    staged.link(name).map(|()| id)
                })
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
