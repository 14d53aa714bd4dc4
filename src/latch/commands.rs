//! The commands that ask a server once: wait, renew, release and ping.

use crate::client::{Claim, Connection, Error};
use crate::shared::cli::failure::{CommandResult, Failure};

use super::servers::Target;
use super::{failure, options, print, report, shown, token, LOST, PROGRAM, UNAVAILABLE};

pub(super) fn wait(options: &options::Wait) -> CommandResult {
    let timeout = options.patience.timeout();
    let client = options.server.client(timeout)?;
    let target = Target::new(client, &options.key, None, options.limit).tagged(None, PROGRAM);
    let mut granted = target.claim(timeout, options.talk.verbosity())?;
    let token = granted.known.token;
    match (granted.connection).release(&target.key, target.claim, token) {
        // A refusal means that the lock is no longer held: its lease was over before the release,
        // because this process was stopped. The wait itself has succeeded.
        Ok(()) | Err(Error::Refused(_)) => Ok(0),
        Err(error) => Err(target.failure(&error)),
    }
}

pub(super) fn renew(options: &options::Renew) -> CommandResult {
    let token = token(options.token.as_deref())?;
    let client = options.server.client(None)?;
    let target = Target::new(client, &options.key, options.lease, options.limit);
    let (key, claim) = (&target.key, target.claim);
    let renewed = target.ask(|connection| {
        let renewed = of_either_kind(claim, |claim| connection.renew(key, claim, token))?;
        // A renewal does not shorten the lease of a kept lock.
        let holder = connection.holder(key, token.fence()).ok().flatten();
        Ok(holder.map_or(renewed, |holder| holder.lease_left.max(renewed)))
    });
    let lease = renewed.map_err(|error| not_held(&target, &error))?;
    print(&format!("{}\n", lease.as_secs()))
}

/// Sends a request about a token as one of a lock and as one of a semaphore, beginning with the
/// kind of `claim`: the server knows the kind, and the user need not.
fn of_either_kind<T>(
    claim: Claim,
    mut request: impl FnMut(Claim) -> Result<T, Error>,
) -> Result<T, Error> {
    match request(claim) {
        Err(Error::Refused(_)) => {
            let limit = match claim.limit {
                None => Some(1),
                Some(_) => None,
            };
            request(Claim { limit, ..claim })
        }
        answered => answered,
    }
}

pub(super) fn release(options: &options::Release) -> CommandResult {
    let token = token(options.token.as_deref())?;
    let client = options.server.client(None)?;
    let target = Target::new(client, &options.key, None, options.limit);
    let mut asked_count = 0;
    let released = target.ask(|connection| {
        asked_count += 1;
        of_either_kind(target.claim, |claim| {
            connection.release(&target.key, claim, token)
        })
    });
    match released {
        Err(Error::Refused(_)) if options.missing_ok => Ok(0),
        // An earlier attempt may have released the lock, and its answer may have been lost.
        Err(Error::Refused(_)) if asked_count > 1 => {
            let why = "it is no longer held; an earlier attempt may have released it";
            Err(target.fails(UNAVAILABLE, why))
        }
        Err(error) => Err(not_held(&target, &error)),
        Ok(()) => Ok(0),
    }
}

fn not_held(target: &Target, error: &Error) -> Failure {
    match error {
        Error::Refused(_) => {
            let why = "this token does not hold the lock (released, expired, or another key)";
            target.fails(LOST, why)
        }
        _ => target.failure(error),
    }
}

pub(super) fn ping(options: &options::Ping) -> CommandResult {
    let client = options.server.client(None)?;
    let (mut answering, mut failures) = (String::new(), Vec::new());
    for server in client.servers() {
        let ping = |it: &mut Connection| it.ping().map(|()| it.member.clone());
        match client.ask(server, None, ping) {
            Ok(member) => answering += &format!("{member}: ok\n"),
            Err(error) => failures.push(failure(shown(&server.to_string()), &error)),
        }
    }
    print(&answering)?;
    Ok(report(failures))
}
