//! The stand-in for `mod.rs` in a build without TLS, whose options refuse TLS on the TCP port.

use std::path::PathBuf;
use std::sync::Arc;

use crate::os::tls::Certificate;

pub fn certificate(_: Option<(PathBuf, PathBuf)>) -> Result<Option<Arc<Certificate>>, String> {
    Ok(None)
}

pub fn reload(certificate: &Arc<Certificate>) {
    match **certificate {}
}

#[cfg(test)]
mod tests {
    use crate::latchd::start::options;
    use crate::shared::cli::arguments::Parsed;

    #[test]
    fn tls_is_refused_also_from_the_environment() {
        let refusal = |arguments: &[&str]| {
            let lookup = |name: &str| (name == "DFLOCKD_TLS_CERT").then(|| "x".to_owned());
            let arguments = arguments.iter().map(Into::into);
            match options::read(arguments, &lookup) {
                (Parsed::Usage(reason), _) => reason,
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
