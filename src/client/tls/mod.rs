//! TLS with a server, for the client library and `latch`.
//!
//! A build without TLS uses `absent.rs` instead: the same API, with an uninhabited type.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::address::Address;
use super::error::Error;
use crate::os::stream::{is_timeout, Socket, Stream};
use crate::os::tls::{server_name, server_of, system_file, trusting, ServerName, Trust};

/// How to speak TLS 1.2 or 1.3 with servers: which certificates the client trusts, and which name
/// they must be for. Connections to Unix sockets do not use TLS.
///
/// Clones share the session data of earlier handshakes, which makes later handshakes cheaper.
///
/// ```no_run
/// use latchd::client::{Address, Client, Settings, Tls};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut settings = Settings::default();
/// settings.tls = Some(Tls::with_ca_file("/etc/latchd/tls/ca.pem")?);
/// let server: Address = "locks.example.org:6388".parse()?;
/// let client = Client::with_settings([server], settings);
/// let guard = client.lock("nightly-backup").acquire()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tls {
    trusted: Arc<Trusted>,
    name: Option<ServerName<'static>>,
}

/// A file with CAs, and what was read from it.
struct Trusted {
    file: PathBuf,
    read: Mutex<Read>,
}

struct Read {
    trust: Trust,
    /// The version of the file that was read; `None` if it is unknown.
    version: Option<Version>,
}

/// Inode, size, and the time of the last change in seconds and nanoseconds.
type Version = (u64, u64, i64, i64);

fn version_of(file: &Path) -> Option<Version> {
    let file = file.metadata().ok()?;
    Some((file.ino(), file.len(), file.ctime(), file.ctime_nsec()))
}

impl Trusted {
    fn read(file: &Path) -> Result<Read, Error> {
        // Take the version before reading the file, so that a change in between is noticed.
        let version = version_of(file);
        let trusting = trusting(file).map_err(|error| Error::CaFile(file.to_owned(), error))?;
        let trust = trusting.with_no_client_auth().into();
        Ok(Read { trust, version })
    }

    /// The certificates in the file or, if it cannot be read, those from the previous successful
    /// read.
    fn trust(&self) -> Trust {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if version_of(&self.file) != read.version {
            if let Ok(newer) = Trusted::read(&self.file) {
                *read = newer;
            }
        }
        read.trust.clone()
    }
}

impl Tls {
    /// Trusts the CAs in a PEM file, and the servers whose self-signed certificates it contains.
    /// Reads the file now, and again for a later connection if it has changed.
    ///
    /// # Errors
    ///
    /// [`Error::CaFile`] if the file cannot be read or contains no certificate.
    pub fn with_ca_file(file: impl AsRef<Path>) -> Result<Tls, Error> {
        let file = file.as_ref().to_owned();
        let read = Mutex::new(Trusted::read(&file)?);
        Ok(Tls {
            trusted: Arc::new(Trusted { file, read }),
            name: None,
        })
    }

    /// Trusts the CAs that this host trusts: those in the file that `SSL_CERT_FILE` names or, if it
    /// is not set, those in the distribution's file. Reads the file in the same way as
    /// [`Tls::with_ca_file`].
    ///
    /// # Errors
    ///
    /// [`Error::CaFile`] if the file cannot be read or contains no certificate.
    pub fn with_system_cas() -> Result<Tls, Error> {
        Tls::with_ca_file(system_file())
    }

    /// Expects the certificate of every server to be for this host name or IP address, instead of
    /// the host in the server's address.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `name` is neither a host name nor an IP address.
    pub fn server_name(self, name: &str) -> Result<Tls, Error> {
        let why = "the server's name is not a host name or an IP address";
        let name = server_name(name).ok_or(Error::InvalidArgument(why))?;
        Ok(Tls {
            name: Some(name),
            ..self
        })
    }

    /// Trusts the CAs in `ca_file`, or else those of the host. Expects `name`, if it is given.
    pub(super) fn wanted_by(
        _: &str,
        ca_file: Option<PathBuf>,
        name: Option<String>,
    ) -> Result<Tls, Error> {
        let tls = ca_file.map_or_else(Tls::with_system_cas, Tls::with_ca_file)?;
        match name {
            Some(name) => tls.server_name(&name),
            None => Ok(tls),
        }
    }

    /// Performs the TLS handshake over a stream to `server`, until `deadline`. Returns a Unix
    /// socket unchanged.
    pub(super) fn speak(
        &self,
        stream: Stream,
        server: &Address,
        deadline: Instant,
    ) -> Result<Stream, Error> {
        let Socket::Tcp(socket) = stream.socket else {
            return Ok(stream);
        };
        let host = match server {
            Address::Tcp(address) => server_of(address),
            Address::Unix(_) | Address::Cluster(_) => None,
        };
        let name = self.name.clone().or(host);
        let name = name.ok_or(Error::InvalidArgument(
            "the host cannot be in a certificate",
        ))?;
        let shaken = self.trusted.trust().shake_hands(socket, name, deadline);
        shaken.map(From::from).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                let server = server.clone();
                Error::Untrusted { server, error }
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                Error::closed(server, false)
            }
            _ if is_timeout(&error) => Error::no_reply(server),
            _ => Error::unreachable(server, error),
        })
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).finish()
    }
}
