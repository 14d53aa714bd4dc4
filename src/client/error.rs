//! Why a request has not been granted.

use std::fmt;
use std::io;

use crate::text::{reason, Escaped};

/// Why a request came to nothing. Every status that a server may answer has its variant.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The server could not be reached, or the connection broke.
    Unreachable(io::Error),
    /// The server closed the connection.
    Closed,
    /// The server did not answer in time. The connection has been dropped, since its answer would
    /// be taken for that to the next request.
    NoReply,
    /// `error_auth`: the server wants another token, or one at all.
    AuthFailed,
    /// `error_max_locks`: as many keys or slots as the server allows are in use, in all or
    /// by this connection.
    MaxLocks,
    /// `error_max_waiters`: as many waiters as the server allows are queued, for the key or in
    /// all.
    MaxWaiters,
    /// `error_limit_mismatch`: the key is in use as the other kind, or with another limit.
    LimitMismatch,
    /// `error_lease_expired`: the lease was over before the grant was collected.
    LeaseExpired,
    /// `error_not_enqueued`: there is no place in the queue to wait in.
    NotEnqueued,
    /// `error_already_enqueued`: this connection is in the queue already.
    AlreadyEnqueued,
    /// `error_draining`: the server is shutting down.
    Draining,
    /// `error`: the token is not that of a holder, or the request is not one.
    Refused,
    /// The server answered what no server of this protocol answers.
    BadReply(String),
    /// The key cannot be sent: it is empty, too long, or has a blank or a line end in it.
    InvalidKey,
    /// A number or a token that cannot be sent.
    InvalidArgument(&'static str),
}

impl Error {
    /// The error that a reply stands for, if it is none of the good ones.
    pub(super) fn from_reply(reply: &str) -> Error {
        match reply {
            "error" => Error::Refused,
            "error_auth" => Error::AuthFailed,
            "error_max_locks" => Error::MaxLocks,
            "error_max_waiters" => Error::MaxWaiters,
            "error_limit_mismatch" => Error::LimitMismatch,
            "error_lease_expired" => Error::LeaseExpired,
            "error_not_enqueued" => Error::NotEnqueued,
            "error_already_enqueued" => Error::AlreadyEnqueued,
            "error_draining" => Error::Draining,
            other => Error::bad_reply(other),
        }
    }

    /// A reply that is none; the beginning of it says enough.
    pub(crate) fn bad_reply(reply: &str) -> Error {
        Error::BadReply(reply.chars().take(200).collect())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Unreachable(error) => f.write_str(&reason(error)),
            Error::Closed => f.write_str("the server closed the connection"),
            Error::NoReply => f.write_str("the server does not answer"),
            Error::AuthFailed => f.write_str("the server refused the auth token"),
            Error::MaxLocks => f.write_str("the server allows no more keys or slots"),
            Error::MaxWaiters => f.write_str("the server allows no more waiters"),
            Error::LimitMismatch => f.write_str("the key is in use with another kind or limit"),
            Error::LeaseExpired => f.write_str("the lease was over before the grant was collected"),
            Error::NotEnqueued => f.write_str("there is no place in the queue to wait in"),
            Error::AlreadyEnqueued => f.write_str("this connection is in the queue already"),
            Error::Draining => f.write_str("the server is shutting down"),
            Error::Refused => f.write_str("the server refused the request"),
            Error::BadReply(reply) => {
                write!(f, "the server answered {}", Escaped(reply.as_bytes()))
            }
            Error::InvalidKey => {
                f.write_str("a key is 1 to 256 bytes without blanks and line ends")
            }
            Error::InvalidArgument(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Unreachable(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => Error::Closed,
            _ => Error::Unreachable(error),
        }
    }
}
