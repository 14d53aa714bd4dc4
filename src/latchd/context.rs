//! What all sessions of a server have in common.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;

use super::auth::rights::Rights;
use super::auth::tokens::Tokens;
use super::state_file::StateFile;
use super::statistics::StatisticsSource;
use crate::latchd::arbiter::{Arbiter, Seat};
use crate::latchd::cluster::ClusterNode;
use crate::latchd::table::Cap;
use crate::os::stream::Stream;
use crate::os::text::Escaped;
use crate::shared::log::{Log, Throttle};
use crate::shared::net::connections::Connections;
use crate::wire::abilities::Abilities;
use crate::wire::request::{Frame, ProtocolError, Request};

/// How long the answer to a wrong token is delayed.
pub(super) const AUTH_COOLDOWN: Duration = Duration::from_millis(100);

/// How long a lingering close reads what the peer still sends.
pub(super) const CLOSING_TIME: Duration = Duration::from_millis(250);

pub struct ServerContext {
    pub offer: Offer,
    /// The maximum time for a line to arrive. Also the maximum idle time of a connection that holds
    /// nothing, waits for nothing and has enqueued nothing.
    pub read_timeout: Duration,
    /// How long the client may take to accept a reply, or each piece of a long reply; `None` means
    /// no limit.
    pub write_timeout: Option<Duration>,
    /// Whether a client that ends its stream gives up its grants.
    pub auto_release: bool,
    /// The tokens of which `auth` must give one before any other request.
    pub auth_tokens: Option<Arc<Tokens>>,
    /// The tokens of which each lets a client break grants over any connection.
    pub admin_tokens: Option<Arc<Tokens>>,
    /// The path of a Unix socket of this server, where root and its user may break grants.
    pub operator_socket: Option<String>,
    /// Keeps clients that guess tokens from flooding the log.
    pub auth_refusals: Throttle,
    /// Keeps clients that lack a right from flooding the log.
    pub right_refusals: Throttle,
    /// Keeps clients that send malformed requests from flooding the log.
    pub malformed: Throttle,
    /// Keeps refused claims from flooding the log.
    pub cap_warnings: Throttle,
    /// Locked for writing while no reply may be sent.
    pub replies: RwLock<()>,
    /// The connections of the sessions.
    pub connections: Arc<Connections>,
    /// The log, which counts the lines that it drops.
    pub log: Log,
    /// This server's part in the cluster; `None` for a single server.
    pub node: Option<Arc<ClusterNode>>,
    /// The state file, if there is one.
    pub state: Option<Arc<StateFile>>,
    /// The memory in bytes that the server takes if all caps are reached.
    pub worst_case: u64,
}

/// The name of [`ServerContext`] in the HTTP server.
pub type SessionRules = ServerContext;

impl ServerContext {
    pub(super) fn is_admin_token(&self, given: Option<&str>) -> bool {
        match (&self.admin_tokens, given) {
            (Some(tokens), Some(given)) => tokens.rights_of(given.as_bytes(), true).is_some(),
            _ => false,
        }
    }

    /// The source of the statistics that sessions and the HTTP door show.
    pub(super) fn statistics<'a>(&'a self, arbiter: &'a Arbiter) -> StatisticsSource<'a> {
        StatisticsSource {
            arbiter,
            connections: &self.connections,
            node: self.node.as_deref(),
            log: &self.log,
            worst_case: self.worst_case,
        }
    }

    /// The maximum length of an auth token, in bytes.
    pub(super) fn max_token_len(&self) -> usize {
        self.auth_tokens
            .as_ref()
            .map_or(0, |tokens| tokens.max_len())
    }

    /// If a claim at this seat was refused because of a cap, returns the cap, and names it in the
    /// log. A client of the latch protocol is not told which cap it was.
    pub(super) fn warn_of_cap(&self, seat: &Seat) -> Option<Cap> {
        let cap = seat.cap_reached.take()?;
        let warnings = &self.cap_warnings;
        warnings.warn_of(format_args!("cap-reached cap={cap}"), &cap);
        Some(cap)
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

    /// Logs why what a client has sent is no request, with dflockd's number for that.
    pub(super) fn log_malformed(&self, stream: &Stream, code: u8, reason: &str) {
        self.malformed.warn_of(
            format_args!("malformed-request peer={stream} code={code} reason={reason}"),
            &stream.source(),
        );
    }

    /// Logs that a client has no right to make a request. `command` is how the client made it.
    pub(super) fn log_right_refused(&self, stream: &Stream, command: &[u8], asked: &Request<'_>) {
        let key = asked.changed_key().unwrap_or_default().as_bytes();
        let asked = format!("command={} key={}", Escaped(command), Escaped(key));
        let (refusals, source) = (&self.right_refusals, &stream.source());
        refusals.warn_of(format_args!("right-refused peer={stream} {asked}"), source);
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
    pub(super) fn check(&self, request: &Request<'_>) -> Result<(), ProtocolError> {
        let lease = match request {
            Request::Acquire(wanted, _) | Request::Enqueue(wanted) => wanted.lease,
            _ => None,
        };
        if lease.is_some_and(|lease| lease > self.max_lease) {
            Err(ProtocolError::BadLease)
        } else {
            Ok(())
        }
    }
}
