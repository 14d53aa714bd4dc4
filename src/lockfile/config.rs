//! The configuration and the options of a lock.

use std::sync::Arc;
use std::time::Duration;

use super::files::{LockFileOptions, Settle};
use super::guard::LostCallback;
use super::staleness::StaleRule;

/// When a lock counts as stale, how long to wait for it, and how often to look.
#[derive(Clone, Debug)]
pub struct SemaphoreConfig {
    /// A lock that is older may be stale; `None` for never. One hour by default.
    pub stale_timeout: Option<Duration>,
    /// The time between two looks where the system reports no changes. 100 ms by default.
    pub retry_interval: Duration,
    /// How long [`Semaphore::acquire`](super::Semaphore::acquire) waits; `None`, the default, for
    /// any time.
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
}

impl SemaphoreOptions {
    /// The defaults: stale by age and liveness, mode 0644, synced, 20 ms to settle after a
    /// takeover, no heartbeat, no token.
    pub fn new() -> SemaphoreOptions {
        SemaphoreOptions::default()
    }

    /// The rule for a lock that is older than the stale timeout.
    #[must_use]
    pub fn stale_rule(mut self, rule: StaleRule) -> SemaphoreOptions {
        self.stale_rule = rule;
        self
    }

    /// The permissions of the lock file, before the umask.
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

    /// Whether a grant waits for other implementations that may be about to remove the file.
    #[must_use]
    pub fn settle(mut self, settle: Settle) -> SemaphoreOptions {
        self.files.settle = settle;
        self
    }

    /// Whether a guard updates the timestamp while it holds, for programs that judge by age alone.
    /// The guard runs a thread for that.
    #[must_use]
    pub fn heartbeat(mut self, is_wanted: bool) -> SemaphoreOptions {
        self.has_heartbeat = is_wanted;
        self
    }

    /// The callback for a lock that is lost because another process has removed or replaced the
    /// lock file. The guard runs a thread for that, and calls back there, within a second of the
    /// loss. A release does not wait for a callback that has begun.
    #[must_use]
    pub fn on_lost(mut self, callback: impl Fn() + Send + Sync + 'static) -> SemaphoreOptions {
        self.on_lost = Some(LostCallback(Arc::new(callback)));
        self
    }

    /// A token for the lock file. [`ReleaseTerms::token`](super::ReleaseTerms::token) can require
    /// it at the release. It guards against mistakes and is no secret.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> SemaphoreOptions {
        self.token = Some(token.into());
        self
    }
}
