//! The session of one connection: it reads requests, has them carried out and writes the replies,
//! in order.

use std::time::Instant;

use super::connection::input::Input;
use super::connection::outbox::Outbox;
use super::ending::Ending;
use super::opening::is_http;
use super::requests::{perform, Delivery};
use crate::latchd::arbiter::{Certainty, ReplyPromise, Seat};
use crate::latchd::auth::rights::Rights;
use crate::latchd::context::ServerContext;
use crate::latchd::statistics::{queues, StatisticsSource, PAGE_LEN};
use crate::os::memory::{self, Purpose};
use crate::os::text::Escaped;
use crate::wire::reply::Reply;
use crate::wire::request::{parse, ProtocolError, Request, CLUSTER};
use crate::wire::token::Fence;

/// The session of a connection that has been opened.
pub struct Session<'s, 'a> {
    context: &'a ServerContext,
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
    pub fn new(
        seat: &'s Seat,
        input: &'s mut Input<'a>,
        outbox: &'s mut Outbox<'a>,
        context: &'a ServerContext,
        rights: Rights,
    ) -> Self {
        Session {
            context,
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
    pub fn converse(mut self) -> (Ending, u32) {
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
        if let Some(node) = &self.context.node {
            if self.input.first_line() == CLUSTER {
                self.input.end_frame();
                return self.outbox.add_line(&node.role_line());
            }
        }
        let Some(frame) = self.input.text() else {
            return self.refuse_malformed(ProtocolError::NotUtf8);
        };
        // A request is large, so it stays where it is.
        let parsed = parse(frame);
        let request = match &parsed {
            Ok(request) => request,
            Err(error) => return self.refuse_malformed(*error),
        };
        if let Err(error) = self.context.offer.check(request) {
            return self.refuse_malformed(error);
        }
        let is_operator = || self.outbox.is_operator(request.admin_token());
        let Some(request) = self.rights.permit(request, is_operator) else {
            self.note_missing_right(request)?;
            self.input.end_frame();
            return self.outbox.add(&Reply::AuthFailed, ReplyPromise::Nothing);
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
            Request::Histories => return self.show(Self::show_histories),
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
        let answered = perform(&request, self.seat, self.context, self.outbox, None)?;
        self.input.end_frame();
        match answered.delivery {
            Delivery::Due => {}
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
        let command = self.input.first_line();
        self.outbox.log_right_refused(command, request);
        Ok(())
    }

    /// Replies `error` to a malformed request, counts it and logs it.
    fn refuse_malformed(&mut self, error: ProtocolError) -> Result<(), Ending> {
        // Any web page can have a browser send text of its choice, which may contain requests of
        // this protocol. But the browser sends the request line of HTTP before that text.
        if is_http(self.input.first_line()) {
            return Err(Ending::OtherProtocol("http"));
        }
        let ((code, reason), command) = (error.describe(), self.input.first_line());
        // If the client is off by one line, this line may be its secret or a token.
        let shown = if error.knows_command() {
            format!("{reason} command={}", Escaped(command))
        } else {
            format!("{reason} command_len={}", command.len())
        };
        self.context.log_malformed(self.outbox.stream, code, &shown);
        self.malformed_count = self.malformed_count.saturating_add(1);
        self.input.end_frame();
        self.outbox.add(&Reply::Error, ReplyPromise::Nothing)
    }

    /// Decides what to do when the read timeout is over between two requests. A connection that
    /// holds a key or waits for one may be idle for any length of time. If it were closed, the
    /// client would get an `error`, and would take it for the answer to its next request.
    fn stay_idle(&mut self) -> Result<(), Ending> {
        let idle_since = self.seat.idle_since().ok_or(Ending::ReadTimeout)?;
        let closes_at = idle_since + self.context.read_timeout;
        if closes_at <= Instant::now() {
            return Err(Ending::ReadTimeout);
        }
        self.input.stay_idle_until(closes_at);
        Ok(())
    }
}

/// The replies to `stats`: see latch-protocol(7), STATISTICS.
impl Session<'_, '_> {
    /// Answers a request for statistics. `show` writes them in pages. Replies `error` if there is
    /// no memory for a page.
    #[inline(never)] // other requests need none of its stack, which is large
    fn show(&mut self, show: impl FnOnce(&mut Self) -> Result<(), Ending>) -> Result<(), Ending> {
        self.input.end_frame();
        match memory::reserve(PAGE_LEN, Purpose::Service) {
            Some(_reservation) => show(self),
            None => self.outbox.add(&Reply::Error, ReplyPromise::Nothing),
        }
    }

    fn show_stats(&mut self) -> Result<(), Ending> {
        self.show_in_pieces(|statistics, out, send| statistics.write_keys(out, send))
    }

    fn show_queues(&mut self, key: Option<&str>) -> Result<(), Ending> {
        self.show_in_pieces(|statistics, out, send| statistics.write_queues(key, out, send))
    }

    fn show_histories(&mut self) -> Result<(), Ending> {
        self.show_in_pieces(|statistics, out, send| statistics.write_histories(out, send))
    }

    /// Shows the grant of a key that has this fence. If there is none, the client gives up its
    /// lock, so a server that is no longer active must not answer. The reply fits into one piece.
    fn show_holder(&mut self, key: &str, fence: Fence) -> Result<(), Ending> {
        let out = &mut self.outbox.out;
        out.extend(b"ok {\"keys\":[");
        if let Some(status) = self.seat.arbiter().holder(key, fence, self.seat.id()) {
            let go_on = |_: &mut Vec<u8>| Ok::<(), Ending>(());
            queues::write_key(&status.queue, status.clients(), out, go_on)?;
        }
        out.extend(b"]}\n");
        // The state file may have to have the numbers.
        self.outbox.await_key(key);
        let promise = ReplyPromise::Holder(Certainty::JournaledByActive, fence);
        self.outbox.end_reply(promise)
    }

    fn show_counters(&mut self) -> Result<(), Ending> {
        self.show_in_pieces(|statistics, out, _| {
            statistics.write_counters(out);
            Ok(())
        })?;
        self.outbox.end_reply(ReplyPromise::Nothing)
    }

    fn show_in_pieces(
        &mut self,
        write: impl FnOnce(
            &StatisticsSource<'_>,
            &mut Vec<u8>,
            &dyn Fn(&mut Vec<u8>) -> Result<(), Ending>,
        ) -> Result<(), Ending>,
    ) -> Result<(), Ending> {
        let statistics = self.context.statistics(self.seat.arbiter());
        self.outbox.flush()?;
        let (out, send) = self.outbox.in_pieces();
        out.extend(b"ok ");
        write(&statistics, out, &send)?;
        out.push(b'\n');
        Ok(())
    }
}
