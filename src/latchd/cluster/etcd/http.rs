//! The part of HTTP/1.1 that etcd's gateway uses.

use std::io::{self, BufRead, BufReader, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::latchd::cluster::first_of;
use crate::os::event::time_left;
use crate::os::stream::{is_timeout, Stream};

/// The maximum length in bytes of a line in a head, before a chunk or in the trailers.
const MAX_LINE_LEN: u64 = 8 * 1024;

/// The maximum length of an answer, in bytes. It is six times the length of a page of maximum-size
/// holders. A decoded answer takes about twelve times this memory.
const MAX_ANSWER_LEN: usize = 4 * 1024 * 1024;
/// The maximum number of lines in a head or in the trailers.
const MAX_LINES: usize = 100;

/// A connection to a member of etcd. It must not be used again after an error.
pub struct EtcdConnection {
    reader: Reader<Timed>,
    host: String,
}

impl EtcdConnection {
    /// Connects, and calls `secure` to add TLS if the member speaks it.
    pub fn open(
        host: &str,
        timeout: Duration,
        secure: impl Fn(TcpStream, Instant) -> io::Result<Stream>,
    ) -> io::Result<EtcdConnection> {
        let deadline = Instant::now() + timeout;
        let stream = first_of(host, deadline, |address| {
            let socket = TcpStream::connect_timeout(address, left(deadline)?)?;
            socket.set_nodelay(true)?;
            secure(socket, deadline)
        })?;
        Ok(EtcdConnection {
            reader: Reader(BufReader::new(Timed { stream, deadline })),
            host: host.to_owned(),
        })
    }

    /// Sends a request and reads the answer. Returns its status and its body.
    pub fn ask(
        &mut self,
        path: &str,
        body: &str,
        token: Option<&str>,
        deadline: Instant,
    ) -> io::Result<(u16, Vec<u8>)> {
        self.post(path, body, token, deadline)?;
        self.reader.answer()
    }

    /// Begins a watch, and passes each line of the answer to `is_enough` until that returns `true`
    /// or the watch ends.
    pub fn watch(
        &mut self,
        body: &str,
        token: Option<&str>,
        deadline: Instant,
        mut is_enough: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<()> {
        self.post("/v3/watch", body, token, deadline)?;
        let (status, len) = self.reader.head()?;
        if status != 200 || len.is_some() {
            let why = format!("status {status} for a watch");
            return Err(io::Error::other(why));
        }
        let mut lines = Vec::new();
        while self.reader.chunk(&mut lines)? {
            let mut whole = lines.split_inclusive(|byte| *byte == b'\n');
            let mut taken = 0;
            while let Some(line) = whole.next().filter(|line| line.ends_with(b"\n")) {
                if is_enough(line) {
                    return Ok(());
                }
                left(deadline)?;
                taken += line.len();
            }
            lines.drain(..taken);
        }
        Ok(())
    }

    fn post(
        &mut self,
        path: &str,
        body: &str,
        token: Option<&str>,
        deadline: Instant,
    ) -> io::Result<()> {
        let (host, len) = (&self.host, body.len());
        let mut request =
            format!("POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len}\r\n");
        if let Some(token) = token {
            request += &format!("Authorization: {token}\r\n");
        }
        request += "\r\n";
        request += body;
        let left = left(deadline)?;
        let timed = self.reader.0.get_mut();
        timed.deadline = deadline;
        let mut unsent = request.as_bytes();
        timed.stream.write_within(&mut unsent, Some(left))
    }
}

/// The time left until the deadline. Fails if the deadline has passed.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = time_left(deadline);
    if left.is_zero() {
        Err(io::ErrorKind::TimedOut.into())
    } else {
        Ok(left)
    }
}

/// A stream whose reads fail after a deadline.
struct Timed {
    stream: Stream,
    deadline: Instant,
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(left(self.deadline)?)?;
        let read = self.stream.read(buffer);
        read.map_err(|error| {
            if is_timeout(&error) {
                io::ErrorKind::TimedOut.into()
            } else {
                error
            }
        })
    }
}

struct Reader<S>(BufReader<S>);

impl<S: Read> Reader<S> {
    fn answer(&mut self) -> io::Result<(u16, Vec<u8>)> {
        let (status, len) = self.head()?;
        let mut body = Vec::new();
        match len {
            Some(len) => self.take(len, &mut body)?,
            None => while self.chunk(&mut body)? {},
        }
        Ok((status, body))
    }

    /// Reads the head. Returns the status and the length of the body; the length is `None` if the
    /// body comes in chunks.
    fn head(&mut self) -> io::Result<(u16, Option<usize>)> {
        let line = self.line()?;
        let status_and_reason = line.strip_prefix("HTTP/1.1 ").unwrap_or_default();
        let status = status_and_reason
            .get(..3)
            .and_then(|text| text.parse().ok());
        let status = status.ok_or_else(|| io::Error::other("no HTTP/1.1"))?;
        let mut len = Some(0);
        for _ in 0..MAX_LINES {
            let line = self.line()?;
            if line.is_empty() {
                return Ok((status, len));
            }
            let (name, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.trim();
            if name.eq_ignore_ascii_case("content-length") && len.is_some() {
                len = value.parse().ok().filter(|len| *len <= MAX_ANSWER_LEN);
                len.ok_or_else(|| io::Error::other("no possible length"))?;
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                if !value.eq_ignore_ascii_case("chunked") {
                    return Err(io::Error::other("an unknown encoding"));
                }
                len = None;
            }
        }
        Err(io::Error::other("too long a head"))
    }

    /// Adds a chunk to `body`. After the last chunk, reads the trailers and returns `false`.
    fn chunk(&mut self, body: &mut Vec<u8>) -> io::Result<bool> {
        let line = self.line()?;
        let len = line.split(';').next().unwrap_or_default().trim();
        let number = usize::from_str_radix(len, 16).ok();
        let fits = |number: &usize| {
            !len.starts_with('+') && number.saturating_add(body.len()) <= MAX_ANSWER_LEN
        };
        let len = number.filter(fits);
        let len = len.ok_or_else(|| io::Error::other("no possible length of a chunk"))?;
        if len > 0 {
            self.take(len, body)?;
            return if self.line()?.is_empty() {
                Ok(true)
            } else {
                Err(io::Error::other("too long a chunk"))
            };
        }
        for _ in 0..MAX_LINES {
            if self.line()?.is_empty() {
                return Ok(false);
            }
        }
        Err(io::Error::other("too many trailers"))
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        let mut limited = (&mut self.0).take(MAX_LINE_LEN);
        let len = limited.read_until(b'\n', &mut line)?;
        let Some(line) = line.strip_suffix(b"\n") else {
            return Err(match len as u64 {
                MAX_LINE_LEN => io::Error::other("too long a line"),
                _ => io::ErrorKind::UnexpectedEof.into(),
            });
        };
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        Ok(String::from_utf8_lossy(line).into_owned())
    }

    fn take(&mut self, len: usize, body: &mut Vec<u8>) -> io::Result<()> {
        if (&mut self.0).take(len as u64).read_to_end(body)? == len {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that arrive a few at a time.
    struct Script<'a>(&'a [u8], usize);

    impl Read for Script<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let len = self.1.min(buffer.len()).min(self.0.len());
            buffer[..len].copy_from_slice(&self.0[..len]);
            self.0 = &self.0[len..];
            Ok(len)
        }
    }

    fn reader(bytes: &[u8], at_once: usize) -> Reader<Script<'_>> {
        Reader(BufReader::new(Script(bytes, at_once)))
    }

    fn read(text: &str, at_once: usize) -> io::Result<(u16, Vec<u8>)> {
        reader(text.as_bytes(), at_once).answer()
    }

    #[test]
    fn answers_are_read_however_they_arrive() {
        let plain = "HTTP/1.1 200 OK\r\ncontent-LENGTH: 5\r\nX: y\r\n\r\nhello";
        let chunked = "HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n\
                       3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nGrpc-Status: 5\r\nGrpc-Message: z\r\n\r\n";
        for at_once in 1..100 {
            let read = |text| read(text, at_once).expect("an answer");
            assert_eq!(read(plain), (200, b"hello".to_vec()));
            assert_eq!(read(chunked), (400, b"hello".to_vec()));
        }
    }

    #[test]
    fn an_answer_behind_another_is_read_in_its_turn() {
        let refused = "HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n\
                       1\r\nx\r\n0\r\nGrpc-Status: 5\r\n\r\n";
        let two = format!("{refused}HTTP/1.1 200 OK\r\n\r\n");
        let mut reader = reader(two.as_bytes(), 7);
        assert_eq!(reader.answer().expect("the first").0, 400);
        assert_eq!(reader.answer().expect("the second"), (200, Vec::new()));
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let head = "HTTP/1.1 200 OK\r\n";
        let long = "x".repeat(2 * MAX_LINE_LEN as usize);
        for text in [
            "",
            "HTTP/1.0 200 OK\r\n\r\n",
            "HTTP/1.1 2x0 OK\r\n\r\n",
            "SSH-2.0-OpenSSH\r\n\r\n",
            &long,
            &format!("{head}{}", "X: y\r\n".repeat(MAX_LINES + 1)),
            &format!("{head}Content-Length: -1\r\n\r\n"),
            &format!("{head}Content-Length: 99999999999\r\n\r\n"),
            &format!("{head}Content-Length: 5\r\n\r\nhell"),
            &format!("{head}Transfer-Encoding: gzip\r\n\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n+1\r\nx\r\n0\r\n\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n\r\n0\r\n\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n1\r\nxx\r\n0\r\n\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n400001\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: y\r\n"),
        ] {
            assert!(read(text, 4096).is_err(), "{text:.80}");
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic_or_hang() {
        let seed = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
        let mut random: u32 = 1;
        for _ in 0..20_000 {
            let mut bytes = seed.to_vec();
            for _ in 0..3 {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let at = (random >> 8) as usize % bytes.len();
                bytes[at] = random as u8;
            }
            let _ = reader(&bytes, 16).answer();
        }
    }
}
