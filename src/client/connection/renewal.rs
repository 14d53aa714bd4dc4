//! Renewals, whose replies a guard does not wait for.

use std::time::Duration;

use super::{check_key, Connection, Error, Request, Slot};
use crate::token::Token;

/// How a lease is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Renewal {
    /// `n`, `sn`
    Renew,
    /// `adopt`: the slot is this connection's from then on.
    Adopt,
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
        })
    }
}

impl Connection {
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
        self.unless_closed(sent)
    }

    /// What the reply to a renewal says that was [sent](Connection::send_renewal); `None` if not
    /// all of it has come.
    pub(in crate::client) fn renewal_reply(&mut self) -> Result<Option<Duration>, Error> {
        let reply = self.reply_so_far()?;
        reply.map(|reply| self.renewed(&reply)).transpose()
    }
}
