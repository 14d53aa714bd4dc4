//! `sema run`: a command under a lock file.

use std::io;
use std::os::fd::AsFd;
use std::thread;

use crate::lockfile::{
    acquire_any, CancelFlag, LockInfo, Semaphore, SemaphoreError, SemaphoreGuard, SemaphoreOptions,
    SemaphoreResult, WaitLimit, Waited,
};
use crate::supervise::{self, Ended, Event, HeldLock, Job, Killed, Orphan, SignalWatch};
use crate::text::reason;

use super::options::{OnLost, Options, Request};
use super::report::{complain, shown_path};
use super::{
    refuse_if_hopeless, slots, tell_timeout, Failure, Outcome, ALREADY_HELD, SYSTEM_ERROR, TIMEOUT,
};

/// Waits for the lock, runs the command, gives the lock back, and exits as the command did.
pub(super) fn run(request: &Request) -> Outcome {
    let options = &request.options;
    supervise::check_proc()
        .map_err(|why| Failure::new(format_args!("cannot start a process: {why}")))?;
    let no_signals = |error: io::Error| failure("cannot catch signals", &error);
    let mut signals = SignalWatch::new().map_err(no_signals)?;
    let lost = Event::new().map_err(no_signals)?;
    let told = lost.clone();
    let watched = SemaphoreOptions::new()
        .heartbeat(true)
        .on_lost(move || told.set());
    let slots = slots(request, watched)?;
    let granted = wait_for_grant(&slots, options, &mut signals)
        .map_err(|error| failure("cannot start a thread", &error))?;
    let (at, guard) = match granted {
        Err(killed) => return Ok(killed.follow()),
        Ok(Ok(Waited::Granted(at, guard))) => (at, guard),
        Ok(Ok(Waited::Busy(at, busy))) => {
            refuse_if_hopeless(&slots[at], &busy)?;
            let line = match options.timeout {
                Some(timeout) if timeout.is_zero() => ALREADY_HELD,
                _ => TIMEOUT,
            };
            tell_timeout(line, &slots[at], &busy, request)?;
            return Ok(options.busy_status);
        }
        Ok(Err(error)) => return Err(Failure::about(&request.path, &error)),
    };

    let path = slots[at].path();
    let (nothing, confirmed) = (
        Event::new().map_err(no_signals)?,
        Event::new().map_err(no_signals)?,
    );
    let (lost, is_ignored) = match options.on_lost {
        OnLost::Term => (&lost, false),
        OnLost::Ignore => (&nothing, true),
    };
    let look = || match is_ignored || guard.is_held() {
        true => confirmed.set(),
        false => lost.set(),
    };
    let held = HeldLock {
        lost,
        confirmed: &confirmed,
        look: &look,
    };
    let job = Job {
        command: &request.words,
        environment: &[("SEMA_PATH", path.into())],
        kill_after: options.kill_after,
        inherited: Some(guard.as_fd()),
        orphan: Orphan::GoesOn,
    };
    let ended = supervise::run(&job, &mut signals, &held)
        .map_err(|error| failure("cannot start a process", &error))?;
    if ended == Ended::Lost {
        return Err(Failure::about(path, &SemaphoreError::Lost));
    }
    match guard.release() {
        Ok(()) => {}
        Err(SemaphoreError::Lost) if options.quiet => {}
        // The status is the command's all the same.
        Err(SemaphoreError::Lost) => complain(&format!("Lock lost: {}\n", shown_path(path))),
        Err(error) => {
            let Failure(message) = Failure::about(path, &error);
            complain(&format!("Error: {message}\n"));
        }
    }
    Ok(match ended {
        Ended::Exited(status) => u8::try_from(status).unwrap_or(u8::MAX),
        Ended::Killed(killed) => killed.follow(),
        Ended::Lost => SYSTEM_ERROR,
    })
}

/// What comes of waiting: a signal, or what the library says.
type Granted<'a> = Result<SemaphoreResult<Waited<SemaphoreGuard<'a>>>, Killed>;

/// Waits on a thread of its own, so that a signal is heard.
fn wait_for_grant<'a>(
    slots: &'a [Semaphore],
    options: &Options,
    signals: &mut SignalWatch,
) -> io::Result<Granted<'a>> {
    let info = LockInfo {
        tag: options.tag.clone(),
        ..LockInfo::new()
    };
    let cancel = CancelFlag::new()?;
    let granted = Event::new()?;
    thread::scope(|scope| {
        let waiting = thread::Builder::new()
            .name("waiting".into())
            .spawn_scoped(scope, || {
                let limit = WaitLimit::new(options.timeout, Some(&cancel));
                let acquired = acquire_any(slots, &info, &limit);
                granted.set();
                acquired
            })?;
        let waited = signals.wait_for(&granted);
        if waited.is_err() {
            cancel.set();
        }
        let acquired = waiting.join().expect("the thread does not panic");
        // What is granted as the signal comes is given back.
        Ok(waited.map(|()| acquired))
    })
}

fn failure(what: &str, error: &io::Error) -> Failure {
    Failure::new(format_args!("{what}: {}", reason(error)))
}
