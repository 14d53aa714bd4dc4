//! One connection, from its first byte to its close: its opening, its session and its close.
//!
//! Only one thread at a time writes to the socket. This is the connection's own thread or, while
//! that thread waits for a grant, the thread that frees the slot. The connection's thread may block
//! in five places: in a read, in a write, in the wait for the journal before a write, in
//! [`carry_out`], and in the lingering close. Each has a time limit, unless an option lifts it.
//! None of them delays another client.
//!
//! [`carry_out`]: super::requests::carry_out

pub mod input;
pub mod outbox;
#[cfg(any(test, fuzzing))]
#[path = "tests/pieces.rs"]
pub(crate) mod pieces;

use std::net::Shutdown;
use std::time::{Duration, Instant};

use log::debug;

use super::ending::Ending;
use super::opening::open;
use super::session::Session;
use crate::latchd::arbiter::Seat;
use crate::latchd::context::{ServerContext, AUTH_COOLDOWN, CLOSING_TIME};
use crate::latchd::table::AtClose;
use crate::os::event::time_left;
use crate::os::stream::Stream;
use crate::shared::net::connections::Admission;
use crate::shared::net::hangup::HangupWatch;
use crate::wire::reply::Reply;
use input::Input;
use outbox::Outbox;

/// Serves a connection until it ends. `first` is what has been read from the client already.
pub fn serve(
    admission: &Admission,
    first: Vec<u8>,
    seat: Seat,
    context: &ServerContext,
    watch: &HangupWatch,
) {
    let (conn, stream) = (seat.id(), &*admission.stream);
    debug!("opened conn={conn} peer={stream}");
    let mut input = Input::new(stream, context);
    let mut outbox = Outbox::new(stream, context, watch, conn);
    if !first.is_empty() {
        input.begin_with(first, &mut outbox.out);
    }
    let (ending, malformed_count) = match open(&mut input, &mut outbox, context) {
        Err(ending) => (ending, 0),
        Ok(rights) => {
            admission.let_in();
            Session::new(&seat, &mut input, &mut outbox, context, rights).converse()
        }
    };
    // Asked before this side closes: what the peer does after that is its answer.
    let at_close = match &ending {
        Ending::Quit => AtClose::ReleaseAsAsked,
        ending if context.auto_release && ending.is_end_of_stream(stream) => AtClose::Release,
        _ => AtClose::Orphan,
    };
    let code = match &ending {
        Ending::ReadTimeout => Some(10),
        Ending::PeerClosed => Some(11),
        Ending::LineTooLong => Some(12),
        _ => None,
    };
    // An idle connection is no mistake.
    if let Some(code) = code.filter(|_| input.is_within_frame()) {
        context.log_malformed(stream, code, &ending.reason());
    }
    let is_open = !matches!(ending, Ending::PeerClosed | Ending::Broken(_));
    let is_open = is_open && outbox.flush().is_ok();
    // Their client does not know of these grants, so they must not outlive the connection.
    let untold = outbox.untold.iter();
    untold.for_each(|(_, grant)| seat.abandon_grant(*grant));
    // The slots are freed before the close, because the close may take a while.
    seat.leave(at_close);
    if is_open {
        lingering_close(stream, &ending, context);
    }
    debug!(
        "closed conn={conn} reason={} refused={malformed_count}",
        ending.reason()
    );
}

/// Closes a connection whose client has sent nothing in time.
pub fn turn_away(stream: &Stream, context: &ServerContext) {
    let ending = match context.auth_tokens {
        Some(_) => Ending::AuthFailed,
        None => Ending::ReadTimeout,
    };
    lingering_close(stream, &ending, context);
}

/// Sends the final reply, and lets the peer read it: an immediate close with unread input would
/// reset the connection.
fn lingering_close(stream: &Stream, ending: &Ending, context: &ServerContext) {
    let (last_words, cooldown) = match ending {
        Ending::HungUpWaiting
        | Ending::ReadTimeout
        | Ending::LineTooLong
        | Ending::OtherProtocol(_) => (Some(Reply::Error), Duration::ZERO),
        Ending::AuthFailed => {
            let refusals = &context.auth_refusals;
            refusals.warn_of(format_args!("auth-refused peer={stream}"), &stream.source());
            (Some(Reply::AuthFailed), AUTH_COOLDOWN)
        }
        _ => (None, Duration::ZERO),
    };
    let mut out = Vec::new();
    if let Some(reply) = last_words {
        reply.write(&mut out);
    }
    let closes_at = Instant::now() + cooldown;
    let mut rest = &out[..];
    if stream
        .write_within(&mut rest, context.write_timeout)
        .is_ok()
    {
        stream.discard_for(cooldown);
        std::thread::sleep(time_left(closes_at));
        stream.shutdown(Shutdown::Write);
        stream.discard_for(CLOSING_TIME);
    }
}
