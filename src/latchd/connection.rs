//! One connection, from its first byte to its close: its opening, its session and its close.
//!
//! Only one thread at a time writes to the socket. This is the connection's own thread or, while
//! that thread waits for a grant, the thread that frees the slot. The connection's thread may block
//! in five places: in a read, in a write, in the wait for the journal before a write, in
//! [`carry_out`], and in the lingering close. Each has a time limit, unless an option lifts it.
//! None of them delays another client.
//!
//! [`carry_out`]: super::requests::carry_out

pub(super) mod input;
pub(super) mod outbox;
#[cfg(any(test, fuzzing))]
pub(crate) mod pieces;
mod rules;

use std::io;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use log::debug;

use super::opening::{open, RequestSource};
use super::session::Session;
use crate::arbiter::Seat;
use crate::net::hangup::HangupWatch;
use crate::net::stream::Stream;
use crate::protocol::reply::Reply;
use crate::text::reason;
use input::Input;
use outbox::Outbox;
pub use rules::SessionRules;

/// How long the close of a connection is delayed if the peer has not given the right token.
const AUTH_COOLDOWN: Duration = Duration::from_millis(100);

/// How long a lingering close reads what the peer still sends.
const CLOSING_TIME: Duration = Duration::from_millis(250);

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

/// Serves a connection until it ends.
pub fn serve(stream: &Stream, mut seat: Seat, rules: &SessionRules, watch: &HangupWatch) {
    let conn = seat.id();
    debug!("opened conn={conn} peer={stream}");
    let mut input = Input::new(stream, rules);
    let mut outbox = Outbox::new(stream, rules, watch, conn);
    let (ending, malformed_count) = match open(&mut input, &mut outbox, rules) {
        Err(ending) => (ending, 0),
        Ok(source) => {
            let session = Session::new(&seat, &mut input, &mut outbox, rules);
            let ended = session.converse();
            if source == RequestSource::Standby && stream.was_reset() {
                // The standby has stopped, and the client can come back over another connection.
                seat.keep_if_client_can_adopt();
            }
            ended
        }
    };
    if let Ending::Broken(_) = ending {
        // No client knows of these grants, so they must not outlive the connection.
        for grant in outbox.untold() {
            seat.take_back(*grant);
        }
    }
    // The slots are freed before the close, because the close may take a while.
    drop(seat);
    lingering_close(stream, &ending, outbox.into_unsent(), rules);
    debug!(
        "closed conn={conn} reason={} refused={malformed_count}",
        ending.reason()
    );
}

/// Closes a connection whose client has sent nothing in time.
pub fn turn_away(stream: &Stream, rules: &SessionRules) {
    let ending = match rules.auth_tokens {
        Some(_) => Ending::AuthFailed,
        None => Ending::ReadTimeout,
    };
    lingering_close(stream, &ending, Vec::new(), rules);
}

/// Sends the final reply, and lets the peer read it: an immediate close with unread input would
/// reset the connection.
fn lingering_close(stream: &Stream, ending: &Ending, mut out: Vec<u8>, rules: &SessionRules) {
    let (last_words, cooldown) = match ending {
        Ending::PeerClosed | Ending::Broken(_) => return,
        Ending::Quit | Ending::Unwatched | Ending::NotMeant | Ending::HungUpAdopting => {
            (None, Duration::ZERO)
        }
        Ending::HungUpWaiting
        | Ending::ReadTimeout
        | Ending::LineTooLong
        | Ending::OtherProtocol(_) => (Some(Reply::Error), Duration::ZERO),
        Ending::AuthFailed => {
            let refusals = &rules.auth_refusals;
            refusals.warn(format_args!("auth-refused peer={stream}"), stream.source());
            (Some(Reply::AuthFailed), AUTH_COOLDOWN)
        }
    };
    if let Some(reply) = last_words {
        reply.write(&mut out);
    }
    let closes_at = Instant::now() + cooldown;
    let mut rest = &out[..];
    if stream.write_within(&mut rest, rules.write_timeout).is_ok() {
        stream.discard_for(cooldown);
        std::thread::sleep(closes_at.saturating_duration_since(Instant::now()));
        stream.shutdown(Shutdown::Write);
        stream.discard_for(CLOSING_TIME);
    }
}

impl Ending {
    /// A word for the log.
    fn reason(&self) -> String {
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
