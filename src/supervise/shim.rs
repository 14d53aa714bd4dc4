//! The exec shim: a second instance of this program that makes itself the command.

use std::env;
use std::ffi::OsStr;
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

use super::{Job, Orphan};

/// The argument by which a program knows that it is to be the [`exec_shim`].
const EXEC_SHIM: &str = "--exec-stage";

/// This program, also after another version has been installed in its place: to wait for a lock can
/// take days.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// What stands there for our process number if the command is not to end with us.
const NO_PARENT: &str = "-";

/// Exit status: the command was not found.
const NOT_FOUND: i32 = 127;
/// Exit status: the command was found, but could not be run.
const CANNOT_RUN: i32 = 126;
/// Exit status: the system failed us.
pub(super) const SYSTEM_ERROR: i32 = 71;

/// Looks whether a command can be started at all, before anybody waits for its lock.
///
/// # Errors
///
/// If the program has no second instance to start, since /proc is not mounted.
pub fn check_proc() -> Result<(), String> {
    match fs::metadata(THIS_PROGRAM) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{THIS_PROGRAM}: {}", crate::text::reason(&error))),
    }
}

pub(super) fn start(job: &Job<'_>, has_terminal: bool) -> io::Result<Pid> {
    let mut shim = Command::new(THIS_PROGRAM);
    let parent = match job.orphan {
        Orphan::Ends => getpid().as_raw_nonzero().to_string(),
        Orphan::GoesOn => NO_PARENT.to_owned(),
    };
    // The copy, unlike the original, stays open when another program takes over. It is closed here once the
    // command has it.
    let _inherited = job.inherited.map(rustix::io::dup).transpose()?;
    shim.arg(EXEC_SHIM)
        .arg(parent)
        .arg(if has_terminal { "terminal" } else { "-" })
        .args(job.command)
        .process_group(0);
    for (name, value) in job.environment {
        shim.env(name, value);
    }
    let child = shim.spawn()?;
    Ok(Pid::from_child(&child))
}

/// The second instance of the program, if this is one: makes itself the command, and never returns then.
/// To be called first thing in main.
pub fn exec_shim(program: &str) {
    let mut arguments = env::args_os().skip(1);
    if arguments.next().as_deref() != Some(OsStr::new(EXEC_SHIM)) {
        return;
    }
    let parent = arguments.next();
    let has_terminal = arguments.next().is_some_and(|word| word == "terminal");
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
    let _ = SigSet::empty().thread_set_mask();
    let mut error = Command::new(&command).args(arguments).exec();
    if error.kind() == io::ErrorKind::PermissionDenied && is_nowhere_in_the_path(&command) {
        error = Errno::NOENT.into();
    }
    // Where nobody can hear that, the status still says it.
    let _ = writeln!(
        io::stderr(),
        "{program}: {}: {}",
        crate::text::Plain(command.as_bytes()),
        crate::text::reason(&error)
    );
    let status = if error.kind() == io::ErrorKind::NotFound {
        NOT_FOUND
    } else {
        CANNOT_RUN
    };
    std::process::exit(status);
}

/// Whether a shell would not find the command. The system tells of a directory of the path which may not
/// be searched, and of a file which may not be executed, in the same way.
fn is_nowhere_in_the_path(command: &OsStr) -> bool {
    let Some(path) = env::var_os("PATH").filter(|_| !command.as_bytes().contains(&b'/')) else {
        return false;
    };
    !env::split_paths(&path).any(|directory| directory.join(command).exists())
}

/// Arranges for this process to end when its parent does, whose number is given.
fn end_with(parent: Option<&OsStr>) {
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    // It may have died before we asked to be told.
    let parent_now = getppid().map(|parent| parent.as_raw_nonzero().to_string());
    if parent != Some(OsStr::new(parent_now.as_deref().unwrap_or_default())) {
        std::process::exit(128 + SIGTERM);
    }
}
