//! Locks that the server keeps without a process: `run --at-least`, `reserve`, `acquire`.

use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::reconnecting::{guard_of, listener, Peer, HELLO, TOKEN};
use crate::support::latch::{is_held, output, status, text};
use crate::support::wire_cutter::WireCutter;
use crate::support::{program, Daemon, Scheme};
use latchd::client::{Address, Client, Error, KeepLimit};

#[test]
fn a_server_that_cannot_keep_is_refused_before_the_job() {
    let commands: [&[&str]; 3] = [
        &[
            "run",
            "k",
            "--at-least",
            "60",
            "--",
            "touch",
            "/nowhere/ran",
        ],
        &["acquire", "k"],
        &["reserve", "k", "--for", "1h"],
    ];
    for arguments in commands {
        let (listener, addr) = listener();
        let server = thread::spawn(move || {
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer("error");
            assert!(peer.any_request().starts_with("tag _ "));
            peer.answer("ok");
            peer.grant(60);
        });
        let mut command = Command::new(program("latch"));
        command
            .args(arguments)
            .env("LATCH_SERVER", addr.to_string());
        let refused = output(&mut command);
        server.join().expect("it was asked");
        assert_eq!(refused.status.code(), Some(69), "{arguments:?}");
        let said = text(&refused.stderr);
        assert!(said.contains("the server is too old for this"), "{said}");
    }
}

/// The server may have kept the lock before its answer was lost, and only this process knows the
/// token.
#[test]
fn a_lock_kept_without_an_answer_is_released_by_its_token() {
    let commands: [&[&str]; 2] = [
        &["acquire", "k", "--lease", "3600"],
        &["reserve", "k", "--for", "1h"],
    ];
    for arguments in commands {
        for is_there in [true, false] {
            let (listener, addr) = listener();
            let server = thread::spawn(move || {
                let mut peer = Peer::accept(&listener);
                assert!(peer.request().starts_with("tag _ "));
                peer.answer("ok");
                peer.grant(3600);
                assert_eq!(peer.any_request(), format!("keep k {TOKEN} 3600"));
                if is_there {
                    drop(peer);
                    let mut next = Peer::accept(&listener);
                    assert_eq!(next.any_request(), format!("r k {TOKEN}"));
                    next.answer("ok");
                } else {
                    drop(listener);
                }
            });
            let mut command = Command::new(program("latch"));
            let command = command.args(arguments);
            let failed = output(command.env("LATCH_SERVER", addr.to_string()));
            server.join().expect("it was asked");
            assert_eq!(failed.status.code(), Some(69), "{arguments:?}");
            let said = text(&failed.stderr);
            let expected = format!("k at {addr}: the server closed the connection");
            assert!(said.contains(&expected), "{said}");
            assert!(!said.contains("TLS"), "{said}");
            assert_eq!(said.contains(TOKEN), !is_there, "{said}");
        }
    }
}

#[test]
fn a_guard_leaves_its_lock_to_the_server() {
    let daemon = Daemon::start(&["--max-kept", "1"]);
    let client = Client::new([Address::Tcp(daemon.addr().to_string())]);
    let guard = |key| client.lock(key).keepable().acquire().expect("it is free");
    let first = guard("a");
    let token = first.token();
    first.keep_for(Duration::from_secs(60)).expect("it is kept");
    assert!(is_held(&daemon, "a"));
    let second = guard("b").keep_for(Duration::from_secs(60));
    assert!(
        matches!(second, Err(Error::NotKept(_, KeepLimit::Count))),
        "{second:?}"
    );
    assert!(!is_held(&daemon, "b"));
    guard("b").keep_for(Duration::ZERO).expect("it is released");
    assert!(!is_held(&daemon, "b"));
    assert_eq!(status(&daemon, &["release", "a", &token.to_string()]), 0);
}

#[test]
fn a_lock_that_the_server_does_not_keep_is_released_at_once() {
    for (hello, is_asked) in [("ok adopt", true), ("ok", false)] {
        let (listener, addr) = listener();
        let server = thread::spawn(move || {
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer(hello);
            peer.grant(3600);
            if is_asked {
                assert_eq!(peer.any_request(), "tag _ (ended)");
                peer.answer("ok");
                assert_eq!(peer.any_request(), format!("keep k {TOKEN} 60"));
                peer.answer("error_max_locks");
            }
            assert_eq!(peer.any_request(), format!("r k {TOKEN}"));
            peer.answer("ok");
        });
        let kept = guard_of(&addr.to_string()).keep_for(Duration::from_secs(60));
        if is_asked {
            let is_full = matches!(kept, Err(Error::NotKept(_, KeepLimit::Count)));
            assert!(is_full, "{kept:?}");
        } else {
            assert!(matches!(kept, Err(Error::Unsupported(_))), "{kept:?}");
        }
        server.join().expect("it was asked");
    }
}

/// The command ends while the way to the server is cut.
#[test]
fn a_lock_is_kept_over_a_new_connection() {
    let daemon = Daemon::start_directly(Scheme::Plain, &["--no-auto-release-on-disconnect"]);
    let proxy = WireCutter::before(daemon.addr());
    let client = Client::new([Address::Tcp(proxy.addr().to_string())]);
    let guard = client.lock("k").acquire().expect("it is free");
    proxy.wire().cut();
    guard.keep_for(Duration::from_secs(60)).expect("it is kept");
    let stats = daemon.stats();
    assert_eq!(stats["locks"][0]["owner_conn_id"], 0, "{stats}");
    let left = stats["locks"][0]["lease_expires_in_s"].as_f64();
    assert!(left.is_some_and(|left| left > 40.0), "{stats}");
}

/// A lease of zero would be refused.
#[test]
fn a_lock_whose_time_is_over_before_it_is_kept_is_kept_for_a_second() {
    const TIME: Duration = Duration::from_millis(300);
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        let mut first = Peer::accept(&listener);
        first.grant(60);
        assert_eq!(first.any_request(), "tag _ (ended)");
        thread::sleep(TIME);
        drop(first);
        let mut second = Peer::accept(&listener);
        let mut request = second.request();
        while request == "tag _ (ended)" {
            second.answer("ok");
            request = second.any_request();
        }
        assert_eq!(request, format!("keep k {TOKEN} 1"));
        second.answer("ok 1");
    });
    guard_of(&addr.to_string()).keep_for(TIME).expect("kept");
    server.join().expect("it was asked");
}

#[test]
fn a_kept_lock_is_renewed_and_adopted_by_its_token() {
    let daemon = Daemon::start(&[]);
    let client = Client::new([Address::Tcp(daemon.addr().to_string())]);
    let guard = client.lock("k").acquire().expect("it is free");
    let token = guard.token();
    guard.keep_for(Duration::from_secs(60)).expect("it is kept");
    let lock = client.lock("k").lease(Duration::from_secs(300));
    assert_eq!(lock.renew(token).expect("held").as_secs(), 300);
    let guard = lock.adopt(token).expect("held");
    assert!(guard.is_held() && guard.renew());
    assert_ne!(daemon.stats()["locks"][0]["owner_conn_id"], 0);
    drop(guard);
    assert!(!is_held(&daemon, "k"));
    assert!(matches!(lock.adopt(token), Err(Error::Refused(_))));
    assert!(matches!(lock.renew(token), Err(Error::Refused(_))));
}

#[test]
fn a_reservation_is_given_back_with_secrets_and_sockets() {
    let dir = tempfile::tempdir().expect("there is room for a directory");
    let (socket, secret) = (dir.path().join("sck"), dir.path().join("secret"));
    std::fs::write(&secret, "s3cret\n").expect("it is ours");
    let _daemon = Daemon::start(&[
        "--unix",
        socket.to_str().expect("text"),
        "--auth-token-file",
        secret.to_str().expect("text"),
    ]);
    let latch = || {
        let mut latch = Command::new(program("latch"));
        latch.env_remove("LATCH_SERVER").current_dir(dir.path());
        latch
    };
    let mut reserve = latch();
    reserve.args(["reserve", "a\u{1}b'", "--for", "60", "--json", "--shared"]);
    reserve.args(["--server", "./sck"]);
    let reserved = output(reserve.env("LATCH_AUTH_TOKEN_FILE", "secret"));
    let json: serde_json::Value = serde_json::from_slice(&reserved.stdout).expect("JSON");
    assert_eq!(json["key"], "a\u{1}b'");
    assert_eq!(json["lease_s"], 60);
    let release = json["release"].as_str().expect("a command").to_owned();
    let mut shell = Command::new("bash");
    shell.args(["-c", &release]).current_dir("/");
    let released = output(&mut shell);
    assert_eq!(released.status.code(), Some(0), "{release}: {released:?}");
}
