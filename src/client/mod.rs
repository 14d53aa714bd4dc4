//! A client for `latchd`: locks and semaphores from other programs.
//!
//! Everything blocks, and each lock has a connection of its own, as the server wants it: when the
//! process dies, the server sees the connection close and gives the lock to the next in line.
//!
//! ```
//! use latchd::client::{Address, Client};
//!
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server: Address = "127.0.0.1:6388".parse()?;
//! # let running = Server::in_place_of(server);
//! # let server = running.address();
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
//! - [`Client`] knows the servers. It gives out [`Lock`]s, which are asked for [`Guard`]s.
//! - [`Guard`] is a held lock: renewed in the background, released when dropped. Its
//!   [`Token::fence`] is for what the lock protects, see [`Guard::token`].
//! - [`Connection`] is the protocol itself, one request at a time, for what guards do not cover.
//!
//! # Time
//!
//! The protocol counts whole seconds: a `Duration` that is sent is rounded up, and one that the server
//! answers is a whole number of seconds. Leases are 1 to 9223372036 seconds long. They are measured
//! by the clock that also counts the time for which the host is suspended.

mod address;
mod connection;
mod error;
mod guard;
mod moment;

use std::time::{Duration, Instant};

pub use address::Address;
pub(crate) use connection::check_key;
pub use connection::{Connection, Enqueued, Grant, Patience, Settings, Terms, Token};
pub use error::Error;
pub use guard::{Guard, Loss};
use moment::Moment;

/// One server, or several among which the keys are divided.
///
/// With several, a key belongs to the server number CRC-32 (IEEE) of the key modulo their number, as
/// all clients of this protocol have it: they must name the same servers in the same order. A key whose
/// server is down cannot be had; no other server stands in.
///
/// It keeps no connection, can be shared by threads, and costs nothing to clone but its addresses.
///
/// ```
/// use latchd::client::{Address, Client, Settings};
/// use std::time::Duration;
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let running = Server::in_place_of(server);
/// # let server = running.address();
/// let settings = Settings {
///     connect_timeout: Duration::from_secs(1),
///     ..Settings::default()
/// };
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

    /// All servers, in their order.
    pub fn servers(&self) -> &[Address] {
        &self.servers
    }

    /// The server that `key` belongs to. Does not connect.
    pub fn server_of(&self, key: &str) -> &Address {
        &self.servers[address::shard_of(key, self.servers.len())]
    }

    /// Connects to `server`, which need not be one of [`Client::servers`], with the client's settings.
    /// Blocks for at most their timeouts, see [`Settings`].
    ///
    /// # Errors
    ///
    /// As [`Connection::open`].
    pub fn connect(&self, server: &Address) -> Result<Connection, Error> {
        self.connect_by(server, None)
    }

    /// Connects as [`Client::connect`] does, and gives up at `deadline` if that is sooner.
    pub(crate) fn connect_by(
        &self,
        server: &Address,
        deadline: Option<Instant>,
    ) -> Result<Connection, Error> {
        let mut settings = self.settings.clone();
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            settings.connect_timeout = settings.connect_timeout.min(left);
        }
        Connection::open(server, &settings)
    }

    /// When an answer to `patience` is overdue that was asked for at `began`, connecting included.
    pub(crate) fn deadline_of(&self, patience: Patience, began: Instant) -> Option<Instant> {
        patience.deadline(began, self.settings.reply_timeout)
    }

    /// A lock: one holder at a time. Does not connect; whether `key` can be one is seen when it is asked
    /// for.
    pub fn lock<'a>(&'a self, key: &'a str) -> Lock<'a> {
        Lock {
            client: self,
            key,
            terms: Terms::LOCK,
        }
    }

    /// A semaphore: up to `limit` holders at a time. All clients must agree on the limit. Does not
    /// connect.
    pub fn semaphore<'a>(&'a self, key: &'a str, limit: u32) -> Semaphore<'a> {
        Semaphore {
            client: self,
            key,
            terms: Terms {
                limit: Some(limit),
                lease: None,
            },
        }
    }
}

/// A semaphore that can be asked for a slot. A lock is a semaphore of one, so it is asked alike.
pub type Semaphore<'a> = Lock<'a>;

/// A lock that can be asked for. Each time it is asked, it connects anew.
///
/// # Errors
///
/// All its questions fail alike: [`Error::Unreachable`], [`Error::NoReply`] or [`Error::Closed`] if the
/// server cannot be asked; [`Error::AuthFailed`], [`Error::MaxLocks`], [`Error::MaxWaiters`],
/// [`Error::LimitMismatch`] or [`Error::Draining`] if it refuses; [`Error::LeaseExpired`] if the lease
/// was over when the grant was looked at; [`Error::Refused`] if the server can give no fence at the moment;
/// [`Error::InvalidKey`] and [`Error::InvalidArgument`] for what cannot be sent, before anything connects.
#[derive(Clone, Copy, Debug)]
pub struct Lock<'a> {
    client: &'a Client,
    key: &'a str,
    terms: Terms,
}

impl<'a> Lock<'a> {
    /// Asks for a lease of this length, in whole seconds (rounded up), rather than the server's default.
    /// A lease of zero is refused when the lock is asked for.
    pub fn lease(self, lease: Duration) -> Lock<'a> {
        Lock {
            terms: Terms {
                lease: Some(lease),
                ..self.terms
            },
            ..self
        }
    }

    /// Blocks for as long as it takes. A server that vanishes from the network meanwhile is noticed within a
    /// minute.
    ///
    /// # Errors
    ///
    /// The server's refusal, or why it could not be asked: see [`Lock`].
    pub fn acquire(&self) -> Result<Guard, Error> {
        loop {
            // The longest wait that the protocol knows is three hundred years.
            if let Some(guard) = self.ask(Patience::Forever)? {
                return Ok(guard);
            }
        }
    }

    /// Blocks for at most `time`, in whole seconds (rounded up), and the reply timeout, connecting
    /// included; `None` if somebody else has it all that time.
    ///
    /// # Errors
    ///
    /// The server's refusal, or why it could not be asked: see [`Lock`].
    pub fn acquire_within(&self, time: Duration) -> Result<Option<Guard>, Error> {
        self.ask(Patience::Within(time))
    }

    /// Does not wait for anybody, and blocks for at most the reply timeout, connecting included;
    /// `None` if somebody else has it.
    ///
    /// # Errors
    ///
    /// The server's refusal, or why it could not be asked: see [`Lock`].
    pub fn try_acquire(&self) -> Result<Option<Guard>, Error> {
        self.ask(Patience::Try)
    }

    /// Takes a place in the queue without waiting, to wait for it later. Blocks for no longer than
    /// connecting and an answer take.
    ///
    /// # Errors
    ///
    /// The server's refusal, or why it could not be asked: see [`Lock`].
    pub fn enqueue(&self) -> Result<Place, Error> {
        let mut connection = self.connect(None)?;
        let sent_at = Moment::now();
        let granted = match connection.enqueue(self.key, self.terms)? {
            Enqueued::Queued => None,
            Enqueued::Acquired(grant) => Some((grant, sent_at)),
        };
        Ok(Place {
            connection,
            key: self.key.to_owned(),
            terms: self.terms,
            granted,
        })
    }

    fn connect(&self, deadline: Option<Instant>) -> Result<Connection, Error> {
        check_key(self.key)?;
        self.terms.check()?;
        let server = self.client.server_of(self.key);
        self.client.connect_by(server, deadline)
    }

    fn ask(&self, patience: Patience) -> Result<Option<Guard>, Error> {
        let began = Instant::now();
        let deadline = self.client.deadline_of(patience, began);
        let mut connection = self.connect(deadline)?;
        let patience = patience.after(began.elapsed());
        let asked_at = Moment::now();
        let granted = connection.acquire_by(self.key, self.terms, patience, deadline)?;
        let Some(grant) = granted else {
            return Ok(None);
        };
        take_charge(connection, self.key, self.terms, grant, asked_at).map(Some)
    }
}

/// A place in a queue. Dropping it closes its connection without blocking, and the server takes back the
/// place, or the lock if that has been granted.
///
/// A lock that was granted while nobody waits is held, and its lease runs, renewed by nobody.
///
/// ```
/// use latchd::client::{Address, Client, Patience};
///
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/documentation.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server: Address = "127.0.0.1:6388".parse()?;
/// # let running = Server::in_place_of(server);
/// # let server = running.address();
/// let client = Client::new([server]);
/// let guard = client.lock("deploy").acquire()?;
///
/// let place = client.lock("deploy").enqueue()?;
/// assert!(!place.is_granted());
/// // ... something else, and then: ...
/// guard.release()?;
/// assert!(place.wait(Patience::Forever)?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Place {
    connection: Connection,
    key: String,
    terms: Terms,
    granted: Option<(Grant, Moment)>,
}

impl Place {
    /// Whether the lock was free when the place was taken, so that waiting will not take any time. Does
    /// not ask the server.
    pub fn is_granted(&self) -> bool {
        self.granted.is_some()
    }

    /// Blocks for at most `patience`, besides what an answer takes; `None` if that is over, and the place
    /// is given up.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseExpired`] if the grant came and its lease went while nobody waited, the server's
    /// refusal, or what can go wrong with a reply.
    pub fn wait(mut self, patience: Patience) -> Result<Option<Guard>, Error> {
        // The server starts the lease anew at the wait, also if the grant came before.
        let asked_at = Moment::now();
        match self.connection.wait(&self.key, self.terms, patience)? {
            None => Ok(None),
            Some(grant) => {
                take_charge(self.connection, &self.key, self.terms, grant, asked_at).map(Some)
            }
        }
    }
}

/// Makes a guard of a grant that was asked for at `asked_at`.
///
/// The lease began at the grant, and that was not before the request. So a quick answer is counted from
/// its request. After a long wait, nobody knows how long the answer has been lying here (we may have been
/// stopped meanwhile): then a renewal tells.
fn take_charge(
    mut connection: Connection,
    key: &str,
    terms: Terms,
    mut grant: Grant,
    asked_at: Moment,
) -> Result<Guard, Error> {
    // Renewals ask for the lease that was granted, not for the server's default.
    let terms = Terms {
        lease: Some(grant.lease),
        ..terms
    };
    let mut counted_from = asked_at;
    if asked_at.elapsed() >= grant.lease / 4 {
        counted_from = Moment::now();
        match connection.renew(key, terms, grant.token) {
            Ok(lease) => grant.lease = lease,
            Err(Error::Refused) => return Err(Error::LeaseExpired),
            Err(error) => return Err(error),
        }
    }
    Guard::new(connection, key, terms, grant, counted_from)
}
