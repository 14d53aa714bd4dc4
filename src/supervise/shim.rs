//! The exec shim: a second instance of this program that becomes the command.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::SigSet;
use nix::unistd;
use rustix::io::Errno;
use rustix::pipe::{pipe_with, PipeFlags};
use rustix::process::{getpgrp, getpid, getppid, set_parent_process_death_signal, Pid, Signal};
use rustix::termios::tcsetpgrp;
use signal_hook::consts::signal::SIGTERM;

use crate::text::{reason, Plain};

use super::guard::{guard, GUARD};
use super::terminal::Foreground;
use super::Job;

/// The first argument of the second instance: see [`second_instance`].
const EXEC_SHIM: &str = "--exec-shim";

/// Replaces the parent's process number if the command may outlive its parent.
const NO_PARENT: &str = "-";

/// The argument that tells the shim to give the terminal to the command.
const TERMINAL: &str = "terminal";

/// Exit status: the command was not found.
pub(super) const NOT_FOUND: u8 = 127;
/// Exit status: the command was found, but could not be run.
pub(super) const CANNOT_RUN: u8 = 126;
/// Exit status: the system failed.
const SYSTEM_ERROR: i32 = 71;

/// A command that was started, as its parent sees it.
pub(super) struct Started {
    pub(super) leader: Pid,
    /// The shim writes to this pipe if it cannot become the command.
    failure: OwnedFd,
}

impl Started {
    /// Whether the shim has failed to become the command. Call this after the command has ended.
    /// The exit status does not tell, because a shell ends with the same one if its last command
    /// is not found.
    pub(super) fn has_failed(&self) -> bool {
        rustix::io::read(&self.failure, &mut [0]) == Ok(1)
    }
}

/// Starts the shim, which becomes the command, in a process group of its own.
pub(super) fn spawn(job: &Job<'_>, foreground: Foreground) -> io::Result<Started> {
    let mut shim = Command::new(job.program_file.path()?);
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
    let (failure, report) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let report = rustix::io::dup(report)?;
    shim.arg(EXEC_SHIM)
        .arg(parent)
        .arg(report.as_raw_fd().to_string())
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
    Ok(Started {
        leader: Pid::from_child(&child),
        failure,
    })
}

/// If this process is a second instance of the program, does its work and does not return: becomes
/// the command, or guards it. Call this first in main.
pub fn second_instance(program: &str) {
    let mut arguments = env::args_os().skip(1);
    match arguments.next() {
        Some(word) if word == EXEC_SHIM => exec_shim(program, arguments),
        Some(word) if word == GUARD => {
            let arguments = arguments.map(|word| word.into_string().unwrap_or_default());
            let done = guard(program, &arguments.collect::<Vec<_>>());
            std::process::exit(done.map_or(SYSTEM_ERROR, |()| 0));
        }
        _ => {}
    }
}

/// The exec shim: becomes the command.
fn exec_shim(program: &str, mut arguments: impl Iterator<Item = OsString>) -> ! {
    let parent = arguments.next();
    let report = arguments.next().and_then(|number| take_descriptor(&number));
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
    let status = failed_to_become(program, &command, &arguments);
    if let Some(mut report) = report {
        let _ = report.write_all(b"!");
    }
    std::process::exit(status.into())
}

/// Opens the inherited descriptor with this number anew, closed on exec, and closes the inherited
/// one. `None` without /proc: a failure is then not told from a command that ends like one.
fn take_descriptor(number: &OsStr) -> Option<File> {
    let number: RawFd = number.to_str()?.parse().ok()?;
    let opened = File::options()
        .write(true)
        .open(format!("/proc/self/fd/{number}"));
    let _ = unistd::close(number);
    opened.ok()
}

/// Replaces this process with a command, and unblocks all signals. If that fails, prints the reason
/// and exits with the status that a shell would use.
pub fn become_command(program: &str, command: &OsStr, arguments: &[OsString]) -> ! {
    std::process::exit(failed_to_become(program, command, arguments).into())
}

/// Replaces this process with a command. If that fails, prints the reason, and returns the status
/// that a shell would use.
fn failed_to_become(program: &str, command: &OsStr, arguments: &[OsString]) -> u8 {
    let _ = SigSet::empty().thread_set_mask();
    let mut error = Command::new(command).args(arguments).exec();
    if error.kind() == io::ErrorKind::PermissionDenied && is_not_in_path(command) {
        error = Errno::NOENT.into();
    }
    let name = if command.is_empty() {
        b"\"\""
    } else {
        command.as_bytes()
    };
    let line = format!("{program}: {}: {}\n", Plain(name), reason(&error));
    // If stderr is closed, the exit status still reports the failure.
    let _ = io::stderr().write_all(line.as_bytes());
    match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => CANNOT_RUN,
    }
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
