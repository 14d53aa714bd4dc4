//! `latch run`: a command under a lock of a server.

use std::ffi::OsString;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use rustix::process::Signal;

use crate::cli::failure::{CommandResult, Failure};
use crate::client::{Guard, Guards, Loss};
use crate::supervise::{self, Event, Finish, Job, JobEnd, Killed, ProgramFile, SignalWatch};
use crate::sys::moment::Moment;
use crate::text::{exact_time, reason};

use super::claim::{wait, Asking};
use super::nesting::OuterGrants;
use super::options::OnLost;
use super::releasing::{release_all, release_or_keep_all};
use super::servers::{lost_lock, place_of_guard};
use super::{
    complain, explain, note_commas, options, shown, usage, variables, PROGRAM, UNAVAILABLE,
};

/// Waits for the locks, runs the command while holding them, releases them, and exits in the same
/// way as the command.
pub(super) fn run(options: &options::Run, command: &[OsString]) -> CommandResult {
    if command.is_empty() {
        return Err(usage("missing command to run, after --"));
    }
    let mut asking = options.asking(&command[0])?;
    options.check_names().map_err(usage)?;
    for key in options.and.iter().filter(|key| key.contains(',')) {
        complain(format_args!(
            "--and {} names one key; write --and before each key",
            shown(key)
        ));
    }
    note_commas(&options.key, asking.talk);
    asking.busy_ok = options.busy_ok;
    let mut target = asking.targets.remove(0).numbered();
    if options.at_least.is_some() {
        target = target.keepable();
        target.keep_time = options.at_least;
    }
    let keys = options.keys().map_err(usage)?;
    asking.targets = keys.into_iter().map(|key| target.with_key(key)).collect();
    if options.nested {
        become_nested(&asking, options, command)?;
    }
    asking.refuse_own_locks(if options.nested { "" } else { "; see --nested" })?;
    let program_file = ProgramFile::find().map_err(Failure::cannot_start_process)?;
    let mut signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let guards = wait(asking, None, &mut signals)?;
    match picked(&guards, options) {
        Ok(picked) => run_under(
            guards,
            &program_file,
            options,
            command,
            picked,
            &mut signals,
        ),
        Err(failure) => {
            release_all(guards, Some(&mut signals));
            Err(failure)
        }
    }
}

/// The names for the slots of the lock, with blanks between them; `None` if there are no names to
/// pick from. A slot number is the index of its name.
fn picked(guards: &Guards, options: &options::Run) -> Result<Option<String>, Failure> {
    let Some(names) = options.names() else {
        return Ok(None);
    };
    let guard = guards.iter().next().expect("--pick takes one key");
    let numbers = guard.slot_numbers().iter();
    let picked: Vec<&str> = numbers
        .filter_map(|number| names.get(*number as usize).map(String::as_str))
        .collect();
    if picked.is_empty() {
        return Err(Failure::new(
            UNAVAILABLE,
            format_args!(
                "{}: the server does not number the slots, as --pick needs",
                place_of_guard(guard)
            ),
        ));
    }
    Ok(Some(picked.join(" ")))
}

/// If this process runs under a lock that covers the claim, becomes the command under that lock and
/// does not return. Fails if the command would then not get what its options ask for.
fn become_nested(
    asking: &Asking,
    options: &options::Run,
    command: &[OsString],
) -> Result<(), Failure> {
    let target = &asking.targets[0];
    if !OuterGrants::find(target, asking.deadline()).cover(target) {
        return Ok(());
    }
    if options.at_least.is_some() {
        return Err(usage(format_args!(
            "{}: --at-least is not for a command that runs under the lock already; give it to the \
             outer command",
            target.place()
        )));
    }
    supervise::become_command(PROGRAM, &command[0], &command[1..])
}

fn run_under(
    guards: Guards,
    program_file: &ProgramFile,
    options: &options::Run,
    command: &[OsString],
    picked: Option<String>,
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
            release_all(guards, Some(signals));
            return Ok(killed.follow());
        }
    }
    let ignores_loss = options.on_lost == OnLost::Ignore;
    let look_again = || {
        if ignores_loss {
            confirmed.set()
        } else {
            look()
        }
    };
    let job = Job {
        program: PROGRAM,
        program_file,
        command,
        environment: &variables::of_command(&guards, &options.key, picked),
        loss_signal: match options.on_lost {
            OnLost::Send(signal) => signal,
            OnLost::Ignore => Signal::TERM,
        },
        kill_after: options.kill_after,
        leftovers: options.leftovers,
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
    let (finish, kept_until) = match finish {
        JobEnd::Finished(finish) => (Some(finish), kept_until),
        // Nothing ran, so another host may try at once.
        JobEnd::NotStarted(status) => (Some(Finish::Exited(status)), None),
        JobEnd::LockLost => (None, None),
    };
    let Some(finish) = finish else {
        let failure = loss_of(&guards);
        release_all(guards, Some(signals));
        return Err(failure);
    };
    guards.iter().for_each(|it| it.set_status(finish.status()));
    let killed = release_or_keep_all(guards, kept_until, signals, |failure| {
        if ignores_loss {
            // The command has finished: its exit status counts.
            explain(failure);
            Ok(())
        } else {
            Err(failure)
        }
    })?;
    Ok(follow(finish, killed))
}

/// Ends as the command has ended, or by the signal that ended the wait for a server.
fn follow(finish: Finish, killed: Option<Killed>) -> u8 {
    match (finish, killed) {
        (Finish::Exited(_), Some(killed)) => killed.follow(),
        // The signal that ended the command counts, also if the user has pressed Ctrl-C again.
        (finish, _) => finish.follow(),
    }
}

/// The failure of a command that was ended because a lock was lost. If no guard has lost its lock
/// yet, a server did not answer, or allows no longer hold, and the command was ended before the
/// deadline of the lock.
fn loss_of(guards: &Guards) -> Failure {
    let is_out = |guard: &&Guard| guard.loss_to_come() == Loss::MaxHold;
    let lost = guards.iter().find(|guard| guard.loss().is_some());
    let to_blame = lost.or_else(|| guards.iter().find(is_out));
    let to_blame = to_blame.unwrap_or(&guards[0]);
    lost_lock(
        &place_of_guard(to_blame),
        &to_blame.loss_to_come().to_string(),
    )
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

/// Makes the guard set `lost` if the server does not answer for too long, or allows no longer hold.
fn set_when_silent(guard: &Guard, options: &options::Run, lost: &Event) {
    let lost = lost.clone();
    // With this lead, a command that ignores SIGTERM is killed before the server can grant the lock
    // to another holder.
    if !guard.on_silence(options.kill_after, move || lost.set()) {
        complain(format_args!(
            "{}: the lease of {} is less than twice --kill-after: a command that ignores \
             SIGTERM may outlast it",
            shown(guard.key()),
            exact_time(guard.lease())
        ));
    }
}
