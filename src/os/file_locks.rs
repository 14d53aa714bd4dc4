//! The kernel's list of the locks on files. It shows a lock without a need to open the file.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::time::{Duration, Instant};

use crate::os::directory::FileId;
use crate::os::process;

/// Whether a process other than `own` has one of `files` locked by flock(2) or fcntl(2). A lock of
/// an open file description, and one of a process in another pid namespace, have no process number
/// in the list and count as another's. Where this process may not see the list, no file is locked.
/// Fails with [`io::ErrorKind::TimedOut`] if the list is so long that the deadline passes.
pub fn has_other(files: &[FileId], own: Option<u32>, deadline: Instant) -> io::Result<bool> {
    // In the /proc of another pid namespace, the number is that of some other process.
    let own = own.filter(|_| process::is_proc_ours());
    let found = find(open_list()?, files, |lock| is_of_other(lock, own), deadline);
    Ok(found?.is_some())
}

fn is_of_other(lock: &ListedLock, own: Option<u32>) -> bool {
    own.is_none_or(|own| lock.pid != i64::from(own))
}

/// Describes the process that has the file locked by flock(2). `None` if the list shows no such
/// lock: it hides those of other pid namespaces, and may take too long to read.
pub fn locker_of(file: FileId) -> Option<String> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let deadline = Instant::now() + PATIENCE;
    let look = |_| find(open_list().ok()?, &[file], |lock| lock.is_flock, deadline).ok()?;
    // The kernel can leave out a line if the list changes between two reads.
    let pid = (0..3).find_map(look)?.pid;
    // The process may have ended, and another one have inherited the lock.
    let is_alive = |pid: &u32| process::look_up(*pid).is_some_and(|process| !process.is_zombie);
    let seen = u32::try_from(pid).ok().filter(is_alive);
    let seen = seen.filter(|_| process::is_proc_ours());
    Some(seen.map_or("another process".into(), |pid| format!("pid {pid}")))
}

/// The list; empty if this process may not see it.
fn open_list() -> io::Result<Box<dyn BufRead>> {
    use io::ErrorKind::{NotFound, PermissionDenied};
    match File::open("/proc/locks") {
        Ok(list) => Ok(Box::new(BufReader::new(list))),
        Err(error) if [NotFound, PermissionDenied].contains(&error.kind()) => {
            Ok(Box::new(io::empty()))
        }
        Err(error) => Err(error),
    }
}

/// The first lock of the list that is on one of `files` and is wanted.
fn find(
    mut list: impl BufRead,
    files: &[FileId],
    is_wanted: impl Fn(&ListedLock) -> bool,
    deadline: Instant,
) -> io::Result<Option<ListedLock>> {
    let mut line = String::new();
    while list.read_line(&mut line)? > 0 {
        let lock = ListedLock::parse(&line).filter(|lock| files.contains(&lock.file));
        if let Some(lock) = lock.filter(&is_wanted) {
            return Ok(Some(lock));
        }
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        line.clear();
    }
    Ok(None)
}

/// A lock that a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ListedLock {
    /// -1 for a lock of an open file description, 0 for a process that is not visible here.
    pid: i64,
    file: FileId,
    is_flock: bool,
}

impl ListedLock {
    /// Reads a line such as `1: FLOCK  ADVISORY  WRITE 1234 fe:00:567 0 EOF`; `None` for a process
    /// that waits for a lock, which the list marks by an arrow.
    fn parse(line: &str) -> Option<ListedLock> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let kind = words.next()?;
        let is_held = kind != "->";
        let pid = words.nth(2)?.parse().ok()?;
        let file = FileId::parse(words.next()?)?;
        is_held.then_some(ListedLock {
            pid,
            file,
            is_flock: kind == "FLOCK",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileId {
        FileId::of_model(rustix::fs::makedev(0xfe, 0x10), 567)
    }

    fn lists(text: &str) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        let is_wanted = |lock: &ListedLock| is_of_other(lock, Some(1234));
        let found = find(text.as_bytes(), &[file()], is_wanted, deadline);
        found.expect("readable").is_some()
    }

    #[test]
    fn every_kind_of_lock_of_another_process_is_seen() {
        for (line, is_seen) in [
            ("1: FLOCK  ADVISORY  WRITE 77 fe:10:567 0 EOF", true),
            ("12: FLOCK  ADVISORY  READ 77 fe:10:567 0 EOF", true),
            ("1: POSIX  ADVISORY  WRITE 77 fe:10:567 0 9", true),
            ("1: OFDLCK ADVISORY  WRITE -1 fe:10:567 0 EOF", true),
            ("1: FLOCK  ADVISORY  WRITE 0 fe:10:567 0 EOF", true),
            ("1: FLOCK  ADVISORY  WRITE 1234 fe:10:567 0 EOF", false),
            ("1: FLOCK  ADVISORY  WRITE 77 fe:10:568 0 EOF", false),
            ("1: FLOCK  ADVISORY  WRITE 77 fe:11:567 0 EOF", false),
            ("1: -> FLOCK  ADVISORY  WRITE 77 fe:10:567 0 EOF", false),
            ("1:  -> POSIX  ADVISORY  WRITE 77 fe:10:567 0 EOF", false),
            ("1: POSIX  *NOINODE* WRITE 77 <none>:0 0 EOF", false),
            ("1: FLOCK  ADVISORY  WRITE 77", false),
            ("", false),
        ] {
            assert_eq!(lists(line), is_seen, "{line}");
            let own = "1: FLOCK  ADVISORY  WRITE 1234 fe:10:567 0 EOF\n";
            assert_eq!(lists(&format!("{own}{line}\n")), is_seen, "{line}");
        }
    }

    #[test]
    fn a_list_that_is_too_long_is_read_until_the_deadline() {
        let line = "1: FLOCK  ADVISORY  WRITE 77 fe:10:568 0 EOF\n";
        let error = find(line.as_bytes(), &[file()], |_| true, Instant::now());
        let error = error.expect_err("the deadline has passed");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
