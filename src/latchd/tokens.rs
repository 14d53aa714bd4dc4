//! The tokens that clients present, from a file that is read again at SIGHUP.
//!
//! A file has a token in each line. All of them are accepted, so that an operator can put a new
//! token beside the old one while clients change over.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use log::{info, warn};
use parking_lot::RwLock;

use crate::protocol::limits;
use crate::sys::secret;
use crate::text::{reason, unusable_file, Escaped};

/// What a token lets a client do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenUse {
    /// Present it with `auth` before any other request.
    Auth,
    /// Break grants over any connection.
    Admin,
}

/// The tokens for one use.
#[derive(Debug)]
pub struct Tokens {
    purpose: TokenUse,
    /// The file that the tokens come from, if they come from one.
    file: Option<PathBuf>,
    accepted: RwLock<Arc<[Box<[u8]>]>>,
    /// The maximum length of a token in bytes. Each connection has room for so long a token, so no
    /// later file may have a longer one.
    max_len: usize,
}

impl Tokens {
    /// The maximum length that later tokens may have in any case, in bytes.
    const LATER_LEN: usize = 256;

    /// A single auth token, which does not come from a file.
    pub(crate) fn single(token: &[u8]) -> Tokens {
        Tokens::new(TokenUse::Auth, None, [token.into()].into())
    }

    /// Reads the tokens in a file. The error is a single-line message.
    pub(super) fn read(purpose: TokenUse, file: &Path) -> Result<Tokens, String> {
        let tokens = purpose.read(file)?;
        Ok(Tokens::new(purpose, Some(file.to_owned()), tokens))
    }

    fn new(purpose: TokenUse, file: Option<PathBuf>, accepted: Arc<[Box<[u8]>]>) -> Tokens {
        let longest = accepted.iter().map(|token| token.len()).max();
        Tokens {
            purpose,
            max_len: longest.unwrap_or(0).max(Tokens::LATER_LEN),
            file,
            accepted: RwLock::new(accepted),
        }
    }

    /// The maximum length of a token in bytes, now and after each time the file is read.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Whether `given` is one of the tokens. The time depends on the lengths of the tokens and on
    /// their number, but not on where they differ from `given`.
    pub fn accept(&self, given: &[u8]) -> bool {
        let accepted = self.accepted.read();
        let compared = accepted.iter().map(|token| secret::is_same(token, given));
        compared.fold(false, |is_found, is_same| is_found | is_same)
    }

    /// Reads the file again, if there is one. If that fails, the old tokens stay. Connections that
    /// are open stay, whatever token they have presented.
    pub(super) fn reload(&self) {
        let Some(file) = &self.file else {
            return;
        };
        match self.read_later(file) {
            Ok(tokens) => {
                let (path, count) = (Escaped::path(file), tokens.len());
                info!("token-read path={path} count={count}");
                *self.accepted.write() = tokens;
            }
            Err(why) => warn!("token-kept error={}", Escaped(why.as_bytes())),
        }
    }
}

impl Tokens {
    fn read_later(&self, file: &Path) -> Result<Arc<[Box<[u8]>]>, String> {
        let unusable = |why: &str| unusable_file(self.purpose.word(), file, why);
        // A pipe delivers its tokens only once. The thread that reads the file also handles the
        // other signals, so it must not wait for the pipe's writer.
        if file.exists() && !file.is_file() {
            return Err(unusable("it is not a regular file"));
        }
        let tokens = self.purpose.read(file)?;
        if tokens.iter().any(|token| token.len() > self.max_len) {
            let max_len = self.max_len;
            let why = format!("a token is longer than {max_len} bytes, which needs a restart");
            return Err(unusable(&why));
        }
        Ok(tokens)
    }
}

impl TokenUse {
    fn word(self) -> &'static str {
        match self {
            TokenUse::Auth => "auth token",
            TokenUse::Admin => "admin token",
        }
    }

    fn read(self, file: &Path) -> Result<Arc<[Box<[u8]>]>, String> {
        let unusable = |why: String| unusable_file(self.word(), file, why);
        let lines = secret::read_lines(file).map_err(|error| unusable(reason(&error)))?;
        // An admin token shares a line with other words.
        if self == TokenUse::Admin && !lines.iter().all(|line| limits::is_admin_token(line)) {
            let max_len = limits::MAX_ADMIN_TOKEN_LEN;
            let why = format!("a token is one word of at most {max_len} bytes");
            return Err(unusable(why));
        }
        let tokens = lines.into_iter().map(|line| line.into_bytes().into());
        Ok(tokens.collect())
    }
}
