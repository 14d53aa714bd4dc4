//! A program that runs a shell script while it holds a lock. The lock is the writing end of a named
//! pipe: it is free again when the reader sees the end of input.

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use latchd::supervise::{self, Event, Job, JobEnd, Leftovers, ProgramFile, SignalWatch};
use rustix::process::Signal;

pub const PROGRAM: &str = "latch";

/// The first argument of the wrapper. Its others are the folder, what to do with leftovers, the
/// time before SIGKILL in milliseconds, and the script.
pub const WRAPPER: &str = "--under-a-pipe";

/// The exit status if the command was never started, and if the lock was lost.
pub const NOT_STARTED: u8 = 88;
pub const LOST: u8 = 70;

/// The files in the folder. `lost` is a named pipe, too: the lock is lost when it is opened for
/// writing.
pub const LOCK: &str = "lock";
pub const LOSS: &str = "loss";

pub fn run(words: &[String]) -> ExitCode {
    let [folder, leftovers, kill_after, command @ ..] = words else {
        return ExitCode::FAILURE;
    };
    let folder = Path::new(folder);
    let mut signals = SignalWatch::new().expect("signals");
    let lock = File::options().write(true).open(folder.join(LOCK));
    let lock = lock.expect("the lock");
    let (lost, confirmed) = (Event::new().expect("one"), Event::new().expect("one"));
    let (loss, lost_setter) = (folder.join(LOSS), lost.clone());
    thread::spawn(move || {
        let _ = File::open(loss);
        lost_setter.set();
    });
    let named = |(name, _): &(&str, Leftovers)| name == leftovers;
    let command: Vec<_> = command.iter().map(Into::into).collect();
    let job = Job {
        program: PROGRAM,
        program_file: &ProgramFile::find().expect("this program"),
        command: &command,
        environment: &[],
        loss_signal: Signal::TERM,
        kill_after: Duration::from_millis(kill_after.parse().expect("a number")),
        leftovers: Leftovers::NAMES.into_iter().find(named).expect("a word").1,
        inherited: None,
        lost: &lost,
        confirmed: &confirmed,
        look: &|| confirmed.set(),
    };
    let end = supervise::run(&job, &mut signals).expect("a command");
    drop(lock);
    ExitCode::from(match end {
        JobEnd::Finished(finish) => finish.follow(),
        JobEnd::NotStarted(_) => NOT_STARTED,
        JobEnd::LockLost => LOST,
    })
}
