//! Each auth token lets its clients do what is written behind it, over every door.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Instant;

use crate::http::{daemon_with_door, exchange, get_with};
use crate::support::stalls::in_time;
use crate::support::{eventually, fence, Client, Daemon, Signal, PATIENCE};

/// The tokens of an administrator, a screen on the wall, and the jobs of two teams.
const FILE: &str = "everything\nscreen see\nbuild\tuse ci/ test/  break ci/\nship  use cd/\n";

const TOKEN: &str = "0001a3f217b3c4d87f3c1f2b3e9a8d6e";

const TOKEN_AND_STATUS: &str = "0001a3f217b3c4d87f3c1f2b3e9a8d6e status=0";

/// Each request that changes a lock.
const CHANGES: [[&str; 3]; 12] = [
    ["l", "ci/a", "0"],
    ["sl", "ci/a", "0 2"],
    ["e", "ci/a", ""],
    ["se", "ci/a", "2"],
    ["w", "ci/a", "0"],
    ["r", "ci/a", TOKEN],
    ["r", "ci/a", TOKEN_AND_STATUS],
    ["sr", "ci/a", TOKEN],
    ["n", "ci/a", TOKEN],
    ["sn", "ci/a", TOKEN],
    ["adopt", "ci/a", TOKEN],
    ["keep", "ci/a", TOKEN],
];

struct House {
    daemon: Daemon,
    socket: PathBuf,
    file: PathBuf,
    _directory: tempfile::TempDir,
}

fn house() -> House {
    let directory = tempfile::tempdir().expect("there is room");
    let [file, socket] = ["tokens", "socket"].map(|name| directory.path().join(name));
    fs::write(&file, FILE).expect("there is room");
    let [tokens, unix] = [&file, &socket].map(|path| path.to_str().expect("UTF-8"));
    let daemon = Daemon::start_alone(&["--auth-token-file", tokens, "--unix", unix]);
    House {
        daemon,
        socket,
        file,
        _directory: directory,
    }
}

/// A server with the tokens and these options, and the address of its door. It has read its file.
fn door(options: &[&str]) -> (Daemon, SocketAddr) {
    let directory = tempfile::tempdir().expect("there is room");
    let file = directory.path().join("tokens");
    fs::write(&file, FILE).expect("there is room");
    let file = file.to_str().expect("UTF-8");
    daemon_with_door(&[options, &["--auth-token-file", file]].concat())
}

impl House {
    fn client(&self, token: &str) -> Client {
        let_in(self.daemon.connect(), token)
    }

    /// A client whose user is the one of the server, so an operator.
    fn operator(&self, token: &str) -> Client {
        let_in(Client::unix(&self.socket), token)
    }

    fn write(&self, content: &str) {
        fs::write(&self.file, content).expect("there is room");
    }
}

fn let_in(mut client: Client, token: &str) -> Client {
    assert_eq!(client.request("auth", "_", token), "ok");
    client
}

fn is_refused(client: &mut Client, [command, key, argument]: [&str; 3]) -> bool {
    client.request(command, key, argument) == "error_auth"
}

#[test]
fn a_token_to_see_changes_no_lock_over_any_socket() {
    let house = house();
    for mut client in [house.client("screen"), house.operator("screen")] {
        for change in CHANGES {
            assert!(is_refused(&mut client, change), "{change:?}");
        }
        assert_eq!(client.request("ping", "_", "_"), "ok");
        for line in ["_", "holders", "counters"] {
            let shown = client.request("stats", line, "_");
            assert!(shown.starts_with("ok {"), "{shown}");
        }
        let stats = client.request("stats", "_", "_");
        assert!(!stats.contains("ci/a"), "{stats}");
    }
    assert!(is_refused(
        &mut house.client("screen"),
        ["break", "ci/a", "_"]
    ));
}

#[test]
fn a_token_to_use_keys_takes_those_with_its_prefixes_alone() {
    let house = house();
    let mut build = house.client("build");
    for key in ["cd/a", "c", "CI/a", "xci/a", "other"] {
        for [command, _, argument] in CHANGES {
            let change = [command, key, argument];
            assert!(is_refused(&mut build, change), "{change:?}");
        }
    }
    let grant = build.acquire("ci/a", 0);
    build.acquire("test/", 0);
    // What belongs to its keys is shown, such as who holds them, and no other key.
    let fence = fence(&grant.token);
    for [line, key] in [["holders", "ci/a"], [&format!("holders {fence}"), "ci/a"]] {
        let shown = build.request("stats", line, key);
        assert!(shown.contains("\"key\":\"ci/a\""), "{shown}");
    }
    for [line, key] in [
        ["_", "_"],
        ["counters", "_"],
        ["holders", "_"],
        ["holders", "cd/a"],
    ] {
        assert!(is_refused(&mut build, ["stats", line, key]), "{line} {key}");
    }
    let mut ship = house.client("ship");
    assert!(is_refused(&mut ship, ["r", "ci/a", &grant.token]));
    assert_eq!(build.request("r", "ci/a", &grant.token), "ok");
}

#[test]
fn a_token_to_break_keys_needs_no_admin_token() {
    let house = house();
    let mut everything = house.client("everything");
    everything.acquire("ci/a", 0);
    everything.acquire("test/a", 0);
    for token in ["everything", "ship", "screen"] {
        assert!(is_refused(&mut house.client(token), ["break", "ci/a", "_"]));
    }
    let mut build = house.client("build");
    assert!(is_refused(&mut build, ["break", "test/a", "_"]));
    assert_eq!(build.request("break", "ci/a", "_"), "ok");
    // An operator breaks any grant, whatever its token.
    assert_eq!(house.operator("ship").request("break", "test/a", "_"), "ok");
    everything.expect_eof();
}

#[test]
fn over_http_a_token_needs_the_right_to_see() {
    let (daemon, door) = door(&[]);
    for (token, status) in [
        ("everything", 200),
        ("screen", 200),
        ("build", 403),
        ("ship", 403),
        ("screen see", 401),
    ] {
        let header = format!("Authorization: Bearer {token}\r\n");
        for path in [
            "/",
            "/page.js",
            "/metrics",
            "/v1/stats",
            "/v1/stats/holders",
            "/v1/stats/counters",
            "/v1/stats/history",
            "/v1/stats/runs",
        ] {
            assert_eq!(get_with(door, path, &header).0, status, "{token} {path}");
        }
        assert_eq!(get_with(door, "/health", &header).0, 200);
    }
    daemon.wait_for_log("right-refused peer=127.0.0.1:", PATIENCE);
}

#[test]
fn a_lock_over_http_needs_the_right_to_use_its_key() {
    let (_daemon, door) = door(&["--http-grants"]);
    let post = |token: &str, path: &str, session: &str, body: &str| {
        let len = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {door}\r\nAuthorization: Bearer {token}\r\n{session}\
             Content-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
        );
        let answer = exchange(door, request.as_bytes());
        let status = answer.split(' ').nth(1).expect("a status").to_owned();
        (status, answer)
    };
    let (status, opened) = post("screen", "/v1/sessions", "", "");
    assert_eq!(status, "200", "{opened}");
    let (_, id) = opened.split_once("\"session_id\":\"").expect("an ID");
    let (id, _) = id.split_once('"').expect("an ID");
    let claim = "{\"acquire_timeout_s\":0}";
    let token = format!("{{\"token\":\"{TOKEN}\"}}");
    let with_limit = "{\"acquire_timeout_s\":0,\"limit\":2}";
    for session in [String::new(), format!("X-Dflockd-Session: {id}\r\n")] {
        for (path, body) in [
            ("/v1/locks/ci%2Fa", claim),
            ("/v1/locks/ci%2Fa/release", &token),
            ("/v1/locks/ci%2Fa/renew", &token),
            ("/v1/semaphores/ci%2Fa", with_limit),
        ] {
            for token in ["screen", "ship"] {
                let (status, answer) = post(token, path, &session, body);
                assert_eq!(status, "403", "{token} {path}: {answer}");
            }
        }
    }
    let (status, answer) = post("build", "/v1/locks/ci%2Fa", "", claim);
    assert!(status == "200" && answer.contains("\"ok\""), "{answer}");
}

#[test]
fn refused_requests_are_logged_once_a_second() {
    let house = house();
    let mut screen = house.client("screen");
    let began = Instant::now();
    for _ in 0..500 {
        assert!(is_refused(&mut screen, ["l", "ci/a", "0"]));
    }
    let took = began.elapsed();
    let log = house.daemon.log();
    let lines: Vec<&str> = log
        .lines()
        .filter(|it| it.contains("right-refused"))
        .collect();
    assert!(
        lines[0].contains(" command=l key=ci/a held_back=0"),
        "{log}"
    );
    in_time!(lines.len() as u64 <= took.as_secs() + 1, "{log}");
    assert!(!log.contains("screen"), "{log}");
}

#[test]
fn rights_are_changed_without_a_restart() {
    let house = house();
    let mut open = house.client("ship");
    let reload = |times: usize, line: &str| {
        house.daemon.signal(Signal::HUP);
        eventually(PATIENCE, line, || {
            house.daemon.log().matches(line).count() >= times
        });
    };
    house.write("everything\nship see\n");
    reload(1, " count=2 limited=1\n");
    assert!(is_refused(&mut house.client("ship"), ["l", "cd/a", "0"]));
    // The connection stays as it is.
    open.acquire("cd/a", 0);
    // No token gets all rights because its own are misspelt, or listed twice.
    let bad = [
        "everything\nship use\n",
        "everything\nship see cd/\n",
        "everything see\nship used cd/\n",
        "everything\nship see\nship\n",
    ];
    for (times, content) in bad.into_iter().enumerate() {
        house.write(content);
        reload(times + 1, "WARN token-kept error=");
        assert!(is_refused(&mut house.client("ship"), ["l", "cd/a", "0"]));
    }
    assert!(!house.daemon.log().contains("everything"));
}

#[test]
fn a_file_without_rights_has_tokens_with_blanks_as_before() {
    let house = house();
    house.write("correct horse see battery\nold token\n");
    house.daemon.signal(Signal::HUP);
    house.daemon.wait_for_log(" count=2 limited=0\n", PATIENCE);
    for token in ["correct horse see battery", "old token"] {
        house
            .client(token)
            .acquire(token.split(' ').next().expect("a word"), 0);
    }
}
