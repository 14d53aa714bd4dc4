//! `latch break`: ends grants of other clients, as an operator of the server.
//!
//! The named server says who holds the key. The grants are ended one by one, by their fences, so
//! another server that is asked by mistake ends none.

use std::path::Path;

use crate::cli::failure::{CommandResult, Failure};
use crate::client::{Address, Connection, Error, Holder};
use crate::sys::operator_socket;
use crate::sys::secret;
use crate::text::{reason, unusable_file};

use super::servers::Target;
use super::table::party;
use super::{options, print, FILE_ERROR, LOST, NO_PERMISSION, PROTOCOL};

pub(super) fn run(options: &options::Break) -> CommandResult {
    let target = Target::new(options.client(None)?, &options.key, None, None);
    let file = options.admin_token_file.as_deref();
    let admin_token = file.map(secret::read).transpose();
    let admin_token = admin_token.map_err(|error| unusable(file, &reason(&error)))?;
    let mut server = target.connect()?;
    let holders = holders_at(&mut server, &target)?;
    let is_meant = |holder: &Holder| options.fence.is_none_or(|fence| fence == holder.fence);
    let holders: Vec<Holder> = holders.into_iter().filter(is_meant).collect();
    let ended = match admin_token.is_some() {
        true => break_at(&mut server, &target.key, &holders, admin_token.as_deref()),
        false => break_as_operator(server, &target, &holders),
    };
    let not_held = match options.fence {
        None => "it is not held",
        Some(_) => "it is not held with this fence",
    };
    match (ended, file) {
        (Ok(ended), _) if ended.is_empty() => Err(target.fails(LOST, not_held)),
        (Ok(ended), _) => print(&ended.concat()),
        (Err(Error::NotAllowed(_)), None) => Err(target.fails(
            NO_PERMISSION,
            "only root and the user of the server may do this, on its host, and clients with its \
             admin token; see --admin-token-file",
        )),
        (Err(Error::NotAllowed(_)), _) => {
            let why = "the server refused the admin token, or has none";
            Err(target.fails(NO_PERMISSION, why))
        }
        (Err(error @ Error::InvalidArgument(_)), _) => Err(unusable(file, &error.reason())),
        (Err(error), _) => Err(target.failure(&error)),
    }
}

/// Asks for the holders first: a server that does not know that request does not know `break`, and
/// would answer as if there were no such grant.
fn holders_at(server: &mut Connection, target: &Target) -> Result<Vec<Holder>, Failure> {
    match server.queues(Some(&target.key)) {
        Ok(queues) => Ok(queues.into_iter().flat_map(|queue| queue.holders).collect()),
        Err(Error::Unsupported(_)) => {
            let why = "the server does not know how to break a grant";
            Err(target.fails(PROTOCOL, why))
        }
        Err(error) => Err(target.failure(&error)),
    }
}

/// Ends the grants of these holders, and returns a line about each that was ended. Others have
/// ended by themselves.
fn break_at(
    server: &mut Connection,
    key: &str,
    holders: &[Holder],
    admin_token: Option<&str>,
) -> Result<Vec<String>, Error> {
    let mut ended = Vec::new();
    for holder in holders {
        match server.break_grants(key, Some(holder.fence), admin_token) {
            Ok(()) => ended.push(broken(holder)),
            Err(Error::Refused(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(ended)
}

/// A line about a grant that was ended.
fn broken(holder: &Holder) -> String {
    let [peer, tag, age] = party(&holder.party);
    format!(
        "broken: {tag}, {peer}, held for {age}, fence {}\n",
        holder.fence
    )
}

/// Ends grants without a token: over the connection to the server if that is a Unix socket, else
/// over the operator's socket beside its port.
fn break_as_operator(
    mut server: Connection,
    target: &Target,
    holders: &[Holder],
) -> Result<Vec<String>, Error> {
    let refused = match break_at(&mut server, &target.key, holders, None) {
        Err(error @ Error::NotAllowed(_)) => error,
        ended => return ended,
    };
    let port = target.port().map(operator_socket::paths_to_try);
    for path in port.unwrap_or_default() {
        let Ok(mut operator) = target.connect_to(&Address::Unix(path)) else {
            continue;
        };
        match break_at(&mut operator, &target.key, holders, None) {
            Ok(ended) if !ended.is_empty() => return Ok(ended),
            _ => {}
        }
    }
    Err(refused)
}

fn unusable(file: Option<&Path>, why: &str) -> Failure {
    let file = file.unwrap_or(Path::new(""));
    Failure::new(FILE_ERROR, unusable_file("admin token", file, why))
}
