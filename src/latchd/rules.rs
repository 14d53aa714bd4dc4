//! What all sessions of a server have in common.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;

use super::rights::Rights;
use super::state_file::StateFile;
use super::tokens::Tokens;
use crate::arbiter::Arbiter;
use crate::cluster::ClusterNode;
use crate::log::{Log, SourceThrottle};
use crate::net::stream::Stream;
use crate::protocol::abilities::Abilities;
use crate::protocol::reply::Reply;
use crate::protocol::request::{Frame, ProtocolError, Request};
use crate::table::Cap;
use crate::terms::Refusal;
use crate::text::Escaped;

/// How long the answer to a wrong token is delayed.
pub(super) const AUTH_COOLDOWN: Duration = Duration::from_millis(100);

/// How long a lingering close reads what the peer still sends.
pub(super) const CLOSING_TIME: Duration = Duration::from_millis(250);

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
    /// Keeps clients that lack a right from flooding the log.
    pub right_refusals: SourceThrottle<Option<IpAddr>>,
    /// Keeps refused claims from flooding the log.
    pub cap_warnings: SourceThrottle<Option<Cap>>,
    /// Locked for writing while no reply may be sent.
    pub replies: RwLock<()>,
    /// The log, which counts the lines that it drops.
    pub log: Log,
    /// This server's part in the cluster; `None` for a single server.
    pub node: Option<Arc<ClusterNode>>,
    /// The state file, if there is one.
    pub state: Option<Arc<StateFile>>,
    /// The memory in bytes that the server takes if all caps are reached.
    pub worst_case: u64,
}

impl SessionRules {
    pub(super) fn is_admin_token(&self, given: Option<&str>) -> bool {
        match (&self.admin_tokens, given) {
            (Some(tokens), Some(given)) => tokens.rights_of(given.as_bytes(), true).is_some(),
            _ => false,
        }
    }

    /// The maximum length of an auth token, in bytes.
    pub(super) fn max_token_len(&self) -> usize {
        self.auth_tokens
            .as_ref()
            .map_or(0, |tokens| tokens.max_len())
    }

    /// If a claim was refused because of a cap, names the cap in the log. The client is not told
    /// which cap it was.
    pub(super) fn warn_of_cap(&self, reply: &Reply, arbiter: &Arbiter) {
        if !matches!(
            reply,
            Reply::Refused(Refusal::MaxLocks | Refusal::MaxWaiters)
        ) {
            return;
        }
        if let Some(cap) = arbiter.take_cap_reached() {
            let warnings = &self.cap_warnings;
            warnings.warn(format_args!("cap-reached cap={cap}"), Some(cap));
        }
    }

    /// The rights of the client if the frame is `auth` with a right token. The time of the
    /// comparison does not depend on where a wrong token differs from a right one, or on what else
    /// is wrong with the frame.
    pub(super) fn authenticate(&self, frame: Frame<'_>) -> Option<Rights> {
        let [command, key, given] = frame;
        let (given, is_text) = match std::str::from_utf8(given) {
            Ok(given) => (given.trim().as_bytes(), true),
            Err(_) => (given, false),
        };
        let is_auth = is_text && command == b"auth" && std::str::from_utf8(key).is_ok();
        let tokens = self.auth_tokens.as_ref();
        tokens.and_then(|tokens| tokens.rights_of(given, is_auth))
    }

    /// Logs that a client has no right to make a request. `command` is how the client made it.
    pub(super) fn log_right_refused(&self, stream: &Stream, command: &[u8], asked: &Request<'_>) {
        let key = asked.changed_key().unwrap_or_default().as_bytes();
        let asked = format!("command={} key={}", Escaped(command), Escaped(key));
        let (refusals, source) = (&self.right_refusals, stream.source());
        refusals.warn(format_args!("right-refused peer={stream} {asked}"), source);
    }
}

/// The leases and abilities that a server offers its clients.
#[derive(Clone, Copy)]
pub struct Offer {
    /// The lease of a claim or a renewal that does not name a lease.
    pub default_lease: Duration,
    /// The maximum lease of a claim. No grant may be held for longer.
    pub max_lease: Duration,
    /// What the server can do, for the answer to `hello`.
    pub abilities: Abilities,
}

impl Offer {
    /// Refuses a claim whose lease is longer than a grant may be held.
    pub(super) fn check<'a>(&self, request: Request<'a>) -> Result<Request<'a>, ProtocolError> {
        let lease = match request {
            Request::Acquire(wanted, _) | Request::Enqueue(wanted) => wanted.lease,
            _ => None,
        };
        if lease.is_some_and(|lease| lease > self.max_lease) {
            Err(ProtocolError::BadLease)
        } else {
            Ok(request)
        }
    }
}
