//! The servers and the auth token that the environment names, for programs that a user starts.

use std::env::{self, VarError};
use std::path::Path;

use super::address::Address;
use super::error::Error;
use crate::sys::secret;
use crate::text::Escaped;

const SERVERS: &str = "LATCH_SERVER";
const AUTH_TOKEN_FILE: &str = "LATCH_AUTH_TOKEN_FILE";
const DEFAULT_SERVER: &str = "127.0.0.1:6388";

/// The servers that `LATCH_SERVER` lists, or the default one.
pub(crate) fn servers() -> Result<Vec<Address>, Error> {
    let listed = variable(SERVERS)?.unwrap_or_else(|| DEFAULT_SERVER.into());
    let names = listed.split([',', ' ']).filter(|name| !name.is_empty());
    let servers = addresses(names)?;
    if servers.is_empty() {
        let why = format!("{SERVERS}: it names no server");
        return Err(Error::Environment(why));
    }
    Ok(servers)
}

/// Reads addresses. An error names the one that is wrong.
pub(crate) fn addresses<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<Address>, Error> {
    names
        .map(|name| {
            let why = |why| Error::Environment(format!("{}: {why}", Escaped(name.as_bytes())));
            name.parse::<Address>().map_err(why)
        })
        .collect()
}

/// The auth token in the file that `LATCH_AUTH_TOKEN_FILE` names, if it names one.
pub(crate) fn auth_token() -> Result<Option<String>, Error> {
    let file = variable(AUTH_TOKEN_FILE)?;
    file.map(|file| read_auth_token(&file)).transpose()
}

/// The auth token in a file. An error names the file.
pub(crate) fn read_auth_token(file: &str) -> Result<String, Error> {
    secret::read(Path::new(file)).map_err(|error| Error::AuthTokenFile(file.into(), error))
}

/// A variable that is set and not empty. One that is not UTF-8 is an error, not none: the lock of
/// another server is another lock.
fn variable(name: &str) -> Result<Option<String>, Error> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(Error::Environment(format!("{name}: it is not UTF-8"))),
    }
}
