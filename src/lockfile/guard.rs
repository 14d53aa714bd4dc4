//! Holding a lock: the heartbeat, the watch over its name, and giving it back.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use crate::directory::Directory;

use super::error::{SemaphoreError, SemaphoreResult};
use super::files::{LockFiles, Making};
use super::record::{seconds_since_1970, TIMESTAMP};
use super::takeover;
use super::watch::{Flag, Watch, Woken};
use super::Semaphore;

/// Bounds of the time from one heartbeat to the next, which else is a third of the stale timeout.
const SHORTEST_BEAT: Duration = Duration::from_secs(1);
const LONGEST_BEAT: Duration = Duration::from_secs(20 * 60);

/// The stack of the thread that watches, in bytes: the caller's callback runs on it, too.
const STACK_LEN: usize = 512 * 1024;

/// The digits of a timestamp that a heartbeat can replace.
const TIMESTAMP_LEN: usize = 10;

/// What is called, once, when a lock is found to be lost.
pub(super) type OnLost = Arc<dyn Fn() + Send + Sync>;

/// What a guard does while it holds.
#[derive(Clone, Default)]
pub(super) struct Care {
    /// The time from one heartbeat to the next, if there are to be any.
    pub(super) beat: Option<Duration>,
    pub(super) on_lost: Option<OnLost>,
}

/// A lock that is held until this is dropped.
///
/// In a process that was forked from the one that took the lock, dropping it closes the file and nothing else.
#[must_use = "the lock is given back when the guard is dropped"]
pub struct SemaphoreGuard<'a> {
    pub(super) semaphore: &'a Semaphore,
    grip: Arc<Grip>,
    keeper: Option<Keeper>,
    is_released: bool,
}

/// The open file that is the lock.
struct Grip {
    directory: Directory,
    name: OsString,
    making: Making,
    file: File,
    creator: u32,
    is_lost: AtomicBool,
}

/// The thread that watches over the lock.
struct Keeper {
    stop: Arc<Flag>,
    thread: JoinHandle<()>,
}

impl<'a> SemaphoreGuard<'a> {
    pub(super) fn new(
        semaphore: &'a Semaphore,
        directory: Directory,
        file: File,
        care: Care,
    ) -> io::Result<SemaphoreGuard<'a>> {
        let grip = Arc::new(Grip {
            directory,
            name: semaphore.place.name.clone(),
            making: semaphore.making(),
            file,
            creator: process::id(),
            is_lost: AtomicBool::new(false),
        });
        let mut guard = SemaphoreGuard {
            semaphore,
            grip,
            keeper: None,
            is_released: false,
        };
        if care.beat.is_some() || care.on_lost.is_some() {
            // Should that fail, the guard gives the lock back.
            guard.keeper = Some(Keeper::start(Arc::clone(&guard.grip), care)?);
        }
        Ok(guard)
    }

    /// Whether the lock is still ours. False for good once it was found to be taken away.
    pub fn is_held(&self) -> bool {
        !self.grip.is_lost.load(Ordering::SeqCst) && self.grip.is_still_ours()
    }

    /// Gives the lock back, as dropping the guard does, and says how that went.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Lost`] if it was taken away; then whoever has it now keeps it. Or what the
    /// system says.
    pub fn release(mut self) -> SemaphoreResult<()> {
        self.give_back()
    }

    fn give_back(&mut self) -> SemaphoreResult<()> {
        if self.is_released || self.grip.creator != process::id() {
            return Ok(());
        }
        self.is_released = true;
        if let Some(keeper) = self.keeper.take() {
            keeper.stop.set();
            // In its own callback it cannot wait for itself.
            if keeper.thread.thread().id() != thread::current().id() {
                let _ = keeper.thread.join();
            }
        }
        if takeover::release(&self.grip.files(), &self.grip.file)? {
            Ok(())
        } else {
            Err(SemaphoreError::Lost)
        }
    }
}

impl Drop for SemaphoreGuard<'_> {
    fn drop(&mut self) {
        // There is nobody to tell; `release` tells.
        let _ = self.give_back();
    }
}

impl AsFd for SemaphoreGuard<'_> {
    /// The lock file. Whoever inherits it holds the lock, too, until it is released.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.grip.file.as_fd()
    }
}

impl fmt::Debug for SemaphoreGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SemaphoreGuard")
            .field("semaphore", &self.semaphore)
            .finish_non_exhaustive()
    }
}

impl Grip {
    fn files(&self) -> LockFiles<'_> {
        LockFiles::new(&self.directory, &self.name, self.making)
    }

    /// If that cannot be told, it is not.
    fn is_still_ours(&self) -> bool {
        takeover::is_still_ours(&self.files(), &self.file).unwrap_or(false)
    }

    /// Writes the present time into the file that we have open, whatever its name is by now.
    fn beat(&self) -> io::Result<()> {
        let now = format!("{:010}", seconds_since_1970(SystemTime::now()));
        let mut start = [0; 64];
        let read = self.file.read_at(&mut start, 0)?;
        let at = start[..read]
            .windows(TIMESTAMP.len())
            .position(|window| window == TIMESTAMP.as_bytes());
        let at = at.map(|at| at + TIMESTAMP.len());
        let fits = at.is_some_and(|at| {
            start[at..read].iter().position(|byte| *byte == b'\n') == Some(TIMESTAMP_LEN)
        });
        match at {
            Some(at) if fits && now.len() == TIMESTAMP_LEN => {
                self.file.write_all_at(now.as_bytes(), at as u64)
            }
            _ => Ok(()),
        }
    }
}

impl Keeper {
    fn start(grip: Arc<Grip>, care: Care) -> io::Result<Keeper> {
        let stop = Arc::new(Flag::new()?);
        let stopped = Arc::clone(&stop);
        let watch = Watch::on(&grip.directory);
        let thread = thread::Builder::new()
            .name("lock-keeper".into())
            .stack_size(STACK_LEN)
            .spawn(move || keep(&grip, &care, &watch, &stopped))?;
        Ok(Keeper { stop, thread })
    }
}

fn keep(grip: &Grip, care: &Care, watch: &Watch, stop: &Flag) {
    let beat = care.beat.unwrap_or(LONGEST_BEAT);
    let mut next_beat = Instant::now() + beat;
    loop {
        // First thing, too: it may have been lost before the watch began.
        if !grip.is_still_ours() {
            grip.is_lost.store(true, Ordering::SeqCst);
            if let Some(on_lost) = &care.on_lost {
                on_lost();
            }
            return;
        }
        let concerns = |name: &[u8]| name == grip.name.as_bytes();
        match watch.wait(concerns, &[], Some(stop), next_beat) {
            Ok(Woken::Look) => {}
            Ok(Woken::Cancelled) => return,
            // Then we look at every beat.
            Err(_) => thread::sleep(SHORTEST_BEAT),
        }
        if Instant::now() >= next_beat {
            if care.beat.is_some() {
                // On a full or failing disk the lock is as old as it looks; its name tells whether it is lost.
                let _ = grip.beat();
            }
            next_beat = Instant::now() + beat;
        }
    }
}

/// How often a lock with this timeout is to be refreshed.
pub(super) fn beat_for(stale_timeout: Option<Duration>) -> Duration {
    stale_timeout.map_or(LONGEST_BEAT, |timeout| {
        (timeout / 3).clamp(SHORTEST_BEAT, LONGEST_BEAT)
    })
}
