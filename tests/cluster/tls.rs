//! TLS with etcd.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::house::{renew, Etcd, Server, TAKE_OVER};
use crate::support::needs::needs;
use crate::support::Daemon;

/// Makes a CA in `directory`, a certificate of it for etcd, and one for its clients. That of etcd
/// is also one for clients: its gateway connects to etcd with it.
const CERTIFICATES: &str = r#"
    set -e
    cd "$1"
    key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    echo "extendedKeyUsage=serverAuth,clientAuth
subjectAltName=IP:127.0.0.1" >etcd.ext
    echo "extendedKeyUsage=clientAuth" >client.ext
    openssl req -x509 $key -keyout ca.key -out ca.pem -days 2 -subj "/CN=a CA"
    for name in etcd client; do
        openssl req $key -keyout $name.key -out $name.csr -subj "/O=tests"
        openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial \
            -days 2 -extfile $name.ext -out $name.pem
    done
"#;

fn certificates() -> TempDir {
    let directory = TempDir::new().expect("there is room");
    let made = Command::new("sh")
        .args(["-c", CERTIFICATES, "sh"])
        .arg(directory.path())
        .stdin(Stdio::null())
        .output()
        .expect("there is a shell");
    assert!(made.status.success(), "{made:?}");
    directory
}

/// The options for files in `directory`, and those that a test adds.
fn options(directory: &Path, further: &[&str]) -> Vec<String> {
    let pairs = [
        ("--etcd-cacert", "ca.pem"),
        ("--etcd-cert", "client.pem"),
        ("--etcd-key", "client.key"),
    ];
    let pairs = pairs.map(|(option, file)| format!("{option}={}", directory.join(file).display()));
    let further = further.iter().map(|it| it.to_string());
    pairs.into_iter().chain(further).collect()
}

fn start(etcd: &Etcd, options: &[String]) -> Server {
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    Server::start(&etcd.endpoints(), &options)
}

#[test]
fn servers_share_an_etcd_that_asks_for_certificates() {
    needs!("etcd", "etcdctl", "openssl");
    let files = certificates();
    let etcd = Etcd::start_secured(files.path());
    for command in [
        "user add root:secret",
        "user grant-role root root",
        "auth enable",
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        assert!(etcd.ctl(&words).is_some(), "{command}");
    }
    let password = files.path().join("password");
    fs::write(&password, "secret").expect("there is room");
    fs::set_permissions(&password, fs::Permissions::from_mode(0o600)).expect("it is ours");
    let password = format!("--etcd-password-file={}", password.display());
    let options = options(files.path(), &["--etcd-user=root", &password]);

    let first = start(&etcd, &options);
    first.wait_until_active(1);
    let second = start(&etcd, &options);
    second.wait_for("standby active=", 1);
    let mut holder = second.connect();
    let grant = holder.acquire_for("k", 0, 60);
    first.kill();
    second.wait_until_active(1);
    assert_eq!(renew(&mut second.connect(), "k", &grant), "ok 60");
}

#[test]
fn an_etcd_of_another_ca_is_not_believed() {
    needs!("etcd", "etcdctl", "openssl");
    let (files, others) = (certificates(), certificates());
    let etcd = Etcd::start_secured(files.path());
    let distrustful = start(&etcd, &options(others.path(), &[]));
    distrustful.wait_for("error=\"invalid peer certificate: ", 1);
    // The etcd of a client without a certificate is the right one, and refuses it.
    let ca = format!("--etcd-cacert={}", files.path().join("ca.pem").display());
    let unknown = start(&etcd, &[ca]);
    unknown.wait_for("etcd-unavailable", 1);
    // A name that is not in the certificate.
    let renamed = etcd.endpoints().replace("127.0.0.1", "localhost");
    let all = options(files.path(), &[]);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let renamed = Server::start(&renamed, &all);
    renamed.wait_for("error=\"invalid peer certificate: ", 1);
    start(&etcd, &options(files.path(), &[])).wait_until_active(1);
    for server in [distrustful, unknown, renamed] {
        let log = server.daemon.log();
        assert!(!log.contains("INFO active epoch="), "{log}");
    }
}

#[test]
fn files_of_no_use_for_etcd_are_refused_by_name() {
    needs!("openssl");
    let files = certificates();
    let path = |name: &str| files.path().join(name).display().to_string();
    let (ca, cert, key) = (path("ca.pem"), path("client.pem"), path("client.key"));
    let (lacking, other) = (path("lacking.pem"), path("etcd.key"));
    let (secured, plain) = ("https://127.0.0.1:1", "127.0.0.1:1");
    for (etcd, [ca, cert, key], status, expected) in [
        (
            plain,
            [Some(&ca), None, None],
            2,
            "--etcd-cacert: no address of --etcd begins with https://".to_owned(),
        ),
        (
            plain,
            [None, Some(&cert), Some(&key)],
            2,
            "--etcd-cert: no address of --etcd begins with https://".to_owned(),
        ),
        (
            secured,
            [Some(&ca), Some(&cert), None],
            2,
            "--etcd-cert: both --etcd-cert and --etcd-key must be provided".to_owned(),
        ),
        (
            secured,
            [Some(&lacking), None, None],
            1,
            format!(
                "cannot use the file with the CAs of etcd {lacking}: no such file or directory"
            ),
        ),
        (
            secured,
            [Some(&key), None, None],
            1,
            format!(
                "cannot use the file with the CAs of etcd {key}: there is no certificate of a CA \
                 in it"
            ),
        ),
        (
            secured,
            [Some(&ca), Some(&lacking), Some(&key)],
            1,
            format!("cannot use the TLS certificate {lacking}: no such file or directory"),
        ),
        (
            secured,
            [Some(&ca), Some(&cert), Some(&other)],
            1,
            format!("cannot use the TLS certificate and key {cert}: "),
        ),
    ] {
        let mut command = Daemon::command();
        command.args(["--port=1", "--advertise=127.0.0.1:1", "--etcd", etcd]);
        let named = ["--etcd-cacert", "--etcd-cert", "--etcd-key"];
        for (option, file) in named.into_iter().zip([ca, cert, key]) {
            command.args(file.map(|file| format!("{option}={file}")));
        }
        command.stdin(Stdio::null());
        let daemon = Daemon::from_command(command);
        let ended = daemon.wait_exit(TAKE_OVER).expect("it is refused");
        assert_eq!(ended.code(), Some(status), "{expected}");
        let line = daemon.log();
        assert!(line.starts_with(&format!("latchd: {expected}")), "{line}");
    }
}
