//! Who holds a lock, and what an operator does about it: tags, `latch stats` and `latch break`.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::thread;
use std::time::Duration;

use crate::support::latch::{latch, output, run, started, status, text, wait};
use crate::support::limited::program_for_all;
use crate::support::silent::free_port;
use crate::support::{fence, program, Daemon, Signal, PATIENCE};
use latchd::client::{Address, Client, Error};

/// How a server that is older than tags takes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manners {
    /// It answers `error`, and goes on.
    Refuses,
    /// It answers `error`, and closes the connection.
    RefusesAndCloses,
    /// It closes the connection without a word.
    Closes,
}

/// A server that knows nothing for operators, in front of a daemon that does the rest.
fn old_server(daemon: &Daemon, manners: Manners) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (addr, behind) = (listener.local_addr().expect("its address"), daemon.addr());
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || serve_as_of_old(client, behind, manners));
        }
    });
    addr
}

fn serve_as_of_old(mut client: TcpStream, behind: SocketAddr, manners: Manners) -> Option<()> {
    let mut server = TcpStream::connect(behind).ok()?;
    let mut requests = BufReader::new(client.try_clone().ok()?).lines();
    let mut replies = BufReader::new(server.try_clone().ok()?).lines();
    loop {
        let mut line = || requests.next()?.ok();
        let (command, mut key, argument) = (line()?, line()?, line()?);
        if matches!(&*command, "hello" | "tag" | "break") {
            if manners != Manners::Closes {
                client.write_all(b"error\n").ok()?;
            }
            if manners != Manners::Refuses {
                return None;
            }
            continue;
        }
        if command == "stats" {
            key = "_".to_owned();
        }
        let request = format!("{command}\n{key}\n{argument}\n");
        server.write_all(request.as_bytes()).ok()?;
        let reply = replies.next()?.ok()? + "\n";
        client.write_all(reply.as_bytes()).ok()?;
    }
}

/// The words of the row for a key in the table of `latch stats`.
fn row(table: &str, key: &str) -> String {
    let mut rows = table.lines().filter(|line| line.contains(key));
    let row = rows.next().unwrap_or_else(|| panic!("no {key}: {table}"));
    row.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn stats(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = run(daemon, &[&["stats"], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

// ---------------------------------------------------------------------------------------------
// Tags

#[test]
fn an_introduction_costs_no_round_trip() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("its address");
    let server = thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        let lines = BufReader::new(client.try_clone().expect("descriptors")).lines();
        // All requests are there before the first reply.
        let lines: Vec<String> = lines.take(9).map_while(Result::ok).collect();
        client
            .write_all(b"ok adopt\nok\ntimeout\n")
            .expect("it reads");
        // Only the client ends the connection.
        let _ = client.read(&mut [0; 10]);
        lines
    });
    let client = Client::new([Address::Tcp(addr.to_string())]);
    let lock = client.lock("k").tag("worker 7");
    assert!(lock.try_acquire().expect("it answers").is_none());
    let lines = server.join().expect("it has served");
    assert_eq!(
        lines[..6],
        [
            "hello",
            "_",
            "adopt broken not_written",
            "tag",
            "_",
            "worker 7"
        ]
    );
    assert_eq!(lines[6..], ["l", "k", "0"]);
}

#[test]
fn a_server_that_knows_no_tags_still_grants() {
    let daemon = Daemon::start(&["--no-auto-release-on-disconnect"]);
    let mut holder = daemon.connect();
    holder.acquire_for("held", 0, 600);
    for manners in [Manners::Refuses, Manners::RefusesAndCloses] {
        let addr = old_server(&daemon, manners).to_string();
        let output = run(&daemon, &["run", "k", "--server", &addr, "--", "true"]);
        assert_eq!(output.status.code(), Some(0), "{manners:?}");
        assert_eq!(text(&output.stderr), "", "{manners:?}");
        let client = Client::new([Address::Tcp(addr.clone())]);
        let tried = client.lock("k").tag("me").try_acquire();
        let guard = tried.expect("it answers").expect("it was free");
        guard.release().expect("it is held");
        // A refusal is told as it is, and the reason is that of the claim.
        let busy = [
            "run",
            "held",
            "--server",
            &addr,
            "--timeout",
            "0",
            "--",
            "true",
        ];
        assert_eq!(status(&daemon, &busy), 75, "{manners:?}");
    }
}

#[test]
fn a_tag_with_a_line_end_is_not_sent() {
    let daemon = Daemon::start(&[]);
    let client = Client::new([Address::Tcp(daemon.addr().to_string())]);
    let refused = client.lock("k").tag("a\nb").try_acquire();
    assert!(
        matches!(refused, Err(Error::InvalidArgument(_))),
        "{refused:?}"
    );
}

// ---------------------------------------------------------------------------------------------
// Statistics

#[test]
fn an_older_server_has_a_table_without_names() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    assert!(holder.request("sl", "pool", "0 3").starts_with("ok "));
    let addr = old_server(&daemon, Manners::Refuses).to_string();
    let table = stats(&daemon, &["--server", &addr]);
    assert!(
        row(&table, "lock").starts_with("lock k connection "),
        "{table}"
    );
    assert!(
        row(&table, "pool").starts_with("semaphore 1/3 pool 1 clients"),
        "{table}"
    );
    assert!(table.contains("2 in use, "), "{table}");
    let key = stats(&daemon, &["k", "--server", &addr]);
    assert!(
        key.starts_with("k: lock, 1 of 1 held, 0 waiting\n"),
        "{key}"
    );
    let json = stats(&daemon, &["--json", "--server", &addr]);
    assert!(json.starts_with("{\"connections\":"), "{json}");
}

// ---------------------------------------------------------------------------------------------
// Breaking a grant

/// A server as the README starts it, and the directory of its operator's socket.
fn as_in_the_readme() -> (Daemon, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port", "--operator-socket"]);
    command.env_remove("LATCHD_OPERATOR_SOCKET");
    command.env("XDG_RUNTIME_DIR", directory.path());
    (Daemon::from_command(command), directory)
}

#[test]
fn break_needs_no_option_for_the_user_of_the_server() {
    let (daemon, directory) = as_in_the_readme();
    let name = format!("latchd-{}.sock", daemon.port());
    let socket = directory.path().join(name);
    let mode = fs::metadata(&socket).expect("it is there").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let script = "trap 'exit 3' TERM; eval \"$READY\"; while :; do sleep 0.1; done";
    let options = ["--tag", "a job"];
    let (mut child, _) = started(&daemon, "k", &directory, &options, script);
    let breaks = || run(&daemon, &["break", "k"]);
    let broken = breaks();
    assert_eq!(broken.status.code(), Some(0), "{}", text(&broken.stderr));
    let said = text(&broken.stdout);
    assert!(said.starts_with("broken: a job, 127.0.0.1:"), "{said}");
    assert!(said.contains(", held for "), "{said}");
    assert_eq!(wait(&mut child), Some(70));
    assert_eq!(breaks().status.code(), Some(70), "it is not held any more");
    assert!(!daemon.log().contains("right-refused"), "{}", daemon.log());
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some());
    assert!(!socket.exists());
}

#[test]
fn another_server_with_the_same_port_breaks_nothing() {
    let (daemon, directory) = as_in_the_readme();
    let (other, others) = as_in_the_readme();
    let mut holder = other.connect();
    let grant = holder.acquire_for("k", 0, 60);
    let [ours, of_other] = [(&daemon, &directory), (&other, &others)].map(|(server, directory)| {
        directory
            .path()
            .join(format!("latchd-{}.sock", server.port()))
    });
    fs::remove_file(&ours).expect("it is there");
    std::os::unix::fs::symlink(&of_other, &ours).expect("there is room");
    let mut held = daemon.connect();
    held.acquire_for("k", 0, 60);
    assert_eq!(status(&daemon, &["break", "k"]), 77);
    assert_eq!(holder.request("n", "k", &grant.token), "ok 33");
}

/// A server that lists holders of `k` with these fences under an invented tag, names this operator
/// socket, and has the same slow answer to each `break`.
fn impostor(
    listener: TcpListener,
    fences: impl Iterator<Item = u64>,
    socket: &str,
    to_break: &'static str,
) {
    let greeting = format!("ok operator={socket}");
    let holder = |fence| {
        format!(
            r#"{{"conn_id":7,"peer":"192.0.2.1:1","tag":"invented","age_s":1.5,"fence":"{fence}","lease_expires_in_s":9.5}}"#
        )
    };
    let holders: Vec<String> = fences.map(holder).collect();
    let listed = format!(
        r#"ok {{"keys":[{{"key":"k","kind":"lock","limit":1,"holder_count":1,"waiter_count":0,"holders":[{}],"waiters":[]}}]}}"#,
        holders.join(",")
    );
    thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        let mut lines = BufReader::new(client.try_clone().expect("descriptors")).lines();
        while let Some(Ok(command)) = lines.next() {
            let _arguments = (lines.next(), lines.next());
            let reply = match &*command {
                "stats" => &*listed,
                "hello" => &*greeting,
                _ => {
                    thread::sleep(Duration::from_millis(100));
                    to_break
                }
            };
            if writeln!(client, "{reply}").is_err() {
                break;
            }
        }
    });
}

/// Any user may listen on the port at another address, and can know the fences.
#[test]
fn the_socket_of_the_operator_says_itself_whose_grant_it_ends() {
    let (daemon, directory) = as_in_the_readme();
    let mut holder = daemon.connect();
    holder.request("tag", "_", "the holder");
    let grant = holder.acquire_for("k", 0, 60);
    let beside = (std::net::Ipv4Addr::new(127, 0, 0, 2), daemon.port());
    let listener = TcpListener::bind(beside).expect("nobody else is there");
    let server = listener.local_addr().expect("its address").to_string();
    let socket = directory
        .path()
        .join(format!("latchd-{}.sock", daemon.port()));
    let socket = socket.to_str().expect("text");
    impostor(listener, [fence(&grant.token)].into_iter(), socket, "ok");
    let broken = run(&daemon, &["break", "k", "--server", &server]);
    let said = text(&broken.stdout);
    let expected = "broken: the holder, 127.0.0.1:";
    assert!(said.starts_with(expected), "{said}{}", text(&broken.stderr));
    assert!(!said.contains("invented"), "{said}");
}

/// What is printed may end up in a log.
#[test]
fn a_secret_that_a_server_repeats_is_not_printed() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("secret");
    fs::write(&file, "open-sesame\n").expect("the directory is ours");
    let file = file.to_str().expect("text");
    let presents: [&[&str]; 2] = [
        &["ping", "--auth-token-file", file],
        &["break", "k", "--admin-token-file", file],
    ];
    for arguments in presents {
        for reply in ["error 5 open-sesame", "ok open-sesame"] {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let server = listener.local_addr().expect("its address").to_string();
            impostor(listener, 1..2, "/nowhere", reply);
            let failed = run(&daemon, &[arguments, &["--server", &server]].concat());
            let said = text(&failed.stderr);
            assert_eq!(failed.status.code(), Some(76), "{said}");
            assert!(said.ends_with("the server answered nonsense\n"), "{said}");
            assert!(!said.contains("sesame"), "{said}");
        }
    }
}

#[test]
fn a_break_of_many_grants_has_one_time_limit() {
    let daemon = Daemon::start(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = listener.local_addr().expect("its address").to_string();
    impostor(listener, 1..5_000, "/nowhere", "ok");
    let arguments = ["break", "k", "--connect-timeout", "1", "--server", &server];
    let ended = run(&daemon, &arguments);
    assert_eq!(ended.status.code(), Some(69), "{}", text(&ended.stderr));
    let said = text(&ended.stdout);
    assert!(said.starts_with("broken: invented, 192.0.2.1:1"), "{said}");
}

#[test]
fn a_server_that_cannot_make_the_socket_serves_all_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let port = free_port();
    let path = directory.path().join(format!("latchd-{port}.sock"));
    fs::write(&path, "not a socket").expect("the directory is ours");
    let mut command = Daemon::command();
    command.args(["--port", &port.to_string()]);
    command.env_remove("LATCHD_OPERATOR_SOCKET");
    command.env("XDG_RUNTIME_DIR", directory.path());
    let daemon = Daemon::from_command(command);
    let line = format!("no-operator-socket path={} error=", path.display());
    daemon.wait_for_log(&line, PATIENCE);
    daemon.wait_for_log("listening ", PATIENCE);
}

/// In a container, under su or cron, and on hosts without systemd.
#[test]
fn a_plain_user_and_root_break_without_a_runtime_directory() {
    const USER: u32 = 54_322;
    let is_root = rustix::process::geteuid().is_root();
    let of_user = |name: &str| {
        let (directory, copy) = program_for_all(program(name));
        let mut command = Daemon::command_of(copy);
        command.env_remove("LATCHD_OPERATOR_SOCKET");
        command.env_remove("XDG_RUNTIME_DIR");
        if is_root {
            command.uid(USER).gid(USER);
        }
        (directory, command)
    };
    let (_server, mut command) = of_user("latchd");
    command.args(["--port", "0", "--print-port", "--operator-socket"]);
    let daemon = Daemon::from_command(command);
    let (_client, of_user) = of_user("latch");
    for mut command in [of_user, latch(&daemon, &[])] {
        let mut holder = daemon.connect();
        holder.acquire_for("k", 0, 60);
        // Another login of the same user may have a directory of its own.
        command.env("XDG_RUNTIME_DIR", "/nowhere/at/all");
        command.args(["break", "k", "--server", &daemon.addr().to_string()]);
        let broken = output(&mut command);
        assert_eq!(broken.status.code(), Some(0), "{}", text(&broken.stderr));
        assert!(text(&broken.stdout).starts_with("broken: "));
        holder.expect_eof();
    }
    assert!(!daemon.log().contains("right-refused"), "{}", daemon.log());
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some());
    let user = if is_root {
        USER
    } else {
        rustix::process::geteuid().as_raw()
    };
    // Another server of this user may be there.
    let _ = fs::remove_dir(format!("/tmp/latchd-{user}"));
}

#[test]
fn an_older_server_breaks_no_grant() {
    let daemon = Daemon::start(&[]);
    daemon.connect().acquire_for("k", 0, 60);
    for manners in [Manners::Refuses, Manners::RefusesAndCloses, Manners::Closes] {
        let addr = old_server(&daemon, manners).to_string();
        let output = run(&daemon, &["break", "k", "--server", &addr]);
        assert_eq!(output.status.code(), Some(76), "{manners:?}");
    }
}
