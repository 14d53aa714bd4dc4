//! Telnet commands (RFC 854) in a byte stream. Commands are removed; a command that requests an
//! option is answered with a refusal. This end never requests an option.
//!
//! 0xFF never occurs in UTF-8, so a 0xFF can only be the start of a command. A command may span two
//! reads, so the parser keeps its state between calls.

use memchr::memchr2;

const IAC: u8 = 255;
const DONT: u8 = 254;
const DO: u8 = 253;
const WONT: u8 = 252;
const WILL: u8 = 251;
const SB: u8 = 250;
const IP: u8 = 244;
const SE: u8 = 240;
/// The lowest command code, EOF. SUSP, ABORT and EOR follow it.
const FIRST_COMMAND: u8 = 236;
const TIMING_MARK: u8 = 6;

/// Replaces an interrupt (IAC IP) in the filtered stream. The filtered stream has no other 0xFF.
pub const INTERRUPT: u8 = 0xFF;

/// Replaces an escaped 0xFF (IAC IAC), or a 0xFF before a byte that is not a command. 0xFE never
/// occurs in UTF-8 either.
const ESCAPED_FF: u8 = 0xFE;

/// The maximum length of a subnegotiation, in bytes.
const MAX_SUBNEGOTIATION: usize = 256;

/// The maximum number of requests to refuse. Further requests are ignored.
const MAX_REFUSALS: usize = 64;

/// The telnet state of one connection.
#[derive(Debug, Default)]
pub struct Telnet {
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
    /// A subnegotiation has exceeded the limit. All further input is dropped.
    Endless,
}

impl Telnet {
    /// How many bytes the caller must leave free at the front of the next chunk: one if the
    /// previous chunk ended in IAC, otherwise none.
    pub fn room_len(&self) -> usize {
        usize::from(self.state == ParserState::Command)
    }

    /// Removes telnet commands from `chunk`, moves the remaining bytes to its front and returns
    /// their number. Appends the replies to the commands to `answers`.
    pub fn filter(&mut self, chunk: &mut [u8], answers: &mut Vec<u8>) -> usize {
        if self.is_plain(chunk) {
            self.after_cr = chunk.last().map_or(self.after_cr, |byte| *byte == b'\r');
            return chunk.len();
        }
        let mut kept = 0;
        for at in self.room_len()..chunk.len() {
            let byte = chunk[at];
            if self.state == ParserState::Command && byte < FIRST_COMMAND {
                // The previous 0xFF does not begin a command. That 0xFF was dropped, so there is
                // room for its replacement.
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
    pub fn is_endless(&self) -> bool {
        self.state == ParserState::Endless
    }

    /// Whether the chunk has no command and no NUL, which may end a line. This is the usual case.
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

    /// Handles a data byte. Telnet sends a bare carriage return as CR NUL, which counts as a line
    /// end, so the NUL becomes an LF.
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
            // The peer confirms with WONT or DONT that an option is off.
            _ => return,
        };
        // Every timing mark must be answered: after Ctrl-C, the telnet client discards everything
        // we send until the answer arrives. Any other request is answered only once, so that two
        // ends cannot negotiate endlessly.
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
        if telnet.is_endless() {
            Err(Endless)
        } else {
            Ok((kept, answers))
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
        // Not a command. The two bytes must not just vanish, or the line would be taken for a valid
        // one.
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
