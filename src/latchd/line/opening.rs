//! The opening of a connection: what may come before its first request.
//!
//! The opening may be the first line of another protocol, the frame of a standby that passes a
//! client on, the words that a person types, or `auth`. Each is judged as soon as its line or frame
//! is complete, before any later byte is looked at. Otherwise a web page could have a browser send
//! a telnet interrupt in a later line, which would drop the browser's first line before the server
//! has judged it.

use std::time::Instant;

use super::connection::input::Input;
use super::connection::outbox::Outbox;
use super::ending::Ending;
use crate::latchd::arbiter::ReplyPromise;
use crate::latchd::auth::rights::Rights;
use crate::latchd::context::ServerContext;
use crate::wire::reply::Reply;
use crate::wire::request::{FirstWord, CLUSTER, HELP, RELAY};

/// The first byte of a TLS client's first message.
const TLS_HANDSHAKE: u8 = 0x16;

/// The number of placeholder lines that a client may send after `help`.
const HELP_LINES: u8 = 2;

/// Serves a connection until its first request has arrived, and leaves that request to the session.
/// Returns the client's rights. If the server has an auth token, this succeeds only for a client
/// that has authenticated.
pub fn open<'c>(
    input: &mut Input<'c>,
    outbox: &mut Outbox<'c>,
    context: &ServerContext,
) -> Result<Rights, Ending> {
    // `auth` has three lines, each with its own deadline, so it cannot take longer than this.
    let auth_due = Instant::now() + 3 * context.read_timeout;
    let is_secret = context.auth_tokens.is_some();
    let mut opening = Opener {
        input,
        outbox,
        context,
        auth_due: is_secret.then_some(auth_due),
    };
    match opening.run() {
        // A peer that has not authenticated learns no other reason.
        Err(Ending::ReadTimeout | Ending::LineTooLong | Ending::OtherProtocol(_)) if is_secret => {
            Err(Ending::AuthFailed)
        }
        opened => opened,
    }
}

struct Opener<'a, 'c> {
    input: &'a mut Input<'c>,
    outbox: &'a mut Outbox<'c>,
    context: &'a ServerContext,
    /// The deadline of `auth`, if a client must authenticate.
    auth_due: Option<Instant>,
}

impl Opener<'_, '_> {
    fn run(&mut self) -> Result<Rights, Ending> {
        self.remove_relay_frame()?;
        self.answer_first_words()?;
        if self.context.auth_tokens.is_some() {
            self.authenticate()
        } else {
            Ok(Rights::UNLIMITED)
        }
    }

    /// Removes the frame with which a standby begins, if there is one.
    fn remove_relay_frame(&mut self) -> Result<(), Ending> {
        let Some(node) = &self.context.node else {
            return Ok(());
        };
        self.wait_for_first_line()?;
        if self.input.first_line() != RELAY {
            return Ok(());
        }
        self.wait_for_frame()?;
        match self.input.frame() {
            [RELAY, epoch, _] if node.is_current_epoch(epoch) => self.input.end_relay_frame(),
            [RELAY, ..] => return Err(Ending::NotMeant),
            // A telnet interrupt has dropped the first line.
            _ => {}
        }
        Ok(())
    }

    /// Answers the words that a person types, until the first frame is complete.
    fn answer_first_words(&mut self) -> Result<(), Ending> {
        let mut help_lines_left: u8 = 0;
        loop {
            self.wait_for_first_line()?;
            match FirstWord::parse(self.input.first_line()) {
                Some(FirstWord::Help) => {
                    self.outbox.add_line(HELP)?;
                    help_lines_left = HELP_LINES;
                }
                Some(FirstWord::Quit) => return Err(Ending::Quit),
                Some(FirstWord::Placeholder) if help_lines_left > 0 => help_lines_left -= 1,
                Some(FirstWord::Placeholder) | None => {
                    if self.input.has_frame()? {
                        return Ok(());
                    }
                    self.read()?;
                    // A telnet interrupt may have dropped that line. Then the next line is the
                    // first one.
                    continue;
                }
            }
            self.input.end_first_line();
        }
    }

    /// Checks the `auth` of the client, and returns the client's rights. A request for the role
    /// needs no `auth`, because other servers of the cluster send it.
    fn authenticate(&mut self) -> Result<Rights, Ending> {
        while let (Some(node), CLUSTER) = (&self.context.node, self.input.first_line()) {
            self.outbox.add_line(&node.role_line())?;
            self.input.end_frame();
            self.wait_for_frame()?;
        }
        let rights = self.context.authenticate(self.input.frame());
        let rights = rights.ok_or(Ending::AuthFailed)?;
        self.input.end_frame();
        self.outbox.add(&Reply::Ok, ReplyPromise::Nothing)?;
        Ok(rights)
    }

    /// Blocks until the first line of a frame has arrived. Fails if the line belongs to another
    /// protocol.
    fn wait_for_first_line(&mut self) -> Result<(), Ending> {
        loop {
            // A TLS handshake contains a line end only by chance.
            if self.input.begins_with(TLS_HANDSHAKE) {
                return Err(Ending::OtherProtocol("tls"));
            }
            if self.input.has_first_line()? {
                break;
            }
            self.read()?;
        }
        if is_http(self.input.first_line()) {
            Err(Ending::OtherProtocol("http"))
        } else {
            Ok(())
        }
    }

    fn wait_for_frame(&mut self) -> Result<(), Ending> {
        while !self.input.has_frame()? {
            self.read()?;
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), Ending> {
        self.outbox.flush()?;
        self.input.read(self.auth_due, &mut self.outbox.out)
    }
}

/// Whether a line is the request line of HTTP.
pub fn is_http(line: &[u8]) -> bool {
    let version = line.rsplit(|byte| *byte == b' ').next();
    version.is_some_and(|version| version.starts_with(b"HTTP/"))
}
