//! Where the server's certificate comes from, and how it is replaced.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use rustix::fs::{mknodat, FileType, Mode, CWD};

use latchd::client::{Address, Client, Error, Settings, Tls};

use crate::support::needs::needs;
use crate::support::stalls::fair_test;
use crate::support::tls::{common, Set};
use crate::support::{program, Daemon, Signal, PATIENCE};

/// What `openssl x509 -req` makes without a file of extensions.
const VERSION_1: &str = "\
-----BEGIN CERTIFICATE-----
MIIBFDCBuwIULDrNIkHwWw/YKbKfTo6hRESuZI8wCgYIKoZIzj0EAwIwDDEKMAgG
A1UEAwwBazAgFw0yNjExMjMwNjUwNTRaGA8yMTI2MTAzMDA2NTA1NFowDDEKMAgG
A1UEAwwBazBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABHibXLEOBLFgVB4fto+Y
yBUf2lkF3dekuYTHQaxjZndvTiOpu5aCDMLzIOg8TZhStLVUjn8YJp9rsip2qeXt
7rUwCgYIKoZIzj0EAwIDSAAwRQIgLDCODgL1DsgRFqGchN8uMC5GPxGL53i5tGNz
6O5mTW4CIQDwyB9Vs03mYPAM3v2msHtUVkcPPrzOyqByt6X3T1oaYA==
-----END CERTIFICATE-----
";

/// How `latch ping` ends, and what it says.
fn ping(daemon: &Daemon, ca: &Path) -> (Option<i32>, String) {
    let mut latch = Command::new(program("latch"));
    latch.arg("ping").arg("--tls-ca").arg(ca);
    latch.arg(format!("--server=localhost:{}", daemon.port()));
    let output = latch.output().expect("it was built by cargo");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

fn with(set: &Set) -> Daemon {
    let options = set.options();
    Daemon::start(&[&options[0], &options[1]])
}

/// The one line with which the server refuses to start, and its status.
fn refusal(args: &[&str]) -> (Option<i32>, String) {
    let mut command = Daemon::command();
    command.args(["--port", "0"]).args(args);
    let daemon = Daemon::from_command(command);
    let status = daemon.wait_exit(PATIENCE).expect("it exits");
    (status.code(), daemon.log())
}

/// Makes a certificate that is signed by its own key, as for a server of the name `localhost`.
fn self_signed(directory: &Path, basic_constraints: &str) -> [PathBuf; 2] {
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| directory.join(name));
    let mut openssl = Command::new("openssl");
    openssl.args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-nodes",
        "-subj",
        "/CN=localhost",
    ]);
    openssl.args(["-pkeyopt", "ec_paramgen_curve:P-256"]);
    openssl.args(["-addext", "subjectAltName=DNS:localhost"]);
    openssl.args(["-addext", &format!("basicConstraints={basic_constraints}")]);
    openssl.arg("-keyout").arg(&key).arg("-out").arg(&cert);
    let made = openssl.output().expect("openssl starts");
    assert!(made.status.success(), "{made:?}");
    [cert, key]
}

#[test]
fn a_refused_certificate_is_answered_with_what_to_look_at() {
    needs!("openssl");
    let directory = tempfile::tempdir().expect("a directory");
    for (basic_constraints, host, is_trusted, hint) in [
        ("CA:FALSE", "localhost", true, ""),
        ("CA:FALSE", "localhost", false, "; see --tls-ca\n"),
        ("CA:FALSE", "127.0.0.1", true, "; see --tls-name\n"),
        (
            "CA:TRUE",
            "localhost",
            true,
            "; a server needs a certificate with CA:FALSE, see TLS in latchd-security(7)\n",
        ),
    ] {
        let [cert, key] = self_signed(directory.path(), basic_constraints);
        let options = [("cert", &cert), ("key", &key)]
            .map(|(name, path)| format!("--tls-{name}={}", path.display()));
        let daemon = Daemon::start(&[&options[0], &options[1]]);
        let mut latch = Command::new(program("latch"));
        latch.args(["ping", "--tls"]);
        latch.arg(format!("--server={host}:{}", daemon.port()));
        if is_trusted {
            latch.arg("--tls-ca").arg(&cert);
        }
        let output = latch.output().expect("it was built by cargo");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), hint.is_empty(), "{said}");
        assert!(said.ends_with(hint), "{said}");
    }
}

#[test]
fn sighup_replaces_the_certificate_and_keeps_connections() {
    needs!("openssl");
    fair_test(sighup_replaces_the_certificate_and_keeps_connections_once);
}

fn sighup_replaces_the_certificate_and_keeps_connections_once() {
    let (set, old) = (Set::new(), Set::new());
    fs::copy(set.ca(), old.ca()).expect("there is room");
    let daemon = with(&set);
    let mut tls = Tls::with_ca_file(old.ca()).expect("it is a CA");
    let mut settings = Settings::default();
    settings.tls = Some(tls.clone());
    let server: Address = format!("localhost:{}", daemon.port())
        .parse()
        .expect("an address");
    let client = Client::with_settings([server.clone()], settings.clone());
    // A busy machine may hold up the renewal for a second or two.
    let lease = Duration::from_secs(4);
    let guard = client.lock("k").lease(lease).acquire().expect("it is free");

    set.renew();
    assert_eq!(ping(&daemon, &old.ca()).0, Some(0));
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("certificate-read", PATIENCE);
    assert_eq!(ping(&daemon, &set.ca()), (Some(0), String::new()));
    let (status, said) = ping(&daemon, &old.ca());
    assert_eq!(status, Some(76));
    let why = "TLS failed: invalid peer certificate";
    assert!(said.contains(why), "{said}");
    // What the client has learnt of the old certificate does not help it.
    let refused = client.connect(&server);
    assert!(
        matches!(refused, Err(Error::Untrusted { .. })),
        "{refused:?}"
    );
    tls = Tls::with_ca_file(set.ca()).expect("it is a CA");
    settings.tls = Some(tls);
    let taken = Client::with_settings([server], settings)
        .lock("k")
        .try_acquire();
    assert!(matches!(taken, Ok(None)), "{taken:?}");

    // The holder renews over the connection that it has.
    std::thread::sleep(lease);
    assert!(guard.is_held());
    guard.release().expect("it is held");
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_certificate_file() {
    needs!("openssl");
    let set = Set::new();
    for file in [set.ca(), set.certificate(), set.key()] {
        let pem = fs::read(&file).expect("it was written");
        let marked = ["\u{feff}".as_bytes(), &pem].concat();
        fs::write(&file, marked).expect("there is room");
    }
    let daemon = with(&set);
    assert_eq!(ping(&daemon, &set.ca()), (Some(0), String::new()));
}

#[test]
fn the_log_warns_before_a_certificate_expires() {
    needs!("openssl");
    const DAY: Duration = Duration::from_secs(86_400);
    let set = Set::new();
    let now = SystemTime::now();
    set.expire_at(now + 3 * DAY + DAY / 2);
    let daemon = with(&set);
    let warnings = || daemon.log().matches("WARN certificate-expire").count();
    daemon.wait_for_log("WARN certificate-expires days_left=3", PATIENCE);
    set.expire_at(now - DAY);
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("WARN certificate-expired", PATIENCE);
    assert_eq!(warnings(), 2, "{}", daemon.log());
    set.expire_at(now + 15 * DAY);
    daemon.signal(Signal::HUP);
    let read = || daemon.log().matches("certificate-read").count();
    crate::support::eventually(PATIENCE, "it is read", || read() == 2);
    assert_eq!(ping(&daemon, &set.ca()), (Some(0), String::new()));
    assert_eq!(warnings(), 2, "{}", daemon.log());
    // One of a CA, behind that of the server.
    let other = Set::new();
    other.expire_at(now - DAY);
    let chain = [set.certificate(), other.certificate()].map(|file| fs::read(file).expect("ours"));
    fs::write(set.certificate(), chain.concat()).expect("there is room");
    daemon.signal(Signal::HUP);
    crate::support::eventually(PATIENCE, "it warns again", || warnings() == 3);
}

#[test]
fn the_log_warns_of_a_certificate_that_is_not_valid_yet() {
    needs!("openssl");
    const HOUR: Duration = Duration::from_secs(3600);
    let set = Set::new();
    set.begin_at(SystemTime::now() + HOUR);
    let daemon = with(&set);
    daemon.wait_for_log("WARN certificate-not-valid-yet\n", PATIENCE);
    assert!(!daemon.log().contains("WARN certificate-expire"));
}

#[test]
fn a_broken_new_certificate_leaves_the_old_one() {
    needs!("openssl");
    let (set, other) = (Set::new(), Set::new());
    let daemon = with(&set);
    let whole = fs::read(set.certificate()).expect("it is there");
    let strange = fs::read(other.certificate()).expect("it is there");
    for (at, content) in [&whole[..whole.len() / 2], b"", &strange]
        .iter()
        .enumerate()
    {
        fs::write(set.certificate(), content).expect("there is room");
        daemon.signal(Signal::HUP);
        let kept = || daemon.log().matches("WARN certificate-kept error=").count();
        crate::support::eventually(PATIENCE, "the log tells of it", || kept() == at + 1);
        assert_eq!(ping(&daemon, &set.ca()), (Some(0), String::new()));
    }
    fs::remove_file(set.key()).expect("it is there");
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("key.pem: no such file or directory", PATIENCE);
    assert_eq!(ping(&daemon, &set.ca()).0, Some(0));
}

/// A server that waits for a writer would answer no other signal.
#[test]
fn a_fifo_in_place_of_the_certificate_does_not_block() {
    needs!("openssl");
    let set = Set::new();
    let daemon = with(&set);
    fs::remove_file(set.certificate()).expect("it is there");
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, set.certificate(), FileType::Fifo, mode, 0).expect("there is room");
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("cert.pem: it is not a regular file", PATIENCE);
    assert_eq!(ping(&daemon, &set.ca()), (Some(0), String::new()));
    let [cert, key] = set.options();
    let (status, line) = refusal(&[&cert, &key]);
    assert_eq!(status, Some(1), "{line}");
    assert!(
        line.contains("cert.pem: it is not a regular file"),
        "{line}"
    );
}

#[test]
fn a_path_with_a_blank_leaves_a_log_line_readable() {
    needs!("openssl");
    let set = Set::new();
    let blank = set.path("a b.pem");
    fs::rename(set.certificate(), &blank).expect("there is room");
    let [_, key] = set.options();
    let daemon = Daemon::start(&[&format!("--tls-cert={}", blank.display()), &key]);
    fs::remove_file(&blank).expect("it is there");
    daemon.signal(Signal::HUP);
    let path = format!("\\\"{}\\\"", blank.display());
    let why = format!("cannot use the TLS certificate {path}: no such file or directory");
    daemon.wait_for_log(&format!("certificate-kept error=\"{why}\"\n"), PATIENCE);
}

#[test]
fn the_server_does_not_start_without_a_usable_certificate() {
    needs!("openssl");
    let (set, other) = (Set::new(), Set::new());
    let cert = |file: &Path| format!("--tls-cert={}", file.display());
    let key = |file: &Path| format!("--tls-key={}", file.display());
    fs::write(set.path("garbage"), "-----BEGIN CERTIFICATE-----\n?").expect("there is room");
    for (name, text) in [
        (
            "no DER",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n\
             -----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        ),
        (
            "PKCS 8",
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
        ),
        (
            "PKCS 1",
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\
             DEK-Info: AES-128-CBC,00\n\nAAAA\n-----END RSA PRIVATE KEY-----\n",
        ),
    ] {
        fs::write(set.path(name), text).expect("there is room");
    }
    fs::write(set.path("version 1"), VERSION_1).expect("there is room");
    let first = fs::read(set.certificate()).expect("it is ours");
    let second = fs::read(set.path("no DER")).expect("it is ours");
    fs::write(set.path("a chain"), [first, second].concat()).expect("there is room");
    for (cert_file, key_file, why) in [
        (set.path("none"), set.key(), "no such file or directory"),
        (
            set.certificate(),
            set.path("none"),
            "no such file or directory",
        ),
        (set.key(), set.key(), "there is no certificate in it"),
        (
            set.certificate(),
            set.certificate(),
            "there is no key in it",
        ),
        (set.path("garbage"), set.key(), "it is not PEM"),
        (
            set.path("no DER"),
            set.key(),
            "block 1 in it is not a certificate",
        ),
        (
            set.path("a chain"),
            set.key(),
            "block 2 in it is not a certificate",
        ),
        (
            set.path("version 1"),
            set.key(),
            "it is not a certificate of version 3 that TLS can use",
        ),
        (
            set.certificate(),
            set.path("no DER"),
            "it is not a key that TLS can use",
        ),
        (set.certificate(), set.path("PKCS 8"), "it has a password"),
        (set.certificate(), set.path("PKCS 1"), "it has a password"),
        (
            set.certificate(),
            other.key(),
            "it is not the key of the certificate",
        ),
    ] {
        let (status, line) = refusal(&[&cert(&cert_file), &key(&key_file)]);
        assert_eq!(status, Some(1), "{line}");
        assert!(line.starts_with("latchd: cannot use the TLS "), "{line}");
        let end = format!(": {why}\n");
        assert!(line.ends_with(&end) && line.lines().count() == 1, "{line}");
    }
}

/// The line of openssl in latchd-security(7).
#[test]
fn the_certificate_of_the_manual_serves_and_is_trusted() {
    needs!("openssl");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/man/latchd-security.7");
    let page = fs::read_to_string(page).expect("it is there");
    let (_, recipe) = page.split_once("\nopenssl req ").expect("it is shown");
    let (recipe, _) = recipe.split_once("\n.Ed").expect("it ends");
    let recipe = recipe.replace("\\-", "-").replace("\\e", "\\");
    let directory = tempfile::tempdir().expect("there is room");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("openssl req {recipe}")])
        .current_dir(directory.path());
    let made = shell.output().expect("it runs");
    assert!(made.status.success(), "{made:?}");
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| directory.path().join(name));
    let mode = fs::metadata(&key)
        .expect("it is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let options = [("cert", &cert), ("key", &key)];
    let options = options.map(|(name, path)| format!("--tls-{name}={}", path.display()));
    let daemon = Daemon::start(&[&options[0], &options[1]]);
    assert_eq!(ping(&daemon, &cert), (Some(0), String::new()));
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    needs!("openssl");
    let [cert, key] = common().options();
    for (args, why) in [
        (
            &[&cert, &key, "--port=off", "--unix=here"][..],
            "--tls-cert: there is no port",
        ),
        (&[&cert], "both --tls-cert and --tls-key must be provided"),
    ] {
        let mut command = Daemon::command();
        command.args(args);
        let daemon = Daemon::from_command(command);
        let status = daemon.wait_exit(PATIENCE).expect("it exits");
        assert_eq!(status.code(), Some(2), "{}", daemon.log());
        assert!(daemon.log().contains(why), "{}", daemon.log());
    }
}
