//! The errors of the client.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use super::address::Address;
use crate::os::text::{reason, unusable_file, Escaped, Readable};

/// Why a request failed. Each error status that a server may reply with has its own variant.
///
/// An error of the server or of the network names the server: `127.0.0.1:6388: connection refused`.
/// A refusal by the server also names the key: `deploy at 127.0.0.1:6388: the server is shutting
/// down`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The client cannot reach the server, or the connection broke.
    #[non_exhaustive]
    Unreachable {
        /// The server that was asked.
        server: Address,
        /// The system's reason.
        error: io::Error,
    },
    /// The server closed the connection.
    #[non_exhaustive]
    Closed {
        /// The server that was asked.
        server: Address,
        /// Whether the server had answered before.
        has_answered: bool,
    },
    /// The server did not answer in time. The client has closed the connection, because a late
    /// reply would be mistaken for the reply to the next request.
    #[non_exhaustive]
    NoReply {
        /// The server that was asked.
        server: Address,
    },
    /// `error_auth`: the auth token is missing or wrong, or the server has none.
    #[non_exhaustive]
    AuthFailed {
        /// The server that was asked.
        server: Address,
        /// Whether the client has presented an auth token.
        auth: Auth,
    },
    /// The reply is malformed, or does not fit the request.
    #[non_exhaustive]
    BadReply {
        /// The server that was asked.
        server: Address,
        /// The reply, cut to its first 200 characters.
        reply: String,
    },
    /// `error_max_locks`: the maximum number of keys or grants is in use, on the whole server or by
    /// this connection.
    MaxLocks(Asked),
    /// `error_max_waiters`: the maximum number of claims is already waiting, for the key or on the
    /// whole server.
    MaxWaiters(Asked),
    /// `error_limit_mismatch`: the key is in use as the other kind (lock or semaphore), or with
    /// another limit.
    LimitMismatch(Asked),
    /// `error_lease_expired`: the lease was over before the grant was collected.
    LeaseExpired(Asked),
    /// `error_not_enqueued`: the connection has no place in the queue to wait in.
    NotEnqueued(Asked),
    /// `error_already_enqueued`: this connection is already in the queue.
    AlreadyEnqueued(Asked),
    /// `error_draining`: the server is shutting down.
    Draining(Asked),
    /// `error_not_written`: the server cannot write its state file, so it makes no grant that must
    /// be in the file. Other claims are granted.
    NotWritten(Asked),
    /// `error`: no holder has this token, or the server does not know the request or cannot carry
    /// it out.
    Refused(Asked),
    /// `error_auth` to a request other than `auth`: the auth token does not have the right to make
    /// it, or, for `break`, the client is not an operator of the server.
    NotAllowed(Asked),
    /// The server is too old for the request, or is another implementation. A claim that fails with
    /// this error holds no lock.
    Unsupported(Asked),
    /// The server does not keep the grant without a connection; [`KeepLimit`] says why. The lock
    /// was released.
    NotKept(Asked, KeepLimit),
    /// The lock was lost before the guard released it; [`Loss`] says how.
    Lost(Asked, Loss),
    /// A [`CancelHandle`](super::CancelHandle) has ended the wait. No lock is held.
    Cancelled,
    /// The key cannot be sent: it is empty or too long, or contains a space, a tab or a line end.
    InvalidKey,
    /// A number, a tag or a secret cannot be sent.
    InvalidArgument(&'static str),
    /// An environment variable is not valid. The text says which one and why.
    Environment(String),
    /// The file with the auth token cannot be read, or contains no valid auth token.
    AuthTokenFile(PathBuf, io::Error),
    /// A file of certificates cannot be read, or contains no certificate.
    CaFile(PathBuf, io::Error),
    /// The client and the server do not agree on TLS, or the server's certificate is not trusted.
    #[non_exhaustive]
    Untrusted {
        /// The server that was asked.
        server: Address,
        /// The reason.
        error: io::Error,
    },
    /// This host has no thread or no file descriptor left for the guard.
    System(io::Error),
}

/// What was asked for, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Asked {
    /// The key; `None` if the request did not name one.
    pub key: Option<String>,
    /// The server that was asked.
    pub server: Address,
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(key) = &self.key {
            write!(f, "{} at ", Readable(key))?;
        }
        self.server.fmt(f)
    }
}

/// Whether a client presents an auth token to its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Auth {
    /// The client presents an auth token.
    Token,
    /// The client has no auth token.
    NoToken,
}

/// Why a server does not keep a grant without a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeepLimit {
    /// The server already keeps its maximum number of grants.
    Count,
    /// The server keeps no grants, or not for the time that was asked for. It does not say which.
    Time,
}

/// How a lock was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The connection ended, and no server renewed the lock over another connection.
    Closed,
    /// The server refused the renewal: the lease was over, or a client released the lock with its
    /// token.
    Refused,
    /// An operator broke the lock (`latch break`), as the server says.
    Broken,
    /// No renewal was answered in time. The lease may be over at any moment.
    Deadline,
    /// The lock was held for as long as the server allows (`latchd --max-hold`).
    MaxHold,
    /// This process is a child, by fork(2), of the process that acquired the lock.
    Forked,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::Closed => "the connection to the server ended, and the lock with it",
            Loss::Refused => "the server refused to renew it: it was released or broken by another",
            Loss::Broken => "an operator broke it",
            Loss::Deadline => "the server did not renew it in time",
            Loss::MaxHold => "it was held for as long as the server allows (--max-hold)",
            Loss::Forked => "it belongs to the process that acquired it, and this is its child",
        })
    }
}

impl Error {
    pub(super) fn unreachable(server: &Address, error: io::Error) -> Error {
        let server = server.clone();
        Error::Unreachable { server, error }
    }

    pub(super) fn closed(server: &Address, has_answered: bool) -> Error {
        let server = server.clone();
        Error::Closed {
            server,
            has_answered,
        }
    }

    pub(super) fn no_reply(server: &Address) -> Error {
        let server = server.clone();
        Error::NoReply { server }
    }

    /// The error for a reply that does not fit its request, with the beginning of the reply.
    pub(crate) fn bad_reply(server: &Address, reply: &[u8]) -> Error {
        Error::BadReply {
            server: server.clone(),
            reply: String::from_utf8_lossy(reply).chars().take(200).collect(),
        }
    }

    /// The server that the error is about, if any.
    pub fn server(&self) -> Option<&Address> {
        match self {
            Error::Unreachable { server, .. }
            | Error::Closed { server, .. }
            | Error::NoReply { server }
            | Error::Untrusted { server, .. }
            | Error::AuthFailed { server, .. }
            | Error::BadReply { server, .. } => Some(server),
            _ => self.asked().map(|asked| &asked.server),
        }
    }

    /// The key that the error is about, if any.
    pub fn key(&self) -> Option<&str> {
        self.asked()?.key.as_deref()
    }

    pub(super) fn asked(&self) -> Option<&Asked> {
        match self {
            Error::MaxLocks(asked)
            | Error::MaxWaiters(asked)
            | Error::LimitMismatch(asked)
            | Error::LeaseExpired(asked)
            | Error::NotEnqueued(asked)
            | Error::AlreadyEnqueued(asked)
            | Error::Draining(asked)
            | Error::NotWritten(asked)
            | Error::Refused(asked)
            | Error::NotAllowed(asked)
            | Error::Unsupported(asked)
            | Error::NotKept(asked, _)
            | Error::Lost(asked, _) => Some(asked),
            _ => None,
        }
    }

    /// Whether the same request may succeed soon, because the server restarts or has not started
    /// yet, or its disk is full. Of the refusals, only [`Error::Draining`] and
    /// [`Error::NotWritten`] are transient. A lack of descriptors or memory on this host is not
    /// transient.
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Unreachable { .. } => !self.is_shortage(),
            Error::Closed { .. }
            | Error::NoReply { .. }
            | Error::Draining(_)
            | Error::NotWritten(_) => true,
            _ => false,
        }
    }

    /// Whether no server listens at the address. Any other error may come from this host, its link
    /// or its name servers, and says nothing about the server.
    pub(crate) fn is_refused_connection(&self) -> bool {
        let Error::Unreachable { server, error } = self else {
            return false;
        };
        match error.kind() {
            io::ErrorKind::ConnectionRefused => true,
            io::ErrorKind::NotFound => matches!(server, Address::Unix(_)),
            _ => false,
        }
    }

    /// The meaning of this error if the request was to keep a grant.
    pub(crate) fn of_keep(self) -> Error {
        match self {
            Error::MaxLocks(asked) => Error::NotKept(asked, KeepLimit::Count),
            Error::Refused(asked) => Error::NotKept(asked, KeepLimit::Time),
            other => other,
        }
    }

    /// Whether this host lacks a resource, such as a free file descriptor.
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            Error::System(_) => true,
            Error::Unreachable { error, .. }
            | Error::AuthTokenFile(_, error)
            | Error::CaFile(_, error) => matches!(
                Errno::from_io_error(error),
                Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::AGAIN)
            ),
            _ => false,
        }
    }

    /// The message without the server and the key.
    pub(crate) fn reason(&self) -> String {
        let text = match self {
            Error::Unreachable { error, .. } | Error::System(error) => return reason(error),
            Error::Untrusted { error, .. } => return format!("TLS failed: {}", reason(error)),
            Error::BadReply { reply, .. } => {
                return format!("the server answered {}", Escaped(reply.as_bytes()));
            }
            Error::AuthTokenFile(file, error) => {
                return unusable_file("auth token", file, reason(error))
            }
            Error::CaFile(file, error) => return unusable_file("CA", file, reason(error)),
            Error::Environment(what) => what.as_str(),
            Error::InvalidArgument(what) => what,
            Error::Closed { .. } => "the server closed the connection",
            Error::NoReply { .. } => "the server does not answer",
            Error::AuthFailed { auth, .. } => match auth {
                Auth::Token => {
                    "the server refused the auth token: it is wrong, or the server uses none"
                }
                Auth::NoToken => "the server wants an auth token",
            },
            Error::MaxLocks(_) => {
                "a limit of the server is reached (--max-locks, --max-slots, --max-per-connection \
                 or --max-kept); its log says which"
            }
            Error::MaxWaiters(_) => "the server allows no more waiters",
            Error::LimitMismatch(_) => "the key is in use as the other kind, or with another limit",
            Error::LeaseExpired(_) => "the lease was over before the grant was collected",
            Error::NotEnqueued(_) => "there is no place in the queue to wait in",
            Error::AlreadyEnqueued(_) => "this connection is in the queue already",
            Error::Draining(_) => "the server is shutting down",
            Error::NotWritten(_) => {
                "the server cannot write its state file, which must have this lock; see --settle"
            }
            Error::Refused(_) => "the server refused the request",
            Error::Unsupported(_) => "the server is too old for this, or of another make",
            Error::NotKept(_, KeepLimit::Count) => {
                "the server already keeps as many locks as --max-kept allows"
            }
            Error::NotKept(_, KeepLimit::Time) => {
                "the server keeps no lock without a connection, or not for that long"
            }
            Error::Lost(_, loss) => return loss.to_string(),
            Error::NotAllowed(_) => "the auth token does not have the right to do this",
            Error::Cancelled => "the wait was cancelled",
            Error::InvalidKey => "a key must be 1 to 256 bytes, without spaces, tabs or newlines",
        };
        text.to_owned()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.asked(), self.server()) {
            (Some(asked), _) => write!(f, "{asked}: ")?,
            (None, Some(server)) => write!(f, "{server}: ")?,
            (None, None) => {}
        }
        f.write_str(&self.reason())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Unreachable { error, .. }
            | Error::AuthTokenFile(_, error)
            | Error::CaFile(_, error)
            | Error::Untrusted { error, .. }
            | Error::System(error) => Some(error),
            _ => None,
        }
    }
}
