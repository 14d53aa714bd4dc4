//! One connection's conversation: greet, read a command, carry it out, write the reply, in order.
//!
//! RXTX, the client that the protocol was made for, takes whatever it reads first for the greeting,
//! and whatever it reads next for the reply. So the greeting is sent in one write, and each reply
//! in another. When RXTX unlocks, it even takes the greeting for the reply. So a command that has
//! already arrived is carried out before the greeting is sent, and the lock file is gone when RXTX
//! reads the greeting.

use std::io;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use log::debug;

use crate::shared::net::lines::{Buffered, LineReader, ReadEnd};

use super::command::{is_other_protocol, parse, Command};
use super::locks::Locks;
use super::peer::Peer;
use super::reply::{append_greeting, LfpReply, TURNED_AWAY};
use super::wire::{Until, Wire};

/// How long the server waits for an early command before it sends the greeting.
const EARLY_LOOK: Duration = Duration::from_millis(2);

/// The maximum length of a line in bytes, without its LF.
const MAX_LINE_LEN: usize = 1023;

/// How long the peer may be silent within its first line. The newest nrjavaserial sends only a part
/// of a line and then waits for a reply.
const FIRST_LINE_SILENCE: Duration = Duration::from_secs(2);

/// The number of invalid commands that ends a conversation.
const MAX_BAD_COMMANDS: u32 = 10;

/// How long a lingering close reads what the peer still sends.
const LINGER_TIME: Duration = Duration::from_millis(250);

/// The settings that all conversations of a server share.
#[derive(Debug)]
pub struct ConversationRules {
    /// The name of this host in the greeting.
    pub hostname: String,
    /// How long a line may take to arrive.
    pub idle_timeout: Duration,
}

/// Whether the conversation goes on, or why it ends.
type Flow = ControlFlow<&'static str>;

/// Serves a connection until it ends. The locks that were taken through it stay. If `peer` is
/// `None`, the peer is on another host or its user cannot be determined, and it is turned away.
pub fn serve(wire: &Wire<'_>, peer: Option<Peer>, locks: &Locks, rules: &ConversationRules) {
    let Some(peer) = peer else {
        debug!("turned-away reason=unknown-peer");
        let _ = wire.write(TURNED_AWAY);
        return wire.close_lingering(LINGER_TIME);
    };
    debug!("opened {peer}");
    let reason = Conversation::new(wire, peer, locks, rules).converse();
    if reason != "peer-closed" {
        wire.close_lingering(LINGER_TIME);
    }
    debug!("closed {peer} reason={reason}");
}

struct Conversation<'a> {
    wire: &'a Wire<'a>,
    peer: Peer,
    locks: &'a Locks,
    rules: &'a ConversationRules,
    reader: LineReader<1>,
    out: Vec<u8>,
    /// Whether a write has failed, so that no more replies are sent. Commands that have arrived are
    /// still carried out.
    write_failed: bool,
    line_count: u64,
    bad_count: u32,
}

impl<'a> Conversation<'a> {
    fn new(
        wire: &'a Wire<'a>,
        peer: Peer,
        locks: &'a Locks,
        rules: &'a ConversationRules,
    ) -> Conversation<'a> {
        Conversation {
            wire,
            peer,
            locks,
            rules,
            reader: LineReader::new(|_, _| MAX_LINE_LEN),
            out: Vec::new(),
            write_failed: false,
            line_count: 0,
            bad_count: 0,
        }
    }

    /// Runs the conversation and returns why it has ended.
    fn converse(&mut self) -> &'static str {
        append_greeting(&mut self.out, &self.rules.hostname);
        let mut received = self.receive(Instant::now() + EARLY_LOOK);
        if matches!(received, Err(ReadEnd::Timeout)) {
            let _ = self.send();
            received = self.receive(self.idle_deadline());
        }
        loop {
            let flow = match received {
                Ok(found) => self.answer(found),
                Err(ReadEnd::Eof) => Flow::Break("peer-closed"),
                Err(ReadEnd::Timeout) if self.is_in_first_line() => {
                    let reply = LfpReply::NotUnderstood(self.reader.incomplete());
                    reply.append_to(&mut self.out, &self.rules.hostname);
                    Flow::Break("line-not-ended")
                }
                Err(ReadEnd::Timeout) => Flow::Break("idle"),
                Err(ReadEnd::Telnet) => Flow::Break("telnet"),
                Err(ReadEnd::Broken(_)) => Flow::Break("broken"),
            };
            self.reader.take_answers(&mut self.out);
            if let (Flow::Break(reason), _) | (_, Flow::Break(reason)) = (flow, self.send()) {
                return reason;
            }
            received = self.receive(self.idle_deadline());
        }
    }

    fn idle_deadline(&self) -> Instant {
        Instant::now() + self.rules.idle_timeout
    }

    /// Blocks until a line is complete, or too long.
    fn receive(&mut self, deadline: Instant) -> Result<Buffered, ReadEnd> {
        let mut is_late = false;
        loop {
            match self.reader.look() {
                // While the peer keeps sending a line without an end, no read times out.
                Buffered::Incomplete if is_late => return Err(ReadEnd::Timeout),
                Buffered::Incomplete => {}
                found => {
                    self.line_count += 1;
                    return Ok(found);
                }
            }
            let patience = if self.is_in_first_line() {
                deadline.min(Instant::now() + FIRST_LINE_SILENCE)
            } else {
                deadline
            };
            self.reader.read(Until(self.wire, patience))?;
            is_late = Instant::now() >= deadline;
            let is_greeted = self.out.is_empty();
            if is_greeted {
                self.reader.take_answers(&mut self.out);
                let _ = self.send();
            }
        }
    }

    /// Whether a part of the first line, but not all of it, has arrived.
    fn is_in_first_line(&self) -> bool {
        self.line_count == 0 && self.reader.line_in_progress().is_some()
    }

    /// Carries out the line that has been received, and appends its reply to the unsent replies.
    fn answer(&mut self, found: Buffered) -> Flow {
        let (line, command) = match found {
            Buffered::TooLong => (self.reader.overlong_head(), None),
            _ => {
                let [line] = self.reader.frame();
                (line, parse(line))
            }
        };
        let mut flow = Flow::Continue(());
        let reply = match command {
            Some(Command::Lock(target)) => self.locks.lock(self.peer, &target),
            Some(Command::Unlock(target)) => self.locks.unlock(self.peer, &target),
            Some(Command::Noop) => LfpReply::Okay,
            Some(Command::Help | Command::Stat) => LfpReply::NotImplemented,
            Some(Command::Quit) => {
                flow = Flow::Break("quit");
                LfpReply::Goodbye
            }
            None if is_other_protocol(line) => return Flow::Break("other-protocol"),
            None => {
                self.bad_count += 1;
                if self.bad_count == MAX_BAD_COMMANDS {
                    flow = Flow::Break("bad-commands");
                }
                LfpReply::NotUnderstood(line)
            }
        };
        reply.append_to(&mut self.out, &self.rules.hostname);
        self.reader.advance();
        flow
    }

    /// Sends the unsent replies in one write. If the peer has already closed the connection, as
    /// RXTX does, the commands that it has sent still count. If the peer is connected but reads
    /// nothing, the conversation ends.
    fn send(&mut self) -> Flow {
        let mut flow = Flow::Continue(());
        if !self.write_failed && !self.out.is_empty() {
            if let Err(error) = self.wire.write(&self.out) {
                self.write_failed = true;
                if error.kind() == io::ErrorKind::TimedOut {
                    flow = Flow::Break("reply-not-read");
                }
            }
        }
        self.out.clear();
        flow
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lfpd::locks::LockRules;
    use crate::lfpd::peer::PeerRule;
    use crate::lfpd::uucp::files::SerialLockFiles;
    use crate::os::event::Event;
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    fn locks_in(directory: &Path) -> Locks {
        let rules = LockRules {
            peer_rule: PeerRule::Off,
            require_live_pid: false,
            devices: "/dev".into(),
        };
        let files = SerialLockFiles::new(directory.to_owned(), Vec::new());
        Locks::new(files, rules, None)
    }

    fn rules(idle_timeout: Duration) -> ConversationRules {
        ConversationRules {
            hostname: "host".into(),
            idle_timeout,
        }
    }

    #[test]
    fn a_peer_on_another_host_is_refused_and_locks_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let locks = locks_in(directory.path());
        let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
        theirs
            .write_all(b"lock /dev/lfpd-a 1\r\n")
            .expect("there is room");
        theirs.shutdown(Shutdown::Write).expect("half a close");
        let stop = Event::new().expect("an event");
        let wire = Wire::new(ours.as_fd(), ours.as_fd(), stop.as_fd());
        serve(&wire, None, &locks, &rules(Duration::from_secs(30)));
        drop(ours);
        let mut received = Vec::new();
        theirs.read_to_end(&mut received).expect("the reply");
        assert_eq!(received, TURNED_AWAY);
        let mut files = directory.path().read_dir().expect("it is there");
        assert!(files.next().is_none());
    }

    #[test]
    fn input_without_a_line_does_not_put_off_the_idle_timeout() {
        let directory = tempfile::tempdir().expect("a directory");
        let locks = locks_in(directory.path());
        let rules = rules(Duration::from_millis(1));
        let input = tempfile::tempfile().expect("a file");
        // Without blocks on the disk, but it takes longer to read.
        input.set_len(1 << 26).expect("a long file");
        let (ours, _theirs) = UnixStream::pair().expect("a socket pair");
        let stop = Event::new().expect("an event");
        let wire = Wire::new(input.as_fd(), ours.as_fd(), stop.as_fd());
        let mut conversation = Conversation::new(&wire, Peer(None), &locks, &rules);
        assert_eq!(conversation.converse(), "line-not-ended");
    }
}
