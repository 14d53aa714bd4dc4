//! Carries out requests to lock and unlock. Checks whether the peer may make the request, finds the
//! device, and looks at the device's lock files.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use log::{debug, warn};

use crate::lfpd::uucp::device::Device;
use crate::lfpd::uucp::files::{DeviceLock, NewHolder, SerialLockFiles};
use crate::lfpd::uucp::mark::LockedFor;
use crate::lfpd::uucp::names::DevicePath;
use crate::os::directory::FileId;
use crate::os::text::{reason, Escaped};
use crate::os::{file_locks, is_temporary};
use crate::shared::log::Throttle;

use super::command::LockTarget;
use super::holders::Holders;
use super::peer::{NamedProcess, Peer, PeerRule};
use super::reply::LfpReply;

/// How long a request reads the kernel's list of locks before the device counts as locked. Any user
/// can make the list long.
const LIST_PATIENCE: Duration = Duration::from_secs(1);

/// The rules that say who may lock, and on behalf of which process.
#[derive(Debug)]
pub struct LockRules {
    pub peer_rule: PeerRule,
    pub require_live_pid: bool,
    /// The directory of the devices: /dev, except in tests.
    pub devices: PathBuf,
}

/// The lock files, and the rules for them.
#[derive(Debug)]
pub struct Locks {
    files: SerialLockFiles,
    rules: LockRules,
    /// `None` in a server for one connection, because that server ends before the processes that
    /// hold its locks.
    holders: Option<Holders>,
    failures: Throttle,
    foreigners: Throttle,
    dead_pids: Throttle,
}

impl Locks {
    /// Serves the locks in `files`. With `holders`, [`Locks::reap`] removes the locks of processes
    /// that end.
    pub fn new(files: SerialLockFiles, rules: LockRules, holders: Option<Holders>) -> Locks {
        Locks {
            files,
            rules,
            holders,
            failures: Throttle::default(),
            foreigners: Throttle::default(),
            dead_pids: Throttle::default(),
        }
    }

    /// Locks a device if `peer` may do that. Blocks for at most three seconds.
    pub fn lock(&self, peer: Peer, target: &LockTarget<'_>) -> LfpReply<'static> {
        let Some((path, pid)) = checked(target) else {
            return LfpReply::Denied;
        };
        let shown = Escaped(target.device);
        // Preparing to notice the end comes first, because the process may end at any time.
        let holders = self.holders.as_ref();
        let end = holders.and_then(|holders| holders.end_of(pid));
        let seen_at = SystemTime::now();
        let process = peer.named_process(pid);
        let is_missed = process.is_none() && self.rules.require_live_pid;
        if is_missed || !self.admits(process, peer, shown, pid) {
            return LfpReply::Denied;
        }
        let Some(device) = Device::look_up(&path, &self.rules.devices) else {
            return LfpReply::Denied;
        };
        let user = process.and_then(|process| process.user);
        let holder = NewHolder {
            pid,
            locked_for: match process {
                Some(_) => LockedFor::process_of(user),
                None => LockedFor::NoProcess,
            },
            seen_at,
            belongs_to_peer: process.is_some_and(|process| process.belongs_to_peer),
        };
        // Before the turn, so that a long list delays no other request.
        match is_locked_by_program(&device, &holder) {
            Ok(false) => {}
            Ok(true) => return LfpReply::Busy,
            Err(error) => return self.failed("lock", shown, &error),
        }
        match self.files.lock(&device, &holder) {
            Ok(None) => LfpReply::Busy,
            Ok(Some(lock)) => {
                debug!("locked device={shown} pid={pid} {peer}");
                if process.is_none() {
                    self.dead_pids.warn(format_args!(
                        "locked-for-no-process device={shown} pid={pid} {peer}"
                    ));
                } else if let (Some(holders), Some(end)) = (holders, end) {
                    for left_over in holders.add(user, pid, end, lock) {
                        let _ = self.remove(&left_over);
                    }
                }
                LfpReply::Okay
            }
            Err(error) => self.failed("lock", shown, &error),
        }
    }

    /// Unlocks a device if `peer` may do that. Blocks for at most two seconds.
    pub fn unlock(&self, peer: Peer, target: &LockTarget<'_>) -> LfpReply<'static> {
        let Some((path, pid)) = checked(target) else {
            return LfpReply::Denied;
        };
        let shown = Escaped(target.device);
        let may_unlock = || self.admits(peer.named_process(pid), peer, shown, pid);
        if !may_unlock() {
            return LfpReply::Denied;
        }
        let device = Device::look_up_to_unlock(&path, &self.rules.devices);
        let forget = |removed: &[FileId]| {
            if let Some(holders) = &self.holders {
                holders.forget(removed);
            }
        };
        match self.files.unlock(&device, pid, may_unlock, forget) {
            Ok(false) => LfpReply::Busy,
            Ok(true) => {
                debug!("unlocked device={shown} pid={pid} {peer}");
                LfpReply::Okay
            }
            Err(error) => self.failed("unlock", shown, &error),
        }
    }

    /// Removes the locks of processes that end. Does not return, unless this server does not watch
    /// holders.
    pub fn reap(&self) {
        let Some(holders) = &self.holders else { return };
        holders.run(|lock| self.remove(lock))
    }

    /// Waits until the step in progress on a lock file is done, and prevents all further steps.
    pub fn finish(&self) {
        self.files.stop_for_ever();
    }

    /// Removes a lock whose holder has ended. Returns false if that failed but may succeed later.
    fn remove(&self, lock: &DeviceLock) -> bool {
        match self.files.remove(lock) {
            Ok(true) => debug!("reaped {lock}"),
            Ok(false) => {}
            Err(error) if is_temporary(&error) => {
                debug!("not-reaped-yet {lock} error=\"{}\"", reason(&error));
                return false;
            }
            Err(error) => warn!("cannot-reap {lock} error=\"{}\"", reason(&error)),
        }
        true
    }

    /// Whether `peer` may lock and unlock on behalf of the process `pid`. If there is no such
    /// process, every peer may.
    fn admits(
        &self,
        process: Option<NamedProcess>,
        peer: Peer,
        device: Escaped<'_>,
        pid: u32,
    ) -> bool {
        if process.is_none_or(|process| process.belongs_to_peer) {
            return true;
        }
        let verdict = match self.rules.peer_rule {
            PeerRule::Off => return true,
            PeerRule::Log => "served",
            PeerRule::Enforce => "refused",
        };
        self.foreigners.warn(format_args!(
            "not-their-process verdict={verdict} device={device} pid={pid} {peer}"
        ));
        self.rules.peer_rule == PeerRule::Log
    }

    fn failed(&self, verb: &str, device: Escaped<'_>, error: &io::Error) -> LfpReply<'static> {
        let reason = reason(error);
        self.failures.warn(format_args!(
            "cannot-use-lock-files verb={verb} device={device} error=\"{reason}\""
        ));
        LfpReply::Denied
    }
}

/// Whether a program other than the holder-to-be has locked the device itself, as pyserial and
/// picocom do, which make no lock file.
fn is_locked_by_program(device: &Device, holder: &NewHolder) -> io::Result<bool> {
    if device.nodes.is_empty() {
        return Ok(false);
    }
    let asker = holder.belongs_to_peer.then_some(holder.pid);
    match file_locks::has_other(&device.nodes, asker, Instant::now() + LIST_PATIENCE) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(true),
        known => known,
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(user) => write!(f, "peer_uid={user}"),
            None => f.write_str("peer_uid=unknown"),
        }
    }
}

fn checked(target: &LockTarget<'_>) -> Option<(DevicePath, u32)> {
    Some((DevicePath::parse(target.device)?, target.pid?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::Arc;
    use std::thread;

    use crate::os::is_soon;

    #[test]
    fn an_unlocked_device_leaves_its_watch_to_another_holder() {
        let directory = tempfile::tempdir().expect("a directory");
        let rules = LockRules {
            peer_rule: PeerRule::Enforce,
            require_live_pid: true,
            devices: "/dev".into(),
        };
        let files = SerialLockFiles::new(directory.path().to_owned(), Vec::new());
        let one_watch = Holders::new(1).expect("a watch");
        let locks = Arc::new(Locks::new(files, rules, Some(one_watch)));
        let peer = Peer(Some(rustix::process::geteuid().as_raw()));
        let target = |device, pid| LockTarget {
            device,
            pid: Some(pid),
        };
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let own = target(b"/dev/lfpd-a", std::process::id());
        let childs = target(b"/dev/lfpd-b", child.id());
        let replies = [
            locks.lock(peer, &own),
            locks.unlock(peer, &own),
            locks.lock(peer, &childs),
        ];
        let reaper = Arc::clone(&locks);
        thread::spawn(move || reaper.reap());
        child.kill().expect("killed");
        child.wait().expect("its end");
        assert_eq!(replies, [LfpReply::Okay; 3]);
        let file = directory.path().join("LCK..lfpd-b");
        assert!(
            is_soon(|| !file.exists()),
            "the end of its holder is not noticed"
        );
    }
}
