//! What all sessions of a server have in common.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;

use crate::cluster::ClusterNode;
use crate::latchd::requests::Offer;
use crate::latchd::tokens::Tokens;
use crate::log::{Log, SourceThrottle};
use crate::protocol::request::Frame;
use crate::table::Cap;

pub struct SessionRules {
    pub offer: Offer,
    /// The maximum time for a line to arrive. Also the maximum idle time of a connection that holds
    /// nothing, waits for nothing and has enqueued nothing.
    pub read_timeout: Duration,
    /// How long the client may take to accept a reply, or each piece of a long reply; `None` means
    /// no limit.
    pub write_timeout: Option<Duration>,
    /// The tokens of which `auth` must give one before any other request.
    pub auth_tokens: Option<Arc<Tokens>>,
    /// The tokens of which each lets a client break grants over any connection.
    pub admin_tokens: Option<Arc<Tokens>>,
    /// Keeps clients that guess tokens from flooding the log.
    pub auth_refusals: SourceThrottle<Option<IpAddr>>,
    /// Keeps refused claims from flooding the log.
    pub cap_warnings: SourceThrottle<Option<Cap>>,
    /// Locked for writing while no reply may be sent.
    pub replies: RwLock<()>,
    /// The log, which counts the lines that it drops.
    pub log: Log,
    /// This server's part in the cluster; `None` for a single server.
    pub node: Option<Arc<ClusterNode>>,
}

impl SessionRules {
    pub(in crate::latchd) fn is_admin_token(&self, given: Option<&str>) -> bool {
        match (&self.admin_tokens, given) {
            (Some(tokens), Some(given)) => tokens.accept(given.as_bytes()),
            _ => false,
        }
    }

    /// The maximum length of an auth token, in bytes.
    pub(in crate::latchd) fn max_token_len(&self) -> usize {
        self.auth_tokens
            .as_ref()
            .map_or(0, |tokens| tokens.max_len())
    }

    /// Whether the frame is `auth` with the right token. The time of the comparison does not depend
    /// on where a wrong token differs from the right one, or on what else is wrong with the frame.
    pub(in crate::latchd) fn accepts(&self, frame: Frame<'_>) -> bool {
        let [command, key, given] = frame;
        let (given, is_text) = match std::str::from_utf8(given) {
            Ok(given) => (given.trim().as_bytes(), true),
            Err(_) => (given, false),
        };
        let tokens = self.auth_tokens.as_ref();
        let is_right = tokens.is_some_and(|tokens| tokens.accept(given));
        is_right && is_text && command == b"auth" && std::str::from_utf8(key).is_ok()
    }
}
