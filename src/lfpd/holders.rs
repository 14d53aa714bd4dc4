//! The processes that hold locks. When a process ends, its locks are removed.

use std::collections::hash_map::{Entry, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use log::{debug, warn};
use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::Timespec;
use rustix::io::Errno;

use crate::lfpd::uucp::files::DeviceLock;
use crate::os::directory::FileId;
use crate::os::event::wait_until_readable;
use crate::os::process;
use crate::os::text::reason;
use crate::shared::net::permits::share_of;

/// The maximum numbers of watched processes and of watched locks. Any further lock stays when its
/// holder ends. The lock is then stale, and the next process can take it.
pub const MAX_HOLDERS: usize = 1024;
const MAX_LOCKS: usize = 4096;

/// The interval between two checks if the kernel cannot report that a process has ended, and
/// between two attempts to remove a lock.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of events that one system call fetches.
const BATCH_LEN: usize = 32;

/// Watches for the end of processes. One thread watches all of them.
#[derive(Debug)]
pub struct Holders {
    /// The kernel reports through this descriptor that a process has ended. `None` before Linux
    /// 5.3, which cannot do that: the thread then checks all processes at intervals.
    epoll: Option<OwnedFd>,
    max_holders: usize,
    holders: Mutex<HashMap<u32, WatchedProcess>>,
}

#[derive(Debug)]
struct WatchedProcess {
    user: Option<u32>,
    end: ProcessEnd,
    locks: Vec<DeviceLock>,
}

/// How to notice the end of a process. This value is made before the lock, so that the server
/// notices the end even if the process ends before it has the lock.
#[derive(Debug)]
pub enum ProcessEnd {
    /// Readable once the process has ended.
    Descriptor(OwnedFd),
    /// The start time of the process. The process has ended if its number is free, or belongs to a
    /// process with another start time.
    Start(Option<u64>),
}

impl Holders {
    /// Makes an empty set that can watch up to `max_holders` processes.
    pub fn new(max_holders: usize) -> io::Result<Holders> {
        let own_end = process::pidfd(std::process::id());
        let can_tell = !own_end.is_err_and(|error| error.kind() == io::ErrorKind::Unsupported);
        let epoll = can_tell.then(|| epoll::create(CreateFlags::CLOEXEC));
        Ok(Holders {
            epoll: epoll.transpose()?,
            max_holders,
            holders: Mutex::default(),
        })
    }

    /// Returns how to notice the end of the process `pid`; `None` if the end cannot be noticed.
    pub fn end_of(&self, pid: u32) -> Option<ProcessEnd> {
        match self.epoll {
            Some(_) => process::pidfd(pid).ok().map(ProcessEnd::Descriptor),
            None => Some(ProcessEnd::Start(process::start_ticks(pid))),
        }
    }

    /// Watches `lock` for the end of its holder, the process `pid`. If the end of an earlier
    /// process with the same number has not been noticed yet, returns the locks of that process,
    /// which the caller must remove. Does not watch the lock if that would exceed a maximum, or the
    /// share of `user`, who owns the process.
    #[must_use]
    pub fn add(
        &self,
        user: Option<u32>,
        pid: u32,
        end: ProcessEnd,
        lock: DeviceLock,
    ) -> Vec<DeviceLock> {
        let mut holders = self.holders.lock();
        if self.is_full(&holders, user, pid) {
            debug!("unwatched pid={pid} reason=too-many");
            return Vec::new();
        }
        let left_over = take_if_over(&mut holders, pid);
        if let Some(holder) = holders.get_mut(&pid) {
            holder.locks.push(lock);
            return left_over;
        }
        if let (Some(epoll), ProcessEnd::Descriptor(descriptor)) = (&self.epoll, &end) {
            let data = EventData::new_u64(u64::from(pid));
            if let Err(error) = epoll::add(epoll, descriptor, data, EventFlags::IN) {
                let error = reason(&error.into());
                debug!("unwatched pid={pid} reason=no-watch error=\"{error}\"");
                return left_over;
            }
        }
        let locks = vec![lock];
        holders.insert(pid, WatchedProcess { user, end, locks });
        left_over
    }

    fn is_full(&self, holders: &HashMap<u32, WatchedProcess>, user: Option<u32>, pid: u32) -> bool {
        let is_new = !holders.contains_key(&pid);
        let locks = |holder: &WatchedProcess| holder.locks.len();
        let own = || holders.values().filter(|holder| holder.user == user);
        holders.values().map(locks).sum::<usize>() >= MAX_LOCKS
            || own().map(locks).sum::<usize>() >= share_of(MAX_LOCKS)
            || (is_new && holders.len() >= self.max_holders)
            || (is_new && own().count() >= share_of(self.max_holders))
    }

    /// Stops watching locks that have been released.
    pub fn forget(&self, ids: &[FileId]) {
        self.holders.lock().retain(|_, holder| {
            holder.locks.retain_mut(|lock| lock.forget(ids));
            !holder.locks.is_empty()
        });
    }

    /// Calls `remove` with each lock whose holder has ended. If `remove` returns false, calls it
    /// again after a second. Does not return.
    pub fn run(&self, remove: impl Fn(&DeviceLock) -> bool) -> ! {
        let mut locks = Vec::new();
        loop {
            let patience = (!locks.is_empty()).then_some(POLL_INTERVAL);
            for pid in self.wait(patience) {
                locks.extend(take_if_over(&mut self.holders.lock(), pid));
            }
            // Whatever prevents one removal would prevent the others, too.
            let done = locks.iter().take_while(|lock| remove(lock)).count();
            locks.drain(..done);
        }
    }

    /// Blocks until a process may have ended, but for no longer than `patience`. Returns the
    /// processes to check.
    fn wait(&self, patience: Option<Duration>) -> Vec<u32> {
        let Some(epoll) = &self.epoll else {
            thread::sleep(POLL_INTERVAL);
            return self.holders.lock().keys().copied().collect();
        };
        let mut events: Vec<Event> = Vec::with_capacity(BATCH_LEN);
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        match epoll::wait(epoll, spare_capacity(&mut events), patience.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                warn!("cannot-watch-holders error=\"{}\"", reason(&error.into()));
                thread::sleep(POLL_INTERVAL);
            }
        }
        let pid = |Event { data, .. }| u32::try_from(data.u64()).unwrap_or_default();
        events.into_iter().map(pid).collect()
    }
}

/// If this process has ended, forgets it and returns its locks.
fn take_if_over(holders: &mut HashMap<u32, WatchedProcess>, pid: u32) -> Vec<DeviceLock> {
    match holders.entry(pid) {
        Entry::Occupied(holder) if is_over(pid, &holder.get().end) => holder.remove().locks,
        _ => Vec::new(),
    }
}

fn is_over(pid: u32, end: &ProcessEnd) -> bool {
    match end {
        ProcessEnd::Descriptor(descriptor) => wait_until_readable(descriptor, Instant::now()),
        ProcessEnd::Start(start) => !process::exists(pid) || process::start_ticks(pid) != *start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lfpd::uucp::device::Device;
    use crate::lfpd::uucp::files::{NewHolder, SerialLockFiles};
    use crate::lfpd::uucp::mark::LockedFor;
    use crate::lfpd::uucp::names::DevicePath;
    use std::path::Path;
    use std::process::{Child, Command};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{mpsc, Arc};

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().expect("sleep")
    }

    fn lock(files: &SerialLockFiles, name: &str, pid: u32) -> DeviceLock {
        let path = DevicePath::below(name.as_bytes()).expect("a device");
        let device = Device::look_up(&path, Path::new("/dev")).expect("a device");
        let holder = NewHolder {
            pid,
            locked_for: LockedFor::AnyProcess,
            seen_at: std::time::SystemTime::now(),
            belongs_to_peer: false,
        };
        let locked = files.lock(&device, &holder);
        locked.expect("usable").expect("a free device")
    }

    fn check(holders: Holders) {
        const LIMIT: Duration = Duration::from_secs(10);
        let directory = tempfile::tempdir().expect("a directory");
        let files = SerialLockFiles::new(directory.path().to_owned(), Vec::new());
        let holders = Arc::new(holders);
        let (mut first, mut second) = (sleeper(), sleeper());
        let add = |name: &str, pid: u32| {
            let end = holders.end_of(pid).expect("it can be told");
            let lock = lock(&files, name, pid);
            assert!(holders.add(None, pid, end, lock.clone()).is_empty());
            lock
        };
        let kept = add("lfpd-a", first.id());
        let given_back = add("lfpd-b", first.id());
        let other = add("lfpd-c", second.id());
        holders.forget(&[given_back.names[0].1]);
        let (sender, ended) = mpsc::channel();
        let watch = Arc::clone(&holders);
        let is_first = AtomicBool::new(true);
        let remove = move |lock: &DeviceLock| {
            let _ = sender.send(lock.clone());
            // The first time it cannot be done.
            !is_first.swap(false, Ordering::Relaxed)
        };
        thread::spawn(move || watch.run(remove));
        for (child, expected) in [(&mut first, &[&kept, &kept][..]), (&mut second, &[&other])] {
            child.kill().expect("killed");
            child.wait().expect("its end");
            for expected in expected {
                assert_eq!(&ended.recv_timeout(LIMIT).expect("noticed"), *expected);
            }
        }
        assert!(holders.holders.lock().is_empty());
    }

    #[test]
    fn only_the_locks_of_a_process_that_ends_are_handed_over() {
        check(Holders::new(MAX_HOLDERS).expect("a watch"));
    }

    #[test]
    fn without_pidfds_an_end_is_noticed_by_polling() {
        check(Holders {
            epoll: None,
            max_holders: MAX_HOLDERS,
            holders: Mutex::default(),
        });
    }

    /// Has each of five users ask for as many watches, in turn; returns the holders and the locks
    /// that are watched for each.
    fn watched(tries: u32, pid_of: impl Fn(u32, u32) -> u32) -> Vec<(usize, usize)> {
        let directory = tempfile::tempdir().expect("a directory");
        let files = SerialLockFiles::new(directory.path().to_owned(), Vec::new());
        let some_lock = lock(&files, "lfpd-a", std::process::id());
        let holders = Holders {
            epoll: None,
            max_holders: MAX_HOLDERS,
            holders: Mutex::default(),
        };
        for user in 0..5 {
            for number in 0..tries {
                let (pid, lock) = (pid_of(user, number), some_lock.clone());
                let end = ProcessEnd::Start(process::start_ticks(pid));
                assert!(holders.add(Some(user), pid, end, lock).is_empty());
            }
        }
        let holders = holders.holders.into_inner();
        let of_user = |user| {
            let holders = holders.values().filter(|holder| holder.user == Some(user));
            let lock_counts: Vec<usize> = holders.map(|holder| holder.locks.len()).collect();
            (lock_counts.len(), lock_counts.iter().sum())
        };
        (0..5).map(of_user).collect()
    }

    #[test]
    fn at_most_1024_holders_are_watched_and_256_of_one_user() {
        let most = (256, 256);
        let none = (0, 0);
        // Numbers that no process has.
        let pid_of = |user, number| i32::MAX as u32 - 1000 * user - number;
        assert_eq!(watched(257, pid_of), [most, most, most, most, none]);
    }

    #[test]
    fn at_most_4096_locks_are_watched_and_1024_of_one_user() {
        let mut sleepers: Vec<Child> = (0..5).map(|_| sleeper()).collect();
        let most = (1, 1024);
        let none = (0, 0);
        let pid_of = |user, _| sleepers[user as usize].id();
        let watched = watched(1025, pid_of);
        for child in &mut sleepers {
            child.kill().expect("killed");
            child.wait().expect("its end");
        }
        assert_eq!(watched, [most, most, most, most, none]);
    }

    #[test]
    fn the_end_of_a_process_before_its_lock_is_watched_is_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        let files = SerialLockFiles::new(directory.path().to_owned(), Vec::new());
        let holders = Holders::new(MAX_HOLDERS).expect("a watch");
        let mut child = sleeper();
        let pid = child.id();
        let end = holders.end_of(pid).expect("it can be told");
        child.kill().expect("killed");
        child.wait().expect("its end");
        let lock = lock(&files, "lfpd-a", pid);
        assert!(holders.add(None, pid, end, lock).is_empty());
        assert_eq!(holders.wait(None), [pid]);
        assert_eq!(take_if_over(&mut holders.holders.lock(), pid).len(), 1);
    }
}
