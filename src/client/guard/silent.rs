//! A server that leaves a renewal unanswered: its host may have vanished, and another server may
//! have taken over.

use std::mem;

use super::{loss_of, Keeper, Loss};
use crate::client::connection::Connection;
use crate::client::outage::Outage;
use crate::sys::moment::Moment;

/// The connection to such a server, kept open while others are asked: if the server is only slow,
/// it would release the lock when the connection ends.
pub(super) struct Silent {
    pub(super) connection: Connection,
    /// When the renewal was sent.
    sent_at: Moment,
}

impl Keeper {
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
                self.connecting = None;
                self.renewed(lease, silent.sent_at);
            }
            Err(Loss::Closed) => self.shared.hold().is_cut = true,
            Err(loss) => return Err(loss),
        }
        Ok(())
    }
}
