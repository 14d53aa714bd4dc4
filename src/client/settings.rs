//! How to connect.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::address::{Address, LONGEST_ATTEMPT};
use super::error::Error;
use super::tls::Tls;
use crate::net::stream::Stream;
use crate::sys::lookups::Lookups;
use crate::sys::secret;

/// How a connection is made.
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
    /// How long connecting may take, looking up a name and the reply to the auth token included (5
    /// seconds). All addresses of a name share it.
    pub connect_timeout: Duration,
    /// How long a reply may take, besides the time for which the claim may wait (10 seconds).
    pub reply_timeout: Duration,
    /// The secret that the server asks for, if any: one line of at most 65536 bytes (none). White
    /// space around it does not count.
    pub auth_token: Option<String>,
    /// A file with that secret (none). It is read for each connection, so that a client keeps
    /// working when the secret changes. While it cannot be read, or not in half of the time for
    /// connecting, `auth_token` stands in for it.
    pub auth_token_file: Option<PathBuf>,
    /// How to speak TLS with servers that are reached over TCP (none; always none without the
    /// feature `tls`).
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
    /// The secret for a new connection, if the server asks for one. At the deadline, its file is
    /// one that cannot be read: a file server may be silent, or the other end of a pipe.
    fn auth_token(&self, deadline: Instant) -> Result<Option<String>, Error> {
        static ALL: Lookups<PathBuf, String> = Lookups::new(|file| secret::read(file));
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

    /// Connects within `within`, with a TLS handshake if that is wanted. Also returns when the
    /// server's share of the time is over (`others` more servers get as much), the address that was
    /// reached, and the secret to present.
    pub(super) fn connect(
        &self,
        server: &Address,
        within: Duration,
        others: u32,
    ) -> Result<(Stream, Instant, Address, Option<String>), Error> {
        let (began, within) = (Instant::now(), within.min(LONGEST_ATTEMPT));
        let auth_token = self.auth_token(began + within / 2)?;
        let within = within.saturating_sub(began.elapsed());
        let (stream, deadline, reached) = server
            .connect(within)
            .map_err(|error| Error::unreachable(server, error))?;
        let now = Instant::now();
        let deadline = now + deadline.saturating_duration_since(now) / (others + 1);
        let stream = match &self.tls {
            Some(tls) => {
                let stream = tls.speak(stream, reached, deadline);
                stream.inspect_err(|_| server.try_another_than(reached))?
            }
            None => stream,
        };
        Ok((stream, deadline, reached.clone(), auth_token))
    }
}
