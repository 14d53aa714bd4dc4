//! The client in Python in latch-protocol(7) does what the page says.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::support::latch::{is_held, wait};
use crate::support::needs::{needs, Program};
use crate::support::stalls::fair_test;
use crate::support::{eventually, fence, Daemon, Signal, PATIENCE};

#[test]
fn the_python_client_has_at_most_40_lines() {
    let count = source().lines().count();
    assert!((20..=40).contains(&count), "{count} lines");
}

#[test]
fn the_python_client_holds_renews_and_releases() {
    fair_test(the_python_client_holds_renews_and_releases_once);
}

fn the_python_client_holds_renews_and_releases_once() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("there is room");
    let script = "echo $TOKEN >token; until test -e stop; do sleep 0.05; done; exit 3";
    let mut client = start(&python, &daemon, directory.path(), &["sh", "-c", script]);
    let token = directory.path().join("token");
    eventually(PATIENCE, "the command runs", || {
        fs::read_to_string(&token).is_ok_and(|text| text.ends_with('\n'))
    });
    let token = fs::read_to_string(&token).expect("it was just there");
    assert!(fence(token.trim()) > 0);
    // Three leases of two seconds.
    std::thread::sleep(std::time::Duration::from_secs(6));
    assert!(is_held(&daemon, "my-job"), "the lease was not renewed");
    assert_eq!(client.0.try_wait().expect("our child"), None);
    fs::write(directory.path().join("stop"), "").expect("there is room");
    assert_eq!(wait(&mut client.0), Some(3));
    assert!(!is_held(&daemon, "my-job"), "the lock was not released");
}

#[test]
fn the_python_client_kills_its_command_when_the_lock_is_lost() {
    let python = needs!("python3");
    let daemon = Daemon::start(&[]);
    let directory = tempfile::tempdir().expect("there is room");
    let mut client = start(&python, &daemon, directory.path(), &["sleep", "600"]);
    eventually(PATIENCE, "the lock is held", || is_held(&daemon, "my-job"));
    daemon.signal(Signal::KILL);
    assert_eq!(wait(&mut client.0), Some(1));
}

/// A client that is killed when dropped.
struct Client(Child);

impl Drop for Client {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the program for the key `my-job`, with a lease of two seconds.
fn start(python: &Program, daemon: &Daemon, directory: &Path, command: &[&str]) -> Client {
    let port = daemon.port().to_string();
    let source = source()
        .replace("6388", &port)
        .replace("lease=30", "lease=2");
    let program = directory.join("client.py");
    fs::write(&program, source).expect("there is room");
    let client = python
        .command()
        .arg(program)
        .arg("my-job")
        .args(command)
        .current_dir(directory)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    Client(client.expect("python3 is installed"))
}

/// The program as a reader of the page sees it.
fn source() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("man/latch-protocol.7");
    let page = fs::read_to_string(path).expect("the page is there");
    let (_, section) = page
        .split_once("\n.Ss A client in 40 lines\n")
        .expect("the section");
    let (_, display) = section.split_once("\n.Bd -literal\n").expect("the display");
    let (source, _) = display.split_once("\n.Ed\n").expect("its end");
    format!(
        "{}\n",
        source
            .replace("\\e", "\\")
            .replace("\\-", "-")
            .replace("\\(aq", "'")
    )
}
