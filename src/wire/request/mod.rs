//! Encoding and parsing of requests, three lines each: see latch-protocol(7), FRAMING.
//!
//! There is no I/O and no clock here. A command is a variant of [`Request`]; `parse`,
//! [`Request::write`] and `HELP` each have a line for it, and `latchd::requests` carries it out.
//! Clients only write requests, so what reads them is in `parsing`.

#[cfg(feature = "programs")]
mod parsing;

use std::borrow::Cow;
use std::io::Write;
use std::time::Duration;

use super::abilities::Abilities;
use crate::wire::terms::{Kind, Limit, Terms, Weight};
use crate::wire::token::Token;
#[cfg(feature = "programs")]
pub use parsing::{line_limit, parse, FirstWord, Frame, ProtocolError, CLUSTER, HELP, RELAY};

/// The key line of `stats` that asks for the queues of keys. If a fence follows this word, it asks
/// for one grant.
const QUEUES: &str = "holders";

/// The key line of `stats` that asks for the histories of keys.
const HISTORIES: &str = "histories";

/// The key line of `stats` that asks for the counters.
const COUNTERS: &str = "counters";

/// Stands for any key in the place of a key, and for any fence in the place of a fence.
const ANY: &str = "_";

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// `l`, `sl`, with the wait timeout
    Acquire(Wanted<'a>, Duration),
    /// `e`, `se`
    Enqueue(Wanted<'a>),
    /// `w`, `sw`
    Wait {
        key: &'a str,
        kind: Kind,
        wait_timeout: Duration,
    },
    /// `r`, `sr`, perhaps with the exit status of the work under the lock
    Release {
        key: &'a str,
        kind: Kind,
        token: Token,
        status: Option<u8>,
    },
    /// `n`, `sn`
    Renew {
        key: &'a str,
        kind: Kind,
        token: Token,
        lease: Option<Duration>,
    },
    /// `adopt`: renews a grant of either kind, and ties it to this connection
    Adopt {
        key: &'a str,
        token: Token,
        lease: Option<Duration>,
        held: Held<'a>,
    },
    /// `keep`: renews a grant of either kind, and detaches it from every connection. The status is
    /// that of work which has ended, and is written only if there is a lease.
    Keep {
        key: &'a str,
        token: Token,
        lease: Option<Duration>,
        status: Option<u8>,
    },
    /// `hello`: what the client can do
    Hello(Abilities),
    /// `ping`, and also `barrier`, because there are no other nodes to wait for
    Ping,
    /// `stable-ref`, which a connection may send once
    #[cfg(feature = "programs")]
    StableRef,
    /// `stats`
    Stats,
    /// `stats` with the key line `holders`: the queues of one key, or of all keys in use
    Queues(Option<&'a str>),
    /// `stats` with the key line `holders FENCE`: one grant of a key
    Holder { key: &'a str, fence: u64 },
    /// `stats` with the key line `histories`
    Histories,
    /// `stats` with the key line `counters`
    Counters,
    /// `tag`: what the client says about itself
    Tag(&'a str),
    /// `break`: ends the grant with this fence, or all grants of the key
    Break {
        key: &'a str,
        fence: Option<u64>,
        admin_token: Option<&'a str>,
    },
    /// `auth` with the secret. A server that has a secret checks it before it parses any request.
    Auth(&'a str),
}

impl<'a> Request<'a> {
    /// The key whose holders the request may change; `None` if it changes none.
    pub fn changed_key(&self) -> Option<&'a str> {
        match *self {
            Request::Acquire(wanted, _) | Request::Enqueue(wanted) => Some(wanted.key),
            Request::Wait { key, .. }
            | Request::Release { key, .. }
            | Request::Renew { key, .. }
            | Request::Adopt { key, .. }
            | Request::Keep { key, .. }
            | Request::Break { key, .. } => Some(key),
            _ => None,
        }
    }

    /// The admin token in the request, if there is one.
    pub fn admin_token(&self) -> Option<&'a str> {
        match *self {
            Request::Break { admin_token, .. } => admin_token,
            _ => None,
        }
    }
}

/// What a client that adopts a grant says about it, for a server that does not know the grant. It
/// is written only if there is a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held<'a> {
    pub terms: Terms,
    /// The numbers of its slots, in ascending order and separated by commas, if the client knows
    /// them.
    pub numbers: Option<&'a str>,
    /// How long ago it was granted, for a server that knows `age=`.
    pub age: Option<Duration>,
}

impl Held<'_> {
    /// An exclusive lock.
    pub const LOCK: Held<'static> = Held {
        terms: Terms::LOCK,
        numbers: None,
        age: None,
    };

    /// The words after the lease; none for an exclusive lock.
    fn words(&self) -> String {
        let limit = self.terms.limit.get();
        let mut words = match (self.terms.kind, self.terms.weight) {
            (Kind::Lock, Weight::WHOLE) => String::new(),
            (Kind::Lock, _) => format!(" {SHARED}"),
            (Kind::Semaphore, Weight::ONE) => format!(" {SEMAPHORE}{limit}"),
            (Kind::Semaphore, weight) => format!(" {SEMAPHORE}{limit} {SLOTS}{}", weight.get()),
        };
        if let Some(numbers) = self.numbers {
            words += &format!(" {NUMBERS}{numbers}");
        }
        if let Some(age) = self.age {
            words += &format!(" {AGE}{}", age.as_secs());
        }
        words
    }
}

/// What a claim asks for. `weight` and `max_waiters` are written only if there is a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted<'a> {
    pub key: &'a str,
    pub kind: Kind,
    pub limit: Limit,
    /// `None` means the server's default.
    pub lease: Option<Duration>,
    /// `shared` or `slots=N`; `None` means a whole lock, or one slot of a semaphore.
    pub weight: Option<Weight>,
    /// `waiters=N`: the maximum number of claims that may be waiting already if this claim must
    /// wait.
    pub max_waiters: Option<u32>,
}

/// The words that may follow the lease of a claim.
const SHARED: &str = "shared";
const SLOTS: &str = "slots=";
const WAITERS: &str = "waiters=";

/// The words that may follow the lease of an adoption, beside `shared` and `slots=`.
const SEMAPHORE: &str = "sem=";
const NUMBERS: &str = "number=";
const AGE: &str = "age=";

/// The word with an exit status that may follow the token of a release, or the lease of `keep`.
const STATUS: &str = "status=";

impl Wanted<'_> {
    pub fn terms(&self) -> Terms {
        let plain = Terms::plain(self.kind, self.limit);
        Terms {
            weight: self.weight.unwrap_or(plain.weight),
            ..plain
        }
    }

    /// The words after the lease.
    fn refinements(&self) -> String {
        let weight = self.weight.map(|weight| match self.kind {
            Kind::Lock => format!(" {SHARED}"),
            Kind::Semaphore => format!(" {SLOTS}{}", weight.get()),
        });
        let max_waiters = self.max_waiters.map(|max| format!(" {WAITERS}{max}"));
        weight.into_iter().chain(max_waiters).collect()
    }
}

impl Request<'_> {
    /// Whether the request contains an auth token or an admin token.
    pub fn has_secret(&self) -> bool {
        matches!(self, Request::Auth(_)) || self.admin_token().is_some()
    }

    /// Appends the request's three lines to `out`. [`parse`] reads the same request from them if
    /// its key passes [`limits::is_key`] and its numbers are within [`limits`].
    pub fn write(&self, out: &mut Vec<u8>) {
        let (kind, command, key) = self.command_and_key();
        let prefix = if kind == Some(Kind::Semaphore) {
            "s"
        } else {
            ""
        };
        let argument = Vec::from_iter(self.words().into_iter().flatten()).join(" ");
        writeln!(out, "{prefix}{command}\n{key}\n{argument}").expect("writing to memory");
    }

    /// The first two lines: the command without the prefix for semaphores, and the key line. The
    /// kind is `None` for commands without one.
    fn command_and_key(&self) -> (Option<Kind>, &'static str, Cow<'_, str>) {
        let (kind, command, key) = match *self {
            Request::Acquire(wanted, _) => (Some(wanted.kind), "l", wanted.key),
            Request::Enqueue(wanted) => (Some(wanted.kind), "e", wanted.key),
            Request::Wait { key, kind, .. } => (Some(kind), "w", key),
            Request::Release { key, kind, .. } => (Some(kind), "r", key),
            Request::Renew { key, kind, .. } => (Some(kind), "n", key),
            Request::Adopt { key, .. } => (None, "adopt", key),
            Request::Keep { key, .. } => (None, "keep", key),
            Request::Hello(_) => (None, "hello", ANY),
            Request::Ping => (None, "ping", ANY),
            #[cfg(feature = "programs")]
            Request::StableRef => (None, "stable-ref", ANY),
            Request::Stats => (None, "stats", ANY),
            Request::Queues(_) => (None, "stats", QUEUES),
            Request::Holder { fence, .. } => {
                return (None, "stats", format!("{QUEUES} {fence}").into());
            }
            Request::Histories => (None, "stats", HISTORIES),
            Request::Counters => (None, "stats", COUNTERS),
            Request::Tag(_) => (None, "tag", ANY),
            Request::Break { key, .. } => (None, "break", key),
            Request::Auth(_) => (None, "auth", ANY),
        };
        (kind, command, key.into())
    }

    /// The words of the third line.
    fn words(&self) -> [Option<String>; 3] {
        let seconds = |time: Duration| time.as_secs().to_string();
        let limit = |wanted: Wanted<'_>| {
            let count = wanted.limit.get();
            (wanted.kind == Kind::Semaphore).then(|| count.to_string())
        };
        let lease = |wanted: Wanted<'_>| {
            let lease = wanted.lease.map(seconds);
            lease.map(|lease| lease + &wanted.refinements())
        };
        let one = |word: &str| [Some(word.to_owned()), None, None];
        let ended = |status: Option<u8>| status.map(|status| format!("{STATUS}{status}"));
        let of_grant = |token: Token, lease, status| [Some(token.to_string()), lease, status];
        match *self {
            Request::Acquire(wanted, wait_timeout) => {
                [Some(seconds(wait_timeout)), limit(wanted), lease(wanted)]
            }
            Request::Enqueue(wanted) => [limit(wanted), lease(wanted), None],
            Request::Wait { wait_timeout, .. } => one(&seconds(wait_timeout)),
            Request::Release { token, status, .. } => of_grant(token, None, ended(status)),
            Request::Renew { token, lease, .. } => of_grant(token, lease.map(seconds), None),
            Request::Adopt {
                token, lease, held, ..
            } => {
                let lease = lease.map(|lease| seconds(lease) + &held.words());
                of_grant(token, lease, None)
            }
            Request::Keep {
                token,
                lease,
                status,
                ..
            } => {
                let status = ended(status).filter(|_| lease.is_some());
                of_grant(token, lease.map(seconds), status)
            }
            Request::Hello(abilities) => one(&abilities.to_string()),
            Request::Queues(key) => one(key.unwrap_or(ANY)),
            Request::Holder { key, .. } => one(key),
            Request::Tag(text) => one(text),
            Request::Break {
                fence, admin_token, ..
            } => {
                let fence = fence.map_or_else(|| ANY.to_owned(), |fence| fence.to_string());
                [Some(fence), admin_token.map(str::to_owned), None]
            }
            Request::Auth(secret) => one(secret),
            _ => one(ANY),
        }
    }
}
