//! The end of grants: what `latch run` and `latch hold` do with their locks when they are done, and
//! a claim of several keys with those that it has got in vain.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::cli::failure::Failure;
use crate::client::{Error, Guard, Guards, Loss};
use crate::sys::moment::Moment;

use super::complain;
use super::servers::{lost_lock, place_of_guard};

/// How long the release may take while there is a connection.
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
/// that `lost` returns.
pub(super) fn finish_releases(
    guards: Guards,
    kept_until: Option<Moment>,
    mut lost: impl FnMut(Failure) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut outcome = Ok(());
    for (place, release) in begin_releases(guards, kept_until) {
        outcome = outcome.and(finish_release(&place, release()).or_else(&mut lost));
    }
    outcome
}

/// Releases the locks in reverse order, and ignores the results.
pub(super) fn release_all(guards: Guards) {
    for (_, release) in begin_releases(guards, None) {
        release();
    }
}

/// Starts all releases at once, so that their timeouts do not add up if a server does not answer.
fn begin_releases(
    guards: Guards,
    kept_until: Option<Moment>,
) -> Vec<(String, impl FnOnce() -> Release)> {
    let guards = guards.into_vec().into_iter().rev();
    let begun = guards.map(|guard| (place_of_guard(&guard), begin_release(guard, kept_until)));
    begun.collect()
}

fn finish_release(place: &str, release: Release) -> Result<(), Failure> {
    match release {
        Release::Done => {}
        Release::Unheard(left) => complain(format_args!(
            "{place}: no server answers the release: the key is free in {} s, when its lease ends",
            left.as_secs() + 1
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
fn begin_release(guard: Guard, kept_until: Option<Moment>) -> impl FnOnce() -> Release {
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
        });
    // When this process ends, so does the connection, and the server usually releases the lock.
    // Only a lock that outlives its connection, is to be kept, or has no connection is worth a long
    // wait.
    let within = match (outlives_connection, was_held && kept_until.is_none()) {
        (true, _) => lease_ends_at.saturating_since(now) + LAST_ANSWER,
        (false, true) => RELEASE_TIMEOUT,
        (false, false) => AWAY_TIMEOUT,
    };
    let until = Instant::now() + within;
    move || {
        if let Some(loss) = loss {
            return Release::Lost(loss.to_string());
        }
        match released.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Ok(())) => Release::Done,
            Ok(Err(error @ (Error::Refused(_) | Error::Lost(..)))) => Release::Lost(error.reason()),
            Ok(Err(error @ (Error::NotKept(_) | Error::Unsupported(_)))) => {
                Release::NotKept(error.reason())
            }
            Ok(Err(error)) if kept_until.is_some() && was_held => Release::NotKept(error.reason()),
            Err(_) if was_held && !outlives_connection => Release::Done,
            _ if was_leased => Release::Unheard(lease_ends_at.saturating_since(Moment::now())),
            _ => Release::Lost(Loss::Deadline.to_string()),
        }
    }
}
