//! `latch` with real processes: what a shell sees of all that does not run a command.

use std::fs::{self, File};
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::reconnecting::{listener, Peer};
use crate::support::at_the_end::AtTheEnd;
use crate::support::latch::{
    is_held, latch, output, run, signal, state, status, text, wait, Latch,
};
use crate::support::silent::FullBacklog;
use crate::support::stalls::{fair_test, in_time};
use crate::support::wire_cutter::WireCutter;
use crate::support::{eventually, program, rows_of, Daemon, Signal, PATIENCE};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{flock, FlockOperation};
use rustix::process::Pid;

#[cfg(not(feature = "tls"))]
#[test]
fn a_build_without_tls_refuses_to_go_without() {
    let daemon = Daemon::start(&[]);
    let refusal = |command: &mut Command| {
        let output = command.output().expect("it was built by cargo");
        assert_eq!(output.status.code(), Some(64));
        text(&output.stderr)
    };
    let lacking = "needs a build with --features tls\nlatch: see latch";
    for option in [&["--tls"][..], &["--tls-ca", "x"], &["--tls-name", "x"]] {
        let arguments = [&["run", "k"], option, &["--", "true"]].concat();
        let line = refusal(&mut latch(&daemon, &arguments));
        let expected = format!("latch: {}: {lacking} run --help\n", option[0]);
        assert_eq!(line, expected);
    }
    for (name, value) in [
        ("LATCH_TLS", "yes"),
        ("LATCH_TLS_CA", "x"),
        ("LATCH_TLS_NAME", "x"),
    ] {
        let line = refusal(latch(&daemon, &["ping"]).env(name, value));
        assert_eq!(line, format!("latch: {name}: {lacking} ping --help\n"));
    }
    let mut plain = latch(&daemon, &["ping"]);
    plain.env("LATCH_TLS", "no").env("LATCH_TLS_CA", "x");
    assert_eq!(plain.status().expect("it runs").code(), Some(0));
    let mut plain = latch(&daemon, &["ping", "--tls=no"]);
    plain.env("LATCH_TLS", "yes");
    assert_eq!(plain.status().expect("it runs").code(), Some(0));
}

/// A standby that cannot reach the active server closes connections so.
#[test]
fn any_command_goes_on_to_the_next_server_of_the_cluster() {
    let daemon = Daemon::start(&["--no-auto-release-on-disconnect"]);
    let closing = TcpListener::bind("127.0.0.1:0").expect("there is a port");
    let first = closing.local_addr().expect("it listens");
    let closed = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&closed);
    thread::spawn(move || {
        for client in closing.incoming().flatten() {
            // A request that has been read: the server may have carried it out.
            let _ = (&client).read(&mut [0; 256]);
            counter.fetch_add(1, Ordering::SeqCst);
        }
    });
    let cluster = format!("{first}|{}", daemon.addr());
    let ask = |words: &[&str]| {
        let mut command = Command::new(program("latch"));
        command.args(words).env("LATCH_SERVER", &cluster);
        let output = command.output().expect("it was built by cargo");
        (
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    let mut client = daemon.connect();
    let grant = client.acquire_for("k", 0, 60);
    let token = grant.token.as_str();
    let renewed = (Some(0), "33\n".to_owned(), String::new());
    assert_eq!(ask(&["renew", "k", token]), renewed);
    let answers = format!("{}: ok\n", daemon.addr());
    assert_eq!(ask(&["ping"]), (Some(0), answers, String::new()));
    let (status, shown, said) = ask(&["stats"]);
    assert_eq!((status, said), (Some(0), String::new()), "{shown}");
    assert_eq!(ask(&["release", "k", token]).0, Some(0));
    let (status, _, said) = ask(&["release", "k", token]);
    assert_eq!(status, Some(69));
    assert!(
        said.ends_with("no longer held; an earlier attempt may have released it\n"),
        "{said}"
    );
    assert_eq!(closed.load(Ordering::SeqCst), 5);
}

#[test]
fn a_usage_error_says_what_to_write_instead() {
    const COMMANDS: &str = "run hold wait acquire reserve renew release stats status break ping";
    let daemon = Daemon::start(&[]);
    for (arguments, hint) in rows_of(include_str!("usage_errors.txt")) {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let refused = run(&daemon, &arguments);
        assert_eq!(refused.status.code(), Some(64), "{arguments:?}");
        let command = arguments.first().copied().unwrap_or_default();
        let is_command = COMMANDS.split(' ').any(|it| it == command);
        let help = if is_command {
            format!("{command} ")
        } else {
            String::new()
        };
        let expected = format!("latch: {hint}\nlatch: see latch {help}--help\n");
        assert_eq!(text(&refused.stderr), expected, "{arguments:?}");
        assert_eq!(text(&refused.stdout), "", "{arguments:?}");
    }
}

#[test]
fn the_help_tells_what_this_build_has() {
    let daemon = Daemon::start(&[]);
    let help = |arguments: &[&str]| text(&run(&daemon, arguments).stdout);
    let lacks_tls = help(&["ping", "--help"]).contains("A build with --features tls also has");
    assert_eq!(lacks_tls, !cfg!(feature = "tls"));
    assert!(help(&["-V"]).ends_with(if lacks_tls { " (-tls)\n" } else { " (+tls)\n" }));
}

#[test]
fn a_message_is_written_at_once() {
    let daemon = Daemon::start(&[]);
    for arguments in [&["ping", "k"][..], &["run", "k", "--", "/none/such"]] {
        // Each write is a datagram.
        let (stderr, reader) = UnixDatagram::pair().expect("a socket pair");
        let mut command = latch(&daemon, arguments);
        command.stderr(OwnedFd::from(stderr));
        command.status().expect("it starts");
        let mut line = [0; 1024];
        let len = reader.recv(&mut line).expect("a message");
        let line = text(&line[..len]);
        assert!(
            line.starts_with("latch: ") && line.ends_with('\n'),
            "{line:?}"
        );
    }
}

#[test]
fn a_grant_whose_token_nobody_reads_is_released() {
    let daemon = Daemon::start(&["--no-auto-release-on-disconnect"]);
    let mut holder = daemon.connect();
    let grant = holder.acquire("k", 0);
    let mut command = latch(&daemon, &["acquire", "k"]);
    let mut child = Latch::start(command.stdout(Stdio::piped()));
    daemon.wait_for_waiters("k", 1);
    drop(child.stdout.take());
    // A program that another test is just starting holds a copy of the reading end until its exec.
    let its_stdout = File::options()
        .write(true)
        .open(format!("/proc/{}/fd/1", child.id()))
        .expect("it runs");
    eventually(PATIENCE, "the reader of its output is gone", || {
        let mut pipe = [PollFd::new(&its_stdout, PollFlags::empty())];
        poll(&mut pipe, Some(&Timespec::default())).expect("one descriptor");
        pipe[0].revents().contains(PollFlags::ERR)
    });
    assert_eq!(holder.request("r", "k", &grant.token), "ok");
    assert_eq!(wait(&mut child), Some(74));
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn a_stop_beyond_the_lease_fails_acquire_and_not_wait() {
    for (command, status, expected) in [
        ("wait", 0, ""),
        (
            "acquire",
            70,
            "the lease was over before the grant was collected\n",
        ),
    ] {
        let daemon = Daemon::start(&["--default-lease-ttl", "1"]);
        let mut holder = daemon.connect();
        let grant = holder.acquire_for("k", 0, 600);
        let mut command = latch(&daemon, &[command, "k"]);
        let mut waiting = Latch::start(command.stderr(Stdio::piped()));
        daemon.wait_for_waiters("k", 1);
        signal(&waiting, Signal::STOP);
        eventually(PATIENCE, "it has stopped", || {
            state(Pid::from_child(&waiting)) == Some('T')
        });
        assert_eq!(holder.request("r", "k", &grant.token), "ok");
        eventually(PATIENCE, "the lease is over", || !is_held(&daemon, "k"));
        signal(&waiting, Signal::CONT);
        assert_eq!(wait(&mut waiting), Some(status));
        let mut said = String::new();
        let stderr = waiting.stderr.as_mut().expect("piped");
        stderr.read_to_string(&mut said).expect("text");
        assert!(said.ends_with(expected), "{said}");
        assert_eq!(said.is_empty(), expected.is_empty(), "{said}");
    }
}

// ---------------------------------------------------------------------------------------------
// Exit status

#[test]
fn a_reply_that_is_not_valid_is_76() {
    let daemon = Daemon::start(&[]);
    let stranger = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = stranger.local_addr().expect("its address").to_string();
    let answers = thread::spawn(move || {
        let (mut stream, _) = stranger.accept().expect("a client");
        let _ = std::io::Write::write_all(&mut stream, b"220 mail.example ESMTP\r\n");
        let _ = stream.read(&mut [0; 100]);
    });
    let arguments = ["run", "k", "--server", &address, "--", "true"];
    assert_eq!(status(&daemon, &arguments), 76);
    answers.join().expect("it answered");
}

#[test]
fn a_command_that_is_too_long_with_its_environment_is_71() {
    let daemon = Daemon::start(&[]);
    // The longest command line that latch itself can have. What latch adds to it is too much.
    let with = |count: usize| {
        let mut command = latch(&daemon, &["run", "k", "--", "true"]);
        // In pieces, because the length of a single word is limited, too.
        command.args((0..count / 1000).map(|_| "x".repeat(999)));
        command.arg("x".repeat(count % 1000));
        command
    };
    let can_start = |count: usize| {
        let child = with(count).stderr(Stdio::null()).spawn();
        child.is_ok_and(|mut child| wait(&mut child).is_some())
    };
    let (mut possible, mut impossible) = (0, 8_000_000);
    assert!(can_start(possible) && !can_start(impossible));
    while impossible - possible > 1 {
        let middle = (possible + impossible) / 2;
        if can_start(middle) {
            possible = middle;
        } else {
            impossible = middle;
        }
    }
    let output = output(&mut with(possible));
    assert_eq!(output.status.code(), Some(71), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr).lines().count(), 1);
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn blanks_around_the_value_of_a_variable_are_no_part_of_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let token_file = directory.path().join("token");
    // As an editor of Windows writes it, with a byte order mark.
    fs::write(&token_file, "\u{feff}s3cret\r\n").expect("there is room");
    let token_file = format!("{}\n", token_file.display());
    let mut server = Daemon::command();
    server.env("LATCHD_PORT", "0\n").arg("--print-port");
    server.env("LATCHD_AUTH_TOKEN_FILE", &token_file);
    server.env("LATCHD_READ_TIMEOUT", "\u{feff}25 ");
    let daemon = Daemon::from_command(server);
    let mut command = latch(&daemon, &["ping"]);
    command.env("LATCH_SERVER", format!(" {}\n", daemon.addr()));
    command.env("LATCH_AUTH_TOKEN_FILE", &token_file);
    command.env("LATCH_TLS", "no\n");
    let asked = output(&mut command);
    assert_eq!(asked.status.code(), Some(0), "{asked:?}");
    let mut client = daemon.connect();
    assert_eq!(client.request("auth", "_", "s3cret"), "ok");
    // What the user has typed is taken as it is.
    let mut typed = Daemon::command();
    let refused = output(typed.args(["--read-timeout", " 5"]));
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
}

// ---------------------------------------------------------------------------------------------
// Servers that do not answer

#[test]
fn a_try_at_a_socket_with_a_full_backlog_ends() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let _busy = FullBacklog::at(&path);
    let server = path.to_str().expect("text");
    let arguments = [
        "run",
        "k",
        "--timeout",
        "0",
        "--server",
        server,
        "--",
        "true",
    ];
    let output = run(&daemon, &arguments);
    assert_eq!(output.status.code(), Some(69), "{}", text(&output.stderr));
    // What has timed out, each C library says in its own words.
    let said = text(&output.stderr);
    let why = said.strip_prefix(&format!("latch: {server}: "));
    assert!(
        why.is_some_and(|why| why.ends_with(" timed out\n")),
        "{said}"
    );
}

#[test]
fn every_command_gives_up_on_a_silent_server() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let _busy = FullBacklog::at(&path);
    let secret = directory.path().join("secret");
    fs::write(&secret, "secret").expect("write");
    // The server listens, but does not accept: the kernel completes the connection.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().expect("its address").to_string();
    let servers = [path.to_str().expect("text"), &silent];
    let token = "0123456789abcdef".repeat(2);
    let commands: [&[&str]; 13] = [
        &["run", "k", "--", "true"],
        &["run", "k", "--retry=1", "--", "true"],
        &["run", "k", "--timeout", "0", "--", "true"],
        &["run", "k", "--timeout", "1", "--", "true"],
        &["wait", "k"],
        &["wait", "k", "--timeout", "0"],
        &["wait", "k", "--timeout", "1"],
        &["acquire", "k"],
        &["acquire", "k", "--timeout", "0"],
        &["renew", "k", &token],
        &["release", "k", &token],
        &["stats"],
        &["ping"],
    ];
    thread::scope(|scope| {
        for command in commands {
            for (server, secret) in [
                (servers[0], None),
                (servers[1], None),
                (servers[1], Some(&secret)),
            ] {
                let daemon = &daemon;
                scope.spawn(move || {
                    let options = ["--server", server, "--connect-timeout", "1"];
                    let (ours, theirs) = match command.iter().position(|word| *word == "--") {
                        Some(dashes) => command.split_at(dashes),
                        None => (command, &[][..]),
                    };
                    let mut latch = latch(daemon, &[ours, &options, theirs].concat());
                    if let Some(secret) = secret {
                        latch.env("LATCH_AUTH_TOKEN_FILE", secret);
                    }
                    let output = output(&mut latch);
                    let said = text(&output.stderr);
                    assert_eq!(output.status.code(), Some(69), "{command:?}: {said}");
                    assert!(said.contains(server), "{command:?}: {said}");
                    assert_eq!(said.lines().count(), 1, "{command:?}: {said}");
                });
            }
        }
    });
}

#[test]
fn a_timeout_bounds_connecting_and_silence_together() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let (full, late) = (directory.path().join("full"), directory.path().join("late"));
    let (_full, busy) = (FullBacklog::at(&full), FullBacklog::at(&late));
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().expect("its address").to_string();
    let secret = directory.path().join("secret");
    fs::write(&secret, "secret").expect("write");
    let ends = |command: &[&str], server: &str, timeout: &str, has_secret: bool| {
        // A wait for more than the timeout takes a minute.
        let options = ["--connect-timeout", "60", "--server", server];
        let arguments = [
            &command[..2],
            &["--timeout", timeout],
            &options,
            &command[2..],
        ];
        let mut latch = latch(&daemon, &arguments.concat());
        if has_secret {
            latch.env("LATCH_AUTH_TOKEN_FILE", &secret);
        }
        let began = Instant::now();
        let output = output(&mut latch);
        let took = began.elapsed();
        assert_eq!(output.status.code(), Some(69), "{command:?}: {output:?}");
        assert!(took < Duration::from_secs(20), "{command:?}: {took:?}");
    };
    let commands: [&[&str]; 3] = [
        &["run", "k", "--", "true"],
        &["wait", "k"],
        &["acquire", "k"],
    ];
    thread::scope(|scope| {
        let (ends, late) = (&ends, late.to_str().expect("text"));
        for has_secret in [false, true] {
            for command in commands {
                for server in [full.to_str().expect("text"), &silent] {
                    scope.spawn(move || ends(command, server, "0", has_secret));
                    scope.spawn(move || ends(command, server, "1", has_secret));
                }
            }
        }
        scope.spawn(|| [false, true].map(|it| ends(&["wait", "k"], late, "3", it)));
        // The time in which this server is silent begins while the client connects.
        thread::sleep(Duration::from_secs(1));
        busy.listener.accept().expect("one is waiting");
    });
}

#[test]
fn a_late_refusal_leaves_its_reason_no_more_time() {
    fair_test(a_late_refusal_leaves_its_reason_no_more_time_once);
}

fn a_late_refusal_leaves_its_reason_no_more_time_once() {
    let daemon = Daemon::start(&[]);
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        let mut peer = Peer::accept(&listener);
        assert!(peer.request().starts_with("tag _ "));
        peer.answer("ok");
        assert_eq!(peer.request(), "l k 0");
        thread::sleep(Duration::from_millis(600));
        peer.answer("timeout");
        // It is silent to the question who holds the key.
        assert_eq!(peer.request(), "stats holders k");
        peer
    });
    let server_address = addr.to_string();
    let options = ["--timeout", "0", "--server", &server_address];
    let command = [&["run", "k"], &options[..], &["--", "true"]].concat();
    let began = Instant::now();
    let output = run(&daemon, &command);
    let took = began.elapsed();
    // The refusal came before the second of a round trip was over.
    in_time!(output.status.code() == Some(75), "{output:?}");
    in_time!(took < Duration::from_millis(1400), "{took:?}");
    drop(server.join().expect("no panic"));
}

// ---------------------------------------------------------------------------------------------
// Fences

/// How one call of `latch fence-check` went.
#[derive(Debug)]
struct Check {
    fence: u64,
    began: Instant,
    ended: Instant,
    /// `None` if the caller was killed.
    status: Option<i32>,
}

fn check_fence(file: &Path, fence: u64, kill_after: Option<Duration>) -> Check {
    let began = Instant::now();
    let mut child = Latch::start(
        Command::new(program("latch"))
            .arg("fence-check")
            .arg(file)
            .arg(format!("{fence:016x}{:016x}", 0x5a17))
            .stdin(Stdio::null()),
    );
    if let Some(time) = kill_after {
        thread::sleep(time);
        let _ = child.kill();
    }
    let status = wait(&mut child);
    Check {
        fence,
        began,
        ended: Instant::now(),
        status,
    }
}

/// The fence in `file`, read between two writers; `None` if there is none yet.
fn remembered(file: &Path) -> Option<u64> {
    let mut file = File::open(file).ok()?;
    flock(&file, FlockOperation::LockShared).expect("a lock");
    let mut text = String::new();
    file.read_to_string(&mut text).expect("text");
    if text.is_empty() {
        return None;
    }
    assert!(text.len() == 17 && text.ends_with('\n'), "{text:?}");
    Some(u64::from_str_radix(text.trim_end(), 16).expect("a fence"))
}

#[test]
fn fences_never_go_back_whenever_a_caller_is_killed() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("fence");
    let (next, over) = (AtomicU64::new(3), AtomicBool::new(false));
    let accepted_count = AtomicUsize::new(0);
    let checks = Mutex::new(Vec::new());
    let seed = std::process::id();
    println!("seed {seed}");
    thread::scope(|scope| {
        let _end = AtTheEnd(&over);
        let watcher = scope.spawn(|| {
            let mut highest = None;
            while !over.load(Ordering::Acquire) {
                let now = remembered(&file);
                assert!(now >= highest, "{now:?} after {highest:?}");
                highest = now;
                thread::sleep(Duration::from_millis(1));
            }
        });
        let callers: Vec<_> = (0..8)
            .map(|caller| {
                let (file, next, checks) = (&file, &next, &checks);
                let accepted_count = &accepted_count;
                scope.spawn(move || {
                    let mut random = seed.wrapping_mul(8).wrapping_add(caller) | 1;
                    // How many are outdated when they come is up to the machine.
                    for round in 0..600 {
                        if round >= 60 && accepted_count.load(Ordering::Relaxed) > 50 {
                            break;
                        }
                        random ^= random << 13;
                        random ^= random >> 17;
                        random ^= random << 5;
                        // Sometimes an older token, which may be outdated.
                        let fence = next.fetch_add(1, Ordering::Relaxed) - u64::from(random % 3);
                        let time = Duration::from_micros(u64::from(random % 4000));
                        let kill_after = (random % 2 == 0).then_some(time);
                        let check = check_fence(file, fence, kill_after);
                        let was_accepted = usize::from(check.status == Some(0));
                        accepted_count.fetch_add(was_accepted, Ordering::Relaxed);
                        checks.lock().unwrap().push(check);
                    }
                })
            })
            .collect();
        let ended: Vec<_> = callers.into_iter().map(|caller| caller.join()).collect();
        over.store(true, Ordering::Release);
        watcher.join().expect("the file never went back");
        assert!(ended.iter().all(Result::is_ok), "a caller failed");
    });
    let checks = checks.into_inner().unwrap();
    let killed = checks.iter().filter(|check| check.status.is_none()).count();
    println!("{killed} of {} were killed", checks.len());
    assert!(killed > 0, "no caller was killed in time");
    let mut accepted: Vec<&Check> = checks.iter().filter(|c| c.status == Some(0)).collect();
    assert!(accepted.len() > 50, "{} were accepted", accepted.len());
    // A caller may find the file locked by others each time it looks, and give up.
    assert!(checks
        .iter()
        .all(|check| matches!(check.status, None | Some(0 | 1 | 74))));
    accepted.sort_by_key(|check| check.ended);
    for newer in &accepted {
        for older in &accepted {
            let is_later = older.began > newer.ended;
            assert!(
                !is_later || older.fence >= newer.fence,
                "{older:?} was accepted after {newer:?}"
            );
        }
    }
    let highest = accepted.iter().map(|check| check.fence).max();
    assert!(remembered(&file) >= highest);
    let newest = next.into_inner();
    assert_eq!(check_fence(&file, newest, None).status, Some(0));
    assert_eq!(check_fence(&file, newest - 1, None).status, Some(1));
}

/// As in a deployment that changes the limit host by host.
#[test]
fn a_claim_with_a_new_limit_waits_for_the_users_of_the_old() {
    let daemon = Daemon::start(&[]);
    let waits: [&[&str]; 3] = [
        &["run", "k", "--limit", "3", "--timeout", "60", "--", "true"],
        &["run", "k", "--limit", "3", "--retry", "--", "true"],
        &["wait", "k", "--limit", "3", "--timeout", "60"],
    ];
    for arguments in waits {
        let mut holder = daemon.connect();
        let token = holder.request("sl", "k", "0 2 600");
        let token = token.split(' ').nth(1).expect("a token");
        let proxy = WireCutter::before(daemon.addr());
        let mut command = latch(&daemon, arguments);
        command.env("LATCH_SERVER", proxy.addr().to_string());
        let mut waiting = Latch::start(&mut command);
        eventually(PATIENCE, "the claim is refused", || {
            proxy.has_answered("error_limit_mismatch")
        });
        assert_eq!(waiting.try_wait().expect("a child"), None, "{arguments:?}");
        assert_eq!(holder.request("sr", "k", token), "ok");
        assert_eq!(wait(&mut waiting), Some(0), "{arguments:?}");
    }
}
