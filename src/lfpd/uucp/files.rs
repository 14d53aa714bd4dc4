//! The lock files of serial devices, in the directories where programs look for them.
//!
//! Our own processes take turns by locking the directory itself, which leaves no file behind. Other
//! programs do not use this lock, so each step on a lock file is safe even without it.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use log::{debug, warn};
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

use crate::os::directory::{lock_within, Directory, FileId};

use super::device::Device;
use super::lock_file::{
    files_named, inspect, is_of, make, names_of, shown, take_away, withdraw, LockFile, NameState,
};
use super::names::Named;
use super::staleness::Judge;

pub use super::lock_file::{DeviceLock, NewHolder};

/// How long a request waits for its turn before it gives up.
const PATIENCE: Duration = Duration::from_secs(2);

/// If the wait for the turn and for the lock on the directory takes longer than this in all, a
/// thread goes on without that lock. Any user who may read the directory can lock it, and keep it
/// locked.
const DIRECTORY_PATIENCE: Duration = Duration::from_secs(1);

/// The lock files in the directories of this host.
#[derive(Debug)]
pub struct SerialLockFiles {
    own: PathBuf,
    others: Vec<PathBuf>,
    /// This mutex is taken before the lock on the directory, so that requests run in the order of
    /// their arrival and only one of them polls the directory. The value is how long the next
    /// request waits for the lock on the directory. It is zero after a request has waited in vain.
    turn: Mutex<Duration>,
}

impl SerialLockFiles {
    /// Makes lock files in `own`, and respects those in `others`. The directories need not exist.
    pub fn new(own: PathBuf, others: Vec<PathBuf>) -> SerialLockFiles {
        SerialLockFiles {
            own,
            others,
            turn: Mutex::new(DIRECTORY_PATIENCE),
        }
    }

    /// Locks `device` for the process `holder`, under all names of the device or not at all.
    /// Returns `None` if another process holds the device, or may hold it, or if this request does
    /// not get its turn within [`PATIENCE`].
    pub fn lock(&self, device: &Device, holder: &NewHolder) -> io::Result<Option<DeviceLock>> {
        let locked = self.in_turn(|directory| {
            let judge = Judge::new(directory, holder.belongs_to_peer.then_some(holder.pid));
            if self.is_locked_elsewhere(&judge, directory, device)? {
                return Ok(None);
            }
            let mut stale = Vec::new();
            for name in &device.written {
                match inspect(directory, name) {
                    NameState::Free => {}
                    NameState::File(file) if stale.contains(&file) => {}
                    NameState::File(file) if judge.is_stale(name, &file) => stale.push(file),
                    NameState::File(_) | NameState::Blocked => return Ok(None),
                }
            }
            for file in stale {
                // All names of the file are removed. If one remained, the file could look like a
                // lock of the new holder under that name.
                for name in names_of(directory, device, file)? {
                    let is_free = take_away(directory, &name, file)?;
                    if !is_free && device.written.contains(&name) {
                        return Ok(None);
                    }
                    debug!("removed-stale file={}", shown(&name));
                }
            }
            make(directory, device, holder)
        })?;
        Ok(locked.flatten())
    }

    /// Removes the locks on `device` that the process `pid` holds, and those of dead processes,
    /// each under all of its names. Returns false if there was no lock to remove, or if another
    /// process holds the device and `pid` does not, or if this request does not get its turn within
    /// [`PATIENCE`].
    ///
    /// `pid` may have several locks here. If it made one of them by this very path, only that one
    /// is removed, even if the path leads to another device by now. It made the others by other
    /// paths, and may still need them.
    ///
    /// `may_unlock` checks the process that has the number `pid` now. It is called late, after the
    /// wait for the turn, because another process may have got the number meanwhile. If it returns
    /// false, the locks of `pid` count as locks of another process.
    ///
    /// Calls `forget` with the removed files while it still has the turn. After the turn, a new
    /// lock may get the same inode number.
    pub fn unlock(
        &self,
        device: &Device,
        pid: u32,
        may_unlock: impl Fn() -> bool,
        forget: impl FnOnce(&[FileId]),
    ) -> io::Result<bool> {
        let unlocked = self.in_turn(|directory| {
            let (removable, is_held) = removable(directory, device, pid, may_unlock)?;
            let removed = remove_each(directory, removable)?;
            let ids: Vec<FileId> = removed.iter().map(|file| file.id).collect();
            forget(&ids);
            let belongs_to_pid = |file: &LockFile| file.named == Named::Process(pid);
            if is_held {
                // A dead process may have held the device under one name, while a living process
                // holds it under another.
                return Ok(removed.iter().any(belongs_to_pid));
            }
            Ok(!removed.is_empty())
        })?;
        Ok(unlocked.unwrap_or(false))
    }

    /// Removes a lock of ours whose holder has ended, unless other files have taken its names.
    /// Returns whether the lock was there. Blocks for at most [`PATIENCE`]. Fails with
    /// [`io::ErrorKind::WouldBlock`] if other threads keep the directory for that long.
    pub fn remove(&self, lock: &DeviceLock) -> io::Result<bool> {
        let removed = self.in_turn(|directory| withdraw(directory, lock))?;
        removed.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Waits until the step in progress is done, and prevents all further steps. Call this before
    /// the process ends.
    pub fn stop_for_ever(&self) {
        if let Some(turn) = self.turn.try_lock_for(2 * PATIENCE) {
            std::mem::forget(turn);
        }
    }

    /// Runs `steps` while no other thread of this process runs such steps. If the directory can
    /// be locked, no other process of ours does either. Returns `None` if the turn does not come
    /// within [`PATIENCE`].
    fn in_turn<T>(&self, steps: impl FnOnce(&Directory) -> io::Result<T>) -> io::Result<Option<T>> {
        let asked_at = Instant::now();
        let Some(mut patience) = self.turn.try_lock_until(asked_at + PATIENCE) else {
            return Ok(None);
        };
        let directory = open_to_search(&self.own)?;
        // The wait for the turn counts as well. Otherwise a user who locks the directory again and
        // again could delay one thread after the other, until the threads behind them give up.
        match lock_within(&directory, patience.saturating_sub(asked_at.elapsed())) {
            Ok(true) => *patience = DIRECTORY_PATIENCE,
            // Each single step is safe even without the lock.
            Ok(false) => {
                if !patience.is_zero() {
                    warn!("cannot-lock-directory path={}", shown(self.own.as_os_str()));
                }
                *patience = Duration::ZERO;
            }
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(error) => return Err(error),
        }
        let done = steps(&directory);
        // A fair unlock, so that a client that asks again at once cannot overtake waiting requests.
        MutexGuard::unlock_fair(patience);
        done.map(Some)
    }

    /// Whether a process holds the device under a name that we do not write, or in another
    /// directory. Locks of dead processes do not count, but they are not removed, because they may
    /// belong to other programs.
    fn is_locked_elsewhere(
        &self,
        judge: &Judge<'_>,
        own: &Directory,
        device: &Device,
    ) -> io::Result<bool> {
        let is_written = |name: &OsString| device.written.contains(name);
        let mut known = device.known.iter();
        if known.any(|name| !is_written(name) && judge.is_held(own, name)) {
            return Ok(true);
        }
        let mut visited = vec![own.id()?];
        for path in &self.others {
            let Some(directory) = open_other(path)? else {
                continue;
            };
            let id = directory.id()?;
            if visited.contains(&id) {
                continue;
            }
            visited.push(id);
            let mut known = device.known.iter();
            if known.any(|name| judge.is_held(&directory, name)) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A lock file, and all names that it has.
type NamedFile = (LockFile, Vec<OsString>);

/// The lock files that [`SerialLockFiles::unlock`] removes, and whether the device also has locks
/// that it leaves alone.
fn removable(
    directory: &Directory,
    device: &Device,
    pid: u32,
    may_unlock: impl Fn() -> bool,
) -> io::Result<(Vec<NamedFile>, bool)> {
    let judge = Judge::new(directory, None);
    let files = files_named(directory, &device.written);
    let belongs_to_pid = |file: &LockFile| file.named == Named::Process(pid);
    let by_path = files.iter().find(|(name, file)| {
        let is_path = device.full.first().is_some_and(|full| full == name);
        is_path && belongs_to_pid(file) && !judge.is_stale(name, file)
    });
    let (mut removable, mut is_held) = (Vec::new(), false);
    for (name, file) in &files {
        let is_stale = judge.is_stale(name, file);
        if !is_stale && !belongs_to_pid(file) {
            is_held = true;
            continue;
        }
        let names = names_of(directory, device, *file)?;
        let may_be_meant = || by_path.is_none_or(|(_, by_path)| by_path.is_of_same_lock(file));
        if is_stale || (may_be_meant() && is_of(device, &names) && may_unlock()) {
            removable.push((*file, names));
        } else {
            is_held = true;
        }
    }
    Ok((removable, is_held))
}

/// Removes all names of each file. Returns the files that were still there.
fn remove_each(directory: &Directory, files: Vec<NamedFile>) -> io::Result<Vec<LockFile>> {
    let mut removed = Vec::new();
    for (file, names) in files {
        let mut was_there = false;
        for name in names {
            was_there |= take_away(directory, &name, file)?;
        }
        if was_there {
            removed.push(file);
        }
    }
    Ok(removed)
}

/// Opens a directory and checks that we may look up names in it. If we may not, the directory could
/// still be opened, but every lock in it would seem to be held.
fn open_to_search(path: &Path) -> io::Result<Directory> {
    let directory = Directory::open(path)?;
    directory.identity(".")?;
    Ok(directory)
}

/// Opens a directory in which other programs may have made locks; `None` if the directory is
/// missing, or if we may not read it. Fails if the system cannot tell what is in the directory,
/// because a lock may be there.
fn open_other(path: &Path) -> io::Result<Option<Directory>> {
    match open_to_search(path) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => Ok(None),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lfpd::uucp::device::make_searchable;
    use crate::lfpd::uucp::mark::{self, LockedFor};
    use crate::lfpd::uucp::names::{content, DevicePath};
    use crate::lfpd::uucp::staleness::predates_boot;
    use crate::os::directory::names_in;
    use crate::os::{is_soon, process};
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
    use std::sync::Arc;
    use std::thread;
    use std::time::SystemTime;

    use rustix::fs::{flock, FlockOperation};

    struct Host {
        /// Holds dev, own and other.
        root: tempfile::TempDir,
        files: SerialLockFiles,
    }

    impl Host {
        fn new() -> Host {
            let root = tempfile::tempdir().expect("a directory");
            for name in ["dev", "own", "other"] {
                fs::create_dir(root.path().join(name)).expect("a directory");
            }
            let at = |name: &str| root.path().join(name);
            let others = vec![at("nonexistent"), at("own"), at("other")];
            let files = SerialLockFiles::new(at("own"), others);
            Host { root, files }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        fn device(&self, path: &str) -> Device {
            let path = DevicePath::parse(path.as_bytes()).expect("below /dev");
            Device::look_up(&path, &self.at("dev")).expect("a device")
        }

        fn lock(&self, path: &str, pid: u32) -> Option<DeviceLock> {
            let device = self.device(path);
            let locked = self.files.lock(&device, &holder(pid));
            locked.expect("usable")
        }

        fn unlock(&self, path: &str, pid: u32) -> bool {
            let path = DevicePath::parse(path.as_bytes()).expect("below /dev");
            let device = Device::look_up_to_unlock(&path, &self.at("dev"));
            let unlocked = self.files.unlock(&device, pid, || true, |_| {});
            unlocked.expect("usable")
        }

        fn own_files(&self) -> Vec<String> {
            names_in(&self.at("own"))
        }
    }

    fn holder(pid: u32) -> NewHolder {
        NewHolder {
            pid,
            locked_for: LockedFor::AnyProcess,
            seen_at: SystemTime::now(),
            belongs_to_peer: false,
        }
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
    fn a_process_that_inherits_a_dead_ones_number_holds_nothing() {
        let host = Host::new();
        let lock = |locked_for, seen_at| {
            let holder = NewHolder {
                locked_for,
                seen_at,
                ..holder(own_pid())
            };
            let locked = host.files.lock(&host.device("/dev/ttyS1"), &holder);
            locked.expect("usable").is_some()
        };
        // The process is ours, and began after the one and before the other.
        let (early, late) = (SystemTime::UNIX_EPOCH, SystemTime::now());
        assert!(lock(LockedFor::NoProcess, late));
        assert!(lock(LockedFor::AnyProcess, late));
        assert!(host.unlock("/dev/ttyS1", own_pid()));
        if !rustix::process::geteuid().is_root() {
            return eprintln!("NOT TESTED: only root can mark locks of others");
        }
        assert!(lock(LockedFor::ProcessOf(65_534), early));
        assert!(lock(LockedFor::ProcessOf(65_534), late));
        assert!(!lock(LockedFor::AnyProcess, late));
    }

    #[test]
    fn a_kernel_thread_holds_no_lock() {
        let mut pids = process::all().expect("/proc");
        let Some(thread) = pids.find(|pid| process::is_kernel_thread(*pid)) else {
            return eprintln!("NOT TESTED: no kernel thread is visible in this PID namespace");
        };
        let host = Host::new();
        fs::write(host.at("own/LCK..ttyS1"), content(thread)).expect("written");
        fs::write(host.at("other/LCK..ttyS1"), content(thread)).expect("written");
        host.lock("/dev/ttyS1", own_pid()).expect("free");
        let path = host.at("own/LCK..ttyS1");
        let named = fs::read_to_string(path).expect("readable");
        assert_eq!(named, content(own_pid()));
    }

    #[test]
    fn a_lock_of_an_earlier_boot_is_replaced() {
        let host = Host::new();
        // The first days of 2026: plausible, and before every boot of this program's hosts.
        let old = std::time::UNIX_EPOCH + crate::os::moment::EARLIEST + Duration::from_secs(86_400);
        let write = |at: &str, modified_at: SystemTime| {
            fs::write(host.at(at), content(1)).expect("written");
            let file = fs::File::options().write(true).open(host.at(at));
            let set = file.and_then(|file| file.set_modified(modified_at));
            set.expect("it is ours");
        };
        write("own/LCK..ttyS1", SystemTime::now());
        assert_eq!(host.lock("/dev/ttyS1", own_pid()), None);
        write("own/LCK..ttyS1", old);
        write("other/LCK..ttyS1", old);
        let probe = Directory::open(&host.at("own")).expect("a directory");
        if !predates_boot(mark::since_epoch(old), &probe) {
            return eprintln!("NOT TESTED: the clock was wrong at boot, or files are in memory");
        }
        host.lock("/dev/ttyS1", own_pid()).expect("stale");
        let named = fs::read_to_string(host.at("own/LCK..ttyS1")).expect("readable");
        assert_eq!(named, content(own_pid()));
    }

    /// Locks as a process that asks for itself.
    fn lock_own(host: &Host, path: &str) -> bool {
        let holder = NewHolder {
            belongs_to_peer: true,
            ..holder(own_pid())
        };
        let locked = host.files.lock(&host.device(path), &holder);
        locked.expect("usable").is_some()
    }

    fn set_time(path: &Path, time: SystemTime) {
        let file = fs::File::open(path);
        file.and_then(|file| file.set_modified(time)).expect("ours");
    }

    #[test]
    fn the_asker_replaces_a_file_of_an_earlier_process() {
        let host = Host::new();
        let (now, day) = (SystemTime::now(), Duration::from_secs(86_400));
        for name in ["own/LCK..ttyS1", "other/LCK..ttyS1"] {
            for (time, is_free) in [
                (now - day, true),
                (now + day, true),
                (now, false),
                (now + Duration::from_secs(30), false),
            ] {
                fs::write(host.at(name), content(own_pid())).expect("written");
                set_time(&host.at(name), time);
                // Another client cannot know.
                assert!(host.lock("/dev/ttyS1", 1).is_none());
                assert_eq!(lock_own(&host, "/dev/ttyS1"), is_free, "{name} {time:?}");
                let _ = host.unlock("/dev/ttyS1", own_pid());
                let _ = fs::remove_file(host.at(name));
            }
        }
        fs::write(host.at("own/LCK..ttyS1"), content(1)).expect("written");
        set_time(&host.at("own/LCK..ttyS1"), now + day);
        assert!(!lock_own(&host, "/dev/ttyS1"), "it names another process");
    }

    #[test]
    fn a_replaced_lock_keeps_none_of_its_names() {
        let host = Host::new();
        symlink("ttyUSB0", host.at("dev/gps")).expect("a link");
        host.lock("/dev/gps", own_pid()).expect("free");
        set_time(&host.at("own/LCK..gps"), SystemTime::UNIX_EPOCH);
        assert!(lock_own(&host, "/dev/ttyUSB0"));
        assert_eq!(host.own_files(), ["LCK..ttyUSB0"]);
    }

    #[test]
    fn what_a_power_cut_emptied_is_stale_after_five_minutes() {
        let host = Host::new();
        let path = host.at("own/LCK..ttyS1");
        let (now, minute) = (SystemTime::now(), Duration::from_secs(60));
        for content in [&b""[..], &[0; 11], b"garbage\n", b"-1\n"] {
            for (time, is_stale) in [
                (now - 4 * minute, false),
                (now - 6 * minute, true),
                (now + minute / 2, false),
                (now + 2 * minute, true),
            ] {
                for is_lock in [true, false] {
                    fs::write(&path, content).expect("written");
                    set_time(&path, time);
                    let is_done = if is_lock {
                        host.lock("/dev/ttyS1", own_pid()).is_some()
                    } else {
                        host.unlock("/dev/ttyS1", own_pid())
                    };
                    assert_eq!(is_done, is_stale, "{content:?} {time:?}");
                    let _ = fs::remove_file(&path);
                }
            }
        }
    }

    #[test]
    fn an_old_file_without_a_process_is_busy_in_three_cases() {
        let host = Host::new();
        let is_busy = |name: &str, content: &str| {
            let path = host.at(name);
            fs::write(&path, content).expect("written");
            set_time(&path, SystemTime::UNIX_EPOCH);
            let locked = host.lock("/dev/ttyS1", own_pid());
            let is_busy = locked.is_none() && !host.unlock("/dev/ttyS1", own_pid());
            let _ = fs::remove_file(&path);
            // Not every user may write to the lock files of ours that are left.
            for left in fs::read_dir(host.at("own")).expect("there").flatten() {
                fs::remove_file(left.path()).expect("ours");
            }
            is_busy
        };
        assert!(!is_busy("own/LCK..ttyS1", ""));
        assert!(!is_busy("own/lk..ttyS1", ""));
        // The number that lockfile-create writes; another directory; a program that keeps it.
        assert!(is_busy("own/LCK..ttyS1", "0\n"));
        assert!(is_busy("other/LCK..ttyS1", ""));
        let path = host.at("own/LCK..ttyS1");
        fs::write(&path, "").expect("written");
        let kept = fs::File::open(&path).expect("there");
        flock(&kept, FlockOperation::LockShared).expect("a lock");
        assert!(is_busy("own/LCK..ttyS1", ""));
    }

    #[test]
    fn a_file_whose_owner_names_another_users_process_holds_nothing() {
        let host = Host::new();
        if !rustix::process::geteuid().is_root() {
            return eprintln!("NOT TESTED: only root can give files away");
        }
        let theirs = |user: u32| {
            let mut sleep = Command::new("sleep");
            let sleep = std::os::unix::process::CommandExt::uid(sleep.arg("60"), user);
            sleep.spawn().expect("sleep")
        };
        let mut child = theirs(1234);
        for (owner, pid, is_free) in [
            (1234, 1, true),
            (1234, child.id(), false),
            (1235, child.id(), true),
            (0, child.id(), false),
            // It may be any user of another namespace.
            (65_534, 1, false),
        ] {
            for name in ["LCK..ttyS1", "lk..ttyS1"] {
                let path = host.at("own").join(name);
                fs::write(&path, content(pid)).expect("written");
                std::os::unix::fs::chown(&path, Some(owner), None).expect("we are root");
                let is_locked = host.lock("/dev/ttyS1", own_pid()).is_some();
                assert_eq!(is_locked, is_free, "{name} {owner} {pid}");
                for name in host.own_files() {
                    fs::remove_file(host.at("own").join(name)).expect("there");
                }
            }
        }
        child.kill().expect("killed");
        child.wait().expect("its end");
    }

    #[test]
    fn the_number_of_a_thread_holds_nothing() {
        let host = Host::new();
        let (sender, receiver) = std::sync::mpsc::channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let id = rustix::thread::gettid().as_raw_nonzero().get();
                sender.send(id.unsigned_abs()).expect("a listener");
                let _ = stopped.recv();
            });
            let id = receiver.recv().expect("a number");
            fs::write(host.at("own/LCK..ttyS1"), content(id)).expect("written");
            assert!(host.lock("/dev/ttyS1", own_pid()).is_some());
            drop(stop);
        });
    }

    #[test]
    fn a_file_with_very_many_names_loses_only_the_devices() {
        let host = Host::new();
        let path = host.at("own/LCK..ttyS1");
        fs::write(&path, content(dead_pid())).expect("written");
        for at in 0..20 {
            fs::hard_link(&path, host.at("own").join(format!("LCK..{at:02}"))).expect("a link");
        }
        host.lock("/dev/ttyS1", own_pid()).expect("stale");
        assert!(host.unlock("/dev/ttyS1", own_pid()));
        assert_eq!(host.own_files().len(), 20);
    }

    #[test]
    fn a_device_held_under_one_name_is_held() {
        let host = Host::new();
        fs::write(host.at("own/LCK..0"), content(dead_pid())).expect("written");
        fs::write(host.at("own/LCK..usb_0"), content(1)).expect("written");
        assert_eq!(host.lock("/dev/usb/0", own_pid()), None);
        assert!(!host.unlock("/dev/usb/0", own_pid()));
        assert_eq!(host.own_files(), ["LCK..usb_0"]);
    }

    #[test]
    fn a_nested_device_is_locked_by_both_names_or_by_none() {
        let host = Host::new();
        host.lock("/dev/usb/tts/0", own_pid()).expect("free");
        assert_eq!(host.own_files(), ["LCK..0", "LCK..usb_tts_0"]);
        assert!(host.unlock("/dev/usb/tts/0", own_pid()));
        assert!(host.own_files().is_empty());
        for taken in [
            "LCK..0",
            "LCK..usb_tts_0",
            "LCK..usb:tts:0",
            "lk..0",
            "LK.usb_tts_0",
        ] {
            fs::write(host.at("own").join(taken), content(1)).expect("written");
            assert_eq!(host.lock("/dev/usb/tts/0", own_pid()), None, "{taken}");
            assert_eq!(host.own_files(), [taken]);
            fs::remove_file(host.at("own").join(taken)).expect("removed");
        }
    }

    #[test]
    fn locks_in_other_directories_count_while_their_holder_lives() {
        let host = Host::new();
        let path = host.at("other/LCK..ttyS1");
        for (content, is_free) in [
            (content(1), false),
            (String::new(), false),
            (content(dead_pid()), true),
        ] {
            fs::write(&path, &content).expect("written");
            assert_eq!(host.lock("/dev/ttyS1", own_pid()).is_some(), is_free);
            assert_eq!(fs::read_to_string(&path).expect("still there"), content);
        }
    }

    #[test]
    fn a_lock_by_another_path_to_the_device_is_busy() {
        use rustix::fs::{makedev, mknodat, FileType, Mode, CWD};
        let host = Host::new();
        for name in ["ttyUSB0", "console"] {
            let mode = Mode::from_raw_mode(0o600);
            let (path, numbers) = (host.at("dev").join(name), makedev(1, 3));
            if mknodat(CWD, path, FileType::CharacterDevice, mode, numbers).is_err() {
                return eprintln!("NOT TESTED: only root can make nodes");
            }
        }
        make_searchable(host.root.path(), "dev/serial/by-id");
        symlink("../../ttyUSB0", host.at("dev/serial/by-id/x")).expect("a link");
        for taken in [
            "own/LCK..x",
            "other/LCK..serial_by-id_x",
            "own/LCK..console",
        ] {
            fs::write(host.at(taken), content(1)).expect("written");
            assert_eq!(host.lock("/dev/ttyUSB0", own_pid()), None, "{taken}");
            fs::write(host.at(taken), content(dead_pid())).expect("written");
            host.lock("/dev/ttyUSB0", own_pid()).expect("free");
            assert!(host.unlock("/dev/ttyUSB0", own_pid()));
        }
    }

    #[test]
    fn a_link_that_has_gone_since_leaves_no_lock_behind() {
        let host = Host::new();
        symlink("ttyUSB0", host.at("dev/modem")).expect("a link");
        host.lock("/dev/modem", own_pid()).expect("free");
        assert_eq!(host.own_files(), ["LCK..modem", "LCK..ttyUSB0"]);
        assert_eq!(host.lock("/dev/ttyUSB0", own_pid()), None);
        fs::remove_file(host.at("dev/modem")).expect("unplugged");
        host.lock("/dev/ttyS1", own_pid()).expect("free");
        assert!(host.unlock("/dev/modem", own_pid()));
        assert_eq!(host.own_files(), ["LCK..ttyS1"]);
    }

    /// A link that is locked by this process and then leads elsewhere.
    fn host_with_a_moved_link() -> Host {
        let host = Host::new();
        symlink("ttyUSB0", host.at("dev/gps")).expect("a link");
        host.lock("/dev/gps", own_pid()).expect("free");
        fs::remove_file(host.at("dev/gps")).expect("unplugged");
        symlink("ttyUSB1", host.at("dev/gps")).expect("a link");
        host
    }

    #[test]
    fn unlocking_a_moved_link_keeps_the_lock_of_its_new_target() {
        let host = host_with_a_moved_link();
        host.lock("/dev/ttyUSB1", own_pid()).expect("free");
        assert!(host.unlock("/dev/gps", own_pid()));
        assert_eq!(host.own_files(), ["LCK..ttyUSB1"]);
        // Now no lock is left that was made by the path /dev/gps. So /dev/gps is only another path
        // to ttyUSB1, and unlocks it.
        assert!(host.unlock("/dev/gps", own_pid()));
        assert!(host.own_files().is_empty());
    }

    #[test]
    fn a_stale_file_beside_a_lock_keeps_none_of_its_names() {
        let host = host_with_a_moved_link();
        fs::write(host.at("own/LCK..ttyUSB1"), content(dead_pid())).expect("written");
        assert!(host.unlock("/dev/gps", own_pid()));
        assert!(host.own_files().is_empty());
    }

    #[test]
    fn an_unlock_that_was_cut_short_can_be_repeated() {
        let host = Host::new();
        let private = host.at("own/.lfpd-0123456789abcdef");
        for cut in ["LCK..0", "LCK..usb_0"] {
            host.lock("/dev/usb/0", own_pid()).expect("free");
            fs::rename(host.at("own").join(cut), &private).expect("set aside");
            assert!(host.unlock("/dev/usb/0", own_pid()), "{cut}");
            assert_eq!(host.own_files(), [".lfpd-0123456789abcdef"]);
        }
    }

    #[test]
    fn a_device_with_the_same_last_name_keeps_its_lock() {
        let host = Host::new();
        host.lock("/dev/usb/tts/0", own_pid()).expect("free");
        assert!(!host.unlock("/dev/pts/0", own_pid()));
        assert_eq!(host.own_files(), ["LCK..0", "LCK..usb_tts_0"]);
        // A link to the device unlocks it. So does the link by which it was locked, even if that
        // link has gone.
        make_searchable(host.root.path(), "dev/by-id");
        symlink("../usb/tts/0", host.at("dev/by-id/x")).expect("a link");
        assert!(host.unlock("/dev/by-id/x", own_pid()));
        host.lock("/dev/by-id/x", own_pid()).expect("free");
        fs::remove_file(host.at("dev/by-id/x")).expect("unplugged");
        assert!(!host.unlock("/dev/pts/0", own_pid()));
        assert!(host.unlock("/dev/by-id/x", own_pid()));
        assert!(host.own_files().is_empty());
        // The single name of another program's lock may be that of any device.
        fs::write(host.at("own/LCK..0"), content(own_pid())).expect("written");
        assert!(host.unlock("/dev/pts/0", own_pid()));
    }

    #[test]
    fn our_lock_is_removed_only_as_long_as_it_is_ours() {
        let host = Host::new();
        let lock = host.lock("/dev/usb/0", own_pid()).expect("free");
        assert!(host.files.remove(&lock).expect("usable"));
        assert!(host.own_files().is_empty());
        host.lock("/dev/usb/0", 1).expect("free");
        assert!(!host.files.remove(&lock).expect("usable"));
        assert_eq!(host.own_files(), ["LCK..0", "LCK..usb_0"]);
    }

    #[test]
    fn a_lock_is_forgotten_before_another_can_get_its_inode() {
        let host = Host::new();
        let lock = host.lock("/dev/ttyS1", own_pid()).expect("free");
        let forget = |ids: &[FileId]| {
            assert_eq!(ids, [lock.names[0].1]);
            assert!(host.files.turn.try_lock().is_none(), "another may lock");
        };
        let device = host.device("/dev/ttyS1");
        let unlocked = host.files.unlock(&device, own_pid(), || true, forget);
        assert!(unlocked.expect("usable"));
    }

    #[test]
    fn requests_are_carried_out_in_the_order_they_came() {
        // A machine that is busy can make a request wait for longer than its patience.
        let done = (0..10).find_map(|_| order_of_waiting_requests());
        assert_eq!(done, Some(vec![(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]));
    }

    /// Starts four threads, one after another, that make one request each. The first one makes a
    /// second request as soon as its first one is done. Returns the order in which the five are
    /// carried out; `None` if one gave up.
    fn order_of_waiting_requests() -> Option<Vec<(usize, usize)>> {
        let host = Host::new();
        let done = Mutex::new(Vec::new());
        thread::scope(|scope| {
            let turn = host.files.turn.lock();
            for at in 0..4 {
                let (host, done) = (&host, &done);
                // Over a channel, the thread could sleep because of the channel.
                let id = Arc::new(AtomicI32::new(0));
                let own_id = Arc::clone(&id);
                scope.spawn(move || {
                    let own = rustix::thread::gettid().as_raw_nonzero();
                    own_id.store(own.get(), Ordering::Relaxed);
                    // The first asks again at once, and is behind the others then.
                    for again in 0..if at == 0 { 2 } else { 1 } {
                        let noted = host.files.in_turn(|_| {
                            done.lock().push((at, again));
                            Ok(())
                        });
                        noted.expect("usable");
                    }
                });
                while id.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                let stat = format!("/proc/self/task/{}/stat", id.load(Ordering::Relaxed));
                // It sleeps only while it waits for its turn. If it has given up, it is gone.
                let is_awake = || fs::read_to_string(&stat).is_ok_and(|it| !it.contains(") S "));
                assert!(is_soon(|| !is_awake()), "it does not wait");
            }
            MutexGuard::unlock_fair(turn);
        });
        Some(done.into_inner()).filter(|done| done.len() == 5)
    }

    #[test]
    fn a_directory_that_a_user_keeps_locked_keeps_no_device() {
        let host = Host::new();
        let theirs = Directory::open(&host.at("own")).expect("a directory");
        assert!(lock_within(&theirs, PATIENCE).expect("lockable"));
        let started = Instant::now();
        assert!(host.lock("/dev/ttyS1", own_pid()).is_some());
        assert!(started.elapsed() >= DIRECTORY_PATIENCE);
        // Only the first one has waited.
        assert!(host.files.turn.lock().is_zero());
        assert_eq!(host.lock("/dev/ttyS1", own_pid()), None);
        assert!(host.unlock("/dev/ttyS1", own_pid()));
        drop(theirs);
        // Until they execute, children of other tests have the directory open and locked, too.
        let deadline = Instant::now() + Duration::from_secs(10);
        while *host.files.turn.lock() != DIRECTORY_PATIENCE {
            assert!(Instant::now() < deadline, "it waits no more");
            assert!(host.lock("/dev/ttyS1", own_pid()).is_some());
            assert!(host.unlock("/dev/ttyS1", own_pid()));
        }
    }

    #[test]
    fn a_user_who_locks_the_directory_again_and_again_stops_no_lock() {
        const KEPT: Duration = Duration::from_millis(700);
        const COUNT: usize = 6;
        // A machine that is busy can make a round late. Were the wait for the turn not counted, the
        // last ones would be refused in every round.
        assert!((0..5).any(|_| all_lock_despite_a_user_who_keeps_locking(KEPT, COUNT)));
    }

    /// Whether `count` threads lock a device each, beside a user who keeps the directory locked for
    /// `kept` at a time.
    fn all_lock_despite_a_user_who_keeps_locking(kept: Duration, count: usize) -> bool {
        let host = Host::new();
        let theirs = Directory::open(&host.at("own")).expect("a directory");
        let is_theirs = |patience| lock_within(&theirs, patience).expect("lockable");
        assert!(is_theirs(PATIENCE));
        let is_over = AtomicBool::new(false);
        let lock = &|at: usize| host.lock(&format!("/dev/ttyS{at}"), own_pid());
        let locked = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    thread::sleep(kept);
                    // Until one of ours has it.
                    loop {
                        flock(&theirs, FlockOperation::Unlock).expect("unlocked");
                        thread::sleep(Duration::from_micros(30));
                        if is_over.load(Ordering::Relaxed) || !is_theirs(Duration::ZERO) {
                            break;
                        }
                    }
                    flock(&theirs, FlockOperation::LockExclusive).expect("locked");
                }
            });
            let lockers: Vec<_> = (0..count).map(|at| scope.spawn(move || lock(at))).collect();
            let locked: Vec<_> = lockers.into_iter().map(|locker| locker.join()).collect();
            is_over.store(true, Ordering::Relaxed);
            locked
        });
        locked.iter().all(|lock| matches!(lock, Ok(Some(_))))
    }
}
