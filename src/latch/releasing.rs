//! The end of grants: what `latch run` and `latch hold` do with their locks when they are done, and
//! a claim of several keys with those that it has got in vain.

use std::sync::mpsc::{channel, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cli::failure::Failure;
use crate::client::{Error, Guard, Guards, Loss};
use crate::supervise::{Event, Killed, SignalWatch};
use crate::sys::moment::Moment;
use crate::text::rough_time_left;

use super::complain;
use super::servers::{lost_lock, place_of_guard};

/// How long the release may take while there is a connection, and after a signal.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the release may take without a connection: longer than the guard tries.
const AWAY_TIMEOUT: Duration = Duration::from_secs(12);

/// How much longer the release of a lock that outlives its connection may take than the lease: the
/// time that the guard waits for its last answer.
const LAST_ANSWER: Duration = Duration::from_secs(2);

/// The result of a release.
enum Release {
    /// The server has released or kept the lock as asked, or releases it when the connection ends.
    Done,
    /// No server answered the release. The lease ends after this time, and the key is then free.
    Unheard(Duration),
    /// The server does not keep the lock, for this reason.
    NotKept(String),
    /// The lock was lost before the release, for this reason.
    Lost(String),
}

/// Releases the locks in reverse order, or has the servers keep them until `kept_until`. Calls
/// `lost` with the failure of each lock that had been lost before, and returns the first failure
/// that `lost` returns. Returns the signal that has ended the wait for a server, if there is one.
pub(super) fn release_or_keep_all(
    guards: Guards,
    kept_until: Option<Moment>,
    signals: &mut SignalWatch,
    mut lost: impl FnMut(Failure) -> Result<(), Failure>,
) -> Result<Option<Killed>, Failure> {
    let mut patience = Patience::new(&guards, Some(signals));
    let mut outcome = Ok(());
    for (place, release) in begin_all(guards, kept_until) {
        let finished = report_unless_done(&place, release(&mut patience));
        outcome = outcome.and(finished.or_else(&mut lost));
    }
    outcome.map(|()| patience.ended_by())
}

/// Releases the locks in reverse order, and ignores the results. A signal ends the wait for a
/// server. Without `signals`, another thread receives them.
pub(super) fn release_all(guards: Guards, signals: Option<&mut SignalWatch>) {
    let mut patience = Patience::new(&guards, signals);
    for (_, release) in begin_all(guards, None) {
        release(&mut patience);
    }
}

/// How long to wait for the servers' answers.
struct Patience<'a> {
    began: Moment,
    /// Set whenever a release is over, and perhaps at other times.
    wake: Event,
    signals: Option<&'a mut SignalWatch>,
    killed: Option<Killed>,
    /// Whether a release was not over at the end of the wait.
    was_in_vain: bool,
}

impl<'a> Patience<'a> {
    fn new(guards: &Guards, signals: Option<&'a mut SignalWatch>) -> Patience<'a> {
        Patience {
            began: Moment::now(),
            wake: guards.lost.clone(),
            signals,
            killed: None,
            was_in_vain: false,
        }
    }

    /// Waits for the result of a release until it is over, at most until `until`.
    fn wait<T>(&mut self, released: &Receiver<T>, until: Moment) -> Option<T> {
        loop {
            // Ctrl-C may have ended the command, and may have been meant for it alone. So a release
            // that the server answers is waited for after a signal, too.
            let until = match &self.killed {
                Some(_) => until.min(self.began + RELEASE_TIMEOUT),
                None => until,
            };
            match released.try_recv() {
                Ok(result) => return Some(result),
                Err(TryRecvError::Empty) if Moment::now() < until => {}
                Err(_) => {
                    self.was_in_vain = true;
                    return None;
                }
            }
            match &mut self.signals {
                Some(signals) if self.killed.is_none() => {
                    self.killed = signals.wait_until(&[&self.wake], until).err();
                }
                _ => {
                    let left = until.saturating_since(Moment::now());
                    self.wake.wait_until(Instant::now() + left);
                }
            }
            self.wake.take();
        }
    }

    fn ended_by(self) -> Option<Killed> {
        self.killed.filter(|_| self.was_in_vain)
    }
}

/// Starts to release or keep all locks at once, so that their timeouts do not add up if a server
/// does not answer.
fn begin_all(
    guards: Guards,
    kept_until: Option<Moment>,
) -> Vec<(String, impl FnOnce(&mut Patience<'_>) -> Release)> {
    let wake = guards.lost.clone();
    let guards = guards.into_vec().into_iter().rev();
    let begun = guards.map(|guard| {
        let place = place_of_guard(&guard);
        (
            place,
            begin_release_or_keep(guard, kept_until, wake.clone()),
        )
    });
    begun.collect()
}

/// Tells the user if the server has not released or kept the lock as asked; fails if the lock was
/// lost.
fn report_unless_done(place: &str, release: Release) -> Result<(), Failure> {
    match release {
        Release::Done => {}
        Release::Unheard(left) => complain(format_args!(
            "{place}: no server answers the release: the key is free in {}, when its lease ends",
            rough_time_left(left)
        )),
        Release::NotKept(why) => complain(format_args!(
            "{place}: the lock is released before the time of --at-least is over: {why}"
        )),
        Release::Lost(why) => return Err(lost_lock(place, &why)),
    }
    Ok(())
}

/// Starts to release the lock, or to have the server keep it until `kept_until`. The returned
/// function waits for the result. A release does not wait long for a silent server while the lock
/// is held: the end of this process ends the connection, and that releases the lock, too.
fn begin_release_or_keep(
    guard: Guard,
    kept_until: Option<Moment>,
    wake: Event,
) -> impl FnOnce(&mut Patience<'_>) -> Release {
    let loss = guard.loss();
    let (was_held, lease_ends_at) = (guard.is_held(), guard.lease_ends_at());
    let now = Moment::now();
    let was_leased = now < lease_ends_at;
    let outlives_connection = guard.outlives_connection();
    let (sender, released) = channel();
    // If no thread can be started, the lock is released at the end of this process.
    let _ = thread::Builder::new()
        .name("releasing".into())
        .spawn(move || {
            let left = kept_until.map(|until| until.saturating_since(Moment::now()));
            let _ = sender.send(match left {
                Some(left) => guard.keep_for(left),
                None => guard.release(),
            });
            wake.set();
        });
    // When this process ends, so does the connection, and the server usually releases the lock.
    // Only a lock that outlives its connection, is to be kept, or has no connection is worth a long
    // wait.
    let within = match (outlives_connection, was_held && kept_until.is_none()) {
        (true, _) => lease_ends_at.saturating_since(now) + LAST_ANSWER,
        (false, true) => RELEASE_TIMEOUT,
        (false, false) => AWAY_TIMEOUT,
    };
    let until = now + within;
    move |patience| {
        if let Some(loss) = loss {
            return Release::Lost(loss.to_string());
        }
        match patience.wait(&released, until) {
            Some(Ok(())) => Release::Done,
            Some(Err(error @ (Error::Refused(_) | Error::Lost(..)))) => {
                Release::Lost(error.reason())
            }
            Some(Err(error @ (Error::NotKept(..) | Error::Unsupported(_)))) => {
                Release::NotKept(error.reason())
            }
            Some(Err(error)) if kept_until.is_some() && was_held => {
                Release::NotKept(error.reason())
            }
            None if was_held && !outlives_connection => Release::Done,
            _ if was_leased => Release::Unheard(lease_ends_at.saturating_since(Moment::now())),
            _ => Release::Lost(Loss::Deadline.to_string()),
        }
    }
}
