//! What the server remembers of past holders, over every door, and what it forgets: never more than
//! a bounded number of keys.

use crate::http::{daemon_with_door, json as get_json};
use crate::support::Client;

/// Takes a lock, and releases it with a status.
fn run(client: &mut Client, key: &str, status: u8) {
    let grant = client.acquire(key, 0);
    let argument = format!("{} status={status}", grant.token);
    assert_eq!(client.request("r", key, &argument), "ok");
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
