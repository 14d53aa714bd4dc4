//! What `latch` says and does while it waits: the waiting line, and a server that comes back.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::pipe::pipe;
use rustix::process::kill_process;
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

use crate::reconnecting::{listener, Peer};
use crate::support::latch::{
    fill, init_of, is_held, latch, process_1, run, signal, status, text, wait, wait_as_shell, Latch,
};
use crate::support::silent::{refusing_addr, FullBacklog};
use crate::support::{eventually, program, Daemon, Scheme, Signal, PATIENCE};

/// Starts a command with its stderr in a pipe.
fn piped(daemon: &Daemon, arguments: &[&str]) -> Latch {
    let mut command = latch(daemon, arguments);
    Latch::start(command.stdout(Stdio::null()).stderr(Stdio::piped()))
}

fn first_line(child: &mut Latch) -> String {
    let mut line = String::new();
    let stderr = child.stderr.as_mut().expect("piped");
    BufReader::new(stderr).read_line(&mut line).expect("text");
    line
}

#[test]
fn a_full_stderr_delays_neither_the_grant_nor_a_signal() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let mut waiting = [(); 2].map(|()| piped(&daemon, &["run", "k", "-v", "--", "true"]));
    for latch in &waiting {
        fill(latch.stderr.as_ref().expect("piped"));
    }
    daemon.wait_for_waiters("k", 2);
    // The first line is due after two seconds.
    thread::sleep(Duration::from_millis(2500));
    signal(&waiting[0], Signal::TERM);
    assert_eq!(wait_as_shell(&mut waiting[0]), Some(143));
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert_eq!(wait(&mut waiting[1]), Some(0));
}

/// What a command that fails with `status` says, and how long that took.
fn failed(daemon: &Daemon, arguments: &[&str], status: i32) -> (String, Duration) {
    let began = Instant::now();
    let output = run(daemon, arguments);
    assert_eq!(
        output.status.code(),
        Some(status),
        "{arguments:?}: {output:?}"
    );
    (text(&output.stderr), began.elapsed())
}

#[test]
fn a_server_that_tells_no_holder_delays_a_vain_wait_by_a_second() {
    let daemon = Daemon::start(&[]);
    for answer in [
        None,
        Some(""),
        Some("error"),
        Some("ok {\"keys\":["),
        Some("ok {}"),
    ] {
        let (listener, addr) = listener();
        let server = thread::spawn(move || {
            let mut peer = Peer::accept(&listener);
            loop {
                let request = peer.any_request();
                match request.split(' ').next() {
                    Some("l") => peer.answer("timeout"),
                    Some("stats") => break assert_eq!(request, "stats holders k"),
                    _ => peer.answer("ok"),
                }
            }
            match answer {
                // It waits for the client to leave.
                None => drop(peer.any_request()),
                Some("") => {}
                Some(answer) => peer.answer(answer),
            }
        });
        let addr = addr.to_string();
        let arguments = ["run", "k", "-n", "--server", &addr, "--", "true"];
        let (said, took) = failed(&daemon, &arguments, 75);
        let expected = format!("latch: k at {addr}: not granted at once\n");
        assert_eq!(said, expected, "{answer:?}");
        assert!(took < PATIENCE / 2, "{answer:?}: {took:?}");
        server.join().expect("it is asked");
    }
}

/// Answers the first connection never, and all others with `reply`.
fn older_server(reply: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("its address").to_string();
    thread::spawn(move || {
        let _waiting = listener.accept();
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            let mut request = [0; 64];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(reply);
        }
    });
    addr
}

#[test]
fn an_older_server_tells_no_holder() {
    let daemon = Daemon::start(&[]);
    let plain = concat!(
        r#"ok {"connections":1,"locks":[],"semaphores":[],"#,
        r#""idle_locks":[],"idle_semaphores":[]}"#,
        "\n"
    );
    let replies: [&[u8]; 3] = [b"error\n", plain.as_bytes(), b""];
    let mut waiting = replies.map(|reply| {
        let server = older_server(reply);
        piped(
            &daemon,
            &["run", "k", "-v", "--server", &server, "--", "true"],
        )
    });
    for (latch, reply) in waiting.iter_mut().zip(replies) {
        let line = first_line(latch);
        let about = line.strip_prefix("latch: waiting for k").expect(&line);
        // The last one closes the connection, and the user sees that.
        assert_eq!(about == "\n", !reply.is_empty(), "{line}");
    }
}

#[test]
fn connections_without_an_answer_do_not_end_an_outage() {
    let daemon = Daemon::start(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = listener.local_addr().expect("its address").to_string();
    // A proxy whose server is away.
    thread::spawn(move || {
        for client in listener.incoming() {
            thread::sleep(Duration::from_millis(1200));
            drop(client);
        }
    });
    let arguments = ["run", "k", "--server", &server, "--retry=2", "--", "true"];
    assert_eq!(status(&daemon, &arguments), 69);
}

#[test]
fn a_wait_at_a_server_without_hello_is_no_outage() {
    const WAITS: usize = 3;
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        // It restarts at the end of each wait.
        for _ in 0..WAITS {
            let mut introducing = Peer::accept(&listener);
            let request = introducing.any_request();
            assert!(request.starts_with("hello _ "), "{request}");
            introducing.any_request();
            introducing.answer("error");
            drop(introducing);
            let mut claiming = Peer::accept(&listener);
            let request = claiming.request();
            assert!(request.starts_with("l k "), "{request}");
            thread::sleep(Duration::from_secs(2));
        }
    });
    let address = addr.to_string();
    let mut command = Command::new(program("latch"));
    command.args(["run", "k", "--server", &address, "--retry=3", "--", "true"]);
    let _child = Latch::start(command.stdin(Stdio::null()).stderr(Stdio::null()));
    server.join().expect("it came again");
}

#[test]
fn a_signal_ends_the_wait_for_a_server_that_is_not_there() {
    let directory = tempfile::tempdir().expect("a directory");
    let full = directory.path().join("full");
    let _full = FullBacklog::at(&full);
    let (_port, refusing) = refusing_addr();
    let (silent, silent_addr) = listener();
    let servers: [(&str, &dyn Fn() -> Option<Peer>); 3] = [
        (full.to_str().expect("text"), &|| None),
        (&refusing.to_string(), &|| None),
        (&silent_addr.to_string(), &|| Some(Peer::accept(&silent))),
    ];
    for (server, connected) in servers {
        let fixed = ["run", "k", "--retry", "--connect-timeout", "1h", "--server"];
        let mut command = Command::new(program("latch"));
        command.args(fixed).args([server, "--", "true"]);
        let mut waiting = Latch::start(command.stdin(Stdio::null()).stderr(Stdio::null()));
        let _peer = connected();
        signal(&waiting, Signal::TERM);
        assert_eq!(wait_as_shell(&mut waiting), Some(143), "{server}");
    }
}

#[test]
fn retry_goes_on_from_a_server_that_says_nothing() {
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        let silent = Peer::accept(&listener);
        let mut second = Peer::accept(&listener);
        let request = second.request();
        assert!(request.starts_with("tag _ "), "{request}");
        second.answer("ok");
        second.grant(60);
        let request = second.request();
        assert!(request.starts_with("r k "), "{request}");
        second.answer("ok");
        drop(silent);
    });
    let address = addr.to_string();
    let fixed = ["run", "k", "--connect-timeout", "3", "--retry", "--server"];
    let mut command = Command::new(program("latch"));
    command.args(fixed).args([&address, "--", "true"]);
    let mut child = Latch::start(command.stdin(Stdio::null()).stderr(Stdio::null()));
    server.join().expect("it came again");
    wait(&mut child);
}

#[test]
fn retries_at_a_server_that_says_nothing_end_with_their_time() {
    let (_silent, addr) = listener();
    let address = addr.to_string();
    let fixed = [
        "run",
        "k",
        "--connect-timeout",
        "1",
        "--retry=2",
        "--server",
    ];
    let mut command = Command::new(program("latch"));
    command.args(fixed).args([&address, "--", "true"]);
    let mut child = Latch::start(command.stdin(Stdio::null()).stderr(Stdio::null()));
    assert_eq!(wait(&mut child), Some(69));
}

/// The kernel does not end process 1 by a signal that it does not catch.
#[test]
fn as_process_1_a_waiting_command_ends_by_a_signal() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let commands: [&[&str]; 3] = [
        &["wait", "k"],
        &["acquire", "k"],
        &["reserve", "k", "--for", "60"],
    ];
    for arguments in commands {
        for sent in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
            let Some(mut command) = process_1(&[]) else {
                return;
            };
            let mut unshare = Latch::start(
                command
                    .env("LATCH_SERVER", daemon.addr().to_string())
                    .arg(program("latch"))
                    .args(arguments),
            );
            daemon.wait_for_waiters("k", 1);
            kill_process(init_of(&unshare), sent).expect("it runs");
            assert_eq!(wait_as_shell(&mut unshare), Some(128 + sent.as_raw()));
            daemon.wait_for_waiters("k", 0);
        }
    }
}

#[test]
fn as_process_1_a_watch_ends_by_a_signal() {
    let daemon = Daemon::start(&[]);
    let Some(mut command) = process_1(&[]) else {
        return;
    };
    command
        .env("LATCH_SERVER", daemon.addr().to_string())
        .args([program("latch"), "stats", "--watch"]);
    let mut unshare = Latch::start(command.stdout(Stdio::piped()));
    let mut first = [0];
    let stdout = unshare.stdout.as_mut().expect("piped");
    stdout.read_exact(&mut first).expect("a table");
    kill_process(init_of(&unshare), Signal::TERM).expect("it runs");
    assert_eq!(wait_as_shell(&mut unshare), Some(143));
}

/// The caller then knows no token, and could not release the lock.
#[test]
fn a_lock_whose_token_was_not_printed_ends_with_the_signal() {
    let daemon = Daemon::start(&[]);
    for arguments in [&["acquire", "k"][..], &["reserve", "k", "--for", "1h"]] {
        let (reader, writer) = pipe().expect("a pipe");
        fill(&reader);
        let mut command = latch(&daemon, arguments);
        let mut latch = Latch::start(command.stdout(writer));
        eventually(PATIENCE, "the server keeps it", || {
            daemon.stats()["locks"][0]["owner_conn_id"] == 0
        });
        signal(&latch, Signal::TERM);
        assert_eq!(wait_as_shell(&mut latch), Some(143));
        assert!(!is_held(&daemon, "k"), "{arguments:?}");
    }
}

/// The grant lies unread in the socket of a stopped process, so its end alone would be a reset.
#[test]
fn a_signal_that_meets_the_grant_leaves_the_key_free() {
    let daemon = Daemon::start_directly(Scheme::Plain, &[]);
    let (mut holder, mut next) = (daemon.connect(), daemon.connect());
    stay_on_one_processor();
    for _ in 0..10 {
        let grant = holder.acquire_for("k", 0, 600);
        let mut waiting = piped(
            &daemon,
            &["run", "k", "--lease", "600", "--", "sleep", "60"],
        );
        daemon.wait_for_waiters("k", 1);
        signal(&waiting, Signal::STOP);
        assert_eq!(holder.request("r", "k", &grant.token), "ok");
        eventually(PATIENCE, "the grant is sent", || is_held(&daemon, "k"));
        signal(&waiting, Signal::TERM);
        signal(&waiting, Signal::CONT);
        assert_eq!(wait_as_shell(&mut waiting), Some(128 + 15));
        let grant = next.acquire_for("k", 10, 600);
        assert_eq!(next.request("r", "k", &grant.token), "ok");
    }
}

/// The process may be stopped before it has read that the server knows it.
#[test]
fn a_signal_that_meets_the_first_answer_ends_the_stream() {
    let (listener, addr) = listener();
    stay_on_one_processor();
    for _ in 0..10 {
        let mut command = Command::new(program("latch"));
        command.args(["run", "k", "--server", &addr.to_string(), "--", "true"]);
        let mut waiting = Latch::start(&mut command);
        let mut peer = Peer::accept(&listener);
        for command in ["hello", "tag", "l"] {
            assert_eq!(peer.any_request().split(' ').next(), Some(command));
        }
        signal(&waiting, Signal::STOP);
        peer.answer("ok adopt");
        signal(&waiting, Signal::TERM);
        signal(&waiting, Signal::CONT);
        assert_eq!(wait_as_shell(&mut waiting), Some(128 + 15));
        // A reset would be an error here.
        assert_eq!(peer.any_request().trim(), "");
    }
}

/// Keeps this thread and what it starts on one processor, where the thread that handles a signal
/// mostly runs before the one that reads.
fn stay_on_one_processor() {
    let all = sched_getaffinity(None).expect("this thread's processors");
    let mut one = CpuSet::new();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu));
    one.set(first.expect("a processor"));
    sched_setaffinity(None, &one).expect("one of them");
}
