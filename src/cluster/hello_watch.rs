//! A watch for the `hello` of a client whose connection a standby passes on.

use crate::protocol::abilities::Abilities;
use crate::protocol::request::{parse, Request};

/// The maximum number of bytes of a line that are stored. Every `hello` line is shorter.
const MAX_LINE_LEN: usize = 1024;

/// Looks at the first frames to find out whether the client can adopt its grants. A `hello` says
/// so, and only an `auth` may precede it. An encrypted connection shows no `hello`.
#[derive(Default)]
pub(super) struct HelloWatch {
    /// The current line, without its LF.
    line: Vec<u8>,
    /// The number of complete lines so far.
    line_count: usize,
    /// The first line of the current frame.
    command: Vec<u8>,
    /// Set when no further byte can change the result.
    is_known: bool,
}

impl HelloWatch {
    /// The maximum number of lines to look at: two frames.
    const LINES: usize = 6;

    /// Looks at more bytes. Returns whether they complete the `hello` of a client that can adopt
    /// its grants.
    pub(super) fn look_at(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            match byte {
                _ if self.is_known => return false,
                b'\n' if self.end_line() => return true,
                b'\n' => {}
                // A line of an `auth` may be longer, but its rest is not needed.
                _ if self.line.len() < MAX_LINE_LEN => self.line.push(*byte),
                _ => {}
            }
        }
        false
    }

    fn end_line(&mut self) -> bool {
        let line = std::mem::take(&mut self.line);
        let line = line.strip_suffix(b"\r").unwrap_or(&line);
        self.line_count += 1;
        match self.line_count % 3 {
            1 => {
                self.is_known = line != b"hello" && (line != b"auth" || self.line_count > 1);
                self.command = line.to_vec();
            }
            0 if self.command == b"hello" => {
                self.is_known = true;
                let hello = parse([b"hello", b"_", line]);
                return matches!(hello, Ok(Request::Hello(Abilities { adopt: true, .. })));
            }
            _ => self.is_known |= self.line_count == Self::LINES,
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_that_can_adopt_is_seen_however_it_arrives() {
        let long = "x".repeat(60_000);
        for (text, expected) in [
            ("hello\n_\nadopt\n", true),
            ("hello\r\n_\r\nslots adopt\r\nl\nk\n0\n", true),
            (&format!("auth\n_\n{long}\nhello\n_\nadopt\n"), true),
            ("hello\n_\n_\n", false),
            ("l\nk\n0\nhello\n_\nadopt\n", false),
            ("auth\n_\nx\nauth\n_\nx\nhello\n_\nadopt\n", false),
            ("auth\n_\nx\nl\nk\n0\nhello\n_\nadopt\n", false),
            ("hello\n_\nadopt", false),
        ] {
            for at_once in [1, 2, 7, text.len()] {
                let mut watch = HelloWatch::default();
                let found = text
                    .as_bytes()
                    .chunks(at_once)
                    .filter(|bytes| watch.look_at(bytes));
                assert_eq!(found.count(), usize::from(expected), "{text:.40}");
            }
        }
    }
}
