//! `latch acquire` and `latch reserve`: locks that the server keeps without a process.

use std::fmt::Write;
use std::time::Duration;

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::client::{Error, Granted, Token};
use crate::supervise::EndBySignal;
use crate::text::Plain;

use super::servers::{Target, ROUND_TRIP};
use super::{options, unprintable, PROGRAM};

/// Acquires the lock for the length of its lease, and prints the token.
pub(super) fn acquire(options: &options::Acquire, ending: &EndBySignal) -> CommandResult {
    let timeout = options::timeout(options.timeout, options.nonblock);
    let client = options.client(timeout)?;
    let target = Target::new(client, &options.key, options.lease, options.limit);
    let target = target.tagged(options.tag.as_deref(), PROGRAM).keepable();
    let granted = target.claim(timeout)?;
    let lease = granted.grant.lease;
    let text = format!("{}\n", granted.grant.token);
    keep(&target, granted, lease, &text, ending)
}

/// Acquires the lock for a given time, and prints how to release it.
pub(super) fn reserve(options: &options::Reserve, ending: &EndBySignal) -> CommandResult {
    let timeout = options::timeout(options.timeout, options.nonblock);
    let client = options.client(timeout)?;
    let target = Target::new(client, &options.key, None, options.limit);
    let target = target.tagged(options.tag.as_deref(), PROGRAM).keepable();
    let granted = target.claim(timeout)?;
    let text = instructions(options, &target, &granted);
    keep(&target, granted, options.duration, &text, ending)
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
    let token = granted.grant.token;
    let kept_target = target.clone();
    ending.undo_by(move || {
        let _ = release(&kept_target, token);
    });
    if let Err(error) = granted.renew_if_late() {
        return Err(target.failure(&granted.give_up(error)));
    }
    granted.keep_at_server(time).map_err(|error| match error {
        Error::NotKept(_) => {
            let _ = granted.release(ROUND_TRIP);
            target.failure(&error)
        }
        error => end_unanswered(target, token, &error),
    })?;
    output::print(text).map_err(|error| {
        // No other process knows the token, so the lock is released here.
        let _ = granted.release(ROUND_TRIP);
        unprintable(&error)
    })?;
    ending.caller_knows();
    Ok(0)
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
    target.ask(|connection| connection.release(&target.key, target.slot, token))
}

/// Lines of `key: value` about a reservation. The last line has the command that releases it.
fn instructions(options: &options::Reserve, target: &Target, granted: &Granted) -> String {
    let token = granted.grant.token;
    let mut release = format!("latch release {} {token}", quoted(&options.key));
    if let Some(limit) = options.limit {
        let _ = write!(release, " --limit {limit}");
    }
    if !options.server.is_empty() {
        let _ = write!(
            release,
            " --server {}",
            quoted(&target.server().to_string())
        );
    }
    format!(
        "key: {}\ntoken: {token}\nseconds: {}\nrelease: {release}\n",
        Plain(options.key.as_bytes()),
        options.duration.as_secs()
    )
}

/// Quotes a word for the shell, if necessary.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@%+=,".contains(c);
    if word.chars().all(is_plain) {
        return word.to_owned();
    }
    let plain = Plain(word.as_bytes()).to_string();
    format!("'{}'", plain.replace('\'', "'\\''"))
}
