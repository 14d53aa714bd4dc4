//! Several locks that are held together.

use std::mem;
use std::ops::Deref;
use std::time::{Duration, Instant};

use super::claim::Wait;
use super::connection::Connection;
use super::error::Error;
use super::granted::{Claimed, Progress};
use super::guard::Guard;
use super::{Client, Lock};
use crate::os::event::Event;

/// Several locks to be held together. They are acquired one after the other in the order of their
/// keys, whatever order they are given in, so that no two clients wait for each other.
///
/// # Errors
///
/// The methods fail with the errors of [`Lock`]. They also fail with [`Error::InvalidArgument`] if
/// a key is given twice, and with [`Error::Lost`] if a lock is lost during the wait for another
/// one. After an error, all locks that were already granted are released.
#[derive(Clone, Debug)]
#[must_use = "it connects only when it is asked for guards"]
pub struct LockSet<'a>(Vec<Lock<'a>>);

impl Client {
    /// Returns the locks of several keys, to be held together. Does not connect. The methods that
    /// acquire the locks check the keys.
    ///
    /// ```
    /// use latchd::client::{Address, Client};
    ///
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server: Address = "127.0.0.1:6388".parse()?;
    /// # let (_running, server) = Server::in_place_of(server);
    /// let client = Client::new([server]);
    /// let guards = client.lock_all(&["savings", "checking"]).acquire()?;
    /// assert!(client.lock("savings").try_acquire()?.is_none());
    /// for guard in guards.iter() {
    ///     println!("{} with the fence {}", guard.key(), guard.fence());
    /// }
    /// // ... work, and look at guards.is_held() before each step that cannot be undone ...
    /// guards.release()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn lock_all<'a>(&'a self, keys: &[&'a str]) -> LockSet<'a> {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        LockSet(keys.into_iter().map(|key| self.lock(key)).collect())
    }
}

impl<'a> LockSet<'a> {
    /// Changes each lock, for example its lease:
    /// `locks.each(|lock| lock.lease(minute).tag("worker 7"))`.
    pub fn each(self, change: impl FnMut(Lock<'a>) -> Lock<'a>) -> LockSet<'a> {
        LockSet(self.0.into_iter().map(change).collect())
    }

    /// Blocks until all locks are granted.
    pub fn acquire(&self) -> Result<Guards, Error> {
        loop {
            // The protocol limits a wait, as in `Lock::acquire`.
            if let Some(guards) = self.ask(Wait::Forever)? {
                return Ok(guards);
            }
        }
    }

    /// Waits for at most `time` for all locks together, rounded up to whole seconds. Blocks for at
    /// most the reply timeout more. Returns `None` if one of the locks was not granted in that
    /// time.
    pub fn acquire_within(&self, time: Duration) -> Result<Option<Guards>, Error> {
        self.ask(Wait::UpTo(time))
    }

    /// Acquires the locks without waiting, or returns `None` if one of them is not free.
    pub fn try_acquire(&self) -> Result<Option<Guards>, Error> {
        self.ask(Wait::No)
    }

    fn ask(&self, wait: Wait) -> Result<Option<Guards>, Error> {
        if self.0.windows(2).any(|pair| pair[0].key == pair[1].key) {
            return Err(Error::InvalidArgument("a key is given twice"));
        }
        let began = Instant::now();
        let mut guards = Guards::none()?;
        for lock in &self.0 {
            if let Claimed::InVain(_) = guards.add(*lock, began, wait, None, |_, _| ())? {
                return Ok(None);
            }
        }
        Ok(Some(guards))
    }
}

/// Locks that are held together, in the order of their keys. Dropping them does the same as
/// [`Guards::release`], but ignores errors.
///
/// `Guards` dereferences to a slice of [`Guard`]s. Each guard is renewed, and can be lost,
/// independently of the others: [`Guard::on_lost`] reports its loss.
#[derive(Debug)]
#[must_use = "dropping it releases the locks"]
pub struct Guards {
    guards: Vec<Guard>,
    /// Set when one of the locks is lost.
    pub(crate) lost: Event,
}

impl Guards {
    pub(crate) fn none() -> Result<Guards, Error> {
        Ok(Guards {
            guards: Vec::new(),
            lost: Event::new().map_err(Error::System)?,
        })
    }

    /// Acquires one more lock. The loss of a lock that is already held ends the wait. Calls
    /// `watch` at the same points as [`Lock::claim`]. With `keep_time`, fails if the server would
    /// not keep the lock for so long without a connection.
    pub(crate) fn add(
        &mut self,
        lock: Lock<'_>,
        began: Instant,
        wait: Wait,
        keep_time: Option<Duration>,
        watch: impl FnMut(Progress, &Connection),
    ) -> Result<Claimed<()>, Error> {
        let cancelled_by = [lock.cancelled_by[0], Some(&self.lost)];
        let lock = Lock {
            cancelled_by,
            ..lock
        };
        let claimed = lock.claim(began, wait, watch);
        // Even a grant is useless once another lock is lost.
        if let Some(lost) = self.guards.iter().find_map(Guard::lost) {
            return Err(lost);
        }
        let guard = match claimed? {
            Claimed::Granted(granted) => match keep_time {
                Some(time) => granted.prove_keepable(time)?.into_guard()?,
                None => granted.into_guard()?,
            },
            Claimed::InVain(connection) => return Ok(Claimed::InVain(connection)),
        };
        let lost = self.lost.clone();
        guard.on_lost(move |_| lost.set());
        self.guards.push(guard);
        Ok(Claimed::Granted(()))
    }

    /// Whether all locks are certainly held at this moment. Does not block.
    pub fn is_held(&self) -> bool {
        self.guards.iter().all(Guard::is_held)
    }

    /// Releases all locks, in reverse order, and reports whether the servers agreed. Blocks for
    /// each lock for as long as [`Guard::release`].
    ///
    /// # Errors
    ///
    /// Fails with the first error of [`Guard::release`]. The other locks are released nevertheless.
    pub fn release(self) -> Result<(), Error> {
        let mut outcome = Ok(());
        for guard in self.into_vec().into_iter().rev() {
            outcome = outcome.and(guard.release());
        }
        outcome
    }

    /// Returns the guards, to be released one by one.
    pub fn into_vec(mut self) -> Vec<Guard> {
        mem::take(&mut self.guards)
    }
}

impl Deref for Guards {
    type Target = [Guard];

    fn deref(&self) -> &[Guard] {
        &self.guards
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        // In the reverse order of the claims: a vector would drop them forwards.
        while self.guards.pop().is_some() {}
    }
}
