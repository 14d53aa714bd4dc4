//! A grant together with its connection, before and while a guard keeps it, and grants that a
//! server keeps without a connection.

use std::time::{Duration, Instant};

use super::connection::{Connection, Known};
use super::error::{Asked, Error};
use super::guard::Guard;
use super::Lock;
use crate::os::moment::Moment;
use crate::wire::token::Token;

/// How far the connection of a claim has come.
#[derive(PartialEq)]
pub(crate) enum Progress {
    Connected,
    /// The server has answered the introduction.
    Introduced,
}

/// The result of a claim.
pub(crate) enum Claimed<T> {
    Granted(T),
    /// No slot was free in time. The connection can be used for more requests, within the rest of
    /// the reply timeout.
    InVain(Box<Connection>),
}

/// A grant and the connection that it came over. Dropping it closes the connection.
pub(crate) struct Granted {
    pub(crate) connection: Connection,
    pub(crate) known: Known,
    /// The length of the latest lease.
    pub(crate) lease: Duration,
    /// When the lease was asked for. The lease began at this time or later.
    pub(super) asked_at: Moment,
    /// Whether to ask the server for the numbers of the slots.
    pub(super) is_numbered: bool,
}

impl Granted {
    /// The key, and its server.
    pub(super) fn asked(&self) -> Asked {
        Asked {
            key: Some(self.known.key.clone()),
            server: self.connection.server.clone(),
        }
    }

    /// The lease that renewals ask for.
    pub(super) fn wanted_lease(&self) -> Duration {
        self.known.claim.lease.unwrap_or(self.lease)
    }

    /// Renews the lease if a quarter of it may be over. Fails with [`Error::LeaseExpired`] if the
    /// lease is over.
    ///
    /// After a quick reply, the lease safely counts from the request. After a long wait, it is not
    /// known when the reply arrived, and this process may have been stopped since then. Only a
    /// renewal tells whether the lease still runs.
    pub(crate) fn renew_if_late(&mut self) -> Result<(), Error> {
        if self.asked_at.elapsed() >= self.lease / 4 {
            self.asked_at = Moment::now();
            let Known {
                key, claim, token, ..
            } = &self.known;
            let renewed = self.connection.renew(key, *claim, *token);
            self.lease = renewed.map_err(|error| match error {
                Error::Refused(asked) => Error::LeaseExpired(asked),
                error => error,
            })?;
        }
        Ok(())
    }

    /// Has the server keep the lock for `time` without a connection. Fails with
    /// [`Error::NotKept`], and still holds the lock, if the server does not keep it for that long.
    pub(crate) fn keep_at_server(&mut self, time: Duration) -> Result<(), Error> {
        let claim = self.known.claim.with_lease(time);
        let kept = (self.connection).keep(&self.known.key, claim, self.known.token);
        kept.map(drop).map_err(Error::of_keep)
    }

    /// The numbers of the slots; empty if they were not asked for or the server gives no valid
    /// ones.
    pub(super) fn slot_numbers(&mut self) -> Result<Vec<u32>, Error> {
        let Known {
            key, claim, token, ..
        } = &self.known;
        let Some(limit) = claim.limit.filter(|_| self.is_numbered) else {
            return Ok(Vec::new());
        };
        let numbers = match self.connection.holder(key, token.fence()) {
            Err(Error::Unsupported(_)) => Vec::new(),
            holder => holder?.map_or_else(Vec::new, |holder| holder.slot_numbers),
        };
        let is_sound = numbers.len() == claim.slots.unwrap_or(1) as usize
            && numbers.iter().all(|number| *number < limit);
        Ok(if is_sound { numbers } else { Vec::new() })
    }
}

impl Lock<'_> {
    /// Renews the lease of a grant of this lock or semaphore, and returns its new length. The
    /// program that acquired it may have ended: see [`Guard::keep_for`]. The new lease has the
    /// length that was [asked for](Lock::lease), or the server's default length. A renewal never
    /// shortens the time for which the server keeps the grant. Blocks for at most the connect and
    /// the reply timeout.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no holder has this token, or the errors of
    /// [`Connection::open`](super::Connection::open) and of
    /// [any request](super::Connection#errors).
    pub fn renew(&self, token: Token) -> Result<Duration, Error> {
        self.check()?;
        let server = self.client.server_of(self.key);
        self.client.ask(server, None, |connection| {
            connection.renew(self.key, self.claim, token)
        })
    }

    /// Takes over a grant of this lock or semaphore that a server keeps without a connection. From
    /// now on, the guard renews it, and the grant ends with the guard. Blocks for at most three
    /// times the reply timeout.
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
    /// let guard = client.lock("flash").acquire()?;
    /// let token = guard.token();
    /// guard.keep_for(Duration::from_secs(3600))?;
    /// // ... perhaps in another process, which has been told the token ...
    /// let guard = client.lock("flash").adopt(token)?;
    /// assert!(guard.is_held());
    /// guard.release()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no holder has this token or the server is too old; [`Error::Lost`] if
    /// an operator broke the grant; or the errors of [`Lock::acquire`].
    pub fn adopt(&self, token: Token) -> Result<Guard, Error> {
        let deadline = Instant::now().checked_add(2 * self.client.settings.reply_timeout);
        let known = self.known(token);
        let (connection, (asked_at, lease)) =
            self.introduced(deadline, |connection| connection.adopt_for_good(&known))?;
        let granted = self.granted(connection, known, asked_at, lease);
        granted.into_guard()
    }

    /// A grant of this lock or semaphore, of which only the token is known.
    pub(super) fn known(&self, token: Token) -> Known {
        Known {
            key: self.key.to_owned(),
            claim: self.claim,
            token,
            numbers: String::new(),
            granted_at: None,
        }
    }

    /// A grant over a connection, with its lease and the moment at which that was asked for.
    pub(super) fn granted(
        &self,
        connection: Connection,
        mut known: Known,
        asked_at: Moment,
        lease: Duration,
    ) -> Granted {
        known.claim = self.claim.with_lease(lease);
        Granted {
            connection,
            known,
            lease,
            asked_at,
            is_numbered: self.is_numbered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::address::Address;
    use crate::client::claim::Claim;
    use crate::client::settings::Settings;

    impl Granted {
        /// The grant of the lock `k`, without a connection yet. The lease was asked for at
        /// `asked_at`, and renewals ask for `wanted`.
        pub(in crate::client) fn unconnected(
            server: &Address,
            asked_at: Moment,
            lease: Duration,
            wanted: Duration,
        ) -> Granted {
            Granted {
                connection: Connection::unconnected(server, &Settings::default()),
                known: Known {
                    key: "k".into(),
                    claim: Claim::LOCK.with_lease(wanted),
                    token: "0123456789abcdef0123456789abcdef".parse().expect("a token"),
                    numbers: String::new(),
                    granted_at: None,
                },
                lease,
                asked_at,
                is_numbered: false,
            }
        }
    }
}
