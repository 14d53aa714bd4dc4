//! What an operator does about a holder.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use rustix::fs::{utimensat, AtFlags, Timespec, Timestamps, CWD};

use crate::support::limited::{limited, without_users};
use crate::support::needs::needs;
use crate::support::silent::{free_port, leave_socket};
use crate::support::{parse_grant, Client, Daemon, PATIENCE};

/// The fence in a token, as `break` takes it.
fn fence_of(token: &str) -> String {
    let fence = u64::from_str_radix(&token[..16], 16).expect("hex digits");
    fence.to_string()
}

fn breaks(operator: &mut Client, argument: &str) -> String {
    operator.request("break", "k", argument)
}

#[test]
fn another_user_of_the_unix_socket_is_no_operator() {
    needs!(root);
    needs!("nc");
    let dir = tempfile::tempdir().expect("a directory");
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("it is ours");
    let socket = dir.path().join("socket");
    let daemon = Daemon::start_unix(&socket, &["--unix-mode", "0666"]);
    let mut holder = Client::unix(&socket);
    let grant = holder.acquire_for("k", 0, 60);
    let mut nc = Command::new("nc");
    nc.arg("-NU").arg(&socket).uid(65_534);
    let nc = nc.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut nc = nc.expect("nc of netcat-openbsd");
    let mut stdin = nc.stdin.take().expect("a pipe");
    let requests = b"ping\n_\n_\nbreak\nk\n_\n";
    stdin.write_all(requests).expect("it reads");
    drop(stdin);
    let output = nc.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\nerror_auth\n");
    assert_eq!(holder.request("n", "k", &grant.token), "ok 33");
    drop(daemon);
}

/// The namespace has no number for the server's user and none for this test's, so the kernel gives
/// both the same one.
#[test]
fn a_user_unknown_to_the_namespace_is_no_operator() {
    let Some(wrapper) = without_users() else {
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("socket");
    let mut command = limited(&wrapper);
    command.arg("--unix").arg(&socket);
    let daemon = Daemon::from_command(command);
    let mut holder = daemon.connect();
    let grant = holder.acquire_for("k", 0, 60);
    let mut stranger = Client::unix(&socket);
    assert_eq!(breaks(&mut stranger, &fence_of(&grant.token)), "error_auth");
}

/// A server whose operator socket goes into `directory`.
fn with_runtime_directory(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Daemon::command();
    command.args(arguments).env_remove("LATCHD_OPERATOR_SOCKET");
    command.env("XDG_RUNTIME_DIR", directory);
    command
}

fn names_in(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).expect("it is there").map(|entry| {
        let name = entry.expect("it is ours").file_name();
        name.into_string().expect("UTF-8")
    });
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

/// Lets a socket look as if it had been bound a minute ago.
fn make_old(path: &Path) {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let time = since_1970.expect("it is later") - Duration::from_secs(60);
    let time = Timespec::try_from(time).expect("a time of today");
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).expect("it is ours");
}

#[test]
fn a_server_on_any_port_makes_an_operator_socket_if_asked() {
    for (arguments, count) in [
        (&["--port", "0", "--print-port"][..], 0),
        (&["--port", "0", "--print-port", "--operator-socket"], 1),
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let daemon = Daemon::from_command(with_runtime_directory(directory.path(), arguments));
        daemon.connect().acquire("k", 0);
        assert_eq!(names_in(directory.path()).len(), count, "{arguments:?}");
        assert!(!daemon.log().contains("no-operator-socket"));
    }
}

#[test]
fn sockets_of_dead_servers_are_removed_at_the_next_start() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    for name in ["latchd-1.sock", "latchd-2.sock", "other-1.sock"] {
        leave_socket(&at(name));
        make_old(&at(name));
    }
    // It has just been bound, so its server may not listen yet.
    leave_socket(&at("latchd-3.sock"));
    let _alive = UnixListener::bind(at("latchd-4.sock")).expect("a socket");
    make_old(&at("latchd-4.sock"));
    fs::write(at("latchd-5.sock"), "no socket").expect("the directory is ours");
    make_old(&at("latchd-5.sock"));
    let port = free_port().to_string();
    let command = with_runtime_directory(directory.path(), &["--port", &port]);
    let daemon = Daemon::from_command(command);
    daemon.wait_for_log("listening path=", PATIENCE);
    let own = format!("latchd-{port}.sock");
    let mut expected = [
        "latchd-3.sock",
        "latchd-4.sock",
        "latchd-5.sock",
        "other-1.sock",
        &own,
    ];
    expected.sort_unstable();
    assert_eq!(names_in(directory.path()), expected);
}

#[test]
fn servers_that_start_at_once_leave_each_others_sockets() {
    const SERVERS: usize = 6;
    let directory = tempfile::tempdir().expect("a directory");
    for number in 1..50 {
        let path = directory.path().join(format!("latchd-{number}.sock"));
        leave_socket(&path);
        make_old(&path);
    }
    let arguments = ["--port", "0", "--print-port", "--operator-socket"];
    let start = || Daemon::from_command(with_runtime_directory(directory.path(), &arguments));
    let daemons: Vec<Daemon> = std::thread::scope(|scope| {
        let starting: Vec<_> = (0..SERVERS).map(|_| scope.spawn(start)).collect();
        let started = starting.into_iter().map(|it| it.join());
        started.map(|it| it.expect("it starts")).collect()
    });
    let own = daemons
        .iter()
        .map(|it| format!("latchd-{}.sock", it.port()));
    let mut own: Vec<String> = own.collect();
    own.sort_unstable();
    assert_eq!(names_in(directory.path()), own);
}

#[test]
fn a_grant_is_found_by_its_fence_among_any_number() {
    const COUNT: usize = 200;
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    let claim = format!("sl\npool\n0 {COUNT}\n");
    let fences: Vec<String> = (0..COUNT)
        .map(|_| {
            holder.send(&claim);
            let grant = parse_grant(&holder.line(), "ok").expect("a slot is free");
            fence_of(&grant.token)
        })
        .collect();
    let mut asking = daemon.connect();
    for fence in &fences {
        let found = asking.request("stats", &format!("holders {fence}"), "pool");
        let found: serde_json::Value = serde_json::from_str(&found[3..]).expect("JSON");
        let key = &found["keys"][0];
        assert_eq!(key["holder_count"], COUNT);
        let holders = key["holders"].as_array().expect("a list");
        assert_eq!(holders.len(), 1);
        assert_eq!(holders[0]["fence"], fence.as_str());
        let elsewhere = asking.request("stats", &format!("holders {fence}"), "other");
        assert_eq!(elsewhere, r#"ok {"keys":[]}"#);
    }
    // Without a fence, the reply is short of some of them.
    let listed = asking.request("stats", "holders", "pool");
    assert_eq!(listed.matches("\"fence\"").count(), 64);
}
