//! Locks that the server keeps without a process: `run --at-least`, `reserve`, `acquire`.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::reconnecting::{guard_of, listener, Peer, HELLO, TOKEN};
use crate::support::latch::{is_held, output, run, status, text};
use crate::support::silent::free_port;
use crate::support::wire_cutter::WireCutter;
use crate::support::{eventually, program, Daemon, Scheme, PATIENCE};
use latchd::client::{Address, Client, Error, KeepLimit};

#[test]
fn a_short_job_keeps_its_lock_for_the_interval() {
    let daemon = Daemon::start(&[]);
    let began = Instant::now();
    let job = [
        "run",
        "k",
        "-n",
        "--busy-ok",
        "--at-least",
        "3",
        "--",
        "echo",
        "ran",
    ];
    assert_eq!(text(&run(&daemon, &job).stdout), "ran\n");
    // The second host comes when the job is over, and does nothing.
    let second = run(&daemon, &job);
    assert_eq!(
        (second.status.code(), &*text(&second.stdout)),
        (Some(0), "")
    );
    let stats = daemon.stats();
    assert_eq!(stats["locks"][0]["owner_conn_id"], 0, "{stats}");
    eventually(PATIENCE, "the interval ends", || !is_held(&daemon, "k"));
    assert!(began.elapsed() >= Duration::from_secs(2));
    assert_eq!(text(&run(&daemon, &job).stdout), "ran\n");
}

#[test]
fn a_job_that_outlasts_the_interval_releases_at_its_end() {
    let daemon = Daemon::start(&[]);
    let job = [
        "run",
        "k",
        "--at-least",
        "1",
        "--",
        "sh",
        "-c",
        "sleep 1.2; exit 3",
    ];
    assert_eq!(status(&daemon, &job), 3);
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn a_server_that_does_not_keep_is_noticed_before_the_job() {
    let limits: [&[&str]; 3] = [
        &["--max-kept", "0"],
        &["--max-kept", "1"],
        &["--max-keep-time", "59"],
    ];
    for limits in limits {
        let daemon = Daemon::start(limits);
        if limits[1] == "1" {
            assert_eq!(status(&daemon, &["acquire", "other"]), 0);
        }
        let job = ["run", "k", "--at-least", "60", "--", "echo", "ran"];
        let refused = run(&daemon, &job);
        assert_eq!(refused.status.code(), Some(69), "{limits:?}");
        assert_eq!(text(&refused.stdout), "", "{limits:?}");
        let said = text(&refused.stderr);
        // The server does not say whether it keeps no grant at all, or not for so long.
        let why = match limits[1] {
            "1" => "the server already keeps as many locks as --max-kept allows; see --max-kept",
            _ => "the server keeps no lock without a connection, or not for that long; see --max-kept",
        };
        assert!(said.contains(why), "{said}");
        assert!(!is_held(&daemon, "k"));
        // The other commands that have a lock kept say the same.
        let others: [&[&str]; 2] = [&["acquire", "k"], &["reserve", "k", "--for", "60"]];
        let are_refused = |others: &&[&str]| limits[0] == "--max-kept" || others[0] == "reserve";
        for arguments in others.into_iter().filter(are_refused) {
            let output = run(&daemon, arguments);
            assert_eq!(output.status.code(), Some(69), "{limits:?} {arguments:?}");
            assert_eq!(text(&output.stderr), said, "{limits:?} {arguments:?}");
            assert!(!is_held(&daemon, "k"));
        }
    }
}

/// Until the end of the job, the lock belongs to the connection: it ends with `latch run`.
#[test]
fn a_lock_to_be_kept_is_not_kept_during_the_job() {
    let daemon = Daemon::start(&[]);
    let look = "latch status k --json";
    let job = ["run", "k", "--at-least", "60", "--", "sh", "-c", look];
    let seen = run(&daemon, &job);
    let after = run(&daemon, &["status", "k", "--json"]);
    for (seen, is_kept) in [(seen, false), (after, true)] {
        let json: serde_json::Value = serde_json::from_slice(&seen.stdout).expect("JSON");
        assert_eq!(json["holders"][0]["kept"], is_kept, "{json}");
    }
}

#[test]
fn a_server_that_cannot_keep_is_refused_before_the_job() {
    let commands: [&[&str]; 3] = [
        &[
            "run",
            "k",
            "--at-least",
            "60",
            "--",
            "touch",
            "/nowhere/ran",
        ],
        &["acquire", "k"],
        &["reserve", "k", "--for", "1h"],
    ];
    for arguments in commands {
        let (listener, addr) = listener();
        let server = thread::spawn(move || {
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer("error");
            assert!(peer.any_request().starts_with("tag _ "));
            peer.answer("ok");
            peer.grant(60);
        });
        let mut command = Command::new(program("latch"));
        command
            .args(arguments)
            .env("LATCH_SERVER", addr.to_string());
        let refused = output(&mut command);
        server.join().expect("it was asked");
        assert_eq!(refused.status.code(), Some(69), "{arguments:?}");
        let said = text(&refused.stderr);
        assert!(said.contains("the server is too old for this"), "{said}");
    }
}

/// The server may have kept the lock before its answer was lost, and only this process knows the
/// token.
#[test]
fn a_lock_kept_without_an_answer_is_released_by_its_token() {
    let commands: [&[&str]; 2] = [
        &["acquire", "k", "--lease", "3600"],
        &["reserve", "k", "--for", "1h"],
    ];
    for arguments in commands {
        for is_there in [true, false] {
            let (listener, addr) = listener();
            let server = thread::spawn(move || {
                let mut peer = Peer::accept(&listener);
                assert!(peer.request().starts_with("tag _ "));
                peer.answer("ok");
                peer.grant(3600);
                assert_eq!(peer.any_request(), format!("keep k {TOKEN} 3600"));
                if is_there {
                    drop(peer);
                    let mut next = Peer::accept(&listener);
                    assert_eq!(next.any_request(), format!("r k {TOKEN}"));
                    next.answer("ok");
                } else {
                    drop(listener);
                }
            });
            let mut command = Command::new(program("latch"));
            let command = command.args(arguments);
            let failed = output(command.env("LATCH_SERVER", addr.to_string()));
            server.join().expect("it was asked");
            assert_eq!(failed.status.code(), Some(69), "{arguments:?}");
            let said = text(&failed.stderr);
            let expected = format!("k at {addr}: the server closed the connection");
            assert!(said.contains(&expected), "{said}");
            assert!(!said.contains("TLS"), "{said}");
            assert_eq!(said.contains(TOKEN), !is_there, "{said}");
        }
    }
}

#[test]
fn a_reservation_is_given_back_as_it_says() {
    let daemon = Daemon::start(&[]);
    let reserved = run(
        &daemon,
        &[
            "reserve",
            "the'bench",
            "--for",
            "2h",
            "--tag",
            "anna: bench",
        ],
    );
    assert_eq!(reserved.status.code(), Some(0), "{reserved:?}");
    let said = text(&reserved.stdout);
    let value = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{said}")).to_owned()
    };
    assert_eq!(value("key: "), "the'bench");
    assert_eq!(value("seconds: "), "7200");
    let shown = text(&run(&daemon, &["stats", "the'bench"]).stdout);
    assert!(
        shown.contains("anna: bench") && shown.contains("2 h"),
        "{shown}"
    );
    assert_eq!(
        status(&daemon, &["run", "the'bench", "-n", "--", "true"]),
        75
    );
    // By a shell, whatever is in the key.
    let mut shell = Command::new("sh");
    let release = value("release: ");
    shell.arg("-c").arg(&release);
    // Where it is pasted, nothing names the server.
    shell.env_remove("LATCH_SERVER");
    assert_eq!(output(&mut shell).status.code(), Some(0), "{release}");
    assert!(!is_held(&daemon, "the'bench"));
}

#[test]
fn a_reservation_for_too_long_is_refused_and_released() {
    let daemon = Daemon::start(&["--max-keep-time", "3600"]);
    let refused = run(&daemon, &["reserve", "k", "--for", "2h"]);
    assert_eq!(refused.status.code(), Some(69));
    let said = text(&refused.stderr);
    assert!(said.contains("--max-keep-time"), "{said}");
    eventually(PATIENCE, "it is free", || !is_held(&daemon, "k"));
}

#[test]
fn an_acquired_lock_is_renewed_and_released_by_its_token() {
    let daemon = Daemon::start(&[]);
    let acquired = run(
        &daemon,
        &["acquire", "pool", "--limit", "2", "--lease", "60"],
    );
    let token = text(&acquired.stdout).trim().to_owned();
    let renewed = run(
        &daemon,
        &["renew", "pool", &token, "--limit", "2", "--lease", "600"],
    );
    assert_eq!(text(&renewed.stdout), "600\n");
    assert_eq!(
        status(&daemon, &["release", "pool", &token, "--limit", "2"]),
        0
    );
    assert_eq!(
        status(&daemon, &["release", "pool", &token, "--limit", "2"]),
        70
    );
}

#[test]
fn a_guard_leaves_its_lock_to_the_server() {
    let daemon = Daemon::start(&["--max-kept", "1"]);
    let client = Client::new([Address::Tcp(daemon.addr().to_string())]);
    let guard = |key| client.lock(key).keepable().acquire().expect("it is free");
    let first = guard("a");
    let token = first.token();
    first.keep_for(Duration::from_secs(60)).expect("it is kept");
    assert!(is_held(&daemon, "a"));
    let second = guard("b").keep_for(Duration::from_secs(60));
    assert!(
        matches!(second, Err(Error::NotKept(_, KeepLimit::Count))),
        "{second:?}"
    );
    assert!(!is_held(&daemon, "b"));
    guard("b").keep_for(Duration::ZERO).expect("it is released");
    assert!(!is_held(&daemon, "b"));
    assert_eq!(status(&daemon, &["release", "a", &token.to_string()]), 0);
}

#[test]
fn a_lock_that_the_server_does_not_keep_is_released_at_once() {
    for (hello, is_asked) in [("ok adopt", true), ("ok", false)] {
        let (listener, addr) = listener();
        let server = thread::spawn(move || {
            let mut peer = Peer::accept(&listener);
            assert_eq!(peer.any_request(), HELLO);
            peer.answer(hello);
            peer.grant(3600);
            if is_asked {
                assert_eq!(peer.any_request(), "tag _ (ended)");
                peer.answer("ok");
                assert_eq!(peer.any_request(), format!("keep k {TOKEN} 60"));
                peer.answer("error_max_locks");
            }
            assert_eq!(peer.any_request(), format!("r k {TOKEN}"));
            peer.answer("ok");
        });
        let kept = guard_of(&addr.to_string()).keep_for(Duration::from_secs(60));
        if is_asked {
            let is_full = matches!(kept, Err(Error::NotKept(_, KeepLimit::Count)));
            assert!(is_full, "{kept:?}");
        } else {
            assert!(matches!(kept, Err(Error::Unsupported(_))), "{kept:?}");
        }
        server.join().expect("it was asked");
    }
}

/// The command ends while the way to the server is cut.
#[test]
fn a_lock_is_kept_over_a_new_connection() {
    let daemon = Daemon::start_directly(Scheme::Plain, &["--no-auto-release-on-disconnect"]);
    let proxy = WireCutter::before(daemon.addr());
    let client = Client::new([Address::Tcp(proxy.addr().to_string())]);
    let guard = client.lock("k").acquire().expect("it is free");
    proxy.wire().cut();
    guard.keep_for(Duration::from_secs(60)).expect("it is kept");
    let stats = daemon.stats();
    assert_eq!(stats["locks"][0]["owner_conn_id"], 0, "{stats}");
    let left = stats["locks"][0]["lease_expires_in_s"].as_f64();
    assert!(left.is_some_and(|left| left > 40.0), "{stats}");
}

/// A lease of zero would be refused.
#[test]
fn a_lock_whose_time_is_over_before_it_is_kept_is_kept_for_a_second() {
    const TIME: Duration = Duration::from_millis(300);
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        let mut first = Peer::accept(&listener);
        first.grant(60);
        assert_eq!(first.any_request(), "tag _ (ended)");
        thread::sleep(TIME);
        drop(first);
        let mut second = Peer::accept(&listener);
        let mut request = second.request();
        while request == "tag _ (ended)" {
            second.answer("ok");
            request = second.any_request();
        }
        assert_eq!(request, format!("keep k {TOKEN} 1"));
        second.answer("ok 1");
    });
    guard_of(&addr.to_string()).keep_for(TIME).expect("kept");
    server.join().expect("it was asked");
}

#[test]
fn a_kept_lock_is_renewed_and_adopted_by_its_token() {
    let daemon = Daemon::start(&[]);
    let client = Client::new([Address::Tcp(daemon.addr().to_string())]);
    let guard = client.lock("k").acquire().expect("it is free");
    let token = guard.token();
    guard.keep_for(Duration::from_secs(60)).expect("it is kept");
    let lock = client.lock("k").lease(Duration::from_secs(300));
    assert_eq!(lock.renew(token).expect("held").as_secs(), 300);
    let guard = lock.adopt(token).expect("held");
    assert!(guard.is_held() && guard.renew());
    assert_ne!(daemon.stats()["locks"][0]["owner_conn_id"], 0);
    drop(guard);
    assert!(!is_held(&daemon, "k"));
    assert!(matches!(lock.adopt(token), Err(Error::Refused(_))));
    assert!(matches!(lock.renew(token), Err(Error::Refused(_))));
}

#[test]
fn a_kept_lock_says_whether_its_command_has_ended() {
    let daemon = Daemon::start(&[]);
    let job = [
        "run",
        "job",
        "--at-least",
        "600",
        "--tag",
        "backup",
        "--",
        "true",
    ];
    assert_eq!(status(&daemon, &job), 0);
    let reserve = ["reserve", "board", "--for", "1h", "--tag", "Anna, tests"];
    assert_eq!(status(&daemon, &reserve), 0);
    for (key, tag, word) in [
        ("job", "backup (ended)", "kept"),
        ("board", "Anna, tests", "reserved"),
    ] {
        let shown = run(&daemon, &["status", key]);
        let shown = text(&shown.stdout);
        assert!(
            shown.contains(&format!("\ntag: {tag}\nslots: 1 {word}\n")),
            "{shown}"
        );
        let json = run(&daemon, &["status", key, "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
        assert_eq!(json["holders"][0]["kept"], true, "{json}");
        let table = run(&daemon, &["stats", key]);
        assert!(
            text(&table.stdout).contains(&format!("  1 {word}  ")),
            "{table:?}"
        );
        let busy = run(&daemon, &["run", key, "-n", "--", "true"]);
        let word = word.replace("reserved", "kept without a process");
        let expected = format!("held by {tag} ({word}) for ");
        assert!(text(&busy.stderr).contains(&expected), "{busy:?}");
    }
}

#[test]
fn an_age_is_written_in_one_way() {
    let daemon = Daemon::start(&[]);
    assert_eq!(status(&daemon, &["reserve", "k", "--for", "90"]), 0);
    let shown = run(&daemon, &["status", "k"]);
    let shown = text(&shown.stdout);
    let ages = shown.lines().filter_map(|line| line.strip_prefix("age: "));
    let leases = shown
        .lines()
        .filter_map(|line| line.strip_prefix("lease: "));
    let times: Vec<&str> = ages.chain(leases).collect();
    assert_eq!(times.len(), 2, "{shown}");
    assert!(times.iter().all(|time| time.ends_with(" s")), "{shown}");
}

#[test]
fn a_reservation_is_given_back_with_secrets_and_sockets() {
    let dir = tempfile::tempdir().expect("there is room for a directory");
    let (socket, secret) = (dir.path().join("sck"), dir.path().join("secret"));
    std::fs::write(&secret, "s3cret\n").expect("it is ours");
    let _daemon = Daemon::start(&[
        "--unix",
        socket.to_str().expect("text"),
        "--auth-token-file",
        secret.to_str().expect("text"),
    ]);
    let latch = || {
        let mut latch = Command::new(program("latch"));
        latch.env_remove("LATCH_SERVER").current_dir(dir.path());
        latch
    };
    let mut reserve = latch();
    reserve.args(["reserve", "a\u{1}b'", "--for", "60", "--json", "--shared"]);
    reserve.args(["--server", "./sck"]);
    let reserved = output(reserve.env("LATCH_AUTH_TOKEN_FILE", "secret"));
    let json: serde_json::Value = serde_json::from_slice(&reserved.stdout).expect("JSON");
    assert_eq!(json["key"], "a\u{1}b'");
    assert_eq!(json["lease_s"], 60);
    let release = json["release"].as_str().expect("a command").to_owned();
    let mut shell = Command::new("bash");
    shell.args(["-c", &release]).current_dir("/");
    let released = output(&mut shell);
    assert_eq!(released.status.code(), Some(0), "{release}: {released:?}");
}

#[test]
fn a_unit_may_release_what_is_not_held() {
    let daemon = Daemon::start(&[]);
    let acquired = run(&daemon, &["acquire", "k", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&acquired.stdout).expect("JSON");
    let token = json["token"].as_str().expect("a token");
    let release = ["release", "k", token];
    assert_eq!(status(&daemon, &release), 0);
    assert_eq!(status(&daemon, &release), 70);
    assert_eq!(status(&daemon, &["release", "k", token, "--missing-ok"]), 0);
}

#[test]
fn a_lock_that_its_server_forgets_is_kept_with_a_warning() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state").display().to_string();
    let without = Daemon::start(&[]);
    let mut with_file = Daemon::command();
    with_file.args([
        "--port",
        &free_port().to_string(),
        "--print-port",
        "--state-file",
        &state,
    ]);
    let with_file = Daemon::from_command(with_file);
    let commands: [&[&str]; 2] = [
        &["reserve", "r", "--for", "60"],
        &["run", "k", "-v", "--at-least", "60", "--", "true"],
    ];
    for command in commands {
        let kept = run(&with_file, command);
        assert_eq!(
            (kept.status.code(), text(&kept.stderr)),
            (Some(0), String::new())
        );
        let warned = run(&without, command);
        assert_eq!(warned.status.code(), Some(0), "{command:?}");
        let said = text(&warned.stderr);
        assert_eq!(said.matches("until the server stops").count(), 1, "{said}");
        // A job that does not run keeps nothing.
        let busy = run(&without, &[&command[..2], &["-n"], &command[2..]].concat());
        assert!(!text(&busy.stderr).contains("until"), "{busy:?}");
    }
}
