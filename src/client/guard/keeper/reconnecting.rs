//! What a keeper does while it has no connection or its server is silent, and how it ends a hold.

use std::mem;
use std::thread;
use std::time::Duration;

use super::phase::ConnectionEvent;
use super::{last_renewal_of, Keeper, Order};
use crate::client::attempts::Attempts;
use crate::client::connection::Known;
use crate::client::error::{Error, Loss};
use crate::os::moment::Moment;
use crate::wire::abilities::Abilities;

/// How long a keeper waits for an answer before it tries another connection, which may be to
/// another server of the cluster.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a keeper tries to release a lock if no server answers: long enough for another server
/// of a cluster to take over.
const RELEASE_TIME: Duration = Duration::from_secs(20);

impl Keeper {
    /// Reconnects after an error. After a refusal, the lock is lost.
    pub(super) fn handle_error(&mut self, error: &Error) -> Result<(), Loss> {
        match error {
            Error::Refused(_) if self.phase.outage().is_some() => Err(self.refused(Loss::Closed)),
            Error::Refused(_) => Err(self.refused(Loss::Refused)),
            Error::Lost(_, loss) => Err(*loss),
            _ => {
                self.cut();
                Ok(())
            }
        }
    }

    /// The loss if the server refuses a renewal. Near the end of the last lease that it allows, it
    /// refuses every renewal; before that, the reason is `earlier`.
    fn refused(&self, earlier: Loss) -> Loss {
        let last_renewal = last_renewal_of(self.held.asked_at, self.held.lease);
        if self.is_last_lease() && Moment::now() > last_renewal {
            Loss::MaxHold
        } else {
            earlier
        }
    }

    /// Closes the connection, so that the lock is adopted over another one.
    pub(super) fn cut(&mut self) {
        self.held.connection.try_another();
        if let Some(silent) = self.phase.silent() {
            silent.try_another();
        }
        let now = Moment::now();
        match self.phase.outage() {
            None => self.attempts.begin(now),
            Some(_) => self.attempts.pause(),
        }
        self.note(ConnectionEvent::Ended(now));
        self.held.connection.close();
    }

    /// When to stop waiting for an answer and try another connection.
    pub(super) fn patience_ends_at(&self) -> Moment {
        let sent_at = self.phase.sent_at();
        sent_at.map_or(Moment::NEVER, |sent_at| sent_at + PATIENCE)
    }

    /// Sets the connection to a silent server aside, so that the lock is adopted over another one.
    /// Closes it instead if the server has not answered an adoption.
    pub(super) fn try_other_server(&mut self) {
        if self.phase.outage().is_some() {
            return self.cut();
        }
        let connection = &mut self.held.connection;
        connection.try_another();
        let other = connection.another();
        let silent = mem::replace(connection, other);
        self.attempts.begin(Moment::now());
        self.note(ConnectionEvent::SetAside(Box::new(silent)));
    }

    /// Returns to the connection to the silent server if that server has answered after all.
    pub(super) fn read_late_reply(&mut self) -> Result<(), Loss> {
        let Some(outage) = self.phase.outage_mut() else {
            return Ok(());
        };
        let (sent_at, Some(mut silent)) = (outage.began, outage.silent.take()) else {
            return Ok(());
        };
        match silent.renewal_reply() {
            Ok(None) => outage.silent = Some(silent),
            Ok(Some(lease)) => {
                self.held.connection = *silent;
                self.note_renewal(lease, sent_at, ConnectionEvent::AnsweredLate(self.renewal));
            }
            Err(Error::Refused(_)) => return Err(self.refused(Loss::Refused)),
            Err(Error::Lost(_, loss)) => return Err(loss),
            Err(_) => self.note(ConnectionEvent::SilentGone),
        }
        Ok(())
    }

    /// Connects and adopts the lock.
    pub(super) fn reconnect_and_adopt(&mut self) -> Result<(), Loss> {
        let until = self.next_end();
        let connection = &mut self.held.connection;
        match connection.redial(Attempts::time_for_one(until)) {
            Ok(()) => {
                self.attempts.refused_since = None;
                self.send_renewal(Moment::now())
            }
            Err(error) => {
                let grants_may_survive_outage =
                    connection.grants_may_survive_outage() || self.phase.silent().is_some();
                if self.attempts.failed(&error) && !grants_may_survive_outage {
                    return Err(Loss::Closed);
                }
                self.attempts.pause();
                Ok(())
            }
        }
    }

    /// Ends the hold as the guard has ordered.
    pub(in crate::client::guard) fn carry_out(&mut self, order: Order) -> Result<(), Error> {
        if !matches!(order, Order::KeepUntil(until) if Moment::now() < until) {
            return self.end_by(Order::Release);
        }
        let abilities = self.held.connection.introduction.abilities;
        if !abilities.has(Abilities::ADOPT) {
            self.end_by(Order::Release)?;
            return Err(Error::Unsupported(self.held.asked()));
        }
        match self.end_by(order) {
            // The release tells whether the lock was still held.
            Err(error @ (Error::MaxLocks(_) | Error::Refused(_))) => {
                self.end_by(Order::Release)?;
                Err(error.of_keep())
            }
            kept => kept,
        }
    }

    /// Sends the request that ends the hold, and repeats it until a server answers. Connects first
    /// if there is no connection.
    fn end_by(&mut self, order: Order) -> Result<(), Error> {
        let lease_ends_at = self.held.asked_at + self.held.lease;
        let gives_up_at = lease_ends_at.min(Moment::now() + RELEASE_TIME);
        let mut attempts = Attempts::new(Moment::now());
        let mut was_sent = false;
        loop {
            let error = match self.end_once(order, &mut was_sent) {
                ended
                @ (Ok(()) | Err(Error::Refused(_) | Error::MaxLocks(_) | Error::Lost(..))) => {
                    return ended
                }
                Err(error) => error,
            };
            attempts.pause();
            if attempts.next_at >= gives_up_at {
                return Err(error);
            }
            thread::sleep(attempts.next_at.saturating_since(Moment::now()));
        }
    }

    fn end_once(&mut self, order: Order, was_sent: &mut bool) -> Result<(), Error> {
        let lease_ends_at = self.deadline();
        let connection = &mut self.held.connection;
        if connection.socket().is_none() {
            connection.redial(Attempts::time_for_one(Moment::NEVER))?;
            // A server that has crashed knows nothing of the lock. But once a release was sent or
            // the lease has ended, the lock may have another holder, whom the server may not know
            // yet: the proof would be believed, and the lock would then be granted once more.
            let may_be_held = !*was_sent && Moment::now() < lease_ends_at;
            if connection.introduction.abilities.has(Abilities::PROOFS) && may_be_held {
                self.held.asked_at = Moment::now();
                self.held.lease = connection.adopt(&self.held.known, PATIENCE)?;
            }
        }
        let status = self.shared.lock().status;
        let Known {
            key, claim, token, ..
        } = &self.held.known;
        if let Order::KeepUntil(until) = order {
            connection.mark_tag_ended(PATIENCE)?;
            let left = until.saturating_since(Moment::now());
            let claim = claim.with_lease(left.max(Duration::from_secs(1)));
            let kept = connection.keep_within(key, claim, *token, status, PATIENCE);
            return kept.map(drop);
        }
        match connection.release_within(key, *claim, *token, status, PATIENCE) {
            // An earlier release reached the server, but its answer was lost.
            Err(Error::Refused(_)) if *was_sent => Ok(()),
            released => {
                *was_sent = true;
                released
            }
        }
    }
}
