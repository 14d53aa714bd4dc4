//! The reading of requests, and of what may come before the first one. Any three lines are either a
//! request or a [`ProtocolError`]. Before the first request, a person may type a [`FirstWord`], and
//! a server of a cluster may send [`RELAY`].

use std::time::Duration;

use super::{
    Held, Request, Wanted, AGE, ANY, COUNTERS, HISTORIES, NUMBERS, QUEUES, SEMAPHORE, SHARED,
    SLOTS, STATUS, WAITERS,
};
use crate::os::text::digits;
use crate::wire::abilities::Abilities;
use crate::wire::limits::{self, MAX_AUTH_LINE_LEN, MAX_LINE_LEN, MAX_TAG_LEN};
use crate::wire::terms::{Kind, Limit, Terms, Weight};
use crate::wire::token::Token;

/// The first line of a connection that another server of a cluster passes on.
pub const RELAY: &[u8] = b"relay";

/// The first line of a request that asks a server of a cluster for its role.
pub const CLUSTER: &[u8] = b"cluster";

/// The command that opens a connection if the server has an auth token.
const AUTH: &[u8] = b"auth";

/// The lines of one request: command, key, argument.
pub type Frame<'a> = [&'a [u8]; 3];

/// The maximum length of a line of a frame, in bytes. `index` is the position of the line in the
/// frame. The secret has `secret_len` bytes, and there may be spaces around it.
pub fn line_limit(secret_len: usize, index: usize, command: &[u8]) -> usize {
    if index == 2 && command == AUTH {
        (secret_len + MAX_LINE_LEN).min(MAX_AUTH_LINE_LEN)
    } else {
        MAX_LINE_LEN
    }
}

/// The lines that answer [`FirstWord::Help`]: after the first, one command a line.
pub const HELP: &str = "\
ok commands, each with a line for its key and one for its arguments; see latch-protocol(7):
l WAIT [LEASE]          take a lock, or wait for it
sl WAIT LIMIT [LEASE]   take a slot of a semaphore, or wait for it
e [LEASE]               take a lock, or a place in its queue
se LIMIT [LEASE]        take a slot, or a place in its queue
w WAIT                  after e: wait for the lock
sw WAIT                 after se: wait for the slot
r TOKEN                 release a lock
sr TOKEN                release a slot
n TOKEN [LEASE]         renew the lease of a lock
sn TOKEN [LEASE]        renew the lease of a slot
adopt TOKEN [LEASE]     renew it, and move it to this connection
keep TOKEN [LEASE]      renew it, and keep it without a connection
hello                   ask what the server can do
ping                    ask whether the server answers
stats                   ask which keys are in use
tag TEXT                say who this client is
break FENCE             take a lock or a slot away from its holder
auth SECRET             give the secret of the server, before all else
quit                    end the connection; this one is a line alone";

/// A word that a person may type before the first request. It is a single line, not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstWord {
    /// `help`, `?`
    Help,
    /// `quit`
    Quit,
    /// An empty line or `_`, which a client may send after `help` to complete a frame.
    Placeholder,
}

impl FirstWord {
    /// Reads a line; `None` if it begins a request.
    pub fn parse(line: &[u8]) -> Option<FirstWord> {
        match line {
            b"help" | b"?" => Some(FirstWord::Help),
            b"quit" => Some(FirstWord::Quit),
            b"" | b"_" => Some(FirstWord::Placeholder),
            _ => None,
        }
    }
}

/// Why three lines are not a request. The reply is always `error`; the code is for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolError {
    InvalidCommand,
    InvalidInteger,
    InvalidKey,
    BadTimeout,
    EmptyToken,
    ArgumentCount,
    BadLease,
    BadLimit,
    NotUtf8,
    MalformedToken,
    TagTooLong,
}

impl ProtocolError {
    /// Whether the first line was a command.
    pub fn knows_command(self) -> bool {
        !matches!(self, ProtocolError::InvalidCommand | ProtocolError::NotUtf8)
    }

    /// What the log says: dflockd's number for it, and a word. What dflockd does not tell apart has
    /// the number of what comes nearest.
    pub fn describe(self) -> (u8, &'static str) {
        match self {
            ProtocolError::InvalidCommand => (3, "invalid-command"),
            ProtocolError::InvalidInteger => (4, "invalid-integer"),
            ProtocolError::InvalidKey => (5, "invalid-key"),
            ProtocolError::BadTimeout => (6, "bad-timeout"),
            ProtocolError::EmptyToken => (7, "empty-token"),
            ProtocolError::ArgumentCount => (8, "argument-count"),
            ProtocolError::BadLease => (9, "bad-lease"),
            ProtocolError::BadLimit => (13, "bad-limit"),
            ProtocolError::NotUtf8 => (3, "not-utf8"),
            ProtocolError::MalformedToken => (7, "malformed-token"),
            ProtocolError::TagTooLong => (8, "tag-too-long"),
        }
    }
}

/// Reads a request from its three lines. `l` is for locks and `sl` for semaphores, and so on.
pub fn parse([command, key, argument]: [&str; 3]) -> Result<Request<'_>, ProtocolError> {
    let (command, kind) = match command {
        "sl" | "se" | "sw" | "sr" | "sn" => (&command[1..], Kind::Semaphore),
        _ => (command, Kind::Lock),
    };
    let mut words = Words(argument);
    let request = Ok(match command {
        "l" => {
            let (key, wait_timeout) = (checked(key)?, words.wait_timeout()?);
            Request::Acquire(words.wanted(key, kind)?, wait_timeout)
        }
        "e" => Request::Enqueue(words.wanted(checked(key)?, kind)?),
        "w" => Request::Wait {
            key: checked(key)?,
            kind,
            wait_timeout: words.wait_timeout()?,
        },
        "r" => Request::Release {
            key: checked(key)?,
            kind,
            token: words.token()?,
            status: words.status()?,
        },
        "n" => Request::Renew {
            key: checked(key)?,
            kind,
            token: words.token()?,
            lease: words.lease()?,
        },
        "adopt" => Request::Adopt {
            key: checked(key)?,
            token: words.token()?,
            lease: words.lease()?,
            held: words.held()?,
        },
        "keep" => Request::Keep {
            key: checked(key)?,
            token: words.token()?,
            lease: words.lease()?,
            status: words.status()?,
        },
        "break" => Request::Break {
            key: checked(key)?,
            fence: words.fence()?,
            admin_token: words.next(),
        },
        // These ignore their keys, and do not count the words of their arguments.
        "stats" => return parse_stats(key, argument.trim_matches(limits::is_blank)),
        "hello" => return Ok(Request::Hello(Abilities::parse(words))),
        "ping" | "barrier" => return Ok(Request::Ping),
        "stable-ref" => return Ok(Request::StableRef),
        "tag" if argument.len() > MAX_TAG_LEN => return Err(ProtocolError::TagTooLong),
        "tag" => return Ok(Request::Tag(argument)),
        "auth" => return Ok(Request::Auth(argument)),
        _ => return Err(ProtocolError::InvalidCommand),
    });
    match words.next() {
        None => request,
        Some(_) => Err(ProtocolError::ArgumentCount),
    }
}

/// Reads a `stats` request. Its key line says what is `asked`, and its argument names the key if
/// one is needed.
fn parse_stats<'a>(asked: &str, key: &'a str) -> Result<Request<'a>, ProtocolError> {
    match asked.split_once(' ') {
        Some((QUEUES, fence)) => Ok(Request::Holder {
            key: checked(key)?,
            fence: parse_integer(fence)?,
        }),
        None if asked == QUEUES && matches!(key, "" | ANY) => Ok(Request::Queues(None)),
        None if asked == QUEUES => Ok(Request::Queues(Some(checked(key)?))),
        None if asked == HISTORIES => Ok(Request::Histories),
        None if asked == COUNTERS => Ok(Request::Counters),
        _ => Ok(Request::Stats),
    }
}

fn checked(key: &str) -> Result<&str, ProtocolError> {
    if limits::is_key(key) {
        Ok(key)
    } else {
        Err(ProtocolError::InvalidKey)
    }
}

/// The rest of an argument, whose words are taken one by one.
struct Words<'a>(&'a str);

impl<'a> Iterator for Words<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let rest = self.0.trim_start();
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        self.0 = rest;
        (!word.is_empty()).then_some(word)
    }
}

impl<'a> Words<'a> {
    fn wanted(&mut self, key: &'a str, kind: Kind) -> Result<Wanted<'a>, ProtocolError> {
        let mut wanted = Wanted {
            key,
            kind,
            limit: self.limit(kind)?,
            lease: self.lease()?,
            weight: None,
            max_waiters: None,
        };
        for word in self.by_ref() {
            wanted.refine(word)?;
        }
        Ok(wanted)
    }

    /// Reads the words after the lease of an adoption, in any order. Each may occur only once.
    fn held(&mut self) -> Result<Held<'a>, ProtocolError> {
        let (mut limit, mut slots, mut numbers, mut is_shared) = (None, None, None, false);
        let mut age = None;
        for word in self.by_ref() {
            if let (Some(word), None) = (word.strip_prefix(SEMAPHORE), limit) {
                limit = Some(limits::limit(parse_integer(word)?).ok_or(ProtocolError::BadLimit)?);
            } else if let (Some(word), None) = (word.strip_prefix(SLOTS), slots) {
                slots = Some(parse_integer(word)?);
            } else if let (Some(word), None) = (word.strip_prefix(NUMBERS), numbers) {
                word.split(',')
                    .try_for_each(|word| parse_integer(word).map(drop))?;
                numbers = Some(word);
            } else if let (Some(word), None) = (word.strip_prefix(AGE), age) {
                age = Some(Duration::from_secs(parse_integer(word)?));
            } else if word == SHARED && !is_shared {
                is_shared = true;
            } else {
                return Err(ProtocolError::ArgumentCount);
            }
        }
        let (kind, weight) = match (limit, slots, is_shared) {
            (None, None, false) => (Kind::Lock, Weight::WHOLE),
            (None, None, true) => (Kind::Lock, Weight::ONE),
            (Some(_), None, false) => (Kind::Semaphore, Weight::ONE),
            (Some(limit), Some(slots), false) => {
                let weight = limits::weight(slots, limit).ok_or(ProtocolError::BadLimit)?;
                (Kind::Semaphore, weight)
            }
            _ => return Err(ProtocolError::ArgumentCount),
        };
        let limit = limit.unwrap_or(Limit::ONE);
        let terms = Terms {
            kind,
            limit,
            weight,
        };
        Ok(Held {
            terms,
            numbers,
            age,
        })
    }

    fn wait_timeout(&mut self) -> Result<Duration, ProtocolError> {
        let seconds = self.integer()?.ok_or(ProtocolError::ArgumentCount)?;
        limits::wait_timeout(seconds).ok_or(ProtocolError::BadTimeout)
    }

    fn limit(&mut self, kind: Kind) -> Result<Limit, ProtocolError> {
        if kind == Kind::Lock {
            return Ok(Limit::ONE);
        }
        let count = self.integer()?.ok_or(ProtocolError::ArgumentCount)?;
        limits::limit(count).ok_or(ProtocolError::BadLimit)
    }

    fn lease(&mut self) -> Result<Option<Duration>, ProtocolError> {
        let lease = |seconds| limits::lease(seconds).ok_or(ProtocolError::BadLease);
        self.integer()?.map(lease).transpose()
    }

    /// An exit status, if there is one more word.
    fn status(&mut self) -> Result<Option<u8>, ProtocolError> {
        let Some(word) = self.next() else {
            return Ok(None);
        };
        let status = word.strip_prefix(STATUS);
        let status = status.ok_or(ProtocolError::ArgumentCount)?;
        let status = digits(status).ok_or(ProtocolError::InvalidInteger)?;
        Ok(Some(status))
    }

    fn token(&mut self) -> Result<Token, ProtocolError> {
        // In most cases the token is the whole argument.
        if let Some(token) = Token::from_digits(self.0.as_bytes()) {
            self.0 = "";
            return Ok(token);
        }
        let word = self.next().ok_or(ProtocolError::EmptyToken)?;
        word.parse().map_err(|_| ProtocolError::MalformedToken)
    }

    /// A fence, or [`ANY`].
    fn fence(&mut self) -> Result<Option<u64>, ProtocolError> {
        match self.next() {
            None => Err(ProtocolError::ArgumentCount),
            Some(ANY) => Ok(None),
            Some(word) => parse_integer(word).map(Some),
        }
    }

    fn integer(&mut self) -> Result<Option<u64>, ProtocolError> {
        self.next().map(parse_integer).transpose()
    }
}

impl Wanted<'_> {
    /// Reads a word after the lease. Each word may occur only once.
    fn refine(&mut self, word: &str) -> Result<(), ProtocolError> {
        let out_of_range = ProtocolError::BadLimit;
        if word == SHARED && self.kind == Kind::Lock && self.weight.is_none() {
            self.weight = Some(Weight::ONE);
        } else if let (Some(count), Kind::Semaphore, None) =
            (word.strip_prefix(SLOTS), self.kind, self.weight)
        {
            let weight = limits::weight(parse_integer(count)?, self.limit);
            self.weight = Some(weight.ok_or(out_of_range)?);
        } else if let (Some(count), None) = (word.strip_prefix(WAITERS), self.max_waiters) {
            let max = limits::max_waiters(parse_integer(count)?);
            self.max_waiters = Some(max.ok_or(out_of_range)?);
        } else {
            return Err(ProtocolError::ArgumentCount);
        }
        Ok(())
    }
}

/// Reads an optional sign, then digits. A negative number, or one that is too large for the type,
/// becomes the maximum of the type, which no range includes.
fn parse_integer(word: &str) -> Result<u64, ProtocolError> {
    let (is_negative, digits) = match word.as_bytes() {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] | digits => (false, digits),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(ProtocolError::InvalidInteger);
    }
    let value = digits.iter().fold(0, |value: u64, digit| {
        let tens = value.saturating_mul(10);
        tens.saturating_add(u64::from(digit - b'0'))
    });
    Ok(if is_negative && value > 0 {
        u64::MAX
    } else {
        value
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_stats_and_hello_are_whole_words() {
        let (key, fence) = ("_", u64::MAX);
        for (frame, expected) in [
            (
                ["stats", "holders 18446744073709551615", " _ "],
                Ok(Request::Holder { key, fence }),
            ),
            (
                ["stats", "holders ", "_"],
                Err(ProtocolError::InvalidInteger),
            ),
            (
                ["stats", "holders 1 2", "_"],
                Err(ProtocolError::InvalidInteger),
            ),
            (["stats", "holders1", "_"], Ok(Request::Stats)),
            (["stats", "holder 1", "_"], Ok(Request::Stats)),
            (["stats", " holders 1", "_"], Ok(Request::Stats)),
            // Blanks around a key do not count, but other white space is part of it.
            (
                ["stats", "holders", " \u{2003}k\u{b}\t"],
                Ok(Request::Queues(Some("\u{2003}k\u{b}"))),
            ),
            (
                ["hello", "_", "fly adopt=1 adopt "],
                Ok(Request::Hello(Abilities::ADOPT)),
            ),
            (
                ["hello", "_", " Adopt adopts"],
                Ok(Request::Hello(Abilities::NONE)),
            ),
        ] {
            assert_eq!(parse(frame), expected, "{frame:?}");
        }
    }

    #[test]
    fn the_help_has_the_arguments_of_commands_in_their_order() {
        let (_, commands) = HELP.split_once(":\n").expect("a list of commands");
        let (commands, _) = commands.split_once("\nquit ").expect("the list ends");
        for line in commands.lines() {
            let (shown, _) = line.split_once("  ").expect("it is explained");
            let (command, names) = shown.split_once(' ').unwrap_or((shown, ""));
            let value = |name: &str| match name {
                "WAIT" => "0".to_owned(),
                "TOKEN" => "f".repeat(32),
                _ => "1".to_owned(),
            };
            let (wanted, optional) = names.split_once('[').unwrap_or((names, ""));
            let mut values: Vec<String> = wanted.split_whitespace().map(value).collect();
            let required = values.join(" ");
            assert!(parse([command, "k", &required]).is_ok(), "{shown}");
            if let Some(name) = optional.strip_suffix(']') {
                values.push(value(name));
                let all = values.join(" ");
                assert!(parse([command, "k", &all]).is_ok(), "{shown}");
            }
        }
        assert_eq!(FirstWord::parse(b"quit"), Some(FirstWord::Quit));
    }
}
