//! The commands that ask a server once: wait, acquire, renew, release and ping.

use std::time::Duration;

use crate::cli::failure::{CommandResult, Failure};
use crate::cli::output;
use crate::client::{Error, Wait};

use super::servers::{ask, client, client_within, connect, place_of, slot_of};
use super::{busy, failure, options, print, report, shown, token, unprintable, BUSY, LOST};

/// Waits until the lock is granted, and releases it at once.
pub(super) fn wait(options: &options::Wait) -> CommandResult {
    let client = client_within(options.reach(), options.timeout)?;
    let (key, place) = (&options.key, place_of(&client, &options.key));
    let slot = slot_of(None, options.limit);
    let (mut connection, granted) = ask(&client, key, slot, wait_of(options.timeout))?;
    match granted {
        None => Err(Failure::new(BUSY, busy(&place))),
        Some(grant) => {
            let released = connection.release(key, slot, grant.token);
            released.map_err(|error| failure(&place, &error))?;
            Ok(0)
        }
    }
}

/// Takes the lock, checks that it outlives the connection, and prints the token.
pub(super) fn acquire(options: &options::Acquire) -> CommandResult {
    let client = client_within(options.reach(), options.timeout)?;
    let (key, place) = (&options.key, place_of(&client, &options.key));
    let slot = slot_of(options.lease, options.limit);
    let (connection, granted) = ask(&client, key, slot, wait_of(options.timeout))?;
    let Some(grant) = granted else {
        return Err(Failure::new(BUSY, busy(&place)));
    };
    // The server may release the lock at the end of the connection, and then the token is useless.
    // So the first connection ends here, and a renewal over a second one shows what the server did.
    connection.finish();
    let slot = slot.with_lease(grant.lease);
    let (mut connection, _) = connect(&client, key, options.lease, options.limit)?;
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
                "{place}: the server released it when the connection closed; it keeps locks only \
                 if it runs with --no-auto-release-on-disconnect"
            ),
        )),
        Err(error) => Err(failure(place, &error)),
    }
}

pub(super) fn renew(options: &options::Renew) -> CommandResult {
    let token = token(&options.token)?;
    let client = client(options.reach())?;
    let place = place_of(&client, &options.key);
    let (mut connection, slot) = connect(&client, &options.key, options.lease, options.limit)?;
    match connection.renew(&options.key, slot, token) {
        Ok(lease) => print(&format!("{}\n", lease.as_secs())),
        Err(Error::Refused) => Err(not_held(&place)),
        Err(error) => Err(failure(place, &error)),
    }
}

pub(super) fn release(options: &options::Release) -> CommandResult {
    let token = token(&options.token)?;
    let client = client(options.reach())?;
    let place = place_of(&client, &options.key);
    let (mut connection, slot) = connect(&client, &options.key, None, options.limit)?;
    match connection.release(&options.key, slot, token) {
        Ok(()) => Ok(0),
        Err(Error::Refused) => Err(not_held(&place)),
        Err(error) => Err(failure(place, &error)),
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

fn wait_of(timeout: Option<u64>) -> Wait {
    match timeout {
        None => Wait::Forever,
        Some(0) => Wait::No,
        Some(seconds) => Wait::UpTo(Duration::from_secs(seconds)),
    }
}

fn not_held(place: &str) -> Failure {
    Failure::new(
        LOST,
        format_args!("{place}: it is not held with this token"),
    )
}
