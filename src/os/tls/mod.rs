//! TLS over a TCP socket, for both sides of a connection.
//!
//! A server's handshake is part of its first read: it happens on the session's thread, within the
//! timeout of that read. The server cannot write before that.
//!
//! Only the session's thread reads and writes. Other threads may only shut the socket down, or ask
//! how many encrypted bytes the kernel has received.
//!
//! A build without TLS uses `absent.rs` instead: the same API, with uninhabited types.

pub mod certificate;
mod trust;

use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{recv, RecvFlags};
pub use rustls::pki_types::ServerName;
use rustls::version::{TLS12, TLS13};
use rustls::{Connection, IoState, ServerConfig, ServerConnection, SupportedProtocolVersion};

use super::write::write_within;
use crate::os::event::{time_left, wait_for};
use crate::os::memory::{self, Purpose};
pub use certificate::Certificate;
pub use trust::{server_name, server_of, system_file, trusting, Trust};

/// Checks an option that needs TLS. Accepts it, because this build has TLS.
pub fn need(_: &str) -> Result<(), String> {
    Ok(())
}

/// The versions of TLS that both sides speak.
const VERSIONS: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];

/// The maximum number of plaintext bytes to encrypt at a time: the length of one record.
const PIECE_LEN: usize = 16 * 1024;

/// The capacity of the output buffer between writes, in bytes.
const KEPT_ROOM: usize = 512;

/// The first bytes of a handshake record and of an alert record.
const HANDSHAKE: u8 = 22;
const ALERT: u8 = 21;

/// The maximum number of bytes that a client may send without completing a handshake or a record
/// with plaintext. A handshake is usually about 2000 bytes long.
const MAX_PENDING_LEN: usize = 20 * 1024;

/// The maximum length, in bytes, of pending input that is processed for several clients at once.
/// Longer input is processed for one client at a time, because a handshake message takes a multiple
/// of its length in memory. A client can also send such a message after the handshake.
const USUAL_PENDING_LEN: usize = 4096;
static LONG_PENDING: Mutex<()> = Mutex::new(());

/// The memory that a handshake takes, in bytes, and the memory that each byte of its messages adds.
/// rustls allocates a block for each name in a message, and a name can be two bytes long.
const HANDSHAKE_LEN: usize = 64 * 1024;
const PER_HANDSHAKE_BYTE: usize = 40;

pub struct TlsStream {
    socket: TcpStream,
    state: Mutex<TlsState>,
}

struct TlsState {
    stage: Stage,
    /// The maximum time of a whole read.
    read_timeout: Duration,
    /// Encrypted output that has not been written.
    output: Vec<u8>,
    /// The error of a failed write. It may have sent part of a record, so no further write can
    /// follow it. The kernel reports the error to no read, so a read that meets the end of the
    /// stream fails with it, too.
    write_error: Option<io::Error>,
    /// What was read from the socket before the first read here.
    unread: Vec<u8>,
    /// The first byte that the peer has sent.
    first_byte: Option<u8>,
    /// The number of bytes received since the beginning, since the end of the handshake or since
    /// the previous plaintext, whichever was latest.
    pending_len: usize,
}

enum Stage {
    /// A server's side before its first read.
    New(Arc<ServerConfig>),
    Open(Box<Connection>),
    /// The peer has broken the protocol, or speaks another one.
    Over,
}

/// How long a read may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocking {
    Never,
    /// For the first piece, until the socket's own timeout; for further pieces, until the instant.
    SocketTimeout(Option<Instant>),
    Until(Option<Instant>),
}

impl TlsStream {
    fn new(socket: TcpStream, stage: Stage) -> TlsStream {
        let state = TlsState {
            stage,
            read_timeout: Duration::MAX,
            output: Vec::new(),
            write_error: None,
            unread: Vec::new(),
            first_byte: None,
            pending_len: 0,
        };
        TlsStream {
            socket,
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, TlsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Sets the maximum time of a whole read. The socket must have the same timeout.
    pub fn set_read_timeout(&self, timeout: Duration) {
        self.state().read_timeout = timeout;
    }

    /// Takes bytes that have been read from the socket as the first ones of the peer. Call this
    /// before the first read.
    pub fn put_back(&self, bytes: Vec<u8>) {
        self.state().unread = bytes;
    }

    /// Reads plaintext that has arrived, or blocks until plaintext arrives. Returns 0 at the end of
    /// the stream, even without a close_notify: the caller recognizes a truncated message by its
    /// missing line end.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut state = self.state();
        let deadline = Instant::now().checked_add(state.read_timeout);
        state.read(&self.socket, buffer, Blocking::SocketTimeout(deadline))
    }

    /// Reads plaintext that has arrived, without blocking.
    pub fn read_ready(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut state = self.state();
        state.read(&self.socket, buffer, Blocking::Never)
    }

    /// Writes all of `bytes` within `timeout` (`None`: no limit). Afterwards, `bytes` are those
    /// that the peer cannot read. After a failed write, all further writes fail.
    pub fn write_within(&self, bytes: &mut &[u8], timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.state();
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(bytes.len().min(PIECE_LEN));
            let connection = state.shaken().ok_or(io::ErrorKind::NotConnected)?;
            connection.writer().write_all(piece)?;
            state.flush(&self.socket, deadline)?;
            *bytes = rest;
        }
        Ok(())
    }

    /// Shuts down one or both directions. Before the sending direction, sends a close_notify if the
    /// socket takes it at once.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        // If another thread is reading or writing, that thread holds the mutex, and finds the
        // socket shut down.
        if let (Shutdown::Write | Shutdown::Both, Ok(mut state)) = (how, self.state.try_lock()) {
            state.send_close_notify(&self.socket);
        }
        self.socket.shutdown(how)
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        self.state().send_close_notify(&self.socket);
    }
}

impl TlsState {
    fn shake_hands(&mut self, socket: &TcpStream, deadline: Instant) -> io::Result<()> {
        self.flush(socket, Some(deadline))?;
        while self.shaken().is_none() {
            if self.receive(socket, Blocking::Until(Some(deadline)))? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// The connection, if the handshake is complete.
    fn shaken(&mut self) -> Option<&mut Connection> {
        match &mut self.stage {
            Stage::Open(connection) if !connection.is_handshaking() => Some(connection),
            _ => None,
        }
    }

    fn read(
        &mut self,
        socket: &TcpStream,
        buffer: &mut [u8],
        mut blocking: Blocking,
    ) -> io::Result<usize> {
        if let Stage::New(config) = &self.stage {
            let connection = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
            self.stage = Stage::Open(Box::new(connection.into()));
        }
        loop {
            let Stage::Open(connection) = &mut self.stage else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            // Bytes that are already decrypted are returned first, because the peer may send no
            // more.
            match connection.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Ok(0) => break,
                read => return read,
            }
            if self.receive(socket, blocking)? == 0 {
                break;
            }
            if let Blocking::SocketTimeout(deadline) = blocking {
                blocking = Blocking::Until(deadline);
            }
        }
        self.write_error.as_ref().map_or(Ok(0), |it| Err(again(it)))
    }

    /// Receives one piece of the encrypted stream, and sends the output that rustls produces in
    /// response. Returns the length of the piece; 0 at the end of the stream.
    fn receive(&mut self, socket: &TcpStream, blocking: Blocking) -> io::Result<usize> {
        let Stage::Open(connection) = &mut self.stage else {
            return Ok(0);
        };
        let is_server = matches!(**connection, Connection::Server(_));
        let is_new = is_server && connection.is_handshaking();
        let blocks = match blocking {
            _ if !self.unread.is_empty() => false,
            // The usual read takes one system call, which blocks.
            Blocking::SocketTimeout(_) if !is_new => true,
            Blocking::SocketTimeout(deadline) | Blocking::Until(deadline) => {
                wait_for_input(socket.as_fd(), deadline)?;
                false
            }
            Blocking::Never => false,
        };
        let room = |len| memory::reserve(len, Purpose::Newcomer).ok_or(io::ErrorKind::OutOfMemory);
        let reserved = is_new.then(|| room(HANDSHAKE_LEN)).transpose()?;
        let mut incoming = Incoming {
            socket,
            blocks,
            unread: &mut self.unread,
            first_byte: &mut self.first_byte,
        };
        let len = connection.read_tls(&mut incoming)?;
        if len > 0 && !matches!(self.first_byte, Some(HANDSHAKE | ALERT)) {
            // No alert is sent: one alert code is a line feed, so a client of the plain protocol
            // would take it for a reply.
            return Err(self.fail("the peer does not speak TLS"));
        }
        self.pending_len += len;
        if is_server && self.pending_len > MAX_PENDING_LEN {
            return Err(self.fail("the handshake is too long"));
        }
        let is_long = is_server && self.pending_len > USUAL_PENDING_LEN;
        let turn = is_long.then(|| LONG_PENDING.lock());
        let wanted = PER_HANDSHAKE_BYTE * self.pending_len;
        let handshake = is_new.then(|| room(wanted)).transpose()?;
        let processed = connection.process_new_packets();
        // Released now, because sending the answer may take long.
        drop((reserved, handshake, turn));
        let has_ended = is_new && !connection.is_handshaking();
        let plain_len = processed.as_ref().map(IoState::plaintext_bytes_to_read);
        if has_ended || plain_len != Ok(0) {
            self.pending_len = 0;
        }
        let deadline = match (&processed, blocking) {
            (Ok(_), Blocking::SocketTimeout(deadline) | Blocking::Until(deadline)) => deadline,
            _ => Some(Instant::now()),
        };
        // If this fails, a later read fails, on this side or at the peer.
        let _ = self.flush(socket, deadline);
        processed.map(|_| len).map_err(|error| self.fail(error))
    }

    fn fail(&mut self, why: impl Into<Box<dyn Error + Send + Sync>>) -> io::Error {
        self.stage = Stage::Over;
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Writes the pending output, which must be done by `deadline`.
    fn flush(&mut self, socket: &TcpStream, deadline: Option<Instant>) -> io::Result<()> {
        let Stage::Open(connection) = &mut self.stage else {
            return Ok(());
        };
        while connection.wants_write() {
            connection.write_tls(&mut self.output)?;
        }
        if self.output.is_empty() {
            return Ok(());
        }
        let left = deadline.map(time_left);
        let written = match &self.write_error {
            None => write_within(socket.as_fd(), &mut &self.output[..], left, None),
            Some(error) => Err(again(error)),
        };
        self.output.clear();
        self.output.shrink_to(KEPT_ROOM);
        self.write_error = written.as_ref().err().map(again);
        written
    }

    /// Sends a close_notify if the handshake is complete and the socket takes it at once.
    fn send_close_notify(&mut self, socket: &TcpStream) {
        if let Some(connection) = self.shaken() {
            connection.send_close_notify();
            let _ = self.flush(socket, Some(Instant::now()));
        }
    }
}

/// The same error once more.
fn again(error: &io::Error) -> io::Error {
    let same = error.raw_os_error().map(io::Error::from_raw_os_error);
    same.unwrap_or_else(|| error.kind().into())
}

/// Reads the encrypted stream from the socket.
struct Incoming<'a> {
    socket: &'a TcpStream,
    blocks: bool,
    /// Bytes that come before those of the socket.
    unread: &'a mut Vec<u8>,
    /// The first byte of the stream, once received.
    first_byte: &'a mut Option<u8>,
}

impl Read for Incoming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = if !self.unread.is_empty() {
            let len = self.unread.len().min(buffer.len());
            buffer[..len].copy_from_slice(&self.unread[..len]);
            self.unread.drain(..len);
            len
        } else if self.blocks {
            rustix::io::read(self.socket, &mut *buffer)?
        } else {
            recv(self.socket, &mut *buffer, RecvFlags::DONTWAIT)?.0
        };
        *self.first_byte = self.first_byte.or(buffer[..len].first().copied());
        Ok(len)
    }
}

/// Blocks until there is input. At the deadline, fails like a read that has timed out.
fn wait_for_input(socket: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<()> {
    // The deadline is checked first, so that a stream of empty records does not extend the time.
    let is_over = deadline.is_some_and(|deadline| deadline <= Instant::now());
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    if is_over || !wait_for(&mut polled, deadline)? {
        return Err(Errno::AGAIN.into());
    }
    Ok(())
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TlsStream").field(&self.socket).finish()
    }
}
