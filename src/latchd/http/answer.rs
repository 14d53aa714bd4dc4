//! Writes the HTTP answer to a client.

use std::time::{Duration, Instant};

use super::request::HttpRefusal;
use crate::net::stream::Stream;
use crate::protocol::stats::{put, write_string};
use crate::sys::deadline::time_left;

/// How long a client may take to accept an answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// A long answer is sent in pieces of about this many bytes.
const PIECE_LEN: usize = 16 * 1024;

/// The answer when all connections are in use.
pub(super) const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\
    Retry-After: 1\r\nConnection: close\r\n\r\n";

/// What a client may wait for before it sends the body of its request.
const INVITATION: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

pub(super) const OK: &str = "200 OK";
pub(super) const BAD_REQUEST: &str = "400 Bad Request";
const OTHER_METHOD: &str = "405 Method Not Allowed";
const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const JSON: &str = "application/json";
pub(super) const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The headers of every answer. A browser must not store the answer, guess its type or show it
/// inside another page. The page may load only what this server serves.
const HEADERS: &str = "Connection: close\r\nCache-Control: no-store\r\n\
    X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
    Cross-Origin-Resource-Policy: same-origin\r\n\
    Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'\r\n\r\n";

/// The form of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Errors {
    Text,
    Json,
}

/// The head of an answer with a body of this type and length, or without a body.
pub(super) fn head(status: &str, body: Option<(&str, usize)>, extra: &str) -> String {
    let body = body.map_or_else(String::new, |(content_type, len)| {
        format!("Content-Type: {content_type}\r\nContent-Length: {len}\r\n")
    });
    format!("HTTP/1.1 {status}\r\n{body}{extra}{HEADERS}")
}

/// An error as JSON.
pub(super) fn error_body(code: &str, detail: &str) -> Vec<u8> {
    let mut body = Vec::new();
    put!(&mut body, "{{\"error\":\"{code}\",\"detail\":");
    write_string(detail, &mut body);
    body.extend(b"}\n");
    body
}

/// Whether an answer has been sent in full.
pub(super) type Sent = Result<(), ()>;

/// A connection on which one answer is sent to the client.
pub(super) struct HttpAnswer<'a> {
    pub(super) stream: &'a Stream,
    due: Instant,
    /// The client wants no body.
    is_head: bool,
    errors: Errors,
}

/// Tells a client that all connections are in use.
pub(super) fn refuse_full(stream: &Stream) -> Sent {
    let written = stream.write_within(&mut &*FULL, Some(ANSWER_TIME));
    written.map_err(|_| ())
}

/// Tells a client that it may send the body of its request. A client that does not get this sends
/// the body after a while.
pub(super) fn invite_body(stream: &Stream) {
    let _ = stream.write_within(&mut &*INVITATION, Some(ANSWER_TIME));
}

impl<'a> HttpAnswer<'a> {
    pub(super) fn new(stream: &'a Stream, is_head: bool, errors: Errors) -> Self {
        HttpAnswer {
            stream,
            due: Instant::now() + ANSWER_TIME,
            is_head,
            errors,
        }
    }

    pub(super) fn whole(&self, content_type: &str, body: &[u8]) -> Sent {
        self.send(OK, content_type, "", body)
    }

    pub(super) fn text(&self, status: &str, body: &str) -> Sent {
        self.send(status, TEXT, "", body.as_bytes())
    }

    pub(super) fn refuse(&self, refusal: HttpRefusal) -> Sent {
        let mut extra = String::new();
        let (status, code, why) = match refusal {
            HttpRefusal::Malformed => (BAD_REQUEST, "bad_request", "not a request in HTTP"),
            HttpRefusal::UnfitBody(why) => (BAD_REQUEST, "bad_request", why),
            HttpRefusal::OtherOrigin => {
                let why = "a page of another host must not ask for this";
                ("403 Forbidden", "forbidden", why)
            }
            HttpRefusal::NotFound => {
                let why = "not found; see HTTP in latchd-operations(7) for the paths";
                ("404 Not Found", "not_found", why)
            }
            HttpRefusal::OtherMethod(allowed) => {
                extra = format!("Allow: {allowed}\r\n");
                let why = "the path has another method";
                (OTHER_METHOD, "method_not_allowed", why)
            }
            HttpRefusal::NoChanges => {
                extra.push_str("Allow: GET, HEAD\r\n");
                let why = "nothing can be changed over HTTP without latchd --http-grants";
                (OTHER_METHOD, "method_not_allowed", why)
            }
            HttpRefusal::TooLong => {
                let status = "431 Request Header Fields Too Large";
                (status, "bad_request", "the headers are too long")
            }
        };
        self.error(status, code, why, &extra)
    }

    pub(super) fn ask_for_secret(&self) -> Sent {
        let how = "WWW-Authenticate: Basic realm=\"latchd\", charset=\"UTF-8\"\r\n";
        let why = "authentication required: send the auth token as a bearer token, or as the \
                   password of any user";
        self.error("401 Unauthorized", "unauthorized", why, how)
    }

    /// Answers with an error. A person reads it as text; a client that can change something reads
    /// it as JSON.
    pub(super) fn error(&self, status: &str, code: &str, why: &str, extra: &str) -> Sent {
        match self.errors {
            Errors::Text => self.send(status, TEXT, extra, format!("{why}\n").as_bytes()),
            Errors::Json => self.send(status, JSON, extra, &error_body(code, why)),
        }
    }

    /// Answers with JSON of any length. The end of the connection is the end of the answer.
    pub(super) fn in_pieces(
        &self,
        write: impl FnOnce(&mut Vec<u8>, &dyn Fn(&mut Vec<u8>) -> Sent) -> Sent,
    ) -> Sent {
        let content_type = format!("Content-Type: {JSON}\r\n");
        let mut out = head(OK, None, &content_type).into_bytes();
        if !self.is_head {
            let send = |out: &mut Vec<u8>| {
                if out.len() < PIECE_LEN {
                    Ok(())
                } else {
                    self.write(out)
                }
            };
            write(&mut out, &send)?;
            out.push(b'\n');
        }
        self.write(&mut out)
    }

    fn send(&self, status: &str, content_type: &str, extra: &str, body: &[u8]) -> Sent {
        let mut out = head(status, Some((content_type, body.len())), extra).into_bytes();
        if !self.is_head {
            out.extend(body);
        }
        self.write(&mut out)
    }

    /// Sends the bytes in `out` within the time left for the answer, and clears `out`.
    fn write(&self, out: &mut Vec<u8>) -> Sent {
        let left = time_left(self.due);
        let written = self.stream.write_within(&mut &out[..], Some(left));
        out.clear();
        written.map_err(|_| ())
    }
}
