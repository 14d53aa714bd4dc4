//! The format of a fence file, and how to read its content after a crash. Pure: no I/O. See "Files
//! on disk" in ARCHITECTURE.md.
//!
//! The file has two slots of 32 bytes. Each new record overwrites the older of the two records, so
//! a torn write loses only a range that was never used. dflockd has the same format, so a host can
//! switch from one server to the other and back.

const MAGIC: [u8; 8] = *b"dflfnc1\n";
const SLOT_LEN: usize = 32;

/// The length of a fence file in bytes.
pub const FILE_LEN: usize = 2 * SLOT_LEN;

// Why a file cannot be used.
const FOREIGN: &str = "its content is not that of a fence file";
const CUT_SHORT: &str = "it is cut short";
const NO_RECORD: &str = "no record in it is whole";

/// What a fence file says about the fences that have been used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The sequence number of the latest record.
    pub seq: u64,
    /// No fence above this one has been used. `None` if no fence has been used at all.
    pub ceiling: Option<u64>,
    /// Whether a slot that should hold a record holds something else.
    pub is_torn: bool,
    /// Whether the file has the older format, which is a single number.
    pub is_legacy: bool,
}

/// Reads the content of a fence file. For a file that is too long, its first `FILE_LEN + 1` bytes
/// are enough. The error says why the file cannot be used.
pub fn recover(content: &[u8]) -> Result<Recovered, &'static str> {
    if content.is_empty() {
        return Ok(Recovered::default());
    }
    if content == MAGIC {
        return Err(CUT_SHORT);
    }
    if let Ok(legacy) = <[u8; 8]>::try_from(content) {
        // The older format is a single number, at the place of slot 0. It gets the sequence number
        // 1, so that the first record goes to slot 1. The old number stays until that record is
        // complete.
        return Ok(Recovered {
            seq: 1,
            ceiling: Some(u64::from_be_bytes(legacy)),
            is_torn: false,
            is_legacy: true,
        });
    }
    if !(SLOT_LEN..=FILE_LEN).contains(&content.len()) {
        let is_ours = content.len() < SLOT_LEN && content.starts_with(&MAGIC);
        return Err(if is_ours { CUT_SHORT } else { FOREIGN });
    }
    let slots = content.chunks(SLOT_LEN);
    let records: Vec<Option<(u64, u64)>> = slots
        .enumerate()
        .map(|(at, slot)| decode(slot, at))
        .collect();
    // Only the first record is alone in the file. Any later record has the previous one beside it.
    let is_cut = records.len() == 1 && records[0].is_some_and(|(seq, _)| seq != 1);
    let is_torn = is_cut || records.iter().any(Option::is_none);
    match records.into_iter().flatten().max() {
        Some((seq, ceiling)) => Ok(Recovered {
            seq,
            ceiling: Some(ceiling),
            is_torn,
            is_legacy: false,
        }),
        None if content.starts_with(&MAGIC) => Err(NO_RECORD),
        None => Err(FOREIGN),
    }
}

fn slot_of(seq: u64) -> usize {
    usize::from(seq % 2 == 0)
}

/// Returns a record and its offset in the file.
pub fn encode(seq: u64, ceiling: u64) -> ([u8; SLOT_LEN], usize) {
    let mut slot = [0; SLOT_LEN];
    slot[..8].copy_from_slice(&MAGIC);
    slot[8..16].copy_from_slice(&seq.to_be_bytes());
    slot[16..24].copy_from_slice(&ceiling.to_be_bytes());
    let sum = checksum(&slot[..24]);
    slot[24..].copy_from_slice(&sum.to_be_bytes());
    (slot, slot_of(seq) * SLOT_LEN)
}

/// The sequence number and ceiling of a slot, if its record is complete and in the right slot.
fn decode(slot: &[u8], at: usize) -> Option<(u64, u64)> {
    let slot: &[u8; SLOT_LEN] = slot.try_into().ok()?;
    let number =
        |from: usize| u64::from_be_bytes(slot[from..from + 8].try_into().expect("eight bytes"));
    let is_whole = slot[..8] == MAGIC && checksum(&slot[..24]) == number(24);
    let (seq, ceiling) = (number(8), number(16));
    (is_whole && slot_of(seq) == at).then_some((seq, ceiling))
}

/// CRC-64/GO-ISO.
pub fn checksum(bytes: &[u8]) -> u64 {
    const POLYNOMIAL: u64 = 0xd800_0000_0000_0000;
    let sum = bytes.iter().fold(u64::MAX, |sum, byte| {
        (0..8).fold(sum ^ u64::from(*byte), |sum, _| {
            if sum & 1 == 1 {
                sum >> 1 ^ POLYNOMIAL
            } else {
                sum >> 1
            }
        })
    });
    !sum
}

/// A fence file to which records with these ceilings were written, one after the other.
#[cfg(test)]
pub fn file_of(ceilings: &[u64]) -> Vec<u8> {
    let mut content = Vec::new();
    for (seq, ceiling) in (1..).zip(ceilings) {
        let (record, offset) = encode(seq, *ceiling);
        content.resize(content.len().max(offset + SLOT_LEN), 0);
        content[offset..offset + SLOT_LEN].copy_from_slice(&record);
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc_64_go_iso() {
        assert_eq!(checksum(b"123456789"), 0xb909_56c7_75a4_1001);
    }

    #[test]
    fn a_record_lies_where_its_number_says_and_looks_as_documented() {
        let content = file_of(&[7, 9]);
        assert_eq!(content.len(), 64);
        assert_eq!(&content[..8], b"dflfnc1\n");
        assert_eq!(content[8..16], 1u64.to_be_bytes());
        assert_eq!(content[16..24], 7u64.to_be_bytes());
        assert_eq!(content[24..32], checksum(&content[..24]).to_be_bytes());
        assert_eq!(content[40..48], 2u64.to_be_bytes());
    }

    #[test]
    fn the_highest_ceiling_counts_whatever_the_slot() {
        for (content, ceiling) in [
            (Vec::new(), None),
            (file_of(&[5]), Some(5)),
            (file_of(&[5, 7]), Some(7)),
            (file_of(&[5, 7, 9]), Some(9)),
            (11u64.to_be_bytes().to_vec(), Some(11)),
        ] {
            let recovered = recover(&content).expect("a usable file");
            assert_eq!((recovered.ceiling, recovered.is_torn), (ceiling, false));
        }
    }

    #[test]
    fn a_torn_write_leaves_a_ceiling_above_all_used_fences() {
        for records in 1..5u64 {
            let ceilings: Vec<u64> = (1..=records).map(|at| at * 10).collect();
            let before = file_of(&ceilings);
            let used = *ceilings.last().expect("at least one");
            let (next, offset) = encode(records + 1, used + 10);
            for written in 0..SLOT_LEN {
                let mut torn = before.clone();
                if written > 0 {
                    torn.resize(torn.len().max(offset + written), 0);
                }
                torn[offset..offset + written].copy_from_slice(&next[..written]);
                let recovered = recover(&torn).expect("the other record is whole");
                assert!(
                    recovered.ceiling >= Some(used),
                    "{records} records, {written} bytes of the next"
                );
            }
        }
    }

    #[test]
    fn a_flipped_bit_or_a_cut_leaves_the_other_record() {
        let whole = file_of(&[20, 30]);
        for bit in 0..whole.len() * 8 {
            let mut rotten = whole.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            let recovered = recover(&rotten).expect("one record is whole");
            assert!(recovered.is_torn, "bit {bit}");
            assert!(recovered.ceiling >= Some(20), "bit {bit}");
        }
        let cut = recover(&file_of(&[5, 7, 9])[..SLOT_LEN]).expect("one record is whole");
        assert!(cut.is_torn && cut.ceiling == Some(9));
    }

    #[test]
    fn content_of_another_program_is_refused() {
        let mut both_torn = file_of(&[2, 3]);
        both_torn[20] ^= 1;
        both_torn[50] ^= 1;
        assert_eq!(recover(&both_torn), Err(NO_RECORD));
        assert_eq!(recover(&MAGIC), Err(CUT_SHORT));
        assert_eq!(recover(&file_of(&[1])[..20]), Err(CUT_SHORT));
        for len in (1..100).filter(|len| *len != 8) {
            assert_eq!(recover(&vec![b'x'; len]), Err(FOREIGN), "{len} bytes");
        }
        let too_long = [&file_of(&[2, 3])[..], b"x"].concat();
        assert_eq!(recover(&too_long), Err(FOREIGN));
        // A whole record in the other's place is not ours.
        let moved = [&[0; SLOT_LEN][..], &encode(1, 5).0].concat();
        assert!(recover(&moved).is_err());
    }
}
