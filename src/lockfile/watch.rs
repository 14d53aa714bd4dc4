//! Waiting for changes of names in a directory: by inotify, and by looking again for changes that
//! inotify does not report.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::os::directory::Directory;
use crate::os::event::{wait_for, wait_until_readable, Event};
use crate::os::process;

use super::error::{SemaphoreError, SemaphoreResult};

/// The stack size, in bytes, of a thread that only watches. Unoptimised code needs a larger one.
pub(super) const STACK_LEN: usize = if cfg!(debug_assertions) {
    512 * 1024
} else {
    64 * 1024
};

/// The process on whose behalf a lock is requested. It may end before the grant.
#[derive(Debug)]
pub(super) struct HolderProcess {
    pub(super) pid: u32,
    /// Readable once the process has ended; `None` on a kernel without pidfds.
    pub(super) end: Option<OwnedFd>,
    /// The start time, if there is no pidfd. It distinguishes the process from a later one with the
    /// same number.
    start_ticks: Option<u64>,
}

impl HolderProcess {
    /// The process that has this number now; `None` if it has ended.
    pub(super) fn of(pid: u32) -> Option<HolderProcess> {
        let (end, start_ticks) = match process::pidfd(pid) {
            Ok(end) => (Some(end), None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(_) => (None, living(pid)?.start_ticks),
        };
        let process = HolderProcess {
            pid,
            end,
            start_ticks,
        };
        (!process.is_over()).then_some(process)
    }

    /// Whether the process has ended. A zombie counts as ended.
    pub(super) fn is_over(&self) -> bool {
        match &self.end {
            Some(end) => wait_until_readable(end, Instant::now()),
            None => living(self.pid).is_none_or(|now| now.start_ticks != self.start_ticks),
        }
    }
}

/// The process with this number, unless it is a zombie.
fn living(pid: u32) -> Option<process::Process> {
    process::look_up(pid).filter(|process| !process.is_zombie)
}

/// A watch on the names of one directory; `None` if inotify is missing.
#[derive(Debug)]
pub(super) struct Watch(pub(super) Option<OwnedFd>);

impl Drop for Watch {
    fn drop(&mut self) {
        // The kernel needs 5 to 20 ms to end a watch. A process that has just been granted a lock,
        // or is about to release one, must not wait for that, so a thread closes the descriptor. If
        // the thread cannot be started, the descriptor is closed here.
        if let Some(inotify) = self.0.take() {
            let _ = thread::Builder::new()
                .name("watch-closer".into())
                .stack_size(STACK_LEN)
                .spawn(move || drop(inotify));
        }
    }
}

impl Watch {
    /// Begins to watch the directory.
    pub(super) fn on(directory: &Directory) -> Watch {
        Watch(watch(directory.as_fd()).ok())
    }

    /// Blocks until a name that `concerns` accepts changes, until a descriptor in `ends` is
    /// readable, or until the instant `until`. Fails with [`SemaphoreError::Cancelled`] if `cancel`
    /// is set.
    pub(super) fn wait(
        &self,
        concerns: &dyn Fn(&[u8]) -> bool,
        ends: &[BorrowedFd<'_>],
        cancel: Option<&Event>,
        until: Instant,
    ) -> SemaphoreResult<()> {
        loop {
            let own = self.0.as_ref().map(AsFd::as_fd).into_iter();
            let own = own.chain(cancel.map(AsFd::as_fd));
            let mut waited_for: Vec<PollFd<'_>> = own
                .chain(ends.iter().copied())
                .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
                .collect();
            wait_for(&mut waited_for, Some(until))?;
            let mut is_ready = waited_for.iter().map(|waited| !waited.revents().is_empty());
            let has_happened = self.0.is_some() && is_ready.next() == Some(true);
            if cancel.is_some() && is_ready.next() == Some(true) {
                return Err(SemaphoreError::Cancelled);
            }
            let has_ended = is_ready.any(|is_ready| is_ready);
            if has_ended || (has_happened && self.concerns(concerns)) || Instant::now() >= until {
                return Ok(());
            }
        }
    }

    /// Reads all events that have arrived. Returns whether one of them concerns the caller.
    fn concerns(&self, name_concerns: &dyn Fn(&[u8]) -> bool) -> bool {
        let Some(inotify) = &self.0 else {
            return true;
        };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(inotify, &mut buffer);
        let mut concerns = false;
        loop {
            match events.next() {
                Ok(event) => {
                    // An event without a name is about the directory itself, or says that events
                    // were lost.
                    concerns |= event
                        .file_name()
                        .is_none_or(|name| name_concerns(name.to_bytes()));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return concerns,
                // After an error, the caller may look more often than necessary, which does no
                // harm.
                Err(_) => return true,
            }
        }
    }
}

fn watch(directory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let by_descriptor = format!("/proc/self/fd/{}", directory.as_raw_fd());
    let events = WatchFlags::DELETE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::CREATE
        | WatchFlags::DELETE_SELF
        | WatchFlags::ONLYDIR;
    inotify::add_watch(&inotify, &*by_descriptor, events)?;
    Ok(inotify)
}
