//! TLS with etcd: the CAs that this server trusts, and the certificate that it shows.
//!
//! A build without TLS uses `etcd_tls/absent.rs` in place of this module.

use std::io;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;

use crate::os::stream::Stream;
use crate::os::text::{reason, Escaped};
use crate::os::tls::certificate::{chain_and_key, mismatch};
use crate::os::tls::{server_of, system_file, trusting, Trust};

/// The PEM files for TLS with etcd, and the settings read from them.
#[derive(Clone, Debug)]
pub struct EtcdTls {
    /// The file with the trusted CAs. With `None`, the system's CAs are trusted.
    ca: Option<PathBuf>,
    /// The files with this server's certificate chain and its key.
    own: Option<(PathBuf, PathBuf)>,
    content: OnceLock<Trust>,
}

impl EtcdTls {
    pub fn new(ca: Option<PathBuf>, own: Option<(PathBuf, PathBuf)>) -> Option<EtcdTls> {
        let content = OnceLock::new();
        Some(EtcdTls { ca, own, content })
    }

    /// Reads the files. The error names the unusable file.
    pub fn read(&self) -> Result<Trust, String> {
        let ca = self.ca.clone().unwrap_or_else(system_file);
        let trusting = trusting(&ca).map_err(|error| {
            let (ca, why) = (Escaped::path(&ca), reason(&error));
            format!("cannot use the file with the CAs of etcd {ca}: {why}")
        })?;
        Ok(match &self.own {
            None => trusting.with_no_client_auth().into(),
            Some((chain_file, key_file)) => {
                let (chain, key) = chain_and_key(chain_file, key_file)?;
                let config = trusting.with_client_auth_cert(chain, key);
                let config = config.map_err(|error| mismatch(chain_file, key_file, &error))?;
                config.into()
            }
        })
    }

    /// Discards the settings, so that the next handshake reads the files again.
    pub fn forget(&mut self) {
        self.content.take();
    }

    /// Performs the handshake with the member at `HOST:PORT`. The handshake must end by `deadline`.
    pub fn secure(&self, socket: TcpStream, member: &str, deadline: Instant) -> io::Result<Stream> {
        let trust = match self.content.get() {
            Some(trust) => trust,
            None => {
                let trust = self.read().map_err(io::Error::other)?;
                self.content.get_or_init(|| trust)
            }
        };
        let name = server_of(member);
        let name = name.ok_or_else(|| io::Error::other("the host cannot be in a certificate"))?;
        let shaken = trust.shake_hands(socket, name, deadline);
        shaken.map(Stream::from)
    }
}
