//! A lock that is held: renewed in the background, released when dropped, and known to be lost
//! before the server can grant it to another holder.

mod keeper;
mod timing;

use std::fmt;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::process;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::address::Address;
use super::error::{Asked, Error};
use super::granted::Granted;
use crate::sys::event::Event;
use crate::sys::moment::Moment;
use crate::token::{Grant, Token};
use keeper::Keeper;
use timing::{deadline_of, end_of, fits};

/// The stack of a keeper, in bytes. The documentation of the callbacks names it.
const STACK_LEN: usize = 128 * 1024;

/// How a lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The connection ended, and no server renewed the lock over another one.
    Closed,
    /// The server refused the renewal: the lease was over, or the lock was released by its token.
    Refused,
    /// No renewal was answered in time; the lease may be over at any moment.
    Deadline,
    /// This process is a child, by fork(2), of the one that acquired the lock.
    Forked,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::Closed => {
                "the connection to the server ended: the lock was released, or broken by another"
            }
            Loss::Refused => "the server refused to renew it: it was released or broken by another",
            Loss::Deadline => "the server did not renew it in time",
            Loss::Forked => "it belongs to the process that acquired it, and this is its child",
        })
    }
}

/// A held lock or semaphore slot. Dropping it releases, and blocks as [`Guard::release`] does; an
/// error is lost then.
///
/// A thread of its own, the keeper, renews the lease, at half its length, sooner for short leases
/// and after 15 seconds at most, and watches the connection. The lock counts as lost when a renewal
/// is refused, and when the lease could end on the server: [`Guard::is_held`] turns false *before*
/// that, by two seconds or a quarter of the lease, whichever is less.
///
/// When the connection ends, [`Guard::is_held`] turns false, and the keeper connects again, at once
/// and then after pauses of 50 milliseconds to a second, until the lease could end. Over the new
/// connection it adopts the lock with its token, and the lock is held as before. If the server
/// refuses that, because it released the lock with the connection or does not know how to adopt,
/// the lock is lost. A server that is alone, and whose grants end with it, is given up when it has
/// refused connections for two seconds.
///
/// If a server leaves a renewal unanswered for a second, it may be slow, or the way to it or its
/// host may have vanished: the keeper adopts the lock over another connection, or over one to
/// another server of the cluster (see [`Address::Cluster`](super::Address::Cluster)), and keeps the
/// first one until that is done.
///
/// All its methods can be called from several threads. It belongs to the process that acquired it:
/// to a child by fork(2), the lock is lost ([`Loss::Forked`]). When the child drops its copy, it
/// only closes its copy of the connection. It should do so soon: while it is open, the server does
/// not notice the end of the parent.
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
    hold: Mutex<Hold>,
    /// The socket, for a child of this process to close; negative if there is none.
    socket: AtomicI32,
    /// Wakes the keeper.
    bell: Event,
    /// Wakes the guard that waits for [`Hold::outcome`].
    ended: Condvar,
}

impl Shared {
    /// What a lock that was just granted needs.
    fn new(deadline: Moment) -> Result<Shared, Error> {
        Ok(Shared {
            hold: Mutex::new(Hold {
                deadline,
                is_cut: false,
                loss: None,
                on_lost: None,
                on_silence: None,
                asking: Vec::new(),
                order: None,
                outcome: None,
            }),
            socket: AtomicI32::new(-1),
            bell: Event::new().map_err(Error::System)?,
            ended: Condvar::new(),
        })
    }

    /// Records which socket a child of this process must close, if any.
    fn set_socket(&self, socket: Option<BorrowedFd<'_>>) {
        let socket = socket.map_or(-1, |socket| socket.as_raw_fd());
        self.socket.store(socket, Ordering::Relaxed);
    }

    /// Closes the socket in a child of this process, where its owner, the keeper, does not run.
    fn close_socket(&self) {
        let socket = self.socket.swap(-1, Ordering::Relaxed);
        if socket >= 0 {
            let _ = nix::unistd::close(socket);
        }
    }

    /// Records how the hold ended, and wakes the guard that waits for that.
    fn end(&self, outcome: Result<(), Error>) {
        self.hold().outcome = Some(outcome);
        self.ended.notify_all();
    }

    /// No callback runs under the mutex, so no panic can leave it half-changed.
    fn hold(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Hold {
    /// Until then the lock is certainly held, if there is a connection.
    deadline: Moment,
    /// The connection has ended, and no renewal over another one was answered yet.
    is_cut: bool,
    loss: Option<Loss>,
    on_lost: Option<Box<dyn FnOnce(Loss) + Send>>,
    on_silence: Option<OnSilence>,
    /// Called with the outcome of the next renewal, which is due at once if there are any.
    asking: Vec<RenewalCallback>,
    /// How the guard has ordered the hold to end.
    order: Option<Order>,
    /// How that order ended: it was carried out, or the lock was lost. The keeper sets it once it
    /// has closed the connection.
    outcome: Option<Result<(), Error>>,
}

/// How a hold ends.
#[derive(Clone, Copy, Debug)]
enum Order {
    Release,
    /// The server keeps the lock until then.
    KeepUntil(Moment),
}

/// The callback for a silent server.
struct OnSilence {
    /// How long before the deadline it is called.
    lead: Duration,
    callback: Box<dyn FnOnce() + Send>,
}

/// What is called with the outcome of a renewal; dropped if the lock is lost.
type RenewalCallback = Box<dyn FnOnce(bool) + Send>;

impl Guard {
    /// Starts the keeper of a grant. Fails with [`Error::System`] if this host has no thread or
    /// descriptor left, and closes the connection.
    pub(super) fn new(held: Granted, slot_numbers: Vec<u32>) -> Result<Guard, Error> {
        let grant = held.grant;
        let shared = Arc::new(Shared::new(deadline_of(held.asked_at, grant.lease))?);
        let asked = Asked {
            key: Some(held.key.clone()),
            server: held.connection.server.clone(),
        };
        let keeper = Keeper::new(held, Arc::clone(&shared))?;
        let keeper = thread::Builder::new()
            .name("keeper".into())
            .stack_size(STACK_LEN)
            .spawn(move || keeper.keep())
            .map_err(Error::System)?;
        Ok(Guard {
            shared,
            keeper: Some(keeper),
            grant,
            slot_numbers,
            asked,
            owner: process::id(),
        })
    }

    /// The key that is held.
    pub fn key(&self) -> &str {
        self.asked.key.as_deref().unwrap_or_default()
    }

    /// The server that it is held at.
    pub(crate) fn server(&self) -> &Address {
        &self.asked.server
    }

    /// The fence of the grant, see [`Guard::token`].
    pub fn fence(&self) -> u64 {
        self.grant.token.fence()
    }

    /// Whether this process is a child of the one that acquired the lock. The keeper's thread does
    /// not exist here, and may have held the mutex.
    fn is_copy(&self) -> bool {
        process::id() != self.owner
    }

    /// The grant's token. Send its [`Token::fence`] with each write to what the lock protects,
    /// which should refuse a fence lower than the highest it has seen: a holder may have been
    /// stopped since it last called [`Guard::is_held`].
    pub fn token(&self) -> Token {
        self.grant.token
    }

    /// The length of the lease that was granted, in whole seconds; each renewal asks for it anew.
    pub fn lease(&self) -> Duration {
        self.grant.lease
    }

    /// Whether the lock is certainly held at this moment. Does not block. After false, it can be
    /// true again, unless the lock is [lost](Guard::loss).
    pub fn is_held(&self) -> bool {
        if self.is_copy() {
            return false;
        }
        let hold = self.shared.hold();
        hold.loss.is_none() && !hold.is_cut && Moment::now() < hold.deadline
    }

    /// When the lease ends on the server at the latest, unless it is renewed before.
    pub(crate) fn lease_ends_at(&self) -> Moment {
        end_of(self.shared.hold().deadline, self.grant.lease)
    }

    /// The error for a lost lock, if it is lost.
    pub(super) fn lost(&self) -> Option<Error> {
        let lost = |loss| Error::Lost(self.asked.clone(), loss);
        self.loss().map(lost)
    }

    /// How the lock was lost, if it was. Does not block. The keeper may find out a moment after
    /// [`Guard::is_held`] has turned false.
    pub fn loss(&self) -> Option<Loss> {
        match self.is_copy() {
            true => Some(Loss::Forked),
            false => self.shared.hold().loss,
        }
    }

    /// Has `callback` called once when the lock is lost, on the keeper's thread, whose stack is
    /// 128 KiB; at once, on this one, if it is lost already. It replaces an earlier callback.
    pub fn on_lost(&self, callback: impl FnOnce(Loss) + Send + 'static) {
        if self.is_copy() {
            return callback(Loss::Forked);
        }
        let mut hold = self.shared.hold();
        match hold.loss {
            None => {
                let earlier = hold.on_lost.replace(Box::new(callback));
                // What it holds may ask this guard when it is dropped.
                drop(hold);
                drop(earlier);
            }
            Some(loss) => {
                drop(hold);
                callback(loss);
            }
        }
    }

    /// Has `callback` called once, on the keeper's thread, when the server leaves a renewal
    /// unanswered and `lead` is all that is left until the lock counts as lost: what the lock
    /// protects can be brought to an end in that time. It replaces an earlier callback. Does not
    /// block.
    ///
    /// The lease is renewed sooner from now on, at half of the time that the server has until then.
    /// Gives false, and calls nothing, if `lead` is more than half of the lease.
    ///
    /// The callback should be short: until it returns, nothing is renewed, and no loss is noticed.
    /// Its stack is 128 KiB. If it panics, the keeper closes the connection, and the lock is lost.
    pub fn on_silence(&self, lead: Duration, callback: impl FnOnce() + Send + 'static) -> bool {
        let callback = Box::new(callback);
        let silence = fits(lead, self.grant.lease).then_some(OnSilence { lead, callback });
        let is_fit = silence.is_some();
        if self.is_copy() {
            return is_fit;
        }
        let earlier = mem::replace(&mut self.shared.hold().on_silence, silence);
        self.shared.bell.set();
        // What it holds may ask this guard when it is dropped.
        drop(earlier);
        is_fit
    }

    /// Renews now, and tells whether the lock is still held. Blocks for the server's answer, but
    /// not beyond the end of the lease. In a callback of this guard it does not block: the renewal
    /// follows the callback.
    pub fn renew(&self) -> bool {
        let (answer, answered) = channel();
        self.renew_and(move |is_held| {
            let _ = answer.send(is_held);
        });
        if self.is_kept_by_this_thread() {
            return self.is_held();
        }
        answered.recv().unwrap_or(false) && self.is_held()
    }

    /// Renews now, and has `answer` called on the keeper's thread with whether the lock is still
    /// held; it is dropped uncalled if the lock is lost. Does not block.
    pub(crate) fn renew_and(&self, answer: impl FnOnce(bool) + Send + 'static) {
        if self.is_copy() {
            return;
        }
        let mut hold = self.shared.hold();
        if hold.loss.is_none() {
            hold.asking.push(Box::new(answer));
        }
        drop(hold);
        self.shared.bell.set();
    }

    /// Releases, and tells whether the server agreed. Blocks for its answer, at most for the reply
    /// timeout of the client's [`Settings`](super::Settings); a renewal that is under way comes
    /// first, at most until the end of the lease. In a callback of this guard it does not block:
    /// the release follows the callback, and `Ok` does not say that the server agreed.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the lock was no longer held, [`Error::Lost`] if it had been lost
    /// before, [`Error::Unreachable`] if no server could be reached (the key is free when the lease
    /// ends), or what can go wrong with a reply. The lock is not held in any case.
    pub fn release(self) -> Result<(), Error> {
        self.end(Order::Release)
    }

    fn end(mut self, order: Order) -> Result<(), Error> {
        if self.is_copy() {
            return Err(Error::Lost(self.asked.clone(), Loss::Forked));
        }
        if self.is_kept_by_this_thread() && self.loss().is_none() {
            // Dropping the guard orders the release.
            return Ok(());
        }
        self.give(order);
        let outcome = self.shared.hold().outcome.take();
        outcome.expect("the keeper has ended the hold")
    }

    /// Leaves the lock to the server, which keeps it for `time` from now on, in whole seconds
    /// (rounded up): nobody else is granted it before, although no process holds it. Its
    /// [token](Guard::token) releases it sooner, see [`Connection::release`]. Blocks as
    /// [`Guard::release`] does. A time of zero releases.
    ///
    /// [`Connection::release`]: super::Connection::release
    ///
    /// # Errors
    ///
    /// [`Error::NotKept`] if the server keeps no more locks, or none for so long, and
    /// [`Error::Unsupported`] if it is too old: the lock is released then. Otherwise those of
    /// [`Guard::release`]. In a callback of this guard, it is released, and not kept.
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

    /// Whether the keeper is this thread, which runs a callback: it cannot wait for itself.
    fn is_kept_by_this_thread(&self) -> bool {
        let keeper = self.keeper.as_ref();
        keeper.is_some_and(|keeper| keeper.thread().id() == thread::current().id())
    }

    /// Has the keeper end the hold, and waits until it has, or has closed the connection of a lost
    /// lock. In the latter case it does not wait for the thread, whose callback for the loss may
    /// take its time.
    fn give(&mut self, order: Order) {
        let is_own = self.is_kept_by_this_thread();
        let Some(keeper) = self.keeper.take() else {
            return;
        };
        if self.is_copy() {
            // A forked child does not have that thread.
            mem::forget(keeper);
            return self.shared.close_socket();
        }
        let mut hold = self.shared.hold();
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
        if self.is_copy() {
            return self.give(Order::Release);
        }
        // A loss after this point is of no interest to the callbacks.
        let mut hold = self.shared.hold();
        let callbacks = (hold.on_lost.take(), hold.on_silence.take());
        drop(hold);
        // First, because dropping the callbacks may panic.
        self.give(Order::Release);
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
    use std::sync::atomic::AtomicBool;

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
        let deadline = deadline_of(Moment::now(), LEASE);
        let shared = Arc::new(Shared::new(deadline).expect("a descriptor"));
        shared.hold().loss = Some(Loss::Closed);
        let is_closed = Arc::new(AtomicBool::new(false));
        let (shared_of_keeper, closed) = (Arc::clone(&shared), Arc::clone(&is_closed));
        let keeper = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            closed.store(true, Ordering::SeqCst);
            shared_of_keeper.end(Err(Error::Cancelled));
        });
        drop(guard_of(shared, Some(keeper)));
        assert!(is_closed.load(Ordering::SeqCst));
    }

    #[test]
    fn a_guard_past_its_deadline_is_not_held() {
        // A stopped keeper has reported no loss.
        let guard = |sent_at| {
            let shared = Shared::new(deadline_of(sent_at, LEASE)).expect("a descriptor");
            guard_of(Arc::new(shared), None)
        };
        let now = Moment::now();
        assert!(guard(now).is_held());
        assert!(!guard(now - Duration::from_secs(3)).is_held());
    }
}
