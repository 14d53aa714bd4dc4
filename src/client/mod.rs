//! A client for `latchd`: locks and semaphores for programs on one host or on many.
//!
//! All requests block. Each lock has its own connection, as the protocol expects: when the process
//! dies, the server sees the connection close and grants the lock to the next waiter.
//!
//! ```
//! use latchd::client::Client;
//!
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let _running = Server::in_place_of("127.0.0.1:6388".parse()?);
//! let client = Client::from_env()?; // LATCH_SERVER and the secret, as for latch
//! let guard = client.lock("nightly-backup").acquire()?;
//! guard.on_lost(|loss| eprintln!("stop everything: {loss}"));
//! // ... work, and look at guard.is_held() before each step that cannot be undone ...
//! assert!(guard.is_held());
//! guard.release()?;
//! # Ok(())
//! # }
//! ```
//!
//! - [`Client`] has a list of servers, given by the caller or [by the
//!   environment](Client::from_env). It makes [`Lock`]s, for locks and for semaphores. A [`Lock`]
//!   acquires [`Guard`]s.
//! - [`Client::lock_all`] acquires several locks in an order that avoids deadlock.
//! - [`Guard`] is a held lock. It is renewed in the background and released when dropped. Send its
//!   fence with each write to the resource that the lock protects: see [`Guard::token`].
//! - [`CancelHandle`] ends a blocking acquire from another thread.
//! - [`Connection`] sends single requests of the protocol. For example, an operator can list the
//!   holders of a key, and end the grant of another client.
//! - [`Client::queue`] and [`Connection::queues`] return the holders and the waiters as typed
//!   values.
//! - With the feature `tls`, the settings of a client can ask for TLS.
//!
//! # Async programs
//!
//! An async program makes the blocking call on another thread. In this example for tokio, dropping
//! the future also gives up the place in the queue:
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
//! Releasing blocks, too: call `spawn_blocking(move || guard.release())`.
//!
//! # Claims that are not granted in time
//!
//! In this module, a claim that is not granted in time returns `Ok(None)`. In
//! [`lockfile`](crate::lockfile), it returns `Err(AlreadyLocked)` or `Err(Timeout)`.
//!
//! # Time
//!
//! The protocol counts in whole seconds. The client rounds a `Duration` up before sending it, and a
//! granted lease is a whole number of seconds. A lease is 1 to 9223372036 seconds long. The client
//! measures it by a clock that keeps running while the host is suspended.

mod address;
mod attempts;
mod cancel;
mod claim;
mod connecting;
mod connection;
pub(crate) mod environment;
mod error;
mod granted;
mod guard;
mod lock_set;
mod settings;
pub(crate) mod statistics;
#[cfg_attr(not(feature = "tls"), path = "tls/absent.rs")]
mod tls;

use std::time::{Duration, Instant};

use crate::os::event::{time_left, Event};
use crate::os::moment::Moment;
use crate::wire::abilities::Abilities;
#[cfg(feature = "programs")]
pub(crate) use crate::wire::limits;
pub use crate::wire::reply::Grant;
pub use crate::wire::terms::Kind;
pub use crate::wire::token::{InvalidToken, Token};
pub use address::{Address, Alternatives, InvalidAddress};
pub use cancel::CancelHandle;
use claim::checked_tag;
pub(crate) use claim::{default_tag, ENDED};
pub use claim::{Claim, Wait};
use connecting::end_of_share;
pub use connection::{Connection, Enqueued};
use environment::Overrides;
pub use error::{Asked, Auth, Error, KeepLimit, Loss};
pub(crate) use granted::{Claimed, Granted, Progress};
pub use guard::Guard;
pub use lock_set::{Guards, LockSet};
pub use settings::Settings;
pub use statistics::{Holder, Party, Queue, Waiter};
pub use tls::Tls;

/// The former name of [`Claim`].
pub type Slot = Claim;

/// A client of one server, or of several servers among which the keys are divided.
///
/// If there are several servers, the CRC-32 (IEEE) of a key, modulo the number of servers, is the
/// index of its server in the list. All clients of this protocol do the same, so all must list the
/// same servers in the same order. A key whose server is down cannot be acquired; no other server
/// takes over. The servers of one cluster share one [`Address`].
///
/// A client keeps no connection open. Several threads can share it. A clone copies the addresses.
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
    /// Makes a client of these servers, with default settings. Does not connect.
    ///
    /// # Panics
    ///
    /// If `servers` is empty.
    pub fn new(servers: impl IntoIterator<Item = Address>) -> Client {
        Client::with_settings(servers, Settings::default())
    }

    /// Makes a client of these servers. Does not connect.
    ///
    /// # Panics
    ///
    /// If `servers` is empty.
    pub fn with_settings(servers: impl IntoIterator<Item = Address>, settings: Settings) -> Client {
        let servers: Vec<Address> = servers.into_iter().collect();
        assert!(!servers.is_empty(), "a client needs a server");
        Client { servers, settings }
    }

    /// Makes a client of the servers that the environment names, as latch(1) does. `LATCH_SERVER`
    /// is the address of one service (default: 127.0.0.1:6388). `LATCH_SHARDS` lists the servers
    /// that divide the keys instead, separated by commas, in the same order for all clients.
    /// `LATCH_AUTH_TOKEN_FILE` names a file with the auth token (default: none). `LATCH_TLS`,
    /// `LATCH_TLS_CA` and `LATCH_TLS_NAME` ask for TLS. An empty variable counts as unset. All
    /// other settings have their defaults. Reads the files, but does not connect.
    ///
    /// # Errors
    ///
    /// [`Error::Environment`] if an address is malformed, `LATCH_SERVER` is a list, or a value is
    /// not UTF-8. The same error if both variables with addresses are set, or if one asks for TLS
    /// in a build without the feature `tls`. [`Error::AuthTokenFile`] if that file cannot be read
    /// or contains no valid auth token; [`Error::CaFile`] if that file cannot be read or contains
    /// no certificate; [`Error::InvalidArgument`] if `LATCH_TLS_NAME` is neither a host name nor an
    /// IP address.
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
        Ok(Client::with_settings(
            environment::servers([None, None])?,
            settings,
        ))
    }

    /// Returns all servers, in the order in which they were given.
    pub fn servers(&self) -> &[Address] {
        &self.servers
    }

    /// Returns the server that `key` belongs to. Does not connect.
    pub fn server_of(&self, key: &str) -> &Address {
        &self.servers[address::shard_of(key, self.servers.len())]
    }

    /// Connects to `server` with the client's settings. The server need not be one of
    /// [`Client::servers`]. Blocks for at most the connect timeout.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`Connection::open`].
    pub fn connect(&self, server: &Address) -> Result<Connection, Error> {
        Connection::open(server, &self.settings)
    }

    /// Connects to `server` and sends a request that is safe to send twice. If the server closes
    /// the connection or does not reply, tries each other server of the cluster once. Each server
    /// gets an equal share of the time until `deadline`.
    pub(crate) fn ask<T>(
        &self,
        server: &Address,
        deadline: Option<Instant>,
        mut request: impl FnMut(&mut Connection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.first_answer(server, deadline, |dial| {
            let mut connection = dial()?;
            let servers_left = connection.servers_left;
            let due = deadline.map(|deadline| end_of_share(deadline, servers_left));
            connection.shorten_reply_timeout(due);
            request(&mut connection)
        })
    }

    /// Calls `ask` with a function that connects to `server`. If the server closes the connection
    /// or does not reply, tries each other server of the cluster once, until `deadline`. Each
    /// attempt leaves a share of the time for the others.
    fn first_answer<T>(
        &self,
        server: &Address,
        deadline: Option<Instant>,
        mut ask: impl FnMut(&dyn Fn() -> Result<Connection, Error>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut servers_left = server.other_count();
        loop {
            let answer = ask(&|| Connection::dial(server, &self.settings, deadline, servers_left));
            let is_over = deadline.is_some_and(|deadline| time_left(deadline).is_zero());
            let is_unanswered = matches!(answer, Err(Error::Closed { .. } | Error::NoReply { .. }));
            if !is_unanswered || servers_left == 0 || is_over {
                return answer;
            }
            servers_left -= 1;
        }
    }

    /// Returns a lock, which has one holder at a time unless it is [shared](Lock::shared). Does not
    /// connect. The methods that acquire the lock check `key`.
    pub fn lock<'a>(&'a self, key: &'a str) -> Lock<'a> {
        self.lock_for(key, Claim::LOCK)
    }

    /// Returns a semaphore with up to `limit` holders at a time. The limit must be 1 to 1048576,
    /// and the same in all clients. Does not connect.
    pub fn semaphore<'a>(&'a self, key: &'a str, limit: u32) -> Lock<'a> {
        self.lock_for(key, Claim::semaphore(limit))
    }

    pub(crate) fn lock_for<'a>(&'a self, key: &'a str, claim: Claim) -> Lock<'a> {
        Lock {
            client: self,
            key,
            claim,
            tag: None,
            needs: Abilities::NONE,
            is_numbered: false,
            cancelled_by: [None; 2],
        }
    }
}

/// A lock or a semaphore that a client can acquire. A lock is a semaphore with one slot, so both
/// are acquired in the same way. Each acquire makes a new connection.
///
/// If a quarter of the lease may be over when the grant arrives, the client renews the lease before
/// it returns the guard. The call then blocks for up to another reply timeout.
///
/// # Errors
///
/// All methods that ask the server fail in the same ways: [`Error::Unreachable`],
/// [`Error::NoReply`] or [`Error::Closed`] if the server cannot be reached or does not answer;
/// [`Error::AuthFailed`], [`Error::MaxLocks`], [`Error::MaxWaiters`], [`Error::LimitMismatch`] or
/// [`Error::Draining`] if the server refuses; [`Error::LeaseExpired`] if the lease was over before
/// the client handled the grant; [`Error::Refused`] if the server cannot issue a fence at the
/// moment; [`Error::Cancelled`] if [a handle](Lock::cancelled_by) ended the wait;
/// [`Error::InvalidKey`] or [`Error::InvalidArgument`] if a value cannot be sent (checked before
/// connecting).
#[derive(Clone, Copy, Debug)]
#[must_use = "it connects only when it is asked for a guard"]
pub struct Lock<'a> {
    client: &'a Client,
    key: &'a str,
    claim: Claim,
    /// `None` for the default tag; empty for no tag.
    tag: Option<&'a str>,
    /// The abilities that the server must have.
    needs: Abilities,
    is_numbered: bool,
    /// The events that end the wait: the caller's handle, and the loss of another lock of the set.
    cancelled_by: [Option<&'a Event>; 2],
}

impl<'a> Lock<'a> {
    /// Asks for a lease of this length, rounded up to whole seconds, instead of the server's
    /// default. With a lease of zero, acquiring fails.
    pub fn lease(self, lease: Duration) -> Lock<'a> {
        Lock {
            claim: self.claim.with_lease(lease),
            ..self
        }
    }

    /// Asks for a shared lock: other clients can hold the key at the same time if their locks are
    /// shared, too. Claims are served in order of arrival: an exclusive claim does not wait for
    /// shared claims that arrive after it. A held lock cannot change between shared and exclusive.
    /// The default lease is 33 seconds. Acquiring fails with [`Error::Unsupported`] if the server
    /// is too old.
    pub fn shared(mut self) -> Lock<'a> {
        self.claim.is_shared = true;
        self
    }

    /// Asks for `count` slots of a semaphore at once, in one grant. The default lease is 33
    /// seconds. Acquiring fails with [`Error::Unsupported`] if the server is too old.
    pub fn slots(mut self, count: u32) -> Lock<'a> {
        self.claim.slots = Some(count);
        self
    }

    /// Makes acquiring fail with [`Error::MaxWaiters`] if `count` claims already wait for the key,
    /// and with [`Error::Unsupported`] if the server is too old. The default lease is 33 seconds.
    pub fn max_waiters(mut self, count: u32) -> Lock<'a> {
        self.claim.max_waiters = Some(count);
        self
    }

    /// Sets a text that the server shows to operators beside the claim and the grant, instead of
    /// `PROGRAM@HOST pid N`. At most its first 128 bytes are sent. A server that does not know tags
    /// ignores the text. If the text contains a line end, acquiring fails.
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
        Lock {
            tag: Some(tag),
            ..self
        }
    }

    /// Makes acquiring fail with [`Error::Unsupported`] if the server is too old for
    /// [`Guard::keep_for`].
    pub fn keepable(mut self) -> Lock<'a> {
        self.needs = self.needs.and(Abilities::ADOPT);
        self
    }

    /// Lets another thread end the wait for a grant with `handle`. The handle does not end an
    /// attempt to connect, which has its own timeout.
    pub fn cancelled_by(mut self, handle: &'a CancelHandle) -> Lock<'a> {
        self.cancelled_by[0] = Some(handle.event());
        self
    }

    /// Blocks until the lock is granted. If the server's host has vanished, fails within a minute.
    pub fn acquire(&self) -> Result<Guard, Error> {
        loop {
            // The protocol limits a wait to about three hundred years.
            if let Some(guard) = self.ask(Wait::Forever)? {
                return Ok(guard);
            }
        }
    }

    /// Waits for at most `time`, rounded up to whole seconds. Returns `None` if no slot was free in
    /// that time. Blocks for at most `time` plus the reply timeout, which includes connecting, or
    /// longer for a [late grant](Lock).
    pub fn acquire_within(&self, time: Duration) -> Result<Option<Guard>, Error> {
        self.ask(Wait::UpTo(time))
    }

    /// Acquires the lock without waiting, or returns `None` if no slot is free. Blocks for at most
    /// the reply timeout, which includes connecting, or longer for a [late grant](Lock).
    pub fn try_acquire(&self) -> Result<Option<Guard>, Error> {
        self.ask(Wait::No)
    }

    /// Fails if the claim cannot be sent to a server.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.claim.wanted(self.key).map(drop)
    }

    /// Connects to the server of the key, or to another one of its cluster, introduces the client
    /// and makes a claim. A server that closes the connection after it has answered `error` to
    /// `hello` is old: it gets the claim once more, without an introduction. A close before that
    /// answer says nothing about the server's age. It may be full or restarting, or a proxy may
    /// stand before it.
    fn introduced<T>(
        &self,
        deadline: Option<Instant>,
        mut claim: impl FnMut(&mut Connection) -> Result<T, Error>,
    ) -> Result<(Connection, T), Error> {
        let program = || std::env::args_os().next().unwrap_or_default();
        let tag = self
            .tag
            .map_or_else(|| default_tag(&program()), str::to_owned);
        let tag = checked_tag(&tag)?;
        let server = self.client.server_of(self.key);
        self.may_ask()?;
        self.client.first_answer(server, deadline, |dial| {
            let mut connection = self.prepared(dial()?);
            connection.introduce(tag);
            let mut claimed = claim(&mut connection);
            if connection.introduction.is_unknown_to_server
                && matches!(claimed, Err(Error::Closed { .. }))
            {
                self.may_ask()?;
                connection = self.prepared(dial()?);
                connection.introduce_later(tag);
                claimed = claim(&mut connection);
            }
            // Once the server has accepted the introduction, a claim that fails has lost its place
            // in the queue, so the caller decides whether to try again.
            if connection.introduction.is_accepted {
                Ok(claimed.map(|claimed| (connection, claimed)))
            } else {
                claimed.map(|claimed| Ok((connection, claimed)))
            }
        })?
    }

    /// Fails if the claim cannot be sent, or is cancelled.
    fn may_ask(&self) -> Result<(), Error> {
        self.check()?;
        if self.cancelled_by.into_iter().flatten().any(Event::is_set) {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }

    /// Tells a connection what a claim over it needs, and what cancels the claim.
    fn prepared(&self, mut connection: Connection) -> Connection {
        connection.needs = self
            .needs
            .and(Abilities::SLOTS.when(self.claim.is_refined()));
        connection.cancelled_by = self.cancelled_by.into_iter().flatten().cloned().collect();
        connection
    }

    /// Claims the lock, waiting as long as `wait` says, and starts the guard of the grant.
    fn ask(&self, wait: Wait) -> Result<Option<Guard>, Error> {
        match self.claim(Instant::now(), wait, |_, _| ())? {
            Claimed::Granted(granted) => granted.into_guard().map(Some),
            Claimed::InVain(_) => Ok(None),
        }
    }

    /// Claims in the same way as [`Lock::ask`], but returns the grant without a guard, so nothing
    /// renews the lease. The wait counts from `began`. Calls `watch` with each connection,
    /// before anything is sent and once the server has answered the introduction.
    pub(crate) fn claim(
        &self,
        began: Instant,
        wait: Wait,
        mut watch: impl FnMut(Progress, &Connection),
    ) -> Result<Claimed<Granted>, Error> {
        let deadline = wait.deadline(began, self.client.settings.reply_timeout);
        let (mut connection, (asked_at, grant)) = self.introduced(deadline, |connection| {
            let wait = wait.after(began.elapsed());
            let asked_at = Moment::now();
            let (key, claim) = (self.key, self.claim);
            watch(Progress::Connected, connection);
            let on_introduced = |connection: &_| watch(Progress::Introduced, connection);
            let grant = connection.acquire_by(key, claim, wait, deadline, on_introduced)?;
            Ok((asked_at, grant))
        })?;
        let Some(Grant { token, lease }) = grant else {
            connection.shorten_reply_timeout(deadline);
            return Ok(Claimed::InVain(Box::new(connection)));
        };
        let mut known = self.known(token);
        known.granted_at = Some(Moment::now());
        let granted = self.granted(connection, known, asked_at, lease);
        Ok(Claimed::Granted(granted))
    }
}
