//! What the log tells of grants, with --log-grants and without, and at the end of the server.

use std::time::{Duration, Instant};

use crate::support::{eventually, fence, parse_grant, Client, Daemon, Signal, PATIENCE};
use crate::SCHEME;

/// The lines of the log that begin with one of these levels and verbs, without the addresses of
/// clients and without the times.
fn lines(daemon: &Daemon, starts: &[&str]) -> Vec<String> {
    let log = daemon.log();
    let lines = log.lines().filter(|line| {
        let is_start = |start: &&str| line.starts_with(&format!("{start} "));
        starts.iter().any(is_start)
    });
    let comparable = |line: &str| {
        let fields = line.split(' ').map(|field| match field.split_once('=') {
            Some((name @ ("peer" | "holder"), value)) if value.starts_with("127.0.0.1:") => {
                name.to_owned()
            }
            Some((name @ ("waited_ms" | "held_ms"), value)) if value.parse::<u64>().is_ok() => {
                name.to_owned()
            }
            _ => field.to_owned(),
        });
        fields.collect::<Vec<_>>().join(" ")
    };
    lines.map(comparable).collect()
}

fn milliseconds(daemon: &Daemon, start: &str, name: &str) -> u64 {
    let log = daemon.log();
    let line = log.lines().find(|line| line.starts_with(start));
    let line = line.unwrap_or_else(|| panic!("no {start} in {log}"));
    let value = line.split(&format!(" {name}=")).nth(1).expect("it has it");
    let digits = value.split(' ').next().expect("a number");
    digits.parse().expect("a number")
}

fn tagged(daemon: &Daemon, tag: &str) -> Client {
    let mut client = daemon.connect();
    assert_eq!(client.request("tag", "_", tag), "ok");
    client
}

#[test]
fn each_grant_and_each_end_is_a_line_in_order() {
    let daemon = Daemon::start_directly(SCHEME, &["--log-grants", "--log-timestamps", "never"]);
    let (mut first, mut second) = (tagged(&daemon, "a b"), tagged(&daemon, "b"));
    let mut third = daemon.connect();
    let released = first.acquire("k", 0);
    second.send("l\nk\n60\n");
    daemon.wait_for_waiters("k", 1);
    assert_eq!(third.request("l", "k", "1"), "timeout");
    assert_eq!(first.request("r", "k", &released.token), "ok");
    let line = second.line();
    let abandoned = parse_grant(&line, "ok").expect("granted");
    drop(second);
    let expired = third.acquire_for("k", 60, 1);
    let broken = first.acquire_for("k", 60, 60);
    assert_eq!(third.request("break", "k", "_"), "error_auth");
    let all = [
        "INFO granted",
        "INFO gave-up",
        "INFO released",
        "INFO abandoned",
        "INFO expired",
    ];
    let [released, abandoned, expired, broken] =
        [released, abandoned, expired, broken].map(|grant| fence(&grant.token));
    let expected = [
        format!("INFO granted key=k fence={released} conn=1 tag=\"a b\" peer waited_ms"),
        "INFO gave-up key=k conn=3 tag=\"\" peer waited_ms".to_owned(),
        format!("INFO released key=k fence={released} conn=1 tag=\"a b\" peer held_ms"),
        format!("INFO granted key=k fence={abandoned} conn=2 tag=b peer waited_ms"),
        format!("INFO abandoned key=k fence={abandoned} conn=2 tag=b peer held_ms"),
        format!("INFO granted key=k fence={expired} conn=3 tag=\"\" peer waited_ms"),
        format!("INFO expired key=k fence={expired} conn=3 tag=\"\" peer held_ms"),
        format!("INFO granted key=k fence={broken} conn=1 tag=\"a b\" peer waited_ms"),
    ];
    eventually(PATIENCE, "the last grant is logged", || {
        lines(&daemon, &all).len() == expected.len()
    });
    assert_eq!(lines(&daemon, &all), expected);
    assert!(milliseconds(&daemon, "INFO gave-up ", "waited_ms") >= 1000);
    assert!(milliseconds(&daemon, "INFO released ", "held_ms") >= 1000);
    let waited = milliseconds(
        &daemon,
        &format!("INFO granted key=k fence={abandoned} "),
        "waited_ms",
    );
    assert!(waited >= 1000);
    assert!(milliseconds(&daemon, "INFO expired ", "held_ms") >= 1000);
}

#[test]
fn expiries_are_one_warning_a_second_without_the_option() {
    const COUNT: u64 = 50;
    let daemon = Daemon::start_directly(SCHEME, &["--log-timestamps", "never"]);
    let began = Instant::now();
    let mut client = tagged(&daemon, "job");
    for number in 0..COUNT {
        client.acquire_for(&format!("k{number}"), 0, 1);
    }
    let expiry_count = || daemon.connect().request("stats", "counters", "_");
    eventually(PATIENCE, "all leases have ended", || {
        expiry_count().contains(&format!("\"expiries\":{COUNT},"))
    });
    std::thread::sleep(Duration::from_secs(1));
    let last = client.acquire_for("last", 0, 1);
    daemon.wait_for_log("WARN expired key=last ", PATIENCE);
    let lines = lines(&daemon, &["WARN expired"]);
    assert!(
        lines.len() as u64 <= began.elapsed().as_secs() + 1,
        "{lines:?}"
    );
    let fence = fence(&last.token);
    let start =
        format!("WARN expired key=last fence={fence} conn=1 tag=job peer held_ms held_back=");
    assert!(
        lines.last().is_some_and(|last| last.starts_with(&start)),
        "{lines:?}"
    );
    let held_back = lines.iter().map(|line| {
        let (_, count) = line.split_once("held_back=").expect("it is there");
        count.parse::<u64>().expect("a number")
    });
    assert_eq!(held_back.sum::<u64>() + lines.len() as u64, COUNT + 1);
    assert!(!daemon.log().contains("granted"), "{}", daemon.log());
}

#[test]
fn the_first_holders_that_the_end_waits_for_are_named() {
    let daemon = Daemon::start_directly(
        SCHEME,
        &["--log-timestamps", "never", "--shutdown-timeout", "3"],
    );
    let mut client = tagged(&daemon, "job");
    let grants: Vec<_> = (0..12)
        .map(|number| client.acquire_for(&format!("k{number}"), 0, 60))
        .collect();
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("INFO waiting-for key=k9 ", PATIENCE);
    assert_eq!(client.request("r", "k0", &grants[0].token), "ok");
    assert!(daemon.wait_exit(PATIENCE).is_some());
    let named = |verb: &str, numbers: std::ops::Range<usize>| -> Vec<String> {
        let line = |number: usize| {
            let fence = fence(&grants[number].token);
            format!("{verb} key=k{number} fence={fence} conn=1 tag=job peer")
        };
        numbers.map(line).collect()
    };
    let mut expected = vec!["INFO draining holders=12 awaited=12".to_owned()];
    expected.extend(named("INFO waiting-for", 0..10));
    expected.push("WARN stopping reason=shutdown-timeout holders=11".to_owned());
    expected.extend(named("WARN cut-off", 1..11));
    let starts = [
        "INFO draining",
        "INFO waiting-for",
        "WARN stopping",
        "WARN cut-off",
    ];
    assert_eq!(lines(&daemon, &starts), expected);
}

#[test]
fn a_handover_names_only_those_who_cannot_adopt() {
    let dir = tempfile::tempdir().expect("a directory");
    let [file, socket] = ["state", "socket"].map(|name| dir.path().join(name));
    let file = file.to_str().expect("UTF-8");
    let options = ["--state-file", file, "--log-timestamps", "never"];
    let daemon = Daemon::start_unix(&socket, &options);
    let [mut adopting, mut plain] = [(); 2].map(|()| Client::unix(&socket));
    assert!(adopting.request("hello", "_", "adopt").starts_with("ok "));
    adopting.acquire_for("adopted", 0, 60);
    let grant = plain.acquire_for("k", 0, 60);
    daemon.signal(Signal::TERM);
    let fence = fence(&grant.token);
    daemon.wait_for_log(&format!("INFO waiting-for key=k fence={fence} "), PATIENCE);
    assert_eq!(plain.request("r", "k", &grant.token), "ok");
    assert!(daemon.wait_exit(PATIENCE).is_some());
    assert_eq!(
        lines(&daemon, &["INFO draining"]),
        ["INFO draining holders=2 awaited=1"]
    );
    assert_eq!(lines(&daemon, &["INFO waiting-for"]).len(), 1);
}
