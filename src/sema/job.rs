//! `sema run`: a command under a lock file.

use std::io;
use std::os::fd::AsFd;
use std::thread;

use crossbeam_channel::{bounded, never};

use crate::escape::reason;
use crate::lockfile::{
    acquire_any, Flag, LockInfo, Patience, Semaphore, SemaphoreError, SemaphoreGuard,
    SemaphoreOptions, SemaphoreResult, Waited,
};
use crate::run::{self, Ended, Job, Orphan, SignalWatch};

use super::options::{OnLost, Options, Request};
use super::report::{complain, shown_path};
use super::{refuse_if_hopeless, slots, tell_timeout, Failure, Outcome, ALREADY_HELD, TIMEOUT};

/// Waits for the lock, runs the command, gives the lock back, and exits as the command did.
pub(super) fn run(request: &Request) -> Outcome {
    let options = &request.options;
    let signals = SignalWatch::new().map_err(|error| failure("cannot catch signals", &error))?;
    let (sender, lost) = bounded(1);
    let watched = SemaphoreOptions::new().heartbeat(true).on_lost(move || {
        let _ = sender.try_send(());
    });
    let slots = slots(request, watched)?;
    let granted = wait_for_grant(&slots, options, &signals)
        .map_err(|error| failure("cannot start a thread", &error))?;
    let (at, guard) = match granted {
        Err(signal) => return Ok(128 + u8::try_from(signal).unwrap_or(0)),
        Ok(Ok(Ok(granted))) => granted,
        Ok(Ok(Err((at, busy)))) => {
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
    let nothing = never();
    let (lost, is_ignored) = match options.on_lost {
        OnLost::Term => (&lost, false),
        OnLost::Ignore => (&nothing, true),
    };
    let job = Job {
        command: &request.words,
        environment: &[("SEMA_PATH", path.into())],
        kill_after: options.kill_after,
        inherited: Some(guard.as_fd()),
        orphan: Orphan::GoesOn,
    };
    let ended = run::run(&job, &signals, lost, || is_ignored || guard.is_held())
        .map_err(|error| failure("cannot start a process", &error))?;
    let Ended::Exited(status) = ended else {
        return Err(Failure::about(path, &SemaphoreError::Lost));
    };
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
    Ok(u8::try_from(status).unwrap_or(u8::MAX))
}

/// What comes of waiting: a signal, or what the library says.
type Granted<'a> = Result<SemaphoreResult<Waited<SemaphoreGuard<'a>>>, i32>;

/// Waits on a thread of its own, so that a signal is heard.
fn wait_for_grant<'a>(
    slots: &'a [Semaphore],
    options: &Options,
    signals: &SignalWatch,
) -> io::Result<Granted<'a>> {
    let info = LockInfo {
        tag: options.tag.clone(),
        ..LockInfo::new()
    };
    let cancel = Flag::new()?;
    let (sender, granted) = bounded(1);
    thread::scope(|scope| {
        thread::Builder::new()
            .name("waiting".into())
            .spawn_scoped(scope, || {
                let patience = Patience::new(options.timeout, Some(&cancel));
                let _ = sender.send(acquire_any(slots, &info, &patience));
            })?;
        Ok(signals.wait_for(&granted).inspect_err(|_| {
            cancel.set();
            // What is granted at this very moment is given back.
            drop(granted.recv());
        }))
    })
}

fn failure(what: &str, error: &io::Error) -> Failure {
    Failure::new(format_args!("{what}: {}", reason(error)))
}
