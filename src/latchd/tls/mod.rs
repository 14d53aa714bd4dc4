//! TLS on the TCP port: where the certificate comes from, and how it is read again.
//!
//! A build without TLS has `absent.rs` in place of this module.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use log::{info, warn};

use crate::net::tls::Certificate;
use crate::text::Escaped;

const DAY: u64 = 86_400;

/// How long before a certificate expires the log says so.
const EXPIRY_NOTICE: Duration = Duration::from_secs(14 * DAY);

/// The certificate in the chain and with the key of these files, if the options name any.
pub(super) fn certificate(
    files: Option<(PathBuf, PathBuf)>,
) -> Result<Option<Arc<Certificate>>, String> {
    let Some((chain, key)) = files else {
        return Ok(None);
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
pub(super) fn reload(certificate: &Arc<Certificate>) {
    match certificate.reload() {
        Ok(()) => {
            info!("certificate-read");
            warn_of_validity(certificate);
        }
        Err(why) => warn!("certificate-kept error={}", Escaped(why.as_bytes())),
    }
}
