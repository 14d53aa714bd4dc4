//! The servers that a command asks: their addresses, their token, and a connection to one of them.

use std::env;
use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use crate::cli::failure::Failure;
use crate::client::{check_key, Client, Connection, Grant, Patience, Settings, Terms};
use crate::text::reason;

use super::options::Reach;
use super::{failure, shown, usage, FILE_ERROR};

const DEFAULT_SERVER: &str = "127.0.0.1:6388";

/// By how much a command with `--timeout` may outlast that: one round trip.
const ROUND_TRIP: Duration = Duration::from_secs(1);

/// The longest token file, in bytes. A token with white space around it is much shorter.
const MAX_TOKEN_FILE_LEN: u64 = 128 * 1024;

/// A client of the servers that the command line names, else LATCH_SERVER, else the default.
pub(super) fn client(reach: Reach<'_>) -> Result<Client, Failure> {
    client_within(reach, None)
}

/// A client as [`client`] makes it, for a command with the option `--timeout`.
pub(super) fn client_within(reach: Reach<'_>, wait: Option<u64>) -> Result<Client, Failure> {
    let named: Vec<String> = if reach.servers.is_empty() {
        let listed = variable("LATCH_SERVER")?.unwrap_or_else(|| DEFAULT_SERVER.into());
        listed
            .split([',', ' '])
            .filter(|server| !server.is_empty())
            .map(str::to_owned)
            .collect()
    } else {
        reach.servers.to_vec()
    };
    let mut servers = Vec::new();
    for server in named {
        let parsed = server.parse();
        servers.push(parsed.map_err(|why| usage(format_args!("{}: {why}", shown(&server))))?);
    }
    if servers.is_empty() {
        return Err(usage("LATCH_SERVER: it names no server"));
    }
    let file = match reach.auth_token_file {
        Some(file) => Some(file.to_owned()),
        None => variable("LATCH_AUTH_TOKEN_FILE")?,
    };
    let auth_token = file.map(|file| read_token(&file)).transpose()?;
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

/// The value of a variable, or `None` if it is unset or empty. A value that is not UTF-8 is a
/// failure: the default server may hold another lock under the same key.
fn variable(name: &str) -> Result<Option<String>, Failure> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(usage(format_args!("{name}: it is not UTF-8"))),
    }
}

fn read_token(file: &str) -> Result<String, Failure> {
    let mut content = String::new();
    let read = File::open(file).and_then(|opened| {
        opened
            .take(MAX_TOKEN_FILE_LEN + 1)
            .read_to_string(&mut content)
    });
    let why = match read {
        Ok(len) if len as u64 <= MAX_TOKEN_FILE_LEN => return Ok(content.trim().to_owned()),
        Ok(_) => "it is too long for a token".to_owned(),
        Err(error) => reason(&error),
    };
    Err(Failure::new(
        FILE_ERROR,
        format_args!("{}: {why}", shown(file)),
    ))
}

/// Connects to the server of the key, and asks for the key. Both together take no longer than
/// `patience` and one round trip.
pub(super) fn ask(
    client: &Client,
    key: &str,
    terms: Terms,
    patience: Patience,
) -> Result<(Connection, Option<Grant>), Failure> {
    let began = Instant::now();
    let deadline = client.deadline_of(patience, began);
    let mut connection = connect_by(client, key, terms, deadline)?;
    let patience = patience.after(began.elapsed());
    let granted = connection.acquire_by(key, terms, patience, deadline);
    let granted = granted.map_err(|error| failure(place_of(client, key), &error))?;
    Ok((connection, granted))
}

/// Connects to the server of the key.
pub(super) fn connect(
    client: &Client,
    key: &str,
    lease: Option<u64>,
    limit: Option<u32>,
) -> Result<(Connection, Terms), Failure> {
    let terms = terms_of(lease, limit);
    Ok((connect_by(client, key, terms, None)?, terms))
}

pub(super) fn terms_of(lease: Option<u64>, limit: Option<u32>) -> Terms {
    Terms {
        limit,
        lease: lease.map(Duration::from_secs),
    }
}

fn connect_by(
    client: &Client,
    key: &str,
    terms: Terms,
    deadline: Option<Instant>,
) -> Result<Connection, Failure> {
    check_key(key)
        .and_then(|()| terms.check())
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
