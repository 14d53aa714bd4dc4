//! The output to one client: the replies that have not been sent, and the watch for a hang-up while
//! the client waits.

use std::net::Shutdown;

use super::{Ending, SessionRules};
use crate::arbiter::{Certainty, ClientSocket, Promised, WaitEvent};
use crate::latchd::requests::ClientEnd;
use crate::net::hangup::{HangupWatch, InputReports};
use crate::net::stream::Stream;
use crate::protocol::reply::{Grant, Reply};
use crate::sys::memory::{self, Purpose};
use crate::sys::trusted::is_own_or_root;
use crate::table::ConnId;
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
    pub(in crate::latchd) promised: Promised,
    /// The grants in the unsent bytes, if the journal has them and no client knows of them.
    pub(in crate::latchd) untold: Vec<Fence>,
    watch: &'a HangupWatch,
    conn: ConnId,
    /// Whether the watch knows the socket, which it does from the first wait on.
    is_watched: bool,
    /// Whether the watch reports input from the client, which it does during a long wait.
    is_input_reported: bool,
    /// How many bytes of the current request's reply another thread has sent; `None` if the request
    /// has not waited.
    sent_len: Option<usize>,
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
            watch,
            conn,
            is_watched: false,
            is_input_reported: false,
            sent_len: None,
        }
    }

    /// Queues a reply without its first `sent_len` bytes, which another thread has sent.
    pub(in crate::latchd) fn add(&mut self, reply: &Reply, sent_len: usize) -> Result<(), Ending> {
        let start = self.out.len();
        reply.write(&mut self.out);
        if sent_len > 0 {
            self.out.drain(start..start + sent_len);
        }
        self.flush_if_full()
    }

    /// Queues a reply that is given as a line without its LF.
    pub(in crate::latchd) fn add_line(&mut self, line: &str) -> Result<(), Ending> {
        self.out.extend(line.bytes().chain([b'\n']));
        self.flush_if_full()
    }

    /// Notes what the next reply promises about `holder`; `None` means all holders.
    pub(in crate::latchd) fn promise(&mut self, certainty: Certainty, holder: Option<Fence>) {
        if self.rules.node.is_some() {
            self.promised.add(certainty, holder);
        }
    }

    /// Notes that the next reply tells the client of a grant.
    pub(in crate::latchd) fn promise_grant(&mut self, grant: Fence) {
        if self.rules.node.is_some() {
            self.promised.grants.push(grant);
        }
    }

    pub(in crate::latchd) fn flush_if_full(&mut self) -> Result<(), Ending> {
        match makes_room(&mut self.out) {
            true => Ok(()),
            false => self.flush(),
        }
    }

    #[inline(always)] // into the session's loop, which says why
    pub(in crate::latchd) fn flush(&mut self) -> Result<(), Ending> {
        // A flush that fails is the last one, so none are left from before.
        self.untold = self.rules.wait_for_journal(&mut self.promised);
        let len = self.out.len();
        let flushed = flush(&mut self.out, self.stream, self.rules);
        if self.out.len() < len {
            self.untold.clear();
        }
        flushed
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
        let send = move |out: &mut Vec<u8>| match makes_room(out) {
            true => Ok(()),
            false => flush(out, stream, rules),
        };
        (&mut self.out, send)
    }

    /// Ends the wait of the current request. Returns how many bytes of the reply another thread has
    /// sent; `None` if the request has not waited.
    pub(in crate::latchd) fn end_wait(&mut self) -> Option<usize> {
        if std::mem::take(&mut self.is_input_reported) {
            self.heed(InputReports::Ignored);
        }
        self.sent_len.take()
    }

    /// Sets whether the watch reports input from the peer. It must do so during a long wait,
    /// because a peer that keeps sending after its waiting request until its window is full counts
    /// as gone.
    fn heed(&self, input: InputReports) {
        // If this fails, it only takes longer to notice that a peer that floods the connection has
        // left.
        let _ = self.watch.set_input(self.stream, self.conn.0, input);
    }
}

impl ClientEnd for Outbox<'_> {
    fn is_ready_to_wait(&self) -> bool {
        self.is_watched && self.out.is_empty()
    }

    fn prepare_to_wait(&mut self) -> Result<(), Ending> {
        self.flush()?;
        if !self.is_watched {
            // The watch logs why it fails.
            let watched = self.watch.watch(self.stream, self.conn.0);
            watched.map_err(|_| Ending::Unwatched)?;
            self.is_watched = true;
        }
        Ok(())
    }

    fn is_operator(&self, admin_token: Option<&str>) -> bool {
        let uid = self.stream.peer_uid();
        uid.is_some_and(is_own_or_root) || self.rules.is_admin_token(admin_token)
    }

    fn note(&mut self, event: WaitEvent) {
        match event {
            WaitEvent::Queued => self.sent_len = Some(0),
            WaitEvent::IsLong => {
                self.is_input_reported = true;
                self.heed(InputReports::Reported);
            }
            WaitEvent::ReplySent(len) => self.sent_len = Some(len),
        }
    }
}

/// The client as seen by the thread that ends a wait. That thread sends the reply to the waiting
/// request. The session has already sent all earlier replies.
impl ClientSocket for Stream {
    fn peer(&self) -> String {
        self.identity()
    }

    fn send_grant(&self, grant: Grant) -> usize {
        // The input may be a telnet command, which must be answered first. If the peer has gone,
        // nothing is sent.
        if self.is_readable() {
            return 0;
        }
        let mut line = [0; Reply::MAX_LEN];
        let mut rest = &mut line[..];
        Reply::Granted(grant).write(&mut rest);
        let len = Reply::MAX_LEN - rest.len();
        self.send_once(&line[..len])
    }

    fn has_hung_up(&self) -> bool {
        Stream::has_hung_up(self)
    }

    fn end(&self) {
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
