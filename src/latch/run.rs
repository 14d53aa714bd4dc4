//! `latch run`: a command under a lock of a server.

use std::env;
use std::ffi::OsString;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::cli::failure::{CommandResult, Failure};
use crate::client::{Error, Guard, Guards, Loss, Token};
use crate::supervise::{self, Event, Job, JobEnd, SignalWatch};
use crate::sys::moment::Moment;
use crate::text::reason;

use super::claim::{wait, Asking};
use super::options::OnLost;
use super::servers::{lost_lock, place_of};
use super::{complain, explain, options, shown, usage, BUSY, PROGRAM};

/// The variables that the command finds in its environment: the key, the token, the fence, the
/// number of its semaphore slot if it has one, the numbers of the slots if it has several, and the
/// keys and tokens of all its locks.
pub(super) const VARIABLES: [&str; 6] = [
    "LATCH_KEY",
    "LATCH_TOKEN",
    "LATCH_FENCE",
    "LATCH_SLOT",
    "LATCH_SLOTS",
    "LATCH_TOKENS",
];

/// How long the release may take while there is a connection.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the release may take without a connection: longer than the guard tries.
const AWAY_TIMEOUT: Duration = Duration::from_secs(12);

/// Waits for the locks, runs the command while holding them, releases them, and exits in the same
/// way as the command.
pub(super) fn run(options: &options::Run, command: &[OsString]) -> CommandResult {
    if command.is_empty() {
        return Err(usage("missing command to run, after --"));
    }
    let mut asking = options.asking(&command[0])?;
    asking.is_busy_ok = options.busy_ok;
    let mut target = asking.targets.remove(0).numbered();
    if options.at_least.is_some() {
        target = target.keepable();
    }
    let keys = options.keys().map_err(usage)?;
    asking.targets = keys.into_iter().map(|key| target.with_key(key)).collect();
    if let Some(status) = already_held(&asking, options, command) {
        return Ok(status);
    }
    supervise::check_proc().map_err(Failure::cannot_start_process)?;
    let mut signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let guards = wait(asking, None, &mut signals)?;
    run_under(guards, options, command, &mut signals)
}

/// Returns an exit status if this process already runs under one of the locks, because its claim
/// would wait for its own lock. With `--nested`, this process instead becomes the command under
/// that lock, and this function does not return.
fn already_held(asking: &Asking, options: &options::Run, command: &[OsString]) -> Option<u8> {
    let never_waits = asking.timeout == Some(Duration::ZERO);
    let is_meant = options.nested || (!never_waits && options.limit.unwrap_or(1) == 1);
    if !is_meant {
        return None;
    }
    let target = asking.targets.iter().find(|target| {
        // If the server does not answer, the claim will report it.
        let token = outer_token(&target.key);
        token.is_some_and(|token| target.is_held_by(token, asking.deadline()))
    })?;
    if options.nested {
        supervise::become_command(PROGRAM, &command[0], &command[1..]);
    }
    complain(format_args!(
        "{}: this runs under the lock already, and would wait for itself; see --nested",
        target.place()
    ));
    Some(match options.busy_ok {
        true => 0,
        false => options.busy_status.unwrap_or(BUSY),
    })
}

/// The token, from the environment, of the lock of `key` under which this process runs.
fn outer_token(key: &str) -> Option<Token> {
    let [outer_key, token, _, _, _, tokens] =
        VARIABLES.map(|name| env::var(name).unwrap_or_default());
    let mut others = tokens.lines().filter_map(|line| line.rsplit_once('='));
    let token = match outer_key == key {
        true => &token,
        false => others.find(|(other, _)| *other == key)?.1,
    };
    token.parse().ok()
}

fn run_under(
    guards: Guards,
    options: &options::Run,
    command: &[OsString],
    signals: &mut SignalWatch,
) -> CommandResult {
    let kept_until = options.at_least.map(|time| Moment::now() + time);
    let never = Event::new().map_err(Failure::cannot_catch_signals)?;
    let confirmed = Event::new().map_err(Failure::cannot_catch_signals)?;
    let lost = guards.lost.clone();
    for guard in guards.iter() {
        set_when_silent(guard, options, &lost);
    }
    let look = || confirm(&guards, &confirmed);
    // This process may have been stopped since the grant, or blocked while it printed a warning.
    if !guards.is_held() {
        look();
        if let Err(killed) = signals.wait_for(&[&lost, &confirmed]) {
            release_all(guards);
            return Ok(killed.follow());
        }
    }
    let ignores_loss = options.on_lost == OnLost::Ignore;
    let look_again = || match ignores_loss {
        true => confirmed.set(),
        false => look(),
    };
    let job = Job {
        command,
        environment: &environment(&guards, &options.key),
        loss_signal: match options.on_lost {
            OnLost::Send(signal) => signal,
            OnLost::Ignore => Signal::TERM,
        },
        kill_after: options.kill_after,
        inherited: None,
        lost: if ignores_loss && !lost.is_set() {
            &never
        } else {
            &lost
        },
        confirmed: &confirmed,
        look: &look_again,
    };
    let finish = supervise::run(&job, signals)
        .map_err(|error| Failure::cannot_start_process(reason(&error)))?;
    let JobEnd::Finished(finish) = finish else {
        // If no guard has lost its lock yet, a server did not answer, and the command was ended
        // before the deadline of the lock.
        let lost = guards.iter().find(|guard| guard.loss().is_some());
        let lost = lost.unwrap_or(&guards[0]);
        let why = lost.loss().unwrap_or(Loss::Deadline).to_string();
        let failure = lost_lock(&place_of_guard(lost), &why);
        release_all(guards);
        return Err(failure);
    };
    finish_releases(guards, kept_until, |failure| match ignores_loss {
        // The command has finished: its exit status counts.
        true => {
            explain(failure);
            Ok(())
        }
        false => Err(failure),
    })?;
    Ok(finish.follow())
}

/// The variables of the command. A variable about a single lock describes the lock of `key`.
fn environment(guards: &Guards, key: &str) -> [(&'static str, Option<OsString>); 6] {
    let guard = guards.iter().find(|guard| guard.key() == key);
    let guard = guard.expect("its key is one of those that are held");
    let tokens = guards
        .iter()
        .map(|it| format!("{}={}\n", it.key(), it.token()));
    let numbers = guard.slot_numbers().iter();
    let numbers: Vec<String> = numbers.map(u32::to_string).collect();
    let values = [
        Some(key.to_owned()),
        Some(guard.token().to_string()),
        Some(guard.fence().to_string()),
        Some(numbers.join(" ")).filter(|_| numbers.len() == 1),
        Some(numbers.join(" ")).filter(|_| numbers.len() > 1),
        Some(tokens.collect::<String>().trim_end().to_owned()),
    ];
    let mut values = values.into_iter();
    VARIABLES.map(|name| (name, values.next().flatten().map(OsString::from)))
}

/// Renews all locks now, without blocking. Sets `confirmed` once the servers have renewed all of
/// them.
fn confirm(guards: &Guards, confirmed: &Event) {
    let unknown_count = Arc::new(AtomicUsize::new(guards.len()));
    for guard in guards.iter() {
        let (unknown_count, confirmed) = (Arc::clone(&unknown_count), confirmed.clone());
        guard.renew_and(move |is_held| {
            if is_held && unknown_count.fetch_sub(1, Ordering::AcqRel) == 1 {
                confirmed.set();
            }
        });
    }
}

/// Makes the guard set `lost` if the server does not answer for too long.
fn set_when_silent(guard: &Guard, options: &options::Run, lost: &Event) {
    let lost = lost.clone();
    // With this lead, a command that ignores SIGTERM is killed before the server can grant the lock
    // to another holder.
    if !guard.on_silence(options.kill_after, move || lost.set()) {
        complain(format_args!(
            "{}: the lease of {} s is less than twice --kill-after: a command that ignores \
             SIGTERM may outlast it",
            shown(guard.key()),
            guard.lease().as_secs()
        ));
    }
}

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

fn place_of_guard(guard: &Guard) -> String {
    place_of(guard.key(), guard.server())
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
    let was_leased = Moment::now() < lease_ends_at;
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
    // When this process ends, so does the connection, and the server releases the lock. Only a lock
    // that is to be kept, or that has no connection, is worth a long wait.
    let within = match was_held && kept_until.is_none() {
        true => RELEASE_TIMEOUT,
        false => AWAY_TIMEOUT,
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
            Err(_) if was_held => Release::Done,
            _ if was_leased => Release::Unheard(lease_ends_at.saturating_since(Moment::now())),
            _ => Release::Lost(Loss::Deadline.to_string()),
        }
    }
}
