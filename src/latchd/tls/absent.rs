//! The stand-in for `mod.rs` in a build without TLS, whose options refuse TLS on the TCP port.

use std::path::PathBuf;
use std::sync::Arc;

use crate::net::tls::Certificate;

pub(super) fn certificate(
    _: Option<(PathBuf, PathBuf)>,
) -> Result<Option<Arc<Certificate>>, String> {
    Ok(None)
}

pub(super) fn reload(certificate: &Arc<Certificate>) {
    match **certificate {}
}

#[cfg(test)]
mod tests {
    use crate::cli::arguments::Parsed;
    use crate::latchd::options;
    use crate::latchd::settings::ServerSettings;

    #[test]
    fn tls_is_refused_also_from_the_environment() {
        let refusal = |arguments: &[&str]| {
            let lookup = |name: &str| (name == "DFLOCKD_TLS_CERT").then(|| "x".to_owned());
            let arguments = arguments.iter().map(Into::into);
            match options::read(arguments, &lookup) {
                (Parsed::Run(options), origins) => {
                    ServerSettings::new(&options, &origins, false, None).expect_err("refused")
                }
                (other, _) => panic!("{other:?}"),
            }
        };
        assert_eq!(
            refusal(&["--tls-key", "x"]),
            "DFLOCKD_TLS_CERT: needs a build with --features tls"
        );
        assert_eq!(
            refusal(&[]),
            "DFLOCKD_TLS_CERT: both --tls-cert and --tls-key must be provided"
        );
    }
}
