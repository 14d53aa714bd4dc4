//! `latch hold`: keeps a lock for a script, until the script closes the standard input.

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::client::Guard;
use crate::supervise::{Event, SignalWatch, StdinWatch};

use super::claim::wait;
use super::run::{finish_release, release};
use super::{options, unprintable, PROGRAM};

/// Waits for the lock, prints its token and its fence, and keeps it until the standard input is
/// closed or a signal comes.
pub(super) fn hold(options: &options::Hold) -> CommandResult {
    let asking = options.asking(PROGRAM)?;
    let mut signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let place = asking.target.place();
    let input = StdinWatch::watch().map_err(Failure::cannot_start_thread)?;
    let abandoned = Some(&input.abandoned);
    let guard = wait(asking, abandoned, &mut signals)?;
    keep(guard, &place, &input, &mut signals)
}

fn keep(guard: Guard, place: &str, input: &StdinWatch, signals: &mut SignalWatch) -> CommandResult {
    let lost = Event::new().map_err(Failure::cannot_catch_signals)?;
    let lost_setter = lost.clone();
    guard.on_lost(move |_| lost_setter.set());
    let token = guard.token();
    if let Err(error) = output::print(&format!("{token} {}\n", token.fence())) {
        let _ = release(guard, None);
        return Err(unprintable(&error));
    }
    let killed = signals.wait_for(&[&input.closed, &lost]).err();
    finish_release(guard, place, None)?;
    Ok(killed.map_or(0, |killed| killed.follow()))
}
