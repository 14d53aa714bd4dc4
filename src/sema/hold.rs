//! `sema hold`: keeps a lock for a script, until the script closes the standard input.

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::lockfile::{Semaphore, SemaphoreGuard, Waited};
use crate::supervise::{Event, SignalWatch, StdinWatch};

use super::options::SemaRequest;
use super::report::shown_path;
use super::run::{tell_busy, wait};
use super::{acquired_object, slots, BUSY, DONE};

/// Waits for the lock, prints its path, and keeps it until the standard input is closed or a signal
/// comes.
pub(super) fn hold(request: &SemaRequest) -> CommandResult {
    let mut signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let lost = Event::new().map_err(Failure::cannot_catch_signals)?;
    let lost_setter = lost.clone();
    let watched = request.options.lock.clone().heartbeat(true);
    let slots = slots(request, &watched.on_lost(move || lost_setter.set()))?;
    let input = StdinWatch::watch().map_err(Failure::cannot_start_thread)?;
    let waited = wait(&slots, request, Some(&input.abandoned), &mut signals)?;
    match waited {
        Waited::Granted(at, guard) => {
            tell_granted(&slots[at], request)?;
            keep(guard, &slots[at], &[&input.closed, &lost], &mut signals)
        }
        Waited::Busy(at, busy) => {
            tell_busy(&slots[at], &busy, request)?;
            Ok(request.options.busy_status.unwrap_or(BUSY))
        }
    }
}

/// Prints the path, or JSON. Also with `--quiet`: the script waits for it.
fn tell_granted(slot: &Semaphore, request: &SemaRequest) -> Result<(), Failure> {
    let line = match request.options.json {
        true => acquired_object(slot, &request.options).compact(),
        false => shown_path(slot.path()),
    };
    output::print(&format!("{line}\n")).map_err(Failure::unprintable)
}

/// Keeps the lock until one of the events is set or a signal comes, and releases it.
fn keep(
    guard: SemaphoreGuard<'_>,
    slot: &Semaphore,
    ends: &[&Event],
    signals: &mut SignalWatch,
) -> CommandResult {
    let killed = signals.wait_for(ends).err();
    guard
        .release()
        .map_err(|error| Failure::about(slot.path(), &error))?;
    Ok(killed.map_or(DONE, |killed| killed.follow()))
}
