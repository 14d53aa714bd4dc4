//! The lock files of serial devices: looking at them, making them and taking them away.
//!
//! Our own processes take turns by a lock on the directory itself, which leaves no file. Other programs
//! know nothing of that: between two steps they may make, replace or remove any of the files. So a file
//! is made under its name in one step with its content, and one that is to be removed is moved aside and
//! looked at once more before it is destroyed.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use log::{debug, warn};
use parking_lot::Mutex;
use rustix::fs::{fchown, fstat, statat, AtFlags, Dir, Uid};
use rustix::io::Errno;

use crate::sys::directory::{lock_within, Directory, Entry, FileId};
use crate::text::Escaped;

use super::device::Device;
use super::mark::{LockedFor, MODE};
use super::names::{content, holder_in, MAX_CONTENT_LEN};

/// For how long other threads may have the turn before we give up.
const PATIENCE: Duration = Duration::from_secs(2);

/// For how long another process may have the directory before we go on without it. Every user who may
/// read the directory can lock it, and keep it.
const DIRECTORY_PATIENCE: Duration = Duration::from_secs(1);

/// How often another name is tried for a file that needs one for a moment.
const MAX_NAMES_TRIED: usize = 16;

/// The directories that lock files are in.
#[derive(Debug)]
pub struct LockFiles {
    own: PathBuf,
    others: Vec<PathBuf>,
    /// Taken before the lock on the directory, so that threads wait in line rather than look again and
    /// again. How long the next one waits for the directory: not at all after one has waited in vain.
    turn: Mutex<Duration>,
}

/// A lock that we have taken: one file, under each of its names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnLock {
    /// The file.
    pub id: FileId,
    pid: u32,
    names: Vec<OsString>,
}

/// For the log.
impl fmt::Display for OwnLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.names.first().map_or(OsStr::new(""), |name| name);
        write!(f, "file={} pid={}", shown(name), self.pid)
    }
}

/// What came of an attempt to lock.
#[derive(Debug)]
pub enum Outcome {
    /// The device is ours.
    Locked(OwnLock),
    /// Somebody has it, or may have it.
    Busy,
}

/// What stands under a name.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    /// A lock of a process that is there, or was.
    Lock(Seen),
    /// Something that does not say whose it is, or that we may not read.
    Unreadable,
}

/// A lock file as it was when we looked.
#[derive(Clone, Copy, Debug)]
struct Seen {
    id: FileId,
    pid: u32,
    locked_for: LockedFor,
}

impl Seen {
    fn is_dead(self) -> bool {
        !self.locked_for.is_held_by(self.pid)
    }
}

/// The same lock: the same file with the same number.
impl PartialEq for Seen {
    fn eq(&self, other: &Seen) -> bool {
        (self.id, self.pid) == (other.id, other.pid)
    }
}

impl Eq for Seen {}

impl LockFiles {
    /// Lock files are made in `own`; those in `others` are respected. None of the directories need exist.
    pub fn new(own: PathBuf, others: Vec<PathBuf>) -> LockFiles {
        LockFiles {
            own,
            others,
            turn: Mutex::new(DIRECTORY_PATIENCE),
        }
    }

    /// Locks `device` for the process `pid`, under all of its names or none. The files are marked by
    /// `locked_for`, and given to `owner`, if any. Blocks for two seconds at most.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used, or the lock of a dead process cannot be removed.
    pub fn lock(
        &self,
        device: &Device,
        pid: u32,
        locked_for: LockedFor,
        owner: Option<u32>,
    ) -> io::Result<Outcome> {
        self.in_turn(Outcome::Busy, |directory| {
            if self.is_locked_elsewhere(directory, device)? {
                return Ok(Outcome::Busy);
            }
            let mut stale = Vec::new();
            for name in &device.written {
                match inspect(directory, name) {
                    Found::Nothing => {}
                    Found::Lock(seen) if seen.is_dead() => stale.push((name, seen)),
                    Found::Lock(_) | Found::Unreadable => return Ok(Outcome::Busy),
                }
            }
            for (name, seen) in stale {
                if !take_away(directory, name, seen)? {
                    return Ok(Outcome::Busy);
                }
                debug!("removed-stale file={} pid={}", shown(name), seen.pid);
            }
            make(directory, device, pid, locked_for, owner)
        })
    }

    /// Removes the locks on `device` that the process `pid` holds, or one that is dead. Returns which
    /// files they were; none if somebody else holds the device, or nobody. Blocks for two seconds at most.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used, or a lock cannot be removed.
    pub fn unlock(&self, device: &Device, pid: u32) -> io::Result<Vec<FileId>> {
        self.in_turn(Vec::new(), |directory| {
            let mut removed = Vec::new();
            let mut is_held = false;
            for name in &device.written {
                let Found::Lock(seen) = inspect(directory, name) else {
                    continue;
                };
                if seen.pid != pid && !seen.is_dead() {
                    is_held = true;
                    continue;
                }
                let is_last_name = is_last_name(directory, name);
                if take_away(directory, name, seen)? {
                    removed.push((seen, is_last_name));
                }
            }
            if is_held && removed.iter().all(|(seen, _)| seen.pid != pid) {
                // By one name a dead process had it, by another one a process that is there.
                return Ok(Vec::new());
            }
            if let Some((seen, false)) = removed.last() {
                remove_other_names(directory, *seen)?;
            }
            Ok(removed.iter().map(|(seen, _)| seen.id).collect())
        })
    }

    /// Removes a lock of ours, whose holder has ended, unless something else stands in its place by now.
    /// Returns whether it was there. Blocks for two seconds at most.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used, or the lock cannot be removed; [`io::ErrorKind::WouldBlock`] if
    /// somebody else has the directory.
    pub fn remove(&self, lock: &OwnLock) -> io::Result<bool> {
        let was_there = self.in_turn(None, |directory| {
            let ours = Seen {
                id: lock.id,
                pid: lock.pid,
                locked_for: LockedFor::AnyProcess,
            };
            let mut was_there = false;
            for name in &lock.names {
                if look(directory, name)? == Found::Lock(ours) {
                    was_there |= take_away(directory, name, ours)?;
                }
            }
            Ok(Some(was_there))
        })?;
        was_there.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Waits until nothing is half done, and lets nothing begin any more. To be called at the end of the
    /// process.
    pub fn finish(&self) {
        if let Some(turn) = self.turn.try_lock_for(2 * PATIENCE) {
            std::mem::forget(turn);
        }
    }

    /// Does `steps` while none of our processes does any; gives `otherwise` if the turn does not come.
    fn in_turn<T>(
        &self,
        otherwise: T,
        steps: impl FnOnce(&Directory) -> io::Result<T>,
    ) -> io::Result<T> {
        let deadline = Instant::now() + PATIENCE;
        let Some(mut patience) = self.turn.try_lock_until(deadline) else {
            return Ok(otherwise);
        };
        let directory = Directory::open(&self.own)?;
        match lock_within(&directory, *patience) {
            Ok(true) => *patience = DIRECTORY_PATIENCE,
            // Then the single steps have to do, each of which is safe.
            Ok(false) => {
                if !patience.is_zero() {
                    warn!("cannot-lock-directory path={}", shown(self.own.as_os_str()));
                }
                *patience = Duration::ZERO;
            }
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(error) => return Err(error),
        }
        steps(&directory)
    }

    /// Whether somebody has the device by another of its names, or in another directory. Locks of the
    /// dead do not count, and stay: they are not ours to remove.
    fn is_locked_elsewhere(&self, own: &Directory, device: &Device) -> io::Result<bool> {
        let unwritten = device
            .known
            .iter()
            .filter(|name| !device.written.contains(name));
        if unwritten.into_iter().any(|name| is_held(own, name)) {
            return Ok(true);
        }
        let mut visited = vec![id_of(own)?];
        for path in &self.others {
            let Some(directory) = open_other(path)? else {
                continue;
            };
            let id = id_of(&directory)?;
            if visited.contains(&id) {
                continue;
            }
            visited.push(id);
            if device.known.iter().any(|name| is_held(&directory, name)) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Opens a directory in which others may have locked; `None` if it is not there, or not for us to read.
///
/// # Errors
///
/// If it cannot be told what is in it: there may be a lock.
fn open_other(path: &Path) -> io::Result<Option<Directory>> {
    let opened = Directory::open(path).and_then(|directory| {
        // It may be open and yet not for us to look into.
        directory.identity(".")?;
        Ok(directory)
    });
    match opened {
        Ok(directory) => Ok(Some(directory)),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => Ok(None),
            _ => Err(error),
        },
    }
}

fn id_of(directory: &Directory) -> io::Result<FileId> {
    Ok(FileId::from(&fstat(directory)?))
}

/// Whether what stands under `name` has no other name.
fn is_last_name(directory: &Directory, name: &OsStr) -> bool {
    let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| stat.st_nlink == 1)
}

fn is_held(directory: &Directory, name: &OsStr) -> bool {
    match inspect(directory, name) {
        Found::Nothing => false,
        Found::Lock(seen) if seen.is_dead() => {
            debug!("ignored-stale file={} pid={}", shown(name), seen.pid);
            false
        }
        Found::Lock(_) | Found::Unreadable => true,
    }
}

/// What stands under `name`; if that cannot be told, somebody may have the device.
fn inspect(directory: &Directory, name: &OsStr) -> Found {
    look(directory, name).unwrap_or(Found::Unreadable)
}

fn look(directory: &Directory, name: &OsStr) -> io::Result<Found> {
    match directory.open_file(name) {
        Ok(Entry::Nothing) => Ok(Found::Nothing),
        Ok(Entry::File(file)) => Ok(read(&file).map_or(Found::Unreadable, Found::Lock)),
        Ok(Entry::Unreadable | Entry::Other) => Ok(Found::Unreadable),
        // No program can have made a file with too long a name.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NAMETOOLONG) => {
            Ok(Found::Nothing)
        }
        Err(error) => Err(error),
    }
}

fn read(file: &File) -> Option<Seen> {
    let mut content = Vec::new();
    file.take(MAX_CONTENT_LEN).read_to_end(&mut content).ok()?;
    let stat = fstat(file).ok()?;
    Some(Seen {
        id: FileId::from(&stat),
        pid: holder_in(&content)?,
        locked_for: LockedFor::marked(&stat),
    })
}

/// Makes one file and gives it all its names.
fn make(
    directory: &Directory,
    device: &Device,
    pid: u32,
    locked_for: LockedFor,
    owner: Option<u32>,
) -> io::Result<Outcome> {
    let unborn = Unborn::new(directory, pid)?;
    locked_for.mark(&unborn.file)?;
    let mut lock = OwnLock {
        id: FileId::of(&unborn.file)?,
        pid,
        names: Vec::new(),
    };
    for name in &device.written {
        match unborn.link(name) {
            Ok(()) => lock.names.push(name.clone()),
            Err(error) => {
                let seen = Seen {
                    id: lock.id,
                    pid,
                    locked_for,
                };
                for name in &lock.names {
                    // The process may be dead, and then another program may have replaced the file already.
                    let _ = take_away(directory, name, seen);
                }
                // Another program was faster, between our look and now.
                return match error.kind() {
                    io::ErrorKind::AlreadyExists => Ok(Outcome::Busy),
                    _ => Err(error),
                };
            }
        }
    }
    if let Some(owner) = owner {
        // Only now: not everybody may give a name to somebody else's file.
        if let Err(error) = fchown(&unborn.file, Some(Uid::from_raw(owner)), None) {
            debug!("cannot-give-away pid={pid} error=\"{error}\"");
        }
    }
    Ok(Outcome::Locked(lock))
}

/// A complete lock file that is not yet known by any name that counts.
struct Unborn<'a> {
    directory: &'a Directory,
    file: File,
    /// Where there are no files without a name.
    name: Option<OsString>,
}

impl<'a> Unborn<'a> {
    fn new(directory: &'a Directory, pid: u32) -> io::Result<Unborn<'a>> {
        match Unborn::nameless(directory).and_then(|unborn| unborn.with_content(pid)) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                Unborn::named(directory)?.with_content(pid)
            }
            other => other,
        }
    }

    fn nameless(directory: &'a Directory) -> io::Result<Unborn<'a>> {
        // Without /proc it could never be given a name.
        if !Path::new("/proc/self/fd").is_dir() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Unborn {
            directory,
            file: directory.create_unnamed(MODE)?,
            name: None,
        })
    }

    fn named(directory: &'a Directory) -> io::Result<Unborn<'a>> {
        let (name, file) = with_unused_name(|name| directory.create(name, MODE))?;
        Ok(Unborn {
            directory,
            file,
            name: Some(name),
        })
    }

    fn with_content(mut self, pid: u32) -> io::Result<Unborn<'a>> {
        // The umask has no say: who holds the device is for all to read.
        self.file.set_permissions(Permissions::from_mode(MODE))?;
        self.file.write_all(content(pid).as_bytes())?;
        Ok(self)
    }

    fn link(&self, name: &OsStr) -> io::Result<()> {
        match &self.name {
            None => self.directory.link_file(&self.file, name),
            Some(own) => self.directory.link(own, name),
        }
    }
}

impl Drop for Unborn<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = self.directory.remove(name);
        }
    }
}

/// Removes the lock file `name` if it still is the one that was `seen`; returns whether it was. Whoever
/// has replaced it since gets his own back.
fn take_away(directory: &Directory, name: &OsStr, seen: Seen) -> io::Result<bool> {
    let aside = match with_unused_name(|aside| {
        if directory.identity(aside)?.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        directory.rename(name, aside)
    }) {
        Ok((aside, ())) => aside,
        // Gone already, by its holder's own hand.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if inspect(directory, &aside) == Found::Lock(seen) {
        directory.remove(&aside)?;
        return Ok(true);
    }
    put_back(directory, &aside, name)?;
    Ok(false)
}

fn put_back(directory: &Directory, aside: &OsStr, name: &OsStr) -> io::Result<()> {
    let given_back = match directory.rename_to_free(aside, name) {
        // An older kernel: the same in two steps, but not for a directory, nor for everybody's file.
        Err(error) if error.kind() == io::ErrorKind::Unsupported => directory
            .link(aside, name)
            .and_then(|()| directory.remove(aside)),
        other => other,
    };
    match given_back {
        // In this instant a third one has locked the device: he, too, found nothing in his way.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            warn!("lock-lost file={}", shown(name));
            directory.remove(aside)
        }
        other => other,
    }
}

/// Removes what names a lock has beside those that its device has now: the device may have been unplugged
/// since, and its links with it.
fn remove_other_names(directory: &Directory, seen: Seen) -> io::Result<()> {
    let is_ours = |name: &OsStr| inspect(directory, name) == Found::Lock(seen);
    for entry in Dir::read_from(directory.as_fd())? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        let is_candidate =
            name.as_bytes().starts_with(b"LCK..") && directory.identity(name)? == Some(seen.id);
        if is_candidate && is_ours(name) {
            take_away(directory, name, seen)?;
        }
    }
    Ok(())
}

/// Does `attempt` with a name that nobody knows, until one is not taken.
fn with_unused_name<T>(
    mut attempt: impl FnMut(&OsStr) -> io::Result<T>,
) -> io::Result<(OsString, T)> {
    for _ in 0..MAX_NAMES_TRIED {
        let number = getrandom::u64().map_err(io::Error::other)?;
        let name = OsString::from(format!(".lfpd-{number:016x}"));
        match attempt(&name) {
            Ok(done) => return Ok((name, done)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn shown(name: &OsStr) -> Escaped<'_> {
    Escaped(name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lfpd::uucp::names::DevicePath;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use std::time::SystemTime;

    struct World {
        /// Holds dev, own and other.
        root: tempfile::TempDir,
        files: LockFiles,
    }

    impl World {
        fn new() -> World {
            let root = tempfile::tempdir().expect("a directory");
            for name in ["dev", "own", "other"] {
                fs::create_dir(root.path().join(name)).expect("a directory");
            }
            let at = |name: &str| root.path().join(name);
            let others = vec![at("nonexistent"), at("own"), at("other")];
            let files = LockFiles::new(at("own"), others);
            World { root, files }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        fn device(&self, path: &str) -> Device {
            let path = DevicePath::parse(path.as_bytes()).expect("below /dev");
            Device::look_up(&path, &self.at("dev")).expect("a device")
        }

        fn lock(&self, path: &str, pid: u32) -> Option<OwnLock> {
            match self
                .files
                .lock(&self.device(path), pid, LockedFor::AnyProcess, None)
                .expect("usable")
            {
                Outcome::Locked(lock) => Some(lock),
                Outcome::Busy => None,
            }
        }

        fn unlock(&self, path: &str, pid: u32) -> bool {
            let path = DevicePath::parse(path.as_bytes()).expect("below /dev");
            let device = Device::look_up_to_unlock(&path, &self.at("dev"));
            !self.files.unlock(&device, pid).expect("usable").is_empty()
        }

        fn own_files(&self) -> Vec<String> {
            names_in(&self.at("own"))
        }
    }

    fn names_in(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("a directory");
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("UTF-8")
            })
            .collect();
        names.sort();
        names
    }

    fn dead_pid() -> u32 {
        let mut child = Command::new("true").spawn().expect("true");
        child.wait().expect("its end");
        child.id()
    }

    fn own_pid() -> u32 {
        std::process::id()
    }

    #[test]
    fn a_lock_is_eleven_bytes_for_all_to_read_and_nothing_else_is_left() {
        let world = World::new();
        world.lock("/dev/ttyS1", 1234).expect("free");
        assert_eq!(world.own_files(), ["LCK..ttyS1"]);
        let path = world.at("own/LCK..ttyS1");
        assert_eq!(fs::read(&path).expect("readable"), b"      1234\n");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o444);
    }

    #[test]
    fn a_live_lock_is_busy_for_everybody_its_holder_included() {
        let world = World::new();
        world.lock("/dev/ttyS1", own_pid()).expect("free");
        assert_eq!(world.lock("/dev/ttyS1", own_pid()), None);
        assert_eq!(world.lock("/dev/ttyS1", 1), None);
        assert!(!world.unlock("/dev/ttyS1", 1));
        assert!(world.unlock("/dev/ttyS1", own_pid()));
        assert!(!world.unlock("/dev/ttyS1", own_pid()));
        assert!(world.own_files().is_empty());
    }

    #[test]
    fn who_got_the_number_of_a_dead_process_holds_nothing() {
        let world = World::new();
        let lock = |locked_for| {
            let device = world.device("/dev/ttyS1");
            let outcome = world.files.lock(&device, own_pid(), locked_for, None);
            matches!(outcome.expect("usable"), Outcome::Locked(_))
        };
        assert!(lock(LockedFor::NoProcess));
        assert!(lock(LockedFor::AnyProcess));
        assert!(world.unlock("/dev/ttyS1", own_pid()));
        if !rustix::process::geteuid().is_root() {
            return eprintln!("NOT TESTED: only root can mark locks of others");
        }
        // The process is ours, and began after the one and before the other.
        let (early, late) = (SystemTime::UNIX_EPOCH, SystemTime::now());
        assert!(lock(LockedFor::process_of(Some(65_534), early)));
        assert!(lock(LockedFor::process_of(Some(65_534), late)));
        assert!(!lock(LockedFor::AnyProcess));
    }

    #[test]
    fn a_dead_lock_is_replaced_and_may_be_removed_by_anybody() {
        let world = World::new();
        let dead = dead_pid();
        for content in [content(dead).into_bytes(), dead.to_ne_bytes().to_vec()] {
            fs::write(world.at("own/LCK..ttyS1"), &content).expect("written");
            world.lock("/dev/ttyS1", own_pid()).expect("stale");
            assert!(world.unlock("/dev/ttyS1", own_pid()));
            fs::write(world.at("own/LCK..ttyS1"), &content).expect("written");
            assert!(world.unlock("/dev/ttyS1", own_pid()));
            assert!(world.own_files().is_empty());
        }
    }

    #[test]
    fn who_holds_a_device_by_one_of_its_names_holds_it() {
        let world = World::new();
        fs::write(world.at("own/LCK..0"), content(dead_pid())).expect("written");
        fs::write(world.at("own/LCK..usb_0"), content(1)).expect("written");
        assert_eq!(world.lock("/dev/usb/0", own_pid()), None);
        assert!(!world.unlock("/dev/usb/0", own_pid()));
        assert_eq!(world.own_files(), ["LCK..usb_0"]);
    }

    #[test]
    fn what_cannot_be_read_is_busy_and_stays() {
        let world = World::new();
        let path = world.at("own/LCK..ttyS1");
        let outside = world.at("outside");
        for content in [&b""[..], b"garbage\n", b"0\n", b"-1\n", b"\0\0\0\0"] {
            fs::write(&path, content).expect("written");
            assert_eq!(world.lock("/dev/ttyS1", own_pid()), None);
            assert!(!world.unlock("/dev/ttyS1", own_pid()));
            assert_eq!(fs::read(&path).expect("still there"), content);
        }
        fs::remove_file(&path).expect("removed");
        fs::write(&outside, content(dead_pid())).expect("written");
        symlink(&outside, &path).expect("a link");
        assert_eq!(world.lock("/dev/ttyS1", own_pid()), None);
        assert!(!world.unlock("/dev/ttyS1", own_pid()));
        assert!(outside.exists() && path.is_symlink());
        fs::remove_file(&path).expect("removed");
        fs::create_dir(&path).expect("a directory");
        assert_eq!(world.lock("/dev/ttyS1", own_pid()), None);
        fs::remove_dir(&path).expect("removed");
        symlink(world.at("own/elsewhere"), &path).expect("a dangling link");
        assert_eq!(world.lock("/dev/ttyS1", own_pid()), None);
        assert_eq!(world.own_files(), ["LCK..ttyS1"]);
    }

    #[test]
    fn a_nested_device_is_locked_by_both_names_or_by_none() {
        let world = World::new();
        world.lock("/dev/usb/tts/0", own_pid()).expect("free");
        assert_eq!(world.own_files(), ["LCK..0", "LCK..usb_tts_0"]);
        assert!(world.unlock("/dev/usb/tts/0", own_pid()));
        assert!(world.own_files().is_empty());
        for taken in [
            "LCK..0",
            "LCK..usb_tts_0",
            "LCK..usb:tts:0",
            "lk..0",
            "LK.usb_tts_0",
        ] {
            fs::write(world.at("own").join(taken), content(1)).expect("written");
            assert_eq!(world.lock("/dev/usb/tts/0", own_pid()), None, "{taken}");
            assert_eq!(world.own_files(), [taken]);
            fs::remove_file(world.at("own").join(taken)).expect("removed");
        }
    }

    #[test]
    fn locks_in_other_directories_count_while_their_holder_lives() {
        let world = World::new();
        let path = world.at("other/LCK..ttyS1");
        for (content, is_free) in [
            (content(1), false),
            (String::new(), false),
            (content(dead_pid()), true),
        ] {
            fs::write(&path, &content).expect("written");
            assert_eq!(world.lock("/dev/ttyS1", own_pid()).is_some(), is_free);
            assert_eq!(fs::read_to_string(&path).expect("still there"), content);
        }
    }

    #[test]
    fn a_link_that_has_gone_since_leaves_no_lock_behind() {
        let world = World::new();
        symlink("ttyUSB0", world.at("dev/modem")).expect("a link");
        world.lock("/dev/modem", own_pid()).expect("free");
        assert_eq!(world.own_files(), ["LCK..modem", "LCK..ttyUSB0"]);
        assert_eq!(world.lock("/dev/ttyUSB0", own_pid()), None);
        fs::remove_file(world.at("dev/modem")).expect("unplugged");
        world.lock("/dev/ttyS1", own_pid()).expect("free");
        assert!(world.unlock("/dev/modem", own_pid()));
        assert_eq!(world.own_files(), ["LCK..ttyS1"]);
    }

    #[test]
    fn our_lock_is_removed_only_as_long_as_it_is_ours() {
        let world = World::new();
        let lock = world.lock("/dev/usb/0", own_pid()).expect("free");
        assert!(world.files.remove(&lock).expect("usable"));
        assert!(world.own_files().is_empty());
        world.lock("/dev/usb/0", 1).expect("free");
        assert!(!world.files.remove(&lock).expect("usable"));
        assert_eq!(world.own_files(), ["LCK..0", "LCK..usb_0"]);
    }

    #[test]
    fn a_file_that_was_replaced_since_is_given_back() {
        let world = World::new();
        let directory = Directory::open(&world.at("own")).expect("a directory");
        let path = world.at("own/LCK..ttyS1");
        fs::write(&path, content(1)).expect("written");
        let Found::Lock(seen) = inspect(&directory, OsStr::new("LCK..ttyS1")) else {
            panic!("no lock");
        };
        fs::write(&path, content(2)).expect("overwritten");
        assert!(!take_away(&directory, OsStr::new("LCK..ttyS1"), seen).expect("usable"));
        assert_eq!(fs::read_to_string(&path).expect("back"), content(2));
        fs::remove_file(&path).expect("removed");
        assert!(!take_away(&directory, OsStr::new("LCK..ttyS1"), seen).expect("usable"));
        fs::create_dir(&path).expect("a directory");
        assert!(!take_away(&directory, OsStr::new("LCK..ttyS1"), seen).expect("usable"));
        assert_eq!(world.own_files(), ["LCK..ttyS1"]);
    }

    #[test]
    fn where_there_are_no_nameless_files_named_ones_do_and_none_is_left() {
        let world = World::new();
        let directory = Directory::open(&world.at("own")).expect("a directory");
        let unborn = Unborn::named(&directory)
            .and_then(|unborn| unborn.with_content(1234))
            .expect("a file");
        unborn.link(OsStr::new("LCK..ttyS1")).expect("a name");
        assert_eq!(
            unborn.link(OsStr::new("LCK..ttyS1")).map_err(|e| e.kind()),
            Err(io::ErrorKind::AlreadyExists)
        );
        drop(unborn);
        assert_eq!(world.own_files(), ["LCK..ttyS1"]);
        let path = world.at("own/LCK..ttyS1");
        assert_eq!(fs::read(&path).expect("readable"), b"      1234\n");
    }

    #[test]
    fn a_missing_directory_is_an_error() {
        let world = World::new();
        fs::remove_dir(world.at("own")).expect("removed");
        let device = world.device("/dev/ttyS1");
        let locked = world.files.lock(&device, 1, LockedFor::AnyProcess, None);
        assert!(locked.is_err());
        assert!(world.files.unlock(&device, 1).is_err());
    }

    #[test]
    fn a_directory_that_a_user_keeps_locked_keeps_no_device() {
        let world = World::new();
        let theirs = Directory::open(&world.at("own")).expect("a directory");
        assert!(lock_within(&theirs, PATIENCE).expect("lockable"));
        let started = Instant::now();
        assert!(world.lock("/dev/ttyS1", own_pid()).is_some());
        assert!(started.elapsed() >= DIRECTORY_PATIENCE);
        // Only the first one has waited.
        assert!(world.files.turn.lock().is_zero());
        assert_eq!(world.lock("/dev/ttyS1", own_pid()), None);
        assert!(world.unlock("/dev/ttyS1", own_pid()));
        drop(theirs);
        assert!(world.lock("/dev/ttyS1", own_pid()).is_some());
        assert_eq!(*world.files.turn.lock(), DIRECTORY_PATIENCE);
    }
}
