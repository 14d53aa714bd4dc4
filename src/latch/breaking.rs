//! `latch break`: ends grants of other clients, as an operator of the server.
//!
//! The named server lists the holders of the key. `latch` then ends their grants one by one, by
//! their fences. If it asks a different server by mistake, that server has no such fences and ends
//! no grant.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::client::{Connection, Error, Holder};
use crate::os::secret;
use crate::os::text::{reason, unusable_file};
use crate::shared::cli::failure::{CommandResult, Failure};

use super::servers::Target;
use super::stats_table::ShownParty;
use super::{options, print, FILE_ERROR, LOST, NO_PERMISSION, PROTOCOL};

/// Who may break a grant.
const REFUSED: &str =
    "this needs root or the server's user on its host, or a token that may break \
                       locks; see --admin-token-file";

pub(super) fn run(options: &options::Break) -> CommandResult {
    let target = Target::new(options.server.client(None)?, &options.key, None, None);
    let file = options.admin_token_file.as_deref();
    let admin_token = file.map(secret::read_first).transpose();
    let admin_token = admin_token.map_err(|error| unusable(file, &reason(&error)))?;
    let mut server = target.connect()?;
    let mut holders = holders_at(&mut server, &target.key).map_err(|error| match error {
        Error::Unsupported(_) => {
            target.fails(PROTOCOL, "the server does not know how to break a grant")
        }
        error => target.failure(&error),
    })?;
    holders.retain(|holder| options.fence.is_none_or(|fence| fence == holder.fence));
    let mut breaking = Breaking {
        target: &target,
        admin_token: admin_token.as_deref(),
        began: Instant::now(),
        limit: options.server.connect_timeout,
        broken: String::new(),
    };
    // Asked first, so that the server logs no refusal of a break that its user may make.
    let as_operator = match admin_token {
        None => breaking.as_operator(&mut server, &holders),
        Some(_) => None,
    };
    let ended = as_operator.unwrap_or_else(|| breaking.at(&mut server, &holders));
    let not_held = match options.fence {
        None => "nobody holds this lock",
        Some(_) => "nobody holds this lock with this fence",
    };
    print(&breaking.broken)?;
    match (ended, file) {
        (Ok(()), _) if breaking.broken.is_empty() => Err(target.fails(LOST, not_held)),
        (Ok(()), _) => Ok(0),
        (Err(Error::NotAllowed(_)), None) => Err(target.fails(NO_PERMISSION, REFUSED)),
        (Err(Error::NotAllowed(_)), _) => {
            let why = "the server refused the admin token, or has none";
            Err(target.fails(NO_PERMISSION, why))
        }
        (Err(error @ Error::InvalidArgument(_)), _) => Err(unusable(file, &error.reason())),
        (Err(error), _) => Err(target.failure(&error)),
    }
}

/// Lists the holders of the key. This comes first because a server that does not know this request
/// does not know `break` either, and would answer `break` as if there were no such grant.
fn holders_at(server: &mut Connection, key: &str) -> Result<Vec<Holder>, Error> {
    let queues = server.queues(Some(key))?;
    Ok(queues.into_iter().flat_map(|queue| queue.holders).collect())
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
                Ok(()) => {
                    let ShownParty { peer, tag, age } = ShownParty::of(&holder.party);
                    let fence = holder.fence;
                    self.broken +=
                        &format!("broken: {tag}, {peer}, held for {age}, fence {fence}\n");
                }
                Err(Error::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends the chosen grants over the operator socket that the server names; `None` if it names
    /// none, or if no server behind that socket has any of these grants.
    ///
    /// Any user may run a server at the port, so its list of holders is not trusted. The list only
    /// selects among the grants that the server behind the socket reports, with their holders.
    fn as_operator(
        &mut self,
        server: &mut Connection,
        chosen: &[Holder],
    ) -> Option<Result<(), Error>> {
        let mut operator = self.target.connect_to(&server.operator_socket()?).ok()?;
        let mut holders = holders_at(&mut operator, &self.target.key).unwrap_or_default();
        holders.retain(|holder| chosen.iter().any(|it| it.fence == holder.fence));
        let ended = self.at(&mut operator, &holders);
        (!self.broken.is_empty()).then_some(ended)
    }
}

fn unusable(file: Option<&Path>, why: &str) -> Failure {
    let file = file.unwrap_or(Path::new(""));
    Failure::new(FILE_ERROR, unusable_file("admin token", file, why))
}
