//! `sema hold`: keeps a lock for a script, until the script closes the standard input.

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::lockfile::Attempt;
use crate::supervise::StdinWatch;

use super::options::SemaRequest;
use super::report::shown_path;
use super::run::{prepare, wait};
use super::{acquired_object, refuse, refuse_own_lock, DONE};

/// Waits for the lock, prints its path, and keeps it until the standard input is closed or a signal
/// comes.
pub(super) fn hold(request: &SemaRequest) -> CommandResult {
    let (mut signals, lost, slots) = prepare(request)?;
    if let Some(status) = refuse_own_lock(slots, request.options.timeout, request)? {
        return Ok(status);
    }
    let input = StdinWatch::watch().map_err(Failure::cannot_start_thread)?;
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
