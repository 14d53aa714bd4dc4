//! Connecting again after a connection has ended.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Abilities, Address, Connection, Error, Settings};

impl Connection {
    /// Connects again to the same server, or to another server of its cluster, within `within`. The
    /// auth token and the introduction are sent with the next request.
    pub(in crate::client) fn reconnect(&mut self, within: Duration) -> Result<(), Error> {
        let within = within.min(self.settings.connect_timeout);
        let (stream, _, reached, auth_token) = self.settings.connect(&self.server, within, 0)?;
        self.close();
        (self.stream, self.reached) = (Some(stream), reached);
        self.write_opening(auth_token.as_deref());
        Ok(())
    }

    /// Returns a connection to `server` that is not open yet.
    pub(in crate::client) fn unconnected(server: &Address, settings: &Settings) -> Connection {
        Connection {
            server: server.clone(),
            others: 0,
            reached: server.clone(),
            stream: None,
            buffer: Vec::new(),
            has_answered: false,
            settings: settings.clone(),
            key: None,
            max_reply_len: 0,
            knows_secret: false,
            is_let_in: false,
            tag: None,
            opening: Vec::new(),
            awaited: VecDeque::new(),
            is_welcome: false,
            is_old: false,
            abilities: Abilities::default(),
            needs: Abilities::default(),
            cancelled_by: Vec::new(),
        }
    }

    /// Returns another connection to the same servers, not open yet, with the same introduction.
    pub(in crate::client) fn another(&self) -> Connection {
        Connection {
            reached: self.reached.clone(),
            tag: self.tag.clone(),
            abilities: self.abilities,
            ..Connection::unconnected(&self.server, &self.settings)
        }
    }

    /// Whether grants can outlive a server that refuses connections: the server hands them over
    /// when it restarts, another server of the cluster takes over, or a proxy before the server
    /// refuses them while the server keeps the grants.
    pub(in crate::client) fn may_return(&self) -> bool {
        self.abilities.survives_restart || self.outlives_connection()
    }

    /// Whether a grant can live on although its connection has ended and no client releases it: the
    /// server keeps it, or the next server of the cluster has it on record.
    pub(in crate::client) fn outlives_connection(&self) -> bool {
        self.abilities.lingers || self.server.other_count() > 0
    }
}
