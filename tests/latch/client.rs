//! The client library against a real server.

use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::panic::resume_unwind;
use std::sync::{mpsc, Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::silent::{refusing_addr, FullBacklog};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, Daemon, Signal, PATIENCE};
use latchd::client::{
    Address, CancelHandle, Client, Connection, Enqueued, Error, Guard, Loss, Settings, Slot, Wait,
};

fn client(daemon: &Daemon) -> Client {
    Client::new([address(daemon)])
}

fn address(daemon: &Daemon) -> Address {
    Address::Tcp(daemon.addr().to_string())
}

#[test]
fn a_guard_holds_until_it_is_dropped() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let guard = client.lock("k").acquire().expect("free");
    assert!(guard.is_held());
    assert!(client.lock("k").try_acquire().expect("an answer").is_none());
    drop(guard);
    let again = client
        .lock("k")
        .try_acquire()
        .expect("an answer")
        .expect("free again");
    again.release().expect("still ours");
}

#[test]
fn the_fences_of_successive_guards_rise() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let fences: Vec<u64> = (0..5)
        .map(|_| client.lock("k").acquire().expect("free").token().fence())
        .collect();
    assert!(
        fences.windows(2).all(|pair| pair[0] < pair[1]),
        "{fences:?}"
    );
}

#[test]
fn a_semaphore_has_as_many_guards_as_its_limit() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let pool = client.semaphore("pool", 2);
    let _guards = [
        pool.acquire().expect("a slot"),
        pool.acquire().expect("a slot"),
    ];
    assert!(pool.try_acquire().expect("an answer").is_none());
    assert!(matches!(
        client.semaphore("pool", 3).try_acquire(),
        Err(Error::LimitMismatch(_))
    ));
    assert!(matches!(
        client.lock("pool").try_acquire(),
        Err(Error::LimitMismatch(_))
    ));
}

#[test]
fn a_lease_is_renewed_in_the_background_and_its_length_kept() {
    fair_test(a_lease_is_renewed_in_the_background_and_its_length_kept_once);
}

fn a_lease_is_renewed_in_the_background_and_its_length_kept_once() {
    let daemon = Daemon::start(&["--default-lease-ttl", "60"]);
    let guard = client(&daemon)
        .lock("k")
        .lease(Duration::from_secs(1))
        .acquire()
        .expect("free");
    assert_eq!(guard.lease(), Duration::from_secs(1));
    thread::sleep(Duration::from_millis(2500));
    assert!(guard.is_held());
    let left = daemon.stats()["locks"][0]["lease_expires_in_s"]
        .as_f64()
        .expect("a number");
    assert!(left <= 1.0, "{left}");
}

#[test]
fn the_end_of_the_server_is_told_at_once() {
    fair_test(the_end_of_the_server_is_told_at_once_once);
}

fn the_end_of_the_server_is_told_at_once_once() {
    let daemon = Daemon::start_alone(&[]);
    let guard = client(&daemon).lock("k").acquire().expect("free");
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| sender.send(loss).expect("a listener"));
    let ended = Instant::now();
    drop(daemon);
    assert_eq!(losses.recv_timeout(PATIENCE), Ok(Loss::Closed));
    in_time!(
        ended.elapsed() < Duration::from_secs(5),
        "it waited for a renewal"
    );
    assert!(!guard.is_held());
    assert_eq!(guard.loss(), Some(Loss::Closed));
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| sender.send(loss).expect("a listener"));
    assert_eq!(losses.try_recv(), Ok(Loss::Closed));
    assert!(guard.release().is_err());
}

#[test]
fn a_stopped_server_is_a_loss_before_the_lease_can_end() {
    fair_test(a_stopped_server_is_a_loss_before_the_lease_can_end_once);
}

fn a_stopped_server_is_a_loss_before_the_lease_can_end_once() {
    let daemon = Daemon::start(&[]);
    let lease = Duration::from_secs(2);
    let guard = client(&daemon)
        .lock("k")
        .lease(lease)
        .acquire()
        .expect("free");
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| sender.send((loss, Instant::now())).expect("a listener"));
    daemon.signal(Signal::STOP);
    let stopped = Instant::now();
    let (loss, at) = losses.recv_timeout(PATIENCE).expect("a loss");
    daemon.signal(Signal::CONT);
    assert_eq!(loss, Loss::Deadline);
    assert!(
        at - stopped <= lease,
        "told {:?} after the server stood still",
        at - stopped
    );
    assert!(!guard.is_held());
}

#[test]
fn a_silent_server_is_told_before_the_lock_counts_as_lost() {
    fair_test(a_silent_server_is_told_before_the_lock_counts_as_lost_once);
}

fn a_silent_server_is_told_before_the_lock_counts_as_lost_once() {
    let daemon = Daemon::start(&[]);
    let lease = Duration::from_secs(6);
    let lock = client(&daemon);
    let guard = lock.lock("k").lease(lease).acquire().expect("free");
    let (sender, told) = mpsc::channel();
    let told_of = |number: u32| {
        let sender = sender.clone();
        move || sender.send((number, Instant::now())).expect("a listener")
    };
    assert!(!guard.on_silence(Duration::from_millis(3001), told_of(1)));
    assert!(guard.on_silence(Duration::from_secs(1), told_of(2)));
    // It would be told after 3.5 seconds.
    thread::sleep(Duration::from_secs(4));
    assert!(told.try_recv().is_err(), "the server answers");
    let (lost, losses) = mpsc::channel();
    guard.on_lost(move |_| lost.send(Instant::now()).expect("a listener"));
    daemon.signal(Signal::STOP);
    let (number, told_at) = told.recv_timeout(PATIENCE).expect("told");
    let lost_at = losses.recv_timeout(PATIENCE).expect("lost");
    daemon.signal(Signal::CONT);
    assert_eq!(number, 2);
    let lead = lost_at - told_at;
    assert!(lead > Duration::from_millis(500), "{lead:?}");
    assert!(told.try_recv().is_err(), "told once");
}

#[test]
fn a_release_elsewhere_is_a_loss_at_the_next_renewal() {
    let daemon = Daemon::start(&[]);
    let guard = client(&daemon)
        .lock("k")
        .lease(Duration::from_secs(1))
        .acquire()
        .expect("free");
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| sender.send(loss).expect("a listener"));
    assert_eq!(
        daemon
            .connect()
            .request("r", "k", &guard.token().to_string()),
        "ok"
    );
    assert_eq!(losses.recv_timeout(PATIENCE), Ok(Loss::Refused));
}

#[test]
fn a_bounded_wait_ends_and_a_queue_place_can_be_waited_for() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let guard = client.lock("k").acquire().expect("free");
    assert!(client
        .lock("k")
        .acquire_within(Duration::from_secs(1))
        .expect("an answer")
        .is_none());
    let mut connection = client.connect(&address(&daemon)).expect("reachable");
    let enqueued = connection.enqueue("k", Slot::LOCK).expect("a place");
    assert_eq!(enqueued, Enqueued::Queued);
    drop(guard);
    let next = connection.wait("k", Slot::LOCK, Wait::UpTo(Duration::from_secs(10)));
    assert!(next.expect("an answer").is_some());
    let enqueued = connection.enqueue("free", Slot::LOCK).expect("a place");
    assert!(matches!(enqueued, Enqueued::Acquired(_)));
    let granted = connection.wait("free", Slot::LOCK, Wait::No);
    assert!(granted.expect("an answer").is_some());
}

#[test]
fn a_missing_reply_closes_the_connection() {
    let daemon = Daemon::start(&[]);
    let mut settings = Settings::default();
    settings.reply_timeout = Duration::from_secs(2);
    let client = Client::with_settings([address(&daemon)], settings);
    let mut connection = client.connect(&client.servers()[0]).expect("reachable");
    connection.ping().expect("an answer");
    daemon.signal(Signal::STOP);
    let mut error = None;
    eventually(2 * PATIENCE, "the signal has stopped every thread", || {
        error = connection.ping().err();
        error.is_some()
    });
    assert!(matches!(error, Some(Error::NoReply { .. })), "{error:?}");
    daemon.signal(Signal::CONT);
    assert!(matches!(connection.ping(), Err(Error::Closed { .. })));
}

#[test]
fn an_invalid_key_or_lease_is_not_sent() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    for key in ["", "a b", "a\nb", "a\tb", &"k".repeat(257)] {
        assert!(
            matches!(client.lock(key).try_acquire(), Err(Error::InvalidKey)),
            "{key:?}"
        );
    }
    let zero = client.lock("k").lease(Duration::ZERO).try_acquire();
    assert!(matches!(zero, Err(Error::InvalidArgument(_))));
}

#[test]
fn each_refusal_of_the_server_has_its_error() {
    let daemon = Daemon::start_alone(&["--max-locks", "1", "--max-waiters", "1"]);
    let client = client(&daemon);
    let _guard = client.lock("k").acquire().expect("free");
    assert!(matches!(
        client.lock("other").try_acquire(),
        Err(Error::MaxLocks(_))
    ));
    let connect = || client.connect(&address(&daemon)).expect("reachable");
    let (mut first, mut second) = (connect(), connect());
    first.enqueue("k", Slot::LOCK).expect("a place");
    let refused = second.enqueue("k", Slot::LOCK);
    assert!(matches!(refused, Err(Error::MaxWaiters(_))), "{refused:?}");
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("draining", PATIENCE);
    assert!(matches!(
        client.lock("k").try_acquire(),
        Err(Error::Draining(_))
    ));
}

#[test]
fn renewals_from_many_threads_are_all_sent_at_once() {
    let daemon = Daemon::start(&[]);
    let guard = client(&daemon)
        .lock("k")
        .lease(Duration::from_secs(120))
        .acquire()
        .expect("free");
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..50).for_each(|_| assert!(guard.renew())));
        }
    });
    // A renewal that is missed would wait for the next one, which is due in about a minute.
    in_time!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}

/// A client of a server that gives these answers to any requests, and then no more. The server
/// accepts one connection.
fn client_of_liar(answers: &'static [&'static str]) -> Client {
    client_of_slow_liar(Duration::ZERO, answers).0
}

/// The same with a delay before each answer; the channel has the time of each request.
fn client_of_slow_liar(
    delay: Duration,
    answers: &'static [&'static str],
) -> (Client, mpsc::Receiver<Instant>) {
    let (sender, asked) = mpsc::channel();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let reader = BufReader::new(stream.try_clone().expect("a descriptor"));
        let mut lines = reader.lines();
        for answer in answers {
            loop {
                let request: Vec<String> = lines.by_ref().take(3).map_while(Result::ok).collect();
                match request.first().map(String::as_str) {
                    None => return,
                    Some("hello") => {
                        let _ = stream.write_all(b"error\n");
                    }
                    Some(_) => break,
                }
            }
            let _ = sender.send(Instant::now());
            thread::sleep(delay);
            let _ = stream.write_all(answer.as_bytes());
        }
        drop(sender);
        lines.for_each(drop);
    });
    (Client::new([Address::Tcp(address.to_string())]), asked)
}

#[test]
fn a_lease_is_counted_from_its_request_not_from_a_late_reply() {
    fair_test(a_lease_is_counted_from_its_request_not_from_a_late_reply_once);
}

fn a_lease_is_counted_from_its_request_not_from_a_late_reply_once() {
    const GRANT: &str = "ok 0123456789abcdef0123456789abcdef 4\n";
    let (lease, margin) = (Duration::from_secs(4), Duration::from_secs(1));
    let answers: [&[&str]; 2] = [&[GRANT], &[GRANT, "ok 4\n"]];
    thread::scope(|scope| {
        let asking = answers.map(|answers| {
            scope.spawn(move || {
                let delay = Duration::from_millis(600);
                let (client, asked) = client_of_slow_liar(delay, answers);
                let guard = granted_in_time(&client);
                let asked: Vec<Instant> = asked.iter().collect();
                assert_eq!(asked.len(), answers.len());
                let latest = *asked.last().expect("it answered") + lease - margin;
                eventually(PATIENCE, "it is given up", || {
                    // The clock is read first, so that a delay of this thread does no harm.
                    let now = Instant::now();
                    let is_held = guard.is_held();
                    assert!(!is_held || now < latest, "held {:?} too long", now - latest);
                    !is_held
                });
            })
        });
        for thread in asking {
            thread
                .join()
                .unwrap_or_else(|failure| resume_unwind(failure));
        }
    });
}

/// Acquires the lock `k`, which a server grants that has no answer to a renewal at once. A client
/// that is late by a quarter of the lease renews it before it has a guard.
fn granted_in_time(client: &Client) -> Guard {
    let granted = client.lock("k").tag("").acquire();
    in_time!(granted.is_ok(), "{granted:?}");
    granted.expect("it is there")
}

#[test]
fn a_reply_sent_before_its_request_renews_nothing() {
    fair_test(a_reply_sent_before_its_request_renews_nothing_once);
}

fn a_reply_sent_before_its_request_renews_nothing_once() {
    const GRANT_AND_MORE: &str = "ok 0123456789abcdef0123456789abcdef 1\nok 3600\n";
    let client = client_of_liar(&[GRANT_AND_MORE]);
    let guard = granted_in_time(&client);
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| sender.send(loss).expect("a listener"));
    assert_eq!(losses.recv_timeout(PATIENCE), Ok(Loss::Deadline));
    assert!(!guard.is_held());
}

#[test]
fn a_late_grant_is_renewed_before_the_guard_exists() {
    fair_test(a_late_grant_is_renewed_before_the_guard_exists_once);
}

fn a_late_grant_is_renewed_before_the_guard_exists_once() {
    const GRANT: &str = "ok 0123456789abcdef0123456789abcdef 1\n";
    let delay = Duration::from_millis(300);
    let (client, _) = client_of_slow_liar(delay, &[GRANT, "error\n"]);
    let asked = client.lock("k").tag("").acquire();
    assert!(matches!(asked, Err(Error::LeaseExpired(_))), "{asked:?}");
    let (client, _) = client_of_slow_liar(delay, &[GRANT, "ok 60\n", "ok\n"]);
    let guard = client.lock("k").tag("").acquire().expect("still ours");
    assert_eq!(guard.lease(), Duration::from_secs(60));
    assert!(guard.is_held());
}

#[test]
fn a_grant_with_a_lease_out_of_range_is_a_bad_reply() {
    for answer in [
        "ok 0123456789abcdef0123456789abcdef 18446744073709551615\n",
        "ok 0123456789abcdef0123456789abcdef 9223372037\n",
        "ok 0123456789abcdef0123456789abcdef 0\n",
        "ok 0123456789abcdef0123456789abcdef -1\n",
    ] {
        let client = client_of_liar(Box::leak(Box::new([answer])));
        let asked = client.lock("k").tag("").acquire();
        assert!(matches!(asked, Err(Error::BadReply { .. })), "{asked:?}");
    }
}

#[test]
fn a_renewal_answered_with_no_valid_lease_renews_nothing() {
    fair_test(a_renewal_answered_with_no_valid_lease_renews_nothing_once);
}

fn a_renewal_answered_with_no_valid_lease_renews_nothing_once() {
    for answer in ["ok 18446744073709551615\n", "ok 0\n", "garbage\n"] {
        let grant = "ok 0123456789abcdef0123456789abcdef 1\n";
        let client = client_of_liar(Box::leak(Box::new([grant, answer])));
        let guard = granted_in_time(&client);
        let (sender, losses) = mpsc::channel();
        guard.on_lost(move |loss| sender.send(loss).expect("a listener"));
        assert_eq!(
            losses.recv_timeout(PATIENCE),
            Ok(Loss::Deadline),
            "{answer}"
        );
    }
}

#[test]
fn a_bad_reply_is_shown_in_short() {
    let long: &'static str = Box::leak(format!("ok {}\n", "x".repeat(100_000)).into());
    let client = client_of_liar(Box::leak(Box::new([long])));
    let error = client.lock("k").tag("").acquire().expect_err("no grant");
    assert!(error.to_string().len() < 1000, "{error}");
}

#[test]
fn a_reply_that_is_not_utf8_is_shown_as_a_bad_reply() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let _ = stream.write_all(b"caf\xe9\n");
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let client = Client::new([Address::Tcp(address.to_string())]);
    let asked = client.lock("k").tag("").try_acquire();
    let is_shown = |reply: &str| reply == "caf\u{fffd}";
    assert!(
        matches!(&asked, Err(Error::BadReply { reply, .. }) if is_shown(reply)),
        "{asked:?}"
    );
}

#[test]
fn an_endless_reply_is_a_bad_reply_and_is_not_kept() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        // Short of the end of a line, and more than a claim's reply can be.
        let _ = stream.write_all(&[b'x'; 16 * 1024]);
        // Until the client hangs up.
        let _ = io::copy(&mut stream, &mut io::sink());
    });
    let mut settings = Settings::default();
    settings.reply_timeout = 2 * PATIENCE;
    let client = Client::with_settings([Address::Tcp(address.to_string())], settings);
    // A client that went on reading would report NoReply.
    let asked = client.lock("k").tag("").try_acquire();
    assert!(matches!(asked, Err(Error::BadReply { .. })), "{asked:?}");
}

#[test]
fn a_callback_can_ask_its_guard_and_end_it() {
    let uses: [fn(&Mutex<Option<Guard>>); 3] = [
        |guard| {
            let guard = guard.lock().expect("no panic");
            assert!(!guard.as_ref().is_some_and(Guard::renew));
        },
        |guard| drop(guard.lock().expect("no panic").take()),
        |guard| {
            let guard = guard.lock().expect("no panic").take();
            assert!(guard.is_some_and(|guard| guard.release().is_err()));
        },
    ];
    thread::scope(|scope| {
        for (number, use_it) in uses.into_iter().enumerate() {
            scope.spawn(move || a_callback_can_use_its_guard(number, use_it));
        }
    });
}

fn a_callback_can_use_its_guard(number: usize, use_it: fn(&Mutex<Option<Guard>>)) {
    let daemon = Daemon::start_alone(&[]);
    let guard = client(&daemon).lock("k").acquire().expect("free");
    let shared = Arc::new(Mutex::new(Some(guard)));
    let (sender, done) = mpsc::channel();
    let in_callback = Arc::clone(&shared);
    let callback = move |_| {
        use_it(&in_callback);
        sender.send(()).expect("a listener");
    };
    if let Some(guard) = &*shared.lock().expect("no panic") {
        guard.on_lost(callback);
    }
    drop(daemon);
    assert_eq!(done.recv_timeout(PATIENCE), Ok(()), "use {number}");
}

#[test]
fn the_longest_durations_are_accepted() {
    let daemon = Daemon::start(&[]);
    let mut settings = Settings::default();
    settings.reply_timeout = Duration::MAX;
    let client = Client::with_settings([address(&daemon)], settings);
    let guard = client.lock("k").acquire().expect("free");
    let endless = client.lock("k").lease(Duration::MAX).try_acquire();
    assert!(matches!(endless, Err(Error::InvalidArgument(_))));
    let waiting = thread::spawn(move || {
        let guard = client.lock("k").acquire_within(Duration::MAX);
        guard.map(|guard| guard.is_some())
    });
    daemon.wait_for_waiters("k", 1);
    guard.release().expect("still ours");
    assert!(matches!(waiting.join(), Ok(Ok(true))));
}

fn in_a_second() -> Settings {
    let mut settings = Settings::default();
    settings.connect_timeout = Duration::from_secs(1);
    settings
}

#[test]
fn connecting_to_a_unix_socket_is_bounded() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let busy = FullBacklog::at(&path);
    let (sender, done) = mpsc::channel();
    let server = Address::Unix(path);
    let asked = server.clone();
    thread::spawn(move || {
        let client = Client::with_settings([asked], in_a_second());
        let _ = sender.send(client.lock("k").try_acquire().map(drop));
    });
    let error = done.recv_timeout(PATIENCE).expect("it gives up");
    let Err(Error::Unreachable { error, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    // Where there is room in time, it connects.
    let mut settings = Settings::default();
    settings.connect_timeout = Duration::MAX;
    let connecting = thread::spawn(move || Connection::open(&server, &settings).map(drop));
    // By the wall's clock: it is the kernel that keeps it waiting.
    thread::sleep(Duration::from_millis(200));
    assert!(!connecting.is_finished(), "the backlog is full");
    busy.listener.accept().expect("one is waiting");
    connecting.join().expect("no panic").expect("there is room");
}

#[test]
fn presenting_the_auth_token_is_bounded_like_connecting() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = Address::Tcp(silent.local_addr().expect("its address").to_string());
    let mut settings = in_a_second();
    settings.auth_token = Some("secret".into());
    settings.reply_timeout = Duration::from_secs(3600);
    let (sender, done) = mpsc::channel();
    thread::spawn(move || sender.send(Connection::open(&server, &settings).map(drop)));
    let opened = done.recv_timeout(PATIENCE).expect("it gives up");
    assert!(matches!(opened, Err(Error::NoReply { .. })), "{opened:?}");
}

#[test]
fn statistics_that_arrive_slowly_are_read_to_the_end() {
    fair_test(statistics_that_arrive_slowly_are_read_to_the_end_once);
}

fn statistics_that_arrive_slowly_are_read_to_the_end_once() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = Address::Tcp(listener.local_addr().expect("its address").to_string());
    let mut settings = Settings::default();
    settings.reply_timeout = Duration::from_secs(2);
    let slow = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("it connects");
        let mut lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
        for part in ["ok ", "{", "1", "2", "3", "4", "}\n"] {
            thread::sleep(Duration::from_millis(400));
            stream.write_all(part.as_bytes()).expect("a reader");
        }
        // In the second reply it stops.
        let requests = lines.by_ref().take(6).map_while(Result::ok).count();
        stream.write_all(b"ok {").expect("a reader");
        (requests, stream)
    });
    let mut connection = Connection::open(&server, &settings).expect("it listens");
    assert_eq!(connection.stats().expect("it is complete"), "{1234}");
    let cut_off = connection.stats();
    assert!(matches!(cut_off, Err(Error::NoReply { .. })), "{cut_off:?}");
    assert_eq!(slow.join().expect("no panic").0, 6);
}

#[test]
fn statistics_that_never_end_are_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = Address::Tcp(listener.local_addr().expect("its address").to_string());
    let mut settings = Settings::default();
    settings.reply_timeout = Duration::from_millis(200);
    let dripping = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("it connects");
        // Until the client hangs up.
        while stream.write_all(b"1").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let (sender, done) = mpsc::channel();
    thread::spawn(move || {
        let mut connection = Connection::open(&server, &settings).expect("it listens");
        sender.send(connection.stats())
    });
    let answer = done.recv_timeout(PATIENCE).expect("it gives up");
    assert!(matches!(answer, Err(Error::NoReply { .. })), "{answer:?}");
    dripping.join().expect("no panic");
}

/// A server that grants a slot, and ends the connection when it is asked for the number. Returns
/// the request that comes over the next connection.
fn hangs_up_at_the_question(listener: &TcpListener) -> Vec<String> {
    let introduced = |replies: &[&str]| {
        let (mut stream, _) = listener.accept().expect("it connects");
        let mut lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
        let mut request = move || -> Vec<String> {
            let three = lines.by_ref().take(3);
            three.map(|line| line.expect("a line")).collect()
        };
        let mut replies = replies.iter();
        loop {
            let asked = request();
            let reply = match asked[0].as_str() {
                "hello" => "ok adopt slots keeps",
                "tag" => "ok",
                _ => match replies.next() {
                    Some(reply) => reply,
                    None => return asked,
                },
            };
            let _ = writeln!(stream, "{reply}");
        }
    };
    introduced(&[&format!("ok {TOKEN} 33")]);
    introduced(&[])
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn a_grant_whose_connection_ends_before_there_is_a_guard_is_released() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = Address::Tcp(listener.local_addr().expect("its address").to_string());
    let (sender, asked) = mpsc::channel();
    thread::spawn(move || sender.send(hangs_up_at_the_question(&listener)));
    let client = Client::new([server]);
    let acquired = client.semaphore("k", 3).numbered().acquire();
    assert!(matches!(
        acquired,
        Err(Error::Closed { .. } | Error::NoReply { .. })
    ));
    let released = asked.recv_timeout(PATIENCE).expect("it connects again");
    assert_eq!(released, ["sr", "k", TOKEN]);
}

#[test]
fn the_time_for_connecting_is_part_of_a_bounded_wait() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let busy = FullBacklog::at(&path);
    let client = Client::new([Address::Unix(path)]);
    let asking = thread::spawn(move || {
        let lock = client.lock("k").tag("");
        lock.acquire_within(Duration::from_secs(10))
            .map(|guard| guard.is_some())
    });
    thread::sleep(Duration::from_millis(2500));
    // Those that only fill the backlog came first.
    for _ in &busy.pending {
        busy.listener.accept().expect("it is waiting");
    }
    let (mut stream, _) = busy.listener.accept().expect("it comes");
    let patience = Some(PATIENCE);
    stream.set_read_timeout(patience).expect("a setting");
    let reader = BufReader::new(stream.try_clone().expect("a descriptor"));
    let requests: Vec<String> = reader.lines().map_while(Result::ok).take(6).collect();
    stream.write_all(b"error\ntimeout\n").expect("a reader");
    assert_eq!(
        requests[..5],
        ["hello", "_", "adopt broken not_written", "l", "k"]
    );
    let wait_timeout: u64 = requests[5].parse().expect("a number");
    assert!(wait_timeout <= 8, "{wait_timeout}");
    assert!(matches!(asking.join(), Ok(Ok(false))));
}

#[test]
fn an_invalid_key_is_refused_without_connecting() {
    let (_port, addr) = refusing_addr();
    let client = Client::new([Address::Tcp(addr.to_string())]);
    let asked = client.lock("a b").try_acquire();
    assert!(matches!(asked, Err(Error::InvalidKey)), "{asked:?}");
    let asked = client.lock("k").lease(Duration::ZERO).acquire();
    assert!(matches!(asked, Err(Error::InvalidArgument(_))), "{asked:?}");
    let asked = client.semaphore("k", 0).acquire();
    assert!(matches!(asked, Err(Error::InvalidArgument(_))), "{asked:?}");
}

#[test]
fn each_refusal_of_a_queue_place_has_its_error() {
    fair_test(each_refusal_of_a_queue_place_has_its_error_once);
}

fn each_refusal_of_a_queue_place_has_its_error_once() {
    let daemon = Daemon::start(&["--auth-token", "secret"]);
    let mut settings = Settings::default();
    settings.auth_token = Some("secret".into());
    let server = address(&daemon);
    let asked = Client::new([server.clone()]).lock("k").try_acquire();
    assert!(matches!(asked, Err(Error::AuthFailed { .. })), "{asked:?}");
    let client = Client::with_settings([server], settings);
    let mut connection = client.connect(&client.servers()[0]).expect("reachable");
    let slot = Slot::LOCK.with_lease(Duration::from_secs(1));
    let waited = connection.wait("k", slot, Wait::No);
    assert!(matches!(waited, Err(Error::NotEnqueued(_))), "{waited:?}");
    connection.enqueue("k", slot).expect("a place");
    let again = connection.enqueue("k", slot);
    assert!(matches!(again, Err(Error::AlreadyEnqueued(_))), "{again:?}");
    thread::sleep(Duration::from_millis(1200));
    let waited = connection.wait("k", slot, Wait::No);
    assert!(matches!(waited, Err(Error::LeaseExpired(_))), "{waited:?}");
    assert!(connection.ping().is_ok(), "a refusal ended the connection");
}

#[test]
fn an_error_names_the_server_that_it_is_about() {
    let (_port, addr) = refusing_addr();
    let server = Address::Tcp(addr.to_string());
    let client = Client::new([server.clone()]);
    let error = client.lock("k").acquire().expect_err("nothing listens");
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert_eq!(error.server(), Some(&server));
    assert_eq!(error.to_string(), format!("{addr}: connection refused"));
    let error = client_of_liar(&["hello\n"]).lock("k").acquire();
    let error = error.expect_err("no grant");
    let server = error.server().expect("a server").to_string();
    assert_eq!(
        error.to_string(),
        format!("{server}: the server answered hello")
    );
    let error = client_of_liar(&["error_max_locks\n"]).lock("k").acquire();
    let error = error.expect_err("refused");
    assert_eq!(error.key(), Some("k"));
    let server = error.server().expect("a server");
    let expected = format!("k at {server}: a limit of the server is reached (");
    assert!(error.to_string().starts_with(&expected), "{error}");
    let error = client.lock("a b").acquire().expect_err("no key");
    assert_eq!(error.server(), None);
    let daemon = Daemon::start(&["--auth-token", "secret"]);
    let error = self::client(&daemon).lock("k").acquire();
    let error = error.expect_err("no auth token").to_string();
    let expected = format!("{}: the server wants an auth token", daemon.addr());
    assert_eq!(error, expected);
}

#[test]
fn only_what_may_pass_is_transient() {
    let (_port, addr) = refusing_addr();
    let client = Client::new([Address::Tcp(addr.to_string())]);
    let refused = client.lock("k").acquire().expect_err("nothing listens");
    assert!(refused.is_transient());
    for (answers, is_transient) in [
        (&["error_draining\n"], true),
        (&["error_max_locks\n"], false),
    ] {
        let error = client_of_liar(answers).lock("k").acquire();
        let error = error.expect_err("refused");
        assert_eq!(error.is_transient(), is_transient, "{error}");
    }
}

#[test]
fn a_guard_in_a_forked_child_releases_nothing() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let acquire = |key| client.lock(key).acquire().expect("free");
    let (guard, dropped) = (acquire("k"), acquire("dropped"));
    // SAFETY: the child runs this thread alone, ends by _exit, and takes no lock that another
    // thread may have held but those that the C library keeps usable.
    match unsafe { nix::unistd::fork() }.expect("a process") {
        nix::unistd::ForkResult::Child => {
            drop(dropped);
            let is_told = matches!(guard.release(), Err(Error::Lost(_, Loss::Forked)));
            // SAFETY: it returns to nothing.
            unsafe { nix::libc::_exit(i32::from(!is_told)) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let mut status = None;
            let pid = rustix::process::Pid::from_raw(child.as_raw());
            eventually(PATIENCE, "the child ends", || {
                let options = rustix::process::WaitOptions::NOHANG;
                let ended = rustix::process::waitpid(pid, options).expect("a child");
                status = ended.and_then(|(_, status)| status.exit_status());
                status.is_some()
            });
            assert_eq!(status, Some(0), "1: not told");
        }
    }
    for guard in [guard, dropped] {
        assert!(guard.is_held() && guard.renew());
        guard.release().expect("still ours");
    }
}

#[test]
fn a_cancelled_acquire_leaves_the_queue_at_once() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let guard = client.lock("k").acquire().expect("free");
    let handle = CancelHandle::new().expect("a descriptor");
    let bystander = CancelHandle::new().expect("a descriptor");
    thread::scope(|scope| {
        let cancelled = [(); 2]
            .map(|()| scope.spawn(|| client.lock("k").cancelled_by(&handle).acquire().map(drop)));
        let other = scope.spawn(|| {
            client
                .lock("k")
                .cancelled_by(&bystander)
                .acquire()
                .map(drop)
        });
        daemon.wait_for_waiters("k", 3);
        assert!(!handle.is_cancelled());
        handle.clone().cancel();
        assert!(handle.is_cancelled());
        for waiting in cancelled {
            let waited = waiting.join().expect("no panic");
            assert!(matches!(waited, Err(Error::Cancelled)), "{waited:?}");
        }
        daemon.wait_for_waiters("k", 1);
        assert!(guard.is_held());
        guard.release().expect("still ours");
        other.join().expect("no panic").expect("its turn");
    });
}

#[test]
fn a_cancelled_handle_cancels_what_comes_and_no_guard() {
    fair_test(a_cancelled_handle_cancels_what_comes_and_no_guard_once);
}

fn a_cancelled_handle_cancels_what_comes_and_no_guard_once() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let handle = CancelHandle::new().expect("a descriptor");
    let lock = client.lock("k").cancelled_by(&handle);
    let lock = lock.lease(Duration::from_secs(1));
    let guard = lock.acquire().expect("free");
    handle.cancel();
    handle.cancel();
    assert!(guard.renew(), "a guard has nothing to do with the handle");
    let asked = client.lock("other").cancelled_by(&handle).try_acquire();
    assert!(matches!(asked, Err(Error::Cancelled)), "{asked:?}");
    thread::sleep(Duration::from_millis(1500));
    in_time!(guard.is_held(), "the lease was not renewed");
    guard.release().expect("still ours");
}

#[test]
fn the_last_words_of_a_server_are_no_reply_to_a_release() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).expect("the directory is ours");
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("it connects");
        let lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
        assert_eq!(lines.take(3).map_while(Result::ok).count(), 3);
        stream.write_all(b"ok\n").expect("a reader");
        stream
    });
    let server_address = Address::Unix(path);
    let mut connection =
        Connection::open(&server_address, &Settings::default()).expect("it listens");
    connection.ping().expect("an answer");
    let mut stream = server.join().expect("no panic");
    stream.write_all(b"error\n").expect("a reader");
    drop(stream);
    let token = "0123456789abcdef0123456789abcdef".parse().expect("a token");
    let released = connection.release("k", Slot::LOCK, token);
    assert!(
        matches!(released, Err(Error::Closed { .. })),
        "{released:?}"
    );
}

/// Operators see who holds a lock of a library as they see who holds one of `latch run`.
#[test]
fn a_guard_without_a_tag_has_the_default_tag() {
    let daemon = Daemon::start(&[]);
    let client = client(&daemon);
    let tag_of = |key: &str| {
        let mut connection = client.connect(&client.servers()[0]).expect("it runs");
        let queues = connection.queues(Some(key)).expect("it knows");
        queues[0].holders[0].party.tag.clone()
    };
    let _guard = client.lock("k").acquire().expect("it is free");
    let tag = tag_of("k").expect("a tag");
    let end = format!(" pid {}", std::process::id());
    assert!(tag.contains('@') && tag.ends_with(&end), "{tag}");
    let _untagged = client.lock("u").tag("").acquire().expect("it is free");
    assert_eq!(tag_of("u"), None);
}
