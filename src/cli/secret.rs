//! Secrets that client and server share: the token that `auth` presents.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::text::reason;

/// The longest secret in bytes: a longer one does not fit into a request.
const MAX_SECRET_LEN: usize = 65_536;

/// The part of a file that is read, in bytes: a secret with white space around it.
const MAX_FILE_LEN: u64 = 128 * 1024;

/// Reads the secret in a file.
///
/// # Errors
///
/// Why the file cannot be read, or what is wrong with the secret, which is not part of the message.
pub fn read(path: &Path) -> Result<String, String> {
    let mut content = String::new();
    let read = File::open(path)
        .and_then(|file| file.take(MAX_FILE_LEN + 1).read_to_string(&mut content))
        .map_err(|error| reason(&error))?;
    if read as u64 > MAX_FILE_LEN {
        return Err("it is too long for a token".into());
    }
    check(&content)
}

/// Checks a secret and removes the white space around it. An empty secret would let every client
/// in, and one with a line end could never be presented.
///
/// # Errors
///
/// What is wrong with the secret, which is not part of the message.
pub fn check(secret: &str) -> Result<String, String> {
    let secret = secret.trim();
    if secret.is_empty() {
        Err("the token is empty".into())
    } else if secret.contains(['\r', '\n']) {
        Err("the token has a line end in it".into())
    } else if secret.len() > MAX_SECRET_LEN {
        Err(format!("the token is longer than {MAX_SECRET_LEN} bytes"))
    } else {
        Ok(secret.to_owned())
    }
}
