//! The certificate that a server shows to its clients over TLS, and its key.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{Error, ServerConfig};

use crate::sys::directory::not_a_file;
use crate::text::{reason, Escaped};

/// The longest file in bytes: more than any chain of certificates.
const MAX_FILE_LEN: u64 = 1024 * 1024;

/// A certificate with its key, from two files that can be read again.
#[derive(Debug)]
pub struct Certificate {
    chain: PathBuf,
    key: PathBuf,
    config: Mutex<Arc<ServerConfig>>,
}

impl Certificate {
    /// Reads a chain of certificates and the key of its first one, both in PEM. The error names the
    /// file.
    pub fn read(chain: PathBuf, key: PathBuf) -> Result<Certificate, String> {
        let config = Mutex::new(config(&chain, &key)?);
        Ok(Certificate { chain, key, config })
    }

    /// Reads the files again, for connections to come. After an error the old certificate stays.
    pub fn read_again(&self) -> Result<(), String> {
        let new = config(&self.chain, &self.key)?;
        let old = std::mem::replace(&mut *self.config.lock(), new);
        drop(old);
        Ok(())
    }

    /// The settings of a connection.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config.lock())
    }
}

fn config(chain_file: &Path, key_file: &Path) -> Result<Arc<ServerConfig>, String> {
    let (chain, key) = chain_and_key(chain_file, key_file)?;
    let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("ring has all cipher suites")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| mismatch(chain_file, key_file, &error))?;
    // Each is a message more after the handshake.
    config.send_tls13_tickets = 1;
    Ok(Arc::new(config))
}

/// Reads a chain of certificates and the key of its first one, both in PEM. The error names the
/// file.
pub fn chain_and_key(
    chain_file: &Path,
    key_file: &Path,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), String> {
    let pem = read(chain_file).map_err(|why| unusable("certificate", chain_file, reason(&why)))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let chain = match chain {
        Ok(chain) if !chain.is_empty() => chain,
        Ok(_) => {
            let why = "there is no certificate in it".into();
            return Err(unusable("certificate", chain_file, why));
        }
        Err(_) => return Err(unusable("certificate", chain_file, "it is not PEM".into())),
    };
    let pem = read(key_file).map_err(|why| unusable("key", key_file, reason(&why)))?;
    let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| {
        let why = match error {
            _ if has_password(&pem) => "it has a password",
            pem::Error::NoItemsFound => "there is no key in it",
            _ => "it is not PEM",
        };
        unusable("key", key_file, why.into())
    })?;
    Ok((chain, key))
}

/// Says which of the two files is of no use, or that they do not go together.
pub fn mismatch(chain_file: &Path, key_file: &Path, error: &Error) -> String {
    // The library's words may quote the file.
    match error {
        Error::InvalidCertificate(_) => {
            unusable("certificate", chain_file, "it is not a certificate".into())
        }
        Error::InconsistentKeys(_) => {
            let why = "it is not the key of the certificate";
            unusable("key", key_file, why.into())
        }
        _ => unusable("key", key_file, "it is not a key that TLS can use".into()),
    }
}

fn unusable(what: &str, file: &Path, why: String) -> String {
    format!("cannot use the TLS {what} {}: {why}", Escaped::path(file))
}

/// Whether a key in PEM is encrypted: a word in its label or its header.
fn has_password(pem: &[u8]) -> bool {
    let word = b"ENCRYPTED";
    pem.windows(word.len()).any(|part| part == word)
}

/// Does not block, as the open of a FIFO without a writer would: the thread that reads the files
/// again also answers the other signals.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(not_a_file());
    }
    let mut content = Vec::new();
    let mut limited = file.take(MAX_FILE_LEN + 1);
    if limited.read_to_end(&mut content)? as u64 > MAX_FILE_LEN {
        return Err(io::Error::other("it is too long"));
    }
    Ok(content)
}
