//! `latch hold`: keeps a lock for a script, until the script closes the standard input.

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::supervise::{SignalWatch, StdinWatch};

use super::claim::wait;
use super::releasing::{release_all, release_or_keep_all};
use super::{note_commas, options, unprintable, PROGRAM};

/// Waits for the lock, prints its token and its fence, and keeps the lock until the standard input
/// is closed, a signal arrives or the lock is lost.
pub(super) fn hold(options: &options::Hold) -> CommandResult {
    let asking = options.asking(PROGRAM)?;
    note_commas(&options.key, asking.talk);
    asking.refuse_own_locks("")?;
    let mut signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let input = StdinWatch::watch().map_err(Failure::cannot_start_thread)?;
    let abandoned = Some(&input.abandoned);
    let guards = wait(asking, abandoned, &mut signals)?;
    let token = guards[0].token();
    if let Err(error) = output::print(&format!("{token} {}\n", token.fence())) {
        release_all(guards, Some(&mut signals));
        return Err(unprintable(&error));
    }
    let killed = signals.wait_for(&[&input.closed, &guards.lost]).err();
    let killed_later = release_or_keep_all(guards, None, &mut signals, Err)?;
    Ok(killed.or(killed_later).map_or(0, |killed| killed.follow()))
}
