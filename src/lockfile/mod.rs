//! Lock files that are safe even when they are stale, without any server.
//!
//! A lock is a file: while it stands, the lock is held. It says who holds it, so that a lock whose
//! holder is gone can be taken over, and is never taken over by two. The format and the protocol,
//! which shell scripts and other programs can keep to, stand in sema-lockfile(5).
//!
//! ```
//! use latchd::lockfile::{Semaphore, SemaphoreError};
//!
//! # let directory = tempfile::tempdir().unwrap();
//! # let path = directory.path().join("backup.lock");
//! let semaphore = Semaphore::with_defaults(&path)?;
//! match semaphore.try_acquire() {
//!     Ok(_guard) => { /* the lock is ours until the guard is dropped */ }
//!     Err(SemaphoreError::AlreadyLocked { holder_pid, .. }) => println!("held by {holder_pid:?}"),
//!     Err(error) => return Err(error),
//! }
//! # Ok::<(), SemaphoreError>(())
//! ```

mod error;
mod files;
mod guard;
mod host;
mod path;
mod record;
mod staleness;
mod status;
mod takeover;
#[cfg(test)]
mod tests;
mod watch;

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::sys::directory::Directory;
use crate::sys::process;

pub use error::{SemaphoreError, SemaphoreResult};
pub use files::Settle;
pub use guard::SemaphoreGuard;
pub(crate) use path::check as check_path;
pub use record::LockInfo;
pub use staleness::{Alive, StaleRule};
pub(crate) use status::Unlockable;
pub use status::{Cleaned, Status};
pub use takeover::Obstacle;
pub(crate) use watch::Flag;

use files::{Lacks, LockFiles, Making};
use guard::{beat_for, Care, OnLost};
use host::{find_here, here, stamped, Surroundings};
use path::LockPath;
use record::{is_of_lock_file, token_as_read, Record};
use staleness::{judge, Content, Place};
use takeover::{Attempt, Claim, Locking, Removal, Verdict};
use watch::{Lifetime, Watch, Woken};

/// The permissions of a lock file, before the umask.
const DEFAULT_MODE: u32 = 0o644;

/// We look no more often than this, whatever the retry interval.
const SHORTEST_RETRY: Duration = Duration::from_millis(1);

/// Those who look at the same time look at slightly different times after that.
const JITTER_NANOSECONDS: u64 = 5_000_000;

/// Without anything to wait for, we look again after so long.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// When a lock counts as stale, and how long and how often it is asked for.
#[derive(Clone, Debug)]
pub struct SemaphoreConfig {
    /// A lock may be stale once it is older than this; `None` for never. One hour by default.
    pub stale_timeout: Option<Duration>,
    /// How often a waiter looks where the system does not tell it of changes. 100 ms by default.
    pub retry_interval: Duration,
    /// For how long [`Semaphore::acquire`] waits; `None`, the default, for ever.
    pub acquire_timeout: Option<Duration>,
}

impl Default for SemaphoreConfig {
    fn default() -> SemaphoreConfig {
        SemaphoreConfig {
            stale_timeout: Some(Duration::from_secs(3600)),
            retry_interval: Duration::from_millis(100),
            acquire_timeout: None,
        }
    }
}

/// What else can be chosen about a lock.
///
/// ```
/// use latchd::lockfile::{Semaphore, SemaphoreConfig, SemaphoreOptions};
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("job.lock");
/// let options = SemaphoreOptions::new()
///     .mode(0o600)
///     .heartbeat(true)
///     .on_lost(|| eprintln!("somebody has removed the lock file"));
/// let semaphore = Semaphore::with_options(&path, SemaphoreConfig::default(), options)?;
/// let guard = semaphore.acquire()?;
/// assert!(guard.is_held());
/// guard.release()?;
/// # Ok::<(), latchd::lockfile::SemaphoreError>(())
/// ```
#[derive(Clone)]
pub struct SemaphoreOptions {
    stale_rule: StaleRule,
    mode: u32,
    is_synced: bool,
    settle: Settle,
    has_heartbeat: bool,
    on_lost: Option<OnLost>,
    token: Option<String>,
    lacks: Lacks,
}

impl SemaphoreOptions {
    /// The defaults: stale by age and liveness, mode 0644, on the disk before it is seen, 20 ms to
    /// settle after a takeover, no heartbeat, no token.
    pub fn new() -> SemaphoreOptions {
        SemaphoreOptions {
            stale_rule: StaleRule::default(),
            mode: DEFAULT_MODE,
            is_synced: true,
            settle: Settle::default(),
            has_heartbeat: false,
            on_lost: None,
            token: None,
            lacks: Lacks::default(),
        }
    }

    /// When a lock that is older than the stale timeout is stale.
    #[must_use]
    pub fn stale_rule(mut self, rule: StaleRule) -> SemaphoreOptions {
        self.stale_rule = rule;
        self
    }

    /// The permissions of the lock file, before the umask.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> SemaphoreOptions {
        self.mode = mode & 0o7777;
        self
    }

    /// Whether the record is on the disk before the lock file can be seen.
    #[must_use]
    pub fn sync(mut self, is_synced: bool) -> SemaphoreOptions {
        self.is_synced = is_synced;
        self
    }

    /// Whether a grant waits for other implementations that may be about to remove the file.
    #[must_use]
    pub fn settle(mut self, settle: Settle) -> SemaphoreOptions {
        self.settle = settle;
        self
    }

    /// Whether a guard keeps the timestamp young, for those who know of nothing but age. It takes a
    /// thread for as long as the lock is held.
    #[must_use]
    pub fn heartbeat(mut self, is_wanted: bool) -> SemaphoreOptions {
        self.has_heartbeat = is_wanted;
        self
    }

    /// What is called, on another thread, when somebody has removed or replaced the lock file while
    /// it was held. It takes a thread for as long as the lock is held.
    #[must_use]
    pub fn on_lost(mut self, callback: impl Fn() + Send + Sync + 'static) -> SemaphoreOptions {
        self.on_lost = Some(Arc::new(callback));
        self
    }

    /// A word that is written into the lock file, and that [`Terms::token`] can ask for at the
    /// release. It is a guard against mistakes, and no secret.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> SemaphoreOptions {
        self.token = Some(token.into());
        self
    }
}

impl Default for SemaphoreOptions {
    fn default() -> SemaphoreOptions {
        SemaphoreOptions::new()
    }
}

impl fmt::Debug for SemaphoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SemaphoreOptions")
            .field("stale_rule", &self.stale_rule)
            .field("mode", &self.mode)
            .field("is_synced", &self.is_synced)
            .field("settle", &self.settle)
            .field("has_heartbeat", &self.has_heartbeat)
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}

/// A lock whose state is a file.
#[derive(Debug)]
pub struct Semaphore {
    path: PathBuf,
    place: LockPath,
    config: SemaphoreConfig,
    options: SemaphoreOptions,
}

/// For whom a lock is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// For a guard, which has the file open for as long as it holds the lock.
    Guarded,
    /// For a process that may be another: it is held until somebody releases it.
    Detached,
}

/// Why a lock was not had, and whose it is.
#[derive(Clone, Debug)]
pub struct Busy {
    /// Why it could not be taken.
    pub obstacle: Obstacle,
    /// What its file says.
    pub status: Status,
}

impl Busy {
    fn to_error(&self) -> SemaphoreError {
        match self.obstacle {
            Obstacle::NotAFile => SemaphoreError::AlreadyLocked {
                holder_pid: None,
                locked_since: None,
            },
            _ => SemaphoreError::AlreadyLocked {
                holder_pid: self.status.pid,
                locked_since: self.status.timestamp,
            },
        }
    }

    /// No wait will end: there can be no lock at the path.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.obstacle == Obstacle::NotAFile
    }

    /// What it means to a caller that has waited for the lock at `path`.
    fn after_wait(&self, path: &Path) -> SemaphoreError {
        match self.is_hopeless() {
            true => SemaphoreError::InvalidPath(format!("not a regular file: {}", path.display())),
            false => SemaphoreError::Timeout,
        }
    }
}

/// What a lock must be for a release to go through.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// It is removed whatever it says, and whoever holds it.
    pub force: bool,
    /// It was taken for this process.
    pub pid: Option<u32>,
    /// It was taken with this token.
    pub token: Option<String>,
    /// Who asks: a lock that was taken for this process is released although the process is alive.
    pub asking: u32,
}

impl Semaphore {
    /// The lock at `path`. Nothing is touched yet; a relative path is looked up now, so that it
    /// means the same file wherever the process goes.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::InvalidPath`] if no lock file can be there (sema-lockfile(5), PATHS).
    pub fn new(path: impl AsRef<Path>, config: SemaphoreConfig) -> SemaphoreResult<Semaphore> {
        Semaphore::with_options(path, config, SemaphoreOptions::new())
    }

    /// The lock at `path`, with a stale timeout of one hour.
    ///
    /// # Errors
    ///
    /// As for [`Semaphore::new`].
    pub fn with_defaults(path: impl AsRef<Path>) -> SemaphoreResult<Semaphore> {
        Semaphore::new(path, SemaphoreConfig::default())
    }

    /// The lock at `path`, with everything that can be chosen.
    ///
    /// # Errors
    ///
    /// As for [`Semaphore::new`].
    pub fn with_options(
        path: impl AsRef<Path>,
        config: SemaphoreConfig,
        options: SemaphoreOptions,
    ) -> SemaphoreResult<Semaphore> {
        let path = path.as_ref().to_owned();
        let place = path::resolve(&path)?;
        Ok(Semaphore {
            path,
            place,
            config,
            options,
        })
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether anything stands at the path, be it stale or no lock file at all. Does not wait.
    pub fn is_locked(&self) -> bool {
        let found = self
            .directory()
            .and_then(|directory| Ok(directory.identity(&self.place.name)?));
        matches!(found, Ok(Some(_)))
    }

    /// What the lock file says; `None` if there is none, or if it cannot be read. Does not wait.
    pub fn lock_info(&self) -> Option<LockInfo> {
        self.status().ok()?.info()
    }

    /// Takes the lock if it is free or stale. Waits for the disk at most, and 20 ms if it takes
    /// over a stale lock.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::AlreadyLocked`] if another process holds it,
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program, or what the system
    /// says.
    pub fn try_acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.try_acquire_with_info(LockInfo::new())
    }

    /// As [`Semaphore::try_acquire`], with a pid and a tag of one's own. The timestamp is that of
    /// the grant.
    ///
    /// # Errors
    ///
    /// As for [`Semaphore::try_acquire`].
    pub fn try_acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        match self.attempt(&info, Hold::Guarded)? {
            Ok((directory, file)) => self.guard(directory, file),
            Err(busy) => Err(busy.to_error()),
        }
    }

    /// Waits for the lock, for as long as the configuration says.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if it could not be had in time; at once
    /// [`SemaphoreError::InvalidPath`] if what is there is no regular file, and
    /// [`SemaphoreError::NotALockFile`] if the file belongs to another program; or what the system
    /// says.
    pub fn acquire(&self) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_with_info(LockInfo::new())
    }

    /// As [`Semaphore::acquire`], with a pid and a tag of one's own.
    ///
    /// # Errors
    ///
    /// As for [`Semaphore::acquire`].
    pub fn acquire_with_info(&self, info: LockInfo) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_in(self.config.acquire_timeout, &info)
    }

    /// Waits for the lock, but no longer than `timeout`.
    ///
    /// # Errors
    ///
    /// As for [`Semaphore::acquire`].
    pub fn acquire_timeout(&self, timeout: Duration) -> SemaphoreResult<SemaphoreGuard<'_>> {
        self.acquire_in(Some(timeout), &LockInfo::new())
    }

    fn acquire_in(
        &self,
        timeout: Option<Duration>,
        info: &LockInfo,
    ) -> SemaphoreResult<SemaphoreGuard<'_>> {
        let patience = Patience::new(timeout, None);
        match acquire_any(std::slice::from_ref(self), info, &patience)? {
            Ok((_, guard)) => Ok(guard),
            Err((_, busy)) => Err(busy.after_wait(&self.path)),
        }
    }

    /// Takes the lock for the process `info.pid`, if it is free or stale, and leaves it: it is held
    /// until [`Semaphore::release`], or until it is stale.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn try_acquire_detached(&self, info: &LockInfo) -> SemaphoreResult<Result<(), Busy>> {
        Ok(self.attempt(info, Hold::Detached)?.map(drop))
    }

    /// Removes the lock file if it stands there, whoever holds the lock.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotALockFile`] if it is none, or what the system says.
    pub fn force_release(&self) -> SemaphoreResult<()> {
        let terms = Terms {
            force: true,
            ..Terms::default()
        };
        match self.release(&terms) {
            Ok(Ok(())) | Err(SemaphoreError::NotLocked) => Ok(()),
            Ok(Err(busy)) => Err(busy.to_error()),
            Err(error) => Err(error),
        }
    }

    /// Releases the lock, whoever has taken it, if the terms allow that. Waits for at most 200 ms
    /// for somebody who has the file locked.
    ///
    /// Without [`Terms::force`], a lock whose holder is provably alive is released only if it is
    /// the holder who asks; an unreadable one, and one of another host or container, only when it
    /// is stale.
    ///
    /// ```
    /// use latchd::lockfile::{LockInfo, Semaphore, Terms};
    ///
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("backup.lock");
    /// let semaphore = Semaphore::with_defaults(&path)?;
    /// // For this process, which need not keep the file open.
    /// assert!(semaphore.try_acquire_detached(&LockInfo::new())?.is_ok());
    ///
    /// let refused = semaphore.release(&Terms::default())?;
    /// assert_eq!(refused.unwrap_err().status.pid, Some(std::process::id()));
    /// let terms = Terms { asking: std::process::id(), ..Terms::default() };
    /// assert!(semaphore.release(&terms)?.is_ok());
    /// # Ok::<(), latchd::lockfile::SemaphoreError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::NotLocked`] if there is no lock, or what the system says.
    pub fn release(&self, terms: &Terms) -> SemaphoreResult<Result<(), Busy>> {
        find_here()?;
        let directory = self.directory()?;
        let files = self.files(&directory);
        let allows =
            |content: &Content, locking| Ok(self.allows(terms, content, locking, &directory));
        let kept = match takeover::remove(&files, &allows)? {
            Removal::Removed => return Ok(Ok(())),
            Removal::Nothing => return Err(SemaphoreError::NotLocked),
            Removal::Kept(Obstacle::NotALockFile, _) => return Err(self.not_a_lock_file()),
            Removal::Kept(obstacle, content) => (obstacle, content),
        };
        Ok(Err(self.busy(kept.0, kept.1, &directory)))
    }

    fn allows(
        &self,
        terms: &Terms,
        content: &Content,
        locking: Locking,
        directory: &Directory,
    ) -> Verdict {
        if !is_of_lock_file(&content.bytes) {
            return Err(Obstacle::NotALockFile);
        }
        if terms.force {
            return Ok(());
        }
        let record = Record::parse(&content.bytes);
        if let Some(pid) = terms.pid {
            if record.pid != Some(pid) {
                return Err(Obstacle::NotStale);
            }
        }
        if let Some(token) = &terms.token {
            if record.token != Some(token_as_read(token)) {
                return Err(Obstacle::NotStale);
            }
        }
        // A guard keeps its file locked. Without one, any process that may read the file can have
        // locked it.
        if locking == Locking::Theirs && record.is_live {
            return Err(Obstacle::Locked);
        }
        // A process of another host may have the number of the one that asks.
        let is_own = record.pid == Some(terms.asking) && !is_of_elsewhere(&record, here());
        let is_named = terms.pid.is_some_and(|pid| pid != terms.asking) || terms.token.is_some();
        if is_own || is_named {
            return Ok(());
        }
        if locking == Locking::Theirs {
            return Err(Obstacle::Locked);
        }
        let is_locked = (locking == Locking::Ours).then_some(false);
        let judgement = judge(
            content,
            &record,
            is_locked,
            self.config.stale_timeout,
            self.options.stale_rule,
            &Surroundings { directory },
        );
        let is_released = match judgement.alive {
            Alive::Yes => false,
            Alive::No => judgement.is_stale || record.info().is_some(),
            Alive::Unknown => judgement.is_stale,
        };
        match is_released {
            true => Ok(()),
            false => Err(Obstacle::NotStale),
        }
    }

    /// Whether a process with this number is there.
    pub fn is_process_running(pid: u32) -> bool {
        process::exists(pid)
    }

    fn directory(&self) -> SemaphoreResult<Directory> {
        Ok(Directory::open(&self.place.directory)?)
    }

    fn making(&self) -> Making {
        Making {
            mode: self.options.mode,
            is_synced: self.options.is_synced,
            settle: self.options.settle,
            lacks: self.options.lacks,
        }
    }

    fn files<'a>(&'a self, directory: &'a Directory) -> LockFiles<'a> {
        LockFiles::new(directory, &self.place.name, self.making())
    }

    fn guard(&self, directory: Directory, file: File) -> SemaphoreResult<SemaphoreGuard<'_>> {
        Ok(SemaphoreGuard::new(self, directory, file, self.care())?)
    }

    fn care(&self) -> Care {
        Care {
            beat: beat_for(self.config.stale_timeout),
            has_heartbeat: self.options.has_heartbeat,
            on_lost: self.options.on_lost.clone(),
        }
    }

    /// Tries once.
    fn attempt(
        &self,
        info: &LockInfo,
        hold: Hold,
    ) -> SemaphoreResult<Result<(Directory, File), Busy>> {
        find_here()?;
        let directory = self.directory()?;
        let files = self.files(&directory);
        let (tag, token) = (info.tag.as_deref(), self.options.token.as_deref());
        let claim = Claim {
            record: &|| stamped(info.pid, tag, token).print().into_bytes(),
            is_live: hold == Hold::Guarded,
            may_take: &|content| Ok(self.may_take(content, &directory)),
        };
        match takeover::acquire(&files, &claim)? {
            Attempt::Granted(file) => Ok(Ok((directory, file))),
            Attempt::Held(Obstacle::NotALockFile, _) => Err(self.not_a_lock_file()),
            Attempt::Held(obstacle, content) => Ok(Err(self.busy(obstacle, content, &directory))),
        }
    }

    /// Whether a file with this content may be taken over, if no process has it locked.
    fn may_take(&self, content: &Content, directory: &Directory) -> Verdict {
        if !is_of_lock_file(&content.bytes) {
            return Err(Obstacle::NotALockFile);
        }
        let record = Record::parse(&content.bytes);
        let (timeout, rule) = (self.config.stale_timeout, self.options.stale_rule);
        let world = Surroundings { directory };
        let judgement = judge(content, &record, Some(false), timeout, rule, &world);
        judgement.is_stale.then_some(()).ok_or(Obstacle::NotStale)
    }

    fn not_a_lock_file(&self) -> SemaphoreError {
        SemaphoreError::NotALockFile(self.path.clone())
    }

    fn busy(&self, obstacle: Obstacle, content: Option<Content>, directory: &Directory) -> Busy {
        let is_locked = matches!(obstacle, Obstacle::Locked).then_some(true);
        let status = match content {
            Some(content) => Status::of(&content, is_locked, self, directory),
            None => Status::unreadable(),
        };
        Busy { obstacle, status }
    }

    /// Waits until the lock is free or stale, without taking it.
    ///
    /// # Errors
    ///
    /// [`SemaphoreError::Timeout`] if it is held for longer than `timeout`, at once
    /// [`SemaphoreError::InvalidPath`] if something is there that is no regular file, or what the
    /// system says.
    pub fn wait(&self, timeout: Option<Duration>) -> SemaphoreResult<()> {
        let patience = Patience::new(timeout, None);
        match wait_any(std::slice::from_ref(self), &patience)? {
            Ok(_) => Ok(()),
            Err((_, busy)) => Err(busy.after_wait(&self.path)),
        }
    }
}

/// Whether the record was written by a process of another host or another pid namespace.
fn is_of_elsewhere(record: &Record, here: &Place) -> bool {
    let differs = |theirs: &Option<String>, ours: &Option<String>| matches!((theirs, ours), (Some(theirs), Some(ours)) if theirs != ours);
    differs(&record.boot, &here.boot)
        || differs(&record.pid_namespace, &here.pid_namespace)
        || (record.boot.is_none() && differs(&record.host, &here.host))
}

/// How long to wait.
pub(crate) struct Patience<'a> {
    deadline: Option<Instant>,
    cancel: Option<&'a Flag>,
}

impl<'a> Patience<'a> {
    /// From now on for `timeout`, and until `cancel` is set.
    pub(crate) fn new(timeout: Option<Duration>, cancel: Option<&'a Flag>) -> Patience<'a> {
        // A deadline beyond what the clock can tell is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Patience { deadline, cancel }
    }

    fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline <= Instant::now())
    }
}

/// What comes of waiting for one of several locks: which it is, and what it gave; or which is in
/// the way, and why.
pub(crate) type Waited<T> = Result<(usize, T), (usize, Busy)>;

/// Waits for one of several locks, which stand in one directory, and says which it is.
pub(crate) fn acquire_any<'a>(
    slots: &'a [Semaphore],
    info: &LockInfo,
    patience: &Patience<'_>,
) -> SemaphoreResult<Waited<SemaphoreGuard<'a>>> {
    let waited = until_any(slots, None, patience, |slot| {
        slot.attempt(info, Hold::Guarded)
    })?;
    Ok(match waited {
        Ok((at, (directory, file))) => Ok((at, slots[at].guard(directory, file)?)),
        Err(busy) => Err(busy),
    })
}

/// As [`acquire_any`], and leaves it to the process `info.pid`. Gives up when that ends.
pub(crate) fn acquire_any_detached(
    slots: &[Semaphore],
    info: &LockInfo,
    patience: &Patience<'_>,
) -> SemaphoreResult<Waited<()>> {
    let has_ended = || SemaphoreError::HolderEnded(info.pid);
    let holder = Lifetime::of(info.pid).ok_or_else(has_ended)?;
    let waited = until_any(slots, Some(&holder), patience, |slot| {
        slot.try_acquire_detached(info)
    })?;
    match &waited {
        // It has ended just before the grant, which its end may have made room for.
        Ok((at, ())) if holder.is_over() => {
            let terms = Terms {
                pid: Some(info.pid),
                ..Terms::default()
            };
            let _ = slots[*at].release(&terms);
            Err(has_ended())
        }
        _ => Ok(waited),
    }
}

/// Waits until one of several locks is free or stale, without taking it.
pub(crate) fn wait_any(
    slots: &[Semaphore],
    patience: &Patience<'_>,
) -> SemaphoreResult<Waited<()>> {
    until_any(slots, None, patience, |slot| {
        let found = slot.look()?;
        Ok(found
            .filter(|busy| !busy.status.is_stale)
            .map_or(Ok(()), Err))
    })
}

/// Looks at all slots until one of them gives what is wanted, until none can ever, until time is
/// up, or until the process that is to be the holder has ended.
fn until_any<T>(
    slots: &[Semaphore],
    holder: Option<&Lifetime>,
    patience: &Patience<'_>,
    look: impl Fn(&Semaphore) -> SemaphoreResult<Result<T, Busy>>,
) -> SemaphoreResult<Waited<T>> {
    let Some(first) = slots.first() else {
        return Err(SemaphoreError::Timeout);
    };
    let mut watch = None;
    loop {
        let mut held = Vec::with_capacity(slots.len());
        for (at, slot) in slots.iter().enumerate() {
            match look(slot)? {
                Ok(wanted) => return Ok(Ok((at, wanted))),
                Err(busy) => held.push(busy),
            }
        }
        let hopeful = held.iter().position(|busy| !busy.is_hopeless());
        if hopeful.is_none() || patience.is_over() {
            let at = hopeful.unwrap_or(0);
            return Ok(Err((at, held.swap_remove(at))));
        }
        match &watch {
            Some(watch) => rest(slots, &held, holder, watch, patience)?,
            // Most find the lock free, and need none. Then one more look, so that nothing is
            // missed.
            None => watch = Some(Watch::on(&first.directory()?)),
        }
        if let Some(ended) = holder.filter(|holder| holder.is_over()) {
            return Err(SemaphoreError::HolderEnded(ended.pid()));
        }
    }
}

/// Waits until something may have changed.
fn rest(
    slots: &[Semaphore],
    held: &[Busy],
    holder: Option<&Lifetime>,
    watch: &Watch,
    patience: &Patience<'_>,
) -> SemaphoreResult<()> {
    let now = Instant::now();
    let held = held.iter().map(|busy| &busy.status);
    let ends: Vec<OwnedFd> = held.clone().filter_map(Status::end_of_holder).collect();
    let ends: Vec<_> = ends.iter().map(AsFd::as_fd).collect();
    // Where there is no such descriptor, its end is seen at the next look.
    let ends = [&ends[..], holder.and_then(Lifetime::end).as_slice()].concat();
    let retry = slots
        .iter()
        .map(|slot| slot.config.retry_interval)
        .min()
        .unwrap_or(FOREVER);
    let stale_in = held
        // What is stale and yet was not to be had will not be had a moment later for being stale.
        .filter(|status| !status.is_stale)
        .filter_map(|status| status.stale_in)
        .min()
        .unwrap_or(FOREVER);
    let pause = retry.min(stale_in).max(SHORTEST_RETRY).min(FOREVER) + jitter();
    let until = patience
        .deadline
        .map_or(now + pause, |deadline| deadline.min(now + pause));
    let concerns = |name: &[u8]| slots.iter().any(|slot| slot.place.name.as_bytes() == name);
    match watch.wait(concerns, &ends, patience.cancel, until)? {
        Woken::Look => Ok(()),
        Woken::Cancelled => Err(SemaphoreError::Cancelled),
    }
}

fn jitter() -> Duration {
    let nanoseconds = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.subsec_nanos());
    Duration::from_nanos(u64::from(nanoseconds) % JITTER_NANOSECONDS)
}
