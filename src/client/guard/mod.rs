//! A held lock. Its guard renews it in the background, releases it when dropped, and reports a loss
//! before the server can grant the lock to another holder.

mod keeper;
mod timing;

use std::fmt;
use std::mem;
use std::process;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

#[cfg(feature = "programs")]
use super::address::Address;
use super::error::{Asked, Error, Loss};
use super::Granted;
use crate::os::event::Event;
use crate::os::moment::Moment;
use crate::wire::token::{Grant, Token};
use keeper::Keeper;
use timing::{deadline_of, fits};

/// The stack size of a keeper, in bytes. The documentation of the callbacks states it.
const STACK_LEN: usize = 128 * 1024;

/// A held lock or semaphore slot. Dropping the guard does the same as [`Guard::release`], but
/// ignores errors.
///
/// Each guard has a thread, the keeper, which renews the lease and watches the connection. The
/// keeper renews a lease after half of its length, a short one after a third, and every lease after
/// 15 seconds at the latest. The lock counts as lost when a renewal is refused. It also counts as
/// lost shortly before the lease could end on the server: two seconds before, or a quarter of the
/// lease if that is less. From then on, [`Guard::is_held`] returns false. If the server limits the
/// time of a hold, the last renewals get what is left of it.
///
/// When the connection ends, [`Guard::is_held`] returns false, and the keeper tries to reconnect
/// until the lease could end: at once, then after pauses of 50 milliseconds to a second. Over the
/// new connection, it adopts the lock with its token, and the lock is held as before. If the server
/// refuses the adoption, the lock is lost: the server released it when the connection ended, or
/// cannot adopt locks. The lock is also lost if the server has refused connections, or its Unix
/// socket has not existed, for two seconds. This does not apply if the server is in a cluster, or
/// if its grants survive a restart or the end of a connection. Any other error, such as an
/// unreachable network, says nothing about the server.
///
/// If a server does not answer a renewal within a second, it may be slow, or its host or the
/// network may have failed. The keeper then adopts the lock over a second connection, to the same
/// server or to another server of the cluster (see [`Address::Cluster`]).
/// Until the lock is adopted, the keeper leaves the first connection open.
///
/// The methods of a guard can be called from several threads. A guard belongs to the process that
/// acquired the lock. In a child by fork(2), releasing or dropping it does nothing, and its other
/// methods must not be called. The child should soon call execve(2) or end: as long as its copy of
/// the connection is open, the server does not notice the end of the parent.
///
/// ```
/// use latchd::client::{Address, Client};
/// use std::time::Duration;
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let (_running, server) = Server::in_place_of(server);
/// let client = Client::new([server]);
/// let lock = client.lock("ledger").lease(Duration::from_secs(10));
/// let guard = lock.acquire()?;
/// let fence = guard.token().fence();
/// assert!(guard.is_held());
///
/// drop(guard);
/// assert!(lock.acquire()?.token().fence() > fence);
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it releases the lock"]
pub struct Guard {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
    grant: Grant,
    pub(super) slot_numbers: Vec<u32>,
    /// The key, and its server.
    asked: Asked,
    /// The process that acquired the lock.
    owner: u32,
}

struct Shared {
    hold: Mutex<HoldState>,
    /// Wakes the keeper.
    bell: Event,
    /// Wakes the guard that waits for [`HoldState::outcome`].
    ended: Condvar,
}

impl Shared {
    /// The shared state of a lock that was just granted. Its lease was asked for at `asked_at`.
    fn new(asked_at: Moment, lease: Duration) -> Result<Shared, Error> {
        Ok(Shared {
            hold: Mutex::new(HoldState {
                deadline: deadline_of(asked_at, lease),
                lease_ends_at: asked_at + lease,
                is_last_lease: false,
                is_cut: false,
                loss: None,
                on_lost: None,
                on_silence: None,
                unsent_callbacks: Vec::new(),
                status: None,
                order: None,
                outcome: None,
            }),
            bell: Event::new().map_err(Error::System)?,
            ended: Condvar::new(),
        })
    }

    /// Records how the hold ended, and wakes the guard that waits for this outcome.
    fn set_outcome(&self, outcome: Result<(), Error>) {
        self.lock().outcome = Some(outcome);
        self.ended.notify_all();
    }

    /// No callback runs under the mutex, so a panic cannot leave the state half-changed. No
    /// callback is dropped under it, either: the destructor of a captured value may call the guard.
    fn lock(&self) -> MutexGuard<'_, HoldState> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct HoldState {
    /// The lock is certainly held until this moment, unless the connection ends.
    deadline: Moment,
    /// When the lease ends on the server, or a little earlier.
    lease_ends_at: Moment,
    /// Whether the server allows no later end of the lease.
    is_last_lease: bool,
    /// Whether the connection has ended and the server has not yet answered a renewal over another
    /// one.
    is_cut: bool,
    loss: Option<Loss>,
    on_lost: Option<Box<dyn FnOnce(Loss) + Send>>,
    on_silence: Option<OnSilence>,
    /// The callbacks for the outcome of the next renewal. If there are any, the renewal is due at
    /// once.
    unsent_callbacks: Vec<RenewalCallback>,
    /// The exit status of the work, to be told at the end of the hold.
    status: Option<u8>,
    /// The guard's order to end the hold; `None` until the guard gives it.
    order: Option<Order>,
    /// The result of that order, or the error of a lost lock. After a loss, the keeper closes the
    /// connection before it sets the error.
    outcome: Option<Result<(), Error>>,
}

/// How to end a hold.
#[derive(Clone, Copy, Debug)]
enum Order {
    Release,
    /// The server keeps the lock until this moment.
    KeepUntil(Moment),
}

/// The callback for a server that does not answer, and for the end of the last lease that the
/// server allows.
struct OnSilence {
    /// How long before the deadline the callback is called.
    lead: Duration,
    callback: Box<dyn FnOnce() + Send>,
}

/// A callback for the outcome of a renewal. It is dropped uncalled if the lock is lost.
type RenewalCallback = Box<dyn FnOnce(bool) + Send>;

/// Releases a grant that has no guard. Its connection may have ended. Blocks, and fails, like
/// [`Guard::release`].
fn release(held: Granted) -> Result<(), Error> {
    let shared = Shared::new(held.asked_at, held.lease)?;
    Keeper::new(held, Arc::new(shared))?.carry_out(Order::Release)
}

impl Granted {
    /// Turns the grant into a guard, which renews the lease.
    pub(crate) fn into_guard(mut self) -> Result<Guard, Error> {
        self.connection.cancelled_by.clear();
        // Ask before the lease is checked, because asking takes time.
        let numbers = self.slot_numbers();
        let numbers = numbers.and_then(|numbers| self.renew_if_late().map(|()| numbers));
        match numbers {
            Ok(numbers) => {
                let words: Vec<String> = numbers.iter().map(u32::to_string).collect();
                self.known.numbers = words.join(",");
                Guard::new(self, numbers)
            }
            Err(error) => Err(self.give_up(error)),
        }
    }

    /// Gives up the grant after `error`, which it returns. If the connection has ended, releases
    /// the grant over another one: the next claim might have to wait for its lease. Blocks for as
    /// long as [`Guard::release`].
    pub(crate) fn give_up(self, error: Error) -> Error {
        if matches!(error, Error::Closed { .. }) {
            let _ = release(self);
        }
        error
    }

    /// Returns the grant if the server would keep it for `time` without a connection. To learn
    /// that, has the server keep it, and takes it back: no request asks without keeping. If this
    /// process dies in between, the server keeps the lock for `time`. Blocks for at most three
    /// times the reply timeout, and after an error for as long as [`Guard::release`].
    pub(super) fn prove_keepable(mut self, time: Duration) -> Result<Granted, Error> {
        self.connection.cancelled_by.clear();
        let kept = self
            .renew_if_late()
            .and_then(|()| self.keep_at_server(time));
        match kept.and_then(|()| self.connection.adopt_for_good(&self.known)) {
            Ok((asked_at, lease)) => {
                (self.asked_at, self.lease) = (asked_at, lease);
                Ok(self)
            }
            Err(error) => {
                // The server may keep the grant nevertheless.
                let _ = release(self);
                Err(error)
            }
        }
    }
}

impl Guard {
    /// Starts the keeper of a grant. If this host has no thread or file descriptor left, fails with
    /// [`Error::System`] and closes the connection.
    fn new(held: Granted, slot_numbers: Vec<u32>) -> Result<Guard, Error> {
        let (token, lease) = (held.known.token, held.lease);
        let shared = Arc::new(Shared::new(held.asked_at, lease)?);
        let asked = held.asked();
        let keeper = Keeper::new(held, Arc::clone(&shared))?;
        let thread = thread::Builder::new()
            .name("keeper".into())
            .stack_size(STACK_LEN)
            .spawn(move || keeper.run())
            .map_err(Error::System)?;
        Ok(Guard {
            shared,
            keeper: Some(thread),
            grant: Grant { token, lease },
            slot_numbers,
            asked,
            owner: process::id(),
        })
    }

    /// The key that is held.
    pub fn key(&self) -> &str {
        self.asked.key.as_deref().unwrap_or_default()
    }

    /// The server that granted the lock.
    #[cfg(feature = "programs")]
    pub(crate) fn server(&self) -> &Address {
        &self.asked.server
    }

    /// The fence of the grant, see [`Guard::token`].
    pub fn fence(&self) -> u64 {
        self.grant.token.fence()
    }

    /// The token of the grant. Send its [`Token::fence`] with each write to the resource that the
    /// lock protects. The resource should refuse a fence that is lower than the highest fence it
    /// has seen: a holder may have been stopped, and have lost the lock, since it last called
    /// [`Guard::is_held`].
    pub fn token(&self) -> Token {
        self.grant.token
    }

    /// The length of the granted lease, in whole seconds. Each renewal asks for the same length,
    /// and gets less only if the server limits the time of a hold (`latchd --max-hold`).
    pub fn lease(&self) -> Duration {
        self.grant.lease
    }

    /// Whether the lock is certainly held at this moment. Does not block. After it has returned
    /// false, it can return true again, unless the lock is [lost](Guard::loss).
    pub fn is_held(&self) -> bool {
        let hold = self.shared.lock();
        hold.loss.is_none() && !hold.is_cut && Moment::now() < hold.deadline
    }

    /// When the lease ends unless it is renewed. On the server, it may end a little later.
    #[cfg(feature = "programs")]
    pub(crate) fn lease_ends_at(&self) -> Moment {
        self.shared.lock().lease_ends_at
    }

    /// The error for a lost lock; `None` if the lock is not lost.
    pub(super) fn lost(&self) -> Option<Error> {
        let lost = |loss| Error::Lost(self.asked.clone(), loss);
        self.loss().map(lost)
    }

    /// How the lock was lost; if it is not lost yet, how it will be lost unless the server replies
    /// to a renewal.
    #[cfg(feature = "programs")]
    pub(crate) fn loss_to_come(&self) -> Loss {
        let to_come = || {
            if self.shared.lock().is_last_lease {
                Loss::MaxHold
            } else {
                Loss::Deadline
            }
        };
        self.loss().unwrap_or_else(to_come)
    }

    /// How the lock was lost, if it was. Does not block. The keeper may notice a loss a moment
    /// after [`Guard::is_held`] has turned false.
    pub fn loss(&self) -> Option<Loss> {
        self.shared.lock().loss
    }

    /// Sets the callback that is called once when the lock is lost, on the keeper's thread, whose
    /// stack is 128 KiB. If the lock is already lost, calls it at once on this thread. Replaces an
    /// earlier callback.
    pub fn on_lost(&self, callback: impl FnOnce(Loss) + Send + 'static) {
        let mut hold = self.shared.lock();
        match hold.loss {
            None => {
                let earlier = hold.on_lost.replace(Box::new(callback));
                drop(hold);
                drop(earlier);
            }
            Some(loss) => {
                drop(hold);
                callback(loss);
            }
        }
    }

    /// Sets the callback that is called once, on the keeper's thread, when only `lead` is left
    /// until the lock counts as lost. This happens if the server does not answer a renewal, or
    /// allows no later end of the lease. In that time, the program can end its work under the lock.
    /// Replaces an earlier callback. Does not block.
    ///
    /// From now on, the lease is renewed sooner: at the latest after half of the time until the
    /// callback would be due. If `lead` is more than half of the lease, returns false, and no
    /// callback is called.
    ///
    /// The callback should be short: until it returns, the keeper renews no lease and notices no
    /// loss. Its stack is 128 KiB. If the callback panics, the keeper closes the connection, and
    /// the lock is lost.
    pub fn on_silence(&self, lead: Duration, callback: impl FnOnce() + Send + 'static) -> bool {
        let callback = Box::new(callback);
        let silence = fits(lead, self.grant.lease).then_some(OnSilence { lead, callback });
        let is_fit = silence.is_some();
        let earlier = mem::replace(&mut self.shared.lock().on_silence, silence);
        self.shared.bell.set();
        drop(earlier);
        is_fit
    }

    /// Renews the lease now, and returns whether the lock is still held. Blocks until the server
    /// answers, but not beyond the end of the lease. When a callback of this guard calls it, it
    /// does not block, and the lease is renewed after the callback.
    pub fn renew(&self) -> bool {
        let (answer, answered) = channel();
        self.renew_and(move |is_held| {
            let _ = answer.send(is_held);
        });
        if self.is_keeper_thread() {
            return self.is_held();
        }
        answered.recv().unwrap_or(false) && self.is_held()
    }

    /// Renews the lease now. The keeper's thread then calls `answer` with whether the lock is still
    /// held. If the lock is lost, `answer` is dropped uncalled. Does not block.
    pub(crate) fn renew_and(&self, answer: impl FnOnce(bool) + Send + 'static) {
        let mut hold = self.shared.lock();
        if hold.loss.is_none() {
            hold.unsent_callbacks.push(Box::new(answer));
        }
        drop(hold);
        self.shared.bell.set();
    }

    /// Sets what the server is told when the lock is released or [kept](Guard::keep_for): how the
    /// work under it has ended, as an exit status, where 0 means success. The server then remembers
    /// the last holders of the key, see `latch history`. An older server is not told. Replaces an
    /// earlier status. Does not block.
    pub fn set_status(&self, status: u8) {
        self.shared.lock().status = Some(status);
    }

    /// Releases the lock, and reports whether the server agreed. If no server answers, tries again
    /// for about twenty seconds, but not after the end of the lease. If a renewal is under way,
    /// first waits for its answer, at most until the end of the lease. When a callback of this
    /// guard calls it, it does not block: the lock is released after the callback, and `Ok` does
    /// not mean that the server agreed.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the lock was no longer held; [`Error::Lost`] if it had been lost
    /// before; [`Error::Unreachable`] if no server could be reached (the key is free when the lease
    /// ends); or [the errors of any request](super::Connection#errors). In each case, this guard no
    /// longer holds the lock.
    pub fn release(self) -> Result<(), Error> {
        self.end(Order::Release)
    }

    fn end(mut self, order: Order) -> Result<(), Error> {
        if self.is_forked() {
            return Err(Error::Lost(self.asked.clone(), Loss::Forked));
        }
        if self.is_keeper_thread() && self.loss().is_none() {
            // Returning drops the guard, which orders the release.
            return Ok(());
        }
        self.order_end(order);
        let outcome = self.shared.lock().outcome.take();
        outcome.expect("the keeper has ended the hold")
    }

    /// Leaves the lock to the server, which keeps it for `time` from now on, rounded up to whole
    /// seconds. During that time, no other client is granted the lock, although no process holds
    /// it. To release it sooner, pass its [token](Guard::token) to [`Connection::release`]. Blocks
    /// for as long as [`Guard::release`]. A `time` of zero releases the lock.
    ///
    /// [`Connection::release`]: super::Connection::release
    ///
    /// # Errors
    ///
    /// [`Error::NotKept`] if the server already keeps its maximum number of locks, or keeps no lock
    /// for so long; [`Error::Unsupported`] if the server is too old. In both cases, the lock is
    /// released. The other errors are those of [`Guard::release`]. When a callback of this guard
    /// calls this method, the lock is released instead of kept.
    ///
    /// ```
    /// use latchd::client::{Address, Client};
    /// use std::time::Duration;
    ///
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server: Address = "127.0.0.1:6388".parse()?;
    /// # let (_running, server) = Server::in_place_of(server);
    /// let client = Client::new([server]);
    /// let guard = client.lock("report").acquire()?;
    /// // ... work that is to be done at most once an hour ...
    /// guard.keep_for(Duration::from_secs(3600))?;
    /// assert!(client.lock("report").try_acquire()?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn keep_for(self, time: Duration) -> Result<(), Error> {
        self.end(Order::KeepUntil(Moment::now() + time))
    }

    /// Whether this process is a forked child of the process that acquired the lock. The keeper's
    /// thread does not exist in the child, and may have held the mutex at the fork.
    fn is_forked(&self) -> bool {
        process::id() != self.owner
    }

    /// Whether this thread is the keeper, running a callback. The keeper must not wait for itself.
    fn is_keeper_thread(&self) -> bool {
        let keeper = self.keeper.as_ref();
        keeper.is_some_and(|keeper| keeper.thread().id() == thread::current().id())
    }

    /// Gives the keeper the order to end the hold, and waits until the hold has ended. After a
    /// loss, waits only until the connection is closed, and not for the keeper's thread, because
    /// the callback for the loss may take long.
    fn order_end(&mut self, order: Order) {
        let is_own = self.is_keeper_thread();
        let Some(keeper) = self.keeper.take() else {
            return;
        };
        let mut hold = self.shared.lock();
        hold.order = Some(order);
        self.shared.bell.set();
        if is_own {
            return;
        }
        let ended = &self.shared.ended;
        let waited = ended.wait_while(hold, |hold| hold.outcome.is_none());
        let loss = waited.unwrap_or_else(PoisonError::into_inner).loss;
        if loss.is_none() {
            let _ = keeper.join();
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.is_forked() {
            // The thread does not exist here, so this must not wait for it.
            return mem::forget(self.keeper.take());
        }
        // From here on, a loss is not reported to the callbacks.
        let mut hold = self.shared.lock();
        let callbacks = (hold.on_lost.take(), hold.on_silence.take());
        drop(hold);
        // Give the order first, because dropping the callbacks may panic.
        self.order_end(Order::Release);
        drop(callbacks);
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guard({:?}, {:?})", self.grant.token, self.grant.lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Address;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    const LEASE: Duration = Duration::from_secs(4);

    fn guard_of(shared: Arc<Shared>, keeper: Option<JoinHandle<()>>) -> Guard {
        let token = "0123456789abcdef0123456789abcdef".parse().expect("a token");
        Guard {
            shared,
            keeper,
            grant: Grant {
                token,
                lease: LEASE,
            },
            slot_numbers: Vec::new(),
            asked: Asked {
                key: Some("k".into()),
                server: "alone".parse().expect("an address"),
            },
            owner: process::id(),
        }
    }

    #[test]
    fn a_dropped_guard_waits_for_the_connection_of_a_lost_lock() {
        let shared = Arc::new(Shared::new(Moment::now(), LEASE).expect("a descriptor"));
        shared.lock().loss = Some(Loss::Closed);
        let is_closed = Arc::new(AtomicBool::new(false));
        let (shared_of_keeper, closed) = (Arc::clone(&shared), Arc::clone(&is_closed));
        let keeper = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            closed.store(true, Ordering::SeqCst);
            shared_of_keeper.set_outcome(Err(Error::Cancelled));
        });
        drop(guard_of(shared, Some(keeper)));
        assert!(is_closed.load(Ordering::SeqCst));
    }

    #[test]
    fn a_guard_past_its_deadline_is_not_held() {
        // A stopped keeper has reported no loss.
        let guard = |sent_at| {
            let shared = Shared::new(sent_at, LEASE).expect("a descriptor");
            guard_of(Arc::new(shared), None)
        };
        let now = Moment::now();
        assert!(guard(now).is_held());
        assert!(!guard(now - Duration::from_secs(3)).is_held());
    }

    #[test]
    fn a_grant_given_up_is_released_if_its_connection_has_ended() {
        let directory = crate::os::short_directory();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).expect("a socket");
        listener.set_nonblocking(true).expect("a setting");
        let server = Address::Unix(path);
        for is_closed in [true, false] {
            // The lease is over, so the release is tried once.
            let held = Granted::unconnected(&server, Moment::now() - LEASE, LEASE, LEASE);
            let error = if is_closed {
                Error::closed(&server, true)
            } else {
                Error::LeaseExpired(held.asked())
            };
            held.give_up(error);
            assert_eq!(listener.accept().is_ok(), is_closed);
        }
    }
}
