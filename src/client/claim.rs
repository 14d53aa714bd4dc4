//! What a client asks for: a lock or a slot of a semaphore, and for how long it waits.

use std::ffi::OsStr;
use std::path::Path;
use std::process;
use std::time::{Duration, Instant};

use rustix::system::uname;

use super::error::Error;
use crate::os::text::Plain;
use crate::wire::limits::{self, MAX_TAG_LEN};
use crate::wire::request::Wanted;
use crate::wire::terms::{Kind, Limit, Weight};

/// What a client asks for: a lock, or slots of a semaphore.
///
/// ```
/// use latchd::client::Claim;
/// use std::time::Duration;
///
/// let claim = Claim::semaphore(3).with_lease(Duration::from_secs(10));
/// assert_eq!((claim.limit, claim.lease), (Some(3), Some(Duration::from_secs(10))));
/// assert_eq!((Claim::LOCK.limit, Claim::LOCK.lease), (None, None));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// The maximum number of holders at a time, 1 to 1048576; `None` for a lock.
    pub limit: Option<u32>,
    /// The length of the lease, rounded up to whole seconds; `None` for the server's default.
    pub lease: Option<Duration>,
    /// Whether other clients with shared locks can hold the key at the same time.
    pub is_shared: bool,
    /// How many slots of a semaphore the claim takes at once, 1 to the limit; `None` for one.
    pub slots: Option<u32>,
    /// The claim is refused instead of queued if this many claims already wait; `None` for no
    /// limit.
    pub max_waiters: Option<u32>,
}

/// The default lease of a claim that must name a lease. It is also latchd's default.
const USUAL_LEASE: Duration = Duration::from_secs(33);

impl Claim {
    /// A lock with the server's default lease.
    pub const LOCK: Claim = Claim {
        limit: None,
        lease: None,
        is_shared: false,
        slots: None,
        max_waiters: None,
    };

    /// A slot of a semaphore with `limit` slots, with the server's default lease.
    pub const fn semaphore(limit: u32) -> Claim {
        Claim {
            limit: Some(limit),
            ..Claim::LOCK
        }
    }

    /// Returns the same claim with a lease of this length, rounded up to whole seconds.
    #[must_use]
    pub const fn with_lease(self, lease: Duration) -> Claim {
        Claim {
            lease: Some(lease),
            ..self
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self.limit {
            None => Kind::Lock,
            Some(_) => Kind::Semaphore,
        }
    }

    /// The claim as part of a request for `key`. Fails if a value cannot be sent.
    pub(super) fn wanted<'a>(&self, key: &'a str) -> Result<Wanted<'a>, Error> {
        check_key(key)?;
        let limit = self.limit.map(|limit| limits::limit(limit.into()));
        let limit = limit.map(|limit| valid(limit, "a limit is 1 to 1048576"));
        let limit = limit.transpose()?;
        let max_waiters = self.max_waiters.map(|count| {
            let why = "a number of waiters is at most 1048576";
            valid(limits::max_waiters(count.into()), why)
        });
        Ok(Wanted {
            key,
            kind: self.kind(),
            limit: limit.unwrap_or(Limit::ONE),
            lease: match self.checked_lease()? {
                None if self.is_refined() => Some(USUAL_LEASE),
                lease => lease,
            },
            weight: self.checked_weight(limit)?,
            max_waiters: max_waiters.transpose()?,
        })
    }

    /// Whether the claim uses a feature that older servers do not know.
    pub(super) fn is_refined(&self) -> bool {
        self.is_shared || self.slots.is_some() || self.max_waiters.is_some()
    }

    fn checked_weight(&self, limit: Option<Limit>) -> Result<Option<Weight>, Error> {
        let why = match (self.is_shared, self.slots, limit) {
            (false, None, _) => return Ok(None),
            (true, None, None) => return Ok(Some(Weight::ONE)),
            (true, ..) => "only a lock can be shared",
            (false, Some(_), None) => "slots belong to a semaphore, so a limit is needed",
            (false, Some(count), Some(limit)) => {
                let why = "a claim takes 1 slot to as many as the limit says";
                return valid(limits::weight(count.into(), limit), why).map(Some);
            }
        };
        Err(Error::InvalidArgument(why))
    }

    pub(super) fn checked_lease(&self) -> Result<Option<Duration>, Error> {
        let lease = self.lease.map(|lease| {
            let why = "a lease is 1 to 9223372036 seconds";
            valid(limits::lease(whole_seconds(lease)), why)
        });
        lease.transpose()
    }
}

/// How long a claim may wait for its grant: the wait timeout of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// The claim does not wait: the key is tried once.
    No,
    /// The claim waits for at most this time, rounded up to whole seconds.
    UpTo(Duration),
    /// The claim waits until it is granted.
    Forever,
}

impl Wait {
    /// The rest of the wait after `elapsed`, which is rounded to the nearest second. The server
    /// then answers at most half a second late, which the reply timeout allows for.
    pub(crate) fn after(self, elapsed: Duration) -> Wait {
        let elapsed = elapsed.saturating_add(Duration::from_millis(500)).as_secs();
        match self {
            Wait::UpTo(time) => Wait::UpTo(time.saturating_sub(Duration::from_secs(elapsed))),
            other => other,
        }
    }

    /// When the reply to a request that began at `began` is due; `None` if the wait has no limit.
    pub(super) fn deadline(self, began: Instant, reply_timeout: Duration) -> Option<Instant> {
        match self {
            Wait::Forever => None,
            wait => began.checked_add(wait.timeout().saturating_add(reply_timeout)),
        }
    }

    /// The wait timeout to send, at most the protocol's maximum.
    pub(super) fn timeout(self) -> Duration {
        Duration::from_secs(match self {
            Wait::No => 0,
            Wait::UpTo(time) => whole_seconds(time).min(limits::MAX_SECONDS),
            Wait::Forever => limits::MAX_SECONDS,
        })
    }
}

fn whole_seconds(time: Duration) -> u64 {
    let begun = u64::from(time.subsec_nanos() > 0);
    time.as_secs().saturating_add(begun)
}

fn valid<T>(value: Option<T>, why: &'static str) -> Result<T, Error> {
    value.ok_or(Error::InvalidArgument(why))
}

/// Fails if the key cannot be sent.
pub(super) fn check_key(key: &str) -> Result<(), Error> {
    limits::is_key(key).then_some(()).ok_or(Error::InvalidKey)
}

/// Fails if the admin token cannot be sent.
pub(super) fn check_admin_token(token: &str) -> Result<(), Error> {
    let why = "an admin token is 1 to 128 bytes without blanks";
    valid(limits::is_admin_token(token).then_some(()), why)
}

/// Cuts a tag to the length that can be sent. Fails if the tag contains a line end.
pub(super) fn checked_tag(tag: &str) -> Result<&str, Error> {
    if tag.contains(['\r', '\n']) {
        return Err(Error::InvalidArgument("a tag has no line end in it"));
    }
    Ok(cut(tag, MAX_TAG_LEN))
}

/// The tag of a claim that names none: the program, the host and the ID of this process.
pub(crate) fn default_tag(program: &OsStr) -> String {
    let name = Path::new(program).file_name().unwrap_or(program);
    let (name, uname) = (Plain(name.as_encoded_bytes()), uname());
    let host = Plain(uname.nodename().to_bytes());
    format!("{name}@{host} pid {}", process::id())
}

/// The end of the tag of a grant that the server keeps after the work under it has ended.
pub(crate) const ENDED: &str = "(ended)";

/// The tag of such a grant, if `tag` was its tag before.
pub(super) fn ended_tag(tag: &str) -> String {
    if tag.ends_with(ENDED) {
        return tag.to_owned();
    }
    let tag = cut(tag, MAX_TAG_LEN - ENDED.len() - 1);
    format!("{tag} {ENDED}").trim_start().to_owned()
}

/// The beginning of `text` of at most `len` bytes.
fn cut(text: &str, len: usize) -> &str {
    let mut ends = (0..=len.min(text.len())).rev();
    let end = ends.find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_of_ended_work_can_be_sent() {
        assert_eq!(ended_tag("a@b pid 1"), "a@b pid 1 (ended)");
        assert_eq!(ended_tag("a@b pid 1 (ended)"), "a@b pid 1 (ended)");
        assert_eq!(ended_tag(""), ENDED);
        let longest = ended_tag(&"ж".repeat(MAX_TAG_LEN));
        assert_eq!(checked_tag(&longest).ok(), Some(&*longest));
        assert!(longest.ends_with(" (ended)"));
    }
}
