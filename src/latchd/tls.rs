//! TLS on the TCP port: where the certificate comes from, and how it is read again.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use log::{info, warn};

use crate::net::certificate::Certificate;
use crate::net::listener::Listener;
use crate::text::Escaped;

use super::options::Options;
use super::self_signed;

const DAY: u64 = 86_400;

/// How long before a certificate expires the log says so.
const EXPIRY_NOTICE: Duration = Duration::from_secs(14 * DAY);

/// The certificate that the options ask for, if any. Makes a self-signed one if it is not there
/// yet.
pub(super) fn certificate(options: &Options) -> Result<Option<Arc<Certificate>>, String> {
    let given = options.tls_cert.clone().zip(options.tls_key.clone());
    let (chain, key) = match (&options.tls_self_signed, given) {
        (Some(directory), _) => self_signed::files(directory, options.host)?,
        (None, Some(files)) => files,
        (None, None) => return Ok(None),
    };
    let certificate = Certificate::read(chain, key)?;
    warn_of_validity(&certificate);
    Ok(Some(Arc::new(certificate)))
}

/// Warns of a certificate that is not valid, or soon will not be.
fn warn_of_validity(certificate: &Certificate) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    if certificate.begins_after(now) {
        warn!("certificate-not-valid-yet");
    }
    let expiry = certificate.expiry_before(now + EXPIRY_NOTICE);
    match expiry.map(|expiry| expiry.checked_sub(now)) {
        Some(Some(left)) => warn!("certificate-expires days_left={}", left.as_secs() / DAY),
        Some(None) => warn!("certificate-expired"),
        None => {}
    }
}

/// Reads the certificate again. One that is broken changes nothing.
pub(super) fn read_again(certificate: &Arc<Certificate>) {
    match certificate.read_again() {
        Ok(()) => {
            info!("certificate-read");
            warn_of_validity(certificate);
        }
        Err(why) => warn!("certificate-kept error={}", Escaped(why.as_bytes())),
    }
}

/// Has the TCP sockets speak TLS, if there is a certificate.
pub(super) fn speaking(
    listeners: Vec<Listener>,
    certificate: Option<&Arc<Certificate>>,
) -> Vec<Listener> {
    let speaking = |listener| match listener {
        Listener::Tcp(socket, _) => Listener::Tcp(socket, certificate.cloned()),
        unix => unix,
    };
    listeners.into_iter().map(speaking).collect()
}
