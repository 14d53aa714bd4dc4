//! Waiting for something to happen to a name: by inotify where that sees anything, by looking again where
//! it does not.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::Instant;

use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::directory::Directory;

use super::process;

/// Enough to close a descriptor, in bytes.
const CLOSER_STACK_LEN: usize = 64 * 1024;

/// Why a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// Something has happened, or it is time to look.
    Look,
    /// The caller's descriptor says to give up.
    Cancelled,
}

/// Something that one thread says to another that waits for files.
#[derive(Debug)]
pub(crate) struct Flag(OwnedFd);

impl Flag {
    /// Not set yet.
    pub(crate) fn new() -> io::Result<Flag> {
        Ok(Flag(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Sets it, for good.
    pub(crate) fn set(&self) {
        // Fails only where the counter is full, and then it is set.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// A process that is to hold a lock, and may end before it does.
#[derive(Debug)]
pub(super) struct Lifetime {
    pid: u32,
    /// Readable once it has ended; `None` on a kernel that has no such descriptors.
    end: Option<OwnedFd>,
    /// What tells it from a later one with its number where there is no descriptor.
    start_ticks: Option<u64>,
}

impl Lifetime {
    /// Of the process with this number as of now; `None` if it has ended.
    pub(super) fn of(pid: u32) -> Option<Lifetime> {
        let lifetime = match process::end_of(pid) {
            Ok(end) => Lifetime {
                pid,
                start_ticks: None,
                end: Some(end),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(_) => Lifetime {
                pid,
                start_ticks: living(pid)?.start_ticks,
                end: None,
            },
        };
        (!lifetime.is_over()).then_some(lifetime)
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process has ended, be it that nobody has asked how.
    pub(super) fn is_over(&self) -> bool {
        match &self.end {
            Some(end) => {
                let now = Timespec::default();
                poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&now)) == Ok(1)
            }
            None => living(self.pid).is_none_or(|now| now.start_ticks != self.start_ticks),
        }
    }

    /// A descriptor that becomes readable when it ends, if there is one.
    pub(super) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.end.as_ref().map(AsFd::as_fd)
    }
}

/// The process with this number, unless it is a zombie.
fn living(pid: u32) -> Option<process::Process> {
    process::look_up(pid).filter(|process| !process.is_zombie)
}

/// Watches the names of one directory, from when it is made.
#[derive(Debug)]
pub(super) struct Watch {
    /// `None` where there is no inotify to be had.
    inotify: Option<OwnedFd>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The kernel takes its time over the end of a watch, 5 to 20 ms. Nobody shall wait for that who has just
        // got a lock, or is about to give one back. Without a thread, it is closed here after all.
        if let Some(inotify) = self.inotify.take() {
            let _ = thread::Builder::new()
                .name("watch-closer".into())
                .stack_size(CLOSER_STACK_LEN)
                .spawn(move || drop(inotify));
        }
    }
}

impl Watch {
    /// Begins to watch.
    pub(super) fn on(directory: &Directory) -> Watch {
        Watch {
            inotify: watch(directory).ok(),
        }
    }

    /// Sees nothing, as on a file system of another host.
    #[cfg(test)]
    pub(super) fn none() -> Watch {
        Watch { inotify: None }
    }

    /// Blocks until something happens to a name that `concerns` us, until one of the `ends` comes to pass,
    /// until `cancel` is set, or until an instant.
    ///
    /// # Errors
    ///
    /// If the system does not let us wait.
    pub(super) fn wait(
        &self,
        concerns: impl Fn(&[u8]) -> bool,
        ends: &[BorrowedFd<'_>],
        cancel: Option<&Flag>,
        until: Instant,
    ) -> io::Result<Woken> {
        loop {
            let timeout = until.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(timeout).ok();
            let own = self.inotify.iter().chain(cancel.map(|flag| &flag.0));
            let mut waited_for: Vec<PollFd<'_>> = own
                .map(AsFd::as_fd)
                .chain(ends.iter().copied())
                .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
                .collect();
            match poll(&mut waited_for, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let mut is_ready = waited_for.iter().map(|waited| !waited.revents().is_empty());
            let has_happened = self.inotify.is_some() && is_ready.next() == Some(true);
            if cancel.is_some() && is_ready.next() == Some(true) {
                return Ok(Woken::Cancelled);
            }
            let has_ended = is_ready.any(|is_ready| is_ready);
            if has_ended || (has_happened && self.concerns(&concerns)) || Instant::now() >= until {
                return Ok(Woken::Look);
            }
        }
    }

    /// Reads what has happened, and says whether any of it concerns us.
    fn concerns(&self, name_concerns: &impl Fn(&[u8]) -> bool) -> bool {
        let Some(inotify) = &self.inotify else {
            return true;
        };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(inotify, &mut buffer);
        let mut concerns = false;
        loop {
            match events.next() {
                Ok(event) => {
                    // Without a name it is about the directory, or about events that were lost.
                    concerns |= event
                        .file_name()
                        .is_none_or(|name| name_concerns(name.to_bytes()));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return concerns,
                // Then we look more often than we need to.
                Err(_) => return true,
            }
        }
    }
}

fn watch(directory: &Directory) -> io::Result<OwnedFd> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let by_descriptor = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
    let events = WatchFlags::DELETE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::CREATE
        | WatchFlags::DELETE_SELF
        | WatchFlags::ONLYDIR;
    inotify::add_watch(&inotify, &*by_descriptor, events)?;
    Ok(inotify)
}
