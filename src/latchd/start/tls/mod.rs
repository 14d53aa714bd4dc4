//! TLS on the TCP port: reads the certificate at the start, and again at SIGHUP.
//!
//! In a build without TLS, `absent.rs` takes the place of this module.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use log::{info, warn};

use crate::os::text::Escaped;
use crate::os::tls::Certificate;

const DAY: u64 = 86_400;

/// The log warns about a certificate that expires within this time.
const EXPIRY_NOTICE: Duration = Duration::from_secs(14 * DAY);

/// Reads the certificate chain and its key from these files, if the options name any.
pub fn certificate(files: Option<(PathBuf, PathBuf)>) -> Result<Option<Arc<Certificate>>, String> {
    let Some((chain, key)) = files else {
        return Ok(None);
    };
    let certificate = Certificate::read(chain, key)?;
    warn_of_validity(&certificate);
    Ok(Some(Arc::new(certificate)))
}

/// Warns about a certificate that is not valid yet, expires soon or has expired.
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

/// Reads the certificate again. If that fails, the old certificate stays in use.
pub fn reload(certificate: &Arc<Certificate>) {
    match certificate.reload() {
        Ok(()) => {
            info!("certificate-read");
            warn_of_validity(certificate);
        }
        Err(why) => warn!("certificate-kept error={}", Escaped(why.as_bytes())),
    }
}
