//! The settings of connections.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::error::Error;
use super::tls::Tls;
use crate::os::lookups::Lookups;
use crate::os::secret;

/// How a client connects, and how long it waits.
///
/// ```
/// use latchd::client::Settings;
/// use std::time::Duration;
///
/// let mut settings = Settings::default();
/// settings.connect_timeout = Duration::from_secs(1);
/// assert_eq!(settings.reply_timeout, Duration::from_secs(10));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The maximum time to connect. It includes looking up a name, the TLS handshake and the reply
    /// to the auth token (default: 5 seconds). All addresses of a name share this time.
    pub connect_timeout: Duration,
    /// The maximum time for a reply, in addition to the time that a claim may wait (default: 10
    /// seconds).
    pub reply_timeout: Duration,
    /// The secret that the server asks for: one line of at most 65536 bytes (default: none). White
    /// space around it is ignored.
    pub auth_token: Option<String>,
    /// A file with that secret (default: none). Of several lines, the first one counts. The file is
    /// read for each connection, so that a client keeps working when the secret changes. If it
    /// cannot be read within half of the connect timeout, `auth_token` is used instead.
    pub auth_token_file: Option<PathBuf>,
    /// How to speak TLS with servers that are reached over TCP (default: no TLS). Without the
    /// feature `tls`, this is always `None`.
    pub tls: Option<Tls>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
            auth_token: None,
            auth_token_file: None,
            tls: None,
        }
    }
}

impl Settings {
    /// The secret for a new connection; `None` if there is none. A file that is not read by
    /// `deadline` counts as unreadable: a file server or the writer of a pipe may not respond.
    pub(super) fn auth_token(&self, deadline: Instant) -> Result<Option<String>, Error> {
        static ALL: Lookups<PathBuf, String> = Lookups::new(|file| secret::read_auth_token(file));
        let read = |file: &PathBuf| {
            let read = ALL.look_up(file, deadline);
            read.map_err(|error| Error::AuthTokenFile(file.clone(), error))
        };
        let given = self.auth_token.as_deref().map(secret::check);
        let given = given.transpose().map_err(Error::InvalidArgument)?;
        match (self.auth_token_file.as_ref().map(read), given) {
            (Some(Ok(secret)), _) => Ok(Some(secret)),
            (Some(Err(error)), None) => Err(error),
            (_, given) => Ok(given.map(str::to_owned)),
        }
    }
}
