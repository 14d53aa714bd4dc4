//! Which server of a cluster is active, and how this server tells others.

use std::time::Duration;

use super::ClusterNode;

/// Which server is active, as far as this server knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Role {
    /// `None` if no server is known to be active.
    pub(super) active: Option<Active>,
    /// Whether this server is the active one.
    pub(super) is_own: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Active {
    /// The number of a term of an active server. Each term has a higher epoch than the previous
    /// one.
    pub(super) epoch: u64,
    /// Where to reach the active server, as `HOST:PORT`; `None` if the value of the leader key does
    /// not have this form.
    pub(super) address: Option<String>,
}

impl Role {
    /// The role in words, for the supervisor.
    pub(super) fn status(&self) -> String {
        match &self.active {
            Some(Active { epoch, .. }) if self.is_own => format!("Active, epoch {epoch}"),
            Some(Active { epoch, address }) => {
                let address = address.as_deref().unwrap_or("a server without an address");
                format!("Standby of {address}, epoch {epoch}")
            }
            None => "Standby, no server is known to be active".to_owned(),
        }
    }

    /// The answer to a request for the role.
    fn line(&self) -> String {
        match &self.active {
            Some(Active { epoch, address }) => {
                let role = if self.is_own { "active" } else { "standby" };
                format!("ok {role} {epoch} {}", address.as_deref().unwrap_or("-"))
            }
            None => "ok standby 0 -".to_owned(),
        }
    }

    /// The epoch of this server's own term; `None` if this server is not active.
    fn own_epoch(&self) -> Option<u64> {
        let active = self.active.as_ref().filter(|_| self.is_own);
        active.map(|active| active.epoch)
    }
}

impl ClusterNode {
    /// The answer to a request for the role.
    pub fn role_line(&self) -> String {
        self.role().line()
    }

    /// The epoch of this server's own term, and the smoothed duration of a batch of the journal;
    /// `None` if this server is not active.
    pub fn figures(&self) -> Option<(u64, Duration)> {
        Some((self.role().own_epoch()?, self.journal.round_time()))
    }

    /// Whether `epoch`, which a standby has sent, is the epoch of this server's own term.
    pub fn is_current_epoch(&self, epoch: &[u8]) -> bool {
        let own = self.role().own_epoch();
        own.is_some_and(|own| own.to_string().as_bytes() == epoch)
    }
}
