//! The program `sema`: lock files without a server, for the shell. See sema(1).

mod job;
mod options;
mod report;
mod semats;

use std::env;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::escape::{reason, Plain};
use crate::lockfile::{
    acquire_any_detached, Busy, LockInfo, Obstacle, Patience, Semaphore, SemaphoreConfig,
    SemaphoreError, SemaphoreOptions, Status, Terms, Unlockable,
};
use crate::run;
use options::{Command, Options, Parsed, Request, SHORT_USAGE};
use report::{complain, holder_text, print, shown_path, Object};

const PROGRAM: &str = "sema";

// Exit status, as sema(1) has it.
const DONE: u8 = 0;
const HELD: u8 = 1;
const USAGE: u8 = 2;
const SYSTEM_ERROR: u8 = 3;

/// The first line where a lock was asked for once.
const ALREADY_HELD: &str = "Lock already held";
/// The first lines where time is up.
const TIMEOUT: &str = "Timeout waiting for lock";
const TIMEOUT_OF_WAIT: &str = "Timeout waiting for lock to be released";

/// Why we cannot do what was asked.
struct Failure(String);

impl Failure {
    fn new(message: impl Display) -> Failure {
        Failure(message.to_string())
    }

    /// An error of the library, about this path.
    fn about(path: &Path, error: &SemaphoreError) -> Failure {
        let path = shown_path(path);
        match error {
            SemaphoreError::IoError(error) => {
                Failure(format!("IO error: {path}: {}", reason(error)))
            }
            SemaphoreError::Lost => Failure(format!("the lock was lost: {path}")),
            // The others say where, or have nothing to do with it.
            other => Failure(Plain(other.to_string().as_bytes()).to_string()),
        }
    }
}

impl From<io::Error> for Failure {
    /// Of the standard output: of all else somebody knows the path.
    fn from(error: io::Error) -> Failure {
        Failure(format!("standard output: {}", reason(&error)))
    }
}

/// What a command may end with: an exit status, or a failure.
type Outcome = Result<u8, Failure>;

/// Runs one command and returns its exit status (sema(1), EXIT STATUS).
pub fn main() -> ExitCode {
    run::stage(PROGRAM);
    let mut arguments = env::args_os();
    let called = arguments.next().map(PathBuf::from).unwrap_or_default();
    let name = called.file_name().unwrap_or_default();
    if name == "semats" || name == "file-semaphore-ts" {
        return ExitCode::from(semats::main(arguments));
    }
    let outcome = match options::parse(arguments) {
        Parsed::Do(request) => carry_out(&request),
        Parsed::Print(text) => print(&text).map(|()| DONE).map_err(Failure::from),
        Parsed::Usage(reason) => {
            complain(&format!("Error: {reason}\n\n{SHORT_USAGE}"));
            return ExitCode::from(USAGE);
        }
    };
    ExitCode::from(outcome.unwrap_or_else(|Failure(message)| {
        complain(&format!("Error: {message}\n"));
        SYSTEM_ERROR
    }))
}

fn carry_out(request: &Request) -> Outcome {
    match request.command {
        Command::Try => try_once(request),
        Command::Acquire => acquire(request),
        Command::Release => release(request),
        Command::Status => status(request),
        Command::Wait => wait(request),
        Command::Clean => clean(request),
        Command::Run => job::run(request),
    }
}

fn try_once(request: &Request) -> Outcome {
    let slots = slots(request, SemaphoreOptions::new())?;
    match try_any(&slots, &request.options)? {
        Ok(slot) => acquired(slot, request),
        Err((slot, busy)) => {
            let status = &busy.status;
            tell_held(ALREADY_HELD, slot, status, Some(busy.obstacle), request)?;
            Ok(HELD)
        }
    }
}

/// Tries each once. If none is to be had, says what is in the way of the first.
fn try_any<'a>(
    slots: &'a [Semaphore],
    options: &Options,
) -> Result<Result<&'a Semaphore, (&'a Semaphore, Busy)>, Failure> {
    let info = info(options);
    let mut first = None;
    for slot in slots {
        let tried = slot.try_acquire_detached(&info);
        match tried.map_err(|error| Failure::about(slot.path(), &error))? {
            Ok(()) => return Ok(Ok(slot)),
            Err(busy) => first = first.or(Some((slot, busy))),
        }
    }
    Ok(Err(first.expect("there is at least one slot")))
}

fn acquire(request: &Request) -> Outcome {
    let options = &request.options;
    let slots = slots(request, SemaphoreOptions::new())?;
    let patience = Patience::new(options.timeout, None);
    match acquire_any_detached(&slots, &info(options), &patience) {
        Ok(at) => acquired(&slots[at], request),
        Err(SemaphoreError::Timeout) => {
            tell_timeout(TIMEOUT, &slots[0], request)?;
            Ok(HELD)
        }
        Err(error) => Err(Failure::about(&request.path, &error)),
    }
}

fn acquired(slot: &Semaphore, request: &Request) -> Outcome {
    let said = say(
        &format!("Lock acquired: {}", shown_path(slot.path())),
        request,
    );
    if said.is_err() {
        give_back(slot, holder(&request.options));
    }
    said
}

/// Releases a lock that was granted, but nobody could be told: whoever does not learn of it will not do so.
fn give_back(slot: &Semaphore, pid: u32) {
    let terms = Terms {
        pid: Some(pid),
        ..Terms::default()
    };
    let _ = slot.release(&terms);
}

fn release(request: &Request) -> Outcome {
    let options = &request.options;
    let semaphore = semaphore(&request.path, request, SemaphoreOptions::new())?;
    let terms = Terms {
        force: options.force,
        pid: options.pid,
        token: options.token.clone(),
        asking: caller(),
    };
    match semaphore.release(&terms) {
        Ok(Ok(())) | Err(SemaphoreError::NotLocked) => say(
            &format!("Lock released: {}", shown_path(&request.path)),
            request,
        ),
        Ok(Err(busy)) => {
            if let Some(cause) = impediment(busy.obstacle) {
                let path = shown_path(&request.path);
                return Err(Failure::new(format_args!("IO error: {path}: {cause}")));
            }
            let line = match busy.status.is_readable {
                true => "Lock held by different process",
                false => "Lock not released",
            };
            let obstacle = Some(busy.obstacle);
            tell_held(line, &semaphore, &busy.status, obstacle, request)?;
            Ok(HELD)
        }
        Err(error) => Err(Failure::about(&request.path, &error)),
    }
}

/// Why a lock was not released if it is not for its holder.
fn impediment(obstacle: Obstacle) -> Option<&'static str> {
    match obstacle {
        Obstacle::NotAFile => Some("not a regular file"),
        Obstacle::NotRemovable => Some("this user may not remove the file"),
        _ => None,
    }
}

fn status(request: &Request) -> Outcome {
    let semaphore = semaphore(&request.path, request, SemaphoreOptions::new())?;
    let status = semaphore
        .status()
        .map_err(|error| Failure::about(&request.path, &error))?;
    if request.options.json {
        print(&format!("{}\n", report::status_object(&status).compact()))?;
    } else {
        print(&report::status_text(&status))?;
    }
    Ok(if status.is_locked { HELD } else { DONE })
}

fn wait(request: &Request) -> Outcome {
    let semaphore = semaphore(&request.path, request, SemaphoreOptions::new())?;
    match semaphore.wait(request.options.timeout) {
        Ok(()) => say(
            &format!("Lock is free: {}", shown_path(&request.path)),
            request,
        ),
        Err(SemaphoreError::Timeout) => {
            tell_timeout(TIMEOUT_OF_WAIT, &semaphore, request)?;
            Ok(HELD)
        }
        Err(error) => Err(Failure::about(&request.path, &error)),
    }
}

fn clean(request: &Request) -> Outcome {
    let semaphore = semaphore(&request.path, request, SemaphoreOptions::new())?;
    let unlockable = match request.options.force {
        true => Unlockable::Remove,
        false => Unlockable::Keep,
    };
    let cleaned = semaphore
        .clean_with(unlockable)
        .map_err(|error| Failure::about(&request.path, &error))?;
    if request.options.json {
        let object = Object::new()
            .with("cleaned", cleaned.lock)
            .with("temporaries", cleaned.temporaries);
        print(&format!("{}\n", object.compact()))?;
        return Ok(DONE);
    }
    let path = shown_path(&request.path);
    if cleaned.lock {
        say(&format!("Stale lock removed: {path}"), request)?;
    }
    match cleaned.temporaries {
        0 if cleaned.lock => Ok(DONE),
        0 => say(&format!("Nothing to clean: {path}"), request),
        count => say(&format!("Temporary files removed: {count}"), request),
    }
}

/// Prints what was done, unless nobody wants to know.
fn say(line: &str, request: &Request) -> Outcome {
    if !request.options.quiet {
        print(&format!("{line}\n"))?;
    }
    Ok(DONE)
}

/// Says that a lock is held, and by whom.
fn tell_held(
    line: &str,
    slot: &Semaphore,
    status: &Status,
    obstacle: Option<Obstacle>,
    request: &Request,
) -> Result<(), Failure> {
    if request.options.json {
        print(&format!("{}\n", report::held(status).compact()))?;
    } else if !request.options.quiet {
        let holder = holder_text(slot.path(), status, obstacle);
        complain(&format!("{line}\n{holder}"));
    }
    Ok(())
}

/// Says that time is up, and who holds the lock, as far as that can be told by now.
fn tell_timeout(line: &str, slot: &Semaphore, request: &Request) -> Result<(), Failure> {
    let status = slot.status().ok().filter(|status| status.is_locked);
    if !request.options.quiet {
        let holder = status
            .as_ref()
            .map_or_else(String::new, |status| holder_text(slot.path(), status, None));
        complain(&format!("{line}\n{holder}"));
    }
    if request.options.json {
        let object = match &status {
            Some(status) => report::held(status),
            None => Object::new().with("locked", false),
        };
        print(&format!("{}\n", object.compact()))?;
    }
    Ok(())
}

/// The lock that is asked for, or all of its slots.
fn slots(request: &Request, options: SemaphoreOptions) -> Result<Vec<Semaphore>, Failure> {
    let Some(count) = request.options.slots else {
        return Ok(vec![semaphore(&request.path, request, options)?]);
    };
    let path_of = |slot: u32| {
        let mut path = request.path.clone().into_os_string();
        path.push(format!(".{slot}.lock"));
        path
    };
    (0..count)
        .map(|slot| semaphore(Path::new(&path_of(slot)), request, options.clone()))
        .collect()
}

fn semaphore(
    path: &Path,
    request: &Request,
    options: SemaphoreOptions,
) -> Result<Semaphore, Failure> {
    let given = &request.options;
    let config = SemaphoreConfig {
        stale_timeout: given.stale,
        ..SemaphoreConfig::default()
    };
    let mut options = options
        .stale_rule(given.stale_rule)
        .mode(given.mode)
        .sync(given.is_synced)
        .settle(given.settle);
    if let Some(token) = &given.token {
        options = options.token(token);
    }
    Semaphore::with_options(path, config, options).map_err(|error| Failure::about(path, &error))
}

/// What a lock file of ours shall say. The timestamp is that of the grant.
fn info(options: &Options) -> LockInfo {
    LockInfo {
        pid: holder(options),
        tag: options.tag.clone(),
        ..LockInfo::new()
    }
}

fn holder(options: &Options) -> u32 {
    options.pid.unwrap_or_else(caller)
}

/// The process on whose behalf a single command takes a lock: the script that calls it. Its own number
/// would mean nothing as soon as it has ended; process 1 only takes in those whose script is gone.
fn caller() -> u32 {
    rustix::process::getppid()
        .filter(|parent| !parent.is_init())
        .and_then(|parent| u32::try_from(parent.as_raw_nonzero().get()).ok())
        .unwrap_or_else(std::process::id)
}
