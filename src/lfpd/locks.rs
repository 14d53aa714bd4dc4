//! What is done about a request to lock or unlock: who may ask, what the device is, what its lock files
//! say.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use log::{debug, warn};
use rustix::io::Errno;

use crate::lfpd::uucp::device::{Device, NotADevice};
use crate::lfpd::uucp::files::{LockFiles, Outcome, OwnLock};
use crate::lfpd::uucp::mark::LockedFor;
use crate::lfpd::uucp::names::DevicePath;
use crate::log::Throttle;
use crate::text::{reason, Escaped};

use super::command::Request;
use super::holders::Holders;
use super::peer::{Peer, PeerRule, Standing};
use super::reply::Reply;

/// Who may lock, and for whom.
#[derive(Debug)]
pub struct LockRules {
    /// What is done about those who ask for somebody else's process.
    pub peer_rule: PeerRule,
    /// Whether a lock for a process that is not there is refused.
    pub require_live_pid: bool,
    /// Whether lock files are given to the user whose process holds them.
    pub chown: bool,
    /// Where the devices are: /dev.
    pub devices: PathBuf,
}

/// The lock files, and the rules for them.
#[derive(Debug)]
pub struct Locks {
    files: LockFiles,
    rules: LockRules,
    /// If we are there to see holders end.
    holders: Option<Holders>,
    failures: Throttle,
    foreigners: Throttle,
    dead_pids: Throttle,
}

/// Whom a lock is for.
struct Holder {
    is_alive: bool,
    user: Option<u32>,
}

impl Locks {
    /// The locks in `files`. With `holders`, those of processes that end are removed by [`Locks::reap`].
    pub fn new(files: LockFiles, rules: LockRules, holders: Option<Holders>) -> Locks {
        Locks {
            files,
            rules,
            holders,
            failures: Throttle::default(),
            foreigners: Throttle::default(),
            dead_pids: Throttle::default(),
        }
    }

    /// Locks a device, if `peer` may have that. Blocks for two seconds at most.
    pub fn lock(&self, peer: Peer, request: &Request<'_>) -> Reply<'static> {
        let Some((path, pid)) = target(request) else {
            return Reply::Denied;
        };
        // Before anything is looked at: the process may end meanwhile.
        let end = self
            .holders
            .as_ref()
            .and_then(|holders| holders.end_of(pid));
        let seen_at = SystemTime::now();
        let Some(holder) = self.holder(peer, request, pid) else {
            return Reply::Denied;
        };
        if !holder.is_alive && self.rules.require_live_pid {
            return Reply::Denied;
        }
        let device = match Device::look_up(&path, &self.rules.devices) {
            Ok(device) => device,
            Err(NotADevice) => return Reply::Denied,
        };
        let owner = holder.user.filter(|_| self.rules.chown && holder.is_alive);
        let locked_for = match holder.is_alive {
            true => LockedFor::process_of(holder.user, seen_at),
            false => LockedFor::NoProcess,
        };
        match self.files.lock(&device, pid, locked_for, owner) {
            Ok(Outcome::Busy) => Reply::Busy,
            Ok(Outcome::Locked(lock)) => {
                debug!("locked device={} pid={pid} {peer}", shown(request));
                if !holder.is_alive {
                    self.warn_of_dead(peer, request, pid);
                } else if let (Some(holders), Some(end)) = (&self.holders, end) {
                    let left_over = holders.add(holder.user, pid, end, lock);
                    for lock in left_over {
                        let _ = self.remove(&lock);
                    }
                }
                Reply::Okay
            }
            Err(error) => self.failed("lock", request, &error),
        }
    }

    /// Unlocks a device, if `peer` may have that. Blocks for two seconds at most.
    pub fn unlock(&self, peer: Peer, request: &Request<'_>) -> Reply<'static> {
        let Some((path, pid)) = target(request) else {
            return Reply::Denied;
        };
        if self.holder(peer, request, pid).is_none() {
            return Reply::Denied;
        }
        let device = Device::look_up_to_unlock(&path, &self.rules.devices);
        match self.files.unlock(&device, pid) {
            Ok(removed) if removed.is_empty() => Reply::Busy,
            Ok(removed) => {
                debug!("unlocked device={} pid={pid} {peer}", shown(request));
                if let Some(holders) = &self.holders {
                    holders.forget(&removed);
                }
                Reply::Okay
            }
            Err(error) => self.failed("unlock", request, &error),
        }
    }

    /// Removes the locks of processes that end; does not return, unless that is not wanted.
    pub fn reap(&self) {
        let Some(holders) = &self.holders else { return };
        holders.run(|lock| self.remove(lock))
    }

    /// Waits until nothing is half done, and lets nothing begin any more.
    pub fn finish(&self) {
        self.files.finish();
    }

    /// Removes a lock whose holder has ended. Returns whether that is settled: if not, it may be possible
    /// later.
    fn remove(&self, lock: &OwnLock) -> bool {
        match self.files.remove(lock) {
            Ok(true) => debug!("reaped {lock}"),
            Ok(false) => {}
            Err(error) if passes(&error) => {
                debug!("not-reaped-yet {lock} error=\"{}\"", reason(&error));
                return false;
            }
            Err(error) => warn!("cannot-reap {lock} error=\"{}\"", reason(&error)),
        }
        true
    }

    /// For whom `peer` asks; `None` if it may not.
    fn holder(&self, peer: Peer, request: &Request<'_>, pid: u32) -> Option<Holder> {
        let (user, is_alive) = match peer.standing(pid) {
            Standing::Own { user } => (user, true),
            Standing::Dead => (None, false),
            Standing::Foreign { user } => {
                let verdict = match self.rules.peer_rule {
                    PeerRule::Off => {
                        return Some(Holder {
                            is_alive: true,
                            user,
                        })
                    }
                    PeerRule::Log => "served",
                    PeerRule::Enforce => "refused",
                };
                if let Some(held_back) = self.foreigners.admit() {
                    let device = shown(request);
                    warn!("not-their-process {verdict}=yes device={device} pid={pid} {peer} held_back={held_back}");
                }
                if self.rules.peer_rule == PeerRule::Enforce {
                    return None;
                }
                (user, true)
            }
        };
        Some(Holder { is_alive, user })
    }

    fn warn_of_dead(&self, peer: Peer, request: &Request<'_>, pid: u32) {
        if let Some(held_back) = self.dead_pids.admit() {
            let device = shown(request);
            warn!("locked-for-nobody device={device} pid={pid} {peer} held_back={held_back}");
        }
    }

    fn failed(&self, verb: &str, request: &Request<'_>, error: &io::Error) -> Reply<'static> {
        if let Some(held_back) = self.failures.admit() {
            let (device, reason) = (shown(request), reason(error));
            warn!(
                "cannot-use-lock-files verb={verb} device={device} error=\"{reason}\" held_back={held_back}"
            );
        }
        Reply::Denied
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

/// Whether it is the moment that is bad: others have the directory, or all descriptors.
fn passes(error: &io::Error) -> bool {
    let is_shortage = matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM)
    );
    is_shortage || error.kind() == io::ErrorKind::WouldBlock
}

fn target(request: &Request<'_>) -> Option<(DevicePath, u32)> {
    Some((DevicePath::parse(request.device)?, request.pid?))
}

fn shown<'a>(request: &Request<'a>) -> Escaped<'a> {
    Escaped(request.device)
}
