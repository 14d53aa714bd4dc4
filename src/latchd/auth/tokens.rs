//! The tokens that clients present, from a file that is read again at SIGHUP.
//!
//! A file has a token in each line. All of them are accepted, so that an operator can put a new
//! token beside the old one while clients change over. Behind an auth token there may be the rights
//! of its clients.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use log::{info, warn};
use parking_lot::RwLock;

use super::rights::Rights;
use crate::os::secret;
use crate::os::text::{reason, unusable_file, Escaped};
use crate::wire::limits;

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
    accepted: RwLock<Arc<[AcceptedToken]>>,
    /// The maximum length of a token in bytes. Each connection has room for so long a token, so no
    /// later file may have a longer one.
    max_len: usize,
}

#[derive(Debug)]
struct AcceptedToken {
    token: Box<[u8]>,
    rights: Rights,
}

impl Tokens {
    /// The maximum length that later tokens may have in any case, in bytes.
    const LATER_LEN: usize = 256;

    /// A single auth token, which does not come from a file.
    pub(crate) fn single(token: &[u8]) -> Tokens {
        let accepted = AcceptedToken {
            token: token.into(),
            rights: Rights::UNLIMITED,
        };
        Tokens::new(TokenUse::Auth, None, [accepted].into())
    }

    /// Reads the tokens in a file. The error is a single-line message.
    pub fn read(purpose: TokenUse, file: &Path) -> Result<Tokens, String> {
        let accepted = purpose.read(file)?;
        Ok(Tokens::new(purpose, Some(file.to_owned()), accepted))
    }

    fn new(purpose: TokenUse, file: Option<PathBuf>, accepted: Arc<[AcceptedToken]>) -> Tokens {
        let longest = accepted.iter().map(|it| it.token.len()).max();
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

    /// The rights of a client that gives this token; `None` if it is none of the tokens, or if the
    /// rest of the request is wrong. The time depends on the lengths of the tokens and on their
    /// number, but not on where they differ from `given`, or on which of the two is wrong.
    pub fn rights_of(&self, given: &[u8], is_rest_right: bool) -> Option<Rights> {
        let accepted = self.accepted.read();
        // The loop goes on after the token that is the same.
        let mut found = usize::MAX;
        for (at, AcceptedToken { token, .. }) in accepted.iter().enumerate() {
            found = if secret::is_same(token, given) {
                at
            } else {
                found
            };
        }
        let found = if is_rest_right { found } else { usize::MAX };
        accepted.get(found).map(|it| it.rights.clone())
    }

    /// If some tokens have rights behind them, logs how many: an old token may by chance look as if
    /// it had.
    pub fn log_rights(&self) {
        let accepted = self.accepted.read();
        let Some(file) = &self.file else {
            return;
        };
        if limited_count(&accepted) > 0 {
            log_read(file, &accepted);
        }
        warn_of_blanks(file, &accepted);
    }

    /// Reads the file again, if there is one. If that fails, the old tokens stay. Connections that
    /// are open stay, whatever token they have presented.
    pub fn reload(&self) {
        let Some(file) = &self.file else {
            return;
        };
        match self.read_later(file) {
            Ok(tokens) => {
                log_read(file, &tokens);
                warn_of_blanks(file, &tokens);
                *self.accepted.write() = tokens;
            }
            Err(why) => warn!("token-kept error={}", Escaped(why.as_bytes())),
        }
    }

    fn read_later(&self, file: &Path) -> Result<Arc<[AcceptedToken]>, String> {
        let unusable = |why: &str| unusable_file(self.purpose.word(), file, why);
        // A pipe delivers its tokens only once. The thread that reads the file also handles the
        // other signals, so it must not wait for the pipe's writer.
        if file.exists() && !file.is_file() {
            return Err(unusable("it is not a regular file"));
        }
        let tokens = self.purpose.read(file)?;
        if tokens.iter().any(|it| it.token.len() > self.max_len) {
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

    fn read(self, file: &Path) -> Result<Arc<[AcceptedToken]>, String> {
        let unusable = |why: String| unusable_file(self.word(), file, why);
        let lines = secret::read_lines(file).map_err(|error| unusable(reason(&error)))?;
        if self == TokenUse::Auth {
            return with_rights(&lines).map_err(|why| unusable(why.to_owned()));
        }
        // An admin token shares a line with other words.
        if !lines.iter().all(|line| limits::is_admin_token(line)) {
            let max_len = limits::MAX_ADMIN_TOKEN_LEN;
            let why = format!("a token is one word of at most {max_len} bytes");
            return Err(unusable(why));
        }
        let tokens = lines.into_iter().map(|line| AcceptedToken {
            token: line.into_bytes().into(),
            rights: Rights::UNLIMITED,
        });
        Ok(tokens.collect())
    }
}

fn log_read(file: &Path, tokens: &[AcceptedToken]) {
    let (path, count, limited) = (Escaped::path(file), tokens.len(), limited_count(tokens));
    info!("token-read path={path} count={count} limited={limited}");
}

/// Warns of tokens with blanks in them: the words behind the first one may be misspelt rights.
fn warn_of_blanks(file: &Path, tokens: &[AcceptedToken]) {
    let has_blanks = |it: &&AcceptedToken| it.token.iter().any(u8::is_ascii_whitespace);
    let (path, count) = (
        Escaped::path(file),
        tokens.iter().filter(has_blanks).count(),
    );
    if count > 0 {
        warn!("token-with-blanks path={path} count={count}");
    }
}

fn limited_count(tokens: &[AcceptedToken]) -> usize {
    let limited = tokens.iter().filter(|it| it.rights != Rights::UNLIMITED);
    limited.count()
}

/// Reads the rights behind the auth tokens in these lines.
fn with_rights(lines: &[String]) -> Result<Arc<[AcceptedToken]>, &'static str> {
    let lines: Vec<_> = lines
        .iter()
        .map(|line| secret::split_rights(line))
        .collect();
    let has_rights = lines.iter().any(|(_, rights)| rights.is_some());
    let mut known = BTreeSet::new();
    for (token, _) in &lines {
        // Without this check, a token whose right is misspelt would have all rights. A file without
        // rights may be an old one.
        if has_rights && token.contains(char::is_whitespace) {
            return Err("a token has blanks in it, or words behind it that are no rights");
        }
        if has_rights && !known.insert(token) {
            return Err("a token is in two lines");
        }
    }
    let accepted = lines.iter().map(|(token, words)| {
        Ok(AcceptedToken {
            token: token.as_bytes().into(),
            rights: words.map_or(Ok(Rights::UNLIMITED), Rights::parse)?,
        })
    });
    accepted.collect()
}
