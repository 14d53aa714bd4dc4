//! What the TLS tests of existing clients check, and the same for `latch` and `latchd::client`.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::Duration;

use latchd::client::{Address, CancelHandle, Client, Connection, Error, Settings, Slot, Tls, Wait};

use rustix::process::kill_process;
use rustix::thread::gettid;
use rustls::ServerConnection;
use signal_hook::consts::SIGUSR1;

use crate::support::needs::needs;
use crate::support::stalls::{fair_test, in_time};
use crate::support::tls::{common, serving, Set};
use crate::support::{eventually, program, Daemon, Scheme, Signal, PATIENCE};

fn daemon() -> Daemon {
    Daemon::start_over(Scheme::Tls, &[])
}

fn address(host: &str, daemon: &Daemon) -> Address {
    let address = format!("{host}:{}", daemon.port());
    address.parse().expect("an address")
}

fn trusting(set: &Set) -> Settings {
    let mut settings = Settings::default();
    settings.tls = Some(Tls::with_ca_file(set.ca()).expect("it is a CA"));
    settings
}

fn client(daemon: &Daemon) -> Client {
    Client::with_settings([address("localhost", daemon)], trusting(common()))
}

#[test]
fn a_lock_is_granted_and_released_over_tls() {
    needs!("openssl");
    let daemon = daemon();
    let client = client(&daemon);
    let guard = client.lock("k").acquire().expect("it is free");
    let taken = client.lock("k").try_acquire().expect("an answer");
    assert!(taken.is_none());
    guard.release().expect("it is held");
    let again = client.lock("k").try_acquire().expect("an answer");
    assert!(again.is_some());
}

#[test]
fn a_token_to_see_takes_no_lock_over_tls() {
    needs!("openssl");
    let directory = tempfile::tempdir().expect("there is room");
    let file = directory.path().join("tokens");
    fs::write(&file, "screen see\n").expect("there is room");
    let file = file.to_str().expect("UTF-8");
    let daemon = Daemon::start_over(Scheme::Tls, &["--auth-token-file", file]);
    let mut settings = trusting(common());
    settings.auth_token = Some("screen".to_owned());
    let client = Client::with_settings([address("localhost", &daemon)], settings.clone());
    let refused = client.lock("k").try_acquire();
    assert!(matches!(refused, Err(Error::NotAllowed(_))), "{refused:?}");
    let mut screen =
        Connection::open(&address("localhost", &daemon), &settings).expect("it is let in");
    let stats = screen.stats().expect("it may see");
    assert!(!stats.contains("\"k\""), "{stats}");
}

#[test]
fn a_client_without_tls_is_refused() {
    needs!("openssl");
    let daemon = daemon();
    let client = Client::new([address("localhost", &daemon)]);
    let refused = client.lock("k").try_acquire();
    assert!(matches!(refused, Err(Error::Closed { .. })), "{refused:?}");
}

#[test]
fn a_server_without_tls_is_refused() {
    needs!("openssl");
    let daemon = Daemon::start(&["--read-timeout=600"]);
    // Some handshakes have the end of a line in them.
    for _ in 0..20 {
        let refused = Connection::open(&address("localhost", &daemon), &trusting(common()));
        assert!(
            matches!(refused, Err(Error::Untrusted { .. })),
            "{refused:?}"
        );
    }
    let mut connection = daemon.connect();
    connection.send("\x16");
    connection.expect("error");
    connection.expect_eof();
}

#[test]
fn a_server_of_another_ca_is_refused() {
    needs!("openssl");
    let daemon = daemon();
    let refused = Connection::open(&address("localhost", &daemon), &trusting(&Set::new()));
    let error = refused.expect_err("the CA is not trusted");
    let text = error.to_string();
    assert!(matches!(error, Error::Untrusted { .. }), "{text}");
    assert!(
        text.contains("TLS failed: invalid peer certificate: "),
        "{text}"
    );
}

#[test]
fn a_ca_file_that_has_changed_is_read_again() {
    needs!("openssl");
    let (before, after) = (Set::new(), Set::new());
    let ca = before.path("trusted");
    fs::copy(before.ca(), &ca).expect("there is room");
    let mut settings = Settings::default();
    settings.tls = Some(Tls::with_ca_file(&ca).expect("it is a CA"));
    let asks = |set: &Set| {
        let options = set.options();
        let daemon = Daemon::start_directly(Scheme::Plain, &[&options[0], &options[1]]);
        let client = Client::with_settings([address("localhost", &daemon)], settings.clone());
        let asked = client.lock("k").try_acquire();
        asked.map(|guard| guard.is_some())
    };
    assert!(matches!(asks(&before), Ok(true)));
    assert!(matches!(asks(&after), Err(Error::Untrusted { .. })));
    fs::copy(after.ca(), &ca).expect("there is room");
    assert!(matches!(asks(&after), Ok(true)));
    // What cannot be used leaves what could.
    fs::write(&ca, "nothing").expect("there is room");
    assert!(matches!(asks(&after), Ok(true)));
}

#[test]
fn settings_that_cannot_be_used_are_refused() {
    needs!("openssl");
    let set = Set::new();
    fs::write(set.path("empty"), "").expect("there is room");
    for file in [set.path("none"), set.path("empty"), set.key()] {
        let refused = Tls::with_ca_file(&file);
        assert!(matches!(refused, Err(Error::CaFile(..))), "{refused:?}");
    }
    let tls = Tls::with_ca_file(set.ca()).expect("it is a CA");
    for name in ["", "a b", "-"] {
        let refused = tls.clone().server_name(name);
        assert!(
            matches!(refused, Err(Error::InvalidArgument(_))),
            "{refused:?}"
        );
    }
}

#[test]
fn a_connection_over_tls_checks_the_name() {
    needs!("openssl");
    let daemon = daemon();
    for host in ["localhost", "127.0.0.1"] {
        let opened = Connection::open(&address(host, &daemon), &trusting(common()));
        opened
            .expect("the name is in the certificate")
            .ping()
            .expect("an answer");
    }
    let named = |name: &str| {
        let mut settings = trusting(common());
        settings.tls = settings
            .tls
            .map(|tls| tls.server_name(name).expect("a name"));
        Connection::open(&address("127.0.0.1", &daemon), &settings)
    };
    named("localhost").expect("it is in the certificate");
    let refused = named("example.org");
    assert!(
        matches!(refused, Err(Error::Untrusted { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_waiter_over_tls_gets_its_turn() {
    needs!("openssl");
    let daemon = daemon();
    let client = client(&daemon);
    let guard = client.lock("k").acquire().expect("it is free");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| client.lock("k").tag("second").acquire());
        daemon.wait_for_waiters("k", 1);
        guard.release().expect("it is held");
        let waited = waiting.join().expect("it does not panic");
        assert!(waited.expect("its turn").is_held());
    });
    let guard = client.lock("k").acquire();
    let server = &client.servers()[0];
    let mut connection = client.connect(server).expect("reachable");
    connection.enqueue("k", Slot::LOCK).expect("a place");
    drop(guard);
    let waited = connection.wait("k", Slot::LOCK, Wait::UpTo(PATIENCE));
    assert!(matches!(waited, Ok(Some(_))), "{waited:?}");
}

#[test]
fn a_semaphore_over_tls_has_its_limit() {
    needs!("openssl");
    let daemon = daemon();
    let client = client(&daemon);
    let pool = client.semaphore("pool", 2);
    let slots = [pool.acquire(), pool.acquire()].map(|slot| slot.expect("two are free"));
    assert!(pool.try_acquire().expect("an answer").is_none());
    drop(slots);
    assert!(pool.try_acquire().expect("an answer").is_some());
}

#[test]
fn a_guard_renews_over_tls() {
    needs!("openssl");
    fair_test(a_guard_renews_over_tls_once);
}

fn a_guard_renews_over_tls_once() {
    let daemon = daemon();
    let client = client(&daemon);
    // A busy machine may hold up the renewal for a second or two.
    let lease = Duration::from_secs(4);
    let guard = client.lock("k").lease(lease).acquire().expect("it is free");
    thread::sleep(lease * 5 / 4);
    in_time!(guard.is_held());
    assert!(client.lock("k").try_acquire().expect("an answer").is_none());
    drop(daemon);
    eventually(PATIENCE, "the end is noticed", || !guard.is_held());
}

/// A server may change its keys at any time. That makes the socket readable, and is no reply.
#[test]
fn a_guard_outlives_a_change_of_keys() {
    needs!("openssl");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("it is bound").port();
    let (proceed, go_on) = mpsc::channel::<()>();
    let (sent, has_sent) = mpsc::channel();
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("a client comes");
        let mut session = ServerConnection::new(serving(common())).expect("it is valid");
        let mut tls = rustls::Stream::new(&mut session, &mut socket);
        let mut request = [0; 256];
        let len = tls.read(&mut request).expect("a request");
        assert!(request[..len].starts_with(b"hello\n_\nadopt broken not_written\nl\nk\n"));
        let grant = format!("ok adopt\nok {} 600\n", "0123456789abcdef".repeat(2));
        tls.write_all(grant.as_bytes()).expect("a reader");
        let _ = go_on.recv();
        tls.conn.refresh_traffic_keys().expect("it is TLS 1.3");
        tls.flush().expect("a reader");
        sent.send(()).expect("the test waits");
        for (command, reply) in [("n", "ok 600\n"), ("r", "ok\n")] {
            let len = tls.read(&mut request).expect("a request");
            assert!(request[..len].starts_with(format!("{command}\nk\n").as_bytes()));
            tls.write_all(reply.as_bytes()).expect("a reader");
        }
    });
    let address = format!("127.0.0.1:{port}").parse::<Address>();
    let client = Client::with_settings([address.expect("an address")], trusting(common()));
    let guard = client.lock("k").tag("").acquire().expect("it is free");
    proceed.send(()).expect("the server waits");
    has_sent.recv().expect("the server goes on");
    // The reply comes behind the new keys.
    assert!(guard.renew() && guard.is_held());
    guard.release().expect("it is held");
    server.join().expect("it does not panic");
}

/// Otherwise the auth token would go over the network in clear.
#[test]
fn a_guard_speaks_tls_over_its_next_connection_too() {
    needs!("openssl");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("it is bound").port();
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("a client comes");
        let mut session = ServerConnection::new(serving(common())).expect("it is valid");
        let mut tls = rustls::Stream::new(&mut session, &mut socket);
        assert!(tls.read(&mut [0; 256]).expect("a request") > 0);
        let grant = format!("ok adopt\nok {} 600\n", "0123456789abcdef".repeat(2));
        tls.write_all(grant.as_bytes()).expect("a reader");
        drop(socket);
        let (mut socket, _) = listener.accept().expect("the guard comes again");
        let mut first = [0];
        socket.read_exact(&mut first).expect("it speaks");
        first[0]
    });
    let address = format!("127.0.0.1:{port}").parse::<Address>();
    let client = Client::with_settings([address.expect("an address")], trusting(common()));
    let _guard = client.lock("k").tag("").acquire().expect("it is free");
    let handshake = 22;
    assert_eq!(server.join().expect("it does not panic"), handshake);
}

#[test]
fn the_servers_of_a_cluster_are_asked_over_tls() {
    needs!("openssl");
    let daemon = daemon();
    let port = daemon.port();
    let cluster = format!("127.0.0.1:1|localhost:{port}").parse::<Address>();
    let client = Client::with_settings([cluster.expect("two addresses")], trusting(common()));
    let guard = client.lock("k").acquire().expect("it is free");
    guard.release().expect("it is held");
}

/// A program that handles signals may get one while the server computes its part.
#[test]
fn a_signal_does_not_end_a_handshake() {
    needs!("openssl");
    let caught = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGUSR1, Arc::clone(&caught)).expect("it can be handled");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("it is bound").port();
    let address: Address = format!("localhost:{port}").parse().expect("an address");
    let (sender, started) = mpsc::channel();
    let client = thread::spawn(move || {
        sender.send(gettid()).expect("the test waits");
        Connection::open(&address, &trusting(common())).map(drop)
    });
    let thread_id = started.recv().expect("the client starts");
    let (mut socket, _) = listener.accept().expect("a client comes");
    // The client has sent its part, and waits.
    socket.peek(&mut [0]).expect("a part of a handshake");
    for _ in 0..20 {
        // The kernel prefers the thread with this number.
        kill_process(thread_id, Signal::USR1).expect("it waits");
        thread::sleep(Duration::from_millis(10));
        assert!(!client.is_finished(), "{:?}", client.join());
    }
    assert!(caught.load(Ordering::Relaxed));
    let mut session = ServerConnection::new(serving(common())).expect("it is valid");
    let shaken = session.complete_io(&mut socket);
    let opened = client.join().expect("it does not panic");
    assert!(opened.is_ok(), "{opened:?}, {shaken:?}");
}

/// What TLS sends after the handshake makes the socket readable, and is no reply.
#[test]
fn a_wait_over_tls_can_be_cancelled() {
    needs!("openssl");
    let daemon = daemon();
    let client = client(&daemon);
    let _guard = client.lock("k").acquire().expect("it is free");
    let handle = CancelHandle::new().expect("descriptors are left");
    let (sender, waited) = mpsc::channel();
    let waiter = (client.clone(), handle.clone());
    thread::spawn(move || {
        let (client, handle) = waiter;
        let _ = sender.send(client.lock("k").cancelled_by(&handle).acquire());
    });
    daemon.wait_for_waiters("k", 1);
    handle.cancel();
    let waited = waited.recv_timeout(PATIENCE).expect("it ends the wait");
    assert!(matches!(waited, Err(Error::Cancelled)), "{waited:?}");
    daemon.wait_for_waiters("k", 0);
}

#[test]
fn long_replies_come_whole_over_tls() {
    needs!("openssl");
    let daemon = daemon();
    let mut connection = client(&daemon)
        .connect(&address("localhost", &daemon))
        .expect("it listens");
    for at in 0..200 {
        let key = format!("{at:0>200}");
        let granted = connection.acquire(&key, Slot::LOCK, Wait::No);
        granted.expect("an answer").expect("it is free");
    }
    let holders = connection.holders(None).expect("an answer");
    assert_eq!(holders.matches("\"key\"").count(), 200);
}

/// Names and values.
type Variables<'a> = &'a [(&'a str, &'a str)];

fn latch(daemon: &Daemon, arguments: &[&str], variables: Variables<'_>) -> Output {
    let mut command = Command::new(program("latch"));
    for name in [
        "LATCH_TLS",
        "LATCH_TLS_CA",
        "LATCH_TLS_NAME",
        "SSL_CERT_FILE",
    ] {
        command.env_remove(name);
    }
    command.env("LATCH_SERVER", format!("127.0.0.1:{}", daemon.port()));
    command.args(arguments).envs(variables.iter().copied());
    command.output().expect("it was built by cargo")
}

#[test]
fn latch_takes_tls_from_options_and_variables() {
    needs!("openssl");
    let daemon = daemon();
    let ca = common().ca();
    let ca = ca.to_str().expect("it is UTF-8");
    let good: [(&[&str], Variables<'_>); 6] = [
        (&["--tls-ca", ca], &[]),
        (&[], &[("LATCH_TLS_CA", ca)]),
        (&["--tls"], &[("SSL_CERT_FILE", ca)]),
        (&[], &[("LATCH_TLS", "yes"), ("SSL_CERT_FILE", ca)]),
        (&["--tls-name=localhost"], &[("LATCH_TLS_CA", ca)]),
        (&["--tls-ca", ca], &[("LATCH_TLS_NAME", "localhost")]),
    ];
    for (options, variables) in good {
        let arguments = [&["run", "k"], options, &["--", "echo", "done"]].concat();
        let output = latch(&daemon, &arguments, variables);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.stdout, b"done\n",
            "{options:?} {variables:?}: {said}"
        );
    }
    let bad: [(&[&str], Variables<'_>, i32, &str); 6] = [
        (&[], &[], 69, "the server closed the connection"),
        (
            &["--tls=no"],
            &[("LATCH_TLS_CA", ca)],
            69,
            "the server closed the connection",
        ),
        (
            &[],
            &[("LATCH_TLS_CA", "none.pem")],
            74,
            "cannot use the CA file none.pem: no such file or directory",
        ),
        (
            &["--tls-ca", ca, "--tls-name=x y"],
            &[],
            64,
            "is not a host name",
        ),
        (
            &["--tls-ca", ca, "--tls-name=example.org"],
            &[],
            76,
            "TLS failed: ",
        ),
        (
            &[],
            &[("LATCH_TLS", "perhaps")],
            64,
            "invalid value 'perhaps' for LATCH_TLS: expected yes or no",
        ),
    ];
    for (options, variables, status, why) in bad {
        let output = latch(&daemon, &[&["ping"], options].concat(), variables);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(status),
            "{options:?} {variables:?}: {said}"
        );
        assert!(said.contains(why), "{options:?} {variables:?}: {said}");
    }
}

#[test]
fn a_unix_socket_beside_tls_stays_plain() {
    needs!("openssl");
    let directory = tempfile::tempdir().expect("there is room for a directory");
    let path = directory.path().join("sock");
    let option = format!("--unix={}", path.display());
    let daemon = Daemon::start_over(Scheme::Tls, &[&option]);
    assert_eq!(
        crate::support::Client::unix(&path).request("ping", "_", "_"),
        "ok"
    );
    let server = Address::Unix(path);
    let opened = Connection::open(&server, &trusting(common()));
    opened.expect("it listens").ping().expect("an answer");
    drop(daemon);
}
