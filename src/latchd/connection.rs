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

use std::net::Shutdown;
use std::time::{Duration, Instant};

use log::debug;

use super::ending::Ending;
use super::opening::{open, RequestSource};
use super::rules::{SessionRules, AUTH_COOLDOWN, CLOSING_TIME};
use super::session::Session;
use crate::arbiter::Seat;
use crate::net::hangup::HangupWatch;
use crate::net::stream::Stream;
use crate::protocol::reply::Reply;
use crate::sys::deadline::time_left;
use input::Input;
use outbox::Outbox;

/// Serves a connection until it ends. `first` is what has been read from the client already.
pub fn serve(
    stream: &Stream,
    first: Vec<u8>,
    mut seat: Seat,
    rules: &SessionRules,
    watch: &HangupWatch,
) {
    let conn = seat.id();
    debug!("opened conn={conn} peer={stream}");
    let mut input = Input::new(stream, rules);
    let mut outbox = Outbox::new(stream, rules, watch, conn);
    if !first.is_empty() {
        input.begin_with(first, &mut outbox.out);
    }
    let (ending, malformed_count) = match open(&mut input, &mut outbox, rules) {
        Err(ending) => (ending, 0),
        Ok((source, rights)) => {
            let session = Session::new(&seat, &mut input, &mut outbox, rules, rights);
            let ended = session.converse();
            if source == RequestSource::Standby && stream.was_reset() {
                // The standby has stopped, and the client can come back over another connection.
                seat.leave_orphans_if_client_can_adopt();
            }
            ended
        }
    };
    if let Ending::Broken(_) = ending {
        // No client knows of these grants, so they must not outlive the connection.
        for grant in outbox.untold() {
            seat.abandon_grant(*grant);
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
        std::thread::sleep(time_left(closes_at));
        stream.shutdown(Shutdown::Write);
        stream.discard_for(CLOSING_TIME);
    }
}
