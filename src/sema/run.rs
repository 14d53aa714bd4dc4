//! `sema run`: a command under a lock file.

use std::io;
use std::os::fd::AsFd;
use std::thread;

use crate::cli::failure::{CommandResult, Failure};
use crate::lockfile::{
    acquire_any, Busy, LockInfo, Semaphore, SemaphoreError, SemaphoreGuard, WaitLimit, Waited,
};
use crate::supervise::{self, HeldLock, Job, JobEnd, Killed, Orphan, SignalWatch};
use crate::sys::event::Event;
use crate::text::reason;

use super::options::{LossPolicy, SemaRequest};
use super::report::{complain, shown_path};
use super::{refuse_if_hopeless, slots, tell_timeout, waiting_line, ALREADY_HELD, HELD, TIMEOUT};

/// Waits for the lock, runs the command while holding it, releases it, and exits as the command
/// did.
pub(super) fn run(request: &SemaRequest) -> CommandResult {
    let options = &request.options;
    supervise::check_proc()
        .map_err(|why| Failure::system(format_args!("cannot start a process: {why}")))?;
    let mut signals = SignalWatch::new().map_err(cannot_catch)?;
    let lost = Event::new().map_err(cannot_catch)?;
    let lost_setter = lost.clone();
    let watched = options.lock.clone().heartbeat(true);
    let slots = slots(request, &watched.on_lost(move || lost_setter.set()))?;
    let end = wait(&slots, request, None, &mut signals)?;
    match end {
        WaitEnd::Granted(at, guard) => run_under(guard, &slots[at], request, &mut signals, &lost),
        WaitEnd::Busy(at, busy) => {
            tell_busy(&slots[at], &busy, request)?;
            // As flock(1) has it.
            Ok(options.busy_status.unwrap_or(HELD))
        }
        WaitEnd::Abandoned => unreachable!("there is no such event"),
        WaitEnd::Killed(killed) => Ok(killed.follow()),
    }
}

/// Prints that the lock was not granted, and who holds it.
pub(super) fn tell_busy(
    slot: &Semaphore,
    busy: &Busy,
    request: &SemaRequest,
) -> Result<(), Failure> {
    refuse_if_hopeless(slot, busy)?;
    let line = match request.options.timeout {
        Some(timeout) if timeout.is_zero() => ALREADY_HELD,
        _ => TIMEOUT,
    };
    tell_timeout(line, slot, busy, request)
}

/// Runs the command while the guard holds the lock, and releases the lock.
fn run_under(
    guard: SemaphoreGuard<'_>,
    slot: &Semaphore,
    request: &SemaRequest,
    signals: &mut SignalWatch,
    lost: &Event,
) -> CommandResult {
    let (options, path) = (&request.options, slot.path());
    let never = Event::new().map_err(cannot_catch)?;
    let confirmed = Event::new().map_err(cannot_catch)?;
    let (lost, is_ignored) = match options.on_lost {
        LossPolicy::Term => (lost, false),
        LossPolicy::Ignore => (&never, true),
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
    let end = supervise::run(&job, signals, &held)
        .map_err(|error| failure("cannot start a process", &error))?;
    let JobEnd::Finished(finish) = end else {
        return Err(Failure::about(path, &SemaphoreError::Lost));
    };
    match guard.release() {
        Ok(()) => {}
        Err(SemaphoreError::Lost) if options.quiet => {}
        // The command has finished: its exit status counts.
        Err(SemaphoreError::Lost) => complain(&format!("Lock lost: {}\n", shown_path(path))),
        Err(error) => {
            Failure::about(path, &error).explain();
        }
    }
    Ok(finish.follow())
}

/// How a wait for the lock ended.
pub(super) enum WaitEnd<'a> {
    /// The lock, or the slot with this index, was granted.
    Granted(usize, SemaphoreGuard<'a>),
    /// The timeout is over. The slot with this index is an example of what prevents the grant.
    Busy(usize, Busy),
    /// The caller's event has ended it.
    Abandoned,
    /// A signal ended the wait.
    Killed(Killed),
}

/// Waits for the lock on a thread of its own, so that this thread can handle signals meanwhile.
/// When `abandoned` is set, no longer waits.
pub(super) fn wait<'a>(
    slots: &'a [Semaphore],
    request: &SemaRequest,
    abandoned: Option<&Event>,
    signals: &mut SignalWatch,
) -> Result<WaitEnd<'a>, Failure> {
    let options = &request.options;
    let info = LockInfo {
        tag: options.tag.clone(),
        ..LockInfo::new()
    };
    let cancel = Event::new().map_err(cannot_catch)?;
    let over = Event::new().map_err(cannot_catch)?;
    let line = waiting_line(request)?;
    thread::scope(|scope| {
        let waiting = thread::Builder::new()
            .name("waiting".into())
            .spawn_scoped(scope, || {
                let limit = WaitLimit::new(options.timeout, Some(&cancel));
                let acquired = acquire_any(slots, &info, &limit);
                over.set();
                acquired
            })
            .map_err(|error| failure("cannot start a thread", &error))?;
        let events: Vec<&Event> = [&over].into_iter().chain(abandoned).collect();
        let killed = signals.wait_for(&events).err();
        let is_abandoned = !over.is_set();
        if is_abandoned {
            cancel.set();
        }
        let acquired = waiting.join().expect("the thread does not panic");
        drop(line);
        // A signal wins over a grant at the same moment: the guard is dropped, and that releases
        // it.
        Ok(match (killed, acquired) {
            (Some(killed), _) => WaitEnd::Killed(killed),
            (None, _) if is_abandoned => WaitEnd::Abandoned,
            (None, Ok(Waited::Granted(at, guard))) => WaitEnd::Granted(at, guard),
            (None, Ok(Waited::Busy(at, busy))) => WaitEnd::Busy(at, busy),
            (None, Err(error)) => return Err(Failure::about(&request.path, &error)),
        })
    })
}

pub(super) fn cannot_catch(error: io::Error) -> Failure {
    failure("cannot catch signals", &error)
}

pub(super) fn failure(what: &str, error: &io::Error) -> Failure {
    Failure::system(format_args!("{what}: {}", reason(error)))
}
