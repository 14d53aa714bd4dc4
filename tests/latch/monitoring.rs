//! What monitoring reads: `latch stats --json` and `latch status`.

use crate::support::latch::{run, text};
use crate::support::silent::refusing_addr;
use crate::support::{fence, Daemon};

#[test]
fn options_that_contradict_each_other_are_refused() {
    let daemon = Daemon::start(&[]);
    for (arguments, why) in [
        (
            &["--json", "--format", "table"][..],
            "--json is --format json",
        ),
        (&["--format", "xml"], "expected table or json"),
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
    let server = daemon.addr();
    let expected = format!("key: k\nheld: false\nserver: {server}\n");
    assert_eq!(text(&free.stdout), expected);
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
    assert_eq!(json["server"], server.to_string());
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
