//! `latch break`: ends grants of other clients, as an operator of the server.
//!
//! The named server lists the holders of the key. `latch` then ends their grants one by one, by
//! their fences. If it asks a different server by mistake, that server has no such fences and ends
//! no grant.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::cli::failure::{CommandResult, Failure};
use crate::client::{Address, Connection, Error, Holder};
use crate::sys::operator_socket;
use crate::sys::secret;
use crate::text::{reason, unusable_file, Escaped};

use super::servers::Target;
use super::stats_table::ShownParty;
use super::{options, print, FILE_ERROR, LOST, NO_PERMISSION, PROTOCOL};

pub(super) fn run(options: &options::Break) -> CommandResult {
    let target = Target::new(options.client(None)?, &options.key, None, None);
    let file = options.admin_token_file.as_deref();
    let admin_token = file.map(secret::read_first).transpose();
    let admin_token = admin_token.map_err(|error| unusable(file, &reason(&error)))?;
    let mut server = target.connect()?;
    let mut holders =
        holders_at(&mut server, &target.key).map_err(|error| cannot_list(&target, &error))?;
    holders.retain(|holder| options.fence.is_none_or(|fence| fence == holder.fence));
    let mut breaking = Breaking {
        target: &target,
        admin_token: admin_token.as_deref(),
        began: Instant::now(),
        limit: options.connect_timeout,
        broken: String::new(),
    };
    let ended = match breaking.at(&mut server, &holders) {
        Err(error @ Error::NotAllowed(_)) if admin_token.is_none() => {
            breaking.as_operator(&holders).unwrap_or(Err(error))
        }
        ended => ended,
    };
    let not_held = match options.fence {
        None => "it is not held",
        Some(_) => "it is not held with this fence",
    };
    print(&breaking.broken)?;
    match (ended, file) {
        (Ok(()), _) if breaking.broken.is_empty() => Err(target.fails(LOST, not_held)),
        (Ok(()), _) => Ok(0),
        (Err(Error::NotAllowed(_)), None) => Err(target.fails(NO_PERMISSION, &refused(&target))),
        (Err(Error::NotAllowed(_)), _) => {
            let why = "the server refused the admin token, or has none";
            Err(target.fails(NO_PERMISSION, why))
        }
        (Err(error @ Error::InvalidArgument(_)), _) => Err(unusable(file, &error.reason())),
        (Err(error), _) => Err(target.failure(&error)),
    }
}

/// Says who may break a grant, and where the server would have known that it is this user.
fn refused(target: &Target) -> String {
    let paths = target.port().map(operator_socket::paths_to_try);
    let paths = paths
        .iter()
        .flatten()
        .map(|path| Escaped::path(path).to_string());
    let tried = match paths.collect::<Vec<_>>().join(", ") {
        paths if paths.is_empty() => String::new(),
        paths => format!(
            " (no socket with this grant at {paths}; the log of the server names its socket, or \
             says no-operator-socket)"
        ),
    };
    format!(
        "only root and the user of the server may do this, on its host{tried}, and clients with its \
         admin token, or with an auth token that has the right; see --admin-token-file"
    )
}

/// Lists the holders of the key. This comes first because a server that does not know this request
/// does not know `break` either, and would answer `break` as if there were no such grant.
fn holders_at(server: &mut Connection, key: &str) -> Result<Vec<Holder>, Error> {
    let queues = server.queues(Some(key))?;
    Ok(queues.into_iter().flat_map(|queue| queue.holders).collect())
}

fn cannot_list(target: &Target, error: &Error) -> Failure {
    match error {
        Error::Unsupported(_) => {
            let why = "the server does not know how to break a grant";
            target.fails(PROTOCOL, why)
        }
        error => target.failure(error),
    }
}

/// The state of a `latch break`.
struct Breaking<'a> {
    target: &'a Target,
    admin_token: Option<&'a str>,
    began: Instant,
    /// The maximum time to end all grants: a server can list any number of grants.
    limit: Duration,
    /// A line about each grant that was ended.
    broken: String,
}

impl Breaking<'_> {
    /// Ends the grants of these holders, except for those that have already ended.
    fn at(&mut self, server: &mut Connection, holders: &[Holder]) -> Result<(), Error> {
        for holder in holders {
            if self.began.elapsed() >= self.limit {
                let server = self.target.server().clone();
                return Err(Error::NoReply { server });
            }
            match server.break_grants(&self.target.key, Some(holder.fence), self.admin_token) {
                Ok(()) => self.broken += &line_about(holder),
                Err(Error::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends the chosen grants over the operator socket that belongs to the port of the server;
    /// `None` if no server behind such a socket has any of these grants.
    ///
    /// Any user may run a server at the port, so its list of holders is not trusted. The list only
    /// selects among the grants that the server behind the socket reports, with their holders.
    fn as_operator(&mut self, chosen: &[Holder]) -> Option<Result<(), Error>> {
        let is_chosen = |holder: &Holder| chosen.iter().any(|it| it.fence == holder.fence);
        for path in operator_socket::paths_to_try(self.target.port()?) {
            let Ok(mut operator) = self.target.connect_to(&Address::Unix(path)) else {
                continue;
            };
            let mut holders = holders_at(&mut operator, &self.target.key).unwrap_or_default();
            holders.retain(is_chosen);
            let ended = self.at(&mut operator, &holders);
            if !self.broken.is_empty() {
                return Some(ended);
            }
        }
        None
    }
}

fn line_about(holder: &Holder) -> String {
    let ShownParty { peer, tag, age } = ShownParty::of(&holder.party);
    format!(
        "broken: {tag}, {peer}, held for {age}, fence {}\n",
        holder.fence
    )
}

fn unusable(file: Option<&Path>, why: &str) -> Failure {
    let file = file.unwrap_or(Path::new(""));
    Failure::new(FILE_ERROR, unusable_file("admin token", file, why))
}
