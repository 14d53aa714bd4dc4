//! The client's side of TLS: its settings, and the certificates that it trusts.

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
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};

use super::TlsStream;
use crate::text::in_brackets;

/// A file with the CAs that this host trusts, by the variable of OpenSSL.
const SYSTEM_VARIABLE: &str = "SSL_CERT_FILE";

/// The longest file in bytes: more than all CAs of a host.
const MAX_FILE_LEN: u64 = 4 * 1024 * 1024;

/// Where distributions keep the CAs that a host trusts.
const SYSTEM_FILES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
];

/// The file with the CAs that this host trusts: the one that `SSL_CERT_FILE` names, or where the
/// distribution keeps it.
pub fn system_file() -> PathBuf {
    let named = env::var_os(SYSTEM_VARIABLE).filter(|file| !file.is_empty());
    let mut known = SYSTEM_FILES.iter().map(PathBuf::from);
    let file = named.map(PathBuf::from);
    let file = file.or_else(|| known.find(|file| file.exists()));
    file.unwrap_or_else(|| SYSTEM_FILES[0].into())
}

/// The settings of a client: whose certificates it trusts, and which one it shows. A clone shares
/// the sessions that can be resumed.
#[derive(Clone, Debug)]
pub struct Trust(Arc<ClientConfig>);

impl From<ClientConfig> for Trust {
    fn from(config: ClientConfig) -> Trust {
        Trust(config.into())
    }
}

impl Trust {
    /// Shakes hands with the server of this name until `deadline`.
    pub fn shake_hands(
        &self,
        socket: TcpStream,
        name: ServerName<'static>,
        deadline: Instant,
    ) -> io::Result<TlsStream> {
        TlsStream::client(socket, Arc::clone(&self.0), name, deadline)
    }
}

/// The settings of a client that trusts the CAs in a PEM file, and the self-signed certificates in
/// it that are those of no CA: by TLS 1.2 or 1.3. The certificate of the client is left open.
pub fn trusting(file: &Path) -> io::Result<ConfigBuilder<ClientConfig, WantsClientCert>> {
    let mut roots = RootCertStore::empty();
    let pem = read_all(File::open(file)?)?;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|_| io::Error::other("it is not PEM"))?;
        // One of many that this build does not understand does not spoil the others.
        let _ = roots.add(certificate);
    }
    if roots.is_empty() {
        return Err(io::Error::other("there is no certificate of a CA in it"));
    }
    let builder = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("ring has all cipher suites");
    Ok(builder.with_root_certificates(roots))
}

/// Reads a file with certificates or a key, unless it is too long.
pub(super) fn read_all(file: File) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut limited = file.take(MAX_FILE_LEN + 1);
    match limited.read_to_end(&mut content)? as u64 > MAX_FILE_LEN {
        true => Err(io::Error::other("it is too long")),
        false => Ok(content),
    }
}

/// As [`server_name`], for the host of an address with a port. IPv6 addresses are in brackets. The
/// zone of one is of this host alone, and in no certificate.
pub fn server_of(address: &str) -> Option<ServerName<'static>> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = in_brackets(host).unwrap_or(host);
    server_name(host.split_once('%').map_or(host, |(ip, _)| ip))
}

/// The name that a server's certificate must be for; `None` if it cannot be in a certificate.
pub fn server_name(host: &str) -> Option<ServerName<'static>> {
    ServerName::try_from(host.to_owned()).ok()
}
