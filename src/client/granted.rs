//! A grant together with its connection, before and while a guard keeps it.

use std::time::Duration;

#[cfg(test)]
use super::address::Address;
use super::connection::Connection;
use super::error::{Asked, Error};
#[cfg(test)]
use super::settings::Settings;
use super::slot::Slot;
use crate::sys::moment::Moment;
use crate::token::Grant;

/// The result of a claim.
pub(crate) enum Claimed {
    Granted(Granted),
    /// No slot was free in time. The connection can be used for more requests, within the rest of
    /// the reply timeout.
    InVain(Connection),
}

/// A grant and the connection that it came over. Dropping it closes the connection.
pub(crate) struct Granted {
    pub(crate) connection: Connection,
    pub(super) key: String,
    /// The slot that renewals ask for, with the lease that was granted: without one, they would ask
    /// for the server's default, and an adoption would prove nothing.
    pub(super) slot: Slot,
    pub(crate) grant: Grant,
    /// When the lease was asked for. The lease began at this time or later.
    pub(super) asked_at: Moment,
    /// Whether to ask the server for the numbers of the slots.
    pub(super) is_numbered: bool,
    /// The numbers of the slots, separated by commas; empty if they are not known.
    pub(super) numbers: String,
}

impl Granted {
    /// The key, and its server.
    pub(super) fn asked(&self) -> Asked {
        Asked {
            key: Some(self.key.clone()),
            server: self.connection.server.clone(),
        }
    }

    /// The lease that renewals ask for.
    pub(super) fn wanted_lease(&self) -> Duration {
        self.slot.lease.unwrap_or(self.grant.lease)
    }

    /// Renews the lease if a quarter of it may be over. Fails with [`Error::LeaseExpired`] if the
    /// lease is over.
    ///
    /// After a quick reply, the lease safely counts from the request. After a long wait, it is not
    /// known when the reply arrived, and this process may have been stopped since then. Only a
    /// renewal tells whether the lease still runs.
    pub(crate) fn renew_if_late(&mut self) -> Result<(), Error> {
        if self.asked_at.elapsed() >= self.grant.lease / 4 {
            self.asked_at = Moment::now();
            let token = self.grant.token;
            let renewed = self.connection.renew(&self.key, self.slot, token);
            self.grant.lease = renewed.map_err(|error| match error {
                Error::Refused(asked) => Error::LeaseExpired(asked),
                error => error,
            })?;
        }
        Ok(())
    }

    /// Has the server keep the lock for `time` without a connection, after the work under it has
    /// ended, perhaps with an exit status. First changes the tag so that it says so. Waits for each
    /// of the two answers for at most `within`.
    pub(super) fn keep_for(
        &mut self,
        time: Duration,
        status: Option<u8>,
        within: Duration,
    ) -> Result<(), Error> {
        self.connection.end_tag(within)?;
        let (slot, token) = (self.slot.with_lease(time), self.grant.token);
        let kept = self
            .connection
            .keep_within(&self.key, slot, token, status, within);
        kept.map(drop)
    }

    /// Has the server keep the lock for `time` without a connection. Fails with
    /// [`Error::NotKept`], and still holds the lock, if the server does not keep it for that long.
    pub(crate) fn keep_at_server(&mut self, time: Duration) -> Result<(), Error> {
        let (slot, token) = (self.slot.with_lease(time), self.grant.token);
        let kept = self.connection.keep(&self.key, slot, token);
        kept.map(drop).map_err(Error::of_keep)
    }

    pub(super) fn keep_and_adopt(&mut self, time: Duration) -> Result<(), Error> {
        self.renew_if_late()?;
        self.keep_at_server(time)?;
        // Until the second adoption, the first is provisional: the end of the connection would not
        // release the lock.
        for _ in 0..2 {
            self.adopt(None)?;
        }
        Ok(())
    }

    /// Takes the lock for this connection, or proves it to a server that has restarted. Waits for
    /// the answer for at most `within`, or for the reply timeout.
    pub(super) fn adopt(&mut self, within: Option<Duration>) -> Result<(), Error> {
        self.asked_at = Moment::now();
        let (key, token) = (&self.key, self.grant.token);
        let adopted = self
            .connection
            .adopt(key, self.slot, token, &self.numbers, within);
        self.grant.lease = adopted?;
        Ok(())
    }

    /// Releases the lock after work that perhaps has an exit status. Waits for the answer for at
    /// most `within`.
    pub(crate) fn release(&mut self, status: Option<u8>, within: Duration) -> Result<(), Error> {
        let (key, token) = (&self.key, self.grant.token);
        self.connection
            .release_within(key, self.slot, token, status, within)
    }
}

#[cfg(test)]
impl Granted {
    /// The grant of the lock `k`, without a connection yet. The lease was asked for at `asked_at`,
    /// and renewals ask for `wanted`.
    pub(super) fn unconnected(
        server: &Address,
        asked_at: Moment,
        lease: Duration,
        wanted: Duration,
    ) -> Granted {
        let token = "0123456789abcdef0123456789abcdef".parse().expect("a token");
        Granted {
            connection: Connection::unconnected(server, &Settings::default()),
            key: "k".into(),
            slot: Slot::LOCK.with_lease(wanted),
            grant: Grant { token, lease },
            asked_at,
            is_numbered: false,
            numbers: String::new(),
        }
    }
}
