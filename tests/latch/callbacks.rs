//! Callbacks that panic, take their time, or use their guard. The server grants and is silent then.

use std::panic::{catch_unwind, panic_any, AssertUnwindSafe};
use std::sync::{mpsc, Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::reconnecting::{guard_of, listener, Peer};
use crate::support::stalls::fair_test;
use crate::support::PATIENCE;
use latchd::client::{Error, Guard, Loss};

/// The time from the callback for silence to the loss.
const LEAD: Duration = Duration::from_secs(2);

/// A guard whose lease is twice [`LEAD`], and the server's side of its connection.
fn guard_of_silent_server() -> (Guard, Peer) {
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        let mut peer = Peer::accept(&listener);
        peer.grant(2 * LEAD.as_secs());
        peer
    });
    let guard = guard_of(&addr.to_string());
    (guard, server.join().expect("no panic"))
}

/// The verb of the next request; empty at the end of the connection.
fn verb(peer: &mut Peer) -> String {
    peer.request().split(' ').next().expect("one").to_owned()
}

/// What `act` returns, which may take until the end of the lease, but not for ever.
fn in_time<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, done) = mpsc::channel();
    thread::spawn(move || sender.send(act()));
    done.recv_timeout(PATIENCE).expect("it hangs, or panics")
}

#[test]
fn a_panic_in_a_callback_loses_the_lock_and_is_told() {
    fair_test(a_panic_in_a_callback_loses_the_lock_and_is_told_once);
}

fn a_panic_in_a_callback_loses_the_lock_and_is_told_once() {
    let (guard, mut peer) = guard_of_silent_server();
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| sender.send(loss).expect("a listener"));
    assert!(guard.on_silence(LEAD, || panic!("a panic of the test")));
    assert_eq!(losses.recv_timeout(PATIENCE), Ok(Loss::Closed));
    assert!(!guard.is_held());
    assert_eq!(guard.loss(), Some(Loss::Closed));
    assert!(!in_time(move || guard.renew()));
    assert_eq!(verb(&mut peer), "n");
    assert_eq!(verb(&mut peer), "");
}

/// What `act` returns in the callback for silence of this guard, which it may take.
fn in_callback<T: Send + 'static>(
    guard: &Arc<Mutex<Option<Guard>>>,
    act: impl FnOnce(&mut Option<Guard>) -> T + Send + 'static,
) -> T {
    let (sender, done) = mpsc::channel();
    let shared = Arc::clone(guard);
    let callback = move || {
        let result = act(&mut shared.lock().expect("no panic"));
        sender.send(result).expect("a listener");
    };
    if let Some(guard) = &*guard.lock().expect("no panic") {
        assert!(guard.on_silence(LEAD, callback));
    }
    done.recv_timeout(PATIENCE).expect("it hangs, or panics")
}

#[test]
fn a_callback_that_renews_does_not_wait_for_its_own_thread() {
    fair_test(a_callback_that_renews_does_not_wait_for_its_own_thread_once);
}

fn a_callback_that_renews_does_not_wait_for_its_own_thread_once() {
    let (guard, mut peer) = guard_of_silent_server();
    let guard = Arc::new(Mutex::new(Some(guard)));
    assert!(in_callback(&guard, |guard| guard
        .as_ref()
        .is_some_and(Guard::renew)));
    // The renewal that the callback asked for follows the one that was late.
    for _ in 0..2 {
        assert_eq!(verb(&mut peer), "n");
        peer.answer("ok 3600");
    }
    assert!(guard
        .lock()
        .expect("no panic")
        .as_ref()
        .is_some_and(Guard::is_held));
    drop(peer);
}

#[test]
fn a_release_in_a_callback_follows_it() {
    fair_test(a_release_in_a_callback_follows_it_once);
}

fn a_release_in_a_callback_follows_it_once() {
    let (guard, mut peer) = guard_of_silent_server();
    let guard = Arc::new(Mutex::new(Some(guard)));
    let released = in_callback(&guard, |guard| guard.take().map(Guard::release));
    assert!(matches!(released, Some(Ok(()))), "{released:?}");
    assert_eq!(verb(&mut peer), "n");
    peer.answer("ok 4");
    assert_eq!(verb(&mut peer), "r");
}

#[test]
fn a_release_waits_for_no_callback_for_a_loss() {
    for is_dropped in [false, true] {
        let (guard, mut peer) = guard_of_silent_server();
        let (sender, losses) = mpsc::channel();
        let (done, end) = mpsc::channel::<()>();
        guard.on_lost(move |loss| {
            sender.send(loss).expect("a listener");
            let _ = end.recv_timeout(PATIENCE);
            // Only now does the callback return.
            let _ = sender.send(loss);
        });
        assert_eq!(verb(&mut peer), "n");
        peer.answer("error");
        assert_eq!(losses.recv_timeout(PATIENCE), Ok(Loss::Refused));
        in_time(move || {
            if is_dropped {
                drop(guard)
            } else {
                assert!(matches!(guard.release(), Err(Error::Lost(..))))
            }
        });
        assert!(losses.try_recv().is_err(), "the callback has returned");
        drop(done);
    }
}

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a panic of the test");
    }
}

#[test]
fn a_panic_in_what_a_callback_holds_prevents_no_release() {
    fair_test(a_panic_in_what_a_callback_holds_prevents_no_release_once);
}

fn a_panic_in_what_a_callback_holds_prevents_no_release_once() {
    let (guard, mut peer) = guard_of_silent_server();
    let bomb = Bomb;
    guard.on_lost(move |_| drop(bomb));
    let released = thread::spawn(move || {
        assert_eq!(verb(&mut peer), "r");
        peer.answer("ok");
    });
    let dropped = catch_unwind(AssertUnwindSafe(|| drop(guard)));
    assert!(dropped.is_err());
    released.join().expect("it is released");
}

#[test]
fn a_panic_with_what_panics_again_loses_the_lock_and_is_told() {
    fair_test(a_panic_with_what_panics_again_loses_the_lock_and_is_told_once);
}

fn a_panic_with_what_panics_again_loses_the_lock_and_is_told_once() {
    let (guard, peer) = guard_of_silent_server();
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| sender.send(loss).expect("a listener"));
    assert!(guard.on_silence(LEAD, || panic_any(Bomb)));
    assert_eq!(losses.recv_timeout(PATIENCE), Ok(Loss::Closed));
    assert!(!in_time(move || guard.renew()));
    drop(peer);
}
