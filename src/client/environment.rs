//! The servers, the auth token and the certificates that environment variables name.

use std::env::{self, VarError};
use std::path::Path;
#[cfg(feature = "programs")]
use std::path::PathBuf;

use super::address::{Address, InvalidAddress};
use super::error::Error;
use super::settings::Settings;
use super::tls::Tls;
use crate::os::secret;
use crate::os::text::{bare, invalid_value, yes_or_no};

const SERVER: &str = "LATCH_SERVER";
const SHARDS: &str = "LATCH_SHARDS";
const AUTH_TOKEN_FILE: &str = "LATCH_AUTH_TOKEN_FILE";
const TLS: &str = "LATCH_TLS";
const TLS_CA: &str = "LATCH_TLS_CA";
const TLS_NAME: &str = "LATCH_TLS_NAME";
const DEFAULT_SERVER: &str = "127.0.0.1:6388";

/// The variables that this module reads.
#[cfg(feature = "programs")]
pub(crate) const VARIABLES: [&str; 6] = [SERVER, SHARDS, AUTH_TOKEN_FILE, TLS, TLS_CA, TLS_NAME];

/// The service of `--server`, or the servers of `--shards`; if neither is given, those of
/// `LATCH_SERVER` or `LATCH_SHARDS`, or the default one.
pub(crate) fn servers(given: [Option<String>; 2]) -> Result<Vec<Address>, Error> {
    let (named, names) = match given {
        [None, None] => ([variable(SERVER)?, variable(SHARDS)?], [SERVER, SHARDS]),
        given => (given, ["--server", "--shards"]),
    };
    let (list, name) = match named {
        [Some(_), Some(_)] => {
            let [server, shards] = names;
            let why = format!("{server} and {shards} exclude each other");
            return Err(Error::Environment(why));
        }
        [None, Some(shards)] => (shards, names[1]),
        [server, None] => (server.unwrap_or_else(|| DEFAULT_SERVER.into()), names[0]),
    };
    let is_between = |c: char| c == ',' || c.is_whitespace();
    let parts: Vec<&str> = list.split(is_between).filter(|it| !it.is_empty()).collect();
    let servers: Result<Vec<Address>, InvalidAddress> = parts.iter().map(|it| it.parse()).collect();
    let why = match servers {
        // Two hosts with the same list in another order would grant a key twice.
        _ if name == names[0] && parts.len() > 1 => {
            let parts: Vec<&str> = parts.into_iter().filter(|it| *it != "|").collect();
            format!(
                "write '{}' if they are one service, or --shards {} (LATCH_SHARDS) if they divide \
                 the keys, in the same order everywhere",
                parts.join("|"),
                parts.join(",")
            )
        }
        Ok(servers) if servers.is_empty() => "it names no server".to_owned(),
        Ok(servers) => return Ok(servers),
        Err(error) => error.to_string(),
    };
    Err(invalid(&list, name, &why))
}

/// The options of latch that override variables.
#[derive(Default)]
pub(crate) struct Overrides<'a> {
    pub(crate) auth_token_file: Option<&'a Path>,
    pub(crate) tls: Option<bool>,
    pub(crate) tls_ca: Option<&'a Path>,
    pub(crate) tls_name: Option<&'a str>,
}

/// The default settings, with the auth token and TLS from `options`. A value that `options` do not
/// give comes from `LATCH_AUTH_TOKEN_FILE`, `LATCH_TLS`, `LATCH_TLS_CA` or `LATCH_TLS_NAME`.
pub(crate) fn settings(options: &Overrides<'_>) -> Result<Settings, Error> {
    let file = options.auth_token_file.map(Path::to_owned);
    let mut settings = Settings {
        auth_token_file: or_variable(file, AUTH_TOKEN_FILE)?,
        tls: tls(options)?,
        ..Settings::default()
    };
    if let Some(file) = &settings.auth_token_file {
        // Read the file once here, without a deadline: a pipe delivers the token only once, and the
        // user may have to type it first.
        let read = secret::read_auth_token(file);
        settings.auth_token =
            Some(read.map_err(|error| Error::AuthTokenFile(file.clone(), error))?);
    }
    Ok(settings)
}

/// The options that ask for the same settings on a command line elsewhere, with absolute paths.
#[cfg(feature = "programs")]
pub(crate) fn restated(options: &Overrides<'_>) -> Result<Vec<(&'static str, String)>, Error> {
    let absolute = |path: PathBuf| {
        let path = std::path::absolute(&path).unwrap_or(path);
        path.to_string_lossy().into_owned()
    };
    let token_file = options.auth_token_file.map(Path::to_owned);
    let token_file = or_variable(token_file, AUTH_TOKEN_FILE)?.map(absolute);
    let token_file = token_file.map(|file| ("--auth-token-file", file));
    let (mut ca_file, mut name, mut switch) = (None, None, None);
    if tls(options)?.is_some() {
        ca_file = or_variable(options.tls_ca.map(Path::to_owned), TLS_CA)?.map(absolute);
        name = or_variable(options.tls_name.map(str::to_owned), TLS_NAME)?;
        switch = (ca_file.is_none() && name.is_none()).then(|| ("--tls", String::new()));
    }
    let ca_file = ca_file.map(|file| ("--tls-ca", file));
    let name = name.map(|name| ("--tls-name", name));
    let all = [token_file, switch, ca_file, name];
    Ok(all.into_iter().flatten().collect())
}

/// How to speak TLS; `None` if nothing asks for it. A CA file or a server name asks for TLS, too.
fn tls(options: &Overrides<'_>) -> Result<Option<Tls>, Error> {
    let is_set = |name: &&str| !matches!(variable(name), Ok(None));
    let asking = match (options.tls, options.tls_ca, options.tls_name) {
        (Some(wanted), ..) => wanted.then_some("--tls"),
        (None, Some(_), _) => Some("--tls-ca"),
        (None, None, Some(_)) => Some("--tls-name"),
        (None, None, None) => match variable(TLS)? {
            Some(value) => {
                let wanted = yes_or_no(&value);
                let wanted = wanted.map_err(|expected| invalid(&value, TLS, &expected))?;
                wanted.then_some(TLS)
            }
            None => [TLS_CA, TLS_NAME].into_iter().find(is_set),
        },
    };
    let Some(asking) = asking else {
        return Ok(None);
    };
    let ca_file = or_variable(options.tls_ca.map(Path::to_owned), TLS_CA)?;
    let name = or_variable(options.tls_name.map(str::to_owned), TLS_NAME)?;
    // A build without TLS fails here, rather than connect without encryption.
    Tls::wanted_by(asking, ca_file, name).map(Some)
}

fn invalid(value: &str, name: &str, why: &str) -> Error {
    Error::Environment(invalid_value(value, name, why))
}

/// The value of an option of latch, or of this variable if the option is not given.
fn or_variable<T: From<String>>(given: Option<T>, name: &str) -> Result<Option<T>, Error> {
    match given {
        None => Ok(variable(name)?.map(T::from)),
        given => Ok(given),
    }
}

/// The value of a variable, [`bare`]; `None` if it is unset or empty. A value that is not UTF-8
/// is an error. If it were ignored, the client might use the default server, with other locks.
fn variable(name: &str) -> Result<Option<String>, Error> {
    match env::var(name) {
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) => Ok(Some(bare(&value).to_owned())),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(Error::Environment(format!(
            "{name}: the value is not UTF-8"
        ))),
    }
}
