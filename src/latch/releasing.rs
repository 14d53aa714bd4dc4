//! The end of grants: what `latch run` and `latch hold` do with their locks when they are done, and
//! a claim of several keys with those that it has got in vain.

use std::sync::mpsc::{channel, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{Error, Guard, Guards, Loss};
use crate::os::moment::Moment;
use crate::os::text::rough_time_left;
use crate::shared::cli::failure::Failure;
use crate::shared::supervise::{Killed, SignalWatch};

use super::complain;
use super::servers::{lost_lock, place_of_guard};

/// How long the release may take after a signal, and if nothing was done under the lock.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the release may take if no server answers: longer than the guard tries.
const AWAY_TIMEOUT: Duration = Duration::from_secs(22);

/// Releases the locks in reverse order, or has the servers keep them until `kept_until`. Calls
/// `lost` with the failure of each lock that had been lost before, and returns the first failure
/// that `lost` returns. Returns the signal that has ended the wait for a server, if there is one.
pub(super) fn release_or_keep_all(
    guards: Guards,
    kept_until: Option<Moment>,
    signals: &mut SignalWatch,
    mut lost: impl FnMut(Failure) -> Result<(), Failure>,
) -> Result<Option<Killed>, Failure> {
    let (releases, killed) = end_all(guards, kept_until, Some(signals), AWAY_TIMEOUT);
    let is_unanswered = |it: &Release| it.loss.is_none() && it.result.is_none();
    let was_in_vain = releases.iter().any(is_unanswered);
    let mut outcome = Ok(());
    for release in releases {
        outcome = outcome.and(release.report().or_else(&mut lost));
    }
    outcome.map(|()| killed.filter(|_| was_in_vain))
}

/// Releases the locks in reverse order, and ignores the results. A signal ends the wait for a
/// server. Without `signals`, another thread receives them.
pub(super) fn release_all(guards: Guards, signals: Option<&mut SignalWatch>) {
    end_all(guards, None, signals, RELEASE_TIMEOUT);
}

/// Starts to release or keep all locks at once, so that their timeouts do not add up if a server
/// does not answer, and waits for the results. Returns the releases with their results so far, and
/// the signal that has arrived, if there is one.
fn end_all(
    guards: Guards,
    kept_until: Option<Moment>,
    mut signals: Option<&mut SignalWatch>,
    within: Duration,
) -> (Vec<Release>, Option<Killed>) {
    let (began, mut killed) = (Moment::now(), None);
    let mut until = began + within;
    // Set whenever a release is over, and perhaps at other times.
    let wake = guards.lost.clone();
    let (sender, results) = channel();
    let guards = guards.into_vec().into_iter().rev().enumerate();
    let begin = |(at, guard)| {
        let (sender, wake) = (sender.clone(), wake.clone());
        Release::begin(guard, kept_until, move |result| {
            let _ = sender.send((at, result));
            drop(sender);
            wake.set();
        })
    };
    let mut releases: Vec<Release> = guards.map(begin).collect();
    drop(sender);
    loop {
        match results.try_recv() {
            Ok((at, result)) => {
                releases[at].result = Some(result);
                continue;
            }
            Err(TryRecvError::Empty) if Moment::now() < until => {}
            Err(_) => return (releases, killed),
        }
        match &mut signals {
            Some(signals) if killed.is_none() => {
                killed = signals.wait_until(&[&wake], until).err();
            }
            _ => {
                let left = until.saturating_since(Moment::now());
                wake.wait_until(Instant::now() + left);
            }
        }
        wake.take();
        // Ctrl-C may have ended the command, and may have been meant for it alone. So a release
        // that the server answers is waited for after a signal, too.
        if killed.is_some() {
            until = until.min(began + RELEASE_TIMEOUT);
        }
    }
}

/// A release that has begun.
struct Release {
    place: String,
    /// What the server is asked for, in the message that it does not answer.
    request: &'static str,
    /// How the lock had been lost before.
    loss: Option<Loss>,
    began: Moment,
    lease_ends_at: Moment,
    /// `None` until it is over.
    result: Option<Result<(), Error>>,
    /// Whether there was no thread for the release, and the guard was dropped.
    is_dropped: bool,
}

impl Release {
    /// Starts to release the lock, or to have the server keep it until `kept_until`. Calls `finish`
    /// with the result, on another thread.
    fn begin(
        guard: Guard,
        kept_until: Option<Moment>,
        finish: impl FnOnce(Result<(), Error>) + Send + 'static,
    ) -> Release {
        let (place, loss, began) = (place_of_guard(&guard), guard.loss(), Moment::now());
        let lease_ends_at = guard.lease_ends_at();
        let releasing = move || {
            let left = kept_until.map(|until| until.saturating_since(Moment::now()));
            finish(match left {
                Some(left) => guard.keep_for(left),
                None => guard.release(),
            });
        };
        let thread = thread::Builder::new().name("releasing".into());
        Release {
            place,
            request: match kept_until {
                Some(_) => "the request to keep the lock",
                None => "the release",
            },
            loss,
            began,
            lease_ends_at,
            result: None,
            is_dropped: thread.spawn(releasing).is_err(),
        }
    }

    /// Tells the user if the server has not released or kept the lock as asked; fails if the lock
    /// was lost.
    fn report(self) -> Result<(), Failure> {
        let place = &self.place;
        let lost = |why: &str| Err(lost_lock(place, why));
        if let Some(loss) = self.loss {
            return lost(&loss.to_string());
        }
        match self.result {
            Some(Ok(())) => {}
            Some(Err(error @ (Error::Refused(_) | Error::Lost(..)))) => {
                return lost(&error.reason());
            }
            Some(Err(error @ (Error::NotKept(..) | Error::Unsupported(_)))) => {
                complain(format_args!(
                    "{place}: the lock is released before the time of --at-least is over: {}",
                    error.reason()
                ));
            }
            None if self.is_dropped => {}
            _ if self.began < self.lease_ends_at => {
                let left = self.lease_ends_at.saturating_since(Moment::now());
                complain(format_args!(
                    "{place}: no server answers {}: the key is free in {}; latch break frees it \
                     sooner",
                    self.request,
                    rough_time_left(left)
                ));
            }
            _ => return lost(&Loss::Deadline.to_string()),
        }
        Ok(())
    }
}
