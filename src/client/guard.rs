//! A lock that is held: renewed in the background, released when dropped, and known to be lost
//! before the server can have given it to anybody else.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, unbounded, Receiver, Sender};
use parking_lot::Mutex;
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};

use super::connection::{Connection, Grant, Terms, Token};
use super::error::Error;

/// Leases up to this are renewed at a third of their length, longer ones at half of it.
const SHORT_LEASE: Duration = Duration::from_secs(6);

/// The longest time by which we give a lease up before the server can.
const MAX_MARGIN: Duration = Duration::from_secs(2);

/// A keeper needs little.
const STACK_LEN: usize = 128 * 1024;

/// How a lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The connection ended, and with it what it held.
    Closed,
    /// The server refused the renewal: the lease was over, or the lock was released by its token.
    Refused,
    /// No renewal was answered in time; the lease may be over at any moment.
    Deadline,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::Closed => "the connection to the server ended",
            Loss::Refused => "the server refused to renew it",
            Loss::Deadline => "the server did not renew it in time",
        })
    }
}

/// A held lock or semaphore slot. Dropping it releases, and blocks as [`Guard::release`] does, but nobody
/// learns of an error.
///
/// A thread of its own renews the lease, at half its length and sooner for short leases, and watches
/// the connection. The lock counts as lost when the connection ends, when a renewal is refused, and
/// when the lease could end on the server: [`Guard::is_held`] turns false *before* that, by a margin of
/// two seconds or a quarter of the lease, whichever is less. Nothing reconnects: a lock that was lost
/// may be somebody else's.
///
/// All its methods can be called from several threads.
///
/// ```
/// use latchd::client::{Address, Client};
/// use std::time::Duration;
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let running = Server::in_place_of(server);
/// # let server = running.address();
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
pub struct Guard {
    shared: Arc<Shared>,
    orders: Sender<Order>,
    bell: Arc<OwnedFd>,
    keeper: Option<JoinHandle<()>>,
    grant: Grant,
}

struct Shared {
    hold: Mutex<Hold>,
}

struct Hold {
    /// Until when the lock is certainly ours.
    deadline: Instant,
    loss: Option<Loss>,
    on_lost: Option<Box<dyn FnOnce(Loss) + Send>>,
}

/// What the guard asks of its keeper.
enum Order {
    Release(Sender<Result<(), Error>>),
    Renew(Sender<bool>),
}

impl Guard {
    /// Takes charge of a grant whose lease began at `sent_at` or later. `terms` names the lease that
    /// renewals ask for.
    ///
    /// # Errors
    ///
    /// [`Error::Unreachable`] if no thread or descriptor can be had; the connection is closed then.
    pub(super) fn new(
        connection: Connection,
        key: &str,
        terms: Terms,
        grant: Grant,
        sent_at: Instant,
    ) -> Result<Guard, Error> {
        let shared = Arc::new(Shared {
            hold: Mutex::new(Hold {
                deadline: deadline_of(sent_at, grant.lease),
                loss: None,
                on_lost: None,
            }),
        });
        // Each ring is heard once, so that orders that come together are all carried out.
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let bell = Arc::new(eventfd(0, flags).map_err(std::io::Error::from)?);
        let (orders, inbox) = unbounded();
        let keeper = Keeper {
            connection,
            key: key.to_owned(),
            terms,
            token: grant.token,
            lease: grant.lease,
            renew_at: sent_at + renewal_interval(grant),
            shared: Arc::clone(&shared),
            inbox,
            bell: Arc::clone(&bell),
        };
        let keeper = thread::Builder::new()
            .name("keeper".into())
            .stack_size(STACK_LEN)
            .spawn(move || keeper.keep())?;
        Ok(Guard {
            shared,
            orders,
            bell,
            keeper: Some(keeper),
            grant,
        })
    }

    /// The grant's token. What the lock protects should be given its [`Token::fence`] with each write, and
    /// refuse one that is lower than it has seen: a holder may have stood still since it last looked at
    /// [`Guard::is_held`].
    pub fn token(&self) -> Token {
        self.grant.token
    }

    /// The length of the lease that was granted, in whole seconds; each renewal asks for it anew.
    pub fn lease(&self) -> Duration {
        self.grant.lease
    }

    /// Whether the lock is certainly ours at this moment. Does not block.
    pub fn is_held(&self) -> bool {
        let hold = self.shared.hold.lock();
        hold.loss.is_none() && Instant::now() < hold.deadline
    }

    /// How the lock was lost, if it was. Does not block. The keeper may find out a moment after
    /// [`Guard::is_held`] has turned false.
    pub fn loss(&self) -> Option<Loss> {
        self.shared.hold.lock().loss
    }

    /// Has `callback` called once when the lock is lost, on the keeper's thread; at once, on this
    /// one, if it is lost already. It replaces an earlier callback.
    pub fn on_lost(&self, callback: impl FnOnce(Loss) + Send + 'static) {
        let mut hold = self.shared.hold.lock();
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

    /// Renews now, and says whether the lock is still ours. Blocks for the server's answer, but not
    /// beyond the end of the lease. For whoever has been stopped or suspended and does not know for how
    /// long.
    pub fn renew(&self) -> bool {
        let (answer, answered) = bounded(1);
        self.give(Order::Renew(answer));
        answered.recv().unwrap_or(false) && self.is_held()
    }

    /// Releases, and tells whether the server agreed. Blocks for its answer, at most for the reply timeout
    /// of the client's [`Settings`](super::Settings); a renewal that is under way comes first, at most to
    /// the end of the lease.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the lock was no longer ours, [`Error::Closed`] if it had been lost before,
    /// or what can go wrong with a reply. The lock is not held in any case.
    pub fn release(mut self) -> Result<(), Error> {
        let (answer, answered) = bounded(1);
        self.give(Order::Release(answer));
        let released = answered.recv().unwrap_or(Err(Error::Closed));
        self.join();
        released
    }

    fn give(&self, order: Order) {
        // A keeper that is gone has dropped its inbox; the order's sender goes with it.
        let _ = self.orders.send(order);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn join(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            // A callback that ends its own guard need not wait for itself.
            if keeper.thread().id() != thread::current().id() {
                let _ = keeper.join();
            }
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.keeper.is_some() {
            // Nobody is told about a loss that a release has made pointless.
            let callback = self.shared.hold.lock().on_lost.take();
            drop(callback);
            let (answer, _) = bounded(1);
            self.give(Order::Release(answer));
            self.join();
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guard({:?}, {:?})", self.grant.token, self.grant.lease)
    }
}

/// The thread that keeps a lock: the only one that uses its connection.
struct Keeper {
    connection: Connection,
    key: String,
    terms: Terms,
    token: Token,
    lease: Duration,
    renew_at: Instant,
    shared: Arc<Shared>,
    inbox: Receiver<Order>,
    bell: Arc<OwnedFd>,
}

/// What the keeper woke up for.
enum Wake {
    Order,
    ServerSpoke,
    Time,
}

impl Keeper {
    fn keep(mut self) {
        let loss = loop {
            let kept = match self.sleep() {
                Wake::Order => match self.inbox.try_recv() {
                    Ok(Order::Release(answer)) => {
                        let released = self.connection.release(&self.key, self.terms, self.token);
                        let _ = answer.send(released);
                        return;
                    }
                    Ok(Order::Renew(answer)) => {
                        let renewed = self.renew();
                        let _ = answer.send(renewed.is_ok());
                        renewed
                    }
                    Err(_) => Ok(()),
                },
                // Nobody asked: it is the end of the stream, or an error on the way to it.
                Wake::ServerSpoke => Err(Loss::Closed),
                Wake::Time => self.renew(),
            };
            if let Err(loss) = kept {
                break loss;
            }
        };
        self.connection.close();
        // Orders are answered no more; a callback that gives one would wait for ever.
        drop(self.inbox);
        let mut hold = self.shared.hold.lock();
        hold.loss = Some(loss);
        let callback = hold.on_lost.take();
        drop(hold);
        if let Some(callback) = callback {
            callback(loss);
        }
    }

    /// Sleeps until it is time to renew, an order comes, or the server speaks unasked.
    fn sleep(&self) -> Wake {
        let Some(socket) = self.connection.socket() else {
            return Wake::ServerSpoke;
        };
        let left = self.renew_at.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        let mut watched = [
            PollFd::from_borrowed_fd(socket, PollFlags::IN | PollFlags::RDHUP),
            PollFd::new(&self.bell, PollFlags::IN),
        ];
        // An interrupted or failed poll is an early wake-up: renewing early does no harm.
        let _ = poll(&mut watched, timeout.as_ref());
        let [server, bell] = watched.map(|watched| watched.revents());
        if !bell.is_empty() {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
            Wake::Order
        } else if !server.is_empty() {
            Wake::ServerSpoke
        } else {
            Wake::Time
        }
    }

    fn renew(&mut self) -> Result<(), Loss> {
        let sent_at = Instant::now();
        let deadline = self.shared.hold.lock().deadline;
        let left = deadline.saturating_duration_since(sent_at);
        if left.is_zero() {
            return Err(Loss::Deadline);
        }
        match self
            .connection
            .renew_within(&self.key, self.terms, self.token, left)
        {
            Ok(lease) => {
                self.lease = lease;
                self.shared.hold.lock().deadline = deadline_of(sent_at, lease);
                self.renew_at = sent_at
                    + renewal_interval(Grant {
                        token: self.token,
                        lease,
                    });
                Ok(())
            }
            Err(Error::NoReply) => Err(Loss::Deadline),
            Err(Error::Closed | Error::Unreachable(_)) => Err(Loss::Closed),
            Err(_) => Err(Loss::Refused),
        }
    }
}

/// Until when a lease that was asked for at `sent_at` is certainly ours.
fn deadline_of(sent_at: Instant, lease: Duration) -> Instant {
    sent_at + lease - MAX_MARGIN.min(lease / 4)
}

/// How long after one renewal the next is due: with some jitter, taken from the token, so that a
/// thousand clients that started together do not renew together.
fn renewal_interval(grant: Grant) -> Duration {
    let base = if grant.lease <= SHORT_LEASE {
        grant.lease / 3
    } else {
        grant.lease / 2
    };
    let jitter = u32::try_from(grant.token.fence() % 100).expect("below a hundred");
    base - base / 1000 * jitter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guard_whose_time_is_over_is_not_held_whatever_its_keeper_does() {
        let token = "0123456789abcdef0123456789abcdef".parse().expect("a token");
        let lease = Duration::from_secs(4);
        // A keeper that stands still has told of no loss.
        let guard = |sent_at| Guard {
            shared: Arc::new(Shared {
                hold: Mutex::new(Hold {
                    deadline: deadline_of(sent_at, lease),
                    loss: None,
                    on_lost: None,
                }),
            }),
            orders: unbounded().0,
            bell: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor")),
            keeper: None,
            grant: Grant { token, lease },
        };
        let now = Instant::now();
        assert!(guard(now).is_held());
        let begun = now.checked_sub(Duration::from_secs(3));
        assert!(!guard(begun.expect("the machine runs longer")).is_held());
    }

    #[test]
    fn renewals_come_by_half_of_a_lease_or_a_third_of_a_short_one_and_not_all_at_once() {
        for (lease, latest) in [(1, 1.0 / 3.0), (6, 2.0), (7, 3.5), (60, 30.0)] {
            let mut intervals: Vec<Duration> = (0..100)
                .map(|fence| {
                    let token = format!("{fence:016x}0123456789abcdef");
                    renewal_interval(Grant {
                        token: token.parse().expect("a token"),
                        lease: Duration::from_secs(lease),
                    })
                })
                .collect();
            let latest = Duration::from_secs_f64(latest);
            assert!(intervals
                .iter()
                .all(|interval| (latest * 9 / 10..=latest).contains(interval)));
            intervals.sort_unstable();
            intervals.dedup();
            assert_eq!(intervals.len(), 100, "they come together");
        }
    }
}
