//! The output to one client: the replies that have not been sent, and the watch for a hang-up while
//! the client waits.

use std::mem;
use std::net::Shutdown;

use crate::latchd::arbiter::{ClientSocket, Promised, ReplyPromise, Seat};
use crate::latchd::context::ServerContext;
use crate::latchd::line::ending::Ending;
use crate::latchd::state_file::{AwaitedWrites, StateFile};
use crate::latchd::table::ConnId;
use crate::os::memory::{self, Purpose};
use crate::os::stream::Stream;
use crate::os::trusted::is_own_or_root;
use crate::shared::net::hangup::{HangupWatch, InputReports};
use crate::wire::reply::{Grant, Reply};
use crate::wire::request::Request;
use crate::wire::terms::Refusal;
use crate::wire::token::Fence;

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
pub struct Outbox<'a> {
    pub stream: &'a Stream,
    pub context: &'a ServerContext,
    /// The unsent bytes.
    pub out: Vec<u8>,
    /// What the unsent bytes promise about holders.
    promised: Promised,
    /// The grants whose tokens only the unsent bytes tell, each with the end of its reply there.
    /// After a flush has failed: those of which the system has not taken the whole reply.
    pub untold: Vec<(usize, Fence)>,
    /// What must be in the state file before the unsent bytes are sent.
    awaited: AwaitedWrites,
    watch: &'a HangupWatch,
    conn: ConnId,
    /// Whether the watch knows the socket, which it does from the first wait on.
    is_watched: bool,
    /// Whether the client knows the reply `error_not_written`.
    pub hears_not_written: bool,
}

impl<'a> Outbox<'a> {
    pub fn new(
        stream: &'a Stream,
        context: &'a ServerContext,
        watch: &'a HangupWatch,
        conn: ConnId,
    ) -> Self {
        Outbox {
            stream,
            context,
            out: Vec::with_capacity(SMALL_CAPACITY),
            promised: Promised::default(),
            untold: Vec::new(),
            awaited: AwaitedWrites::default(),
            watch,
            conn,
            is_watched: false,
            hears_not_written: false,
        }
    }

    /// Queues a reply. What it promises must be certain before it is sent.
    pub fn add(&mut self, reply: &Reply, promise: ReplyPromise) -> Result<(), Ending> {
        match reply {
            Reply::Refused(Refusal::NotWritten) if !self.hears_not_written => &Reply::Error,
            reply => reply,
        }
        .write(&mut self.out);
        self.end_reply(promise)
    }

    /// Lets the reply to this request wait until the state file has the changes that concern its
    /// key. If the reply has a grant that the file must have, and the file cannot be written, ends
    /// the grant and refuses the request instead: see [`Outbox::await_grant`].
    #[inline]
    pub fn await_changes(&mut self, request: &Request<'_>, seat: &Seat, reply: &mut Reply) {
        let Some(state) = self.unwritten_state() else {
            return;
        };
        let Some(key) = request.changed_key() else {
            return;
        };
        let grant = reply.grant();
        let told = match *request {
            Request::Renew { token, .. }
            | Request::Adopt { token, .. }
            | Request::Keep { token, .. } => Some(token),
            _ => grant.map(|grant| grant.token),
        };
        let is_keep = matches!(request, Request::Keep { .. });
        let relied_on = reply
            .lease()
            .filter(|lease| is_keep || state.is_long(*lease));
        let relied_on = relied_on.and(told).map(|token| token.fence);
        let awaited = state.unwritten.awaited(key, relied_on);
        match grant {
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
        if !state.unwritten.try_wait(awaited) {
            seat.abandon_grant(grant.token.fence);
            *reply = Reply::Refused(Refusal::NotWritten);
        }
    }

    /// Lets the reply to a question about a key wait until the state file has the changes of it.
    pub fn await_key(&mut self, key: &str) {
        if let Some(state) = self.unwritten_state() {
            self.awaited.add(state.unwritten.awaited(key, None));
        }
    }

    /// The state file, if some changes are not in it yet.
    #[inline]
    fn unwritten_state(&self) -> Option<&'a StateFile> {
        let state = self.context.state.as_deref();
        state.filter(|state| state.unwritten.is_any())
    }

    /// Queues a reply that is given without its last LF, and that promises nothing.
    pub fn add_line(&mut self, line: &str) -> Result<(), Ending> {
        self.out.extend(line.bytes().chain([b'\n']));
        self.end_reply(ReplyPromise::Nothing)
    }

    /// Ends a reply that has been written into the buffer.
    pub fn end_reply(&mut self, promise: ReplyPromise) -> Result<(), Ending> {
        if self.context.node.is_some() {
            self.promised.add(promise);
        }
        if let ReplyPromise::Grant(_, fence) = promise {
            self.untold.push((self.out.len(), fence));
        }
        if makes_room(&mut self.out) {
            Ok(())
        } else {
            self.flush_early()
        }
    }

    /// Sends the unsent replies in the middle of other work.
    #[inline(never)] // the whole of a write, which few replies need
    fn flush_early(&mut self) -> Result<(), Ending> {
        self.flush()
    }

    #[inline(always)] // into the session's loop, which says why
    pub fn flush(&mut self) -> Result<(), Ending> {
        self.wait_until_certain();
        let len = self.out.len();
        let flushed = flush(&mut self.out, self.stream, self.context);
        if flushed.is_ok() {
            self.untold.clear();
        } else {
            let sent_len = len - self.out.len();
            self.untold.retain(|(end, _)| *end > sent_len);
        }
        flushed
    }

    /// Blocks until replies may be sent, and what the unsent ones promise is certain.
    fn wait_until_certain(&mut self) {
        drop(self.context.replies.read());
        if let Some(node) = &self.context.node {
            node.wait_for_journal(&mem::take(&mut self.promised));
        }
        if let (Some(state), false) = (&self.context.state, self.awaited.is_nothing()) {
            state.unwritten.wait(mem::take(&mut self.awaited));
        }
    }

    /// Blocks until the unsent replies may be sent. Returns whether the client has hung up by then.
    /// Only a client that has waited counts as gone once it sends no more: another may expect its
    /// replies nonetheless.
    pub fn wait_and_find_client_gone(&mut self) -> bool {
        self.wait_until_certain();
        self.is_watched && self.stream.has_hung_up()
    }

    /// Returns the buffer for a long reply, and a function that sends the buffer. Call that
    /// function when there may be no room for the next piece. The pieces need not wait for the
    /// journal. Call [`Outbox::flush`] first.
    pub fn in_pieces(
        &mut self,
    ) -> (
        &mut Vec<u8>,
        impl Fn(&mut Vec<u8>) -> Result<(), Ending> + 'a,
    ) {
        let (stream, context) = (self.stream, self.context);
        let send = move |out: &mut Vec<u8>| {
            if makes_room(out) {
                Ok(())
            } else {
                flush(out, stream, context)
            }
        };
        (&mut self.out, send)
    }

    /// Sends the unsent replies, and starts to watch the client for a hang-up.
    pub fn prepare_to_wait(&mut self) -> Result<(), Ending> {
        self.flush_early()?;
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
    pub fn report_input(&self, input: InputReports) {
        // If this fails, it only takes longer to notice that a peer that floods the connection has
        // left.
        let _ = self.watch.set_input(self.stream, self.conn.0, input);
    }

    /// Whether the client may act as an operator, with this admin token or without one.
    pub fn is_operator(&self, admin_token: Option<&str>) -> bool {
        let uid = self.stream.peer_uid();
        uid.is_some_and(is_own_or_root) || self.context.is_admin_token(admin_token)
    }

    /// Logs that the client has no right to make a request.
    pub fn log_right_refused(&self, command: &[u8], asked: &Request<'_>) {
        self.context.log_right_refused(self.stream, command, asked);
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
fn flush(out: &mut Vec<u8>, stream: &Stream, context: &ServerContext) -> Result<(), Ending> {
    if out.is_empty() {
        return Ok(());
    }
    let mut unsent = &out[..];
    let written = stream.write_within(&mut unsent, context.write_timeout);
    let sent_len = out.len() - unsent.len();
    out.copy_within(sent_len.., 0);
    out.truncate(out.len() - sent_len);
    out.shrink_to(CAPACITY);
    written.map_err(Ending::Broken)
}
