//! `sema run`: a command under a lock file, and `sema hold`: a lock for a script.

use std::ffi::OsString;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{self, Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;

use super::options::SemaRequest;
use super::report::shown_path;
use super::{
    acquired_object, refuse, refuse_own_lock, slots, waiting_line, BUSY, DONE, PROGRAM, USAGE,
};
use crate::lockfile::{
    acquire_any, Alive, Attempt, Busy, LockInfo, Semaphore, SemaphoreError, SemaphoreGuard,
    WaitLimit, Waited,
};
use crate::os::event::Event;
use crate::os::output;
use crate::os::process::ancestors;
use crate::os::text::reason;
use crate::shared::cli::environment::{locks_around, with_locks_around};
use crate::shared::cli::failure::{CommandResult, Failure};
use crate::shared::cli::waiting::wait_on_thread;
use crate::shared::supervise::{self, Job, ProgramFile, SignalWatch, StdinWatch};

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
    let Some(finish) = finish else {
        return Err(Failure::about(path, &SemaphoreError::Lost));
    };
    match guard.release() {
        Ok(()) => {}
        Err(SemaphoreError::Lost) if options.quiet => {}
        // The command has finished, so its exit status counts, and the error is only printed.
        Err(error) => {
            Failure::about(path, &error).explain(Some(request.command));
        }
    }
    if let Some(left) = finish.left.as_ref().filter(|_| !options.quiet) {
        output::complain(PROGRAM, left);
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
    let ending = (abandoned, options.busy_status.unwrap_or(BUSY));
    let (about, (line, tell)) = (shown_path(&request.path), waiting_line(request));
    let acquire = move || {
        let limit = WaitLimit::new(timeout, Some(&cancelled), Some(&tell));
        acquire_any(slots, &info, &limit)
    };
    let acquired = wait_on_thread(about, line, signals, ending, acquire, |waiting| {
        cancel.set();
        drop(waiting.join());
    })?;
    acquired.map_err(|error| Failure::about(&request.path, &error))
}

/// Waits for the lock, prints its path, and keeps it until the standard input is closed or a signal
/// comes.
pub(super) fn hold(request: &SemaRequest) -> CommandResult {
    let (mut signals, lost, slots) = prepare(request)?;
    if let Some(status) = refuse_own_lock(slots, request.options.timeout, request)? {
        return Ok(status);
    }
    let input = StdinWatch::watch().map_err(Failure::cannot_start_thread)?;
    let input = input.ok_or_else(|| Failure::new(USAGE, StdinWatch::AT_ITS_END))?;
    let waited = wait(slots, request, Some(&input.abandoned), &mut signals)?;
    match waited {
        (slot, Attempt::Granted(guard)) => {
            let line = if request.options.json {
                acquired_object(slot, &request.options).compact()
            } else {
                shown_path(slot.path())
            };
            // The line is printed even with `--quiet`, because the script waits for it.
            output::print(&format!("{line}\n")).map_err(Failure::unprintable)?;
            let killed = signals.wait_for(&[&input.closed, &lost]).err();
            let released = guard.release();
            released.map_err(|error| Failure::about(slot.path(), &error))?;
            Ok(killed.map_or(DONE, |killed| killed.follow()))
        }
        (slot, Attempt::Busy(busy)) => refuse(slot, &busy, request),
    }
}

/// The variable with the paths of the locks of all `sema run`s around a command.
pub(super) const ALL_PATHS: &str = "SEMA_ALL_PATHS";

/// Returns the value of [`ALL_PATHS`] for a command under the lock at `path`, too.
pub(super) fn paths_with(path: &Path) -> OsString {
    with_locks_around(ALL_PATHS, vec![line_of(path)])
}

/// The line of [`ALL_PATHS`] for the lock at `path`, by whichever directory and link that leads
/// there. A newline in the path is a space in the line. If that makes two paths alike, the holder
/// still tells them apart.
fn line_of(path: &Path) -> OsString {
    // The real path may be too long for the system.
    let real = fs::canonicalize(path).or_else(|_| path::absolute(path));
    let mut line = real
        .map_or_else(|_| path.into(), PathBuf::into_os_string)
        .into_vec();
    let newlines = line.iter_mut().filter(|byte| **byte == b'\n');
    newlines.for_each(|newline| *newline = b' ');
    OsString::from_vec(line)
}

/// Returns one of `slots` if a wait for one of them could never end, because `sema run`s around
/// this process hold them all.
pub(super) fn own_lock(slots: &[Semaphore]) -> Option<(&Semaphore, Busy)> {
    // No file of the list is looked at: its file server may not answer.
    let lines = locks_around(ALL_PATHS);
    if lines.is_empty() {
        return None;
    }
    let ancestors: Vec<u32> = ancestors().collect();
    let mut own = None;
    for slot in slots {
        if !lines.contains(&line_of(slot.path())) {
            return None;
        }
        // The list may be of a `sema run` that has ended, or that this process has left.
        let busy = slot.look().ok()??;
        let is_alive = busy.details.alive == Alive::Yes;
        let holder = busy.details.pid.filter(|_| is_alive)?;
        if !ancestors.contains(&holder) {
            return None;
        }
        own = own.or(Some((slot, busy)));
    }
    own
}
