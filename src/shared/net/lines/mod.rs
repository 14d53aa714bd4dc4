//! Splits a byte stream into frames of lines. Memory is bounded, however the bytes arrive.

mod telnet;

use std::io::{self, Read};

use memchr::{memchr, memchr2};

use crate::os::memory::{self, Purpose};

use crate::os::stream::Stream;
use telnet::{Telnet, INTERRUPT};

/// The usual maximum length of the read buffer, in bytes. Further input stays in the kernel.
const BUFFER_LEN: usize = 4096;

/// The initial length of the read buffer, in bytes: enough for most peers.
const SMALL_BUFFER_LEN: usize = 512;

/// The maximum number of bytes kept of an overlong line.
const HEAD_LEN: usize = 64;

/// The length of the usual end of a line, CR and LF, in bytes.
const LINE_END_LEN: usize = 2;

type LineLimit = Box<dyn Fn(usize, &[u8]) -> usize>;

/// Splits a stream into frames of `N` lines each, and removes telnet commands.
///
/// A line ends with LF, and every CR before the LF is stripped. The buffer starts small, and
/// doubles when the peer fills it. It grows beyond 4096 bytes only for a line whose limit is
/// higher, and shrinks again after that line.
pub struct LineReader<const N: usize> {
    buffer: Vec<u8>,
    /// The start of the current frame.
    start: usize,
    /// The end of the buffered bytes.
    end: usize,
    /// The index up to which the buffer has been searched for line ends.
    scanned: usize,
    /// Where each line of the current frame starts, and where it ends without its line end.
    spans: [(usize, usize); N],
    line_count: usize,
    /// The start of the line that comes next.
    line_start: usize,
    /// Whether the current line exceeds its limit. If so, only its first bytes are kept, in `head`.
    is_overlong: bool,
    head: Vec<u8>,
    lines_seen: u32,
    limit: LineLimit,
    /// The lowest limit of any line. A line that is shorter than this needs no call of `limit`.
    lowest_limit: usize,
    telnet: Telnet,
    answers: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffered {
    /// A whole frame: see [`LineReader::frame`].
    Frame,
    /// The frame is not complete yet. The caller should read more.
    Incomplete,
    /// A line exceeds its limit, and has been read up to its LF. The reader no longer knows where
    /// the next frame begins.
    TooLong,
}

/// Why a read returned no bytes.
#[derive(Debug)]
pub enum ReadEnd {
    /// The peer has closed or half-closed its side.
    Eof,
    Timeout,
    /// The peer has sent a telnet subnegotiation longer than the limit.
    Telnet,
    Broken(io::Error),
}

impl<const N: usize> LineReader<N> {
    /// `limit` returns the maximum length of a line in bytes, not counting the LF. Its arguments
    /// are the line's index in the frame and the first line of the frame (empty for line 0 itself).
    /// No line may have a lower limit than line 0.
    pub fn new(limit: impl Fn(usize, &[u8]) -> usize + 'static) -> Self {
        LineReader {
            buffer: vec![0; SMALL_BUFFER_LEN],
            start: 0,
            end: 0,
            scanned: 0,
            spans: [(0, 0); N],
            line_count: 0,
            line_start: 0,
            is_overlong: false,
            head: Vec::new(),
            lines_seen: 0,
            lowest_limit: limit(0, b""),
            limit: Box::new(limit),
            telnet: Telnet::default(),
            answers: Vec::new(),
        }
    }

    /// Looks for a whole frame in the buffer.
    pub fn look(&mut self) -> Buffered {
        self.look_for(N)
    }

    /// Looks only for the first line of a frame. On [`Buffered::Frame`], [`LineReader::first_line`]
    /// returns it.
    pub fn look_for_first_line(&mut self) -> Buffered {
        self.look_for(1)
    }

    /// Looks for the first `line_count` lines of the frame. [`Buffered::Frame`] means that they are
    /// complete.
    fn look_for(&mut self, line_count: usize) -> Buffered {
        while self.line_count < line_count {
            if self.scanned == self.end {
                return Buffered::Incomplete;
            }
            let line_start = self.line_start;
            let Some(offset) = self.offset_of_end() else {
                self.scanned = self.end;
                if self.exceeds_limit(self.end - line_start) {
                    self.save_head(line_start);
                }
                if self.is_overlong {
                    self.end = line_start;
                    self.scanned = line_start;
                }
                return Buffered::Incomplete;
            };
            let at = self.scanned + offset;
            self.scanned = at + 1;
            self.lines_seen = self.lines_seen.wrapping_add(1);
            if self.buffer[at] == INTERRUPT {
                // The frame begins again after the interrupt. After `Incomplete`, the caller looks
                // at the new first line.
                self.next_frame_at(at + 1);
                return Buffered::Incomplete;
            } else if self.is_overlong || self.exceeds_limit(at - line_start) {
                self.save_head(line_start);
                return Buffered::TooLong;
            }
            let line = strip_cr(&self.buffer[line_start..at]);
            self.spans[self.line_count] = (line_start, line_start + line.len());
            self.line_count += 1;
            self.line_start = at + 1;
        }
        Buffered::Frame
    }

    /// The offset from `scanned` of the LF or the interrupt that ends the current line.
    ///
    /// An interrupt within the connection's first line does not count. The beginning of that line
    /// must not be dropped, because it shows whether the peer speaks another protocol. A third
    /// party may have chosen the bytes that such a peer sends next. For example, a TLS client sends
    /// a session ID that a server has chosen.
    fn offset_of_end(&self) -> Option<usize> {
        let unseen = &self.buffer[self.scanned..self.end];
        let offset = memchr2(b'\n', INTERRUPT, unseen)?;
        let has_begun = || self.is_overlong || self.scanned + offset > self.line_start;
        if self.lines_seen == 0 && has_begun() {
            memchr(b'\n', unseen)
        } else {
            Some(offset)
        }
    }

    /// The lines of the frame that [`LineReader::look`] has found.
    pub fn frame(&self) -> [&[u8]; N] {
        debug_assert_eq!(self.line_count, N);
        self.spans.map(|(start, end)| &self.buffer[start..end])
    }

    /// The lines of the frame as text; `None` if a line is not valid UTF-8.
    pub fn text(&self) -> Option<[&str; N]> {
        debug_assert_eq!(self.line_count, N);
        // A line end is a character of its own, so the frame is valid if and only if each line is.
        let frame = &self.buffer[self.start..self.line_start];
        let frame = std::str::from_utf8(frame).ok()?;
        let line = |(start, end)| &frame[start - self.start..end - self.start];
        Some(self.spans.map(line))
    }

    /// The first bytes of a line that exceeds its limit.
    pub fn overlong_head(&self) -> &[u8] {
        &self.head
    }

    /// The received bytes of an incomplete frame, or the first bytes of an overlong line.
    pub fn incomplete(&self) -> &[u8] {
        if self.is_overlong {
            &self.head
        } else {
            &self.buffer[self.start..self.end]
        }
    }

    /// The first line of the current frame, once it is complete.
    pub fn first_line(&self) -> Option<&[u8]> {
        let (start, end) = self.spans[0];
        (self.line_count > 0).then(|| &self.buffer[start..end])
    }

    /// Drops the first line, which must be complete, from the current frame.
    pub fn skip_first_line(&mut self) {
        self.spans.rotate_left(1);
        self.line_count -= 1;
        self.start = match self.line_count {
            0 => self.line_start,
            _ => self.spans[0].0,
        };
    }

    /// Skips the frame or the overlong line that [`LineReader::look`] has found.
    pub fn advance(&mut self) {
        self.next_frame_at(self.scanned);
        if self.start == self.end {
            if self.buffer.len() > BUFFER_LEN {
                self.buffer.truncate(BUFFER_LEN);
                self.buffer.shrink_to_fit();
            }
            self.next_frame_at(0);
            self.end = 0;
        }
    }

    /// Blocks until the peer sends something, or until the socket's read timeout. Returns at once
    /// if the buffer has bytes after an interrupt that have not been looked at.
    #[inline(always)] // into the session's loop, which says why
    pub fn read(&mut self, mut stream: impl Read) -> Result<(), ReadEnd> {
        if self.scanned < self.end {
            return Ok(());
        }
        // The caller has already handled the complete lines that arrived before the endless
        // command.
        if self.telnet.is_endless() {
            return Err(ReadEnd::Telnet);
        }
        self.make_room()?;
        let from = self.chunk_start();
        let len = loop {
            match stream.read(&mut self.buffer[from..]) {
                Ok(0) => return Err(ReadEnd::Eof),
                Ok(len) => break len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if crate::os::stream::is_timeout(&error) => {
                    return Err(ReadEnd::Timeout)
                }
                Err(error) => return Err(ReadEnd::Broken(error)),
            }
        };
        self.filter_chunk(len);
        Ok(())
    }

    /// Puts bytes that have been read from the peer into the buffer, which must be empty.
    pub fn put_back(&mut self, bytes: &[u8]) {
        let from = self.chunk_start();
        let end = from + bytes.len();
        if end > self.buffer.len() {
            self.buffer.resize(end.next_power_of_two(), 0);
        }
        self.buffer[from..end].copy_from_slice(bytes);
        self.filter_chunk(bytes.len());
    }

    /// Reads the bytes that have arrived, as far as the buffer has room, without blocking. Does not
    /// report the end of the stream; the next [`LineReader::read`] does.
    pub fn read_ready(&mut self, stream: &Stream) {
        self.compact();
        let from = self.chunk_start();
        if from >= self.buffer.len() {
            return;
        }
        let len = stream.read_ready(&mut self.buffer[from..]).unwrap_or(0);
        self.filter_chunk(len);
    }

    /// Moves the replies to telnet commands to the end of `out`.
    pub fn take_answers(&mut self, out: &mut Vec<u8>) {
        if !self.answers.is_empty() {
            out.append(&mut self.answers);
        }
    }

    /// Makes the next line the first one of the connection: the lines so far came from a server
    /// that passes on what a client sends.
    pub fn begin_connection(&mut self) {
        self.lines_seen = 0;
    }

    /// A number for the line that is being received, different from that of the previous line;
    /// `None` between frames.
    pub fn line_in_progress(&self) -> Option<u32> {
        let between_frames = self.start == self.end && !self.is_overlong;
        (!between_frames).then_some(self.lines_seen)
    }

    /// Whether the current frame begins with `byte`. Must be called before looking for its lines.
    pub fn begins_with(&self, byte: u8) -> bool {
        !self.is_overlong && self.start < self.end && self.buffer[self.start] == byte
    }

    /// The index in the buffer at which the next chunk is read.
    fn chunk_start(&self) -> usize {
        self.end + self.telnet.room_len()
    }

    fn filter_chunk(&mut self, len: usize) {
        let end = self.chunk_start() + len;
        let chunk = &mut self.buffer[self.end..end];
        self.end += self.telnet.filter(chunk, &mut self.answers);
    }

    fn make_room(&mut self) -> Result<(), ReadEnd> {
        self.compact();
        if self.chunk_start() >= self.buffer.len() {
            let longest = self.line_start + self.line_limit() + LINE_END_LEN;
            let len = match 2 * self.buffer.len() {
                double if double <= BUFFER_LEN => double,
                // Only a line with a raised limit, or one with many CRs, can fill a buffer of the
                // usual maximum length.
                double => double.min(longest.max(self.buffer.len() + LINE_END_LEN)),
            };
            let Some(_reservation) = memory::reserve(len, Purpose::Service) else {
                return Err(ReadEnd::Broken(io::ErrorKind::OutOfMemory.into()));
            };
            self.buffer.resize(len, 0);
        }
        Ok(())
    }

    fn compact(&mut self) {
        if self.start == 0 {
            return;
        }
        self.buffer.copy_within(self.start..self.end, 0);
        for (start, end) in &mut self.spans[..self.line_count] {
            *start -= self.start;
            *end -= self.start;
        }
        self.line_start -= self.start;
        self.scanned -= self.start;
        self.end -= self.start;
        self.start = 0;
    }

    fn next_frame_at(&mut self, start: usize) {
        self.start = start;
        self.scanned = start;
        self.line_start = start;
        self.line_count = 0;
        self.is_overlong = false;
    }

    fn save_head(&mut self, line_start: usize) {
        if !self.is_overlong {
            self.is_overlong = true;
            let end = self.end.min(line_start + HEAD_LEN);
            self.head.clear();
            self.head.extend_from_slice(&self.buffer[line_start..end]);
        }
    }

    /// Whether `len` bytes exceed the limit of the current line.
    fn exceeds_limit(&self, len: usize) -> bool {
        len > self.lowest_limit && len > self.line_limit()
    }

    fn line_limit(&self) -> usize {
        (self.limit)(self.line_count, self.first_line().unwrap_or_default())
    }
}

fn strip_cr(mut line: &[u8]) -> &[u8] {
    while let [rest @ .., b'\r'] = line {
        line = rest;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::stream::Socket;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    fn limit(index: usize, first: &[u8]) -> usize {
        if index == 2 && first == b"auth" {
            10_000
        } else {
            8
        }
    }

    /// Reads `input` in chunks of `size` and returns the frames, and whether a line was too long.
    fn read(mut input: &[u8], size: usize) -> (Vec<[String; 3]>, bool) {
        let mut reader = LineReader::<3>::new(limit);
        let mut frames = Vec::new();
        loop {
            match reader.look() {
                Buffered::Frame => {
                    let frame = reader.frame();
                    frames.push(frame.map(|line| String::from_utf8_lossy(line).into_owned()));
                    reader.advance();
                }
                Buffered::TooLong => return (frames, true),
                Buffered::Incomplete => match reader.read(Read::take(&mut input, size as u64)) {
                    Ok(()) => {}
                    Err(ReadEnd::Eof) => return (frames, false),
                    Err(end) => panic!("{end:?}"),
                },
            }
        }
    }

    fn check(input: &[u8], frames: &[[&str; 3]], too_long: bool) {
        for size in 1..=input.len().min(4096) {
            let (found, found_too_long) = read(input, size);
            assert_eq!(found, frames, "in chunks of {size}");
            assert_eq!(found_too_long, too_long, "in chunks of {size}");
            if input.len() > 2000 && size > 3 && size < 4000 {
                // Long inputs are split at a few places only.
                break;
            }
        }
    }

    #[test]
    fn chunking_never_changes_meaning() {
        check(
            b"a\nb\nc\nd\r\ne\r\r\n\nrest\n",
            &[["a", "b", "c"], ["d", "e", ""]],
            false,
        );
    }

    #[test]
    fn a_frame_is_text_if_each_of_its_lines_is() {
        for (input, text) in [
            (&b"l\r\n\xd0\xba\n\r\n"[..], Some(["l", "\u{43a}", ""])),
            (b"\xfe\nk\n1\n", None),
            (b"ping\n\xfe\n\n", None),
            (b"l\nk\n\xfe\n", None),
            (b"l\n\xd0\n\xba\n", None),
        ] {
            // The frame before it is none of its business.
            let mut input = &[b"\xfe\n\n\n", input].concat()[..];
            let mut reader = LineReader::<3>::new(limit);
            assert!(reader.read(&mut input).is_ok());
            assert_eq!(reader.look(), Buffered::Frame);
            assert_eq!(reader.text(), None);
            reader.advance();
            assert_eq!(reader.look(), Buffered::Frame);
            assert_eq!(reader.text(), text);
        }
    }

    #[test]
    fn a_line_ends_also_after_half_a_telnet_command() {
        check(
            b"a\xff\n\xff\r\n\xff\xf1b\xff\xff\nc\nd\ne\n",
            &[["a\u{fffd}", "\u{fffd}", "b\u{fffd}"], ["c", "d", "e"]],
            false,
        );
    }

    #[test]
    fn bytes_that_are_put_back_come_before_those_that_are_read() {
        let input = [&b"a\xff"[..], &[b'x'; 600], b"\nb\xff\xfb\x01\nc\xff\nd\n"].concat();
        for at in 0..=input.len() {
            let mut reader = LineReader::<3>::new(|_, _| 1000);
            let (first, mut rest) = input.split_at(at);
            reader.put_back(first);
            while reader.look() == Buffered::Incomplete {
                reader.read(&mut rest).expect("there is more");
            }
            let [one, two, three] = reader.frame();
            assert_eq!(
                (one.len(), two, three),
                (602, &b"b"[..], &b"c\xfe"[..]),
                "{at}"
            );
            let mut answers = Vec::new();
            reader.take_answers(&mut answers);
            assert_eq!(answers, b"\xff\xfe\x01", "{at}");
        }
    }

    #[test]
    fn lines_before_an_endless_subnegotiation_count() {
        let input = [&b"l\nk\n10\n\xff\xfa"[..], &[7; 300], b"x\n"].concat();
        for size in 1..=input.len() {
            let mut reader = LineReader::<3>::new(limit);
            let mut chunks = input.chunks(size);
            while reader.look() == Buffered::Incomplete {
                let read = reader.read(chunks.next().unwrap_or_default());
                assert!(read.is_ok(), "{size}: {read:?}");
            }
            let end = loop {
                if let Err(end) = reader.read(chunks.next().unwrap_or_default()) {
                    break end;
                }
            };
            assert!(matches!(end, ReadEnd::Telnet), "{size}: {end:?}");
            assert_eq!(reader.frame(), [&b"l"[..], b"k", b"10"]);
        }
    }

    #[test]
    fn the_limit_counts_cr_and_not_lf() {
        check(
            b"12345678\n1234567\r\n\n",
            &[["12345678", "1234567", ""]],
            false,
        );
        check(b"a\n12345678\r\nc\n", &[], true);
        check(b"a\nb\nc\n123456789\nb\nc\n", &[["a", "b", "c"]], true);
    }

    #[test]
    fn an_overlong_line_is_swallowed_in_constant_memory() {
        let (mut peer, ours) = UnixStream::pair().expect("a socket pair");
        let ours = Stream::new(Socket::Unix(ours));
        let mut reader = LineReader::<3>::new(limit);
        for _ in 0..1000 {
            peer.write_all(&[b'x'; 512]).expect("write");
            reader.read(&ours).expect("read");
            assert_eq!(reader.look(), Buffered::Incomplete);
            assert!(reader.line_in_progress().is_some());
        }
        assert!(reader.buffer.len() <= BUFFER_LEN);
        peer.write_all(b"\n").expect("write");
        reader.read(&ours).expect("read");
        assert_eq!(reader.look(), Buffered::TooLong);
    }

    #[test]
    fn an_overlong_line_can_be_skipped_and_its_head_is_known() {
        let input = [&[b'x'; 9000][..], b"\nnext\n123456789\nlast\n"].concat();
        for size in [1, 7, 64, 65, 4096, input.len()] {
            let mut source = input.chunks(size).flatten().copied().collect::<Vec<u8>>();
            let mut reader = LineReader::<1>::new(limit);
            let mut found = Vec::new();
            while !source.is_empty() {
                let len = size.min(source.len());
                let chunk: Vec<u8> = source.drain(..len).collect();
                let mut chunk = &chunk[..];
                while !chunk.is_empty() {
                    reader.read(&mut chunk).expect("read");
                    loop {
                        match reader.look() {
                            Buffered::Frame => {
                                found.push((false, reader.frame()[0].to_vec()));
                                reader.advance();
                            }
                            Buffered::TooLong => {
                                found.push((true, reader.overlong_head().to_vec()));
                                reader.advance();
                            }
                            Buffered::Incomplete => break,
                        }
                    }
                }
            }
            let heads: Vec<(bool, usize)> = found
                .iter()
                .map(|(long, line)| (*long, line.len()))
                .collect();
            assert_eq!(heads[1], (false, 4), "in chunks of {size}");
            assert_eq!(heads[3], (false, 4), "in chunks of {size}");
            assert!(heads[0].0 && heads[2].0 && heads[2].1 >= 9, "{heads:?}");
            assert!((9..=HEAD_LEN).contains(&heads[0].1), "{heads:?}");
        }
    }

    #[test]
    fn a_longer_line_grows_the_buffer_for_its_time_only() {
        let token = "t".repeat(10_000);
        let input = format!("auth\r\n_\n{token}\na\nb\nc\n");
        check(
            input.as_bytes(),
            &[["auth", "_", &token], ["a", "b", "c"]],
            false,
        );
        check(format!("auth\n_\n{token}t\n").as_bytes(), &[], true);
        check(format!("auth\n{token}\n_\n").as_bytes(), &[], true);

        let (mut peer, ours) = UnixStream::pair().expect("a socket pair");
        let ours = Stream::new(Socket::Unix(ours));
        let mut reader = LineReader::<3>::new(limit);
        peer.write_all(format!("auth\n_\n{token}\n").as_bytes())
            .expect("write");
        while reader.look() == Buffered::Incomplete {
            reader.read(&ours).expect("read");
        }
        assert!(reader.buffer.capacity() > token.len());
        reader.advance();
        assert!(reader.buffer.capacity() <= BUFFER_LEN);
    }

    #[test]
    fn an_interrupt_drops_the_half_typed_frame_and_nothing_else() {
        check(
            b"a\nb\nc\nx\ny\xff\xf4d\ne\nf\n",
            &[["a", "b", "c"], ["d", "e", "f"]],
            false,
        );
        check(b"\xff\xf4a\nb\nc\n\xff\xf4", &[["a", "b", "c"]], false);
        check(
            b"\xff\xf4far too long a line\xff\xf4a\nb\nc\n",
            &[["a", "b", "c"]],
            false,
        );
    }

    #[test]
    fn no_interrupt_drops_a_part_of_the_first_line() {
        check(
            b"a\xff\xf4b\xff\xf4\nc\xff\xf4d\ne\nf\n",
            &[["d", "e", "f"]],
            false,
        );
        check(
            b"a\xff\xf4b\xff\xf4\nc\nd\n",
            &[["a\u{fffd}b\u{fffd}", "c", "d"]],
            false,
        );
        check(b"far too long a line\xff\xf4a\nb\nc\n", &[], true);
    }

    #[test]
    fn each_line_is_told_from_the_next_and_from_none() {
        let (mut peer, ours) = UnixStream::pair().expect("a socket pair");
        let ours = Stream::new(Socket::Unix(ours));
        let mut reader = LineReader::<3>::new(limit);
        let mut lines = vec![reader.line_in_progress()];
        for piece in ["a", "b", "\nc", "\n", "d\ne\nf\n"] {
            peer.write_all(piece.as_bytes()).expect("write");
            reader.read(&ours).expect("read");
            if reader.look() == Buffered::Frame {
                reader.advance();
                assert_eq!(reader.look(), Buffered::Incomplete);
            }
            lines.push(reader.line_in_progress());
        }
        assert_eq!(lines, [None, Some(0), Some(0), Some(1), Some(2), Some(5)]);
    }
}
