//! Writes the HTTP answer to a client.

use std::time::{Duration, Instant};

use super::reply::{HttpReply, ReplyBody, JSON, TEXT};
use crate::latchd::statistics::stats::{put, write_string};
use crate::os::event::time_left;
use crate::os::stream::Stream;

/// How long a client may take to accept an answer.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(10);

/// A long answer is sent in pieces of about this many bytes.
const PIECE_LEN: usize = 16 * 1024;

/// The answer when all connections are in use.
pub(super) const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\
    Retry-After: 1\r\nConnection: close\r\n\r\n";

/// What a client may wait for before it sends the body of its request. A client that does not get
/// this sends the body after a while.
pub(super) const INVITATION: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

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
    /// The client can change something, so it reads errors as JSON. Otherwise a person reads them.
    has_changes: bool,
}

/// Tells a client that all connections are in use.
pub(super) fn refuse_full(stream: &Stream) -> Sent {
    let written = stream.write_within(&mut &*FULL, Some(ANSWER_TIME));
    written.map_err(|_| ())
}

impl<'a> HttpAnswer<'a> {
    pub(super) fn new(stream: &'a Stream, is_head: bool, has_changes: bool) -> Self {
        HttpAnswer {
            stream,
            due: Instant::now() + ANSWER_TIME,
            is_head,
            has_changes,
        }
    }

    /// Sends an answer that promises nothing about holders.
    pub(super) fn send(&self, reply: &HttpReply) -> Sent {
        let mut out = Vec::new();
        self.write(reply, &mut out);
        self.flush(&mut out)
    }

    /// Writes an answer into `out`.
    pub(super) fn write(&self, reply: &HttpReply, out: &mut Vec<u8>) {
        let mut error = Vec::new();
        let body = match &reply.body {
            ReplyBody::Nothing => None,
            ReplyBody::Body(content_type, body) => Some((*content_type, &**body)),
            ReplyBody::Error(code, why) if self.has_changes => {
                put!(&mut error, "{{\"error\":\"{code}\",\"detail\":");
                write_string(why, &mut error);
                error.extend(b"}\n");
                Some((JSON, &*error))
            }
            ReplyBody::Error(_, why) => {
                put!(&mut error, "{why}\n");
                Some((TEXT, &*error))
            }
        };
        put!(out, "HTTP/1.1 {}\r\n", reply.status);
        if let Some((content_type, body)) = body {
            let len = body.len();
            put!(
                out,
                "Content-Type: {content_type}\r\nContent-Length: {len}\r\n"
            );
        }
        put!(out, "{}{HEADERS}", reply.extra);
        if !self.is_head {
            out.extend(body.map_or(&[][..], |(_, body)| body));
        }
    }

    /// Answers with JSON of any length. The end of the connection is the end of the answer.
    pub(super) fn in_pieces(
        &self,
        write: impl FnOnce(&mut Vec<u8>, &dyn Fn(&mut Vec<u8>) -> Sent) -> Sent,
    ) -> Sent {
        let mut out = Vec::new();
        self.write(&HttpReply::json_in_pieces(), &mut out);
        if !self.is_head {
            let send = |out: &mut Vec<u8>| {
                if out.len() < PIECE_LEN {
                    Ok(())
                } else {
                    self.flush(out)
                }
            };
            write(&mut out, &send)?;
            out.push(b'\n');
        }
        self.flush(&mut out)
    }

    /// Sends the bytes in `out` within the time left for the answer, and clears `out`.
    fn flush(&self, out: &mut Vec<u8>) -> Sent {
        let left = time_left(self.due);
        let written = self.stream.write_within(&mut &out[..], Some(left));
        out.clear();
        written.map_err(|_| ())
    }
}
