//! What the server remembers of past holders, over every door, and what it forgets.

use serde_json::{json, Value};

use crate::http::{daemon_with_door, exchange, get_with, json as get_json};
use crate::restart::{stop, Service};
use crate::support::{eventually, Client, Daemon, PATIENCE};
use crate::SCHEME;

/// Takes a lock, and releases it with a status.
fn run(client: &mut Client, key: &str, status: u8) {
    let grant = client.acquire(key, 0);
    let argument = format!("{} status={status}", grant.token);
    assert_eq!(client.request("r", key, &argument), "ok");
}

/// What the server says of one key.
fn look(client: &mut Client, key: &str) -> Value {
    let reply = client.request("stats", "holders", key);
    let json = reply.strip_prefix("ok ").expect("an answer");
    serde_json::from_str(json).expect("JSON")
}

fn statuses(history: &Value) -> Vec<Option<u64>> {
    let past = history.as_array().expect("a list").iter();
    past.map(|it| it["status"].as_u64()).collect()
}

#[test]
fn ten_thousand_keys_with_a_status_cost_no_more_than_the_cap() {
    let tag = "\u{1}".repeat(128);
    let (daemon, door) = daemon_with_door(&["--expect", "nightly=26h", "--max-locks", "20000"]);
    let mut client = daemon.connect();
    assert_eq!(client.request("tag", "_", &tag), "ok");
    run(&mut client, "nightly", 0);
    for number in 0..10_000 {
        run(&mut client, &format!("k{number:05}{}", "x".repeat(250)), 1);
    }
    let runs = get_json(door, "/v1/stats/runs");
    let keys = runs["keys"].as_array().expect("a list");
    assert_eq!(keys.len(), 257);
    assert_eq!(keys[256]["key"], "nightly");
    assert_eq!(keys[256]["expected"]["succeeded"], true);
    assert_eq!(keys[0]["history"][0]["tag"], tag);
    // The last 256 keys of the others.
    let first = keys[0]["key"].as_str().expect("a key");
    assert!(first.starts_with("k09744"), "{first}");
}

#[test]
fn the_door_shows_and_takes_statuses() {
    let (daemon, door) = daemon_with_door(&["--http-grants", "--expect", "a\"b=90s,late=1s"]);
    let post = |path: &str, body: &str| {
        let len = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nHost: {door}\r\nContent-Length: {len}\r\n");
        let request = format!("{head}Content-Type: application/json\r\n\r\n{body}");
        exchange(door, request.as_bytes())
    };
    let granted = post("/v1/locks/k", "{}");
    let (_, body) = granted.split_once("\r\n\r\n").expect("a head");
    let granted: Value = serde_json::from_str(body).expect("JSON");
    let token = granted["token"].as_str().expect("a token");
    for status in ["256", "-1", "\"0\"", "1.5", "NaN", "true"] {
        let body = format!(r#"{{"token":"{token}","status":{status}}}"#);
        let refused = post("/v1/locks/k/release", &body);
        assert!(refused.starts_with("HTTP/1.1 400 "), "{status}: {refused}");
    }
    let body = format!(r#"{{"token":"{token}","status":5}}"#);
    let released = post("/v1/locks/k/release", &body);
    assert!(released.starts_with("HTTP/1.1 204 "), "{released}");
    let runs = get_json(door, "/v1/stats/runs");
    let keys = runs["keys"].as_array().expect("a list");
    let names: Vec<&str> = keys.iter().filter_map(|it| it["key"].as_str()).collect();
    assert_eq!(names, ["a\"b", "k", "late"]);
    assert_eq!(keys[1]["history"][0]["status"], 5);
    assert_eq!(keys[0]["expected"]["overdue"], false);
    eventually(PATIENCE, "a job is overdue", || {
        let runs = get_json(door, "/v1/stats/runs");
        runs["keys"][2]["expected"]["overdue"] == true
    });
    let (_, metrics) = get_with(door, "/metrics", "");
    assert!(metrics.contains("\nlatchd_success_age_seconds{key=\"a\\\"b\"} "));
    assert!(metrics.contains("\nlatchd_expected_seconds{key=\"a\\\"b\"} 90.000\n"));
    let counters = daemon.connect().request("stats", "counters", "_");
    let counters: Value = serde_json::from_str(&counters[3..]).expect("JSON");
    assert_eq!(
        counters["gauges"]["expected_s"],
        json!({"a\"b": 90.0, "late": 1.0})
    );
}

#[test]
fn a_status_is_in_the_log_of_grants_and_in_no_other() {
    for is_logged in [true, false] {
        let options: &[&str] = if is_logged { &["--log-grants"] } else { &[] };
        let daemon = Daemon::start_directly(SCHEME, options);
        let mut client = daemon.connect();
        run(&mut client, "k", 7);
        run(&mut client, "k", 0);
        let grant = client.acquire("k", 0);
        let keep = format!("{} 60 status=1", grant.token);
        assert_eq!(client.request("keep", "k", &keep), "ok 60");
        assert_eq!(client.request("r", "k", &grant.token), "ok");
        let expired = client.acquire_for("k", 0, 1);
        daemon.wait_for_log("expired key=k ", PATIENCE);
        let log = daemon.log();
        let has = |start: &str, end: &str| {
            let mut lines = log.lines();
            lines.any(|line| line.contains(start) && line.ends_with(end))
        };
        for (start, end) in [
            ("released key=k ", " status=7"),
            ("released key=k ", " status=0"),
            ("kept key=k ", " status=1"),
        ] {
            assert_eq!(has(start, end), is_logged, "{start} {end}: {log}");
        }
        assert_eq!(log.contains("released "), is_logged, "{log}");
        assert_eq!(client.request("r", "k", &expired.token), "error");
    }
}

#[test]
fn histories_and_expectations_begin_anew_with_the_server() {
    let service = Service::new(&["--expect", "k=26h"]);
    let first = service.start();
    let mut client = service.connect();
    run(&mut client, "k", 0);
    let grant = client.acquire_for("k", 0, 60);
    let keep = format!("{} 60 status=0", grant.token);
    assert_eq!(client.request("keep", "k", &keep), "ok 60");
    let seen = look(&mut client, "k");
    assert_eq!(statuses(&seen["history"]), [Some(0), Some(0)]);
    stop(&first);
    let _next = service.start();
    let mut client = service.connect();
    let seen = look(&mut client, "k");
    assert_eq!(seen["history"], json!([]));
    assert_eq!(seen["expected"]["succeeded"], false);
    assert_eq!(seen["keys"][0]["holder_count"], 1);
    // The work under it has ended at the old server, with a status that the new one does not know.
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    assert_eq!(look(&mut client, "k")["history"], json!([]));
}

#[test]
fn a_key_is_expected_once_and_with_a_time() {
    for (expect, why) in [
        ("k", "expected KEY=TIME, such as nightly=26h"),
        ("k=", "expected KEY=TIME, such as nightly=26h"),
        ("=1h", "expected KEY=TIME, such as nightly=26h"),
        ("k=0", "expected KEY=TIME, such as nightly=26h"),
        ("a b=1h", "expected KEY=TIME, such as nightly=26h"),
        ("k=1h,k=2h", "the key k is given twice"),
        ("k,l=1h", "expected KEY=TIME, such as nightly=26h"),
    ] {
        let mut command = Daemon::command();
        let refused = command.args(["--port", "0", "--expect", expect]).output();
        let refused = refused.expect("it starts");
        assert_eq!(refused.status.code(), Some(2), "{expect}");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            said.contains("--expect") && said.contains(why),
            "{expect}: {said}"
        );
    }
    let many: Vec<String> = (0..257).map(|number| format!("k{number}=1h")).collect();
    let mut command = Daemon::command();
    let refused = command.env("LATCHD_EXPECT", many.join(",")).output();
    let said = String::from_utf8_lossy(&refused.expect("it starts").stderr).into_owned();
    assert!(said.contains("LATCHD_EXPECT: more than 256 keys"), "{said}");
}
