//! TLS over a TCP socket, for either side of a connection.
//!
//! A server's side shakes hands within its first read: on the thread of its session, and within the
//! time of that read. Nothing can be written before.
//!
//! Only the thread that serves the connection reads and writes. Other threads may shut the socket
//! down, and ask how much of the encrypted stream waits in the kernel.
//!
//! A build without TLS has `absent.rs` in place of this module: the same shape, and no values.

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
use rustls::{ClientConfig, ClientConnection, Connection, IoState, ServerConfig, ServerConnection};

use super::stream::{write_within, Stream};
use crate::sys::event::wait_for;
use crate::sys::memory::{self, Purpose};
pub use certificate::Certificate;
pub use trust::{server_name, server_of, system_file, trusting, Trust};

/// Refuses what asks for TLS in a build without it. This one has it.
pub fn need(_: &str) -> Result<(), String> {
    Ok(())
}

/// The longest piece in bytes that is encrypted at a time: a record holds no more.
const PIECE_LEN: usize = 16 * 1024;

/// The room in bytes that is kept for encrypted output.
const KEPT_ROOM: usize = 512;

/// The first byte of a record with a part of a handshake, and of one with an alert.
const HANDSHAKE: u8 = 22;
const ALERT: u8 = 21;

/// The most bytes that a client may send without a byte of a request: for its handshake, of which
/// usual ones have 2000, or for a record.
const MAX_PENDING_LEN: usize = 20 * 1024;

/// What is longer, in bytes, is computed for one client at a time: a message of a handshake, which
/// can come later, too, then takes a multiple of its length.
const USUAL_PENDING_LEN: usize = 4096;
static LONG_PENDING: Mutex<()> = Mutex::new(());

/// The memory in bytes that a handshake takes, and what each byte of it adds to that: for each name
/// in it, which can be two bytes long, the library allocates a block.
const HANDSHAKE_LEN: usize = 64 * 1024;
const PER_HANDSHAKE_BYTE: usize = 40;

/// One end of a connection over TLS.
pub struct TlsStream {
    socket: TcpStream,
    session: Mutex<Session>,
}

struct Session {
    stage: Stage,
    /// How long a read may take.
    read_timeout: Duration,
    /// Encrypted output on its way to the socket.
    output: Vec<u8>,
    /// Whether the output can go on. After a failure a part of a record may have been sent.
    can_send: bool,
    /// The first byte that the peer has sent.
    first_byte: Option<u8>,
    /// How many bytes it has sent since one of a request came out last.
    pending_len: usize,
}

enum Stage {
    /// A server's side that has read nothing yet.
    New(Arc<ServerConfig>),
    Open(Box<Connection>),
    /// The peer broke the protocol, or speaks another.
    Over,
}

/// For how long a read may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// Not at all.
    None,
    /// For the socket's own timeout; after the first piece, until then.
    OfSocket(Option<Instant>),
    /// Until then.
    Until(Option<Instant>),
}

impl TlsStream {
    /// The server's side of a connection. Does not block, and computes nothing yet.
    fn server(socket: TcpStream, config: Arc<ServerConfig>) -> TlsStream {
        TlsStream::new(socket, Stage::New(config))
    }

    /// The client's side of a connection to the server with this name. Shakes hands until
    /// `deadline`.
    fn client(
        socket: TcpStream,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        deadline: Instant,
    ) -> io::Result<TlsStream> {
        let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
        let stream = TlsStream::new(socket, Stage::Open(Box::new(connection.into())));
        stream.session().shake_hands(&stream.socket, deadline)?;
        Ok(stream)
    }

    fn new(socket: TcpStream, stage: Stage) -> TlsStream {
        let session = Session {
            stage,
            read_timeout: Duration::MAX,
            output: Vec::new(),
            can_send: true,
            first_byte: None,
            pending_len: 0,
        };
        TlsStream {
            socket,
            session: Mutex::new(session),
        }
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// How long a read may take in all. The socket must have the same timeout.
    pub fn set_read_timeout(&self, timeout: Duration) {
        self.session().read_timeout = timeout;
    }

    /// Reads what has arrived, or blocks for more. The end of the stream is 0, also if the peer did
    /// not announce it: a message that is cut off lacks its line end.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut session = self.session();
        let deadline = Instant::now().checked_add(session.read_timeout);
        session.read(&self.socket, buffer, Patience::OfSocket(deadline))
    }

    /// Reads what has arrived without blocking; `None` if nothing has.
    pub fn read_ready(&self, buffer: &mut [u8]) -> Option<usize> {
        let read = self.session().read(&self.socket, buffer, Patience::None);
        read.ok()
    }

    /// Writes all of `bytes` within `timeout` (`None`: for ever). After a failure nothing more can
    /// be written.
    pub fn write_within(&self, bytes: &[u8], timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut session = self.session();
        for piece in bytes.chunks(PIECE_LEN) {
            let connection = session.shaken().ok_or(io::ErrorKind::NotConnected)?;
            connection.writer().write_all(piece)?;
            session.flush(&self.socket, deadline)?;
        }
        Ok(())
    }

    /// Ends one or both directions. The peer is told of the end of the output, if the socket takes
    /// that at once.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        // The thread that reads or writes meanwhile keeps the mutex. It finds the socket closed.
        if let (Shutdown::Write | Shutdown::Both, Ok(mut session)) = (how, self.session.try_lock())
        {
            session.say_goodbye(&self.socket);
        }
        self.socket.shutdown(how)
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        self.session().say_goodbye(&self.socket);
    }
}

impl Session {
    fn shake_hands(&mut self, socket: &TcpStream, deadline: Instant) -> io::Result<()> {
        self.flush(socket, Some(deadline))?;
        while self.shaken().is_none() {
            if self.receive(socket, Patience::Until(Some(deadline)))? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// The connection, once both sides have shaken hands.
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
        mut patience: Patience,
    ) -> io::Result<usize> {
        if let Stage::New(config) = &self.stage {
            let connection = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
            self.stage = Stage::Open(Box::new(connection.into()));
        }
        loop {
            let Stage::Open(connection) = &mut self.stage else {
                return Ok(0);
            };
            // What is decrypted already comes first: the socket may stay silent.
            match connection.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
            if self.receive(socket, patience)? == 0 {
                return Ok(0);
            }
            if let Patience::OfSocket(deadline) = patience {
                patience = Patience::Until(deadline);
            }
        }
    }

    /// Takes in one piece of the encrypted stream, answers it if the protocol wants that, and
    /// returns its length; 0 at the end of the stream.
    fn receive(&mut self, socket: &TcpStream, patience: Patience) -> io::Result<usize> {
        let Stage::Open(connection) = &mut self.stage else {
            return Ok(0);
        };
        let is_server = matches!(**connection, Connection::Server(_));
        let is_new = is_server && connection.is_handshaking();
        let blocks = match patience {
            // The usual read: one system call.
            Patience::OfSocket(_) if !is_new => true,
            Patience::OfSocket(deadline) | Patience::Until(deadline) => {
                wait_for_input(socket.as_fd(), deadline)?;
                false
            }
            Patience::None => false,
        };
        let room = |len| memory::reserve(len, Purpose::Newcomer).ok_or(io::ErrorKind::OutOfMemory);
        let reserved = is_new.then(|| room(HANDSHAKE_LEN)).transpose()?;
        let mut incoming = Incoming {
            socket,
            blocks,
            first_byte: &mut self.first_byte,
        };
        let len = connection.read_tls(&mut incoming)?;
        if len > 0 && !matches!(self.first_byte, Some(HANDSHAKE | ALERT)) {
            // It gets no alert: the number of one of them is a line end, which a client of the
            // plain protocol would take for a reply.
            return Err(self.end("the peer does not speak TLS"));
        }
        self.pending_len += len;
        if is_server && self.pending_len > MAX_PENDING_LEN {
            return Err(self.end("the handshake is too long"));
        }
        let is_long = is_server && self.pending_len > USUAL_PENDING_LEN;
        let turn = is_long.then(|| LONG_PENDING.lock());
        let wanted = PER_HANDSHAKE_BYTE * self.pending_len;
        let handshake = is_new.then(|| room(wanted)).transpose()?;
        let processed = connection.process_new_packets();
        // To send the answer may take long.
        drop((reserved, handshake, turn));
        let has_ended = is_new && !connection.is_handshaking();
        let plain_len = processed.as_ref().map(IoState::plaintext_bytes_to_read);
        if has_ended || plain_len != Ok(0) {
            self.pending_len = 0;
        }
        let deadline = match (&processed, patience) {
            (Ok(_), Patience::OfSocket(deadline) | Patience::Until(deadline)) => deadline,
            _ => Some(Instant::now()),
        };
        // If this fails, a peer that waits for it is not heard of again.
        let _ = self.flush(socket, deadline);
        processed.map(|_| len).map_err(|error| self.end(error))
    }

    fn end(&mut self, why: impl Into<Box<dyn Error + Send + Sync>>) -> io::Error {
        self.stage = Stage::Over;
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Sends what is to be sent, until `deadline`.
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
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let written = match self.can_send {
            true => write_within(socket.as_fd(), &self.output, left, None),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        };
        self.output.clear();
        self.output.shrink_to(KEPT_ROOM);
        self.can_send = written.is_ok();
        written
    }

    /// Tells the peer that nothing more comes, as far as the socket takes it at once. A peer that
    /// has not shaken hands is told nothing.
    fn say_goodbye(&mut self, socket: &TcpStream) {
        if let Some(connection) = self.shaken() {
            connection.send_close_notify();
            let _ = self.flush(socket, Some(Instant::now()));
        }
    }
}

/// The encrypted stream.
struct Incoming<'a> {
    socket: &'a TcpStream,
    blocks: bool,
    /// The first byte of the stream, once it is known.
    first_byte: &'a mut Option<u8>,
}

impl Read for Incoming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = match self.blocks {
            true => rustix::io::read(self.socket, &mut *buffer)?,
            false => recv(self.socket, &mut *buffer, RecvFlags::DONTWAIT)?.0,
        };
        *self.first_byte = self.first_byte.or(buffer[..len].first().copied());
        Ok(len)
    }
}

/// Blocks until there is something to read, or fails at the deadline as a read with a timeout does.
fn wait_for_input(socket: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<()> {
    // A peer that sends empty records, one after the other, gains no time.
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
