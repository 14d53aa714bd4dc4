//! A two-phase claim: a place in a queue, for whose grant the program waits later.

use super::connection::{Connection, Enqueued};
use super::error::Error;
use super::granted::Granted;
use super::guard::Guard;
use super::slot::{Slot, Wait};
use crate::sys::moment::Moment;

/// A place in a queue. Dropping it closes its connection without blocking. The server then removes
/// the place, or releases the lock if it was granted.
///
/// If the lock is granted before [`QueuePlace::wait`] is called, its lease runs, but nothing renews
/// the lease.
///
/// ```
/// use latchd::client::{Address, Client, Wait};
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let (_running, server) = Server::in_place_of(server);
/// let client = Client::new([server]);
/// let guard = client.lock("deploy").acquire()?;
///
/// let place = client.lock("deploy").enqueue()?;
/// assert!(!place.is_granted());
/// // ... something else, and then: ...
/// guard.release()?;
/// assert!(place.wait(Wait::Forever)?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping it gives up the place"]
pub struct QueuePlace {
    pub(super) connection: Connection,
    pub(super) key: String,
    pub(super) slot: Slot,
    pub(super) is_numbered: bool,
    pub(super) enqueued: Enqueued,
}

impl QueuePlace {
    /// Whether the lock was granted when the place was taken, so that [`QueuePlace::wait`] does not
    /// have to wait. Does not ask the server.
    pub fn is_granted(&self) -> bool {
        matches!(self.enqueued, Enqueued::Acquired(_))
    }

    /// Blocks until the lock is granted or the wait is over. The reply, or a [late
    /// grant](super::Lock), takes extra time. If the wait is over, gives up the place and returns
    /// `None`.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseExpired`] if the lock was granted but its lease ended before this call;
    /// [`Error::Cancelled`] if a [`CancelHandle`] of the [`Lock`] ended the wait, unless the lock
    /// [was granted](QueuePlace::is_granted) before; the server's refusal; or one of [the errors of
    /// any request](Connection#errors).
    ///
    /// [`CancelHandle`]: super::CancelHandle
    /// [`Lock`]: super::Lock
    pub fn wait(mut self, mut wait: Wait) -> Result<Option<Guard>, Error> {
        // A cancellation must not lose a lock that is already granted. The reply comes at once.
        if self.is_granted() {
            self.connection.cancelled_by.clear();
            wait = Wait::No;
        }
        // The server restarts the lease when it answers, even if the lock was granted earlier.
        let asked_at = Moment::now();
        let waited = self.connection.wait(&self.key, self.slot, wait);
        let (grant, error) = match (waited, self.enqueued) {
            (Ok(None), _) => return Ok(None),
            (Ok(Some(grant)), _) => (grant, None),
            (Err(error), Enqueued::Acquired(grant)) => (grant, Some(error)),
            (Err(error), Enqueued::Queued) => return Err(error),
        };
        let granted = Granted {
            connection: self.connection,
            key: self.key,
            slot: self.slot,
            grant,
            asked_at,
            is_numbered: self.is_numbered,
        };
        match error {
            None => granted.into_guard().map(Some),
            Some(error) => Err(granted.give_up(error)),
        }
    }
}
