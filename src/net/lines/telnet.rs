//! Telnet commands (RFC 854) in a byte stream: removed, and answered with a refusal if they
//! negotiate an option. This end never requests one.
//!
//! UTF-8 never contains 0xFF, so it always begins a command. A command may span reads, so the state
//! outlives a call.

use memchr::memchr2;

const IAC: u8 = 255;
const DONT: u8 = 254;
const DO: u8 = 253;
const WONT: u8 = 252;
const WILL: u8 = 251;
const SB: u8 = 250;
const IP: u8 = 244;
const SE: u8 = 240;
/// EOF, the lowest command code; SUSP, ABORT and EOR follow.
const FIRST_COMMAND: u8 = 236;
const TIMING_MARK: u8 = 6;

/// Replaces an interrupt (IAC IP) in the filtered stream. Nothing else leaves a 0xFF there.
pub(super) const INTERRUPT: u8 = 0xFF;

/// Replaces an escaped 0xFF (IAC IAC), or a 0xFF before a byte that is not a command. Not valid
/// UTF-8 either.
const ESCAPED_FF: u8 = 0xFE;

/// The longest subnegotiation that is skipped, in bytes.
const MAX_SUBNEGOTIATION: usize = 256;

/// How many options are refused; further requests are ignored.
const MAX_REFUSALS: usize = 64;

/// The telnet state of one connection.
#[derive(Debug, Default)]
pub(super) struct Telnet {
    state: ParserState,
    after_cr: bool,
    /// The requests refused so far, as (DO or WILL, option).
    refused: Vec<(u8, u8)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ParserState {
    #[default]
    Data,
    Command,
    Option(u8),
    Subnegotiation(usize),
    SubnegotiationCommand(usize),
    /// In a subnegotiation that exceeds the limit: all further input is dropped.
    Endless,
}

impl Telnet {
    /// Bytes that the next chunk must leave free at its front: one if the last chunk ended in IAC.
    pub(super) fn room_len(&self) -> usize {
        usize::from(self.state == ParserState::Command)
    }

    /// Removes telnet commands from `chunk` in place and returns how many bytes remain at its
    /// front. Appends the replies to `answers`.
    pub(super) fn filter(&mut self, chunk: &mut [u8], answers: &mut Vec<u8>) -> usize {
        if self.is_plain(chunk) {
            self.after_cr = chunk.last().map_or(self.after_cr, |byte| *byte == b'\r');
            return chunk.len();
        }
        let mut kept = 0;
        for at in self.room_len()..chunk.len() {
            let byte = chunk[at];
            if self.state == ParserState::Command && byte < FIRST_COMMAND {
                // Not a command. The 0xFF has left room for its replacement.
                self.state = ParserState::Data;
                chunk[kept] = self.data(ESCAPED_FF);
                kept += 1;
            }
            if let Some(byte) = self.advance(byte, answers) {
                chunk[kept] = byte;
                kept += 1;
            }
        }
        kept
    }

    /// Whether a subnegotiation has exceeded its limit.
    pub(super) fn is_endless(&self) -> bool {
        self.state == ParserState::Endless
    }

    /// Whether the chunk contains no commands, the usual case.
    fn is_plain(&self, chunk: &[u8]) -> bool {
        self.state == ParserState::Data && memchr2(IAC, 0, chunk).is_none()
    }

    fn advance(&mut self, byte: u8, answers: &mut Vec<u8>) -> Option<u8> {
        let (next, kept) = match (self.state, byte) {
            (ParserState::Data, IAC) => (ParserState::Command, None),
            (ParserState::Data, _) => (ParserState::Data, Some(self.data(byte))),
            (ParserState::Command, IAC) => (ParserState::Data, Some(self.data(ESCAPED_FF))),
            (ParserState::Command, IP) => (ParserState::Data, Some(self.data(INTERRUPT))),
            (ParserState::Command, SB) => (ParserState::Subnegotiation(0), None),
            (ParserState::Command, WILL | WONT | DO | DONT) => (ParserState::Option(byte), None),
            (ParserState::Command, _) => (ParserState::Data, None),
            (ParserState::Option(verb), option) => {
                self.refuse(verb, option, answers);
                (ParserState::Data, None)
            }
            (ParserState::Subnegotiation(len), IAC) => {
                (ParserState::SubnegotiationCommand(len), None)
            }
            (ParserState::SubnegotiationCommand(_), SE) => (ParserState::Data, None),
            (ParserState::Subnegotiation(len) | ParserState::SubnegotiationCommand(len), _)
                if len >= MAX_SUBNEGOTIATION =>
            {
                (ParserState::Endless, None)
            }
            (ParserState::Subnegotiation(len) | ParserState::SubnegotiationCommand(len), _) => {
                (ParserState::Subnegotiation(len + 1), None)
            }
            (ParserState::Endless, _) => (ParserState::Endless, None),
        };
        self.state = next;
        kept
    }

    /// A data byte. Telnet sends a bare carriage return as CR NUL; it ends a line.
    fn data(&mut self, byte: u8) -> u8 {
        let ends_line = self.after_cr && byte == 0;
        self.after_cr = byte == b'\r';
        if ends_line {
            b'\n'
        } else {
            byte
        }
    }

    fn refuse(&mut self, verb: u8, option: u8, answers: &mut Vec<u8>) {
        let refusal = match verb {
            DO => WONT,
            WILL => DONT,
            // With WONT and DONT the peer confirms that an option is off.
            _ => return,
        };
        // Every timing mark needs an answer: after a Ctrl-C, telnet discards all input until it
        // comes. Other requests are answered once, so that two ends cannot negotiate endlessly.
        if (verb, option) != (DO, TIMING_MARK) {
            if self.refused.len() >= MAX_REFUSALS || self.refused.contains(&(verb, option)) {
                return;
            }
            self.refused.push((verb, option));
        }
        answers.extend([IAC, refusal, option]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq)]
    struct Endless;

    /// Filters `input` in chunks of `size`; returns what is left and what was answered.
    fn filter(input: &[u8], size: usize) -> Result<(Vec<u8>, Vec<u8>), Endless> {
        let mut telnet = Telnet::default();
        let (mut kept, mut answers) = (Vec::new(), Vec::new());
        for chunk in input.chunks(size) {
            let mut chunk = [&[0][..telnet.room_len()], chunk].concat();
            let len = telnet.filter(&mut chunk, &mut answers);
            kept.extend(&chunk[..len]);
        }
        match telnet.is_endless() {
            true => Err(Endless),
            false => Ok((kept, answers)),
        }
    }

    fn check(input: &[u8], kept: &[u8], answers: &[u8]) {
        for size in 1..=input.len().max(1) {
            let expected = Ok((kept.to_vec(), answers.to_vec()));
            assert_eq!(
                filter(input, size),
                expected,
                "{input:?} in chunks of {size}"
            );
        }
    }

    #[test]
    fn plain_text_goes_through() {
        check(b"l\r\nk\r\n10\r\n", b"l\r\nk\r\n10\r\n", b"");
        check("ключ\0\n".as_bytes(), "ключ\0\n".as_bytes(), b"");
    }

    #[test]
    fn every_request_is_refused_once_and_every_statement_ignored() {
        check(
            b"a\xff\xfd\x01b\xff\xfb\x03c",
            b"abc",
            b"\xff\xfc\x01\xff\xfe\x03",
        );
        check(b"\xff\xfd\x01\xff\xfd\x01", b"", b"\xff\xfc\x01");
        check(b"\xff\xfc\x01x\xff\xfe\x03", b"x", b"");
    }

    #[test]
    fn a_timing_mark_is_answered_every_time() {
        check(
            b"\xff\xf4\xff\xfd\x06\xff\xf4\xff\xfd\x06",
            &[INTERRUPT, INTERRUPT],
            b"\xff\xfc\x06\xff\xfc\x06",
        );
    }

    #[test]
    fn at_most_64_options_are_refused() {
        let input: Vec<u8> = (100..200).flat_map(|option| [IAC, DO, option]).collect();
        let (_, answers) = filter(&input, input.len()).expect("no subnegotiation");
        assert_eq!(answers.len(), 64 * 3);
    }

    #[test]
    fn a_subnegotiation_is_skipped_up_to_256_bytes() {
        check(b"a\xff\xfa\x18\x00vt100\xff\xf0b", b"ab", b"");
        check(b"a\xff\xfa\xff\xff\xff\xf0b", b"ab", b"");
        let mut longest = vec![IAC, SB];
        longest.extend([7; MAX_SUBNEGOTIATION]);
        check(&[&longest[..], &[IAC, SE, b'x']].concat(), b"x", b"");
        longest.push(7);
        assert_eq!(filter(&longest, 1), Err(Endless));
        for byte in [IAC, SE, 0] {
            let endless = [&[IAC, SB][..], &[byte; 2000]].concat();
            assert_eq!(filter(&endless, 7), Err(Endless), "{byte}");
        }
    }

    #[test]
    fn other_commands_vanish_and_an_escaped_ff_stays_invalid() {
        check(b"a\xff\xf6b\xff\xf1c", b"abc", b"");
        // No command at all: the line must not pass for one without these two bytes.
        check(b"a\xffzb", b"a\xfezb", b"");
        check(b"a\xff\nb\xff\r\0c", b"a\xfe\nb\xfe\r\nc", b"");
        let (kept, _) = filter(b"a\xff\xffb", 1).expect("no subnegotiation");
        assert!(std::str::from_utf8(&kept).is_err());
        assert!(!kept.contains(&INTERRUPT));
    }

    #[test]
    fn cr_nul_ends_a_line() {
        check(b"ping\r\0_\r\0_\r\0", b"ping\r\n_\r\n_\r\n", b"");
        check(b"a\0b", b"a\0b", b"");
    }
}
