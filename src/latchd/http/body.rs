//! Makes lines of the latch protocol of paths and bodies. Pure: no I/O and no clock.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::reply::HttpReply;
use super::routes::{BodyField, FieldValue, LEASE, STATUS};
use crate::wire::limits;
use crate::wire::terms::Refusal;
use crate::wire::token::Token;

/// The maximum length of a body in bytes.
pub(super) const MAX_BODY_LEN: usize = 4096;

fn malformed<T>(why: impl Into<Cow<'static, str>>) -> Result<T, HttpReply> {
    Err(HttpReply::malformed(why))
}

/// Decodes the key in a path.
pub(super) fn key(segment: &str) -> Result<String, HttpReply> {
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

/// Makes the argument of a command, which the body describes. An empty body or null has no fields.
pub(super) fn argument(fields: &[BodyField], body: &[u8]) -> Result<String, HttpReply> {
    let body = parse(body, fields)?;
    let mut words = Vec::new();
    for field in fields {
        let (name, _, value, _) = field;
        let given = body.get(*name).filter(|value| !value.is_null());
        let FieldValue::Number(lowest, highest) = value else {
            words.push(token(given)?.to_string());
            continue;
        };
        let number = given.map_or(Some(0), Value::as_u64);
        let number = number.filter(|number| (lowest..=highest).contains(&number));
        match number {
            None => return malformed(format!("{name}: expected {lowest}-{highest}")),
            Some(0) if *field == LEASE => {}
            Some(_) if *field == STATUS && given.is_none() => {}
            Some(status) if *field == STATUS => words.push(format!("status={status}")),
            Some(number) => words.push(number.to_string()),
        }
    }
    Ok(words.join(" "))
}

/// Parses an object with no other fields than these.
fn parse(bytes: &[u8], fields: &[BodyField]) -> Result<Map<String, Value>, HttpReply> {
    // The parser calls itself for what is nested, but the stack is small.
    let is_nested = bytes.iter().filter(|byte| b"{[".contains(byte)).count() > 1;
    let parsed = match bytes.trim_ascii() {
        b"" | b"null" => Ok(Map::new()),
        _ if is_nested => return malformed("expected one flat object in JSON"),
        bytes => serde_json::from_slice(bytes),
    };
    let Ok(body) = parsed else {
        return malformed("expected an object in JSON");
    };
    let is_known = |name: &&String| fields.iter().any(|field| field.0 == **name);
    if let Some(unknown) = body.keys().find(|name| !is_known(name)) {
        let known: Vec<&str> = fields.iter().map(|field| field.0).collect();
        return malformed(format!(
            "unknown field {unknown:?}: expected {}",
            known.join(", ")
        ));
    }
    Ok(body)
}

fn token(given: Option<&Value>) -> Result<Token, HttpReply> {
    match given.and_then(Value::as_str) {
        Some("") | None => malformed("token: expected the token of a grant"),
        // No holder has a token of another form.
        Some(token) => token
            .parse()
            .map_err(|_| HttpReply::refused(Refusal::NotHeld, None)),
    }
}
