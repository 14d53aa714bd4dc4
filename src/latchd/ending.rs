//! Why connections end.

use std::io;

use crate::text::reason;

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum Ending {
    /// The peer has closed its side, between two requests or in the middle of one.
    PeerClosed,
    /// The connection is broken, or the peer does not read.
    Broken(io::Error),
    Quit,
    /// The peer closed its side while it waited for a grant.
    HungUpWaiting,
    /// The peer closed its side after it had sent an `adopt`. The peer may still be there, behind a
    /// proxy that passes on the end of only one direction. An `error` would tell the peer that its
    /// lock is lost.
    HungUpAdopting,
    ReadTimeout,
    LineTooLong,
    /// The peer speaks another protocol. The field is its name.
    OtherProtocol(&'static str),
    AuthFailed,
    /// The system refuses to watch the client for a hang-up, so the client must not wait.
    Unwatched,
    /// A standby has passed on a client, and has named an epoch in which this server is not active.
    NotMeant,
}

impl Ending {
    /// A word for the log.
    pub(super) fn reason(&self) -> String {
        match self {
            Ending::PeerClosed => "peer-closed".into(),
            Ending::Broken(error) => format!("broken error=\"{}\"", reason(error)),
            Ending::Quit => "quit".into(),
            Ending::Unwatched => "no-watch".into(),
            Ending::HungUpWaiting => "hung-up-waiting".into(),
            Ending::HungUpAdopting => "hung-up-adopting".into(),
            Ending::ReadTimeout => "read-timeout".into(),
            Ending::LineTooLong => "line-too-long".into(),
            Ending::OtherProtocol(name) => (*name).into(),
            Ending::AuthFailed => "auth-refused".into(),
            Ending::NotMeant => "relayed-from-another-epoch".into(),
        }
    }
}
