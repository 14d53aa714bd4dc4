//! `sema run`: a command under a lock file.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::process::Signal;

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::waiting::{wait_on_thread, Interrupts};
use crate::lockfile::{
    acquire_any, Attempt, LockInfo, Semaphore, SemaphoreError, SemaphoreGuard, WaitLimit, Waited,
};
use crate::supervise::{self, Finish, Job, JobEnd, ProgramFile, SignalWatch};
use crate::sys::event::Event;
use crate::text::reason;

use super::nesting::{paths_with, ALL_PATHS};
use super::options::SemaRequest;
use super::report::shown_path;
use super::{refuse, refuse_own_lock, slots, waiting_line, BUSY, PROGRAM};

/// How long the command may take to end once the lock is lost.
const KILL_AFTER: Duration = Duration::from_secs(10);

/// Waits for the lock, runs the command while holding it, releases it, and exits as the command
/// did.
pub(super) fn run(request: &SemaRequest) -> CommandResult {
    let program_file = ProgramFile::find().map_err(Failure::cannot_start_process)?;
    let (mut signals, lost, slots) = prepare(request)?;
    if let Some(status) = refuse_own_lock(slots, request.options.timeout, request)? {
        return Ok(status);
    }
    let waited = wait(slots, request, None, &mut signals)?;
    match waited {
        (slot, Attempt::Granted(guard)) => {
            let slot = (guard, slot);
            run_under(slot, &program_file, request, &mut signals, &lost)
        }
        (slot, Attempt::Busy(busy)) => refuse(slot, &busy, request),
    }
}

/// Returns the signals of this process, the event that a lost lock sets, and the locks to wait for.
/// The locks live as long as the process, because threads may wait for them until the process ends.
pub(super) fn prepare(
    request: &SemaRequest,
) -> Result<(SignalWatch, Event, &'static [Semaphore]), Failure> {
    let signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let lost = event()?;
    let lost_setter = lost.clone();
    let watched = request.options.lock.clone().heartbeat(true);
    let slots = slots(request, &watched.on_lost(move || lost_setter.set()))?;
    Ok((signals, lost, slots.leak()))
}

fn event() -> Result<Event, Failure> {
    Event::new().map_err(Failure::cannot_catch_signals)
}

/// Runs the command while the guard holds the lock, and releases the lock.
fn run_under(
    (guard, slot): (SemaphoreGuard<'_>, &Semaphore),
    program_file: &ProgramFile,
    request: &SemaRequest,
    signals: &mut SignalWatch,
    lost: &Event,
) -> CommandResult {
    let (options, path) = (&request.options, slot.path());
    let never = event()?;
    let confirmed = event()?;
    let lost = if options.ignores_loss { &never } else { lost };
    let look = || {
        if options.ignores_loss || guard.is_held() {
            confirmed.set()
        } else {
            lost.set()
        }
    };
    let job = Job {
        program: PROGRAM,
        program_file,
        command: &request.words,
        environment: &[
            ("SEMA_PATH", Some(path.into())),
            (ALL_PATHS, Some(paths_with(path))),
        ],
        loss_signal: Signal::TERM,
        kill_after: options.kill_after.unwrap_or(KILL_AFTER),
        leftovers: options.leftovers,
        inherited: Some(guard.as_fd()),
        lost,
        confirmed: &confirmed,
        look: &look,
    };
    let finish = supervise::run(&job, signals)
        .map_err(|error| Failure::cannot_start_process(reason(&error)))?;
    let finish = match finish {
        JobEnd::Finished(finish) => finish,
        JobEnd::NotStarted(status) => Finish::Exited(status),
        JobEnd::LockLost => return Err(Failure::about(path, &SemaphoreError::Lost)),
    };
    match guard.release() {
        Ok(()) => {}
        Err(SemaphoreError::Lost) if options.quiet => {}
        // The command has finished, so its exit status counts, and the error is only printed.
        Err(error) => {
            Failure::about(path, &error).explain(Some(request.command));
        }
    }
    Ok(finish.follow())
}

/// Waits for the lock. The wait ends without the lock when a signal arrives, or when `abandoned` is
/// set because the standard input has ended.
pub(super) fn wait(
    slots: &'static [Semaphore],
    request: &SemaRequest,
    abandoned: Option<&Event>,
    signals: &mut SignalWatch,
) -> Result<Waited<'static, SemaphoreGuard<'static>>, Failure> {
    let options = &request.options;
    let info = LockInfo {
        tag: options.tag.clone(),
        ..LockInfo::new()
    };
    let (cancel, timeout) = (event()?, options.timeout);
    let cancelled = cancel.clone();
    let ending = Interrupts {
        signals,
        abandoned,
        busy_status: options.busy_status.unwrap_or(BUSY),
        cancel: Some(&cancel),
    };
    let (about, line) = (shown_path(&request.path), waiting_line(request)?);
    let acquired = wait_on_thread(about, line, ending, move || {
        acquire_any(slots, &info, &WaitLimit::new(timeout, Some(&cancelled)))
    })?;
    acquired.map_err(|error| Failure::about(&request.path, &error))
}
