//! Base64 with padding: keys and values for etcd's gateway, and passwords in HTTP. Pure.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            text.push(if at <= three.len() {
                char::from(DIGITS[(bits >> (18 - 6 * at)) as usize & 63])
            } else {
                '='
            });
        }
    }
    text
}

/// The bytes of a text; `None` if it is not in base64.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').as_bytes();
    if text.len() % 4 != 0 || text.len() - digits.len() > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for four in digits.chunks(4) {
        let mut bits = 0_u32;
        for digit in four {
            bits = bits << 6 | u32::from(value(*digit)?);
        }
        bits <<= 6 * (4 - four.len());
        bytes.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    Some(bytes)
}

fn value(digit: u8) -> Option<u8> {
    Some(match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOOBAR: [&str; 7] = [
        "", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy",
    ];

    #[test]
    fn the_vectors_of_rfc_4648_become_bytes() {
        for (len, text) in FOOBAR.iter().enumerate() {
            assert_eq!(decode(text).as_deref(), Some(&b"foobar"[..len]));
        }
    }

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

    #[test]
    fn what_is_not_base64_has_no_bytes() {
        for text in [
            "Z", "Zg", "Zg=", "Z===", "====", "Zg==Zg==", "Z*==", "Zm9\n", "Zm9é",
        ] {
            assert_eq!(decode(text), None, "{text}");
        }
    }

    #[test]
    fn bytes_become_the_vectors_of_rfc_4648() {
        for (len, text) in FOOBAR.iter().enumerate() {
            assert_eq!(encode(&b"foobar"[..len]), *text);
        }
    }
}
