//! Parses a line of a request into a typed command. Pure: no I/O.

use super::uucp::names::pid_in;

/// The maximum length of a device path in bytes.
const MAX_DEVICE_LEN: usize = 255;

/// The first words of HTTP requests. A space follows each.
const HTTP_METHODS: [&[u8]; 10] = [
    b"GET", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS", b"CONNECT", b"TRACE", b"PATCH", b"PRI",
];
const HTTP_HOST: &[u8] = b"host:";

/// The first bytes of a TLS handshake: the type and the major version of a record.
const TLS_RECORD: &[u8] = &[0x16, 0x03];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    Lock(LockTarget<'a>),
    Unlock(LockTarget<'a>),
    Noop,
    Help,
    Stat,
    Quit,
}

/// The device and the process that a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockTarget<'a> {
    /// The path as the client sent it.
    pub device: &'a [u8],
    /// `None` if the client sent a number that no process can have.
    pub pid: Option<u32>,
}

/// Parses a line; `None` if it is not a command.
pub fn parse(line: &[u8]) -> Option<Command<'_>> {
    let mut words = line
        .split(|byte| is_blank(*byte))
        .filter(|word| !word.is_empty());
    let verb = words.next().filter(|verb| line.starts_with(verb))?;
    let arguments = [words.next(), words.next(), words.next()];
    let is = |name: &str| verb.eq_ignore_ascii_case(name.as_bytes());
    match arguments {
        [None, ..] if is("QUIT") => Some(Command::Quit),
        [None, ..] if is("NOOP") => Some(Command::Noop),
        [None, ..] if is("HELP") => Some(Command::Help),
        [None, ..] if is("STAT") => Some(Command::Stat),
        [Some(device), Some(pid), None] if is("LOCK") => {
            lock_target(device, pid).map(Command::Lock)
        }
        [Some(device), Some(pid), None] if is("UNLOCK") => {
            lock_target(device, pid).map(Command::Unlock)
        }
        _ => None,
    }
}

/// Whether a line belongs to HTTP or TLS. A web page can make a browser send one of our commands,
/// but never as the first line.
pub fn is_other_protocol(line: &[u8]) -> bool {
    let last_word = line.rsplit(|byte| is_blank(*byte)).next();
    let version = last_word.unwrap_or_default();
    let names_version = version.len() > 5 && version[..5].eq_ignore_ascii_case(b"HTTP/");
    let names_host =
        line.len() >= HTTP_HOST.len() && line[..HTTP_HOST.len()].eq_ignore_ascii_case(HTTP_HOST);
    let blank = line.iter().position(|byte| *byte == b' ');
    names_version
        || names_host
        || blank.is_some_and(|at| HTTP_METHODS.contains(&&line[..at]))
        || line.starts_with(TLS_RECORD)
}

fn lock_target<'a>(device: &'a [u8], pid: &[u8]) -> Option<LockTarget<'a>> {
    // The bytes 0xFE and 0xFF are telnet commands and never part of a path.
    let is_path = |byte: &u8| matches!(*byte, 0x21..=0x7E | 0x80..=0xFD);
    let is_device = device.len() <= MAX_DEVICE_LEN && device.iter().all(is_path);
    let pid = process_id(pid)?;
    is_device.then_some(LockTarget { device, pid })
}

/// Parses a decimal integer of any length. Returns `None` if the word is not an integer, and
/// `Some(None)` if no process can have this number.
fn process_id(word: &[u8]) -> Option<Option<u32>> {
    let (is_negative, digits) = match word {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| pid_in(digits).filter(|_| !is_negative))
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(device: &str, pid: u32) -> Option<Command<'_>> {
        Some(Command::Lock(LockTarget {
            device: device.as_bytes(),
            pid: Some(pid),
        }))
    }

    #[test]
    fn verbs_are_whole_words_in_any_case() {
        for line in ["lock /dev/x 7", "LOCK /dev/x 7", "LoCk\t/dev/x \t 7 \t"] {
            assert_eq!(parse(line.as_bytes()), lock("/dev/x", 7), "{line}");
        }
        assert!(matches!(
            parse(b"Unlock /dev/x 7"),
            Some(Command::Unlock(_))
        ));
        for (line, command) in [
            ("quit", Command::Quit),
            ("NOOP ", Command::Noop),
            ("Help\t", Command::Help),
            ("stat", Command::Stat),
        ] {
            assert_eq!(parse(line.as_bytes()), Some(command), "{line}");
        }
    }

    #[test]
    fn other_words_and_missing_and_superfluous_ones_are_refused() {
        for line in [
            "locks /dev/x 7",
            "loc /dev/x 7",
            "lock/dev/x 7",
            "quits",
            "qui",
            " quit",
            "\tlock /dev/x 7",
            "",
            " ",
            "lock",
            "lock ",
            "lock /dev/x",
            "lock /dev/x 7 8",
            "lock 7",
            "unlock 7",
            "quit now",
            "noop x",
            "help lock",
            "stat /dev/x",
        ] {
            assert_eq!(parse(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn any_decimal_integer_is_a_number_but_few_are_a_process() {
        for (word, pid) in [
            ("1", Some(1)),
            ("+17", Some(17)),
            ("000000000000000000000000017", Some(17)),
            ("2147483647", Some(2_147_483_647)),
            ("2147483648", None),
            ("4294967297", None),
            ("18446744073709551617", None),
            ("99999999999999999999999999999999", None),
            ("0", None),
            ("-0", None),
            ("-1", None),
        ] {
            assert_eq!(process_id(word.as_bytes()), Some(pid), "{word}");
        }
        for word in [
            "", "+", "-", "+-1", "1a", "0x10", "1.0", "1,0", "1e3", "\u{661}",
        ] {
            assert_eq!(process_id(word.as_bytes()), None, "{word}");
        }
    }

    #[test]
    fn a_device_has_neither_controls_nor_more_than_255_bytes() {
        let longest = format!("/dev/{}", "x".repeat(250));
        assert_eq!(
            parse(format!("lock {longest} 7").as_bytes()),
            lock(&longest, 7)
        );
        assert_eq!(parse(format!("lock {longest}x 7").as_bytes()), None);
        assert_eq!(parse("lock /dev/é 7".as_bytes()), lock("/dev/é", 7));
        for control in (0..=0x1F).chain([0x7F]).filter(|byte| *byte != b'\t') {
            let line = [b"lock /dev/x", &[control][..], b"y 7"].concat();
            assert_eq!(parse(&line), None, "{control:#x}");
        }
    }

    #[test]
    fn http_and_tls_are_recognised_and_told_from_commands() {
        for line in [
            "GET /",
            "POST / HTTP/1.1",
            "OPTIONS * HTTP/1.1",
            "PRI * HTTP/2.0",
            "BREW /pot http/1.0",
            "Host: localhost:50001",
            "\x16\x03\x01",
        ] {
            assert!(is_other_protocol(line.as_bytes()), "{line}");
        }
        for line in ["lock /dev/x 7", "get", "", "quit", "HTTP/", "stat", "host"] {
            assert!(!is_other_protocol(line.as_bytes()), "{line}");
        }
    }

    #[test]
    fn nothing_near_a_lock_is_mistaken_for_something_else() {
        let line = b"lock /dev/x 7";
        for at in 0..line.len() {
            for byte in 0..=255 {
                let mut near = line.to_vec();
                near[at] = byte;
                let parsed = parse(&near);
                assert!(
                    matches!(parsed, None | Some(Command::Lock(_))),
                    "{near:?}: {parsed:?}"
                );
                let _ = is_other_protocol(&near);
            }
        }
    }
}
