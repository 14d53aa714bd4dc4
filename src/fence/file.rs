//! Fences that rise across restarts, crashes and clock steps: ranges of fences reserved in a file
//! before any of them is used. See latchd(8), FILES.
//!
//! The file has two slots of 32 bytes. A record is written to the slot that does not hold the latest
//! one, so a torn write costs a range that was never used, and nothing else. The format is that of
//! dflockd, so that a host can move over and back.
//!
//! [`ReservedFences`] never touches the disk: it takes fences from what is reserved, and asks for
//! more when half of a range is left. [`Reserver::run`] writes, on a thread of its own.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, Sender};
use log::{error, info, warn};
use parking_lot::Mutex;
use rustix::fs::{flock, FlockOperation, OFlags};
use rustix::io::Errno;

use crate::sys::directory::sync_name;
use crate::text::{reason, Escaped};
use crate::token::FenceSource;

/// The fences reserved at a time.
pub const RANGE: u64 = 1 << 20;

/// After a failure the file is tried again so soon.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// For how long another server may still be on its way out, and how often we look.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
const LOCK_POLL: Duration = Duration::from_millis(10);

const MAGIC: [u8; 8] = *b"dflfnc1\n";
const SLOT_LEN: usize = 32;
const FILE_LEN: usize = 2 * SLOT_LEN;

/// Where records go: a file, or what a test puts in its place.
pub trait Disk: Send {
    /// Writes `bytes` at `offset`, and returns when they would survive a power cut.
    fn write_durably(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;
}

impl Disk for File {
    fn write_durably(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)?;
        self.sync_all()
    }
}

/// Why a fence file cannot be used.
#[derive(Debug)]
pub enum Unusable {
    /// The system says so.
    Io(io::Error),
    /// It is a symbolic link, which somebody else could turn elsewhere.
    Symlink,
    /// It is a directory, a device or the like.
    NotAFile,
    /// Another server has it.
    InUse,
    /// Its content is not that of a fence file.
    Foreign,
    /// It is a fence file, but no record in it is whole.
    NoRecord,
    /// It begins like a fence file and ends where no write of ours ends.
    CutShort,
    /// There are no fences left to reserve.
    Exhausted,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Io(error) => f.write_str(&reason(error)),
            Unusable::Symlink => f.write_str("it is a symbolic link"),
            Unusable::NotAFile => f.write_str("it is not a regular file"),
            Unusable::InUse => f.write_str("another server is using it"),
            Unusable::Foreign => f.write_str("its content is not that of a fence file"),
            Unusable::NoRecord => f.write_str("no record in it is whole"),
            Unusable::CutShort => f.write_str("it is cut short"),
            Unusable::Exhausted => f.write_str("its fences have come to their end"),
        }
    }
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        Unusable::Io(error)
    }
}

impl From<Errno> for Unusable {
    fn from(error: Errno) -> Self {
        Unusable::Io(error.into())
    }
}

/// What a fence file says about the fences that may have been used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Recovered {
    /// The number of the latest record.
    seq: u64,
    /// No fence above it has been used; `None` if none has at all.
    ceiling: Option<u64>,
    /// Whether a slot that should hold a record holds rubbish.
    torn: bool,
    /// Whether it has the older format, a number alone.
    legacy: bool,
}

/// Opens the fence file, makes it ours for the life of the process, and reserves the first range,
/// above whatever may have been used before and at least at `clock`. Blocks for the disk.
///
/// # Errors
///
/// Why no fence can be promised to be new.
pub fn open(
    path: &Path,
    clock: u64,
    range: u64,
) -> Result<(ReservedFences, Reserver<File>), Unusable> {
    let mut file = open_file(path)?;
    let mut content = Vec::with_capacity(FILE_LEN);
    (&mut file)
        .take(FILE_LEN as u64 + 1)
        .read_to_end(&mut content)?;
    let recovered = recover(&content)?;
    let is_torn = recovered.torn;
    let reserved = reserve_first(file, recovered, clock, range)?;
    sync_name(path)?;
    if is_torn {
        // The range of a torn record was never used; that of a rotten one was. The clock decides.
        warn!(
            "fence-file-torn path={} hint=\"relying on the clock for the lost record\"",
            Escaped(path.as_os_str().as_bytes())
        );
    }
    Ok(reserved)
}

fn reserve_first<D: Disk>(
    disk: D,
    recovered: Recovered,
    clock: u64,
    range: u64,
) -> Result<(ReservedFences, Reserver<D>), Unusable> {
    let beyond_used = match recovered.ceiling {
        Some(ceiling) => ceiling.checked_add(1).ok_or(Unusable::Exhausted)?,
        None => 0,
    };
    let first = beyond_used.max(clock);
    let (sender, requests) = bounded(1);
    let reserved = Arc::new(Mutex::new(Reserved {
        end: first,
        ran_out: false,
    }));
    let mut reserver = Reserver {
        disk,
        seq: recovered.seq,
        range,
        reserved: Arc::clone(&reserved),
        requests,
    };
    reserver.reserve()?;
    if recovered.legacy {
        // Once more, into the slot where the number stands: it would look like a torn record.
        reserver.reserve()?;
    }
    let end = reserved.lock().end;
    let fences = ReservedFences {
        next: first,
        end,
        low_water: range / 2,
        reserved,
        requests: sender,
    };
    Ok((fences, reserver))
}

fn open_file(path: &Path) -> Result<File, Unusable> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags.bits() as i32)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if Errno::from_io_error(&error) == Some(Errno::LOOP) => {
            return Err(Unusable::Symlink)
        }
        Err(error) if Errno::from_io_error(&error) == Some(Errno::ISDIR) => {
            return Err(Unusable::NotAFile)
        }
        Err(error) => return Err(error.into()),
    };
    if !file.metadata()?.is_file() {
        return Err(Unusable::NotAFile);
    }
    lock(&file)?;
    Ok(file)
}

/// Makes the file ours. A server that was killed has it until the last of its threads is gone, so whoever
/// is started in its place must have a little patience.
fn lock(file: &File) -> Result<(), Unusable> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(LOCK_POLL),
            Err(Errno::WOULDBLOCK) => return Err(Unusable::InUse),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads a fence file's content, of which at most one byte more than a whole file is given.
fn recover(content: &[u8]) -> Result<Recovered, Unusable> {
    if content.is_empty() {
        return Ok(Recovered {
            seq: 0,
            ceiling: None,
            torn: false,
            legacy: false,
        });
    }
    if content == MAGIC {
        return Err(Unusable::CutShort);
    }
    if let Ok(legacy) = <[u8; 8]>::try_from(content) {
        // The number alone, as an older format has it. Counting on from 1 keeps it in place, in slot
        // 0, until the first record stands in slot 1.
        let ceiling = u64::from_be_bytes(legacy);
        return Ok(Recovered {
            seq: 1,
            ceiling: Some(ceiling),
            torn: false,
            legacy: true,
        });
    }
    if !(SLOT_LEN..=FILE_LEN).contains(&content.len()) {
        let is_ours = content.len() < SLOT_LEN && content.starts_with(&MAGIC);
        return Err(if is_ours {
            Unusable::CutShort
        } else {
            Unusable::Foreign
        });
    }
    let slots = content.chunks(SLOT_LEN);
    let records: Vec<Option<(u64, u64)>> = slots
        .enumerate()
        .map(|(at, slot)| decode(slot, at))
        .collect();
    // The first record stands alone; any other has the one before it beside it.
    let is_cut = records.len() == 1 && records[0].is_some_and(|(seq, _)| seq != 1);
    let torn = is_cut || records.iter().any(Option::is_none);
    match records.into_iter().flatten().max() {
        Some((seq, ceiling)) => Ok(Recovered {
            seq,
            ceiling: Some(ceiling),
            torn,
            legacy: false,
        }),
        None if content.starts_with(&MAGIC) => Err(Unusable::NoRecord),
        None => Err(Unusable::Foreign),
    }
}

fn slot_of(seq: u64) -> usize {
    usize::from(seq % 2 == 0)
}

fn encode(seq: u64, ceiling: u64) -> [u8; SLOT_LEN] {
    let mut slot = [0; SLOT_LEN];
    slot[..8].copy_from_slice(&MAGIC);
    slot[8..16].copy_from_slice(&seq.to_be_bytes());
    slot[16..24].copy_from_slice(&ceiling.to_be_bytes());
    let sum = checksum(&slot[..24]);
    slot[24..].copy_from_slice(&sum.to_be_bytes());
    slot
}

/// The sequence number and ceiling of a record that is whole and in its place.
fn decode(slot: &[u8], at: usize) -> Option<(u64, u64)> {
    let slot: &[u8; SLOT_LEN] = slot.try_into().ok()?;
    let number =
        |from: usize| u64::from_be_bytes(slot[from..from + 8].try_into().expect("eight bytes"));
    let is_whole = slot[..8] == MAGIC && checksum(&slot[..24]) == number(24);
    let (seq, ceiling) = (number(8), number(16));
    (is_whole && seq > 0 && slot_of(seq) == at).then_some((seq, ceiling))
}

/// CRC-64/GO-ISO.
fn checksum(bytes: &[u8]) -> u64 {
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

/// What the fences and the reserver share.
struct Reserved {
    /// Fences below this are reserved.
    end: u64,
    /// A fence was asked for in vain since the last range was reserved.
    ran_out: bool,
}

/// Fences from ranges that are reserved already. Never blocks for the disk.
pub struct ReservedFences {
    next: u64,
    /// What was reserved when we last looked.
    end: u64,
    /// With so few left, more are asked for.
    low_water: u64,
    reserved: Arc<Mutex<Reserved>>,
    requests: Sender<()>,
}

impl FenceSource for ReservedFences {
    fn next_fence(&mut self) -> Option<u64> {
        if self.end - self.next <= self.low_water {
            self.ask_for_more();
        }
        if self.next == self.end {
            return None;
        }
        let fence = self.next;
        self.next += 1;
        Some(fence)
    }
}

impl ReservedFences {
    fn ask_for_more(&mut self) {
        let mut reserved = self.reserved.lock();
        self.end = reserved.end;
        reserved.ran_out |= self.next == self.end;
        drop(reserved);
        if self.end - self.next <= self.low_water {
            // One request at a time will do; a second one finds the channel full.
            let _ = self.requests.try_send(());
        }
    }
}

/// Reserves range after range, as they are needed.
pub struct Reserver<D> {
    disk: D,
    /// The number of the latest record.
    seq: u64,
    range: u64,
    reserved: Arc<Mutex<Reserved>>,
    requests: Receiver<()>,
}

impl<D: Disk> Reserver<D> {
    /// Reserves whenever that is asked for, and tries again while the disk refuses. Calls
    /// `tokens_are_back` whenever a fence was asked for in vain and there are some again. Returns when
    /// nobody can ask any more.
    pub fn run(mut self, tokens_are_back: impl Fn()) {
        while self.requests.recv().is_ok() {
            let mut has_failed = false;
            while let Err(why) = self.reserve() {
                if !has_failed {
                    error!("cannot-reserve-fences error=\"{why}\"");
                    has_failed = true;
                }
                thread::sleep(RETRY_AFTER);
            }
            if has_failed {
                info!("reserved-fences-again");
            }
            let ran_out = std::mem::take(&mut self.reserved.lock().ran_out);
            if ran_out {
                tokens_are_back();
            }
        }
    }

    /// Reserves the next range: on the disk first, and only then for use.
    fn reserve(&mut self) -> Result<(), Unusable> {
        let end = self.reserved.lock().end;
        let new_end = end.checked_add(self.range).ok_or(Unusable::Exhausted)?;
        let seq = self.seq.checked_add(1).ok_or(Unusable::Exhausted)?;
        let offset = (slot_of(seq) * SLOT_LEN) as u64;
        // A failure leaves the latest record alone, and is repaired by writing the same slot again.
        self.disk.write_durably(&encode(seq, new_end), offset)?;
        self.seq = seq;
        self.reserved.lock().end = new_end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{symlink, PermissionsExt};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const CLOCK: u64 = 1_000_000;

    /// A disk in memory that fails as often as it is told to.
    #[derive(Clone, Default)]
    struct Plate {
        content: Arc<Mutex<Vec<u8>>>,
        failures_left: Arc<AtomicUsize>,
        error: i32,
    }

    impl Disk for Plate {
        fn write_durably(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
            let mut content = self.content.lock();
            let offset = usize::try_from(offset).expect("a small file");
            let len = content.len().max(offset + bytes.len());
            content.resize(len, 0);
            let failing = self.failures_left.load(Ordering::SeqCst) > 0;
            // A write that fails may have written half of it.
            let written = if failing {
                bytes.len() / 2
            } else {
                bytes.len()
            };
            content[offset..offset + written].copy_from_slice(&bytes[..written]);
            if failing {
                self.failures_left.fetch_sub(1, Ordering::SeqCst);
                return Err(io::Error::from_raw_os_error(self.error));
            }
            Ok(())
        }
    }

    fn start(plate: &Plate, clock: u64, range: u64) -> (ReservedFences, Reserver<Plate>) {
        let recovered = recover(&plate.content.lock()).expect("a usable file");
        reserve_first(plate.clone(), recovered, clock, range).expect("room for a range")
    }

    /// Starts on a file with this content and returns the first fence.
    fn first_fence(content: &[u8]) -> Result<u64, Unusable> {
        let recovered = recover(content)?;
        let (mut fences, _) = reserve_first(Plate::default(), recovered, CLOCK, 10)?;
        Ok(fences.next_fence().expect("a range was reserved"))
    }

    /// A file in which the records with these ceilings were written, one after the other.
    fn file_of(ceilings: &[u64]) -> Vec<u8> {
        let mut content = Vec::new();
        for (at, ceiling) in ceilings.iter().enumerate() {
            let seq = at as u64 + 1;
            let offset = slot_of(seq) * SLOT_LEN;
            content.resize(content.len().max(offset + SLOT_LEN), 0);
            content[offset..offset + SLOT_LEN].copy_from_slice(&encode(seq, *ceiling));
        }
        content
    }

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
    fn the_first_fence_is_above_every_ceiling_and_not_below_the_clock() {
        assert_eq!(first_fence(b"").expect("empty"), CLOCK);
        assert_eq!(first_fence(&file_of(&[5])).expect("old"), CLOCK);
        assert_eq!(
            first_fence(&file_of(&[2 * CLOCK])).expect("one"),
            2 * CLOCK + 1
        );
        assert_eq!(
            first_fence(&file_of(&[2 * CLOCK, 3 * CLOCK])).expect("two"),
            3 * CLOCK + 1
        );
        assert_eq!(
            first_fence(&file_of(&[2 * CLOCK, 3 * CLOCK, 4 * CLOCK])).expect("three"),
            4 * CLOCK + 1
        );
        assert_eq!(
            first_fence(&(5 * CLOCK).to_be_bytes()).expect("legacy"),
            5 * CLOCK + 1
        );
    }

    #[test]
    fn fences_rise_over_every_restart_whatever_the_clock_does() {
        let plate = Plate::default();
        let mut last = 0;
        for (restart, clock) in [CLOCK, CLOCK / 2, 0, 3 * CLOCK, CLOCK]
            .into_iter()
            .enumerate()
        {
            let (mut fences, _) = start(&plate, clock, 100);
            for _ in 0..=restart {
                let fence = fences.next_fence().expect("a range was reserved");
                assert!(fence > last);
                last = fence;
            }
        }
    }

    #[test]
    fn every_torn_write_recovers_at_least_to_what_was_used() {
        for records in 1..5u64 {
            let ceilings: Vec<u64> = (1..=records).map(|at| at * 10 * CLOCK).collect();
            let before = file_of(&ceilings);
            let used = *ceilings.last().expect("at least one");
            let seq = records + 1;
            let offset = slot_of(seq) * SLOT_LEN;
            let next = encode(seq, used + CLOCK);
            for written in 0..SLOT_LEN {
                let mut torn = before.clone();
                if written > 0 {
                    torn.resize(torn.len().max(offset + written), 0);
                }
                torn[offset..offset + written].copy_from_slice(&next[..written]);
                let fence = first_fence(&torn).expect("the other record is whole");
                assert!(
                    fence > used,
                    "{records} records, {written} bytes of the next"
                );
            }
        }
    }

    #[test]
    fn a_flipped_bit_is_found_and_the_other_record_or_the_clock_takes_over() {
        let whole = file_of(&[2 * CLOCK, 3 * CLOCK]);
        for bit in 0..whole.len() * 8 {
            let mut rotten = whole.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            let recovered = recover(&rotten).expect("one record is whole");
            assert!(recovered.torn, "bit {bit}");
            assert!(recovered.ceiling >= Some(2 * CLOCK), "bit {bit}");
        }
    }

    #[test]
    fn what_is_no_fence_file_is_refused() {
        let mut both_torn = file_of(&[2, 3]);
        both_torn[20] ^= 1;
        both_torn[50] ^= 1;
        assert!(matches!(recover(&both_torn), Err(Unusable::NoRecord)));
        assert!(matches!(recover(&MAGIC), Err(Unusable::CutShort)));
        assert!(matches!(
            recover(&file_of(&[1])[..20]),
            Err(Unusable::CutShort)
        ));
        for len in (1..100).filter(|len| *len != 8) {
            assert!(recover(&vec![b'x'; len]).is_err(), "{len} bytes of rubbish");
        }
        // A whole record in the other's place is not ours.
        let moved = [&[0; SLOT_LEN][..], &encode(1, 5)].concat();
        assert!(recover(&moved).is_err());
    }

    #[test]
    fn the_next_range_is_asked_for_when_half_of_one_is_left() {
        let (mut fences, reserver) = start(&Plate::default(), CLOCK, 10);
        for _ in 0..5 {
            fences.next_fence().expect("in the range");
            assert!(reserver.requests.is_empty());
        }
        fences.next_fence().expect("in the range");
        assert!(!reserver.requests.is_empty());
    }

    #[test]
    fn a_refusing_disk_ends_the_fences_and_a_willing_one_brings_them_back() {
        for error in [Errno::NOSPC, Errno::IO] {
            let plate = Plate {
                error: error.raw_os_error(),
                ..Plate::default()
            };
            let (mut fences, reserver) = start(&plate, CLOCK, 10);
            plate.failures_left.store(2, Ordering::SeqCst);
            let returns = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&returns);
            let running = thread::spawn(move || {
                reserver.run(|| {
                    counted.fetch_add(1, Ordering::SeqCst);
                });
            });
            let mut used: Vec<u64> = std::iter::from_fn(|| fences.next_fence())
                .take(10)
                .collect();
            assert_eq!(used.len(), 10);
            assert_eq!(fences.next_fence(), None);
            let deadline = Instant::now() + Duration::from_secs(30);
            while returns.load(Ordering::SeqCst) == 0 {
                assert!(Instant::now() < deadline, "the tokens did not come back");
                thread::sleep(Duration::from_millis(5));
            }
            used.push(fences.next_fence().expect("reserved again"));
            assert!(used.windows(2).all(|pair| pair[0] < pair[1]));
            drop(fences);
            running.join().expect("no panic");
            // Whatever half a write has left there, the next start is above all that.
            let (mut fences, _) = start(&plate, 0, 10);
            assert!(fences.next_fence() > used.last().copied());
        }
    }

    #[test]
    fn no_fence_is_used_that_is_not_on_the_disk() {
        let plate = Plate::default();
        let (mut fences, mut reserver) = start(&plate, CLOCK, 8);
        for _ in 0..100 {
            let fence = fences.next_fence().expect("reserved in time");
            let on_disk = recover(&plate.content.lock())
                .expect("a usable file")
                .ceiling;
            assert!(Some(fence) < on_disk);
            if reserver.requests.try_recv().is_ok() {
                reserver.reserve().expect("a willing disk");
            }
        }
    }

    #[test]
    fn the_end_of_the_numbers_is_the_end_of_the_fences() {
        let (mut fences, mut reserver) = start(&Plate::default(), u64::MAX - 10, 10);
        assert_eq!(std::iter::from_fn(|| fences.next_fence()).count(), 10);
        assert!(matches!(reserver.reserve(), Err(Unusable::Exhausted)));
        for used_up in [
            file_of(&[u64::MAX]),
            u64::MAX.to_be_bytes().to_vec(),
            file_of(&[u64::MAX - 3]),
        ] {
            assert!(matches!(first_fence(&used_up), Err(Unusable::Exhausted)));
        }
    }

    fn in_directory(test: impl FnOnce(PathBuf)) {
        let directory = tempfile::tempdir().expect("a directory");
        test(directory.path().join("fences"));
    }

    #[test]
    fn the_file_is_made_for_its_owner_only_and_locked_for_the_life_of_the_server() {
        in_directory(|path| {
            let (_fences, reserver) = open(&path, CLOCK, 10).expect("a new file");
            let mode = fs::metadata(&path)
                .expect("it is there")
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600);
            assert!(matches!(open(&path, CLOCK, 10), Err(Unusable::InUse)));
            drop(reserver);
            let (mut fences, _reserver) = open(&path, 0, 10).expect("free again");
            assert!(fences.next_fence() > Some(CLOCK + 9));
        });
    }

    #[test]
    fn what_stands_in_the_files_place_is_named_and_left_alone() {
        in_directory(|path| {
            fs::create_dir(&path).expect("a directory");
            assert!(matches!(open(&path, CLOCK, 10), Err(Unusable::NotAFile)));
        });
        in_directory(|path| {
            symlink("elsewhere", &path).expect("a link");
            assert!(matches!(open(&path, CLOCK, 10), Err(Unusable::Symlink)));
        });
        in_directory(|path| {
            fs::write(&path, "my shopping list, which is longer than a slot").expect("a file");
            assert!(matches!(open(&path, CLOCK, 10), Err(Unusable::Foreign)));
            assert!(fs::read_to_string(&path)
                .expect("still there")
                .starts_with("my shopping"));
        });
        in_directory(|path| {
            let missing = path.join("deeper");
            assert!(matches!(open(&missing, CLOCK, 10), Err(Unusable::Io(_))));
        });
        assert!(matches!(
            open(Path::new("/dev/null"), CLOCK, 10),
            Err(Unusable::NotAFile)
        ));
    }
}
