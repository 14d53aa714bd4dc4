//! The server under those who start it for us (inetd, systemd, s6, init scripts): what it takes
//! over from them, what it tells them, and that the examples for them work.
//!
//! A tool which is missing fails its test and names the Debian package that brings it: a check
//! that skips itself where it matters checks nothing.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{self as unix, UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::limited::copy_program;
use crate::support::needs::{needs, skipped, Program};
use crate::support::silent::free_addr;
use crate::support::syslog::Syslog;
use crate::support::{
    children_of, come_to_rest, described, eventually, fence, is_soon, parse_grant, program,
    stat_of, wait_for_exit, Client, Daemon, Deadline, Event, Signal, PATIENCE,
};
use rustix::net::{bind, ipproto, listen, socket, AddressFamily, SocketType};
use rustix::process::{kill_process, Pid};
use tempfile::TempDir;

/// Where the examples have it.
const INSTALLED: &str = "/usr/sbin/latchd";

/// What the tests let it be idle for: the least that it knows.
const IDLE: Duration = Duration::from_secs(1);

// ---- inetd -----------------------------------------------------------------------------------

#[test]
fn inetd_starts_one_server_for_all_clients() {
    let inetd = needs!("inetd");
    let inetd = Inetd::start(&inetd, 1, |line| line);
    assert_eq!(inetd.servers(), [], "nobody has connected");

    let mut holder = Client::tcp(inetd.addrs[0]);
    let held = holder.acquire("k", 0);
    let mut waiter = Client::tcp(inetd.addrs[0]);
    waiter.send("l\nk\n10\n");
    waiter.nothing_within(Duration::from_millis(100));
    assert_eq!(holder.request("r", "k", &held.token), "ok");

    let next = parse_grant(&waiter.line(), "ok").expect("it is its turn");
    assert_eq!(fence(&next.token), fence(&held.token) + 1);
    assert_eq!(inetd.servers().len(), 1);
}

/// Two clients connect close to the moment at which the server leaves, now before it, now after
/// it: half the distance each time that the other of the two is met.
#[test]
fn clients_at_an_idle_exit_are_served_by_the_next_server() {
    let inetd = needs!("inetd");
    const SERVICES: usize = 20;
    const MOMENTS: u32 = 6;
    let inetd = Inetd::start(&inetd, SERVICES, |line| line);

    let restart_counts: Vec<u32> = thread::scope(|scope| {
        let hammers: Vec<_> = inetd
            .addrs
            .iter()
            .map(|&addr| scope.spawn(move || hammer(addr, MOMENTS)))
            .collect();
        hammers
            .into_iter()
            .map(|hammer| hammer.join().unwrap())
            .collect()
    });

    let restart_count: u32 = restart_counts.iter().sum();
    let moment_count = u32::try_from(SERVICES).unwrap() * MOMENTS;
    println!("at {moment_count} moments the server had left {restart_count} times");
    assert!(restart_count >= 20, "only {restart_count} restarts");
}

#[test]
fn inetd_nowait_is_refused_without_a_byte_to_the_client() {
    let inetd = needs!("inetd");
    let inetd = Inetd::start(&inetd, 1, |line| line.replace("wait.10000", "nowait"));
    for _ in 0..3 {
        Client::tcp(inetd.addrs[0]).expect_eof();
    }
    let mut eager = Client::tcp(inetd.addrs[0]);
    eager.send("l\nk\n10\n");
    let event = eager.next_event(PATIENCE);
    // What it sent is never read, so the kernel may reset the connection.
    let is_the_end = matches!(event, Event::Eof | Event::Reset);
    assert!(is_the_end, "got {}", described(&event));
    eventually(PATIENCE, "no server is left", || inetd.servers().is_empty());
}

#[test]
fn a_server_that_fails_under_inetd_says_why_in_the_syslog() {
    let Some(syslog) = Syslog::new() else { return };
    for (args, reason) in [
        (
            &["--fence-state-file", "/nowhere/fences"][..],
            "cannot use the fence file /nowhere/fences: no such directory: /nowhere",
        ),
        (&["--port", "0"], "--port: the sockets are inherited"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        // Some inetds make stderr the socket, and some leave it alone.
        for stderr_is_the_socket in [true, false] {
            let again = || OwnedFd::from(listener.try_clone().expect("descriptors are left"));
            let mut command = syslog.reached_by(Daemon::command().arg("--inetd").args(args));
            command.stdin(again()).stdout(again());
            if stderr_is_the_socket {
                command.stderr(again())
            } else {
                command.stderr(Stdio::null())
            };
            let started_at = Instant::now();
            let mut daemon = command.spawn().expect("latchd was built by cargo");
            let expected = format!("<27>latchd[{}]: {reason}", daemon.id());
            assert_eq!(syslog.next(), expected);
            assert!(!wait_for_exit(&mut daemon, PATIENCE).success());
            let took = started_at.elapsed();
            assert!(took >= Duration::from_secs(1), "only {took:?}");
        }
    }
}

#[test]
fn the_log_of_a_server_under_inetd_is_in_the_syslog() {
    needs!(root);
    let inetd = needs!("inetd");
    let Some(syslog) = Syslog::new() else { return };
    let inetd = Inetd::start_with(&inetd, Some(&syslog), 1, |line| line);
    Client::tcp(inetd.addrs[0]).acquire("k", 0);
    let messages = std::iter::from_fn(|| Some(syslog.next()));
    // inetd has messages of its own.
    let mut ours = messages.filter(|line| line.contains("latchd["));
    for verb in ["starting", "listening"] {
        let message = ours.next().expect("it comes");
        assert!(message.contains(&format!("]: INFO {verb} ")), "{message}");
    }
}

// ---- descriptor 0 ----------------------------------------------------------------------------

#[test]
fn a_descriptor_that_does_not_listen_is_refused_in_one_line() {
    let wrong = "it is a connected socket, but all connections must reach one process: use wait, \
                 not nowait";
    let deaf = "it is not a listening stream socket";
    let (tcp, _peer) = tcp_pair();
    let (unix, _unix_peer) = UnixStream::pair().expect("descriptors are left");
    let connected = [("TCP", OwnedFd::from(tcp)), ("Unix", unix.into())];
    let connected = connected.map(|(what, descriptor)| (what, descriptor, wrong));
    let others = deaf_descriptors().into_iter();
    let others = others.map(|(what, descriptor)| (what, descriptor, deaf));
    for (what, descriptor, why) in connected.into_iter().chain(others) {
        let again = descriptor.try_clone().expect("descriptors are left");
        for (mut command, place) in [
            (on_stdin(descriptor), "cannot listen on descriptor 0"),
            (
                as_systemd_does(again, "$$"),
                "LISTEN_FDS: cannot listen on descriptor 3",
            ),
        ] {
            let (status, said) = finished(&mut command);
            assert_eq!(said, format!("latchd: {place}: {why}\n"), "{what}");
            assert_eq!(status.code(), Some(1), "{what}");
        }
    }
}

#[test]
fn addresses_beside_inherited_sockets_are_refused() {
    let listener = || TcpListener::bind("127.0.0.1:0").expect("a port is free");
    for (option, value) in [
        ("--host", "127.0.0.1"),
        ("--port", "0"),
        ("--port", "off"),
        ("--unix", "/tmp/latchd-options"),
        ("--unix-mode", "0600"),
        ("--unix-group", "0"),
    ] {
        let variable = option[2..].to_uppercase().replace('-', "_");
        let variable = format!("DFLOCKD_{variable}");
        let mut by_option = on_stdin(listener());
        by_option.args([option, value]);
        let mut by_variable = as_systemd_does(listener(), "$$");
        by_variable.env(&variable, value);
        for (mut command, origin) in [(by_option, option), (by_variable, &variable)] {
            let (status, said) = finished(&mut command);
            let expected = format!("latchd: {origin}: the sockets are inherited\n");
            assert_eq!((status.code(), said), (Some(2), expected));
        }
    }
}

#[test]
fn nothing_that_goes_wrong_at_start_is_said_to_a_client() {
    for (args, status, mut daemon, peer) in [
        (&["--inetd"][..], 1),
        (&["--inetd", "--port", "0"], 2),
        (&["--inetd", "--no-such-option"], 2),
        (&["--inetd", "--auth-token-file", "/nowhere"], 1),
        (&["--inetd", "--fence-state-file", "/nowhere/fences"], 1),
    ]
    .map(|(args, status)| {
        let (socket, peer) = UnixStream::pair().expect("descriptors are left");
        let mut command = Daemon::command();
        let again = || OwnedFd::from(socket.try_clone().expect("descriptors are left"));
        command
            .args(args)
            .stdin(again())
            .stdout(again())
            .stderr(again());
        let daemon = command.spawn().expect("latchd was built by cargo");
        (args, status, daemon, peer)
    }) {
        let ended = wait_for_exit(&mut daemon, PATIENCE);
        assert_eq!(ended.code(), Some(status), "{args:?}");
        assert_eq!(all_that_comes(peer), "", "{args:?}");
    }
}

/// As inetd has it: standard output and error are the listening socket, too.
#[test]
fn a_log_to_the_listening_socket_does_no_harm() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = listener.local_addr().expect("it is bound");
    let again = || OwnedFd::from(listener.try_clone().expect("descriptors are left"));
    let mut command = Daemon::command();
    command.args(["--inetd", "--debug"]);
    command.stdin(again()).stdout(again()).stderr(again());
    let daemon = Daemon::from_command(command);
    let mut client = Client::tcp(addr);
    assert_eq!(client.request("no-such-command", "k", ""), "error");
    client.acquire("k", 0);
    client.nothing_within(Duration::from_millis(100));
    assert!(daemon.wait_exit(Duration::ZERO).is_none());
}

/// Some inetds leave standard error alone.
#[test]
fn a_port_is_not_printed_to_the_listening_socket() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = listener.local_addr().expect("it is bound");
    let stdout = OwnedFd::from(listener.try_clone().expect("descriptors are left"));
    let mut server = on_stdin(listener);
    server
        .stdout(stdout)
        .args(["--print-port", "--idle-exit", "1"]);
    let mut server = server.spawn().expect("latchd was built by cargo");
    Client::tcp(addr).acquire("k", 0);
    assert_eq!(wait_for_exit(&mut server, PATIENCE).code(), Some(0));
}

#[test]
fn a_port_is_printed_to_a_socket_that_is_stdin_as_well() {
    let (socket, mut peer) = UnixStream::pair().expect("descriptors are left");
    let again = || OwnedFd::from(socket.try_clone().expect("descriptors are left"));
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]);
    command.stdin(again()).stdout(again());
    let mut server = command.spawn().expect("latchd was built by cargo");
    peer.set_read_timeout(Some(PATIENCE)).expect("not zero");
    let first = peer.read(&mut [0]);
    server.kill().expect("it is our child");
    server.wait().expect("its end");
    assert_eq!(first.ok(), Some(1), "a digit of the port");
}

#[test]
fn an_mptcp_socket_is_served() {
    let made = socket(
        AddressFamily::INET,
        SocketType::STREAM,
        Some(ipproto::MPTCP),
    );
    let Ok(socket) = made else {
        return skipped(&["MPTCP in the kernel"]);
    };
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port is free");
    listen(&socket, 5).expect("it is bound");
    let listener = TcpListener::from(socket);
    let addr = listener.local_addr().expect("it is bound");
    let _daemon = Daemon::from_command(on_stdin(listener));
    Client::tcp(addr).acquire("k", 0);
}

#[test]
fn blocking_and_other_inherited_sockets_do_not_spin() {
    let directory = world_readable_directory();
    let ways: [fn(OwnedFd) -> Command; 3] = [
        on_stdin,
        |it| as_systemd_does(it, "$$"),
        |it| {
            let mut command = as_systemd_does(it, "$$");
            command.arg("--inetd");
            command
        },
    ];
    let mut servers = Vec::new();
    for is_nonblocking in [false, true] {
        for (number, way) in ways.into_iter().enumerate() {
            let tcp = TcpListener::bind("127.0.0.1:0").expect("a port is free");
            tcp.set_nonblocking(is_nonblocking).expect("a socket");
            let addr = tcp.local_addr().expect("it is bound");
            let mut command = way(tcp.into());
            command.arg("--print-port");
            let daemon = Daemon::from_command(command);
            assert_eq!(daemon.addr(), addr);
            servers.push((daemon, Client::tcp(addr)));

            let path = directory.path().join(format!("{number}-{is_nonblocking}"));
            let unix = UnixListener::bind(&path).expect("there is room");
            unix.set_nonblocking(is_nonblocking).expect("a socket");
            let client = Client::unix(&path);
            servers.push((Daemon::from_command(way(unix.into())), client));
        }
    }

    // All of them are up, hold a key and have somebody waiting for it.
    for (_, client) in &mut servers {
        client.acquire("k", 0);
        client.send("l\nk\n30\n");
    }
    let pids = servers.iter().map(|(daemon, _)| daemon.pid());
    let pids: Vec<u32> = pids.collect();
    come_to_rest(&pids, Duration::from_millis(50));
}

/// A log that nobody reads holds the server up a little between its decision and its end, so that
/// there is time to come too late.
#[test]
fn a_client_after_the_idle_exit_waits_for_the_next_server() {
    let directory = world_readable_directory();
    let notify_socket = directory.path().join("notify");
    let supervisor = UnixDatagram::bind(&notify_socket).expect("there is room");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = listener.local_addr().expect("it is bound");
    let server = || on_stdin(listener.try_clone().expect("descriptors are left"));

    let (stderr, _unread) = full_stream();
    let mut command = server();
    command.args(["--idle-exit", "1"]).stderr(stderr);
    command.env("NOTIFY_SOCKET", &notify_socket);
    let leaving = Daemon::from_command(command);
    assert!(told(&supervisor).starts_with("READY=1\n"));
    Client::tcp(addr).acquire("k", 0);
    assert!(told(&supervisor).starts_with("STOPPING=1\n"));

    let mut late = Client::tcp(addr);
    late.send("l\nk\n10\n");
    assert!(leaving.wait_exit(PATIENCE).is_some_and(|s| s.success()));
    late.nothing_within(Duration::from_millis(50));

    let _next = Daemon::from_command(server());
    assert!(parse_grant(&late.line(), "ok").is_some());
}

#[test]
fn a_lease_without_connection_keeps_the_server() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = listener.local_addr().expect("it is bound");
    let mut command = on_stdin(listener);
    command.args(["--idle-exit", "1", "--no-auto-release-on-disconnect"]);
    let daemon = Daemon::from_command(command);

    let asked_at = Instant::now();
    Client::tcp(addr).acquire_for("k", 0, 2);

    let ended = daemon.wait_exit(PATIENCE).expect("it leaves");
    assert!(ended.success(), "{ended}");
    let took = asked_at.elapsed();
    assert!(took >= Duration::from_secs(2) + IDLE, "left after {took:?}");
}

// ---- systemd ---------------------------------------------------------------------------------

/// With the very command of the unit, except for its paths and its patience.
#[test]
fn the_units_command_serves_a_tcp_socket_of_systemd() {
    let activate = needs!("systemd-socket-activate");
    let directory = world_readable_directory();
    let unit = example("latchd.service");
    let command = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let command = command.expect("the unit has a command");
    let command = edited(command, "--idle-exit 300", "--idle-exit 1");
    let state = directory.path().to_str().expect("UTF-8");
    let command = command.replace("%S/latchd", state);
    let (installed, options) = command.split_once(' ').expect("it has options");
    assert_eq!(installed, INSTALLED);
    let words: Vec<&str> = [program("latchd")]
        .into_iter()
        .chain(options.split(' '))
        .collect();

    let addr = free_addr();
    let daemon = activated(&activate, &[&addr.to_string()], &words);
    Client::tcp(addr).acquire("k", 0);
    assert!(directory.path().join("fences").exists());
    leaves_when_idle(&daemon);
}

#[test]
fn all_sockets_of_systemd_lead_to_the_same_locks() {
    let activate = needs!("systemd-socket-activate");
    let directory = world_readable_directory();
    let path = directory.path().join("socket");
    let (first, second) = (free_addr(), free_addr());
    let places = [
        first.to_string(),
        path.to_str().expect("UTF-8").to_owned(),
        second.to_string(),
    ];
    let places: Vec<&str> = places.iter().map(String::as_str).collect();
    let daemon = activated(&activate, &places, &[program("latchd"), "--idle-exit", "1"]);

    let mut holder = Client::tcp(second);
    holder.acquire("k", 0);
    for other in [&mut Client::unix(&path), &mut Client::tcp(first)] {
        assert_eq!(other.request("l", "k", "0"), "timeout");
    }
    drop(holder);
    leaves_when_idle(&daemon);
    assert!(path.exists(), "it belongs to systemd");
}

#[test]
fn listen_fds_meant_for_another_process_are_ignored() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let inherited = listener.local_addr().expect("it is bound");
    let mut command = as_systemd_does(listener, "1");
    command.args(["--port", "0", "--print-port"]);
    let daemon = Daemon::from_command(command);
    assert_ne!(daemon.addr(), inherited);
    daemon.connect().acquire("k", 0);
}

// ---- signals and the process -----------------------------------------------------------------

#[test]
fn signals_that_a_supervisor_has_blocked_end_the_server() {
    let mut command = Daemon::command_of("env");
    command.args([
        "--block-signal",
        program("latchd"),
        "--port",
        "0",
        "--print-port",
    ]);
    let daemon = Daemon::from_command(command);
    daemon.signal(Signal::TERM);
    let status = daemon.wait_exit(PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0));
}

/// As process 1 of a container, a server gets the children of those that end. To the kernel they
/// are like these, which it has from the shell that it was.
#[test]
fn a_server_leaves_no_zombie_of_a_child_that_it_has_not_started() {
    let locks = tempfile::tempdir().expect("there is room");
    let locks = locks.path().to_str().expect("a temporary path is UTF-8");
    for (server, arguments) in [
        ("latchd", &["--port", "0"][..]),
        ("lfpd", &["--listen", "127.0.0.1:0", "--lock-dir", locks]),
    ] {
        // Some end before the server can see that, some after.
        let script = "for pause in 0 0 0 1 1 1; do sleep $pause & done; exec \"$0\" \"$@\"";
        let mut command = Daemon::command_of("sh");
        command.args(["-c", script, program(server), "--print-port"]);
        command.args(arguments);
        let daemon = Daemon::from_command(command);
        eventually(PATIENCE, "no child is left", || {
            children_of(daemon.pid()).is_empty()
        });
    }
}

/// pgrep and killall know a process by this name, and so does the SysV script.
#[test]
fn a_server_keeps_the_name_of_its_file() {
    let directory = world_readable_directory();
    let link = directory.path().join("called");
    std::os::unix::fs::symlink(program("latchd"), &link).expect("there is room");
    for argument in ["called", "-odd", ""] {
        let mut command = Daemon::command_of(&link);
        command.arg0(argument).args(["--port", "0", "--print-port"]);
        let daemon = Daemon::from_command(command);
        let name = fs::read_to_string(format!("/proc/{}/comm", daemon.pid())).expect("it runs");
        assert_eq!(name, "called\n", "{argument:?}");
    }
}

// ---- readiness -------------------------------------------------------------------------------

#[test]
fn a_supervisor_hears_of_readiness_and_of_the_drain() {
    let directory = world_readable_directory();
    let path = directory.path().join("notify");
    let name = format!("latchd-supervision-{}", std::process::id());
    let by_name = unix::SocketAddr::from_abstract_name(&name).expect("a short name");
    for (supervisor, notify_socket) in [
        (UnixDatagram::bind(&path), path.to_str().expect("UTF-8")),
        (UnixDatagram::bind_addr(&by_name), &format!("@{name}")),
    ] {
        let supervisor = supervisor.expect("nobody else has the name");
        let addr = free_addr();
        let daemon = notifying(notify_socket, addr, &[]);

        let ready = told(&supervisor);
        // Had it said so too early, this would be refused.
        let mut holder = Client::tcp(addr);
        assert!(ready.lines().any(|line| line == "READY=1"), "{ready:?}");
        let has_status = ready.lines().any(|line| line.starts_with("STATUS="));
        assert!(has_status, "{ready:?}");

        let held = holder.acquire("k", 0);
        daemon.signal(Signal::TERM);
        let stopping = told(&supervisor);
        let is_stopping = stopping.lines().any(|line| line == "STOPPING=1");
        assert!(is_stopping, "{stopping:?}");
        assert!(daemon.wait_exit(Duration::ZERO).is_none(), "a key is held");
        assert_eq!(holder.request("r", "k", &held.token), "ok");
        assert!(daemon.wait_exit(PATIENCE).is_some_and(|s| s.success()));

        supervisor.set_nonblocking(true).expect("a socket");
        assert!(supervisor.recv(&mut [0; 64]).is_err(), "it said more");
    }
}

#[test]
fn a_supervisor_with_a_watchdog_is_told_again_and_again() {
    let directory = world_readable_directory();
    for (path, pid, is_told) in [("ours", None, true), ("others", Some("1"), false)] {
        let path = directory.path().join(path);
        let supervisor = UnixDatagram::bind(&path).expect("there is room");
        let addr = free_addr();
        let mut command = Daemon::command();
        command.args(["--port", &addr.port().to_string()]);
        command.env("NOTIFY_SOCKET", &path);
        command.env("WATCHDOG_USEC", "100000");
        command.envs(pid.map(|pid| ("WATCHDOG_PID", pid)));
        let daemon = Daemon::from_command(command);
        daemon.wait_for_log("listening", PATIENCE);
        let told_of = |wanted: &str| while told(&supervisor) != wanted {};
        if is_told {
            // Also while there are leases, and while the server drains.
            let mut holder = Client::tcp(addr);
            let grant = holder.acquire("k", 0);
            (0..5).for_each(|_| told_of("WATCHDOG=1"));
            daemon.signal(Signal::TERM);
            told_of("STOPPING=1\nSTATUS=Draining");
            (0..5).for_each(|_| told_of("WATCHDOG=1"));
            assert_eq!(holder.request("r", "k", &grant.token), "ok");
        } else {
            assert!(told(&supervisor).starts_with("READY=1"));
            daemon.signal(Signal::TERM);
            let next = told(&supervisor);
            assert!(next.starts_with("STOPPING=1"), "{next}");
        }
        assert!(daemon.wait_exit(PATIENCE).is_some_and(|s| s.success()));
    }
}

#[test]
fn a_supervisor_that_is_gone_or_deaf_or_absurd_harms_nothing() {
    let directory = world_readable_directory();
    let full = directory.path().join("full");
    let _deaf = full_of_datagrams(&full);
    let file = directory.path().join("file");
    File::create(&file).expect("there is room");
    let long = "/".repeat(200);
    let long_name = format!("@{}", "x".repeat(200));
    for notify_socket in [
        full.to_str().expect("UTF-8"),
        file.to_str().expect("UTF-8"),
        "/nowhere/notify",
        "@latchd-supervision-nobody",
        "@",
        "relative",
        &long,
        &long_name,
    ] {
        let began = Instant::now();
        let addr = free_addr();
        let daemon = notifying(notify_socket, addr, &[]);
        daemon.wait_for_log("listening", PATIENCE);
        Client::tcp(addr).acquire("k", 0);
        daemon.signal(Signal::TERM);
        let ended = daemon.wait_exit(PATIENCE).expect("it ends");
        assert!(ended.success(), "{notify_socket}: {ended}");
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "{notify_socket}: {took:?}");
    }
}

// ---- the examples ----------------------------------------------------------------------------

#[test]
fn the_units_pass_systemds_own_check_without_a_word() {
    let analyze = needs!("systemd-analyze");
    let units = units_of_this_build();
    let mut verify = analyze.command();
    // Whether its manual pages are installed is not the unit's business.
    verify.args(["verify", "--man=no"]);
    verify.args(
        [
            "latchd.service",
            "latchd.socket",
            "lfpd.service",
            "lfpd.socket",
        ]
        .map(|unit| units.path().join(unit)),
    );
    let (status, said) = finished(&mut verify);
    assert!(status.success() && said.is_empty(), "{status}: {said}");
}

#[test]
fn the_services_have_few_rights() {
    let analyze = needs!("systemd-analyze");
    let units = units_of_this_build();
    // lfpd works as root on files of the host, for clients in the network of the host.
    for (unit, most) in [("latchd.service", 0.9), ("lfpd.service", 2.3)] {
        let mut security = analyze.command();
        security.args(["security", "--offline=true", "--no-pager"]);
        security.arg(units.path().join(unit));
        let (status, said) = finished(&mut security);
        assert!(status.success(), "{status}: {said}");
        let exposure = said.rsplit_once(&format!("Overall exposure level for {unit}: "));
        let exposure = exposure.and_then(|(_, rest)| rest.split(' ').next()?.parse::<f32>().ok());
        let exposure = exposure.unwrap_or_else(|| panic!("no exposure: {said}"));
        assert!(exposure <= most, "{exposure}: {said}");
    }
}

#[test]
fn every_script_is_sound_to_a_plain_shell_and_to_busybox() {
    let busybox = needs!("busybox");
    for script in [
        "latchd.init",
        "latchd.openrc",
        "latchd.busybox",
        "latchd.procd",
        "s6-latchd-run",
    ] {
        let path = examples().join(script);
        let mut ash = busybox.command();
        ash.arg("sh");
        for mut shell in [Command::new("sh"), ash] {
            let (status, said) = finished(shell.arg("-n").arg(&path));
            assert!(status.success() && said.is_empty(), "{script}: {said}");
        }
        let mode = fs::metadata(&path)
            .expect("it is there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o111, 0o111, "{script} is to be executed");
    }
}

#[test]
fn the_sysv_script_starts_restarts_reports_and_stops_a_server() {
    if is_root() && !sees_programs_of_others() {
        skipped(&["right to see what other users run"]);
        return;
    }
    let host = Host::new();
    let mut script = Command::new(examples().join("latchd.init"));
    host.direct(&mut script);
    host.runs(script);
}

#[test]
fn the_sysv_script_tells_any_user_whether_a_server_runs() {
    if !is_root() || !sees_programs_of_others() {
        skipped(&["right to see what other users run"]);
        return;
    }
    let host = Host::new();
    let script = examples().join("latchd.init");
    let call = |mut command: Command, action: &str| {
        host.direct(&mut command);
        // That user may not be able to open the script.
        command.stdin(File::open(&script).expect("it is there"));
        finished(command.args(["sh", "-s", action]))
    };
    let as_root = || Daemon::command_of("env");
    let as_other = || {
        let mut command = Daemon::command_of("setpriv");
        command.args(["--reuid=65533", "--regid=65533", "--clear-groups"]);
        command
    };
    assert!(call(as_root(), "start").0.success(), "{}", host.log());
    let (status, said) = call(as_other(), "status");
    assert!(status.success() && said == "latchd is running\n", "{said}");
    assert!(call(as_root(), "stop").0.success());
    assert_eq!(call(as_other(), "status").0.code(), Some(3));
}

#[test]
fn the_sysv_script_does_nothing_once_its_program_is_gone() {
    let directory = tempfile::tempdir().expect("there is room");
    let call = |action: &str| {
        let mut script = Command::new(examples().join("latchd.init"));
        for name in [
            "DAEMON",
            "DEFAULTS",
            "LOG_FILE",
            "PID_FILE",
            "RUN_DIR",
            "STATE_DIR",
        ] {
            script.env(name, directory.path().join(name));
        }
        finished(script.arg(action)).0.code()
    };
    for action in ["start", "stop", "restart"] {
        assert_eq!(call(action), Some(0), "{action}");
    }
    assert_eq!(call("status"), Some(3));
    let left = fs::read_dir(directory.path()).expect("it is there").count();
    assert_eq!(left, 0);
}

/// Whether this process sees which program a process of another user runs, as start-stop-daemon
/// must. A container may forbid that to root, too.
fn sees_programs_of_others() -> bool {
    let mut other = Command::new("setpriv")
        .args(["--reuid=65534", "--clear-groups", "sh", "-c"])
        .arg("echo it runs; exec sleep 60")
        .stdout(Stdio::piped())
        .spawn()
        .expect("util-linux is installed");
    let mut stdout = other.stdout.take().expect("stdout is piped");
    let _ = stdout.read(&mut [0]);
    let seen = fs::read_link(format!("/proc/{}/exe", other.id()));
    let _ = other.kill();
    let _ = other.wait();
    seen.is_ok()
}

/// The example's script, run by busybox, which provides all programs on such a host.
fn busybox_script(busybox: &Program, host: &Host) -> Command {
    let applets = host.directory.path().join("bin");
    fs::create_dir(&applets).expect("there is room");
    for applet in "chmod chown grep mkdir rm setsid sh sleep start-stop-daemon tail".split(' ') {
        std::os::unix::fs::symlink(busybox.path(), applets.join(applet)).expect("there is room");
    }
    let mut script = Command::new(applets.join("sh"));
    script.arg(examples().join("latchd.busybox"));
    script.env("PATH", applets);
    host.direct(&mut script);
    if !is_root() {
        script.env("RUN_AS", ""); // its start-stop-daemon wants to be root for any change of user
    }
    script
}

#[test]
fn the_busybox_script_runs_a_server_from_start_to_stop() {
    let busybox = needs!("busybox");
    let host = Host::new();
    host.runs(busybox_script(&busybox, &host));
}

#[test]
fn the_busybox_script_removes_old_device_locks_only_at_boot() {
    let busybox = needs!("busybox");
    let host = Host::new();
    let locks = host.directory.path().join("locks");
    fs::create_dir(&locks).expect("there is room");
    let lock = locks.join("LCK..ttyS1");
    fs::write(&lock, "         1\n").expect("there is room");
    let mut script = busybox_script(&busybox, &host);
    // Without a server, so that nothing has to be stopped.
    script.env("DAEMON", "/nowhere").env("LOCK_DIR", &locks);
    for (action, is_kept) in [("start", true), ("boot", false)] {
        let mut command = Command::new(script.get_program());
        command.args(script.get_args()).arg(action);
        for (name, value) in script.get_envs() {
            command.env(name, value.expect("none is removed"));
        }
        let (status, said) = finished(&mut command);
        assert!(said.contains("latchd did not start"), "{status}: {said}");
        assert_eq!(lock.exists(), is_kept, "{action}");
    }
}

#[test]
fn the_procd_script_names_a_command_that_serves() {
    // procd is OpenWrt's alone: the command it would run is taken from the script.
    let state = world_readable_directory();
    let path = state.path().join("latchd");
    let script = edited(&example("latchd.procd"), "#!/bin/sh /etc/rc.common\n", "");
    let script = edited(&script, "/etc/latchd\n", &format!("{}\n", path.display()));
    let run = state.path().join("run");
    let script = edited(&script, "/run/latchd\n", &format!("{}\n", run.display()));
    let script = edited(&script, "    chown latchd:latchd \"$STATE\"\n", "");
    let script = edited(&script, "    chown latchd:latchd \"$RUN_DIR\"\n", "");
    let procd = "procd_open_instance() { :; }; procd_close_instance() { :; }
        procd_set_param() { [ \"$1\" != command ] || { shift; echo \"$*\"; }; }";
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{procd}\n{script}\nstart_service")]);
    let (status, said) = finished(&mut shell);
    assert!(status.success(), "{status}: {said}");
    let options = said.trim_end().strip_prefix("/usr/sbin/latchd ");
    let options = options.unwrap_or_else(|| panic!("another command: {said}"));

    let mut command = Daemon::command();
    // A server that hands its locks over wants a port that the next one can have, too.
    let port = free_addr().port().to_string();
    command.args(["--port", &port, "--print-port"]);
    command.args(options.split_whitespace());
    let daemon = Daemon::from_command(command);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some_and(|s| s.success()));
    assert!(path.join("fences").exists());
}

#[test]
fn the_logrotate_example_has_the_server_open_a_new_file() {
    let logrotate = needs!("logrotate");
    let directory = world_readable_directory();
    let within = |name: &str| directory.path().join(name);
    let [log, rotated, pid, config] = ["log", "log.1", "pid", "config"].map(within);
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port", "--log-file"]);
    let daemon = Daemon::from_command({
        command.arg(&log);
        command
    });
    // An empty log is not rotated.
    eventually(PATIENCE, "it logs", || {
        fs::read_to_string(&log).is_ok_and(|log| log.contains(" listening "))
    });
    fs::write(&pid, daemon.pid().to_string()).expect("there is room");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let example = example("latchd.logrotate");
    let example = edited(
        &example,
        "/var/log/latchd/latchd.log {",
        &(text(&log) + " {"),
    );
    let example = edited(&example, "/run/latchd.pid", &text(&pid));
    let example = edited(&example, "    su latchd latchd\n", "");
    fs::write(&config, example).expect("there is room");

    let mut logrotate = logrotate.command();
    logrotate.arg("--force").arg("--state").arg(within("state"));
    let (status, said) = finished(logrotate.arg(&config));
    assert!(status.success() && said.is_empty(), "{status}: {said}");
    assert!(rotated.exists());
    eventually(PATIENCE, "there is a new file", || log.exists());
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some_and(|s| s.success()));
    let written = fs::read_to_string(&log).expect("just seen");
    assert!(written.contains(" INFO stopping"), "{written}");
}

#[test]
fn the_s6_script_becomes_the_server_and_reports_readiness() {
    let directory = world_readable_directory();
    for (fd_3, is_told) in [("exec 3>\"$1\"", true), ("exec 3>&-", false)] {
        let [ready, log] = ["ready", "log"].map(|name| directory.path().join(name));
        fs::write(&ready, "").expect("there is room");
        let addr = free_addr();
        let mut command = Daemon::command_of("sh");
        command.args(["-c", &format!("{fd_3}; exec sh \"$0\"")]);
        command.arg(examples().join("s6-latchd-run")).arg(&ready);
        command.env("DAEMON", program("latchd")).env("RUN_AS", "");
        command.env("OPTIONS", format!("--port {}", addr.port()));
        command.stdout(File::create(&log).expect("there is room"));
        let daemon = Daemon::from_command(command);

        let read = |path: &Path| fs::read_to_string(path).expect("it is there");
        eventually(PATIENCE, "it is ready", || {
            if is_told {
                read(&ready).ends_with('\n')
            } else {
                is_listened_on(addr)
            }
        });
        Client::tcp(addr).acquire("k", 0);
        let told = if is_told {
            format!("{}\n", addr.port())
        } else {
            String::new()
        };
        assert_eq!(read(&ready), told);
        // What s6 has started is the server itself, and not a shell that waits for it.
        daemon.signal(Signal::TERM);
        assert!(daemon.wait_exit(PATIENCE).is_some_and(|s| s.success()));
        assert!(read(&log).starts_with("INFO starting "), "{}", read(&log));
    }
}

#[test]
fn the_s6_script_serves_without_a_port_to_report() {
    let directory = world_readable_directory();
    let [ready, socket] = ["ready", "socket"].map(|name| directory.path().join(name));
    let mut command = Daemon::command_of("sh");
    command.args(["-c", "exec 3>\"$1\"; exec sh \"$0\""]);
    command.arg(examples().join("s6-latchd-run")).arg(&ready);
    command.env("DAEMON", program("latchd")).env("RUN_AS", "");
    command.env("OPTIONS", format!("--port=off --unix {}", socket.display()));
    command.stdout(Stdio::null());
    let daemon = Daemon::from_command(command);
    eventually(PATIENCE, "it listens", || socket.exists());
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some_and(|s| s.success()));
}

// ---- inetd, as the example has it ------------------------------------------------------------

/// A real inetd of our own, ended when dropped together with all that it has started.
struct Inetd {
    inetd: Child,
    addrs: Vec<SocketAddr>,
    _directory: TempDir,
}

impl Inetd {
    /// Starts inetd with as many services, each by the example's line, except for its paths and its
    /// patience, after `edit`. Returns when it listens.
    fn start(inetd: &Program, service_count: usize, edit: impl Fn(String) -> String) -> Inetd {
        Inetd::start_with(inetd, None, service_count, edit)
    }

    /// The same, with `syslog` for the services. That takes root.
    fn start_with(
        inetd: &Program,
        syslog: Option<&Syslog>,
        service_count: usize,
        edit: impl Fn(String) -> String,
    ) -> Inetd {
        let directory = world_readable_directory();
        let addrs: Vec<SocketAddr> = (0..service_count).map(|_| free_addr()).collect();
        let program = copy_for_all(directory.path());
        let line = |addr: &SocketAddr| {
            let state = directory.path().join(addr.port().to_string());
            edit(inetd_line(addr, &program, state.to_str().expect("UTF-8")))
        };
        let lines: Vec<String> = addrs.iter().map(line).collect();
        let config = directory.path().join("inetd.conf");
        fs::write(&config, lines.concat()).expect("there is room");

        let mut command = unprivileged(inetd.path(), directory.path());
        command.arg("-d").arg(&config);
        if let Some(syslog) = syslog {
            command = syslog.reached_by(&command);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let inetd = Inetd {
            inetd: command.spawn().expect("it is installed"),
            addrs,
            _directory: directory,
        };
        eventually(PATIENCE, "inetd listens", || {
            inetd.addrs.iter().all(|&addr| is_listened_on(addr))
        });
        inetd
    }

    /// The processes that it has started and that are still running.
    fn servers(&self) -> Vec<Pid> {
        let children = children_of(self.inetd.id()).into_iter();
        children.filter(|&child| is_running(child)).collect()
    }
}

impl Drop for Inetd {
    fn drop(&mut self) {
        let inetd = Pid::from_child(&self.inetd);
        // While inetd is stopped it reaps no process, so every number still means the same process.
        let _ = kill_process(inetd, Signal::STOP);
        for server in self.servers() {
            let _ = kill_process(server, Signal::KILL);
        }
        let _ = kill_process(inetd, Signal::CONT);
        // Those that inetd does not reap would be left to the host.
        let inetd = self.inetd.id();
        is_soon(Duration::from_secs(1), || children_of(inetd).is_empty());
        let _ = self.inetd.kill();
        let _ = self.inetd.wait();
    }
}

fn inetd_line(addr: &SocketAddr, program: &Path, state: &str) -> String {
    let example = example("inetd.conf");
    let mut lines = example
        .lines()
        .filter(|line| !line.starts_with('#') && line.contains(" latchd "));
    let line = lines.next().expect("the example has a line");
    assert_eq!(lines.next(), None, "the example has one line for latchd");
    let line = edited(line, "127.0.0.1:6388", &addr.to_string());
    let line = edited(&line, " latchd /", &format!(" {} /", account()));
    let line = edited(&line, INSTALLED, program.to_str().expect("UTF-8"));
    let line = edited(&line, "--idle-exit 60", "--idle-exit 1");
    edited(&line, "/var/lib/latchd/fences", state) + "\n"
}

/// Meets the moment at which the server behind `addr` leaves, over and over. Gives how often it had
/// left already. Every request must be answered, and fences must rise all the time.
fn hammer(addr: SocketAddr, moment_count: u32) -> u32 {
    let mut last_fence = 0;
    let mut restart_count = 0;
    // Against the client's idea of the moment, in microseconds: the server's is a bit later.
    let (mut offset, mut step) = (0i64, 2000i64);
    let mut had_left_before = None;
    visit(addr, &mut last_fence);
    let deadline = Deadline::after(6 * PATIENCE);
    // On a busy machine it takes longer to come near the moment.
    for moment in 0.. {
        if moment >= moment_count && restart_count > 0 {
            break;
        }
        assert!(!deadline.is_over(), "the server never leaves");
        let idle = i64::try_from(IDLE.as_micros()).expect("a second") + offset;
        thread::sleep(Duration::from_micros(idle.max(0).unsigned_abs()));

        let had_left = visit(addr, &mut last_fence);
        restart_count += u32::from(had_left);
        match had_left_before.replace(had_left) {
            Some(before) if before == had_left => step *= 2,
            _ => step = (step / 2).max(50),
        }
        offset += if had_left { -step } else { step };
    }
    restart_count
}

/// Two clients at once, one after the other holding the same key. Whether they are the first of
/// their server.
fn visit(addr: SocketAddr, last_fence: &mut u64) -> bool {
    let mut first = Client::tcp(addr);
    let mut second = Client::tcp(addr);
    // The server may not have noticed yet that the last visit is over.
    let held = first.acquire("k", 30);
    second.send("l\nk\n10\n");
    let owner = first.stats()["locks"][0]["owner_conn_id"].clone();
    assert_eq!(first.request("r", "k", &held.token), "ok");
    let next = parse_grant(&second.line(), "ok").expect("it is its turn");
    assert!(fence(&held.token) > *last_fence, "the fence fell");
    assert!(fence(&next.token) > fence(&held.token), "the fence fell");
    *last_fence = fence(&next.token);
    owner == 1
}

// ---- a host with an init script --------------------------------------------------------------

/// The places that the init scripts are pointed to.
struct Host {
    directory: TempDir,
    program: PathBuf,
    addr: SocketAddr,
}

impl Host {
    fn new() -> Host {
        let directory = world_readable_directory();
        Host {
            program: copy_for_all(directory.path()),
            addr: free_addr(),
            directory,
        }
    }

    fn direct(&self, script: &mut Command) {
        let within = |name: &str| self.directory.path().join(name);
        script
            .env("DAEMON", &self.program)
            .env("OPTIONS", format!("--port {} --settle 1", self.addr.port()))
            .env("RUN_AS", account())
            .env("STATE_DIR", within("state"))
            .env("RUN_DIR", within("run"))
            .env("LOG_FILE", within("log"))
            .env("PID_FILE", within("pid"))
            .env("DEFAULTS", within("defaults"));
    }

    /// What every init script must do.
    fn runs(&self, script: Command) {
        let call_with = |stop_seconds: &str, action: &str| {
            let mut command = Daemon::command_of(script.get_program());
            command.args(script.get_args()).arg(action);
            command.env("STOP_SECONDS", stop_seconds);
            for (name, value) in script.get_envs() {
                command.env(name, value.expect("none is removed"));
            }
            let (status, said) = finished(&mut command);
            (status.code().unwrap_or(-1), said)
        };
        let call = |action: &str| call_with("", action);
        let is_up = (0, "latchd is running\n".to_owned());
        let is_down = (3, "latchd is not running\n".to_owned());
        let started = (0, "latchd started\n".to_owned());
        let stopped = (0, "latchd stopped\n".to_owned());

        assert_eq!(call("status"), is_down);
        assert_eq!(call("start"), started, "{}", self.log());
        Client::tcp(self.addr).acquire("k", 0);
        assert_eq!(call("status"), is_up);
        let pid = self.pid();
        assert_eq!(call("start"), is_up, "a second start does nothing");
        assert_eq!(self.pid(), pid);

        let both = (0, stopped.1.clone() + &started.1);
        assert_eq!(call("restart"), both, "{}", self.log());
        assert_ne!(self.pid(), pid);
        // The next server restores the grant unless this one has noticed its end.
        let mut client = Client::tcp(self.addr);
        let grant = client.acquire("k", 0);
        assert_eq!(client.request("r", "k", &grant.token), "ok");

        // A thread of its own writes the log, and what it has not written goes with the process.
        eventually(PATIENCE, "both have said that they listen", || {
            self.log().matches(" listening ").count() == 2
        });
        let killed = self.pid().expect("it was started");
        kill_process(killed, Signal::KILL).expect("it is ours");
        eventually(PATIENCE, "it is gone", || !is_running(killed));
        assert_ne!(call("status").0, 0, "it was killed");
        assert_eq!(call("start"), started, "{}", self.log());

        assert_eq!(call("stop"), stopped);
        // The script waits until the process is gone, which may be before its port is.
        eventually(PATIENCE, "nobody listens", || !is_listened_on(self.addr));
        assert_eq!(call("status"), is_down);
        assert_eq!(call("stop"), stopped, "a second stop does nothing");
        assert_eq!(call("bogus").0, 2);
        let log = self.log();
        assert_eq!(log.matches(" listening ").count(), 3, "{log}");
        assert_eq!(log.matches("reason=handed-over").count(), 2, "{log}");

        assert_eq!(call("start"), started, "{}", self.log());
        let mut holder = Client::tcp(self.addr);
        // What is left of the second for which a server grants nothing after a crash.
        holder.acquire("k", 10);
        let began = Instant::now();
        assert_eq!(call_with("1", "stop"), stopped, "{}", self.log());
        let took = began.elapsed();
        assert!(took < Duration::from_secs(20), "it waited for {took:?}");
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn pid(&self) -> Option<Pid> {
        let pid = fs::read_to_string(self.directory.path().join("pid")).ok()?;
        Pid::from_raw(pid.trim().parse().ok()?)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let Some(pid) = self.pid() else { return };
        // No other process runs that copy.
        let running = fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero()));
        if running.is_ok_and(|running| running == self.program) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

// ---- what a supervisor does ------------------------------------------------------------------

/// A server whose descriptor 0 is `listener`.
pub fn on_stdin(listener: impl Into<OwnedFd>) -> Command {
    let mut command = Daemon::command();
    command.arg("--inetd").stdin(listener.into());
    command
}

/// A server whose descriptor 3 is `descriptor`, announced to the process `listen_pid`; `$$` is its
/// own.
pub fn as_systemd_does(descriptor: impl Into<OwnedFd>, listen_pid: &str) -> Command {
    let script = format!(
        "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID={listen_pid}; exec \"$0\" \"$@\""
    );
    let mut command = Daemon::command_of("sh");
    command.args(["-c", &script, program("latchd")]);
    command.stdin(descriptor.into());
    command
}

/// What becomes a server, of the words in `command`, once somebody connects to one of `places`.
fn activated(activate: &Program, places: &[&str], command: &[&str]) -> Daemon {
    let mut activate = Daemon::command_of(activate);
    for place in places {
        activate.args(["-l", place]);
    }
    activate.args(command);
    let daemon = Daemon::from_command(activate);
    for place in places {
        daemon.wait_for_log(&format!("Listening on {place}"), PATIENCE);
    }
    daemon
}

fn leaves_when_idle(daemon: &Daemon) {
    let ended = daemon.wait_exit(PATIENCE).expect("it leaves");
    assert!(ended.success(), "{ended}:\n{}", daemon.log());
    let log = daemon.log();
    assert!(log.contains("reason=idle"), "{log}");
}

/// A server on `addr` that has been told to notify `notify_socket`.
fn notifying(notify_socket: &str, addr: SocketAddr, args: &[&str]) -> Daemon {
    let mut command = Daemon::command();
    command
        .args(["--port", &addr.port().to_string()])
        .args(args);
    command.env("NOTIFY_SOCKET", notify_socket);
    Daemon::from_command(command)
}

/// The next datagram.
fn told(supervisor: &UnixDatagram) -> String {
    supervisor
        .set_read_timeout(Some(PATIENCE))
        .expect("the timeout is not zero");
    let mut datagram = [0; 1024];
    let length = loop {
        match supervisor.recv(&mut datagram) {
            // A read with a timeout is not restarted after a signal.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => break received.expect("it says something"),
        }
    };
    String::from_utf8_lossy(&datagram[..length]).into_owned()
}

fn full_of_datagrams(path: &Path) -> UnixDatagram {
    let receiver = UnixDatagram::bind(path).expect("there is room");
    let sender = UnixDatagram::unbound().expect("descriptors are left");
    sender.set_nonblocking(true).expect("a socket");
    let is_full = (0..100_000).any(|_| sender.send_to(b"x", path).is_err());
    assert!(is_full, "the queue has an end");
    receiver
}

/// A stream that takes nothing more, and its other end.
fn full_stream() -> (OwnedFd, UnixStream) {
    let (stream, other) = UnixStream::pair().expect("descriptors are left");
    stream.set_nonblocking(true).expect("a socket");
    while (&stream).write(&[0; 4096]).is_ok() {}
    stream.set_nonblocking(false).expect("a socket");
    (stream.into(), other)
}

/// Descriptors of all sorts that cannot listen for streams.
fn deaf_descriptors() -> Vec<(&'static str, OwnedFd)> {
    let unbound = socket(AddressFamily::INET, SocketType::STREAM, None);
    let packets = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None);
    let (unbound, packets) = (unbound.expect("a socket"), packets.expect("a socket"));
    let nameless = rustix::net::SocketAddrUnix::new_unnamed();
    // Binding to no name lets the kernel pick one.
    bind(&packets, &nameless).expect("a name is free");
    listen(&packets, 1).expect("it is bound");
    let open = |path| OwnedFd::from(File::open(path).expect("Linux has it"));
    vec![
        ("/dev/null", open("/dev/null")),
        (
            "UDP",
            UdpSocket::bind("127.0.0.1:0").expect("a port").into(),
        ),
        ("an unbound socket", unbound),
        ("a socket for packets", packets),
    ]
}

fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = listener.local_addr().expect("it is bound");
    let peer = TcpStream::connect(addr).expect("it listens");
    (listener.accept().expect("somebody has connected").0, peer)
}

// ---- the machine -----------------------------------------------------------------------------

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

fn example(name: &str) -> String {
    fs::read_to_string(examples().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// `text` with `new` for `old`, which must be there.
fn edited(text: &str, old: &str, new: &str) -> String {
    assert!(text.contains(old), "no {old:?} in {text:?}");
    text.replace(old, new)
}

/// The units with the path of the program that is tested.
fn units_of_this_build() -> TempDir {
    let directory = world_readable_directory();
    // By a link: a unit would have to quote a path with a blank.
    let linked = |name: &str| {
        let link = directory.path().join(name);
        std::os::unix::fs::symlink(program(name), &link).expect("there is room");
        link.to_str().expect("UTF-8").to_owned()
    };
    let service = edited(&example("latchd.service"), INSTALLED, &linked("latchd"));
    let lfpd = edited(&example("lfpd.service"), "/usr/sbin/lfpd", &linked("lfpd"));
    for (name, unit) in [
        ("latchd.service", service),
        ("latchd.socket", example("latchd.socket")),
        ("lfpd.service", lfpd),
        ("lfpd.socket", example("lfpd.socket")),
    ] {
        fs::write(directory.path().join(name), unit).expect("there is room");
    }
    directory
}

/// Runs `command` to its end, which must come in time. Gives its status and all that it has said.
fn finished(command: &mut Command) -> (ExitStatus, String) {
    // A file, because what it leaves running would keep a pipe open.
    let mut said = tempfile::tempfile().expect("there is room");
    let again = || said.try_clone().expect("descriptors are left");
    command.stdout(again()).stderr(again());
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("{:?}: {error}", command.get_program()));
    let status = wait_for_exit(&mut child, 2 * PATIENCE);
    said.rewind().expect("a file");
    let mut text = String::new();
    said.read_to_string(&mut text).expect("it is text");
    (status, text)
}

/// Everything up to the end of the stream.
fn all_that_comes(mut peer: UnixStream) -> String {
    peer.set_read_timeout(Some(PATIENCE))
        .expect("the timeout is not zero");
    let mut text = String::new();
    peer.read_to_string(&mut text).expect("the stream ends");
    text
}

/// Whether somebody listens on `addr`, found out without connecting.
fn is_listened_on(addr: SocketAddr) -> bool {
    let sockets = fs::read_to_string("/proc/net/tcp").expect("it is Linux");
    // In state 0A, which is LISTEN, on 127.0.0.1, which is written backwards.
    let listens = format!(" 0100007F:{:04X} 00000000:0000 0A ", addr.port());
    sockets.contains(&listens)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A name for who shall run the server: not root.
fn account() -> String {
    if is_root() {
        return "nobody".to_owned();
    }
    let (_, name) = finished(Command::new("id").arg("-un"));
    name.trim().to_owned()
}

/// A command that runs `program` as [`account`], who may write to `directory`. A root's inetd would
/// put its number where that of the host's own inetd is.
fn unprivileged(program: impl AsRef<OsStr>, directory: &Path) -> Command {
    const NOBODY: u32 = 65_534;
    if !is_root() {
        return Daemon::command_of(program);
    }
    std::os::unix::fs::chown(directory, Some(NOBODY), Some(NOBODY)).expect("we are root");
    let mut command = Daemon::command_of("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.arg(program);
    command
}

fn world_readable_directory() -> TempDir {
    let directory = tempfile::tempdir().expect("there is room");
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(directory.path(), mode).expect("it is ours");
    directory
}

/// A copy of the program in a place where any user may run it.
fn copy_for_all(directory: &Path) -> PathBuf {
    let copy = directory.join("latchd");
    copy_program(program("latchd"), &copy);
    copy
}

fn is_running(pid: Pid) -> bool {
    stat_of(pid.as_raw_nonzero().get().unsigned_abs()).is_some_and(|fields| fields[0] != "Z")
}
