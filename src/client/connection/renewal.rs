//! Renewals of all kinds. A guard does not wait for their replies.

use std::time::{Duration, Instant};

use super::{check_key, Connection, Error, Reply, Request, Slot};
use crate::token::Token;

/// How a lease is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Renewal {
    /// `n`, `sn`
    Renew,
    /// `adopt`: the slot is this connection's from then on.
    Adopt,
    /// `keep`: the slot is no connection's from then on.
    Keep,
}

impl Renewal {
    pub(super) fn request<'a>(
        self,
        key: &'a str,
        slot: Slot,
        token: Token,
    ) -> Result<Request<'a>, Error> {
        check_key(key)?;
        let (kind, lease) = (slot.kind(), slot.checked_lease()?);
        Ok(match self {
            Renewal::Renew => Request::Renew {
                key,
                kind,
                token,
                lease,
            },
            Renewal::Adopt => Request::Adopt { key, token, lease },
            Renewal::Keep => Request::Keep { key, token, lease },
        })
    }
}

impl Connection {
    /// Starts a lease anew (`n`, `sn`), whichever connection it was granted to, and returns its
    /// length, in whole seconds. Blocks for at most the reply timeout. A slot without a lease asks
    /// for the server's default, not for the lease that was granted.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the token is not that of a holder, or what can go wrong with a reply.
    pub fn renew(&mut self, key: &str, slot: Slot, token: Token) -> Result<Duration, Error> {
        let request = Renewal::Renew.request(key, slot, token)?;
        let reply = self.exchange(&request, self.reply_due())?;
        self.renewed(&reply)
    }

    /// Starts a lease anew and has the server keep the slot without a connection (`keep`): until
    /// the lease ends, its token releases it, or a connection adopts it. Returns the length of the
    /// lease, in whole seconds. Blocks for at most the reply timeout.
    ///
    /// # Errors
    ///
    /// [`Error::MaxLocks`] if the server keeps as many as it may; [`Error::Refused`] if the token
    /// is not that of a holder, the lease is too long, or the server keeps none or is too old; or
    /// what can go wrong with a reply.
    pub fn keep(&mut self, key: &str, slot: Slot, token: Token) -> Result<Duration, Error> {
        self.keep_within(key, slot, token, self.settings.reply_timeout)
    }

    pub(in crate::client) fn keep_within(
        &mut self,
        key: &str,
        slot: Slot,
        token: Token,
        within: Duration,
    ) -> Result<Duration, Error> {
        let request = Renewal::Keep.request(key, slot, token)?;
        let reply = self.exchange(&request, Instant::now().checked_add(within))?;
        self.renewed(&reply)
    }

    /// Sends a renewal, for at most `within`. The reply is still to come.
    pub(in crate::client) fn send_renewal(
        &mut self,
        renewal: Renewal,
        key: &str,
        slot: Slot,
        token: Token,
        within: Duration,
    ) -> Result<(), Error> {
        let sent = self.send(&renewal.request(key, slot, token)?, within);
        self.close_on_error(sent)
    }

    /// The lease in the reply to a renewal that was [sent](Connection::send_renewal); `None` if the
    /// reply is incomplete.
    pub(in crate::client) fn renewal_reply(&mut self) -> Result<Option<Duration>, Error> {
        let reply = self.reply_so_far()?;
        reply.map(|reply| self.renewed(&reply)).transpose()
    }

    fn renewed(&mut self, reply: &Reply) -> Result<Duration, Error> {
        match reply {
            Reply::Renewed(lease) => Ok(*lease),
            other => Err(self.refusal(other)),
        }
    }
}
