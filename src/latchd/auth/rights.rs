//! What an auth token lets its clients do, and which right each request needs: see
//! latchd-security(7), RIGHTS. Pure: no I/O and no clock.

use std::ops::Deref;
use std::sync::Arc;

use crate::os::secret::{BREAK, SEE, USE};
use crate::wire::request::Request;

/// Stands for every key in the place of a prefix.
const EVERY_KEY: &str = "*";

/// The rights of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    sees: bool,
    uses: KeySet,
    /// The client may break grants of these keys without an admin token.
    breaks: KeySet,
}

/// Some of all possible keys.
#[derive(Clone, Debug, PartialEq, Eq)]
enum KeySet {
    None,
    Every,
    WithPrefix(Arc<[Box<str>]>),
}

/// What a request needs.
#[derive(Clone, Copy)]
enum Needed<'a> {
    Nothing,
    See,
    /// A look at one key.
    SeeKey(&'a str),
    Use(&'a str),
    Break(&'a str),
}

/// A request that its client may make.
pub struct Permitted<'r>(&'r Request<'r>);

impl<'r> Deref for Permitted<'r> {
    type Target = Request<'r>;

    fn deref(&self) -> &Request<'r> {
        self.0
    }
}

impl Rights {
    /// The rights of a client whose token has none behind it, and of every client of a server
    /// without a token.
    pub const UNLIMITED: Rights = Rights {
        sees: true,
        uses: KeySet::Every,
        breaks: KeySet::None,
    };

    /// Parses the words behind a token, of which the first names a right.
    pub fn parse(words: &str) -> Result<Rights, &'static str> {
        let (mut sees, mut uses, mut breaks) = (false, Vec::new(), Vec::new());
        let mut words = words.split_whitespace().peekable();
        while let Some(right) = words.next() {
            let prefixes = match right {
                SEE => {
                    sees = true;
                    continue;
                }
                USE => &mut uses,
                BREAK => &mut breaks,
                _ => return Err("what is behind a token begins with see, use or break"),
            };
            let count = prefixes.len();
            while let Some(prefix) = words.next_if(|word| ![SEE, USE, BREAK].contains(word)) {
                prefixes.push(prefix);
            }
            if prefixes.len() == count {
                return Err("use and break want prefixes of keys behind them, or * for every key");
            }
        }
        Ok(Rights {
            sees,
            uses: KeySet::of(&uses),
            breaks: KeySet::of(&breaks),
        })
    }

    /// Whether there may be keys that the client can claim. Without them, a session is of no use to
    /// the client, and would only take the place of another one.
    pub fn may_use_keys(&self) -> bool {
        !matches!(self.uses, KeySet::None)
    }

    /// The request, if a client with these rights may make it.
    /// `is_operator` says whether the client is an operator by other means than its auth token: it
    /// may then see and break everything.
    #[inline]
    pub fn permit<'r>(
        &self,
        request: &'r Request<'r>,
        is_operator: impl FnOnce() -> bool,
    ) -> Option<Permitted<'r>> {
        let is_allowed = match needed(request) {
            Needed::Nothing => true,
            Needed::Use(key) => self.uses.has(key),
            Needed::See => self.sees || is_operator(),
            Needed::SeeKey(key) => {
                self.sees || self.uses.has(key) || self.breaks.has(key) || is_operator()
            }
            Needed::Break(key) => self.breaks.has(key) || is_operator(),
        };
        is_allowed.then_some(Permitted(request))
    }
}

/// The table of latchd-security(7), RIGHTS.
#[inline]
fn needed<'a>(request: &Request<'a>) -> Needed<'a> {
    match *request {
        Request::Acquire(wanted, _) | Request::Enqueue(wanted) => Needed::Use(wanted.key),
        Request::Wait { key, .. }
        | Request::Release { key, .. }
        | Request::Renew { key, .. }
        | Request::Adopt { key, .. }
        | Request::Keep { key, .. } => Needed::Use(key),
        Request::Break { key, .. } => Needed::Break(key),
        Request::Queues(Some(key)) | Request::Holder { key, .. } => Needed::SeeKey(key),
        Request::Stats | Request::Queues(None) => Needed::See,
        Request::Histories | Request::Counters => Needed::See,
        Request::Hello(_)
        | Request::Ping
        | Request::StableRef
        | Request::Tag(_)
        | Request::Auth(_) => Needed::Nothing,
    }
}

impl KeySet {
    fn of(prefixes: &[&str]) -> KeySet {
        match prefixes {
            [] => KeySet::None,
            some if some.contains(&EVERY_KEY) => KeySet::Every,
            some => KeySet::WithPrefix(some.iter().map(|prefix| Box::from(*prefix)).collect()),
        }
    }

    #[inline]
    fn has(&self, key: &str) -> bool {
        match self {
            KeySet::Every => true,
            KeySet::None => false,
            KeySet::WithPrefix(prefixes) => prefixes.iter().any(|it| key.starts_with(&**it)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::request::parse;

    const TOKEN: &str = "0001a3f217b3c4d87f3c1f2b3e9a8d6e";

    fn allows(rights: &Rights, frame: [&str; 3]) -> bool {
        let request = parse(frame).expect("a request");
        rights.permit(&request, || false).is_some()
    }

    fn rights(words: &str) -> Rights {
        Rights::parse(words).expect("rights")
    }

    /// Requests about the key `ci/a`, with what each needs: nothing, to see, to see the key, to use
    /// or to break it.
    fn requests() -> [(&'static str, [String; 3]); 21] {
        let with = |argument: &str| ["", "ci/a", argument].map(str::to_owned);
        let of = |command: &str, argument: &str| {
            let [_, key, argument] = with(argument);
            [command.to_owned(), key, argument]
        };
        let line =
            |command: &str, key: &str, argument: &str| [command, key, argument].map(str::to_owned);
        [
            ("nothing", line("ping", "_", "_")),
            ("nothing", line("hello", "_", "adopt")),
            ("nothing", line("tag", "_", "me")),
            ("nothing", line("stable-ref", "_", "_")),
            ("see", line("stats", "_", "_")),
            ("see", line("stats", "holders", "_")),
            ("see", line("stats", "counters", "_")),
            ("see", line("stats", "histories", "_")),
            ("see-key", line("stats", "holders", "ci/a")),
            ("see-key", line("stats", "holders 7", "ci/a")),
            ("use", of("l", "0")),
            ("use", of("sl", "0 2")),
            ("use", of("e", "")),
            ("use", of("se", "2")),
            ("use", of("w", "0")),
            ("use", of("r", TOKEN)),
            ("use", of("sr", TOKEN)),
            ("use", of("n", TOKEN)),
            ("use", of("adopt", TOKEN)),
            ("use", of("keep", TOKEN)),
            ("break", of("break", "_")),
        ]
    }

    #[test]
    fn each_right_allows_its_requests_and_no_others() {
        for (words, allowed) in [
            ("see", &["see", "see-key"][..]),
            ("use ci/", &["see-key", "use"]),
            ("use *", &["see-key", "use"]),
            ("use cd/ ci/", &["see-key", "use"]),
            ("use cd/", &[]),
            ("use ci/a/", &[]),
            ("use CI/", &[]),
            ("break ci/", &["see-key", "break"]),
            ("break cd/ *", &["see-key", "break"]),
            ("see break cd/", &["see", "see-key"]),
            ("break cd/ use ci/ see", &["see", "see-key", "use"]),
        ] {
            let rights = rights(words);
            for (needed, [command, key, argument]) in requests() {
                let is_allowed = needed == "nothing" || allowed.contains(&needed);
                let request = [&*command, &*key, &*argument];
                assert_eq!(allows(&rights, request), is_allowed, "{words}: {request:?}");
            }
        }
    }

    #[test]
    fn a_token_without_rights_allows_all_but_breaks() {
        for (needed, [command, key, argument]) in requests() {
            let is_allowed = allows(&Rights::UNLIMITED, [&command, &key, &argument]);
            assert_eq!(is_allowed, needed != "break", "{command}");
        }
    }

    #[test]
    fn an_operator_sees_and_breaks_and_uses_what_its_token_says() {
        let rights = rights("use cd/");
        for (needed, [command, key, argument]) in requests() {
            let request = parse([&command, &key, &argument]).expect("a request");
            let is_allowed = rights.permit(&request, || true).is_some();
            assert_eq!(is_allowed, needed != "use", "{command}");
        }
    }

    #[test]
    fn words_that_are_no_rights_are_refused() {
        for words in [
            "sea", "see ci/", "use", "use see", "break", "see use", "Use ci/",
        ] {
            assert!(Rights::parse(words).is_err(), "{words}");
        }
    }
}
