//! Grants that a server keeps without a connection, renewed and taken over by their tokens.

use std::time::{Duration, Instant};

use super::error::Error;
use super::guard::Guard;
use super::Lock;
use crate::sys::moment::Moment;
use crate::token::{Grant, Token};

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
        self.client.ask(server, |connection| {
            connection.renew(self.key, self.slot, token)
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
        let (connection, (asked_at, lease)) = self.introduced(deadline, |connection| {
            connection.adopt(self.key, self.slot, token, "", None)?;
            // Until the second adoption, the first is provisional: the end of the connection would
            // not release the lock.
            let asked_at = Moment::now();
            let lease = connection.adopt(self.key, self.slot, token, "", None)?;
            Ok((asked_at, lease))
        })?;
        self.granted(connection, asked_at, Grant { token, lease })
            .into_guard()
    }
}
