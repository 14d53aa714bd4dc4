//! Whether a lock file was written before this boot. Its process number then names a process of an
//! earlier boot, and a process that has the number now does not hold the lock.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{statat, AtFlags, Dir};

use crate::sys::clock;
use crate::sys::directory::Directory;
use crate::sys::process::booted_at;

use super::lock_file::modified_at;

/// Whether a file in `directory` with this modification time was written before this boot. False
/// if the clock may have been wrong at any time since the boot, and if the system cannot tell.
pub(super) fn is_older(file_modified_at: Duration, directory: &Directory) -> bool {
    booted_at().is_some_and(|booted_at| {
        let booted_at = Duration::from_secs(booted_at);
        // A file in memory cannot be older than the boot.
        is_of_an_earlier_boot(file_modified_at, booted_at, || {
            let is_on_disk = directory.is_in_memory() == Some(false);
            is_on_disk.then(oldest_node).flatten()
        })
    })
}

/// Whether a file is from an earlier boot. All times are durations since the epoch; `booted_at` is
/// by the present clock, and `oldest_node` returns the time of the first nodes in /dev, by the
/// clock of that moment.
///
/// The present clock alone is not enough. A host without a battery for its clock may lock a device
/// before the network corrects the clock, and the file then seems to be older than the boot. So the
/// file must also be older than the first nodes in /dev. If these are later than the boot, /dev was
/// made later, as in a container, and shows nothing.
fn is_of_an_earlier_boot(
    modified_at: Duration,
    booted_at: Duration,
    oldest_node: impl FnOnce() -> Option<Duration>,
) -> bool {
    let is_before = |time: Duration| modified_at + clock::TOLERANCE < time;
    modified_at >= clock::EARLIEST
        && is_before(booted_at)
        && oldest_node()
            .is_some_and(|oldest| is_before(oldest) && oldest <= booted_at + clock::TOLERANCE)
}

/// The earliest modification time of a file in /dev; `None` if /dev is not in memory, because its
/// files are older than the boot then.
fn oldest_node() -> Option<Duration> {
    let directory = Directory::open(Path::new("/dev")).ok()?;
    if directory.is_in_memory() != Some(true) {
        return None;
    }
    let mut oldest = None;
    for entry in Dir::read_from(directory.as_fd()).ok()? {
        let entry = entry.ok()?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        // A device that has just been unplugged is not there any more.
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        if let Ok(stat) = statat(directory.as_fd(), entry.file_name(), flags) {
            let time = modified_at(&stat);
            oldest = Some(oldest.map_or(time, |oldest: Duration| oldest.min(time)));
        }
    }
    oldest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_before_both_the_boot_and_dev_is_older() {
        const MINUTE: u64 = 60;
        const DAY: u64 = 24 * 60 * MINUTE;
        let boot = clock::EARLIEST.as_secs() + 300 * DAY;
        for (what, file, oldest_node, is_older) in [
            ("a power cut", boot - DAY, Some(boot), true),
            ("just before", boot - MINUTE - 1, Some(boot), true),
            ("in the tolerance", boot - MINUTE, Some(boot), false),
            ("this boot", boot + DAY, Some(boot), false),
            ("the clock was at 1970, then set", 100, Some(3), false),
            ("so it was, file before", boot - DAY, Some(3), false),
            ("a file without a time", 0, Some(boot), false),
            (
                "unset then",
                clock::EARLIEST.as_secs() - 1,
                Some(boot),
                false,
            ),
            (
                "a clock 2 days behind, then set",
                boot - DAY,
                Some(boot - 2 * DAY),
                false,
            ),
            ("before that", boot - 3 * DAY, Some(boot - 2 * DAY), true),
            (
                "a clock ahead, then set back",
                boot - DAY,
                Some(boot + DAY),
                false,
            ),
            ("/dev of a container", boot - DAY, Some(boot + DAY), false),
            ("no /dev in memory", boot - DAY, None, false),
        ] {
            let [file, boot] = [file, boot].map(Duration::from_secs);
            let oldest_node = || oldest_node.map(Duration::from_secs);
            let found = is_of_an_earlier_boot(file, boot, oldest_node);
            assert_eq!(found, is_older, "{what}");
        }
    }
}
