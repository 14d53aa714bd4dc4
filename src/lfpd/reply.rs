//! The bytes of the replies and of the greeting. Pure: no I/O.

/// The maximum number of bytes of an unknown command that the reply repeats.
const MAX_ECHO_LEN: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LfpReply<'a> {
    /// 200
    Okay,
    /// 202
    NotImplemented,
    /// 450
    Busy,
    /// 500, followed by the line that was not understood.
    NotUnderstood(&'a [u8]),
    /// 550
    Denied,
    /// 221
    Goodbye,
}

impl LfpReply<'_> {
    /// Appends the reply as one line to `out`.
    pub fn append_to(self, out: &mut Vec<u8>, hostname: &str) {
        match self {
            LfpReply::Okay => out.extend(b"200 Command okay."),
            LfpReply::NotImplemented => out.extend(b"202 Command not implemented"),
            LfpReply::Busy => out.extend(b"450 : File busy"),
            LfpReply::NotUnderstood(line) => {
                out.extend(b"500 '");
                out.extend(line.iter().take(MAX_ECHO_LEN).map(|byte| match byte {
                    b' '..=b'~' if *byte != b'\'' => *byte,
                    _ => b'?',
                }));
                out.extend(b"': command not understood");
            }
            LfpReply::Denied => out.extend(b"550 : Permission denied."),
            LfpReply::Goodbye => {
                out.extend(b"221 Thank you for using the Lock File service on ");
                out.extend(hostname.as_bytes());
            }
        }
        out.extend(b"\r\n");
    }
}

/// The only line that a peer gets if it is refused before its first command.
pub const TURNED_AWAY: &[u8] = b"550 : Permission denied.\r\n";

/// Appends the greeting, the first line of a conversation, to `out`.
pub fn append_greeting(out: &mut Vec<u8>, hostname: &str) {
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    let greeting = format!("220 {hostname} Lock File Server (Version lfpd-{VERSION}) ready\r\n");
    out.extend(greeting.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(reply: LfpReply) -> String {
        let mut out = Vec::new();
        reply.append_to(&mut out, "servertrent");
        String::from_utf8(out).expect("ASCII")
    }

    #[test]
    fn every_reply_is_to_the_byte() {
        for (reply, expected) in [
            (LfpReply::Okay, "200 Command okay.\r\n"),
            (LfpReply::NotImplemented, "202 Command not implemented\r\n"),
            (LfpReply::Busy, "450 : File busy\r\n"),
            (
                LfpReply::NotUnderstood(b"lokc x"),
                "500 'lokc x': command not understood\r\n",
            ),
            (
                LfpReply::NotUnderstood(b""),
                "500 '': command not understood\r\n",
            ),
            (LfpReply::Denied, "550 : Permission denied.\r\n"),
            (
                LfpReply::Goodbye,
                "221 Thank you for using the Lock File service on servertrent\r\n",
            ),
        ] {
            assert_eq!(text(reply), expected);
        }
        assert_eq!(text(LfpReply::Denied).as_bytes(), TURNED_AWAY);
        let mut greeting = Vec::new();
        append_greeting(&mut greeting, "servertrent");
        let expected = format!(
            "220 servertrent Lock File Server (Version lfpd-{}) ready\r\n",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(greeting, expected.as_bytes());
    }

    #[test]
    fn what_is_repeated_is_short_and_printable() {
        let every: Vec<u8> = (0..=255).collect();
        for line in [&every[..], &[b'\''; 300], &[0xFF; 64], &[b'x'; 65]] {
            let reply = text(LfpReply::NotUnderstood(line));
            let echo = reply
                .strip_prefix("500 '")
                .and_then(|rest| rest.strip_suffix("': command not understood\r\n"))
                .expect("the form of the reply");
            assert_eq!(echo.len(), MAX_ECHO_LEN);
            assert!(echo.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            assert!(!echo.contains('\''));
        }
    }
}
