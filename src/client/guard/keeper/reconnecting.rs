//! What a keeper does while it has no connection or its server is silent, and how it ends a hold.

use std::mem;
use std::thread;
use std::time::Duration;

use super::{last_renewal_of, Keeper, Order};
use crate::client::connection::Connection;
use crate::client::error::{Error, Loss};
use crate::client::outage::Outage;
use crate::sys::moment::Moment;

/// How long a keeper waits for an answer before it tries another connection, which may be to
/// another server of the cluster.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a keeper tries to release a lock if no server answers. It tries until the end of the
/// lease if the end of the connection does not release the lock.
const RELEASE_TIME: Duration = Duration::from_secs(10);

/// The connection to a server that has not answered a renewal. The server may be slow, the network
/// may have failed, or another server may have taken over. The connection stays open until the lock
/// has moved to another one, because a slow server would release the lock when the connection ends.
pub(super) struct Silent {
    pub(super) connection: Connection,
    sent_at: Moment,
}

impl Keeper {
    /// Reconnects after an error. After a refusal, the lock is lost.
    pub(super) fn handle_error(&mut self, error: &Error) -> Result<(), Loss> {
        match error {
            Error::Refused(_) if self.outage.is_some() => Err(self.refused(Loss::Closed)),
            Error::Refused(_) => Err(self.refused(Loss::Refused)),
            _ => {
                self.cut();
                Ok(())
            }
        }
    }

    /// The loss if the server refuses a renewal. Near the end of the last lease that it allows, it
    /// refuses every renewal; before that, the reason is `earlier`.
    fn refused(&self, earlier: Loss) -> Loss {
        let last_renewal = last_renewal_of(self.held.asked_at, self.held.grant.lease);
        match self.is_last_lease() && Moment::now() > last_renewal {
            true => Loss::MaxHold,
            false => earlier,
        }
    }

    /// Closes the connection, so that the lock is adopted over another one.
    pub(super) fn cut(&mut self) {
        self.held.connection.try_another();
        if let Some(silent) = &self.silent {
            silent.connection.try_another();
        }
        self.held.connection.close();
        self.sent_at = None;
        if self.silent.is_none() {
            self.shared.hold().is_cut = true;
        }
        match &mut self.outage {
            None => self.outage = Some(Outage::after(self.last_outage.take(), Moment::now())),
            Some(outage) => outage.pause(),
        }
    }

    /// When to stop waiting for an answer and try another connection.
    pub(super) fn patience_ends_at(&self) -> Moment {
        self.sent_at
            .map_or(Moment::NEVER, |sent_at| sent_at + PATIENCE)
    }

    /// Sets the connection to a silent server aside, or closes it if the server has not answered an
    /// adoption.
    pub(super) fn try_other_server(&mut self) {
        match self.outage {
            Some(_) => self.cut(),
            None => self.set_aside(),
        }
    }

    /// Sets the connection aside, so that the lock is adopted over another one.
    fn set_aside(&mut self) {
        let Some(sent_at) = self.sent_at.take() else {
            return;
        };
        let connection = &mut self.held.connection;
        connection.try_another();
        let other = connection.another();
        self.silent = Some(Silent {
            connection: mem::replace(connection, other),
            sent_at,
        });
        self.outage.get_or_insert_with(|| Outage::new(sent_at));
    }

    /// Returns to the connection to the silent server if that server has answered after all.
    pub(super) fn read_late_reply(&mut self) -> Result<(), Loss> {
        let Some(mut silent) = self.silent.take() else {
            return Ok(());
        };
        match silent.connection.renewal_reply() {
            Ok(None) => self.silent = Some(silent),
            Ok(Some(lease)) => {
                self.held.connection = silent.connection;
                self.renewed(lease, silent.sent_at);
            }
            Err(Error::Refused(_)) => return Err(self.refused(Loss::Refused)),
            Err(_) => self.shared.hold().is_cut = true,
        }
        Ok(())
    }

    /// Connects and adopts the lock, if an attempt is due.
    pub(super) fn attempt(&mut self, now: Moment) -> Result<(), Loss> {
        let until = self.next_end();
        let outage = self.outage.as_mut().expect("it has no connection");
        if now < outage.next_attempt {
            return Ok(());
        }
        let connection = &mut self.held.connection;
        match connection.reconnect(Outage::time_for_attempt(until)) {
            Ok(()) => {
                outage.connected();
                // Connecting may have taken a while, so `now` is no longer accurate.
                self.send(Moment::now())
            }
            Err(error) => {
                let may_return = connection.may_return() || self.silent.is_some();
                if outage.refused(&error) && !may_return {
                    return Err(Loss::Closed);
                }
                outage.pause();
                Ok(())
            }
        }
    }

    /// Ends the hold as the guard has ordered.
    pub(in crate::client::guard) fn carry_out(&mut self, order: Order) -> Result<(), Error> {
        if !matches!(order, Order::KeepUntil(until) if Moment::now() < until) {
            return self.end_by(Order::Release);
        }
        if !self.held.connection.abilities.adopt {
            self.end_by(Order::Release)?;
            return Err(Error::Unsupported(self.asked()));
        }
        match self.end_by(order) {
            // The release tells whether the lock was still held.
            Err(Error::MaxLocks(_) | Error::Refused(_)) => {
                self.end_by(Order::Release)?;
                Err(Error::NotKept(self.asked()))
            }
            kept => kept,
        }
    }

    /// Sends the request that ends the hold, and repeats it until a server answers. Connects first
    /// if there is no connection.
    fn end_by(&mut self, order: Order) -> Result<(), Error> {
        let lease_ends_at = self.held.asked_at + self.held.grant.lease;
        let gives_up_at = match self.held.connection.outlives_connection() {
            true => lease_ends_at,
            false => lease_ends_at.min(Moment::now() + RELEASE_TIME),
        };
        let mut outage = Outage::new(Moment::now());
        let mut was_sent = false;
        loop {
            let error = match self.end_once(order, &mut outage, &mut was_sent) {
                ended
                @ (Ok(()) | Err(Error::Refused(_) | Error::MaxLocks(_) | Error::Lost(..))) => {
                    return ended
                }
                Err(error) => error,
            };
            outage.pause();
            if outage.next_attempt >= gives_up_at {
                return Err(error);
            }
            thread::sleep(outage.next_attempt.saturating_since(Moment::now()));
        }
    }

    fn end_once(
        &mut self,
        order: Order,
        outage: &mut Outage,
        was_sent: &mut bool,
    ) -> Result<(), Error> {
        let connection = &mut self.held.connection;
        if connection.socket().is_none() {
            let within = Outage::time_for_attempt(Moment::NEVER);
            match connection.reconnect(within) {
                Ok(()) => outage.connected(),
                Err(error) if outage.refused(&error) && !connection.may_return() => {
                    return Err(Error::Lost(self.asked(), Loss::Closed));
                }
                Err(error) => return Err(error),
            }
        }
        if let Order::KeepUntil(until) = order {
            let left = until.saturating_since(Moment::now());
            let least = Duration::from_secs(1);
            return self.held.keep_for(left.max(least), PATIENCE);
        }
        match self.held.release(PATIENCE) {
            // An earlier release reached the server, but its answer was lost.
            Err(Error::Refused(_)) if *was_sent => Ok(()),
            released => {
                *was_sent = true;
                released
            }
        }
    }
}
