//! `latch hold`: a lock over several steps of a script.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{ChildStdin, Stdio};
use std::thread;
use std::time::Duration;

use crate::support::latch::{is_held, latch, wait, Latch};
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, Daemon, Signal, PATIENCE};
use rustix::io::ioctl_fionread;

/// Starts `latch hold k` and waits for its line. Returns it with its input and its line.
fn held(daemon: &Daemon, options: &[&str]) -> (Latch, ChildStdin, String) {
    let (mut hold, line) = held_by(daemon, options, Stdio::piped());
    let stdin = hold.stdin.take().expect("piped");
    (hold, stdin, line)
}

fn held_by(daemon: &Daemon, options: &[&str], stdin: Stdio) -> (Latch, String) {
    let mut command = latch(daemon, &["hold", "k"]);
    command.args(options);
    command.stdin(stdin).stdout(Stdio::piped());
    let mut hold = Latch::start(command.stderr(Stdio::piped()));
    let mut line = String::new();
    BufReader::new(hold.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("text");
    (hold, line)
}

fn complaint(hold: &mut Latch) -> String {
    let mut said = String::new();
    let stderr = hold.stderr.as_mut().expect("piped");
    stderr.read_to_string(&mut said).expect("text");
    said
}

#[test]
fn hold_keeps_the_lock_until_its_input_is_closed() {
    fair_test(hold_keeps_the_lock_until_its_input_is_closed_once);
}

fn hold_keeps_the_lock_until_its_input_is_closed_once() {
    let daemon = Daemon::start(&[]);
    let (mut hold, stdin, line) = held(&daemon, &["--lease", "1"]);
    let (token, fence) = line.trim_end().split_once(' ').expect("two words");
    assert_eq!(
        u64::from_str_radix(&token[..16], 16).ok(),
        fence.parse().ok()
    );
    assert_eq!(token.len(), 32, "{line}");
    // The lease ends several times, unless it is renewed.
    thread::sleep(Duration::from_millis(2500));
    in_time!(is_held(&daemon, "k"));
    in_time!(hold.try_wait().expect("a child").is_none());
    drop(stdin);
    let status = wait(&mut hold);
    in_time!(status == Some(0), "{status:?}");
    assert!(!is_held(&daemon, "k"));
    assert_eq!(complaint(&mut hold), "");
}

#[test]
fn hold_keeps_the_lock_if_its_input_does_not_block() {
    let daemon = Daemon::start(&[]);
    let (mut script, stdin) = UnixStream::pair().expect("two descriptors");
    stdin.set_nonblocking(true).expect("a socket");
    let unread = stdin.try_clone().expect("descriptors are left");
    let (mut hold, _) = held_by(&daemon, &[], OwnedFd::from(stdin).into());
    // It reads the second byte after it has met an empty socket.
    for _ in 0..2 {
        script.write_all(b"x").expect("a reader");
        eventually(PATIENCE, "hold reads", || {
            ioctl_fionread(&unread).expect("a socket") == 0
        });
    }
    assert!(is_held(&daemon, "k"));
    assert_eq!(hold.try_wait().expect("a child"), None);
    drop(script);
    assert_eq!(wait(&mut hold), Some(0));
    assert!(!is_held(&daemon, "k"));
}

#[test]
fn the_next_waiter_gets_the_lock_when_the_script_is_killed() {
    let daemon = Daemon::start(&[]);
    // The script's end of the pipe closes with it, and tells hold of its end.
    let script = "exec 3>&1; { echo $$ >&2; exec sleep 60; } | latch hold k >&3";
    let mut shell = std::process::Command::new("sh");
    shell
        .args(["-c", script])
        .env("LATCH_SERVER", daemon.addr().to_string());
    let mut shell = Latch::start(shell.stdout(Stdio::null()).stderr(Stdio::null()));
    eventually(PATIENCE, "the lock is held", || is_held(&daemon, "k"));
    let pipeline = crate::support::children_of(shell.id());
    let is_sleep = |pid: &&rustix::process::Pid| {
        let comm = format!("/proc/{}/comm", pid.as_raw_nonzero());
        std::fs::read_to_string(comm).is_ok_and(|name| name.trim() == "sleep")
    };
    let mut writer = None;
    eventually(PATIENCE, "the script has begun to sleep", || {
        writer = pipeline.iter().find(is_sleep).copied();
        writer.is_some()
    });
    let writer = writer.expect("just found");
    rustix::process::kill_process(writer, Signal::KILL).expect("it runs");
    eventually(PATIENCE, "the lock is free", || !is_held(&daemon, "k"));
    assert_eq!(wait(&mut shell), Some(0));
}
