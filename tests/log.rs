//! The log: it says what happened, gives nothing away, cannot be forged by a client, and never
//! holds up a lock.

mod support;

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{mknodat, FileType, Mode, CWD};
use support::{eventually, parse_grant, Client, Daemon, PATIENCE};

// ---- it holds up nobody ----------------------------------------------------------------------

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
    daemon.connect().acquire("after-the-gap", 0);
    pipe.read_until(|read| read.contains("after-the-gap"));
}

#[test]
fn a_closed_stderr_holds_up_no_command_and_leaks_into_no_connection() {
    let daemon = chatty();
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec \"$0\" \"$@\" 2>&-"])
        .arg(daemon.get_program())
        .args(daemon.get_args());
    for (name, value) in daemon.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    answers_promptly(&Daemon::from_command(command));
}

#[test]
fn a_full_disk_under_the_log_holds_up_no_command() {
    let full = OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("Linux has it");
    let mut command = chatty();
    command.stderr(full);
    answers_promptly(&Daemon::from_command(command));
}

#[test]
fn a_log_whose_reader_has_died_holds_up_no_command() {
    let pipe = FullPipe::new();
    let mut command = chatty();
    command.stderr(pipe.writer());
    drop(pipe); // and with it the only reader: whatever is written now meets a broken pipe
    answers_promptly(&Daemon::from_command(command));
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
fn a_key_that_looks_like_a_log_line_stays_one_quoted_value() {
    let daemon = Daemon::from_command(chatty());
    let mut client = daemon.connect();
    for key in ["a=b", "granted=k", "quote\"key=v", "back\\slash"] {
        assert!(
            parse_grant(&client.request("l", key, "0"), "ok").is_some(),
            "{key:?}"
        );
    }

    let log = log_after(&daemon, client);
    for quoted in [r#"key="a=b""#, r#"key="granted=k""#] {
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

#[test]
fn a_plain_key_stands_in_the_log_as_it_is() {
    let daemon = Daemon::from_command(chatty());
    let mut client = daemon.connect();
    client.acquire("jobs/nightly:7", 0);
    assert!(log_after(&daemon, client).contains("key=jobs/nightly:7"));
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
fn the_secret_of_auth_never_appears_in_the_log() {
    let mut command = chatty();
    command.env("LATCHD_AUTH_TOKEN", "the-right-secret");
    let daemon = Daemon::from_command(command);
    let mut stranger = daemon.connect();
    assert_eq!(
        stranger.request("auth", "_", "a-wrong-secret"),
        "error_auth"
    );
    stranger.expect_eof();
    let mut client = daemon.connect();
    assert_eq!(client.request("auth", "_", "the-right-secret"), "ok");
    assert_eq!(client.request("auth", "_", "the-right-secret"), "error");

    let log = log_after(&daemon, client);
    for secret in ["the-right-secret", "a-wrong-secret"] {
        assert!(!log.contains(secret), "{secret} in:\n{log}");
    }
}

// ---- it says what happened -------------------------------------------------------------------

#[test]
fn the_server_says_where_it_listens() {
    let daemon = Daemon::start(&[]);
    let expected = format!("listening addr=127.0.0.1:{}", daemon.port());
    daemon.wait_for_log(&expected, PATIENCE);
    let log = daemon.log();
    let line = log
        .lines()
        .find(|line| line.contains("listening"))
        .expect("just found");
    assert!(line.ends_with(&expected), "{line:?} says more than that");
}

// ---- helpers ---------------------------------------------------------------------------------

/// A daemon which logs all that it can.
fn chatty() -> Command {
    let mut command = Daemon::command();
    command
        .args(["--port", "0", "--print-port"])
        .env("RUST_LOG", "trace");
    command
}

/// Thousands of commands, of which each has its answer and none has to wait for it.
fn answers_promptly(daemon: &Daemon) {
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
    println!("the slowest took {worst:?}");
    assert!(
        worst < Duration::from_millis(500),
        "the slowest took {worst:?}"
    );
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

    /// Reads until what was read is `enough`, for at most ten seconds.
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
