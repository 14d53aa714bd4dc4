//! A client for `latchd`: locks and semaphores for programs on one host or on many.
//!
//! Everything blocks, and each lock has a connection of its own, as the protocol expects: when the
//! process dies, the server sees the connection close and grants the lock to the next in line.
//!
//! ```
//! use latchd::client::{Address, Client};
//!
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server: Address = "127.0.0.1:6388".parse()?;
//! # let (_running, server) = Server::in_place_of(server);
//! let client = Client::new([server]);
//!
//! let guard = client.lock("nightly-backup").acquire()?;
//! guard.on_lost(|loss| eprintln!("stop everything: {loss}"));
//! // ... work, and look at guard.is_held() before each step that cannot be undone ...
//! assert!(guard.is_held());
//! guard.release()?;
//! # Ok(())
//! # }
//! ```
//!
//! - [`Client`] knows the servers, from its caller or [from the environment](Client::from_env). It
//!   makes [`Lock`]s, for locks and for semaphores alike, and a [`Lock`] acquires [`Guard`]s.
//! - [`Client::lock_all`] holds several locks together, in an order without deadlock.
//! - [`Guard`] is a held lock: renewed in the background, released when dropped. Its
//!   [`Token::fence`] is for what the lock protects, see [`Guard::token`].
//! - [`CancelHandle`] ends a blocking acquire from another thread.
//! - [`Connection`] is the protocol itself, one request at a time, for what guards do not cover. It
//!   also tells an operator who holds a key, and ends the grant of another client.
//! - With the feature `statistics`, `Client::queue` and `Connection::queues` return who holds and
//!   who waits as typed values.
//! - With the feature `tls`, the settings of a client may ask for TLS.
//!
//! # Async programs
//!
//! An async program waits on a thread for blocking calls. If the future is dropped, so is the place
//! in the queue. With tokio:
//!
//! ```
//! use latchd::client::{CancelHandle, Client, Error, Guard};
//!
//! # mod tokio { pub mod task {
//! # pub async fn spawn_blocking<T>(work: impl FnOnce() -> T) -> Result<T, ()> { Ok(work()) } } }
//! struct CancelOnDrop(CancelHandle);
//! impl Drop for CancelOnDrop {
//!     fn drop(&mut self) { self.0.cancel() }
//! }
//!
//! async fn acquire(client: Client, key: String) -> Result<Guard, Error> {
//!     let handle = CancelHandle::new().map_err(Error::System)?;
//!     let _on_drop = CancelOnDrop(handle.clone());
//!     let wait = move || client.lock(&key).cancelled_by(&handle).acquire();
//!     tokio::task::spawn_blocking(wait).await.expect("it does not panic")
//! }
//! ```
//!
//! To release blocks, too: `spawn_blocking(move || guard.release())`.
//!
//! # Nothing to report
//!
//! A claim that is not granted in time is `Ok(None)` here. In [`lockfile`](crate::lockfile) it is
//! `Err(AlreadyLocked)` or `Err(Timeout)`.
//!
//! # Time
//!
//! The protocol counts whole seconds: a `Duration` that is sent is rounded up, and one that the
//! server answers is a whole number of seconds. Leases are 1 to 9223372036 seconds long. They are
//! measured by a clock that goes on while the host is suspended.

mod address;
mod cancel;
mod connecting;
mod connection;
pub(crate) mod environment;
mod error;
mod granted;
mod guard;
mod lock_set;
mod outage;
mod settings;
mod slot;
#[cfg_attr(not(feature = "statistics"), path = "statistics/absent.rs")]
pub(crate) mod statistics;
#[cfg_attr(not(feature = "tls"), path = "tls/absent.rs")]
mod tls;

use std::time::{Duration, Instant};

use crate::protocol::abilities::Abilities;
pub(crate) use crate::protocol::limits;
pub use crate::protocol::reply::Grant;
pub use crate::protocol::request::Kind;
use crate::sys::event::Event;
use crate::sys::moment::Moment;
pub use crate::token::{InvalidToken, Token};
pub use address::{Address, Alternatives, InvalidAddress};
pub use cancel::CancelHandle;
pub use connection::{Connection, Enqueued};
use environment::Overrides;
pub use error::{Asked, Auth, Error};
pub(crate) use granted::{Claimed, Granted};
pub use guard::{Guard, Loss};
pub use lock_set::{Guards, LockSet};
pub use settings::Settings;
use slot::checked_tag;
pub use slot::{Slot, Wait};
#[cfg(feature = "statistics")]
pub use statistics::{Holder, Party, Queue, Waiter};
pub use tls::Tls;

/// One server, or several among which the keys are divided.
///
/// With several, a key belongs to the server number CRC-32 (IEEE) of the key modulo their number,
/// as in all clients of this protocol: all must name the same servers in the same order. A key
/// whose server is down cannot be acquired; no other server takes over. The servers of one cluster
/// are one [`Address`] here.
///
/// A client keeps no connection and can be shared by threads. A clone copies the addresses.
///
/// ```
/// use latchd::client::{Address, Client, Settings};
/// use std::time::Duration;
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let (_running, server) = Server::in_place_of(server);
/// let mut settings = Settings::default();
/// settings.connect_timeout = Duration::from_secs(1);
/// let client = Client::with_settings([server], settings);
///
/// let pool = client.semaphore("pool", 2);
/// let slots = [pool.acquire()?, pool.acquire()?];
/// assert!(pool.try_acquire()?.is_none(), "both slots are taken");
/// drop(slots);
/// assert!(pool.try_acquire()?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    servers: Vec<Address>,
    settings: Settings,
}

impl Client {
    /// A client of these servers, with default settings. Does not connect.
    ///
    /// # Panics
    ///
    /// Without any server.
    pub fn new(servers: impl IntoIterator<Item = Address>) -> Client {
        Client::with_settings(servers, Settings::default())
    }

    /// A client of these servers. Does not connect.
    ///
    /// # Panics
    ///
    /// Without any server.
    pub fn with_settings(servers: impl IntoIterator<Item = Address>, settings: Settings) -> Client {
        let servers: Vec<Address> = servers.into_iter().collect();
        assert!(!servers.is_empty(), "a client needs a server");
        Client { servers, settings }
    }

    /// A client of the servers that the environment names, as for latch(1): `LATCH_SERVER` lists
    /// addresses, separated by commas or blanks (127.0.0.1:6388), and `LATCH_AUTH_TOKEN_FILE` names
    /// a file with the auth token (none). `LATCH_TLS`, `LATCH_TLS_CA` and `LATCH_TLS_NAME` ask for
    /// TLS. A variable that is empty counts as unset. The other settings are the default ones.
    /// Reads the files, and does not connect.
    ///
    /// # Errors
    ///
    /// [`Error::Environment`] for a malformed address, for an empty list, for a value that is not
    /// UTF-8, and for TLS without the feature `tls`; [`Error::AuthTokenFile`] for a file that
    /// cannot be read, or does not have an auth token in it; [`Error::CaFile`] for one that cannot
    /// be read, or does not have a certificate in it.
    ///
    /// ```
    /// use latchd::client::Client;
    ///
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (_running, server) = Server::in_place_of("127.0.0.1:6388".parse()?);
    /// # std::env::set_var("LATCH_SERVER", server.to_string());
    /// # std::env::remove_var("LATCH_AUTH_TOKEN_FILE");
    /// let client = Client::from_env()?;
    /// assert!(client.lock("deploy").try_acquire()?.is_some());
    /// # assert_eq!(client.servers(), [server]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_env() -> Result<Client, Error> {
        let settings = environment::settings(&Overrides::default())?;
        Ok(Client::with_settings(environment::servers()?, settings))
    }

    /// All servers, in their order.
    pub fn servers(&self) -> &[Address] {
        &self.servers
    }

    /// The server that `key` belongs to. Does not connect.
    pub fn server_of(&self, key: &str) -> &Address {
        &self.servers[address::shard_of(key, self.servers.len())]
    }

    /// Connects to `server`, which need not be one of [`Client::servers`], with the client's
    /// settings. Blocks for at most their timeouts, see [`Settings`].
    ///
    /// # Errors
    ///
    /// As [`Connection::open`].
    pub fn connect(&self, server: &Address) -> Result<Connection, Error> {
        Connection::open(server, &self.settings)
    }

    /// Connects to `server` and sends a request that may be sent twice. On failure, tries each
    /// other server of the cluster once.
    pub(crate) fn ask<T>(
        &self,
        server: &Address,
        request: impl FnMut(&mut Connection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.ask_by(server, None, request)
    }

    /// The same before `deadline`. Each server gets its share of the time until then.
    pub(crate) fn ask_by<T>(
        &self,
        server: &Address,
        deadline: Option<Instant>,
        mut request: impl FnMut(&mut Connection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut others = server.other_count();
        loop {
            let now = Instant::now();
            let share = deadline.map(|it| it.saturating_duration_since(now) / (others + 1));
            let within = share.unwrap_or(Duration::MAX);
            let within = within.min(self.settings.connect_timeout);
            let connected = Connection::open_within(server, &self.settings, within, 0);
            let asked = connected.and_then(|mut connection| {
                connection.answer_by(share.map(|share| now + share));
                request(&mut connection)
            });
            match asked {
                Err(Error::Closed { .. } | Error::NoReply { .. }) if others > 0 => others -= 1,
                answered => return answered,
            }
        }
    }

    /// A lock: one holder at a time. Does not connect; `key` is checked when the lock is asked for.
    pub fn lock<'a>(&'a self, key: &'a str) -> Lock<'a> {
        self.slot(key, Slot::LOCK)
    }

    /// A semaphore: up to `limit` holders at a time, 1 to 1048576. All clients must agree on the
    /// limit. Does not connect.
    pub fn semaphore<'a>(&'a self, key: &'a str, limit: u32) -> Lock<'a> {
        self.slot(key, Slot::semaphore(limit))
    }

    pub(crate) fn slot<'a>(&'a self, key: &'a str, slot: Slot) -> Lock<'a> {
        Lock {
            client: self,
            key,
            slot,
            tag: "",
            needs: Abilities::default(),
            is_numbered: false,
            cancelled_by: [None; 2],
        }
    }
}

/// A lock, or a semaphore, that can be asked for. A lock is a semaphore of one, so both are
/// acquired alike. Each acquire connects anew.
///
/// A grant that comes when a quarter of its lease may be over is renewed first. The call then
/// blocks for at most the reply timeout more.
///
/// # Errors
///
/// All methods that ask the server fail alike: [`Error::Unreachable`], [`Error::NoReply`] or
/// [`Error::Closed`] if the server cannot be asked; [`Error::AuthFailed`], [`Error::MaxLocks`],
/// [`Error::MaxWaiters`], [`Error::LimitMismatch`] or [`Error::Draining`] if it refuses;
/// [`Error::LeaseExpired`] if the lease was over when the client looked at the grant;
/// [`Error::Refused`] if the server can give no fence at the moment; [`Error::Cancelled`] if [a
/// handle](Lock::cancelled_by) ended it; [`Error::InvalidKey`] and [`Error::InvalidArgument`] for
/// what cannot be sent, before anything connects.
#[derive(Clone, Copy, Debug)]
#[must_use = "it connects only when it is asked for a guard or a place"]
pub struct Lock<'a> {
    client: &'a Client,
    key: &'a str,
    slot: Slot,
    /// Empty for none.
    tag: &'a str,
    /// What the server must be able to do.
    needs: Abilities,
    is_numbered: bool,
    /// What ends the wait: the caller's handle, and the loss of a lock that is to be held together
    /// with this one.
    cancelled_by: [Option<&'a Event>; 2],
}

impl<'a> Lock<'a> {
    /// Asks for a lease of this length, in whole seconds (rounded up), rather than the server's
    /// default. A lease of zero is refused when the lock is asked for.
    pub fn lease(self, lease: Duration) -> Lock<'a> {
        Lock {
            slot: self.slot.with_lease(lease),
            ..self
        }
    }

    /// Asks for a shared lock: others may hold the key at the same time if theirs are shared, too.
    /// The order of arrival counts: a lock that is not shared waits for no shared lock behind it. A
    /// held lock cannot become a shared one, nor a shared one exclusive. Unless it names a lease,
    /// it asks for one of 33 seconds. Fails with [`Error::Unsupported`] if the server is too old.
    pub fn shared(mut self) -> Lock<'a> {
        self.slot.is_shared = true;
        self
    }

    /// Asks for `count` slots of a semaphore at once, with one grant. The lease and the server are
    /// as for [`Lock::shared`].
    pub fn slots(mut self, count: u32) -> Lock<'a> {
        self.slot.slots = Some(count);
        self
    }

    /// Makes the claim fail with [`Error::MaxWaiters`] rather than wait if `count` claims already
    /// wait for the key. The lease and the server are as for [`Lock::shared`].
    pub fn max_waiters(mut self, count: u32) -> Lock<'a> {
        self.slot.max_waiters = Some(count);
        self
    }

    /// Tells the server who asks: it shows this text to operators beside the claim and the grant.
    /// At most 128 bytes are sent, and none to a server that does not know tags. A text with a line
    /// end in it is refused when the lock is asked for.
    ///
    /// ```
    /// use latchd::client::{Address, Client};
    ///
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server: Address = "127.0.0.1:6388".parse()?;
    /// # let (_running, server) = Server::in_place_of(server);
    /// let client = Client::new([server.clone()]);
    /// let guard = client.lock("ledger").tag("worker 7").acquire()?;
    /// let holders = client.connect(&server)?.holders(Some("ledger"))?;
    /// assert!(holders.contains("worker 7"));
    /// # drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    pub fn tag(self, tag: &'a str) -> Lock<'a> {
        Lock { tag, ..self }
    }

    /// Makes the claim fail with [`Error::Unsupported`] where [`Guard::keep_for`] would.
    pub fn keepable(mut self) -> Lock<'a> {
        self.needs.adopt = true;
        self
    }

    /// Lets `handle` end the wait for a grant from another thread, also that of a place in the
    /// queue. It does not end an attempt to connect, which ends at its own timeout.
    pub fn cancelled_by(mut self, handle: &'a CancelHandle) -> Lock<'a> {
        self.cancelled_by[0] = Some(handle.event());
        self
    }

    fn given_up_at(mut self, event: &'a Event) -> Lock<'a> {
        self.cancelled_by[1] = Some(event);
        self
    }

    /// Blocks until the grant. It notices a server that has vanished from the network within a
    /// minute.
    pub fn acquire(&self) -> Result<Guard, Error> {
        loop {
            // The longest wait that the protocol knows is three hundred years.
            if let Some(guard) = self.ask(Wait::Forever)? {
                return Ok(guard);
            }
        }
    }

    /// Blocks for at most `time`, in whole seconds (rounded up), and the reply timeout, connecting
    /// included (longer for a [late grant](Lock)); `None` if no slot was free all that time.
    pub fn acquire_within(&self, time: Duration) -> Result<Option<Guard>, Error> {
        self.ask(Wait::UpTo(time))
    }

    /// Does not wait for a grant, and blocks for at most the reply timeout, connecting included
    /// (longer for a [late grant](Lock)); `None` if no slot is free.
    pub fn try_acquire(&self) -> Result<Option<Guard>, Error> {
        self.ask(Wait::No)
    }

    /// Takes a place in the queue without waiting, to wait for it later. Blocks for no longer than
    /// connecting and a reply take.
    pub fn enqueue(&self) -> Result<QueuePlace, Error> {
        let (connection, enqueued) =
            self.introduced(None, |connection| connection.enqueue(self.key, self.slot))?;
        Ok(QueuePlace {
            connection,
            key: self.key.to_owned(),
            slot: self.slot,
            is_numbered: self.is_numbered,
            enqueued,
        })
    }

    /// Whether the key and the slot can be asked for at all.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.slot.wanted(self.key).map(drop)
    }

    /// Connects to the server of the key, within the client's connect timeout and before
    /// `deadline`. `others` more servers get their share of that time.
    fn connect_by(&self, deadline: Option<Instant>, others: u32) -> Result<Connection, Error> {
        self.check()?;
        let cancelled_by = self.cancelled_by.into_iter().flatten();
        if cancelled_by.clone().any(Event::is_set) {
            return Err(Error::Cancelled);
        }
        let settings = &self.client.settings;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let within = settings.connect_timeout.min(left.unwrap_or(Duration::MAX));
        let server = self.client.server_of(self.key);
        let mut connection = Connection::open_within(server, settings, within, others)?;
        connection.needs = self.needs;
        connection.needs.slots = self.slot.is_refined();
        connection.cancelled_by = cancelled_by.cloned().collect();
        Ok(connection)
    }

    /// Connects, introduces the client and makes a claim. On failure, tries each other server of
    /// the cluster once. A server that does not know introductions may close the connection because
    /// of one: it is asked once more, without.
    fn introduced<T>(
        &self,
        deadline: Option<Instant>,
        mut claim: impl FnMut(&mut Connection) -> Result<T, Error>,
    ) -> Result<(Connection, T), Error> {
        let tag = checked_tag(self.tag)?;
        let mut is_introduced = true;
        let mut others = self.client.server_of(self.key).other_count();
        loop {
            let mut is_welcome = false;
            let connected = self.connect_by(deadline, others);
            let claimed = connected.and_then(|mut connection| {
                if is_introduced {
                    connection.introduce(tag);
                }
                let claimed = claim(&mut connection);
                is_welcome = connection.is_welcome;
                Ok((connection, claimed?))
            });
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            match claimed {
                // The server has answered, and a place in its queue is lost with it.
                claimed if is_welcome => return claimed,
                Err(Error::Closed { .. } | Error::NoReply { .. }) if others > 0 && !is_over => {
                    others -= 1;
                }
                Err(Error::Closed { .. }) if is_introduced => is_introduced = false,
                claimed => return claimed,
            }
        }
    }

    /// Asks, and waits as long as `wait` says.
    fn ask(&self, wait: Wait) -> Result<Option<Guard>, Error> {
        match self.claim(Instant::now(), wait, |_| ())? {
            Claimed::Granted(granted) => granted.keep().map(Some),
            Claimed::InVain(_) => Ok(None),
        }
    }

    /// Asks as [`Lock::ask`] does, and leaves the grant to the caller: nothing renews it. The wait
    /// counts from `began`. Shows `answered` the connection once the server has answered to the
    /// introduction.
    pub(crate) fn claim(
        &self,
        began: Instant,
        wait: Wait,
        mut answered: impl FnMut(&Connection),
    ) -> Result<Claimed, Error> {
        let deadline = wait.deadline(began, self.client.settings.reply_timeout);
        let (mut connection, (asked_at, grant)) = self.introduced(deadline, |connection| {
            let wait = wait.after(began.elapsed());
            let asked_at = Moment::now();
            let (key, slot) = (self.key, self.slot);
            let grant = connection.acquire_by(key, slot, wait, deadline, &mut answered)?;
            Ok((asked_at, grant))
        })?;
        let Some(grant) = grant else {
            connection.answer_by(deadline);
            return Ok(Claimed::InVain(connection));
        };
        Ok(Claimed::Granted(Granted {
            connection,
            key: self.key.to_owned(),
            slot: self.slot,
            grant,
            asked_at,
            is_numbered: self.is_numbered,
        }))
    }
}

/// A place in a queue. Dropping it closes its connection without blocking, and the server takes
/// back the place, or the lock if that has been granted.
///
/// A lock that was granted before the wait is held, and its lease runs; nothing renews it.
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
    connection: Connection,
    key: String,
    slot: Slot,
    is_numbered: bool,
    enqueued: Enqueued,
}

impl QueuePlace {
    /// Whether the lock was free when the place was taken, so that waiting will not take any time.
    /// Does not ask the server.
    pub fn is_granted(&self) -> bool {
        matches!(self.enqueued, Enqueued::Acquired(_))
    }

    /// Blocks until the grant or the end of the wait, and for as long as a reply takes (longer for
    /// a [late grant](Lock)); `None` if the wait is over, and the place is given up.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseExpired`] if the lease was granted and over before the wait,
    /// [`Error::Cancelled`] if the [`CancelHandle`] of its lock ended the wait (not if the lock
    /// [was granted](QueuePlace::is_granted) before), the server's refusal, or what can go wrong
    /// with a reply.
    pub fn wait(mut self, mut wait: Wait) -> Result<Option<Guard>, Error> {
        // A cancellation must not lose a grant, whose reply is due at once.
        if self.is_granted() {
            self.connection.cancelled_by.clear();
            wait = Wait::No;
        }
        // The server starts the lease anew at the wait, also if the grant came before.
        let asked_at = Moment::now();
        let Some(grant) = self.connection.wait(&self.key, self.slot, wait)? else {
            return Ok(None);
        };
        let granted = Granted {
            connection: self.connection,
            key: self.key,
            slot: self.slot,
            grant,
            asked_at,
            is_numbered: self.is_numbered,
        };
        granted.keep().map(Some)
    }
}
