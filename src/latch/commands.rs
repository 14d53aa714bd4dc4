//! The commands that ask a server once: wait, acquire, renew, release and ping.

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::client::Error;

use super::servers::{client, Target};
use super::{failure, options, print, report, shown, token, unprintable, LOST};

/// Waits until the lock is granted, and releases it at once.
pub(super) fn wait(options: &options::Wait) -> CommandResult {
    let (reach, timeout) = (options.reach(), options.timeout);
    let target = Target::new(reach, timeout, &options.key, None, options.limit)?;
    let released = target.claim(timeout)?.release();
    released.map_err(|error| target.failure(&error))?;
    Ok(0)
}

/// Takes the lock, checks that it outlives the connection, and prints the token.
pub(super) fn acquire(options: &options::Acquire) -> CommandResult {
    let (reach, timeout) = (options.reach(), options.timeout);
    let target = Target::new(reach, timeout, &options.key, options.lease, options.limit)?;
    let granted = target.claim(timeout)?;
    let (key, grant) = (&target.key, granted.grant);
    // The server may release the lock at the end of the connection, and then the token is useless.
    // So the first connection ends here, and a renewal over a second one shows what the server did.
    granted.connection.finish();
    let slot = target.slot.with_lease(grant.lease);
    let mut connection = target.connect()?;
    match connection.renew(key, slot, grant.token) {
        Ok(_) => match output::print(&format!("{}\n", grant.token)) {
            Ok(()) => Ok(0),
            Err(error) => {
                // No other process has the token to release the lock with.
                let _ = connection.release(key, slot, grant.token);
                Err(unprintable(&error))
            }
        },
        Err(Error::Refused) => Err(Failure::new(
            LOST,
            format_args!(
                "{}: the server released it when the connection closed; it keeps locks only \
                 if it runs with --no-auto-release-on-disconnect; use latch hold or latch run",
                target.place()
            ),
        )),
        Err(error) => Err(target.failure(&error)),
    }
}

pub(super) fn renew(options: &options::Renew) -> CommandResult {
    let token = token(&options.token)?;
    let reach = options.reach();
    let target = Target::new(reach, None, &options.key, options.lease, options.limit)?;
    let renewed = target.connect()?.renew(&target.key, target.slot, token);
    let lease = renewed.map_err(|error| not_held(&target, &error))?;
    print(&format!("{}\n", lease.as_secs()))
}

pub(super) fn release(options: &options::Release) -> CommandResult {
    let token = token(&options.token)?;
    let target = Target::new(options.reach(), None, &options.key, None, options.limit)?;
    let released = target.connect()?.release(&target.key, target.slot, token);
    released.map_err(|error| not_held(&target, &error))?;
    Ok(0)
}

fn not_held(target: &Target, error: &Error) -> Failure {
    match error {
        Error::Refused => Failure::new(
            LOST,
            format_args!("{}: it is not held with this token", target.place()),
        ),
        _ => target.failure(error),
    }
}

pub(super) fn ping(options: &options::Ping) -> CommandResult {
    let client = client(options.reach())?;
    let failures = client.servers().iter().filter_map(|server| {
        let answered = client
            .connect(server)
            .and_then(|mut connection| connection.ping());
        let error = answered.err()?;
        Some(failure(shown(&server.to_string()), &error))
    });
    Ok(report(failures.collect()))
}
