//! `latch run`: a command under a lock of a server.

use std::env;
use std::ffi::OsString;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::cli::failure::{CommandResult, Failure};
use crate::client::{Error, Guard, Loss, Token};
use crate::supervise::{self, Event, Job, JobEnd, SignalWatch};
use crate::sys::moment::Moment;
use crate::text::reason;

use super::claim::wait;
use super::options::OnLost;
use super::servers::Target;
use super::{complain, explain, options, shown, usage, BUSY, LOST, PROGRAM};

/// What the command finds in its environment: the key, the token, the fence, and the number of its
/// slot of a semaphore.
pub(super) const VARIABLES: [&str; 4] = ["LATCH_KEY", "LATCH_TOKEN", "LATCH_FENCE", "LATCH_SLOT"];

/// How long the release may take if the server has the connection, and if that is away: a little
/// longer than the guard tries.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
const AWAY_TIMEOUT: Duration = Duration::from_secs(12);

/// Waits for the lock, runs the command while holding it, releases it, and exits as the command
/// did.
pub(super) fn run(options: &options::Run, command: &[OsString]) -> CommandResult {
    if command.is_empty() {
        return Err(usage("missing command to run, after --"));
    }
    let mut asking = options.asking(&command[0])?;
    asking.target = asking.target.numbered();
    asking.is_busy_ok = options.busy_ok;
    if options.at_least.is_some() {
        asking.target = asking.target.keepable();
    }
    if let Some(status) = already_held(&asking.target, options, command) {
        return Ok(status);
    }
    supervise::check_proc().map_err(Failure::cannot_start_process)?;
    let mut signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let place = asking.target.place();
    let guard = wait(asking, None, &mut signals)?;
    run_under(guard, &place, options, command, &mut signals)
}

/// Looks whether this process runs under the lock that it is to wait for, and so would wait for
/// itself. Runs the command under that lock if `--nested` says so, and does not return then.
fn already_held(target: &Target, options: &options::Run, command: &[OsString]) -> Option<u8> {
    let [key, token, ..] = VARIABLES.map(|name| env::var(name).unwrap_or_default());
    let token: Token = token.parse().ok()?;
    let never_waits = options::timeout(options.timeout, options.nonblock) == Some(Duration::ZERO);
    let is_meant = options.nested || (!never_waits && options.limit.unwrap_or(1) == 1);
    if key != options.key || !is_meant {
        return None;
    }
    // Without an answer, the claim says what is wrong.
    let holder = target.ask(|connection| connection.holder(&options.key, token.fence()));
    holder.ok().flatten()?;
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

fn run_under(
    guard: Guard,
    place: &str,
    options: &options::Run,
    command: &[OsString],
    signals: &mut SignalWatch,
) -> CommandResult {
    let kept_until = options.at_least.map(|time| Moment::now() + time);
    let never = Event::new().map_err(Failure::cannot_catch_signals)?;
    let lost = Event::new().map_err(Failure::cannot_catch_signals)?;
    let confirmed = Event::new().map_err(Failure::cannot_catch_signals)?;
    let kill_after = options.kill_after;
    set_when_lost(&guard, options, &lost);
    let look = || {
        let confirmed = confirmed.clone();
        guard.renew_and(move |is_held| {
            if is_held {
                confirmed.set();
            }
        });
    };
    // This process may have been stopped since the grant, or its message had to wait for room.
    if !guard.is_held() {
        look();
        if let Err(killed) = signals.wait_for(&[&lost, &confirmed]) {
            let _ = release(guard, None);
            return Ok(killed.follow());
        }
    }
    let ignores_loss = options.on_lost == OnLost::Ignore;
    let look_again = || match ignores_loss {
        true => confirmed.set(),
        false => look(),
    };
    let [key, token, fence, slot] = VARIABLES;
    let number = guard.slot_number().map(|number| number.to_string().into());
    let job = Job {
        command,
        environment: &[
            (key, Some(options.key.clone().into())),
            (token, Some(guard.token().to_string().into())),
            (fence, Some(guard.fence().to_string().into())),
            (slot, number),
        ],
        loss_signal: match options.on_lost {
            OnLost::Send(signal) => signal,
            OnLost::Ignore => Signal::TERM,
        },
        kill_after,
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
        // Without a loss, the server is silent, and the command was ended before the deadline.
        let why = guard.loss().unwrap_or(Loss::Deadline).to_string();
        let _ = release(guard, None);
        return Err(lost_lock(place, &why));
    };
    match finish_release(guard, place, kept_until) {
        // The command has finished: its exit status counts.
        Err(failure) if ignores_loss => {
            explain(failure);
        }
        released => released?,
    }
    Ok(finish.follow())
}

/// Has `lost` set when the lock is lost, or the server silent for too long.
fn set_when_lost(guard: &Guard, options: &options::Run, lost: &Event) {
    let lost_setter = lost.clone();
    guard.on_lost(move |_| lost_setter.set());
    let lost_setter = lost.clone();
    // A command that ignores SIGTERM is killed before the server can grant the lock to another
    // holder.
    if !guard.on_silence(options.kill_after, move || lost_setter.set()) {
        complain(format_args!(
            "{}: the lease of {} s is less than twice --kill-after: a command that ignores \
             SIGTERM may outlast it",
            shown(&options.key),
            guard.lease().as_secs()
        ));
    }
}

/// What became of a lock when its work was done.
pub(super) enum Release {
    /// The server has released it, or does so at the end of the connection.
    Done,
    /// No server heard of the release: the key is free after this time at the latest.
    Unheard(Duration),
    /// The server has released it, rather than keep it, for this reason.
    NotKept(String),
    /// It was lost before.
    Lost(String),
}

/// Releases the lock when its work is done, or has the server keep it until then. Fails if it was
/// lost before.
pub(super) fn finish_release(
    guard: Guard,
    place: &str,
    kept_until: Option<Moment>,
) -> Result<(), Failure> {
    match release(guard, kept_until) {
        Release::Done => {}
        Release::Unheard(left) => complain(format_args!(
            "{place}: no server takes the release: the key is free in {} s, at the end of its lease",
            left.as_secs() + 1
        )),
        Release::NotKept(why) => complain(format_args!(
            "{place}: the lock is released before the time of --at-least is over: {why}"
        )),
        Release::Lost(why) => return Err(lost_lock(place, &why)),
    }
    Ok(())
}

/// Releases the lock, or has the server keep it until then. A release does not wait long for a
/// silent server while the lease runs: the end of this process ends the connection, and that
/// releases the lock, too.
pub(super) fn release(guard: Guard, kept_until: Option<Moment>) -> Release {
    if let Some(loss) = guard.loss() {
        return Release::Lost(loss.to_string());
    }
    let (was_held, lease_ends_at) = (guard.is_held(), guard.lease_ends_at());
    let was_leased = Moment::now() < lease_ends_at;
    let (sender, released) = channel();
    let releasing = thread::Builder::new()
        .name("releasing".into())
        .spawn(move || {
            let left = kept_until.map(|until| until.saturating_since(Moment::now()));
            let _ = sender.send(match left {
                Some(left) => guard.keep_for(left),
                None => guard.release(),
            });
        });
    if releasing.is_err() {
        return Release::Done;
    }
    // The end of this process would not have the lock kept.
    let within = match was_held && kept_until.is_none() {
        true => RELEASE_TIMEOUT,
        false => AWAY_TIMEOUT,
    };
    match released.recv_timeout(within) {
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

fn lost_lock(place: &str, why: &str) -> Failure {
    Failure::new(LOST, format_args!("{place}: the lock was lost: {why}"))
}
