//! The program `sema`: lock files without a server, for the shell. See sema(1).

mod options;
mod report;
mod run;
mod semats;

use std::env;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::unistd::{self, getsid};
use parking_lot::Mutex;

use crate::lockfile::{
    acquire_any_detached, slot_count_in_use, wait_any, Attempt, Busy, Cleaned, LockInfo, Obstacle,
    ReleaseOutcome, ReleaseTerms, Semaphore, SemaphoreError, SemaphoreOptions, SemaphoreResult,
    Slots, Unlockable, WaitLimit, Waited,
};
use crate::os::is_temporary;
use crate::os::text::{reason, Plain};
use crate::shared::cli::arguments::Parsed;
use crate::shared::cli::failure::{CommandResult, Failure, FILE_ERROR, SYSTEM_ERROR};
use crate::shared::cli::waiting::{Verbosity, WaitingLine};
use crate::shared::supervise::{self, EndBySignal, Undo};
pub use options::SELF;
use options::{SemaCommand, SemaOptions, SemaRequest, SHORT_USAGE};
use report::{complain, holder_text, print, shown_path, Object};

const PROGRAM: &str = "sema";

// The exit statuses of sema(1). The first four are for the commands that also exist in an older
// program of this name. The others are for `run` and `hold`, and latch(1) has the same ones.
// `acquire` and `wait` have one of those, too: FILE_ERROR for a stale lock that cannot be taken.
const DONE: u8 = 0;
const HELD: u8 = 1;
const OLDER_USAGE: u8 = 2;
const OLDER_ERROR: u8 = 3;
const USAGE: u8 = 64;
const LOST: u8 = 70;
const BUSY: u8 = 75;
const MISMATCH: u8 = 76;

/// The beginning of a message about a file.
const IO_ERROR: &str = "IO error: ";

/// The first line of the message if the lock is held and the command does not wait.
const ALREADY_HELD: &str = "Lock already held";

/// The first line of the message if this process runs under the lock.
const OWN_LOCK: &str = "This runs under the lock already, and would wait for itself";

impl Failure {
    /// The reason why the file at this path cannot be used.
    fn at(path: &Path, cause: impl Display) -> Failure {
        let path = shown_path(path);
        Failure::new(FILE_ERROR, format_args!("{IO_ERROR}{path}: {cause}"))
    }

    /// An error of the library about this path.
    fn about(path: &Path, error: &SemaphoreError) -> Failure {
        match error {
            SemaphoreError::IoError(error) => Failure {
                status: if is_temporary(error) {
                    SYSTEM_ERROR
                } else {
                    FILE_ERROR
                },
                ..Failure::at(path, reason(error))
            },
            SemaphoreError::Lost => Failure::new(
                LOST,
                format_args!("the lock was lost: {}", shown_path(path)),
            ),
            SemaphoreError::SlotCountMismatch(theirs) => {
                let path = shown_path(path);
                let why = format!("{path}: the lock is in use with --slots {theirs}");
                Failure::new(MISMATCH, why)
            }
            // The other errors contain their path, or are not about a path.
            other => Failure::new(FILE_ERROR, Plain(other.to_string().as_bytes())),
        }
    }

    /// Prints the reason with the prefix of `command`, and returns the exit status.
    fn explain(self, command: Option<SemaCommand>) -> u8 {
        if let Some(message) = self.message {
            // These words are only for scripts that read the messages of the older program.
            let message = if is_like_latch(command) {
                message.strip_prefix(IO_ERROR).unwrap_or(&message)
            } else {
                &message
            };
            complain(&format!("{}{message}\n", prefix(command)));
        }
        self.status
    }
}

/// The beginning of each message of a command. Scripts may rely on the prefix of the older program.
fn prefix(command: Option<SemaCommand>) -> &'static str {
    if is_like_latch(command) {
        "sema: "
    } else {
        "Error: "
    }
}

/// Whether a command has the exit statuses of latch(1). Unlike the statuses of the older program,
/// they are hard to confuse with those of the program that the command runs.
fn is_like_latch(command: Option<SemaCommand>) -> bool {
    matches!(command, Some(SemaCommand::Run | SemaCommand::Hold))
}

/// Runs one command and returns its exit status (sema(1), EXIT STATUS).
pub fn main() -> ExitCode {
    supervise::second_instance(PROGRAM);
    let mut arguments = env::args_os();
    let called = arguments.next().map(PathBuf::from).unwrap_or_default();
    let name = called.file_name().unwrap_or_default();
    if name == "semats" || name == "file-semaphore-ts" {
        return ExitCode::from(semats::main(arguments));
    }
    let arguments: Vec<OsString> = arguments.collect();
    let command = options::command_in(&arguments);
    let is_like_latch = is_like_latch(command);
    let result = match options::parse(arguments.into_iter()) {
        Parsed::Run(request) => carry_out(&request),
        Parsed::Print(text) => print(&text).map(|()| DONE),
        Parsed::Usage(reason) => {
            complain(&format!("{}{reason}\n\n{SHORT_USAGE}", prefix(command)));
            return ExitCode::from(if is_like_latch { USAGE } else { OLDER_USAGE });
        }
    };
    ExitCode::from(match result.map_err(|failure| failure.explain(command)) {
        Ok(status) => status,
        Err(status) if is_like_latch => status,
        Err(_) => OLDER_ERROR,
    })
}

fn carry_out(request: &SemaRequest) -> CommandResult {
    let ending = match request.command {
        // These two also handle the other signals.
        SemaCommand::Run | SemaCommand::Hold => Ok(EndBySignal::default()),
        // `try` does not, because a thread would take a tenth of its time.
        command => EndBySignal::watch(command == SemaCommand::Acquire),
    };
    let ending = ending.map_err(Failure::cannot_catch_signals)?;
    match request.command {
        SemaCommand::Try => take(request, Some(Duration::ZERO), &ending),
        SemaCommand::Acquire => take(request, request.options.timeout, &ending),
        SemaCommand::Release => release(request),
        SemaCommand::Status => status(request),
        SemaCommand::Wait => wait(request),
        SemaCommand::Clean => clean(request),
        SemaCommand::Run => run::run(request),
        SemaCommand::Hold => run::hold(request),
    }
}

/// Takes the lock, or one of the slots, within the timeout, and leaves it held. If a signal ends
/// this process before the caller knows, the lock is released.
fn take(request: &SemaRequest, timeout: Option<Duration>, ending: &EndBySignal) -> CommandResult {
    let slots: &'static [Semaphore] = slots(request, &request.options.lock)?.leak();
    if let Some(status) = refuse_own_lock(slots, timeout, request)? {
        return Ok(status);
    }
    let (line, tell) = waiting_line(request);
    let limit = WaitLimit::new(timeout, ending.arrived(), Some(&tell));
    let taken = take_detached(slots, &info(&request.options), &limit, ending);
    drop(line);
    match taken.map_err(|error| Failure::about(&request.path, &error))? {
        (slot, Attempt::Granted(())) => {
            let printed = acquired(slot, request);
            ending.caller_knows();
            printed
        }
        (slot, Attempt::Busy(busy)) => refuse(slot, &busy, request),
    }
}

/// Takes one of the locks for the process that `info` names, and leaves it held.
fn take_detached(
    slots: &'static [Semaphore],
    info: &LockInfo,
    limit: &WaitLimit<'_>,
    ending: &EndBySignal,
) -> SemaphoreResult<Waited<'static, ()>> {
    ending.guard(|| {
        let taken = acquire_any_detached(slots, info, limit);
        let pid = info.pid;
        let undo: Option<Undo> = match &taken {
            Ok((slot, Attempt::Granted(()))) => {
                let slot: &'static Semaphore = slot;
                Some(Box::new(move || slot.give_back(pid)))
            }
            _ => None,
        };
        (taken, undo)
    })
}

/// Says what the command waits for, and who holds it, as the wait tells the function. If no holder
/// is named twice in a row, says so at once, because no process may ever release the lock. Once
/// would be too early: the creator of the file may be about to write the record.
fn waiting_line(request: &SemaRequest) -> (WaitingLine, impl Fn(&Semaphore, &Busy)) {
    let talk = Verbosity::of(request.options.quiet, request.options.verbose);
    let about = |path: &Path| format!("waiting for {}", shown_path(path));
    let found = Arc::new(Mutex::new((0, about(&request.path), None::<Busy>)));
    let describe = {
        let found = Arc::clone(&found);
        move || match &*found.lock() {
            (_, about, Some(busy)) => format!("{about}: {}", report::holder_line(busy)),
            (_, about, None) => about.clone(),
        }
    };
    let tell = {
        let describe = describe.clone();
        move |slot: &Semaphore, busy: &Busy| {
            let is_named = busy.details.is_readable();
            let before = found.lock().0;
            let count = if is_named { 0 } else { before + 1 };
            *found.lock() = (count, about(slot.path()), Some(busy.clone()));
            if count == 2 && talk != Verbosity::Never {
                complain(&format!("{PROGRAM}: {}\n", describe()));
            }
        }
    };
    (WaitingLine::start(PROGRAM, talk, describe), tell)
}

/// Describes the acquired lock as JSON.
fn acquired_object(slot: &Semaphore, options: &SemaOptions) -> Object {
    let (written, info) = (slot.written_record().unwrap_or_default(), info(options));
    Object::new()
        .with("acquired", true)
        .with("path", shown_path(slot.path()))
        .with("pid", written.pid.unwrap_or(info.pid))
        .with("since", written.granted_at().unwrap_or(info.timestamp))
}

fn acquired(slot: &Semaphore, request: &SemaRequest) -> CommandResult {
    let options = &request.options;
    let path = shown_path(slot.path());
    let object = acquired_object(slot, options);
    let printed = say(&format!("Lock acquired: {path}"), &object, request);
    if printed.is_err() {
        // Without the output, the caller does not know that it holds the lock, and would not
        // release it.
        slot.give_back(info(options).pid);
    } else if !options.quiet && options.pid.or_else(known_caller).is_none() {
        complain(&format!(
            "Note: no process is known that {path} is held for; see --pid in sema(1)\n"
        ));
    }
    printed
}

/// Releases the lock. With `--slots`, releases the slot that the caller holds. With `--slots` and
/// `--force`, releases all slots.
fn release(request: &SemaRequest) -> CommandResult {
    let options = &request.options;
    let slots = slots(request, &request.options.lock)?;
    let must_be_own = options.slots.is_some() && options.token.is_none() && !options.force;
    let (mut was_there, mut is_any_free) = (false, false);
    let (mut kept, mut failure) = (None, None);
    for slot in &slots {
        let asking = asking(slot);
        let terms = ReleaseTerms {
            force: options.force,
            pid: options.pid.or(must_be_own.then_some(asking)),
            token: options.token.clone(),
            asking,
        };
        match slot.release(&terms) {
            Ok(ReleaseOutcome::Released) => {
                was_there = true;
                released(slot.path(), was_there, request)?;
                if !options.force {
                    return Ok(DONE);
                }
            }
            Ok(ReleaseOutcome::Kept(busy)) => match busy.obstacle {
                Obstacle::NotAFile | Obstacle::MountPoint => {
                    let reason = impediment(busy.obstacle).unwrap_or_default();
                    failure = Some(Failure::at(slot.path(), reason));
                }
                _ => kept = kept.or(Some((slot, busy))),
            },
            Err(SemaphoreError::NotLocked) => is_any_free = true,
            Err(error) => failure = Some(unusable(slot.path(), &error)?),
        }
    }
    match (kept, failure) {
        (Some((slot, busy)), _) => match impediment(busy.obstacle) {
            Some(cause) => Err(Failure::at(slot.path(), cause)),
            None => refuse(slot, &busy, request),
        },
        (None, _) if was_there => Ok(DONE),
        (None, Some(failure)) if !is_any_free => Err(failure),
        (None, _) => released(&request.path, was_there, request),
    }
}

fn released(path: &Path, was_there: bool, request: &SemaRequest) -> CommandResult {
    let path = shown_path(path);
    let object = Object::new()
        .with("released", was_there)
        .with("path", path.clone());
    say(&format!("Lock released: {path}"), &object, request)
}

/// The reason why a lock file cannot be removed, even if the lock may be released.
fn impediment(obstacle: Obstacle) -> Option<&'static str> {
    match obstacle {
        Obstacle::NotRemovable => Some("this user may not remove the file"),
        other => other.hopeless_reason(),
    }
}

/// Shows the lock, or all slots. Without `--slots`, shows the slots if some are in use and the path
/// itself has no lock. Returns DONE if the lock, or one of the slots, is free.
fn status(request: &SemaRequest) -> CommandResult {
    let options = &request.options;
    let is_missing = fs::symlink_metadata(&request.path).is_err();
    let in_use = || {
        is_missing
            .then(|| slot_count_in_use(&request.path, &options.config))
            .flatten()
    };
    let count = options.slots.or_else(in_use);
    let mut is_any_free = false;
    let mut texts = Vec::new();
    let mut failure = None;
    for slot in &slots_of(request, count, &options.lock)? {
        let path = count.map(|_| slot.path());
        match slot.look() {
            Ok(Some(busy)) if busy.obstacle == Obstacle::NotAFile => {
                let reason = impediment(Obstacle::NotAFile).unwrap_or_default();
                failure = Some(Failure::at(slot.path(), reason));
            }
            Ok(status) => {
                is_any_free |= status.is_none();
                texts.push(if options.json {
                    format!(
                        "{}\n",
                        report::status_object(path, status.as_ref()).compact()
                    )
                } else {
                    report::status_text(path, status.as_ref())
                });
            }
            Err(error) => failure = Some(unusable(slot.path(), &error)?),
        }
    }
    if let Some(failure) = failure.filter(|_| texts.is_empty()) {
        return Err(failure);
    }
    print(&texts.join(if options.json { "" } else { "\n" }))?;
    Ok(if is_any_free { DONE } else { HELD })
}

fn wait(request: &SemaRequest) -> CommandResult {
    let slots = slots(request, &request.options.lock)?;
    if let Some(status) = refuse_own_lock(&slots, request.options.timeout, request)? {
        return Ok(status);
    }
    let (line, tell) = waiting_line(request);
    let limit = WaitLimit::new(request.options.timeout, None, Some(&tell));
    let waited = wait_any(&slots, &limit);
    drop(line);
    match waited.map_err(|error| Failure::about(&request.path, &error))? {
        (slot, Attempt::Granted(())) => {
            let path = shown_path(slot.path());
            let object = Object::new().with("free", true).with("path", path.clone());
            say(&format!("Lock is free: {path}"), &object, request)
        }
        (slot, Attempt::Busy(busy)) => refuse(slot, &busy, request),
    }
}

fn clean(request: &SemaRequest) -> CommandResult {
    // There is exactly one slot, because this command does not take `--slots`.
    let slots = slots(request, &request.options.lock)?;
    let unlockable = if request.options.force {
        Unlockable::Remove
    } else {
        Unlockable::Keep
    };
    let (cleaned, obstacle) = slots[0]
        .clean_with(unlockable)
        .map_err(|error| Failure::about(&request.path, &error))?;
    let failure = obstacle
        .and_then(|obstacle| match obstacle {
            // A held lock is not a failure.
            Obstacle::Unreadable => Some("this user may not read the file"),
            other => impediment(other),
        })
        .map(|cause| Failure::at(&request.path, cause));
    let left = match obstacle {
        Some(Obstacle::Contended) => Some("another process changed it at the same time"),
        Some(Obstacle::Locked) => Some("another process has the file locked; see --force"),
        _ => None,
    };
    if let Some(why) = left.filter(|_| !request.options.quiet) {
        complain(&format!("Left: {}: {why}\n", shown_path(&request.path)));
    }
    tell_cleaned(&cleaned, failure.is_some(), request)?;
    failure.map_or(Ok(DONE), Err)
}

fn tell_cleaned(cleaned: &Cleaned, has_failed: bool, request: &SemaRequest) -> CommandResult {
    let path = shown_path(&request.path);
    let object = Object::new()
        .with("cleaned", cleaned.lock)
        .with("temporaries", cleaned.temporaries);
    let mut lines = Vec::new();
    if cleaned.lock {
        lines.push(format!("Stale lock removed: {path}"));
    }
    if cleaned.temporaries > 0 {
        lines.push(format!("Temporary files removed: {}", cleaned.temporaries));
    }
    if lines.is_empty() && has_failed && !request.options.json {
        return Ok(DONE);
    }
    if lines.is_empty() {
        lines.push(format!("Nothing to clean: {path}"));
    }
    say(&lines.join("\n"), &object, request)
}

/// Prints what was done: as JSON with `--json`, and otherwise as a line, unless `--quiet` is given.
fn say(line: &str, object: &Object, request: &SemaRequest) -> CommandResult {
    if request.options.json {
        print_json(object)?;
    } else if !request.options.quiet {
        print(&format!("{line}\n"))?;
    }
    Ok(DONE)
}

/// Refuses a wait that would never end, because this process runs under the lock. Prints that, and
/// returns the exit status; `None` if the wait may end.
fn refuse_own_lock(
    slots: &[Semaphore],
    timeout: Option<Duration>,
    request: &SemaRequest,
) -> Result<Option<u8>, Failure> {
    if timeout == Some(Duration::ZERO) {
        return Ok(None);
    }
    let own = run::own_lock(slots);
    let refused = own.map(|(slot, busy)| refuse_with(OWN_LOCK, slot, &busy, request));
    refused.transpose()
}

/// Prints why the lock was not granted or not released, and who holds it. Returns the exit status.
/// Fails if waiting for the lock cannot help.
fn refuse(slot: &Semaphore, busy: &Busy, request: &SemaRequest) -> CommandResult {
    use SemaCommand::{Acquire, Hold, Release, Run, Try, Wait};
    let (command, options) = (request.command, &request.options);
    if let Some(reason) = busy.obstacle.hopeless_reason() {
        let failure = Failure::at(slot.path(), reason);
        return match command {
            // The older program has no status for this, because it waits for ever. A loop around
            // the command can tell it from an error that may pass.
            Acquire | Wait if busy.details.is_stale => Ok(failure.explain(Some(command))),
            _ => Err(failure),
        };
    }
    let line = match command {
        Release if busy.details.is_readable() => "Lock held by different process",
        Release => "Lock not released",
        Wait => "Timeout waiting for lock to be released",
        Try => ALREADY_HELD,
        Run | Hold if options.timeout == Some(Duration::ZERO) => ALREADY_HELD,
        _ => "Timeout waiting for lock",
    };
    refuse_with(line, slot, busy, request)
}

/// Like [`refuse`], with this first line of the message.
fn refuse_with(line: &str, slot: &Semaphore, busy: &Busy, request: &SemaRequest) -> CommandResult {
    use SemaCommand::{Release, Try};
    let (command, options) = (request.command, &request.options);
    let is_json_alone = options.json && matches!(command, Try | Release);
    let age = busy.details.age.map(Duration::from_secs);
    let is_fine = options.busy_ok.allows(age);
    if !options.quiet && !is_json_alone && !is_fine {
        let prefix = if is_like_latch(Some(command)) {
            "sema: "
        } else {
            ""
        };
        complain(&format!(
            "{prefix}{line}\n{}",
            holder_text(slot.path(), busy)
        ));
    }
    if options.json {
        print_json(&report::held(busy))?;
    }
    Ok(if !is_like_latch(Some(command)) {
        HELD
    } else if is_fine {
        DONE
    } else {
        options.busy_status.unwrap_or(BUSY)
    })
}

fn print_json(object: &Object) -> Result<(), Failure> {
    print(&format!("{}\n", object.compact()))
}

/// The lock at the path, or all of its slots.
fn slots(request: &SemaRequest, options: &SemaphoreOptions) -> Result<Vec<Semaphore>, Failure> {
    slots_of(request, request.options.slots, options)
}

/// The lock at the path, or all slots of this number of slots.
fn slots_of(
    request: &SemaRequest,
    count: Option<u32>,
    options: &SemaphoreOptions,
) -> Result<Vec<Semaphore>, Failure> {
    let path = &request.path;
    let (config, options) = (request.options.config.clone(), options.clone());
    let locks = match count {
        None => Semaphore::with_options(path, config, options).map(|lock| vec![lock]),
        Some(count) => Slots::new(path, count, config, options).map(Slots::into_locks),
    };
    locks.map_err(|error| Failure::about(path, &error))
}

/// Returns the failure for one slot whose path cannot be that of a lock; returns any other failure
/// as an error. Any user of a shared directory can make one slot unusable, but the other slots may
/// still be usable.
fn unusable(path: &Path, error: &SemaphoreError) -> Result<Failure, Failure> {
    let failure = Failure::about(path, error);
    match error {
        SemaphoreError::NotALockFile(_) | SemaphoreError::InvalidPath(_) => Ok(failure),
        _ => Err(failure),
    }
}

/// The contents of the lock file. The grant sets the timestamp.
fn info(options: &SemaOptions) -> LockInfo {
    LockInfo {
        pid: options.pid.unwrap_or_else(caller),
        tag: options.tag.clone(),
        ..LockInfo::new()
    }
}

/// The process for which `try` and `acquire` take the lock: the script that calls them. If the
/// script is unknown, the lock is taken for this process, and is stale once this process has ended.
fn caller() -> u32 {
    known_caller().unwrap_or_else(std::process::id)
}

/// The process that asks for the release of this lock: usually the script that calls this program.
/// It is this process if the script has become this program by `exec`, as bash does for the last
/// command.
fn asking(slot: &Semaphore) -> u32 {
    let own = std::process::id();
    match slot.written_record() {
        Some(record) if record.pid == Some(own) => own,
        _ => caller(),
    }
}

/// The script that calls this program; `None` if it is unknown. The script is determined only once,
/// because another process becomes our parent when the script ends.
fn known_caller() -> Option<u32> {
    static CALLER: OnceLock<Option<u32>> = OnceLock::new();
    *CALLER.get_or_init(|| {
        // `None` if the parent belongs to another pid namespace.
        let parent = rustix::process::getppid()?;
        // Process 1 adopts orphans and starts services, which are in other sessions than its own.
        // In a container, process 1 may be the script itself.
        let session_of_init = getsid(Some(unistd::Pid::from_raw(1)));
        if parent.is_init() && getsid(None) != session_of_init {
            return None;
        }
        u32::try_from(parent.as_raw_nonzero().get()).ok()
    })
}
