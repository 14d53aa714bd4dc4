//! A search in bytes, eight at a time.

const LOWEST_BITS: u64 = u64::from_ne_bytes([0x01; 8]);
const HIGHEST_BITS: u64 = u64::from_ne_bytes([0x80; 8]);

/// Where the first of the bytes is that is one of these two.
pub(super) fn find_either(bytes: &[u8], a: u8, b: u8) -> Option<usize> {
    let (all_a, all_b) = (u64::from(a) * LOWEST_BITS, u64::from(b) * LOWEST_BITS);
    let words = bytes.chunks_exact(8);
    let rest = words.remainder();
    for (at, word) in words.enumerate() {
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        let found = zero_bytes(word ^ all_a) | zero_bytes(word ^ all_b);
        if found != 0 {
            return Some(8 * at + found.trailing_zeros() as usize / 8);
        }
    }
    let at = rest.iter().position(|byte| *byte == a || *byte == b)?;
    Some(bytes.len() - rest.len() + at)
}

/// The highest bit of the first byte that is zero, from the lowest one on. Bits of bytes after it
/// may be set as well.
fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(LOWEST_BITS) & !word & HIGHEST_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_either_byte_is_found_wherever_it_is() {
        const OTHERS: [u8; 6] = [0x00, 0x01, 0x09, 0x0B, 0x7F, 0xFE];
        for len in 0..40 {
            for at in 0..len {
                for (found, after) in [(b'\n', 0xFF), (0xFF, b'\n'), (b'\n', 0x0B)] {
                    let mut bytes: Vec<u8> = OTHERS.iter().cycle().take(len).copied().collect();
                    assert_eq!(find_either(&bytes, b'\n', 0xFF), None);
                    bytes[at] = found;
                    bytes[at + 1..].fill(after);
                    assert_eq!(find_either(&bytes, b'\n', 0xFF), Some(at), "{bytes:?}");
                }
            }
        }
    }
}
