//! The exec shim: a second instance of this program that becomes the command.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::SigSet;
use rustix::io::Errno;
use rustix::process::{getpgrp, getpid, getppid, set_parent_process_death_signal, Pid, Signal};
use rustix::termios::tcsetpgrp;
use signal_hook::consts::signal::SIGTERM;

use crate::text::{reason, Plain};

use super::terminal::Foreground;
use super::Job;

/// The first argument of the second instance: see [`exec_shim`].
const EXEC_SHIM: &str = "--exec-shim";

/// The running program. The path stays valid if an upgrade replaces the file, which can happen
/// during a wait of several days.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Replaces the parent's process number if the command may outlive its parent.
const NO_PARENT: &str = "-";

/// The argument that tells the shim to give the terminal to the command.
const TERMINAL: &str = "terminal";

/// Exit status: the command was not found.
const NOT_FOUND: i32 = 127;
/// Exit status: the command was found, but could not be run.
const CANNOT_RUN: i32 = 126;
/// Exit status: the system failed.
const SYSTEM_ERROR: i32 = 71;

/// Checks that a command can be started. Call this before a wait for a lock. Fails if /proc is not
/// mounted, or if this program was started through the dynamic loader, because the shim would then
/// be the loader.
pub fn check_proc() -> Result<(), String> {
    let program = fs::read_link(THIS_PROGRAM);
    let program = program.map_err(|error| format!("{THIS_PROGRAM}: {}", reason(&error)))?;
    let name = program.file_name().unwrap_or_default();
    match name.as_bytes().windows(3).any(|part| part == b".so") {
        true => Err(format!(
            "{} runs this program; start it without the dynamic loader",
            Plain(program.as_os_str().as_bytes())
        )),
        false => Ok(()),
    }
}

/// Starts the shim, which becomes the command, in a process group of its own.
pub(super) fn spawn(job: &Job<'_>, foreground: Foreground) -> io::Result<Pid> {
    let mut shim = Command::new(THIS_PROGRAM);
    // If the file contains several programs, argv[0] selects the program.
    if let Some(name) = env::args_os().next() {
        shim.arg0(name);
    }
    let parent = match job.inherited {
        Some(_) => NO_PARENT.to_owned(),
        None => getpid().as_raw_nonzero().to_string(),
    };
    // The original descriptor is closed on exec, but the duplicate is not. The parent closes the
    // duplicate when this function returns.
    let _inherited = job.inherited.map(rustix::io::dup).transpose()?;
    shim.arg(EXEC_SHIM)
        .arg(parent)
        .arg(match foreground {
            Foreground::Command => TERMINAL,
            Foreground::Ours => "-",
        })
        .args(job.command)
        .process_group(0);
    for (name, value) in job.environment {
        match value {
            Some(value) => shim.env(name, value),
            None => shim.env_remove(name),
        };
    }
    let child = shim.spawn()?;
    Ok(Pid::from_child(&child))
}

/// If this process is the exec shim, becomes the command and does not return. Call this first in
/// main.
pub fn exec_shim(program: &str) {
    let mut arguments = env::args_os().skip(1);
    if arguments.next().as_deref() != Some(OsStr::new(EXEC_SHIM)) {
        return;
    }
    let parent = arguments.next();
    let has_terminal = arguments.next().is_some_and(|word| word == TERMINAL);
    let Some(command) = arguments.next() else {
        std::process::exit(SYSTEM_ERROR);
    };
    if parent.as_deref() != Some(OsStr::new(NO_PARENT)) {
        end_with(parent.as_deref());
    }
    if has_terminal {
        if let Ok(terminal) = File::open("/dev/tty") {
            let _ = tcsetpgrp(&terminal, getpgrp());
        }
    }
    let arguments: Vec<OsString> = arguments.collect();
    become_command(program, &command, &arguments)
}

/// Replaces this process with a command, and unblocks all signals. If that fails, prints the reason
/// and exits with the status that a shell would use.
pub fn become_command(program: &str, command: &OsStr, arguments: &[OsString]) -> ! {
    let _ = SigSet::empty().thread_set_mask();
    let mut error = Command::new(command).args(arguments).exec();
    if error.kind() == io::ErrorKind::PermissionDenied && is_not_in_path(command) {
        error = Errno::NOENT.into();
    }
    let name = match command.is_empty() {
        true => b"\"\"",
        false => command.as_bytes(),
    };
    let line = format!("{program}: {}: {}\n", Plain(name), reason(&error));
    // If stderr is closed, the exit status still reports the failure.
    let _ = io::stderr().write_all(line.as_bytes());
    std::process::exit(match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => CANNOT_RUN,
    });
}

/// Whether no directory of PATH has the command. The system's error does not tell, because it is
/// the same for a directory of PATH that cannot be searched and for a file that cannot be executed.
fn is_not_in_path(command: &OsStr) -> bool {
    let Some(path) = env::var_os("PATH").filter(|_| !command.as_bytes().contains(&b'/')) else {
        return false;
    };
    !env::split_paths(&path).any(|directory| directory.join(command).exists())
}

/// Asks the kernel for SIGTERM when the parent ends. `parent` is the parent's process number.
fn end_with(parent: Option<&OsStr>) {
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    // The parent may have ended before the kernel was asked.
    let parent_now = getppid().map(|parent| parent.as_raw_nonzero().to_string());
    if parent != Some(OsStr::new(parent_now.as_deref().unwrap_or_default())) {
        std::process::exit(128 + SIGTERM);
    }
}
