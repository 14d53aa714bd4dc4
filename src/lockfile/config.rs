//! What can be chosen about a lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::files::{MissingFeatures, Settle};
use super::guard::OnLost;
use super::staleness::StaleRule;

/// The permissions of a lock file, before the umask.
const DEFAULT_MODE: u32 = 0o644;

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
    pub(super) stale_rule: StaleRule,
    pub(super) mode: u32,
    pub(super) is_synced: bool,
    pub(super) settle: Settle,
    pub(super) has_heartbeat: bool,
    pub(super) on_lost: Option<OnLost>,
    pub(super) token: Option<String>,
    pub(super) missing: MissingFeatures,
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
            missing: MissingFeatures::default(),
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

    /// A word that is written into the lock file, and that [`ReleaseTerms::token`] can ask for at the
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
