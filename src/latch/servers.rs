//! The servers that a command asks: their addresses, their token, and a connection to one of them.

use std::time::{Duration, Instant};

use crate::cli::failure::Failure;
use crate::client::{
    check_key, environment, Client, Connection, Error, Grant, Settings, Slot, Wait,
};

use super::options::Reach;
use super::{failure, shown, usage, FILE_ERROR};

/// By how much a command with `--timeout` may outlast that: one round trip.
const ROUND_TRIP: Duration = Duration::from_secs(1);

/// A client of the servers that the command line names, else LATCH_SERVER, else the default.
pub(super) fn client(reach: Reach<'_>) -> Result<Client, Failure> {
    client_within(reach, None)
}

/// A client as [`client`] makes it, for a command with the option `--timeout`.
pub(super) fn client_within(reach: Reach<'_>, wait: Option<u64>) -> Result<Client, Failure> {
    let named = reach.servers.iter().map(String::as_str);
    let servers = if reach.servers.is_empty() {
        environment::servers()
    } else {
        environment::addresses(named)
    };
    let servers = servers.map_err(unusable)?;
    let auth_token = match reach.auth_token_file {
        Some(file) => environment::read_auth_token(file).map(Some),
        None => environment::auth_token(),
    };
    let auth_token = auth_token.map_err(unusable)?;
    if reach.connect_timeout == 0 {
        let message = "invalid value '0' for --connect-timeout: expected at least 1";
        return Err(usage(message));
    }
    let timeout = Duration::from_secs(reach.connect_timeout);
    let settings = Settings {
        connect_timeout: timeout,
        reply_timeout: wait.map_or(timeout, |_| ROUND_TRIP),
        auth_token,
    };
    Ok(Client::with_settings(servers, settings))
}

/// The failure for a wrong environment, or for what the command line has in its place.
fn unusable(error: Error) -> Failure {
    match error {
        Error::AuthTokenFile(..) => Failure::new(FILE_ERROR, error),
        _ => usage(error),
    }
}

/// Connects to the server of the key, and asks for the key. Both together take no longer than
/// `wait` and one round trip.
pub(super) fn ask(
    client: &Client,
    key: &str,
    slot: Slot,
    wait: Wait,
) -> Result<(Connection, Option<Grant>), Failure> {
    let began = Instant::now();
    let deadline = client.deadline_of(wait, began);
    let mut connection = connect_by(client, key, slot, deadline)?;
    let wait = wait.after(began.elapsed());
    let granted = connection.acquire_by(key, slot, wait, deadline);
    let granted = granted.map_err(|error| failure(place_of(client, key), &error))?;
    Ok((connection, granted))
}

/// Connects to the server of the key.
pub(super) fn connect(
    client: &Client,
    key: &str,
    lease: Option<u64>,
    limit: Option<u32>,
) -> Result<(Connection, Slot), Failure> {
    let slot = slot_of(lease, limit);
    Ok((connect_by(client, key, slot, None)?, slot))
}

pub(super) fn slot_of(lease: Option<u64>, limit: Option<u32>) -> Slot {
    let slot = limit.map_or(Slot::LOCK, Slot::semaphore);
    match lease {
        None => slot,
        Some(seconds) => slot.with_lease(Duration::from_secs(seconds)),
    }
}

fn connect_by(
    client: &Client,
    key: &str,
    slot: Slot,
    deadline: Option<Instant>,
) -> Result<Connection, Failure> {
    check_key(key)
        .and_then(|()| slot.check())
        .map_err(|error| failure(shown(key), &error))?;
    let server = client.server_of(key);
    client
        .connect_by(server, deadline)
        .map_err(|error| failure(shown(&server.to_string()), &error))
}

/// Names the key and its server in a message.
pub(super) fn place_of(client: &Client, key: &str) -> String {
    let server = client.server_of(key).to_string();
    format!("{} at {}", shown(key), shown(&server))
}
