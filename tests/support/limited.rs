//! Servers that are short of something: started through programs that limit them first and then
//! become them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use super::needs::lacks;
use super::Daemon;

/// A server behind `wrapper`, which is a command and its arguments.
pub fn limited(wrapper: &[&str], program: &Path) -> Command {
    let mut command = Command::new(wrapper[0]);
    command
        .args(&wrapper[1..])
        .arg(program)
        .args(["--port", "0", "--print-port"]);
    with_surroundings_of(&Daemon::command(), command)
}

/// A server that can have no more than `count` threads, and what it needs to run. It has a user of
/// its own, because the limit counts all processes of a user; `None`, and a word about it, where
/// none is to be had.
pub fn with_processes(count: u32) -> Option<(tempfile::TempDir, Daemon)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if lacks(&["root", "setpriv", "prlimit"]) {
        return None;
    }
    let (directory, program) = program_for_all(env!("CARGO_BIN_EXE_latchd"));
    let user = 70_000 + std::process::id() % 10_000 * 8 + NEXT.fetch_add(1, Ordering::Relaxed);
    let wrapper = [
        "setpriv",
        &format!("--reuid={user}"),
        "--clear-groups",
        "prlimit",
        &format!("--nproc={count}"),
    ];
    let daemon = Daemon::from_command(limited(&wrapper, &program));
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
    let status = Command::new("cp").arg(program.as_ref()).arg(to).status();
    assert!(status.expect("cp").success(), "{}", to.display());
}
