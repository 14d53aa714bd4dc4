//! The clients to take away do what latch-protocol(7) says of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::support::latch::{is_held, wait, Latch};
use crate::support::needs::{needs, Program};
use crate::support::stalls::{fair_test, in_time};
use crate::support::wire_cutter::WireCutter;
use crate::support::{fence, is_soon, Daemon, Signal};

/// How long a client may take for a step.
const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn the_client_in_python_keeps_its_lock_over_a_cut() {
    let python = needs!("python3");
    keeps_its_lock_over_a_cut("client.py", |source| interpreted(&python, source));
}

#[test]
fn the_client_in_perl_keeps_its_lock_over_a_cut() {
    let perl = needs!("perl");
    keeps_its_lock_over_a_cut("client.pl", |source| interpreted(&perl, source));
}

#[test]
fn the_client_in_c_keeps_its_lock_over_a_cut() {
    keeps_its_lock_over_a_cut("client.c", |source| {
        let program = source.with_extension("");
        let mut compiler = Command::new("cc");
        compiler.args(["-Wall", "-Wextra", "-Werror", "-o"]);
        let compiled = compiler.arg(&program).arg(source).status();
        assert!(compiled.expect("Rust needs a C compiler, too").success());
        Command::new(program)
    });
}

fn interpreted(interpreter: &Program, source: &Path) -> Command {
    let mut command = interpreter.command();
    command.arg(source);
    command
}

fn keeps_its_lock_over_a_cut(name: &str, program: impl Fn(&Path) -> Command) {
    fair_test(|| keeps_its_lock_over_a_cut_once(name, &program));
}

fn keeps_its_lock_over_a_cut_once(name: &str, program: impl Fn(&Path) -> Command) {
    let daemon = Daemon::start(&[]);
    let proxy = WireCutter::before(daemon.addr());
    let directory = tempfile::tempdir().expect("there is room");
    let at = |name: &str| directory.path().join(name);
    let source = with_port_and_lease(name, proxy.addr().port(), directory.path());
    let command = |script: &str| {
        let mut command = program(&source);
        command.args(["my-job", "sh", "-c", script]);
        command.current_dir(directory.path());
        command.stdin(Stdio::null()).stderr(Stdio::null());
        command
    };

    let script = "echo $TOKEN >token; until test -e stop; do sleep 0.05; done; exit 3";
    let mut client = Latch::start(&mut command(script));
    let has_token = || fs::read_to_string(at("token")).is_ok_and(|text| text.ends_with('\n'));
    in_time!(is_soon(PATIENCE, has_token), "the command runs");
    let token = fs::read_to_string(at("token")).expect("it was just there");
    assert!(fence(token.trim()) > 0);
    proxy.wire().cut_client();
    in_time!(
        is_soon(PATIENCE, || proxy.count() >= 2),
        "the client connects again"
    );
    // Longer than a lease.
    thread::sleep(Duration::from_secs(7));
    // A renewal has a second before the client takes the lock for lost.
    in_time!(is_held(&daemon, "my-job"), "the lease was not renewed");
    fs::write(at("stop"), "").expect("there is room");
    in_time!(wait(&mut client) == Some(3), "the lock was lost");
    assert!(!is_held(&daemon, "my-job"), "the lock was not released");

    let outdated = command("true").env("LAST_FENCE", "f").status();
    assert!(!outdated.expect("it starts").success(), "an older fence");

    let mut client = Latch::start(&mut command("exec sleep 600"));
    in_time!(
        is_soon(PATIENCE, || is_held(&daemon, "my-job")),
        "the lock is held"
    );
    daemon.signal(Signal::KILL);
    assert_ne!(wait(&mut client), Some(0), "the lock was lost");
}

/// Copies the example of this name to `directory`, for a server on `port` and a lease of 6 seconds.
fn with_port_and_lease(name: &str, port: u16, directory: &Path) -> PathBuf {
    let example = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples")
        .join(name);
    let source = fs::read_to_string(example).expect("the example is there");
    assert!(source.lines().count() < 80, "{name} is too long");
    let (port, lease) = (port.to_string(), "6");
    // The lease first: there may be a 30 in the port.
    let changed = source.replacen("30", lease, 1).replacen("6388", &port, 1);
    let copy = directory.join(name);
    fs::write(&copy, changed).expect("there is room");
    copy
}
