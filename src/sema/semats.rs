//! `sema` when it is called as `semats`: the commands, texts and exit statuses of an older program
//! of that name, with times in milliseconds. See latchd-migration(7).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use crate::lockfile::{
    Attempt, LockDetails, LockInfo, Obstacle, ReleaseOutcome, ReleaseTerms, Semaphore,
    SemaphoreConfig, SemaphoreError, SemaphoreOptions, SemaphoreResult, WaitLimit, Waited,
};
use crate::os::text::Plain;
use crate::shared::cli::words::split_value;
use crate::shared::supervise::EndBySignal;

use super::report::{complain, print, shown_path, Object};
use super::{asking, caller, impediment, reason, take_detached, ALREADY_HELD};

const DONE: u8 = 0;
const FAILED: u8 = 1;

/// The mode of the lock files, which only their owner can read.
const MODE: u32 = 0o600;

/// The age beyond which a lock may be stale. No option changes it.
const STALE: Duration = Duration::from_secs(3600);

const USAGE: &str = "\
Usage: semats COMMAND PATH [OPTIONS]

Commands:
  acquire        wait for the lock and take it
  try-acquire    take the lock if it is free or stale
  release        give the lock back
  status         show who holds the lock
  clean          remove a stale lock and the left-overs of crashes

Options:
  -t, --tag text             what the lock is held for
  --timeout milliseconds     how long to wait (no limit)
  -f, --force                release another holder's lock
  -j, --json                 print JSON
  -v, --verbose              print each step on stderr
  -h, --help                 print this and exit
";

/// A command line as typed values. Unknown options are ignored.
#[derive(Default)]
struct SematsRequest {
    /// The command, the path, and any further words, which have no effect.
    words: Vec<OsString>,
    tag: Option<String>,
    timeout: Option<Duration>,
    force: bool,
    json: bool,
    verbose: bool,
    help: bool,
    ending: EndBySignal,
}

/// The exit status of a command, or the failure to print on stderr.
type SematsResult = Result<u8, Object>;

type CommandFn = fn(&'static Semaphore, &SematsRequest) -> SematsResult;

/// Runs one command and returns its exit status.
pub(super) fn main(arguments: impl Iterator<Item = OsString>) -> u8 {
    let mut request = read(arguments);
    if request.help {
        return print_out(USAGE, DONE);
    }
    let Some(name) = request.words.first() else {
        return print_out(USAGE, FAILED);
    };
    let (command, step): (CommandFn, _) = match name.to_str() {
        Some("acquire") => (acquire, Some("Acquiring lock")),
        Some("try-acquire") => (try_acquire, Some("Trying to acquire lock")),
        Some("release") => (release, Some("Releasing lock")),
        Some("status") => (status, None),
        Some("clean") => (clean, Some("Cleaning stale locks")),
        _ => {
            let name = Plain(name.as_bytes());
            complain(&format!("Unknown command: {name}\n{USAGE}"));
            return FAILED;
        }
    };
    let Some(path) = request.words.get(1) else {
        complain("Error: Lock path is required\n");
        return FAILED;
    };
    match EndBySignal::watch(name == "acquire") {
        Ok(ending) => request.ending = ending,
        Err(error) => {
            complain(&format!(
                "Error: cannot catch signals: {}\n",
                reason(&error)
            ));
            return FAILED;
        }
    }
    let failure = match semaphore(Path::new(path)) {
        Ok(semaphore) => {
            let semaphore: &'static Semaphore = Box::leak(Box::new(semaphore));
            if let Some(step) = step.filter(|_| request.verbose) {
                let path = shown_path(semaphore.path());
                complain(&format!("[INFO] {step}: {path}\n"));
            }
            match command(semaphore, &request) {
                Ok(status) => return status,
                Err(failure) => shown(&failure, &request),
            }
        }
        Err(message) => format!("Error: {message}\n"),
    };
    complain(&failure);
    FAILED
}

fn read(arguments: impl Iterator<Item = OsString>) -> SematsRequest {
    let mut request = SematsRequest::default();
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        let (name, attached) = split_value(&argument);
        let attached = attached.map(OsStr::to_owned);
        let mut value = || attached.clone().or_else(|| arguments.next());
        match name {
            b"-t" | b"--tag" => {
                let tag = value().map(|tag| tag.to_string_lossy().into_owned());
                request.tag = tag.or(request.tag);
            }
            b"--timeout" => {
                request.timeout = value()
                    .and_then(|value| milliseconds(&value.to_string_lossy()))
                    .or(request.timeout);
            }
            b"-f" | b"--force" => request.force = true,
            b"-j" | b"--json" => request.json = true,
            b"-v" | b"--verbose" => request.verbose = true,
            b"-h" | b"--help" => request.help = true,
            _ if name.len() > 1 && name.starts_with(b"-") => {}
            _ => request.words.push(argument),
        }
    }
    request
}

/// Reads the whole number that a text begins with. A negative number counts as zero.
fn milliseconds(text: &str) -> Option<Duration> {
    let text = text.trim_start();
    let is_negative = text.starts_with('-');
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    if end == 0 {
        return None;
    }
    let count = text[..end].parse().unwrap_or(u64::MAX);
    Some(Duration::from_millis(if is_negative { 0 } else { count }))
}

fn semaphore(path: &Path) -> Result<Semaphore, String> {
    let config = SemaphoreConfig {
        stale_timeout: Some(STALE),
        ..SemaphoreConfig::default()
    };
    if path.as_os_str().as_bytes().trim_ascii().is_empty() {
        return Err("Path cannot be empty".into());
    }
    let made = Semaphore::with_options(path, config, SemaphoreOptions::new().mode(MODE));
    made.map_err(|error| match error {
        SemaphoreError::InvalidPath(reason) => {
            let mut chars = reason.chars();
            let first = chars.next().map(|first| first.to_ascii_uppercase());
            let sentence: String = first.into_iter().chain(chars).collect();
            Plain(sentence.as_bytes()).to_string()
        }
        other => Plain(other.to_string().as_bytes()).to_string(),
    })
}

fn try_acquire(semaphore: &'static Semaphore, request: &SematsRequest) -> SematsResult {
    match take(semaphore, request, Some(Duration::ZERO)) {
        Ok((_, Attempt::Granted(()))) => Ok(granted(semaphore, request)),
        Ok((_, Attempt::Busy(busy))) if busy.is_hopeless() => Err(refused(busy.obstacle)),
        Ok((_, Attempt::Busy(busy))) => {
            let status = &busy.details;
            let failure = failed("ALREADY_LOCKED", ALREADY_HELD)
                .undefined_or("holderPid", status.pid, request)
                .undefined_or("lockedSince", status.since, request);
            Ok(print_out(&shown(&failure, request), FAILED))
        }
        Err(error) => Err(io_error(error)),
    }
}

fn take(
    semaphore: &'static Semaphore,
    request: &SematsRequest,
    timeout: Option<Duration>,
) -> SemaphoreResult<Waited<'static, ()>> {
    let slots = std::slice::from_ref(semaphore);
    let limit = WaitLimit::new(timeout, request.ending.arrived(), None);
    take_detached(slots, &info(request), &limit, &request.ending)
}

fn acquire(semaphore: &'static Semaphore, request: &SematsRequest) -> SematsResult {
    match take(semaphore, request, request.timeout) {
        Ok((_, Attempt::Granted(()))) => Ok(granted(semaphore, request)),
        Ok((_, Attempt::Busy(busy))) if busy.is_hopeless() => Err(refused(busy.obstacle)),
        Ok(_) => {
            let waited = request.timeout.unwrap_or_default().as_millis();
            let message = format!("Timeout waiting for lock after {waited}ms");
            Err(failed("TIMEOUT", &message))
        }
        Err(error) => Err(io_error(error)),
    }
}

/// Prints what the lock file says after the grant.
fn granted(semaphore: &Semaphore, request: &SematsRequest) -> u8 {
    let written = semaphore.lock_info().unwrap_or_else(|| info(request));
    let object = Object::new()
        .with("status", "acquired")
        .with("pid", written.pid)
        .with("timestamp", written.timestamp)
        .undefined_or("tag", written.tag, request);
    let status = print_out(&shown(&object, request), DONE);
    if status != DONE {
        semaphore.give_back(caller());
    }
    request.ending.caller_knows();
    status
}

fn release(semaphore: &Semaphore, request: &SematsRequest) -> SematsResult {
    let asking = asking(semaphore);
    let own = ReleaseTerms {
        force: request.force,
        pid: Some(asking),
        asking,
        ..ReleaseTerms::default()
    };
    let mut released = semaphore.release(&own);
    if matches!(&released, Ok(ReleaseOutcome::Kept(busy)) if !busy.details.is_readable()) {
        // The file names no holder, so the age of the lock decides whether it may be released.
        released = semaphore.release(&ReleaseTerms { pid: None, ..own });
    }
    match released {
        Ok(ReleaseOutcome::Released) => {
            let object = Object::new().with("status", "released");
            Ok(print_out(&shown(&object, request), DONE))
        }
        Ok(ReleaseOutcome::Kept(busy)) if impediment(busy.obstacle).is_some() => {
            Err(refused(busy.obstacle))
        }
        Ok(ReleaseOutcome::Kept(busy)) => {
            let pid = busy.details.pid;
            let holder = pid.map_or_else(|| "undefined".to_owned(), |pid| pid.to_string());
            let message = format!("Lock held by different process (PID {holder})");
            Err(failed("PERMISSION_DENIED", &message).undefined_or("holderPid", pid, request))
        }
        Err(SemaphoreError::NotLocked) => Err(failed("NOT_LOCKED", "Lock not held")),
        Err(error) => Err(io_error(error)),
    }
}

fn status(semaphore: &Semaphore, request: &SematsRequest) -> SematsResult {
    let status = semaphore.status().map_err(io_error)?;
    let info = status.details().and_then(LockDetails::info);
    let is_stale = info.as_ref().is_some_and(|info| info.is_stale(STALE));
    let is_own = info.as_ref().is_some_and(|info| info.pid == caller());
    let object = Object::new()
        .with("locked", status.is_locked())
        .with_object("info", info.as_ref().map(info_object))
        .with("isStale", is_stale)
        .with("isOwnedByCurrentProcess", is_own);
    Ok(print_out(&shown(&object, request), DONE))
}

fn clean(semaphore: &Semaphore, request: &SematsRequest) -> SematsResult {
    let cleaned = semaphore.clean().map_err(io_error)?;
    let object = Object::new().with("cleaned", cleaned.lock);
    Ok(print_out(&shown(&object, request), DONE))
}

fn info(request: &SematsRequest) -> LockInfo {
    LockInfo {
        pid: caller(),
        tag: request.tag.clone(),
        ..LockInfo::new()
    }
}

fn info_object(info: &LockInfo) -> Object {
    Object::new()
        .with("pid", info.pid)
        .with("timestamp", info.timestamp)
        .with_any("tag", info.tag.clone())
}

fn failed(kind: &str, message: &str) -> Object {
    Object::new()
        .with("status", "failed")
        .with("type", kind)
        .with("message", message)
}

fn refused(obstacle: Obstacle) -> Object {
    failed("IO_ERROR", "IO error").with_any("cause", impediment(obstacle))
}

fn io_error(error: SemaphoreError) -> Object {
    let cause = match error {
        SemaphoreError::IoError(error) => reason(&error),
        other => other.to_string(),
    };
    failed("IO_ERROR", "IO error").with("cause", cause)
}

impl Object {
    /// Adds a key. Without a value, the JSON leaves the key out, and the text shows `undefined`.
    fn undefined_or(
        self,
        key: &'static str,
        value: Option<impl Into<serde_json::Value>>,
        request: &SematsRequest,
    ) -> Object {
        match value {
            None if !request.json => self.with(key, "undefined"),
            value => self.with_any(key, value),
        }
    }
}

fn shown(object: &Object, request: &SematsRequest) -> String {
    if request.json {
        format!("{}\n", object.pretty())
    } else {
        object.lines()
    }
}

fn print_out(text: &str, status: u8) -> u8 {
    match print(text) {
        Ok(()) => status,
        Err(failure) => {
            failure.explain(None);
            FAILED
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_the_leading_number_of_a_text() {
        for (text, count) in [
            ("200", Some(200)),
            ("200ms", Some(200)),
            (" +1.9", Some(1)),
            ("-5", Some(0)),
            ("abc", None),
            ("", None),
        ] {
            let expected = count.map(Duration::from_millis);
            assert_eq!(milliseconds(text), expected, "{text:?}");
        }
    }
}
