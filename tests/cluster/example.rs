//! The example does what it says, and the supervisor hears of the role.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::house::{Etcd, Server, TAKE_OVER};
use crate::support::latch::output;
use crate::support::needs::needs;
use crate::support::silent::{free_port, free_ports};
use crate::support::{program, Daemon};

#[test]
fn the_example_shows_a_failover() {
    shows(
        "failover.sh",
        &[
            "one server is active, the other one passes connections on",
            "the command runs with fence ",
            "the active server is killed",
            "the other server is active",
            "the command still has its lock",
            "the command has ended well",
            "and the lock is free",
        ],
    );
}

#[test]
fn the_example_shows_a_rolling_upgrade() {
    shows(
        "upgrade.sh",
        &[
            "one server is active, the others pass connections on",
            "a server has been upgraded",
            "a server has been upgraded",
            "a server has been upgraded",
            "no command has failed",
        ],
    );
}

/// Runs an example that prints lines which begin so.
fn shows(example: &str, lines: &[&str]) {
    needs!("etcd");
    let port = free_ports(9).to_string();
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/cluster/");
    let script = format!("{directory}{example}");
    let mut command = Command::new("timeout");
    command
        .args(["100", "sh", &script, &port])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().expect("there is a timeout");
    let ended = child.wait_with_output().expect("it is our child");
    let printed = String::from_utf8_lossy(&ended.stdout).into_owned();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{printed}{said}");
    let mut printed_lines = printed.lines();
    for expected in lines {
        let line = printed_lines.next().unwrap_or_default();
        assert!(line.starts_with(expected), "{printed}");
    }
    assert_eq!(printed_lines.next(), None, "{printed}");
}

#[test]
fn the_benchmark_compares_the_cluster_with_etcd() {
    needs!("etcd");
    let programs = Path::new(env!("CARGO_BIN_EXE_latchd")).parent();
    let programs = programs.expect("they are in a directory");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--offline", "--example", "bench"])
        .args(["--features", "cluster", "--target-dir"])
        .arg(programs.parent().expect("it is below target"))
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    if programs.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("there is a cargo").success());
    let mut bench = Command::new("timeout");
    bench
        .arg("200")
        .arg(programs.join("examples/bench"))
        .args(["cluster", "--seconds", "0.05", "--rounds", "2"])
        .args(["--connections", "2"]);
    let ended = bench.output().expect("it was built");
    let printed = String::from_utf8_lossy(&ended.stdout);
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{printed}{said}");
    let ratios = printed
        .lines()
        .filter(|line| line.starts_with("ratio of latchd to etcd's own lock: rate "));
    assert_eq!(ratios.count(), 2, "{printed}");
    for gap in ["active server killed", "active server told to stop"] {
        assert!(printed.contains(gap), "{printed}");
    }
}

#[test]
fn the_supervisor_hears_of_the_role() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let active = Server::active(&etcd.endpoints(), &[]);
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("notify");
    let supervisor = UnixDatagram::bind(&socket).expect("there is room");
    supervisor
        .set_read_timeout(Some(TAKE_OVER))
        .expect("it is not zero");
    let port = free_port().to_string();
    let mut command = Daemon::command();
    command
        .args(["--port", &port, "--advertise", &format!("127.0.0.1:{port}")])
        .args(["--etcd", &etcd.endpoints(), "--etcd-ttl", "5"])
        .env("NOTIFY_SOCKET", &socket);
    let _standby = Daemon::from_command(command);
    let hears = |expected: &str| {
        let mut said = Vec::new();
        while !said
            .last()
            .is_some_and(|it: &String| it.starts_with(expected))
        {
            let mut state = [0; 200];
            let len = supervisor
                .recv(&mut state)
                .unwrap_or_else(|error| panic!("no {expected:?} but {said:?}: {error}"));
            said.push(String::from_utf8_lossy(&state[..len]).into_owned());
        }
        said
    };
    let said = hears(&format!(
        "STATUS=Standby of 127.0.0.1:{}, epoch ",
        active.port
    ));
    assert!(!said.iter().any(|it| it.contains("Serving")), "{said:?}");
    active.kill();
    hears("STATUS=Active, epoch ");
    let mut ping = Command::new(program("latch"));
    ping.args(["ping", "--server", &format!("127.0.0.1:{port}")]);
    assert!(output(&mut ping).status.success());
}
