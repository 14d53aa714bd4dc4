//! `sema run`: a command under a lock file.

use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use crate::cli::failure::{CommandResult, Failure};
use crate::lockfile::{
    acquire_any, Attempt, LockInfo, Semaphore, SemaphoreError, SemaphoreGuard, WaitLimit, Waited,
};
use crate::supervise::{self, Job, SignalWatch};
use crate::sys::event::Event;
use crate::text::reason;

use super::options::SemaRequest;
use super::report::{complain, shown_path};
use super::{refuse, slots, waiting_line, BUSY};

/// How long the command may take to end once the lock is lost.
const KILL_AFTER: Duration = Duration::from_secs(10);

/// Waits for the lock, runs the command while holding it, releases it, and exits as the command
/// did.
pub(super) fn run(request: &SemaRequest) -> CommandResult {
    supervise::check_proc().map_err(Failure::cannot_start_process)?;
    let (mut signals, lost, slots) = prepare(request)?;
    let waited = wait(&slots, request, None, &mut signals)?;
    match waited {
        (slot, Attempt::Granted(guard)) => run_under(guard, slot, request, &mut signals, &lost),
        (slot, Attempt::Busy(busy)) => refuse(slot, &busy, request),
    }
}

/// The signals of this process, the event of a lost lock, and the locks to wait for.
pub(super) fn prepare(
    request: &SemaRequest,
) -> Result<(SignalWatch, Event, Vec<Semaphore>), Failure> {
    let signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let lost = event()?;
    let lost_setter = lost.clone();
    let watched = request.options.lock.clone().heartbeat(true);
    let slots = slots(request, &watched.on_lost(move || lost_setter.set()))?;
    Ok((signals, lost, slots))
}

fn event() -> Result<Event, Failure> {
    Event::new().map_err(Failure::cannot_catch_signals)
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
    let never = event()?;
    let confirmed = event()?;
    let lost = if options.ignores_loss { &never } else { lost };
    let look = || match options.ignores_loss || guard.is_held() {
        true => confirmed.set(),
        false => lost.set(),
    };
    let job = Job {
        command: &request.words,
        environment: &[("SEMA_PATH", path.into())],
        kill_after: options.kill_after.unwrap_or(KILL_AFTER),
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
        // The command has finished: its exit status counts.
        Err(SemaphoreError::Lost) => complain(&format!("Lock lost: {}\n", shown_path(path))),
        Err(error) => {
            Failure::about(path, &error).explain();
        }
    }
    Ok(finish.follow())
}

/// Waits for the lock on a thread of its own, so that this thread can handle signals meanwhile.
/// When `abandoned` is set, the standard input is closed, and nothing waits any longer.
pub(super) fn wait<'a>(
    slots: &'a [Semaphore],
    request: &SemaRequest,
    abandoned: Option<&Event>,
    signals: &mut SignalWatch,
) -> Result<Waited<'a, SemaphoreGuard<'a>>, Failure> {
    let options = &request.options;
    let info = LockInfo {
        tag: options.tag.clone(),
        ..LockInfo::new()
    };
    let cancel = event()?;
    let over = event()?;
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
            .map_err(Failure::cannot_start_thread)?;
        let events: Vec<&Event> = [&over].into_iter().chain(abandoned).collect();
        let killed = signals.wait_for(&events).err();
        let was_over = over.is_set();
        if !was_over {
            cancel.set();
        }
        let acquired = waiting.join().expect("the thread does not panic");
        drop(line);
        // A signal wins over a grant at the same moment: to drop the guard is to release it.
        if let Some(killed) = killed {
            drop(acquired);
            return Err(Failure::silent(killed.follow()));
        }
        if !was_over {
            let why = "the standard input was closed before the grant";
            return Err(Failure::new(options.busy_status.unwrap_or(BUSY), why));
        }
        acquired.map_err(|error| Failure::about(&request.path, &error))
    })
}
