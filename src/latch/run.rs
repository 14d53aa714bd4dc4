//! `latch run`: a command under a lock of a server, and `latch hold`: a lock for a script.

use std::ffi::OsString;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use rustix::process::Signal;

use super::claim::{wait, Asking};
use super::releasing::{release_all, release_or_keep_all};
use super::servers::{lost_lock, place_of_guard};
use super::{
    complain, explain, note_commas, options, shown, usage, variables, PROGRAM, UNAVAILABLE,
};
use crate::client::{Guard, Guards, Loss};
use crate::os::moment::Moment;
use crate::os::output;
use crate::os::text::{exact_time, reason};
use crate::shared::cli::failure::{CommandResult, Failure};
use crate::shared::supervise::{self, Event, Job, Killed, ProgramFile, SignalWatch, StdinWatch};

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
    note_commas(&options.lock.key, asking.talk);
    asking.busy_ok = options.busy_ok;
    let mut target = asking.targets.remove(0);
    target.is_numbered = true;
    target.is_keepable = options.at_least.is_some();
    target.keep_time = options.at_least;
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
    if !asking.outer_grants(target)?.cover(target) {
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
        lose_when_silent(guard, options, &lost);
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
    let ignores_loss = options.on_lost.is_none();
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
        environment: &variables::of_command(&guards, &options.lock.key, picked),
        loss_signal: options.on_lost.unwrap_or(Signal::TERM),
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
    let Some(finish) = finish else {
        let failure = loss_of(&guards);
        release_all(guards, Some(signals));
        return Err(failure);
    };
    // If nothing ran, another host may try at once.
    let kept_until = kept_until.filter(|_| finish.has_run);
    guards.iter().for_each(|it| it.set_status(finish.status));
    let killed = release_or_keep_all(guards, kept_until, signals, |failure| {
        if ignores_loss {
            // The command has finished: its exit status counts.
            explain(failure);
            Ok(())
        } else {
            Err(failure)
        }
    })?;
    if let Some(left) = finish.left.filter(|_| !options.busy.talk.quiet) {
        complain(left);
    }
    // The signal that ended the command counts, also if the user has pressed Ctrl-C again while a
    // server did not answer.
    let killed = finish.killed.or(killed);
    Ok(killed.map_or(finish.status, Killed::follow))
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
fn lose_when_silent(guard: &Guard, options: &options::Run, lost: &Event) {
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

/// Waits for the lock, prints its token and its fence, and keeps the lock until the standard input
/// is closed, a signal arrives or the lock is lost.
pub(super) fn hold(options: &options::Hold) -> CommandResult {
    let asking = options.asking(PROGRAM)?;
    note_commas(&options.lock.key, asking.talk);
    asking.refuse_own_locks("")?;
    let mut signals = SignalWatch::new().map_err(Failure::cannot_catch_signals)?;
    let input = StdinWatch::watch().map_err(Failure::cannot_start_thread)?;
    let input = input.ok_or_else(|| usage(StdinWatch::AT_ITS_END))?;
    let abandoned = Some(&input.abandoned);
    let guards = wait(asking, abandoned, &mut signals)?;
    let token = guards[0].token();
    if let Err(error) = output::print(&format!("{token} {}\n", token.fence())) {
        release_all(guards, Some(&mut signals));
        return Err(Failure::unprintable(error));
    }
    let killed = signals.wait_for(&[&input.closed, &guards.lost]).err();
    let killed_later = release_or_keep_all(guards, None, &mut signals, Err)?;
    Ok(killed.or(killed_later).map_or(0, |killed| killed.follow()))
}
