//! The exec shim: a second instance of this program that becomes the command; and the file of this
//! program, from which it is started.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nix::sys::signal::SigSet;
use nix::unistd;
use rustix::io::Errno;
use rustix::param::linux_execfn;
use rustix::pipe::{pipe_with, PipeFlags};
use rustix::process::{getpgrp, getpid, getppid, set_parent_process_death_signal, Pid, Signal};
use rustix::termios::tcsetpgrp;
use signal_hook::consts::signal::{SIGTERM, SIGTTIN, SIGTTOU};

use super::guard::{guard, GUARD};
use super::signals::STOPPING;
use super::terminal::Foreground;
use super::Job;
use crate::os::output;
use crate::os::text::{reason, Plain};

/// The first argument of the second instance: see [`second_instance`].
const EXEC_SHIM: &str = "--exec-shim";

/// Replaces the parent's process number if the command may outlive its parent.
const NO_PARENT: &str = "-";

/// The argument that tells the shim to give the terminal to the command.
const TERMINAL: &str = "terminal";

/// Exit status: the command was not found.
const NOT_FOUND: u8 = 127;
/// Exit status: the command was found, but could not be run.
const CANNOT_RUN: u8 = 126;
/// Exit status: the system failed.
const SYSTEM_ERROR: i32 = 71;

/// A command that was started, as its parent sees it.
pub struct Started {
    pub leader: Pid,
    /// The shim writes to this pipe if it cannot become the command.
    failure: OwnedFd,
}

impl Started {
    /// Whether the shim has failed to become the command. Call this after the command has ended.
    /// The exit status does not tell, because a shell ends with the same one if its last command
    /// is not found.
    pub fn has_failed(&self) -> bool {
        rustix::io::read(&self.failure, &mut [0]) == Ok(1)
    }
}

/// Starts the shim, which becomes the command, in a process group of its own.
pub fn spawn(job: &Job<'_>, foreground: Foreground) -> io::Result<Started> {
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
    let parent_now = || Some(OsString::from(getppid()?.as_raw_nonzero().to_string()));
    if parent.as_deref() != Some(OsStr::new(NO_PARENT)) {
        let _ = set_parent_process_death_signal(Some(Signal::TERM));
        // The parent may have ended before the kernel was asked.
        if parent != parent_now() {
            std::process::exit(128 + SIGTERM);
        }
    }
    if has_terminal {
        if let Ok(terminal) = File::open("/dev/tty") {
            let _ = tcsetpgrp(&terminal, getpgrp());
        }
    }
    // The terminal is lent when one of these stops the command, but bash ignores them in `$(...)`.
    // A caught signal has its default action after exec.
    for need in [SIGTTIN, SIGTTOU] {
        let _ = signal_hook::flag::register(need, Arc::default());
    }
    let mut command = Command::new(command);
    command.args(arguments);
    for name in ["LISTEN_PID", "WATCHDOG_PID"] {
        // The sockets and the watchdog of a service are for its command.
        if env::var_os(name).is_some_and(|named| parent_now() == Some(named)) {
            command.env(name, getpid().as_raw_nonzero().to_string());
        }
    }
    let status = failed_to_become(program, &mut command);
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

/// Replaces this process with a command. If that fails, prints the reason and exits with the status
/// that a shell would use.
pub fn become_command(program: &str, command: &OsStr, arguments: &[OsString]) -> ! {
    let mut command = Command::new(command);
    std::process::exit(failed_to_become(program, command.args(arguments)).into())
}

/// The same, but returns the status.
fn failed_to_become(program: &str, command: &mut Command) -> u8 {
    let _ = SigSet::from_iter(STOPPING).thread_unblock();
    let mut error = command.exec();
    let command = command.get_program();
    if error.kind() == io::ErrorKind::PermissionDenied && is_not_in_path(command) {
        error = Errno::NOENT.into();
    }
    let name = if command.is_empty() {
        b"\"\""
    } else {
        command.as_bytes()
    };
    output::complain(program, format_args!("{}: {}", Plain(name), reason(&error)));
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

/// The running program. The path stays valid if an upgrade replaces the file, which can happen
/// during a wait of several days.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// The file of the running program.
#[derive(Debug)]
pub struct ProgramFile {
    path: PathBuf,
    /// The device and inode of the file if /proc is not mounted. The file may then be replaced.
    id: Option<(u64, u64)>,
}

impl ProgramFile {
    /// Finds the file. Call this before a wait for a lock, and before the working directory
    /// changes. Fails if the file is not known, or if the program was started through the dynamic
    /// loader, because a second instance would then be the loader.
    pub fn find() -> Result<ProgramFile, String> {
        let (found, name) = match fs::read_link(THIS_PROGRAM) {
            Ok(name) => {
                let path = THIS_PROGRAM.into();
                (ProgramFile { path, id: None }, name)
            }
            Err(error) => {
                // The kernel's own record of the file that it was told to start. Neither argv[0]
                // nor a search of PATH would do, because they may name another program.
                let name = Path::new(OsStr::from_bytes(linux_execfn().to_bytes()));
                let found = env::current_dir().and_then(|directory| {
                    let path = directory.join(name);
                    let id = Some(id(&path)?);
                    Ok(ProgramFile { path, id })
                });
                let unknown = |_| format!("{THIS_PROGRAM}: {}", reason(&error));
                (found.map_err(unknown)?, name.to_owned())
            }
        };
        let file_name = name.file_name().unwrap_or_default();
        if file_name.as_bytes().windows(3).any(|part| part == b".so") {
            Err(format!(
                "{} runs this program; start it without the dynamic loader",
                Plain(name.as_os_str().as_bytes())
            ))
        } else {
            Ok(found)
        }
    }

    /// The path to start. Fails if the file was replaced and /proc is not mounted.
    pub fn path(&self) -> io::Result<&Path> {
        match self.id {
            Some(known) if id(&self.path)? != known => Err(io::Error::other(
                "the program was replaced, and /proc is not mounted",
            )),
            _ => Ok(&self.path),
        }
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}
