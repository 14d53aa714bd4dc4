//! Servers that are short of something: started through programs that limit them first and then
//! become them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{getrlimit, prlimit, setrlimit, Pid, Resource, Rlimit};

use super::needs::{root, skipped};
use super::{described, program, Client, Daemon, Event, PATIENCE};

/// A server behind `wrapper`, which is a command and its arguments.
pub fn limited(wrapper: &[&str]) -> Command {
    limited_copy(wrapper, Path::new(program("latchd")))
}

fn limited_copy(wrapper: &[&str], program: &Path) -> Command {
    let mut plain = Command::new(program);
    plain.args(["--port", "0", "--print-port"]);
    // On a slow machine, a client of a crowd is idle for long before it is its turn.
    plain.args(["--read-timeout", "3600"]);
    with_surroundings_of(&Daemon::command(), behind(wrapper, &plain))
}

/// What has a program run in a user namespace without any user; `None`, noted as a skip, where this
/// test may make none.
pub fn without_users() -> Option<[&'static str; 2]> {
    let wrapper = ["unshare", "--user"];
    let probe = Command::new(wrapper[0]).args([wrapper[1], "true"]).status();
    if !probe.is_ok_and(|status| status.success()) {
        skipped(&["user namespace"]);
        return None;
    }
    Some(wrapper)
}

/// A command that becomes `plain`, with its arguments, after `wrapper`.
pub fn behind(wrapper: &[&str], plain: &Command) -> Command {
    let mut command = Command::new(wrapper[0]);
    command
        .args(&wrapper[1..])
        .arg(plain.get_program())
        .args(plain.get_args());
    command
}

/// Limits a child that runs, or lifts its limit.
pub fn limit_to(pid: u32, resource: Resource, limit: Option<u64>) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a small number"));
    // The child has our own maximum, which not every user may raise.
    let maximum = getrlimit(resource).maximum;
    let limit = Rlimit {
        current: limit.or(maximum),
        maximum,
    };
    prlimit(pid, resource, limit).expect("it is our child");
}

/// Whether the server answers a ping; if not, it must have hung up without a byte.
pub fn is_served(client: &mut Client) -> bool {
    // A client that is refused may hear so while it writes.
    let _ = client.try_send(b"ping\n_\n_\n");
    match client.next_event(PATIENCE) {
        Event::Line(line) if line == b"ok" => true,
        // The ping of a refused client meets a closed socket, hence perhaps a reset.
        Event::Eof | Event::Reset => false,
        other => panic!("neither served nor refused: {}", described(&other)),
    }
}

/// A server that can have no more than `count` threads, and what it needs to run. It has a user of
/// its own, because the limit counts all processes of a user; `None`, and a word about it, where
/// none is to be had.
pub fn with_processes(count: u32) -> Option<(tempfile::TempDir, Daemon)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    root()?;
    let (directory, program) = program_for_all(program("latchd"));
    let user = 70_000 + std::process::id() % 10_000 * 8 + NEXT.fetch_add(1, Ordering::Relaxed);
    let wrapper = [
        "setpriv",
        &format!("--reuid={user}"),
        "--clear-groups",
        "prlimit",
        &format!("--nproc={count}"),
    ];
    let daemon = Daemon::from_command(limited_copy(&wrapper, &program));
    Some((directory, daemon))
}

/// The command with the variables and streams of another one.
pub fn with_surroundings_of(plain: &Command, mut command: Command) -> Command {
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A copy of a program where every user may run it, for as long as the directory is there.
pub fn program_for_all(program: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("there is room");
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("it is ours");
    let copy = directory.path().join("program");
    copy_program(program, &copy);
    (directory, copy)
}

/// Copies a program that is to be run. Not in this process: a child that another test starts at the
/// same moment has the copy open for writing until it becomes its own program, and until then
/// no process can run it.
pub fn copy_program(program: impl AsRef<Path>, to: &Path) {
    let mut install = Command::new("install");
    let status = install.arg("-m755").arg(program.as_ref()).arg(to).status();
    assert!(status.expect("install").success(), "{}", to.display());
}

/// Lets this process have as many descriptors as it may: crowds are clients of one process.
pub fn raise_our_own_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = |maximum| Rlimit {
        current: maximum,
        maximum,
    };
    // All tests of a target share the limit. Root may raise a low maximum, too.
    let plenty = limit.maximum.map(|maximum| maximum.max(16_384));
    if setrlimit(Resource::Nofile, raised(plenty)).is_err() {
        let most = raised(limit.maximum);
        setrlimit(Resource::Nofile, most).expect("up to the maximum anybody may");
    }
}
