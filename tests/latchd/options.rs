//! Options, variables and exit statuses of the program, seen from outside.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::net::{Ipv6Addr, TcpListener, ToSocketAddrs, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use latchd::command_lines::{Feature, Form, CLUSTER, LATCHD, TLS};

use crate::support::needs::skipped;
#[cfg(feature = "cluster")]
use crate::support::silent::free_addr;
use crate::support::silent::leave_socket;
use crate::support::{eventually, rows_of, Client, Daemon, Signal, PATIENCE};

/// Every option that takes a number, its variable and its smallest value.
const NUMBERS: &[(&str, &str, i64)] = &[
    ("--default-lease-ttl", "DEFAULT_LEASE_TTL_S", 1),
    ("--lease-sweep-interval", "LEASE_SWEEP_INTERVAL_S", 1),
    ("--gc-interval", "GC_INTERVAL_S", 1),
    ("--gc-max-idle", "GC_MAX_IDLE_S", 0),
    ("--max-locks", "MAX_LOCKS", 1),
    ("--max-connections", "MAX_CONNECTIONS", 0),
    ("--max-connections-per-ip", "MAX_CONNECTIONS_PER_IP", 0),
    ("--max-slots", "MAX_SLOTS", 1),
    ("--max-per-connection", "MAX_PER_CONNECTION", 1),
    ("--max-waiters", "MAX_WAITERS", 0),
    ("--max-waiters-total", "MAX_WAITERS_TOTAL", 1),
    ("--max-kept", "MAX_KEPT", 0),
    ("--max-keep-time", "MAX_KEEP_TIME_S", 1),
    ("--max-hold", "MAX_HOLD_S", 0),
    ("--read-timeout", "READ_TIMEOUT_S", 1),
    ("--write-timeout", "WRITE_TIMEOUT_S", 0),
    ("--shutdown-timeout", "SHUTDOWN_TIMEOUT_S", 0),
    ("--idle-exit", "IDLE_EXIT_S", 0),
];

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
fn a_server_that_cannot_print_its_port_leaves_no_socket() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let full = fs::File::options().write(true).open("/dev/full");
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port", "--unix"]);
    command.arg(&socket).stderr(Stdio::piped());
    command.stdout(full.expect("every Linux has it"));
    let child = command.spawn().expect("it was built by cargo");
    let end = child.wait_with_output().expect("it exits");
    assert_eq!(end.status.code(), Some(1), "{end:?}");
    assert!(!socket.exists());
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
fn every_option_takes_its_value_after_a_blank_or_equals() {
    for form in ["blank", "equals"] {
        let dir = tempfile::tempdir().expect("there is room");
        let token_file = dir.path().join("token");
        fs::write(&token_file, "hunter2").expect("the directory is ours");
        let socket = dir.path().join("socket");
        let fence_file = dir.path().join("fences");
        let group = group_of_this_process();
        let mut values: Vec<(&str, String)> = vec![
            ("--host", "127.0.0.1".to_owned()),
            ("--port", "0".to_owned()),
            ("--unix", text_of(&socket)),
            ("--unix-mode", "0600".to_owned()),
            ("--unix-group", group),
            ("--auth-token-file", text_of(&token_file)),
            ("--log-timestamps", "never".to_owned()),
            ("--fence-state-file", text_of(&fence_file)),
        ];
        values.extend(
            NUMBERS
                .iter()
                .map(|(option, _, _)| (*option, "7".to_owned())),
        );
        let mut command = Daemon::command();
        for (option, value) in &values {
            match form {
                "blank" => command.args([option, value.as_str()]),
                _ => command.arg(format!("{option}={value}")),
            };
        }
        command.args(["--print-port", "--debug", "--auto-release-on-disconnect"]);
        command.arg("--inetd=false");
        let daemon = Daemon::from_command(command);
        let mut client = daemon.connect();
        assert_eq!(client.request("auth", "_", "hunter2"), "ok", "{form}");
        assert_eq!(client.acquire("k", 0).lease, 7, "{form}");
        assert_eq!(mode_of(&socket), 0o600, "{form}");
        assert!(fence_file.is_file(), "{form}");
    }
}

#[test]
fn a_long_option_may_begin_with_a_single_dash() {
    for args in [
        &["-port", "0", "--print-port", "-auth-token", "-a", "-debug"][..],
        &["-port=0", "--print-port", "-auth-token=-a", "-debug=yes"],
    ] {
        let mut command = Daemon::command();
        command.args(args);
        let daemon = Daemon::from_command(command);
        let mut client = daemon.connect();
        assert_eq!(client.request("auth", "_", "-a"), "ok", "{args:?}");
    }
    for (args, printed) in [("-help", "--default-lease-ttl"), ("-version", "latchd ")] {
        let end = run(Daemon::command().arg(args));
        assert_eq!(end.code(), Some(0), "{args}: {}", end.stderr);
        assert!(end.stdout.contains(printed), "{args}: {}", end.stdout);
    }
    for args in [
        &["-nonsense", "1"][..],
        &["-"],
        &["-p", "0"],
        &["---port", "0"],
    ] {
        let line = refusal(Daemon::command().args(args), 2);
        assert!(line.contains(args[0]), "{args:?}: {line:?}");
    }
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
fn a_number_out_of_range_is_refused() {
    for (option, variable, least) in NUMBERS {
        let below = (least - 1).to_string();
        for value in [
            below.as_str(),
            "many",
            "1.5",
            "",
            " ",
            "0x10",
            "99999999999999999999",
        ] {
            let line = refusal(Daemon::command().args([option, value]), 2);
            assert!(line.contains(option), "{option} {value:?}: {line:?}");
            if value.is_empty() {
                continue; // an empty variable counts as unset
            }
            for prefix in ["LATCHD", "DFLOCKD"] {
                let variable = format!("{prefix}_{variable}");
                let line = refusal(Daemon::command().env(&variable, value), 2);
                assert!(line.contains(&variable), "{variable}={value:?}: {line:?}");
            }
        }
    }
}

#[test]
fn seconds_that_would_overflow_are_refused() {
    let seconds = |variable: &str| variable.ends_with("_S");
    for (option, variable, _) in NUMBERS.iter().filter(|(_, variable, _)| seconds(variable)) {
        let line = refusal(Daemon::command().args([option, "9223372037"]), 2);
        assert!(line.contains(option), "{line:?}");
        let variable = format!("LATCHD_{variable}");
        let line = refusal(Daemon::command().env(&variable, "9223372037"), 2);
        assert!(line.contains(&variable), "{line:?}");
    }
    let daemon = Daemon::start(&["--default-lease-ttl", "9223372036"]);
    assert_eq!(daemon.connect().acquire("k", 0).lease, 9_223_372_036);
}

#[test]
fn an_option_without_its_value_is_refused() {
    let others = [
        "--host",
        "--unix",
        "--unix-mode",
        "--unix-group",
        "--auth-token",
        "--auth-token-file",
        "--fence-state-file",
    ];
    for option in NUMBERS.iter().map(|(option, _, _)| *option).chain(others) {
        let line = refusal(Daemon::command().arg(option), 2);
        assert!(line.contains(option), "{option}: {line:?}");
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
fn the_http_door_wants_a_host_and_a_free_port() {
    let wanted = "expected HOST:PORT, such as 127.0.0.1:6389 or [::1]:6389";
    for value in [
        "6389",
        "127.0.0.1",
        ":6389",
        "::1:6389",
        "[::1]",
        "127.0.0.1:65536",
    ] {
        let line = refusal(Daemon::command().args(["--http", value]), 2);
        assert_eq!(
            line,
            format!("latchd: invalid value '{value}' for --http: {wanted}")
        );
    }
    let line = refusal(Daemon::command().args(["--http-port", "65536"]), 2);
    let invalid = "latchd: invalid value '65536' for --http-port: expected 0-65535";
    assert_eq!(line, invalid);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let addr = taken.local_addr().expect("it is bound");
    let line = refusal(Daemon::command().args(["--http", &addr.to_string()]), 1);
    let in_use = format!("latchd: cannot listen on {addr}: address already in use");
    assert_eq!(line, in_use);
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
    for way in WAYS {
        let mut command = way.command(OwnedFd::from(a_listener()));
        let end = run(command.args(["--etcd=127.0.0.1:1", "--advertise=127.0.0.1:1"]));
        let expected = match way.args {
            [] => "latchd: --etcd: cannot be given together with LISTEN_FDS\n",
            _ => "latchd: --inetd: cannot be given together with --etcd\n",
        };
        assert_eq!((end.code(), &*end.stderr), (Some(2), expected), "{way:?}");
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
fn flag_then_latchd_then_dflockd_variable_then_default() {
    let (ours, theirs) = ("LATCHD_DEFAULT_LEASE_TTL_S", "DFLOCKD_DEFAULT_LEASE_TTL_S");
    for (flag, variables, lease) in [
        (Some("11"), &[(ours, "12"), (theirs, "13")][..], 11),
        (None, &[(ours, "12"), (theirs, "13")], 12),
        (None, &[(theirs, "13")], 13),
        (None, &[(ours, ""), (theirs, "13")], 13),
        (None, &[(ours, ""), (theirs, "")], 33),
        (None, &[], 33),
    ] {
        let daemon = start_with(variables, |command| {
            if let Some(lease) = flag {
                command.args(["--default-lease-ttl", lease]);
            }
        });
        let granted = daemon.connect().acquire("k", 0).lease;
        assert_eq!(granted, lease, "flag {flag:?}, variables {variables:?}");
    }
}

#[test]
fn host_port_and_socket_can_come_from_variables() {
    let dir = tempfile::tempdir().expect("there is room");
    let socket = dir.path().join("socket");
    let path = text_of(&socket);
    let mut command = Daemon::command();
    command.envs([
        ("DFLOCKD_HOST", "127.0.0.1"),
        ("DFLOCKD_PORT", "0"),
        ("LATCHD_UNIX", &path),
        ("LATCHD_UNIX_MODE", "0600"),
        ("LATCHD_UNIX_GROUP", &group_of_this_process()),
    ]);
    command.arg("--print-port");
    let daemon = Daemon::from_command(command);
    assert_eq!(daemon.connect().request("ping", "_", "_"), "ok");
    assert_eq!(Client::unix(&socket).request("ping", "_", "_"), "ok");
    assert_eq!(mode_of(&socket), 0o600);
}

#[test]
fn the_fence_file_can_come_from_a_variable() {
    let dir = tempfile::tempdir().expect("there is room");
    for variable in ["LATCHD_FENCE_STATE_FILE", "DFLOCKD_FENCE_STATE_FILE"] {
        let path = dir.path().join(variable);
        let _daemon = start_with(&[(variable, &text_of(&path))], |_| {});
        assert!(path.is_file(), "{variable}");
    }
}

#[test]
fn the_time_to_an_idle_exit_can_come_from_a_variable() {
    for variable in ["LATCHD_IDLE_EXIT_S", "DFLOCKD_IDLE_EXIT_S"] {
        let daemon = start_with(&[(variable, "1")], |_| {});
        let status = daemon.wait_exit(PATIENCE).expect("nobody is there");
        assert_eq!(status.code(), Some(0), "{variable}");
        assert!(daemon.log().contains("stopping reason=idle"), "{variable}");
    }
}

#[test]
fn there_is_no_variable_for_inetd() {
    let variables = [("LATCHD_INETD", "true"), ("DFLOCKD_INETD", "true")];
    let daemon = start_with(&variables, |_| {});
    assert_eq!(daemon.connect().request("ping", "_", "_"), "ok");
}

#[test]
fn the_old_names_of_the_pruning_variables_are_heard() {
    let daemon = start_with(
        &[
            ("DFLOCKD_GC_LOOP_SLEEP", "1"),
            ("DFLOCKD_GC_MAX_UNUSED_TIME", "0"),
        ],
        |_| {},
    );
    let mut client = daemon.connect();
    let grant = client.acquire("k", 0);
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    eventually(PATIENCE, "the idle key is pruned", || {
        client.stats()["idle_locks"] == serde_json::json!([])
    });

    for variable in ["DFLOCKD_GC_LOOP_SLEEP", "DFLOCKD_GC_MAX_UNUSED_TIME"] {
        let line = refusal(Daemon::command().env(variable, "soon"), 2);
        assert!(line.contains(variable), "{line:?}");
    }
}

#[test]
fn a_new_name_beats_the_old_one() {
    let variables = [
        ("DFLOCKD_GC_INTERVAL_S", "1"),
        ("DFLOCKD_GC_LOOP_SLEEP", "3600"),
        ("DFLOCKD_GC_MAX_IDLE_S", "0"),
        ("DFLOCKD_GC_MAX_UNUSED_TIME", "3600"),
    ];
    let daemon = start_with(&variables, |_| {});
    let mut client = daemon.connect();
    let grant = client.acquire("k", 0);
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    eventually(PATIENCE, "the idle key is pruned", || {
        client.stats()["idle_locks"] == serde_json::json!([])
    });
}

#[test]
fn each_unknown_variable_is_warned_about_once() {
    let mut known: Vec<String> = NUMBERS.iter().map(|(_, name, _)| (*name).into()).collect();
    known.extend(["GC_LOOP_SLEEP", "GC_MAX_UNUSED_TIME"].map(String::from));
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]);
    // A flag hides its variable, which is known all the same.
    command.args(["--host", "127.0.0.1", "--no-auto-release-on-disconnect"]);
    for name in known {
        command.env(format!("DFLOCKD_{name}"), "9");
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
    ] {
        let line = refusal(Daemon::command().env(variable, value), 2);
        let named = if value == "off" { "--unix" } else { variable };
        assert!(line.contains(named), "{variable}={value}: {line:?}");
    }
}

// ---------------------------------------------------------------------------------------------
// Switches

/// Arguments, variables, and whether a closed connection releases what it held.
type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], bool);

#[test]
fn auto_release_is_on_or_off_in_every_form() {
    let variable = "LATCHD_AUTO_RELEASE_ON_DISCONNECT";
    let cases: &[Case] = &[
        (&[], &[], true),
        (
            &["--auto-release-on-disconnect"],
            &[(variable, "false")],
            true,
        ),
        (
            &["--auto-release-on-disconnect=1"],
            &[(variable, "0")],
            true,
        ),
        (
            &["--auto-release-on-disconnect=Yes"],
            &[(variable, "no")],
            true,
        ),
        (
            &["--auto-release-on-disconnect=TRUE"],
            &[(variable, "No")],
            true,
        ),
        (&["--auto-release-on-disconnect=false"], &[], false),
        (
            &["--auto-release-on-disconnect=0"],
            &[(variable, "1")],
            false,
        ),
        (
            &["--auto-release-on-disconnect=NO"],
            &[(variable, "yes")],
            false,
        ),
        (
            &["--no-auto-release-on-disconnect"],
            &[(variable, "true")],
            false,
        ),
        (&[], &[(variable, "FALSE")], false),
        (&[], &[("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "no")], false),
        (
            &[],
            &[
                ("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "no"),
                (variable, "YES"),
            ],
            true,
        ),
    ];
    thread::scope(|scope| {
        for (args, variables, released) in cases {
            scope.spawn(move || {
                let daemon = start_with(variables, |command| {
                    command.args(*args);
                });
                assert_eq!(
                    is_released_on_disconnect(&daemon),
                    *released,
                    "{args:?} {variables:?}"
                );
            });
        }
    });
}

fn is_released_on_disconnect(daemon: &Daemon) -> bool {
    daemon.connect().acquire("k", 0);
    let mut client = daemon.connect();
    eventually(PATIENCE, "the holder has gone", || {
        client.stats()["connections"] == 1
    });
    client.request("l", "k", "1").starts_with("ok ")
}

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
        &[],
        &[("RUST_LOG", "error"), ("LATCHD_DEBUG", "Yes")]
    ));
    assert!(is_chatty(
        &["--debug=false"],
        &[("RUST_LOG", "debug"), ("LATCHD_DEBUG", "true")]
    ));
    assert!(!is_chatty(&["--debug=false"], &[("LATCHD_DEBUG", "true")]));
}

#[test]
fn a_malformed_rust_log_is_refused_even_if_no_one_can_be_told() {
    for malformed in ["latchd=loud", "latchd=info=x", "a/b/c"] {
        let line = refusal(Daemon::command().env("RUST_LOG", malformed), 2);
        let start = format!("latchd: invalid value '{malformed}' for RUST_LOG: expected ");
        assert!(line.starts_with(&start), "{line}");
    }
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
    command
        .args(["--port", "0", "--print-port"])
        .stderr(Stdio::null());
    let mut child = command.spawn().expect("latchd was built");
    let mut stdout = child.stdout.take().expect("it is a pipe");
    let mut printed = Vec::new();
    while !printed.ends_with(b"\n") {
        let mut byte = [0];
        assert_eq!(
            stdout.read(&mut byte).expect("it is a pipe"),
            1,
            "ended after {printed:?}"
        );
        printed.push(byte[0]);
    }
    let port: u16 = String::from_utf8(printed)
        .expect("ASCII")
        .trim_end()
        .parse()
        .expect("a port");
    assert_eq!(
        Client::tcp(([127, 0, 0, 1], port).into()).request("ping", "_", "_"),
        "ok"
    );
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::TERM).expect("it runs");
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("it is a pipe");
    assert_eq!(rest, "");
    assert!(child.wait().expect("it is our child").success());
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
    let log_of = |args: &[&str], variables: &[(&str, &str)]| {
        let daemon = start_with(variables, |command| {
            command.arg("--debug").args(args);
        });
        assert_eq!(daemon.connect().request("auth", "_", "hunter2"), "ok");
        daemon.signal(Signal::TERM);
        assert!(daemon.wait_exit(PATIENCE).is_some(), "it drains");
        assert!(
            !daemon.log().contains("hunter2"),
            "the secret is in the log:\n{}",
            daemon.log()
        );
        daemon.log()
    };
    let is_warning = |line: &str| line.contains("WARN") && line.contains("auth");
    let in_arguments = log_of(&["--auth-token", "hunter2"], &[]);
    assert!(
        in_arguments.lines().any(is_warning),
        "no warning:\n{in_arguments}"
    );
    let in_file = log_of(&["--auth-token-file", &text_of(&file)], &[]);
    assert!(
        !in_file.lines().any(is_warning),
        "a warning too many:\n{in_file}"
    );
    let in_variable = log_of(&[], &[("LATCHD_AUTH_TOKEN", "hunter2")]);
    assert!(
        !in_variable.lines().any(is_warning),
        "a warning too many:\n{in_variable}"
    );
}

// ---------------------------------------------------------------------------------------------
// Where it listens

#[test]
fn localhost_and_addresses_are_listened_on() {
    for (host, shown) in [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
    ] {
        let daemon = Daemon::start(&["--host", host]);
        assert_eq!(daemon.connect().request("ping", "_", "_"), "ok", "{host}");
        daemon.wait_for_log(
            &format!("listening addr={shown}:{}", daemon.port()),
            PATIENCE,
        );
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
fn ipv6_addresses_need_no_brackets_and_may_have_them() {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        return skipped(&["IPv6"]);
    }
    for host in ["::1", "[::1]"] {
        let daemon = Daemon::start(&["--host", host]);
        let mut client = Client::tcp((Ipv6Addr::LOCALHOST, daemon.port()).into());
        assert_eq!(client.request("ping", "_", "_"), "ok", "{host}");
        daemon.wait_for_log(&format!("listening addr=[::1]:{}", daemon.port()), PATIENCE);
    }
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = taken.local_addr().expect("it is bound").port();
    let line = refusal(Daemon::command().args(["--port", &port.to_string()]), 1);
    assert_eq!(
        line,
        format!("latchd: cannot listen on 127.0.0.1:{port}: address already in use")
    );
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
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().expect("there is room");
    let path = dir.path().join("socket");
    leave_socket(&path);
    let _daemon = Daemon::start_unix(&path, &[]);
    assert_eq!(Client::unix(&path).request("ping", "_", "_"), "ok");
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
fn a_live_socket_is_left_to_its_server() {
    let dir = tempfile::tempdir().expect("there is room");
    let path = dir.path().join("socket");
    let _daemon = Daemon::start_unix(&path, &[]);
    let before = fs::metadata(&path).expect("it is there").ino();
    let line = refusal(
        Daemon::command().args(["--port", "off", "--unix", &text_of(&path)]),
        1,
    );
    assert!(line.contains(&text_of(&path)), "{line:?}");
    assert_eq!(fs::metadata(&path).expect("it is there").ino(), before);
    assert_eq!(Client::unix(&path).request("ping", "_", "_"), "ok");
}

#[test]
fn a_file_in_the_place_of_the_socket_is_left_alone() {
    let dir = tempfile::tempdir().expect("there is room");
    let file = dir.path().join("file");
    fs::write(&file, "precious").expect("the directory is ours");
    let directory = dir.path().join("directory");
    fs::create_dir(&directory).expect("the directory is ours");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&file, &link).expect("the directory is ours");
    for path in [&file, &directory, &link] {
        let line = refusal(
            Daemon::command().args(["--port", "off", "--unix", &text_of(path)]),
            1,
        );
        assert!(line.contains(&text_of(path)), "{line:?}");
    }
    assert_eq!(
        fs::read_to_string(&file).expect("it is still there"),
        "precious"
    );
    assert!(directory.is_dir());
    assert!(fs::symlink_metadata(&link)
        .expect("it is still there")
        .is_symlink());
}

#[test]
fn a_socket_that_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().expect("there is room");
    for path in [
        dir.path().join("missing/socket"),
        dir.path().join("x".repeat(200)),
    ] {
        let end = run(Daemon::command().args(["--port", "off", "--unix", &text_of(&path)]));
        assert!(matches!(end.code(), Some(1 | 2)), "{end:?}");
        assert!(end.stderr.contains(&text_of(&path)), "{end:?}");
    }
}

// ---------------------------------------------------------------------------------------------
// Sockets that somebody else listens on

/// How a socket reaches the server.
const WAYS: [Way; 3] = [
    Way {
        prelude: "",
        args: &["--inetd"],
    },
    Way {
        prelude: "export LISTEN_FDS=1 LISTEN_PID=$$; exec 3<&0 </dev/null;",
        args: &[],
    },
    Way {
        prelude: "export LISTEN_FDS=1 LISTEN_PID=$$; exec 3<&0 </dev/null;",
        args: &["--inetd"],
    },
];

#[derive(Clone, Copy, Debug)]
struct Way {
    /// What a shell does before it becomes the server.
    prelude: &'static str,
    args: &'static [&'static str],
}

impl Way {
    fn command(self, socket: impl Into<Stdio>) -> Command {
        let plain = Daemon::command();
        let mut command = Command::new("sh");
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
            .args(["-c", &format!("{} exec \"$0\" \"$@\"", self.prelude)])
            .arg(plain.get_program())
            .args(self.args)
            .stdin(socket)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

#[test]
fn inherited_sockets_are_served() {
    let dir = tempfile::tempdir().expect("there is room");
    for (number, way) in WAYS.into_iter().enumerate() {
        let tcp = a_listener();
        let addr = tcp.local_addr().expect("it is bound");
        let _daemon = Daemon::from_command(way.command(OwnedFd::from(tcp)));
        assert_eq!(
            Client::tcp(addr).request("ping", "_", "_"),
            "ok",
            "TCP, {way:?}"
        );

        let path = dir.path().join(number.to_string());
        let unix = UnixListener::bind(&path).expect("the directory is ours");
        let _daemon = Daemon::from_command(way.command(OwnedFd::from(unix)));
        assert_eq!(
            Client::unix(&path).request("ping", "_", "_"),
            "ok",
            "Unix, {way:?}"
        );
    }
}

#[test]
fn the_port_of_an_inherited_socket_is_printed() {
    for way in WAYS {
        let tcp = a_listener();
        let addr = tcp.local_addr().expect("it is bound");
        let mut command = way.command(OwnedFd::from(tcp));
        command.arg("--print-port");
        assert_eq!(Daemon::from_command(command).port(), addr.port(), "{way:?}");
    }
}

#[test]
fn addresses_beside_inherited_sockets_are_refused() {
    // A server on descriptor 0 exits a second later, for inetd's sake: all wait together.
    thread::scope(|scope| {
        for way in WAYS {
            for (option, value) in [
                ("--host", "127.0.0.1"),
                ("--port", "0"),
                ("--port", "off"),
                ("--unix", "/tmp/latchd-options"),
                ("--unix-mode", "0600"),
                ("--unix-group", "0"),
            ] {
                scope.spawn(move || an_address_is_refused(&way, option, value));
            }
        }
    });
}

fn an_address_is_refused(way: &Way, option: &str, value: &str) {
    let command = || way.command(OwnedFd::from(a_listener()));
    let is_refused = |command: &mut Command, origin: &str| {
        let expected = format!("latchd: {origin}: the sockets are inherited\n");
        let end = run(command);
        assert_eq!((end.code(), end.stderr), (Some(2), expected), "{way:?}");
    };
    is_refused(command().args([option, value]), option);
    let variable = option.trim_start_matches('-').to_uppercase();
    for prefix in ["LATCHD", "DFLOCKD"] {
        let variable = format!("{prefix}_{}", variable.replace('-', "_"));
        is_refused(command().env(&variable, value), &variable);
    }
}

#[test]
fn sockets_meant_for_another_process_are_ignored() {
    let way = Way {
        prelude: "export LISTEN_FDS=1 LISTEN_PID=1; exec 3<&0 </dev/null;",
        args: &["--port", "0", "--print-port"],
    };
    let theirs = a_listener();
    let port = theirs.local_addr().expect("it is bound").port();
    let daemon = Daemon::from_command(way.command(OwnedFd::from(theirs)));
    assert_ne!(daemon.port(), port);
    assert_eq!(daemon.connect().request("ping", "_", "_"), "ok");
}

#[test]
fn what_does_not_listen_is_refused_in_one_line() {
    let connected = || OwnedFd::from(UnixStream::pair().expect("descriptors are left").0);
    let datagrams = || {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port is free");
        OwnedFd::from(socket)
    };
    let file = || OwnedFd::from(fs::File::open("/dev/null").expect("it is always there"));
    for way in WAYS {
        let place = if way.prelude.is_empty() {
            "cannot listen on descriptor 0"
        } else {
            "LISTEN_FDS: cannot listen on descriptor 3"
        };
        for (socket, why) in [
            (
                connected(),
                "it is a connected socket, but all connections must reach one process: \
                 use wait, not nowait",
            ),
            (datagrams(), "it is not a listening stream socket"),
            (file(), "it is not a listening stream socket"),
        ] {
            let end = run(&mut way.command(socket));
            assert_eq!(
                (end.code(), end.stderr),
                (Some(1), format!("latchd: {place}: {why}\n")),
                "{way:?}"
            );
        }
    }
}

#[test]
fn nothing_goes_to_stderr_if_it_is_the_socket() {
    for args in [&[][..], &["--nonsense"], &["--auth-token-file", "/missing"]] {
        let (ours, theirs) = UnixStream::pair().expect("descriptors are left");
        let stderr = theirs.try_clone().expect("descriptors are left");
        let mut command = WAYS[0].command(OwnedFd::from(theirs));
        command.args(args).stderr(OwnedFd::from(stderr));
        let end = run(&mut command);
        assert!(matches!(end.code(), Some(1 | 2)), "{args:?}: {end:?}");
        drop(command);
        let mut written = String::new();
        (&ours)
            .read_to_string(&mut written)
            .expect("the other side is closed");
        assert_eq!(written, "", "{args:?}");
    }
}

fn a_listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").expect("a port is free")
}

// ---------------------------------------------------------------------------------------------
// The fence file

#[test]
fn a_fence_file_that_cannot_be_used_is_named_in_one_line() {
    let dir = tempfile::tempdir().expect("there is room");
    let path = |name: &str| dir.path().join(name);
    let file = |name: &str, content: &[u8]| {
        fs::write(path(name), content).expect("the directory is ours");
        path(name)
    };
    let used = path("used");
    let user = Daemon::start(&["--fence-state-file", &text_of(&used)]);
    std::os::unix::fs::symlink("elsewhere", path("link")).expect("the directory is ours");
    let missing = format!("no such directory: {}", path("missing").display());
    for (path, why) in [
        (path("missing/fences"), missing.as_str()),
        (dir.path().to_owned(), "it is not a regular file"),
        (PathBuf::from("/dev/null"), "it is not a regular file"),
        (path("link"), "it is a symbolic link"),
        (used, "another server is using it"),
        (
            file("foreign", b"a list of what to buy, longer than a slot"),
            "its content is not that of a fence file",
        ),
        (file("magic", b"dflfnc1\n"), "it is cut short"),
        (
            file("torn", b"dflfnc1\n, and what follows is no record of it"),
            "no record in it is whole",
        ),
        (
            file("end", &u64::MAX.to_be_bytes()),
            "its fences have come to their end",
        ),
    ] {
        let path = text_of(&path);
        let line = refusal(Daemon::command().args(["--fence-state-file", &path]), 1);
        assert_eq!(
            line,
            format!("latchd: cannot use the fence file {path}: {why}")
        );
    }
    assert_eq!(user.connect().request("ping", "_", "_"), "ok");
}

// ---------------------------------------------------------------------------------------------
// The log

#[test]
fn log_lines_begin_with_the_time_if_asked() {
    for (when, expected) in [("always", true), ("never", false), ("auto", true)] {
        let daemon = Daemon::start(&["--log-timestamps", when]);
        assert_eq!(
            has_timestamps(&daemon),
            expected,
            "--log-timestamps {when}:\n{}",
            daemon.log()
        );
        let daemon = start_with(&[("LATCHD_LOG_TIMESTAMPS", when)], |_| {});
        assert_eq!(
            has_timestamps(&daemon),
            expected,
            "LATCHD_LOG_TIMESTAMPS={when}"
        );
    }
}

#[test]
fn the_journal_gets_no_timestamps() {
    let dir = tempfile::tempdir().expect("there is room");
    let path = dir.path().join("log");
    let log = fs::File::create(&path).expect("the directory is ours");
    let about = log.metadata().expect("it is open");
    let mut command = Daemon::command();
    command.args(["--port", "0", "--print-port"]).stderr(log);
    command.env("JOURNAL_STREAM", format!("{}:{}", about.dev(), about.ino()));
    let _daemon = Daemon::from_command(command);
    let read = || fs::read_to_string(&path).expect("it is text");
    eventually(PATIENCE, "it says that it listens", || {
        read().contains("listening addr=")
    });
    assert!(!read().lines().any(begins_with_the_time), "{}", read());
}

fn has_timestamps(daemon: &Daemon) -> bool {
    daemon.wait_for_log("listening addr=", PATIENCE);
    let log = daemon.log();
    let line = log
        .lines()
        .find(|line| line.contains("listening addr="))
        .expect("just seen");
    begins_with_the_time(line)
}

/// `2026-01-31T...`, perhaps in brackets.
fn begins_with_the_time(line: &str) -> bool {
    let shape: String = line
        .chars()
        .map(|c| if c.is_ascii_digit() { '0' } else { c })
        .collect();
    shape
        .trim_start_matches('[')
        .starts_with("0000-00-00T00:00:00")
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
