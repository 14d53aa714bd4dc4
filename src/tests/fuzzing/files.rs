//! Fuzz targets for the content of files. Another program may have written a file, or a crash may
//! have damaged it.

use crate::latchd::fence::format::{self as fence_format, FILE_LEN};
use crate::latchd::state_file::format;
use crate::lfpd::uucp::names::{self, Named};
use crate::lockfile::{is_of_lock_file, LockInfo, Record};

/// Any content yields a ceiling or is refused. A write that is cut short anywhere loses no earlier
/// ceiling.
pub fn fence_file(input: &[u8]) {
    if let Ok(found) = fence_format::recover(input) {
        assert!(input.is_empty() || found.ceiling.is_some());
        assert!(input.len() <= FILE_LEN);
    }
    let mut content = Vec::new();
    let mut last = None;
    for (seq, write) in (1..).zip(input.chunks_exact(3)) {
        let ceiling = last.unwrap_or(0) + u64::from(write[0]);
        let (record, offset) = fence_format::encode(seq, ceiling);
        // A write may stop anywhere, and one of the written bytes may be wrong.
        let len = usize::from(write[1]) % (2 * record.len());
        let is_whole = len >= record.len();
        let len = len.min(record.len());
        content.resize(content.len().max(offset + len), 0);
        content[offset..offset + len].copy_from_slice(&record[..len]);
        if !is_whole && len > 0 {
            content[offset + usize::from(write[2]) % len] ^= write[2];
        }
        if !is_whole {
            let Some(last) = last else { return };
            let found = fence_format::recover(&content).map(|found| found.ceiling);
            assert!(found.is_ok_and(|found| found >= Some(last)), "{content:?}");
            return;
        }
        last = Some(ceiling);
        let found = fence_format::recover(&content).expect("a whole record");
        assert_eq!((found.seq, found.ceiling), (seq, last));
        assert!(!found.is_torn && !found.is_legacy);
    }
}

/// Any content is a state or is refused, even if its checksum is right. A written state is read
/// back unchanged, also with a part of a batch behind it.
pub fn state_file(input: &[u8]) {
    let _ = format::decode(input);
    let sum = fence_format::checksum(input);
    let snapshot = [format!("latchd-handover 4 {sum:016x}\n").as_bytes(), input].concat();
    let Ok(found) = format::decode(&snapshot) else {
        return;
    };
    let again = format::decode(format::encode(&found).as_bytes());
    assert_eq!(again.as_ref(), Ok(&found));
    // The same as a batch, and as a part of one.
    let batch = format::encode_batch(&found);
    let len = usize::try_from(sum).unwrap_or(usize::MAX) % batch.len();
    let torn = [&snapshot, &batch.as_bytes()[..len]].concat();
    assert_eq!(format::decode(&torn).as_ref(), Ok(&found));
    let whole = [&snapshot, batch.as_bytes()].concat();
    let added = format::decode(&whole).expect("both can be read");
    assert_eq!(added.grants, found.grants);
}

/// Any content can be read, and a written record is read back unchanged. Any beginning of a written
/// record is accepted as a lock file, unless it ends within the first key.
pub fn lock_file_record(input: &[u8]) {
    let record = Record::parse(input);
    let printed = record.print();
    let read = Record::parse(printed.as_bytes());
    // Control characters have become spaces, and the spaces around values are gone.
    assert_eq!(Record::parse(read.print().as_bytes()), read);
    assert!(printed.len() <= 65_536 && is_of_lock_file(printed.as_bytes()));
    let cut = usize::from(*input.first().unwrap_or(&0)) % printed.len();
    let is_cut_in_key = (1..4).contains(&cut);
    assert!(is_cut_in_key || is_of_lock_file(&printed.as_bytes()[..cut]));
    if let Some(info) = read.info() {
        let text = info.serialize();
        let again = LockInfo::parse(&text).expect("a record");
        assert_eq!((again.pid, again.timestamp), (info.pid, info.timestamp));
        assert_eq!(again.serialize(), text);
        assert!(is_of_lock_file(text.as_bytes()));
    }
    if record.info().is_some() && is_of_lock_file(input) {
        assert!(LockInfo::parse(&String::from_utf8_lossy(input)).is_ok());
    }
}

/// Any content names one process or no process, and a file that we write names our process.
pub fn uucp_record(input: &[u8]) {
    let Named::Process(pid) = names::named_in(input) else {
        return;
    };
    assert!((1..=i32::MAX.unsigned_abs()).contains(&pid));
    let content = names::content(pid);
    assert_eq!(names::named_in(content.as_bytes()), Named::Process(pid));
    // A program may not have written the rest of the number yet. The first digits must not be taken
    // for the number of another process.
    let text = input.trim_ascii();
    if text.len() > 4 && text.iter().all(u8::is_ascii_digit) {
        assert_eq!(
            std::str::from_utf8(text)
                .ok()
                .and_then(|text| text.parse().ok()),
            Some(pid)
        );
    }
}
