//! Fuzz targets for what a peer may send.

use std::io::Read;

use crate::lfpd::command::{self, Command};
use crate::shared::net::lines::{Buffered, LineReader, ReadEnd};
use crate::wire::abilities::Abilities;
use crate::wire::reply::{self, Reply};
use crate::wire::request::{self, FirstWord, Frame};

/// Any three lines are a request or an error. A written request is read back unchanged.
pub fn request(input: &[u8]) {
    // If a secret or a tag ends in CR, it is not read back unchanged: the CR is taken for a part of
    // the line end.
    let mut lines = input.split(|byte| *byte == b'\n').map(without_crs);
    let frame: Frame<'_> = std::array::from_fn(|_| lines.next().unwrap_or_default());
    FirstWord::parse(frame[0]);
    let [Ok(command), Ok(key), Ok(argument)] = frame.map(std::str::from_utf8) else {
        return;
    };
    let request = match request::parse([command, key, argument]) {
        Ok(request) => request,
        Err(error) => return assert!(!error.describe().1.contains(' ')),
    };
    let mut written = Vec::new();
    request.write(&mut written);
    let written = String::from_utf8(written).expect("text");
    let lines: Vec<&str> = written
        .strip_suffix('\n')
        .expect("a line")
        .split('\n')
        .collect();
    let frame = lines.try_into().expect("three lines");
    assert_eq!(request::parse(frame), Ok(request));
}

fn without_crs(line: &[u8]) -> &[u8] {
    let end = line.iter().rposition(|byte| *byte != b'\r');
    &line[..end.map_or(0, |last| last + 1)]
}

/// A written reply is read back unchanged.
pub fn reply(input: &[u8]) {
    let Ok(line) = std::str::from_utf8(input) else {
        return;
    };
    // The reader accepts unknown ability words, but the writer does not write them.
    let is_lossy = |read: &Reply| matches!(read, Reply::Hello(Abilities::NONE, _));
    if let Some(read) = reply::parse(line).filter(|read| !is_lossy(read)) {
        let mut written = Vec::new();
        read.write(&mut written);
        let written = String::from_utf8(written).expect("text");
        let line = written.strip_suffix('\n').expect("a line");
        assert_eq!(reply::parse(line), Some(read));
    }
}

/// The size of the pieces in which a stream arrives does not change the lines or the telnet
/// answers.
pub fn lines(input: &[u8]) {
    let Some((size, stream)) = input.split_first() else {
        return;
    };
    let whole = Heard::of(stream, u64::MAX);
    assert!(whole.answers.len() <= stream.len());
    assert_eq!(Heard::of(stream, 1), whole);
    assert_eq!(Heard::of(stream, 1 + u64::from(*size)), whole);
}

/// Everything that a reader of lines gets from a stream.
#[derive(Debug, Default, PartialEq, Eq)]
struct Heard {
    frames: Vec<[Vec<u8>; 3]>,
    answers: Vec<u8>,
    end: &'static str,
}

impl Heard {
    /// Reads a stream that arrives in pieces of at most `size` bytes.
    fn of(stream: &[u8], size: u64) -> Heard {
        let mut reader = LineReader::new(|index, command| request::line_limit(24, index, command));
        let mut found = Heard::default();
        let mut rest = stream;
        found.end = loop {
            match reader.look() {
                Buffered::Frame => {
                    found.frames.push(reader.frame().map(<[u8]>::to_vec));
                    reader.advance();
                }
                Buffered::TooLong => break "too long",
                Buffered::Incomplete => match reader.read(Read::take(&mut rest, size)) {
                    Ok(()) => {}
                    Err(ReadEnd::Eof) => break "end of file",
                    Err(ReadEnd::Telnet) => break "telnet",
                    Err(ReadEnd::Timeout | ReadEnd::Broken(_)) => unreachable!("from memory"),
                },
            }
        };
        // If the stream is not read to its end, the number of answers depends on the size of the
        // pieces.
        if found.end == "end of file" {
            reader.take_answers(&mut found.answers);
        }
        found
    }
}

/// Whether a line is a command depends only on its words, not on the spaces between them.
pub fn lfp_command(input: &[u8]) {
    let line = input.split(|byte| *byte == b'\n').next();
    let line = line.unwrap_or_default();
    command::is_other_protocol(line);
    let Some(read) = command::parse(line) else {
        return;
    };
    let (verb, target) = match read {
        Command::Lock(target) => ("lock", Some(target)),
        Command::Unlock(target) => ("UNLOCK", Some(target)),
        Command::Noop => ("noop", None),
        Command::Help => ("HELP", None),
        Command::Stat => ("Stat", None),
        Command::Quit => ("quit", None),
    };
    let mut written = verb.as_bytes().to_vec();
    if let Some(target) = target {
        assert!(target.device.len() <= 255 && !target.device.is_empty());
        let pid = target.pid.map_or(-1, i64::from);
        assert!(pid != 0 && pid <= i64::from(i32::MAX));
        written.push(b'\t');
        written.extend(target.device);
        written.extend(format!("  {pid} ").bytes());
    }
    assert_eq!(command::parse(&written), Some(read));
}
