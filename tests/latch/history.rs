//! How commands ended, and who was refused: what `latch run` tells the server, and what `latch
//! history` shows of it.

use std::process::Command;
use std::thread;

use crate::reconnecting::{listener, Peer, HELLO, TOKEN};
use crate::support::latch::{output, run, status, text};
use crate::support::{program, Daemon};

fn json(daemon: &Daemon, key: &str) -> serde_json::Value {
    let shown = run(daemon, &["history", key, "--json"]);
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    serde_json::from_slice(&shown.stdout).expect("JSON")
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
