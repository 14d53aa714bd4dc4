//! Where the server of the moment listens, in a file that all processes read.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// One run of the server, with addresses of its own: a client knows which run it is connected to.
#[derive(Debug, Clone)]
pub struct Place {
    pub term: u32,
    pub addr: SocketAddr,
    pub socket: PathBuf,
}

impl Place {
    /// Tells all processes.
    pub fn announce(&self, directory: &Path) {
        let text = format!("{} {} {}", self.term, self.addr, self.socket.display());
        let staged = directory.join("place.new");
        fs::write(&staged, text).expect("there is room");
        fs::rename(staged, directory.join("place")).expect("it was just written");
    }

    pub fn read(directory: &Path) -> Place {
        let text = fs::read_to_string(directory.join("place")).expect("it was announced");
        let mut words = text.split(' ');
        let mut word = || words.next().expect("three words");
        Place {
            term: word().parse().expect("a number"),
            addr: word().parse().expect("an address"),
            socket: PathBuf::from(word()),
        }
    }

    pub fn tcp(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect_timeout(&self.addr, Duration::from_secs(10))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// A connection to the Unix socket. What std calls a TCP stream is any stream socket, as long
    /// as no option of TCP is asked for.
    pub fn unix(&self) -> io::Result<TcpStream> {
        let stream = UnixStream::connect(&self.socket)?;
        Ok(TcpStream::from(OwnedFd::from(stream)))
    }
}
