//! `latch acquire` and `latch reserve`: locks that the server keeps without a process.

use std::fmt::Write;
use std::time::Duration;

use serde_json::Value;

use crate::client::{Address, Error, Granted, Token};
use crate::os::output;
use crate::os::text::{without_hidden, Plain};
use crate::shared::cli::failure::{CommandResult, Failure};
use crate::shared::cli::waiting::Verbosity;
use crate::shared::cli::words::quoted;
use crate::shared::supervise::EndBySignal;

use super::claim::tell_of_forgetful;
use super::servers::{Target, ROUND_TRIP};
use super::{note_commas, options, PROGRAM};

/// Acquires the lock for the length of its lease, and prints the token.
pub(super) fn acquire(options: &options::Acquire, ending: &EndBySignal) -> CommandResult {
    let timeout = options.patience.timeout();
    let client = options.server.client(timeout)?;
    let mut target = Target::new(client, &options.key, options.lease, options.slot.limit);
    target.claim.is_shared = options.slot.shared;
    target.is_keepable = true;
    let target = target.tagged(options.tag.as_deref(), PROGRAM);
    let talk = options.talk.verbosity();
    note_commas(&options.key, talk);
    let granted = target.claim(timeout, talk)?;
    let lease = granted.lease;
    let text = if options.slot.json {
        format!("{{{}}}\n", members(&target, &granted, lease))
    } else {
        format!("{}\n", granted.known.token)
    };
    keep(&target, granted, lease, &text, ending)
}

/// Acquires the lock for a given time, and prints how to release it.
pub(super) fn reserve(options: &options::Reserve, ending: &EndBySignal) -> CommandResult {
    let timeout = options.patience.timeout();
    let client = options.server.client(timeout)?;
    let mut target = Target::new(client, &options.key, None, options.slot.limit);
    target.claim.is_shared = options.slot.shared;
    target.is_keepable = true;
    let target = target.tagged(options.tag.as_deref(), PROGRAM);
    let elsewhere = options.server.restated()?;
    let talk = options.talk.verbosity();
    note_commas(&options.key, talk);
    let is_quiet = talk == Verbosity::Never;
    let granted = target.claim(timeout, if is_quiet { talk } else { Verbosity::AtOnce })?;
    let release = release_command(options, &target, &granted, &elsewhere);
    let text = if options.slot.json {
        format!(
            "{{{},\"release\":{}}}\n",
            members(&target, &granted, options.duration),
            json(&release)
        )
    } else {
        format!(
            "key: {}\ntoken: {}\nseconds: {}\nrelease: {release}\n",
            Plain(options.key.as_bytes()),
            granted.known.token,
            options.duration.as_secs()
        )
    };
    let is_forgetful = !granted.connection.grants_survive_restart();
    let status = keep(&target, granted, options.duration, &text, ending)?;
    if is_forgetful {
        tell_of_forgetful(&target, talk);
    }
    Ok(status)
}

/// Has the server keep the lock for `time`, and prints `text`, which contains the token. If a
/// signal ends this process before that, the lock is released.
fn keep(
    target: &Target,
    mut granted: Granted,
    time: Duration,
    text: &str,
    ending: &EndBySignal,
) -> CommandResult {
    let token = granted.known.token;
    let kept_target = target.clone();
    ending.undo_by(move || {
        let _ = release(&kept_target, token);
    });
    if let Err(error) = granted.renew_if_late() {
        return Err(target.failure(&granted.give_up(error)));
    }
    let failure = match granted.keep_at_server(time) {
        Ok(()) => match output::print(text) {
            Ok(()) => {
                ending.caller_knows();
                return Ok(0);
            }
            Err(error) => Failure::unprintable(error),
        },
        Err(error @ Error::NotKept(..)) => target.failure(&error),
        Err(error) => return Err(end_unanswered(target, token, &error)),
    };
    // No other process knows the token, so the lock is released here.
    let connection = &mut granted.connection;
    let _ = connection.release_within(&target.key, target.claim, token, None, ROUND_TRIP);
    Err(failure)
}

/// Releases a lock after the request to keep it has failed: the server may keep it nevertheless. If
/// the release fails, too, the message tells the user the token.
fn end_unanswered(target: &Target, token: Token, error: &Error) -> Failure {
    let mut failure = target.failure(error);
    if !matches!(release(target, token), Ok(()) | Err(Error::Refused(_))) {
        let how = format!("; if the server keeps the lock, this token releases it: {token}");
        failure.message = failure.message.map(|message| message + &how);
    }
    failure
}

/// Releases a lock that the server may keep, over a new connection.
fn release(target: &Target, token: Token) -> Result<(), Error> {
    target.ask(|connection| connection.release(&target.key, target.claim, token))
}

/// What JSON says of a lock that is kept for this time: the members of an object.
fn members(target: &Target, granted: &Granted, time: Duration) -> String {
    let token = granted.known.token;
    // The fence is a string, because many JSON readers round a number as large as a fence.
    format!(
        "\"key\":{},\"token\":\"{token}\",\"fence\":\"{}\",\"lease_s\":{},\"server\":{}",
        json(&target.key),
        token.fence(),
        time.as_secs(),
        json(&target.server().to_string())
    )
}

fn json(text: &str) -> String {
    without_hidden(&Value::from(text).to_string())
}

/// The command that releases a reservation. It names the server and how to reach it, so that it
/// also works in another directory and in another environment.
fn release_command(
    options: &options::Reserve,
    target: &Target,
    granted: &Granted,
    elsewhere: &[(&'static str, String)],
) -> String {
    let token = granted.known.token;
    let mut release = format!("latch release {} {token}", quoted(&options.key));
    if let Some(limit) = options.slot.limit {
        let _ = write!(release, " --of {limit}");
    }
    let server = match target.server() {
        Address::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            path.to_string_lossy().into_owned()
        }
        server => server.to_string(),
    };
    let _ = write!(release, " --server {}", quoted(&server));
    for (name, value) in elsewhere {
        let _ = if value.is_empty() {
            write!(release, " {name}")
        } else {
            write!(release, " {name} {}", quoted(value))
        };
    }
    // A pipe gives a secret only once.
    let is_pipe = |value: &str| ["/dev/", "/proc/"].iter().any(|it| value.starts_with(it));
    let mut files = elsewhere.iter();
    if files.any(|(name, value)| *name == "--auth-token-file" && is_pipe(value)) {
        release += " # give the auth token again";
    }
    release
}
