//! What monitoring reads: `latch stats --format prometheus`, `latch status`.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Output, Stdio};
use std::thread;

use crate::support::latch::{latch, run, text};
use crate::support::needs::needs;
use crate::support::silent::refusing_addr;
use crate::support::{fence, Daemon};

/// What an older server answers to `stats`, whatever the key line.
const OLD_STATS: &str =
    r#"ok {"connections":1,"locks":[],"semaphores":[],"idle_locks":[],"idle_semaphores":[]}"#;

/// A server that has one reply to everything.
fn server_with(reply: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("its address");
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let lines = BufReader::new(client.try_clone().expect("a descriptor")).lines();
            if lines.map_while(Result::ok).take(3).count() == 3 {
                let _ = writeln!(client, "{reply}");
            }
        }
    });
    addr
}

/// A daemon that has counted something of each kind, and its counters.
fn busy_daemon() -> Daemon {
    let daemon = Daemon::start(&[]);
    let mut client = daemon.connect();
    let grant = client.acquire("released", 0);
    assert_eq!(client.request("r", "released", &grant.token), "ok");
    client.acquire("held", 0);
    assert_eq!(client.request("l", "held", "0"), "timeout");
    assert_eq!(client.request("l", "held", "1"), "timeout");
    assert_eq!(client.request("r", "held", &grant.token), "error");
    daemon
}

fn prometheus(daemon: &Daemon, arguments: &[&str]) -> Output {
    run(
        daemon,
        &[&["stats", "--format", "prometheus"], arguments].concat(),
    )
}

/// The value of a series, with its labels beside that of the server.
fn value(output: &Output, server: &str, name: &str, labels: &str) -> Option<f64> {
    let series = format!("{name}{{server=\"{server}\"{labels}}} ");
    let printed = text(&output.stdout);
    let mut values = printed
        .lines()
        .filter_map(|line| line.strip_prefix(&series));
    let found = values.next()?.parse().expect("a number");
    assert_eq!(values.next(), None, "{series} is there twice");
    Some(found)
}

#[test]
fn the_counters_of_one_server_have_its_name() {
    let daemon = busy_daemon();
    let output = prometheus(&daemon, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let server = daemon.addr().to_string();
    for (name, labels, expected) in [
        ("latchd_up", "", 1.0),
        ("latchd_grants_total", "", 2.0),
        ("latchd_releases_total", "", 1.0),
        ("latchd_wait_timeouts_total", "", 1.0),
        ("latchd_refusals_total", ",reason=\"busy\"", 1.0),
        ("latchd_refusals_total", ",reason=\"not_held\"", 1.0),
        ("latchd_refusals_total", ",reason=\"max_locks\"", 0.0),
        ("latchd_keys", ",kind=\"semaphore\"", 0.0),
        ("latchd_waiters", "", 0.0),
        ("latchd_grant_wait_seconds_count", "", 0.0),
        ("latchd_grant_wait_seconds_bucket", ",le=\"0.001\"", 0.0),
        ("latchd_grant_wait_seconds_bucket", ",le=\"3600.0\"", 0.0),
        ("latchd_grant_wait_seconds_bucket", ",le=\"+Inf\"", 0.0),
    ] {
        let found = value(&output, &server, name, labels);
        assert_eq!(found, Some(expected), "{name}{labels}");
    }
    // Without a fence file there is no range that could end.
    assert_eq!(value(&output, &server, "latchd_fences_left", ""), None);
}

#[test]
fn a_fence_file_has_a_range_that_is_shown() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("fences");
    let daemon = Daemon::start(&["--fence-state-file", file.to_str().expect("UTF-8")]);
    let left = || {
        let output = prometheus(&daemon, &[]);
        value(
            &output,
            &daemon.addr().to_string(),
            "latchd_fences_left",
            "",
        )
        .expect("it is there")
    };
    let before = left();
    daemon.connect().acquire("k", 0);
    assert_eq!(left(), before - 1.0);
}

#[test]
fn several_servers_are_told_apart_by_their_label() {
    let (busy, idle) = (busy_daemon(), Daemon::start(&[]));
    let (_reserved, gone) = refusing_addr();
    let addrs = [busy.addr(), gone, idle.addr()].map(|addr| addr.to_string());
    let servers: Vec<&str> = addrs.iter().flat_map(|it| ["--server", it]).collect();
    let output = prometheus(&busy, &servers);
    assert_eq!(output.status.code(), Some(69), "{}", text(&output.stderr));
    assert!(text(&output.stderr).starts_with(&format!("latch: {gone}: ")));
    let grants = |server: &str| value(&output, server, "latchd_grants_total", "");
    assert_eq!(
        addrs.each_ref().map(|it| grants(it)),
        [Some(2.0), None, Some(0.0)]
    );
    let up = |server: &str| value(&output, server, "latchd_up", "");
    let expected = [Some(1.0), Some(0.0), Some(1.0)];
    assert_eq!(addrs.each_ref().map(|it| up(it)), expected);
}

#[test]
fn promtool_accepts_the_counters_without_complaint() {
    let promtool = needs!("promtool");
    let (busy, idle) = (busy_daemon(), Daemon::start(&[]));
    let (_reserved, gone) = refusing_addr();
    let addrs = [busy.addr(), idle.addr(), gone].map(|addr| addr.to_string());
    let several: Vec<&str> = addrs.iter().flat_map(|it| ["--server", it]).collect();
    for servers in [&[][..], &several] {
        let mut asking = latch(&busy, &["stats", "--format", "prometheus"])
            .args(servers)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let printed = asking.stdout.take().expect("it is piped");
        let checked = promtool
            .command()
            .args(["check", "metrics"])
            .stdin(printed)
            .output()
            .expect("it starts");
        asking.wait().expect("it is ours");
        assert_eq!(text(&checked.stderr) + &text(&checked.stdout), "");
        assert_eq!(checked.status.code(), Some(0));
    }
}

#[test]
fn a_server_without_counters_is_named_as_one() {
    let daemon = Daemon::start(&[]);
    for reply in [OLD_STATS, "error", "ok {}", "ok {\"counters\":1}"] {
        let server = server_with(reply).to_string();
        let output = prometheus(&daemon, &["--server", &server]);
        let why = "the server has no counters; it is older than this latch, or of another make";
        assert_eq!(text(&output.stderr), format!("latch: {server}: {why}\n"));
        assert_eq!(output.status.code(), Some(76), "{reply}");
        assert_eq!(value(&output, &server, "latchd_up", ""), Some(0.0));
        assert_eq!(value(&output, &server, "latchd_grants_total", ""), None);
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let daemon = Daemon::start(&[]);
    for (arguments, why) in [
        (
            &["--json", "--format", "prometheus"][..],
            "--json is --format json",
        ),
        (&["--json", "--format", "table"], "--json is --format json"),
        (&["--format", "prometheus", "k"], "takes no key"),
        (&["--format", "prometheus", "--watch"], "takes no --watch"),
        (&["--format", "xml"], "expected table, json or prometheus"),
    ] {
        let output = run(&daemon, &[&["stats"], arguments].concat());
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        let said = text(&output.stderr);
        assert!(said.contains(why), "{arguments:?}: {said}");
    }
}

#[test]
fn the_format_json_is_what_json_prints() {
    let daemon = Daemon::start(&[]);
    let printed = |arguments: &[&str]| {
        let output = run(&daemon, &[&["stats"], arguments].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    assert_eq!(printed(&["--json"]), "{\"keys\":[]}\n");
    assert_eq!(printed(&["--format", "json"]), printed(&["--json"]));
    assert_eq!(
        printed(&["--json", "--format", "json"]),
        printed(&["--json"])
    );
    assert_eq!(printed(&["--format", "table"]), printed(&[]));
}

#[test]
fn status_tells_who_holds_a_key_and_takes_nothing() {
    let daemon = Daemon::start(&[]);
    let free = run(&daemon, &["status", "k"]);
    assert_eq!(free.status.code(), Some(0));
    assert_eq!(text(&free.stdout), "key: k\nheld: false\n");
    let mut holder = daemon.connect();
    holder.request("tag", "_", "a\u{1b}[2J job");
    let grant = holder.acquire_for("k", 0, 60);
    let held = run(&daemon, &["status", "k"]);
    assert_eq!(held.status.code(), Some(1));
    let said = text(&held.stdout);
    let number = fence(&grant.token);
    for line in [
        "held: true",
        "kind: lock",
        "holders: 1",
        "waiters: 0",
        "tag: a\\x1b[2J job",
        &format!("fence: {number}"),
    ] {
        assert!(said.lines().any(|said| said == line), "{line}: {said}");
    }
    let json = text(&run(&daemon, &["status", "k", "--json"]).stdout);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json["key"], &json["held"]), (&"k".into(), &true.into()));
    assert_eq!(json["holders"][0]["tag"], "a\u{1b}[2J job");
    assert_eq!(json["holders"][0]["fence"], number.to_string());
    let left = &json["holders"][0]["lease_expires_in_s"];
    assert!(
        left.as_u64().is_some_and(|left| (1..=60).contains(&left)),
        "{json}"
    );
}

#[test]
fn a_semaphore_with_a_free_slot_is_free() {
    let daemon = Daemon::start(&[]);
    let mut holder = daemon.connect();
    for expected in [0, 1] {
        let granted = holder.request("sl", "pool", "0 2");
        assert!(granted.starts_with("ok "), "{granted}");
        assert_eq!(
            run(&daemon, &["status", "pool"]).status.code(),
            Some(expected)
        );
    }
    let (_reserved, gone) = refusing_addr();
    let gone = gone.to_string();
    let failed = run(&daemon, &["status", "pool", "--server", &gone]);
    assert_eq!(failed.status.code(), Some(69));
}
