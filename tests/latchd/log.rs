//! The log: it says what happened, gives nothing away, cannot be forged by a client, and never
//! holds up a lock.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::auth::connect_from;
use crate::support::limited::{behind, limit_to, with_surroundings_of};
use crate::support::stalls::fairly;
use crate::support::syslog::Syslog;
use crate::support::{eventually, parse_grant, Client, Daemon, Signal, PATIENCE};
use rustix::fs::{mknodat, FileType, Mode, CWD};
use rustix::process::Resource;

// ---- it delays no client ---------------------------------------------------------------------

#[test]
fn a_log_that_nobody_reads_holds_up_no_command() {
    let pipe = FullPipe::new();
    let mut command = chatty();
    command.stderr(pipe.writer());
    let daemon = Daemon::from_command(command);

    answers_promptly(&daemon);

    // Once somebody reads again, the log goes on, and admits that it has a gap.
    let read = pipe.read_until(|read| read.contains("dropped="));
    let admission = read
        .lines()
        .find(|line| line.contains("dropped="))
        .expect("just found");
    let count = admission.split("dropped=").nth(1).expect("just found");
    let digits: String = count.chars().take_while(char::is_ascii_digit).collect();
    assert!(
        digits.parse::<u64>().is_ok_and(|count| count > 0),
        "{admission:?}"
    );
    let counted = daemon.connect().request("stats", "counters", "_");
    let (_, json) = counted.split_once(' ').expect("ok and an object");
    let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
    let dropped = json["counters"]["dropped_log_lines"].as_u64();
    assert!(dropped >= digits.parse().ok(), "{counted}: {admission:?}");
    daemon.connect().acquire("after-the-gap", 0);
    pipe.read_until(|read| read.contains("after-the-gap"));
}

#[test]
fn a_closed_stderr_delays_no_command_and_leaks_nothing() {
    let plain = chatty();
    let closing = ["sh", "-c", "exec \"$0\" \"$@\" 2>&-"];
    let command = with_surroundings_of(&plain, behind(&closing, &plain));
    answers_promptly(&Daemon::from_command(command));
}

#[test]
fn a_full_disk_under_the_log_holds_up_no_command() {
    let full = OpenOptions::new().write(true).open("/dev/full");
    let mut to_stderr = chatty();
    to_stderr.stderr(full.expect("Linux has it"));
    let mut to_file = chatty();
    to_file.args(["--log-file", "/dev/full"]);
    for command in [to_stderr, to_file] {
        answers_promptly(&Daemon::from_command(command));
    }
}

#[test]
fn a_log_whose_reader_has_died_holds_up_no_command() {
    let pipe = FullPipe::new();
    let mut command = chatty();
    command.stderr(pipe.writer());
    drop(pipe); // and with it the only reader: whatever is written now meets a broken pipe
    answers_promptly(&Daemon::from_command(command));
}

/// A client's socket on both is left alone. A terminal is on both, too, and is to have the log.
#[test]
fn a_stderr_that_is_also_stdin_has_the_log() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("terminal");
    let terminal = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .open(&path)
        .expect("there is room");
    let mut command = Daemon::command();
    command
        .args(["--port", "0", "--print-port"])
        .stdin(terminal.try_clone().expect("it is open"))
        .stderr(terminal);
    let daemon = Daemon::from_command(command);
    eventually(PATIENCE, "it logs", || {
        fs::read_to_string(&path).is_ok_and(|log| log.contains("INFO listening "))
    });
    drop(daemon);
}

// ---- it cannot be forged ---------------------------------------------------------------------

#[test]
fn what_a_client_sends_is_escaped_in_the_log() {
    let daemon = Daemon::from_command(chatty());
    let mut client = daemon.connect();
    for key in [
        "esc\x1b[2Jkey",
        "nul\0key",
        "bell\x07key",
        "del\x7fkey",
        "nbsp\u{a0}key",
        "umlaut-ü",
    ] {
        client.send(&format!("l\n{key}\n0\n"));
        assert!(parse_grant(&client.line(), "ok").is_some(), "{key:?}");
        // Also where it is refused: as a command, as an argument, and with a blank in the key.
        client.send(&format!("{key}\nk\n0\n"));
        client.expect("error");
        client.send(&format!("l\nk\n{key}\n"));
        client.expect("error");
        client.send(&format!("l\n{key} blank\n0\n"));
        client.expect("error");
        client.send(&format!("r\n{key}\n{key}\n"));
        client.expect("error");
    }
    client.send_bytes(b"l\n\xfe\xffnot-utf8\n0\n");
    client.expect("error");

    let log = log_after(&daemon, client);
    for line in log.lines() {
        assert!(
            line.bytes().all(|byte| matches!(byte, b' '..=b'~')),
            "raw bytes in {line:?}"
        );
    }
    // Each of them is there all the same, in its escaped form.
    for escaped in [
        r"esc\x1b[2Jkey",
        r"nul\x00key",
        r"bell\x07key",
        r"del\x7fkey",
        r"nbsp\xc2\xa0key",
        r"umlaut-\xc3\xbc",
    ] {
        // Within quotes a backslash may be doubled.
        let doubled = escaped.replace('\\', r"\\");
        assert!(
            log.contains(escaped) || log.contains(&doubled),
            "no {escaped} in:\n{log}"
        );
    }
}

#[test]
fn only_a_key_that_looks_like_a_log_line_is_quoted() {
    let daemon = Daemon::from_command(chatty());
    let mut client = daemon.connect();
    for key in [
        "a=b",
        "granted=k",
        "quote\"key=v",
        "back\\slash",
        "jobs/nightly:7",
    ] {
        assert!(
            parse_grant(&client.request("l", key, "0"), "ok").is_some(),
            "{key:?}"
        );
    }

    let log = log_after(&daemon, client);
    for quoted in [r#"key="a=b""#, r#"key="granted=k""#, "key=jobs/nightly:7"] {
        assert!(log.contains(quoted), "no {quoted} in:\n{log}");
    }
    for forms in [
        [r#"key="quote\"key=v""#, r#"key="quote\x22key=v""#],
        [r#"key="back\\slash""#, r#"key="back\x5cslash""#],
    ] {
        assert!(
            forms.iter().any(|form| log.contains(form)),
            "none of {forms:?} in:\n{log}"
        );
    }
    for bare in ["key=a=b", "key=granted", "key=quote", "key=back"] {
        assert!(!log.contains(bare), "{bare} is not quoted in:\n{log}");
    }
}

// ---- it gives nothing away -------------------------------------------------------------------

#[test]
fn no_token_appears_whole_in_the_log() {
    let daemon = Daemon::from_command(chatty());
    let mut client = daemon.connect();
    let mut tokens = Vec::new();
    for (acquire, release, renew, argument) in [("l", "r", "n", "0"), ("sl", "sr", "sn", "0 2")] {
        let reply = client.request(acquire, acquire, argument);
        let token = parse_grant(&reply, "ok").expect("a free key").token;
        assert_eq!(client.request(renew, acquire, &token), "ok 33");
        assert_eq!(client.request(renew, "other", &token), "error");
        assert_eq!(
            client.request(renew, acquire, &format!("{token} x")),
            "error"
        );
        assert_eq!(client.request(release, acquire, &token), "ok");
        assert_eq!(client.request(release, acquire, &token), "error");
        tokens.push(token);
    }
    let token = parse_grant(&client.request("e", "two", ""), "acquired")
        .expect("a free key")
        .token;
    assert!(parse_grant(&client.request("w", "two", "0"), "ok").is_some());
    // In the wrong place it is a secret still.
    assert_eq!(client.request("l", "two", &token), "error");
    tokens.push(token);

    let log = log_after(&daemon, client).to_ascii_lowercase();
    for token in tokens {
        assert!(!log.contains(&token), "{token} in:\n{log}");
        assert!(
            !log.contains(&token[16..]),
            "the secret half of {token} in:\n{log}"
        );
    }
}

#[test]
fn a_cap_that_refuses_a_claim_is_named() {
    let two_keys = "l\na\n0\nl\nb\n0\n";
    for (cap, commands) in [
        ("max-locks", two_keys),
        ("max-slots", two_keys),
        ("max-per-connection", two_keys),
        ("max-waiters", "l\na\n0\ne\na\n\n"),
        ("max-waiters-total", "l\na\n0\ne\na\n\n"),
    ] {
        let roomy = (cap != "max-per-connection").then_some("--max-per-connection=9");
        let option = format!("--{cap}=1");
        let options: Vec<&str> = roomy.into_iter().chain([option.as_str()]).collect();
        let daemon = Daemon::start(&options);
        let mut other = daemon.connect();
        let mut client = daemon.connect();
        client.send(commands);
        client.line();
        client.line();
        // One waiter is one too many only beside another.
        other.request("e", "a", "");
        daemon.wait_for_log(&format!("WARN cap-reached cap={cap} held_back=0"), PATIENCE);
    }
}

#[test]
fn no_secret_of_the_server_appears_in_the_log() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("admin");
    fs::write(&path, "the-admin-secret\n").expect("the directory is ours");
    let mut command = chatty();
    command.env("LATCHD_AUTH_TOKEN", "the-auth-secret");
    command.arg("--admin-token-file").arg(&path);
    let daemon = Daemon::from_command(command);
    let client = || {
        let mut client = daemon.connect();
        assert_eq!(client.request("auth", "_", "the-auth-secret"), "ok");
        client
    };
    let mut holder = client();
    assert_eq!(holder.request("auth", "_", "the-auth-secret"), "error");
    let token = holder.acquire_for("k", 0, 60).token;
    let mut operator = client();
    assert_eq!(
        operator.request("break", "k", "x the-admin-secret"),
        "error"
    );
    assert_eq!(operator.request("break", "k", "_ the-admin-secret"), "ok");
    let mut guesser = client();
    let guess = guesser.request("break", "k", "_ a-wrong-secret");
    assert_eq!(guess, "error_auth");

    holder.expect_eof();
    let log = log_after(&daemon, operator);
    assert!(log.contains("broken key=k"), "{log}");
    for secret in ["the-auth", "the-admin", "a-wrong", &token[16..]] {
        assert!(!log.contains(secret), "{secret} in:\n{log}");
    }
}

// ---- it can be read, by people and by programs -------------------------------------------------

#[test]
fn requests_and_connections_log_nothing_by_default() {
    let daemon = Daemon::start(&[]);
    daemon.wait_for_log("listening", PATIENCE);
    let before = daemon.log();
    for round in 0..20 {
        let mut client = daemon.connect();
        let token = client.acquire("k", 1).token;
        assert_eq!(client.request("n", "k", &token), "ok 33");
        assert_eq!(client.request("l", "k", "0"), "timeout");
        assert_eq!(client.request("r", "k", &token), "ok");
        assert_eq!(client.request("r", "k", &token), "error");
        assert_eq!(client.request("auth", "_", "x"), "error");
        assert_eq!(client.request("ping", "_", "_"), "ok");
        client.stats();
        if round % 2 == 0 {
            client.reset();
        }
    }
    eventually(PATIENCE, "they have left", || {
        daemon.stats()["connections"] == 1
    });
    // Whatever had been logged would have to come before this.
    daemon.signal(crate::support::Signal::TERM);
    daemon.wait_for_log("draining", PATIENCE);
    let log = daemon.log();
    let added = log.strip_prefix(&before).expect("a log only grows");
    let first = added.lines().next().expect("just seen");
    assert!(
        first.ends_with("INFO draining holders=0 awaited=0"),
        "{added}"
    );
}

#[test]
fn each_kind_of_malformed_request_is_logged_with_its_code() {
    let daemon = Daemon::start(&["--log-timestamps", "never", "--read-timeout", "1"]);
    let mut sources = 2..;
    for (sent, expected) in [
        (
            "nonsense\nk\n\n",
            "code=3 reason=invalid-command command_len=8",
        ),
        ("l\nk\nsoon\n", "code=4 reason=invalid-integer command=l"),
        ("l\n\n0\n", "code=5 reason=invalid-key command=l"),
        ("w\nk\n-1\n", "code=6 reason=bad-timeout command=w"),
        ("r\nk\n\n", "code=7 reason=empty-token command=r"),
        ("l\nk\n1 2 3 4\n", "code=8 reason=argument-count command=l"),
        ("l\nk\n1 0\n", "code=9 reason=bad-lease command=l"),
        ("l\n", "code=10 reason=read-timeout"),
        ("l\nk\n", "code=11 reason=peer-closed"),
        (&("x".repeat(300) + "\n"), "code=12 reason=line-too-long"),
        ("sl\nk\n1 0\n", "code=13 reason=bad-limit command=sl"),
    ] {
        // Lines about another address are not held back.
        let source = format!("127.0.0.{}", sources.next().expect("there are more"));
        let mut stream = connect_from(&source, daemon.addr());
        stream.write_all(sent.as_bytes()).expect("it is connected");
        let peer = stream.local_addr().expect("it is connected");
        if expected.contains("peer-closed") {
            drop(stream);
        } else {
            let replied = stream.read(&mut [0]);
            assert_eq!(replied.expect("a reply"), 1, "{expected}");
        }
        let line = format!("WARN malformed-request peer={peer} {expected} held_back=0\n");
        daemon.wait_for_log(&line, PATIENCE);
    }
    let count = daemon.log().matches("malformed-request").count();
    assert_eq!(count, 11, "{}", daemon.log());
}

#[test]
fn a_flood_of_bad_commands_is_a_line_a_second_and_a_count() {
    let daemon = Daemon::start(&["--debug", "--log-timestamps", "never"]);
    let began = Instant::now();
    let mut client = daemon.connect();
    for _ in 0..20 {
        client.send(&"nonsense\nk\n\nl\n\n0\nl\nk\nsoon\n".repeat(50));
        for _ in 0..150 {
            client.expect("error");
        }
    }
    drop(client);
    daemon.wait_for_log("refused=3000\n", PATIENCE);
    let log = daemon.log();
    let lines = log.lines();
    let refused: Vec<&str> = lines
        .filter(|it| it.contains("malformed-request"))
        .collect();
    assert!(
        refused.len() as u64 <= began.elapsed().as_secs() + 1,
        "{log}"
    );
    // What is no command may be a secret, of a client that has left a line out.
    let first = " code=3 reason=invalid-command command_len=8 held_back=0";
    assert!(refused[0].ends_with(first), "{log}");
    // Opened and closed; and that the server starts, with its caps, and listens.
    assert_eq!(log.lines().count(), refused.len() + 2 + 3, "{log}");
}

#[test]
fn every_line_is_a_level_a_verb_and_values_with_names() {
    let mut command = chatty();
    command
        .env("LATCHD_AUTH_TOKEN", "the-right-secret")
        .args(["--log-timestamps", "never"]);
    let daemon = Daemon::from_command(command);
    daemon.connect().request("auth", "_", "a-wrong-secret");
    let mut client = daemon.connect();
    assert_eq!(client.request("auth", "_", "the-right-secret"), "ok");
    for key in ["plain", "with=sign", "quote\"key", "esc\x1bkey"] {
        client.acquire_for(key, 0, 1);
        assert_eq!(client.request(key, key, key), "error");
    }
    client.reset();
    let mut overlong = daemon.connect();
    assert_eq!(overlong.request("auth", "_", "the-right-secret"), "ok");
    overlong.send(&format!("{}\n", "x".repeat(300)));
    overlong.expect("error");
    drop(overlong);
    eventually(PATIENCE, "three have left", || {
        daemon.log().matches(" closed conn=").count() == 3
    });
    daemon.signal(crate::support::Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some(), "nothing is held");

    let log = daemon.log();
    for line in log.lines() {
        let fields = fields_of(line).unwrap_or_else(|| panic!("open quotes in {line:?}"));
        let [level, verb, values @ ..] = &fields[..] else {
            panic!("no verb in {line:?}");
        };
        let levels = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];
        assert!(levels.contains(&level.as_str()), "{line:?}");
        assert!(is_name(verb), "{line:?}");
        for value in values {
            let name = value.split_once('=').map(|(name, _)| name);
            assert!(name.is_some_and(is_name), "{value:?} in {line:?}");
        }
    }
    for verb in [
        "starting",
        "listening",
        "opened",
        "refused",
        "closed",
        "draining",
        "stopping",
    ] {
        assert!(log.contains(&format!(" {verb}")), "no {verb} in:\n{log}");
    }
}

#[test]
fn lines_have_no_timestamp_only_where_journald_reads_them_or_one_asks_for_that() {
    for named in ["this", "", "8:12345", "nonsense", "this and more"] {
        for (when, timestamps) in [
            ("auto", named != "this"),
            ("always", true),
            ("never", false),
        ] {
            let log = log_to_file(when, named);
            assert_eq!(has_timestamps(&log), timestamps, "{named:?} {when}:\n{log}");
        }
    }
}

// ---- it can go to a file or to the syslog ------------------------------------------------------

#[test]
fn a_log_file_is_appended_to_and_opened_again_at_sighup() {
    let directory = tempfile::tempdir().expect("there is room");
    let [path, rotated] = ["log", "log.1"].map(|name| directory.path().join(name));
    fs::write(&path, "before\n").expect("there is room");
    let daemon = Daemon::from_command(logging_to(&path));
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    eventually(PATIENCE, "it logs", || {
        read(&path).contains(" INFO listening addr=")
    });
    assert!(read(&path).starts_with("before\n20"), "{}", read(&path));

    fs::rename(&path, &rotated).expect("both are ours");
    daemon.signal(Signal::HUP);
    eventually(PATIENCE, "there is a new file", || path.exists());
    let mode = fs::metadata(&path).expect("just seen").mode();
    assert_eq!(mode & 0o777 & !0o640, 0, "{mode:o}");
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some(), "nothing is held");
    assert!(read(&path).contains(" INFO stopping"), "{}", read(&path));
    assert!(!read(&rotated).contains("stopping"), "{}", read(&rotated));
    assert_eq!(daemon.log(), "", "nothing else is on stderr");
}

#[test]
fn a_log_file_that_cannot_be_opened_again_stays_in_use() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("log");
    let daemon = Daemon::from_command(logging_to(&path));
    let rotated = directory.path().join("log.1");
    fs::rename(&path, &rotated).expect("both are ours");
    fs::create_dir(&path).expect("there is room");
    daemon.signal(Signal::HUP);
    let read = || fs::read_to_string(&rotated).expect("it is there");
    eventually(PATIENCE, "it says so", || {
        read().contains("WARN cannot-reopen-log error=\"is a directory\"\n")
    });
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some(), "nothing is held");
    assert!(read().contains(" INFO stopping"), "{}", read());
    assert!(read().lines().all(begins_with_the_time), "{}", read());
}

#[test]
fn without_a_log_file_sighup_does_nothing() {
    let daemon = Daemon::start(&[]);
    daemon.wait_for_log("listening", PATIENCE);
    daemon.signal(Signal::HUP);
    daemon.connect().acquire("k", 0);
    assert!(daemon.wait_exit(Duration::from_millis(100)).is_none());
    assert_eq!(daemon.log().lines().count(), 2, "{}", daemon.log());
}

#[test]
fn a_log_file_that_cannot_be_opened_is_named() {
    let directory = tempfile::tempdir().expect("there is room");
    let fifo = directory.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("there is room");
    for (path, reason) in [
        (Path::new("/nowhere/log"), "no such directory: /nowhere"),
        (directory.path(), "is a directory"),
        (&fifo, "no such device or address"),
    ] {
        let daemon = Daemon::from_command(logging_to_unheard(path));
        let status = daemon.wait_exit(PATIENCE).expect("it does not start");
        assert_eq!(status.code(), Some(1));
        let shown = path.display();
        assert_eq!(
            daemon.log(),
            format!("latchd: cannot open the log file {shown}: {reason}\n")
        );
    }
}

#[test]
fn a_line_torn_by_a_full_disk_spoils_no_other() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("log");
    let mut command = logging_to(&path);
    command.env("RUST_LOG", "trace");
    let daemon = Daemon::from_command(command);
    let mut client = daemon.connect();
    let read = || fs::read_to_string(&path).expect("it is there");
    eventually(PATIENCE, "it has logged", || read().contains(" opened "));
    let len = read().len() as u64;
    limit_to(daemon.pid(), Resource::Fsize, Some(len + 7));
    client.acquire("torn", 0);
    client.acquire("lost", 0);
    eventually(PATIENCE, "there is no room", || {
        read().len() as u64 == len + 7
    });
    limit_to(daemon.pid(), Resource::Fsize, None);
    let mut number = 0;
    eventually(PATIENCE, "the log goes on", || {
        number += 1;
        client.acquire(&format!("written-{number}"), 0);
        read().contains("log-lines-lost")
    });
    let log = read();
    let warning = log.lines().find(|line| line.contains("log-lines-lost"));
    let warning = warning.expect("it has come");
    assert!(warning.contains("Z WARN log-lines-lost dropped="), "{log}");
    assert!(begins_with_the_time(warning), "{log}");
}

#[test]
fn a_line_that_the_last_server_tore_spoils_no_other() {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("log");
    let read = || fs::read_to_string(&path).expect("it is there");
    for (left, kept) in [("2026-1", "2026-1\n"), ("whole\n", "whole\n"), ("", "")] {
        fs::write(&path, left).expect("there is room");
        let daemon = Daemon::from_command(logging_to(&path));
        eventually(PATIENCE, "it logs", || read().contains(" INFO listening "));
        drop(daemon);
        let log = read();
        let own = log.strip_prefix(kept).unwrap_or_else(|| panic!("{log}"));
        assert!(own.lines().all(begins_with_the_time), "{log}");
    }
}

#[test]
fn the_log_can_go_to_the_syslog() {
    let Some(syslog) = Syslog::new() else { return };
    let daemon = Daemon::from_command(to_syslog(&syslog));
    let header = |priority: u8| format!("<{priority}>latchd[{}]: ", daemon.pid());
    let starting = syslog.next();
    let expected = format!("{}INFO starting version=", header(30));
    assert!(starting.starts_with(&expected), "{starting}");
    let caps = syslog.next();
    let expected = format!("{}DEBUG caps worst_case_mb=", header(31));
    assert!(caps.starts_with(&expected), "{caps}");
    let listening = syslog.next();
    let expected = format!("INFO listening addr=127.0.0.1:{}", daemon.port());
    assert_eq!(listening, header(30) + &expected);

    daemon.connect().request("nonsense", "k", "");
    let refused = std::iter::from_fn(|| Some(syslog.next())).find(|line| line.contains("refused"));
    let refused = refused.expect("just found");
    assert!(refused.starts_with(&header(31)), "{refused}");
    assert_eq!(daemon.log(), "", "nothing is on stderr");
}

#[test]
fn a_syslog_that_reads_nothing_holds_up_no_command() {
    let Some(syslog) = Syslog::new() else { return };
    let mut command = to_syslog(&syslog);
    command.env("RUST_LOG", "trace");
    answers_promptly(&Daemon::from_command(command));
}

// ---- helpers ---------------------------------------------------------------------------------

/// The log of a server whose stderr is a file, and whose JOURNAL_STREAM names that file (`this`),
/// something else, or nothing.
fn log_to_file(when: &str, named: &str) -> String {
    let directory = tempfile::tempdir().expect("there is room");
    let path = directory.path().join("stderr");
    let stderr = File::create(&path).expect("there is room");
    let metadata = stderr.metadata().expect("it is open");
    let this = format!("{}:{}", metadata.dev(), metadata.ino());
    let mut command = Daemon::command();
    command
        .args(["--port", "0", "--print-port"])
        .env("LATCHD_LOG_TIMESTAMPS", when)
        .stderr(stderr);
    if !named.is_empty() {
        command.env("JOURNAL_STREAM", named.replacen("this", &this, 1));
    }
    let daemon = Daemon::from_command(command);
    let read = || std::fs::read_to_string(&path).expect("it was written");
    eventually(PATIENCE, "it logs", || read().contains(" listening "));
    daemon.signal(crate::support::Signal::TERM);
    assert!(daemon.wait_exit(PATIENCE).is_some(), "nothing is held");
    read()
}

/// Whether every line has one; a mixture is a failure.
fn has_timestamps(log: &str) -> bool {
    let count = log
        .lines()
        .filter(|line| begins_with_the_time(line))
        .count();
    let is_plain = |line: &str| line.starts_with("INFO ");
    let plain_count = log.lines().filter(|line| is_plain(line)).count();
    assert!(count + plain_count >= 2, "{log}");
    assert!(count == 0 || plain_count == 0, "{log}");
    count > 0
}

/// The fields of a line, split at blanks that are not within quotes; `None` if quotes stay open.
fn fields_of(line: &str) -> Option<Vec<String>> {
    let mut fields = vec![String::new()];
    let (mut is_quoted, mut is_escaped) = (false, false);
    for character in line.chars() {
        match character {
            ' ' if !is_quoted => {
                fields.push(String::new());
                continue;
            }
            '"' if !is_escaped => is_quoted = !is_quoted,
            _ => {}
        }
        is_escaped = character == '\\' && !is_escaped;
        fields.last_mut().expect("never empty").push(character);
    }
    (!is_quoted).then_some(fields)
}

/// Whether it is made as the names of verbs and values are.
fn is_name(text: &str) -> bool {
    let is_fit = |byte: u8| byte.is_ascii_lowercase() || matches!(byte, b'-' | b'_');
    !text.is_empty() && text.bytes().all(is_fit)
}

fn begins_with_the_time(line: &str) -> bool {
    line.starts_with("20") && line.get(19..21) == Some("Z ")
}

/// A daemon that logs to the file at `path`.
fn logging_to(path: &Path) -> Command {
    let mut command = logging_to_unheard(path);
    command.args(["--port", "0", "--print-port"]);
    command
}

/// The same on its usual port, which it does not print.
fn logging_to_unheard(path: &Path) -> Command {
    let mut command = Daemon::command();
    command.arg("--log-file").arg(path);
    command
}

/// A daemon that logs the life of connections to `syslog`.
fn to_syslog(syslog: &Syslog) -> Command {
    let mut command = Daemon::command();
    command.args(["--log", "syslog", "--port", "0", "--print-port", "--debug"]);
    let mut command = syslog.reached_by(&command);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A daemon which logs all that it can.
fn chatty() -> Command {
    let mut command = Daemon::command();
    command
        .args(["--port", "0", "--print-port", "--log-grants"])
        .env("RUST_LOG", "trace");
    command
}

/// Thousands of commands, of which each has its answer and none has to wait for it.
fn answers_promptly(daemon: &Daemon) {
    let slowest = fairly(|| match slowest_answer(daemon) {
        slow if slow > Duration::from_millis(500) => Err(slow),
        slow => Ok(slow),
    });
    println!("the slowest took {slowest:?}");
    assert!(slowest.is_ok(), "the slowest took {slowest:?}");
}

fn slowest_answer(daemon: &Daemon) -> Duration {
    let mut client = daemon.connect();
    let mut worst = Duration::ZERO;
    for _ in 0..1000 {
        let asked = Instant::now();
        let grant = client.acquire("k", 0);
        assert_eq!(client.request("n", "k", &grant.token), "ok 33");
        assert_eq!(client.request("r", "k", &grant.token), "ok");
        assert_eq!(client.request("nonsense", "k", ""), "error");
        worst = worst.max(asked.elapsed());
        if worst > PATIENCE {
            break;
        }
    }
    // New connections too: their beginning and end are logged.
    for _ in 0..100 {
        let asked = Instant::now();
        daemon.connect().acquire("short", 5);
        worst = worst.max(asked.elapsed());
    }
    worst
}

/// The whole log up to now: ends the client's connection with a key that must be met in the log,
/// since lines are written by another thread than the one that answers.
fn log_after(daemon: &Daemon, mut client: Client) -> String {
    client.acquire("that-is-all", 0);
    daemon.wait_for_log("that-is-all", PATIENCE);
    daemon.log()
}

/// A pipe with no room left, for the daemon's stderr. It has a name, so that both ends can be
/// opened at will, and without blocking.
struct FullPipe {
    directory: tempfile::TempDir,
    /// Reading and writing: a pipe with a reader is not broken.
    reader: File,
}

impl FullPipe {
    fn new() -> FullPipe {
        let directory = tempfile::tempdir().expect("there is room");
        let path = directory.path().join("stderr");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .expect("a FIFO can be made");
        let mut reader = OpenOptions::new();
        let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).expect("a small flag");
        let reader = reader
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(&path)
            .expect("it was made");
        let pipe = FullPipe { directory, reader };
        pipe.fill();
        pipe
    }

    fn fill(&self) {
        for size in [4096, 1] {
            while (&self.reader).write(&b"#".repeat(size)).is_ok() {}
        }
    }

    /// An end to write to that blocks when the pipe is full, as the stderr of a service does.
    fn writer(&self) -> File {
        OpenOptions::new()
            .write(true)
            .open(self.directory.path().join("stderr"))
            .expect("it was made")
    }

    /// Reads until what was read is `enough`, for a limited time.
    fn read_until(&self, enough: impl Fn(&str) -> bool) -> String {
        let mut read = String::new();
        eventually(PATIENCE, "the log goes on", || {
            let mut chunk = [0; 65536];
            match (&self.reader).read(&mut chunk) {
                Ok(count) => read.push_str(&String::from_utf8_lossy(&chunk[..count])),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
            enough(&read)
        });
        read
    }
}
