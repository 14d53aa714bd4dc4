//! The client's side of TLS: settings, and the CAs to trust.

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rustls::client::WantsClientCert;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, ConfigBuilder, RootCertStore};

use super::{Stage, TlsStream, VERSIONS};
use crate::os::text::in_brackets;

/// The environment variable that names the file with the host's CAs. OpenSSL uses the same
/// variable.
const SYSTEM_VARIABLE: &str = "SSL_CERT_FILE";

/// The maximum length of a file in bytes. A file with all CAs of a host is shorter.
const MAX_FILE_LEN: u64 = 4 * 1024 * 1024;

/// The files in which distributions keep the host's CAs.
const SYSTEM_FILES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
];

/// The file with the host's CAs: the file that `SSL_CERT_FILE` names, or else the distribution's.
pub fn system_file() -> PathBuf {
    let named = env::var_os(SYSTEM_VARIABLE).filter(|file| !file.is_empty());
    let mut known = SYSTEM_FILES.iter().map(PathBuf::from);
    let file = named.map(PathBuf::from);
    let file = file.or_else(|| known.find(|file| file.exists()));
    file.unwrap_or_else(|| SYSTEM_FILES[0].into())
}

/// The settings of a client: the CAs that it trusts and its own certificate. Clones share the
/// session cache.
#[derive(Clone, Debug)]
pub struct Trust(Arc<ClientConfig>);

impl From<ClientConfig> for Trust {
    fn from(config: ClientConfig) -> Trust {
        Trust(config.into())
    }
}

impl Trust {
    /// Completes a handshake with the named server by `deadline`.
    pub fn shake_hands(
        &self,
        socket: TcpStream,
        name: ServerName<'static>,
        deadline: Instant,
    ) -> io::Result<TlsStream> {
        let connection = ClientConnection::new(Arc::clone(&self.0), name);
        let connection = connection.map_err(io::Error::other)?;
        let stream = TlsStream::new(socket, Stage::Open(Box::new(connection.into())));
        stream.state().shake_hands(&stream.socket, deadline)?;
        Ok(stream)
    }
}

/// Settings for TLS 1.2 and 1.3 that trust the CAs and the self-signed end-entity certificates in a
/// PEM file. The caller chooses the client certificate.
pub fn trusting(file: &Path) -> io::Result<ConfigBuilder<ClientConfig, WantsClientCert>> {
    let mut roots = RootCertStore::empty();
    let pem = read_all(File::open(file)?)?;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|_| io::Error::other("it is not PEM"))?;
        // A certificate that this build does not understand is skipped; the others still count.
        let _ = roots.add(certificate);
    }
    if roots.is_empty() {
        return Err(io::Error::other("there is no certificate of a CA in it"));
    }
    let builder = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_protocol_versions(VERSIONS)
        .expect("ring has all cipher suites");
    Ok(builder.with_root_certificates(roots))
}

/// Reads a file with certificates or a key. Fails if the file is too long.
pub fn read_all(file: File) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut limited = file.take(MAX_FILE_LEN + 1);
    if limited.read_to_end(&mut content)? as u64 > MAX_FILE_LEN {
        return Err(io::Error::other("it is too long"));
    }
    // A byte order mark would hide the first line from the reader of PEM.
    if content.starts_with("\u{feff}".as_bytes()) {
        content.drain(..'\u{feff}'.len_utf8());
    }
    Ok(content)
}

/// Like [`server_name`], for an address with a port. IPv6 addresses are in brackets. A zone is
/// removed, because it is local to this host and cannot be in a certificate.
pub fn server_of(address: &str) -> Option<ServerName<'static>> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = in_brackets(host).unwrap_or(host);
    server_name(host.split_once('%').map_or(host, |(ip, _)| ip))
}

/// The name that the server's certificate must have; `None` if `host` cannot be a name in a
/// certificate.
pub fn server_name(host: &str) -> Option<ServerName<'static>> {
    ServerName::try_from(host.to_owned()).ok()
}
