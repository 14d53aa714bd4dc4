//! The requests of the latch protocol in the bodies of HTTP requests. Pure: no I/O and no clock.

use serde_json::{Map, Value};

use super::routes::Verb;
use crate::protocol::limits::{self, MAX_LIMIT, MAX_SECONDS};
use crate::protocol::request::{Request, Wanted};
use crate::terms::{Kind, Limit};
use crate::token::Token;

/// The maximum length of a body in bytes.
pub(super) const MAX_BODY_LEN: usize = 4096;

/// A field of a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BodyField {
    pub(super) name: &'static str,
    pub(super) is_required: bool,
    pub(super) meaning: &'static str,
    /// The lowest and the highest number; `None` for a text.
    pub(super) range: Option<(u64, u64)>,
}

const fn seconds(name: &'static str, meaning: &'static str) -> BodyField {
    BodyField {
        name,
        is_required: false,
        meaning,
        range: Some((0, MAX_SECONDS)),
    }
}

const ACQUIRE_TIMEOUT: BodyField = seconds("acquire_timeout_s", "how long to wait; 0: do not wait");
const TIMEOUT: BodyField = seconds("timeout_s", "how long to wait; 0: do not wait");
const LEASE: BodyField = seconds("lease_ttl_s", "the lease; 0: the default of the server");
const LIMIT: BodyField = BodyField {
    name: "limit",
    is_required: true,
    meaning: "the number of slots",
    range: Some((1, MAX_LIMIT as u64)),
};
const TOKEN: BodyField = BodyField {
    name: "token",
    is_required: true,
    meaning: "the token of the grant",
    range: None,
};

const STATUS: BodyField = BodyField {
    name: "status",
    is_required: false,
    meaning: "the exit status of the work under the grant",
    range: Some((0, u8::MAX as u64)),
};

impl Verb {
    /// The fields of the body of a request for a key of this kind.
    pub(super) fn fields(self, kind: Kind) -> &'static [BodyField] {
        match (self, kind) {
            (Verb::Acquire, Kind::Lock) => &[ACQUIRE_TIMEOUT, LEASE],
            (Verb::Acquire, Kind::Semaphore) => &[ACQUIRE_TIMEOUT, LIMIT, LEASE],
            (Verb::Enqueue, Kind::Lock) => &[LEASE],
            (Verb::Enqueue, Kind::Semaphore) => &[LIMIT, LEASE],
            (Verb::Wait, _) => &[TIMEOUT],
            (Verb::Release, _) => &[TOKEN, STATUS],
            (Verb::Renew, _) => &[TOKEN, LEASE],
        }
    }
}

/// Why a request cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// The field is the reason.
    Malformed(String),
    /// The token has not the form of one, so no holder has it.
    NotHeld,
}

fn malformed<T>(why: impl Into<String>) -> Result<T, Unfit> {
    Err(Unfit::Malformed(why.into()))
}

/// Decodes the key in a path.
pub(super) fn key(segment: &str) -> Result<String, Unfit> {
    let (mut key, mut rest) = (Vec::new(), segment.bytes());
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            key.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        match digit().zip(digit()) {
            Some((high, low)) => key.push((16 * high + low) as u8),
            None => return malformed("the key is not percent-encoded"),
        }
    }
    match String::from_utf8(key) {
        Ok(key) if limits::is_key(&key) => Ok(key),
        _ => malformed("a key is 1-256 bytes of UTF-8 without blanks"),
    }
}

/// Makes the request that a body describes. An empty body has no fields.
pub(super) fn request<'a>(
    verb: Verb,
    kind: Kind,
    key: &'a str,
    body: &[u8],
) -> Result<Request<'a>, Unfit> {
    let body = Body::parse(body, verb.fields(kind))?;
    let lease = || Ok(limits::lease(body.number(&LEASE)?));
    let wait_timeout = |field| {
        let timeout = limits::wait_timeout(body.number(field)?);
        Ok(timeout.expect("the field has this range"))
    };
    let wanted = || {
        let limit = match kind {
            Kind::Lock => Limit::ONE,
            Kind::Semaphore => {
                let limit = limits::limit(body.number(&LIMIT)?);
                limit.expect("the field has this range")
            }
        };
        Ok(Wanted {
            key,
            kind,
            limit,
            lease: lease()?,
            weight: None,
            max_waiters: None,
        })
    };
    Ok(match verb {
        Verb::Acquire => Request::Acquire(wanted()?, wait_timeout(&ACQUIRE_TIMEOUT)?),
        Verb::Enqueue => Request::Enqueue(wanted()?),
        Verb::Wait => Request::Wait {
            key,
            kind,
            wait_timeout: wait_timeout(&TIMEOUT)?,
        },
        Verb::Release => Request::Release {
            key,
            kind,
            token: body.token()?,
            status: body.status()?,
        },
        Verb::Renew => {
            let lease = lease()?;
            Request::Renew {
                key,
                kind,
                token: body.token()?,
                lease,
            }
        }
    })
}

struct Body(Map<String, Value>);

impl Body {
    /// Parses an object with no other fields than these.
    fn parse(bytes: &[u8], fields: &[BodyField]) -> Result<Body, Unfit> {
        // The parser calls itself for what is nested, but the stack is small.
        let is_nested = bytes.iter().filter(|byte| b"{[".contains(byte)).count() > 1;
        let parsed = match bytes.trim_ascii() {
            b"" => Ok(Map::new()),
            _ if is_nested => return malformed("expected one flat object in JSON"),
            bytes => serde_json::from_slice(bytes),
        };
        let Ok(body) = parsed else {
            return malformed("expected an object in JSON");
        };
        let is_known = |name: &&String| fields.iter().any(|field| field.name == **name);
        if let Some(unknown) = body.keys().find(|name| !is_known(name)) {
            let known: Vec<&str> = fields.iter().map(|field| field.name).collect();
            return malformed(format!(
                "unknown field {unknown:?}: expected {}",
                known.join(", ")
            ));
        }
        Ok(Body(body))
    }

    /// A number in the range of the field. A field that is not required and not there is 0.
    fn number(&self, field: &BodyField) -> Result<u64, Unfit> {
        let (lowest, highest) = field.range.unwrap_or_default();
        let given = match self.0.get(field.name) {
            None | Some(Value::Null) => Some(0),
            Some(value) => value.as_u64(),
        };
        match given.filter(|number| (lowest..=highest).contains(number)) {
            Some(number) => Ok(number),
            None => malformed(format!("{}: expected {lowest}-{highest}", field.name)),
        }
    }

    /// The exit status, unless the field is not there or null.
    fn status(&self) -> Result<Option<u8>, Unfit> {
        let is_there = !matches!(self.0.get(STATUS.name), None | Some(Value::Null));
        let status = self.number(&STATUS)?;
        Ok(is_there.then_some(status as u8))
    }

    fn token(&self) -> Result<Token, Unfit> {
        match self.0.get(TOKEN.name).and_then(Value::as_str) {
            Some("") | None => malformed("token: expected the token of a grant"),
            Some(token) => token.parse().map_err(|_| Unfit::NotHeld),
        }
    }
}
