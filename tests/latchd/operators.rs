//! What an operator does about a holder.

use std::fs;

use crate::support::{eventually, parse_grant, Client, Daemon, PATIENCE};

/// A daemon with a Unix socket and an admin token.
fn daemon(dir: &tempfile::TempDir) -> Daemon {
    let token = dir.path().join("admin");
    fs::write(&token, "open-sesame\n").expect("the directory is ours");
    let socket = dir.path().join("socket");
    Daemon::start(&[
        "--unix",
        socket.to_str().expect("UTF-8"),
        "--admin-token-file",
        token.to_str().expect("UTF-8"),
    ])
}

/// The fence in a token, as `break` takes it.
fn fence_of(token: &str) -> String {
    let fence = u64::from_str_radix(&token[..16], 16).expect("hex digits");
    fence.to_string()
}

fn breaks(operator: &mut Client, argument: &str) -> String {
    operator.request("break", "k", argument)
}

#[test]
fn a_broken_grant_passes_to_the_next_waiter() {
    let dir = tempfile::tempdir().expect("a directory");
    let daemon = daemon(&dir);
    let (mut holder, mut waiter) = (daemon.connect(), daemon.connect());
    let first = holder.acquire_for("k", 0, 60);
    waiter.send("l\nk\n60 60\n");
    let mut operator = Client::unix(&dir.path().join("socket"));
    eventually(PATIENCE, "it waits", || {
        let queues = operator.request("stats", "holders", "k");
        queues.contains("\"waiter_count\":1")
    });
    // The operator's own process is shown, since it is on the same host.
    assert_eq!(operator.request("l", "own", "0").get(..3), Some("ok "));
    let own = operator.request("stats", "holders", "own");
    assert!(own.contains("\"peer\":\"unix pid "), "{own}");
    assert_eq!(breaks(&mut operator, "1"), "error");
    assert_eq!(breaks(&mut operator, &fence_of(&first.token)), "ok");
    let second = parse_grant(&waiter.line(), "ok").expect("its turn");
    assert_eq!(holder.request("n", "k", &first.token), "error");
    assert_eq!(holder.request("r", "k", &first.token), "error");
    assert_eq!(breaks(&mut operator, "_"), "ok");
    assert_eq!(breaks(&mut operator, "_"), "error");
    assert_eq!(waiter.request("n", "k", &second.token), "error");
    let broken = format!("broken key=k fence={}", fence_of(&first.token));
    eventually(PATIENCE, "it is logged", || daemon.log().contains(&broken));
}

#[test]
fn the_admin_token_breaks_grants_over_the_network() {
    let dir = tempfile::tempdir().expect("a directory");
    let daemon = daemon(&dir);
    let (mut holder, mut operator) = (daemon.connect(), daemon.connect());
    let grant = holder.acquire_for("k", 0, 60);
    for argument in ["_", "_ sesame", "_ open-sesame2"] {
        assert_eq!(breaks(&mut operator, argument), "error_auth");
    }
    assert_eq!(holder.request("n", "k", &grant.token), "ok 33");
    assert_eq!(breaks(&mut operator, "_ open-sesame"), "ok");
    assert_eq!(holder.request("n", "k", &grant.token), "error");
}
