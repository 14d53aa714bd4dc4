//! The requests of one connection: reads them, has them carried out, writes replies, in order.

mod member;
mod statistics;

use std::time::{Duration, Instant};

use log::debug;

use super::connection::outbox::Outbox;
use super::connection::{Ending, SessionRules};
use super::requests::{carry_out, certainty_of};
use crate::arbiter::Seat;
use crate::net::hangup::HangupWatch;
use crate::net::lines::{Buffered, LineReader, ReadEnd};
use crate::net::stream::Stream;
use crate::protocol::reply::Reply;
use crate::protocol::request::{line_limit, parse, FirstWord, ProtocolError, Request, HELP};
use crate::table::Refusal;
use crate::text::Escaped;
use crate::token::Fence;

/// The first byte of a TLS client's first message.
const TLS_HANDSHAKE: u8 = 0x16;

pub(super) struct Session<'a> {
    stream: &'a Stream,
    rules: &'a SessionRules,
    seat: Seat,
    reader: LineReader<3>,
    outbox: Outbox<'a>,
    /// The deadline of `auth`; `None` once the client has authenticated, or need not.
    auth_due: Option<Instant>,
    malformed_count: u32,
    /// The client has sent its one `stable-ref`.
    has_stable_ref: bool,
    /// How many lines after `help` may still belong to it; `None` from the first request on.
    placeholders_left: Option<u8>,
    /// Nothing has come yet.
    is_first: bool,
    /// A standby passes this connection on.
    is_relayed: bool,
    /// The read timeout that the socket is set to.
    socket_timeout: Duration,
    /// The line that is being received, by its number, and its deadline; no number at the beginning
    /// of a frame. Telnet commands are no part of a line, and so move no deadline.
    awaited: Option<(Option<u32>, Instant)>,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        stream: &'a Stream,
        seat: Seat,
        rules: &'a SessionRules,
        watch: &'a HangupWatch,
    ) -> Self {
        let secret_len = rules.auth_token.as_deref().map_or(0, <[u8]>::len);
        // Three lines, each with its own deadline, cannot take longer.
        let auth_due = Instant::now() + 3 * rules.read_timeout;
        Session {
            stream,
            rules,
            outbox: Outbox::new(stream, rules, watch, seat.id()),
            seat,
            reader: LineReader::new(move |index, command| line_limit(secret_len, index, command)),
            auth_due: rules.auth_token.is_some().then_some(auth_due),
            malformed_count: 0,
            has_stable_ref: false,
            placeholders_left: Some(0),
            is_first: true,
            is_relayed: false,
            socket_timeout: Duration::ZERO,
            awaited: None,
        }
    }

    /// Gives up the seat. Returns the replies that are unsent, and how many requests were
    /// malformed.
    pub(super) fn leave(mut self) -> (Outbox<'a>, u32) {
        if self.is_relayed && self.stream.was_reset() {
            // The standby in between has stopped.
            self.seat.keep_if_client_can_adopt();
        }
        (self.outbox, self.malformed_count)
    }

    pub(super) fn converse(&mut self) -> Ending {
        loop {
            let went_on = match self.serve_first_word() {
                Some(served) => served,
                None => match self.reader.look() {
                    Buffered::TooLong => Err(Ending::LineTooLong),
                    Buffered::Frame => self.serve_frame(),
                    Buffered::Incomplete => self.outbox.flush().and_then(|()| self.read()),
                },
            };
            if let Err(ending) = went_on {
                return self.mask_reason(ending);
            }
        }
    }

    /// Serves a line that a person types before the first request; `None` if there is none.
    ///
    /// The first line is judged before what is behind it is looked at: a web page can have a
    /// browser send a telnet interrupt in a later line, which would drop the first one unseen.
    fn serve_first_word(&mut self) -> Option<Result<(), Ending>> {
        let placeholders_left = self.placeholders_left?;
        if self.reader.look_for_first_line() == Buffered::TooLong {
            return Some(Err(Ending::LineTooLong));
        }
        let first_line = self.reader.first_line()?;
        if is_http(first_line) {
            return Some(Err(Ending::OtherProtocol("http")));
        }
        match FirstWord::parse(first_line)? {
            FirstWord::Help => {
                self.outbox.out.extend(HELP.bytes().chain([b'\n']));
                self.placeholders_left = Some(2);
            }
            FirstWord::Quit => return Some(Err(Ending::Quit)),
            FirstWord::Placeholder => {
                self.placeholders_left = Some(placeholders_left.checked_sub(1)?);
            }
        }
        self.reader.skip_first_line();
        self.awaited = None;
        self.is_first = false;
        Some(self.outbox.flush_if_full())
    }

    fn serve_frame(&mut self) -> Result<(), Ending> {
        self.placeholders_left = None;
        if let Some(served) = self.serve_frame_of_member() {
            return served;
        }
        if self.auth_due.is_some() {
            if !self.rules.accepts(self.reader.frame()) {
                return Err(Ending::AuthFailed);
            }
            self.auth_due = None;
            self.finish_frame();
            return self.outbox.add(&Reply::Ok, 0);
        }
        let parsed = parse(self.reader.frame());
        let request = match parsed.and_then(|request| self.rules.offer.check(request)) {
            Ok(request) => request,
            Err(error) => return self.refuse_malformed(error),
        };
        match request {
            Request::Stats => return self.show(Self::show_stats),
            Request::Queues(key) => {
                let key = key.map(str::to_owned);
                return self.show(|session| session.show_queues(key.as_deref()));
            }
            Request::Holder { key, fence } => {
                let key = key.to_owned();
                return self.show(|session| session.show_holder(&key, Fence(fence)));
            }
            Request::Counters => return self.show(Self::show_counters),
            Request::StableRef => {
                let reply = match std::mem::replace(&mut self.has_stable_ref, true) {
                    false => Reply::Ok,
                    true => Reply::Error,
                };
                self.finish_frame();
                return self.outbox.add(&reply, 0);
            }
            _ => {}
        }
        let carried_out = carry_out(&request, &self.seat, self.rules.offer, &mut self.outbox);
        if let Ok(reply) = &carried_out {
            self.warn_of_cap(reply);
            let (certainty, holder) = certainty_of(&request, reply);
            self.outbox.promise(certainty, holder);
        }
        self.finish_frame();
        let sent_len = self.outbox.end_wait();
        if sent_len == Some(0) {
            // A Ctrl-C in telnet during the wait: telnet discards the reply unless it is answered
            // first.
            self.reader.read_ready(self.stream);
            self.reader.take_answers(&mut self.outbox.out);
        }
        self.outbox.add(&carried_out?, sent_len.unwrap_or(0))
    }

    /// Names the cap in the log if the claim was refused for one: the client is not told which.
    fn warn_of_cap(&self, reply: &Reply) {
        if !matches!(
            reply,
            Reply::Refused(Refusal::MaxLocks | Refusal::MaxWaiters)
        ) {
            return;
        }
        if let Some(cap) = self.seat.arbiter().take_cap_reached() {
            let warnings = &self.rules.cap_warnings;
            warnings.warn(format_args!("cap-reached cap={cap}"), Some(cap));
        }
    }

    fn finish_frame(&mut self) {
        self.reader.advance();
        self.awaited = None;
    }

    /// Answers a request that is none. The first of a connection is logged, the others are counted.
    fn refuse_malformed(&mut self, error: ProtocolError) -> Result<(), Ending> {
        // Any web page can have a browser send its text, with requests of this protocol in it.
        if is_http(self.reader.frame()[0]) {
            return Err(Ending::OtherProtocol("http"));
        }
        if self.malformed_count == 0 {
            let (reason, code) = error.describe();
            debug!(
                "refused conn={} reason={reason} code={code} command={}",
                self.seat.id(),
                Escaped(self.reader.frame()[0])
            );
        }
        self.malformed_count = self.malformed_count.saturating_add(1);
        self.finish_frame();
        self.outbox.add(&Reply::Error, 0)
    }

    /// Blocks until more has been read, or until it is time to look at the clock again.
    fn read(&mut self) -> Result<(), Ending> {
        let awaited = self.reader.line_in_progress();
        let begins = awaited.is_none() && self.awaited.is_none() && self.auth_due.is_none();
        // Then the timeout of the socket is the whole deadline, and the clock need not be read.
        let is_usual = begins && self.socket_timeout == self.rules.read_timeout;
        if !is_usual && !self.set_deadline(awaited)? {
            return self.stay_idle(awaited);
        }
        let read = self.reader.read(self.stream);
        self.reader.take_answers(&mut self.outbox.out);
        match read {
            Err(ReadEnd::Eof) => Err(Ending::PeerClosed),
            Err(ReadEnd::Timeout) if is_usual => self.stay_idle(None),
            Err(ReadEnd::Timeout) => Ok(()), // the next call finds the deadline over
            Err(ReadEnd::Telnet) => Err(Ending::LineTooLong),
            Err(ReadEnd::Broken(error)) => Err(Ending::Broken(error)),
            // A telnet command is no part of a request, and must not move the deadline again.
            Ok(()) if is_usual && self.reader.line_in_progress().is_none() => {
                self.awaited = Some((None, Instant::now() + self.rules.read_timeout));
                Ok(())
            }
            // A handshake has a line end only by chance. The first read comes here.
            Ok(())
                if self.placeholders_left.is_some() && self.reader.begins_with(TLS_HANDSHAKE) =>
            {
                Err(Ending::OtherProtocol("tls"))
            }
            Ok(()) => Ok(()),
        }
    }

    /// Sets the socket's timeout so that the next read ends at the deadline of the line `awaited`,
    /// or at that of `auth`; `false` if it is over.
    fn set_deadline(&mut self, awaited: Option<u32>) -> Result<bool, Ending> {
        let now = Instant::now();
        let deadline = match self.awaited {
            Some((known, deadline)) if known == awaited => deadline,
            _ => now + self.rules.read_timeout,
        };
        self.awaited = Some((awaited, deadline));
        let until = deadline.min(self.auth_due.unwrap_or(deadline));
        let left = until.saturating_duration_since(now);
        if !left.is_zero() && left != self.socket_timeout {
            self.stream.set_read_timeout(left).map_err(Ending::Broken)?;
            self.socket_timeout = left;
        }
        Ok(!left.is_zero())
    }

    /// Decides what follows when the read timeout is over. A connection that holds or waits for a
    /// key may idle between two requests as long as it likes: an unexpected `error` would be taken
    /// for the answer to its next request.
    fn stay_idle(&mut self, awaited: Option<u32>) -> Result<(), Ending> {
        if awaited.is_some() || self.auth_due.is_some() {
            return Err(Ending::ReadTimeout);
        }
        let idle_since = self.seat.idle_since().ok_or(Ending::ReadTimeout)?;
        let closes_at = idle_since + self.rules.read_timeout;
        if closes_at <= Instant::now() {
            return Err(Ending::ReadTimeout);
        }
        self.awaited = Some((None, closes_at));
        Ok(())
    }

    /// A peer that has not authenticated learns no other reason.
    fn mask_reason(&self, ending: Ending) -> Ending {
        match ending {
            Ending::ReadTimeout | Ending::LineTooLong | Ending::OtherProtocol(_)
                if self.auth_due.is_some() =>
            {
                Ending::AuthFailed
            }
            ending => ending,
        }
    }
}

/// Whether a command is the first line of a request in HTTP.
fn is_http(command: &[u8]) -> bool {
    let version = command.rsplit(|byte| *byte == b' ').next();
    version.is_some_and(|version| version.starts_with(b"HTTP/"))
}
