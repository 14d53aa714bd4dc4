//! Shared locks, several slots at once, and claims that tolerate few waiters.

use std::thread;

use crate::reconnecting::{listener, Peer, HELLO};
use crate::support::latch::{latch, output, run, status, text, Latch};
use crate::support::{eventually, program, waiter_count, Daemon, PATIENCE};
use latchd::client::{Address, Client, Error};

fn client(daemon: &Daemon) -> Client {
    Client::new([Address::Tcp(daemon.addr().to_string())])
}

#[test]
fn shared_locks_are_held_together_and_beside_no_other() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let (shared, whole) = (client.lock("k").shared(), client.lock("k"));
    let readers = [(); 2].map(|()| shared.try_acquire().expect("it answers").expect("free"));
    assert!(whole.try_acquire().expect("it answers").is_none());
    assert_eq!(
        status(&daemon, &["run", "k", "-n", "--shared", "--", "true"]),
        0
    );
    assert_eq!(status(&daemon, &["run", "k", "-n", "--", "true"]), 75);
    drop(readers);
    let writer = whole.try_acquire().expect("it answers").expect("free");
    assert!(shared.try_acquire().expect("it answers").is_none());
    assert_eq!(
        status(&daemon, &["run", "k", "-n", "--shared", "--", "true"]),
        75
    );
    drop(writer);
}

#[test]
fn several_slots_are_taken_at_once() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let pool = client.semaphore("pool", 8);
    let heavy = pool
        .slots(6)
        .try_acquire()
        .expect("it answers")
        .expect("free");
    assert!(pool.slots(3).try_acquire().expect("it answers").is_none());
    let command = [
        "run", "pool", "-n", "--limit", "8", "--slots", "2", "--", "true",
    ];
    assert_eq!(status(&daemon, &command), 0);
    assert!(heavy.renew());
    heavy.release().expect("it is held");
    assert!(pool.slots(8).try_acquire().expect("it answers").is_some());
}

#[test]
fn a_storm_of_triggers_leaves_one_waiter() {
    let daemon = Daemon::start(&[]);
    let guard = client(&daemon).lock("k").acquire().expect("free");
    let trigger = ["run", "k", "--max-waiters", "1", "--busy-ok", "--", "true"];
    let mut waiting = Latch::start(&mut latch(&daemon, &trigger));
    eventually(PATIENCE, "one waits", || {
        waiter_count(&daemon.stats(), "k") == 1
    });
    let next = run(&daemon, &trigger);
    assert_eq!((next.status.code(), &*text(&next.stderr)), (Some(0), ""));
    let busy = run(&daemon, &["run", "k", "--max-waiters", "1", "--", "true"]);
    assert_eq!(busy.status.code(), Some(75));
    guard.release().expect("it is held");
    assert_eq!(waiting.wait().expect("a child").code(), Some(0));
}

#[test]
fn what_makes_no_sense_is_not_sent() {
    let client = Client::new([Address::Tcp("127.0.0.1:1".into())]);
    for lock in [
        client.lock("k").slots(2),
        client.semaphore("k", 2).shared(),
        client.semaphore("k", 2).slots(3),
        client.semaphore("k", 2).slots(0),
    ] {
        let refused = lock.try_acquire();
        assert!(
            matches!(refused, Err(Error::InvalidArgument(_))),
            "{refused:?}"
        );
    }
}

#[test]
fn an_older_server_is_refused_before_the_command() {
    for option in [&["--shared"][..], &["--max-waiters", "1"]] {
        let (listener, addr) = listener();
        let server = thread::spawn(move || {
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer("ok adopt");
            assert!(peer.any_request().starts_with("tag _ "));
            peer.answer("ok");
            assert!(peer.any_request().starts_with("l k "));
            assert_eq!(peer.any_request().trim(), "", "it hangs up");
        });
        let addr = addr.to_string();
        let mut command = std::process::Command::new(program("latch"));
        command.args(["run", "k"]).args(option);
        command.args(["--server", &addr, "--", "true"]);
        let refused = output(&mut command);
        assert_eq!(refused.status.code(), Some(69), "{refused:?}");
        server.join().expect("it was asked");
    }
}
