//! The law of the protocol: what one side writes, the other side reads. Over random values.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

use super::abilities::{Abilities, WORDS};
use super::limits::{lease, limit, wait_timeout, MAX_LIMIT, MAX_SECONDS};
use super::reply::{self, Grant, Reply};
use super::request::{self, Held, Request, Wanted};
use crate::wire::terms::{Kind, Limit, Refusal, Terms, Weight};
use crate::wire::token::{Fence, Salt, Token};

const VALUES: usize = 5000;

/// A small generator (splitmix64), reproducible from its seed on any machine.
struct Random(u64);

impl Random {
    /// One whose seed is printed, or that of LATCHD_TEST_SEED.
    fn new() -> Random {
        let seed = match std::env::var("LATCHD_TEST_SEED") {
            Ok(seed) => seed.parse().expect("LATCHD_TEST_SEED is a number"),
            Err(_) => RandomState::new().hash_one(0),
        };
        println!("replay with LATCHD_TEST_SEED={seed}");
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A number up to `max`, of any length, and often the lowest or the highest.
    fn up_to(&mut self, lowest: u64, max: u64) -> u64 {
        let (number, bits) = (self.next(), self.below(64));
        match self.below(8) {
            0 => lowest,
            1 => max,
            _ => (number >> bits).clamp(lowest, max),
        }
    }

    fn lease(&mut self) -> Duration {
        lease(self.up_to(1, MAX_SECONDS)).expect("in range")
    }

    fn optional_lease(&mut self) -> Option<Duration> {
        (self.below(2) == 0).then(|| self.lease())
    }

    fn wait_timeout(&mut self) -> Duration {
        wait_timeout(self.up_to(0, MAX_SECONDS)).expect("in range")
    }

    fn kind_and_limit(&mut self) -> (Kind, Limit) {
        let count = self.up_to(1, MAX_LIMIT.into());
        match self.below(2) {
            0 => (Kind::Lock, Limit::ONE),
            _ => (Kind::Semaphore, limit(count).expect("in range")),
        }
    }

    fn token(&mut self) -> Token {
        Token {
            fence: Fence(self.up_to(0, u64::MAX)),
            salt: Salt(self.up_to(0, u64::MAX)),
        }
    }

    fn grant(&mut self) -> Grant {
        Grant {
            token: self.token(),
            lease: self.lease(),
        }
    }

    /// A text of these characters, of one to 64.
    fn text(&mut self, characters: &[char]) -> String {
        let len = 1 + self.below(64);
        let count = u64::try_from(characters.len()).expect("a few");
        (0..len)
            .map(|_| characters[usize::try_from(self.below(count)).expect("a few")])
            .collect()
    }

    fn key(&mut self) -> String {
        self.text(&[
            'a', 'Z', '0', '/', '_', '\0', '\u{7f}', '\u{a0}', 'ю', '鍵', '🔑',
        ])
    }

    fn abilities(&mut self) -> Abilities {
        let mut some = |ability: Abilities| ability.when(self.below(2) == 0);
        WORDS
            .iter()
            .fold(Abilities::NONE, |all, (ability, _)| all.and(some(*ability)))
    }

    fn status(&mut self) -> Option<u8> {
        let status = self.below(512);
        u8::try_from(status).ok()
    }

    fn wanted<'a>(&mut self, key: &'a str) -> Wanted<'a> {
        let (kind, limit) = self.kind_and_limit();
        let lease = self.optional_lease();
        let weight = Weight::new(match kind {
            Kind::Lock => 1,
            Kind::Semaphore => 1 + self.below(limit.get().into()) as u32,
        });
        // Without a lease, there is nothing behind it.
        let mut has = || lease.is_some() && self.below(2) == 0;
        let (has_weight, has_max) = (has(), has());
        let max_waiters = has_max.then(|| self.below(1 << 20) as u32);
        Wanted {
            key,
            kind,
            limit,
            lease,
            weight: weight.filter(|_| has_weight),
            max_waiters,
        }
    }

    fn held(&mut self) -> Held<'static> {
        let (kind, limit) = self.kind_and_limit();
        let weight = match kind {
            Kind::Lock if self.below(2) == 0 => Weight::WHOLE,
            Kind::Lock => Weight::ONE,
            Kind::Semaphore => {
                let count = 1 + self.below(limit.get().into()) as u32;
                Weight::new(count).expect("above zero")
            }
        };
        let terms = Terms {
            kind,
            limit,
            weight,
        };
        Held {
            terms,
            numbers: [None, Some("7"), Some("0,2,1048575")][self.below(3) as usize],
            age: [None, Some(Duration::from_secs(86_400))][self.below(2) as usize],
        }
    }

    fn request<'a>(&mut self, key: &'a str, secret: &'a str) -> Request<'a> {
        let (kind, _) = self.kind_and_limit();
        let (lease, wait_timeout) = (self.optional_lease(), self.wait_timeout());
        let token = self.token();
        let wanted = self.wanted(key);
        match self.below(15) {
            0 => Request::Acquire(wanted, wait_timeout),
            1 => Request::Enqueue(wanted),
            2 => Request::Wait {
                key,
                kind,
                wait_timeout,
            },
            3 => Request::Release {
                key,
                kind,
                token,
                status: self.status(),
            },
            4 => Request::Renew {
                key,
                kind,
                token,
                lease,
            },
            5 => Request::Ping,
            6 => Request::Stats,
            7 => Request::Counters,
            8 => Request::Holder {
                key,
                fence: token.fence.0,
            },
            9 => Request::StableRef,
            10 => Request::Adopt {
                key,
                token,
                lease,
                held: match lease {
                    Some(_) => self.held(),
                    None => Held::LOCK,
                },
            },
            11 => Request::Keep {
                key,
                token,
                lease,
                status: lease.and_then(|_| self.status()),
            },
            12 => Request::Hello(self.abilities()),
            13 => Request::Histories,
            _ => Request::Auth(secret),
        }
    }

    fn reply(&mut self) -> Reply {
        match self.below(18) {
            0 => Reply::Ok,
            1 => Reply::Queued,
            2 => Reply::Timeout,
            3 => Reply::Error,
            4 => Reply::AuthFailed,
            5 => Reply::Refused(Refusal::AlreadyEnqueued),
            6 => Reply::Refused(Refusal::NotEnqueued),
            7 => Reply::Refused(Refusal::LimitMismatch),
            8 => Reply::Refused(Refusal::MaxLocks),
            9 => Reply::Refused(Refusal::MaxWaiters),
            10 => Reply::Refused(Refusal::LeaseExpired),
            11 => Reply::Refused(Refusal::Draining),
            12 => Reply::Granted(self.grant()),
            13 => Reply::Acquired(self.grant()),
            14 => Reply::Renewed(self.lease()),
            15 => match self.abilities() {
                Abilities::NONE => Reply::Ok,
                some => Reply::Hello(some, None),
            },
            16 => Reply::Broken,
            _ => Reply::Stats(format!(
                "{{{}}}",
                self.text(&['"', ':', ' ', '{', 'я', '1'])
            )),
        }
    }
}

/// The lines of a text that ends with a line's end.
fn lines(text: &[u8]) -> Vec<&str> {
    let text = std::str::from_utf8(text).expect("text");
    let text = text.strip_suffix('\n').expect("the last line has its end");
    text.split('\n').collect()
}

#[test]
fn the_server_reads_every_request_that_a_client_writes() {
    let mut random = Random::new();
    for _ in 0..VALUES {
        let (key, secret) = (random.key(), random.text(&['s', ' ', '#', 'ß', '\t']));
        let written = random.request(&key, &secret);
        let mut text = Vec::new();
        written.write(&mut text);
        let frame = lines(&text).try_into().expect("three lines");
        assert_eq!(request::parse(frame), Ok(written), "{text:?}");
    }
}

#[test]
fn the_client_reads_every_reply_that_a_server_writes() {
    let mut random = Random::new();
    for _ in 0..VALUES {
        let written = random.reply();
        let mut text = Vec::new();
        written.write(&mut text);
        let [line] = lines(&text)[..] else {
            panic!("one line: {text:?}");
        };
        assert_eq!(reply::parse(line), Some(written), "{line:?}");
    }
}
