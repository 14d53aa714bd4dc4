//! How commands ended, and who was refused: what `latch run` tells the server, and what `latch
//! history` shows of it.

use std::process::Command;
use std::thread;

use crate::reconnecting::{listener, Peer, HELLO, TOKEN};
use crate::support::latch::{output, run, status, text};
use crate::support::{eventually, program, Daemon, PATIENCE};

/// The lines of `latch history`, with the ages and the fences left out.
fn history(daemon: &Daemon, key: &str) -> Vec<String> {
    let shown = run(daemon, &["history", key]);
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    let shown = text(&shown.stdout);
    let plain = shown.lines().map(|line| {
        let words = line.split_whitespace();
        let words = words.filter(|word| word.parse::<u64>().is_err());
        words.collect::<Vec<_>>().join(" ")
    });
    plain.collect()
}

fn json(daemon: &Daemon, key: &str) -> serde_json::Value {
    let shown = run(daemon, &["history", key, "--json"]);
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    serde_json::from_slice(&shown.stdout).expect("JSON")
}

/// The status and the end of each past holder, the latest first.
fn ends(daemon: &Daemon, key: &str) -> Vec<(Option<u64>, String)> {
    let json = json(daemon, key);
    let past = json["history"].as_array().expect("a list").iter();
    let end = |it: &serde_json::Value| it["end"].as_str().map(str::to_owned);
    past.map(|it| (it["status"].as_u64(), end(it).expect("a word")))
        .collect()
}

fn end(status: impl Into<Option<u64>>, end: &str) -> (Option<u64>, String) {
    (status.into(), end.to_owned())
}

#[test]
fn each_command_that_ended_is_in_the_history_with_its_status() {
    let daemon = Daemon::start(&[]);
    let job = |script: &str| {
        let job = ["run", "nightly", "--tag", "job", "--", "sh", "-c", script];
        status(&daemon, &job)
    };
    assert_eq!(history(&daemon, "nightly").len(), 1);
    assert_eq!(job("exit 0"), 0);
    assert_eq!(job("exit 3"), 3);
    assert_eq!(job("kill -KILL $$"), 137);
    assert_eq!(status(&daemon, &["run", "nightly", "--", "/nosuch"]), 127);
    let expected = [
        end(127, "released"),
        end(137, "released"),
        end(3, "released"),
        end(0, "released"),
    ];
    assert_eq!(ends(&daemon, "nightly"), expected);
    let shown = history(&daemon, "nightly");
    assert_eq!(shown[0], "nightly: last held s ago");
    assert_eq!(shown[1], "ENDED WAITED HELD END STATUS FENCE TAG");
    assert_eq!(shown[5], "s ago s s released job");
    let json = json(&daemon, "nightly");
    assert_eq!(json["history"][3]["tag"], "job");
    assert!(json["expected"].is_null());
}

#[test]
fn the_json_of_a_history_is_that_of_the_server() {
    let daemon = Daemon::start(&["--expect", "k=1h"]);
    assert_eq!(status(&daemon, &["run", "k", "--", "sleep", "0.01"]), 0);
    let mut client = daemon.connect();
    client.acquire("k", 0);
    let asked = client.request("stats", "holders", "k");
    let asked = asked.strip_prefix("ok ").expect("an answer");
    let mut asked: serde_json::Value = serde_json::from_str(asked).expect("JSON");
    let mut shown = json(&daemon, "k");
    assert!(
        shown["history"][0]["held_s"].as_f64() > Some(0.0),
        "{shown}"
    );
    assert!(
        shown["keys"][0]["holders"][0]["fence"].is_string(),
        "{shown}"
    );
    for json in [&mut asked, &mut shown] {
        json["expected"]["success_age_s"].take();
        json["history"][0]["ended_ago_s"].take();
        json["keys"].take();
    }
    assert_eq!(shown, asked);
}

#[test]
fn a_kept_lock_tells_its_status_when_the_command_has_ended() {
    let daemon = Daemon::start(&["--expect", "nightly=26h"]);
    let job = [
        "run",
        "nightly",
        "--at-least",
        "60",
        "--tag",
        "job",
        "--",
        "true",
    ];
    assert_eq!(status(&daemon, &job), 0);
    assert_eq!(ends(&daemon, "nightly"), [end(0, "kept")]);
    assert_eq!(json(&daemon, "nightly")["history"][0]["tag"], "job (ended)");
    let shown = history(&daemon, "nightly");
    // The lock is held still, but the work under it has ended.
    assert_eq!(
        shown[0],
        "nightly: on time: last success s ago, expected every h"
    );
}

#[test]
fn a_job_that_did_not_run_or_not_succeed_is_named_as_such() {
    let daemon = Daemon::start(&["--expect", "nightly=1s", "--expect", "weekly=8d"]);
    let says = |key: &str, start: &str| {
        let what = format!("{key}: {start}");
        eventually(PATIENCE, &what, || {
            history(&daemon, key)[0].starts_with(&what)
        });
    };
    says(
        "weekly",
        "on time: no success since s ago, when the server started, expected every d",
    );
    says(
        "nightly",
        "did not run: no success since s ago, when the server started, expected every s",
    );
    assert_eq!(status(&daemon, &["run", "weekly", "--", "true"]), 0);
    says("weekly", "on time: last success s ago, expected every d");
    // Whoever has it holds it in vain.
    let mut client = daemon.connect();
    assert_eq!(client.request("tag", "_", "me"), "ok");
    let grant = client.acquire("nightly", 0);
    says("nightly", "did not run: no success since s ago");
    assert!(history(&daemon, "nightly")[0].ends_with("; held by me for s"));
    assert_eq!(client.request("r", "nightly", &grant.token), "ok");
    let grant = client.acquire("weekly", 0);
    says("weekly", "running: last success s ago");
    assert_eq!(client.request("r", "weekly", &grant.token), "ok");
    assert!(!history(&daemon, "weekly")[0].contains("held by"));
    let failing = ["run", "nightly", "--", "false"];
    eventually(PATIENCE, "it runs, and does not succeed", || {
        assert_eq!(status(&daemon, &failing), 1);
        history(&daemon, "nightly")[0].starts_with("nightly: did not succeed: ")
    });
}

#[test]
fn a_hold_and_a_killed_wrapper_are_shown_without_a_status() {
    let daemon = Daemon::start(&["--expect", "k=1h"]);
    let hold = ["hold", "k"];
    assert_eq!(status(&daemon, &hold), 0);
    let killed = ["run", "k", "--", "sh", "-c", "kill -KILL $PPID; sleep 9"];
    assert_eq!(status(&daemon, &killed), 137);
    let expected = [end(None, "abandoned"), end(None, "released")];
    eventually(PATIENCE, "the server notices the end", || {
        ends(&daemon, "k") == expected
    });
}

#[test]
fn a_server_that_does_not_know_the_word_is_told_no_status() {
    for abilities in ["ok adopt slots", "error"] {
        let (listener, addr) = listener();
        let server = thread::spawn(move || {
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer(abilities);
            assert!(peer.any_request().starts_with("tag _ "));
            peer.answer("ok");
            peer.grant(60);
            assert_eq!(peer.any_request(), format!("r k {TOKEN}"));
            peer.answer("ok");
            // It answers the question of `latch history` without a history.
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer(abilities);
            assert_eq!(peer.any_request(), "stats holders k");
            peer.answer(r#"ok {"keys":[]}"#);
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            // It may know statuses, but not the histories of all keys.
            peer.answer(if abilities == "error" {
                abilities
            } else {
                "ok status"
            });
            assert_eq!(peer.any_request(), "stats histories _");
            peer.answer(r#"ok {"connections":1,"locks":[],"semaphores":[]}"#);
        });
        let mut command = Command::new(program("latch"));
        command.args(["run", "k", "--", "false"]);
        let ended = output(command.env("LATCH_SERVER", addr.to_string()));
        assert_eq!(ended.status.code(), Some(1), "{}", text(&ended.stderr));
        for asked in [&["history", "k"][..], &["history", "--check"]] {
            let mut command = Command::new(program("latch"));
            let command = command.args(asked).env("LATCH_SERVER", addr.to_string());
            let refused = output(command);
            assert_eq!(refused.status.code(), Some(69));
            let said = text(&refused.stderr);
            assert!(said.contains("the server is too old for this"), "{said}");
        }
        server.join().expect("it was asked");
    }
}

#[test]
fn a_tag_and_a_key_hide_nothing_from_a_terminal() {
    let daemon = Daemon::start(&[]);
    let tag = format!("\u{1b}[2J\"{}", "x".repeat(123));
    let job = ["run", "k\u{202e}", "--tag", &tag, "--", "true"];
    assert_eq!(status(&daemon, &job), 0);
    let table = run(&daemon, &["history", "k\u{202e}"]).stdout;
    assert!(text(&table).contains("\\x1b[2J"), "{}", text(&table));
    let json = run(&daemon, &["history", "k\u{202e}", "--json"]).stdout;
    for shown in [text(&table), text(&json)] {
        assert!(!shown.contains(['\u{1b}', '\u{202e}']), "{shown:?}");
    }
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json["history"][0]["tag"], tag);
}

/// What `latch` prints with these arguments, and its exit status.
fn shown(daemon: &Daemon, arguments: &[&str]) -> (String, Option<i32>) {
    let shown = run(daemon, arguments);
    (text(&shown.stdout).to_owned(), shown.status.code())
}

/// The keys in the first column of a table, in order.
fn keys(table: &str) -> Vec<&str> {
    let lines = table.lines().skip(1);
    lines.filter_map(|line| line.split(' ').next()).collect()
}

#[test]
fn a_job_that_was_refused_shows_when_and_who_held_the_lock() {
    let daemon = Daemon::start(&[]);
    let latch = program("latch");
    let skipping = format!("'{latch}' run nightly --timeout 0 --busy-ok --tag db2 -- true");
    let job = [
        "run", "nightly", "--tag", "db1", "--", "sh", "-c", &skipping,
    ];
    assert_eq!(status(&daemon, &job), 0);
    let lines = history(&daemon, "nightly");
    assert_eq!(lines[0], "nightly: last held s ago");
    assert_eq!(lines[1], "ENDED WAITED HELD END STATUS FENCE TAG");
    assert_eq!(lines[2], "s ago s s released db1");
    assert_eq!(lines[3], "s ago s s busy - - db2; held by db1");
    assert_eq!(lines.len(), 4);
    // The job has ended with success since then.
    let (table, ended) = shown(&daemon, &["history", "--check"]);
    assert_eq!((&*table, ended), ("", Some(0)));
    let mut client = daemon.connect();
    client.acquire("held", 0);
    let waiting = [
        "run",
        "held",
        "--timeout",
        "1",
        "--tag",
        "late",
        "--",
        "true",
    ];
    assert_eq!(status(&daemon, &waiting), 75);
    let lines = history(&daemon, "held");
    assert_eq!(lines[0], "held: last refused s ago");
    assert_eq!(lines[2], "s ago s s gave-up - - late; held by 127.0.0.1");
    let json = json(&daemon, "held");
    assert_eq!(json["refused"][0]["holder"], "127.0.0.1");
    assert_eq!(json["refused"][0]["tag"], "late");
}

#[test]
fn all_keys_are_listed_with_the_worst_first_and_a_check_shows_what_is_wrong() {
    let daemon = Daemon::start(&["--expect", "z-overdue=1s", "--expect", "b-fine=1d"]);
    assert_eq!(shown(&daemon, &["history"]).1, Some(0));
    let job = |key: &str, command: &str| status(&daemon, &["run", key, "--", command]);
    assert_eq!(job("b-fine", "true"), 0);
    assert_eq!(job("y-failed", "true"), 0);
    assert_eq!(job("y-failed", "false"), 1);
    assert_eq!(job("a-fine", "false"), 1);
    assert_eq!(job("a-fine", "true"), 0);
    assert_eq!(job("x-refused", "true"), 0);
    let mut client = daemon.connect();
    let grant = client.acquire("x-refused", 0);
    client.acquire("c-unknown", 0);
    for key in ["x-refused", "c-unknown"] {
        let mut other = daemon.connect();
        assert_eq!(other.request("l", key, "0"), "timeout");
    }
    // Nobody tells a status of this key, so its client may just close the connection.
    assert_eq!(client.request("r", "x-refused", &grant.token), "ok");
    drop(client);
    let in_order = [
        "z-overdue",
        "y-failed",
        "c-unknown",
        "x-refused",
        "a-fine",
        "b-fine",
    ];
    eventually(PATIENCE, "the first key is overdue", || {
        keys(&shown(&daemon, &["history"]).0) == in_order
    });
    let (table, ended) = shown(&daemon, &["history"]);
    assert_eq!(ended, Some(0));
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|it| it.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines[0],
        ["KEY", "STATE", "SUCCEEDED", "REFUSED", "END", "TAG"]
    );
    assert_eq!(lines[1][..5], ["z-overdue", "did", "not", "run", "-"]);
    assert_eq!(lines[2][..2], ["y-failed", "failed"]);
    assert_eq!(lines[4][..2], ["x-refused", "refused"]);
    assert_eq!(
        lines[4][4..],
        [
            "ago",
            lines[4][5],
            "s",
            "ago",
            "busy",
            "127.0.0.1;",
            "held",
            "by",
            "127.0.0.1"
        ]
    );
    assert_eq!(lines[5][..2], ["a-fine", "-"]);
    assert_eq!(lines[6][..3], ["b-fine", "on", "time"]);
    let (table, ended) = shown(&daemon, &["history", "--check"]);
    assert_eq!(
        (keys(&table), ended),
        (vec!["z-overdue", "y-failed"], Some(1))
    );
    let (json, ended) = shown(&daemon, &["history", "--check", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (json["keys"].as_array().map(Vec::len), ended),
        (Some(2), Some(1))
    );
    assert_eq!(json["keys"][0]["key"], "z-overdue");
    for (key, expected) in [("y-failed", 1), ("a-fine", 0), ("nosuch", 0)] {
        assert_eq!(
            shown(&daemon, &["history", key, "--check"]).1,
            Some(expected),
            "{key}"
        );
    }
    // A server that cannot be asked is no good news.
    let servers = format!("{},127.0.0.1:1", daemon.addr());
    let asked = ["history", "--check", "--shards", &servers];
    assert_eq!(shown(&daemon, &asked).1, Some(69));
}
