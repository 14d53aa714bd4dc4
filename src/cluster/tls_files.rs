//! TLS with etcd: which CAs its members must have, and what this server shows of itself.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;

use crate::net::certificate::{chain_and_key, mismatch};
use crate::net::trust::{system_file, trusting};
use crate::text::{reason, Escaped};

/// The files in PEM.
#[derive(Clone, Debug, Default)]
pub struct TlsFiles {
    /// The CAs; without it, those of the system.
    pub ca: Option<PathBuf>,
    /// The certificate of this server, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    /// Reads the files. The error names the one that is of no use.
    pub(super) fn read(&self) -> Result<Arc<ClientConfig>, String> {
        let ca = self.ca.clone().unwrap_or_else(system_file);
        let trusting = trusting(&ca).map_err(|error| {
            let (ca, why) = (Escaped::path(&ca), reason(&error));
            format!("cannot use the file with the CAs of etcd {ca}: {why}")
        })?;
        let config = match &self.own {
            None => trusting.with_no_client_auth(),
            Some((chain_file, key_file)) => {
                let (chain, key) = chain_and_key(chain_file, key_file)?;
                let config = trusting.with_client_auth_cert(chain, key);
                config.map_err(|error| mismatch(chain_file, key_file, &error))?
            }
        };
        Ok(Arc::new(config))
    }
}
