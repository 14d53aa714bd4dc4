//! The session of one connection: it reads requests, has them carried out and writes the replies,
//! in order.

mod statistics;

use std::time::Instant;

use log::debug;

use super::connection::input::Input;
use super::connection::outbox::Outbox;
use super::ending::Ending;
use super::opening::is_http;
use super::requests::{carry_out, Delivery};
use super::rights::Rights;
use super::rules::SessionRules;
use crate::arbiter::{ReplyPromise, Seat};
use crate::protocol::reply::Reply;
use crate::protocol::request::{parse, ProtocolError, Request, CLUSTER};
use crate::text::Escaped;
use crate::token::Fence;

/// The session of a connection that has been opened.
pub(super) struct Session<'s, 'a> {
    rules: &'a SessionRules,
    /// What the client may do.
    rights: Rights,
    seat: &'s Seat,
    input: &'s mut Input<'a>,
    outbox: &'s mut Outbox<'a>,
    malformed_count: u32,
    /// The client has sent `stable-ref`, which it may do only once.
    has_stable_ref: bool,
}

impl<'s, 'a> Session<'s, 'a> {
    pub(super) fn new(
        seat: &'s Seat,
        input: &'s mut Input<'a>,
        outbox: &'s mut Outbox<'a>,
        rules: &'a SessionRules,
        rights: Rights,
    ) -> Self {
        Session {
            rules,
            rights,
            seat,
            input,
            outbox,
            malformed_count: 0,
            has_stable_ref: false,
        }
    }

    /// Serves requests until the connection ends. Returns the reason, and how many requests were
    /// malformed.
    pub(super) fn converse(mut self) -> (Ending, u32) {
        let ending = loop {
            if let Err(ending) = self.serve_arrived() {
                break ending;
            }
            // The loop, the write and the blocking read are one frame. Each function that returns
            // between this loop and the read costs a request up to half a microsecond, presumably
            // because other threads ran on the core in the meantime: the processor mispredicts the
            // return, and the code behind it is cold. Two such functions cost 29.8 us of the
            // server's time for a pair of acquire and release instead of 27.1 (16 connections on
            // one core). So what is on the way to these system calls is always inlined. A test
            // looks at the stacks.
            if let Err(ending) = self.outbox.flush() {
                break ending;
            }
            match self.input.read(None, &mut self.outbox.out) {
                Ok(()) => {}
                Err(Ending::ReadTimeout) if !self.input.is_within_frame() => {
                    if let Err(ending) = self.stay_idle() {
                        break ending;
                    }
                }
                Err(ending) => break ending,
            }
        };
        (ending, self.malformed_count)
    }

    /// Serves the whole frames that have arrived.
    #[inline(never)] // what it needs of the stack is free during the read
    fn serve_arrived(&mut self) -> Result<(), Ending> {
        while self.input.has_frame()? {
            self.serve_frame()?;
        }
        Ok(())
    }

    fn serve_frame(&mut self) -> Result<(), Ending> {
        let frame = self.input.frame();
        if let (Some(node), [CLUSTER, ..]) = (&self.rules.node, frame) {
            let line = node.role_line();
            self.input.end_frame();
            return self.outbox.add_line(&line);
        }
        let parsed = parse(frame);
        let request = match parsed.and_then(|request| self.rules.offer.check(request)) {
            Ok(request) => request,
            Err(error) => return self.refuse_malformed(error),
        };
        let is_operator = || self.outbox.is_operator(request.admin_token());
        let request = match self.rights.permit(request, is_operator) {
            Ok(request) => request,
            Err(request) => {
                self.note_missing_right(&request)?;
                self.input.end_frame();
                return self.outbox.add(&Reply::AuthFailed, ReplyPromise::Nothing);
            }
        };
        match *request {
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
                let reply = if std::mem::replace(&mut self.has_stable_ref, true) {
                    Reply::Error
                } else {
                    Reply::Ok
                };
                self.input.end_frame();
                return self.outbox.add(&reply, ReplyPromise::Nothing);
            }
            _ => {}
        }
        let mut answered = carry_out(&request, self.seat, self.rules.offer, self.outbox)?;
        self.outbox
            .await_changes(&request, self.seat, &mut answered.reply);
        self.input.end_frame();
        match answered.delivery {
            Delivery::Due => self.rules.warn_of_cap(&answered.reply, self.seat.arbiter()),
            // A telnet user may have typed Ctrl-C during the wait. This must be answered before the
            // reply is sent, because telnet discards everything that arrives before the answer to
            // Ctrl-C.
            Delivery::DueAfterWait => self.input.read_ready(&mut self.outbox.out),
            Delivery::Sent => return Ok(()),
        }
        self.outbox.add(&answered.reply, answered.promise)
    }

    /// Logs a request that the client has no right to make. Fails if the client tried an admin
    /// token: then the connection ends, so that a client cannot guess the token over and over.
    #[cold]
    fn note_missing_right(&self, request: &Request<'_>) -> Result<(), Ending> {
        if request.admin_token().is_some() {
            return Err(Ending::AuthFailed);
        }
        let command = self.input.frame()[0];
        self.outbox.log_right_refused(command, request);
        Ok(())
    }

    /// Replies `error` to a malformed request, and counts it. Logs only the first such request of
    /// the connection.
    fn refuse_malformed(&mut self, error: ProtocolError) -> Result<(), Ending> {
        // Any web page can have a browser send text of its choice, which may contain requests of
        // this protocol. But the browser sends the request line of HTTP before that text.
        if is_http(self.input.frame()[0]) {
            return Err(Ending::OtherProtocol("http"));
        }
        if self.malformed_count == 0 {
            let (conn, reason) = (self.seat.id(), error.describe());
            let command = self.input.frame()[0];
            // If the client is off by one line, this line may be its secret or a token.
            if error.knows_command() {
                debug!(
                    "refused conn={conn} reason={reason} command={}",
                    Escaped(command)
                )
            } else {
                debug!(
                    "refused conn={conn} reason={reason} command_len={}",
                    command.len()
                )
            }
        }
        self.malformed_count = self.malformed_count.saturating_add(1);
        self.input.end_frame();
        self.outbox.add(&Reply::Error, ReplyPromise::Nothing)
    }

    /// Decides what to do when the read timeout is over between two requests. A connection that
    /// holds a key or waits for one may be idle for any length of time. If it were closed, the
    /// client would get an `error`, and would take it for the answer to its next request.
    fn stay_idle(&mut self) -> Result<(), Ending> {
        let idle_since = self.seat.idle_since().ok_or(Ending::ReadTimeout)?;
        let closes_at = idle_since + self.rules.read_timeout;
        if closes_at <= Instant::now() {
            return Err(Ending::ReadTimeout);
        }
        self.input.stay_idle_until(closes_at);
        Ok(())
    }
}
