//! TLS with etcd, and with clients that several servers share.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::faults;
use crate::house::{renew, Etcd, Server, TAKE_OVER};
use crate::support::needs::{needs, Program};
use crate::support::tls::{common, TlsClient};
use crate::support::{Client, Daemon, Event, Scheme, PATIENCE};

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
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    let programs = [etcd, etcdctl];
    let files = certificates();
    let etcd = Etcd::start_secured(&programs, files.path());
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

/// Calls `act` with an etcd that asks for certificates, and with the options for it.
fn with_secured_etcd(programs: [Program; 2], act: fn(&Etcd, &[&str])) {
    let files = certificates();
    let etcd = Etcd::start_secured(&programs, files.path());
    let options = options(files.path(), &[]);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    act(&etcd, &options);
}

#[test]
fn authentication_can_be_turned_on_and_off_under_mutual_tls() {
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    with_secured_etcd([etcd, etcdctl], faults::turn_authentication_on_and_off);
}

#[test]
fn a_user_who_may_write_the_prefix_is_enough_under_mutual_tls() {
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    with_secured_etcd([etcd, etcdctl], faults::try_users);
}

#[test]
fn an_etcd_of_another_ca_is_not_believed() {
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    let programs = [etcd, etcdctl];
    let (files, others) = (certificates(), certificates());
    let etcd = Etcd::start_secured(&programs, files.path());
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
fn certificates_for_etcd_that_are_replaced_count_at_once() {
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    let programs = [etcd, etcdctl];
    let (files, replaced) = (certificates(), certificates());
    let etcd = Etcd::start_secured(&programs, files.path());
    let server = start(&etcd, &options(replaced.path(), &[]));
    server.wait_for("error=\"invalid peer certificate: ", 1);
    for name in ["ca.pem", "client.pem", "client.key"] {
        fs::copy(files.path().join(name), replaced.path().join(name)).expect("there is room");
    }
    server.wait_until_active(1);
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
            format!("cannot use the TLS key {other}: it is not the key of the certificate"),
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

// ---------------------------------------------------------------------------------------------
// Clients

fn address(server: &Server) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], server.port))
}

fn encrypted(server: &Server) -> Client {
    Client::open(Scheme::Tls, address(server))
}

/// An active server, and the options that let it and others speak TLS.
fn active(etcd: &Etcd) -> (Server, Vec<String>) {
    let mut options = common().options().to_vec();
    options.push("--read-timeout=5".into());
    let server = start(etcd, &options);
    server.wait_until_active(1);
    (server, options)
}

/// The epoch of the active server, by its own word.
fn epoch(active: &Server) -> String {
    let role = encrypted(active).request("cluster", "_", "_");
    let words: Vec<&str> = role.split(' ').collect();
    assert_eq!(words[..2], ["ok", "active"], "{role}");
    words[2].to_owned()
}

#[test]
fn tls_clients_go_through_a_standby_and_a_failover() {
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    let etcd = Etcd::start(&[etcd, etcdctl], 1);
    let (first, options) = active(&etcd);
    let second = start(&etcd, &options);
    second.wait_for("standby active=", 1);
    let mut holder = encrypted(&second);
    let grant = holder.acquire_for("k", 0, 60);
    // Both doors lead to one table, and behind either the active server answers.
    assert_eq!(encrypted(&first).request("l", "k", "0"), "timeout");
    let role = holder.request("cluster", "_", "_");
    assert_eq!(
        role,
        format!("ok active {} {}", epoch(&first), address(&first))
    );

    first.kill();
    let end = holder.next_event(TAKE_OVER);
    assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    second.wait_until_active(1);
    let mut holder = encrypted(&second);
    assert_eq!(renew(&mut holder, "k", &grant), "ok 60");

    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let again = Server::start_at(first.port, &etcd.endpoints(), &options, None);
    again.wait_for("standby active=", 1);
    let mut other = encrypted(&again);
    assert_eq!(other.request("l", "k", "0"), "timeout");
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    other.acquire("k", 0);
}

#[test]
fn a_plain_client_of_a_tls_cluster_gets_no_byte() {
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    let etcd = Etcd::start(&[etcd, etcdctl], 1);
    let (active, options) = active(&etcd);
    let standby = start(&etcd, &options);
    standby.wait_for("standby active=", 1);
    let greeting = format!("relay\n{}\n_\n", epoch(&active));
    for server in [&active, &standby] {
        for request in ["l\nk\n0\n", "cluster\n_\n_\n", "ping\n_\n_\n", "c", "\n"] {
            let mut client = Client::tcp(address(server));
            client.send(request);
            client.half_close();
            client.expect_eof();
        }
    }
    // Nor does one that speaks as a standby does first.
    for request in [
        format!("{greeting}l\nk\n0\n"),
        format!("{greeting}{greeting}"),
        "relay\n1\n_\n".to_owned(),
        "relay\n_\n".to_owned(),
        "r".to_owned(),
    ] {
        let mut client = Client::tcp(address(&active));
        client.send(&request);
        client.half_close();
        let end = client.next_event(PATIENCE);
        assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    }
    assert_eq!(
        encrypted(&active).request("l", "k", "0").split(' ').next(),
        Some("ok")
    );
}

#[test]
fn tls_begins_after_the_frame_of_a_standby() {
    let [etcd, etcdctl, _openssl] = needs!("etcd", "etcdctl", "openssl");
    let etcd = Etcd::start(&[etcd, etcdctl], 1);
    let (active, _) = active(&etcd);
    let greeting = format!("relay\n{}\n_\n", epoch(&active));
    for cut in [1, 5, 6, greeting.len() - 1, greeting.len()] {
        let mut socket = TcpStream::connect(address(&active)).expect("it listens");
        socket.set_nodelay(true).expect("TCP knows TCP_NODELAY");
        for piece in [&greeting[..cut], &greeting[cut..]] {
            socket.write_all(piece.as_bytes()).expect("it is open");
            // Without a pause, the server would read the pieces as one.
            thread::sleep(Duration::from_millis(30));
        }
        let mut client = TlsClient::over(socket).expect("a handshake");
        client.write_all(b"ping\n_\n_\n").expect("it is open");
        let mut reply = [0; 3];
        client.read_exact(&mut reply).expect("a reply");
        assert_eq!(&reply, b"ok\n", "cut at {cut}");
    }
    // A standby that knows of another epoch takes this server for another.
    let mut socket = TcpStream::connect(address(&active)).expect("it listens");
    socket.write_all(b"relay\n1\n_\n").expect("it is open");
    let reply = TlsClient::over(socket).and_then(|mut client| {
        client.write_all(b"ping\n_\n_\n")?;
        client.read(&mut [0; 3])
    });
    assert!(!matches!(reply, Ok(1..)), "{reply:?}");
}

#[test]
fn a_tls_cluster_has_no_unix_socket() {
    needs!("openssl");
    let mut command = Daemon::command();
    command
        .args(common().options())
        .args(["--port=1", "--advertise=127.0.0.1:1", "--etcd=127.0.0.1:1"])
        .arg("--unix=socket");
    let daemon = Daemon::from_command(command);
    let ended = daemon.wait_exit(TAKE_OVER).expect("it is refused");
    assert_eq!(ended.code(), Some(2));
    let line = daemon.log();
    let expected = "latchd: --unix: with --etcd and TLS there is no Unix socket: ";
    assert!(line.starts_with(expected), "{line}");
}
