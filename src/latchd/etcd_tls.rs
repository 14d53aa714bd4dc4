//! TLS with etcd: which CAs its members must have, and what this server shows of itself.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;

use crate::cli::arguments::Origins;
use crate::cluster::Member;
use crate::net::certificate::{chain_and_key, mismatch};
use crate::net::trust::{system_file, trusting};
use crate::text::{reason, Escaped};

use super::options::Options;

/// The files that the options name.
#[derive(Debug)]
pub(super) struct EtcdTls {
    ca: Option<PathBuf>,
    /// The certificate of this server, and its key.
    own: Option<(PathBuf, PathBuf)>,
}

impl EtcdTls {
    /// Checks the options; `None` if no member speaks TLS.
    pub(super) fn resolve(
        options: &Options,
        origins: &Origins,
        members: &[Member],
    ) -> Result<Option<EtcdTls>, String> {
        if !members.iter().any(|member| member.speaks_tls) {
            let files = ["--etcd-cacert", "--etcd-cert", "--etcd-key"];
            let stray = files.iter().find_map(|option| origins.get(option));
            return stray.map_or(Ok(None), |stray| {
                let why = "no address of --etcd begins with https://";
                Err(format!("{stray}: {why}"))
            });
        }
        Ok(Some(EtcdTls {
            ca: options.etcd_cacert.clone(),
            own: options.etcd_cert.clone().zip(options.etcd_key.clone()),
        }))
    }

    /// Reads the files. The error names the one that is of no use.
    pub(super) fn config(self) -> Result<Arc<ClientConfig>, String> {
        let ca = self.ca.unwrap_or_else(system_file);
        let trusting = trusting(&ca).map_err(|error| {
            let (ca, why) = (Escaped::path(&ca), reason(&error));
            format!("cannot use the file with the CAs of etcd {ca}: {why}")
        })?;
        let config = match self.own {
            None => trusting.with_no_client_auth(),
            Some((chain_file, key_file)) => {
                let (chain, key) = chain_and_key(&chain_file, &key_file)?;
                let config = trusting.with_client_auth_cert(chain, key);
                config.map_err(|error| mismatch(&chain_file, &key_file, &error))?
            }
        };
        Ok(Arc::new(config))
    }
}
