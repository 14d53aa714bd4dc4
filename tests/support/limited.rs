//! Servers that are short of something: started through programs that limit them first and then become
//! them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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

/// Copies a program that is to be run. Not in this process: a child that another test starts at the same
/// moment has the copy open for writing until it becomes its own program, and until then nobody can run it.
pub fn copy_program(program: impl AsRef<Path>, to: &Path) {
    let status = Command::new("cp").arg(program.as_ref()).arg(to).status();
    assert!(status.expect("cp").success(), "{}", to.display());
}
