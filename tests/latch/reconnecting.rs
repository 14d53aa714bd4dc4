//! Guards whose connection ends, against scripted servers and against a real one.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::latch::{output, text};
use crate::support::silent::{free_addr, refusing_addr};
use crate::support::stalls::{fair_test, in_time};
use crate::support::wire_cutter::WireCutter;
use crate::support::{eventually, is_soon, program, Daemon, Scheme, PATIENCE};
use latchd::client::{Address, Client, Error, Guard, Loss, Settings};

pub const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The first request of a client, as [`Peer::any_request`] joins it.
pub const HELLO: &str = "hello _ adopt broken not_written";

/// The server's side of one connection.
pub struct Peer(BufReader<TcpStream>);

impl Peer {
    pub fn accept(listener: &TcpListener) -> Peer {
        let stream = accept(listener);
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("it is not zero");
        Peer(BufReader::new(stream))
    }

    /// The next request, its lines joined by blanks; blanks at the end of the connection. A `hello`
    /// before it is answered.
    pub fn request(&mut self) -> String {
        let request = self.any_request();
        if request != HELLO {
            return request;
        }
        self.answer("ok adopt");
        self.any_request()
    }

    pub fn any_request(&mut self) -> String {
        let mut lines = [const { String::new() }; 3];
        for line in &mut lines {
            self.0.read_line(line).expect("a line in time");
        }
        lines.map(|line| line.trim_end().to_owned()).join(" ")
    }

    pub fn answer(&mut self, line: &str) {
        let sent = self.0.get_mut().write_all(format!("{line}\n").as_bytes());
        sent.expect("a reader");
    }

    /// Insists on a request, and answers it.
    fn serve(&mut self, request: &str, line: &str) {
        assert_eq!(self.request(), request);
        self.answer(line);
    }

    /// Insists that the lock `k` is adopted, and confirmed at once.
    fn give_to_adopter(&mut self, lease: u64) {
        for _ in 0..2 {
            self.serve(&adoption(lease), &format!("ok {lease}"));
        }
    }

    /// The same, and then that it is released.
    fn give_to_adopter_and_take_back(&mut self, lease: u64) {
        self.serve(&adoption(lease), &format!("ok {lease}"));
        self.take_back(lease);
    }

    /// Insists that the lock `k` is released, whose adoption was answered. The release may come
    /// before the confirmation, which it makes needless.
    fn take_back(&mut self, lease: u64) {
        let mut request = self.request();
        if request == adoption(lease) {
            self.answer(&format!("ok {lease}"));
            request = self.request();
        }
        assert_eq!(request, format!("r k {TOKEN}"));
        self.answer("ok");
    }

    /// Grants the lock `k` for so many seconds.
    pub fn grant(&mut self, lease: u64) {
        let request = self.request();
        assert!(request.starts_with("l k "), "{request}");
        self.answer(&format!("ok {TOKEN} {lease}"));
    }
}

/// Closes each connection at once. Returns how many there were.
fn hang_up_for(time: Duration, listener: &TcpListener) -> u32 {
    listener.set_nonblocking(true).expect("a setting");
    let mut count = 0;
    is_soon(time, || {
        count += u32::from(listener.accept().is_ok());
        false
    });
    count
}

/// Waits for a client, but not for ever.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).expect("a setting");
    let mut accepted = None;
    eventually(PATIENCE, "a client comes", || {
        accepted = listener.accept().ok();
        accepted.is_some()
    });
    let (stream, _) = accepted.expect("a client");
    stream.set_nonblocking(false).expect("a setting");
    stream
}

/// What adopts the lock `k`, or renews it after that.
fn adoption(lease: u64) -> String {
    format!("adopt k {TOKEN} {lease}")
}

/// A listener at an address of its own: a client of another test may still try to come back to a
/// port that has been given anew.
pub fn listener() -> (TcpListener, SocketAddr) {
    static COUNT: AtomicU8 = AtomicU8::new(0);
    let host = [127, 0, 1, COUNT.fetch_add(1, Ordering::Relaxed)];
    let listener = TcpListener::bind((IpAddr::from(host), 0)).expect("a port");
    let addr = listener.local_addr().expect("its address");
    (listener, addr)
}

pub fn guard_of(server: &str) -> Guard {
    let server: Address = server.parse().expect("an address");
    let guard = Client::new([server]).lock("k").tag("").acquire();
    guard.expect("granted")
}

/// How the guard is lost, and when.
fn losses(guard: &Guard) -> mpsc::Receiver<(Loss, Instant)> {
    let (sender, losses) = mpsc::channel();
    guard.on_lost(move |loss| {
        let _ = sender.send((loss, Instant::now()));
    });
    losses
}

#[test]
fn a_guard_goes_on_over_a_new_connection() {
    let (listener, addr) = listener();
    let (noticed, is_noticed) = mpsc::channel();
    let (confirmed, is_confirmed) = mpsc::channel();
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            let mut first = Peer::accept(&listener);
            first.grant(9);
            drop(first);
            let mut second = Peer::accept(&listener);
            assert_eq!(second.request(), adoption(9));
            // The client has no answer yet.
            is_noticed.recv_timeout(PATIENCE).expect("a word");
            second.answer("ok 9");
            // It confirms that at once: the server may take the adoption back until then.
            second.serve(&adoption(9), "ok 9");
            confirmed.send(()).expect("a listener");
            second.serve(&format!("r k {TOKEN}"), "ok");
        });
        let guard = guard_of(&addr.to_string());
        let losses = losses(&guard);
        eventually(PATIENCE, "the end is noticed", || !guard.is_held());
        noticed.send(()).expect("a listener");
        assert_eq!(guard.loss(), None);
        eventually(PATIENCE, "it is held again", || guard.is_held());
        assert!(losses.try_recv().is_err());
        // A release makes the confirmation needless.
        is_confirmed.recv_timeout(PATIENCE).expect("a word");
        guard.release().expect("held");
        server.join().expect("no panic");
    });
}

/// A server that has crashed would believe the proof. After the release, it would then grant the
/// lock beside the next holder, which has not come back yet.
#[test]
fn a_lease_that_has_ended_is_not_proved() {
    const LEASE: Duration = Duration::from_secs(1);
    let (listener, addr) = listener();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut first = Peer::accept(&listener);
            assert_eq!(first.any_request(), HELLO);
            first.answer("ok adopt keeps proofs");
            assert!(first.any_request().starts_with("sl k "));
            first.answer(&format!("ok {TOKEN} {}", LEASE.as_secs()));
            // The client asks for its slot, and gives the grant up when it gets no answer.
            assert!(first.any_request().starts_with("stats "));
            thread::sleep(LEASE);
            drop(first);
            let mut second = Peer::accept(&listener);
            assert_eq!(second.any_request(), HELLO);
            second.answer("ok adopt keeps proofs");
            assert_eq!(second.any_request(), format!("sr k {TOKEN}"));
            second.answer("error");
        });
        let client = Client::new([Address::Tcp(addr.to_string())]);
        let acquired = client.semaphore("k", 2).tag("").numbered().acquire();
        assert!(matches!(acquired, Err(Error::Closed { .. })));
    });
}

/// A server that has crashed knows the grant only from its proof. Once a release was sent, the lock
/// may have another holder.
#[test]
fn a_release_proves_its_grant_until_it_was_sent_once() {
    let (listener, addr) = listener();
    thread::scope(|scope| {
        let accept = || {
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer("ok adopt keeps proofs");
            peer
        };
        let server = scope.spawn(move || {
            let mut first = accept();
            assert!(first.any_request().starts_with("sl k "));
            first.answer(&format!("ok {TOKEN} 60"));
            // The client asks for its slot, and gives the grant up when it gets no answer.
            assert!(first.any_request().starts_with("stats "));
            drop(first);
            let mut second = accept();
            let proof = second.any_request();
            assert!(
                proof.starts_with(&format!("adopt k {TOKEN} 60 ")),
                "{proof}"
            );
            second.answer("ok 60");
            assert_eq!(second.any_request(), format!("sr k {TOKEN}"));
            drop(second);
            let mut third = accept();
            assert_eq!(third.any_request(), format!("sr k {TOKEN}"));
            third.answer("error");
        });
        let client = Client::new([Address::Tcp(addr.to_string())]);
        let acquired = client.semaphore("k", 2).tag("").numbered().acquire();
        assert!(matches!(acquired, Err(Error::Closed { .. })));
        server.join().expect("no panic");
    });
}

#[test]
fn a_lock_that_another_may_hold_is_lost_for_good() {
    let (listener, addr) = listener();
    thread::scope(|scope| {
        scope.spawn(|| {
            Peer::accept(&listener).grant(30);
            let mut second = Peer::accept(&listener);
            second.serve(&adoption(30), "error");
        });
        let guard = guard_of(&addr.to_string());
        let (loss, _) = losses(&guard).recv_timeout(PATIENCE).expect("a loss");
        assert_eq!((loss, guard.loss()), (Loss::Closed, Some(Loss::Closed)));
        assert!(!guard.renew() && !guard.is_held());
        // Beyond the time at which it would try again, by its own clock.
        thread::sleep(Duration::from_secs(1));
        let asked = listener.accept().map(drop).map_err(|error| error.kind());
        assert_eq!(asked, Err(std::io::ErrorKind::WouldBlock));
        assert!(matches!(guard.release(), Err(Error::Lost(_, Loss::Closed))));
    });
}

#[test]
fn only_a_refusal_ends_the_attempts_to_adopt() {
    thread::scope(|scope| {
        for answer in [
            "error_max_locks",
            "error_draining",
            "what?",
            "ok",
            "error_auth",
            // Closed before the confirmation.
            "ok 30",
        ] {
            scope.spawn(move || this_ends_no_attempts_to_adopt(answer));
        }
    });
}

fn this_ends_no_attempts_to_adopt(answer: &str) {
    let (listener, addr) = listener();
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            Peer::accept(&listener).grant(30);
            let mut peer = Peer::accept(&listener);
            peer.serve(&adoption(30), answer);
            if answer != "ok 30" {
                // The client gives up the connection.
                assert_eq!(peer.any_request().trim(), "", "{answer}");
            }
            drop(peer);
            Peer::accept(&listener).give_to_adopter(30);
            Peer::accept(&listener)
        });
        let guard = guard_of(&addr.to_string());
        let losses = losses(&guard);
        eventually(PATIENCE, "the end is noticed", || !guard.is_held());
        let next = server.join().expect("no panic");
        assert!(losses.try_recv().is_err());
        drop((guard, next));
    });
}

#[test]
fn a_server_that_hangs_up_is_tried_until_the_deadline() {
    fair_test(a_server_that_hangs_up_is_tried_until_the_deadline_once);
}

fn a_server_that_hangs_up_is_tried_until_the_deadline_once() {
    let (listener, addr) = listener();
    let began = Instant::now();
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            Peer::accept(&listener).grant(4);
            hang_up_for(Duration::from_millis(2500), &listener)
        });
        let guard = guard_of(&addr.to_string());
        let losses = losses(&guard);
        let (loss, at) = losses.recv_timeout(PATIENCE).expect("a loss");
        assert_eq!(loss, Loss::Deadline);
        // A lease of four seconds is given up a second before its end.
        assert!(
            at - began >= Duration::from_millis(2900),
            "{:?}",
            at - began
        );
        assert!(!guard.is_held());
        // At once, and after pauses of 50, 100, 200, 400, 800 and 1000 milliseconds.
        let count = server.join().expect("no panic");
        assert!((2..=7).contains(&count), "{count} connections");
    });
}

#[test]
fn a_server_that_adopts_and_hangs_up_is_not_flooded() {
    thread::scope(|scope| {
        for answer_count in [1, 2] {
            scope.spawn(move || adopts_and_hangs_up(answer_count));
        }
    });
}

/// A server that hangs up after so many answers to each connection: the second one confirms.
fn adopts_and_hangs_up(answer_count: u32) {
    let (listener, addr) = listener();
    let (counted, count) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            Peer::accept(&listener).grant(30);
            let until = Instant::now() + Duration::from_millis(1500);
            let mut count = 0;
            while Instant::now() < until {
                let mut peer = Peer::accept(&listener);
                (0..answer_count).for_each(|_| peer.serve(&adoption(30), "ok 30"));
                count += 1;
            }
            counted.send(count).expect("a listener");
            let mut last = Peer::accept(&listener);
            while last.request() == adoption(30) {
                last.answer("ok 30");
            }
            last.answer("ok");
        });
        let guard = guard_of(&addr.to_string());
        let count = count.recv_timeout(PATIENCE).expect("a count");
        // No more than of a server that hangs up at once.
        assert!(count <= 7, "{count} connections");
        guard.release().expect("held");
    });
}

#[test]
fn a_server_that_refuses_connections_is_soon_given_up() {
    fair_test(a_server_that_refuses_connections_is_soon_given_up_once);
}

fn a_server_that_refuses_connections_is_soon_given_up_once() {
    let (listener, addr) = listener();
    let granted = thread::spawn(move || Peer::accept(&listener).grant(3600));
    let guard = guard_of(&addr.to_string());
    granted.join().expect("no panic");
    let began = Instant::now();
    let (loss, _) = losses(&guard).recv_timeout(PATIENCE).expect("a loss");
    assert_eq!(loss, Loss::Closed);
    in_time!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_auth_token_and_the_tag_go_with_the_renewal() {
    let (listener, addr) = listener();
    for accepted in [true, false] {
        let (noticed, is_noticed) = mpsc::channel();
        let listener = &listener;
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut first = Peer::accept(listener);
                first.serve("auth _ secret", "ok");
                first.serve("tag _ the tag", "ok");
                first.grant(30);
                drop(first);
                let mut second = Peer::accept(listener);
                // All of them are sent before any is answered.
                let requests = [0; 4].map(|_| second.any_request());
                let expected = ["auth _ secret", HELLO, "tag _ the tag"];
                assert_eq!(requests[..3], expected.map(str::to_owned));
                assert_eq!(requests[3], adoption(30));
                // The client has no answer yet.
                is_noticed.recv_timeout(PATIENCE).expect("a word");
                if accepted {
                    for line in ["ok", "ok adopt", "ok", "ok 30"] {
                        second.answer(line);
                    }
                    second.take_back(30);
                } else {
                    second.answer("error_auth");
                    // The secret may be wrong for a while only.
                    let mut third = Peer::accept(listener);
                    third.serve("auth _ secret", "ok");
                    third.serve("tag _ the tag", "ok");
                    third.serve(&adoption(30), "error");
                }
            });
            let mut settings = Settings::default();
            settings.auth_token = Some(" secret\n".into());
            let client = Client::with_settings([Address::Tcp(addr.to_string())], settings);
            let guard = client.lock("k").tag("the tag").acquire().expect("granted");
            let losses = losses(&guard);
            eventually(PATIENCE, "the end is noticed", || !guard.is_held());
            noticed.send(()).expect("a listener");
            if accepted {
                eventually(PATIENCE, "it is held again", || guard.is_held());
                guard.release().expect("held");
            } else {
                let (loss, _) = losses.recv_timeout(PATIENCE).expect("a loss");
                assert_eq!(loss, Loss::Closed);
            }
        });
    }
}

/// As on a file server that is silent: in a pipe, which has a writer from the grant on.
#[test]
fn a_token_file_that_blocks_holds_up_no_new_connection() {
    let (listener, addr) = listener();
    let mut reader = Command::new("sleep");
    let mut reader = reader
        .arg("60")
        .stdin(Stdio::piped())
        .spawn()
        .expect("sleep");
    drop(reader.stdin.take());
    let pipe = PathBuf::from(format!("/proc/{}/fd/0", reader.id()));
    let server = thread::spawn({
        let pipe = pipe.clone();
        move || {
            let mut first = Peer::accept(&listener);
            first.serve("auth _ secret", "ok");
            first.grant(9);
            let writer = File::options().write(true).open(pipe).expect("a pipe");
            drop(first);
            let mut second = Peer::accept(&listener);
            second.serve("auth _ secret", "ok");
            second.give_to_adopter_and_take_back(9);
            drop(writer);
        }
    });
    let mut settings = Settings::default();
    settings.auth_token = Some("secret".into());
    settings.auth_token_file = Some(pipe);
    let client = Client::with_settings([Address::Tcp(addr.to_string())], settings);
    let guard = client.lock("k").tag("").acquire().expect("granted");
    eventually(PATIENCE, "the end is noticed", || !guard.is_held());
    eventually(PATIENCE, "it is held again", || guard.is_held());
    let released = guard.release();
    reader.kill().expect("it runs");
    reader.wait().expect("it is our child");
    server.join().expect("no panic");
    released.expect("held");
}

#[test]
fn a_silent_server_is_told_also_while_it_is_away() {
    fair_test(a_silent_server_is_told_also_while_it_is_away_once);
}

fn a_silent_server_is_told_also_while_it_is_away_once() {
    let (listener, addr) = listener();
    thread::scope(|scope| {
        let (done, end) = mpsc::channel::<()>();
        let listener = &listener;
        scope.spawn(move || {
            Peer::accept(listener).grant(8);
            // It takes the question, and does not answer.
            let _second = Peer::accept(listener);
            let _ = end.recv_timeout(PATIENCE);
        });
        let began = Instant::now();
        let guard = guard_of(&addr.to_string());
        let (sender, told) = mpsc::channel();
        let lead = Duration::from_secs(3);
        assert!(guard.on_silence(lead, move || sender
            .send(Instant::now())
            .expect("a listener")));
        let losses = losses(&guard);
        // The deadline is two seconds before the end of the lease.
        let told_after = told.recv_timeout(PATIENCE).expect("told") - began;
        let expected = Duration::from_millis(2900)..Duration::from_millis(5500);
        in_time!(expected.contains(&told_after), "{told_after:?}");
        let (loss, _) = losses.recv_timeout(PATIENCE).expect("a loss");
        assert_eq!(loss, Loss::Deadline);
        drop(done);
    });
}

#[test]
fn a_release_while_the_server_is_away_is_tried_again() {
    fair_test(a_release_while_the_server_is_away_is_tried_again_once);
}

fn a_release_while_the_server_is_away_is_tried_again_once() {
    let release = format!("r k {TOKEN}");
    // The first release gets no answer. If it has reached the server, the next one is refused.
    for answer in ["ok", "error"] {
        let (listener, addr) = listener();
        let (hung_up, is_up) = mpsc::channel();
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                let mut first = Peer::accept(&listener);
                first.grant(3600);
                drop(first);
                (0..3).for_each(|_| drop(accept(&listener)));
                hung_up.send(()).expect("a listener");
                assert_eq!(Peer::accept(&listener).request(), release);
                Peer::accept(&listener).serve(&release, answer);
            });
            let guard = guard_of(&addr.to_string());
            is_up.recv_timeout(PATIENCE).expect("three attempts");
            let released = guard.release();
            assert!(released.is_ok(), "{answer}: {released:?}");
            server.join().expect("no panic");
        });
    }
}

#[test]
fn a_release_gives_up_at_the_end_of_the_lease() {
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        Peer::accept(&listener).grant(4);
        hang_up_for(Duration::from_secs(5), &listener);
    });
    let guard = guard_of(&addr.to_string());
    eventually(PATIENCE, "the end is noticed", || !guard.is_held());
    let released = guard.release();
    assert!(
        matches!(released, Err(Error::Closed { .. })),
        "{released:?}"
    );
    server.join().expect("no panic");
}

#[test]
fn another_server_of_the_cluster_renews_the_lock() {
    let ((one, one_addr), (other, other_addr)) = (listener(), listener());
    let server = format!("{one_addr}|{other_addr}");
    let (noticed, is_noticed) = mpsc::channel();
    thread::scope(|scope| {
        let servers = scope.spawn(move || {
            Peer::accept(&one).grant(30);
            let mut second = Peer::accept(&other);
            is_noticed.recv_timeout(PATIENCE).expect("a word");
            second.give_to_adopter_and_take_back(30);
        });
        let guard = guard_of(&server);
        eventually(PATIENCE, "the end is noticed", || !guard.is_held());
        noticed.send(()).expect("a listener");
        eventually(PATIENCE, "it is held again", || guard.is_held());
        guard.release().expect("held");
        servers.join().expect("no panic");
    });
}

#[test]
fn a_server_that_hangs_up_or_is_silent_is_left_for_the_next() {
    fair_test(a_server_that_hangs_up_or_is_silent_is_left_for_the_next_once);
}

fn a_server_that_hangs_up_or_is_silent_is_left_for_the_next_once() {
    for is_silent in [false, true] {
        let ((one, one_addr), (other, other_addr)) = (listener(), listener());
        thread::scope(|scope| {
            let servers = scope.spawn(|| {
                Peer::accept(&one).grant(30);
                let useless = Some(accept(&other)).filter(|_| is_silent);
                let mut second = Peer::accept(&one);
                second.give_to_adopter_and_take_back(30);
                drop(useless);
            });
            let guard = guard_of(&format!("{one_addr}|{other_addr}"));
            let losses = losses(&guard);
            eventually(PATIENCE, "the end is noticed", || !guard.is_held());
            eventually(PATIENCE, "it is held again", || guard.is_held());
            assert!(losses.try_recv().is_err());
            guard.release().expect("held");
            servers.join().expect("no panic");
        });
    }
}

/// Two servers of a cluster, of which the first grants the lock and is silent to its first renewal.
fn guard_of_silent_server() -> (Guard, Peer, TcpListener) {
    let ((one, one_addr), (other, other_addr)) = (listener(), listener());
    let server = thread::spawn(move || {
        let mut first = Peer::accept(&one);
        first.grant(60);
        first
    });
    let guard = guard_of(&format!("{one_addr}|{other_addr}"));
    (guard, server.join().expect("no panic"), other)
}

/// The first server still accepts connections, but might never answer.
#[test]
fn a_guard_whose_connection_ends_asks_the_other_server_first() {
    let ((one, one_addr), (other, other_addr)) = (listener(), listener());
    let guard = thread::spawn(move || guard_of(&format!("{one_addr}|{other_addr}")));
    Peer::accept(&one).grant(60);
    let mut next = Peer::accept(&other);
    next.give_to_adopter(60);
    let guard = guard.join().expect("no panic");
    eventually(PATIENCE, "it is held again", || guard.is_held());
    let server = thread::spawn(move || next.take_back(60));
    guard.release().expect("held");
    server.join().expect("no panic");
}

#[test]
fn a_lock_of_a_silent_server_goes_on_with_its_successor() {
    fair_test(a_lock_of_a_silent_server_goes_on_with_its_successor_once);
}

fn a_lock_of_a_silent_server_goes_on_with_its_successor_once() {
    let (guard, mut silent, other) = guard_of_silent_server();
    thread::scope(|scope| {
        let servers = scope.spawn(move || {
            assert_eq!(silent.request(), format!("n k {TOKEN} 60"));
            let mut successor = Peer::accept(&other);
            successor.give_to_adopter_and_take_back(60);
            // The connection to the silent one has ended.
            assert_eq!(silent.request().trim(), "");
        });
        assert!(guard.renew());
        guard.release().expect("held");
        servers.join().expect("no panic");
    });
}

#[test]
fn a_silent_server_that_answers_after_all_has_the_lock() {
    fair_test(a_silent_server_that_answers_after_all_has_the_lock_once);
}

fn a_silent_server_that_answers_after_all_has_the_lock_once() {
    let (guard, mut silent, other) = guard_of_silent_server();
    let losses = losses(&guard);
    let mut silent = thread::scope(|scope| {
        let guard = &guard;
        let servers = scope.spawn(move || {
            assert_eq!(silent.request(), format!("n k {TOKEN} 60"));
            for answer in ["error_draining", "what?"] {
                let mut standby = Peer::accept(&other);
                standby.serve(&adoption(60), answer);
                // The client closes the connection, and goes on.
                assert_eq!(standby.any_request().trim(), "", "{answer}");
                assert!(guard.is_held());
            }
            let unasked = Peer::accept(&other);
            silent.answer("ok 60");
            // The lock may have moved to a connection that was given up: it is taken back.
            silent.serve(&adoption(60), "ok 60");
            drop(unasked);
            silent
        });
        assert!(guard.renew());
        let server = servers.join().expect("no panic");
        assert!(guard.is_held());
        server
    });
    let server = thread::spawn(move || silent.serve(&format!("r k {TOKEN}"), "ok"));
    guard.release().expect("held");
    server.join().expect("no panic");
    assert!(losses.try_recv().is_err());
}

#[test]
fn a_silent_server_that_hangs_up_leaves_the_word_to_another() {
    fair_test(a_silent_server_that_hangs_up_leaves_the_word_to_another_once);
}

fn a_silent_server_that_hangs_up_leaves_the_word_to_another_once() {
    is_lost_while(|guard, mut silent, other| {
        assert_eq!(silent.request(), format!("n k {TOKEN} 60"));
        Peer::accept(&other).serve(&adoption(60), "error_draining");
        let mut asked_again = Peer::accept(&other);
        assert!(guard.is_held());
        drop(silent);
        eventually(PATIENCE, "the end is noticed", || !guard.is_held());
        asked_again.serve(&adoption(60), "error");
    });
}

#[test]
fn a_silent_server_that_refuses_after_all_ends_the_hold() {
    for (answer, expected) in [("error", Loss::Refused), ("error_broken", Loss::Broken)] {
        let (guard, mut silent, other) = guard_of_silent_server();
        let losses = losses(&guard);
        thread::scope(|scope| {
            let servers = scope.spawn(move || {
                assert_eq!(silent.request(), format!("n k {TOKEN} 60"));
                let mut unasked = Peer::accept(&other);
                assert_eq!(unasked.request(), adoption(60));
                silent.answer(answer);
                (silent, unasked, other)
            });
            assert!(!guard.renew());
            let (loss, _) = losses.recv_timeout(PATIENCE).expect("a loss");
            assert_eq!(loss, expected);
            drop(servers.join().expect("no panic"));
        });
    }
}

/// Loses the lock of a silent server while the servers do what `serve` says.
fn is_lost_while(serve: impl FnOnce(&Guard, Peer, TcpListener) + Send) {
    let (guard, silent, other) = guard_of_silent_server();
    let losses = losses(&guard);
    thread::scope(|scope| {
        let guard = &guard;
        scope.spawn(move || serve(guard, silent, other));
        assert!(!guard.renew());
        let (loss, _) = losses.recv_timeout(PATIENCE).expect("a loss");
        assert_eq!(loss, Loss::Closed);
    });
}

#[test]
fn a_claim_goes_on_to_the_next_server_of_the_cluster() {
    fair_test(a_claim_goes_on_to_the_next_server_of_the_cluster_once);
}

fn a_claim_goes_on_to_the_next_server_of_the_cluster_once() {
    let ((one, one_addr), (other, other_addr)) = (listener(), listener());
    let cluster = format!("{one_addr}|{other_addr}");
    for is_silent in [false, true] {
        thread::scope(|scope| {
            let servers = scope.spawn(|| {
                let useless = Some(accept(&one)).filter(|_| is_silent);
                let mut second = Peer::accept(&other);
                second.serve("auth _ secret", "ok");
                second.serve("tag _ the tag", "ok");
                second.grant(30);
                second.serve(&format!("r k {TOKEN}"), "ok");
                drop(useless);
            });
            let mut settings = Settings::default();
            settings.auth_token = Some("secret".into());
            settings.connect_timeout = Duration::from_secs(1);
            let server: Address = cluster.parse().expect("two addresses");
            let client = Client::with_settings([server], settings);
            let guard = client.lock("k").tag("the tag").acquire().expect("granted");
            guard.release().expect("held");
            servers.join().expect("no panic");
        });
    }
}

#[test]
fn a_claim_with_a_timeout_leaves_the_others_their_share() {
    let ((silent, silent_addr), daemon) = (listener(), Daemon::start(&[]));
    let cluster = format!("{silent_addr}|{}", daemon.addr());
    let held = thread::spawn(move || accept(&silent));
    let mut settings = Settings::default();
    settings.connect_timeout = Duration::from_secs(2);
    settings.reply_timeout = Duration::from_secs(4);
    let client = Client::with_settings([cluster.parse().expect("two addresses")], settings);
    let granted = client.lock("k").tag("the tag").try_acquire();
    assert!(granted.expect("the other one answers").is_some());
    drop(held.join());
}

#[test]
fn an_auth_token_leaves_the_other_servers_their_share() {
    let directory = tempfile::tempdir().expect("a directory");
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "secret").expect("there is room");
    let daemon = Daemon::start(&["--auth-token-file", secret.to_str().expect("text")]);
    let (silent, silent_addr) = listener();
    let cluster = format!("{silent_addr}|{}", daemon.addr());
    let held = thread::spawn(move || accept(&silent));
    let mut settings = Settings::default();
    settings.reply_timeout = Duration::from_secs(4);
    settings.auth_token = Some("secret".into());
    let client = Client::with_settings([cluster.parse().expect("two addresses")], settings);
    let granted = client.lock("k").tag("").try_acquire();
    assert!(granted.expect("the other one answers").is_some());
    drop(held.join());
}

#[test]
fn a_cluster_that_refuses_is_tried_until_the_deadline() {
    let ((listener, addr), (_port, dead)) = (listener(), refusing_addr());
    let granted = thread::spawn(move || Peer::accept(&listener).grant(8));
    let began = Instant::now();
    let guard = guard_of(&format!("{dead}|{addr}"));
    granted.join().expect("no panic");
    let (loss, at) = losses(&guard).recv_timeout(PATIENCE).expect("a loss");
    assert_eq!(loss, Loss::Deadline);
    assert!(
        at - began >= Duration::from_millis(5900),
        "{:?}",
        at - began
    );
}

#[test]
fn a_server_that_restarts_has_released_the_lock() {
    let port = free_addr().port().to_string();
    let start = || {
        let mut command = Daemon::command();
        command.args(["--port", &port, "--print-port"]);
        Daemon::from_command(command)
    };
    let daemon = start();
    let guard = guard_of(&daemon.addr().to_string());
    let losses = losses(&guard);
    drop(daemon);
    let daemon = start();
    let (loss, _) = losses.recv_timeout(PATIENCE).expect("a loss");
    assert_eq!(loss, Loss::Closed);
    assert!(!guard.is_held());
    assert_eq!(daemon.stats()["locks"], serde_json::json!([]));
}

/// It may be full, or restart. A connection without an introduction could not adopt the lock later.
#[test]
fn a_close_before_the_answer_to_hello_is_a_failed_attempt() {
    let commands: [&[&str]; 2] = [&["run", "k", "--", "true"], &["acquire", "k"]];
    for arguments in commands {
        let (listener, addr) = listener();
        let server = thread::spawn(move || drop(Peer::accept(&listener)));
        let mut command = Command::new(program("latch"));
        command
            .args(arguments)
            .env("LATCH_SERVER", addr.to_string());
        let failed = output(&mut command);
        server.join().expect("it was asked");
        assert_eq!(failed.status.code(), Some(69), "{arguments:?}");
        let said = text(&failed.stderr);
        assert!(said.contains("the server closed the connection"), "{said}");
    }
}

#[test]
fn after_a_close_the_next_attempt_introduces_itself_again() {
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        drop(Peer::accept(&listener));
        let mut peer = Peer::accept(&listener);
        assert_eq!(peer.any_request(), HELLO);
        peer.answer("ok adopt slots");
        assert!(peer.any_request().starts_with("tag _ "));
        peer.answer("ok");
        peer.grant(60);
        assert_eq!(peer.any_request(), format!("r k {TOKEN}"));
        peer.answer("ok");
    });
    let mut command = Command::new(program("latch"));
    let arguments = ["run", "k", "--shared", "--retry", "--", "true"];
    command
        .args(arguments)
        .env("LATCH_SERVER", addr.to_string());
    let ended = output(&mut command);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    server.join().expect("it was asked");
}

/// As the first servers of this protocol do after each request that they do not know.
#[test]
fn a_server_that_answers_error_and_closes_is_asked_plainly() {
    let (listener, addr) = listener();
    let (has_returned, returned) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut first = Peer::accept(&listener);
            assert_eq!(first.any_request(), HELLO);
            first.any_request();
            first.answer("error");
            drop(first);
            let mut second = Peer::accept(&listener);
            assert_eq!(second.any_request().split(' ').next(), Some("l"));
            second.answer(&format!("ok {TOKEN} 30"));
            drop(second);
            // Each later connection introduces itself: the server may be a newer one by then.
            let mut third = Peer::accept(&listener);
            assert_eq!(third.any_request(), HELLO);
            has_returned.send(()).expect("the test waits for it");
            third.answer("ok adopt");
            third.give_to_adopter_and_take_back(30);
        });
        let guard = guard_of(&addr.to_string());
        returned.recv_timeout(PATIENCE).expect("it comes back");
        eventually(PATIENCE, "it is held again", || guard.is_held());
        guard.release().expect("held");
    });
}

/// A forwarder that is away refuses connections, while the server behind it keeps the lock.
#[test]
fn a_refusal_is_an_outage_if_a_disconnect_releases_nothing() {
    let daemon = Daemon::start_directly(Scheme::Plain, &["--no-auto-release-on-disconnect"]);
    let front = free_addr();
    let (reached, forward) = (TcpListener::bind(front).expect("a port"), daemon.addr());
    let cutter = WireCutter::behind(reached, forward);
    let server: Address = front.to_string().parse().expect("an address");
    let lock = Client::new([server]);
    let guard = lock
        .lock("k")
        .tag("")
        .lease(Duration::from_secs(30))
        .acquire();
    let guard = guard.expect("granted");
    let losses = losses(&guard);
    cutter.close();
    eventually(PATIENCE, "the end is noticed", || !guard.is_held());
    // Longer than a server that is alone may refuse connections.
    assert!(losses.recv_timeout(Duration::from_secs(4)).is_err());
    let _back = WireCutter::behind(TcpListener::bind(front).expect("its port"), forward);
    eventually(PATIENCE, "it is held again", || guard.is_held());
    guard.release().expect("held");
}
