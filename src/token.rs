//! Tokens: the credential of a holder, and the fence inside it. Pure.

use std::fmt;

use subtle::ConstantTimeEq;

/// A number that rises with every grant, over all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence(pub u64);

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// What a holder proves its grant with: a fence, which orders grants and is no secret, and a salt,
/// which makes the token unguessable.
///
/// It has no `==` for the salt but [`Token::matches`], and its `Debug` form hides the salt, so that
/// a token cannot appear whole in a log.
#[derive(Clone, Copy)]
pub struct Token {
    /// Orders grants.
    pub fence: Fence,
    /// 64 random bits.
    pub salt: Salt,
}

/// The secret half of a token.
#[derive(Clone, Copy)]
pub struct Salt(pub u64);

impl Salt {
    /// Whether both are the same, in a time that does not depend on their bits.
    pub fn matches(self, other: Salt) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Token {
    /// The number of hex digits in a token's text.
    pub const DIGITS: usize = 32;

    /// Reads a token from its text: 32 lower-case hex digits, fence first.
    pub fn parse(text: &str) -> Option<Token> {
        let digits = text.as_bytes();
        if digits.len() != Token::DIGITS {
            return None;
        }
        let (fence, salt) = digits.split_at(Token::DIGITS / 2);
        Some(Token {
            fence: Fence(parse_hex(fence)?),
            salt: Salt(parse_hex(salt)?),
        })
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Token) -> bool {
        self.fence == other.fence && self.salt.matches(other.salt)
    }
}

impl Eq for Token {}

/// The token's text, as it goes over the wire.
impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.fence.0, self.salt.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(fence {})", self.fence)
    }
}

/// Where fences come from: each above all before it.
pub trait FenceSource: Send {
    /// The next fence, or `None` while there is none that is certain to be new: then nothing is
    /// granted, and waiters go on waiting.
    fn next_fence(&mut self) -> Option<u64>;
}

fn parse_hex(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0, |value: u64, digit| {
        let nibble = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u64::from(nibble))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "0001a3f217b3c4d87f3c1f2b3e9a8d6e";

    #[test]
    fn a_token_survives_its_text() {
        let token = Token::parse(TEXT).expect("well-formed");
        assert_eq!(token.fence, Fence(0x0001_a3f2_17b3_c4d8));
        assert_eq!(token.to_string(), TEXT);
    }

    #[test]
    fn only_32_lower_case_hex_digits_are_a_token() {
        for text in [
            "",
            "0",
            &TEXT[1..],
            &TEXT.to_uppercase(),
            &format!("{TEXT}0"),
        ] {
            assert_eq!(Token::parse(text), None, "{text:?}");
        }
        assert_eq!(Token::parse("+001a3f217b3c4d87f3c1f2b3e9a8d6e"), None);
        assert_eq!(Token::parse("0001a3f217b3c4d87f3c1f2b3e9a8dé"), None);
    }

    #[test]
    fn a_token_differs_by_its_salt_alone() {
        let token = Token::parse(TEXT).expect("well-formed");
        for bit in 0..64 {
            let forged = Token {
                salt: Salt(token.salt.0 ^ 1 << bit),
                ..token
            };
            assert_ne!(token, forged);
        }
    }

    #[test]
    fn debug_output_hides_the_salt() {
        let token = Token::parse(TEXT).expect("well-formed");
        assert_eq!(format!("{token:?}"), "Token(fence 1a3f217b3c4d8)");
    }
}
