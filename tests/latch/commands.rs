//! `latch` with real processes: what a shell sees of all that does not run a command.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::reconnecting::{listener, Peer};
use crate::support::at_the_end::AtTheEnd;
use crate::support::latch::{
    is_held, latch, output, run, signal, state, status, text, wait, Latch,
};
use crate::support::needs::{needs, skipped};
use crate::support::silent::{refusing_addr, FullBacklog};
use crate::support::stalls::{fair_test, in_time};
use crate::support::wire_cutter::WireCutter;
use crate::support::{eventually, program, rows_of, Daemon, Scheme, Signal, PATIENCE};
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
fn a_held_lock_is_busy_with_the_status_of_the_options() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    assert_eq!(
        status(&daemon, &["run", "k", "--timeout", "0", "--", "true"]),
        75
    );
    assert_eq!(
        status(&daemon, &["run", "k", "--timeout", "1", "--", "true"]),
        75
    );
    assert_eq!(
        status(
            &daemon,
            &["run", "k", "--timeout", "0", "-E", "9", "--", "true"]
        ),
        9
    );
    assert_eq!(
        status(
            &daemon,
            &["run", "k", "--timeout", "0", "--busy-ok", "--", "false"]
        ),
        0
    );
    assert_eq!(
        status(
            &daemon,
            &["run", "k", "--timeout", "0", "--limit", "3", "--", "true"]
        ),
        76
    );
    assert_eq!(status(&daemon, &["wait", "k", "--timeout", "0"]), 75);
}

#[test]
fn bad_usage_and_unreachable_servers_have_their_own_status() {
    let daemon = Daemon::start(&[]);
    for arguments in [
        &["run", "k"][..],
        &["run", "--", "true"],
        &["nonsense"],
        &[],
        &["ping", "--", "true"],
        &["run", "k", "--lease", "x", "--", "true"],
        &["run", "a key", "--", "true"],
        &["run", "k", "--limit", "0", "--", "true"],
        &["wait", "a key", "--server", "/nowhere/at/all"],
        &[
            "acquire",
            "k",
            "--lease",
            "0",
            "--server",
            "/nowhere/at/all",
        ],
        &["release", "k", "no-token", "--server", "/nowhere/at/all"],
        &["renew", "k", "no-token"],
        &["ping", "--server", "nowhere:"],
    ] {
        let output = run(&daemon, arguments);
        assert_eq!(
            output.status.code(),
            Some(64),
            "{arguments:?}: {}",
            text(&output.stderr)
        );
        // The second line says where to read more.
        assert_eq!(text(&output.stderr).lines().count(), 2, "{arguments:?}");
    }
    let (_port, addr) = refusing_addr();
    assert_eq!(
        status(&daemon, &["ping", "--server", &addr.to_string()]),
        69
    );
    assert_eq!(
        status(&daemon, &["ping", "--auth-token-file", "/nowhere/at/all"]),
        74
    );
    assert_eq!(status(&daemon, &["ping"]), 0);
}

#[test]
fn a_usage_error_says_what_to_write_instead() {
    let daemon = Daemon::start(&[]);
    for (arguments, hint) in rows_of(include_str!("usage_errors.txt")) {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = run(&daemon, &arguments);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        let help = match arguments[0] {
            command @ ("run" | "stats" | "status" | "ping" | "acquire" | "reserve" | "renew"
            | "release") => {
                format!("latch {command} --help")
            }
            _ => "latch --help".to_owned(),
        };
        let expected = format!("latch: {hint}\nlatch: see {help}\n");
        assert_eq!(text(&output.stderr), expected, "{arguments:?}");
    }
}

#[test]
fn help_and_version_are_words_too() {
    let daemon = Daemon::start(&[]);
    for (word, option) in [
        (&["help"][..], &["--help"][..]),
        (&["help", "run"], &["run", "--help"]),
        (&["version"], &["--version"]),
    ] {
        let printed = run(&daemon, word);
        assert_eq!(printed.status.code(), Some(0), "{word:?}");
        assert_eq!(printed.stdout, run(&daemon, option).stdout, "{word:?}");
    }
    let help = text(&run(&daemon, &["run", "--help"]).stdout);
    let usage = help.lines().next().expect("a usage");
    assert_eq!(usage, "Usage: latch run <key> [options] -- COMMAND [ARGS]");
    let version = text(&run(&daemon, &["-V"]).stdout);
    for arguments in [&["run", "-V"][..], &["run", "k", "--version", "--", "true"]] {
        assert_eq!(text(&run(&daemon, arguments).stdout), version);
    }
}

#[test]
fn the_help_tells_what_this_build_has_and_reads() {
    let daemon = Daemon::start(&[]);
    let help = |arguments: &[&str]| text(&run(&daemon, arguments).stdout);
    let lacks_tls = help(&["ping", "--help"]).contains("A build with --features tls also has");
    assert_eq!(lacks_tls, !cfg!(feature = "tls"));
    assert!(help(&["--help"]).contains("LATCH_SERVER, "));
    assert!(help(&["--help"]).ends_with("\nSee latch(1).\n"));
    assert!(help(&["-V"]).ends_with(if lacks_tls { " (-tls)\n" } else { " (+tls)\n" }));
}

#[test]
fn an_unknown_variable_is_warned_of() {
    let daemon = Daemon::start(&[]);
    let mut command = latch(&daemon, &["ping"]);
    let output = output(
        command
            .env("LATCH_SEVER", "elsewhere")
            .env("LATCH_KEY", "k"),
    );
    assert_eq!(output.status.code(), Some(0));
    let warning = "latch: LATCH_SEVER: unknown variable; see latch(1), ENVIRONMENT\n";
    assert_eq!(text(&output.stderr), warning);
}

#[test]
fn a_variable_of_a_likely_name_is_answered_with_ours() {
    let daemon = Daemon::start(&[]);
    let mut command = latch(&daemon, &["ping"]);
    let output = output(command.env("LATCH_AUTH_TOKEN", "secret"));
    assert_eq!(output.status.code(), Some(0));
    let warning = "latch: LATCH_AUTH_TOKEN: unknown variable; set LATCH_AUTH_TOKEN_FILE to the \
                   path of a file with the token\n";
    assert_eq!(text(&output.stderr), warning);
}

#[test]
fn the_variables_of_a_service_in_kubernetes_are_left_alone() {
    let daemon = Daemon::start(&[]);
    let mut command = latch(&daemon, &["ping"]);
    for (name, value) in [
        ("PORT", "tcp://10.96.0.10:6388"),
        ("PORT_6388_TCP", "tcp://10.96.0.10:6388"),
        ("PORT_6388_TCP_ADDR", "10.96.0.10"),
        ("PORT_6388_TCP_PORT", "6388"),
        ("PORT_6388_TCP_PROTO", "tcp"),
        ("SERVICE_HOST", "10.96.0.10"),
        ("SERVICE_PORT", "6388"),
    ] {
        command.env(format!("LATCH_{name}"), value);
    }
    let output = output(&mut command);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "");
}

/// Two hosts with the same servers in another order would run two jobs.
#[test]
fn a_list_of_servers_is_refused_with_both_ways_out() {
    let daemon = Daemon::start(&[]);
    let rest = "write 'a|b' if they are one service, or --shards a,b";
    for arguments in [
        &["run", "k", "--busy-ok", "-n"][..],
        &["hold", "k"],
        &["wait", "k"],
        &["acquire", "k"],
        &["reserve", "k", "--for", "9"],
        &["renew", "k", &"0".repeat(32)],
        &["release", "k", &"0".repeat(32)],
        &["stats"],
        &["status", "k"],
        &["history", "k"],
        &["break", "k"],
        &["ping"],
    ] {
        let with = |options: &[&str]| {
            let job: &[&str] = match arguments[0] {
                "run" => &["--", "true"],
                _ => &[],
            };
            latch(&daemon, &[arguments, options, job].concat())
        };
        for list in ["a,b", "a b", "a , b", "a | b"] {
            let mut by_variable = with(&[]);
            by_variable.env("LATCH_SERVER", list);
            // Blanks around the value of a variable are not part of it.
            for (mut command, origin, list) in [
                (with(&["--server", list]), "--server", list),
                (by_variable, "LATCH_SERVER", list.trim()),
            ] {
                let refused = output(&mut command);
                assert_eq!(refused.status.code(), Some(64), "{arguments:?}");
                let expected = format!("latch: invalid value '{list}' for {origin}: {rest} ");
                let said = text(&refused.stderr);
                assert!(said.starts_with(&expected), "{said}");
            }
        }
    }
    let twice = ["ping", "--server", "a", "--server", "b"];
    assert!(text(&run(&daemon, &twice).stderr).contains(rest));
    assert_eq!(status(&daemon, &["ping", "--server", ","]), 64);
}

#[test]
fn an_option_for_servers_overrides_both_variables() {
    let daemons = [Daemon::start(&[]), Daemon::start(&[])];
    let [one, other] = [&daemons[0], &daemons[1]].map(|daemon| daemon.addr().to_string());
    let shards = format!("{one},{other}");
    let ping = |options: &[&str], variables: &[(&str, &str)]| {
        let mut command = latch(&daemons[0], &[&["ping"], options].concat());
        command.env_remove("LATCH_SERVER");
        output(command.envs(variables.iter().copied()))
    };
    let both = format!("{one}: ok\n{other}: ok\n");
    assert_eq!(text(&ping(&["--shards", &shards], &[]).stdout), both);
    let by_variable = [("LATCH_SHARDS", shards.as_str())];
    assert_eq!(text(&ping(&[], &by_variable).stdout), both);
    let dead = [("LATCH_SERVER", "/nowhere/at/all")];
    assert_eq!(text(&ping(&["--shards", &shards], &dead).stdout), both);
    let single = ping(&["--server", &one], &by_variable);
    assert_eq!(
        (single.status.code(), text(&single.stdout)),
        (Some(0), format!("{one}: ok\n"))
    );
    for (options, variables, said) in [
        (
            &["--server", "a", "--shards", "b"][..],
            &[][..],
            "--server and --shards exclude each other",
        ),
        (
            &[],
            &[dead[0], by_variable[0]],
            "LATCH_SERVER and LATCH_SHARDS exclude each other",
        ),
    ] {
        let refused = ping(options, variables);
        assert_eq!(refused.status.code(), Some(64));
        assert!(text(&refused.stderr).contains(said), "{refused:?}");
    }
}

#[test]
fn w_and_n_mean_the_same_as_for_flock_and_sema() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    for arguments in [
        &["run", "k", "-n", "--", "true"][..],
        &["run", "k", "-w", "1", "--", "true"],
        &["hold", "k", "--nonblock"],
        &["wait", "k", "-n"],
        &["wait", "k", "-w", "0"],
        &["acquire", "k", "-n"],
    ] {
        assert_eq!(status(&daemon, arguments), 75, "{arguments:?}");
    }
    let began = Instant::now();
    assert_eq!(
        status(&daemon, &["run", "k", "-n", "--busy-ok", "--", "true"]),
        0
    );
    assert_eq!(status(&daemon, &["wait", "free", "-w", "60"]), 0);
    assert!(began.elapsed() < PATIENCE);
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
fn times_may_have_units() {
    let daemon = Daemon::start(&[]);
    let times = [
        "--timeout",
        "1m30s",
        "--lease",
        "1m",
        "--kill-after",
        "500ms",
    ];
    let run = [
        &["run", "k"],
        &times[..],
        &["--connect-timeout", "1.5s", "--", "true"],
    ];
    assert_eq!(status(&daemon, &run.concat()), 0);
    assert_eq!(status(&daemon, &["wait", "k", "--timeout", "1h"]), 0);
}

#[test]
fn a_server_may_be_named_in_all_forms() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("socket");
    let socket = socket.to_str().expect("text");
    let daemon = Daemon::start(&["--unix", socket]);
    for server in [
        format!("tcp://{}", daemon.addr()),
        format!("unix:{socket}"),
        socket.to_owned(),
    ] {
        let pinged = run(&daemon, &["ping", "--server", &server]);
        assert_eq!(pinged.status.code(), Some(0), "{server}: {pinged:?}");
    }
    // Whether or not a server is there: the port is known.
    let said = text(&run(&daemon, &["ping", "--server", "127.0.0.77"]).stderr);
    assert!(
        said.is_empty() || said.starts_with("latch: 127.0.0.77:6388: "),
        "{said}"
    );
}

#[test]
fn a_server_may_be_named_localhost() {
    // A root of debootstrap has no /etc/hosts.
    if ("localhost", 0).to_socket_addrs().is_err() {
        return skipped(&["localhost in /etc/hosts"]);
    }
    let daemon = Daemon::start(&[]);
    let server = format!("localhost:{}", daemon.port());
    assert_eq!(status(&daemon, &["ping", "--server", &server]), 0);
}

#[test]
fn a_wrong_auth_token_is_77_and_the_right_one_works() {
    let directory = tempfile::tempdir().expect("a directory");
    let (right, wrong) = (
        directory.path().join("right"),
        directory.path().join("wrong"),
    );
    fs::write(&right, "secret\n").expect("write");
    fs::write(&wrong, "guess\n").expect("write");
    let daemon = Daemon::start(&["--auth-token-file", right.to_str().expect("text")]);
    assert_eq!(
        status(
            &daemon,
            &["ping", "--auth-token-file", right.to_str().expect("text")]
        ),
        0
    );
    assert_eq!(
        status(
            &daemon,
            &["ping", "--auth-token-file", wrong.to_str().expect("text")]
        ),
        77
    );
}

#[test]
fn a_script_keeps_a_lock_if_the_server_allows_it() {
    let daemon = Daemon::start(&["--no-auto-release-on-disconnect"]);
    let output = run(&daemon, &["acquire", "k", "--lease", "20"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let token = text(&output.stdout).trim().to_owned();
    assert!(is_held(&daemon, "k"));
    // A kept lock keeps its longer lease.
    let renewed = run(&daemon, &["renew", "k", &token, "--lease", "9"]);
    let left: u64 = text(&renewed.stdout).trim().parse().expect("seconds");
    assert!((10..=20).contains(&left), "{left}");
    assert_eq!(status(&daemon, &["release", "k", &token]), 0);
    let again = run(&daemon, &["release", "k", &token]);
    assert_eq!(again.status.code(), Some(70));
    let why = ": this token does not hold the lock (released, expired, or another key)\n";
    assert!(text(&again.stderr).ends_with(why), "{again:?}");
    assert_eq!(status(&daemon, &["wait", "k"]), 0);
}

#[test]
fn a_grant_whose_token_cannot_be_printed_is_released() {
    let daemon = Daemon::start(&["--no-auto-release-on-disconnect"]);
    for arguments in [&["acquire", "k"][..], &["stats"], &["--help"]] {
        let full = File::options().write(true).open("/dev/full");
        let mut command = latch(&daemon, arguments);
        command.stdout(full.expect("every Linux has it"));
        let output = command
            .stderr(Stdio::piped())
            .spawn()
            .and_then(|child| child.wait_with_output());
        let output = output.expect("latch starts");
        assert_eq!(output.status.code(), Some(74), "{arguments:?}");
        assert_eq!(text(&output.stderr).lines().count(), 1, "{arguments:?}");
    }
    assert!(!is_held(&daemon, "k"));
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
fn a_failure_names_what_is_missing_and_the_server() {
    let daemon = Daemon::start(&[]);
    for (arguments, expected) in [
        (&["renew"][..], "missing key"),
        (&["reserve", "k"], "missing --for"),
        (
            &[],
            "hold, wait, acquire, reserve, renew, release, stats, status, history, break, ping, fence-check",
        ),
        (
            &["run", "k", "--server", "/nowhere/at/all", "--", "true"],
            "latch: /nowhere/at/all: ",
        ),
    ] {
        let said = text(&run(&daemon, arguments).stderr);
        assert!(said.contains(expected), "{arguments:?}: {said}");
        let is_usage = !said.contains("/nowhere");
        assert_eq!(said.lines().count(), 1 + usize::from(is_usage), "{said}");
    }
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

#[test]
fn stats_are_a_table_or_the_servers_json() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("a\u{1b}[2Jb", 0);
    let table = text(&run(&daemon, &["stats"]).stdout);
    assert!(
        table.contains("a\\x1b[2Jb") && table.contains("1 in use"),
        "{table}"
    );
    let json = text(&run(&daemon, &["stats", "--json"]).stdout);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["keys"][0]["key"], "a\u{1b}[2Jb");
}

#[test]
fn keys_and_tags_are_readable_in_any_script_and_hide_nothing() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    assert_eq!(holder.request("tag", "_", "рабочий\u{202e} 7"), "ok");
    holder.acquire("ключ\u{200b}", 0);
    let (key, tag) = ("ключ\\xe2\\x80\\x8b", "рабочий\\xe2\\x80\\xae 7");
    for arguments in [
        &["stats"][..],
        &["stats", "ключ\u{200b}"],
        &["status", "ключ\u{200b}"],
    ] {
        let shown = text(&run(&daemon, arguments).stdout);
        assert!(shown.contains(key) && shown.contains(tag), "{shown}");
    }
    let refused = text(&run(&daemon, &["break", "нет"]).stderr);
    assert!(refused.starts_with("latch: нет at "), "{refused}");
}

#[test]
fn fence_check_tells_an_older_token_from_the_newest() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("fence");
    let file = file.to_str().expect("text");
    let mut holder = daemon.connect();
    let older = holder.acquire("a", 0).token;
    let newer = holder.acquire("b", 0).token;
    for (token, expected) in [(&older, 0), (&newer, 0), (&newer, 0), (&older, 1)] {
        assert_eq!(status(&daemon, &["fence-check", file, token]), expected);
    }
    assert_eq!(
        status(&daemon, &["fence-check", "/nowhere/at/all", &newer]),
        74
    );
    assert_eq!(status(&daemon, &["fence-check", file, "x"]), 64);
}

// ---------------------------------------------------------------------------------------------
// Exit status

#[test]
fn busy_status_takes_any_exit_status() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    for (options, expected, said) in [
        (&["-E", "0"][..], 0, 1),
        (&["-E", "255"], 255, 1),
        (&["--busy-status=3"], 3, 1),
        (&["--busy-ok=no"], 75, 1),
        (&["--busy-ok=YES"], 0, 0),
        (&["--busy-ok", "-E", "9"], 0, 0),
        (&["-E", "64"], 64, 1),
        (&["-E", "256"], 64, 2),
        (&["-E", "-1"], 64, 2),
        (&["--busy-ok=perhaps"], 64, 2),
    ] {
        let mut arguments = vec!["run", "k", "--timeout", "0"];
        arguments.extend(options);
        arguments.extend(["--", "false"]);
        let output = run(&daemon, &arguments);
        assert_eq!(output.status.code(), Some(expected), "{options:?}");
        assert_eq!(
            text(&output.stderr).lines().count(),
            said,
            "{options:?}: {}",
            text(&output.stderr)
        );
    }
}

#[test]
fn busy_ok_takes_the_age_from_which_a_held_lock_is_a_fault() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let mut pooled = daemon.connect();
    assert!(pooled.request("sl", "pool", "0 2").starts_with("ok "));
    // The other key was taken before this one.
    eventually(PATIENCE, "both have been held for a second", || {
        let queue = run(&daemon, &["stats", "pool", "--format", "json"]);
        let queue: serde_json::Value = serde_json::from_slice(&queue.stdout).expect("JSON");
        queue["keys"][0]["holders"][0]["age_s"].as_f64() >= Some(1.0)
    });
    for (key, busy_ok, status, said) in [
        ("k", "--busy-ok=2d", 0, ""),
        ("k", "--busy-ok=1", 75, "not granted at once: held by "),
        ("pool", "--busy-ok=2d", 0, ""),
        (
            "pool",
            "--busy-ok=1s",
            76,
            "the key is in use as a semaphore with --limit 2",
        ),
    ] {
        let arguments = ["run", key, "-n", busy_ok, "--", "true"];
        let output = run(&daemon, &arguments);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        let stderr = text(&output.stderr);
        assert!(stderr.contains(said), "{stderr}");
        assert_eq!(stderr.is_empty(), said.is_empty(), "{stderr}");
    }
}

#[test]
fn a_full_server_and_a_draining_one_are_busy() {
    let daemon = Daemon::start_alone(&["--max-locks", "1", "--max-waiters", "1"]);
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let mut waiter = daemon.connect();
    waiter.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 1);
    assert_eq!(status(&daemon, &["run", "other", "--", "true"]), 75);
    assert_eq!(status(&daemon, &["run", "k", "--", "true"]), 75);
    // --busy-ok is only for a lock that another client holds, and here no server says so.
    let busy_ok = ["run", "other", "--busy-ok", "--", "true"];
    assert_eq!(status(&daemon, &busy_ok), 75);
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("draining", PATIENCE);
    assert_eq!(status(&daemon, &["run", "k", "--", "true"]), 75);
}

#[test]
fn a_mismatch_and_a_reply_that_is_not_valid_are_76() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    assert!(holder.request("sl", "pool", "0 2").starts_with("ok "));
    for options in [&[][..], &["--limit", "3"]] {
        let mut arguments = vec!["run", "pool"];
        arguments.extend(options);
        arguments.extend(["--", "true"]);
        assert_eq!(status(&daemon, &arguments), 76, "{options:?}");
    }
    assert_eq!(
        status(&daemon, &["run", "pool", "--limit", "2", "--", "true"]),
        0
    );

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
fn a_server_that_is_down_or_goes_away_is_69() {
    let daemon = Daemon::start(&[]);
    let (_port, addr) = refusing_addr();
    for server in [&addr.to_string(), "/nowhere/at/all"] {
        for command in ["run", "wait", "acquire"] {
            let mut arguments = vec![command, "k", "--server", server];
            if command == "run" {
                arguments.extend(["--", "true"]);
            }
            assert_eq!(status(&daemon, &arguments), 69, "{arguments:?}");
        }
    }
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let mut child = Latch::start(&mut latch(&daemon, &["run", "k", "--", "true"]));
    daemon.wait_for_waiters("k", 1);
    drop(daemon);
    assert_eq!(wait(&mut child), Some(69));
}

#[test]
fn a_system_without_resources_is_71() {
    let daemon = Daemon::start(&[]);
    let status_with = |descriptors: u32| {
        let script = format!("ulimit -n {descriptors}; exec latch run k -- true");
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command.env("LATCH_SERVER", daemon.addr().to_string());
        output(&mut command).status.code()
    };
    // With three, the system could not start the program.
    let enough = (4..64)
        .find(|descriptors| match status_with(*descriptors) {
            Some(0) => true,
            status => {
                assert_eq!(status, Some(71), "{descriptors} descriptors");
                false
            }
        })
        .expect("it needs few");
    assert!(enough > 4, "nothing was refused");
}

#[test]
fn a_close_before_the_first_answer_is_explained() {
    let options = ["--auth-token", "secret", "--max-connections", "1"];
    let daemon = Daemon::start_directly(Scheme::Plain, &options);
    let mut client = daemon.connect();
    assert_eq!(client.request("auth", "_", "secret"), "ok");
    let output = run(&daemon, &["ping"]);
    let why =
        ": the server closed the connection; it may require TLS, or have as many connections \
               as it allows\n";
    assert!(text(&output.stderr).ends_with(why), "{output:?}");
    assert_eq!(output.status.code(), Some(69));
    let stats = client.request("stats", "holders", "");
    assert!(stats.ends_with(r#","turned_away":1}"#), "{stats}");
}

#[test]
fn an_auth_token_for_a_server_without_one_is_77() {
    let directory = tempfile::tempdir().expect("a directory");
    let token = directory.path().join("token");
    fs::write(&token, "secret").expect("write");
    let daemon = Daemon::start(&[]);
    for command in [&["ping"][..], &["stats"], &["run", "k", "--", "true"]] {
        let mut command = latch(&daemon, command);
        let output = output(command.env("LATCH_AUTH_TOKEN_FILE", &token));
        assert_eq!(output.status.code(), Some(77), "{command:?}");
        let said = text(&output.stderr);
        assert!(
            said.contains(
                ": the server refused the auth token: it is wrong, or the server uses none"
            ),
            "{said}"
        );
    }
}

#[test]
fn a_missing_auth_token_is_77_and_an_unreadable_file_74() {
    let directory = tempfile::tempdir().expect("a directory");
    let right = directory.path().join("right");
    fs::write(&right, " secret\n\n").expect("write");
    let right = right.to_str().expect("text");
    let secret = directory.path().join("secret");
    fs::write(&secret, "secret").expect("write");
    let daemon = Daemon::start(&["--auth-token-file", secret.to_str().expect("text")]);
    let here = directory.path().to_str().expect("text");
    for (file, expected) in [(None, 77), (Some(right), 0), (Some(here), 74)] {
        let mut by_variable = latch(&daemon, &["run", "k", "--", "true"]);
        let mut by_option = latch(&daemon, &["run", "k"]);
        if let Some(file) = file {
            by_variable.env("LATCH_AUTH_TOKEN_FILE", file);
            by_option.args(["--auth-token-file", file]);
            by_option.env("LATCH_AUTH_TOKEN_FILE", "/nowhere/at/all");
        }
        by_option.args(["--", "true"]);
        for mut command in [by_variable, by_option] {
            let output = output(&mut command);
            assert_eq!(output.status.code(), Some(expected), "{command:?}");
            assert!(!text(&output.stderr).contains("secret"));
            let hint = ": the server wants an auth token; see --auth-token-file\n";
            assert_eq!(text(&output.stderr).ends_with(hint), file.is_none());
        }
    }
}

#[test]
fn of_several_auth_tokens_the_first_is_presented() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("secret");
    let file = file.to_str().expect("text");
    fs::write(file, "new\nold\n").expect("write");
    for (token, expected) in [("new", 0), ("old", 77)] {
        let daemon = Daemon::start_alone(&["--auth-token", token]);
        let presented = status(&daemon, &["ping", "--auth-token-file", file]);
        assert_eq!(presented, expected, "{token}");
    }
}

#[test]
fn retry_outlasts_a_rotation_of_the_auth_token() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let [of_server, of_client] = ["server", "client"].map(path);
    let write = |file: &str, token: &str| fs::write(file, token).expect("write");
    write(&of_server, "old\n");
    write(&of_client, "old\n");
    let daemon = Daemon::start_alone(&["--auth-token-file", &of_server]);
    write(&of_server, "new\n");
    daemon.signal(Signal::HUP);
    let arguments = |retry| {
        [
            "run",
            "k",
            "--auth-token-file",
            &of_client,
            retry,
            "--",
            "true",
        ]
    };
    eventually(PATIENCE, "the old token is refused", || {
        status(&daemon, &["ping", "--auth-token-file", &of_client]) == 77
    });
    assert_eq!(status(&daemon, &arguments("--retry=1")), 77);
    let mut waiting = Latch::start(&mut latch(&daemon, &arguments("--retry=60")));
    let refusals = daemon.log().matches("auth-refused").count();
    daemon.wait_for_logs("auth-refused", refusals + 1, PATIENCE);
    write(&of_client, "new\n");
    assert_eq!(wait(&mut waiting), Some(0));
}

#[test]
fn a_token_that_lacks_a_right_is_77_and_said_to() {
    let directory = tempfile::tempdir().expect("a directory");
    let [all, build, screen] = ["all", "build", "screen"].map(|name| directory.path().join(name));
    fs::write(&all, "build use ci/ break ci/\nscreen see\n").expect("write");
    fs::write(&build, "build\n").expect("write");
    fs::write(&screen, "screen\n").expect("write");
    let [all, build, screen] = [&all, &build, &screen].map(|it| it.to_str().expect("text"));
    let daemon = Daemon::start_alone(&["--auth-token-file", all]);
    let no_right = ": the auth token does not have the right to do this\n";
    for (arguments, file, expected) in [
        // The first token is presented without the rights behind it.
        (&["run", "ci/a"][..], all, 0),
        (&["run", "ci/a", "--limit", "2"], build, 0),
        (&["run", "cd/a"], build, 77),
        (&["run", "ci/a"], screen, 77),
        (&["acquire", "ci/b", "--lease", "60"], build, 0),
        (&["status", "ci/b"], build, 1),
        (&["status", "ci/b"], screen, 1),
        (&["status", "cd/b"], build, 77),
        (&["stats"], build, 77),
        (&["stats"], screen, 0),
        (&["break", "ci/b"], build, 0),
    ] {
        let mut command = latch(&daemon, arguments);
        command.args(["--auth-token-file", file]);
        if arguments[0] == "run" {
            command.args(["--", "true"]);
        }
        let output = output(&mut command);
        assert_eq!(output.status.code(), Some(expected), "{command:?}");
        let complaint = text(&output.stderr);
        assert_eq!(complaint.ends_with(no_right), expected == 77, "{complaint}");
    }
}

#[test]
fn a_file_without_a_usable_auth_token_is_74() {
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("secret");
    let file = file.to_str().expect("text");
    fs::write(file, "a\rb").expect("write");
    let output = output(&mut latch(&daemon, &["ping", "--auth-token-file", file]));
    let reason = "the token has a line end in it";
    assert_eq!(
        text(&output.stderr),
        format!("latch: cannot use the auth token file {file}: {reason}\n")
    );
    assert_eq!(output.status.code(), Some(74));
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

/// A name is looked up, and a token read, before there is a connection.
#[test]
fn a_lack_of_descriptors_is_71_whatever_lacks_one() {
    let daemon = Daemon::start(&["--auth-token", "secret"]);
    let dir = tempfile::tempdir().expect("a directory");
    let token = dir.path().join("token");
    fs::write(&token, "secret").expect("written");
    let mut seen = [false; 2];
    for count in 5..30 {
        for arguments in [
            "run k --retry=9 -- true",
            "acquire other --nonblock --lease 1",
            "ping",
        ] {
            let script = format!("ulimit -n {count}; exec latch {arguments}");
            let mut shell = Command::new("sh");
            shell.args(["-c", &script]).stdin(Stdio::null());
            shell.env("LATCH_SERVER", format!("localhost:{}", daemon.port()));
            let output = output(shell.env("LATCH_AUTH_TOKEN_FILE", &token));
            let status = output.status.code();
            let said = text(&output.stderr);
            assert!(
                matches!(status, Some(0 | 71 | 75)),
                "{count} {arguments}: {said}"
            );
            seen[usize::from(status == Some(0))] = true;
        }
    }
    assert_eq!(seen, [true; 2]);
}

#[test]
fn a_variable_that_is_not_utf8_is_not_ignored() {
    let daemon = Daemon::start(&[]);
    let unreadable = OsStr::from_bytes(b"/run/\xff/socket");
    for variable in ["LATCH_SERVER", "LATCH_SHARDS", "LATCH_AUTH_TOKEN_FILE"] {
        let mut command = latch(&daemon, &["ping"]);
        let output = output(command.env(variable, unreadable));
        assert_eq!(output.status.code(), Some(64), "{variable}");
        assert!(text(&output.stderr).contains(variable));
    }
    // An option overrides its variable, even one that is not UTF-8.
    let mut command = latch(&daemon, &["ping", "--server", &daemon.addr().to_string()]);
    let output = output(command.env("LATCH_SERVER", unreadable));
    assert_eq!(output.status.code(), Some(0));
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

#[test]
fn a_connect_timeout_of_zero_is_refused() {
    let daemon = Daemon::start(&[]);
    for time in ["0", "-1", "x", "1.5y"] {
        let output = run(&daemon, &["ping", "--connect-timeout", time]);
        assert_eq!(output.status.code(), Some(64), "{time}");
        assert!(
            text(&output.stderr).contains("--connect-timeout"),
            "{output:?}"
        );
    }
    let longest = u64::MAX.to_string();
    assert_eq!(status(&daemon, &["ping", "--connect-timeout", &longest]), 0);
}

#[test]
fn a_message_about_a_key_names_the_server_too() {
    let daemon = Daemon::start(&["--max-locks", "1"]);
    let addr = daemon.addr().to_string();
    let mut holder = daemon.connect();
    holder.acquire("k", 0);
    let token = "0123456789abcdef".repeat(2);
    let commands: [&[&str]; 9] = [
        &["run", "k", "--timeout", "0", "--", "true"],
        &["run", "other", "--", "true"],
        &["run", "k", "--limit", "2", "--", "true"],
        &["wait", "k", "--timeout", "0"],
        &["wait", "other"],
        &["acquire", "k", "--timeout", "0"],
        &["acquire", "other"],
        &["renew", "k", &token],
        &["release", "k", &token],
    ];
    for command in commands {
        let said = text(&run(&daemon, command).stderr);
        let expected = format!("latch: {} at {addr}: ", command[1]);
        assert!(said.starts_with(&expected), "{command:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{command:?}: {said}");
    }
    let free = Daemon::start(&["--max-kept", "0"]);
    let said = text(&run(&free, &["acquire", "k"]).stderr);
    assert!(
        said.starts_with(&format!("latch: k at {}: ", free.addr())),
        "{said}"
    );
}

// ---------------------------------------------------------------------------------------------
// Several servers

#[test]
fn a_dead_server_does_not_hide_the_others() {
    let [first, last] = [(); 2].map(|()| Daemon::start(&[]));
    let (_port, dead) = refusing_addr();
    let addresses = [first.addr(), dead, last.addr()].map(|addr| addr.to_string());
    let (mut holder, mut other) = (first.connect(), last.connect());
    holder.acquire("first-key", 0);
    other.acquire("last-key", 0);
    let ask = |arguments: &[&str]| {
        let mut command = latch(&first, arguments);
        output(
            command
                .env_remove("LATCH_SERVER")
                .env("LATCH_SHARDS", addresses.join(",")),
        )
    };
    let reason = format!("latch: {dead}: connection refused; is latchd running there?\n");
    for arguments in [&["ping"][..], &["stats"], &["stats", "--json"]] {
        let output = ask(arguments);
        assert_eq!(output.status.code(), Some(69), "{arguments:?}");
        assert_eq!(text(&output.stderr), reason, "{arguments:?}");
    }
    let table = text(&ask(&["stats"]).stdout);
    let places = [
        &addresses[0],
        "first-key",
        &addresses[1],
        &addresses[2],
        "last-key",
    ]
    .map(|text| {
        table
            .find(text)
            .unwrap_or_else(|| panic!("{text}: {table}"))
    });
    assert!(places.is_sorted(), "{table}");
    // Each server has a line, so that the lines can be matched to the servers.
    let json = text(&ask(&["stats", "--json"]).stdout);
    let keys: Vec<serde_json::Value> = json
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
        .map(|stats| stats["keys"][0]["key"].clone())
        .collect();
    assert_eq!(
        serde_json::json!(keys),
        serde_json::json!(["first-key", null, "last-key"])
    );
}

#[test]
fn every_dead_server_is_named_with_its_reason() {
    let daemon = Daemon::start(&["--auth-token", "secret"]);
    let (_port, dead) = refusing_addr();
    let refusing = format!(
        "latch: {}: the server wants an auth token; see --auth-token-file",
        daemon.addr()
    );
    let hint = "; is latchd running there?";
    let absent = format!("latch: /nowhere/at/all: no such file or directory{hint}");
    let unreachable = format!("latch: {dead}: connection refused{hint}");
    for (servers, expected, status) in [
        (
            format!("{dead} /nowhere/at/all"),
            [&unreachable, &absent],
            69,
        ),
        (
            format!("{} {dead}", daemon.addr()),
            [&refusing, &unreachable],
            69,
        ),
        (
            format!("{dead} {}", daemon.addr()),
            [&unreachable, &refusing],
            69,
        ),
        (
            format!("{0} {0}", daemon.addr()),
            [&refusing, &refusing],
            77,
        ),
    ] {
        for arguments in [&["ping"][..], &["stats"], &["stats", "--watch"]] {
            let mut command = latch(&daemon, arguments);
            command.env_remove("LATCH_SERVER");
            let output = output(command.env("LATCH_SHARDS", &servers));
            let said = text(&output.stderr);
            assert_eq!(said.lines().collect::<Vec<_>>(), expected, "{arguments:?}");
            assert_eq!(output.status.code(), Some(status), "{arguments:?} {said}");
        }
    }
}

#[test]
fn the_checksum_of_a_key_selects_its_server() {
    let daemons = [(); 3].map(|()| Daemon::start(&["--no-auto-release-on-disconnect"]));
    let addresses: Vec<String> = daemons.iter().map(|d| d.addr().to_string()).collect();
    // The indices come from another implementation of CRC-32 (zlib), modulo 3.
    for (key, server) in [
        ("a", 0),
        ("my-job", 1),
        ("foo", 2),
        ("deploy", 1),
        ("user:42", 1),
        ("_", 2),
        ("backup-db", 1),
    ] {
        let shards = addresses.join(",");
        let mut arguments = vec!["acquire", key, "--shards", &shards];
        let token = run(&daemons[0], &arguments).stdout;
        let held = [0, 1, 2].map(|number| is_held(&daemons[number], key));
        assert_eq!(held, [0, 1, 2].map(|number| number == server), "{key}");
        // The variable lists the same servers, and `run` takes the lock at the same one.
        let token = text(&token);
        let mut release = latch(&daemons[0], &["release", key, token.trim()]);
        release.env_remove("LATCH_SERVER");
        let output = output(release.env("LATCH_SHARDS", addresses.join(", ")));
        assert_eq!(output.status.code(), Some(0), "{key}");
        let script = format!(
            "latch run {key} --timeout 0 -E 9 --server {} -- true",
            addresses[server]
        );
        arguments = vec!["run", key, "--shards", &shards, "--", "sh", "-c", &script];
        assert_eq!(status(&daemons[0], &arguments), 9, "{key}");
    }
}

#[test]
fn stats_show_each_server_under_its_own_name() {
    let [first, second] = [(); 2].map(|()| Daemon::start(&[]));
    let addresses = [&first, &second].map(|daemon| daemon.addr().to_string());
    let servers = ["--shards", &addresses.join(",")];
    let mut holder = second.connect();
    holder.acquire("deploy", 0);
    let stats = |options: &[&str]| {
        let arguments: Vec<&str> = ["stats"]
            .iter()
            .chain(options)
            .chain(&servers)
            .copied()
            .collect();
        run(&first, &arguments)
    };
    let table = text(&stats(&[]).stdout);
    let places = [
        &addresses[0],
        "0 in use",
        &addresses[1],
        "deploy",
        "1 in use",
    ]
    .map(|text| {
        table
            .find(text)
            .unwrap_or_else(|| panic!("{text}: {table}"))
    });
    assert!(places.is_sorted(), "{table}");
    let json = text(&stats(&["--json"]).stdout);
    let counts: Vec<usize> = json
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
        .map(|stats| stats["keys"].as_array().expect("a list").len())
        .collect();
    assert_eq!(counts, [0, 1]);

    drop(second);
    // By the checksum modulo 2, "a" belongs to the second server and "deploy" to the first.
    for (key, expected) in [("a", 69), ("deploy", 0)] {
        let mut arguments = vec!["run", key];
        arguments.extend(servers);
        arguments.extend(["--", "true"]);
        assert_eq!(status(&first, &arguments), expected, "{key}");
    }
    let output = stats(&[]);
    assert_eq!(output.status.code(), Some(69));
    assert!(text(&output.stderr).contains(&addresses[1]));
}

// ---------------------------------------------------------------------------------------------
// Watching

#[test]
fn a_watch_ends_when_its_reader_goes_away() {
    ends_with_its_reader(&["--watch"], "in use");
}

#[test]
fn a_watch_in_json_ends_when_its_reader_goes_away() {
    ends_with_its_reader(&["--watch", "--json"], "{");
}

fn ends_with_its_reader(options: &[&str], expected: &'static str) {
    let daemon = Daemon::start(&[]);
    let mut arguments = vec!["stats"];
    arguments.extend(options);
    let mut child = Latch::start(latch(&daemon, &arguments).stdout(Stdio::piped()));
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    let (sender, rounds) = mpsc::channel();
    let reader = thread::spawn(move || {
        // The reader reads two rounds, and goes away.
        let lines = stdout.lines().map_while(Result::ok);
        for line in lines.filter(|line| line.contains(expected)).take(2) {
            let _ = sender.send(line);
        }
    });
    for _ in 0..2 {
        let line = rounds.recv_timeout(PATIENCE).expect("a round");
        assert!(!line.contains('\u{1b}'), "that is for terminals");
    }
    reader.join().expect("it has read enough");
    assert_eq!(wait(&mut child), Some(0), "{options:?}");
}

#[test]
fn a_watch_shows_the_servers_that_answer() {
    let daemon = Daemon::start(&[]);
    let (_port, dead) = refusing_addr();
    let mut command = latch(&daemon, &["stats", "--watch"]);
    command.env_remove("LATCH_SERVER");
    command.env("LATCH_SHARDS", format!("{dead} {}", daemon.addr()));
    let mut child = Latch::start(command.stdout(Stdio::piped()).stderr(Stdio::null()));
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    let (sender, rounds) = mpsc::channel();
    thread::spawn(move || {
        let lines = stdout.lines().map_while(Result::ok);
        for line in lines.filter(|line| line.contains("in use")) {
            let _ = sender.send(line);
        }
    });
    for _ in 0..2 {
        rounds.recv_timeout(PATIENCE).expect("one server is alive");
    }
    drop(child);
}

#[test]
fn a_watch_ends_by_a_signal_as_any_program() {
    let daemon = Daemon::start(&[]);
    let mut child = Latch::start(latch(&daemon, &["stats", "--watch"]).stdout(Stdio::piped()));
    let shown = child.stdout.take().expect("it is piped");
    eventually(PATIENCE, "it shows a table", || {
        let mut pipe = [PollFd::new(&shown, PollFlags::IN)];
        poll(&mut pipe, Some(&Timespec::default())).expect("one descriptor") == 1
    });
    signal(&child, Signal::INT);
    assert_eq!(wait(&mut child), None, "a signal ends it as any program");
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
fn the_missing_directory_of_a_fence_file_is_named() {
    let daemon = Daemon::start(&[]);
    let token = "0123456789abcdef".repeat(2);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("nowhere/fence");
    let missing = directory.path().join("nowhere");
    let expected = format!(
        "{}: no such directory: {}\n",
        file.display(),
        missing.display()
    );
    let file = file.to_str().expect("text");
    let output = run(&daemon, &["fence-check", file, &token]);
    assert_eq!(output.status.code(), Some(74));
    assert_eq!(
        text(&output.stderr),
        format!("latch: cannot use the fence file {expected}")
    );
    let mut latchd = Daemon::command();
    latchd.args(["--port", "0", "--fence-state-file", file]);
    let said = text(&latchd.output().expect("it was built").stderr);
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn fence_check_gives_up_on_a_file_that_stays_locked() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("fence");
    let file = File::create(&path).expect("there is room");
    flock(&file, FlockOperation::LockExclusive).expect("a lock");
    let mut command = Command::new(program("latch"));
    command
        .arg("fence-check")
        .arg(&path)
        .arg("0123456789abcdef".repeat(2));
    let output = output(&mut command);
    assert_eq!(output.status.code(), Some(74), "{output:?}");
    let expected = format!(
        "latch: cannot use the fence file {}: another process keeps it locked\n",
        path.display()
    );
    assert_eq!(text(&output.stderr), expected);
    drop(file);
    assert_eq!(check_fence(&path, 7, None).status, Some(0));
}

/// As an argument, every user of the host could see it.
#[test]
fn a_token_comes_from_the_environment_or_standard_input() {
    let daemon = Daemon::start(&["--no-auto-release-on-disconnect"]);
    let directory = tempfile::tempdir().expect("a directory");
    let [token, fence] = ["token", "fence"].map(|name| directory.path().join(name));
    let fence = fence.to_str().expect("text");
    for command in ["renew", "fence-check", "release"] {
        for key in ["in-a-variable", "on-stdin"] {
            let key = format!("{command}-{key}");
            let grant = daemon.connect().acquire(&key, 0);
            fs::write(&token, format!("{}\n", grant.token)).expect("there is room");
            let what = if command == "fence-check" {
                fence
            } else {
                &key
            };
            let mut latch = latch(&daemon, &[command, what]);
            if key.ends_with("on-stdin") {
                latch
                    .arg("-")
                    .stdin(File::open(&token).expect("it is there"));
            } else {
                latch.env("LATCH_TOKEN", &grant.token);
            }
            let ended = latch.output().expect("it runs");
            assert_eq!(ended.status.code(), Some(0), "{key}: {ended:?}");
        }
        let mut without = latch(&daemon, &[command, fence]);
        let ended = without.env_remove("LATCH_TOKEN").output();
        let ended = ended.expect("it runs");
        assert_eq!(ended.status.code(), Some(64));
        assert_eq!(
            text(&ended.stderr),
            format!("latch: expected a token, - to read it from standard input, or LATCH_TOKEN\nlatch: see latch {command} --help\n")
        );
    }
}

#[test]
fn the_directory_of_a_links_target_is_synced() {
    let strace = needs!("strace");
    let directory = tempfile::tempdir().expect("a directory");
    let [links, files] = ["links", "files"].map(|name| directory.path().join(name));
    fs::create_dir(&links).expect("there is room");
    fs::create_dir(&files).expect("there is room");
    let link = links.join("fence");
    std::os::unix::fs::symlink("../files/fence", &link).expect("there is room");
    let trace = directory.path().join("trace");
    let mut command = strace.command();
    command
        .args(["-f", "-y", "-e", "trace=fsync", "-o"])
        .arg(&trace);
    command
        .args([program("latch"), "fence-check"])
        .arg(&link)
        .arg("0123456789abcdef".repeat(2));
    let output = output(&mut command);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let trace = fs::read_to_string(&trace).expect("text");
    let files = fs::canonicalize(&files).expect("it is there");
    for synced in [files.join("fence"), files] {
        let name = format!("<{}>", synced.display());
        assert!(trace.contains(&name), "{name} is not synced: {trace}");
    }
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

#[test]
fn a_key_with_another_limit_is_named_and_can_count_as_busy() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let grant = holder.request("sl", "k", "0 2 600");
    assert!(grant.starts_with("ok "), "{grant}");
    holder.acquire_for("lock", 0, 600);
    for (key, in_use) in [
        ("k", "the key is in use as a semaphore with --limit 2"),
        ("lock", "the key is in use as a lock, without --limit"),
    ] {
        for options in [&["--limit", "3"][..], &["--limit", "3", "--timeout", "1"]] {
            let arguments = [&["run", key], options, &["--", "true"]].concat();
            let failed = run(&daemon, &arguments);
            assert_eq!(failed.status.code(), Some(76), "{arguments:?}");
            let said = text(&failed.stderr);
            assert!(said.ends_with(&format!("{in_use}\n")), "{said}");
        }
        let arguments = ["run", key, "--limit", "3", "-n", "--busy-ok", "--", "false"];
        let ended = run(&daemon, &arguments);
        assert_eq!(ended.status.code(), Some(0));
        assert_eq!(text(&ended.stderr), "");
    }
}

#[test]
fn a_release_and_a_renewal_need_no_limit() {
    let daemon = Daemon::start(&[]);
    let arguments = ["acquire", "k", "--limit", "2", "--lease", "600"];
    let token = text(&run(&daemon, &arguments).stdout);
    let token = token.trim();
    let renewed = run(&daemon, &["renew", "k", token, "--lease", "900"]);
    assert_eq!(text(&renewed.stdout), "900\n", "{renewed:?}");
    assert_eq!(status(&daemon, &["release", "k", token]), 0);
    assert_eq!(status(&daemon, &["release", "k", token]), 70);
    let token = text(&run(&daemon, &["acquire", "k"]).stdout);
    let arguments = ["release", "k", token.trim(), "--limit", "2"];
    assert_eq!(status(&daemon, &arguments), 0);
}

#[test]
fn a_renewal_of_a_kept_lock_prints_the_lease_that_is_left() {
    let daemon = Daemon::start(&[]);
    let token = text(&run(&daemon, &["acquire", "k", "--lease", "3600"]).stdout);
    let renewed = run(&daemon, &["renew", "k", token.trim(), "--lease", "5"]);
    let left: u64 = text(&renewed.stdout).trim().parse().expect("a number");
    assert!((3000..=3600).contains(&left), "{left}");
}
