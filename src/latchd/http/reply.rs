//! What requests are answered.

use std::borrow::Cow;

use crate::latchd::table::Cap;
use crate::shared::net::permits::PermitCap;
use crate::wire::reply::Reply;
use crate::wire::terms::Refusal;
use crate::wire::token::Grant;

pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const JSON: &str = "application/json";

const OK: &str = "200 OK";
const BAD_REQUEST: &str = "400 Bad Request";
const CONFLICT: &str = "409 Conflict";
const FORBIDDEN: &str = "403 Forbidden";
const NOT_FOUND: &str = "404 Not Found";
const OTHER_METHOD: &str = "405 Method Not Allowed";
const UNAVAILABLE: &str = "503 Service Unavailable";

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HttpReply {
    pub(super) status: &'static str,
    /// A header, or nothing.
    pub(super) extra: Cow<'static, str>,
    pub(super) body: ReplyBody,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReplyBody {
    Nothing,
    /// A body of this type.
    Body(&'static str, Cow<'static, [u8]>),
    /// The code of an error, and the reason.
    Error(&'static str, Cow<'static, str>),
}

/// The option that sets a cap on waiting requests and on sessions, without its dashes.
pub(super) fn option_of(cap: PermitCap) -> &'static str {
    match cap {
        PermitCap::Total => "http-max-waiting",
        PermitCap::PerAddress => "max-connections-per-ip",
    }
}

impl HttpReply {
    const fn new(status: &'static str, body: ReplyBody) -> HttpReply {
        let extra = Cow::Borrowed("");
        HttpReply {
            status,
            extra,
            body,
        }
    }

    fn with(self, header: impl Into<Cow<'static, str>>) -> HttpReply {
        let extra = header.into();
        HttpReply { extra, ..self }
    }

    /// What was asked for.
    pub(super) fn whole(
        content_type: &'static str,
        body: impl Into<Cow<'static, [u8]>>,
    ) -> HttpReply {
        HttpReply::new(OK, ReplyBody::Body(content_type, body.into()))
    }

    /// The head of an answer whose length is not known yet.
    pub(super) fn json_in_pieces() -> HttpReply {
        HttpReply::new(OK, ReplyBody::Nothing).with(format!("Content-Type: {JSON}\r\n"))
    }

    /// Whether the server can do its work, and if not, why.
    pub(super) fn state(why_not: Option<&str>) -> HttpReply {
        let status = why_not.map_or(OK, |_| UNAVAILABLE);
        let state = format!("{{\"status\":\"{}\"}}", why_not.unwrap_or("ok"));
        HttpReply {
            status,
            ..HttpReply::ok(state)
        }
    }

    pub(super) fn ok(json: String) -> HttpReply {
        HttpReply::whole(JSON, (json + "\n").into_bytes())
    }

    fn error(
        status: &'static str,
        code: &'static str,
        why: impl Into<Cow<'static, str>>,
    ) -> HttpReply {
        HttpReply::new(status, ReplyBody::Error(code, why.into()))
    }

    /// The request has been carried out, and there is nothing to say.
    pub(super) fn done() -> HttpReply {
        HttpReply::new("204 No Content", ReplyBody::Nothing)
    }

    pub(super) fn standby() -> HttpReply {
        let why = "this server is a standby; the active server has the locks";
        HttpReply::error(UNAVAILABLE, "not_leader", why)
    }

    pub(super) fn not_http() -> HttpReply {
        HttpReply::malformed("not a request in HTTP")
    }

    pub(super) fn too_long() -> HttpReply {
        let status = "431 Request Header Fields Too Large";
        HttpReply::error(status, "bad_request", "the headers are too long")
    }

    pub(super) fn long_body() -> HttpReply {
        HttpReply::malformed("the body is longer than 4096 bytes, or has too many chunks")
    }

    /// A part of the request has not arrived in time.
    pub(super) fn too_slow() -> HttpReply {
        let status = "408 Request Timeout";
        HttpReply::error(status, "timeout", "the request is not complete after 5 s")
    }

    /// A page of another host has sent the request.
    pub(super) fn other_origin() -> HttpReply {
        let why = "a page of another host must not ask for this";
        HttpReply::error(FORBIDDEN, "forbidden", why)
    }

    pub(super) fn not_found() -> HttpReply {
        let why = "not found; see latchd-http(7) for the paths";
        HttpReply::error(NOT_FOUND, "not_found", why)
    }

    /// The path has only this method.
    pub(super) fn other_method(allowed: &str) -> HttpReply {
        let allow = format!("Allow: {allowed}\r\n");
        HttpReply::error(
            OTHER_METHOD,
            "method_not_allowed",
            "the path has another method",
        )
        .with(allow)
    }

    pub(super) fn no_changes() -> HttpReply {
        let why = "nothing can be changed over HTTP without latchd --http-grants";
        HttpReply::error(OTHER_METHOD, "method_not_allowed", why).with("Allow: GET, HEAD\r\n")
    }

    /// The client addresses the server by a name that the server does not know.
    pub(super) fn other_name() -> HttpReply {
        let why = "this server does not go by that name; latchd --http-name NAME gives it another";
        HttpReply::error("421 Misdirected Request", "bad_request", why)
    }

    pub(super) fn ask_for_secret() -> HttpReply {
        let why = "authentication required: send the auth token as a bearer token, or as the \
                   password of any user";
        HttpReply::error("401 Unauthorized", "unauthorized", why)
            .with("WWW-Authenticate: Basic realm=\"latchd\", charset=\"UTF-8\"\r\n")
    }

    pub(super) fn lacks_right(right: &str) -> HttpReply {
        let why = format!("the auth token does not have the right to {right} this");
        HttpReply::error(FORBIDDEN, "forbidden", why)
    }

    pub(super) fn malformed(detail: impl Into<Cow<'static, str>>) -> HttpReply {
        HttpReply::error(BAD_REQUEST, "bad_request", detail)
    }

    pub(super) fn session_gone() -> HttpReply {
        let detail = "there is no such session, or it is over";
        HttpReply::error("410 Gone", "session_gone", detail)
    }

    pub(super) fn rate_limited(cap: PermitCap) -> HttpReply {
        let option = option_of(cap);
        let detail = format!("too many requests wait already; latchd --{option} allows more");
        HttpReply::error("429 Too Many Requests", "rate_limited", detail).with("Retry-After: 1\r\n")
    }

    pub(super) fn too_many_sessions(cap: PermitCap) -> HttpReply {
        let code = match cap {
            PermitCap::Total => "max_sessions",
            PermitCap::PerAddress => "max_sessions_per_ip",
        };
        let option = option_of(cap);
        HttpReply::error(
            UNAVAILABLE,
            code,
            format!("too many sessions; latchd --{option} allows more"),
        )
    }

    /// The system or the disk refuses what the server needs.
    pub(super) fn unavailable(detail: impl Into<Cow<'static, str>>) -> HttpReply {
        HttpReply::error(UNAVAILABLE, "unavailable", detail)
    }

    /// The answer that says the same as a reply of the latch protocol, and names the cap that a
    /// claim has reached.
    pub(super) fn of(reply: &Reply, cap: Option<Cap>) -> HttpReply {
        match reply {
            Reply::Granted(grant) => HttpReply::granted("ok", grant),
            Reply::Acquired(grant) => HttpReply::granted("acquired", grant),
            Reply::Queued => HttpReply::ok("{\"status\":\"queued\"}".into()),
            Reply::Timeout => HttpReply::ok("{\"status\":\"timeout\"}".into()),
            Reply::Renewed(lease) => {
                let lease = lease.as_secs();
                HttpReply::ok(format!("{{\"remaining_s\":{lease}}}"))
            }
            Reply::Refused(refusal) => HttpReply::refused(*refusal, cap),
            _ => HttpReply::done(),
        }
    }

    fn granted(status: &str, grant: &Grant) -> HttpReply {
        let (token, lease) = (grant.token, grant.lease.as_secs());
        let status = format!("{{\"status\":\"{status}\"");
        HttpReply::ok(status + &format!(",\"token\":\"{token}\",\"lease_ttl_s\":{lease}}}"))
    }

    pub(super) fn refused(refusal: Refusal, cap: Option<Cap>) -> HttpReply {
        let (_, code) = Refusal::ALL[refusal as usize];
        let (status, detail) = match refusal {
            Refusal::NotHeld => (
                NOT_FOUND,
                "no holder of the key has this token, or no longer",
            ),
            Refusal::LimitMismatch => (
                CONFLICT,
                "the key is in use with another limit, or as the other kind",
            ),
            Refusal::AlreadyEnqueued => (
                CONFLICT,
                "the session is in the queue, or holds the key, already",
            ),
            Refusal::NotEnqueued => (CONFLICT, "the session is not in the queue"),
            Refusal::LeaseExpired => (CONFLICT, "the grant ended before it was collected"),
            Refusal::Draining => (UNAVAILABLE, "the server is about to end"),
            Refusal::NoToken | Refusal::NotWritten => {
                return HttpReply::unavailable("a file of the server cannot be written");
            }
            Refusal::MaxLocks | Refusal::MaxWaiters => {
                let at_cap = |cap| format!("a cap is reached; latchd --{cap} allows more");
                let why = cap.map_or(
                    "a cap is reached, or little memory is left".to_owned(),
                    at_cap,
                );
                return HttpReply::error(UNAVAILABLE, code, why);
            }
        };
        HttpReply::error(status, code, detail)
    }
}
