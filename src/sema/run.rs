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

use super::options::{LossPolicy, SemaOptions, SemaRequest};
use super::report::{complain, shown_path};
use super::{refuse_if_hopeless, slots, tell_timeout, ALREADY_HELD, TIMEOUT};

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
    let end = wait(&slots, options, &mut signals)
        .map_err(|error| failure("cannot start a thread", &error))?;
    match end {
        WaitEnd::Granted(at, guard) => run_under(guard, &slots[at], request, &mut signals, &lost),
        WaitEnd::Busy(at, busy) => {
            refuse_if_hopeless(&slots[at], &busy)?;
            let line = match options.timeout {
                Some(timeout) if timeout.is_zero() => ALREADY_HELD,
                _ => TIMEOUT,
            };
            tell_timeout(line, &slots[at], &busy, request)?;
            Ok(options.busy_status)
        }
        WaitEnd::Failed(error) => Err(Failure::about(&request.path, &error)),
        WaitEnd::Killed(killed) => Ok(killed.follow()),
    }
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
enum WaitEnd<'a> {
    /// The lock, or the slot with this index, was granted.
    Granted(usize, SemaphoreGuard<'a>),
    /// The timeout is over. The slot with this index is an example of what prevents the grant.
    Busy(usize, Busy),
    Failed(SemaphoreError),
    /// A signal ended the wait.
    Killed(Killed),
}

/// Waits for the lock on a thread of its own, so that this thread can handle signals meanwhile.
fn wait<'a>(
    slots: &'a [Semaphore],
    options: &SemaOptions,
    signals: &mut SignalWatch,
) -> io::Result<WaitEnd<'a>> {
    let info = LockInfo {
        tag: options.tag.clone(),
        ..LockInfo::new()
    };
    let cancel = Event::new()?;
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
        let killed = signals.wait_for(&granted).err();
        if killed.is_some() {
            cancel.set();
        }
        let acquired = waiting.join().expect("the thread does not panic");
        // A signal wins over a grant at the same moment: the guard is dropped, and that releases
        // it.
        Ok(match (killed, acquired) {
            (Some(killed), _) => WaitEnd::Killed(killed),
            (None, Ok(Waited::Granted(at, guard))) => WaitEnd::Granted(at, guard),
            (None, Ok(Waited::Busy(at, busy))) => WaitEnd::Busy(at, busy),
            (None, Err(error)) => WaitEnd::Failed(error),
        })
    })
}

fn cannot_catch(error: io::Error) -> Failure {
    failure("cannot catch signals", &error)
}

fn failure(what: &str, error: &io::Error) -> Failure {
    Failure::system(format_args!("{what}: {}", reason(error)))
}
