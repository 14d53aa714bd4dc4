//! The bounds of the latch protocol, for server and client: latch-protocol(7).

use std::time::Duration;

use crate::table::{Limit, Weight};

/// The longest command, key or argument, in bytes without the LF.
pub const MAX_LINE_LEN: usize = 256;

/// The longest argument of `auth`, in bytes without the LF, whatever the secret.
pub const MAX_AUTH_LINE_LEN: usize = 65_536;

/// The longest key, in bytes.
pub const MAX_KEY_LEN: usize = MAX_LINE_LEN;

/// The longest admin token, in bytes.
pub const MAX_ADMIN_TOKEN_LEN: usize = 128;

/// The longest wait timeout or lease, in seconds. Beyond it, clients that count nanoseconds in 64
/// bits overflow.
pub const MAX_SECONDS: u64 = 9_223_372_036;

/// The highest limit of a semaphore.
pub const MAX_LIMIT: u32 = 1_048_576;

/// Whether a character is in no key. Other white space may be.
pub fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n')
}

/// Whether a text can be a key.
pub fn is_key(text: &str) -> bool {
    let has_blank = text.bytes().any(|byte| is_blank(byte.into()));
    (1..=MAX_KEY_LEN).contains(&text.len()) && !has_blank
}

/// Whether a text can be an admin token: a word that fits into a line with a fence.
pub fn is_admin_token(text: &str) -> bool {
    (1..=MAX_ADMIN_TOKEN_LEN).contains(&text.len()) && !text.contains(char::is_whitespace)
}

/// A wait timeout in seconds; `None` if it is too long.
pub fn wait_timeout(seconds: u64) -> Option<Duration> {
    (seconds <= MAX_SECONDS).then(|| Duration::from_secs(seconds))
}

/// A lease in seconds; `None` if it is zero or too long.
pub fn lease(seconds: u64) -> Option<Duration> {
    (seconds > 0).then(|| wait_timeout(seconds)).flatten()
}

/// A limit in slots; `None` if it is zero or too high.
pub fn limit(count: u64) -> Option<Limit> {
    let count = u32::try_from(count).ok()?;
    Limit::new(count).filter(|limit| limit.get() <= MAX_LIMIT)
}

/// A weight in slots of a semaphore; `None` if it is zero or above the limit.
pub fn weight(count: u64, limit: Limit) -> Option<Weight> {
    let count = u32::try_from(count).ok()?;
    Weight::new(count).filter(|weight| weight.get() <= limit.get())
}

/// The number of waiters that a claim tolerates; `None` if it is too high.
pub fn max_waiters(count: u64) -> Option<u32> {
    u32::try_from(count).ok().filter(|max| *max <= MAX_LIMIT)
}
