//! One connection's conversation: greet, read a command, do it, write the reply, in order.
//!
//! The client that the protocol was made for takes the first bytes that it gets for the greeting and the
//! next ones for the reply, whatever they are: so each goes out in one write. When it unlocks, it even
//! takes the greeting for the reply. So we look whether it has sent its command already, and if so,
//! carry it out before we greet: when the greeting arrives, the lock file is gone.

use std::io;
use std::time::{Duration, Instant};

use log::debug;

use crate::net::lines::{Buffered, LineReader, ReadEnd};

use super::command::{is_of_another_protocol, parse, Command};
use super::locks::Locks;
use super::peer::{NotLocal, Peer};
use super::places::Place;
use super::reply::{append_greeting, Reply, TURNED_AWAY};
use super::wire::{Until, Wire};

/// For how long we look for a command before we greet.
const EARLY_LOOK: Duration = Duration::from_millis(2);

/// The longest line, without its LF.
const MAX_LINE_LEN: usize = 1023;

/// After so many lines that make no sense, we hang up.
const MAX_BAD_COMMANDS: u32 = 10;

/// For how long we listen to what a peer still sends before we close on it.
const CLOSING_TIME: Duration = Duration::from_millis(250);

/// What all sessions are told.
#[derive(Debug)]
pub struct SessionRules {
    /// Our name in the greeting.
    pub hostname: String,
    /// For how long a line may take to come.
    pub idle_timeout: Duration,
}

/// Whether the conversation goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    GoOn,
    End(&'static str),
}

/// Serves a connection until it ends. What was locked stays locked. Where there are several
/// connections, `place` is this one's among them.
pub fn serve(
    wire: &Wire<'_>,
    peer: Result<Peer, NotLocal>,
    place: Option<&Place>,
    locks: &Locks,
    rules: &SessionRules,
) {
    let peer = match peer {
        Ok(peer) => peer,
        Err(NotLocal) => {
            debug!("turned-away reason=not-local");
            let _ = wire.write(TURNED_AWAY);
            return wire.part(CLOSING_TIME);
        }
    };
    debug!("opened {peer}");
    let mut session = Session {
        wire,
        peer,
        place,
        locks,
        rules,
        reader: LineReader::new(|_, _| MAX_LINE_LEN),
        out: Vec::new(),
        is_deaf: false,
        bad_count: 0,
    };
    let reason = session.converse();
    if reason != "peer-closed" {
        wire.part(CLOSING_TIME);
    }
    debug!("closed {peer} reason={reason}");
}

struct Session<'a> {
    wire: &'a Wire<'a>,
    peer: Peer,
    place: Option<&'a Place>,
    locks: &'a Locks,
    rules: &'a SessionRules,
    reader: LineReader<1>,
    out: Vec<u8>,
    /// The peer takes no replies any more. What it has sent is still done.
    is_deaf: bool,
    bad_count: u32,
}

impl Session<'_> {
    /// Returns why it is over.
    fn converse(&mut self) -> &'static str {
        append_greeting(&mut self.out, &self.rules.hostname);
        let mut received = self.receive(Instant::now() + EARLY_LOOK);
        if matches!(received, Err(ReadEnd::Timeout)) {
            self.send();
            received = self.receive(self.idle_deadline());
        }
        loop {
            let flow = match received {
                Ok(found) => self.answer(found),
                Err(ReadEnd::Eof) => Flow::End("peer-closed"),
                Err(ReadEnd::Timeout) => Flow::End("idle"),
                Err(ReadEnd::Telnet) => Flow::End("telnet"),
                Err(ReadEnd::Broken(_)) => Flow::End("broken"),
            };
            self.reader.take_answers(&mut self.out);
            if let (Flow::End(reason), _) | (_, Flow::End(reason)) = (flow, self.send()) {
                return reason;
            }
            received = self.receive(self.idle_deadline());
        }
    }

    fn idle_deadline(&self) -> Instant {
        Instant::now() + self.rules.idle_timeout
    }

    /// Blocks until there is a line, or more of one than is allowed.
    fn receive(&mut self, deadline: Instant) -> Result<Buffered, ReadEnd> {
        loop {
            match self.reader.look() {
                Buffered::Incomplete => {}
                found => return Ok(found),
            }
            self.reader.read(Until(self.wire, deadline))?;
            let is_greeted = self.out.is_empty();
            if is_greeted {
                self.reader.take_answers(&mut self.out);
                self.send();
            }
        }
    }

    /// Does what the line asks for that has been received, and puts the reply behind what is to be sent.
    fn answer(&mut self, found: Buffered) -> Flow {
        if let Some(place) = self.place {
            place.touch();
        }
        if found == Buffered::TooLong {
            let flow = if is_of_another_protocol(self.reader.overlong_head()) {
                Flow::End("other-protocol")
            } else {
                let head = Reply::NotUnderstood(self.reader.overlong_head());
                head.append_to(&mut self.out, &self.rules.hostname);
                self.count_bad()
            };
            self.reader.skip_overlong();
            return flow;
        }
        let [line] = self.reader.frame();
        let mut flow = Flow::GoOn;
        let reply = match parse(line) {
            Some(Command::Lock(request)) => self.locks.lock(self.peer, &request),
            Some(Command::Unlock(request)) => self.locks.unlock(self.peer, &request),
            Some(Command::Noop) => Reply::Okay,
            Some(Command::Help | Command::Stat) => Reply::NotImplemented,
            Some(Command::Quit) => {
                flow = Flow::End("quit");
                Reply::Goodbye
            }
            None if is_of_another_protocol(line) => return Flow::End("other-protocol"),
            None => Reply::NotUnderstood(line),
        };
        reply.append_to(&mut self.out, &self.rules.hostname);
        if matches!(reply, Reply::NotUnderstood(_)) {
            flow = self.count_bad();
        }
        self.reader.advance();
        flow
    }

    fn count_bad(&mut self) -> Flow {
        self.bad_count += 1;
        match self.bad_count {
            MAX_BAD_COMMANDS => Flow::End("bad-commands"),
            _ => Flow::GoOn,
        }
    }

    /// Sends what there is to send, in one write. A peer that has closed already, as the usual client
    /// does, has still asked for what it asked for; one that is there and does not listen is given up.
    fn send(&mut self) -> Flow {
        let mut flow = Flow::GoOn;
        if !self.is_deaf && !self.out.is_empty() {
            if let Err(error) = self.wire.write(&self.out) {
                self.is_deaf = true;
                if error.kind() == io::ErrorKind::TimedOut {
                    flow = Flow::End("deaf");
                }
            }
        }
        self.out.clear();
        flow
    }
}
