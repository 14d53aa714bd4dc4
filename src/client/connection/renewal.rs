//! The requests that renew a lease. A guard sends them without waiting for the reply.

use std::time::{Duration, Instant};

use super::{check_key, Connection, Error, Reply, Request, Slot};
use crate::protocol::limits::MAX_LINE_LEN;
use crate::protocol::request::{Held, Wanted};
use crate::terms::{Kind, Weight};
use crate::token::Token;

/// How a lease is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Renewal {
    /// `n`, `sn`
    Renew,
    /// `adopt`: from then on, the slot belongs to this connection.
    Adopt,
}

impl Renewal {
    /// With `numbers`, an adoption says what was granted, for a server that may not know the grant.
    /// They are those of the slots, separated by commas, and empty if the client knows none.
    pub(super) fn request<'a>(
        self,
        key: &'a str,
        slot: Slot,
        token: Token,
        numbers: Option<&'a str>,
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
            Renewal::Adopt => Request::Adopt {
                key,
                token,
                lease,
                held: match numbers.filter(|numbers| numbers.len() <= MAX_NUMBERS_LEN) {
                    Some(numbers) => held(slot.wanted(key)?, numbers),
                    None => Held::LOCK,
                },
            },
        })
    }
}

/// The maximum length of the slot numbers in an adoption, in bytes. The rest of the line has room
/// for the token, the longest lease, and the other words. A grant with longer numbers is not
/// proved: the server has it in its state file.
const MAX_NUMBERS_LEN: usize = MAX_LINE_LEN - 96;

fn held<'a>(wanted: Wanted<'_>, numbers: &'a str) -> Held<'a> {
    let plain = match wanted.kind {
        Kind::Lock => Weight::WHOLE,
        Kind::Semaphore => Weight::ONE,
    };
    Held {
        kind: wanted.kind,
        limit: wanted.limit,
        weight: wanted.weight.unwrap_or(plain),
        numbers: (!numbers.is_empty()).then_some(numbers),
    }
}

impl Connection {
    /// Renews a lease (`n`, `sn`), even if another connection has the grant. Returns the length of
    /// the new lease in whole seconds. Blocks for at most the reply timeout. If `slot` names no
    /// lease, the new lease has the server's default length, not the length that was granted.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no holder has this token, or [the errors of any request](#errors).
    pub fn renew(&mut self, key: &str, slot: Slot, token: Token) -> Result<Duration, Error> {
        let request = Renewal::Renew.request(key, slot, token, None)?;
        let reply = self.exchange(&request, self.reply_due())?;
        self.renewed(&reply)
    }

    /// Renews a lease, and has the server keep the slot without a connection (`keep`). The server
    /// keeps it until the lease ends, a client releases it with its token, or a connection adopts
    /// it. Returns the length of the new lease in whole seconds. Blocks for at most the reply
    /// timeout.
    ///
    /// # Errors
    ///
    /// [`Error::MaxLocks`] if the server already keeps its maximum number of grants;
    /// [`Error::Refused`] if no holder has this token, the lease is too long, or the server keeps
    /// no grants or is too old; or [the errors of any request](#errors).
    pub fn keep(&mut self, key: &str, slot: Slot, token: Token) -> Result<Duration, Error> {
        self.keep_within(key, slot, token, None, self.settings.reply_timeout)
    }

    /// Renews a lease, and takes the slot for this connection (`adopt`). Proves the grant to a
    /// server that can check proofs; `numbers` are those of the slots. Waits for the answer for at
    /// most `within`, or for the reply timeout, and fails like [`Connection::keep`].
    pub(in crate::client) fn adopt(
        &mut self,
        key: &str,
        slot: Slot,
        token: Token,
        numbers: &str,
        within: Option<Duration>,
    ) -> Result<Duration, Error> {
        let within = within.unwrap_or(self.settings.reply_timeout);
        let numbers = self.introduction.abilities.proofs.then_some(numbers);
        let request = Renewal::Adopt.request(key, slot, token, numbers)?;
        let reply = self.exchange(&request, Instant::now().checked_add(within))?;
        self.renewed(&reply)
    }

    /// Has the server keep the slot in the same way as [`Connection::keep`], and tells the exit
    /// status of the work that has ended to a server that knows that.
    pub(in crate::client) fn keep_within(
        &mut self,
        key: &str,
        slot: Slot,
        token: Token,
        status: Option<u8>,
        within: Duration,
    ) -> Result<Duration, Error> {
        check_key(key)?;
        let lease = slot.checked_lease()?;
        let request = Request::Keep {
            key,
            token,
            lease,
            status: self.known_status(status),
        };
        let reply = self.exchange(&request, Instant::now().checked_add(within))?;
        self.renewed(&reply)
    }

    /// Sends a renewal, and does not wait for its reply. An adoption proves the grant; `numbers`
    /// are those of the slots. Blocks for at most `within`.
    pub(in crate::client) fn send_renewal(
        &mut self,
        renewal: Renewal,
        key: &str,
        slot: Slot,
        token: Token,
        numbers: &str,
        within: Duration,
    ) -> Result<(), Error> {
        let numbers = self.introduction.abilities.proofs.then_some(numbers);
        let request = renewal.request(key, slot, token, numbers)?;
        let sent = self.send(&request, within);
        self.close_on_error(sent)
    }

    /// Takes the lease from the reply to [`Connection::send_renewal`]; `None` while the reply is
    /// incomplete.
    pub(in crate::client) fn renewal_reply(&mut self) -> Result<Option<Duration>, Error> {
        let reply = self.reply_so_far()?;
        reply.map(|reply| self.renewed(&reply)).transpose()
    }

    fn renewed(&mut self, reply: &Reply) -> Result<Duration, Error> {
        match reply {
            Reply::Renewed(lease) => Ok(*lease),
            other => Err(self.fail_on(other)),
        }
    }
}
