//! The kernel's list of the locks on files. It shows a lock without a need to open the file.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::time::Instant;

use crate::sys::directory::FileId;
use crate::sys::process;

/// Whether a process other than `own` has one of `files` locked by flock(2) or fcntl(2). A lock of
/// an open file description, and one of a process in another pid namespace, have no process number
/// in the list and count as another's. Where this process may not see the list, no file is locked.
/// Fails with [`io::ErrorKind::TimedOut`] if the list is so long that the deadline passes.
pub fn has_other(files: &[FileId], own: Option<u32>, deadline: Instant) -> io::Result<bool> {
    let list = match File::open("/proc/locks") {
        Ok(list) => BufReader::new(list),
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => Ok(false),
                _ => Err(error),
            }
        }
    };
    // In the /proc of another pid namespace, the number is that of some other process.
    let own = own.filter(|_| process::is_proc_ours());
    lists_other(list, files, own, deadline)
}

fn lists_other(
    mut list: impl BufRead,
    files: &[FileId],
    own: Option<u32>,
    deadline: Instant,
) -> io::Result<bool> {
    let mut line = String::new();
    while list.read_line(&mut line)? > 0 {
        let is_others = |lock: ListedLock| own.is_none_or(|own| lock.pid != i64::from(own));
        let lock = ListedLock::parse(&line).filter(|lock| files.contains(&lock.file));
        if lock.is_some_and(is_others) {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        line.clear();
    }
    Ok(false)
}

/// A lock that a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ListedLock {
    /// -1 for a lock of an open file description, 0 for a process that is not visible here.
    pid: i64,
    file: FileId,
}

impl ListedLock {
    /// Reads a line such as `1: FLOCK  ADVISORY  WRITE 1234 fe:00:567 0 EOF`; `None` for a process
    /// that waits for a lock, which the list marks by an arrow.
    fn parse(line: &str) -> Option<ListedLock> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let is_held = words.next()? != "->";
        let pid = words.nth(2)?.parse().ok()?;
        let file = FileId::parse(words.next()?)?;
        is_held.then_some(ListedLock { pid, file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn file() -> FileId {
        FileId::of_model(rustix::fs::makedev(0xfe, 0x10), 567)
    }

    fn lists(text: &str) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        lists_other(text.as_bytes(), &[file()], Some(1234), deadline).expect("readable")
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
        let error = lists_other(line.as_bytes(), &[file()], None, Instant::now());
        let error = error.expect_err("the deadline has passed");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
