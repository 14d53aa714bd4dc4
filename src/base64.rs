//! Base64 with padding: what etcd's gateway has keys and values in, and PEM certificates. Pure.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            text.push(match at <= three.len() {
                true => char::from(DIGITS[(bits >> (18 - 6 * at)) as usize & 63]),
                false => '=',
            });
        }
    }
    text
}

/// The bytes of a text; `None` if it is not in base64.
#[cfg(feature = "cluster")]
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    if text.len() % 4 != 0 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for (at, four) in (1..).zip(text.chunks(4)) {
        let is_last = at * 4 == text.len();
        let padding = four
            .iter()
            .rev()
            .take_while(|digit| **digit == b'=')
            .count();
        if padding > 2 || padding > 0 && !is_last {
            return None;
        }
        let mut bits = 0;
        for digit in &four[..4 - padding] {
            bits = bits << 6 | value(*digit)?;
        }
        bits <<= 6 * padding;
        bytes.extend(&bits.to_be_bytes()[1..4 - padding]);
    }
    Some(bytes)
}

#[cfg(feature = "cluster")]
fn value(digit: u8) -> Option<u32> {
    Some(u32::from(match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOOBAR: [&str; 7] = [
        "", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy",
    ];

    #[test]
    fn bytes_become_the_vectors_of_rfc_4648() {
        for (len, text) in FOOBAR.iter().enumerate() {
            assert_eq!(encode(&b"foobar"[..len]), *text);
        }
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn the_vectors_of_rfc_4648_become_bytes() {
        for (len, text) in FOOBAR.iter().enumerate() {
            assert_eq!(decode(text).as_deref(), Some(&b"foobar"[..len]));
        }
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn all_bytes_survive() {
        let bytes: Vec<u8> = (0..=255).rev().chain(0..=255).collect();
        for len in 0..bytes.len() {
            assert_eq!(
                decode(&encode(&bytes[..len])).as_deref(),
                Some(&bytes[..len])
            );
        }
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn what_is_not_base64_has_no_bytes() {
        for text in [
            "Z", "Zg", "Zg=", "Z===", "====", "Zg==Zg==", "Z*==", "Zm9\n", "Zm9é",
        ] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
