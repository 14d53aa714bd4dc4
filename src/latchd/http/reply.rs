//! What a request that changes something is answered.

use super::answer::{error_body, head, BAD_REQUEST, JSON, OK};
use super::body::Unfit;
use super::request::SESSION_HEADER;
use super::sessions::IDLE_TIMEOUT;
use crate::net::permits::PermitCap;
use crate::protocol::reply::Reply;
use crate::terms::Refusal;
use crate::token::Grant;

/// An answer.
#[derive(Debug)]
pub(super) struct HttpReply {
    status: &'static str,
    /// A header, or nothing.
    extra: &'static str,
    pub(super) body: Vec<u8>,
}

/// The reason for a refusal of a client whose auth token lacks a right.
pub(super) const NO_RIGHT: &str = "the auth token does not have the right to do this";

/// The option that sets a cap on waiting requests and on sessions, without its dashes.
pub(super) fn option_of(cap: PermitCap) -> &'static str {
    match cap {
        PermitCap::Total => "http-max-waiting",
        PermitCap::PerAddress => "max-connections-per-ip",
    }
}

impl HttpReply {
    pub(super) fn head(&self) -> String {
        let has_body = !self.body.is_empty();
        let body = has_body.then_some((JSON, self.body.len()));
        head(self.status, body, self.extra)
    }

    fn ok(json: String) -> HttpReply {
        let body = (json + "\n").into_bytes();
        HttpReply {
            status: OK,
            extra: "",
            body,
        }
    }

    fn error(status: &'static str, code: &str, detail: &str) -> HttpReply {
        HttpReply {
            status,
            extra: "",
            body: error_body(code, detail),
        }
    }

    fn full(code: &str, detail: &str) -> HttpReply {
        HttpReply::error("503 Service Unavailable", code, detail)
    }

    fn conflict(code: &str, detail: &str) -> HttpReply {
        HttpReply::error("409 Conflict", code, detail)
    }

    /// The request has been carried out, and there is nothing to say.
    pub(super) fn done() -> HttpReply {
        HttpReply {
            status: "204 No Content",
            extra: "",
            body: Vec::new(),
        }
    }

    pub(super) fn malformed(detail: &str) -> HttpReply {
        HttpReply::error(BAD_REQUEST, "bad_request", detail)
    }

    /// The header that names a session is missing. `why` continues the sentence.
    pub(super) fn without_session(why: &str) -> HttpReply {
        HttpReply::malformed(&format!("{SESSION_HEADER} {why}"))
    }

    /// A session has been opened.
    pub(super) fn session(id: &str) -> HttpReply {
        let idle_timeout = IDLE_TIMEOUT.as_secs();
        let id = format!("{{\"session_id\":\"{id}\"");
        HttpReply::ok(id + &format!(",\"idle_timeout_s\":{idle_timeout}}}"))
    }

    pub(super) fn session_gone() -> HttpReply {
        let detail = "there is no such session, or it is over";
        HttpReply::error("410 Gone", "session_gone", detail)
    }

    pub(super) fn rate_limited(cap: PermitCap) -> HttpReply {
        let option = option_of(cap);
        let detail = format!("too many requests wait already; latchd --{option} allows more");
        HttpReply {
            extra: "Retry-After: 1\r\n",
            ..HttpReply::error("429 Too Many Requests", "rate_limited", &detail)
        }
    }

    pub(super) fn too_many_sessions(cap: PermitCap) -> HttpReply {
        match cap {
            PermitCap::Total => HttpReply::full("max_sessions", "there are too many sessions"),
            PermitCap::PerAddress => {
                let detail = "there are too many sessions from this address";
                HttpReply::full("max_sessions_per_ip", detail)
            }
        }
    }

    /// The system or the disk refuses what the server needs.
    pub(super) fn unavailable(detail: &str) -> HttpReply {
        HttpReply::full("unavailable", detail)
    }

    /// The answer that says the same as a reply of the latch protocol.
    pub(super) fn of(reply: &Reply) -> HttpReply {
        match reply {
            Reply::Granted(grant) => HttpReply::granted("ok", grant),
            Reply::Acquired(grant) => HttpReply::granted("acquired", grant),
            Reply::Queued => HttpReply::ok("{\"status\":\"queued\"}".into()),
            Reply::Timeout => HttpReply::ok("{\"status\":\"timeout\"}".into()),
            Reply::Renewed(lease) => {
                let lease = lease.as_secs();
                HttpReply::ok(format!("{{\"remaining_s\":{lease}}}"))
            }
            Reply::Refused(refusal) => HttpReply::refused(*refusal),
            Reply::AuthFailed => HttpReply::error("403 Forbidden", "forbidden", NO_RIGHT),
            _ => HttpReply::done(),
        }
    }

    fn granted(status: &str, grant: &Grant) -> HttpReply {
        let (token, lease) = (grant.token, grant.lease.as_secs());
        let status = format!("{{\"status\":\"{status}\"");
        HttpReply::ok(status + &format!(",\"token\":\"{token}\",\"lease_ttl_s\":{lease}}}"))
    }

    fn refused(refusal: Refusal) -> HttpReply {
        match refusal {
            Refusal::NotHeld => {
                let detail = "no holder of the key has this token, or no longer";
                HttpReply::error("404 Not Found", "not_held", detail)
            }
            Refusal::LimitMismatch => {
                let detail = "the key is in use with another limit, or as the other kind";
                HttpReply::conflict("limit_mismatch", detail)
            }
            Refusal::AlreadyEnqueued => {
                let detail = "the session is in the queue, or holds the key, already";
                HttpReply::conflict("already_enqueued", detail)
            }
            Refusal::NotEnqueued => {
                HttpReply::conflict("not_enqueued", "the session is not in the queue")
            }
            Refusal::LeaseExpired => {
                HttpReply::conflict("lease_expired", "the grant ended before it was collected")
            }
            Refusal::MaxLocks => HttpReply::full("max_locks", "a cap on keys or grants is reached"),
            Refusal::MaxWaiters => HttpReply::full("max_waiters", "a cap on waiters is reached"),
            Refusal::Draining => HttpReply::full("draining", "the server is about to end"),
            Refusal::NoToken => HttpReply::unavailable("a file of the server cannot be written"),
        }
    }
}

impl From<Unfit> for HttpReply {
    fn from(unfit: Unfit) -> HttpReply {
        match unfit {
            Unfit::Malformed(detail) => HttpReply::malformed(&detail),
            Unfit::NotHeld => HttpReply::refused(Refusal::NotHeld),
        }
    }
}
