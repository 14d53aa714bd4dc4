//! The output to one client: the replies that have not been sent, and the watch for a hang-up while
//! the client waits.

use std::mem;
use std::net::Shutdown;

use crate::arbiter::{ClientSocket, Promised, ReplyPromise, Seat};
use crate::latchd::ending::Ending;
use crate::latchd::rules::SessionRules;
use crate::latchd::state_file::{AwaitedWrites, StateFile};
use crate::net::hangup::{HangupWatch, InputReports};
use crate::net::stream::Stream;
use crate::protocol::reply::{Grant, Reply};
use crate::protocol::request::Request;
use crate::sys::memory::{self, Purpose};
use crate::sys::trusted::is_own_or_root;
use crate::table::ConnId;
use crate::terms::Refusal;
use crate::token::Fence;

/// Replies are sent when no request is left in the input buffer, or when the unsent replies have
/// this many bytes. The whole write timeout applies each time.
const FULL_LEN: usize = 16 * 1024;

/// The initial room for replies in bytes. It is enough for a client that reads each reply before it
/// sends its next request.
const SMALL_CAPACITY: usize = 512;
/// The room for replies in bytes for a client that sends many requests at a time.
const CAPACITY: usize = FULL_LEN + 1024;

/// The room in bytes that is kept for the next reply. Almost every reply fits into it.
const MAX_REPLY_LEN: usize = 256;

/// The replies to a client that have not been sent.
pub(in crate::latchd) struct Outbox<'a> {
    stream: &'a Stream,
    rules: &'a SessionRules,
    /// The unsent bytes.
    pub(in crate::latchd) out: Vec<u8>,
    /// What the unsent bytes promise about holders.
    promised: Promised,
    /// The grants in the unsent bytes, if the journal has them and no client knows of them.
    untold: Vec<Fence>,
    /// What must be in the state file before the unsent bytes are sent.
    awaited: AwaitedWrites,
    watch: &'a HangupWatch,
    conn: ConnId,
    /// Whether the watch knows the socket, which it does from the first wait on.
    is_watched: bool,
}

impl<'a> Outbox<'a> {
    pub(in crate::latchd) fn new(
        stream: &'a Stream,
        rules: &'a SessionRules,
        watch: &'a HangupWatch,
        conn: ConnId,
    ) -> Self {
        Outbox {
            stream,
            rules,
            out: Vec::with_capacity(SMALL_CAPACITY),
            promised: Promised::default(),
            untold: Vec::new(),
            awaited: AwaitedWrites::default(),
            watch,
            conn,
            is_watched: false,
        }
    }

    /// Queues a reply. What it promises must be certain before it is sent.
    pub(in crate::latchd) fn add(
        &mut self,
        reply: &Reply,
        promise: ReplyPromise,
    ) -> Result<(), Ending> {
        reply.write(&mut self.out);
        self.end_reply(promise)
    }

    /// Lets the reply to this request wait until the state file has the changes that concern its
    /// key. If the reply has a grant that the file must have, and the file cannot be written, ends
    /// the grant and refuses the request instead: see [`Outbox::await_grant`].
    #[inline]
    pub(in crate::latchd) fn await_changes(
        &mut self,
        request: &Request<'_>,
        seat: &Seat,
        reply: &mut Reply,
    ) {
        let Some(state) = self.unwritten_state() else {
            return;
        };
        let Some(key) = request.changed_key() else {
            return;
        };
        let is_keep = matches!(request, Request::Keep { .. });
        let awaited = state.awaited(key, reply.lease(), is_keep);
        match reply.grant() {
            Some(grant) if awaited.is_relied_on() => {
                Self::await_grant(state, awaited, seat, grant, reply);
            }
            _ => self.awaited.add(awaited),
        }
    }

    /// Blocks until the state file has a new grant, or cannot be written. A client must not wait
    /// for a grant as long as a disk is full, and the grant would hold up the key meanwhile.
    #[cold]
    fn await_grant(
        state: &StateFile,
        awaited: AwaitedWrites,
        seat: &Seat,
        grant: Grant,
        reply: &mut Reply,
    ) {
        if !state.try_wait(awaited) {
            seat.abandon_grant(grant.token.fence);
            *reply = Reply::Refused(Refusal::NoToken);
        }
    }

    /// Lets the reply to a question about a key wait until the state file has the changes of it.
    pub(in crate::latchd) fn await_key(&mut self, key: &str) {
        if let Some(state) = self.unwritten_state() {
            self.awaited.add(state.awaited(key, None, false));
        }
    }

    /// The state file, if some changes are not in it yet.
    #[inline]
    fn unwritten_state(&self) -> Option<&'a StateFile> {
        let state = self.rules.state.as_deref();
        state.filter(|state| state.has_unwritten())
    }

    /// Queues a reply that is given without its last LF, and that promises nothing.
    pub(in crate::latchd) fn add_line(&mut self, line: &str) -> Result<(), Ending> {
        self.out.extend(line.bytes().chain([b'\n']));
        self.end_reply(ReplyPromise::Nothing)
    }

    /// Ends a reply that has been written into the buffer.
    pub(in crate::latchd) fn end_reply(&mut self, promise: ReplyPromise) -> Result<(), Ending> {
        if self.rules.node.is_some() {
            self.promised.add(promise);
        }
        if makes_room(&mut self.out) {
            Ok(())
        } else {
            self.flush()
        }
    }

    #[inline(always)] // into the session's loop, which says why
    pub(in crate::latchd) fn flush(&mut self) -> Result<(), Ending> {
        self.wait_until_certain();
        let len = self.out.len();
        let flushed = flush(&mut self.out, self.stream, self.rules);
        if self.out.len() < len {
            self.untold.clear();
        }
        flushed
    }

    /// Blocks until replies may be sent, and what the unsent ones promise is certain.
    fn wait_until_certain(&mut self) {
        drop(self.rules.replies.read());
        if let Some(node) = &self.rules.node {
            // A flush that fails is the last one, so none are left from before.
            self.untold = node.wait_for_journal(&mem::take(&mut self.promised));
        }
        if let (Some(state), false) = (&self.rules.state, self.awaited.is_nothing()) {
            state.wait(mem::take(&mut self.awaited));
        }
    }

    /// Blocks until the unsent replies may be sent. Returns whether the client has hung up by then.
    /// Only a client that has waited counts as gone once it sends no more: another may expect its
    /// replies nonetheless.
    pub(in crate::latchd) fn wait_and_find_client_gone(&mut self) -> bool {
        self.wait_until_certain();
        self.is_watched && self.stream.has_hung_up()
    }

    /// The grants that the client was not told of, if a flush has failed.
    pub(super) fn untold(&self) -> &[Fence] {
        &self.untold
    }

    /// The unsent replies, for the close of the connection. Blocks as [`Outbox::flush`] does before
    /// it sends them.
    pub(super) fn into_unsent(mut self) -> Vec<u8> {
        self.wait_until_certain();
        self.out
    }

    /// Returns the buffer for a long reply, and a function that sends the buffer. Call that
    /// function when there may be no room for the next piece. The pieces need not wait for the
    /// journal. Call [`Outbox::flush`] first.
    pub(in crate::latchd) fn in_pieces(
        &mut self,
    ) -> (
        &mut Vec<u8>,
        impl Fn(&mut Vec<u8>) -> Result<(), Ending> + 'a,
    ) {
        let (stream, rules) = (self.stream, self.rules);
        let send = move |out: &mut Vec<u8>| {
            if makes_room(out) {
                Ok(())
            } else {
                flush(out, stream, rules)
            }
        };
        (&mut self.out, send)
    }

    /// Sends the unsent replies, and starts to watch the client for a hang-up.
    pub(in crate::latchd) fn prepare_to_wait(&mut self) -> Result<(), Ending> {
        self.flush()?;
        if !self.is_watched {
            // The watch logs why it fails.
            let watched = self.watch.watch(self.stream, self.conn.0);
            watched.map_err(|_| Ending::Unwatched)?;
            self.is_watched = true;
        }
        Ok(())
    }

    /// Sets whether the watch reports input from the peer. It must do so during a long wait,
    /// because a peer that keeps sending after its waiting request until its window is full counts
    /// as gone.
    pub(in crate::latchd) fn report_input(&self, input: InputReports) {
        // If this fails, it only takes longer to notice that a peer that floods the connection has
        // left.
        let _ = self.watch.set_input(self.stream, self.conn.0, input);
    }

    /// Whether the client may act as an operator, with this admin token or without one.
    pub(in crate::latchd) fn is_operator(&self, admin_token: Option<&str>) -> bool {
        let uid = self.stream.peer_uid();
        uid.is_some_and(is_own_or_root) || self.rules.is_admin_token(admin_token)
    }

    /// Logs that the client has no right to make a request.
    pub(in crate::latchd) fn log_right_refused(&self, command: &[u8], asked: &Request<'_>) {
        self.rules.log_right_refused(self.stream, command, asked);
    }
}

/// The client as seen by the thread that ends a wait. That thread sends the reply to the waiting
/// request. The session has already sent all earlier replies.
impl ClientSocket for Stream {
    fn peer(&self) -> String {
        self.identity()
    }

    fn send_grant(&self, grant: Grant) -> bool {
        let mut line = [0; Reply::MAX_LEN];
        let mut rest = &mut line[..];
        Reply::Granted(grant).write(&mut rest);
        let len = Reply::MAX_LEN - rest.len();
        // Input may be a telnet command, which must be answered first.
        self.send_line(&line[..len])
    }

    fn has_hung_up(&self) -> bool {
        Stream::has_hung_up(self)
    }

    fn shut_down(&self) {
        self.shutdown(Shutdown::Both);
    }
}

/// Makes room for the next reply if memory allows. Returns whether there is room.
fn makes_room(out: &mut Vec<u8>) -> bool {
    if out.capacity() < CAPACITY && out.capacity() - out.len() < MAX_REPLY_LEN {
        if let Some(_reservation) = memory::reserve(CAPACITY, Purpose::Service) {
            out.reserve_exact(CAPACITY - out.len());
        }
    }
    out.len() < FULL_LEN && out.capacity() - out.len() >= MAX_REPLY_LEN
}

/// Sends the replies. If that fails, leaves the bytes in `out` that were not sent.
#[inline(always)] // into the session's loop, which says why
fn flush(out: &mut Vec<u8>, stream: &Stream, rules: &SessionRules) -> Result<(), Ending> {
    if out.is_empty() {
        return Ok(());
    }
    let mut unsent = &out[..];
    let written = stream.write_within(&mut unsent, rules.write_timeout);
    let sent_len = out.len() - unsent.len();
    out.drain(..sent_len);
    out.shrink_to(CAPACITY);
    written.map_err(Ending::Broken)
}
