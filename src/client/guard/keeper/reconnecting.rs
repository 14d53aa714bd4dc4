//! What a keeper does without a connection, with a new one, and while its server is silent.

use std::io;
use std::mem;
use std::time::Duration;

use super::{loss_of, Keeper, Loss};
use crate::client::connection::{Connection, Held};
use crate::client::error::Error;
use crate::client::outage::Outage;
use crate::protocol::request::Request;
use crate::sys::moment::Moment;

/// How long a server of a cluster may take to answer a renewal, or to say who has the lock, before
/// another one is asked.
const LOOK_TIME: Duration = Duration::from_secs(1);

/// The connection to a server that leaves a renewal unanswered: its host may have vanished, and
/// another server may have taken over. It is kept open while others are asked: if the server is
/// only slow, it would release the lock when the connection ends.
pub(super) struct Silent {
    pub(super) connection: Connection,
    /// When the renewal was sent.
    sent_at: Moment,
}

impl Keeper {
    /// Renews if the server has taken over from another one. Otherwise the lock is that of the
    /// connection before, with which the server releases it once it notices the end.
    pub(super) fn hear_of_holder(&mut self) -> Result<(), Loss> {
        let token = self.held.grant.token;
        match self.held.connection.look_reply(token) {
            Ok(None) => Ok(()),
            Ok(Some(Held::Orphaned)) => {
                // Etcd has said so: the silent server is not active any more.
                self.silent = None;
                self.send(Moment::now())
            }
            Ok(Some(Held::Gone)) if self.silent.is_none() => Err(Loss::Closed),
            Ok(Some(Held::ByConnection | Held::Gone)) => {
                self.cut();
                Ok(())
            }
            Err(error) => self.survive(error),
        }
    }

    /// Goes on after an error of the connection, and without one; any other is a loss, unless a
    /// silent server may still have the lock.
    pub(super) fn survive(&mut self, error: Error) -> Result<(), Loss> {
        match loss_of(error) {
            loss if loss == Loss::Closed || self.silent.is_some() => {
                self.cut();
                Ok(())
            }
            // The server that was asked over a new connection has released the lock, or never had
            // it.
            Loss::Refused | Loss::BadReply if self.outage.is_some() => Err(Loss::Closed),
            loss => Err(loss),
        }
    }

    /// Takes note that the connection has ended, or is of no use.
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
            None => self.outage = Some(Outage::new(Moment::now())),
            Some(outage) => outage.pause(),
        }
    }

    /// When another server is asked than the one that has not answered.
    pub(super) fn patience_ends_at(&self) -> Moment {
        match self.sent_at {
            Some(sent_at) if self.held.connection.server.other_count() > 0 => sent_at + LOOK_TIME,
            _ => Moment::NEVER,
        }
    }

    /// Turns to another server.
    pub(super) fn lose_patience(&mut self) {
        match &self.outage {
            Some(outage) if outage.is_looking => self.cut(),
            _ => self.set_aside(),
        }
    }

    /// Sets the connection aside, and has another server asked who has the lock.
    pub(super) fn set_aside(&mut self) {
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

    /// Goes back to the silent server if it answers after all. If its connection has ended, the
    /// next answer of another server is as good as after any end.
    pub(super) fn hear_silent(&mut self) -> Result<(), Loss> {
        let Some(mut silent) = self.silent.take() else {
            return Ok(());
        };
        match silent.connection.renewal_reply().map_err(loss_of) {
            Ok(None) => self.silent = Some(silent),
            Ok(Some(lease)) => {
                self.held.connection = silent.connection;
                self.renewed(lease, silent.sent_at);
            }
            Err(Loss::Closed) => self.shared.hold().is_cut = true,
            Err(loss) => return Err(loss),
        }
        Ok(())
    }

    /// Connects and asks who has the lock, if that is due.
    pub(super) fn attempt(&mut self, now: Moment) -> Result<(), Loss> {
        let (until, token) = (self.next_end(), self.held.grant.token);
        let outage = self.outage.as_mut().expect("it has no connection");
        if now < outage.next_attempt {
            return Ok(());
        }
        let connection = &mut self.held.connection;
        match connection.reconnect(Outage::time_for_attempt(until)) {
            Ok(()) => {
                outage.connected();
                // To connect may have taken a while.
                let now = Moment::now();
                self.sent_at = Some(now);
                let left = until.saturating_since(now);
                let (key, fence) = (&self.held.key, token.fence());
                let sent = connection.send_only(&Request::Holder { key, fence }, left);
                sent.or_else(|error| self.survive(error))
            }
            Err(error) => {
                let is_alone = connection.server.other_count() == 0;
                if outage.refused(&error) && is_alone {
                    return Err(Loss::Closed);
                }
                outage.pause();
                Ok(())
            }
        }
    }

    /// Releases, over a new connection if there is none.
    pub(super) fn release(&mut self) -> Result<(), Error> {
        let released = match self.is_connected() {
            true => self.held.release(),
            false => self.connected_anew().and_then(|()| self.held.release()),
        };
        let server = &self.held.connection.server;
        match released {
            // Another server may have the lock in its journal still.
            Err(Error::Closed { .. }) if server.other_count() > 0 => {
                let error = io::ErrorKind::ConnectionReset.into();
                Err(Error::unreachable(server, error))
            }
            released => released,
        }
    }

    fn connected_anew(&mut self) -> Result<(), Error> {
        let connection = &mut self.held.connection;
        let within = Outage::time_for_attempt(Moment::NEVER);
        let connected = connection.reconnect(within);
        connected.map_err(|_| Error::closed(&connection.server))
    }
}
