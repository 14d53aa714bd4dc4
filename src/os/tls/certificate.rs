//! The server's side of TLS: settings, certificate and key.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::{CertificateError, Error, RootCertStore, ServerConfig};

use crate::os::directory::not_a_file;
use crate::os::text::{reason, Escaped};

use super::trust::read_all;
use super::{Stage, TlsStream, VERSIONS};

/// A certificate chain and its key, from two files that can be reloaded.
#[derive(Debug)]
pub struct Certificate {
    chain: PathBuf,
    key: PathBuf,
    loaded: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    config: Arc<ServerConfig>,
    /// The server's own certificate, then those of its CAs.
    chain: Vec<CertificateDer<'static>>,
}

impl Certificate {
    /// Reads two PEM files: a certificate chain, and the key of its first certificate. The error
    /// names the file that cannot be used.
    pub fn read(chain: PathBuf, key: PathBuf) -> Result<Certificate, String> {
        let loaded = Mutex::new(load(&chain, &key)?);
        Ok(Certificate { chain, key, loaded })
    }

    /// Reloads the files for new connections. On an error, the old certificate stays in use.
    pub fn reload(&self) -> Result<(), String> {
        let new = load(&self.chain, &self.key)?;
        *self.loaded() = new;
        Ok(())
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the server's side of an accepted connection. Does not block, and does no
    /// cryptography yet.
    pub fn server_stream<S: From<TlsStream>>(&self, socket: TcpStream) -> S {
        let config = Arc::clone(&self.loaded().config);
        TlsStream::new(socket, Stage::New(config)).into()
    }

    /// The earliest expiry of a certificate of the chain, if it is before `time`. Both are times
    /// since 1970.
    pub fn expiry_before(&self, time: Duration) -> Option<Duration> {
        let expiries = self.faults_at(time).filter_map(|fault| match fault {
            Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. }) => {
                Some(Duration::from_secs(not_after.as_secs()))
            }
            _ => None,
        });
        expiries.min()
    }

    /// Whether a certificate of the chain is not valid yet at `time`, which counts from 1970.
    pub fn begins_after(&self, time: Duration) -> bool {
        use CertificateError::NotValidYetContext;
        self.faults_at(time)
            .any(|fault| matches!(fault, Error::InvalidCertificate(NotValidYetContext { .. })))
    }

    /// The reason why a client would not accept a certificate at `time`, for each such certificate
    /// of the chain.
    fn faults_at(&self, time: Duration) -> impl Iterator<Item = Error> {
        let chain = self.loaded().chain.clone();
        let time = UnixTime::since_unix_epoch(time);
        let faults = move |certificate| verify_at(certificate, time).err();
        chain.into_iter().filter_map(faults)
    }
}

/// Verifies a certificate at `time`, like a client. Reports an expired certificate as expired even
/// if its name does not match, because webpki checks the validity first.
fn verify_at(certificate: CertificateDer<'static>, time: UnixTime) -> Result<(), Error> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone())?;
    let provider = ring::default_provider().into();
    let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), provider).build();
    let verifier = verifier.map_err(|error| Error::General(error.to_string()))?;
    let name = Ipv4Addr::LOCALHOST.into();
    let verified = verifier.verify_server_cert(&certificate, &[], &name, &[], time);
    verified.map(drop)
}

fn load(chain_file: &Path, key_file: &Path) -> Result<Loaded, String> {
    let (chain, key) = chain_and_key(chain_file, key_file)?;
    let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
        .with_protocol_versions(VERSIONS)
        .expect("ring has all cipher suites")
        .with_no_client_auth()
        .with_single_cert(chain.clone(), key)
        .map_err(|error| mismatch(chain_file, key_file, &error))?;
    // The default is two tickets, and each ticket is a message after the handshake.
    config.send_tls13_tickets = 1;
    let config = Arc::new(config);
    Ok(Loaded { config, chain })
}

/// Reads a non-empty certificate chain and the key of its first certificate, both PEM. The error
/// names the file that cannot be used.
pub fn chain_and_key(
    chain_file: &Path,
    key_file: &Path,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), String> {
    let chain = chain_in(chain_file).map_err(|why| unusable("certificate", chain_file, &why))?;
    let key = key_in(key_file).map_err(|why| unusable("key", key_file, &why))?;
    Ok((chain, key))
}

fn chain_in(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = read(file).map_err(|error| reason(&error))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let chain = chain.map_err(|_| "it is not PEM")?;
    if chain.is_empty() {
        return Err("there is no certificate in it".into());
    }
    // rustls checks only the first certificate of the chain.
    let bad = Err(Error::InvalidCertificate(CertificateError::BadEncoding));
    let is_damaged = |it: &CertificateDer<'static>| RootCertStore::empty().add(it.clone()) == bad;
    match chain.iter().position(is_damaged) {
        Some(at) => Err(format!("block {} in it is not a certificate", at + 1)),
        None => Ok(chain),
    }
}

fn key_in(file: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let pem = read(file).map_err(|error| reason(&error))?;
    PrivateKeyDer::from_pem_slice(&pem).map_err(|error| match error {
        // The label or the header of an encrypted key says so.
        _ if pem.windows(9).any(|part| part == b"ENCRYPTED") => "it has a password".into(),
        pem::Error::NoItemsFound => "there is no key in it".into(),
        _ => "it is not PEM".into(),
    })
}

/// The message for a certificate or key that rustls does not accept. It says which of the two files
/// is unusable.
pub fn mismatch(chain_file: &Path, key_file: &Path, error: &Error) -> String {
    // rustls's own message is not used, because it may quote the file.
    match error {
        Error::InvalidCertificate(_) => {
            let why = "it is not a certificate of version 3 that TLS can use";
            unusable("certificate", chain_file, why)
        }
        Error::InconsistentKeys(_) => {
            unusable("key", key_file, "it is not the key of the certificate")
        }
        _ => unusable("key", key_file, "it is not a key that TLS can use"),
    }
}

fn unusable(what: &str, file: &Path, why: &str) -> String {
    format!("cannot use the TLS {what} {}: {why}", Escaped::path(file))
}

/// Reads a file without blocking: opening a FIFO without a writer would block, and the thread that
/// reloads the files also handles the other signals.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(not_a_file());
    }
    read_all(file)
}
