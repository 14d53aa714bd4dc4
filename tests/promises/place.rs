//! Where the servers of the moment listen, in a file that all processes read.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::random::Random;
#[cfg(feature = "tls")]
use crate::support::tls::{trusting, TlsClient, Version};

/// The doors of one server.
#[derive(Debug, Clone)]
pub struct Place {
    /// Which run of the server this is. `None` if it is one of several, which know their term.
    pub term: Option<u32>,
    pub addr: SocketAddr,
    pub socket: PathBuf,
    /// The CA of the server's certificate, if it speaks TLS at its address.
    pub ca: Option<PathBuf>,
    /// Where the server grants locks over HTTP, if it does.
    pub http: Option<SocketAddr>,
}

impl Place {
    /// Tells all processes about all servers.
    pub fn announce(directory: &Path, places: &[Place]) {
        let lines: Vec<String> = places.iter().map(Place::line).collect();
        let staged = directory.join("places.new");
        fs::write(&staged, lines.concat()).expect("there is room");
        fs::rename(staged, directory.join("places")).expect("it was just written");
    }

    /// One of the servers.
    pub fn any(directory: &Path, random: &mut Random) -> Place {
        let text = fs::read_to_string(directory.join("places")).expect("they were announced");
        let lines: Vec<&str> = text.lines().collect();
        let index = usize::try_from(random.below(lines.len() as u64)).expect("an index");
        Place::read(lines[index])
    }

    fn line(&self) -> String {
        let Place {
            term,
            addr,
            socket,
            ca,
            http,
        } = self;
        let http = http.map(|http| http.to_string()).unwrap_or_default();
        let term = term.map(|term| term.to_string()).unwrap_or_default();
        let path = |path: &Path| path.display().to_string();
        let (socket, ca) = (path(socket), ca.as_deref().map(path).unwrap_or_default());
        format!("{term} {addr} {socket} {ca} {http}\n")
    }

    fn read(line: &str) -> Place {
        let mut words = line.split(' ');
        let mut word = || words.next().expect("five words");
        Place {
            term: word().parse().ok(),
            addr: word().parse().expect("an address"),
            socket: PathBuf::from(word()),
            ca: Some(PathBuf::from(word())).filter(|path| path.is_absolute()),
            http: word().parse().ok(),
        }
    }

    /// A connection to the address, in what the server speaks there.
    pub fn network(&self) -> io::Result<Stream> {
        match &self.ca {
            None => self.plain(),
            #[cfg(feature = "tls")]
            Some(ca) => {
                let config = trusting(ca, Version::Tls13);
                let client = TlsClient::with(self.tcp()?, config)?;
                Ok(Stream::Tls(client))
            }
            #[cfg(not(feature = "tls"))]
            Some(_) => unreachable!("this build has no TLS"),
        }
    }

    /// A connection to the address that speaks no TLS, wanted or not.
    pub fn plain(&self) -> io::Result<Stream> {
        self.tcp().map(Stream::Plain)
    }

    fn tcp(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect_timeout(&self.addr, Duration::from_secs(10))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// A connection to the Unix socket. What std calls a TCP stream is any stream socket, as long
    /// as no option of TCP is asked for.
    pub fn unix(&self) -> io::Result<Stream> {
        let stream = UnixStream::connect(&self.socket)?;
        Ok(Stream::Plain(TcpStream::from(OwnedFd::from(stream))))
    }
}

/// A connection, in clear or not.
pub enum Stream {
    Plain(TcpStream),
    #[cfg(feature = "tls")]
    Tls(TlsClient),
}

impl Stream {
    pub fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.set_read_timeout(Some(timeout)),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.set_read_timeout(timeout),
        }
    }

    pub fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.set_write_timeout(Some(timeout)),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.set_write_timeout(timeout),
        }
    }

    /// Says that nothing more will be sent.
    pub fn half_close(&self) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.shutdown(Shutdown::Write),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.half_close(),
        }
    }

    /// A second handle which can read while this one writes.
    pub fn try_clone(&self) -> io::Result<Stream> {
        match self {
            Stream::Plain(stream) => stream.try_clone().map(Stream::Plain),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => Ok(Stream::Tls(stream.clone())),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Plain(stream) => stream.as_fd(),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.as_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.read(buffer),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.write(bytes),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // neither kind keeps anything back
    }
}
