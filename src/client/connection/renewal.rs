//! The requests that renew a lease. A guard sends them without waiting for the reply.

use std::time::{Duration, Instant};

use super::{check_key, Claim, Connection, Error, Reply, Request};
use crate::os::moment::Moment;
use crate::wire::abilities::Abilities;
use crate::wire::limits::MAX_LINE_LEN;
use crate::wire::request::Held;
use crate::wire::token::Token;

/// How a lease is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Renewal {
    /// `n`, `sn`
    Renew,
    /// `adopt`: from then on, the slot belongs to this connection.
    Adopt,
}

/// A grant as its client knows it.
pub(crate) struct Known {
    pub(crate) key: String,
    /// What renewals ask for, with the lease that was granted: without one, they would ask for the
    /// server's default, and an adoption would prove nothing.
    pub(in crate::client) claim: Claim,
    pub(crate) token: Token,
    /// The numbers of its slots, separated by commas; empty if they are not known.
    pub(in crate::client) numbers: String,
    /// When it was granted; `None` if another client had it first.
    pub(in crate::client) granted_at: Option<Moment>,
}

/// The maximum length of the slot numbers in an adoption, in bytes. The rest of the line has room
/// for the token, the longest lease, and the other words. A grant with longer numbers is not
/// proved: the server has it in its state file.
const MAX_NUMBERS_LEN: usize = MAX_LINE_LEN - 96;

impl Connection {
    /// Renews a lease (`n`, `sn`), even if another connection has the grant. Returns the length of
    /// the new lease in whole seconds. Blocks for at most the reply timeout. If `claim` names no
    /// lease, the new lease has the server's default length, not the length that was granted.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no holder has this token, or [the errors of any request](#errors).
    pub fn renew(&mut self, key: &str, claim: Claim, token: Token) -> Result<Duration, Error> {
        let request = renew(key, claim, token)?;
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
    pub fn keep(&mut self, key: &str, claim: Claim, token: Token) -> Result<Duration, Error> {
        self.keep_within(key, claim, token, None, self.settings.reply_timeout)
    }

    /// Renews the lease, and takes the grant for this connection (`adopt`). Proves the grant to a
    /// server that can check proofs. Waits for the answer for at most `within`, and fails like
    /// [`Connection::keep`].
    pub(in crate::client) fn adopt(
        &mut self,
        known: &Known,
        within: Duration,
    ) -> Result<Duration, Error> {
        let request = self.adoption(known)?;
        let reply = self.exchange(&request, Instant::now().checked_add(within))?;
        self.renewed(&reply)
    }

    /// Adopts a grant so that it ends with this connection. Returns when its lease was asked for,
    /// and the length of the lease. Blocks for at most twice the reply timeout.
    pub(in crate::client) fn adopt_for_good(
        &mut self,
        known: &Known,
    ) -> Result<(Moment, Duration), Error> {
        // Until the second adoption, the first is provisional: the end of the connection would not
        // release the lock.
        self.adopt(known, self.settings.reply_timeout)?;
        let asked_at = Moment::now();
        let lease = self.adopt(known, self.settings.reply_timeout)?;
        Ok((asked_at, lease))
    }

    /// Has the server keep the slot in the same way as [`Connection::keep`], and tells the exit
    /// status of the work that has ended to a server that knows that.
    pub(in crate::client) fn keep_within(
        &mut self,
        key: &str,
        claim: Claim,
        token: Token,
        status: Option<u8>,
        within: Duration,
    ) -> Result<Duration, Error> {
        check_key(key)?;
        let lease = claim.checked_lease()?;
        let request = Request::Keep {
            key,
            token,
            lease,
            status: self.known_status(status),
        };
        let reply = self.exchange(&request, Instant::now().checked_add(within))?;
        self.renewed(&reply)
    }

    /// Writes a renewal, and does not wait for its reply. An adoption proves the grant. Blocks for
    /// at most `within`.
    pub(in crate::client) fn write_renewal(
        &mut self,
        renewal: Renewal,
        known: &Known,
        within: Duration,
    ) -> Result<(), Error> {
        let request = match renewal {
            Renewal::Renew => renew(&known.key, known.claim, known.token)?,
            Renewal::Adopt => self.adoption(known)?,
        };
        let sent = self.send(&request, within);
        self.close_on_error(sent)
    }

    /// An adoption that says as much of the grant as the server understands. Together with the
    /// numbers of its slots, the rest is a proof for a server that may not know the grant.
    fn adoption<'a>(&self, known: &'a Known) -> Result<Request<'a>, Error> {
        let abilities = self.introduction.abilities;
        let wanted = known.claim.wanted(&known.key)?;
        let mut held = Held::LOCK;
        if abilities.has(Abilities::PROOFS) && known.numbers.len() <= MAX_NUMBERS_LEN {
            held.terms = wanted.terms();
            held.numbers = Some(&*known.numbers).filter(|numbers| !numbers.is_empty());
        }
        let granted_at = known.granted_at.filter(|_| abilities.has(Abilities::AGES));
        held.age = granted_at.map(Moment::elapsed);
        Ok(Request::Adopt {
            key: &known.key,
            token: known.token,
            lease: known.claim.checked_lease()?,
            held,
        })
    }

    /// Takes the lease from the reply to [`Connection::write_renewal`]; `None` while the reply is
    /// incomplete.
    pub(in crate::client) fn renewal_reply(&mut self) -> Result<Option<Duration>, Error> {
        let read = self.read_within(Duration::ZERO);
        let reply = read.and_then(|()| self.take_reply(0));
        let reply = self.close_on_error(reply)?;
        reply.map(|reply| self.renewed(&reply)).transpose()
    }

    fn renewed(&mut self, reply: &Reply) -> Result<Duration, Error> {
        match reply {
            Reply::Renewed(lease) => Ok(*lease),
            other => Err(self.error_for(other)),
        }
    }
}

fn renew(key: &str, claim: Claim, token: Token) -> Result<Request<'_>, Error> {
    check_key(key)?;
    Ok(Request::Renew {
        key,
        kind: claim.kind(),
        token,
        lease: claim.checked_lease()?,
    })
}
