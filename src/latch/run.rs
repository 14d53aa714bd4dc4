//! `latch run`: a command under a lock of a server.

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::thread;
use std::time::Duration;

use crossbeam_channel::bounded;

use crate::client::{Client, Error, Guard, Lock, Loss};
use crate::supervise::{self, Ended, Event, HeldLock, Job, Orphan, SignalWatch};
use crate::text::reason;

use super::servers::{client, place_of};
use super::{
    boolean, busy, complain, failure, options, shown, Failure, Outcome, LOST, SYSTEM_ERROR,
};

/// How long the server may take to hear that a command under a lock has ended.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn run(options: &options::Run, command: &[OsString]) -> Outcome {
    if command.is_empty() {
        return Err(Failure::usage("a command to run is wanted after --"));
    }
    let busy_ok = boolean("--busy-ok", options.busy_ok.as_deref())?;
    let client = client(options.reach())?;
    supervise::check_proc().map_err(no_process)?;
    let mut signals = SignalWatch::new().map_err(|error| no_signals(&error))?;

    let server = client.server_of(&options.key).to_string();
    let place = place_of(&client, &options.key);
    // On a thread of its own, so that a signal is heard while we wait. To leave the queue is to exit.
    let granted = Event::new().map_err(|error| no_signals(&error))?;
    let (key, timeout, lease, limit, done) = (
        options.key.clone(),
        options.timeout,
        options.lease,
        options.limit,
        granted.clone(),
    );
    let waiting = thread::Builder::new()
        .name("waiting".into())
        .spawn(move || {
            let lock = lock_of(&client, &key, lease, limit);
            let guard = match timeout {
                None => lock.acquire().map(Some),
                Some(0) => lock.try_acquire(),
                Some(seconds) => lock.acquire_within(Duration::from_secs(seconds)),
            };
            done.set();
            guard
        });
    let waiting = waiting.map_err(|error| {
        Failure::new(
            SYSTEM_ERROR,
            format_args!("cannot start a thread: {}", reason(&error)),
        )
    })?;
    if let Err(killed) = signals.wait_for(&granted) {
        return Ok(killed.follow());
    }
    let guard = match waiting.join().expect("the thread does not panic") {
        Err(error @ (Error::Unreachable(_) | Error::AuthFailed)) => {
            return Err(failure(shown(&server), &error));
        }
        Err(error @ (Error::InvalidKey | Error::InvalidArgument(_))) => {
            return Err(failure(shown(&options.key), &error));
        }
        Err(error) => return Err(failure(place, &error)),
        Ok(None) if busy_ok => return Ok(0),
        Ok(None) => {
            return Err(Failure::new(options.busy_status, busy(&place)));
        }
        Ok(Some(guard)) => guard,
    };
    run_under(guard, options, command, &mut signals)
}

fn no_signals(error: &io::Error) -> Failure {
    Failure::new(
        SYSTEM_ERROR,
        format_args!("cannot catch signals: {}", reason(error)),
    )
}

fn no_process(why: impl Display) -> Failure {
    Failure::new(SYSTEM_ERROR, format_args!("cannot start a process: {why}"))
}

/// Runs the command while the guard holds the lock, and gives it back.
fn run_under(
    guard: Guard,
    options: &options::Run,
    command: &[OsString],
    signals: &mut SignalWatch,
) -> Outcome {
    let lost = Event::new().map_err(|error| no_signals(&error))?;
    let confirmed = Event::new().map_err(|error| no_signals(&error))?;
    let told = lost.clone();
    guard.on_lost(move |_| told.set());
    let kill_after = Duration::from_secs(options.kill_after);
    let told = lost.clone();
    // A command that ignores SIGTERM is killed before the lock can be another's.
    if !guard.on_silence(kill_after, move || told.set()) {
        complain(format_args!(
            "{}: the lease of {} s is less than twice --kill-after, {} s: a command that ignores \
             SIGTERM may outlast it",
            shown(&options.key),
            guard.lease().as_secs(),
            options.kill_after
        ));
    }
    let look = || {
        let confirmed = confirmed.clone();
        guard.renew_and(move |is_held| {
            if is_held {
                confirmed.set();
            }
        });
    };
    let held = HeldLock {
        lost: &lost,
        confirmed: &confirmed,
        look: &look,
    };
    let job = Job {
        command,
        environment: &[
            ("LATCH_KEY", options.key.clone().into()),
            ("LATCH_TOKEN", guard.token().to_string().into()),
            ("LATCH_FENCE", guard.token().fence().to_string().into()),
        ],
        kill_after,
        inherited: None,
        orphan: Orphan::Ends,
    };
    let ended = supervise::run(&job, signals, &held).map_err(|error| no_process(reason(&error)))?;
    if ended == Ended::Lost {
        // A server that is silent is told of before the lock counts as lost.
        let why = guard.loss().unwrap_or(Loss::Deadline).to_string();
        let _ = give_back(guard);
        return Err(lost_lock(&options.key, &why));
    }
    give_back(guard).map_err(|why| lost_lock(&options.key, &why))?;
    Ok(match ended {
        Ended::Exited(status) => u8::try_from(status).unwrap_or(u8::MAX),
        Ended::Killed(killed) => killed.follow(),
        Ended::Lost => LOST,
    })
}

/// Releases, and says how the lock was lost if it was not ours any more. Does not wait long for a
/// server that does not answer while the lease runs: to exit is to release as well.
fn give_back(guard: Guard) -> Result<(), String> {
    if let Some(loss) = guard.loss() {
        return Err(loss.to_string());
    }
    let was_held = guard.is_held();
    let (sender, released) = bounded(1);
    let releasing = thread::Builder::new()
        .name("releasing".into())
        .spawn(move || {
            let _ = sender.send(guard.release());
        });
    let released = match releasing {
        Ok(_) => released.recv_timeout(RELEASE_PATIENCE),
        Err(_) => return Ok(()),
    };
    match released {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error @ (Error::Refused | Error::Closed))) => Err(error.to_string()),
        _ if was_held => Ok(()),
        _ => Err(Loss::Deadline.to_string()),
    }
}

fn lost_lock(key: &str, why: &str) -> Failure {
    Failure::new(
        LOST,
        format_args!("{}: the lock was lost: {why}", shown(key)),
    )
}

fn lock_of<'a>(
    client: &'a Client,
    key: &'a str,
    lease: Option<u64>,
    limit: Option<u32>,
) -> Lock<'a> {
    let lock = match limit {
        None => client.lock(key),
        Some(limit) => client.semaphore(key, limit),
    };
    match lease {
        None => lock,
        Some(seconds) => lock.lease(Duration::from_secs(seconds)),
    }
}
