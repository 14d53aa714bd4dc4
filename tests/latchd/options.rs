//! Options, variables and exit statuses of the program, seen from outside.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{Ipv6Addr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use latchd::command_lines::{Feature, Form, CLUSTER, LATCHD, TLS};

#[cfg(feature = "cluster")]
use crate::supervision::{as_systemd_does, on_stdin};
use crate::support::needs::skipped;
#[cfg(feature = "cluster")]
use crate::support::silent::free_addr;
use crate::support::{eventually, rows_of, Client, Daemon, Signal, PATIENCE};

/// Every option that needs this feature, its variable, and a value.
fn needing(feature: Feature) -> impl Iterator<Item = (String, &'static str, &'static str)> {
    let rows = LATCHD
        .own
        .rows
        .iter()
        .filter(move |row| row.feature == Some(feature));
    rows.map(|row| {
        let value = match row.form {
            Form::Valued("time") => "10",
            Form::Valued("host:port" | "list") => "127.0.0.1:6388",
            _ => "some.pem",
        };
        (row.long(), row.variables[0], value)
    })
}

// ---------------------------------------------------------------------------------------------
// Help, version and the forms of an option

#[test]
fn help_goes_to_stdout_and_is_no_failure() {
    for flag in ["-h", "--help"] {
        let end = run(Daemon::command().arg(flag));
        assert_eq!(end.code(), Some(0), "{flag}: {}", end.stderr);
        assert!(
            end.stdout.contains("--default-lease-ttl"),
            "{flag} printed: {}",
            end.stdout
        );
        assert_eq!(end.stderr, "", "{flag}");
    }
}

#[test]
fn help_on_a_full_disk_says_so_and_a_gone_reader_is_fine() {
    let (gone, _) = UnixStream::pair().expect("two sockets");
    let full = fs::File::options().write(true).open("/dev/full");
    let why = "latchd: standard output: no space left on device\n";
    for (stdout, status, said) in [
        (Stdio::from(full.expect("every Linux has it")), 1, why),
        (Stdio::from(OwnedFd::from(gone)), 0, ""),
    ] {
        let mut command = Daemon::command();
        command.arg("--help").stdout(stdout).stderr(Stdio::piped());
        let child = command.spawn().expect("it was built by cargo");
        let end = child.wait_with_output().expect("it exits");
        assert_eq!(end.status.code(), Some(status));
        assert_eq!(String::from_utf8_lossy(&end.stderr), said);
    }
}

#[test]
fn a_server_that_cannot_print_its_port_leaves_a_log_and_no_socket() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    // Several times, because the thread that writes the log may be quick enough by itself.
    for _ in 0..10 {
        let full = fs::File::options().write(true).open("/dev/full");
        let mut command = Daemon::command();
        command.args(["--port", "0", "--print-port", "--unix"]);
        command.arg(&socket);
        command.stdout(full.expect("every Linux has it"));
        let end = run(&mut command);
        assert_eq!(end.code(), Some(1), "{end:?}");
        assert!(!socket.exists());
        let lines: Vec<&str> = end.stderr.lines().collect();
        assert!(lines[0].contains(" INFO starting "), "{end:?}");
        let why = "latchd: standard output: no space left on device";
        assert_eq!(lines.last(), Some(&why), "{end:?}");
    }
}

#[test]
fn the_version_goes_to_stdout_and_is_no_failure() {
    for flag in ["-V", "--version"] {
        let end = run(Daemon::command().arg(flag));
        let has = |is_built| if is_built { '+' } else { '-' };
        let expected = format!(
            "latchd {} ({}tls {}cluster)\n",
            env!("CARGO_PKG_VERSION"),
            has(cfg!(feature = "tls")),
            has(cfg!(feature = "cluster"))
        );
        let said = (end.code(), end.stdout.as_str(), end.stderr.as_str());
        assert_eq!(said, (Some(0), expected.as_str(), ""));
    }
}

#[test]
fn a_long_option_may_begin_with_a_single_dash() {
    let mut command = Daemon::command();
    command.args(["-port=0", "--print-port", "-auth-token", "-a", "-debug"]);
    let daemon = Daemon::from_command(command);
    assert_eq!(daemon.connect().request("auth", "_", "-a"), "ok");
}

// ---------------------------------------------------------------------------------------------
// Bad usage

#[test]
fn bad_usage_is_refused_with_one_line_that_names_the_option() {
    for (args, named) in rows_of(include_str!("bad_usage.txt")) {
        let line = refusal(Daemon::command().args(&args), 2);
        assert!(
            line.contains(named),
            "{args:?} should name {named}: {line:?}"
        );
        assert!(
            line.split(' ').count() >= 3,
            "{args:?} should say why: {line:?}"
        );
    }
}

#[test]
fn what_is_not_utf8_is_refused_like_any_other_bad_value() {
    let bytes = OsStr::from_bytes(b"63\xff88");
    let line = refusal(Daemon::command().arg("--port").arg(bytes), 2);
    assert!(line.is_ascii(), "{line:?}");
    let line = refusal(Daemon::command().env("LATCHD_PORT", bytes), 2);
    assert!(line.contains("LATCHD_PORT"), "{line:?}");
}

#[test]
#[cfg(not(feature = "tls"))]
fn options_this_build_has_not_are_refused() {
    let lacking = "needs a build with --features tls";
    let both = ["--tls-cert=some.pem", "--tls-key", "some.pem"];
    let line = refusal(Daemon::command().args(both), 2);
    assert_eq!(line, format!("latchd: --tls-cert: {lacking}"));
    for prefix in ["LATCHD", "DFLOCKD"] {
        let [cert, key] = ["CERT", "KEY"].map(|name| format!("{prefix}_TLS_{name}"));
        let mut command = Daemon::command();
        let line = refusal(command.env(&cert, "some.pem").env(&key, "some.pem"), 2);
        assert_eq!(line, format!("latchd: {cert}: {lacking}"));
        let mut command = Daemon::command();
        command.args(["--tls-key", "some.pem"]);
        let line = refusal(command.env(&cert, "some.pem"), 2);
        assert_eq!(line, format!("latchd: {cert}: {lacking}"));
    }
}

#[test]
fn one_tls_option_without_the_other_is_refused_as_such() {
    for (option, variable, _) in needing(TLS) {
        let why = "both --tls-cert and --tls-key must be provided";
        let expected = format!("latchd: {option}: {why}");
        let line = refusal(Daemon::command().args([&option, "some.pem"]), 2);
        assert_eq!(line, expected);
        let line = refusal(Daemon::command().arg(format!("{option}=some.pem")), 2);
        assert_eq!(line, expected);
        for prefix in ["LATCHD", "DFLOCKD"] {
            let variable = format!("{prefix}_{variable}");
            let line = refusal(Daemon::command().env(&variable, "some.pem"), 2);
            assert_eq!(line, format!("latchd: {variable}: {why}"));
        }
    }
}

#[test]
#[cfg(not(feature = "cluster"))]
fn etcd_needs_a_build_with_the_feature() {
    let lacking = "needs a build with --features cluster";
    for (option, variable, value) in needing(CLUSTER) {
        let line = refusal(Daemon::command().args([&option, value]), 2);
        assert_eq!(line, format!("latchd: {option}: {lacking}"));
        for prefix in ["LATCHD", "DFLOCKD"] {
            let variable = format!("{prefix}_{variable}");
            let line = refusal(Daemon::command().env(&variable, value), 2);
            assert_eq!(line, format!("latchd: {variable}: {lacking}"));
        }
    }
}

#[test]
#[cfg(feature = "cluster")]
fn the_options_of_etcd_need_etcd_and_each_other() {
    for (option, variable, value) in needing(CLUSTER).filter(|it| it.0 != "--etcd") {
        for prefix in ["LATCHD", "DFLOCKD"] {
            let variable = format!("{prefix}_{variable}");
            let line = refusal(Daemon::command().env(&variable, value), 2);
            assert_eq!(line, format!("latchd: {variable}: needs --etcd"));
        }
        let line = refusal(Daemon::command().args([&option, value]), 2);
        assert_eq!(line, format!("latchd: {option}: needs --etcd"));
    }
    let member = ["--etcd=127.0.0.1:1", "--advertise=127.0.0.1:1"];
    let alone = "both --etcd-cert and --etcd-key must be provided";
    for option in ["--etcd-cert", "--etcd-key"] {
        let line = member_refusal(&[&member[..], &[option, "x"]].concat());
        assert_eq!(line, format!("latchd: {option}: {alone}"));
    }
}

#[test]
#[cfg(all(feature = "cluster", not(feature = "tls")))]
fn etcd_over_tls_needs_a_build_with_the_feature() {
    let lacking = "needs a build with --features tls";
    let member = ["--etcd=127.0.0.1:1", "--advertise=127.0.0.1:1"];
    for args in [&["--etcd-cacert=x"][..], &["--etcd-cert=x", "--etcd-key=x"]] {
        let line = member_refusal(&[&member, args].concat());
        let option = args[0].trim_end_matches("=x");
        assert_eq!(line, format!("latchd: {option}: {lacking}"));
    }
    let line = member_refusal(&["--etcd=a:1,https://b:2", member[1]]);
    assert_eq!(line, format!("latchd: --etcd: https://b:2: {lacking}"));
}

#[test]
#[cfg(feature = "cluster")]
fn what_does_not_fit_etcd_is_refused_by_name() {
    let directory = tempfile::tempdir().expect("there is room");
    let fences = text_of(&directory.path().join("fences"));
    for (args, said) in rows_of(include_str!("not_with_etcd.txt")) {
        let member = ["--etcd=127.0.0.1:1", "--advertise=127.0.0.1:1"];
        let all = member.into_iter().chain(args.iter().map(String::as_str));
        let line = member_refusal(&all.collect::<Vec<_>>());
        assert!(
            line.starts_with(&format!("latchd: {said}")),
            "{args:?}: {line:?}"
        );
    }
    let mut command = Daemon::command();
    command.args(["--etcd=127.0.0.1:1", "--advertise=127.0.0.1:1"]);
    command.env("LATCHD_PORT", free_addr().port().to_string());
    let line = refusal(command.env("LATCHD_FENCE_STATE_FILE", &fences), 2);
    let expected = "latchd: LATCHD_FENCE_STATE_FILE: cannot be given together with --etcd";
    assert_eq!(line, expected);
}

#[test]
#[cfg(feature = "cluster")]
fn addresses_of_etcd_and_of_this_server_have_a_port() {
    for text in [
        "",
        "a",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "a:+1",
        "a b:1",
        "http://a:1",
        "::1:1",
    ] {
        let etcd = format!("--etcd=x:1,{text}");
        let line = member_refusal(&[&etcd, "--advertise=127.0.0.1:1"]);
        let said = format!("latchd: invalid value '{text}' for --etcd: expected HOST:PORT");
        assert!(line.starts_with(&said), "{line:?}");
        let advertise = format!("--advertise={text}");
        let line = member_refusal(&["--etcd=x:1", &advertise]);
        let said = format!("latchd: invalid value '{text}' for --advertise: expected HOST:PORT");
        assert!(line.starts_with(&said), "{line:?}");
    }
    for host in ["127.0.0.1", "0.0.0.0", "::", "::1"] {
        let line = member_refusal(&["--etcd=x:1", "--host", host]);
        let said = format!("latchd: --advertise: expected with --etcd where --host is {host}: ");
        assert!(line.starts_with(&said), "{line:?}");
    }
    for nowhere in ["0.0.0.0:1", "[::]:1"] {
        let line = member_refusal(&["--etcd=x:1", "--advertise", nowhere]);
        let said = format!("latchd: invalid value '{nowhere}' for --advertise: expected HOST");
        assert!(line.starts_with(&said), "{line:?}");
    }
}

#[test]
#[cfg(feature = "cluster")]
fn sockets_that_are_inherited_do_not_fit_etcd() {
    let listener = || TcpListener::bind("127.0.0.1:0").expect("a port is free");
    for (mut command, expected) in [
        (
            on_stdin(listener()),
            "latchd: --inetd: cannot be given together with --etcd\n",
        ),
        (
            as_systemd_does(listener(), "$$"),
            "latchd: --etcd: cannot be given together with LISTEN_FDS\n",
        ),
    ] {
        let end = run(command.args(["--etcd=127.0.0.1:1", "--advertise=127.0.0.1:1"]));
        assert_eq!((end.code(), &*end.stderr), (Some(2), expected));
    }
}

/// Runs a member of a cluster that is expected to be refused, and gives its one line.
#[cfg(feature = "cluster")]
fn member_refusal(args: &[&str]) -> String {
    // Should it start after all, then not on the port that everybody uses.
    let mut command = Daemon::command();
    command.env("DFLOCKD_PORT", free_addr().port().to_string());
    refusal(command.args(args), 2)
}

// ---------------------------------------------------------------------------------------------
// Where a value comes from

#[test]
fn values_can_come_from_variables_of_either_prefix() {
    let dir = tempfile::tempdir().expect("there is room");
    let [socket, fences] = ["socket", "fences"].map(|name| dir.path().join(name));
    let mut command = Daemon::command();
    command.envs([
        ("DFLOCKD_HOST", "127.0.0.1"),
        ("DFLOCKD_PORT", "0"),
        ("LATCHD_UNIX", &text_of(&socket)),
        ("LATCHD_UNIX_MODE", "0600"),
        ("LATCHD_UNIX_GROUP", &group_of_this_process()),
        ("DFLOCKD_FENCE_STATE_FILE", &text_of(&fences)),
        ("LATCHD_IDLE_EXIT_S", "1"),
        ("LATCHD_INETD", "true"), // there is no such variable
    ]);
    command.arg("--print-port");
    let daemon = Daemon::from_command(command);
    let mut clients = [daemon.connect(), Client::unix(&socket)];
    for client in &mut clients {
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
    assert_eq!(mode_of(&socket), 0o600);
    assert!(fences.is_file());
    drop(clients);
    let status = daemon.wait_exit(PATIENCE).expect("nobody is there");
    assert_eq!(status.code(), Some(0));
    assert!(daemon.log().contains("stopping reason=idle"));
}

#[test]
fn the_old_names_of_the_pruning_variables_are_heard_unless_there_is_a_new_one() {
    let old = [
        ("DFLOCKD_GC_LOOP_SLEEP", "1"),
        ("DFLOCKD_GC_MAX_UNUSED_TIME", "0"),
    ];
    let both = [
        ("DFLOCKD_GC_INTERVAL_S", "1"),
        ("DFLOCKD_GC_LOOP_SLEEP", "3600"),
        ("DFLOCKD_GC_MAX_IDLE_S", "0"),
        ("DFLOCKD_GC_MAX_UNUSED_TIME", "3600"),
    ];
    for variables in [&old[..], &both] {
        let daemon = start_with(variables, |_| {});
        let mut client = daemon.connect();
        let grant = client.acquire("k", 0);
        assert_eq!(client.request("r", "k", &grant.token), "ok");
        eventually(PATIENCE, "the idle key is pruned", || {
            client.stats()["idle_locks"] == serde_json::json!([])
        });
    }
}

#[test]
fn each_unknown_variable_is_warned_about_once() {
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]);
    // A flag hides its variable, which is known all the same.
    command.args(["--host", "127.0.0.1", "--no-auto-release-on-disconnect"]);
    let rows = LATCHD.own.rows.iter().filter(|row| row.feature.is_none());
    let numbers = rows.filter(|row| matches!(row.form, Form::Valued("count" | "time")));
    for name in numbers.flat_map(|row| row.variables) {
        if !["SETTLE_S", "HTTP_MAX_WAITING"].contains(name) {
            command.env(format!("DFLOCKD_{name}"), "9"); // the two need other options
        }
    }
    command.env("DFLOCKD_HOST", "127.0.0.2");
    command.env("DFLOCKD_PORT", "1");
    command.env("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "no");
    command.env("DFLOCKD_LOG_TIMESTAMPS", "never");
    command.env("DFLOCKD_TLS_CERT", "");
    command.env("DFLOCKD_EMPTY", "");
    command.env("DFLOCKD_MAX_KEYS", "s3cret");
    command.env("DFLOCKD_RATE LIMIT", "s3cret");
    command.env("LATCHD_MAX_LOCK", "s3cret");
    command.env("LATCHD_PASSWORD", "s3cret");
    command.env("LATCHD_MAX_LOCKS", "9");
    let daemon = Daemon::from_command(command);
    daemon.wait_for_log("listening", PATIENCE);
    let log = daemon.log();
    let warnings: Vec<&str> = log
        .lines()
        .filter_map(|line| line.split_once("unknown-variable name="))
        .map(|(_, name)| name)
        .collect();
    let unknown = [
        "DFLOCKD_MAX_KEYS",
        "\"DFLOCKD_RATE LIMIT\"",
        "LATCHD_MAX_LOCK",
        "LATCHD_PASSWORD hint=\"use --auth-token-file PATH\"",
    ];
    assert_eq!(warnings, unknown);
    assert!(
        log.contains("WARN unknown-variable") && !log.contains("s3cret"),
        "{log}"
    );
}

#[test]
fn each_setting_of_dflockd_without_effect_is_told_once() {
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port", "--lease-sweep-interval", "2"]);
    command.args([
        "--http-rate-limit-per-ip=5",
        "--http-session-idle-timeout",
        "20",
    ]);
    command.args(["--gc-interval", "5", "--gc-max-idle", "60"]);
    command.env("DFLOCKD_HTTP_MAX_SESSIONS", "3");
    command.env("DFLOCKD_HTTP_CORS_ALLOWED_ORIGINS", "*");
    // An option overrules its variable.
    command.env("DFLOCKD_LEASE_SWEEP_INTERVAL_S", "3");
    let daemon = Daemon::from_command(command);
    daemon.wait_for_log("listening", PATIENCE);
    let log = daemon.log();
    let told = log.lines().filter_map(|line| {
        let (_, told) = line.split_once("WARN no-effect setting=")?;
        told.split(' ').next()
    });
    let mut told: Vec<&str> = told.collect();
    told.sort_unstable();
    let expected = [
        "--http-rate-limit-per-ip",
        "--http-session-idle-timeout",
        "--lease-sweep-interval",
        "DFLOCKD_HTTP_CORS_ALLOWED_ORIGINS",
        "DFLOCKD_HTTP_MAX_SESSIONS",
    ];
    assert_eq!(told, expected);
    assert!(!log.contains("unknown-variable"), "{log}");
}

#[test]
fn a_member_of_a_cluster_of_dflockd_does_not_start_alone() {
    let why = "a cluster of dflockd cannot be joined; see latchd-cluster(7)";
    for (argument, variable) in [(Some("--raft-dir=/tmp"), None), (None, Some("/tmp"))] {
        let mut command = Daemon::command();
        command.args(["--port", "0"]).args(argument);
        command.envs(variable.map(|value| ("DFLOCKD_RAFT_DIR", value)));
        let line = refusal(&mut command, 2);
        assert!(line.contains(why), "{line:?}");
    }
}

/// The variables that Kubernetes sets in each pod for a service, whose name has this prefix.
fn service_links(prefix: &str) -> Vec<(String, &'static str)> {
    let (port, url) = ("6388", "tcp://10.96.0.10:6388");
    let parts = [
        ("PORT", url),
        ("PORT_6388_TCP", url),
        ("PORT_6388_TCP_ADDR", "10.96.0.10"),
        ("PORT_6388_TCP_PORT", port),
        ("PORT_6388_TCP_PROTO", "tcp"),
        ("SERVICE_HOST", "10.96.0.10"),
        ("SERVICE_PORT", port),
        ("SERVICE_PORT_LOCKS", port),
    ];
    parts
        .map(|(part, value)| (format!("{prefix}_{part}"), value))
        .to_vec()
}

#[test]
fn the_variables_of_a_service_in_kubernetes_are_left_alone() {
    let mut command = Daemon::command();
    command.args(["--host", "127.0.0.1", "--print-port", "--debug"]);
    for prefix in ["LATCHD", "LATCHD_HTTP"] {
        command.envs(service_links(prefix));
    }
    // A real value of the older variable counts.
    command.env("DFLOCKD_PORT", "0");
    let daemon = Daemon::from_command(command);
    daemon.wait_for_log("listening", PATIENCE);
    daemon.connect().acquire("k", 0);
    let log = daemon.log();
    assert!(!log.contains("unknown-variable") && !log.contains("10.96."));
    assert!(!log.contains("listening http="), "{log}");
    let line = "DEBUG service-variables names=LATCHD_HTTP_PORT,";
    assert_eq!(log.matches(line).count(), 1, "{log}");

    let mut command = Daemon::command();
    command.args(["--host", "127.0.0.1", "--print-port"]);
    command
        .envs(service_links("DFLOCKD"))
        .env("LATCHD_PORT", "0");
    let daemon = Daemon::from_command(command);
    daemon.wait_for_log("listening", PATIENCE);
    assert!(!daemon.log().contains("variable"), "{}", daemon.log());
}

#[test]
fn bad_variables_are_refused_by_name() {
    for (variable, value) in [
        ("LATCHD_PORT", "65536"),
        ("LATCHD_PORT", "off"),
        ("DFLOCKD_PORT", "many"),
        ("LATCHD_PORT", "63x8"),
        ("LATCHD_HOST", "example org"),
        ("DFLOCKD_HOST", "example org"),
        ("LATCHD_UNIX_MODE", "rw"),
        ("LATCHD_LOG_TIMESTAMPS", "sometimes"),
        ("LATCHD_DEBUG", "perhaps"),
        ("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "2"),
        ("LATCHD_MAX_LOCKS", "0"),
        ("DFLOCKD_READ_TIMEOUT_S", "9223372037"),
        ("DFLOCKD_GC_LOOP_SLEEP", "soon"),
        ("DFLOCKD_GC_MAX_UNUSED_TIME", "soon"),
    ] {
        let line = refusal(Daemon::command().env(variable, value), 2);
        let named = if value == "off" { "--unix" } else { variable };
        assert!(line.contains(named), "{variable}={value}: {line:?}");
    }
}

// ---------------------------------------------------------------------------------------------
// Switches

#[test]
fn debug_beats_rust_log() {
    let is_chatty = |args: &[&str], variables: &[(&str, &str)]| {
        let daemon = start_with(variables, |command| {
            command.args(args);
        });
        daemon.connect().acquire("k", 0);
        daemon.signal(Signal::TERM);
        assert!(daemon.wait_exit(PATIENCE).is_some(), "it drains");
        daemon.log().contains("opened conn=")
    };
    assert!(!is_chatty(&[], &[]), "the default is info");
    assert!(is_chatty(&["--debug"], &[("RUST_LOG", "error")]));
    assert!(is_chatty(
        &["--debug=false"],
        &[("RUST_LOG", "debug"), ("LATCHD_DEBUG", "true")]
    ));
}

#[test]
fn a_malformed_rust_log_is_refused_even_if_no_one_can_be_told() {
    let line = refusal(Daemon::command().env("RUST_LOG", "latchd=loud"), 2);
    let start = "latchd: invalid value 'latchd=loud' for RUST_LOG: expected ";
    assert!(line.starts_with(start), "{line}");
    let full = File::options().write(true).open("/dev/full");
    let mut command = Daemon::command();
    command
        .args(["--port", "0"])
        .env("RUST_LOG", "latchd=loud")
        .stderr(full.expect("Linux has it"));
    assert_eq!(run(&mut command).code(), Some(2));
}

#[test]
fn the_port_alone_is_printed() {
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port", "--idle-exit", "1"]);
    let end = run(&mut command);
    assert_eq!(end.code(), Some(0), "{end:?}");
    let port = end.stdout.strip_suffix('\n').map(str::parse::<u16>);
    assert!(matches!(port, Some(Ok(1..))), "{end:?}");
}

// ---------------------------------------------------------------------------------------------
// The secret

#[test]
fn a_file_without_a_good_secret_is_refused() {
    let dir = tempfile::tempdir().expect("there is room");
    let (bad, missing) = (dir.path().join("secret"), dir.path().join("missing"));
    fs::write(&bad, "a\rb").expect("the directory is ours");
    for path in [bad, missing] {
        let line = refusal(Daemon::command().arg("--auth-token-file").arg(&path), 1);
        assert!(line.contains(&text_of(&path)), "{line:?}");
    }
}

#[test]
fn a_secret_in_the_arguments_is_warned_about_and_never_logged() {
    let dir = tempfile::tempdir().expect("there is room");
    let file = dir.path().join("secret");
    fs::write(&file, "hunter2").expect("the directory is ours");
    let file = text_of(&file);
    for (option, variable, is_warned_about) in [
        (&["--auth-token", "hunter2"][..], "", true),
        (&["--auth-token-file", &file], "", false),
        (&[], "hunter2", false),
    ] {
        let daemon = start_with(&[("LATCHD_AUTH_TOKEN", variable)], |command| {
            command.arg("--debug").args(option);
        });
        assert_eq!(daemon.connect().request("auth", "_", "hunter2"), "ok");
        daemon.signal(Signal::TERM);
        assert!(daemon.wait_exit(PATIENCE).is_some(), "it drains");
        let log = daemon.log();
        assert!(!log.contains("hunter2"), "{log}");
        let is_warning = |line: &str| line.contains("WARN") && line.contains("auth");
        assert_eq!(log.lines().any(is_warning), is_warned_about, "{log}");
    }
}

// ---------------------------------------------------------------------------------------------
// Where it listens

#[test]
fn localhost_and_addresses_are_listened_on() {
    let mut hosts = vec![
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1"),
    ];
    match TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) {
        Ok(_) => hosts.extend([("::1", "[::1]", "[::1]"), ("[::1]", "[::1]", "[::1]")]),
        Err(_) => skipped(&["IPv6"]),
    }
    for (host, shown, place) in hosts {
        let daemon = Daemon::start(&["--host", host]);
        let port = daemon.port();
        let addr = format!("{place}:{port}").parse().expect("an address");
        assert_eq!(Client::tcp(addr).request("ping", "_", "_"), "ok", "{host}");
        daemon.wait_for_log(&format!("listening addr={shown}:{port}\n"), PATIENCE);
    }
}

#[test]
fn the_name_of_this_host_is_listened_on() {
    let host = rustix::system::uname();
    let host = host.nodename().to_str().expect("a name");
    if (host, 0).to_socket_addrs().is_err() {
        return skipped(&["host that knows its own name"]);
    }
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]);
    // As a host sets it that moves over.
    command.env("DFLOCKD_HOST", host);
    let daemon = Daemon::from_command(command);
    let mut addrs = (host, daemon.port()).to_socket_addrs().expect("as before");
    assert!(addrs.all(|addr| Client::try_tcp(addr).is_some()));
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = taken.local_addr().expect("it is bound");
    let expected = format!("latchd: cannot listen on {addr}: address already in use");
    for (option, value) in [
        ("--port", addr.port().to_string()),
        ("--http", addr.to_string()),
    ] {
        let line = refusal(Daemon::command().args([option, &value]), 1);
        assert_eq!(line, expected);
    }
}

#[test]
fn a_unix_socket_works_beside_tcp_and_alone() {
    let dir = tempfile::tempdir().expect("there is room");
    let beside = dir.path().join("beside");
    let daemon = Daemon::start(&["--unix", &text_of(&beside)]);
    let mut over_unix = Client::unix(&beside);
    over_unix.acquire("k", 0);
    assert_eq!(
        daemon.connect().request("l", "k", "0"),
        "timeout",
        "both lead to one table"
    );

    let alone = dir.path().join("alone");
    let _daemon = Daemon::start_unix(&alone, &[]);
    assert_eq!(Client::unix(&alone).request("ping", "_", "_"), "ok");
}

#[test]
fn the_socket_has_the_mode_and_the_group_asked_for() {
    let dir = tempfile::tempdir().expect("there is room");
    let path = dir.path().join("socket");
    let daemon = Daemon::start_unix(&path, &[]);
    assert_eq!(mode_of(&path), 0o660, "the default");
    drop(daemon);
    let group = group_of_this_process();
    let daemon = Daemon::start_unix(&path, &["--unix-mode", "0606", "--unix-group", &group]);
    eventually(PATIENCE, "the mode is set", || mode_of(&path) == 0o606);
    let gid = fs::metadata(&path).expect("it is there").gid();
    assert_eq!(gid, rustix::process::getgid().as_raw());
    drop(daemon);

    let args = [
        "--unix",
        &text_of(&path),
        "--unix-group",
        "no-such-group-here",
    ];
    let end = run(Daemon::command().args(["--port", "off"]).args(args));
    assert!(matches!(end.code(), Some(1 | 2)), "{end:?}");
    assert!(end.stderr.contains("no-such-group-here"), "{end:?}");
}

#[test]
fn a_socket_left_by_a_killed_server_is_replaced() {
    let dir = tempfile::tempdir().expect("there is room");
    let path = dir.path().join("socket");
    let daemon = Daemon::start_unix(&path, &[]);
    daemon.signal(Signal::KILL);
    assert!(daemon.wait_exit(PATIENCE).is_some());
    let _daemon = Daemon::start_unix(&path, &[]);
    assert_eq!(Client::unix(&path).request("ping", "_", "_"), "ok");
}

#[test]
fn a_socket_that_cannot_be_made_is_named_and_what_is_there_is_left_alone() {
    let dir = tempfile::tempdir().expect("there is room");
    let at = |name: &str| dir.path().join(name);
    let _daemon = Daemon::start_unix(&at("live"), &[]);
    fs::write(at("file"), "precious").expect("the directory is ours");
    fs::create_dir(at("directory")).expect("the directory is ours");
    std::os::unix::fs::symlink(at("file"), at("link")).expect("the directory is ours");
    let long = "x".repeat(200);
    for name in ["live", "file", "directory", "link", "missing/socket", &long] {
        let found = || fs::symlink_metadata(at(name)).map(|it| it.ino()).ok();
        let before = found();
        let path = text_of(&at(name));
        let line = refusal(
            Daemon::command().args(["--port", "off", "--unix", &path]),
            1,
        );
        assert!(line.contains(&path), "{line:?}");
        assert_eq!(found(), before, "{name}");
    }
    let content = fs::read_to_string(at("file"));
    assert_eq!(content.expect("it is still there"), "precious");
    assert_eq!(Client::unix(&at("live")).request("ping", "_", "_"), "ok");
}

// ---------------------------------------------------------------------------------------------
// Helpers

/// How a command ended and what it wrote.
#[derive(Debug)]
struct End {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl End {
    fn code(&self) -> Option<i32> {
        self.status.code()
    }
}

/// Runs a command that is expected to end at once.
fn run(command: &mut Command) -> End {
    let mut child = command.spawn().expect("latchd was built");
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().expect("it is our child").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("it is our child");
            let output = child.wait_with_output().expect("it is our child");
            panic!(
                "still running: {command:?}\n{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        thread::sleep(Duration::from_millis(1));
    }
    let output = child.wait_with_output().expect("it is our child");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("latchd writes UTF-8");
    End {
        status: output.status,
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Runs a command that is expected to be refused with `code`, and gives its one line.
fn refusal(command: &mut Command, code: i32) -> String {
    // Should it start after all, then not on the port that everybody uses.
    let args_name_it = command
        .get_args()
        .any(|arg| arg.as_bytes().starts_with(b"--port"));
    let variables_name_it = command
        .get_envs()
        .any(|(name, _)| name.as_bytes().ends_with(b"_PORT"));
    if !args_name_it && !variables_name_it {
        command.env("DFLOCKD_PORT", "0");
    }
    let end = run(command);
    assert_eq!(end.code(), Some(code), "{command:?}: {end:?}");
    assert_eq!(end.stdout, "", "{command:?}");
    let line = end
        .stderr
        .strip_suffix('\n')
        .unwrap_or_else(|| panic!("no line: {command:?}: {end:?}"));
    assert!(
        !line.contains('\n') && line.starts_with("latchd: "),
        "{command:?}: {end:?}"
    );
    line.to_owned()
}

fn start_with(variables: &[(&str, &str)], arrange: impl FnOnce(&mut Command)) -> Daemon {
    let mut command = Daemon::command();
    command
        .args(["--port", "0", "--print-port"])
        .envs(variables.iter().copied());
    arrange(&mut command);
    Daemon::from_command(command)
}

fn group_of_this_process() -> String {
    let output = Command::new("id")
        .arg("-gn")
        .output()
        .expect("coreutils are there");
    String::from_utf8(output.stdout)
        .expect("ASCII")
        .trim()
        .to_owned()
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path)
        .expect("the socket is there")
        .permissions()
        .mode()
        & 0o7777
}

fn text_of(path: &(impl AsRef<Path> + ?Sized)) -> String {
    PathBuf::from(path.as_ref())
        .into_os_string()
        .into_string()
        .expect("the path is UTF-8")
}
