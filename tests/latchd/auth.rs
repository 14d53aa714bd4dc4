//! The secret of `auth` stays one: it is not shown, its bytes do not show in the time that a guess
//! takes, and guessing is slow for the guesser and for no other client.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::callgrind::{self, cost_of_call, counting};
use crate::support::limited::{limit_to, limited};
use crate::support::needs::{needs, skipped, Program};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, program, Client, Daemon, Signal, PATIENCE};
use rustix::net::{bind, connect, socket, AddressFamily, SocketType};
use rustix::process::Resource;

const SECRET: &str = "open-sesame-3f1c";

// ---- it is not shown -------------------------------------------------------------------------

#[test]
fn a_secret_is_not_shown_where_others_may_look() {
    let directory = tempfile::tempdir().expect("there is room");
    let file = directory.path().join("secret");
    fs::write(&file, SECRET).expect("there is room");
    let file = file.to_str().expect("UTF-8");
    let option = format!("--auth-token-file={file}");
    let everywhere = &["cmdline", "environ", "status", "comm"][..];
    for (option, variable, value, places) in [
        (Some(&option), "LATCHD_AUTH_TOKEN_FILE", "", everywhere),
        (None, "LATCHD_AUTH_TOKEN_FILE", file, everywhere),
        (None, "LATCHD_AUTH_TOKEN", SECRET, &["cmdline"]),
        (None, "DFLOCKD_AUTH_TOKEN", SECRET, &["cmdline"]),
    ] {
        let mut command = latchd();
        command.args(option).env(variable, value);
        let daemon = Daemon::from_command(command);
        assert_eq!(daemon.connect().request("auth", "_", SECRET), "ok");
        for place in places {
            assert!(!is_shown_in(&daemon, place), "the secret is in {place}");
        }
        // Other users may not look into the environment; otherwise a variable would be no place.
        let environ = fs::metadata(format!("/proc/{}/environ", daemon.pid())).expect("it runs");
        assert_eq!(environ.permissions().mode() & 0o077, 0);
    }
}

#[test]
fn a_crash_leaves_no_core_file_with_the_secret() {
    let crash = |prepare: &dyn Fn(u32)| {
        let directory = tempfile::tempdir().expect("there is room");
        let mut command = limited(&["prlimit", "--core=unlimited"]);
        command
            .args(["--auth-token", SECRET])
            .current_dir(directory.path());
        let daemon = Daemon::from_command(command);
        assert_eq!(daemon.connect().request("auth", "_", SECRET), "ok");
        prepare(daemon.pid());
        daemon.signal(Signal::ABORT);
        let status = daemon.wait_exit(PATIENCE).expect("it has crashed");
        let files = fs::read_dir(directory.path()).expect("it is there");
        let core = files.flatten().next();
        let core = core.map(|file| fs::read(file.path()).expect("our file"));
        (status.core_dumped(), core)
    };
    assert_eq!(crash(&|_| {}), (false, None));
    // With a limit that root or the user of the server sets afterwards, there is one.
    let (is_dumped, core) = crash(&|pid| limit_to(pid, Resource::Core, None));
    match core {
        Some(core) => {
            let secret = SECRET.as_bytes();
            assert!(core.windows(secret.len()).any(|some| some == secret));
        }
        // Elsewhere they go to a program, or nowhere.
        None => println!("a core was dumped: {is_dumped}"),
    }
}

#[test]
fn a_refused_guess_is_logged_with_its_peer_alone() {
    let frames = [
        "auth\n_\nguess-7d0e\n".to_owned(),
        format!("auth\n_\n{SECRET}guess-7d0e\n"),
        format!("auth\nguess-7d0e\n{}\n", &SECRET[1..]),
        format!("guess-7d0e\nguess-7d0e\n{SECRET}\n"),
        format!("l\n{SECRET}\nguess-7d0e\n"),
        format!("{SECRET}\nguess-7d0e\nguess-7d0e\n"),
    ];
    // A server logs one refusal a second, so each guess has a server of its own.
    thread::scope(|scope| {
        for level in ["error", "warn", "info", "debug", "trace"] {
            for frame in &frames {
                scope.spawn(move || a_guess_is_logged_without_its_secret(level, frame));
            }
        }
    });
}

fn a_guess_is_logged_without_its_secret(level: &str, frame: &str) {
    let mut command = latchd();
    command
        .env("LATCHD_AUTH_TOKEN", SECRET)
        .env("RUST_LOG", level);
    let daemon = Daemon::from_command(command);
    let mut stream = TcpStream::connect(daemon.addr()).expect("it listens");
    let peer = stream.local_addr().expect("it is connected");
    assert_eq!(guess(&mut stream, frame.as_bytes()), "error_auth\n");
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some(), "it drains");

    let log = daemon.log();
    let line = format!("WARN auth-refused peer={peer} held_back=0");
    assert_eq!(log.contains(&line), level != "error", "at {level}:\n{log}");
    for secret in [SECRET, &SECRET[1..], "guess-7d0e"] {
        assert!(!log.contains(secret), "{secret} in the log:\n{log}");
    }
}

// ---- the time of a guess ---------------------------------------------------------------------

/// Instructions, because time itself is too coarse to show what an attacker could average out of
/// many guesses.
#[test]
fn a_wrong_token_costs_the_same_wherever_it_differs() {
    let valgrind = needs!("valgrind");
    let secret = "s".repeat(3000);
    let wrong_at = |at: usize| {
        let mut token = secret.clone();
        token.replace_range(at..=at, "x");
        format!("auth\n_\n{token}\n")
    };
    let costs = costs_of_guesses(
        &valgrind,
        &secret,
        &[
            ("in its first byte", wrong_at(0)),
            ("in the middle", wrong_at(1500)),
            ("in its last byte", wrong_at(2999)),
            ("everywhere", format!("auth\n_\n{}\n", "x".repeat(3000))),
            ("in its length", format!("auth\n_\n{}\n", &secret[1..])),
        ],
    );
    let (length, places) = costs.split_last().expect("there are five");
    assert_alike(places);
    // The length may show; and that it does proves that the comparison is in what was measured.
    assert!(length.1 < places[0].1 * 0.9, "{costs:?}");
}

#[test]
fn a_guess_costs_the_same_whatever_else_is_wrong() {
    let valgrind = needs!("valgrind");
    let secret = "s".repeat(250);
    let wrong = "x".repeat(250);
    let costs = costs_of_guesses(
        &valgrind,
        &secret,
        &[
            ("nothing but the token", format!("auth\n_\n{wrong}\n")),
            ("the command", format!("ping\n_\n{secret}\n")),
            ("the command's case", format!("AUTH\n_\n{secret}\n")),
            ("the key", format!("auth\n \n{wrong}\n")),
            ("the command and the token", format!("ping\n_\n{wrong}\n")),
            (
                "all of it",
                format!("\u{7f}\u{7f}\u{7f}\u{7f}\n \n{wrong}\n"),
            ),
            ("the length", format!("auth\n_\n{}\n", &wrong[1..])),
        ],
    );
    let (length, kinds) = costs.split_last().expect("there are seven");
    assert_alike(kinds);
    assert!(length.1 < kinds[0].1 * 0.9, "{costs:?}");
}

// ---- brute force -----------------------------------------------------------------------------

#[test]
fn guesses_take_a_tenth_of_a_second_and_delay_no_client() {
    fair_test(|| {
        let (guesser_count, seconds) = amount((50, 3), (200, 10));
        let daemon = with_secret();
        let addr = daemon.addr();
        let mut held = daemon.connect();
        assert_eq!(held.request("auth", "_", SECRET), "ok");
        let began = Instant::now();
        let is_over = AtomicBool::new(false);
        let (guess_count, mut delays) = thread::scope(|scope| {
            let _end = AtTheEnd(&is_over);
            let guessers: Vec<_> = (0..guesser_count)
                .map(|_| scope.spawn(|| guess_until(&is_over, addr)))
                .collect();
            let delays = work_for(Duration::from_secs(seconds), &daemon, &mut held);
            is_over.store(true, Ordering::Relaxed);
            let counts = guessers.into_iter().map(|guesser| guesser.join().unwrap());
            (counts.sum::<u64>(), delays)
        });
        let took = began.elapsed();

        delays.sort_unstable();
        let slow = delays[delays.len() * 99 / 100];
        println!(
            "{guess_count} guesses in {took:?}; of {} requests p50 {:?}, p99 {slow:?}, the slowest {:?}",
            delays.len(),
            delays[delays.len() / 2],
            delays[delays.len() - 1]
        );
        // A tenth of a second, with tenfold slack for a machine that is shared.
        in_time!(slow < Duration::from_secs(1), "p99 is {slow:?}");
        let most = guesser_count * (took.as_millis() as u64 / 100 + 1);
        assert!(guess_count <= most, "{guess_count} guesses in {took:?}");

        // A second later the next one is logged, with all that were not.
        thread::sleep(Duration::from_millis(1100));
        let mut stream = TcpStream::connect(addr).expect("it listens");
        let peer = stream.local_addr().expect("it is connected");
        guess(&mut stream, b"auth\n_\nwrong\n");
        daemon.wait_for_log(&format!("peer={peer}"), PATIENCE);
        let log = daemon.log();
        let lines: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("auth-refused"))
            .collect();
        let held_back: u64 = lines
            .iter()
            .map(|line| line.rsplit_once("held_back=").expect("a count").1)
            .map(|count| count.parse::<u64>().expect("a count"))
            .sum();
        in_time!(lines.len() as u64 <= took.as_secs() + 3, "{log}");
        assert_eq!(lines.len() as u64 + held_back, guess_count + 1, "{log}");
    });
}

#[test]
fn one_who_guesses_all_the_time_hides_no_other_address() {
    let daemon = with_secret();
    let addr = daemon.addr();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| guess_until(&is_over, addr));
        }
        let _end = AtTheEnd(&is_over);
        daemon.wait_for_log("auth-refused peer=127.0.0.1:", PATIENCE);
        for other in ["127.0.0.2", "127.0.0.3", "127.0.0.4"] {
            let mut stream = connect_from(other, addr);
            assert_eq!(guess(&mut stream, b"auth\n_\nwrong\n"), "error_auth\n");
            let peer = stream.local_addr().expect("it is connected");
            let line = format!("auth-refused peer={peer} held_back=0\n");
            daemon.wait_for_log(&line, PATIENCE);
        }
    });
}

// ---- the Unix socket -------------------------------------------------------------------------

#[test]
fn the_mode_and_the_group_of_the_unix_socket_decide_who_gets_in() {
    needs!(root);
    let nc = needs!("nc");
    let directory = tempfile::tempdir().expect("there is room");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    let path = directory.path().join("socket");
    for (args, stranger_gets_in, member_gets_in) in [
        (&["--unix-mode", "0600"][..], false, false),
        (
            &["--unix-mode", "0660", "--unix-group", "54321"],
            false,
            true,
        ),
        (&["--unix-group", "54321"], false, true),
        (&["--unix-mode", "0666"], true, true),
    ] {
        let daemon = Daemon::start_unix(&path, args);
        // The mode is set before anybody can connect, but let us be sure that this is ours.
        eventually(PATIENCE, "the socket answers", || {
            Client::unix(&path).request("ping", "_", "_") == "ok"
        });
        for (gid, gets_in) in [("65534", stranger_gets_in), ("54321", member_gets_in)] {
            let output = ping_as(&nc, gid, &path);
            let reply = String::from_utf8_lossy(&output.stdout);
            let complaint = String::from_utf8_lossy(&output.stderr);
            if gets_in {
                assert_eq!(reply, "ok\n", "{args:?}, gid {gid}: {complaint}");
            } else {
                assert_eq!(reply, "", "{args:?}, gid {gid}");
                assert!(complaint.contains("ermission denied"), "{complaint}");
            }
        }
        drop(daemon);
    }
}

/// Another user who may write to the directory can put another file there once the socket is bound.
#[test]
fn a_file_in_place_of_the_bound_socket_is_left_alone() {
    let strace = needs!("strace");
    for puts_link in [true, false] {
        let directory = tempfile::tempdir().expect("there is room");
        let [path, secret] = ["socket", "secret"].map(|name| directory.path().join(name));
        let _other_server = UnixListener::bind(&secret).expect("there is room");
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).expect("it is ours");
        let mut command = Daemon::command_of(&strace);
        command.args(["-f", "-qq", "-e", "trace=bind"]);
        command.args(["-e", "inject=bind:delay_exit=1500000"]);
        command.arg(program("latchd"));
        command.args(["--port", "off", "--unix-mode", "0666", "--unix"]);
        let group = rustix::process::getegid().to_string();
        command.arg(&path).args(["--unix-group", &group]);
        let daemon = Daemon::from_command(command);
        eventually(PATIENCE, "it is bound", || path.exists());
        fs::rename(&path, directory.path().join("aside")).expect("it is ours");
        let other = if puts_link {
            std::os::unix::fs::symlink(&secret, &path).map(|()| secret)
        } else {
            fs::rename(&secret, &path).map(|()| path)
        };
        let ended = daemon.wait_exit(PATIENCE).expect("it does not start");
        assert_eq!(ended.code(), Some(1), "{}", daemon.log());
        let found = other.and_then(fs::metadata).expect("it is there");
        assert_eq!(found.permissions().mode() & 0o777, 0o600);
        assert!(daemon.log().contains("another file was put in its place"));
    }
}

// ---- how -------------------------------------------------------------------------------------

fn latchd() -> Command {
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]);
    command
}

fn with_secret() -> Daemon {
    let mut command = latchd();
    command.env("LATCHD_AUTH_TOKEN", SECRET);
    Daemon::from_command(command)
}

/// Connects with another of the addresses that are this host's own.
pub fn connect_from(source: &str, to: SocketAddr) -> TcpStream {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    let source: IpAddr = source.parse().expect("an address");
    bind(&socket, &SocketAddr::from((source, 0))).expect("all of 127/8 is local");
    connect(&socket, &to).expect("it listens");
    socket.into()
}

fn is_shown_in(daemon: &Daemon, place: &str) -> bool {
    let shown = fs::read(format!("/proc/{}/{place}", daemon.pid())).expect("it runs");
    String::from_utf8_lossy(&shown).contains(SECRET)
}

/// Sends a guess and gives all that comes until the server closes.
fn guess(stream: &mut TcpStream, frame: &[u8]) -> String {
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("it is not zero");
    stream.write_all(frame).expect("it is connected");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("it is closed");
    reply
}

/// Guesses, each time over a new connection, and checks what that costs. Gives the number of
/// guesses.
fn guess_until(is_over: &AtomicBool, addr: SocketAddr) -> u64 {
    let mut count = 0;
    while !is_over.load(Ordering::Relaxed) {
        let mut stream = TcpStream::connect(addr).expect("it listens");
        let began = Instant::now();
        let reply = guess(&mut stream, format!("auth\n_\n{count:016}\n").as_bytes());
        assert_eq!(reply, "error_auth\n");
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(100), "it cost only {took:?}");
        count += 1;
    }
    count
}

/// Locks and unlocks, over a connection that was there before and over new ones. Gives how long
/// each request took.
fn work_for(time: Duration, daemon: &Daemon, held: &mut Client) -> Vec<Duration> {
    let mut delays = Vec::new();
    let began = Instant::now();
    while began.elapsed() < time {
        let asked = Instant::now();
        let token = held.acquire("k", 0).token;
        delays.push(asked.elapsed());
        assert_eq!(held.request("r", "k", &token), "ok");
        let asked = Instant::now();
        let mut fresh = daemon.connect();
        assert_eq!(fresh.request("auth", "_", SECRET), "ok");
        fresh.acquire("k2", 5);
        delays.push(asked.elapsed());
        thread::sleep(Duration::from_millis(5));
    }
    delays
}

/// How many instructions a session spends on each of these guesses, by its name: a server of its
/// own for each, all at the same time, since they mostly wait.
fn costs_of_guesses<'a>(
    valgrind: &Program,
    secret: &str,
    guesses: &[(&'a str, String)],
) -> Vec<(&'a str, f64)> {
    let costs = thread::scope(|scope| {
        let runs: Vec<_> = guesses
            .iter()
            .map(|(name, frame)| {
                scope.spawn(move || (*name, cost_of_guess(valgrind, secret, frame)))
            })
            .collect();
        runs.into_iter()
            .map(|run| run.join().unwrap())
            .collect::<Vec<_>>()
    });
    println!("instructions: {costs:?}");
    costs
}

/// The instructions that a session takes to judge a guess, once it has read it. All that comes
/// before and after is left out: it depends on where the buffers of its thread lie, and that on
/// which thread is free.
fn cost_of_guess(valgrind: &Program, secret: &str, frame: &str) -> f64 {
    const GUESSES: usize = 10;
    let mut command = counting(valgrind, "*::opening::*::authenticate", &latchd());
    command
        .env("LATCHD_AUTH_TOKEN", secret)
        .env("RUST_LOG", "error");
    let daemon = Daemon::from_command(command);
    let addr = daemon.addr();
    for _ in 0..GUESSES {
        let mut stream = TcpStream::connect(addr).expect("it listens");
        assert_eq!(guess(&mut stream, frame.as_bytes()), "error_auth\n");
    }
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(6 * PATIENCE).is_some(), "it drains");
    cost_of_call(&daemon, GUESSES)
}

/// One per cent would be enough to make an attack hopeless, but would not even show a comparison
/// that stops at the first difference: processors compare 32 bytes at a time.
fn assert_alike(costs: &[(&str, f64)]) {
    callgrind::assert_alike(costs, f64::min(100.0, 0.01 * costs[0].1));
}

/// Sends a ping over the Unix socket as a user who is not root, with this group.
fn ping_as(nc: &Program, gid: &str, socket: &Path) -> Output {
    let mut command = Command::new("setpriv");
    command
        .arg("--reuid=65534")
        .arg(format!("--regid={gid}"))
        .arg("--clear-groups")
        .arg("timeout")
        .arg("10")
        .arg(nc)
        .args(["-N", "-U"])
        .arg(socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("it is installed");
    // Fails if it has given up already.
    let _ = child
        .stdin
        .take()
        .expect("it is a pipe")
        .write_all(b"ping\n_\n_\n");
    child.wait_with_output().expect("it is our child")
}

#[test]
fn a_server_that_every_host_can_use_warns_of_it() {
    needs!(admin);
    let log = |args: &[&str]| {
        // A network of its own, without any other host.
        let mut command = limited(&["unshare", "--net"]);
        command.args(args);
        let daemon = Daemon::from_command(command);
        daemon.wait_for_log("listening addr=", PATIENCE);
        daemon.log()
    };
    let token = tempfile::NamedTempFile::new().expect("there is room");
    std::fs::write(token.path(), "secret").expect("there is room");
    let secret = format!("--auth-token-file={}", token.path().display());
    let mut hosts = vec!["0.0.0.0"];
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)) {
        Ok(_) => hosts.push("::"),
        Err(_) => skipped(&["IPv6"]),
    }
    for host in hosts {
        let host = format!("--host={host}");
        let open = log(&[&host]);
        assert!(open.contains("WARN open-to-the-network addr="), "{open}");
        let guarded = log(&[&host, &secret]);
        assert!(!guarded.contains("open-to-the-network"), "{guarded}");
    }
    let local = log(&[]);
    assert!(!local.contains("open-to-the-network"), "{local}");
}
