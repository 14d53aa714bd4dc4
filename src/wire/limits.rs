//! The limits of the latch protocol, for server and client: see latch-protocol(7).

use std::time::Duration;

use crate::wire::terms::{Limit, Weight};

/// The maximum length of a command, key or argument, in bytes without the LF.
pub const MAX_LINE_LEN: usize = 256;

/// The maximum length of the argument of `auth`, in bytes without the LF, whatever the secret.
#[cfg(feature = "programs")]
pub const MAX_AUTH_LINE_LEN: usize = 65_536;

/// The maximum length of a key, in bytes.
pub const MAX_KEY_LEN: usize = MAX_LINE_LEN;

/// The maximum length of a tag, in bytes.
pub const MAX_TAG_LEN: usize = 128;

/// The maximum length of an admin token, in bytes.
pub const MAX_ADMIN_TOKEN_LEN: usize = 128;

/// The maximum wait timeout or lease, in seconds. A longer time would overflow in clients that
/// count nanoseconds in 64 bits.
pub const MAX_SECONDS: u64 = 9_223_372_036;

/// The maximum limit of a semaphore.
pub const MAX_LIMIT: u32 = 1_048_576;

/// Whether a character is one that a key must not contain: space, tab, CR or LF. A key may contain
/// other white space.
pub fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n')
}

/// Whether a text can be a key.
pub fn is_key(text: &str) -> bool {
    let has_blank = text.bytes().any(|byte| is_blank(byte.into()));
    (1..=MAX_KEY_LEN).contains(&text.len()) && !has_blank
}

/// Whether a text can be an admin token: a single word that fits into a line with a fence.
pub fn is_admin_token(text: &str) -> bool {
    (1..=MAX_ADMIN_TOKEN_LEN).contains(&text.len()) && !text.contains(char::is_whitespace)
}

/// Converts seconds to a wait timeout; `None` if it is too long.
pub fn wait_timeout(seconds: u64) -> Option<Duration> {
    (seconds <= MAX_SECONDS).then(|| Duration::from_secs(seconds))
}

/// Converts seconds to a lease; `None` if it is zero or too long.
pub fn lease(seconds: u64) -> Option<Duration> {
    (seconds > 0).then(|| wait_timeout(seconds)).flatten()
}

/// Converts a number of slots to a limit; `None` if it is zero or too high.
pub fn limit(count: u64) -> Option<Limit> {
    let count = u32::try_from(count).ok()?;
    Limit::new(count).filter(|limit| limit.get() <= MAX_LIMIT)
}

/// Converts a number of slots of a semaphore to a weight; `None` if it is zero or above the limit.
pub fn weight(count: u64, limit: Limit) -> Option<Weight> {
    let count = u32::try_from(count).ok()?;
    Weight::new(count).filter(|weight| weight.get() <= limit.get())
}

/// Converts the number of waiters that a claim tolerates; `None` if it is too high.
pub fn max_waiters(count: u64) -> Option<u32> {
    u32::try_from(count).ok().filter(|max| *max <= MAX_LIMIT)
}
