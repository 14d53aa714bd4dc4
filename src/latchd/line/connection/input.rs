//! Reads what a client sends: frames of three lines, each with a time limit.

use std::time::{Duration, Instant};

use crate::latchd::context::ServerContext;
use crate::latchd::line::ending::Ending;
use crate::os::stream::{Socket, Stream};
use crate::shared::net::lines::{Buffered, LineReader, ReadEnd};
use crate::wire::request::{line_limit, Frame};

/// The frames that arrive from a client.
pub struct Input<'a> {
    stream: &'a Stream,
    lines: LineReader<3>,
    read_timeout: Duration,
    /// The read timeout that is set on the socket.
    socket_timeout: Duration,
    /// `None` at the beginning of a frame: then the read timeout starts with the next read.
    deadline: Option<Deadline>,
}

#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    awaited: Awaited,
}

/// What a deadline applies to. A telnet command belongs to neither, so it moves no deadline.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Awaited {
    /// The first byte of the next frame.
    NextFrame,
    /// The end of the line with this number.
    Line(u32),
}

impl<'a> Input<'a> {
    pub fn new(stream: &'a Stream, context: &ServerContext) -> Self {
        let secret_len = context.max_token_len();
        Input {
            stream,
            lines: LineReader::new(move |index, command| line_limit(secret_len, index, command)),
            read_timeout: context.read_timeout,
            socket_timeout: Duration::ZERO,
            deadline: None,
        }
    }

    /// Takes the bytes that were read before as the first ones of the client. Puts the replies to
    /// telnet commands into `out`.
    pub fn begin_with(&mut self, first: Vec<u8>, out: &mut Vec<u8>) {
        if let Socket::Tls(stream) = &self.stream.socket {
            return stream.put_back(first);
        }
        self.lines.put_back(&first);
        self.lines.take_answers(out);
    }

    /// Whether a whole frame has arrived: see [`Input::frame`].
    pub fn has_frame(&mut self) -> Result<bool, Ending> {
        is_complete(self.lines.look())
    }

    /// Whether the first line of a frame has arrived, whatever follows it.
    pub fn has_first_line(&mut self) -> Result<bool, Ending> {
        is_complete(self.lines.look_for_first_line())
    }

    /// The frame that [`Input::has_frame`] found.
    pub fn frame(&self) -> Frame<'_> {
        self.lines.frame()
    }

    /// The same frame as text; `None` if it is not valid UTF-8.
    pub fn text(&self) -> Option<[&str; 3]> {
        self.lines.text()
    }

    /// The line that [`Input::has_first_line`] found, or the first one of the frame.
    pub fn first_line(&self) -> &[u8] {
        self.lines.first_line().unwrap_or_default()
    }

    /// Whether the current frame begins with `byte`. Call this before looking for a line of the
    /// frame.
    pub fn begins_with(&self, byte: u8) -> bool {
        self.lines.begins_with(byte)
    }

    /// Drops the frame that [`Input::has_frame`] found.
    pub fn end_frame(&mut self) {
        self.lines.advance();
        self.deadline = None;
    }

    /// Drops the frame that [`Input::has_frame`] found, in which a standby has introduced its
    /// client. The next line is the client's first one.
    pub fn end_relay_frame(&mut self) {
        self.end_frame();
        self.lines.begin_connection();
    }

    /// Drops the line that [`Input::has_first_line`] found. The next line begins a frame.
    pub fn end_first_line(&mut self) {
        self.lines.skip_first_line();
        self.deadline = None;
    }

    /// Whether the client has begun a frame that is not complete.
    pub fn is_within_frame(&self) -> bool {
        self.awaited() != Awaited::NextFrame
    }

    /// Gives the client until `at` to begin its next frame.
    pub fn stay_idle_until(&mut self, at: Instant) {
        let awaited = Awaited::NextFrame;
        self.deadline = Some(Deadline { at, awaited });
    }

    /// Blocks until the client has sent more, or until the deadlines must be checked again. Puts
    /// the replies to telnet commands into `out`. Fails with [`Ending::ReadTimeout`] if the awaited
    /// byte or line end has not arrived by its deadline or by `limit`.
    #[inline(always)] // into the session's loop, which says why
    pub fn read(&mut self, limit: Option<Instant>, out: &mut Vec<u8>) -> Result<(), Ending> {
        let begins = !self.is_within_frame() && self.deadline.is_none() && limit.is_none();
        // In the usual case, the timeout of the socket is the only deadline, and the clock need not
        // be read.
        let is_usual = begins && self.socket_timeout == self.read_timeout;
        if !is_usual {
            self.set_timeout(limit)?;
        }
        let read = self.lines.read(self.stream);
        self.lines.take_answers(out);
        match read {
            Ok(()) => {
                // Only a telnet command has arrived. It is not part of a request, so it must not
                // move the deadline.
                if is_usual && !self.is_within_frame() {
                    self.stay_idle_until(Instant::now() + self.read_timeout);
                }
                Ok(())
            }
            Err(ReadEnd::Timeout) if is_usual => Err(Ending::ReadTimeout),
            Err(ReadEnd::Timeout) => Ok(()), // the next call finds the deadline over
            Err(ReadEnd::Eof) => Err(Ending::PeerClosed),
            Err(ReadEnd::Telnet) => Err(Ending::LineTooLong),
            Err(ReadEnd::Broken(error)) => Err(Ending::Broken(error)),
        }
    }

    /// Reads what has arrived, without blocking and as far as there is room. Puts the replies to
    /// telnet commands into `out`.
    pub fn read_ready(&mut self, out: &mut Vec<u8>) {
        self.lines.read_ready(self.stream);
        self.lines.take_answers(out);
    }

    /// Sets the socket's timeout, so that the next read ends at the current deadline or at `limit`,
    /// whichever is earlier. Fails if that time has passed.
    fn set_timeout(&mut self, limit: Option<Instant>) -> Result<(), Ending> {
        let (now, awaited) = (Instant::now(), self.awaited());
        let deadline = self.deadline.filter(|it| it.awaited == awaited);
        let at = deadline.map_or(now + self.read_timeout, |it| it.at);
        self.deadline = Some(Deadline { at, awaited });
        let left = limit
            .map_or(at, |limit| limit.min(at))
            .saturating_duration_since(now);
        if left.is_zero() {
            return Err(Ending::ReadTimeout);
        }
        if left != self.socket_timeout {
            self.stream.set_read_timeout(left).map_err(Ending::Broken)?;
            self.socket_timeout = left;
        }
        Ok(())
    }

    fn awaited(&self) -> Awaited {
        let line = self.lines.line_in_progress();
        line.map_or(Awaited::NextFrame, Awaited::Line)
    }
}

fn is_complete(found: Buffered) -> Result<bool, Ending> {
    match found {
        Buffered::Frame => Ok(true),
        Buffered::Incomplete => Ok(false),
        Buffered::TooLong => Err(Ending::LineTooLong),
    }
}
