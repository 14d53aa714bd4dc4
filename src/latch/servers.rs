//! The servers that a command asks, and what it asks them for.

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use crate::client::{
    default_tag, Address, Claim, Client, Connection, Error, Guard, Kind, Lock, Queue, Token, Wait,
};
use crate::os::text::exact_time;
use crate::shared::cli::failure::{Failure, SYSTEM_ERROR};

use super::{failure, queue, shown, usage, FILE_ERROR, LOST, PROTOCOL};

/// How much longer than `--timeout` a command may take: one round trip.
pub(super) const ROUND_TRIP: Duration = Duration::from_secs(1);

/// The failure for invalid settings in the environment or on the command line.
pub(super) fn unusable(error: Error) -> Failure {
    match error {
        error if error.is_shortage() => Failure::new(SYSTEM_ERROR, error),
        Error::AuthTokenFile(..) | Error::CaFile(..) => Failure::new(FILE_ERROR, error),
        _ => usage(error),
    }
}

/// What a command asks for: a key, as a lock or a semaphore, and the client of its server.
#[derive(Clone)]
pub(super) struct Target {
    client: Client,
    pub(super) key: String,
    pub(super) claim: Claim,
    tag: String,
    /// Whether a claim fails if the server cannot keep the lock without a connection.
    pub(super) is_keepable: bool,
    /// Whether a claim asks for the numbers of its slots, if they are of a semaphore.
    pub(super) is_numbered: bool,
    /// For how long the server must be able to keep the lock when it is granted.
    pub(super) keep_time: Option<Duration>,
}

impl Target {
    pub(super) fn new(
        client: Client,
        key: &str,
        lease: Option<Duration>,
        limit: Option<u32>,
    ) -> Target {
        let claim = limit.map_or(Claim::LOCK, Claim::semaphore);
        Target {
            client,
            key: key.to_owned(),
            claim: lease.map_or(claim, |lease| claim.with_lease(lease)),
            tag: String::new(),
            is_keepable: false,
            is_numbered: false,
            keep_time: None,
        }
    }

    /// Sets the tag that tells the server who asks. It is the value of `--tag` or, by default, the
    /// name of the command with the host and the ID of this process.
    pub(super) fn tagged(mut self, given: Option<&str>, command: impl AsRef<OsStr>) -> Target {
        self.tag = given.map_or_else(|| default_tag(command.as_ref()), str::to_owned);
        self
    }

    /// Returns the same target for another key.
    pub(super) fn with_key(&self, key: &str) -> Target {
        Target {
            key: key.to_owned(),
            ..self.clone()
        }
    }

    pub(super) fn lock(&self) -> Lock<'_> {
        let mut lock = self.client.lock_for(&self.key, self.claim).tag(&self.tag);
        if self.is_keepable {
            lock = lock.keepable();
        }
        if self.is_numbered {
            lock.numbered()
        } else {
            lock
        }
    }

    pub(super) fn connect(&self) -> Result<Connection, Failure> {
        let checked = self.lock().check();
        let connected = checked.and_then(|()| self.client.connect(self.server()));
        connected.map_err(|error| self.failure(&error))
    }

    /// Sends a request that is safe to send twice: see [`Client::ask`].
    pub(super) fn ask<T>(
        &self,
        request: impl FnMut(&mut Connection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.lock().check()?;
        self.client.ask(self.server(), None, request)
    }

    /// The queue of the key once for each of these tokens whose grant holds the key, with that
    /// grant as the only holder. Also returns for how long the grants of the other tokens may still
    /// come back, because the server has just restarted.
    pub(super) fn holdings(
        &self,
        tokens: &[Token],
        deadline: Option<Instant>,
    ) -> Result<(Vec<Queue>, Duration), Error> {
        self.client.ask(self.server(), deadline, |connection| {
            // Asked first: the server may settle in between.
            let (_, settling) = connection.prospects(&self.key)?;
            let held = tokens.iter();
            let held = held.map(|token| connection.holding(&self.key, token.fence()));
            let held: Result<Vec<Queue>, Error> = held.filter_map(Result::transpose).collect();
            Ok((held?, settling))
        })
    }

    /// Describes the wait for the key: how many claims are ahead, and who holds the key, as far as
    /// the server reports it. `name` is the waiting client's name at the server.
    pub(super) fn describe_wait(&self, name: Option<&str>) -> String {
        let about = format!("waiting for {}", shown(&self.key));
        let details = match self.prospects() {
            Ok((queue, settling)) => {
                let queue = queue.map(|queue| queue::while_waiting(&queue, name));
                joined(queue, queue::while_settling(settling))
            }
            Err(error) if error.is_transient() => self.failure(&error).message,
            // For example, an older server does not know the request.
            Err(_) => None,
        };
        match details {
            Some(details) => format!("{about}: {details}"),
            None => about,
        }
    }

    /// The message for a claim that was not granted. It says who holds the key and how many are
    /// ahead, because the user may see no other message. `connection` is the connection of the
    /// claim, which waited for what was left of `timeout`.
    pub(super) fn busy(
        &self,
        mut connection: Connection,
        timeout: Option<Duration>,
        wait: Wait,
    ) -> String {
        let waited = match wait {
            Wait::UpTo(time) => time,
            _ => Duration::ZERO,
        };
        let prospects = connection.prospects(&self.key);
        let (queue, settling) = prospects.unwrap_or((None, Duration::ZERO));
        let why = queue.and_then(|queue| queue::after_wait(&queue, waited));
        self.not_granted(timeout, joined(why, queue::while_settling(settling)))
    }

    /// The message for a claim that was not granted within `timeout`, with the reason if it is
    /// known.
    pub(super) fn not_granted(&self, timeout: Option<Duration>, why: Option<String>) -> String {
        let place = self.place();
        let within = match timeout {
            Some(timeout) if timeout.as_secs() > 0 => format!("within {}", exact_time(timeout)),
            _ => "at once".to_owned(),
        };
        match why {
            Some(why) => format!("{place}: not granted {within}: {why}"),
            None => format!("{place}: not granted {within}"),
        }
    }

    /// The message for a claim that may not wait, because of `--max-waiters`. It says how many wait
    /// and who holds the key.
    pub(super) fn crowded(&self) -> String {
        let place = self.place();
        let most = self.claim.max_waiters.unwrap_or_default();
        let queue = self.prospects().ok().and_then(|(queue, _)| queue);
        match queue.and_then(|queue| queue::after_wait(&queue, Duration::ZERO)) {
            Some(why) => format!("{place}: --max-waiters {most} wait already: {why}"),
            None => format!("{place}: --max-waiters {most} wait already"),
        }
    }

    /// Who holds the key and who waits for it, and for how long the server will grant nothing
    /// because it has just restarted.
    pub(super) fn prospects(&self) -> Result<(Option<Queue>, Duration), Error> {
        self.ask(|connection| connection.prospects(&self.key))
    }

    /// Why a claim with this kind and limit is refused: how the key is in use now, if the server
    /// tells it.
    fn mismatch(&self, error: &Error) -> String {
        let in_use = match self.prospects() {
            Ok((Some(queue), _)) => match queue.kind {
                Kind::Lock => "a lock, without --limit".to_owned(),
                Kind::Semaphore => format!("a semaphore with --limit {}", queue.limit),
            },
            _ => return error.reason(),
        };
        format!("the key is in use as {in_use}")
    }

    /// Connects to another socket of the server.
    pub(super) fn connect_to(&self, server: &Address) -> Result<Connection, Error> {
        self.client.connect(server)
    }

    pub(super) fn server(&self) -> &Address {
        self.client.server_of(&self.key)
    }

    pub(super) fn place(&self) -> String {
        place_of(&self.key, self.server())
    }

    pub(super) fn fails(&self, status: u8, why: &str) -> Failure {
        Failure::new(status, format_args!("{}: {why}", self.place()))
    }

    pub(super) fn failure(&self, error: &Error) -> Failure {
        let server = self.server().to_string();
        match error {
            Error::Unreachable { .. } | Error::AuthFailed { .. } | Error::Untrusted { .. } => {
                failure(shown(&server), error)
            }
            Error::Lost(asked, loss) => {
                let key = asked.key.as_deref().unwrap_or_default();
                lost_lock(&place_of(key, &asked.server), &loss.to_string())
            }
            Error::InvalidKey | Error::InvalidArgument(_) => failure(shown(&self.key), error),
            Error::LimitMismatch(_) => self.fails(PROTOCOL, &self.mismatch(error)),
            _ => failure(self.place(), error),
        }
    }
}

/// One text after the other, as far as there are any.
fn joined(one: Option<String>, other: Option<String>) -> Option<String> {
    let parts: Vec<String> = [one, other].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// How a message names a key.
fn place_of(key: &str, server: &Address) -> String {
    format!("{} at {}", shown(key), shown(&server.to_string()))
}

/// How a message names the key of a guard.
pub(super) fn place_of_guard(guard: &Guard) -> String {
    place_of(guard.key(), guard.server())
}

pub(super) fn lost_lock(place: &str, why: &str) -> Failure {
    Failure::new(LOST, format_args!("{place}: the lock was lost: {why}"))
}

pub(super) fn wait_of(timeout: Option<Duration>) -> Wait {
    timeout.map_or(Wait::Forever, Wait::UpTo)
}
