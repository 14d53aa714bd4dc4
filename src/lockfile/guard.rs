//! Holding a lock: the heartbeat, the watch over the file's name, and the release.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::os::directory::Directory;
use crate::os::event::Event;

use super::error::{SemaphoreError, SemaphoreResult};
use super::files::{read, LockFileOptions, LockFiles};
use super::host::seconds_since_1970;
use super::record::{Record, TIMESTAMP};
use super::staleness::beat_for;
use super::takeover;
use super::watch::{Watch, STACK_LEN};
use super::Semaphore;

/// The time between two checks of the lock's name. The checks are needed because inotify may be
/// missing, and does not report changes by other hosts.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// How long a lock must be held before the watch begins. Ending a watch delays the exit of the
/// process by 5 to 20 ms, so a lock that is held only briefly is not watched.
const WATCH_DELAY: Duration = Duration::from_millis(50);

/// The number of digits in a timestamp that a heartbeat can replace.
const TIMESTAMP_LEN: usize = 10;

/// The callback that is called once if the lock is lost.
#[derive(Clone)]
pub(super) struct LostCallback(pub(super) Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for LostCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LostCallback")
    }
}

/// A held lock. Dropping the guard releases it.
///
/// In a forked child, dropping the guard closes the file and nothing else.
#[derive(Debug)]
#[must_use = "the lock is given back when the guard is dropped"]
pub struct SemaphoreGuard<'a> {
    semaphore: PhantomData<&'a Semaphore>,
    held: Arc<HeldFile>,
    /// Setting this event ends the thread that watches the lock.
    watch_stop: Option<Event>,
    is_released: bool,
}

/// The open file that is the lock.
#[derive(Debug)]
struct HeldFile {
    directory: Directory,
    name: OsString,
    options: LockFileOptions,
    file: File,
    /// The record at the time of the grant.
    record: Record,
    creator: u32,
    is_lost: AtomicBool,
    /// The time between two heartbeats, if there are any.
    heartbeat: Option<Duration>,
}

impl<'a> SemaphoreGuard<'a> {
    /// The guard of a lock that was just granted.
    pub(super) fn new(
        semaphore: &'a Semaphore,
        directory: Directory,
        file: File,
    ) -> io::Result<SemaphoreGuard<'a>> {
        let options = &semaphore.options;
        let held = Arc::new(HeldFile {
            directory,
            name: semaphore.lock_path.name.clone(),
            options: options.files,
            record: *read(&file)?.record,
            file,
            creator: process::id(),
            is_lost: AtomicBool::new(false),
            heartbeat: options
                .has_heartbeat
                .then(|| beat_for(semaphore.config.stale_timeout)),
        });
        let mut guard = SemaphoreGuard {
            semaphore: PhantomData,
            held,
            watch_stop: None,
            is_released: false,
        };
        if options.has_heartbeat || options.on_lost.is_some() {
            // If the watch cannot be started, dropping the guard releases the lock.
            guard.watch_stop = Some(start_watch(&guard.held, options.on_lost.clone())?);
        }
        Ok(guard)
    }

    /// Whether this guard still holds the lock. Once the result is false, it stays false.
    pub fn is_held(&self) -> bool {
        !self.held.is_lost.load(Ordering::SeqCst) && self.held.still_has_name().unwrap_or(false)
    }

    /// Releases the lock, as dropping the guard does, and reports errors.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Lost`] if another process has taken the lock away, in which case the
    /// release changes nothing; or a system error.
    pub fn release(mut self) -> SemaphoreResult<()> {
        self.give_back()
    }

    /// Makes the guard independent of the lifetime of its [`Semaphore`], so that it can move into a
    /// thread or a struct. The lock stays held. Does not block.
    ///
    /// ```
    /// use latchd::lockfile::{Semaphore, SemaphoreConfig};
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("job.lock");
    ///
    /// let semaphore = Semaphore::new(&path, SemaphoreConfig::default())?;
    /// let guard = semaphore.try_acquire()?.into_owned();
    /// drop(semaphore);
    /// let working = std::thread::spawn(move || {
    ///     assert!(guard.is_held());
    ///     guard.release()
    /// });
    /// working.join().expect("the thread does not panic")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_owned(mut self) -> SemaphoreGuard<'static> {
        let owned = SemaphoreGuard {
            semaphore: PhantomData,
            held: Arc::clone(&self.held),
            watch_stop: self.watch_stop.take(),
            is_released: self.is_released,
        };
        // From here on, only the owned guard releases the lock.
        self.is_released = true;
        owned
    }

    fn give_back(&mut self) -> SemaphoreResult<()> {
        if self.is_released || self.held.creator != process::id() {
            return Ok(());
        }
        self.is_released = true;
        // Stop the watching thread before the name is removed: otherwise the thread would take the
        // removal for a loss. The thread is not joined, because it may be running the callback.
        if let Some(stop) = self.watch_stop.take() {
            stop.set();
        }
        if self.held.is_our_record()? && takeover::release(&self.held.files(), &self.held.file)? {
            Ok(())
        } else {
            Err(SemaphoreError::Lost)
        }
    }
}

impl Drop for SemaphoreGuard<'_> {
    fn drop(&mut self) {
        // A drop cannot report errors; `release` can.
        let _ = self.give_back();
    }
}

impl AsFd for SemaphoreGuard<'_> {
    /// The descriptor of the lock file. If a child process inherits it, the file stays locked even
    /// if this process is killed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.held.file.as_fd()
    }
}

impl HeldFile {
    fn files(&self) -> LockFiles<'_> {
        LockFiles::new(&self.directory, &self.name, self.options)
    }

    fn still_has_name(&self) -> io::Result<bool> {
        Ok(self.is_our_record()? && takeover::still_has_name(&self.files(), &self.file)?)
    }

    /// Whether the file names no holder other than this guard. A taker on another host may have
    /// rewritten the file: some file systems keep flock(2) local to each host, and some drop our
    /// flock after a disconnect.
    fn is_our_record(&self) -> io::Result<bool> {
        let now = *read(&self.file)?.record;
        let grant = |record: &Record| {
            let Record { host, boot, .. } = record.clone();
            (record.pid, record.since, record.start, host, boot)
        };
        Ok(now.info().is_none() || grant(&now) == grant(&self.record))
    }

    /// Writes the current time into the open file, even if the file has lost its name.
    fn beat(&self) -> io::Result<()> {
        let now = format!("{:010}", seconds_since_1970());
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

/// Starts the thread that watches the lock until the event is set.
fn start_watch(held: &Arc<HeldFile>, on_lost: Option<LostCallback>) -> io::Result<Event> {
    let stop = Event::new()?;
    let stopped = stop.clone();
    let held = Arc::downgrade(held);
    let mut watcher = thread::Builder::new().name("lock-watcher".into());
    // A callback may need the default stack size.
    if on_lost.is_none() {
        watcher = watcher.stack_size(STACK_LEN);
    }
    watcher.spawn(move || {
        let is_over = stopped.wait_until(Instant::now() + WATCH_DELAY);
        let held_now = held.upgrade().filter(|_| !is_over);
        if let Some(watch) = held_now.map(|held| Watch::on(&held.directory)) {
            watch_over(&held, on_lost, &watch, &stopped);
        }
    })?;
    Ok(stop)
}

/// Watches the lock until it is lost or released. Holds a strong reference to the file only during
/// a check, because a child that is forked while it is held inherits the reference but not this
/// thread: dropping the child's guard would not close the file.
fn watch_over(held: &Weak<HeldFile>, on_lost: Option<LostCallback>, watch: &Watch, stop: &Event) {
    let after = |beat| Instant::now() + beat;
    let heartbeat = held.upgrade().and_then(|held| held.heartbeat);
    let mut next_beat = heartbeat.map(after);
    while let Some(held) = held.upgrade() {
        let is_due = next_beat.is_some_and(|at| at <= Instant::now());
        if is_due {
            next_beat = heartbeat.map(after);
        }
        if is_due && held.is_our_record().unwrap_or(false) {
            // If the write fails, for instance on a full disk, the lock only looks older than it
            // is. The check of the name below decides whether the lock is lost.
            let _ = held.beat();
        }
        // The first check finds a loss between the grant and the start of the watch.
        if shows_loss(held.still_has_name()) {
            // The guard may have released the lock after the check.
            if stop.is_set() {
                return;
            }
            held.is_lost.store(true, Ordering::SeqCst);
            drop(held);
            if let Some(LostCallback(on_lost)) = on_lost {
                on_lost();
            }
            return;
        }
        let name = held.name.clone();
        drop(held);
        let look = Instant::now() + LOOK_INTERVAL;
        let next = next_beat.map_or(look, |beat| beat.min(look));
        match watch.wait(&|other| other == name.as_bytes(), &[], Some(stop), next) {
            Ok(()) => {}
            Err(SemaphoreError::Cancelled) => return,
            Err(_) => thread::sleep(LOOK_INTERVAL),
        }
    }
}

/// Whether the lock is lost, according to a check whether its file still has the name.
fn shows_loss(still_has_name: io::Result<bool>) -> bool {
    match still_has_name {
        Ok(is_ours) => !is_ours,
        // On NFS, this error means that another host has removed the file. Any other error may be
        // temporary.
        Err(error) => error.kind() == io::ErrorKind::StaleNetworkFileHandle,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::mpsc;

    use rustix::io::Errno;

    use super::*;
    use crate::lockfile::SemaphoreOptions;

    const LIMIT: Duration = Duration::from_secs(10);

    /// A free lock, its path and its directory.
    fn free_lock(options: SemaphoreOptions) -> (tempfile::TempDir, PathBuf, Semaphore) {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("a.lock");
        let lock = Semaphore::with_options(&path, Default::default(), options);
        (scratch, path, lock.expect("a lock path"))
    }

    fn plain_lock() -> (tempfile::TempDir, PathBuf, Semaphore) {
        free_lock(SemaphoreOptions::new())
    }

    #[test]
    fn of_all_errors_only_a_stale_handle_shows_a_loss() {
        for (looked, is_lost) in [
            (Ok(true), false),
            (Ok(false), true),
            (Err(Errno::STALE), true),
            (Err(Errno::IO), false),
            (Err(Errno::ACCESS), false),
        ] {
            let shown = shows_loss(looked.map_err(io::Error::from));
            assert_eq!(shown, is_lost, "{looked:?}");
        }
    }

    #[test]
    fn a_guard_in_a_forked_process_gives_nothing_back() {
        let (_scratch, path, semaphore) = plain_lock();
        for is_released in [true, false] {
            let mut copy = semaphore.try_acquire().expect("a free lock");
            // This is how the guard looks in a forked child.
            Arc::get_mut(&mut copy.held).expect("no thread").creator += 1;
            if is_released {
                copy.release().expect("nothing to do");
            } else {
                drop(copy);
            }
            assert!(path.exists());
            semaphore.force_release().expect("a release");
        }
    }

    #[test]
    fn a_watched_guard_in_a_forked_process_closes_the_file() {
        let options = SemaphoreOptions::new().heartbeat(true);
        let (_scratch, _, semaphore) = free_lock(options);
        let guard = semaphore.try_acquire().expect("a free lock");
        // Until the thread has looked.
        thread::sleep(4 * WATCH_DELAY);
        // A fork does not copy the thread, so the child never drops what the thread owns.
        let over = Instant::now() + LIMIT;
        while Arc::strong_count(&guard.held) > 1 {
            assert!(Instant::now() < over, "the thread has the file for itself");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_loss_before_the_watch_began_is_noticed_at_once() {
        let (_scratch, path, semaphore) = plain_lock();
        let guard = semaphore.try_acquire().expect("a free lock");
        fs::remove_file(&path).expect("the lock file");
        let (sender, receiver) = mpsc::channel();
        let on_lost = LostCallback(Arc::new(move || sender.send(()).expect("a listener")));
        start_watch(&guard.held, Some(on_lost)).expect("a thread");
        receiver.recv_timeout(LIMIT).expect("it is lost");
        assert!(guard.held.is_lost.load(Ordering::SeqCst));
    }

    #[test]
    fn a_loss_is_noticed_without_inotify_and_between_beats() {
        let (_scratch, path, semaphore) = plain_lock();
        let guard = semaphore.try_acquire().expect("a free lock");
        let (sender, receiver) = mpsc::channel();
        let on_lost = LostCallback(Arc::new(move || sender.send(()).expect("a listener")));
        let stop = Event::new().expect("a flag");
        let (held, watch) = (Arc::downgrade(&guard.held), Watch(None));
        thread::scope(|scope| {
            scope.spawn(|| watch_over(&held, Some(on_lost), &watch, &stop));
            thread::sleep(Duration::from_millis(100));
            let too_early = receiver.try_recv();
            fs::remove_file(&path).expect("the lock file");
            let in_time = receiver.recv_timeout(LIMIT);
            stop.set();
            assert!(too_early.is_err() && in_time.is_ok());
        });
    }

    #[test]
    fn a_release_does_not_wait_for_the_callback() {
        let (begin, begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let ended = std::sync::Mutex::new(ended);
        let options = SemaphoreOptions::new().on_lost(move || {
            begin.send(()).expect("a listener");
            let _ = ended.lock().expect("one caller").recv();
        });
        let (_scratch, path, semaphore) = free_lock(options);
        let guard = semaphore.try_acquire().expect("a free lock").into_owned();
        fs::remove_file(&path).expect("the lock file");
        begun.recv_timeout(LIMIT).expect("it is lost");
        let (report, reported) = mpsc::channel();
        thread::spawn(move || report.send(guard.release()));
        let released = reported.recv_timeout(LIMIT);
        drop(end);
        assert!(matches!(released, Ok(Err(SemaphoreError::Lost))));
    }

    #[test]
    fn a_release_is_no_loss_for_the_callback() {
        let (sender, receiver) = mpsc::channel();
        let options = SemaphoreOptions::new().on_lost(move || {
            let _ = sender.send(());
        });
        let (_scratch, _, semaphore) = free_lock(options);
        for pause in [Duration::ZERO, WATCH_DELAY, 2 * WATCH_DELAY] {
            let guard = semaphore.try_acquire().expect("a free lock");
            thread::sleep(pause);
            guard.release().expect("it is held");
        }
        // No thread that watched is left.
        drop(semaphore);
        assert!(receiver
            .recv_timeout(LIMIT)
            .is_err_and(|error| error == mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn beats_come_three_to_a_timeout_and_within_bounds() {
        let seconds = Duration::from_secs;
        assert_eq!(beat_for(Some(seconds(3600))), seconds(1200));
        assert_eq!(beat_for(Some(seconds(30))), seconds(10));
        assert_eq!(beat_for(Some(Duration::ZERO)), Duration::from_secs(1));
        assert_eq!(beat_for(Some(Duration::MAX)), Duration::from_secs(1200));
        assert_eq!(beat_for(None), Duration::from_secs(1200));
    }

    #[test]
    fn a_guard_is_lost_once_its_file_names_another_holder() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("rewritten.lock");
        let options = SemaphoreOptions::new().heartbeat(true);
        let config = crate::lockfile::SemaphoreConfig {
            stale_timeout: Some(Duration::ZERO),
            ..Default::default()
        };
        let semaphore = Semaphore::with_options(&path, config, options).expect("a lock path");
        let guard = semaphore.try_acquire().expect("a free lock");
        assert!(guard.is_held());
        // As by a taker on another host: the inode stays the same.
        let text = "pid=1\ntimestamp=0000000005\nx-since=5\n";
        fs::write(&path, text).expect("another record");
        let over = Instant::now() + LIMIT;
        while !guard.held.is_lost.load(Ordering::SeqCst) {
            assert!(Instant::now() < over, "the watcher does not notice");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!guard.is_held());
        assert!(matches!(guard.release(), Err(SemaphoreError::Lost)));
        assert_eq!(fs::read_to_string(&path).expect("a record"), text);
    }

    #[test]
    fn a_guard_is_lost_to_another_grant_of_its_process() {
        let (_scratch, path, semaphore) = plain_lock();
        let guard = semaphore.try_acquire().expect("a free lock");
        let text = fs::read_to_string(&path).expect("a record");
        let text = text.replacen("x-since=", "x-since=1", 1);
        fs::write(&path, &text).expect("another record");
        assert!(!guard.is_held());
        assert!(matches!(guard.release(), Err(SemaphoreError::Lost)));
        assert_eq!(fs::read_to_string(&path).expect("a record"), text);
    }

    #[test]
    fn a_beat_changes_ten_digits_of_the_open_file_and_nothing_else() {
        let (_scratch, path, semaphore) = plain_lock();
        let guard = semaphore.try_acquire().expect("a free lock");
        let text = fs::read_to_string(&path).expect("a record");
        let (head, rest) = text.split_once(TIMESTAMP).expect("a timestamp");
        let aged = format!("{head}{TIMESTAMP}0000000007{}", &rest[TIMESTAMP_LEN..]);
        guard
            .held
            .file
            .write_all_at(aged.as_bytes(), 0)
            .expect("an old record");

        // The beat leaves the file alone that now has the name.
        let elsewhere = path.with_extension("elsewhere");
        fs::rename(&path, &elsewhere).expect("another name");
        fs::write(&path, "pid=1\ntimestamp=0000000005\n").expect("a successor");
        guard.held.beat().expect("a beat");
        assert_eq!(
            fs::read_to_string(&path).expect("a record"),
            "pid=1\ntimestamp=0000000005\n"
        );
        let beaten = fs::read_to_string(&elsewhere).expect("a record");
        let (_, digits) = beaten.split_once(TIMESTAMP).expect("a timestamp");
        let now = seconds_since_1970();
        let then: u64 = digits[..TIMESTAMP_LEN].parse().expect("a timestamp");
        assert!(now - 5 <= then && then <= now);
        assert_eq!(digits[TIMESTAMP_LEN..], rest[TIMESTAMP_LEN..]);
        assert_eq!(beaten.len(), text.len());
    }

    #[test]
    fn a_beat_leaves_foreign_content_alone() {
        let (_scratch, path, semaphore) = plain_lock();
        let guard = semaphore.try_acquire().expect("a free lock");
        for text in [
            "",
            "pid=1\ntimestamp=5\n",
            "timestamp=",
            "timestamp=12345678901\n",
            "rubbish",
        ] {
            fs::write(&path, text).expect("the lock file");
            guard.held.beat().expect("a beat");
            assert_eq!(fs::read_to_string(&path).expect("the lock file"), text);
        }
    }
}
