//! Fences that rise across restarts, crashes and clock steps. A range of fences is reserved in
//! files before any of them is used.
//!
//! [`ReservedFences`] never touches the disk. It takes fences from the reserved range, and asks for
//! more when half of it is left. The [`Reserver`] writes to the disk, on its own thread.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender};
use log::{error, info, warn};
use parking_lot::Mutex;

use crate::os::directory::{open_exclusive, sync_name};
use crate::os::text::{reason, Escaped};
use crate::wire::token::FenceSource;

#[cfg(test)]
use super::format::file_of;
use super::format::{encode, recover, Recovered, FILE_LEN};
use super::range::ReservedRange;

/// The pause after a failed write, before the next attempt.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// How long to wait for another server's lock on the file. A killed server keeps the lock until its
/// last thread has ended.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Storage for records: a file, or a simulated disk in tests.
pub trait Disk: Send {
    /// Writes `bytes` at `offset`. Returns only when they would survive a power cut.
    fn write_durably(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;
}

impl Disk for File {
    fn write_durably(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)?;
        self.sync_all()
    }
}

/// A place where the use of fences is recorded: the fence file, or another file.
pub trait FenceRecord: Send {
    /// Records that fences below `end` may be used. Returns only when the record would survive a
    /// power cut.
    fn record_end(&mut self, end: u64) -> io::Result<()>;
}

/// The fence file, locked for the life of this value.
pub struct FenceFile<D = File> {
    disk: D,
    /// The sequence number of the latest record.
    seq: u64,
    is_legacy: bool,
}

impl FenceFile {
    /// Opens and locks the fence file. Also returns a fence that is above all fences that may have
    /// been used. Blocks for the disk, and for at most one second while another server has the file
    /// locked.
    pub fn open(path: &Path) -> io::Result<(FenceFile, u64)> {
        let opened = open_exclusive(path, 0o600, LOCK_PATIENCE)?;
        let mut file = opened.ok_or_else(|| io::Error::other("another server is using it"))?;
        let mut content = Vec::with_capacity(FILE_LEN);
        (&mut file)
            .take(FILE_LEN as u64 + 1)
            .read_to_end(&mut content)?;
        let recovered = recover(&content).map_err(io::Error::other)?;
        let opened = FenceFile::on(file, recovered)?;
        sync_name(path)?;
        if recovered.is_torn {
            // If a crash has torn the record, no fence of its range was used. If the record was
            // damaged later, some may have been used, and only the clock keeps new fences above
            // them.
            warn!(
                "fence-file-torn path={} hint=\"relying on the clock for the lost record\"",
                Escaped::path(path)
            );
        }
        Ok(opened)
    }
}

impl<D: Disk> FenceFile<D> {
    fn on(disk: D, recovered: Recovered) -> io::Result<(FenceFile<D>, u64)> {
        let beyond_used = match recovered.ceiling {
            Some(ceiling) => ceiling.checked_add(1).ok_or_else(exhausted)?,
            None => 0,
        };
        let file = FenceFile {
            disk,
            seq: recovered.seq,
            is_legacy: recovered.is_legacy,
        };
        Ok((file, beyond_used))
    }

    fn write_record(&mut self, end: u64) -> io::Result<()> {
        let seq = self.seq.checked_add(1).ok_or_else(exhausted)?;
        let (record, offset) = encode(seq, end);
        // A failed write does not touch the latest record, and the next attempt writes to the same
        // slot.
        self.disk.write_durably(&record, offset as u64)?;
        self.seq = seq;
        Ok(())
    }
}

impl<D: Disk> FenceRecord for FenceFile<D> {
    fn record_end(&mut self, end: u64) -> io::Result<()> {
        self.write_record(end)?;
        if self.is_legacy {
            // The number of the older format would look like a torn record. A second record
            // overwrites it.
            self.write_record(end)?;
            self.is_legacy = false;
        }
        Ok(())
    }
}

/// Makes fences from `first` on, and reserves `range` of them in `records`, each time before any of
/// them is used.
pub fn reserve_from(
    first: u64,
    range: u64,
    records: Vec<Box<dyn FenceRecord>>,
) -> io::Result<(ReservedFences, Reserver)> {
    let (sender, requests) = bounded(1);
    let reserved = Arc::new(Mutex::new(ReservedRange::new(first, first, range)));
    let mut reserver = Reserver {
        records,
        range,
        reserved: Arc::clone(&reserved),
        requests,
    };
    reserver.reserve()?;
    let fences = ReservedFences {
        reserved,
        requests: sender,
    };
    Ok((fences, reserver))
}

/// Fences from ranges that have been reserved. Never blocks for the disk.
pub struct ReservedFences {
    reserved: Arc<Mutex<ReservedRange>>,
    requests: Sender<()>,
}

impl FenceSource for ReservedFences {
    fn next_fence(&mut self) -> Option<u64> {
        self.reserved.lock().take(|| {
            // One request at a time is enough. A second request finds the channel full.
            let _ = self.requests.try_send(());
        })
    }

    fn reserved_left(&self) -> Option<u64> {
        Some(self.reserved.lock().left())
    }
}

/// Reserves one range after another, on request.
pub struct Reserver {
    records: Vec<Box<dyn FenceRecord>>,
    range: u64,
    reserved: Arc<Mutex<ReservedRange>>,
    requests: Receiver<()>,
}

impl Reserver {
    /// Reserves a range on each request, and tries again while that fails. If fences had run out,
    /// calls `grant_owed_slots` once there are fences again. Returns when the [`ReservedFences`]
    /// are dropped.
    pub fn run(mut self, grant_owed_slots: impl Fn()) {
        while self.requests.recv().is_ok() {
            let mut has_failed = false;
            let had_run_out = loop {
                match self.reserve() {
                    Ok(had_run_out) => break had_run_out,
                    Err(error) if !has_failed => {
                        error!("cannot-reserve-fences error=\"{}\"", reason(&error));
                        has_failed = true;
                    }
                    Err(_) => {}
                }
                thread::sleep(RETRY_AFTER);
            };
            if has_failed {
                info!("reserved-fences-again");
            }
            if had_run_out {
                grant_owed_slots();
            }
        }
    }

    /// Records the fences that are reserved already in another place, and later ones there, too.
    pub fn also_record(&mut self, mut record: Box<dyn FenceRecord>) -> io::Result<()> {
        record.record_end(self.reserved.lock().end())?;
        self.records.push(record);
        Ok(())
    }

    /// Reserves the next range: first records it, and only then makes its fences available. Returns
    /// whether the fences had run out.
    fn reserve(&mut self) -> io::Result<bool> {
        let end = self.reserved.lock().end();
        let new_end = end.checked_add(self.range).ok_or_else(exhausted)?;
        for record in &mut self.records {
            record.record_end(new_end)?;
        }
        Ok(self.reserved.lock().extend(new_end))
    }
}

fn exhausted() -> io::Error {
    io::Error::other("its fences have come to their end")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use std::fs;
    use std::os::unix::fs::{symlink, PermissionsExt};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

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

    fn start(plate: &Plate, clock: u64, range: u64) -> (ReservedFences, Reserver) {
        let recovered = recover(&plate.content.lock()).expect("a usable file");
        started(FenceFile::on(plate.clone(), recovered), clock, range).expect("room for a range")
    }

    fn started<D: Disk + 'static>(
        opened: io::Result<(FenceFile<D>, u64)>,
        clock: u64,
        range: u64,
    ) -> io::Result<(ReservedFences, Reserver)> {
        let (file, beyond_used) = opened?;
        let first = beyond_used.max(clock);
        reserve_from(first, range, vec![Box::new(file)])
    }

    fn open(path: &Path, clock: u64, range: u64) -> io::Result<(ReservedFences, Reserver)> {
        started(FenceFile::open(path), clock, range)
    }

    /// Starts on a file with this content and returns the first fence.
    fn first_fence(content: &[u8]) -> io::Result<u64> {
        let recovered = recover(content).map_err(io::Error::other)?;
        let opened = FenceFile::on(Plate::default(), recovered);
        let (mut fences, _) = started(opened, CLOCK, 10)?;
        Ok(fences.next_fence().expect("a range was reserved"))
    }

    #[test]
    fn the_first_fence_is_above_all_ceilings_and_the_clock() {
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
    fn a_range_counts_as_left_as_soon_as_it_is_reserved() {
        let (mut fences, mut reserver) = start(&Plate::default(), CLOCK, 10);
        assert_eq!(fences.reserved_left(), Some(10));
        fences.next_fence().expect("in the range");
        assert_eq!(fences.reserved_left(), Some(9));
        reserver.reserve().expect("a willing disk");
        assert_eq!(fences.reserved_left(), Some(19));
    }

    #[test]
    fn fences_end_while_the_disk_refuses_and_come_back_after_it() {
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
            // Half a write may be in the file: the next start is above that, too.
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
        let why = exhausted().to_string();
        let refusal = reserver.reserve().expect_err("no number is left");
        assert_eq!(refusal.to_string(), why);
        for used_up in [
            file_of(&[u64::MAX]),
            u64::MAX.to_be_bytes().to_vec(),
            file_of(&[u64::MAX - 3]),
            encode(u64::MAX, 5).0.to_vec(),
        ] {
            let refusal = first_fence(&used_up).expect_err("no number is left");
            assert_eq!(refusal.to_string(), why);
        }
    }

    fn refusal(path: &Path) -> String {
        open(path, CLOCK, 10).err().expect("refused").to_string()
    }

    fn in_directory(test: impl FnOnce(PathBuf)) {
        let directory = tempfile::tempdir().expect("a directory");
        test(directory.path().join("fences"));
    }

    #[test]
    fn the_file_is_its_owners_alone_and_locked_while_in_use() {
        in_directory(|path| {
            let (_fences, reserver) = open(&path, CLOCK, 10).expect("a new file");
            let mode = fs::metadata(&path)
                .expect("it is there")
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600);
            assert_eq!(refusal(&path), "another server is using it");
            drop(reserver);
            let mut last = Some(CLOCK + 9);
            // Each start writes a record. From the third one on, the file is full.
            for _ in 0..3 {
                let (mut fences, _reserver) = open(&path, 0, 10).expect("free again");
                let fence = fences.next_fence();
                assert!(fence > last);
                last = fence;
            }
        });
    }

    #[test]
    fn anything_else_in_the_files_place_is_left_alone() {
        in_directory(|path| {
            fs::create_dir(&path).expect("a directory");
            assert_eq!(refusal(&path), "it is not a regular file");
        });
        in_directory(|path| {
            symlink("elsewhere", &path).expect("a link");
            assert_eq!(refusal(&path), "it is a symbolic link");
        });
        in_directory(|path| {
            let content = "my shopping list, which is longer than a slot";
            fs::write(&path, content).expect("a file");
            assert_eq!(refusal(&path), "its content is not that of a fence file");
            assert_eq!(fs::read_to_string(&path).expect("still there"), content);
        });
        in_directory(|path| {
            let too_long = [&file_of(&[2, 3])[..], b"x"].concat();
            fs::write(&path, too_long).expect("a file");
            assert_eq!(refusal(&path), "its content is not that of a fence file");
        });
        in_directory(|path| {
            let missing = format!("no such directory: {}", Escaped::path(&path));
            assert_eq!(refusal(&path.join("deeper")), missing);
        });
        assert_eq!(refusal(Path::new("/dev/null")), "it is not a regular file");
    }
}
