//! What a test needs beside Rust and a C compiler. A test that lacks something ends early and
//! leaves a note; the target `skipped` reads the notes at the end of `cargo test`. With
//! `LATCHD_TEST_ALL` set, a test that lacks something fails.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs that tests start, each with its Debian package.
pub const PACKAGES: &[(&str, &str)] = &[
    ("bash", "bash"),
    ("beanstalkd", "beanstalkd"),
    ("busybox", "busybox-static"),
    ("cu", "cu"),
    ("dash", "dash"),
    ("etcd", "etcd-server"),
    ("etcdctl", "etcd-client"),
    ("faketime", "faketime"),
    ("fish", "fish"),
    ("flock", "util-linux"),
    ("grep", "grep"),
    ("groff", "groff"),
    ("inetd", "openbsd-inetd"),
    ("ip", "iproute2"),
    ("kermit", "ckermit"),
    ("logrotate", "logrotate"),
    ("make", "make"),
    ("mandoc", "mandoc"),
    ("mgetty", "mgetty"),
    ("memcached", "memcached"),
    ("minicom", "minicom"),
    ("mount", "mount"),
    ("nc", "netcat-openbsd"),
    ("nc.openbsd", "netcat-openbsd"),
    ("ncat", "ncat"),
    ("nsenter", "util-linux"),
    ("openssl", "openssl"),
    ("prlimit", "util-linux"),
    ("promtool", "prometheus"),
    ("python3", "python3"),
    ("redis-server", "redis-server"),
    ("sed", "sed"),
    ("setpriv", "util-linux"),
    ("setsid", "util-linux"),
    ("socat", "socat"),
    ("start-stop-daemon", "dpkg"),
    ("strace", "strace"),
    ("stunnel", "stunnel4"),
    ("systemd-analyze", "systemd"),
    ("systemd-socket-activate", "systemd"),
    ("telnet", "inetutils-telnet"),
    ("unshare", "util-linux"),
    ("valgrind", "valgrind"),
    ("zsh", "zsh"),
];

/// Ends the test unless the machine has all that is named: programs, or `root`.
macro_rules! needs {
    ($($need:expr),+ $(,)?) => {
        if crate::support::needs::lacks(&[$($need),+]) {
            return;
        }
    };
}
pub(crate) use needs;

/// Whether any of `needs` is missing, with a note about those that are.
pub fn lacks(needs: &[&str]) -> bool {
    let missing: Vec<&str> = needs
        .iter()
        .copied()
        .filter(|need| !is_here(need))
        .collect();
    if !missing.is_empty() {
        skipped(&missing);
    }
    !missing.is_empty()
}

/// Notes that a test, or a part of one, is skipped for want of `missing`: programs, or other things
/// in words. Panics if `LATCHD_TEST_ALL` is set.
pub fn skipped(missing: &[&str]) {
    assert!(
        std::env::var_os("LATCHD_TEST_ALL").is_none(),
        "LATCHD_TEST_ALL is set, and there is no {}",
        missing.join(", no ")
    );
    println!("skipped: no {}", missing.join(", no "));
    let note = format!("{}\t{}\n", env!("CARGO_CRATE_NAME"), missing.join("\t"));
    // Another user may run the tests, who cannot write here. The line above is left then.
    let _ = fs::create_dir_all(env!("CARGO_TARGET_TMPDIR"));
    if let Ok(mut file) = File::options().append(true).create(true).open(notes()) {
        let _ = file.write_all(note.as_bytes());
    }
}

/// The notes of all tests that the same `cargo` runs.
pub fn notes() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("skipped-{}", parent_id()))
}

/// The path of `program`, also if it is where a user's PATH does not lead.
pub fn find(program: &str) -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let places = path.split(':').chain(["/usr/sbin", "/sbin"]);
    let mut paths = places.map(|place| format!("{place}/{program}"));
    paths.find(|path| Path::new(path).is_file())
}

fn is_here(need: &str) -> bool {
    match need {
        "root" => rustix::process::geteuid().is_root(),
        // There are several, with other options.
        "nc" => says(&["nc", "-h"], "OpenBSD"),
        // A container may forbid it.
        "strace" => says(&["strace", "sh", "-c", "echo traced"], "traced"),
        program => {
            assert!(package_of(program).is_some(), "{program} has no package");
            find(program).is_some()
        }
    }
}

fn says(command: &[&str], text: &str) -> bool {
    let output = Command::new(command[0]).args(&command[1..]).output();
    output.is_ok_and(|output| {
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&said).contains(text)
    })
}

/// The Debian package that brings `program`.
pub fn package_of(program: &str) -> Option<&'static str> {
    let row = PACKAGES.iter().find(|(name, _)| *name == program);
    row.map(|(_, package)| *package)
}
