//! TLS in a build without it: the same API as `mod.rs`, with uninhabited types.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

#[derive(Debug)]
pub enum TlsStream {}

#[derive(Debug)]
pub enum Certificate {}

/// Checks an option that needs TLS. Refuses it, because this build has no TLS.
pub fn need(what: &str) -> Result<(), String> {
    Err(lacking(what))
}

pub fn lacking(what: &str) -> String {
    format!("{what}: needs a build with --features tls")
}

impl TlsStream {
    pub fn socket(&self) -> &TcpStream {
        match *self {}
    }

    pub fn set_read_timeout(&self, _: Duration) {
        match *self {}
    }

    pub fn read(&self, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    pub fn put_back(&self, _: Vec<u8>) {
        match *self {}
    }

    pub fn read_ready(&self, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    pub fn write_within(&self, _: &mut &[u8], _: Option<Duration>) -> io::Result<()> {
        match *self {}
    }

    pub fn shutdown(&self, _: Shutdown) -> io::Result<()> {
        match *self {}
    }
}

impl Certificate {
    pub fn server_stream<S: From<TlsStream>>(&self, _: TcpStream) -> S {
        match *self {}
    }
}
