//! Encoding and parsing of replies, one line each: see latch-protocol(7), FRAMING.

use std::io::{self, Write};
use std::time::Duration;

use super::abilities::Abilities;
use super::limits;
use crate::wire::terms::Refusal;
pub use crate::wire::token::Grant;

/// A reply to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Ok,
    /// `ok` with token and lease.
    Granted(Grant),
    /// `acquired` with token and lease.
    Acquired(Grant),
    /// `ok` with the lease, counted from now.
    Renewed(Duration),
    /// `ok` followed by ability words, and for a client on the server's host `operator=` with the
    /// path of its operator socket: the answer to `hello`. A server with neither sends
    /// [`Reply::Ok`].
    Hello(Abilities, Option<String>),
    /// `ok` with a JSON object, which the server writes in pieces.
    Stats(String),
    Queued,
    Timeout,
    Error,
    /// An operator has broken the grant. Only a client that knows this reply gets it.
    Broken,
    AuthFailed,
    Refused(Refusal),
}

/// What the path of the operator socket follows.
const OPERATOR: &str = "operator=";

/// The replies that consist of a single word.
const WORDS: [Reply; 14] = [
    Reply::Ok,
    Reply::Queued,
    Reply::Timeout,
    Reply::Error,
    Reply::Broken,
    Reply::AuthFailed,
    Reply::Refused(Refusal::AlreadyEnqueued),
    Reply::Refused(Refusal::NotEnqueued),
    Reply::Refused(Refusal::LimitMismatch),
    Reply::Refused(Refusal::MaxLocks),
    Reply::Refused(Refusal::MaxWaiters),
    Reply::Refused(Refusal::LeaseExpired),
    Reply::Refused(Refusal::Draining),
    Reply::Refused(Refusal::NotWritten),
];

/// Parses a reply from a line without its line ending; `None` if the line is not a valid reply.
/// Refusals that are written as `error` are parsed as [`Reply::Error`].
pub fn parse(line: &str) -> Option<Reply> {
    let Some((word, rest)) = line.split_once(' ') else {
        return WORDS.iter().find(|reply| reply.word() == line).cloned();
    };
    match (word, rest.split_once(' ')) {
        ("ok", _) if rest.starts_with('{') => Some(Reply::Stats(rest.to_owned())),
        ("ok", _) if are_words(rest) => {
            let socket = rest.split(' ').find_map(|it| it.strip_prefix(OPERATOR));
            let abilities = Abilities::parse(rest.split(' '));
            Some(Reply::Hello(abilities, socket.map(str::to_owned)))
        }
        ("ok", None) => parse_lease(rest).map(Reply::Renewed),
        ("ok", Some((token, lease))) => parse_grant(token, lease).map(Reply::Granted),
        ("acquired", Some((token, lease))) => parse_grant(token, lease).map(Reply::Acquired),
        _ => None,
    }
}

/// Whether these words are abilities, as in the answer to `hello`. A token may also begin with a
/// letter, but a number follows it.
fn are_words(text: &str) -> bool {
    let begins_with_letter =
        |word: &str| word.starts_with(|first: char| first.is_ascii_lowercase());
    text.split(' ').all(begins_with_letter)
}

fn parse_grant(token: &str, lease: &str) -> Option<Grant> {
    Some(Grant {
        token: token.parse().ok()?,
        lease: parse_lease(lease)?,
    })
}

fn parse_lease(seconds: &str) -> Option<Duration> {
    limits::lease(seconds.parse().ok()?)
}

impl Reply {
    /// The maximum length of a line in bytes, except for [`Reply::Hello`] and [`Reply::Stats`]. The
    /// longest line is `acquired` with a token and a lease.
    pub const MAX_LEN: usize = 64;

    /// The lease of the grant that the reply is about, if it names one.
    pub fn lease(&self) -> Option<Duration> {
        match self {
            Reply::Renewed(lease) => Some(*lease),
            reply => reply.grant().map(|grant| grant.lease),
        }
    }

    /// The new grant that the reply has, if any.
    pub fn grant(&self) -> Option<Grant> {
        match self {
            Reply::Granted(grant) | Reply::Acquired(grant) => Some(*grant),
            _ => None,
        }
    }

    /// Writes the line of the reply to `out`, which must have room for it.
    pub fn write(&self, out: &mut impl Write) {
        let written = match self {
            Reply::Hello(abilities, None) => writeln!(out, "ok {abilities}"),
            Reply::Hello(abilities, Some(socket)) => {
                writeln!(out, "ok {abilities} {OPERATOR}{socket}")
            }
            Reply::Stats(json) => writeln!(out, "ok {json}"),
            reply => reply.write_short(out),
        };
        written.expect("there is room in memory");
    }

    /// Writes the line in one piece, which is made from its end. Formatting with `write!` would
    /// take longer than granting the lock itself.
    fn write_short(&self, out: &mut impl Write) -> io::Result<()> {
        let mut line = [b' '; Reply::MAX_LEN];
        let mut start = line.len();
        let mut put = |bytes: &[u8]| {
            let end = start;
            start -= bytes.len();
            line[start..end].copy_from_slice(bytes);
        };
        put(b"\n");
        if let Some(lease) = self.lease() {
            let mut seconds = lease.as_secs();
            loop {
                put(&[b'0' + (seconds % 10) as u8]);
                seconds /= 10;
                if seconds == 0 {
                    break;
                }
            }
            put(b" ");
        }
        if let Some(grant) = self.grant() {
            put(&grant.token.digits());
            put(b" ");
        }
        put(self.word().as_bytes());
        out.write_all(&line[start..])
    }

    /// The first word of the line.
    fn word(&self) -> &'static str {
        match self {
            Reply::Ok
            | Reply::Granted(_)
            | Reply::Renewed(_)
            | Reply::Hello(..)
            | Reply::Stats(_) => "ok",
            Reply::Acquired(_) => "acquired",
            Reply::Queued => "queued",
            Reply::Timeout => "timeout",
            Reply::Error | Reply::Refused(Refusal::NotHeld | Refusal::NoToken) => "error",
            Reply::Broken => "error_broken",
            Reply::AuthFailed => "error_auth",
            Reply::Refused(Refusal::AlreadyEnqueued) => "error_already_enqueued",
            Reply::Refused(Refusal::NotEnqueued) => "error_not_enqueued",
            Reply::Refused(Refusal::LimitMismatch) => "error_limit_mismatch",
            Reply::Refused(Refusal::MaxLocks) => "error_max_locks",
            Reply::Refused(Refusal::MaxWaiters) => "error_max_waiters",
            Reply::Refused(Refusal::LeaseExpired) => "error_lease_expired",
            Reply::Refused(Refusal::Draining) => "error_draining",
            Reply::Refused(Refusal::NotWritten) => "error_not_written",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0001a3f217b3c4d87f3c1f2b3e9a8d6e";

    #[test]
    fn a_line_that_no_server_sends_is_no_reply() {
        let grants = [
            format!("ok {TOKEN}"),
            format!("ok {TOKEN} 0"),
            format!("ok {TOKEN} -1"),
            format!("ok {TOKEN} 9223372037"),
            format!("ok {TOKEN} 33 "),
            format!("ok {TOKEN}  33"),
            format!("acquired {TOKEN}"),
            format!("queued {TOKEN} 33"),
        ];
        let others = [
            "", " ", "OK", "ok ", "ok 0", "ok X", "ok x ", "ok x 1", "ok []", "acquired", "error x",
        ];
        for line in grants.iter().map(String::as_str).chain(others) {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn words_that_the_client_does_not_know_are_ignored() {
        let keeps = Abilities::SURVIVES_RESTART;
        assert_eq!(parse("ok fly keeps"), Some(Reply::Hello(keeps, None)));
        assert_eq!(parse("ok fly"), Some(Reply::Hello(Abilities::NONE, None)));
        let socket = Some("/run/latchd-1.sock".to_owned());
        let line = "ok keeps operator=/run/latchd-1.sock";
        assert_eq!(parse(line), Some(Reply::Hello(keeps, socket)));
    }

    #[test]
    fn a_refusal_without_a_word_of_its_own_is_an_error() {
        for refusal in [Refusal::NotHeld, Refusal::NoToken] {
            let mut line = Vec::new();
            Reply::Refused(refusal).write(&mut line);
            assert_eq!(line, b"error\n");
        }
        assert_eq!(parse("error"), Some(Reply::Error));
    }
}
