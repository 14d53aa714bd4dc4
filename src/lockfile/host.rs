//! What this process knows about its host: the clocks, the processes, and the identity.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use crate::os::directory::Directory;
use crate::os::moment;

use super::files::new_file;
use super::record::{LockInfo, Record};
use super::staleness::{Content, Host, HostId, UNKNOWN_PID_NAMESPACE};
use super::takeover::{is_forbidden, HeldLock};
use super::HolderKind;
use crate::os::process::{self, Process};

const OWN_PID_NAMESPACE: &str = "/proc/self/ns/pid";

/// What one operation on a lock knows about this host, and the lock's directory.
pub(super) struct LocalHost<'a> {
    pub(super) directory: &'a Directory,
    pub(super) id: HostId,
    pub(super) last_seen: &'a LastSeen,
}

/// For a lock whose age the clocks cannot tell: its most recent content, and the time since boot at
/// which this process first saw that content.
#[derive(Debug, Default)]
pub(super) struct LastSeen(Mutex<Option<(Content, Duration)>>);

impl LastSeen {
    /// For how long the lock has had this content, as far as this process has seen.
    fn unchanged_for(&self, content: &Content, now: Duration) -> Duration {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*seen {
            Some((last, since)) if last == content => now.saturating_sub(*since),
            _ => {
                *seen = Some((content.clone(), now));
                Duration::ZERO
            }
        }
    }
}

/// Returns the time by the clock of the directory's file system, in seconds since 1970. Fails if
/// that clock cannot be read.
pub(super) fn file_system_now(directory: &Directory) -> io::Result<u64> {
    // A new file gets its time from the same clock as the other files: on NFS, from the clock of
    // the server.
    let modified = new_file(directory, 0o600).and_then(|file| Ok(file.metadata()?.mtime()));
    match modified {
        Ok(seconds) => u64::try_from(seconds).map_err(io::Error::other),
        // A process that may not create a file here cannot take over a lock either. The time is
        // then only displayed, so the system clock is good enough.
        Err(error) if is_forbidden(&error) => Ok(seconds_since_1970()),
        Err(error) => Err(error),
    }
}

impl Host for LocalHost<'_> {
    fn id(&self) -> &HostId {
        &self.id
    }

    fn now(&self) -> u64 {
        seconds_since_1970()
    }

    fn file_system_now(&self) -> Option<u64> {
        file_system_now(self.directory).ok()
    }

    fn booted_at(&self) -> Option<u64> {
        process::booted_at()
    }

    fn uptime(&self) -> Option<u64> {
        process::uptime()
    }

    fn unchanged_for(&self, content: &Content) -> u64 {
        let now = process::time_since_boot().unwrap_or_default();
        self.last_seen.unchanged_for(content, now).as_secs()
    }

    fn process(&self, pid: u32) -> Option<Process> {
        process::look_up(pid)
    }
}

/// Reads the identity of this host, without which no lock can be judged. Fails if the process
/// currently has no file descriptor or memory left.
pub(super) fn find_host_id() -> io::Result<HostId> {
    let name = rustix::system::uname();
    let host = name.nodename().to_string_lossy().trim().to_owned();
    let known = |text: &String| !text.is_empty();
    let boot = boot_id()?.clone().filter(known);
    // The namespace is read each time, because a forked child may be in another namespace even if
    // it has the same process number.
    let pid_namespace = if_there(fs::read_link(OWN_PID_NAMESPACE))?;
    Ok(HostId {
        host: Some(host).filter(known),
        boot,
        pid_namespace: pid_namespace.and_then(|link| {
            let link = link.to_string_lossy();
            let number = link.strip_prefix("pid:[")?.strip_suffix(']')?;
            Some(number.to_owned())
        }),
    })
}

/// The boot id of this kernel. It is read only once.
fn boot_id() -> io::Result<&'static Option<String>> {
    static BOOT: OnceLock<Option<String>> = OnceLock::new();
    if let Some(boot) = BOOT.get() {
        return Ok(boot);
    }
    let boot = if_there(process::boot_id())?;
    Ok(BOOT.get_or_init(|| boot))
}

/// Whether the kernel has no pid namespaces, so that each process number belongs to one process.
fn has_no_pid_namespaces() -> bool {
    let is_missing =
        fs::read_link(OWN_PID_NAMESPACE).is_err_and(|why| why.kind() == io::ErrorKind::NotFound);
    is_missing && process::is_proc_ours()
}

/// Turns the error into `None` if there is no /proc, or if this process may not read it.
fn if_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    use io::ErrorKind::{NotFound, PermissionDenied};
    match found {
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(None),
        other => other.map(Some),
    }
}

/// The current time in seconds since 1970, by the system clock; 0 if that clock shows an earlier
/// time.
pub(super) fn seconds_since_1970() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

impl Record {
    /// When the lock was granted, in seconds since 1970. A record of another implementation says so
    /// only by its timestamp.
    pub(crate) fn granted_at(&self) -> Option<u64> {
        self.since.or(self.timestamp)
    }

    /// How long ago the lock was granted, in seconds; `None` if a wrong clock says when.
    pub(super) fn age(&self) -> Option<u64> {
        let since = self.granted_at()?;
        let now = seconds_since_1970();
        let is_possible = since <= now.saturating_add(moment::TOLERANCE.as_secs());
        is_possible.then(|| now.saturating_sub(since))
    }
}

impl LockInfo {
    /// Names this process and the current time, without a tag.
    pub fn new() -> LockInfo {
        LockInfo {
            pid: std::process::id(),
            timestamp: seconds_since_1970(),
            tag: None,
        }
    }

    /// Names this process and the current time, with a tag. The lock file contains at most the
    /// first 10,000 characters of the tag, with spaces in place of control characters.
    pub fn with_tag(tag: impl Into<String>) -> LockInfo {
        LockInfo {
            tag: Some(tag.into()),
            ..LockInfo::new()
        }
    }

    /// Whether the lock is older than `timeout`. The holder may still be alive.
    pub fn is_stale(&self, timeout: Duration) -> bool {
        let age = seconds_since_1970().saturating_sub(self.timestamp);
        Duration::from_secs(age) > timeout
    }
}

impl Default for LockInfo {
    fn default() -> LockInfo {
        LockInfo::new()
    }
}

/// Returns the record of a grant that is made now to the process in `info`, which is on this host.
/// If a guard holds the lock, the record also says whether the guard has the file locked.
pub(super) fn stamped(
    host: HostId,
    info: &LockInfo,
    token: Option<&str>,
    holder: HolderKind,
    lock: HeldLock,
) -> Record {
    let now = seconds_since_1970();
    let unknown = || (!has_no_pid_namespaces()).then(|| UNKNOWN_PID_NAMESPACE.to_owned());
    let is_live = holder == HolderKind::Guard && lock.has_flock;
    let file_system = lock.file_system.filter(|_| is_live);
    Record {
        pid: Some(info.pid),
        timestamp: Some(now),
        tag: info.tag.clone(),
        since: Some(now),
        host: host.host,
        boot: host.boot,
        pid_namespace: host.pid_namespace.or_else(unknown),
        start: process::comparable_start(info.pid),
        token: token.map(str::to_owned),
        slot_count: None,
        file_system: file_system.map(|file_system| file_system.to_string()),
        is_live,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::directory::FileId;

    #[test]
    fn the_uptime_is_the_time_since_boot() {
        let scratch = tempfile::tempdir().expect("a directory");
        let host = LocalHost {
            directory: &Directory::open(scratch.path()).expect("it is there"),
            id: HostId::default(),
            last_seen: &LastSeen::default(),
        };
        let since_boot = || process::time_since_boot().expect("a clock").as_secs();
        let before = since_boot();
        match host.uptime() {
            Some(uptime) => assert!((before..=since_boot()).contains(&uptime), "{uptime}"),
            None => assert_eq!(process::booted_at(), None, "the boot is known"),
        }
    }

    #[test]
    fn a_file_is_as_old_as_this_process_has_seen_it_unchanged() {
        let seconds = Duration::from_secs;
        let content = |text: &str| {
            let bytes = text.as_bytes().to_vec();
            Content::new(bytes, 5, FileId::of_model(0, 1), None)
        };
        let seen = LastSeen::default();
        let ages = [("", 10), ("", 70), ("pid=1", 80), ("pid=1", 95), ("", 100)];
        let ages = ages.map(|(text, now)| seen.unchanged_for(&content(text), seconds(now)));
        assert_eq!(ages, [0, 60, 0, 15, 0].map(seconds));
    }

    #[test]
    fn age_is_counted_from_the_timestamp_and_the_future_is_young() {
        let now = seconds_since_1970();
        let info = |timestamp| LockInfo {
            pid: 1,
            timestamp,
            tag: None,
        };
        assert!(info(now - 10).is_stale(Duration::from_secs(5)));
        assert!(!info(now - 10).is_stale(Duration::from_secs(3600)));
        assert!(!info(now + 1000).is_stale(Duration::ZERO));
        assert!(!info(0).is_stale(Duration::MAX));
        assert!(!info(u64::MAX).is_stale(Duration::from_secs(1)));
        assert!(info(0).is_stale(Duration::ZERO));
    }
}
