//! Writes the HTTP answer to a client.

use std::time::{Duration, Instant};

use super::request::HttpRefusal;
use crate::net::stream::Stream;

/// How long a client may take to accept an answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// A long answer is sent in pieces of about this many bytes.
const PIECE_LEN: usize = 16 * 1024;

/// The answer when all connections are in use.
pub(super) const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\
    Retry-After: 1\r\nConnection: close\r\n\r\n";

const OK: &str = "200 OK";
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

/// Whether an answer has been sent in full.
pub(super) type Sent = Result<(), ()>;

/// A connection on which one answer is sent to the client.
pub(super) struct HttpAnswer<'a> {
    pub(super) stream: &'a Stream,
    due: Instant,
    /// The client wants no body.
    is_head: bool,
}

/// Tells a client that all connections are in use.
pub(super) fn refuse_full(stream: &Stream) -> Sent {
    let written = stream.write_within(&mut &*FULL, Some(ANSWER_TIME));
    written.map_err(|_| ())
}

impl<'a> HttpAnswer<'a> {
    pub(super) fn new(stream: &'a Stream, is_head: bool) -> Self {
        HttpAnswer {
            stream,
            due: Instant::now() + ANSWER_TIME,
            is_head,
        }
    }

    pub(super) fn whole(&self, content_type: &str, body: &[u8]) -> Sent {
        self.send(OK, content_type, "", body)
    }

    pub(super) fn text(&self, status: &str, body: &str) -> Sent {
        self.send(status, TEXT, "", body.as_bytes())
    }

    pub(super) fn refuse(&self, refusal: HttpRefusal) -> Sent {
        let (status, extra, why) = match refusal {
            HttpRefusal::Malformed => ("400 Bad Request", "", "not a request in HTTP\n"),
            HttpRefusal::NotFound => (
                "404 Not Found",
                "",
                "latchd-operations(7), HTTP lists what there is\n",
            ),
            HttpRefusal::OtherMethod => (
                "405 Method Not Allowed",
                "Allow: GET, HEAD\r\n",
                "nothing can be changed over HTTP\n",
            ),
            HttpRefusal::TooLong => (
                "431 Request Header Fields Too Large",
                "",
                "the headers are too long\n",
            ),
        };
        self.send(status, TEXT, extra, why.as_bytes())
    }

    pub(super) fn ask_for_secret(&self) -> Sent {
        let how = "WWW-Authenticate: Basic realm=\"latchd\", charset=\"UTF-8\"\r\n";
        let why = "the auth token is needed, as a bearer's or as a password\n";
        self.send("401 Unauthorized", TEXT, how, why.as_bytes())
    }

    /// Answers with JSON of any length. The end of the connection is the end of the answer.
    pub(super) fn in_pieces(
        &self,
        write: impl FnOnce(&mut Vec<u8>, &dyn Fn(&mut Vec<u8>) -> Sent) -> Sent,
    ) -> Sent {
        let mut out = format!("HTTP/1.1 {OK}\r\nContent-Type: {JSON}\r\n{HEADERS}").into_bytes();
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
        let mut out = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
             {extra}{HEADERS}",
            body.len()
        )
        .into_bytes();
        if !self.is_head {
            out.extend(body);
        }
        self.write(&mut out)
    }

    /// Sends the bytes in `out` within the time left for the answer, and clears `out`.
    fn write(&self, out: &mut Vec<u8>) -> Sent {
        let left = self.due.saturating_duration_since(Instant::now());
        let written = self.stream.write_within(&mut &out[..], Some(left));
        out.clear();
        written.map_err(|_| ())
    }
}
