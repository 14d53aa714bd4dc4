//! The program `under`: runs a command while it holds a lock, which is the writing end of a named
//! pipe. The lock is free again when the reader sees the end of input.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use latchd::supervise::{self, Event, Job, Killed, Leftovers, ProgramFile, SignalWatch};
use rustix::process::Signal;

/// The name by which a shell runs this program. Variables are its options:
///
/// - `DIR`: the folder of the lock;
/// - `LEFTOVERS`: what to do with leftovers; the default if it is not set;
/// - `KILL_AFTER`: the time before SIGKILL in seconds; 60 if it is not set;
/// - `INHERIT`: if it is set, the command inherits the lock, as under `sema run`. If not, the lock
///   ends with this program, as under `latch run`.
pub const WRAPPER: &str = "under";

pub const PROGRAM: &str = "latch";

/// The exit status if the lock was lost.
pub const LOST: u8 = 70;

/// What is taken from the exit status if the command was never started.
pub const NOT_STARTED: u8 = 100;

/// The files in the folder. `loss` is a named pipe, too: the lock is lost when it is opened for
/// writing.
pub const LOCK: &str = "lock";
pub const LOSS: &str = "loss";
/// If this file exists, a check of the lock finds that it is lost.
pub const GONE: &str = "gone";
/// If the first of these files exists, a check of the lock has no result, but makes the other.
pub const SILENT: &str = "silent";
pub const ASKED: &str = "asked";
/// If this named pipe exists, the lock is granted when it is opened for writing.
pub const GRANT: &str = "grant";
/// This file exists once the wrapper waits for the lock.
pub const WAITING: &str = "waiting";

pub fn run(command: &[OsString]) -> ExitCode {
    let folder = PathBuf::from(env::var_os("DIR").expect("a folder"));
    let program_file = match ProgramFile::find() {
        Ok(program_file) => program_file,
        Err(reason) => {
            eprintln!("{PROGRAM}: {reason}");
            return ExitCode::FAILURE;
        }
    };
    let mut signals = SignalWatch::new().expect("signals");
    if let Err(killed) = wait(&folder, &mut signals) {
        return killed.follow().into();
    }
    let lock = File::options().write(true).open(folder.join(LOCK));
    let lock = lock.expect("the lock");
    let (lost, confirmed) = (set_by(folder.join(LOSS)), Event::new().expect("one"));
    let leftovers = env::var("LEFTOVERS").map_or(Leftovers::default(), |word| {
        let named = |(name, _): &(&str, Leftovers)| *name == word;
        Leftovers::NAMES.into_iter().find(named).expect("a word").1
    });
    let kill_after = env::var("KILL_AFTER").unwrap_or("60".into());
    let kill_after = kill_after.parse().expect("a number");
    let job = Job {
        program: PROGRAM,
        program_file: &program_file,
        command,
        environment: &[("ADDED", Some("a value".into())), ("REMOVED", None)],
        loss_signal: Signal::TERM,
        kill_after: Duration::try_from_secs_f64(kill_after).unwrap_or(Duration::MAX),
        leftovers,
        inherited: env::var_os("INHERIT").map(|_| lock.as_fd()),
        lost: &lost,
        confirmed: &confirmed,
        look: &|| {
            if folder.join(GONE).exists() {
                lost.set();
            } else if folder.join(SILENT).exists() {
                File::create(folder.join(ASKED)).expect("a file");
            } else {
                confirmed.set();
            }
        },
    };
    let end = supervise::run(&job, &mut signals).expect("a command");
    drop(lock);
    ExitCode::from(match end {
        None => LOST,
        Some(finish) if !finish.has_run => finish.status - NOT_STARTED,
        Some(finish) => {
            if let Some(left) = &finish.left {
                eprintln!("{PROGRAM}: {left}");
            }
            finish.follow()
        }
    })
}

fn wait(folder: &Path, signals: &mut SignalWatch) -> Result<(), Killed> {
    if !folder.join(GRANT).exists() {
        return Ok(());
    }
    let granted = set_by(folder.join(GRANT));
    File::create(folder.join(WAITING)).expect("a file");
    signals.wait_for(&[&granted])
}

/// An event that is set when the named pipe is opened for writing.
fn set_by(pipe: PathBuf) -> Event {
    let event = Event::new().expect("one");
    let setter = event.clone();
    thread::spawn(move || {
        let _ = File::open(pipe);
        setter.set();
    });
    event
}
