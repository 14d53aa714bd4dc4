//! Why connections end.

use std::io;

use crate::os::stream::Stream;
use crate::os::text::reason;

/// Why a connection ends.
#[derive(Debug)]
pub enum Ending {
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
    /// Whether the client has ended its stream, and this end has arrived here. Everything else is
    /// silence: an error of the network, or something that this server has decided alone and that
    /// the client may not know.
    pub fn is_end_of_stream(&self, stream: &Stream) -> bool {
        let has_ended = match self {
            Ending::PeerClosed => true,
            Ending::Broken(error) => error.raw_os_error().is_some() && stream.has_hung_up(),
            // A client that floods its connection is cut off as if it had hung up.
            Ending::HungUpWaiting | Ending::HungUpAdopting => stream.has_hung_up(),
            _ => false,
        };
        has_ended && stream.was_ended_by_peer()
    }

    /// A word for the log.
    pub fn reason(&self) -> String {
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
