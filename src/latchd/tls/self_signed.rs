//! A certificate for trying TLS out: of a CA of its own, whose key is thrown away.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use log::info;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::CertificateDer;
use rustls::SupportedCipherSuite;

use crate::base64;
use crate::latchd::options::Host;
use crate::sys::directory::{lock_within, Directory};
use crate::text::{reason, Escaped};

/// A name of this host on every host.
const LOCALHOST: &str = "localhost";

/// What clients are given to trust, the server's certificate, and its key.
const CA: &str = "ca.pem";
const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";

/// How long another server may take to write the files.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The columns of base64 in a line of PEM.
const PEM_COLUMNS: usize = 64;

/// The files of the certificate and its key in `directory`. Makes them if none is there: then
/// the certificate is for this host, `localhost` and the address in `host`. Logs the fingerprint of
/// the CA.
pub(super) fn files(directory: &Path, host: &Host) -> Result<(PathBuf, PathBuf), String> {
    let ca = make_unless_there(directory, host).map_err(|error| {
        let (path, reason) = (Escaped::path(directory), reason(&error));
        format!("cannot make a certificate in {path}: {reason}")
    })?;
    let path = directory.join(CA);
    info!("self-signed ca={} sha256={ca}", Escaped::path(&path));
    Ok((directory.join(CERTIFICATE), directory.join(KEY)))
}

/// Returns the fingerprint of the CA.
fn make_unless_there(directory: &Path, host: &Host) -> io::Result<String> {
    if !directory.is_dir() {
        DirBuilder::new().mode(0o755).create(directory)?;
    }
    // Whoever may read the directory can lock it, but not keep us from what is there.
    let names = Directory::open(directory)?;
    if names.stat(KEY)?.is_none() {
        make_in(directory, &names, host)?;
    }
    let unusable = |why: &str| io::Error::other(format!("{CA}: {why}"));
    let ca = fs::read(directory.join(CA)).map_err(|error| unusable(&reason(&error)))?;
    let ca = CertificateDer::from_pem_slice(&ca);
    let ca = ca.map_err(|_| unusable("it is not a certificate in PEM"))?;
    Ok(fingerprint(&ca))
}

/// Makes the files, or waits for another server that does.
fn make_in(directory: &Path, names: &Directory, host: &Host) -> io::Result<()> {
    let lock = File::open(directory)?;
    if !lock_within(&lock, LOCK_PATIENCE)? {
        return Err(io::Error::other("it is locked by another process"));
    }
    if names.stat(KEY)?.is_some() {
        return Ok(());
    }
    for name in [CA, CERTIFICATE] {
        if names.stat(name)?.is_some() {
            let why = format!("{name} is there, and {KEY} is not");
            return Err(io::Error::other(why));
        }
    }
    let made = make(host).map_err(io::Error::other)?;
    // They appear one right after the other, when all are complete.
    let staged = |name: &str| Path::new(name).with_extension("new");
    for (name, mode, text) in &made {
        let _ = names.remove(staged(name));
        let mut file = names.create(staged(name), *mode)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
    }
    for (name, ..) in &made {
        fs::rename(directory.join(staged(name)), directory.join(name))?;
    }
    Ok(())
}

/// The names of the files, their modes, and their contents in PEM. The key comes last: if it is
/// there, so are the others.
fn make(host: &Host) -> Result<[(&'static str, u32, String); 3], rcgen::Error> {
    let ca_key = KeyPair::generate()?;
    let named = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let mut ca = named("latchd self-signed CA");
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_certificate = ca.self_signed(&ca_key)?;

    let key = KeyPair::generate()?;
    let mut params = named("latchd");
    params.subject_alt_names = names(host);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let issuer = Issuer::new(ca, ca_key);
    let certificate = params.signed_by(&key, &issuer)?;
    Ok([
        (CA, 0o644, pem("CERTIFICATE", ca_certificate.der())),
        (CERTIFICATE, 0o644, pem("CERTIFICATE", certificate.der())),
        (KEY, 0o600, pem("PRIVATE KEY", key.serialized_der())),
    ])
}

/// Under which names clients on this host and on others may know the server.
fn names(host: &Host) -> Vec<SanType> {
    let uname = rustix::system::uname();
    let nodename = uname.nodename().to_str().ok();
    let nodename = nodename.filter(|name| *name != LOCALHOST);
    let names = [LOCALHOST].into_iter().chain(nodename);
    let names = names.filter_map(|name| name.to_string().try_into().ok());
    let mut addresses: Vec<IpAddr> = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    if let Host::Address(host) = host {
        if !host.is_unspecified() && !addresses.contains(host) {
            addresses.push(*host);
        }
    }
    let addresses = addresses.into_iter().map(SanType::IpAddress);
    names.map(SanType::DnsName).chain(addresses).collect()
}

/// SHA-256 in hexadecimal digits.
fn fingerprint(der: &[u8]) -> String {
    let SupportedCipherSuite::Tls13(suite) = TLS13_AES_128_GCM_SHA256 else {
        unreachable!("it is a suite of TLS 1.3");
    };
    let digest = suite.common.hash_provider.hash(der);
    let digits = digest.as_ref().iter().map(|byte| format!("{byte:02X}"));
    digits.collect::<Vec<String>>().join(":")
}

fn pem(label: &str, der: &[u8]) -> String {
    let base64 = base64::encode(der);
    let lines = base64.as_bytes().chunks(PEM_COLUMNS);
    let lines = lines.map(|line| String::from_utf8_lossy(line) + "\n");
    let body: String = lines.collect();
    format!("-----BEGIN {label}-----\n{body}-----END {label}-----\n")
}
