//! Tokens: the credential of a holder, and the fence in it. Pure: no I/O and no clock.

use std::fmt::{self, Write};
use std::hint::black_box;
use std::str::FromStr;
use std::time::Duration;

/// A number that rises with every grant, over all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence(pub u64);

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// The credential of a holder. It has a fence, which orders grants and is no secret, and a salt,
/// which makes the token unguessable.
///
/// A comparison with `==` takes a time that does not depend on the salt. The `Debug` form shows
/// only the fence. The `Display` form is the whole token, which is a secret.
///
/// ```
/// use latchd::client::Token;
///
/// # fn main() -> Result<(), latchd::client::InvalidToken> {
/// let token: Token = "00000000000003e87f3c1f2b3e9a8d6e".parse()?;
/// assert_eq!(token.fence(), 1000);
/// assert_eq!(token.to_string(), "00000000000003e87f3c1f2b3e9a8d6e");
/// assert!(!format!("{token:?}").contains("7f3c1f2b3e9a8d6e"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
pub struct Token {
    /// Orders grants.
    pub(crate) fence: Fence,
    /// 64 bits that no client can guess.
    pub(crate) salt: Salt,
}

/// The secret half of a token.
#[derive(Clone, Copy)]
pub struct Salt(pub u64);

impl Salt {
    /// Whether two salts are the same. The time that this takes does not depend on their bits.
    pub fn matches(self, other: Salt) -> bool {
        black_box(self.0 ^ other.0) == 0
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

impl Token {
    /// The number of hex digits in a token's text.
    const DIGITS: usize = 32;

    /// The token's text, as it goes over the wire: 32 lower-case hex digits, fence first.
    pub(crate) fn digits(&self) -> [u8; Token::DIGITS] {
        let number = u128::from(self.fence.0) << 64 | u128::from(self.salt.0);
        let mut digits = [0; Token::DIGITS];
        for (at, byte) in number.to_be_bytes().into_iter().enumerate() {
            digits[2 * at] = HEX[usize::from(byte >> 4)];
            digits[2 * at + 1] = HEX[usize::from(byte & 0xf)];
        }
        digits
    }

    /// Reads a token from its text.
    pub(crate) fn from_digits(digits: &[u8]) -> Option<Token> {
        if digits.len() != Token::DIGITS {
            return None;
        }
        let (fence, salt) = digits.split_at(Token::DIGITS / 2);
        Some(Token {
            fence: Fence(parse_hex(fence)?),
            salt: Salt(parse_hex(salt)?),
        })
    }

    /// The number that rises with every grant of a server, over all keys. A resource that has seen
    /// a higher fence must refuse the holder of this token.
    pub fn fence(&self) -> u64 {
        self.fence.0
    }
}

/// Reads 32 lower-case hex digits, fence first.
impl FromStr for Token {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        Token::from_digits(text.as_bytes()).ok_or(InvalidToken)
    }
}

/// The error for text that is not a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InvalidToken;

impl fmt::Display for InvalidToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token is 32 lower-case hex digits")
    }
}

impl std::error::Error for InvalidToken {}

/// What a holder is told: its token, and the length of its lease.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The credential for renewing and releasing.
    pub token: Token,
    /// The length of the lease, in whole seconds. The lease began at some time between the client's
    /// request and the reply.
    pub lease: Duration,
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grant({:?}, {:?})", self.token, self.lease)
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
        self.digits()
            .iter()
            .try_for_each(|digit| f.write_char((*digit).into()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(fence {})", self.fence)
    }
}

/// A source of fences. Each fence is higher than all fences before it.
#[cfg(feature = "programs")]
pub trait FenceSource: Send {
    /// The next fence. `None` while the source cannot be certain that a fence is new. In that time
    /// nothing is granted, and waiters keep waiting.
    fn next_fence(&mut self) -> Option<u64>;

    /// The number of fences that are reserved and unused; `None` if fences need no reservation.
    fn reserved_left(&self) -> Option<u64> {
        None
    }
}

/// For each byte, its value as a lower-case hex digit, or [`NO_DIGIT`] if it is not one.
const DIGIT_VALUES: [u8; 256] = {
    let mut values = [NO_DIGIT; 256];
    let mut value = 0;
    while value < HEX.len() {
        values[HEX[value] as usize] = value as u8;
        value += 1;
    }
    values
};
const NO_DIGIT: u8 = 0xFF;

fn parse_hex(digits: &[u8]) -> Option<u64> {
    let (mut number, mut all) = (0, 0);
    for digit in digits {
        let value = DIGIT_VALUES[usize::from(*digit)];
        number = number << 4 | u64::from(value);
        all |= value;
    }
    (all != NO_DIGIT).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "0001a3f217b3c4d87f3c1f2b3e9a8d6e";

    #[test]
    fn a_token_survives_its_text() {
        let token = TEXT.parse::<Token>().expect("well-formed");
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
            "+001a3f217b3c4d87f3c1f2b3e9a8d6e",
            "0001a3f217b3c4d87f3c1f2b3e9a8dé",
        ] {
            assert_eq!(text.parse::<Token>(), Err(InvalidToken), "{text:?}");
        }
    }

    #[test]
    fn a_token_differs_by_its_salt_alone() {
        let token = TEXT.parse::<Token>().expect("well-formed");
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
        let token = TEXT.parse::<Token>().expect("well-formed");
        assert_eq!(format!("{token:?}"), "Token(fence 1a3f217b3c4d8)");
    }
}
