//! Templates: bytes with holes, which are filled when they are written and filled by what is read.

use std::collections::HashMap;

use super::difference;
use crate::support::{fence, shown};

/// What is known by name: tokens, and what else a transcript has bound.
pub type Known = HashMap<String, String>;

pub struct Template {
    pub source: String,
    parts: Vec<Part>,
}

enum Part {
    Bytes(Vec<u8>),
    /// Something new, to be known by this name.
    Binds(Kind, String),
    /// What is known by this name.
    Bound(String),
    /// The fence of the token that is known by this name, as a decimal number.
    Fence(String),
    Integer(Option<(u64, u64)>),
    Number(Option<(f64, f64)>),
    /// Whatever comes before the next bytes of the template.
    Any,
}

#[derive(Clone, Copy)]
enum Kind {
    Token,
    Word,
}

impl Template {
    pub fn parse(source: &str) -> Result<Template, String> {
        let mut parts = Vec::new();
        let mut rest = source.as_bytes();
        let mut bytes = Vec::new();
        while let Some(&byte) = rest.first() {
            if byte == b'<' {
                let end = rest
                    .iter()
                    .position(|&byte| byte == b'>')
                    .ok_or("`<` without `>`")?;
                parts.push(Part::Bytes(std::mem::take(&mut bytes)));
                parts.push(parse_hole(&String::from_utf8_lossy(&rest[1..end]))?);
                rest = &rest[end + 1..];
            } else {
                rest = parse_byte(rest, &mut bytes)?;
            }
        }
        parts.push(Part::Bytes(bytes));
        Ok(Template {
            source: source.to_owned(),
            parts,
        })
    }

    /// The same with anything around it.
    pub fn anywhere(source: &str) -> Result<Template, String> {
        Template::parse(&format!("<*>{source}<*>"))
    }

    /// The bytes to write.
    pub fn filled_in(&self, known: &Known) -> Result<Vec<u8>, String> {
        let mut filled = Vec::new();
        for part in &self.parts {
            match part {
                Part::Bytes(bytes) => filled.extend_from_slice(bytes),
                Part::Bound(name) => filled.extend_from_slice(look_up(known, name)?.as_bytes()),
                Part::Fence(name) => {
                    filled.extend_from_slice(fence(look_up(known, name)?).to_string().as_bytes());
                }
                _ => return Err("this can only be read, not written".to_owned()),
            }
        }
        Ok(filled)
    }

    /// The text to write.
    pub fn text(&self, known: &Known) -> Result<String, String> {
        String::from_utf8(self.filled_in(known)?).map_err(|_| "this must be UTF-8".to_owned())
    }

    /// Compares a reply with this template and binds what is new in it.
    pub fn matches(&self, reply: &str, known: &mut Known) -> Result<(), String> {
        let mismatch = || {
            difference(
                &format!("the line \"{}\"", self.source),
                &format!("the line \"{}\"", shown(reply.as_bytes())),
            )
        };
        let mut rest = reply.as_bytes();
        for (index, part) in self.parts.iter().enumerate() {
            let next = match self.parts.get(index + 1) {
                Some(Part::Bytes(bytes)) => bytes,
                _ => &[][..],
            };
            let length = part.length(rest, next, known)?.ok_or_else(mismatch)?;
            if let Part::Binds(_, name) = part {
                let bound = String::from_utf8_lossy(&rest[..length]);
                known.insert(name.clone(), bound.into_owned());
            }
            rest = &rest[length..];
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(mismatch())
        }
    }

    /// The names that this template binds to tokens.
    pub fn tokens(&self) -> impl Iterator<Item = &String> {
        self.parts.iter().filter_map(|part| match part {
            Part::Binds(Kind::Token, name) => Some(name),
            _ => None,
        })
    }
}

impl Part {
    /// How much of `text` this part is, if `text` begins with it and goes on with `next`.
    fn length(&self, text: &[u8], next: &[u8], known: &Known) -> Result<Option<usize>, String> {
        let as_long_as = |bytes: &[u8]| text.starts_with(bytes).then_some(bytes.len());
        let is_of_number = |byte: u8| byte.is_ascii_digit() || byte == b'.';
        Ok(match self {
            Part::Bytes(bytes) => as_long_as(bytes),
            Part::Bound(name) => as_long_as(look_up(known, name)?.as_bytes()),
            Part::Fence(name) => as_long_as(fence(look_up(known, name)?).to_string().as_bytes()),
            Part::Binds(Kind::Token, _) => text.get(..32).filter(|it| is_token(it)).map(|_| 32),
            Part::Binds(Kind::Word, _) => Some(leading(text, is_of_word)).filter(|len| *len > 0),
            Part::Integer(range) => number_within(text, |byte| byte.is_ascii_digit(), *range),
            Part::Number(range) => number_within(text, is_of_number, *range),
            Part::Any if next.is_empty() => Some(text.len()),
            Part::Any => text.windows(next.len()).position(|bytes| bytes == next),
        })
    }
}

fn look_up<'a>(known: &'a Known, name: &str) -> Result<&'a String, String> {
    known.get(name).ok_or(format!("<{name}> is not bound"))
}

/// The length of the number at the front of `text`, if it is within `range`.
fn number_within<N: std::str::FromStr + PartialOrd>(
    text: &[u8],
    belongs: impl Fn(u8) -> bool,
    range: Option<(N, N)>,
) -> Option<usize> {
    let length = leading(text, belongs);
    let value: N = String::from_utf8_lossy(&text[..length]).parse().ok()?;
    let is_within = range.is_none_or(|(least, most)| least <= value && value <= most);
    is_within.then_some(length)
}

/// Reads one byte, escape or repetition from the front of `source`; gives what is left.
fn parse_byte<'a>(source: &'a [u8], bytes: &mut Vec<u8>) -> Result<&'a [u8], String> {
    match source {
        [b'\\', b'x', digits @ ..] if digits.len() >= 2 => {
            let (digits, rest) = digits.split_at(2);
            let digits = String::from_utf8_lossy(digits);
            bytes.push(
                u8::from_str_radix(&digits, 16).map_err(|_| format!("no byte: \\x{digits}"))?,
            );
            Ok(rest)
        }
        [b'\\', letter, rest @ ..] => {
            bytes.push(match letter {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'0' => 0,
                b'\\' | b'{' | b'}' | b'<' => *letter,
                _ => return Err(format!("no such escape: \\{}", char::from(*letter))),
            });
            Ok(rest)
        }
        // Braces of JSON are not followed by a digit.
        [b'{', digit, ..] if digit.is_ascii_digit() => {
            let end = source
                .iter()
                .position(|&byte| byte == b'}')
                .ok_or("`{` without `}`")?;
            let inside = String::from_utf8_lossy(&source[1..end]).into_owned();
            let (times, mut repeated) = inside
                .split_once('*')
                .map(|(n, r)| (n, r.as_bytes()))
                .ok_or("no `*`")?;
            let mut once = Vec::new();
            while !repeated.is_empty() {
                repeated = parse_byte(repeated, &mut once)?;
            }
            bytes.extend(once.repeat(times.parse().map_err(|_| format!("no number: {times}"))?));
            Ok(&source[end + 1..])
        }
        [byte, rest @ ..] => {
            bytes.push(*byte);
            Ok(rest)
        }
        [] => Ok(source),
    }
}

fn parse_hole(hole: &str) -> Result<Part, String> {
    Ok(match hole {
        "*" => Part::Any,
        "int" => Part::Integer(None),
        "number" => Part::Number(None),
        "version" => Part::Bytes(env!("CARGO_PKG_VERSION").into()),
        _ => match hole.split_once([':', ' ']) {
            None => Part::Bound(hole.to_owned()),
            Some(("token", name)) => Part::Binds(Kind::Token, name.to_owned()),
            Some(("word", name)) => Part::Binds(Kind::Word, name.to_owned()),
            Some(("fence", name)) => Part::Fence(name.to_owned()),
            Some(("int", range)) => Part::Integer(Some(parse_range(range)?)),
            Some(("number", range)) => Part::Number(Some(parse_range(range)?)),
            Some(_) => return Err(format!("no such hole: <{hole}>")),
        },
    })
}

fn parse_range<N: std::str::FromStr>(range: &str) -> Result<(N, N), String> {
    let (least, most) = range.split_once("..").ok_or("no range")?;
    let parse = |text: &str| text.parse().map_err(|_| format!("no number: {text}"));
    Ok((parse(least)?, parse(most)?))
}

fn is_token(bytes: &[u8]) -> bool {
    bytes
        .iter()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

fn leading(bytes: &[u8], belongs: impl Fn(u8) -> bool) -> usize {
    bytes
        .iter()
        .position(|&byte| !belongs(byte))
        .unwrap_or(bytes.len())
}
