//! Another process that replaces the lock file between every two steps.

use std::cell::Cell;

use super::*;
use crate::lockfile::takeover::{acquire, remove, After, Creation, Files, Outcome};
use crate::sys::directory::{Entry, FileId};

/// More looks than one attempt may need.
const TOO_MANY: u64 = 1_000;

/// Whenever the lock's name is looked up, it belongs to another file, which is stale.
#[derive(Default)]
struct ReplacedFiles {
    looks: Cell<u64>,
    /// A lock on a file keeps no other process out.
    is_without_locks: bool,
}

impl ReplacedFiles {
    fn next(&self) -> u64 {
        self.looks.set(self.looks.get() + 1);
        assert!(self.looks.get() < TOO_MANY, "an attempt without an end");
        self.looks.get()
    }
}

impl Files for ReplacedFiles {
    type File = u64;

    fn creation(&self) -> io::Result<Creation> {
        if self.is_without_locks {
            Err(io::Error::other("no locks"))
        } else {
            Ok(Creation::ByLink)
        }
    }

    fn create_linked(&self, _: &RecordFor<'_>) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn create_empty(&self) -> io::Result<Option<u64>> {
        unreachable!("there are links")
    }

    fn lock_new(&self, _: &u64) -> io::Result<Option<HeldLocks>> {
        unreachable!("there is no new file")
    }

    fn write(&self, _: &u64, _: &[u8]) -> io::Result<()> {
        unreachable!("there is no new file")
    }

    fn is_mount_point(&self, _: &u64) -> bool {
        false
    }

    fn pause(&self) {}

    fn open(&self) -> io::Result<Entry<u64>> {
        Ok(Entry::File(self.next()))
    }

    fn open_to_write(&self, _: &u64) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn may_rewrite(&self, _: &u64) -> io::Result<bool> {
        Ok(false)
    }

    fn lock(&self, _: &u64, _: Duration) -> io::Result<Flock> {
        assert!(!self.is_without_locks, "the lock proves nothing");
        Ok(Flock::Acquired)
    }

    fn read(&self, _: &u64) -> io::Result<Content> {
        let bytes = format!("pid={DEAD}\n").into_bytes();
        Ok(Content::new(bytes, 0, FileId::of_model(0, 0), None))
    }

    fn id(&self, file: &u64) -> io::Result<FileId> {
        Ok(FileId::of_model(0, *file))
    }

    fn identity(&self) -> io::Result<Option<FileId>> {
        Ok(Some(FileId::of_model(0, self.next())))
    }

    fn prepare(&self, _: &[u8]) -> io::Result<u32> {
        unreachable!("the file has lost its name")
    }

    fn rewrite(&self, _: &u64, _: &[u8], _: u32) -> io::Result<()> {
        unreachable!("the file has lost its name")
    }

    fn may_remove(&self) -> io::Result<bool> {
        unreachable!("the file has lost its name")
    }

    fn remove(&self) -> io::Result<()> {
        unreachable!("the file has lost its name")
    }

    fn wait_for_earlier_judges(&self, _: After) -> bool {
        false
    }
}

#[test]
fn an_attempt_ends_although_the_file_is_replaced_for_ever() {
    let taker = Taker {
        record: &|_| Vec::new(),
        may_take: &|_| Ok(()),
    };
    let attempt = acquire(&ReplacedFiles::default(), &taker).expect("an attempt");
    assert!(matches!(
        attempt,
        Outcome::Blocked(Obstacle::Contended, None)
    ));
}

#[test]
fn a_stale_file_is_not_taken_over_where_locks_do_not_hold() {
    let files = ReplacedFiles {
        is_without_locks: true,
        ..ReplacedFiles::default()
    };
    let taker = Taker {
        record: &|_| Vec::new(),
        may_take: &|_| Ok(()),
    };
    let refused = acquire(&files, &taker).err().expect("an error");
    assert_eq!(refused.to_string(), "no locks");
}

#[test]
fn a_removal_ends_although_the_file_is_replaced_for_ever() {
    let removal = remove(&ReplacedFiles::default(), &|_, _| Ok(())).expect("a removal");
    assert!(matches!(
        removal,
        Outcome::Blocked(Obstacle::Contended, None)
    ));
}
