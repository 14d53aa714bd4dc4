//! Who holds a lock, and what an operator does about it: tags, `latch stats` and `latch break`.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::support::latch::{latch, output, ready, run, started, status, text, wait, Latch};
use crate::support::limited::program_for_all;
use crate::support::silent::{free_addr, free_port, refusing_addr};
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

const ALL_MANNERS: [Manners; 3] = [Manners::Refuses, Manners::RefusesAndCloses, Manners::Closes];

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

fn holders(daemon: &Daemon, key: &str) -> serde_json::Value {
    let reply = daemon.connect().request("stats", "holders", key);
    let json = reply.strip_prefix("ok ").expect("statistics");
    serde_json::from_str::<serde_json::Value>(json).expect("JSON")["keys"][0].clone()
}

// ---------------------------------------------------------------------------------------------
// Tags

#[test]
fn run_tells_the_server_its_command_host_and_number() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let (child, _) = started(&daemon, "k", &directory, &[], "eval \"$READY\"; sleep 60");
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let expected = format!("sh@{host} pid {}", child.id());
    assert_eq!(holders(&daemon, "k")["holders"][0]["tag"], expected);
    assert!(row(&stats(&daemon, &[]), "lock").contains(&expected));
}

#[test]
fn a_tag_is_shown_with_holders_and_waiters() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let script = "eval \"$READY\"; sleep 60";
    let options = ["--tag", "release 7"];
    let (_holder, _) = started(&daemon, "k", &directory, &options, script);
    let waits = ["run", "k", "--tag", "next one", "--", "true"];
    let _waiter = Latch::start(&mut latch(&daemon, &waits));
    daemon.wait_for_waiters("k", 1);
    let waits = ["acquire", "k", "--tag", "ключ\u{9b}"];
    let _second = Latch::start(&mut latch(&daemon, &waits));
    daemon.wait_for_waiters("k", 2);
    let _third = Latch::start(&mut latch(&daemon, &["acquire", "k"]));
    daemon.wait_for_waiters("k", 3);
    let key = stats(&daemon, &["k"]);
    assert!(row(&key, "holder").ends_with(" release 7"), "{key}");
    assert!(row(&key, "waiter 1").ends_with(" next one"), "{key}");
    assert!(row(&key, "waiter 2").ends_with(" ключ\\xc2\\x9b"), "{key}");
    assert!(row(&key, "waiter 3").contains(" latch@"), "{key}");
    assert!(!key.contains('\u{9b}'), "{key}");
}

#[test]
fn a_long_tag_is_cut_at_a_character() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let script = "eval \"$READY\"; sleep 60";
    let long = format!("x{}", "ж".repeat(100));
    let (child, _) = started(&daemon, "k", &directory, &["--tag", &long], script);
    let tag = holders(&daemon, "k")["holders"][0]["tag"].clone();
    assert_eq!(tag, format!("x{}", "ж".repeat(63)));
    drop(child);
    let (_child, _) = started(&daemon, "other", &directory, &["--tag", ""], script);
    let tag = holders(&daemon, "other")["holders"][0]["tag"].clone();
    assert_eq!(tag, serde_json::Value::Null, "an empty tag is none");
    let two_lines = ["run", "k", "--tag", "one\ntwo", "--", "true"];
    assert_eq!(status(&daemon, &two_lines), 64);
}

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
fn the_keys_with_most_waiters_come_first() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire_for("z-quiet", 0, 60);
    holder.acquire_for("a-quiet", 0, 60);
    holder.acquire_for("busy", 0, 500);
    for _ in 0..2 {
        assert!(holder.request("sl", "pool", "0 2 60").starts_with("ok "));
    }
    let waiters = ["l\nbusy\n60\n", "l\nbusy\n60\n", "sl\npool\n60 2\n"].map(|request| {
        let mut waiter = daemon.connect();
        waiter.send(request);
        waiter
    });
    daemon.wait_for_waiters("busy", 2);
    daemon.wait_for_waiters("pool", 1);
    let table = stats(&daemon, &[]);
    let first: Vec<&str> = table.lines().map(|line| &line[..4]).collect();
    assert_eq!(
        first,
        ["KIND", "lock", "sema", "sema", "lock", "lock", "4 in"],
        "{table}"
    );
    let busy = row(&table, "busy");
    let words: Vec<&str> = busy.split(' ').collect();
    assert_eq!(words[..2], ["lock", "busy"], "{table}");
    assert!(words[2].starts_with("127.0.0.1:"), "{table}");
    // One slot, its age; the lease of 500 seconds; two waiters; without a tag.
    assert_eq!(words[3], "1", "{table}");
    assert_eq!(words[5..], ["s", "8", "m", "2", "-"], "{table}");
    assert!(
        row(&table, "pool").starts_with("semaphore 2/2 pool"),
        "{table}"
    );
    let quiet = table.find("a-quiet").expect("listed");
    assert!(quiet < table.find("z-quiet").expect("listed"), "{table}");
    drop(waiters);
}

#[test]
fn one_key_is_shown_in_full() {
    let daemon = Daemon::start(&[]);
    let [mut first, mut second, mut third] = [(); 3].map(|()| daemon.connect());
    let grant = first.acquire_for("k", 0, 60);
    second.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 1);
    third.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 2);
    let shown = stats(&daemon, &["k"]);
    assert!(
        shown.starts_with("k: lock, 1 of 1 held, 2 waiting\n"),
        "{shown}"
    );
    let fence = u64::from_str_radix(&grant.token[..16], 16).expect("hex digits");
    assert!(
        row(&shown, "holder").ends_with(&format!(" {fence} -")),
        "{shown}"
    );
    assert!(row(&shown, "waiter 2").contains("127.0.0.1:"), "{shown}");
    assert_eq!(shown.lines().count(), 5, "{shown}");
    let json = stats(&daemon, &["k", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["keys"][0]["waiters"].as_array().map(Vec::len), Some(2));
    assert_eq!(stats(&daemon, &["other"]), "other: not in use\n");
    assert_eq!(status(&daemon, &["stats", "two words"]), 64);
}

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

#[test]
fn ping_reports_each_of_several_servers() {
    let [first, last] = [(); 2].map(|()| Daemon::start(&[]));
    let (_port, dead) = refusing_addr();
    let addresses = [first.addr(), dead, last.addr()].map(|addr| addr.to_string());
    let output = run(&first, &["ping", "--shards", &addresses.join(",")]);
    let answering = format!("{}: ok\n{}: ok\n", first.addr(), last.addr());
    assert_eq!(text(&output.stdout), answering);
    let reason = format!("latch: {dead}: connection refused; is latchd running there?\n");
    assert_eq!(text(&output.stderr), reason);
    assert_eq!(output.status.code(), Some(69));
}

#[test]
fn a_watch_survives_a_restart_of_the_server() {
    let addr = free_addr();
    let start = || {
        let mut command = Daemon::command();
        command.args(["--print-port", "--port", &addr.port().to_string()]);
        Daemon::from_command(command)
    };
    let first = start();
    let mut command = latch(&first, &["stats", "--watch"]);
    let mut child = Latch::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let (sender, lines) = mpsc::channel();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let other = sender.clone();
    thread::spawn(move || {
        let lines = BufReader::new(stdout.expect("piped")).lines();
        lines
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line))
    });
    thread::spawn(move || {
        let lines = BufReader::new(stderr.expect("piped")).lines();
        lines
            .map_while(Result::ok)
            .try_for_each(|line| other.send(line))
    });
    let expect = |text: &str| loop {
        let line = lines.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|_| panic!("no {text}"));
        if line.contains(text) {
            return line;
        }
    };
    // The time is written as in the log of the server.
    let title = expect(&format!("Z  {addr}"));
    assert_eq!(
        title.find("Z  "),
        Some("yyyy-mm-ddThh:mm:ss".len()),
        "{title}"
    );
    expect("0 in use");
    drop(first);
    expect(&format!("latch: {addr}: "));
    let second = start();
    let mut holder = second.connect();
    holder.acquire("after", 0);
    expect("after");
    assert!(child.try_wait().expect("a child").is_none());
}

// ---------------------------------------------------------------------------------------------
// Breaking a grant

/// A daemon with a Unix socket and an admin token, and the paths of both.
fn guarded(directory: &tempfile::TempDir) -> (Daemon, [PathBuf; 2]) {
    let paths = ["admin", "socket"].map(|name| directory.path().join(name));
    fs::write(&paths[0], "open-sesame\n").expect("the directory is ours");
    let texts = paths.each_ref().map(|path| path.to_str().expect("text"));
    let daemon = Daemon::start(&["--admin-token-file", texts[0], "--unix", texts[1]]);
    (daemon, paths)
}

#[test]
fn a_broken_grant_ends_the_command_at_the_other_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let (daemon, [_, socket]) = guarded(&directory);
    let script = "trap 'echo ended; exit 0' TERM; eval \"$READY\"; while :; do sleep 0.1; done";
    let arguments = [
        "run",
        "k",
        "--lease",
        "4",
        "--kill-after",
        "1",
        "--",
        "sh",
        "-c",
        script,
    ];
    let mut command = latch(&daemon, &arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (mut child, _) = ready(command, &directory);
    let mut waiter = daemon.connect();
    waiter.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 1);
    let server = socket.to_str().expect("text");
    assert_eq!(status(&daemon, &["break", "k", "--server", server]), 0);
    assert!(waiter.line().starts_with("ok "), "the next one has it");
    assert_eq!(wait(&mut child), Some(70));
    let read = |stream: &mut dyn Read| {
        let mut said = String::new();
        stream.read_to_string(&mut said).expect("a pipe");
        said
    };
    assert_eq!(read(child.stdout.as_mut().expect("piped")), "ended\n");
    let said = read(child.stderr.as_mut().expect("piped"));
    assert!(said.ends_with(": an operator broke it\n"), "{said}");
}

#[test]
fn a_client_that_asks_to_hear_of_breaks_is_told_of_its_own() {
    let directory = tempfile::tempdir().expect("a directory");
    let (daemon, [_, socket]) = guarded(&directory);
    let server = socket.to_str().expect("text");
    let mut holder = daemon.connect();
    let (k, other) = (holder.acquire("k", 0), holder.acquire("other", 0));
    assert_eq!(status(&daemon, &["break", "k", "--server", server]), 0);
    assert_eq!(holder.request("r", "other", &other.token), "ok");
    assert_eq!(holder.request("n", "k", &k.token), "error");
    assert!(holder.request("hello", "_", "broken").starts_with("ok "));
    for (command, token, reply) in [
        ("n", &k.token, "error_broken"),
        ("adopt", &k.token, "error_broken"),
        ("r", &k.token, "error"),
        ("n", &other.token, "error"),
        ("adopt", &other.token, "error"),
    ] {
        assert_eq!(holder.request(command, "k", token), reply, "{command}");
    }
}

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
fn a_refused_break_is_said_in_few_words() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire_for("k", 0, 60);
    let refused = run(&daemon, &["break", "k"]);
    assert_eq!(refused.status.code(), Some(77));
    let said = text(&refused.stderr);
    assert!(said.split_whitespace().count() <= 25, "{said}");
    assert!(said.contains("needs root or the server's user"), "{said}");
    assert!(said.contains("see --admin-token-file"), "{said}");
}

#[test]
fn only_an_operator_breaks_a_grant() {
    let directory = tempfile::tempdir().expect("a directory");
    let (daemon, [admin, _]) = guarded(&directory);
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 60);
    let wrong = directory.path().join("wrong");
    fs::write(&wrong, "sesame").expect("the directory is ours");
    let breaks = |path: &PathBuf| {
        let file = path.to_str().expect("text");
        run(&daemon, &["break", "k", "--admin-token-file", file])
    };
    let refused = breaks(&wrong);
    assert_eq!(refused.status.code(), Some(77));
    let said = text(&refused.stderr);
    let place = format!("latch: k at {}: ", daemon.addr());
    assert!(said.starts_with(&place), "{said}");
    assert!(
        said.contains("the server refused the admin token"),
        "{said}"
    );
    assert_eq!(holder.request("n", "k", &grant.token), "ok 33");
    assert_eq!(breaks(&admin).status.code(), Some(0));
    holder.expect_eof();
}

#[test]
fn a_fence_names_the_grant_to_break() {
    let directory = tempfile::tempdir().expect("a directory");
    let (daemon, [_, socket]) = guarded(&directory);
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 60);
    let fence = u64::from_str_radix(&grant.token[..16], 16).expect("hex digits");
    let server = socket.to_str().expect("text");
    let breaks = |fence: u64| {
        let fence = fence.to_string();
        run(
            &daemon,
            &["break", "k", "--fence", &fence, "--server", server],
        )
    };
    let other = breaks(fence - 1);
    assert_eq!(other.status.code(), Some(70));
    let said = text(&other.stderr);
    assert_eq!(
        said,
        format!("latch: k at {server}: nobody holds this lock with this fence\n")
    );
    assert_eq!(breaks(fence).status.code(), Some(0));
    holder.expect_eof();
    let none = run(&daemon, &["break", "k", "--server", server]);
    assert_eq!(none.status.code(), Some(70));
    assert!(text(&none.stderr).ends_with(": nobody holds this lock\n"));
}

#[test]
fn a_break_that_cannot_be_asked_for_has_its_status() {
    let directory = tempfile::tempdir().expect("a directory");
    let (daemon, _) = guarded(&directory);
    let mut holder = daemon.connect();
    holder.acquire_for("k", 0, 60);
    let two_words = directory.path().join("two-words");
    fs::write(&two_words, "open sesame").expect("the directory is ours");
    for file in [two_words.to_str().expect("text"), "/nowhere/at/all"] {
        let output = run(&daemon, &["break", "k", "--admin-token-file", file]);
        assert_eq!(output.status.code(), Some(74), "{file}");
        let expected = format!("latch: cannot use the admin token file {file}: ");
        assert!(text(&output.stderr).starts_with(&expected), "{file}");
    }
    assert_eq!(status(&daemon, &["break", "k", "--fence", "soon"]), 64);
    let (_port, dead) = refusing_addr();
    assert_eq!(
        status(&daemon, &["break", "k", "--server", &dead.to_string()]),
        69
    );
    for manners in ALL_MANNERS {
        let addr = old_server(&daemon, manners).to_string();
        let output = run(&daemon, &["break", "k", "--server", &addr]);
        assert_eq!(output.status.code(), Some(76), "{manners:?}");
    }
    let secret = Daemon::start(&["--auth-token", "secret"]);
    let refused = run(&secret, &["break", "k"]);
    assert_eq!(refused.status.code(), Some(77));
    assert!(text(&refused.stderr).contains("auth token"));
}
