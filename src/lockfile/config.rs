//! The configuration and the options of a lock.

use std::sync::Arc;
use std::time::Duration;

use super::files::{LockFileOptions, Settle};
use super::guard::LostCallback;
use super::staleness::StaleRule;

/// When a lock counts as stale, how long to wait for it, and how often to look.
#[derive(Clone, Debug)]
pub struct SemaphoreConfig {
    /// The age beyond which a lock may be stale; `None` if locks never become stale. One hour by
    /// default.
    pub stale_timeout: Option<Duration>,
    /// The time between two attempts of a waiting process, which also finds changes that the system
    /// does not report. 100 ms by default.
    pub retry_interval: Duration,
    /// The maximum time that [`Semaphore::acquire`](super::Semaphore::acquire) waits. The default
    /// is `None`: no limit.
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

/// Further options of a lock.
///
/// ```
/// use latchd::lockfile::{Semaphore, SemaphoreConfig, SemaphoreOptions};
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("job.lock");
/// let options = SemaphoreOptions::new()
///     .mode(0o600)
///     .heartbeat(true)
///     .on_lost(|| eprintln!("another process has removed the lock file"));
/// let semaphore = Semaphore::with_options(&path, SemaphoreConfig::default(), options)?;
/// let guard = semaphore.acquire()?;
/// assert!(guard.is_held());
/// guard.release()?;
/// # Ok::<(), latchd::lockfile::SemaphoreError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct SemaphoreOptions {
    pub(super) stale_rule: StaleRule,
    pub(super) files: LockFileOptions,
    pub(super) has_heartbeat: bool,
    pub(super) on_lost: Option<LostCallback>,
    pub(super) token: Option<String>,
    /// How many slots the pool has, if the lock is one of its slots.
    pub(super) slot_count: Option<u32>,
}

impl SemaphoreOptions {
    /// Returns the defaults: a lock becomes stale by age if its holder is not provably alive. The
    /// mode is 0644, the record is synced, and a takeover is followed by a pause of 20 ms. There is
    /// no heartbeat and no token.
    pub fn new() -> SemaphoreOptions {
        SemaphoreOptions::default()
    }

    /// Sets the rule for a lock that is older than the stale timeout.
    #[must_use]
    pub fn stale_rule(mut self, rule: StaleRule) -> SemaphoreOptions {
        self.stale_rule = rule;
        self
    }

    /// Sets the permissions of the lock file, before the umask.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> SemaphoreOptions {
        self.files.mode = mode & 0o7777;
        self
    }

    /// Whether the record is synced to the disk before the lock file appears.
    #[must_use]
    pub fn sync(mut self, is_synced: bool) -> SemaphoreOptions {
        self.files.is_synced = is_synced;
        self
    }

    /// Whether to pause after a grant, because another implementation may be about to remove the
    /// lock file.
    #[must_use]
    pub fn settle(mut self, settle: Settle) -> SemaphoreOptions {
        self.files.settle = settle;
        self
    }

    /// Whether a guard keeps updating the timestamp while it holds the lock, for programs that
    /// judge a lock by its age alone. The guard runs a thread for this.
    #[must_use]
    pub fn heartbeat(mut self, is_wanted: bool) -> SemaphoreOptions {
        self.has_heartbeat = is_wanted;
        self
    }

    /// Sets the function to call if a lock is lost because another process has removed or replaced
    /// the lock file. The guard runs a thread that notices the loss within a second and makes the
    /// call. A release does not wait for a call that has begun.
    #[must_use]
    pub fn on_lost(mut self, callback: impl Fn() + Send + Sync + 'static) -> SemaphoreOptions {
        self.on_lost = Some(LostCallback(Arc::new(callback)));
        self
    }

    /// Sets a token to write into the lock file. A release can require this token: see
    /// [`ReleaseTerms::token`](super::ReleaseTerms::token). The token guards against mistakes and
    /// is not secret.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> SemaphoreOptions {
        self.token = Some(token.into());
        self
    }
}
